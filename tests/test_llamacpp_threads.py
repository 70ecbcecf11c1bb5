"""Threads that make room for other programs, without changing a bit of what is computed."""

import os
import subprocess
import sys
import threading

import numpy as np
import pytest

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")

from edgespec.backends.llamacpp import backend, engine
from edgespec.backends.llamacpp.ggml.files import ggml_library, llama_cpp
from edgespec.backends.llamacpp.memory import threads
from edgespec.backends.llamacpp.memory.attention import can_be_alike
from edgespec.backends.llamacpp.memory.threads import (
    CALM,
    CROWDED,
    SPLIT_CELLS,
    WINDOW,
    OtherLoad,
    ShortWaits,
    SlowPasses,
    Usage,
    busy_processors,
    busy_ticks,
    others_run,
    threads_for,
)

from edgespec.loop.backend import Work
from edgespec.loop.passes import prefill

STAT = """\
cpu  111 222 333 444 555 666 777 888 0 0
cpu0 100 20 30 1000 50 4 5 60 0 0
cpu1 1 2 3 4 5 6 7 8 0 0
cpu12 1000 0 0 0 0 0 0 0 0 0
intr 12345 0 0
"""


def test_ticks_of_the_processors_that_may_be_used_by_programs_of_all_priorities() -> None:
    assert busy_ticks(STAT, {0}) == 100 + 20 + 30 + 4 + 5
    assert busy_ticks(STAT, {0, 1}) == 159 + 1 + 2 + 3 + 6 + 7
    assert busy_ticks(STAT, {12}) == 1000


@pytest.mark.parametrize(
    ("others", "was_crowded", "seen"),
    [
        (0.0, False, 0.0),
        (CROWDED - 0.1, False, 0.0),
        (CROWDED + 0.1, False, CROWDED + 0.1),
        (CROWDED - 0.1, True, CROWDED - 0.1),
        (CALM - 0.1, True, 0.0),
        (-0.2, True, 0.0),  # ticks are counted more coarsely than the process's own time
    ],
)
def test_processors_that_others_keep_busy(others: float, was_crowded: bool, seen: float) -> None:
    before, after = Usage(10.0, 100.0, 40.0), Usage(12.0, 100.0 + 2 * (1.5 + others), 43.0)
    assert busy_processors(before, after, was_crowded) == pytest.approx(seen)


@pytest.mark.parametrize(
    ("threads", "others", "fewer"),
    [
        (1, 1.0, 1),
        (2, 0.0, 2),
        (2, 0.6, 1),
        (2, 2.0, 1),
        (4, 0.0, 4),
        (4, 0.5, 3),
        (4, 2.2, 2),
        (4, 4.0, 2),
        (16, 1, 15),
    ],
)
def test_threads_make_room(threads: int, others: float, fewer: int) -> None:
    assert threads_for(threads, others, 0, nodes=2, cells=5000) == fewer
    assert threads_for(threads, others, 0, nodes=1, cells=SPLIT_CELLS) == fewer
    assert threads_for(threads, others, 1, nodes=1, cells=SPLIT_CELLS + 1) == threads
    assert threads_for(threads, 0.0, threads - fewer, nodes=2, cells=5000) == fewer


def test_the_processors_are_looked_at_now_and_then() -> None:
    busy = [0.0, 0.0, 1.0, 1.0, 0.4, 0.1]  # of others, in the window before each look
    usages, everybody = list[Usage](), 0.0
    for i, others in enumerate(busy):
        everybody += others * WINDOW
        usages.append(Usage(i * WINDOW, everybody, 0.0))
    changes = list[bool]()
    looks = iter(usages)
    crowd = OtherLoad(lambda: next(looks), changes.append, lambda: pytest.fail("the last look was not long ago"))
    assert crowd.others(0.5 * WINDOW) == 0
    assert crowd.others(1 * WINDOW) == 0
    assert crowd.others(2 * WINDOW) == pytest.approx(1)
    assert crowd.others(2.9 * WINDOW) == pytest.approx(1)
    assert changes == [True]
    assert crowd.others(3 * WINDOW) == pytest.approx(1)
    assert crowd.others(4 * WINDOW) == pytest.approx(0.4)
    assert changes == [True]
    assert crowd.others(5 * WINDOW) == 0
    assert changes == [True, False]


def test_a_second_thread_takes_the_sample_of_the_first() -> None:
    """A draft's pass begins while the target's looks: its own sample would be over no time."""
    usages, changes, found = [Usage(WINDOW, WINDOW, 0.0), Usage(0.0, 0.0, 0.0)], list[bool](), list[float]()

    def usage() -> Usage:
        sample = usages.pop() if usages else Usage(WINDOW + 1e-4, WINDOW, 0.0)
        if sample.at == WINDOW:
            second = threading.Thread(target=lambda: found.append(crowd.others(WINDOW)))
            second.start()
            second.join(60)
        return sample

    crowd = OtherLoad(usage, changes.append, lambda: pytest.fail("the last look was not long ago"))
    assert crowd.others(WINDOW) == pytest.approx(1)
    assert crowd.others(WINDOW) == pytest.approx(1)
    assert (found, changes) == ([0.0], [True])


