"""Calls of the operating system: direct reads, moving pages, processors and their quotas."""

import ctypes
import math
import mmap
import os
import platform
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from time import perf_counter
from typing import Any

READ_THREADS = 4  # direct reads in flight; with fewer a disk idles between requests
READ_SIZE = 4 << 20  # bytes of a read: large enough for a disk's full speed
BLOCK = 4096  # bytes; direct reads begin and end at multiples of a disk's block, which is no larger
SECTOR = 512  # bytes; alignment in memory that most disks need
HUGE = 2 << 20  # a huge page moves in one step if source and destination are equally aligned to this
LOADED = 0.5  # load per processor above which nothing can be timed
MAP_FAILED = (1 << 64) - 1
COMPRESSES = sys.platform == "darwin"  # memory that looks idle
END_OF_FILE = 38  # ERROR_HANDLE_EOF of winerror.h
MS_INVALIDATE = 2  # macOS, sys/mman.h
AWAKE = 600  # seconds that a Mac stays awake; a pass takes less than half of them
MOVE = 1 | 2 | 4  # MREMAP_MAYMOVE, MREMAP_FIXED, MREMAP_DONTUNMAP of linux/mman.h

PRIVATE = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}  # not on Windows

_own = threading.local()
_asked_awake = -math.inf  # when a Mac was asked to stay awake


def open_direct(path: str) -> tuple[int, bool]:
    """Open a file for reads past the page cache: (descriptor, True if that works here)."""
    direct = getattr(os, "O_DIRECT", 0)
    if direct:
        try:
            return os.open(path, os.O_RDONLY | direct), True
        except OSError:
            pass
    descriptor = os.open(path, os.O_RDONLY)
    if sys.platform == "darwin":
        import fcntl

        fcntl.fcntl(descriptor, fcntl.F_NOCACHE, 1)
        return descriptor, True
    return descriptor, False


def forget_pages(descriptor: int, start: int, stop: int) -> None:
    """Take bytes `start` to `stop` of a file out of the page cache, if the system can do that.

    Raises:
        OSError: the file cannot be mapped (macOS).
    """
    if sys.platform == "darwin":
        library, low = libc(), start - start % mmap.PAGESIZE
        address = library.mmap(None, stop - low, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, low)
        check_result(address, "mmap")
        try:
            check_result(library.msync(address, stop - low, MS_INVALIDATE), "msync")
        finally:
            library.munmap(address, stop - low)
    elif hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, start, stop - start, os.POSIX_FADV_DONTNEED)


def read_buffer(size: int = READ_SIZE) -> memoryview:
    """`size` bytes to read into, in huge pages if there are any: small pages halve the speed of a read."""
    whole = mmap.mmap(-1, size + HUGE, **PRIVATE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):
            whole.madvise(mmap.MADV_HUGEPAGE)
    start = -ctypes.addressof(ctypes.c_char.from_buffer(whole)) % HUGE
    return memoryview(whole)[start : start + size]


def own_buffer() -> memoryview:
    if not hasattr(_own, "buffer"):
        _own.buffer = read_buffer()
    buffer: memoryview = _own.buffer
    return buffer


def _shrunk(end: int) -> OSError:
    return OSError(f"the file ends at byte {end}; it must have shrunk")


class Overlapped(ctypes.Structure):
    """OVERLAPPED of minwinbase.h: where ReadFile begins."""

    _fields_ = (
        ("internal", ctypes.c_size_t), ("internal_high", ctypes.c_size_t), ("offset", ctypes.c_uint32),
        ("offset_high", ctypes.c_uint32), ("event", ctypes.c_void_p),
    )  # fmt: skip


def read_into(descriptor: int, buffers: Sequence[Any], start: int) -> int:
    """`os.preadv`, which Windows lacks: read from byte `start` of a file into buffers, one after the other.

    Returns:
        Number of bytes; less than the buffers hold at the file's end.

    Raises:
        OSError: the disk failed.
    """
    if hasattr(os, "preadv"):
        return os.preadv(descriptor, buffers, start)
    import msvcrt

    kernel, total = ctypes.windll.kernel32, 0  # type: ignore[attr-defined]
    handle = ctypes.c_void_p(msvcrt.get_osfhandle(descriptor))  # type: ignore[attr-defined]
    for buffer in buffers:
        place = (ctypes.c_char * len(buffer)).from_buffer(buffer)
        done, at = ctypes.c_uint32(), Overlapped(offset=(start + total) % 2**32, offset_high=(start + total) >> 32)
        if not kernel.ReadFile(handle, place, len(buffer), ctypes.byref(done), ctypes.byref(at)):
            code = kernel.GetLastError()
            if code != END_OF_FILE:
                raise OSError(code, f"ReadFile: error {code}")
        total += done.value
        if done.value < len(buffer):
            break
    return total


