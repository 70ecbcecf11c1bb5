"""Cells and leaves in one pool, passes that nobody wants, and texts on disk: no text changes."""

import asyncio
from dataclasses import replace
from math import inf
from threading import Event, Thread
from time import monotonic, sleep

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference.backend import ReferenceBackend, random_model
from test_scheduler import LONG, PROMPTS, Reader, Recording, actions, backend, draft, held, planners, play, run

from edgespec.loop.passes import common_prefix
from edgespec.model import Model
from edgespec.planners.none import NonePlanner
from edgespec.planners.specexec import SpecExecPlanner
from edgespec.scheduler.batch import CurrentPass
from edgespec.scheduler.disk_cache import DiskCache
from edgespec.scheduler.events import Wrote
from edgespec.scheduler.scheduler import Scheduler


def pooled(cells=None, spare_leaves=None, slots=3, shape="any", kind=Recording, context=300, kept=0):
    target = backend(shape, sessions=slots + kept, kind=kind)
    target.capabilities = replace(
        target.capabilities, cells=cells, spare_leaves=spare_leaves, context_length=context, kept=kept
    )  # fmt: skip
    return target


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(["none", "sssd", "specexec"]),
    st.sampled_from(["any", "two classes", "blocks"]),
    st.sampled_from([300, 400, None]),
    st.sampled_from([0, 5, None]),
    st.booleans(),
    st.sampled_from([0, 2]),
    st.lists(actions, min_size=1, max_size=18),
)
def test_random_schedules_change_no_text(tmp_path_factory, name, shape, cells, spare, keep, kept, schedule):
    """As in test_scheduler.py, with little room."""
    target = pooled(cells, spare, shape=shape, kept=kept)
    scheduler = Scheduler(target, planners(name, 3), budget=12)
    if keep:
        scheduler.pool.disk_cache = DiskCache(tmp_path_factory.mktemp("shelf"), target, 1 << 20, least=8)
    play(scheduler, schedule, 3)
    scheduler.close()
    assert target.open_sessions == 0


@given(st.lists(st.integers(0, 2), max_size=300), st.lists(st.integers(0, 2), max_size=9), st.integers(0, 300))
def test_a_common_prefix_ends_at_the_first_difference(left, rest, kept):
    right = left[:kept] + rest
    first = next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
    assert common_prefix(left, right) == common_prefix(tuple(left), right) == first


def test_a_late_difference_of_long_texts_is_found_without_a_loop():
    class Tokens(list):
        slices = 0

        def __getitem__(self, wanted):
            Tokens.slices += 1
            return super().__getitem__(wanted)

        def __iter__(self):
            raise AssertionError("a loop over all tokens")

    tokens = Tokens(range(100_000))
    assert common_prefix(tokens, Tokens(range(90_000))) == 90_000
    other = Tokens(range(100_000))
    other[99_000] = 0
    assert common_prefix(tokens, other) == 99_000
    assert Tokens.slices < 100


def most_at_once(scheduler, kept=inf):
    """Texts that are written at once, until all are, and sessions keep at most so many tokens."""
    most = 0
    while scheduler.waiting or scheduler.active:
        scheduler.step()
        most = max(most, scheduler.active)
        assert scheduler.kept_tokens <= kept
    return most


def test_texts_wait_until_there_are_cells_for_them():
    target = pooled(cells=300)
    scheduler = Scheduler(target, planners("none", 3), budget=4)
    readers = [Reader(scheduler, prompt, 0.7, seed, 100) for seed, prompt in enumerate((4, 2, 3, 6))]
    assert most_at_once(scheduler, kept=300) == 2
    for reader in readers:
        reader.check()
    scheduler.close()


def test_idle_texts_give_way_and_the_oldest_first():
    target = pooled(cells=280, slots=4)
    scheduler = Scheduler(target, planners("none", 4), budget=4)
    for prompt in (1, 6, 4):  # 3, 91 and 158 tokens, and 7 each
        Reader(scheduler, prompt)
        run(scheduler)
    scheduler.pool.slots[0].used = 10  # all but forgotten is the second
    Reader(scheduler, 3)  # 73
    run(scheduler)
    assert sorted(len(slot.session.token_ids) for slot in scheduler.pool.slots) == [0, 10, 80, 165]
    scheduler.close()


@pytest.mark.parametrize("name", ["none", "specexec"])
@pytest.mark.parametrize("sender", ["", "key"])
def test_agents_that_take_turns_keep_what_was_read(name, sender):
    """More than are at work at once."""
    target = pooled(cells=600, slots=1, kept=2)
    scheduler = Scheduler(target, planners(name, 1), budget=4)
    agents = (4, 6)
    for prompt in agents:
        Reader(scheduler, prompt)
        run(scheduler)
        held = [slot for slot in scheduler.pool.slots if slot.session.token_ids]
        assert len(held) == 1  # idle tokens slow passes, and nothing has come back yet
    Reader(scheduler, agents[0])  # now the first one has
    run(scheduler)
    for prompt in agents:
        again = Reader(scheduler, prompt, 0.7, 1, sender=sender)
        run(scheduler)
        again.check()
        assert again.stats.cached_tokens == (0 if sender else again.stats.prompt_tokens)
    assert sum(slot.planner is None for slot in scheduler.pool.slots) == 2
    scheduler.close()
    assert target.open_sessions == 0


