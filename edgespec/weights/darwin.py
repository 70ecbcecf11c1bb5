"""The store of macOS: reads fill the page cache, msync(MS_INVALIDATE) empties it.

Written from Apple's sources and documentation; not measured.
"""

import mmap
from collections.abc import Sequence
from typing import Any

from edgespec.loop.engines import Progress
from edgespec.machine.system import MS_INVALIDATE, check_result, libc
from edgespec.weights.open_files import OpenFiles
from edgespec.weights.plan import Extent, Layer, Mapping
from edgespec.weights.preload import lock, warm

PAGE = 1 << 14  # bytes of Apple silicon's pages, the largest of a Mac


class DarwinStore:
    """Works on its own mapping: on macOS all mappings of a file share their pages."""

    note = ""

    def __init__(self, paths: Sequence[str], library: Any = None) -> None:
        self._libc = library or libc()
        self._files = OpenFiles(paths)
        self._locked: list[tuple[int, int]] = []
        self._mapped: list[Mapping] = []
        try:
            for descriptor, size in zip(self._files.descriptors, self._files.sizes, strict=True):
                start = self._libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
                check_result(start, "mmap")
                self._mapped.append(Mapping(start, start + -(-size // PAGE) * PAGE, 0))
        except BaseException:
            self.close()
            raise

    def check(self) -> None:
        self._files.check()

    def preload(self, extents: Sequence[Extent], progress: Progress) -> None:
        ranges = [(self._address(extent), extent.size) for extent in extents]
        warm([self._files.within(extent) for extent in extents], self._files.touch, progress)
        self._locked, self.note = lock(self._libc, ranges)

    def drop(self, extents: Sequence[Extent]) -> None:
        for extent in extents:
            check_result(self._libc.msync(self._address(extent), extent.size, MS_INVALIDATE), "msync")

    def look_up(self, extents: Sequence[Extent]) -> None:
        self.drop(extents)

    def read(self, slot: int, layer: Layer, extent: Extent, start: int, stop: int) -> None:
        self._files.touch(Extent(extent.file, start, stop))

    def show(self, slot: int, layer: Layer) -> None:
        pass

    def hide(self, slot: int, layer: Layer) -> None:
        self.drop(layer.extents)

    def close(self) -> None:
        for address, size in self._locked:
            self._libc.munlock(address, size)
        for mapping, size in zip(self._mapped, self._files.sizes, strict=False):
            self._libc.munmap(mapping.start, size)
        self._files.close()
        self._mapped, self._locked = [], []

    def _address(self, extent: Extent) -> int:
        return self._mapped[extent.file].address(extent)
