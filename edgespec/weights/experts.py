"""Mixtures of experts larger than memory: which experts lie in memory, and where; nothing is read here.

Only a layer's router knows which few experts a token uses, so each layer has a *pool* in memory, with `slots` experts:

    hit         a wanted expert that lies in the pool
    miss        a wanted expert that must be read; it takes the slot with the lowest score
    overflow    further slots, for passes that want more experts than the pool has; moves from layer to layer

An engine computes an expert's address from its number, so it is given the number of its slot instead.
"""

import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from mmap import PAGESIZE

import numpy as np
from numpy.typing import ArrayLike, NDArray

from edgespec.machine.system import HUGE
from edgespec.weights.plan import Tensor, layer_of

FADING = 0.9  # factor on scores per pass: see docs/measured.md
NAME = re.compile(r"blk\.\d+\.ffn_(gate|up|gate_up|down)_exps\.weight")
ORDER = ("gate_up", "gate", "up", "down")

SlotArray = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class ExpertLayer:
    """
    Attributes:
        index: of the layer in the model.
        count: experts.
        tensors: one for each weight (gate, up, down), with all experts; in the order of use.
    """

    index: int
    count: int
    tensors: tuple[Tensor, ...]

    def expert_size(self, number: int) -> int:
        return self.tensors[number].size // self.count

    @property
    def bytes_each(self) -> int:
        return sum(tensor.size for tensor in self.tensors) // self.count


def find_experts(tensors: Iterable[Tensor], count: int) -> list[ExpertLayer]:
    """
    Args:
        tensors: of the whole model.
        count: experts of a layer.

    Returns:
        The layers that have experts; [] if these lie otherwise than expected.
    """
    found: dict[int, dict[str, Tensor]] = {}
    for tensor in tensors:
        if match := NAME.fullmatch(tensor.name):
            if count < 1 or tensor.size % count:
                return []
            found.setdefault(layer_of(tensor), {})[match[1]] = tensor
    if len({frozenset(weights) for weights in found.values()}) > 1:
        return []
    return [
        ExpertLayer(index, count, tuple(weights[name] for name in ORDER if name in weights))
        for index, weights in sorted(found.items())
    ]


def skew(layer: ExpertLayer, number: int) -> int:
    """Bytes before a tensor's first slot, which align it as in the file: direct reads then need no copy."""
    return layer.tensors[number].start % PAGESIZE


def pool_size(layer: ExpertLayer, number: int, slots: int) -> int:
    """Bytes of one tensor's pool, in whole huge pages, since the overflow's memory is moved behind it."""
    return _whole(skew(layer, number) + layer.expert_size(number) * slots) if slots else 0


def overflow_size(layer: ExpertLayer, number: int, slots: int) -> int:
    return _whole(skew(layer, number) + layer.tensors[number].size) - pool_size(layer, number, slots)


def _whole(size: int) -> int:
    return -(-size // HUGE) * HUGE


def memory_of(layers: Sequence[ExpertLayer], slots: int) -> int:
    pools = sum(pool_size(layer, i, slots) for layer in layers for i in range(len(layer.tensors)))
    return pools + sum(overflows(layers, slots))


def overflows(layers: Sequence[ExpertLayer], slots: int) -> list[int]:
    return [max(overflow_size(layer, i, slots) for layer in layers) for i in range(len(layers[0].tensors))]


def most_slots(layers: Sequence[ExpertLayer], room: int) -> int:
    """
    Returns:
        Most slots of each pool that fit into `room` bytes with the overflow; -1: not even the overflow fits.
    """
    return bisect_right(range(layers[0].count + 1), room, key=lambda slots: memory_of(layers, slots)) - 1


class Residents:
    """The experts of one layer that lie in memory, and their slots; `place` gives and takes them."""

    def __init__(self, count: int, slots: int, fading: float = FADING) -> None:
        """Args:
        count: experts.
        slots: of the pool.
        fading: factor on all scores per pass. 1: the most used experts stay; 0.5 and below: those used last.
        """
        self.slots = slots
        self.scores = np.zeros(count)
        self._fading = fading
        self._slot_of = np.full(count, -1, np.int32)  # -1: not in memory
        self._in_slot = np.full(slots, -1, np.int32)  # by slot; -1: empty
        self._over: list[int] = []

    def place(self, wanted: Sequence[int], *, score: bool = True) -> list[tuple[int, int]]:
        """Give every wanted expert a slot.

        Args:
            wanted: experts, each once.
            score: this use raises their scores.

        Returns:
            (expert, slot) of those that must be read.
        """
        if score:
            self.scores *= self._fading
            self.scores[list(wanted)] += 1
        missing = [expert for expert in wanted if self._slot_of[expert] < 0]
        free = np.flatnonzero(self._in_slot < 0).tolist()
        if len(wanted) <= self.slots and not self._over:
            needed = set(wanted)
            others = [
                slot for slot in range(self.slots) if self._in_slot[slot] >= 0 and self._in_slot[slot] not in needed
            ]
            free += sorted(others, key=lambda slot: self.scores[self._in_slot[slot]])
        reads = []
        for expert in missing:
            if free:
                slot = free.pop(0)
                self.forget(int(self._in_slot[slot]))
                self._in_slot[slot] = expert
            else:
                slot = self.slots + len(self._over)
                self._over.append(expert)
            self._slot_of[expert] = slot
            reads.append((expert, slot))
        return reads

    def slots_of(self, experts: ArrayLike) -> SlotArray:
        found: SlotArray = self._slot_of[np.asarray(experts)]
        return found

    def leave_overflow(self) -> None:
        for expert in self._over:
            self._slot_of[expert] = -1
        self._over = []

    @property
    def overflowing(self) -> bool:
        return bool(self._over)

    def forget(self, expert: int) -> None:
        if expert >= 0 and self._slot_of[expert] >= 0:
            if self._slot_of[expert] < self.slots:
                self._in_slot[self._slot_of[expert]] = -1
            self._slot_of[expert] = -1

    def held(self) -> list[int]:
        return [int(expert) for expert in self._in_slot if expert >= 0]
