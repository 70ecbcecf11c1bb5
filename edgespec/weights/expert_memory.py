"""Experts that threads read from disk into pools (`experts.py`) while a model computes; any system.

Slots are empty at first, and fill as passes want experts. While one weight is computed, the next are read, and with
them what the next layer is likely to want: nearly all experts (`expect`), or those that an engine predicts (`foresee`).
"""

import ctypes
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from queue import Empty, SimpleQueue
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from edgespec.errors import ModelError, failing_as, undone
from edgespec.loop.engines import Progress
from edgespec.machine.disk import recall_reading
from edgespec.machine.measurements import Amount, recall, remember
from edgespec.machine.system import BLOCK, COMPRESSES, libc, read_buffer
from edgespec.weights.direct_io import DirectFiles
from edgespec.weights.experts import ExpertLayer, Residents, SlotArray, pool_size
from edgespec.weights.plan import Pool
from edgespec.weights.preload import lock

NEARLY_ALL = 0.9  # share of a layer's chosen experts that makes all of the next layer's worth a read
TRIED, LEAST_RIGHT = 256, 1 / 2  # predictions, after which less than this share of right ones ends them
ROWS_SHOWN = 16  # of a pass, to the next layer's router
SURE = 5 / 6  # share of the experts of a token that are predicted: the last ones are wrong too often (docs/measured.md)

Load = tuple[int, int]  # number of the layer in `ExpertMemory.layers`, of the weight in `ExpertLayer.tensors`


@dataclass(frozen=True, slots=True)
class _Piece:
    load: Load
    file: int
    start: int
    stop: int
    address: int


@dataclass(frozen=True, slots=True)
class _Place:
    """A layer's place in its pool.

    Attributes:
        residents: of the pool.
        row: of the layer in it.
        slots: of the pool.
        memory: for each weight, and its address, where slot 0 begins.
    """

    residents: Residents
    row: int
    slots: int
    memory: tuple[tuple[Any, int], ...]

    def slots_of(self, experts: Iterable[int]) -> list[int]:
        """Those of experts that are in memory."""
        found = self.residents.slots_of(self.row)[list(experts)].tolist()
        return [slot for slot in found if slot >= 0]


def own_memory(size: int) -> tuple[Any, int]:
    """
    Returns:
        Memory of this process, and its address.
    """
    memory = read_buffer(size)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    if COMPRESSES:
        lock(libc(), [(address, size)])
    return memory, address


def most_predicted(used: int) -> int:
    """Experts that are predicted of a token that uses `used`."""
    return max(1, int(SURE * used))


