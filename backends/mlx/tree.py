"""The three replacements that make mlx-lm's models read a tree, and one that gives states to a head.

Ropes get the nodes' positions instead of an offset, caches return masks of trees, and the head gets only wanted rows.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, cast

import mlx.core as mx
import numpy as np
from mlx import nn
from numpy.typing import NDArray

from edgespec.loop.tree import ancestor_mask, depths


class Masks(ABC):
    """Masks of one pass for mlx-lm's attention, by windows.

    Attributes:
        end: the cell after the last that is seen.
        width: tokens of a row.
        in_order: each token sees exactly those before it.
    """

    def __init__(self, end: int, width: int, in_order: bool) -> None:
        self.end, self.width, self.in_order = end, width, in_order
        self._masks: dict[int | None, Any] = {}

    def mask(self, window: int | None, as_array: bool) -> Any:
        """
        Returns:
            None (all), "causal", or booleans.
        """
        if window is not None and self.end <= window:
            window = None
        if self.in_order and window is None and (self.width == 1 or not as_array):
            return None if self.width == 1 else "causal"
        if window not in self._masks:
            self._masks[window] = mx.array(self.visible(window))
        return self._masks[window]

    @abstractmethod
    def visible(self, window: int | None) -> NDArray[np.bool_]:
        """True where a token sees a cell."""


class Pass(Masks):
    """Positions and cells of one pass's nodes; mlx-lm passes it from a cache's `offset` to the ropes.

    Attributes:
        start, end: cells of the new nodes are those from `start` to `end` - 1.
        levels: each position, with the indices of the new nodes there.
        level_order: place of each new node in the concatenated `levels`.
        positions: of the new nodes, shape [n].
    """

    def __init__(self, parents: Sequence[int], first: int, length: int) -> None:
        """
        Args:
            parents: of all uncommitted nodes of the session, the new ones at the end.
            first: number of the first new node.
            length: committed tokens.
        """
        is_chain = list(parents) == list(range(-1, len(parents) - 1))
        super().__init__(length + len(parents), len(parents) - first, is_chain)
        self.start = length + first
        self._parents, self._first, self._length = parents, first, length
        self._positions: NDArray[np.int64] = length + depths(parents).astype(np.int64)

    def __eq__(self, other: object) -> bool:
        raise TypeError("positions are needed outside the rotary embedding")

    def __bool__(self) -> bool:
        return self == 0  # raises TypeError

    @cached_property
    def positions(self) -> Any:
        return mx.array(self._positions[self._first :])

    @cached_property
    def levels(self) -> list[tuple[int, Any]]:
        new = self._positions[self._first :]
        return [(int(position), mx.array(np.flatnonzero(new == position))) for position in np.unique(new)]

    @cached_property
    def level_order(self) -> Any:
        return mx.array(np.argsort(np.argsort(self._positions[self._first :], kind="stable")))

    def visible(self, window: int | None) -> NDArray[np.bool_]:
        """[n, end]."""
        new = self._positions[self._first :]
        visible = np.ones((len(new), self.end), np.bool_)
        visible[:, self._length :] = ancestor_mask(self._parents)[self._first :]
        if window is not None:
            cells = np.concatenate([np.arange(self._length), self._positions])
            visible &= new[:, None] < cells + window
        return visible


class TreeRope(nn.Module):  # type: ignore[misc]
    """A model's own rotary embedding, called with the position of each node."""

    def __init__(self, rope: Any) -> None:
        super().__init__()
        self.rope = rope
        self._takes_array = takes_array(rope)

    def __call__(self, x: Any, offset: Any = 0) -> Any:
        if not isinstance(offset, Pass):
            return self.rope(x, offset=offset)
        if self._takes_array and offset.in_order:
            return self.rope(x, offset=offset.start)
        nodes = x.transpose(2, 1, 0, 3)
        if self._takes_array:
            nodes = self.rope(nodes, offset=offset.positions)
        else:
            levels = [self.rope(nodes[members], offset=position) for position, members in offset.levels]
            nodes = mx.concatenate(levels)[offset.level_order]
        return nodes.transpose(2, 1, 0, 3)


def takes_array(rope: Any) -> bool:
    """True if the rope can rotate a batch with one position for each token, as MLX's kernel can."""
    width = getattr(rope, "dims", None) or getattr(rope, "dim", None)
    if not isinstance(width, int):
        return False
    positions = [5, 0, 9]
    x = mx.ones((len(positions), 1, 1, width))
    try:
        together = rope(x, offset=mx.array(positions))
    except (TypeError, ValueError):
        return False
    alone = mx.concatenate([rope(x[:1], offset=position) for position in positions])
    return bool(mx.allclose(together, alone, atol=1e-3))


