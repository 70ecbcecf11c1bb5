"""One case of `run.py`, in a process of its own: `python cases.py CASE OPTIONS`, which are JSON.

Writes numbers into a file, and prints what else came of it as JSON in the last line.
"""

import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from alone import before_passes, generation_of
from edgespec.backends.common import loader
from edgespec.backends.llamacpp import engine
from edgespec.backends.llamacpp.backend import LlamaBackend
from edgespec.backends.llamacpp.ggml.ggml_tensor import is_here, operation_at
from edgespec.backends.llamacpp.memory import mixture, planning
from test_auto import given

from edgespec.errors import NoRoom
from edgespec.loading import row_classes
from edgespec.loading.exact import apply_row_class
from edgespec.loop.backend import Work
from edgespec.loop.passes import prefill
from edgespec.loop.planner import Planner
from edgespec.loop.sampling import SamplingParams
from edgespec.machine.memory import parse_size
from edgespec.machine.this_machine import Machine, this_machine
from edgespec.planners.choice import make_planner
from edgespec.planners.sssd import SssdPlanner
from edgespec.weights.plan import Plan, Pool, make_plan

# Flash attention may end the process in Mesa 22, and gives wrong numbers in Mesa 25; float32 does without.
OPTIONS: dict[str, Any] = {"context_length": 1024, "threads": 2, "budget": 128, "kv_type": "f32", "exact": "off"}
ROWS = (1, 4, 33, 128, 1, 2)
PROMPT = 150  # tokens
SAMPLINGS = (SamplingParams(), SamplingParams(temperature=0.7, seed=1))
SHORT = "one, two, one, two, one,"
TEXT = "the theory of the one and the many, the one and the two; " * 3


@contextmanager
def loaded(
    path: str, device: str, gpu_layers: int, slots: int = 0, here: int = 0, shared: bool = False, **more: Any
) -> Iterator[LlamaBackend]:
    """A model with layers on the device.

    Args:
        path: of the model.
        device: its name.
        gpu_layers: as of `LoadOptions`.
        slots: of a pool on the device; 0: it has all experts of its layers.
        here: slots of the pool in memory.
        shared: the device computes in its pool in memory, without a copy.
        more: other options.
    """

    def plan_memory(planner: planning.MemoryPlanner, size: Any, *given: Any) -> tuple[Plan | None, Any, list[str]]:
        layers = planner.find_expert_layers()
        count = 1 + layers[-1].index
        first = 0 if gpu_layers < 0 else count + 1 - gpu_layers
        there = tuple(i for i, layer in enumerate(layers) if layer.index >= first)
        plan = make_plan(planner.tensors, 1 << 20, 0, on_device=count - first, experts_here=True)
        assert plan
        at_device = (Pool(there, slots, device),)
        made = tuple(Pool(some, here) for some in [tuple(range(len(layers) - shared * len(there)))] if some)
        plan = replace(plan, experts=layers[0].count, pools=made + at_device * shared)
        return (plan if shared else replace(plan, device_pools=at_device)), size, []

    with pytest.MonkeyPatch.context() as patch:
        # A device that helps with long passes over the processor's layers would compute them otherwise.
        helps = engine.on_gpus
        patch.setattr(engine, "on_gpus", lambda *given: helps(*given) | {"op_offload": 0})
        if slots:
            patch.setattr(planning.MemoryPlanner, "plan_memory", plan_memory)
        # Where memory is plentiful, cells are placed otherwise.
        backend = engine.load(path, gpu_layers=gpu_layers, **OPTIONS | {"memory": "1G"} | more)
    # Where passes read experts, those over recurrent layers are composed otherwise.
    backend.capabilities = replace(backend.capabilities, experts=(1, 1))
    with closing(backend):
        yield backend


