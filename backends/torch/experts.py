"""A mixture of experts that is larger than memory: chosen experts are read into slots of a pool.

A device with memory of its own has pools, too, and misses come from pinned memory (`tiered_memory.py`).
A layer's module gets `Slots` in place of its weights. Experts keep their numbers there, so that transformers computes
them in the same order as with all experts in memory, to the bit.
"""

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from edgespec.loop.engines import Progress
from edgespec.models.safetensors_header import read_safetensors_header
from edgespec.weights.expert_memory import ExpertMemory, own_memory
from edgespec.weights.experts import ExpertLayer, Residents, memory_of, most_pools, pools_of, with_pools
from edgespec.weights.plan import BUFFERS, Extent, Layer, Plan, Pool, merge
from edgespec.weights.tiered_memory import DevicePlace, TieredMemory

from ..common.expert_files import Experts, Form, by_layer, find_experts
from ..common.model_folder import experts_of, read_config, refused
from .attention import ATTENTION, finish
from .disk import STAGING, TYPES
from .loading import NF4, Host, Placement, decoder_layers, runs_of, type_to_load
from .offload import needs_pinning, pin_memory, unpin_memory

MATRICES = {"gate_up_proj": ("gate_proj", "up_proj")}  # that an array holds; others hold one of their name
MOST_GROUPS = 1023  # that CUDA multiplies in one call
CODES = {dtype: code for code, dtype in TYPES.items()}


@dataclass(frozen=True, slots=True)
class ExpertFolder:
    """A model folder whose experts can be read as they are chosen.

    Attributes:
        kind: the model's class.
        config: for it.
        paths: of the files.
        experts: of its layers.
    """

    kind: Any
    config: Any
    paths: tuple[str, ...]
    experts: tuple[Experts, ...]

    @property
    def layers(self) -> list[ExpertLayer]:
        return [one.layer for one in self.experts]

    @property
    def extents(self) -> list[Extent]:
        return merge(one.extent for each in self.experts for one in each.tensors)

    def sizes(self, count: int) -> list[int]:
        """Bytes of the experts of each of `count` layers."""
        found = {layer.index: layer.count * layer.bytes_each for layer in self.layers}
        return [found.get(i, 0) for i in range(count)]

    def work_bytes(self, nodes: int) -> int:
        """Bytes of intermediate values in a layer of a pass: rows for each expert that a token uses."""
        used = (experts_of(self.config.to_dict()) or (0, 0))[1]
        forms = self.experts[0].forms
        return sum(nodes * used * sum(form.shape) * int(form.dtype.itemsize) for form in forms)

    def loader(self) -> Any:
        """A class that loads the model with the experts of one layer only."""
        kind = self.kind

        def init(model: Any, *args: Any, **options: Any) -> None:
            kind.__init__(model, *args, **options)
            for one in self.experts[1:]:
                _empty(_module(model, one))

        return type(kind.__name__, (kind,), {"__init__": init, "__module__": kind.__module__})

    def take(self, model: Any) -> bool:
        """Take the last experts from a model that `loader` has loaded.

        Returns:
            False: their values are not those of the files.

        Raises:
            ModelError: the files cannot be read.
        """
        first = self.experts[0]
        module = _module(model, first)
        with refused("its experts cannot be read"):
            arrays = [module.get_parameter(form.name) for form in first.forms]
            same = all(map(self._is_stored, arrays, first.layer.places))
        _empty(module)
        model.__class__ = self.kind
        return same

    def _is_stored(self, array: Any, places: Sequence[Sequence[Extent]]) -> bool:
        parts = [part for parts in places for part in parts]
        found = [np.fromfile(self.paths[one.file], np.uint8, one.size, offset=one.start) for one in parts]
        return np.array_equal(array.detach().flatten().view(torch.uint8).numpy(), np.concatenate(found))


def _module(model: Any, one: Experts) -> Any:
    return decoder_layers(model)[one.layer.index].get_submodule(one.path)


def _empty(module: Any) -> None:
    module._parameters.clear()
    module._is_hf_initialized = True  # transformers would fill what it misses with random values


def find_folder(folder: Path, dtype: str | None) -> ExpertFolder | None:
    """
    Returns:
        None: the model is no mixture, or its experts do not lie in the folder as a pass needs them. `load_model` says
        what is wrong with a folder.
    """
    try:
        config = read_config(folder)
        if dtype == NF4 or experts_of(config.get_text_config().to_dict()) is None:
            return None
        paths = sorted(map(str, folder.glob("*.safetensors")))
        headers = [read_safetensors_header(Path(path)) for path in paths]
        stored = by_layer({one.name: (file, one) for file, header in enumerate(headers) for one in header})
        made = type_to_load(config, dtype)
        how = {"dtype": getattr(torch, made)} if made else {}
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION, **how)
        found = [
            _find(path, index, module, stored.get(index, {}))
            for index, layer in enumerate(decoder_layers(model))
            for path, module in layer.named_modules()
            if hasattr(module, "has_gate")  # transformers' mark of modules that get experts by their numbers
        ]
    except Exception:
        return None
    one_each = len({one.layer.index for one in found if one}) == len(found) > 0
    return ExpertFolder(type(model), model.config, tuple(paths), tuple(filter(None, found))) if one_each else None


