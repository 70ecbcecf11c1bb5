"""Number of layers on GPUs, by their free memory.

`gpu_layers` = n + 1 is the output and the last n layers; -1 is all layers, without the embedding.

A GPU with its own memory gets as many layers as fit there with caches, buffers and the draft model. A Mac's GPU shares
the memory of the plan. It keeps the file in it from the first to the last of its weights. Where that is less than the
whole file, it gets layers only: other tensors lie far in front of them. If layers are streamed, weights lie in
`own_memory.py` instead.

Of a mixture whose experts are read from disk it gets the other weights first, and pools of experts in the rest of its
own memory (`pools.py`). On a Mac, such experts stay on the CPU, as with llama.cpp's --cpu-moe. Only if
`scripts/check-mac` has seen there that its GPU computes them rightly in the machine's memory, and at least as fast, it
gets all layers.
"""

import ctypes
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from edgespec.errors import NoRoom
from edgespec.machine.measurements import processor_name, recall
from edgespec.machine.this_machine import Gpu
from edgespec.weights.plan import (
    EXPERTS,
    SAFETY,
    Plan,
    Tensor,
    count_layers,
    divide,
    layers_on_gpu,
    places,
    spans,
)

from ..ggml.files import GPU, SHARED, devices, engine_build, ggml, llama_cpp, memory_of

ANY, NO_LAYERS = rb".", rb"^(?!blk\.)"  # searched for in names: std::regex of C++, and re
RESERVE = 512 << 20  # bytes of each GPU's memory for its libraries
MORE = 1 / 32  # maximum relative increase of bytes that a pass reads for more layers on the GPU


_used_by_others: dict[str, int] = {}  # bytes of each GPU at this program's first look


@dataclass(frozen=True, slots=True)
class Buffers:
    """Bytes that a context takes besides weights.

    Attributes:
        here: cells and logits, which are the processor's.
        compute: of a pass, on each device.
        caches: of each layer: keys, values and states, which lie where the layer does.
    """

    here: int
    compute: int
    caches: tuple[int, ...]

    @property
    def total(self) -> int:
        return self.here + self.compute + sum(self.caches)

    def caches_on_gpu(self, gpu_layers: int) -> int:
        count = len(self.caches)
        return sum(self.caches[count - layers_on_gpu(gpu_layers, count) :])

    def compute_on_gpu(self, gpu_layers: int) -> int:
        """`compute`, and copies of caches: a layer without one reads another layer's, which the processor may have."""
        count = len(self.caches)
        there = self.caches[count - layers_on_gpu(gpu_layers, count) :]
        own = len(there) - there.count(0)
        copies = there.count(0) if len(there) < count and own < 2 else 0
        return self.compute + copies * max(self.caches, default=0)


def largest_copy(tensors: Sequence[Tensor], with_output: bool) -> int:
    """Bytes of the largest weight that a GPU may copy for a long pass over the processor's layers (`op_offload`).

    Args:
        tensors: of the model.
        with_output: the processor has the output, too.
    """
    count = count_layers(tensors)
    return max((tensor.size for place, tensor in places(tensors, count) if 0 <= place < count + with_output), default=0)


