"""The engine for llama.cpp.

`plan_here` chooses layers, memory and ways to compute; `load_here` makes the model, in this process or in a child of
`lending/`.
"""

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from edgespec.errors import ModelError, UsageError, check_whole
from edgespec.loop.backend import Backend, Capabilities, Placed, Vocab
from edgespec.loop.engines import Computing, Engine, LoadOptions, LoadPlan, Machine, Progress
from edgespec.loop.session_files import content_of
from edgespec.loop.shapes import ALWAYS
from edgespec.machine.disk import remove_name
from edgespec.machine.memory import format_size, in_bytes
from edgespec.machine.this_machine import Gpu, this_machine
from edgespec.weights.experts import with_pools
from edgespec.weights.plan import MARGIN, Plan, Tensor, count_layers, divide, layers_of_gpus, layers_on_gpu

from ..common.loader import loader, no_further_positions
from .backend import LlamaBackend
from .context import ContextSize, kv_type_of_file, make_context, settle_attention
from .ggml.files import (
    LLAMA_MAX_SEQ,
    PROCESSOR_ONLY,
    engine_build,
    find_device,
    llama_cpp,
    load_model,
    loaded_tensors,
    metadata,
    parts,
    without_amx,
)
from .ggml.registry import unread
from .ggml.skeleton import skeleton
from .head_files import check_target, find_head
from .heads import load_head
from .lending.child_process import ChildBackend, load_in_child
from .lending.rpc import lent_line, lent_options
from .memory.attention import AFTER, ALIKE, HERE, by_cell, can_be_alike, capture_cpu_backend, row_hook
from .memory.gpu import ANY, RESERVE, find_gpus, has_own_memory, kept_off, needs_skeleton, overrides
from .memory.layer_hooks import LayerHooks
from .memory.mixture import open_memory, open_mixture
from .memory.own_memory import OwnMemory, find_weights
from .memory.planning import (
    MIN_NODES,
    SHARE,
    MemoryPlanner,
    find_expert_layers,
    mappings_of,
    start_streaming,
)
from .memory.pools import place_experts
from .memory.probe_model import CARRIED, REPACKED, probe_file, probe_options
from .memory.skip_padding import OneByOne, SkipPadding, has_experts
from .memory.threads import other_load
from .memory.tolerance import tolerance
from .memory.watch import Watch
from .recurrent import ids_of_session, is_recurrent, most_paths, why_not
from .states import LAST_LAYER, NEXTN
from .vocab import load_vocab

__all__ = ["engine", "load", "load_vocab"]


@dataclass(frozen=True, kw_only=True)
class LlamaPlan(LoadPlan):
    """See `LoadPlan`.

    Attributes:
        size: of the context.
        gpu_layers: layers on GPUs or lenders; -1 = all.
        machine: that was planned for.
        plenty: memory holds copies, too.
        copied: weights that the processor keeps are copied to memory, not mapped. llama.cpp pins copies, and a GPU with
            its own memory reads these faster.
        borrowed: as from `lending.rpc.borrow`, or None.
    """

    size: ContextSize
    gpu_layers: int
    machine: Machine
    plenty: bool
    copied: bool = False
    borrowed: Any = None


