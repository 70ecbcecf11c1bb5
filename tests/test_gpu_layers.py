"""How many layers go to a GPU that llama.cpp reports: a fake list of devices; and the override, on a real model."""

import ctypes
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")

import mapped_device
from edgespec.backends.llamacpp import engine as engine_module
from edgespec.backends.llamacpp.engine import load
from edgespec.backends.llamacpp.ggml.files import load_model, size_lines
from edgespec.backends.llamacpp.memory import gpu
from edgespec.backends.llamacpp.memory import planning as memory
from edgespec.backends.llamacpp.memory.gpu import (
    NO_LAYERS,
    RESERVE,
    Buffers,
    auto_layers,
    find_gpus,
    shared_bytes,
)

from edgespec.errors import NoRoom, UsageError
from edgespec.loading import pair as loading
from edgespec.loading.pair import open_backends
from edgespec.loop import engines
from edgespec.loop.backend import Work
from edgespec.loop.engines import Engine, LoadOptions
from edgespec.loop.passes import prefill
from edgespec.machine.measurements import OFF, remember
from edgespec.machine.memory import parse_size
from edgespec.machine.this_machine import Gpu, this_machine
from edgespec.models.registry import Defaults, Entry
from edgespec.weights import experts
from edgespec.weights.experts import LEAST_ON_DEVICE
from edgespec.weights.plan import MARGIN, SAFETY, Plan, Pool, Tensor, divide, layers_of_gpus, make_plan
from edgespec.weights.ring import CANNOT_STREAM

MIB = 1 << 20
LAYER, OUTPUT = 100 * MIB, 50 * MIB
WORK = 10 * MIB  # of kernels that sort the chosen experts
COPY = LAYER // 2  # the largest weight of a layer
NOTHING = Buffers(0, 0, ())


