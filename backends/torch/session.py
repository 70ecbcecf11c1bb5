"""One sequence's cells: where nodes go, what they see, and what a commit moves."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from edgespec.errors import ContextFull
from edgespec.loop.backend import Capabilities, Work
from edgespec.loop.session_files import Loaded, read, write
from edgespec.loop.shapes import PromptRead
from edgespec.loop.tree import IntArray, nodes_below, parents_among


class Owner(Loaded, Protocol):
    """What a session needs of the backend it belongs to."""

    capabilities: Capabilities

    def open(self) -> "TorchSession": ...

    def release(self, cells: Any) -> None: ...


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a work's nodes go in its session."""

    first: int  # number of the first new node
    positions: list[int]  # of the new nodes
    sees: NDArray[np.bool_]  # [new, first + new]: which nodes each new node sees


class TorchSession:
    """See `edgespec.loop.backend.Session`."""

    def __init__(self, backend: Owner, cells: Any) -> None:
        self.token_ids: list[int] = []
        self.cells = cells  # [layers, 2, key heads, cells, d]; None when closed
        self._backend = backend
        self._prompt = PromptRead()
        self._forget_nodes()

    def _forget_nodes(self) -> None:
        self._tokens: list[int] = []  # by node, since the last commit
        self._parents: list[int] = []
        self.positions: list[int] = []
        self._sees: list[NDArray[np.bool_]] = []  # row i: nodes 0 … i and perhaps more

    def place(self, work: Work) -> Placement:
        """Find new nodes their places. Changes nothing.

        Raises:
            ContextFull: a position lies beyond the context.
            ValueError: more nodes than the capabilities allow, or a parent or wanted node that does not exist.
        """
        first, count, parents = len(self._tokens), len(work.token_ids), work.parents.tolist()
        limits, length = self._backend.capabilities, len(self.token_ids)
        if first + count > limits.max_nodes:
            raise ValueError(f"{first + count} uncommitted nodes; this backend holds {limits.max_nodes}")
        if any(not -1 <= parent < first + i for i, parent in enumerate(parents)):
            raise ValueError(f"parents must come before their children: {parents}")
        if any(not first <= node < first + count for node in work.wanted.tolist()):
            raise ValueError(f"wanted {work.wanted.tolist()}: not all among the nodes {first} to {first + count - 1}")
        positions = self.positions.copy()
        for parent in parents:
            positions.append(positions[parent] + 1 if parent >= 0 else length)
        last = max(positions, default=-1)
        if last >= limits.context_length:
            raise ContextFull(f"position {last} lies beyond the context of {limits.context_length} tokens")
        return Placement(first, positions[first:], visible(self._sees, parents))

    def keep(self, work: Work, placement: Placement) -> None:
        """The nodes have been evaluated."""
        self._tokens.extend(work.token_ids.tolist())
        self._parents.extend(work.parents.tolist())
        self.positions.extend(placement.positions)
        self._sees.extend(placement.sees)
        self._prompt.add(work.prompt, work.short, len(self.token_ids))

    @property
    def unread_committed(self) -> int:
        return 0

    def reusable_prefix(self, length: int, *, short: bool = False) -> int:
        return self._prompt.reusable_prefix(self._backend.capabilities.exact, length, short)

    def commit(self, path: Sequence[int], *, below: bool = False) -> IntArray:
        if [self._parents[node] for node in path] != [-1, *path][: len(path)]:
            raise ValueError(f"nodes {list(path)} are not a chain under the last committed token")
        length, kept = len(self.token_ids), nodes_below(self._parents, path[-1] if path else -1) if below else []
        order = [*path, *kept]
        moved = next((i for i, node in enumerate(order) if i != node), len(order))  # what is before lies right already
        if moved < len(order):
            nodes = torch.tensor([length + node for node in order[moved:]], device=self.cells.device)
            with torch.inference_mode():
                self.cells[:, :, :, length + moved : length + len(order)] = self.cells.index_select(3, nodes)
        self._prompt.commit(length, len(path))
        self.token_ids.extend(self._tokens[node] for node in path)
        tokens, positions, sees = self._tokens, self.positions, self._sees
        parents = parents_among(self._parents, kept)
        self._forget_nodes()
        self._tokens, self._parents = [tokens[node] for node in kept], parents
        self.positions = [positions[node] for node in kept]
        self._sees = [sees[node][kept[: i + 1]] for i, node in enumerate(kept)]
        return np.array(kept, np.int32)

    def rewind(self, length: int) -> None:
        del self.token_ids[length:]
        self._prompt.rewind(length)
        self._forget_nodes()

    def fork(self) -> "TorchSession":
        other = self._backend.open()
        length = len(self.token_ids)
        with torch.inference_mode():
            other.cells[:, :, :, :length] = self.cells[:, :, :, :length]
        other.token_ids, other._prompt = self.token_ids.copy(), replace(self._prompt)
        return other

    def _saved(self, length: int) -> list[Any]:
        """Tensors that a file has of a text of so many tokens, in their order."""
        return [layer[:, :, :length] for layer in self.cells] if length else []

    def _details(self) -> dict[str, Any]:
        """What has to be known before they are read."""
        return self._prompt.as_dict()

    def _make(self, details: dict[str, Any]) -> None:
        """See that there is room for them."""

    def save(self, path: str | Path, note: Any = None) -> None:
        def put(new: Path) -> None:
            with new.open("wb") as file:
                for tensor in self._saved(len(self.token_ids)):
                    tensor.contiguous().view(torch.uint8).cpu().numpy().tofile(file)

        write(path, self._backend, self.token_ids, self._details(), put, note)

    def load(self, path: str | Path) -> Any:
        saved = read(path, self._backend)
        self.rewind(0)
        with torch.inference_mode():
            self._make(saved.details)
            with Path(path).open("rb") as file:
                for tensor in self._saved(len(saved.token_ids)):
                    found = torch.from_numpy(np.fromfile(file, np.uint8, tensor.numel() * tensor.itemsize))
                    tensor.copy_(found.view(tensor.dtype).view(tensor.shape))
        self.token_ids, self._prompt = saved.token_ids, PromptRead.of(saved.details)
        return saved.note

    def close(self) -> None:
        if self.cells is not None:
            self._backend.release(self.cells)
            self.rewind(0)
        self.cells = None


def visible(sees: Sequence[NDArray[np.bool_]], parents: Sequence[int]) -> NDArray[np.bool_]:
    """Which nodes the next nodes see: their ancestors and themselves.

    Args:
        sees: the same for the nodes before, row by row.
        parents: of the new nodes; numbers from len(sees) on are new nodes.

    Returns:
        [new, all].
    """
    first, count = len(sees), len(parents)
    rows = np.zeros((count, first + count), np.bool_)
    if list(parents[1:]) == list(range(first, first + count - 1)):  # a chain, perhaps a prompt's
        rows[:, first:] = np.tri(count, dtype=np.bool_)
        if count and parents[0] >= 0:
            rows[:, : len(sees[parents[0]])] |= sees[parents[0]]
        return rows
    for i, parent in enumerate(parents):
        if parent >= first:
            rows[i] = rows[parent - first]
        elif parent >= 0:
            rows[i, : len(sees[parent])] = sees[parent]
        rows[i, first + i] = True
    return rows
