"""Which weights stay in memory and which are read again in every pass: the policy, without any effect.

    pinned      output, norms, and what fits of the layers: always in memory
    streamed    a part of each layer, or of some layers: read into a slot in every pass, in the order of computation
    cached      experts of a mixture: in a pool (`experts.py`), or as the page cache keeps them
    looked up   the embedding, where it is not the output as well, and per-layer embeddings: read row by row

Parts of n layers take turns in the slots. To free E bytes, a pass reads n / (n - slots) x E bytes: the more layers give
a part, the less is read. They are spread evenly over the model, so that the disk never waits long for a free slot.
"""

import math
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise, repeat
from mmap import PAGESIZE

from edgespec.errors import NoRoom
from edgespec.machine.memory import format_size
from edgespec.machine.system import HUGE
from edgespec.machine.this_machine import Gpu

SLOTS = 2
MORE_SLOTS = 4  # for small parts: readers that wake late cost up to 0.3 of a short pass
SMALL_PART = 32 << 20  # bytes, read in about 20 ms
PART = HUGE  # bytes; a smaller part is not worth the stop before its layer
SMALL = 256 << 10  # bytes; smaller runs of weights (norms, biases) are pinned
MARGIN = 64 << 20  # bytes of libraries, work buffers and page tables
SAFETY = 0.05  # share of free memory that is left unused
WORKSPACE = 1 << 29  # bytes of a CUDA context, its libraries and PyTorch's gaps
BUFFERS = 2  # of a card for streamed layers: enough to keep the copies or the computation busy all the time

WIDTHS = (1024, 512, 256, 128)  # draft tokens of one pass
# Share by which the bytes that a pass reads may grow, to have memory for more draft tokens: they cost a GPU no time.
CHEAP = 1 / 32

SLOW = 0.5  # tokens per second
REMEDY = "a faster disk, more memory or a smaller model would help"

PER_LAYER_ROWS = "per_layer_token_embd.weight"  # Gemma 3n and 4: for each token a row for all layers
EXPERTS = re.compile(r"_(ch)?exps\.")  # in the names of their weights and biases; a std::regex of C++, too
# Tensors of no layer that llama.cpp does not keep with the output (LLM_TENSOR_INFOS in llama-arch.cpp).
POSITIONS = "position_embd.weight"  # a learned vector for each
OF_INPUT = ("token_embd.weight", POSITIONS, "token_types.weight", PER_LAYER_ROWS)
OF_FIRST_LAYER = ("token_embd_norm.", "per_layer_model_proj.", "per_layer_proj_norm.")
OF_ALL_LAYERS = ("rope_freqs.", "rope_factors_")


Ends = dict[int, list[int]]  # file -> ends of its tensors, sorted


@dataclass(frozen=True, slots=True, order=True)
class Extent:
    """
    Attributes:
        file: index of its file.
        start: its first byte in the file.
        stop: the byte after its last.
    """

    file: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Tensor:
    """
    Attributes:
        name: as in a GGUF.
        file: index of its file.
        start: its first byte in the file.
        size: in bytes.
        type: of its numbers, `ggml_type` in ggml.h; 0 where an engine does not say.
    """

    name: str
    file: int
    start: int
    size: int
    type: int = 0

    @property
    def extent(self) -> Extent:
        return Extent(self.file, self.start, self.start + self.size)


@dataclass(frozen=True, slots=True)
class Mapping:
    """A file's mapping in this process.

    Attributes:
        start, stop: addresses.
        offset: of `start` in the file, in bytes.
    """

    start: int
    stop: int
    offset: int

    def address(self, extent: Extent) -> int:
        """The only way from a piece of a file to memory: no store touches an address outside its mapping.

        Raises:
            OSError: not all of `extent` is mapped.
        """
        start = self.start + extent.start - self.offset
        if start < self.start or start + extent.size > self.stop:
            raise OSError(f"bytes {extent.start} to {extent.stop} of file {extent.file} are not mapped")
        return start


@dataclass(frozen=True, slots=True)
class Layer:
    index: int
    extents: tuple[Extent, ...]

    @property
    def size(self) -> int:
        return sum(extent.size for extent in self.extents)


