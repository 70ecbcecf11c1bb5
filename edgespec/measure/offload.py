"""Passes and texts of a model that does not fit into memory: plain memory mapping against streaming, side by side.

Every measurement is a process of its own inside a memory limit, started with the model's files out of the page cache.
Variants take turns, so that a busy machine or a disk with burst credits treats all of them alike.
"""

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module
from io import StringIO
from mmap import PAGESIZE, PROT_READ, mmap
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from edgespec.backend import Backend, Work, load_backend, prefill
from edgespec.errors import EdgespecError, MissingPackage
from edgespec.model import DEFAULT_BUDGET, Model, close_all, open_backends
from edgespec.models.registry import Defaults, Entry
from edgespec.planners.choice import USE_DRAFT, make_planner
from edgespec.planners.paced import new_pace
from edgespec.sampling import SamplingParams
from edgespec.text import user_messages
from edgespec.weights.machine import disk_bandwidth, format_size, private_memory

PLENTY = 1 << 42  # of memory, named so that weights are mapped as they are, not repacked
LIBRARIES = 32 << 20  # of the interpreter's and the engine's files, mapped pages
WARM_UP = "The first pass reads what loading has left out; its time is not counted. "
GROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class Task:
    """What one measuring process does. Sent as JSON."""

    target: str
    draft: str = ""
    stream: bool = True
    memory: int = 0  # bytes given to streaming; 0 = what is free
    budget: int = DEFAULT_BUDGET
    by_cost: bool = False  # no more guesses than pay
    context_length: int = 2048
    nodes: list[int] = field(default_factory=list)  # tree sizes to time
    repeats: int = 3
    evict: bool = False  # no limit could be set: drop the file from the page cache before each pass instead
    planner: str = "none"
    planner_options: dict[str, Any] = field(default_factory=dict)
    prompts: list[str] = field(default_factory=list)  # to write texts for
    max_tokens: int = 96
    sampling: dict[str, Any] = field(default_factory=dict)


# --- in the measuring process --------------------------------------------------------------------


def measure(task: Task) -> dict[str, Any]:
    """Do what a task says; the result as JSON takes it."""
    if task.nodes:
        return _measure_passes(task)
    return _measure_texts(task) if task.prompts else _measure_needs(task)


def _measure_needs(task: Task) -> dict[str, Any]:
    engine = import_module("edgespec.backends.llamacpp.memory")
    size = engine.ContextSize(task.context_length, task.budget, 1, engine.MIN_NODES)
    return {"needed": engine.memory_needs(task.target, size, [task.draft] if task.draft else [])}


def _measure_passes(task: Task) -> dict[str, Any]:
    target = load_backend(
        "llamacpp", task.target, context_length=task.context_length, budget=max(task.nodes), **_memory(task)
    )
    try:
        session = target.open()
        text = target.vocab.encode(WARM_UP * 4, add_bos=True, parse_special=True)
        prefill(target, session, text[:-1])
        passes: dict[str, dict[str, list[float]]] = {}
        total = 0
        for repeat in range(task.repeats + 1):
            for count in task.nodes:
                nodes = np.arange(count, dtype=np.int32)
                tokens = np.resize(np.array(text, np.int32), count)
                if task.evict:
                    evict(task.target)
                read, waited, started = bytes_read(), target.wait_seconds, perf_counter()
                target.forward([Work(session, tokens, nodes - 1, nodes)])
                figures = {"seconds": perf_counter() - started, "waited": target.wait_seconds - waited}
                session.rewind(len(text) - 1)
                total += bool(repeat)
                if repeat == 1 and count == task.nodes[0]:
                    read_before = read
                if repeat:
                    found = passes.setdefault(str(count), {})
                    for name, value in figures.items():
                        found.setdefault(name, []).append(value)
        per_pass = (bytes_read() - read_before) / total
        return {"passes": passes, "bytes_per_pass": per_pass, "private": private_memory(), **_plan_of(target)}
    finally:
        target.close()


