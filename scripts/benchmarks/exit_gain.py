"""What drafting on while the target computes would have gained, from the rounds of `exits.py`.

    h(K')   how often the exit, which is not in the tree that was sent, is among the K' nodes known: P(X >= 1)
    X       L(K') - L(K): tokens that the tree of K' nodes gains beyond those of the tree sent. X = 0: the exit is not
            known. X >= 1: it is, with X - 1 further right tokens below it

A next round that begins with what was read below the exit needs fewer draft passes. How many, and what a text then
takes on a machine, is played through pass by pass (`seconds`): the draft reads in the order of the log, and stops when
one more pass would outlive the target's.
"""

from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import groupby, pairwise
from statistics import fmean, median

import numpy as np

from benchmarks.exits import Searched
from edgespec.loop.pass_times import Curve

Draft = Callable[[int], float]  # seconds of a pass over so many nodes
Beside = Callable[[Searched, set[int]], set[int]]  # round, nodes read -> those read when the target's pass is over
BESIDE = (1, 2, 4, 8, 16)  # nodes of a draft pass beside the target's: one takes less time, and gets no deeper


@dataclass(frozen=True, slots=True)
class Machine:
    """What a round's tree costs, and how much of the target's pass the draft can use."""

    name: str
    compute: float  # seconds of the target's pass
    wait: float  # … for the disk, on top of these
    own: bool  # the draft has a processor of its own; else it runs while the target waits for the disk

    @property
    def hidden(self) -> float:
        """Seconds of drafting that cost nothing."""
        return self.compute + self.wait if self.own else self.wait


@dataclass(frozen=True, slots=True)
class Found:
    """Means over rounds."""

    size: int  # K'
    rounds: int
    hits: float  # h
    tokens: float  # E[X]
    read: float  # the exit was read, too: without that nothing is saved
    saved: float  # draft passes of the next round, that many fewer
    passes: float  # draft passes of a round
    seconds: float  # of drafting beyond the tree sent, median


def with_next(rounds: Sequence[Searched]) -> Iterator[tuple[Searched, Searched]]:
    """Each round of a text that has a next one, and that."""
    for one, other in pairwise(rounds):
        if (one.kind, one.text) == (other.kind, other.text):
            yield one, other


def texts(rounds: Sequence[Searched]) -> list[list[Searched]]:
    """Rounds by text, in their order."""
    ordered = sorted(rounds, key=lambda one: (one.kind, one.text, one.start))
    return [list(group) for _, group in groupby(ordered, key=lambda one: (one.kind, one.text))]


def found_after(round_: Searched, passes: int) -> list[int]:
    """The nodes that are known after so many draft passes."""
    up = round_.parents
    return [node for node in range(len(up)) if node == 0 or 0 <= round_.read[up[node]] < passes]


def tree_of(round_: Searched, size: int, nodes: Sequence[int], log_probs: Sequence[float] | None = None) -> set[int]:
    """What was sent and the best of the other nodes: a tree of `size` nodes besides the root, if there are so many.

    Args:
        round_: a round.
        size: K'.
        nodes: those known.
        log_probs: [n] to go by; default: the draft's. A node's must not exceed its parent's.
    """
    tree, values = set(round_.sent), round_.log_probs if log_probs is None else log_probs
    for node in sorted(set(nodes) - tree, key=lambda node: (-values[node], node)):
        if len(tree) > size:
            break
        if round_.parents[node] in tree:
            tree.add(node)
    return tree


def gained(round_: Searched, nodes: AbstractSet[int]) -> int:
    """L: tokens that a pass over this tree writes."""
    return min(len(round_.path(nodes.__contains__)), len(round_.future))


def beyond(round_: Searched, size: int, passes: int) -> int:
    """X, if K' nodes are known after so many draft passes."""
    return gained(round_, tree_of(round_, size, found_after(round_, passes))) - round_.written


def read_before(round_: Searched, passes: int) -> set[int]:
    """The nodes that the draft has read in the first passes of a round."""
    return {node for node, read in enumerate(round_.read) if 0 <= read < passes}


def carried(round_: Searched, read: AbstractSet[int], following: Searched) -> set[int]:
    """Nodes of the next round that need not be read, for the draft has read them below this round's exit."""
    exit_, children = round_.exit(), round_.children()
    if exit_ not in read:
        return set()
    same, found = {0: exit_}, {0}
    for node in range(1, len(following.parents)):
        twin = children.get((same.get(following.parents[node], -1), following.token_ids[node]))
        if twin is not None:
            same[node] = twin
            if twin in read:
                found.add(node)
    return found


def draft_passes(
    round_: Searched,
    wanted: AbstractSet[int],
    read: AbstractSet[int],
    beam: int,
    first: int = 1,
    log_probs: Sequence[float] | None = None,
) -> Iterator[tuple[int, list[int]]]:
    """Passes that read the wanted nodes, the likeliest first: as many at once as a pass takes, below nodes read before.

    Args:
        round_: of the nodes.
        wanted: nodes whose parents are wanted, or read.
        read: nodes that need not be read.
        beam: most nodes of a pass.
        first: tokens that the pass over the root reads.
        log_probs: [n] how likely they are; default: as the draft says.

    Yields:
        How many tokens a pass reads, and its nodes.
    """
    values = round_.log_probs if log_probs is None else log_probs
    left, done = sorted(wanted - read, key=lambda node: (-values[node], node)), set(read)
    while left:
        batch = [node for node in left if node == 0 or round_.parents[node] in done][:beam]
        done |= set(batch)
        left = [node for node in left if node not in done]
        yield first if batch == [0] else len(batch), batch


