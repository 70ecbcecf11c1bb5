"""Layers that host memory cannot hold: each pass reads them from disk, and copies them to the device.

The threads of `edgespec/weights/ring.py` fill host buffers; `Feeder`'s thread starts the copies to the device. A layer
is read from the model's file if its tensors lie there together, else from a copy (`Pack`).
"""

import hashlib
import json
import math
import os
import queue
import shutil
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from edgespec.errors import EdgespecError, ModelError, failing_as
from edgespec.machine.disk import recall_reading
from edgespec.machine.files import is_abandoned, replacing
from edgespec.models.safetensors_header import Stored, read_safetensors_header
from edgespec.weights import ring
from edgespec.weights.direct_io import ALIGNED, DirectFiles
from edgespec.weights.plan import Extent, Layer, Plan

from .offload import CopyEngine, page_aligned, pin_memory, stored_tensors, unpin_memory

STAGING = 3  # host buffers: one is filled, one is full, one is copied
NUMBER = 16  # bytes; alignment that kernels need
FOLDER = ".edgespec"  # of packs, in the model's folder
LAYOUT = 2  # version of packs


@dataclass(frozen=True, slots=True)
class Source:
    path: str
    start: int
    size: int


class Staging:
    """See `edgespec.weights.ring.Slots`; slots are host buffers.

    Attributes:
        pinned: all buffers are.
    """

    def __init__(self, sources: Sequence[Source], pin: Any) -> None:
        """
        Args:
            sources: of the blocks, by number.
            pin: the GPU for which the buffers are pinned; None: they are not.

        Raises:
            OSError: a file cannot be opened.
        """
        self.sources = sources
        paths = list(dict.fromkeys(source.path for source in sources))
        self._pinned, self._pin = list[Any](), pin
        self._files = DirectFiles(paths)
        self._skip = [source.start % ALIGNED for source in sources]  # bytes before the block in its first page
        self._sizes = [source.size for source in sources]
        extents = [
            self._files.whole_pages(Extent(paths.index(source.path), source.start, source.start + source.size))
            for source in sources
        ]
        layers = tuple(Layer(number, (extent,)) for number, extent in enumerate(extents))
        self.plan = Plan(0, 0, (), layers, (), min(STAGING, len(layers)), len(layers))
        size = max(extent.size for extent in extents) + ALIGNED
        try:
            self._buffers = [page_aligned(size) for _ in range(self.plan.slots)]
            for buffer in self._buffers if pin is not None else []:
                if not pin_memory(buffer, pin):
                    break
                self._pinned.append(buffer)
            self.pinned = len(self._pinned) == len(self._buffers)
        except BaseException:
            self.close()
            raise
        self._offsets = [-buffer.data_ptr() % ALIGNED for buffer in self._buffers]

    def block(self, slot: int, number: int) -> Any:
        start = self._offsets[slot] + self._skip[number]
        return self._buffers[slot][start : start + self._sizes[number]]

    def check(self) -> None:
        self._files.check()

    def read(self, slot: int, layer: Layer, extent: Extent, start: int, stop: int) -> None:
        address = self._buffers[slot].data_ptr() + self._offsets[slot]
        self._files.read(extent.file, address + start - extent.start, start, stop)

    def show(self, slot: int, layer: Layer) -> None:
        pass

    def hide(self, slot: int, layer: Layer) -> None:
        pass

    def close(self) -> None:
        for buffer in self._pinned:
            unpin_memory(buffer, self._pin)
        self._files.close()
        self._pinned, self._buffers = [], []


