"""Logits and states of a pass, in llama.cpp's buffers."""

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from edgespec.loop.sampling import Float32Array

from ..common.row_logits import HostLogits, RowStateLogits
from .ggml.files import llama_cpp
from .states import RowStates


class LlamaLogits(HostLogits):
    """It reads llama.cpp's output buffer, which the next pass overwrites."""

    def __init__(self, context: Any, size: int, width: int, batch_index: dict[int, int]) -> None:
        self._context = context
        self._size = size
        self._width = width
        self._batch_index = batch_index

    def view(self, node: int) -> Float32Array:
        pointer = llama_cpp.llama_get_logits_ith(self._context, self._batch_index[node])
        floats = ctypes.cast(pointer, ctypes.POINTER(ctypes.c_float * self._size)).contents
        return np.frombuffer(memoryview(floats), np.float32)

    def state(self, node: int) -> Float32Array:
        if self._width == 0:
            return super().state(node)
        pointer = llama_cpp.llama_get_embeddings_ith(self._context, self._batch_index[node])
        return np.ctypeslib.as_array(pointer, (self._width,)).copy()


class StateLogits(LlamaLogits):
    """See `edgespec.loop.backend.GivesStates`."""

    def __init__(self, context: Any, size: int, width: int, batch_index: dict[int, int], states: RowStates) -> None:
        super().__init__(context, size, width, batch_index)
        self._states = states

    def states(self, nodes: Sequence[int]) -> Float32Array:
        return self._states.rows([self._batch_index[node] for node in nodes])

    def of_kept(self, wanted: Sequence[int], kept: Mapping[int, tuple[Float32Array, Float32Array]]) -> RowStateLogits:
        """Logits and states that were kept of the nodes' rows."""
        found = RowStateLogits()
        for node in wanted:
            found.rows[node], found.given[node] = kept[self._batch_index[node]]
        return found
