"""Model folders on MLX, through mlx-lm's model classes, quantised or not.

Three replacements (`tree.py`) make a model class read a tree. Models with recurrent layers read trees as paths, and
need no other ropes (`recurrent.py`). Cells of a layer's keys and values:

    cells 0 to length - 1   committed tokens, in order
    cells from length on    uncommitted nodes, in the order of their numbers
    mask                    a node sees committed tokens, its ancestors and itself; a sliding window counts positions
    commit                  the accepted nodes' cells move behind the committed tokens; other cells stay

Cells outside a window stay, so a session can be rewound.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from edgespec.errors import Closed, ModelError, UsageError, check_whole, failing_as, named, undone
from edgespec.loop.backend import Capabilities, Logits, Placed, Vocab, Work
from edgespec.loop.engines import Computing, Engine, LoadOptions, LoadPlan, Machine, Progress
from edgespec.loop.passes import shape_of
from edgespec.loop.sampling import Float32Array, IdArray, Scores
from edgespec.loop.session_files import content_of, identity_of
from edgespec.loop.shapes import ALWAYS, BatchInvariance, RowClass, also_wanted
from edgespec.machine import memory as process
from edgespec.machine.disk import Reading
from edgespec.machine.measurements import identity, recall, remember
from edgespec.machine.memory import in_bytes
from edgespec.machine.this_machine import Gpu
from edgespec.models.heads import is_head
from edgespec.weights.plan import Plan
from edgespec.weights.ring import can_stream, measure_disk

from ..common.hf_vocab import HfVocab, load_vocab
from ..common.interrupts import Interruptible, Stop, interruptible, one_pass
from ..common.loader import loader
from ..common.model_folder import content_files, experts_of, refused
from ..common.nodes import checked, is_another, last_row, rows_of_tree
from ..common.row_logits import HostLogits
from .experts import Mixture
from .head_files import head_bytes
from .loading import LazyModel, evaluate, open_model
from .memory import (
    MIN_NODES,
    Layout,
    PassSize,
    draft_bytes,
    find_gpus,
    on_gpu,
    parameter_bytes,
    plan_memory,
    set_memory_limits,
)
from .recurrent import LaneCache, MlxRecurrentSession, is_recurrent
from .session import Form, MlxSession
from .streaming import LayerSweep, SlotStore
from .tree import LayerInputs, TreeCache, cut_rows

__all__ = ["MlxBackend", "MlxEngine", "load", "load_vocab"]

MOST_SESSIONS = 256
DEFAULT_CONTEXT = 4096  # tokens, if config.json has no max_position_embeddings
CELLS_OF_SMALL = 8
BLOCKS = 64  # for `device_top_ids`

# Bound of the change of a logit between passes of different shapes, by the type of activations: twice the largest
# difference to float32 over 24 positions of SmolLM2 (float16 0.084, bfloat16 1.08); not measured on Apple's GPU, which
# may multiply float32 with float16's precision (TF32).
TOLERANCE = {mx.float32: 0.01, mx.float16: 0.2, mx.bfloat16: 2.0}


class MlxLogits(HostLogits):
    """See `GivesStates` in `edgespec.loop.backend`, too."""

    def __init__(self, rows: Any, nodes: Sequence[int], first: int = 0, states: Any = None) -> None:
        """
        Args:
            rows: float32 [wanted, V].
            nodes: that are wanted.
            first: number of the work's first node.
            states: float32 [nodes of the work, D]; None: the model gives none.
        """
        self._rows = rows
        self._index = {node: i for i, node in enumerate(nodes)}
        self._first, self._states = first, states

    @cached_property
    def _host(self) -> Float32Array:
        rows: Float32Array = np.array(self._rows, copy=False)
        return rows

    def view(self, node: int) -> Float32Array:
        row: Float32Array = self._host[self._index[node]]
        return row

    def states(self, nodes: Sequence[int]) -> Float32Array:
        states: Float32Array = np.array(self._states, copy=False)[np.asarray(nodes, np.intp) - self._first]
        return states

    def top(
        self, nodes: Sequence[int], k: int, temperature: float, noise: Sequence[Float32Array | None]
    ) -> tuple[list[IdArray], list[Scores]]:
        if on_gpu():
            return device_top(self._rows, [self._index[node] for node in nodes], k, temperature, noise)
        return super().top(nodes, k, temperature, noise)  # on a CPU, MLX takes five to ten times as long as numpy


def device_top(
    rows: Any, index: Sequence[int], k: int, temperature: float, noise: Sequence[Float32Array | None]
) -> tuple[list[IdArray], list[Scores]]:
    """`Logits.top` of rows [n, V] on the device; only ids and values come to the host."""
    size = rows.shape[1]
    sizes = [size if extra is None else min(size, len(extra)) for extra in noise]
    on_device = {id(extra): mx.array(extra[:size]) for extra in noise if extra is not None}
    found = []
    for i, extra, count in zip(index, noise, sizes, strict=True):
        scores = rows[i, :count] if extra is None else rows[i, :count] + on_device[id(extra)]
        scores = scores / temperature
        ids = device_top_ids(scores, min(k, count))
        found.append((ids, scores[ids] - mx.logsumexp(scores)))
    mx.eval(found)
    all_ids, all_values = list[IdArray](), list[Scores]()
    for best, log_probs in found:
        ids, values = np.array(best).astype(np.int64), np.array(log_probs).astype(np.float64)
        order = np.lexsort((ids, -values))
        all_ids.append(ids[order])
        all_values.append(values[order])
    return all_ids, all_values


def device_top_ids(scores: Any, k: int) -> Any:
    """Indices of the k largest of scores [V], in any order.

    They are in the k columns with the largest maxima of a [BLOCKS, V // BLOCKS] view, or in the rest after the view.
    """
    size = scores.shape[0]
    width = size // BLOCKS
    if k > width // 2:
        return mx.argpartition(-scores, k - 1)[:k]
    maxima = scores[: width * BLOCKS].reshape(BLOCKS, width).max(axis=0)
    columns = mx.argpartition(-maxima, k - 1)[:k]
    candidates = mx.concatenate(
        [(columns + width * mx.arange(BLOCKS)[:, None]).reshape(-1), mx.arange(width * BLOCKS, size)]
    )
    return candidates[mx.argpartition(-scores[candidates], k - 1)[:k]]


class MlxBackend(Interruptible):
    """See `edgespec.loop.backend.Backend`; made by `load`.

    Attributes:
        plan: of the weights that stay in memory; None: all.
        windows: of layers with attention, in tokens; None: all.
        sessions: that are open.
        inputs: of layers, for a head; None: no head is loaded.
    """

    name = "mlx"
    inputs: LayerInputs | None = None

    def __init__(
        self,
        model: Any,
        vocab: HfVocab,
        capabilities: Capabilities,
        windows: Sequence[int | None],
        sessions: int,
        sweep: LayerSweep | None,
        notes: Sequence[str],
        kinds: Sequence[Any] = (),
    ) -> None:
        self.vocab: Vocab = vocab
        self.capabilities = capabilities
        self.build = f"mlx {mx.__version__}, mlx-lm {mlx_lm.__version__}, {mx.default_device()}"
        self.computing: Computing = {}
        self.notes = notes
        self._model = model
        self._sweep = sweep
        self.windows = windows
        self._kinds = kinds  # as for `MlxRecurrentSession`
        self._max_sessions = sessions
        self.content = ""
        self.stop = sweep.stop if sweep else Stop()
        self.sessions: list[MlxSession] = []
        self.forms: tuple[list[Form], list[Form | None]] | None = None  # as of `MlxOwner`
        self._rows: Any = None  # rows whose final states the head gets; None: all
        self._cuts_rows = cut_rows(model, lambda: self._rows)

    def _check_open(self) -> None:
        if self._model is None:
            raise Closed

    @property
    def model(self) -> Any:
        self._check_open()
        return self._model

    def give_states(self, layers: Sequence[int], width: int = 0) -> None:
        """Let logits be `GivesStates`, with `width` values of what `layers` read (`LayerInputs`); no layers: end it."""
        if self.inputs:
            self.inputs.close()
        self.inputs = LayerInputs(self.model.layers, layers) if layers else None
        self.capabilities = replace(self.capabilities, states=width)

    def open(self) -> MlxSession:
        self._check_open()
        if len(self.sessions) == self._max_sessions:
            raise UsageError("all sessions of this model are open: load it with a larger `sessions`")
        capacity = self.capabilities.context_length + self.capabilities.max_nodes
        self.sessions.append(self._session(capacity))
        return self.sessions[-1]

    def _session(self, capacity: int) -> MlxSession:
        if self.capabilities.paths:
            return MlxRecurrentSession(self, [LaneCache(capacity, window) for window in self.windows], self._kinds)
        return MlxSession(self, [TreeCache(capacity, window) for window in self.windows])

    @property
    def plan(self) -> Plan | None:
        return self._sweep.streamer.plan if self._sweep else None

    @property
    def placed(self) -> Placed:
        layers, plan = len(self._model.layers), self.plan
        device, streamed = "the GPU" if on_gpu() else "", len(plan.streamed) if plan else 0
        return Placed(layers, device, layers if device else 0, streamed)

    @property
    def wait_seconds(self) -> float:
        return self._sweep.wait_seconds if self._sweep else 0.0

    @property
    def mixture(self) -> Mixture | None:
        return self._sweep.mixture if self._sweep else None

    def forget(self, session: MlxSession) -> None:
        self.sessions = [other for other in self.sessions if other is not session]

    def small_session(self) -> MlxSession:
        return self._session(CELLS_OF_SMALL)

    def keep_to(self, exact: BatchInvariance) -> None:
        self.capabilities = replace(self.capabilities, exact=exact, logit_tolerance=0.0)

    @one_pass
    def forward(self, batch: Sequence[Work]) -> list[Logits]:
        self._check_open()
        sessions, positions = checked(batch, self.capabilities)
        with interruptible(sessions, self.stop):
            self.stop.check()
            for session in sessions:
                while (tokens := session.place_unread()) is not None:
                    self._compute([session], [partial(self._graph, session, tokens, None)])
                    mx.eval(session.state)
                    session.take()
            made = self._compute(sessions, [partial(self._begin, *one) for one in zip(sessions, batch, strict=True)])
            mx.eval(
                [session.state for session in sessions], [array for one in made for array in one if array is not None]
            )
        found = list[Logits]()
        for session, work, places, (rows, states) in zip(sessions, batch, positions, made, strict=True):
            found.append(MlxLogits(rows, work.wanted.tolist(), session.nodes, states))
            session.add(work, places)
        self.forms = self.forms or sessions[0].forms()
        return found

    @property
    def identity(self) -> dict[str, Any]:
        return identity_of(self, self.content)

    def _compute(self, sessions: Sequence[MlxSession], graphs: Sequence[Callable[[], Any]]) -> list[Any]:
        """
        Returns:
            The results of `graphs`, one for each session; with streamed weights they are already computed.
        """

        return self._sweep.run(sessions, graphs) if self._sweep else [graph() for graph in graphs]

    def _begin(self, session: MlxSession, work: Work) -> tuple[Any, Any]:
        """
        Returns:
            As `_graph`; states of the work's nodes, or None.
        """
        count = len(work.token_ids)
        if self.mixture:
            self.mixture.prompt = work.prompt
        if (exact := self.capabilities.exact) and (shape := shape_of(self.capabilities, [work])):
            work = padded(work, session.nodes, shape, exact.trees)
        tokens, rows = session.place(work)
        wanted = rows[work.wanted - session.nodes]
        logits = self._graph(session, tokens, wanted if len(wanted) else None)
        return logits, self.inputs.take(rows[:count]) if self.inputs else None

    def _graph(self, session: MlxSession, tokens: Any, rows: Any) -> Any:
        """
        Args:
            session: of a work, or with unread tokens.
            tokens: [lanes, width].
            rows: wanted rows among the tokens, lane after lane; None: no logits.

        Returns:
            Logits float32 [rows, V], or None.
        """
        self._rows = chosen = None if rows is None else mx.array(rows)
        try:
            logits = self._model(mx.array(tokens), cache=session.given)
        finally:
            self._rows = None  # a draft may run the same model
        if rows is None:
            return None  # nothing evaluates the logits
        logits = logits.flatten(0, 1)
        return (logits if self._cuts_rows else logits[chosen]).astype(mx.float32)

    def close(self) -> None:
        for session in list(self.sessions):
            session.close()
        if self._sweep:
            self._sweep.close()
        self._model = self._sweep = None
        mx.clear_cache()


def padded(work: Work, first: int, shape: RowClass, trees: RowClass) -> Work:
    """Pad a work to a row class.

    Args:
        work: the work.
        first: number of its first new node.
        shape: the row class of its pass.
        trees: that of wanted rows.

    Returns:
        A copy with more nodes and wanted rows. The session does not know these nodes, so a later pass overwrites them.
    """
    count = shape.rows(len(work.token_ids))
    more = count - len(work.token_ids)
    extra = also_wanted((work.wanted - first).tolist(), count, trees)
    wanted = np.concatenate([work.wanted, first + np.array(extra, np.int32)])
    tokens = np.concatenate([work.token_ids, np.zeros(more, np.int32)])
    parents = np.concatenate([work.parents, np.full(more, -1, np.int32)])
    return replace(work, token_ids=tokens, parents=parents, wanted=wanted)


@dataclass(frozen=True, kw_only=True)
class MlxPlan(LoadPlan):
    """See `LoadPlan`.

    Attributes:
        lazy: the model.
        vocab: its tokenizer.
        size: of sessions and passes.
        layout: where weights lie; None: all stay in memory.
        first_notes: first of the loaded model's notes. `notes` stays None, so that `doctor` prints those of the loaded
            model.
        machine: that was planned for.
    """

    lazy: LazyModel
    vocab: HfVocab
    size: PassSize
    layout: Layout | None
    first_notes: Sequence[str]
    machine: Machine


class MlxEngine(Engine):
    """See `Engine`.

    Args:
        memory: bytes for everything; default: what is free, on a Mac at most what its GPU can hold. If the model is
            larger, weights are streamed.
    """

    supported = frozenset({"memory", "draft_files", "own_layers"})

    def gpus(self, device: str | None) -> list[Gpu]:
        return find_gpus()

    def plan(self, path: str, options: LoadOptions, machine: Machine) -> MlxPlan:
        """See `Engine.plan`.

        Raises:
            ModelError: also for a folder that mlx-lm has to convert before it can be streamed.
        """
        check_whole("sessions", options.sessions, 1, MOST_SESSIONS)
        memory, before = in_bytes("memory", options.memory), process.private_memory()
        lazy, vocab = open_model(path), load_vocab(path)
        used = machine.used + max(0, process.private_memory() - before)
        context_length = options.context_length or lazy.text_config.get("max_position_embeddings") or DEFAULT_CONTEXT
        size = PassSize(context_length, options.budget, options.sessions, MIN_NODES)
        plan, layout, notes = None, None, list[str]()
        if not options.resident and can_stream(machine):
            of_draft = replace(size, sessions=size.sessions * options.draft_sessions)
            drafts = sum(_draft_bytes(other, of_draft) for other in options.draft_files)
            plan, size, layout, notes = plan_memory(
                lazy, size, memory, used, drafts, machine, options.widest, options.own_layers
            )
        return MlxPlan(
            path=path, options=options, lazy=lazy, vocab=vocab, size=size, layout=layout, weights=plan,
            first_notes=notes, machine=machine,
        )  # fmt: skip

    def load(self, plan: MlxPlan, way: Computing | None = None, progress: Progress | None = None) -> MlxBackend:
        return load_planned(plan, progress or (lambda done, total: None))

    def load_vocab(self, path: str) -> Vocab:
        return load_vocab(path)


def _draft_bytes(path: str, size: PassSize) -> int:
    return head_bytes(path, size) if is_head(path) else draft_bytes(open_model(path), size)


load = loader(MlxEngine())


def load_planned(plan: MlxPlan, progress: Progress) -> MlxBackend:
    """
    Raises:
        ModelError: the model cannot read a tree, or cannot be streamed.
    """
    model, size, path, text_config = plan.lazy.model, plan.size, plan.path, plan.lazy.text_config
    recurrent, tolerance, leaves = is_recurrent(model), _tolerance(model), size.paths(model)
    notes, sweep, widened = list(plan.first_notes), None, size.budget > plan.options.budget
    if plan.weights and plan.layout and (plan.weights.streamed or plan.weights.pools):
        with named(path):
            sweep, more = _stream(
                model, plan.layout, plan.weights, plan.machine.disk, progress, path, remember=plan.options.remember
            )
        notes += more
    weights = sweep.bytes_held if sweep else parameter_bytes(model)
    notes += set_memory_limits(weights, plan.machine.gpus)
    if not sweep:
        with named(path):
            evaluate(model, progress)
    capabilities = Capabilities(
        context_length=size.context_length,
        max_nodes=size.max_nodes,
        max_wanted=size.budget + 1 if widened else size.max_nodes,
        widest=size.budget if widened else 0,
        max_leaves=leaves or size.max_nodes,
        paths=recurrent,
        by_cell=ALWAYS,  # softmax adds up groups of cells, on a GPU the products with values, too
        logit_tolerance=tolerance,
        streams=bool(sweep and sweep.streamer.plan.streamed),
        # Elsewhere all experts of a layer are streamed.
        experts=None if sweep and not sweep.mixture else experts_of(text_config),
        tiled=sweep is None and bool(mx.default_device() == mx.gpu),
        one_thread=True,  # MLX's streams belong to the thread that made them
    )
    kinds = make_prompt_cache(model) if recurrent else ()
    backend = MlxBackend(model, plan.vocab, capabilities, plan.lazy.windows, size.sessions, sweep, notes, kinds)
    backend.content = content_of(*content_files(path))
    # Its passes read weights that are not in memory, so what was found is kept.
    about = {"kind": "tree", "engine": backend.build, "target": identity(path)}
    keeps = sweep is not None and plan.options.remember
    with undone(backend.close):
        if not (keeps and recall(about, bool)):
            _check_tree(backend, path, plan.lazy.config["model_type"])
            if keeps:
                remember(about, True)
    return backend


def _stream(
    model: Any, layout: Layout, plan: Plan, disk: Reading, progress: Progress, path: str, *, remember: bool
) -> tuple[LayerSweep, Sequence[str]]:
    """Read the weights that stay, and start to stream the others.

    Returns:
        The sweep, and messages for the user.

    Raises:
        ModelError: the files cannot be streamed.
    """
    speed = (disk.speed or measure_disk(layout.paths, plan)) if plan.streamed else 0.0
    about = {"kind": "experts", "target": identity(path)} if remember else None
    with failing_as(ModelError, f"{path}: cannot be streamed"):
        store = SlotStore(layout.paths, layout.bases, plan)
        with undone(store.close):
            sweep = LayerSweep(model, layout, plan, disk, progress, store, about)
    return sweep, [plan.line(speed), *filter(None, [plan.warning(speed)])]


def _tolerance(model: Any) -> float:
    """`TOLERANCE` of the coarsest type of weights and scales, in which activations are computed."""
    kinds = {array.dtype for _, array in tree_flatten(model.parameters())}
    if on_gpu():
        kinds.add(mx.float16)
    return max(TOLERANCE.get(kind, 0.0) for kind in kinds)


def _check_tree(backend: MlxBackend, path: str, model_type: str) -> None:
    """
    Raises:
        ModelError: the last of two siblings has other logits than without the first, so it sees the first.
    """
    no_tree = f"{path}: {model_type} models cannot read a tree on MLX"
    with refused(no_tree):
        rows = rows_of_tree(backend, backend.small_session())
    if len(rows[0]) != backend.vocab.size:
        raise ModelError(f"{path}: the tokenizer has {backend.vocab.size} tokens, the model {len(rows[0])}")
    if is_another(*rows):
        raise ModelError(f"{no_tree}: a node sees more than its ancestors, or its position is another's")
    if backend.capabilities.paths:
        _check_states(backend, path, model_type)


def _check_states(backend: MlxBackend, path: str, model_type: str) -> None:
    """
    Raises:
        ModelError: tokens in two passes, the second with two paths, do not give the logits of one pass.
    """

    session, one = backend.small_session(), backend.small_session()
    at_once = last_row(backend, one, [1, 2, 3, 4], [-1, 0, 1, 2])
    one.commit([])
    lost = last_row(backend, one, [3, 4], [-1, 0])
    last_row(backend, session, [1, 2], [-1, 0])
    session.commit([0, 1])
    if is_another(last_row(backend, session, [5, 3, 4], [-1, -1, 1]), at_once, lost):
        raise ModelError(f"{path}: {model_type} models do not go on from copies of their states here; use a GGUF of it")
