"""Models that are not here: a published config gives all tensors, and a file that has their table but no weights.

A shape is a mapping, such as `shape` of a file in models.yaml (`FileFacts.shape`; {}: not known). Its keys are those of
a GGUF's header without the architecture's name (block_count, embedding_length, attention.head_count, expert_count; all
of them: llama-arch.cpp), and

    architecture    one of `ARCHITECTURES`, as llama.cpp calls it
    type            of the file: one of `TYPES`
    vocab_size      tokens
    types           of tensors whose type is not as the file's type makes it: {token_embd: Q8_0}
    tied            the embedding is the output, too; default: false
    rope_freqs      there are factors of the rotary frequencies, as in Llama 3.1 to 3.3; default: false
    ple.rows        of the table of n-grams, of Qwen3.8-Flash-Next

`table` returns the tensors, in the order in which llama-quantize writes them. `file_of` writes a GGUF with this table:
a sparse file that takes some hundred kilobytes of disk, whatever its size. Engines plan for it as for any file.
"""

import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from edgespec.errors import ModelError, UsageError, must_be, no_such
from edgespec.models.gguf_header import LARGEST, MOST_LAYERS

Shape = Mapping[str, Any]
Sizes = tuple[int, ...]  # the first is that of a row

ALIGNMENT = 32  # GGUF_DEFAULT_ALIGNMENT of gguf.h
# Name -> number in ggml.h, weights of a block, bytes of a block.
BLOCKS = {
    "F32": (0, 1, 4), "F16": (1, 1, 2), "Q4_0": (2, 32, 18), "Q5_0": (6, 32, 22), "Q8_0": (8, 32, 34),
    "Q4_K": (12, 256, 144), "Q5_K": (13, 256, 176), "Q6_K": (14, 256, 210), "I32": (26, 1, 4), "BF16": (30, 1, 2),
    "MXFP4": (39, 32, 17), "Q4_1": (3, 32, 20), "Q5_1": (7, 32, 24), "Q2_K": (10, 256, 84), "Q3_K": (11, 256, 110),
    "IQ2_XXS": (16, 256, 66), "IQ2_XS": (17, 256, 74), "IQ3_XXS": (18, 256, 98), "IQ1_S": (19, 256, 50),
    "IQ4_NL": (20, 32, 18), "IQ3_S": (21, 256, 110), "IQ2_S": (22, 256, 82), "IQ4_XS": (23, 256, 136),
    "IQ1_M": (29, 256, 56),
}  # fmt: skip
# Type of a file -> its number (llama_ftype of llama.h), and the type of most weights.
TYPES = {
    "F16": (1, "F16"), "Q4_0": (2, "Q4_0"), "Q8_0": (7, "Q8_0"), "Q4_K_M": (15, "Q4_K"), "BF16": (32, "BF16"),
    "MXFP4_MOE": (38, "Q8_0"),
}  # fmt: skip
SHORTER_BLOCKS = {"Q4_K": "Q5_0", "Q5_K": "Q8_0", "Q6_K": "Q8_0"}  # for rows that are no multiple of 256
# llama-quant.cpp
NOT_QUANTISED = (
    "norm.weight",
    "ffn_gate_inp.weight",
    "altup",
    "laurel",
    "ssm_conv1d",
    "indexer.q_proj",
    "indexer.k_proj",
)
# Key -> numbers in its list, at most (llama-hparams.h). No size depends on them.
HASHES = {"ple.layer_multipliers": 8, "ple.head_offsets": 64, "ple.head_vocab_sizes": 64}
ARCHITECTURES = (
    "llama", "llama4", "qwen2", "qwen3", "qwen3moe", "qwen3next", "qwen35", "qwen35moe", "qwen4exp", "gemma2", "gemma3",
    "gemma3n", "gemma4", "gpt-oss", "command-r", "falcon-h1", "glm4moe", "glm5-next", "deepseek2", "deepseek32",
    "deepseek4", "minimax-m2", "nemotron_h_moe",
)  # fmt: skip
DELTA_NETS = ("qwen3next", "qwen35", "qwen35moe", "qwen4exp")  # whose attention layers have gates
LATENT = ("deepseek2", "deepseek32", "glm5-next")  # multi-head latent attention
BIASED = ("glm4moe", *LATENT, "deepseek4", "minimax-m2", "nemotron_h_moe")  # whose routers have a bias of each expert
SSM = ("conv_kernel", "inner_size", "state_size", "time_step_rank", "group_count")
MLA = ("q_lora_rank", "kv_lora_rank", "key_length_mla", "value_length_mla")
INDEXER = ("indexer.head_count", "indexer.key_length")
OUTPUT = ("output_group_count", "output_lora_rank")
ALTUP, LAUREL = 4, 64  # n_altup and laurel_rank of llama-hparams.h
OWN_KEYS = ("architecture", "type", "types", "tied", "rope_freqs")  # that are not in a header
# May be lists, which repeat.
BY_LAYER = ("attention.head_count_kv", "attention.sliding_window_pattern", "feed_forward_length")
# The least values of keys that are sizes of tensors, or say how many there are.
LEAST = dict.fromkeys((
    "block_count", "embedding_length", "vocab_size", "attention.head_count", "full_attention_interval",
    *(f"ssm.{name}" for name in SSM), *(f"attention.{name}" for name in (*MLA, *INDEXER, *OUTPUT)),
    "hyper_connection.count", "hyper_connection.low_rank", "kda.head_dim", "attention.indexer.kpool", "ple.rows",
    "ple.conv_kernel",
), 1) | dict.fromkeys((
    "embedding_length_per_layer_input", "nextn_predict_layers", "attention.key_length", "attention.key_length_swa",
    "expert_count", "expert_feed_forward_length", "expert_shared_feed_forward_length", "expert_shared_count",
    "leading_dense_block_count", *BY_LAYER,
), 0)  # fmt: skip
MOST_BYTES = 1 << 44  # of a file, on ext4
DEFAULTS = {  # what llama.cpp asks for and no size depends on
    "context_length": 131072, "attention.layer_norm_rms_epsilon": 1e-6, "attention.layer_norm_epsilon": 1e-5,
    "rope.freq_base": 10000.0,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """
    Attributes:
        name: of a tensor.
        sizes: the first is that of a row.
        type: one of `BLOCKS`.
        start: its first byte behind the header.
        size: in bytes.
    """

    name: str
    sizes: Sizes
    type: str
    start: int
    size: int


def table(shape: Shape) -> list[TensorPlace]:
    """
    Raises:
        ModelError: the shape lacks something.
        UsageError: it names an architecture or type that is not known, or a value cannot be.
    """
    _check(shape)
    try:
        tensors = dict(_tensors(shape))
    except KeyError as error:
        raise ModelError(f"the shape of the model does not state {error.args[0]}") from error
    rows, start = list[TensorPlace](), 0
    names = sorted(tensors, key=lambda name: (_layer(name), name))
    values = [_layer(name) for name in names if name.endswith((".attn_v.weight", ".attn_qkv.weight"))]
    for name in names:
        if min(tensors[name]) < 1:
            raise UsageError(f"by the shape {name} has the sizes {tensors[name]}, but all must be at least 1")
        kind = _type(name, tensors[name], shape, values)
        _, weights, block = BLOCKS[kind]
        size = math.prod(tensors[name]) // weights * block
        rows.append(TensorPlace(name, tensors[name], kind, start, size))
        start += -(-size // ALIGNMENT) * ALIGNMENT
    if start > MOST_BYTES:
        raise UsageError(f"the shape is that of a file of {start} bytes, but must be of at most {MOST_BYTES}")
    return rows


def _check(shape: Shape) -> None:
    for key, known in (("architecture", ARCHITECTURES), ("type", TYPES)):
        if str(shape.get(key)) not in known:
            raise no_such(key, str(shape.get(key)), known)
    for key, value in shape.items():
        if key in OWN_KEYS or (key not in LEAST and isinstance(value, str | float)):
            continue
        low, high = LEAST.get(key, 0), MOST_LAYERS if key == "block_count" else LARGEST
        is_list = isinstance(value, list) and (key in BY_LAYER or key not in LEAST)
        values = value if is_list else [value]
        if not values or not all(isinstance(one, int) and low <= one <= high for one in values):
            raise must_be(f"{key} of the shape", value, f"a whole number from {low} to {high}")
    types = shape.get("types", {})
    if not isinstance(types, dict):
        raise must_be("types of the shape", types, "a mapping, such as {token_embd: Q8_0}")
    for kind in types.values():
        if str(kind) not in BLOCKS:
            raise no_such("type", str(kind), BLOCKS)


@contextmanager
def file_of(shape: Shape) -> Iterator[str]:
    """Path of a GGUF with the header of this shape, without tokens and weights; it is removed after the `with`.

    Errors as for `table`.
    """
    rows = table(shape)
    keys = {f"{shape['architecture']}.{key}": value for key, value in (DEFAULTS | _header(shape)).items()}
    keys = {"general.architecture": shape["architecture"], "general.file_type": TYPES[shape["type"]][0]} | keys
    keys |= {"tokenizer.ggml.model": "none"}
    header = b"GGUF" + struct.pack("<IQQ", 3, len(rows), len(keys))
    header += b"".join(_text(key) + _value(value) for key, value in keys.items())
    for row in rows:
        header += _text(row.name) + struct.pack(f"<I{len(row.sizes)}Q", len(row.sizes), *row.sizes)
        header += struct.pack("<IQ", BLOCKS[row.type][0], row.start)
    header += bytes(-len(header) % ALIGNMENT)
    with TemporaryDirectory(prefix="edgespec-") as folder:
        path = Path(folder) / "model.gguf"
        with path.open("wb") as file:
            file.write(header)
            file.truncate(len(header) + rows[-1].start + -(-rows[-1].size // ALIGNMENT) * ALIGNMENT)
        yield str(path)


def _header(shape: Shape) -> dict[str, Any]:
    layers = range(shape["block_count"])
    by_layer = {key: [_of_layer(shape[key], layer) for layer in layers] for key in BY_LAYER if key in shape}
    hashes = {key: (1,) * count for key, count in HASHES.items()} if "ple.layers" in shape else {}
    return {key: value for key, value in {**shape, **by_layer, **hashes}.items() if key not in OWN_KEYS}


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _value(value: Any) -> bytes:
    """With the number of its type, of gguf.h."""
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + _text(value)
    if isinstance(value, tuple):
        return struct.pack(f"<IIQ{len(value)}Q", 9, 10, len(value), *value)
    if isinstance(value, list):
        return struct.pack(f"<IIQ{len(value)}I", 9, 4, len(value), *value)
    return struct.pack("<If", 6, value) if isinstance(value, float) else struct.pack("<II", 4, value)


def _layer(name: str) -> int:
    return int(name.split(".")[1]) if name.startswith("blk.") else -1


def _tensors(shape: Shape) -> Iterator[tuple[str, Sizes]]:
    """As llama.cpp asks for them: src/models/*.cpp."""
    width, layers, words = (shape[key] for key in ("embedding_length", "block_count", "vocab_size"))
    yield "token_embd.weight", (width, words)
    if shape["architecture"] == "qwen4exp":
        wide, rank = shape["hyper_connection.count"] * width, shape["hyper_connection.low_rank"]
        yield "output_hc_norm.weight", (wide,)
        yield "output_hc_down.weight", (wide, rank)
        yield "output_hc_up.weight", (rank, wide)
        yield "per_layer_token_embd.weight", (shape["embedding_length_per_layer_input"], shape["ple.rows"])
    else:
        yield "output_norm.weight", (width,)
    if not shape.get("tied"):
        yield "output.weight", (width, words)
    if shape.get("rope_freqs"):
        yield "rope_freqs.weight", (_head_size(shape) // 2,)
    if shape["architecture"].startswith("gemma") and (narrow := shape.get("embedding_length_per_layer_input")):
        yield "per_layer_token_embd.weight", (narrow * layers, words)
        yield "per_layer_model_proj.weight", (width, narrow * layers)
        yield "per_layer_proj_norm.weight", (narrow,)
    if shape["architecture"] == "gemma3n":
        yield "altup_proj.weight", (width, width, ALTUP - 1)
        yield "altup_unembd_proj.weight", (width, width, ALTUP - 1)
    if shape["architecture"] == "gemma4":
        yield "rope_freqs.weight", (_head_size(shape) // 2,)
    if shape["architecture"] == "deepseek4":
        streams = shape["hyper_connection.count"]
        yield "output_hc_fn.weight", (streams * width, streams)
        yield "output_hc_base.weight", (streams,)
        yield "output_hc_scale.weight", (1,)
    for layer in range(layers):
        tensors = _mixers(shape, layer) | _norms(shape)
        tensors |= _ngrams(shape) if shape.get("ple.layers") == [layer] else {}
        tensors |= _mtp_head(shape) if layer >= layers - shape.get("nextn_predict_layers", 0) else {}
        yield from ((f"blk.{layer}.{name}", sizes) for name, sizes in tensors.items())


def _mixers(shape: Shape, layer: int) -> dict[str, Sizes]:
    """Tensors of a layer but its norms: attention or what takes its place, and the feed-forward network."""
    architecture, dense = shape["architecture"], layer < shape.get("leading_dense_block_count", 0)
    if architecture == "nemotron_h_moe":  # has one of them in a layer
        if _of_layer(shape["feed_forward_length"], layer):
            return _mixture(shape, layer)
        return _attention(shape, layer) if _of_layer(shape["attention.head_count_kv"], layer) else _mamba2(shape)
    found = _delta_net(shape) if _is_recurrent(shape, layer) else _attention(shape, layer)
    if not shape.get("expert_count") or dense or architecture == "gemma4":
        found |= _feed_forward(shape, layer)
    return found | (_mixture(shape, layer) if shape.get("expert_count") and not dense else {})


def _head_size(shape: Shape) -> int:
    return int(shape.get("attention.key_length") or shape["embedding_length"] // shape["attention.head_count"])


def _is_recurrent(shape: Shape, layer: int) -> bool:
    if shape["architecture"] not in DELTA_NETS or layer >= shape["block_count"] - shape.get("nextn_predict_layers", 0):
        return False
    return bool((layer + 1) % shape["full_attention_interval"])


def _mtp_head(shape: Shape) -> dict[str, Sizes]:
    width = shape["embedding_length"]
    sizes: dict[str, Sizes] = {f"nextn.{name}.weight": (width,) for name in ("enorm", "hnorm", "shared_head_norm")}
    if shape["architecture"] == "glm4moe":  # github.com/ikawrakow/ik_llama.cpp/pull/668
        sizes |= {f"nextn.{name}.weight": (width, shape["vocab_size"]) for name in ("embed_tokens", "shared_head_head")}
    return sizes | {"nextn.eh_proj.weight": (2 * width, width)}


def _of_layer(value: Any, layer: int) -> Any:
    return value[layer % len(value)] if isinstance(value, list) else value


def _attention(shape: Shape, layer: int) -> dict[str, Sizes]:
    architecture, width, head = shape["architecture"], shape["embedding_length"], _head_size(shape)
    if architecture == "deepseek4":
        return _compressed_attention(shape, layer)
    if architecture in LATENT:
        return _latent_attention(shape, layer)
    windowed = _of_layer(shape.get("attention.sliding_window_pattern", 0), layer)
    head = shape["attention.key_length_swa"] if windowed else head
    queries, keys = (head * _of_layer(shape[f"attention.head_count{kind}"], layer) for kind in ("", "_kv"))
    gates = 2 if architecture in DELTA_NETS else 1
    sizes = {"q": (width, gates * queries), "k": (width, keys), "v": (width, keys), "output": (queries, width)}
    if architecture == "gemma4" and not windowed and not shape["embedding_length_per_layer_input"]:
        del sizes["v"]  # the keys are the values, too
    found: dict[str, Sizes] = {f"attn_{name}.weight": size for name, size in sizes.items()}
    if architecture in ("qwen2", "gpt-oss", "glm4moe"):
        biased = sizes if architecture == "gpt-oss" else ("q", "k", "v")
        found |= {f"attn_{name}.bias": sizes[name][1:] for name in biased}
    large = architecture == "glm4moe" and shape["block_count"] > 90  # "GLM-4.5 355B variant" of glm4-moe.cpp
    if large or architecture in ("qwen3", "qwen3moe", *DELTA_NETS, "gemma3", "gemma3n", "gemma4"):
        found |= {"attn_q_norm.weight": (head,), "attn_k_norm.weight": (head,)}
    if architecture == "minimax-m2":
        found |= {"attn_q_norm.weight": (queries,), "attn_k_norm.weight": (keys,)}
    if architecture == "command-r" and shape["block_count"] >= 64:
        found |= {f"attn_{name}_norm.weight": (head, sizes[name][1] // head) for name in ("q", "k")}
    if architecture == "gpt-oss":
        found["attn_sinks.weight"] = (shape["attention.head_count"],)
    if architecture == "qwen4exp":
        count, length = (shape[f"attention.{name}"] for name in INDEXER)
        found |= {"indexer.q_proj.weight": (width, count * length), "indexer.k_proj.weight": (width, length)}
        found |= {"indexer.q_norm.weight": (length,), "indexer.k_norm.weight": (length,)}
    return found | (_mamba2(shape) if architecture == "falcon-h1" else {})


def _latent_attention(shape: Shape, layer: int) -> dict[str, Sizes]:
    architecture, width, heads = (shape[key] for key in ("architecture", "embedding_length", "attention.head_count"))
    found: dict[str, Sizes] = {}
    if architecture == "glm5-next":
        found = _hyper_connections(shape) if layer < shape["block_count"] - shape["nextn_predict_layers"] else {}
        if not _of_layer(shape["attention.head_count_kv"], layer):
            return found | _kimi_delta(shape)
    rotated = shape["rope.dimension_count"]
    ranks, rank, key, value = (shape[f"attention.{name}"] for name in MLA)
    sizes: dict[str, Sizes] = {"attn_q_a": (width, ranks), "attn_q_a_norm": (ranks,), "attn_q_b": (ranks, heads * key)}
    sizes |= {"attn_kv_a_mqa": (width, rank + rotated), "attn_kv_a_norm": (rank,)}
    sizes |= {"attn_k_b": (key - rotated, rank, heads), "attn_v_b": (rank, value, heads)}
    sizes |= {"attn_output": (heads * value, width)}
    if architecture != "deepseek2":
        count, length = (shape[f"attention.{name}"] for name in INDEXER)
        found["indexer.k_norm.bias"] = (length,)
        sizes |= {"indexer.k_norm": (length,), "indexer.proj": (width, count)}
        sizes |= {"indexer.attn_k": (width, length), "indexer.attn_q_b": (ranks, count * length)}
        if architecture == "glm5-next":
            pooled = shape["attention.indexer.kpool"]
            sizes |= {"indexer_compressor_gate": (width, length), "indexer_compressor_ape": (length, pooled)}
    return found | {f"{name}.weight": size for name, size in sizes.items()}


def _hyper_connections(shape: Shape) -> dict[str, Sizes]:
    width, streams = shape["embedding_length"], shape["hyper_connection.count"]
    mixed, wide = (2 + streams) * streams, streams * width
    sizes: dict[str, Sizes] = {"fn": (wide, mixed), "base": (mixed,), "scale": (3,)}
    if rank := shape.get("hyper_connection.low_rank"):
        sizes = {"norm": (wide,), "down": (wide, rank), "up": (rank, wide), "inject": (wide, streams)}
    return {f"hc_{part}_{name}.weight": size for part in ("attn", "ffn") for name, size in sizes.items()}


def _ngrams(shape: Shape) -> dict[str, Sizes]:
    width, wide = shape["embedding_length"], shape["hyper_connection.count"] * shape["embedding_length"]
    sizes: dict[str, Sizes] = {f"norm_{name}": (wide,) for name in ("key", "query", "conv")}
    sizes |= {"key": (width, wide), "value": (width, width), "conv1d": (shape["ple.conv_kernel"], wide)}
    return {f"ple_{name}.weight": size for name, size in sizes.items()}


def _compressed_attention(shape: Shape, layer: int) -> dict[str, Sizes]:
    """Of DeepSeek V4: all heads have one key, and most layers compress what is before the window."""
    width, heads, head = (shape[key] for key in ("embedding_length", "attention.head_count", "attention.key_length"))
    ranks, groups, narrow = (shape[f"attention.{name}"] for name in ("q_lora_rank", *OUTPUT))
    sizes: dict[str, Sizes] = {"attn_q_a": (width, ranks), "attn_q_a_norm": (ranks,), "attn_q_b": (ranks, heads * head)}
    sizes |= {"attn_kv": (width, head), "attn_kv_a_norm": (head,), "attn_sinks": (heads,)}
    sizes |= {"attn_output_a": (heads * head // groups, narrow * groups), "attn_output_b": (groups * narrow, width)}
    compressors = [("attn_compressor", head)]
    ratio = _of_layer(shape["attention.compress_ratios"], layer)
    if ratio == 4:
        count, length = (shape[f"attention.{name}"] for name in INDEXER)
        sizes |= {"indexer.proj": (width, count), "indexer.attn_q_b": (ranks, count * length)}
        compressors.append(("indexer_compressor", length))
    for name, size in compressors if ratio else []:
        mixed = 2 * size if ratio == 4 else size
        sizes |= {f"{name}_kv": (width, mixed), f"{name}_gate": (width, mixed)}
        sizes |= {f"{name}_ape": (mixed, ratio), f"{name}_norm": (size,)}
    return _hyper_connections(shape) | {f"{name}.weight": size for name, size in sizes.items()}


def _kimi_delta(shape: Shape) -> dict[str, Sizes]:
    width, heads, kernel, head = (
        shape[key] for key in ("embedding_length", "attention.head_count", "ssm.conv_kernel", "kda.head_dim")
    )
    inner = heads * head
    sizes: dict[str, Sizes] = {f"attn_{name}": (width, inner) for name in "qkv"}
    sizes |= {f"ssm_conv1d_{name}": (kernel, 1, inner) for name in "qkv"}
    sizes |= {f"ssm_{name}_a": (width, head) for name in "fg"} | {f"ssm_{name}_b": (head, inner) for name in "fg"}
    sizes |= {"ssm_beta": (width, heads), "ssm_norm": (head,), "attn_output": (inner, width)}
    return {f"{name}.weight": size for name, size in sizes.items()} | {"ssm_a": (heads,), "ssm_dt.bias": (inner,)}


def _mamba2(shape: Shape) -> dict[str, Sizes]:
    width, kernel, inner, state, heads, groups = (
        shape[key] for key in ("embedding_length", *(f"ssm.{name}" for name in SSM))
    )
    mixed = inner + 2 * groups * state
    return {
        "ssm_in.weight": (width, inner + mixed + heads), "ssm_conv1d.weight": (kernel, mixed),
        "ssm_conv1d.bias": (mixed,), "ssm_dt.bias": (heads,), "ssm_a": (1, heads), "ssm_d": (1, heads),
        "ssm_out.weight": (inner, width), "ssm_norm.weight": (inner // groups, groups),
    }  # fmt: skip


def _delta_net(shape: Shape) -> dict[str, Sizes]:
    width, kernel, values, state, heads, groups = (
        shape[key] for key in ("embedding_length", *(f"ssm.{name}" for name in SSM))
    )
    mixed = 2 * groups * state + values
    return {
        "attn_qkv.weight": (width, mixed), "attn_gate.weight": (width, values), "ssm_conv1d.weight": (kernel, mixed),
        "ssm_dt.bias": (heads,), "ssm_a": (heads,), "ssm_norm.weight": (state,), "ssm_out.weight": (values, width),
    } | (
        {"ssm_ba.weight": (width, 2 * heads)}
        if shape["architecture"] == "qwen3next"
        else {"ssm_alpha.weight": (width, heads), "ssm_beta.weight": (width, heads)}
    )  # fmt: skip


def _norms(shape: Shape) -> dict[str, Sizes]:
    architecture, width = shape["architecture"], (shape["embedding_length"],)
    if architecture == "qwen4exp":
        return _hyper_connections(shape)
    found = ["attn_norm.weight"]
    if architecture in ("gpt-oss", "glm4moe", *DELTA_NETS):
        found.append("post_attention_norm.weight")
    elif architecture not in ("command-r", "nemotron_h_moe"):
        found.append("ffn_norm" if architecture == "falcon-h1" else "ffn_norm.weight")
    if architecture.startswith("gemma"):
        found += ["post_attention_norm.weight", "post_ffw_norm.weight"]
    if architecture == "gemma4" and shape.get("expert_count"):
        found += ["pre_ffw_norm_2.weight", "post_ffw_norm_1.weight", "post_ffw_norm_2.weight", "ffn_gate_inp.scale"]
    scale: dict[str, Sizes] = {"layer_output_scale.weight": (1,)} if architecture == "gemma4" else {}
    return dict.fromkeys(found, width) | scale | (_altup(shape) if architecture.startswith("gemma") else {})


def _altup(shape: Shape) -> dict[str, Sizes]:
    """The embedding of the layer, and of Gemma 3n alternating updates and their low-rank bypass."""
    width, narrow = shape["embedding_length"], shape.get("embedding_length_per_layer_input", 0)
    sizes = {"inp_gate": (width, narrow), "proj": (narrow, width), "post_norm": (width,)} if narrow else {}
    if shape["architecture"] != "gemma3n":
        return {f"{name}.weight": size for name, size in sizes.items()}
    sizes |= {
        "altup_correct_coef": (ALTUP, ALTUP), "altup_correct_scale": (width,),
        "altup_predict_coef": (ALTUP, ALTUP**2), "altup_router": (width, ALTUP), "altup_router_norm": (width,),
        "laurel_l": (width, LAUREL), "laurel_r": (LAUREL, width), "laurel_post_norm": (width,),
    }  # fmt: skip
    return {f"{name}.weight": size for name, size in sizes.items()}


def _matrices(shape: Shape, inner: int) -> dict[str, tuple[int, int]]:
    """Of a feed-forward network or an expert of this width."""
    width = shape["embedding_length"]
    gate = {} if shape["architecture"] == "nemotron_h_moe" else {"gate": (width, inner)}
    return gate | {"up": (width, inner), "down": (inner, width)}


def _feed_forward(shape: Shape, layer: int) -> dict[str, Sizes]:
    sizes = _matrices(shape, _of_layer(shape["feed_forward_length"], layer))
    return {f"ffn_{name}.weight": size for name, size in sizes.items()}


def _mixture(shape: Shape, layer: int) -> dict[str, Sizes]:
    architecture, width, count = shape["architecture"], shape["embedding_length"], shape["expert_count"]
    inner = shape.get("expert_feed_forward_length") or shape["feed_forward_length"]
    sizes = _matrices(shape, inner)
    merged = {"gate_up": (width, 2 * inner), "down": (inner, width)} if architecture == "gemma4" else sizes
    found: dict[str, Sizes] = {f"ffn_{name}_exps.weight": (*size, count) for name, size in merged.items()}
    found["ffn_gate_inp.weight"] = (width, count)
    if architecture == "gpt-oss":
        found |= {f"ffn_{name}_exps.bias": (size[1], count) for name, size in sizes.items()}
        found["ffn_gate_inp.bias"] = (count,)
    elif architecture == "gemma4":
        found["ffn_down_exps.scale"] = (count,)
    elif layer < shape.get("hash_layer_count", 0):
        found["ffn_gate_tid2eid.weight"] = (shape["expert_used_count"], shape["vocab_size"])
    elif architecture in BIASED:
        found["exp_probs_b.bias"] = (count,)
    shared = shape.get("expert_shared_feed_forward_length") or inner * shape.get("expert_shared_count", 0)
    if shared:
        found |= {f"ffn_{name}_shexp.weight": size for name, size in _matrices(shape, shared).items()}
    if shared and architecture in DELTA_NETS:
        found["ffn_gate_inp_shexp.weight"] = (width,)
    return found


def _type(name: str, sizes: Sizes, shape: Shape, values: Sequence[int]) -> str:
    """As llama-quantize chooses it without an importance matrix (llama-quant.cpp); `values`: layers with values."""
    file, layer, count, experts = shape["type"], _layer(name), shape["block_count"], shape.get("expert_count", 0)
    kind, part = TYPES[file][1], name.removesuffix(".weight").rpartition(".")[2]
    if part in shape.get("types", {}):
        return str(shape["types"][part])
    if len(sizes) < 2 or not name.endswith(".weight") or any(part in name for part in NOT_QUANTISED):
        return "F32"
    if kind in ("F16", "BF16", "Q8_0"):
        return "MXFP4" if file == "MXFP4_MOE" and len(sizes) == 3 else kind
    if part == "output" or (part == "token_embd" and shape.get("tied")):
        kind = "Q6_K"
    elif part == "per_layer_model_proj":
        kind = "F16"
    elif file == "Q4_K_M":
        place, of = (values.index(layer), len(values)) if part in ("attn_v", "attn_qkv") else (layer, count)
        more = place < of // 8 or place >= 7 * of // 8 or (place - of // 8) % 3 == 2
        if part in ("attn_v", "attn_k") and experts == 8:
            kind = "Q8_0"
        elif part == "attn_output" and experts == 8:
            kind = "Q5_K"
        elif part in ("attn_v", "attn_qkv", "ffn_down", "ffn_down_exps", "ffn_down_shexp") and more:
            kind = "Q6_K"
        elif part == "attn_v" and count == 80:
            kind = "Q5_K"  # llama.cpp's LLM_TYPE_70B
    if sizes[0] % BLOCKS[kind][1]:
        kind = SHORTER_BLOCKS.get(kind, kind)
    return kind if sizes[0] % BLOCKS[kind][1] == 0 else "F16"
