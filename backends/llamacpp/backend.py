"""GGUF models on llama.cpp, through llama-cpp-python's low-level API.

Trees need no kernel of their own: `session.py` says how one lives in llama.cpp's cache.
A model larger than memory is streamed: `memory.py`.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from time import monotonic
from typing import Any, cast

from edgespec.errors import Closed, Interrupted, ModelError, UsageError
from edgespec.loop.backend import Capabilities, Logits, Work
from edgespec.loop.passes import check_batch, shape_of
from edgespec.loop.sampling import Float32Array
from edgespec.loop.session_files import content_of, identity_of
from edgespec.loop.shapes import BatchInvariance
from edgespec.machine.memory import left_of, parse_size
from edgespec.weights.linux import mappings
from edgespec.weights.plan import Plan
from edgespec.weights.preload import Progress
from edgespec.weights.ring import Streamer

from . import recurrent as paths
from .batch import Batch
from .cells import IN_WINDOWS, TILE, Cells, Rows
from .context import ContextSize, check_options, kept_of, make_context
from .ggml.files import (
    engine_build,
    last_log,
    llama_cpp,
    load_model,
    metadata,
    parts,
    without_amx,
)
from .ggml.signals import Signals
from .ggml.stop import ABORTED, Stop
from .lending.child_process import Apart, load_apart
from .lending.rpc import lent_line, lent_options
from .logits import LlamaLogits
from .memory.attention import ALIKE, can_be_alike, chooser, has_kernels, noted
from .memory.gpu import devices, kept_off
from .memory.layer_hooks import LayerWatch
from .memory.mixture import Mixture, open_mixture
from .memory.planning import (
    MIN_NODES,
    SHARE,
    choose_gpu_layers,
    is_plenty,
    keeps_experts,
    plan_memory,
    start_streaming,
)
from .memory.probe_model import REPACKED, load_specimen
from .memory.skip_padding import Sparing, may_spare
from .memory.threads import compute_cores, crowd, threads_for
from .memory.tolerance import tolerance
from .recurrent import PathSession, ids_of_session, is_recurrent, most_paths, why_not
from .seq_ids import Ids
from .session import LlamaSession, Placement, paddings
from .vocab import LlamaVocab, load_vocab

__all__ = ["LlamaBackend", "load", "load_vocab", "specimen_of"]


class LlamaBackend:
    """See `edgespec.loop.backend.Backend`. One model with one context; make it with `load`."""

    name = "llamacpp"

    def __init__(
        self,
        model: Any,
        context: Any,
        capabilities: Capabilities,
        sessions: int,
        in_order: bool,
        watch: LayerWatch | Sparing | None = None,
        yielding: int = 0,
        *,
        ids: int,
        computing: Mapping[str, str | int | None],
    ) -> None:
        self.vocab = LlamaVocab(model)
        self.capabilities = capabilities
        self.in_order = in_order
        self.notes: list[str] = []
        self.plan: Plan | None = None  # of what is where, if not everything is in memory
        self._watch = watch
        self._yielding = yielding  # threads of a pass, if it takes fewer while other programs keep processors busy
        self.build = engine_build()
        self.computing = computing
        self.tiles = has_kernels(str(computing["kv_type"]))
        self.state_width = 0  # of the states that are kept of each row, where all rows are wanted; 0: none are
        self.memory: Any = llama_cpp.llama_get_memory(context)
        self.model = model
        self.context = context
        window = llama_cpp.llama_model_n_swa(model)
        self.copies = not window and "lenders" not in computing  # cells may be copied, for less than rows cost
        self._files: Sequence[str] = ()  # of the model
        self._before_pass: Callable[[int], None] = lambda rows: None  # told how many rows the next one has
        self._ids = Ids(sessions, ids, ids // sessions if capabilities.paths else IN_WINDOWS if window else 1)
        self.cells = Cells(context, ids, window)
        self._open: list[Any] = []
        self.sessions: Sequence[Any] = self._open
        self._most_cells = 0  # that were in use at once since all were free
        self._batch = Batch(llama_cpp.llama_n_batch(context))
        # States of recurrent layers may lie elsewhere after a pass that was ended: those in memory are short.
        here = computing.get("gpu_layers") == 0 or "lenders" in computing
        self.stop = Stop(context, asked=here and not capabilities.paths)
        if watch:
            watch.stop = self.stop

    def _check_open(self) -> None:
        if self.context is None:
            raise Closed

    def open(self) -> Any:  # a session of either kind
        self._check_open()
        if self._ids.all_open:
            raise UsageError("all sessions of this model are open: load it with a larger `sessions`")
        kind = PathSession if self.capabilities.paths else LlamaSession
        session = kind(self, self._ids.open())
        if not self._open:
            self._most_cells = 0
        self._open.append(session)
        return session

    def release(self, session: LlamaSession | PathSession) -> None:
        """A session is empty, and was closed."""
        self._open.remove(session)
        self._ids.close(session.ids)

    def lend(self, seq: int, session: LlamaSession) -> None:
        """A session gets a sequence id that was free when its nodes were placed."""
        self._ids.lend(seq, session, self._open, self.memory)

    def give_back(self, ids: list[int]) -> None:
        """Nothing carries these sequence ids any more."""
        self._ids.give_back(ids)

    def make_room(self, rows: int) -> None:
        """See `Cells.make_room`."""
        self.cells.make_room(rows, self._open)

    @property
    def streamer(self) -> Streamer | None:
        """What streams the weights, if they are streamed."""
        return self._watch.streamer if self._watch else None

    @property
    def mixture(self) -> Mixture | None:
        """What reads experts as they are chosen, if they are."""
        return self._watch.mixture if self._watch else None

    @property
    def wait_seconds(self) -> float:
        return self._watch.wait_seconds if self._watch else 0.0

    def left_of_gpu(self, memory: int | str) -> int:
        """What llama.cpp leaves of so many bytes of GPUs with their own memory. Raises UsageError: nothing."""
        return left_of("gpu_memory", memory, sum(device.used for device in devices() if not device.shared))

    def keep_to(self, exact: BatchInvariance) -> None:
        self.capabilities = replace(self.capabilities, exact=exact, logit_tolerance=0.0)

    def alone(self, session: LlamaSession) -> bool:
        """Whether its cells are all that is in the cache."""
        if self.cells.wasted:
            return False
        return not any(other.held or other.has_nodes for other in self._open if other is not session)

    def forward(self, batch: Sequence[Work]) -> list[Logits]:
        self._check_open()
        if self.capabilities.paths:
            try:
                return paths.forward(self, batch, llama_cpp.llama_n_ubatch(self.context))
            finally:
                self.stop.clear()
        check_batch(batch, self.capabilities)
        sessions = [cast(LlamaSession, work.session) for work in batch]
        # All works find room before the first is taken in: a refused batch changes nothing.
        placements, taken = list[Placement](), {seq for session in self._open for seq in session.tips}
        for session, work in zip(sessions, batch, strict=True):
            placements.append(session.place(work, self._ids.offer(session, self._open, taken)))
            taken.update(placements[-1].tips)
        if self.in_order:
            most = sum(len(work.token_ids) + work.session.unread_committed + TILE for work in batch)
            self.make_room(most + sessions[0].tail(batch[0]))
        between = paddings(sessions, batch, self.cells, self._open)
        logits: list[Logits] = []
        rows, end = Rows([], [], [], []), None if any(session.has_nodes for session in sessions) else self.cells.end
        for session, placement, padding in zip(sessions, placements, between, strict=True):
            rows.pad(padding, self.cells.padding_id)
            start, owed = len(rows.tokens), session.unread_committed
            rows.add(*session.add(placement, self.cells.end + start))
            index = {placement.first + node: start + owed + i for i, node in enumerate(placement.order)}
            logits.append(LlamaLogits(self.context, self.vocab.size, self.state_width, index))
            rows.wanted.extend(index[node] for node in placement.work.wanted.tolist())
        self.cells.end += len(rows.tokens)
        count = len(rows.tokens)
        if shape := shape_of(self.capabilities, batch):
            rows.fill(shape, self.cells.padding_id)
        if self.state_width:
            llama_cpp.llama_set_embeddings(self.context, len(rows.wanted) == len(rows.tokens))  # all rows or none
        try:
            self.compute(rows, prompt=any(work.prompt for work in batch), padding=len(rows.tokens) - count)
        except BaseException as error:
            for session in sessions:
                session.give_up()
            self.cells.drop_padding(0)
            if isinstance(error, Interrupted) and end is not None:
                self.cells.end = end  # all that the pass had filled is free again
            else:
                self.cells.uncertain = True
            raise
        finally:
            self.stop.clear()
        with Signals().held():
            if rows.padding:
                self.cells.drop_padding(sum(between))  # what stands before others stays
            for session in sessions:
                session.evaluated()
        return logits

    def compute(self, rows: Rows, *, prompt: bool, padding: int) -> None:
        """One call of llama.cpp; arguments as for `Mixture.begin`."""
        if self._watch:
            self._watch.begin(prompt=prompt, rows=len(rows.tokens), padding=padding)
        self._decode(self._batch.fill(rows))

    def logits_of(self, row: int) -> Float32Array:
        """Of a row that was wanted, shape [V], the caller's to keep."""
        return LlamaLogits(self.context, self.vocab.size, 0, {0: row}).row(0)

    def _decode(self, total: int) -> None:
        watch = self._watch
        if self._yielding:
            self._most_cells = max(self._most_cells, self.cells.end, sum(session.size for session in self._open))
            others = crowd().others(monotonic())
            threads = threads_for(self._yielding, others, total, self._most_cells)
            llama_cpp.llama_set_n_threads(self.context, threads, threads)
        self._before_pass(total)
        with watch.signals.held() if watch else nullcontext():
            status = llama_cpp.llama_decode(self.context, self._batch.struct)
            llama_cpp.llama_synchronize(self.context)
            if watch:
                watch.finish()
        if self._yielding:
            crowd().pass_ended(monotonic())
        if watch and watch.error is not None:
            raise watch.error
        if status == ABORTED:
            raise Interrupted("the pass was interrupted")
        if status != 0:
            raise ModelError(f"llama.cpp could not evaluate {total} tokens (code {status}): {last_log()}")

    def interrupt(self) -> None:
        self.stop.set()

    @property
    def interrupted(self) -> bool:
        """Whether the pass under way, or the next, is to end."""
        return self.stop.is_set

    @property
    def identity(self) -> dict[str, Any]:
        return identity_of(self, content_of(*self._files))

    def close(self) -> None:
        if self.context is not None:
            self.memory = None
            llama_cpp.llama_free(self.context)
            if self._watch:
                self._watch.close()
            self.vocab.close()  # and the model with it
            self.context = self.model = None


