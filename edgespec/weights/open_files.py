"""The files of a model, open to be read through the page cache, and the store that leaves all else to the system."""

import os
from collections.abc import Sequence
from dataclasses import replace

from edgespec.errors import undone
from edgespec.loop.engines import Progress
from edgespec.machine.memory import format_size
from edgespec.machine.system import touch
from edgespec.weights.plan import Extent, Layer
from edgespec.weights.preload import warm


class OpenFiles:
    """All methods raise OSError.

    Attributes:
        descriptors: of the files.
        sizes: in bytes, when they were opened.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = paths
        self.descriptors: list[int] = []
        with undone(self.close):
            for path in paths:
                self._open(path)
            self.sizes = [os.fstat(descriptor).st_size for descriptor in self.descriptors]

    def _open(self, path: str) -> None:
        self.descriptors.append(os.open(path, os.O_RDONLY))

    def check(self) -> None:
        """Fail if a file has shrunk."""
        for path, descriptor, size in zip(self._paths, self.descriptors, self.sizes, strict=True):
            if (now := os.fstat(descriptor).st_size) < size:
                raise OSError(f"{path} has shrunk from {size} to {now} bytes")

    def within(self, extent: Extent) -> Extent:
        """Its part before the end of its file."""
        return replace(extent, stop=min(extent.stop, self.sizes[extent.file]))

    def touch(self, piece: Extent) -> None:
        """Read it into the page cache."""
        touch(self.descriptors[piece.file], piece.start, piece.stop)

    def close(self) -> None:
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors = []


class Store:
    """Weights of a plan, for an engine that maps its files; all methods raise OSError.

    Here the system's paging keeps what fits: on Windows, where it was never run, and of what a Mac's GPU maps. Other
    stores override what they do themselves.

    Attributes:
        note: for the user.
    """

    note = ""

    def __init__(self, files: OpenFiles) -> None:
        self._files = files

    def check(self) -> None:
        self._files.check()

    def preload(self, extents: Sequence[Extent], progress: Progress) -> None:
        """Read pinned weights and lock them in memory, as far as this process may."""
        within = [self._files.within(extent) for extent in extents]
        warm(within, self._files.touch, progress)
        self.note = f"{format_size(sum(one.size for one in within))} kept as the system's paging does"

    def drop(self, extents: Sequence[Extent]) -> None:
        """Free pages, which the system reads again when they are touched."""

    def look_up(self, extents: Sequence[Extent]) -> None:
        """On Linux: end reading ahead."""

    def read(self, slot: int, layer: Layer, extent: Extent, start: int, stop: int) -> None:
        self._files.touch(Extent(extent.file, start, stop))

    def show(self, slot: int, layer: Layer) -> None:
        """As in `ring.Slots`, and so are the others without a text."""

    def hide(self, slot: int, layer: Layer) -> None: ...

    def close(self) -> None:
        self._files.close()
