"""Many texts in shared passes: each is what it is alone, whatever comes, goes and fails around it."""

import asyncio
import gc
import math
import weakref
from contextlib import aclosing, contextmanager, suppress
from functools import cache
from itertools import pairwise, product
from threading import Event, Thread, current_thread, main_thread
from time import sleep
from unittest import mock

import numpy as np
import pytest
from alone import Generation
from auto_planners import auto_planner
from forked import forked
from hypothesis import given
from hypothesis import strategies as st
from reference.backend import ReferenceBackend, ReferenceSession, perturbed, random_model

from edgespec.errors import Closed, ContextFull, ModelError, UsageError
from edgespec.loop.hint_texts import HintTexts
from edgespec.loop.pass_times import Curve
from edgespec.loop.passes import prefill
from edgespec.loop.sampling import SamplingParams
from edgespec.loop.shapes import TILE, BatchInvariance, RowClass
from edgespec.loop.stats import GenerationStats
from edgespec.model import Model
from edgespec.planners.auto import PLAIN, new_auto_state
from edgespec.planners.cost import goodput, split
from edgespec.planners.ledger import Accounts, Ledger
from edgespec.planners.none import NonePlanner
from edgespec.planners.specexec import SpecExecPlanner
from edgespec.planners.sssd import SssdPlanner
from edgespec.scheduler import batch, drive, prompt_chunks
from edgespec.scheduler.events import Cancelled, Ended, Reading, Wrote
from edgespec.scheduler.prompt_chunks import PromptChunks
from edgespec.scheduler.requests import Request
from edgespec.scheduler.scheduler import Scheduler

CONTEXT = 300
MODEL = random_model(1, vocab_size=48, sharpness=3.0)
MODEL.unembedding[1] = 0  # texts seldom end early
DRAFT = perturbed(MODEL, 0.2, 1)
LONG = np.random.default_rng(5).integers(3, 48, 2 * TILE + 30).tolist()
PROMPTS = [[5], [7, 8, 9], LONG[:20], LONG[: TILE + 9], LONG, [*LONG[:100], 9, 9], [4, *LONG[:90]]]
SHAPES = {
    "any": None,
    "one class": BatchInvariance("wide", RowClass(1, 41), RowClass(1, 41)),
    "two classes": BatchInvariance("narrow", RowClass(1, 7), RowClass(1, 41)),
    "short prompts apart": BatchInvariance("narrow", RowClass(1, 7), RowClass(16, 41), RowClass(4, 12)),
    "blocks": BatchInvariance("narrow", RowClass(1, 7), RowClass(1, 32), blocks=True),
}


def backend(shape="any", *, sessions=3, max_nodes=41, leaves=64, kind=ReferenceBackend):
    found = kind(MODEL, context_length=CONTEXT, max_nodes=max_nodes, max_leaves=leaves, sessions=sessions)
    if SHAPES[shape]:
        found.keep_to(SHAPES[shape])
    return found


def draft(sessions=3):
    return ReferenceBackend(DRAFT, context_length=CONTEXT, sessions=sessions)


def planners(name, count, pace=None):
    drafts = draft(count)
    pace = pace or new_auto_state(False)
    return [
        {
            "none": lambda: NonePlanner(),
            "sssd": lambda: SssdPlanner(depth=6),
            "specexec": lambda: SpecExecPlanner(drafts, depth=5, beam=3),
            "auto": lambda: auto_planner("auto", pace, SssdPlanner(depth=6), SpecExecPlanner(drafts, cost=pace.draft)),
        }[name]()
        for _ in range(count)
    ]


@cache
def alone(prompt: int, temperature: float, seed: int, max_tokens: int) -> list[int]:
    """The text that a request has to get."""
    target = backend(sessions=1)
    sampling, stats = SamplingParams(temperature=temperature, seed=seed), GenerationStats()
    rounds = Generation(
        target, target.open(), NonePlanner(), PROMPTS[prompt], sampling, max_tokens=max_tokens, budget=1, stats=stats
    ).steps()
    return [token for round_ in rounds for token in round_.tokens]


class Reader:
    """Gathers the events of one request."""

    def __init__(self, scheduler, prompt=0, temperature=0.0, seed=0, max_tokens=8, idle_limit=None, **more):
        self.key = prompt, temperature, seed, max_tokens
        self.events, self.stats = [], GenerationStats()
        sampling = SamplingParams(temperature=temperature, seed=seed)
        request = Request(PROMPTS[prompt], sampling, max_tokens, **more)
        self.seq = scheduler.submit(request, self.events.append, self.stats, idle_limit)

    @property
    def tokens(self):
        return [chunk.token_id for event in self.events if isinstance(event, Wrote) for chunk in event.chunks]

    @property
    def ended(self):
        return next((event for event in self.events if isinstance(event, Ended)), None)

    def check(self):
        """The text is the one that is written alone, or, if it was called off, its beginning."""
        assert isinstance(self.events[-1], Ended)
        assert sum(isinstance(event, Ended) for event in self.events) == 1
        expected = alone(*self.key)
        if self.ended.error is None:
            assert self.tokens == expected
            assert self.stats.tokens == len(expected)
        else:
            assert isinstance(self.ended.error, Cancelled)
            assert self.seq.cancelled
            assert self.tokens == expected[: len(self.tokens)]


