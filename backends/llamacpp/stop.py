"""Ending a pass early: llama.cpp asks before each node whether it shall go on."""

import ctypes
import sys
from typing import Any

from .files import llama_cpp

ABORTED = 2  # what llama_decode returns then


class Stop:
    """A flag that any thread may set."""

    def __init__(self, context: Any, asked: bool) -> None:
        """
        Args:
            context: llama.cpp's.
            asked: have llama.cpp ask, which is free on a processor, but makes Metal wait for each part of a pass.
        """
        # C's strlen tells whether the flag, a string, is empty: one in Python would cost a tenth of a short pass.
        self._flag = ctypes.create_string_buffer(2)
        if asked:
            library = ctypes.CDLL("msvcrt" if sys.platform == "win32" else None)
            callback = ctypes.cast(library.strlen, llama_cpp.ggml_abort_callback)
            llama_cpp.llama_set_abort_callback(context, callback, ctypes.addressof(self._flag))

    def set(self) -> None:
        """End the pass under way, or the next."""
        self._flag.value = b"x"

    @property
    def is_set(self) -> bool:
        """Whether it was set since the last `clear`."""
        return self._flag.value != b""

    def clear(self) -> None:
        """The pass is over."""
        self._flag.value = b""
