"""Made-up EAGLE-3 heads, in folders as published, with random weights."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

WIDTH, INNER, HEADS, KEY_HEADS, D = 32, 48, 4, 2, 8
CONFIG = {
    "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": WIDTH,
    "intermediate_size": INNER, "num_hidden_layers": 1, "num_attention_heads": HEADS,
    "num_key_value_heads": KEY_HEADS, "head_dim": D, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "max_position_embeddings": 640,
}  # fmt: skip
SHAPES = {
    "midlayer.self_attn.q_proj.weight": (HEADS * D, 2 * WIDTH),
    "midlayer.self_attn.k_proj.weight": (KEY_HEADS * D, 2 * WIDTH),
    "midlayer.self_attn.v_proj.weight": (KEY_HEADS * D, 2 * WIDTH),
    "midlayer.self_attn.o_proj.weight": (WIDTH, HEADS * D),
    "midlayer.mlp.gate_proj.weight": (INNER, WIDTH),
    "midlayer.mlp.up_proj.weight": (INNER, WIDTH),
    "midlayer.mlp.down_proj.weight": (WIDTH, INNER),
    "midlayer.input_layernorm.weight": (WIDTH,),
    "midlayer.hidden_norm.weight": (WIDTH,),
    "midlayer.post_attention_layernorm.weight": (WIDTH,),
    "norm.weight": (WIDTH,),
}


def head_weights(vocab: int, drafts: int, target_width: int = WIDTH, seed: int = 0, **config: Any) -> dict[str, Any]:
    """Random tensors; the draft vocabulary is every id but the last ones of each gap."""
    generator = np.random.default_rng(seed)
    shapes = SHAPES | {"fc.weight": (WIDTH, 3 * target_width), "lm_head.weight": (drafts, WIDTH)}
    if config.get("norm_before_fc"):
        shapes["input_norm.weight"] = (3 * target_width,)
    made = {
        name: generator.normal(1 if len(shape) == 1 else 0, 0.2, shape).astype(np.float32)
        for name, shape in shapes.items()
    }
    ids = np.sort(generator.choice(vocab, drafts, replace=False))
    made["d2t"], made["t2d"] = ids - np.arange(drafts), np.isin(np.arange(vocab), ids)
    return made


def write_head(folder: Path, weights: dict[str, Any], **config: Any) -> Path:
    """
    Args:
        folder: made.
        weights: of `head_weights`.
        config: beyond CONFIG.
    """
    folder.mkdir(parents=True)
    save_file({name: np.ascontiguousarray(array) for name, array in weights.items()}, folder / "model.safetensors")
    sizes = {"draft_vocab_size": len(weights["d2t"]), "vocab_size": len(weights["t2d"])}
    (folder / "config.json").write_text(json.dumps(CONFIG | sizes | config))
    return folder


def attend_cells(cells: Any, start: int) -> Any:
    """Attention for `EagleHead.forward`: rows from cell `start` on are kept in `cells` [2, key heads, cells, d]."""
    import torch

    def attend(query: Any, key: Any, value: Any) -> Any:
        end = start + query.shape[-2]
        cells[0, :, start:end], cells[1, :, start:end] = key, value
        keys, values = cells[:, :, :end]
        seen = torch.full((end - start, end), -torch.inf, dtype=query.dtype).triu(start + 1)
        every = (query[None], keys[None], values[None], seen)
        return torch.nn.functional.scaled_dot_product_attention(*every, enable_gqa=True)[0]

    return attend