def _measure_texts(task: Task) -> dict[str, Any]:
    backends = _open(task)
    try:
        pace = new_pace(backends[0].capabilities.streams) if task.by_cost else None
        planner = make_planner(task.planner, backends, pace=pace, **task.planner_options)
        with Model(backends[0], planner, budget=task.budget, sampling=SamplingParams(**task.sampling)) as model:
            read, runs = bytes_read(), []
            for prompt in task.prompts:
                result = model.generate(user_messages(prompt, None), max_tokens=task.max_tokens)
                runs.append({**result.stats.as_dict(), "token_ids": result.token_ids})
        return {"runs": runs, "bytes": bytes_read() - read, **_plan_of(backends[0])}
    finally:
        close_all(backends)


def _open(task: Task) -> list[Backend]:
    if not task.stream:  # open_backends would stream where the limit is tight
        options = {"context_length": task.context_length, "budget": task.budget, "resident": True}
        paths = [task.target, task.draft] if task.draft else [task.target]
        return [load_backend("llamacpp", path, in_order=not i, **options) for i, path in enumerate(paths)]
    entry = Entry(name="target", target=f"file:{task.target}", defaults=Defaults())
    return open_backends(
        entry, task.draft or None, None,
        context_length=task.context_length, budget=task.budget, memory=task.memory or None,
    )  # fmt: skip


def _memory(task: Task) -> dict[str, Any]:
    return {"memory": task.memory or None} if task.stream else {"resident": True}


def _plan_of(target: Any) -> dict[str, Any]:
    if target.streamer is None:
        return {}
    plan = target.streamer.plan
    return {
        "pinned": plan.pinned_bytes,
        "streamed": plan.streamed_bytes,
        "window": plan.slots * plan.slot_bytes,
        "needed": plan.needed,
        "notes": list(target.notes),
    }


def bytes_read() -> int:
    """Bytes this process has fetched from a disk (Linux)."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("read_bytes")).split()[1])


# --- around it -----------------------------------------------------------------------------------


def evict(path: str) -> float:
    """Drop a file from the page cache; the share of it that stayed (another process may have it mapped)."""
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        with mmap(file.fileno(), 0, prot=PROT_READ) as view:
            size = len(view)
            flags = np.zeros(-(-size // PAGESIZE), np.uint8)
            address = np.frombuffer(view, np.uint8).ctypes.data
            pointers = ctypes.c_void_p(address), ctypes.c_size_t(size), ctypes.c_void_p(flags.ctypes.data)
            ctypes.CDLL(None).mincore(*pointers)
            return float(np.mean(flags & 1))


class Group:
    """A control group with a memory limit, version 1 or 2."""

    def __init__(self, folder: Path, version: int) -> None:
        self.folder = folder
        self._version = version

    def limit(self, size: int) -> None:
        """Allow so many bytes, none of them swapped; forget the peak."""
        self._write("memory.limit_in_bytes" if self._version == 1 else "memory.max", size)
        if self._version == 1:
            self._write("memory.max_usage_in_bytes", 0)
        else:
            self._write("memory.swap.max", 0)

    def _write(self, name: str, value: int) -> None:
        (self.folder / name).write_text(str(value))

    def peak(self) -> int:
        """Most bytes in use at once."""
        name = "memory.max_usage_in_bytes" if self._version == 1 else "memory.peak"
        try:
            return int((self.folder / name).read_text())
        except OSError:  # memory.peak: since Linux 5.19
            return 0


@contextmanager
def memory_group() -> Iterator[Group | None]:
    """A new control group under this process's own; None where that is not allowed."""
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    paths = {controllers: path.strip("/") for _, controllers, path in (line.split(":", 2) for line in lines)}
    version = 1 if "memory" in paths else 2
    base = GROUPS / "memory" / paths["memory"] if version == 1 else GROUPS / paths.get("", "")
    folder = base / f"edgespec-{os.getpid()}"
    try:
        folder.mkdir()
        group = Group(folder, version)
        group.limit(1 << 40)
    except OSError:
        if folder.is_dir():
            folder.rmdir()
        yield None
        return
    try:
        yield group
    finally:
        folder.rmdir()


