"""Weights in memory of this program, where no pages can be moved to the mapped file: on macOS.

Before a model's context is made, the weights that stay get addresses in this memory, and a device that shares it may
compute with them there. A streamed layer's weights get the addresses of its slot once that is read, and those of the
mapped file when the layer is computed. So the processor may compute a layer too early: that is slow, never wrong. A
device cannot read the mapped file.
"""

from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from edgespec.errors import ModelError
from edgespec.loop.engines import Progress
from edgespec.machine.memory import format_size
from edgespec.weights.direct_io import ALIGNED, DirectFiles
from edgespec.weights.expert_memory import own_memory
from edgespec.weights.plan import Extent, Layer, Plan, Tensor, layer_of
from edgespec.weights.preload import warm

from ..context import ContextSize, trial_context
from ..ggml.callback import OperationCallback
from ..ggml.files import ggml_base
from ..ggml.ggml_tensor import GgmlTensor, is_known, source_addresses

WEIGHTS = 1  # GGML_BACKEND_BUFFER_USAGE_WEIGHTS
Found = Mapping[str, Sequence[int]]  # addresses of a model's tensors by name


def find_weights(path: str, model: Any, size: ContextSize, params: Any, tensors: Iterable[Tensor]) -> Found:
    """Find a model's weights in a graph of it, which is not computed.

    Args:
        path: of the model.
        model: all of whose weights the processor has.
        size, params: of its context.
        tensors: to look for.

    Raises:
        ModelError: this build of llama.cpp is not known.
    """
    watch, found = OperationCallback(lambda tensor, ask: False), dict[str, list[int]]()
    names = {tensor.name.encode() for tensor in tensors}
    trial = type(params).from_buffer_copy(params)
    trial.cb_eval, trial.offload_kqv = watch.callback, False  # so that there is one graph, the processor's
    with trial_context(path, model, size, trial) as context:
        operations = watch.operations(context)
        if not operations or not is_known(operations[0]):
            raise ModelError(f"{path}: cannot be streamed: this build of llama.cpp has another layout of tensors")
        for address in dict.fromkeys(one for operation in operations for one in source_addresses(operation)):
            tensor = GgmlTensor.from_address(address)
            root = tensor.view_src or address
            if (name := GgmlTensor.from_address(root).name) in names:
                found.setdefault(name.decode(), []).append(root)
    return {name: list(dict.fromkeys(addresses)) for name, addresses in found.items()}


