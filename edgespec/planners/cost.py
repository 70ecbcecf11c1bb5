"""What passes cost, learned from the passes made, and how many guesses are worth it.

More guesses gain more tokens per pass, but drafting them and checking them takes time. What counts is tokens per
second of a whole round, which TurboSpec (arXiv 2406.14066) calls goodput. With the tree's nodes ordered by the
probability p that they are right, and the n best of them kept:

    goodput(n) = (1 + p_1 + … + p_n) / (drafting + pass(n + 1))

A disk that streams the weights makes `pass` flat, and wide trees win; a model that a weak processor computes from
memory makes it steep, and a few sure guesses win. Costs steer only how the tree grows, never what is written.
`planners/paced.py` decides by them.

Where a pass reads the experts of a mixture that its nodes have chosen, its time goes with how many different ones there
are: each further node adds fewer, until all are there (MoESD, arXiv 2505.19645, counts them so, too).
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from statistics import fmean, median

import numpy as np
from numpy.typing import ArrayLike

from edgespec.loop.tree import FloatArray

KEPT = 8  # passes of about one size; costs change with the text's length and with what else the machine does
RECALLED = 2  # passes that a remembered cost counts for: a few new ones outvote it
TILED = 64  # nodes from which on llama.cpp's attention has another kernel: after a long text 64 may cost less than 40
NEAR = 3  # sizes closer than this ratio do not show how cost grows
STEEP, FLAT = 0.5, 0.01  # of a plain pass, what each more node costs until that is seen; FLAT: weights are streamed
NOVELTY = (
    0.75  # of a node's choices of experts, those made as if by itself: 0.78 follows from two nodes of GLM-4.7-Flash
)
WIDE = 64  # nodes of a tree that is called wide


def distinct(nodes: ArrayLike, experts: int, used: int) -> FloatArray:
    """Different experts that a pass over so many nodes is expected to choose in a layer.

    Args:
        nodes: at least 1.
        experts: of a layer.
        used: by a token.
    """
    further = np.asarray(nodes, np.float64) - 1
    return np.asarray(experts * (1 - (1 - used / experts) ** (1 + further * NOVELTY)))


@dataclass(frozen=True)
class Curve:
    """Seconds of a pass by its number of nodes: straight lines between the sizes seen, and on beyond them.

    With `experts` the lines are straight over the weights of a pass, not over its nodes: `weight`.

    Of texts that share passes, of the target or of the draft, each pays a part. If all guess alike, the best round of
    one, with its part of the passes, is the best for all.
    """

    sizes: FloatArray  # [k], rising
    took: FloatArray  # [k] seconds; falling at `TILED` nodes if anywhere
    slope: float  # seconds of each node, or weight, beyond the largest size
    experts: tuple[int, int] | None = None  # of a layer, and used by a token, if passes read those used
    texts: float = 1  # that share each pass, with as many nodes each

    def shared(self, texts: float) -> "Curve":
        """Of passes that so many texts share: one's nodes, and its part of the time."""
        if texts == self.texts:  # a new one would forget `plain` and `least`
            return self
        return replace(self, texts=texts)

    def seconds(self, nodes: ArrayLike) -> FloatArray:
        """What passes over `nodes` nodes will take; the shape of `nodes`."""
        nodes = np.asarray(nodes) * self.texts
        wanted, size, took = weight(nodes, self.experts), weight(self.sizes, self.experts), self.took
        # Below the smallest size: down the same slope, but never as if all of a pass were its nodes.
        below = np.maximum(took[0] - self.slope * (size[0] - wanted), took[0] * wanted / size[0])
        found = np.where(wanted < size[0], below, np.interp(wanted, size, took))
        return np.where(wanted > size[-1], took[-1] + self.slope * (wanted - size[-1]), found) / self.texts

    @cached_property
    def plain(self) -> float:
        """Seconds of a pass over one node."""
        return float(self.took[0] if self.plain_was_seen and self.texts == 1 else self.seconds(1))

    @cached_property
    def least(self) -> float:
        """Of a plain pass, what a node of the tree whose nodes are cheapest costs: a guess less likely cannot pay."""
        far, whole = self.sizes > self.texts, self.plain * self.texts
        on = (float(self.seconds(WIDE)) - self.plain) / (WIDE - 1) if self.experts else self.slope
        return float(min([on, *((self.took[far] - whole) / (self.sizes[far] - self.texts))]) / self.plain)

    @property
    def plain_was_seen(self) -> bool:
        """Whether passes over one node were measured, not foretold."""
        return bool(self.sizes[0] == 1)


