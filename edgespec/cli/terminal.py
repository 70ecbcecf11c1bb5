import os
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path
from threading import Event, Thread
from time import perf_counter
from typing import Any

import click

from edgespec.errors import EdgespecError, UsageError
from edgespec.loop.grammar import Grammar, json_schema, lark
from edgespec.loop.tree import Source
from edgespec.model import GenerationResult, Model

COLOURS = {
    Source.DRAFT: "green", Source.INPUT: "cyan", Source.DATASTORE: "magenta", Source.GRAMMAR: "yellow",
    Source.PREDICTION: "blue",
}  # fmt: skip
LINE_SECONDS = 10.0  # between lines that tell of long work
LONG_PROMPT = 256  # tokens, from which on the prefill gets a bar


def open_streams() -> None:
    """Make the standard streams fit for a program of texts, before anything is opened.

    Text is UTF-8 in every locale; a character that a terminal does not have becomes a question mark.

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
        sys.stdout.reconfigure(errors="replace")


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
) -> bool:
    """Stream an answer to the terminal and into `result`; true if Ctrl-C ended it."""
    with Bars(transient=True) as bar:

        def prefilled(done: int, total: int) -> None:
            if total >= LONG_PROMPT:
                bar.update("prefill", done, total)

        try:
            for chunk in model.stream(prompt, stats=result.stats, progress=prefilled, **options):
                bar.stop()
                result.add(chunk)
                if not quiet:
                    click.echo(click.style(chunk.text, fg=COLOURS.get(chunk.source)) if tint else chunk.text, nl=False)
                    sys.stdout.flush()
        except KeyboardInterrupt:
            result.stats.finish_reason = "interrupted"
            return True
        finally:
            if not quiet and result.text and not result.text.endswith("\n"):
                click.echo()
    return False


def read_grammar(schema_file: str | None, lark_file: str | None) -> Grammar | None:
    """Read a grammar from a file with a JSON schema or a Lark grammar; None if neither is given.

    Raises:
        UsageError: both are given, or the file cannot be read.
    """
    if schema_file and lark_file:
        raise UsageError("give --json-schema or --grammar, not both")
    if not (file := schema_file or lark_file):
        return None
    try:
        text = Path(file).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{file}: cannot be read: {error}") from error
    return json_schema(text) if schema_file else lark(text)


class Lines:
    """A line on standard error every few seconds, with the time so far."""

    def __init__(self, tell: Callable[[], str]) -> None:
        self._tell, self._started, self._ended = tell, perf_counter(), Event()
        self._thread = Thread(target=self._repeat, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        self._thread.join()

    def _repeat(self) -> None:
        while not self._ended.wait(LINE_SECONDS):
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
        if self.hidden and not self._lines:
            self._lines = Lines(self._line)
        if what not in self._tasks:
            self._tasks[what] = self._bars.add_task(what, total=total or None, completed=done)
        self._bars.update(self._tasks[what], completed=done, total=total or None)

    def advance(self, what: str, total: int, steps: int = 1) -> None:
        if what not in self._tasks:
            self.update(what, 0, total)
        self._bars.advance(self._tasks[what], steps)

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
    """A spinner while a model loads, and a bar once `update` is called; without a terminal lines, if it takes long."""

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
