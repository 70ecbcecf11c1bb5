"""Products of a pass before anything rounds them, for probe models.

Kernels for quantised and 16-bit weights round their input, so a row that differs by a bit before them mostly has the
same logits. Another text has the next bit, and then another token.

GPUs compute a product and what follows it in one kernel, unless somebody reads the product. There the inputs of
products and of attention are compared.
"""

from typing import Any

import numpy as np

from edgespec.loop.sampling import Float32Array

from ..ggml.files import ggml_base
from ..ggml.ggml_tensor import GgmlTensor, is_here, root_of
from ..logits import LlamaLogits
from .skip_padding import SkipPadding

ROWS_AT = {b"MUL_MAT": 1, b"MUL_MAT_ID": 2, b"FLASH_ATTN_EXT": 2}  # operation -> the dimension that counts rows
INPUTS = {b"MUL_MAT": 1, b"FLASH_ATTN_EXT": 0, b"SET_ROWS": 0}  # operation -> the operand that it rounds
ATTENTION, SOFTMAX = b"FLASH_ATTN_EXT", b"SOFT_MAX"  # with a mask: attention without flash attention
BITS = 24  # that a float32 holds exactly


class Watch(SkipPadding):
    """Takes the place of `SkipPadding` in passes without padding.

    Attributes:
        adds_up_cells: attention of some layer is no flash attention of the processor.
    """

    def __init__(self) -> None:
        super().__init__()
        self.adds_up_cells = False
        self._kinds: dict[int, int] = {}
        self._inputs: dict[bytes, int] = {}  # name -> operation, where GPUs compute
        self._found = list[Float32Array]()

    def learn(self, context: Any) -> None:
        on_gpus, names, last = False, set[bytes](), dict[bytes, int]()
        for address in self._watched.operations(context, whole=True):
            tensor, name = GgmlTensor.from_address(address), ggml_base().ggml_op_desc(address)
            if name in ROWS_AT:
                self._kinds[tensor.op] = ROWS_AT[name]
                on_gpus |= not is_here(address)
            if name in INPUTS:
                names.add(_plain(GgmlTensor.from_address(root_of(tensor.src[INPUTS[name]])).name))
            if not tensor.view_src:
                last[tensor.name] = tensor.op
            self.adds_up_cells |= name == SOFTMAX and bool(tensor.src[1])
            self.adds_up_cells |= name == ATTENTION and not is_here(address)
        # An operation without a name has its number, which is another one where fewer rows are wanted.
        names = {name for name in names if on_gpus and not name.startswith(b"node_")}
        self._inputs = {name: op for name, op in last.items() if name in names}

    def begin(self, *, prompt: bool, rows: int, padding: int) -> None:
        self._rows, self._found = 0 if prompt else rows, []

    def _called(self, tensor: int, ask: bool) -> bool:
        found = GgmlTensor.from_address(tensor)
        at = self._rows_at(found)
        if not self._rows or at is None or found.ne[at] != self._rows:
            return not ask
        if not ask:
            shape = list(found.ne)[::-1]
            numbers = np.empty(shape, np.uint32)
            ggml_base().ggml_backend_tensor_get(tensor, numbers.ctypes.data, 0, numbers.nbytes)
            self._found.append(hashed(np.moveaxis(numbers, 3 - at, 0).reshape(self._rows, -1)))
        return True

    def _rows_at(self, tensor: GgmlTensor) -> int | None:
        """The dimension that counts the rows of a tensor to compare."""
        if not self._inputs:
            return self._kinds.get(tensor.op)
        if tensor.type or self._inputs.get(tensor.name) != tensor.op:
            return None
        return 3 if self._rows == 1 else max((i for i in range(4) if tensor.ne[i] > 1), default=0)

    def row(self, row: int) -> Float32Array:
        """A number for each product, which depends on all of its bits."""
        return np.concatenate([found[row] for found in self._found])


def _plain(name: bytes) -> bytes:
    """Name of a tensor, of which this one may be a view, or a copy on another device ("CPU#name (view)#0")."""
    return (name.split(b"#")[1] if b"#" in name else name).split(b" (")[0]


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
