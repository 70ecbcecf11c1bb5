"""Weights that move: a plan of `residency.py` carried out while a model computes.

`Streamer` is the ring: threads read the plan's layers in order, pass after pass, at most `slots` ahead of the
computation, which calls `enter(layer)` before it computes a layer and `finish()` after a pass. So the first layers of
the next pass are read while the draft model works (SpecExec, arXiv 2406.02532, section 4.3).

`Store` is what a system must be able to do. There are three:

    LinuxStore        reads past the page cache (O_DIRECT) into private memory and moves those pages (mremap) to where
                      the engine has mapped the layer; when the layer is done they move back, and the file is mapped
                      there again. So a layer that comes late is slow, never wrong. It needs no privilege, does not
                      depend on the kernel's read-ahead, and pushes nothing else out of the page cache.
    CachedLinuxStore  for kernels that cannot move pages: reads into the page cache, and drops from it. Not measured.
    DarwinStore       macOS has one page cache for mappings and reads: reading fills it, msync(MS_INVALIDATE) empties
                      it, mlock pins. Written from Apple's sources and documentation; not measured.
"""

import ctypes
import mmap  # whose flags are not there on Windows
import os
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

from edgespec.errors import EdgespecError, ModelError
from edgespec.weights.machine import READ_SIZE, READ_THREADS, disk_bandwidth, format_size, open_direct
from edgespec.weights.residency import Extent, Layer, Plan

MAP_FIXED = 0x10
MOVE = 1 | 2 | 4  # MREMAP_MAYMOVE, MREMAP_FIXED, MREMAP_DONTUNMAP of linux/mman.h
MADV_RANDOM, MADV_DONTNEED, MADV_HUGEPAGE, MADV_POPULATE_READ = 1, 4, 14, 22
MAP_FAILED = (1 << 64) - 1
MS_INVALIDATE = 2  # macOS, sys/mman.h
MEASURE = 0.3  # seconds that a disk is measured before it is streamed from
HUGE = 2 << 20  # a huge page moves in one step if it lies alike, modulo this, where it comes from and where it goes


class Store(Protocol):
    """A model's weights on one system. All methods raise OSError."""

    note: str  # how pinned weights are kept, for a person

    def check(self) -> None:
        """Fail if a file has shrunk: whoever touches weights mapped beyond its end is killed by the system."""

    def pin(self, extents: Sequence[Extent]) -> None:
        """Read these, and keep them in memory as well as this process may."""

    def drop(self, extents: Sequence[Extent]) -> None:
        """Forget what loading the model has left of these in memory."""

    def look_up(self, extents: Sequence[Extent]) -> None:
        """Only rows here and there are needed of these: read no more than that."""

    def read(self, slot: int, layer: Layer, extent: Extent, start: int, stop: int) -> None:
        """Read bytes `start` to `stop` of a file, part of `extent`, into the slot. Called by several threads."""

    def show(self, slot: int, layer: Layer) -> None:
        """The whole layer has been read: let the engine see it. If that fails, the slot still has its memory."""

    def hide(self, slot: int, layer: Layer) -> None:
        """The engine is done with the layer: its memory goes back to the slot. What failed can be tried again."""

    def close(self) -> None:
        """Undo everything. Safe to call twice."""


