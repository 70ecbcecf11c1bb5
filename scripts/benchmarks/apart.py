"""Target and draft one after the other, and at once: in two processes that share processors, and in two that do not.

At once, one copy of the target verifies in a process of its own while the draft goes on. This is DSI with one copy, and
PEARL's schedule. It shows if a method gains nothing, or nothing on shared processors.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from time import perf_counter
from typing import Any, cast

from benchmarks.side_by_side import ratio
from edgespec.errors import EdgespecError, UsageError
from edgespec.loading.pair import close_all, open_backends, open_draft
from edgespec.loading.targets import ModelSpec
from edgespec.loop.engines import LoadOptions
from edgespec.loop.generate import Generation
from edgespec.loop.sampling import SamplingParams
from edgespec.loop.stats import GenerationStats
from edgespec.loop.text import render_chat, user_messages
from edgespec.measure.tables import table
from edgespec.models.registry import find_model
from edgespec.planners.auto import new_auto_state
from edgespec.planners.choice import make_planner
from edgespec.scheduler import drive
from edgespec.scheduler.requests import Request, Wrote
from edgespec.scheduler.targets.coordinator import Targets
from edgespec.scheduler.targets.places import processes
from edgespec.scheduler.targets.proposer import DraftProposer
from edgespec.scheduler.targets.verifier import describe

OPTIONS = LoadOptions(context_length=2048, repack=False)  # never repacked, so that both ways have one row class


@dataclass(frozen=True, slots=True)
class Task:
    """
    Attributes:
        at_once: the draft goes on while the target verifies.
        target_on: processors of the target.
        draft_on: processors of the draft.
    """

    target: str
    draft: str
    at_once: bool
    target_on: list[int]
    draft_on: list[int]
    prompts: Sequence[str]
    max_tokens: int
    temperature: float


def measure(task: Task) -> list[dict[str, Any]]:
    """`tokens` after the first step, their `seconds`, and `token_ids`, of each prompt."""
    return [_timed(steps) for steps in (_at_once if task.at_once else _serially)(task)]


def _timed(steps: Iterable[Sequence[int]]) -> dict[str, Any]:
    token_ids, first, started = list[int](), 0, 0.0
    for tokens in steps:
        token_ids += tokens
        if not first:
            first, started = len(token_ids), perf_counter()
    return {"tokens": len(token_ids) - first, "seconds": perf_counter() - started, "token_ids": token_ids}


def _serially(task: Task) -> Iterator[Iterator[Sequence[int]]]:
    backends = open_backends(find_model(task.target), task.draft, None, OPTIONS)
    target, state = backends[0], new_auto_state(backends[0].capabilities.streams)
    with ExitStack() as undo:
        undo.callback(close_all, backends)
        planner = undo.enter_context(closing(make_planner("chain", backends, state=state)))
        session = undo.enter_context(closing(target.open()))
        for prompt in task.prompts:
            generation = Generation(
                target, session, planner, render_chat(target.vocab, user_messages(prompt)), _sampling(task),
                max_tokens=task.max_tokens, budget=64, stats=GenerationStats(),
            )  # fmt: skip
            yield (step.tokens for step in generation.steps())


def _at_once(task: Task) -> Iterator[Iterator[Sequence[int]]]:
    """Threads and processes have the processors of the thread that starts them."""
    with ExitStack() as undo:
        os.sched_setaffinity(0, task.target_on)
        options = replace(OPTIONS, threads=len(task.target_on))
        spec, (place,) = ModelSpec(task.target, None, options, True), processes(1)
        undo.callback(place.close)
        described = place.executor.submit(describe, spec).result()
        os.sched_setaffinity(0, task.draft_on)
        draft = open_draft(task.draft, None, replace(options, threads=len(task.draft_on)))
        proposer = DraftProposer(draft, draft.vocab.size)
        made = Targets(draft.vocab, described, spec, [place], proposer)
        undo.callback(made.close)
        for prompt in task.prompts:
            prompt_ids = render_chat(draft.vocab, user_messages(prompt))
            events = drive.events(cast(Any, made), Request(prompt_ids, _sampling(task), task.max_tokens))
            yield (event.step.tokens for event in events if isinstance(event, Wrote))


def _sampling(task: Task) -> SamplingParams:
    return SamplingParams(temperature=task.temperature)


def run(task: Task) -> list[dict[str, Any]]:
    """Measure in a process that has the draft's processors.

    Raises:
        EdgespecError: it failed.
    """
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.apart", json.dumps(asdict(task))],
        preexec_fn=partial(os.sched_setaffinity, 0, task.draft_on), capture_output=True, text=True, check=False,
        env=os.environ | {"PYTHONPATH": ":".join(sys.path), "OMP_WAIT_POLICY": "passive"},
    )  # fmt: skip
    if done.returncode:
        raise EdgespecError((done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1])
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def compare(
    target: str, draft: str, prompts: Sequence[str], *, max_tokens: int, temperature: float, rounds: int,
    say: Callable[[str], None],
) -> str:  # fmt: skip
    """A table; variants alternate, part by part of the prompts.

    Raises:
        UsageError: this system cannot bind a process to processors, or there is only one.
        EdgespecError: a measurement failed, or the texts differ.
    """
    if not hasattr(os, "sched_setaffinity") or len(os.sched_getaffinity(0)) < 2:
        raise UsageError(
            "target and draft apart need two processors, and a system that binds processes to them (Linux)"
        )
    every = sorted(os.sched_getaffinity(0))
    half = len(every) // 2
    serial = "one after the other"
    ways = {serial: (every, every), "at once, shared": (every, every), "at once, apart": (every[half:], every[:half])}
    runs = {way: list[dict[str, Any]]() for way in ways}
    for number in range(rounds):
        for way, found in runs.items():
            if part := prompts[number::rounds]:
                say(f"{way}, part {number + 1} of {rounds}")
                found += run(Task(target, draft, way != serial, *ways[way], part, max_tokens, temperature))
    texts = [[one["token_ids"] for one in found] for found in runs.values()]
    if any(text != texts[0] for text in texts):
        raise EdgespecError(
            "the texts differ: this is a bug, or the model has no row class here (docs/guides/exactness.md)"
        )
    rows = []
    for way, (target_on, draft_on) in ways.items():
        found = runs[way]
        value, low, high = ratio(found, runs[serial])
        speed = sum(one["tokens"] for one in found) / sum(one["seconds"] for one in found)
        on = f"{','.join(map(str, target_on))} and {','.join(map(str, draft_on))}"
        rows.append([way, on, f"{speed:.2f}", f"{value:.3f} ({low:.3f} to {high:.3f})" if way != serial else "–"])
    headings = ("target and draft", "processors of each", "tokens/s", "of one after the other, 95 %")
    return table("Target and draft", headings, rows, width=110)


if __name__ == "__main__":
    try:
        print(json.dumps(measure(Task(**json.loads(sys.argv[1])))))
    except EdgespecError as error:
        sys.exit(str(error))
