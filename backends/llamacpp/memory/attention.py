"""Attention over one row with the kernel for a few rows, so that both round alike.

With keys and values of one float type, llama.cpp's CPU backend has three attention kernels with different rounding: for
one row (threads split the cache), for a few rows, and for 64 rows or more (tiles). `ggml_backend_cpu_set_use_ref` gives
one row the kernel for a few rows; padding to two rows would take 1.5 times as long. The switch is off for more rows and
other types, where it selects slower kernels and other rotations.

GPUs add up attention by groups of cells, and choose kernels and groups by the numbers of cells and rows. So their
layers have row classes only where the processor computes attention. llama.cpp computes it where the next product is.
"""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from edgespec.loop.shapes import ALWAYS, TILE

from ..context import kv_types
from ..ggml.files import ggml
from ..ggml.registry import processor, replaced

ALIKE: dict[str, str | int | None] = {"attention": "alike"}  # in `computing`, if one row has the kernel for a few rows
TILED = "f16"  # keys and values
HERE: dict[str, str | int | None] = {"attention_on": "processor"}  # in `computing`, if GPUs compute all else
AFTER = rb"\.attn_output\."  # weights of the product after attention
INIT = 5  # index of `init_backend` among the function pointers of a device (ggml-backend-impl.h)

Init = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)


def has_kernels(kv_type: str) -> bool:
    """True if there are several attention kernels for such a cache; flash attention rounds f32 to f16 first."""
    return all(name in (TILED, "f32") for name in kv_types(kv_type))


def by_cell(kv_type: str, *, flash: bool, here: bool, alike: bool) -> tuple[tuple[int, int], ...]:
    """`Capabilities.by_cell`, by the kernels that the engine has for such a cache.

    Args:
        kv_type: of the cache.
        flash: flash attention; without it, attention is two products over all cells and a sum.
        here: the processor computes it in all layers. Other devices add up groups of cells in all passes.
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
    made = list[int]()

    def capture(usual: Any, device: int, params: int) -> Any:
        if backend := usual(device, params):
            made.append(backend)
        return backend

    with replaced(_device() or 0, INIT, Init, capture):
        yield made


def row_hook(backend: int) -> Callable[[int], None]:
    tell = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_bool)(_use_ref_switch(_device()) or 0)
    return lambda rows: tell(backend, rows == 1)


def _device() -> int | None:
    device = processor()
    return device if device and _use_ref_switch(device) else None


def _use_ref_switch(device: int | None) -> int | None:
    library = ggml()
    registry = library.ggml_backend_dev_backend_reg(device)
    found: int | None = library.ggml_backend_reg_get_proc_address(registry, b"ggml_backend_cpu_set_use_ref")
    return found
