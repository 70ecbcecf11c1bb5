"""One measuring process: passes or answers of one model, mapped or streamed."""

import ctypes
import json
import os
import sys
from dataclasses import dataclass, field
from importlib import import_module
from mmap import PAGESIZE, PROT_READ, mmap
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from edgespec.loading.by_name import load_backend
from edgespec.loading.pair import DEFAULT_BUDGET, close_all, open_backends
from edgespec.loop.backend import Backend, Work
from edgespec.loop.engines import LoadOptions
from edgespec.loop.passes import prefill
from edgespec.loop.sampling import SamplingParams
from edgespec.loop.text import user_messages
from edgespec.machine.this_machine import this_machine
from edgespec.model import Model
from edgespec.models.registry import Defaults, Entry
from edgespec.planners.auto import new_auto_state
from edgespec.planners.choice import make_planner

PLENTY = 1 << 42  # bytes of memory: nothing is streamed
MLX_LM = "mlx-lm"
WARM_UP = "The first pass reads what loading has left out; its time is not counted. "


@dataclass(frozen=True, slots=True)
class Task:
    target: str
    draft: str = ""
    backend: str = "llamacpp"  # MLX_LM: mlx-lm itself
    stream: bool = True
    memory: int = 0  # bytes given to streaming; 0 = what is free
    budget: int = DEFAULT_BUDGET
    by_cost: bool = False  # no more draft tokens than pay
    pace: dict[str, Any] | None = None  # `AutoState.as_dict` of the parts before
    context_length: int = 2048
    nodes: list[int] = field(default_factory=list)  # tree sizes to time
    repeats: int = 3
    planner: str = "none"
    ahead: bool | None = None
    planner_options: dict[str, Any] = field(default_factory=dict)
    prompts: list[str] = field(default_factory=list)
    max_tokens: int = 96
    sampling: dict[str, Any] = field(default_factory=dict)


def measure(task: Task) -> dict[str, Any]:
    if task.nodes:
        return _measure_passes(task)
    if task.backend == MLX_LM:
        return _measure_mlx_lm(task)
    return _measure_texts(task) if task.prompts else _measure_needs(task)


def _measure_needs(task: Task) -> dict[str, Any]:
    engine = import_module("edgespec.backends.llamacpp.memory.planning")
    size = engine.ContextSize(task.context_length, task.budget, 1, engine.MIN_NODES)
    return {"needed": engine.memory_needs(task.target, size, this_machine(), [task.draft] if task.draft else [])}


def _measure_passes(task: Task) -> dict[str, Any]:
    target = load_backend(
        task.backend, task.target, context_length=task.context_length, budget=max(task.nodes), **_memory(task)
    )
    try:
        session = target.open()
        text = target.vocab.encode(WARM_UP * (4 if task.backend == "llamacpp" else 1), add_bos=True, parse_special=True)
        prefill(target, session, text[:-1])
        passes: dict[str, dict[str, list[float]]] = {}
        total = 0
        for repeat in range(task.repeats + 1):
            for count in task.nodes:
                nodes = np.arange(count, dtype=np.int32)
                tokens = np.resize(np.array(text, np.int32), count)
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
        return {"passes": passes, "bytes_per_pass": per_pass, **_plan_of(target)}
    finally:
        target.close()


def _measure_texts(task: Task) -> dict[str, Any]:
    backends = _open(task)
    try:
        limits = backends[0].capabilities
        pace = new_auto_state(limits.streams, limits.experts) if task.by_cost else None
        if pace and task.pace:
            pace.recall(task.pace)
        planner = make_planner(task.planner, backends, state=pace, ahead=task.ahead, **task.planner_options)
        with Model(backends[0], planner, budget=task.budget, sampling=SamplingParams(**task.sampling)) as model:
            read, before, runs = bytes_read(), processor_seconds(), []
            for prompt in task.prompts:
                result = model.generate(user_messages(prompt, None), max_tokens=task.max_tokens)
                runs.append({**result.stats.as_dict(), "token_ids": result.token_ids})
        learned = {"pace": pace.as_dict()} if pace else {}
        return {"runs": runs, **learned, **_used(read, before), **_plan_of(backends[0])}
    finally:
        close_all(backends)


