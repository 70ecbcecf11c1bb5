"""Streams, signals and the terminal: answers, line breaks, held input, progress."""

import os
import re
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from io import TextIOWrapper
from threading import Event, Thread, current_thread, main_thread
from time import perf_counter
from typing import Any

import click

from edgespec.errors import EdgespecError
from edgespec.loop.tree import Source
from edgespec.model import Model
from edgespec.scheduler import drive
from edgespec.scheduler.events import Chunk, GenerationResult
from edgespec.server.conversation import Piece, Thought
from edgespec.server.model_format import ModelFormat

COLOURS = {
    Source.DRAFT: "green", Source.INPUT: "cyan", Source.DATASTORE: "magenta", Source.GRAMMAR: "yellow",
    Source.PREDICTION: "blue",
}  # fmt: skip
THOUGHT = "bright_black"
# Control characters, which a terminal would obey, as pictures of them.
PICTURES = {one: chr(0x2400 + one) for one in range(32) if chr(one) not in "\n\t"}
PICTURES |= {0x7F: "\u2421"} | dict.fromkeys(range(0x80, 0xA0), "\ufffd")
FIRST_LINE, LINE_SECONDS = 1.0, 10.0  # seconds before the first line that tells of long work, and between others
LONG_PROMPT = 256  # tokens, from which on the prefill gets a bar


def open_streams() -> None:
    """Make the standard streams fit for a program of texts, before anything is opened.

    Text is UTF-8 in every locale, unless PYTHONIOENCODING says otherwise; a character that a terminal does not have
    becomes a question mark.

    Raises:
        EdgespecError: standard output is closed.
    """
    for number in range(3):  # else the next file that is opened, such as a model, gets the number
        with suppress(OSError):
            os.fstat(number)
            continue
        os.open(os.devnull, os.O_RDWR)
    sys.stdin = sys.stdin or open(os.devnull, encoding="utf-8")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if sys.stdout is None:
        raise EdgespecError("standard output is closed: send it to a file or to /dev/null")
    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8", errors="strict")
    if isinstance(sys.stdout, TextIOWrapper):
        piped = None if sys.stdout.isatty() or os.environ.get("PYTHONIOENCODING") else "utf-8"
        sys.stdout.reconfigure(encoding=piped, errors="replace")


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP (a closed terminal) end the program in order.

    Texts are saved, partial files removed, and the cursor shown. Only the main thread can do so.
    """

    def end(number: int, frame: Any) -> None:
        for one in found:
            signal.signal(one, signal.SIG_IGN)
        if number != signal.SIGTERM:  # writing to the terminal would fail
            nowhere = os.open(os.devnull, os.O_RDWR)
            for stream in terminals:
                os.dup2(nowhere, stream)
        sys.exit(128 + number)

    terminals = [stream for stream in (0, 1, 2) if os.isatty(stream)]
    numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    numbers = numbers if current_thread() is main_thread() else []
    found = {number: handler for number in numbers if (handler := signal.getsignal(number)) != signal.SIG_IGN}  # nohup
    for number in found:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in found.items():
            signal.signal(number, handler)


def give_up_output() -> None:
    """If standard output has failed, drop what waits for it, which Python would try to write at its end."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def write_answer(
    model: Model,
    prompt: Any,
    result: GenerationResult,
    options: dict[str, Any],
    *,
    quiet: bool = False,
    tint: bool = False,
    form: ModelFormat | None = None,
    in_thought: bool = False,
) -> None:
    """Stream an answer to the terminal and into `result`; Ctrl-C ends it.

    With a `form` the result has no thoughts, and only a terminal shows them; `in_thought`: the prompt has opened one.
    """
    parser = form.parser(None, in_thought=in_thought) if form else None
    lines, thinks, hides = WordWrap(), False, quiet or not sys.stdout.isatty()

    def write(pieces: Sequence[Piece], colour: str | None = None) -> str:
        nonlocal thinks
        for piece in pieces:
            if isinstance(piece, Thought) and not hides:
                thinks = True
                click.echo(lines.broken(piece.text, THOUGHT), nl=False)
            elif isinstance(piece, str) and not quiet:
                gap = lines.broken("\n\n") if thinks else ""
                click.echo(gap + lines.broken(piece, colour), nl=False)
                thinks = False
        return "".join(piece for piece in pieces if isinstance(piece, str))

    with Bars(transient=True) as bar:

        def prefilled(done: int, total: int) -> None:
            if total >= LONG_PROMPT:
                bar.update("prefill", done, total)

        def begin() -> Iterator[Chunk]:
            if not form:
                return model.stream(prompt, stats=result.stats, progress=prefilled, **options)
            request = replace(model.request(prompt, **options), shown=form.shown(None))
            return drive.chunks(model.decoder, request, result.stats, prefilled)

        try:
            for chunk in begin():
                bar.stop()
                pieces = parser.push(chunk.text) if parser else [chunk.text]
                text = write(pieces, COLOURS.get(chunk.source) if tint else None)
                result.add(replace(chunk, text=text))
        except KeyboardInterrupt:
            result.stats.finish_reason = "interrupted"
        finally:
            result.text += write(parser.finish()) if parser else ""
            if thinks or (not quiet and result.text and not result.text.endswith("\n")):
                click.echo()


