"""Layers on several devices: each computes spans of consecutive layers, the first one all that is in no layer, too.

Devices that all stream layers take turns, so that each has several spans.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from edgespec.errors import ModelError, first_line

from .attention import Tree

Spans = Sequence[tuple[Any, range]]  # devices, and the numbers of their layers in order
NO_MEMORY = ("out of memory", "can't allocate memory")  # in PyTorch's messages: of GPUs, of the processor


@contextmanager
def out_of_memory(what: str) -> Iterator[None]:
    """
    Raises:
        ModelError: a device has no memory for it.
    """
    try:
        yield
    except RuntimeError as error:  # `torch.OutOfMemoryError` is one; a Mac's GPU and the processor raise no other
        if not any(said in str(error) for said in NO_MEMORY):
            raise
        raise ModelError(f"no memory on the device for {what}: {first_line(error)}") from error


class Cells:
    """Keys and values of a session.

    Attributes:
        groups: for each device, [layers, 2, key heads, cells, d].
        by_layer: [2, key heads, cells, d] of each layer.
    """

    def __init__(self, spans: Spans, layers: Sequence[int], shape: Sequence[int], dtype: Any) -> None:
        """
        Args:
            spans: of all layers.
            layers: those that have keys and values.
            shape: [2, key heads, cells, d].
            dtype: of the cells.
        """
        self.groups, self.by_layer = list[Any](), dict[int, Any]()
        for device in dict.fromkeys(device for device, _ in spans):
            held = [layer for where, numbers in spans if where == device for layer in numbers if layer in layers]
            self.groups.append(torch.empty((len(held), *shape), dtype=dtype, device=device))
            self.by_layer |= zip(held, self.groups[-1], strict=True)

    @property
    def nbytes(self) -> int:
        return sum(group.nbytes for group in self.groups)

    def move(self, start: int, cells: Sequence[int]) -> None:
        """Copy `cells` to those from `start` on."""
        found = torch.tensor(cells)
        for group in self.groups:
            group[:, :, :, start : start + len(cells)] = group.index_select(3, found.to(group.device))


def connect(layers: Sequence[Any], spans: Spans) -> None:
    """Move the inputs of layers to their devices, and the last layer's output to the first device."""
    # What a pass has moved, by `id` and device. The input is held, too: if it were freed, another object could get its
    # `id`.
    moved = dict[tuple[int, Any], tuple[Any, Any]]()

    def move(value: Any, device: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(move(one, device) for one in value)
        if not is_elsewhere(value, device):
            return value
        if (key := (id(value), device)) not in moved:
            moved[key] = value, value.to(device)
        return moved[key][1]

    def enter(device: Any, layer: Any, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        # States change from layer to layer, so that they are not kept.
        states = [one.to(device) if is_elsewhere(one, device) else one for one in args[:1]]
        return (*states, *move(args[1:], device)), {name: move(value, device) for name, value in options.items()}

    def leave(layer: Any, args: Any, output: Any) -> Any:
        found = move(output, first)
        moved.clear()
        return found

    (first, _), *others = spans
    for device, numbers in others:
        for i in numbers:
            layers[i].register_forward_pre_hook(partial(enter, device), with_kwargs=True)
    if others:
        layers[-1].register_forward_hook(leave)


def is_elsewhere(value: Any, device: Any) -> bool:
    return isinstance(value, torch.Tensor | Tree) and getattr(value, "device", None) != device
