"""Attention over one row, computed as that over a few.

With keys and values of one float type llama.cpp's processor backend has three attention kernels, which round
differently. For one row the cache is split among threads. For 64 rows and more it is taken in tiles. Between these it
is neither. So a pass over one row would have to be padded to two, and take half as long again.
`ggml_backend_cpu_set_use_ref` has one row take the kernel in between. With it more rows take slower kernels for
weights, and caches of 8 bits rotate differently: so it is for one row, and for float types.

The function needs the backend of the context, which llama.cpp does not give out. So it is captured when it is made: at
that moment the device's `init_backend` is another function.
"""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock, get_ident
from typing import Any

from ..context import kv_types
from .gpu import ggml

ALIKE: dict[str, str | int | None] = {"attention": "alike"}  # in `computing`: that over one row is as that over a few
TILED_TYPES = ("f16", "f32")  # of keys and values, for which attention has several kernels
PROCESSOR = 0  # ggml_backend_dev_type in ggml-backend.h
LAYOUT = 2  # GGML_BACKEND_API_VERSION, with which a registry begins: the version of the structures used here
INIT = 5  # `init_backend` among the functions with which a device begins: ggml-backend-impl.h

Init = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
_lock = Lock()


def has_kernels(kv_type: str) -> bool:
    """True if attention has several kernels with keys and values of this type."""
    keys, values = kv_types(kv_type)
    return keys == values and keys in TILED_TYPES


def can_be_alike(kv_type: str | None) -> bool:
    """True if attention has a choice with keys and values of this type, and this llama.cpp lets us make it."""
    return has_kernels(kv_type or TILED_TYPES[0]) and _device() is not None


@contextmanager
def capture_cpu_backend() -> Iterator[list[int]]:
    """The processor backends that this thread makes within the `with`. Only where `can_be_alike`."""
    made, here = list[int](), get_ident()
    with _lock:
        slots = ctypes.cast(_device() or 0, ctypes.POINTER(ctypes.c_void_p))
        usual = slots[INIT]
        make = Init(usual or 0)

        def capture(device: int, params: int) -> Any:
            backend = make(device, params)
            if backend and get_ident() == here:
                made.append(backend)
            return backend

        other = Init(capture)  # must live as long as it may be called
        slots[INIT] = ctypes.cast(other, ctypes.c_void_p).value
        try:
            yield made
        finally:
            slots[INIT] = usual


def row_hook(backend: int) -> Callable[[int], None]:
    """A function to be called before each pass of a processor backend with the number of its rows."""
    tell = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_bool)(_teller(_device()) or 0)
    return lambda rows: tell(backend, rows == 1)


def _device() -> int | None:
    library = ggml()
    for i in range(library.ggml_backend_dev_count()):
        device: int = library.ggml_backend_dev_get(i)
        if library.ggml_backend_dev_type(device) == PROCESSOR:
            registry = library.ggml_backend_dev_backend_reg(device)
            known = ctypes.cast(registry, ctypes.POINTER(ctypes.c_int)).contents.value == LAYOUT
            return device if known and _teller(device) else None
    return None


def _teller(device: int | None) -> int | None:
    library = ggml()
    registry = library.ggml_backend_dev_backend_reg(device)
    found: int | None = library.ggml_backend_reg_get_proc_address(registry, b"ggml_backend_cpu_set_use_ref")
    return found
