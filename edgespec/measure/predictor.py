"""A model on a machine that is not here: its engines' plans, and passes computed from the speeds of the machine.

No pass is made. A pass takes the longer of computing and reading; computing takes the longer of reading weights from
memory and of its operations, device by device.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from edgespec.errors import EdgespecError, ModelError, NoRoom, UsageError, told_as
from edgespec.loading.pair import choose_budget, choose_context
from edgespec.loading.timed_pass import Pass, time_pass
from edgespec.loading.where import Where
from edgespec.loop.backend import Placed
from edgespec.loop.engines import LoadOptions, find_engine, load_at_once
from edgespec.loop.pass_times import distinct
from edgespec.machine.described import with_speeds
from edgespec.machine.measurements import Amount, processor_name, recall
from edgespec.machine.system import chip
from edgespec.machine.this_machine import Gpu, Machine, this_machine
from edgespec.measure.outlook import BEAM, COMPUTED, Outlook, draft_passes, sizes
from edgespec.measure.paces import LEVEL, PROCESSOR, Pace, pace
from edgespec.models import hub
from edgespec.models.gguf_header import OF_STATES, own_values, whole_number
from edgespec.models.heads import is_head
from edgespec.models.registry import OWN, Entry, find_model, is_folder, local_path
from edgespec.models.shapes import BLOCKS, file_of
from edgespec.weights.plan import (
    BUFFERS,
    EXPERTS,
    MARGIN,
    SAFETY,
    WORKSPACE,
    Plan,
    Pool,
    Tensor,
    divide,
    layer_of,
    layers_by_device,
    layers_of_gpus,
    make_plan,
    places,
    streams_by_device,
    two_digits,
    usable,
)
from edgespec.weights.ring import can_stream
from edgespec.weights.wired import CACHE_SHARE, free_memory, gpu_limit

OF_BLOCKS = {number: (name, weights, size) for name, (number, weights, size) in BLOCKS.items()}
OTHER_TYPE = ("", 32, 18)
BYTES_OF_FOUR_BITS = 4.5 / 8  # bytes of a weight with 4 bits in groups of 64, and scales
ROWS = 512  # tokens of a prompt in a pass
ROWS_TIMED = 64
MOST_EXPERTS = 512  # LLAMA_MAX_EXPERTS of llama-hparams.h
OFF = 2  # several rows take at most so many times as long as computed: of published ones, all but those of old kernels
FASTER = 1.1  # speed-up from which on another engine is offered
QUANTISED = 8  # bits of a weight; to bring weights of fewer to 4 bits loses twice
FLOAT = 15  # more have all weights but a few in 16 or 32


@dataclass(frozen=True, slots=True)
class Part:
    """Weights that one device reads in a pass, of which experts only in part.

    Attributes:
        size, experts_size: bytes.
        weights, experts: numbers.
        layers, mixtures: numbers of layers that it has weights of, without experts and with them.
        types: name -> weights, experts.
    """

    size: float = 0.0
    weights: float = 0.0
    experts_size: float = 0.0
    experts: float = 0.0
    layers: int = 0
    mixtures: int = 0
    types: Mapping[str, Sequence[float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Speeds:
    """
    Attributes:
        name: of the device, for messages.
        memory: bytes per second.
        operations: per second.
        pace: of a kind of device.
        cores: of a processor.
    """

    name: str
    memory: float
    operations: float
    pace: Pace = LEVEL
    cores: float = 1


@dataclass(slots=True, kw_only=True)
class Prediction(Outlook):
    """Sizes in bytes. `passes` has trees only if reading limits them whatever their rows cost.

    Attributes:
        why: this engine.
        stays: bytes in the machine's memory and on its devices.
        streamed: bytes read from disk in every pass, without experts.
        chosen: bytes of experts that a pass over one node is expected to read from disk.
        copied: bytes copied to a card in every pass.
        unknown: speeds that the machine's description lacks.
        rough: a processor reads experts; published speeds of such mixtures are at times far lower.
    """

    why: str
    stays: float = 0.0
    streamed: float = 0.0
    chosen: float = 0.0
    copied: float = 0.0
    unknown: Sequence[str] = ()
    rough: bool = False

    @property
    def lacks(self) -> str:
        return f"the machine's description lacks {', '.join(self.unknown)}"


@dataclass(slots=True, kw_only=True)
class Elsewhere:
    """Findings of `predict`: the engine that would run first, then others.

    Attributes:
        target: what the user calls it.
        machine: what it is called.
        described: the machine.
        size, draft_size: bytes of weights.
        bits: of a weight, on average.
        here: False: from the published shape, or the header on the hub.
        found: one for each engine.
    """

    target: str
    machine: str
    described: Machine
    size: int
    bits: float
    draft_size: int
    here: bool
    found: Sequence[Prediction]


@contextmanager
def path_of(entry: Entry, source: str, ask: bool) -> Iterator[str]:
    """Path of a GGUF: the one that is here, else one made of its published shape, or of its header on the hub.

    Raises:
        UsageError: it is a folder.
        ModelError: it is neither here nor has a shape, and the hub may not be asked, or has no such file.
    """
    facts = entry.files.get(source)
    try:
        if is_folder(source):
            raise UsageError(
                f"{source.partition(':')[2]} is a folder; speeds are computed for GGUF files, such as "
                "hf:OWNER/REPOSITORY-GGUF:Q4_K_M"
            )
        path = local_path(source, fetch=False)
    except UsageError:
        raise
    except EdgespecError as error:
        if facts and facts.shape:
            made = file_of(facts.shape)
        elif ask and source.startswith("hf:"):
            made = hub.without_weights(hub.parse(source.removeprefix("hf:")))
        else:
            raise ModelError(f"{entry.name}: is not here, and models.yaml has no shape of it ({error})") from error
        with made as path, told_as(path, entry.name):
            yield path
        return
    yield path


def predict(
    target: str | Entry,
    machine: Machine,
    called: str,
    *,
    draft: str | None = None,
    budget: int | None = None,
    context_length: int | None = None,
    memory: str | int | None = None,
    kv_type: str | None = None,
    models_file: str | None = None,
    ask: bool = False,
) -> Elsewhere:
    """Compute how a model would run on a machine.

    Args:
        target: as for `edgespec.load`, or its entry.
        machine: described.
        called: its name.
        draft: as for `edgespec.load`.
        budget: most draft tokens per pass.
        context_length: most tokens of text.
        memory: as for `edgespec.load`.
        kv_type: as for `edgespec.load`.
        models_file: a models.yaml besides the built-in one.
        ask: the hub may be asked for headers of files whose shape is not known.

    Raises:
        EdgespecError: a file is missing or damaged, or a value out of range.
    """
    if draft in OWN:
        raise UsageError(f"--draft {draft} goes without --machine, which looks at drafts with files of their own")
    entry = find_model(target, models_file) if isinstance(target, str) else target
    other = find_model(draft, models_file) if draft else entry
    with ExitStack() as files:
        path = files.enter_context(path_of(entry, entry.target, ask))
        drafts = (
            [files.enter_context(path_of(other, source, ask))]
            if (source := other.target if draft else entry.draft)
            else []
        )
        options = LoadOptions(
            context_length=choose_context(context_length, entry), budget=choose_budget(budget, entry), memory=memory,
            kv_type=kv_type, draft_files=tuple(drafts),
        )  # fmt: skip
        asked = Asked(Weights(path), [Weights(one) for one in drafts], options, machine)
        model, found = asked.model, [_outlook(asked, "llamacpp")]
        first = found[0]
        on_device = first.where.placed.on_device if first.where and first.where.placed else 0
        if not model.experts:
            if machine.platform == "darwin" and machine.gpus:
                found.append(_outlook(asked, "mlx"))
            elif asked.cards and on_device < model.layers:
                found.append(_outlook(asked, "torch"))
    return Elsewhere(
        target=entry.name, machine=called, described=machine, size=model.size,
        bits=8 * model.size / sum(map(model.numbers, model.tensors)),
        draft_size=sum(one.size for one in asked.small), here=local_or_none(entry) is not None, found=found,
    )  # fmt: skip


def local_or_none(entry: Entry) -> str | None:
    try:
        return local_path(entry.target, fetch=False)
    except EdgespecError:
        return None


class Weights:
    """Tensors of a GGUF, and what a pass reads of them."""

    def __init__(self, path: str) -> None:
        """
        Raises:
            ModelError: it cannot be read.
        """
        self.path = path
        files = import_module("edgespec.backends.llamacpp.ggml.files")
        self.tensors: list[Tensor] = files.loaded_tensors(path)
        self.values = own_values(path)
        if not self.tensors:
            raise ModelError(f"{path}: has no tensors")
        self.layers = 1 + max(map(layer_of, self.tensors))
        self.size = sum(tensor.size for tensor in self.tensors)
        # Of others a token needs one row.
        self.read = {tensor.name for place, tensor in places(self.tensors, self.layers) if place >= 0}
        count = whole_number(path, self.values, "expert_count", 0, MOST_EXPERTS)
        used = whole_number(path, self.values, "expert_used_count", 0, count)
        self.experts = (count, used) if count else None

    def layers_of(self, pools: Sequence[Pool]) -> set[int]:
        """Numbers of layers in the model."""
        mixed = sorted({layer_of(tensor) for tensor in self.tensors if EXPERTS.search(tensor.name)})
        return {mixed[number] for pool in pools for number in pool.layers}

    def numbers(self, tensor: Tensor) -> float:
        _, weights, size = OF_BLOCKS.get(tensor.type, OTHER_TYPE)
        return tensor.size / size * weights

    def part(self, tensors: Sequence[Tensor], bytes_each: float | None = None) -> Part:
        """
        Args:
            tensors: of these.
            bytes_each: bytes of a weight; None: as in the file.
        """
        read = [tensor for tensor in tensors if tensor.name in self.read]
        sums, types = [0.0, 0.0, 0.0, 0.0], dict[str, list[float]]()
        for tensor in read:
            at, numbers = 2 if EXPERTS.search(tensor.name) else 0, self.numbers(tensor)
            sums[at] += numbers * bytes_each if bytes_each else tensor.size
            sums[at + 1] += numbers
            types.setdefault(OF_BLOCKS.get(tensor.type, OTHER_TYPE)[0], [0.0, 0.0])[at // 2] += numbers
        mixed = {layer_of(tensor) for tensor in read if EXPERTS.search(tensor.name)}
        layers = {layer_of(tensor) for tensor in read} - {-1}
        return Part(sums[0], sums[1], sums[2], sums[3], len(layers - mixed), len(mixed), types)

    def cells(self, context_length: int) -> int:
        """Bytes of keys and values in 16 bits: of a context, 0 = as trained, and of a prompt's pass."""
        names = (".attn_k.weight", ".attn_v.weight")
        rows = sum(self.numbers(tensor) for tensor in self.tensors if tensor.name.endswith(names))
        length = (context_length or int(self.values.get("context_length", 0))) + ROWS
        return int(2 * rows / int(self.values["embedding_length"]) * length)

    def used(self, nodes: int) -> float:
        """Share of a layer's experts that a pass over `nodes` tokens is expected to choose."""
        if not self.experts:
            return 1.0
        return float(distinct(nodes, *self.experts)) / self.experts[0]

    def seconds(self, part: Part, nodes: int, speeds: Speeds) -> float:
        if not part.weights and not part.experts:
            return 0.0
        active, pace = self.experts[1] / self.experts[0] if self.experts else 1.0, speeds.pace
        read = part.size + pace.bytes_more(nodes) * part.weights + self.used(nodes) * part.experts_size / pace.experts
        computing = 2 * nodes * (part.weights + active * part.experts) / speeds.operations
        decoding = sum(
            nodes * (weights + active * experts / pace.experts) / pace.decoded[name]
            for name, (weights, experts) in part.types.items()
            if name in pace.decoded
        )
        longest = max(read / speeds.memory, computing, decoding / speeds.cores)
        return longest + part.layers * pace.layer + part.mixtures * pace.mixture


