"""Streaming: a plan of `plan.py` carried out while a model computes.

Threads read the plan's layers in order, pass after pass, at most `slots` ahead, also while the draft model works
(SpecExec, arXiv 2406.02532, section 4.3).
"""

import threading
from collections.abc import Iterator, Sequence
from time import perf_counter
from typing import Protocol

from edgespec.errors import EdgespecError, ModelError, failing_as
from edgespec.loop.engines import Machine
from edgespec.machine.disk import disk_speed
from edgespec.machine.system import READ_SIZE, READ_THREADS
from edgespec.weights.linux import CachedLinuxStore, LinuxStore
from edgespec.weights.open_files import OpenFiles, Store
from edgespec.weights.plan import Extent, Layer, Mapping, Plan
from edgespec.weights.preload import pieces


class Slots(Protocol):
    """Memory that layers are read into; all methods raise OSError.

    After a failure of `show` the slot still has its memory; after one of `hide`, call it again.
    """

    def check(self) -> None:
        """Fail if a file has shrunk: the system kills a process that touches weights mapped beyond its end."""

    def read(self, slot: int, layer: Layer, extent: Extent, start: int, stop: int) -> None:
        """Read bytes `start` to `stop` of a file, within `extent`, into the slot; called by several threads at once."""

    def show(self, slot: int, layer: Layer) -> None:
        """Give the engine the memory of a slot whose layer was read completely."""

    def hide(self, slot: int, layer: Layer) -> None:
        """Take the memory of a computed layer back from the engine."""

    def close(self) -> None: ...


