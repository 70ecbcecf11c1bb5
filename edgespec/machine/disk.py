"""Disks: their file systems, the fastest way to read one (how many reads in flight, and of which size), and room for
temporary files.
"""

import os
import re
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import cycle, islice, product
from pathlib import Path
from shutil import disk_usage
from statistics import median
from tempfile import NamedTemporaryFile, TemporaryFile, gettempdir
from time import perf_counter

import edgespec.machine.measurements as remembered
from edgespec.errors import ModelError, UsageError
from edgespec.machine.memory import format_size
from edgespec.machine.system import (
    BLOCK,
    READ_SIZE,
    READ_THREADS,
    forget_pages,
    lines_of,
    machine_is_busy,
    open_direct,
    read_buffer,
)

THREADS, SIZES = (2, 4, 8, 16), (1 << 20, 4 << 20, 16 << 20)
SECONDS = 10.0
FINALISTS, ROUNDS = 3, 3
BETTER = 1.05  # speed-up from which on another way replaces the usual one
MEASURE = 0.3  # seconds
IN_MEMORY = ("tmpfs", "ramfs")
# Reads there cannot be direct, or cost more than their bytes.
NETWORK_FILE_SYSTEMS = {
    "nfs",
    "nfs4",
    "cifs",
    "smb3",
    "smbfs",
    "9p",
    "fuse.sshfs",
    "afpfs",
    "webdav",
    "ceph",
    "glusterfs",
}
COMPRESSING_FILE_SYSTEMS = {"btrfs", "zfs", "squashfs", "erofs"}
MOUNTS = Path("/proc/self/mountinfo")
HEADROOM = 1 << 28  # bytes that stay free on a disk
SLOWEST, FASTEST = 1e5, 1e12  # bytes per second: other speeds are no disk's
Ranges = Sequence[tuple[int, int]]  # first byte, and the one behind the last
MOST_THREADS, LARGEST = max(THREADS), max(SIZES)


@dataclass(frozen=True, slots=True)
class Reading:
    """
    Attributes:
        threads: reads in flight.
        size: bytes of a read.
        speed: bytes per second; 0: not measured.
    """

    threads: int = READ_THREADS
    size: int = READ_SIZE
    speed: float = 0.0


USUAL = Reading()


