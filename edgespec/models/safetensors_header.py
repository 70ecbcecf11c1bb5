"""The header of a safetensors file: where its tensors lie (https://github.com/huggingface/safetensors).

A file has 8 bytes with the header's length (little-endian), the header as JSON padded with spaces, and the tensors.
"""

import json
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from edgespec.errors import ModelError
from edgespec.machine.files import may_wait

MOST = 100_000_000  # bytes of a header; the format's own limit
ITEM_BITS = {
    "F64": 64, "I64": 64, "U64": 64, "F32": 32, "I32": 32, "U32": 32, "F16": 16, "BF16": 16, "I16": 16, "U16": 16,
    "I8": 8, "U8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "BOOL": 8,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Stored:
    """
    Attributes:
        name: of the tensor.
        dtype: as in the header, such as "BF16".
        shape: outermost dimension first.
        start: its first byte in the file; in the header, offsets count from the header's end.
        size: in bytes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    size: int


def read_safetensors_header(path: Path) -> list[Stored]:
    """All tensors of a file, in the order in which they lie there.

    Raises:
        ModelError: it cannot be read, is damaged or cut off.
    """
    if may_wait(path):
        raise ModelError(f"{path}: is a pipe or a device, not a file")
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > MOST:
                raise ValueError("too long")
            header = json.loads(file.read(length))
        end = path.stat().st_size
        found = [_stored(name, entry, 8 + length) for name, entry in header.items() if name != "__metadata__"]
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from error
    except (struct.error, ValueError, AttributeError, KeyError, TypeError, RecursionError) as error:
        raise ModelError(f"{path}: its header is damaged: this is no safetensors file") from error
    if any(tensor.start + tensor.size > end for tensor in found):
        raise ModelError(f"{path}: is cut off: its tensors go on behind byte {end}, where it ends")
    return sorted(found, key=lambda tensor: tensor.start)


def _stored(name: str, entry: dict[str, Any], data: int) -> Stored:
    dtype, shape = entry["dtype"], entry["shape"]
    first, last = entry["data_offsets"]
    if any(type(number) is not int or number < 0 for number in (first, last - first, *shape)):
        raise ValueError(f"{name} lies at {first} to {last}")
    if dtype in ITEM_BITS and prod(shape) * ITEM_BITS[dtype] != 8 * (last - first):
        raise ValueError(f"{name} has {last - first} bytes, but shape {shape} of {dtype}")
    return Stored(name, dtype, tuple(shape), data + first, last - first)
