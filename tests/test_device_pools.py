"""Experts of a mixture in pools on a device: as with all of them there, to the bit.

The device is this processor by another name (`mapped_device.py`), whose memory is its own; where the pools are `shared`
it computes in this program's, as a Mac's GPU does.
"""

import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
pytest.importorskip("gguf", reason="gguf is not installed: pip install 'edgespec[convert]'")

import mapped_device
from edgespec.backends.llamacpp import engine
from edgespec.backends.llamacpp.backend import LlamaBackend
from edgespec.backends.llamacpp.ggml import callback
from edgespec.backends.llamacpp.ggml.ggml_tensor import GgmlTensor, Operation, is_here, operation_at
from edgespec.backends.llamacpp.memory import mixture, planning, pools
from mixture_files import EXPERTS, KINDS, LAYERS, mixtures
from test_mixture_llamacpp import logits_of

from edgespec.errors import ModelError
from edgespec.loop.passes import prefill
from edgespec.machine.this_machine import Gpu
from edgespec.weights import direct_io
from edgespec.weights.expert_memory import ExpertMemory
from edgespec.weights.plan import Plan, Pool, make_plan

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is locked and dropped on Linux only")
__all__ = ["mixtures"]

NAME = mapped_device.NAME.decode()
OPTIONS: dict[str, Any] = {"context_length": 512, "threads": 2, "budget": 32, "kv_type": "f16", "exact": "off"}
Load = Callable[..., LlamaBackend]


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch, mixtures: Any) -> Iterator[Load]:
    """Loads a mixture with layers on the device, and their experts in pools there and in memory."""
    made = list[LlamaBackend]()
    mapped_device.found(monkeypatch)
    monkeypatch.setattr(engine, "find_gpus", lambda: [Gpu(NAME, False, 1 << 40)])

    def get(
        kind: str,
        slots: int = EXPERTS + 3,
        here: int = EXPERTS,
        there: int = LAYERS,
        pooled: int = LAYERS,
        shared: bool = False,
    ) -> LlamaBackend:
        def plan_memory(planner: planning.MemoryPlanner, size: Any, *given: Any) -> tuple[Plan | None, Any, list[str]]:
            plan = make_plan(planner.tensors, 1 << 19, 0, on_device=there, experts_here=True)
            assert plan
            first = LAYERS - min(there, pooled)
            on_disk = (Pool(tuple(range(first if shared else LAYERS)), here),) if first or not shared else ()
            device_pools = (Pool(tuple(range(first, LAYERS)), slots, NAME),)
            plan = replace(plan, experts=EXPERTS, pools=on_disk + device_pools * shared)
            return (plan if shared else replace(plan, device_pools=device_pools)), size, []

        with monkeypatch.context() as patch:
            patch.setattr(planning.MemoryPlanner, "plan_memory", plan_memory)
            made.append(engine.load(str(mixtures[kind]), gpu_layers=there + 1, memory="1G", **OPTIONS))
        return made[-1]

    yield get
    for backend in made:
        backend.close()


shares = pytest.mark.parametrize("shared", [False, True])


@pytest.fixture
def expected(mixtures: Any) -> Callable[[str], list[Any]]:
    def get(kind: str) -> list[Any]:
        backend = engine.load(str(mixtures[kind]), repack=False, **OPTIONS)
        found = logits_of(backend)
        backend.close()
        return found

    return get


def check(backend: LlamaBackend, right: list[Any]) -> None:
    for row, one in zip(logits_of(backend), right, strict=True):
        assert np.array_equal(row, one)


@pytest.mark.covering(1)
@shares
@pytest.mark.parametrize("there", [LAYERS, 1])
@pytest.mark.parametrize(("slots", "here"), [(EXPERTS, EXPERTS), (EXPERTS + 3, 2 * EXPERTS)])
@pytest.mark.parametrize("kind", KINDS)
def test_the_numbers_are_those_of_the_model_in_memory(kind, slots, here, there, shared, on_device, expected):
    right, backend = expected(kind), on_device(kind, slots, here, there, shared=shared)
    memory = backend.mixture.memory
    assert len(memory.on_devices) == there
    for _ in range(2):  # with empty pools, and as they were left
        check(backend, right)
    assert 0 < memory.hits < memory.wanted
    if kind == "qwen3 moe" and here > EXPERTS and not shared:  # whose tokens use more experts
        assert memory.predicted


@shares
@pytest.mark.parametrize("kind", KINDS)
def test_the_processor_computes_the_experts_for_which_a_device_has_no_pool(kind, shared, on_device, expected):
    """Between other operations of the same layers, which the device computes."""
    backend = on_device(kind, pooled=1, shared=shared)
    operations = backend._hooks.operations(backend.context, whole=True)
    products = [one for one in operations if operation_at(one).op in mixture.USERS]
    assert sum(map(is_here, products)) == 2 * sum(not is_here(one) for one in products)
    check(backend, expected(kind))


