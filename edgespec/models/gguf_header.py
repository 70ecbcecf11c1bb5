"""Checks of a GGUF file, and single values from its header, read without an engine and without the package gguf.

The layout is that of ggml's gguf.h, versions 2 and 3: magic, version, number of tensors, number of keys. Lists, such as
the vocabulary, are skipped.
"""

import os
import struct
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any

import numpy as np

from edgespec.errors import ModelError
from edgespec.machine.files import no_file, part_names

Value = int | float | bool | str

NUMBER, LENGTH = struct.Struct("<I"), struct.Struct("<Q")
FLOAT32, STRING, LIST = 6, 8, 9
SCALARS = {
    kind: struct.Struct("<" + code)
    for kind, code in enumerate(["B", "b", "H", "h", "I", "i", "f", "?", None, None, "Q", "q", "d"])
    if code
}
VERSIONS = (2, 3)
KEYS = 24  # bytes before the first key
MOST_PARTS = 2**16 - 1
MOST_LAYERS = 512  # LLAMA_MAX_LAYERS of llama-hparams.h
LARGEST = 2**32 - 1  # number of a header
ONLY_DECODERS = "edgespec runs models that only decode, such as Llama, Qwen and Gemma"
NO_MODELS = {  # general.type or general.architecture of other files -> what they are, and what would be right
    "adapter": (
        "an adapter (LoRA)",
        "merge it into its model, as llama.cpp's llama-export-lora does, and name that file",
    ),
    "clip": ("the image part of a model", "name the file with its text part"),
    "controlvector": ("a control vector", "name the file of its model"),
    "imatrix": ("an importance matrix", "it is for edgespec convert --imatrix"),
    "mmproj": ("the image part of a model", "name the file with its text part"),
    "t5": ("a model with an encoder", ONLY_DECODERS),
    "t5encoder": ("a model with an encoder", ONLY_DECODERS),
}
NO_GGUFS = {  # how other files begin -> what they are, and what would be right
    b"": "empty: fetch or copy it again",
    b"vers": "a pointer of Git LFS: git lfs pull fetches the file",
    b"<!do": "a web page: fetch the file itself, whose address has /resolve/ in place of /blob/",
    b"PK\x03\x04": "an archive, such as weights of PyTorch: edgespec runs GGUF files, and folders with safetensors",
}
MOST_BYTES = 1 << 26  # of a header: vocabularies have some megabytes
MOST_ENTRIES = 1 << 16  # keys, and tensors: llama.cpp compares each with all others
OF_STATES = ("ssm.", "shortconv.", "wkv.", "kda.")  # keys of recurrent layers start with these (llama-arch.cpp)


def check_magic(path: str | Path) -> None:
    """
    Raises:
        ModelError: there is no such file, or it is not a GGUF.
    """
    file = Path(path)
    if not file.exists():
        raise no_file(path)
    if not file.is_file():
        raise ModelError(f"{path}: is a {'folder' if file.is_dir() else 'pipe or a device'}, not a GGUF file")
    if (magic := _magic(file)) != b"GGUF":
        if file.suffix == ".safetensors":
            raise ModelError(f"{path}: is a part of a model folder: name the folder, with config.json in it")
        other = NO_GGUFS.get(magic.lower() if magic[:1] == b"<" else magic)
        raise ModelError(f"{path}: is not a GGUF file{f' but {other}' if other else f' (it starts with {magic!r})'}")


def check_model(path: str | Path, *, weights: bool = True) -> None:
    """
    Args:
        path: of a GGUF; of a split one, the first part.
        weights: it must have some.

    Raises:
        ModelError: as for `header_values`, or the file holds something else than a model.
    """
    name = str(path)
    for key in ("general.type", "general.architecture"):
        for kind in header_values(name, key).values():
            if kind in NO_MODELS:
                what, right = NO_MODELS[str(kind)]
                raise ModelError(f"{path}: is {what}, not a model that writes text: {right}")
    split = {
        key: whole_number(name, header_values(name, key), key, 0, MOST_PARTS) for key in ("split.no", "split.count")
    }
    number, count = split.values()
    if number:
        raise ModelError(f"{path}: is part {number + 1} of {count} of a model: name the first part")
    if count > len(part_names(Path(path).name)):
        raise ModelError(
            f"{path}: is one of {count} parts, but its name does not say so: rename the parts to "
            f"NAME-00001-of-{count:05}.gguf and so on"
        )
    (tensors,) = _list(name, lambda view: iter(LENGTH.unpack_from(view, 8)))
    if weights and not tensors and not count:
        raise ModelError(f"{path}: is a tokenizer without weights, not a model: name a file that has them")
    if own_values(name).get("attention.causal") is False:
        raise ModelError(f"{path}: is a model of embeddings or of diffusion: {ONLY_DECODERS}")


def is_gguf(path: str | Path) -> bool:
    return _magic(path) == b"GGUF"


def _magic(path: str | Path) -> bytes:
    with open(path, "rb") as stream:
        return stream.read(4)


def header_values(path: str, prefix: str) -> dict[str, Value]:
    """Values of all keys that start with `prefix`, without lists; float32 as the shortest decimal that rounds to it.

    Raises:
        ModelError: the file is missing, not a GGUF, or damaged.
    """
    return {key: value for key, value, length in _read(path, prefix) if length is None}


def tensor_names(path: str) -> set[str]:
    """Of one GGUF file; errors as for `header_values`."""
    try:
        return {name.decode() for name in _names(path)}
    except UnicodeDecodeError as error:
        raise damaged(path) from error


def check_header(path: str | Path) -> None:
    """Walk through a header, before an engine or package takes its numbers for true; errors as for `header_values`."""
    _names(str(path))


