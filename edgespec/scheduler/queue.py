"""Admission: the sequence that came first gets the next free slot."""

from threading import Condition

from edgespec.errors import Closed
from edgespec.scheduler.sequence import Seq, State


class Queue:
    """Sequences that wait for a slot, safe for any thread; idle work comes after all others."""

    def __init__(self) -> None:
        self.changed = Condition()
        self.closed = self._news = False
        self._seqs = list[Seq]()

    def put(self, seq: Seq) -> None:
        """
        Raises:
            Closed: no request is taken any more.
        """
        with self.changed:
            if self.closed:
                raise Closed
            self._seqs.append(seq)
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

    def put_back(self, seq: Seq) -> None:
        """Have a sequence that had a slot wait again, before the others; it restarts."""
        with self.changed:
            if seq not in self._seqs:
                self._seqs.insert(0, seq)
            seq.wait_again()

    def remove(self, seq: Seq) -> None:
        with self.changed:
            if seq in self._seqs:
                self._seqs.remove(seq)

    def in_order(self) -> list[Seq]:
        with self.changed:
            waiting = [seq for seq in self._seqs if seq.state is State.WAITING] if self._seqs else []
        return sorted(waiting, key=lambda seq: seq.is_idle_work)

    def cancelled_or_ended(self) -> list[Seq]:
        with self.changed:
            return [one for one in self._seqs if one.cancelled or one.state is State.DONE] if self._seqs else []

    def close(self) -> None:
        with self.changed:
            self.closed = True
            self.changed.notify()

    @property
    def waiting(self) -> int:
        waits = self._seqs.copy()  # without the lock
        return sum(not (one.is_idle_work or one.cancelled) for one in waits) if waits else 0

    def __len__(self) -> int:
        return len(self._seqs)