@dataclass(frozen=True, slots=True)
class Pool:
    """Memory for experts: see `experts.py`.

    Attributes:
        layers: numbers of the layers that share it, among those with experts.
        slots: experts that it holds.
        device: that computes them, in its own memory or in this one; "": none.
    """

    layers: tuple[int, ...]
    slots: int
    device: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """
    Attributes:
        memory: bytes for everything.
        needed: bytes for all but the model's weights.
        pinned, streamed, cached, looked_up: as in the module's docstring.
        slots: streamed parts that are in memory at once.
        layers: of the model.
        experts: of a layer.
        used: experts that a token uses; 0: not known.
        pools: for experts, in this memory; (): `cached` is left to the page cache.
        pool_bytes: memory of these.
        device_pools: in devices' own memory, for layers that they compute; what these lack comes from `pools`.
        draft_bytes: part of `needed` that the draft takes.
        head_bytes: of weights, those of a head in the model's own file.
        draft_reads: bytes of weights that a pass of the draft reads; 0: not known.
    """

    memory: int
    needed: int
    pinned: tuple[Extent, ...]
    streamed: tuple[Layer, ...]
    cached: tuple[Extent, ...]
    slots: int
    layers: int
    looked_up: tuple[Extent, ...] = ()
    experts: int = 0
    used: int = 0
    pools: tuple[Pool, ...] = ()
    pool_bytes: int = 0
    device_pools: tuple[Pool, ...] = ()
    draft_bytes: int = 0
    head_bytes: int = 0
    draft_reads: int = 0

    @property
    def pinned_bytes(self) -> int:
        return sum(extent.size for extent in self.pinned)

    @property
    def streamed_bytes(self) -> int:
        return sum(layer.size for layer in self.streamed)

    @property
    def slot_bytes(self) -> int:
        return max((layer.size for layer in self.streamed), default=0)

    @property
    def cached_bytes(self) -> int:
        return sum(extent.size for extent in self.cached)

    @property
    def slots_of_experts(self) -> int:
        """Mean number of experts of a layer in memory; -1: as many as the page cache keeps."""
        return int(_slots_each(self.pools)) if self.pools else -1

    @property
    def on_devices(self) -> list[Pool]:
        """Pools of the layers whose experts devices compute."""
        return [pool for pool in (*self.device_pools, *self.pools) if pool.device]

    @property
    def share_of_experts(self) -> float:
        """Share of all experts for which pools have slots, where none has two."""
        layers = sum(len(pool.layers) for pool in self.pools)
        slots = sum(pool.slots for pool in (*self.pools, *self.device_pools))
        return min(1.0, slots / (layers * self.experts)) if layers else 0.0

    @property
    def experts_by_place(self) -> str:
        """Such as "96 of 128 experts of 21 layers on CUDA0, 40 of each layer in 3.20 GiB of memory"."""
        found = list[str]()
        for name in sorted({pool.device for pool in self.device_pools}):
            pools = [pool for pool in self.device_pools if pool.device == name]
            layers = sum(len(pool.layers) for pool in pools)
            found.append(f"{int(_slots_each(pools))} of {self.experts} experts of {layers} layers on {name}")
        of_all, memory = (
            (" of each layer", " of memory") if found else (f" of {self.experts} experts of each layer", "")
        )
        found.append(f"{self.slots_of_experts}{of_all} in {format_size(self.pool_bytes)}{memory}")
        if shared := [pool for pool in self.pools if pool.device]:
            found.append(f"those of {sum(len(pool.layers) for pool in shared)} layers computed by {shared[0].device}")
        return ", ".join(found)

    @property
    def read_bytes(self) -> int:
        """Most bytes that a pass reads, without what is left to the page cache."""
        missing = max(0.0, 1 - self.share_of_experts) if self.pools else 0
        return self.streamed_bytes + int(missing * self.cached_bytes)

    @property
    def looked_up_bytes(self) -> int:
        return sum(extent.size for extent in self.looked_up)

    @property
    def total_bytes(self) -> int:
        return self.pinned_bytes + self.streamed_bytes + self.cached_bytes + self.looked_up_bytes

    @property
    def fits_without_draft(self) -> bool:
        return self.total_bytes + self.needed - self.draft_bytes - self.head_bytes <= self.memory

    def line(self, bandwidth: float = 0.0) -> str:
        """
        Args:
            bandwidth: of the disk in bytes per second; 0: unknown.
        """
        total = self.total_bytes
        text = f"model of {format_size(total)} in {format_size(self.memory)} of memory: "
        text += f"{format_size(self.pinned_bytes)} stays"
        if self.streamed:
            text += (
                f", {format_size(self.streamed_bytes)} (from {len(self.streamed)} of {self.layers} layers) "
                f"is read from disk in every pass"
            )
            if bandwidth:
                seconds = self.streamed_bytes / bandwidth
                text += f", about {two_digits(seconds)} s at {two_digits(bandwidth / 1e9)} GB/s"
        if self.cached and self.pools:
            text += (
                f", {self.experts_by_place}, "
                f"the others, of {format_size(self.cached_bytes)}, are read when they are wanted"
            )
        elif self.cached:
            text += f", {format_size(self.cached_bytes)} of experts as the page cache keeps them"
        if self.looked_up:
            text += f", {format_size(self.looked_up_bytes)} of embeddings row by row"
        return text

    def warning(self, bandwidth: float) -> str:
        """
        Args:
            bandwidth: of the disk in bytes per second; 0: unknown.

        Returns:
            A warning that the disk is too slow, or "".
        """
        most = bandwidth / self.streamed_bytes if self.streamed and bandwidth else math.inf
        if most >= SLOW:
            return ""
        return f"slow: the disk allows {two_digits(most)} tokens/s, more only with accepted draft tokens; {REMEDY}"


