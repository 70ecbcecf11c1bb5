"""A second device for llama.cpp that computes in mapped memory, as a Mac's GPU does: this processor by another name.

Its structures are copies of the processor's with a few functions replaced (ggml-backend-impl.h). It is only loaded on.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from edgespec.backends.llamacpp.ggml.files import ggml_library, llama_cpp, load_model, size_lines
from edgespec.backends.llamacpp.memory.gpu import overrides

Pointers = ctypes.c_void_p * 17  # struct ggml_backend_device: 15 functions, registry, context
GET_NAME, GET_TYPE, GET_BUFFER_TYPE, FROM_HOST = 0, 3, 6, 8  # indices of its functions
BUFFER_TYPE_OF_BUFFER = 11  # index in struct ggml_backend_buffer, behind its 11 functions
NAME = b"MAPPED"

_kept: list[Any] = []  # Python functions that llama.cpp has the addresses of


def _function(result: Any, arguments: list[Any], body: Any) -> int:
    made = ctypes.CFUNCTYPE(result, *arguments)(body)
    _kept.append(made)
    return ctypes.cast(made, ctypes.c_void_p).value or 0


def device() -> Any:
    """llama.cpp's null-terminated list of the device."""
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    ggml, cpu = ggml_library("ggml"), ggml_library("ggml-cpu")
    del cpu
    for name, arguments in [
        ("ggml_backend_dev_by_type", [ctypes.c_int]),
        ("ggml_backend_cpu_buffer_type", []),
        ("ggml_backend_cpu_buffer_from_ptr", [pointer, size]),
    ]:
        function = getattr(ggml, name)
        function.restype, function.argtypes = pointer, arguments
    found = Pointers.from_buffer_copy(Pointers.from_address(ggml.ggml_backend_dev_by_type(0)))
    kind = (pointer * 8).from_buffer_copy((pointer * 8).from_address(ggml.ggml_backend_cpu_buffer_type()))
    text = ctypes.create_string_buffer(NAME)
    kind[0] = _function(pointer, [pointer], lambda _: ctypes.addressof(text))
    kind[6] = ctypes.addressof(found)  # its device, behind six functions

    def from_host(_: Any, address: int, length: int, most: int) -> int:
        buffer: int = ggml.ggml_backend_cpu_buffer_from_ptr(address, length)
        (pointer * 12).from_address(buffer)[BUFFER_TYPE_OF_BUFFER] = ctypes.addressof(kind)
        return buffer

    found[GET_NAME] = kind[0]
    found[GET_TYPE] = _function(ctypes.c_int, [pointer], lambda _: 1)  # GGML_BACKEND_DEVICE_TYPE_GPU
    found[GET_BUFFER_TYPE] = _function(pointer, [pointer], lambda _: ctypes.addressof(kind))
    found[FROM_HOST] = _function(pointer, [pointer, pointer, size, size], from_host)
    _kept.extend((found, kind, text))
    return (pointer * 2)(ctypes.addressof(found), None)


@contextmanager
def loaded(path: str, gpu_layers: int, kept_off: tuple[bytes, ...]) -> Iterator[dict[str, list[float]]]:
    """A model with layers on the device: MiB of each buffer that llama.cpp logs, by device."""
    options: dict[str, Any] = {"load_mode": llama_cpp.LLAMA_LOAD_MODE_MMAP, "use_extra_bufts": False}
    if kept_off:
        options["tensor_buft_overrides"] = ctypes.addressof(overrides(*kept_off))
    devices = device()
    size_lines.clear()
    model = load_model(path, n_gpu_layers=gpu_layers, devices=ctypes.cast(devices, ctypes.c_void_p), **options)
    try:
        found: dict[str, list[float]] = {}
        for line in size_lines:
            if "model buffer size" in line:
                name, size = line.split(":", 1)[1].split("model buffer size =")
                found.setdefault(name.strip(), []).append(float(size.split()[0]))
        yield found
    finally:
        llama_cpp.llama_model_free(model)
