"""MLX models larger than memory: to the bit what they are in memory, whatever happens to a pass."""

import ctypes
import gc
import json
import mmap
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import contract
import pytest

pytest.importorskip("mlx_lm", reason="mlx-lm is not installed: pip install 'edgespec[mlx]'")

import mlx.core as mx
from conftest import few
from edgespec.backends.mlx import backend as backend_module
from edgespec.backends.mlx import memory as memory_module
from edgespec.backends.mlx import streaming as streaming_module
from edgespec.backends.mlx.backend import load
from edgespec.backends.mlx.loading import load_weights
from edgespec.backends.mlx.memory import find_layout
from edgespec.backends.mlx.session import as_bytes
from edgespec.backends.mlx.streaming import SlotStore
from edgespec.backends.mlx.words import address, new_words, weight
from mlx.utils import tree_flatten
from mlx_models import FAMILIES, write_model
from same_bits import Pair, do_everything

from edgespec.errors import Interrupted, ModelError, UsageError
from edgespec.loading.exact import apply_row_class
from edgespec.loop.passes import prefill
from edgespec.loop.shapes import ALWAYS
from edgespec.machine.memory import private_memory
from edgespec.machine.this_machine import Machine
from edgespec.weights import direct_io
from edgespec.weights import plan as residency
from edgespec.weights.plan import Tensor

LAYERS = 7
DESCRIPTORS = "/proc/self/fd" if sys.platform == "linux" else "/dev/fd"


def many_layers(config: dict) -> dict:
    """A family's config with more layers, so that some can be streamed."""
    kinds = {"layer_types": (config["layer_types"] * LAYERS)[:LAYERS]} if "layer_types" in config else {}
    return {**config, "num_hidden_layers": LAYERS, **kinds}


FOLDERS = {name: {"config": config} for name, config in FAMILIES.items()} | {
    "llama, 4 bits": {"config": FAMILIES["llama-3"], "bits": 4},
    "qwen3, 8 bits": {"config": FAMILIES["qwen3"], "bits": 8},
    "llama, 4 and 8 bits": {"config": FAMILIES["llama-3"], "bits": 4, "mixed": True},
    "mixtral, 4 bits": {"config": FAMILIES["mixtral"], "bits": 4},
    "qwen2, float16": {"config": FAMILIES["qwen2"], "dtype": mx.float16},
    "gemma2, bfloat16": {"config": FAMILIES["gemma2"], "dtype": mx.bfloat16},
    "llama, two files": {"config": FAMILIES["llama"], "dtype": mx.bfloat16, "shards": 2},
}


def poisoned(store: SlotStore, slot: int, layer: object) -> None:
    """Who looks into a slot that is free finds numbers that show in every logit."""
    ctypes.memset(store.address(slot), 0x7F, store.slot_bytes)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    """Tiny weights count as large, and free slots are poisoned."""
    monkeypatch.setattr(residency, "SMALL", 64)
    monkeypatch.setattr(memory_module, "ALIGNED", 0)  # slots' edges: more than all these weights
    monkeypatch.setattr(SlotStore, "hide", poisoned)


@pytest.fixture
def load_streamed(monkeypatch) -> Iterator[Callable]:
    """Loads a folder with that part of its weights as memory for them."""

    def load_part(folder, share=0.6, part=None, *, chosen=False, **options):
        def plan_memory(lazy, size, *rest):
            layout = find_layout(lazy.model, lazy.folder, chosen=chosen)
            return memory_module.plan_weights(layout, int(layout.size * share), 0, own_layers=False), size, layout, []

        with monkeypatch.context() as patch:
            patch.setattr(backend_module, "plan_memory", plan_memory)
            if part is not None:
                patch.setattr(residency, "PART", part)
            backend = load(str(folder), **options)
        if not chosen:
            assert backend.capabilities.streams
            assert backend.capabilities.experts is None  # all of a streamed layer are read
        opened.append(backend)
        return backend

    opened = []
    yield load_part
    for backend in opened:
        backend.close()


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("mlx") / "llama", many_layers(FAMILIES["llama-3"]))


