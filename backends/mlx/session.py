"""One sequence's buffers: what fits, and what a commit moves."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import mlx.core as mx
import numpy as np

from edgespec.errors import ContextFull
from edgespec.loop.backend import Capabilities, Work
from edgespec.loop.session_files import Loaded, read, write
from edgespec.loop.shapes import PromptRead
from edgespec.loop.tree import IntArray, depths, nodes_below, parents_among

from .tree import Pass, TreeCache


class Owner(Loaded, Protocol):
    """What a session needs of the backend it belongs to."""

    capabilities: Capabilities

    def open(self) -> "MlxSession": ...

    def forget(self, session: "MlxSession") -> None: ...


class MlxSession:
    """See `edgespec.loop.backend.Session`."""

    def __init__(self, backend: Owner, caches: list[TreeCache]) -> None:
        self.token_ids: list[int] = []
        self.caches = caches
        self._backend = backend
        self._tokens: list[int] = []  # uncommitted nodes' tokens
        self._parents: list[int] = []
        self._prompt = PromptRead()

    def check(self, work: Work) -> None:
        """Refuse a work that breaks the contract or does not fit, before anything changes."""
        limits, first = self._backend.capabilities, len(self._parents)
        parents = self._parents + work.parents.tolist()
        if len(parents) > limits.max_nodes:
            raise ValueError(f"{len(parents)} uncommitted nodes; this backend holds {limits.max_nodes}")
        if any(not -1 <= parent < node for node, parent in enumerate(parents)):
            raise ValueError(f"parents must come before their children: {parents}")
        if any(not first <= node < len(parents) for node in work.wanted.tolist()):
            raise ValueError(f"wanted {work.wanted.tolist()}: not all among the nodes {first} to {len(parents) - 1}")
        last = len(self.token_ids) + int(depths(parents).max(initial=-1))
        if last >= limits.context_length:
            raise ContextFull(f"position {last} lies beyond the context of {limits.context_length} tokens")

    def place(self, work: Work) -> tuple[Any, Any]:
        """Begin a pass over a checked work's nodes: the tokens that the model gets [1, n], and their rows wanted."""
        here = Pass(self._parents + work.parents.tolist(), len(self._parents), len(self.token_ids))
        for cache in self.caches:
            cache.offset = here
        return work.token_ids[None], work.wanted - self.nodes

    def place_unread(self) -> Any:
        """Begin a pass over text that has to be read before the next: its tokens; None: there is no such text."""
        return None

    def add(self, work: Work) -> None:
        """The work's nodes have been evaluated."""
        self._tokens += work.token_ids.tolist()
        self._parents += work.parents.tolist()
        self._prompt.add(work.prompt, work.short, len(self.token_ids))

    def take(self) -> None:
        """That pass has been computed."""

    @property
    def given(self) -> Sequence[Any]:
        """What the model takes for its caches."""
        return self.caches

    @property
    def state(self) -> list[Any]:
        """All buffers."""
        return [buffer for cache in self.caches for buffer in (cache.keys, cache.values) if buffer is not None]

    @property
    def nodes(self) -> int:
        """How many uncommitted nodes there are."""
        return len(self._parents)

    @property
    def unread_committed(self) -> int:
        return 0

    def reusable_prefix(self, length: int, *, short: bool = False) -> int:
        return self._prompt.reusable_prefix(self._backend.capabilities.exact, length, short)

    def commit(self, path: Sequence[int], *, below: bool = False) -> IntArray:
        if [self._parents[node] for node in path] != [-1, *path][: len(path)]:
            raise ValueError(f"nodes {list(path)} are not a chain under the last committed token")
        kept = nodes_below(self._parents, path[-1] if path else -1) if below else []
        order = [*path, *kept]
        stay = next((i for i, node in enumerate(order) if node != i), len(order))  # these cells are where they belong
        if stay < len(order):
            self._move([len(self.token_ids) + node for node in order[stay:]], len(self.token_ids) + stay)
        self._prompt.commit(len(self.token_ids), len(path))
        self.token_ids.extend(self._tokens[node] for node in path)
        self._tokens = [self._tokens[node] for node in kept]
        self._parents = parents_among(self._parents, kept)
        return np.array(kept, np.int32)

    def _move(self, cells: list[int], start: int) -> None:
        index, end = mx.array(cells), start + len(cells)
        moved = [(cache.keys[..., index, :], cache.values[..., index, :]) for cache in self.caches]
        mx.eval(moved)  # from here on nothing else holds the buffers, so they are written in place
        for cache, (keys, values) in zip(self.caches, moved, strict=True):
            cache.keys[..., start:end, :] = keys
            cache.values[..., start:end, :] = values
        mx.eval(self.state)

    def rewind(self, length: int) -> None:
        del self.token_ids[length:]
        self._prompt.rewind(length)
        self._tokens, self._parents = [], []

    def fork(self) -> "MlxSession":
        other = self._backend.open()
        other.token_ids, other._prompt = self.token_ids.copy(), replace(self._prompt)
        for mine, theirs in zip(self.caches, other.caches, strict=True):
            theirs.share(mine)
        return other

    def _details(self) -> dict[str, Any]:
        """What has to be known to read a file."""
        return self._prompt.as_dict() | {"buffers": len(self.state) if self.token_ids else 0}

    def _saved(self) -> list[Any]:
        """The arrays that it has, in their order."""
        length = len(self.token_ids)
        return [buffer[..., :length, :] for buffer in self.state] if length else []

    def _fill(self, details: dict[str, Any], arrays: Iterator[Any]) -> None:
        """Take in what was saved."""
        for cache in self.caches[: details["buffers"] // 2]:
            cache.fill(next(arrays), next(arrays))
        mx.eval(self.state)

    def save(self, path: str | Path, note: Any = None) -> None:
        arrays = self._saved()
        details = self._details() | {"arrays": [[array.shape, str(array.dtype)] for array in arrays]}

        def put(new: Path) -> None:
            with new.open("wb") as file:
                for array in arrays:
                    file.write(as_bytes(array))

        write(path, self._backend, self.token_ids, details, put, note)

    def load(self, path: str | Path) -> Any:
        saved = read(path, self._backend)
        self.rewind(0)
        with Path(path).open("rb") as file:
            self._fill(saved.details, (_read(file, shape, name) for shape, name in saved.details["arrays"]))
        self.token_ids, self._prompt = saved.token_ids, PromptRead.of(saved.details)
        return saved.note

    def close(self) -> None:
        self.rewind(0)
        self.caches = []
        self._backend.forget(self)


def _read(file: BinaryIO, shape: Sequence[int], name: str) -> Any:
    """The next array of a file."""
    kind = getattr(mx, name.rpartition(".")[2])
    return mx.array(np.fromfile(file, np.uint8, prod(shape) * kind.size)).view(kind).reshape(shape)


def as_bytes(array: Any) -> memoryview:
    """What an array holds."""
    flat = mx.contiguous(array).reshape(-1).view(mx.uint8)
    mx.eval(flat)
    return memoryview(flat)