def run(task: Task, group: Group | None, limit: int, files: Sequence[str]) -> dict[str, Any]:
    """Run a task in a process of its own, inside a limit of bytes (0: none), its files not in the page cache."""
    left = max((evict(file) for file in files), default=0.0)
    if group:
        group.limit(limit or 1 << 40)

    def enter() -> None:
        if group:
            (group.folder / "cgroup.procs").write_text(str(os.getpid()))

    environment = os.environ | {"OMP_WAIT_POLICY": "passive"}
    done = subprocess.run(
        [sys.executable, "-m", "edgespec.measure.offload", json.dumps(asdict(task))],
        preexec_fn=enter, capture_output=True, text=True, env=environment, check=False,
    )  # fmt: skip
    if done.returncode:
        why = "it was killed: out of memory" if done.returncode == -9 else (done.stderr.strip() or "?").splitlines()[-1]
        return {"failed": why}
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    result["peak"] = group.peak() if group else 0
    result["stayed_in_cache"] = left
    return result


def pass_times(
    target: str, limits: Sequence[int], nodes: Sequence[int], *, rounds: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """Seconds and bytes of passes: in memory, then under each limit mapped and streamed, in turns.

    Args:
        target: a GGUF file.
        limits: bytes for the weights; what the process needs besides is added.
        nodes: sizes of the trees.
        rounds: how often everything is measured; medians are reported.
        say: told what is being done.
    """
    report: dict[str, Any] = {"target": target, "size": Path(target).stat().st_size, "limits": []}
    with memory_group() as group:
        report["how"] = "memory control group" if group else "page cache dropped before each pass: no limit is allowed"
        say("in memory")
        in_memory = [run(Task(target, memory=PLENTY, nodes=list(nodes), repeats=5), group, 0, [target])]
        # Memory for the weights is what is left when the rest has what it takes.
        needed = in_memory[0].get("private", 0) + LIBRARIES
        for room in limits:
            limit = room + needed
            found: dict[str, list[dict[str, Any]]] = {"mapped": [], "streamed": []}
            speeds = []
            for number in range(rounds):
                for name, results in found.items():
                    say(f"{format_size(room)} for weights, {name}, round {number + 1} of {rounds}")
                    speeds.append(disk_bandwidth(target, seconds=1.5))
                    few = [n for n in nodes if n in (1, 64)] or list(nodes[:1])
                    task = Task(
                        target, stream=name == "streamed", memory=limit, budget=max(nodes), evict=group is None,
                        nodes=list(nodes) if name == "streamed" else few, repeats=3 if name == "streamed" else 2,
                    )  # fmt: skip
                    results.append(run(task, group, limit, [target]))

            in_memory.append(run(Task(target, memory=PLENTY, nodes=list(nodes), repeats=5), group, 0, [target]))
            entry = {"room": room, "needed": needed, "limit": limit, "bandwidth": median(speeds), "bandwidths": speeds}
            report["limits"].append(entry | {name: summary(results) for name, results in found.items()})
        report["in_memory"] = summary(in_memory)
    return report


def text_speeds(
    target: str,
    draft: str,
    room: int,
    prompts: Sequence[str],
    *,
    planners: dict[str, dict[str, Any]],
    budget: int | None,
    max_tokens: int,
    plain_tokens: int,
    sampling: dict[str, Any],
    rounds: int,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Tokens per second on real prompts under one limit: mapped plain decoding, streamed plain decoding, each planner.

    Args:
        target: a GGUF file.
        draft: another, resident; "" = none.
        room: bytes for the target's weights; what the process, its caches and the draft need is added.
        prompts: questions.
        planners: planner -> options.
        budget: most guessed tokens per pass; None: as many as pay.
        max_tokens: per prompt.
        plain_tokens: per prompt without drafts, whose speed hardly depends on the length.
        sampling: fields of SamplingParams.
        rounds: the prompts are dealt into so many parts; variants take turns part by part.
        say: told what is being done.
    """
    files = [target, draft] if draft else [target]
    most = DEFAULT_BUDGET if budget is None else budget
    shared: dict[str, Any] = {"budget": most, "by_cost": budget is None, "sampling": sampling}
    with memory_group() as group:
        if group is None:
            raise EdgespecError("texts are compared under a memory limit, and no control group may be made here")
        needed = process_needs(Task(target, draft, budget=most))
        limit = room + needed
        tasks = {
            "mapped, none": Task(target, stream=False, max_tokens=plain_tokens, **shared),
            "streamed, none": Task(target, memory=limit, max_tokens=plain_tokens, **shared),
        }
        for name, options in planners.items():
            tasks[f"streamed, {name}"] = Task(
                target, draft if name in USE_DRAFT else "", memory=limit, max_tokens=max_tokens,
                planner=name, planner_options=options, **shared,
            )  # fmt: skip
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in tasks}
        for number in range(rounds):
            part = list(prompts[number::rounds])
            for name, task in tasks.items():
                say(f"{name}, part {number + 1} of {rounds}")
                found[name].append(run(replace(task, prompts=part), group, limit, files))
    report: dict[str, Any] = {"target": target, "draft": draft, "room": room, "needed": needed, "limit": limit}
    report["variants"] = {name: text_summary(results) for name, results in found.items()}
    plain = report["variants"]["mapped, none"]
    for row in report["variants"].values():
        if "tokens_per_second" in row and "tokens_per_second" in plain:
            row["ratio"] = row["tokens_per_second"] / plain["tokens_per_second"]
    return report


def process_needs(task: Task) -> int:
    """Bytes that a measuring process needs besides the target's weights."""
    result = run(task, None, 0, [])
    if "needed" not in result:
        raise EdgespecError(f"{task.target}: {result['failed']}")
    return int(result["needed"])


def summary(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Medians over all passes of all runs of one variant, by number of nodes."""
    good = [result for result in results if "failed" not in result]
    report: dict[str, Any] = {"failed": [result["failed"] for result in results if "failed" in result]}
    report["passes"] = {
        nodes: {
            name: median([value for result in good for value in result["passes"][nodes][name]])
            for name in ("seconds", "waited")
        }
        for nodes in (good[0]["passes"] if good else ())
    }
    if good:
        report["bytes_per_pass"] = median(result["bytes_per_pass"] for result in good)
    return report | _memory_summary(good)


def text_summary(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Sums over all texts of one variant."""
    good = [result for result in results if "failed" not in result]
    failed = [result["failed"] for result in results if "failed" in result]
    runs = [run for result in good for run in result["runs"]]
    if not runs:
        return {"failed": failed}
    names = ("tokens", "passes", "seconds", "draft_seconds", "target_seconds", "wait_seconds", "plan_seconds")
    totals = {name: sum(run[name] for run in runs) for name in names}
    return {
        "failed": failed,
        **totals,
        "tokens_per_second": totals["tokens"] / totals["seconds"],
        "acceptance_length": totals["tokens"] / totals["passes"],
        "bytes_per_round": sum(result["bytes"] for result in good) / totals["passes"],  # prompts included
        **_memory_summary(good),
    }


def _memory_summary(good: Sequence[dict[str, Any]]) -> dict[str, Any]:
    if not good:
        return {}
    most = {name: max(result[name] for result in good) for name in ("peak", "stayed_in_cache")}
    return most | {name: good[0][name] for name in ("pinned", "streamed", "window", "notes") if name in good[0]}


# --- for a person --------------------------------------------------------------------------------


def pass_table(report: dict[str, Any]) -> str:
    """One row for each limit and number of nodes.

    "to bound" is seconds per pass to max(seconds in memory, bytes streamed / measured bandwidth).
    """
    title = f"{Path(report['target']).name}, {format_size(report['size'])}; {report['how']}"
    headings = ("weights", "disk", "nodes", "mapped", "streamed", "in memory", "to bound", "x mapped", "read", "peak")
    view = _table(title, headings)
    for entry in report["limits"]:
        streamed, mapped = entry["streamed"], entry["mapped"]
        for nodes, found in streamed["passes"].items():
            compute = report["in_memory"]["passes"][nodes]["seconds"]
            bound = max(compute, streamed["streamed"] / entry["bandwidth"])
            plain = mapped["passes"].get(nodes, {}).get("seconds")
            view.add_row(
                format_size(entry["room"]), f"{entry['bandwidth'] / 1e9:.2f} GB/s", nodes,
                f"{plain:.3f} s" if plain else "", f"{found['seconds']:.3f} s", f"{compute:.3f} s",
                f"{found['seconds'] / bound:.2f}", f"{plain / found['seconds']:.1f}" if plain else "",
                f"{streamed['bytes_per_pass'] / streamed['streamed']:.2f} of {format_size(streamed['streamed'])}",
                f"{streamed['peak'] / entry['limit']:.2f}",
            )  # fmt: skip
        for name in ("streamed", "mapped"):
            for why in entry[name]["failed"]:
                view.add_row(format_size(entry["room"]), "", "", f"{name}: {why}")
    return _text(view)


def text_table(report: dict[str, Any]) -> str:
    """One row for each variant."""
    title = f"{Path(report['target']).name}, {format_size(report['room'])} + {format_size(report['needed'])} of memory"
    headings = (
        "variant", "tokens/s", "x mapped", "acceptance", "s/pass", "draft", "compute", "disk", "planning", "read/pass",
        "peak",
    )  # fmt: skip
    view = _table(title, headings)
    for name, row in report["variants"].items():
        if "tokens" not in row:
            view.add_row(name, "; ".join(row["failed"]))
            continue
        compute = row["target_seconds"] - row["wait_seconds"]
        shares = (row["draft_seconds"], compute, row["wait_seconds"], row["plan_seconds"])
        view.add_row(
            name, f"{row['tokens_per_second']:.2f}", f"{row['ratio']:.1f}" if "ratio" in row else "",
            f"{row['acceptance_length']:.2f}", f"{row['target_seconds'] / row['passes']:.3f}",
            *(f"{100 * share / row['seconds']:.0f} %" for share in shares),
            format_size(row["bytes_per_round"]), f"{row['peak'] / report['limit']:.2f}",
        )  # fmt: skip
    return _text(view)


def _table(title: str, headings: Sequence[str]) -> Table:
    view = Table(title=title, title_justify="left")
    for heading in headings:
        view.add_column(heading, justify="right")
    return view


def _text(view: Table) -> str:
    text = StringIO()
    Console(file=text, width=140).print(view)
    return text.getvalue().rstrip()


def draw(report: dict[str, Any], path: str) -> None:
    """A picture: seconds per pass against nodes, a curve for each limit and way.

    Raises:
        MissingPackage: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise MissingPackage("matplotlib", "bench", "drawing") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    curves = [("in memory", report["in_memory"]["passes"], "-")]
    for entry in report["limits"]:
        room = format_size(entry["room"])
        curves += [(f"streamed, {room}", entry["streamed"]["passes"], "-")]
        curves += [(f"mapped, {room}", entry["mapped"]["passes"], "--")]
    for name, passes, style in curves:
        axes.plot([int(n) for n in passes], [row["seconds"] for row in passes.values()], style, marker="o", label=name)
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("nodes in a pass")
    axes.set_ylabel("seconds")
    axes.set_title(f"{Path(report['target']).name}, {format_size(report['size'])}")
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":
    print(json.dumps(measure(Task(**json.loads(sys.argv[1])))))
