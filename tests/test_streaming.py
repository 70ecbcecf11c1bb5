"""Weights that move: the ring of layers over a store that watches the rules, and the stores of the systems."""

import ctypes
import gc
import itertools
import mmap
import os
import random
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.errors import ModelError
from edgespec.machine import disk, system
from edgespec.machine.system import READ_SIZE, READ_THREADS
from edgespec.machine.this_machine import this_machine
from edgespec.weights import direct_io, linux, ring
from edgespec.weights.linux import CachedLinuxStore, LinuxStore, mappings
from edgespec.weights.open_files import Store
from edgespec.weights.plan import Extent, Layer, Mapping, Plan
from edgespec.weights.preload import lock, warm
from edgespec.weights.ring import Streamer

PAGE = mmap.PAGESIZE
MIB = 1 << 20

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="mremap, O_DIRECT and /proc are Linux's")
posix_only = pytest.mark.skipif(sys.platform == "win32", reason="there is no C library with mlock on Windows")


def unseen(done: int, total: int) -> None:
    """Progress that nobody looks at."""


def plan_for(layers: list[Layer], slots: int = 3, pinned: tuple[Extent, ...] = ()) -> Plan:
    count = 1 + max((layer.index for layer in layers), default=0)
    return Plan(1 << 40, 0, pinned, tuple(layers), (), min(slots, len(layers)), count)


def fake_layers(indices: list[int], pieces: int = 1) -> list[Layer]:
    size = (pieces - 1) * READ_SIZE + PAGE
    return [Layer(i, (Extent(0, n * 100 * READ_SIZE, n * 100 * READ_SIZE + size),)) for n, i in enumerate(indices)]