def memory_step(descriptor: int) -> int:
    """The alignment in memory that direct reads of a file need; raises OSError if it is more than a block."""
    buffer = own_buffer()
    try:
        read_into(descriptor, [buffer[SECTOR : SECTOR + BLOCK]], 0)
        return SECTOR
    except OSError:
        read_into(descriptor, [buffer[:BLOCK]], 0)
        return BLOCK


def read_unaligned(descriptor: int, address: int, start: int, stop: int, step: int = BLOCK) -> None:
    """Read bytes `start` to `stop` of a file, open for direct reads, to an address.

    They are copied through a buffer where the file's blocks would not lie at multiples of `step` in memory.

    Raises:
        OSError: the disk failed, or the file ends before `stop`.
    """
    buffer = own_buffer()
    while start < stop:
        low, high = start // BLOCK * BLOCK, -(-stop // BLOCK) * BLOCK
        inner, end = -(-start // BLOCK) * BLOCK, stop // BLOCK * BLOCK
        if inner >= end or (address + inner - start) % step:
            done = read_into(descriptor, [buffer[: min(high - low, READ_SIZE)]], low)
            copies = [(0, start, min(stop, low + done))]
        else:
            head, tail = buffer[: inner - low], buffer[BLOCK : BLOCK + high - end]
            middle = (ctypes.c_char * (end - inner)).from_address(address + inner - start)
            done = read_into(descriptor, [part for part in (head, middle, tail) if len(part)], low)
            copies = [(0, start, min(inner, low + done)), (BLOCK, end, min(stop, low + done))]
        if low + done <= start:
            raise _shrunk(low + done)
        for at, first, last in copies:
            if first < last:
                found = ctypes.addressof(ctypes.c_char.from_buffer(buffer)) + at + first % BLOCK
                ctypes.memmove(address + first - start, found, last - first)
        start, address = low + done, address + low + done - start


def touch(descriptor: int, start: int, stop: int) -> None:
    """Read bytes `start` to `stop` of a file into the page cache; errors as for `read_unaligned`."""
    buffer = own_buffer()
    while start < stop:
        done = read_into(descriptor, [buffer[: stop - start]], start)
        if done <= 0:
            raise _shrunk(start)
        start += done


def declare(library: Any, functions: Iterable[tuple[str, Any, Any]]) -> Any:
    """Tell ctypes names, results and arguments of a library's functions; those that it lacks are left out."""
    for name, result, arguments in functions:
        if function := getattr(library, name, None):
            function.restype, function.argtypes = result, arguments
    return library


def libc() -> Any:
    pointer, size, number, offset = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int64
    functions = [
        ("mmap", pointer, [pointer, size, number, number, number, offset]),
        ("mremap", pointer, [pointer, size, size, number, pointer]),
        ("munmap", number, [pointer, size]),
        ("madvise", number, [pointer, size, number]),
        ("msync", number, [pointer, size, number]),
        ("mlock", number, [pointer, size]),
        ("munlock", number, [pointer, size]),
    ]
    return declare(ctypes.CDLL(None, use_errno=True), functions)


def check_result(result: int | None, what: str) -> None:
    """
    Args:
        result: of the C library's function.
        what: the function's name.

    Raises:
        OSError: it failed.
    """
    if result in (-1, MAP_FAILED):
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def new_memory(library: Any, size: int) -> int:
    """
    Returns:
        The address of `size` writable bytes, which belong to the caller until munmap.

    Raises:
        OSError: there is no memory.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    address = library.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
    check_result(address, "mmap")
    return int(address)


def wish_huge_pages(address: int, size: int) -> None:
    if hasattr(mmap, "MADV_HUGEPAGE"):
        libc().madvise(address, size, mmap.MADV_HUGEPAGE)


def moves_pages(library: Any = None) -> bool:
    """True if this system moves pages and leaves their old addresses mapped: Linux since 5.7.

    EDGESPEC_PAGE_CACHE=1 in the environment turns it off, to measure and test `CachedLinuxStore`.

    Raises:
        OSError: there is no memory.
    """
    if sys.platform != "linux" or os.environ.get("EDGESPEC_PAGE_CACHE"):
        return False
    library, places = library or libc(), list[int]()
    try:
        for _ in range(2):
            places.append(new_memory(library, mmap.PAGESIZE))
        return bool(library.mremap(places[0], mmap.PAGESIZE, mmap.PAGESIZE, MOVE, places[1]) == places[1])
    finally:
        for place in places:
            library.munmap(place, mmap.PAGESIZE)


def machine_is_busy() -> bool:
    """True if other programs, or this one, have computed so much that nothing can be timed."""
    tell = getattr(os, "getloadavg", None)
    return tell is not None and tell()[0] > LOADED * all_processors()


def all_processors() -> int:
    return os.cpu_count() or 1


def own_processors(root: Path = Path("/")) -> int:
    """Processors that this process may use at once, by its affinity and the quotas of its control groups.

    Args:
        root: the folder of /proc and /sys; for tests.
    """
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else all_processors()
    return min([allowed, *(max(1, math.ceil(quota)) for quota in _quotas(root))])


def _quotas(root: Path) -> Iterator[float]:
    """Processors that each control group may use on average: its quota / its period."""
    for group, version in control_groups("cpu", root):
        try:
            if version == 1:
                most, period = ((group / f"cpu.cfs_{name}_us").read_text("utf-8") for name in ("quota", "period"))
            else:
                most, period = (group / "cpu.max").read_text("utf-8").split()
            if most != "max" and int(most) > 0:  # -1: no limit
                yield int(most) / int(period)
        except (OSError, ValueError, ZeroDivisionError):
            continue


def lines_of(path: Path) -> list[str]:
    """Lines of a file of the system: names in it may have all characters but line feeds."""
    return [os.fsdecode(line) for line in path.read_bytes().split(b"\n") if line]


def control_groups(controller: str, root: Path = Path("/")) -> Iterator[tuple[Path, int]]:
    """This process' control groups and all groups around them, each with its version, 1 or 2 (Linux).

    In a container the path may name a group that is not mounted; then only the mounted root exists.
    """
    try:
        lines = lines_of(root / "proc/self/cgroup")
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers or controller in controllers.split(","):
            base = root / "sys/fs/cgroup" / (controller if controllers else "")
            for part in (Path(path.strip("/")), *Path(path.strip("/")).parents):
                yield base / part, 1 if controllers else 2


def compute_cores() -> int:
    """Processors that compute best: without a Mac's efficiency cores."""
    if sys.platform == "darwin":
        levels = [f"hw.perflevel{i}" for i in range(int.from_bytes(_sysctl("hw.nperflevels"), sys.byteorder))]
        best = [level for level in levels if not _sysctl(f"{level}.name").startswith(b"Efficiency")]
        if count := sum(int.from_bytes(_sysctl(f"{level}.physicalcpu"), sys.byteorder) for level in best):
            return count
    return own_processors()


def _sysctl(name: str) -> bytes:
    """A value of a Mac's kernel; b"": it has none of this name."""
    value, size = ctypes.create_string_buffer(256), ctypes.c_size_t(256)
    failed = ctypes.CDLL(None).sysctlbyname(name.encode(), value, ctypes.byref(size), None, ctypes.c_size_t(0))
    return b"" if failed else value.raw[: size.value]


def chip() -> str:
    """Name of a Mac's processor, such as "Apple M4 Pro"; "" elsewhere."""
    return _sysctl("machdep.cpu.brand_string").rstrip(b"\0").decode() if sys.platform == "darwin" else ""


def under_rosetta() -> bool:
    """True if this Python is for Intel, on a Mac with Apple silicon."""
    intel = sys.platform == "darwin" and platform.machine() == "x86_64"
    return intel and _sysctl("hw.optional.arm64").startswith(b"\1")


def stay_awake() -> None:
    """Keep a Mac from falling asleep for some minutes; called before each pass."""
    global _asked_awake
    if sys.platform == "darwin" and perf_counter() - _asked_awake > AWAKE / 2:
        _asked_awake = perf_counter()
        command = f"caffeinate -i -t {AWAKE} > /dev/null 2>&1 < /dev/null &"
        with suppress(OSError):  # a shell, for nobody waits for the program's end; with open files no fork is needed
            subprocess.run(["/bin/sh", "-c", command], close_fds=False, check=False)


def lower_priority() -> None:
    """Let all other threads come before this one (only Linux, where a thread has its own priority)."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
