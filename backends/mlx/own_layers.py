"""A target's own layers as its draft, on MLX: see `common/own_layers.py`."""

from collections.abc import Sequence
from typing import Any, cast

import mlx.core as mx
import numpy as np

from edgespec.errors import ModelError
from edgespec.loop.backend import Logits, Work

from ..common.own_layers import OwnLayersSession, kept_layers, limits_of, shortened, taken_over
from .backend import MlxBackend
from .session import MlxOwner, MlxSession
from .tree import TreeCache, runs_layers


class MlxOwnLayersSession(OwnLayersSession, MlxSession):
    def __init__(self, backend: MlxOwner, caches: Sequence[TreeCache], kept: Sequence[int]) -> None:
        """
        Args:
            backend: the draft.
            caches: of all layers.
            kept: numbers of the layers that draft.
        """
        super().__init__(backend, [caches[number] for number in kept])
        self._given, self._kept = caches, kept

    @property
    def given(self) -> Sequence[Any]:
        return self._given

    def _take_cells(self, source: MlxSession, start: int, end: int) -> None:
        for cache, number in zip(self.caches, self._kept, strict=True):
            cache.take(source.caches[number], start, end)
        mx.eval(self.state)

    def close(self) -> None:
        super().close()
        self._given = []


class MlxOwnLayers(MlxBackend):
    def __init__(self, target: MlxBackend, sessions: int) -> None:
        """
        Raises:
            ModelError: the target is recurrent, cannot leave out layers, or has none that stays in memory.
        """
        limits, layers = limits_of(target.capabilities), target.model.layers
        if len(target.windows) != len(layers):
            raise ModelError("has layers that share keys and values, so its own layers cannot draft")
        self._kept = kept_layers(len(layers), [one.index for one in target.plan.streamed] if target.plan else [])
        super().__init__(target.model, cast(Any, target.vocab), limits, target.windows, sessions, None, ())
        self.content = f"{target.content} {self._kept}"
        self._target, self._runs = target, runs_layers(target.model) or target.model
        lists = {name: child for name, child in self._runs.children().items() if isinstance(child, list)}
        self._name = next(name for name, child in lists.items() if child[0] is layers[0])
        self._short = shortened(self._runs[self._name], self._kept)
        one = np.zeros(1, np.int32)
        super().forward([Work(self.small_session(), one, one - 1, one)])

    def _session(self, capacity: int) -> MlxSession:
        caches = [TreeCache(capacity, window) for window in self.windows]
        return MlxOwnLayersSession(cast(MlxOwner, self), caches, self._kept)

    def forward(self, batch: Sequence[Work]) -> list[Logits]:
        self._check_open()
        return super().forward(taken_over(batch, self.capabilities, self._target.sessions))

    def _graph(self, session: MlxSession, tokens: Any, rows: Any) -> Any:
        whole, self._runs[self._name] = self._runs[self._name], self._short
        try:
            return super()._graph(session, tokens, rows)
        finally:
            self._runs[self._name] = whole

    def close(self) -> None:
        super().close()
        self._runs, self._short = None, []  # both hold layers of the target
