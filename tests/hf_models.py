"""Tiny model folders with random weights, one for each family, and tokenizers for them."""

import copy
import gc
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install 'edgespec[torch]'")
transformers = pytest.importorskip("transformers", reason="needs transformers: pip install 'edgespec[torch]'")

from safetensors.torch import load_file, save_file  # noqa: E402
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers  # noqa: E402

from edgespec.loop.passes import prefill  # noqa: E402

SPECIAL = ["<s>", "</s>", "<unk>", "<|im_end|>"]
VOCAB_SIZE = 272  # 256 bytes, the special tokens, and ids that the tokenizer does not know
SMALL = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 640,
    "initializer_range": 0.3,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
GEMMA = {"query_pre_attn_scalar": 8, "sliding_window": 5}
BY_TURNS = ["sliding_attention", "full_attention", "sliding_attention"]
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}

# family -> transformers' name of it, and what differs from SMALL. Windows are shorter than the contract's texts.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, no grouped heads": ("llama", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral, window": ("mistral", {"sliding_window": 5}),
    "mixtral": ("mixtral", EXPERTS | {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen2, windows": ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen3": ("qwen3", {}),
    "qwen3 moe": ("qwen3_moe", EXPERTS),
    "gpt-oss": ("gpt_oss", EXPERTS | {"sliding_window": 5, "layer_types": BY_TURNS}),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", GEMMA | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 30.0}),
    "gemma3": ("gemma3_text", GEMMA | {"layer_types": BY_TURNS}),
    "phi3": ("phi3", {"original_max_position_embeddings": 640}),
}

MAMBA = {
    "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 2, "mamba_d_conv": 4,
    "mamba_expand": 2, "mamba_chunk_size": 16,
}  # fmt: skip
DELTA = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"], "linear_num_value_heads": 4,
    "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
PLAIN_MAMBA = {"state_size": 8, "conv_kernel": 4}
# The same of families with recurrent layers.
HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "lfm2": ("lfm2", {"layer_types": ["conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": False}),
    "granite": (
        "granitemoehybrid",
        EXPERTS | MAMBA | {"layer_types": ["mamba", "attention", "mamba"], "shared_intermediate_size": 48},
    ),
    "falcon-h1": ("falcon_h1", MAMBA | {"mamba_d_ssm": 64}),
    "qwen3-next": ("qwen3_next", EXPERTS | DELTA | {"shared_expert_intermediate_size": 24}),
    "qwen3.5": ("qwen3_5_text", DELTA),
    "nemotron-h": (
        "nemotron_h",
        {
            "layers_block_type": ["mamba", "attention", "mlp"], "mamba_num_heads": 8, "mamba_head_dim": 8,
            "ssm_state_size": 8, "n_groups": 2, "conv_kernel": 4, "chunk_size": 16,
        },
    ),
    "mamba2": ("mamba2", PLAIN_MAMBA | {"num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 16, "expand": 2}),
}  # fmt: skip
# Families only of which heads are tested.
HEADED: dict[str, tuple[str, dict[str, Any]]] = {
    "glm4 moe": ("glm4_moe", EXPERTS | {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1}),
    "nemotron-h moe": (
        "nemotron_h",
        {
            "layers_block_type": ["mamba", "attention", "moe"], "mamba_num_heads": 8, "mamba_head_dim": 8,
            "ssm_state_size": 8, "n_groups": 2, "conv_kernel": 4, "chunk_size": 16, "n_routed_experts": 4,
            "num_experts_per_tok": 2, "moe_intermediate_size": 24, "moe_shared_expert_intermediate_size": 24,
            "n_shared_experts": 1, "num_nextn_predict_layers": 1, "mtp_layers_block_type": ["attention", "moe"],
        },
    ),
}  # fmt: skip

# Of families whose folders may have a head: names of what is in no layer of it, and the prefix of its layers.
QWEN = {
    "eh_proj": "mtp.fc",
    "enorm": "mtp.pre_fc_norm_embedding",
    "hnorm": "mtp.pre_fc_norm_hidden",
    "norm": "mtp.norm",
}
WITH_HEADS: dict[str, tuple[str, dict[str, str]]] = {
    "qwen3.5": ("mtp.layers.{}.", QWEN),
    "qwen3-next": ("mtp.layers.{}.", QWEN),
    "glm4 moe": (
        "model.layers.3.",
        {name: f"model.layers.3.{name}" for name in ("eh_proj", "enorm", "hnorm")}
        | {"norm": "model.layers.3.shared_head.norm"},
    ),
    "nemotron-h moe": (
        "mtp.layers.{}.",
        {name: f"mtp.layers.0.{name}" for name in ("eh_proj", "enorm", "hnorm")}
        | {"norm": "mtp.layers.1.final_layernorm"},
    ),
}


def byte_tokenizer() -> Any:
    """Byte-level BPE without merges; the end of a turn is an added token that is not marked as special."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {text: i for i, text in enumerate([*SPECIAL[:3], *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL[:3]])
    tokenizer.add_tokens([AddedToken(SPECIAL[3], special=False), AddedToken("<tool>", special=False)])
    return wrapped(tokenizer)


def piece_tokenizer() -> Any:
    """SentencePiece as Llama 2 has it: ▁ for spaces, bytes for what has no piece of its own."""
    pieces = ["▁", *"abcdefghijklmnopqrstuvwxyz", "▁t", "▁to", "▁be", "ot"]
    texts = [*SPECIAL[:3], *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    merges = [("▁", "t"), ("▁t", "o"), ("b", "e"), ("▁", "be"), ("o", "t")]
    texts.insert(-2, "be")
    model = models.BPE(
        vocab={text: i for i, text in enumerate(texts)}, merges=merges, byte_fallback=True, unk_token="<unk>"
    )
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL[:3]])
    return wrapped(tokenizer)


def wrapped(tokenizer: Any) -> Any:
    """The same as transformers wants it."""
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def tiny_model(family: str, seed: int = 0, **changes: Any) -> Any:
    """A transformers model of the family with random weights in float32."""
    name, differences = (FAMILIES | HYBRIDS | HEADED)[family]
    config = transformers.AutoConfig.for_model(name, **(SMALL | differences | changes))
    torch.manual_seed(seed)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def perturbed(model: Any, scale: float, seed: int) -> Any:
    """The model with noise on every matrix, `scale` of the matrix's own size. Changes it."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight += scale * weight.std() * torch.randn(weight.shape, generator=generator)
    return model


def save(model: Any, folder: Path, tokenizer: Any = None) -> Path:
    """Write the folder that the backends load."""
    model.save_pretrained(folder)
    (tokenizer or byte_tokenizer()).save_pretrained(folder)
    return folder


def add_head(family: str, model: Any, folder: Path, seed: int = 1) -> dict[str, Any]:
    """Write a head with random weights into the folder of `save`, named as published folders have it.

    Returns:
        The tensors.
    """
    config = copy.deepcopy(model.config)
    config.layer_types = list(getattr(config, "mtp_layers_block_type", None) or ["full_attention"])
    config.num_hidden_layers, config.first_k_dense_replace = len(config.layer_types), 0
    prefix, names = WITH_HEADS[family]
    width, made = config.hidden_size, dict[str, Any]()
    for number in range(config.num_hidden_layers):
        layer = type(model.get_decoder().layers[0])(config, number)
        made |= {prefix.format(number) + name: weight for name, weight in layer.state_dict().items()}
    generator = torch.Generator().manual_seed(seed)
    shapes = {name: (width, 2 * width) if name == "eh_proj" else (width,) for name in names}
    made |= {f"{names[name]}.weight": torch.empty(shape) for name, shape in shapes.items()}
    for name, weight in made.items():
        made[name] = torch.randn(weight.shape, generator=generator) * (0.3 if weight.ndim > 1 else 0.1)
        made[name] += 1.0 if weight.ndim == 1 and family in ("glm4 moe", "nemotron-h moe") else 0.0
    for name in [
        name for name in made if name.endswith(("experts.gate_up_proj", "experts.up_proj", "experts.down_proj"))
    ]:
        of, part = name.rsplit(".", 1)
        for number, weight in enumerate(made.pop(name)):
            parts = weight.chunk(2) if part == "gate_up_proj" else [weight]
            for kind, one in zip(part.removesuffix("_proj").split("_"), parts, strict=True):
                made[f"{of}.{number}.{kind}_proj.weight"] = one.clone()
    if family == "glm4 moe":  # as published, with copies of what it shares with its target
        target = model.state_dict()
        copies = {"embed_tokens": "model.embed_tokens", "shared_head.head": "lm_head"}
        made |= {f"{prefix}{name}.weight": target[f"{of}.weight"].clone() for name, of in copies.items()}
    file = folder / "model.safetensors"
    save_file(load_file(file) | made, file, metadata={"format": "pt"})
    return made


def check_closing_frees(load_both: Callable[[], tuple[Any, Any]], prompt: Sequence[int]) -> None:
    """No weights stay of a target and its draft that are closed, although both and a session are still known."""
    target, draft = load_both()
    session = draft.open()
    prefill(draft, session, prompt)
    weights = [weakref.ref(one) for backend in (target, draft) for one in backend.model.parameters()]
    target.close()
    draft.close()
    gc.collect()
    assert not [one for one in weights if one() is not None]
    draft.close()
    session.close()
