"""What a person sees while a model loads and writes."""

import io
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from threading import Event
from typing import Any

import click
import pytest

from edgespec.cli import terminal
from edgespec.cli.chat import _show
from edgespec.cli.commands import main
from edgespec.cli.terminal import LONG_PROMPT, Bars, LoadingBar, WordWrap, cells_of, write_answer
from edgespec.loop.stats import GenerationStats
from edgespec.loop.text import Message
from edgespec.loop.tree import Source
from edgespec.model import GenerationResult
from edgespec.scheduler.events import Chunk

HIDDEN, SHOWN = "\x1b[?25l", "\x1b[?25h"  # the cursor


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def at(monkeypatch: pytest.MonkeyPatch, name: str, stream: Any = None, term: str = "xterm", width: int = 120) -> Any:
    """A standard stream, by default a terminal, of this width."""
    stream = stream or Terminal()
    monkeypatch.setattr(sys, name, stream)
    monkeypatch.setenv("TERM", term)
    monkeypatch.setenv("COLUMNS", str(width))
    return stream


def shown(monkeypatch: pytest.MonkeyPatch, stream: io.StringIO) -> str:
    at(monkeypatch, "stderr", stream)
    with LoadingBar("big.gguf") as bar:
        for done in range(5):
            bar.update(done << 30, 4 << 30)
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())


def test_a_spinner_and_then_bytes_and_their_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(monkeypatch, Terminal())
    assert text.index("loading big.gguf") < text.index("reading big.gguf")
    assert "4.0/4.0 GiB" in text
    assert "/s" in text


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_a_kill_during_bars_shows_the_cursor_again(monkeypatch: pytest.MonkeyPatch) -> None:
    @click.command
    def command() -> None:
        with Bars() as bars:
            bars.update("measuring", 1, 2)
            os.kill(os.getpid(), signal.SIGTERM)
            raise AssertionError

    screen = at(monkeypatch, "stderr")
    with pytest.raises(SystemExit) as ended:
        main(command, [])
    assert ended.value.code == 128 + signal.SIGTERM
    assert screen.getvalue().rindex(HIDDEN) < screen.getvalue().rindex(SHOWN)


def test_nothing_where_nobody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(monkeypatch, io.StringIO()) == ""


def test_long_work_without_a_terminal_tells_of_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    lines, waited = SimpleQueue[str](), list[float]()

    class Hasty(Event):
        def wait(self, seconds: float | None = None) -> bool:
            waited.append(seconds or 0)
            return super().wait(0.001)

    monkeypatch.setattr(terminal, "Event", Hasty)
    monkeypatch.setattr(terminal, "FIRST_LINE", 1)
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
    assert waited[:2] == [1, terminal.LINE_SECONDS]


