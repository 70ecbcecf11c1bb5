"""Pinned weights: read once, with progress, and locked in memory as far as this process may."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from edgespec.loop.engines import Progress
from edgespec.machine.memory import format_size
from edgespec.machine.system import READ_SIZE, READ_THREADS
from edgespec.weights.plan import Extent


def pieces(extents: Iterable[Extent], size: int = READ_SIZE) -> Iterator[Extent]:
    for extent in extents:
        for start in range(extent.start, extent.stop, size):
            yield Extent(extent.file, start, min(start + size, extent.stop))


def warm(extents: Sequence[Extent], read: Callable[[Extent], None], progress: Progress) -> None:
    """Bring extents into memory in pieces, several at once, for the disk's full speed.

    Args:
        extents: of the files.
        read: brings one piece in; called by several threads.
        progress: called in this thread.

    Raises:
        OSError: from `read`; pieces not begun are left out.
    """
    done, total = 0, sum(extent.size for extent in extents)

    def one(piece: Extent) -> int:
        read(piece)
        return piece.size

    pool = ThreadPoolExecutor(READ_THREADS)
    try:
        for size in pool.map(one, pieces(extents)):
            done += size
            progress(done, total)
    finally:
        pool.shutdown(cancel_futures=True)


def lock(library: Any, ranges: Sequence[tuple[int, int]]) -> tuple[list[tuple[int, int]], str]:
    """
    Args:
        library: the C library.
        ranges: (address, size) in bytes.

    Returns:
        The ranges that were locked in memory, and a note for the user.
    """
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (hard, hard))
    locked = [(address, size) for address, size in ranges if library.mlock(address, size) == 0]
    done, total = (sum(size for _, size in some) for some in (locked, ranges))
    note = f"{format_size(done)} locked in memory"
    if len(locked) < len(ranges):
        note += f", {format_size(total - done)} kept in the page cache"
        if hard != resource.RLIM_INFINITY:
            note += f"; the limit for locked memory is {format_size(hard)} (ulimit -l)"
    return locked, note
