"""How many layers llama.cpp computes on a GPU where nobody says it: as many as its memory takes.

llama.cpp takes the output and the last layers: `gpu_layers` = n + 1 is n layers; -1 is all, the embedding left out.

A GPU with memory of its own gets what fits there beside caches, buffers and the draft. On a Mac the GPU computes in the
memory that the plan is about, and maps the file from the first to the last of its weights, all of which then stay in
memory. So where layers are streamed, the output is left to the processor (it often lies at the front of the file), and
only so many layers go to the GPU as leave no streamed one in between.

Experts that are read as they are chosen are left to the processor, too, as llama.cpp's --cpu-moe does.
"""

import ctypes
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from edgespec.errors import NoRoom, UsageError
from edgespec.weights.plan import EXPERTS as EXPERT
from edgespec.weights.plan import SAFETY, Extent, Plan, Tensor, count_layers, is_output, layer_of

from ..ggml.files import ggml_library, llama_cpp

OUTPUT, EXPERTS = b"^output", rb"_exps\."  # regular expressions of tensors' names
GPU, SHARED = 1, 2  # ggml_backend_dev_type in ggml-backend.h: with memory of its own, or the host's
RESERVE = 512 << 20  # bytes of each GPU's memory that its libraries take
MORE = 1 / 32  # by this part more may be streamed so that the GPU has more layers


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU, as llama.cpp sees it. Sizes in bytes."""

    name: str
    shared: bool  # it computes in the host's memory
    free: int
    used: int = 0  # by this program

    @property
    def reserve(self) -> int:
        """What its libraries will still take."""
        return max(0, RESERVE - self.used)


_used_by_others: dict[str, int] = {}  # of each GPU's memory when this program first looked


def devices() -> list[Device]:
    if not llama_cpp.llama_supports_gpu_offload():
        return []
    library, found = ggml(), list[Device]()
    for i in range(library.ggml_backend_dev_count()):
        device = library.ggml_backend_dev_get(i)
        kind = library.ggml_backend_dev_type(device)
        if kind in (GPU, SHARED):
            free, total = ctypes.c_size_t(0), ctypes.c_size_t(0)
            library.ggml_backend_dev_memory(device, ctypes.byref(free), ctypes.byref(total))
            name = library.ggml_backend_dev_name(device).decode()
            used = total.value - free.value
            own = max(0, used - _used_by_others.setdefault(name, used))
            found.append(Device(name, kind == SHARED or sys.platform == "darwin", free.value, own))
    return found


@cache
def ggml() -> Any:
    """What llama-cpp-python does not name of libggml."""
    library, pointer, size = ggml_library("ggml"), ctypes.c_void_p, ctypes.c_size_t
    for name, result, arguments in [
        ("ggml_backend_dev_count", size, []),
        ("ggml_backend_dev_get", pointer, [size]),
        ("ggml_backend_dev_type", ctypes.c_int, [pointer]),
        ("ggml_backend_dev_name", ctypes.c_char_p, [pointer]),
        ("ggml_backend_dev_memory", None, [pointer, pointer, pointer]),
        ("ggml_backend_dev_backend_reg", pointer, [pointer]),
        ("ggml_backend_reg_get_proc_address", pointer, [pointer, ctypes.c_char_p]),
        ("ggml_backend_cpu_buffer_type", pointer, []),
        ("ggml_backend_register", None, [pointer]),
    ]:
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def auto_layers(
    found: Sequence[Device],
    tensors: Sequence[Tensor],
    buffers: int,
    beside: int,
    plan: Callable[[int], Plan | None],
    *,
    platform: str = sys.platform,
) -> int:
    """`gpu_layers` for a model.

    Args:
        found: the GPUs.
        tensors: of the model.
        buffers: bytes of its caches and of what a pass computes.
        beside: bytes that the draft takes with all it needs.
        plan: with so many of the last layers kept in memory; raises NoRoom.
        platform: of the machine.
    """
    if not found:
        return 0
    own = [device for device in found if not device.shared]
    weights = sum(tensor.size for tensor in tensors)
    if not own:
        room = found[0].free - buffers
        try:
            least = plan(0)
        except NoRoom:
            return 0
        if least is None or not least.streamed:
            return -1 if weights + beside <= room else 0
        return _beside_streamed(tensors, room, least, plan) if platform == "darwin" else 0
    room = _room(own, buffers)
    if beside <= room // 2:  # all of a small draft is worth more than a few layers: it makes many passes
        room -= beside
    return layers_that_fit(tensors, room, len(own))


def _room(own: Sequence[Device], buffers: int) -> int:
    """Bytes for weights on GPUs with memory of their own."""
    return int(sum(device.free for device in own) * (1 - SAFETY)) - sum(device.reserve for device in own) - buffers


def layers_that_fit(tensors: Sequence[Tensor], room: int, parts: int) -> int:
    """How many layers, the output first, go into so many bytes, in so many parts."""
    count = count_layers(tensors)
    sizes = [0] * (count + 1)
    for tensor in tensors:
        if layer_of(tensor) >= 0 or is_output(tensor):
            sizes[layer_of(tensor)] += tensor.size  # the output's is the last one: -1
    if all(not tensor.name.startswith("output.") for tensor in tensors):  # it is the embedding
        sizes[-1] += sum(tensor.size for tensor in tensors if layer_of(tensor) < 0)
    room -= (parts - 1) * max(sizes)  # a layer is not divided
    if sum(sizes) <= room:
        return -1
    fitting = 0
    for size in reversed(sizes):
        room -= size
        if room < 0:
            break
        fitting += 1
    return fitting if fitting > 1 else 0  # the output alone is not worth the way


def _beside_streamed(tensors: Sequence[Tensor], room: int, least: Plan, plan: Callable[[int], Plan | None]) -> int:
    for kept in range(count_layers(tensors) - 1, 0, -1):
        spans = gpu_spans(tensors, kept)
        if sum(span.size for span in spans) > room:
            continue
        try:
            one = plan(kept)
        except NoRoom:
            continue
        if one and one.streamed_bytes <= least.streamed_bytes * (1 + MORE) and not wired(one, spans):
            return kept + 1
    return 0


def gpu_spans(tensors: Sequence[Tensor], layers: int) -> list[Extent]:
    """What a Mac's GPU maps of each file for the last layers, the output left to the processor."""
    first, spans = count_layers(tensors) - layers, dict[int, Extent]()
    for tensor in tensors:
        if layer_of(tensor) >= first:
            last = spans.get(tensor.file, Extent(tensor.file, tensor.start, tensor.start + tensor.size))
            start, stop = min(last.start, tensor.start), max(last.stop, tensor.start + tensor.size)
            spans[tensor.file] = Extent(tensor.file, start, stop)
    return list(spans.values())


