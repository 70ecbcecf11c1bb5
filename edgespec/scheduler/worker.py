"""The thread that makes a scheduler's steps, unless a single caller makes them (`drive.py`)."""

import atexit
from collections.abc import Callable
from threading import Lock, Thread

from edgespec.scheduler.queue import Queue
from edgespec.scheduler.session_pool import SessionPool


class Worker:
    """A thread that makes steps while there is work, and else saves idle sessions to the disk cache."""

    def __init__(
        self, queue: Queue, pool: SessionPool, turn: Lock, step: Callable[[], None], fail: Callable[[Exception], None]
    ) -> None:
        """
        Args:
            queue: wakes the thread when it changes.
            pool: of the scheduler.
            turn: held during `step` and `fail`.
            step: makes one step.
            fail: called with what `step` raised.
        """
        self.thread: Thread | None = None
        self._queue, self._pool, self._turn, self._step, self._fail = queue, pool, turn, step, fail

    def start(self, at_exit: Callable[[], None]) -> None:
        """Start the thread, once.

        Raises:
            RuntimeError: the system refuses one.
        """
        with self._queue.changed:
            if self.thread is None and not self._queue.closed:
                thread = Thread(target=self._run, name="edgespec passes", daemon=True)
                thread.start()
                self.thread = thread
                atexit.register(at_exit)  # no thread may be in an engine at exit

    def join(self, at_exit: Callable[[], None]) -> None:
        if self.thread:
            self.thread.join()
            atexit.unregister(at_exit)

    def _run(self) -> None:
        while True:
            try:
                self._save_idle()
                with self._queue.changed:
                    self._queue.changed.wait_for(lambda: self._queue.closed or len(self._queue) or self._pool.with_work)
                    if self._queue.closed:
                        return
                with self._turn:
                    self._step()
            except Exception as error:
                with self._turn:
                    self._fail(error)

    def _save_idle(self) -> None:
        while not (self._queue.closed or self._queue.waiting or self._pool.active):
            with self._turn:
                if not self._pool.save_one():
                    return