def close_all(*backends):
    for backend in backends:
        backend.close()


# Of each way in which weights lie in files and are computed.
WAYS = [
    "llama", "mistral-windows", "mixtral", "qwen3 moe", "gpt-oss", "gemma3", "llama, 4 and 8 bits", "mixtral, 4 bits",
    "qwen2, float16", "llama, two files",
]  # fmt: skip


@pytest.mark.parametrize("name", few(FOLDERS, *WAYS))
def test_to_the_bit(name, tmp_path, load_streamed):
    options = FOLDERS[name]
    folder = write_model(tmp_path / "model", **options | {"config": many_layers(options["config"])})
    resident = load(str(folder), context_length=64, sessions=2)
    streamed = load_streamed(folder, context_length=64, sessions=2)
    do_everything(Pair(resident, streamed), 1)
    resident.close()


def test_any_number_of_streamed_layers(llama, load_streamed):
    """Odd ones, too: then a layer is in another slot in every other pass. And parts of layers."""
    resident, plans = load(str(llama), context_length=64, sessions=2), []
    for share, part in ((0.9, None), (0.9, 0), (0.7, None), (0.6, 0), (0.6, None), (0.5, None)):
        streamed = load_streamed(llama, share, part, context_length=64, sessions=2)
        plans.append(streamed.plan)
        pair = Pair(resident, streamed)
        do_everything(pair, 0)
        for session in (*pair.sessions[0], *pair.sessions[1]):
            session.close()
    resident.close()
    assert {len(plan.streamed) % 2 for plan in plans} == {0, 1}
    whole = sum(t.size for t in find_layout(load_weights(llama), llama).tensors if "blk.0." in t.name)
    assert max(layer.size for layer in plans[1].streamed) < whole


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_the_contract(name, tmp_path, load_streamed):
    folder = write_model(tmp_path / "model", many_layers(FAMILIES[name]))
    checks = [contract.several_sessions_in_one_forward, contract.a_broken_work_changes_nothing]
    more = [contract.forks_are_independent, contract.prefill_in_pieces, contract.rewind_and_go_on]
    reused = contract.Reused(partial(load_streamed, folder))
    for check in [*checks, *(more if name == "llama" else [])]:
        check(reused)


def test_a_poisoned_slot_would_show(llama, load_streamed, monkeypatch):
    """The tests above can fail: with the poison in what is still needed, logits are others."""
    resident, streamed = load(str(llama), context_length=64), load_streamed(llama, context_length=64)
    enter = streamed._sweep.streamer.enter

    def enter_and_spoil(index):
        enter(index)
        poisoned(streamed._sweep._store, streamed._sweep.streamer.slot(index), index)

    monkeypatch.setattr(streamed._sweep.streamer, "enter", enter_and_spoil)
    with pytest.raises(AssertionError):
        Pair(resident, streamed, 1).forward((0, [5, 6], [-1, 0]))
    resident.close()


@pytest.mark.parametrize("error", [KeyboardInterrupt, ModelError])
def test_a_pass_given_up_anywhere(error, llama, load_streamed, monkeypatch):
    """Before a layer, after it, between two: the caches are as before, and the next pass is right."""
    resident, streamed = load(str(llama), context_length=64), load_streamed(llama, 0.5, context_length=64)
    pair = Pair(resident, streamed, 1)
    pair.forward((0, [5, 6, 7], [-1, 0, 1]))
    pair.each(0, lambda session: session.commit([0, 1, 2]))
    streamer = streamed._sweep.streamer
    moments = [(name, layer.index) for name in ("enter", "leave") for layer in streamer.plan.streamed]
    for name, at in moments:
        original = getattr(streamer, name)

        def fail(index, original=original, at=at):
            if index == at:
                raise error("now")
            original(index)

        with monkeypatch.context() as patch:
            patch.setattr(streamer, name, fail)
            with pytest.raises(error):
                streamed.forward([contract.work(pair.sessions[0][1], [9, 9, 9], [-1, 0, 0])])
        pair.forward((0, [1, 2, 3, 4], [-1, 0, 0, 1]))
        pair.each(0, lambda session: session.commit([]))
    resident.close()


