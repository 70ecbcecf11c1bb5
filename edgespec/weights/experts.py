"""Mixtures of experts larger than memory: which experts lie in memory, and where; nothing is read here.

Only a layer's router knows which few experts a token uses. Layers whose experts have equal sizes share *pools*:

    slot    memory of one expert of any layer of its pool
    hit     a wanted expert that lies in a slot
    miss    a wanted expert that must be read; it takes the slot with the lowest score in the pool

A pool has a slot for each expert of a layer at least, so whatever a layer wants has room. An engine computes an
expert's address from its number, so it is given the number of its slot instead.
"""

import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from mmap import PAGESIZE

import numpy as np
from numpy.typing import ArrayLike, NDArray

from edgespec.machine.system import HUGE
from edgespec.weights.plan import Extent, Plan, Pool, Tensor, layer_of

FADING = 0.9  # factor on scores per pass, and per token of a prompt: see docs/measured.md
FADED = 64  # tokens of a prompt, after which a score is nothing
MOST_SLOTS = 1024  # of a pool: an engine takes time for each slot, and GPUs of Metal and Vulkan no more
MOST_OF_BUFFER = (4 << 30) - HUGE  # bytes: Vulkan's shaders count them in 32 bits
# Share of a layer's experts on a device, for about 0.9 of hits (docs/measured.md): to upload more can take longer than
# the processor computes them.
LEAST_ON_DEVICE = 3 / 4
MOST_OF_ARRAY = 8  # slots for each expert of a layer: with more, Metal's kernel for prompts finds too few rows a slot
SMALL = 4 * PAGESIZE  # bytes; smaller weights of an expert, such as biases, lie close together
STEPS = 1024  # in which a pool's size is chosen
NAME = re.compile(r"blk\.\d+\.ffn_(gate|up|gate_up|down)_exps\.(weight|bias)")
ORDER = [f"{part}.{kind}" for part in ("gate_up", "gate", "up", "down") for kind in ("weight", "bias")]

