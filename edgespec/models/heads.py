"""Files and folders that are heads, which cannot run without their target."""

import json
from pathlib import Path

from edgespec.models.gguf_header import SPLIT_NAME, header_values, tensor_names

ARCHITECTURES = ("eagle3", "gemma4-assistant")  # `general.architecture` of llama.cpp's heads
FIRST_LAYER = "blk.0.attn_norm.weight"  # llama.cpp, too, finds by it that a file has only the layers of a head
EAGLE3 = "Eagle3"  # part of `architectures` in a head's config.json


def is_head(path: str) -> bool:
    """
    Returns:
        True if the GGUF or folder is a head, not a whole model.

    Raises:
        ModelError: the GGUF is missing or damaged.
    """
    if not Path(path).is_dir():
        header = header_values(path, "")
        name = header.get("general.architecture")
        alone = header.get(f"{name}.nextn_predict_layers") and not SPLIT_NAME.fullmatch(path)
        return name in ARCHITECTURES or bool(alone and FIRST_LAYER not in tensor_names(path))
    try:
        names = json.loads((Path(path) / "config.json").read_text("utf-8"))["architectures"]
        return any(EAGLE3 in str(name) for name in names)
    except (OSError, ValueError, KeyError, TypeError):
        return False
