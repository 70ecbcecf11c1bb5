"""Heads in GGUF files, for the user: their kinds, and what they draft for. `heads.py` loads them."""

from dataclasses import dataclass

from edgespec.machine.memory import format_size
from edgespec.models.gguf_header import architecture, check_model, own_values
from edgespec.models.heads import FIRST_LAYER, head_layers, not_a_model
from edgespec.weights.plan import count_layers, layer_of

from .ggml.files import all_tensors

MTP = "multi-token prediction"
KINDS = {"eagle3": "EAGLE-3", "gemma4-assistant": "assistant", "dflash": "DFlash"}  # general.architecture of heads


@dataclass(frozen=True, slots=True)
class HeadCard:
    """
    Attributes:
        kind: of the head, for a person.
        layers: of the head.
        size: of its tensors, in bytes.
        target: what it drafts for; "": the model of the same file.
    """

    kind: str
    layers: int
    size: int
    target: str

    @property
    def line(self) -> str:
        layers = "1 layer" if self.layers == 1 else f"{self.layers} layers"
        return f"{self.kind}, {layers}, {format_size(self.size)}, {self.target or 'in the file of its model'}"


def head_card(path: str) -> HeadCard | None:
    """
    Returns:
        The head that a file is or has; None: neither.

    Raises:
        ModelError: it cannot be read, or llama.cpp would end the process over a count in its header.
    """
    name, values, heads, tensors = architecture(path), own_values(path), head_layers(path), all_tensors(path)
    size = sum(tensor.size for tensor in tensors)
    if name in KINDS:
        width = values.get("target_hidden_size", values.get("embedding_length_out", "an unknown size"))
        family = "gemma4 models" if name == "gemma4-assistant" else "models"
        return HeadCard(KINDS[name], int(values.get("block_count", 1)), size, f"for {family} with states of {width}")
    if heads and not any(tensor.name == FIRST_LAYER for tensor in tensors):
        width = values.get("embedding_length", "an unknown size")
        return HeadCard(MTP, heads, size, f"for {name} models with states of {width}")
    first = count_layers(tensors) - heads
    own = [tensor for tensor in tensors if layer_of(tensor) >= first]
    if not any(".nextn." in tensor.name for tensor in own):
        return None
    return HeadCard(MTP, heads, sum(tensor.size for tensor in own), "")


def check_target(path: str) -> None:
    """
    Raises:
        ModelError: as for `head_card` and `check_model`, or the file is a head.
    """
    check_model(path)
    card = head_card(path)
    if card and card.target:
        raise not_a_model(path, card.kind, card.target)
