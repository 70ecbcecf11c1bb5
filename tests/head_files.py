"""GGUFs of tiny heads with random weights, for the made-up targets of `gguf_files.py` and `hybrid_files.py`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_files import VOCAB, byte_level_vocab

gguf = pytest.importorskip("gguf", reason="gguf is not installed: pip install 'edgespec[convert]'")


def write_eagle3(
    path: Path,
    *,
    width: int = 256,
    layers: Sequence[int] = (1, 2, 3),
    known: Sequence[int] | None = None,
    whole: bool = False,
    vocab: int = VOCAB,
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
        changed: keys of the header, without "eagle3.".
    """
    writer, generator = gguf.GGUFWriter(path, "eagle3"), np.random.default_rng(1)
    writer.add_file_type(0)
    keys: dict[str, Any] = {
        "block_count": 1, "context_length": 2048, "embedding_length": width, "feed_forward_length": 2 * width,
        "attention.head_count": 4, "attention.head_count_kv": 2, "attention.key_length": 64,
        "attention.value_length": 64, "rope.dimension_count": 64, "target_hidden_size": width,
    }  # fmt: skip
    for name, value in (keys | changed).items():
        writer.add_uint32(f"eagle3.{name}", value)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_array("eagle3.target_layers", list(layers))
    if vocab == VOCAB:
        byte_level_vocab(writer)
    else:
        writer.add_tokenizer_model("none")
        writer.add_vocab_size(vocab)
    shapes: dict[str, tuple[int, ...]] = {
        "fc": (width, 3 * width), "output_norm": (width,), "output": (len(known) if known else vocab, width),
        "blk.0.attn_norm": (width,), "blk.0.attn_norm_2": (width,), "blk.0.ffn_norm": (width,),
        "blk.0.attn_q": (256, 2 * width), "blk.0.attn_k": (128, 2 * width), "blk.0.attn_v": (128, 2 * width),
        "blk.0.attn_output": (width, 256), "blk.0.ffn_gate": (2 * width, width), "blk.0.ffn_up": (2 * width, width),
        "blk.0.ffn_down": (width, 2 * width),
    }  # fmt: skip
    if whole:
        shapes["token_embd"] = (vocab, width)
    for name, shape in shapes.items():
        spread = generator.normal(0, 1 / np.sqrt(shape[-1]), shape)
        values = 1 + 0.1 * spread if name.endswith(("norm", "norm_2")) else spread
        writer.add_tensor(f"{name}.weight", values.astype(np.float32))
    if known:
        writer.add_tensor("d2t", np.array(known, np.int64))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
