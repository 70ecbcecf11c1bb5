"""Passes of a draft model that several texts share.

Whoever drafts does so in steps: it yields what the draft shall evaluate, and is sent what came of it. `alone` makes a
pass of each; `together` makes one of all that several texts want at a time, level by level. A pass over the nodes of
all takes less time than one for each text, how much less is the engine's and the machine's.
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
    """What a draft shall evaluate."""

    draft: Backend
    work: Work


@dataclass(frozen=True, slots=True)
class Passed:
    """What came of it. The logits are to be looked at before the next step."""

    logits: Logits
    texts: int  # that shared the pass
    nodes: int  # of all of them
    seconds: float  # that it took


DraftSteps: TypeAlias = Generator[Wanted, Passed, T]


def run_one(steps: DraftSteps[T]) -> T:
    """What the steps lead to, each work a pass of its own; raises what they raise."""
    [found] = run_shared([steps])
    if isinstance(found, Exception):
        raise found
    return found


def run_shared(texts: Sequence[DraftSteps[T]]) -> list[T | Exception]:
    """What the steps of each text lead to, or what they raise; they share passes."""
    found: dict[int, T | Exception] = {}
    wanted: dict[int, Wanted] = {}

    def go_on(text: int, step: Callable[[], Wanted]) -> None:
        wanted.pop(text, None)
        try:
            wanted[text] = step()
        except StopIteration as stop:
            found[text] = stop.value
        except Exception as error:
            found[text] = error

    for text, steps in enumerate(texts):
        go_on(text, partial(next, steps))
    while wanted:
        group = one_pass(wanted)
        works = [wanted[text].work for text in group]
        started, nodes = perf_counter(), sum(len(work.token_ids) for work in works)
        try:
            logits = wanted[group[0]].draft.forward(works)
        except Exception as error:  # what they had guessed is gone
            for text in group:
                go_on(text, partial(texts[text].throw, error))
            continue
        seconds = perf_counter() - started
        for text, one in zip(group, logits, strict=True):
            go_on(text, partial(texts[text].send, Passed(one, len(group), nodes, seconds)))
    return [found[text] for text in range(len(texts))]


def one_pass(wanted: Mapping[int, Wanted]) -> list[int]:
    """Which of the texts share the next pass: those who wait longest, and want the same draft, as far as it has room.

    A draft that is kept to shapes takes one text at a time: prompts and trees may differ there.
    """
    first, *others = wanted
    draft, work = wanted[first].draft, wanted[first].work
    limits, group, nodes, rows = draft.capabilities, [first], len(work.token_ids), len(work.wanted)
    for text in others if limits.exact is None else ():
        if wanted[text].draft is not draft:
            continue
        work = wanted[text].work
        nodes, rows = nodes + len(work.token_ids), rows + len(work.wanted)
        if nodes > limits.max_nodes or rows > limits.max_wanted:
            break
        group.append(text)
    return group