def within(seconds: float, action: Callable[[], Any]) -> Any:
    """Do it, but not for ever: what hangs is a failure, not a test run that never ends."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append((action(), None))
        except BaseException as error:
            outcome.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert outcome, "it hangs"
    result, error = outcome[0]
    if error is not None:
        raise error
    return result


def until(condition: Callable[[], bool], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.001)


class WatchfulStore:
    """Keeps no bytes, but notes every call that breaks a rule."""

    note = ""

    def __init__(self, slots: int, delay: Callable[[], float] = lambda: 0.0) -> None:
        self.slots = slots
        self.delay = delay
        self.lock = threading.Lock()
        self.wrong: list[str] = []
        self.log: list[tuple[str, int]] = []  # (what, layer)
        self.reading: list[tuple[int, int]] = []  # (slot, layer) of the reads under way
        self.held: dict[int, tuple[int, int]] = {}  # slot -> (layer, bytes read)
        self.shown: dict[int, int] = {}  # slot -> layer
        self.computing: int | None = None
        self.closed = 0

    def rule(self, kept: bool, text: str) -> None:
        if not kept:
            self.wrong.append(text)

    def check(self) -> None:
        pass

    def called(self, kind: str) -> None:
        pass

    def read(self, slot: int, layer: Layer, extent: Extent, start: int, stop: int) -> None:
        self.called("read")
        with self.lock:
            self.rule(not self.closed, "read after close")
            self.rule(0 <= slot < self.slots, f"there is no slot {slot}")
            self.rule(slot not in self.shown, f"slot {slot} is read into while the engine uses it")
            self.rule(
                all(other == layer.index for s, other in self.reading if s == slot), f"two layers read into slot {slot}"
            )
            self.rule(extent in layer.extents and extent.start <= start < stop <= extent.stop, "not of this layer")
            self.rule(stop - start <= READ_SIZE, "more than one read")
            if self.held.get(slot, (None,))[0] != layer.index or self.held[slot][1] == layer.size:
                self.held[slot] = (layer.index, 0)
                self.log.append(("read", layer.index))
            self.reading.append((slot, layer.index))
        time.sleep(self.delay())
        with self.lock:
            self.reading.remove((slot, layer.index))
            self.held[slot] = (layer.index, self.held[slot][1] + stop - start)

    def show(self, slot: int, layer: Layer) -> None:
        self.called("show")
        with self.lock:
            self.rule(not self.closed, "show after close")
            self.rule(self.held.get(slot) == (layer.index, layer.size), f"layer {layer.index} shown, not read")
            self.rule(slot not in self.shown, f"slot {slot} shown twice")
            self.rule(layer.index not in self.shown.values(), f"layer {layer.index} shown in two slots")
            self.rule((slot, layer.index) not in self.reading, "shown while it is read")
            self.shown[slot] = layer.index
            self.log.append(("show", layer.index))

    def hide(self, slot: int, layer: Layer) -> None:
        self.called("hide")
        with self.lock:
            self.rule(self.shown.get(slot) == layer.index, f"layer {layer.index} hidden, not shown in slot {slot}")
            self.rule(layer.index != self.computing, f"layer {layer.index} hidden while it is computed")
            self.shown.pop(slot, None)
            self.held.pop(slot, None)
            self.log.append(("hide", layer.index))

    def close(self) -> None:
        with self.lock:
            self.rule(not self.reading, "closed while reading")
            self.closed += 1

    def preload(self, extents: Any, progress: Any) -> None:
        raise NotImplementedError

    def drop(self, extents: Any) -> None:
        raise NotImplementedError


def compute(streamer: Streamer, store: WatchfulStore, index: int, seconds: float = 0.0) -> None:
    """As an engine does: have the layer, and use it for a while."""
    with store.lock:
        store.computing = None
    streamer.enter(index)
    with store.lock:
        store.computing = index
        moving = index in [layer.index for layer in streamer.plan.streamed]
        store.rule(not moving or index in store.shown.values(), f"layer {index} computed, not shown")
    time.sleep(seconds)


class Gated(WatchfulStore):
    """Its disk answers when `gate` is set."""

    def __init__(self, slots: int) -> None:
        super().__init__(slots, delay=lambda: float(not self.gate.wait(20)))
        self.gate = threading.Event()


class BrokenStore(WatchfulStore):
    """Fails at one call of one kind."""

    kind, number, error = "", 0, Exception()

    def __init__(self, slots: int) -> None:
        super().__init__(slots)
        self.calls: Counter[str] = Counter()

    def called(self, kind: str) -> None:
        self.calls[kind] += 1
        if kind == self.kind and self.calls[kind] == self.number:
            raise self.error


def breaks(kind: str, number: int, error: Exception) -> type[BrokenStore]:
    return type("Breaks", (BrokenStore,), {"kind": kind, "number": number, "error": error})


@contextmanager
def ring_over(
    layers: list[Layer], slots: int = 3, make: Callable[[int], Any] = WatchfulStore, threads: int = READ_THREADS
) -> Iterator[tuple[Streamer, Any]]:
    """A ring and its store, which were used by the rules at the end."""
    plan = plan_for(layers, slots)
    store = make(plan.slots)
    streamer = Streamer(plan, store, threads)
    try:
        yield streamer, store
    finally:
        within(10, streamer.close)
    assert store.wrong == []


def one_pass(streamer: Streamer, store: WatchfulStore, indices: Iterable[int] | None = None) -> None:
    try:
        for index in range(streamer.plan.layers) if indices is None else indices:
            compute(streamer, store, index)
    finally:
        with store.lock:
            store.computing = None
        streamer.finish()


def reads(store: WatchfulStore) -> list[int]:
    return [layer for what, layer in store.log if what == "read"]


# --- the ring ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slots", [1, 2, 3, 5])
@pytest.mark.parametrize("indices", [[0], [3], [0, 1, 2], [1, 4, 7, 10], [0, 2, 4, 6, 8], list(range(12))])
@pytest.mark.parametrize(("pieces", "threads"), [(1, 1), (1, 4), (3, 4)])
def test_passes_in_order(indices: list[int], slots: int, pieces: int, threads: int) -> None:
    order = indices * 3 + indices[:slots]  # the next pass's first layers, too
    with ring_over(fake_layers(indices, pieces), slots, threads=threads) as (streamer, store):
        within(30, lambda: [one_pass(streamer, store) for _ in range(3)])
        until(lambda: sum(what == "show" for what, _ in store.log) == len(order))
        assert sorted(store.shown.values()) == sorted(indices[:slots])
    assert Counter(reads(store)) == Counter(order)
    assert threads > 1 or reads(store) == order  # several threads write the log out of order
    assert store.closed == 1


@pytest.mark.parametrize(
    ("indices", "slots", "entered", "read"),
    [([1, 3, 5, 7], 3, [], [1, 3, 5]), ([0, 1, 2, 3], 2, [0, 1], [0, 1, 2])],
    ids=["before anybody asks", "into the slot of a layer that is done"],
)
def test_as_many_layers_are_read_ahead_as_slots_are_free(
    indices: list[int], slots: int, entered: list[int], read: list[int]
) -> None:
    with ring_over(fake_layers(indices), slots) as (streamer, store):
        for index in entered:
            compute(streamer, store, index)
        until(lambda: sorted(reads(store)) == read and set(store.shown.values()) == {*read} - {*entered[:-1]})
        time.sleep(0.05)
        assert sorted(reads(store)) == read  # and nothing that would need another slot


def test_only_streamed_layers_wait_for_the_disk_and_the_time_is_counted() -> None:
    with ring_over(fake_layers([5]), 1, Gated) as (streamer, store):
        within(5, lambda: [streamer.enter(i) for i in range(5)])  # the disk has not answered yet
        assert streamer.wait_seconds == 0
        threading.Timer(0.05, store.gate.set).start()
        within(5, lambda: compute(streamer, store, 5))
        assert streamer.wait_seconds > 0.01


def test_nothing_is_streamed_nothing_is_started() -> None:
    before = threading.active_count()
    with ring_over([]) as (streamer, store):
        assert threading.active_count() == before
        for index in range(4):
            streamer.enter(index)
        streamer.finish()
    assert store.log == []


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7])
@pytest.mark.parametrize("slots", [1, 2, 3])
def test_a_pass_given_up_anywhere(count: int, slots: int) -> None:
    """After any layer, with the ring full or not, the next pass starts over, and whole."""
    layers = fake_layers([2 * i for i in range(count)])
    for last, full in itertools.product(range(-1, 2 * count - 1), (False, True)):
        with ring_over(layers, slots) as (streamer, store):
            computed, held = sum(2 * i < last for i in range(count)), streamer.plan.slots
            ahead = {2 * ((computed + i) % count) for i in range(held)}

            def indices(last: int = last, full: bool = full, ahead: set[int] = ahead, store: Any = store) -> Any:
                yield from range(last + 1)
                if full:  # else the threads are somewhere in the middle
                    until(lambda: set(store.shown.values()) == ahead)

            for some in (indices(), None, indices(), None):
                within(20, partial(one_pass, streamer, store, some))
            until(lambda store=store, held=held: sorted(store.shown.values()) == [2 * i for i in range(held)])


def test_a_layer_given_up_while_it_is_read_is_not_shown() -> None:
    with ring_over(fake_layers([0, 1, 2], pieces=2), 2, Gated) as (streamer, store):
        until(lambda: len(store.reading) == 4)
        streamer.finish()
        store.gate.set()
        within(10, lambda: one_pass(streamer, store))
    shows = [layer for what, layer in store.log if what == "show"]
    assert set(shows) == {0, 1, 2}
    assert sorted(reads(store)[:4]) == [0, 0, 1, 1]
    for layer in (0, 1):  # read at least once more than shown
        assert reads(store).count(layer) > shows.count(layer)


def test_layers_may_be_skipped_entered_again_or_too_late() -> None:
    with ring_over(fake_layers([0, 1, 2, 3, 4, 5, 6])) as (streamer, store):
        for some in ([0, 5], [6], [2, 3, 6], [], [1, 2, 4]):
            within(20, partial(one_pass, streamer, store, some))
        within(10, lambda: [streamer.enter(index) for index in (3, 3, 0, 2, 5)])
        streamer.finish()
        within(10, lambda: streamer.enter(0))


@pytest.mark.parametrize("entered", [[0, 1, 0], [0, 2, 1, 0]])
def test_a_layer_entered_too_late_is_not_hidden_while_it_is_computed(entered: list[int]) -> None:
    """One that was left, but is still shown, is hidden before it is computed, not during."""
    gate = threading.Event()

    def make(slots: int) -> WatchfulStore:
        store = WatchfulStore(slots, lambda: float(bool(store.shown) and not gate.wait(20)))
        return store

    with ring_over(fake_layers([0, 3]), 2, make, threads=1) as (streamer, store):

        def run() -> None:
            for index in entered:
                streamer.enter(index)
            assert store.shown == {}
            gate.set()
            streamer.enter(3)
            assert 3 in store.shown.values()  # and perhaps the next pass's first layer already

        within(10, run)


@pytest.mark.parametrize("number", [1, 2, 6, 11])
@pytest.mark.parametrize("kind", ["read", "show", "hide"])
@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), MemoryError("no memory")], ids=["io", "other"])
def test_errors_of_the_store_reach_the_one_who_computes(kind: str, number: int, error: Exception) -> None:
    with ring_over(fake_layers([0, 1, 2, 3, 4]), make=breaks(kind, number, error)) as (streamer, store):

        def passes() -> None:
            for _ in range(5):
                for index in range(5):
                    streamer.enter(index)
                streamer.finish()

        with pytest.raises(ModelError, match=rf"layer.*{re.escape(str(error))}"):
            within(10, passes)
        before = store.calls.copy()
        with pytest.raises(ModelError):  # and it stays so for this pass
            within(5, lambda: streamer.enter(4))
        streamer.finish()
        time.sleep(0.01)
        assert store.calls["hide"] == before["hide"]  # nothing is tried behind anybody's back
        within(10, lambda: [(streamer.begin(), one_pass(streamer, store)) for _ in range(3)])  # it was only once
    assert store.closed == 1
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("edgespec-read")]


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_a_disk_that_comes_and_goes(slots: int) -> None:
    """Passes fail as long as it is gone, none hangs, and the next one after is whole."""
    gone, generator = threading.Event(), random.Random(slots)
    gone.set()

    class Flaky(WatchfulStore):
        def read(self, *arguments: Any) -> None:
            super().read(*arguments)
            if gone.is_set():
                raise OSError(5, "Input/output error")

        def show(self, slot: int, layer: Layer) -> None:
            with self.lock:  # what was read before an error is read again, and would be counted twice
                self.held[slot] = (self.held[slot][0], layer.size)
            super().show(slot, layer)

    made = partial(Flaky, delay=lambda: generator.random() * 1e-3)
    with ring_over(fake_layers([0, 2, 4, 6, 8], pieces=3), slots, made) as (streamer, store):
        until(lambda: streamer._error is not None)  # from reading ahead
        for _ in range(4):
            gone.clear()
            within(10, lambda: (streamer.begin(), one_pass(streamer, store)))
            gone.set()
            for _ in range(3):
                with pytest.raises(ModelError, match=r"layer \d cannot be read: .*Input/output error"):
                    within(10, lambda: (streamer.begin(), one_pass(streamer, store)))


def test_memory_that_is_not_given_back_stays_an_error_until_it_is() -> None:
    broken = breaks("hide", 1, OSError(12, "Cannot allocate memory"))
    with ring_over(fake_layers([0, 1, 2]), 1, broken) as (streamer, store):
        within(5, lambda: streamer.enter(0))
        for number, step in ((2, lambda: streamer.enter(1)), (3, streamer.begin)):
            with pytest.raises(ModelError, match=r"memory of a computed layer cannot be taken back: .*Cannot"):
                within(5, step)
            streamer.finish()
            assert store.shown == {0: 0}
            store.number = number
        store.number = 0
        within(5, streamer.begin)
        within(5, lambda: compute(streamer, store, 0))


def test_a_file_that_has_shrunk_is_noticed_before_a_pass() -> None:
    class Shrunk(WatchfulStore):
        def check(self) -> None:
            raise OSError("model.gguf has shrunk from 9 to 5 bytes")

    with (
        ring_over(fake_layers([0]), make=Shrunk) as (streamer, _),
        pytest.raises(ModelError, match=r"model\.gguf has shrunk from 9 to 5 bytes"),
    ):
        streamer.begin()


def test_close_releases_one_who_waits() -> None:
    with ring_over(fake_layers([0]), 1, Gated) as (streamer, store):
        waiting, closing = (
            threading.Thread(target=target, daemon=True) for target in (lambda: streamer.enter(0), streamer.close)
        )
        waiting.start()
        closing.start()
        waiting.join(10)
        assert not waiting.is_alive()
        assert closing.is_alive()  # a read under way ends first: it writes into the slot
        store.gate.set()
        closing.join(10)
        assert not closing.is_alive()


@settings(deadline=None, max_examples=60)
@given(
    count=st.integers(1, 8), gap=st.integers(1, 3), slots=st.integers(1, 4), pieces=st.integers(1, 3),
    threads=st.integers(1, 5), seed=st.integers(0, 2**32), whole=st.booleans(),
    passes=st.lists(st.integers(0, 24) | st.just(24), min_size=1, max_size=5),
)  # fmt: skip
def test_any_timing(
    count: int, gap: int, slots: int, pieces: int, threads: int, seed: int, whole: bool, passes: list[int]
) -> None:
    """Slow disks and slow layers by turns, passes that end anywhere, also by a close: no rule is broken, none hangs."""
    generator, before = random.Random(seed), threading.active_count()
    scale = generator.choice([0, 0, 1e-4, 5e-4])
    made = partial(WatchfulStore, delay=lambda: generator.random() * scale)
    with ring_over(fake_layers([gap * i for i in range(count)], pieces), slots, made, threads) as (streamer, store):

        def run() -> None:
            for number, stop in enumerate(passes, 1):
                for index in range(min(stop, streamer.plan.layers)):
                    compute(streamer, store, index, generator.random() * generator.choice([0, 2e-4]))
                with store.lock:
                    store.computing = None
                if whole or number < len(passes):
                    streamer.finish()

        within(30, run)
        within(10, streamer.close)  # and once more at the end
    assert threading.active_count() == before


# --- what both stores use ----------------------------------------------------------------------------------------


def descriptors(*, collect: bool = False) -> int:
    """Open files; `collect` before the first count, as tests before may have left some, which takes long."""
    if collect:
        gc.collect()
    gc.collect()  # earlier tests' mappings hold some
    return len(os.listdir("/proc/self/fd" if sys.platform == "linux" else "/dev/fd"))


def locked_bytes() -> int:
    found = re.search(r"VmLck:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="utf-8"))
    return int(found[1]) * 1024


class Limits:
    """Stands in for the locking limit of this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, soft: int, hard: int) -> None:
        import resource

        self.set: list[tuple[int, int]] = []
        monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
        monkeypatch.setattr(resource, "setrlimit", lambda _, limits: self.set.append(limits))


