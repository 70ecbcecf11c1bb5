"""What a person sees while the program works: the answer as it grows, and bars for what takes long."""

import sys
from typing import Any

import click

from edgespec.model import GenerationResult, Model
from edgespec.tree import Source

COLOURS = {Source.DRAFT: "green", Source.INPUT: "cyan", Source.DATASTORE: "magenta"}  # TARGET stays plain


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
                result.text += chunk.text
                result.token_ids.append(chunk.token_id)
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


class PrefillBar:
    """A progress bar on standard error while a long prompt is read; nothing where nobody looks."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._task: Any = None

    def update(self, done: int, total: int) -> None:
        """So many of the prompt's tokens are read."""
        if not sys.stderr.isatty() or total < 256:
            return
        if self._bar is None:
            from rich.console import Console
            from rich.progress import Progress

            self._bar = Progress(console=Console(stderr=True), transient=True)
            self._bar.start()
            self._task = self._bar.add_task("reading the prompt", total=total)
        self._bar.update(self._task, completed=done)

    def stop(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def __enter__(self) -> "PrefillBar":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
