"""A draft reads a long prompt in chunks, one a step: other sequences go on meanwhile, and no text changes."""

from threading import Event, Thread

import pytest
from alone import generation_of
from auto_planners import auto_planner
from reference.backend import ReferenceBackend
from test_ahead import wait_for
from test_auto import Free, GivenCost, GivenShare
from test_scheduler import DRAFT, LONG, PROMPTS, SHAPES, Reader, Recording, backend, run

from edgespec.errors import ContextFull, ModelError
from edgespec.loop.pass_times import PassTimes
from edgespec.loop.shapes import TILE
from edgespec.planners.ahead import AheadPlanner
from edgespec.planners.auto import READ, AutoState, Drafting
from edgespec.planners.drafting import CATCH_UP
from edgespec.planners.none import NonePlanner
from edgespec.planners.specexec import SpecExecPlanner
from edgespec.scheduler.prompt_chunks import PromptChunks
from edgespec.scheduler.scheduler import Scheduler

LONG_PROMPT = PROMPTS.index(LONG)


class Draft(ReferenceBackend):
    """Notes the prompts' tokens of each pass, and fails when it is told to."""

    def __init__(self, shape="any", **options):
        super().__init__(DRAFT, **{"context_length": 300, "sessions": 2, "max_nodes": 150} | options)
        if SHAPES[shape]:
            self.keep_to(SHAPES[shape])
        self.parts, self.readers, self.failing = [], [], lambda batch: None

    def read_by_others(self, session, since):
        """Sizes of parts of prompts that other sessions have read since there were as many."""
        parts = zip(self.parts[since:], self.readers[since:], strict=True)
        return [part for part, reader in parts if reader is not session]

    def forward(self, batch):
        self.parts += [len(work.token_ids) for work in batch if work.prompt]
        self.readers += [work.session for work in batch if work.prompt]
        if error := self.failing(batch):
            raise error
        return super().forward(batch)


OPENED = list[Scheduler]()  # by a test


@pytest.fixture(autouse=True)
def slow_passes(monkeypatch):
    """Others wait for no more than a tile, whatever passes take here."""
    monkeypatch.setattr(PromptChunks, "fast", lambda self, taken, most: TILE)
    yield
    while OPENED:
        OPENED.pop().close()


def opened(target, planners):
    OPENED.append(Scheduler(target, planners, budget=8))
    return OPENED[-1]


def drafting(draft, sessions=2, **options):
    target = backend(sessions=sessions, kind=Recording)
    made = [SpecExecPlanner(draft, depth=4, beam=3, **options) for _ in range(sessions)]
    return target, opened(target, made)


@pytest.mark.covering(2)
@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("known", [False, True], ids=["", "known to the target"])
def test_another_sequence_waits_for_one_chunk_at_most(shape, temperature, known):
    draft = Draft(shape)
    _, scheduler = drafting(draft)
    if known:
        Reader(scheduler, LONG_PROMPT, max_tokens=1, plain=True)
        run(scheduler)
    first = Reader(scheduler, 1, temperature, 1, 40)
    while not first.tokens:
        scheduler.step()
    own, steps = first.seq.slot.draft, 0
    long = Reader(scheduler, LONG_PROMPT, temperature, 2, 5)
    while not long.stats.passes:  # the first token does not wait for the draft
        before, told = len(draft.parts), len(first.tokens)
        scheduler.step()
        chunks = draft.read_by_others(own, before)
        assert long.tokens or not chunks
        assert sum(chunks[:-1]) <= TILE if long.stats.passes else len(chunks) <= 1
        assert max(chunks, default=0) <= TILE + 29  # a rest that would be padded joins the last chunk
        assert len(first.tokens) > told or first.ended
        steps += bool(chunks)
    assert steps >= 3
    assert (long.stats.cached_tokens > 100) == known
    run(scheduler)
    first.check()
    long.check()


def test_a_sequence_alone_has_chunks_as_long_as_fit():
    draft = Draft(sessions=1)
    _, scheduler = drafting(draft, sessions=1)
    reader = Reader(scheduler, LONG_PROMPT, 0.7, 1, 5)
    run(scheduler)
    reader.check()
    assert draft.parts[0] == 2 * TILE
    assert sum(draft.parts[:2]) == len(LONG)
    assert reader.stats.prefill_seconds > 0


