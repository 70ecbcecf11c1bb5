"""Tiny random models in folders that mlx-lm reads. Import only where mlx_lm is installed."""

import gc
import json
import re
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.utils import MODEL_REMAPPING, quantize_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from edgespec.loop.passes import prefill

SPECIAL = ["<s>", "</s>"]
VOCAB_SIZE = 288  # 256 bytes, the two above, and padding as big models have it
SHARED = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 640,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 256,
    "eos_token_id": 257,
}
ROPE_LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
ROPE_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
ROPE_DYNAMIC = {"rope_type": "dynamic", "factor": 4.0}
WINDOWS = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}

# name -> what its config.json has beyond SHARED
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "tie_word_embeddings": True},
    "llama-3": {"model_type": "llama", "rope_scaling": ROPE_LLAMA3},
    "llama-yarn": {"model_type": "llama", "rope_scaling": ROPE_YARN},
    "llama-dynamic": {"model_type": "llama", "rope_scaling": ROPE_DYNAMIC, "max_position_embeddings": 20},
    "mistral": {"model_type": "mistral"},
    "mistral-windows": {"model_type": "mistral", **WINDOWS},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3 moe": {
        "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
        "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True,
    },
    "gpt-oss": {
        "model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2,
        "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"],
    },
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3", "tie_word_embeddings": True},
    "gemma": {"model_type": "gemma"},
    "gemma2": {"model_type": "gemma2", "query_pre_attn_scalar": 8},
    "gemma3": {
        "model_type": "gemma3_text", "query_pre_attn_scalar": 8, "sliding_window": 6, "sliding_window_pattern": 2,
    },
}  # fmt: skip

MAMBA = {
    "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 2, "mamba_d_conv": 4,
    "mamba_conv_bias": True, "mamba_proj_bias": False,
}  # fmt: skip
PLAIN_MAMBA = {"conv_kernel": 4, "use_bias": False, "use_conv_bias": True, "state_size": 8, "time_step_rank": 2}
DELTA = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4, "full_attention_interval": 2, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24,
    "partial_rotary_factor": 0.5, "norm_topk_prob": True,
}  # fmt: skip
# The same of families with recurrent layers.
HYBRIDS: dict[str, dict[str, Any]] = {
    "lfm2": {
        "model_type": "lfm2", "num_hidden_layers": 3, "norm_eps": 1e-5, "conv_bias": False, "conv_L_cache": 3,
        "block_dim": 32, "block_multiple_of": 1, "block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": False,
        "layer_types": ["conv", "full_attention", "conv"],
    },
    "granite": {
        "model_type": "granitemoehybrid", "embedding_multiplier": 1.0, "attention_multiplier": 0.35,
        "logits_scaling": 1.0, "residual_multiplier": 1.0, "num_hidden_layers": 3, "attention_bias": False,
        "layer_types": ["mamba", "attention", "mamba"], "position_embedding_type": "nope", **MAMBA,
        "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 48,
    },
    "falcon-h1": {"model_type": "falcon_h1", **MAMBA, "mamba_d_ssm": 64, "lm_head_multiplier": 1.0},
    "qwen3-next": {"model_type": "qwen3_next", "num_hidden_layers": 4, **DELTA},
    "nemotron-h": {
        "model_type": "nemotron_h", "num_hidden_layers": 3, "hybrid_override_pattern": ["M", "*", "-"],
        "attention_bias": False, "mamba_num_heads": 8, "mamba_head_dim": 8, "mamba_proj_bias": False,
        "ssm_state_size": 8, "n_groups": 2, "mlp_bias": False, "layer_norm_epsilon": 1e-5, **PLAIN_MAMBA,
    },
    "mamba": {"model_type": "mamba", **PLAIN_MAMBA},
    "mamba2": {
        "model_type": "mamba2", **PLAIN_MAMBA, "num_heads": 8, "head_dim": 8, "n_groups": 2,
        "layer_norm_epsilon": 1e-5, "time_step_limit": [0.0, 100.0],
    },
    "recurrent-gemma": {
        "model_type": "recurrent_gemma", "num_hidden_layers": 3, "num_key_value_heads": 1, "attention_bias": False,
        "block_types": ["recurrent", "recurrent", "attention"], "conv1d_width": 4, "attention_window_size": 16,
        "logits_soft_cap": 30.0,
    },
}  # fmt: skip


