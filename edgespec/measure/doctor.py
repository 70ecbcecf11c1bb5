"""A model on this machine: memory, disk, seconds per pass, and what limits them.

The disk is measured with direct reads of the model's file, and passes with the model as `edgespec run` loads it. Only
the tokens per pass are not measured, but estimated (`EXPECTED_TOKENS`).
"""

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from math import log2
from pathlib import Path
from typing import Any

import numpy as np

from edgespec.errors import EdgespecError, ModelError, NoRoom, UsageError
from edgespec.loading.draft_or_memory import Speeds, no_room, ways_of
from edgespec.loading.exact import apply_row_class, check_choice, choose_way, exactness_line
from edgespec.loading.pair import (
    PairPlan,
    choose_budget,
    choose_context,
    choose_draft,
    choose_widest,
    load_draft,
    remembered_paces,
    with_head,
)
from edgespec.loading.timed_pass import Pass, time_pass
from edgespec.loading.where import Where, where
from edgespec.loop.engines import (
    LoadOptions,
    LoadsHeads,
    TellsPlan,
    check_supported,
    choose_backend,
    find_engine,
    installed_backends,
)
from edgespec.loop.passes import most_nodes
from edgespec.machine.disk import (
    Reading,
    disk_bandwidth,
    file_system,
    find_reading,
    recall_reading,
    remember_reading,
)
from edgespec.machine.measurements import age, can_remember
from edgespec.machine.memory import format_size, in_bytes
from edgespec.machine.this_machine import this_machine
from edgespec.models.gguf_header import check_magic
from edgespec.models.heads import is_head, refuse_head_folder
from edgespec.models.registry import OWN, OWN_HEAD, OWN_LAYERS, find_draft, find_model, is_folder, local_path
from edgespec.planners.path_cost import note
from edgespec.weights.plan import REMEDY, SAFETY, SLOW, Plan, two_digits
from edgespec.weights.ring import CANNOT_STREAM, can_stream

# Tokens per pass in a chat, with trees of 8 and of 64 nodes, as in docs/measured.md.
EXPECTED_TOKENS = {"specexec": (4.0, 7.0), "sssd": (1.6, 2.0), "head": (1.8, 2.25)}
OF_A_HEAD = " (computed, with the tokens per pass of another model's head)"
SIZES, SIZES_OF_MIXTURES = (8,), (2, 4, 8, 16)  # nodes of passes, besides one and a full tree
BEAM = 16  # nodes of a draft pass; a tree takes about twice its nodes


