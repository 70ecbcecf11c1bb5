"""PyTorch models larger than GPU and host memory: from disk through host memory to the device, to the bit the same."""

import itertools
import json
import os
import queue
import random
import re
import shutil
import sys
import threading
import time
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'edgespec[torch]'")

import contract
from contract import chain_rows, work
from edgespec.backends.common import loader as loader_module
from edgespec.backends.torch import backend as backend_module
from edgespec.backends.torch import disk as disk_module
from edgespec.backends.torch import loading as loading_module
from edgespec.backends.torch.backend import load
from edgespec.backends.torch.disk import FOLDER, STAGING, Pack, Staging
from edgespec.backends.torch.experts import ExpertFolder
from edgespec.backends.torch.loading import WORKSPACE, Host, Placement, check_folder_fits, work_bytes
from edgespec.backends.torch.offload import BUFFERS
from hf_models import save, tiny_model, torch
from safetensors.torch import load_file, save_file
from test_torch import at_home, memory_for, needs, needs_bitsandbytes

import edgespec
from edgespec.errors import ModelError, NoRoom, UsageError
from edgespec.machine.files import ABANDONED
from edgespec.machine.memory import private_memory
from edgespec.machine.this_machine import this_machine
from edgespec.weights import experts
from edgespec.weights.ring import CANNOT_STREAM

LAYERS = 10
SHARES = [(5, 5), (3, 3)]  # 50 % on the device and 50 waiting; 30, 30 and 40 on disk. `expected` has all on the device
OPTIONS = {"context_length": 64, "budget": 8, "sessions": 2, "threads": 1}
TEXT = [5, 9, 30, 7]
DESCRIPTORS = "/proc/self/fd" if sys.platform == "linux" else "/dev/fd"


