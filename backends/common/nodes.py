"""The base of every session: a sequence's committed tokens and uncommitted nodes. Engines add the cells."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np

from edgespec.errors import ContextFull
from edgespec.loop.backend import Backend, Capabilities, Session, Work
from edgespec.loop.passes import check_batch
from edgespec.loop.sampling import Float32Array
from edgespec.loop.session_files import Details, Loaded, Saved, damaged, read, write
from edgespec.loop.shapes import PromptRead
from edgespec.loop.tree import IntArray, is_leaf, nodes_below, parents_among


class Owner(Loaded, Protocol):
    def open(self) -> Any: ...


class NodeSession:
    """Implements `edgespec.loop.backend.Session` except for cells: subclasses override the hooks at the end.

    Attributes:
        positions: of the uncommitted nodes in the sequence.
    """

    _backend: Owner
    _form: type[Any] = Details

    def __init__(self, backend: Owner) -> None:
        self.token_ids: list[int] = []
        self._backend = backend
        self._prompt = PromptRead()
        self._forget_nodes()

    def _forget_nodes(self) -> None:
        self._prompt.reading = False
        self._tokens: list[int] = []  # by node, since the last commit
        self._parents: list[int] = []
        self.positions: list[int] = []

    @property
    def nodes(self) -> int:
        return len(self._parents)

    @property
    def size(self) -> int:
        """Tokens and nodes that have cells, or may get them."""
        return len(self.token_ids) + len(self._tokens)

    @property
    def parents(self) -> list[int]:
        return self._parents

    def check(self, work: Work) -> list[int]:
        """Check `work` before the pass; the session stays as it is.

        Returns:
            The positions of the work's nodes in the sequence.

        Raises:
            ContextFull: a position lies beyond the context.
            ValueError: the work breaks the contract.
        """
        limits, first, length = self._backend.capabilities, self.nodes, len(self.token_ids)
        parents, positions = [*self._parents, *work.parents.tolist()], self.positions.copy()
        if len(parents) > limits.max_nodes:
            raise ValueError(f"{len(parents)} uncommitted nodes; this backend holds {limits.max_nodes}")
        for node, parent in enumerate(parents[first:], first):
            if not -1 <= parent < node:
                raise ValueError(f"parents must come before their children: {parents}")
            positions.append(positions[parent] + 1 if parent >= 0 else length)
        if any(not first <= node < len(parents) for node in work.wanted.tolist()):
            raise ValueError(f"wanted {work.wanted.tolist()}: not all among the nodes {first} to {len(parents) - 1}")
        if (last := max(positions, default=-1)) >= limits.context_length:
            raise ContextFull(f"position {last} lies beyond the context of {limits.context_length} tokens")
        if len(parents) > limits.max_leaves and np.count_nonzero(is_leaf(parents)) > limits.max_leaves:
            raise ValueError(f"more than {limits.max_leaves} leaves; this backend holds no more")
        return positions[first:]

    def _add_nodes(self, work: Work, positions: Sequence[int]) -> None:
        self._tokens += work.token_ids.tolist()
        self._parents += work.parents.tolist()
        self.positions += positions
        self._prompt.add(work.prompt, work.short, len(self.token_ids))

    @property
    def unread_committed(self) -> int:
        return 0

    def reusable_prefix(self, length: int, *, short: bool = False) -> int:
        return self._prompt.reusable_prefix(self._backend.capabilities.exact, length, short)

    def commit(self, path: Sequence[int]) -> None:
        self._commit(path, [])

    def commit_keeping(self, path: Sequence[int]) -> IntArray:
        stay = nodes_below(self._parents, path[-1] if path else -1) if self._can_keep else []
        self._commit(path, stay)
        return np.array(stay, np.int32)

    def _commit(self, path: Sequence[int], stay: Sequence[int]) -> None:
        if [self._parents[node] for node in path] != [-1, *path][: len(path)]:
            raise ValueError(f"nodes {list(path)} are not a chain under the last committed token")
        self._commit_cells(path, stay)
        self._prompt.commit(len(self.token_ids), len(path))
        self.token_ids.extend(self._tokens[node] for node in path)
        self._keep_nodes(stay)

    def _keep_nodes(self, nodes: Sequence[int]) -> None:
        """Forget all other nodes, and number `nodes` from 0."""
        tokens, parents, positions = self._tokens, parents_among(self._parents, nodes), self.positions
        self._forget_nodes()
        self._tokens, self._parents = [tokens[node] for node in nodes], parents
        self.positions = [positions[node] for node in nodes]

    def rewind(self, length: int) -> None:
        del self.token_ids[length:]
        self._prompt.rewind(length)
        self._forget_nodes()

    def fork(self) -> Self:
        other: Self = self._backend.open()
        other.token_ids, other._prompt = self.token_ids.copy(), replace(self._prompt)
        self._copy_cells(other)
        return other

    def load(self, path: str | Path) -> Any:
        saved, details = read(path, self._backend, self._form)
        if self._size(len(saved.token_ids), details) not in (None, saved.size):
            raise damaged(path)
        self.rewind(0)
        self._load_cells(path, saved, details)
        self.token_ids, self._prompt = saved.token_ids, PromptRead(details.read, details.short)
        return saved.note

    def save(self, path: str | Path, note: Any = None) -> None:
        write(path, self._backend, self.token_ids, self._details(), self._write_cells, note)

    def _details(self) -> Any:
        """For the session's file, of `_form`."""
        return Details(**self._prompt.as_dict())

    @property
    def _can_keep(self) -> bool:
        return True

    def _commit_cells(self, path: Sequence[int], stay: Sequence[int]) -> None:
        """Move cells: right after those of the committed tokens come those of `path`, then those of `stay`."""
        length, order = len(self.token_ids), [*path, *stay]
        moved = next((i for i, node in enumerate(order) if i != node), len(order))
        if moved < len(order):
            self._move_cells(length + moved, [length + node for node in order[moved:]])

    def _move_cells(self, start: int, cells: list[int]) -> None:
        """Copy cells, by their numbers, to those from `start` on."""

    def _copy_cells(self, other: Self) -> None: ...

    def _size(self, length: int, details: Any) -> int | None:
        """The engine's bytes in the file of a session with `length` tokens; None: not known."""

    def _write_cells(self, new: Path) -> None:
        """Write the engine's bytes of a session's file."""

    def _load_cells(self, path: str | Path, saved: Saved, details: Any) -> None: ...