def weight(nodes: ArrayLike, experts: tuple[int, int] | None) -> FloatArray:
    """How much passes over so many nodes have to do, in passes over one node; the shape of `nodes`."""
    wanted = np.asarray(nodes, np.float64)
    return distinct(wanted, *experts) / experts[1] + FLAT * (wanted - 1) if experts else wanted


class PassCost:
    """Seconds that passes take, by number of nodes and by the length of the text before them."""

    def __init__(self, slope: float = STEEP, experts: tuple[int, int] | None = None) -> None:
        """
        Args:
            slope: what a further node is expected to cost, as a part of a plain pass, until sizes apart were seen.
            experts: as for `Curve`.
        """
        self.slope = slope
        self.experts = experts
        # Length class -> bits of the number of nodes -> the last passes (nodes, seconds).
        self._passes: dict[int, dict[int, deque[tuple[float, float]]]] = {}
        self._usual: dict[int, dict[int, tuple[float, float]]] = {}  # the same -> (mean nodes, median seconds)
        self._curves: dict[int, Curve] = {}

    def add(self, nodes: float, seconds: float, length: int = 0) -> None:
        """A pass over `nodes` nodes after `length` tokens took `seconds`."""
        at = length_class(length)
        bits = round(nodes).bit_length()
        passes = self._passes.setdefault(at, {}).setdefault(bits, deque(maxlen=KEPT))
        passes.append((nodes, max(seconds, 1e-9)))
        sizes, times = zip(*passes, strict=True)
        self._usual.setdefault(at, {})[bits] = fmean(sizes), median(times)
        self._curves.pop(at, None)

    def least_seen(self, texts: int = 1) -> int:
        """How many passes are known of the smallest size seen that so many texts can share, for the length with most.

        The first pass after loading may take twice as long as all others, and were it alone, larger ones would look
        cheap. Texts that share their passes make none over one node.
        """
        shared = [[size for size in sizes if size >= texts.bit_length()] for sizes in self._passes.values()]
        counts = [len(one[min(sizes)]) for one, sizes in zip(self._passes.values(), shared, strict=True) if sizes]
        return max(counts, default=0)

    def at(self, length: int) -> Curve | None:
        """The curve for texts of about this length, else for the nearest length seen; None: no pass was seen."""
        if not self._passes:
            return None
        wanted = length_class(length)
        at = min(self._passes, key=lambda known: (abs(known - wanted), known))
        if at not in self._curves:
            self._curves[at] = self._curve(sorted(self._usual[at].values()))
        return self._curves[at]

    def _curve(self, seen: list[tuple[float, float]]) -> Curve:
        size = [nodes for nodes, _ in seen]
        narrow = sum(nodes < TILED for nodes in size)
        took = [seconds for _, seconds in seen]
        took = [*accumulate(took[:narrow], max), *accumulate(took[narrow:], max)]
        far = [i for i, nodes in enumerate(size) if nodes * NEAR <= size[-1]]
        heavy = weight(size, self.experts)
        if far:  # on beyond with the slope of the last sizes that are far enough apart to tell
            slope = (took[-1] - took[far[-1]]) / float(heavy[-1] - heavy[far[-1]])
        else:
            slope = self.slope * took[0] / (1 + self.slope * float(heavy[0] - 1))
        return Curve(np.array(size), np.array(took), slope, self.experts)

    def as_list(self) -> list[list[float]]:
        """For JSON: [length class, nodes, seconds] for each size."""
        return [[at, *usual] for at, sizes in self._usual.items() for usual in sizes.values()]

    def recall(self, rows: Iterable[Sequence[float]]) -> None:
        """Start from what `as_list` gave; new passes soon outvote it."""
        for at, nodes, seconds in rows:
            for _ in range(RECALLED):
                self.add(nodes, seconds, _length(int(at)))


