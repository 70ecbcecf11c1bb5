"""A mixture of experts in llama.cpp: chosen experts are read into slots, and llama.cpp gets their addresses.

llama.cpp finds the weights of expert e at `data + e * nb[2]` of a tensor with all experts of a layer, `ne[2]` of them.
Before a layer's experts are computed, these get the address, distance and number of the slots of
`edgespec/weights/expert_memory.py`, and slot numbers replace the numbers of the chosen experts; each pass restores all.
An unchanged operation reads the mapped file. Biases are further weights; their experts are counted by `ne[1]`.
Tensors of layers on devices keep the addresses of slots (`pools.py`), so there an unchanged operation would be wrong.

Nodes of a layer (llama-graph.cpp, `build_moe_ffn`):

    ffn_moe_topk            the chosen experts [used, rows], the first columns of a sorted matrix
    ffn_moe_weights*        their weights in the sum: the last operations that need the experts' own numbers
    ffn_moe_gate, *_up      the first expert weights
    ffn_moe_down            the last
"""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Self

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import ModelError, failing_as, undone
from edgespec.machine.measurements import identity
from edgespec.models.gguf_header import own_values
from edgespec.weights.expert_memory import ExpertMemory
from edgespec.weights.plan import Plan

from ..ggml.files import ggml_base, loaded_tensors, parts
from ..ggml.ggml_tensor import GgmlTensor, is_here, is_known, numbers_of, operation_at, root_of, skip_rows
from .foresight import Router, find_routers, floats
from .planning import find_expert_layers


@dataclass(frozen=True, slots=True)
class User:
    """An operation with chosen experts.

    Attributes:
        source: its operand with all experts; the third one has the numbers of those chosen.
        dimension: of this operand, that counts experts.
    """

    source: int
    dimension: int


PRODUCT = b"MUL_MAT_ID"
USERS = {PRODUCT: User(0, 2), b"ADD_ID": User(1, 1)}  # the second adds a bias


@dataclass(slots=True)
class Layer:
    """
    Attributes:
        tensors: of its experts, each with its own `Place` and that of the slots.
    """

    tensors: list[tuple[GgmlTensor, "Place", "Place"]] = field(default_factory=list)

    def add(self, address: int, dimension: int, memory: ExpertMemory, number: int, weight: int) -> None:
        """Add a tensor, whose `dimension` counts experts."""
        tensor = GgmlTensor.from_address(address)
        slots = experts = Place.of(tensor, dimension)
        if number not in memory.on_devices:
            stride = memory.layers[number].stride(weight)
            slots = Place(dimension, memory.base(number, weight), memory.slots(number), stride)
        self.tensors.append((tensor, experts, slots))

    def tell_slots(self) -> None:
        for tensor, _, slots in self.tensors:
            slots.give(tensor)

    def tell_experts(self) -> None:
        for tensor, experts, _ in self.tensors:
            experts.give(tensor)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor's experts lie.

    Attributes:
        dimension: that counts experts.
        data: address of the first.
        count: of experts or slots.
        stride: bytes from one to the next.
    """

    dimension: int
    data: int
    count: int
    stride: int

    @classmethod
    def of(cls, tensor: GgmlTensor, dimension: int) -> Self:
        return cls(dimension, tensor.data, tensor.ne[dimension], tensor.nb[dimension])

    def give(self, tensor: GgmlTensor) -> None:
        """Have llama.cpp's kernels look here."""
        tensor.data, tensor.ne[self.dimension], tensor.nb[self.dimension] = self.data, self.count, self.stride


