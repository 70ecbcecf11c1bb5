"""Weights larger than the GPU's memory: decoder layers are streamed from pinned host memory.

The method is of SpecExec, section 4.3 and appendix C (arXiv 2406.02532). Streamed layer i always uses buffer
i % buffers, so its weights stay views of one buffer. A free buffer is filled at once: the first layers of the next pass
arrive while the draft model works.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from statistics import median
from threading import Lock
from typing import Any, Protocol

import torch

from edgespec.errors import EdgespecError, ModelError, NoRoom
from edgespec.machine.memory import format_size
from edgespec.machine.system import read_buffer
from edgespec.weights.plan import BUFFERS

MOST_BUFFERS = 8  # where memory is left: more layers arrive while the draft model works
PROBE = 2**26  # bytes of a copy that measures a link
PROBES = 9  # the first ones wake up idle links
PIECE = 2**25  # bytes of a copy to a GPU, which small ones in the same direction wait for
ALIGNMENT = 256  # bytes, of a tensor's start in a block


class Feeds(Protocol):
    """Moves blocks to the device's buffers in a thread of its own, in the order of the calls.

    `ask` starts to move block `number` from disk to `target`, the memory of a released buffer; `send` one in memory.

    Attributes:
        wait_seconds: for which the host has waited for blocks.
        sources: of the blocks, by number.
        pinned: the host memory that they are read into is.
    """

    wait_seconds: float
    sources: Sequence[Any]
    pinned: bool

    def ask(self, buffer: int, target: Any, number: int) -> None: ...

    def send(self, buffer: int, target: Any, source: Any) -> None: ...

    def wait(self, buffer: int) -> None:
        """Return when the copy engine's `fill` was called for the buffer's last block.

        Raises:
            ModelError: the block cannot be read.
        """

    def close(self) -> None: ...


class CopyEngine(Protocol):
    """Copies blocks into device buffers, in the order of the calls, while the device computes."""

    def fill(self, buffer: int, target: Any, source: Any) -> None:
        """Copy `source` to `target`, the buffer's memory, once all work before the last `release` has ended."""

    def wait(self, buffer: int) -> None:
        """Let later computation wait until the buffer is filled."""

    def release(self, buffer: int) -> None:
        """Mark the end of the work submitted so far; a later `fill` waits for it."""

    def finish(self, buffer: int) -> None:
        """Return when the buffer is filled; its source may change then."""

    def waited(self) -> float:
        """
        Returns:
            Seconds that computation has waited, in all passes; call it after a pass.
        """

    def close(self) -> None: ...


class HostCopies(CopyEngine):
    """Copies at once, for a device that computes in host memory."""

    def __init__(self, device: Any, buffers: int) -> None:
        pass

    def fill(self, buffer: int, target: Any, source: Any) -> None:
        target.copy_(source)

    def waited(self) -> float:
        return 0.0


class CudaCopies:
    """Copies on a separate CUDA stream, which events synchronise with the computation."""

    def __init__(self, device: Any, buffers: int) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._filled = [torch.cuda.Event() for _ in range(buffers)]
        self._free = [torch.cuda.Event() for _ in range(buffers)]
        self._gap = torch.zeros(1, device=device)
        self._waits = deque[tuple[Any, Any]]()  # events before, after
        self._seconds = 0.0
        self._counting = Lock()  # metrics ask in the server's thread, also during a pass

    def fill(self, buffer: int, target: Any, source: Any) -> None:
        self._stream.wait_event(self._free[buffer])  # returns at once if it was never recorded
        with torch.cuda.stream(self._stream):
            for piece, of_source in zip(target.split(PIECE), source.split(PIECE), strict=True):
                piece.copy_(of_source, non_blocking=True)
                self._gap.zero_()  # a kernel between two copies, so that another stream's copy gets its turn
            self._filled[buffer].record(self._stream)

    def wait(self, buffer: int) -> None:
        stream = torch.cuda.current_stream(self._device)
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record(stream)
        stream.wait_event(self._filled[buffer])
        after.record(stream)
        self._waits.append((before, after))
        if self._counting.acquire(blocking=False):  # else another thread counts
            try:
                while self._waits and self._waits[0][1].query():  # nobody asks for a draft's
                    self._count()
            finally:
                self._counting.release()

    def release(self, buffer: int) -> None:
        self._free[buffer].record(torch.cuda.current_stream(self._device))

    def finish(self, buffer: int) -> None:
        self._filled[buffer].synchronize()

    def waited(self) -> float:
        with self._counting:
            while self._waits:
                self._count()
            return self._seconds

    def _count(self) -> None:
        before, after = self._waits.popleft()
        after.synchronize()
        self._seconds += before.elapsed_time(after) / 1000

    def close(self) -> None:
        self._stream.synchronize()