def length_class(length: int) -> int:
    """0 below 1,024 tokens, and one more with each doubling: attention's share of a pass grows with the text."""
    return (length // 1024).bit_length()


def _length(at: int) -> int:
    return 1024 << (at - 1) if at > 0 else 0


def goodput(
    log_probs: FloatArray,
    spent: float,
    cost: Curve,
    trust: float = 1.0,
    texts: int = 1,
    rows: FloatArray | None = None,
) -> FloatArray:
    """Tokens per second of a round that keeps the 0, 1, …, n best nodes, shape [n + 1].

    Args:
        log_probs: [n] of the nodes, best first, the root left out.
        spent: seconds of drafting.
        cost: of the target's passes.
        trust: how many guesses prove right for each that these probabilities promise.
        texts: whose trees share the pass; each has a root, and writes a token at least.
        rows: [n + 1] of each such pass, if nodes and roots are not one each.
    """
    tokens = texts + np.concatenate([[0.0], trust * np.cumsum(np.exp(log_probs))])
    return tokens / (spent + cost.seconds(np.arange(texts, texts + len(tokens)) if rows is None else rows))


def best_size(log_probs: FloatArray, spent: float, cost: Curve, trust: float = 1.0) -> tuple[int, float]:
    """How many nodes make the best round, and its tokens per second; arguments as for `goodput`, but in any order."""
    rates = goodput(-np.sort(-log_probs), spent, cost, trust)
    size = int(np.argmax(rates))
    return size, float(rates[size])


def split(
    log_probs: Sequence[FloatArray],
    most: int,
    spent: float,
    cost: Curve | None,
    added: Sequence[FloatArray] | None = None,
    roots: float | None = None,
) -> list[int]:
    """How many of its best nodes each text's tree keeps where they share a pass: a predictable text gets more.

    A node is at most as probable as its parent, so the best nodes of all trees together are again trees.

    Args:
        log_probs: of each tree's nodes, the root left out.
        most: rows that the pass has room for besides the roots.
        spent: seconds of drafting.
        cost: of the target's passes; None: as many nodes are kept as there is room for.
        added: rows that each of these nodes adds to better ones of its tree; None: one each.
        roots: rows of a pass over the roots alone; None: one each.
    """
    owner = np.repeat(np.arange(len(log_probs)), [len(values) for values in log_probs])
    values = np.concatenate([*log_probs, np.zeros(0)])
    order = np.argsort(-values, kind="stable")
    rows = np.arange(len(values) + 1.0)
    if added is not None:
        rows[1:] = np.cumsum(np.concatenate([*added, np.zeros(0)])[order])
    order = order[: np.count_nonzero(rows[1:] <= most)]
    if cost is not None:
        rows = rows[: len(order) + 1] + (len(log_probs) if roots is None else roots)
        order = order[: int(np.argmax(goodput(values[order], spent, cost, texts=len(log_probs), rows=rows)))]
    return [int(count) for count in np.bincount(owner[order], minlength=len(log_probs))]


def chain_goodput(
    agreement: float, behind: int, deepest: int, cost: Curve, draft_cost: Curve, head: int | None = None
) -> float:
    """Tokens per second of the best round with a chain of 1 to `deepest` drafted tokens.

    Args:
        agreement: probability that the draft's best token is the target's, given that all before it were.
        behind: committed tokens that the draft has not read.
        deepest: most tokens to draft, at least 1.
        cost: of the target's passes.
        draft_cost: of the draft's passes.
        head: as for `paths.best_part`.
    """
    drafted = np.arange(1, deepest + 1)
    tokens = 1 + np.cumsum(agreement**drafted)
    rows = drafted + 1 if head is None else drafted + 1 + head + tokens
    reading = draft_cost.seconds(max(1, behind)) + (drafted - 1) * draft_cost.plain
    return float(np.max(tokens / (reading + cost.seconds(rows))))


def worth_reading(
    log_probs: FloatArray,
    unread: FloatArray,
    budget: int,
    spent: float,
    cost: Curve,
    draft_cost: Curve,
    child: float = 1.0,
) -> int:
    """How many more nodes the draft should read in its next pass; 0: stop drafting.

    A node that is read gets children, the best of them right about `child` times as often as the node itself. If even
    so the round would not become better, drafting ends. Gains shrink as a tree grows, so looking one pass ahead is
    enough.

    Args:
        log_probs: [n] of the nodes found so far, best first, at most `budget`.
        unread: [m] of those that could be read next, best first.
        budget: most nodes of the tree.
        spent: seconds of drafting so far.
        cost: of the target's passes.
        draft_cost: of the draft's passes.
        child: see above.
    """
    rates = goodput(log_probs, spent, cost)
    size = int(np.argmax(rates))
    more = np.arange(1, len(unread) + 1)
    tokens = 1 + np.exp(log_probs[:size]).sum() + child * np.cumsum(np.exp(unread))
    seconds = spent + draft_cost.seconds(more) + cost.seconds(np.minimum(size + more, budget) + 1)
    best = tokens / seconds
    return int(np.argmax(best)) + 1 if len(unread) and best.max() > rates[size] else 0