def checked(batch: Sequence[Work], limits: Capabilities) -> tuple[list[Any], list[list[int]]]:
    """The sessions of a pass's works, and the positions of each work's nodes; errors as for `NodeSession.check`."""
    check_batch(batch, limits)
    sessions: list[Any] = [work.session for work in batch]
    return sessions, [session.check(work) for session, work in zip(sessions, batch, strict=True)]


def last_rows(
    backend: Backend, session: Session, token_ids: list[int], parents: list[int], count: int
) -> list[Float32Array]:
    """The logits of the last `count` nodes."""
    last = [*range(len(token_ids) - count, len(token_ids))]
    tokens, above, wanted = (np.array(values, np.int32) for values in (token_ids, parents, last))
    logits = backend.forward([Work(session, tokens, above, wanted)])[0]
    return [logits.row(node) for node in last]


def last_row(backend: Backend, session: Session, token_ids: list[int], parents: list[int]) -> Float32Array:
    return last_rows(backend, session, token_ids, parents, 1)[0]


def rows_of_tree(backend: Backend, session: Session) -> list[Float32Array]:
    """For `is_another`, in two passes: the logits of a tree's node, of its chain of ancestors, and of another chain."""
    row, other = last_rows(backend, session, [1, 2, 3, 3], [-1, 0, 0, 1], 2)
    session.commit([])
    right = last_row(backend, session, [1, 3], [-1, 0])
    session.commit([])
    return [row, right, other]


def is_another(row: Float32Array, right: Float32Array, wrong: Float32Array) -> bool:
    """True if logits are not `right` but for rounding, or those of something else hardly differ from these."""
    return not np.abs(row - right).max() < 0.25 * np.abs(right - wrong).max()
