"""Layers in another machine's memory, by llama.cpp's RPC backend: lending it, and borrowing.

The protocol knows no passwords, and a program that is sent to it wrongly can crash or worse: loopback and ssh only.
"""

import ctypes
import re
import signal
import socket
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from edgespec.errors import EdgespecError, ModelError, NoRoom, UsageError
from edgespec.machine.memory import format_size
from edgespec.weights.plan import Tensor, layer_of, make_plan

from ..ggml.files import ggml_library, llama_cpp, parts, read_tensors
from ..memory.gpu import ggml, layers_that_fit, overrides

CPU = 0  # ggml_backend_dev_type in ggml-backend.h
BUILD = 'CMAKE_ARGS="-DGGML_RPC=on" pip install --force-reinstall --no-cache-dir --no-deps llama-cpp-python'
SECONDS_TO_ANSWER = 5.0
HEAD = b"^(output|token_embd)"  # stays here: logits are many times what goes from layer to layer


class NoRpc(EdgespecError):
    def __init__(self) -> None:
        super().__init__(f"lending layers needs a llama.cpp that was built for it: {BUILD}")


def has_rpc() -> bool:
    return any((Path(llama_cpp.__file__).parent / "lib").glob("*ggml-rpc*"))


def rpc() -> Any:
    """The library. Raises NoRpc."""
    if not has_rpc():
        raise NoRpc
    library = ggml_library("ggml-rpc")
    library.ggml_backend_rpc_add_server.restype = ctypes.c_void_p
    library.ggml_backend_rpc_add_server.argtypes = [ctypes.c_char_p]
    size, pointer = ctypes.c_size_t, ctypes.c_void_p
    library.ggml_backend_rpc_start_server.restype = None
    library.ggml_backend_rpc_start_server.argtypes = [ctypes.c_char_p, ctypes.c_char_p, size, size, pointer]
    return library


def lend(host: str, port: int, threads: int, cache: str | None) -> None:
    """Lend this machine's processor, or its GPUs, and their memory, until the program is ended.

    Args:
        host: an IP address to listen at.
        port: that is free.
        threads: of the processor.
        cache: a folder for weights that were received, so that they need not be sent again; None: they are forgotten.

    Raises:
        NoRpc: llama.cpp cannot do so.
        EdgespecError: llama.cpp gave up.
    """
    library, devices = rpc(), ggml()
    llama_cpp.llama_backend_init()
    count = devices.ggml_backend_dev_count()
    every = [devices.ggml_backend_dev_get(i) for i in range(count)]
    gpus = [device for device in every if devices.ggml_backend_dev_type(device) != CPU]
    chosen = gpus or [device for device in every if devices.ggml_backend_dev_type(device) == CPU][:1]
    pointers = (ctypes.c_void_p * len(chosen))(*chosen)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # C code that never comes back to Python
    folder = cache.encode() if cache else None
    library.ggml_backend_rpc_start_server(f"{host}:{port}".encode(), folder, threads, len(chosen), pointers)
    raise EdgespecError(f"llama.cpp could not listen at {host}:{port}")


def check_lender(address: str) -> None:
    """Refuse an address where nobody answers, for llama.cpp would end the program.

    Raises:
        UsageError: it is no HOST:PORT.
        ModelError: nobody lends there.
    """
    host, _, port = address.rpartition(":")
    if not host or not re.fullmatch(r"\d{1,5}", port):
        raise UsageError(f"--lender is {address!r}, but must be HOST:PORT, where `edgespec lend` listens")
    try:
        socket.create_connection((host, int(port)), SECONDS_TO_ANSWER).close()
    except (OSError, OverflowError, UnicodeError) as error:
        raise ModelError(
            f"nobody lends at {address} ({error}); start `edgespec lend` there, with ssh -L in front of it"
        ) from error


def borrow(addresses: Sequence[str]) -> Any:
    """Devices of lenders, as llama.cpp's list of devices for a model: ended by a null pointer.

    Raises:
        NoRpc: llama.cpp cannot do so.
    """
    devices = ggml()
    llama_cpp.llama_backend_init()
    before = devices.ggml_backend_dev_count()
    for address in addresses:
        devices.ggml_backend_register(rpc().ggml_backend_rpc_add_server(address.encode()))
    found = [devices.ggml_backend_dev_get(i) for i in range(before, devices.ggml_backend_dev_count())]
    return (ctypes.c_void_p * (len(found) + 1))(*found, None)


def lent_options(borrowed: Any) -> dict[str, Any]:
    """Parameters of a model with layers on lenders, whose output and embedding lie in this machine's memory."""
    devices = ctypes.cast(borrowed, ctypes.c_void_p)
    return {"devices": devices, "tensor_buft_overrides": ctypes.addressof(overrides(HEAD))}


def memory_of_lenders(borrowed: Any) -> int:
    """Bytes that lenders say are free."""
    total = 0
    for device in filter(None, borrowed):
        free, whole = ctypes.c_size_t(0), ctypes.c_size_t(0)
        ggml().ggml_backend_dev_memory(device, ctypes.byref(free), ctypes.byref(whole))
        total += free.value
    return total


def choose_lent(tensors: Sequence[Tensor], room: int, needed: int, buffers: int, free: int, parts: int) -> int:
    """`gpu_layers` for a model some of whose layers can be lent: so many that no other one has to be streamed.

    A layer here is faster than one over a network, and that one is faster than one from a disk.

    Args:
        tensors: of the model.
        room: bytes of this machine's memory that the program may take.
        needed: of them, by all but the model's weights.
        buffers: bytes that lent layers may need besides their weights.
        free: bytes that lenders have.
        parts: how many lenders.
    """
    most = layers_that_fit([tensor for tensor in tensors if layer_of(tensor) >= 0], free - buffers, parts)
    count = max(map(layer_of, tensors)) + 1
    for lent in range(count + 1 if most < 0 else most):
        with suppress(NoRoom):
            if make_plan(tensors, room, needed, on_device=lent, output_here=True) is None:
                return lent + 1 if lent else 0
    return most if most < 0 else max(0, most)


def lent_line(path: str, gpu_layers: int) -> str:
    """What is lent, for a person."""
    layers = [tensor for part in parts(path) for tensor in read_tensors(part) if layer_of(tensor) >= 0]
    count = max(map(layer_of, layers)) + 1
    lent = count if gpu_layers < 0 else min(count, max(0, gpu_layers - 1))
    if not lent:
        return "everything fits into this memory, so nothing is lent; --gpu-layers N has N - 1 layers lent all the same"
    size = sum(tensor.size for tensor in layers if layer_of(tensor) >= count - lent)
    return f"lent: the last {lent} of {count} layers, {format_size(size)}; the output stays here"
