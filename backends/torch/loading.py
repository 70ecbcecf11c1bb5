"""Check and load model folders, and place their layers: on the device, in host memory or on disk."""

import gc
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from rich.console import Console
from rich.progress import track

from edgespec.errors import ModelError, NoRoom, UsageError
from edgespec.loop.backend import Capabilities
from edgespec.machine.files import weight_files
from edgespec.machine.memory import format_size
from edgespec.machine.this_machine import Gpu
from edgespec.weights.plan import (
    BUFFERS,
    WORKSPACE,
    consecutive_layers,
    layers_by_device,
    layers_on_gpu,
    streams_by_device,
)

from ..common.model_folder import LOCAL, read_config, refused
from .attention import ATTENTION, Probe, run
from .disk import STAGING, Feeder, Pack, Source, Staging, find_run, mapped_bytes, read_folder, same_bytes
from .offload import (
    MOST_BUFFERS,
    Block,
    CopyEngine,
    Streamer,
    block_bytes,
    count_resident,
    layout,
    needs_pinning,
    streamed_layers,
)
from .recurrent import WITH_BOTH, WITHOUT_CELLS, is_recurrent, with_cells
from .spans import Spans, out_of_memory

if TYPE_CHECKING:
    from .nf4 import KeptLayers

FASTER = 1.1  # times, from which on several devices stream: each hop between them takes some time
NF4 = "nf4"
MIN_NODES = 512  # prompt tokens per pass
ARCH = re.compile(r"(sm|compute)_(\d+)(\d)[af]?")
ONE_EXPERT = re.compile(r"\.experts\.\d+\.")  # in the names of tensors
FULL, SLIDING = "full_attention", "sliding_attention"  # `layer_types` of transformers