class Streamer:
    """The ring of layers. Made once the model is loaded; closed before the model is freed.

    Layers are counted on over all passes: the i-th of S streamed layers is number p * S + i in pass p, and its slot is
    that number modulo `slots`.
    """

    def __init__(self, plan: Plan, store: Store, threads: int = READ_THREADS) -> None:
        self.plan = plan
        self.wait_seconds = 0.0  # that computation has waited for the disk
        self._store = store
        self._layers = plan.streamed
        self._pass = 0
        self._changed = threading.Condition()
        self._next = 0  # the first layer not given to the threads yet
        self._freed = 0  # layers before this one are computed, or were left out
        self._occupant: list[int | None] = [None] * plan.slots
        self._left: dict[int, int] = {}  # layer being read -> pieces still missing
        self._shown: set[int] = set()
        self._pieces: Iterator[tuple[int, Extent, int, int]] = iter(())
        self._reading = 0  # threads that are reading a piece
        self._error: EdgespecError | None = None  # until the next pass, nothing is read
        self._closed = False
        self._threads = [
            threading.Thread(target=self._work, name=f"edgespec-read-{i}", daemon=True)
            for i in range(threads if self._layers else 0)
        ]
        for thread in self._threads:
            thread.start()

    def begin(self) -> None:
        """A pass starts; what has failed is tried again.

        Raises:
            ModelError: a file has shrunk, or memory cannot be taken back.
        """
        try:
            self._store.check()
        except OSError as error:
            raise ModelError(f"the model cannot be read any more: {error}") from error
        with self._changed:
            if self._error is not None:
                self._start_over()

    def _start_over(self) -> None:
        """After an error, when all threads rest: empty every slot and read on from the first layer not computed."""
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
        """All layers before `index` are computed; return when that layer is in memory.

        A layer that this pass has already left is not waited for: it is read by the system, slowly.

        Raises:
            ModelError: it cannot be read.
        """
        before = sum(layer.index < index for layer in self._layers)
        count = self._pass * len(self._layers) + before
        with self._changed:
            self._free(count)
            if before < len(self._layers) and self._layers[before].index == index:
                started = perf_counter()
                while count >= self._freed and count not in self._shown and not (self._error or self._closed):
                    self._changed.wait()
                self.wait_seconds += perf_counter() - started
                if count < self._freed and not self._closed:
                    for slot in range(len(self._occupant)):  # now: no thread may do it while the layer is computed
                        self._vacate(slot)
            if self._error is not None:
                raise self._error

    def finish(self) -> None:
        """A pass is over, or was given up: the next one starts at the first layer."""
        with self._changed:
            self._pass += 1
            self._free(self._pass * len(self._layers))

    def close(self) -> None:
        """Stop reading and give all memory back. Safe to call twice."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        self._threads = []
        self._store.close()

    def _free(self, count: int) -> None:
        if count > self._freed:
            self._freed = count
            self._changed.notify_all()

    def _work(self) -> None:
        while (piece := self._take()) is not None:
            count, extent, start, stop = piece
            slot, layer = count % len(self._occupant), self._layers[count % len(self._layers)]
            try:
                self._store.read(slot, layer, extent, start, stop)
                with self._changed:
                    self._left[count] -= 1
                    if not self._left[count]:
                        del self._left[count]
                        if count >= self._freed:  # else the pass was given up
                            self._store.show(slot, layer)
                            self._shown.add(count)
                        self._changed.notify_all()
            except Exception as error:  # whatever it is, `enter` must not wait for this thread
                with self._changed:
                    self._error = ModelError(f"layer {layer.index} cannot be read: {error}")
            with self._changed:
                self._reading -= 1
                if self._error is not None:
                    self._changed.notify_all()

    def _take(self) -> tuple[int, Extent, int, int] | None:
        """The next piece to read; None at the end."""
        with self._changed:
            while not self._closed:
                if self._error is not None:
                    self._changed.wait()
                    continue
                if (piece := next(self._pieces, None)) is not None:
                    self._reading += 1
                    return piece
                count = max(self._next, self._freed)
                # All slots, not only the one needed: after a pass given up, another may still show this very layer.
                empty = [self._vacate(slot) for slot in range(len(self._occupant))]
                if count < self._freed + len(self._occupant) and empty[count % len(empty)]:
                    self._next = count + 1
                    self._occupant[count % len(self._occupant)] = count
                    pieces = [(count, *piece) for piece in _pieces(self._layers[count % len(self._layers)])]
                    self._left[count] = len(pieces)
                    self._pieces = iter(pieces)
                else:
                    self._changed.wait()
            return None

    def _vacate(self, slot: int) -> bool:
        """Empty a slot if its layer is done with."""
        count = self._occupant[slot]
        if count is None:
            return True
        return count < self._freed and count not in self._left and self._empty(slot)

    def _empty(self, slot: int) -> bool:
        """Take back a slot's memory; False if that fails."""
        count = self._occupant[slot]
        if count is not None and count in self._shown:
            try:
                self._store.hide(slot, self._layers[count % len(self._layers)])
            except Exception as error:
                self._error = ModelError(f"memory of a computed layer cannot be taken back: {error}")
                self._changed.notify_all()
                return False
            self._shown.remove(count)
        self._occupant[slot] = None
        return True


def _pieces(layer: Layer) -> Iterator[tuple[Extent, int, int]]:
    for extent in layer.extents:
        for start in range(extent.start, extent.stop, READ_SIZE):
            yield extent, start, min(start + READ_SIZE, extent.stop)


