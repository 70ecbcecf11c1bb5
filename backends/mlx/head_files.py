"""Folders of EAGLE-3 heads: see `head.py`."""

from math import prod
from pathlib import Path

from edgespec.errors import ModelError
from edgespec.models.heads import LAYER, eagle_config, own_name
from edgespec.models.safetensors_header import Stored, read_safetensors_header

from ..common.heads import TABLES, head_size
from .memory import PassSize, work_bytes


def head_tensors(path: str) -> dict[str, Stored]:
    files = sorted(Path(path).glob("*.safetensors"))
    if not files:
        raise ModelError(f"{path}: has no weights: there is no file *.safetensors")
    return {own_name(one.name, LAYER[1]): one for file in files for one in read_safetensors_header(file)}


def head_bytes(path: str, size: PassSize) -> int:
    """Bytes of a head that is loaded with the same options as its target, and stays in memory."""
    config, stored = eagle_config(path), head_tensors(path)
    weights, cell = head_size(stored.values())
    item = max(one.size // prod(one.shape) for one in stored.values() if one.name not in TABLES)
    return item * (weights + size.sessions * size.cells * cell) + work_bytes(config, size, item)
