"""Sequence ids of llama.cpp's cache: each session owns some, and gets others for leaves of trees.

A session owns one id, two if some layers have a sliding window (`cells.py`), or all of its ids if layers are recurrent
(`recurrent.py`). Leaf ids carry the session's committed tokens, too. They stay with it until another session
needs them, because tagging cells again in every pass takes time.
"""

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, Protocol

from .ggml.files import llama_cpp


class IdHolder(Protocol):
    """
    Attributes:
        seq_ids: that carry the committed tokens: own ids, then leaf ids.
        cached: committed tokens that have a cell.
    """

    seq_ids: list[int]
    cached: int


class SeqIds:
    def __init__(self, sessions: int, count: int, share: int) -> None:
        """
        Args:
            sessions: maximum number of open sessions.
            count: number of ids.
            share: ids that each session owns.
        """
        self._share = share
        self._own = [list(range(i * share, (i + 1) * share)) for i in range(sessions)]
        self._free = list(range(sessions * share, count))

    @property
    def all_open(self) -> bool:
        return not self._own

    def open(self) -> list[int]:
        return self._own.pop(0)

    def close(self, ids: list[int]) -> None:
        self.take_back(ids)
        self._own.append(ids)

    def take_back(self, ids: list[int]) -> None:
        """Take a session's leaf ids out of its `ids`."""
        self._free += ids[self._share :]
        del ids[self._share :]

    def offer(self, session: IdHolder, sessions: Sequence[IdHolder], taken: set[int]) -> Iterator[int]:
        others = (other.seq_ids[self._share :] for other in sessions if other is not session)
        return (seq for seq in chain(session.seq_ids, self._free, *others) if seq not in taken)

    def give(self, seq: int, session: IdHolder, sessions: Sequence[IdHolder], memory: Any) -> None:
        if seq in self._free:
            self._free.remove(seq)
        else:
            next(other for other in sessions if seq in other.seq_ids).seq_ids.remove(seq)
            llama_cpp.llama_memory_seq_rm(memory, seq, -1, -1)
        llama_cpp.llama_memory_seq_cp(memory, session.seq_ids[0], seq, 0, session.cached)
        session.seq_ids.append(seq)