@shares
def test_devices_compute_the_experts_of_their_layers(shared, on_device):
    backend = on_device("gpt-oss", there=2, shared=shared)
    operations = backend._hooks.operations(backend.context, whole=True)
    products = [one for one in operations if operation_at(one).op in mixture.USERS]
    assert [is_here(one) for one in products] == [True] * 6 + [False] * 12


@shares
def test_a_load_reads_no_experts(shared, on_device, mixtures, monkeypatch):
    """Passes that look at the graph would read those that they choose, from the mapped file."""
    real, left_out = callback.skip_rows, list[int]()
    monkeypatch.setattr(callback, "skip_rows", lambda *given: left_out.append(given[-1]) or real(*given))
    backend = on_device("qwen3 moe", there=1, shared=shared)
    assert left_out == [0] * 3 * (3 + 2 + 2)  # products of layers here: before layers are moved, then, and at last
    assert backend.mixture.memory.bytes_read == 0
    plain, rows = engine.load(str(mixtures["qwen3 moe"]), repack=False, **OPTIONS), list[Any]()
    for one in (plain, backend):  # llama.cpp uses its last graph again if it can, for a pass over one token
        session = one.open()
        last = prefill(one, session, [0], want_last=True)
        rows.append(last[0].row(last[1]))
        session.close()
    plain.close()
    assert np.array_equal(*rows)


@shares
def test_what_is_on_the_device_is_read_once(shared, on_device):
    backend = on_device("mixtral", slots=LAYERS * EXPERTS, shared=shared)
    logits_of(backend)
    read = backend.mixture.memory.bytes_read
    right = logits_of(backend)
    assert backend.mixture.memory.bytes_read == read
    check(backend, right)


@shares
@pytest.mark.parametrize("layer", range(LAYERS))
def test_an_operation_that_is_not_reported_fails_the_pass(layer, shared, on_device, expected):
    """As if llama.cpp had changed its graph: an expert's number is not that of its slot."""
    backend = on_device("qwen3 moe", shared=shared)
    before = backend.mixture._before
    stops = [name for name in before if f"-{layer}".encode() in name]
    assert len(stops) == 1
    before.difference_update(stops)
    with pytest.raises(ModelError, match=r"would be computed before its experts are chosen"):
        logits_of(backend)
    for session in [*backend.sessions]:
        session.close()
    before.update(stops)
    check(backend, expected("qwen3 moe"))


@pytest.mark.parametrize("uploads", [0, 1, 4, 20])
def test_an_expert_that_is_not_there_completely_is_missing(uploads, on_device, expected, monkeypatch):
    backend, real, left = on_device("mixtral"), pools.DevicePools.upload, uploads

    def upload(*given: Any) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt
        real(*given)

    with monkeypatch.context() as patch:
        patch.setattr(pools.DevicePools, "upload", upload)
        with pytest.raises(KeyboardInterrupt):
            logits_of(backend)
    for session in [*backend.sessions]:
        session.close()
    check(backend, expected("mixtral"))


@shares
def test_a_disk_error_in_the_middle(shared, on_device, expected, monkeypatch):
    backend, real, left = on_device("mixtral", shared=shared), direct_io.read_unaligned, 7

    def read(*given: Any) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError("the disk is on fire")
        real(*given)

    with monkeypatch.context() as patch:
        patch.setattr(direct_io, "read_unaligned", read)
        with pytest.raises(ModelError, match="cannot be read: the disk is on fire"):
            logits_of(backend)
    for session in [*backend.sessions]:
        session.close()
    check(backend, expected("mixtral"))


@shares
def test_experts_stay_in_memory_where_a_device_cannot_have_them(shared, on_device, expected, monkeypatch):
    """It has no memory left, or its graph has operations that nobody knows."""
    right, library = expected("gpt-oss"), pools.ggml_base()
    with monkeypatch.context() as patch:
        patch.setattr(library, "ggml_backend_buft_alloc_buffer", lambda kind, size: None)
        patch.setattr(library, "ggml_backend_buft_get_max_size", lambda kind: 0)
        full = on_device("gpt-oss", shared=shared)
    learn = mixture.Mixture.learn
    with monkeypatch.context() as patch:
        patch.setattr(
            mixture.Mixture, "learn", lambda one, found: "of that" if one.memory.on_devices else learn(one, found)
        )
        unknown = on_device("gpt-oss", shared=shared)
    for backend, why in ((full, f"{NAME} has no room for a pool of [0-9]+ "), (unknown, "of that")):
        assert not backend.mixture.memory.on_devices
        assert not backend.plan.on_devices
        [note] = [note for note in backend.notes if note.startswith(f"{NAME} gets no experts: ")]
        assert re.search(why, note)
        check(backend, right)


