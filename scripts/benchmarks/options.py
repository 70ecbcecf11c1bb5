"""Options and their types that subcommands share."""

from collections.abc import Callable
from math import isfinite
from pathlib import Path
from typing import Any

import click

from edgespec.cli.options import together
from edgespec.machine.files import check_out
from edgespec.measure.bench import read_prompts

PATH = click.Path(path_type=Path)
FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
AT_LEAST_1 = click.IntRange(1)
THREADS = click.option("--threads", type=AT_LEAST_1, help="As for run.")


def asking(limit: int | None, max_tokens: int) -> Callable[[Any], Any]:
    """How many questions of a file are asked, and how; with these defaults."""
    return together(
        click.option("--limit", type=AT_LEAST_1, default=limit, help="Use this many of them, evenly spaced."),
        click.option("--max-tokens", "-n", type=AT_LEAST_1, default=max_tokens, help="Of an answer."),
        click.option("--temperature", "-t", type=Number(0), default=0.0),
        click.option("--top-p", type=Number(0, 1, min_open=True), default=1.0),
    )


ROUNDS = click.option("--rounds", type=AT_LEAST_1, default=2, help="Parts of the questions; variants take turns.")


def questions(path: Path, limit: int | None) -> list[str]:
    return [prompt.text for prompt in read_prompts(path, limit)]


def json_out(about: bytes, default: str | None = None) -> Callable[[Any], Any]:
    """`--json`: a file that is not there yet, or begins with `about`."""

    def checked(context: click.Context, option: click.Parameter, path: Path | None) -> Path | None:
        if path:
            check_out(path, about, "such figures")
        return path

    return click.option("--json", "out", type=PATH, default=default, callback=checked, help="Where all figures go.")


class Number(click.FloatRange):
    """A number of a range; click's own also takes nan."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        found = super().convert(value, param, ctx)
        return found if isfinite(found) else self.fail(f"{value} is not a finite number.", param, ctx)
