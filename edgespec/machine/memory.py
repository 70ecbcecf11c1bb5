"""Memory: sizes as text, and how much of it there is, is free, and is used by this process."""

import ctypes
import gc
import math
import mmap
import os
import re
import subprocess
import sys
from pathlib import Path

from edgespec.errors import UsageError, named
from edgespec.machine.system import control_groups

UNITS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}

M_MMAP_THRESHOLD = -3  # malloc.h
V1_CACHE, V2_CACHE = ("total_active_file", "total_inactive_file"), ("active_file", "inactive_file")


def parse_size(text: str) -> int:
    """Bytes of "12G", "900M", "1.5GiB" or "1073741824"; a unit is a power of 1024, as in docker and systemd.

    Raises:
        UsageError: it is not a size, or not above zero.
    """
    match = re.fullmatch(r"\s*(\d{1,15}(?:\.\d+)?)\s*(?:([KMGT])I?)?B?\s*", text.upper())
    size = int(float(match[1]) * (1 << UNITS[match[2] or ""])) if match else 0
    if size <= 0:
        raise UsageError(f"{text!r} is not a size: write for example 12G, 900M or 1.5GiB")
    return size


def in_bytes(name: str, size: int | str | None) -> int | None:
    """The size in bytes that the option `name` gives; errors as for `parse_size`."""
    with named(name, UsageError):
        return parse_size(size) if isinstance(size, str) else size


def left_of(name: str, memory: int | str, taken: int) -> int:
    """
    Args:
        name: the option, for the message.
        memory: its value.
        taken: bytes of the draft.

    Returns:
        The bytes that the draft leaves.

    Raises:
        UsageError: it leaves nothing.
    """
    given = in_bytes(name, memory) or 0
    if taken >= given:
        raise UsageError(
            f"{name} is {format_size(given)}, but the draft takes {format_size(taken, up=True)}: give more"
        )
    return given - taken


def format_size(size: float, *, up: bool = False) -> str:
    """A size such as "1.04 GiB" or "312 MiB"; `up` rounds it up."""
    unit, digits, name = (1 << 30, 2, "GiB") if abs(size) >= 1 << 30 else (1 << 20, 0, "MiB")
    number = math.ceil(size / unit * 10**digits) / 10**digits if up else size / unit
    return f"{number:.{digits}f} {name}"


def available_memory(root: Path = Path("/")) -> int:
    """Bytes that this process may take before anything is swapped or killed, control groups included.

    Args:
        root: the folder of /proc and /sys; for tests.

    Returns:
        The bytes, the page cache included; if not known, those of all memory, else sys.maxsize.
    """
    if root == Path("/") and sys.platform != "linux":
        others = {"darwin": _available_darwin, "win32": _available_windows}
        return others.get(sys.platform, all_memory)()
    free = [_meminfo(root)["MemAvailable"], *_group_room(root)]
    return max(0, min(free))


def _meminfo(root: Path) -> dict[str, int]:
    lines = (root / "proc/meminfo").read_text("utf-8").splitlines()
    return {name: int(rest.split()[0]) * 1024 for name, rest in (line.split(":", 1) for line in lines)}


def _group_room(root: Path) -> list[int]:
    """Limit - use + page cache, for each limit of this process' control groups, versions 1 and 2.

    Beyond memory.high the kernel makes a process wait, so it counts like memory.max.
    """
    rooms = []
    for group, version in control_groups("memory", root):
        if version == 1:
            limits, used, cache = ["memory.limit_in_bytes"], "memory.usage_in_bytes", V1_CACHE
        else:
            limits, used, cache = ["memory.max", "memory.high"], "memory.current", V2_CACHE
        for limit in limits:
            try:
                most = (group / limit).read_text("utf-8").strip()
                if most == "max":
                    continue
                stat = dict(entry.split() for entry in (group / "memory.stat").read_text("utf-8").splitlines())
                rooms.append(
                    int(most) - int((group / used).read_text("utf-8")) + sum(int(stat[name]) for name in cache)
                )
            except (OSError, KeyError, ValueError):
                continue
    return rooms


