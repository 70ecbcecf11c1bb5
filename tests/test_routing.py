"""Routers of made-up mixtures, recorded routing, and its statistics."""

import gzip
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
pytest.importorskip("gguf", reason="gguf is not installed: pip install 'edgespec[convert]'")

from gguf_files import small_llama

from benchmarks import routing
from benchmarks.made_up_mixture import Experts, write_mixture
from benchmarks.routers import routers
from benchmarks.routing import CHOSEN, INPUTS, foreseen, read_trace, record, statistics
from edgespec.errors import ModelError, UsageError

PROMPTS = ["hello you there", "another text of many words is here", "a third"]


def unseen(done: int, total: int) -> None:
    pass


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_llama(tmp_path_factory.mktemp("dense") / "dense.gguf", layers=3)


@pytest.fixture(scope="module")
def made(dense: Path) -> Any:
    """Routers of eight experts."""
    return lambda: routers([text.values(INPUTS) for text in record(str(dense), PROMPTS, 24, unseen)], 8, unseen)


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


def test_what_is_recorded_is_what_routers_read_and_choose(
    made: Any, mixture: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where texts of different lengths share passes."""
    together, rows = record(str(mixture), PROMPTS, 12, unseen), list(made())
    monkeypatch.setattr(routing, "TOGETHER", 1)
    for text, alone in zip(together, record(str(mixture), PROMPTS, 12, unseen), strict=True):
        inputs, chosen = text.values(INPUTS), text.values(CHOSEN)
        assert inputs.shape == (text.prompt + len(text.answer(CHOSEN)), 3, 256)
        assert inputs == pytest.approx(alone.values(INPUTS), abs=1e-4)
        scores = np.einsum("tlw,lew->tle", inputs, np.stack(rows))
        least = np.take_along_axis(scores, chosen, 2).min(2)
        assert (np.sum(scores > least[:, :, None] + 1e-3, axis=2) < 3).all()
        assert len(np.unique(chosen)) > 3


def test_prompts_that_are_too_long_are_left_out(dense: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "LONGEST", 20)
    assert [text.prompt <= 20 for text in record(str(dense), PROMPTS, 1, unseen)] == [True, True]


def test_a_router_follows_what_two_layers_share(mixture: Path) -> None:
    """It ignores the mean, and hardly follows noise of each layer."""
    random = np.random.default_rng(0)
    shared = np.repeat(random.normal(size=(600, 1, 32)), 2, axis=1) @ random.normal(size=(32, 96))
    states = np.float32(shared + random.normal(scale=2, size=(600, 2, 96)) + random.normal(scale=9, size=(2, 96)))
    first, second = routers([states], 32, unseen)
    assert np.abs(second @ states[:, 1].mean(0)).max() < 0.01
    text = routing.Text(0, [], [{INPUTS: states, CHOSEN: np.argsort(-(states @ second.T), axis=2)[:, :, :4]}])
    assert float(foreseen([text], [first, second]).removesuffix(" %")) > 70
    others = random.normal(size=second.shape)
    text.parts[0][CHOSEN] = np.argsort(-(states @ others.T), axis=2)[:, :, :4]
    assert float(foreseen([text], [first, others]).removesuffix(" %")) < 50


def test_few_tokens_make_no_router() -> None:
    for states in ([], [np.zeros((16, 2, 8), np.float32)]):
        with pytest.raises(UsageError, match="8 experts need 16 tokens of text, but there are"):
            list(routers(states, 8, unseen))


def test_statistics_of_a_text() -> None:
    """One layer, two of eight experts: a token keeps one expert of the token before, and takes the next."""
    text = np.array([[[i % 8, (i + 1) % 8]] for i in range(32)])
    found = statistics([text], 8)
    assert found["shared with the token before"] == "50.0 %"
    assert found["chosen by 2 tokens (p)"] == f"37.5 % ({np.log2(np.log(1 - 3 / 8) / np.log(1 - 2 / 8)):.2f})"
    assert found["chosen by 4 tokens (p)"].startswith("62.5 %")
    assert found["choices of the top quarter"] == "25.0 %"
    assert found["hits, 2/8 in memory"] == "50.0 %"
    still = statistics([text[:1].repeat(32, axis=0)], 8)
    assert still["choices of the top quarter"] == still["hits, 2/8 in memory"] == "100.0 %"
    assert still["chosen by 16 tokens (p)"] == "25.0 % (0.00)"


def trace(path: Path, rows: list[tuple[int, ...]]) -> Path:
    lines = ["# route_trace v1", "# n_layer=2 n_expert=8 n_expert_used=1", "turn,phase,step,layer,slot,expert,weight"]
    path.write_bytes(gzip.compress("\n".join([*lines, *(",".join(map(str, row)) for row in rows)]).encode()))
    return path


def test_a_trace(tmp_path: Path) -> None:
    prompt, made = (0, 0, 0, 0, 0, 7, 1.0), [(0, 1, i // 2, i % 2, 0, i, 1.0) for i in range(4)]
    texts, count = read_trace(trace(tmp_path / "t.csv.gz", [prompt, *made]))
    assert (count, [text.tolist() for text in texts]) == (8, [[[[0], [1]], [[2], [3]]]])


@pytest.mark.parametrize("rows", [[], [(0, 1, 0, 0, 0, 3, 1.0)], [(0, 1, 0, 0, 0, 8, 1.0)] * 2, [(0,)]])
def test_a_damaged_trace_is_one_line(rows: Any, tmp_path: Path) -> None:
    path = trace(tmp_path / "t.csv.gz", rows)
    for data in (path.read_bytes(), b"no gzip"):
        path.write_bytes(data)
        with pytest.raises(ModelError, match=r"is no gzipped route trace, or damaged$"):
            read_trace(path)


def test_a_table_of_a_mixture_and_a_trace(
    bench: Any, mixture: Path, dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "hello you there"}\n')
    rows = [(0, 1, i // 2, i % 2, 0, i % 8, 1.0) for i in range(120)]
    path = trace(tmp_path / "t.csv.gz", rows)
    code, shown, _ = bench("routes", path, mixture, "--prompts", prompts, "-n", 26, "--draft", dense)
    assert code == 0
    for found in ("mixture", "chosen by 25 tokens (p)", "hits, 1/8 in memory", "foreseen by the layer before"):
        assert found in shown
    assert re.search(r"drafted by the small model .* 100.0 %", shown)  # it is the mixture's dense model
    for given, said in (
        ((mixture,), "answers prompts: give --prompts"),
        ((dense, "--prompts", prompts), "is no mixture of experts"),
        ((mixture, "--prompts", prompts), "no answer has 128 tokens"),
    ):
        monkeypatch.setattr(routing, "LONGEST", 1)
        code, _, error = bench("routes", *given)
        assert code in (1, 2)
        assert said in error.splitlines()[-1]
