"""GGUFs of tiny transformers models, written as llama.cpp's convert_hf_to_gguf.py writes them.

Names come from gguf's own map and layouts are spelled out again here, so nothing is shared with what is tested.
"""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gguf_writer import add, finish
from numpy.typing import NDArray

gguf = pytest.importorskip("gguf", reason="gguf is not installed: pip install 'edgespec[convert]'")

Array = NDArray[Any]
ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mixtral": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
    "gemma": gguf.MODEL_ARCH.GEMMA,
    "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
}
VOCAB = 288
EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(.*)")


def byte_level_vocab(writer: Any, pre: str = "smollm") -> None:
    """256 bytes, some merges, special tokens."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    merges = ["Ġ t", "h e", "Ġt he", "i n", "Ġ Ġ", "1 2", "Ã ©", "Ċ Ċ"]
    tokens = [*alphabet.values(), *(merge.replace(" ", "") for merge in merges)]
    ordinary = len(tokens)
    tokens += ["<|im_start|>", "<|im_end|>", "<think>"]
    tokens += [f"[PAD{i}]" for i in range(len(tokens), VOCAB)]
    kinds = [1] * ordinary + [3, 3, 4] + [5] * (VOCAB - ordinary - 3)
    add(
        writer,
        tokenizer_model="gpt2",
        tokenizer_pre=pre,
        token_list=tokens,
        token_types=kinds,
        token_merges=merges,
        eos_token_id=tokens.index("<|im_end|>"),
        chat_template="{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}",
    )


def sentencepiece_vocab(writer: Any) -> None:
    """Gemma's kind: pieces with scores, bytes for what is left. All characters are pieces, as in real ones."""
    pieces = [
        "▁",
        "t",
        "h",
        "e",
        "a",
        "o",
        "n",
        "s",
        "▁t",
        "he",
        "▁the",
        "▁a",
        "th",
        "the",
        "at",
        "on",
        "1",
        "2",
        "é",
        "\n",
    ]
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    kinds = [3, 3, 3, 2] + [6] * 256 + [1] * len(pieces)
    scores = [0.0] * 260 + [-float(i) for i in range(len(pieces))]
    tokens += ["<start_of_turn>", "<end_of_turn>", "    "]  # a run of spaces, as in Gemma's vocabulary
    kinds += [3, 3, 4]
    tokens += [f"<unused{i}>" for i in range(len(tokens), VOCAB)]
    kinds += [5] * (VOCAB - len(kinds))
    add(
        writer,
        tokenizer_model="llama",
        token_list=tokens,
        token_types=kinds,
        token_scores=scores + [-1000.0] * (VOCAB - len(scores)),
        bos_token_id=2,
        eos_token_id=1,
        unk_token_id=3,
        pad_token_id=0,
        add_bos_token=True,
        add_space_prefix=False,
    )


