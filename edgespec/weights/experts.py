"""Mixtures of experts larger than memory: which experts lie in memory, and where.

A token uses few of a layer's experts, so most bytes of such a model are not needed in a pass, and which are is known
only when the layer's router has chosen. Of every layer the same number of experts, the `slots` of its *pool*, stays in
memory:

    hit         an expert that is wanted and lies in the pool
    miss        one that must be read; it takes the slot of the one that was used least, and lately not at all
    overflow    where a pass wants more experts than the pool has slots, as prompts and wide trees do, those that do
                not lie in it get further slots, whose memory moves on from layer to layer; the pool stays as it is

An engine finds an expert by a number times the size of an expert, so slots of a layer lie one behind the other, and
the engine is told slots instead of experts. `expert_memory.py` does the reading.
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

FADING = 0.9  # of what was used, with each further pass: see docs/measured.md
NAME = re.compile(r"blk\.\d+\.ffn_(gate|up|gate_up|down)_exps\.weight")
ORDER = ("gate_up", "gate", "up", "down")

SlotArray = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class ExpertLayer:
    """The experts of one layer."""

    index: int
    count: int  # experts
    tensors: tuple[Tensor, ...]  # each the same weight of all experts, one behind the other; in the order of their use

    def expert_size(self, number: int) -> int:
        """Bytes of one expert in tensor `number`."""
        return self.tensors[number].size // self.count

    @property
    def bytes_each(self) -> int:
        """Bytes of one expert."""
        return sum(tensor.size for tensor in self.tensors) // self.count


def find_experts(tensors: Iterable[Tensor], count: int) -> list[ExpertLayer]:
    """The layers of a model that have experts, `count` each; none if their tensors are not as they should be."""
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
    """Bytes before a tensor's first slot, so that weights lie as in the file and direct reads need no copy."""
    return layer.tensors[number].start % PAGESIZE


def pool_size(layer: ExpertLayer, number: int, slots: int) -> int:
    """Bytes of memory that the pool of one tensor takes: whole huge pages, for what is behind them moves."""
    return _whole(skew(layer, number) + layer.expert_size(number) * slots) if slots else 0


def overflow_size(layer: ExpertLayer, number: int, slots: int) -> int:
    """Bytes for the experts of one tensor for which the pool has no slot."""
    return _whole(skew(layer, number) + layer.tensors[number].size) - pool_size(layer, number, slots)


def _whole(size: int) -> int:
    return -(-size // HUGE) * HUGE


def memory_of(layers: Sequence[ExpertLayer], slots: int) -> int:
    """Bytes that pools of so many slots, and the overflow, take."""
    pools = sum(pool_size(layer, i, slots) for layer in layers for i in range(len(layer.tensors)))
    return pools + sum(overflows(layers, slots))


def overflows(layers: Sequence[ExpertLayer], slots: int) -> list[int]:
    """Bytes of overflow for the i-th tensor of a layer, whichever layer it is."""
    return [max(overflow_size(layer, i, slots) for layer in layers) for i in range(len(layers[0].tensors))]


def most_slots(layers: Sequence[ExpertLayer], room: int) -> int:
    """Most slots of a pool that so many bytes allow; -1: not even the overflow fits."""
    return bisect_right(range(layers[0].count + 1), room, key=lambda slots: memory_of(layers, slots)) - 1


class Residents:
    """Which experts of one layer lie in which slots. Decides; reads nothing."""

    def __init__(self, count: int, slots: int, fading: float = FADING) -> None:
        """
        Args:
            count: experts.
            slots: of the pool.
            fading: 1: the experts used most stay; 0.5 and below: those used last; between: both count.
        """
        self.slots = slots
        self.scores = np.zeros(count)
        self._fading = fading
        self._slot_of = np.full(count, -1, np.int32)  # -1: not in memory
        self._held = np.full(slots, -1, np.int32)  # by slot; -1: empty
        self._over: list[int] = []  # experts in overflow slots, in their order

    def place(self, wanted: Sequence[int], *, count: bool = True) -> list[tuple[int, int]]:
        """Give every wanted expert a slot.

        Args:
            wanted: experts, each once.
            count: whether that they are used counts for the future.

        Returns:
            (expert, slot) of those that must be read.
        """
        if count:
            self.scores *= self._fading
            self.scores[list(wanted)] += 1
        missing = [expert for expert in wanted if self._slot_of[expert] < 0]
        free = np.flatnonzero(self._held < 0).tolist()
        if len(wanted) <= self.slots and not self._over:
            needed = set(wanted)
            others = [slot for slot in range(self.slots) if self._held[slot] >= 0 and self._held[slot] not in needed]
            free += sorted(others, key=lambda slot: self.scores[self._held[slot]])
        reads = []
        for expert in missing:
            if free:
                slot = free.pop(0)
                self.forget(int(self._held[slot]))
                self._held[slot] = expert
            else:
                slot = self.slots + len(self._over)
                self._over.append(expert)
            self._slot_of[expert] = slot
            reads.append((expert, slot))
        return reads

    def slots_of(self, experts: ArrayLike) -> SlotArray:
        """The slot of each; the shape of `experts`."""
        found: SlotArray = self._slot_of[np.asarray(experts)]
        return found

    def leave_overflow(self) -> None:
        """The layer is computed: the memory of its overflow goes to another."""
        for expert in self._over:
            self._slot_of[expert] = -1
        self._over = []

    @property
    def overflowing(self) -> bool:
        """Whether experts lie in overflow slots."""
        return bool(self._over)

    def forget(self, expert: int) -> None:
        """It could not be read, or its slot is taken."""
        if expert >= 0 and self._slot_of[expert] >= 0:
            if self._slot_of[expert] < self.slots:
                self._held[self._slot_of[expert]] = -1
            self._slot_of[expert] = -1

    def held(self) -> list[int]:
        """Experts in the pool."""
        return [int(expert) for expert in self._held if expert >= 0]
