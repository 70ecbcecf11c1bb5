"""Models with recurrent layers on MLX: a pass is a batch, whose sequences are the lanes (paths of a tree).

Recurrent layers get mlx-lm's own cache with a state for each lane; in `LaneCache` all lanes see one session's cells.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import ArraysCache, CacheList, make_prompt_cache
from numpy.typing import NDArray

from edgespec.loop.backend import Work

from ..common.recurrent import Rectangle, RecurrentSession, RecurrentStates
from .session import ArrayDetails, Form, MlxOwner, MlxSession, form_of
from .tree import Masks, TreeCache

State = list[Any]  # arrays [1, ...], or None, as many as mlx-lm's caches have


def leaves_of(caches: Sequence[Any]) -> Iterator[Any]:
    """The caches of all layers, each for attention or a state; a layer may have both."""
    for cache in caches:
        yield from leaves_of(cache.caches) if type(cache) is CacheList else [cache]


def is_recurrent(model: Any) -> bool:
    return any(type(cache) is ArraysCache for cache in leaves_of(make_prompt_cache(model)))


def sizes_of(model: Any) -> tuple[int, int, int]:
    """
    Returns:
        Bytes of one token's keys and values, of one number of them, and of a state; as for `memory.cell_bytes`.
    """
    caches = make_prompt_cache(model)
    try:
        model(mx.array([[0]]), cache=caches)
    except (TypeError, ValueError, AttributeError, IndexError, KeyError):
        return 0, 4, 0
    leaves = list(leaves_of(caches))
    buffers = [b for cache in leaves if type(cache) is not ArraysCache for b in (cache.keys, cache.values)]
    state = sum(cache.nbytes for cache in leaves if type(cache) is ArraysCache)
    item = max((buffer.itemsize for buffer in buffers), default=4)
    return sum(buffer.nbytes // buffer.shape[2] for buffer in buffers), item, state


class Lanes(Masks):
    """
    Attributes:
        starts: first position of each lane.
        start, end: cells of the new nodes are those from `start` to `end` - 1.
        rows: places of the new nodes among all lanes' tokens.
    """

    def __init__(self, rectangle: Rectangle[State], parents: Sequence[int], length: int) -> None:
        """
        Args:
            rectangle: the lanes.
            parents: of all uncommitted nodes of the session.
            length: committed tokens.
        """
        super().__init__(length + len(parents), rectangle.width, rectangle.in_order)
        self.starts = mx.array(rectangle.positions[:, 0], dtype=mx.int32)
        self.start = length + rectangle.first
        self.rows = mx.array(rectangle.rows)
        self._rectangle, self._parents, self._length = rectangle, parents, length

    def visible(self, window: int | None) -> NDArray[np.bool_]:
        """[lanes, 1, width, end]."""
        seen = self._rectangle.sees(self._parents, self._length, window)
        return seen.reshape(len(self._rectangle.lanes), 1, self.width, self.end)


class LaneCache(TreeCache):
    """Keys and values of one layer in one session, shared by all lanes."""

    def __init__(self, capacity: int, window: int | None) -> None:
        super().__init__(capacity, window)
        self.lanes: Lanes | None = None  # of the pass under way; ropes get `starts` as `offset`

    def update_and_fetch(self, keys: Any, values: Any) -> tuple[Any, Any]:
        self._make(keys[:1], values[:1])
        here = cast(Lanes, self.lanes)
        if here.end > here.start:
            self.put(_new(keys, here.rows), _new(values, here.rows), here.start, here.end)
        return _for_all(self.keys, here.end, len(keys)), _for_all(self.values, here.end, len(values))

    def make_mask(self, n: int, return_array: bool = False, window_size: int | None = None) -> Any:
        return cast(Lanes, self.lanes).mask(window_size or self._window, return_array)


def _new(found: Any, rows: Any) -> Any:
    """Take the new nodes from keys or values [lanes, heads, width, d]: [1, heads, n, d]."""
    return found.transpose(1, 0, 2, 3).flatten(1, 2)[None][..., rows, :]


def _for_all(buffer: Any, end: int, lanes: int) -> Any:
    return mx.broadcast_to(buffer[..., :end, :], (lanes, buffer.shape[1], end, buffer.shape[3]))


class MlxRecurrentSession(RecurrentSession[State], MlxSession):
    caches: list[LaneCache]  # type: ignore[assignment]

    def __init__(self, backend: MlxOwner, caches: list[LaneCache], kinds: Sequence[Any]) -> None:
        """
        Args:
            backend: that made it.
            caches: of all layers with attention.
            kinds: mlx-lm's empty caches of all layers, which show their kinds.
        """
        super().__init__(backend, list(caches))
        limits = backend.capabilities
        self.states = RecurrentStates[State](limits.max_leaves, limits.streams or backend.mixture is not None)
        self._kinds = kinds
        self._rectangle: Rectangle[State] | None = None
        self._arrays, self._given = list[ArraysCache](), list[Any]()

    def place(self, work: Work) -> tuple[Any, Any]:
        lanes, parents = self.lanes(work), self._parents + work.parents.tolist()
        rectangle = Rectangle(lanes, max(len(lane.token_ids) for lane in lanes), self.nodes)
        return self._begin(rectangle, parents), rectangle.rows

    def place_unread(self) -> Any:
        rectangle = self.states.unread(self.token_ids, self._backend.capabilities.max_nodes)
        return None if rectangle is None else self._begin(rectangle, [])

    def _begin(self, rectangle: Rectangle[State], parents: Sequence[int]) -> Any:
        here = Lanes(rectangle, parents, len(self.token_ids))
        for cache in self.caches:
            cache.lanes, cache.offset = here, here.starts
        self._rectangle, self._arrays = rectangle, []
        attention, states = iter(self.caches), iter(_side_by_side([lane.state for lane in rectangle.lanes]))
        self._given = [self._filled(kind, attention, states) for kind in self._kinds]
        return rectangle.token_ids

    def _filled(self, kind: Any, attention: Iterator[LaneCache], states: Iterator[Any]) -> Any:
        """A layer's cache for the model, of the form of `kind`."""
        if type(kind) is CacheList:
            return CacheList(*(self._filled(one, attention, states) for one in kind.caches))
        if type(kind) is not ArraysCache:
            return next(attention)
        found = ArraysCache(len(kind.cache))
        found.cache = [next(states, None) for _ in kind.cache]
        self._arrays.append(found)
        return found

    def take(self) -> None:
        assert self._rectangle
        arrays, count = [array for cache in self._arrays for array in cache.cache], len(self._rectangle.lanes)
        states = [[_lane(array, lane, count) for array in arrays] for lane in range(count)]
        mx.eval([*_arrays(states)])
        self.states.take(self._rectangle, states)
        self._rectangle, self._arrays, self._given = None, [], []

    def add(self, work: Work, positions: Sequence[int]) -> None:
        super().add(work, positions)
        self.take()

    @property
    def given(self) -> Sequence[Any]:
        return self._given

    @property
    def state(self) -> list[Any]:
        arrays = [array for cache in self._arrays for array in cache.cache if array is not None]
        return super().state + arrays

    def rewind(self, length: int) -> None:
        super().rewind(length)
        self._rectangle, self._arrays, self._given = None, [], []

    def _states(self) -> list[tuple[int, list[bool]]]:
        return [(at, [array is not None for array in state]) for at, state in self.states.text.kept.items()]

    def _saved(self) -> list[Any]:
        return [*super()._saved(), *_arrays(self.states.text.kept.values())]

    def forms(self) -> tuple[list[Form], list[Form | None]]:
        return super().forms()[0], [array if array is None else form_of(array) for array in self.states.any()]

    def _fill(self, details: ArrayDetails, arrays: Iterator[Any]) -> None:
        super()._fill(details, arrays)
        for at, there in details.states:
            self.states.text.add(at, [next(arrays) if one else None for one in there])
        # Another thread computes passes, and MLX computes lazy arrays only in the thread that made them.
        mx.eval([*_arrays(self.states.text.kept.values())])


def _arrays(states: Iterable[State]) -> Iterator[Any]:
    return (array for state in states for array in state if array is not None)


def _side_by_side(states: Sequence[State | None]) -> list[Any]:
    """Concatenate the states of lanes; zeros replace missing ones, and the result is empty if all are missing."""
    some = next((state for state in states if state is not None), None)
    if some is None:
        return []
    return [
        None
        if array is None
        else mx.concatenate([mx.zeros_like(array) if state is None else state[number] for state in states])
        for number, array in enumerate(some)
    ]


def _lane(array: Any, lane: int, lanes: int) -> Any:
    """A copy of one lane's part, because a view would keep all lanes, or all tokens of the pass, in memory."""
    if array is None:
        return None
    return mx.contiguous(array) if lanes == 1 else mx.take(array, mx.array([lane]), axis=0)
