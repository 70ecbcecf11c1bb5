"""Passes that end early, for engines whose sessions take a pass's nodes back by rewinding."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Event

from edgespec.errors import Interrupted
from edgespec.loop.backend import Session


@contextmanager
def interruptible(sessions: Sequence[Session], interrupted: Event) -> Iterator[None]:
    """Wrap a pass over these sessions. If it raises Interrupted, all nodes are dropped; the next pass is not ended."""
    try:
        yield
    except Interrupted:
        for session in sessions:
            session.rewind(len(session.token_ids))
        raise
    finally:
        interrupted.clear()
