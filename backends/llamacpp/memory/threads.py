"""Number of threads of a pass while other programs keep this machine's processors busy.

llama.cpp's threads wait for each other several hundred times in a pass, so all wait if another program takes one's
processor. On 2 processors with one other busy program, a pass with two threads takes 4 to 25 times as long, with
one thread at most twice as long. A program of low priority in another session or control group takes as much: there
nice values count within the group alone.

Fewer threads change no bit of the result, except in passes of one node over many cells (`SPLIT_CELLS`) that threads
split (`LlamaBackend.splits_cells`). These keep their threads, but waiting threads sleep soon, so that the system can
move them to free processors.
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

WINDOW = 0.25  # minimum seconds between two samples of /proc/stat, whose unit is 10 ms
LOOKS = 3
CROWDED, CALM = 0.5, 0.25  # CPUs that others use: threads are reduced from CROWDED on, and restored below CALM
SLOW = 3.0  # times the usual seconds of a pass, from which on it gives up a thread
GROWTH = 1.02  # per pass, of its usual seconds: the cache grows
MOST_PATIENCE = 20.0  # most time from one trial to the next, in times of the slow pass's seconds
# Above it llama.cpp takes 512 cells or more, which threads split (use_split_kv_path, ggml-cpu/ops.cpp).
SPLIT_CELLS = 256


@dataclass(frozen=True, slots=True)
class Usage:
    """
    Attributes:
        at: monotonic clock.
        everybody: used on the CPUs that this process may use.
        own: used by this process.
    """

    at: float
    everybody: float
    own: float


def busy_ticks(stat: str, processors: Set[int]) -> int:
    """
    Args:
        stat: the contents of /proc/stat.
        processors: those to count.

    Returns:
        Clock ticks that programs of all priorities and the system have used.
    """
    rows = (line.split() for line in stat.splitlines() if line.startswith("cpu"))
    total = 0
    for name, *fields in rows:
        if name[3:].isdigit() and int(name[3:]) in processors:
            user, low, system, _idle, _iowait, irq, softirq = map(int, fields[:7])
            total += user + low + system + irq + softirq
    return total


def usage_now() -> Usage | None:
    """Processor time used until now; None if the system does not report it."""
    if sys.platform != "linux":
        return None
    try:
        stat = Path("/proc/stat").read_text("utf-8")
    except OSError:
        return None
    ticks = busy_ticks(stat, os.sched_getaffinity(0))
    return Usage(time.monotonic(), ticks / os.sysconf("SC_CLK_TCK"), time.process_time())


def busy_processors(before: Usage, after: Usage, was_crowded: bool) -> float:
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
    except OSError:
        pass
    return True


def _runs(task: Path) -> bool:
    try:
        return (task / "stat").read_bytes().rpartition(b")")[2].split()[0] == b"R"
    except OSError:
        return False


def threads_for(threads: int, others: float, fewer: int, nodes: int, cells: int) -> int:
    """
    Args:
        threads: of a pass on an idle machine.
        others: CPUs that other programs use.
        fewer: threads that slow passes have given up.
        nodes: tokens in the pass.
        cells: in use, or a bound above them; 0: threads split none.

    Returns:
        Threads for the pass.
    """
    if nodes == 1 and cells > SPLIT_CELLS:
        return threads
    counted = max((threads + 1) // 2, threads - max(1, round(others))) if others else threads
    return max(1, min(counted, threads - fewer))


class OtherLoad:
    """Load of other programs, sampled at intervals.

    Args:
        usage: returns the current usage.
        changed: called with True when other programs begin to use CPUs, with False when they stop.
        others_run: True if they run now; it confirms a sample over a long interval.
    """

    def __init__(
        self, usage: Callable[[], Usage | None], changed: Callable[[bool], None], others_run: Callable[[], bool]
    ) -> None:
        self._usage, self._changed, self._others_run = usage, changed, others_run
        self._last = usage()
        self._others = 0.0
        self._pass_ended = 0.0
        self._looking = threading.Lock()  # passes of target and draft may begin at once

    def pass_ended(self, now: float) -> None:
        self._pass_ended = now

    def others(self, now: float) -> float:
        if self._looking.acquire(blocking=False):
            try:
                self._look(now)
            finally:
                self._looking.release()
        return self._others

    def _look(self, now: float) -> None:
        if self._last is None or now - self._last.at < WINDOW or (usage := self._usage()) is None:
            return
        was = self._others > 0
        others, old = busy_processors(self._last, usage, was), now - max(self._last.at, self._pass_ended) > 2 * WINDOW
        self._others, self._last = 0.0 if others and old and not self._others_run() else others, usage
        if was != (self._others > 0):
            self._changed(not was)


class SlowPasses:
    """Gives up a thread after each slow pass, and takes it back by trial."""

    def __init__(self) -> None:
        self._fewer = 0
        # Usual seconds, and of how many cells; by the bits of the numbers of nodes and cells.
        self._usual: dict[tuple[int, int], tuple[float, int]] = {}
        self._patience, self._trial_at = 1.0, 0.0

    def fewer(self, now: float) -> int:
        """Threads to leave out of a pass that begins now."""
        return self._fewer - (self._fewer > 0 and now >= self._trial_at)

    def took(self, nodes: int, cells: int, fewer: int, seconds: float, now: float, threads: int) -> None:
        """
        Args:
            nodes: tokens in the pass.
            cells: in use.
            fewer: threads that were left out.
            seconds: the pass took.
            now: its end.
            threads: of a pass on an idle machine.
        """
        of_nodes, of_cells = nodes.bit_length(), cells.bit_length()
        below = self._usual.get((of_nodes, of_cells - 1), (seconds, cells))
        before, cells_then = self._usual.get((of_nodes, of_cells), below)
        usual = before * max(1.0, cells / max(1, cells_then))  # attention may take most of a long prompt's passes
        least = seconds * (threads - fewer) / threads  # with all threads, the pass takes from `least` to `seconds`
        found = min(max(usual, min(usual * GROWTH, least)), seconds)
        self._usual[of_nodes, of_cells] = found, cells if found == seconds else max(cells, cells_then)
        if least > SLOW * usual:
            self._fewer = min(fewer + 1, threads - 1)
            self._trial_at = now + self._patience * seconds
            self._patience = min(2 * self._patience, MOST_PATIENCE)
        else:
            self._fewer = fewer
            self._patience = max(1.0, 0.9 * self._patience) if fewer == 0 else self._patience


class ShortWaits:
    """A switch for short waits: waiting threads sleep soon, instead of spinning for some milliseconds.

    GNU's OpenMP, which it needs, does so while it manages more threads than there are CPUs, so another thread starts a
    team of 2, which sleeps until the switch is off.
    """

    def __init__(self) -> None:
        self._done: threading.Event | None = None

    def switch(self, on: bool) -> None:
        if self._done:
            self._done.set()
            self._done = None
        start_team = getattr(ggml_library("ggml-cpu"), "GOMP_parallel", None)
        if on and start_team:
            self._done = threading.Event()
            threading.Thread(target=_hold_team, args=(start_team, self._done), daemon=True).start()


def _hold_team(start_team: Any, done: threading.Event) -> None:
    nothing = ctypes.CDLL(None).free
    start_team(nothing, None, 2, 0)
    done.wait()


def end_team() -> None:
    """End the threads that OpenMP keeps for the next pass of the calling thread, which makes others if there is one.

    GNU's OpenMP counts them: passes in another thread would have short waits.
    """
    if pause := getattr(ggml_library("ggml-cpu"), "omp_pause_resource_all", None):
        pause(1)  # omp_pause_soft


if hasattr(os, "register_at_fork"):  # else the first pass in the fork, of any model, would wait for these threads
    os.register_at_fork(before=end_team)


@cache
def other_load() -> OtherLoad:
    return OtherLoad(usage_now, ShortWaits().switch, others_run)