@contextmanager
def held(scheduler):
    """Within it the scheduler's thread makes no step."""
    begun, go_on = Event(), Event()

    def wait(call):
        begun.set()
        go_on.wait(60)

    holder = Thread(target=scheduler.call, args=[wait])
    holder.start()
    begun.wait(60)
    try:
        yield
    finally:
        go_on.set()
        holder.join()


def run(scheduler, most=3000):
    """Make steps until all texts have ended, or let the scheduler's thread make them."""
    if scheduler.thread:
        while scheduler.waiting or scheduler.active:
            sleep(0.001)
        scheduler.call(lambda call: None)  # behind the last step
        return
    for _ in range(most):
        scheduler.step()  # once more at the end: who has left is told so
        if not scheduler.waiting and not scheduler.active:
            return
    raise AssertionError("some text never ends")


requests = st.tuples(
    st.just("ask"),
    st.integers(0, len(PROMPTS) - 1),
    st.sampled_from([0.0, 0.7, 1.0]),
    st.integers(0, 2),
    st.sampled_from([1, 5, 12]),
    st.sampled_from(["", "", "held", "predicted", "sibling"]),
)
actions = st.one_of(
    requests, requests, st.tuples(st.just("step"), st.integers(1, 6)), st.tuples(st.just("cancel"), st.integers(0, 9))
)


def special(how, prompt, families):
    """What else a request may want; none of it changes a text."""
    if how == "sibling":
        return {"hint_texts": families.setdefault(prompt, HintTexts(PROMPTS[prompt]))}
    predicted = HintTexts(PROMPTS[prompt], alone(prompt, 0.0, 0, 12))
    return {"held": {"idle_limit": 3}, "predicted": {"hint_texts": predicted}}.get(how, {})


def play(scheduler, schedule, slots):
    """Do what a schedule says; every text is what it is alone."""
    readers, families = [], {}
    for what, *values in schedule:
        if what == "ask":
            *asked, how = values
            readers.append(Reader(scheduler, *asked, **special(how, asked[0], families)))
        elif what == "cancel":
            if readers:
                readers[values[0] % len(readers)].seq.cancel()
        else:
            for _ in range(values[0]):
                scheduler.step()
        assert scheduler.active <= slots
    for reader in readers[::2]:
        scheduler.promote(reader.seq)
    asked = [reader for reader in readers if reader.seq.idle_limit is None]
    run(scheduler)  # what is still held is never in the way
    assert all(reader.ended for reader in asked)
    for reader in readers:
        reader.seq.cancel()
    scheduler.step()
    for reader in readers:
        reader.check()


@given(
    st.sampled_from(["none", "sssd", "specexec", "auto"]),
    st.sampled_from(list(SHAPES)),
    st.sampled_from([1, 2, 3]),
    st.sampled_from([1, 3, 64]),
    st.lists(actions, min_size=1, max_size=18),
)
def test_random_schedules_change_no_text(name, shape, slots, leaves, schedule):
    target, pace = backend(shape, sessions=slots, leaves=leaves), new_auto_state(False)
    guessing = planners(name, slots, pace)
    scheduler = Scheduler(target, guessing, budget=12, pace=pace if name == "auto" else None)
    play(scheduler, schedule, slots)
    scheduler.close()
    assert target.open_sessions == 0
    assert all(planner._drafter.draft.open_sessions == 0 for planner in guessing if name == "specexec")


class Recording(ReferenceBackend):
    """Notes every pass, and fails when it is told to."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.passes, self.failing = [], lambda batch: None

    def forward(self, batch):
        if error := self.failing(batch):
            raise error
        self.passes.append([(len(work.token_ids), work.prompt) for work in batch])
        return super().forward(batch)


def test_texts_share_passes_and_no_pass_is_too_large():
    for shape in SHAPES:
        target = backend(shape, sessions=5, kind=Recording)
        scheduler = Scheduler(target, planners("specexec", 5), budget=12)
        readers = [Reader(scheduler, prompt, 0.7, prompt, 30) for prompt in (0, 1, 2, 2, 1)]
        run(scheduler)
        for reader in readers:
            reader.check()
        assert max(sum(not prompt for _, prompt in works) for works in target.passes) >= 4
        scheduler.close()


def test_more_texts_than_rows_take_turns():
    target = backend("two classes", sessions=10, kind=Recording)
    scheduler = Scheduler(target, planners("none", 10), budget=4)
    readers = [Reader(scheduler, 1, 0.7, seed, 12) for seed in range(10)]
    run(scheduler)
    for reader in readers:
        reader.check()
    assert max(len(works) for works in target.passes) == 7
    ends = [reader.stats.passes for reader in readers]
    assert max(ends) <= 12
    scheduler.close()


@pytest.mark.parametrize("shape", SHAPES)
def test_a_long_prompt_does_not_stop_those_who_write(shape, monkeypatch):
    monkeypatch.setattr(prompt_chunks, "WRITING", 1e-9)  # one pass for each chunk, however long it takes
    target = backend(shape, kind=Recording)
    scheduler = Scheduler(target, planners("none", 3), budget=4)
    writer = Reader(scheduler, 1, 0.7, 1, 12)
    scheduler.step()
    scheduler.step()
    reader = Reader(scheduler, 4, 0.7, 1, 12)
    before = len(target.passes)
    run(scheduler)
    writer.check()
    reader.check()
    kinds = [{"prompt" if prompt else "tree" for _, prompt in works} for works in target.passes[before:]]
    until = max(i for i, kind in enumerate(kinds) if "prompt" in kind)
    assert until >= 3
    assert all("tree" in one | other for one, other in pairwise(kinds[:until]))
    if shape in ("any", "one class"):
        assert {"tree", "prompt"} in kinds
    scheduler.close()


def first_tokens(readers, scheduler):
    """Make steps until all have a token; by reader, the prompts' tokens that were read before its first one."""
    read, before = 0, {}
    while len(before) < len(readers):
        scheduler.step()
        read += sum(size for size, prompt in scheduler.target.passes[-1] if prompt)
        before |= {name: read for name, reader in readers.items() if reader.tokens and name not in before}
    return before


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["none", "specexec"])
def test_a_short_prompt_is_read_before_the_rest_of_a_long_one(shape, name):
    scheduler = Scheduler(backend(shape, kind=Recording), planners(name, 3), budget=4)
    readers = {"long": Reader(scheduler, 4, 0.7, 1, 12)}
    scheduler.step()
    before = len(readers["long"].seq.slot.session.token_ids)
    readers["short"] = Reader(scheduler, 1, 0.7, 1, 12)
    found = first_tokens(readers, scheduler)
    assert found["short"] == len(PROMPTS[1])
    assert found["long"] == len(LONG) + len(PROMPTS[1]) - before
    run(scheduler)
    for reader in readers.values():
        reader.check()
    scheduler.close()