def go_on(
    round_: Searched,
    read: AbstractSet[int],
    hidden: float,
    draft: Draft,
    beam: int,
    log_probs: Sequence[float] | None = None,
) -> set[int]:
    """What the draft has read when it went on for so many seconds, with nodes of the log.

    Args:
        round_: a round.
        read: nodes that it had read before.
        hidden: seconds; a pass that would outlive them is not made.
        draft: seconds of a pass over so many nodes.
        beam: most nodes of one.
        log_probs: as for `draft_passes`.
    """
    done, used = set(read), 0.0
    for count, batch in draft_passes(round_, read_before(round_, len(round_.passes)), read, beam, log_probs=log_probs):
        used += draft(count)
        if used > hidden:
            break
        done |= set(batch)
    return done


def seconds(text: Sequence[Searched], machine: Machine, draft: Draft, beam: int, beside: Beside | None) -> float:
    """What the rounds of a text take, but for the first one, which nothing could be drafted for.

    Args:
        text: its rounds, in order.
        machine: its passes of the target.
        draft: seconds of a draft pass over so many nodes.
        beam: most nodes of one.
        beside: what is read beside the target's pass; None: as today, each round begins anew.
    """
    total, read = 0.0, set[int]()
    for round_, following in with_next(text):
        if beside:
            done = beside(round_, read | read_before(round_, round_.searched))
            read = carried(round_, done, following)
        wanted = read_before(following, following.searched)
        drafting = (draft(count) for count, _ in draft_passes(following, wanted, read, beam, following.passes[0][0]))
        total += sum(drafting) + machine.compute + machine.wait
    return total


def nothing(round_: Searched, read: set[int]) -> set[int]:
    """The draft rests, but what it has read is kept."""
    return read


def gains(
    rounds: Sequence[Searched], machine: Machine, draft: Draft, beam: int, beside: Beside
) -> dict[str, list[float]]:
    """By kind of text: G of each text, times as fast as today's. Arguments as for `seconds`."""
    by_kind = dict[str, list[float]]()
    for text in texts(rounds):
        if (serial := seconds(text, machine, draft, beam, None)) > 0:
            other = seconds(text, machine, draft, beam, beside)
            by_kind.setdefault(text[0].kind, []).append(serial / other)
    return by_kind


def draft_share(rounds: Sequence[Searched], draft: Draft, beam: int) -> float:
    """Mean seconds of drafting before a tree is sent, where nothing is kept from round to round."""
    return fmean(
        sum(
            draft(count)
            for count, _ in draft_passes(one, read_before(one, one.searched), set(), beam, one.passes[0][0])
        )
        for one in rounds
    )


def by_size(pairs: Sequence[tuple[Searched, Searched]], sizes: Sequence[int], beam: int) -> list[Found]:
    """h(K'), E[X] and what is saved for each K'."""
    rows = []
    for size in sizes:
        more, read, saved, needed, hidden = list[int](), list[bool](), list[int](), list[int](), list[float]()
        for round_, following in pairs:
            passes = round_.known[str(size)]
            more.append(beyond(round_, size, passes))
            done = read_before(round_, passes)
            read.append(round_.exit() in done)
            wanted = read_before(following, following.searched)
            fresh = len(list(draft_passes(following, wanted, set(), beam)))
            left = len(list(draft_passes(following, wanted, carried(round_, done, following), beam)))
            saved.append(fresh - left)
            needed.append(fresh)
            hidden.append(sum(took for _, took in round_.passes[round_.searched : passes]))
        rows.append(
            Found(
                size, len(pairs), fmean(one >= 1 for one in more), fmean(more), fmean(read), fmean(saved),
                fmean(needed), median(hidden),
            )
        )  # fmt: skip
    return rows


def by_seconds(
    pairs: Sequence[tuple[Searched, Searched]], hidden: Sequence[float], draft: Draft, beam: int
) -> list[tuple[float, float, float]]:
    """(exit known, exit read, E[X]) where the draft goes on for so many seconds beyond the tree sent."""
    rows = []
    for limit in hidden:
        known, read, more = list[bool](), list[bool](), list[int]()
        for round_, _ in pairs:
            done = go_on(round_, read_before(round_, round_.searched), limit, draft, beam)
            nodes = {node for node, up in enumerate(round_.parents) if up < 0 or up in done}
            more.append(gained(round_, nodes | set(round_.sent)) - round_.written)
            known.append(more[-1] >= 1)
            read.append(round_.exit() in done)
        rows.append((fmean(known), fmean(read), fmean(more)))
    return rows


def draft_curve(rounds: Sequence[Searched]) -> Curve:
    """Seconds of the draft's passes by nodes: medians of those logged, by size."""
    took = dict[int, list[float]]()
    for round_ in rounds:
        for count, spent in round_.passes:
            took.setdefault(count, []).append(spent)
    sizes = sorted(took)
    times = np.maximum.accumulate([median(took[size]) for size in sizes])
    slope = float((times[-1] - times[0]) / max(1, sizes[-1] - sizes[0]))
    return Curve(np.array(sizes, np.float64), times, slope)