def test_an_interrupted_pass_ends_within_a_layer(llama, load_streamed, monkeypatch):
    resident, streamed = load(str(llama), context_length=64), load_streamed(llama, 0.5, context_length=64)
    pair, streamer = Pair(resident, streamed, 1), streamed._sweep.streamer
    pair.forward((0, [5, 6, 7], [-1, 0, 1]))
    pair.each(0, lambda session: session.commit([0, 1, 2]))
    enter, layers = streamer.enter, [layer.index for layer in streamer.plan.streamed]
    for at in layers[:-1]:
        entered = []

        def interrupt(index, at=at, entered=entered):
            entered.append(index)
            enter(index)
            if index == at:
                streamed.interrupt(streamed.pass_number)

        with monkeypatch.context() as patch:
            patch.setattr(streamer, "enter", interrupt)
            with pytest.raises(Interrupted):
                streamed.forward([contract.work(pair.sessions[0][1], [9, 9, 9], [-1, 0, 0])])
        assert entered == layers[: layers.index(at) + 1]
        pair.forward((0, [1, 2, 3, 4], [-1, 0, 0, 1]))
        pair.each(0, lambda session: session.commit([]))
    resident.close()


def test_a_disk_that_fails_and_comes_back(llama, load_streamed, monkeypatch):
    options = {"context_length": 64, "sessions": 2}
    resident, streamed = load(str(llama), **options), load_streamed(llama, **options)
    pair = Pair(resident, streamed)
    pair.forward((0, [5, 6, 7], [-1, 0, 1]))

    def broken(*_):
        raise OSError("the disk is gone")

    with monkeypatch.context() as patch:
        patch.setattr(SlotStore, "read", broken)
        with pytest.raises(ModelError, match=r"layer \d+ cannot be read: the disk is gone"):
            streamed.forward([contract.work(pair.sessions[1][1], [9], [-1])])
    for number in range(2):
        pair.each(number, lambda session: session.rewind(0))
    do_everything(pair, 3)
    resident.close()


def test_a_file_that_shrinks(tmp_path, load_streamed):
    folder = write_model(tmp_path / "model", many_layers(FAMILIES["llama"]))
    streamed = load_streamed(folder, context_length=64)
    session = streamed.open()
    os.truncate(folder / "model.safetensors", 5000)
    with pytest.raises(ModelError, match="has shrunk"):
        streamed.forward([contract.work(session, [5], [-1])])
    assert session.token_ids == []


def test_a_slow_disk(llama, load_streamed, monkeypatch):
    """Reads that take any time, and end in any order, change nothing."""
    options = {"context_length": 64, "sessions": 2}
    resident, streamed = load(str(llama), **options), load_streamed(llama, **options)
    read, draw = SlotStore.read, random.Random(1)

    def slowly(*arguments):
        time.sleep(draw.choice([0, 0, 0.001, 0.01]))
        read(*arguments)

    monkeypatch.setattr(SlotStore, "read", slowly)
    pair = Pair(resident, streamed)
    for seed in range(3):
        do_everything(pair, seed)
        for number in range(2):
            pair.each(number, lambda session: session.rewind(0))
    assert streamed.wait_seconds > 0
    resident.close()


def test_one_sweep_for_all_works(llama, load_streamed, monkeypatch):
    streamed = load_streamed(llama, context_length=64, sessions=2)
    entered, enter = [], streamed._sweep.streamer.enter
    monkeypatch.setattr(streamed._sweep.streamer, "enter", lambda index: (entered.append(index), enter(index)))
    streamed.forward([contract.work(streamed.open(), [5, 6], [-1, 0]) for _ in range(2)])
    assert entered == [layer.index for layer in streamed.plan.streamed]


def test_passes_leave_nothing_behind(llama, load_streamed):
    streamed = load_streamed(llama, 0.5, context_length=64)
    session = streamed.open()
    prefill(streamed, session, range(9))

    def passes(count):
        for _ in range(count):
            streamed.forward([contract.work(session, [5, 6, 7], [-1, 0, 0])])
            session.commit([0])
            session.rewind(9)
        return mx.get_active_memory(), private_memory(), len(os.listdir(DESCRIPTORS))

    active, private, descriptors = passes(10)
    found = passes(40)
    assert abs(found[0] - active) < 1000  # small arrays' sizes depend on where the allocator finds room
    assert found[2] == descriptors
    assert found[1] - private < 2 << 20


