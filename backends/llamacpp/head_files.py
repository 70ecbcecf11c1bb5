"""Files with heads: which llama.cpp can use, and for which targets. Over a wrong one it would end the process."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from edgespec.errors import ModelError
from edgespec.machine.memory import format_size
from edgespec.models.gguf_header import architecture, check_model, own_header, own_values
from edgespec.models.heads import FIRST_LAYER, head_layers, not_a_model
from edgespec.weights.plan import count_layers, layer_of

from .context import EAGLE3
from .ggml.files import all_tensors, llama_cpp, metadata
from .states import NEXTN, functions

ASSISTANT, ITS_TARGET = "gemma4-assistant", "gemma4"
KINDS = {"eagle3": "EAGLE-3", ASSISTANT: "assistant", "dflash": "DFlash"}  # general.architecture of heads
OTHER_HEADS = {"dflash": "drafts blocks"}
# Architectures (general.architecture) of src/models/*.cpp in llama.cpp:
# with graph_mtp and a plain cache for it (create_memory in llama-model.cpp),
OWN_HEADS = (
    "bailingmoe3", "cohere2moe", "deepseek2", "glm4moe", "hy_v3", "mimo2", "nemotron_h_moe", "qwen35", "qwen35moe",
    "qwen3next", "step35",
)  # fmt: skip
# of these, with several in a chain: a node's depth says which drafts (nextn_layer_offset),
CHAINED = ("hy_v3", "mimo2", "step35")
# Keys of a shared cache's shape, in both files.
SHARED = ("attention.key_length", "attention.key_length_swa", "attention.head_count_kv")
# with t_layer_inp; others end the process when one is asked for,
LAYER_INPUTS = (
    "bailingmoe3", "gemma4", "gpt-oss", "hunyuan-dense", "hunyuan_vl", "lfm2", "lfm2moe", "llama", "mimo2",
    "minimax-01", "minimax-m2", "muse-glimmer", "nanbeige", "nemotron_h", "nemotron_h_moe", "qwen3", "qwen35",
    "qwen35moe", "qwen3moe", "qwen3next",
)  # fmt: skip
# and of these, with t_h_nextn, the state after the last layer.
LAST_STATES = ("bailingmoe3", "gemma4", "gpt-oss", "mimo2", "nemotron_h", "nemotron_h_moe", "qwen35", "qwen35moe",
               "qwen3next")  # fmt: skip
I64 = 27  # GGML_TYPE_I64


@dataclass(frozen=True, slots=True)
class HeadFile:
    """
    Attributes:
        architecture: general.architecture of the file.
        layers: of the head.
        size: of its tensors, in bytes.
        target: what it drafts for, for a person; "": the model of the same file.
    """

    architecture: str
    layers: int
    size: int
    target: str

    @property
    def whole(self) -> bool:
        """The file has the model of the head, too."""
        return not self.target

    @property
    def is_eagle(self) -> bool:
        return self.architecture == EAGLE3.decode()

    @property
    def kind(self) -> str:
        return KINDS.get(self.architecture, "multi-token prediction")

    @property
    def line(self) -> str:
        layers = "1 layer" if self.layers == 1 else f"{self.layers} layers"
        return f"{self.kind}, {layers}, {format_size(self.size)}, {self.target or 'in the file of its model'}"


def read_head(path: str) -> HeadFile | None:
    """
    Returns:
        The head that a file is or has, also one that llama.cpp cannot use; None: neither.

    Raises:
        ModelError: it cannot be read, or llama.cpp would end the process over a count in its header.
    """
    name, values, layers, tensors = architecture(path), own_values(path), head_layers(path), all_tensors(path)
    size, names = sum(tensor.size for tensor in tensors), {tensor.name for tensor in tensors}
    if name in KINDS:
        width = values.get("target_hidden_size", values.get("embedding_length_out", "an unknown size"))
        family = "gemma4 models" if name == ASSISTANT else "models"
        return HeadFile(name, int(values.get("block_count", 1)), size, f"for {family} with states of {width}")
    if layers and FIRST_LAYER not in names:
        width = values.get("embedding_length", "an unknown size")
        return HeadFile(name, layers, size, f"for {name} models with states of {width}")
    first = count_layers(tensors) - layers
    if f"blk.{first}.nextn.eh_proj.weight" not in names:
        return None
    return HeadFile(name, layers, sum(tensor.size for tensor in tensors if layer_of(tensor) >= first), "")


def find_head(path: str) -> HeadFile | None:
    """As `read_head`.

    Raises:
        ModelError: also if the head cannot be used.
    """
    if (head := read_head(path)) is None:
        return None
    name = head.architecture
    if name in OTHER_HEADS:
        raise ModelError(f"{path}: is a head that {OTHER_HEADS[name]} ({name}), which is not supported: use another")
    if head.is_eagle:
        values, lengths = own_header(path)
        _check(path, "has block_count", values.get("block_count"), 1)
        _check(path, "has target_layers of number", lengths.get("target_layers"), 3)
        key, value = (values.get(f"attention.{kind}_length") for kind in ("key", "value"))
        _check(path, "has attention.value_length", value, key)
    elif name not in (ASSISTANT, *OWN_HEADS):
        raise ModelError(f"{path}: has a head of {name}, which is not supported: use a draft model")
    elif head.layers > 1 and name not in (ASSISTANT, *CHAINED):
        raise ModelError(f"{path}: has {head.layers} heads, but llama.cpp drafts with one of {name}")
    return head


def check_target(path: str) -> HeadFile | None:
    """
    Returns:
        As `read_head`.

    Raises:
        ModelError: also as for `check_model`, or the file is a head.
    """
    check_model(path)
    head = read_head(path)
    if head and not head.whole:
        raise not_a_model(path, head.kind, head.target)
    return head


def _check(path: str, what: str, found: Any, right: Any) -> None:
    if found != right:
        raise ModelError(f"{path}: {what} {found}, but a head of this kind needs {right}")


def check_d2t(path: str, size: int) -> None:
    """
    Args:
        path: of the head.
        size: of the target's vocabulary.

    Raises:
        ModelError: llama.cpp would end the process over the tokens that the head can draft.
    """
    for d2t in (tensor for tensor in all_tensors(path) if tensor.name == "d2t"):
        _check(path, "has the tensor d2t of type", d2t.type, I64)
        ids = np.fromfile(path, "<i8", d2t.size // 8, offset=d2t.start)
        if wrong := ids[(ids < 0) | (ids >= size)].tolist():
            raise ModelError(f"{path}: the tensor d2t maps to the token {wrong[0]}, but the vocabulary has {size}")


def starts_from(head: HeadFile, path: str, model: Any, target_path: str, target: Any) -> list[int]:
    """
    Args:
        head: in a file of its own.
        path: of that file.
        model: its llama_model.
        target_path: of the target's file.
        target: the target's llama_model.

    Returns:
        What its rows start from, as `RowStates` says.

    Raises:
        ModelError: the head is for another target.
    """
    name = metadata(target, "general.architecture").decode()
    vocabs = [llama_cpp.llama_model_get_vocab(one) for one in (model, target)]
    _check(path, "has a vocabulary of size", *map(llama_cpp.llama_vocab_n_tokens, vocabs))
    if not head.is_eagle:
        made_for = ITS_TARGET if head.architecture == ASSISTANT else head.architecture
        _check(path, "is for targets of architecture", made_for, name)
        mine, its = own_header(path)[0], own_header(target_path)[0]
        shared = SHARED if head.architecture == ASSISTANT else ()
        for key in (key for key in shared if key in mine and key in its):  # lists are in neither
            _check(path, f"has {key}", mine[key], its[key])
        sizes = [int(llama_cpp.llama_model_n_embd_out(one)) for one in (model, target)]
        _check(path, "is for targets with states of width", *sizes)
        return [NEXTN]
    if name not in LAYER_INPUTS:
        raise ModelError(f"{path}: EAGLE-3 needs the inputs of layers, which llama.cpp does not give for {name}")
    values, names = own_header(path)[0], {tensor.name for tensor in all_tensors(path)}
    width = int(llama_cpp.llama_model_n_embd(target))
    _check(path, "is for targets with states of width", values.get("target_hidden_size"), width)
    if missing := [one for one in ("token_embd.weight", "output.weight") if one not in names]:
        _check(path, f"has no {missing[0]} and states of width", llama_cpp.llama_model_n_embd(model), width)
    count = llama_cpp.llama_model_n_layer(target)
    layers = [int(functions().llama_model_target_layer_ids(model)[i]) for i in range(3)]
    if not all(0 <= layer < count + (name in LAST_STATES) for layer in layers):
        raise ModelError(f"{path}: starts from the layers {layers}, but llama.cpp gives {count} of {name}")
    return [layer if layer < count else NEXTN for layer in layers]