class TreeCache:
    """Keys and values of one layer in one session, with the interface of mlx-lm's caches.

    Attributes:
        keys, values: [1, heads, capacity, d]; None before the first pass, which shows shapes and types.
        offset: the current `Pass`, for `TreeRope`.
    """

    def __init__(self, capacity: int, window: int | None) -> None:
        self.keys: Any = None
        self.values: Any = None
        self.offset: Any = None
        self._capacity = capacity
        self._window = window

    def update_and_fetch(self, keys: Any, values: Any) -> tuple[Any, Any]:
        here = cast(Pass, self.offset)
        self.put(keys, values, here.start, here.end)
        return self.keys[..., : here.end, :], self.values[..., : here.end, :]

    def _make(self, keys: Any, values: Any) -> None:
        if self.keys is None:
            self.keys, self.values = (
                mx.zeros((*new.shape[:2], self._capacity, new.shape[3]), new.dtype) for new in (keys, values)
            )

    def put(self, keys: Any, values: Any, start: int, end: int) -> None:
        """Fill cells."""
        self._make(keys, values)
        self.keys[..., start:end, :] = keys
        self.values[..., start:end, :] = values

    def take(self, other: "TreeCache", start: int, end: int) -> None:
        """Copy cells of another cache of this layer."""
        self.put(other.keys[..., start:end, :], other.values[..., start:end, :], start, end)

    def make_mask(self, n: int, return_array: bool = False, window_size: int | None = None) -> Any:
        here = cast(Pass, self.offset)
        if n != here.width:
            raise TypeError(f"a mask for {n} tokens in a pass over {here.width}")
        return here.mask(window_size or self._window, return_array)

    def share(self, other: "TreeCache") -> None:
        """Share the other's buffers; MLX copies them when one of the two caches is written to."""
        if other.keys is not None:
            self.keys, self.values = other.keys[...], other.values[...]


def wrap_ropes(model: Any) -> None:
    for module in model.modules():
        for name, child in module.children().items():
            if "rope" in type(child).__name__.lower():
                setattr(module, name, TreeRope(child))


def runs_layers(model: Any) -> Any:
    """The module that runs the layers; None if they are not in a module of their own."""
    first = model.layers[0]
    for module in model.modules():
        lists = [child for child in module.children().values() if isinstance(child, list)]
        if module is not model and any(layer is first for layers in lists for layer in layers):
            return module
    return None


def cut_rows(model: Any, rows: Callable[[], Any]) -> bool:
    """Make the module that runs the layers return only the states [1, rows, D] of wanted rows.

    Args:
        model: to change.
        rows: returns the wanted rows of all lanes; None: all.

    Returns:
        False if the model has no separate module that runs the layers, and so stays as it is.
    """
    module = runs_layers(model)
    if module is None:
        return False
    kind = type(module)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        states, chosen = kind.__call__(self, *args, **kwargs), rows()
        return states if chosen is None else states.flatten(0, 1)[None, chosen]

    module.__class__ = type(kind.__name__, (kind,), {"__call__": call})  # an instance's `__call__` is not used
    return True


class LayerInputs:
    """Keeps what chosen layers read in a pass. The number after the last layer's means what the last layer returns."""

    def __init__(self, layers: Sequence[Any], numbers: Sequence[int]) -> None:
        self._numbers = numbers
        self._seen = dict[int, Any]()
        self._watched = [self._watch(layers, number) for number in dict.fromkeys(numbers)]

    def _watch(self, layers: Sequence[Any], number: int) -> tuple[Any, type]:
        layer = layers[min(number, len(layers) - 1)]
        kind, seen, returned = type(layer), self._seen, number == len(layers)

        def call(module: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
            made = kind.__call__(module, x, *args, **kwargs)
            seen[number] = made if returned else x
            return made

        layer.__class__ = type(kind.__name__, (kind,), {"__call__": call})
        return layer, kind

    def take(self, rows: Any) -> Any:
        """
        Args:
            rows: of nodes among the pass's tokens, lane after lane.

        Returns:
            What the layers have read, side by side, float32 [rows, layers * D].
        """
        found = [self._seen[number].flatten(0, 1)[mx.array(rows)] for number in self._numbers]
        self._seen.clear()
        return mx.concatenate(found, axis=-1).astype(mx.float32)

    def close(self) -> None:
        for layer, kind in reversed(self._watched):
            layer.__class__ = kind
