"""Draft passes shared by several sequences, whose planners yield the passes that they want (`DraftSteps`)."""

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import TypeAlias, TypeVar

from edgespec.errors import ContextFull
from edgespec.loop.backend import Backend, Logits, Work
from edgespec.loop.passes import Prefill

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Wanted:
    """A pass of the draft that a planner wants."""

    draft: Backend
    work: Work


@dataclass(frozen=True, slots=True)
class Passed:
    """
    Attributes:
        logits: of the sequence's nodes, valid until its planner yields again.
        sequences: number of sequences that shared the pass.
        nodes: number of their nodes.
        seconds: wall time of the pass.
    """

    logits: Logits
    sequences: int
    nodes: int
    seconds: float


DraftSteps: TypeAlias = Generator[Wanted, Passed, T]


def read_part(reading: Prefill) -> DraftSteps[tuple[Work, Passed] | None]:
    """`Prefill.read` of the next part, in a pass that sequences share; its errors pass through.

    Returns:
        None: the session was emptied, and all must be read again.
    """
    work = reading.work()
    try:
        passed = yield Wanted(reading.backend, work)
    except ContextFull:
        if not reading.may_begin_again():
            raise
        reading.session.rewind(0)
        return None
    reading.commit(work)
    return work, passed


def run_one(steps: DraftSteps[T], before: Callable[[Backend], None] | None = None) -> T:
    """Run one sequence's draft steps; their errors pass through. `before` is called before each pass of a draft."""
    [found] = run_shared([steps], before)
    if isinstance(found, Exception):
        raise found
    return found


def run_shared(
    sequences: Sequence[DraftSteps[T]], before: Callable[[Backend], None] | None = None
) -> list[T | Exception]:
    """Run the draft steps of several sequences in shared passes; `before` as for `run_one`.

    Returns:
        The result or exception of each.
    """
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
        if before:
            before(wanted[group[0]].draft)
        started, nodes = perf_counter(), sum(len(work.token_ids) for work in works)
        try:
            logits = wanted[group[0]].draft.forward(works)
        except Exception as error:  # it is raised in each planner of the group
            for number in group:
                resume(number, partial(sequences[number].throw, error))
            continue
        seconds = perf_counter() - started
        for number, one in zip(group, logits, strict=True):
            resume(number, partial(sequences[number].send, Passed(one, len(group), nodes, seconds)))
    return [found[number] for number in range(len(sequences))]


def next_batch(wanted: Mapping[int, Wanted]) -> list[int]:
    """
    Returns:
        Numbers of the sequences of the next pass: the one that waits longest, and all with its draft that fit; with row
        classes that one only, since prompts and trees may be of different classes.
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
