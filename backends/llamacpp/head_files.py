"""Files with heads: which llama.cpp can use, and for which targets. Over a wrong one it would end the process."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from edgespec.errors import ModelError
from edgespec.models.gguf_header import architecture, own_header
from edgespec.models.heads import head_layers, is_head

from .context import EAGLE3
from .ggml.files import all_tensors, llama_cpp, metadata
from .states import NEXTN, functions

ASSISTANT, ITS_TARGET = "gemma4-assistant", "gemma4"
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
        whole: the file has the model of the head, too.
    """

    architecture: str
    whole: bool

    @property
    def is_eagle(self) -> bool:
        return self.architecture == EAGLE3.decode()


def find_head(path: str) -> HeadFile | None:
    """
    Returns:
        What the header says of a head; None: the file has none.

    Raises:
        ModelError: it cannot be read, or its head cannot be used.
    """
    name = architecture(path)
    if name in OTHER_HEADS:
        raise ModelError(f"{path}: is a head that {OTHER_HEADS[name]} ({name}), which is not supported: use another")
    values, lengths = own_header(path)
    if name == EAGLE3.decode():
        _check(path, "has block_count", values.get("block_count"), 1)
        _check(path, "has target_layers of number", lengths.get("target_layers"), 3)
        key, value = (values.get(f"attention.{kind}_length") for kind in ("key", "value"))
        _check(path, "has attention.value_length", value, key)
        return HeadFile(name, whole=False)
    if name == ASSISTANT:
        return HeadFile(name, whole=False)
    layers = head_layers(path)
    if layers == 0:
        return None
    count = int(values.get("block_count", layers))
    if not any(tensor.name == f"blk.{count - layers}.nextn.eh_proj.weight" for tensor in all_tensors(path)):
        return None
    if name not in OWN_HEADS:
        raise ModelError(f"{path}: has a head of {name}, which is not supported: use a draft model")
    if layers > 1 and name not in CHAINED:
        raise ModelError(f"{path}: has {layers} heads, but llama.cpp drafts with one of {name}")
    return HeadFile(name, whole=not is_head(path))


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
