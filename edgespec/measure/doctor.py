"""A model on this machine: memory, disk, seconds per pass, and what limits them.

The disk is measured with direct reads of the model's file, and passes with the model as `edgespec run` loads it. Only
the tokens per pass are not measured, but estimated (`EXPECTED_TOKENS`).
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from edgespec.errors import EdgespecError, ModelError, NoRoom, UsageError
from edgespec.loading.asked import asked_for
from edgespec.loading.draft_or_memory import Speeds, no_room, ways_of
from edgespec.loading.exact import exactness_line, find_classes
from edgespec.loading.pair import PairPlan, close_all, load_pair, plan_pair, remembered_paces
from edgespec.loading.timed_pass import Pass, time_pass
from edgespec.loading.where import where
from edgespec.loop.engines import TellsPlan, installed_backends
from edgespec.loop.passes import most_nodes
from edgespec.machine.disk import (
    Reading,
    disk_bandwidth,
    file_system,
    find_reading,
    recall_reading,
    remember_reading,
)
from edgespec.machine.measurements import can_remember
from edgespec.machine.memory import format_size, in_bytes
from edgespec.machine.this_machine import this_machine
from edgespec.measure.outlook import BEAM, Outlook, draft_passes, sizes
from edgespec.models.gguf_header import check_magic
from edgespec.models.heads import refuse_head_folder
from edgespec.models.registry import OWN_HEAD, OWN_LAYERS, find_model, is_folder
from edgespec.planners.cost import note
from edgespec.weights.plan import SAFETY, Plan
from edgespec.weights.ring import can_stream

OF_THE_FILES = ("target", "file_size", "file_system", "memory", "draft_size", "disk", "reading")


@dataclass(slots=True, kw_only=True)
class Diagnosis(Outlook):
    """Findings of `diagnose`; sizes in bytes.

    Attributes:
        disk: bytes per second; 0: not measured.
        head: the head in the file, or "".
        remembered: measurements of pass times by runs of this model on this machine.
        draft_or_memory: speeds with the draft and without it; None: it takes no memory that the target needs.
        plan: None: everything fits into memory.
        streams: True if every pass reads weights from a disk or over a bus.
        exact: the row classes that passes are kept to, in words.
        notes: messages for the user.
    """

    target: str
    file_size: int
    file_system: str
    memory: int
    draft_size: int
    disk: float
    reading: str = ""
    head: str = ""
    remembered: Sequence[dict[str, Any]] = ()
    draft_or_memory: Speeds | None = None
    plan: Plan | None = None
    streams: bool = False
    exact: str = ""
    notes: Sequence[str] = ()

    def predicted(self, made: Pass) -> float:
        """Seconds of a pass that reads while it computes."""
        return max(made.seconds - made.waited, self.reading_seconds(made))

    def reading_seconds(self, made: Pass) -> float:
        return (self.plan.streamed_bytes + made.read) / self.disk if self.plan else 0.0


def diagnose(target: str, *, say: Callable[[str], None] = lambda text: None, **options: Any) -> Diagnosis:
    """Measure the disk and passes of a model on this machine, which takes about as long as loading it.

    Args:
        target: as for `edgespec.load`.
        say: called with the phase.
        options: further arguments of `edgespec.load`.

    Raises:
        EdgespecError: a file is missing or damaged, or a value out of range.
    """
    asked = asked_for(target, planner="auto", say=say, **options)
    entry, draft, models_file, notes = asked.entry, asked.draft, asked.models_file, asked.notes
    pair = plan_pair(entry, draft, models_file, asked.options, now=False, say=say)
    engine, path = pair.names[0], pair.paths[0]
    if len(set(pair.names)) > 1 or len({Path(one).is_dir() for one in pair.paths}) > 1:
        raise UsageError("doctor looks at a pair on one engine: target and draft must both be GGUF files, or folders")
    card = _head(path)
    head = card.size if card else _head_in_folder(path, engine) if draft == OWN_HEAD else 0
    room = in_bytes("memory", asked.options.memory)
    files, *others = map(_file_sizes, pair.paths)
    say("disk")
    disk = _read_disk(max(files, key=files.__getitem__))
    found = Diagnosis(
        target=path,
        file_size=sum(files.values()),
        file_system=file_system(path),
        memory=room if room is not None else int(this_machine().free * (1 - SAFETY)),
        draft_size={OWN_LAYERS: 0, OWN_HEAD: head}.get(draft or "", sum(sum(each.values()) for each in others)),
        disk=disk.speed,
        reading=f"{disk.threads} x {format_size(disk.size)} at once" if disk.speed else "",
        head=card.line if card else "",
        notes=notes,
        engine=engine,
        by_head=pair.head and draft != OWN_LAYERS,
        remembered=remembered_paces(path),
    )
    target_alone = plan_pair(entry, None, models_file, asked.options, now=False, say=say)
    try:
        try:
            _try(found, pair, target_alone, say)
        except NoRoom as error:
            if not draft:
                raise
            found.by_head, found.draft_size, found.notes = False, 0, [*notes, no_room(error)]  # as `open_pair` does
            _try(found, target_alone, target_alone, say)
    except NoRoom as error:
        found.cannot_run = str(error)
    return found


def _read_disk(file: str) -> Reading:
    """Measure the disk, if anything can be streamed from it.

    Raises:
        ModelError: the file cannot be read.
    """
    if not can_stream(this_machine()):
        return Reading()
    known = recall_reading(file)
    if not known.speed and can_remember():
        found = find_reading(file)[0]
        remember_reading(file, found)
        return found
    found = replace(known, speed=disk_bandwidth(file, threads=known.threads, size=known.size))
    if known.speed:
        remember_reading(file, found)
    return found


def _file_sizes(path: str) -> dict[str, int]:
    """
    Returns:
        Bytes of each file of a model's weights.

    Raises:
        ModelError: a file is missing, or is not a GGUF.
    """
    if Path(path).is_dir():
        files = sorted(map(str, Path(path).glob("model*.safetensors")))
    else:
        files = import_module("edgespec.backends.llamacpp.ggml.files").parts(path)
        for file in files:
            check_magic(file)
    if not files:
        raise ModelError(f"{path}: has no weights: there is no file model*.safetensors")
    try:
        return {file: Path(file).stat().st_size for file in files}
    except OSError as error:
        raise ModelError(f"{error.filename}: cannot be read: {error.strerror}") from error


def _head(path: str) -> Any:
    """The head in a GGUF, as `backends/llamacpp/head_files.py` says; None: it has none.

    Raises:
        ModelError: the file or folder is a head, or damaged.
    """
    if Path(path).is_dir():
        refuse_head_folder(path)
        return None
    return import_module("edgespec.backends.llamacpp.head_files").check_target(path)


def _head_in_folder(path: str, engine: str) -> int:
    """Bytes of the head in a model's own folder; 0: it has none that this engine can use."""
    if engine != "torch" or not Path(path).is_dir():
        return 0
    head = import_module("edgespec.backends.torch.mtp_files").head_tensors(path)
    return sum(tensor.size for _, tensor in head.values())


