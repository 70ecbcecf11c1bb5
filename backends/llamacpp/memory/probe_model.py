"""Probe models: copies of a model's file with one layer of each kind.

The types and shapes of weights, cache and pass select llama.cpp's kernels, not the number of layers, so a probe model
shows the row classes of a large model in seconds.
"""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

from edgespec.errors import ModelError
from edgespec.loop.engines import Computing, LoadOptions
from edgespec.machine.disk import new_file
from edgespec.models.gguf_header import own_values
from edgespec.weights.plan import Tensor, count_layers, layer_of, layers_on_gpu

from ...common.signals import Signals
from ..ggml.files import all_tensors, keep_log, last_log, llama_cpp
from ..states import LAST_LAYER
from .attention import ALIKE, HERE

LEAST_LAYERS, MOST_LAYERS = 2, 16
Weight = tuple[str, int, int]  # its name in a layer, size and type
REPACKED: dict[str, str | int | None] = {"repacked": True}
# Parts of `computing` that a probe model takes from the whole one.
CARRIED = {"kept_off", "op_offload", "device", *HERE}


def kinds(tensors: list[Tensor]) -> list[int]:
    """One layer of each kind, by tensor names, sizes and types; at least `LEAST_LAYERS`, if the model has them."""
    layers: dict[int, list[Weight]] = {}
    for tensor in tensors:
        if (layer := layer_of(tensor)) >= 0:
            layers.setdefault(layer, []).append((tensor.name.split(".", 2)[2], tensor.size, tensor.type))
    first: dict[tuple[Weight, ...], int] = {}
    for index, found in sorted(layers.items()):
        first.setdefault(tuple(sorted(found)), index)
    chosen = set(first.values())
    if len(chosen) > MOST_LAYERS:
        chosen = _cover(layers)
    others = sorted(layers.keys() - chosen)
    return sorted([*chosen, *others[: max(0, LEAST_LAYERS - len(chosen))]])


def chosen_layers(tensors: list[Tensor], gpu_layers: int, heads: int = 0) -> tuple[list[int], int]:
    """
    Args:
        tensors: of the whole model.
        gpu_layers: as in `LoadOptions`.
        heads: last layers that predict further tokens, whose number stands in the header.

    Returns:
        Layers of each kind, on the processor and on GPUs, and `gpu_layers` of a model that has no others.
    """
    count = count_layers(tensors)
    first = count - layers_on_gpu(gpu_layers, count)
    if not 0 < first < count:
        return [
            *kinds([one for one in tensors if layer_of(one) < count - heads]),
            *range(count - heads, count),
        ], gpu_layers
    here = kinds([tensor for tensor in tensors if layer_of(tensor) < first])
    there = kinds([tensor for tensor in tensors if layer_of(tensor) >= first])
    return [*here, *there], len(there) + 1


def _cover(layers: dict[int, list[Weight]]) -> set[int]:
    """Few layers that have all weights of different name, size or type."""
    chosen, missing = set[int](), set(chain(*layers.values()))
    while missing:
        best = max(layers, key=lambda layer: len(missing.intersection(layers[layer])))
        chosen.add(best)
        missing.difference_update(layers[best])
    return chosen


@contextmanager
def probe_file(path: str, computing: Computing) -> Iterator[str]:
    """Path of a probe model's file, which is removed after the `with`.

    Args:
        path: of the whole model.
        computing: `Backend.computing` of the whole model.

    Raises:
        ModelError: it cannot be made, or would compute in another way.
    """
    if "lenders" in computing:
        raise ModelError(f"{path}: a copy with fewer layers would have none lent")
    tensors, (chosen, _) = all_tensors(path), layers_of_probe(path, computing)
    if len(chosen) > MOST_LAYERS:
        raise ModelError(f"{path}: has layers of {len(chosen)} kinds, too many for a probe model")
    left_out = sorted(set(range(count_layers(tensors))) - set(chosen))
    if not left_out:
        yield path
        return
    params = llama_cpp.llama_model_quantize_default_params()
    params.only_copy = True
    params.prune_layers = (ctypes.c_int32 * (len(left_out) + 1))(*left_out, -1)
    keep_log()
    needed = sum(tensor.size for tensor in tensors if layer_of(tensor) not in left_out)
    with new_file(needed) as copy:
        with Signals().held():
            status = llama_cpp.llama_model_quantize(os.fsencode(path), os.fsencode(copy), ctypes.byref(params))
        if status != 0:
            raise ModelError(f"{path}: no probe model of it can be made: {last_log()}")
        yield copy


def layers_of_probe(path: str, computing: Computing) -> tuple[list[int], int]:
    """As `chosen_layers`, of a model's file."""
    values, tensors = own_values(path), all_tensors(path)
    heads = int(values.get("nextn_predict_layers", 0)) + count_layers(tensors) - int(values.get("block_count", 0))
    return chosen_layers(tensors, int(computing.get("gpu_layers") or 0), max(0, heads))


def probe_options(path: str, computing: Computing) -> LoadOptions:
    """Options for a probe model of a model with this `computing`."""
    others = ALIKE.keys() | REPACKED.keys() | CARRIED | {LAST_LAYER}
    given: dict[str, Any] = {name: value for name, value in computing.items() if name not in others}
    given["gpu_layers"] = layers_of_probe(path, computing)[1]
    return LoadOptions(context_length=2048, budget=128, resident=True, exact="wide", **given)
