"""Skip experts for rows of padding, which would nearly double the time of plain decoding with a mixture of experts.

This is for experts in memory; `mixture.py` does it for experts on disk.
"""

from itertools import pairwise
from typing import Any

from edgespec.models.gguf_header import own_values

from ...common.interrupts import Stop
from ..ggml.callback import OperationCallback
from ..ggml.files import ggml_base
from ..ggml.ggml_tensor import GgmlTensor, is_here, is_known, operation_at, skip_rows


def has_experts(path: str) -> bool:
    return bool(own_values(path).get("expert_count"))


VIEWS = {b"VIEW", b"RESHAPE", b"PERMUTE", b"TRANSPOSE"}  # operations that compute nothing


class SkipPadding(OperationCallback):
    """Takes the place of `LayerHooks` where memory holds all weights, so it has the attributes that a pass uses.

    Where the page cache holds experts, it works inside of a `LayerHooks` (`LayerHooks.skip_padding`).
    """

    streamer = mixture = error = None
    wait_seconds = 0.0

    def __init__(self) -> None:
        self.stop: Stop | None = None
        self.skip_padding: SkipPadding | None = self
        super().__init__(self._called)
        self._name_of = ggml_base().ggml_get_name
        self._users: set[bytes] = set()
        self._before: set[bytes] = set()
        self._rows = self._padding = 0
        self._reported = False
        self._cut: set[int] = set()

    def learn(self, context: Any) -> None:
        addresses = self.operations(context)
        if not addresses or not is_known(addresses[0]):
            return
        for before, address in pairwise(addresses):
            operation = operation_at(address)
            if operation.op == b"MUL_MAT_ID" and is_here(address) and is_here(operation.sources[2]):
                self._users.add(operation.name)
                self._before.add(operation_at(before).name)

    def begin(self, *, prompt: bool, rows: int, padding: int) -> None:
        self._rows, self._padding, self._reported = rows, 0 if prompt else padding, False

    def _called(self, tensor: int, ask: bool) -> bool:
        if not ask:
            return True
        if not self._padding:
            return False
        name = self._name_of(tensor)
        if name in self._users:
            numbers = GgmlTensor.from_address(tensor).src[2]
            if self._reported and (numbers in self._cut or GgmlTensor.from_address(numbers).ne[1] == self._rows):
                skip_rows(tensor, numbers, self._rows - self._padding)
                self._cut.add(numbers)
            elif numbers in self._cut:  # its result memory may be in use, so compute all rows
                GgmlTensor.from_address(numbers).ne[1] = self._rows
        self._reported = name in self._before
        return self._reported

    def finish(self) -> None:
        for numbers in self._cut:
            GgmlTensor.from_address(numbers).ne[1] = self._rows
        self._cut = set()

    def close(self) -> None:
        """Nothing to free."""


class OneByOne(SkipPadding):
    """Skips nothing, and has GPUs compute one operation at a time.

    Their kernels for several at once may round otherwise, and they are taken or not by where the operands lie.
    """

    def learn(self, context: Any) -> None:
        """All operations are alike."""

    def _called(self, tensor: int, ask: bool) -> bool:
        return not ask or ggml_base().ggml_op_desc(tensor) not in VIEWS
