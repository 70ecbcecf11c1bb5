"""How many layers go to a GPU that llama.cpp reports: a fake list of devices; and the override, on a real model."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")

from edgespec.backends.llamacpp import gpu, memory
from edgespec.backends.llamacpp.backend import load
from edgespec.backends.llamacpp.files import load_model
from edgespec.backends.llamacpp.gpu import RESERVE, Device, auto_layers, check_spans, devices, gpu_spans, wired

from edgespec.backend import Work, prefill
from edgespec.errors import UsageError
from edgespec.weights.residency import Plan, Tensor, make_plan

MIB = 1 << 20
LAYER, OUTPUT = 100 * MIB, 50 * MIB


def tensors(order: list[int] | None = None, output: bool = True) -> list[Tensor]:
    """Ten layers, the embedding and the output, in the order of a file."""
    names = [("token_embd.weight", OUTPUT), *[("output.weight", OUTPUT)] * output, ("output_norm.weight", 0)]
    names += [(f"blk.{i}.{part}.weight", LAYER // 2) for i in order or range(10) for part in ("attn", "ffn")]
    found, start = [], 4096
    for name, size in names:
        found.append(Tensor(name, 0, start, size))
        start += size
    return found


def own(room: int) -> list[Device]:
    """A GPU with so much memory for layers."""
    return [Device("GPU0", False, int((room + RESERVE) / 0.95) + 100)]


def fits(kept: int) -> Plan | None:
    return None


def test_no_gpu() -> None:
    assert auto_layers([], tensors(), 0, 0, fits) == 0
    assert devices() == [] or all(device.free > 0 for device in devices())


@pytest.mark.parametrize(
    ("room", "layers"),
    [
        (10 * LAYER + OUTPUT, -1),
        (10 * LAYER + OUTPUT - MIB, 10),  # the output and nine layers
        (3 * LAYER + OUTPUT, 4),
        (LAYER + OUTPUT, 2),
        (LAYER, 0),  # not the output alone
        (-MIB, 0),
    ],
)
def test_as_many_as_fit(room: int, layers: int) -> None:
    assert auto_layers(own(room), tensors(), 0, 0, fits) == layers
    assert auto_layers(own(room + 70 * MIB), tensors(), 70 * MIB, 0, fits) == layers  # beside caches and buffers
    assert auto_layers(own(room), tensors(output=False), 0, 0, fits) == layers  # the embedding is the output


def test_the_draft_first_if_it_is_small() -> None:
    room = 4 * LAYER + OUTPUT
    assert auto_layers(own(room), tensors(), 0, LAYER, fits) == 4
    assert auto_layers(own(room), tensors(), 0, 4 * LAYER, fits) == 5


def test_a_layer_is_not_divided_among_gpus() -> None:
    room = 5 * LAYER + OUTPUT
    two = [Device(f"GPU{i}", False, int((room // 2 + RESERVE) / 0.95) + 100) for i in range(2)]
    assert auto_layers(two, tensors(), 0, 0, fits) == 5


def plans(memory: int, order: list[int] | None = None) -> Any:
    return lambda kept: make_plan(tensors(order), memory, 0, kept=kept)


def test_a_mac_where_everything_fits() -> None:
    total = 10 * LAYER + 2 * OUTPUT
    shared = [Device("Metal", True, total)]
    assert auto_layers(shared, tensors(), 0, 0, plans(2 * total)) == -1
    assert auto_layers(shared, tensors(), MIB, 0, plans(2 * total)) == 0  # not what the GPU can hold


def test_a_mac_that_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last layers, as far as that does not make more be read; no streamed layer is mapped by the GPU."""
    shared = [Device("Metal", True, 20 * LAYER)]
    room = 9 * LAYER
    assert auto_layers(shared, tensors(), 0, 0, plans(room)) == 0  # elsewhere such a GPU is left alone
    monkeypatch.setattr(sys, "platform", "darwin")
    layers = auto_layers(shared, tensors(), 0, 0, plans(room))
    assert 1 < layers <= 8
    plan = plans(room)(layers - 1)
    assert wired(plan, gpu_spans(tensors(), layers - 1)) == 0
    assert plan.streamed_bytes <= plans(room)(0).streamed_bytes * (1 + 1 / 32)
    few = [Device("Metal", True, 2 * LAYER)]
    assert auto_layers(few, tensors(), 0, 0, plans(room)) <= 3
    assert auto_layers(shared, tensors(), 0, 0, plans(LAYER)) == 0  # it does not run at all, which others say


