"""Plans for made-up machines and a made-up model: numbers in, which layers lie where out. Nothing is loaded."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edgespec.errors import NoRoom, UsageError
from edgespec.loop.engines import LoadOptions
from edgespec.machine.memory import format_size
from edgespec.machine.this_machine import Gpu, Machine
from edgespec.weights.plan import SAFETY, Plan, Tensor

MIB, GIB = 1 << 20, 1 << 30
LAYERS, LAYER, OUTPUT = 40, 500 * MIB, 400 * MIB  # 20.3 GiB
COMPUTE, CACHE = 200 * MIB, 10 * MIB
BUFFERS = COMPUTE + LAYERS * CACHE

MAC = Machine(
    platform="darwin", architecture="arm64", cores=4, memory=16 * GIB, free=12 * GIB, used=GIB // 4,
    gpus=(Gpu("Metal", True, 11 * GIB, limit=11 * GIB),),
)  # fmt: skip
PC = Machine(
    platform="linux", cores=16, memory=32 * GIB, free=28 * GIB, used=GIB // 4, moves_pages=True,
    gpus=(Gpu("GPU0", False, 8 * GIB - 300 * MIB, limit=8 * GIB),),
)  # fmt: skip
BOX = Machine(platform="linux", cores=2, memory=4 * GIB, free=3 * GIB, used=GIB // 4, moves_pages=True)


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """llama.cpp's plan of a file whose header and buffers are made up, too."""
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    from edgespec.backends.llamacpp import engine as llamacpp
    from edgespec.backends.llamacpp.memory import planning
    from edgespec.backends.llamacpp.memory.gpu import Buffers

    tensors, start = list[Tensor](), 4096
    for name, size in [
        ("token_embd.weight", OUTPUT),
        *((f"blk.{i}.{part}.weight", LAYER // 2) for i in range(LAYERS) for part in ("attn", "ffn")),
        ("output.weight", OUTPUT),
    ]:
        tensors.append(Tensor(name, 0, start, size))
        start += size
    with (tmp_path / "model.gguf").open("wb") as file:
        file.truncate(start)  # no byte of it is written
    monkeypatch.setattr(planning, "loaded_tensors", lambda path: tensors)
    monkeypatch.setattr(llamacpp, "check_target", lambda path: None)
    monkeypatch.setattr(
        planning,
        "rehearse",
        lambda path, sizes, free, target: (30 * MIB, [Buffers(one.chunk, COMPUTE, (CACHE,) * LAYERS) for one in sizes]),
    )
    path = str(tmp_path / "model.gguf")
    return lambda machine, **options: llamacpp.engine.plan(path, LoadOptions(exact="off", **options), machine)


def check(weights: Plan, machine: Machine) -> None:
    """It keeps within the machine's memory, and uses most of it."""
    taken = weights.needed + weights.pinned_bytes + weights.slots * weights.slot_bytes
    room = int(machine.free * (1 - SAFETY))
    assert room - LAYER <= taken <= room
    assert weights.memory == room


def test_a_mac_with_16_gb(plan: Callable[..., Any]) -> None:
    """Its GPU shares the memory, and computes all layers: those that stay, and from slots those that are streamed."""
    found = plan(MAC)
    weights = found.weights
    check(weights, MAC)
    assert found.gpu_layers == LAYERS + 1
    assert weights.streamed
    where = {"device": "Metal", "op_offload": 0}
    assert found.ways[-1] == {"threads": 4, "gpu_layers": found.gpu_layers} | where
    larger = replace(MAC, memory=48 * GIB, free=44 * GIB, gpus=(Gpu("Metal", True, 36 * GIB, limit=36 * GIB),))
    assert (plan(larger).gpu_layers, plan(larger).weights) == (-1, None)
    assert plan(replace(MAC, gpus=())).gpu_layers == 0


def test_a_pc_with_a_card_of_8_gb(plan: Callable[..., Any]) -> None:
    """The card gets the output and as many layers as it holds, the machine's memory all others."""
    found = plan(PC)
    room = (8 * GIB - 300 * MIB) * (1 - SAFETY) - 512 * MIB - COMPUTE - LAYER // 2 - OUTPUT
    assert found.gpu_layers == int(room // (LAYER + CACHE)) + 1
    assert found.weights is None
    poor = replace(PC, memory=8 * GIB, free=7 * GIB)
    assert plan(poor).gpu_layers == found.gpu_layers
    weights = plan(poor).weights
    check(weights, poor)
    assert {layer.index for layer in weights.streamed} <= set(range(LAYERS + 1 - found.gpu_layers))
    half = plan(PC, gpu_memory="4G")
    assert 0 < half.gpu_layers < found.gpu_layers
    with pytest.raises(UsageError, match="gpu_memory is given, but this llama"):
        plan(replace(PC, gpus=()), gpu_memory="4G")


def test_a_small_linux_box(plan: Callable[..., Any]) -> None:
    found = plan(BOX)
    check(found.weights, BOX)
    assert found.gpu_layers == 0
    assert found.ways == ({"threads": 2, "gpu_layers": 0},)
    assert len(found.weights.streamed) == LAYERS
    with pytest.raises(NoRoom):
        plan(replace(BOX, free=GIB))
    (note,) = plan(replace(BOX, platform="win32")).notes
    assert note.startswith("streaming weights works on Linux and macOS")


def test_pytorch_on_the_same_machines() -> None:
    """Layers wait in memory that a card does not hold; what memory does not hold either is on disk."""
    pytest.importorskip("torch", reason="PyTorch is not installed")
    from edgespec.backends.torch.engine import engine
    from edgespec.backends.torch.loading import Host, choose_placement

    def placed(machine: Machine) -> tuple[str, int, int]:
        found = engine.plan("model", LoadOptions(), machine)
        host = Host(Path("model"), found.memory, found.used, apart=found.gpu is not None)
        memory = found.gpu.free if found.gpu else found.memory
        placement = choose_placement([LAYER] * LAYERS, memory, OUTPUT + BUFFERS, host)
        return found.device, LAYERS - len(placement.streamed), len(placement.on_disk)

    card = replace(PC, gpus=(replace(PC.gpus[0], name="cuda:0"),))
    assert placed(card) == ("cuda:0", (8 * GIB - 300 * MIB - OUTPUT - BUFFERS) // LAYER - 2, 0)
    device, resident, on_disk = placed(replace(card, free=7 * GIB))
    assert (device, resident) == placed(card)[:2]
    assert 0 < on_disk < LAYERS - resident
    with pytest.raises(NoRoom, match="cannot hold 5 layers"):
        placed(BOX)
    room = int(8 * GIB * (1 - SAFETY)) - GIB // 4 - OUTPUT - BUFFERS
    assert placed(replace(BOX, free=8 * GIB)) == ("cpu", room // LAYER - 5, LAYERS - (room // LAYER - 5))
    assert engine.plan("model", LoadOptions(), replace(MAC, gpus=(Gpu("mps", True, 0),))).device == "mps"
    mps = replace(MAC, gpus=(Gpu("mps", True, 3 * GIB, GIB, 4 * GIB),))
    assert engine.plan("model", LoadOptions(), mps).shared == 3 * GIB
    with pytest.raises(UsageError, match="sees cuda:0, cpu"):
        engine.plan("model", LoadOptions(device="cuda:1"), card)


def test_mlx_on_the_same_machines(tmp_path: Path) -> None:
    """A Mac's GPU holds a part of its memory only; on Linux all that is free counts."""
    pytest.importorskip("mlx_lm", reason="mlx-lm is not installed")
    from edgespec.backends.mlx.engine import engine
    from edgespec.backends.mlx.memory import WIRED_SHARE
    from mlx_models import FAMILIES, write_model

    folder = str(write_model(tmp_path / "model", FAMILIES["llama"]))
    found = engine.plan(folder, LoadOptions(), BOX)
    assert (found.weights, list(found.first_notes)) == (None, [])
    gpu = Gpu("gpu", True, GIB, limit=GIB)
    found = engine.plan(folder, LoadOptions(memory="2G"), replace(MAC, gpus=(gpu,)))
    assert f"only {format_size(WIRED_SHARE * GIB)} are free" in found.first_notes[0]
    with pytest.raises(NoRoom):
        engine.plan(folder, LoadOptions(), replace(MAC, gpus=(replace(gpu, limit=MIB),)))


def test_only_gpus_that_may_be_used_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking takes some of their memory."""
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    from edgespec.backends.torch.engine import engine

    looked = list[str]()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_arch_list", list)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda name: looked.append(name) or (5 * GIB, 8 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda name: GIB)
    first, other = Gpu("cuda:0", False, 5 * GIB, GIB, 8 * GIB), Gpu("cuda:1", False, 0)
    second = replace(first, name="cuda:1")
    assert engine.gpus(None) == engine.gpus("cuda") == [first, second]
    assert looked == ["cuda:0", "cuda:1"] * 2
    looked.clear()
    assert engine.gpus("cuda:1") == [replace(other, name="cuda:0"), second]
    assert engine.gpus("cpu") == [replace(other, name="cuda:0"), other]
    assert looked == ["cuda:1"]
    for device, others in ((None, [second]), ("cuda", [second]), ("cuda:0", []), ("cuda:1", []), ("cpu", [])):
        found = engine.plan("model", LoadOptions(device=device), replace(PC, gpus=(first, second)))
        assert found.others == others
