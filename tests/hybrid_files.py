"""GGUFs of tiny models with recurrent layers, with random weights in float32: one of each architecture.

Tensors and their sizes are those that llama.cpp asks for (src/models/*.cpp); sizes here are rows first.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_files import VOCAB, byte_level_vocab
from gguf_writer import add, finish

gguf = pytest.importorskip("gguf", reason="gguf is not installed: pip install 'edgespec[convert]'")

WIDTH, HIDDEN, HEADS, KV_HEADS, HEAD = 64, 128, 4, 2, 16
CONV, STATE, INNER, RANK, GROUPS = 4, 16, 128, 8, 2  # of state-space layers
KEY_HEADS, VALUE_HEADS = 2, 4  # of gated delta nets, whose heads are STATE wide
EXPERTS = 4
LAYERS = 4
ATTENTION = (1, 3)  # layers that are not recurrent, where others are
ARCHITECTURES = (
    "lfm2", "granitehybrid", "falcon-h1", "qwen3next", "qwen35", "nemotron_h", "mamba", "mamba2",
)  # fmt: skip
Shapes = Iterator[tuple[str, tuple[int, ...]]]


def write_hybrid(path: Path, arch: str, seed: int = 0, spread: float = 1.0) -> Path:
    """A model of this architecture; with a `spread` of 1.0 a layer's output is about as large as its input."""
    writer = gguf.GGUFWriter(path, arch)
    _header(writer, arch)
    byte_level_vocab(writer)
    generator = np.random.default_rng(seed)
    for name, sizes in _tensors(arch):
        writer.add_tensor(name, _values(generator, name, sizes, spread))
    finish(writer)
    return path


def _values(generator: np.random.Generator, name: str, sizes: tuple[int, ...], spread: float) -> Any:
    last = name.removesuffix(".weight")
    if last.endswith("norm"):
        found = 1 + 0.1 * generator.standard_normal(sizes)
    elif last.endswith("ssm_a"):
        found = -generator.uniform(0.05, 1.0, sizes)  # how fast a state fades
    elif last.endswith(("conv", "conv1d")):
        found = generator.standard_normal(sizes) / np.sqrt(CONV)
    elif last == "token_embd":
        found = generator.standard_normal(sizes)
    elif last == "output":
        found = 3 * generator.standard_normal(sizes) / np.sqrt(sizes[-1])
    else:
        found = spread * generator.standard_normal(sizes) / np.sqrt(sizes[-1])
    return found.astype(np.float32)


def _header(writer: Any, arch: str) -> None:
    add(
        writer,
        name="tiny",
        file_type=0,
        block_count=LAYERS,
        context_length=2048,
        embedding_length=WIDTH,
        layer_norm_rms_eps=1e-5,
    )
    some = [KV_HEADS if layer in ATTENTION else 0 for layer in range(LAYERS)]
    if arch in ("mamba", "mamba2"):
        add(writer, feed_forward_length=0, head_count=0)
    elif arch == "nemotron_h":
        add(
            writer,
            feed_forward_length=[0, 0, HIDDEN, 0],
            head_count=HEADS,
            head_count_kv=[0, KV_HEADS, 0, 0],
            layer_norm_eps=1e-5,
        )
    else:
        add(writer, feed_forward_length=HIDDEN, head_count=HEADS)
        everywhere = arch in ("falcon-h1", "qwen3next", "qwen35")
        writer.add_head_count_kv(KV_HEADS if everywhere else some)
    if not arch.startswith("mamba"):
        add(writer, key_length=HEAD, value_length=HEAD, rope_dimension_count=HEAD, rope_freq_base=10000.0)
    if arch == "lfm2":
        writer.add_shortconv_l_cache(CONV)
        return
    add(writer, ssm_conv_kernel=CONV, ssm_state_size=STATE)
    delta = arch in ("qwen3next", "qwen35")
    add(
        writer,
        ssm_inner_size=VALUE_HEADS * STATE if delta else INNER,
        ssm_time_step_rank=VALUE_HEADS if delta else RANK,
    )
    if arch != "mamba":
        writer.add_ssm_group_count(KEY_HEADS if delta else GROUPS)
    if delta:
        writer.add_full_attention_interval(2)
    if arch == "qwen35":
        writer.add_rope_dimension_sections([4, 2, 2, 0])
    if arch == "qwen3next":
        add(
            writer,
            expert_count=EXPERTS,
            expert_used_count=2,
            expert_feed_forward_length=HIDDEN,
            expert_shared_feed_forward_length=HIDDEN,
        )


