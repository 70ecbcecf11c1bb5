"""Files and folders that are heads, which cannot run without their target."""

from contextlib import suppress
from pathlib import Path
from typing import Any

from edgespec.errors import ModelError
from edgespec.machine.files import SPLIT_NAME, read_json_object
from edgespec.models.gguf_header import MOST_LAYERS, architecture, own_values, tensor_names, whole_number

ARCHITECTURES = ("eagle3", "gemma4-assistant")  # `general.architecture` of llama.cpp's heads
# Of llama.cpp's architectures, those whose `nextn_predict_layers` it computes (src/models/*.cpp).
NO_HEADS = ("gemma4-assistant", "granite-switch")
FIRST_LAYER = "blk.0.attn_norm.weight"  # llama.cpp, too, finds by it that a file has only the layers of a head
LAYER = ("midlayer.", "layers.0.")  # names of the only layer in published folders with EAGLE-3 heads
OTHER_KINDS = ("DFlash", "DSpark")  # parts of `architectures` in config.json
READ = "eagle_aux_hidden_state_layer_ids"


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
    return find_eagle(path) is not None


def find_eagle(path: str) -> dict[str, Any] | None:
    """
    Returns:
        config.json of a folder with an EAGLE-3 head, known as llama.cpp's converter knows it; None: it is none.

    Raises:
        ModelError: it is a head of a kind that no engine here can use.
    """
    config = dict[str, Any]()
    with suppress(ModelError):
        config = read_json_object(Path(path) / "config.json", ModelError)
    try:
        if any(kind in str(config.get("architectures")) for kind in OTHER_KINDS):
            raise ModelError(f"{path}: is a head that drafts blocks (DFlash), which is not supported: use another")
        config |= config.get("transformer_layer_config") or {}  # where vLLM's speculators have the layer's
        if rope := config.get("rope_parameters"):  # where transformers 5 has these two
            config |= {"rope_theta": rope["rope_theta"], "rope_scaling": rope}
        return config if "draft_vocab_size" in config and config["num_hidden_layers"] == 1 else None
    except (ValueError, KeyError, TypeError):
        return None


def eagle_config(path: str) -> dict[str, Any]:
    """
    Raises:
        ModelError: the folder is no EAGLE-3 head.
    """
    if (config := find_eagle(path)) is None:
        raise ModelError(f"{path}: is no EAGLE-3 head")
    return config


def layers_read(config: dict[str, Any], count: int) -> list[int]:
    """
    Args:
        config: of `eagle_config`.
        count: of its target's layers.

    Returns:
        Layers whose inputs it reads; `count` means the last layer's output.

    Raises:
        ModelError: the target has no such layers.
    """
    found = config.get(READ) or default_layers(count)
    if not isinstance(found, list) or not all(isinstance(one, int) and 0 <= one <= count for one in found):
        raise ModelError(f"reads the layers {found} of its target, which has {count}")
    return found


def check_made_for(width: int, tokens: int, target_width: int, target_tokens: int) -> None:
    """
    Args:
        width: of each of the target's states that a head reads.
        tokens: of the target's vocabulary.
        target_width: that of the target which is there.
        target_tokens: likewise.

    Raises:
        ModelError: they differ.
    """
    if (width, tokens) != (target_width, target_tokens):
        raise ModelError(
            f"was made for a model with {width} wide vectors and {tokens} tokens; this target has {target_width} and "
            f"{target_tokens}"
        )


def default_layers(count: int) -> list[int]:
    """The layers that a head reads where its config.json names none."""
    return [2, count // 2, count - 3]


def own_name(stored: str, layer: str) -> str:
    """A tensor's name with `layer` before what is in the only layer."""
    return next((layer + stored.removeprefix(name) for name in LAYER if stored.startswith(name)), stored)


def not_a_model(path: str, kind: str, target: str) -> ModelError:
    return ModelError(f"{path}: is a head ({kind}) {target}, not a model: edgespec run TARGET --draft {path}")


def refuse_head_folder(path: str) -> None:
    """
    Raises:
        ModelError: the folder is a head.
    """
    if Path(path).is_dir() and (config := find_eagle(path)):
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