def test_a_model_that_is_not_streamed_has_a_spinner_only(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = at(monkeypatch, "stderr")
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
    stream, result = at(monkeypatch, "stderr"), GenerationResult()
    write_answer(Reader(length), "prompt", result, {}, quiet=True)  # type: ignore[arg-type]
    assert result.text == "word"
    assert ("prefill" in stream.getvalue()) == (length == LONG_PROMPT)


class Screen:
    """What a terminal shows: it wraps where text reaches its edge."""

    def __init__(self, width: int) -> None:
        self.width, self.lines, self.column = width, [""], 0

    def write(self, text: str) -> None:
        for one in text:
            if one == "\n":
                self.lines.append("")
                self.column = 0
            elif one == "\b":
                self.column = max(0, min(self.column, self.width - 1) - 1)
            else:
                cells = cells_of(one)
                if self.column + cells > self.width:
                    self.write("\n")
                line = self.lines[-1]
                self.lines[-1] = line[: self.column] + one + line[self.column + 1 :]
                self.column += cells


PROSE = "The lighthouse keeper's donkey, unimpressed by storms, chewed  its hay: http://example.org/a/very/long/path. "


@pytest.mark.parametrize("width", [12, 20, 33, 80])
@pytest.mark.parametrize("piece", [1, 3, 1000])
def test_words_stay_whole_at_the_edge(width: int, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    at(monkeypatch, "stdout", width=width)
    lines, screen = WordWrap(), Screen(width)
    for start in range(0, len(PROSE), piece):
        screen.write(lines.broken(PROSE[start : start + piece]))
    assert max(len(line) for line in screen.lines) <= width
    words = [word for word in PROSE.split() if len(word) < width]
    assert [word for line in screen.lines for word in line.split() if word in words] == words
    assert "".join(screen.lines).replace(" ", "") == PROSE.replace(" ", "")
    assert not any(line.startswith(" ") for line in screen.lines)


def test_wide_characters_break_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    at(monkeypatch, "stdout", width=11)
    screen = Screen(11)
    screen.write(WordWrap().broken("a 灯台守は毎朝天気を書いた"))
    assert screen.lines == ["a 灯台守は", "毎朝天気を", "書いた"]


def test_code_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    at(monkeypatch, "stdout", width=20)
    code = "  ```python\nprint('a long line of code', 1, 2, 3, 4)\n  ```\n"
    assert WordWrap().broken(code) == code
    assert (
        WordWrap().broken(code + "and prose that is long enough").removeprefix(code) != "and prose that is long enough"
    )


EVIL = "\x1b]52;c;cm0gLXJm\x07\x1b[2J\r\x08\x7f\x9b2J\ta\nb\0"


@pytest.mark.parametrize("term", ["xterm", "dumb"])
def test_a_text_gives_a_terminal_no_commands(term: str, monkeypatch: pytest.MonkeyPatch) -> None:
    at(monkeypatch, "stdout", term=term)
    pictures = "␛]52;c;cm0gLXJm␇␛[2J␍␈␡\ufffd2J\ta\nb␀"
    assert WordWrap().broken(EVIL) == pictures
    assert click.unstyle(WordWrap().broken(EVIL, "green")) == pictures
    turns: list[Message] = [{"role": "user", "content": EVIL}, {"role": "assistant", "content": EVIL}]
    _show(turns)
    shown = click.unstyle(sys.stdout.getvalue())  # type: ignore[attr-defined]
    assert f"> {pictures}\n{pictures}\n" in shown
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert WordWrap().broken(EVIL) == EVIL


@pytest.mark.parametrize(("stream", "term"), [(io.StringIO(), "xterm"), (Terminal(), "dumb")])
def test_text_is_not_broken_for_files_and_dumb_terminals(
    stream: io.StringIO, term: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    at(monkeypatch, "stdout", stream, term, 12)
    assert WordWrap().broken(PROSE) == PROSE


@pytest.mark.parametrize(
    ("tokens", "passes", "drafted", "plain_seconds", "planner", "has", "lacks"),
    [
        (60, 60, 0, 0.0, "auto", "nothing drafted: it promised no gain", "did not pay"),
        (60, 60, 0, 10.6, "auto", "acceptance length 0.98", "x plain"),  # a figure that cannot be
        (
            60,
            50,
            20,
            0.9,
            "specexec",
            "(0.90 x plain), acceptance length 1.18, 50 passes, drafting did not pay",
            "nothing",
        ),
        (60, 30, 60, 1.8, "specexec", "(1.80 x plain)", "pay"),
        (60, 30, 60, 2.5, "specexec", "acceptance length 1.97", "x plain"),
        (60, 60, 0, 0.0, "none", "seed 7", "drafted"),
    ],
)
def test_the_last_line_says_whether_drafting_paid(
    tokens: int, passes: int, drafted: int, plain_seconds: float, planner: str, has: str, lacks: str
) -> None:
    stats = GenerationStats(planner=planner, seed=7, tokens=tokens, passes=passes, drafted=drafted)
    stats.target_seconds, stats.plain_seconds = 1.0, plain_seconds
    assert has in stats.summary()
    assert lacks not in stats.summary()
    assert bool(stats.as_dict()["times_plain"]) == ("x plain" in has)