def passes(slow: SlowPasses, begin: float, *seconds: float, cells: int = 9) -> tuple[list[int], float]:
    """Threads left out of passes of one node that follow each other, and when the last ends; 4 threads."""
    found = []
    for took in seconds:
        found.append(slow.fewer(begin))
        begin += took
        slow.took(1, cells, found[-1], took, begin, 4)
    return found, begin


def test_a_slow_pass_gives_up_a_thread_at_once_until_a_trial_shows_that_it_is_no_use() -> None:
    slow = SlowPasses()
    found, now = passes(slow, 0.0, 0.3, 0.1, 0.1, 0.29, 2.0)
    assert found == [0, 0, 0, 0, 0]
    found, now = passes(slow, now, 0.2, 0.2, 2.0)  # as long as the slow pass took
    assert found == [1, 1, 1]
    assert passes(slow, now, 0.2) == ([2], now + 0.2)
    found, now = passes(slow, now + 5.0, 0.1, 0.1, 0.1)
    assert found == [1, 0, 0]


def test_trials_that_fail_become_rare() -> None:
    slow, now = SlowPasses(), 0.0
    passes(slow, now, 0.1)
    trials = list[float]()
    while now < 300:
        tried = slow.fewer(now) == 0
        trials += [now] if tried else []
        _, now = passes(slow, now, 1.0 if tried else 0.1)
    assert 1 <= trials[1] - trials[0] < 3
    assert trials[-1] - trials[-2] > 20
    assert len(trials) < 25


def test_passes_of_other_sizes_and_a_growing_cache_are_not_slow() -> None:
    slow, now = SlowPasses(), 0.0
    for i in range(200):
        assert slow.fewer(now) == 0
        now += 0.1 * 1.015**i
        slow.took(1, 9, 0, 0.1 * 1.015**i, now, 4)
    slow.took(512, 9, 0, 60.0, now + 60, 4)
    assert slow.fewer(now + 60) == 0


def test_threads_are_given_up_to_the_last() -> None:
    slow = SlowPasses()
    passes(slow, 0.0, 0.1)
    for _ in range(6):
        slow.took(1, 9, fewer := slow.fewer(0.0), 0.4 * 4 / (4 - fewer), 0.0, 4)
    assert slow.fewer(0.0) == 3
    assert threads_for(4, 4.0, 3, nodes=2, cells=5000) == 1


def test_a_longer_context_is_no_disturbance() -> None:
    slow = SlowPasses()
    _, now = passes(slow, 0.0, *[0.01] * 100)
    assert passes(slow, now, *[0.04] * 20, cells=4000)[0] == [0] * 20


def test_a_long_prompt_is_no_disturbance() -> None:
    """Where attention takes most of the time, each pass takes longer than the one before."""
    slow, now, found = SlowPasses(), 0.0, list[int]()
    for busy, count in [*((1, k) for k in range(1, 17)), (4, 17), (4, 18)]:
        found.append(slow.fewer(now))
        seconds = busy * (4.1 + 2.4 * count)
        now += seconds
        slow.took(512, 512 * count, found[-1], seconds, now, 8)
    assert found == [0] * 17 + [1]


def test_passes_with_fewer_threads_take_longer_without_a_disturbance() -> None:
    slow, now, left_out = SlowPasses(), 0.0, list[int]()
    for full in [0.1, *[0.5] * 3, *[0.1] * 20]:
        left_out.append(slow.fewer(now))
        _, now = passes(slow, now, full * 4 / (4 - left_out[-1]))
    assert max(left_out) == 3
    assert left_out[-1] == 0


def test_a_text_that_grows_in_a_disturbance_is_still_compared_with_undisturbed_passes() -> None:
    slow = SlowPasses()
    _, now = passes(slow, 0.0, 0.1, 0.1, 0.5, cells=127)
    found, now = passes(slow, now, *[0.1 * 4 / 3] * 4, 0.5, 0.1, cells=128)
    assert found == [1, 1, 1, 1, 0, 1]


def test_a_system_that_does_not_say_how_busy_it_is() -> None:
    unknown = OtherLoad(lambda: None, lambda _: pytest.fail("nothing is known"), lambda: pytest.fail("nor this"))
    assert unknown.others(1e9) == 0


@pytest.mark.parametrize("now", [True, False])
def test_what_was_busy_long_ago_may_have_ended(now: bool) -> None:
    """A program asks a model when it has done its own work: the prompt gets all threads."""
    looks = iter([Usage(0.0, 0.0, 0.0), Usage(9.0, 9.0, 0.0), Usage(9.0 + WINDOW, 9.0 + WINDOW, 0.0)])
    crowd = OtherLoad(lambda: next(looks), lambda _: None, lambda: now)
    assert crowd.others(9.0) == pytest.approx(1.0 if now else 0.0)
    assert crowd.others(9.0 + WINDOW) == pytest.approx(1.0)  # it does go on


