"""Pass times by number of nodes, learned from the passes made."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from math import inf, log
from statistics import fmean, median
from typing import Annotated

import numpy as np
from numpy.typing import ArrayLike
from pydantic import Field

from edgespec.loop.shapes import TILE
from edgespec.loop.tree import FloatArray

KEPT = 8  # last passes that count, of about one size: times change with load
FAR = 3  # least ratio of two sizes that shows the slope
STEEP, FLAT = 0.5, 0.01  # plain passes that a further node costs, until it is measured: weights in memory, streamed
# Of `distinct`, until it is learned: of passes that verify drafts, some of them rejected. Tokens of one text have 0.62
# to 0.75 in Qwen3-30B and Gemma-4-26B, 0.75 to 0.88 in gpt-oss (docs/measured.md).
POWER = 0.8
Experts = tuple[int, int] | tuple[int, int, float]  # of a layer, those that a token uses, and perhaps the power
WIDE = 64  # nodes of a wide tree
FEW = 8  # rows that GPUs compute without tiles; llama.cpp's kernels of all of them, MLX's of large matrices about so
KnownPass = tuple[  # a row of `PassTimes.as_list` in a file
    Annotated[int, Field(ge=0, le=64)], Annotated[float, Field(ge=1, le=1e9)], Annotated[float, Field(gt=0, le=1e9)]
]


def distinct(nodes: ArrayLike, experts: int, used: int, power: float = POWER) -> FloatArray:
    """
    Args:
        nodes: at least 1.
        experts: experts of a layer.
        used: experts that a token uses.
        power: n nodes choose as many experts as n^power nodes that have nothing to do with each other.

    Returns:
        Expected number of different experts of a layer that a pass over `nodes` nodes chooses.
    """
    return np.asarray(experts * (1 - (1 - used / experts) ** np.asarray(nodes, np.float64) ** power))


def choices(share: float, experts: int, used: int) -> float:
    """Nodes that have nothing to do with each other, which choose this share of a layer's experts; as `distinct`."""
    return log(1 - min(share, 1 - 1e-9)) / log(1 - used / experts) if used < experts else 1.0


@dataclass(frozen=True)
class Curve:
    """Seconds of a pass by its number of nodes, linear between the sizes seen and beyond them; one sequence's share.

    Attributes:
        sizes: [k] numbers of nodes, rising.
        took: [k] seconds, falling only where other kernels begin.
        slope: seconds of each node beyond the largest size; with `experts`, of each unit of `weight`.
        experts: of a mixture; with them, seconds are linear in `weight`.
        sequences: sequences that share each pass, with equally many nodes.
    """

    sizes: FloatArray
    took: FloatArray
    slope: float
    experts: Experts | None = None
    sequences: float = 1

    def shared(self, sequences: float) -> "Curve":
        """The curve of one sequence's share of passes that `sequences` share."""
        if sequences == self.sequences:  # a new curve would compute `plain` and `least` again
            return self
        return replace(self, sequences=sequences)

    def at_pace(self, pace: float) -> "Curve":
        """The curve where each pass takes `pace` times as long."""
        return replace(self, took=pace * self.took, slope=pace * self.slope)

    def seconds(self, nodes: ArrayLike) -> FloatArray:
        """Predicted seconds of passes over `nodes` nodes, in the shape of `nodes`."""
        nodes = np.asarray(nodes) * self.sequences
        wanted, size, took = weight(nodes, self.experts), weight(self.sizes, self.experts), self.took
        # Below the smallest size: the same slope, but not below the proportional time.
        below = np.maximum(took[0] - self.slope * (size[0] - wanted), took[0] * wanted / size[0])
        found = np.where(wanted < size[0], below, np.interp(wanted, size, took))
        return np.where(wanted > size[-1], took[-1] + self.slope * (wanted - size[-1]), found) / self.sequences

    def paid(self, nodes: int) -> "Curve":
        """The curve where smaller passes take as long as one over `nodes` nodes, whose tile is paid for."""
        return replace(self, took=np.where(self.sizes < nodes, self.seconds(nodes), self.took))

    @cached_property
    def plain(self) -> float:
        """Seconds of a pass over one node."""
        return float(self.took[0] if self.sizes[0] == self.sequences == 1 else self.seconds(1))

    @cached_property
    def least(self) -> float:
        """Plain passes that a node costs where nodes are cheapest: no draft token less probable than this pays."""
        far, whole = self.sizes > self.sequences, self.plain * self.sequences
        on = (float(self.seconds(WIDE)) - self.plain) / (WIDE - 1) if self.experts else self.slope
        return float(min([on, *((self.took[far] - whole) / (self.sizes[far] - self.sequences))]) / self.plain)


def weight(nodes: ArrayLike, experts: Experts | None) -> FloatArray:
    """
    Returns:
        Work of passes over `nodes` nodes, in passes over one node; the shape is that of `nodes`.
    """
    wanted = np.asarray(nodes, np.float64)
    return distinct(wanted, *experts) / experts[1] + FLAT * (wanted - 1) if experts else wanted


