"""Reads past the page cache to any address, for engines that hold their weights in their own memory."""

import mmap
from bisect import bisect_right
from collections.abc import Mapping, Sequence

from edgespec.loop.engines import Progress
from edgespec.machine.system import BLOCK, forget_pages, memory_step, open_direct, read_unaligned
from edgespec.weights.open_files import OpenFiles
from edgespec.weights.plan import Extent, Layer
from edgespec.weights.preload import warm

ALIGNED = max(BLOCK, mmap.PAGESIZE)  # bytes; direct reads start and end at multiples, in the file and in memory
THROUGH_CACHE = 1  # in place of the alignment in memory: this file cannot be read past the page cache


class DirectFiles(OpenFiles):
    def __init__(self, paths: Sequence[str]) -> None:
        self.steps: list[int] = []  # alignment in memory that reads of each file need
        super().__init__(paths)

    def _open(self, path: str) -> None:
        descriptor, direct = open_direct(path)
        self.descriptors.append(descriptor)
        self.steps.append(memory_step(descriptor) if direct else THROUGH_CACHE)

    def whole_pages(self, extent: Extent) -> Extent:
        start, stop = extent.start // ALIGNED * ALIGNED, -(-extent.stop // ALIGNED) * ALIGNED
        return self.within(Extent(extent.file, start, stop))

    def widened(self, layer: Layer) -> Layer:
        """A layer whose extents are of whole pages, and do not overlap."""
        extents = list[Extent]()
        for extent in layer.extents:
            pages, last = self.whole_pages(extent), extents[-1] if extents else None
            if last and last.file == pages.file and pages.start <= last.stop:
                extents[-1] = Extent(last.file, last.start, pages.stop)
            else:
                extents.append(pages)
        return Layer(layer.index, tuple(extents))

    def read(self, file: int, address: int, start: int, stop: int) -> None:
        """Read bytes `start` to `stop` to an address; without a copy if they are aligned alike in file and memory."""
        read_unaligned(self.descriptors[file], address, start, stop, self.steps[file])
        if self.steps[file] == THROUGH_CACHE:
            forget_pages(self.descriptors[file], start, stop)

    def fill(self, places: Mapping[Extent, int], progress: Progress) -> None:
        """Read extents, of which no two overlap, each to an address; `progress` as of `warm`."""
        starts = sorted((extent.file, extent.start, address) for extent, address in places.items())

        def read(piece: Extent) -> None:
            _, start, address = starts[bisect_right(starts, (piece.file, piece.start, 1 << 64)) - 1]
            self.read(piece.file, address + piece.start - start, piece.start, piece.stop)

        warm(list(places), read, progress)