def link_speeds(devices: Sequence[Any]) -> list[float]:
    """
    Returns:
        Bytes per second that reach each GPU from pinned memory while all of them copy.
    """
    host = torch.empty(PROBE, dtype=torch.uint8, pin_memory=True)
    timed = list[tuple[Any, Any]]()
    for device in [*devices] * PROBES:
        with torch.cuda.device(device):
            target = torch.empty(PROBE, dtype=torch.uint8, device=device)
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record()
            target.copy_(host, non_blocking=True)
            after.record()
        timed.append((before, after))
    for _, after in timed:
        after.synchronize()
    times = [before.elapsed_time(after) for before, after in timed]
    return [1000 * PROBE / median(times[i :: len(devices)]) for i in range(len(devices))]


class Block:
    """A layer's weights in consecutive bytes.

    Attributes:
        size: bytes.
        host: the bytes in host memory; None: they are on disk.
        pinned_for: the GPU for which the memory is pinned; None: it is not.
    """

    def __init__(self, layer: Any, pin: Any, copy: bool = True) -> None:
        """
        Args:
            layer: loses its weights until `bind`.
            pin: the GPU for which the block's memory is pinned; None: it is not.
            copy: copy the weights to host memory; False: they are on disk.
        """
        self.size = block_bytes(layer)
        self.host: Any = page_aligned(self.size) if copy else None
        self.pinned_for = pin if pin is not None and pin_memory(self.host, pin) else None
        self._places = list[tuple[dict[str, Any], str, bool, int, Any]]()  # as `stored_tensors`, offset, meta tensor
        offset = 0
        for _, store, name, is_parameter in list(stored_tensors(layer)):
            tensor = store[name]
            if copy:
                _view(self.host, offset, tensor).copy_(tensor.detach())
            self._places.append((store, name, is_parameter, offset, torch.empty_like(tensor, device="meta")))
            offset += aligned(tensor.nbytes)
            store[name] = None

    def lies_as(self, size: int, offsets: Sequence[int]) -> None:
        """Use the block's size on disk, and the offsets of its tensors there."""
        self.size = size
        self._places = [
            (store, name, is_parameter, offset, like)
            for (store, name, is_parameter, _, like), offset in zip(self._places, offsets, strict=True)
        ]

    def bind(self, buffer: Any) -> None:
        """Make the layer's weights views of `buffer`."""
        for store, name, is_parameter, offset, like in self._places:
            view = _view(buffer, offset, like)
            store[name] = torch.nn.Parameter(view, requires_grad=False) if is_parameter else view

    def close(self) -> None:
        if self.pinned_for is not None:
            unpin_memory(self.host, self.pinned_for)
        self.pinned_for = None


def page_aligned(size: int) -> Any:
    """New host memory that shares no page, since a page can be pinned only once."""
    return torch.frombuffer(read_buffer(size), dtype=torch.uint8)


def needs_pinning(device: Any) -> bool:
    return bool(device.type == "cuda")


