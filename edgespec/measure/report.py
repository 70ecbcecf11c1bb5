"""What `edgespec doctor` prints, of this machine and of another; computed figures are marked as such."""

from collections.abc import Sequence
from typing import Any

from edgespec.loading.draft_or_memory import Speeds
from edgespec.machine.measurements import age
from edgespec.machine.memory import format_size
from edgespec.measure.doctor import Diagnosis
from edgespec.measure.outlook import COMPUTED, Outlook
from edgespec.measure.predictor import Elsewhere, Prediction, faster
from edgespec.weights.plan import REMEDY, SLOW, two_digits
from edgespec.weights.ring import CANNOT_STREAM

OF_A_HEAD = " (computed, with the tokens per pass of another model's head)"

Line = tuple[str, str]  # what it is about, and the text


def report(one: Diagnosis | Elsewhere) -> str:
    lines = _of_this(one) if isinstance(one, Diagnosis) else _of_another(one)
    width = max(len(name) for name, _ in lines) + 2
    return "\n".join(f"{name:{width}}{text}" for name, text in lines)


def _of_this(found: Diagnosis) -> list[Line]:
    speed = f"{found.disk / 1e9:.2f} GB/s" if found.disk else "not measured"
    lines = [
        ("model", f"{found.target}, {format_size(found.file_size)}"),
        *([("head", found.head)] if found.head else []),
        *_draft(found.draft_size),
        ("engine", found.engine),
        ("memory to use", format_size(found.memory)),
        ("disk", ", ".join(filter(None, [speed, found.file_system, found.reading]))),
    ]
    if found.cannot_run:
        return [*lines, _refusal(found)]
    plan = found.plan
    lines += [("computes", found.where.line)] if found.where else []
    if plan is None:
        fits = "everything fits into memory; nothing is streamed"
        noted = "layers are" if found.streams else "nothing is" if CANNOT_STREAM in found.notes else ""
        lines.append(("plan", f"{noted} streamed: see the note" if noted else fits))
    else:
        layers = f"{len(plan.streamed)} of {plan.layers} layers"
        lines += [
            ("stays", f"{format_size(plan.pinned_bytes)} of weights, {format_size(plan.needed)} for all else"),
            ("is streamed", f"{format_size(plan.streamed_bytes)} per pass, from {layers}"),
        ]
        if plan.cached and plan.slots_of_experts >= 0:
            stay = f"{format_size(plan.cached_bytes)}; {plan.experts_by_place}"
            lines.append(("experts", f"{stay}; others are read as they are chosen"))
        elif plan.cached:
            lines.append(("page cache", f"{format_size(plan.cached_bytes)} of experts"))
    for made in found.passes:
        lines.append((_pass(made.nodes), f"{made.seconds:.2f} s; {made.limit} limits it"))
        if made.experts:
            times, share = made.experts / found.passes[0].experts, 100 * made.hits
            used = f"{made.experts:.1f} of a layer, {times:.1f} times those of one token"
            lines.append(("  experts", f"{used}; {share:.0f} % were in memory, {format_size(made.read)} read"))
        if plan and (plan.streamed or made.experts):
            parts = f"{made.seconds - made.waited:.2f} s of computing, {found.reading_seconds(made):.2f} s of reading"
            lines.append(("  predicted", f"{found.predicted(made):.2f} s: {parts}"))
    lines += [("exact", found.exact), ("tokens/s", _speeds(found))]
    if found.best < SLOW:
        lines.append(("warning", f"below {SLOW} tokens/s: {REMEDY}"))
    if both := found.draft_or_memory:
        lines.append(("draft or memory", ways_line(both)))
    mixed = len({one["about"].get("streams") for one in found.remembered}) > 1
    lines += [("remembered", learned_line(one, told=mixed)) for one in found.remembered]
    return [*lines, *(("note", note) for note in found.notes)]


def _of_another(one: Elsewhere) -> list[Line]:
    machine, source = one.described, "" if one.here else ", not here"
    lines = [
        ("model", f"{one.target}, {format_size(one.size)}{source}"),
        *_draft(one.draft_size),
        ("machine", f"{one.machine}: {format_size(machine.free)} of {format_size(machine.memory)} are free"),
    ]
    for made in one.found:
        lines += [("engine", f"{made.engine}: {made.why}"), *((f"  {name}", text) for name, text in _of_engine(made))]
    advice = faster(one.found)
    return [*lines, *([("advice", advice)] if advice else [])]


def _of_engine(made: Prediction) -> list[Line]:
    if made.cannot_run:
        return [_refusal(made)]
    reads = [f"{format_size(made.copied)} over the bus"] if made.copied else []
    reads += [f"{format_size(made.streamed)} from disk"] if made.streamed else []
    read = f"; every pass reads {' and '.join(reads)}" if reads else ""
    lines = [
        ("computes", made.where.line if made.where else ""),
        ("memory", f"{format_size(made.stays)} of weights stay{read}"),
    ]
    if made.unknown:
        return [*lines, ("tokens/s", f"not known: {made.lacks}")]
    for one in made.passes:
        experts = f"; {format_size(one.read)} of experts from disk" if one.read else ""
        limit = "computing" if one.limit == "computing" else "reading"
        lines.append((_pass(one.nodes), f"{two_digits(one.seconds)} s; {limit} limits it{experts}"))
    rows = "" if made.passes[1:] else "; with draft tokens not known: what rows cost there was not measured"
    sure = f"{COMPUTED}; with experts on a processor only roughly" if made.rough else COMPUTED
    return [*lines, ("tokens/s", f"{_speeds(made)} ({sure}){rows}")]


def _draft(size: int) -> list[Line]:
    return [("draft", f"{format_size(size)}, stays in memory")] if size else []


def _refusal(one: Outlook) -> Line:
    return "result", f"this cannot run, because {one.cannot_run}"


def _pass(nodes: int) -> str:
    return f"pass, {'1 token' if nodes == 1 else f'{nodes} nodes'}"


def _speeds(one: Outlook) -> str:
    marks = {"specexec": OF_A_HEAD} if one.by_head else {}
    speeds = one.tokens_per_second.items()
    return ", ".join(f"{name} about {two_digits(speed)}{marks.get(name, '')}" for name, speed in speeds)


def recommendation(found: Sequence[Outlook]) -> str:
    """Of several engines, the fastest first."""
    if len(found) < 2 or not found[0].best:
        return ""
    best, others = found[0], ", ".join(one.told(one.best) for one in found[1:])
    return f"use --backend {best.engine}: about {two_digits(best.best)} tokens/s ({others})"


def ways_line(speeds: Speeds) -> str:
    """Speeds of a target whose draft takes memory that it needs."""
    if not speeds.are_known:
        return "the draft takes memory that the target needs; which way is faster is not known"
    better = "with it" if speeds.drafted > speeds.plain else "without it"
    with_it, without = map(two_digits, (speeds.drafted, speeds.plain))
    return f"with the draft {speeds.how} {with_it} tokens/s, without it {speeds.how} {without}; auto is {better}"


def learned_line(found: dict[str, Any], *, told: bool = False) -> str:
    """Measurements of runs.

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