class LateCopies:
    """A copy engine with a thread of its own, which takes any time; meanwhile the target holds what would show."""

    def __init__(self, device, buffers):
        self.draw = random.Random(1)
        self.free = [False] * buffers
        self.ordered, self.filled = [0] * buffers, [0] * buffers
        self.changed, self.jobs = threading.Condition(), queue.SimpleQueue()
        self.thread = threading.Thread(target=self.work, daemon=True)
        self.thread.start()

    def work(self):
        while job := self.jobs.get():
            buffer, target, source = job
            time.sleep(self.draw.choice([0, 0, 0, 0.001]))
            target.copy_(source)
            with self.changed:
                self.filled[buffer] += 1
                self.changed.notify_all()

    def fill(self, buffer, target, source):
        assert self.free[buffer], "the buffer is still in use"
        self.free[buffer] = False
        target.fill_(255)  # NaN in every floating-point format
        self.ordered[buffer] += 1
        self.jobs.put((buffer, target, source))

    def wait(self, buffer):
        self.finish(buffer)

    def finish(self, buffer):
        with self.changed:
            assert self.changed.wait_for(lambda: self.filled[buffer] == self.ordered[buffer], 30)

    def release(self, buffer):
        self.free[buffer] = True

    def waited(self):
        return 0.0

    def close(self):
        self.jobs.put(None)
        self.thread.join()


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return save(tiny_model("llama", num_hidden_layers=LAYERS), tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def halves(tmp_path_factory):
    """In bfloat16."""
    model = tiny_model("qwen2", num_hidden_layers=LAYERS).to(torch.bfloat16)
    return save(model, tmp_path_factory.mktemp("halves"))


@pytest.fixture
def tiers(monkeypatch):
    """Loads with so many layers on the device and so many in host memory; the others are on disk."""
    monkeypatch.setattr("edgespec.machine.memory.private_memory", lambda: 0)
    monkeypatch.setattr(backend_module, "MARGIN", 0)
    opened = []

    def load_tiers(folder, resident, waiting, *, copies=LateCopies, **options):
        options = OPTIONS | options
        layer, _ = needs(folder, **options)
        there, here = memory_for(folder, resident, **options), at_home(folder, **options) + (waiting + STAGING) * layer
        backend = load(str(folder), **options, gpu_memory=there, memory=here, copies=copies)
        opened.append(backend)
        on_disk = [block for block in backend.streamers[0].blocks if block.host is None]
        assert len(backend.streamers[0].blocks) == LAYERS - resident
        assert len(on_disk) == LAYERS - resident - waiting
        return backend

    yield load_tiers
    for backend in opened:
        backend.close()


@cache
def in_memory(folder, **options):
    """`everything` of a folder whose layers are all on the device."""
    backend = load(str(folder), **OPTIONS, **options)
    found = everything(backend)
    backend.close()
    return found


def everything(backend):
    """Logits of chains and trees, in several passes and sessions."""
    rows = [chain_rows(backend, TEXT)]
    one, other = backend.open(), backend.open()
    batch = [work(one, [5, 6, 7, 8], [-1, 0, 0, 2]), work(other, [9, 8], [-1, 0])]
    for logits, nodes in zip(backend.forward(batch), (4, 2), strict=True):
        rows += [logits.row(node) for node in range(nodes)]
    one.commit([0, 2])
    logits = backend.forward([work(one, [1, 2, 3], [-1, -1, 1])])[0]
    rows += [logits.row(node) for node in range(3)]
    one.rewind(1)
    rows.append(backend.forward([work(one, [4], [-1])])[0].row(0))
    one.close()
    other.close()
    return np.concatenate([np.ravel(row) for row in rows])


def passes(backend, session, count):
    for _ in range(count):
        backend.forward([work(session, [9, 8], [-1, 0])])
        session.commit([])


@pytest.mark.covering(1)
@pytest.mark.parametrize(("resident", "waiting"), [(0, 0), (0, 4), (3, 0), (2, 3), (5, 0), *SHARES])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tiers_are_equal_to_the_bit(resident, waiting, dtype, llama, halves, tiers):
    folder = llama if dtype == "float32" else halves
    backend = tiers(folder, resident, waiting)
    for _ in range(2):
        np.testing.assert_array_equal(everything(backend), in_memory(folder))
    assert not (folder / FOLDER).exists()  # the folder itself is read


@pytest.mark.parametrize(
    "check",
    [
        contract.growth_layer_by_layer,
        contract.several_sessions_in_one_forward,
        pytest.param(contract.random_growth, marks=pytest.mark.exhaustive),
    ],
)
def test_contract(check, llama, tiers):
    check(lambda **options: tiers(llama, 2, 3, **options | {"threads": 1, "context_length": 640}))


@needs_bitsandbytes
def test_4_bits_are_packed_once(halves, tiers):
    try:
        backend = tiers(halves, 2, 2, dtype="nf4")
        np.testing.assert_array_equal(everything(backend), in_memory(halves, dtype="nf4"))
        written = packed(halves)
        again = tiers(halves, 2, 2, dtype="nf4")
        np.testing.assert_array_equal(everything(again), everything(backend))
        assert packed(halves) == written
    finally:
        shutil.rmtree(halves / FOLDER)


def packed(folder):
    """Files of packs, and what changes when one is written again."""
    return {path: path.stat().st_ino for path in (folder / FOLDER).rglob("*") if path.is_file()}


def scattered(tmp_path):
    """A folder in which every layer lies in two files."""
    folder = save(tiny_model("llama", num_hidden_layers=LAYERS), tmp_path / "scattered")
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    halves = [dict(list(tensors.items())[i::2]) for i in range(2)]
    for i, some in enumerate(halves):
        save_file(some, folder / f"model-{i + 1:05}-of-00002.safetensors", metadata={"format": "pt"})
    weight_map = {name: f"model-{i + 1:05}-of-00002.safetensors" for i, some in enumerate(halves) for name in some}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def test_scattered_layers_are_packed(tmp_path, tiers):
    folder = scattered(tmp_path)
    expected = in_memory(folder)
    np.testing.assert_array_equal(everything(tiers(folder, 1, 2)), expected)
    first = packed(folder)
    assert len(first) == LAYERS - 3
    np.testing.assert_array_equal(everything(tiers(folder, 2, 2)), expected)
    assert first.items() <= packed(folder).items()
    for path in (folder / "model-00001-of-00002.safetensors", *packed(folder)):  # another model, perhaps
        os.utime(path, (1, 1))
    np.testing.assert_array_equal(everything(tiers(folder, 1, 2)), expected)
    second = packed(folder)
    assert len(second) == LAYERS - 3
    assert not first.keys() & second.keys()
    next(iter(second)).write_bytes(b"cut off")
    np.testing.assert_array_equal(everything(tiers(folder, 1, 2)), expected)  # it is written anew


@pytest.mark.parametrize("dtype", [None, pytest.param("nf4", marks=needs_bitsandbytes)])
def test_layers_in_another_order_are_another_pack(dtype, tmp_path, tiers, monkeypatch):
    """As another version of transformers may have them: the files of the model say nothing about it."""
    halves = tiny_model("qwen2", num_hidden_layers=LAYERS).to(torch.bfloat16)
    folder, load_model = save(halves, tmp_path) if dtype else scattered(tmp_path), loading_module.load_model
    tiers(folder, 1, 2, dtype=dtype)

    def turned_round(*about):
        model = load_model(*about)
        for layer in model.get_decoder().layers:
            layer._modules = dict(reversed(layer._modules.items()))
        return model

    monkeypatch.setattr(backend_module, "load_model", turned_round)
    expected = everything(load(str(folder), **OPTIONS, dtype=dtype))
    np.testing.assert_array_equal(everything(tiers(folder, 1, 2, dtype=dtype)), expected)


def test_a_pack_for_which_there_is_no_room(tmp_path, tiers, monkeypatch):
    folder = scattered(tmp_path)
    monkeypatch.setattr(disk_module.shutil, "disk_usage", lambda path: Usage())
    with pytest.raises(ModelError, match=r"takes .* GB, but only 0.0 GB are free"):
        tiers(folder, 1, 2)
    assert not packed(folder)


class Usage:
    free = 0


def test_two_programs_write_one_pack(tmp_path, monkeypatch):
    """Both may have one process number, in containers; one is done while the other writes."""
    blocks = [torch.full((4,), value, dtype=torch.uint8) for value in (1, 2)]
    one, other = (Pack(tmp_path, "nf4", {0: 4, 1: 4}) for _ in range(2))
    flush, here = os.fsync, list[int]()

    def meanwhile(file):
        monkeypatch.setattr("os.fsync", flush)
        here.append(len(packed(tmp_path)))
        for number, block in enumerate(blocks):
            one.add(number, block)

    monkeypatch.setattr("os.fsync", meanwhile)
    places = [other.add(number, block) for number, block in enumerate(blocks)]
    assert here == [1]  # unfinished
    assert [Path(place.path).read_bytes() for place in places] == [b"\1" * 4, b"\2" * 4]
    assert packed(tmp_path).keys() == {Path(place.path) for place in places}


def test_a_layer_is_packed_once(tmp_path):
    """Though fewer or more layers are on disk at the next start; a program that still loads loses none."""
    found = []
    for layers in ([0, 1], [1], [0, 1, 2]):
        pack = Pack(tmp_path, "nf4", dict.fromkeys(layers, 4))
        for layer in layers:
            pack.add(layer, torch.zeros(4, dtype=torch.uint8))
        found.append(packed(tmp_path))
    assert found[0] == found[1]
    assert found[1].items() <= found[2].items()
    assert [len(some) for some in found] == [2, 2, 3]


def test_packs_that_no_program_uses_are_removed(tmp_path):
    block = torch.zeros(4, dtype=torch.uint8)
    used = Path(Pack(tmp_path, "nf4", {0: 4}).add(0, block).path)
    unfinished = used.with_name(".1.bin-7.new")
    for again, stays in ((True, True), (False, False)):
        unfinished.touch()
        for path in (used, unfinished):
            os.utime(path, (time.time() - 2 * ABANDONED,) * 2)
        if again:
            Pack(tmp_path, "nf4", {0: 4})
            assert not unfinished.exists()
        Pack(tmp_path, "another form", {0: 4}).add(0, block)
        assert used.exists() == used.parent.exists() == stays
    assert len(packed(tmp_path)) == 1


def test_an_unfinished_file_of_another_program_stays(tmp_path):
    unfinished = Path(Pack(tmp_path, "nf4", {0: 4}).add(0, torch.zeros(4, dtype=torch.uint8)).path + ".new")
    unfinished.touch()
    for form in ("nf4", "another form"):
        Pack(tmp_path, form, {0: 4})
        assert unfinished.exists()


def test_a_pack_that_breaks_off(tmp_path, tiers, monkeypatch):
    """Nothing half-written stays."""
    folder, count = scattered(tmp_path), iter(range(99))

    def fail(file):
        if next(count) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(KeyboardInterrupt):
        tiers(folder, 1, 2)
    assert [path.suffix for path in packed(folder)] == [".bin"] * 3


def test_a_model_that_has_other_values_than_its_folder(llama, tiers, monkeypatch):
    """They are packed instead of being read from there."""
    monkeypatch.setattr(loading_module, "same_bytes", lambda *_: False)
    backend = tiers(llama, 1, 2)
    np.testing.assert_array_equal(everything(backend), in_memory(llama))
    assert packed(llama)
    shutil.rmtree(llama / FOLDER)


def test_bytes_are_compared(llama):
    from edgespec.backends.torch.disk import find_run, read_folder, same_bytes

    layer = load(str(llama), **OPTIONS).model.get_decoder().layers[3]
    source, offsets = find_run(layer, "model.layers.3.", read_folder(llama))
    assert same_bytes(layer, source, offsets)
    other, others = find_run(layer, "model.layers.4.", read_folder(llama))
    assert not same_bytes(layer, other, others)


@pytest.mark.parametrize("waiting", [0, 3])
def test_passes_that_break_off(waiting, llama, tiers):
    backend = tiers(llama, 1, waiting)
    expected = chain_rows(backend, TEXT)
    session = backend.open()
    for stop in range(LAYERS):

        def interrupt(*_):
            raise KeyboardInterrupt

        hook = backend.model.get_decoder().layers[stop].register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            backend.forward([work(session, [9], [-1])])
        hook.remove()
        np.testing.assert_array_equal(chain_rows(backend, TEXT), expected)
    assert session.token_ids == []


def test_a_disk_that_fails_and_comes_back(llama, tiers, monkeypatch):
    backend = tiers(llama, 1, 2)
    expected = chain_rows(backend, TEXT)
    session = backend.open()

    def broken(*_):
        raise OSError("the disk is gone")

    with monkeypatch.context() as patch:
        patch.setattr(Staging, "read", broken)
        for _ in range(2):
            with pytest.raises(ModelError, match=r"cannot be read: the disk is gone"):
                passes(backend, session, 2)  # the next pass's first layers may have been read
    for _ in range(2):
        np.testing.assert_array_equal(chain_rows(backend, TEXT), expected)


def test_a_device_that_fails_in_the_middle_of_a_copy(llama, tiers, monkeypatch):
    """Nobody waits for it in vain, then or later."""
    backend = tiers(llama, 2, 3)
    session = backend.open()

    def broken(*_):
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(LateCopies, "wait", LateCopies.finish)
    monkeypatch.setattr(LateCopies, "finish", broken)
    with pytest.raises(ModelError, match="a layer was not sent to the device: the device is gone"):
        passes(backend, session, 3)
    with pytest.raises(ModelError, match="the device is gone"):
        passes(backend, session, 3)


def test_a_file_that_shrinks(tmp_path, tiers):
    folder = save(tiny_model("llama", num_hidden_layers=LAYERS), tmp_path / "model")
    backend = tiers(folder, 0, 0)
    session = backend.open()
    size = (folder / "model.safetensors").stat().st_size
    os.truncate(folder / "model.safetensors", size - 8192)
    with pytest.raises(ModelError, match="shrunk"):
        passes(backend, session, 3)


def test_disk_copies_and_computation_go_on_at_once(llama, tiers, monkeypatch):
    """While a layer computes, a later one is read: the computation here waits until it is."""
    begun, read = [threading.Event() for _ in range(LAYERS)], Staging.read

    def told(self, slot, layer, extent, start, stop):
        begun[layer.index].set()
        read(self, slot, layer, extent, start, stop)

    monkeypatch.setattr(Staging, "read", told)
    backend = tiers(llama, 0, 0)
    layers, session = backend.model.get_decoder().layers, backend.open()
    seen = []
    for i, layer in enumerate(layers[:-3]):
        hook = lambda *_, i=i: seen.append(begun[i + 3].wait(10))  # noqa: E731
        layer.register_forward_pre_hook(hook)
    for event in begun[BUFFERS + STAGING :]:
        event.clear()
    backend.forward([work(session, [9], [-1])])
    assert seen == [True] * (LAYERS - 3)


@pytest.mark.parametrize(("resident", "waiting"), [(1, 0), (2, 0), (1, 2), (3, 1)])
def test_each_pass_asks_for_its_layers_in_order(llama, tiers, monkeypatch, resident, waiting):
    """Else the feeder throws away what it has read, and reads it again."""
    asked, ask = [], disk_module.Feeder.ask

    def noted(feeder, buffer, target, number):
        asked.append(number)
        ask(feeder, buffer, target, number)

    monkeypatch.setattr(disk_module.Feeder, "ask", noted)
    backend = tiers(llama, resident, waiting)
    passes(backend, backend.open(), 4)
    assert asked.count(1) >= 4
    assert {after for before, after in itertools.pairwise(asked) if after <= before} == {0}


@pytest.mark.parametrize(("speed", "said"), [(1e3, r": about \d{3,} s at 0\.0000010 GB/s$"), (0.0, "$")])
def test_what_is_said_about_it(llama, tiers, monkeypatch, speed, said):
    """In plain numbers of a slow disk, and in none of one that answers too late to be measured."""
    monkeypatch.setattr(backend_module, "disk_speed", lambda path, ranges: speed)
    (note,) = tiers(llama, 2, 3).notes
    assert re.match(r"8 of 10 layers are streamed: .* of it from disk" + said, note)


def test_closing_leaves_nothing(llama, tiers):
    before = len(os.listdir(DESCRIPTORS)), threading.active_count()
    backend = tiers(llama, 1, 2)
    backend.close()
    backend.close()
    assert (len(os.listdir(DESCRIPTORS)), threading.active_count()) == before


def test_host_buffers_stay_until_a_copy_ends(llama, tiers, monkeypatch):
    backend, close, finish, copies = tiers(llama, 1, 2), Staging.close, LateCopies.finish, []
    thread = backend.streamers[0].feeder._thread

    def slow(*arguments):
        time.sleep(0.2)
        finish(*arguments)

    monkeypatch.setattr(LateCopies, "wait", LateCopies.finish)
    monkeypatch.setattr(LateCopies, "finish", slow)
    passes(backend, backend.open(), 1)  # copies for the next one begin

    def closed(staging):
        copies.append(thread.is_alive())
        close(staging)

    monkeypatch.setattr(Staging, "close", closed)
    backend.close()
    assert copies == [False]


@pytest.mark.parametrize("where", [(loading_module, "Streamer"), (backend_module, "disk_speed")])
def test_a_load_that_fails_late_leaves_nothing(where, llama, tiers, monkeypatch):
    def fail(*_):
        raise ModelError("too late")

    monkeypatch.setattr(*where, fail)
    before = len(os.listdir(DESCRIPTORS)), threading.active_count()
    with pytest.raises(ModelError, match="too late"):
        tiers(llama, 1, 2)
    assert (len(os.listdir(DESCRIPTORS)), threading.active_count()) == before


def test_passes_leave_nothing_behind(llama, tiers):
    backend = tiers(llama, 1, 2)
    session = backend.open()

    passes(backend, session, 25)  # the allocator takes huge pages in the first ones
    before = private_memory()
    passes(backend, session, 25)
    assert private_memory() - before < 4 << 20


def test_the_default_budget_grows_where_layers_stream(llama, tiers):
    options = OPTIONS | {"copies": LateCopies}
    for stay, width in ((LAYERS - 1, 1024), (-1, 0)):
        backend = load(str(llama), **options, gpu_layers=stay, widest=1024)
        limits = backend.capabilities
        assert limits.widest == width
        if width:
            assert (limits.max_wanted, limits.max_nodes) == (width + 1, width + 1)
            session, nodes = backend.open(), range(width + 1)
            tree = work(session, [5] * (width + 1), [-1] * (width + 1))
            logits = backend.forward([tree])[0]
            np.testing.assert_allclose(logits.row(nodes[-1]), logits.row(nodes[-2]), atol=1e-4)
        backend.close()


@pytest.mark.parametrize("cheap", [True, False])
def test_logits_of_a_wide_tree_are_in_the_plan(llama, cheap, monkeypatch):
    """They are counted, and where fewer layers would stay for them, trees are narrower."""
    layer, fixed = needs(llama, **OPTIONS)
    options = OPTIONS | {"budget": 8, "copies": LateCopies}
    backend = load(str(llama), **options | {"budget": 256})
    cells = OPTIONS["sessions"] * backend.open().cells.nbytes
    more = cells + work_bytes(backend.model, backend.capabilities, 257) - fixed  # 256 draft tokens change no cells
    backend.close()
    assert more > layer
    monkeypatch.setattr(backend_module, "choose_placement", lambda sizes, memory, *rest: placed(memory, *rest))

    def placed(memory, fixed_bytes, *rest):
        fits = (memory - fixed_bytes) // layer
        if fits < BUFFERS:
            raise NoRoom("too little")
        return Placement(list(range(LAYERS - min(2, fits - BUFFERS))), [], BUFFERS, [(0, range(LAYERS))])

    there = memory_for(llama, 2, **OPTIONS) + (more if cheap else more - layer)
    backend = load(str(llama), **options, gpu_memory=there, widest=256)
    assert (backend.capabilities.widest == 256) is cheap
    backend.close()


# Where the device computes in host memory itself


def test_a_processor_that_streams_has_wider_trees_and_the_same_text(tmp_path, monkeypatch):
    monkeypatch.setattr("edgespec.machine.memory.private_memory", lambda: 0)
    monkeypatch.setattr(backend_module, "MARGIN", 0)
    folder = save(tiny_model("llama", num_hidden_layers=6, intermediate_size=8192), tmp_path / "model")
    layer, fixed = needs(folder, **OPTIONS | {"budget": 64, "sessions": 1})
    memory = fixed - WORKSPACE + (BUFFERS + STAGING) * layer + layer // 2
    found = []
    for options, budget in (({}, 256), ({"budget": 8}, 8), ({"planner": "none"}, 256)):
        with edgespec.load(folder, backend="torch", context_length=64, memory=memory, remember=False, **options) as one:
            assert one.target.capabilities.streams
            assert one.budget == budget
            assert one.target.capabilities.max_nodes == 512  # as without: prompts are read in the same passes
            found.append(one.generate("a b a b a b a b", max_tokens=10).token_ids)
    assert found[0] == found[1] == found[2]


def test_a_processor_streams_from_disk(halves, monkeypatch):
    monkeypatch.setattr("edgespec.machine.memory.private_memory", lambda: 0)
    monkeypatch.setattr(backend_module, "MARGIN", 0)
    layer, fixed = needs(halves, **OPTIONS)
    fixed -= WORKSPACE
    expected = in_memory(halves)
    resident = load(str(halves), **OPTIONS)
    with pytest.raises(NoRoom):  # its weights are in memory, too
        load(str(halves), **OPTIONS, device="cpu", memory=fixed + (BUFFERS + STAGING) * layer)
    resident.close()
    for more in (0, 3):
        backend = load(str(halves), **OPTIONS, device="cpu", memory=fixed + (BUFFERS + STAGING + more) * layer)
        assert len(backend.streamers[0].blocks) == LAYERS - more
        assert all(block.host is None for block in backend.streamers[0].blocks)
        assert backend.capabilities.streams
        np.testing.assert_array_equal(everything(backend), expected)
        backend.close()
    with pytest.raises(NoRoom, match=r"of memory cannot hold 5 layers of .*: give at least"):
        load(str(halves), **OPTIONS, device="cpu", memory=fixed + (BUFFERS + STAGING) * layer - 1)
    assert load(str(halves), **OPTIONS, device="cpu", memory="8G").streamers == []


def test_caches_that_fit_nowhere_are_refused(llama):
    """Also beside small weights, for which any limit has room."""
    with pytest.raises(NoRoom, match=r"use a smaller context"):
        load(str(llama), **OPTIONS | {"context_length": 1 << 24, "sessions": 200}, device="cpu")
    backend = load(str(llama), **OPTIONS, device="cpu")
    assert (backend.streamers, backend.notes) == ([], [])
    backend.close()


def test_mapped_weights_count_whatever_type_is_asked_for(halves):
    """The file's own stays mapped; another one is in the program's memory."""
    found = []
    for dtype in (None, "bfloat16", "float32"):
        backend = load(str(halves), **OPTIONS, device="cpu", dtype=dtype)
        found.append(backend.mapped)
        weights = sum(one.nbytes for one in backend.model.parameters())
        backend.close()
    assert found == [weights // 2, weights // 2, 0]


def test_cells_of_a_draft_count_in_the_plan_of_its_target(halves, monkeypatch):
    """Their memory is in use only when passes write them."""
    needed, sessions = [], 3
    monkeypatch.setattr("edgespec.machine.memory.private_memory", lambda: 0)
    monkeypatch.setattr(backend_module, "Host", lambda *about, **how: needed.append(about[2]) or Host(*about, **how))

    def planned():
        load(str(halves), **OPTIONS, device="cpu").close()
        return needed[-1]

    before = planned()
    draft = load(str(halves), **OPTIONS | {"context_length": 4096, "sessions": sessions}, device="cpu")
    cells = sum(draft.open().cells.nbytes for _ in range(sessions))
    assert planned() - before == draft.mapped + cells
    draft.close()
    assert planned() == before


@pytest.mark.parametrize("folder", ["another type", "experts"])
def test_copies_of_weights_count_once(folder, halves, tmp_path, monkeypatch):
    """As layers and embeddings, though loading has put them into the memory that the program uses."""
    options = OPTIONS | ({"dtype": "float32"} if folder == "another type" else {})
    if folder == "experts":
        halves = save(tiny_model("mixtral", num_hidden_layers=LAYERS).to(torch.bfloat16), tmp_path)
        monkeypatch.setattr(ExpertFolder, "work_bytes", lambda *_: 0)  # more than these experts
        monkeypatch.setattr(experts, "HUGE", 1)
    layer, fixed = needs(halves, **options)
    used, load_model = [0], loading_module.load_model

    def loaded(*about):
        model = load_model(*about)
        copies = [one for name, one in model.named_parameters() if folder == "another type" or "experts" in name]
        used.append(sum(one.nbytes for one in copies) if about[2:] == () else 0)  # without experts
        return model

    monkeypatch.setattr(backend_module, "load_model", loaded)
    monkeypatch.setattr("edgespec.machine.memory.private_memory", lambda: used[-1])
    monkeypatch.setattr(backend_module, "MARGIN", 0)
    for more, streamed in ((0, False), (-1, True)):
        used.append(0)
        backend = load(str(halves), **options, device="cpu", memory=fixed - WORKSPACE + LAYERS * layer + more)
        assert (bool(backend.streamers or backend.mixture)) == streamed
        backend.close()


def test_what_cannot_be_streamed_in_another_type(halves):
    with pytest.raises(NoRoom, match=r"use the folder's own bfloat16, which can be streamed, or nf4"):
        load(str(halves), **OPTIONS, dtype="float32", memory="1K")
    with pytest.raises(UsageError, match="is not a size"):
        load(str(halves), **OPTIONS, memory="much")


def test_experts_that_fit_nowhere_are_refused_before_they_are_put_together(tmp_path):
    folder = save(tiny_model("mixtral"), tmp_path)
    with pytest.raises(NoRoom, match=r"experts are put together at load, .*: use a GGUF"):
        load(str(folder), **OPTIONS, memory="1K", own_layers=True)
    stacked = sum(one.nbytes for name, one in tiny_model("mixtral").named_parameters() if "experts" in name)
    check_folder_fits(folder, None, stacked)
    with pytest.raises(NoRoom):
        check_folder_fits(folder, None, stacked - 1)


def test_experts_that_stay_apart_are_mapped(tmp_path, monkeypatch):
    """As those of a model class that has a module for each."""
    folder = save(tiny_model("mixtral"), tmp_path)
    stored = [torch.empty(one.shape, device="meta") for _, one in disk_module.read_folder(folder).values()]
    apart = SimpleNamespace(parameters=lambda: stored, buffers=list)
    auto = SimpleNamespace(from_config=lambda config: apart)
    monkeypatch.setattr(loading_module.transformers, "AutoModelForCausalLM", auto)
    check_folder_fits(folder, None, 1)


@needs_bitsandbytes
def test_16_bits_of_which_4_are_made_are_refused_where_they_do_not_fit(llama, halves):
    with pytest.raises(NoRoom, match=r"as bfloat16 the model takes .*: use the folder's own float32"):
        load(str(llama), **OPTIONS, dtype="nf4", memory="1K")
    with pytest.raises(NoRoom, match="cannot hold"):  # these are mapped
        load(str(halves), **OPTIONS, dtype="nf4", device="cpu", memory="1K")


def test_where_nothing_can_be_streamed_a_limit_on_memory_is_a_line(halves, monkeypatch):
    """As on Windows."""
    really = this_machine
    monkeypatch.setattr(loader_module, "this_machine", lambda *looked: replace(really(*looked), platform="win32"))
    for memory, notes in ((None, []), (1 << 20, [CANNOT_STREAM])):
        backend = load(str(halves), **OPTIONS, device="cpu", memory=memory)
        assert (backend.streamers, backend.notes) == ([], notes)
        backend.close()