def _tensors(arch: str) -> Shapes:
    yield "token_embd.weight", (VOCAB, WIDTH)
    yield ("token_embd_norm.weight" if arch == "lfm2" else "output_norm.weight"), (WIDTH,)
    yield "output.weight", (VOCAB, WIDTH)
    for layer in range(LAYERS):
        for name, sizes in _layer(arch, layer):
            yield f"blk.{layer}.{name}", sizes


def _layer(arch: str, layer: int) -> Shapes:
    yield "attn_norm.weight", (WIDTH,)
    if arch == "mamba":
        yield from _mamba()
    elif arch == "mamba2":
        yield from _mamba2()
    elif arch == "falcon-h1":
        yield from _mamba2()
        yield from _attention(1)
        yield "ffn_norm", (WIDTH,)  # without .weight
        yield from _feed_forward()
    elif arch == "nemotron_h":
        yield from (_mamba2(), _attention(1), _squared_feed_forward(), _mamba2())[layer]
    elif arch in ("qwen3next", "qwen35"):
        yield "post_attention_norm.weight", (WIDTH,)
        yield from _attention(2, norms=True) if layer in ATTENTION else _delta_net(arch)
        yield from _mixture() if arch == "qwen3next" else _feed_forward()
    else:
        yield "ffn_norm.weight", (WIDTH,)
        if layer in ATTENTION:
            yield from _attention(1, norms=arch == "lfm2")
        else:
            yield from _short_convolution() if arch == "lfm2" else _mamba2()
        yield from _feed_forward()


def _attention(queries: int, norms: bool = False) -> Shapes:
    """`queries`: 2, if half of them are gates."""
    yield "attn_q.weight", (queries * HEADS * HEAD, WIDTH)
    yield "attn_k.weight", (KV_HEADS * HEAD, WIDTH)
    yield "attn_v.weight", (KV_HEADS * HEAD, WIDTH)
    yield "attn_output.weight", (WIDTH, HEADS * HEAD)
    if norms:
        yield "attn_q_norm.weight", (HEAD,)
        yield "attn_k_norm.weight", (HEAD,)


def _feed_forward() -> Shapes:
    yield "ffn_gate.weight", (HIDDEN, WIDTH)
    yield "ffn_up.weight", (HIDDEN, WIDTH)
    yield "ffn_down.weight", (WIDTH, HIDDEN)


def _squared_feed_forward() -> Shapes:
    yield "ffn_up.weight", (HIDDEN, WIDTH)
    yield "ffn_down.weight", (WIDTH, HIDDEN)


def _mixture() -> Shapes:
    yield "ffn_gate_inp.weight", (EXPERTS, WIDTH)
    yield "ffn_gate_exps.weight", (EXPERTS, HIDDEN, WIDTH)
    yield "ffn_up_exps.weight", (EXPERTS, HIDDEN, WIDTH)
    yield "ffn_down_exps.weight", (EXPERTS, WIDTH, HIDDEN)
    yield "ffn_gate_inp_shexp.weight", (WIDTH,)
    yield "ffn_gate_shexp.weight", (HIDDEN, WIDTH)
    yield "ffn_up_shexp.weight", (HIDDEN, WIDTH)
    yield "ffn_down_shexp.weight", (WIDTH, HIDDEN)