def last_lines(result: GenerationResult, max_tokens: int) -> str:
    """Lines after an answer: where it was cut, if it was, and its figures."""
    if result.finish_reason != "length":
        return result.stats.summary()
    limit = f" at {max_tokens} tokens (-n)" if result.stats.tokens == max_tokens else ": the context is full (--ctx)"
    return f"cut{limit}\n{result.stats.summary()}"


def show(text: str, *, dim: bool = False, err: bool = False) -> None:
    """Print whole lines."""
    lines = WordWrap(sys.stderr if err else sys.stdout).broken(text)
    click.echo(click.style(lines, dim=True) if dim else lines, err=err)


class WordWrap:
    """Breaks text between words at a terminal's edge, while it is written; lines of fenced code stay whole.

    A terminal gets no control characters of the text.
    """

    def __init__(self, stream: Any = None) -> None:
        """
        Args:
            stream: standard stream that gets the text, from the first column on. Default: standard output.
        """
        self._terminal = (stream or sys.stdout).isatty()
        self._plain = not self._terminal or is_dumb()
        self._column = self._start = 0  # of the cursor, and of the word that it is in
        self._word = list[str]()  # as it is shown
        self._line = ""  # its first characters
        self._code = False

    def broken(self, text: str, colour: str | None = None) -> str:
        """
        Returns:
            Text for the terminal, which may take back the beginning of a word to write it into the next line.
        """
        if self._terminal:
            text = text.translate(PICTURES)
        if self._plain:
            return click.style(text, fg=colour) if colour else text
        if not text:
            return ""
        width = shutil.get_terminal_size().columns
        return "".join(self._shown(one, click.style(one, fg=colour) if colour else one, width) for one in text)

    def _shown(self, one: str, shown: str, width: int) -> str:
        cells = cells_of(one)
        if one == "\n":
            self._code ^= self._line.startswith("```")
            self._column, self._line = 0, ""
        elif one == "\t":
            self._column += 8 - self._column % 8
        else:
            self._line = (self._line + one).lstrip()[:3]
            if self._column + cells >= width and not self._code:  # the last column stays empty, so \b is exact
                return self._at_the_edge(one, shown, cells, width)
            self._column += cells
        if one.isspace() or cells > 1:
            self._start, self._word = self._column, []
        else:
            self._word.append(shown)
        return shown

    def _at_the_edge(self, one: str, shown: str, cells: int, width: int) -> str:
        if one == " ":  # none begins a line
            room = self._column < width
            self._column = self._start = width
            self._word = []
            return " " if room else ""
        back, word = self._column - self._start, self._word
        if not self._start:  # a word longer than a line: the terminal wraps it, so that it can be copied whole
            self._column = cells if self._column + cells > width else self._column + cells
            return shown
        self._column, self._start, self._word = back + cells, 0, [*word, shown]
        return "\b" * back + " " * back + "\n" + "".join(self._word)


def cells_of(one: str) -> int:
    """Columns that a character takes; a wide one, such as a Chinese, is a word of its own."""
    if " " <= one <= "~":
        return 1
    from prompt_toolkit.utils import get_cwidth

    return get_cwidth(one)


def is_dumb() -> bool:
    return os.environ.get("TERM") == "dumb"


