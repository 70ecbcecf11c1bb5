"""One sequence's cells, and the moves of a commit."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
import torch

from edgespec.errors import ContextFull
from edgespec.loop.backend import Work
from edgespec.loop.session_files import Saved

from ..common.nodes import NodeSession, Owner
from .spans import Cells, out_of_memory


class TorchOwner(Owner, Protocol):
    def release(self, cells: Cells) -> None: ...


class TorchSession(NodeSession):
    """
    Attributes:
        queries: as in `Part`, of the pass that ended with the last committed token, if the backend keeps them.
        latest: those of the last pass.
    """

    _backend: TorchOwner

    def __init__(self, backend: TorchOwner, cells: Cells) -> None:
        super().__init__(backend)
        self.queries: Mapping[int, Any] = {}
        self.latest: Mapping[int, Any] = {}
        self.cells: Any = cells  # None when closed

    def check(self, work: Work) -> list[int]:
        positions, cells = super().check(work), self.cells.groups[0].shape[3]
        if self.size + len(work.token_ids) > cells:
            raise ContextFull(f"{self.size + len(work.token_ids)} tokens and nodes; this session has {cells} cells")
        return positions

    def add(self, work: Work, positions: Sequence[int]) -> None:
        self._add_nodes(work, positions)

    def rewind(self, length: int) -> None:
        super().rewind(length)
        self.queries = {}

    def reusable_prefix(self, length: int, *, short: bool = False) -> int:
        length = super().reusable_prefix(length, short=short)
        # Where cells are chosen, the keys and values of an answer depend on its trees.
        return min(length, self._prompt.tokens) if self._backend.capabilities.approximate else length

    def _commit_cells(self, path: Sequence[int], stay: Sequence[int]) -> None:
        if path:
            self.queries = self.latest if path[-1] == self.nodes - 1 else {}
        super()._commit_cells(path, stay)

    def _move_cells(self, start: int, cells: list[int]) -> None:
        with torch.inference_mode(), out_of_memory("accepted tokens"):
            self.cells.move(start, cells)

    def _copy_cells(self, other: Self) -> None:
        length = len(self.token_ids)
        with torch.inference_mode():
            for mine, copy in zip(self.cells.groups, other.cells.groups, strict=True):
                copy[:, :, :, :length] = mine[:, :, :, :length]

    def _saved(self, length: int) -> list[Any]:
        return [layer[:, :, :length] for layer in self.cells.by_layer.values()] if length else []

    def _size(self, length: int, details: Any) -> int:
        return sum(tensor.nbytes for tensor in TorchSession._saved(self, length))

    def _make(self, details: Any) -> None: ...

    def _write_cells(self, new: Path) -> None:
        with new.open("wb") as file, out_of_memory("a session's file"):
            for tensor in self._saved(len(self.token_ids)):
                tensor.contiguous().view(torch.uint8).cpu().numpy().tofile(file)

    def _load_cells(self, path: str | Path, saved: Saved, details: Any) -> None:
        with torch.inference_mode(), out_of_memory("a session's file"):
            self._make(details)
            with Path(path).open("rb") as file:
                for tensor in self._saved(len(saved.token_ids)):
                    found = torch.from_numpy(np.fromfile(file, np.uint8, tensor.numel() * tensor.itemsize))
                    tensor.copy_(found.view(tensor.dtype).view(tensor.shape))

    def close(self) -> None:
        if self.cells is not None:
            self._backend.release(self.cells)
            self.rewind(0)
        self.cells = None