class OwnMemory:
    """See `edgespec.weights.ring.Store`.

    Attributes:
        plan: as given, with reads of whole pages.
        only_here: numbers of layers that are wrong where they are not in their slots, as a device computes them.
    """

    note = ""

    def __init__(
        self, paths: Sequence[str], tensors: Sequence[Tensor], plan: Plan, found: Found,
        there: Collection[str] = (), device: int = 0,
    ) -> None:  # fmt: skip
        """
        Args:
            paths: files of the model.
            tensors: of the model.
            plan: in which parts of layers end where tensors end.
            found: as from `find_weights`; no context uses them yet.
            there: names of the weights that the device computes with.
            device: that shares this memory; 0: none.

        Raises:
            OSError: a file cannot be opened, there is no memory, or the device cannot have it.
        """
        self._buffer, self._memory, self._files = 0, None, DirectFiles(paths)
        try:
            self.plan = replace(plan, streamed=tuple(map(self._files.widened, plan.streamed)))
            tensors = sorted((one for one in tensors if one.name in found), key=lambda one: (one.file, one.start))
            kept = [tensor for tensor in tensors if any(_holds(extent, tensor) for extent in plan.pinned)]
            self._pinned, size = dict[Extent, int](), 0
            for on_device in (False, True):
                first = size  # of the device's part
                some = tuple(_extent(tensor) for tensor in kept if (tensor.name in there) == on_device)
                places, size = _places(self._files.widened(Layer(0, some)), size)
                self._pinned |= places
            self._inside = {layer.index: _places(layer, 0) for layer in self.plan.streamed}
            self._slot_size, slots = max((end for _, end in self._inside.values()), default=0), size
            size += self._slot_size * plan.slots
            self._memory, address = own_memory(size)
            self._slots, self._pinned = address + slots, {one: address + at for one, at in self._pinned.items()}
            if device:
                largest = max((tensor.size for tensor in tensors), default=0)
                library = ggml_base()
                self._buffer = library.ggml_backend_dev_buffer_from_host_ptr(
                    device, address + first, size - first, largest
                )
                if not self._buffer:
                    raise OSError(f"the GPU cannot have {format_size(size - first)} of memory")
                library.ggml_backend_buffer_set_usage(self._buffer, WEIGHTS)
        except BaseException:
            self.close()
            raise
        self._moving = dict[int, list[tuple[GgmlTensor, int, int]]]()  # by layer: place in the slot, and mapped address
        self._roots = dict[int, GgmlTensor]()
        self.only_here = set[int]()
        self._bind(kept, tensors, found, there)

    def _bind(self, kept: Sequence[Tensor], tensors: Sequence[Tensor], found: Found, there: Collection[str]) -> None:
        for tensor in kept:
            for one in map(GgmlTensor.from_address, found[tensor.name]):
                one.data = _address(self._pinned, tensor)
                if tensor.name in there:
                    one.buffer = self._buffer
        for layer in self.plan.streamed:
            places = self._inside[layer.index][0]
            own = self._moving[layer.index] = []
            for tensor in tensors:
                if (place := _address(places, tensor)) is None or layer_of(tensor) != layer.index:
                    continue
                for address in found[tensor.name]:
                    self._roots[address] = one = GgmlTensor.from_address(address)
                    if tensor.name in there:
                        one.buffer, one.data = self._buffer, self._slots + place
                        self.only_here.add(layer.index)
                    own.append((one, place, one.data or 0))

    def check(self) -> None:
        self._files.check()

    def preload(self, extents: Sequence[Extent], progress: Progress) -> None:
        """Read pinned weights; what the graph has not stays in the mapped file."""
        places = sorted((extent.file, extent.start, address) for extent, address in self._pinned.items())

        def read(piece: Extent) -> None:
            _, start, address = places[bisect_right(places, (piece.file, piece.start, 1 << 64)) - 1]
            self._files.read(piece.file, address + piece.start - start, piece.start, piece.stop)

        warm(list(self._pinned), read, progress)
        self.note = f"{format_size(sum(extent.size for extent in self._pinned))} in memory of their own"

    def drop(self, extents: Sequence[Extent]) -> None: ...

    def look_up(self, extents: Sequence[Extent]) -> None: ...

    def read(self, slot: int, layer: Layer, extent: Extent, start: int, stop: int) -> None:
        place = self._slot(slot) + self._inside[layer.index][0][extent] - extent.start
        self._files.read(extent.file, place + start, start, stop)

    def show(self, slot: int, layer: Layer) -> None:
        for tensor, place, _ in self._moving[layer.index]:
            tensor.data = self._slot(slot) + place

    def hide(self, slot: int, layer: Layer) -> None:
        for tensor, _, mapped in self._moving[layer.index]:
            tensor.data = mapped

    def follow(self, address: int) -> None:
        """Have a view of a streamed tensor, which is the next operation, look where the tensor is now."""
        view = GgmlTensor.from_address(address)
        if root := self._roots.get(view.view_src or 0):
            view.data = (root.data or 0) + view.view_offs

    def close(self) -> None:
        if self._buffer:
            ggml_base().ggml_backend_buffer_free(self._buffer)
        self._files.close()
        self._buffer, self._memory = 0, None

    def _slot(self, slot: int) -> int:
        return self._slots + slot * self._slot_size


def _extent(tensor: Tensor) -> Extent:
    return Extent(tensor.file, tensor.start, tensor.start + tensor.size)


def _holds(extent: Extent, tensor: Tensor) -> bool:
    return extent.file == tensor.file and extent.start <= tensor.start <= tensor.start + tensor.size <= extent.stop


def _places(layer: Layer, first: int) -> tuple[dict[Extent, int], int]:
    """Offsets of extents of whole pages one after the other, the first at `first`; and their end."""
    found = dict[Extent, int]()
    for extent in layer.extents:
        found[extent] = first
        first += -(-extent.size // ALIGNED) * ALIGNED
    return found, first


def _address(places: Mapping[Extent, int], tensor: Tensor) -> int | None:
    return next(
        (place + tensor.start - extent.start for extent, place in places.items() if _holds(extent, tensor)), None
    )
