"""MLX models larger than memory: the places of their weights, and the choice of those that stay.

MLX maps no files, so a tensor stays or is streamed as a whole; of a mixture, chosen experts are read. Both need
weights that MLX uses byte for byte as the files have them. If mlx-lm rebuilds others, it has to convert the folder.
"""

import glob
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from edgespec.errors import ModelError, NoRoom
from edgespec.loop.engines import Machine
from edgespec.machine.memory import format_size
from edgespec.machine.this_machine import Gpu
from edgespec.models.safetensors_header import read_safetensors_header
from edgespec.weights.direct_io import ALIGNED
from edgespec.weights.experts import ExpertLayer, memory_of, pools_of, with_pools
from edgespec.weights.plan import CHEAP, MARGIN, MORE_SLOTS, SAFETY, Plan, Tensor, choose_width, make_plan
from edgespec.weights.wired import CACHE_SHARE, WIRE, WIRED_FROM, WIRED_SHARE, free_memory, gpu_limit

from ..common.expert_files import Experts, is_of
from ..common.recurrent import most_paths, states_of
from .expert_files import CODES, find_experts
from .loading import LazyModel
from .recurrent import is_recurrent, sizes_of
from .tree import Pass, TreeCache

CHUNKS = (128, 256, 512, 1024, 2048)  # prompt tokens per pass, where each pass reads weights again
MIN_NODES = 512  # prompt tokens per pass, if all weights are in memory


@dataclass(frozen=True, slots=True)
class Placed:
    """A weight that MLX uses byte for byte as the file has it.

    Attributes:
        name: within its layer; if `layer` is -1, within the model.
        layer: number of the layer; -1: none, or the weight cannot be streamed.
        tensor: its place in the files.
        dtype: MLX's.
        shape: of the weight.
    """

    name: str
    layer: int
    tensor: Tensor
    dtype: Any
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """
    Attributes:
        paths: of the files.
        bases: byte at which each file's tensors begin; MLX's own writer does not align it.
        placed: weights as the files have them.
        others: weights that mlx-lm changes, as if in a file -1.
        experts: those that can be read as they are chosen, which are in none of the lists above.
        rebuilt: names of those of `others` that are in layers.
    """

    paths: tuple[str, ...]
    bases: tuple[int, ...]
    placed: tuple[Placed, ...]
    others: tuple[Tensor, ...]
    rebuilt: tuple[str, ...]
    experts: tuple[Experts, ...] = ()

    @property
    def tensors(self) -> list[Tensor]:
        return [*(one.tensor for one in self.placed), *self.others, *(t for one in self.experts for t in one.tensors)]

    @property
    def expert_layers(self) -> list[ExpertLayer]:
        return [one.layer for one in self.experts]

    @property
    def size(self) -> int:
        return sum(tensor.size for tensor in self.tensors)


def find_layout(model: Any, folder: Path, *, chosen: bool = True) -> Layout:
    """Compare a model that was loaded lazily with its files.

    Args:
        model: that was loaded.
        folder: with its files.
        chosen: experts may be read as they are chosen.

    Raises:
        ModelError: a file cannot be read or is damaged.
    """
    paths = sorted(glob.glob(str(folder / "model*.safetensors")))
    headers = [read_safetensors_header(Path(path)) for path in paths]
    bases = [header[0].start if header else 0 for header in headers]
    stored = {one.name: (file, one) for file, header in enumerate(headers) for one in header}
    numbers = _layer_numbers(model)
    experts = find_experts(model, lambda path: _layer_of(path, numbers)[0], stored) if chosen else []
    apart = {f"{one.path}.{form.name}" for one in experts for form in one.forms}
    placed, others, rebuilt, elsewhere = list[Placed](), list[Tensor](), list[str](), 0
    for name, array in tree_flatten(model.parameters()):
        if name in apart:
            continue
        layer, rest = _layer_of(name, numbers)
        file, found = stored.get(name, (-1, None))
        if found is None or not is_of(found, CODES.get(array.dtype, ""), array.shape):
            others.append(Tensor(name, -1, elsewhere, array.nbytes))
            elsewhere += array.nbytes + 1  # a gap, so that extents are not joined
            rebuilt += [name] if layer >= 0 else []
            continue
        if layer >= 0 and (found.start - bases[file]) % array.itemsize == 0:
            tensor = Tensor(f"blk.{layer}.{rest}", file, found.start, found.size)
        else:
            layer, rest, tensor = -1, name, Tensor(name, file, found.start, found.size)
        placed.append(Placed(rest, layer, tensor, array.dtype, tuple(array.shape)))
    return Layout(tuple(paths), tuple(bases), tuple(placed), tuple(others), tuple(rebuilt), tuple(experts))


