"""How a disk is read: found by trying, remembered for the disk, and used by whoever streams."""

import os
from mmap import PAGESIZE
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edgespec.errors import ModelError
from edgespec.machine import disk, system
from edgespec.machine import measurements as remembered
from edgespec.machine.disk import (
    BETTER,
    SIZES,
    THREADS,
    USUAL,
    Reading,
    disk_name,
    disk_speed,
    find_reading,
    recall_reading,
    remember_reading,
)
from edgespec.machine.system import MS_INVALIDATE
from edgespec.measure import doctor
from edgespec.weights.plan import Extent, Layer, Plan
from edgespec.weights.ring import Streamer

pytestmark = pytest.mark.skipif(not hasattr(os, "preadv"), reason="os.preadv is not there")
MIB = 1 << 20


@pytest.fixture(autouse=True)
def idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "machine_is_busy", lambda: False)


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where measurements are kept during the test."""
    monkeypatch.delenv(remembered.OFF)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path / "cache"))
    return tmp_path


@pytest.fixture
def mac(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """A Mac's calls, in their order: ranges of files that leave the memory, and reads."""
    calls, mapped = list[object](), dict[int, int]()

    def mmap(address: None, size: int, protection: int, flags: int, descriptor: int, offset: int) -> int:
        mapped[0x10000 + offset] = offset
        return 0x10000 + offset

    def msync(address: int, size: int, flags: int) -> int:
        calls.append(("dropped", mapped[address], mapped[address] + size) if flags == MS_INVALIDATE else flags)
        return 0

    def preadv(descriptor: int, buffers: list[memoryview], start: int) -> int:
        calls.append((start, start + len(buffers[0])))
        return len(buffers[0])

    for module in (disk, system):
        monkeypatch.setattr(module, "sys", SimpleNamespace(platform="darwin"))
    monkeypatch.setattr(disk, "open_direct", lambda path: (os.open(path, os.O_RDONLY), True))
    library = SimpleNamespace(mmap=mmap, msync=msync, munmap=lambda address, size: mapped.pop(address) and 0)
    monkeypatch.setattr(system, "libc", lambda: library)
    monkeypatch.setattr(os, "preadv", preadv)
    return calls


