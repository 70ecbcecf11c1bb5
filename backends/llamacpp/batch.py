"""The rows of a pass as a llama_batch."""

import ctypes
from itertools import accumulate, chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .cells import Rows
from .ggml.files import llama_cpp


class Batch:
    """Rows of the next pass; its arrays must outlive the pass, because the struct points into them."""

    def __init__(self, rows: int, width: int = 0) -> None:
        """
        Args:
            rows: most of a pass.
            width: of the state that each row starts from; 0: rows have tokens only.
        """
        self.states = np.zeros((rows if width else 0, width), np.float32)
        self._tokens = np.zeros(rows, np.int32)
        self._positions = np.zeros(rows, np.int32)
        self._id_counts = np.zeros(rows, np.int32)
        self._id_pointers = np.zeros(rows, np.uintp)
        self._wanted = np.zeros(rows, np.int8)
        self.struct = llama_cpp.llama_batch()
        fields: list[tuple[str, NDArray[Any], Any]] = [
            ("token", self._tokens, llama_cpp.llama_token),
            *([("embd", self.states, ctypes.c_float)] if width else []),
            ("pos", self._positions, llama_cpp.llama_pos),
            ("n_seq_id", self._id_counts, ctypes.c_int32),
            ("seq_id", self._id_pointers, ctypes.POINTER(llama_cpp.llama_seq_id)),
            ("logits", self._wanted, ctypes.c_int8),
        ]
        for name, array, kind in fields:
            setattr(self.struct, name, ctypes.cast(array.ctypes.data, ctypes.POINTER(kind)))

    def fill(self, rows: Rows) -> int:
        total = len(rows.tokens)
        self._tokens[:total] = rows.tokens
        self._positions[:total] = rows.positions
        self._wanted[:total] = 0
        self._wanted[rows.wanted] = 1
        counts = [len(node_ids) for node_ids in rows.ids]
        self._flat = np.array([*chain.from_iterable(rows.ids)], np.int32)
        address = self._flat.__array_interface__["data"][0]
        self._id_counts[:total] = counts
        self._id_pointers[:total] = [address + 4 * start for start in accumulate(counts[:-1], initial=0)]
        self.struct.n_tokens = total
        return total
