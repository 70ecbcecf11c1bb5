"""Mixtures of experts made of dense models: tokens of the dense model, with the routing and reads of a mixture.

The feed forward is cut along its inner width into parts, which sum to it, and each part is copied to several experts.
One copy of each part make a group, whose router rows are equal, so its experts are chosen together. Routers are random.
Weights of chosen experts sum to one, so the up projection is multiplied by the number of parts, a power of two, which
changes no digit.

Cuts are between the blocks of quantised weights, so nothing is rounded again.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.made_up import Bytes, Planned, write_planned
from edgespec.errors import ModelError, UsageError
from edgespec.models.convert.folder_from_gguf import check_out, import_gguf, read_gguf

SCALES = {  # where float16 scales lie in a block (ggml-common.h), by type
    "F32": (), "F16": (0,), "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q4_K": (0, 2),
    "Q5_K": (0, 2), "Q6_K": (208,),
}  # fmt: skip
KINDS = ("qwen2", "llama")
PARTS = ("ffn_gate", "ffn_up", "ffn_down")


@dataclass(frozen=True, slots=True)
class Experts:
    """
    Attributes:
        count: experts of a layer.
        used: experts of a token.
        parts: into which the dense feed forward is cut.
    """

    count: int = 16
    used: int = 2
    parts: int = 1

    def check(self) -> None:
        """
        Raises:
            UsageError: there is no such mixture.
        """
        if not 1 <= self.used <= self.count:
            raise UsageError(f"{self.used} of {self.count} experts are to be used, but must be from 1 to {self.count}")
        if self.parts < 1 or self.parts & (self.parts - 1) or self.count % self.parts or self.used % self.parts:
            raise UsageError(
                f"there are to be {self.parts} parts, but must be a power of two that divides the {self.count} experts "
                f"and the {self.used} used"
            )


def write_mixture(
    source: Path, out: Path, experts: Experts, progress: Callable[[int, int], None], *, seed: int = 7
) -> int:
    """Make a mixture, of architecture llama as Mixtral, of a dense model.

    Args:
        source: a GGUF of architecture qwen2 or llama; of a split one, any part.
        out: must not exist yet; the file appears when it is complete.
        experts: how many.
        progress: called with (bytes written, bytes in all) of the weights.
        seed: of the routers.

    Returns:
        Bytes of the file.

    Raises:
        UsageError: `out` exists, or there is no such mixture.
        ModelError: `source` is damaged, no dense model of these kinds, or of types that cannot be scaled.
        EdgespecError: the disk has too little room, or cannot be written.
        MissingPackage: gguf is not installed.
    """
    import_gguf()
    experts.check()
    check_out(out)
    found = read_gguf(source)
    values = found.metadata
    kind = values.get("general.architecture")
    if kind not in KINDS or values.get(f"{kind}.expert_count"):
        raise ModelError(f"{source}: is no dense model of architecture {' or '.join(KINDS)}")
    own = _own_values(source, values, experts)
    planned = _plan(source, found.tensors, values, experts, np.random.default_rng(seed))
    if not any("_exps." in one.name for one in planned):
        raise ModelError(f"{source}: has no feed forward that could be cut")
    inner = next(one.shape[1] for one in planned if "ffn_up_exps" in one.name)
    own |= {"feed_forward_length": inner}
    return write_planned(
        out, "llama", planned, lambda writer: _write_values(writer, found.fields, values, own), progress
    )


def _plan(
    source: Path, tensors: Any, values: dict[str, Any], experts: Experts, routers: np.random.Generator
) -> list[Planned]:
    gguf = import_gguf()
    kind, planned = values["general.architecture"], list[Planned]()
    heads = {part: _heads(source, values, part) for part in ("attn_q", "attn_k")}
    units = {  # weights of a block of what comes down, which is cut along its rows
        tensor.name.split(".")[1]: gguf.GGML_QUANT_SIZES[tensor.tensor_type][0]
        for tensor in tensors
        if ".ffn_down." in tensor.name
    }
    for tensor in tensors:
        part = [*tensor.name.split("."), "", ""][2]
        data = np.atleast_2d(tensor.data).view(np.uint8)
        if part not in PARTS:
            turned = heads.get(part, 0) if kind == "qwen2" else 0
            shape = data.shape if tensor.data.ndim > 1 else data.shape[1:]
            planned.append(Planned(tensor.name, tensor.tensor_type, shape, partial(_turn, tensor, turned, shape)))
            continue
        if part == "ffn_up" and experts.parts > 1 and tensor.tensor_type.name not in SCALES:
            raise ModelError(f"{source}: {tensor.name} is {tensor.tensor_type.name}, but must be {' or '.join(SCALES)}")
        unit = units.get(tensor.name.split(".")[1])
        if unit is None:
            raise ModelError(f"{source}: {tensor.name} has no ffn_down in its layer")
        inner = int(tensor.shape[0] if part == "ffn_down" else tensor.shape[1])
        width = -(-inner // (unit * experts.parts)) * unit
        block, size = gguf.GGML_QUANT_SIZES[tensor.tensor_type]
        each = (len(data), width // block * size) if part == "ffn_down" else (width, data.shape[1])
        name = tensor.name.replace(part, f"{part}_exps")
        planned.append(
            Planned(name, tensor.tensor_type, (experts.count, *each), partial(_copies, tensor, part, each, experts))
        )
        if part == "ffn_gate":
            rows = routers.normal(size=(experts.count // experts.parts, int(tensor.shape[0]))).astype(np.float32)
            router = np.tile(rows, (experts.parts, 1)).view(np.uint8)
            name, floats = tensor.name.replace(part, "ffn_gate_inp"), gguf.GGMLQuantizationType.F32
            planned.append(Planned(name, floats, router.shape, partial(np.copy, router)))
    return planned


def _turn(tensor: Any, heads: int, shape: tuple[int, ...]) -> Bytes:
    """A tensor's bytes; with `heads` its rows are turned from Qwen's order of rotated pairs to Llama's."""
    data = tensor.data
    if heads:
        data = data[np.arange(len(data)).reshape(heads, 2, -1).swapaxes(1, 2).reshape(-1)]
    return np.ascontiguousarray(data).view(np.uint8).reshape(shape)


