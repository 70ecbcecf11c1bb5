"""scripts/make-shape: a GGUF of any shape that loads and runs, and nothing half-written."""

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gguf_writer import finish

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")

from gguf_files import VOCAB, byte_level_vocab, gguf

from benchmarks.made_up import Shape, write_made_up
from edgespec.errors import EdgespecError, ModelError, UsageError
from edgespec.loading.by_name import load_backend
from edgespec.loop.backend import Work
from edgespec.loop.engines import load_vocab

TINY = Shape(layers=3, width=256, feed_forward=512, heads=4, kv_heads=2, vocab=100)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_header(tmp_path_factory.mktemp("tokenizer") / "tokenizer.gguf", byte_level_vocab)


def write_header(path: Path, *values: Callable[[Any], None]) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    for add in values:
        add(writer)
    finish(writer)
    return path


def unseen(done: int, total: int) -> None:
    pass


def test_it_loads_and_its_logits_are_those_of_a_model(tokenizer: Path, tmp_path: Path) -> None:
    out, told = tmp_path / "tiny.gguf", list[tuple[int, int]]()
    size = write_made_up(out, TINY, tokenizer, lambda done, total: told.append((done, total)))
    assert size == out.stat().st_size > told[-1][0] == told[-1][1]
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.gguf"]
    backend = load_backend("llamacpp", str(out), context_length=64, budget=8)
    try:
        assert backend.vocab.size == VOCAB
        text = "Hello, 42 worlds"
        tokens = backend.vocab.encode(text, add_bos=True, parse_special=True)
        assert tokens == load_vocab("llamacpp", str(tokenizer)).encode(text, add_bos=True, parse_special=True)
        session, nodes = backend.open(), np.arange(3, dtype=np.int32)
        row = backend.forward([Work(session, nodes + 9, nodes - 1, nodes)])[0].row(2)
        assert np.isfinite(row).all()
        assert 0.3 < np.std(row) < 3
        assert len(np.unique(row)) > 0.9 * VOCAB  # no two tokens alike
    finally:
        backend.close()


def test_the_vocabulary_is_filled_up(tokenizer: Path, tmp_path: Path) -> None:
    shape = Shape(layers=1, width=256, feed_forward=256, heads=4, kv_heads=4, vocab=1000)
    write_made_up(tmp_path / "out.gguf", shape, tokenizer, unseen)
    backend = load_backend("llamacpp", str(tmp_path / "out.gguf"), context_length=64, budget=8)
    assert backend.vocab.size == 1000
    backend.close()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"layers": 0}, "layers is 0, but must be at least 1"),
        ({"width": 300}, "must be multiples of 256"),
        ({"feed_forward": 100}, "must be multiples of 256"),
        ({"heads": 3}, "heads must divide the width"),
        ({"kv_heads": 3}, "kv heads must divide heads"),
        ({"heads": 128, "kv_heads": 1}, "multiple of 32 wide"),
    ],
)
def test_shapes_that_no_model_has(tokenizer: Path, tmp_path: Path, change: dict[str, int], says: str) -> None:
    sizes = {name: getattr(TINY, name) for name in TINY.__slots__} | change
    with pytest.raises(UsageError, match=says):
        write_made_up(tmp_path / "out.gguf", Shape(**sizes), tokenizer, unseen)
    assert not list(tmp_path.iterdir())


def test_a_model_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    bare = tmp_path / "bare.gguf"
    write_header(bare)
    with pytest.raises(ModelError, match=r"bare\.gguf: has no tokenizer\.ggml\.tokens"):
        write_made_up(tmp_path / "out.gguf", TINY, bare, unseen)
    assert list(tmp_path.iterdir()) == [bare]


def test_nothing_is_overwritten_and_nothing_half_written_stays(
    tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.gguf"

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_made_up(out, TINY, tokenizer, interrupt)
    assert not list(tmp_path.iterdir())
    with pytest.raises(UsageError, match="there is no such folder"):
        write_made_up(tmp_path / "missing" / "out.gguf", TINY, tokenizer, unseen)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1 << 20))
        with pytest.raises(EdgespecError, match=r"needs 0\.0 GB, but only 0\.0 GB are free"):
            write_made_up(out, TINY, tokenizer, unseen)
    out.write_text("mine")
    with pytest.raises(UsageError, match="exists already"):
        write_made_up(out, TINY, tokenizer, unseen)
    assert out.read_text() == "mine"
