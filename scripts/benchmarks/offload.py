"""Models that do not fit into memory: answers with weights mapped by llama.cpp, and streamed.

Each measurement is a process (`offload_worker.py`) inside a memory limit, started with the model's files evicted from
the page cache.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.memory_group import Group, evict, memory_group
from benchmarks.offload_worker import CONTEXT, Task
from benchmarks.turns import ratio, turns
from edgespec.errors import UsageError
from edgespec.machine.disk import disk_bandwidth
from edgespec.machine.files import weight_files
from edgespec.machine.memory import format_size
from edgespec.machine.this_machine import this_machine
from edgespec.measure.tables import table
from edgespec.planners.choice import check_planner, with_draft

HEADINGS = (
    "x first, 95 %", "tokens/s", "acceptance", "s/pass", "draft", "compute", "disk", "planning", "read/pass", "peak",
)  # fmt: skip

Say = Callable[[str], None]
Results = Sequence[dict[str, Any]]  # what the processes of a variant returned


def parse_models(text: str) -> Task:
    """
    Raises:
        UsageError: there is no such model.
    """
    target, _, draft = text.partition("+")
    for place in (target, *([draft] if draft else [])):
        if not Path(place).is_file():
            raise UsageError(f"{text!r}: {place!r} is no GGUF file; give MODEL or MODEL+DRAFT")
    return Task(target, draft)


def check_variants(text: str | None, *, draft: bool) -> list[str]:
    """
    Raises:
        UsageError: a planner is unknown, or needs a draft.
    """
    found = [name.strip() for name in (text or ("specexec,sssd" if draft else "sssd")).split(",")]
    for name in found:
        check_planner(name, draft, None, {})
    return [name for name in found if name != "none"]


def run(task: Task, group: Group) -> dict[str, Any]:
    """Run a task in a process of its own, inside its limit, with its files evicted."""
    for model in filter(None, (task.target, task.draft)):
        evict(model)
    group.limit(task.limit)
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("offload_worker.py")), json.dumps(asdict(task))],
        preexec_fn=group.enter, capture_output=True, text=True,
        env=os.environ | {"OMP_WAIT_POLICY": "passive"}, check=False,
    )  # fmt: skip
    if done.returncode:
        why = "it was killed: out of memory" if done.returncode == -9 else (done.stderr.strip() or "?").splitlines()[-1]
        return {"failed": why}
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result | {"peak": group.peak()}


def interleaved(tasks: Mapping[str, Task], rounds: int, group: Group, say: Say) -> dict[str, list[dict[str, Any]]]:
    """
    Returns:
        Results of every task, by part of its prompts, each from a process of its own, with the disk's speed before it.
    """
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in tasks}
    for name, task, part in turns(tasks, len(next(iter(tasks.values())).prompts), rounds, say):
        largest = max(weight_files(task.target), key=lambda file: file.stat().st_size)
        speed = disk_bandwidth(str(largest), seconds=1.0)
        learned = next((before["pace"] for before in reversed(found[name]) if "pace" in before), None)
        some = replace(task, prompts=[task.prompts[at] for at in part], pace=learned)
        found[name].append(run(some, group) | {"bandwidth": speed, "limit": task.limit})
    return found


def weight_bytes(model: str) -> int:
    return sum(file.stat().st_size for file in weight_files(model))


def measure(
    pair: Task, variants: Sequence[str], room: int | None, *, plain_tokens: int, rounds: int, say: Say
) -> dict[str, list[dict[str, Any]]]:
    """
    Args:
        pair: of `parse_models`, with its prompts.
        variants: of `check_variants`.
        room: bytes for the target's weights; None: half of them.
        plain_tokens: per prompt without drafts, whose speed hardly depends on the length; 0: that is left out.
        rounds: parts of the prompts; variants alternate part by part.
        say: called with a line about the measurement that starts.

    Returns:
        Results of plain decoding and of each planner.

    Raises:
        EdgespecError: no control group can be made here, or the model cannot be loaded.
    """
    from edgespec.backends.llamacpp.memory.planning import MIN_NODES, ContextSize, memory_needs

    size, drafts = ContextSize(CONTEXT, pair.budget, 1, MIN_NODES), [pair.draft] if pair.draft else []
    needed = memory_needs(pair.target, size, this_machine(), drafts)
    limit = (room or weight_bytes(pair.target) // 2) + needed
    with memory_group() as group:
        return interleaved(tasks(replace(pair, memory=limit, limit=limit), variants, plain_tokens), rounds, group, say)


def tasks(pair: Task, variants: Sequence[str], plain_tokens: int) -> dict[str, Task]:
    plain, found = replace(pair, draft="", max_tokens=plain_tokens), dict[str, Task]()
    if plain_tokens:
        found |= {"mapped, none": replace(plain, mapped=True), "streamed, none": plain}
    for name in variants:
        found[f"streamed, {name}"] = replace(pair, draft=pair.draft if with_draft([name]) else "", planner=name)
    return found


def shown(target: str, found: Mapping[str, Results]) -> tuple[str, list[str]]:
    """A table, and a line for each failure."""
    failed = [f"{name}: {one['failed']}" for name, results in found.items() for one in results if "failed" in one]
    rows, first = list[list[str]](), None
    for name, results in found.items():
        good = [one for one in results if "failed" not in one]
        runs = [run for one in good for run in one["runs"]]
        if any(run["passes"] for run in runs):
            by_prompt = [{"tokens": run["gained"], "seconds": run["seconds"]} for run in runs]
            first = first or by_prompt
            same = len(by_prompt) == len(first)
            times = "{:.2f} ({:.2f}-{:.2f})".format(*ratio(by_prompt, first)) if same else ""
            rows.append([name, times, *_row(good, runs)])
        elif runs:
            failed.append(f"{name}: no answer has two tokens")
    every = [one for results in found.values() for one in results]
    limit, speed = max(one["limit"] for one in every), median(one["bandwidth"] for one in every)
    title = f"{Path(target).name} in {format_size(limit)}, disk {speed / 1e9:.2f} GB/s"
    return table(title, ("variant", *HEADINGS), rows, width=180), failed


def _row(results: Results, runs: Sequence[dict[str, Any]]) -> list[str]:
    def total(name: str) -> float:
        return float(sum(run.get(name, 0.0) for run in runs))

    seconds, passes, waited = total("seconds"), total("passes"), total("wait_seconds")
    shares = total("draft_seconds"), total("target_seconds") - waited, waited, total("plan_seconds")
    read = sum(one["bytes"] for one in results) / passes  # prompts included
    return [
        f"{total('gained') / seconds:.2f}", f"{total('gained') / passes:.2f}",
        f"{total('target_seconds') / passes:.3f}", *(f"{100 * share / seconds:.0f} %" for share in shares),
        format_size(read), f"{max(one['peak'] / one['limit'] for one in results):.2f}",
    ]  # fmt: skip
