"""Accuracy and target passes of `edgespec.scale` on problems whose answer is a number."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from math import sqrt
from pathlib import Path
from time import process_time
from typing import Any

from benchmarks.problems import number_in
from edgespec.loop.text import user_messages
from edgespec.measure.json_lines import append
from edgespec.measure.tables import table
from edgespec.model import Model, ScaleResult, scale

ASK = "\nThink step by step. End with: The answer is NUMBER."
GREEDY, TARGET, DRAFT = "target, greedy", "target, majority", "draft, majority"
NORMAL = 1.96  # of a two-sided interval of 95 %


@dataclass(frozen=True, slots=True)
class Settings:
    models: list[str]
    planner: str
    samples: int
    chunk: int
    rejects: list[float]
    window: int
    temperature: float
    max_tokens: int
    seed: int


@dataclass(frozen=True, slots=True)
class Problem:
    """
    Attributes:
        question: as asked.
        options: the settings.
        answer: the right one.
        methods: name -> what `run` gives, and `seconds` of this program on processors.
    """

    question: str
    options: dict[str, Any]
    answer: str
    methods: dict[str, dict[str, Any]]


def measure(
    target: Model,
    draft: Model,
    problems: Sequence[tuple[str, str]],
    out: Path,
    measured: Sequence[Problem],
    settings: Settings,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Problem]:
    """
    Args:
        target: loaded for as many sequences as there are samples, or fewer.
        draft: the same.
        problems: questions with their answers.
        out: file that gets a line a problem.
        measured: the problems that it has; they are not measured again.
        settings: what is measured.
        progress: called with the numbers of problems that are done, and of all.
    """
    options, done = asdict(settings), {one.question: one for one in measured}
    kept = {name: run["calibration"] for one in done.values() for name, run in one.methods.items()}
    shared: dict[str, Any] = {
        "chunk": settings.chunk, "window": settings.window, "seed": settings.seed, "max_tokens": settings.max_tokens,
        "answer": number_in,
    }  # fmt: skip
    several = {
        f"reject {reject:g}": (draft, reject, settings.samples, settings.temperature) for reject in settings.rejects
    }
    plain = {
        GREEDY: (None, 1, 1, 0.0), TARGET: (None, 1, settings.samples, settings.temperature),
        DRAFT: (draft, 0, settings.samples, settings.temperature),
    }  # fmt: skip
    for number, (question, answer) in enumerate(problems):
        progress(number, len(problems))
        if question in done:
            continue
        methods = dict[str, dict[str, Any]]()
        for name, (writer, reject, samples, temperature) in (plain | several).items():
            for model in (target, draft):
                model.scheduler.forget()  # no method finds the prompt read
            began = process_time()
            found = scale(
                target, writer, user_messages(question + ASK), samples=samples, reject=reject, temperature=temperature,
                calibration=kept.get(name, ()), **shared,
            )  # fmt: skip
            methods[name] = run(found, answer) | {"seconds": round(process_time() - began, 1)}
            kept[name] = methods[name]["calibration"]
        done[question] = Problem(question, options, answer, methods)
        append(out, done[question])
    progress(len(problems), len(problems))
    return [done[question] for question, _ in problems]


def run(found: ScaleResult, answer: str) -> dict[str, Any]:
    """What a line says of a method."""
    return {
        "right": number_in(found.text) == answer,
        "votes": found.votes,
        "tokens": sum(len(one.token_ids) for one in found.samples),
        "passes": found.passes,
        "chunks": found.chunks,
        "rejected": round(found.rejected * found.chunks),
        "calibration": [round(score, 4) for score in found.calibration],
    }


def interval(right: int, count: int) -> tuple[float, float]:
    """Wilson's interval of a share."""
    share, z = right / count, NORMAL
    middle, half = share + z * z / (2 * count), z * sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return (middle - half) / (1 + z * z / count), (middle + half) / (1 + z * z / count)


def scaling_table(problems: Sequence[Problem]) -> str:
    rows, count = list[list[str]](), len(problems)
    passes = {name: sum(one.methods[name]["passes"] for one in problems) for name in problems[0].methods}
    for name in passes:
        runs = [one.methods[name] for one in problems]
        right, chunks = sum(each["right"] for each in runs), sum(each["chunks"] for each in runs)
        low, high = interval(right, count)
        against = [(each["right"], one.methods[TARGET]["right"]) for each, one in zip(runs, problems, strict=True)]
        only = f"{against.count((True, False))} : {against.count((False, True))}"
        rows.append([
            name, f"{right}", f"{low:.0%} to {high:.0%}", only,
            f"{passes[name] / count:.0f}", f"{passes[name] / max(1, passes[TARGET]):.2f}",
            f"{sum(each['rejected'] for each in runs) / chunks:.1%}" if chunks else "–",
            f"{sum(each['seconds'] for each in runs) / count:.0f}",
        ])  # fmt: skip
    headings = "right", "95 %", "gained : lost", "passes", "share", "rejected", "CPU seconds"
    title = f"{count} problems; answers gained and lost, and share of passes, against the target's majority"
    return table(title, ("method", *headings), rows)
