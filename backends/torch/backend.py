"""Model folders (config.json and safetensors) on PyTorch: transformers' model classes with attention over trees.

All nodes of a pass are one row of tokens, so that weights are read once. A node's position is length + depth. A
session's cells:

    cells 0 to length - 1   committed tokens, in order
    cells from length on    uncommitted nodes, in the order of their numbers
    mask                    a node sees committed tokens, its ancestors and itself; a sliding window counts positions
    commit                  the accepted nodes' cells move behind the committed tokens; other cells stay
"""

import math
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, cast
from weakref import WeakSet

import torch
import transformers
from torch.nn.attention import SDPBackend, sdpa_kernel

from edgespec.errors import Closed, ModelError, NoRoom, UsageError, check_whole, named
from edgespec.loop.backend import Capabilities, Logits, Placed, Vocab, Work
from edgespec.loop.engines import Computing, Engine, LoadOptions, LoadPlan, Machine, Progress
from edgespec.loop.passes import check_batch, shape_of
from edgespec.loop.session_files import content_of, identity_of
from edgespec.loop.shapes import ALWAYS, TILE, BatchInvariance, also_wanted
from edgespec.loop.tree import ancestor_mask
from edgespec.machine import memory as process
from edgespec.machine.disk import disk_speed
from edgespec.machine.measurements import identity
from edgespec.machine.memory import format_size, in_bytes
from edgespec.machine.this_machine import Gpu, this_machine
from edgespec.models.safetensors_header import read_safetensors_header
from edgespec.weights.experts import memory_of, pools_of
from edgespec.weights.plan import BUFFERS, CHEAP, MARGIN, SAFETY, WORKSPACE, Plan, choose_width, two_digits, usable
from edgespec.weights.ring import CANNOT_STREAM, can_stream

from ..common.heads import head_size
from ..common.hf_vocab import load_vocab
from ..common.interrupts import Interruptible, Stop, interruptible, one_pass
from ..common.loader import loader, no_further_positions
from ..common.model_folder import check_folder, content_files, experts_of, refused
from ..common.nodes import is_another, rows_of_tree
from ..common.recurrent import most_paths, states_of
from .attention import Part, Tree, build_mask, run, tree_after
from .disk import NUMBER, mapped_bytes
from .experts import ExpertFolder, Mixture, divide_layers, find_folder, plan_pools
from .loading import (
    MIN_NODES,
    NF4,
    PLAIN,
    Form,
    Host,
    Placement,
    bytes_in,
    cache_shape,
    check_folder_fits,
    check_rope,
    choose_placement,
    decoder_layers,
    find_device,
    find_gpus,
    has_stored_nf4_layers,
    inspect_layers,
    lacks_kernels,
    load_model,
    most_positions,
    nf4_form,
    place_layers,
    place_others,
    run_probe,
    session_cells,
    spread,
    tree_cells,
    untied_embeddings,
    work_bytes,
)
from .logits import KeptInputs, TorchLogits
from .mtp_files import head_tensors
from .offload import CopyEngine, CudaCopies, HostCopies, Streamer, link_speeds, needs_pinning
from .recurrent import (
    RecurrentOwner,
    StateCache,
    TorchRecurrentSession,
    forward_recurrent,
    is_recurrent,
    make_cache,
    state_bytes,
    with_cells,
)
from .session import TorchSession
from .spans import Cells, Spans, connect, out_of_memory

__all__ = ["TorchBackend", "TorchEngine", "load", "load_vocab"]

# Without cuDNN's, which plans for each new shape, and passes have a new length each.
LENGTHS = 33, 1025  # of texts behind which attention is tried
KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
MOST_SESSIONS = 1024
DEFAULT_CONTEXT = 4096  # where a folder does not say what its model was trained for
MIN_NODES_ON_GPU = 2048  # larger than `MIN_NODES`, because a chunk may copy all weights to the GPU
PLENTY = 4  # times the bytes of a folder, which another type may double

# Bound of the change of a logit between passes of different shapes. Measured with SmolLM2 (135M) on a CPU, over chains
# of 1 to 33 tokens and 40-node trees: float32 6.3e-5, float16 0.11, bfloat16 0.75, nf4 0.84.
TOLERANCE = {"float32": 2e-3, "float16": 0.3, "bfloat16": 1.5}


