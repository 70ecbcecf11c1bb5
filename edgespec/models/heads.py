"""Files and folders that are heads, which cannot run without their target."""

import json
from pathlib import Path
from typing import Any

from edgespec.errors import ModelError
from edgespec.models.gguf_header import SPLIT_NAME, architecture, own_values, tensor_names, whole_number

ARCHITECTURES = ("eagle3", "gemma4-assistant")  # `general.architecture` of llama.cpp's heads
# Of llama.cpp's architectures, those whose `nextn_predict_layers` it computes (src/models/*.cpp).
NO_HEADS = ("gemma4-assistant", "granite-switch")
MOST_LAYERS = 512  # LLAMA_MAX_LAYERS of llama-hparams.h
FIRST_LAYER = "blk.0.attn_norm.weight"  # llama.cpp, too, finds by it that a file has only the layers of a head
EAGLE3 = "Eagle3"  # part of `architectures` in a head's config.json


def is_head(path: str) -> bool:
    """
    Returns:
        True if the GGUF or folder is a head, not a whole model.

    Raises:
        ModelError: the GGUF is missing or damaged, or as for `head_layers`.
    """
    if not Path(path).is_dir():
        alone = head_layers(path) and not SPLIT_NAME.fullmatch(path)
        return architecture(path) in ARCHITECTURES or bool(alone and FIRST_LAYER not in tensor_names(path))
    return _folder_head(path) is not None


def _folder_head(path: str) -> dict[str, Any] | None:
    try:
        config = json.loads((Path(path) / "config.json").read_text("utf-8"))
        return config if any(EAGLE3 in str(name) for name in config["architectures"]) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def not_a_model(path: str, kind: str, target: str) -> ModelError:
    return ModelError(f"{path}: is a head ({kind}) {target}, not a model: edgespec run TARGET --draft {path}")


def check_folder(path: str) -> None:
    """
    Raises:
        ModelError: the folder is a head.
    """
    if Path(path).is_dir() and (config := _folder_head(path)):
        width = config.get("target_hidden_size") or config.get("hidden_size", "an unknown size")
        raise not_a_model(path, "EAGLE-3", f"for models with states of {width}")


def head_layers(path: str) -> int:
    """Number of a GGUF's last layers that are its head.

    Raises:
        ModelError: it cannot be read, or llama.cpp would end the process over a count of layers.
    """
    values = own_values(path)
    count = whole_number(path, values, "block_count", 1, MOST_LAYERS)
    found = whole_number(path, values, "nextn_predict_layers", 0, count)
    return 0 if architecture(path) in NO_HEADS else found
