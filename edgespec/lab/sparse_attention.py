"""SpecAttn (arXiv 2510.27641), approximate: the cells that a draft model attends to are those that its target reads.

Before a target verifies a tree, its draft has read the text up to the root. The target's first layers read all cells.
In each other layer, a node reads its ancestors and itself, and the fewest committed cells that hold a share of
the root's attention in one layer of the draft, which `layer_map` gives. Prompts read all cells. So does a tree whose
root is not the last token that the draft has read.
"""

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from edgespec.errors import UsageError
from edgespec.loading.approximate import Approximate
from edgespec.loop.backend import Backend, Work
from edgespec.loop.passes import prefill
from edgespec.machine import measurements
from edgespec.models.convert.calibration import english

WHOLE = 2  # first layers, whose attention is spread over the text
TOKENS, ROWS = 512, 32  # tokens of the text for `layer_map`, and its last rows, whose attention is compared
LEAST = 1e-9  # probability: less counts as this in a divergence


class SparseAttention:
    def __init__(self, draft: Any, share: float, layers: Sequence[int]) -> None:
        """
        Args:
            draft: keeps queries.
            share: of the draft's attention, above 0; 1: all cells.
            layers: of the draft, for each layer of the target.
        """
        self._draft, self._share, self._layers = draft, share, layers

    def cells(self, session: Any, work: Work, end: int, device: Any) -> dict[int, Any]:
        """
        Args:
            session: of the target.
            work: nodes that follow the committed tokens.
            end: the cell after their last one.
            device: where the cells' numbers will lie.

        Returns:
            Cells that the work reads, in order, by layer of the target; other layers read all.
        """
        tokens, found = [*session.token_ids, *work.token_ids[:1].tolist()], dict[int, Any]()
        if work.prompt or session.nodes or len(tokens) == 1:
            return found
        draft = next((one for one in self._draft.sessions if one.queries and one.token_ids == tokens), None)
        if draft is None:
            return found
        nodes, chosen = torch.arange(len(tokens) - 1, end, device=device), dict[int, Any]()
        for layer, of_draft in enumerate(self._layers):
            if layer < WHOLE:
                continue
            if of_draft not in chosen:
                keys = draft.cells.by_layer[of_draft][0][:, : len(tokens) - 1]
                committed = heaviest(attention(draft.queries[of_draft][:, -1:], keys)[0], self._share)
                chosen[of_draft] = torch.cat([committed.to(device), nodes])
            found[layer] = chosen[of_draft]
        return found


def attention(queries: Any, keys: Any) -> Any:
    """
    Args:
        queries: [heads, rows, d], scaled, of the last rows.
        keys: [key heads, cells, d].

    Returns:
        [rows, cells], the mean of the heads.
    """
    rows, cells = queries.shape[1], keys.shape[1]
    grouped = queries.float().unflatten(0, (len(keys), -1)).flatten(1, 2)  # heads as rows: no copies of the keys
    scores = (grouped @ keys.float().transpose(1, 2)).unflatten(1, (-1, rows))
    later = torch.ones((rows, cells), dtype=torch.bool, device=keys.device).triu(1 + cells - rows)
    return torch.softmax(scores.masked_fill_(later, -torch.inf), -1).mean((0, 1))


def heaviest(weights: Any, share: float) -> Any:
    """
    Returns:
        The fewest cells that hold `share` of the weights [cells], in order.
    """
    values, order = weights.sort(descending=True, stable=True)
    count = int((values.cumsum(0) < share * values.sum()).sum()) + 1 if share < 1 else len(values)
    return order[:count].sort().values


def layer_map(target: Any, draft: Any, token_ids: Sequence[int]) -> list[int]:
    """
    Returns:
        A layer of the draft for each of the target, by which their attention over a text diverges least.
    """
    ours, drafts = ([rows.clamp(LEAST) for rows in _read(backend, token_ids)] for backend in (target, draft))
    costs = [[float((p * (p / q).log()).sum(-1).mean()) for q in drafts] for p in ours]
    return least_in_order(costs)


def least_in_order(costs: ArrayLike) -> list[int]:
    """
    Args:
        costs: [target's layers, draft's layers].

    Returns:
        A layer of the draft for each of the target, none before that of the layer before, of the least cost in all.
    """
    total, before = np.zeros(np.shape(costs)[1]), list[NDArray[np.intp]]()
    for row in np.asarray(costs):
        before.append(np.array([np.argmin(total[: i + 1]) for i in range(len(total))]))
        total = total[before[-1]] + row
    found = [int(np.argmin(total))]
    for choice in before[:0:-1]:
        found.append(int(choice[found[-1]]))
    return found[::-1]


def _read(backend: Any, token_ids: Sequence[int]) -> list[Any]:
    """Attention [rows, cells] of the last rows in each layer."""
    with closing(backend.open()) as session:
        prefill(backend, session, token_ids)
        rows = [
            attention(session.queries[i], cells[0][:, : len(token_ids)]) for i, cells in session.cells.by_layer.items()
        ]
        return [one.cpu() for one in rows]


def follow(target: Any, draft: Any, share: float, remember: bool, say: Callable[[str], None]) -> None:
    """Have a loaded target read the cells that a draft attends to.

    Args:
        target: on torch, with room for a session.
        draft: as `target`.
        share: of the draft's attention.
        remember: store for later runs which layers of the two attend alike.
        say: as for `edgespec.load`.

    Raises:
        UsageError: a layer of the two does not attend to the whole text.
    """
    for name, backend in (("target", target), ("draft", draft)):
        if backend.capabilities.paths or any(backend.windows):
            raise UsageError(f"sparse-attention: the {name} has layers that do not attend to the whole text")
    about = {
        "kind": "attention map", "target": target.content, "draft": draft.content,
        "dtypes": f"{target.dtype}, {draft.dtype}", "build": target.build,
    }  # fmt: skip
    count = len(target.windows)
    layers = (measurements.recall(about, list[int]) if remember else None) or []
    whole = len(layers) == count and all(i in range(len(draft.windows)) for i in layers)
    target.keeps_queries = draft.keeps_queries = ROWS
    if not whole:
        say("comparing the attention of the two models")
        most = min(TOKENS, target.capabilities.context_length, draft.capabilities.context_length)
        layers = layer_map(
            target, draft, target.vocab.encode(english()[: 8 * TOKENS], add_bos=True, parse_special=False)[:most]
        )
        if remember:
            measurements.remember(about, layers)
    target.keeps_queries = 0
    target.choose_cells = SparseAttention(draft, share, layers).cells
    words = f"sparse attention {share:g}"
    target.capabilities = replace(target.capabilities, approximate=words)
    target.computing = {**target.computing, "approximate": words}


class Sparse(Approximate):
    name, usual, right, needs_draft = "sparse-attention", 0.99, "above 0 and at most 1", True

    @staticmethod
    def is_right(value: float) -> bool:
        return 0 < value <= 1

    def check_engines(self, names: Sequence[str]) -> None:
        if {*names} != {"torch"}:
            raise UsageError(
                f"--approximate {self.name} needs both models on torch, and they are on {' and '.join(names)}"
            )

    def attach(self, target: Backend, draft: Backend, *, remember: bool, say: Callable[[str], None]) -> None:
        follow(target, draft, self.value, remember, say)


METHOD = Sparse