def test_closing_frees_slots_threads_and_files(llama, load_streamed):
    before = mx.get_active_memory(), len(os.listdir(DESCRIPTORS)), threading.active_count()
    backend = load_streamed(llama, context_length=64)
    backend.forward([contract.work(backend.open(), [5], [-1])])
    assert mx.get_active_memory() > before[0]
    backend.close()
    backend.close()
    assert mx.get_active_memory() < before[0] + 100
    assert (len(os.listdir(DESCRIPTORS)), threading.active_count()) == before[1:]


def test_a_disk_that_cannot_be_measured_leaves_nothing(llama, load_streamed, monkeypatch):
    def fail(*_):
        raise ModelError("cannot be measured")

    monkeypatch.setattr(backend_module, "measure_disk", fail)
    before = len(os.listdir(DESCRIPTORS)), threading.active_count()
    with pytest.raises(ModelError, match="cannot be measured"):
        load_streamed(llama, context_length=64)
    assert (len(os.listdir(DESCRIPTORS)), threading.active_count()) == before


def test_weights_that_are_streamed_are_not_held(llama, load_streamed):
    """Beside what stays and the slots, there is nothing: neither the streamed layers nor what loading has left."""
    gc.collect()  # what other tests have left must not go meanwhile
    before = mx.get_active_memory()
    streamed = load_streamed(llama, 0.5, context_length=64)
    slots = sum(array.nbytes for array in streamed._sweep._store._arrays)
    assert streamed.plan.pinned_bytes <= mx.get_active_memory() - before - slots < streamed.plan.pinned_bytes + 40_000


def shift(folder, by):
    """Move all bytes of weights, so that they are aligned to nothing."""
    file = folder / "model.safetensors"
    data = file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    file.write_bytes((size + by).to_bytes(8, "little") + data[8 : 8 + size] + b" " * by + data[8 + size :])


@pytest.mark.parametrize("by", range(4))
def test_files_whose_tensors_begin_anywhere(by, tmp_path, load_streamed):
    """MLX's own writer aligns them to nothing; numbers have to be aligned in memory all the same."""
    folder = write_model(tmp_path / "model", many_layers(FAMILIES["llama"]), bits=4)
    shift(folder, by)
    resident = load(str(folder), context_length=64, sessions=2)
    streamed = load_streamed(folder, context_length=64, sessions=2)
    views = [weight for slots in streamed._sweep._views.values() for slot in slots for _, weight in tree_flatten(slot)]
    assert all(address(mx.view(view, mx.uint8)) % view.itemsize == 0 for view in views)
    do_everything(Pair(resident, streamed), 1)
    resident.close()


def test_weights_of_2_gib_and_more():
    """As the embedding of Qwen2.5-72B; no axis of MLX's arrays reaches 2**31."""
    rows, width, start = 2, 2**29 + 8, 16
    tensor = Tensor("embed", 0, 0, 2 * rows * width)
    assert tensor.size > 2**31
    words = new_words(start + tensor.size)
    last = address(words) + start + tensor.size - 2
    ctypes.memmove(last, b"\x80\x3f", 2)  # 1 in bfloat16
    found = weight(words, start, mx.bfloat16, (rows, width))
    assert found.shape == (rows, width)
    assert found[:, -1].tolist() == [0, 1]
    stored = as_bytes(found)
    assert (len(stored), bytes(stored[-2:]), stored.obj is not None) == (tensor.size, b"\x80\x3f", True)
    mx.clear_cache()


