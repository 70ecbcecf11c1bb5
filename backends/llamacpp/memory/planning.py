"""Plans for llama.cpp models larger than memory.

`plan_memory` has llama.cpp size its buffers without allocation, and `edgespec/weights/plan.py` chooses the weights that
stay. `start_streaming` starts a `Streamer` for the others; `layer_hooks.py` keeps it in step with a pass.
"""

import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from edgespec.errors import ModelError, NoRoom, UsageError
from edgespec.loop.engines import Machine
from edgespec.machine.disk import USUAL, recall_reading
from edgespec.machine.memory import (
    COMPRESSING_FILE_SYSTEMS,
    NETWORK_FILE_SYSTEMS,
    file_system,
    format_size,
    in_bytes,
    private_memory,
)
from edgespec.machine.system import HUGE
from edgespec.models.gguf_header import own_values
from edgespec.weights.experts import ExpertLayer, find_experts, memory_of, most_slots
from edgespec.weights.linux import Mapping, mappings
from edgespec.weights.plan import EXPERTS, MARGIN, SAFETY, Plan, Tensor, count_layers, layer_of, make_plan
from edgespec.weights.preload import Progress
from edgespec.weights.ring import Streamer, measure_disk, moves_memory, open_store, supported

from ..context import ContextSize
from ..ggml.files import (
    file_size,
    last_log,
    llama_cpp,
    load_header,
    parts,
    read_tensors,
    size_lines,
)
from ..lending.rpc import choose_lent, memory_of_lenders
from .gpu import auto_layers, check_spans, devices, experts_too_large

MIN_NODES = 512  # llama.cpp's default for n_ubatch; the smallest number of prompt tokens per pass
CHUNKS = (128, 256, 512, 1024, 2048, 4096)  # prompt tokens per pass, where each pass reads weights again
SHARE = 1 / 4  # of a context, for each further session where memory is short
CHUNK_SHARE = 1 / 32  # maximum relative increase of streamed bytes by the buffers of larger chunks
BESIDE_POOLS = 1 / 32  # of memory, with a MARGIN, for pages of libraries and page tables
ROOM_FOR_BUFFERS = 2 << 30


def plan_memory(
    path: str,
    size: ContextSize,
    *,
    machine: Machine,
    memory: int | None = None,
    beside: Sequence[str] = (),
    gpu_layers: int = 0,
    lent: bool = False,
    experts_here: bool = False,
) -> tuple[Plan | None, ContextSize, list[str]]:
    """A plan of a model's weights (None: all stay in memory), its context, and messages for the user.

    Args:
        path: of the model.
        size: of the requested context.
        machine: to plan for.
        memory: bytes for the program and `beside`; None: the free memory.
        beside: files of models that will be loaded, too.
        gpu_layers: as in `LoadOptions`.
        lent: lenders have these layers instead of a GPU.
        experts_here: as `keeps_experts` returns it.

    Raises:
        ModelError: the model cannot be read.
        UsageError: the memory is too small.
    """
    found = machine.free
    room = _room(memory, machine)
    if not supported():
        note = "streaming weights works on Linux and macOS; here the system's own paging does what it can"
        return None, size, [note] if memory is not None or _file_sizes(path, *beside) > found else []
    tensors = all_tensors(path)
    count = count_layers(tensors)
    layers = [] if lent and gpu_layers else find_layers(path, tensors)
    # The GPU gets the last layers and the output; a Mac's GPU keeps them in the planned memory.
    on_gpu = count if gpu_layers < 0 else min(count, max(0, gpu_layers - 1))
    gpu: dict[str, Any] = {"kept": on_gpu} if machine.platform == "darwin" and not lent else {"on_device": on_gpu}
    gpu |= {"experts_here": experts_here, "output_here": lent}
    sizes = [replace(size, chunk=n) for n in CHUNKS if n >= min(size.chunk, size.sessions * (size.budget + 1))]
    beside_it = sum(_weights_and_buffers(other, size) for other in beside)
    needs = [beside_it + needed for needed in _rehearse(path, sizes)]
    plans = _plans(tensors, room, needs, gpu, layers)
    # Each chunk of a prompt reads the streamed weights, so large chunks are better, but their buffers use memory.
    most = _bytes_read(plans[0]) * (1 + CHUNK_SHARE)
    best = max(i for i, plan in enumerate(plans) if _bytes_read(plan) <= most)
    if not most:
        best = min(best, sizes.index(size))
    plan = plans[best]
    notes = []
    if memory is not None and memory > found:
        notes.append(f"{format_size(memory)} of memory are asked for, but only {format_size(found)} are free")
    if plan is None:
        return None, sizes[best], notes
    plan = replace(plan, draft_bytes=beside_it)
    if machine.platform == "darwin" and not lent:
        check_spans(plan, tensors, gpu_layers)
    kind = file_system(path)
    if kind in NETWORK_FILE_SYSTEMS:
        notes.append(f"{path} lies on a network file system ({kind}): streaming goes at the speed of the network")
    elif kind in COMPRESSING_FILE_SYSTEMS:
        notes.append(f"{path} lies on {kind}, which may compress: reading costs processor time, and may be slow")
    return plan, sizes[best], notes


