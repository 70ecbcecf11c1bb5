"""Mixtures of experts made of dense models: tokens of the dense model, with the routing and reads of a mixture.

The first neurons of the feed forward are copied to every expert; the others are a shared expert, such as Granite has.
Weights of chosen experts sum to one. So whatever a router chooses, the sum is the dense feed forward, but for rounding.

Cuts are between the blocks of quantised weights, so nothing is rounded again.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.made_up import Bytes, Planned, add_field, add_values, write_planned
from edgespec.errors import ModelError, UsageError
from edgespec.loop.sampling import Float32Array
from edgespec.models.convert.folder_from_gguf import check_out, import_gguf, read_gguf

KINDS = ("qwen2", "llama")
ARCHITECTURE = "granitemoe"
PARTS = ("ffn_gate", "ffn_up", "ffn_down")


@dataclass(frozen=True, slots=True)
class Experts:
    """
    Attributes:
        count: experts of a layer.
        used: experts of a token.
        width: neurons of an expert.
    """

    count: int = 128
    used: int = 6
    width: int = 1024

    def check(self) -> None:
        """
        Raises:
            UsageError: there is no such mixture.
        """
        if not 1 <= self.used <= self.count:
            raise UsageError(f"{self.used} of {self.count} experts are to be used, but must be from 1 to {self.count}")


def write_mixture(
    source: Path, out: Path, experts: Experts, routers: Callable[[], Iterable[Float32Array]],
    progress: Callable[[int, int], None],
) -> int:  # fmt: skip
    """Make a mixture, of architecture granitemoe, of a dense model.

    Args:
        source: a GGUF of architecture qwen2 or llama; of a split one, any part.
        out: must not exist yet; the file appears when it is complete.
        experts: how many, and how wide.
        routers: rows of each layer's router, [experts, width of the model]; asked for when all else is checked.
        progress: called with (bytes written, bytes in all) of the weights.

    Returns:
        Bytes of the file.

    Raises:
        UsageError: `out` exists, or there is no such mixture.
        ModelError: `source` is damaged, or no dense model of these kinds.
        EdgespecError: the disk has too little room, or cannot be written.
        MissingPackage: gguf is not installed.
    """
    gguf = import_gguf()
    experts.check()
    check_out(out)
    found = read_gguf(source)
    values = found.metadata
    kind = values.get("general.architecture")
    if kind not in KINDS or values.get(f"{kind}.expert_count"):
        raise ModelError(f"{source}: is no dense model of architecture {' or '.join(KINDS)}")
    own = _own_values(source, values, experts)
    planned = _plan(source, found.tensors, values, experts)
    shared = [one.shape[0] for one in planned if "ffn_up_shexp" in one.name]
    if not shared:
        raise ModelError(f"{source}: has no feed forward that could be cut")
    own |= {"feed_forward_length": experts.width, "expert_shared_feed_forward_length": shared[0], "logit_scale": 1.0}
    for layer, rows in enumerate(routers()):
        data = rows.view(np.uint8)
        name = f"blk.{layer}.ffn_gate_inp.weight"
        planned.append(Planned(name, gguf.GGMLQuantizationType.F32, data.shape, partial(np.copy, data)))
    return write_planned(
        out, ARCHITECTURE, planned, lambda writer: _write_values(writer, found.fields, kind, own), progress
    )


def _plan(source: Path, tensors: Any, values: dict[str, Any], experts: Experts) -> list[Planned]:
    """All tensors but the routers."""
    sizes = import_gguf().GGML_QUANT_SIZES
    kind, planned = values["general.architecture"], list[Planned]()
    heads = {part: _heads(source, values, part) for part in ("attn_q", "attn_k")}
    for tensor in tensors:
        part = [*tensor.name.split("."), "", ""][2]
        data = np.atleast_2d(tensor.data).view(np.uint8)
        if part not in PARTS:
            turned = heads.get(part, 0) if kind == "qwen2" else 0
            shape = data.shape if tensor.data.ndim > 1 else data.shape[1:]
            planned.append(Planned(tensor.name, tensor.tensor_type, shape, partial(_turn, tensor, turned, shape)))
            continue
        along, (block, size) = int(part == "ffn_down"), sizes[tensor.tensor_type]
        inner, unit = int(tensor.shape[1 - along]), block if along else 1
        if not 0 < experts.width < inner or experts.width % unit:
            raise UsageError(
                f"experts are to be {experts.width} wide, but {tensor.name} needs a multiple of {unit} below {inner}"
            )
        cut = experts.width // block * size if along else experts.width
        first, rest = np.split(data, [cut], axis=along)
        for name, cuts in (("exps", (experts.count, *first.shape)), ("shexp", rest.shape)):
            made = partial(_copies, first if name == "exps" else rest, cuts)
            planned.append(Planned(tensor.name.replace(part, f"{part}_{name}"), tensor.tensor_type, cuts, made))
    return planned


def _copies(data: Bytes, shape: tuple[int, ...]) -> Bytes:
    return np.ascontiguousarray(np.broadcast_to(data, shape))


def _turn(tensor: Any, heads: int, shape: tuple[int, ...]) -> Bytes:
    """A tensor's bytes; with `heads` its rows are turned from Qwen's order of rotated pairs to Llama's."""
    data = tensor.data
    if heads:
        data = data[np.arange(len(data)).reshape(heads, 2, -1).swapaxes(1, 2).reshape(-1)]
    return np.ascontiguousarray(data).view(np.uint8).reshape(shape)


def _heads(source: Path, values: dict[str, Any], part: str) -> int:
    key = f"{values['general.architecture']}.attention.head_count"
    count = values.get(f"{key}_kv", values.get(key)) if part == "attn_k" else values.get(key)
    if not isinstance(count, int) or count < 1:
        raise ModelError(f"{source}: {key} is {count!r}, but must be one number for all layers")
    return count


def _own_values(source: Path, values: dict[str, Any], experts: Experts) -> dict[str, Any]:
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


def _write_values(writer: Any, fields: dict[str, Any], kind: str, own: dict[str, Any]) -> None:
    add_values(writer, {f"{ARCHITECTURE}.{key}": value for key, value in own.items()})
    for name, field in fields.items():
        short = name.removeprefix(f"{kind}.")
        if not (name.startswith("split.") or name == "general.architecture" or short in own):
            add_field(writer, name if short == name else f"{ARCHITECTURE}.{short}", field)
