"""Trees as paths (`paths.py`) for `torch` and `mlx`.

States of recurrent layers belong to paths: unread committed tokens, and nodes on several paths, are computed again.
Cells of attention belong to nodes, and are filled once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Self

import numpy as np
from numpy.typing import NDArray

from edgespec.loop.backend import Work
from edgespec.loop.tree import ancestor_mask, depths

from .nodes import NodeSession
from .paths import (
    KEPT_STATES,
    MOST_PATHS,
    MOST_UNREAD,
    MOST_UNREAD_IN_MEMORY,
    State,
    States,
    paths_of,
    state_lane_from,
    states_within,
)


@dataclass(frozen=True, slots=True)
class Lane(Generic[State]):
    """A path, with the unread committed tokens before it.

    Attributes:
        start: tokens of the sequence before the lane.
        state: of the recurrent layers after those; None if `start` is 0.
        token_ids: committed tokens, then those of `nodes`.
        nodes: numbers of the nodes that the lane ends with.
    """

    start: int
    state: State | None
    token_ids: list[int]
    nodes: list[int]


class Rectangle(Generic[State]):
    """Lanes of one session as rows of one length. Shorter lanes repeat their last token.

    Attributes:
        token_ids, positions: shape [lanes, width].
        nodes: numbers of the nodes, shape [lanes, width]; -1 for a committed token.
        rows: for each node of the work, in order, its first place in the flattened `nodes`.
        in_order: each token sees exactly those before it, so that no mask is needed.
    """

    def __init__(self, lanes: Sequence[Lane[State]], width: int, first: int) -> None:
        """
        Args:
            lanes: all that evaluate a work.
            width: tokens of each row.
            first: number of the work's first node.
        """
        self.lanes = lanes
        shape = len(lanes), width
        self.token_ids, self.positions, self.nodes = (np.full(shape, -1, np.int64) for _ in range(3))
        for row, lane in enumerate(lanes):
            count, places = len(lane.token_ids), np.minimum(np.arange(width), len(lane.token_ids) - 1)
            nodes = np.array([-1] * (count - len(lane.nodes)) + lane.nodes)
            self.token_ids[row], self.nodes[row] = np.array(lane.token_ids)[places], nodes[places]
            self.positions[row] = lane.start + places
        found, at = np.unique(self.nodes, return_index=True)
        self.width, self.first = width, first
        self.rows: NDArray[np.int64] = at[found >= first]
        self.in_order = first == 0 and len(lanes) == 1 and len(self.rows) == width

    def sees(self, parents: Sequence[int], length: int, window: int | None) -> NDArray[np.bool_]:
        """
        Args:
            parents: of all uncommitted nodes.
            length: committed tokens.
            window: how many positions, its own included, a token can look at; None: all.

        Returns:
            True where a token sees a cell, shape [tokens of all lanes, length + nodes].
        """
        positions, nodes = self.positions.reshape(-1), self.nodes.reshape(-1)
        above = np.zeros((len(parents) + 1, len(parents)), np.bool_)  # the last row, -1, is for committed tokens
        above[: len(parents)] = ancestor_mask(parents)
        seen = np.concatenate([np.arange(length) <= positions[:, None], above[nodes]], axis=1)
        if window is not None:
            places = np.concatenate([np.arange(length), length + depths(parents)])
            seen &= positions[:, None] - places < window
        return seen


class RecurrentStates(Generic[State]):
    """States of one session's recurrent layers, after committed tokens (`text`) and after last nodes of paths."""

    def __init__(self, most_paths: int, streams: bool) -> None:
        """
        Args:
            most_paths: of a tree; also the most nodes whose states are kept.
            streams: passes read weights from a disk or over a bus, so one pass is better than two.
        """
        self.text = States[State](KEPT_STATES)
        self._tips = dict[int, State]()
        self._most_paths, self._streams = most_paths, streams
        self._after_prompt = False  # the last commit was of a prompt's part

    def unread_committed(self, length: int) -> int:
        """Of `length` committed tokens, the number that the next pass begins with; 0 if they need a pass (`unread`)."""
        behind = length - self.text.last
        return behind if behind <= (MOST_UNREAD if self._streams else MOST_UNREAD_IN_MEMORY) else 0

    def unread(self, token_ids: Sequence[int], most: int) -> Rectangle[State] | None:
        """A pass for at most `most` unread committed tokens, if there are too many to begin paths with."""
        last = self.text.last
        if len(token_ids) - last == self.unread_committed(len(token_ids)):
            return None
        lane = Lane(last, self.text.kept.get(last), list(token_ids[last : last + most]), [])
        return Rectangle([lane], len(lane.token_ids), 0)

    def lanes(
        self, text: Sequence[int], nodes: Sequence[int], parents: Sequence[int], work: Work, most: int
    ) -> list[Lane[State]]:
        """
        Args:
            text: committed tokens.
            nodes: tokens of all uncommitted nodes; those of the work are the last.
            parents: of all uncommitted nodes.
            work: to evaluate.
            most: tokens that the lanes may have together if one is added to get a state of committed tokens.

        Returns:
            The lanes that evaluate `work`.
        """
        length, last, above = len(text), self.text.last, depths(parents)
        if self._after_prompt and not work.prompt:
            self.text.mark(length)
        found = list[Lane[State]]()
        for path in paths_of(parents, len(nodes) - len(work.token_ids), self._tips):
            tokens = [nodes[node] for node in path.nodes]
            if path.start >= 0:
                start = length + int(above[path.nodes[0]])
                found.append(Lane(start, self._tips[path.start], tokens, path.nodes))
            else:
                found.append(Lane(last, self.text.kept.get(last), [*text[last:], *tokens], path.nodes))
        if self._streams and last < length and any(lane.start == last for lane in found):
            tokens_each = max(len(lane.token_ids) for lane in found)
            # Not from 0: next to other lanes, a lane without a state gets one of zeros, with which some models compute
            # otherwise than without.
            at = state_lane_from(self.text.kept, length, len(found), tokens_each, most)
            if at is not None:
                found.append(Lane(at, self.text.kept[at], list(text[at:]), []))
        return found

    def take(self, rectangle: Rectangle[State], states: Sequence[State]) -> None:
        """Keep the states after a pass, except those of lanes that repeat their last token."""
        for lane, state in zip(rectangle.lanes, states, strict=True):
            if len(lane.token_ids) == rectangle.width and lane.nodes:
                self._tips[lane.nodes[-1]] = state
            elif len(lane.token_ids) == rectangle.width:
                self.text.add(lane.start + rectangle.width, state)
        for node in sorted(self._tips)[: -self._most_paths]:
            del self._tips[node]

    def commit(self, length: int, path: Sequence[int], prompt: bool) -> None:
        """
        Args:
            length: committed tokens before `path`.
            path: nodes that become committed.
            prompt: they are part of a prompt.
        """
        ends = [(at, node) for at, node in enumerate(path, length + 1) if node in self._tips]
        if ends:
            at, node = ends[-1]
            self.text.add(at, self._tips[node])
        self._after_prompt = prompt
        self._tips = {}

    def any(self) -> State:
        """A state, after a pass over nodes."""
        return next(iter([*self.text.kept.values(), *self._tips.values()]))

    def cut(self, length: int) -> None:
        """Forget the states of nodes and those after more than `length` tokens."""
        self.text.cut(length)
        self._tips = {}