class Feeder:
    """See `offload.Feeds`."""

    def __init__(self, staging: Staging | None, engine: CopyEngine, buffers: int) -> None:
        self.wait_seconds = 0.0
        self.sources = staging.sources if staging else []
        self.pinned = staging.pinned if staging else True
        self._staging: Any = staging
        self._engine = engine
        self._ring: Any = None  # None: no block is on disk
        if staging:
            how = recall_reading(staging.sources[0].path)
            self._ring = ring.Streamer(staging.plan, staging, how.threads, how.size)
        self._jobs = queue.SimpleQueue[tuple[int, Any, int, Any] | None]()
        self._changed = threading.Condition()
        self._asked, self._sent = [0] * buffers, [0] * buffers  # counts by buffer
        self._errors: list[EdgespecError | None] = [None] * buffers
        self._thread = threading.Thread(target=self._work, name="edgespec-feed", daemon=True)
        self._thread.start()

    def ask(self, buffer: int, target: Any, number: int) -> None:
        self._asked[buffer] += 1
        self._jobs.put((buffer, target, number, None))

    def send(self, buffer: int, target: Any, source: Any) -> None:
        self._asked[buffer] += 1
        self._jobs.put((buffer, target, -1, source))

    def wait(self, buffer: int) -> None:
        started = perf_counter()
        with self._changed:
            while self._sent[buffer] < self._asked[buffer]:
                self._changed.wait()
            self.wait_seconds += perf_counter() - started
            if error := self._errors[buffer]:
                raise error

    def _work(self) -> None:
        last: float = -1  # number of the last block
        broken: EdgespecError | None = None
        while job := self._jobs.get():
            buffer, target, number, source = job
            error: EdgespecError | None = None
            try:
                if broken:
                    raise broken
                if source is None:
                    if number <= last:  # a new pass
                        self._ring.finish()
                    if number <= last or last < 0:
                        self._ring.begin()
                    last = number
                    self._ring.enter(number)
                self._engine.fill(buffer, target, self._block(number) if source is None else source)
            except Exception as raised:  # else `wait` would not return
                if not isinstance(raised, EdgespecError):
                    raised = ModelError(f"a layer cannot be sent to the device: {raised}")
                error = raised
                last = math.inf if source is None else last  # so the next block begins a pass
            with self._changed:
                self._sent[buffer] += 1
                self._errors[buffer] = error
                self._changed.notify_all()
            if error is None and source is None:
                try:
                    self._engine.finish(buffer)
                    self._ring.leave(number)
                except Exception as raised:  # the host buffer may still be in use, so later blocks fail too
                    broken = ModelError(f"a layer was not sent to the device: {raised}")

    def _block(self, number: int) -> Any:
        return self._staging.block(self._ring.slot(number), number)

    def close(self) -> None:
        self._jobs.put(None)
        if self._ring:
            self._ring.stop()  # also ends the thread's wait for a layer
        self._thread.join()  # it may copy from a host buffer
        if self._ring:
            self._ring.close()


def find_run(layer: Any, prefix: str, stored: Mapping[str, tuple[str, Stored]]) -> tuple[Source, list[int]] | None:
    """
    Args:
        layer: as it was loaded.
        prefix: its name in the model, with a dot.
        stored: as from `read_folder`.

    Returns:
        The run of a layer's tensors in a file, and their offsets in the run. None if they are not one run, or differ
        from the layer in name, shape or type; bytes are not compared.
    """
    found = list[Stored]()
    paths = set[str]()
    for module_name, store, name, _ in stored_tensors(layer):
        path, one = stored.get(f"{prefix}{module_name}{name}", ("", None))
        if one is None or one.shape != tuple(store[name].shape) or TYPES.get(one.dtype) != store[name].dtype:
            return None
        paths.add(path)
        found.append(one)
    if len(paths) != 1:
        return None
    start, stop = min(one.start for one in found), max(one.start + one.size for one in found)
    offsets = [one.start - start for one in found]
    if sum(one.size for one in found) != stop - start or any(offset % NUMBER for offset in offsets):
        return None
    return Source(paths.pop(), start, stop - start), offsets


TYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "U8": torch.uint8}


def read_folder(folder: Path) -> dict[str, tuple[str, Stored]]:
    """
    Returns:
        File and place of each tensor of a folder, by name.

    Raises:
        ModelError: a file cannot be read.
    """
    return {
        one.name: (str(path), one)
        for path in sorted(folder.glob("*.safetensors"))
        for one in read_safetensors_header(path)
    }


