"""One sequence's buffers, and the moves of a commit."""

from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Protocol, Self

import mlx.core as mx
import numpy as np
from pydantic import Field, PositiveInt, Strict

from edgespec.loop.backend import Work
from edgespec.loop.session_files import Details, Saved

from ..common.nodes import NodeSession, Owner
from .tree import Pass, TreeCache

UNSIGNED = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}  # by bytes of a number


Form = tuple[list[int], str]  # shape and type of an array


class MlxOwner(Owner, Protocol):
    """
    Attributes:
        forms: `MlxSession.forms` of any session; None before the first pass, which shows them.
        mixture: see `edgespec.loop.engines.ReadsExperts`.
    """

    forms: tuple[list[Form], list[Form | None]] | None

    @property
    def mixture(self) -> Any: ...

    def forget(self, session: "MlxSession") -> None: ...


class ArrayDetails(Details):
    """
    Attributes:
        buffers: number of the first arrays, which are keys and values of layers.
        arrays: shape and type of each.
        states: tokens before each state, at least 1, and which of its arrays there are.
    """

    buffers: int
    arrays: list[Annotated[Form, Strict(False)]]
    states: list[Annotated[tuple[PositiveInt, list[bool]], Strict(False)]] = Field(default_factory=list)

    @property
    def lengths(self) -> Sequence[int]:
        return [*super().lengths, *(at for at, _ in self.states)]


class MlxSession(NodeSession):
    _backend: MlxOwner
    _form = ArrayDetails

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

    def _move_cells(self, start: int, cells: list[int]) -> None:
        index, end = mx.array(cells), start + len(cells)
        moved = [(cache.keys[..., index, :], cache.values[..., index, :]) for cache in self.caches]
        mx.eval(moved)  # then nothing else holds the buffers, and MLX writes in place
        for cache, (keys, values) in zip(self.caches, moved, strict=True):
            cache.put(keys, values, start, end)
        mx.eval(self.state)

    def _copy_cells(self, other: Self) -> None:
        for mine, theirs in zip(self.caches, other.caches, strict=True):
            theirs.share(mine)

    def _states(self) -> list[tuple[int, list[bool]]]:
        return []

    def _saved(self) -> list[Any]:
        length = len(self.token_ids)
        return [buffer[..., :length, :] for buffer in self.state] if length else []

    def _fill(self, details: ArrayDetails, arrays: Iterator[Any]) -> None:
        for cache in self.caches[: details.buffers // 2]:
            keys = next(arrays)
            cache.put(keys, next(arrays), 0, keys.shape[2])
        mx.eval(self.state)

    def _details(self) -> ArrayDetails:
        return ArrayDetails(
            **self._prompt.as_dict(), buffers=len(self.state) if self.token_ids else 0,
            arrays=[form_of(array) for array in self._saved()],
            states=self._states(),
        )  # fmt: skip

    def _write_cells(self, new: Path) -> None:
        with new.open("wb") as file:
            for array in self._saved():
                file.write(as_bytes(array))

    def forms(self) -> tuple[list[Form], list[Form | None]]:
        """Of the arrays of a cell, and of a state, after a pass."""
        return [form_of(buffer[..., :1, :]) for buffer in self.state], []

    def _size(self, length: int, details: ArrayDetails) -> int | None:
        if self._backend.forms is None:
            return None
        cell, state = self._backend.forms
        cells = [([*shape[:2], length, shape[3]], name) for shape, name in cell if length]
        whole = details.arrays == cells + [one for one in state if one] * len(details.states)
        whole &= all(there == [one is not None for one in state] for _, there in details.states)
        whole &= details.buffers == len(cells)
        return sum(prod(shape) * _kind(name).size for shape, name in details.arrays) if whole else -1

    def _load_cells(self, path: str | Path, saved: Saved, details: ArrayDetails) -> None:
        with Path(path).open("rb") as file:
            self._fill(details, (_read(file, shape, name) for shape, name in details.arrays))

    def close(self) -> None:
        self.rewind(0)
        self.caches = []
        self._backend.forget(self)


def form_of(array: Any) -> Form:
    return list(array.shape), str(array.dtype)


def _kind(name: str) -> Any:
    return getattr(mx, name.rpartition(".")[2])


def _read(file: BinaryIO, shape: Sequence[int], name: str) -> Any:
    kind = _kind(name)
    return mx.array(np.fromfile(file, f"u{kind.size}", prod(shape))).view(kind).reshape(shape)


def as_bytes(array: Any) -> memoryview:
    flat = mx.contiguous(array).reshape(-1).view(UNSIGNED[array.itemsize])  # 2**31 bytes are no axis of an array
    mx.eval(flat)
    return memoryview(flat).cast("B")