def find_gpus(device: str | None) -> list[Gpu]:
    """GPUs that this PyTorch sees; only those that may compute are measured, which takes some of their memory."""
    names = [f"cuda:{i}" for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    mac = torch.backends.mps.is_available()
    if any(map(torch.cuda.memory_reserved, names)) or (mac and torch.mps.driver_allocated_memory()):
        gc.collect()  # else memory of models that are gone counts as used
    if names:
        torch.cuda.empty_cache()
    if mac:
        torch.mps.empty_cache()
    found = [look_at(name) if device in (None, "cuda", name) else Gpu(name, False, 0) for name in names]
    return [*found, *([look_at_mps()] if mac else [])]


def look_at(name: str) -> Gpu:
    if lacks_kernels(name):
        return Gpu(name, False, 0)
    try:
        free, total = torch.cuda.mem_get_info(name)
    except RuntimeError:  # it is full, or another program has it for itself
        return Gpu(name, False, 0)
    return Gpu(name, False, free, torch.cuda.memory_reserved(name), total)


def lacks_kernels(name: str) -> str:
    """Return a line for the user if this PyTorch has no kernels for a card, else ""."""
    if not (built := torch.cuda.get_arch_list()):
        return ""
    card = torch.cuda.get_device_capability(name)
    for arch in built:
        if not (found := ARCH.fullmatch(arch)):  # ROCm's have other names
            return ""
        made = int(found[2]), int(found[3])
        if made <= card and (found[1] == "compute" or made[0] == card[0]):
            return ""
    about = f"{torch.cuda.get_device_name(name)} ({name}) is sm_{card[0]}{card[1]}, for which this PyTorch"
    return f"{about} ({torch.__version__}) has no kernels, only for {', '.join(built)}: install another build"


def look_at_mps() -> Gpu:
    used, limit = torch.mps.driver_allocated_memory(), torch.mps.recommended_max_memory()
    return Gpu("mps", True, max(0, limit - used), used, limit)


def find_device(name: str | None, gpus: Sequence[Gpu]) -> str:
    """
    Args:
        name: of the device; None: the first GPU that has memory, or shares that of the machine, or else the CPU.
        gpus: that are there.

    Raises:
        UsageError: this PyTorch does not see the device.
    """
    there = [*(gpu.name for gpu in gpus), "cpu"]
    usable = [gpu.name for gpu in gpus if gpu.shared or gpu.free or gpu.used]
    wanted = name or (usable or ["cpu"])[0]
    if wanted == "cuda":
        wanted = next((one for one in usable if one.startswith(wanted)), "cuda:0")
    if wanted not in there:
        raise UsageError(f"device {name!r} is not there: this PyTorch ({torch.__version__}) sees {', '.join(there)}")
    return wanted


def load_model(folder: Path, dtype: str | None, loader: Any = None, loader_config: Any = None) -> Any:
    """
    Args:
        folder: of the model.
        dtype: of `LoadOptions`.
        loader: a model class; None: the folder's.
        loader_config: for it.

    Returns:
        The model on the CPU, with `tree_attention`. Weights whose type stays are mapped, not read.

    Raises:
        ModelError: the model cannot be loaded, or cannot hold a tree.
    """
    transformers.logging.set_verbosity_error()
    if not sys.stderr.isatty():
        transformers.logging.disable_progress_bar()
    config = read_config(folder)
    check_config(config)
    stored = {}
    if has_stored_nf4(config):
        from .nf4 import METHOD

        about = config.quantization_config
        config.quantization_config = {"quant_method": METHOD, "skipped": about.get("llm_int8_skip_modules")}
        stored["config"] = config
    if loader:
        stored["config"] = loader_config
    with refused("cannot be loaded"):
        model, report = (loader or transformers.AutoModelForCausalLM).from_pretrained(
            folder, **LOCAL, dtype=type_to_load(config, dtype) or "auto", attn_implementation=ATTENTION,
            use_safetensors=True, output_loading_info=True, **stored,
        )  # fmt: skip
    if report["missing_keys"]:
        missing = sorted(report["missing_keys"])
        raise ModelError(f"its safetensors files lack {len(missing)} of the model's tensors, such as {missing[0]}")
    if not model._supports_attention_backend and not is_recurrent(config.get_text_config()):
        raise ModelError(f"{type(model).__name__} computes attention in its own way, which cannot hold a tree")
    return model.eval().requires_grad_(False)


def check_config(config: Any) -> None:
    """
    Raises:
        ModelError: the weights are quantised in another way, or a kind of layer is not known.
    """
    if getattr(config, "quantization_config", None) is not None and not has_stored_nf4(config):
        raise ModelError(
            "its weights are quantised already, and not as bitsandbytes' nf4; use the original 16-bit folder, with "
            "dtype nf4 for 4 bits"
        )
    text = config.get_text_config()
    other = set(getattr(text, "layer_types", None) or ()) - {FULL, SLIDING, *WITHOUT_CELLS, *WITH_BOTH}
    if other:
        kinds = ", ".join(sorted(other))
        raise ModelError(f"has layers of the kind {kinds}, which cannot branch into a tree here; use a GGUF of it")


def has_stored_nf4(config: Any) -> bool:
    about = getattr(config, "quantization_config", None)
    return isinstance(about, dict) and bool(about.get("load_in_4bit")) and about.get("bnb_4bit_quant_type") == NF4


def has_stored_nf4_layers(model: Any) -> bool:
    return bool(getattr(model, "is_quantized", False))


def bytes_in(folder: Path) -> int:
    """Of its weights."""
    return sum(file.stat().st_size for file in weight_files(folder))


def check_folder_fits(folder: Path, dtype: str | None, memory: int) -> None:
    """
    Raises:
        NoRoom: weights that do not stay as they are in the file do not fit. They are made at load, before any can be
            streamed: weights of another type than the file's, and experts that are put together.
    """
    config = read_config(folder)
    found: Any = getattr(config.get_text_config(), "dtype", None)
    names = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
    if found not in names or has_stored_nf4(config):
        return
    made = type_to_load(config, dtype)
    if made in (None, names[found]):
        size = bytes_put_together(folder, config, memory)
        if size > memory:
            raise NoRoom(
                f"its experts take {format_size(size, up=True)}, and {format_size(memory)} of memory are to be used: "
                "experts are put together at load, and cannot be streamed: use a GGUF"
            )
        return
    size = bytes_in(folder) * getattr(torch, made).itemsize // found.itemsize
    if size > memory:
        other = "" if dtype == NF4 else ", or nf4"
        raise NoRoom(
            f"as {made} the model takes {format_size(size)}, and {format_size(memory)} of memory are to be used: use "
            f"the folder's own {names[found]}, which can be streamed{other}"
        )


def type_to_load(config: Any, dtype: str | None) -> str | None:
    """The type of the weights before layers are quantised; None: the folder's."""
    return ("float16" if config.dtype == torch.float16 else "bfloat16") if dtype == NF4 else dtype


def bytes_put_together(folder: Path, config: Any, memory: int) -> int:
    """
    Returns:
        Bytes of the model's weights that the folder has in parts; 0: they fit into `memory`, or the folder is damaged.
    """
    try:
        if sum(one.size for name, (_, one) in read_folder(folder).items() if ONE_EXPERT.search(name)) <= memory:
            return 0
        with torch.device("meta"):  # not every model class puts them together
            model = transformers.AutoModelForCausalLM.from_config(config)
        return int(sum(weight.nbytes for weight in model.parameters()) - mapped_bytes(model, folder))
    except Exception:  # `load_model` says why
        return 0


def check_rope(config: Any, context_length: int) -> None:
    """
    Raises:
        UsageError: with a token beyond the trained length, the rotary embedding changes for all tokens, also in cells.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") in ("dynamic", "longrope"):
        limit = rope.get("original_max_position_embeddings") or config.max_position_embeddings
        if context_length > limit:
            raise UsageError(
                f"the context is {context_length}, but this model's positions change beyond {limit}: use at most that"
            )


def most_positions(model: Any) -> int:
    """Positions for which the model has learned a vector each, as OPT has; sys.maxsize: it computes them."""
    learned = getattr(model.get_decoder(), "embed_positions", None)
    if not isinstance(learned, torch.nn.Embedding):
        return sys.maxsize
    return int(learned.num_embeddings - getattr(learned, "offset", 0))


def session_cells(limits: Capabilities) -> int:
    return limits.context_length + tree_cells(limits.max_nodes, limits.max_wanted)


def tree_cells(max_nodes: int, max_wanted: int) -> int:
    """Cells beyond the context: a chain of nodes ends within it, so only a tree needs them."""
    return min(max_nodes, max(MIN_NODES, max_wanted))


def cache_shape(config: Any, cells: int) -> tuple[int, ...]:
    """
    Returns:
        [layers, 2, key heads, cells, d] of one session.
    """
    layers = len(with_cells(config))
    heads = config.num_attention_heads if layers else 1
    d = getattr(config, "head_dim", None) or config.hidden_size // heads
    return layers, 2, getattr(config, "num_key_value_heads", None) or heads, cells, d


def decoder_layers(model: Any) -> Any:
    """
    Raises:
        ModelError: the model class has no list of them.
    """
    layers = getattr(model.get_decoder(), "layers", None)
    if layers is None:
        raise ModelError(f"{type(model).__name__} has no list of layers to stream or to bring to 4 bits")
    return layers


def work_bytes(model: Any, capabilities: Capabilities, wanted: int | None) -> int:
    """
    Returns:
        Bytes of the device's memory for all but layers and caches: embeddings, and intermediate values of the widest
        pass, whose logits have `wanted` rows. None: of a further device, without embeddings and logits.
    """
    layers = decoder_layers(model)
    inside = {id(parameter) for parameter in layers.parameters()}
    outside = sum(p.numel() * p.element_size() for p in model.parameters() if id(p) not in inside)
    if wanted is None:
        outside = wanted = 0
    config, item = model.config.get_text_config(), model.dtype.itemsize
    nodes, cells = capabilities.max_nodes, session_cells(capabilities)
    states = nodes * (3 * getattr(config, "intermediate_size", 0) + 8 * config.hidden_size) * item
    logits = wanted * config.vocab_size * (item + 4)
    masks = 2 * nodes * cells * item
    # Without a kernel (`_by_definition` in attention.py) all scores are there, in two types.
    whole = getattr(config, "attn_logit_softcapping", None) or any(
        name.endswith("sinks") for name, _ in layers.named_parameters()
    )
    scores = config.num_attention_heads * nodes * cells * (item + 8) if whole else 0
    codes = max((buffer.numel() for buffer in layers.buffers() if buffer.dtype == torch.uint8), default=0)
    return int(outside + states + logits + masks + scores + 2 * codes * item + WORKSPACE)


@dataclass(frozen=True, slots=True)
class Form:
    """A transformation of layers before they are placed.

    Attributes:
        name: part of the key of a `Pack`.
        size: returns the bytes of a layer's block after `make`.
        make: transforms a layer in place.
    """

    name: str
    size: Callable[[Any], int]
    make: Callable[[Any], None]


def leave_alone(layer: Any) -> None:
    """`make` for layers as the folder has them."""


PLAIN = Form("", block_bytes, leave_alone)


def nf4_form(device: Any, kept: "KeptLayers | None" = None) -> Form:
    """Quantise layers one at a time on the device, where it is fast, but for those that are kept."""
    from .nf4 import linears, quantise, quantised_bytes

    def make(layer: Any) -> None:
        if not any(True for _ in linears(layer)) or (kept and kept.take(layer)):
            return
        layer.to(device)
        quantise(layer)
        layer.to("cpu")
        if kept:
            kept.keep(layer)

    return Form(NF4, quantised_bytes, make)


@dataclass(frozen=True, slots=True)
class Host:
    """Memory for layers that the device cannot hold.

    Attributes:
        folder: of the model; layers that the memory cannot hold are read from there.
        memory: bytes to use.
        needed: bytes of them for other things than the layers.
        apart: True if the device has its own memory; False if it computes in this one.
    """

    folder: Path
    memory: int
    needed: int
    apart: bool


@dataclass(frozen=True, slots=True)
class Placement:
    """
    Attributes:
        streamed: numbers of the layers that do not stay on the device.
        on_disk: those of them that host memory cannot hold.
        buffers: on each device that streams layers.
        runs: numbers of devices, and of layers that follow each other there; the first device has the first one.
    """

    streamed: Sequence[int]
    on_disk: Sequence[int]
    buffers: int
    runs: Sequence[tuple[int, range]] = ()


def choose_placement(
    sizes: Sequence[int],
    memory: int,
    fixed: int,
    host: Host | None = None,
    gpu_layers: int | None = None,
    rooms: Sequence[int] = (),
    caches: Sequence[int] = (),
    own_layers: bool = False,
) -> Placement:
    """Decide which layers stay on which device.

    Args:
        sizes: bytes of each layer.
        memory: bytes to use on the first device.
        fixed: bytes of them for other things than layers.
        host: limits the host memory for other layers; None: there is no limit.
        gpu_layers: layers that stay on GPUs, the output included; -1: all; None: as many as fit.
        rooms: as for `layers_by_device`.
        caches: as for `layers_by_device`.
        own_layers: of `LoadOptions`.

    Raises:
        NoRoom: the device cannot hold `BUFFERS` layers or `gpu_layers`, or the host cannot hold `STAGING` layers.
    """
    asked = None if gpu_layers is None else layers_on_gpu(gpu_layers, len(sizes))
    counts = layers_by_device(sizes, memory, fixed, rooms, caches, asked)
    elsewhere = len(sizes) - counts[0]
    sizes, fixed = sizes[: counts[0]], fixed - sum(caches[counts[0] :])

    def place(count: int, room: int, choose_on_disk: Callable[[Sequence[int]], Sequence[int]]) -> Placement:
        total = len(sizes)
        streamed = consecutive_layers(total, total - count) if own_layers else streamed_layers(total, count)
        left = room - sum(size for i, size in enumerate(sizes) if i not in streamed)
        buffers = min(left // max(sizes), MOST_BUFFERS, len(streamed))
        return Placement(streamed, choose_on_disk(streamed), max(buffers, BUFFERS), runs_of(counts))

    if host and not host.apart:
        fixed += host.needed
        count = count_resident(memory, sizes, fixed, BUFFERS + STAGING, "memory")
        return place(count, memory - fixed - STAGING * max(sizes), lambda streamed: streamed)
    count = count_resident(memory, sizes, fixed)
    if asked is not None:
        if asked > count + elsewhere:
            raise NoRoom(
                f"with --gpu-layers {gpu_layers} {asked} layers stay on the GPU, but {count + elsewhere} of "
                f"{len(sizes) + elsewhere} fit"
            )
        count = asked - elsewhere
    return place(
        count, memory - fixed,
        lambda streamed: _beyond(streamed, [sizes[i] for i in streamed], host) if host and streamed else [],
    )  # fmt: skip


def runs_of(counts: Sequence[int]) -> list[tuple[int, range]]:
    """By the number of each device's layers, run by run; the devices take turns."""
    ends = list(accumulate(counts))
    return [(run, numbers) for run, numbers in enumerate(map(range, [0, *ends], ends)) if numbers or run == 0]


def spread(
    placement: Placement,
    sizes: Sequence[int],
    rooms: Sequence[int],
    caches: Sequence[int],
    links: tuple[float, Sequence[float]],
    host: Host | None = None,
    gpu_layers: int | None = None,
) -> Placement:
    """Let all devices stream layers. They take turns, so that the next layers of one arrive while others compute.

    Args:
        placement: where the first device streams.
        sizes: as for `choose_placement`.
        rooms: bytes for layers and their caches on each device.
        caches: as for `choose_placement`.
        links: bytes per second that reach the first device if it is the only one that copies, and each one if all copy.
        host: as for `choose_placement`.
        gpu_layers: as for `choose_placement`.

    Returns:
        `placement`, if that is nearly as fast, or if this machine's memory cannot hold all streamed layers.
    """
    count, (speed, speeds) = len(sizes), links
    asked = None if gpu_layers is None else layers_on_gpu(gpu_layers, count)
    shares = streams_by_device(count, max(sizes), max(caches), rooms, speeds, asked)
    if not shares:
        return placement
    seconds = max(some / one for (_, some), one in zip(shares, speeds, strict=True))
    if placement.on_disk or FASTER * seconds > len(placement.streamed) / speed:
        return placement
    left = [
        (room - held * max(caches)) // max(sizes) - (held - some)
        for room, (held, some) in zip(rooms, shares, strict=True)
        if some
    ]
    most = max(some for _, some in shares)
    buffers = max(BUFFERS, min(*left, MOST_BUFFERS, most))
    turns = -(-most // buffers)
    parts = [-(-held * (turn + 1) // turns) + (-held * turn // turns) for turn in range(turns) for held, _ in shares]
    runs = [(run % len(shares), numbers) for run, numbers in runs_of(parts)]
    streamed = list[int]()
    for device, (held, some) in enumerate(shares):
        own = [layer for where, numbers in runs if where == device for layer in numbers]
        streamed += [own[i] for i in streamed_layers(held, held - some)]
    if host and host.needed + sum(sizes[i] for i in streamed) > host.memory:
        return placement
    return Placement(sorted(streamed), [], buffers, runs)


def place_layers(
    model: Any,
    spans: Spans,
    sizes: Sequence[int],
    placement: Placement,
    copies: Callable[[Any, int], CopyEngine],
    host: Host | None = None,
    form: Form = PLAIN,
) -> list[Streamer]:
    """Transform layers, move resident ones to their devices, and start to stream the others.

    Args:
        model: on the host, its weights mapped or in memory.
        spans: of all layers; layers on disk are the first device's.
        sizes: bytes of each layer in its form.
        placement: of its layers.
        copies: makes the copy engine.
        host: as for `choose_placement`.
        form: of the layers.

    Returns:
        One for each device that streams.

    Raises:
        ModelError: a layer cannot be written to the pack, or streamed.
    """
    layers, streamed, on_disk = list(decoder_layers(model)), placement.streamed, placement.on_disk
    places = [device for device, numbers in spans for _ in numbers]
    runs = _runs(model, layers, on_disk, host.folder) if host and on_disk and form is PLAIN else {}
    to_pack = [i for i in on_disk if i not in runs]
    blocks, sources, console = dict[int, Block](), list[Source](), Console(stderr=True)
    apart = needs_pinning(spans[0][0])
    pins = apart
    steps = track(
        range(len(layers)), "Placing layers", console=console, transient=True,
        disable=not console.is_terminal or not (streamed or form is not PLAIN),
    )  # fmt: skip
    pack = None
    if host and to_pack:
        # Another version of transformers may have a layer's tensors in another order.
        about = f"{form.name} {model.dtype} {[layout(layer) for layer in layers]}"
        pack = Pack(host.folder, about, {i: sizes[i] for i in to_pack})
    streamers = list[Streamer]()
    with ExitStack() as failed:  # closes what was opened, unless all is
        for i in steps:
            form.make(layers[i])
            if i not in streamed:
                layers[i].to(places[i])
                continue
            if i in runs:
                blocks[i] = Block(layers[i], None, copy=False)
                blocks[i].lies_as(runs[i][0].size, runs[i][1])
                sources.append(runs[i][0])
            elif pack and i in on_disk:
                blocks[i] = Block(layers[i], None)
                sources.append(pack.add(i, blocks[i].host))
                blocks[i].host = None
            else:
                blocks[i] = Block(layers[i], places[i] if pins else None)
                pins = blocks[i].pinned_for is not None  # none is asked for after a refusal
            failed.callback(blocks[i].close)
        for device in dict.fromkeys(places):
            own = [i for i in streamed if places[i] == device]
            if not own:
                continue
            engine = copies(device, placement.buffers)
            failed.callback(engine.close)
            feeder, staging = None, None
            held = [blocks[i] for i in own]
            sent = {k for k, block in enumerate(held) if apart and block.host is not None and block.pinned_for is None}
            if sources:
                try:
                    staging = Staging(sources, device if apart else None)
                except OSError as error:  # it names the file
                    raise ModelError(f"layers cannot be streamed from disk: {error}") from error
                failed.callback(staging.close)
            if staging or sent:
                feeder = Feeder(staging, engine, placement.buffers)
                failed.callback(feeder.close)
            moved = [layers[i] for i in own]
            streamers.append(Streamer(moved, held, device, engine, feeder, placement.buffers, sent))
        failed.pop_all()
    return streamers


def place_others(model: Any, device: Any, sends_rows: bool = False) -> None:
    """Move what is in no layer to a device.

    Args:
        model: the model.
        device: where all else goes.
        sends_rows: the input embeddings stay in host memory, and a pass sends the rows of its tokens.
    """
    decoder, layers, embeddings = model.get_decoder(), decoder_layers(model), model.get_input_embeddings()
    decoder.layers = torch.nn.ModuleList()
    if sends_rows:
        model.set_input_embeddings(torch.nn.Module())
    model.to(device)
    decoder.layers = layers
    if sends_rows:
        model.set_input_embeddings(embeddings)
        embeddings.register_forward_pre_hook(lambda module, args: (args[0].cpu(),))
        embeddings.register_forward_hook(lambda module, args, rows: rows.to(device))


def untied_embeddings(model: Any) -> int:
    """Bytes of input embeddings that are not the output's, too."""
    weight, output = model.get_input_embeddings().weight, model.get_output_embeddings()
    return 0 if output is not None and output.weight is weight else int(weight.nbytes)


def _beyond(streamed: Sequence[int], sizes: Sequence[int], host: Host) -> list[int]:
    """Choose the streamed layers that stay on disk, evenly spread, so that reads and copies go on at the same time."""
    kept = count_resident(host.memory, sizes, host.needed, STAGING, "memory")
    return [streamed[k] for k in streamed_layers(len(streamed), kept)]


def _runs(
    model: Any, layers: Sequence[Any], numbers: Sequence[int], folder: Path
) -> dict[int, tuple[Source, list[int]]]:
    """
    Returns:
        Runs of the layers that can be streamed from the folder's files; empty if its bytes differ from the model's.
    """
    stored = read_folder(folder)
    names = {id(module): f"{name}." for name, module in model.named_modules()}
    found = {i: run for i in numbers if (run := find_run(layers[i], names[id(layers[i])], stored))}
    for i, (source, offsets) in list(found.items())[:1]:
        if not same_bytes(layers[i], source, offsets):
            return {}
    return found


def run_probe(model: Any, device: Any) -> Probe:
    """
    Raises:
        ModelError: the model cannot be run with `tree_attention`.
    """
    probe = Probe()
    with refused(f"{type(model).__name__} cannot be run on a tree"), torch.inference_mode(), out_of_memory("a pass"):
        run(model, [0], [0], [0], probe, device)
    return probe


def inspect_layers(model: Any, probe: Probe, shape: tuple[int, ...], expected: Sequence[int]) -> tuple[int | None, ...]:
    """
    Args:
        model: the model.
        probe: after its pass.
        shape: of a session's cache.
        expected: the layers that should have keys and values; others are recurrent, or have no past.

    Returns:
        Each layer's window.

    Raises:
        ModelError: the layers or shapes of attention are not as expected.
    """
    if sorted(probe.heads) != list(expected):
        if len(probe.heads) == len(expected):
            raise ModelError(f"attention says it is of the layers {sorted(probe.heads)}, not {list(expected)}")
        raise ModelError(
            f"{len(probe.heads)} of its {len(expected)} layers are attention; the others cannot branch into a tree"
        )
    for layer, heads in sorted(probe.heads.items()):
        if heads != (shape[2], shape[4]):
            raise ModelError(f"layer {layer} has keys of shape {heads}, not {(shape[2], shape[4])} as config.json says")
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None)
    if not kinds:
        window = getattr(config, "sliding_window", None)
        if window and window < config.max_position_embeddings and not any(probe.windows.values()):
            raise ModelError(f"its window of {window} tokens is not one that this backend can see in its layers")
        return tuple(probe.windows[layer] for layer in expected)
    return tuple(config.sliding_window if kind in (SLIDING, "hybrid_sliding") else None for kind in kinds)
