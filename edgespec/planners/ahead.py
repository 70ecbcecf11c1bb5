"""A thread in which a draft goes on while the target works."""

import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from threading import Event, Lock

from edgespec.errors import Interrupted

QUICK = 0.0005  # seconds after which Python's threads take turns: the target's callbacks must not wait for the draft's


class Worker:
    """One task at a time. Who gives it waits for its end before touching what it works on."""

    def __init__(self, interrupt: Callable[[], None], *, nice: bool = True) -> None:
        """
        Args:
            interrupt: ends a pass early, or the next if none is under way: `Backend.interrupt` of the draft.
            nice: on Linux the thread, and those that it starts, give way to others.
        """
        self.stopped = Event()  # the task is to end after what it is just doing
        self.lock = Lock()  # held while the task changes what others look at
        self.late = False  # a pass was ended that had ended by itself: perhaps the next will be, then
        self._interrupt, self._nice = interrupt, nice
        self._passing = False
        self._executor: ThreadPoolExecutor | None = None
        self._task: Future[None] | None = None

    @property
    def busy(self) -> bool:
        """Whether a task was given that nobody has waited for."""
        return self._task is not None

    @contextmanager
    def doing(self, task: Callable[[], None]) -> Iterator[None]:
        """Within it the task goes on; at the end it is told to stop, and not waited for."""
        if self._executor is None:
            give_way = _give_way if self._nice else None
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="edgespec ahead", initializer=give_way)
        self.stopped.clear()
        interval = sys.getswitchinterval()
        sys.setswitchinterval(QUICK)
        try:
            self._task = self._executor.submit(task)
            yield
        finally:
            self.stopped.set()
            sys.setswitchinterval(interval)

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Within it the draft makes a pass."""
        with self.lock:
            self._passing = True
        try:
            yield
        finally:
            with self.lock:
                self._passing = False

    def join(self, *, lost: bool = False) -> bool:
        """Wait until the task is done; raises what it raised.

        Args:
            lost: nobody wants what it finds: a pass under way ends early.

        Returns:
            Whether a pass ended early, and with it all that the draft's session held besides its text.
        """
        self.late = False
        if self._task is None:
            return False
        self.stopped.set()
        with self.lock:
            self.late = lost and self._passing
            if self.late:
                self._interrupt()
        try:
            self._task.result()
        except Interrupted:
            self.late = False
            return True
        finally:
            if self._task.done():  # not where Ctrl-C came first
                self._task = None
        return False

    def close(self) -> None:
        """Wait for the task, and end the thread."""
        try:
            self.join(lost=True)
        finally:
            if self._executor:
                self._executor.shutdown()
                self._executor = None


def _give_way() -> None:
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
