"""Experts that threads read from disk into their own memory while a model computes (Linux).

Every weight (gate, up, down) of every layer has addresses for all experts, but memory only for its pool. The overflow
is one block of memory per weight, which is moved (mremap) behind the pool of the layer that needs it.

While one weight is computed, the next are read. For a pass that wants nearly all experts, `expect_all` reads those of
the next layer before its router has chosen.
"""

import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from time import perf_counter

from edgespec.errors import ModelError
from edgespec.loop.engines import Progress
from edgespec.machine.disk import recall_reading
from edgespec.machine.system import (
    HUGE,
    MOVE,
    check_result,
    libc,
    new_memory,
)
from edgespec.weights.direct_io import DirectFiles
from edgespec.weights.experts import ExpertLayer, Residents, SlotArray, overflows, pool_size, skew
from edgespec.weights.linux import MADV_HUGEPAGE

Load = tuple[int, int]  # number of the layer in `ExpertMemory.layers`, of the weight in `ExpertLayer.tensors`


@dataclass(frozen=True, slots=True)
class _Piece:
    load: Load
    file: int
    start: int
    stop: int
    address: int


class ExpertMemory:
    """All methods belong to the thread that computes; `number` and `weight` are as in `Load`."""

    def __init__(self, paths: Sequence[str], layers: Sequence[ExpertLayer], slots: int) -> None:
        """Args:
            paths: files of the model.
            layers: layers whose experts are read; at least one.
            slots: of every layer's pool.

        Raises:
            OSError: a file cannot be opened, or there is no memory.
        """
        self.layers = layers
        self.residents = [Residents(layer.count, slots) for layer in layers]
        self.wait_seconds = 0.0
        self.bytes_read = 0
        self.wanted = self.hits = 0
        self._libc = libc()
        self._files = DirectFiles(paths)
        self._queue: SimpleQueue[_Piece | None] = SimpleQueue()
        self._changed = threading.Condition()  # notified when a load is read, when nothing is left, or after an error
        self._left: dict[Load, int] = {}
        self._loading: dict[Load, list[int]] = {}
        self._unread = 0
        self._error: ModelError | None = None
        self._overflowing: set[int] = set()
        self._ahead_of = -1  # the layer of `expect_all`; -1: none
        self._ahead: list[tuple[int, int]] = []
        self._begun: set[int] = set()
        self._ranges: list[tuple[int, int]] = []
        self._threads: list[threading.Thread] = []
        try:
            self._block_sizes = overflows(layers, slots)
            self._blocks = [self._reserve(size) for size in self._block_sizes]
            self._starts = [
                [self._reserve(pool_size(layer, i, slots) + block) for i, block in enumerate(self._block_sizes)]
                for layer in layers
            ]
            how = recall_reading(paths[layers[0].tensors[0].file])
            self._read_size = how.size
            for i in range(how.threads):
                thread = threading.Thread(target=self._work, name=f"edgespec-experts-{i}", daemon=True)
                thread.start()
                self._threads.append(thread)
        except BaseException:
            self.close()
            raise

    def _reserve(self, size: int) -> int:
        address = new_memory(self._libc, size + HUGE)
        self._ranges.append((address, size + HUGE))
        self._libc.madvise(address, size + HUGE, MADV_HUGEPAGE)
        return -(-address // HUGE) * HUGE

    def base(self, number: int, tensor: int) -> int:
        return self._starts[number][tensor] + skew(self.layers[number], tensor)

    def begin(self) -> None:
        """Start a pass, also after one that failed.

        Raises:
            ModelError: a file has shrunk.
        """
        try:
            self._files.check()
        except OSError as error:
            raise ModelError(f"the model cannot be read any more: {error}") from error
        self._error = None

    def fill(self, scores: Sequence[Sequence[float]], progress: Progress) -> None:
        """Read experts into all slots, before the first pass.

        Args:
            scores: of each layer's experts; the best are read, and the scores count from now on.
            progress: called with bytes done and bytes in all.

        Raises:
            ModelError: they cannot be read.
        """
        done, total = 0, sum(layer.bytes_each for layer in self.layers) * self.residents[0].slots
        if not total:
            return
        for number, residents in enumerate(self.residents):
            residents.scores[:] = scores[number]
            best = sorted(range(len(residents.scores)), key=lambda expert: -residents.scores[expert])
            reads = residents.place(best[: residents.slots], score=False)
            weights = range(len(self._block_sizes))
            self._start(number, [reads for _ in weights], weights)
            self.wait(number)
            done += self.layers[number].bytes_each * residents.slots
            progress(done, total)

    def want(self, number: int, experts: Sequence[int], *, score: bool = True) -> SlotArray:
        """Start to read the chosen experts of a layer; all layers before it must be computed.

        Args:
            number: of the layer.
            experts: those chosen, each once.
            score: this use raises their scores; prefill uses nearly all experts and does not.

        Returns:
            [experts of the layer] the slot of each; -1: not in memory.

        Raises:
            OSError: memory cannot be moved.
        """
        residents = self.residents[number]
        if self._ahead_of not in (-1, number):
            self.finish()
        for other in self._overflowing - {number}:
            self.residents[other].leave_overflow()
        if score:
            self.wanted += len(experts)
            self.hits += sum(0 <= slot < residents.slots for slot in residents.slots_of(experts).tolist())
        reads = residents.place(experts, score=score)
        self._overflowing = {number} if residents.overflowing else set()
        wanted, weights = set(experts), range(len(self._block_sizes))
        if residents.overflowing:
            try:
                for weight in weights:
                    self._move(number, weight)
            except OSError:
                for expert, _ in reads:
                    residents.forget(expert)
                raise
        for expert, _ in self._ahead:
            if expert not in wanted:
                residents.forget(expert)  # only the weights of `expect_all` were read
        also = [read for read in self._ahead if read[0] in wanted]
        self._start(number, [reads if weight in self._begun else [*also, *reads] for weight in weights], weights)
        self._ahead_of, self._ahead, self._begun = -1, [], set()
        return residents.slots_of(range(len(residents.scores)))

    def expect_all(self, number: int, weight: int) -> None:
        """Start to read one weight of all experts of the next layer, once that weight's overflow block is free.

        Raises:
            OSError: memory cannot be moved.
        """
        residents = self.residents[number]
        if not self._begun:
            self._ahead_of, self._ahead = number, residents.place(range(len(residents.scores)), score=False)
            self._overflowing.add(number)
        self._begun.add(weight)
        self._move(number, weight)
        self._start(number, [self._ahead], [weight])

    def wait(self, number: int, weight: int | None = None) -> None:
        """Wait until the wanted experts of a layer, or of one of its weights, are in memory.

        Raises:
            ModelError: they cannot be read.
        """
        started = perf_counter()
        loads = [(number, one) for one in (range(len(self._block_sizes)) if weight is None else [weight])]
        with self._changed:
            while any(load in self._left for load in loads) and self._error is None:
                self._changed.wait()
        self.wait_seconds += perf_counter() - started
        if self._error is not None:
            raise self._error

    def finish(self) -> None:
        self._drop_pieces()
        with self._changed:
            while self._unread:
                self._changed.wait()
            unread = {(number, expert) for (number, _), experts in self._loading.items() for expert in experts}
            self._left.clear()
            self._loading.clear()
        unread |= {(self._ahead_of, expert) for expert, _ in self._ahead}
        for number in self._overflowing:
            self.residents[number].leave_overflow()
        for number, expert in unread:
            self.residents[number].forget(expert)
        self._overflowing, self._ahead_of, self._ahead, self._begun = set(), -1, [], set()

    def close(self) -> None:
        self._drop_pieces()
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()
        for address, size in self._ranges:
            self._libc.munmap(address, size)
        self._files.close()
        self._threads, self._ranges = [], []

    def _move(self, number: int, weight: int) -> None:
        here, size = self._blocks[weight], self._block_sizes[weight]
        there = self._starts[number][weight] + pool_size(self.layers[number], weight, self.residents[number].slots)
        if size and here != there:
            check_result(self._libc.mremap(here, size, size, MOVE, there), "mremap")
            self._blocks[weight] = there

    def _drop_pieces(self) -> None:
        dropped = 0
        with suppress(Empty):
            while True:
                self._queue.get_nowait()
                dropped += 1
        with self._changed:
            self._unread -= dropped

    def _start(self, number: int, reads: Sequence[Sequence[tuple[int, int]]], weights: Iterable[int]) -> None:
        found = list[_Piece]()
        with self._changed:
            for weight, some in zip(weights, reads, strict=True):
                if some:
                    load, pieces = (number, weight), self._pieces(number, weight, some)
                    self._left[load] = self._left.get(load, 0) + len(pieces)
                    self._loading.setdefault(load, []).extend(expert for expert, _ in some)
                    found += pieces
            self._unread += len(found)
        for piece in found:
            self._queue.put(piece)

    def _pieces(self, number: int, weight: int, reads: Sequence[tuple[int, int]]) -> list[_Piece]:
        layer, found = self.layers[number], list[_Piece]()
        tensor, size = layer.tensors[weight], layer.expert_size(weight)
        for expert, slot in reads:
            start = tensor.start + expert * size
            shift = self.base(number, weight) + slot * size - start
            read = self._read_size
            cuts = [start, *range(start // read * read + read, start + size, read)]
            for first, last in zip(cuts, [*cuts[1:], start + size], strict=True):
                found.append(_Piece((number, weight), tensor.file, first, last, first + shift))
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
                        del self._left[piece.load], self._loading[piece.load]
                if error is not None or piece.load not in self._left or not self._unread:
                    self._changed.notify()
