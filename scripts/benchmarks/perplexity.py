"""Perplexity: exp of the mean of -log p(token | the tokens before it in its piece)."""

from collections.abc import Callable, Sequence

import numpy as np

from edgespec.errors import UsageError
from edgespec.loop.backend import Backend, Work
from edgespec.loop.sampling import Float32Array, log_sum_exp

PIECE = 512  # tokens


def perplexity(
    backend: Backend, token_ids: Sequence[int], *, piece: int = PIECE, done: Callable[[int], None] = lambda tokens: None
) -> float:
    """
    Args:
        backend: a loaded model.
        token_ids: at least two.
        piece: tokens that are predicted from each other only.
        done: called with the number of tokens after every piece.

    Raises:
        UsageError: there are fewer than two tokens.
    """
    total, count = 0.0, 0
    for start in range(0, len(token_ids), piece):
        ids = np.array(token_ids[start : start + piece], np.int32)
        if len(ids) > 1:
            nodes = np.arange(len(ids), dtype=np.int32)
            session = backend.open()
            logits = backend.forward([Work(session, ids, nodes - 1, nodes)])[0]
            total -= sum(log_probability(logits.row(i), ids[i + 1]) for i in range(len(ids) - 1))
            count += len(ids) - 1
            session.close()
        done(len(ids))
    if not count:
        raise UsageError("perplexity needs a text of at least two tokens")
    return float(np.exp(total / count))


def log_probability(row: Float32Array, token_id: int) -> float:
    return float(row[token_id]) - log_sum_exp(row)
