"""Real models on real machines: every automatic plan is one that no check refuses, and within the machine's limits.

Nothing is loaded: llama.cpp computes its buffers from the header of a file without weights.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml
from machines import MACHINES

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")

from edgespec.backends.llamacpp.engine import engine
from edgespec.backends.llamacpp.memory import planning
from edgespec.backends.llamacpp.memory.gpu import shared_bytes
from mapped_device import compute

from edgespec.errors import NoRoom
from edgespec.loop.engines import LoadOptions
from edgespec.machine.this_machine import Machine
from edgespec.models.registry import BUILT_IN, read_models
from edgespec.models.shapes import file_of
from edgespec.weights.plan import SAFETY, Plan, Tensor, count_layers, divide, layers_on_gpu

TOKENIZER = 30 << 20  # bytes
KNOWN = {entry.name: entry for entry in read_models(BUILT_IN)}
OTHERS: dict[str, Any] = yaml.safe_load((Path(__file__).parent / "published_shapes.yaml").read_text())
HYBRIDS = ("qwen3-next-80b-a3b", SLOWEST := "falcon-h1-34b")  # whose buffers take llama.cpp seconds
MODELS = (
    "llama-3.1-8b", "gemma-3n-e4b", "qwen3-14b", "gpt-oss-20b", "mistral-small-3.2-24b", "gemma-3-27b",
    "qwen3-30b-a3b-2507", "command-r-35b", "mixtral-8x7b", "llama-3.3-70b", "qwen2.5-72b", "gpt-oss-120b",
    "mistral-large-123b", *HYBRIDS,
)  # fmt: skip


def shape_of(name: str) -> Any:
    return OTHERS[name] if name in OTHERS else KNOWN[name].files[KNOWN[name].target].shape


def draft_of(name: str) -> Any:
    entry = KNOWN[name if name in KNOWN and KNOWN[name].draft else "qwen3-14b"]
    return entry.files[entry.draft or ""].shape


@pytest.fixture(scope="module")
def path_of() -> Iterator[Callable[[Any], str]]:
    paths, stack = dict[str, str](), ExitStack()

    def path_of(shape: Any) -> str:
        key = json.dumps(shape)
        if key not in paths:
            paths[key] = stack.enter_context(file_of(shape))
        return paths[key]

    with stack, pytest.MonkeyPatch.context() as patch:
        really = planning.rehearse
        buffers = cache(lambda path, size: really(path, [size], 1 << 60)[1][0])
        patch.setattr(planning, "loaded_tensors", cache(planning.loaded_tensors))
        patch.setattr(
            planning,
            "rehearse",
            lambda path, sizes, free, target="": (TOKENIZER, [buffers(path, size) for size in sizes]),
        )
        yield path_of


def some(first: Sequence[Any], number: int, whole_grid: bool, step: int) -> list[tuple[Any, Machine]]:
    """The machines of `machines.py` with each of two cases: all, else a few of which each model has others.

    `step`: how many models there are, so that together they have all."""
    every = list(product(first, MACHINES.values()))
    return every if whole_grid else every[number % step :: step]


@pytest.mark.parametrize(
    ("number", "name"),
    [pytest.param(i, name, marks=[pytest.mark.exhaustive] * (name == SLOWEST)) for i, name in enumerate(MODELS)],
)
def test_every_plan_is_within_the_limits(
    number: int, name: str, path_of: Callable[[Any], str], whole_grid: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name in HYBRIDS:
        monkeypatch.setattr(planning, "CHUNKS", (512,))
    planned = 0
    for draft, machine in some([False, True], number, whole_grid, len(MODELS)):
        path, drafts = path_of(shape_of(name)), (path_of(draft_of(name)),) if draft else ()
        try:
            found = engine.plan(path, LoadOptions(exact="off", draft_files=drafts, budget=16), machine)
        except NoRoom:
            with pytest.raises(NoRoom):  # nor without the GPU
                engine.plan(path, LoadOptions(exact="off", draft_files=drafts, budget=16, gpu_layers=0), machine)
            continue
        planned += 1
        check(found, path, machine)
    assert planned >= (12 if whole_grid else 1)


def check(found: Any, path: str, machine: Machine) -> None:
    weights: Plan | None = found.weights
    if weights:
        taken = weights.needed + weights.pinned_bytes + weights.slots * weights.slot_bytes + max(0, weights.pool_bytes)
        assert taken <= int(machine.free * (1 - SAFETY))
    assert ("device" in found.ways[-1]) == bool(found.gpu_layers or "long passes use it" in str(found.notes))
    if not found.gpu_layers:
        return
    _, there = sides(found, path)
    [buffers] = planning.rehearse(path, [found.size], 0)[1]
    kept = buffers.compute + buffers.caches_on_gpu(found.gpu_layers)
    if machine.platform != "darwin":
        assert sum(tensor.size for tensor in there) + kept <= sum(gpu.free for gpu in machine.gpus)
        return
    assert shared_bytes(planning.loaded_tensors(path), found.gpu_layers, weights) + kept <= machine.gpus[0].free


def kept_off(found: Any) -> tuple[bytes, ...]:
    return tuple(str(found.ways[-1].get("kept_off", "")).encode().split())


def sides(found: Any, path: str) -> tuple[list[Tensor], list[Tensor]]:
    return divide(planning.loaded_tensors(path), found.gpu_layers, kept_off(found))


@pytest.mark.parametrize(
    ("number", "name"),
    [
        pytest.param(i, name, marks=[pytest.mark.exhaustive] * (i % 2))
        for i, name in enumerate(MODELS)
        if name not in HYBRIDS
    ],
)
def test_weights_caches_and_passes_fit_on_their_side(
    number: int, name: str, path_of: Callable[[Any], str], whole_grid: bool
) -> None:
    """llama.cpp computes what a pass takes of each side, with a second device that has memory of its own."""
    path, planned = path_of(shape_of(name)), 0
    for length, machine in some([4096, 32768], number, whole_grid, len(MODELS) - len(HYBRIDS)):
        try:
            found = engine.plan(path, LoadOptions(exact="off", budget=16, context_length=length), machine)
        except NoRoom:
            continue
        if not found.gpu_layers:
            continue
        planned += 1
        here, there = sides(found, path)
        [buffers] = planning.rehearse(path, [found.size], 0)[1]
        caches = buffers.caches_on_gpu(found.gpu_layers)
        helps = "op_offload" not in found.ways[-1]
        passes = compute(path, found.gpu_layers, kept_off(found), found.size, helps)
        on_gpu, on_processor = passes["MAPPED"], passes["CPU"]
        needed = machine.used + TOKENIZER + buffers.here + on_processor + sum(buffers.caches)
        shared, weights = machine.platform == "darwin", found.weights
        needed += on_gpu if shared else -caches
        if weights:
            assert needed <= weights.needed
        elif planning.can_stream(machine):
            tensors = planning.loaded_tensors(path) if shared else here
            assert needed + sum(tensor.size for tensor in tensors) <= machine.free
        weights_there = sum(tensor.size for tensor in there)
        if shared:
            weights_there = shared_bytes(planning.loaded_tensors(path), found.gpu_layers, weights)
        assert weights_there + caches + on_gpu <= sum(gpu.free for gpu in machine.gpus)
    # Where experts come from the disk, which those of the largest mixture do nearly everywhere, no GPU computes.
    assert planned >= (10 if whole_grid else 1) or name == "gpt-oss-120b"


@pytest.mark.parametrize(
    ("name", "machine", "least"),
    [
        ("gemma-3-27b", "macbook-24", 20),
        ("llama-3.1-8b", "macbook-8", 4),
    ],
)
def test_a_mac_uses_its_gpu(name: str, machine: str, least: int, path_of: Callable[[Any], str]) -> None:
    path = path_of(shape_of(name))
    found = engine.plan(path, LoadOptions(exact="off"), MACHINES[machine])
    count = count_layers(planning.loaded_tensors(path))
    assert least <= layers_on_gpu(found.gpu_layers, count) <= count


@pytest.mark.parametrize(
    ("name", "machine"),
    [
        ("gpt-oss-20b", "macbook-24 with a browser"),  # a mixture that Metal could hold, and memory cannot
        ("qwen3-30b-a3b-2507", "macbook-32 with a browser"),
        ("gpt-oss-20b", "macbook-16"),
    ],
)
def test_a_macs_processor_computes_a_mixture_that_does_not_fit(
    name: str, machine: str, path_of: Callable[[Any], str]
) -> None:
    found = engine.plan(path_of(shape_of(name)), LoadOptions(exact="off"), MACHINES[machine])
    assert found.gpu_layers == 0
    assert found.weights.pools
    assert not found.weights.streamed


@pytest.mark.parametrize(
    ("name", "machine", "gpu_layers"),
    [
        ("gpt-oss-20b", "macbook-24 with a browser", -1),
        ("qwen3-30b-a3b-2507", "macbook-32 with a browser", -1),
        ("gpt-oss-20b", "macbook-16", -1),
        ("gpt-oss-120b", "studio-64", 0),  # 48 GiB at most, of 53
    ],
)
def test_a_macs_gpu_computes_it_where_it_was_tried_and_holds_as_many_experts(
    name: str, machine: str, gpu_layers: int, path_of: Callable[[Any], str]
) -> None:
    path, known = path_of(shape_of(name)), MACHINES[machine]
    before, found = (
        engine.plan(path, LoadOptions(exact="off"), replace(known, gpus=(replace(known.gpus[0], pools=tried),)))
        for tried in (False, True)
    )
    assert (before.gpu_layers, found.gpu_layers) == (0, gpu_layers)
    assert bool(found.weights.on_devices) == (gpu_layers < 0)
    assert found.weights.slots_of_experts >= before.weights.slots_of_experts
    check(
        found, path, replace(known, gpus=(replace(known.gpus[0], free=known.gpus[0].free - found.weights.pool_bytes),))
    )


def test_all_fits_into_memory_but_not_into_what_metal_allows(path_of: Callable[[Any], str]) -> None:
    """As many last layers as Metal holds; nothing is read from disk."""
    path, machine = path_of(shape_of("qwen2.5-72b")), MACHINES["studio-64"]
    found = engine.plan(path, LoadOptions(exact="off"), replace(machine, free=62 << 30, gpus=machine.gpus))
    few = replace(machine.gpus[0], free=40 << 30, limit=40 << 30)
    part = engine.plan(path, LoadOptions(exact="off"), replace(machine, free=62 << 30, gpus=(few,)))
    assert (found.gpu_layers, found.weights) == (-1, None)
    assert part.weights is None
    assert 60 < part.gpu_layers < 80