SlotArray = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class ExpertLayer:
    """
    Attributes:
        index: of the layer in the model.
        count: experts.
        tensors: one for each weight and bias (gate, up, down), with all experts; in the order of use.
        places: of each expert, for each tensor, where slots are an array, without bytes between them; its parts follow
            each other in a slot. (): experts lie side by side in each tensor, and slots may lie apart.
        device: that computes them, in slots without bytes between them; "": none.
    """

    index: int
    count: int
    tensors: tuple[Tensor, ...]
    places: tuple[tuple[tuple[Extent, ...], ...], ...] = ()
    device: str = ""

    def with_bias(self, number: int) -> list[int]:
        """Numbers of a weight and of its bias."""
        name = self.tensors[number].name.rpartition(".")[0]
        return [i for i, tensor in enumerate(self.tensors) if tensor.name.rpartition(".")[0] == name]

    def expert_size(self, number: int) -> int:
        return self.tensors[number].size // self.count

    def place(self, number: int, expert: int) -> tuple[Extent, ...]:
        if self.places:
            return self.places[number][expert]
        tensor, size = self.tensors[number], self.expert_size(number)
        return (Extent(tensor.file, tensor.start + expert * size, tensor.start + (expert + 1) * size),)

    def stride(self, number: int) -> int:
        """Bytes from one slot to the next: a page more than an expert, so that it lies as in the file (`skew`)."""
        size = self.expert_size(number)
        return size if self._is_close(number) else _whole(size, PAGESIZE) + PAGESIZE

    def skew(self, number: int) -> int:
        """Bytes before an expert in its slot, which align it as in the file: direct reads then need no copy."""
        return 0 if self._is_close(number) else self.tensors[number].start % PAGESIZE

    def _is_close(self, number: int) -> bool:
        """True if slots lie close together: direct reads would gain nothing, or an array needs it."""
        return bool(self.places or self.device) or self.expert_size(number) < SMALL

    @property
    def most_slots(self) -> int:
        """Of a pool."""
        if self.device:
            largest = max(map(self.expert_size, range(len(self.tensors))))
            return max(self.count, min(MOST_SLOTS, MOST_OF_BUFFER // largest))
        most = max(MOST_SLOTS, 2 * self.count)
        return min(most, MOST_OF_ARRAY * self.count) if self.places else most

    @property
    def bytes_each(self) -> int:
        return sum(tensor.size for tensor in self.tensors) // self.count

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.count, *(tensor.size for tensor in self.tensors)


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
            found.setdefault(layer_of(tensor), {})[f"{match[1]}.{match[2]}"] = tensor
    if len({frozenset(weights) for weights in found.values()}) > 1:
        return []
    return [
        ExpertLayer(index, count, tuple(weights[name] for name in ORDER if name in weights))
        for index, weights in sorted(found.items())
    ]


def memory_of(layers: Sequence[ExpertLayer], pools: Iterable[Pool]) -> int:
    """Bytes of memory that pools take."""
    return sum(
        pool_size(layers[pool.layers[0]], number, pool.slots)
        for pool in pools
        for number in range(len(layers[pool.layers[0]].tensors))
    )


def pool_size(layer: ExpertLayer, number: int, slots: int) -> int:
    return _whole(layer.stride(number) * slots, HUGE)


def _whole(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def pools_of(layers: Sequence[ExpertLayer], share: float) -> tuple[Pool, ...]:
    """Pools for a share of all experts, as far as each holds all experts of one layer.

    Layers of one size on one device take turns in the pools, so that the next layer's experts can be read into another.
    """
    groups: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for number, layer in enumerate(layers):
        groups.setdefault((layer.device, layer.sizes), []).append(number)
    found = list[Pool]()
    for group in groups.values():
        count = layers[group[0]].count
        slots = max(count, int(share * count * len(group)))
        pools = -(-slots // layers[group[0]].most_slots)
        found += [Pool(tuple(group[i::pools]), -(-slots // pools), layers[group[0]].device) for i in range(pools)]
    return tuple(found)


def most_slots(layers: Sequence[ExpertLayer]) -> int:
    """Most slots of any pool of these layers."""
    return min(len(layers) * layers[0].count, layers[0].most_slots)


def most_pools(layers: Sequence[ExpertLayer], room: int) -> tuple[Pool, ...]:
    """
    Returns:
        The largest pools that fit into `room` bytes; (): not even the smallest do.
    """
    best = bisect_right(range(STEPS + 1), room, key=lambda step: memory_of(layers, pools_of(layers, step / STEPS))) - 1
    return pools_of(layers, best / STEPS) if best >= 0 else ()


def device_pools(layers: Sequence[ExpertLayer], numbers: Sequence[int], room: int, device: str) -> tuple[Pool, ...]:
    """Pools in a device's memory.

    Args:
        layers: of the model.
        numbers: of those that the device computes.
        room: bytes of its memory.
        device: its name.

    Returns:
        The largest pools of as many last layers as have `LEAST_ON_DEVICE` of their experts there.
    """
    some = [replace(layers[number], device=device) for number in numbers]
    for first in range(len(some)):
        pools, left = most_pools(some[first:], room), numbers[first:]
        if all(pool.slots >= LEAST_ON_DEVICE * len(pool.layers) * some[0].count for pool in pools) and pools:
            return tuple(replace(pool, layers=tuple(left[i] for i in pool.layers)) for pool in pools)
    return ()


def with_pools(plan: Plan, layers: Sequence[ExpertLayer], room: int) -> Plan:
    """A plan with the largest pools that fit into `room` bytes, at least the smallest."""
    pools = most_pools(layers, room) or pools_of(layers, 0)
    return replace(plan, experts=layers[0].count, pools=pools, pool_bytes=memory_of(layers, pools))


class Residents:
    """The experts that lie in one pool, and their slots. `row`: number of a layer within the pool."""

    def __init__(self, rows: int, count: int, slots: int, fading: float = FADING) -> None:
        """Args:
        rows: layers of the pool.
        count: experts of a layer.
        slots: of the pool.
        fading: factor on a layer's scores per pass. 1: the most used experts stay; 0.5 and below: those used last.
        """
        self.scores = np.zeros((rows, count))
        self._fading = fading
        self._slot_of = np.full((rows, count), -1, np.int32)  # -1: not in memory
        self._in_slot = np.full(slots, -1, np.int64)  # by slot: row * count + expert; -1: empty

    def use(self, row: int, wanted: Sequence[int]) -> None:
        """Raise the scores of experts that a pass uses, each once."""
        self.scores[row] *= self._fading
        self.scores[row, list(wanted)] += 1

    def use_in_turn(self, row: int, chosen: ArrayLike) -> None:
        """As `use` for each token of a prompt: [tokens, experts of a token]."""
        last = np.asarray(chosen)[-FADED:]
        self.scores[row] *= self._fading ** len(last)
        np.add.at(self.scores[row], last, self._fading ** np.arange(len(last) - 1, -1, -1)[:, None])

    def slots_of(self, row: int) -> SlotArray:
        """
        Returns:
            [experts of the layer] the slot of each; -1: not in memory.
        """
        found: SlotArray = self._slot_of[row]
        return found

    def place(self, row: int, wanted: Sequence[int], kept: Sequence[int] = ()) -> list[tuple[int, int]]:
        """Give missing experts of a layer slots, as many as have room.

        Args:
            row: of the layer.
            wanted: experts, each once; those that are in memory stay.
            kept: other slots that must not be given away.

        Returns:
            (expert, slot) of each that was missing, to be read.
        """
        slots = self._slot_of[row, list(wanted)].tolist()
        missing = [expert for expert, slot in zip(wanted, slots, strict=True) if slot < 0]
        if not missing:
            return []
        worth = np.where(self._in_slot < 0, -1.0, self.scores.ravel()[self._in_slot])
        worth[[*kept, *(slot for slot in slots if slot >= 0)]] = np.inf
        free = np.argsort(worth, kind="stable")[: np.count_nonzero(np.isfinite(worth))].tolist()
        reads = list(zip(missing, free, strict=False))
        for expert, slot in reads:
            self._empty(slot)
            self._in_slot[slot] = row * self.scores.shape[1] + expert
            self._slot_of[row, expert] = slot
        return reads

    def forget(self, row: int, expert: int) -> None:
        """Count an expert as missing: it could not be read."""
        if (slot := int(self._slot_of[row, expert])) >= 0:
            self._empty(slot)

    def _empty(self, slot: int) -> None:
        if self._in_slot[slot] >= 0:
            self._slot_of.ravel()[self._in_slot[slot]] = -1
            self._in_slot[slot] = -1
