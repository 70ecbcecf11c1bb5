"""Experts of mlx-lm's modules. `streaming.py` checks that values are those of the files."""

from collections.abc import Callable, Mapping
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import SwitchGLU, SwitchMLP

from ..common.expert_files import Experts, Form, Place, by_layer
from ..common.expert_files import find_experts as find_in_files

CODES = {
    mx.bfloat16: "BF16", mx.float16: "F16", mx.float32: "F32", mx.uint32: "U32", mx.uint8: "U8", mx.int32: "I32",
}  # fmt: skip


def find_experts(model: Any, layer_of: Callable[[str], int], stored: Mapping[str, Place]) -> list[Experts]:
    """Modules whose experts lie in the files, in the order of their layers.

    Args:
        model: that was loaded lazily.
        layer_of: returns the number of the layer with a module; -1: none.
        stored: all tensors of the files.
    """
    in_layers, found = by_layer(stored), list[Experts]()
    for path, module in model.named_modules():
        if not isinstance(module, SwitchGLU | SwitchMLP) or (index := layer_of(f"{path}.")) < 0:
            continue
        arrays = tree_flatten(module.parameters())
        count = arrays[0][1].shape[0]
        forms = [_form(name, array) for name, array in arrays]
        experts = find_in_files(path, index, count, forms, stored, in_layers.get(index, {}))
        if experts and all(array.shape[0] == count for _, array in arrays):
            found.append(experts)
    return sorted(found, key=lambda one: (one.layer.index, one.path))


def _form(name: str, array: Any) -> Form:
    code, count = CODES.get(array.dtype, ""), array.shape[0]
    return Form(name, (name.partition(".")[0],), array.dtype, code, tuple(array.shape[1:]), array.nbytes // count)