class Mixture:
    """Keeps an `ExpertMemory` in step with a pass; `LayerHooks` calls it for every operation."""

    def __init__(self, memory: ExpertMemory, used: int, mapped: bool = True) -> None:
        """
        Args:
            memory: slots of experts.
            used: experts that a token uses.
            mapped: they lie in the mapped file, too.
        """
        self.memory, self._mapped = memory, mapped
        self.shape = memory.layers[0].count, used
        self._layers: list[Layer] = []
        self._routers: dict[int, Router] = {}  # by number of the layer
        self._products: dict[bytes, tuple[int, list[int]]] = {}  # number of the layer, those of weight and bias
        self._first: set[bytes] = set()
        self._later: dict[bytes, int] = {}  # operations behind a layer's products that need its experts' numbers
        self._before: set[bytes] = set()
        self._replaced: tuple[int, NDArray[np.int32]] | None = None  # tensor of numbers that `_later` needs; these
        self._told: list[Layer] = []
        self._numbers: tuple[int, int] = (0, 0)  # tensor of chosen experts, its rows without padding
        self._chosen = -1  # number of the layer whose experts are in slots; -1: none
        self._prompt, self._rows, self._padding = False, 0, 0

    def learn(self, addresses: Sequence[int]) -> str:
        """Find the experts' operations.

        Args:
            addresses: of all operations of a pass.

        Returns:
            Reason that experts cannot be read as they are chosen, or "".
        """
        if not addresses or not is_known(addresses[0]):
            return "this build of llama.cpp has another layout of tensors"
        operations = [operation_at(address) for address in addresses]
        numbers = {layer.index: number for number, layer in enumerate(self.memory.layers)}
        places = {
            tensor.name.encode(): (number, i)
            for number, layer in enumerate(self.memory.layers)
            for i, tensor in enumerate(layer.tensors)
        }
        self._layers = [Layer() for _ in numbers]
        chosen: dict[int, int] = {}
        inputs: dict[int, int] = {}  # index of a layer -> what its experts read
        rewritten = set[bytes]()  # names of numbers, of which llama.cpp may make copies for other devices later
        for before, operation in pairwise([operations[0], *operations]):
            at = USERS.get(operation.op)
            if at and operation.names[at.source] in places:
                if operation.name in self._products:
                    return f"two operations are called {operation.name.decode()}"
                number, weight = places[operation.names[at.source]]
                there, first = number in self.memory.on_devices, not self._layers[number].tensors
                if not there and not all(map(is_here, (operation.sources[at.source], operation.sources[2]))):
                    return f"{operation.name.decode()} is computed where this program cannot look"
                if number in self._later.values() or (not first and chosen.get(operation.sources[2]) != number):
                    return f"{operation.name.decode()} has other experts' numbers than its layer"
                if operation.op == PRODUCT:
                    if first:
                        self._first.add(operation.name)
                        inputs[self.memory.layers[number].index] = root_of(operation.sources[1])
                    self._products[operation.name] = number, self.memory.layers[number].with_bias(weight)
                    if first or not there:
                        self._before.add(before.name)
                    chosen |= dict.fromkeys((operation.sources[2], root_of(operation.sources[2])), number)
                    rewritten.add(operation.names[2])
                self._layers[number].add(operation.sources[at.source], at.dimension, self.memory, number, weight)
            elif needed := chosen.keys() & {*operation.sources, *map(root_of, operation.sources)}:
                number = chosen[needed.pop()]
                if len(self._layers[number].tensors) == len(self.memory.layers[number].tensors):
                    self._later[operation.name] = number
                    self._before.add(before.name)
                else:
                    return f"{operation.name.decode()} needs the experts' numbers when they are gone"
            elif any(name.count(b"#") == 2 and name.split(b"#")[1] in rewritten for name in operation.names):
                return f"{operation.name.decode()} needs the experts' numbers when they are gone"
        for number, layer in enumerate(self.memory.layers):
            if len(self._layers[number].tensors) != len(layer.tensors):
                return f"the graph has other experts in layer {layer.index} than the file"
        self._routers = {numbers[index]: router for index, router in find_routers(operations, inputs).items()}
        return ""

    def begin(self, *, prompt: bool, rows: int, padding: int) -> None:
        """
        Args:
            prompt: the pass reads a prompt, which uses nearly all experts.
            rows: of the pass.
            padding: number of last rows that are padding.

        Raises:
            ModelError: the model cannot be read.
        """
        self.memory.begin()
        self._prompt, self._rows, self._padding = prompt, rows, padding
        self._chosen = -1

    def asked(self, name: bytes, tensor: int, reported: bool) -> bool:
        """Prepare the next operation.

        Args:
            name: of the operation.
            tensor: its address.
            reported: all earlier operations are computed.

        Returns:
            True if the pass must stop after this operation.

        Raises:
            ModelError: the disk failed.
        """
        if user := self._products.get(name):
            number, weights = user
            if name in self._first:
                if reported:
                    self._choose(number, tensor)
                elif number in self.memory.on_devices or not self._mapped:
                    raise ModelError(f"{name.decode()} would be computed before its experts are chosen")
                else:
                    self._layers[number].tell_experts()
                    self._chosen = -1
            if number == self._chosen:
                self._leave_padding(tensor if reported else 0)
                self.memory.wait(number, weights)
            elif self._chosen >= 0 and (number in self.memory.on_devices or not self._mapped):
                raise ModelError(f"{name.decode()} would be computed when its experts are gone")
        elif self._replaced and self._later.get(name) == self._chosen:
            if not reported:
                raise ModelError(f"{name.decode()} would be computed before it gets the experts' numbers")
            self._leave_padding(0)
            write_numbers(*self._replaced)
            self._replaced = None
        return name in self._before

    def _leave_padding(self, product: int) -> None:
        """Skip padding rows of the next operation, `product`; if it is 0, compute all rows."""
        address, rows = self._numbers
        if not address:
            return
        if product:
            skip_rows(product, address, rows)
        else:
            GgmlTensor.from_address(address).ne[1] = self._rows

    def _choose(self, number: int, tensor: int) -> None:
        if self._replaced:
            index = self.memory.layers[self._chosen].index
            raise ModelError(f"llama.cpp has not told which operation of layer {index} needs experts' numbers")
        self._forget_slots()
        self._chosen = -1
        numbers = GgmlTensor.from_address(tensor).src[2]
        content = numbers_at(numbers)
        chosen = self._chosen_by_row(numbers, content)
        if not chosen.size:
            return
        prompt = chosen[: len(chosen) - self._padding * (len(chosen) == self._rows)] if self._prompt else None
        slots = self.memory.choose(number, chosen, prompt)
        router = self._routers.get(number + 1) if prompt is None and self.memory.may_foresee(number + 1) else None
        if router and (inputs := floats(GgmlTensor.from_address(tensor).src[1])) is not None:
            self.memory.foresee(number + 1, router.best(inputs, self.shape[1]))
        if number in self._later.values():
            self._replaced = numbers, content.copy()
        chosen[...] = slots[chosen]
        write_numbers(numbers, content)
        if is_here(numbers) and self._padding and len(chosen) == self._rows and not self._prompt:
            self._numbers = numbers, self._rows - self._padding
        self._layers[number].tell_slots()
        self._told.append(self._layers[number])
        self._chosen = number

    def _chosen_by_row(self, address: int, numbers: NDArray[np.int32]) -> NDArray[np.int32]:
        """A view of the chosen experts [rows, used] in `numbers`; padding rows get the first row's experts."""
        tensor = GgmlTensor.from_address(address)
        rows = tensor.ne[1]
        found = np.lib.stride_tricks.as_strided(numbers, (rows, tensor.ne[0]), (tensor.nb[1], 4))
        if self._padding and rows == self._rows and not self._prompt:
            found[rows - self._padding :] = found[0]
        return found

    def _forget_slots(self) -> None:
        for layer in self._told:
            layer.tell_experts()
        self._leave_padding(0)
        self._told, self._numbers, self._replaced = [], (0, 0), None

    def finish(self) -> None:
        self._forget_slots()
        self._chosen = -1
        self.memory.finish()


