"""Folders of EAGLE-3 heads: see `head.py`."""

import json
from math import prod
from pathlib import Path
from typing import Any

from edgespec.errors import ModelError
from edgespec.models.safetensors_header import Stored, read_safetensors_header

from ..common.heads import TABLES, head_size
from ..common.hf_vocab import check_folder, first_line
from .memory import PassSize, work_bytes

LAYER = ("midlayer.", "layers.0.")  # names of the only layer in published heads


def head_config(path: str) -> dict[str, Any]:
    try:
        config: dict[str, Any] = json.loads((check_folder(path) / "config.json").read_text("utf-8"))
        config |= config.get("transformer_layer_config") or {}  # where vLLM's speculators have the layer's
        rope = config.get("rope_parameters")  # where transformers 5 has the two below
        return config | ({"rope_theta": rope["rope_theta"], "rope_scaling": rope} if rope else {})
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise ModelError(f"{path}: config.json is damaged: {first_line(error)}") from error


def head_tensors(path: str) -> dict[str, Stored]:
    files = sorted(Path(path).glob("*.safetensors"))
    if not files:
        raise ModelError(f"{path}: has no weights: there is no file *.safetensors")
    return {head_name(one.name): one for file in files for one in read_safetensors_header(file)}


def head_name(stored: str) -> str:
    return next((LAYER[1] + stored.removeprefix(name) for name in LAYER if stored.startswith(name)), stored)


def head_bytes(path: str, size: PassSize) -> int:
    """Bytes of a head that is loaded with the same options as its target, and stays in memory."""
    config, stored = head_config(path), head_tensors(path)
    weights, cell = head_size(stored.values())
    item = max(one.size // prod(one.shape) for one in stored.values() if one.name not in TABLES)
    return item * (weights + size.sessions * size.cells * cell) + work_bytes(config, size, item)