def all_tensors(path: str) -> list[Tensor]:
    return [tensor for number, part in enumerate(parts(path)) for tensor in read_tensors(part, number)]


def find_layers(path: str, tensors: Sequence[Tensor]) -> list[ExpertLayer]:
    if not any(EXPERTS.search(tensor.name) for tensor in tensors) or not moves_memory():
        return []
    values = own_values(path)
    # The last layers of some models predict further tokens (MTP), and are not computed.
    computed = count_layers(tensors) - int(values.get("nextn_predict_layers", 0))
    return find_experts(
        [tensor for tensor in tensors if layer_of(tensor) < computed], int(values.get("expert_count", 0))
    )


def keeps_experts(path: str, gpu_layers: int, size: ContextSize) -> bool:
    found = devices() if gpu_layers else []
    tensors = all_tensors(path) if found else []
    if not any(EXPERTS.search(tensor.name) for tensor in tensors):
        return False
    return experts_too_large(found, tensors, gpu_layers, _buffers(path, size))


def choose_gpu_layers(
    path: str, size: ContextSize, *, machine: Machine, memory: int | None, beside: Sequence[str], resident: bool,
    gpu_memory: int | str | None = None, borrowed: Any = None,
) -> int:  # fmt: skip
    """Default of `gpu_layers`, for GPUs or lenders; arguments and errors as for `plan_memory`."""
    if borrowed:
        tensors, needed = all_tensors(path), memory_needs(path, size, beside)
        buffers = needed - private_memory() - MARGIN
        return choose_lent(
            tensors, _room(memory, machine), needed, buffers, memory_of_lenders(borrowed), len(borrowed) - 1
        )
    most = in_bytes(gpu_memory)
    found = devices()
    if most is not None:
        found = [replace(device, free=min(device.free, max(0, most - device.used))) for device in found]
    if not found:
        if most is None:
            return 0
        raise UsageError(
            "gpu_memory is given, but this llama.cpp has no GPU: leave it out, or install a build that has"
        )
    tensors = all_tensors(path)
    room = _room(memory, machine)
    buffers = _buffers(path, size)
    beside_it = sum(_weights_and_buffers(other, size) for other in beside)
    needed = private_memory() + MARGIN + buffers + beside_it

    def plan(kept: int) -> Plan | None:
        return None if resident else make_plan(tensors, room, needed, kept=kept)

    layers = auto_layers(found, tensors, buffers, beside_it, plan, platform=machine.platform)
    # The GPU gets no layers if experts are read from disk: that combination is not measured.
    try:
        from_disk = layers > 0 and bool(find_layers(path, tensors)) and plan(0) is not None
    except NoRoom:
        from_disk = False
    return 0 if from_disk else layers


def _plans(
    tensors: Sequence[Tensor], room: int, needs: Sequence[int], gpu: dict[str, Any], layers: Sequence[ExpertLayer]
) -> list[Plan | None]:
    """Plans for ascending `needs`, up to the last that is possible.

    Raises:
        UsageError: the first is impossible.
    """
    plans = [_plan(tensors, room, needs[0], gpu, layers)]
    with suppress(UsageError):
        for needed in needs[1:]:
            plans.append(_plan(tensors, room, needed, gpu, layers))
    return plans


def _plan(
    tensors: Sequence[Tensor], room: int, needed: int, gpu: dict[str, Any], layers: Sequence[ExpertLayer]
) -> Plan | None:
    """A plan with slots for experts in the memory that is left.

    If a GPU has layers, and memory cannot hold the experts of the others, all experts stay on the CPU.
    """
    beside = beside_pools(room)
    least = memory_of(layers, 0) + beside if layers else 0
    if layers and gpu.get("on_device"):
        if make_plan(tensors, room, needed, **gpu) is None:
            return None
        gpu = gpu | {"experts_here": True}
    plan = make_plan(tensors, room, needed, experts_at_once=least, **gpu)
    if plan is None or not layers:
        return plan
    left = room - needed - plan.pinned_bytes - plan.slots * plan.slot_bytes - beside
    # Linux locks whole pages of the page cache, of up to 2 MiB.
    slots = max(0, most_slots(layers, left - HUGE * len(plan.pinned)))
    return replace(plan, experts=layers[0].count, slots_of_experts=slots, pool_bytes=memory_of(layers, slots))