def test_without_a_scheduler_the_draft_reads_the_prompt_before_the_first_tree():
    """The first token does not wait for it."""
    draft = Draft(sessions=1)
    steps = generation_of(backend(sessions=1), SpecExecPlanner(draft, depth=4), LONG).steps()
    next(steps)
    assert draft.parts == []
    next(steps)
    assert draft.parts == [150, len(LONG) - 150, 1]


def test_a_draft_whose_context_is_full_reads_no_further():
    draft = Draft(sessions=1, context_length=90)
    _, scheduler = drafting(draft, sessions=1)
    reader = Reader(scheduler, 3, 0.7, 1, 200)
    run(scheduler)
    assert reader.ended.error is None
    reader.check()
    assert reader.stats.drafted > 0


@pytest.mark.parametrize("kind", ["specexec", "auto", "ahead"])
def test_a_prompt_longer_than_the_drafts_context_is_answered_without_the_draft(kind):
    draft, state = (
        Draft(sessions=1, context_length=90),
        AutoState(GivenCost(1.0, 0.01), worth=GivenShare(1.0), ledgers={1: Free()}),
    )
    made = (AheadPlanner if kind == "ahead" else SpecExecPlanner)(draft, depth=4, cost=state.draft)
    planner = auto_planner("auto", state, draft=made) if kind == "auto" else made
    target = backend(sessions=1)
    scheduler = opened(target, [planner])
    long = Reader(scheduler, LONG_PROMPT, 0.7, 1, 20)
    run(scheduler)
    long.check()
    assert draft.parts == []
    assert long.stats.drafted == 0
    short = Reader(scheduler, 1, 0.7, 1, 20)
    run(scheduler)
    short.check()
    assert short.stats.drafted > 0


def test_a_full_draft_is_not_blamed():
    """`auto` learns nothing about a draft from steps in which it could not be asked."""
    draft, state = Draft(sessions=1, context_length=90), AutoState(GivenCost(1.0, 0.01), ledgers={1: Free()})
    planner = auto_planner("auto", state, draft=SpecExecPlanner(draft, depth=4, cost=state.draft))
    scheduler = opened(backend(sessions=1), [planner])
    reader = Reader(scheduler, 3, 0.7, 1, 200)
    while len(PROMPTS[3]) + len(reader.tokens) < 90:
        scheduler.step()
    known, drafted = state.worth.hoped, reader.stats.drafted
    assert known > 0
    assert drafted > 0
    run(scheduler)
    assert (state.worth.hoped, reader.stats.drafted) == (known, drafted)


def test_an_error_in_a_chunk_ends_its_request_alone():
    draft = Draft()
    _, scheduler = drafting(draft)
    first = Reader(scheduler, 1, 0.7, 1, 20)
    while not first.tokens:
        scheduler.step()
    draft.failing = lambda batch: ModelError("no memory") if len(batch[0].token_ids) > 8 else None
    long = Reader(scheduler, LONG_PROMPT, 0.7, 2, 5)
    while not long.ended:
        scheduler.step()
    assert str(long.ended.error) == "no memory"
    draft.failing = lambda batch: None
    again = Reader(scheduler, LONG_PROMPT, 0.7, 2, 5)
    run(scheduler)
    first.check()
    again.check()


@pytest.mark.parametrize("times", [1, 2])
def test_a_draft_whose_cells_are_scattered_reads_again_once(times):
    draft, left = Draft(sessions=1), [times]
    _, scheduler = drafting(draft, sessions=1)

    def full(batch):
        if batch[0].session.token_ids and left[0]:
            left[0] -= 1
            return ContextFull("no cells in a row")
        return None

    draft.failing = full
    reader = Reader(scheduler, LONG_PROMPT, 0.7, 1, 5)
    run(scheduler)
    assert reader.ended.error is None
    reader.check()
    assert (reader.stats.drafted > 0) == (times == 1)  # else it is decoded without the draft


