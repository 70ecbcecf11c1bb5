"""Experts are where they are said to be, whatever was wanted before, and whatever failed."""

import ctypes
import os
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from edgespec.errors import ModelError
from edgespec.machine.system import READ_SIZE, memory_step, open_direct, own_buffer, read_unaligned
from edgespec.weights import direct_io as direct
from edgespec.weights import expert_memory
from edgespec.weights.expert_memory import ExpertMemory
from edgespec.weights.experts import SMALL, ExpertLayer, pool_size
from edgespec.weights.plan import Pool, Tensor

LAYERS, COUNT = 4, 6
SIZES = {"aligned": (32768, 20480, 4096), "sectors": (1536, 512 * 2113, 4608), "odd": (1001, 700001, 50003)}
POOLS = {  # by name, from the smallest to one that holds all
    "one layer": [Pool((0, 1, 2, 3), COUNT)],
    "some": [Pool((0, 1, 2, 3), 2 * COUNT + 1)],
    "by turns": [Pool((0, 2), COUNT + 2), Pool((1, 3), COUNT)],
    "half of all": [Pool((0, 2), 2 * COUNT), Pool((1, 3), COUNT)],
    "all": [Pool((0, 1, 2, 3), LAYERS * COUNT)],
}


@pytest.fixture
def content(tmp_path: Path, request: pytest.FixtureRequest) -> tuple[Path, list[ExpertLayer], bytes]:
    """A file of random bytes, the layers in it, and the bytes."""
    sizes, start, layers = SIZES[getattr(request, "param", "aligned")], 4096 * 3 + 32, []
    for index in range(LAYERS):
        tensors = []
        for i, size in enumerate(sizes):
            tensors.append(Tensor(f"{index}-{i}", 0, start, size * COUNT))
            start += size * COUNT + 32 * index
        layers.append(ExpertLayer(index, COUNT, tuple(tensors)))
    data = np.random.default_rng(0).bytes(start)
    path = tmp_path / "weights"
    path.write_bytes(data)
    return path, layers, data


@pytest.fixture
def opened(content):
    """Opens experts of the file in pools."""
    path, layers, _ = content
    made = []

    def get(pools: str = "some") -> ExpertMemory:
        made.append(ExpertMemory([str(path)], layers, POOLS[pools]))
        return made[-1]

    yield get
    for memory in made:
        memory.close()


def check(memory: ExpertMemory, data: bytes, number: int, experts: list[int]) -> None:
    """Want these, and look at them."""
    slots = memory.want(number, experts)
    layer = memory.layers[number]
    for weight, tensor in enumerate(layer.tensors):
        memory.wait(number, [weight])
        size = layer.expert_size(weight)
        for expert in experts:
            found = ctypes.string_at(memory.base(number, weight) + int(slots[expert]) * layer.stride(weight), size)
            assert found == data[tensor.start + expert * size :][:size]


@pytest.mark.parametrize("pools", POOLS)
def test_what_was_expected_and_did_not_come(content, opened, pools):
    """Another layer is wanted than the one that was read ahead, or fewer experts of it."""
    memory, data = opened(pools), content[2]
    for number in (3, 0, 2, 1):
        memory.want(0, range(COUNT))
        memory.wait(0)
        memory.expect(1)
        check(memory, data, number, [5, 1, 3])
        check(memory, data, 1, [0, 2, 4, 5])
        memory.finish()
        memory.begin()
        check(memory, data, 1, [1, 3])
        memory.finish()


def test_the_layer_that_is_computed_keeps_its_experts(content, opened):
    memory, data = opened("one layer"), content[2]
    for used in ([0, 1, 2], list(range(COUNT))):
        slots = memory.want(0, used).copy()
        memory.wait(0)
        memory.expect(1)
        memory.wait(1)
        assert memory.want(0, used)[used].tolist() == slots[used].tolist()
        check(memory, data, 0, used)
        memory.finish()


@pytest.mark.parametrize("pools", ["one layer", "some"])
def test_reads_that_are_slow_when_a_pass_ends(content, opened, pools, monkeypatch):
    data = content[2]

    def slowly(*arguments: int) -> None:
        time.sleep(0.002)
        read_unaligned(*arguments)

    monkeypatch.setattr(direct, "read_unaligned", slowly)
    memory, rng = opened(pools), np.random.default_rng(5)
    for _ in range(12):
        memory.begin()
        number = int(rng.integers(LAYERS - 1))
        wanted = rng.permutation(COUNT)[: rng.integers(1, COUNT)].tolist()
        memory.want(number, wanted)
        memory.expect(number + 1)
        time.sleep(float(rng.random()) * 0.01)
        if rng.random() < 0.5:
            memory.finish()  # as if stopped by Ctrl-C
            memory.begin()
        check(memory, data, int(rng.integers(LAYERS)), rng.permutation(COUNT)[:2].tolist())
        memory.finish()


