"""Weights in memory of this program, where no pages can be moved to the mapped file: on macOS.

Before a model's context is made, the weights that stay get addresses in this memory. A device that shares it may
compute with them there. A streamed layer's weights get the addresses of its slot once that is read, and those of the
mapped file when the layer is computed. So the processor may compute a layer too early: that is slow, never wrong. A
device cannot read the mapped file.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

from edgespec.errors import ModelError, undone
from edgespec.loop.engines import Progress
from edgespec.machine.memory import format_size
from edgespec.weights.direct_io import ALIGNED, DirectFiles
from edgespec.weights.expert_memory import own_memory
from edgespec.weights.open_files import Store
from edgespec.weights.plan import Extent, Layer, Plan, Tensor, layer_of

from ..context import ContextSize, trial_context
from ..ggml.callback import OperationCallback
from ..ggml.files import WEIGHTS, ggml_base, llama_cpp
from ..ggml.ggml_tensor import GgmlTensor, is_known, source_addresses

NONE = 0  # GGML_OP_NONE: nothing is computed


@dataclass(slots=True)
class Graph:
    """Where a model's weights are, and which operations use them.

    Attributes:
        found: addresses of tensors by name.
        refused: names of those with which the device cannot compute.
        operations: addresses by name.
        gates: by layer, names of the operations from which its own begin.
    """

    found: dict[str, list[int]] = field(default_factory=dict)
    refused: set[str] = field(default_factory=set)
    operations: dict[bytes, int] = field(default_factory=dict)
    gates: dict[int, set[bytes]] = field(default_factory=dict)


def find_weights(
    path: str, model: Any, size: ContextSize, params: Any, tensors: Iterable[Tensor], device: int
) -> Graph:
    """Find a model's weights in a graph of it, which is not computed.

    Args:
        path: of the model.
        model: all of whose weights the processor has.
        size, params: of its context.
        tensors: to look for.
        device: that shall compute with some of them; 0: none.

    Raises:
        ModelError: this build of llama.cpp is not known.
    """
    layers, graph, strange = {tensor.name.encode(): layer_of(tensor) for tensor in tensors}, Graph(), list[int]()

    def see(operation: int, ask: bool) -> bool:
        if not is_known(operation):
            strange.append(operation)
        elif ask:
            for source in source_addresses(operation):
                root = GgmlTensor.from_address(source).view_src or source
                if (layer := layers.get(name := GgmlTensor.from_address(root).name)) is None:
                    continue
                if root not in (known := graph.found.setdefault(name.decode(), [])):
                    known.append(root)
                if device and not ggml_base().ggml_backend_dev_supports_op(device, operation):
                    graph.refused.add(name.decode())
                if layer not in graph.gates:
                    graph.gates[layer] = set(_gates(operation, layer, graph, layers))
            graph.operations[GgmlTensor.from_address(operation).name] = operation
            GgmlTensor.from_address(operation).op = NONE
        return False

    watch, trial, token = OperationCallback(see), type(params).from_buffer_copy(params), (llama_cpp.llama_token * 1)(0)
    trial.cb_eval, trial.offload_kqv = watch.callback, False
    with trial_context(path, model, size, trial) as context, watch.signals.held():
        llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(token, 1))
    if strange:
        raise ModelError(f"{path}: cannot be streamed: this build of llama.cpp has another layout of tensors")
    return graph


def _gates(operation: int, layer: int, graph: Graph, weights: Collection[bytes]) -> Iterator[bytes]:
    """Names of the operations of other layers on which a layer's first operation depends."""
    for source in source_addresses(operation):
        name = GgmlTensor.from_address(source).name
        if b"#" in name:  # a copy on another device
            name = name.split(b"#")[1]
            source = graph.operations.get(name, source)
        if name.endswith(b"-%d" % layer):
            yield from _gates(source, layer, graph, weights)
        elif name not in weights:
            yield name


