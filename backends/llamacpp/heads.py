"""Heads on llama.cpp: EAGLE-3 in a file of its own, and layers that predict further tokens (MTP) in a model's file.

A head is a context with a plain cache of its own, whose rows take a token and a state, so trees grow in it as in any
draft (`session.py`), also where the target's layers are recurrent. llama.cpp's own use: common/speculative.cpp.
"""

import ctypes
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np

from edgespec.errors import ModelError
from edgespec.loop.backend import Capabilities, GivesStates, Logits, Work
from edgespec.loop.engines import LoadOptions
from edgespec.loop.passes import common_prefix
from edgespec.loop.sampling import Float32Array
from edgespec.loop.session_files import content_of

from ..common.heads import HeadSession
from ..common.interrupts import one_pass
from ..common.nodes import NodeSession, checked
from ..common.row_logits import RowLogits
from .backend import LlamaBackend
from .cells import Rows
from .context import EAGLE3, ContextSize, make_context, of_head
from .ggml.files import PROCESSOR_ONLY, forget_log, last_log, llama_cpp, load_model, metadata, parts
from .ggml.stop import ABORTED
from .head_files import ASSISTANT, HeadFile, check_d2t, find_head, starts_from
from .logits import StateLogits
from .memory.tolerance import tolerance
from .session import LlamaSession, Placement
from .states import NEXTN, RowStates, functions


class LlamaHeadSession(HeadSession, LlamaSession):
    _backend: "LlamaHead"

    def add(self, placement: Placement, start: int) -> tuple[list[int], list[int], list[list[int]]]:
        tokens, places, ids = super().add(placement, start)
        states = np.zeros((len(tokens), self._backend.width), np.float32)
        states[len(tokens) - len(placement.order) :] = self.inputs(placement.work, placement.positions)[placement.order]
        length, last = len(self.token_ids), self._backend.heads_in_chain - 1
        self._backend.add_inputs(states, [0 if placement.work.prompt else min(at - length + 1, last) for at in places])
        if self._backend.hides_first and not self.token_ids:
            for row, node in enumerate(placement.order):
                if places[row] == 0 and placement.first + node in placement.work.parents:
                    ids[row] = [self._backend.cells.padding_id]
        return tokens, places, ids


