"""Pools of experts of layers that devices compute.

The tensors of these layers' experts get the addresses of slots before the model's context is made, and keep them. So a
pass rewrites only the numbers of chosen experts, and the device computes all of the layer. What a pool in its own
memory lacks is wanted from the pools in this machine's memory, and uploaded from there: once it is read, if it was on
disk.

A device that shares this machine's memory computes in the pools to which experts are read. Before a layer's experts are
chosen, the operation in front is reported, which ggml does when the device has computed all so far. So the slots of
layers before may get other experts then; those that the layer uses stay until the next layer's are chosen.
"""

import ctypes
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from edgespec.errors import undone
from edgespec.machine.memory import format_size
from edgespec.weights.expert_memory import ExpertMemory
from edgespec.weights.experts import ExpertLayer, Residents, pool_size
from edgespec.weights.plan import Plan, Pool
from edgespec.weights.tiered_memory import DevicePlace, TieredMemory

from ..context import ContextSize, trial_context
from ..ggml.files import WEIGHTS, find_device, ggml_base, loaded_tensors
from ..ggml.ggml_tensor import GgmlTensor, operation_at
from .mixture import USERS, Mixture, open_memory
from .own_memory import buffer_here
from .planning import find_expert_layers

Tensors = dict[str, tuple[int, int]]  # by name: its address, and its dimension that counts experts


class DevicePools:
    """See `edgespec.weights.tiered_memory.Devices`: devices' buffers in which tensors of experts lie until `close`."""

    def __init__(
        self,
        layers: Sequence[ExpertLayer],
        pools: Iterable[Pool],
        tensors: Tensors,
        here: Callable[[int, int], tuple[Any, int]] | None = None,
    ) -> None:
        """Args:
            layers: of the model.
            pools: of some of them.
            tensors: of all their experts.
            here: `ExpertMemory.memory`, in which the devices compute; None: in their own.

        Raises:
            OSError: a device has no memory.
        """
        self.places: dict[int, DevicePlace] = {}
        self._buffers: list[int] = []
        self._before: list[tuple[int, bytes]] = []
        with undone(self.close):
            for pool in pools:
                first, memory = layers[pool.layers[0]], None
                if not here:
                    residents = Residents(len(pool.layers), first.count, pool.slots)
                    for row, number in enumerate(pool.layers):
                        addresses = tuple(tensors[tensor.name][0] for tensor in layers[number].tensors)
                        self.places[number] = DevicePlace(residents, row, addresses)
                for i in range(len(first.tensors)):
                    if here:
                        memory = here(pool.layers[0], i)[1], pool_size(first, i, pool.slots)
                    self._move(pool, [tensors[layers[number].tensors[i].name] for number in pool.layers], memory)

    def _move(self, pool: Pool, tensors: Sequence[tuple[int, int]], here: tuple[int, int] | None) -> None:
        """Have tensors of one kind lie in one array of slots, of which a computing device reads whole rows beyond.

        Args:
            here: address and size of the array in this machine's memory; None: it is made.
        """
        library, buffer = ggml_base(), 0
        for address, dimension in tensors:
            tensor = GgmlTensor.from_address(address)
            self._before.append((address, bytes(tensor)))
            tensor.ne[dimension] = pool.slots
            for i in range(dimension + 1, len(tensor.ne)):
                tensor.nb[i] = tensor.nb[i - 1] * tensor.ne[i - 1]
            if not buffer:
                buffer = new_buffer(pool.device, address, here)
                self._buffers.append(buffer)
            tensor.buffer = tensor.data = None
            library.ggml_backend_tensor_alloc(buffer, address, library.ggml_backend_buffer_get_base(buffer))

    def upload(self, weight: int, source: int, offset: int, size: int) -> None:
        ggml_base().ggml_backend_tensor_set(weight, source, offset, size)

    def close(self) -> None:
        """Give the tensors back what they had; no context may use them any more."""
        for address, content in self._before:
            ctypes.memmove(address, content, len(content))
        for buffer in self._buffers:
            ggml_base().ggml_backend_buffer_free(buffer)
        self._before, self._buffers, self.places = [], [], {}


def new_buffer(device: str, tensor: int, here: tuple[int, int] | None) -> int:
    """A device's buffer for a tensor; `here` as for `DevicePools._move`.

    Raises:
        OSError: it has no room.
    """
    library, place = ggml_base(), find_device(device)
    kind = library.ggml_backend_dev_buffer_type(place)
    size = library.ggml_backend_buft_get_alloc_size(kind, tensor)
    if here and size <= here[1] <= library.ggml_backend_buft_get_max_size(kind):
        return buffer_here(place or 0, *here, size)
    if here or not (buffer := library.ggml_backend_buft_alloc_buffer(kind, size)):
        raise OSError(f"{device} has no room for a pool of {format_size(size, up=True)}")
    library.ggml_backend_buffer_set_usage(buffer, WEIGHTS)
    library.ggml_backend_buffer_clear(buffer, 0)
    return int(buffer)


def place_experts(
    path: str,
    model: Any,
    size: ContextSize,
    params: Any,
    plan: Plan,
    operations: Callable[[Any], Sequence[int]],
    notes: list[str],
    *,
    keep: bool,
) -> ExpertMemory | None:
    """Move experts of a model to devices, before its context is made.

    Args:
        path: of the model; for a split one its first file.
        model: with all experts in this machine's memory.
        size, params: of the context.
        plan: with pools of layers that devices compute.
        operations: returns the addresses of all operations of a pass in a context.
        notes: gets messages for the user.
        keep: as for `open_memory`.

    Returns:
        For `open_mixture`; None: they stay where they were.

    Raises:
        ModelError: the experts cannot be read.
    """
    layers, memory = find_expert_layers(path, loaded_tensors(path)), None
    try:
        with trial_context(path, model, size, params) as context:
            tensors = expert_tensors(operations(context), layers)
        if len(tensors) < sum(len(layer.tensors) for layer in layers):
            raise OSError("the graph has other experts than the file")
        if plan.device_pools:
            devices = DevicePools(layers, plan.device_pools, tensors)
            memory = open_memory(path, plan, keep, lambda *given: TieredMemory(devices, *given))
        else:
            memory = open_memory(path, plan, keep)
            memory.release = DevicePools(memory.layers, plan.on_devices, tensors, memory.memory).close
        with trial_context(path, model, size, params) as context:
            why = Mixture(memory, 1).learn(operations(context))
    except OSError as error:
        why = str(error)
    except BaseException:
        if memory:
            memory.close()
        raise
    if why:
        names = ", ".join(sorted({pool.device for pool in plan.on_devices}))
        notes.append(f"{names} gets no experts: {why}")
        if memory:
            memory.close()
        return None
    return memory


def expert_tensors(operations: Iterable[int], layers: Iterable[ExpertLayer]) -> Tensors:
    names, found = {tensor.name.encode() for layer in layers for tensor in layer.tensors}, Tensors()
    for operation in map(operation_at, operations):
        user = USERS.get(operation.op)
        if user and (name := operation.names[user.source]) in names:
            found[name.decode()] = operation.sources[user.source], user.dimension
    return found
