from collections.abc import Sequence
from typing import Any

import numpy as np

from edgespec.loop.backend import Backend, Work


def best_tokens(backend: Backend, token_ids: Sequence[int], count: int, *, first: int = 0) -> Any:
    """The best next tokens after token `first` and each later one, [n, count], by one pass over all of them."""
    session = backend.open()
    nodes = np.arange(len(token_ids), dtype=np.int32)
    logits = backend.forward([Work(session, np.asarray(token_ids, np.int32), nodes - 1, nodes[first:])])[0]
    wanted = nodes[first:].tolist()
    ids, _ = logits.top(wanted, count, 1.0, [None] * len(wanted))
    session.close()
    return np.stack(ids)
