"""Functions of llama.cpp's processor that are replaced for a while, in its tables (ggml-backend-impl.h)."""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock, get_ident
from typing import Any

from edgespec.machine.system import libc
from edgespec.weights.linux import MADV_NORMAL, mappings
from edgespec.weights.plan import Mapping

from .files import PROCESSOR, devices, ggml, parts

LAYOUT = 2  # GGML_BACKEND_API_VERSION, with which a registry begins
GET_ADDRESS = 4  # index of `get_proc_address` in a registry, after its version and three functions
Find = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)
IsDivided = ctypes.CFUNCTYPE(ctypes.c_bool)
_lock = Lock()
_divided = IsDivided(lambda: True)


def processor() -> int | None:
    """The processor's device, if this build has the tables that are known."""
    for device in devices(ggml(), PROCESSOR):
        registry = ggml().ggml_backend_dev_backend_reg(device)
        return device if ctypes.cast(registry, ctypes.POINTER(ctypes.c_int)).contents.value == LAYOUT else None
    return None


@contextmanager
def replaced(table: int, index: int, kind: Any, body: Callable[..., Any]) -> Iterator[None]:
    """Within the `with`, and for this thread, call another function.

    Args:
        table: address of a table.
        index: of the function in it.
        kind: of the function, as of ctypes.
        body: called with the usual function and the arguments.
    """
    slots, here = ctypes.cast(table, ctypes.POINTER(ctypes.c_void_p)), get_ident()
    with _lock:
        address = slots[index]
        usual = kind(address or 0)
        other = kind(lambda *given: body(usual, *given) if get_ident() == here else usual(*given))
        slots[index] = ctypes.cast(other, ctypes.c_void_p).value
        try:
            yield
        finally:
            slots[index] = address


@contextmanager
def unread(path: str, platform: str) -> Iterator[Callable[[], None]]:
    """Models that are loaded in the `with` are mapped, and not read.

    llama.cpp has the system read a whole file as it maps it, except where memory is divided among processors (NUMA).

    Args:
        path: of the model.
        platform: as of `Machine`.

    Yields:
        A function to call once it is mapped: Linux must not read single pages where weights are read after all.
    """

    def mapped() -> set[Mapping]:
        return {one for part in parts(path) for one in mappings(part)} if platform == "linux" else set()

    before = mapped()

    def read_ahead() -> None:
        for one in mapped() - before:
            libc().madvise(one.start, one.stop - one.start, MADV_NORMAL)

    def find(usual: Any, registry: int, name: bytes) -> Any:
        return ctypes.cast(_divided, ctypes.c_void_p).value if name.endswith(b"is_numa") else usual(registry, name)

    if (device := processor()) is None or platform == "darwin":
        yield lambda: None
    else:
        with replaced(ggml().ggml_backend_dev_backend_reg(device), GET_ADDRESS, Find, find):
            yield read_ahead