def _layer_numbers(model: Any) -> dict[str, int]:
    numbers = {id(layer): number for number, layer in enumerate(model.layers)}
    return {f"{name}.": numbers[id(module)] for name, module in model.named_modules() if id(module) in numbers}


def _layer_of(name: str, numbers: Mapping[str, int]) -> tuple[int, str]:
    """Number of a weight's layer (-1: none), and its name there."""
    return next(
        ((number, name.removeprefix(prefix)) for prefix, number in numbers.items() if name.startswith(prefix)),
        (-1, name),
    )


@dataclass(frozen=True, slots=True)
class PassSize:
    """
    Attributes:
        context_length, budget, sessions: of `LoadOptions`.
        chunk: prompt tokens per pass.
    """

    context_length: int
    budget: int
    sessions: int
    chunk: int

    @property
    def max_nodes(self) -> int:
        return max(self.chunk, self.budget + 1)

    @property
    def cells(self) -> int:
        return self.context_length + self.max_nodes

    def paths(self, model: Any) -> int:
        """Most paths of a tree; 0: no layer is recurrent."""
        if not is_recurrent(model):
            return 0
        return most_paths(sizes_of(model)[2], parameter_bytes(model), self.budget, self.sessions)

    def states(self, model: Any) -> int:
        """Bytes of all sessions' states."""
        paths = self.paths(model)
        return self.sessions * states_of(paths) * sizes_of(model)[2] if paths else 0


def plan_memory(
    lazy: LazyModel,
    size: PassSize,
    memory: int | None,
    used: int,
    drafts: int,
    machine: Machine,
    widest: int = 0,
    own_layers: bool = False,
) -> tuple[Plan | None, PassSize, Layout, list[str]]:
    """Choose the weights that stay in memory, and the size of a prompt's passes.

    Args:
        lazy: the model.
        size: of sessions and passes; `chunk` and `budget` may be changed.
        memory: bytes for everything; None: what is free.
        used: bytes of this program.
        drafts: bytes of the draft models.
        machine: to plan for.
        widest: of `LoadOptions`.
        own_layers: of `LoadOptions`.

    Returns:
        The plan (None: all weights stay), the size, the layout, and messages for the user.

    Raises:
        NoRoom: the memory is too little.
        ModelError: the memory would do if mlx-lm had converted the folder.
    """
    model, folder = lazy.model, lazy.folder
    found = free_memory(machine)
    room = memory if memory is not None else int(found * (1 - SAFETY))
    notes = []
    if memory is not None and memory > found:
        notes.append(f"{format_size(memory)} of memory are asked for, but only {format_size(found)} are free")
    layout = find_layout(model, folder, chosen=not own_layers)  # whose layers are streamed whole
    cell, item = cell_bytes(model, lazy.windows)
    fixed = used + MARGIN + drafts + freed_buffers(machine.gpus) + size.states(model)

    def needed(one: PassSize) -> int:
        cells = one.sessions * one.cells * cell * (1 + own_layers)  # of at most all layers
        return fixed + cells + work_bytes(lazy.text_config, one, item)

    if layout.size + needed(size) <= room:
        return None, size, layout, notes
    sizes = [replace(size, chunk=chunk) for chunk in sorted({size.chunk, *CHUNKS})]
    try:
        smallest, *larger = [one for one in sizes if one.chunk >= min(size.chunk, size.budget + 1)]
        best, plan = smallest, plan_weights(layout, room, needed(smallest), own_layers)
    except NoRoom as error:
        if not layout.rebuilt:
            raise
        raise ModelError(
            f"{folder}: it does not fit into memory, and cannot be streamed from these files, for mlx-lm rebuilds "
            f"{len(layout.rebuilt)} weights of its layers as it loads them, such as {layout.rebuilt[0]}; write them "
            f"once as MLX needs them: mlx_lm.convert --hf-path {folder} --mlx-path NEW-FOLDER"
        ) from error
    least = plan.read_bytes if plan else 0
    for one in larger:
        try:
            other = plan_weights(layout, room, needed(one), own_layers)
        except NoRoom:
            break
        if other and other.read_bytes <= least * (1 + CHEAP):
            best, plan = one, other
    if plan and not is_recurrent(model):

        def read(width: int) -> int:
            found = plan_weights(layout, room, needed(replace(best, budget=width)), own_layers)
            return found.read_bytes if found else 0

        # On a processor, neither reads nor a prompt's passes become larger.
        most, cheap = (widest, CHEAP) if on_gpu() else (min(widest, best.max_nodes - 1), 0.0)
        best = replace(best, budget=choose_width(best.budget, most, cheap, read))
        plan = plan_weights(layout, room, needed(best), own_layers)
    if plan:
        plan = replace(plan, draft_bytes=drafts, draft_reads=plan.pinned_bytes if own_layers else 0)
    return plan, best, layout, notes