def write_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer without merges: bytes are the ids 0 to 255."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: i for i, char in enumerate(alphabet)} | {text: 256 + i for i, text in enumerate(SPECIAL)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))


def write_model(
    folder: Path,
    config: dict[str, Any],
    *,
    seed: int = 1,
    damage: float = 0.0,
    dtype: mx.Dtype = mx.float32,
    bits: int = 0,
    mode: str = "affine",
    mixed: bool = False,
    shards: int = 1,
) -> Path:
    """A folder with random weights.

    Args:
        folder: made.
        config: beyond SHARED.
        seed: of the weights.
        damage: how much noise is on top of them, in parts of each matrix's own size.
        dtype: of the weights, or of what is not quantised.
        bits: 0, or quantise by mlx_lm's own function.
        mode: of quantising, MLX's name.
        mixed: of every second layer, what leads down in 8 bits.
        shards: number of files.
    """
    config = SHARED | config
    folder.mkdir(parents=True)
    kind = config["model_type"]
    module = import_module(f"mlx_lm.models.{MODEL_REMAPPING.get(kind, kind)}")
    mx.random.seed(seed)
    model = module.Model(module.ModelArgs.from_dict(config))
    sharpen(model)
    noise = mx.random.key(seed + 1000)

    def finish(weights: mx.array) -> mx.array:
        nonlocal noise
        if damage and weights.ndim > 1:
            noise, key = mx.random.split(noise)
            weights = weights + damage * mx.std(weights) * mx.random.normal(weights.shape, key=key)
        return weights.astype(dtype)

    model.apply(finish)
    if bits:
        eight = {"group_size": 32, "bits": 8}
        choose = (
            (lambda name, module: eight if re.search(r"[02468].*(down_proj|w2)", name) else True) if mixed else None
        )
        group = 16 if mode == "nvfp4" else 32
        model, config = quantize_model(model, config, group, bits, mode, quant_predicate=choose)
    weights = tree_flatten(model.parameters())
    for i in range(shards):
        name = "model.safetensors" if shards == 1 else f"model-{i + 1:05}-of-{shards:05}.safetensors"
        part = weights[i * len(weights) // shards : (i + 1) * len(weights) // shards]
        mx.save_safetensors(str(folder / name), dict(part))
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder)
    return folder


def sharpen(model: nn.Module) -> None:
    """Make attention and the choice of tokens decided: with MLX's small initial weights, all logits are alike."""
    for name, weights in tree_flatten(model.parameters()):
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            model.load_weights([(name, 3 * weights)], strict=False)
        if name.endswith(("lm_head.weight", "embed_tokens.weight")):
            model.load_weights([(name, 4 * weights)], strict=False)
        if ".conv_1d." in name or ".rg_lru." in name:  # all zeros at first
            least = 5.0 if name.endswith("recurrent_param") else 0.0  # then a state fades slowly
            model.load_weights([(name, 0.5 * mx.random.normal(weights.shape) - least)], strict=False)


def check_closing_frees(load_both: Callable[[], tuple[Any, Any]], prompt: Sequence[int]) -> None:
    """A target and its draft that are closed hold no arrays, although both and a session are still known."""
    gc.collect()  # what other tests have left must not go meanwhile
    before = mx.get_active_memory()
    target, draft = load_both()
    session = draft.open()
    prefill(draft, session, prompt)
    assert mx.get_active_memory() > before
    target.close()
    draft.close()
    assert mx.get_active_memory() < before + 100
    draft.close()
    session.close()
