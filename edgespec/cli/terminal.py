import sys
from pathlib import Path
from typing import Any

import click

from edgespec.errors import UsageError
from edgespec.loop.grammar import Grammar, json_schema, lark
from edgespec.loop.tree import Source
from edgespec.model import GenerationResult, Model

COLOURS = {
    Source.DRAFT: "green", Source.INPUT: "cyan", Source.DATASTORE: "magenta", Source.GRAMMAR: "yellow",
    Source.PREDICTION: "blue",
}  # fmt: skip
LONG_PROMPT = 256  # tokens, from which on the prefill gets a bar


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


class Bars:
    """Progress bars on standard error, one for each task, from the first update; none without a terminal."""

    def __init__(self, *more: Any, transient: bool = False) -> None:
        """
        Args:
            more: additional columns.
            transient: remove the bars at the end.
        """
        from rich.console import Console
        from rich.progress import Progress

        columns, hidden = (*Progress.get_default_columns(), *more), not sys.stderr.isatty()
        self._bars = Progress(*columns, console=Console(stderr=True), disable=hidden, transient=transient)
        self._tasks: dict[str, Any] = {}

    def update(self, what: str, done: int, total: int | None) -> None:
        self._bars.start()
        if what not in self._tasks:
            self._tasks[what] = self._bars.add_task(what, total=total or None, completed=done)
        self._bars.update(self._tasks[what], completed=done, total=total or None)

    def advance(self, what: str, total: int, steps: int = 1) -> None:
        if what not in self._tasks:
            self.update(what, 0, total)
        self._bars.advance(self._tasks[what], steps)

    def say(self, what: str) -> None:
        """Show a task without a known end."""
        if what not in self._tasks:
            self.update(what, 0, None)

    def stop(self) -> None:
        if self._bars.live.is_started:
            self._bars.stop()

    def __enter__(self) -> "Bars":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class LoadingBar:
    """A spinner while a model loads, and a bar once `update` is called; nothing without a terminal."""

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
        if isinstance(self._shown, Bars):
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
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
