"""llama.cpp with a second device: its RPC backend, which here computes on the same processor, behind a socket.

    python second_device.py serve            offers the device; prints where
    python second_device.py use ENDPOINT …   checks models, see `check`; prints what came of it as JSON

Needs a llama-cpp-python that was built with the RPC backend: see CONTRIBUTING.md.
"""

import ctypes
import json
import os
import socket
import sys
import threading
from dataclasses import replace
from typing import Any

import numpy as np

OPTIONS: dict[str, Any] = {"context_length": 128, "budget": 16, "exact": "off", "threads": 1}


def library(name: str) -> Any:
    from edgespec.backends.llamacpp.ggml.files import ggml_library

    return ggml_library(name)


def serve() -> None:
    """Offer this machine's processor as a device until standard input ends."""
    ggml = library("ggml")
    ggml.ggml_backend_dev_by_type.restype = ctypes.c_void_p
    devices = (ctypes.c_void_p * 1)(ggml.ggml_backend_dev_by_type(0))  # GGML_BACKEND_DEVICE_TYPE_CPU
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
    print(endpoint, flush=True)
    one = ctypes.c_size_t(1)  # thread, device
    library("ggml-rpc").ggml_backend_rpc_start_server(endpoint.encode(), None, one, one, devices)


def add(endpoint: str) -> None:
    """Give llama.cpp the device."""
    rpc, ggml = library("ggml-rpc"), library("ggml")
    rpc.ggml_backend_rpc_add_server.restype = ctypes.c_void_p
    ggml.ggml_backend_register.argtypes = [ctypes.c_void_p]
    ggml.ggml_backend_register(rpc.ggml_backend_rpc_add_server(endpoint.encode()))


def logits(backend: Any) -> Any:
    """Of a prompt, trees, a chain, and after a rewind."""
    from edgespec.loop.backend import Work
    from edgespec.loop.passes import prefill

    draw, found = np.random.default_rng(3), list[Any]()
    session = backend.open()
    prefill(backend, session, [5, 6, 7, 8])
    for parents in ([-1, 0, 0, 1, 2, 2], [-1, 0, 1, 2], [-1], list(range(-1, 15))):
        nodes = np.arange(len(parents), dtype=np.int32)
        tokens = draw.integers(0, 250, len(parents)).astype(np.int32)
        rows = backend.forward([Work(session, tokens, np.array(parents, np.int32), nodes)])[0]
        found.append(np.stack([rows.row(node) for node in range(len(parents))]))
        session.commit([0])
        session.rewind(4)
    session.close()
    return np.concatenate(found)


def load(path: str, room: int | None = None, **options: Any) -> tuple[Any, dict[str, float]]:
    """A model, and MiB of its weights by where llama.cpp says that they lie; the device has so much memory."""
    from edgespec.backends.llamacpp import engine
    from edgespec.backends.llamacpp.ggml import files
    from edgespec.backends.llamacpp.memory import planning as memory

    real = memory.devices
    if room is not None:
        memory.devices = lambda: [replace(device, free=room) for device in real()]
    files.size_lines.clear()
    try:
        model = engine.load(path, **OPTIONS | options)
    finally:
        memory.devices = real
    places: dict[str, float] = {}
    for line in files.size_lines:
        if "model buffer size" in line:
            name, size = line.split(":", 1)[1].split("model buffer size =")
            places[name.strip().partition("[")[0]] = float(size.split()[0])
    return model, places


def least(path: str, **options: Any) -> int:
    """The memory that a model needs at least: what the error names."""
    from edgespec.errors import NoRoom
    from edgespec.machine.memory import parse_size

    try:
        load(path, **options | {"memory": 1})
    except NoRoom as error:
        return parse_size(str(error).partition("at least ")[2].partition(" (")[0])
    raise AssertionError("a byte of memory is enough")


def check(path: str, room: int | None, options: dict[str, Any]) -> dict[str, Any]:
    """A model with layers on the device against the same without. "memory": 5 is so many bytes more than the least."""
    plain, _ = load(path, gpu_layers=0, memory=1 << 40)
    expected = logits(plain)
    plain.close()
    if "memory" in options:
        needed = max(least(path, **options) for _ in range(3))  # a process takes a little more each time
        options = options | {"memory": needed + options["memory"]}
    model, places = load(path, room, **options)
    found = logits(model)
    layers = [layer.index for layer in model.streamer.plan.streamed] if model.streamer else []
    report = {
        "gpu_layers": model.computing["gpu_layers"], "places": places, "streamed": layers, "notes": model.notes,
        "difference": float(np.abs(found - expected).max()), "spread": float(expected.std()),
        "tolerance": model.capabilities.logit_tolerance,
    }  # fmt: skip
    model.close()
    return report


def main() -> None:
    """See the module."""
    if sys.argv[1] == "serve":
        serve()
        return
    from edgespec.backends.llamacpp.memory.gpu import find_gpus

    add(sys.argv[2])
    answers: list[Any] = [[[one.name.partition("[")[0], one.shared, one.free] for one in find_gpus()]]
    for path, room, options in json.loads(sys.argv[3]):
        try:
            answers.append(check(path, room, options))
        except Exception as error:
            answers.append({"failed": f"{type(error).__name__}: {error}"})
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
