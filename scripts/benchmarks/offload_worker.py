"""One measuring process: answers of one model, mapped or streamed."""

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edgespec.loading.pair import DEFAULT_BUDGET, close_all, open_backends
from edgespec.loop.engines import LoadOptions
from edgespec.loop.sampling import SamplingParams
from edgespec.loop.text import user_messages
from edgespec.model import Model
from edgespec.models.registry import Defaults, Entry
from edgespec.planners.auto import Pace, new_auto_state
from edgespec.planners.choice import make_planner

CONTEXT = 2048


@dataclass(frozen=True, slots=True)
class Task:
    """
    Attributes:
        mapped: weights are read through llama.cpp's memory map; nothing is streamed.
        memory: bytes for streaming.
        limit: bytes that the process and what it caches may take.
        by_cost: no more draft tokens than pay.
        pace: `AutoState.as_dict` of the parts before.
    """

    target: str
    draft: str = ""
    mapped: bool = False
    memory: int = 0
    limit: int = 0
    budget: int = DEFAULT_BUDGET
    by_cost: bool = False
    pace: dict[str, Any] | None = None
    planner: str = "none"
    prompts: list[str] = field(default_factory=list)
    max_tokens: int = 96
    sampling: dict[str, Any] = field(default_factory=dict)


def measure(task: Task) -> dict[str, Any]:
    entry = Entry(name="target", target=f"file:{task.target}", defaults=Defaults())
    about = {"resident": True, "exact": "off"} if task.mapped else {"memory": task.memory}
    options = LoadOptions(backend="llamacpp", context_length=CONTEXT, budget=task.budget, **about)
    backends = open_backends(entry, task.draft or None, None, options)
    try:
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
                runs.append(result.stats.as_dict())
        return {"runs": runs, "bytes": bytes_read() - read} | ({"pace": pace.as_dict()} if pace else {})
    finally:
        close_all(backends)


def bytes_read() -> int:
    """Bytes that this process has read from a disk (Linux)."""
    lines = Path("/proc/self/io").read_text("utf-8").splitlines()
    return int(next(line for line in lines if line.startswith("read_bytes")).split()[1])


if __name__ == "__main__":
    print(json.dumps(measure(Task(**json.loads(sys.argv[1])))))