def read_fully(descriptor: int, address: int, start: int, stop: int) -> None:
    """Read bytes `start` to `stop` of a file to an address.

    Raises:
        OSError: the disk failed, or the file ends before `stop`.
    """
    while start < stop:
        buffer = (ctypes.c_char * (stop - start)).from_address(address)
        done = os.preadv(descriptor, [buffer], start)
        if done <= 0:
            raise OSError(f"the file ends at byte {start}; it must have shrunk")
        start, address = start + done, address + done


def warm(descriptor: int, extents: Iterable[Extent], threads: int = READ_THREADS) -> None:
    """Read extents of a file into the page cache at the disk's full speed, whatever the system reads ahead."""
    starts = [(start, extent.stop) for extent in extents for start in range(extent.start, extent.stop, READ_SIZE)]
    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(lambda piece: _touch(descriptor, *piece), starts):
            pass


def _touch(descriptor: int, start: int, stop: int) -> int:
    done = len(os.pread(descriptor, min(READ_SIZE, stop - start), start))
    if not done:
        raise OSError(f"the file ends at byte {start}; it must have shrunk")
    return done


def _touch_all(descriptor: int, start: int, stop: int) -> None:
    if _touch(descriptor, start, stop) < stop - start:
        raise OSError(f"the file ends before byte {stop}; it must have shrunk")


def _file_sizes(descriptors: Iterable[int]) -> list[int]:
    return [os.fstat(descriptor).st_size for descriptor in descriptors]


def _check_sizes(paths: Sequence[str], descriptors: Sequence[int], sizes: Sequence[int]) -> None:
    for path, now, then in zip(paths, _file_sizes(descriptors), sizes, strict=True):
        if now < then:
            raise OSError(f"{path} has shrunk from {then} to {now} bytes")


def libc() -> Any:
    """The C library, with the argument types of what is used here."""
    library = ctypes.CDLL(None, use_errno=True)
    pointer, size, number, offset = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int64
    for name, result, arguments in [
        ("mmap", pointer, [pointer, size, number, number, number, offset]),
        ("mremap", pointer, [pointer, size, size, number, pointer]),
        ("munmap", number, [pointer, size]),
        ("madvise", number, [pointer, size, number]),
        ("msync", number, [pointer, size, number]),
        ("mlock", number, [pointer, size]),
        ("munlock", number, [pointer, size]),
    ]:
        if function := getattr(library, name, None):
            function.restype, function.argtypes = result, arguments
    return library


def _check(result: int | None, what: str) -> None:
    if result not in (0, None) and (result == -1 or result == MAP_FAILED):
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def new_memory(library: Any, size: int) -> int:
    """The address of so many bytes that this process can write. Raises OSError."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    address = library.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
    _check(address, "mmap")
    return int(address)


def lock(library: Any, ranges: Sequence[tuple[int, int]]) -> tuple[list[tuple[int, int]], str]:
    """Lock those ranges (address, size) in memory that this process may: those locked, and a note for a person."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (hard, hard))
    locked = [(address, size) for address, size in ranges if library.mlock(address, size) == 0]
    done, total = (sum(size for _, size in some) for some in (locked, ranges))
    note = f"{format_size(done)} locked in memory"
    if len(locked) < len(ranges):
        note += f", {format_size(total - done)} kept in the page cache"
        if hard != resource.RLIM_INFINITY:
            note += f"; the limit for locked memory is {format_size(hard)} (ulimit -l)"
    return locked, note


@dataclass(frozen=True, slots=True)
class Mapping:
    """Where a piece of a file is mapped."""

    start: int  # address
    stop: int
    offset: int  # of `start` in the file


def mappings(path: str, maps: Path = Path("/proc/self/maps")) -> list[Mapping]:
    """All mappings of a file in this process (Linux).

    Some file systems (btrfs, overlays) tell another device here than to `stat`, so the same path will do.
    """
    status, real = os.stat(path), os.path.realpath(path)
    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
    found = []
    for line in maps.read_text().splitlines():
        fields = line.split(maxsplit=5)
        if (fields[3] == device and int(fields[4]) == status.st_ino) or fields[5:] == [real]:
            start, stop = (int(number, 16) for number in fields[0].split("-"))
            found.append(Mapping(start, stop, int(fields[2], 16)))
    return found