def _find(path: str, index: int, module: Any, stored: Mapping[str, Any]) -> Experts | None:
    arrays, count = module._parameters, int(module.num_experts)
    forms = [
        Form(
            name,
            MATRICES.get(name, (name,)),
            array.dtype,
            CODES.get(array.dtype, ""),
            tuple(array.shape[1:]),
            array.nbytes // count,
        )
        for name, array in arrays.items()
    ]
    whole = all(len(array) == count for array in arrays.values())
    return find_experts(path, index, count, forms, {}, stored) if whole else None


def divide_layers(sizes: Sequence[int], rooms: Sequence[int]) -> list[tuple[int, range]]:
    """Divide layers among devices in proportion to their memory.

    Args:
        sizes: bytes of each layer and its caches, without experts.
        rooms: bytes of each device for these, besides its smallest pools.

    Returns:
        `runs` of a placement; the first device gets all layers, if another has no room.
    """
    count = len(sizes)
    ends = [round(count * end / sum(rooms)) for end in accumulate(rooms)] if min(rooms) > 0 else [count]
    runs = runs_of([stop - start for start, stop in pairwise((0, *ends))])
    fit = all(sum(sizes[numbers.start : numbers.stop]) <= rooms[device] for device, numbers in runs)
    return runs if fit else [(0, range(count))]


def plan_pools(
    experts: ExpertFolder,
    model: Any,
    rooms: Mapping[str, int],
    host: Host,
    fixed: int,
    sizes: Sequence[int],
    caches: Sequence[int],
    placement: Placement,
) -> Plan:
    """
    Args:
        experts: of the model.
        model: without experts.
        rooms: by the devices' names, as for `divide_layers`; a device that computes in this machine's memory has none
            of the smallest pools.
        host: as for `choose_placement`; its `needed` counts the smallest pools.
        fixed: bytes of the first device for all but layers.
        sizes: bytes of layers without experts.
        caches: bytes of their caches.
        placement: of these layers.
    """
    layers, streamed, most = experts.layers, placement.streamed, max(sizes)
    moved, read = (sum(sizes[i] for i in some) for some in (streamed, placement.on_disk))
    least, left, pools = memory_of(layers, pools_of(layers, 0)), host.memory - (moved - read), list[Pool]()
    for device, numbers in placement.runs:
        name, room = list(rooms.items())[device]
        room -= sum(sizes[i] + caches[i] for i in numbers)
        if device == 0:
            room += moved - (BUFFERS * most if streamed else 0)
            left = left if host.apart else room
        at = [number for number, layer in enumerate(layers) if layer.index in numbers]
        there = [replace(layers[number], device=name) for number in at]
        for pool in (most_pools(there, room + least) or pools_of(there, 0)) if host.apart else ():
            slots = min(pool.slots, MOST_GROUPS)
            pools.append(replace(pool, slots=slots, layers=tuple(at[i] for i in pool.layers)))
    left -= host.needed + (STAGING * most if read else 0)
    weights = sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()])
    moving = tuple(Layer(i, (Extent(-1, 0, sizes[i]),)) for i in placement.on_disk)
    plan = Plan(
        memory=host.memory,
        needed=fixed + host.needed - least - weights + sum(sizes),
        pinned=(Extent(-1, 0, weights - sum(layer.size for layer in moving)),),
        streamed=moving,
        cached=tuple(experts.extents),
        slots=min(STAGING, len(moving)),
        layers=len(sizes),
        device_pools=tuple(pools),
    )
    return with_pools(plan, layers, left + least)


class Slots:
    """Stands for a weight [experts, …] whose experts lie in slots."""

    def __init__(self, pool: Any, table: Any) -> None:
        """Args:
        pool: [slots, …].
        table: [experts] the slot of each; others than the wanted ones have none.
        """
        self._pool, self._table = pool, table

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    def __getitem__(self, experts: Any) -> Any:
        return self._pool[self._table[experts]]

    def transpose(self, *axes: int) -> "Slots":
        return Slots(self._pool.transpose(*axes), self._table)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "grouped_mm" not in str(func) or not isinstance(args[1], cls):
            raise TypeError(f"experts in slots cannot be used by {func}")
        return args[1]._grouped(func, args[0], (kwargs or {})["offs"])

    def _grouped(self, func: Callable[..., Any], x: Any, ends: Any) -> Any:
        """Rows of x, sorted by experts, times the experts; `ends` [experts] is the row behind those of each."""
        if self._pool.device.type == "cpu":  # as PyTorch does it, without experts that have no rows
            out, start = x.new_empty(len(x), self._pool.shape[2]), 0
            for expert, end in enumerate(ends.tolist()):
                if end > start:
                    torch.mm(x[start:end], self[expert], out=out[start:end])
                start = end
            return out
        return by_slots(func, x, ends, self._pool, self._table)


