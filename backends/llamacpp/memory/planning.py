"""Plans for llama.cpp models larger than memory.

llama.cpp computes the sizes of its buffers without allocation, and `edgespec/weights/plan.py` chooses the weights that
stay. A `Streamer` reads the others; `layer_hooks.py` keeps it in step with a pass.
"""

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from edgespec.errors import ModelError, NoRoom, UsageError, failing_as, undone
from edgespec.loop.engines import LoadOptions, Machine, Progress
from edgespec.loop.shapes import TILE
from edgespec.machine import memory as process
from edgespec.machine.disk import COMPRESSING_FILE_SYSTEMS, NETWORK_FILE_SYSTEMS
from edgespec.machine.memory import format_size, in_bytes
from edgespec.machine.system import HUGE
from edgespec.machine.this_machine import Gpu
from edgespec.models.gguf_header import own_header, own_values, whole_number
from edgespec.models.heads import is_head
from edgespec.weights.experts import (
    ExpertLayer,
    device_pools,
    find_experts,
    memory_of,
    most_pools,
    most_slots,
    pools_of,
    with_pools,
)
from edgespec.weights.linux import mappings
from edgespec.weights.open_files import Store
from edgespec.weights.plan import (
    EXPERTS,
    MARGIN,
    PER_LAYER_ROWS,
    POSITIONS,
    SAFETY,
    Mapping,
    Plan,
    Pool,
    Tensor,
    count_layers,
    divide,
    layer_of,
    layers_of_gpus,
    layers_on_gpu,
    make_plan,
)
from edgespec.weights.ring import CANNOT_STREAM, Streamer, can_stream, measure_disk, open_store

from ..context import ContextSize, make_context, of_head
from ..ggml.files import (
    all_tensors,
    file_size,
    llama_cpp,
    load_header,
    loaded_tensors,
    parts,
    size_lines,
)
from ..ggml.skeleton import skeleton_tensors
from ..head_files import find_head, starts_from
from ..lending.rpc import choose_lent, memory_of_lenders
from .gpu import (
    MORE,
    Buffers,
    auto_layers,
    experts_too_large,
    kept_off,
    largest_copy,
    room_beside,
    room_on,
    shared_bytes,
)
from .own_memory import OwnMemory

MIN_NODES = 512  # prompt tokens per pass, if all weights are in memory; llama.cpp's default for n_ubatch
CHUNKS = (128, 256, 512, 1024, 2048, 4096)  # prompt tokens per pass, where each pass reads weights again
SHARE = 1 / 4  # of a context, for each session after the first where memory is short
CHUNK_SHARE = 1 / 32  # maximum relative increase of streamed bytes by the buffers of larger chunks
CHUNK_SHARE_OF_EXPERTS = 1 / 128  # the same where experts are read: pools lose more than their share
RESERVED_SHARE = 1 / 32  # of memory, with a MARGIN, for pages of libraries and page tables
ROOM_FOR_BUFFERS = 2 << 30
DOUBT = MARGIN // 2  # bytes by which two measurements of a tokenizer may differ
OWN: dict[str, Any] = {"page": 1, "whole": True}  # of plans for `OwnMemory`, to which whole weights are read
# Bytes in llama-kv-cells.h, as measured: of a cell, and of a node of `used` or, for each sequence id, of `seq_pos`.
CELL, TAG = 48, 48
OUTPUTS, OUTPUT_OF_HEAD = ("output.weight", "token_embd.weight"), ".shared_head_head.weight"  # the first one computes


