"""Models that do not fit into memory: memory mapping against streaming, passes and whole answers, on every engine.

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
from typing import Any

from benchmarks.memory_group import NO_LIMIT, Group, evict, memory_group
from benchmarks.offload_report import make_report
from benchmarks.offload_worker import Task
from benchmarks.turns import turns
from edgespec.errors import EdgespecError, UsageError
from edgespec.machine.disk import disk_bandwidth
from edgespec.machine.files import weight_files
from edgespec.planners.choice import check_planner, with_draft

ENGINES = ("llamacpp", "mlx", "torch")
DRAFT_BUFFERS = 300 << 20  # bytes of a draft's caches and buffers

Say = Callable[[str], None]


def parse_models(text: str) -> Task:
    """
    Raises:
        UsageError: there is no such model.
    """
    engine, colon, rest = text.partition(":")
    if not colon or engine not in ENGINES:
        engine, rest = "llamacpp", text
    target, _, draft = rest.partition("+")
    for place in (target, *([draft] if draft else [])):
        if not (Path(place) if engine == "llamacpp" else Path(place) / "config.json").is_file():
            what = "GGUF file" if engine == "llamacpp" else "folder with a config.json"
            raise UsageError(f"{text!r}: {place!r} is no {what}; give [ENGINE:]MODEL or [ENGINE:]MODEL+DRAFT")
    return Task(target, draft, backend=engine)


def check_variants(text: str | None, *, draft: bool) -> list[str]:
    """
    Raises:
        UsageError: a planner is unknown, or needs a draft.
    """
    found = [name.strip() for name in (text or ("specexec,sssd" if draft else "sssd")).split(",")]
    for name in found:
        check_planner(name, draft, None, {})
    return [name for name in found if name != "none"]


def run(task: Task, group: Group | None) -> dict[str, Any]:
    """Run a task in a process of its own, inside its limit, with its files evicted."""
    for model in filter(None, (task.target, task.draft)):
        evict(model)
    if group:
        group.limit(task.limit or NO_LIMIT)
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("offload_worker.py")), json.dumps(asdict(task))],
        preexec_fn=group.enter if group else None, capture_output=True, text=True,
        env=os.environ | {"OMP_WAIT_POLICY": "passive"}, check=False,
    )  # fmt: skip
    if done.returncode:
        why = "it was killed: out of memory" if done.returncode == -9 else (done.stderr.strip() or "?").splitlines()[-1]
        return {"failed": why}
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result | {"limit": task.limit, "peak": group.peak() if group else 0}


def interleaved(tasks: Mapping[str, Task], rounds: int, group: Group, say: Say) -> dict[str, list[dict[str, Any]]]:
    """
    Returns:
        Results of every task, by part of its prompts, each from a process of its own, with the disk's speed before it.
    """
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in tasks}
    asked = max((len(task.prompts) for task in tasks.values()), default=0)
    for name, task, part in turns(tasks, asked, rounds, say):
        largest = max(weight_files(task.target), key=lambda file: file.stat().st_size)
        speed = disk_bandwidth(str(largest), seconds=1.0)
        learned = next((before["pace"] for before in reversed(found[name]) if "pace" in before), None)
        some = replace(task, prompts=[task.prompts[at] for at in part], pace=learned)
        found[name].append(run(some, group) | {"bandwidth": speed})
    return found


def process_needs(task: Task) -> int:
    """Bytes that a process of llama.cpp needs besides the target's weights."""
    result = run(replace(task, prompts=[]), None)
    if "needed" not in result:
        raise EdgespecError(f"{task.target}: {result['failed']}")
    return int(result["needed"])


def weight_bytes(model: str) -> int:
    return sum(file.stat().st_size for file in weight_files(model))


def measure(
    pair: Task, nodes: Sequence[int], variants: Sequence[str], room: int | None, program: int, *, plain_tokens: int,
    rounds: int, say: Say,
) -> dict[str, Any]:  # fmt: skip
    """Seconds of passes in memory and streamed; tokens per second of plain decoding, and of each planner.

    Args:
        pair: of `parse_models`, with its prompts; without prompts no answers.
        nodes: of the passes; empty: no passes.
        variants: of `check_variants`.
        room: bytes for the target's weights; None: half of them.
        program: bytes for all else but the draft, where the engine does not tell.
        plain_tokens: per prompt without drafts, whose speed hardly depends on the length; 0: that is left out.
        rounds: parts of the prompts; variants alternate part by part.
        say: called with a line about the measurement that starts.

    Raises:
        EdgespecError: no control group can be made here, or the model cannot be loaded.
    """
    room = room or weight_bytes(pair.target) // 2
    limit = room + program
    with_draft = limit + (weight_bytes(pair.draft) + DRAFT_BUFFERS if pair.draft else 0)
    passes, texts = dict[str, Task](), dict[str, Task]()
    with memory_group() as group:
        if pair.backend == "llamacpp":
            with_draft, limit = (room + process_needs(one) for one in (pair, replace(pair, draft="")))
        if nodes:
            timed = replace(pair, draft="", prompts=[], nodes=list(nodes), budget=max(nodes))
            passes = {"in memory": replace(timed, stream=False), "streamed": replace(timed, memory=limit, limit=limit)}
        if pair.prompts:
            texts = _texts(replace(pair, memory=with_draft, limit=with_draft), variants, plain_tokens)
        timed_passes = interleaved(passes, rounds, group, say)
        return make_report(pair, with_draft, timed_passes, interleaved(texts, rounds, group, say))


def _texts(pair: Task, variants: Sequence[str], plain_tokens: int) -> dict[str, Task]:
    plain, found = replace(pair, draft="", max_tokens=plain_tokens), dict[str, Task]()
    if plain_tokens:
        if pair.backend == "llamacpp":
            found["mapped, none"] = replace(plain, stream=False, memory=0)
        found["streamed, none"] = plain
    for name in variants:
        found[f"streamed, {name}"] = replace(pair, draft=pair.draft if with_draft([name]) else "", planner=name)
    return found
