"""Random requests to random models in processes of their own, each text compared with plain decoding."""

import os
import sys
from collections import Counter
from itertools import count
from pathlib import Path
from time import monotonic

import click

from benchmarks.fuzz import Case, Found, draw, in_child, script, shrunk
from benchmarks.options import AT_LEAST_1, FILE, Number, questions
from edgespec.cli.terminal import Bars

SHRINKING, MOST_SHRINKING, TURNS = 120, 600, 12  # seconds, and times those of the case
REPEATED = 3
HANGS_AFTER = 60  # seconds without processor time


@click.command(
    epilog="""\b
Examples:
  scripts/bench fuzz --minutes 60
  scripts/bench fuzz --only 4711
  scripts/bench fuzz --model big.gguf --draft small.gguf --prompts questions.jsonl

Case N is a function of the seed and N. A defect is shrunk to a script in the folder --out. Exit code 1: there are
some."""
)
@click.option("--minutes", type=Number(0, min_open=True), help="[default: 10, without --cases]")
@click.option("--cases", type=AT_LEAST_1, help="Number of cases.")
@click.option("--seed", default=0)
@click.option("--only", type=click.IntRange(0), help="Run this case, and print it.")
@click.option("--model", default="", show_default=False, help="A real model, instead of those that are made up.")
@click.option("--draft", default="", show_default=False, help="A draft for it.")
@click.option("--prompts", type=FILE, help="JSONL with questions.")
@click.option("--out", default="build/fuzz", type=click.Path(file_okay=False, path_type=Path))
def command(
    minutes: float | None, cases: int | None, seed: int, only: int | None, model: str, draft: str,
    prompts: Path | None, out: Path,
) -> None:  # fmt: skip
    """Compare random requests with plain decoding.

    Each text must be that of plain decoding of the same request, alone in a model of its own.
    """
    out.mkdir(parents=True, exist_ok=True)
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)  # of the processes that run cases
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # compute threads that spin slow each other down
    os.environ["XDG_CACHE_HOME"] = str(out.resolve() / "cache")
    asked = questions(prompts, None) if prompts else []
    started, end = monotonic(), 60 * (minutes or (0 if cases or only is not None else 10))
    numbers = [only] if only is not None else range(cases) if cases else count()
    counts, bars = Counter[str](), Bars()
    try:
        for number in numbers:
            spent = monotonic() - started
            if end and spent > end:
                break
            bars.update("fuzzing", int(100 * max(spent / end if end else 0, number / cases if cases else 0)), 100)
            bars.say(f"fuzzing; {_summary(counts)}")
            case, begun = draw(seed, number, model, draft, asked), monotonic()
            found = in_child(case, out.resolve(), HANGS_AFTER)
            if only is not None:
                click.echo(f"{case}\n{found}")
            counts += Counter({
                "cases": 1, "refused": bool(found.refused), "texts": found.texts,
                "with a row class": found.texts if found.exact else 0, "ties": found.ties, "defects": bool(found.wrong),
            })  # fmt: skip
            if found.wrong:
                bars.say(f"fuzzing; shrinking case {number}")
                limit = min(MOST_SHRINKING, max(SHRINKING, TURNS * (monotonic() - begun)))
                click.echo(_shrink(case, found, f"seed {seed}, case {number}", out.resolve(), limit))
    except KeyboardInterrupt:
        click.echo("stopped", err=True)
    finally:
        bars.stop()
    click.echo(_summary(counts))
    sys.exit(bool(counts["defects"]))


def _summary(counts: Counter[str]) -> str:
    names = ("cases", "refused", "texts", "with a row class", "ties", "defects")
    return ", ".join(f"{counts[name]} {name}" for name in names)


def _shrink(case: Case, found: Found, name: str, out: Path, limit: float) -> str:
    kind, line = found.wrong[0]
    about, path = f"{name}: {kind}: {line}", out / f"{name.replace(' ', '-').replace(',', '')}.py"

    def has_it(one: Case) -> bool:
        return kind in dict(in_child(one, out, HANGS_AFTER, kind).wrong)

    path.write_text(script(case, about), encoding="utf-8")  # Ctrl-C may end what follows
    if not any(has_it(case) for _ in range(REPEATED)):
        return f"{about}\n  {path}: not seen again in {REPEATED} runs"
    smaller = shrunk(case, has_it, limit)
    again = sum(has_it(smaller) for _ in range(REPEATED))
    path.write_text(script(smaller, f"{about}\nShrunk, it fails {again} of {REPEATED} times."), encoding="utf-8")
    return f"{about}\n  {path} ({again} of {REPEATED} times): {smaller}"