def plan_weights(layout: Layout, room: int, needed: int, own_layers: bool) -> Plan | None:
    most = max(Counter(one.layer for one in layout.placed if one.layer >= 0).values(), default=0)
    needed += MORE_SLOTS * 3 * most * ALIGNED  # reads are of whole pages: an extent takes at most 3 more in a slot
    layers = layout.expert_layers
    least = memory_of(layers, pools_of(layers, 0))
    plan = make_plan(layout.tensors, room, needed, page=1, whole=True, whole_layers=own_layers, experts_at_once=least)
    if plan is None or not layers:
        return plan
    return with_pools(plan, layers, room - needed - plan.pinned_bytes - plan.slots * plan.slot_bytes)


KEPT = 32 << 20  # bytes of freed buffers that MLX keeps on the CPU


def on_gpu() -> bool:
    return bool(mx.default_device() == mx.gpu)


def find_gpus() -> list[Gpu]:
    limit = int(mx.device_info().get("max_recommended_working_set_size", 0))
    used = mx.get_active_memory()
    return [Gpu("gpu", limit > 0, max(0, limit - used), used, limit)] if limit or on_gpu() else []


def freed_buffers(gpus: Sequence[Gpu]) -> int:
    """Bytes of freed buffers that MLX may keep; 0: MLX's own limit, which the CPU lacks."""
    return gpu_limit(gpus) // CACHE_SHARE or (0 if gpus else KEPT)


def set_memory_limits(weights: int, gpus: Sequence[Gpu]) -> list[str]:
    """Bound the freed buffers that MLX keeps; on a Mac, wire large weights in the GPU's memory, if the user wants it.

    Args:
        weights: bytes of the weights that stay in memory.
        gpus: as of a `Machine`.

    Returns:
        Messages for the user.
    """
    size, freed = gpu_limit(gpus), freed_buffers(gpus)
    if freed:
        mx.set_cache_limit(freed)
    if not size or weights <= WIRED_FROM * size:
        return []
    wired = bool(os.environ.get(WIRE))
    if wired:
        mx.set_wired_limit(size)
    taken = f"the weights take {weights / 1e9:.1f} GB, and the GPU can hold {size / 1e9:.1f} GB: passes "
    if weights > WIRED_SHARE * size:
        return [f"{taken}will be slow"]
    return [] if wired else [f"{taken}may be slow; {WIRE}=1 keeps the weights there, but Macs have panicked with that"]


def cell_bytes(model: Any, windows: Sequence[int | None]) -> tuple[int, int]:
    """
    Returns:
        Bytes of one token's keys and values, and of one number of them, by the graph of a pass that is not computed.
        The first is 0 if the model cannot read a tree, which `load` finds later.
    """
    if is_recurrent(model):
        return sizes_of(model)[:2]
    caches = [TreeCache(1, window) for window in windows]
    for cache in caches:
        cache.offset = Pass([-1], 0, 0)
    try:
        model(mx.array([[0]]), cache=caches)
    except (TypeError, ValueError, AttributeError, IndexError, KeyError):
        return 0, 4
    buffers = [buffer for cache in caches for buffer in (cache.keys, cache.values) if buffer is not None]
    return sum(buffer.nbytes for buffer in buffers), max((buffer.itemsize for buffer in buffers), default=4)


def work_bytes(config: Mapping[str, Any], size: PassSize, item: int) -> int:
    """Bytes of intermediate values of the largest pass; tests measure it.

    Args:
        config: of the text model.
        size: of the pass.
        item: bytes of a number.
    """
    width, heads = config.get("hidden_size") or 0, config.get("num_attention_heads") or 1
    widths = [value for name, value in config.items() if name.endswith("intermediate_size") and isinstance(value, int)]
    inner = max([4 * width, *widths])
    states = size.max_nodes * (12 * width + 4 * inner) * item
    # MLX makes all scores if it has no fused kernel for a pass.
    scores = size.max_nodes * size.cells * (1 + 2 * heads * max(4, item))
    logits = (size.budget + 1) * (config.get("vocab_size") or 0) * (item + 4)
    return int(states + scores + logits)


def parameter_bytes(model: Any) -> int:
    return sum(array.nbytes for _, array in tree_flatten(model.parameters()))


def draft_bytes(lazy: LazyModel, size: PassSize) -> int:
    """Bytes of a draft that is loaded with the same options, and stays in memory."""
    cell, item = cell_bytes(lazy.model, lazy.windows)
    caches = size.sessions * size.cells * cell + size.states(lazy.model)
    return parameter_bytes(lazy.model) + caches + work_bytes(lazy.text_config, size, item)
