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
from edgespec.weights.expert_memory import ExpertMemory
from edgespec.weights.experts import ExpertLayer
from edgespec.weights.plan import Tensor

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is moved on Linux only")

LAYERS, COUNT = 4, 6
SIZES = {"aligned": (8192, 12288, 4096), "sectors": (1536, 512 * 2113, 4608), "odd": (1001, 700001, 5003)}


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


def check(memory: ExpertMemory, data: bytes, number: int, experts: list[int]) -> None:
    """Want these, and look at them."""
    slots = memory.want(number, experts)
    layer = memory.layers[number]
    for weight, tensor in enumerate(layer.tensors):
        memory.wait(number, weight)
        size = layer.expert_size(weight)
        for expert in experts:
            found = ctypes.string_at(memory.base(number, weight) + int(slots[expert]) * size, size)
            assert found == data[tensor.start + expert * size :][:size]


def test_what_was_expected_and_did_not_come(content):
    """Another layer is wanted than the one that was read ahead; its slots and experts are its own."""
    path, layers, data = content
    for slots in (0, 2, COUNT):
        memory = ExpertMemory([str(path)], layers, slots)
        try:
            for number in (3, 0, 2):
                memory.want(0, range(COUNT))
                memory.wait(0)
                memory.expect_all(1, 0)
                memory.expect_all(1, 1)
                check(memory, data, number, [5, 1, 3])
                check(memory, data, 1, [0, 2, 4, 5])
                memory.finish()
        finally:
            memory.close()


def test_fewer_than_were_expected(content):
    """Of the others one weight was read, or two: they are not in memory."""
    path, layers, data = content
    for slots in (0, 2, COUNT):
        for weights in (1, 2):
            memory = ExpertMemory([str(path)], layers, slots)
            try:
                memory.want(0, range(COUNT))
                memory.wait(0)
                for weight in range(weights):
                    memory.expect_all(1, weight)
                check(memory, data, 1, [0, 2])
                memory.finish()
                memory.begin()
                check(memory, data, 1, [1, 3, 4, 5])
                memory.finish()
            finally:
                memory.close()


def test_reads_that_are_slow_when_a_pass_ends(content, monkeypatch):
    path, layers, data = content

    def slowly(*arguments: int) -> None:
        time.sleep(0.002)
        read_unaligned(*arguments)

    monkeypatch.setattr(direct, "read_unaligned", slowly)
    memory, rng = ExpertMemory([str(path)], layers, 2), np.random.default_rng(5)
    try:
        for _ in range(12):
            memory.begin()
            memory.want(int(rng.integers(LAYERS)), rng.permutation(COUNT)[: rng.integers(1, COUNT)].tolist())
            time.sleep(float(rng.random()) * 0.01)
            memory.finish()  # as if stopped by Ctrl-C
            memory.begin()
            check(memory, data, int(rng.integers(LAYERS)), rng.permutation(COUNT)[:2].tolist())
            memory.finish()
    finally:
        memory.close()


def test_memory_that_cannot_be_moved(content, monkeypatch):
    path, layers, data = content
    memory = ExpertMemory([str(path)], layers, 1)

    def fail(number: int, weight: int) -> None:
        raise OSError("no memory")

    try:
        with monkeypatch.context() as patch:
            patch.setattr(memory, "_move", fail)
            with pytest.raises(OSError, match="no memory"):
                memory.want(1, [0, 3])
            memory.finish()
        check(memory, data, 1, [0])
        check(memory, data, 1, [0, 3, 4])
    finally:
        memory.close()


@pytest.mark.parametrize("content", SIZES, indirect=True)
@pytest.mark.parametrize("slots", [0, 1, 3, COUNT])
def test_any_passes(content, slots):
    """Few and many experts by turns, with and without reading ahead, passes given up in the middle."""
    path, layers, data = content
    rng = np.random.default_rng(slots)
    memory = ExpertMemory([str(path)], layers, slots)
    try:
        memory.fill(rng.random((LAYERS, COUNT)).tolist(), lambda done, total: None)
        assert memory.bytes_read == slots * sum(layer.bytes_each for layer in layers)
        for _ in range(8):
            memory.begin()
            many = rng.random() < 0.5
            for number in range(rng.integers(1, LAYERS + 1)):
                experts = rng.permutation(COUNT)[: COUNT if many else rng.integers(1, COUNT + 1)].tolist()
                check(memory, data, number, experts)
                if many and number + 1 < LAYERS:
                    for weight in range(rng.integers(0, 3)):
                        memory.expect_all(number + 1, weight)
            memory.finish()
    finally:
        memory.close()


def test_what_is_in_memory_is_not_read_again(content):
    path, layers, data = content
    memory = ExpertMemory([str(path)], layers, 3)
    try:
        check(memory, data, 0, [1, 2])
        before = memory.bytes_read
        check(memory, data, 0, [2, 1])
        assert memory.bytes_read == before
        check(memory, data, 0, [1, 5])
        assert memory.bytes_read == before + layers[0].bytes_each
        assert (memory.wanted, memory.hits) == (6, 3)
        memory.want(0, range(COUNT), score=False)  # a prompt
        memory.wait(0)
        memory.finish()
        read = memory.bytes_read
        check(memory, data, 0, [1, 2, 5])
        assert memory.bytes_read == read  # it has pushed nothing out
    finally:
        memory.close()


def test_a_disk_error_is_one_message_and_the_next_pass_works(content, monkeypatch):
    path, layers, data = content
    memory = ExpertMemory([str(path)], layers, 2)
    broken = True

    def read(*arguments: int) -> None:
        if broken:
            raise OSError("the disk is on fire")
        read_unaligned(*arguments)

    monkeypatch.setattr(direct, "read_unaligned", read)
    try:
        memory.begin()
        memory.want(1, [0, 3])
        with pytest.raises(ModelError, match="experts of layer 1 cannot be read: the disk is on fire"):
            memory.wait(1, 0)
        memory.finish()
        broken = False
        for experts in ([0, 3], [1, 2, 3, 4]):
            memory.begin()
            check(memory, data, 1, experts)
            memory.finish()
    finally:
        memory.close()


def test_a_file_that_shrinks(content):
    path, layers, data = content
    memory = ExpertMemory([str(path)], layers, 2)
    try:
        check(memory, data, 0, [0])
        os.truncate(path, 4096)
        with pytest.raises(ModelError, match="has shrunk"):
            memory.begin()
        memory.want(2, [1])
        with pytest.raises(ModelError, match="must have shrunk"):
            memory.wait(2, 0)
        memory.finish()
        path.write_bytes(data)
        memory.begin()
        check(memory, data, 2, [1])
    finally:
        memory.close()


def test_nothing_is_left_behind(content):
    path, layers, _ = content
    files, mapped = (
        len(os.listdir("/proc/self/fd")),
        len(Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()),
    )
    for _ in range(5):
        memory = ExpertMemory([str(path)], layers, 2)
        memory.want(0, range(COUNT))
        memory.close()
        memory.close()
    assert len(os.listdir("/proc/self/fd")) == files
    assert (
        len(Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()) < mapped + 40
    )  # stacks of threads are kept for others


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
