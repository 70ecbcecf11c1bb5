"""llama.cpp's abort callback, which ends a pass between two operations."""

import ctypes
import sys
from typing import Any

from ...common.interrupts import Stop
from .files import llama_cpp

ABORTED = 2  # status of llama_decode


def install(stop: Stop, context: Any) -> None:
    """Have `stop` end llama.cpp's passes; no pass may be under way.

    The callback is C's strlen, because one in Python would take a tenth of a short pass. It takes no time on a CPU, but
    Metal waits for each part of a pass.
    """
    library = ctypes.CDLL("msvcrt" if sys.platform == "win32" else None)
    callback = ctypes.cast(library.strlen, llama_cpp.ggml_abort_callback)
    llama_cpp.llama_set_abort_callback(context, callback, ctypes.addressof(stop.flag))
