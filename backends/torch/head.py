"""EAGLE-3 heads (`eagle.py`) as drafts of a `TorchBackend`."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch

from edgespec.loop.backend import Work
from edgespec.loop.engines import LoadOptions
from edgespec.loop.sampling import Float32Array
from edgespec.loop.session_files import content_of
from edgespec.models.heads import check_made_for

from ..common.heads import HeadSession
from .attention import Tree, finish, numbers_on, tree_attention
from .backend import TorchBackend
from .eagle import load_head
from .loading import cache_shape, decoder_layers, session_cells, tree_cells
from .session import TorchSession
from .spans import Cells

LAYER = SimpleNamespace(layer_idx=0)  # a head's only one, for `tree_attention`


class TorchHeadSession(HeadSession, TorchSession):
    _backend: Any  # a `HeadOwner`


class TorchHead(TorchBackend):
    """A head with its target's embeddings and tokenizer, on its device.

    Attributes:
        width: as of `HeadOwner`.
    """

    hides_first = True  # a sequence's first token has no state before it

    def __init__(self, target: TorchBackend, head: Any, sessions: int) -> None:
        above = target.capabilities
        limits = replace(
            above, states=0, head=True, one_thread=True, streams=False, experts=None, layers=1, paths=False,
            max_leaves=tree_cells(above.max_nodes, above.max_wanted), exact=None, spare_leaves=None, cells=None,
        )  # fmt: skip
        shape = cache_shape(head.config, session_cells(limits))
        spans = [(target.device, range(1))]
        cells = [Cells(spans, [LAYER.layer_idx], shape[1:], target.dtype) for _ in range(sessions)]
        super().__init__(head, target.vocab, limits, (None,), cells, spans)
        self.width = int(head.config.hidden_size)
        self._target = target
        self._embed = head.embed_tokens or target.model.get_input_embeddings()

    def _new_session(self, cells: Cells) -> TorchHeadSession:
        return TorchHeadSession(self, cells)

    def close(self) -> None:
        if self.model is not None:
            self._target.keep_states([])
        super().close()
        self._embed = None  # it may be the target's

    def fuse(self, states: Float32Array) -> Float32Array:
        with torch.inference_mode():
            found: Float32Array = self.model.fuse(self._on_device(states)).float().cpu().numpy()
        return found

    def _on_device(self, states: Float32Array) -> Any:
        return torch.from_numpy(states).to(self.device, self.dtype)

    def _run(
        self,
        batch: Sequence[Work],
        places: Sequence[Sequence[int]],
        token_ids: Sequence[int],
        positions: Sequence[int],
        wanted: Sequence[int],
        tree: Tree,
    ) -> Any:
        sessions = [cast(TorchHeadSession, work.session) for work in batch]
        inputs = [session.inputs(work, new) for session, work, new in zip(sessions, batch, places, strict=True)]
        at, rows, ids = numbers_on(self.device, positions, wanted, token_ids)
        if self._embed.weight.device.type == "cpu":
            ids = torch.tensor(list(token_ids))
        states = self._states(self._embed(ids), self._on_device(np.concatenate(inputs)), at, tree)
        states = states[rows]
        logits, kept = self.model.logits(states), states.float().cpu().numpy()
        finish(self.device)
        for session, work in zip(sessions, batch, strict=True):
            session.add_states(work.wanted.tolist(), kept[: len(work.wanted)])
            kept = kept[len(work.wanted) :]
        return logits

    def _states(self, embeddings: Any, states: Any, places: Any, tree: Tree) -> Any:
        def attend(query: Any, key: Any, value: Any) -> Any:
            found, _ = tree_attention(LAYER, query[None], key[None], value[None], None, tree=tree)
            return found[0].transpose(0, 1)

        return self.model(embeddings, states, places, attend)


def as_target(head: Any, target: TorchBackend) -> None:
    """Move a head to its target's device, and its weights to its target's type; buffers, such as frequencies, stay."""
    for weight in head.parameters():
        weight.data = weight.data.to(target.dtype)
    head.to(target.device)


def load_eagle(target: TorchBackend, path: str, options: LoadOptions) -> TorchHead:
    """See `LoadsHeads.load_head`.

    Raises:
        ModelError: it is damaged, or was made for another model.
    """
    layers, config = decoder_layers(target.model), target.model.config.get_text_config()
    head = load_head(Path(path), len(layers))
    check_made_for(head.fc.in_features // len(head.layers), len(head.t2d), config.hidden_size, config.vocab_size)
    if head.embed_tokens is None:  # it reads the target's
        check_made_for(head.config.hidden_size, len(head.t2d), config.hidden_size, config.vocab_size)
    as_target(head, target)
    backend = TorchHead(target, head, options.sessions)
    backend.content = content_of(*map(str, sorted(Path(path).glob("*.safetensors"))))
    norm = target.model.get_decoder().norm
    target.keep_states([layers[i] if i < len(layers) else norm for i in head.layers])
    return backend