def test_a_request_that_is_cancelled_while_its_draft_reads_ends_at_once():
    draft, begun, ended, passes = Draft(), Event(), Event(), []
    target, scheduler = drafting(draft)

    def waits(batch):
        if batch[0].prompt and len(batch[0].token_ids) > 8:
            passes.append(len(target.passes))
            begun.set()
            assert wait_for(draft.stop, 20)

    draft.failing = waits
    reader = Reader(scheduler, LONG_PROMPT, 0.7, 1, 5)

    def steps():
        while not reader.ended:
            scheduler.step()
        ended.set()

    thread = Thread(target=steps)
    thread.start()
    assert begun.wait(20)
    reader.seq.cancel()
    assert ended.wait(20)
    thread.join()
    reader.check()
    assert passes == [len(target.passes)]
    draft.failing = lambda batch: None
    again = Reader(scheduler, LONG_PROMPT, 0.7, 1, 5)
    run(scheduler)
    again.check()


class Late(Free):
    """Asks for a trial when it is told to."""

    due = False

    def is_due(self, way, tokens):
        return self.due


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_draft_that_is_asked_late_reads_in_chunks_too(temperature):
    ledger, draft = Late(), Draft(sessions=1)
    state = AutoState(GivenCost(1.0, 0.5), worth=GivenShare(1.0), ledgers={1: ledger, 2: ledger})
    late = auto_planner("auto", state, draft=SpecExecPlanner(draft, depth=4, cost=state.draft), eager=False)
    scheduler = opened(backend(sessions=2), [late, NonePlanner()])
    long, other = Reader(scheduler, 3, temperature, 2, 150), Reader(scheduler, 1, temperature, 1, 200)
    while not draft.parts:
        told = len(long.tokens), len(other.tokens)
        ledger.due = told[0] >= 60
        scheduler.step()
    unread = len(PROMPTS[3]) - 1 + told[0]
    assert unread > 2 * CATCH_UP
    while sum(draft.parts) < unread:
        assert len(long.tokens) == told[0]  # for a draft that is worth it, it waits
        told = told[0], len(other.tokens)
        scheduler.step()
        assert len(other.tokens) == told[1] + 1
    assert draft.parts[:2] == [TILE, TILE]
    assert draft.parts[2] <= 1 + CATCH_UP  # the rest is read by the pass that proposes
    assert len(long.tokens) > told[0]
    assert long.stats.draft_passes > 0
    run(scheduler)
    long.check()
    other.check()


@pytest.mark.parametrize(
    ("kind", "plain"),
    [("specexec", True), ("slow", True), ("slow", False), ("unknown", True), ("unknown", False)],
)
def test_a_request_that_is_decoded_plainly_lets_the_draft_read_nothing(kind, plain):
    """Asked to, or since no gain is expected of a slow draft, or of one that is not known."""
    draft, cost = Draft(sessions=1), GivenCost(9.0, 0.5) if kind == "slow" else PassTimes()
    state = AutoState(GivenCost(1.0, 0.5), cost, worth=GivenShare(1.0), ledgers={1: Free()})
    planner = SpecExecPlanner(draft, depth=4, cost=state.draft)
    planner = planner if kind == "specexec" else auto_planner("auto", state, draft=planner, eager=plain)
    scheduler = opened(backend(sessions=1), [planner])
    reader = Reader(scheduler, LONG_PROMPT, max_tokens=100, plain=plain)
    run(scheduler)
    reader.check()
    assert draft.parts == []
    assert reader.stats.draft_passes == 0


@pytest.mark.parametrize(("length", "unpaid"), [(1 + CATCH_UP, 0), (3 * CATCH_UP, 3 * CATCH_UP - 1)])
def test_what_a_draft_reads_is_charged_once(length, unpaid):
    state, text = AutoState(), list(range(1, length + 1))
    drafting = Drafting(SpecExecPlanner(Draft()), state)
    drafting.begin(text[:9])
    ledger = state.ledger(2)
    account = ledger.accounts["specexec"]
    assert drafting.is_ready(text, ledger) == (unpaid == 0)  # then its proposal reads, which is charged as drafting
    assert account.lost == pytest.approx(READ * unpaid)
    if unpaid:
        drafting.is_ready([*text, 5], ledger)
        assert account.lost == pytest.approx(READ * (unpaid + 1))
