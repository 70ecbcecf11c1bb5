"""Sequence ids: each session has some of its own, all others are lent for the leaves of trees.

llama.cpp has 256. A session has one of its own, two where some layers have a sliding window (`cells.py`), or all that
it uses where layers are recurrent (`recurrent.py`). Lent ids
carry the text of the session that has them, and stay with it until another wants more than are free: tagging a text's
cells anew in every pass would cost time.
"""

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, Protocol

from .ggml.files import llama_cpp


class Borrower(Protocol):
    """What of a session is needed here."""

    seq_ids: list[int]  # that carry its committed text: its own, and those that are lent to it
    cached: int  # committed tokens that have a cell


class SeqIds:
    """See the module."""

    def __init__(self, sessions: int, count: int, share: int = 1) -> None:
        """
        Args:
            sessions: how many may be open.
            count: of all ids.
            share: of them, that each session has of its own.
        """
        self._share = share
        self._own = [list(range(i * share, (i + 1) * share)) for i in range(sessions)]
        self._free = list(range(sessions * share, count))

    @property
    def all_open(self) -> bool:
        """Whether there are no ids for another session."""
        return not self._own

    def open(self) -> list[int]:
        """A session's own ids, in rising order."""
        return self._own.pop(0)

    def close(self, ids: Sequence[int]) -> None:
        """A session is closed; nothing carries its ids any more."""
        self._own.append(list(ids[: self._share]))
        self.give_back(ids[self._share :])

    def give_back(self, ids: Sequence[int]) -> None:
        """Nothing carries these lent ids any more."""
        self._free += ids

    def offer(self, session: Borrower, sessions: Sequence[Borrower], taken: set[int]) -> Iterator[int]:
        """Ids that a session may use for leaves, those that it has first, but for those that are taken."""
        others = (other.seq_ids[self._share :] for other in sessions if other is not session)
        return (seq for seq in chain(session.seq_ids, self._free, *others) if seq not in taken)

    def lend(self, seq: int, session: Borrower, sessions: Sequence[Borrower], memory: Any) -> None:
        """A session gets an id that was offered to it, which from now on carries its text."""
        if seq in self._free:
            self._free.remove(seq)
        else:
            next(other for other in sessions if seq in other.seq_ids).seq_ids.remove(seq)
            llama_cpp.llama_memory_seq_rm(memory, seq, -1, -1)
        llama_cpp.llama_memory_seq_cp(memory, session.seq_ids[0], seq, 0, session.cached)
        session.seq_ids.append(seq)