@contextmanager
def held_input() -> Iterator[None]:
    """Keep what is typed meanwhile for the next prompt, unseen; Ctrl-C still interrupts."""
    try:
        import termios
    except ImportError:  # Windows
        yield
        return
    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    held = termios.tcgetattr(terminal)
    held[0] &= ~termios.ICRNL  # Enter as the prompt expects it
    held[3] = held[3] & ~(termios.ECHO | termios.ICANON) | termios.NOFLSH  # so that nothing typed is dropped
    try:
        termios.tcsetattr(terminal, termios.TCSANOW, held)
        mark_pastes(True)
        yield
    finally:
        mark_pastes(False)
        with suppress(termios.error):  # the terminal is gone
            termios.tcsetattr(terminal, termios.TCSANOW, before)


def mark_pastes(on: bool) -> None:
    """Let the terminal mark pasted text, so that it is one message; a prompt ends with the marks off."""
    if sys.stdout.isatty() and not is_dumb() and os.name != "nt":  # a console of Windows may show the code itself
        sys.stdout.write(f"\x1b[?2004{'h' if on else 'l'}")
        sys.stdout.flush()


class Lines:
    """A line on standard error after a second and then every few seconds, with the time so far."""

    def __init__(self, tell: Callable[[], str]) -> None:
        self._tell, self._started, self._ended = tell, perf_counter(), Event()
        self._thread = Thread(target=self._repeat, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        self._thread.join()

    def _repeat(self) -> None:
        wait = FIRST_LINE
        while not self._ended.wait(wait):
            wait = LINE_SECONDS
            click.echo(f"{self._tell()}, {perf_counter() - self._started:.0f} s", err=True)


class Bars:
    """Progress bars on standard error, one for each task, from the first update; without a terminal lines."""

    def __init__(self, *more: Any, transient: bool = False) -> None:
        """
        Args:
            more: additional columns.
            transient: remove the bars at the end.
        """
        from rich.console import Console
        from rich.progress import Progress

        columns, self.hidden = (*Progress.get_default_columns(), *more), not sys.stderr.isatty()
        self._bars = Progress(*columns, console=Console(stderr=True), disable=self.hidden, transient=transient)
        self._tasks: dict[str, Any] = {}
        self._lines: Lines | None = None

    def update(self, what: str, done: int, total: int | None) -> None:
        self._bars.start()
        if what not in self._tasks:
            self._tasks[what] = self._bars.add_task(what, total=total or None, completed=done)
        if self.hidden and not self._lines:
            self._lines = Lines(self._line)
        self._bars.update(self._tasks[what], completed=done, total=total or None)

    def say(self, what: str) -> None:
        """Show a task without a known end; what follows a comma or semicolon is how far it is."""
        task = re.split("[,;]", what)[0]
        if task not in self._tasks:
            self.update(task, 0, None)
            if self.hidden:
                click.echo(what, err=True)
        self._bars.update(self._tasks[task], description=what)

    def _line(self) -> str:
        task = self._bars.tasks[-1]
        return f"{task.description}{f': {task.percentage:.0f} %' if task.total else ''}"

    def stop(self) -> None:
        if self._bars.live.is_started:
            self._bars.stop()
        if self._lines:
            self._lines.stop()
        self._lines = None

    def __enter__(self) -> "Bars":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class LoadingBar:
    """A spinner while a model loads, and a bar once `update` is called; without a terminal lines, after a second."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._shown: Any = None

    def update(self, done: int, total: int) -> None:
        if self._shown and not isinstance(self._shown, Bars):
            from rich.progress import DownloadColumn, TransferSpeedColumn

            self._shown.stop()
            self._shown = Bars(DownloadColumn(binary_units=True), TransferSpeedColumn(), transient=True)
        if self._shown:
            self._shown.update(f"reading {self._model}", done, total)

    def say(self, what: str) -> None:
        if isinstance(self._shown, Bars) and self._shown.hidden:
            self._shown.say(what)
        elif isinstance(self._shown, Bars):
            self._shown.stop()
            self._spin(what)
        elif self._shown:
            self._shown.update(what)

    def _spin(self, what: str) -> None:
        from rich.console import Console

        self._shown = Console(stderr=True).status(what)
        self._shown.start()

    def stop(self) -> None:
        if self._shown:
            self._shown.stop()
        self._shown = None

    def __enter__(self) -> "LoadingBar":
        if sys.stderr.isatty():
            self._spin(f"loading {self._model}")
        else:
            self._shown = Bars()
            self._shown.update(f"loading {self._model}", 0, None)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
