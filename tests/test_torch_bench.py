"""The GPU benchmark's logic, at a tiny shape on the CPU: what it measures, not how quick it is."""

import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from importlib import import_module
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs PyTorch: pip install 'edgespec[torch]'")

from cards import GIB
from cards import cards as cards
from edgespec.backends.torch.offload import HostCopies, block_bytes
from hf_models import torch
from test_torch import Recorder, needs_bitsandbytes

from benchmarks import gpu_program, gpu_steps
from benchmarks.gpu import HOST_SHARE, fitting_layers, measure, measures, memory_for, random_model
from benchmarks.gpu_program import STEPS, command, run_steps
from benchmarks.to_try import GPU
from edgespec.cli.commands import main

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
ROOT = Path(__file__).parents[1]
CPU = torch.device("cpu")
SIZES = [1, 8]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Short texts, on one thread."""
    monkeypatch.setattr("benchmarks.gpu.TEXT", 40)
    for name, value in {"CELLS": (5,), "TIMED": 2, "TINY": TINY, "STREAMED": {}, "STAY": 2}.items():
        monkeypatch.setattr(gpu_steps, name, value)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def memory_for_two(dtype):
    """Bytes of a device on which two of the layers can stay."""
    return memory_for(TINY, dtype, SIZES, 2)


def measured(dtype, **options):
    """The figures of all passes, and the copy engines."""
    engines, told = [], {}

    def copies(device, buffers):
        engines.append(Recorder(device, buffers))
        return engines[-1]

    def tell(name, value, line):
        told[name] = value

    memory = options.pop("memory", None) or memory_for_two(dtype)
    measure(tell, TINY, dtype, CPU, memory, SIZES, copies=copies, **{"host_bytes": 2**40} | options)
    assert json.loads(json.dumps(told)) == told
    assert [told[f"{row['nodes']} nodes"] for row in told["all"]["rows"]] == told["all"]["rows"]
    return told["all"], engines


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("nf4", marks=needs_bitsandbytes)])
def test_a_report(dtype):
    report, engines = measured(dtype)
    assert (report["layers"], report["full_layers"]) == (7, 7)
    assert report["streamed_layers"] == 5
    assert report["layer_bytes"] == block_bytes(random_model(TINY, dtype, CPU).model.layers[0])
    assert report["streamed_bytes"] == report["streamed_layers"] * report["layer_bytes"]
    assert [row["nodes"] for row in report["rows"]] == SIZES
    for row in report["rows"]:
        assert row["copy_seconds"] == report["streamed_bytes"] / report["bandwidth"] > 0
        assert row["ratio"] == row["seconds"] / max(row["copy_seconds"], row["compute_seconds"])
    assert len(engines) == 1  # the two small models for the computation's cost copy nothing
    fills = sum(kind == "fill" for kind, _ in engines[0].events)
    passes = 2 + len(SIZES) * 3  # the probe, the text, and every size with a pass to warm up
    assert fills == 2 + 5 * passes  # the first two are filled before there is a pass


def test_fewer_layers_where_the_host_is_small():
    layer = block_bytes(random_model(TINY, "bfloat16", CPU).model.layers[0])
    report, _ = measured("bfloat16", host_bytes=int(4.5 * layer / HOST_SHARE))
    assert (report["layers"], report["full_layers"]) == (4, 7)
    assert fitting_layers(TINY, layer, 0) == 2
    assert fitting_layers(TINY, layer, 2**50) == 7


def test_everything_resident():
    report, engines = measured("bfloat16", memory=2**40)
    assert report["streamed_bytes"] == report["streamed_layers"] == 0
    assert engines == []


def test_the_deadline():
    report, _ = measured("bfloat16", deadline=0.0)
    assert len(report["rows"]) == 1


def test_what_wide_trees_cost_is_answered(monkeypatch):
    monkeypatch.setattr("benchmarks.gpu.WIDE", SIZES[-1])
    monkeypatch.setattr("benchmarks.gpu.time_trees", lambda backend, session, nodes: 1.0 if nodes == 1 else 1.5)
    told = {}
    measure(lambda name, *what: told.update({name: what}), TINY, "bfloat16", CPU, memory_for_two("bfloat16"), SIZES,
            copies=HostCopies, host_bytes=2**40)  # fmt: skip
    [[seen, means], line] = told["512 draft tokens"]
    assert (seen, means) == ("1.50 (bfloat16)", GPU["512 draft tokens"].then)
    assert line.endswith(f"{seen}; {means}")


def test_a_model_on_two_cards(cards):
    """It is compared with the same model on one."""
    cards(GIB << 3)
    assert "two GPUs" not in measures(torch.device("cuda:0"), HostCopies)
    cards(GIB << 3, GIB << 3)
    found = measures(torch.device("cuda:0"), HostCopies)["two GPUs"]()
    assert found.value > 0
    assert found.text.endswith("; 0 of 4096 logits differ")


@pytest.mark.parametrize(
    "step", [pytest.param(one, marks=needs_bitsandbytes) if one == "nf4" else one for one in STEPS]
)
def test_each_step_on_a_processor(step, monkeypatch):
    """What it tells at once, and what it is asked: no step needs more than its options."""
    quick = {"capped scores", "equal sizes"}
    monkeypatch.setattr("benchmarks.gpu.measures", lambda *of: {k: v for k, v in measures(*of).items() if k in quick})
    told = []
    getattr(gpu_steps, step)(lambda *found: told.append(found), device="cpu", memory=1 << 30, seconds=60.0)
    assert told
    assert len({name for name, _, _ in told}) == len(told)
    assert json.loads(json.dumps([value for _, value, _ in told]))
    assert not [line for _, _, line in told if "WRONG" in line or "failed" in line]


def test_a_tree_that_is_not_its_chains_is_called_wrong(monkeypatch):
    rows, told = gpu_steps.rows_of_tree, []
    monkeypatch.setattr(gpu_steps, "rows_of_tree", lambda *of: rows(*of)[::-1])
    gpu_steps.trees(lambda *found: told.append(found), device="cpu", memory=1 << 30, seconds=60.0)
    assert "5 cells, math: WRONG: tree 1.0" in "".join(line for _, _, line in told)


def test_the_script_starts_without_packages_and_takes_those_of_wheels(tmp_path):
    """edgespec is that of its checkout; of the wheels this one ends the program."""
    (tmp_path / "scripts" / "wheels").mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "bench-gpu", tmp_path / "scripts")
    for name in ("edgespec", "scripts/benchmarks"):
        (tmp_path / name).symlink_to(ROOT / name)
    with zipfile.ZipFile(tmp_path / "scripts" / "wheels" / "click-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("click.py", "import edgespec; print(*edgespec.__path__); raise SystemExit")
    ran = subprocess.run([sys.executable, "-IS", tmp_path / "scripts" / "bench-gpu"], capture_output=True, text=True)
    assert (ran.stdout, ran.stderr) == (f"{tmp_path / 'edgespec'} {tmp_path}\n", "")


def good(tell, **options):
    tell("options", sorted(options), "all is well")


def bad(tell, **options):
    tell("half", 1, "so far")
    raise ValueError("no such kernel\nand more")


def crash(tell, **options):
    os._exit(3)


def hang(tell, **options):
    time.sleep(60)


@pytest.mark.skipif(sys.platform != "linux", reason="processes are forks")
def test_a_step_that_fails_ends_no_other(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(STEPS, "hang", 0.2)
    out = tmp_path / "out.json"
    assert run_steps(["bad", "crash", "hang", "good"], {"device": "cpu"}, out, __name__, method="fork") == [
        "bad",
        "crash",
        "hang",
    ]
    assert json.loads(out.read_text()) == {
        "bad": {"half": 1, "failed": "ValueError: no such kernel"},
        "crash": {"failed": "the process ended with code 3"},
        "hang": {"failed": "stopped after 0 s"},
        "good": {"options": ["device", "seconds"]},
    }
    assert "all is well" in capsys.readouterr().out


@pytest.mark.skipif(sys.platform != "linux", reason="processes are forks")
def test_after_all_seconds_no_step_is_begun(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_program, "SECONDS", -1)
    assert run_steps(["good"], {}, tmp_path / "out.json", __name__, method="fork") == ["good"]
    assert json.loads((tmp_path / "out.json").read_text()) == {"good": {"failed": "no time is left"}}


@pytest.mark.skipif(torch.cuda.is_available() or sys.platform != "linux", reason="there is a GPU, or no fork")
def test_without_a_gpu_the_first_step_is_the_last(tmp_path, capfd, monkeypatch):
    begun = import_module("benchmarks.steps").run_apart
    monkeypatch.setattr(gpu_program, "run_apart", lambda *of, **more: begun(*of, method="fork"))
    with pytest.raises(SystemExit) as ended:
        main(command, ["--json", str(tmp_path / "out.json"), "nf4"])
    shown = capfd.readouterr()
    assert ended.value.code == 1
    assert "bench-gpu needs a CUDA GPU, and this PyTorch" in shown.out
    assert shown.err == "edgespec: not every step has ended well: card\n"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--gpu-memory", "much"], "--gpu-memory: 'much' is not a size"),
        (["bf16"], "'bf16' is not one of 'card', 'link'"),
    ],
)
def test_a_wrong_argument_is_refused(arguments, says, capsys):
    with pytest.raises(SystemExit) as ended:
        main(command, arguments)
    assert ended.value.code == 2
    assert says in capsys.readouterr().err
