"""Files and folders that are heads, which cannot run without their target."""

import json
from collections.abc import Mapping
from pathlib import Path

from edgespec.models.gguf_header import Value, header_values, whole_number

ARCHITECTURES = ("eagle3", "gemma4-assistant")  # `general.architecture` of llama.cpp's heads
# Of llama.cpp's architectures, those whose `nextn_predict_layers` it computes (src/models/*.cpp).
NO_HEADS = ("gemma4-assistant", "granite-switch")
MOST_LAYERS = 512  # LLAMA_MAX_LAYERS of llama-hparams.h
EAGLE3 = "Eagle3"  # part of `architectures` in a head's config.json


def is_head(path: str) -> bool:
    """
    Returns:
        True if the GGUF or folder is a head, not a whole model.

    Raises:
        ModelError: the GGUF is missing or damaged, or as for `head_layers`.
    """
    if not Path(path).is_dir():
        header = header_values(path, "")
        head_layers(path, header)
        return header.get("general.architecture") in ARCHITECTURES
    try:
        names = json.loads((Path(path) / "config.json").read_text("utf-8"))["architectures"]
        return any(EAGLE3 in str(name) for name in names)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def head_layers(path: str, header: Mapping[str, Value]) -> int:
    """Number of a model's last layers that are its head.

    Args:
        path: of the GGUF, for messages.
        header: all keys.

    Raises:
        ModelError: llama.cpp would end the process over a count of layers.
    """
    name = header.get("general.architecture")
    count = whole_number(path, header, f"{name}.block_count", 1, MOST_LAYERS)
    found = whole_number(path, header, f"{name}.nextn_predict_layers", 0, count)
    return 0 if name in NO_HEADS else found
