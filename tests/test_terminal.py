"""What a person sees while a model loads."""

import io
import re
import sys
from collections.abc import Callable, Iterator
from queue import SimpleQueue

import pytest

from edgespec.cli import terminal
from edgespec.cli.terminal import LONG_PROMPT, Bars, LoadingBar, write_answer
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


def test_long_work_without_a_terminal_tells_of_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = SimpleQueue[str]()
    monkeypatch.setattr(terminal, "LINE_SECONDS", 0.001)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.setattr(terminal.click, "echo", lambda text, err: lines.put(text))

    def next_line(start: str) -> str:
        return next(line for line in iter(lambda: lines.get(timeout=60), "") if line.startswith(start))

    with LoadingBar("big.gguf") as bar:
        assert re.fullmatch(r"loading big\.gguf, \d+ s", next_line("loading"))
        bar.say("finding passes, once")
        assert next_line("finding") == "finding passes, once"  # at once
        assert re.fullmatch(r"finding passes, once, \d+ s", next_line("finding"))
        bar.say("finding passes, twice")
        assert re.fullmatch(r"finding passes, twice, \d+ s", next_line("finding passes, twice"))
        bar.update(1 << 30, 4 << 30)
        assert re.fullmatch(r"reading big\.gguf: 25 %, \d+ s", next_line("reading"))
    with Bars() as bars:
        bars.update("fetching a", 1, 3)
        bars.update("fetching b", 2, 4)
        assert re.fullmatch(r"fetching b: 50 %, \d+ s", next_line("fetching b"))


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
