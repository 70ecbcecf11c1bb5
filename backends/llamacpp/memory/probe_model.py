"""Probe models: copies of a model's file with one layer of each kind.

The types and shapes of weights, cache and pass select llama.cpp's kernels, not the number of layers, so a probe model
shows the row classes of a large model in seconds.
"""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import disk_usage
from tempfile import TemporaryDirectory, gettempdir
from typing import Any

from edgespec.errors import ModelError
from edgespec.loop.engines import Computing, LoadOptions
from edgespec.machine.memory import file_system, format_size
from edgespec.weights.plan import Tensor, count_layers, layer_of

from ..ggml.files import all_tensors, keep_log, last_log, llama_cpp
from .attention import ALIKE

LEAST_LAYERS = 2
IN_MEMORY = ("tmpfs", "ramfs")
HEADROOM = 1 << 28  # bytes that stay free on the disk
REPACKED: dict[str, str | int | None] = {"repacked": True}


def kinds(tensors: list[Tensor]) -> list[int]:
    """One layer of each kind, by tensor names, sizes and types; at least `LEAST_LAYERS`, if the model has them."""
    layers: dict[int, list[tuple[str, int, int]]] = {}
    for tensor in tensors:
        if (layer := layer_of(tensor)) >= 0:
            layers.setdefault(layer, []).append((tensor.name.split(".", 2)[2], tensor.size, tensor.type))
    first: dict[tuple[tuple[str, int, int], ...], int] = {}
    for index, found in sorted(layers.items()):
        first.setdefault(tuple(sorted(found)), index)
    chosen = set(first.values())
    others = sorted(layers.keys() - chosen)
    return sorted([*chosen, *others[: max(0, LEAST_LAYERS - len(chosen))]])


def _place(needed: int) -> str:
    """The temporary folder, or else the home folder, with disk space for `needed` bytes.

    Raises:
        ModelError: neither has room.
    """
    for place in (gettempdir(), os.path.expanduser("~")):
        usable = os.path.isdir(place) and os.access(place, os.W_OK) and file_system(place) not in IN_MEMORY
        if usable and disk_usage(place).free > needed + HEADROOM:
            return place
    raise ModelError(f"no disk has room for {format_size(needed)}")


@contextmanager
def probe_file(path: str) -> Iterator[str]:
    """Path of a probe model's file, which is removed after the `with`.

    Raises:
        ModelError: it cannot be made.
    """
    tensors = all_tensors(path)
    left_out = sorted(set(range(count_layers(tensors))) - set(kinds(tensors)))
    if not left_out:
        yield path
        return
    params = llama_cpp.llama_model_quantize_default_params()
    params.only_copy = True
    params.prune_layers = (ctypes.c_int32 * (len(left_out) + 1))(*left_out, -1)
    keep_log()
    needed = sum(tensor.size for tensor in tensors if layer_of(tensor) not in left_out)
    with TemporaryDirectory(prefix="edgespec-", dir=_place(needed)) as folder:
        copy = Path(folder) / "probe.gguf"
        if llama_cpp.llama_model_quantize(os.fsencode(path), bytes(copy), ctypes.byref(params)) != 0:
            raise ModelError(f"{path}: no probe model of it can be made: {last_log()}")
        yield str(copy)


def probe_options(path: str, computing: Computing) -> LoadOptions:
    """Options for a probe model of a model with this `computing`.

    Raises:
        ModelError: a probe model would compute in another way.
    """
    if computing.get("gpu_layers") not in (0, -1) or "lenders" in computing:
        raise ModelError(f"{path}: a copy with fewer layers would have others on the GPU, or none lent")
    given: dict[str, Any] = {name: value for name, value in computing.items() if name not in ALIKE | REPACKED}
    return LoadOptions(context_length=1024, budget=128, resident=True, exact="wide", **given)