def _open(task: Task) -> list[Backend]:
    if not task.stream:  # open_backends would stream under a tight limit
        options = {"context_length": task.context_length, "budget": task.budget, "resident": True}
        paths = [task.target, task.draft] if task.draft else [task.target]
        return [load_backend("llamacpp", path, in_order=not i, **options) for i, path in enumerate(paths)]
    entry = Entry(name="target", target=f"file:{task.target}", defaults=Defaults())
    asked = LoadOptions(
        backend=task.backend, context_length=task.context_length, budget=task.budget, memory=task.memory or None,
        device="cpu" if task.backend == "torch" else None,
    )  # fmt: skip
    return open_backends(entry, task.draft or None, None, asked)


def _memory(task: Task) -> dict[str, Any]:
    if task.backend == "torch":
        return {"device": "cpu", "memory": task.memory if task.stream else PLENTY}
    return {"memory": task.memory or None} if task.stream else {"resident": True}


def _plan_of(target: Any) -> dict[str, Any]:
    streamer = getattr(target, "streamer", None)
    plan = getattr(target, "plan", None) or getattr(streamer, "plan", None)
    if plan is None:
        sources = streamer.feeder.sources if streamer and streamer.feeder else []
        return {"streamed": sum(source.size for source in sources), "notes": list(target.notes)} if sources else {}
    return {
        "pinned": plan.pinned_bytes,
        "streamed": plan.streamed_bytes,
        "window": plan.slots * plan.slot_bytes,
        "needed": plan.needed,
        "notes": list(target.notes),
    }


def _measure_mlx_lm(task: Task) -> dict[str, Any]:
    from mlx_lm import load, stream_generate

    model, tokenizer = load(task.target)[:2]
    read, before, runs = bytes_read(), processor_seconds(), []
    for prompt in task.prompts:
        token_ids = tokenizer.apply_chat_template([{"role": "user", "content": prompt}], add_generation_prompt=True)
        count, started = -1, 0.0
        for _ in stream_generate(model, tokenizer, token_ids, max_tokens=task.max_tokens):
            count += 1
            started = started or perf_counter()  # the prompt does not count
        seconds = perf_counter() - started
        runs.append({"tokens": count, "passes": count, "seconds": seconds, "target_seconds": seconds})
    return {"runs": runs, **_used(read, before)}


def _used(read: int, before: tuple[float, float]) -> dict[str, float]:
    user, system = (now - then for now, then in zip(processor_seconds(), before, strict=True))
    return {"bytes": bytes_read() - read, "user_seconds": user, "system_seconds": system}


def bytes_read() -> int:
    """Bytes this process has fetched from a disk (Linux)."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("read_bytes")).split()[1])


def evict_model(path: str) -> float:
    files = [file for file in Path(path).rglob("*") if file.is_file()] if Path(path).is_dir() else [Path(path)]
    return max((evict(str(file)) for file in files if file.stat().st_size), default=0.0)


def processor_seconds() -> tuple[float, float]:
    import resource

    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime, used.ru_stime


def evict(path: str) -> float:
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        with mmap(file.fileno(), 0, prot=PROT_READ) as view:
            size = len(view)
            flags = np.zeros(-(-size // PAGESIZE), np.uint8)
            address = np.frombuffer(view, np.uint8).ctypes.data
            pointers = ctypes.c_void_p(address), ctypes.c_size_t(size), ctypes.c_void_p(flags.ctypes.data)
            ctypes.CDLL(None).mincore(*pointers)
            return float(np.mean(flags & 1))


if __name__ == "__main__":
    print(json.dumps(measure(Task(**json.loads(sys.argv[1])))))