def _read(path: str, prefix: str) -> list[tuple[str, Value, int | None]]:
    start = prefix.encode()
    try:
        return [
            (key.decode(), _value(raw, kind), LENGTH.unpack_from(raw, NUMBER.size)[0] if kind == LIST else None)
            for key, kind, raw in _cached(path)[0]
            if key.startswith(start)
        ]
    except (struct.error, UnicodeDecodeError) as error:
        raise damaged(path) from error


def _cached(path: str) -> tuple[list[tuple[bytes, int, bytes]], int]:
    check_magic(path)
    found = os.stat(path)
    return _header(path, found.st_size, found.st_mtime_ns)


@lru_cache(16)
def _header(path: str, size: int, changed: int) -> tuple[list[tuple[bytes, int, bytes]], int]:
    """Each key, the type of its value, and its bytes, of a list only those before the first item; and the keys' end."""
    found = _list(
        path,
        lambda view: (
            (key, kind, view[at : at + NUMBER.size + LENGTH.size if kind == LIST else end], end)
            for key, kind, at, end in _keys(view)
        ),
    )
    return [(key, kind, raw) for key, kind, raw, _ in found], found[-1][3] if found else KEYS


def _list(path: str, read: Callable[[mmap], Iterator[Any]]) -> list[Any]:
    try:
        size = min(os.path.getsize(path), MOST_BYTES)
        with open(path, "rb") as file, mmap(file.fileno(), size, access=ACCESS_READ) as view:
            return list(read(view))
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from error
    except (struct.error, KeyError, OverflowError, RecursionError) as error:
        raise damaged(path) from error


def damaged(path: str | Path) -> ModelError:
    return ModelError(f"{path}: is damaged or cut off, or a newer kind of GGUF: fetch or copy it again")


def architecture(path: str) -> str:
    """`general.architecture`; "": it is not stated."""
    return str(header_values(path, "general.architecture").get("general.architecture", ""))


def own_values(path: str) -> dict[str, Value]:
    """Values of the model's architecture, without lists, by names such as "block_count" for "llama.block_count".

    Raises:
        ModelError: as for `header_values`.
    """
    return own_header(path)[0]


def own_header(path: str) -> tuple[dict[str, Value], dict[str, int]]:
    """As `own_values`, and the lengths of the lists, by the same names; errors as for `header_values`."""
    prefix = f"{architecture(path)}."
    own = [(key.removeprefix(prefix), value, length) for key, value, length in _read(path, prefix)]
    values = {key: value for key, value, length in own if length is None}
    return values, {key: length for key, _, length in own if length is not None}


def whole_number(path: str, values: Mapping[str, Value], key: str, low: int, high: int) -> int:
    """The value of a key, `low` where the file has none; errors as for `check_header_number`."""
    return check_header_number(f"{path}: ", key, values.get(key, low), low, high)


def check_header_number(where: str, key: str, value: object, low: int, high: int) -> int:
    """
    Args:
        where: begins the message.
        key: of a header.
        value: of the key.
        low: that is right.
        high: that is right.

    Raises:
        ModelError: the value is no whole number from `low` to `high`.
    """
    if type(value) is not int or not low <= value <= high:
        raise ModelError(f"{where}is damaged: {key} is {value!r}, but must be a whole number from {low} to {high}")
    return value


def has_states(path: str) -> bool:
    return any(key.startswith(OF_STATES) for key in own_values(path))


def _names(path: str) -> list[bytes]:
    _, end = _cached(path)
    return _list(path, lambda view: _tensors(view, end))


def _tensors(view: mmap, at: int) -> Iterator[bytes]:
    for _ in range(_count(view, 8)):
        start, at = at + LENGTH.size, _after_string(view, at)
        yield view[start:at]
        (dimensions,) = NUMBER.unpack_from(view, at)
        at += NUMBER.size + LENGTH.size * int(dimensions) + NUMBER.size + LENGTH.size


def _keys(view: mmap) -> Iterator[tuple[bytes, int, int, int]]:
    """Each key, the type of its value, and where the value begins and ends."""
    (version,) = NUMBER.unpack_from(view, 4)
    if version not in VERSIONS:
        raise KeyError(version)
    at = KEYS
    for _ in range(_count(view, 16)):
        start, at = at + LENGTH.size, _after_string(view, at)
        key = view[start:at]
        (kind,) = NUMBER.unpack_from(view, at)
        at += NUMBER.size
        end = _after(view, at, kind)
        yield key, kind, at, end
        at = end


def _count(view: mmap, at: int) -> int:
    (count,) = LENGTH.unpack_from(view, at)
    if count > MOST_ENTRIES:
        raise KeyError(count)
    return int(count)


def _value(raw: bytes, kind: int) -> Value:
    if kind == LIST:
        return 0
    if kind == STRING:
        return raw[LENGTH.size :].decode()
    value: Value = SCALARS[kind].unpack_from(raw)[0]
    return float(str(np.float32(value))) if kind == FLOAT32 else value


def _after(view: mmap, at: int, kind: int) -> int:
    if kind == STRING:
        return _after_string(view, at)
    if kind != LIST:
        return at + SCALARS[kind].size
    (inner,) = NUMBER.unpack_from(view, at)
    (count,) = LENGTH.unpack_from(view, at + NUMBER.size)
    at += NUMBER.size + LENGTH.size
    end = _within(view, at + int(count) * (LENGTH if inner == STRING else SCALARS[inner]).size)
    if inner != STRING:
        return end
    for _ in range(count):
        at = _after_string(view, at)
    return at


def _after_string(view: mmap, at: int) -> int:
    return _within(view, at + LENGTH.size + int(LENGTH.unpack_from(view, at)[0]))


def _within(view: mmap, end: int) -> int:
    if end > len(view):
        raise KeyError(end)
    return end