def mapped_bytes(model: Any, folder: Path) -> int:
    """
    Returns:
        Bytes of the tensors of a model on the CPU that are mapped as its folder has them; others are copies in memory.

    Raises:
        ModelError: a file cannot be read.
    """
    # Names may differ, but a tensor that is put together, or of another type, has no equal in the folder.
    left, found = Counter((one.shape, TYPES.get(one.dtype)) for _, one in read_folder(folder).values()), 0
    for tensor in [*model.parameters(), *model.buffers()]:
        kind = tuple(tensor.shape), tensor.dtype
        if left[kind]:
            left[kind] -= 1
            found += tensor.nbytes
    return found


class Pack:
    """Blocks of layers, each in a file `.edgespec/KEY/NUMBER.bin`, which is written unless it is there.

    KEY depends on the form of the weights and the model's files. So each layer is written once, though more or fewer
    layers are on disk at the next start.
    """

    def __init__(self, folder: Path, form: str, sizes: Mapping[int, int]) -> None:
        """
        Args:
            folder: of the model.
            form: of the weights, such as "nf4".
            sizes: bytes of the layers' blocks, by number.

        Raises:
            ModelError: the disk has no room for the layers.
        """
        files = sorted(folder.glob("*.safetensors"))
        about = [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files]
        key = hashlib.sha256(json.dumps([LAYOUT, form, about]).encode()).hexdigest()[:16]
        self._folder = folder / FOLDER / key
        self._written = {layer for layer, size in sizes.items() if _take(self._path(layer), size)}
        self._remove_others()
        needed, free = sum(sizes[layer] for layer in sizes.keys() - self._written), shutil.disk_usage(folder).free
        if needed > free:
            raise ModelError(
                f"{self._folder}: layers that memory cannot hold are written there once, which takes "
                f"{needed / 1e9:.1f} GB, but only {free / 1e9:.1f} GB are free"
            )

    def _path(self, layer: int) -> Path:
        return self._folder / f"{layer}.bin"

    def add(self, layer: int, host: Any) -> Source:
        """
        Args:
            layer: its number.
            host: its block, which is written if the file is new.

        Raises:
            ModelError: it cannot be written.
        """
        path = self._path(layer)
        if layer not in self._written:
            with failing_as(ModelError, f"{path}: cannot be written"):
                path.parent.mkdir(parents=True, exist_ok=True)
                with replacing(path) as new, new.open("wb") as file:
                    file.write(memoryview(host.numpy()))
                    file.flush()
                    os.fsync(file.fileno())  # else a crash of the system can leave a whole file of zeros
        return Source(str(path), 0, host.numel())

    def _remove_others(self) -> None:
        """Remove files of other packs, and unfinished ones, that no program has used of late."""
        for other in list(self._folder.parent.glob("*/*")):
            with suppress(OSError):
                if is_abandoned(other) and (other.parent != self._folder or other.suffix != ".bin"):
                    other.unlink()
                    other.parent.rmdir()  # fails while there is anything in it


def _take(path: Path, size: int) -> bool:
    """True if a file is whole. Other programs do not remove it for `ABANDONED` seconds then."""
    try:
        if path.stat().st_size != size:
            return False
    except OSError:
        return False
    with suppress(OSError):  # of a folder that cannot be written
        os.utime(path)
    return True


def same_bytes(layer: Any, source: Source, offsets: Sequence[int]) -> bool:
    """
    Returns:
        True if a layer's tensors equal those on disk.

    Raises:
        ModelError: they cannot be read.
    """
    try:
        with Path(source.path).open("rb") as file:
            for (_, store, name, _), offset in zip(stored_tensors(layer), offsets, strict=True):
                file.seek(source.start + offset)
                tensor = store[name].detach().contiguous().flatten().view(torch.uint8)
                if bytes(memoryview(tensor.numpy())) != file.read(tensor.numel()):
                    return False
    except OSError as error:
        raise ModelError(f"{source.path}: cannot be read: {error.strerror}") from error
    return True