def of_processor(speed: float, operations: float, cores: float, without: str = "") -> Speeds:
    """
    Args:
        speed: bytes per second that a pass of a dense model reads.
        operations: per second.
        cores: that compute.
        without: as for `pace`.
    """
    return Speeds(PROCESSOR, speed, operations, pace(PROCESSOR, "llamacpp", without), cores)


def _processor(machine: Machine) -> Speeds:
    return of_processor(machine.memory_speed, machine.operations, machine.cores)


def of_gpu(gpu: Gpu, engine: str, without: str = "") -> Speeds:
    """
    Args:
        gpu: with its published bandwidth.
        engine: its name.
        without: as for `pace`.
    """
    known = pace(gpu.name, engine, without)
    return Speeds(gpu.name, gpu.memory_speed * known.share, gpu.operations, known)


@dataclass(frozen=True, slots=True)
class Asked:
    """A model with its draft, if any, on a machine."""

    model: Weights
    small: Sequence[Weights]
    options: LoadOptions
    machine: Machine

    @property
    def cards(self) -> list[Gpu]:
        return [gpu for gpu in self.machine.gpus if not gpu.shared]

    @property
    def cells(self) -> int:
        return sum(one.cells(self.options.context_length) for one in (self.model, *self.small))


def _outlook(asked: Asked, engine: str) -> Prediction:
    why, compute = ENGINES[engine]
    try:
        return compute(asked, Prediction(engine=engine, why=why))
    except NoRoom as error:
        return Prediction(engine=engine, why=why, cannot_run=str(error))