class LlamaHead(LlamaBackend):
    """A head of a loaded target; see `edgespec.loop.backend.Backend`.

    Attributes:
        width: as of `HeadOwner`.
        hides_first: the first token has no state before it, so no row sees it: EAGLE-3 is trained without.
        heads_in_chain: number of heads: the first drafts after committed tokens, the next after its nodes, and so on;
            the last after all further ones.
    """

    kind: Any = LlamaHeadSession

    def __init__(
        self, target: LlamaBackend, path: str, head: HeadFile, model: Any, context: Any, size: ContextSize
    ) -> None:
        file_type, content = metadata(model, "general.file_type"), content_of(*parts(path))
        self.width, self.hides_first = int(llama_cpp.llama_model_n_embd_out(model)), head.is_eagle
        capabilities = Capabilities(
            context_length=size.context_length, max_nodes=size.max_nodes, max_wanted=size.max_nodes,
            max_leaves=size.max_leaves, logit_tolerance=tolerance(file_type, None), one_thread=True, head=True,
            spare_leaves=size.ids - size.own_ids * size.sessions,
        )  # fmt: skip
        computing = {name: target.computing[name] for name in ("threads", "gpu_layers")}
        computing |= {"kv_type": size.kv_type_in(model), "head": head.architecture}
        free_model = (lambda: None) if head.whole else partial(llama_cpp.llama_model_free, model)
        super().__init__(
            model, context, capabilities, size.sessions, False, None, target.most_threads, ids=size.ids,
            computing=computing, shared=target.own_vocab, width=self.width, free_model=free_model,
        )  # fmt: skip
        self.target = target
        self.content = content
        self.states = RowStates(context, self.width, [NEXTN], masked=True)
        one = head.architecture in (EAGLE3.decode(), ASSISTANT)
        self.heads_in_chain = 1 if one else int(llama_cpp.llama_model_n_layer_nextn(model))
        self._begin()
        target.heads.add(self)

    def close(self) -> None:
        heads = self.target.heads
        if self in heads:
            heads.remove(self)
            if not heads:
                self.target.keep_states([])
        super().close()

    def _begin(self) -> None:
        self._inputs, self._numbers = list[Float32Array](), list[int]()
        self._kept = dict[int, tuple[Float32Array, Float32Array]]()  # row -> logits and state, of several heads

    def add_inputs(self, states: Float32Array, numbers: list[int]) -> None:
        """Add what a session's rows start from, and the numbers of their heads."""
        self._inputs.append(states)
        self._numbers += numbers

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
            for name, array, kind in (("embd", part, ctypes.c_float), ("logits", wanted, ctypes.c_int8)):
                setattr(batch, name, ctypes.cast(array.ctypes.data, ctypes.POINTER(kind)))
            self._encode(batch)
            assert self.states
            found.append(self.states.rows(range(len(part))))
        return np.concatenate(found)

    def _encode(self, batch: Any) -> None:
        status, interrupted = ABORTED, False
        while status == ABORTED:  # an interrupt is for the pass that comes next
            interrupted |= self.stop.is_set()
            self.stop.flag.value = b""
            forget_log()
            with self.signals.held():
                status = llama_cpp.llama_encode(self.context, batch)
        if interrupted:
            self.stop.ask()
        if status != 0:
            raise ModelError(f"llama.cpp could not encode {batch.n_tokens} states (code {status}): {last_log()}")

    def forward(self, batch: Sequence[Work]) -> list[Logits]:
        self._begin()
        logits = super().forward(batch)
        if self.hides_first:
            self.cells.drop_padding(0)
        for i, work in enumerate(batch):
            session, wanted, found = cast(LlamaHeadSession, work.session), work.wanted.tolist(), logits[i]
            if self.heads_in_chain > 1:
                logits[i] = found = cast(StateLogits, found).of_kept(wanted, self._kept)
            if wanted:
                session.add_states(wanted, cast(GivesStates, found).states(wanted))
            for seq in session.seq_ids if self.hides_first and not session.token_ids else ():
                llama_cpp.llama_memory_seq_rm(self.memory, seq, 0, 1)
        return logits

    def compute(self, rows: Rows, *, prompt: bool, padding: int) -> None:
        self.batch.states[: len(rows.tokens)] = np.concatenate(self._inputs)
        wanted, every = rows.wanted, list(range(len(rows.tokens)))
        if self.heads_in_chain == 1:
            # Of other rows src/models/eagle3.cpp gives the first, graph_mtp of most models their states.
            rows.wanted = every if wanted else []
            super().compute(rows, prompt=prompt, padding=padding)
            return
        assert self.states
        try:
            for number in range(self.heads_in_chain):  # each has cells of its own layer for all rows
                mine = [row for row in wanted if self._numbers[row] == number]
                for row in every if number else ():
                    place = rows.positions[row]
                    for seq in rows.ids[row]:
                        llama_cpp.llama_memory_seq_rm(self.memory, seq, place, place + 1)
                functions().llama_set_nextn_layer_offset(self.context, number)
                rows.wanted = every if mine else []
                super().compute(rows, prompt=prompt, padding=padding)
                self._kept |= {row: (self.logits_of(row), self.states.rows([row])[0]) for row in mine}
        finally:
            functions().llama_set_nextn_layer_offset(self.context, 0)


class AssistantSession(HeadSession, NodeSession):
    """Without cells of its own."""

    def __init__(self, backend: "LlamaAssistant", seq_ids: list[int]) -> None:
        self.seq_ids = seq_ids
        super().__init__(backend)

    def add(self, work: Work, positions: Sequence[int]) -> Float32Array:
        """Add nodes; returns what their rows start from."""
        states = self.inputs(work, positions)
        self._add_nodes(work, positions)
        return states

    @property
    def size(self) -> int:
        return 0

    def close(self) -> None:
        if self.seq_ids:
            cast(LlamaAssistant, self._backend).release(cast(Any, self))
        self.seq_ids = []


