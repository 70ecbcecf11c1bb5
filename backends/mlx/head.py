"""EAGLE-3 heads on MLX (arXiv 2503.01840): folders as published, and as llama.cpp's converter reads them.

fuse      fc of what the target's layers read, side by side
a row     the state before it, and its token's embedding, through one layer that returns the row's own state
logits    of the head's own vocabulary; no other token is ever drafted
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.llama import MLP, Attention, ModelArgs

from edgespec.errors import ModelError
from edgespec.loop.backend import Capabilities, GivesStates, Logits, Work
from edgespec.loop.engines import LoadOptions
from edgespec.loop.sampling import Float32Array
from edgespec.loop.session_files import content_of
from edgespec.models.heads import LAYER, check_made_for, eagle_config, layers_read, own_name

from ..common.heads import HeadSession
from ..common.model_folder import content_files
from .backend import MlxBackend
from .head_files import head_tensors
from .loading import evaluate
from .memory import MIN_NODES
from .session import MlxSession
from .tree import Pass, TreeCache, runs_layers, wrap_ropes


class Layer(nn.Module):  # type: ignore[misc]
    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.input_layernorm, self.hidden_norm, self.post_attention_layernorm = (
            nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps) for _ in range(3)
        )
        self.self_attn, self.mlp = Attention(args), MLP(args)
        for name in ("q_proj", "k_proj", "v_proj"):
            rows = self.self_attn[name].weight.shape[0]
            self.self_attn[name] = nn.Linear(2 * args.hidden_size, rows, bias=args.attention_bias)


class Eagle3(nn.Module):  # type: ignore[misc]
    """The head's own weights, named as in its files."""

    def __init__(self, config: Mapping[str, Any], fused: int, own_embedding: bool) -> None:
        """
        Args:
            config: of config.json.
            fused: size of the target's states.
            own_embedding: the head's files have an embedding.
        """
        super().__init__()
        args = ModelArgs.from_dict(config)
        self.fc = nn.Linear(fused, args.hidden_size, bias=False)
        self.layers = [Layer(args)]
        self.norm = nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps)
        self.lm_head = nn.Linear(args.hidden_size, config["draft_vocab_size"], bias=False)
        if config.get("norm_before_fc"):
            self.input_norm = nn.RMSNorm(fused, eps=args.rms_norm_eps)
        if own_embedding:
            self.embed_tokens = nn.Embedding(args.vocab_size, args.hidden_size)
        self._normed_residual = bool(config.get("norm_before_residual"))

    def fuse(self, states: Any) -> Any:
        return self.fc(self.input_norm(states) if "input_norm" in self else states)

    def __call__(self, embedded: Any, states: Any, cache: Sequence[TreeCache]) -> Any:
        """
        Args:
            embedded: tokens, [1, n, D].
            states: before them, [1, n, D].
            cache: of the layer.

        Returns:
            The rows' own states, [1, n, D].
        """
        layer, normed = self.layers[0], self.layers[0].hidden_norm(states)
        x = mx.concatenate([layer.input_layernorm(embedded), normed], axis=-1)
        x = layer.self_attn(x, create_attention_mask(x, cache[0]), cache[0])
        x = x + (normed if self._normed_residual else states)
        return x + layer.mlp(layer.post_attention_layernorm(x))


class HeadCache(TreeCache):
    """Hides the cell of a sequence's first token, which has no state before it."""

    def make_mask(self, n: int, return_array: bool = False, window_size: int | None = None) -> Any:
        here = cast(Pass, self.offset)
        seen = here.visible(None)
        seen[:, 0] = here.start + np.arange(n) == 0
        return mx.array(seen)


class MlxHeadSession(HeadSession, MlxSession):
    _backend: Any  # a `HeadOwner`


