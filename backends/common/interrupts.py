"""Interrupted passes, for engines that drop a pass's nodes by rewinding."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from edgespec.errors import Interrupted
from edgespec.loop.backend import Session

from .signals import Signals


class Flag:
    """It is set when the pass under way shall end. It has no lock, so a signal's handler may set it."""

    def __init__(self) -> None:
        self._is_set = False

    def set(self) -> None:
        self._is_set = True

    def clear(self) -> None:
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set


@contextmanager
def interruptible(sessions: Sequence[Session], interrupted: Flag) -> Iterator[None]:
    """Wrap a pass: Interrupted drops the nodes of `sessions`, and `interrupted` is cleared at the end.

    Ctrl-C sets `interrupted`, and is raised at the end: within the pass it could come between calls that belong
    together.
    """
    with Signals(interrupted.set).held():
        try:
            yield
        except Interrupted:
            for session in sessions:
                session.rewind(len(session.token_ids))
            raise
        finally:
            interrupted.clear()
