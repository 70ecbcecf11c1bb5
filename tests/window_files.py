"""GGUFs of tiny models whose layers look back over a sliding window, with random weights in float32.

Tensors and their sizes are those that llama.cpp asks for (src/models/*.cpp); sizes here are rows first.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from gguf_files import VOCAB, byte_level_vocab
from gguf_writer import begin, finish
from mixture_files import write_mixture

WIDTH, HIDDEN, HEADS, KV_HEADS, HEAD, LAYERS = 64, 128, 4, 2, 16, 4
WINDOW = 16
ARCHITECTURES = ("gemma2", "gemma3", "cohere2", "gpt-oss")  # the last has a window of 128


def write_windowed(path: Path, arch: str, seed: int = 0, layers: int = LAYERS) -> Path:
    """A model of this architecture; of Gemma 3's layers every sixth has no window."""
    if arch == "gpt-oss":
        return write_mixture(path, arch, seed)
    writer = begin(
        path,
        arch,
        name="tiny",
        block_count=layers,
        embedding_length=WIDTH,
        feed_forward_length=HIDDEN,
        head_count=HEADS,
        head_count_kv=KV_HEADS,
        layer_norm_eps=1e-5,
        key_length=HEAD,
        value_length=HEAD,
        rope_dimension_count=HEAD,
        sliding_window=WINDOW,
        logit_scale=1.0,
    )
    byte_level_vocab(writer)
    generator = np.random.default_rng(seed)
    for name, sizes in _tensors(arch, layers):
        values = generator.standard_normal(sizes)
        if name.endswith("norm.weight"):
            values = 1 + 0.1 * values
        elif name != "token_embd.weight":
            values = values / np.sqrt(sizes[-1])
        writer.add_tensor(name, values.astype(np.float32))
    finish(writer)
    return path


def _tensors(arch: str, layers: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "token_embd.weight", (VOCAB, WIDTH)
    yield "output_norm.weight", (WIDTH,)
    if arch == "gemma3":  # of the others the output matrix is the embedding, so a text says one token again and again
        yield "output.weight", (VOCAB, WIDTH)
    queries, keys = HEADS * HEAD, KV_HEADS * HEAD
    for layer in range(layers):
        shapes = {"attn_norm": (WIDTH,), "attn_output": (WIDTH, queries), "ffn_down": (WIDTH, HIDDEN)}
        shapes |= {"attn_q": (queries, WIDTH), "attn_k": (keys, WIDTH), "attn_v": (keys, WIDTH)}
        shapes |= {"ffn_gate": (HIDDEN, WIDTH), "ffn_up": (HIDDEN, WIDTH)}
        if arch.startswith("gemma"):
            shapes |= dict.fromkeys(("post_attention_norm", "ffn_norm", "post_ffw_norm"), (WIDTH,))
        if arch == "gemma3":
            shapes |= dict.fromkeys(("attn_q_norm", "attn_k_norm"), (HEAD,))
        for name, sizes in shapes.items():
            yield f"blk.{layer}.{name}.weight", sizes