def wired(plan: Plan, spans: Sequence[Extent]) -> int:
    """Bytes streamed, or of experts that do not all stay, inside what a GPU maps: those would stay in memory."""
    return sum(
        max(0, min(extent.stop, span.stop) - max(extent.start, span.start))
        for extent in (*plan.cached, *(extent for layer in plan.streamed for extent in layer.extents))
        for span in spans
        if extent.file == span.file
    )


def check_spans(plan: Plan, tensors: Sequence[Tensor], gpu_layers: int) -> None:
    """Refuse what would keep streamed layers, or all experts, in a Mac's memory.

    Raises:
        UsageError: says what to do.
    """
    count = count_layers(tensors)
    on_gpu = count if gpu_layers < 0 else min(count, max(0, gpu_layers - 1))
    if wired(plan, gpu_spans(tensors, on_gpu)):
        what = (
            "experts, and keep all of them in memory"
            if plan.cached
            else ("streamed layers, and keep them in memory, for layers do not lie in order in this file")
        )
        raise UsageError(f"with --gpu-layers {gpu_layers} the GPU would map {what}; use --gpu-layers 0")


class Override(ctypes.Structure):
    """struct llama_model_tensor_buft_override of llama.h."""

    _fields_ = (("pattern", ctypes.c_char_p), ("buffer_type", ctypes.c_void_p))


def experts_too_large(found: Sequence[Device], tensors: Sequence[Tensor], gpu_layers: int, buffers: int) -> bool:
    """Whether GPUs with memory of their own do not hold the output and so many layers of a mixture with their experts.

    Args:
        found: the GPUs.
        tensors: of the model.
        gpu_layers: as for `load`, not 0.
        buffers: bytes of its caches and of what a pass computes.
    """
    own = [device for device in found if not device.shared]
    first = 0 if gpu_layers < 0 else count_layers(tensors) + 1 - gpu_layers
    there = [tensor for tensor in tensors if layer_of(tensor) >= first or is_output(tensor)]
    with_experts = any(EXPERT.search(tensor.name) for tensor in there)
    return bool(own) and with_experts and sum(tensor.size for tensor in there) > _room(own, buffers)


def kept_off(
    plan: Plan | None, gpu_layers: int, no_experts: bool = False, *, platform: str = sys.platform
) -> dict[str, Any]:
    """Parameters of a model that leave to the processor what a GPU with such layers must not have."""
    if gpu_layers == 0:
        return {}
    patterns = [OUTPUT] if plan and plan.streamed and platform == "darwin" else []
    patterns += [EXPERTS] if no_experts or (plan and plan.slots_of_experts >= 0) else []
    return {"tensor_buft_overrides": ctypes.addressof(overrides(*patterns))} if patterns else {}


@cache
def overrides(*patterns: bytes) -> Any:
    """For llama.cpp: tensors whose names match one of these lie in the processor's memory."""
    here = ggml().ggml_backend_cpu_buffer_type()
    return (Override * (len(patterns) + 1))(*(Override(pattern, here) for pattern in patterns), Override(None, None))