def logits_of(backend: LlamaBackend, rows: Sequence[int] = ROWS, sessions: int = 1) -> Any:
    """Of a prompt and of passes over so many nodes, for each of the sessions."""
    draw, found = np.random.default_rng(3), list[Any]()
    opened = [backend.open() for _ in range(sessions)]
    for session in opened:
        last = prefill(backend, session, draw.integers(0, 250, PROMPT).tolist(), want_last=True)
        found.append(last[0].row(last[1])[None])
    for count in rows:
        nodes = np.arange(count, dtype=np.int32)
        parents = nodes - 1
        parents[count // 2 :][:1] = -(count < 2)  # two paths: recurrent layers have few
        works = [Work(one, draw.integers(0, 250, count).astype(np.int32), parents, nodes) for one in opened]
        for logits in backend.forward(works):
            found.append(np.stack([logits.row(node) for node in nodes.tolist()]))
        for session in opened:
            session.commit([0])
    for session in opened:
        session.close()
    return np.concatenate(found)


def report(backend: LlamaBackend) -> dict[str, Any]:
    """Products with experts, those of them that the processor computes, and what was read."""
    if not backend.mixture:
        return {}
    operations = backend._hooks.operations(backend.context, whole=True)  # type: ignore[union-attr]
    products = [one for one in operations if operation_at(one).op in mixture.USERS]
    wanted, hits, read = backend.mixture.memory.counted
    return {"products": len(products), "here": sum(map(is_here, products)), "hits": f"{hits}/{wanted}", "read": read}


def numbers(out: str, times: int = 1, rows: Sequence[int] = ROWS, sessions: int = 1, **options: Any) -> dict[str, Any]:
    """Logits, as often as asked for."""
    with loaded(sessions=sessions, **options) as backend:
        np.save(out, np.stack([logits_of(backend, rows, sessions) for _ in range(times)]))
        return report(backend)


def mac(*given: Any) -> Machine:
    """This machine, as if its GPU shared its memory, and computing experts there had been tried."""
    machine = this_machine(*given)
    gpus = tuple(replace(gpu, shared=True, pools=True) for gpu in machine.gpus)
    return replace(machine, platform="darwin", gpus=gpus)


def streamed(
    out: str, path: str, device: str, gpu_layers: int, room: int, rows: Sequence[int] = ROWS
) -> dict[str, Any]:
    """As on a Mac: layers are read to slots in memory of this process, in which the device computes.

    Args:
        room: bytes beside the least memory.
    """

    options = OPTIONS | {"gpu_layers": gpu_layers}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader, "this_machine", mac)
        patch.setattr("edgespec.machine.memory.private_memory", lambda: 0)
        try:
            engine.load(path, memory=1, **options)
        except NoRoom as error:
            least = parse_size(str(error).split("at least ")[1].split(" (")[0])
        with closing(engine.load(path, memory=least + room, **options)) as backend:
            assert backend._hooks._own.only_here  # type: ignore[union-attr]
            np.save(out, np.stack([logits_of(backend, rows) for _ in range(2)]))
            return {"streamed": len(backend.plan.streamed), "kept": backend.plan.pinned_bytes}  # type: ignore[union-attr]


def text_of(
    backend: LlamaBackend, planner: Planner, prompt: str = TEXT, sampling: SamplingParams | None = None, **options: Any
) -> list[tuple[int, float]]:
    """Tokens of a text, and how likely they were."""
    found, options = list[tuple[int, float]](), {"max_tokens": 24, "budget": 6, "stop_ids": frozenset()} | options
    ids = backend.vocab.encode(prompt, add_bos=False, parse_special=False)
    with closing(planner), closing(backend.open()) as session:
        writing = generation_of(backend, planner, ids, sampling, session=session, log_probs=0, **options)
        for step in writing.steps():
            found += zip(step.tokens, [one.log_prob for one in step.log_probs or ()], strict=True)
    return found


def drafts(out: str, **options: Any) -> dict[str, Any]:
    """A text with copied drafts."""
    with loaded(**options) as backend:
        np.save(out, np.array([text_of(backend, SssdPlanner())]))
        return report(backend)


