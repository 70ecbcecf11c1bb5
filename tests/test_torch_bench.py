"""The GPU benchmark's logic, at a tiny shape on the CPU: what it measures, not how quick it is."""

import json

import pytest

pytest.importorskip("torch", reason="needs PyTorch: pip install 'edgespec[torch]'")

from cards import GIB
from cards import cards as cards
from edgespec.backends.torch.offload import HostCopies, block_bytes
from hf_models import torch
from test_torch import Recorder, needs_bitsandbytes

from benchmarks.gpu import HOST_SHARE, fitting_layers, measure, measures, memory_for, random_model

TINY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 1024,
}
CPU = torch.device("cpu")
SIZES = [1, 8]


def memory_for_two(dtype):
    """Bytes of a device on which two of the layers can stay."""
    return memory_for(TINY, dtype, SIZES, 2)


def measured(dtype, **options):
    engines = []

    def copies(device, buffers):
        engines.append(Recorder(device, buffers))
        return engines[-1]

    memory = options.pop("memory", None) or memory_for_two(dtype)
    report = measure(TINY, dtype, CPU, memory, SIZES, copies=copies, **{"host_bytes": 2**40} | options)
    return report, engines


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("nf4", marks=needs_bitsandbytes)])
def test_a_report(dtype):
    report, engines = measured(dtype)
    assert (report.layers, report.full_layers) == (7, 7)
    assert report.streamed_layers == 5
    assert report.layer_bytes == block_bytes(random_model(TINY, dtype, CPU).model.layers[0])
    assert report.streamed_bytes == report.streamed_layers * report.layer_bytes
    assert [row.nodes for row in report.rows] == SIZES
    for row in report.rows:
        assert row.copy_seconds == report.streamed_bytes / report.bandwidth > 0
        assert row.ratio == row.seconds / max(row.copy_seconds, row.compute_seconds)
    assert len(engines) == 1  # the two small models for the computation's cost copy nothing
    fills = sum(kind == "fill" for kind, _ in engines[0].events)
    passes = 1 + len(SIZES) * 3  # the probe, and every size with a pass to warm up
    assert fills == 2 + 5 * passes  # the first two are filled before there is a pass
    assert json.loads(json.dumps(report.as_dict()))["rows"][1]["ratio"] == report.rows[1].ratio


def test_fewer_layers_where_the_host_is_small():
    layer = block_bytes(random_model(TINY, "bfloat16", CPU).model.layers[0])
    report, _ = measured("bfloat16", host_bytes=int(4.5 * layer / HOST_SHARE))
    assert (report.layers, report.full_layers) == (4, 7)
    assert fitting_layers(TINY, layer, 0) == 2
    assert fitting_layers(TINY, layer, 2**50) == 7


def test_everything_resident():
    report, engines = measured("bfloat16", memory=2**40)
    assert report.streamed_bytes == report.streamed_layers == 0
    assert engines == []


def test_the_deadline():
    report, _ = measured("bfloat16", deadline=0.0)
    assert len(report.rows) == 1


def test_a_model_on_two_cards(cards):
    """It is compared with the same model on one."""
    cards(GIB << 3)
    assert "two GPUs" not in measures(torch.device("cuda:0"), HostCopies)
    cards(GIB << 3, GIB << 3)
    found = measures(torch.device("cuda:0"), HostCopies)["two GPUs"]()
    assert found.value > 0
    assert found.text.endswith("; 0 of 4096 logits differ")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu(bench, tmp_path):
    code, out, err = bench("gpu", "--json", tmp_path / "figures.json")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "bench gpu needs a CUDA GPU" in err


def test_the_program_on_a_processor(bench, tmp_path):
    """Its own check: every table, with a tiny shape."""
    figures = tmp_path / "figures.json"
    code, _, said = bench("gpu", "--device", "cpu", "--dtype", "bfloat16", "--json", figures)
    assert code == 0, said
    (memory,) = json.loads(figures.read_text())["formats"]
    assert memory["streamed_layers"] > 0
    assert [row["nodes"] for row in memory["rows"]] == [1, 64]
    assert list(tmp_path.iterdir()) == [figures]


def test_what_is_left_out_when_time_is_up(bench, tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.commands.gpu.SECONDS", -1)
    _, shown, _ = bench("gpu", "--device", "cpu", "--dtype", "bfloat16", "--json", tmp_path / "out")
    assert shown.startswith("bfloat16: not measured, time is up\n")