def test_a_mac_drops_what_is_in_memory_before_it_is_read_and_reads_nothing_else(
    tmp_path: Path, mac: list[object]
) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(64 * PAGESIZE))
    ranges = [(PAGESIZE + 100, 4 * PAGESIZE), (60 * PAGESIZE, 61 * PAGESIZE + 7)]
    disk.disk_bandwidth(str(path), 0.0, threads=1, size=2 * PAGESIZE, at=0.0, ranges=ranges)
    assert mac[:2] == [("dropped", PAGESIZE, 4 * PAGESIZE), ("dropped", 60 * PAGESIZE, 61 * PAGESIZE + 7)]
    assert mac[2:] == [(PAGESIZE, 3 * PAGESIZE)]
    mac.clear()
    disk.disk_bandwidth(str(path), 5.0, threads=1, size=2 * PAGESIZE, at=0.0, ranges=ranges)
    assert {start // PAGESIZE for start, _ in mac[2:]} == {1, 3, 60}
    mac.clear()
    disk.disk_bandwidth(str(path), 0.0, threads=1)
    assert mac[0] == ("dropped", 0, 64 * PAGESIZE)


def test_a_speed_that_a_mac_measured_in_memory_is_not_believed(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remember_reading(str(memory), Reading(16, MIB, 7e9))
    monkeypatch.setattr(disk, "sys", SimpleNamespace(platform="darwin"))
    assert recall_reading(str(memory)) == USUAL
    remember_reading(str(memory), Reading(16, MIB, 3e9))
    assert recall_reading(str(memory)) == Reading(16, MIB, 3e9)


class Disk:
    """A disk that is as quick as it is told; how it was read."""

    def __init__(self, speeds: dict[tuple[int, int], list[float]], other: float = 1e9) -> None:
        self.speeds, self.other, self.reads = speeds, other, list[tuple[int, int, float, float]]()

    def __call__(self, path: str, seconds: float, threads: int = 4, size: int = 4 * MIB, at: float = 0.5) -> float:
        self.reads.append((threads, size, seconds, at))
        waiting = self.speeds.get((threads, size), [])
        return waiting.pop(0) if waiting else self.other


def test_the_quickest_way_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Disk({(8, 16 * MIB): [3e9, 3e9, 2.9e9, 3.2e9]})
    monkeypatch.setattr(disk, "disk_bandwidth", fake)
    found = find_reading("file", 5.0)
    assert found[0] == Reading(8, 16 * MIB, 3e9)  # the median of the last three
    assert {(one.threads, one.size) for one in found} == {(n, size) for n in THREADS for size in SIZES}
    assert len(found) == len(THREADS) * len(SIZES)
    assert sum(seconds for _, _, seconds, _ in fake.reads) == pytest.approx(5.0, rel=0.2)
    places = [at for _, _, _, at in fake.reads]
    assert len(set(places)) == len(places)
    assert all(0 <= at < 1 for at in places)


def test_one_lucky_measurement_decides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "disk_bandwidth", Disk({(16, 1 * MIB): [9e9, 1e9, 1e9, 1e9]}))
    assert find_reading("file")[0] == Reading(speed=1e9)


@pytest.mark.parametrize(("gain", "changed"), [(BETTER - 0.01, False), (BETTER + 0.01, True)])
def test_the_usual_way_stays_unless_another_is_clearly_quicker(
    gain: float, changed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "disk_bandwidth", Disk({(2, 4 * MIB): [gain * 1e9] * 4}))
    best = find_reading("file")[0]
    assert (best.threads == 2) == changed
    assert changed or (best.threads, best.size) == (USUAL.threads, USUAL.size)


def test_it_is_remembered_for_the_disk(memory: Path) -> None:
    """Also for other files on it."""
    one, other = memory / "one", memory / "other"
    one.write_bytes(b"1")
    other.write_bytes(b"2")
    assert recall_reading(str(one)) == USUAL
    remember_reading(str(one), Reading(16, MIB, 7e9))
    assert recall_reading(str(other)) == Reading(16, MIB, 7e9)
    assert disk_speed(str(other)) == 7e9  # not measured again: nobody waits
    elsewhere = Path("/dev/shm")
    if elsewhere.is_dir() and disk_name(str(elsewhere)) != disk_name(str(one)):
        assert recall_reading(str(elsewhere)) == USUAL
    assert remembered.forget() == 1
    assert recall_reading(str(other)) == USUAL


@pytest.mark.parametrize(
    "value",
    [
        {"threads": 0, "size": MIB, "speed": 1e9},
        {"threads": 4, "size": 1000, "speed": 1e9},
        {"threads": 4, "size": 1 << 40, "speed": 1e9},
        {"threads": 4, "size": MIB, "speed": 0},
        {"threads": 4, "size": MIB, "speed": float("inf")},
        {"threads": 4, "size": MIB, "speed": 1.0},
        {"threads": "4", "size": MIB, "speed": 1e9},
        {"threads": 4.0, "size": MIB, "speed": 1e9},
        {"threads": 64, "size": MIB, "speed": 1e9},
        {"threads": 4, "size": 64 * MIB, "speed": 1e9},
        {"threads": 4, "depth": 3},
        [4, MIB],
    ],
)
def test_what_cannot_be_believed_is_not_used(value: object, memory: Path) -> None:
    remembered.remember(disk._about(str(memory)), value)
    kept = remembered.recall(disk._about(str(memory)), Any)
    assert kept == (value if "inf" not in repr(value) else None)
    assert recall_reading(str(memory)) == USUAL


def test_nothing_is_known_of_a_file_that_is_not_there(memory: Path) -> None:
    assert recall_reading(str(memory / "missing")) == USUAL
    with pytest.raises(ModelError, match="cannot be read: No such file"):
        disk_speed(str(memory / "missing"))
    with pytest.raises(ModelError, match="cannot be read: No such file"):
        find_reading(str(memory / "missing"))


def test_reads_are_as_large_and_as_many_as_asked(memory: Path) -> None:
    sizes, threads = list[int](), 3

    class Store:
        def check(self) -> None: ...
        def read(self, slot: int, layer: Layer, extent: Extent, start: int, stop: int) -> None:
            sizes.append(stop - start)

        def show(self, slot: int, layer: Layer) -> None: ...
        def hide(self, slot: int, layer: Layer) -> None: ...
        def close(self) -> None: ...

    layer = Layer(0, (Extent(0, 0, 20 * MIB),))
    streamer = Streamer(Plan(0, 0, (), (layer,), (), 1, 1), Store(), threads, 8 * MIB)
    assert len(streamer._threads) == threads
    streamer.begin()
    streamer.enter(0)
    streamer.close()
    assert sorted(sizes) == [4 * MIB, 8 * MIB, 8 * MIB]


def test_the_doctor_finds_out_once(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = memory / "file"
    file.write_bytes(b"1")
    fake = Disk({}, other=2e9)
    monkeypatch.setattr(disk, "disk_bandwidth", fake)
    monkeypatch.setattr(doctor, "disk_bandwidth", lambda path, threads, size: 3e9)
    assert doctor._read_disk(str(file)) == Reading(speed=2e9)
    tried = len(fake.reads)
    assert tried > len(THREADS) * len(SIZES)
    assert doctor._read_disk(str(file)) == Reading(speed=3e9)  # now only how fast it is at present
    assert len(fake.reads) == tried
    assert recall_reading(str(file)) == Reading(speed=3e9)  # which others are told, too
    remembered.forget()
    with monkeypatch.context() as patch:
        patch.setenv(remembered.OFF, "1")
        assert doctor._read_disk(str(file)) == Reading(speed=3e9)  # what cannot be kept is not worth ten seconds
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))  # no folder can be made in it
    monkeypatch.setenv("HOME", str(file))
    assert not remembered.can_remember()
    assert not remember_reading(str(file), Reading(speed=3e9))
    assert doctor._read_disk(str(file)) == Reading(speed=3e9)
    assert len(fake.reads) == tried


def test_another_disk_of_the_same_name(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert remembered.can_remember()
    assert remember_reading(str(memory), Reading(16, MIB, 7e9))
    assert list(remembered.folder().iterdir()) == list(remembered.folder().glob("*.json"))  # no trial is left
    there = os.statvfs(memory)
    other = SimpleNamespace(f_blocks=2 * there.f_blocks, f_frsize=there.f_frsize)
    monkeypatch.setattr(os, "statvfs", lambda path: other)
    assert recall_reading(str(memory)) == USUAL


def test_a_speed_measured_while_other_programs_compute_is_not_remembered(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "machine_is_busy", lambda: True)
    assert not remember_reading(str(memory), Reading(16, MIB, 7e9))
    assert recall_reading(str(memory)) == USUAL


def test_no_speed_is_not_remembered(memory: Path) -> None:
    assert not remember_reading(str(memory), Reading(speed=0.0))
    assert remembered.forget() == 0
