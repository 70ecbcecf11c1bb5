"""What llama.cpp calls at every node of a pass; the nodes of a pass, found by it; and Ctrl-C meanwhile."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from .files import llama_cpp


class NodeCallback:
    """Has a function told of each node: first asked whether it shall be reported, then, if so, told it is computed."""

    def __init__(self, called: Callable[[int, bool], bool]) -> None:
        """
        Args:
            called: with a tensor's address, and whether this is the question. Its answer to a report: go on.
        """
        self.callback = llama_cpp.ggml_backend_sched_eval_callback(self._called)  # llama.cpp keeps only its address
        self._told = called
        self._seen: list[int] | None = None  # only the nodes are wanted, not the pass
        self._signals: dict[int, Any] = {}  # that came while llama.cpp computed, and the frames they came to
        self._handlers: dict[int, Any] = {}

    @contextmanager
    def signals_held(self) -> Iterator[None]:
        """Within, Ctrl-C is noted, and obeyed by `obey` or at the end.

        Python handles a signal where its code goes on, here on entry to the callback; raised there, an exception is
        lost, and llama.cpp takes the pass for finished.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        found = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        self._handlers = {number: handler for number, handler in found.items() if callable(handler)}
        try:
            for number in self._handlers:
                signal.signal(number, self._signals.__setitem__)
            yield
        finally:
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
            self.obey()

    def obey(self) -> None:
        """Do what signals ask for that were held; raises KeyboardInterrupt after Ctrl-C."""
        held = dict(self._signals)
        self._signals.clear()
        for number in sorted(held, reverse=True):  # SIGTERM before SIGINT, whose handler raises
            self._handlers[number](number, held[number])

    def nodes(self, context: Any, whole: bool = False) -> list[int]:
        """Addresses of all nodes of a pass over one token, of which nothing but the first is computed.

        With `whole` all is: a GPU's nodes come in graphs of their own, and the next is not begun before.
        """
        self._seen = found = list[int]()
        stop, token = llama_cpp.ggml_abort_callback(lambda data: True), (llama_cpp.llama_token * 1)(0)
        try:
            if not whole:
                llama_cpp.llama_set_abort_callback(context, stop, None)
            with self.signals_held():
                llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(token, 1))
        finally:
            llama_cpp.llama_set_abort_callback(context, llama_cpp.ggml_abort_callback(), None)
            llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), False)
            self._seen = None
        return found

    def _called(self, tensor: int, ask: bool, user_data: int) -> bool:
        if self._seen is None:
            return self._told(tensor, ask)
        if ask:
            self._seen.append(tensor)
        return False
