"""Perplexity, against the definition."""

import gzip
from pathlib import Path

import numpy as np
import pytest
from reference.backend import ReferenceBackend, random_model

from benchmarks.commands.perplexity import perplexity
from edgespec.errors import UsageError
from edgespec.loop.backend import Work
from edgespec.loop.engines import find_engine


def test_a_text_in_two_pieces() -> None:
    backend = ReferenceBackend(random_model(3, vocab_size=12))
    ids = [1, 5, 2, 7, 7, 3, 0]
    losses = []
    for piece in (ids[:4], ids[4:]):
        for end in range(1, len(piece)):
            session, nodes = backend.open(), np.arange(end, dtype=np.int32)
            work = Work(session, np.array(piece[:end], np.int32), nodes - 1, nodes[-1:])
            row = backend.forward([work])[0].row(end - 1)
            losses.append(-np.log(np.exp(row)[piece[end]] / np.exp(row).sum()))
            session.close()
    tokens = list[int]()
    assert perplexity(backend, ids, piece=4, done=tokens.append) == pytest.approx(np.exp(np.mean(losses)), rel=1e-5)
    assert tokens == [4, 3]


def test_one_token_has_none() -> None:
    with pytest.raises(UsageError, match="at least two tokens"):
        perplexity(ReferenceBackend(random_model(3, vocab_size=12)), [1])


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-9], lambda data: data[:12] + bytes(20) + data[32:], lambda _: b"no"]
)
def test_a_damaged_text_is_one_line(damage, bench, tmp_path: Path) -> None:
    text = tmp_path / "text.gz"
    text.write_bytes(damage(gzip.compress(b"".join(b"%d " % i for i in range(300)))))
    code, _, said = bench("perplexity", text, "model")
    assert (code, said.count("\n")) == (1, 1)
    assert f"{text}: cannot be read: " in said


def test_a_missing_model_is_named_before_the_first_is_measured(bench, small, tmp_path: Path) -> None:
    text, missing = tmp_path / "text", tmp_path / "none.gguf"
    text.write_text("one two three")
    code, shown, said = bench("perplexity", text, small, missing)
    assert (code, shown, said.count("\n")) == (1, "", 1)
    assert str(missing) in said


def test_each_model_is_planned_once(bench, small, small_q4, tmp_path: Path, monkeypatch) -> None:
    text, engine, planned = tmp_path / "text", find_engine("llamacpp"), list[str]()
    text.write_text("one two three")
    plan = engine.plan
    monkeypatch.setattr(engine, "plan", lambda path, *more: planned.append(path) or plan(path, *more))
    code, shown, said = bench("perplexity", text, small, small_q4)
    assert (code, len(shown.splitlines())) == (0, 2), said
    assert planned == [str(small), str(small_q4)]
