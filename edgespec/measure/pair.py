"""The gain of a draft on this machine: recorded answers are replayed with every budget, and passes are timed.

At temperature 0 the tokens do not depend on the planner, so a replay needs no target. The prediction is tokens /
(seconds of drafting + seconds of passes), a little too low with streamed weights, which are also read during drafting.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from edgespec.errors import EdgespecError
from edgespec.loading.pair import DEFAULT_BUDGET, close_all, open_backends
from edgespec.loading.timed_pass import time_pass
from edgespec.loop.backend import Backend, Work
from edgespec.loop.engines import LoadOptions
from edgespec.loop.passes import most_nodes
from edgespec.machine.files import part_names
from edgespec.machine.system import machine_is_busy
from edgespec.measure.recording import record, recording_file
from edgespec.measure.replay import Recording, replay
from edgespec.models.convert.calibration import calibration_text
from edgespec.models.registry import Entry, all_models, local_path
from edgespec.planners.choice import make_planner

BUDGETS = (2, 4, 6, 8, 16, 32, 64, 128, 256)
WORTH = 1.05  # least gain over plain decoding; less is within the error of measurement
TEACHER = 512  # tokens for `agreement`
RANKS = (1, 2, 4, 8, 16)
ROUNDS = 2  # times that each size of pass is timed
ROUGH = "other programs compute, so these figures are rough"


@dataclass(frozen=True, slots=True)
class Row:
    """
    Attributes:
        planner: its name.
        budget: draft tokens per pass.
        tokens_per_pass: the mean.
        draft_seconds: per pass, the median.
        pass_seconds: of a pass over `budget` + 1 nodes.
        by_task: tokens per pass of each task.
    """

    planner: str
    budget: int
    tokens_per_pass: float
    draft_seconds: float
    pass_seconds: float
    by_task: dict[str, float]

    @property
    def tokens_per_second(self) -> float:
        return self.tokens_per_pass / (self.draft_seconds + self.pass_seconds)


@dataclass(frozen=True, slots=True)
class Measured:
    target: str
    draft: str  # "": none
    rows: list[Row]
    streams: bool
    exact: str
    notes: list[str]

    @property
    def plain(self) -> Row:
        return self.rows[0]

    @property
    def best(self) -> Row:
        best = max(self.rows, key=lambda row: row.tokens_per_second)
        return best if best.tokens_per_second >= WORTH * self.plain.tokens_per_second else self.plain

    def best_of(self, planner: str) -> Row | None:
        rows = [row for row in self.rows if row.planner == planner]
        return max(rows, key=lambda row: row.tokens_per_second, default=None)


def budgets(most: int) -> list[int]:
    return sorted({budget for budget in BUDGETS if budget <= most} | {most}) if most > 0 else []


def measure_pair(
    entry: Entry,
    draft: str | None,
    asked: Sequence[tuple[str, str]],
    *,
    max_tokens: int,
    budget: int = DEFAULT_BUDGET,
    memory: str | None = None,
    context_length: int = 2048,
    models_file: str | None = None,
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
    say: Callable[[str], None] = lambda text: None,
) -> Measured:
    """Record, replay and time.

    Args:
        entry: the target.
        draft: a name, path or source; None: only what needs no draft.
        asked: (task, question).
        max_tokens: of an answer.
        budget: most draft tokens per pass.
        memory: what the program may take, as for `edgespec.load`.
        context_length: tokens of text.
        models_file: a models.yaml besides the built-in one.
        progress: called with what is done, how far and of how much.
        say: called with a line about a slow step.

    Raises:
        EdgespecError: a model cannot be loaded, or all answers to a task have one token.
    """
    options = LoadOptions(memory=memory, context_length=context_length, budget=budget)
    busy = [ROUGH] if machine_is_busy() else []
    backends = open_backends(entry, draft, models_file, options, say=say)
    try:
        path, limits, notes = (
            local_path(entry.target, fetch=False),
            backends[0].capabilities,
            [*backends[0].notes, *busy],
        )
        answers = record(
            backends[0], asked, recording_file(path, max_tokens, context_length), max_tokens,
            lambda done, total: progress("recording answers", done, total),
        )  # fmt: skip
        of_more = {answer.category for answer in answers if len(answer.output_ids) > 1}
        if short := [task for task, _ in asked if task not in of_more]:
            raise EdgespecError(
                f"all answers to {short[0]} have one token, so drafts can gain none: give more --max-tokens, or other "
                "--tasks"
            )
        separate = draft is not None and limits.streams  # without the draft there is more memory for the target
        names = [] if separate else ["none", "sssd"]
        rows = _rows([*names, *(["specexec"] if draft else [])], backends, answers, budget, progress)
    finally:
        close_all(backends)
    if separate:
        say("without the draft")
        backends = open_backends(entry, None, models_file, options, say=say)
        try:
            rows = _rows(["none", "sssd"], backends, answers, budget, progress) + rows
            if not backends[0].capabilities.streams:
                notes.append("without the draft nothing has to be streamed: so plain decoding and sssd were measured")
        finally:
            close_all(backends)
    if limits.paths:
        notes.append("some layers are recurrent: passes were timed as chains, branches cost more; try edgespec bench")
    return Measured(path, draft or "", rows, limits.streams, limits.exact.name if limits.exact else "", notes)


def _rows(
    names: Sequence[str],
    backends: Sequence[Backend],
    answers: Sequence[Recording],
    budget: int,
    progress: Callable[[str, int, int], None],
) -> list[Row]:
    tried = budgets(min(budget, most_nodes(backends[0].capabilities, 0) - 1))
    seconds = pass_seconds(backends[0], [1, *(one + 1 for one in tried)], progress)
    wanted = [(name, one) for name in names for one in ([0] if name == "none" else tried)]
    rows = []
    for done, (name, one) in enumerate(wanted):
        progress("replaying answers", done, len(wanted))
        rows.append(_row(name, one, backends, answers, seconds[one + 1]))
    return rows


def pass_seconds(target: Backend, nodes: Sequence[int], progress: Callable[[str, int, int], None]) -> dict[int, float]:
    """Seconds of passes over each of `nodes`, interleaved, so that a busy machine slows all alike."""
    found = dict.fromkeys(nodes, float("inf"))
    for number in range(ROUNDS * len(nodes)):
        progress("timing passes", number, ROUNDS * len(nodes))
        one = nodes[number % len(nodes)]
        found[one] = min(found[one], time_pass(target, one).seconds)
    return without_disturbance(found)


def without_disturbance(seconds: dict[int, float]) -> dict[int, float]:
    """Seconds by nodes; a pass over fewer nodes cannot take longer than one over more, so such times are lowered."""
    return {nodes: min(took for more, took in seconds.items() if more >= nodes) for nodes in seconds}


def _row(name: str, budget: int, backends: Sequence[Backend], answers: Sequence[Recording], seconds: float) -> Row:
    if name == "none":
        return Row(name, 0, 1.0, 0.0, seconds, dict.fromkeys((answer.category for answer in answers), 1.0))
    planner = make_planner(name, backends)
    try:
        lengths, plan_seconds = list[int](), list[float]()
        by_task: dict[str, list[int]] = {}
        for answer in answers:
            found = replay(planner, answer.prompt_ids, answer.output_ids, budget, backends[0].vocab.size)
            lengths += found.acceptance_lengths
            plan_seconds += found.plan_seconds
            by_task.setdefault(answer.category, []).extend(found.acceptance_lengths)
    finally:
        planner.close()
    tasks = {task: float(np.mean(each)) for task, each in by_task.items()}
    return Row(name, budget, float(np.mean(lengths)), float(np.median(plan_seconds)), seconds, tasks)


def agreement(
    entry: Entry, draft: str, *, memory: str | None, models_file: str | None = None, say: Callable[[str], None]
) -> dict[int, float]:
    """Compare the next tokens that target and draft prefer, over a text of `TEACHER` tokens.

    Args:
        entry: the target.
        draft: a name, path or source.
        memory: as for `edgespec.load`.
        models_file: a models.yaml besides the built-in one.
        say: called with a line about a slow step.

    Returns:
        For each k of `RANKS`, the share of positions where the target's best token is among the draft's k best.
    """
    options = LoadOptions(memory=memory, context_length=2 * TEACHER, budget=TEACHER - 1, repack=False, exact="off")
    backends = open_backends(entry, draft, models_file, options, say=say)
    try:
        text = calibration_text(local_path(entry.target, fetch=False))
        token_ids = backends[0].vocab.encode(text, add_bos=True, parse_special=True)[:TEACHER]
        say("one pass of each")
        wanted, best = _choices(backends[0], token_ids, 1), _choices(backends[1], token_ids, max(RANKS))
    finally:
        close_all(backends)
    return {rank: float((best[:, :rank] == wanted).any(1).mean()) for rank in RANKS}


def _choices(backend: Backend, token_ids: Sequence[int], count: int) -> Any:
    """The `count` best next tokens after each of n tokens, [n, count]."""
    session = backend.open()
    nodes = np.arange(len(token_ids), dtype=np.int32)
    logits = backend.forward([Work(session, np.asarray(token_ids, np.int32), nodes - 1, nodes)])[0]
    ids, _ = logits.top(nodes.tolist(), count, 1.0, [None] * len(nodes))
    session.close()
    return np.stack(ids)


def expected_tokens(right: float) -> float:
    """Tokens per pass with 8 draft tokens in a row, each right with this probability."""
    return sum(right**i for i in range(9))


def drafts_here(target: str, models_file: str | None) -> list[str]:
    places = [Path(target).absolute().parent]
    with suppress(ImportError):
        from huggingface_hub import constants

        places.append(Path(constants.HF_HUB_CACHE))
    found = [file for place in places if place.is_dir() for file in place.rglob("*.gguf")]
    for entry in all_models(models_file):
        for source in filter(None, (entry.target, entry.draft)):
            with suppress(EdgespecError):
                found.append(Path(local_path(source, fetch=False)))
    size = _size_of_parts(Path(target))
    first = {file.resolve(): file for file in found if file.suffix == ".gguf" and part_names(file.name)[0] == file.name}
    for part in part_names(Path(target).name):
        first.pop(Path(target).with_name(part).resolve(), None)
    return [str(file) for _, file in sorted(first.items()) if 0 < _size_of_parts(file) < size]


def _size_of_parts(path: Path) -> int:
    """Bytes of a GGUF with all its parts; 0: one of them is not there."""
    parts = [path.with_name(name) for name in part_names(path.name)]
    return sum(part.stat().st_size for part in parts) if all(part.is_file() for part in parts) else 0