def by_slots(func: Callable[..., Any], x: Any, ends: Any, pool: Any, table: Any) -> Any:
    """`Slots._grouped` on a device: one call of `func`, with the rows sorted by slots."""
    counts = torch.diff(ends, prepend=ends.new_zeros(1))
    in_slots = ends.new_zeros(len(pool)).index_add_(0, table.clamp(min=0), counts)
    order = torch.argsort(torch.repeat_interleave(table, counts, output_size=len(x)), stable=True)
    found = func(x[order], pool, offs=in_slots.cumsum(0, dtype=torch.int32))
    return torch.empty_like(found).index_copy_(0, order, found)


class CardPools:
    """See `edgespec.weights.tiered_memory.Devices`."""

    def __init__(self, experts: Sequence[Experts], pools: Sequence[Pool], where: Sequence[Any]) -> None:
        self.places: dict[int, DevicePlace] = {}
        for pool in pools:
            first = experts[pool.layers[0]]
            residents = Residents(len(pool.layers), first.layer.count, pool.slots)
            device = where[pool.layers[0]]
            weights = [torch.empty((pool.slots, *form.shape), dtype=form.dtype, device=device) for form in first.forms]
            self.places |= {one: DevicePlace(residents, row, tuple(weights)) for row, one in enumerate(pool.layers)}

    def upload(self, weight: Any, source: int, offset: int, size: int) -> None:
        """The device does whatever comes later after the copy; so `_bring` of a later layer waits for it."""
        here = torch.frombuffer((ctypes.c_char * size).from_address(source), dtype=torch.uint8)
        weight.view(-1).view(torch.uint8)[offset : offset + size].copy_(here, non_blocking=True)

    def close(self) -> None:
        self.places = {}


class Mixture:
    """
    Attributes:
        memory: slots of experts.
    """

    def __init__(
        self,
        model: Any,
        folder: ExpertFolder,
        plan: Plan,
        where: Sequence[Any],
        about: dict[str, Any] | None,
        progress: Progress,
    ) -> None:
        """Let a model use experts in slots; those of layers whose experts all have room are read now.

        Args:
            model: without experts.
            folder: with them.
            plan: with their pools.
            where: the device that computes each layer with experts.
            about: key of the remembered scores; None: they are not remembered.
            progress: of reading.

        Raises:
            OSError: a file cannot be opened.
            ModelError: experts cannot be read.
        """
        self._prompt, self._where, self._pinned = False, where, list[Any]()
        given = folder.paths, folder.layers, plan.pools, about, self._reserve
        on_card = CardPools(folder.experts, plan.device_pools, where) if plan.device_pools else None
        self._on_card = on_card.places if on_card else {}
        self._hooks: dict[int, Any] = {}
        self.memory = TieredMemory(on_card, *given) if on_card else ExpertMemory(*given)
        try:
            self.memory.fill(progress)
            for number, one in enumerate(folder.experts):
                self._place(_module(model, one), number, one)
        except BaseException:
            self.close()
            raise

    def _reserve(self, size: int) -> tuple[Any, int]:
        memory, address = own_memory(size)
        host = torch.frombuffer(memory, dtype=torch.uint8)
        if needs_pinning(self._where[0]) and pin_memory(host, self._where[0]):
            self._pinned.append(host)
        return memory, address

    def _place(self, module: Any, number: int, one: Experts) -> None:
        there = self._on_card.get(number)
        table, stay = (
            torch.zeros(one.layer.count, dtype=torch.int64, device=self._where[number]),
            self.memory.stays(number),
        )
        for i, form in enumerate(one.forms):
            slots, memory = self.memory.slots(number), self.memory.memory(number, i)[0]
            count = slots * form.size // form.dtype.itemsize
            pool = torch.frombuffer(memory, dtype=form.dtype, count=count).view(slots, *form.shape)
            weight = Slots(there.weights[i] if there else pool, table)
            # They are no parameters, so nothing moves or counts them as weights of the model.
            vars(module)[form.name] = weight if there or stay is None else pool[int(stay[0]) :][: len(stay)]
        if there or stay is None:
            self._hooks[number] = module.register_forward_pre_hook(partial(self._bring, number, table))

    def _bring(self, number: int, table: Any, module: Any, args: Sequence[Any]) -> None:
        chosen = args[1].flatten(0, -2).cpu().numpy()
        slots = self.memory.choose(number, chosen, chosen if self._prompt else None)
        self.memory.wait(number)
        table.copy_(torch.from_numpy(slots))
        there = self._on_card.get(number)
        if there and len(there.weights[0]) >= there.residents.scores.size and (slots >= 0).all():
            self._hooks[number].remove()  # they stay

    @contextmanager
    def reading(self, *, prompt: bool) -> Iterator[None]:
        """During a pass.

        Raises:
            ModelError: the model cannot be read.
        """
        self._prompt = prompt
        self.memory.begin()
        try:
            yield
        finally:
            self.memory.finish()

    def close(self) -> None:
        for device in dict.fromkeys(self._where):
            finish(device)  # it may copy from pools
        self.memory.close()
        for host in self._pinned:
            unpin_memory(host, self._where[0])
        self._pinned = []