def tensors(order: list[int] | None = None, output: bool = True) -> list[Tensor]:
    """Ten layers, the embedding and the output, in the order of a file."""
    names = [("token_embd.weight", OUTPUT), *[("output.weight", OUTPUT)] * output, ("output_norm.weight", 0)]
    names += [(f"blk.{i}.{part}.weight", LAYER // 2) for i in order or range(10) for part in ("attn", "ffn")]
    found, start = [], 4096
    for name, size in names:
        found.append(Tensor(name, 0, start, size))
        start += size
    return found


def own(*rooms: int) -> list[Gpu]:
    """GPUs with so much memory for layers, and for a copy of another layer's weight."""
    return [Gpu(f"GPU{i}", False, int((room + COPY + RESERVE) / 0.95) + 100) for i, room in enumerate(rooms)]


def fits(kept: int) -> Plan | None:
    return None


def test_no_gpu() -> None:
    assert auto_layers([], tensors(), NOTHING, 0, fits, platform="linux") == 0
    assert find_gpus() == [] or all(gpu.free > 0 for gpu in find_gpus())


@pytest.mark.parametrize(
    ("room", "layers"),
    [
        (10 * LAYER + OUTPUT, -1),
        (10 * LAYER + OUTPUT - COPY - MIB, 10),  # the output and nine layers
        (3 * LAYER + OUTPUT, 4),
        (LAYER + OUTPUT, 2),
        (LAYER, 0),  # not the output alone
        (-MIB, 0),
    ],
)
def test_as_many_as_fit(room: int, layers: int) -> None:
    assert auto_layers(own(room), tensors(), NOTHING, 0, fits, platform="linux") == layers
    assert (
        auto_layers(own(room + 70 * MIB), tensors(), Buffers(0, 70 * MIB, ()), 0, fits, platform="linux") == layers
    )  # beside caches and buffers
    assert (
        auto_layers(own(room), tensors(output=False), NOTHING, 0, fits, platform="linux") == layers
    )  # the embedding is the output


def test_a_layers_cache_lies_with_it() -> None:
    """Layers that stay here take no memory of the GPU's for theirs."""
    buffers = Buffers(0, 0, (0,) * 6 + (LAYER // 4,) * 4)
    whole = 10 * LAYER + OUTPUT + LAYER
    assert auto_layers(own(whole), tensors(), buffers, 0, fits, platform="linux") == -1
    assert auto_layers(own(whole - COPY - MIB), tensors(), buffers, 0, fits, platform="linux") == 10
    assert auto_layers(own(5 * LAYER + OUTPUT), tensors(), buffers, 0, fits, platform="linux") == 5
    assert buffers.caches_on_gpu(3) == LAYER // 2


def test_the_draft_first_if_it_is_small() -> None:
    room = 4 * LAYER + OUTPUT
    assert auto_layers(own(room), tensors(), NOTHING, LAYER, fits, platform="linux") == 4
    assert auto_layers(own(room), tensors(), NOTHING, 4 * LAYER, fits, platform="linux") == 5


def test_a_layer_is_not_divided_among_gpus() -> None:
    room = 5 * LAYER + OUTPUT + COPY
    two = [Gpu(f"GPU{i}", False, int((room // 2 + RESERVE) / 0.95) + 100) for i in range(2)]
    assert auto_layers(two, tensors(), NOTHING, 0, fits, platform="linux") == 5


def plans(room: int, order: list[int] | None = None) -> Any:
    return lambda kept: make_plan(tensors(order), room, 0, **memory.OWN)


def test_a_mac_where_everything_fits() -> None:
    total = 10 * LAYER + OUTPUT  # the embedding is in front, and of no device
    shared = [Gpu("Metal", True, total)]
    assert auto_layers(shared, tensors(), NOTHING, 0, plans(2 * total), platform="linux") == -1
    assert (
        auto_layers(shared, tensors(), Buffers(0, MIB, ()), 0, plans(2 * total), platform="linux") == 0
    )  # not what the GPU can hold


def test_a_mac_whose_gpu_holds_less_than_the_memory() -> None:
    """As many last layers as fit, with the draft; the output lies in front of all layers, so it stays here."""

    def layers(limit: int, drafts: int = 0) -> int:
        metal = [Gpu("Metal", True, limit + COPY)]
        return auto_layers(metal, tensors(), NOTHING, drafts, plans(100 * LAYER), platform="darwin")

    total = 10 * LAYER + OUTPUT
    limits = [(total,), (total - COPY - MIB,), (4 * LAYER,), (4 * LAYER, LAYER), (LAYER - MIB,)]
    assert [layers(*limit) for limit in limits] == [-1, 10, 5, 4, 0]
    cases = [(10, "darwin"), (-1, "darwin"), (10, "linux")]
    assert [gpu.kept_off(None, count, 10, platform=name) for count, name in cases] == [(NO_LAYERS,), (), ()]


def test_a_mac_that_streams() -> None:
    """Streamed layers lie among the GPU's, in slots of its memory: as many layers as that holds, with the output."""
    room, layers = 9 * LAYER, tensors()
    plan = plans(room)(1)
    assert 0 < plan.streamed[-1].index >= 8
    whole = shared_bytes(layers, -1, plan)
    assert whole == plan.pinned_bytes + plan.slots * plan.slot_bytes
    assert shared_bytes(layers, 4, plan) == OUTPUT + 3 * LAYER + plan.slots * plan.slot_bytes - sum(
        layer.size for layer in plan.streamed if layer.index >= 7
    )

    def chosen(limit: int, platform: str = "darwin", memory: int = room) -> int:
        metal = [Gpu("Metal", True, limit)]
        return auto_layers(metal, layers, NOTHING, 0, plans(memory), platform=platform)

    assert chosen(whole) == 11
    assert chosen(whole - 1) == 10
    assert chosen(shared_bytes(layers, 4, plan)) == 4
    assert chosen(LAYER) == 0
    assert chosen(20 * LAYER, "linux") == 0  # there such a GPU is left alone
    assert chosen(20 * LAYER, memory=LAYER // 2) == 0  # it does not run at all, which others say
    assert gpu.kept_off(plan, 4, 10, platform="darwin") == ()


def test_what_llama_cpp_gives_to_each_card() -> None:
    """Of 11 places in proportion to free memory; the last is the output's."""
    gpus = [Gpu("CUDA0", False, 8), Gpu("CUDA1", False, 4), Gpu("GPU2", True, 99)]
    assert layers_of_gpus(gpus, -1, 10) == [(8, "CUDA0"), (2, "CUDA1")]
    assert layers_of_gpus(gpus, 4, 10) == [(3, "CUDA0"), (0, "CUDA1")]
    assert layers_of_gpus(gpus, 0, 10) == []
    assert layers_of_gpus(gpus[2:], 4, 10) == [(3, "GPU2")]


def test_experts_stay_here() -> None:
    """A GPU with layers gets none of their experts, and those count here."""
    large = [Tensor(f"blk.{i}.ffn_up_exps.weight", 0, 8192 + (i + 100) * 4 * LAYER, 3 * LAYER) for i in range(10)]
    both = [*tensors(), *large]
    plan = make_plan(both, 20 * LAYER, 0, on_device=10, experts_here=True)
    assert plan.cached_bytes == 30 * LAYER
    assert plan.streamed == ()
    assert make_plan(both, 20 * LAYER, 0, on_device=10) is None  # with all of its layers it leaves next to nothing
    plan = make_plan(both, 20 * LAYER, 0, on_device=3)
    assert plan.cached_bytes == 21 * LAYER
    chosen = replace(plan, pools=(Pool(tuple(range(10)), 20),))
    assert gpu.kept_off(chosen, 0, 10, platform="linux") == ()
    (pattern,) = gpu.kept_off(chosen, 4, 10, platform="linux")
    assert next(iter(gpu.overrides(pattern))).pattern == pattern == gpu.EXPERTS.pattern.encode()


def with_experts() -> list[Tensor]:
    """Ten layers whose experts lie in them, as files have them, and make three quarters of each."""
    found, start = [], 4096
    for i in range(10):
        for part, size in (("attn_q", LAYER // 4), ("ffn_up_exps", 3 * LAYER // 4)):
            found.append(Tensor(f"blk.{i}.{part}.weight", 0, start, size))
            start += size
    return found


@pytest.mark.parametrize(
    ("room", "found", "layers", "buffers", "large"),
    [
        (0, with_experts(), -1, NOTHING, False),  # no GPU
        (11, with_experts(), -1, NOTHING, False),
        (9, with_experts(), -1, NOTHING, True),
        (11, with_experts(), -1, Buffers(0, LAYER, (LAYER // 10,) * 10), True),  # caches and buffers
        (2, with_experts(), 4, NOTHING, True),  # three layers and the output
        (3, with_experts(), 4, NOTHING, False),
        (3, with_experts(), 5, NOTHING, True),
        (4, with_experts(), 4, NOTHING, False),
        (4, [*with_experts(), Tensor("output.weight", 0, 1 << 40, 2 * LAYER)], 4, NOTHING, True),
        (2, tensors(), -1, NOTHING, False),  # no experts
    ],
)
def test_experts_that_a_gpu_cannot_hold(
    room: int, found: list[Tensor], layers: int, buffers: Buffers, large: bool
) -> None:
    assert gpu.experts_too_large(own(room * LAYER) if room else [], found, layers, buffers) == large


def test_biases_of_experts_count_where_their_weights_do() -> None:
    """As gpt-oss has them."""
    both = [*with_experts(), *(Tensor(f"blk.{i}.ffn_up_exps.bias", 1, i * LAYER, LAYER) for i in range(10))]
    off = gpu.kept_off(None, -1, 10, no_experts=True, platform="linux")
    assert off == (gpu.EXPERTS.pattern.encode(),)
    here, _ = divide(both, -1, off)
    plan = make_plan(both, 12 * LAYER, 0, on_device=10, experts_here=True)
    assert plan.pinned_bytes + plan.cached_bytes == sum(tensor.size for tensor in here)


def test_pools_leave_room_for_libraries_whatever_the_memory() -> None:
    """Also where it is tightest."""
    mixture, needed, slots = with_experts(), 3 * LAYER, list[int]()
    layers = experts.find_experts(mixture, 4)
    assert len(layers) == 10
    for room in [*range(0, 8 * LAYER, MIB), *range(8 * LAYER, 13 * LAYER, LAYER // 4)]:
        plan = None
        with suppress(NoRoom):
            plan = memory._plan(mixture, room, needed, WORK, {}, layers)
        if plan is not None:
            used = needed + plan.pinned_bytes + plan.slots * plan.slot_bytes + plan.pool_bytes
            assert used + memory.pool_reserve(room) + WORK <= room
            assert memory.pool_reserve(room) > MARGIN
            slots.append(plan.slots_of_experts)
    assert slots[0] == 0 < slots[-1]
    assert len(set(slots)) > 1


def logits(backend: Any) -> np.ndarray:
    session = backend.open()
    prefill(backend, session, [5, 6, 7])
    found = backend.forward([Work(session, np.array([8, 9], np.int32), np.array([-1, 0], np.int32), np.arange(2))])
    return np.stack([found[0].row(node) for node in range(2)])


def test_the_override_is_llamacpps(smollm2_tiny: Path) -> None:
    """llama.cpp takes the structure as it is made here."""
    assert gpu.overrides(NO_LAYERS) is gpu.overrides(NO_LAYERS)  # made once
    gpu.ggml()  # found by its name on this system
    options = {"tensor_buft_overrides": ctypes.addressof(gpu.overrides(NO_LAYERS)), "n_gpu_layers": 3}
    model = load_model(str(smollm2_tiny), **options)
    assert model
    memory.llama_cpp.llama_model_free(model)


def test_auto_reaches_the_engine(smollm2_tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that this build does not have: llama.cpp computes on the processor all the same, and so the same."""
    plain = load(str(smollm2_tiny), context_length=64)
    assert plain.computing["gpu_layers"] == 0 or find_gpus()
    expected = logits(plain)
    plain.close()
    for free, gpu_memory, layers in ((1 << 40, None, -1), (1 << 40, "1M", 0), (1 << 20, None, 0)):
        monkeypatch.setattr(engine_module, "find_gpus", lambda free=free: [Gpu("GPU0", False, free)])
        backend = load(str(smollm2_tiny), context_length=64, gpu_memory=gpu_memory)
        assert backend.computing["gpu_layers"] == layers  # of 1M no more, whatever is free
        np.testing.assert_array_equal(logits(backend), expected)
        backend.close()
    with pytest.raises(UsageError, match="gpu_layers and gpu_memory both say"):
        load(str(smollm2_tiny), context_length=64, gpu_memory="1G", gpu_layers=2)
    monkeypatch.setattr(engine_module, "find_gpus", list)
    with pytest.raises(UsageError, match="gpu_memory is given, but this llama"):
        load(str(smollm2_tiny), context_length=64, gpu_memory="1G")


def test_a_card_that_cuda_and_vulkan_see_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As llama.cpp uses it; devices whose id is not known are apart."""
    ids = [b"0000:01:00.0", b"0000:02:00.0", None, b"0000:01:00.0", None]

    def describe(device: int, about: Any) -> None:
        about._obj.device_id = ids[device]

    library = SimpleNamespace(
        ggml_backend_dev_count=lambda: 5,
        ggml_backend_dev_get=lambda i: i,
        ggml_backend_dev_type=lambda i: gpu.GPU,
        ggml_backend_dev_memory=lambda *given: None,
        ggml_backend_dev_name=lambda i: f"GPU{i}".encode(),
        ggml_backend_dev_get_props=describe,
    )
    monkeypatch.setattr(gpu, "ggml", lambda: library)
    monkeypatch.setattr(gpu.llama_cpp, "llama_supports_gpu_offload", lambda: True)
    assert [one.name for one in find_gpus()] == ["GPU0", "GPU1", "GPU2", "GPU4"]


def test_the_engines_libraries_describe_a_device() -> None:
    """The structure is llama.cpp's: the processor is a device, too."""
    library = gpu.ggml()
    for i in range(library.ggml_backend_dev_count()):
        device, about = library.ggml_backend_dev_get(i), gpu.Properties()
        library.ggml_backend_dev_get_props(device, ctypes.byref(about))
        assert (about.name, about.type) == (
            library.ggml_backend_dev_name(device),
            library.ggml_backend_dev_type(device),
        )
        assert about.total > 0 or about.type == 3
        assert about.device_id is None or gpu.llama_cpp.llama_supports_gpu_offload()


def test_gpu_memory_in_which_no_layer_fits_is_told(smollm2_tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "find_gpus", lambda: [Gpu("GPU0", False, 1 << 40)])
    for gpu_memory, said in (("120M", ["no layer fits in this gpu_memory, of which 512 MiB are for"]), ("4G", [])):
        backend = load(str(smollm2_tiny), context_length=64, gpu_memory=gpu_memory)
        assert [note[:57] for note in backend.notes] == [line[:57] for line in said]
        backend.close()


@pytest.mark.parametrize(("shared", "layers", "copied"), [(0, 2, 1), (0, -1, 0), (1, 2, 0), (0, 0, 0)])
def test_weights_of_the_processor_are_copied_for_a_card_that_reads_them(
    smollm2_tiny: Path, monkeypatch: pytest.MonkeyPatch, shared: int, layers: int, copied: int
) -> None:
    """llama.cpp pins memory that it has allocated, but no mapped file."""
    card, path = Gpu("GPU0", bool(shared), 1 << 40), str(smollm2_tiny)
    modes, really = list[int](), engine_module.load_model

    def noted(*given: Any, **more: Any) -> Any:
        modes.append(more.get("load_mode", 1))
        return really(*given, **more)

    monkeypatch.setattr(engine_module, "load_model", noted)
    for limit, mode in ((None, 1 - copied), ("1G", 1)):
        asked = LoadOptions(context_length=64, gpu_layers=layers, memory=limit)
        plan = engine_module.engine.plan(path, asked, this_machine(path, [card]))
        assert plan.copied == (mode == 0)
        engine_module.engine.load(plan).close()
        assert modes.pop() == mode


@pytest.fixture
def reserved(smollm2_tiny: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A card that llama.cpp finds by itself, which can copy a weight and hold no layer: MiB that it reserves there."""
    [buffers] = memory.rehearse(str(smollm2_tiny), [memory.ContextSize(64, 64, 1, memory.MIN_NODES)], 1 << 60)[1]
    room = buffers.compute + gpu.largest_copy(memory.loaded_tensors(str(smollm2_tiny)), True) + MIB
    card = Gpu("MAPPED", False, int((room + RESERVE) / (1 - SAFETY)))
    monkeypatch.setattr(engine_module, "find_gpus", lambda: [card])
    mapped_device.found(monkeypatch)
    return lambda: sum(mapped_device._logged("compute").get("MAPPED", []))


def test_no_layers_that_were_asked_for_use_no_gpu(smollm2_tiny: Path, reserved: Any) -> None:
    """Not for passes of many rows either: so the processor computes every pass, also of the draft."""
    asked = LoadOptions(gpu_layers=0, context_length=64, exact="wide")
    for options in (asked, asked.for_draft()):
        machine = this_machine(str(smollm2_tiny), engine_module.engine.gpus(None))
        plan = engine_module.engine.plan(str(smollm2_tiny), options, machine)
        size_lines.clear()
        backend = engine_module.engine.load(plan)
        assert (reserved(), backend.notes) == (0, [])
        assert ("attention" in backend.computing) == (options is asked)
        backend.close()


def test_auto_says_that_long_passes_use_a_gpu_on_which_no_layer_fits(smollm2_tiny: Path, reserved: Any) -> None:
    machine = this_machine(str(smollm2_tiny), engine_module.engine.gpus(None))
    plan = engine_module.engine.plan(str(smollm2_tiny), LoadOptions(context_length=64), machine)
    size_lines.clear()
    backend = engine_module.engine.load(plan)
    assert backend.computing["gpu_layers"] == 0
    assert backend.notes == ["no layer fits on MAPPED; long passes use it"]
    assert reserved() > 0
    with engine_module.engine.probe_model(str(smollm2_tiny), backend.computing) as probe:  # it computes alike
        assert dict(probe.computing) == dict(backend.computing)
    assert not {"attention", "repacked"} & backend.computing.keys()  # these are the processor's
    backend.close()
    asked = LoadOptions(context_length=64, exact="wide")  # of which long passes on a GPU have other bits
    assert "device" not in engine_module.engine.plan(str(smollm2_tiny), asked, machine).ways[-1]
    few = replace(machine, gpus=(replace(machine.gpus[0], free=RESERVE),))  # no room for a copy
    plan = engine_module.engine.plan(str(smollm2_tiny), LoadOptions(context_length=64), few)
    assert (plan.notes, plan.ways[-1]["gpu_layers"]) == ([], 0)
    assert "device" not in plan.ways[-1]


def test_no_row_class_is_looked_for_where_a_gpu_has_layers(smollm2_tiny: Path) -> None:
    """It would be tried before a load that fills the memory, for nothing."""
    path, card = str(smollm2_tiny), Gpu("GPU0", False, 1 << 40)
    machine, found = this_machine(path, [card]), list[bool]()
    for layers in (0, 2):
        asked = LoadOptions(context_length=64, gpu_layers=layers, kv_type="f16", memory=1)
        with pytest.raises(NoRoom) as error:
            engine_module.engine.plan(path, asked, machine)
        least = parse_size(str(error.value).partition("at least ")[2].partition(" (")[0])
        plan = engine_module.engine.plan(path, replace(asked, memory=least + MIB), machine)
        assert plan.weights
        found.append(plan.fills_memory)
    assert found == [True, False]


def test_a_gpu_that_copies_weights_leaves_flash_attention_on(
    smollm2_tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llama.cpp's own trial would give it up: `test_places.py`."""
    chosen, make = list[int](), engine_module.make_context
    monkeypatch.setattr(engine_module, "find_gpus", lambda: [Gpu("GPU0", False, 1 << 40)])
    monkeypatch.setattr(
        engine_module, "make_context", lambda *given: (chosen.append(given[-1].flash_attn_type), make(*given))[1]
    )
    load(str(smollm2_tiny), context_length=64).close()
    monkeypatch.setattr(engine_module, "find_gpus", list)
    load(str(smollm2_tiny), context_length=64).close()
    names = memory.llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED, memory.llama_cpp.LLAMA_FLASH_ATTN_TYPE_AUTO
    assert tuple(chosen) == names


def test_a_build_without_a_gpu_is_given_no_layers(smollm2_tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All is computed here, so all has to fit here, or is streamed."""
    monkeypatch.setattr(engine_module, "find_gpus", list)
    asked = list[int]()

    def plan_memory(planner: Any, size: Any, gpu_layers: int, experts_here: bool) -> Any:
        asked.append(gpu_layers)
        return None, size, ["a note"]

    monkeypatch.setattr(memory.MemoryPlanner, "plan_memory", plan_memory)
    backend = load(str(smollm2_tiny), context_length=64, gpu_layers=3, memory="1G")
    assert asked == [0]
    assert backend.computing["gpu_layers"] == 0
    assert backend.notes == ["this llama.cpp has no GPU, so --gpu-layers changes nothing", "a note"]
    backend.close()


def test_a_draft_gets_what_the_target_leaves_of_the_gpu_memory(
    smollm2_tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [Gpu("GPU0", False, 1 << 40)]
    monkeypatch.setattr(engine_module, "find_gpus", lambda: found)
    entry = Entry(name="target", target=f"file:{smollm2_tiny}", defaults=Defaults())

    def layers(gpu_memory: str) -> list[Any]:
        pair = open_backends(
            entry, str(smollm2_tiny), None, LoadOptions(context_length=64, budget=8, exact="off", gpu_memory=gpu_memory)
        )
        for backend in pair:
            backend.close()
        return [backend.computing["gpu_layers"] for backend in pair]

    assert layers("4G") == [-1, -1]
    assert layers("1M") == [0, 0]
    size = memory.ContextSize(64, 8, 1, memory.MIN_NODES)
    for used, expected in ((0, -1), ((4 << 30) - MIB, 0)):
        machine = this_machine(gpus=[Gpu("GPU0", False, 1 << 40, used)])
        options = LoadOptions(resident=True, gpu_memory="4G")
        assert memory.MemoryPlanner(str(smollm2_tiny), options, machine).choose_gpu_layers(size) == expected


@pytest.mark.parametrize(
    ("gpu_memory", "expected"),
    [("4G", 3 << 30), (2 << 30, 1 << 30), (None, None), ("1G", "but the draft takes 1.00 GiB")],
)
def test_a_target_on_another_engine_gets_what_its_draft_leaves(
    gpu_memory: Any, expected: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[Any]()

    class FakeEngine(Engine):
        supported = frozenset({"gpu_memory"})

        def __init__(self, name: str) -> None:
            self.name = name

        def load(self, plan: Any, *rest: Any) -> Any:
            asked.append((self.name, plan.options.gpu_memory))
            if self.name == "torch":
                raise UsageError("asked")
            return SimpleNamespace(close=lambda: asked.append("closed"))

        def gpus(self, device: Any) -> list[Gpu]:
            return [Gpu("GPU0", False, 1 << 40, 1 << 30), Gpu("GPU1", True, 1 << 40, 1 << 30)]

    (tmp_path / "config.json").write_text("{}")
    for module in (loading, engines):
        monkeypatch.setattr(module, "find_engine", FakeEngine)
    monkeypatch.setattr(
        loading, "choose_backend", lambda folder, machine, asked: asked or ("torch" if folder else "llamacpp")
    )
    monkeypatch.setattr(loading, "is_head", lambda path: False)
    entry = Entry(name="target", target=f"file:{tmp_path}", defaults=Defaults())
    refused = expected if isinstance(expected, str) else "asked"
    with pytest.raises(UsageError, match=refused):
        open_backends(entry, "file:small.gguf", None, LoadOptions(context_length=64, budget=8, gpu_memory=gpu_memory))
    target = [] if isinstance(expected, str) else [("torch", expected)]
    assert asked == [("llamacpp", None), *target, "closed"]


def test_libraries_that_are_there_already_need_no_room_again() -> None:
    for used, reserve in ((0, RESERVE), (RESERVE // 2, RESERVE // 2), (RESERVE, 0), (1 << 40, 0)):
        assert gpu.room_on([Gpu("GPU0", False, 1 << 30, used)], NOTHING) == int((1 << 30) * (1 - SAFETY)) - reserve


@pytest.fixture
def mixture(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes planners of `with_experts` by memory and GPUs."""
    monkeypatch.setattr(memory, "loaded_tensors", lambda path: with_experts())
    monkeypatch.setattr(memory, "own_values", lambda path: {"expert_count": 4, "expert_used_count": 2})
    monkeypatch.setattr("edgespec.machine.memory.private_memory", lambda: 0)
    monkeypatch.setattr(memory, "rehearse", lambda path, sizes, free, target: (0, [NOTHING] * len(sizes)))

    def get(room: int, gpus: Sequence[Gpu], platform: str = "linux") -> memory.MemoryPlanner:
        machine = replace(this_machine(gpus=gpus), platform=platform, used=0, free=40 * LAYER)
        return memory.MemoryPlanner(__file__, LoadOptions(memory=room), machine)

    return get


SIZE = memory.ContextSize(64, 8, 1, memory.MIN_NODES)


@pytest.mark.parametrize(
    ("room", "gpus", "platform", "layers"),
    [
        (MIB, own(5 * LAYER), "linux", 5),  # too little memory for experts to be read as they are chosen
        (9 * LAYER, own(5 * LAYER), "linux", 5),  # memory holds the other layers
        (5 * LAYER, own(5 * LAYER), "linux", -1),  # it does not: the GPU gets the other weights of all
        (5 * LAYER, own(LAYER), "linux", 6),  # or of some
        (5 * LAYER, own(2 * LAYER, 3 * LAYER), "linux", -1),
        (9 * LAYER, [Gpu("iGPU", True, 9 * LAYER)], "linux", 0),
        (9 * LAYER, own(5 * LAYER), "darwin", 0),
    ],
)
def test_layers_of_a_mixture_that_a_gpu_gets(
    room: int, gpus: Sequence[Gpu], platform: str, layers: int, mixture: Any
) -> None:
    assert mixture(room, gpus, platform).choose_gpu_layers(SIZE) == layers


@pytest.mark.parametrize(("rooms", "gpu_layers"), [((5,), -1), ((5,), 5), ((4, 3), -1), ((3,), -1)])
def test_what_a_gpu_has_left_holds_experts(rooms: tuple[int, ...], gpu_layers: int, mixture: Any) -> None:
    """Most of them, of as many of its last layers; pools in memory serve these, too."""
    gpus = own(*(room * LAYER for room in rooms))
    plan, _, _ = mixture(5 * LAYER, gpus).plan_memory(SIZE, gpu_layers, True)
    assert [pool.layers for pool in plan.pools] == [tuple(range(10))]
    assert [pool.device for pool in plan.device_pools] == [one.name for one in gpus]
    first, expert = 10, 3 * LAYER // 4 // 4
    for pool, room, (count, _) in reversed(
        list(zip(plan.device_pools, rooms, layers_of_gpus(gpus, gpu_layers, 10), strict=True))
    ):
        first -= count
        left, all_of_them = room * LAYER + COPY - count * LAYER // 4, 4 * len(pool.layers)
        assert pool.slots * expert <= left
        assert LEAST_ON_DEVICE * all_of_them <= pool.slots <= all_of_them
        assert set(pool.layers) <= set(range(first, first + count))
        assert max(pool.layers) == first + count - 1
        assert len(pool.layers) == count or (pool.slots + 1 + len(pool.layers)) * expert > left - 2 * MIB
    of_last = plan.device_pools[-1]
    each = of_last.slots // len(of_last.layers)
    assert f"{each} of 4 experts of {len(of_last.layers)} layers on {gpus[-1].name}, " in plan.line()


def test_that_pools_were_tried_holds_for_this_system_and_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not for another chip, macOS or llama.cpp."""
    monkeypatch.delenv(OFF, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    metal = SimpleNamespace(
        ggml_backend_dev_count=lambda: 1,
        ggml_backend_dev_get=lambda number: number,
        ggml_backend_dev_type=lambda device: gpu.GPU,
        ggml_backend_dev_memory=lambda *given: None,
        ggml_backend_dev_name=lambda device: b"MTL0",
        ggml_backend_dev_get_props=lambda *given: None,
    )
    monkeypatch.setattr(gpu, "ggml", lambda: metal)
    monkeypatch.setattr(gpu.llama_cpp, "llama_supports_gpu_offload", lambda: True)

    def tried(**other: str) -> bool:
        with monkeypatch.context() as patch:
            patch.setattr(gpu.platform, "mac_ver", lambda: (other.get("system", "26.1"), (), ""))
            patch.setattr(gpu, "processor_name", lambda: other.get("chip", "Apple M4, 10 cores"))
            patch.setattr(gpu, "engine_build", lambda: other.get("engine", "llama-cpp-python 0.3.36"))
            if "word" in other:
                remember(gpu.about_pools(), bool(other["word"]))
            [found] = find_gpus()
        return found.pools

    assert not tried()
    assert tried(word="yes")
    assert tried()
    for other in ({"system": "26.2"}, {"chip": "Apple M5, 10 cores"}, {"engine": "llama-cpp-python 0.3.37"}):
        assert not tried(**other)
    assert not tried(word="")
    assert not tried()


@pytest.mark.parametrize(
    ("free", "asked", "found"),
    [
        (20 * LAYER, None, {"MTL0": (10, 20)}),  # as many as memory holds
        (7 * LAYER, None, {"MTL0": (10, 20)}),  # which the GPU can hold, too, besides the other weights
        (5 * LAYER, None, {"": (10, 20)}),  # it cannot: more would be read
        (3 * LAYER, None, {"": (10, 20)}),  # not even the experts of one layer
        (20 * LAYER, 6, {"": (5, 13), "MTL0": (5, 13)}),
    ],
)
def test_a_macs_gpu_computes_in_pools_only_where_that_was_tried(
    free: int, asked: int | None, found: dict[str, tuple[int, int]], mixture: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "skeleton_tensors", lambda path, layers, tensors: tensors)
    room = 10 * LAYER if asked else 8 * LAYER
    for tried in (True, False):
        planner = mixture(room, [Gpu("MTL0", True, free, pools=tried)], "darwin")
        chosen = planner.choose_gpu_layers(SIZE) if asked is None else asked
        plan, _, _ = planner.plan_memory(SIZE, chosen, False)
        pools = {pool.device: (len(pool.layers), pool.slots) for pool in plan.pools}
        if not tried:
            assert pools.keys() == {""}
            assert chosen == (asked or 0)
            continue
        assert pools == found
        assert chosen == (asked or (-1 if "MTL0" in found else 0))
        said = [f", those of {layers} layers computed by MTL0, " in plan.line() for layers in (10, 5)]
        assert said == ["" not in found, len(found) == 2]
        assert plan.device_pools == ()
        assert plan.pinned_bytes + plan.pool_bytes <= room


@pytest.mark.parametrize("gpus", [own(2 * LAYER), own(0), [Gpu("iGPU", True, 9 * LAYER)]])
def test_a_gpu_without_room_of_its_own_for_a_layers_experts_gets_none(gpus: Sequence[Gpu], mixture: Any) -> None:
    """They are computed here then."""
    plan, _, _ = mixture(5 * LAYER, gpus).plan_memory(SIZE, -1, True)
    assert plan.pools
    assert plan.device_pools == ()


def test_pools_on_a_device_are_as_small_as_its_kernels_need() -> None:
    """At most 1,024 slots, and 4 GiB of each weight, but all experts of a layer."""
    for size, count, most in ((1 << 20, 128, 1024), (16 << 20, 128, 255), (64 << 20, 128, 128)):
        one = Tensor("blk.0.ffn_up_exps.weight", 0, 0, size * count)
        [layer] = experts.find_experts([one], count)
        assert replace(layer, device="GPU").most_slots == most


@pytest.mark.parametrize("platform", ["linux", "darwin", "win32"])
def test_experts_are_read_on_any_system_and_layers_on_two(monkeypatch: pytest.MonkeyPatch, platform: str) -> None:
    monkeypatch.setattr(memory, "loaded_tensors", lambda path: with_experts())
    monkeypatch.setattr(memory, "own_values", lambda path: {"expert_count": 4, "expert_used_count": 2})
    monkeypatch.setattr(memory, "rehearse", lambda path, sizes, free, target: (0, [NOTHING] * len(sizes)))
    size = memory.ContextSize(64, 8, 1, memory.MIN_NODES)

    def planned(room: int) -> tuple[Plan | None, list[str]]:
        machine = replace(this_machine(), platform=platform, gpus=(), used=0, free=20 * LAYER, moves_pages=False)
        plan, _, notes = memory.MemoryPlanner(__file__, LoadOptions(memory=room), machine).plan_memory(size, 0, False)
        return plan, notes

    plan, notes = planned(9 * LAYER)
    assert plan is not None
    assert plan.pools
    assert not (plan.streamed)
    assert not notes
    assert planned(14 * LAYER) == (None, [])
    if platform == "win32":
        assert planned(4 * LAYER) == planned(MIB) == (None, [CANNOT_STREAM])
    else:
        assert (plan := planned(4 * LAYER)[0]) is not None
        assert plan.streamed


@pytest.mark.parametrize(("value", "code"), [("auto", 0), ("0", 0), ("many", 2)])
def test_the_option(run: Any, smollm2_tiny: Path, value: str, code: int) -> None:
    status, _, err = run("run", str(smollm2_tiny), "hi", "--raw", "-n", "2", "--ctx", "64", "--gpu-layers", value)
    assert status == code
    assert ("--gpu-layers is 'many', but must be a number, -1 for all layers, or auto" in err) == (code == 2)


@pytest.fixture
def rehearsed(monkeypatch):
    """Sizes of contexts of which plans have asked for the buffers."""
    really, sizes = memory.rehearse, []

    def rehearse(path, new, *more):
        sizes.extend(new)
        return really(path, new, *more)

    monkeypatch.setattr(memory, "rehearse", rehearse)
    return sizes


def test_a_model_that_stays_in_memory_is_planned_by_one_context(smollm2_tiny, rehearsed):
    """It fits once and not twice. A context of a large hybrid takes seconds."""
    machine = replace(this_machine(), free=(1 << 30) + 3 * smollm2_tiny.stat().st_size // 2, used=0, gpus=())
    plan = engine_module.engine.plan(str(smollm2_tiny), LoadOptions(exact="off"), machine)
    assert (plan.weights, plan.plenty) == (None, False)
    assert rehearsed == [plan.size]


def test_the_buffers_of_one_text_are_computed_once(smollm2_tiny, rehearsed):
    """However little memory there is: the share of further texts changes nothing. A large hybrid takes seconds."""
    machine = replace(this_machine(), free=5 << 29, gpus=())
    with suppress(NoRoom):  # the caches are larger than what is free
        engine_module.engine.plan(str(smollm2_tiny), LoadOptions(exact="off", context_length=1 << 19), machine)
    same = [replace(size, share=1.0) for size in rehearsed]
    assert len(same) == len(set(same)) > 0