def _timed(
    made: Prediction,
    asked: Asked,
    parts: Sequence[tuple[Part, Speeds]],
    reads: Sequence[tuple[str, float, float]],
    drafting: Speeds,
    bytes_each: float | None = None,
    missing: float = 0.0,
) -> Prediction:
    """Add passes.

    Args:
        made: without them.
        asked: the model, and what else is known.
        parts: of the model, with the device that reads each.
        reads: (name of the speed, bytes of each pass, bytes per second), while the devices compute.
        drafting: of the device that computes the draft.
        bytes_each: bytes of a weight of the draft; None: as in the file.
        missing: bytes of all experts that are not in memory; the last of `reads` reads those used.
    """
    model = asked.model
    needed = {
        f"{one.name}: memory_speed and operations": one.memory * one.operations for part, one in parts if part.weights
    }
    needed |= {name: speed for name, size, speed in reads if size or missing}
    made.chosen = model.used(1) * missing
    made.rough = any(part.experts and speeds.name == PROCESSOR for part, speeds in parts)
    made.unknown = [name for name, speed in needed.items() if not speed]
    if made.unknown:
        return made

    def timed(nodes: int) -> Pass:
        computing = sum(model.seconds(part, nodes, speeds) for part, speeds in parts)
        used = model.used(nodes) * missing
        read = [size for _, size, _ in reads]
        read[-1] += used
        reading = max(size / speed if size else 0.0 for size, (_, _, speed) in zip(read, reads, strict=True))
        return Pass(nodes, max(computing, reading), max(0.0, reading - computing), read=int(used))

    single, *trees = map(timed, sizes(asked.options.budget + 1, mixture=bool(model.experts)))
    rows_known = all(one.pace.rows for part, one in parts if part.weights)

    def hidden(tree: Pass) -> bool:
        """Reading takes longer, whatever rows cost; where that is not known, at most as much as a pass over one."""
        computing = tree.seconds - tree.waited if rows_known else tree.nodes * (single.seconds - single.waited)
        return (OFF if rows_known else 1) * computing <= tree.seconds

    made.passes = [single, *filter(hidden, trees)]
    of_draft = sum(one.seconds(one.part(one.tensors, bytes_each), BEAM, drafting) for one in asked.small)
    made.draft_seconds = of_draft * draft_passes(made.passes[-1].nodes)
    made.by_head = any(is_head(one.path) for one in asked.small)
    return made