@dataclass(slots=True)
class Diagnosis:
    """Findings of `diagnose`; sizes in bytes.

    Attributes:
        disk: bytes per second; 0: not measured.
        head: the head in the file, or "".
        remembered: measurements of pass times by runs of this model on this machine.
        draft_or_memory: speeds with the draft and without it; None: it takes no memory that the target needs.
        cannot_run: the reason, or "".
        plan: None: everything fits into memory.
        streams: True if every pass reads weights from a disk or over a bus.
        exact: the row classes that passes are kept to, in words.
        where: what computes which layers; None if the model cannot run.
        passes: over one node up to a full tree; empty if the model cannot run.
        draft_seconds: to draft one full tree.
        by_head: the draft is a head.
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
    engine: str = "llamacpp"
    remembered: Sequence[dict[str, Any]] = ()
    draft_or_memory: Speeds | None = None
    cannot_run: str = ""
    plan: Plan | None = None
    streams: bool = False
    exact: str = ""
    where: Where | None = None
    passes: Sequence[Pass] = ()
    draft_seconds: float = 0.0
    by_head: bool = False
    notes: Sequence[str] = ()

    @property
    def tokens_per_second(self) -> dict[str, float]:
        return tokens_per_second(self.passes, self.draft_seconds, by_head=self.by_head)


def predicted_seconds(diagnosis: Diagnosis, made: Pass) -> float:
    return max(made.seconds - made.waited, reading_seconds(diagnosis, made))


def reading_seconds(diagnosis: Diagnosis, made: Pass) -> float:
    return (diagnosis.plan.streamed_bytes + made.read) / diagnosis.disk if diagnosis.plan else 0.0


def tokens_per_second(passes: Sequence[Pass], draft_seconds: float, *, by_head: bool) -> dict[str, float]:
    """Estimated tokens per second of a chat, by planner that can be used, each with the best of the timed trees.

    Args:
        passes: as of `Diagnosis`.
        draft_seconds: to draft one full tree; 0: there is no draft.
        by_head: the draft is a head.
    """
    if not passes:
        return {}
    one, *trees = passes
    expected = {"none": 1 / one.seconds}
    for name in ("sssd", "specexec") if trees and draft_seconds else ("sssd",) if trees else ():
        speeds = []
        for tree in trees:
            usual = EXPECTED_TOKENS["head" if name == "specexec" and by_head else name]
            tokens = float(np.interp(log2(tree.nodes), (0, 3, 6), (1.0, *usual)))
            share = draft_passes(tree.nodes) / draft_passes(trees[-1].nodes) if name == "specexec" else 0
            speeds.append(tokens / (tree.seconds + share * draft_seconds))
        expected[name] = max(speeds)
    return expected | {"auto": max(expected.values())}


def draft_passes(nodes: int) -> int:
    return -(-2 * (nodes - 1) // BEAM)


def diagnose(
    target: str,
    *,
    draft: str | None = None,
    backend: str | None = None,
    memory: str | int | None = None,
    kv_type: str | None = None,
    exact: str | None = None,
    lenders: Sequence[str] | None = None,
    budget: int | None = None,
    context_length: int | None = None,
    models_file: str | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Diagnosis:
    """Measure the disk and passes of a model on this machine, which takes about as long as loading it.

    Args:
        target: as for `edgespec.load`.
        draft: as for `edgespec.load`.
        backend: as for `edgespec.load`.
        memory: as for `edgespec.load`.
        kv_type: as for `edgespec.load`.
        exact: as for `edgespec.load`.
        lenders: as for `edgespec.load`.
        budget: most draft tokens per pass.
        context_length: most tokens of text.
        models_file: a models.yaml besides the built-in one.
        say: called with the phase.

    Raises:
        EdgespecError: a file is missing or damaged, or a value out of range.
    """
    check_choice(exact)
    entry = find_model(target, models_file)
    notes = list[str]()
    draft = choose_draft(draft, entry, backend, models_file, say=say, notes=notes)
    sources = [entry.target, *([find_draft(draft, entry, models_file).target] if draft else [])]
    if len({is_folder(source) for source in sources}) > 1:
        raise UsageError("doctor looks at a pair on one engine: target and draft must both be GGUF files, or folders")
    engine = choose_backend(is_folder(sources[0]), this_machine(), backend)
    options = LoadOptions(
        context_length=choose_context(context_length, entry), budget=choose_budget(budget, entry),
        widest=choose_widest(budget, entry), memory=memory, kv_type=kv_type,
        exact=exact, lenders=tuple(lenders or ()),
    )  # fmt: skip
    check_supported([engine], options)
    paths = [local_path(source, models_file, say=say) for source in sources]
    card = _head(paths[0])
    head = card.size if card else _head_in_folder(paths[0], engine) if draft == OWN_HEAD else 0
    own = {OWN_LAYERS: 0, OWN_HEAD: head}
    by_head = bool(draft) and (draft in OWN or is_head(paths[1]))
    drafting = (
        with_head([engine] * len(paths), paths, draft or "", options)
        if by_head
        else replace(options, draft_files=tuple(paths[1:]))
    )
    room = in_bytes("memory", memory)
    sizes = [_file_sizes(path) for path in paths]
    say("disk")
    disk = _read_disk(max(sizes[0], key=lambda file: sizes[0][file]))
    found = Diagnosis(
        target=paths[0],
        file_size=sum(sizes[0].values()),
        file_system=file_system(paths[0]),
        memory=room if room is not None else int(this_machine().free * (1 - SAFETY)),
        draft_size=own[draft] if draft in own else sum(sum(files.values()) for files in sizes[1:]),
        disk=disk.speed,
        reading=f"{disk.threads} x {format_size(disk.size)} at once" if disk.speed else "",
        head=card.line if card else "",
        notes=notes,
        engine=engine,
        by_head=by_head and draft != OWN_LAYERS,
        remembered=remembered_paces(paths[0]),
    )
    try:
        _try(found, paths, options, drafting, disk, say)
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
    """The head in a GGUF, as `backends/llamacpp/head_card.py` says; None: it has none.

    Raises:
        ModelError: the file or folder is a head, or damaged.
    """
    if Path(path).is_dir():
        refuse_head_folder(path)
        return None
    heads = import_module("edgespec.backends.llamacpp.head_card")
    heads.check_target(path)
    return heads.head_card(path)


def _head_in_folder(path: str, engine: str) -> int:
    """Bytes of the head in a model's own folder; 0: it has none that this engine can use."""
    if engine != "torch" or not Path(path).is_dir():
        return 0
    head = import_module("edgespec.backends.torch.mtp_files").head_tensors(path)
    return sum(tensor.size for _, tensor in head.values())


