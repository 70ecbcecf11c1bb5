"""Tiny mixtures of experts as GGUF files, with random weights of 8 bits or in float32."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_files import VOCAB, byte_level_vocab, gguf
from gguf_writer import begin, finish

WIDTH, HEADS, HEAD, LAYERS, EXPERTS = 128, 4, 32, 3, 8
KINDS = {  # architecture, experts used, width of an expert
    "mixtral": ("llama", 2, 224),
    "qwen3 moe": ("qwen3moe", 3, 96),
    "gpt-oss": ("gpt-oss", 2, 160),
}


def write_mixture(
    path: Path,
    kind: str,
    seed: int = 0,
    *,
    bits: int = 8,
    used: int | None = None,
    split: int = 0,
    scales: bool = False,
) -> Path:
    """A model that llama.cpp loads, with matrices of 8 or of 32 bits.

    Args:
        path: of the file.
        kind: of `KINDS`.
        seed: of the weights.
        bits: of the matrices: 8 or 32.
        used: number of experts that a row chooses; None: that of `kind`.
        split: tensors of a part; 0: one file.
        scales: each expert has a factor, as Gemma 4's.
    """
    architecture, chosen, inner = KINDS[kind]
    rng = np.random.default_rng(seed)
    writer = begin(
        path,
        architecture,
        split,
        block_count=LAYERS,
        embedding_length=WIDTH,
        feed_forward_length=inner,
        expert_feed_forward_length=inner,
        head_count=HEADS,
        head_count_kv=HEADS,
        key_length=HEAD,
        value_length=HEAD,
        rope_dimension_count=HEAD,
        expert_count=EXPERTS,
        expert_used_count=used or chosen,
        vocab_size=VOCAB,
        file_type=7 if bits == 8 else 0,
    )
    if kind == "gpt-oss":
        writer.add_sliding_window(128)
    byte_level_vocab(writer)

    def matrix(name: str, *sizes: int) -> None:
        values = (rng.normal(size=sizes) / np.sqrt(sizes[-1])).astype(np.float32)
        kind = gguf.GGMLQuantizationType.Q8_0 if bits == 8 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)

    def floats(name: str, *sizes: int, around: float = 0.0) -> None:
        writer.add_tensor(name, (around + 0.3 * rng.normal(size=sizes)).astype(np.float32))

    matrix("token_embd.weight", VOCAB, WIDTH)
    matrix("output.weight", VOCAB, WIDTH)
    floats("output_norm.weight", WIDTH, around=1)
    for layer in range(LAYERS):
        for part in ("q", "k", "v"):
            matrix(f"blk.{layer}.attn_{part}.weight", HEADS * HEAD, WIDTH)
        matrix(f"blk.{layer}.attn_output.weight", WIDTH, HEADS * HEAD)
        floats(f"blk.{layer}.attn_norm.weight", WIDTH, around=1)
        floats(f"blk.{layer}.ffn_gate_inp.weight", EXPERTS, WIDTH)
        matrix(f"blk.{layer}.ffn_down_exps.weight", EXPERTS, WIDTH, inner)
        matrix(f"blk.{layer}.ffn_gate_exps.weight", EXPERTS, inner, WIDTH)
        matrix(f"blk.{layer}.ffn_up_exps.weight", EXPERTS, inner, WIDTH)
        if scales:
            floats(f"blk.{layer}.ffn_down_exps.scale", EXPERTS, around=1)
        if kind == "qwen3 moe":
            floats(f"blk.{layer}.attn_q_norm.weight", HEAD, around=1)
            floats(f"blk.{layer}.attn_k_norm.weight", HEAD, around=1)
        if kind == "gpt-oss":
            floats(f"blk.{layer}.post_attention_norm.weight", WIDTH, around=1)
            floats(f"blk.{layer}.attn_sinks.weight", HEADS)
            floats(f"blk.{layer}.ffn_gate_inp.bias", EXPERTS)
            for part, size in (("down", WIDTH), ("gate", inner), ("up", inner)):
                floats(f"blk.{layer}.ffn_{part}_exps.bias", EXPERTS, size)
            for part in ("q", "k", "v", "output"):
                floats(f"blk.{layer}.attn_{part}.bias", WIDTH)
        else:
            floats(f"blk.{layer}.ffn_norm.weight", WIDTH, around=1)
    finish(writer)
    return path


@pytest.fixture(scope="session")
def mixtures(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Paths by kind."""
    folder = tmp_path_factory.mktemp("mixtures")
    scaled = write_mixture(folder / "scaled.gguf", "qwen3 moe", scales=True)
    return {kind: write_mixture(folder / f"{kind}.gguf", kind) for kind in KINDS} | {"scaled": scaled}
