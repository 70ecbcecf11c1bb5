"""Interrupted passes: `Stop` for any engine, `interruptible` for those that drop a pass's nodes by rewinding."""

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from threading import RLock
from typing import Any, TypeVar, cast

from edgespec.errors import Interrupted
from edgespec.loop.backend import Session

from .signals import Signals

Pass = TypeVar("Pass", bound=Callable[..., Any])


class Stop:
    """Ends the pass that is meant, and no later one; from any thread, and from a signal's handler.

    Attributes:
        number: of the pass under way, or of the next one.
        flag: C's string; not empty: the pass shall end.
    """

    def __init__(self, flag: Any = None) -> None:
        """
        Args:
            flag: an array of two C characters; default: a new one.
        """
        self.number = 0
        self.flag = flag or ctypes.create_string_buffer(2)
        self._lock = RLock()  # a thread that holds it may collect garbage, and so end a lost stream

    def ask(self, number: int | None = None) -> None:
        """
        Args:
            number: of a pass, which may have ended; default: the pass under way, or the next one.
        """
        with self._lock:
            if number in (None, self.number):
                self.flag.value = b"x"

    def is_set(self) -> bool:
        return bool(self.flag.value)

    def check(self) -> None:
        """
        Raises:
            Interrupted: the pass under way shall end.
        """
        if self.flag.value:
            raise Interrupted("the pass was interrupted")

    def next(self) -> None:
        """The pass has ended."""
        with self._lock:
            self.number += 1
            self.flag.value = b""


class Interruptible:
    """The part of a backend that `Stop` makes."""

    stop: Stop

    @property
    def pass_number(self) -> int:
        return self.stop.number

    def interrupt(self, pass_number: int) -> None:
        self.stop.ask(pass_number)


def one_pass(forward: Pass) -> Pass:
    """Make `Backend.forward` count as a pass, however it ends; its backend has `stop`."""

    @wraps(forward)
    def counted(backend: Any, batch: Any) -> Any:
        try:
            return forward(backend, batch)
        finally:
            backend.stop.next()

    return cast(Pass, counted)


@contextmanager
def interruptible(sessions: Sequence[Session], stop: Stop) -> Iterator[None]:
    """Wrap a pass: Interrupted drops the nodes of `sessions`.

    Ctrl-C ends the pass, and is raised at the end: within the pass it could come between calls that belong together.
    """
    with Signals(stop.ask).held():
        try:
            yield
        except Interrupted:
            for session in sessions:
                session.rewind(len(session.token_ids))
            raise
