"""Reads past the page cache to any address, for engines that hold their weights in their own memory."""

import mmap
import os
from collections.abc import Sequence

from edgespec.machine.system import (
    BLOCK,
    check_sizes,
    file_sizes,
    forget_pages,
    memory_step,
    open_direct,
    read_unaligned,
)
from edgespec.weights.plan import Extent, Layer

ALIGNED = max(BLOCK, mmap.PAGESIZE)  # bytes; direct reads start and end at multiples, in the file and in memory


class DirectFiles:
    """The open files of a model; all methods raise OSError."""

    def __init__(self, paths: Sequence[str]) -> None:
        self.paths = paths
        self._files: list[int] = []
        self._direct: list[bool] = []
        self._steps: list[int] = []
        try:
            for path in paths:
                descriptor, direct = open_direct(path)
                self._files.append(descriptor)
                self._direct.append(direct)
                self._steps.append(memory_step(descriptor) if direct else 1)
            self.sizes = file_sizes(self._files)
        except BaseException:
            self.close()
            raise

    def check(self) -> None:
        check_sizes(self.paths, self._files, self.sizes)

    def whole_pages(self, extent: Extent) -> Extent:
        start, stop = extent.start // ALIGNED * ALIGNED, -(-extent.stop // ALIGNED) * ALIGNED
        return Extent(extent.file, start, min(stop, self.sizes[extent.file]))

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
        read_unaligned(self._files[file], address, start, stop, self._steps[file])
        if not self._direct[file]:
            forget_pages(self._files[file], start, stop)

    def close(self) -> None:
        for descriptor in self._files:
            os.close(descriptor)
        self._files = []
