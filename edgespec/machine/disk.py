"""How a disk is read fastest: how many reads at once, of how many bytes. Found once, and remembered for that disk."""

import os
from dataclasses import asdict, dataclass
from itertools import product
from statistics import median

import edgespec.machine.measurements as remembered
from edgespec.machine.memory import disk_bandwidth, disk_name
from edgespec.machine.system import BLOCK, READ_SIZE, READ_THREADS

THREADS, SIZES = (2, 4, 8, 16), (1 << 20, 4 << 20, 16 << 20)
SECONDS = 10.0  # to find out
FINALISTS, ROUNDS = 3, 3
BETTER = 1.05  # the usual reads are left alone unless others are that much quicker
MEASURE = 0.3  # seconds that a disk is measured before it is streamed from
MOST_THREADS, LARGEST = max(THREADS), max(SIZES)  # what is believed of a file


@dataclass(frozen=True, slots=True)
class Reading:
    """A way to read a disk."""

    threads: int = READ_THREADS
    size: int = READ_SIZE  # bytes of a read
    speed: float = 0.0  # bytes per second that came of it; 0: not measured


USUAL = Reading()


def find_reading(path: str, seconds: float = SECONDS) -> list[Reading]:
    """Try ways to read a file past the page cache, the best first.

    All of them once; then, by turns, the quickest again, and the usual one, since disks are now faster, now slower.

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
        at = number / slices  # not the same bytes again, which a disk may have kept
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
    """How the disk that a file lies on is read best, as far as that is known; else as usual."""
    try:
        found = Reading(**remembered.recall(_about(path)) or {})
        whole = type(found.threads) is type(found.size) is int
        believed = 1 <= found.threads <= MOST_THREADS and BLOCK <= found.size <= LARGEST and found.size % BLOCK == 0
    except (OSError, TypeError):  # it is another version's
        return USUAL
    return found if whole and believed and found.speed > 0 else USUAL


def remember_reading(path: str, reading: Reading) -> bool:
    """From now on the disk that a file lies on is read so; False: that could not be kept. Raises OSError."""
    return reading.speed > 0 and remembered.remember(_about(path), asdict(reading))


def disk_speed(path: str) -> float:
    """Bytes per second of direct reads of a file: as remembered, else after a short look. Errors as `find_reading`."""
    return recall_reading(path).speed or disk_bandwidth(path, MEASURE)


def _about(path: str) -> dict[str, str]:
    size = 0
    if hasattr(os, "statvfs"):  # disks that come and go may have one name
        found = os.statvfs(path)
        size = found.f_blocks * found.f_frsize
    # Two digits of it: where file systems share a disk, what others take changes the size of each.
    return {"kind": "disk", "machine": remembered.machine(), "disk": disk_name(path), "size": f"{size:.1e}"}
