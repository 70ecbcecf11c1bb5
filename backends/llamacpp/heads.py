"""Heads on llama.cpp: EAGLE-3 in a file of its own, and layers that predict further tokens (MTP) in a model's file.

A head is a context with a plain cache of its own, whose rows take a token and a state, so trees grow in it as in any
draft (`session.py`), also where the target's layers are recurrent. llama.cpp's own use: common/speculative.cpp.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np

from edgespec.errors import ModelError
from edgespec.loop.backend import Capabilities, Logits, Work
from edgespec.loop.engines import LoadOptions
from edgespec.loop.sampling import Float32Array
from edgespec.loop.session_files import content_of
from edgespec.models.gguf_header import header_values, own_header
from edgespec.weights.plan import Tensor

from ..common.heads import HeadSession
from .backend import LlamaBackend
from .cells import Rows
from .context import EAGLE3, ContextSize, make_context, of_head
from .ggml.files import NO_HEADS, all_tensors, last_log, llama_cpp, load_model, metadata, parts
from .ggml.stop import ABORTED
from .logits import StateLogits
from .memory.tolerance import tolerance
from .session import LlamaSession, Placement
from .states import NEXTN, RowStates, functions

OTHER_HEADS = {"gemma4-assistant": "shares the cache of its target", "dflash": "drafts blocks"}
# Architectures (general.architecture) of src/models/*.cpp in llama.cpp:
# with graph_mtp and a plain cache for it (create_memory in llama-model.cpp),
OWN_HEADS = (
    "bailingmoe3", "cohere2moe", "deepseek2", "glm4moe", "hy_v3", "mimo2", "nemotron_h_moe", "qwen35", "qwen35moe",
    "qwen3next", "step35",
)  # fmt: skip
# with t_layer_inp; others end the process when one is asked for,
LAYER_INPUTS = (
    "bailingmoe3", "gemma4", "gpt-oss", "hunyuan-dense", "hunyuan_vl", "lfm2", "lfm2moe", "llama", "mimo2",
    "minimax-01", "minimax-m2", "muse-glimmer", "nanbeige", "nemotron_h", "nemotron_h_moe", "qwen3", "qwen35",
    "qwen35moe", "qwen3moe", "qwen3next",
)  # fmt: skip
# and of these, with t_h_nextn, the state after the last layer.
LAST_STATES = ("bailingmoe3", "gemma4", "gpt-oss", "mimo2", "nemotron_h", "nemotron_h_moe", "qwen35", "qwen35moe",
               "qwen3next")  # fmt: skip
# Heads of these ask for all rows of the last layer, which is computed for wanted rows otherwise.
WHOLE_LAST_LAYER = ("deepseek2", "glm4moe", "mimo2", "nemotron_h_moe")
I64 = 27  # GGML_TYPE_I64


@dataclass(frozen=True, slots=True)
class HeadFile:
    """
    Attributes:
        architecture: general.architecture of the file.
        layers: of a model, that predict further tokens; 0: the file is a head.
    """

    architecture: str
    layers: int


def find_head(path: str) -> HeadFile | None:
    """
    Returns:
        What the header says of a head; None: the file has none.

    Raises:
        ModelError: it cannot be read, or its head cannot be used.
    """
    name = str(header_values(path, "general.architecture").get("general.architecture", ""))
    if name in OTHER_HEADS:
        raise ModelError(f"{path}: is a head that {OTHER_HEADS[name]} ({name}), which is not supported: use another")
    values, lengths = own_header(path)
    if name == EAGLE3.decode():
        _check(path, "has block_count", values.get("block_count"), 1)
        _check(path, "has target_layers of number", lengths.get("target_layers"), 3)
        key, value = (values.get(f"attention.{kind}_length") for kind in ("key", "value"))
        _check(path, "has attention.value_length", value, key)
        return HeadFile(name, 0)
    layers, count = (int(values.get(key, 0)) for key in ("nextn_predict_layers", "block_count"))
    if layers == 0 or name in NO_HEADS:
        return None
    if not 0 < layers <= count:
        raise ModelError(f"{path}: is damaged: nextn_predict_layers is {layers} of block_count {count} layers")
    if not any(tensor.name == f"blk.{count - layers}.nextn.eh_proj.weight" for tensor in all_tensors(path)):
        return None
    if name not in OWN_HEADS:
        raise ModelError(f"{path}: llama.cpp does not draft with the head of {name}")
    if layers > 1:
        raise ModelError(f"{path}: has {layers} heads in a chain ({name}), which is not supported: one is")
    return HeadFile(name, layers)


def _check(path: str, what: str, found: Any, right: Any) -> None:
    if found != right:
        raise ModelError(f"{path}: {what} {found}, but a head of this kind needs {right}")


def head_tensors(path: str, tensors: Sequence[Tensor]) -> None:
    """
    Raises:
        ModelError: llama.cpp would end the process over a tensor.
    """
    d2t = next((tensor for tensor in tensors if tensor.name == "d2t"), None)
    if d2t is None:
        return
    if d2t.type != I64:
        raise ModelError(f"{path}: the tensor d2t has type {d2t.type}, but must hold 64-bit integers ({I64})")
    ids = np.fromfile(path, "<i8", d2t.size // 8, offset=d2t.start)
    size = own_header(path)[0].get("vocab_size") or _tokens(path)
    if len(ids) and not 0 <= ids.min() <= ids.max() < int(size):
        raise ModelError(f"{path}: the tensor d2t maps to the token {ids.max()}, but the vocabulary has {size}")


def _tokens(path: str) -> int:
    model = load_model(path, vocab_only=True)
    try:
        return int(llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model)))
    finally:
        llama_cpp.llama_model_free(model)


class LlamaHeadSession(HeadSession, LlamaSession):
    _backend: "LlamaHead"

    def add(self, placement: Placement, start: int) -> tuple[list[int], list[int], list[list[int]]]:
        tokens, places, ids = super().add(placement, start)
        states = np.zeros((len(tokens), self._backend.width), np.float32)
        states[len(tokens) - len(placement.order) :] = self.inputs(placement.work, placement.positions)[placement.order]
        self._backend.add_inputs(states)
        if self._backend.hides_first and not self.token_ids:
            for row, node in enumerate(placement.order):
                if places[row] == 0 and placement.first + node in placement.work.parents:
                    ids[row] = [self._backend.cells.padding_id]
        return tokens, places, ids

    def hide_first(self) -> None:
        for seq in self.seq_ids if not self.token_ids else ():
            llama_cpp.llama_memory_seq_rm(self._memory, seq, 0, 1)


class LlamaHead(LlamaBackend):
    """A head of a loaded target; see `edgespec.loop.backend.Backend`.

    Attributes:
        width: as of `HeadOwner`.
        hides_first: the first token has no state before it, so no row sees it: EAGLE-3 is trained without.
    """

    def __init__(
        self, target: LlamaBackend, path: str, model: Any, context: Any, size: ContextSize, width: int
    ) -> None:
        own, sizes = model is target.model, metadata(model, "general.file_type")
        capabilities = Capabilities(
            context_length=size.context_length, max_nodes=size.max_nodes, max_wanted=size.max_nodes,
            max_leaves=size.max_leaves, logit_tolerance=tolerance(sizes, None), one_thread=True, head=True,
            spare_leaves=size.ids - size.own_ids * size.sessions,
        )  # fmt: skip
        computing = {name: target.computing[name] for name in ("threads", "gpu_layers")}
        computing |= {"kv_type": size.kept_in(model), "head": "own" if own else EAGLE3.decode()}
        free_model = (lambda: None) if own else partial(llama_cpp.llama_model_free, model)
        super().__init__(
            model, context, capabilities, size.sessions, False, None, target.yielding, ids=size.ids,
            computing=computing, shared=target.own_vocab, width=width, free_model=free_model,
        )  # fmt: skip
        self.target = target  # which must live as long
        self.width, self.hides_first = width, not own
        self.content = content_of(*parts(path))
        self.states = RowStates(context, width, [NEXTN], masked=True)
        self._inputs: list[Float32Array] = []
        target.heads.add(self)

    @property
    def kind(self) -> Any:
        return LlamaHeadSession

    def add_inputs(self, states: Float32Array) -> None:
        self._inputs.append(states)

    def fuse(self, states: Float32Array) -> Float32Array:
        """EAGLE-3's encoder, which makes a row's state of three layers' inputs; MTP starts from the target's state."""
        self._check_open()
        if not self.hides_first or not len(states):
            return states
        most, found = llama_cpp.llama_n_ubatch(self.context), list[Float32Array]()
        for start in range(0, len(states), most):
            part = np.ascontiguousarray(states[start : start + most])
            batch, wanted = llama_cpp.llama_batch(), np.ones(len(part), np.int8)
            batch.n_tokens = len(part)
            batch.embd = ctypes.cast(part.ctypes.data, ctypes.POINTER(ctypes.c_float))
            batch.logits = ctypes.cast(wanted.ctypes.data, ctypes.POINTER(ctypes.c_int8))
            self._encode(batch)
            assert self.states
            found.append(self.states.rows(range(len(part))))
        return np.concatenate(found)

    def _encode(self, batch: Any) -> None:
        status, interrupted = ABORTED, False
        while status == ABORTED:  # an interrupt is for a pass, so it ends the next one
            interrupted |= self.stop.is_set
            self.stop.clear()
            with self.signals.held():
                status = llama_cpp.llama_encode(self.context, batch)
        if interrupted:
            self.stop.set()
        if status != 0:
            raise ModelError(f"llama.cpp could not encode {batch.n_tokens} states (code {status}): {last_log()}")

    def forward(self, batch: Sequence[Work]) -> list[Logits]:
        self._inputs = []
        logits = super().forward(batch)
        if self.hides_first:
            self.cells.drop_padding(0)
        for work, found in zip(batch, logits, strict=True):
            session, wanted = cast(LlamaHeadSession, work.session), work.wanted.tolist()
            session.add_states(wanted, cast(StateLogits, found).states(wanted))
            if self.hides_first:
                session.hide_first()
        return logits

    def compute(self, rows: Rows, *, prompt: bool, padding: int) -> None:
        self.batch_states[: len(rows.tokens)] = np.concatenate(self._inputs)
        if (
            rows.wanted
        ):  # llama.cpp computes the logits of all rows, and gives those of the first (src/models/eagle3.cpp)
            rows.wanted = list(range(len(rows.tokens)))
        super().compute(rows, prompt=prompt, padding=padding)


def load_head(target: Any, path: str, options: LoadOptions) -> LlamaHead:
    """See `edgespec.loop.engines.LoadsHeads`."""
    if not isinstance(target, LlamaBackend):
        raise ModelError(f"{path}: a head needs its target in this process: leave out --lenders or the head")
    functions()
    head = find_head(path)
    if head is None:
        raise ModelError(f"{path}: is no head, and has none")
    own = bool(head.layers)
    if own and not (target.own_head and Path(path).samefile(target.path)):
        raise ModelError(f"{path}: the head of a model needs that model as its target, loaded with it")
    if not own:
        head_tensors(path, all_tensors(path))
    computing = target.computing
    gpu_layers = -1 if computing["gpu_layers"] else 0
    extra = "repacked" in computing
    model = target.model if own else load_model(path, n_gpu_layers=gpu_layers, use_extra_bufts=extra)
    context = None
    try:
        layers = [NEXTN] if own else _layers(target, path, model)
        length = target.capabilities.context_length
        size = of_head(ContextSize(length, options.budget, options.sessions, 0)).of(model)
        params = size.params(model, target.context)
        params.n_threads = params.n_threads_batch = computing["threads"]
        params.op_offload = "op_offload" not in computing
        context = make_context(path, model, size, params)
        width = int(llama_cpp.llama_model_n_embd_out(model) if own else llama_cpp.llama_model_n_embd(model))
        backend = LlamaHead(target, path, model, context, size, width)
    except BaseException:
        if context:
            llama_cpp.llama_free(context)
        if not own:
            llama_cpp.llama_model_free(model)
        raise
    of_target = llama_cpp.llama_model_n_embd_out(target.model) if own else llama_cpp.llama_model_n_embd(target.model)
    target.keep_states(RowStates(target.context, int(of_target), layers))
    return backend


def _layers(target: LlamaBackend, path: str, model: Any) -> list[int]:
    """Layers of the target whose inputs an EAGLE-3 head starts from.

    Raises:
        ModelError: the head is for another target.
    """
    name = metadata(target.model, "general.architecture").decode()
    if name not in LAYER_INPUTS:
        raise ModelError(f"{path}: EAGLE-3 needs the inputs of layers, which llama.cpp does not give for {name}")
    values, names = own_header(path)[0], {tensor.name for tensor in all_tensors(path)}
    width, vocab = int(llama_cpp.llama_model_n_embd(target.model)), llama_cpp.llama_model_get_vocab(model)
    _check(path, "is for targets with states of width", values.get("target_hidden_size"), width)
    _check(path, "has a vocabulary of size", llama_cpp.llama_vocab_n_tokens(vocab), target.vocab.size)
    if missing := [one for one in ("token_embd.weight", "output.weight") if one not in names]:
        _check(path, f"has no {missing[0]} and states of width", llama_cpp.llama_model_n_embd(model), width)
    count = llama_cpp.llama_model_n_layer(target.model)
    layers = [int(functions().llama_model_target_layer_ids(model)[i]) for i in range(3)]
    if not all(0 <= layer < count + (name in LAST_STATES) for layer in layers):
        raise ModelError(f"{path}: starts from the layers {layers}, but llama.cpp gives {count} of {name}")
    return [layer if layer < count else NEXTN for layer in layers]