def beside_pools(room: int) -> int:
    return MARGIN + int(room * BESIDE_POOLS)


def _bytes_read(plan: Plan | None) -> int:
    if plan is None:
        return 0
    missing = 1 - plan.slots_of_experts / plan.experts if plan.slots_of_experts >= 0 else 0
    return plan.streamed_bytes + int(missing * plan.cached_bytes)


def memory_needs(path: str, size: ContextSize, beside: Sequence[str] = ()) -> int:
    return sum(_weights_and_buffers(other, size) for other in beside) + _rehearse(path, [size])[0]


def is_plenty(path: str, memory: int | None, beside: Sequence[str], machine: Machine) -> bool:
    return memory is None and 2 * _file_sizes(path, *beside) + ROOM_FOR_BUFFERS < machine.free


def _room(memory: int | None, machine: Machine) -> int:
    return memory if memory is not None else int(machine.free * (1 - SAFETY))


def _file_sizes(*paths: str) -> int:
    return sum(file_size(path) for path in paths if Path(path).is_file())


def _weights_and_buffers(path: str, size: ContextSize) -> int:
    weights = sum(tensor.size for part in parts(path) for tensor in read_tensors(part))
    before = private_memory() + MARGIN
    return weights + _rehearse(path, [replace(size, share=1.0)])[0] - before


def _buffers(path: str, size: ContextSize) -> int:
    return _rehearse(path, [size])[0] - private_memory() - MARGIN


def _rehearse(path: str, sizes: Sequence[ContextSize]) -> list[int]:
    """Bytes of this program with a model's tokenizer, caches and buffers, but without its weights, for each size.

    llama.cpp reports the sizes in its log, without allocating caches and buffers.
    """
    model = load_header(path)
    needed = []
    try:
        private = private_memory() + MARGIN
        for size in sizes:
            size_lines.clear()
            context = llama_cpp.llama_init_from_model(model, size.params(model))
            if not context:
                raise ModelError(f"{path}: no context of {size.context_length} tokens can be made: {last_log()}")
            llama_cpp.llama_free(context)
            # "llama_kv_cache: size = 126.00 MiB (" is the total; "KV buffer size = " is zero without allocation.
            kinds = r"(?:cache: |recurrent: |(?:compute|output) buffer )size = +([\d.]+) MiB"
            found = [re.search(kinds, line) for line in size_lines]
            needed.append(private + int(sum(float(match[1]) for match in found if match) * (1 << 20)))
        return needed
    finally:
        llama_cpp.llama_model_free(model)


def start_streaming(path: str, plan: Plan, known: set[int], progress: Progress) -> tuple[Streamer, float, str]:
    """Pin weights of a newly loaded model, and start to stream the others.

    Args:
        path: of the model; for a split one its first file.
        plan: of its weights.
        known: start addresses of mappings that existed before the load.
        progress: called while pinned weights are read.

    Returns:
        The streamer, the disk's bytes per second (0: nothing is streamed), and a note on pinned weights.

    Raises:
        ModelError: the model cannot be read or mapped.
    """
    files = parts(path)
    mapped = list[Mapping]()
    if sys.platform == "linux":
        for part in files:
            new = [mapping for mapping in mappings(part) if mapping.start not in known]
            if not new:
                raise ModelError(f"{part}: llama.cpp has not mapped it, so it cannot be streamed")
            # Another streamed model of the same file may add smaller mappings meanwhile.
            mapped.append(max(new, key=lambda mapping: mapping.stop - mapping.start))
    try:
        store = open_store(files, mapped, plan)
        try:
            store.drop([extent for layer in plan.streamed for extent in layer.extents])
            if plan.slots_of_experts >= 0:
                store.drop(plan.cached)
            store.look_up(plan.looked_up)
            store.preload(plan.pinned, progress)
            speed = measure_disk(files, plan)
            how = recall_reading(files[plan.streamed[0].extents[0].file]) if plan.streamed else USUAL
            return Streamer(plan, store, how.threads, how.size), speed, store.note
        except BaseException:
            store.close()
            raise
    except OSError as error:
        raise ModelError(f"{path}: cannot be streamed: {error}") from error
