"""llama.cpp's abort callback, which ends a pass between two operations."""

import ctypes
import sys
from typing import Any

from .files import llama_cpp

ABORTED = 2  # status of llama_decode


class Stop:
    """A flag that ends a pass; any thread can set it, and in shared memory another process, too."""

    def __init__(self, context: Any, with_callback: bool) -> None:
        """
        Args:
            context: llama.cpp's.
            with_callback: install it; it takes no time on a CPU, but Metal waits for each part of a pass.
        """
        self._context, self._with_callback = context, with_callback
        self.use_flag(ctypes.create_string_buffer(2))

    def use_flag(self, flag: Any) -> None:
        """
        Args:
            flag: an array of two C characters, the flag from now on; no pass may be under way.
        """
        # The callback is C's strlen, because one in Python would take a tenth of a short pass.
        self._flag = flag
        if self._with_callback:
            library = ctypes.CDLL("msvcrt" if sys.platform == "win32" else None)
            callback = ctypes.cast(library.strlen, llama_cpp.ggml_abort_callback)
            llama_cpp.llama_set_abort_callback(self._context, callback, ctypes.addressof(flag))

    def set(self) -> None:
        self._flag.value = b"x"

    def is_set(self) -> bool:
        return bool(self._flag.value)

    def clear(self) -> None:
        self._flag.value = b""