class LlamaEngine(Engine):
    """See `Engine`; a model that does not fit into memory is streamed.

    Args:
        threads: default: one per core (no efficiency cores), fewer while other programs keep cores busy, if that
            changes no bit.
        gpu_layers: default: as many as `gpu_memory` holds (`memory/gpu.py`).
        in_order: keep cells in the order of the tokens, on which rounding depends. Committed nodes behind a gap lose
            their cells, and the next pass computes these tokens again.
        kv_type: one of `KV_TYPES`, or two, of keys and values; default: f16, for float32 weights f32.
        repack: repacked weights need memory for a second copy, and can be faster for passes of few rows
            (docs/measured.md).
        share: of a context, for each session after the first; default: 1 if memory is plentiful, else `SHARE`.
        lenders: layers that do not fit here go to them (`lending/child_process.py`).
    """

    supported = frozenset({"threads", "gpu_layers", "gpu_memory", "memory", "kv_type", "lenders", "draft_files"})

    def gpus(self, device: str | None) -> list[Gpu]:
        return find_gpus()

    def plan(self, path: str, options: LoadOptions, machine: Machine) -> LoadPlan:
        check_whole("sessions", options.sessions, 1, LLAMA_MAX_SEQ)
        check_target(path)
        if options.lenders and machine.platform == "win32":
            raise UsageError("--lender (lenders) works on Linux and macOS only")
        return LoadPlan(path=path, options=options) if options.lenders else plan_here(path, options, machine)

    def load(
        self, plan: LoadPlan, way: Computing | None = None, progress: Progress | None = None
    ) -> LlamaBackend | ChildBackend:
        progress = progress or (lambda done, total: None)
        if isinstance(plan, LlamaPlan):
            return load_here(plan, way or plan.ways[-1], progress)
        # For lenders `plan` gives a plain `LoadPlan`, and the child makes its own plan.
        return load_in_child(plan.path, plan.options, progress)

    def memory_of(self, plan: LoadPlan) -> int:
        if not isinstance(plan, LlamaPlan):
            return 0
        planner = MemoryPlanner(plan.path, plan.options, plan.machine)
        return planner.taken(plan.size, plan.gpu_layers, plan.weights)

    def has_head(self, path: str) -> bool:
        return find_head(path) is not None

    def load_head(self, target: Backend, path: str, options: LoadOptions) -> Backend:
        return load_head(target, path, options)

    def load_vocab(self, path: str) -> Vocab:
        return load_vocab(path)

    def probe_copy(self, path: str, computing: Computing) -> AbstractContextManager[str]:
        return probe_file(path, computing)

    @contextmanager
    def probe_model(
        self, path: str, computing: Computing, *, watched: bool = False, copy: str | None = None
    ) -> Iterator[Backend]:
        options, again = probe_options(path, computing), bool(watched and copy)
        with nullcontext(copy) if copy else probe_file(path, computing) as copy:
            plan = plan_here(copy, options, this_machine(copy, self.gpus(None)))
            repacked = REPACKED.keys() <= computing.keys()
            way = next((way for way in plan.ways if (REPACKED.keys() <= way.keys()) == repacked), None)
            if way is None:
                raise ModelError(f"{path}: there is no memory for a probe model of it with weights repacked")
            carried = CARRIED | ALIKE.keys()
            way = {name: value for name, value in way.items() if name not in carried}
            way |= {name: computing[name] for name in carried & computing.keys()}
            watch = Watch() if watched else None
            with closing(load_here(plan, way, lambda done, total: None, watch)) as backend:
                if copy != path and not again:
                    remove_name(copy)
                if LAST_LAYER in computing:
                    backend.keep_states([NEXTN])
                backend.state_width = llama_cpp.llama_model_n_embd(backend.model)
                backend.watch = watch
                yield backend


engine = LlamaEngine()
load = loader(engine)


