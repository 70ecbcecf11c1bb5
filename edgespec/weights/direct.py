"""Files read past the page cache, to any address: for engines that hold their weights in memory of their own."""

import os
import sys
from collections.abc import Sequence
from ctypes import addressof, c_char, memmove

from edgespec.weights.residency import Extent
from edgespec.weights.system import (
    BLOCK,
    check_sizes,
    file_sizes,
    memory_step,
    open_direct,
    own_buffer,
    read_fully,
    read_unaligned,
)

ALIGNED = BLOCK  # bytes; direct reads start and end at multiples of that, in the file and in memory


class DirectFiles:
    """A model's files, open. All methods raise OSError."""

    def __init__(self, paths: Sequence[str]) -> None:
        self.paths = paths
        self._direct: list[int] = []
        self._cached: list[int] = []
        self._is_direct: list[bool] = []
        self._steps: list[int] = []
        try:
            for path in paths:
                descriptor, direct = open_direct(path)
                self._direct.append(descriptor)
                self._is_direct.append(direct)
                self._steps.append(memory_step(descriptor) if direct else 1)
                # Elsewhere than on Linux a descriptor takes reads of any bytes, and few are allowed (256 on a Mac).
                self._cached.append(os.open(path, os.O_RDONLY) if sys.platform == "linux" else descriptor)
            self.sizes = file_sizes(self._direct)
        except BaseException:
            self.close()
            raise

    def check(self) -> None:
        """Fail if a file has shrunk."""
        check_sizes(self.paths, self._direct, self.sizes)

    def whole_pages(self, extent: Extent) -> Extent:
        """What has to be read to have an extent."""
        start, stop = extent.start // ALIGNED * ALIGNED, -(-extent.stop // ALIGNED) * ALIGNED
        return Extent(extent.file, start, min(stop, self.sizes[extent.file]))

    def read(self, file: int, address: int, start: int, stop: int) -> None:
        """Read bytes to an address. `start` is a multiple of ALIGNED, `stop` is one or the file's end.

        An address that is none costs a copy. At most READ_SIZE bytes.
        """
        whole = max(start, stop // ALIGNED * ALIGNED if self._is_direct[file] else 0)
        if start < whole and address % ALIGNED == 0:
            read_fully(self._direct[file], address, start, whole)
        elif start < whole:
            buffer = addressof(c_char.from_buffer(own_buffer()))
            read_fully(self._direct[file], buffer, start, whole)
            memmove(address, buffer, whole - start)
        if whole < stop:
            self.read_any(file, address + whole - start, whole, stop)

    def read_blocks(self, file: int, address: int, start: int, stop: int) -> None:
        """Read any bytes to an address, whole blocks past the page cache; at most as `read_unaligned`."""
        read_unaligned(self._direct[file], address, start, stop, self._steps[file])
        if not self._is_direct[file] and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._direct[file], start, stop - start, os.POSIX_FADV_DONTNEED)

    def read_any(self, file: int, address: int, start: int, stop: int) -> None:
        """Read any bytes to an address; through the page cache, which is told to forget them."""
        read_fully(self._cached[file], address, start, stop)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._cached[file], start, stop - start, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Close the files. Safe to call twice."""
        for descriptor in {*self._cached, *self._direct}:
            os.close(descriptor)
        self._cached, self._direct = [], []