class LlamaAssistant(LlamaHead):
    """Gemma 4's assistants: rows look at the cells of the target's session with the same text, and fill none.

    All rows have the position of the next token, as transformers has it (page gemma4_assistant of its documentation).
    """

    kind = AssistantSession

    @one_pass
    def forward(self, batch: Sequence[Work]) -> list[Logits]:
        self._check_open()
        sessions, placed = checked(batch, self.capabilities)
        rows, found, states = Rows([], [], [], []), list[Logits](), list[Float32Array]()
        try:
            for session, work, positions in zip(sessions, batch, placed, strict=True):
                source, first, wanted = self._source(session, work), session.nodes, work.wanted.tolist()
                given = session.add(work, positions)
                if source is None:
                    found.append(RowLogits({node: np.zeros(self.vocab.size, np.float32) for node in wanted}))
                    continue
                index = {node: len(rows.tokens) + i for i, node in enumerate(wanted)}
                tokens = [int(work.token_ids[node - first]) for node in wanted]
                rows.add(tokens, [source.cached] * len(wanted), [[source.seq_ids[0]] for _ in wanted])
                states += (given[node - first] for node in wanted)
                found.append(self._logits(index))
            if rows.tokens:
                self.batch.states[: len(states)] = states
                rows.wanted = list(range(len(states)))
                LlamaBackend.compute(self, rows, prompt=False, padding=0)
        except BaseException:
            for session in sessions:
                session.rewind(len(session.token_ids))
            raise
        for session, work, logits in zip(sessions, batch, found, strict=True):
            if len(work.wanted) and isinstance(logits, StateLogits):
                session.add_states(work.wanted.tolist(), logits.states(work.wanted.tolist()))
        return found

    def _source(self, session: AssistantSession, work: Work) -> Any:
        """Session of the target that has cells of these tokens, if any."""
        text = [*session.token_ids, *(work.token_ids.tolist() if work.prompt else ())]
        of_text = (one for one in self.target.sessions if 0 < one.cached <= common_prefix(text, one.token_ids))
        return max(of_text, key=lambda one: one.cached, default=None)


def load_head(target: Any, path: str, options: LoadOptions) -> LlamaHead:
    """See `edgespec.loop.engines.LoadsHeads`."""
    if not isinstance(target, LlamaBackend):
        raise ModelError(f"{path}: a head needs its target in this process: leave out --lenders or the head")
    functions()
    head = find_head(path)
    if head is None:
        raise ModelError(f"{path}: is no head, and has none")
    if head.whole and not (target.own_head and Path(path).samefile(target.path)):
        raise ModelError(f"{path}: the head of a model needs that model as its target, loaded with it")
    check_d2t(path, target.vocab.size)
    computing = target.computing
    options_of_model: dict[str, Any] = {"load_mtp": not head.is_eagle, "use_extra_bufts": "repacked" in computing}
    layers_of_model = {"n_gpu_layers": -1 if computing["gpu_layers"] else 0}
    options_of_model |= layers_of_model if "device" in computing else PROCESSOR_ONLY
    model = target.model if head.whole else load_model(path, **options_of_model)
    context = None
    try:
        layers = [NEXTN] if head.whole else starts_from(head, path, model, target.path, target.model)
        length = target.capabilities.context_length
        size = of_head(ContextSize(length, options.budget, options.sessions, 0)).of(model)
        params = size.params(model, target.context)
        params.n_threads = params.n_threads_batch = computing["threads"]
        params.op_offload = "op_offload" not in computing
        params.n_seq_max = max(params.n_seq_max, llama_cpp.llama_n_seq_max(target.context))  # the ids may be its own
        params.n_outputs_max = max(params.n_outputs_max, params.n_seq_max)
        context = make_context(path, model, size, params)
        kind = LlamaAssistant if head.architecture == ASSISTANT else LlamaHead
        backend = kind(target, path, head, model, context, size)
    except BaseException:
        if context:
            llama_cpp.llama_free(context)
        if not head.whole:
            llama_cpp.llama_model_free(model)
        raise
    target.keep_states(layers)
    return backend
