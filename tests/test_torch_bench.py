"""The GPU benchmark's logic, at a tiny shape on the CPU: what it measures, not how quick it is."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs PyTorch: pip install 'edgespec[torch]'")

from edgespec.backends.torch.backend import MIN_NODES
from edgespec.backends.torch.loading import cache_shape, work_bytes
from edgespec.backends.torch.offload import BUFFERS, block_bytes
from hf_models import torch
from test_torch import Recorder, needs_bitsandbytes

from edgespec.backend import Capabilities
from edgespec.measure.gpu import CONTEXT, HOST_SHARE, REPEATS, Row, fitting_layers, measure, random_model

SCRIPT = Path(__file__).parent.parent / "scripts" / "bench-gpu"
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
    model, context = random_model(TINY, dtype, CPU), CONTEXT + max(SIZES)
    limits = Capabilities(context, MIN_NODES, MIN_NODES, MIN_NODES, 0.0)
    cache = math.prod(cache_shape(model.config, context + MIN_NODES)) * model.dtype.itemsize
    return cache + work_bytes(model, limits, max(SIZES) + 1) + (2 + BUFFERS) * block_bytes(model.model.layers[0])


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
        assert row.seconds > 0
    assert len(engines) == 1  # the two small models for the computation's cost copy nothing
    fills = sum(kind == "fill" for kind, _ in engines[0].events)
    passes = 1 + 1 + len(SIZES) * (1 + REPEATS)  # the probe, the text, and every size with a pass to warm up
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


def test_the_ratio_is_to_the_slower_part():
    assert Row(1, 3.0, 1.0, 2.0).ratio == 1.5
    assert Row(1, 3.0, 4.0, 2.0).ratio == 0.75


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu():
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, env=os.environ | {"TERM": "dumb"})
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("bench-gpu needs a CUDA GPU")
    assert done.stderr.count("\n") == 1
