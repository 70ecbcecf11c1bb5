"""The check for Macs runs anywhere; here on a tiny model, and on one whose streamed weights are wrong."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("mlx_lm", reason="mlx-lm is not installed: pip install 'edgespec[mlx]'")
pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
pytest.importorskip("gguf", reason="gguf is not installed: pip install 'edgespec[convert]'")

import mapped_device
from edgespec.backends.llamacpp.backend import LlamaBackend
from edgespec.backends.llamacpp.memory import planning
from edgespec.backends.llamacpp.memory.gpu import about_pools
from edgespec.backends.mlx import backend as engine
from edgespec.backends.mlx import memory
from edgespec.backends.mlx.streaming import SlotStore
from mixture_files import write_mixture
from mlx_models import FAMILIES, write_model

from benchmarks import mac
from edgespec.loading.timed_pass import Pass
from edgespec.machine.measurements import OFF, recall, remember
from edgespec.machine.this_machine import Gpu
from edgespec.weights import experts
from edgespec.weights import plan as residency


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny weights count as large."""
    monkeypatch.setattr(residency, "SMALL", 64)
    monkeypatch.setattr(memory, "ALIGNED", 0)
    monkeypatch.setattr(experts, "HUGE", 1)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model", FAMILIES["llama-3"] | {"num_hidden_layers": 7})


def test_all_checks_hold_here(llama: Path) -> None:
    told: list[str] = []
    before = engine.plan_memory, SlotStore.read
    found = mac.check_all([llama], passes=10, quick=True, say=told.append)
    assert [one.line() for one in found] == told
    assert [one.good for one in found if one.good is not None] == [True, True]
    assert any("layers streamed, reads 0 ms later: 0 of " in line for line in told)
    assert any("pass over 1 nodes" in line for line in told)
    assert (engine.plan_memory, SlotStore.read) == before


def test_passes_are_timed_by_engine(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mac, "SIZES", (1, 4))
    gguf = write_mixture(tmp_path / "model.gguf", "mixtral")
    found = mac.pass_seconds(llama, str(gguf))
    assert {name: list(passes) for name, passes in found.items()} == {"llama.cpp, processor": [1, 4], "MLX": [1, 4]}
    assert min(seconds for passes in found.values() for seconds in passes.values()) > 0
    assert list(mac.pass_seconds(llama, str(tmp_path / "none.gguf"))) == ["MLX"]