def _try(found: Diagnosis, pair: PairPlan, target: PairPlan, say: Callable[[str], None]) -> None:
    """Load a pair as it is run, time passes, and put the results into `found`; `target` is the pair without its draft.

    Raises:
        NoRoom: the model does not fit.
    """
    say("memory")
    pair = pair.planned()
    if ways := ways_of(pair, target.planned):
        found.draft_or_memory = ways.speeds(remember=True, say=say, disk=found.disk)
    say("passes")
    backends = load_pair(pair, progress=_reading(say), say=say)
    try:
        backend, options = backends[0], pair.options
        limits = backend.capabilities
        tried = find_classes(backend, found.target, say=say) if options.exact != "off" else ()
        found.exact = "off" if options.exact == "off" else exactness_line(tried, limits.exact, limits.paths)
        if kept := backend.computing.get("kv_type"):
            found.exact += f"; keys and values: {kept}"
        found.where = where(backend)
        found.plan = backend.plan if isinstance(backend, TellsPlan) else None
        # Only a loaded model knows if experts are left to the page cache.
        planned = pair.plan.notes if pair.plan else None
        later = [one for one in backend.notes if planned is None or one.startswith("experts are left")]
        found.notes = [*found.notes, *(planned or ()), *later, *([note(limits.max_leaves)] if limits.paths else ())]
        found.streams = limits.streams
        nodes = min(options.budget + 1, most_nodes(limits, 0), limits.context_length)
        passes = [time_pass(backend, n) for n in sizes(nodes, mixture=bool(limits.experts))]
        for draft in backends[1:]:
            found.draft_seconds = time_pass(draft, BEAM).seconds * draft_passes(nodes)
        found.passes = passes
    finally:
        close_all(backends)


def compare(target: str, **options: Any) -> list[Diagnosis]:
    """`diagnose` with every installed engine, the fastest first; if all refuse, the error of the preferred one."""
    folder = is_folder(find_model(target, options.get("models_file")).target)
    found, failed = list[Diagnosis](), dict[str, EdgespecError]()
    for name in installed_backends(folder, this_machine()):
        try:
            found.append(diagnose(target, backend=name, **options))
        except EdgespecError as error:
            failed[name] = error
    if not found:
        raise next(iter(failed.values()))
    about = {name: getattr(found[0], name) for name in OF_THE_FILES}
    found += [Diagnosis(**about, engine=name, cannot_run=str(error)) for name, error in failed.items()]
    return sorted(found, key=lambda one: -one.best)


def _reading(say: Callable[[str], None]) -> Callable[[int, int], None]:
    return lambda done, total: say(f"passes; {format_size(done)} of {format_size(total)} are read")


def as_dict(diagnosis: Diagnosis) -> dict[str, Any]:
    plan = diagnosis.plan
    return asdict(diagnosis) | {
        "plan": plan
        and {
            "pinned_bytes": plan.pinned_bytes,
            "streamed_bytes": plan.streamed_bytes,
            "streamed_layers": [layer.index for layer in plan.streamed],
            "cached_bytes": plan.cached_bytes,
            "window_bytes": plan.slots * plan.slot_bytes,
            "needed_bytes": plan.needed,
        },
        "passes": [
            asdict(one) | {"limit": one.limit, "predicted": diagnosis.predicted(one)} for one in diagnosis.passes
        ],
        "tokens_per_second": diagnosis.tokens_per_second,
        "where": diagnosis.where and diagnosis.where.as_dict(),
    }
