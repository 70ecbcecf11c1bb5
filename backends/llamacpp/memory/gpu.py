"""Number of layers on GPUs, by their free memory.

`gpu_layers` = n + 1 is the output and the last n layers; -1 is all layers, without the embedding.

A GPU with its own memory gets as many layers as fit there with caches, buffers and the draft model. A Mac's GPU shares
the memory of the plan, and keeps the file in it from the first to the last of its weights. So it gets only layers
without a streamed layer in between, and not the output, which is often first in the file. Experts that are read as they
are chosen stay on the CPU, as with llama.cpp's --cpu-moe.
"""

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from edgespec.errors import NoRoom, UsageError
from edgespec.machine.this_machine import Gpu
from edgespec.weights.plan import EXPERTS as EXPERT
from edgespec.weights.plan import SAFETY, Extent, Plan, Tensor, count_layers, is_output, layer_of, layers_on_gpu

from ..ggml.files import ggml_library, llama_cpp

OUTPUT, EXPERTS = b"^output", rb"_exps\."
GPU, SHARED = 1, 2  # ggml_backend_dev_type in ggml-backend.h: own memory, or the host's
RESERVE = 512 << 20  # bytes of each GPU's memory for its libraries
MORE = 1 / 32  # maximum relative increase of streamed bytes for more layers on the GPU


_used_by_others: dict[str, int] = {}  # bytes of each GPU at this program's first look


def find_gpus() -> list[Gpu]:
    if not llama_cpp.llama_supports_gpu_offload():
        return []
    library, found = ggml(), list[Gpu]()
    for i in range(library.ggml_backend_dev_count()):
        device = library.ggml_backend_dev_get(i)
        kind = library.ggml_backend_dev_type(device)
        if kind in (GPU, SHARED):
            free, total = ctypes.c_size_t(0), ctypes.c_size_t(0)
            library.ggml_backend_dev_memory(device, ctypes.byref(free), ctypes.byref(total))
            name = library.ggml_backend_dev_name(device).decode()
            used = total.value - free.value
            own = max(0, used - _used_by_others.setdefault(name, used))
            found.append(Gpu(name, kind == SHARED, free.value, own, total.value))
    return found


@cache
def ggml() -> Any:
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
    found: Sequence[Gpu],
    tensors: Sequence[Tensor],
    buffers: int,
    drafts: int,
    plan: Callable[[int], Plan | None],
    *,
    platform: str,
) -> int:
    """
    Args:
        found: the GPUs.
        tensors: of the model.
        buffers: bytes of its caches and of a pass.
        drafts: bytes of the draft models, with their buffers.
        plan: returns a plan that keeps this number of last layers in memory; raises NoRoom.
        platform: of the machine.

    Returns:
        `gpu_layers` of `LoadOptions`.
    """
    if not found:
        return 0
    own = [gpu for gpu in found if not gpu.shared]
    weights = sum(tensor.size for tensor in tensors)
    if not own:
        room = found[0].free - buffers
        try:
            least = plan(0)
        except NoRoom:
            return 0
        if least is None or not least.streamed:
            return -1 if weights + drafts <= room else 0
        return _layers_on_mac(tensors, room, least, plan) if platform == "darwin" else 0
    room = _room(own, buffers)
    if drafts <= room // 2:  # a small draft model makes many passes, so it comes before a few layers
        room -= drafts
    return layers_that_fit(tensors, room, len(own))


def _room(own: Sequence[Gpu], buffers: int) -> int:
    return int(sum(gpu.free for gpu in own) * (1 - SAFETY)) - sum(max(0, RESERVE - gpu.used) for gpu in own) - buffers