def write_gguf(path: Path, config: Any, weights: dict[str, Array], split: int = 0) -> Path:
    """A model in float32.

    Args:
        path: where to; of a split GGUF, the name without its number.
        config: the transformers configuration.
        weights: named as in a published folder, experts one by one.
        split: most tensors in a file; 0 = one file.
    """
    kind = config.model_type
    arch = ARCHITECTURES[kind]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch], split_max_tensors=split)
    _write_header(writer, config)
    sentencepiece_vocab(writer) if kind.startswith("gemma") else byte_level_vocab(writer)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for name, values in _merge_experts(weights).items():
        if kind in ("llama", "mixtral") and (match := re.search(r"\.([qk])_proj\.", name)):
            heads = config.num_attention_heads if match[1] == "q" else config.num_key_value_heads
            halves = values.reshape(heads, 2, len(values) // heads // 2, *values.shape[1:])
            values = halves.swapaxes(1, 2).reshape(values.shape)
        if kind.startswith("gemma") and name.endswith("norm.weight"):
            values = values + 1
        new_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert new_name is not None, name
        writer.add_tensor(new_name, np.ascontiguousarray(values, np.float32))
    if (factors := _llama3_factors(config)) is not None:
        writer.add_tensor("rope_freqs.weight", factors)
    finish(writer)
    return path


def small_llama(
    path: Path,
    layers: int = 4,
    idle: tuple[int, ...] = (),
    width: int = 256,
    kind: str = "llama",
    split: int = 0,
    pooling: str = "",
) -> Path:
    """A made-up Llama in float32, wide enough for llama.cpp's K types.

    Args:
        path: where to.
        layers: how many.
        idle: layers that add nothing.
        width: of a state: a multiple of 64.
        kind: another type of model, of the same weights.
        split: as for `write_gguf`.
        pooling: of embeddings, in the header.
    """
    inner, heads = 512, width // 64
    keys = heads // 2 if heads % 2 == 0 else 1
    config = SimpleNamespace(
        model_type=kind, hidden_size=width, intermediate_size=inner, num_hidden_layers=layers, head_dim=64,
        num_attention_heads=heads, num_key_value_heads=keys, max_position_embeddings=2048, rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, pooling=pooling,
    )  # fmt: skip
    rows = {"self_attn.q": width, "self_attn.k": 64 * keys, "self_attn.v": 64 * keys, "self_attn.o": width}
    rows |= {"mlp.gate": inner, "mlp.up": inner, "mlp.down": width}
    shapes: dict[str, tuple[int, ...]] = {f"model.{name}.weight": (VOCAB, width) for name in ("embed_tokens",)}
    shapes |= {"lm_head.weight": (VOCAB, width), "model.norm.weight": (width,)}
    for layer in range(layers):
        name = f"model.layers.{layer}"
        shapes |= {f"{name}.{norm}_layernorm.weight": (width,) for norm in ("input", "post_attention")}
        for part, count in rows.items():
            shapes[f"{name}.{part}_proj.weight"] = (count, inner if part == "mlp.down" else width)
    generator = np.random.default_rng(0)
    # Norms around 1: with small ones a missing token would move a logit by hardly more than rounding does.
    weights = {
        name: generator.normal(1.0 if "norm" in name else 0.0, 0.1, shape).astype(np.float32)
        for name, shape in shapes.items()
    }
    for layer in idle:
        for part in ("self_attn.o", "mlp.down"):
            weights[f"model.layers.{layer}.{part}_proj.weight"][:] = 0
    return write_gguf(path, config, weights, split)


def _write_header(writer: Any, config: Any) -> None:
    kind = config.model_type
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    add(
        writer,
        name="tiny",
        file_type=0,
        block_count=config.num_hidden_layers,
        context_length=config.max_position_embeddings,
        embedding_length=config.hidden_size,
        feed_forward_length=config.intermediate_size,
        head_count=config.num_attention_heads,
        head_count_kv=config.num_key_value_heads,
        layer_norm_rms_eps=config.rms_norm_eps,
        key_length=head_dim,
        value_length=head_dim,
    )
    if kind in ("llama", "mixtral"):
        writer.add_rope_dimension_count(head_dim)
    rope = dict(config.rope_parameters)
    rope = rope.get("full_attention", rope)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope.get("rope_type") in ("linear", "yarn"):
        scaling = gguf.RopeScalingType.LINEAR if rope["rope_type"] == "linear" else gguf.RopeScalingType.YARN
        add(writer, rope_scaling_type=scaling, rope_scaling_factor=rope["factor"])
        if "original_max_position_embeddings" in rope:
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if pooling := getattr(config, "pooling", ""):
        writer.add_pooling_type(gguf.PoolingType[pooling])
    if kind == "mixtral":
        add(writer, expert_count=config.num_local_experts, expert_used_count=config.num_experts_per_tok)
    if kind == "qwen3_moe":
        add(
            writer,
            expert_count=config.num_experts,
            expert_used_count=config.num_experts_per_tok,
            expert_feed_forward_length=config.moe_intermediate_size,
        )
    if kind in ("gemma2", "gemma3_text"):
        writer.add_sliding_window(config.sliding_window)
    if kind == "gemma2":
        add(
            writer,
            attn_logit_softcapping=config.attn_logit_softcapping,
            final_logit_softcapping=config.final_logit_softcapping,
        )


def _merge_experts(weights: dict[str, Array]) -> dict[str, Array]:
    merged = {name: values for name, values in weights.items() if not EXPERT.fullmatch(name)}
    experts: dict[str, dict[int, Array]] = {}
    for name, values in weights.items():
        if match := EXPERT.fullmatch(name):
            experts.setdefault(f"{match[1]}.{match[3]}", {})[int(match[2])] = values
    return merged | {name: np.stack([parts[i] for i in sorted(parts)]) for name, parts in experts.items()}


def _llama3_factors(config: Any) -> Array | None:
    """Llama 3's frequency factors, element by element, as convert_hf_to_gguf.py computes them."""
    rope = config.rope_parameters
    if rope.get("rope_type") != "llama3":
        return None
    low = rope["original_max_position_embeddings"] / rope["low_freq_factor"]
    high = rope["original_max_position_embeddings"] / rope["high_freq_factor"]
    factors = []
    for i in range(0, config.head_dim, 2):
        wavelength = 2 * np.pi * rope["rope_theta"] ** (i / config.head_dim)
        if wavelength < high:
            factors.append(1.0)
        elif wavelength > low:
            factors.append(rope["factor"])
        else:
            smooth = (rope["original_max_position_embeddings"] / wavelength - rope["low_freq_factor"]) / (
                rope["high_freq_factor"] - rope["low_freq_factor"]
            )
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, np.float32)
