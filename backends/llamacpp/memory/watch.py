"""Products of a pass before anything rounds them, for probe models.

Kernels for quantised and 16-bit weights round their input, so a row that differs by a bit before them mostly has the
same logits. Another text has the next bit, and then another token.
"""

from typing import Any

import numpy as np

from edgespec.loop.sampling import Float32Array

from ..ggml.files import ggml_base
from ..ggml.ggml_tensor import GgmlTensor, is_here
from ..logits import LlamaLogits
from .skip_padding import OneByOne

ROWS_AT = {b"MUL_MAT": 1, b"MUL_MAT_ID": 2, b"FLASH_ATTN_EXT": 2}  # operation -> the dimension that counts rows
ATTENTION, SOFTMAX = b"FLASH_ATTN_EXT", b"SOFT_MAX"  # with a mask: attention without flash attention
BITS = 24  # that a float32 holds exactly


class Watch(OneByOne):
    """Takes the place of `SkipPadding` in passes without padding.

    Attributes:
        adds_up_cells: attention of some layer is no flash attention of the processor.
    """

    def __init__(self) -> None:
        super().__init__()
        self.adds_up_cells = False
        self._kinds: dict[int, int] = {}
        self._on_gpus = False
        self._found = list[Float32Array]()

    def learn(self, context: Any) -> None:
        for address in self.operations(context, whole=True):
            tensor, name = GgmlTensor.from_address(address), ggml_base().ggml_op_desc(address)
            if name in ROWS_AT:
                self._kinds[tensor.op] = ROWS_AT[name]
                self._on_gpus |= not is_here(address)
            self.adds_up_cells |= name == SOFTMAX and bool(tensor.src[1])
            self.adds_up_cells |= name == ATTENTION and not is_here(address)

    def begin(self, *, prompt: bool, rows: int, padding: int) -> None:
        self._rows, self._found = 0 if prompt else rows, []

    def _called(self, tensor: int, ask: bool) -> bool:
        found = GgmlTensor.from_address(tensor)
        at = self._kinds.get(found.op)
        if not self._rows or at is None or found.ne[at] != self._rows:
            return super()._called(tensor, ask) if self._on_gpus else not ask
        if not ask:
            numbers = np.empty(list(found.ne)[::-1], np.uint32)
            ggml_base().ggml_backend_tensor_get(tensor, numbers.ctypes.data, 0, numbers.nbytes)
            self._found.append(hashed(np.moveaxis(numbers, 3 - at, 0).reshape(self._rows, -1)))
        return True

    def row(self, row: int) -> Float32Array:
        """A number for each product, which depends on all of its bits."""
        return np.concatenate([found[row] for found in self._found])


def hashed(rows: Any) -> Float32Array:
    """A number for each row of [rows, n] bit patterns, another one for nearly each other pattern; shape [rows, 1]."""
    odd = np.random.default_rng(0).integers(2**63, size=rows.shape[1], dtype=np.uint64) * 2 + 1
    sums = (rows * odd).sum(axis=1, keepdims=True, dtype=np.uint64)
    return np.asarray(sums >> (64 - BITS), np.float32)


class WatchedLogits(LlamaLogits):
    def __init__(self, context: Any, size: int, width: int, batch_index: dict[int, int], watch: Watch) -> None:
        super().__init__(context, size, width, batch_index)
        self._watch = watch

    def state(self, node: int) -> Float32Array:
        return np.concatenate([super().state(node), self._watch.row(self._batch_index[node])])
