"""Seconds that passes take, by their number of nodes, learned from the passes made."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from statistics import fmean, median

import numpy as np
from numpy.typing import ArrayLike

from edgespec.loop.shapes import TILE
from edgespec.loop.tree import FloatArray

KEPT = 8  # passes of about one size; times change with the sequence's length and with what else the machine does
RECALLED = 2  # passes that a remembered cost counts for: a few new ones outvote it
NEAR = 3  # sizes closer than this ratio do not show how cost grows
STEEP, FLAT = 0.5, 0.01  # of a plain pass, what each more node costs until that is seen; FLAT: weights are streamed


NOVELTY = (
    0.75  # of a node's choices of experts, those made as if by itself: 0.78 follows from two nodes of GLM-4.7-Flash
)
WIDE = 64  # nodes of a tree that is called wide


def distinct(nodes: ArrayLike, experts: int, used: int) -> FloatArray:
    """Expected number of different experts that a pass over `nodes` nodes chooses in a layer.

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

    Of sequences that share passes, of the target or of the draft, each pays a part. If all propose alike, the best step
    of one, with its part of the passes, is the best for all.
    """

    sizes: FloatArray  # [k], rising
    took: FloatArray  # [k] seconds; falling at `TILE` nodes if anywhere
    slope: float  # seconds of each node, or weight, beyond the largest size
    experts: tuple[int, int] | None = None  # of a layer, and used by a token, if passes read those used
    sequences: float = 1  # that share each pass, with as many nodes each

    def shared(self, sequences: float) -> "Curve":
        """Of passes that `sequences` share: one's nodes, and its part of the time."""
        if sequences == self.sequences:  # a new one would forget `plain` and `least`
            return self
        return replace(self, sequences=sequences)

    def seconds(self, nodes: ArrayLike) -> FloatArray:
        """Predicted seconds of passes over `nodes` nodes; the shape of `nodes`."""
        nodes = np.asarray(nodes) * self.sequences
        wanted, size, took = weight(nodes, self.experts), weight(self.sizes, self.experts), self.took
        # Below the smallest size: down the same slope, but never as if all of a pass were its nodes.
        below = np.maximum(took[0] - self.slope * (size[0] - wanted), took[0] * wanted / size[0])
        found = np.where(wanted < size[0], below, np.interp(wanted, size, took))
        return np.where(wanted > size[-1], took[-1] + self.slope * (wanted - size[-1]), found) / self.sequences

    @cached_property
    def plain(self) -> float:
        """Seconds of a pass over one node."""
        return float(self.took[0] if self.plain_was_seen and self.sequences == 1 else self.seconds(1))

    @cached_property
    def least(self) -> float:
        """Of a plain pass, the cost of a node where nodes are cheapest: a draft token less probable cannot pay."""
        far, whole = self.sizes > self.sequences, self.plain * self.sequences
        on = (float(self.seconds(WIDE)) - self.plain) / (WIDE - 1) if self.experts else self.slope
        return float(min([on, *((self.took[far] - whole) / (self.sizes[far] - self.sequences))]) / self.plain)

    @property
    def plain_was_seen(self) -> bool:
        """True if passes over one node were measured, not predicted."""
        return bool(self.sizes[0] == 1)


def weight(nodes: ArrayLike, experts: tuple[int, int] | None) -> FloatArray:
    """Work of passes over `nodes` nodes, in passes over one node; the shape of `nodes`."""
    wanted = np.asarray(nodes, np.float64)
    return distinct(wanted, *experts) / experts[1] + FLAT * (wanted - 1) if experts else wanted


class PassTimes:
    """Seconds that passes take, by number of nodes and by the length of the sequence before them."""

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

    def least_seen(self, sequences: int = 1) -> int:
        """Passes known of the smallest size seen that `sequences` can share, for the length with most.

        The first pass after loading may take twice as long as all others: by it alone larger ones would look cheap.
        Sequences that share their passes make none over one node.
        """
        shared = [[size for size in sizes if size >= sequences.bit_length()] for sizes in self._passes.values()]
        counts = [len(one[min(sizes)]) for one, sizes in zip(self._passes.values(), shared, strict=True) if sizes]
        return max(counts, default=0)

    def at(self, length: int) -> Curve | None:
        """The curve for sequences of about this length, else for the nearest length seen; None: no pass was seen."""
        if not self._passes:
            return None
        wanted = length_class(length)
        at = min(self._passes, key=lambda known: (abs(known - wanted), known))
        if at not in self._curves:
            self._curves[at] = self._curve(sorted(self._usual[at].values()))
        return self._curves[at]

    def _curve(self, seen: list[tuple[float, float]]) -> Curve:
        size = [nodes for nodes, _ in seen]
        narrow = sum(nodes < TILE for nodes in size)
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
    """0 below 1,024 tokens, and one more with each doubling: attention's share of a pass grows with the length."""
    return (length // 1024).bit_length()


def _length(at: int) -> int:
    return 1024 << (at - 1) if at > 0 else 0
