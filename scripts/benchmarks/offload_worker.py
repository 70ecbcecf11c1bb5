"""One measuring process: passes or answers of one model, mapped or streamed."""

import json
import sys
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from edgespec.loading.pair import DEFAULT_BUDGET, close_all, open_backends
from edgespec.loading.timed_pass import time_pass
from edgespec.loop.backend import Backend
from edgespec.loop.engines import LoadOptions
from edgespec.loop.sampling import SamplingParams
from edgespec.loop.text import user_messages
from edgespec.machine.this_machine import this_machine
from edgespec.model import Model
from edgespec.models.registry import Defaults, Entry
from edgespec.planners.auto import Pace, new_auto_state
from edgespec.planners.choice import make_planner

PLENTY = 1 << 42  # bytes of memory: nothing is streamed


@dataclass(frozen=True, slots=True)
class Task:
    """
    Attributes:
        memory: bytes for streaming; 0: what is free.
        limit: bytes that the process and what it caches may take; 0: no limit.
        by_cost: no more draft tokens than pay.
        pace: `AutoState.as_dict` of the parts before.
        nodes: of passes to time.
    """

    target: str
    draft: str = ""
    backend: str = "llamacpp"
    stream: bool = True
    memory: int = 0
    limit: int = 0
    budget: int = DEFAULT_BUDGET
    by_cost: bool = False
    pace: dict[str, Any] | None = None
    context_length: int = 2048
    nodes: list[int] = field(default_factory=list)
    planner: str = "none"
    prompts: list[str] = field(default_factory=list)
    max_tokens: int = 96
    sampling: dict[str, Any] = field(default_factory=dict)


def measure(task: Task) -> dict[str, Any]:
    if not (task.nodes or task.prompts):
        return _measure_needs(task)
    entry = Entry(name="target", target=f"file:{task.target}", defaults=Defaults())
    backends = open_backends(entry, task.draft or None, None, _options(task))
    try:
        return (_measure_passes if task.nodes else _measure_texts)(task, backends) | {
            "streamed": _streamed(backends[0]), "notes": list(backends[0].notes),
        }  # fmt: skip
    finally:
        close_all(backends)


def _options(task: Task) -> LoadOptions:
    memory = task.memory or None
    if task.backend == "torch" and not task.stream:
        memory = PLENTY
    return LoadOptions(
        backend=task.backend, context_length=task.context_length, budget=max([task.budget, *task.nodes]),
        memory=memory, resident=not task.stream, device="cpu" if task.backend == "torch" else None,
        exact=None if task.prompts and task.stream else "off",
    )  # fmt: skip


def _measure_needs(task: Task) -> dict[str, Any]:
    engine = import_module("edgespec.backends.llamacpp.memory.planning")
    size = engine.ContextSize(task.context_length, task.budget, 1, engine.MIN_NODES)
    return {"needed": engine.memory_needs(task.target, size, this_machine(), [task.draft] if task.draft else [])}


def _measure_passes(task: Task, backends: list[Backend]) -> dict[str, Any]:
    return {"passes": {str(nodes): asdict(time_pass(backends[0], nodes)) for nodes in task.nodes}}


def _measure_texts(task: Task, backends: list[Backend]) -> dict[str, Any]:
    limits = backends[0].capabilities
    pace = new_auto_state(limits.streams, limits.experts) if task.by_cost else None
    if pace and task.pace:
        pace.recall(Pace.model_validate(task.pace))
    planner = make_planner(task.planner, backends, state=pace)
    runs, read = list[dict[str, Any]](), bytes_read()
    sampling = SamplingParams(**task.sampling)
    with Model(backends[0], planner, budget=task.budget, sampling=sampling) as model:
        for prompt in task.prompts:
            result = model.generate(user_messages(prompt), max_tokens=task.max_tokens, seed=sampling.seed)
            runs.append(result.stats.as_dict() | {"token_ids": result.token_ids})
    return {"runs": runs, "bytes": bytes_read() - read} | ({"pace": pace.as_dict()} if pace else {})


def _streamed(target: Any) -> int:
    """Bytes that every pass reads."""
    streamer = getattr(target, "streamer", None)
    if plan := getattr(target, "plan", None) or getattr(streamer, "plan", None):
        return int(plan.streamed_bytes)
    feeder = getattr(streamer, "feeder", None)
    return sum(source.size for source in feeder.sources) if feeder else 0


def bytes_read() -> int:
    """Bytes that this process has read from a disk (Linux)."""
    lines = Path("/proc/self/io").read_text("utf-8").splitlines()
    return int(next(line for line in lines if line.startswith("read_bytes")).split()[1])


if __name__ == "__main__":
    print(json.dumps(measure(Task(**json.loads(sys.argv[1])))))