class OwnMemory(Store):
    """See `Store`.

    Attributes:
        plan: as given, with reads of whole pages.
        only_here: numbers of layers that are wrong where they are not in their slots, as a device computes them.
    """

    def __init__(
        self,
        paths: Sequence[str],
        tensors: Sequence[Tensor],
        plan: Plan,
        found: Mapping[str, Sequence[int]],
        there: Collection[str] = (),
        device: int = 0,
    ) -> None:
        """
        Args:
            paths: files of the model.
            tensors: of the model.
            plan: in which parts of layers end where tensors end.
            found: of a `Graph`; no context uses them yet.
            there: names of the weights that the device computes with.
            device: that shares this memory; 0: none.

        Raises:
            OSError: a file cannot be opened, there is no memory, or the device cannot have it.
        """
        self._buffer, self._memory, self._direct = 0, None, DirectFiles(paths)
        super().__init__(self._direct)
        with undone(self.close):
            self.plan = replace(plan, streamed=tuple(map(self._direct.widened, plan.streamed)))
            tensors = sorted((one for one in tensors if one.name in found), key=lambda one: (one.file, one.start))
            kept = [tensor for tensor in tensors if any(_holds(extent, tensor) for extent in plan.pinned)]
            groups = [[one for one in kept if (one.name in there) == on_device] for on_device in (False, True)]
            pinned = [self._direct.widened(Layer(0, tuple(one.extent for one in some))).extents for some in groups]
            first, slots = _size(pinned[0]), _size(pinned[0]) + _size(pinned[1])
            self._inside = {layer.index: _places(layer.extents, 0) for layer in self.plan.streamed}
            self._slot_size = max((_size(layer.extents) for layer in self.plan.streamed), default=0)
            size = slots + self._slot_size * plan.slots
            self._memory, address = own_memory(size)
            self._pinned = [_places(pinned[0], address), _places(pinned[1], address + first)]
            self._slots, shift = address + slots, 0  # from here to the device's addresses
            if device:
                largest = max((tensor.size for tensor in tensors), default=0)
                self._buffer = buffer_here(device, address + first, size - first, largest)
                shift = ggml_base().ggml_backend_buffer_get_base(self._buffer) - address - first
        # By layer its tensors, each with its address in slot 0, and that where it is not in a slot.
        self._moving = dict[int, list[tuple[GgmlTensor, int, int]]]()
        self._layer_of = dict[int, int]()  # by address, also of views
        self.only_here = set[int]()

        def moved(tensor: Tensor, place: int) -> Iterator[tuple[GgmlTensor, int, int]]:
            for address in found[tensor.name]:
                one = GgmlTensor.from_address(address)
                if tensor.name in there:
                    one.buffer, one.data = self._buffer, place + shift
                yield one, place + shift * (tensor.name in there), one.data or 0

        for tensor in kept:
            place = _address(self._pinned[tensor.name in there], tensor)
            for one, address, _ in moved(tensor, place or 0):
                one.data = address
        for layer in self.plan.streamed:
            own = list[tuple[GgmlTensor, int, int]]()
            for tensor in (one for one in tensors if layer_of(one) == layer.index):
                if (inside := _address(self._inside[layer.index], tensor)) is not None:
                    own += moved(tensor, self._slots + inside)
                    self._layer_of |= dict.fromkeys(found[tensor.name], layer.index)
                    self.only_here |= {layer.index} if tensor.name in there else set()
            self._moving[layer.index] = own

    def preload(self, extents: Sequence[Extent], progress: Progress) -> None:
        """Read pinned weights; what the graph has not stays in the mapped file."""
        before, total = 0, sum(extent.size for places in self._pinned for extent in places)
        for places in self._pinned:

            def tell(done: int, _: int, before: int = before) -> None:
                progress(before + done, total)

            self._direct.fill(places, tell)
            before += sum(extent.size for extent in places)
        self.note = f"{format_size(total)} in memory of their own"

    def read(self, slot: int, layer: Layer, extent: Extent, start: int, stop: int) -> None:
        place = self._slots + slot * self._slot_size + self._inside[layer.index][extent] - extent.start
        self._direct.read(extent.file, place + start, start, stop)

    def show(self, slot: int, layer: Layer) -> None:
        for tensor, address, _ in self._moving[layer.index]:
            tensor.data = address + slot * self._slot_size

    def hide(self, slot: int, layer: Layer) -> None:
        for tensor, _, outside in self._moving[layer.index]:
            tensor.data = outside

    def layer_used(self, address: int) -> int:
        """
        Args:
            address: of the next operation. If it is a view of a streamed tensor, it gets the tensor's address.

        Returns:
            The streamed layer whose weights it uses; -1: none.
        """
        operation = GgmlTensor.from_address(address)
        root = operation.view_src or 0
        if (layer := self._layer_of.get(root, -1)) >= 0:
            operation.data = (GgmlTensor.from_address(root).data or 0) + operation.view_offs
            self._layer_of[address] = layer
            return layer
        self._layer_of.pop(address, None)  # of another graph
        return max((self._layer_of.get(source, -1) for source in source_addresses(address)), default=-1)

    def close(self) -> None:
        if self._buffer:
            ggml_base().ggml_backend_buffer_free(self._buffer)
        super().close()
        self._buffer, self._memory = 0, None


def buffer_here(device: int, address: int, size: int, largest: int) -> int:
    """Memory of this program as a buffer of a device that shares it, for weights of at most `largest` bytes.

    Raises:
        OSError: the device cannot have it.
    """
    if not (buffer := ggml_base().ggml_backend_dev_buffer_from_host_ptr(device, address, size, largest)):
        raise OSError(f"the GPU cannot have {format_size(size)} of memory")
    ggml_base().ggml_backend_buffer_set_usage(buffer, WEIGHTS)
    return int(buffer)


def _holds(extent: Extent, tensor: Tensor) -> bool:
    return extent.file == tensor.file and extent.start <= tensor.start <= tensor.start + tensor.size <= extent.stop


def _places(extents: Iterable[Extent], first: int) -> dict[Extent, int]:
    """Places of extents of whole pages one after the other, the first at `first`."""
    sizes = [_size([extent]) for extent in extents]
    return dict(zip(extents, accumulate(sizes, initial=first), strict=False))


def _size(extents: Iterable[Extent]) -> int:
    return sum(-(-extent.size // ALIGNED) * ALIGNED for extent in extents)


def _address(places: Mapping[Extent, int], tensor: Tensor) -> int | None:
    return next(
        (place + tensor.start - extent.start for extent, place in places.items() if _holds(extent, tensor)), None
    )