class Properties(ctypes.Structure):
    """struct ggml_backend_dev_props of ggml-backend.h."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("description", ctypes.c_char_p),
        ("free", ctypes.c_size_t),
        ("total", ctypes.c_size_t),
        ("type", ctypes.c_int),
        ("device_id", ctypes.c_char_p),
        ("caps", ctypes.c_bool * 64),
    )


def gpu_devices(library: Any) -> list[int]:
    """Devices of `ggml`; a card that several libraries see, such as CUDA and Vulkan, is one, as in llama.cpp."""
    found, ids = list[int](), set[bytes]()
    for device in devices(library, GPU, SHARED):
        library.ggml_backend_dev_get_props(device, ctypes.byref(about := Properties()))
        if about.device_id is None or about.device_id not in ids:
            found.append(device)
            ids.add(about.device_id)
    return found


def find_gpus() -> list[Gpu]:
    if not llama_cpp.llama_supports_gpu_offload():
        return []
    library, found = ggml(), list[Gpu]()
    for device in gpu_devices(library):
        free, total = memory_of(library, device)
        name = library.ggml_backend_dev_name(device).decode()
        own = max(0, total - free - _used_by_others.setdefault(name, total - free))
        pools, shared = recall(about_pools(), bool) or False, library.ggml_backend_dev_type(device) == SHARED
        found.append(Gpu(name, shared, free, own, total, pools=pools))
    return found


def about_pools() -> dict[str, str]:
    """Key of the measurement of `scripts/check-mac`: True if the GPU's pools of experts are the better ones."""
    system = platform.mac_ver()[0]
    return {"kind": "experts on a Mac's GPU", "machine": processor_name(), "system": system, "engine": engine_build()}


def auto_layers(
    gpus: Sequence[Gpu],
    tensors: Sequence[Tensor],
    buffers: Buffers,
    drafts: int,
    plan: Callable[[int], Plan | None],
    *,
    platform: str,
) -> int:
    """
    Args:
        gpus: the GPUs.
        tensors: of the model.
        buffers: of its context.
        drafts: bytes of the draft models, with their buffers.
        plan: returns a plan that keeps this number of last layers in memory; raises NoRoom.
        platform: of the machine.

    Returns:
        `gpu_layers` of `LoadOptions`.
    """
    if not gpus:
        return 0
    own = [gpu for gpu in gpus if not gpu.shared]
    room = room_beside(drafts, room_on(gpus, buffers))
    copied = largest_copy(tensors, not own)
    if own:
        return layers_that_fit(tensors, room, len(own), buffers.caches, copied)
    try:
        least = plan(0)
    except NoRoom:
        return 0
    if least is None and sum(span.size for span in spans(divide(tensors, -1)[1])) + sum(buffers.caches) <= room:
        return -1
    return _layers_on_mac(tensors, room, copied, buffers, plan) if platform == "darwin" else 0


def room_on(gpus: Sequence[Gpu], buffers: Buffers) -> int:
    """Bytes for weights and caches on these GPUs: those with their own memory, or one that shares the machine's."""
    own = [gpu for gpu in gpus if not gpu.shared]
    if not own:
        return gpus[0].free - buffers.compute
    reserves = sum(max(0, RESERVE - gpu.used) + buffers.compute for gpu in own)
    return int(sum(gpu.free for gpu in own) * (1 - SAFETY)) - reserves


def room_beside(drafts: int, room: int) -> int:
    """Bytes that draft models leave: small ones, which make many passes, come before a few layers."""
    return room - drafts if drafts <= room // 2 else room


def layers_that_fit(
    tensors: Sequence[Tensor], room: int, parts: int, caches: Sequence[int] = (), copied: int = 0
) -> int:
    """
    Args:
        tensors: of the model.
        room: bytes for weights and caches.
        parts: number of devices that share `room`.
        caches: bytes of each layer's.
        copied: bytes besides, unless all layers fit.

    Returns:
        The largest `gpu_layers` that fits.
    """
    count = count_layers(tensors)
    sizes = [0] * (count + 1)
    for place, tensor in places(tensors, count):
        if place >= 0:
            sizes[place] += tensor.size
    for layer, size in enumerate(caches):
        sizes[layer] += size
    room -= (parts - 1) * max(sizes)
    if sum(sizes) <= room:
        return -1
    room -= copied
    fitting = 0
    for size in reversed(sizes):
        room -= size
        if room < 0:
            break
        fitting += 1
    return fitting if fitting > 1 else 0


