"""The models that texts are recorded of: made once into a folder, which recordings only read.

A kind is a target NAME.gguf and its draft NAME-draft.gguf. Weights are random with a fixed seed; a draft is a rougher
copy of its target, so some of its draft tokens are right and some are wrong. Real models are linked, where they are.
"""

import ctypes
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from gguf_files import VOCAB, byte_level_vocab, gguf
from hybrid_files import write_hybrid
from mixture_files import write_mixture

LAYERS, WIDTH, HIDDEN, HEADS, KV_HEADS, HEAD, WINDOW = 7, 128, 256, 4, 2, 32, 32  # the sixth layer has no window
Q4_0, Q2_K = 2, 10  # llama_ftype in llama.h
MADE_UP = ("mixture", "hybrid", "windowed")
REAL = {  # target, draft; without a draft one is made of the target
    "smollm2": ("SmolLM2-135M-Instruct.Q4_1.gguf", None),
    "pair": ("qwen2.5-coder-1.5b-instruct-q4_k_m.gguf", "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"),
}


def make_models(folder: Path, real: Path | None = None, kinds: Sequence[str] = MADE_UP) -> list[str]:
    """Make what the folder does not have; the kinds that are missing.

    Args:
        folder: where to.
        real: the folder of the files named in `REAL`; None: made-up models only.
        kinds: of made-up models.
    """
    folder.mkdir(parents=True, exist_ok=True)
    missing = []
    for kind in kinds:
        target, draft = folder / f"{kind}.gguf", folder / f"{kind}-draft.gguf"
        if not target.exists():
            _write(target, kind)
        if not draft.exists():
            _rougher(target, draft, Q4_0)
    for kind, (target_name, draft_name) in REAL.items() if real else ():
        assert real
        source, target, draft = real / target_name, folder / f"{kind}.gguf", folder / f"{kind}-draft.gguf"
        if not source.exists() or (draft_name and not (real / draft_name).exists()):
            missing.append(kind)
            continue
        if not target.exists():
            target.symlink_to(source.resolve())
        if draft.exists():
            continue
        if draft_name:
            draft.symlink_to((real / draft_name).resolve())
        else:
            _rougher(target, draft, Q2_K)
    return missing


def _write(path: Path, kind: str) -> None:
    part = path.with_suffix(".part")
    if kind == "mixture":
        write_mixture(part, "qwen3 moe", seed=1)
    elif kind == "hybrid":
        write_hybrid(part, "granitehybrid", seed=1)
    else:
        write_windowed(part, seed=1)
    part.rename(path)


def _rougher(source: Path, target: Path, kind: int) -> None:
    """A copy with fewer bits in a weight."""
    import llama_cpp

    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = kind
    params.allow_requantize = True
    part = target.with_suffix(".part")
    if llama_cpp.llama_model_quantize(bytes(source), bytes(part), ctypes.byref(params)) != 0:
        raise RuntimeError(f"no rougher copy of {source} can be made")
    part.rename(target)


def write_windowed(path: Path, seed: int = 0) -> Path:
    """A model of Gemma 3's kind: five layers of six see only a window of the last tokens."""
    writer = gguf.GGUFWriter(path, "gemma3")
    writer.add_name("tiny")
    writer.add_file_type(0)
    writer.add_block_count(LAYERS)
    writer.add_context_length(2048)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD)
    writer.add_value_length(HEAD)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1000000.0)
    writer.add_sliding_window(WINDOW)
    byte_level_vocab(writer)
    rng = np.random.default_rng(seed)

    def matrix(name: str, *sizes: int) -> None:
        writer.add_tensor(f"{name}.weight", (rng.normal(size=sizes) / np.sqrt(sizes[-1])).astype(np.float32))

    def norm(name: str, size: int, around: float = 1.0) -> None:
        values = around * (1 + 0.1 * rng.normal(size=size))
        writer.add_tensor(f"{name}.weight", values.astype(np.float32))

    matrix("token_embd", VOCAB, WIDTH)
    matrix("output", VOCAB, WIDTH)  # of its own: with the embedding's a random model repeats its last token
    norm("output_norm", WIDTH, around=3.0)
    for layer in range(LAYERS):
        name = f"blk.{layer}"
        for part in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"):
            norm(f"{name}.{part}", WIDTH)
        for part in ("attn_q_norm", "attn_k_norm"):
            norm(f"{name}.{part}", HEAD)
        matrix(f"{name}.attn_q", HEADS * HEAD, WIDTH)
        matrix(f"{name}.attn_k", KV_HEADS * HEAD, WIDTH)
        matrix(f"{name}.attn_v", KV_HEADS * HEAD, WIDTH)
        matrix(f"{name}.attn_output", WIDTH, HEADS * HEAD)
        matrix(f"{name}.ffn_gate", HIDDEN, WIDTH)
        matrix(f"{name}.ffn_up", HIDDEN, WIDTH)
        matrix(f"{name}.ffn_down", WIDTH, HIDDEN)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
