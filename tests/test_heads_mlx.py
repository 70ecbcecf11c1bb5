"""EAGLE-3 heads on MLX: the head's definition, and texts of plain decoding, however it drafts."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mlx_lm", reason="mlx-lm is not installed: pip install 'edgespec[mlx]'")

import contract
import mlx.core as mx
from edgespec.backends.mlx.backend import engine, load
from edgespec.backends.mlx.memory import MIN_NODES, PassSize
from head_files import WIDTH, head_weights, write_head
from mlx.optimizers import Adam
from mlx import nn
from mlx_models import FAMILIES, HYBRIDS, VOCAB_SIZE, write_model
from test_lossless_mlx import SAMPLINGS, check_lossless, write
from test_mlx_streaming import load_streamed, many_layers, small_parts  # noqa: F401, fixtures

from edgespec.errors import ModelError
from edgespec.loop.engines import LoadOptions
from edgespec.loop.passes import prefill
from edgespec.planners.chain import ChainPlanner
from edgespec.planners.none import NonePlanner
from edgespec.planners.specexec import SpecExecPlanner

PROMPT = [*range(5, 25), *range(5, 17)]
OPTIONS = LoadOptions(context_length=128, budget=16, sessions=3)
DRAFTS = 200  # tokens of the head's vocabulary


def load_head(target: Any, folder: Path) -> Any:
    return engine.load_head(target, str(folder), OPTIONS.for_draft())


def states_of(target: Any, tokens: list[int]) -> Any:
    """What the target gives a head, of each token."""
    session, found = target.open(), list[Any]()
    prefill(target, session, tokens, saw=lambda work, logits: found.append(logits.states(range(len(work.token_ids)))))
    session.close()
    return np.concatenate(found)


def rows_of(head: Any, tokens: list[int], states: Any) -> Any:
    """The head's logits after each token, of which all states but the last were given."""
    session = head.open()
    session.give(0, states)
    [logits] = head.forward([contract.work(session, tokens, range(-1, len(tokens) - 1))])
    session.close()
    return np.array([logits.row(node) for node in range(len(tokens))])


def taught(target: Any, head: Any, tokens: list[int], steps: int = 150) -> None:
    """Train the head until it knows this text by heart."""
    states, model = mx.array(states_of(target, tokens[:-1])), head.model
    embedded, fused = head._embed(mx.array(tokens)[None]), mx.zeros((1, 1, WIDTH))
    places = {token: place for place, token in enumerate(head._ids.tolist())}
    rows = mx.array([row for row in range(len(tokens) - 2) if tokens[row + 2] in places])
    labels = mx.array([places[tokens[row + 2]] for row in rows.tolist()])

    class Causal:
        offset = 1
        make_mask = staticmethod(lambda n, **_: "causal")
        update_and_fetch = staticmethod(lambda keys, values: (keys, values))

    def loss(model: Any) -> Any:
        fused = model.fuse(states)[None]
        own = model(embedded[:, 1:-1], fused[:, : len(tokens) - 2], [Causal])
        return nn.losses.cross_entropy(model.lm_head(model.norm(own[0, rows])), labels, reduction="mean")

    optimizer, step = Adam(0.01), nn.value_and_grad(model, loss)
    for _ in range(steps):
        _, gradients = step(model)
        optimizer.update(model, gradients)
        mx.eval(model.parameters())