class LockingLibrary:
    """mlock up to a limit."""

    def __init__(self, limit: float) -> None:
        self.left = limit

    def mlock(self, address: int, size: int) -> int:
        if size > self.left:
            ctypes.set_errno(12)
            return -1
        self.left -= size
        return 0


RANGES = [(PAGE, 16 * MIB), (64 * MIB, 4 * MIB), (128 * MIB, 8 * MIB)]


@posix_only
@pytest.mark.parametrize(
    ("limit", "hard", "done", "note"),
    [
        (1e12, 1 << 40, [16, 4, 8], "28 MiB locked in memory"),
        (
            13 * MIB,
            13 * MIB,
            [4, 8],
            "12 MiB locked in memory, 16 MiB kept in the page cache; the limit for locked memory is 13 MiB (ulimit -l)",
        ),
        (
            20.5 * MIB,
            20 * MIB,
            [16, 4],
            "20 MiB locked in memory, 8 MiB kept in the page cache; the limit for locked memory is 20 MiB (ulimit -l)",
        ),
        (
            0,
            0,
            [],
            "0 MiB locked in memory, 28 MiB kept in the page cache; the limit for locked memory is 0 MiB (ulimit -l)",
        ),
        (5 * MIB, -1, [4], "4 MiB locked in memory, 24 MiB kept in the page cache"),
    ],
    ids=["all", "not the first", "not the last", "nothing", "no limit and yet"],
)
def test_locking_as_far_as_it_goes(
    monkeypatch: pytest.MonkeyPatch, limit: float, hard: int, done: list[int], note: str
) -> None:
    """Each range that fits, not only those before the first that does not."""
    limits = Limits(monkeypatch, 1 << 16, hard)
    locked, text = lock(LockingLibrary(limit), RANGES)
    assert [size // MIB for _, size in locked] == done
    assert set(locked) <= set(RANGES)
    assert text == note
    assert limits.set == [(hard, hard)]  # what the user may raise is raised


@posix_only
def test_limits_are_left_alone_where_there_is_nothing_to_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = Limits(monkeypatch, 1 << 30, 1 << 30)
    assert lock(LockingLibrary(1e12), []) == ([], "0 MiB locked in memory")
    assert limits.set == []


def test_the_disk_is_measured_where_the_streamed_layers_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of a model's files may hold nothing but the header."""
    asked: list[tuple[str, float, Any]] = []

    def measure(path: str, seconds: float, ranges: Any) -> float:
        asked.append((path, seconds, ranges))
        return 7e8

    monkeypatch.setattr(disk, "disk_bandwidth", measure)
    layers = [Layer(0, (Extent(1, 0, PAGE),)), Layer(1, (Extent(2, 0, PAGE), Extent(1, 3 * PAGE, 4 * PAGE)))]
    assert ring.measure_disk(["a", "b", "c"], plan_for(layers)) == 7e8
    assert [(path, ranges) for path, _, ranges in asked] == [("b", [(0, PAGE), (3 * PAGE, 4 * PAGE)])]
    assert asked[0][1] < 1  # seconds, of everybody's patience
    assert ring.measure_disk(["a"], plan_for([])) == 0
    assert len(asked) == 1


def test_warming_tells_how_far_it_is_and_stops_at_an_error() -> None:
    extents = [Extent(0, PAGE, PAGE + 2 * READ_SIZE + 5), Extent(1, 0, 7)]
    read: list[Extent] = []
    told: list[tuple[int, int]] = []
    warm(extents, read.append, lambda done, total: told.append((done, total)))
    total = 2 * READ_SIZE + 12
    assert sorted(read) == [
        Extent(0, PAGE, PAGE + READ_SIZE),
        Extent(0, PAGE + READ_SIZE, PAGE + 2 * READ_SIZE),
        Extent(0, PAGE + 2 * READ_SIZE, PAGE + 2 * READ_SIZE + 5),
        Extent(1, 0, 7),
    ]
    assert told == [(READ_SIZE, total), (2 * READ_SIZE, total), (total - 7, total), (total, total)]
    begun: list[int] = []

    def broken(piece: Extent) -> None:
        begun.append(piece.start)
        raise OSError(5, "Input/output error")

    with pytest.raises(OSError, match="Input/output"):
        warm([Extent(0, 0, 1000 * READ_SIZE)], broken, unseen)
    assert len(begun) < 1000
    begun.clear()

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        warm([Extent(0, 0, 1000 * READ_SIZE)], lambda piece: time.sleep(0.001), interrupt)


def test_mappings_of_a_file_by_device_and_number_or_by_path(tmp_path: Path) -> None:
    path = tmp_path / "a model.gguf"
    path.write_bytes(b"x" * PAGE)
    status = os.stat(path)
    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
    lines = [
        f"7f0000000000-7f0000002000 r--s 00003000 {device} {status.st_ino}      {path}",
        f"7f0000002000-7f0000003000 r--s 00000000 {device} {status.st_ino + 1}  /other",
        "7f0000003000-7f0000004000 rw-p 00000000 00:00 0 ",
        f"7f0000005000-7f0000006000 r--s 00001000 ff:1f 77   {path.resolve()}",
        f"7f0000006000-7f0000007000 r--s 00001000 ff:1f 77   {path.resolve()} (deleted)",
        "7f0000008000-7f0000009000 ---p 00000000 00:00 0    [stack]",
    ]
    maps = tmp_path / "maps"
    maps.write_text("\n".join(lines) + "\n")
    assert mappings(str(path), maps) == [
        Mapping(0x7F0000000000, 0x7F0000002000, 0x3000),
        Mapping(0x7F0000005000, 0x7F0000006000, 0x1000),  # btrfs tells another device here than to stat
    ]


@linux_only
@pytest.mark.parametrize("odd", [b"\xff", "\u2028".encode(), b"\r", b"\x0b", "\u0085".encode()])
def test_no_character_of_a_mapped_path_hinders_another(tmp_path: Path, odd: bytes) -> None:
    path, maps = tmp_path / os.fsdecode(b"mod" + odd + b"el"), tmp_path / "maps"
    path.write_bytes(b"x")
    lines = [f"7f{i}-7f{i + 1} r--s 0 ff:1f 77 {name}" for i, name in ((0, path.resolve()), (2, f"/a{path.name}"))]
    maps.write_bytes(os.fsencode("\n".join(lines)))
    assert mappings(str(path), maps) == [Mapping(0x7F0, 0x7F1, 0)]


# --- Linux -------------------------------------------------------------------------------------------------------


class Recorder:
    """The C library, with the calls that take and give back memory noted."""

    def __init__(self) -> None:
        self.library = system.libc()
        self.anonymous: Counter[tuple[int, int]] = Counter()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.library, name)

    def mmap(self, address: Any, size: int, protection: int, flags: int, descriptor: int, offset: int) -> Any:
        found = self.library.mmap(address, size, protection, flags, descriptor, offset)
        if descriptor < 0:
            self.anonymous[found, size] += 1
        return found

    def munmap(self, address: int, size: int) -> int:
        self.anonymous[address, size] -= 1
        return int(self.library.munmap(address, size))