class MlxHead(MlxBackend):
    """
    Attributes:
        width: as in `HeadOwner`.
    """

    def __init__(
        self, head: Eagle3, target: MlxBackend, capabilities: Capabilities, sessions: int, embed: Any, ids: Any
    ) -> None:
        """
        Args:
            head: with its weights.
            target: it drafts for this one.
            capabilities: of the head.
            sessions: most open at once.
            embed: the embedding of tokens.
            ids: the target's token of each token of the head, [draft vocabulary].
        """
        super().__init__(head, cast(Any, target.vocab), capabilities, [None], sessions, None, ())
        self.width = head.norm.weight.shape[0]
        self._target, self._embed, self._ids = target, embed, ids
        self._dtype = head.fc.weight.dtype

    def _session(self, capacity: int) -> MlxSession:
        return MlxHeadSession(self, [HeadCache(capacity, None)])

    def fuse(self, states: Float32Array) -> Float32Array:
        return np.array(self._model.fuse(mx.array(states).astype(self._dtype)).astype(mx.float32))

    def _begin(self, session: MlxSession, work: Work) -> tuple[Any, Any]:
        states = cast(MlxHeadSession, session).inputs(work, session.check(work))
        tokens, rows = session.place(work)
        embedded = self._embed(mx.array(tokens)).astype(self._dtype)
        own = self._model(embedded, mx.array(states)[None].astype(self._dtype), session.given)[0]
        wanted = rows[work.wanted - session.nodes]
        if not len(wanted):
            return None, own.astype(mx.float32)
        found = self._model.lm_head(self._model.norm(own[mx.array(wanted)])).astype(mx.float32)
        logits = mx.full((len(wanted), self.vocab.size), -mx.inf)
        logits[:, self._ids] = found
        return logits, own.astype(mx.float32)

    def forward(self, batch: Sequence[Work]) -> list[Logits]:
        found = super().forward(batch)
        for work, logits in zip(batch, found, strict=True):
            wanted = work.wanted.tolist()
            cast(MlxHeadSession, work.session).add_states(wanted, cast(GivesStates, logits).states(wanted))
        return found

    def close(self) -> None:
        if self._model is not None and self._target.inputs:
            self._target.give_states([])
        super().close()
        self._embed = self._ids = None  # the embedding may be the target's


def load_head(target: MlxBackend, path: str, options: LoadOptions) -> MlxHead:
    """See `LoadsHeads.load_head`."""
    config, stored = eagle_config(path), head_tensors(path)
    embed = getattr(runs_layers(target.model), "embed_tokens", None)
    if embed is None:
        raise ModelError("its target's embedding is not found, so it cannot have a head on MLX")
    chosen = layers_read(config, len(target.model.layers))
    fused, vocab = stored["fc.weight"].shape[1], target.vocab.size
    width, own = embed(mx.array([0])).shape[-1], "embed_tokens.weight" in stored
    check_made_for(fused // len(chosen), config["vocab_size"], width, vocab)
    if not own:  # it reads the target's
        check_made_for(config["hidden_size"], config["vocab_size"], width, vocab)
    head, weights = Eagle3(config, fused, own), dict[str, Any]()
    for file in sorted(Path(path).glob("*.safetensors")):
        weights |= {own_name(name, LAYER[1]): array for name, array in mx.load(str(file)).items() if name != "t2d"}
    ids = mx.arange(config["draft_vocab_size"])
    if (offsets := weights.pop("d2t", None)) is not None:
        ids = ids + offsets
    if not 0 <= int(ids.min()) <= int(ids.max()) < vocab:
        raise ModelError(f"its tokens are not all among the target's {vocab}")
    head.load_weights(list(weights.items()))
    wrap_ropes(head)
    evaluate(head)
    nodes = max(MIN_NODES, options.budget + 1)
    limits = Capabilities(
        context_length=options.context_length or target.capabilities.context_length,
        max_nodes=nodes, max_wanted=nodes, max_leaves=nodes, logit_tolerance=target.capabilities.logit_tolerance,
        one_thread=True, head=True,
    )  # fmt: skip
    made = MlxHead(head, target, limits, options.sessions, head.embed_tokens if own else embed, ids)
    made.content = content_of(*content_files(path))
    target.give_states(chosen, fused)
    one = np.zeros(1, np.int32)
    made.forward([Work(made.small_session(), one, one - 1, one)])  # shows the forms of its cells
    return made
