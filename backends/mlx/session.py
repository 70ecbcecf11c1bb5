"""One sequence's buffers, and the moves of a commit."""

from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, Protocol, Self

import mlx.core as mx
import numpy as np

from edgespec.loop.backend import Work
from edgespec.loop.session_files import Saved, write

from ..common.nodes import NodeSession, Owner
from .tree import Pass, TreeCache

UNSIGNED = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}  # by bytes of a number


class MlxOwner(Owner, Protocol):
    def forget(self, session: "MlxSession") -> None: ...


class MlxSession(NodeSession):
    _backend: MlxOwner

    def __init__(self, backend: MlxOwner, caches: list[TreeCache]) -> None:
        super().__init__(backend)
        self.caches = caches

    def place(self, work: Work) -> tuple[Any, Any]:
        """Begin a pass over a work that was checked.

        Returns:
            The model's tokens [lanes, width], and the rows of the work's nodes among them.
        """
        here = Pass(self._parents + work.parents.tolist(), len(self._parents), len(self.token_ids))
        for cache in self.given:
            cache.offset = here
        return work.token_ids[None], np.arange(len(work.token_ids))

    def place_unread(self) -> Any:
        """Begin a pass over committed tokens that some layers have not read.

        Returns:
            The tokens; None if there are none.
        """
        return None

    def add(self, work: Work, positions: Sequence[int]) -> None:
        self._add_nodes(work, positions)

    def take(self) -> None: ...

    @property
    def given(self) -> Sequence[Any]:
        return self.caches

    @property
    def state(self) -> list[Any]:
        return [buffer for cache in self.caches for buffer in (cache.keys, cache.values) if buffer is not None]

    def _commit_cells(self, path: Sequence[int], stay: Sequence[int]) -> None:
        length, order = len(self.token_ids), [*path, *stay]
        moved = next((i for i, node in enumerate(order) if node != i), len(order))
        if moved < len(order):
            self._move([length + node for node in order[moved:]], length + moved)

    def _move(self, cells: list[int], start: int) -> None:
        index, end = mx.array(cells), start + len(cells)
        moved = [(cache.keys[..., index, :], cache.values[..., index, :]) for cache in self.caches]
        mx.eval(moved)  # then nothing else holds the buffers, and MLX writes in place
        for cache, (keys, values) in zip(self.caches, moved, strict=True):
            cache.keys[..., start:end, :] = keys
            cache.values[..., start:end, :] = values
        mx.eval(self.state)

    def _copy_cells(self, other: Self) -> None:
        for mine, theirs in zip(self.caches, other.caches, strict=True):
            theirs.share(mine)

    def _details(self) -> dict[str, Any]:
        return self._prompt.as_dict() | {"buffers": len(self.state) if self.token_ids else 0}

    def _saved(self) -> list[Any]:
        length = len(self.token_ids)
        return [buffer[..., :length, :] for buffer in self.state] if length else []

    def _fill(self, details: dict[str, Any], arrays: Iterator[Any]) -> None:
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

    def _load_cells(self, path: str | Path, saved: Saved) -> None:
        with Path(path).open("rb") as file:
            self._fill(saved.details, (_read(file, shape, name) for shape, name in saved.details["arrays"]))

    def close(self) -> None:
        self.rewind(0)
        self.caches = []
        self._backend.forget(self)


def _read(file: BinaryIO, shape: Sequence[int], name: str) -> Any:
    kind = getattr(mx, name.rpartition(".")[2])
    return mx.array(np.fromfile(file, f"u{kind.size}", prod(shape))).view(kind).reshape(shape)


def as_bytes(array: Any) -> memoryview:
    flat = mx.contiguous(array).reshape(-1).view(UNSIGNED[array.itemsize])  # 2**31 bytes are no axis of an array
    mx.eval(flat)
    return memoryview(flat).cast("B")
