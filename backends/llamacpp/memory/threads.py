"""Number of threads of a pass while other programs keep this machine's processors busy.

llama.cpp's threads wait for each other several hundred times in a pass. When another program takes the processor of one
of them, all wait until it is back. On 2 processors with one other busy program, a pass with two threads takes 4 to 25
times as long. With one thread, which is not disturbed, it takes at most twice as long.

The number of threads must not change a bit of the result. It does so in one place only: flash attention splits the
cache into as many parts as there are threads, for passes of one node over at least 512 cells (`use_split_kv_path` in
ggml-cpu/ops.cpp; llama.cpp rounds the cells up to a multiple of 256). Such passes keep their threads. But these sleep
soon when they wait, so that the system can move one to a free processor.
"""

import ctypes
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Set
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ..ggml.files import ggml_library

WINDOW = 0.25  # seconds between two looks at the processors: /proc/stat counts in hundredths
LOOKS = 3  # a few milliseconds apart, at what runs in this moment
CROWDED, CALM = 0.5, 0.25  # processors others keep busy: from here on threads make room; below here they come back
SPLIT_CELLS = 256  # with more cells than these, attention for one node depends on the number of threads


@dataclass(frozen=True, slots=True)
class Usage:
    """Seconds of processor time since some start."""

    at: float  # the clock
    everybody: float  # on the processors this process may use
    own: float  # of this process


def busy_ticks(stat: str, processors: Set[int], nice: bool) -> int:
    """Clock ticks that programs and the system have used.

    Args:
        stat: the text of /proc/stat.
        processors: those to count.
        nice: count programs of low priority, too: they hardly disturb one that is not.
    """
    rows = (line.split() for line in stat.splitlines() if line.startswith("cpu"))
    total = 0
    for name, *fields in rows:
        if name[3:].isdigit() and int(name[3:]) in processors:
            user, low, system, _idle, _iowait, irq, softirq = map(int, fields[:7])
            total += user + system + irq + softirq + (low if nice else 0)
    return total


def usage_now() -> Usage | None:
    """Processor time used until now; None if the system does not report it."""
    if sys.platform != "linux":
        return None
    try:
        stat = Path("/proc/stat").read_text()
    except OSError:
        return None
    nice = os.getpriority(os.PRIO_PROCESS, 0) > 0
    ticks = busy_ticks(stat, os.sched_getaffinity(0), nice)
    return Usage(time.monotonic(), ticks / os.sysconf("SC_CLK_TCK"), time.process_time())


def busy_processors(before: Usage, after: Usage, was_crowded: bool) -> float:
    """Processors that other programs keep busy, 0.0 where that is too few to make room for."""
    used = (after.everybody - before.everybody) - (after.own - before.own)
    others = used / (after.at - before.at)
    return others if others >= (CALM if was_crowded else CROWDED) else 0.0


def others_run() -> bool:
    """True if a thread of another program runs, or could run, now and a moment later."""
    try:
        for look in range(LOOKS):
            time.sleep(0.002 if look else 0)
            running = re.search(rb"^procs_running (\d+)", Path("/proc/stat").read_bytes(), re.MULTILINE)
            if running and int(running[1]) <= sum(_runs(path) for path in Path("/proc/self/task").iterdir()):
                return False
    except OSError:  # nobody knows
        pass
    return True


def _runs(task: Path) -> bool:
    try:
        return (task / "stat").read_bytes().rpartition(b")")[2].split()[0] == b"R"
    except OSError:  # it has ended
        return False


def threads_for(threads: int, others: float, nodes: int, cells: int) -> int:
    """Threads for a pass.

    Args:
        threads: what it gets on a machine that does nothing else.
        others: processors that other programs keep busy.
        nodes: tokens in the pass.
        cells: most cells of the cache that are in use.
    """
    if others == 0 or (nodes == 1 and cells > SPLIT_CELLS):
        return threads
    return max((threads + 1) // 2, threads - max(1, round(others)))


class OtherLoad:
    """Other programs on this machine, looked at now and then.

    Args:
        usage: reads the processors.
        changed: called with True when other programs begin to keep processors busy, with False when they end.
        others_run: whether they do in this moment: since a look long ago, much may have begun and ended.
    """

    def __init__(
        self, usage: Callable[[], Usage | None], changed: Callable[[bool], None], others_run: Callable[[], bool]
    ) -> None:
        self._usage, self._changed, self._others_run = usage, changed, others_run
        self._last = usage()
        self._others = 0.0
        self._pass_ended = 0.0  # the clock

    def pass_ended(self, now: float) -> None:
        """One of this process's own passes was made; `now` as below."""
        self._pass_ended = now

    def others(self, now: float) -> float:
        """Processors that other programs keep busy; `now` is the monotonic clock's time."""
        if self._last is None or now - self._last.at < WINDOW:
            return self._others
        usage = self._usage()
        if usage is None:
            return self._others
        was = self._others > 0
        others, old = busy_processors(self._last, usage, was), now - max(self._last.at, self._pass_ended) > 2 * WINDOW
        self._others, self._last = 0.0 if others and old and not self._others_run() else others, usage
        if was != (self._others > 0):
            self._changed(not was)
        return self._others


class ShortWaits:
    """Threads that wait for each other go to sleep soon instead of keeping a processor busy for some milliseconds.

    GNU's OpenMP does so by itself when it manages more threads than there are processors, so another thread here has it
    start as many as that takes; they sleep. Their end brings the long waits back. Without GNU's OpenMP nothing happens.
    """

    def __init__(self) -> None:
        self._done: threading.Event | None = None

    def switch(self, on: bool) -> None:
        """Wait shortly, or as the program was told to at its start."""
        if self._done:
            self._done.set()
            self._done = None
        start_team = getattr(ggml_library("ggml-cpu"), "GOMP_parallel", None)
        if on and start_team:
            self._done = threading.Event()
            threading.Thread(target=_hold_team, args=(start_team, self._done), daemon=True).start()


def _hold_team(start_team: Any, done: threading.Event) -> None:
    nothing = ctypes.CDLL(None).free  # a C function that may be called with NULL
    start_team(nothing, None, 2, 0)
    done.wait()


@cache
def crowd() -> OtherLoad:
    """This machine's other programs: one for all models of the process."""
    return OtherLoad(usage_now, ShortWaits().switch, others_run)


def compute_cores() -> int:
    """Cores worth a compute thread: those this process may use; on a Mac the performance cores."""
    if sys.platform == "darwin":
        size, count = ctypes.c_size_t(4), ctypes.c_int32(0)
        libc = ctypes.CDLL(None)
        if libc.sysctlbyname(b"hw.perflevel0.physicalcpu", ctypes.byref(count), ctypes.byref(size), None, 0) == 0:
            return count.value
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