def _try(
    found: Diagnosis,
    paths: Sequence[str],
    options: LoadOptions,
    drafting: LoadOptions,
    disk: Reading,
    say: Callable[[str], None],
) -> None:
    """Load the models, time passes, and put the results into `found`; `drafting` is `options` with the draft.

    Raises:
        NoRoom: the model does not fit.
    """
    path, *drafts = paths
    engine, exact = find_engine(found.engine), options.exact
    say("memory")
    machine = replace(this_machine(gpus=engine.gpus(options.device)), disk=disk)

    head = found.by_head or drafting.own_layers

    def planned(paths: Sequence[str], made: LoadOptions) -> PairPlan:
        return PairPlan([found.engine] * len(paths), paths, made, engine.plan(path, made, machine))

    try:
        pair = planned(paths, drafting)
    except NoRoom as error:
        if not drafts:
            raise
        pair, head, found.by_head, found.draft_size = planned([path], options), False, False, 0  # as `open_pair` does
        drafts.clear()
        found.notes = [*found.notes, no_room(error)]
    if ways := ways_of(pair, lambda: planned([path], options)):
        found.draft_or_memory = ways.speeds(remember=True, say=say, disk=disk.speed)
    plan = pair.plan
    assert plan
    say("passes")
    way = choose_way(found.engine, plan, say=say)
    with closing(engine.load(plan, way, _reading(say))) as backend:
        classes, limits = apply_row_class(backend, path, exact, say=say), backend.capabilities
        found.exact = "off" if exact == "off" else exactness_line(classes, limits.exact, limits.paths)
        if kept := backend.computing.get("kv_type"):
            found.exact += f"; keys and values: {kept}"
        found.where = where(backend)
        found.plan = backend.plan if isinstance(backend, TellsPlan) else None
        # Only a loaded model knows if experts are left to the page cache.
        later = [one for one in backend.notes if plan.notes is None or one.startswith("experts are left")]
        found.notes = [*found.notes, *(plan.notes or ()), *later, *([note(limits.max_leaves)] if limits.paths else ())]
        found.streams = limits.streams
        nodes = min(options.budget + 1, most_nodes(limits, 0), limits.context_length)
        between = [n for n in (SIZES_OF_MIXTURES if limits.experts else SIZES) if n < nodes]
        passes = [time_pass(backend, n) for n in sorted({1, *between, nodes})]
        if head and isinstance(engine, LoadsHeads):
            with closing(engine.load_head(backend, drafts.pop(), pair.options.for_draft())) as small:
                found.draft_seconds = time_pass(small, BEAM).seconds * draft_passes(nodes)
    for small_path in drafts:
        with closing(load_draft(engine, small_path, options.for_draft())) as backend:
            found.draft_seconds = time_pass(backend, BEAM).seconds * draft_passes(nodes)
    found.passes = passes


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
    one = found[0]
    about = (one.target, one.file_size, one.file_system, one.memory, one.draft_size, one.disk, one.reading)
    found += [Diagnosis(*about, engine=name, cannot_run=str(error)) for name, error in failed.items()]
    return sorted(found, key=lambda one: -max(one.tokens_per_second.values(), default=0.0))


def recommendation(found: Sequence[Diagnosis]) -> str:
    speeds = [max(one.tokens_per_second.values(), default=0.0) for one in found]
    if len(found) < 2 or not speeds[0]:
        return ""
    others = ", ".join(
        f"{one.engine} {f'about {two_digits(speed)}' if speed else 'cannot run it'}"
        for one, speed in zip(found[1:], speeds[1:], strict=True)
    )
    best = found[0].engine
    return f"use --backend {best}: about {two_digits(speeds[0])} tokens/s ({others})"


def _reading(say: Callable[[str], None]) -> Callable[[int, int], None]:
    return lambda done, total: say(f"passes; {format_size(done)} of {format_size(total)} are read")