def test_idle_texts_leave_a_part_of_the_cells_free():
    """So that cells are seldom put in order."""
    target = pooled(cells=320, slots=1, kept=3)
    scheduler = Scheduler(target, planners("none", 1), budget=4)
    scheduler.pool._keeps = 3
    for prompt in (4, 6, 2):
        Reader(scheduler, prompt)
        run(scheduler)
    assert [len(slot.session.token_ids) for slot in scheduler.pool.slots] == [0, len(PROMPTS[6]) + 7, 27, 0]
    scheduler.close()


def test_texts_that_grow_beyond_their_share_end_but_never_all(monkeypatch):
    monkeypatch.setattr("edgespec.scheduler.session_pool.RESERVED", 4)
    target = pooled(cells=130, context=120)
    scheduler = Scheduler(target, planners("none", 3), budget=4)
    readers = [Reader(scheduler, 0, 0.7, seed, 100) for seed in range(3)]
    run(scheduler)
    reasons = [reader.stats.finish_reason for reader in readers]
    for reader in readers:
        assert reader.ended.error is None
        assert reader.tokens == alone_of(reader)[: len(reader.tokens)]
    assert reasons == ["length"] * 3
    counts = sorted(len(reader.tokens) for reader in readers)
    assert counts[2] == 100  # the eldest is whole
    assert counts[0] < 60
    scheduler.close()


def growing():
    """A model whose two texts outgrow the pool; its tokens are bytes, which begin many a character."""
    target = ReferenceBackend(random_model(2, vocab_size=258), sessions=2, context_length=120, cells=100)
    target.model.unembedding[1] = 0  # texts seldom end early
    return Model(target, [NonePlanner() for _ in range(2)], budget=4)


def test_a_text_that_ends_for_lack_of_room_is_told_whole(monkeypatch):
    """What may become a stop string, and half a character, as if no more tokens had been wanted."""
    monkeypatch.setattr("edgespec.scheduler.session_pool.RESERVED", 4)
    options, held = {"max_tokens": 90, "temperature": 0.9}, set()
    for seed in range(2):
        with growing() as model:
            cut = model.branch("hello", 2, seed=seed, **options)[1]
        assert cut.stats.tokens == len(cut.token_ids) < 90
        stop = [cut.text[-3:] + "never", cut.text[-1] + "\N{REPLACEMENT CHARACTER}"]
        for stops in ([], stop[:1], stop):
            with growing() as model:
                found = model.branch("hello", 2, seed=seed, stop=stops, **options)[1]
                more = options | {"seed": seed + 1, "stop": stops}
                alone = model.generate("hello", **more | {"max_tokens": len(found.token_ids)})
                pieces = [chunk.text for chunk in model.stream("hello", **more)]
            assert replace(found, stats=alone.stats) == alone
            assert found.finish_reason == alone.finish_reason
            held.add("".join(pieces[: len(found.token_ids)]) != found.text)
    assert held == {True, False}


def test_a_task_is_told_it_too(monkeypatch):
    monkeypatch.setattr("edgespec.scheduler.session_pool.RESERVED", 4)
    options = {"max_tokens": 90, "temperature": 0.9}
    with growing() as model:
        expected = [one.text for one in model.branch("hello", 2, seed=0, **options)]

    async def write(model, seed):
        chunks = model.astream("hello", seed=seed, stop=[expected[1][-3:] + "never"], **options)
        return "".join([chunk.text async for chunk in chunks])

    async def both():
        with growing() as model:
            tasks = []
            with held(model.scheduler):
                for seed in range(2):  # which comes first decides whose text is cut
                    tasks.append(asyncio.create_task(write(model, seed)))
                    while model.scheduler.waiting <= seed:
                        await asyncio.sleep(0.001)
            return await asyncio.gather(*tasks)

    assert asyncio.run(both()) == expected


def test_forks_count_once():
    """Choices of one prompt are written at once where four prompts would have no room."""
    target = pooled(cells=300, slots=4)
    scheduler = Scheduler(target, planners("none", 4), budget=4)
    readers = [Reader(scheduler, 4, 1.0, seed, 20) for seed in range(4)]
    assert most_at_once(scheduler) == 3  # 158 tokens, and thrice an answer and what of the prompt does not fill a tile
    for reader in readers:
        reader.check()
    scheduler.close()


def alone_of(reader):
    from test_scheduler import alone

    return alone(*reader.key)


def test_leaves_of_all_texts_fit_and_one_alone_gets_more():
    """Of the target and of the draft, whose trees stay until the target's pass is over."""
    for texts in (1, 2, 3):
        target, guesser = pooled(spare_leaves=4), draft(3)
        guesser.capabilities = replace(guesser.capabilities, spare_leaves=4)
        scheduler = Scheduler(target, [SpecExecPlanner(guesser, depth=5, beam=6) for _ in range(3)], budget=20)
        readers = [Reader(scheduler, 0, 1.0, seed, 30) for seed in range(texts)]
        run(scheduler)
        for reader in readers:
            reader.check()
        scheduler.close()


class Slow(Recording):
    """A pass takes until it is interrupted, or told to go on."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.entered, self.go_on, self.ended = Event(), Event(), 0

    def forward(self, batch):
        self.entered.set()
        deadline = monotonic() + 30
        while not (self.stop.is_set() or self.go_on.is_set()):
            assert monotonic() < deadline
            sleep(0.001)
        try:
            return super().forward(batch)
        finally:
            self.ended += 1
            self.entered.clear()


def test_a_pass_for_nobody_ends_early():
    target = backend(kind=Slow)
    scheduler = Scheduler(target, [NonePlanner() for _ in range(3)], budget=4)
    scheduler.start()
    reader = Reader(scheduler, 4, 0.7, 1, 20)
    assert target.entered.wait(30)
    reader.seq.cancel()  # nobody lets the pass go on
    until(lambda: reader.ended)
    assert target.ended == 1
    assert reader.tokens == []
    assert scheduler.kept_tokens == 0
    target.go_on.set()
    whole = Reader(scheduler, 4, 0.7, 1, 20)
    until(lambda: whole.ended)
    whole.check()
    scheduler.close()


def test_a_pass_that_others_are_in_goes_on():
    target = backend(kind=Slow)
    scheduler = Scheduler(target, [NonePlanner() for _ in range(3)], budget=4)
    target.go_on.set()
    readers = [Reader(scheduler, 1, 0.7, seed, 20) for seed in range(2)]
    while not all(any(isinstance(event, Wrote) for event in reader.events) for reader in readers):
        scheduler.step()
    target.go_on.clear()
    target.entered.clear()
    scheduler.start()
    assert target.entered.wait(30)
    readers[0].seq.cancel()
    assert not target.stop.is_set()
    readers[1].seq.cancel()
    until(lambda: all(reader.ended for reader in readers))
    for reader in readers:
        reader.check()
    scheduler.close()


def test_closing_ends_the_pass():
    target = backend(kind=Slow)
    scheduler = Scheduler(target, [NonePlanner() for _ in range(3)], budget=4)
    scheduler.start()
    reader = Reader(scheduler, 4, 0.7, 1, 20)
    assert target.entered.wait(30)
    scheduler.close()
    assert reader.ended.error
    assert target.open_sessions == 0


def test_a_request_that_ends_within_a_check_of_the_pass_waits_for_nobody():
    """Garbage collection there may end a lost stream, which waits for the queue, whose holder may want the pass."""
    current, within, checked = CurrentPass(), Event(), Event()

    class Collected:
        @property
        def cancelled(self):
            within.set()
            assert checked.wait(30)
            return False

    def pass_of(handles):
        with current.of(handles, backend()):
            pass

    first = Thread(target=pass_of, args=[[Collected()]], daemon=True)
    first.start()
    assert within.wait(30)
    other = Thread(target=pass_of, args=[[]], daemon=True)
    other.start()
    other.join(2)
    waits = other.is_alive()
    checked.set()
    first.join()
    assert not waits


@pytest.mark.parametrize("ends", ["gives way", "fails"])
def test_idle_work_that_ends_checks_no_pass_while_it_holds_the_queue(ends, monkeypatch):
    scheduler = Scheduler(backend(), planners("none", 1), budget=4)
    held = []
    monkeypatch.setattr(scheduler.pass_now, "check", lambda: held.append(scheduler._queue.changed._is_owned()))
    reader = Reader(scheduler, 4, idle_limit=20)
    scheduler.step()
    if ends == "fails":
        scheduler._end_all(ValueError())
    else:
        assert scheduler._end_idle_work()
    assert reader.ended.error
    assert reader.seq.cancelled
    assert True not in held
    scheduler.close()


def until(true):
    deadline = monotonic() + 30
    while not true():
        assert monotonic() < deadline
        sleep(0.001)


@pytest.mark.parametrize("shape", ["any", "two classes", "blocks"])
def test_the_next_program_starts_from_what_was_saved(shape, tmp_path):
    for cached in (0, len(LONG) - 1 - (len(LONG) - 1) % 32 if shape == "blocks" else len(LONG) - 1):
        target = backend(shape)
        scheduler = Scheduler(target, planners("sssd", 3), budget=4)
        scheduler.pool.disk_cache = DiskCache(tmp_path, target, 1 << 20, least=16)
        reader = Reader(scheduler, 4, 0.7, 1, 12)
        run(scheduler)
        reader.check()
        assert reader.stats.cached_tokens == cached
        scheduler.close()
