"""Tiny mixtures of experts of six families as GGUFs, with random weights of any type that llama.cpp quantises to.

Keys and tensors are those that llama.cpp asks for (src/models/*.cpp); sizes here are rows first.
"""

import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from edgespec.backends.llamacpp.ggml.files import ggml_base, ggml_library
from gguf_files import VOCAB, byte_level_vocab, gguf
from gguf_writer import add, begin, finish

WIDTH, INNER, HEADS, KV_HEADS, HEAD, LAYERS, EXPERTS, USED = 256, 256, 4, 2, 64, 4, 16, 3
RANK, ROTATED = 256, 32  # of deepseek2's attention
FAMILIES = ("qwen3moe", "gpt-oss", "glm4moe", "gemma4", "deepseek2", "lfm2moe")
TYPES = {"F32": 0, "Q4_0": 2, "Q8_0": 8, "Q4_K": 12, "MXFP4": 39}  # ggml_type
Shapes = Iterator[tuple[str, tuple[int, ...]]]


def write(path: Path, family: str, kind: str, experts: int = EXPERTS) -> Path:
    """A model of `family` whose matrices are of `kind`, one of `TYPES`; more experts are larger, too."""
    writer = begin(
        path,
        family,
        block_count=LAYERS,
        embedding_length=WIDTH,
        feed_forward_length=INNER,
        head_count=HEADS,
        vocab_size=VOCAB,
        expert_count=experts,
        expert_used_count=USED,
        expert_feed_forward_length=INNER * experts // EXPERTS,
        rope_dimension_count=ROTATED if family == "deepseek2" else HEAD,
    )
    add(writer, **_keys(family))
    byte_level_vocab(writer)
    rng = np.random.default_rng(0)
    for name, sizes in _tensors(family, experts):
        values = rng.normal(size=sizes).astype(np.float32)
        plain = sizes[-1] % WIDTH or len(sizes) == 1 or "ffn_gate_inp" in name or ".bias" in name
        if len(sizes) == 1:
            values = 0.3 * values + ("norm" in name)
        else:
            values /= np.sqrt(sizes[-1])
        type_ = TYPES["F32" if plain else kind]
        writer.add_tensor(name, _quantised(values, type_), raw_dtype=gguf.GGMLQuantizationType(type_))
    finish(writer)
    return path


def _quantised(values: Any, type_: int) -> Any:
    if type_ == 0:
        return values
    library, rows = ggml_library("ggml-base"), values.reshape(-1, values.shape[-1])
    found = np.zeros((*values.shape[:-1], ggml_base().ggml_row_size(type_, values.shape[-1])), np.uint8)
    number, pointer = ctypes.c_int64, ctypes.c_void_p
    library.ggml_quantize_chunk(
        type_, pointer(rows.ctypes.data), pointer(found.ctypes.data), number(0), *map(number, rows.shape), None
    )
    return found


def _keys(family: str) -> dict[str, Any]:
    attention = {"head_count_kv": KV_HEADS, "key_length": HEAD, "value_length": HEAD}
    shared = {"expert_shared_count": 1, "leading_dense_block_count": 1, "expert_weights_scale": 1.5}
    return {
        "qwen3moe": attention,
        "gpt-oss": attention | {"sliding_window": 128},
        "glm4moe": attention | shared | {"expert_weights_norm": True},
        "gemma4": attention
        | {
            "sliding_window": 64,
            "sliding_window_pattern": [layer % 2 == 0 for layer in range(LAYERS)],
            "embedding_length_per_layer_input": 0,
            "rope_freq_base_swa": 10000.0,
            "key_length_swa": HEAD,
            "value_length_swa": HEAD,
            "rope_dimension_count_swa": HEAD,
            "shared_kv_layers": 0,
        },
        "deepseek2": shared
        | {
            "head_count_kv": 1,
            "q_lora_rank": RANK,
            "kv_lora_rank": RANK,
            "key_length": RANK + ROTATED,
            "value_length": RANK,
            "key_length_mla": HEAD,
            "value_length_mla": HEAD,
        },
        "lfm2moe": {
            "head_count_kv": [KV_HEADS * (layer % 2) for layer in range(LAYERS)],
            "shortconv_l_cache": 4,
            "leading_dense_block_count": 1,
            "expert_gating_func": gguf.ExpertGatingFuncType.SIGMOID,
        },
    }[family]