class Mapped:
    """A file of random bytes with layers of unlike sizes, mapped as an engine maps it."""

    def __init__(self, path: Path, count: int = 7, slots: int = 3) -> None:
        generator = np.random.default_rng(5)
        self.path = path
        start, layers = 5 * PAGE, []
        for index in range(count):
            extents = []
            for _ in range(1 + index % 2):
                size = int(generator.integers(64, 600)) * PAGE
                extents.append(Extent(0, start, start + size))
                start += size + PAGE * int(generator.integers(0, 3))
            layers.append(Layer(2 * index, tuple(extents)))
        self.bytes = generator.integers(0, 256, start + 1000, np.uint8)
        path.write_bytes(self.bytes.tobytes())
        with path.open("rb") as file:
            self.memory = mmap.mmap(file.fileno(), 0, mmap.MAP_SHARED, mmap.PROT_READ)
        self.view = np.frombuffer(self.memory, np.uint8)
        self.address = self.view.ctypes.data
        pinned = (Extent(0, 0, 5 * PAGE), Extent(0, start // PAGE * PAGE, -(-len(self.bytes) // PAGE) * PAGE))
        self.plan = plan_for(layers, slots, pinned)
        self.layers = self.plan.streamed

    def store(self, library: Any = None) -> LinuxStore:
        return LinuxStore([str(self.path)], mappings(str(self.path)), self.plan, library)

    def right(self, layer: Layer) -> bool:
        return all(
            np.array_equal(self.view[extent.start : extent.stop], self.bytes[extent.start : extent.stop])
            for extent in layer.extents
        )

    def moved(self, layer: Layer) -> bool:
        """Whether the engine sees private memory in the layer's place; all of it or nothing."""
        found = {self.private(extent.start + at) for extent in layer.extents for at in (0, extent.size - PAGE)}
        assert len(found) == 1
        return found.pop()

    def all_moved(self, layers: Sequence[Layer]) -> bool:
        """As far as it can be seen while other threads move them."""
        return all(self.private(extent.start) for layer in layers for extent in layer.extents)

    def private(self, offset: int) -> bool:
        for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
            fields = line.split(maxsplit=5)
            start, stop = (int(number, 16) for number in fields[0].split("-"))
            if start <= self.address + offset < stop:
                return int(fields[4]) == 0
        raise AssertionError("nothing is mapped there")

    def load(self, store: LinuxStore, slot: int, layer: Layer) -> None:
        for extent in layer.extents:
            for start in range(extent.start, extent.stop, READ_SIZE):
                store.read(slot, layer, extent, start, min(start + READ_SIZE, extent.stop))


@pytest.fixture
def mapped(tmp_path: Path) -> Mapped:
    return Mapped(tmp_path / "model")


def refuse_direct(path: str) -> tuple[int, bool]:
    return os.open(path, os.O_RDONLY), False


@linux_only
@pytest.mark.parametrize("direct", [True, False])
def test_bytes_are_right_before_during_and_after(mapped: Mapped, monkeypatch: pytest.MonkeyPatch, direct: bool) -> None:
    if not direct:
        monkeypatch.setattr(direct_io, "open_direct", refuse_direct)
    store = mapped.store()
    if not direct:
        assert store._direct.steps == [direct_io.THROUGH_CACHE]
    store.drop([extent for layer in mapped.layers for extent in layer.extents])
    for number, layer in enumerate(mapped.layers * 3):  # so slots hold layers of unlike sizes by turns
        slot = number % mapped.plan.slots
        assert not mapped.moved(layer)
        mapped.load(store, slot, layer)
        assert not mapped.moved(layer)
        assert mapped.right(layer)
        store.show(slot, layer)
        assert mapped.moved(layer)
        assert mapped.right(layer)
        others = [other for other in mapped.layers if other is not layer]
        assert all(mapped.right(other) and not mapped.moved(other) for other in others[:2])
        store.hide(slot, layer)
        assert not mapped.moved(layer)
        assert mapped.right(layer)
    store.close()
    np.testing.assert_array_equal(mapped.view, mapped.bytes)


@linux_only
def test_what_is_shown_was_read_and_is_not_the_files_mapping(mapped: Mapped) -> None:
    """Bytes changed between reading and showing: the engine sees those that were read."""
    store, layer = mapped.store(), mapped.layers[1]
    mapped.load(store, 0, layer)
    extent = layer.extents[0]
    with mapped.path.open("r+b") as file:
        file.seek(extent.start)
        file.write(b"\0" * 64)
    store.show(0, layer)
    assert mapped.right(layer)
    store.hide(0, layer)
    assert not mapped.view[extent.start : extent.start + 64].any()
    store.close()


@linux_only
def test_several_layers_at_once_while_others_are_read(mapped: Mapped) -> None:
    store = mapped.store()
    for slot, layer in enumerate(mapped.layers[:3]):
        mapped.load(store, slot, layer)
        store.show(slot, layer)
    assert all(mapped.right(layer) and mapped.moved(layer) for layer in mapped.layers[:3])
    store.hide(1, mapped.layers[1])
    mapped.load(store, 1, mapped.layers[5])
    assert mapped.right(mapped.layers[0])
    assert mapped.right(mapped.layers[2])
    store.close()  # with layers shown
    assert not any(mapped.moved(layer) for layer in mapped.layers)
    np.testing.assert_array_equal(mapped.view, mapped.bytes)


@linux_only
def test_dropped_layers_leave_the_page_cache_and_pinned_ones_stay(tmp_path: Path) -> None:
    """But for the large pages (2 MiB at most) that reach over a layer's edge."""
    path, middle = tmp_path / "model", Extent(0, 4 * MIB, 20 * MIB)
    with path.open("wb") as file:
        file.write(os.urandom(1) * 24 * MIB)
        file.flush()
        os.fsync(file.fileno())  # what is not written to the disk yet cannot be dropped
    with path.open("rb") as file:
        memory = mmap.mmap(file.fileno(), 0, mmap.MAP_SHARED, mmap.PROT_READ)
    view = np.frombuffer(memory, np.uint8)
    libc = system.libc()

    def resident(extent: Extent) -> int:
        pages = (ctypes.c_ubyte * (extent.size // PAGE))()
        address = ctypes.c_void_p(view.ctypes.data + extent.start)
        assert libc.mincore(address, ctypes.c_size_t(extent.size), pages) == 0
        return sum(page & 1 for page in pages) * PAGE

    assert view.max() == view.min()
    assert resident(middle) == middle.size
    edges = Extent(0, 0, middle.start), Extent(0, middle.stop, 24 * MIB)
    plan = plan_for([Layer(0, (middle,))], pinned=edges)
    store = LinuxStore([str(path)], mappings(str(path)), plan)
    store.drop([middle])
    if resident(middle) == middle.size:
        pytest.skip("this file system does not let go of its cache")
    assert resident(middle) <= 4 * MIB
    os.posix_fadvise(store._files.descriptors[0], 0, 0, os.POSIX_FADV_DONTNEED)
    store.preload(plan.pinned, unseen)
    assert [resident(extent) for extent in edges] == [extent.size for extent in edges]
    assert "8 MiB" in store.note
    store.close()


@linux_only
def test_pinned_weights_that_cannot_be_locked_are_mapped(mapped: Mapped) -> None:
    """Also where the one that cannot be locked comes first: mapped pages are the last to be given up."""

    class Refusing(Recorder):
        def __init__(self) -> None:
            super().__init__()
            self.populated: list[int] = []
            self.locked: list[int] = []

        def mlock(self, address: int, size: int) -> int:
            if size > 3 * PAGE:
                ctypes.set_errno(12)
                return -1
            self.locked.append(address)
            return 0

        def madvise(self, address: int, size: int, advice: int) -> int:
            if advice == linux.MADV_POPULATE_READ:
                self.populated.append(address)
            return int(self.library.madvise(address, size, advice))

        def munlock(self, address: int, size: int) -> int:
            self.locked.remove(address)
            return 0

    library = Refusing()
    store = mapped.store(library)
    store.preload(mapped.plan.pinned, unseen)
    small = mapped.address + mapped.plan.pinned[1].start
    assert library.locked == [small]
    assert sorted(library.populated) == [mapped.address, small]
    store.close()
    assert library.locked == []


@linux_only
def test_many_passes_leave_nothing_behind(mapped: Mapped) -> None:
    def entries() -> int:
        return len(Path("/proc/self/maps").read_text(encoding="utf-8").splitlines())

    files, threads, locked, before = (
        descriptors(collect=True),
        threading.active_count(),
        locked_bytes(),
        mappings(str(mapped.path)),
    )
    library = Recorder()
    store = mapped.store(library)
    store.drop([extent for layer in mapped.layers for extent in layer.extents])
    store.preload(mapped.plan.pinned, unseen)
    streamer = Streamer(mapped.plan, store)

    def passes(count: int) -> None:
        for number in range(count):
            streamer.begin()
            for index in range(mapped.plan.layers):
                streamer.enter(index)
                if index % 2 == 0 and number % 20 == 0:
                    assert mapped.moved(mapped.layers[index // 2])
                    assert mapped.right(mapped.layers[index // 2])
                if number % 7 == 3 and index == number % mapped.plan.layers:
                    break  # a pass given up
            streamer.finish()
        until(lambda: mapped.all_moved(mapped.layers[:3]))

    within(60, lambda: passes(10))
    start = entries()
    within(60, lambda: passes(60))
    assert entries() <= start + 2
    assert len(mappings(str(mapped.path))) <= 2 * sum(len(layer.extents) for layer in mapped.layers) + 3
    within(10, streamer.close)
    assert descriptors() == files
    assert threading.active_count() == threads
    assert locked_bytes() == locked
    after = mappings(str(mapped.path))  # in pieces: mapped through another descriptor, they stay apart
    assert (after[0].start, after[-1].stop) == (before[0].start, before[0].stop)
    assert all(left.stop == right.start for left, right in itertools.pairwise(after))
    assert all(piece.start - piece.offset == before[0].start for piece in after)
    assert set(library.anonymous.values()) == {0}
    np.testing.assert_array_equal(mapped.view, mapped.bytes)
    streamer.close()
    store.close()


@linux_only
def test_a_truncated_file_is_an_error_not_a_crash(mapped: Mapped) -> None:
    store, last = mapped.store(), mapped.layers[-1]
    extent = last.extents[-1]
    os.truncate(mapped.path, extent.start + PAGE + 100)
    with pytest.raises(OSError, match=r"the file ends at byte \d+; it must have shrunk"):
        store.read(0, last, extent, extent.start, extent.stop)
    with pytest.raises(OSError, match=rf"{mapped.path} has shrunk from \d+ to {extent.start + PAGE + 100} bytes"):
        store.check()
    streamer = Streamer(mapped.plan, store)
    with pytest.raises(ModelError, match=rf"layer {last.index} cannot be read: the file ends"):
        within(20, lambda: [streamer.enter(index) for index in range(mapped.plan.layers)])
    within(5, streamer.close)


@linux_only
def test_a_file_that_is_whole_again_is_read_again(mapped: Mapped) -> None:
    store = mapped.store()
    streamer = Streamer(mapped.plan, store)

    def one_pass() -> None:
        streamer.begin()
        try:
            for index in range(mapped.plan.layers):
                streamer.enter(index)
                assert index % 2 or mapped.right(mapped.layers[index // 2])
        finally:
            streamer.finish()

    within(10, one_pass)
    until(lambda: mapped.all_moved(mapped.layers[:3]))
    os.truncate(mapped.path, PAGE)
    within(10, lambda: [streamer.enter(index) for index in range(5)])  # what was read ahead is there
    with pytest.raises(ModelError, match="it must have shrunk"):
        within(10, lambda: [streamer.enter(index) for index in range(mapped.plan.layers)])
    streamer.finish()
    with pytest.raises(ModelError, match="has shrunk from"):
        within(10, one_pass)
    with mapped.path.open("r+b") as file:
        file.write(mapped.bytes.tobytes())
    within(10, one_pass)
    within(5, streamer.close)
    np.testing.assert_array_equal(mapped.view, mapped.bytes)


@linux_only
@pytest.mark.parametrize("name", ["mremap", "mmap"])
def test_what_failed_halfway_can_be_done_again(mapped: Mapped, name: str) -> None:
    """Layers of two pieces, whose first, second, … call fails."""
    layer, other = mapped.layers[1], mapped.layers[3]
    assert len(layer.extents) == len(other.extents) == 2

    class Failing(Recorder):
        left = -1

        def fail(self) -> bool:
            self.left -= 1
            if self.left == 0:
                ctypes.set_errno(12)
            return self.left == 0

        def mremap(self, *arguments: Any) -> Any:
            return system.MAP_FAILED if name == "mremap" and self.fail() else self.library.mremap(*arguments)

        def mmap(self, *arguments: Any) -> Any:
            return system.MAP_FAILED if name == "mmap" and self.fail() else super().mmap(*arguments)

    library = Failing()
    store = mapped.store(library)
    for call in (1, 2):
        if name == "mremap":
            mapped.load(store, 0, layer)
            library.left = call
            with pytest.raises(OSError, match="mremap: Cannot allocate memory"):
                store.show(0, layer)
            assert mapped.right(layer)  # all or nothing
            assert not mapped.moved(layer)
        mapped.load(store, 0, layer)
        store.show(0, layer)
        library.left = call
        with pytest.raises(OSError, match=f"{name}: Cannot allocate memory"):
            store.hide(0, layer)
        store.hide(0, layer)
        assert mapped.right(layer)
        assert not mapped.moved(layer)
        mapped.load(store, 0, other)  # the slot is memory again
        store.show(0, other)
        assert mapped.right(other)
        store.hide(0, other)
    store.close()
    np.testing.assert_array_equal(mapped.view, mapped.bytes)


@linux_only
def test_a_file_that_grows_is_no_concern(mapped: Mapped) -> None:
    store = mapped.store()
    with mapped.path.open("ab") as file:
        file.write(b"more")
    store.check()
    store.close()


@linux_only
def test_what_cannot_be_opened_or_mapped_leaves_nothing(mapped: Mapped, tmp_path: Path) -> None:
    files = descriptors(collect=True)
    with pytest.raises(FileNotFoundError):
        LinuxStore([str(mapped.path), str(tmp_path / "missing")], mappings(str(mapped.path)), mapped.plan)
    assert descriptors() == files

    class Full(Recorder):
        def mmap(self, *arguments: Any) -> Any:
            if self.anonymous.total():
                ctypes.set_errno(12)
                return system.MAP_FAILED
            return super().mmap(*arguments)

    library = Full()
    with pytest.raises(OSError, match="mmap: Cannot allocate memory"):
        mapped.store(library)
    assert descriptors() == files
    assert set(library.anonymous.values()) == {0}


class OldLibrary(Recorder):
    """Linux before 5.7: mremap does not know MREMAP_DONTUNMAP."""

    def mremap(self, *arguments: Any) -> int:
        ctypes.set_errno(22)
        return system.MAP_FAILED


@linux_only
def test_a_kernel_that_cannot_move_pages_streams_through_the_page_cache(
    mapped: Mapped, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found when the model is loaded, not at the first pass."""
    files, library = descriptors(collect=True), OldLibrary()
    monkeypatch.setattr(linux, "libc", lambda: library)
    machine = replace(this_machine(), moves_pages=system.moves_pages(library))
    whole = mappings(str(mapped.path))
    store = ring.open_store([str(mapped.path)], whole, mapped.plan, machine)
    assert isinstance(store, CachedLinuxStore)
    store.drop([extent for layer in mapped.layers for extent in layer.extents])
    store.preload(mapped.plan.pinned, unseen)
    assert "locked in memory" in store.note
    assert store.note.endswith("through the page cache, as this kernel cannot move pages (Linux 5.7 and later can)")
    dropped: list[tuple[int, int]] = []
    really = store.drop
    monkeypatch.setattr(store, "drop", lambda some: (dropped.extend((e.start, e.size) for e in some), really(some)))
    streamer = Streamer(mapped.plan, store)

    def passes() -> None:
        for _ in range(3):
            streamer.begin()
            for index in range(mapped.plan.layers):
                streamer.enter(index)
                if index % 2 == 0:
                    assert mapped.right(mapped.layers[index // 2])
                    assert not mapped.moved(mapped.layers[index // 2])
            streamer.finish()

    within(30, passes)
    until(lambda: len(dropped) >= 3 * sum(len(layer.extents) for layer in mapped.layers))
    within(5, streamer.close)
    assert set(dropped) == {(e.start, e.size) for layer in mapped.layers for e in layer.extents}
    assert set(library.anonymous.values()) <= {0}  # no memory was taken but for the trial
    assert descriptors() == files
    os.truncate(mapped.path, PAGE)
    extent = mapped.layers[0].extents[0]
    store = ring.open_store([str(mapped.path)], whole, mapped.plan, machine)
    with pytest.raises(OSError, match="it must have shrunk"):
        store.read(0, mapped.layers[0], extent, extent.start, extent.stop)
    store.close()


@linux_only
def test_this_kernel_is_tried_and_the_trial_leaves_nothing(mapped: Mapped, monkeypatch: pytest.MonkeyPatch) -> None:
    library = Recorder()
    assert system.moves_pages(library)
    assert sum(library.anonymous.values()) == 0
    assert not system.moves_pages(OldLibrary())

    class Full(Recorder):
        def mmap(self, *arguments: Any) -> Any:
            ctypes.set_errno(12)
            return system.MAP_FAILED

    with pytest.raises(OSError, match="mmap: Cannot allocate memory"):
        system.moves_pages(Full())


@linux_only
def test_a_model_in_two_files(tmp_path: Path) -> None:
    both = [Mapped(tmp_path / "a"), Mapped(tmp_path / "b", count=4)]
    second = [
        Layer(20 + layer.index, tuple(Extent(1, e.start, e.stop) for e in layer.extents)) for layer in both[1].layers
    ]
    plan = plan_for([*both[0].layers, *second])
    store = LinuxStore([str(one.path) for one in both], [mappings(str(one.path))[0] for one in both], plan)
    for slot, (layer, file) in enumerate([(both[0].layers[2], 0), (second[1], 1)]):
        both[file].load(store, slot, layer)
        store.show(slot, layer)
    assert both[0].right(both[0].layers[2])
    assert both[0].moved(both[0].layers[2])
    assert both[1].right(second[1])
    assert both[1].moved(second[1])
    store.close()


# --- macOS -------------------------------------------------------------------------------------------------------


class NotingLibrary:
    """Notes the calls, which do nothing."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Callable[..., int]:
        return lambda *arguments: (self.calls.append((name, *arguments)), 0)[1]


FIRST = 1 << 40  # where the file is mapped


@posix_only
@pytest.mark.parametrize("kind", [LinuxStore, CachedLinuxStore])
def test_no_address_outside_the_mapping_of_the_file_is_touched(
    kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llama.cpp unmaps the ends of a file that it does not use, and other memory of the process may lie there."""
    Limits(monkeypatch, 1 << 40, 1 << 40)
    path, library = tmp_path / "model", NotingLibrary()
    path.write_bytes(bytes(3 * MIB))
    first, last = MIB, 2 * MIB
    store = kind([str(path)], [Mapping(FIRST, FIRST + MIB, MIB)], plan_for([]), library)
    before = list(library.calls)
    outside = [(first - PAGE, first), (first - PAGE, first + PAGE), (last - PAGE, last + PAGE), (last, last + PAGE)]
    for start, stop in [*outside, (first, 1 << 62)]:
        extent = Extent(0, start, stop)
        layer = Layer(0, (extent,))
        steps = (
            (store.drop, [extent]),
            (store.look_up, [extent]),
            (store.hide, 0, layer),
            (store.preload, [extent], unseen),
        )
        for step, *arguments in steps:
            with pytest.raises(OSError, match="not mapped"):
                step(*arguments)
    assert library.calls == before
    store.close()


@posix_only
def test_the_system_chooses_the_store(mapped: Mapped) -> None:
    seen = mappings(str(mapped.path)) if sys.platform == "linux" else []
    for platform, kind in (("linux", LinuxStore), ("win32", Store)):
        if platform == "linux" != sys.platform:
            continue
        machine = replace(this_machine(), platform=platform)
        assert ring.can_stream(machine) == (platform == "linux")
        store = ring.open_store([str(mapped.path)], seen, mapped.plan, machine)
        assert type(store) is kind
        store.close()
    assert ring.can_stream(replace(this_machine(), platform="darwin"))