# On the CPU. `private_memory` counts neither mapped weights nor cells and slots that no pass has written.
_on_cpu: "WeakSet[TorchBackend]" = WeakSet()


class TorchBackend(Interruptible):
    """See `edgespec.loop.backend.Backend`; made by `load`.

    Attributes:
        plan: of pools of experts; None: there are none.
        mixture: None: not only chosen experts are read.
        cache: of states; None: no layer is recurrent.
        streamers: of each device with layers that do not stay there.
        sessions: that are open.
        spans: of all layers.
        hides_first: the cell of a sequence's first token is hidden.
        choose_cells: of (session, work, the cell after it, device), the cells that it reads, by layer; None: all.
        keeps_queries: number of last rows whose `TorchSession.queries` are kept.
    """

    name = "torch"
    hides_first = False
    plan: Plan | None = None
    mixture: Mixture | None = None

    def __init__(
        self,
        model: Any,
        vocab: Vocab,
        capabilities: Capabilities,
        windows: tuple[int | None, ...],
        caches: list[Cells],
        spans: Spans,
        streamers: Sequence[Streamer] = (),
        notes: Sequence[str] = (),
        cache: StateCache | None = None,
    ) -> None:
        self.vocab: Vocab = vocab
        self.capabilities = capabilities
        self.notes = notes
        self.model = model
        self.windows = windows
        self.cache = cache
        self._free = caches  # of closed sessions
        self.bytes_of_cells = sum(cells.nbytes for cells in caches)
        groups = caches[0].groups
        self.device, self.dtype = groups[0].device, groups[0].dtype
        names = list(dict.fromkeys(name_of(group.device) for group in groups))
        self.build = f"torch {torch.__version__}, transformers {transformers.__version__}, {', '.join(names)}"
        self.computing: Computing = {
            "dtype": str(self.dtype), "threads": torch.get_num_threads(),
            "device": ", ".join(str(group.device) for group in groups),
        }  # fmt: skip
        self.streamers = streamers
        self.sessions, self.spans = WeakSet[TorchSession](), spans
        self.placed = placed(spans, sum(len(one.blocks) for one in streamers))
        self.stop = Stop()
        self._kept: KeptInputs | None = None
        self.choose_cells: Callable[[TorchSession, Work, int, Any], dict[int, Any]] | None = None
        self.keeps_queries = 0
        self.mapped = 0  # bytes of mapped weights, and of pools
        self.content = ""
        for layer in decoder_layers(model) if cache else ():  # others look at the flag in `tree_attention`
            layer.register_forward_pre_hook(self._check_stop)

    def _check_open(self) -> None:
        if self.model is None:
            raise Closed

    def _check_stop(self, *_: Any) -> None:
        self.stop.check()

    def open(self) -> TorchSession:
        self._check_open()
        if not self._free:
            raise UsageError("all sessions of this model are open: load it with a larger `sessions`")
        self.sessions.add(session := self._new_session(self._free.pop()))
        return session

    def _new_session(self, cells: Cells) -> TorchSession:
        if self.capabilities.paths:
            return TorchRecurrentSession(cast(RecurrentOwner, self), cells)
        return TorchSession(self, cells)

    def release(self, cells: Cells) -> None:
        self._free.append(cells)

    @property
    def wait_seconds(self) -> float:
        waited = self.mixture.memory.wait_seconds if self.mixture else 0.0
        return waited + sum(streamer.wait_seconds for streamer in self.streamers)

    def keep_to(self, exact: BatchInvariance) -> None:
        self.capabilities = replace(self.capabilities, exact=exact, logit_tolerance=0.0)

    @one_pass
    def forward(self, batch: Sequence[Work]) -> list[Logits]:
        self._check_open()
        with self.mixture.reading(prompt=any(work.prompt for work in batch)) if self.mixture else nullcontext():
            return self._forward(batch)

    def _forward(self, batch: Sequence[Work]) -> list[Logits]:
        if self.capabilities.paths:
            with torch.inference_mode(), sdpa_kernel(KERNELS), out_of_memory("a pass"):
                return forward_recurrent(cast(RecurrentOwner, self), batch)
        check_batch(batch, self.capabilities)
        sessions = [cast(TorchSession, work.session) for work in batch]
        places = [session.check(work) for session, work in zip(sessions, batch, strict=True)]
        tokens, positions, wanted, parts = list[int](), list[int](), list[int](), list[Part]()
        with torch.inference_mode(), sdpa_kernel(KERNELS), out_of_memory("a pass"):
            for session, work, new in zip(sessions, batch, places, strict=True):
                start = len(tokens)
                tokens += work.token_ids.tolist()
                positions += new
                wanted += [start + node - session.nodes for node in work.wanted.tolist()]
                parts.append(self._part(session, work, new, slice(start, len(tokens))))
            if (exact := self.capabilities.exact) and (shape := shape_of(self.capabilities, batch)):
                more = shape.rows(len(tokens)) - len(tokens)
                tokens, positions = tokens + [0] * more, positions + [0] * more
                wanted += also_wanted(wanted, len(tokens), exact.trees)
            tree = Tree(tuple(parts), self.windows, self.stop)
            with interruptible(sessions, self.stop):
                logits = self._run(batch, places, tokens, positions, wanted, tree)
        found = list[Logits]()
        for session, work, new, part in zip(sessions, batch, places, parts, strict=True):
            rows = dict(enumerate(range(part.rows.start, part.rows.stop), session.nodes))
            session.add(work, new)
            session.latest = part.queries
            found.append(self.logits(logits[: len(work.wanted)], work.wanted.tolist(), rows))
            logits = logits[len(work.wanted) :]
        return found

    def _run(
        self,
        batch: Sequence[Work],
        places: Sequence[Sequence[int]],
        token_ids: Sequence[int],
        positions: Sequence[int],
        wanted: Sequence[int],
        tree: Tree,
    ) -> Any:
        return run(self.model, token_ids, positions, wanted, tree, self.device)

    def keep_states(self, modules: Sequence[Any]) -> None:
        """Keep the inputs of these modules as states, for a head; no modules: end it."""
        if self._kept:
            self._kept.close()
        self._kept = KeptInputs(modules) if modules else None
        size = len(modules) * self.model.config.get_text_config().hidden_size if modules else 0
        self.capabilities = replace(self.capabilities, states=size)

    def logits(self, logits: Any, wanted: Sequence[int], rows: Mapping[int, int]) -> Logits:
        """Logits of a work of the last pass; arguments as for `TorchLogits`."""
        return TorchLogits(logits, wanted, rows, tuple(self._kept.parts) if self._kept else ())

    @property
    def identity(self) -> dict[str, Any]:
        return identity_of(self, self.content)

    def _part(self, session: TorchSession, work: Work, positions: list[int], rows: slice) -> Part:
        length, everywhere = len(session.token_ids), session.positions + positions
        sees = ancestor_mask(session.parents + work.parents.tolist())[session.nodes :]
        masks = {
            window: build_mask(sees, everywhere, length, window, self.dtype, self.device, self.hides_first)
            for window in set(self.windows)
        }
        start = length + session.nodes
        end = start + rows.stop - rows.start
        chosen = self.choose_cells(session, work, end, self.device) if self.choose_cells else {}
        return Part(
            rows, rows, session.cells.by_layer, start, end, masks, chosen, self.keeps_queries
        )  # fmt: skip

    def close(self) -> None:
        for streamer in self.streamers:
            streamer.close()
        if self.mixture:
            self.mixture.close()
        self.model = self.cache = None
        self.streamers, self._free = (), []
        _on_cpu.discard(self)


