"""One vector of a text from the states of its tokens."""

from collections.abc import Iterable

import numpy as np

from edgespec.loop.sampling import Float32Array

POOLINGS = ("mean", "cls", "last")  # of all tokens; of the first; of the last
DEFAULT = "mean"


def pooled(parts: Iterable[Float32Array], pooling: str) -> Float32Array:
    """
    Args:
        parts: states of a text's tokens, [n, width] of each part.
        pooling: one of `POOLINGS`.

    Returns:
        A vector of length 1.
    """
    found = np.zeros(0)
    for i, states in enumerate(parts):
        if pooling == "mean":
            found = states.sum(0, dtype=np.float64) + (found if i else 0)
        elif pooling == "last" or i == 0:
            found = states[-1 if pooling == "last" else 0]
    length = float(np.linalg.norm(found))
    return (found / (length or 1)).astype(np.float32)
