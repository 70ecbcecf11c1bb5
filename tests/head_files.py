"""GGUFs of tiny heads with random weights, for the made-up targets of `gguf_files.py` and `hybrid_files.py`."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_files import VOCAB, byte_level_vocab
from gguf_writer import add, finish

gguf = pytest.importorskip("gguf", reason="gguf is not installed: pip install 'edgespec[convert]'")


def write_eagle3(
    path: Path,
    *,
    width: int = 256,
    layers: Sequence[int] = (1, 2, 3),
    known: Sequence[int] | None = None,
    whole: bool = False,
    vocab: int = VOCAB,
    norm: bool = False,
    **changed: Any,
) -> Path:
    """A head as convert_hf_to_gguf.py of llama.cpp writes it.

    Args:
        path: where to.
        width: of a state, as of the target.
        layers: of the target, whose inputs it starts from.
        known: the target's tokens that it can draft; None: all.
        whole: it has an embedding of its own.
        vocab: tokens of the target; those of another number have no texts.
        norm: states have a norm of their own.
        changed: keys of the header, without "eagle3.".
    """
    writer = gguf.GGUFWriter(path, "eagle3")
    writer.add_file_type(0)
    keys: dict[str, Any] = {
        "block_count": 1, "context_length": 2048, "embedding_length": width, "feed_forward_length": 2 * width,
        "attention.head_count": 4, "attention.head_count_kv": 2, "attention.key_length": 64,
        "attention.value_length": 64, "rope.dimension_count": 64, "target_hidden_size": width,
    }  # fmt: skip
    for name, value in (keys | changed).items():
        writer.add_uint32(f"eagle3.{name}", value)
    add(writer, layer_norm_rms_eps=1e-5, rope_freq_base=10000.0)
    writer.add_array("eagle3.target_layers", list(layers))
    if vocab == VOCAB:
        byte_level_vocab(writer)
    else:
        add(writer, tokenizer_model="none", vocab_size=vocab)
    shapes: dict[str, tuple[int, ...]] = {
        "fc": (width, 3 * width), "output_norm": (width,), "output": (len(known) if known else vocab, width),
        "blk.0.attn_norm": (width,), "blk.0.attn_norm_2": (width,), "blk.0.ffn_norm": (width,),
        "blk.0.attn_q": (256, 2 * width), "blk.0.attn_k": (128, 2 * width), "blk.0.attn_v": (128, 2 * width),
        "blk.0.attn_output": (width, 256), "blk.0.ffn_gate": (2 * width, width), "blk.0.ffn_up": (2 * width, width),
        "blk.0.ffn_down": (width, 2 * width),
    }  # fmt: skip
    if norm:
        writer.add_bool("eagle3.norm_before_fc", True)
        shapes["enc.output_norm"] = (3 * width,)
    if whole:
        shapes["token_embd"] = (vocab, width)
    if known:
        writer.add_tensor("d2t", np.array(known, np.int64))
    return _written(writer, shapes, 1, path)


def write_glm4moe(
    path: Path, width: int = 256, hidden: int = 128, experts: int = 4, layers: int = 3, bits: int = 32
) -> Path:
    """A mixture of experts with a head of its own, the last layer, which asks for all rows of the layer before."""
    keys = {
        "feed_forward_length": hidden, "expert_count": experts, "expert_used_count": 2, "expert_shared_count": 1,
        "expert_feed_forward_length": hidden, "leading_dense_block_count": 1,
    }  # fmt: skip

    def feed_forward(layer: int) -> dict[str, tuple[int, ...]]:
        found: dict[str, tuple[int, ...]] = {"post_attention_norm": (width,)}
        parts = {"": (hidden, width)} if layer == 0 else {"_exps": (experts, hidden, width), "_shexp": (hidden, width)}
        for part, shape in parts.items():
            found |= {f"ffn_gate{part}": shape, f"ffn_up{part}": shape, f"ffn_down{part}": (*shape[:-2], width, hidden)}
        return found | ({"ffn_gate_inp": (experts, width), "exp_probs_b.bias": (experts,)} if layer else {})

    writer, shapes = _with_heads(path, "glm4moe", keys, width, layers, 1, feed_forward, file_type=7 if bits == 8 else 0)
    return _written(writer, shapes, 2, path, bits)


def write_step35(path: Path, width: int = 256, layers: int = 3, heads: int = 3) -> Path:
    """A model with a chain of heads, and a sliding window in every second layer."""
    keys = {
        "feed_forward_length": 2 * width, "expert_feed_forward_length": width, "attention.sliding_window": 64,
    }  # fmt: skip
    wide = {"ffn_gate": (2 * width, width), "ffn_up": (2 * width, width), "ffn_down": (width, 2 * width)}
    writer, shapes = _with_heads(
        path, "step35", keys, width, layers, heads, lambda layer: {"ffn_norm": (width,), **wide}
    )
    writer.add_array("step35.attention.sliding_window_pattern", [layer % 2 == 1 for layer in range(layers + heads)])
    return _written(writer, shapes, 4, path)


def _with_heads(
    path: Path,
    kind: str,
    keys: dict[str, int],
    width: int,
    layers: int,
    heads: int,
    feed_forward: Callable[[int], dict[str, tuple[int, ...]]],
    file_type: int = 0,
) -> tuple[Any, dict[str, tuple[int, ...]]]:
    """The header of a model with heads for multi-token prediction, its last layers, and the shapes of all tensors."""
    writer = gguf.GGUFWriter(path, kind)
    writer.add_file_type(file_type)
    common = {
        "block_count": layers + heads, "nextn_predict_layers": heads, "context_length": 2048, "embedding_length": width,
        "attention.head_count": 4, "attention.head_count_kv": 2, "attention.key_length": 64,
        "attention.value_length": 64, "rope.dimension_count": 64,
    }  # fmt: skip
    for name, value in (common | keys).items():
        writer.add_uint32(f"{kind}.{name}", value)
    add(writer, layer_norm_rms_eps=1e-5, rope_freq_base=10000.0)
    byte_level_vocab(writer)
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd": (VOCAB, width),
        "output_norm": (width,),
        "output": (VOCAB, width),
    }
    for layer in range(layers + heads):
        found = {"attn_norm": (width,), "attn_q": (256, width), "attn_k": (128, width), "attn_v": (128, width)}
        found |= {"attn_output": (width, 256), **feed_forward(layer)}
        if layer >= layers:
            found |= {"nextn.eh_proj": (width, 2 * width)}
            found |= {f"nextn.{name}": (width,) for name in ("enorm", "hnorm", "shared_head_norm")}
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in found.items()}
    return writer, shapes


def _written(writer: Any, shapes: dict[str, tuple[int, ...]], seed: int, path: Path, bits: int = 32) -> Path:
    generator, small = np.random.default_rng(seed), gguf.GGMLQuantizationType.Q8_0
    for name, shape in shapes.items():
        spread = generator.normal(0, 1 / np.sqrt(shape[-1]), shape)
        values = 1 + 0.1 * spread if name.endswith(("norm", "norm_2")) else spread
        values, kind = values.astype(np.float32), None
        if bits == 8 and len(shape) > 1 and not name.endswith("ffn_gate_inp"):
            values, kind = gguf.quants.quantize(values, small), small
        writer.add_tensor(name if name.endswith("bias") else f"{name}.weight", values, raw_dtype=kind)
    finish(writer)
    return path
