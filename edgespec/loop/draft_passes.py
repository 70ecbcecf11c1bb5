"""Passes of a draft model that several sequences share.

A planner that drafts yields what the draft shall evaluate, and is sent the result. `run_one` makes a pass of each;
`run_shared` makes one pass of all that several sequences want at a time, level by level.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import TypeAlias, TypeVar

from edgespec.loop.backend import Backend, Logits, Work

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Wanted:
    """A pass of the draft that a planner asks for."""

    draft: Backend
    work: Work


@dataclass(frozen=True, slots=True)
class Passed:
    """Its result. The logits are valid until the planner yields again."""

    logits: Logits
    sequences: int  # that shared the pass
    nodes: int  # of all of them
    seconds: float  # wall time of the pass


DraftSteps: TypeAlias = Generator[Wanted, Passed, T]


def run_one(steps: DraftSteps[T]) -> T:
    """Return what the steps return, each work a pass of its own; raise what they raise."""
    [found] = run_shared([steps])
    if isinstance(found, Exception):
        raise found
    return found


def run_shared(sequences: Sequence[DraftSteps[T]]) -> list[T | Exception]:
    """Return what the steps of each sequence return or raise; they share passes."""
    found: dict[int, T | Exception] = {}
    wanted: dict[int, Wanted] = {}

    def resume(number: int, step: Callable[[], Wanted]) -> None:
        wanted.pop(number, None)
        try:
            wanted[number] = step()
        except StopIteration as stop:
            found[number] = stop.value
        except Exception as error:
            found[number] = error

    for number, steps in enumerate(sequences):
        resume(number, partial(next, steps))
    while wanted:
        group = next_batch(wanted)
        works = [wanted[number].work for number in group]
        started, nodes = perf_counter(), sum(len(work.token_ids) for work in works)
        try:
            logits = wanted[group[0]].draft.forward(works)
        except Exception as error:  # their nodes are lost
            for number in group:
                resume(number, partial(sequences[number].throw, error))
            continue
        seconds = perf_counter() - started
        for number, one in zip(group, logits, strict=True):
            resume(number, partial(sequences[number].send, Passed(one, len(group), nodes, seconds)))
    return [found[number] for number in range(len(sequences))]


def next_batch(wanted: Mapping[int, Wanted]) -> list[int]:
    """Sequences of the next pass: those that wait longest and want the same draft, as far as it has room.

    A draft that is kept to row classes takes one sequence at a time: prompts and trees may differ there.
    """
    first, *others = wanted
    draft, work = wanted[first].draft, wanted[first].work
    limits, group, nodes, rows = draft.capabilities, [first], len(work.token_ids), len(work.wanted)
    for number in others if limits.exact is None else ():
        if wanted[number].draft is not draft:
            continue
        work = wanted[number].work
        nodes, rows = nodes + len(work.token_ids), rows + len(work.wanted)
        if nodes > limits.max_nodes or rows > limits.max_wanted:
            break
        group.append(number)
    return group