def test_reads_are_of_whole_pages_of_any_size(tmp_path, load_streamed, monkeypatch):
    """Pages have 16 KiB on Apple's processors."""
    monkeypatch.setattr(mmap, "PAGESIZE", 1 << 14)
    spec = spec_from_file_location("direct_io_there", direct_io.__file__)
    there = module_from_spec(spec)
    spec.loader.exec_module(there)
    assert there.ALIGNED == 1 << 14
    for module in (direct_io, streaming_module):
        monkeypatch.setattr(module, "ALIGNED", there.ALIGNED)
    folder = write_model(tmp_path / "model", many_layers(FAMILIES["llama-3"]))
    shift(folder, (8 - int.from_bytes((folder / "model.safetensors").read_bytes()[:8], "little")) % 16)
    reads, read = [], SlotStore.read

    def recorded(self, slot, layer, extent, start, stop):
        reads.append((start, self.address(slot) + self._inside[layer.index, extent] + start - extent.start))
        read(self, slot, layer, extent, start, stop)

    monkeypatch.setattr(SlotStore, "read", recorded)
    streamed = load_streamed(folder, context_length=64, sessions=2)
    resident = load(str(folder), context_length=64, sessions=2)
    do_everything(Pair(resident, streamed), 1)
    assert reads
    assert all(start % (1 << 14) == 0 and place % (1 << 14) == 0 for start, place in reads)
    resident.close()


def test_no_row_class_is_looked_for_since_attention_adds_up_keys_by_cell(llama, load_streamed):
    """16-bit activations may hide it."""
    assert load_streamed(llama, context_length=64).capabilities.by_cell == ALWAYS
    with closing(load(str(llama), context_length=64)) as resident:
        assert not apply_row_class(resident, str(llama))
        assert resident.capabilities.exact is None


W123 = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}


def unstack_experts(folder, names=W123):
    """As the hub has them: mlx-lm stacks them as it loads."""
    found = {}
    for name, array in mx.load(str(folder / "model.safetensors")).items():
        if "switch_mlp" in name:
            before, _, rest = name.partition("switch_mlp.")
            for i, one in enumerate(array):
                found[f"{before}experts.{i}.{names[rest.split('.')[0]]}.weight"] = one
        else:
            found[name] = array
    mx.save_safetensors(str(folder / "model.safetensors"), found)


def test_what_has_to_be_written_anew(tmp_path, monkeypatch):
    folder = write_model(tmp_path / "model", many_layers(FAMILIES["mixtral"]))
    unstack_experts(folder)
    monkeypatch.setattr("edgespec.machine.memory.private_memory", lambda: 0)
    monkeypatch.setattr(memory_module, "MARGIN", 0)
    monkeypatch.setattr(memory_module, "work_bytes", lambda *_: 0)
    with pytest.raises(ModelError) as caught:
        load(str(folder), context_length=64, memory=700_000, own_layers=True)  # layers are streamed whole then
    assert "mlx-lm rebuilds 21 weights of its layers" in str(caught.value)
    assert f"mlx_lm.convert --hf-path {folder} --mlx-path NEW-FOLDER" in str(caught.value)
    load(str(folder), context_length=64, memory="1G").close()


def test_values_that_a_model_class_changes(tmp_path, load_streamed, monkeypatch):
    """Same names, shapes and types, other bits: noticed before the first pass."""
    from mlx_lm.models.llama import Model

    folder = write_model(tmp_path / "model", many_layers(FAMILIES["llama"]))
    monkeypatch.setattr(Model, "sanitize", lambda self, weights: {name: 2 * w for name, w in weights.items()})
    with pytest.raises(ModelError, match=r"is changed by mlx-lm as it is loaded.*mlx_lm.convert"):
        load_streamed(folder, context_length=64)


# The plan