class Streamer:
    """Make it after the model is loaded and close it before the model is freed.

    A pass calls `begin`, then `enter` and perhaps `leave` for each layer, then `finish`. A `serial` is p * S + i, for
    the i-th of S streamed layers in pass p; its slot is `serial` modulo `slots`.
    """

    def __init__(self, plan: Plan, store: Slots, threads: int = READ_THREADS, size: int = READ_SIZE) -> None:
        """Args:
        plan: what is streamed.
        store: its memory; closed by `close`.
        threads: that read at once.
        size: most bytes of a read.
        """
        self.plan = plan
        self.wait_seconds = 0.0
        self._store = store
        self._layers = plan.streamed
        self._size = size
        self._pass = 0
        self._changed = threading.Condition()
        self._next = 0
        self._freed = 0  # every smaller serial is computed or left out
        self._occupant: list[int | None] = [None] * plan.slots
        self._left: dict[int, int] = {}  # serial -> pieces not read yet
        self._shown: set[int] = set()
        self._pieces: Iterator[tuple[int, Extent, int, int]] = iter(())
        self._reading = 0
        self._error: EdgespecError | None = None
        self._closed = False
        self._threads = [
            threading.Thread(target=self._work, name=f"edgespec-read-{i}", daemon=True)
            for i in range(threads if self._layers else 0)
        ]
        for thread in self._threads:
            thread.start()

    def begin(self) -> None:
        """Start a pass, also after one that failed.

        Raises:
            ModelError: a file has shrunk, or memory cannot be taken back.
        """
        with failing_as(ModelError, "the model cannot be read any more"):
            self._store.check()
        with self._changed:
            if self._error is not None:
                self._start_over()

    def _start_over(self) -> None:
        """Once all threads are at rest, empty every slot and read again from the first layer not computed."""
        while self._reading:
            self._changed.wait()
        self._error, self._pieces, self._next = None, iter(()), self._freed
        self._left.clear()
        for slot in range(len(self._occupant)):
            self._empty(slot)
        if self._error is not None:
            raise self._error
        self._changed.notify_all()

    def enter(self, index: int) -> None:
        """Wait until a layer is in memory; all layers before it must be computed.

        A layer that this pass has already left is not waited for: the system reads it, slowly.

        Args:
            index: the layer's number in the model.

        Raises:
            ModelError: it cannot be read.
        """
        before = self._before(index)
        serial = self._pass * len(self._layers) + before
        with self._changed:
            self._free(serial)
            if before < len(self._layers) and self._layers[before].index == index:
                started = perf_counter()
                while serial >= self._freed and serial not in self._shown and not (self._error or self._closed):
                    self._changed.wait()
                self.wait_seconds += perf_counter() - started
                if serial < self._freed and not self._closed:
                    for slot in range(len(self._occupant)):  # before the layer is computed, not meanwhile
                        self._vacate(slot)
            if self._error is not None:
                raise self._error

    def leave(self, index: int) -> None:
        with self._changed:
            self._free(self._pass * len(self._layers) + self._before(index) + 1)

    def shows(self, index: int) -> bool:
        """True if a layer of this pass lies in its slot, until the next layer is entered."""
        return self._pass * len(self._layers) + self._before(index) in self._shown

    def slot(self, index: int) -> int:
        return (self._pass * len(self._layers) + self._before(index)) % len(self._occupant)

    def _before(self, index: int) -> int:
        return sum(layer.index < index for layer in self._layers)

    def finish(self) -> None:
        with self._changed:
            self._pass += 1
            self._free(self._pass * len(self._layers))

    def stop(self) -> None:
        """End all reads and waits; slots keep their memory."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def close(self) -> None:
        self.stop()
        for thread in self._threads:
            thread.join()
        self._threads = []
        self._store.close()

    def _free(self, serial: int) -> None:
        if serial > self._freed:
            self._freed = serial
            self._changed.notify_all()

    def _work(self) -> None:
        while (piece := self._take()) is not None:
            serial, extent, start, stop = piece
            slot, layer = serial % len(self._occupant), self._layers[serial % len(self._layers)]
            try:
                self._store.read(slot, layer, extent, start, stop)
                with self._changed:
                    self._left[serial] -= 1
                    if not self._left[serial]:
                        del self._left[serial]
                        if serial >= self._freed:  # else the pass was given up
                            self._store.show(slot, layer)
                            self._shown.add(serial)
                        self._changed.notify_all()
            except Exception as error:  # `enter` must see every error
                with self._changed:
                    self._error = ModelError(f"layer {layer.index} cannot be read: {error}")
            with self._changed:
                self._reading -= 1
                if self._error is not None:
                    self._changed.notify_all()

    def _take(self) -> tuple[int, Extent, int, int] | None:
        with self._changed:
            while not self._closed:
                if self._error is not None:
                    self._changed.wait()
                    continue
                if (piece := next(self._pieces, None)) is not None:
                    self._reading += 1
                    return piece
                serial = max(self._next, self._freed)
                # Every slot: after a pass was given up, another slot may still show this layer.
                empty = [self._vacate(slot) for slot in range(len(self._occupant))]
                if serial < self._freed + len(self._occupant) and empty[serial % len(empty)]:
                    self._next = serial + 1
                    self._occupant[serial % len(self._occupant)] = serial
                    extents = self._layers[serial % len(self._layers)].extents
                    cut = [(extent, one) for extent in extents for one in pieces([extent], self._size)]
                    found = [(serial, extent, one.start, one.stop) for extent, one in cut]
                    self._left[serial] = len(found)
                    self._pieces = iter(found)
                else:
                    self._changed.wait()
            return None

    def _vacate(self, slot: int) -> bool:
        serial = self._occupant[slot]
        if serial is None:
            return True
        return serial < self._freed and serial not in self._left and self._empty(slot)

    def _empty(self, slot: int) -> bool:
        serial = self._occupant[slot]
        if serial is not None and serial in self._shown:
            try:
                self._store.hide(slot, self._layers[serial % len(self._layers)])
            except Exception as error:
                self._error = ModelError(f"memory of a computed layer cannot be taken back: {error}")
                self._changed.notify_all()
                return False
            self._shown.remove(serial)
        self._occupant[slot] = None
        return True


def measure_disk(paths: Sequence[str], plan: Plan) -> float:
    """
    Returns:
        Bytes per second of the disk that layers, or experts for pools, are read from; 0 if none are.

    Raises:
        ModelError: the file cannot be read.
    """
    extents = [extent for layer in plan.streamed for extent in layer.extents] or [*(plan.cached if plan.pools else ())]
    if not extents:
        return 0.0
    first = extents[0].file
    return disk_speed(paths[first], [(extent.start, extent.stop) for extent in extents if extent.file == first])


CANNOT_STREAM = "streaming weights works on Linux and macOS; here the system's own paging does what it can"


def can_stream(machine: Machine) -> bool:
    """True if layers can be streamed; experts can be read on any system."""
    return machine.platform in ("linux", "darwin")


def open_store(paths: Sequence[str], mapped: Sequence[Mapping], plan: Plan, machine: Machine) -> Store:
    """A store of Linux, or one that leaves all to the system; on macOS llama.cpp has its own memory instead."""
    if machine.platform != "linux":
        return Store(OpenFiles(paths))
    return (LinuxStore if machine.moves_pages else CachedLinuxStore)(paths, mapped, plan)