class MemoryPlanner:
    """Plans the places of a model's weights on a machine, and the model's context.

    Args:
        path: of the model.
        options: as requested, with the draft models that will be loaded too.
        machine: to plan for.
        borrowed: as from `lending.rpc.borrow`, or None.

    Raises:
        ModelError: the model cannot be read (all methods).
        UsageError: an option is out of range (all methods).
    """

    def __init__(self, path: str, options: LoadOptions, machine: Machine, borrowed: Any = None) -> None:
        self.path, self.options, self.machine, self.borrowed = path, options, machine, borrowed
        self.memory = in_bytes("memory", options.memory)
        self.room = self.memory if self.memory is not None else int(machine.free * (1 - SAFETY))
        self.left = machine.free - machine.used  # bytes that this program may still take
        most = in_bytes("gpu_memory", options.gpu_memory)
        self.gpus = [  # with what this program may take of them; 0 layers that were asked for take nothing
            gpu if most is None else replace(gpu, free=min(gpu.free, max(0, most - gpu.used)))
            for gpu in machine.gpus
            if options.gpu_layers != 0
        ]
        self._tokenizers: dict[str, int] = {}  # measured once, because a later load may reuse freed memory
        self._buffers: dict[tuple[str, ContextSize], Buffers] = {}

    @cached_property
    def tensors(self) -> list[Tensor]:
        return all_tensors(self.path) if self.options.own_head else loaded_tensors(self.path)

    @cached_property
    def context_length(self) -> int:
        """As asked for, but at most the learned positions: llama.cpp ends the process beyond them."""
        asked = self.options.context_length
        if not any(tensor.name == POSITIONS for tensor in self.tensors):
            return asked
        return min(asked, whole_number(self.path, own_values(self.path), "context_length", 1, 1 << 31))

    @cached_property
    def head_layers(self) -> int:
        """Last layers of the model that are a head, and stay in memory."""
        return int(own_values(self.path).get("nextn_predict_layers", 0)) if self.options.own_head else 0

    @cached_property
    def file_sizes(self) -> int:
        return sum(file_size(path) for path in (self.path, *self.options.draft_files) if Path(path).is_file())

    def plenty(self, size: ContextSize, *, caches_here: bool = False) -> bool:
        """True if the model and its drafts fit twice into free memory, and their caches and buffers, too.

        Args:
            size: of the context.
            caches_here: this memory holds the caches of GPUs' layers, too.
        """
        weights = 2 * self.file_sizes
        if self.memory is not None or weights + ROOM_FOR_BUFFERS >= self.left:
            return False
        if not caches_here and not all(gpu.shared for gpu in self.gpus):
            return True  # a GPU's own memory holds the caches of its layers
        try:
            return weights + self.needs([size])[0] + self._drafts(size) <= self.room
        except NoRoom:
            return False

    def check_buffers(self, size: ContextSize) -> None:
        """
        Raises:
            NoRoom: caches and buffers do not fit.
        """
        needed = self._rehearse(self.path, [size])[0].total
        if needed > self.left:
            length = size.context_length or own_values(self.path)["context_length"]
            raise NoRoom(
                f"{self.path}: a context of {length} tokens needs {format_size(needed, up=True)} of "
                f"memory, but {format_size(self.left)} are free"
            )

    def _rehearse(self, path: str, sizes: Sequence[ContextSize], target: str = "") -> list[Buffers]:
        if new := [size for size in sizes if (path, size) not in self._buffers]:
            tokenizer, buffers = rehearse(path, new, self.left, target)
            self._tokenizers.setdefault(path, tokenizer)
            self._buffers |= {(path, size): found for size, found in zip(new, buffers, strict=True)}
        return [self._buffers[path, size] for size in sizes]

    def _drafts(self, size: ContextSize) -> int:
        total, each = 0, self.options.draft_sessions
        for path in self.options.draft_files:
            head, whole = is_head(path), replace(size, share=1.0, sessions=each * size.sessions, each=each)
            if head:
                total += states_bytes(path, size)
            [buffers] = self._rehearse(path, [of_head(whole) if head else whole], self.path if head else "")
            tensors = all_tensors(path) if head else loaded_tensors(path)
            weights = sum(tensor.size for tensor in tensors if tensor.name != PER_LAYER_ROWS)
            total += weights + self._tokenizers[path] + buffers.total
        if self.options.own_head:
            [buffers] = self._rehearse(self.path, [of_head(replace(size, share=1.0))])
            total += buffers.total + states_bytes(self.path, size)
        return total

    def _draft_reads(self) -> int:
        """Bytes of weights that a pass of the draft reads, with the target's output if a head has none."""
        first, total = count_layers(self.tensors) - self.head_layers, 0
        found = [(path, all_tensors(path)) for path in self.options.draft_files]
        found += [(self.path, [one for one in self.tensors if layer_of(one) >= first])] if self.head_layers else []
        for path, tensors in found:
            total += _active_bytes(path, tensors)
            if not any(one.name in OUTPUTS or one.name.endswith(OUTPUT_OF_HEAD) for one in tensors):
                total += next((one.size for name in OUTPUTS for one in self.tensors if one.name == name), 0)
        return total

    def needs(self, sizes: Sequence[ContextSize], gpu_layers: int = 0, streams: bool = True) -> list[int]:
        """
        Args:
            sizes: of contexts.
            gpu_layers: as in `LoadOptions`.
            streams: the plan streams layers, so a GPU copies no weights.

        Returns:
            Bytes of this memory for all but the model's weights and drafts, for each size.
        """
        buffers = self._rehearse(self.path, sizes)
        fixed = self.machine.used + MARGIN + self._tokenizers[self.path]
        if gpu_layers and (self.borrowed or not all(gpu.shared for gpu in self.gpus)):
            return [fixed + one.total - one.caches_on_gpu(gpu_layers) for one in buffers]
        if gpu_layers <= 0:
            return [fixed + one.total for one in buffers]
        fixed += 0 if streams else largest_copy(self.tensors, True)
        # Two devices compute in this memory.
        return [fixed + one.total + one.compute_on_gpu(gpu_layers) for one in buffers]

    def taken(self, size: ContextSize, gpu_layers: int, weights: Plan | None) -> int:
        """Bytes of this memory that the model takes with its drafts; if it does not fit, all that the program has not.

        Args:
            size: of its context.
            gpu_layers: as in `LoadOptions`.
            weights: its plan.
        """
        fixed = self.machine.used + MARGIN
        if weights:
            return self.room - fixed
        needed = self.needs([size], gpu_layers, streams=False)[0] + self._drafts(size) - fixed
        return needed + weights_here(self.tensors, gpu_layers, self.gpus) + DOUBT

    def choose_gpu_layers(self, size: ContextSize) -> int:
        """Default of `gpu_layers`, for GPUs or lenders."""
        if self.borrowed:
            caches = self._rehearse(self.path, [size])[0].total
            needed = self.needs([size])[0] + self._drafts(size)
            lent = memory_of_lenders(self.borrowed)
            return choose_lent(self.tensors, self.room, needed, caches, lent, len(self.borrowed) - 1)
        if not self.gpus:
            if self.options.gpu_memory is None:
                return 0
            raise UsageError(
                "gpu_memory is given, but this llama.cpp has no GPU: leave it out, or install a build that has"
            )
        drafts = self._drafts(size)
        [buffers] = self._rehearse(self.path, [size])

        def plan(kept: int) -> Plan | None:
            best = None
            for streams in () if self.options.resident else (True, False)[: 1 + bool(kept)]:
                needed = self.needs([size], kept + 1 if kept else 0, streams)[0] + drafts
                own = OWN if self.machine.platform == "darwin" else {}
                best = make_plan(self.tensors, self.room, needed, head=self.head_layers, **own)
                if best and best.streamed:
                    break
            return best

        def layers_of(tensors: Sequence[Tensor]) -> int:
            return auto_layers(self.gpus, tensors, buffers, drafts, plan, platform=self.machine.platform)

        layers = layers_of(self.tensors)
        try:
            if layers < 0 or not self.find_expert_layers() or plan(0) is None:
                return layers
        except NoRoom:
            return layers
        if self.machine.platform == "darwin" or all(gpu.shared for gpu in self.gpus):
            with suppress(NoRoom):
                if self.gpus[0].pools and (best := self.plan_memory(size, -1, False)[0]) and best.on_devices:
                    return -1
            return 0  # the processor computes experts that are read from disk
        with suppress(NoRoom):
            on_gpu = layers_on_gpu(layers, count_layers(self.tensors))
            if not make_plan(self.tensors, self.room, self.needs([size], layers)[0] + drafts, on_device=on_gpu):
                return layers
        # The others come first; pools of experts get the rest of the GPU's memory.
        return layers_of([tensor for tensor in self.tensors if not EXPERTS.search(tensor.name)])

    def keeps_experts(self, gpu_layers: int, size: ContextSize) -> bool:
        """True if GPUs cannot hold the experts of these layers."""
        if self.borrowed or not gpu_layers or not self.gpus:
            return False
        if not any(EXPERTS.search(tensor.name) for tensor in self.tensors):
            return False
        [buffers] = self._rehearse(self.path, [size])
        return experts_too_large(self.gpus, self.tensors, gpu_layers, buffers)

    def hold_copies(self, size: ContextSize) -> bool:
        """True if GPUs without layers have room for the weights that they copy for long passes (`op_offload`)."""
        [buffers] = self._rehearse(self.path, [size])
        return largest_copy(self.tensors, True) <= room_beside(self._drafts(size), room_on(self.gpus, buffers))

    def _sizes_on_gpu(self, sizes: Sequence[ContextSize], gpu_layers: int, weights: int, drafts: int) -> int:
        """
        Returns:
            How many of these ascending sizes have buffers for which GPUs have room; at least 1.
        """
        if not gpu_layers or self.borrowed or not self.gpus:
            return len(sizes)
        buffers = self._rehearse(self.path, sizes)
        rooms = [room_on(self.gpus, one) - one.caches_on_gpu(gpu_layers) for one in buffers]
        return max(1, sum(weights <= room_beside(drafts, room) for room in rooms))

    def _with_device_pools(
        self, plan: Plan, size: ContextSize, gpu_layers: int, layers: Sequence[ExpertLayer], drafts: int
    ) -> Plan:
        """A plan with pools on GPUs, in the memory that other weights, caches and buffers leave there."""
        own, found = [gpu for gpu in self.gpus if not gpu.shared], list[Pool]()
        [buffers], count = self._rehearse(self.path, [size]), count_layers(self.tensors)
        if not own:
            return self._with_shared_pools(plan, buffers, gpu_layers, layers, drafts)
        _, dense = divide(self.tensors, gpu_layers, (EXPERTS.pattern.encode(),))
        drafts = drafts // len(own) if drafts <= room_on(own, buffers) // 2 else 0
        stop, last = count - layers_on_gpu(gpu_layers, count), own[-1]
        for gpu, (some, name) in zip(own, layers_of_gpus(own, gpu_layers, count), strict=True):
            first, stop = stop, stop + some
            sizes = [t.size for t in dense if first <= layer_of(t) < stop or (layer_of(t) < 0 and gpu is last)]
            room = room_on([gpu], buffers) - sum(sizes) - sum(buffers.caches[first:stop]) - drafts
            numbers = [number for number, layer in enumerate(layers) if first <= layer.index < stop]
            found += device_pools(layers, numbers, room, name)
        return replace(plan, device_pools=tuple(found))

    def _with_shared_pools(
        self, plan: Plan, buffers: Buffers, gpu_layers: int, layers: Sequence[ExpertLayer], drafts: int
    ) -> Plan:
        """A plan whose pools a Mac's GPU computes in, if that was tried, and it can hold as many experts."""
        [gpu, *_], count = self.gpus, count_layers(self.tensors)
        if self.machine.platform != "darwin" or not gpu.pools:
            return plan
        first = count - layers_on_gpu(gpu_layers, count)
        some = [replace(layer, device=gpu.name) if layer.index >= first else layer for layer in layers]
        room = room_beside(drafts, room_on([gpu], buffers) - shared_bytes(self.tensors, gpu_layers, plan))
        room -= buffers.caches_on_gpu(gpu_layers)
        pools = most_pools(some, min(room, plan.pool_bytes))
        found = replace(plan, pools=pools, pool_bytes=memory_of(some, pools))
        return found if pools and found.read_bytes <= plan.read_bytes * (1 + MORE) else plan

    def find_expert_layers(self) -> list[ExpertLayer]:
        tensors = loaded_tensors(self.path) if self.options.own_head else self.tensors
        return find_expert_layers(self.path, tensors)

    def plan_memory(
        self, size: ContextSize, gpu_layers: int, experts_here: bool
    ) -> tuple[Plan | None, ContextSize, list[str]]:
        """
        Args:
            size: of the requested context.
            gpu_layers: as in `LoadOptions`, for GPUs or lenders.
            experts_here: as from `keeps_experts`.

        Returns:
            A plan of the weights (None: all stay in memory), the context's size, and messages for the user.
        """
        free, lent = self.machine.free, bool(self.borrowed)
        paging = None, size, [CANNOT_STREAM] if self.memory is not None or self.file_sizes > self.left else []
        if not (can_stream(self.machine) or self.find_expert_layers()):
            return paging
        count = count_layers(self.tensors)
        layers = [] if lent and gpu_layers else self.find_expert_layers()
        # The GPU gets the last layers and the output; a Mac's GPU keeps them in the planned memory.
        on_gpu = layers_on_gpu(gpu_layers, count)
        shares = self.machine.platform == "darwin" and not lent
        gpu: dict[str, Any] = {"head": self.head_layers, "on_device": 0 if shares else on_gpu}
        # A Mac's GPU would map experts between its weights, so a skeleton has these in another order.
        hollow = shares and gpu_layers != 0 and bool(layers)
        tensors = skeleton_tensors(self.path, layers, self.tensors) if hollow else self.tensors
        experts_here |= hollow
        gpu |= {"experts_here": experts_here, "output_here": lent} | ({"kept": count} if hollow else {})
        if self.machine.platform == "darwin" and not hollow:
            gpu |= OWN
        sizes = [replace(size, chunk=n) for n in CHUNKS if n >= min(size.chunk, size.sessions * (size.budget + 1))]
        drafts = self._drafts(size)
        used = whole_number(self.path, own_values(self.path), "expert_used_count", 1, 1 << 16) if layers else 0
        # Bytes in which a kernel sorts the numbers of a row's chosen experts (`mmid_row_mapping` in ggml-cpu.c).
        work = 8 * most_slots(layers) * used if layers else 0

        def planned(sizes: Sequence[ContextSize]) -> list[Plan | None]:
            """Of ascending sizes, up to the last that is possible; raises UsageError if the first is impossible."""
            for streams in (True, False)[: 1 + (gpu_layers > 0)]:
                needs = [drafts + one for one in self.needs(sizes, gpu_layers, streams)]
                plans = [_plan(tensors, self.room, needs[0], work * sizes[0].max_nodes, gpu, layers)]
                with suppress(UsageError):
                    for needed, one in zip(needs[1:], sizes[1:], strict=True):
                        plans.append(_plan(tensors, self.room, needed, work * one.max_nodes, gpu, layers))
                if gpu_layers and self.gpus and not lent:
                    plans = [
                        self._with_device_pools(plan, one, gpu_layers, layers, drafts) if plan and plan.pools else plan
                        for plan, one in zip(plans, sizes, strict=False)
                    ]
                if plans[0] and plans[0].streamed:
                    break
            return plans

        weights = 0
        if shares and gpu_layers:
            with suppress(NoRoom):
                weights = shared_bytes(tensors, gpu_layers, planned(sizes[:1])[0])
        else:
            patterns = kept_off(None, gpu_layers, count, experts_here, platform=self.machine.platform)
            weights = sum(one.size for one in divide(tensors, gpu_layers, patterns)[1])
        # Where nothing is read, no larger chunk than asked for gains anything; contexts of six sizes take seconds.
        asked = [one for one in sizes if one.chunk <= size.chunk]
        asked = asked[: self._sizes_on_gpu(asked, gpu_layers, weights, drafts)][-1:]
        with suppress(UsageError):
            sizes = asked if asked and planned(asked) == [None] else sizes
        sizes = sizes[: self._sizes_on_gpu(sizes, gpu_layers, weights, drafts)]
        try:
            plans = planned(sizes)
        except NoRoom:
            if can_stream(self.machine):
                raise
            return paging
        # Each chunk of a prompt reads the streamed weights, so large chunks are better, but their buffers use memory.
        share = CHUNK_SHARE_OF_EXPERTS if plans[0] and plans[0].pools else CHUNK_SHARE
        most = (plans[0].read_bytes if plans[0] else 0) * (1 + share)
        best = max(i for i, plan in enumerate(plans) if plan is None or plan.read_bytes <= most)
        if not most:
            best = min(best, max(i for i, one in enumerate(sizes) if i == 0 or one.chunk <= size.chunk))
        plan, notes = plans[best], list[str]()
        if self.memory is not None and self.memory > free:
            notes.append(f"{format_size(self.memory)} of memory are asked for, but only {format_size(free)} are free")
        if plan is None:
            return None, sizes[best], notes
        if plan.streamed and not can_stream(self.machine):
            return paging
        plan = replace(plan, draft_bytes=drafts, draft_reads=self._draft_reads(), used=used)
        kind = self.machine.file_system
        if kind in NETWORK_FILE_SYSTEMS:
            notes.append(
                f"{self.path} lies on a network file system ({kind}): streaming goes at the speed of the network"
            )
        elif kind in COMPRESSING_FILE_SYSTEMS:
            notes.append(
                f"{self.path} lies on {kind}, which may compress: reading costs processor time, and may be slow"
            )
        return plan, sizes[best], notes