def test_chosen_experts_are_compared_too(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", FAMILIES["mixtral"] | {"num_hidden_layers": 7})
    found = mac.check_equality(folder, 0.6, 0.0, 3)
    assert found.good
    assert "experts read as they are chosen" in found.name


def test_a_wrong_bit_is_found(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SlotStore, "read", lambda *arguments: None)
    found = mac.check_equality(llama, 0.6, 0.0, 3)
    assert found.good is False
    assert found.line().startswith("FAILED")


@pytest.mark.exhaustive
def test_the_faster_engine_is_remembered_only_of_a_large_model(
    smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from edgespec.measure.predictor import about_engines

    monkeypatch.delenv(OFF, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = write_model(tmp_path / "model", FAMILIES["llama-3"] | {"num_hidden_layers": 7})
    found = mac.compare_engines(str(smollm2), folder, 0.6, nodes=8)
    assert "llamacpp" in found.text
    assert "not remembered" in found.text
    assert recall(about_engines(), dict) is None
    monkeypatch.setattr(mac, "LARGE", 1)
    mac.compare_engines(str(smollm2), folder, 0.6, nodes=8)
    assert recall(about_engines(), dict).keys() == {"llamacpp", "mlx"}


@pytest.mark.parametrize(
    ("child", "line", "remembered"),
    [
        ("print('[true, \"as fast\"]')", "ok      llama.cpp, pool of experts, GPU: as fast", True),
        ("print('[null, \"slower\"]')", "        llama.cpp, pool of experts, GPU: slower", False),
        ("print('[false, \"wrong\"]')", "FAILED  llama.cpp, pool of experts, GPU: wrong", False),
        (
            "import os; os.write(2, b'GGML_ASSERT'); os.abort()",
            "FAILED  llama.cpp, pool of experts, GPU: the process ended: GGML_ASSERT",
            False,
        ),
    ],
)
def test_only_a_pool_of_a_gpu_that_has_passed_is_the_default(
    child: str, line: str, remembered: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(OFF, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(mac, "own_values", lambda path: {"embedding_length": 1, "block_count": 1})
    monkeypatch.setattr(mac, "write_mixture", lambda *given: None)
    monkeypatch.setattr(mac, "WAYS", {mac.ON_GPU: mac.WAYS[mac.ON_GPU]})
    monkeypatch.setattr(mac, "PROGRAM", child)
    remember(about_pools(), not remembered)
    told = list[str]()
    mac.check_llama("model.gguf", tmp_path, told.append)
    assert told == [line]
    assert recall(about_pools(), bool) is remembered


@pytest.mark.skipif(sys.platform != "linux", reason="memory is locked and dropped on Linux only")
@pytest.mark.parametrize(
    ("gpu", "processor", "good", "end"),
    [
        (1.0, 1.0, True, "a pass takes 1.000 s, the processor's 1.000 s: the GPU's pool is the default"),
        (2.0, 1.0, None, "a pass takes 2.000 s, the processor's 1.000 s: the processor's pool stays the default"),
    ],
)
def test_a_gpus_pool_is_compared_with_the_processors(
    gpu: float, processor: float, good: bool | None, end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GPU is this processor by another name."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model, order = write_mixture(tmp_path / "mixture.gguf", "mixtral"), list[bool]()
    metal, real = Gpu("MAPPED", True, 1 << 40), mac.this_machine

    def seconds(backend: LlamaBackend, nodes: int) -> Pass:
        order.append(bool(backend.plan.on_devices))
        return Pass(nodes, gpu if order[-1] else processor, 0.0)

    mapped_device.found(monkeypatch)
    for module in (mac, planning):
        monkeypatch.setattr(module, "pool_reserve", lambda room: 0)
    monkeypatch.setattr("edgespec.machine.memory.private_memory", lambda: 0)
    monkeypatch.setattr(mac, "this_machine", lambda *given: replace(real(*given), platform="darwin"))
    monkeypatch.setattr(mac.llamacpp, "gpus", lambda device: [metal])
    monkeypatch.setattr(mac, "time_pass", seconds)
    found, text = mac.compare(str(model), -1, True, 2)
    assert found is good, text
    assert text.endswith(end)
    assert "best tokens of 2 passes differ by 0, at most 1.5 is right" in text
    assert order == [True, False] * 2
    for lead, right in ((1.4, good), (1.6, False)):  # of the processor's best token, where the GPU has another
        numbers = {False: np.array([[1.0, 1.0 + lead], [9.0, 1.0]]), True: np.array([[9.0, 1.0], [2.0, 1.0]])}
        monkeypatch.setattr(mac, "rows", lambda backend, passes, numbers=numbers: [numbers[bool(backend.plan)]])
        assert mac.compare(str(model), -1, True, 2)[0] is right
    metal = replace(metal, free=1)
    found, text = mac.compare(str(model), -1, True, 2)
    assert (found, text.partition(";")[0]) == (False, "the processor computed the experts")
    monkeypatch.setattr(mac.llamacpp, "gpus", lambda device: [])
    assert mac.compare(str(model), -1, True, 2) == (None, "this llama.cpp has no GPU")


@pytest.mark.exhaustive
def test_llama_cpps_ways_to_hold_weights_are_compared(
    smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = mac.check_llama(str(smollm2), Path(), lambda line: None, passes=2)
    assert [one.name for one in found] == [f"llama.cpp, {name}" for name in mac.WAYS]
    assert [one.good for one in found] == [True] * 4 + [None]
    assert "layers streamed, 0 of 0 experts in pools; logits of 2 passes differ by 0, at most 0" in found[0].text
    monkeypatch.setattr(mac, "PROGRAM", "import sys; sys.exit('Metal has ended it')")
    (tmp_path / "mixture.gguf").unlink()
    [ended, *_] = mac.check_llama(str(smollm2), tmp_path, lambda line: None)
    assert ended.line() == "FAILED  llama.cpp, slots, processor: the process ended: Metal has ended it"
