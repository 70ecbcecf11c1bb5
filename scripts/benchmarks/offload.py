"""Models that do not fit into memory: memory mapping against streaming, passes and whole answers, on every engine.

Each measurement is a process (`offload_worker.py`) inside a memory limit, started with the model's files evicted from
the page cache. Variants alternate, so that a busy machine or a disk with burst credits slows all alike.
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
from benchmarks.offload_worker import MLX_LM, Task
from benchmarks.side_by_side import parse_variant
from edgespec.errors import EdgespecError, UsageError
from edgespec.loop.sampling import SamplingParams
from edgespec.machine.disk import disk_bandwidth
from edgespec.machine.files import weight_files
from edgespec.planners.choice import check_planner, with_draft

ENGINES = ("llamacpp", "mlx", "torch")
CONTEXT = 512  # tokens
DRAFT_BUFFERS = 300 << 20  # bytes of a draft's caches and buffers

Say = Callable[[str], None]


def parse_models(text: str) -> Task:
    """
    Raises:
        UsageError: `text` is not ENGINE:MODEL or ENGINE:MODEL+DRAFT, or there is no such model.
    """
    engine, _, rest = text.partition(":")
    target, _, draft = rest.partition("+")
    if engine not in ENGINES or not target:
        raise UsageError(f"{text!r} is not ENGINE:MODEL or ENGINE:MODEL+DRAFT, with {', '.join(ENGINES)} as ENGINE")
    for place in filter(None, (target, draft)):
        if not (Path(place) if engine == "llamacpp" else Path(place) / "config.json").is_file():
            raise UsageError(f"{place}: is no {'GGUF file' if engine == 'llamacpp' else 'folder with a config.json'}")
    return Task(target, draft, backend=engine, context_length=CONTEXT)


def run(task: Task, group: Group | None) -> dict[str, Any]:
    """Run a task in a process of its own, inside its limit, with its files evicted."""
    stayed = max(evict(model) for model in (task.target, task.draft) if model)
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
    return result | {"limit": task.limit, "peak": group.peak() if group else 0, "stayed_in_cache": stayed}


def interleaved(tasks: Mapping[str, Task], rounds: int, group: Group, say: Say) -> dict[str, list[dict[str, Any]]]:
    """
    Returns:
        Results of every task, by part of its prompts, each from a process of its own, with the disk's speed before it.
    """
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in tasks}
    for number in range(rounds):
        for name, task in tasks.items():
            part = task.prompts[number::rounds]
            if task.prompts and not part:
                continue
            say(f"{name}, part {number + 1} of {rounds}")
            largest = max(weight_files(task.target), key=lambda file: file.stat().st_size)
            speed = disk_bandwidth(str(largest), seconds=1.0)
            learned = next((before["pace"] for before in reversed(found[name]) if "pace" in before), None)
            found[name].append(run(replace(task, prompts=part, pace=learned), group) | {"bandwidth": speed})
    return found


def text_speeds(
    pair: Task, room: int, variants: Sequence[str], *, plain_tokens: int, rounds: int, say: Say
) -> dict[str, Any]:
    """Tokens per second under one limit: mapped plain decoding, streamed plain decoding, each planner.

    Args:
        pair: target, draft and prompts.
        room: bytes for the target's weights; what the process, its caches and the draft need is added.
        variants: as for `side_by_side.parse_variant`.
        plain_tokens: per prompt without drafts, whose speed hardly depends on the length; 0: that is left out.
        rounds: parts of the prompts; variants alternate part by part.
        say: called with a line about the measurement that starts.

    Raises:
        UsageError: there is no such variant, it needs a draft, or a value of the sampling is out of range.
        EdgespecError: no control group can be made here, or the model cannot be loaded.
    """
    SamplingParams(**pair.sampling)
    parsed = {variant: parse_variant(variant) for variant in variants}
    for name, _ in parsed.values():
        check_planner(name, bool(pair.draft), None, {})
    with memory_group() as group:
        limit = room + process_needs(pair)
        streamed = replace(pair, memory=limit, limit=limit)
        plain = replace(streamed, draft="", max_tokens=plain_tokens)
        tasks = (
            {"mapped, none": replace(plain, stream=False, memory=0), "streamed, none": plain} if plain_tokens else {}
        )
        for variant, (name, options) in parsed.items():
            tasks[f"streamed, {variant}"] = replace(
                streamed, draft=pair.draft if with_draft([name]) else "", planner=name,
                ahead=options.pop("ahead", None), planner_options=options,
            )  # fmt: skip
        return make_report(pair, limit, {}, interleaved(tasks, rounds, group, say))


def process_needs(task: Task) -> int:
    """Bytes that a measuring process needs besides the target's weights."""
    result = run(replace(task, prompts=[]), None)
    if "needed" not in result:
        raise EdgespecError(f"{task.target}: {result['failed']}")
    return int(result["needed"])


def weight_bytes(model: str) -> int:
    return sum(file.stat().st_size for file in weight_files(model))


def model_speeds(
    pair: Task, nodes: Sequence[int], *, share: float, program: int, rounds: int, say: Say
) -> dict[str, Any]:
    """Seconds of passes in memory and streamed; tokens per second of plain decoding, with the draft, and of mlx-lm.

    Args:
        pair: of `parse_models`, with its prompts; without prompts no answers.
        nodes: of the passes; empty: no passes.
        share: of the weights that memory holds.
        program: bytes for all else; the draft's are added.
        rounds: variants alternate so often, with a part of the prompts each time.
        say: called with a line about the measurement that starts.

    Raises:
        EdgespecError: no control group can be made here.
    """
    limit = int(share * weight_bytes(pair.target)) + program
    with_draft = limit + (weight_bytes(pair.draft) + DRAFT_BUFFERS if pair.draft else 0)
    passes, texts = dict[str, Task](), dict[str, Task]()
    if nodes:
        timed = replace(pair, draft="", prompts=[], nodes=list(nodes), budget=max(nodes))
        passes = {"in memory": replace(timed, stream=False), "streamed": replace(timed, memory=limit, limit=limit)}
    if pair.prompts:
        text = replace(pair, memory=with_draft, limit=with_draft)
        texts["plain"] = replace(text, draft="")
        if pair.draft:
            texts["specexec"] = replace(text, planner="specexec")
        if pair.backend == "mlx":
            texts["mlx-lm alone"] = replace(text, draft="", backend=MLX_LM)
    with memory_group() as group:
        timed_passes = interleaved(passes, rounds, group, say)
        return make_report(pair, limit, timed_passes, interleaved(texts, rounds, group, say))