@dataclass(frozen=True, kw_only=True)
class TorchPlan(LoadPlan):
    """See `LoadPlan`; sizes in bytes.

    Attributes:
        device: PyTorch's name of the device.
        gpu: the device, if it has memory of its own.
        others: further GPUs that may hold layers.
        shared: bytes of this machine's memory that the device can still hold; None: no limit is known.
        memory: host memory that may be used.
        used: host memory that this program uses now.
        cores: of the machine.
        streams: layers can be read from disk in every pass.
    """

    device: str
    gpu: Gpu | None
    others: Sequence[Gpu]
    shared: int | None
    memory: int
    used: int
    cores: int
    streams: bool


class TorchEngine(Engine):
    """See `Engine`.

    Args:
        threads: for all models of the process; default: PyTorch's choice.
        device: "cuda" (all GPUs, if the first one cannot hold the model), "cuda:1", "mps" or "cpu"; default: the first
            of these that is there.
        dtype: "float32", "float16", "bfloat16", or "nf4" for 4-bit linear layers; default: the folder's.
        gpu_layers: layers that stay on GPUs, and others are streamed; default: as many as `gpu_memory` holds.
        gpu_memory: bytes of each GPU's memory to use, with those of models that were loaded before.
        memory: bytes of host memory to use; layers that neither the GPU nor this memory holds are streamed from disk.
        keep_packed: keep layers that are quantised (nf4) in the cache folder, for the next start.
    """

    supported = frozenset(
        {"threads", "gpu_layers", "memory", "device", "dtype", "gpu_memory", "keep_packed", "own_layers"}
    )

    def gpus(self, device: str | None) -> list[Gpu]:
        return find_gpus(device)

    def plan(self, path: str, options: LoadOptions, machine: Machine) -> TorchPlan:
        """See `Engine.plan`; `choose_placement` decides at load which layers stay."""
        check_whole("sessions", options.sessions, 1, MOST_SESSIONS)
        if options.dtype is not None and options.dtype not in (*TOLERANCE, NF4):
            raise UsageError(f"dtype is {options.dtype!r}, but must be one of {', '.join((*TOLERANCE, NF4))}")
        if options.keep_packed and options.dtype != NF4:
            raise UsageError(f"--keep-packed (keep_packed) is for the dtype {NF4}, which is quantised at each start")
        device = find_device(options.device, machine.gpus)
        gpu = next((gpu for gpu in machine.gpus if gpu.name == device), None)
        shared = gpu.free if gpu and gpu.shared and gpu.limit else None
        gpu = None if gpu and gpu.shared else gpu
        several = gpu and options.device in (None, "cuda")
        others = [one for one in machine.gpus if several and one is not gpu and not one.shared]
        if options.gpu_memory is not None and not gpu:
            raise UsageError(f"gpu_memory is for GPUs with memory of their own (cuda), but the device is {device}")
        if options.gpu_memory is not None and options.gpu_layers is not None:
            raise UsageError("gpu_layers and gpu_memory both say how many layers go to the GPU: give one of them")
        memory = in_bytes("memory", options.memory)
        if memory is not None and device == "mps":
            raise UsageError("memory is for the devices cuda and cpu; on a Mac's GPU the backend mlx streams from disk")
        most = memory or int(machine.free * (1 - SAFETY))
        return TorchPlan(
            path=path, options=options, device=device, gpu=gpu, others=others, shared=shared, memory=most,
            used=machine.used, cores=machine.cores, streams=can_stream(machine),
        )  # fmt: skip

    def load(self, plan: TorchPlan, way: Computing | None = None, progress: Progress | None = None) -> TorchBackend:
        return load_folder(plan, progress or (lambda done, total: None))

    def load_vocab(self, path: str) -> Vocab:
        return load_vocab(path)