def numbers_at(address: int) -> NDArray[np.int32]:
    """The memory of a tensor of whole numbers; a copy, if a device has it."""
    tensor = GgmlTensor.from_address(address)
    if not tensor.ne[1]:
        return np.empty(0, np.int32)
    size = tensor.nb[1] // 4 * (tensor.ne[1] - 1) + tensor.ne[0]
    return numbers_of(address, ctypes.c_int32, size)


def write_numbers(address: int, content: NDArray[np.int32]) -> None:
    """Write a tensor of whole numbers, as `numbers_at` gave them."""
    if is_here(address):
        numbers_at(address)[...] = content
    else:
        ggml_base().ggml_backend_tensor_set(address, content.ctypes.data, 0, content.nbytes)


def open_memory(path: str, plan: Plan, keep: bool, kind: Callable[..., ExpertMemory] = ExpertMemory) -> ExpertMemory:
    """
    Args:
        path: of the model; for a split one its first file.
        plan: that gives experts slots.
        keep: remember which experts were used most, and begin with what is remembered.
        kind: makes it.

    Raises:
        ModelError: the experts cannot be read.
    """
    layers = find_expert_layers(path, loaded_tensors(path))
    about = {"kind": "experts", "target": identity(path)} if keep else None
    with failing_as(ModelError, f"{path}: experts cannot be read"):
        return kind(parts(path), layers, plan.pools, about)


def open_mixture(
    path: str,
    memory: ExpertMemory,
    operations: Sequence[int],
    notes: list[str],
    *,
    mapped: bool,
) -> Mixture | None:
    """
    Args:
        path: of the model; for a split one its first file.
        memory: closed if there is no mixture.
        operations: of a pass: `LayerHooks.operations`.
        notes: gets messages for the user.
        mapped: as for `Mixture`.

    Returns:
        The mixture, ready to read experts as they are chosen; None if the page cache must hold them.

    Raises:
        ModelError: the experts cannot be read.
    """
    mixture = Mixture(memory, int(own_values(path).get("expert_used_count", 1)), mapped)
    with undone(memory.close):
        if not (why := mixture.learn(operations)):
            return mixture
        if memory.on_devices or not mapped:
            raise ModelError(f"{path}: experts cannot be read as they are chosen: {why}; use --gpu-layers 0")
    notes.append(f"experts are left to the page cache, which is slow: {why}")
    memory.close()
    return None
