"""A skeleton of a mixture: its GGUF with dense weights first, and experts in a hole at the end, which takes no disk.

Metal maps a file from the first to the last weight of its GPU, and keeps all in between in memory. In most files that
is every expert. A skeleton has the weights in the order of `places`, so what a GPU maps has no others in between.

Skeletons lie in the cache folder. Each names its model, and goes with it, or where others need its room.
"""

import ctypes
import hashlib
import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from shutil import disk_usage
from typing import Any

from edgespec.errors import ModelError, failing_as
from edgespec.loop.engines import Progress
from edgespec.machine.disk import HEADROOM
from edgespec.machine.files import cache_folder, is_abandoned, replacing, size_on_disk
from edgespec.machine.measurements import identity
from edgespec.machine.memory import format_size
from edgespec.models.gguf_header import header_values
from edgespec.weights.experts import ExpertLayer
from edgespec.weights.plan import Tensor, count_layers, places

from .files import all_tensors, cut_off, ggml_base, open_table, parts

MOST_BYTES = 32 << 30  # of all skeletons; those used last stay
PIECE = 16 << 20  # bytes copied at once
SOURCE, IDENTITY = "edgespec.source", "edgespec.identity"  # keys: the model's path, and what it was like
OF_PARTS = ("split.no", "split.count", "split.tensors.count", "general.alignment")  # keys that are not copied


def skeleton_tensors(path: str, layers: Sequence[ExpertLayer], tensors: Sequence[Tensor]) -> list[Tensor]:
    """Tensors of a model with their places in its skeleton, which need not exist; all else as for `skeleton`."""
    with _outline(path, _left_out(layers)) as (header, moves):
        base = ggml_base().gguf_get_meta_size(header)
        starts = {tensor.name: base + place for tensor, place in moves}
        return [replace(tensor, file=0, start=starts[tensor.name]) for tensor in tensors]


def skeleton(path: str, layers: Sequence[ExpertLayer], progress: Progress) -> str:
    """
    Args:
        path: of the model; for a split one its first file.
        layers: whose experts are left out; their biases are not.
        progress: called with bytes written and in all, if it is written.

    Returns:
        Path of the model's skeleton.

    Raises:
        ModelError: the model cannot be read, or the skeleton not written.
    """
    about, folder, experts = _about_model(path), cache_folder() / "skeletons", _left_out(layers)
    found = folder / f"{Path(path).stem}-{hashlib.sha256(about[SOURCE].encode()).hexdigest()[:16]}.gguf"
    with failing_as(ModelError, f"{found}: cannot be written"):
        folder.mkdir(parents=True, exist_ok=True)
        if _about(found) == about:
            os.utime(found)
            _make_room(folder, MOST_BYTES)
            return str(found)
        with _outline(path, experts) as (table, moves):
            needed = sum(one.size for one, _ in moves if one.name not in experts)
            _make_room(folder, MOST_BYTES - needed)
            if disk_usage(folder).free < needed + HEADROOM:
                raise ModelError(
                    f"{folder}: has no room for the {format_size(needed, up=True)} of a skeleton of {path}"
                )
            with replacing(found) as new:
                _write(new, table, path, moves, experts, progress)
                if _about_model(path) != about:
                    raise ModelError(f"{path}: was changed while it was copied: start again")
    return str(found)


def _left_out(layers: Sequence[ExpertLayer]) -> set[str]:
    return {tensor.name for layer in layers for tensor in layer.tensors if tensor.name.endswith(".weight")}


def _about_model(path: str) -> dict[str, str]:
    return {SOURCE: os.path.realpath(path), IDENTITY: identity(path)}


def _about(path: Path) -> dict[str, Any]:
    """Keys in which a skeleton names its model; {}: it is none, or damaged."""
    try:
        return header_values(str(path), "edgespec.")
    except ModelError:
        return {}


def _is_current(about: dict[str, Any]) -> bool:
    try:
        return os.path.isfile(about.get(SOURCE, "")) and _about_model(about[SOURCE]) == about
    except OSError:  # a part is gone
        return False


def _make_room(folder: Path, room: int) -> None:
    """Delete skeletons of models that are gone or changed, and beyond `room` bytes those used longest ago."""
    for left in folder.glob(".*.new"):
        if is_abandoned(left):
            left.unlink()
    for path in sorted(folder.glob("*.gguf"), key=lambda path: -path.stat().st_mtime):
        room -= size_on_disk(path)
        if room < 0 or not _is_current(_about(path)):
            room += size_on_disk(path)
            path.unlink()


@contextmanager
def _outline(path: str, experts: Collection[str]) -> Iterator[tuple[Any, list[tuple[Tensor, int]]]]:
    """A skeleton's header, and the model's tensors with their places behind it."""
    tensors, library = all_tensors(path), ggml_base()
    count = count_layers(tensors)
    place = {tensor.name: number for number, tensor in sorted(places(tensors, count), key=lambda pair: pair[0])}
    tensors.sort(key=lambda tensor: (tensor.name in experts, place[tensor.name]))
    with ExitStack() as stack:
        header = library.gguf_init_empty()
        stack.callback(library.gguf_free, header)
        described = list[Any]()
        for part in parts(path):
            described.append(ctypes.c_void_p())
            table = stack.enter_context(open_table(part, described[-1]))
            stack.callback(library.ggml_free, described[-1])
            if part == path:
                library.gguf_set_kv(header, table)
        for key in OF_PARTS:
            library.gguf_remove_key(header, key.encode())
        for key, value in _about_model(path).items():
            library.gguf_set_val_str(header, key.encode(), os.fsencode(value))
        for tensor in tensors:
            library.gguf_add_tensor(header, library.ggml_get_tensor(described[tensor.file], tensor.name.encode()))
        yield header, [(tensor, library.gguf_get_tensor_offset(header, i)) for i, tensor in enumerate(tensors)]


def _write(
    new: Path, header: Any, path: str, moves: Sequence[tuple[Tensor, int]], experts: Collection[str], progress: Progress
) -> None:
    library, files = ggml_base(), parts(path)
    if not library.gguf_write_to_file(header, os.fsencode(new), True):
        raise OSError("llama.cpp cannot write its header")
    base, done = library.gguf_get_meta_size(header), 0
    total = sum(tensor.size for tensor, _ in moves if tensor.name not in experts)
    with new.open("r+b") as target, ExitStack() as stack:
        sources = [stack.enter_context(open(file, "rb")) for file in files]
        for tensor, place in moves:
            if tensor.name in experts:
                continue
            sources[tensor.file].seek(tensor.start)
            target.seek(base + place)
            left = tensor.size
            while left and (piece := sources[tensor.file].read(min(left, PIECE))):
                left -= target.write(piece)
                done += len(piece)
                progress(done, total)
            if left:
                raise ModelError(cut_off(files[tensor.file]))
        target.truncate(base + moves[-1][1] + moves[-1][0].size)