def _head_size(path: str, options: LoadOptions) -> tuple[int, int]:
    """As `head_size`, of the head that will be loaded for the model at `path`; (0, 0) without one."""
    if options.own_head:
        return head_size(one for _, one in head_tensors(path).values())
    return head_size(
        one
        for head in options.draft_files
        for file in Path(head).glob("*.safetensors")
        for one in read_safetensors_header(file)
    )


def load(
    path: str,
    *,
    copies: Callable[[Any, int], CopyEngine] | None = None,
    gpus: Sequence[Gpu] = (Gpu("cpu", False, 1 << 60),),
    **options: Any,
) -> TorchBackend:
    """As `common.loader`; with `copies`, for tests, the CPU acts as `gpus`."""
    if copies is None:
        backend: TorchBackend = loader(TorchEngine())(path, **options)
        return backend
    machine = replace(this_machine(path), gpus=tuple(gpus))
    plan = TorchEngine().plan(path, LoadOptions(**{"exact": "off"} | options), machine)
    return load_folder(plan, lambda done, total: None, copies)


def load_folder(
    plan: TorchPlan, progress: Progress, copies: Callable[[Any, int], CopyEngine] | None = None
) -> TorchBackend:
    """Load a model folder.

    Args:
        plan: of the folder.
        progress: of reading experts into pools.
        copies: makes the copy engine for a device and a number of buffers; None: the device's own.

    Raises:
        EdgespecError: as for `Engine.load`.
        MissingPackage: nf4 needs bitsandbytes.
    """
    path, options, gpu, device = plan.path, plan.options, plan.gpu, torch.device(plan.device)
    if device.type == "cuda" and (lack := lacks_kernels(plan.device)):
        raise UsageError(lack)
    cards = range(torch.cuda.device_count() if options.device in (None, "cuda") else 0)
    left_out = [lack for i in cards if (lack := lacks_kernels(f"cuda:{i}"))]
    device_memory, dtype, before = in_bytes("gpu_memory", options.gpu_memory), options.dtype, process.private_memory()
    torch.set_num_threads(options.threads or min(torch.get_num_threads(), plan.cores))
    vocab = load_vocab(path)
    with named(path), out_of_memory("the model"):
        folder = check_folder(path)

        def load_whole() -> Any:
            check_folder_fits(folder, dtype, plan.memory)
            return load_model(folder, dtype)

        asked = options.memory is not None or device_memory is not None
        # A model that clearly fits is loaded once, and whole.
        plenty = not asked and PLENTY * bytes_in(folder) <= (gpu.free if gpu else plan.memory)
        # Own layers need whole ones.
        chosen = plan.streams and (gpu or device.type == "cpu") and not (options.own_layers or plenty)
        experts = find_folder(folder, dtype) if chosen else None
        model = load_model(folder, dtype, experts.loader(), experts.config) if experts else load_whole()
        if experts and not experts.take(model):
            model, experts = load_whole(), None
        weights = sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()])
        # The plan counts copies of weights as layers and embeddings.
        grown = max(0, process.private_memory() - before - (weights - mapped_bytes(model, folder)))
        numbers = _head_size(path, options)
        if options.own_layers:  # at most all layers
            numbers = 0, math.prod(cache_shape(model.config.get_text_config(), 1))
        head = tuple(count * model.dtype.itemsize for count in numbers)
        unseen = sum(backend.mapped + backend.bytes_of_cells for backend in _on_cpu)
        needed, host = plan.used + grown + unseen + MARGIN, None
        weights += head[0]
        paged = not plan.streams and (options.memory is not None or weights + needed > plan.memory)
        if gpu and plan.streams:
            host = Host(folder, plan.memory, needed, apart=True)
        elif device.type == "cpu" and plan.streams:
            device_memory, host = plan.memory, Host(folder, plan.memory, needed, apart=False)
        elif plan.shared is not None:
            device_memory = min(plan.shared, plan.memory)
        form, kept = PLAIN, None
        if has_stored_nf4_layers(model):
            if options.keep_packed:
                raise UsageError("--keep-packed is for layers that are quantised at load, and this folder has 4 bits")
            dtype = NF4
        elif dtype == NF4:
            if options.keep_packed:
                from .nf4 import KeptLayers

                kept = KeptLayers(folder, model.dtype, decoder_layers(model))
            form = nf4_form(device, kept)
        backend = assemble(
            model, vocab, device, context_length=options.context_length, budget=options.budget, widest=options.widest,
            sessions=options.sessions, memory=device_memory, gpu=gpu, others=plan.others,
            gpu_layers=options.gpu_layers if gpu else None,
            copies=copies or (CudaCopies if device.type == "cuda" else HostCopies), host=host,
            form=form, head=head, own_layers=options.own_layers, experts=experts, load_whole=load_whole,
            about={"kind": "experts", "target": identity(path)} if options.remember else None, progress=progress,
        )  # fmt: skip
        if device.type != "cpu":
            try:
                check_tree(backend)
            except BaseException:
                backend.close()
                raise
    files = content_files(path)
    backend.content = content_of(*files)
    if kept:
        backend.notes = [*backend.notes, kept.note]
    backend.notes = [*backend.notes, *left_out]
    if device.type == "cuda" and backend.dtype == torch.bfloat16 and torch.cuda.get_device_capability(device) < (8, 0):
        said = f"{name_of(device)} has no kernels of its own for bfloat16"
        backend.notes = [*backend.notes, said + (", which is slow" if dtype == NF4 else ": --dtype float16 is faster")]
    if paged:
        backend.notes = [*backend.notes, CANNOT_STREAM]
    if options.gpu_layers and not gpu:
        backend.notes = [*backend.notes, f"the device is {device.type}, so --gpu-layers changes nothing"]
    if dtype == NF4:
        backend.computing = {**backend.computing, "dtype": NF4}
    if device.type == "cpu" and not backend.streamers:
        backend.mapped = mapped_bytes(backend.model, folder) + (backend.plan.pool_bytes if backend.plan else 0)
        _on_cpu.add(backend)
    return backend


