"""A callback for every operation of a pass."""

from collections.abc import Callable
from typing import Any

from ...common.signals import Signals
from .files import ggml_base, llama_cpp
from .ggml_tensor import GgmlTensor, is_here, skip_rows


class OperationCallback:
    """Calls a function before each operation, to ask if it is to be reported, and again after a reported one."""

    def __init__(self, called: Callable[[int, bool], bool]) -> None:
        """
        Args:
            called: gets a tensor's address, and True for the question; returns True to get a report, or to continue.
        """
        self.callback = llama_cpp.ggml_backend_sched_eval_callback(self._computing)
        self._told = called
        self._seen: list[int] | None = None
        self._whole = False
        self._left_out = 0, 0  # tensor of chosen experts, its rows
        self.signals = Signals()

    def operations(self, context: Any, whole: bool = False) -> list[int]:
        """
        Args:
            context: llama.cpp's; its cache is cleared.
            whole: compute all operations, as a GPU needs: its operations come in separate graphs, one after the other.
                Experts in mapped files are left out, for they would be read. False: stop in the first graph.

        Returns:
            Addresses of all operations of a pass over one token.
        """
        self._seen = found = list[int]()
        self._whole = whole
        stop, token = llama_cpp.ggml_abort_callback(lambda data: True), (llama_cpp.llama_token * 1)(0)
        try:
            if not whole:
                llama_cpp.llama_set_abort_callback(context, stop, None)
            with self.signals.held():
                llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(token, 1))
        finally:
            llama_cpp.llama_set_abort_callback(context, llama_cpp.ggml_abort_callback(), None)
            llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), False)
            self._seen = None
        return found

    def _computing(self, tensor: int, ask: bool, user_data: int) -> bool:
        if self._seen is None:
            return self._told(tensor, ask)
        if ask:
            self._seen.append(tensor)
            return self._whole and self._leave_out_experts(tensor)
        numbers, rows = self._left_out
        GgmlTensor.from_address(numbers).ne[1] = rows
        return True

    def _leave_out_experts(self, tensor: int) -> bool:
        """True if `tensor` is a product of which no row is computed next; its numbers must get their rows back then."""
        if ggml_base().ggml_op_desc(tensor) != b"MUL_MAT_ID" or not is_here(tensor):
            return False
        numbers = GgmlTensor.from_address(tensor).src[2]
        self._left_out = numbers, GgmlTensor.from_address(numbers).ne[1]
        skip_rows(tensor, numbers, 0)
        return True