def _slots_each(pools: Sequence[Pool]) -> float:
    """Mean slots for a layer."""
    return sum(pool.slots for pool in pools) / sum(len(pool.layers) for pool in pools)


def two_digits(number: float) -> str:
    return f"{number:.{max(0, 1 - math.floor(math.log10(number)))}f}"


def choose_width(usual: int, widest: int, cheap: float, read: Callable[[int], int]) -> int:
    """
    Args:
        usual: draft tokens of one pass, for which there is room.
        widest: most.
        cheap: most relative increase of the bytes read.
        read: returns the bytes that a pass reads, by draft tokens; raises NoRoom.

    Returns:
        `usual`, or the largest of `WIDTHS` whose memory (logits, masks, cells) costs so little.
    """
    least = read(usual)
    for width in WIDTHS:
        if usual < width <= widest:
            with suppress(NoRoom):
                if read(width) <= least * (1 + cheap):
                    return width
    return usual


def make_plan(
    tensors: Sequence[Tensor],
    memory: int,
    needed: int,
    *,
    on_device: int = 0,
    output_here: bool = False,
    experts_here: bool = False,
    kept: int = 0,
    head: int = 0,
    experts_at_once: int = 0,
    page: int = PAGESIZE,
    whole: bool = False,
    whole_layers: bool = False,
) -> Plan | None:
    """Decide what is pinned and what is streamed; None if everything fits.

    Args:
        tensors: of the whole model; the engine does not load those of size 0, but counts their layers.
        memory: bytes for everything.
        needed: bytes besides these weights: draft model, key-value caches, buffers, the program itself.
        on_device: number of last layers that, with the output, lie in a GPU's own memory and are not planned.
        output_here: the output stays in this memory all the same.
        experts_here: the experts of those layers stay in this memory all the same.
        kept: number of last layers that must be pinned, but for their experts.
        head: number of last layers that are a head, which is pinned with its experts.
        experts_at_once: bytes of memory to compute one layer's experts, if they do not stay.
        page: bytes of a page of memory.
        whole: a part ends where a tensor ends, for engines that do not map files; `page` is 1 then.
        whole_layers: with `whole`, a part is a layer; consecutive ones are streamed, and all others stay whole.

    Raises:
        NoRoom: not even the smallest plan fits; names the bytes it needs.
    """
    count = count_layers(tensors)
    tensors = [tensor for tensor in tensors if tensor.size]
    away = on_device > 0 and not output_here
    with_experts = range(count - (head if experts_here else max(on_device, head)))
    found = {
        tensor.name: tensor
        for place, tensor in places(tensors, count)
        if place < count - on_device or (place == count and not away) or (experts_here and EXPERTS.search(tensor.name))
    }
    host = list(found.values())
    if sum(tensor.size for tensor in host) + needed <= memory:
        return None
    others_need, needed = needed, needed + experts_at_once
    rows = away or any(tensor.name == "output.weight" for tensor in tensors)
    pages = _whole_pages(tensors, page, rows)
    experts = [extent for index in with_experts for extent in pages.get((index, "experts"), ())]
    movable = range(count - max(on_device, kept, head))
    layers = [Layer(index, tuple(extents)) for index in movable if (extents := pages.get((index, "")))]
    looked_up = pages.get((-1, "rows"), [])
    everything = merge(Extent(t.file, t.start // page * page, -(-(t.start + t.size) // page) * page) for t in host)
    others = experts + looked_up
    always = sum(
        extent.size for extent in _without(everything, [e for layer in layers for e in layer.extents] + others)
    )
    # Experts get the memory that is left, so other weights are streamed only where they do not fit themselves.
    sizes = [layer.size for layer in layers]
    excess = always + sum(sizes) + needed - memory
    ends = _ends(tensors) if whole else None
    streamed, slots = _choose_parts(layers, excess, page, {} if whole_layers else ends)
    if streamed is None:
        least = always + needed + sum(sizes) - _freed(sizes, _largest_part(sizes, slots), slots)
        raise NoRoom(
            f"{format_size(memory)} of memory are too little for this model: it needs at least "
            f"{format_size(least, up=True)} ({format_size(always)} for the output and small weights, "
            f"{format_size(least - always - needed)} for layers, "
            + f"{format_size(experts_at_once)} for the experts of one layer, " * bool(experts_at_once)
            + f"{format_size(others_need)} for the program, caches and any draft)"
        )
    moving = [extent for layer in streamed for extent in layer.extents]
    return Plan(
        memory=memory,
        needed=others_need,
        pinned=tuple(_without(everything, moving + others)),
        streamed=tuple(streamed),
        cached=tuple(experts),
        looked_up=tuple(looked_up),
        slots=min(slots, len(streamed)),
        layers=count,
        head_bytes=sum(tensor.size for tensor in host if layer_of(tensor) >= count - head),
    )


def _choose_parts(layers: Sequence[Layer], excess: int, page: int, ends: Ends | None) -> tuple[list[Layer] | None, int]:
    """
    Returns:
        Parts to stream that free `excess` bytes (None: impossible), and the number of slots.
    """
    inner, unit = (layers, page) if ends is not None else (_inner(layers, HUGE), HUGE)
    streamed = _parts(inner, excess, unit, SLOTS, ends)
    if streamed and max(part.size for part in streamed) <= SMALL_PART:
        more = _parts(inner, excess, unit, MORE_SLOTS, ends)
        return (more, MORE_SLOTS) if more else (streamed, SLOTS)
    return (_parts(layers, excess, page, SLOTS, ends) if streamed is None else streamed), SLOTS


def _inner(layers: Sequence[Layer], unit: int) -> list[Layer]:
    """Layers cut to whole units of their files; [] if a layer loses more than a quarter.

    The page cache has pages of up to 2 MiB, and keeps a whole one where a part of it is pinned.
    """
    inner = [
        Layer(layer.index, tuple(e for extent in layer.extents if (e := _whole(extent, unit)).size > 0))
        for layer in layers
    ]
    large = all(4 * some.size >= 3 * layer.size for some, layer in zip(inner, layers, strict=True))
    return inner if large else []


def _whole(extent: Extent, unit: int) -> Extent:
    return Extent(extent.file, -(-extent.start // unit) * unit, extent.stop // unit * unit)


def _ends(tensors: Sequence[Tensor]) -> Ends:
    ends: Ends = {}
    for tensor in tensors:
        ends.setdefault(tensor.file, []).append(tensor.start + tensor.size)
    return {file: sorted(found) for file, found in ends.items()}


def _parts(layers: Sequence[Layer], excess: int, unit: int, slots: int, ends: Ends | None = None) -> list[Layer] | None:
    """
    Args:
        layers: that may be streamed.
        excess: bytes to free.
        unit: bytes; parts are multiples of it.
        slots: parts in memory at once.
        ends: where parts end instead; {}: only where layers do.

    Returns:
        The parts with the fewest bytes in all, [] if nothing is to be freed, None if it is impossible.
    """
    if excess <= 0:
        return []
    best, least = None, 0
    sizes = [layer.size for layer in layers]
    for count in range(slots + 1, len(layers) + 1):
        whole = ends == {}
        chosen = consecutive_layers(len(layers), count) if whole else _spread(len(layers), count)
        part = _part_size([sizes[i] for i in chosen], excess, unit, slots)
        if not part:
            continue
        some = [layers[i] for i in chosen]
        for cut in (some,) if whole else ([_part(layer, part, ends) for layer in some], some):  # else whole layers
            taken = [layer.size for layer in cut]
            if _freed(taken, max(taken), slots) >= excess and (best is None or sum(taken) < least):
                best, least = cut, sum(taken)
    return best


def _part_size(sizes: Sequence[int], excess: int, unit: int, slots: int) -> int:
    """
    Returns:
        Bytes of the smallest parts that free `excess` bytes, in whole units; 0: impossible.
    """
    largest = _largest_part(sizes, slots)
    if _freed(sizes, largest, slots) < excess:
        return 0
    low, high = 0, largest // unit
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _freed(sizes, middle * unit, slots) >= excess else (middle, high)
    return max(high * unit, min(PART, largest))


def _largest_part(sizes: Sequence[int], slots: int) -> int:
    return sorted(sizes)[-slots - 1] if len(sizes) > slots else 0


def _freed(sizes: Sequence[int], part: int, slots: int) -> int:
    return sum(map(min, sizes, repeat(part))) - slots * part


def _part(layer: Layer, size: int, ends: Ends | None = None) -> Layer:
    extents = []
    for extent in layer.extents:
        if size > 0:
            stop = min(extent.stop, extent.start + size)
            if ends:
                stop = min(extent.stop, ends[extent.file][bisect_left(ends[extent.file], stop)])
            extents.append(Extent(extent.file, extent.start, stop))
            size -= extents[-1].size
    return Layer(layer.index, tuple(extents))


def _spread(count: int, some: int) -> list[int]:
    return [(2 * i + 1) * count // (2 * some) for i in range(some)]


def consecutive_layers(count: int, some: int) -> list[int]:
    """Layers without which the others draft best: below them are a quarter of the others."""
    first = -(-(count - some) // 4)
    return list(range(first, first + some))


def layer_of(tensor: Tensor) -> int:
    """
    Returns:
        The layer's number; -1: the tensor is in no layer.
    """
    return _layer(tensor.name)


@cache
def _layer(name: str) -> int:
    match = re.match(r"blk\.(\d+)\.", name)
    return int(match[1]) if match else -1


def places(tensors: Sequence[Tensor], count: int) -> list[tuple[int, Tensor]]:
    """Places of tensors in llama.cpp (`load_tensors` and `create_tensor`), for any number of layers on a GPU.

    Args:
        tensors: of the whole model.
        count: of its layers.

    Returns:
        Each tensor with its layer; -1: of the input, which no GPU gets; `count`: of the output, which a GPU gets first.
        A tensor occurs once for each place that has a copy.
    """
    names = {tensor.name for tensor in tensors}
    found = list[tuple[int, Tensor]]()
    for tensor in tensors:
        if (layer := layer_of(tensor)) >= 0:
            found.append((layer, tensor))
        elif tensor.name in OF_INPUT:
            found.append((-1, tensor))
            if tensor.name == "token_embd.weight" and "output.weight" not in names:
                found.append((count, tensor))
        elif tensor.name.startswith(OF_ALL_LAYERS):
            found += ((layer, tensor) for layer in range(count))
        elif tensor.name.startswith(OF_FIRST_LAYER) and "output_norm.weight" in names:  # else it is LFM2's output norm
            found.append((0, tensor))
        else:
            found.append((count, tensor))
    return found


def divide(
    tensors: Sequence[Tensor], gpu_layers: int, kept_off: Sequence[bytes] = ()
) -> tuple[list[Tensor], list[Tensor]]:
    """
    Args:
        tensors: of the whole model.
        gpu_layers: as in `LoadOptions`.
        kept_off: regular expressions of names that stay with the processor.

    Returns:
        What llama.cpp gives to the processor, and what to GPUs; copies are in both.
    """
    count = count_layers(tensors)
    first = 0 if gpu_layers < 0 else max(0, count + 1 - gpu_layers)
    patterns = [re.compile(pattern.decode()) for pattern in kept_off]
    here, there = dict[str, Tensor](), dict[str, Tensor]()
    for place, tensor in places(tensors, count):
        if tensor.size:
            on_processor = place < first or any(pattern.search(tensor.name) for pattern in patterns)
            (here if on_processor else there)[tensor.name] = tensor
    return list(here.values()), list(there.values())


def spans(tensors: Iterable[Tensor]) -> list[Extent]:
    """Ranges that llama.cpp maps for a device with these tensors: of each file from the first tensor to the last."""
    found = dict[int, Extent]()
    for tensor in tensors:
        stop = tensor.start + tensor.size
        last = found.get(tensor.file, Extent(tensor.file, tensor.start, stop))
        found[tensor.file] = Extent(tensor.file, min(last.start, tensor.start), max(last.stop, stop))
    return list(found.values())


def count_layers(tensors: Iterable[Tensor]) -> int:
    return 1 + max(map(layer_of, tensors), default=-1)


def layers_on_gpu(gpu_layers: int, count: int) -> int:
    """
    Args:
        gpu_layers: asked for, where the output counts as one; -1 = all.
        count: layers of the model.
    """
    return count if gpu_layers < 0 else min(count, max(0, gpu_layers - 1))


def layers_of_gpus(gpus: Sequence[Gpu], gpu_layers: int, count: int) -> list[tuple[int, str]]:
    """Number of layers that llama.cpp gives to each GPU, and the GPU's name: by free memory (`load_tensors`).

    Args:
        gpus: those with their own memory count, else the first one.
        gpu_layers: as for `layers_on_gpu`.
        count: layers of the model.
    """
    used = ([gpu for gpu in gpus if not gpu.shared] or gpus[:1]) if gpu_layers else []
    ends = [end / max(1, sum(gpu.free for gpu in used)) for end in accumulate(gpu.free for gpu in used)]
    layers = layers_on_gpu(gpu_layers, count)  # the output comes after them
    at = [bisect_right(ends, layer / (layers + 1)) for layer in range(layers)]
    return [(at.count(i), gpu.name) for i, gpu in enumerate(used)]


def layers_by_device(
    sizes: Sequence[int], memory: int, fixed: int, rooms: Sequence[int], caches: Sequence[int], asked: int | None = None
) -> list[int]:
    """Divide layers among devices: each computes consecutive ones, and the first device also streamed ones.

    Args:
        sizes: bytes of each layer.
        memory: bytes to use on the first device.
        fixed: bytes of them for all else, `caches` included.
        rooms: bytes for layers and their caches on each further device.
        caches: bytes of each layer's caches, which lie where it is computed.
        asked: number of layers that stay on devices; None: as many as fit.

    Returns:
        The number of layers of each device. The first one gets as many as it holds; if layers must be streamed, it gets
        those that the others cannot hold.
    """
    count = len(sizes)

    def others(first: int) -> list[int]:
        found = list[int]()
        for room in rooms:
            stop = first
            while stop < count and (room := room - sizes[stop] - caches[stop]) >= 0:
                stop += 1
            found.append(stop - first)
            first = stop
        return found

    def fits(first: int) -> bool:
        return fixed - sum(caches[first:]) + sum(sizes[:first]) <= memory

    most = next((first for first in range(count, 1, -1) if fits(first)), 1)
    least = max(most, count - (count if asked is None else asked))
    first = next((first for first in range(least, count) if first + sum(others(first)) == count), count)
    return [first, *others(first)]


def usable(gpu: Gpu) -> int:
    """Bytes of a card's memory for this program, with all that it uses; `WORKSPACE` is a part of what stays free."""
    return gpu.used + min(gpu.free, int(gpu.free * (1 - SAFETY)) + WORKSPACE)


def streams_by_device(
    count: int, size: int, cache: int, rooms: Sequence[int], speeds: Sequence[float], asked: int | None = None
) -> list[tuple[int, int]]:
    """Divide layers among devices that all stream, in proportion to the speeds at which streamed layers arrive.

    Args:
        count: of layers.
        size: bytes of the largest layer.
        cache: bytes of the largest caches of a layer.
        rooms: bytes for layers and their caches on each device.
        speeds: bytes per second that reach each device while the others stream, too.
        asked: as for `layers_by_device`.

    Returns:
        For each device its layers, and how many of them it streams; []: the rooms are too small.
    """
    ends = [end / sum(speeds) for end in accumulate(speeds)]
    for total in range(1, count + 1) if asked is None else [count - asked]:
        streamed = [stop - start for start, stop in pairwise(round(total * end) for end in (0, *ends))]
        kept = [
            (room - some * cache - (some > 0) * BUFFERS * size) // (size + cache)
            for room, some in zip(rooms, streamed, strict=True)
        ]
        if min(kept) >= 0 and sum(kept) >= count - total:
            stops = [min(stop, count - total) for stop in accumulate(kept)]
            stay = [stop - start for start, stop in pairwise((0, *stops))]
            return [(some + more, more) for some, more in zip(stay, streamed, strict=True)]
    return []


def _whole_pages(tensors: Sequence[Tensor], page: int, by_rows: bool) -> dict[tuple[int, str], list[Extent]]:
    """
    Args:
        tensors: of the whole model.
        page: bytes.
        by_rows: the embedding is looked up.

    Returns:
        (layer or -1, kind) -> runs of whole pages that hold nothing else, without runs below `SMALL` bytes; kinds are
        "experts", "rows" (per-layer embeddings, and the embedding with `by_rows`) and "" (others).
    """
    runs: list[tuple[tuple[int, str], Extent]] = []
    for tensor in sorted(tensors, key=lambda tensor: (tensor.file, tensor.start)):
        rows = tensor.name == PER_LAYER_ROWS or (by_rows and tensor.name == "token_embd.weight")
        experts = EXPERTS.search(tensor.name) and tensor.name.endswith(".weight")  # biases are read with the layer
        owner = layer_of(tensor), "rows" if rows else "experts" if experts else ""
        stop = tensor.start + tensor.size
        if runs:
            before, last = runs[-1]
            if (before, last.file) == (owner, tensor.file) and tensor.start - last.stop < page:
                runs[-1] = owner, Extent(last.file, last.start, stop)
                continue
        runs.append((owner, Extent(tensor.file, tensor.start, stop)))
    pages: dict[tuple[int, str], list[Extent]] = {}
    for owner, run in runs:
        inner = _whole(run, page)
        if inner.size >= SMALL:
            pages.setdefault(owner, []).append(inner)
    return pages


def merge(extents: Iterable[Extent]) -> list[Extent]:
    merged: list[Extent] = []
    for extent in sorted(extents):
        last = merged[-1] if merged else None
        if last and last.file == extent.file and extent.start <= last.stop:
            merged[-1] = Extent(last.file, last.start, max(last.stop, extent.stop))
        else:
            merged.append(extent)
    return merged


def _without(extents: Sequence[Extent], holes: Sequence[Extent]) -> list[Extent]:
    """
    Args:
        extents: no two overlap.
        holes: no two overlap.
    """
    left = []
    holes = sorted(holes)
    for extent in extents:
        start = extent.start
        for hole in holes:
            if hole.file == extent.file and start <= hole.start < extent.stop:
                if hole.start > start:
                    left.append(Extent(extent.file, start, hole.start))
                start = hole.stop
        if start < extent.stop:
            left.append(Extent(extent.file, start, extent.stop))
    return left
