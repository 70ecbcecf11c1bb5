"""Accuracy and target passes of `edgespec.scale` on problems whose answer is a number."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from math import sqrt
from pathlib import Path
from threading import Lock
from time import process_time
from typing import Any

from benchmarks.problems import number_in
from edgespec.errors import UsageError
from edgespec.loop.text import user_messages
from edgespec.measure.json_lines import append
from edgespec.measure.tables import table
from edgespec.model import MOST_PARALLEL, Model, scale

ASK = "\nThink step by step. End with: The answer is NUMBER."
GREEDY, TARGET, DRAFT = "target, greedy", "target, majority", "draft, majority"
NORMAL = 1.96  # of a two-sided interval of 95 %


@dataclass(frozen=True, slots=True)
class Settings:
    """
    Attributes:
        at_once: problems that all methods answer at once, in shared passes; None: one method of one at a time.
    """

    models: list[str]
    planner: str
    samples: int
    chunk: int
    rejects: list[float]
    window: int
    temperature: float
    max_tokens: int
    seed: int
    ctx: int
    at_once: int | None

    @property
    def methods(self) -> dict[str, dict[str, Any]]:
        """Name -> arguments of `scale`; `draft` says whether there is one."""
        several = {"samples": self.samples, "temperature": self.temperature}
        return {
            GREEDY: {"draft": False, "reject": 1, "samples": 1, "temperature": 0.0},
            TARGET: {"draft": False, "reject": 1, **several},
            DRAFT: {"draft": True, "reject": 0, **several},
            **{f"reject {reject:g}": {"draft": True, "reject": reject, **several} for reject in self.rejects},
        }

    def sessions(self, draft: bool) -> int:
        """Number of texts that the target, or the draft, holds at once.

        Raises:
            UsageError: a model holds fewer.
        """
        methods = self.methods.values()
        each: list[int] = [one["samples"] for one in methods if (one["draft"] if draft else one["reject"] > 0)]
        needed = self.at_once * sum(each) if self.at_once else max(each)
        if needed > MOST_PARALLEL:
            raise UsageError(
                f"{needed} texts at once are needed, and {MOST_PARALLEL} are the most: take a smaller --at-once, fewer "
                "--samples, or fewer --rejects"
            )
        return needed


@dataclass(frozen=True, slots=True)
class Run:
    """
    Attributes:
        question: as asked.
        method: its name.
        options: the settings.
        right: the chosen text ends with the right number.
        votes: of `scale`; so are `chunks` and `calibration`.
        tokens: of all texts.
        passes: of the target, in which this method had a part.
        rejected: number of chunks.
        seconds: of this program on processors; None: other methods shared them.
    """

    question: str
    method: str
    options: dict[str, Any]
    right: bool
    votes: dict[str, int]
    tokens: int
    passes: int
    chunks: int
    rejected: int
    calibration: list[float]
    seconds: float | None


Runs = dict[tuple[str, str], Run]  # by question and method


def measure(
    target: Model,
    draft: Model,
    problems: Sequence[tuple[str, str]],
    out: Path,
    measured: Sequence[Run],
    settings: Settings,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Runs:
    """
    Args:
        target: loaded for `Settings.sessions` sequences, or fewer.
        draft: the same.
        problems: questions with their answers.
        out: file that gets a line for each method of a problem.
        measured: the lines that it has; they are not measured again.
        settings: what is measured.
        progress: called with the numbers of lines that are there, and of all.
    """
    done, adding, methods = {(one.question, one.method): one for one in measured}, Lock(), settings.methods
    asked = {(question, name) for question, _ in problems for name in methods}

    def tell() -> None:
        progress(len(asked & done.keys()), len(asked))

    def runs_of(name: str, series: Sequence[tuple[str, str]]) -> Iterator[Run]:
        """Runs of one method, each with the scores of the one before."""
        calibration = list[float]()
        for question, answer in series:
            if (question, name) not in done:
                found = _run(target, draft, question, answer, name, calibration, settings)
                with adding:
                    append(out, found)
                    done[question, name] = found
                    tell()
            calibration = done[question, name].calibration
            yield done[question, name]

    tell()
    if settings.at_once:
        series = [problems[first :: settings.at_once] for first in range(settings.at_once)]
        with ThreadPoolExecutor(len(methods) * len(series)) as pool:
            try:
                running = [pool.submit(list, runs_of(name, one)) for one in series for name in methods]
                for ended in as_completed(running):
                    ended.result()
            except BaseException:
                for model in (target, draft):
                    model.close()  # ends the other threads' requests
                raise
    else:
        for _ in zip(*(runs_of(name, problems) for name in methods), strict=True):
            pass
    return {key: run for key, run in done.items() if key in asked}


def _run(
    target: Model, draft: Model, question: str, answer: str, name: str, calibration: Sequence[float], settings: Settings
) -> Run:
    arguments, alone = dict(settings.methods[name]), not settings.at_once
    writer = draft if arguments.pop("draft") else None
    if alone:
        for model in (target, draft):
            model.scheduler.forget()  # no method finds the prompt read
    began = process_time()
    found = scale(
        target, writer, user_messages(question + ASK), calibration=calibration, chunk=settings.chunk,
        window=settings.window, seed=settings.seed, max_tokens=settings.max_tokens, answer=number_in, **arguments,
    )  # fmt: skip
    seconds = round(process_time() - began, 1)
    return Run(
        question, name, asdict(settings), number_in(found.text) == answer, found.votes,
        sum(len(one.token_ids) for one in found.samples), found.passes, found.chunks,
        round(found.rejected * found.chunks), [round(score, 4) for score in found.calibration],
        seconds if alone else None,
    )  # fmt: skip


def interval(right: int, count: int) -> tuple[float, float]:
    """Wilson's interval of a share."""
    share, z = right / count, NORMAL
    middle, half = share + z * z / (2 * count), z * sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return (middle - half) / (1 + z * z / count), (middle + half) / (1 + z * z / count)


def scaling_table(runs: Mapping[tuple[str, str], Run], settings: Settings) -> str:
    by_method = {
        name: {question: run for (question, of), run in runs.items() if of == name} for name in settings.methods
    }
    usual = by_method[TARGET]
    rows = [_row(name, found, usual) for name, found in by_method.items()]
    headings = "right", "95 %", "gained : lost", "passes", "share", "rejected", "CPU seconds"
    title = f"{len(usual)} problems; answers gained and lost, and share of passes, against the target's majority"
    return table(title, ("method", *headings), rows)


def _row(name: str, found: Mapping[str, Run], usual: Mapping[str, Run]) -> list[str]:
    runs, count = list(found.values()), len(found)
    right, chunks = sum(one.right for one in runs), sum(one.chunks for one in runs)
    low, high = interval(right, count)
    pairs = [(one.right, usual[question].right) for question, one in found.items()]
    won, lost = pairs.count((True, False)), pairs.count((False, True))
    passes, most = (sum(one.passes for one in each) for each in (runs, usual.values()))
    seconds = [one.seconds for one in runs if one.seconds is not None]
    return [
        name, f"{right}", f"{low:.0%} to {high:.0%}", f"{won} : {lost}",
        f"{passes / count:.0f}", f"{passes / most:.2f}",
        f"{sum(one.rejected for one in runs) / chunks:.1%}" if chunks else "–",
        f"{sum(seconds) / count:.0f}" if seconds else "–",
    ]  # fmt: skip
