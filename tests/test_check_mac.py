"""The check for Macs runs anywhere; here on a tiny model, and on one whose streamed weights are wrong."""

from pathlib import Path

import pytest

pytest.importorskip("mlx_lm", reason="mlx-lm is not installed: pip install 'edgespec[mlx]'")

from edgespec.backends.mlx import backend as engine
from edgespec.backends.mlx import memory
from edgespec.backends.mlx.streaming import SlotStore
from mlx_models import FAMILIES, write_model

from benchmarks import mac
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
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    from edgespec.machine.measurements import OFF, recall
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


@pytest.mark.exhaustive
def test_llama_cpps_ways_to_hold_weights_are_compared(
    smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    found = mac.check_llama(str(smollm2), tmp_path, lambda line: None, passes=2)
    assert [one.name for one in found] == [f"llama.cpp, {name}" for name in mac.WAYS]
    assert [one.good for one in found] == [True] * 4
    assert "layers streamed, 0 of 0 experts in pools; logits of 2 passes differ by 0, at most 0" in found[0].text
    monkeypatch.setattr(mac, "PROGRAM", "import sys; sys.exit('Metal has ended it')")
    (tmp_path / "mixture.gguf").unlink()
    [ended, *_] = mac.check_llama(str(smollm2), tmp_path, lambda line: None)
    assert ended.line() == "FAILED  llama.cpp, slots, processor: the process ended: Metal has ended it"