def _short_convolution() -> Shapes:
    yield "shortconv.conv.weight", (WIDTH, CONV)
    yield "shortconv.in_proj.weight", (3 * WIDTH, WIDTH)
    yield "shortconv.out_proj.weight", (WIDTH, WIDTH)


def _mamba() -> Shapes:
    yield "ssm_in.weight", (2 * INNER, WIDTH)
    yield "ssm_conv1d.weight", (INNER, CONV)
    yield "ssm_conv1d.bias", (INNER,)
    yield "ssm_x.weight", (RANK + 2 * STATE, INNER)
    yield "ssm_dt.weight", (INNER, RANK)
    yield "ssm_dt.bias", (INNER,)
    yield "ssm_a", (INNER, STATE)
    yield "ssm_d", (INNER,)
    yield "ssm_out.weight", (WIDTH, INNER)


def _mamba2() -> Shapes:
    mixed = INNER + 2 * GROUPS * STATE
    yield "ssm_in.weight", (INNER + mixed + RANK, WIDTH)
    yield "ssm_conv1d.weight", (mixed, CONV)
    yield "ssm_conv1d.bias", (mixed,)
    yield "ssm_dt.bias", (RANK,)
    yield "ssm_a", (RANK, 1)
    yield "ssm_d", (RANK, 1)
    yield "ssm_norm.weight", (GROUPS, INNER // GROUPS)
    yield "ssm_out.weight", (WIDTH, INNER)


def _delta_net(arch: str) -> Shapes:
    keys, values = KEY_HEADS * STATE, VALUE_HEADS * STATE
    yield "attn_qkv.weight", (2 * keys + values, WIDTH)
    yield "attn_gate.weight", (values, WIDTH)
    yield "ssm_conv1d.weight", (2 * keys + values, CONV)
    yield "ssm_dt.bias", (VALUE_HEADS,)
    yield "ssm_a", (VALUE_HEADS,)
    if arch == "qwen3next":
        yield "ssm_ba.weight", (2 * VALUE_HEADS, WIDTH)
    else:
        yield "ssm_beta.weight", (VALUE_HEADS, WIDTH)
        yield "ssm_alpha.weight", (VALUE_HEADS, WIDTH)
    yield "ssm_norm.weight", (STATE,)
    yield "ssm_out.weight", (WIDTH, values)


def write_with_head(path: Path, parts: str = "both", arch: str = "qwen35") -> Path:
    """A model of layers that are large enough to stream, and one layer more: a head that predicts further tokens.

    Args:
        path: where to.
        parts: "both", "model" or "head".
        arch: "qwen35", or "qwen3next", a mixture whose head is one, too.
    """
    layers = LAYERS
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"WIDTH": 256, "HIDDEN": 1024, "HEAD": 64, "LAYERS": layers + (parts != "model")}.items():
            patch.setitem(globals(), name, value)
        header, layer = _header, _layer

        def of_parts(arch: str, i: int) -> Shapes:
            if i == layers:
                return _head(arch)
            return iter(()) if parts == "head" else layer(arch, i)

        def with_head(writer: Any, arch: str) -> None:
            header(writer, arch)
            if parts != "model":
                writer.add_uint32(f"{arch}.nextn_predict_layers", 1)

        patch.setitem(globals(), "_layer", of_parts)
        patch.setitem(globals(), "_header", with_head)
        return write_hybrid(path, arch)


def _head(arch: str) -> Shapes:
    """As published with Qwen3.5: a whole layer, and the tensors that lead into it and out of it."""
    yield "attn_norm.weight", (WIDTH,)
    yield "post_attention_norm.weight", (WIDTH,)
    yield from _attention(2, norms=True)
    yield from _mixture() if arch == "qwen3next" else _feed_forward()
    yield "nextn.eh_proj.weight", (WIDTH, 2 * WIDTH)
    yield from ((f"nextn.{name}.weight", (WIDTH,)) for name in ("enorm", "hnorm", "shared_head_norm"))