def _active_bytes(path: str, tensors: Sequence[Tensor]) -> int:
    """Bytes of these weights of a file without experts that a token does not use."""
    experts, values = sum(one.size for one in tensors if EXPERTS.search(one.name)), own_values(path)
    count, used = (int(values.get(f"expert_{name}", 0)) for name in ("count", "used_count"))
    return sum(one.size for one in tensors) - experts + experts * used // max(1, count, used)


def find_expert_layers(path: str, tensors: Sequence[Tensor]) -> list[ExpertLayer]:
    if not any(EXPERTS.search(tensor.name) for tensor in tensors):
        return []
    loaded = [tensor for tensor in tensors if tensor.size]
    return find_experts(loaded, int(own_values(path).get("expert_count", 0)))


def _plan(
    tensors: Sequence[Tensor], room: int, needed: int, work: int, gpu: dict[str, Any], layers: Sequence[ExpertLayer]
) -> Plan | None:
    """A plan with pools of experts in the memory that is left.

    If a GPU has layers, and memory cannot hold the experts of the others, all experts stay on the CPU. `work`: bytes
    besides `needed` where there are pools.
    """
    reserve = pool_reserve(room) + work
    least = memory_of(layers, pools_of(layers, 0)) + reserve if layers else 0
    if layers and gpu.get("on_device"):
        if make_plan(tensors, room, needed, **gpu) is None:
            return None
        gpu = gpu | {"experts_here": True}
    plan = make_plan(tensors, room, needed, experts_at_once=least, **gpu)
    if plan is None or not layers:
        return plan
    left = room - needed - plan.pinned_bytes - plan.slots * plan.slot_bytes - reserve
    # Linux locks whole pages of the page cache, of up to 2 MiB.
    return with_pools(plan, layers, left - HUGE * len(plan.pinned))