@pytest.mark.parametrize("there", [LAYERS, 2])
def test_factors_of_experts_are_those_of_the_experts(there, on_device, expected):
    """Experts of a layer stay in the page cache if another device than their own needs their numbers later."""
    backend = on_device("scaled", there=there)
    assert (backend.mixture is not None) == (there == LAYERS)
    check(backend, expected("scaled"))


def test_another_devices_copy_of_the_numbers_is_known_by_its_name(on_device, monkeypatch):
    """Which llama.cpp makes once they are rewritten."""
    backend = on_device("gpt-oss")
    addresses, real = backend._hooks.operations(backend.context, whole=True), operation_at
    numbers = next(one for one in map(real, addresses) if one.op == mixture.PRODUCT).names[2]
    later = Operation(b"later", b"GET_ROWS", (0, 0), (b"factors", b"CPU#" + numbers + b"#0"))
    monkeypatch.setattr(mixture, "operation_at", lambda address: real(address) if address else later)
    assert mixture.Mixture(backend.mixture.memory, 1).learn(addresses) == ""
    why = mixture.Mixture(backend.mixture.memory, 1).learn([*addresses, 0])
    assert why == "later needs the experts' numbers when they are gone"


def test_tensors_get_back_what_they_had(on_device):
    backend = on_device("gpt-oss")
    places = backend.mixture.memory._devices.places
    tensors = [GgmlTensor.from_address(address) for place in places.values() for address in place.weights]
    assert len(tensors) == LAYERS * 6
    before = backend.mixture.memory._devices._before
    moved = [bytes(tensor) for tensor in tensors]
    assert not set(moved) & {content for _, content in before}
    logits_of(backend)
    assert [bytes(tensor) for tensor in tensors] == moved


def test_a_device_computes_in_the_memory_to_which_experts_are_read(on_device):
    """There is no second copy, and the device gives the memory back before it goes."""
    memory = (backend := on_device("gpt-oss", slots=LAYERS * EXPERTS, shared=True)).mixture.memory
    operations = map(operation_at, backend._hooks.operations(backend.context, whole=True))
    sources = [one.sources[mixture.USERS[one.op].source] for one in operations if one.op in mixture.USERS]
    assert {GgmlTensor.from_address(one).data for one in sources} == {memory.base(0, weight) for weight in range(6)}
    logits_of(backend)
    assert memory.bytes_read <= sum(tensor.size for layer in memory.layers for tensor in layer.tensors)
    release, there = memory.release, list[bool]()
    memory.release = lambda: there.append(bool(memory._places)) or release()
    backend.close()
    assert there == [True]


def test_slots_keep_what_a_layer_that_is_computed_has_in_them(on_device, expected, monkeypatch):
    """Threads fill them while the device reads: from the choice of its experts until those of the next layer."""
    backend, used, read_ahead = on_device("qwen3 moe", EXPERTS + 2, shared=True), (-1, set[int]()), list[int]()
    want, start = ExpertMemory.want, ExpertMemory._start

    def wanted(memory: ExpertMemory, number: int, experts: Any, prompt: Any = None) -> Any:
        nonlocal used
        used = -1, set()  # the device has computed all layers before
        slots = want(memory, number, experts, prompt)
        memory.wait(number)  # threads that are done guard no slot
        used = number, {int(slots[expert]) for expert in experts}
        return slots

    def started(memory: ExpertMemory, number: int, reads: Any) -> None:
        if used[0] >= 0 and reads:
            assert number == used[0] + 1
            assert not used[1] & {slot for _, slot in reads}
            read_ahead.extend(slot for _, slot in reads)
        start(memory, number, reads)

    monkeypatch.setattr(ExpertMemory, "want", wanted)
    monkeypatch.setattr(ExpertMemory, "_start", started)
    check(backend, expected("qwen3 moe"))
    assert read_ahead


def test_a_layer_is_never_computed_with_another_ones_experts(on_device):
    """As if the device computed in an order in which a layer's last product comes behind the next layer's first."""
    one = on_device("mixtral", shared=True).mixture
    name = next(name for name, (number, _) in one._products.items() if number == 0 and name not in one._first)
    one.begin(prompt=False, rows=1, padding=0)
    one._chosen = 1
    with pytest.raises(ModelError, match=f"{name.decode()} would be computed when its experts are gone"):
        one.asked(name, 0, True)
