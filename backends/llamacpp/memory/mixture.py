"""A mixture of experts in llama.cpp: chosen experts are read into slots, and llama.cpp gets their addresses.

llama.cpp finds the weights of expert e at `data + e * nb[2]` of a tensor with all experts of a layer. Before a layer's
experts are computed, `data` gets the address of the slots of `edgespec/weights/expert_memory.py`, and slot numbers
replace the numbers of the chosen experts; each pass restores both. An unchanged operation reads the mapped file.

Nodes of a layer (llama-graph.cpp, `build_moe_ffn`):

    ffn_moe_topk            the chosen experts [used, rows], the first columns of a sorted matrix
    ffn_moe_weights*        their weights in the sum: the last operations that need the experts' own numbers
    ffn_moe_gate, *_up      the first expert weights
    ffn_moe_down            the last
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import ModelError
from edgespec.loop.engines import Progress
from edgespec.machine.measurements import Amount, identity, recall, remember
from edgespec.models.gguf_header import own_values
from edgespec.weights.expert_memory import ExpertMemory
from edgespec.weights.plan import Plan

from ..ggml.files import ggml_base, loaded_tensors, parts
from ..ggml.ggml_tensor import GgmlTensor, is_here, is_known, skip_rows
from .planning import find_expert_layers

NEARLY_ALL = 0.9  # share of a layer's chosen experts that makes all of the next layer's worth a read
ADD_ROWS = b"ADD_ID"  # adds the chosen experts' rows of a small matrix, such as a bias


@dataclass(frozen=True, slots=True)
class Operation:
    name: bytes
    op: bytes
    sources: tuple[int, ...]
    names: tuple[bytes, ...]


def operation_at(address: int) -> Operation:
    tensor = GgmlTensor.from_address(address)
    sources = tuple(source or 0 for source in tensor.src)
    names = tuple(GgmlTensor.from_address(source).name if source else b"" for source in sources)
    return Operation(tensor.name, ggml_base().ggml_op_desc(address), sources, names)


def root_of(address: int) -> int:
    return (GgmlTensor.from_address(address).view_src or address) if address else 0


@dataclass(slots=True)
class Layer:
    """
    Attributes:
        weights: addresses, for each: tensor, its own data, data of slot 0.
        rows: of each operand of `ADD_ROWS`: tensor, its own data, bytes of a row, and a copy in the order of slots.
    """

    weights: list[tuple[int, int, int]] = field(default_factory=list)
    rows: list[tuple[int, int, int, Any]] = field(default_factory=list)

    def tell_slots(self, experts: Sequence[int], slots: Sequence[int]) -> None:
        for tensor, _, there in self.weights:
            GgmlTensor.from_address(tensor).data = there
        for tensor, data, size, copy in self.rows:
            for expert, slot in zip(experts, slots, strict=True):
                ctypes.memmove(ctypes.addressof(copy) + slot * size, data + expert * size, size)
            GgmlTensor.from_address(tensor).data = ctypes.addressof(copy)

    def tell_experts(self) -> None:
        for tensor, data, *_ in (*self.weights, *self.rows):
            GgmlTensor.from_address(tensor).data = data


class Mixture:
    """Keeps an `ExpertMemory` in step with a pass; `LayerHooks` calls it for every operation."""

    def __init__(self, memory: ExpertMemory, used: int, about: dict[str, Any] | None) -> None:
        """
        Args:
            memory: slots of experts.
            used: experts that a token uses.
            about: key of the remembered expert scores; None: they are not remembered.
        """
        self.memory = memory
        self.about = about
        self.shape = memory.layers[0].count, used
        self._layers: list[Layer] = []
        self._copies: list[Any] = []
        self._users: dict[bytes, tuple[int, int]] = {}  # indices of layer and weight, by operation
        self._first: set[bytes] = set()
        self._before: set[bytes] = set()
        self._told: list[Layer] = []
        self._numbers: tuple[int, int] = (0, 0)  # tensor of chosen experts, its rows without padding
        self._chosen = -1  # index of the layer whose experts are in slots; -1: none
        self._used: list[int] = []
        self._nearly_all = False
        self._prompt, self._rows, self._padding = False, 0, 0

    @property
    def counted(self) -> tuple[int, int, int]:
        """
        Returns:
            Experts that passes over trees used, those of them that were in memory, and bytes read.
        """
        return self.memory.wanted, self.memory.hits, self.memory.bytes_read

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
        for i, operation in enumerate(operations):
            if operation.op == b"MUL_MAT_ID" and operation.names[0] in places:
                if operation.name in self._users:
                    return f"two operations are called {operation.name.decode()}"
                if not all(map(is_here, (operation.sources[0], operation.sources[2]))):
                    return f"{operation.name.decode()} is computed where this program cannot look"
                number, weight = self._users[operation.name] = places[operation.names[0]]
                if not self._layers[number].weights:
                    self._first.add(operation.name)
                self._before.add(operations[i - 1].name)
                chosen |= dict.fromkeys((operation.sources[2], root_of(operation.sources[2])), number)
                data = GgmlTensor.from_address(operation.sources[0]).data
                self._layers[number].weights.append((operation.sources[0], data, self.memory.base(number, weight)))
            elif operation.op == ADD_ROWS and operation.sources[2] in chosen:
                self._add_rows(self._layers[chosen[operation.sources[2]]], operation.sources[1])
            elif chosen.keys() & {*operation.sources, *map(root_of, operation.sources)}:
                return f"{operation.name.decode()} needs the experts' numbers when they are gone"
        for number, layer in enumerate(self.memory.layers):
            if len(self._layers[number].weights) != len(layer.tensors):
                return f"the graph has other experts in layer {layer.index} than the file"
        return ""

    def _add_rows(self, layer: Layer, address: int) -> None:
        tensor = GgmlTensor.from_address(address)
        size, at = tensor.nb[1] * tensor.ne[1], len(layer.rows)
        if at == len(self._copies):
            self._copies.append(ctypes.create_string_buffer(size))
        elif ctypes.sizeof(self._copies[at]) < size:  # `len` stays what it was
            ctypes.resize(self._copies[at], size)
        layer.rows.append((address, tensor.data, tensor.nb[1], self._copies[at]))

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
            OSError: memory cannot be moved.
        """
        if user := self._users.get(name):
            number, weight = user
            if name in self._first:
                if reported:
                    self._choose(number, tensor)
                else:  # use the mapped file
                    self._layers[number].tell_experts()
                    self._chosen = -1
            if number == self._chosen:
                self._leave_padding(tensor if reported else 0)
                self._go_on(weight, reported)
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

    def _go_on(self, weight: int, reported: bool) -> None:
        """Wait for this weight, and prefetch the next layer's experts into the memory of weights that are computed."""
        # In a prompt, the last layer computes few rows or none.
        if reported and self._nearly_all and self._chosen + 1 < len(self._layers) - self._prompt:
            for used in self._used:
                self.memory.expect_all(self._chosen + 1, used)
            self._used = []
        self._used.append(weight)
        self.memory.wait(self._chosen, weight)

    def _choose(self, number: int, tensor: int) -> None:
        self._forget_slots()
        self._chosen = -1
        numbers = GgmlTensor.from_address(tensor).src[2]
        chosen = self._chosen_by_row(numbers)
        experts: list[int] = np.unique(chosen).tolist()
        if not experts:
            return
        slots = self.memory.want(number, experts, score=not self._prompt)
        chosen[...] = slots[chosen]
        if self._padding and len(chosen) == self._rows and not self._prompt:
            self._numbers = numbers, self._rows - self._padding
        layer = self._layers[number]
        layer.tell_slots(experts, slots[experts].tolist())
        self._told.append(layer)
        self._chosen, self._used = number, []
        self._nearly_all = len(experts) >= NEARLY_ALL * len(slots)

    def _chosen_by_row(self, address: int) -> NDArray[np.int32]:
        """A view of the chosen experts [rows, used] in llama.cpp's memory; padding rows get the first row's experts."""
        tensor = GgmlTensor.from_address(address)
        used, rows, stride = tensor.ne[0], tensor.ne[1], tensor.nb[1] // 4
        if rows == 0:
            return np.zeros((0, used), np.int32)
        numbers = (ctypes.c_int32 * (stride * (rows - 1) + used)).from_address(tensor.data)
        found = np.lib.stride_tricks.as_strided(np.frombuffer(numbers, np.int32), (rows, used), (4 * stride, 4))
        if self._padding and rows == self._rows and not self._prompt:
            found[rows - self._padding :] = found[0]
        return found

    def _forget_slots(self) -> None:
        for layer in self._told:
            layer.tell_experts()
        self._leave_padding(0)
        self._told, self._numbers = [], (0, 0)

    def finish(self) -> None:
        self._forget_slots()
        self._chosen, self._used = -1, []
        self.memory.finish()

    def close(self) -> None:
        if self.about is not None and self.memory.wanted:
            remember(self.about, [residents.scores.round(3).tolist() for residents in self.memory.residents])
        self.memory.close()


