"""One sequence's buffers: what fits, and what a commit moves."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import mlx.core as mx
import numpy as np

from edgespec.backend import Capabilities, Work, kept_of_prompt
from edgespec.errors import ContextFull
from edgespec.saved import Loaded, read, write
from edgespec.tree import IntArray, depths, nodes_below, parents_among

from .tree import Pass, TreeCache


class Owner(Loaded, Protocol):
    """What a session needs of the backend it belongs to."""

    capabilities: Capabilities

    def open(self) -> "MlxSession": ...

    def forget(self, session: "MlxSession") -> None: ...


class MlxSession:
    """See `edgespec.backend.Session`."""

    def __init__(self, backend: Owner, caches: list[TreeCache]) -> None:
        self.token_ids: list[int] = []
        self.caches = caches
        self._backend = backend
        self._tokens: list[int] = []  # uncommitted nodes' tokens
        self._parents: list[int] = []
        self._read, self._prompt = 0, False  # tokens read as a prompt; whether the nodes are part of one

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

    def place(self, work: Work) -> Pass:
        """The pass over a checked work's nodes."""
        here = Pass(self._parents + work.parents.tolist(), len(self._parents), len(self.token_ids))
        for cache in self.caches:
            cache.offset = here
        return here

    def add(self, work: Work) -> None:
        """The work's nodes have been evaluated."""
        self._tokens += work.token_ids.tolist()
        self._parents += work.parents.tolist()
        self._prompt = work.prompt

    @property
    def state(self) -> list[Any]:
        """All buffers."""
        return [buffer for cache in self.caches for buffer in (cache.keys, cache.values) if buffer is not None]

    @property
    def nodes(self) -> int:
        """How many uncommitted nodes there are."""
        return len(self._parents)

    @property
    def owed(self) -> int:
        return 0

    def kept(self, length: int) -> int:
        return kept_of_prompt(self._backend.capabilities, self._read, length)

    def commit(self, path: Sequence[int], *, below: bool = False) -> IntArray:
        if [self._parents[node] for node in path] != [-1, *path][: len(path)]:
            raise ValueError(f"nodes {list(path)} are not a chain under the last committed token")
        kept = nodes_below(self._parents, path[-1] if path else -1) if below else []
        order = [*path, *kept]
        stay = next((i for i, node in enumerate(order) if node != i), len(order))  # these cells are where they belong
        if stay < len(order):
            self._move([len(self.token_ids) + node for node in order[stay:]], len(self.token_ids) + stay)
        if self._prompt and self._read == len(self.token_ids):
            self._read += len(path)
        self.token_ids.extend(self._tokens[node] for node in path)
        self._tokens = [self._tokens[node] for node in kept]
        self._parents, self._prompt = parents_among(self._parents, kept), False
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
        self._read = min(self._read, length)
        self._tokens, self._parents, self._prompt = [], [], False

    def fork(self) -> "MlxSession":
        other = self._backend.open()
        other.token_ids, other._read = self.token_ids.copy(), self._read
        for mine, theirs in zip(self.caches, other.caches, strict=True):
            theirs.share(mine)
        return other

    def save(self, path: str | Path, note: Any = None) -> None:
        length = len(self.token_ids)
        buffers = self.state if length else []
        details = {"read": self._read, "buffers": [[*b.shape[:2], b.shape[3], str(b.dtype)] for b in buffers]}

        def put(new: Path) -> None:
            with new.open("wb") as file:
                for buffer in buffers:
                    file.write(as_bytes(buffer[..., :length, :]))

        write(path, self._backend, self.token_ids, details, put, note)

    def load(self, path: str | Path) -> Any:
        saved = read(path, self._backend)
        self.rewind(0)
        found, length = list[Any](), len(saved.token_ids)
        with Path(path).open("rb") as file:
            for one, heads, width, name in saved.details["buffers"]:
                kind = getattr(mx, name.rpartition(".")[2])
                data = np.fromfile(file, np.uint8, one * heads * length * width * kind.size)
                found.append(mx.array(data).view(kind).reshape(one, heads, length, width))
        for cache, keys, values in zip(self.caches, found[::2], found[1::2], strict=False):
            cache.fill(keys, values)
        mx.eval(self.state)
        self.token_ids, self._read = saved.token_ids, saved.details["read"]
        return saved.note

    def close(self) -> None:
        self.rewind(0)
        self.caches = []
        self._backend.forget(self)


def as_bytes(array: Any) -> memoryview:
    """What an array holds."""
    flat = mx.contiguous(array).reshape(-1).view(mx.uint8)
    mx.eval(flat)
    return memoryview(flat)
