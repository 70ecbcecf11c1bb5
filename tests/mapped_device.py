"""A second device for llama.cpp that computes in mapped memory, as a Mac's GPU does: this processor by another name.

Its structures are copies of the processor's with a few functions replaced (ggml-backend-impl.h). It is only loaded on.
With `own` its memory is its own, as a card's, and it helps with the weights of the processor's layers (`op_offload`).
"""

import ctypes
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from edgespec.backends.llamacpp.context import ContextSize, make_context, settle_attention
from edgespec.backends.llamacpp.ggml.files import ggml_library, llama_cpp, load_model, size_lines
from edgespec.backends.llamacpp.memory import pools
from edgespec.backends.llamacpp.memory.gpu import overrides

Pointers = ctypes.c_void_p * 17  # struct ggml_backend_device: 15 functions, registry, context
GET_NAME, GET_TYPE, INIT, GET_BUFFER_TYPE, FROM_HOST, HAS_BUFFERS, HELPS = 0, 3, 5, 6, 8, 10, 11  # its functions
IS_HOST = 5  # index in struct ggml_backend_buffer_type
HELPED_ROWS = 32  # least of a pass, as of CUDA and Metal
BUFFER_TYPE_OF_BUFFER = 11  # index in struct ggml_backend_buffer, behind its 11 functions
NAME = b"MAPPED"

_kept: list[Any] = []  # Python functions that llama.cpp has the addresses of


def _function(result: Any, arguments: list[Any], body: Any) -> int:
    made = ctypes.CFUNCTYPE(result, *arguments)(body)
    _kept.append(made)
    return ctypes.cast(made, ctypes.c_void_p).value or 0


class Operation(ctypes.Structure):
    """The first fields of struct ggml_tensor."""

    _fields_ = (
        ("type", ctypes.c_int), ("buffer", ctypes.c_void_p), ("ne", ctypes.c_int64 * 4), ("nb", ctypes.c_size_t * 4),
        ("op", ctypes.c_int),
    )  # fmt: skip


def _rows(address: int) -> int:
    """get_op_batch_size of ggml-cuda.cu."""
    one = Operation.from_address(address)
    name = ggml_library("ggml-base").ggml_op_name
    name.restype, name.argtypes = ctypes.c_char_p, [ctypes.c_int]
    kind = name(one.op)
    if kind in (b"GET_ROWS", b"MUL_MAT"):
        return one.ne[1] * (kind == b"MUL_MAT")
    return one.ne[2] * (1 if kind in (b"MUL_MAT_ID", b"ROPE") else one.ne[1] * one.ne[3])


def device(*, own: bool = False) -> Any:
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
    if own:
        processor, begin = ggml.ggml_backend_dev_by_type(0), ctypes.CFUNCTYPE(pointer, pointer, ctypes.c_char_p)
        init = begin(found[INIT])

        def init_here(_: Any, options: Any) -> int:
            backend = init(processor, options)
            fields = (pointer * 24).from_address(backend)
            fields[list(fields).index(processor)] = ctypes.addressof(found)
            return int(backend)

        kind[IS_HOST] = _function(ctypes.c_bool, [pointer], lambda _: False)
        found[INIT] = _function(pointer, [pointer, ctypes.c_char_p], init_here)
        found[HAS_BUFFERS] = _function(ctypes.c_bool, [pointer] * 2, lambda _, one: one == ctypes.addressof(kind))
        found[HELPS] = _function(ctypes.c_bool, [pointer] * 2, lambda _, one: _rows(one) >= HELPED_ROWS)
    _kept.extend((found, kind, text))
    return (pointer * 2)(ctypes.addressof(found), None)


def found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have llama.cpp find a device with memory of its own, as it finds a card by itself."""
    made, load = device(own=True), llama_cpp.llama_model_load_from_file

    def load_there(path: bytes, params: Any) -> Any:
        params.devices = params.devices or ctypes.cast(made, ctypes.c_void_p)
        return load(path, params)

    monkeypatch.setattr(llama_cpp, "llama_model_load_from_file", load_there)
    monkeypatch.setattr(pools, "find_device", lambda name: made[0] if name == NAME.decode() else None)


@contextmanager
def loaded(
    path: str, gpu_layers: int, kept_off: tuple[bytes, ...], *, own: bool = False, **options: Any
) -> Iterator[tuple[Any, dict[str, list[float]]]]:
    """A model with layers on the device, and MiB of each buffer of weights that llama.cpp logs, by device."""
    options = {"load_mode": llama_cpp.LLAMA_LOAD_MODE_MMAP, "use_extra_bufts": False} | options
    if kept_off:
        options["tensor_buft_overrides"] = ctypes.addressof(overrides(*kept_off))
    devices = device(own=own)
    size_lines.clear()
    model = load_model(path, n_gpu_layers=gpu_layers, devices=ctypes.cast(devices, ctypes.c_void_p), **options)
    try:
        yield model, _logged("model")
    finally:
        llama_cpp.llama_model_free(model)


def _logged(kind: str) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for line in size_lines:
        if match := re.search(rf": +(\S+) +{kind} buffer size = +([\d.]+) MiB", line):
            found.setdefault(match[1], []).append(float(match[2]))
    return found


def caches(path: str, gpu_layers: int, size: ContextSize) -> dict[str, float]:
    """MiB of keys, values and recurrent states that llama.cpp logs, by device."""
    with loaded(path, gpu_layers, ()) as (model, _):
        size_lines.clear()
        llama_cpp.llama_free(make_context(path, model, size.of(model), size.of(model).params(model)))
        return {device: sum(found) for device, found in _logged("(?:KV|RS)").items()}


def compute(path: str, gpu_layers: int, kept_off: tuple[bytes, ...], size: ContextSize, helps: bool) -> dict[str, int]:
    """Bytes of a pass that llama.cpp computes without weights, by device; the device's memory is its own."""
    empty = {"no_alloc": True, "load_mode": llama_cpp.LLAMA_LOAD_MODE_NONE}
    with loaded(path, gpu_layers, kept_off, own=True, **empty) as (model, _):
        params = size.of(model).params(model)
        params.op_offload = helps
        settle_attention(path, model, size.of(model), params)
        size_lines.clear()
        llama_cpp.llama_free(make_context(path, model, size.of(model), params))
        return {device: int(sum(found) * (1 << 20)) for device, found in _logged("compute").items()}
