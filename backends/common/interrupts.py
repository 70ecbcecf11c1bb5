"""Interrupted passes, for engines that drop a pass's nodes by rewinding."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Event

from edgespec.errors import Interrupted
from edgespec.loop.backend import Session


@contextmanager
def interruptible(sessions: Sequence[Session], interrupted: Event) -> Iterator[None]:
    """Wrap a pass: Interrupted drops the nodes of `sessions`, and `interrupted` is cleared at the end."""
    try:
        yield
    except Interrupted:
        for session in sessions:
            session.rewind(len(session.token_ids))
        raise
    finally:
        interrupted.clear()
