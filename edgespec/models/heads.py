"""Files and folders that are heads, which cannot run without their target."""

import json
from pathlib import Path

from edgespec.models.gguf_header import header_values

ARCHITECTURES = ("eagle3", "gemma4-assistant")  # `general.architecture` of llama.cpp's heads
EAGLE3 = "Eagle3"  # part of `architectures` in a head's config.json


def is_head(path: str) -> bool:
    """
    Returns:
        True if the GGUF or folder is a head, not a whole model.

    Raises:
        ModelError: the GGUF is missing or damaged.
    """
    if not Path(path).is_dir():
        return header_values(path, "general.architecture").get("general.architecture") in ARCHITECTURES
    try:
        names = json.loads((Path(path) / "config.json").read_text("utf-8"))["architectures"]
        return any(EAGLE3 in str(name) for name in names)
    except (OSError, ValueError, KeyError, TypeError):
        return False