def pool_reserve(room: int) -> int:
    return MARGIN + int(room * RESERVED_SHARE)


def weights_here(tensors: Sequence[Tensor], gpu_layers: int, gpus: Sequence[Gpu]) -> int:
    """Bytes of weights in this machine's memory: all, but those of layers that GPUs with memory of their own have."""
    shared = all(gpu.shared for gpu in gpus)
    return sum(tensor.size for tensor in (tensors if shared else divide(tensors, gpu_layers)[0]))


def memory_needs(path: str, size: ContextSize, machine: Machine, draft_files: Sequence[str] = ()) -> int:
    """Bytes of the program and of `draft_files`, without the model's weights."""
    planner = MemoryPlanner(path, LoadOptions(draft_files=tuple(draft_files)), machine)
    return planner.needs([size])[0] + planner._drafts(size)


def states_bytes(path: str, size: ContextSize) -> int:
    """Bytes of a target's states for a head, in its passes and after them, of as many rows as a batch may have."""
    values, lengths = own_header(path)
    width = int(values.get("target_hidden_size") or values.get("embedding_length", 0))
    rows = (size.sessions + 1) * (size.max_nodes + TILE)
    return 2 * 4 * rows * width * lengths.get("target_layers", 1)


def rehearse(path: str, sizes: Sequence[ContextSize], free: int, target: str = "") -> tuple[int, list[Buffers]]:
    """
    Args:
        path: of the model.
        sizes: of contexts.
        free: bytes of memory.
        target: path of the model whose head it is, if its file is another.

    Returns:
        Bytes of a model's tokenizer, and its buffers for each size, as llama.cpp logs them without allocation.

    Raises:
        NoRoom: there are more cells than `free` bytes hold, even without their keys and values.
        ModelError: the head is for another target.
    """
    count = count_layers(all_tensors(path))
    before = process.private_memory()
    model = load_header(path, load_mtp=any(size.head for size in sizes))
    tokenizer, buffers = max(0, process.private_memory() - before), list[Buffers]()
    other, of_other = None, None
    try:
        if target:
            other = load_header(target)
            head = find_head(path)
            assert head
            starts_from(head, path, model, target, other)  # llama.cpp would end the process over another target's
            small = ContextSize(TILE, 1, 1, 1).of(other)
            sizes = [replace(size, context_length=size.length(other)) for size in sizes]
            of_other = make_context(target, other, small, small.params(other))
        for size in [size.of(model) for size in sizes]:
            if (least := CELL * size.tokens(model)) > free:
                held = f"{format_size(free)} of memory are" if free >= 1 << 20 else "no memory is free, which is"
                texts = f" for {size.sessions // size.each} texts at once" if size.sessions > size.each else ""
                raise NoRoom(
                    f"{held} too little for a context of {size.length(model)} tokens{texts}: it needs at least "
                    f"{format_size(least, up=True)} besides keys and values"
                )
            size_lines.clear()
            params = size.params(model, of_other)
            llama_cpp.llama_free(make_context(path, model, size, params))
            tags = TAG * (size.tokens(model) + params.n_seq_max * size.length(model))
            buffers.append(_logged_buffers(least + tags, count))
        return tokenizer, buffers
    finally:
        if of_other:
            llama_cpp.llama_free(of_other)
        if other:
            llama_cpp.llama_model_free(other)
        llama_cpp.llama_model_free(model)


