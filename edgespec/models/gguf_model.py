"""Names of GGUF, transformers and mlx-lm for one model: configuration, tensor names, tensor layouts.

It reverses llama.cpp's convert_hf_to_gguf.py. Values that a header lacks (Gemma's attention scale) follow llama.cpp's
rules. Any other model is refused, because a folder that computes something else is worse than none.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from edgespec.errors import ModelError
from edgespec.loop.sampling import Float32Array
from edgespec.models.gguf_header import LARGEST, MOST_LAYERS, check_header_number

Metadata = Mapping[str, Any]
Shapes = Mapping[str, tuple[int, ...]]  # tensor name -> shape, outermost dimension first

ATTENTION = {
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
}
MLP = {
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
NORMS = {"attn_norm.weight": "input_layernorm.weight", "ffn_norm.weight": "post_attention_layernorm.weight"}
FOUR_NORMS = {
    "attn_norm.weight": "input_layernorm.weight",
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    "ffn_norm.weight": "pre_feedforward_layernorm.weight",
    "post_ffw_norm.weight": "post_feedforward_layernorm.weight",
}
HEAD_NORMS = {"attn_q_norm.weight": "self_attn.q_norm.weight", "attn_k_norm.weight": "self_attn.k_norm.weight"}
MIXTRAL_EXPERTS = {  # {} is the expert: its matrices lie in one GGUF tensor
    "ffn_gate_inp.weight": "block_sparse_moe.gate.weight",
    "ffn_gate_exps.weight": "block_sparse_moe.experts.{}.w1.weight",
    "ffn_down_exps.weight": "block_sparse_moe.experts.{}.w2.weight",
    "ffn_up_exps.weight": "block_sparse_moe.experts.{}.w3.weight",
}
QWEN_EXPERTS = {
    "ffn_gate_inp.weight": "mlp.gate.weight",
    "ffn_gate_exps.weight": "mlp.experts.{}.gate_proj.weight",
    "ffn_up_exps.weight": "mlp.experts.{}.up_proj.weight",
    "ffn_down_exps.weight": "mlp.experts.{}.down_proj.weight",
}
TOP = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
OUTPUT = {"output.weight": "lm_head.weight"}  # absent where the embedding is used again
ROPE_FACTORS = "rope_freqs.weight"


def _biases(weights: Mapping[str, str], *parts: str) -> dict[str, str]:
    return {f"{part}.bias": weights[f"{part}.weight"].removesuffix("weight") + "bias" for part in parts}


QKV_BIASES = _biases(ATTENTION, "attn_q", "attn_k", "attn_v")
ATTENTION_BIASES = _biases(ATTENTION, "attn_q", "attn_k", "attn_v", "attn_output")
MLP_BIASES = _biases(MLP, "ffn_gate", "ffn_up", "ffn_down")

COMMON_KEYS = frozenset({
    "block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size", "attention.head_count",
    "attention.head_count_kv", "attention.key_length", "attention.value_length",
    "attention.layer_norm_rms_epsilon", "rope.freq_base", "rope.dimension_count",
})  # fmt: skip
SCALING_KEYS = frozenset(
    {"rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length", "rope.scaling.finetuned"}
)


@dataclass(frozen=True, slots=True)
class Family:
    model_type: str
    class_name: str
    layer: Mapping[str, str]  # tensors of a layer: GGUF name -> name in the folder
    optional: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # config flag -> tensors it brings
    keys: frozenset[str] = frozenset()
    interleaved: bool = False  # rows of q and k are ordered for llama.cpp's rotation of neighbours
    norm_offset: bool = False  # norms are stored as 1 + weight


LLAMA = Family(
    "llama",
    "LlamaForCausalLM",
    ATTENTION | NORMS | MLP,
    {"attention_bias": ATTENTION_BIASES, "mlp_bias": MLP_BIASES},
    SCALING_KEYS,
    interleaved=True,
)
MIXTRAL = Family(
    "mixtral",
    "MixtralForCausalLM",
    ATTENTION | NORMS | MIXTRAL_EXPERTS,
    keys=frozenset({"expert_count", "expert_used_count"}),
    interleaved=True,
)
FAMILIES = {
    "llama": LLAMA,
    "qwen2": Family("qwen2", "Qwen2ForCausalLM", ATTENTION | QKV_BIASES | NORMS | MLP, keys=SCALING_KEYS),
    "qwen3": Family("qwen3", "Qwen3ForCausalLM", ATTENTION | HEAD_NORMS | NORMS | MLP, keys=SCALING_KEYS),
    "qwen3moe": Family(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        ATTENTION | HEAD_NORMS | NORMS | QWEN_EXPERTS,
        keys=SCALING_KEYS | {"expert_count", "expert_used_count", "expert_feed_forward_length"},
    ),
    "gemma": Family("gemma", "GemmaForCausalLM", ATTENTION | NORMS | MLP, norm_offset=True),
    "gemma2": Family(
        "gemma2",
        "Gemma2ForCausalLM",
        ATTENTION | FOUR_NORMS | MLP,
        keys=frozenset({"attention.sliding_window", "attn_logit_softcapping", "final_logit_softcapping"}),
        norm_offset=True,
    ),
    "gemma3": Family(
        "gemma3_text",
        "Gemma3ForCausalLM",
        ATTENTION | HEAD_NORMS | FOUR_NORMS | MLP,
        keys=SCALING_KEYS | {"attention.sliding_window", "attention.sliding_window_pattern", "rope.freq_base_swa"},
        norm_offset=True,
    ),
}


def find_family(metadata: Metadata) -> Family:
    """Raises:
    ModelError: none known here, or the header states something that this family is not known to have.
    """
    name = metadata.get("general.architecture")
    if name not in FAMILIES:
        raise ModelError(f"architecture {name!r} cannot be converted; these can: {', '.join(FAMILIES)}")
    family = MIXTRAL if name == "llama" and metadata.get("llama.expert_count", 0) else FAMILIES[name]
    known = COMMON_KEYS | family.keys | ({"expert_count", "expert_used_count"} if family is LLAMA else set())
    stated = {key.removeprefix(f"{name}.") for key in metadata if key.startswith(f"{name}.")}
    if stated - known:
        strange = f"{name}.{min(stated - known)}"
        raise ModelError(
            f"the header states {strange} = {metadata[strange]!r}, which cannot be carried over to {family.model_type}"
        )
    return family


def model_config(metadata: Metadata, shapes: Shapes, rope_factors: Float32Array | None = None) -> dict[str, Any]:
    """config.json, as transformers 4 and 5 and mlx-lm read it; without the type of the weights and the token ids.

    Args:
        metadata: the header.
        shapes: of all tensors.
        rope_factors: the tensor `rope_freqs.weight`, shape [head_dim / 2], where there is one.

    Raises:
        ModelError: the header lacks something, or says something that the folder form cannot say.
    """
    family = find_family(metadata)
    name = metadata["general.architecture"]

    def read(key: str, default: Any = None) -> Any:
        value = metadata.get(f"{name}.{key}", default)
        if value is None:
            raise ModelError(f"the header does not state {name}.{key}")
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise ModelError(f"{name}.{key} differs from layer to layer, which {family.model_type} cannot express")
            return value[0]
        return value

    def count(key: str, default: Any = None, low: int = 1, high: int = LARGEST) -> int:
        return check_header_number("", f"{name}.{key}", read(key, default), low, high)

    def decimal(key: str, default: Any = None) -> float:
        if not isinstance(value := read(key, default), float) or not math.isfinite(value):
            raise ModelError(f"is damaged: {name}.{key} is {value!r}, but must be a decimal number")
        return value

    if "token_embd.weight" not in shapes:
        raise ModelError("the tensor token_embd.weight is missing")
    hidden, heads = count("embedding_length"), count("attention.head_count")
    head_dim = count("attention.key_length", hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if (other := read(key, head_dim)) != head_dim:
            raise ModelError(f"{name}.{key} is {other}, but only {head_dim}, the size of a head, is supported")
    config: dict[str, Any] = {
        "architectures": [family.class_name],
        "model_type": family.model_type,
        "vocab_size": shapes["token_embd.weight"][0],
        "hidden_size": hidden,
        # Absent where all layers have experts; loaders want a number, and nothing uses it.
        "intermediate_size": count("feed_forward_length", read("expert_feed_forward_length", 0) or None, 0),
        "num_hidden_layers": count("block_count", high=MOST_LAYERS),
        "num_attention_heads": heads,
        "num_key_value_heads": count("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": _shortest(decimal("attention.layer_norm_rms_epsilon")),
        "max_position_embeddings": count("context_length"),
        "rope_theta": decimal("rope.freq_base", 10000.0),
        "tie_word_embeddings": "output.weight" not in shapes,
    }
    for flag, tensors in family.optional.items():
        config[flag] = any(f"blk.0.{tensor}" in shapes for tensor in tensors)
    if scaling := _rope_scaling(metadata, config, rope_factors):
        config["rope_scaling"] = scaling

    experts = {"num_experts_per_tok": count("expert_used_count", 0, 0)}
    # llama.cpp recognises Gemma 2 27B and Gemma 3 27B by their number of layers.
    wide = hidden // heads if config["num_hidden_layers"] == {"gemma2": 46, "gemma3": 62}.get(name) else head_dim
    gemma = {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}
    if family is MIXTRAL:
        config |= experts | {"num_local_experts": count("expert_count"), "sliding_window": None}
    elif name == "qwen3moe":
        config |= experts | {
            "num_experts": count("expert_count"),
            "moe_intermediate_size": count("expert_feed_forward_length"),
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    elif name == "gemma":
        config |= gemma
    elif name == "gemma2":
        config |= gemma | {
            "query_pre_attn_scalar": wide,
            "sliding_window": count("attention.sliding_window", 4096),
            "attn_logit_softcapping": decimal("attn_logit_softcapping", 50.0),
            "final_logit_softcapping": decimal("final_logit_softcapping", 30.0),
        }
    elif name == "gemma3":
        config |= gemma | {
            "query_pre_attn_scalar": wide,
            "sliding_window": count("attention.sliding_window"),
            "sliding_window_pattern": read("attention.sliding_window_pattern", 6),
            "rope_local_base_freq": decimal("rope.freq_base_swa", 10000.0),
        }
    return config


def _rope_scaling(metadata: Metadata, config: Mapping[str, Any], factors: Float32Array | None) -> dict[str, Any] | None:
    name = metadata["general.architecture"]
    kind = metadata.get(f"{name}.rope.scaling.type", "none")
    if factors is not None and not np.all(factors == 1):
        return _llama3_scaling(config, factors)
    if kind == "none":
        return None
    scaling = {"rope_type": kind, "factor": metadata.get(f"{name}.rope.scaling.factor", 1.0)}
    if kind == "yarn":
        original = metadata.get(f"{name}.rope.scaling.original_context_length", config["max_position_embeddings"])
        return scaling | {"original_max_position_embeddings": original}
    if kind != "linear":
        raise ModelError(f"{name}.rope.scaling.type is {kind!r}; supported are none, linear and yarn")
    return scaling


def _llama3_scaling(config: Mapping[str, Any], factors: Float32Array) -> dict[str, Any]:
    """The settings behind Llama 3's frequency factors: a GGUF keeps only the result.

    Llama 3.1, 3.2 and 3.3 all blend between wavelengths of 8192 / 4 and 8192 positions; they differ in the factor.
    """
    settings = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    low, high, original = settings.values()
    factor = round(float(factors.max()), 3)
    dim = config["head_dim"]
    wavelength = 2 * math.pi * config["rope_theta"] ** (np.arange(0, dim, 2) / dim)
    blend = np.clip((original / wavelength - low) / (high - low), 0, 1)
    expected = 1 / ((1 - blend) / factor + blend)
    if expected.shape != factors.shape or not np.allclose(expected, factors, rtol=1e-3):
        raise ModelError(f"{ROPE_FACTORS} holds frequency factors that are not Llama 3's, which config.json cannot say")
    return {"rope_type": "llama3", "factor": factor, **settings}


def _shortest(value: float) -> float:
    """1e-05 for float32's 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def folder_names(metadata: Metadata, shapes: Shapes, layers: int) -> dict[str, str]:
    """GGUF tensor name -> name in the folder, `{}` standing for an expert's number.

    Raises:
        ModelError: a tensor that the model needs is missing, or there is one that it does not know.
    """
    family = find_family(metadata)
    layer = dict(family.layer)
    for tensors in family.optional.values():
        if any(f"blk.0.{tensor}" in shapes for tensor in tensors):
            layer |= tensors
    names = TOP | (OUTPUT if "output.weight" in shapes else {})
    names |= {f"blk.{i}.{old}": f"model.layers.{i}.{new}" for i in range(layers) for old, new in layer.items()}
    if missing := names.keys() - shapes.keys():
        raise ModelError(f"the tensor {min(missing)} is missing")
    if unknown := shapes.keys() - names.keys() - {ROPE_FACTORS}:
        raise ModelError(f"there is a tensor {min(unknown)}, which {family.model_type} does not have")
    return names


def folder_tensors(
    name: str, new_name: str, values: Float32Array, family: Family, config: Mapping[str, Any]
) -> Iterator[tuple[str, Float32Array]]:
    """Args:
        name: in the GGUF.
        new_name: in the folder, from `folder_names`.
        values: dequantised.
        family: from `find_family`.
        config: from `model_config`.

    Raises:
        ModelError: its shape contradicts the header.
    """
    part = name.split(".")[-2]
    if family.interleaved and part in ("attn_q", "attn_k"):
        heads = config["num_attention_heads" if part == "attn_q" else "num_key_value_heads"]
        if len(values) != heads * config["head_dim"]:
            raise ModelError(f"the tensor {name} has {len(values)} rows, not {heads} heads x {config['head_dim']}")
        values = _halves(values, heads)
    if family.norm_offset and part.endswith("norm"):
        values = values - np.float32(1)
    if "{}" in new_name:
        yield from ((new_name.format(expert), matrix) for expert, matrix in enumerate(values))
    else:
        yield new_name, values


def _halves(rows: Float32Array, heads: int) -> Float32Array:
    pairs = rows.reshape(heads, len(rows) // heads // 2, 2, *rows.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)