def layers_that_fit(tensors: Sequence[Tensor], room: int, parts: int) -> int:
    """
    Args:
        tensors: of the model.
        room: bytes for weights.
        parts: number of devices that share `room`.

    Returns:
        The largest `gpu_layers` that fits.
    """
    count = count_layers(tensors)
    sizes = [0] * (count + 1)
    for tensor in tensors:
        if layer_of(tensor) >= 0 or is_output(tensor):
            sizes[layer_of(tensor)] += tensor.size
    if all(not tensor.name.startswith("output.") for tensor in tensors):  # the embedding is also the output
        sizes[-1] += sum(tensor.size for tensor in tensors if layer_of(tensor) < 0)
    room -= (parts - 1) * max(sizes)
    if sum(sizes) <= room:
        return -1
    fitting = 0
    for size in reversed(sizes):
        room -= size
        if room < 0:
            break
        fitting += 1
    return fitting if fitting > 1 else 0


def _layers_on_mac(tensors: Sequence[Tensor], room: int, least: Plan, plan: Callable[[int], Plan | None]) -> int:
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
    first, spans = count_layers(tensors) - layers, dict[int, Extent]()
    for tensor in tensors:
        if layer_of(tensor) >= first:
            last = spans.get(tensor.file, Extent(tensor.file, tensor.start, tensor.start + tensor.size))
            start, stop = min(last.start, tensor.start), max(last.stop, tensor.start + tensor.size)
            spans[tensor.file] = Extent(tensor.file, start, stop)
    return list(spans.values())


def wired(plan: Plan, spans: Sequence[Extent]) -> int:
    """Bytes of streamed layers and of cached experts in mapped ranges; the GPU would keep them in memory."""
    return sum(
        max(0, min(extent.stop, span.stop) - max(extent.start, span.start))
        for extent in (*plan.cached, *(extent for layer in plan.streamed for extent in layer.extents))
        for span in spans
        if extent.file == span.file
    )


def check_spans(plan: Plan, tensors: Sequence[Tensor], gpu_layers: int) -> None:
    """
    Raises:
        UsageError: the GPU layers would keep streamed layers, or all experts, in a Mac's memory.
    """
    if wired(plan, gpu_spans(tensors, layers_on_gpu(gpu_layers, count_layers(tensors)))):
        what = (
            "experts, and keep all of them in memory"
            if plan.cached
            else ("streamed layers, and keep them in memory, for layers do not lie in order in this file")
        )
        raise UsageError(f"with --gpu-layers {gpu_layers} the GPU would map {what}; use --gpu-layers 0")


class Override(ctypes.Structure):
    """struct llama_model_tensor_buft_override of llama.h."""

    _fields_ = (("pattern", ctypes.c_char_p), ("buffer_type", ctypes.c_void_p))


def experts_too_large(found: Sequence[Gpu], tensors: Sequence[Tensor], gpu_layers: int, buffers: int) -> bool:
    """True if GPUs with their own memory cannot hold the output and `gpu_layers` layers with their experts.

    Args:
        found: the GPUs.
        tensors: of the model.
        gpu_layers: as for `load`, not 0.
        buffers: bytes of its caches and of a pass.
    """
    own = [gpu for gpu in found if not gpu.shared]
    first = 0 if gpu_layers < 0 else count_layers(tensors) + 1 - gpu_layers
    there = [tensor for tensor in tensors if layer_of(tensor) >= first or is_output(tensor)]
    with_experts = any(EXPERT.search(tensor.name) for tensor in there)
    return bool(own) and with_experts and sum(tensor.size for tensor in there) > _room(own, buffers)


def kept_off(plan: Plan | None, gpu_layers: int, no_experts: bool = False, *, platform: str) -> dict[str, Any]:
    if gpu_layers == 0:
        return {}
    patterns = [OUTPUT] if plan and plan.streamed and platform == "darwin" else []
    patterns += [EXPERTS] if no_experts or (plan and plan.slots_of_experts >= 0) else []
    return {"tensor_buft_overrides": ctypes.addressof(overrides(*patterns))} if patterns else {}


@cache
def overrides(*patterns: bytes) -> Any:
    """Overrides that keep matching tensors in host memory, null-terminated; the cache keeps them alive."""
    here = ggml().ggml_backend_cpu_buffer_type()
    return (Override * (len(patterns) + 1))(*(Override(pattern, here) for pattern in patterns), Override(None, None))
