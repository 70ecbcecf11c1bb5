"""The C library, and reading files: what the stores of all systems need."""

import ctypes
import mmap  # whose flags are not there on Windows
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from edgespec.weights.machine import READ_SIZE, READ_THREADS, format_size
from edgespec.weights.residency import Extent

MAP_FAILED = (1 << 64) - 1


def read_fully(descriptor: int, address: int, start: int, stop: int) -> None:
    """Read bytes `start` to `stop` of a file to an address.

    Raises:
        OSError: the disk failed, or the file ends before `stop`.
    """
    while start < stop:
        buffer = (ctypes.c_char * (stop - start)).from_address(address)
        done = os.preadv(descriptor, [buffer], start)
        if done <= 0:
            raise OSError(f"the file ends at byte {start}; it must have shrunk")
        start, address = start + done, address + done


def warm(descriptor: int, extents: Iterable[Extent], threads: int = READ_THREADS) -> None:
    """Read extents of a file into the page cache at the disk's full speed, whatever the system reads ahead."""
    starts = [(start, extent.stop) for extent in extents for start in range(extent.start, extent.stop, READ_SIZE)]
    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(lambda piece: _touch(descriptor, *piece), starts):
            pass


def _touch(descriptor: int, start: int, stop: int) -> int:
    done = len(os.pread(descriptor, min(READ_SIZE, stop - start), start))
    if not done:
        raise OSError(f"the file ends at byte {start}; it must have shrunk")
    return done


def touch(descriptor: int, start: int, stop: int) -> None:
    """Read bytes `start` to `stop`, one piece of READ_SIZE at most, into the page cache. Raises OSError."""
    if _touch(descriptor, start, stop) < stop - start:
        raise OSError(f"the file ends before byte {stop}; it must have shrunk")


def file_sizes(descriptors: Iterable[int]) -> list[int]:
    """Bytes of each open file."""
    return [os.fstat(descriptor).st_size for descriptor in descriptors]


def check_sizes(paths: Sequence[str], descriptors: Sequence[int], sizes: Sequence[int]) -> None:
    """Raises OSError if a file is smaller than it was."""
    for path, now, then in zip(paths, file_sizes(descriptors), sizes, strict=True):
        if now < then:
            raise OSError(f"{path} has shrunk from {then} to {now} bytes")


def libc() -> Any:
    """The C library, with the argument types of what is used here."""
    library = ctypes.CDLL(None, use_errno=True)
    pointer, size, number, offset = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int64
    for name, result, arguments in [
        ("mmap", pointer, [pointer, size, number, number, number, offset]),
        ("mremap", pointer, [pointer, size, size, number, pointer]),
        ("munmap", number, [pointer, size]),
        ("madvise", number, [pointer, size, number]),
        ("msync", number, [pointer, size, number]),
        ("mlock", number, [pointer, size]),
        ("munlock", number, [pointer, size]),
    ]:
        if function := getattr(library, name, None):
            function.restype, function.argtypes = result, arguments
    return library


def check_result(result: int | None, what: str) -> None:
    """Raises OSError if a call of the C library, named `what`, has failed."""
    if result not in (0, None) and (result == -1 or result == MAP_FAILED):
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def new_memory(library: Any, size: int) -> int:
    """The address of so many bytes that this process can write. Raises OSError."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    address = library.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
    check_result(address, "mmap")
    return int(address)


def lock(library: Any, ranges: Sequence[tuple[int, int]]) -> tuple[list[tuple[int, int]], str]:
    """Lock those ranges (address, size) in memory that this process may: those locked, and a note for a person."""
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