def test_a_long_prompt_waits_for_no_more_tokens_than_it_has():
    scheduler = Scheduler(backend("any", kind=Recording), planners("none", 2), budget=4)
    long = Reader(scheduler, 4, 0.7, 1, 2)
    scheduler.step()
    others = read = 0
    while not long.tokens:
        assert read <= 2 * len(LONG)
        if scheduler.active < 2:
            Reader(scheduler, 2, 0.7, 1, 1, sender=f"{others}")  # nobody shares a prefix with it
            others += 1
        scheduler.step()
        read += sum(size for size, prompt in scheduler.target.passes[-1] if prompt)
    assert others > 3
    run(scheduler)
    long.check()
    scheduler.close()


def test_the_machine_stays_awake_while_there_is_work(monkeypatch):
    passes = []  # made before it was asked to
    monkeypatch.setattr("edgespec.scheduler.scheduler.stay_awake", lambda: passes.append(len(target.passes)))
    target = backend(sessions=1, kind=Recording)
    scheduler = Scheduler(target, planners("none", 1), budget=4)
    drive.results_of(scheduler, [Request([5], SamplingParams(), 8)])
    assert set(passes) >= set(range(len(target.passes)))
    scheduler.close()


def test_a_part_of_a_prompt_ends_where_a_tile_does():
    target = backend("any", sessions=1, max_nodes=70, kind=Recording)
    scheduler = Scheduler(target, planners("none", 1), budget=4)
    Reader(scheduler, 4)
    run(scheduler)
    sizes = [size for ((size, prompt),) in target.passes if prompt]
    assert sizes == [TILE, TILE, len(LONG) - 2 * TILE]
    scheduler.close()


