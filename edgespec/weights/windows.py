"""The store of Windows, whose own paging keeps what fits of a mapped file; only experts are read besides.

Never run on Windows.
"""

import os
from collections.abc import Sequence

from edgespec.loop.engines import Progress
from edgespec.machine.memory import format_size
from edgespec.machine.system import check_sizes, file_sizes, touch
from edgespec.weights.plan import Extent, Layer
from edgespec.weights.preload import warm


class WindowsStore:
    note = ""

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = paths
        self._descriptors: list[int] = []
        try:
            for path in paths:
                self._descriptors.append(os.open(path, os.O_RDONLY))
            self._sizes = file_sizes(self._descriptors)
        except BaseException:
            self.close()
            raise

    def check(self) -> None:
        check_sizes(self._paths, self._descriptors, self._sizes)

    def preload(self, extents: Sequence[Extent], progress: Progress) -> None:
        within = [Extent(one.file, one.start, min(one.stop, self._sizes[one.file])) for one in extents]
        warm(within, lambda piece: touch(self._descriptors[piece.file], piece.start, piece.stop), progress)
        self.note = f"{format_size(sum(one.size for one in within))} kept as the system's paging does"

    def drop(self, extents: Sequence[Extent]) -> None: ...

    def look_up(self, extents: Sequence[Extent]) -> None: ...

    def read(self, slot: int, layer: Layer, extent: Extent, start: int, stop: int) -> None:
        touch(self._descriptors[extent.file], start, stop)

    def show(self, slot: int, layer: Layer) -> None: ...

    def hide(self, slot: int, layer: Layer) -> None: ...

    def close(self) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors = []
