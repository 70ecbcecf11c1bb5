"""Texts that are only prepared never stand in the way of those that somebody waits for."""

from itertools import islice

import pytest
from test_pool import pooled, until
from test_scheduler import PROMPTS, Reader, Recording, alone, backend, planners, run

from edgespec.errors import ModelError, SessionFileError
from edgespec.scheduler.disk_cache import DiskCache
from edgespec.scheduler.events import Cancelled, Ended
from edgespec.scheduler.scheduler import Scheduler


def prepared(scheduler, *asked, idle_limit=0, steps=20, **more):
    """A held request, prepared as far as it may be."""
    reader = Reader(scheduler, *asked, idle_limit=idle_limit, **more)
    for _ in range(steps):
        scheduler.step()
    assert reader.ended is None
    return reader


def test_what_is_held_gives_its_cells_to_what_is_asked():
    scheduler = Scheduler(pooled(cells=300), planners("none", 3), budget=4)
    held = prepared(scheduler, 4, max_tokens=100)
    asked = Reader(scheduler, 6, max_tokens=100)
    run(scheduler, 500)
    asked.check()
    assert isinstance(held.ended.error, Cancelled)
    assert not scheduler.promote(held.seq)
    scheduler.close()


def test_what_is_held_waits_for_cells_without_a_pass():
    """Two held texts that have no room beside each other: the later one gets it; neither is waited for."""
    scheduler = Scheduler(pooled(cells=300), planners("none", 3), budget=4)
    first = prepared(scheduler, 4, max_tokens=100)
    second = prepared(scheduler, 6, max_tokens=100)
    assert first.ended
    assert not scheduler._queue
    asked = Reader(scheduler, 2, max_tokens=100)
    scheduler.step()
    assert scheduler.active == 1
    third = Reader(scheduler, 4, max_tokens=100, idle_limit=0)
    run(scheduler, 500)
    asked.check()
    for _ in range(20):
        scheduler.step()
    assert not scheduler._queue
    assert scheduler.promote(third.seq)
    run(scheduler, 500)
    third.check()
    assert second.ended
    scheduler.close()


def test_a_request_does_not_wait_for_a_prompt_that_nobody_reads():
    """The held one stops reading as soon as another is asked for; who begins alike does not wait for it."""
    scheduler = Scheduler(backend("two classes", max_nodes=41), planners("none", 3), budget=4)
    busy = Reader(scheduler, 1, 0.7, 1, 100)
    held = Reader(scheduler, 4, idle_limit=0)
    for _ in range(3):
        scheduler.step()
    assert held.ended is None
    asked = Reader(scheduler, 4, 0.7, 3, 8)
    while not asked.ended:
        scheduler.step()
        assert not busy.ended
    asked.check()
    run(scheduler)
    busy.check()
    held.seq.cancel()
    scheduler.close()


def test_a_held_text_that_gives_way_is_nobodys_answer(monkeypatch):
    monkeypatch.setattr("edgespec.scheduler.session_pool.RESERVED", 4)
    scheduler = Scheduler(pooled(cells=130, context=120), planners("none", 3), budget=4)
    held = prepared(scheduler, 0, 0.7, 1, 100, idle_limit=30, steps=60)
    assert len(held.tokens) >= 30
    asked = Reader(scheduler, 1, 0.7, 2, 110)
    run(scheduler)
    asked.check()
    assert not scheduler.promote(held.seq)
    assert isinstance(held.ended.error, Cancelled)
    scheduler.close()


def test_a_held_text_that_failed_is_nobodys_answer():
    target = backend(kind=Recording)
    scheduler = Scheduler(target, planners("none", 3), budget=4)
    target.failing = lambda batch: ModelError("the disk is gone")
    held = Reader(scheduler, 1, idle_limit=3)
    for _ in range(3):
        scheduler.step()
    assert str(held.ended.error) == "the disk is gone"
    assert not scheduler.promote(held.seq)
    scheduler.close()


def test_texts_are_saved_while_something_is_held(tmp_path):
    target = backend()
    scheduler = Scheduler(target, planners("none", 3), budget=4)
    scheduler.pool.disk_cache = DiskCache(tmp_path, target, 1 << 20, least=16)
    scheduler.start()
    asked = Reader(scheduler, 4)
    until(lambda: asked.ended)
    held = Reader(scheduler, 6, idle_limit=0)
    until(lambda: len(list(tmp_path.glob("*.kept"))) == 1)
    assert scheduler.active == scheduler.waiting == 0
    until(lambda: scheduler.kept_tokens >= 158 + 90)  # both prompts are read
    held.seq.cancel()  # this alone wakes the thread, and its text is saved, too
    until(lambda: held.ended)
    until(lambda: len(list(tmp_path.glob("*.kept"))) == 2)
    scheduler.close()


def test_an_error_in_a_round_ends_all_texts_and_the_thread_goes_on(monkeypatch):
    scheduler = Scheduler(backend(), planners("none", 3), budget=4)
    whole = scheduler._admit

    def fails():
        raise ZeroDivisionError("in the scheduler")

    monkeypatch.setattr(scheduler, "_admit", fails)
    scheduler.start()
    readers = [Reader(scheduler, 1), Reader(scheduler, 2, idle_limit=3)]
    until(lambda: all(reader.ended for reader in readers))
    assert all(isinstance(reader.ended.error, ZeroDivisionError) for reader in readers)
    monkeypatch.setattr(scheduler, "_admit", whole)
    later = Reader(scheduler, 1)
    until(lambda: later.ended)
    later.check()
    scheduler.close()


def test_a_shelf_that_cannot_tell_the_model_is_done_without(tmp_path, monkeypatch):
    target, said = backend(), []
    scheduler = Scheduler(target, planners("none", 3), budget=4)
    scheduler.pool.disk_cache = DiskCache(tmp_path, target, 1 << 20, least=16, say=said.append)

    def gone(self):
        raise SessionFileError("model.gguf: cannot be read")

    monkeypatch.setattr(type(target), "identity", property(gone))
    scheduler.start()
    asked = Reader(scheduler, 4)
    until(lambda: asked.ended)
    asked.check()
    until(lambda: said)
    assert said[0] == "model.gguf: cannot be read"
    assert scheduler.thread.is_alive()
    scheduler.close()


def shares(scheduler):
    """Cells that all texts take, by the scheduler's count."""
    return sum(slot.taken for slot in scheduler.pool.slots)


@pytest.mark.parametrize("back", [False, True])
def test_forks_count_once_when_their_source_moves_on(back):
    """Three texts begin with one prompt's 157 tokens; its own slot then gets another, or one that begins so again."""
    target = pooled(slots=4)
    scheduler = Scheduler(target, planners("none", 4), budget=4)
    seeds = [*islice((seed for seed in range(20) if len(alone(4, 1.0, seed, 60)) == 60), 4)]
    readers = [Reader(scheduler, 4, 1.0, seed, 12 if seed == seeds[0] else 60) for seed in seeds]
    while not readers[0].ended:
        scheduler.step()
    assert scheduler.active == 3
    other = Reader(scheduler, 5 if back else 2, 0.7, 1, 100)
    scheduler.step()
    scheduler.step()
    assert scheduler.active == 4
    texts = [slot.session.token_ids for slot in scheduler.pool.slots]
    real = 157 + sum(len(text) - 157 for text in texts if len(text) > 157)
    mine = next(slot.session.token_ids for slot in scheduler.pool.slots if slot.seq is other.seq)
    real += 0 if len(mine) > 157 else len(mine) - (100 if back else 20)
    assert real <= shares(scheduler) <= real + 64 * 3
    run(scheduler)
    for reader in [*readers, other]:
        reader.check()
    scheduler.close()


def test_who_was_forked_from_may_be_forked_to():
    """A's slot is given to a fork of B, which was a fork of A: the tokens count once, not never."""
    target = pooled(slots=2)
    scheduler = Scheduler(target, planners("none", 2), budget=4)
    first, second = Reader(scheduler, 4, 1.0, 0, 4), Reader(scheduler, 4, 1.0, 1, 60)
    while not first.ended:
        scheduler.step()
    Reader(scheduler, 2, 0.7, 1, 1)
    while scheduler.waiting or scheduler.active > 1:
        scheduler.step()
    again = Reader(scheduler, 4, 1.0, 2, 8)
    while not again.tokens:
        scheduler.step()
    assert shares(scheduler) >= 158
    run(scheduler)
    for reader in (first, second, again):
        reader.check()
    scheduler.close()


def test_a_text_is_saved_before_a_fork_takes_its_session(tmp_path):
    target = backend(sessions=2)
    scheduler = Scheduler(target, planners("none", 2), budget=4)
    scheduler.pool.disk_cache = shelf = DiskCache(tmp_path, target, 1 << 20, least=16)
    old = Reader(scheduler, 6)
    run(scheduler)
    busy = Reader(scheduler, 4, 0.7, 1, 40)
    while not busy.tokens:
        scheduler.step()
    fork = Reader(scheduler, 4, 0.7, 2)
    scheduler.step()
    assert shelf.best(PROMPTS[6])[1] >= 90
    assert len(shelf._saved) == 1  # and nothing of the text that is still being written
    run(scheduler)
    for reader in (old, busy, fork):
        reader.check()
    scheduler.close()


def test_all_that_is_told_of_a_held_text_is_one_end():
    scheduler = Scheduler(backend(), planners("none", 3), budget=4)
    held = prepared(scheduler, 1, idle_limit=3)
    scheduler.close()
    assert sum(isinstance(event, Ended) for event in held.events) == 1
    assert held.tokens == alone(*held.key)[: len(held.tokens)]


def test_who_comes_while_all_are_ended_is_not_lost():
    scheduler = Scheduler(backend(), planners("none", 3), budget=4)
    first = Reader(scheduler, 1)
    later, finish = [], scheduler._finish

    def finished(handle, error):
        if not later:
            later.append(Reader(scheduler, 2))
        finish(handle, error)

    scheduler._finish = finished
    scheduler._end_all(ZeroDivisionError("in the scheduler"))
    scheduler._finish = finish
    run(scheduler)
    assert isinstance(first.ended.error, ZeroDivisionError)
    later[0].check()
    scheduler.close()
