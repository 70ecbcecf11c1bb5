"""The store of macOS: reads fill the page cache, msync(MS_INVALIDATE) empties it.

Written from Apple's sources and documentation; not measured.
"""

import mmap
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from edgespec.loop.engines import Progress
from edgespec.machine.system import MS_INVALIDATE, check_result, check_sizes, file_sizes, libc, touch
from edgespec.weights.plan import Extent, Layer, Mapping
from edgespec.weights.preload import lock, warm

PAGE = 1 << 14  # bytes of Apple silicon's pages, the largest of a Mac


class DarwinStore:
    """Works on its own mapping: on macOS all mappings of a file share their pages."""

    note = ""

    def __init__(self, paths: Sequence[str], library: Any = None) -> None:
        self._libc = library or libc()
        self._paths = paths
        self._descriptors: list[int] = []
        self._sizes: list[int] = []
        self._locked: list[tuple[int, int]] = []
        self._mapped: list[Mapping] = []
        try:
            for path in paths:
                self._descriptors.append(os.open(path, os.O_RDONLY))
            self._sizes = file_sizes(self._descriptors)
            for descriptor, size in zip(self._descriptors, self._sizes, strict=True):
                start = self._libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
                check_result(start, "mmap")
                self._mapped.append(Mapping(start, start + -(-size // PAGE) * PAGE, 0))
        except BaseException:
            self.close()
            raise

    def check(self) -> None:
        check_sizes(self._paths, self._descriptors, self._sizes)

    def preload(self, extents: Sequence[Extent], progress: Progress) -> None:
        ranges = [(self._address(extent), extent.size) for extent in extents]
        within = [replace(extent, stop=min(extent.stop, self._sizes[extent.file])) for extent in extents]
        warm(within, lambda piece: touch(self._descriptors[piece.file], piece.start, piece.stop), progress)
        self._locked, self.note = lock(self._libc, ranges)

    def drop(self, extents: Sequence[Extent]) -> None:
        for extent in extents:
            check_result(self._libc.msync(self._address(extent), extent.size, MS_INVALIDATE), "msync")

    def look_up(self, extents: Sequence[Extent]) -> None:
        self.drop(extents)

    def read(self, slot: int, layer: Layer, extent: Extent, start: int, stop: int) -> None:
        touch(self._descriptors[extent.file], start, stop)

    def show(self, slot: int, layer: Layer) -> None:
        pass

    def hide(self, slot: int, layer: Layer) -> None:
        self.drop(layer.extents)

    def close(self) -> None:
        for address, size in self._locked:
            self._libc.munlock(address, size)
        for mapping, size in zip(self._mapped, self._sizes, strict=False):
            self._libc.munmap(mapping.start, size)
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._mapped, self._sizes, self._descriptors, self._locked = [], [], [], []

    def _address(self, extent: Extent) -> int:
        return self._mapped[extent.file].address(extent)