def pin_memory(host: Any, device: Any) -> bool:
    """
    Args:
        host: memory.
        device: the GPU; on another one, too, CUDA would take memory.

    Returns:
        False: CUDA refuses, as where the system limits pinned memory.
    """
    # PyTorch's own pinned memory has sizes of powers of two.
    with torch.cuda.device(device):
        if int(torch.cuda.cudart().cudaHostRegister(host.data_ptr(), host.numel(), 0)) == 0:
            return True
        with suppress(RuntimeError, AssertionError):
            torch.zeros(1, device=device)  # the next kernel would raise CUDA's last error
    return False


def unpin_memory(host: Any, device: Any) -> None:
    with torch.cuda.device(device):
        torch.cuda.cudart().cudaHostUnregister(host.data_ptr())


def stored_tensors(layer: Any) -> Iterator[tuple[str, dict[str, Any], str, bool]]:
    """
    Yields:
        For each tensor of a module and its children: the child's name and a dot, or "", the dictionary that has the
        tensor, its key there, and True for a parameter.
    """
    for module_name, module in layer.named_modules():
        for store, is_parameter in ((module._parameters, True), (module._buffers, False)):
            for name in [name for name, tensor in store.items() if tensor is not None]:
                yield f"{module_name}." if module_name else "", store, name, is_parameter


def layout(layer: Any) -> list[tuple[str, str, tuple[int, ...]]]:
    """Name, type and shape of each tensor of a layer, as they follow in its block."""
    return [
        (f"{prefix}{name}", str(store[name].dtype), tuple(store[name].shape))
        for prefix, store, name, _ in stored_tensors(layer)
    ]


def aligned(size: int) -> int:
    """Bytes of a block that a tensor of `size` bytes takes."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def _view(block: Any, offset: int, like: Any) -> Any:
    """The tensor of `like`'s shape and type that starts `offset` bytes into the block."""
    return block[offset : offset + like.numel() * like.element_size()].view(like.dtype).view(like.shape)


def block_bytes(layer: Any) -> int:
    return sum(aligned(store[name].nbytes) for _, store, name, _ in stored_tensors(layer))