def exact(
    out: str,
    path: str,
    device: str,
    gpu_layers: int,
    tokens: int = 24,
    planners: Sequence[str] = ("none",),
    draft: str | None = None,
) -> dict[str, Any]:
    """Texts in a row class, by each of the planners; the draft is the processor's, and further tokens cost nothing."""
    row_classes.SIZES, row_classes.LARGER, row_classes.CONTEXTS = (1, 2, 4, 7), (), (24,)
    options, texts, rows = OPTIONS | {"kv_type": "f16"}, list[Any](), dict[str, dict[int, int]]()
    asked = options | {"exact": "narrow", "gpu_layers": gpu_layers}
    with closing(engine.load(path, **asked)) as target, ExitStack() as opened:
        found = apply_row_class(target, path, "narrow", remember=False)
        drafts = [opened.enter_context(closing(engine.load(draft, **options, gpu_layers=0)))] if draft else []
        passes = before_passes(target, lambda batch: len(batch[0].token_ids) * (not batch[0].prompt))
        for name in planners:
            texts.append([])
            for sampling in SAMPLINGS:
                pace = given((1e3, 0.0), (1e-6, 0.0)) if name == "auto" else None
                planner = make_planner(name, [target, *drafts], state=pace)
                texts[-1] += text_of(target, planner, SHORT, sampling, budget=16, max_tokens=tokens)
            rows[name] = Counter(filter(None, passes))
            passes.clear()
            if name != "none" and rows[name].keys() <= {1}:
                raise AssertionError(f"no pass with draft tokens: {rows}")
    np.save(out, np.array(texts))
    return {"device": device, "classes": [(one.least, one.most) for one in found], "rows": rows}


def saved(out: str, **options: Any) -> dict[str, Any]:
    """Logits after a session that was saved and read again; the first ones are those without."""
    with loaded(**options) as backend:
        found, file = list[Any](), Path(out).with_suffix(".session")
        node = np.zeros(1, np.int32)
        for again in (False, True):
            session = backend.open()
            if again:
                session.load(file)
            else:
                prefill(backend, session, list(range(5, 60)))
                session.save(file)
            found.append(backend.forward([Work(session, node + 9, node - 1, node)])[0].row(0))
            session.close()
        np.save(out, np.stack(found))
        return report(backend)


def again(out: str, **options: Any) -> dict[str, Any]:
    """Logits of a model that is closed and loaded again."""
    found = list[Any]()
    for _ in range(2):
        with loaded(**options) as backend:
            found.append(logits_of(backend))
            reported = report(backend)
    np.save(out, np.stack(found))
    return reported


def planned(
    out: str, path: str, room: int, gpu_memory: str | None = None, on_a_mac: bool = False, **unused: Any
) -> dict[str, Any]:
    """Logits with what the planner chooses, in `room` bytes more than the model needs at least."""
    with pytest.MonkeyPatch.context() as patch:
        if on_a_mac:
            patch.setattr(loader, "this_machine", mac)
            patch.setattr("edgespec.machine.memory.private_memory", lambda: 0)
        memory = least(path) + room
        with closing(engine.load(path, memory=memory, gpu_memory=gpu_memory, **OPTIONS)) as backend:
            if not (backend.plan and backend.plan.on_devices):
                raise AssertionError(f"no pools of the device: {backend.notes}")
            np.save(out, np.stack([logits_of(backend)]))
            return report(backend) | {"notes": list(backend.notes)}


def least(path: str) -> int:
    """Bytes of memory that a model needs without a device."""
    try:
        engine.load(path, memory=1, gpu_layers=0, **OPTIONS)
    except NoRoom as error:
        return parse_size(str(error).partition("at least ")[2].partition(" (")[0])
    raise AssertionError("a byte of memory is enough")


CASES = {case.__name__: case for case in (numbers, streamed, drafts, exact, saved, again, planned)}


if __name__ == "__main__":
    print(json.dumps(CASES[sys.argv[1]](**json.loads(sys.argv[2]))))