@pytest.mark.covering(1)
@pytest.mark.parametrize("content", SIZES, indirect=True)
@pytest.mark.parametrize("pools", POOLS)
def test_any_passes(content, opened, pools):
    """Few and many experts by turns, with and without reading ahead, passes given up in the middle."""
    data = content[2]
    rng, memory = np.random.default_rng(len(pools)), opened(pools)
    for _ in range(8):
        memory.begin()
        many = rng.random() < 0.5
        for number in range(rng.integers(1, LAYERS + 1)):
            experts = rng.permutation(COUNT)[: COUNT if many else rng.integers(1, COUNT + 1)].tolist()
            check(memory, data, number, experts)
            if many and number + 1 < LAYERS and rng.random() < 0.7:
                memory.expect(number + 1)
        memory.finish()


@pytest.mark.parametrize(("pools", "whole"), [("all", [0, 1, 2, 3]), ("half of all", [0, 2]), ("some", [])])
def test_only_pools_that_hold_all_are_read_before_a_pass(content, opened, pools, whole):
    """An answer uses all of these anyway, and the numbers of their slots never change."""
    _, layers, data = content
    memory, told = opened(pools), []
    assert memory.bytes_read == 0
    memory.fill(lambda *done: told.append(done))
    filled = len(whole) * COUNT * layers[0].bytes_each
    assert memory.bytes_read == filled
    assert told[-1:] == [(filled, filled)] * bool(whole)
    stay = [slots if slots is None else slots.tolist() for slots in map(memory.stays, range(LAYERS))]
    for number in range(LAYERS):
        check(memory, data, number, [4, 1])
    assert [number for number in range(LAYERS) if stay[number]] == whole
    assert all(stay[number] == memory.stays(number).tolist() for number in whole)
    assert memory.bytes_read == filled + 2 * (LAYERS - len(whole)) * layers[0].bytes_each


def test_scores_that_are_remembered_count_and_read_nothing(content, monkeypatch):
    path, layers, _ = content
    scores = np.random.default_rng(0).random((LAYERS, COUNT)).tolist()
    for known in ([], scores, scores[1:], [one[1:] for one in scores]):
        monkeypatch.setattr(expert_memory, "recall", lambda about, form, known=known: known)
        memory = ExpertMemory([str(path)], layers, POOLS["some"], {"kind": "experts"})
        assert memory.scores == (scores if known is scores else np.zeros((LAYERS, COUNT)).tolist())
        assert memory.bytes_read == 0
        memory.close()


def test_what_is_in_memory_is_not_read_again(content, opened):
    _, layers, data = content
    memory = opened("some")
    check(memory, data, 0, [1, 2])
    before = memory.bytes_read
    check(memory, data, 0, [2, 1])
    assert memory.bytes_read == before
    check(memory, data, 0, [1, 5])
    assert memory.bytes_read == before + layers[0].bytes_each
    assert (memory.wanted, memory.hits) == (6, 3)