def assemble(
    model: Any,
    vocab: Vocab,
    device: Any,
    *,
    context_length: int,
    budget: int,
    widest: int = 0,
    sessions: int,
    memory: int | None,
    gpu: Gpu | None = None,
    others: Sequence[Gpu] = (),
    gpu_layers: int | None = None,
    copies: Callable[[Any, int], CopyEngine] = CudaCopies,
    host: Host | None = None,
    form: Form = PLAIN,
    head: Sequence[int] = (0, 0),
    own_layers: bool = False,
    experts: ExpertFolder | None = None,
    load_whole: Callable[[], Any] | None = None,
    about: dict[str, Any] | None = None,
    progress: Progress = lambda done, total: None,
) -> TorchBackend:
    """Place a transformers model that uses `tree_attention` on a device, and make its caches.

    Args:
        model: on the host; layers that are streamed become empty.
        vocab: its tokenizer.
        device: where it computes.
        context_length: of `LoadOptions`.
        budget: of `LoadOptions`.
        widest: of `LoadOptions`.
        sessions: of `LoadOptions`.
        memory: bytes of each device's memory to use; None: on a GPU what is free, elsewhere no limit.
        gpu: the device, if it has memory of its own.
        others: further GPUs, for layers that the device cannot hold.
        gpu_layers: of `LoadOptions`.
        copies: makes the copy engine.
        host: as for `choose_placement`.
        form: of the placed layers.
        head: bytes of the weights of a head that will be loaded, and of a cell of it, or of own layers that draft.
        own_layers: of `LoadOptions`.
        experts: that the model lacks; pools hold them, if not all fit.
        load_whole: loads the model with experts.
        about: as for `Mixture`.
        progress: as for `Mixture`.

    Raises:
        ModelError: the model cannot hold a tree.
        UsageError: the memory is too small, or the context too long.
    """
    config = model.config.get_text_config()
    context_length = context_length or getattr(config, "max_position_embeddings", None) or DEFAULT_CONTEXT
    asked, context_length = context_length, min(context_length, most_positions(model))
    check_rope(config, context_length)
    recurrent, state, attending = is_recurrent(config), state_bytes(model), with_cells(config)
    most = sys.maxsize if memory is None else memory
    of_experts = (experts.sizes if experts else lambda count: [0] * count)(config.num_hidden_layers)
    weights = model.num_parameters() * model.dtype.itemsize + sum(of_experts)
    leaves = most_paths(state, weights, budget, sessions) if recurrent else 0

    def limits(width: int) -> Capabilities:
        max_nodes = max(MIN_NODES_ON_GPU if device.type == "cuda" else MIN_NODES, width + 1)
        wanted = max(TILE, sessions * (width + 1)) if width == budget else width + 1  # their logits are in memory
        return Capabilities(
            context_length=context_length,
            max_nodes=max_nodes,
            max_wanted=min(max_nodes, wanted),
            max_leaves=leaves or tree_cells(max_nodes, min(max_nodes, wanted)),
            paths=recurrent,
            logit_tolerance=TOLERANCE[str(model.dtype).removeprefix("torch.")],
            experts=experts_of(config.to_dict()),
            by_cell=ALWAYS,  # in float32, rows of 6-node trees differ from those of their chains
            widest=0 if width == budget else width,
        )

    def cells(width: int) -> tuple[int, ...]:
        return cache_shape(config, session_cells(limits(width)))

    held, width = 0, budget
    if gpu:
        held = gpu.used  # by models that were loaded before
        free = gpu.free + held
        if memory is not None and memory > free:
            raise UsageError(f"gpu_memory is {format_size(memory)}, but only {format_size(free)} are free")
        memory = usable(gpu) if memory is None else memory
    form.make(decoder_layers(model)[0])  # `work_bytes` looks for 4-bit weights in it
    streamers, notes, spans = list[Streamer](), list[str](), [(device, range(config.num_hidden_layers))]
    mixture, weights_plan, in_pools, sent = None, None, 0, 0
    if memory is not None or gpu_layers is not None or form is not PLAIN:
        sizes = [form.size(layer) for layer in decoder_layers(model)]
        states = [states_of(leaves) * state_bytes(model, layer) for layer in decoder_layers(model)]

        def caches_of(width: int) -> list[int]:
            keys = math.prod(cells(width)[1:]) * model.dtype.itemsize
            return [sessions * ((i in attending) * keys + size) for i, size in enumerate(states)]

        def fixed(width: int) -> int:
            wanted = limits(width).max_wanted
            work = work_bytes(model, limits(width), wanted) + head[0] + sessions * cells(width)[3] * head[1]
            # The workspace is CUDA's, so a processor needs none.
            work += in_pools - sent
            return int(held + sum(caches_of(width)) + work - (WORKSPACE if host and not host.apart else 0))

        here = sys.maxsize if memory is None else memory
        needed = work_bytes(model, limits(budget), None)
        others = [one for one in others if min(most, usable(one)) - one.used > needed]
        devices = [device, *(torch.device(one.name) for one in others)]
        links = lru_cache(lambda: (link_speeds(devices[:1])[0], link_speeds(devices)))

        def rooms(width: int) -> list[int]:
            """Bytes of each device for layers and their caches, besides the smallest pools."""
            work = work_bytes(model, limits(width), None) + in_pools
            more = [min(most, usable(one)) - one.used - work for one in others]
            return [here - fixed(width) + sum(caches_of(width)), *more]

        def place(width: int) -> Placement:
            caches, (first, *more) = caches_of(width), rooms(width)
            more = [] if in_pools else more
            found = choose_placement(sizes, here, fixed(width), host, gpu_layers, more, caches, own_layers)
            if not (more and found.streamed) or own_layers:
                return found
            return spread(found, sizes, [first, *more], caches, links(), host, gpu_layers)

        dense, sizes = sizes, [size + more for size, more in zip(sizes, of_experts, strict=True)]
        try:
            fits = not place(budget).streamed
            model = load_whole() if fits and experts and load_whole else model
        except NoRoom:
            fits = False
        if gpu and not fits:
            sent = untied_embeddings(model)
            host = host and replace(host, needed=host.needed + sent)
        if experts and host:
            if not fits:
                sizes, least = dense, memory_of(experts.layers, pools_of(experts.layers, 0))
                host = replace(host, needed=host.needed + least)
                in_pools = experts.work_bytes(limits(budget).max_nodes) + least * host.apart
            experts = None if fits else experts
        if device.type == "mps" and memory is not None and fixed(budget) + sum(sizes) > memory:
            raise NoRoom(
                f"the model takes {format_size(fixed(budget) + sum(sizes), up=True)}, and the GPU can hold "
                f"{format_size(memory)} now: use the backend mlx, which streams layers, or a smaller context or dtype"
            )
        if place(budget).streamed and not recurrent:
            # On a processor, neither reads nor a prompt's passes become larger.
            most_width, cheap = (widest, CHEAP) if gpu else (min(widest, limits(budget).max_nodes - 1), 0.0)
            width = choose_width(budget, most_width, cheap, lambda width: sum(sizes[i] for i in place(width).streamed))
        placement = place(width)
        if experts and host:
            placement = replace(placement, buffers=BUFFERS)  # pools have the room of further ones
            of_layers, several = caches_of(width), rooms(width)
            runs = divide_layers([size + more for size, more in zip(sizes, of_layers, strict=True)], several)
            placement = placement if placement.streamed else replace(placement, runs=runs)
            names = [name_of(one) + f" ({one})" * (len(placement.runs) > 1) for one in devices]
            pools = dict(zip(names, several, strict=True))
            weights_plan = plan_pools(experts, model, pools, host, fixed(width), sizes, of_layers, placement)
        spans = [(devices[number], numbers) for number, numbers in placement.runs]
        streamers = place_layers(model, spans, sizes, placement, copies, host, form)
    shape, capabilities = cells(width), limits(width)
    try:
        if streamers:
            # Without pools all experts of a layer are streamed.
            capabilities = replace(capabilities, streams=True, experts=capabilities.experts if weights_plan else None)
            notes = streaming_notes(streamers, config.num_hidden_layers)
        place_others(model, device, sent > 0)
        for where, numbers in spans:
            decoder_layers(model)[numbers.start : numbers.stop].to(where)
        align(model)
        connect(decoder_layers(model), spans)
        if experts and weights_plan:
            with refused("experts cannot be read"):
                where = [place for place, numbers in spans for layer in experts.layers if layer.index in numbers]
                mixture = Mixture(model, experts, weights_plan, where, about, progress)
            notes.append(weights_plan.line())
        cache, probe = make_cache(model, device) if recurrent else (None, run_probe(model, device))
        if not recurrent and max(probe.calls.values(), default=0) > 1:  # `make_cache` makes several passes
            raise ModelError(f"{type(model).__name__} computes attention twice in a layer, which this backend cannot")
        windows = inspect_layers(model, probe, shape, attending)
        caches = [Cells(spans, attending, shape[1:], model.dtype) for _ in range(sessions)]
    except BaseException:
        for streamer in streamers:
            streamer.close()
        if mixture:
            mixture.close()
        raise
    notes = [*notes, *no_further_positions(context_length, asked)]
    backend = TorchBackend(model, vocab, capabilities, windows, caches, spans, streamers, notes, cache)
    backend.plan, backend.mixture = weights_plan, mixture
    return backend


