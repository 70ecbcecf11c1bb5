"""States of a head's session, and what a head takes, for every engine."""

from collections.abc import Iterable, Sequence
from math import prod
from typing import Any, Protocol, Self

import numpy as np

from edgespec.loop.backend import Work
from edgespec.loop.sampling import Float32Array
from edgespec.models.safetensors_header import Stored

from .nodes import NodeSession, Owner


class HeadOwner(Owner, Protocol):
    """
    Attributes:
        width: size of a row's state.
    """

    width: int

    def fuse(self, states: Float32Array) -> Float32Array:
        """
        Args:
            states: the target's, [n, `Capabilities.states`].

        Returns:
            Rows' states, [n, width].
        """


KEPT = 256  # states of unread tokens that a session keeps, besides the last given: each has tens of kilobytes
TABLES = ("d2t", "t2d")  # tensors of EAGLE-3 heads that are no weights
NO_EAGLE = "is no EAGLE-3 head, or is damaged"


def head_size(stored: Iterable[Stored]) -> tuple[int, int]:
    """
    Args:
        stored: a head's tensors.

    Returns:
        How many numbers its weights have, and keys and values in one cell of it.
    """
    weights = [one for one in stored if one.name not in TABLES]
    cell = sum(one.shape[0] for one in weights if one.name.endswith(("k_proj.weight", "v_proj.weight")))
    return sum(prod(one.shape) for one in weights), cell


class HeadSession(NodeSession):
    """A base, before the engine's own session class, that implements `edgespec.loop.backend.TakesStates`."""

    _backend: HeadOwner

    def __init__(self, *args: Any) -> None:
        self._given: dict[int, Float32Array] = {}  # position -> the target's state
        self._last: Float32Array | None = None  # the head's own, after the last committed token
        super().__init__(*args)

    def _forget_nodes(self) -> None:
        super()._forget_nodes()
        self._own: dict[int, Float32Array] = {}  # node -> the head's own state

    def give(self, start: int, states: Float32Array) -> None:
        while self._given and next(reversed(self._given)) >= start:
            self._given.popitem()
        self._given |= enumerate(states, start)
        for position in list(self._given)[: -KEPT - len(states)]:
            del self._given[position]

    def inputs(self, work: Work, positions: Sequence[int]) -> Float32Array:
        """
        Args:
            work: the next pass's.
            positions: of its nodes.

        Returns:
            States that the rows start from, [n, width], as `TakesStates` says.
        """
        rows = np.zeros((len(positions), self._backend.width), np.float32)
        given = [i for i, position in enumerate(positions) if position - 1 in self._given]
        for row, parent in zip(rows, work.parents.tolist(), strict=True):
            own = self._own.get(parent) if parent >= 0 else self._last
            if own is not None:
                row[:] = own
        if given:  # only now, since a head that is not asked reads many states at once
            rows[given] = self._backend.fuse(np.stack([self._given[positions[i] - 1] for i in given]))
        return rows

    def add_states(self, nodes: Sequence[int], states: Float32Array) -> None:
        """Keep the head's own states of nodes of the last pass, [n, width]."""
        self._own |= zip(nodes, states, strict=True)

    def _commit(self, path: Sequence[int], stay: Sequence[int]) -> None:
        own = self._own
        super()._commit(path, stay)
        if path:
            self._last = own.get(path[-1])
        self._own = {i: own[node] for i, node in enumerate(stay) if node in own}
        used = len(self.token_ids) - 2  # the last token may be read again
        self._given = {position: state for position, state in self._given.items() if position >= used}

    def rewind(self, length: int) -> None:
        if length < len(self.token_ids):
            self._last = None
            self._given = {position: state for position, state in self._given.items() if position < length}
        super().rewind(length)

    def _copy_cells(self, other: Self) -> None:
        super()._copy_cells(other)
        other._last = self._last
