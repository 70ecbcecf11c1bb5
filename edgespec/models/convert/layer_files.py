"""A model folder with every layer in a file of its own, whose tensors begin on a page of memory.

An engine that streams a layer then reads one run of whole pages, straight to its place. Each layer needs a file, since
safetensors allows padding only in the header, not between tensors.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path

from edgespec.models.safetensors_header import Stored, read_safetensors_header

PAGE = 16384  # bytes; a Mac's, and a multiple of all others'
PIECE = 1 << 24  # bytes copied at once
LAYER = re.compile(r"(?:\w+\.)*?layers\.(\d+)\.")


def write_layer_files(folder: Path, progress: Callable[[int, int], None]) -> None:
    """Replace a folder's model*.safetensors: one file for the weights outside layers, then one for each layer.

    The old files go when all new ones are complete, so the disk needs room for a second copy of the weights.

    Args:
        folder: changed in place.
        progress: called with bytes copied and in all.

    Raises:
        ModelError: a file is damaged.
        OSError: a file cannot be written.
    """
    old = sorted(folder.glob("model*.safetensors"))
    tensors = [(path, tensor) for path in old for tensor in read_safetensors_header(path)]
    groups: dict[int, list[tuple[Path, Stored]]] = {}
    for path, tensor in tensors:
        match = LAYER.match(tensor.name)
        groups.setdefault(int(match[1]) if match else -1, []).append((path, tensor))
    done, total = 0, sum(tensor.size for _, tensor in tensors)
    names = [f"model-{i + 1:05}-of-{len(groups):05}.safetensors" for i in range(len(groups))]
    new, weight_map = list[Path](), dict[str, str]()
    for name, number in zip(names, sorted(groups), strict=True):
        new.append(folder / f"{name}.new")
        with new[-1].open("wb") as file:
            file.write(_header([tensor for _, tensor in groups[number]]))
            for path, tensor in groups[number]:
                with path.open("rb") as source:
                    source.seek(tensor.start)
                    left = tensor.size
                    while left:
                        left -= file.write(source.read(min(left, PIECE)))
                done += tensor.size
                weight_map[tensor.name] = name
                progress(done, total)
    index = folder / "model.safetensors.index.json"
    for path in (*old, index):
        path.unlink(missing_ok=True)
    for path in new:
        path.rename(path.with_suffix(""))
    index.write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2) + "\n", "utf-8"
    )


def _header(tensors: list[Stored]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "mlx"}}
    offset = 0
    for tensor in tensors:
        places = [offset, offset + tensor.size]
        entries[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": places}
        offset += tensor.size
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % PAGE)
    return len(text).to_bytes(8, "little") + text