def _llamacpp(asked: Asked, made: Prediction) -> Prediction:
    model, machine = asked.model, asked.machine
    plan: Any = find_engine("llamacpp").plan(model.path, asked.options, machine)
    weights: Plan | None = plan.weights
    shares, kept_off = layers_of_gpus(machine.gpus, plan.gpu_layers, model.layers), plan.ways[-1].get("kept_off", "")
    here, there = divide(model.tensors, plan.gpu_layers, str(kept_off).encode().split())
    pools = weights.on_devices if weights else ()
    pooled = [tensor for tensor in here if EXPERTS.search(tensor.name) and layer_of(tensor) in model.layers_of(pools)]
    here, there = [tensor for tensor in here if tensor not in pooled], [*there, *pooled]
    placed = Placed.on(shares, model.layers, len(weights.streamed) if weights else 0)
    has_states = any(name.startswith(OF_STATES) for name in model.values)
    made.where = Where(engine=made.engine, placed=placed, exact=not placed.device and not has_states)
    made.streamed = weights.streamed_bytes if weights else 0
    if not (can_stream(machine) or weights):  # the system's pages decide
        made.streamed = max(0, sum(tensor.size for tensor in here) - int(machine.free * (1 - SAFETY)))
    missing = 0.0
    if weights and weights.cached:
        left = weights.memory - weights.needed - weights.pinned_bytes - weights.slots * weights.slot_bytes
        kept = weights.share_of_experts if weights.pools else left / weights.cached_bytes  # by the page cache
        missing = weights.cached_bytes * (1 - min(1.0, max(0.0, kept)))
    made.stays = model.size - made.streamed - missing - (weights.looked_up_bytes if weights else 0)
    on_gpus = {tensor.name for tensor in there}  # also of embeddings that are the output
    part = model.part([tensor for tensor in here if tensor.name not in on_gpus])
    parts = [(part, _processor(machine)), *_by_gpu(model, there, shares, machine, "llamacpp")]
    parts += [_uploads(model, pooled, gpu, pools) for gpu in machine.gpus if gpu.link_speed]
    with_gpu = [one for one in machine.gpus[:1] if placed.device or not one.shared or not made.streamed]
    reads = [("disk: speed", made.streamed, machine.disk.speed)]
    drafting = of_gpu(with_gpu[0], "llamacpp") if with_gpu else _processor(machine)
    return _timed(made, asked, parts, reads, drafting, missing=missing)