@pytest.mark.parametrize(
    ("tile", "tree", "taken", "tiles"),
    [(None, 0.0, 0, 2), (0.01, 0.0, 0, 5), (0.1, 0.0, 0, 2), (0.1, 0.0, TILE, 1), (0.1, 0.2, 0, 4), (9.0, 0.0, 0, 1)],
)
def test_a_chunk_of_a_prompt_is_as_long_as_others_may_wait(tile, tree, taken, tiles):
    """A quarter of a second, or two passes; `tile` is what the first chunk took a tile. The engine takes 4.5 tiles."""
    chunks = PromptChunks()
    if tile is not None:
        chunks.learn(TILE, tile, prompt=True)
    chunks.learn(1, tree, prompt=False)
    assert chunks.fast(taken, 4 * TILE + TILE // 2) == tiles * TILE


def test_those_who_write_have_a_share_of_the_time_beside_a_prompt():
    """Where both cannot share passes; it was one pass for each chunk, however long that took."""
    chunks, kinds = PromptChunks(), ""
    assert not chunks.must_write
    for _ in range(12):
        prompt = not chunks.must_write
        chunks.learn(TILE if prompt else 1, 1.3 if prompt else 0.1, prompt=prompt)
        kinds += "p" if prompt else "t"
    assert kinds == "pttttpttttpt"
    chunks.learn(1, 9.0, prompt=False)  # what a long pass had too much is no debt
    chunks.learn(TILE, 1.0, prompt=True)
    assert chunks.must_write


@pytest.mark.parametrize(
    ("exact", "pieces"),
    [(None, [2 * TILE, 30]), (BatchInvariance("narrow", RowClass(1, 7), RowClass(TILE, 299)), [2 * TILE + 30])],
)
def test_no_part_of_a_prompt_is_left_that_would_be_padded(exact, pieces, monkeypatch):
    monkeypatch.setattr(PromptChunks, "fast", lambda self, taken, most: 2 * TILE)
    target = Recording(MODEL, context_length=CONTEXT, max_nodes=299, sessions=2)
    if exact:
        target.keep_to(exact)
    scheduler = Scheduler(target, planners("none", 2), budget=4)
    writer = Reader(scheduler, 1, 0.7, 1, 12)
    scheduler.step()
    scheduler.step()
    before = len(target.passes)
    reader = Reader(scheduler, 4, 0.7, 1, 12)
    run(scheduler)
    writer.check()
    reader.check()
    assert [size for works in target.passes[before:] for size, prompt in works if prompt] == pieces
    scheduler.close()


def test_tokens_that_a_reader_owes_have_room_besides_trees(monkeypatch):
    """As where a chat's last round left a gap among the cells."""
    monkeypatch.setattr(ReferenceSession, "unread_committed", property(lambda self: 3 if self.token_ids else 0))
    target = backend("one class")
    scheduler = Scheduler(target, planners("sssd", 3), budget=40)
    readers = [Reader(scheduler, 2, 0.7, seed, 30) for seed in (1, 2)]
    for _ in range(4):
        scheduler.step()
    readers.append(Reader(scheduler, 4, 0.7, 3, 12))
    run(scheduler)
    for reader in readers:
        reader.check()
    scheduler.close()


def test_a_kept_text_is_taken_up_and_shared():
    target = backend(sessions=3)
    scheduler = Scheduler(target, planners("sssd", 3), budget=4)
    first = Reader(scheduler, 4, 0.7, 1)
    run(scheduler)
    again = Reader(scheduler, 4, 0.7, 2)  # the same prompt: its session is taken over
    run(scheduler)
    other = Reader(scheduler, 5, 0.7, 2)  # shares 100 tokens
    busy = Reader(scheduler, 4, 0.7, 3)
    run(scheduler)
    for reader in (first, again, other, busy):
        reader.check()
    assert first.stats.cached_tokens == 0
    assert again.stats.cached_tokens == len(LONG)
    assert other.stats.cached_tokens == 100
    assert busy.stats.cached_tokens == len(LONG)  # a fork of what is being written, or what came before it
    scheduler.close()


def test_short_prompts_begin_with_what_others_have_read(monkeypatch):
    """Not with what long ones have, whose cells are of another class."""
    long, short, other = LONG[: TILE + 9], LONG[:11], [*LONG[:9], 40, 41]
    monkeypatch.setitem(globals(), "PROMPTS", [long, short, other])
    alone.cache_clear()
    scheduler = Scheduler(backend("short prompts apart"), planners("none", 3), budget=4)
    readers = []
    for prompt in (0, 1, 2, 0, 1, 2):
        readers.append(Reader(scheduler, prompt, 0.7, 1, max_tokens=30))
        run(scheduler)
        readers[-1].check()
    assert [reader.stats.cached_tokens for reader in readers] == [
        0, 0, 9, TILE + 9, 9, 9,  # the idle slot used least lately has 9: the tenth is worth no fork
    ]  # fmt: skip
    scheduler.close()
    alone.cache_clear()


def test_a_text_of_the_other_class_does_not_take_a_short_ones_place(monkeypatch):
    """All begin alike; what the first has read is still there for the third."""
    monkeypatch.setitem(globals(), "PROMPTS", [LONG[:11], LONG[: TILE + 9], [*LONG[:9], 40]])
    alone.cache_clear()
    scheduler = Scheduler(backend("short prompts apart", sessions=4), planners("none", 4), budget=4)
    readers = []
    for prompt in range(3):
        readers.append(Reader(scheduler, prompt, 0.7, 1, max_tokens=1))
        run(scheduler)
        readers[-1].check()
    assert [reader.stats.cached_tokens for reader in readers] == [0, 0, 9]
    scheduler.close()
    alone.cache_clear()


def test_requests_that_begin_alike_read_their_beginning_once():
    """Choices of one prompt come at the same moment: all but the first wait until it is read."""
    target = backend(sessions=3, kind=Recording)
    scheduler = Scheduler(target, planners("none", 3), budget=4)
    readers = [Reader(scheduler, 4, 1.0, seed) for seed in range(3)]
    run(scheduler)
    for reader in readers:
        reader.check()
    assert sum(size for works in target.passes for size, prompt in works if prompt) == len(LONG)
    scheduler.close()


def test_calling_off_takes_one_pass():
    target = backend(kind=Recording)
    scheduler = Scheduler(target, planners("none", 3), budget=4)
    readers = [Reader(scheduler, 1, 1.0, seed, 100) for seed in range(5)]
    for _ in range(8):
        scheduler.step()
    passes = len(target.passes)
    for reader in readers:
        reader.seq.cancel()
    scheduler.step()
    assert len(target.passes) == passes
    assert scheduler.active == scheduler.waiting == 0
    for reader in readers:
        reader.check()
        assert reader.stats.finish_reason == "interrupted"
    assert scheduler.counts.requests == {"interrupted": 5}
    scheduler.close()


class Breaking(NonePlanner):
    """Fails in its second round."""

    def propose(self, context, budget):
        if len(context.token_ids) > context.prompt_length:
            raise ModelError("this planner is broken")
        return super().propose(context, budget)


def test_a_text_is_counted_before_its_reader_hears_of_the_end():
    scheduler, counted = Scheduler(backend(), planners("none", 1), budget=1), []

    def emit(event):
        if isinstance(event, Ended):
            counted.append(dict(scheduler.counts.requests))

    scheduler.submit(Request(PROMPTS[1], SamplingParams(), max_tokens=3), emit)
    while not counted:
        scheduler.step()
    assert counted == [{"length": 1}]


def test_an_error_of_one_text_ends_only_that():
    target = backend(sessions=2)
    scheduler = Scheduler(target, [Breaking(), NonePlanner()], budget=4)
    broken, whole = Reader(scheduler, 1), Reader(scheduler, 2)
    run(scheduler)
    assert str(broken.ended.error) == "this planner is broken"
    whole.check()
    again = Reader(scheduler, 0, max_tokens=1)
    run(scheduler)
    again.check()
    scheduler.close()


def fail(*_, **__):
    raise ModelError("this one is broken")


@pytest.mark.parametrize("where", ["waits its turn", "is cut", "is interrupted", "is accepted", "reads"])
def test_an_error_ends_one_text_wherever_it_comes(where):
    target = backend(kind=Recording, sessions=3, max_nodes=41)
    scheduler = Scheduler(target, planners("none", 3), budget=4)
    readers = [Reader(scheduler, prompt, max_tokens=60) for prompt in (1, 2)]
    while not all(reader.tokens for reader in readers):
        scheduler.step()
    broken, whole = readers
    if where in ("is cut", "is accepted"):
        setattr(broken.seq.generation, {"is cut": "cut", "is accepted": "accept"}[where], fail)
    elif where == "reads":
        broken, whole = Reader(scheduler, 4, max_tokens=60), broken
        with mock.patch.object(PromptChunks, "next", fail):
            scheduler.step()
    elif where == "is interrupted":
        broken.seq.generation.give_up = fail
        target.interrupt(target.pass_number)
    else:
        broken.seq.generation.give_up = fail
        with mock.patch.object(batch, "in_turn", return_value=[whole.seq]):
            scheduler.step()
    run(scheduler)
    assert str(broken.ended.error) == "this one is broken"
    assert sum(isinstance(event, Ended) for event in broken.events) == 1
    whole.check()
    readers[1].check()
    scheduler.close()


def test_a_session_that_cannot_be_had_ends_one_text():
    target = backend(sessions=2)
    scheduler = Scheduler(target, planners("none", 2), budget=4)
    scheduler.pool.disk_cache = Gone()
    lost = Reader(scheduler, 1)
    run(scheduler)
    assert str(lost.ended.error) == "the model is gone"
    assert sum(isinstance(event, Ended) for event in lost.events) == 1
    scheduler.pool.disk_cache = None
    whole = Reader(scheduler, 2)
    run(scheduler)
    whole.check()
    scheduler.close()


class Gone:
    """A shelf that fails at every touch but the first look."""

    least = 0

    def best(self, prompt, sender):
        return "a file", len(prompt)

    def load(self, path, session, draft=None):
        raise ModelError("the model is gone")

    def put(self, session, draft, sender):
        raise ModelError("the model is gone")


def test_what_fails_between_texts_does_not_end_the_thread():
    target = backend(sessions=2)
    scheduler = Scheduler(target, planners("none", 2), budget=4)
    slot = scheduler.pool.slots[0]
    prefill(target, slot.session, [1, 2, 3])
    scheduler.pool.disk_cache = Gone()
    scheduler.start()
    while not slot.looked_at:
        sleep(0.01)
    scheduler.pool.disk_cache = None
    done = Event()
    scheduler.submit(Request([1, 2], SamplingParams(), 3), lambda event: isinstance(event, Ended) and done.set())
    assert done.wait(60)
    scheduler.close()


def test_a_pass_that_fails_ends_those_in_it():
    target = backend(kind=Recording)
    scheduler = Scheduler(target, planners("specexec", 3), budget=4)
    readers = [Reader(scheduler, 1, 1.0, seed, 100) for seed in range(3)]
    for _ in range(8):
        scheduler.step()
    target.failing = lambda batch: ModelError("the disk is gone")
    scheduler.step()
    assert [str(reader.ended.error) for reader in readers] == ["the disk is gone"] * 3
    target.failing = lambda batch: None
    later = Reader(scheduler, 4, 0.7, 1)
    run(scheduler)
    later.check()
    assert later.stats.cached_tokens == 0  # nobody knows what the failed pass has left
    scheduler.close()


def test_of_texts_whose_pass_failed_nothing_is_kept():
    """Nobody knows what the pass has left of them, so the same prompt is read from its beginning."""
    target = backend(kind=Recording)
    scheduler = Scheduler(target, planners("none", 3), budget=4)
    readers = [Reader(scheduler, 4, 1.0, seed, 100) for seed in range(2)]
    while not all(reader.tokens for reader in readers):
        scheduler.step()
    target.failing = lambda batch: ModelError("the disk is gone")
    scheduler.step()
    assert all(reader.ended for reader in readers)
    assert scheduler.kept_tokens == 0
    scheduler.close()


def test_a_prompt_is_read_again_when_the_cache_was_put_in_order():
    """Engines then refuse to go on where it stands; once it stands at the beginning they take it."""
    for reading in ("scheduler", "prefill"):
        target = backend("two classes", kind=Recording, sessions=1)
        moved = [False]

        def failing(batch, moved=moved):
            if batch[0].prompt and len(batch[0].session.token_ids) > 60 and not moved[0]:
                moved[0] = True
                return ContextFull("a prompt cannot be continued")
            return None

        target.failing = failing
        if reading == "prefill":
            session = target.open()
            prefill(target, session, LONG)
            assert session.token_ids == LONG
        else:
            scheduler = Scheduler(target, planners("none", 1), budget=4)
            reader = Reader(scheduler, 4, 0.7, 1)
            run(scheduler)
            reader.check()
        assert moved[0]


def test_tokens_that_are_read_again_are_not_counted_as_cached():
    target, failed = ReferenceBackend(random_model(1, vocab_size=48), sessions=1), []
    inner = target.forward

    def full(batch):
        if batch[0].session.token_ids and not failed:
            failed.append(batch)
            raise ContextFull("a prompt cannot be continued")
        return inner(batch)

    scheduler, prompt = Scheduler(target, [NonePlanner()], budget=1), list(range(3, 12))
    seen = [(0, 0)]  # (cached, others) before each pass: counts never fall

    def counted(batch):
        counts = scheduler.counts
        seen.append((counts.cached_tokens, counts.prompt_tokens - counts.cached_tokens))
        assert all(now >= before for before, now in zip(*seen[-2:], strict=True))
        return full(batch)

    def cached(count):
        [result] = drive.results_of(scheduler, [Request(prompt[:count], SamplingParams(), 1)])
        return result.stats.cached_tokens

    assert cached(6) == 0
    target.forward = counted
    assert cached(8) == scheduler.counts.cached_tokens == 0
    assert failed
    assert cached(9) == scheduler.counts.cached_tokens == 8
    scheduler.close()


def test_a_cache_that_is_full_forgets_the_idle_then_ends_the_youngest():
    target = backend(kind=Recording)
    scheduler = Scheduler(target, planners("none", 3), budget=4)
    Reader(scheduler, 4)
    run(scheduler)
    readers = [Reader(scheduler, 1, 0.7, 1, 12), Reader(scheduler, 2, 0.7, 1, 12)]
    target.failing = lambda batch: (
        ContextFull("full") if sum(len(slot.session.token_ids) for slot in scheduler.pool.slots) > 40 else None
    )
    run(scheduler)
    readers[0].check()
    written = readers[1].tokens
    assert 0 < len(written) < 12
    assert written == alone(2, 0.7, 1, 12)[: len(written)]
    assert readers[1].ended.error is None
    assert readers[1].stats.finish_reason == "length"
    scheduler.close()


@pytest.mark.parametrize("room", [True, False])
def test_idle_sessions_make_room_for_a_file(room, tmp_path, monkeypatch):
    scheduler = Scheduler(backend(), planners("none", 3), budget=4)
    Reader(scheduler, 1)
    run(scheduler)
    scheduler.save(tmp_path / "session", "note")
    for prompt in (2, 3, 4):
        Reader(scheduler, prompt)
        run(scheduler)
    load, slots = ReferenceSession.load, scheduler.pool.slots

    def limited(session, path):
        if not room or sum(bool(slot.session.token_ids) for slot in slots if slot.session is not session) > 1:
            raise ContextFull("full")
        return load(session, path)

    monkeypatch.setattr(ReferenceSession, "load", limited)
    if room:
        assert scheduler.load(tmp_path / "session") == "note"
        assert sum(bool(slot.session.token_ids) for slot in slots) == 2
    else:
        with pytest.raises(ContextFull):
            scheduler.load(tmp_path / "session")
        after = Reader(scheduler, 4)
        run(scheduler)
        after.check()
    scheduler.close()


def test_what_cannot_be_served_is_refused_at_once():
    scheduler = Scheduler(backend(sessions=1), planners("none", 1), budget=4)
    sampling = SamplingParams()
    with pytest.raises(ContextFull, match="300"):
        scheduler.submit(Request([5] * 300, sampling, 4), lambda event: None)
    with pytest.raises(UsageError, match="stop string"):
        scheduler.submit(Request([5], sampling, 4, stop=[""]), lambda event: None)
    queued = Reader(scheduler)
    scheduler.close()
    scheduler.close()
    assert isinstance(queued.ended.error, Closed)
    with pytest.raises(Closed):
        scheduler.submit(Request([5], sampling, 4), lambda event: None)


def test_a_reader_that_raises_is_gone():
    scheduler = Scheduler(backend(), planners("none", 3), budget=4)

    def gone(event):
        raise RuntimeError("the loop is closed")

    job = scheduler.submit(Request([5], SamplingParams(), 100), gone)
    other = Reader(scheduler, 1)
    run(scheduler)
    assert job.cancelled
    assert job.stats.tokens < 100
    other.check()
    scheduler.close()


def test_progress_stop_strings_and_log_probs():
    target = ReferenceBackend(random_model(2, vocab_size=258), sessions=2)
    sampling = SamplingParams(temperature=0.8, seed=4)
    prompt = target.vocab.encode("to be or not to be", add_bos=True, parse_special=False)
    found = {}
    for name in ("none", "sssd"):
        scheduler = Scheduler(target, planners(name, 1), budget=8)
        events = list(drive.events(scheduler, Request(prompt, sampling, 30, log_probs=3)))
        assert [(e.done, e.total) for e in events if isinstance(e, Reading)] == [(0, 19), (19, 19)]
        chunks = [chunk for event in events if isinstance(event, Wrote) for chunk in event.chunks]
        found[name] = [(chunk.token_id, chunk.log_probs) for chunk in chunks]
        text, stats = "".join(chunk.text for chunk in chunks), GenerationStats()
        stop = text[10:12]
        events = list(drive.events(scheduler, Request(prompt, sampling, 30, stop=[stop]), stats))
        chunks = [chunk for event in events if isinstance(event, Wrote) for chunk in event.chunks]
        assert "".join(chunk.text for chunk in chunks) == text[: text.index(stop)]
        assert stats.finish_reason == "stop"
        assert stats.tokens == len(chunks)
        scheduler.close()
    assert found["none"] == found["sssd"]
    assert len(found["none"]) == 30
    session = target.open()
    prefill(target, session, prompt)
    last = prefill(target, session, prompt, want_last=True)
    row = last[0].row(last[1]).astype(np.float64)
    log_probs = row - row.max() - math.log(np.exp(row - row.max()).sum())
    token, told = found["none"][0]
    assert told.log_prob == pytest.approx(log_probs[token], abs=1e-6)
    assert [i for i, _ in told.best] == np.argsort(-log_probs)[:3].tolist()
    assert [value for _, value in told.best] == pytest.approx(np.sort(log_probs)[::-1][:3], abs=1e-6)


def test_a_text_alone_is_guessed_as_without_a_scheduler():
    """The same trees, so the same number of passes."""
    for shape in SHAPES:
        target, stats = backend(shape, sessions=2), GenerationStats()
        sampling = SamplingParams(temperature=0.7, seed=2)
        (planner,) = planners("specexec", 1)
        options = {"max_tokens": 40, "budget": 12, "stats": stats}
        list(Generation(target, target.open(), planner, PROMPTS[2], sampling, **options).steps())
        scheduler = Scheduler(target, planners("specexec", 1), budget=12)
        reader = Reader(scheduler, 2, 0.7, 2, 40)
        run(scheduler)
        assert (reader.stats.passes, reader.stats.drafted) == (stats.passes, stats.drafted)
        scheduler.close()


@pytest.mark.parametrize("name", ["none", "sssd", "specexec", "auto"])
def test_a_text_can_be_written_plainly(name):
    pace = new_auto_state(False)
    for _ in range(PLAIN):  # that texts shared: auto guesses nothing before
        pace.target.add(2, 1.0)
    scheduler = Scheduler(backend(), planners(name, 2, pace), budget=8)
    plain, usual = Reader(scheduler, 3, max_tokens=12, plain=True), Reader(scheduler, 3, max_tokens=12)
    run(scheduler)
    plain.check()
    usual.check()
    assert plain.stats.drafted == 0
    assert plain.stats.passes == 11  # the prompt gives the first token
    assert (usual.stats.drafted > 0) == (name != "none")
    scheduler.close()


class Unwilling(Ledger):
    """Allows nothing, and counts."""

    def room(self, way):
        return 0.0


def test_a_batch_whose_draft_tokens_lose_goes_on_without_them():
    for ledger, drafts in ((Unwilling(), False), (Ledger(first=0), True)):
        pace = new_auto_state(True)
        pace.ledgers[2], pace.batched = ledger, 2
        ledger.recall(Accounts(plain=1e9, distance=32, saved=0, accounts={}))  # any step is cheap
        scheduler = Scheduler(backend(sessions=2), planners("specexec", 2), budget=8, pace=pace)
        readers = [Reader(scheduler, prompt, 0.7, prompt, 30) for prompt in (1, 2)]
        run(scheduler)
        for reader in readers:
            reader.check()
        scheduler.close()
        assert (ledger.accounts.keys() >= {"batch"}) == drafts
        assert ledger.tokens > 0


def test_the_split_is_the_best_there_is():
    generator = np.random.default_rng(3)
    for _ in range(40):
        texts = [-np.sort(generator.exponential(1.0, generator.integers(0, 5))) for _ in range(3)]
        cost = Curve(np.array([1.0, 8.0]), np.array([1.0, 1.0 + 3 * generator.random()]), 0.3)
        most, spent = int(generator.integers(0, 12)), float(generator.random())

        def rate(sizes, texts=texts, cost=cost, spent=spent):
            gained = 3 + sum(np.exp(text[:size]).sum() for text, size in zip(texts, sizes, strict=True))
            return gained / (spent + float(cost.seconds(3 + sum(sizes))))

        every = [sizes for sizes in product(*(range(len(text) + 1) for text in texts)) if sum(sizes) <= most]
        found = split(texts, most, spent, cost)
        assert sum(found) <= most
        assert rate(found) == pytest.approx(max(map(rate, every)))
        assert sum(split(texts, most, spent, None)) == min(most, sum(map(len, texts)))
    assert split([np.zeros(0)], 5, 0.0, None) == [0]
    assert split([], 5, 0.0, None) == []
    assert np.array_equal(goodput(texts[0], spent, cost), goodput(texts[0], spent, cost, sequences=1))


class TestModel:
    """The Python API on top."""

    def model(self, slots=2, planner="specexec"):
        target = ReferenceBackend(random_model(2, vocab_size=258), sessions=slots)
        target.model.unembedding[1] = 0  # texts seldom end early
        drafts = ReferenceBackend(perturbed(target.model, 0.2, 1), sessions=slots)
        made = [SpecExecPlanner(drafts, depth=5) if planner == "specexec" else NonePlanner() for _ in range(slots)]
        return Model(target, made, budget=10)

    def expected(self, count):
        with self.model(1, "none") as model:
            return [model.generate(f"hello {i}", max_tokens=25, temperature=0.9, seed=i) for i in range(count)]

    def test_threads_share_a_model(self):
        expected, found = self.expected(7), {}
        for slots in (1, 3):
            with self.model(slots) as model:

                def ask(i, model=model):
                    found[i] = model.generate(f"hello {i}", max_tokens=25, temperature=0.9, seed=i)

                threads = [Thread(target=ask, args=(i,)) for i in range(7)]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
            assert [found[i].text for i in range(7)] == [result.text for result in expected]
            assert [found[i].stats.tokens for i in range(7)] == [25] * 7

    def test_tasks_share_a_model(self):
        expected = self.expected(5)

        async def ask(model, i):
            chunks = model.astream(f"hello {i}", max_tokens=25, temperature=0.9, seed=i)
            return "".join([chunk.text async for chunk in chunks])

        async def everything():
            with self.model(3) as model:
                found = await asyncio.gather(*(ask(model, i) for i in range(5)))
                return found, model.scheduler.counts.works / model.scheduler.counts.passes

        found, works = asyncio.run(everything())
        assert found == [result.text for result in expected]
        assert works > 1.5

    def test_a_prompt_is_tokenised_outside_the_event_loop(self, monkeypatch):
        threads, request = [], Model.request

        def noted(model, *given, **options):
            threads.append(current_thread())
            return request(model, *given, **options)

        async def ask(model):
            return [chunk async for chunk in model.astream("hello", max_tokens=3)]

        monkeypatch.setattr(Model, "request", noted)
        with self.model(1) as model:
            assert asyncio.run(ask(model))
        assert threads
        assert main_thread() not in threads

    def test_a_task_that_is_cancelled_frees_its_slot(self):
        async def everything():
            with self.model(1) as model:
                first = model.astream("hello", max_tokens=400)
                async with aclosing(first) as chunks:
                    async for _ in chunks:
                        break

                begun = asyncio.Event()

                async def endless():
                    async for _ in model.astream("hello", max_tokens=400):
                        begun.set()
                        await asyncio.sleep(0)

                task = asyncio.create_task(endless())
                await begun.wait()
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
                text = [chunk.token_id async for chunk in model.astream("hello 0", max_tokens=25)]
                with pytest.raises(ContextFull):
                    [chunk async for chunk in model.astream("a" * 600)]
                return text, model.scheduler.counts.requests

        text, ended = asyncio.run(everything())
        assert len(text) == 25
        assert ended == {"interrupted": 2, "length": 1}

    def test_a_text_whose_reader_asks_for_another_is_not_in_the_way(self):
        with self.model(1) as model:
            left = model.stream("hello", max_tokens=20)
            next(left)
            assert len(model.generate("hello 1", max_tokens=5).token_ids) == 5
            assert len(list(left)) == 19

    def test_a_model_that_nobody_has_is_freed_with_its_thread(self):
        model = self.model(1)
        model.generate("hello", max_tokens=2)
        next(model.stream("hello", max_tokens=20))
        thread, target = model.scheduler.thread, weakref.ref(model.target)
        del model
        gc.collect()
        thread.join(20)
        gc.collect()
        assert not thread.is_alive()
        assert target() is None

    def test_a_reader_that_stops_reading_burns_nothing(self):
        """The thread is at most one step ahead; then it waits, also beside other texts."""
        with self.model(2) as model:
            left = model.stream("hello", max_tokens=40)
            next(left)
            assert len(model.generate("hello 1", max_tokens=30).token_ids) == 30
            [seq] = model.scheduler.pool.seqs
            written = seq.stats.tokens
            assert len(model.generate("hello 2", max_tokens=30).token_ids) == 30
            assert seq.stats.tokens == written < 30
            assert len(list(left)) == 39

    def test_a_program_may_end_in_the_middle(self):
        script = (
            "import threading\nfrom reference.backend import ReferenceBackend, random_model\n"
            "from edgespec.model import Model\nfrom edgespec.planners.none import NonePlanner\n"
            "model = Model(ReferenceBackend(random_model(2, vocab_size=258)), NonePlanner())\n"
            "model.scheduler.start()\nchunks = model.stream('hello', max_tokens=400)\nprint(next(chunks).token_id)"
        )
        done = forked(program=script)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.strip().isdigit()

    def test_closing_ends_what_is_written(self):
        model = self.model(1)
        chunks = model.stream("hello", max_tokens=20)
        next(chunks)
        model.close()
        with pytest.raises(Closed):
            list(chunks)
        with pytest.raises(Closed):
            model.generate("hello")