def _tensors(family: str, experts: int) -> Shapes:
    yield "token_embd.weight", (VOCAB, WIDTH)
    yield "output.weight", (VOCAB, WIDTH)
    yield ("token_embd_norm.weight" if family == "lfm2moe" else "output_norm.weight"), (WIDTH,)
    if family == "gemma4":
        yield "rope_freqs.weight", (HEAD // 2,)
    for layer in range(LAYERS):
        for name, sizes in (*_attention(family, layer), *_feed_forward(family, layer, experts)):
            yield f"blk.{layer}.{name}", sizes


def _attention(family: str, layer: int) -> Shapes:
    yield "attn_norm.weight", (WIDTH,)
    if family == "lfm2moe" and layer % 2 == 0:
        yield "shortconv.conv.weight", (WIDTH, 4)
        yield "shortconv.in_proj.weight", (3 * WIDTH, WIDTH)
        yield "shortconv.out_proj.weight", (WIDTH, WIDTH)
        return
    yield "attn_output.weight", (WIDTH, HEADS * HEAD)
    if family == "deepseek2":
        yield "attn_q_a.weight", (RANK, WIDTH)
        yield "attn_q_a_norm.weight", (RANK,)
        yield "attn_q_b.weight", (HEADS * HEAD, RANK)
        yield "attn_kv_a_mqa.weight", (RANK + ROTATED, WIDTH)
        yield "attn_kv_a_norm.weight", (RANK,)
        yield "attn_k_b.weight", (HEADS, RANK, HEAD - ROTATED)
        yield "attn_v_b.weight", (HEADS, HEAD, RANK)
        return
    for part, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
        yield f"attn_{part}.weight", (heads * HEAD, WIDTH)
        if family == "gpt-oss":
            yield f"attn_{part}.bias", (heads * HEAD,)
    if family == "gpt-oss":
        yield "attn_output.bias", (WIDTH,)
        yield "attn_sinks.weight", (HEADS,)
    elif family != "glm4moe":
        yield "attn_q_norm.weight", (HEAD,)
        yield "attn_k_norm.weight", (HEAD,)


def _feed_forward(family: str, layer: int, experts: int) -> Shapes:
    inner = INNER * experts // EXPERTS
    after = family in ("glm4moe", "gpt-oss", "gemma4")
    if after:
        yield "post_attention_norm.weight", (WIDTH,)
    if family not in ("glm4moe", "gpt-oss"):
        yield "ffn_norm.weight", (WIDTH,)
    leading = layer == 0 and family in ("glm4moe", "deepseek2", "lfm2moe")
    if leading or family == "gemma4":
        yield from _dense("")
    if leading:
        return
    if family == "gemma4":
        yield "post_ffw_norm.weight", (WIDTH,)
        for name in ("pre_ffw_norm_2", "post_ffw_norm_1", "post_ffw_norm_2"):
            yield f"{name}.weight", (WIDTH,)
        yield "ffn_gate_inp.scale", (WIDTH,)
        yield "ffn_gate_up_exps.weight", (experts, 2 * inner, WIDTH)
    else:
        yield "ffn_gate_exps.weight", (experts, inner, WIDTH)
        yield "ffn_up_exps.weight", (experts, inner, WIDTH)
    yield "ffn_gate_inp.weight", (experts, WIDTH)
    yield "ffn_down_exps.weight", (experts, WIDTH, inner)
    if family in ("glm4moe", "deepseek2", "lfm2moe"):
        yield "exp_probs_b.bias", (experts,)
    if family in ("glm4moe", "deepseek2"):
        yield from _dense("_shexp", inner)
    if family == "gpt-oss":
        yield "ffn_gate_inp.bias", (experts,)
        for part, size in (("down", WIDTH), ("gate", inner), ("up", inner)):
            yield f"ffn_{part}_exps.bias", (experts, size)


def _dense(suffix: str, inner: int = INNER) -> Shapes:
    yield f"ffn_gate{suffix}.weight", (inner, WIDTH)
    yield f"ffn_up{suffix}.weight", (inner, WIDTH)
    yield f"ffn_down{suffix}.weight", (WIDTH, inner)
