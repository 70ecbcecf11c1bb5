"""The tensors of the head in a model's own folder, for multi-token prediction: see `mtp.py`."""

import re
from pathlib import Path
from typing import Any

from edgespec.errors import ModelError
from edgespec.models.safetensors_header import Stored, read_safetensors_header

from ..common.model_folder import check_folder, read_config
from .loading import FULL

KINDS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "glm4_moe", "nemotron_h")  # `model_type`
IN_FILES = re.compile(r"(?:model\.)?(mtp\.)?(?:layers\.(\d+)\.)?(.+)")
OWN = {  # names in files of what is in no layer -> those of `MtpHead`
    "fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm",
    "shared_head.norm": "norm", "final_layernorm": "norm", "eh_proj": "eh_proj", "enorm": "enorm", "hnorm": "hnorm",
}  # fmt: skip
OF_TARGET = ("embed_tokens.", "shared_head.head.")  # copies of the target's


def head_tensors(path: str) -> dict[str, tuple[Path, Stored]]:
    """
    Args:
        path: of a model's folder.

    Returns:
        The tensors of the head in it, by their names in `MtpHead` before experts are stacked; empty if it has none.

    Raises:
        ModelError: a file is damaged, or the head is of a kind that cannot be used.
    """
    folder = check_folder(path)
    config = read_config(folder).get_text_config()
    stored = {one.name: (file, one) for file in folder.glob("*.safetensors") for one in read_safetensors_header(file)}
    found = {own: stored[name] for name in stored if (own := _own_name(name, config.num_hidden_layers))}
    if found and config.model_type not in KINDS:
        raise ModelError(
            f"{path}: a head in a {config.model_type} model cannot be used; those of {', '.join(KINDS)} can"
        )
    kinds, numbers = kinds_of(config), {name.split(".")[1] for name in found if name.startswith("layers.")}
    if found and (kinds[:1] != [FULL] or numbers != set(map(str, range(len(kinds))))):
        usable = f"heads of {len(kinds)} ({', '.join(kinds)}) with attention first"
        raise ModelError(f"{path}: its head has {len(numbers)} layers, but only {usable} can be used")
    return found


def kinds_of(config: Any) -> list[str]:
    return list(getattr(config, "mtp_layers_block_type", None) or [FULL])


def _own_name(name: str, layers: int) -> str | None:
    """The name in `MtpHead`, before experts are stacked; None: the tensor is no part of a head of its own."""
    parts: tuple[str, str, str] = IN_FILES.findall(name)[0]
    inside, layer, rest = parts
    number = int(layer or 0) - (0 if inside else layers)
    if not (inside or layer) or number < 0 or rest.startswith(OF_TARGET):
        return None
    part = next((part for part in OWN if rest.startswith(f"{part}.")), None)
    if part:
        return OWN[part] + rest.removeprefix(part)
    return f"layers.{number}.{rest}" if layer else rest
