"""Ending a pass from another thread, at the next node of its graph."""

import ctypes
import sys
from typing import Any

from .files import llama_cpp

STOPPED = 2  # what llama_decode returns then


class Switch:
    """llama.cpp asks it before every node, on a processor; GPUs go on to the end of what they were given.

    Some 700 questions a pass are no work for Python. C's strlen answers them: the length of a text that is empty, or
    has one character, is false or true.
    """

    def __init__(self, context: Any) -> None:
        self._text = ctypes.create_string_buffer(2)
        library = ctypes.cdll.msvcrt if sys.platform == "win32" else ctypes.CDLL(None)
        length_of = ctypes.cast(library.strlen, llama_cpp.ggml_abort_callback)
        llama_cpp.llama_set_abort_callback(context, length_of, ctypes.cast(self._text, ctypes.c_void_p))

    def stop(self) -> None:
        """The pass under way, and those that come, end."""
        self._text[0] = b"x"

    def resume(self) -> None:
        """Passes go on again."""
        self._text[0] = b"\0"