class ExpertMemory:
    """All methods belong to the thread that computes; `number` and `weight` are as in `Load`.

    Attributes:
        on_devices: numbers of layers whose experts devices compute.
        release: called at the end, before the memory goes: a device that computes in it gives it back.
    """

    release: Callable[[], None] = staticmethod(lambda: None)

    def __init__(
        self,
        paths: Sequence[str],
        layers: Sequence[ExpertLayer],
        pools: Sequence[Pool],
        about: dict[str, Any] | None = None,
        reserve: Callable[[int], tuple[Any, int]] = own_memory,
    ) -> None:
        """Args:
            paths: files of the model.
            layers: layers whose experts are read; at least one.
            pools: of all these layers.
            about: key of the scores, which begin as they are remembered; None: they are not remembered.
            reserve: returns memory of so many bytes, and its address.

        Raises:
            OSError: a file cannot be opened, or there is no memory.
        """
        computes = {number: pool.device for pool in pools for number in pool.layers}
        self.layers = layers = [replace(layer, device=computes[number]) for number, layer in enumerate(layers)]
        self.on_devices: Collection[int] = {number for number, device in computes.items() if device}
        self._about = about
        self.wait_seconds = 0.0
        self.bytes_read = 0
        self.wanted = self.hits = 0
        self.predicted = self.right = 0
        self._used: Sequence[int] = ()  # experts that the last layer takes from these pools
        self._foreseen: dict[int, set[int]] = {}  # number of the layer -> experts that are read ahead for it
        self._files = DirectFiles(paths)
        self._queue: SimpleQueue[_Piece | None] = SimpleQueue()
        self._changed = threading.Condition()  # notified when a load is read, when nothing is left, or after an error
        self._left: dict[Load, int] = {}
        self._loading: dict[int, set[int]] = {}  # number of the layer -> experts that are being read
        self._unread = 0
        self._error: ModelError | None = None
        self._threads: list[threading.Thread] = []
        self._places: dict[int, _Place] = {}
        with undone(self.close):
            for pool in pools:
                first = layers[pool.layers[0]]
                memory = tuple(reserve(pool_size(first, i, pool.slots)) for i in range(len(first.tensors)))
                residents = Residents(len(pool.layers), first.count, pool.slots)
                for row, number in enumerate(pool.layers):
                    self._places[number] = _Place(residents, row, pool.slots, memory)
            how = recall_reading(paths[layers[0].tensors[0].file])
            self._read_size = how.size
            for i in range(how.threads):
                thread = threading.Thread(target=self._work, name=f"edgespec-experts-{i}", daemon=True)
                thread.start()
                self._threads.append(thread)
        known = (recall(about, list[list[Amount]]) if about else None) or []
        if [len(one) for one in known] == [layer.count for layer in layers]:
            for number, place in self._places.items():
                place.residents.scores[place.row] = known[number]

    @property
    def scores(self) -> list[list[float]]:
        """Of each layer's experts."""
        places = [self._places[number] for number in range(len(self.layers))]
        return [place.residents.scores[place.row].tolist() for place in places]

    @property
    def counted(self) -> tuple[int, int, int]:
        """
        Returns:
            Experts that passes over trees used, those of them that were in memory, and bytes read.
        """
        return self.wanted, self.hits, self.bytes_read

    def slots(self, number: int) -> int:
        """Number of slots of the layer's pool."""
        return self._places[number].slots

    def base(self, number: int, weight: int) -> int:
        """Address of the layer's experts in slot 0; `ExpertLayer.stride` leads to the next slot."""
        return self.memory(number, weight)[1] + self.layers[number].skew(weight)

    def memory(self, number: int, weight: int) -> tuple[Any, int]:
        """As `reserve` made it."""
        return self._places[number].memory[weight]

    def stays(self, number: int) -> SlotArray | None:
        """Slots of the layer's experts if its pool holds all experts of its layers, after `fill`; else None."""
        place = self._places[number]
        whole = place.slots >= place.residents.scores.size
        return place.residents.slots_of(place.row) if whole else None

    def begin(self) -> None:
        """Start a pass, also after one that failed.

        Raises:
            ModelError: a file has shrunk.
        """
        with failing_as(ModelError, "the model cannot be read any more"):
            self._files.check()
        self._error = None

    def fill(self, progress: Progress) -> None:
        """Read the experts of pools that hold all of their layers', before the first pass: their slots stay.

        Args:
            progress: called with bytes done and bytes in all.

        Raises:
            ModelError: they cannot be read.
        """
        whole = [number for number in sorted(self._places) if self.stays(number) is not None]
        sizes = [sum(tensor.size for tensor in self.layers[number].tensors) for number in whole]
        for number, done in zip(whole, accumulate(sizes), strict=True):
            place = self._places[number]
            self._start(number, place.residents.place(place.row, range(self.layers[number].count)))
            self.wait(number)
            progress(done, sum(sizes))

    def choose(self, number: int, chosen: ArrayLike, prompt: ArrayLike | None = None) -> SlotArray:
        """`want` what tokens chose, [tokens, experts of a token], and `expect` the next layer if that is nearly all."""
        experts: list[int] = np.unique(chosen).tolist()
        slots = self.want(number, experts, prompt)
        # In a prompt, the last layer computes few rows or none.
        if len(experts) >= NEARLY_ALL * len(slots) and number + 1 < len(self.layers) - (prompt is not None):
            self.expect(number + 1)
        return slots

    def want(self, number: int, experts: Sequence[int], prompt: ArrayLike | None = None) -> SlotArray:
        """Start to read the chosen experts of a layer; all layers before it must be computed.

        Args:
            number: of the layer.
            experts: those chosen, each once.
            prompt: [tokens, experts of a token] those chosen by a prompt's tokens, which do not count in `wanted`.

        Returns:
            [experts of the layer] the slot of each; -1: not in memory.
        """
        place = self._places[number]
        residents, row, self._used = place.residents, place.row, experts
        if prompt is None:
            residents.use(row, experts)
            self.wanted += len(experts)
            self.hits += len(place.slots_of(experts)) - self._count_right(number, experts)
        else:
            residents.use_in_turn(row, prompt)
        self._start(number, residents.place(row, experts, self._filling(residents)))
        if len(place.slots_of(experts)) < len(experts):
            self.finish()  # experts that were read ahead have the slots
            self._start(number, residents.place(row, experts))
        return residents.slots_of(row)

    def _count_right(self, number: int, experts: Sequence[int]) -> int:
        """Experts that a layer wants, and that are read because `foresee` has predicted them."""
        right = len(self._foreseen.pop(number, set()).intersection(experts))
        self.right += right
        return right

    def may_foresee(self, number: int) -> bool:
        """False: no such layer, its experts stay, or predicted ones would take others' room or were mostly wrong."""
        if number >= len(self.layers) or self.stays(number) is not None:
            return False
        room = self.slots(number) >= 2 * self.layers[number].count
        return room and (self.predicted < TRIED or self.right >= LEAST_RIGHT * self.predicted)

    def foresee(self, number: int, experts: Sequence[int]) -> None:
        """Start to read experts that a layer is likely to want, each once, after `choose` of the layer before it."""
        started = self.expect(number, experts)
        self._foreseen[number] = set(started)
        self.predicted += len(started)

    def expect(self, number: int, experts: Sequence[int] | None = None) -> list[int]:
        """Start to read as many experts of a layer as have room beside those that the layer before it uses.

        Args:
            number: of the layer.
            experts: those that may be wanted; None: all.

        Returns:
            Those that are read.
        """
        place, before = self._places[number], self._places[number - 1]
        kept = self._filling(place.residents)
        if before.residents is place.residents:
            kept += before.slots_of(self._used)
        some = range(self.layers[number].count) if experts is None else experts
        reads = place.residents.place(place.row, some, kept)
        self._start(number, reads)
        return [expert for expert, _ in reads]

    def _filling(self, residents: Residents) -> list[int]:
        """Slots of a pool that threads fill."""
        with self._changed:
            loading = {number: list(some) for number, some in self._loading.items()}
        places = [(self._places[number], some) for number, some in loading.items()]
        return [slot for place, some in places if place.residents is residents for slot in place.slots_of(some)]

    def wait(self, number: int, weights: Sequence[int] | None = None) -> None:
        """Wait until the wanted experts of a layer, or some of their weights, are in memory.

        Raises:
            ModelError: they cannot be read.
        """
        started = perf_counter()
        loads = [(number, one) for one in (range(len(self.layers[number].tensors)) if weights is None else weights)]
        with self._changed:
            while any(load in self._left for load in loads) and self._error is None:
                self._changed.wait()
        self.wait_seconds += perf_counter() - started
        if self._error is not None:
            raise self._error

    def finish(self) -> None:
        """End all reads; experts that were not read completely are missing then."""
        self._drop_pieces()
        with self._changed:
            while self._unread:
                self._changed.wait()
            unread = {number: list(experts) for number, experts in self._loading.items()}
            self._left.clear()
            self._loading.clear()
        self._foreseen.clear()
        for number, experts in unread.items():
            for expert in experts:
                self._places[number].residents.forget(self._places[number].row, expert)

    def close(self) -> None:
        if self._about is not None and self._places and self.bytes_read:
            remember(self._about, [np.round(scores, 3).tolist() for scores in self.scores])
        self._drop_pieces()
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()
        self._files.close()
        self.release()
        self._threads, self._places = [], {}

    def _drop_pieces(self) -> None:
        dropped = 0
        with suppress(Empty):
            while True:
                self._queue.get_nowait()
                dropped += 1
        with self._changed:
            self._unread -= dropped

    def _start(self, number: int, reads: Sequence[tuple[int, int]]) -> None:
        if not reads:
            return
        found = list[_Piece]()
        with self._changed:
            self._loading.setdefault(number, set()).update(expert for expert, _ in reads)
            for weight in range(len(self.layers[number].tensors)):
                pieces = self._pieces(number, weight, reads)
                self._left[number, weight] = self._left.get((number, weight), 0) + len(pieces)
                found += pieces
            self._unread += len(found)
        for piece in found:
            self._queue.put(piece)

    def _pieces(self, number: int, weight: int, reads: Sequence[tuple[int, int]]) -> list[_Piece]:
        layer, found = self.layers[number], list[_Piece]()
        for expert, slot in reads:
            address = self.base(number, weight) + slot * layer.stride(weight)
            for part in layer.place(weight, expert):
                count, shift = max(1, round(part.size / self._read_size)), address - part.start
                inner = [(part.start + i * part.size // count) // BLOCK * BLOCK for i in range(1, count)]
                for first, last in pairwise([part.start, *inner, part.stop]):
                    found.append(_Piece((number, weight), part.file, first, last, first + shift))
                address += part.size
        return found

    def _work(self) -> None:
        while (piece := self._queue.get()) is not None:
            error = None
            try:
                self._files.read(piece.file, piece.address, piece.start, piece.stop)
            except Exception as found:  # `wait` must see every error
                error = found
            with self._changed:
                self._unread -= 1
                if error is not None:
                    index = self.layers[piece.load[0]].index
                    self._error = ModelError(f"experts of layer {index} cannot be read: {error}")
                else:
                    self.bytes_read += piece.stop - piece.start
                    self._left[piece.load] -= 1
                    if not self._left[piece.load]:
                        del self._left[piece.load]
                        if not any(load[0] == piece.load[0] for load in self._left):
                            self._loading.pop(piece.load[0], None)
                if error is not None or piece.load not in self._left or not self._unread:
                    self._changed.notify()