def plan_here(path: str, options: LoadOptions, machine: Machine, borrowed: Any = None) -> LlamaPlan:
    """Plan a load in this process.

    Raises:
        NoRoom: the model or its context does not fit.
        UsageError: a row class was asked for that GPUs cannot have; else as for `MemoryPlanner`.
        ModelError: as for `MemoryPlanner`.
    """
    planner = MemoryPlanner(path, options, machine, borrowed)
    share = options.share if options.share is not None else 1.0
    length = planner.context_length
    size = ContextSize(length, options.budget, options.sessions, MIN_NODES, options.kv_type, share, kept=options.kept)
    plenty = planner.plenty(size)
    if options.resident:
        planner.check_buffers(size)
    elif options.share is None and not plenty and options.sessions > 1:  # with one session `share` changes nothing
        size = replace(size, share=SHARE)
    gpu_layers, notes, weights = options.gpu_layers, no_further_positions(length, options.context_length), None
    if gpu_layers is None:
        gpu_layers = planner.choose_gpu_layers(size)
    elif options.gpu_memory is not None:
        raise UsageError("gpu_layers and gpu_memory both say how many layers go to the GPU: give one of them")
    elif gpu_layers and not borrowed and not planner.gpus:
        gpu_layers, notes = 0, [*notes, "this llama.cpp has no GPU, so --gpu-layers changes nothing"]
    experts_here = planner.keeps_experts(gpu_layers, size)
    if not plenty and not options.resident:
        weights, size, more = planner.plan_memory(size, gpu_layers, experts_here)
        notes += more
    streams = weights is not None and bool(weights.streamed or weights.cached)
    # Repacked weights are copies outside the file's mapping.
    repack = plenty and options.repack and not without_amx(llama_cpp.llama_print_system_info())
    computing: dict[str, str | int | None] = {"threads": options.threads or machine.cores, "gpu_layers": gpu_layers}
    if planner.gpus and not borrowed:
        asked = options.exact in ("narrow", "wide", "any")  # long passes on a GPU have other bits
        helps = not asked and not gpu_layers and not _reads(weights) and planner.hold_copies(size)
        computing |= on_gpus(machine, gpu_layers, planner.tensors, weights, experts_here, helps)
        if asked and "device" in computing and options.in_order:
            if (why := _why_gpus_attend(planner, size, computing, weights)) and not options.resident:
                raise _no_class(computing, why)
            kept = f"{computing.get('kept_off', '')} {AFTER.decode()}".strip()
            computing |= HERE | {"op_offload": 0, "kept_off": kept}
        notes += [f"no layer fits on {computing['device']}; long passes use it"] if helps else []
        if options.gpu_memory is not None and not gpu_layers and not helps:
            notes += [f"no layer fits in this gpu_memory, of which {format_size(RESERVE)} are for a GPU's libraries"]
    count = count_layers(planner.tensors)
    copied = plenty and "device" in computing and (experts_here or layers_on_gpu(gpu_layers, count) < count)
    copied &= not all(gpu.shared for gpu in machine.gpus)
    bitwise = _is_bitwise(options, computing, borrowed)
    computing |= ALIKE if bitwise and can_be_alike(options.kv_type) else {}
    here = "device" not in computing and not borrowed
    classes = options.exact != "off" and here and (streams or (repack and bitwise))
    kv_type = kv_type_of_file(path, size) if classes else ""
    computing |= {"kv_type": kv_type} if kv_type else {}
    ways: tuple[Computing, ...] = (computing,)
    if repack and ((bitwise and here) or options.exact == "off"):
        ways = (computing | REPACKED, *(ways if kv_type else ()))
    return LlamaPlan(
        path=path, options=options, build=engine_build(), ways=ways, fills_memory=streams and bool(kv_type),
        notes=notes, size=size, gpu_layers=gpu_layers, weights=weights, machine=machine, plenty=plenty,
        copied=copied, borrowed=borrowed,
    )  # fmt: skip


def on_gpus(
    machine: Machine, gpu_layers: int, tensors: Sequence[Tensor], weights: Plan | None, no_experts: bool, helps: bool
) -> dict[str, str | int | None]:
    """Part of `Backend.computing` where there are GPUs: names of those that compute, and what they do not do."""
    found = dict[str, str | int | None]()
    if gpu_layers or helps:
        own = [gpu.name for gpu in machine.gpus if not gpu.shared]
        found["device"] = ", ".join(own or [machine.gpus[0].name])
    if patterns := kept_off(weights, gpu_layers, count_layers(tensors), no_experts, platform=machine.platform):
        found["kept_off"] = b" ".join(patterns).decode()
    # A GPU that helps with long prompts would read weights before they are loaded.
    return found | ({"op_offload": 0} if _reads(weights) else {})


def _reads(weights: Plan | None) -> bool:
    """True if a pass reads weights from disk."""
    return weights is not None and bool(weights.streamed or weights.pools)


def _why_gpus_attend(planner: MemoryPlanner, size: ContextSize, computing: Computing, weights: Plan | None) -> str:
    """Why the processor cannot compute attention for a row class of a GPU's layers; "": it can."""
    if ", " in str(computing["device"]):
        return "several GPUs have layers"
    if has_experts(planner.path):
        return "its experts depend on all tokens of a pass"
    if weights is not None or not planner.plenty(size, caches_here=True):
        return "memory does not hold the model's file twice, and its cells"
    return ""


def _no_class(computing: Computing, why: str) -> UsageError:
    return UsageError(
        f"--exact: no row class on {computing['device']}, since {why}; --gpu-layers 0 computes on the processor"
    )


def _is_bitwise(options: LoadOptions, computing: Computing, borrowed: Any) -> bool:
    """True if the processor computes attention in every pass, and cells stay in order."""
    return options.in_order and options.exact != "off" and _attends_here(computing, borrowed)


def _attends_here(computing: Computing, borrowed: Any) -> bool:
    return not borrowed and ("device" not in computing or HERE.keys() <= computing.keys())