def _available_darwin() -> int:
    try:
        return available_pages(subprocess.run(["vm_stat"], capture_output=True, text=True, check=True).stdout)
    except (OSError, subprocess.SubprocessError):
        return all_memory()


def available_pages(vm_stat: str) -> int:
    """
    Args:
        vm_stat: what macOS's program of this name prints.

    Returns:
        Bytes of free pages, and of pages that the system reclaims first. An inactive page may be a page of a file, too,
        so only one kind counts, the one with more pages: inactive ones, or those of files and purgeable ones.
    """
    pages = {name: int(number) for name, number in re.findall(r"^([\w -]+):\s+(\d+)\.$", vm_stat, re.MULTILINE)}
    size = re.search(r"page size of (\d+) bytes", vm_stat)
    inactive = pages["Pages inactive"] + pages["Pages speculative"]
    reclaimed = max(inactive, pages["File-backed pages"] + pages["Pages purgeable"])
    return (pages["Pages free"] + reclaimed) * (int(size[1]) if size else mmap.PAGESIZE)


class MemoryStatus(ctypes.Structure):
    """MEMORYSTATUSEX of Windows' sysinfoapi.h."""

    _fields_ = (
        ("dwLength", ctypes.c_uint32),
        ("dwMemoryLoad", ctypes.c_uint32),
        ("ullTotalPhys", ctypes.c_uint64),
        ("ullAvailPhys", ctypes.c_uint64),
        ("others", ctypes.c_uint64 * 5),
    )


def _available_windows() -> int:
    return int(_memory_status().ullAvailPhys) or sys.maxsize


def _memory_status() -> MemoryStatus:
    """Zeros if Windows does not answer."""
    status = MemoryStatus(dwLength=ctypes.sizeof(MemoryStatus))
    windll = getattr(ctypes, "windll")  # noqa: B009  (only Windows has it, so types are checked without it)
    return status if windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(status)) else MemoryStatus()


def all_memory() -> int:
    """Bytes of memory in all; sys.maxsize: unknown."""
    if sys.platform == "win32":
        return int(_memory_status().ullTotalPhys) or sys.maxsize
    try:
        return os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE
    except (AttributeError, ValueError, OSError):
        return sys.maxsize


def private_memory() -> int:
    """Bytes of this process without a file behind them; 0: unknown."""
    if sys.platform == "darwin":
        usage = Usage()
        return (
            int(usage.phys_footprint)
            if ctypes.CDLL(None).proc_pid_rusage(os.getpid(), 0, ctypes.byref(usage)) == 0
            else 0
        )
    try:
        status = Path("/proc/self/status").read_text("utf-8")
    except OSError:
        return 0
    match = re.search(r"RssAnon:\s+(\d+) kB", status)
    return int(match[1]) * 1024 if match else 0


def give_back_freed_memory() -> None:
    """Have glibc return blocks of 8 MiB and more at once: else gaps between tensors of all sizes grow for hours."""
    if sys.platform == "linux" and hasattr(library := ctypes.CDLL(None), "mallopt"):
        library.mallopt(M_MMAP_THRESHOLD, 8 << 20)


def give_back_now() -> None:
    """Collect garbage, and have glibc return what is free: it keeps memory for each thread, also those that ended."""
    gc.collect()
    if sys.platform == "linux" and hasattr(library := ctypes.CDLL(None), "malloc_trim"):
        library.malloc_trim(0)


class Usage(ctypes.Structure):
    """struct rusage_info_v0 of macOS's sys/resource.h."""

    _fields_ = (
        ("uuid", ctypes.c_uint8 * 16),
        ("others", ctypes.c_uint64 * 7),  # times, wakeups, page-ins, wired and resident size
        ("phys_footprint", ctypes.c_uint64),
        ("start", ctypes.c_uint64),
        ("exit", ctypes.c_uint64),
    )
