"""What a person sees while the program works: the answer as it grows, and bars for what takes long."""

import sys
from pathlib import Path
from typing import Any

import click

from edgespec.errors import UsageError
from edgespec.loop.grammar import Grammar, json_schema, lark
from edgespec.loop.tree import Source
from edgespec.model import GenerationResult, Model

# TARGET stays plain.
COLOURS = {
    Source.DRAFT: "green", Source.INPUT: "cyan", Source.DATASTORE: "magenta", Source.GRAMMAR: "yellow",
    Source.PREDICTION: "blue",
}  # fmt: skip


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
    with PrefillBar() as bar:
        try:
            for chunk in model.stream(prompt, stats=result.stats, progress=bar.update, **options):
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
    """What an answer must look like: a JSON schema or a Lark grammar in a file, or None.

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


class PrefillBar:
    """A progress bar on standard error while a long prompt is read; nothing where nobody looks."""

    def __init__(self) -> None:
        self._bar: Any = None

    def update(self, done: int, total: int) -> None:
        """So many of the prompt's tokens are read."""
        if not sys.stderr.isatty() or total < 256:
            return
        if self._bar is None:
            self._bar = _start_bar("reading the prompt", total)
        self._bar.update(self._bar.task_ids[0], completed=done)

    def stop(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def __enter__(self) -> "PrefillBar":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class LoadingBar:
    """On standard error while a model loads: a spinner, and once it is told of bytes, a bar with their speed.

    Nothing where nobody looks.
    """

    def __init__(self, model: str) -> None:
        """
        Args:
            model: its name.
        """
        self._model = model
        self._shown: Any = None
        self._counts = False  # whether what is shown is the bar

    def update(self, done: int, total: int) -> None:
        """So many bytes are read."""
        if self._shown is None:
            return
        if not self._counts:
            from rich.progress import DownloadColumn, TransferSpeedColumn

            self._shown.stop()
            columns = DownloadColumn(binary_units=True), TransferSpeedColumn()
            self._shown, self._counts = _start_bar(f"reading {self._model}", total, *columns), True
        self._shown.update(self._shown.task_ids[0], completed=done)

    def say(self, what: str) -> None:
        """What is done now, and takes some seconds."""
        if self._shown is None:
            return
        if self._counts:
            from rich.console import Console

            self._shown.stop()
            self._shown, self._counts = Console(stderr=True).status(what), False
            self._shown.start()
        else:
            self._shown.update(what)

    def __enter__(self) -> "LoadingBar":
        if sys.stderr.isatty():
            from rich.console import Console

            self._shown = Console(stderr=True).status(f"loading {self._model}")
            self._shown.start()
        return self

    def stop(self) -> None:
        """The model is loaded."""
        if self._shown is not None:
            self._shown.stop()
            self._shown = None

    def __exit__(self, *_: object) -> None:
        self.stop()


def _start_bar(text: str, total: int, *columns: Any) -> Any:
    """A bar of one task, with these columns instead of the time left; it goes away when it is stopped."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    shown = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), *(columns or (TimeRemainingColumn(),))
    bar = Progress(*shown, console=Console(stderr=True), transient=True)
    bar.add_task(text, total=total)
    bar.start()
    return bar
