"""Places of experts in a model folder: all in one tensor, gate and up in one, or a tensor for each expert.

mlx-lm stacks what lies apart as it loads. `streaming.py` checks that values are those of the files.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import SwitchGLU, SwitchMLP

from edgespec.models.safetensors_header import Stored
from edgespec.weights.experts import ExpertLayer
from edgespec.weights.plan import Extent, Tensor, merge

DTYPES = {
    "BF16": mx.bfloat16, "F16": mx.float16, "F32": mx.float32, "U32": mx.uint32, "U8": mx.uint8, "I32": mx.int32,
}  # fmt: skip
# Other names of a matrix in files, and of a tensor with two: halves of each expert are gate and up.
OTHER = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3", "fc1": "up_proj", "fc2": "down_proj"}
HALVES = ("gate_proj", "up_proj")
BOTH = {"gate_up_proj", "input_linear.weight"}
DOWN = {"down_proj", "output_linear.weight"}
# In a layer, but not one of a head: "3.down_proj.weight" of an expert, or one of the names above.
IN_LAYER = re.compile(r"(?!.*\bmtp\b)(?:.*\.)?layers\.(\d+)\.(?:.*\.)?(?:experts|block_sparse_moe)\.(.+)")

Place = tuple[int, Stored]  # number of the file, and the tensor there


@dataclass(frozen=True, slots=True)
class Form:
    """
    Attributes:
        name: of an array [experts, …] in the module, such as "gate_proj.weight".
        dtype: MLX's.
        shape: of an expert.
    """

    name: str
    dtype: Any
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return prod(self.shape) * int(self.dtype.size)


@dataclass(frozen=True, slots=True)
class Experts:
    """
    Attributes:
        path: name of the module with a layer's experts.
        layer: their places, with a tensor for each array.
        forms: of the arrays.
        tensors: runs of bytes with experts, with names as of a GGUF.
    """

    path: str
    layer: ExpertLayer
    forms: tuple[Form, ...]
    tensors: tuple[Tensor, ...]


def find_experts(model: Any, layer_of: Callable[[str], int], stored: Mapping[str, Place]) -> list[Experts]:
    """Modules whose experts lie in the files, in the order of their layers.

    Args:
        model: that was loaded lazily.
        layer_of: returns the number of the layer with a module; -1: none.
        stored: all tensors of the files.
    """
    in_layers: dict[int, dict[str, Place]] = {}
    for name, place in stored.items():
        if match := IN_LAYER.fullmatch(name):
            in_layers.setdefault(int(match[1]), {})[match[2]] = place
    found = list[Experts]()
    for path, module in model.named_modules():
        if not isinstance(module, SwitchGLU | SwitchMLP) or (index := layer_of(f"{path}.")) < 0:
            continue
        arrays = tree_flatten(module.parameters())
        count = arrays[0][1].shape[0]
        forms = tuple(Form(name, array.dtype, tuple(array.shape[1:])) for name, array in arrays)
        others = in_layers.get(index, {})
        ways = [[*_ways(form, count, stored.get(f"{path}.{form.name}"), others)] for form in forms]
        if all(ways) and all(array.shape[0] == count for _, array in arrays):
            places = tuple(one[0] for one in ways)
            weights = tuple(
                Tensor(form.name, one[0].file, one[0].start, count * form.size)
                for form, one in zip(forms, places, strict=True)
            )
            tensors = tuple(
                Tensor(f"blk.{index}.{path}.{i}_exps.weight", one.file, one.start, one.size)
                for i, one in enumerate(merge(extent for one in places for extent in one))
            )
            found.append(Experts(path, ExpertLayer(index, count, weights, places), forms, tensors))
    return sorted(found, key=lambda one: (one.layer.index, one.path))


def _ways(form: Form, count: int, whole: Place | None, others: Mapping[str, Place]) -> Iterator[tuple[Extent, ...]]:
    """Places of an array's experts: in a tensor of its name, in one of another name, or each in its own."""
    matrix, _, kind = form.name.partition(".")
    rows, *rest = form.shape or (1,)
    down = [others[name] for name in DOWN if name in others and matrix == "down_proj"]
    both = [others[name] for name in BOTH if name in others and matrix in HALVES]
    for file, one in [*([whole] if whole else []), *down]:
        if is_of(one, form.dtype, (count, *form.shape)):
            yield _steps(file, one.start, form.size, form.size, count)
    for file, one in both:
        if is_of(one, form.dtype, (count, 2 * rows, *rest)):
            yield _steps(file, one.start + HALVES.index(matrix) * form.size, form.size, 2 * form.size, count)
    for name in (matrix, OTHER.get(matrix)):
        each = [others.get(f"{expert}.{name}.{kind}") for expert in range(count)]
        if all(place and is_of(place[1], form.dtype, form.shape) for place in each):
            yield tuple(Extent(file, one.start, one.start + one.size) for file, one in filter(None, each))


def is_of(found: Stored, dtype: Any, shape: Sequence[int]) -> bool:
    return bool(DTYPES.get(found.dtype) == dtype) and found.shape == tuple(shape)


def _steps(file: int, start: int, size: int, step: int, count: int) -> tuple[Extent, ...]:
    return tuple(Extent(file, first, first + size) for first in range(start, start + count * step, step))
