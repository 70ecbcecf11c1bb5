"""Places of experts in a model folder: all in one tensor, gate and up in one, or a tensor for each expert.

Engines stack what lies apart as they load it. Each checks that values are those of the files.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edgespec.models.safetensors_header import Stored
from edgespec.weights.experts import ExpertLayer
from edgespec.weights.plan import Extent, Tensor, merge

# Other names of a matrix in files, and of a tensor with two: halves of each expert are gate and up.
OTHER = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3", "fc1": "up_proj", "fc2": "down_proj"}
HALVES = ("gate_proj", "up_proj")
BOTH = {"gate_up_proj", "input_linear.weight"}
DOWN = {"down_proj", "output_linear.weight"}
# In a layer, but not one of a head: "3.down_proj.weight" of an expert, or one of the names above.
IN_LAYER = re.compile(r"(?!.*\bmtp\b)(?:.*\.)?layers\.(\d+)\.(?:.*\.)?(?:experts|block_sparse_moe)\.(.+)")

Place = tuple[int, Stored]  # number of the file, and the tensor there
Parts = tuple[Extent, ...]  # of an expert, one after the other


@dataclass(frozen=True, slots=True)
class Form:
    """
    Attributes:
        name: of an array [experts, …] in the module, such as "gate_proj.weight".
        matrices: that follow each other in an expert, as files name them apart; halves are gate and up.
        dtype: the engine's.
        code: the same in files; "": it is not in files.
        shape: of an expert.
        size: of an expert, in bytes.
    """

    name: str
    matrices: tuple[str, ...]
    dtype: Any
    code: str
    shape: tuple[int, ...]
    size: int


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


def by_layer(stored: Mapping[str, Place]) -> dict[int, dict[str, Place]]:
    """Tensors of experts, by layer and by the end of their names."""
    found = dict[int, dict[str, Place]]()
    for name, place in stored.items():
        if match := IN_LAYER.fullmatch(name):
            found.setdefault(int(match[1]), {})[match[2]] = place
    return found


def find_experts(
    path: str, index: int, count: int, forms: Sequence[Form], whole: Mapping[str, Place], others: Mapping[str, Place]
) -> Experts | None:
    """
    Args:
        path: name of the module with a layer's experts.
        index: of the layer.
        count: of its experts.
        forms: of the module's arrays.
        whole: tensors of the files by their names.
        others: as `by_layer` has them.

    Returns:
        The experts; None: not all lie in the files as the module has them.
    """
    ways = [[*_ways(form, count, whole.get(f"{path}.{form.name}"), others)] for form in forms]
    if not all(ways):
        return None
    places = tuple(one[0] for one in ways)
    first = [one[0][0] for one in places]
    weights = tuple(
        Tensor(form.name, one.file, one.start, count * form.size) for form, one in zip(forms, first, strict=True)
    )
    runs = merge(part for one in places for parts in one for part in parts)
    tensors = tuple(
        Tensor(f"blk.{index}.{path}.{i}_exps.weight", one.file, one.start, one.size) for i, one in enumerate(runs)
    )
    return Experts(path, ExpertLayer(index, count, weights, places), tuple(forms), tensors)


def _ways(form: Form, count: int, whole: Place | None, others: Mapping[str, Place]) -> Iterator[tuple[Parts, ...]]:
    """Places of an array's experts: in a tensor of its name, in one of another name, or each in its own."""
    rows, *rest = form.shape or (1,)
    names = BOTH if form.matrices == HALVES else DOWN if form.matrices == ("down_proj",) else set()
    stacked = [others[name] for name in (form.name, *names) if name in others]
    for file, one in [*([whole] if whole else []), *stacked]:
        if is_of(one, form.code, (count, *form.shape)):
            yield _steps(file, one.start, form.size, form.size, count)
    for file, one in [others[name] for name in BOTH if name in others and form.matrices[0] in HALVES]:
        if is_of(one, form.code, (count, 2 * rows, *rest)):
            yield _steps(file, one.start + HALVES.index(form.matrices[0]) * form.size, form.size, 2 * form.size, count)
    kind, part = form.name.partition(".")[2] or "weight", (rows // len(form.matrices), *rest)[: len(form.shape)]
    for named in (form.matrices, [OTHER.get(name) for name in form.matrices]):
        each = [[others.get(f"{expert}.{name}.{kind}") for name in named] for expert in range(count)]
        if all(place and is_of(place[1], form.code, part) for places in each for place in places):
            yield tuple(tuple(_whole(*place) for place in places if place) for places in each)


def is_of(found: Stored, code: str, shape: Iterable[int]) -> bool:
    return found.dtype == code and found.shape == tuple(shape)


def _whole(file: int, one: Stored) -> Extent:
    return Extent(file, one.start, one.start + one.size)


def _steps(file: int, start: int, size: int, step: int, count: int) -> tuple[Parts, ...]:
    return tuple((Extent(file, first, first + size),) for first in range(start, start + count * step, step))
