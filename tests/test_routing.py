"""Routers of made-up mixtures, and what they are made of."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
pytest.importorskip("gguf", reason="gguf is not installed: pip install 'edgespec[convert]'")

from gguf_files import small_llama

from benchmarks import routers as module
from benchmarks.made_up_mixture import Experts, write_mixture
from benchmarks.routers import record, routers
from edgespec.errors import UsageError

PROMPTS = ["hello you there", "another text of many words is here", "a third"]


def unseen(done: int, total: int) -> None:
    pass


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_llama(tmp_path_factory.mktemp("dense") / "dense.gguf", layers=3)


@pytest.fixture(scope="module")
def made(dense: Path) -> Any:
    """Routers of eight experts."""
    return lambda: routers(record(str(dense), PROMPTS, 24, unseen), 8, unseen)


@pytest.fixture(scope="module")
def mixture(dense: Path, made: Any) -> Path:
    out = dense.with_name("mixture.gguf")
    write_mixture(dense, out, Experts(8, 3, 64), made, unseen)
    return out


@pytest.mark.exhaustive
def test_the_same_prompts_make_the_same_file_again(dense: Path, made: Any, mixture: Path, tmp_path: Path) -> None:
    again = tmp_path / "again.gguf"
    write_mixture(dense, again, Experts(8, 3, 64), made, unseen)
    assert again.read_bytes() == mixture.read_bytes()


def test_what_is_recorded_is_what_routers_read(made: Any, mixture: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, rows = record(str(mixture), PROMPTS, 12, unseen), np.stack(list(made()))
    monkeypatch.setattr(module, "INPUTS", "ffn_moe_logits")
    for inputs, scores in zip(found, record(str(mixture), PROMPTS, 12, unseen), strict=True):
        assert inputs.shape[1:] == (3, 256)
        assert np.einsum("tlw,lew->tle", inputs, rows) == pytest.approx(scores, abs=1e-3)


def test_prompts_that_are_too_long_are_left_out(dense: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LONGEST", 20)
    assert [len(text) <= 21 for text in record(str(dense), PROMPTS, 1, unseen)] == [True, True]


def test_a_router_follows_what_two_layers_share() -> None:
    """It ignores the mean, and hardly follows noise of each layer."""
    random = np.random.default_rng(0)
    shared = np.repeat(random.normal(size=(600, 1, 32)), 2, axis=1) @ random.normal(size=(32, 96))
    states = np.float32(shared + random.normal(scale=2, size=(600, 2, 96)) + random.normal(scale=9, size=(2, 96)))

    def foreseen(rows: Any) -> float:
        """Share of choices that are the same of the layer before's input."""
        before, chosen = (np.argsort(-(states[:, layer] @ rows.T), axis=1)[:, :4] for layer in (0, 1))
        return float((before[:, :, None] == chosen[:, None]).any(2).mean())

    _, second = routers([states], 32, unseen)
    assert np.abs(second @ states[:, 1].mean(0)).max() < 0.01
    assert foreseen(second) > 0.7
    assert foreseen(random.normal(size=second.shape)) < 0.5


def test_few_tokens_make_no_router() -> None:
    for states in ([], [np.zeros((16, 2, 8), np.float32)]):
        with pytest.raises(UsageError, match="8 experts need 16 tokens of text, but there are"):
            list(routers(states, 8, unseen))