def test_the_next_layer_is_read_where_nearly_all_experts_are_chosen(content, opened):
    """But not the last one in a prompt, which computes few rows."""
    memory, read = opened("all"), []
    for number, chosen, prompt in ((0, range(COUNT), None), (1, range(3), None), (2, range(COUNT), [[0, 1]])):
        before = memory.bytes_read
        memory.choose(number, [list(chosen)], prompt)
        memory.wait(number)
        memory.wait(number + 1)
        read.append((memory.bytes_read - before) // content[1][0].bytes_each)
    assert read == [2 * COUNT, 0, COUNT]


@pytest.mark.parametrize("pools", ["some", "by turns", "half of all"])
def test_predicted_experts_are_read_ahead_and_counted(content, opened, pools):
    memory, data = opened(pools), content[2]
    memory.want(0, [1, 2])
    memory.wait(0)
    memory.foresee(1, [0, 3, 4])
    memory.wait(1)
    before = memory.bytes_read
    check(memory, data, 1, [0, 3, 5])
    assert memory.bytes_read == before + content[1][0].bytes_each
    check(memory, data, 0, [1, 2])
    assert (memory.predicted, memory.right, memory.wanted, memory.hits) == (3, 2, 7, 2)


def test_predictions_that_are_mostly_wrong_end(content, opened, monkeypatch):
    monkeypatch.setattr(expert_memory, "TRIED", 3)
    memory = opened("some")
    for right, goes_on in (([0, 1], True), ([], True), ([], False)):
        assert memory.may_foresee(1)
        memory.foresee(1, [0, 1])
        memory.want(1, [*right, 5])
        memory.finish()
        memory.want(1, [2, 3, 4, 5])  # the next ones are read again
        memory.want(2, range(COUNT))
        memory.want(3, range(COUNT))
        memory.finish()
        assert memory.may_foresee(1) is goes_on


def test_nothing_is_predicted_where_all_experts_stay_or_slots_are_few(content, opened):
    memory = opened("half of all")
    assert not any(map(memory.may_foresee, range(LAYERS)))
    assert [opened("some").may_foresee(number) for number in range(LAYERS + 1)] == [True] * LAYERS + [False]


def test_a_prompt_leaves_the_experts_of_its_last_tokens(content, opened):
    data, memory = content[2], opened("some")
    for number in range(LAYERS):
        memory.want(number, range(COUNT), [[0, 1], [2, 3], [4, 5], [4, 3]])
        memory.wait(number)
    memory.finish()
    read = memory.bytes_read
    for number in range(LAYERS):
        check(memory, data, number, [3, 4])
    assert memory.bytes_read == read
    assert memory.wanted == memory.hits == 2 * LAYERS


def test_a_disk_error_is_one_message_and_the_next_pass_works(content, opened, monkeypatch):
    data, memory, broken = content[2], opened(), True

    def read(*arguments: int) -> None:
        if broken:
            raise OSError("the disk is on fire")
        read_unaligned(*arguments)

    monkeypatch.setattr(direct, "read_unaligned", read)
    memory.begin()
    memory.want(1, [0, 3])
    with pytest.raises(ModelError, match="experts of layer 1 cannot be read: the disk is on fire"):
        memory.wait(1, [0])
    memory.finish()
    broken = False
    for experts in ([0, 3], [1, 2, 3, 4]):
        memory.begin()
        check(memory, data, 1, experts)
        memory.finish()


def test_a_file_that_shrinks(content, opened):
    path, _, data = content
    memory = opened()
    check(memory, data, 0, [0])
    os.truncate(path, 4096)
    with pytest.raises(ModelError, match="has shrunk"):
        memory.begin()
    memory.want(2, [1])
    with pytest.raises(ModelError, match="must have shrunk"):
        memory.wait(2, [0])
    memory.finish()
    path.write_bytes(data)
    memory.begin()
    check(memory, data, 2, [1])


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_nothing_is_left_behind(content, opened):
    def used() -> tuple[int, int]:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
        return len(os.listdir("/proc/self/fd")), len(maps)

    files, mapped = used()
    for _ in range(5):
        memory = opened()
        memory.want(0, range(COUNT))
        memory.close()
        memory.close()
    assert used()[0] == files
    assert used()[1] < mapped + 40  # stacks of threads are kept for others


def test_a_mac_does_not_compress_pools(content, opened, monkeypatch):
    locked = []
    monkeypatch.setattr(expert_memory, "COMPRESSES", True)
    monkeypatch.setattr(expert_memory, "lock", lambda library, ranges: locked.extend(ranges))
    opened()
    sizes = [pool_size(content[1][0], i, 2 * COUNT + 1) for i in range(3)]
    assert [size for _, size in locked] == sizes


@pytest.mark.skipif(sys.platform != "linux", reason="direct reads of other systems need no alignment here")
def test_experts_are_read_without_a_copy(content, opened, monkeypatch):
    """Their weights lie in memory as in the file, whichever layer a slot serves."""
    data, found = content[2], []
    monkeypatch.setattr(direct, "read_unaligned", lambda *given: found.append(given) or read_unaligned(*given))
    memory = opened("one layer")
    for number in range(LAYERS):
        check(memory, data, number, list(range(COUNT)))
    large = [(address, start) for _, address, start, stop, _ in found if stop - start >= SMALL]
    assert len(large) == 2 * LAYERS * COUNT
    assert all((address - start) % 512 == 0 for address, start in large)


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    data = np.random.default_rng(1).bytes(2 * READ_SIZE + 10000)
    path = tmp_path_factory.mktemp("large") / "data"
    path.write_bytes(data)
    return path, data


@pytest.mark.covering(2)
@pytest.mark.parametrize("start", [0, 1, 511, 512, 4095, 4096, 5000])
@pytest.mark.parametrize("size", [1, 511, 4096, 10000, READ_SIZE - 5000, 2 * READ_SIZE + 4999])
@pytest.mark.parametrize("shift", [0, 1, 512])
@pytest.mark.parametrize("step", [512, 4096])
def test_reads_of_any_bytes(large, start, size, shift, step):
    path, data = large
    buffer = ctypes.create_string_buffer(size + 8192)
    address = -(-ctypes.addressof(buffer) // 4096) * 4096 + (start + shift) % 4096
    ctypes.memset(buffer, 7, len(buffer))
    descriptor, direct = open_direct(str(path))
    try:
        read_unaligned(descriptor, address, start, start + size, max(step, memory_step(descriptor) if direct else 1))
    finally:
        os.close(descriptor)
    assert ctypes.string_at(address, size) == data[start : start + size]
    assert len(own_buffer()) == READ_SIZE  # no more, however much is copied
    offset = address - ctypes.addressof(buffer)
    assert set(buffer.raw[:offset]) <= {7}
    assert set(buffer.raw[offset + size : -1]) <= {7}