def _copies(tensor: Any, part: str, each: tuple[int, int], experts: Experts) -> Bytes:
    gguf = import_gguf()
    data = tensor.data.view(np.uint8)
    along = 1 if part == "ffn_down" else 0
    whole = np.zeros([size * experts.parts if axis == along else size for axis, size in enumerate(each)], np.uint8)
    whole[: data.shape[0], : data.shape[1]] = data
    if part == "ffn_up" and experts.parts > 1:
        _multiply(whole, tensor.tensor_type.name, gguf.GGML_QUANT_SIZES[tensor.tensor_type][1], experts.parts)
    return np.repeat(np.stack(np.split(whole, experts.parts, axis=along)), experts.count // experts.parts, axis=0)


def _multiply(rows: Bytes, kind: str, size: int, by: int) -> None:
    if kind == "F32":
        rows.view(np.float32)[...] *= by
        return
    blocks = rows.reshape(-1, size)
    for at in SCALES[kind]:
        scales = np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16) * np.float16(by)
        blocks[:, at : at + 2] = scales.view(np.uint8)


def _heads(source: Path, values: dict[str, Any], part: str) -> int:
    key = f"{values['general.architecture']}.attention.head_count"
    count = values.get(f"{key}_kv", values.get(key)) if part == "attn_k" else values.get(key)
    if not isinstance(count, int) or count < 1:
        raise ModelError(f"{source}: {key} is {count!r}, but must be one number for all layers")
    return count


def _own_values(source: Path, values: dict[str, Any], experts: Experts) -> dict[str, int]:
    kind = values["general.architecture"]
    missing = [key for key in (f"{kind}.embedding_length", "tokenizer.ggml.tokens") if key not in values]
    if missing:
        raise ModelError(f"{source}: has no {missing[0]}")
    head = values.get(f"{kind}.attention.key_length")
    head = head or values[f"{kind}.embedding_length"] // _heads(source, values, "attn_q")
    return {
        "expert_count": experts.count,
        "expert_used_count": experts.used,
        "rope.dimension_count": values.get(f"{kind}.rope.dimension_count") or head,
        "vocab_size": len(values["tokenizer.ggml.tokens"]),
    }


def _write_values(writer: Any, fields: dict[str, Any], values: dict[str, Any], own: dict[str, int]) -> None:
    gguf = import_gguf()
    kind = values["general.architecture"]
    for key, value in own.items():
        writer.add_uint32(f"llama.{key}", value)
    for name, field in fields.items():
        short = name.removeprefix(f"{kind}.")
        if name.startswith("split.") or name == "general.architecture" or short in own:
            continue
        key = name if short == name else f"llama.{short}"
        if field.types[0] == gguf.GGUFValueType.ARRAY:
            writer.add_array(key, values[name])
        else:
            writer.add_key_value(key, values[name], field.types[0])