def _logged_buffers(cells: int, count: int) -> Buffers:
    """
    Args:
        cells: bytes of all cells without keys and values.
        count: of the model's layers.
    """
    sizes, layers, caches = {"output": float(cells), "compute": 0.0}, list[int](), [0.0] * count
    for line in size_lines:
        if match := re.search(r"layer +(\d+): dev = ", line):
            layers.append(int(match[1]))
        # "llama_kv_cache: size = 126.00 MiB (" is the total; "KV buffer size = " is zero without allocation.
        elif match := re.search(r"(?:(cache|recurrent):|(compute|output) buffer) size = +([\d.]+) MiB", line):
            size = float(match[3]) * (1 << 20)
            if match[2]:
                sizes[match[2]] += size
            for layer in layers if match[1] else ():
                caches[layer] += size / len(layers)
            layers = [] if match[1] else layers
    return Buffers(int(sizes["output"]), int(sizes["compute"]), tuple(map(int, caches)))


def mappings_of(path: str, machine: Machine) -> list[list[Mapping]]:
    """
    Returns:
        This process's mappings of each file of a model; [] on systems whose stores do not need them.
    """
    return [mappings(part) for part in parts(path)] if machine.platform == "linux" else []


def start_streaming(
    path: str,
    plan: Plan,
    machine: Machine,
    before: Sequence[Sequence[Mapping]],
    progress: Progress,
    own: Callable[[Sequence[str]], OwnMemory] | None,
) -> tuple[Streamer, float, Store]:
    """Pin weights of a newly loaded model, and start to stream the others.

    Args:
        path: of the model; for a split one its first file.
        plan: of its weights.
        machine: that was planned for.
        before: `mappings_of` the model before the load.
        progress: called while pinned weights are read.
        own: makes a store of a model's files; None: its pages stay in the mapping.

    Returns:
        The streamer, the disk's bytes per second (0: nothing is streamed), and the store.

    Raises:
        ModelError: the model cannot be read or mapped.
    """
    files = parts(path)
    mapped = list[Mapping]()
    for part, found, known in zip(files, mappings_of(path, machine), before, strict=False):
        new = [mapping for mapping in found if mapping.start not in {one.start for one in known}]
        if not new:
            raise ModelError(f"{part}: llama.cpp has not mapped it, so it cannot be streamed")
        # Another streamed model of the same file may add smaller mappings meanwhile.
        mapped.append(max(new, key=lambda mapping: mapping.stop - mapping.start))
    with failing_as(ModelError, f"{path}: cannot be streamed"):
        store = own(files) if own else open_store(files, mapped, plan, machine)
        with undone(store.close):
            store.drop([extent for layer in plan.streamed for extent in layer.extents])
            if plan.pools:
                store.drop(plan.cached)
            store.look_up(plan.looked_up)
            store.preload(plan.pinned, progress)
            speed = (machine.disk.speed or measure_disk(files, plan)) if plan.streamed else 0.0
            plan = store.plan if isinstance(store, OwnMemory) else plan
            return Streamer(plan, store, machine.disk.threads, machine.disk.size), speed, store