def disk_bandwidth(
    path: str,
    seconds: float = 3.0,
    threads: int = READ_THREADS,
    size: int = READ_SIZE,
    at: float = 0.5,
    ranges: Ranges | None = None,
) -> float:
    """Bytes per second of direct reads of a file, from the beginning again after its end; 0: the file is empty.

    Where direct reads do not work, and on a Mac, where they copy what is in memory, that is dropped first.

    Args:
        path: of the file.
        seconds: to read for.
        threads: reads in flight.
        size: bytes of a read.
        at: share of the file before the first read.
        ranges: of the file to read; None: all.

    Raises:
        ModelError: the file cannot be read.
        UsageError: this system cannot read past its cache.
    """
    if not hasattr(os, "preadv"):
        raise UsageError("the speed of a disk is measured on Linux and macOS only")
    descriptor = -1
    try:
        descriptor, direct = open_direct(path)
        reads = list[tuple[int, int]]()
        for start, stop in [(0, os.fstat(descriptor).st_size)] if ranges is None else ranges:
            if (not direct or sys.platform == "darwin") and start < stop:
                forget_pages(descriptor, start, stop)
            cut = range(start - start % BLOCK, stop, size)
            reads += ((one, min(size, -(-(stop - one) // BLOCK) * BLOCK)) for one in cut)
        lock = threading.Lock()
        first = int(at * len(reads))
        turn = islice(cycle(reads), first, first + 10 * len(reads))
        started = perf_counter()

        def read() -> int:
            done, buffer = 0, read_buffer(size)
            while not done or perf_counter() - started < seconds:  # a busy machine may start a thread too late
                with lock:
                    one = next(turn, None)
                if one is None:
                    break
                done += os.preadv(descriptor, [buffer[: one[1]]], one[0])
            return done

        with ThreadPoolExecutor(threads) as pool:
            total = sum(future.result() for future in [pool.submit(read) for _ in range(threads)])
        return total / (perf_counter() - started)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from error
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def find_reading(path: str, seconds: float = SECONDS) -> list[Reading]:
    """Ways to read a file past the page cache, the fastest first.

    The fastest and the usual one are measured several times, interleaved, since a disk's speed varies.

    Args:
        path: of the file; the larger the better.
        seconds: for all of it.

    Raises:
        ModelError: the file cannot be read.
        UsageError: this system cannot read past its cache.
    """
    ways = [Reading(threads, size) for threads, size in product(THREADS, SIZES)]
    slices = len(ways) + (FINALISTS + 1) * ROUNDS

    def tried(way: Reading, number: int) -> Reading:
        at = number / slices  # other bytes each time, since a disk may cache
        return Reading(way.threads, way.size, disk_bandwidth(path, seconds / slices, way.threads, way.size, at))

    once = sorted((tried(way, number) for number, way in enumerate(ways)), key=lambda one: -one.speed)
    again = list(dict.fromkeys((one.threads, one.size) for one in [*once[:FINALISTS], USUAL]))
    speeds: dict[tuple[int, int], list[float]] = {one: [] for one in again}
    for number in range(ROUNDS):
        for i, one in enumerate(again):
            speeds[one].append(tried(Reading(*one), len(ways) + number * len(again) + i).speed)
    last = sorted((Reading(*one, median(found)) for one, found in speeds.items()), key=lambda one: -one.speed)
    others = [one for one in once if (one.threads, one.size) not in speeds]
    usual = next(one for one in last if (one.threads, one.size) == (USUAL.threads, USUAL.size))
    best = last[0] if last[0].speed > BETTER * usual.speed else usual
    return [best, *(one for one in last if one is not best), *others]


def recall_reading(path: str) -> Reading:
    try:
        found = remembered.recall(_about(path), Reading) or USUAL
    except OSError:
        return USUAL
    believed = 1 <= found.threads <= MOST_THREADS and BLOCK <= found.size <= LARGEST and found.size % BLOCK == 0
    return found if believed and SLOWEST <= found.speed <= FASTEST else USUAL


def remember_reading(path: str, reading: Reading) -> bool:
    """
    Returns:
        False if it was not measured, while other programs computed, or cannot be remembered.

    Raises:
        OSError: the file cannot be found.
    """
    return reading.speed > 0 and not machine_is_busy() and remembered.remember(_about(path), asdict(reading))


def disk_speed(path: str, ranges: Ranges | None = None) -> float:
    """Bytes per second of direct reads, remembered or measured now; otherwise as for `disk_bandwidth`."""
    return recall_reading(path).speed or disk_bandwidth(path, MEASURE, ranges=ranges)


def file_system(path: str, mounts: Path = MOUNTS) -> str:
    """The type of a file's file system, such as "ext4"; "": unknown."""
    return _mount(path, mounts)[1]


def disk_name(path: str) -> str:
    """The disk of a file, as in "/dev/sda1, ext4, on /"; else the number of its device.

    Raises:
        OSError: the file cannot be found.
    """
    point, kind, source = _mount(path, MOUNTS)
    return f"{source}, {kind}, on {point}" if kind else f"device {os.stat(path).st_dev}"


def _mount(path: str, mounts: Path) -> tuple[str, str, str]:
    found = ("", "", "")
    try:
        lines = lines_of(mounts)
    except OSError:
        return found
    real = os.path.realpath(path)
    for line in lines:
        fields, kind = line.split(" - ", 1)
        point = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), fields.split(" ")[4])
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(found[0]):
            found = point, kind.split()[0], kind.split()[1]
    return found


def folder_with_room(needed: int) -> str:
    """The temporary folder, or else the home folder, with disk space for `needed` bytes.

    Raises:
        ModelError: neither has room.
    """
    places = [os.path.expanduser("~")]
    with suppress(OSError):  # none can be written, as where the disk is full
        places.insert(0, gettempdir())
    for place in places:
        usable = os.path.isdir(place) and os.access(place, os.W_OK) and file_system(place) not in IN_MEMORY
        if usable and disk_usage(place).free > needed + HEADROOM:
            return place
    raise ModelError(f"no disk has room for {format_size(needed)}")


@contextmanager
def new_file(needed: int) -> Iterator[str]:
    """Path of an empty file, which is removed after the `with`.

    On Linux it has no name, so nothing stays of it if the process is killed.

    Raises:
        ModelError: as for `folder_with_room`.
    """
    place = folder_with_room(needed)
    if sys.platform == "linux":
        with TemporaryFile(dir=place) as file:
            yield f"/proc/self/fd/{file.fileno()}"
        return
    with NamedTemporaryFile(prefix="edgespec-", dir=place, delete=False) as file:
        pass
    try:
        yield file.name
    finally:
        Path(file.name).unlink(missing_ok=True)


def remove_name(path: str) -> None:
    """Remove a file of `new_file` that is mapped, if the system keeps the mapping."""
    if sys.platform == "darwin":
        Path(path).unlink()


def _about(path: str) -> dict[str, str]:
    size = 0
    if hasattr(os, "statvfs"):
        found = os.statvfs(path)
        size = found.f_blocks * found.f_frsize
    # Two digits of the size, as it varies where file systems share a disk.
    about = {"kind": "disk", "machine": remembered.processor_name(), "disk": disk_name(path), "size": f"{size:.1e}"}
    # What was measured on Macs before pages were dropped is the speed of their memory.
    return about | ({"pages": "dropped"} if sys.platform == "darwin" else {})