def open_mixture(
    path: str, plan: Plan, operations: Sequence[int], notes: list[str], progress: Progress, *, keep: bool
) -> Mixture | None:
    """
    Args:
        path: of the model; for a split one its first file.
        plan: that gives experts slots.
        operations: of a pass: `LayerHooks.operations`.
        notes: gets messages for the user.
        progress: of reading experts at load.
        keep: remember which experts were used most, and begin with what is remembered.

    Returns:
        The mixture, ready to read experts as they are chosen; None if the page cache must hold them.

    Raises:
        ModelError: the experts cannot be read.
    """
    layers = find_expert_layers(path, loaded_tensors(path))
    used = int(own_values(path).get("expert_used_count", 1))
    about = {"kind": "experts", "target": identity(path)} if keep else None
    try:
        mixture = Mixture(ExpertMemory(parts(path), layers, plan.slots_of_experts), used, about)
    except OSError as error:
        raise ModelError(f"{path}: experts cannot be read: {error}") from error
    try:
        if why := mixture.learn(operations):
            notes.append(f"experts are left to the page cache, which is slow: {why}")
            mixture.memory.close()
            return None
        known = (recall(about, list[list[Amount]]) if about else None) or []
        whole = len(known) == len(layers) and all(len(one) == layers[0].count for one in known)
        mixture.memory.fill(known if whole else [[0.0] * layers[0].count] * len(layers), progress)
    except BaseException:
        mixture.memory.close()
        raise
    return mixture
