"""Tiny GGUFs of Gemma 4 and of a head for it, and changed copies of any GGUF.

Keys and tensors are those that llama.cpp asks for (src/models/gemma4.cpp, gemma4-assistant.cpp); sizes here are rows
first.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_files import VOCAB, byte_level_vocab
from gguf_writer import Reader, add, begin, finish

gguf = pytest.importorskip("gguf", reason="gguf is not installed: pip install 'edgespec[convert]'")

WIDTH, HIDDEN, HEADS, KV_HEADS, HEAD, WINDOW_HEAD, WINDOW = 128, 256, 4, 2, 32, 16, 64
OWN_WIDTH = 64  # of the head
PER_LAYER = 32  # of a layer's own embedding
WINDOWED = (True, True, True, False, True, False)  # Gemma 4's layers with a sliding window
Shapes = Iterator[tuple[str, tuple[int, ...]]]


def write_gemma4(path: Path, wide: int = 1) -> Path:
    """
    Args:
        path: where to.
        wide: times that the layers are as large, so that they stream.
    """
    writer = _writer(path, "gemma4", len(WINDOWED), WIDTH)
    writer.add_feed_forward_length(wide * HIDDEN)
    _windows(writer, WINDOWED)
    add(writer, shared_kv_layers=2, final_logit_softcapping=30.0, embedding_length_per_layer_input=PER_LAYER)
    return _write(writer, _gemma4(wide * HIDDEN))


def write_assistant(path: Path) -> Path:
    """A head for `write_gemma4`."""
    layers = (True, False)
    writer = _writer(path, "gemma4-assistant", len(layers), OWN_WIDTH)
    writer.add_feed_forward_length(HIDDEN)
    _windows(writer, layers)
    add(writer, shared_kv_layers=len(layers), embedding_length_out=WIDTH, nextn_predict_layers=len(layers))
    return _write(writer, _assistant(layers))


def _writer(path: Path, arch: str, layers: int, width: int) -> Any:
    writer = begin(
        path,
        arch,
        name="tiny",
        block_count=layers,
        embedding_length=width,
        head_count=HEADS,
        head_count_kv=KV_HEADS,
    )
    byte_level_vocab(writer)
    return writer


def _windows(writer: Any, windowed: tuple[bool, ...]) -> None:
    add(writer, sliding_window=WINDOW, sliding_window_pattern=list(windowed), rope_freq_base_swa=10000.0)
    add(writer, key_length=HEAD, value_length=HEAD, rope_dimension_count=HEAD)
    add(writer, key_length_swa=WINDOW_HEAD, value_length_swa=WINDOW_HEAD, rope_dimension_count_swa=WINDOW_HEAD)


def _write(writer: Any, shapes: Shapes) -> Path:
    generator = np.random.default_rng(0)
    for name, sizes in shapes:
        writer.add_tensor(name, _values(generator, name, sizes))
    return _close(writer)


def _close(writer: Any) -> Path:
    finish(writer)
    return Path(writer.path)


def _values(generator: np.random.Generator, name: str, sizes: tuple[int, ...]) -> Any:
    found = generator.standard_normal(sizes)
    if "norm" in name or name.endswith(("output_scale.weight", "rope_freqs.weight")):
        found = 1 + 0.1 * found
    elif name != "token_embd.weight":
        found /= np.sqrt(sizes[-1])
    return found.astype(np.float32)


def _gemma4(hidden: int) -> Shapes:
    layers = len(WINDOWED)
    yield "token_embd.weight", (VOCAB, WIDTH)
    yield "output_norm.weight", (WIDTH,)
    yield "rope_freqs.weight", (HEAD // 2,)
    yield "per_layer_token_embd.weight", (VOCAB, PER_LAYER * layers)
    yield "per_layer_model_proj.weight", (PER_LAYER * layers, WIDTH)
    yield "per_layer_proj_norm.weight", (PER_LAYER,)
    for layer, windowed in enumerate(WINDOWED):
        head = WINDOW_HEAD if windowed else HEAD
        own = {
            "attn_norm": (WIDTH,), "attn_q": (HEADS * head, WIDTH), "attn_k": (KV_HEADS * head, WIDTH),
            "attn_v": (KV_HEADS * head, WIDTH), "attn_output": (WIDTH, HEADS * head), "attn_q_norm": (head,),
            "attn_k_norm": (head,), "post_attention_norm": (WIDTH,), "ffn_norm": (WIDTH,),
            "ffn_gate": (hidden, WIDTH), "ffn_up": (hidden, WIDTH), "ffn_down": (WIDTH, hidden),
            "post_ffw_norm": (WIDTH,), "inp_gate": (PER_LAYER, WIDTH), "proj": (WIDTH, PER_LAYER),
            "post_norm": (WIDTH,), "layer_output_scale": (1,),
        }  # fmt: skip
        yield from ((f"blk.{layer}.{name}.weight", sizes) for name, sizes in own.items())


def _assistant(layers: tuple[bool, ...]) -> Shapes:
    yield "token_embd.weight", (VOCAB, OWN_WIDTH)
    yield "output_norm.weight", (OWN_WIDTH,)
    yield "rope_freqs.weight", (HEAD // 2,)
    yield "nextn.pre_projection.weight", (OWN_WIDTH, 2 * WIDTH)
    yield "nextn.post_projection.weight", (WIDTH, OWN_WIDTH)
    for layer, windowed in enumerate(layers):
        head = WINDOW_HEAD if windowed else HEAD
        own = {
            "attn_norm": (OWN_WIDTH,), "attn_q": (HEADS * head, OWN_WIDTH), "attn_output": (OWN_WIDTH, HEADS * head),
            "attn_q_norm": (head,), "post_attention_norm": (OWN_WIDTH,), "layer_output_scale": (1,),
            "ffn_norm": (OWN_WIDTH,), "ffn_gate": (HIDDEN, OWN_WIDTH), "ffn_up": (HIDDEN, OWN_WIDTH),
            "ffn_down": (OWN_WIDTH, HIDDEN), "post_ffw_norm": (OWN_WIDTH,),
        }  # fmt: skip
        yield from ((f"blk.{layer}.{name}.weight", sizes) for name, sizes in own.items())


def copy(
    source: Path,
    path: Path,
    keys: Mapping[str, Any] = {},
    tensor: Callable[[str, Any], Any] = lambda name, values: values,
) -> Path:
    """A copy of a GGUF in float32.

    Args:
        source: the GGUF.
        path: of the copy.
        keys: other values, without the architecture's name, each with its type; None: the key is left out.
        tensor: returns other values of a tensor; None: it is left out.
    """
    reader = Reader(source)
    arch = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(path, arch)
    changed = {f"{arch}.{key}": value for key, value in keys.items()}
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture" or name in changed:
            continue
        inner = field.types[1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), field.types[0], inner)
    for name, value in changed.items():
        if value is not None:
            writer.add_key_value(name, *value)
    for one in reader.tensors:
        values = tensor(one.name, np.array(one.data))
        if values is not None:
            writer.add_tensor(one.name, values)
    return _close(writer)