def test_how_much_memory_decides(llama, monkeypatch):
    """All in memory, streamed, too little; every one of them says what it is."""
    monkeypatch.setattr("edgespec.machine.memory.private_memory", lambda: 0)
    monkeypatch.setattr(memory_module, "MARGIN", 0)
    weights = find_layout(load_weights(llama), llama).size
    needed = needed_by(llama)
    backend = load(str(llama), context_length=64, memory=weights + needed)
    assert (backend.plan, backend.notes, backend.capabilities.streams) == (None, [], False)
    backend.close()
    backend = load(str(llama), context_length=64, memory=weights + needed - 1)
    assert backend.plan.streamed
    assert "is read from disk in every pass" in backend.notes[0]
    assert len(backend.plan.streamed) >= 3
    backend.close()
    with pytest.raises(UsageError, match="are too little for this model: it needs at least") as caught:
        load(str(llama), context_length=64, memory=needed // 2)
    assert "\n" not in str(caught.value)
    with pytest.raises(UsageError, match="is not a size"):
        load(str(llama), memory="much")


def needed_by(folder):
    found = []
    original = memory_module.make_plan
    memory_module.make_plan = lambda tensors, room, needed, **rest: (
        found.append(needed) or original(tensors, room, needed, **rest)
    )
    try:
        load(str(folder), context_length=64, memory=1)
    except UsageError:
        return found[0]
    finally:
        memory_module.make_plan = original
    raise AssertionError


def test_prompts_are_read_in_larger_pieces(tmp_path, monkeypatch):
    """Where a pass over more tokens hardly takes more memory, and every pass reads the weights."""
    folder = write_model(tmp_path / "model", many_layers(FAMILIES["llama"]))
    monkeypatch.setattr("edgespec.machine.memory.private_memory", lambda: 0)
    for name in ("MARGIN", "KEPT"):
        monkeypatch.setattr(memory_module, name, 0)
    monkeypatch.setattr(memory_module, "work_bytes", lambda config, size, item: size.max_nodes)
    monkeypatch.setattr(memory_module, "cell_bytes", lambda *_: (1, 4))
    weights = find_layout(load_weights(folder), folder).size
    backend = load(str(folder), context_length=64, memory=weights - 20_000)
    assert backend.capabilities.max_nodes == 2048
    backend.close()


def test_a_draft_takes_room(llama, monkeypatch):
    room = 2 * find_layout(load_weights(llama), llama).size
    for name in ("machine.memory.private_memory", "backends.mlx.memory.work_bytes"):
        monkeypatch.setattr(f"edgespec.{name}", lambda *_: 0)
    monkeypatch.setattr(memory_module, "cell_bytes", lambda *_: (0, 4))
    for name in ("MARGIN", "KEPT"):
        monkeypatch.setattr(memory_module, name, 0)
    alone = load(str(llama), memory=room - 100)
    beside = load(str(llama), memory=room - 100, draft_files=[str(llama)])
    assert (alone.plan is None, beside.plan is None) == (True, False)
    close_all(alone, beside)


def test_a_cascades_draft_has_two_sessions_for_each_text(llama, monkeypatch):
    counted = []
    monkeypatch.setattr(backend_module, "_draft_bytes", lambda path, size: counted.append(size.sessions) or 0)
    for mixed in (False, True):
        load(str(llama), memory="16G", sessions=3, draft_files=[str(llama)], mixed=mixed).close()
    assert counted == [3, 6]


def test_a_mac_has_no_more_than_its_gpu_can_hold(monkeypatch):
    machine = Machine(platform="darwin", cores=4, memory=32 << 30, free=30 << 30)
    assert memory_module.free_memory(machine) == 30 << 30
    monkeypatch.setattr(mx, "device_info", lambda: {"max_recommended_working_set_size": 20 << 30})
    assert memory_module.free_memory(replace(machine, gpus=tuple(memory_module.find_gpus()))) == 18 << 30


def test_buffers_are_counted(tmp_path):
    """What the largest pass computes takes no more memory than is foretold, and a good part of it."""
    folder = write_model(tmp_path / "model", FAMILIES["llama"] | {"hidden_size": 128, "intermediate_size": 384})
    backend = load(str(folder), context_length=1024)
    session = backend.open()
    prefill(backend, session, [i % 250 for i in range(512)])
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    nodes = list(range(512))
    backend.forward([contract.work(session, [n % 250 for n in nodes], [n - 1 for n in nodes], wanted=[511])])
    size = memory_module.PassSize(1024, 64, 1, 512)
    config = json.loads((folder / "config.json").read_text())
    foretold = memory_module.work_bytes(config, size, 4)
    assert foretold / 10 < mx.get_peak_memory() - before < foretold
    backend.close()
