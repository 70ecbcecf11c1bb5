"""GGUF models on llama.cpp, through llama-cpp-python's low-level API.

`engine.py` loads models; `memory/planning.py` streams those larger than memory.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from time import monotonic
from typing import Any, cast

from edgespec.errors import Interrupted, ModelError
from edgespec.loop.backend import Capabilities, Logits, Placed, Work
from edgespec.loop.passes import check_batch, shape_of
from edgespec.loop.sampling import Float32Array
from edgespec.loop.shapes import TILE, BatchInvariance
from edgespec.machine.process import at_end
from edgespec.weights.plan import Plan
from edgespec.weights.ring import Streamer

from ..common.interrupts import one_pass
from ..common.signals import Signals
from .batch import Batch
from .cells import Rows
from .embeddings import ROWS, Embedder, pooling_of
from .ggml.files import forget_log, last_log, llama_cpp, metadata
from .ggml.stop import ABORTED, install
from .logits import LlamaLogits, StateLogits
from .memory.attention import has_kernels
from .memory.layer_hooks import LayerHooks
from .memory.mixture import Mixture
from .memory.skip_padding import SkipPadding
from .memory.threads import SlowPasses, end_team, other_load, threads_for
from .memory.watch import Watch, WatchedLogits
from .recurrent import LlamaRecurrentSession, forward_recurrent
from .session import LlamaSession, Owner, Placement, paddings
from .states import LAST_LAYER, NEXTN, WHOLE_LAST_LAYER, states_of
from .vocab import LlamaVocab


class LlamaBackend(Owner):
    """See `edgespec.loop.backend.Backend`; made by `engine.py`."""

    kind: Any = LlamaSession

    def __init__(
        self,
        model: Any,
        context: Any,
        capabilities: Capabilities,
        sessions: int,
        in_order: bool,
        hooks: LayerHooks | SkipPadding | None = None,
        most_threads: int = 0,
        *,
        ids: int,
        computing: Mapping[str, str | int | None],
        shared: LlamaVocab | None = None,
        width: int = 0,
        free_model: Callable[[], object] | None = None,
    ) -> None:
        self.own_vocab = vocab = shared or LlamaVocab(model)
        window = llama_cpp.llama_model_n_swa(model)
        tiles = has_kernels(str(computing["kv_type"]))
        super().__init__(
            context, vocab, capabilities, sessions, in_order, tiles=tiles, ids=ids, window=window, computing=computing
        )
        if capabilities.paths:
            self.kind = LlamaRecurrentSession
        self.notes: Sequence[str] = ()
        self.plan: Plan | None = None
        self.placed = Placed(capabilities.layers)
        self._hooks = hooks
        self.signals = Signals()
        self.most_threads = most_threads  # of a pass, which takes fewer while other programs run; 0: always all
        self._slow = SlowPasses()
        self.splits_cells = self.tiles  # in passes of one node over many cells, among the threads
        self.watch: Watch | None = None  # of a probe model
        self.state_width = 0  # floats of a row's hidden state; 0: states are not kept
        self.heads = weakref.WeakSet[Any]()  # which are closed before the model is freed
        self.path, self.own_head = "", False
        self.model = model
        self.row_hook: Callable[[int], None] = lambda rows: None
        self.pooling, self.embed_rows = pooling_of(context), ROWS
        self._embedder: Embedder | None = None
        self.most_memory: int | None = None  # bytes that the program may take
        self._contexts = [context]
        self.batch = Batch(llama_cpp.llama_n_batch(context), width)
        # An aborted pass may have moved recurrent states without their contents.
        here = computing.get("gpu_layers") == 0 or "lenders" in computing
        self._aborts = here and not capabilities.paths
        self.use_flag(self.stop.flag)
        if hooks:
            hooks.stop = self.stop
        # Also where a program ends without `close`: Metal aborts if it is taken down before its buffers.
        self._free = at_end(self, free, self._contexts, hooks, free_model or vocab.close)

    def use_flag(self, flag: Any) -> None:
        """Have this flag, as of `Stop`, end passes from now on; no pass may be under way."""
        self.stop.flag = flag
        if self._aborts:
            install(self.stop, self.context)

    @property
    def streamer(self) -> Streamer | None:
        return self._hooks.streamer if self._hooks else None

    @property
    def mixture(self) -> Mixture | None:
        return self._hooks.mixture if self._hooks else None

    @property
    def wait_seconds(self) -> float:
        return self._hooks.wait_seconds if self._hooks else 0.0

    def keep_to(self, exact: BatchInvariance) -> None:
        self.capabilities = replace(self.capabilities, exact=exact, logit_tolerance=0.0)

    @one_pass
    def forward(self, batch: Sequence[Work]) -> list[Logits]:
        self._check_open()
        if self.capabilities.paths:
            return forward_recurrent(self, batch, llama_cpp.llama_n_ubatch(self.context))
        check_batch(batch, self.capabilities)
        sessions = [cast(LlamaSession, work.session) for work in batch]
        # Place all works before the first is added: a refused batch changes nothing.
        placements, taken = list[Placement](), {seq for session in self.sessions for seq in session.tips}
        for session, work in zip(sessions, batch, strict=True):
            placements.append(session.place(work, self.ids.offer(session, self.sessions, taken)))
            taken.update(placements[-1].tips)
        if self.in_order:
            most = sum(len(work.token_ids) + work.session.unread_committed + TILE for work in batch)
            class_rows = TILE if any(work.prompt for work in batch) else 0  # a short part is padded on both sides
            self.make_room(most + class_rows + sessions[0].tail(batch[0]))
        between = paddings(sessions, batch, self.cells, self.sessions)
        logits: list[Logits] = []
        rows, end = Rows([], [], [], []), self.cells.end
        try:
            for session, placement, padding in zip(sessions, placements, between, strict=True):
                rows.pad(padding, self.cells.padding_id)
                start, unread = len(rows.tokens), session.unread_committed
                rows.add(*session.add(placement, self.cells.end + start))
                index = {placement.first + node: start + unread + i for i, node in enumerate(placement.order)}
                logits.append(self._logits(index))
                rows.wanted.extend(index[node] for node in placement.work.wanted.tolist())
            self.cells.end += len(rows.tokens)
            count = len(rows.tokens)
            if (exact := self.capabilities.exact) and (shape := shape_of(self.capabilities, batch)):
                rows.fill(shape, exact.trees, self.cells.padding_id)
            if self.state_width:
                llama_cpp.llama_set_embeddings(self.context, len(rows.wanted) == len(rows.tokens))
            self.compute(rows, prompt=any(work.prompt for work in batch), padding=len(rows.tokens) - count)
            with Signals().held():
                if rows.padding:
                    self.cells.drop_padding(sum(between))
                for session in sessions:
                    session.evaluated()
        except BaseException as error:
            self.cells.end = end
            for session, placement in zip(sessions, placements, strict=True):
                session.give_up(placement)
            self.cells.drop_padding(0)
            if not isinstance(error, Interrupted):
                self.cells.uncertain = True
            raise
        return logits

    def _logits(self, batch_index: dict[int, int]) -> LlamaLogits:
        made = self.context, self.vocab.size, self.state_width, batch_index
        if self.watch:
            return WatchedLogits(*made, self.watch)
        return StateLogits(*made, self.states) if self.states else LlamaLogits(*made)

    def keep_states(self, layers: Sequence[int]) -> None:
        """Keep states in passes, for a head; called before the first session is opened.

        Args:
            layers: as of `RowStates`; none: end it, after the last session was closed.
        """
        if self.states:
            self.states.close()
        self.states = states_of(self.model, self.context, layers) if layers else None
        self.capabilities = replace(self.capabilities, states=self.states.size if self.states else 0)
        self.computing = {name: value for name, value in self.computing.items() if name != LAST_LAYER}
        name = metadata(self.model, "general.architecture").decode()
        if NEXTN in layers and name in WHOLE_LAST_LAYER:
            self.computing = {**self.computing, LAST_LAYER: "whole"}

    def compute(self, rows: Rows, *, prompt: bool, padding: int) -> None:
        if self._hooks:
            self._hooks.begin(prompt=prompt, rows=len(rows.tokens), padding=padding)
        self._decode(self.batch.fill(rows))

    def logits_of(self, row: int) -> Float32Array:
        return LlamaLogits(self.context, self.vocab.size, 0, {0: row}).row(0)

    def _decode(self, total: int) -> None:
        hooks = self._hooks
        if self.most_threads:
            held = sum(session.size for session in self.sessions)
            # Paths leave holes, and a pass that failed leaves cells, so there what was held before counts, too.
            before = self._most_cells if self.capabilities.paths or self.cells.uncertain else 0
            self._most_cells = max(before, self.cells.end, held)
            others, began = other_load().others(monotonic()), monotonic()
            fewer = self._slow.fewer(began)
            cells = self._most_cells if self.splits_cells else 0
            threads = threads_for(self.most_threads, others, fewer, total, cells)
            llama_cpp.llama_set_n_threads(self.context, threads, threads)
        self.row_hook(total)
        forget_log()
        with (hooks or self).signals.held():
            status = llama_cpp.llama_decode(self.context, self.batch.struct)
            llama_cpp.llama_synchronize(self.context)
            if hooks:
                hooks.finish()
        if self.most_threads:
            other_load().pass_ended(ended := monotonic())
            self._slow.took(total, self._most_cells, fewer, ended - began, ended, self.most_threads)
        if hooks and hooks.error is not None:
            raise hooks.error
        if status == ABORTED:
            raise Interrupted("the pass was interrupted")
        if status != 0:
            raise ModelError(f"llama.cpp could not evaluate {total} tokens (code {status}): {last_log()}")

    def embed(self, token_ids: Sequence[int], start: int) -> Float32Array:
        """See `edgespec.loop.backend.Embeds`."""
        self._check_open()
        if self._embedder is None:
            self._embedder = Embedder(self)
            self._contexts.append(self._embedder.context)
        return self._embedder.states(token_ids, start)

    def close(self) -> None:
        for head in [*self.heads]:
            head.close()
        self.context = self.model = self.memory = None  # at once: another thread may close it, too
        self._free()
        end_team()


def free(contexts: Sequence[Any], hooks: LayerHooks | SkipPadding | None, free_model: Callable[[], object]) -> None:
    for context in contexts:
        llama_cpp.llama_free(context)
    if hooks:
        hooks.close()
    free_model()