class RecurrentSession(NodeSession, Generic[State]):
    """Mixin that adds states of recurrent layers to an engine's session; the mixin must be the first base."""

    states: RecurrentStates[State]

    def lanes(self, work: Work) -> list[Lane[State]]:
        tokens, parents = self._tokens + work.token_ids.tolist(), self._parents + work.parents.tolist()
        return self.states.lanes(self.token_ids, tokens, parents, work, self._backend.capabilities.max_nodes)

    @property
    def unread_committed(self) -> int:
        return self.states.unread_committed(len(self.token_ids))

    def reusable_prefix(self, length: int, *, short: bool = False) -> int:
        return length if length == len(self.token_ids) else self.states.text.before(length)

    @property
    def _can_keep(self) -> bool:
        return False  # the states of nodes below start from nodes that are committed now

    def _commit_cells(self, path: Sequence[int], stay: Sequence[int]) -> None:
        super()._commit_cells(path, stay)
        self.states.commit(len(self.token_ids), path, self._prompt.reading)

    def rewind(self, length: int) -> None:
        super().rewind(length)
        self.states.cut(length)

    def _copy_cells(self, other: Self) -> None:
        super()._copy_cells(other)
        other.states.text = self.states.text.copy()


def most_paths(state: int, weights: int, budget: int, sessions: int) -> int:
    """
    Args:
        state: bytes of one.
        weights: bytes.
        budget: largest tree that will be asked for, in nodes without the root.
        sessions: that may be open at once.

    Returns:
        The most paths of a tree with which all states fit into their part of the memory.
    """
    every = states_within(state, weights, sessions * states_of(MOST_PATHS)) // sessions
    return max(1, min(MOST_PATHS, budget, (every - states_of(0)) // (states_of(1) - states_of(0))))


def states_of(paths: int) -> int:
    """Most states of a session: after committed tokens, after nodes, and before and after a pass of one more lane."""
    return KEPT_STATES + paths + 2 * (paths + 1)
