"""The stores of Linux.

LinuxStore        reads past the page cache (O_DIRECT) and moves pages (mremap) to the engine's mapping and back;
                  the engine may touch a layer too early: that is slow, never wrong
CachedLinuxStore  for kernels that cannot move pages: reads into the page cache; not measured
"""

import mmap
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from edgespec.errors import undone
from edgespec.loop.engines import Progress
from edgespec.machine.system import (
    HUGE,
    MOVE,
    check_result,
    libc,
    lines_of,
    new_memory,
)
from edgespec.weights.direct_io import DirectFiles
from edgespec.weights.open_files import OpenFiles, Store
from edgespec.weights.plan import Extent, Layer, Mapping, Plan
from edgespec.weights.preload import lock, warm

MAP_FIXED = 0x10
MADV_NORMAL, MADV_RANDOM, MADV_DONTNEED, MADV_HUGEPAGE, MADV_POPULATE_READ = 0, 1, 4, 14, 22


def mappings(path: str, maps: Path = Path("/proc/self/maps")) -> list[Mapping]:
    """All mappings of a file in this process (Linux).

    Some file systems (btrfs, overlays) report another device here than to `stat`, so an equal path counts, too.
    """
    status, real = os.stat(path), os.path.realpath(path)
    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
    found = []
    for line in lines_of(maps):
        fields = line.split(maxsplit=5)
        if (fields[3] == device and int(fields[4]) == status.st_ino) or fields[5:] == [real]:
            start, stop = (int(number, 16) for number in fields[0].split("-"))
            found.append(Mapping(start, stop, int(fields[2], 16)))
    return found


class LinuxStore(Store):
    def __init__(self, paths: Sequence[str], mapped: Sequence[Mapping], plan: Plan, library: Any = None) -> None:
        """Args:
        paths: files of the model.
        mapped: for each file, where the engine has mapped it.
        plan: what will be streamed.
        library: the C library; for tests.
        """
        self._libc = library or libc()
        self._mapped = mapped
        self._locked: list[tuple[int, int]] = []
        self._inside: dict[Extent, int] = {}
        size = 0
        for layer in plan.streamed:
            offset = 0
            for extent in layer.extents:
                offset += (self._address(extent) - offset) % HUGE
                self._inside[extent] = offset
                offset += extent.size
            size = max(size, offset)
        self._slot_size = -(-size // HUGE) * HUGE
        self._slots: list[tuple[int, int]] = []
        self._shown: dict[int, Layer] = {}
        self._moved: set[Extent] = set()
        super().__init__(OpenFiles(paths))
        self._direct = DirectFiles(())
        with undone(self.close):
            self._direct = DirectFiles(paths)
            for _ in range(plan.slots):
                address = new_memory(self._libc, self._slot_size + HUGE)
                self._slots.append((-(-address // HUGE) * HUGE, address))
                self._libc.madvise(address, self._slot_size + HUGE, MADV_HUGEPAGE)

    def preload(self, extents: Sequence[Extent], progress: Progress) -> None:
        ranges = [(self._address(extent), extent.size) for extent in extents]
        for address, size in ranges:
            self._libc.madvise(address, size, MADV_HUGEPAGE)
        warm([self._files.within(extent) for extent in extents], self._populate, progress)
        self._locked, self.note = lock(self._libc, ranges)

    def _populate(self, piece: Extent) -> None:
        # Twice as fast as reading into a buffer, but it fails before Linux 5.14 and beyond the end of a file.
        if self._libc.madvise(self._address(piece), piece.size, MADV_POPULATE_READ) != 0:
            self._files.touch(piece)

    def drop(self, extents: Sequence[Extent]) -> None:
        for extent in extents:  # first madvise, as the page cache keeps pages that are mapped
            check_result(self._libc.madvise(self._address(extent), extent.size, MADV_DONTNEED), "madvise")
            os.posix_fadvise(self._files.descriptors[extent.file], extent.start, extent.size, os.POSIX_FADV_DONTNEED)

    def look_up(self, extents: Sequence[Extent]) -> None:
        self.drop(extents)
        for extent in extents:
            self._libc.madvise(self._address(extent), extent.size, MADV_RANDOM)

    def read(self, slot: int, layer: Layer, extent: Extent, start: int, stop: int) -> None:
        self._direct.read(extent.file, self._place(slot, extent) + start - extent.start, start, stop)

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
        # Between the two calls these addresses read as zeros, but their layer is computed, so the engine reads others.
        # Without the first call the slot's memory would be freed, and new memory must be zeroed.
        for extent in layer.extents:
            address = self._address(extent)
            if extent in self._moved:
                self._move(address, self._place(slot, extent), extent.size)
                self._moved.remove(extent)
            flags, descriptor = mmap.MAP_SHARED | MAP_FIXED, self._files.descriptors[extent.file]
            check_result(self._libc.mmap(address, extent.size, mmap.PROT_READ, flags, descriptor, extent.start), "mmap")
        self._shown.pop(slot, None)

    def close(self) -> None:
        for slot, layer in list(self._shown.items()):
            self.hide(slot, layer)
        for _, address in self._slots:
            self._libc.munmap(address, self._slot_size + HUGE)
        for address, size in self._locked:
            self._libc.munlock(address, size)
        self._direct.close()
        super().close()
        self._slots, self._locked = [], []

    def _address(self, extent: Extent) -> int:
        return self._mapped[extent.file].address(extent)

    def _place(self, slot: int, extent: Extent) -> int:
        return self._slots[slot][0] + self._inside[extent]

    def _move(self, source: int, target: int, size: int) -> None:
        # The source stays mapped without pages, so no other memory can land there.
        check_result(self._libc.mremap(source, size, size, MOVE, target), "mremap")


class CachedLinuxStore(LinuxStore):
    def __init__(self, paths: Sequence[str], mapped: Sequence[Mapping], plan: Plan, library: Any = None) -> None:
        super().__init__(paths, mapped, replace(plan, slots=0), library)

    def preload(self, extents: Sequence[Extent], progress: Progress) -> None:
        super().preload(extents, progress)
        self.note += "; through the page cache, as this kernel cannot move pages (Linux 5.7 and later can)"

    read, show = Store.read, Store.show

    def hide(self, slot: int, layer: Layer) -> None:
        self.drop(layer.extents)
