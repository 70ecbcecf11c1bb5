"""Perplexity and time of sparse attention: dense and sparse passes over the same tokens, interleaved."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from benchmarks.perplexity import log_probability
from edgespec.loop.backend import Work
from edgespec.loop.passes import prefill

ROWS = 63  # of a pass: the root and a tree


@dataclass(slots=True)
class Passes:
    """
    Attributes:
        share: of the draft's attention; None: dense.
        read: share of the cells that are read, by pass; the pass's own are not counted.
        losses: -log p of each token.
        seconds: by pass.
    """

    share: float | None
    read: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    @property
    def perplexity(self) -> float:
        return float(np.exp(np.mean(self.losses)))

    def ratio(self, dense: "Passes") -> float:
        """Median of the pairs' ratios of time."""
        return median(one / other for one, other in zip(self.seconds, dense.seconds, strict=True))


def compare(
    target: Any, draft: Any, token_ids: Sequence[int], after: int, passes: int, sparse: Sequence[tuple[float, Any]],
    sessions: Sequence[Any],
) -> list[Passes]:  # fmt: skip
    """
    Args:
        target: a model on torch.
        draft: its draft.
        token_ids: of a text.
        after: tokens before the first pass. These, and those of earlier passes, are read with dense attention.
        passes: number of them, each over the next `ROWS` tokens.
        sparse: shares of attention, and `TorchBackend.sparse` of each.
        sessions: of target and draft, with nothing or a beginning of the text.

    Returns:
        Dense passes, then those with each share.
    """
    found = [Passes(share) for share in (None, *(share for share, _ in sparse))]
    session, reader = sessions
    for start in range(after, after + passes * ROWS, ROWS):
        target.sparse = None
        prefill(target, session, token_ids[:start])
        prefill(draft, reader, token_ids[: start + 1], want_last=True)
        nodes = np.arange(ROWS, dtype=np.int32)
        work = Work(session, np.array(token_ids[start : start + ROWS], np.int32), nodes - 1, nodes)
        for one, target.sparse in zip(found, [None, *(chosen for _, chosen in sparse)], strict=True):
            begun = perf_counter()
            [logits] = target.forward([work])
            one.seconds.append(perf_counter() - begun)
            one.losses += [-log_probability(logits.row(i), token_ids[start + i + 1]) for i in range(ROWS)]
            session.commit([])
            chosen = target.sparse.cells(session, work, start, target.device) if target.sparse else {}
            one.read.append(1 - sum(1 - len(cells) / start for cells in chosen.values()) / len(target.windows))
    return found
