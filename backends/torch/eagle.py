"""An EAGLE-3 head (arXiv:2503.01840): one decoder layer that drafts from the target's own states.

Row p takes the token at position p and the target's state of position p - 1, and predicts token p + 1. Position 0 has
no row. The target's state is `fuse` of the inputs of three of its layers. The state of a row that the head has drafted
is what `forward` returned.

Names are those of published files: config.json, and model.safetensors with fc, midlayer.*, norm, lm_head, d2t and t2d.
d2t holds a target's id minus the id in the draft vocabulary. t2d is True for the target's ids in the draft vocabulary.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn.functional import silu
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

from edgespec.errors import named
from edgespec.models.heads import LAYER, eagle_config, layers_read, own_name

from ..common.heads import NO_EAGLE
from ..common.model_folder import refused

LAYERS = 3  # of the target, whose inputs a head reads

# Of query, key and value, each [..., heads or key heads, n, d]; returns [..., heads, n, d].
Attend = Callable[[Any, Any, Any], Any]


class Attention(nn.Module):  # type: ignore[misc]
    def __init__(self, config: Any) -> None:
        super().__init__()
        heads, d = config.num_attention_heads, config.head_dim
        self.d = d
        self.q_proj = nn.Linear(2 * config.hidden_size, heads * d, bias=False)
        self.k_proj = nn.Linear(2 * config.hidden_size, config.num_key_value_heads * d, bias=False)
        self.v_proj = nn.Linear(2 * config.hidden_size, config.num_key_value_heads * d, bias=False)
        self.o_proj = nn.Linear(heads * d, config.hidden_size, bias=False)

    def forward(self, hidden: Any, rotation: tuple[Any, Any], attend: Attend) -> Any:
        query, key, value = (
            project(hidden).unflatten(-1, (-1, self.d)).transpose(-3, -2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = apply_rotary_pos_emb(query, key, *rotation, unsqueeze_dim=-3)
        return self.o_proj(attend(query, key, value).transpose(-3, -2).flatten(-2))


class FeedForward(nn.Module):  # type: ignore[misc]
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, hidden: Any) -> Any:
        return self.down_proj(silu(self.gate_proj(hidden)) * self.up_proj(hidden))


class Layer(nn.Module):  # type: ignore[misc]
    def __init__(self, config: Any) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn, self.mlp = Attention(config), FeedForward(config)
        self.input_layernorm, self.hidden_norm = LlamaRMSNorm(width, eps), LlamaRMSNorm(width, eps)
        self.post_attention_layernorm = LlamaRMSNorm(width, eps)
        self._normed_residual = bool(getattr(config, "norm_before_residual", False))

    def forward(self, embeddings: Any, states: Any, rotation: tuple[Any, Any], attend: Attend) -> Any:
        normed = self.hidden_norm(states)
        both = torch.cat([self.input_layernorm(embeddings), normed], -1)
        hidden = (normed if self._normed_residual else states) + self.self_attn(both, rotation, attend)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class EagleHead(nn.Module):  # type: ignore[misc]
    """
    Attributes:
        config: of the head, a LlamaConfig with the fields of its config.json.
        layers: of the target, whose inputs `fuse` takes; the number of its layers means its last layer's output.
        embed_tokens: the head's own embeddings; None: the target's are used.
    """

    def __init__(self, config: Any, layers: Sequence[int], *, own_embeddings: bool = False) -> None:
        super().__init__()
        self.config, self.layers = config, list(layers)
        target = getattr(config, "target_hidden_size", None) or config.hidden_size
        self.input_norm = (
            LlamaRMSNorm(LAYERS * target, config.rms_norm_eps) if getattr(config, "norm_before_fc", False) else None
        )
        self.fc = nn.Linear(LAYERS * target, config.hidden_size, bias=False)
        self.midlayer = Layer(config)
        self.norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size) if own_embeddings else None
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self.t2d: Any
        self.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool))
        self._rotary = LlamaRotaryEmbedding(config)

    @property
    def draft_ids(self) -> Any:
        """The target's ids of the draft vocabulary."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def set_draft_ids(self, ids: Any) -> None:
        """Set the draft vocabulary: ascending ids of the target."""
        self.d2t = ids - torch.arange(len(ids), device=ids.device)
        self.t2d = torch.zeros_like(self.t2d)
        self.t2d[ids] = True

    def fuse(self, states: Any) -> Any:
        """States of the head's width, of the inputs of the target's `layers`: [..., 3 * target's width]."""
        return self.fc(self.input_norm(states) if self.input_norm is not None else states)

    def forward(self, embeddings: Any, states: Any, positions: Any, attend: Attend) -> Any:
        """
        Args:
            embeddings: [..., n, width] of the rows' tokens.
            states: [..., n, width], of `fuse`, or what this returned for the rows before.
            positions: [..., n].
            attend: attention of the rows' rotated queries; it keeps their keys and values.

        Returns:
            The rows' states [..., n, width], for `logits`, and for rows after them.
        """
        return self.midlayer(embeddings, states, self._rotary(embeddings, positions), attend)

    def draft_logits(self, states: Any) -> Any:
        """Logits over the draft vocabulary."""
        return self.lm_head(self.norm(states))

    def logits(self, states: Any) -> Any:
        """Logits over the target's vocabulary; -inf outside the draft vocabulary."""
        found = self.draft_logits(states)
        every = found.new_full((*found.shape[:-1], len(self.t2d)), -torch.inf)
        every[..., self.draft_ids] = found
        return every


def load_head(folder: Path, target_layers: int) -> EagleHead:
    """Load a published head.

    Args:
        folder: with config.json and model.safetensors.
        target_layers: number of the target's layers.

    Raises:
        ModelError: the files are missing or damaged, are no EAGLE-3 head, or one of another target.
    """
    with named(str(folder)), refused(NO_EAGLE):
        about = eagle_config(str(folder))
        tensors = {own_name(name, LAYER[0]): one for name, one in load_file(folder / "model.safetensors").items()}
        layers = layers_read(about, target_layers)
        head = EagleHead(LlamaConfig.from_dict(about), layers, own_embeddings="embed_tokens.weight" in tensors)
        head.load_state_dict(tensors)
    head.eval().requires_grad_(False)
    return head
