"""Logits on the host, and as copied rows [V], one for each node, for engines or passes that return them one by one."""

from collections.abc import Sequence

import numpy as np

from edgespec.loop.backend import Logits
from edgespec.loop.sampling import Float32Array, IdArray, Scores, top_of_rows


class HostLogits(Logits):
    """What follows from `view`, which an engine adds."""

    def row(self, node: int) -> Float32Array:
        return self.view(node).copy()

    def state(self, node: int) -> Float32Array:
        return np.zeros(0, np.float32)

    def top(
        self, nodes: Sequence[int], k: int, temperature: float, noise: Sequence[Float32Array | None]
    ) -> tuple[list[IdArray], list[Scores]]:
        return top_of_rows(map(self.view, nodes), k, temperature, noise)


class RowLogits(HostLogits):
    def __init__(self, rows: dict[int, Float32Array] | None = None) -> None:
        self.rows = rows if rows is not None else {}

    def view(self, node: int) -> Float32Array:
        return self.rows[node]


class RowStateLogits(RowLogits):
    """See `edgespec.loop.backend.GivesStates`; states are copies, too."""

    def __init__(self) -> None:
        super().__init__()
        self.given: dict[int, Float32Array] = {}

    def states(self, nodes: Sequence[int]) -> Float32Array:
        return np.stack([self.given[node] for node in nodes])