def name_of(device: Any) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device.type)


def placed(spans: Spans, streamed: int) -> Placed:
    counts = Counter[Any]()
    for device, numbers in spans:
        counts[device] += len(numbers)
    shares = [(count, name_of(device) + f" ({device})" * (len(counts) > 1)) for device, count in counts.items()]
    return Placed.on([] if spans[0][0].type == "cpu" else shares, spans[-1][1].stop, streamed)


def check_tree(backend: TorchBackend) -> None:
    """Check a device's attention by two passes, and behind more cells, which other kernels read, without weights.

    Raises:
        ModelError: a tree's node has not the logits of its chain of ancestors, or they depend on no ancestor.
    """
    session = backend.open()
    try:
        rows = rows_of_tree(backend, session)
        long = [reads_tree(backend, session, length) for length in LENGTHS]
    finally:
        session.close()
    if is_another(*rows) or not all(long):
        raise ModelError(f"its attention cannot read a tree on {backend.device}: a node sees more than its ancestors")


def reads_tree(backend: TorchBackend, session: TorchSession, length: int) -> bool:
    """True if kernels read a tree behind `length` cells rightly, or these do not fit."""
    kinds = {(cells.device, backend.windows[layer]): cells for layer, cells in session.cells.by_layer.items()}
    heads = getattr(backend.model.config.get_text_config(), "num_attention_heads", 1)
    for (_, window), cells in kinds.items() if length + 3 <= session.cells.groups[0].shape[3] else ():
        with torch.inference_mode(), sdpa_kernel(KERNELS), out_of_memory("a pass"):
            found, right = tree_after(length, window, cells, heads)
            if not float((found - right).abs().max()) < 0.1 * float(right.abs().max()):
                return False
    return True


