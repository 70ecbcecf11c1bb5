"""Layers in another machine's memory, by llama.cpp's RPC backend.

The protocol is not safe (no passwords; wrong data can crash the receiver or worse): use it with loopback and ssh only.
"""

import ctypes
import re
import signal
import socket
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from edgespec.errors import EdgespecError, ModelError, NoRoom, UsageError, pip_install
from edgespec.machine.memory import format_size
from edgespec.machine.system import declare
from edgespec.weights.plan import Tensor, count_layers, layer_of, layers_on_gpu, make_plan

from ..ggml.files import (
    PROCESSOR,
    compiled_backends,
    devices,
    ggml,
    ggml_library,
    llama_cpp,
    loaded_tensors,
    memory_of,
)
from ..memory.gpu import gpu_devices, layers_that_fit, overrides

SECONDS_TO_ANSWER = 5.0
HEAD = b"^(output|token_embd)"  # stays here, because logits are much larger than the rows between layers


class NoRpc(EdgespecError):
    def __init__(self) -> None:
        install = pip_install("--force-reinstall", "--no-cache-dir", "--no-deps", "llama-cpp-python")
        super().__init__(
            "lending layers needs a llama.cpp that was built for it: "
            f'CMAKE_ARGS="-DGGML_RPC=on -DGGML_BLAS=off" {install}'
        )


def rpc() -> Any:
    """
    Returns:
        The library of the RPC backend.

    Raises:
        NoRpc: this llama.cpp has no RPC backend.
    """
    if "rpc" not in compiled_backends():
        raise NoRpc
    text, size, pointer = ctypes.c_char_p, ctypes.c_size_t, ctypes.c_void_p
    functions = [
        ("ggml_backend_rpc_add_server", pointer, [text]),
        ("ggml_backend_rpc_start_server", None, [text, text, size, size, pointer]),
    ]
    return declare(ggml_library("ggml-rpc"), functions)


def lend(host: str, port: int, threads: int, cache: str | None) -> None:
    """Lend this machine's GPUs, or else its CPU, and their memory, until the program ends.

    Args:
        host: IP address to listen at.
        port: free port.
        threads: CPU threads.
        cache: folder for received weights, so that they are sent only once; None: no cache.

    Raises:
        NoRpc: this llama.cpp has no RPC backend.
        EdgespecError: llama.cpp cannot listen.
    """
    library = rpc()
    llama_cpp.llama_backend_init()
    chosen = gpu_devices(ggml()) or devices(ggml(), PROCESSOR)[:1]
    pointers = (ctypes.c_void_p * len(chosen))(*chosen)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the C code never returns to Python
    folder = cache.encode() if cache else None
    library.ggml_backend_rpc_start_server(f"{host}:{port}".encode(), folder, threads, len(chosen), pointers)
    raise EdgespecError(f"llama.cpp could not listen at {host}:{port}")


def check_lender(address: str) -> None:
    """Refuse an address where no lender answers: llama.cpp would end the program.

    Raises:
        UsageError: it is no HOST:PORT.
        ModelError: no lender answers.
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
    """
    Returns:
        llama.cpp's null-terminated list of the lenders' devices.

    Raises:
        NoRpc: this llama.cpp has no RPC backend.
    """
    library = ggml()
    llama_cpp.llama_backend_init()
    before = library.ggml_backend_dev_count()
    for address in addresses:
        library.ggml_backend_register(rpc().ggml_backend_rpc_add_server(address.encode()))
    found = devices(library)[before:]
    return (ctypes.c_void_p * (len(found) + 1))(*found, None)


def lent_options(borrowed: Any) -> dict[str, Any]:
    """Model parameters for layers on lenders; `borrowed` must live as long as the model."""
    return {
        "devices": ctypes.cast(borrowed, ctypes.c_void_p),
        "tensor_buft_overrides": ctypes.addressof(overrides(HEAD)),
    }


def memory_of_lenders(borrowed: Any) -> int:
    return sum(memory_of(ggml(), device)[0] for device in filter(None, borrowed))


def choose_lent(tensors: Sequence[Tensor], room: int, needed: int, buffers: int, free: int, parts: int) -> int:
    """Choose `gpu_layers` for lenders: local layers are the fastest, streamed ones the slowest.

    Args:
        tensors: of the model.
        room: bytes that the program may take on this machine.
        needed: bytes of them for everything but the model's weights.
        buffers: bytes that lent layers may need besides their weights.
        free: bytes that lenders have.
        parts: number of lenders.

    Returns:
        The least number that avoids streaming, else the largest that lenders can hold; -1: all layers.
    """
    most = layers_that_fit([tensor for tensor in tensors if layer_of(tensor) >= 0], free - buffers, parts)
    count = max(map(layer_of, tensors)) + 1
    for lent in range(count + 1 if most < 0 else most):
        with suppress(NoRoom):
            if make_plan(tensors, room, needed, on_device=lent, output_here=True) is None:
                return lent + 1 if lent else 0
    return most


def lent_line(path: str, gpu_layers: int) -> str:
    tensors = loaded_tensors(path)
    count = count_layers(tensors)
    lent = layers_on_gpu(gpu_layers, count)
    if not lent:
        return "everything fits into this memory, so nothing is lent; --gpu-layers N has N - 1 layers lent all the same"
    size = sum(tensor.size for tensor in tensors if layer_of(tensor) >= count - lent)
    return f"lent: the last {lent} of {count} layers, {format_size(size)}; the output stays here"