def load_here(plan: LlamaPlan, way: Computing, progress: Progress, watch: Watch | None = None) -> LlamaBackend:
    """Load what was planned.

    Args:
        plan: of `plan_here`.
        way: one of its `ways`.
        progress: as for `Engine.load`.
        watch: of a probe model.

    Raises:
        ModelError: the model cannot be loaded or used; all that was made is freed.
    """
    path, options, weights = plan.path, plan.options, plan.weights
    notes, computing = list(plan.notes or ()), dict(way)
    file = path
    if needs_skeleton(weights, plan.gpu_layers, plan.machine.platform):
        file = skeleton(path, find_expert_layers(path, loaded_tensors(path)), progress)
        notes.append(f"weights without experts are mapped from {file}")
    before = mappings_of(file, plan.machine) if weights else []
    bitwise = _is_bitwise(options, computing, plan.borrowed)
    if plan.borrowed:
        notes.append(lent_line(path, plan.gpu_layers))
    with unread(file, plan.machine.platform) if _reads(weights) else nullcontext(lambda: None) as mapped:
        model = load_model(file, mapped, **_model_params(plan, way))
    hooks: LayerHooks | SkipPadding | None = None
    context, memory = None, None
    try:
        content = content_of(*parts(path))
        if is_recurrent(model):
            if reason := why_not(model):
                raise ModelError(f"{path}: {reason}; use another model")
            computing = {name: value for name, value in computing.items() if name not in ALIKE}
        speed = 0.0
        size = plan.size.of(model)
        params = size.params(model)
        if weights:
            make, graph = None, None
            if has_own_memory(weights, plan.gpu_layers, plan.machine.platform):
                tensors, device = loaded_tensors(path), _shared_device(plan)
                graph = find_weights(path, model, size, params, tensors, device)
                there = (
                    {tensor.name for tensor in divide(tensors, plan.gpu_layers)[1]} - graph.refused if device else set()
                )
                make = partial(OwnMemory, tensors=tensors, plan=weights, found=graph.found, there=there, device=device)
            streamer, speed, store = start_streaming(file, weights, plan.machine, before, progress, make)
            hooks = LayerHooks(streamer, store if isinstance(store, OwnMemory) else None, graph)
        elif watch:
            hooks = watch
        elif HERE.keys() <= computing.keys():
            hooks = OneByOne()
        elif bitwise and has_experts(path):
            hooks = SkipPadding()
        streams = bool(weights and weights.streamed)
        params.n_threads = params.n_threads_batch = computing["threads"]
        chosen = weights is not None and bool(weights.pools)
        # Callbacks slow a pass, so they are installed only for streamed weights, for chosen experts, or to skip padding
        # of other experts.
        if hooks and (streams or chosen or not weights):
            params.cb_eval = hooks.callback
        elif hooks and weights and weights.cached and bitwise:
            hooks.skip_padding = SkipPadding()
            params.cb_eval = hooks.skip_padding.callback
        params.op_offload = "op_offload" not in computing and not plan.borrowed
        params.offload_kqv = not HERE.keys() <= computing.keys()
        if not params.offload_kqv and params.flash_attn_type == llama_cpp.LLAMA_FLASH_ATTN_TYPE_AUTO:
            params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED  # "auto" wants it on the layer's device
        if params.op_offload and "device" in computing:
            settle_attention(path, model, size, params)
        if isinstance(hooks, LayerHooks) and weights and weights.on_devices:
            whole = partial(hooks.operations, whole=True)
            memory = place_experts(path, model, size, params, weights, whole, notes, keep=options.remember)
            if memory is None:
                layers = find_expert_layers(path, loaded_tensors(path))
                weights = with_pools(replace(weights, device_pools=()), layers, weights.pool_bytes)
                hooks.streamer.plan = weights
        with capture_cpu_backend() if ALIKE.keys() <= computing.keys() else nullcontext(list[int]()) as processors:
            context = make_context(path, model, size, params)
        if hooks and hooks.skip_padding:
            hooks.skip_padding.learn(context)
            if watch and watch.adds_up_cells and HERE.keys() <= computing.keys():
                raise _no_class(computing, "llama.cpp leaves this model's attention there, or adds it up by cell")
        elif isinstance(hooks, LayerHooks) and weights and chosen:
            operations = hooks.operations(context, whole=plan.gpu_layers != 0)
            memory = memory or open_memory(path, weights, options.remember)
            hooks.mixture = open_mixture(path, memory, operations, notes, mapped=file == path)
            if hooks.mixture is None:
                weights = hooks.streamer.plan = replace(weights, pools=(), pool_bytes=0)
        if weights:
            notes += filter(None, [f"{weights.line(speed)}; {store.note}", weights.warning(speed)])
    except BaseException:
        if context:
            llama_cpp.llama_free(context)
        if memory:
            memory.close()
        if hooks:
            hooks.close()
        llama_cpp.llama_model_free(model)
        raise
    lanes = most_paths(model, options.budget, options.sessions)
    flash = params.flash_attn_type != llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED and not (watch and watch.adds_up_cells)
    here = _attends_here(computing, plan.borrowed)
    layers = llama_cpp.llama_model_n_layer(model)
    in_gpu = layers_on_gpu(plan.gpu_layers, layers)
    capabilities = Capabilities(
        context_length=size.length(model),
        max_nodes=size.max_nodes,
        max_wanted=params.n_outputs_max,
        max_leaves=lanes or size.max_leaves,
        logit_tolerance=tolerance(metadata(model, "general.file_type"), size.kv_type),
        layers=layers,
        paths=lanes > 0,
        spare_leaves=None if lanes else size.ids - size.own_ids * size.open,
        cells=size.tokens(model) if ((size.sessions > 1 and size.share < 1) or size.kept) and not lanes else None,
        kept=size.kept,
        by_cell=ALWAYS if lanes else by_cell(size.kv_type_in(model), flash=flash, here=here, alike=bool(processors)),
        streams=streams,
        read_seconds=weights.streamed_bytes / speed if weights and speed else 0.0,
        experts=hooks.mixture.shape if hooks and hooks.mixture else None,
        tiled="device" in computing and weights is None and not plan.borrowed and in_gpu == layers,
    )
    ids = ids_of_session(lanes) * options.sessions if lanes else size.ids
    most_threads = 0 if options.threads or streams else params.n_threads
    if most_threads:
        other_load()
    computing |= {"kv_type": size.kv_type_in(model)} | ({"lenders": len(plan.borrowed) - 1} if plan.borrowed else {})
    backend = LlamaBackend(
        model, context, capabilities, size.open, options.in_order, hooks, most_threads, ids=ids,
        computing=computing,
    )  # fmt: skip
    if processors:
        backend.row_hook, backend.splits_cells = row_hook(processors[0]), False
    if not plan.plenty:
        backend.cells.spare = MARGIN // 4
    backend.notes, backend.plan, backend.content = notes, weights, content
    backend.path, backend.own_head = path, options.own_head
    backend.most_memory = in_bytes("memory", options.memory)
    backend.placed = _placed(plan, capabilities.layers)
    return backend