def test_what_was_busy_during_a_long_pass_is() -> None:
    looks = iter([Usage(0.0, 0.0, 0.0), Usage(9.0, 9.0, 0.0)])
    crowd = OtherLoad(lambda: next(looks), lambda _: None, lambda: pytest.fail("the last pass was not long ago"))
    crowd.pass_ended(8.9)
    assert crowd.others(9.0) == pytest.approx(1.0)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_whether_others_run_in_this_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        try:
            assert any(others_run() for _ in range(1000))  # it has to start
        finally:
            busy.kill()
    monkeypatch.setattr(threads, "_runs", lambda task: 10_000)  # all that run are this program's
    assert not others_run()


def test_short_waits_end_again() -> None:
    waits, before = ShortWaits(), set(threading.enumerate())
    waits.switch(True)
    started = set(threading.enumerate()) - before
    assert len(started) == hasattr(ggml_library("ggml-cpu"), "GOMP_parallel")
    waits.switch(False)
    for thread in started:
        thread.join(60)
        assert not thread.is_alive()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_text_after_trials_in_another_thread_is_not_slower(small_q4) -> None:
    """As in a first run. While OpenMP keeps more threads than there are CPUs, passes have short waits."""

    def threads_left() -> None:
        tried = engine.load(str(small_q4), context_length=64, budget=8, threads=2)
        before = len(os.listdir("/proc/self/task"))
        prefill(tried, tried.open(), [1, 2, 3])
        during = len(os.listdir("/proc/self/task"))
        tried.close()
        counts.append((during - before, len(os.listdir("/proc/self/task")) - before))

    counts = list[tuple[int, int]]()
    thread = threading.Thread(target=threads_left)
    thread.start()
    thread.join()
    assert counts == [(1, 0)]


def tree_bits(backend, session, parents):
    """Bits of the logits of all nodes of a tree; the session forgets them again."""
    nodes = np.arange(len(parents), dtype=np.int32)
    logits = backend.forward([Work(session, nodes + 5, np.asarray(parents, np.int32), nodes)])[0]
    rows = np.stack([logits.row(node) for node in nodes])
    session.rewind(len(session.token_ids))
    return rows.view(np.int32)


@pytest.mark.parametrize(
    ("kind", "options", "splits"),
    [
        ("small_q4", {}, True),
        ("small_q2k", {}, True),
        ("small_q4", {"exact": "narrow"}, False),
        ("small_q2k", {"exact": "narrow"}, False),
        ("small_q4", {"kv_type": "q8_0"}, False),
    ],
)
def test_making_room_changes_no_bit(kind, options, splits, request, monkeypatch) -> None:
    """Plain decoding of long texts makes room, too, where one row has the kernel for a few rows."""
    path = str(request.getfixturevalue(kind))
    busy, used = [0.0], list[int]()
    set_threads = llama_cpp.llama_set_n_threads

    class Others:
        def others(self, now: float) -> float:
            return max(0.0, busy[-1])

        def pass_ended(self, now: float) -> None:
            pass

    class Slow:
        def fewer(self, now: float) -> int:
            return int(busy[-1] < 0)

        def took(self, *about) -> None:
            pass

    def spy(context, threads, batch_threads) -> None:
        used.append(threads)
        set_threads(context, threads, batch_threads)

    monkeypatch.setattr("edgespec.machine.this_machine.compute_cores", lambda: 3)
    for module in (engine, backend):
        monkeypatch.setattr(module, "other_load", Others)
    monkeypatch.setattr(backend, "SlowPasses", Slow)
    monkeypatch.setattr(llama_cpp, "llama_set_n_threads", spy)
    model = engine.load(path, context_length=1024, budget=64, **options)
    splits = splits or ("exact" in options and not can_be_alike(None))
    assert model.splits_cells == splits
    session = model.open()

    def read(length, tree, others):
        """Bits of the logits, and the threads that computed them."""
        busy.append(0.0)
        prefill(model, session, [5 + i * 7 % 250 for i in range(length)])
        busy.append(others)
        return tree_bits(model, session, tree), used[-1]

    for length in (SPLIT_CELLS - 1, SPLIT_CELLS, 600, 100):  # what a longer text held is free again
        for tree in ([-1], [-1, 0, 0, 1, 1, 2], [*range(-1, 64)]):
            bits, threads = zip(*(read(length, tree, others) for others in (0.0, 1.0, 5.0, -1.0)), strict=True)
            assert threads == ((3,) * 4 if splits and len(tree) == 1 and length >= SPLIT_CELLS else (3, 2, 2, 2))
            for other in bits[1:]:
                assert np.array_equal(bits[0], other), (length, len(tree))
    session.close()
    model.close()


def test_a_number_of_threads_that_was_asked_for_stays(small_q4, monkeypatch) -> None:
    for module in (engine, backend):
        monkeypatch.setattr(module, "other_load", lambda: pytest.fail("nobody is made room for"))
    model = engine.load(str(small_q4), context_length=256, threads=2)
    session = model.open()
    tree_bits(model, session, [-1, 0])
    session.close()
    model.close()