class Streamer:
    """Fills buffers with the weights of `layers`, in order, pass after pass."""

    def __init__(
        self,
        layers: Sequence[Any],
        blocks: Sequence[Block],
        device: Any,
        engine: CopyEngine,
        feeder: "Feeds | None" = None,
        buffers: int = BUFFERS,
        sent: Collection[int] = (),
    ) -> None:
        """
        Args:
            layers: the streamed layers in the order in which they compute.
            blocks: their weights.
            device: where they compute.
            engine: that copies.
            feeder: of the blocks on disk, which it numbers from 0 in order, and of those that are sent.
            buffers: number of buffers on the device.
            sent: blocks in memory that is not pinned: their copies return late, so a pass does not start them.
        """
        size = max(block.size for block in blocks)
        self.layers, self.blocks = layers, blocks
        self.device = device
        self._engine = engine
        self.feeder = feeder
        on_disk = [i for i, block in enumerate(blocks) if block.host is None]
        self._numbers, self._sent = {i: number for number, i in enumerate(on_disk)}, sent
        self._buffers = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(buffers)]
        self._held: list[int | None] = [None] * buffers  # each buffer's layer, perhaps not filled yet
        self._due = list[int]()  # first layers of the next pass that wait for lower ones, with free buffers
        for i, block in enumerate(blocks):
            block.bind(self._buffers[i % buffers])
        for buffer in range(buffers):
            engine.release(buffer)  # earlier work of the device may still use this memory
        for i in range(min(buffers, len(layers))):
            self._fetch(i)
        self._hooks = [
            hook
            for i, layer in enumerate(layers)
            for hook in (
                layer.register_forward_pre_hook(self._before(i), with_kwargs=True),
                layer.register_forward_hook(self._after(i), with_kwargs=True),
            )
        ]

    def _fetch(self, i: int) -> None:
        buffer, block = i % len(self._buffers), self.blocks[i]
        self._held[buffer] = None  # should the copy fail
        target = self._buffers[buffer][: block.size]
        if self.feeder is not None and i in self._sent:
            self.feeder.send(buffer, target, block.host)
        elif block.host is not None:
            self._engine.fill(buffer, target, block.host)
        elif self.feeder is not None:
            self.feeder.ask(buffer, target, self._numbers[i])
        self._held[buffer] = i

    def _before(self, i: int) -> Callable[..., None]:
        buffer = i % len(self._buffers)

        def hook(*_: Any) -> None:
            if self._held[buffer] != i:  # after an interrupted pass
                with suppress(ModelError):
                    self._await(buffer)
                self._engine.release(buffer)
                self._fetch(i)
            self._await(buffer)
            self._engine.wait(buffer)

        return hook

    def _await(self, buffer: int) -> None:
        """Wait until a block of the feeder was given to the copy engine."""
        held = self._held[buffer]
        if (held in self._numbers or held in self._sent) and self.feeder is not None:
            try:
                self.feeder.wait(buffer)
            except EdgespecError:
                self._held[buffer] = None
                raise

    def _after(self, i: int) -> Callable[..., None]:
        buffer = i % len(self._buffers)
        following = i + len(self._buffers)
        following = following if following < len(self.blocks) else buffer  # of the next pass

        def hook(*_: Any) -> None:
            self._engine.release(buffer)
            due, self._due = sorted([*self._due, following]), []
            for layer in due:
                if layer in self._numbers and any(self._held[lower] != lower for lower in self._lower_on_disk(layer)):
                    self._due.append(layer)  # the feeder takes a lower layer after a higher one as a new pass
                elif self._held[layer % len(self._buffers)] != layer:
                    self._fetch(layer)

        return hook

    def _lower_on_disk(self, layer: int) -> Iterable[int]:
        """Layers on disk that a pass asks for before one of its first layers; a later layer has none."""
        return self._numbers.keys() & range(layer) if layer < len(self._buffers) else ()

    @property
    def pinned(self) -> bool:
        return all(block.pinned_for is not None for block in self.blocks if block.host is not None) and (
            self.feeder is None or self.feeder.pinned
        )

    @property
    def wait_seconds(self) -> float:
        return self._engine.waited() + (self.feeder.wait_seconds if self.feeder else 0.0)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        if self.feeder:
            self.feeder.close()
        self._engine.close()
        for block in self.blocks:
            block.close()
        self._hooks, self._buffers, self.layers, self.blocks = [], [], [], []


def count_resident(
    memory: int, layer_bytes: Sequence[int], fixed: int, buffers: int = BUFFERS, what: str = "GPU memory"
) -> int:
    """
    Args:
        memory: bytes to use, of a device or of the host.
        layer_bytes: each layer's size.
        fixed: bytes of everything but the layers: embeddings, caches, room to compute.
        buffers: for streaming.
        what: kind of memory, for the error.

    Returns:
        Number of layers that can stay in `memory`.

    Raises:
        NoRoom: there is no room even for the buffers.
    """
    if fixed + sum(layer_bytes) <= memory:
        return len(layer_bytes)
    largest = max(layer_bytes)
    room = memory - fixed - buffers * largest
    if room < 0:
        least = format_size(fixed + buffers * largest, up=True)
        raise NoRoom(
            f"{format_size(memory)} of {what} cannot hold {buffers} layers of {format_size(largest)} besides the "
            f"{format_size(fixed)} of everything else: give at least {least}, or use a smaller context, budget or dtype"
        )
    return room // largest


def streamed_layers(count: int, resident: int) -> list[int]:
    """Choose streamed layers evenly among `count`, so that copies go on while resident layers compute."""
    streamed = count - resident
    return [i for i in range(count) if (i + 1) * streamed // count > i * streamed // count]
