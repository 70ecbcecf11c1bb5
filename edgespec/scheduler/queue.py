"""Admission: the request that came first gets the next free session."""

from threading import Condition

from edgespec.errors import Closed
from edgespec.scheduler.requests import Handle, Status


class Queue:
    """Requests that wait for a session, safe for any thread; idle work comes after all others."""

    def __init__(self) -> None:
        self.changed = Condition()
        self.closed = self._news = False
        self._handles = list[Handle]()

    def put(self, handle: Handle) -> None:
        """
        Raises:
            Closed: no request is taken any more.
        """
        with self.changed:
            if self.closed:
                raise Closed
            self._handles.append(handle)
            self.wake()

    def wake(self) -> None:
        """End a `wait`: something has changed."""
        with self.changed:
            self._news = True
            self.changed.notify()

    def wait(self) -> bool:
        """
        Returns:
            True when something has changed; False: closed.
        """
        with self.changed:
            self.changed.wait_for(lambda: self._news or self.closed)
            self._news = False
            return not self.closed

    def put_back(self, handle: Handle) -> None:
        """Have a request that had a session wait again, before the others; it restarts."""
        with self.changed:
            if handle not in self._handles:
                self._handles.insert(0, handle)
            handle.wait_again()

    def remove(self, handle: Handle) -> None:
        with self.changed:
            if handle in self._handles:
                self._handles.remove(handle)

    def in_order(self) -> list[Handle]:
        with self.changed:
            waiting = [handle for handle in self._handles if handle.status is Status.WAITING]
        return sorted(waiting, key=lambda handle: handle.is_idle_work)

    def cancelled_or_ended(self) -> list[Handle]:
        with self.changed:
            return [one for one in self._handles if one.cancelled or one.status is Status.DONE]

    def close(self) -> None:
        with self.changed:
            self.closed = True
            self.changed.notify()

    @property
    def waiting(self) -> int:
        return sum(not (one.is_idle_work or one.cancelled) for one in self._handles.copy())  # waits for no lock

    def __len__(self) -> int:
        return len(self._handles)
