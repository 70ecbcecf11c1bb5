"""What a person sees while a model loads."""

import io
import re
import sys
from collections.abc import Callable, Iterator

import pytest

from edgespec.cli.terminal import LONG_PROMPT, LoadingBar, write_answer
from edgespec.loop.tree import Source
from edgespec.model import GenerationResult
from edgespec.scheduler.requests import Chunk


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(monkeypatch: pytest.MonkeyPatch, stream: io.StringIO) -> str:
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    with LoadingBar("big.gguf") as bar:
        for done in range(5):
            bar.update(done << 30, 4 << 30)
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())


def test_a_spinner_and_then_bytes_and_their_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(monkeypatch, Terminal())
    assert text.index("loading big.gguf") < text.index("reading big.gguf")
    assert "4.0/4.0 GiB" in text
    assert "/s" in text


def test_nothing_where_nobody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(monkeypatch, io.StringIO()) == ""


def test_a_model_that_is_not_streamed_has_a_spinner_only(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    with LoadingBar("small.gguf"):
        pass
    assert "loading small.gguf" in stream.getvalue()
    assert "reading" not in stream.getvalue()


class Reader:
    """A model that prefills a prompt of this length, and answers with a word."""

    def __init__(self, length: int) -> None:
        self.length = length

    def stream(self, prompt: str, *, stats: object, progress: Callable[[int, int], None]) -> Iterator[Chunk]:
        for done in range(0, self.length + 1, self.length // 4):
            progress(done, self.length)
        yield Chunk("word", 5, Source.TARGET)


@pytest.mark.parametrize("length", [LONG_PROMPT - 4, LONG_PROMPT])
def test_the_prefill_of_a_long_prompt_has_a_bar(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    stream, result = Terminal(), GenerationResult()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    assert not write_answer(Reader(length), "prompt", result, {}, quiet=True)  # type: ignore[arg-type]
    assert result.text == "word"
    assert ("prefill" in stream.getvalue()) == (length == LONG_PROMPT)
