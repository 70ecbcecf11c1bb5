"""Answers of a model that does not fit into memory: memory mapping against streaming.

Every measurement is a process of its own (`offload_worker.py`) inside a memory limit, started with the model's files
evicted from the page cache. Variants alternate, so that a busy machine or a disk with burst credits slows all alike.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.offload_worker import Task, evict_model
from benchmarks.side_by_side import parse_variant, ratio
from edgespec.errors import EdgespecError
from edgespec.loading.pair import DEFAULT_BUDGET
from edgespec.planners.choice import USE_DRAFT

GROUPS = Path("/sys/fs/cgroup")


class Group:
    def __init__(self, folder: Path, version: int) -> None:
        self.folder = folder
        self._version = version

    def limit(self, size: int) -> None:
        """Allow `size` bytes, none of them swapped; reset the peak."""
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
def memory_group() -> Iterator[Group]:
    """A new control group under this process's own. Raises EdgespecError where that is not allowed."""
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    paths = {controllers: path.strip("/") for _, controllers, path in (line.split(":", 2) for line in lines)}
    version = 1 if "memory" in paths else 2
    base = GROUPS / "memory" / paths["memory"] if version == 1 else GROUPS / paths.get("", "")
    group = Group(base / f"edgespec-{os.getpid()}", version)
    try:
        group.folder.mkdir()
        group.limit(1 << 40)
    except OSError as error:
        if group.folder.is_dir():
            group.folder.rmdir()
        raise EdgespecError("this needs a memory limit, and no control group may be made here") from error
    try:
        yield group
    finally:
        group.folder.rmdir()


def run(task: Task, group: Group | None, limit: int, files: Sequence[str]) -> dict[str, Any]:
    """Run a task in a process of its own, inside a limit of bytes (0: none), with its files evicted."""
    left = max(map(evict_model, files), default=0.0)
    if group:
        group.limit(limit or 1 << 40)

    def enter() -> None:
        if group:
            (group.folder / "cgroup.procs").write_text(str(os.getpid()))

    environment = os.environ | {"OMP_WAIT_POLICY": "passive"}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("offload_worker.py")), json.dumps(asdict(task))],
        preexec_fn=enter, capture_output=True, text=True, env=environment, check=False,
    )  # fmt: skip
    if done.returncode:
        why = "it was killed: out of memory" if done.returncode == -9 else (done.stderr.strip() or "?").splitlines()[-1]
        return {"failed": why}
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    result["peak"] = group.peak() if group else 0
    result["stayed_in_cache"] = left
    return result


def text_speeds(
    target: str,
    draft: str,
    room: int,
    prompts: Sequence[str],
    *,
    variants: Sequence[str],
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
        variants: as for `side_by_side.parse_variant`.
        budget: most draft tokens per pass; None: as many as pay.
        max_tokens: per prompt.
        plain_tokens: per prompt without drafts, whose speed hardly depends on the length; 0: that is left out.
        sampling: fields of SamplingParams.
        rounds: parts of the prompts; variants alternate part by part.
        say: called with a line about the measurement that starts.
    """
    files = [target, draft] if draft else [target]
    most = DEFAULT_BUDGET if budget is None else budget
    shared: dict[str, Any] = {"budget": most, "by_cost": budget is None, "sampling": sampling}
    with memory_group() as group:
        needed = process_needs(Task(target, draft, budget=most))
        limit = room + needed
        plain_tasks = {
            "mapped, none": Task(target, stream=False, max_tokens=plain_tokens, **shared),
            "streamed, none": Task(target, memory=limit, max_tokens=plain_tokens, **shared),
        }
        tasks = plain_tasks if plain_tokens else {}
        for variant in variants:
            name, options = parse_variant(variant)
            tasks[f"streamed, {variant}"] = Task(
                target, draft if name in USE_DRAFT else "", memory=limit, max_tokens=max_tokens,
                planner=name, ahead=options.pop("ahead", None), planner_options=options, **shared,
            )  # fmt: skip
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in tasks}
        for number in range(rounds):
            part = list(prompts[number::rounds])
            for name, task in tasks.items():
                say(f"{name}, part {number + 1} of {rounds}")
                learned = next((before["pace"] for before in reversed(found[name]) if "pace" in before), None)
                task = replace(task, prompts=part, pace=learned)
                found[name].append(run(task, group, limit, files))
    report: dict[str, Any] = {"target": target, "draft": draft, "room": room, "needed": needed, "limit": limit}
    report["variants"] = {name: text_summary(results) for name, results in found.items()}
    plain = report["variants"].get("mapped, none", {})
    for name, row in report["variants"].items():
        if "tokens_per_second" in row and "tokens_per_second" in plain:
            row["ratio"] = row["tokens_per_second"] / plain["tokens_per_second"]
        base = report["variants"].get(name.split("+")[0], {})
        if "+" in name and len(row.get("by_prompt", ())) == len(base.get("by_prompt", ())) > 0:
            row["to_serial"] = ratio(row["by_prompt"], base["by_prompt"])
    return report


def process_needs(task: Task) -> int:
    """Bytes that a measuring process needs besides the target's weights."""
    result = run(task, None, 0, [])
    if "needed" not in result:
        raise EdgespecError(f"{task.target}: {result['failed']}")
    return int(result["needed"])


def summary(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
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
    good = [result for result in results if "failed" not in result]
    failed = [result["failed"] for result in results if "failed" in result]
    runs = [run for result in good for run in result["runs"]]
    if not runs:
        return {"failed": failed}
    names = (
        "tokens", "passes", "seconds", "draft_seconds", "target_seconds", "wait_seconds", "plan_seconds",
        "draft_passes", "draft_went_on", "hidden_seconds",
    )  # fmt: skip
    totals = {name: sum(run.get(name, 0.0) for run in runs) for name in names}
    return {
        "failed": failed,
        **totals,
        "tokens_per_second": totals["tokens"] / totals["seconds"],
        "acceptance_length": totals["tokens"] / totals["passes"],
        "by_prompt": [{"tokens": run["tokens"], "seconds": run["seconds"]} for run in runs],
        **{name: sum(result[name] for result in good) for name in ("user_seconds", "system_seconds")},
        "bytes_per_round": sum(result["bytes"] for result in good) / totals["passes"],  # prompts included
        **_memory_summary(good),
    }


def _memory_summary(good: Sequence[dict[str, Any]]) -> dict[str, Any]:
    if not good:
        return {}
    most = {name: max(result[name] for result in good) for name in ("peak", "stayed_in_cache")}
    return most | {name: good[0][name] for name in ("pinned", "streamed", "window", "notes") if name in good[0]}
