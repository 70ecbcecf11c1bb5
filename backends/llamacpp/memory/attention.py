"""Attention over one row with the kernel for a few rows, so that both round alike.

With keys and values of one float type, llama.cpp's CPU backend has three attention kernels with different rounding: for
one row (threads split the cache), for a few rows, and for 64 rows or more (tiles). `ggml_backend_cpu_set_use_ref` gives
one row the kernel for a few rows; padding to two rows would take 1.5 times as long. The switch is off for more rows and
other types, where it selects slower kernels and other rotations.
"""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock, get_ident
from typing import Any

from edgespec.loop.shapes import ALWAYS, TILE

from ..context import kv_types
from ..ggml.files import PROCESSOR, ggml

ALIKE: dict[str, str | int | None] = {"attention": "alike"}  # in `computing`, if one row has the kernel for a few rows
TILED = "f16"  # keys and values
LAYOUT = 2  # GGML_BACKEND_API_VERSION, with which a registry begins
INIT = 5  # index of `init_backend` among the function pointers of a device (ggml-backend-impl.h)

Init = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
_lock = Lock()


def has_kernels(kv_type: str) -> bool:
    """True if there are several attention kernels for such a cache; flash attention rounds f32 to f16 first."""
    return all(name in (TILED, "f32") for name in kv_types(kv_type))


def by_cell(kv_type: str, *, flash: bool, here: bool, alike: bool) -> tuple[tuple[int, int], ...]:
    """`Capabilities.by_cell`, by the kernels that the engine has for such a cache.

    Args:
        kv_type: of the cache.
        flash: flash attention; without it, attention is two products over all cells and a sum.
        here: the processor computes all of it. Other devices add up groups of cells in all passes.
        alike: one row has the kernel for a few rows.
    """
    if not (flash and here):
        return ALWAYS
    if not has_kernels(kv_type):
        return ()
    return ((TILE, ALWAYS[0][1]),) if alike else ((1, 1), (TILE, ALWAYS[0][1]))


def can_be_alike(kv_type: str | None) -> bool:
    return has_kernels(kv_type or TILED) and _device() is not None


@contextmanager
def capture_cpu_backend() -> Iterator[list[int]]:
    """Collect CPU backends that this thread makes in the `with`; requires `can_be_alike`.

    llama.cpp does not expose a context's backend, so the device's `init_backend` is replaced for that time.
    """
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

        other = Init(capture)  # lives until the slot is restored
        slots[INIT] = ctypes.cast(other, ctypes.c_void_p).value
        try:
            yield made
        finally:
            slots[INIT] = usual


def row_hook(backend: int) -> Callable[[int], None]:
    tell = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_bool)(_use_ref_switch(_device()) or 0)
    return lambda rows: tell(backend, rows == 1)


def _device() -> int | None:
    library = ggml()
    for i in range(library.ggml_backend_dev_count()):
        device: int = library.ggml_backend_dev_get(i)
        if library.ggml_backend_dev_type(device) == PROCESSOR:
            registry = library.ggml_backend_dev_backend_reg(device)
            known = ctypes.cast(registry, ctypes.POINTER(ctypes.c_int)).contents.value == LAYOUT
            return device if known and _use_ref_switch(device) else None
    return None


def _use_ref_switch(device: int | None) -> int | None:
    library = ggml()
    registry = library.ggml_backend_dev_backend_reg(device)
    found: int | None = library.ggml_backend_reg_get_proc_address(registry, b"ggml_backend_cpu_set_use_ref")
    return found