def _layers_on_mac(
    tensors: Sequence[Tensor], room: int, copied: int, buffers: Buffers, plan: Callable[[int], Plan | None]
) -> int:
    count = count_layers(tensors)
    try:
        least = plan(1)
    except NoRoom:
        return 0
    for kept in range(count if least else count - 1, 0, -1):
        try:
            one = plan(kept)
        except NoRoom:
            continue
        left = room + buffers.compute - shared_bytes(tensors, kept + 1, one)
        left -= buffers.caches_on_gpu(kept + 1) + buffers.compute_on_gpu(kept + 1)
        streamed = one.streamed_bytes if one else 0
        if left < (0 if streamed else copied):  # nothing is copied while layers stream
            continue
        if streamed <= (least.streamed_bytes if least else 0) * (1 + MORE):
            return kept + 1
    return 0


def shared_bytes(tensors: Sequence[Tensor], gpu_layers: int, plan: Plan | None) -> int:
    """Bytes of weights that a Mac's GPU keeps in memory: of its layers, and of slots; without a plan what it maps."""
    count = count_layers(tensors)
    there = divide(tensors, gpu_layers, kept_off(plan, gpu_layers, count, platform="darwin"))[1]
    if plan is None:
        return sum(span.size for span in spans(there))
    first = count - layers_on_gpu(gpu_layers, count)
    moving = sum(layer.size for layer in plan.streamed if layer.index >= first)
    return sum(tensor.size for tensor in there) - moving + plan.slots * plan.slot_bytes


class Override(ctypes.Structure):
    """struct llama_model_tensor_buft_override of llama.h."""

    _fields_ = (("pattern", ctypes.c_char_p), ("buffer_type", ctypes.c_void_p))


def experts_too_large(gpus: Sequence[Gpu], tensors: Sequence[Tensor], gpu_layers: int, buffers: Buffers) -> bool:
    """True if GPUs with their own memory cannot hold the output and `gpu_layers` layers with their experts.

    Args:
        gpus: the GPUs.
        tensors: of the model.
        gpu_layers: as for `load`, not 0.
        buffers: of its context.
    """
    there = divide(tensors, gpu_layers)[1]
    if not any(EXPERTS.search(tensor.name) for tensor in there) or all(gpu.shared for gpu in gpus):
        return False
    needed = sum(tensor.size for tensor in there) + buffers.caches_on_gpu(gpu_layers)
    return needed > room_on(gpus, buffers)


def kept_off(
    plan: Plan | None, gpu_layers: int, count: int, no_experts: bool = False, *, platform: str
) -> tuple[bytes, ...]:
    """
    Args:
        plan: of the weights; None: all stay in memory.
        gpu_layers: as in `LoadOptions`.
        count: of the model's layers.
        no_experts: GPUs get no experts.
        platform: of the machine.

    Returns:
        Regular expressions of the tensors that no GPU gets.
    """
    if gpu_layers == 0:
        return ()
    part = plan is None and layers_on_gpu(gpu_layers, count) < count
    patterns = [NO_LAYERS] if part and platform == "darwin" else []
    patterns += [EXPERTS.pattern.encode()] if no_experts or (plan and plan.pools) else []
    return tuple(patterns)


def needs_skeleton(plan: Plan | None, gpu_layers: int, platform: str) -> bool:
    """True if a GPU would map experts that are read as they are chosen: they lie between its own weights."""
    return platform == "darwin" and gpu_layers != 0 and plan is not None and bool(plan.pools)


def has_own_memory(plan: Plan | None, gpu_layers: int, platform: str) -> bool:
    """True if the model's weights lie in `OwnMemory`."""
    return platform == "darwin" and plan is not None and not needs_skeleton(plan, gpu_layers, platform)


@cache
def overrides(*patterns: bytes) -> Any:
    """Overrides that keep matching tensors in host memory, null-terminated; the cache keeps them alive."""
    here = ggml().ggml_backend_cpu_buffer_type()
    return (Override * (len(patterns) + 1))(*(Override(pattern, here) for pattern in patterns), Override(None, None))
