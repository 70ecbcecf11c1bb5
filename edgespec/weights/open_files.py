"""The files of a model, open to be read through the page cache."""

import os
from collections.abc import Sequence
from dataclasses import replace

from edgespec.machine.system import check_sizes, file_sizes, touch
from edgespec.weights.plan import Extent


class OpenFiles:
    """All methods raise OSError.

    Attributes:
        descriptors: of the files.
        sizes: in bytes, when they were opened.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = paths
        self.descriptors: list[int] = []
        try:
            for path in paths:
                self.descriptors.append(os.open(path, os.O_RDONLY))
            self.sizes = file_sizes(self.descriptors)
        except BaseException:
            self.close()
            raise

    def check(self) -> None:
        """Fail if a file has shrunk."""
        check_sizes(self._paths, self.descriptors, self.sizes)

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
