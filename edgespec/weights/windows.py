"""The store of Windows, and of what a Mac's GPU maps: the system's paging keeps what fits of a mapped file, and only
experts are read besides.

Never run there.
"""

from collections.abc import Sequence

from edgespec.loop.engines import Progress
from edgespec.machine.memory import format_size
from edgespec.weights.open_files import OpenFiles
from edgespec.weights.plan import Extent, Layer
from edgespec.weights.preload import warm


class WindowsStore:
    note = ""

    def __init__(self, paths: Sequence[str]) -> None:
        self._files = OpenFiles(paths)

    def check(self) -> None:
        self._files.check()

    def preload(self, extents: Sequence[Extent], progress: Progress) -> None:
        within = [self._files.within(extent) for extent in extents]
        warm(within, self._files.touch, progress)
        self.note = f"{format_size(sum(one.size for one in within))} kept as the system's paging does"

    def drop(self, extents: Sequence[Extent]) -> None: ...

    def look_up(self, extents: Sequence[Extent]) -> None: ...

    def read(self, slot: int, layer: Layer, extent: Extent, start: int, stop: int) -> None:
        self._files.touch(Extent(extent.file, start, stop))

    def show(self, slot: int, layer: Layer) -> None: ...

    def hide(self, slot: int, layer: Layer) -> None: ...

    def close(self) -> None:
        self._files.close()