class LinuxStore:
    """See the module."""

    note = ""

    def __init__(self, paths: Sequence[str], mapped: Sequence[Mapping], plan: Plan, library: Any = None) -> None:
        """
        Args:
            paths: of the model's files.
            mapped: for each file, where the engine has mapped it.
            plan: what will be streamed.
            library: the C library; for tests.
        """
        self._libc = library or libc()
        self._paths = paths
        self._mapped = mapped
        self._locked: list[tuple[int, int]] = []
        self._inside: dict[Extent, int] = {}  # extent -> offset in its slot
        size = 0
        for layer in plan.streamed:
            offset = 0
            for extent in layer.extents:
                offset += (self._address(extent) - offset) % HUGE
                self._inside[extent] = offset
                offset += extent.size
            size = max(size, offset)
        self._slot_size = -(-size // HUGE) * HUGE
        self._slots: list[tuple[int, int]] = []  # (address, what to unmap)
        self._shown: dict[int, Layer] = {}  # by slot
        self._moved: set[Extent] = set()  # whose memory is where the engine sees it
        self._cached: list[int] = []
        self._direct: list[int] = []
        self.is_direct = True
        try:
            for path in paths:
                self._cached.append(os.open(path, os.O_RDONLY))
                descriptor, direct = open_direct(path)
                self._direct.append(descriptor)
                self.is_direct &= direct
            self._sizes = _file_sizes(self._cached)
            for _ in range(plan.slots):
                address = new_memory(self._libc, self._slot_size + HUGE)
                self._slots.append((-(-address // HUGE) * HUGE, address))
                self._libc.madvise(address, self._slot_size + HUGE, MADV_HUGEPAGE)  # a wish
        except BaseException:
            self.close()
            raise

    def check(self) -> None:
        _check_sizes(self._paths, self._cached, self._sizes)

    def pin(self, extents: Sequence[Extent]) -> None:
        for number, descriptor in enumerate(self._cached):
            warm(descriptor, [extent for extent in extents if extent.file == number])
        ranges = [(self._address(extent), extent.size) for extent in extents]
        self._locked, self.note = lock(self._libc, ranges)
        for address, size in set(ranges) - set(self._locked):
            self._libc.madvise(address, size, MADV_POPULATE_READ)  # a wish: since Linux 5.14

    def drop(self, extents: Sequence[Extent]) -> None:
        for extent in extents:  # in this order: pages that are mapped are not dropped from the cache
            _check(self._libc.madvise(self._address(extent), extent.size, MADV_DONTNEED), "madvise")
            os.posix_fadvise(self._cached[extent.file], extent.start, extent.size, os.POSIX_FADV_DONTNEED)

    def look_up(self, extents: Sequence[Extent]) -> None:
        self.drop(extents)
        for extent in extents:  # a wish: no reading ahead
            self._libc.madvise(self._address(extent), extent.size, MADV_RANDOM)

    def read(self, slot: int, layer: Layer, extent: Extent, start: int, stop: int) -> None:
        address = self._place(slot, extent) + start - extent.start
        read_fully(self._direct[extent.file], address, start, stop)
        if not self.is_direct:
            os.posix_fadvise(self._direct[extent.file], start, stop - start, os.POSIX_FADV_DONTNEED)

    def show(self, slot: int, layer: Layer) -> None:
        self._shown[slot] = layer
        try:
            for extent in layer.extents:
                self._move(self._place(slot, extent), self._address(extent), extent.size)
                self._moved.add(extent)
        except OSError:
            self.hide(slot, layer)
            raise

    def hide(self, slot: int, layer: Layer) -> None:
        # Between the two calls the engine's place is empty, and would read as zeros. Nobody looks then: a layer is
        # hidden only after a later one was entered, or the pass ended; `enter` first hides what is entered once more.
        # Mapping the file at once would need one call, but free the memory: new memory is zeroed, for every layer.
        for extent in layer.extents:
            address = self._address(extent)
            if extent in self._moved:
                self._move(address, self._place(slot, extent), extent.size)
                self._moved.remove(extent)
            flags, descriptor = mmap.MAP_SHARED | MAP_FIXED, self._cached[extent.file]
            _check(self._libc.mmap(address, extent.size, mmap.PROT_READ, flags, descriptor, extent.start), "mmap")
        self._shown.pop(slot, None)

    def close(self) -> None:
        for slot, layer in list(self._shown.items()):
            self.hide(slot, layer)
        for _, address in self._slots:
            self._libc.munmap(address, self._slot_size + HUGE)
        for address, size in self._locked:
            self._libc.munlock(address, size)
        for descriptor in (*self._cached, *self._direct):
            os.close(descriptor)
        self._slots, self._locked, self._cached, self._direct = [], [], [], []

    def _address(self, extent: Extent) -> int:
        mapping = self._mapped[extent.file]
        return mapping.start + extent.start - mapping.offset

    def _place(self, slot: int, extent: Extent) -> int:
        return self._slots[slot][0] + self._inside[extent]

    def _move(self, source: int, target: int, size: int) -> None:
        # The source stays mapped, without pages: nobody else's memory can land there meanwhile.
        _check(self._libc.mremap(source, size, size, MOVE, target), "mremap")


class CachedLinuxStore(LinuxStore):
    """For kernels that cannot move pages: reading fills the page cache, from where the engine's mapping has them."""

    def __init__(self, paths: Sequence[str], mapped: Sequence[Mapping], plan: Plan, library: Any = None) -> None:
        super().__init__(paths, mapped, replace(plan, slots=0), library)

    def pin(self, extents: Sequence[Extent]) -> None:
        super().pin(extents)
        self.note += "; through the page cache, as this kernel cannot move pages (Linux 5.7 and later can)"

    def read(self, slot: int, layer: Layer, extent: Extent, start: int, stop: int) -> None:
        _touch_all(self._cached[extent.file], start, stop)

    def show(self, slot: int, layer: Layer) -> None:
        pass

    def hide(self, slot: int, layer: Layer) -> None:
        self.drop(layer.extents)


def moves_pages(library: Any) -> bool:
    """Whether this system moves pages and leaves their place mapped: Linux since 5.7. Raises OSError."""
    places = list[int]()
    try:
        for _ in range(2):
            places.append(new_memory(library, mmap.PAGESIZE))
        return bool(library.mremap(places[0], mmap.PAGESIZE, mmap.PAGESIZE, MOVE, places[1]) == places[1])
    finally:
        for place in places:
            library.munmap(place, mmap.PAGESIZE)


class DarwinStore:
    """See the module. Works on a mapping of its own: on macOS all mappings of a file share their pages."""

    note = ""

    def __init__(self, paths: Sequence[str], library: Any = None) -> None:
        self._libc = library or libc()
        self._paths = paths
        self._descriptors: list[int] = []
        self._sizes: list[int] = []
        self._locked: list[tuple[int, int]] = []
        self._starts: list[int] = []
        try:
            for path in paths:
                self._descriptors.append(os.open(path, os.O_RDONLY))
            self._sizes = _file_sizes(self._descriptors)
            for descriptor, size in zip(self._descriptors, self._sizes, strict=True):
                start = self._libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
                _check(start, "mmap")
                self._starts.append(start)
        except BaseException:
            self.close()
            raise

    def check(self) -> None:
        _check_sizes(self._paths, self._descriptors, self._sizes)

    def pin(self, extents: Sequence[Extent]) -> None:
        for number, descriptor in enumerate(self._descriptors):
            warm(descriptor, [extent for extent in extents if extent.file == number])
        self._locked, self.note = lock(self._libc, [(self._starts[e.file] + e.start, e.size) for e in extents])

    def drop(self, extents: Sequence[Extent]) -> None:
        for extent in extents:
            _check(self._libc.msync(self._starts[extent.file] + extent.start, extent.size, MS_INVALIDATE), "msync")

    def look_up(self, extents: Sequence[Extent]) -> None:
        self.drop(extents)

    def read(self, slot: int, layer: Layer, extent: Extent, start: int, stop: int) -> None:
        _touch_all(self._descriptors[extent.file], start, stop)

    def show(self, slot: int, layer: Layer) -> None:
        pass  # what was read is in the page cache, and so in the engine's mapping

    def hide(self, slot: int, layer: Layer) -> None:
        self.drop(layer.extents)

    def close(self) -> None:
        for address, size in self._locked:
            self._libc.munlock(address, size)
        for start, size in zip(self._starts, self._sizes, strict=False):
            self._libc.munmap(start, size)
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._starts, self._sizes, self._descriptors, self._locked = [], [], [], []


def measure_disk(paths: Sequence[str], plan: Plan) -> float:
    """Bytes per second of the disk that a model's layers are streamed from; 0 if none are. Raises ModelError."""
    return disk_bandwidth(paths[plan.streamed[0].extents[0].file], MEASURE) if plan.streamed else 0.0


def supported() -> bool:
    """Whether weights can be streamed on this system."""
    return sys.platform in ("linux", "darwin")


def open_store(paths: Sequence[str], mapped: Sequence[Mapping], plan: Plan) -> Store:
    """The store of this system. Raises OSError."""
    library = libc()
    if sys.platform != "linux":
        return DarwinStore(paths, library)
    return (LinuxStore if moves_pages(library) else CachedLinuxStore)(paths, mapped, plan, library)