NOT_APART = ("path", "lenders", "progress", "agrees")  # arguments that stay here where a model is loaded apart


def load(
    path: str,
    *,
    context_length: int = 4096,
    budget: int = 64,
    sessions: int = 1,
    threads: int | None = None,
    gpu_layers: int | None = None,
    gpu_memory: int | str | None = None,
    in_order: bool = True,
    memory: int | str | None = None,
    kv_type: str | None = None,
    beside: Sequence[str] = (),
    resident: bool = False,
    wide: bool = False,
    exact: str | None = "off",
    share: float | None = None,
    progress: Progress = lambda done, total: None,
    agrees: Callable[..., bool] = lambda build, computing, instead=None: False,
    lenders: Sequence[str] = (),
    borrowed: Any = None,
) -> LlamaBackend | Apart:
    """Load a GGUF file. If it does not fit into memory, its weights are streamed.

    Args:
        path: the file; for a split model its first part.
        context_length: most tokens of text in one session; 0 = what the model was trained for.
        budget: largest tree that will be asked for, in nodes without the root.
        sessions: how many sessions may be open at once.
        threads: compute threads; default: one per core (performance cores on a Mac), fewer while other programs keep
            cores busy, where that does not change a bit of the result.
        gpu_layers: layers to keep on the GPU; -1 = all; default: as many as `gpu_memory` takes (`gpu.py`).
        gpu_memory: bytes of each GPU's memory that this program may take, such as "10G"; default: what is free.
        in_order: keep a session's cells in the order of its text, as plain decoding does, since llama.cpp's rounding
            depends on it. Committed nodes behind a gap lose their cells then, and the next pass reads them again:
            a few tokens. A draft does without.
        memory: bytes, such as "12G", that this model, what is `beside` it and the program may take; default: what is
            free.
        kv_type: type of keys and values in the cache, one of `KV_TYPES`, or one of each, as in "f16/q8_0"; default:
            f16, for float32 weights f32. With another, float32 weights are computed less exactly.
        beside: further model files that will be loaded, with the same options, and stay in memory: the draft.
        resident: do not stream, whatever is free: another model's plan has left room for this one.
        wide: passes will mostly have 16 nodes and more. For fewer llama.cpp may be quicker with weights repacked at
            load, where there is memory for both; for more it is without (docs/measured.md).
        exact: "off", or which passes shall agree to the bit, as for `edgespec.load`. Then weights are repacked only if
            some `agrees`.
        share: sessions take cells of the cache from one pool, which has one context and this part of one for each
            further session; default: 1 where memory is plentiful, else a quarter.
        progress: if weights are streamed, called with (bytes read, bytes in all) of those that stay in memory.
        agrees: tells of a `build` and `computing` whether passes of some shape agree to the bit, as `exact` asks, and
            whether they are quicker than with another `computing` instead. Also called before weights that are streamed
            fill the memory, when there is still room to try.
        lenders: addresses HOST:PORT of `edgespec lend`; layers that do not fit here go there (`apart.py`).
        borrowed: what `lending.borrow` returned: the same, within the process of its own that `apart.py` starts.

    Raises:
        ModelError: the file is missing, not a GGUF, damaged, or of an architecture that cannot hold a tree.
        UsageError: an option is out of range, or the memory too little for the model.
    """
    check_options(context_length, budget, sessions, threads)
    if lenders:
        given = {name: value for name, value in locals().items() if name not in NOT_APART}
        return load_apart(path, list(lenders), given, progress)
    memory = parse_size(memory) if isinstance(memory, str) else memory
    plenty = is_plenty(path, memory, beside)
    share = share if share is not None else 1.0 if plenty or resident else SHARE
    size = ContextSize(context_length, budget, sessions, MIN_NODES, kv_type, share)
    plan, notes = None, list[str]()
    if gpu_layers is None:
        gpu_layers = choose_gpu_layers(
            path, size, memory=memory, beside=beside, resident=resident, gpu_memory=gpu_memory, borrowed=borrowed
        )
    elif gpu_memory is not None:
        raise UsageError("gpu_layers and gpu_memory both say how many layers go to the GPU: give one of them")
    elif gpu_layers and not borrowed and not devices():
        gpu_layers, notes = 0, ["this llama.cpp has no GPU, so --gpu-layers changes nothing"]
    experts_here = not borrowed and keeps_experts(path, gpu_layers, size)
    if not plenty and not resident:
        plan, size, more = plan_memory(
            path, size, memory=memory, beside=beside, gpu_layers=gpu_layers, lent=bool(borrowed),
            experts_here=experts_here,
        )  # fmt: skip
        notes += more
    known = {mapping.start for part in parts(path) for mapping in mappings(part)} if plan else set()
    n_threads = threads or compute_cores()
    computing: dict[str, Any] = {"threads": n_threads, "gpu_layers": gpu_layers}
    bitwise = in_order and exact != "off" and gpu_layers == 0 and not borrowed  # what was read keeps its bits
    alike = bitwise and can_be_alike(kv_type)
    computing |= ALIKE if alike else {}
    # Repacked weights are copies outside the file's mapping.
    repack = plenty and not wide and not without_amx(llama_cpp.llama_print_system_info())
    if repack and exact != "off":
        repack = bitwise
        if bitwise and (kept := kept_of(path, size)):  # models without classes lose nothing
            usual = computing | {"kv_type": kept}
            repack = agrees(engine_build(), usual | REPACKED, usual)
    computing |= REPACKED if repack else {}
    options: dict[str, Any] = {"use_extra_bufts": repack}
    if plan:
        options["load_mode"] = llama_cpp.LLAMA_LOAD_MODE_MMAP
    if borrowed:
        options |= lent_options(borrowed)
        notes.append(lent_line(path, gpu_layers))
    else:
        options |= kept_off(plan, gpu_layers, experts_here)
    model = load_model(path, n_gpu_layers=gpu_layers, **options)
    watch: LayerWatch | Sparing | None = None
    context = None
    try:
        if is_recurrent(model) and (reason := why_not(model)):
            raise ModelError(f"{path}: {reason}; use another model")
        fits = plan is None or not (plan.streamed or plan.cached)
        if not fits and not is_recurrent(model):
            agrees(engine_build(), computing | {"kv_type": size.kept_in(model)})
        if plan:
            streamer, speed, kept = start_streaming(path, plan, known, progress)
            watch = LayerWatch(streamer)
        elif bitwise and may_spare(path):
            watch = Sparing()
        streams = bool(plan and plan.streamed)
        size = size.of(model)
        params = size.params(model)
        params.n_threads = params.n_threads_batch = n_threads
        chosen = plan is not None and plan.slots_of_experts >= 0  # experts are read as they are chosen
        if watch and (streams or chosen or not plan):
            params.cb_eval = watch.callback
        elif watch and plan and plan.cached and bitwise:
            watch.sparing = Sparing()  # the page cache is spared experts of padding, too
            params.cb_eval = watch.sparing.callback
        if streams or chosen or borrowed:
            params.op_offload = False  # a GPU that takes part in long prompts would take weights before they are there
        if alike and is_recurrent(model):  # has no classes
            alike = False
            computing.pop(*ALIKE)
        with noted() if alike else nullcontext(list[int]()) as processors:
            context = make_context(path, model, size, params)
        if watch and watch.sparing:
            watch.sparing.learn(context)
        elif isinstance(watch, LayerWatch) and plan and chosen:
            watch.mixture = open_mixture(path, plan, watch.nodes(context, whole=gpu_layers != 0), notes, progress)
            if watch.mixture is None:
                plan = watch.streamer.plan = replace(plan, slots_of_experts=-1, pool_bytes=0)
        if plan:
            notes += filter(None, [f"{plan.line(speed)}; {kept}", plan.warning(speed)])
    except BaseException:
        if context:
            llama_cpp.llama_free(context)
        if watch:
            watch.close()
        llama_cpp.llama_model_free(model)
        raise
    lanes = most_paths(model, budget, sessions)
    capabilities = Capabilities(
        context_length=size.length(model),
        max_nodes=size.max_nodes,
        max_wanted=params.n_outputs_max,
        max_leaves=lanes or size.max_leaves,
        logit_tolerance=tolerance(metadata(model, "general.file_type"), size.kv_type),
        streams=streams,
        read_seconds=plan.streamed_bytes / speed if plan and speed else 0.0,
        layers=llama_cpp.llama_model_n_layer(model),
        experts=watch.mixture.shape if watch and watch.mixture else None,
        paths=lanes > 0,
        gaps=lanes > 0,  # classes of shapes are not looked for: a pass's shape is its paths' as well
        spare_leaves=None if lanes else size.ids - size.own_ids * sessions,
        cells=size.tokens(model) if sessions > 1 and share < 1 and not lanes else None,
    )
    ids = ids_of_session(lanes) * sessions if lanes else size.ids
    # Streamed weights are waited for: it is not threads that others disturb.
    yielding = 0 if threads or capabilities.streams else params.n_threads
    if yielding:
        crowd()  # begins to look around now, so that the first pass knows
    computing |= {"kv_type": size.kept_in(model)} | ({"lenders": len(borrowed) - 1} if borrowed else {})
    backend = LlamaBackend(
        model, context, capabilities, sessions, in_order, watch, yielding, ids=ids, computing=computing
    )
    if processors:
        backend._before_pass = chooser(processors[0])
    backend.notes, backend.plan, backend._files = notes, plan, parts(path)
    return backend


def specimen_of(path: str, **options: Any) -> AbstractContextManager[LlamaBackend]:
    """A small model that computes as the one at `path`, loaded with the same options does; freed at the end."""
    return load_specimen(path, load, **options)