def _uploads(model: Weights, pooled: Sequence[Tensor], gpu: Gpu, pools: Sequence[Pool]) -> tuple[Part, Speeds]:
    """Experts that a GPU's pools lack: those used come over its link."""
    lacking = 0.0
    for pool in pools:
        if pool.device == gpu.name and model.experts:
            layers = model.layers_of([pool])
            size = sum(tensor.size for tensor in pooled if layer_of(tensor) in layers)
            lacking += size * max(0.0, 1 - pool.slots / (len(layers) * model.experts[0]))
    return Part(experts_size=lacking, experts=1.0), Speeds(gpu.name, gpu.link_speed, math.inf)


def _by_gpu(
    model: Weights,
    tensors: Sequence[Tensor],
    shares: Sequence[tuple[int, str]],
    machine: Machine,
    engine: str,
    bytes_each: float | None = None,
) -> list[tuple[Part, Speeds]]:
    """Parts of GPUs with consecutive layers up to the last one, which has what is in no layer, too."""
    speeds, found, stop = {gpu.name: of_gpu(gpu, engine) for gpu in machine.gpus}, [], model.layers
    last = [tensor for tensor in tensors if layer_of(tensor) < 0]
    for count, name in reversed(shares):
        numbers, stop = range(stop - count, stop), stop - count
        some = [tensor for tensor in tensors if layer_of(tensor) in numbers]
        found.append((model.part([*some, *last], bytes_each), speeds[name]))
        last = []
    return found