def align(model: Any) -> None:
    """Copy unaligned float32 weights, with which MKL rounds otherwise on some CPUs, such as AMD's."""
    for weights in model.parameters():
        if weights.device.type == "cpu" and weights.dtype == torch.float32 and weights.data_ptr() % NUMBER:
            weights.data = weights.data.clone()


def streaming_notes(streamers: Sequence[Streamer], layers: int) -> list[str]:
    """
    Returns:
        Messages for the user about streamed layers.

    Raises:
        ModelError: the disk cannot be measured.
    """
    blocks = [block for streamer in streamers for block in streamer.blocks]
    size = format_size(sum(block.size for block in blocks))
    note = f"{len(blocks)} of {layers} layers are streamed: {size} per pass"
    if len(streamers) > 1:
        note += f", to {len(streamers)} GPUs at the same time"
    sources = streamers[0].feeder.sources if streamers[0].feeder else []
    if sources:
        from_disk, path = sum(source.size for source in sources), sources[0].path
        speed = disk_speed(path, [(one.start, one.start + one.size) for one in sources if one.path == path])
        note += f", {format_size(from_disk)} of it from disk"
        if speed:
            note += f": about {two_digits(from_disk / speed)} s at {two_digits(speed / 1e9)} GB/s"
    if not needs_pinning(streamers[0].device) or all(streamer.pinned for streamer in streamers):
        return [note]
    return [note, "CUDA refuses to pin all host memory of the streamed layers, so their copies to the GPU are slower"]
