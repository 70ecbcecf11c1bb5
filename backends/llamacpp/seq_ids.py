"""Sequence ids: each session has some of its own, all others are lent for the leaves of trees.

llama.cpp has 256. A session has one of its own, or two if some layers have a sliding window (`cells.py`). If layers are
recurrent it owns all that it uses (`recurrent.py`). Lent ids carry the committed tokens of their session. They stay
with it until another wants more than are free: to tag cells again in every pass would cost time.
"""

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, Protocol

from .ggml.files import llama_cpp


class Borrower(Protocol):
    seq_ids: list[int]  # that carry its committed text: its own, and those that are lent to it
    cached: int  # committed tokens that have a cell


class SeqIds:
    def __init__(self, sessions: int, count: int, share: int = 1) -> None:
        """
        Args:
            sessions: how many may be open.
            count: of all ids.
            share: ids that each session owns.
        """
        self._share = share
        self._own = [list(range(i * share, (i + 1) * share)) for i in range(sessions)]
        self._free = list(range(sessions * share, count))

    @property
    def all_open(self) -> bool:
        return not self._own

    def open(self) -> list[int]:
        """A session's own ids, in rising order."""
        return self._own.pop(0)

    def close(self, ids: Sequence[int]) -> None:
        """Take back the ids of a closed session. No cell may carry them."""
        self._own.append(list(ids[: self._share]))
        self.give_back(ids[self._share :])

    def give_back(self, ids: Sequence[int]) -> None:
        """Take back lent ids. No cell may carry them."""
        self._free += ids

    def offer(self, session: Borrower, sessions: Sequence[Borrower], taken: set[int]) -> Iterator[int]:
        """Ids that a session may use for leaves, those that it has first; `taken` ones are left out."""
        others = (other.seq_ids[self._share :] for other in sessions if other is not session)
        return (seq for seq in chain(session.seq_ids, self._free, *others) if seq not in taken)

    def lend(self, seq: int, session: Borrower, sessions: Sequence[Borrower], memory: Any) -> None:
        """Give a session an id that was offered to it, and tag its committed tokens' cells with it."""
        if seq in self._free:
            self._free.remove(seq)
        else:
            next(other for other in sessions if seq in other.seq_ids).seq_ids.remove(seq)
            llama_cpp.llama_memory_seq_rm(memory, seq, -1, -1)
        llama_cpp.llama_memory_seq_cp(memory, session.seq_ids[0], seq, 0, session.cached)
        session.seq_ids.append(seq)