def _placed(plan: LlamaPlan, layers: int) -> Placed:
    lent = [(layers_on_gpu(plan.gpu_layers, layers), "lenders")]
    shares = lent if plan.borrowed else layers_of_gpus(plan.machine.gpus, plan.gpu_layers, layers)
    return Placed.on(shares, layers, len(plan.weights.streamed) if plan.weights else 0)


def _shared_device(plan: LlamaPlan) -> int:
    """A GPU that computes with weights in this program's memory; 0: there is none."""
    own = has_own_memory(plan.weights, plan.gpu_layers, plan.machine.platform)
    return (find_device(plan.machine.gpus[0].name) or 0) if own and plan.gpu_layers and not plan.borrowed else 0


def _model_params(plan: LlamaPlan, way: Computing) -> dict[str, Any]:
    params: dict[str, Any] = {"n_gpu_layers": plan.gpu_layers, "use_extra_bufts": REPACKED.keys() <= way.keys()}
    if plan.options.own_head:
        params["load_mtp"] = True
    if plan.weights:
        params["load_mode"] = llama_cpp.LLAMA_LOAD_MODE_MMAP
    if plan.copied:
        params["load_mode"] = llama_cpp.LLAMA_LOAD_MODE_NONE
    if plan.borrowed:
        return params | lent_options(plan.borrowed)
    params |= {} if "device" in way else PROCESSOR_ONLY
    patterns = str(way.get("kept_off", "")).encode().split()
    if _shared_device(plan):
        patterns = [ANY]
    if patterns:
        params["tensor_buft_overrides"] = ctypes.addressof(overrides(*patterns))
    return params