def report(diagnosis: Diagnosis) -> str:
    speed = f"{diagnosis.disk / 1e9:.2f} GB/s" if diagnosis.disk else "not measured"
    lines = [
        ("model", f"{diagnosis.target}, {format_size(diagnosis.file_size)}"),
        ("engine", diagnosis.engine),
        ("memory to use", format_size(diagnosis.memory)),
        ("disk", ", ".join(filter(None, [speed, diagnosis.file_system, diagnosis.reading]))),
    ]
    if diagnosis.head:
        lines.insert(1, ("head", diagnosis.head))
    if diagnosis.draft_size:
        lines.insert(2, ("draft", f"{format_size(diagnosis.draft_size)}, stays in memory"))
    if diagnosis.cannot_run:
        lines.append(("result", f"this cannot run, because {diagnosis.cannot_run}"))
        return aligned(lines)
    if diagnosis.where:
        lines.append(("computes", diagnosis.where.line))
    plan = diagnosis.plan
    if plan is None:
        fits = "everything fits into memory; nothing is streamed"
        noted = "layers are" if diagnosis.streams else "nothing is" if CANNOT_STREAM in diagnosis.notes else ""
        lines.append(("plan", f"{noted} streamed: see the note" if noted else fits))
    else:
        lines += [
            ("stays", f"{format_size(plan.pinned_bytes)} of weights, {format_size(plan.needed)} for all else"),
            (
                "is streamed",
                f"{format_size(plan.streamed_bytes)} per pass, from {len(plan.streamed)} of {plan.layers} layers",
            ),
        ]
        if plan.cached and plan.slots_of_experts >= 0:
            stay = f"{plan.slots_of_experts} of {plan.experts} of each layer stay, in {format_size(plan.pool_bytes)}"
            lines.append(("experts", f"{format_size(plan.cached_bytes)}; {stay}; others are read as they are chosen"))
        elif plan.cached:
            lines.append(("page cache", f"{format_size(plan.cached_bytes)} of experts"))
    for made in diagnosis.passes:
        nodes = "1 token" if made.nodes == 1 else f"{made.nodes} nodes"
        lines.append((f"pass, {nodes}", f"{made.seconds:.2f} s; {made.limit} limits it"))
        if made.experts:
            times, share = made.experts / diagnosis.passes[0].experts, 100 * made.hits
            used = f"{made.experts:.1f} of a layer, {times:.1f} times those of one token"
            lines.append(("  experts", f"{used}; {share:.0f} % were in memory, {format_size(made.read)} read"))
        if plan and (plan.streamed or made.experts):
            computing, reading = made.seconds - made.waited, reading_seconds(diagnosis, made)
            predicted = predicted_seconds(diagnosis, made)
            lines.append(
                ("  predicted", f"{predicted:.2f} s: {computing:.2f} s of computing, {reading:.2f} s of reading")
            )
    lines.append(("exact", diagnosis.exact))
    expected = diagnosis.tokens_per_second
    computed = {"specexec": OF_A_HEAD} if diagnosis.by_head else {}
    speeds = (f"{name} about {two_digits(speed)}{computed.get(name, '')}" for name, speed in expected.items())
    lines.append(("tokens/s", ", ".join(speeds)))
    if max(expected.values()) < SLOW:
        lines.append(("warning", f"below {SLOW} tokens/s: {REMEDY}"))
    if both := diagnosis.draft_or_memory:
        lines.append(("draft or memory", ways_line(both)))
    mixed = len({one["about"].get("streams") for one in diagnosis.remembered}) > 1
    lines += [("remembered", learned_line(one, told=mixed)) for one in diagnosis.remembered]
    lines += [("note", note) for note in diagnosis.notes]
    return aligned(lines)


def ways_line(speeds: Speeds) -> str:
    """Speeds of a target whose draft takes memory that it needs, for a person."""
    if not speeds.are_known:
        return "the draft takes memory that the target needs; which way is faster is not known"
    better = "with it" if speeds.drafted > speeds.plain else "without it"
    with_it, without = map(two_digits, (speeds.drafted, speeds.plain))
    return f"with the draft about {with_it} tokens/s, without it about {without}; auto is {better}"


def learned_line(found: dict[str, Any], *, told: bool = False) -> str:
    """Measurements of runs, for a person.

    Args:
        found: one of `remembered_paces`.
        told: say if weights were streamed.
    """
    pace = found["value"]
    parts = [
        f"{name}'s passes " + ", ".join(f"{nodes:.0f}: {1000 * seconds:.0f} ms" for nodes, seconds in rows)
        for name in ("target", "draft")
        if (rows := sorted(row[1:] for row in pace[name] if row[0] == 0))
    ]
    came, hoped = pace["agreement"]
    if hoped:
        parts.append(f"draft right in {100 * came / hoped:.0f} %")
    begins = ("streamed: " if found["about"].get("streams") else "in memory: ") if told else ""
    return begins + "; ".join([*parts, ", ".join(filter(None, [age(found), f"{pace['passes']} passes"]))])


def aligned(lines: list[tuple[str, str]]) -> str:
    width = max(len(name) for name, _ in lines) + 2
    return "\n".join(f"{name:{width}}{text}" for name, text in lines)


def as_dict(diagnosis: Diagnosis) -> dict[str, Any]:
    found = asdict(diagnosis)
    plan = diagnosis.plan
    found["plan"] = plan and {
        "pinned_bytes": plan.pinned_bytes,
        "streamed_bytes": plan.streamed_bytes,
        "streamed_layers": [layer.index for layer in plan.streamed],
        "cached_bytes": plan.cached_bytes,
        "window_bytes": plan.slots * plan.slot_bytes,
        "needed_bytes": plan.needed,
    }
    found["passes"] = [
        asdict(one) | {"limit": one.limit, "predicted": predicted_seconds(diagnosis, one)} for one in diagnosis.passes
    ]
    found["tokens_per_second"] = diagnosis.tokens_per_second
    found["where"] = diagnosis.where and diagnosis.where.as_dict()
    return found