def test_layers_out_of_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the GPU maps, from its first weight to its last, must not hold what is streamed."""
    order = [9, 0, 1, 2, 3, 4, 5, 6, 7, 8]
    monkeypatch.setattr(sys, "platform", "darwin")
    layers = auto_layers([Device("Metal", True, 20 * LAYER)], tensors(order), 0, 0, plans(9 * LAYER, order))
    assert layers <= 2
    plan = plans(9 * LAYER, order)(3)
    assert wired(plan, gpu_spans(tensors(order), 3)) > 0
    with pytest.raises(UsageError, match="with --gpu-layers 4 the GPU would map streamed layers") as caught:
        check_spans(plan, tensors(order), 4)
    assert "\n" not in str(caught.value)
    check_spans(plans(9 * LAYER)(3), tensors(), 4)
    check_spans(plan, tensors(order), 0)


def test_the_output_may_lie_in_front() -> None:
    """It is left to the processor, so it is not part of the span."""
    (span,) = gpu_spans(tensors(), 2)
    assert span.size == 2 * LAYER
    assert gpu_spans(tensors(), 0) == []


def logits(backend: Any) -> np.ndarray:
    session = backend.open()
    prefill(backend, session, [5, 6, 7])
    found = backend.forward([Work(session, np.array([8, 9], np.int32), np.array([-1, 0], np.int32), np.arange(2))])
    return np.stack([found[0].row(node) for node in range(2)])


def test_the_override_is_llamacpps(smollm2_tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """llama.cpp takes the structure as it is made here."""
    assert gpu.without_output() == {} or sys.platform == "darwin"
    assert gpu.overrides()  # made once
    gpu.ggml()  # found by its name on this system
    monkeypatch.setattr(sys, "platform", "darwin")
    options = gpu.without_output()
    monkeypatch.undo()
    assert options["tensor_buft_overrides"]
    model = load_model(str(smollm2_tiny), **options, n_gpu_layers=3)
    assert model
    memory.llama_cpp.llama_model_free(model)


def test_auto_reaches_the_engine(smollm2_tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that this build does not have: llama.cpp computes on the processor all the same, and so the same."""
    plain = load(str(smollm2_tiny), context_length=64)
    assert plain.computing["gpu_layers"] == 0 or devices()
    expected = logits(plain)
    plain.close()
    monkeypatch.setattr(memory, "devices", lambda: [Device("GPU0", False, 1 << 40)])
    backend = load(str(smollm2_tiny), context_length=64)
    assert backend.computing["gpu_layers"] == -1
    np.testing.assert_array_equal(logits(backend), expected)
    backend.close()
    monkeypatch.setattr(memory, "devices", lambda: [Device("GPU0", False, 1 << 20)])
    backend = load(str(smollm2_tiny), context_length=64)
    assert backend.computing["gpu_layers"] == 0
    backend.close()


@pytest.mark.parametrize(("value", "code"), [("auto", 0), ("0", 0), ("many", 2)])
def test_the_option(run: Any, smollm2_tiny: Path, value: str, code: int) -> None:
    status, _, err = run("run", str(smollm2_tiny), "hi", "--raw", "-n", "2", "--ctx", "64", "--gpu-layers", value)
    assert status == code
    assert ("--gpu-layers is 'many', but must be a number, -1 for all layers, or auto" in err) == (code == 2)
