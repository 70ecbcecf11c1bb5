"""Ending a pass early: llama.cpp asks before each node whether it shall go on."""

import ctypes
import sys
from typing import Any

from .files import llama_cpp

ABORTED = 2  # what llama_decode returns then


class Stop:
    """A flag that any thread may set, and another process where it lies in memory of both."""

    def __init__(self, context: Any, asked: bool) -> None:
        """
        Args:
            context: llama.cpp's.
            asked: have llama.cpp ask, which is free on a processor, but makes Metal wait for each part of a pass.
        """
        self._context, self._asked = context, asked
        self.lie_in(ctypes.create_string_buffer(2))

    def lie_in(self, flag: Any) -> None:
        """Move the flag to these two bytes, an array of C's characters. No pass may be under way."""
        # C's strlen tests the flag, a string: a callback in Python would cost a tenth of a short pass.
        self._flag = flag
        if self._asked:
            library = ctypes.CDLL("msvcrt" if sys.platform == "win32" else None)
            callback = ctypes.cast(library.strlen, llama_cpp.ggml_abort_callback)
            llama_cpp.llama_set_abort_callback(self._context, callback, ctypes.addressof(flag))

    def set(self) -> None:
        self._flag.value = b"x"

    @property
    def is_set(self) -> bool:
        """True if it was set since the last `clear`."""
        return bool(self._flag.value)

    def clear(self) -> None:
        self._flag.value = b""