class PassTimes:
    """Pass times by number of nodes and sequence length.

    Attributes:
        measured: passes since the start or `recall`.
    """

    def __init__(self, slope: float = STEEP, experts: Experts | None = None, *, tiled: bool = False) -> None:
        """Args:
        slope: plain passes that a further node is expected to cost, until it is measured.
        experts: as for `Curve`.
        tiled: as `Capabilities.tiled`.
        """
        self.slope, self.experts, self.tiled, self.measured = slope, experts, tiled, 0
        self._switch = FEW + 1 if tiled else TILE  # nodes from which on other kernels compute
        # Length class -> bit length of the number of nodes -> the last passes (nodes, seconds).
        self._passes: dict[int, dict[int, deque[tuple[float, float]]]] = {}
        self._usual: dict[int, dict[int, tuple[float, float]]] = {}  # as `_passes` -> (mean nodes, median seconds)
        self._curves: dict[int, Curve] = {}
        self._remembered = set[tuple[int, int]]()  # keys of `_passes` without a pass of this run

    def add(self, nodes: float, seconds: float, length: int = 0) -> None:
        """Record a pass.

        Args:
            nodes: number of its nodes.
            seconds: its time.
            length: committed tokens before it.
        """
        at, bits = self._class(length), self._bits(nodes)
        if bits > 1 and (at, bits) in self._remembered and (known := self.at(length)):
            self._shorten(at, min(1.0, seconds / float(known.seconds(nodes))))
        passes = self._passes.setdefault(at, {}).setdefault(bits, deque(maxlen=KEPT))
        passes.append((nodes, max(seconds, 1e-9)))
        sizes, times = zip(*passes, strict=True)
        self._usual.setdefault(at, {})[bits] = fmean(sizes), median(times)
        self._remembered.discard((at, bits))
        self.measured += 1
        for other, (size, took) in list(self._usual[at].items()):
            contradicts = (size - nodes) * (took - seconds) < 0 and (size < self._switch) == (nodes < self._switch)
            if contradicts and (at, other) in self._remembered:  # a larger pass takes longer: what is known is old
                self._remembered.discard((at, other))
                del self._passes[at][other], self._usual[at][other]
        self._curves.pop(at, None)

    def _class(self, length: int) -> int:
        return 0 if self.tiled else length_class(length)  # what was measured before the first text holds for all

    def _bits(self, nodes: float) -> int:
        """The class of a size; of tiles, each class ends with a whole one."""
        return (round(nodes) - self.tiled).bit_length() + self.tiled

    def _shorten(self, at: int, ratio: float) -> None:
        """Passes over several nodes were remembered together: if one is faster than remembered, the others are, too."""
        for bits in [bits for near, bits in self._remembered if near == at and bits > 1]:
            size, took = self._usual[at][bits]
            self._usual[at][bits] = size, ratio * took
            self._passes[at][bits] = deque([(size, ratio * took)], KEPT)

    def learn_power(self, power: float) -> None:
        """Predict by another power of `distinct`."""
        if self.experts:
            self.experts = *self.experts[:2], power
            self._curves.clear()

    def has_plain(self, length: int) -> bool:
        """
        Returns:
            True if a pass over one node was seen at about this length.
        """
        return 1 in self._passes.get(self._class(length), ())

    def at(self, length: int) -> Curve | None:
        """
        Returns:
            The curve of the length class seen that is nearest to `length`; None: no pass was seen.
        """
        if not self._passes:
            return None
        wanted = self._class(length)
        at = min(self._passes, key=lambda known: (abs(known - wanted), known))
        if at not in self._curves:
            self._curves[at] = self._curve(sorted(self._usual[at].values()))
        return self._curves[at]

    def _curve(self, seen: list[tuple[float, float]]) -> Curve:
        if self.tiled:  # a tile that is not full takes as long
            first = {((1 << self._bits(nodes) - 2) + 1.0, seconds) for nodes, seconds in seen if nodes > FEW}
            seen = sorted({*seen, *first})
        size = [nodes for nodes, _ in seen]
        narrow = sum(nodes < self._switch for nodes in size)
        took = [seconds for _, seconds in seen]
        took = [*accumulate(took[:narrow], max), *accumulate(took[narrow:], max)]
        far = [i for i, nodes in enumerate(size) if nodes * FAR <= size[-1]]
        heavy = weight(size, self.experts)
        if far:
            slope = (took[-1] - took[far[-1]]) / float(heavy[-1] - heavy[far[-1]])
            slope = max(0.0, slope) if self.tiled else slope
        else:
            slope = self.slope * took[0] / (1 + self.slope * float(heavy[0] - 1))
        return Curve(np.array(size), np.array(took), slope, self.experts)

    def as_list(self) -> list[list[float]]:
        """
        Returns:
            [length class, mean nodes, seconds] of each size, for JSON: the median, but at most that of a larger pass
            with the same kernels, since a smaller one that took longer was held up.
        """
        rows = [[at, *usual] for at, sizes in self._usual.items() for usual in sizes.values()]
        return [
            [at, nodes, min(took for *one, took in rows if one[0] == at and nodes <= one[1] < most)]
            for at, nodes, _ in rows
            for most in [self._switch if nodes < self._switch else inf]
        ]

    def recall(self, rows: Iterable[Sequence[float]]) -> None:
        """Start from the rows of `as_list`, each of which counts as one pass."""
        for at, nodes, seconds in rows:
            self.add(nodes, seconds, 1024 << int(at) - 1 if at else 0)
        self.measured = 0
        self._remembered = {(at, bits) for at, sizes in self._passes.items() for bits in sizes}


def length_class(length: int) -> int:
    """Number of doublings from 512 tokens, at least 0: attention's share of a pass grows with the length."""
    return (length // 1024).bit_length()