def _mlx(asked: Asked, made: Prediction) -> Prediction:
    """A folder with the same weights in 4 bits: all layers are computed by the GPU, streamed or not."""
    model, machine = asked.model, asked.machine
    gpu = machine.gpus[0]
    tensors = [replace(tensor, size=int(model.numbers(tensor) * BYTES_OF_FOUR_BITS)) for tensor in model.tensors]
    drafts = sum(sum(map(one.numbers, one.tensors)) * BYTES_OF_FOUR_BITS for one in asked.small)
    needed = int(MARGIN + drafts + asked.cells + gpu_limit(machine.gpus) // CACHE_SHARE)
    plan = make_plan(tensors, int(free_memory(machine) * (1 - SAFETY)), needed, page=1, whole=True)
    made.streamed = plan.streamed_bytes if plan else 0
    placed = Placed(model.layers, gpu.name, model.layers, len(plan.streamed) if plan else 0)
    made.where = Where(engine=made.engine, placed=placed)
    made.stays = sum(tensor.size for tensor in tensors) - made.streamed
    speeds = of_gpu(gpu, "mlx")
    parts = [(model.part(model.tensors, BYTES_OF_FOUR_BITS), speeds)]
    reads = [("disk: speed", made.streamed, machine.disk.speed)]
    return _timed(made, asked, parts, reads, speeds, BYTES_OF_FOUR_BITS)


def _torch(asked: Asked, made: Prediction) -> Prediction:
    """A folder whose layers are brought to 4 bits (nf4): cards compute all, and stream what they cannot hold."""
    model, machine, (gpu, *more) = asked.model, asked.machine, asked.cards
    inside = [tensor for tensor in model.tensors if layer_of(tensor) >= 0]
    others = [tensor for tensor in model.tensors if layer_of(tensor) < 0]
    outside = sum(2 * model.numbers(tensor) for tensor in others)
    drafts = sum(2 * sum(map(one.numbers, one.tensors)) for one in asked.small)
    layers = model.part(inside, BYTES_OF_FOUR_BITS).size
    layer = layers / model.layers
    memory, fixed = usable(gpu), int(WORKSPACE + outside + drafts + asked.cells)
    rooms = [usable(one) - WORKSPACE for one in more]
    caches = [model.cells(asked.options.context_length) // model.layers] * model.layers
    counts = layers_by_device([int(layer)] * model.layers, memory, fixed, rooms, caches)
    first = counts[0]
    room = memory - fixed + sum(caches[first:])
    if room < 2 * layer:
        raise NoRoom(f"{gpu.name} has no room for two layers besides embeddings and draft")
    kept = min(first, int(room // layer))
    names, sent = {one.name for one in others}, 0.0
    if kept < first:
        if "output.weight" in names:  # the input embeddings stay in this machine's memory
            sent = sum(2 * model.numbers(one) for one in others if one.name == "token_embd.weight")
        kept = max(0, min(first, int((room + sent) // layer)) - BUFFERS)
    streamed = [first - kept, *[0] * len(more)]
    links = [one.link_speed for one in asked.cards]
    here = machine.free * (1 - SAFETY) - MARGIN - sent
    if more and kept < first and all(links):
        rooms = [memory - fixed + sum(caches) + int(sent), *rooms]
        shares = streams_by_device(model.layers, int(layer), caches[0], rooms, links)
        if shares and sum(some for _, some in shares) * layer <= here:
            counts, streamed = [list(numbers) for numbers in zip(*shares, strict=True)]
    placed = [(count, one.name) for count, one in zip(counts, asked.cards, strict=True)]
    made.where = Where(engine=made.engine, placed=Placed.on(placed, model.layers, sum(streamed)))
    made.copied = sum(streamed) * layer
    made.streamed = max(0.0, made.copied - here)
    made.stays = layers - made.streamed + outside
    speeds = of_gpu(gpu, "torch")
    parts = [
        (model.part(others, 2.0), speeds),
        *_by_gpu(model, inside, placed, machine, "torch", BYTES_OF_FOUR_BITS),
    ]
    reads = [
        *(
            (f"{one.name}: link_speed", some * layer, one.link_speed)
            for one, some in zip(asked.cards, streamed, strict=True)
        ),
        ("disk: speed", made.streamed, machine.disk.speed),
    ]
    return _timed(made, asked, parts, reads, speeds, 2.0)


ENGINES: dict[str, tuple[str, Callable[[Asked, Prediction], Prediction]]] = {  # why it is looked at, and its pass
    "llamacpp": ("the model is a GGUF file", _llamacpp),
    "mlx": ("a folder in 4 bits, all of whose layers the GPU computes", _mlx),
    "torch": ("a folder with --dtype nf4, whose layers cards compute wherever they lie", _torch),
}


def compared(first: Prediction, other: Prediction) -> list[float]:
    """Best tokens per second of two engines, by planners for which both are known; 0: it cannot run."""
    ones = [one.tokens_per_second for one in (first, other)]
    both = ones[0].keys() & ones[1].keys()
    return [max((speed for name, speed in one.items() if name in (both or one)), default=0.0) for one in ones]


def faster(found: Sequence[Prediction]) -> str:
    """A line that offers another engine, if it is faster than the one that would run; ""."""
    first, *others = found
    best = max(others, key=lambda one: one.best, default=first)
    slow, fast = compared(first, best)
    if first.unknown or fast <= FASTER * slow:
        return ""
    return f"{best.engine}, {best.why}: about {two_digits(fast)} tokens/s, {first.told(slow)} ({COMPUTED})"


@dataclass(frozen=True, slots=True)
class Offer:
    """MLX instead of llama.cpp, for a dense model on this Mac.

    Attributes:
        lines: for the user.
        folder: of the model for MLX, if it is here and was measured to be faster; else "".
    """

    lines: Sequence[str] = ()
    folder: str = ""


def machine_here(path: str) -> Machine:
    return with_speeds(this_machine(path, find_engine("llamacpp").gpus(None)), chip())


def offer(
    target: str, *, draft: str | None = None, models_file: str | None = None, fits: bool = False, **options: Any
) -> Offer:
    """Compare both engines where this machine is a Mac; other arguments as for `predict`.

    Args:
        fits: also for a model that fits into memory, for which nothing is offered.
    """
    entry = find_model(target, models_file)
    if this_machine().platform != "darwin" or is_folder(entry.target):
        return Offer()
    path = local_or_none(entry)
    if path is None:
        return Offer()
    machine = machine_here(path)
    try:
        predicted = predict(target, machine, "", draft=draft, models_file=models_file, **options)
    except EdgespecError:  # such as a draft in a folder, or the target's own head; loading says what is wrong
        return Offer()
    first, *others = predicted.found
    larger = bool(first.streamed or first.cannot_run)
    if not others or not others[0].best or not (larger or fits):
        return Offer()
    seconds = recall(about_engines(), dict[str, Amount]) or {}
    measured = seconds.get("llamacpp", 0.0) / seconds["mlx"] if seconds.get("mlx") else 0.0
    speeds = [one.told(speed) for one, speed in zip((first, others[0]), compared(first, others[0]), strict=True)]
    placed = first.where and first.where.placed
    on_gpu = placed and placed.on_device == placed.layers
    where = "on the GPU" if on_gpu else f"with {'streamed ' if larger else ''}layers on the processor"
    lines = [f"{'larger than memory: ' if larger else ''}{speeds[0]}, {where}; {speeds[1]}, on the GPU ({COMPUTED})"]
    if not larger:
        return Offer(lines)
    if measured > FASTER:
        lines.append(f"scripts/check-mac measured that streamed passes on mlx are {measured:.1f} times as fast here")
    elif measured or not faster([first, others[0]]):
        return Offer(lines)
    written, folder = path.removesuffix(".gguf") + "-mlx", folder_for_mlx(entry, path)
    if measured > FASTER and folder:
        return Offer(lines, folder)
    if ready := folder or entry.mlx:
        way = f"edgespec run {ready}"
    elif predicted.bits < QUANTISED:
        way = "edgespec run hf:mlx-community/NAME-4bit, where this model has one; "
        way += f"converting {path} would quantise it a second time"
    else:
        again = " --requantise" if predicted.bits < FLOAT else ""
        way = f"edgespec convert {path} {written} --to mlx --bits 4{again}, then edgespec run {written}"
    return Offer([*lines, f"for mlx: {way}"])


def folder_for_mlx(entry: Entry, path: str) -> str:
    """The folder that a GGUF was converted to, or the ready one from the hub; "": neither is here."""
    written = path.removesuffix(".gguf") + "-mlx"
    if Path(written, "config.json").is_file():
        return written
    return (local_or_none(entry.model_copy(update={"target": entry.mlx})) if entry.mlx else None) or ""


def about_engines() -> dict[str, str]:
    """Key of the measurement of `scripts/check-mac`: seconds of the same streamed pass, by engine."""
    return {"kind": "engines on a Mac", "machine": processor_name()}


def measured_operations(path: str) -> float:
    """Floating-point operations per second of this machine's processors, in a pass of a GGUF."""
    engine, model = find_engine("llamacpp"), Weights(path)
    with closing(load_at_once(engine, path, this_machine(path), gpu_layers=0)) as backend:
        made = time_pass(backend, ROWS_TIMED)
    part = model.part(model.tensors)
    active = model.experts[1] / model.experts[0] if model.experts else 1.0
    return 2 * ROWS_TIMED * (part.weights + active * part.experts) / made.seconds


def as_dict(one: Elsewhere) -> dict[str, Any]:
    def about(made: Prediction) -> dict[str, Any]:
        passes = [asdict(each) | {"limit": each.limit} for each in made.passes]
        return asdict(made) | {"computed": True, "passes": passes, "tokens_per_second": made.tokens_per_second}

    return asdict(one) | {"found": list(map(about, one.found))}
