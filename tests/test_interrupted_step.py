"""Texts that are cancelled, left or closed at any moment: all others have the tokens of plain decoding."""

import asyncio
import random
import signal
import sys
from contextlib import closing
from dataclasses import replace
from datetime import date
from pathlib import Path
from threading import Thread, Timer, main_thread
from time import perf_counter, sleep

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_scheduler import CONTEXT, PROMPTS, Reader, Recording, alone, backend, planners, run

import edgespec
from edgespec.errors import Closed, SessionFileError, UsageError
from edgespec.loop.hint_texts import NgramIndex
from edgespec.loop.sampling import SamplingParams
from edgespec.loop.session_files import look
from edgespec.loop.stats import GenerationStats
from edgespec.model import Model
from edgespec.planners.none import NonePlanner
from edgespec.scheduler import drive
from edgespec.scheduler.events import Wrote
from edgespec.scheduler.requests import Request
from edgespec.scheduler.scheduler import Scheduler

SOURCES = Path(edgespec.__file__).parent
TRACED = tuple(str(SOURCES / room) for room in ("scheduler", "loop", "planners"))
KINDS = ["none", "sssd", "specexec"]


class AtLine:
    """Calls a function at a line of a step, counted over all steps."""

    def __init__(self, at, act):
        self.left, self.act, self.fell = at, act, False
        self._inside = 0

    def __call__(self, frame, event, argument):
        if event == "line":
            self.left -= self._inside > 0
            if self.left == 0 and not self.fell:
                self.fell = True
                sys.settrace(None)
                self.act()
            return self
        is_step = frame.f_code is Scheduler.step.__code__
        self._inside += is_step and event == "call"
        self._inside -= is_step and event == "return"
        return self if frame.f_code.co_filename.startswith(TRACED) else None


@pytest.mark.parametrize("name", KINDS)
@settings(max_examples=15, deadline=None)
@given(st.integers(1, 6000), st.integers(0, 2))
def test_a_text_that_is_cancelled_at_any_line_changes_no_other(name, at, which):
    target = backend("two classes", sessions=2, kind=Recording)
    scheduler = Scheduler(target, planners(name, 2), budget=8)
    readers = [Reader(scheduler, prompt, 0.7, prompt, 12) for prompt in (3, 1, 2)]
    tracer = AtLine(at, readers[which].seq.cancel)
    while (scheduler.waiting or scheduler.active) and not tracer.fell:
        sys.settrace(tracer)
        try:
            scheduler.step()
        finally:
            sys.settrace(None)
    run(scheduler)
    readers.append(Reader(scheduler, 1, 0.7, 1, 12))
    run(scheduler)
    scheduler.close()
    assert target.open_sessions == 0
    assert all(reader.ended.error is None for reader in readers if reader is not readers[which])
    for reader in readers:
        reader.check()


TEXTS = [(1, 0.7), (0, 0.0), (2, 0.7), (4, 0.7)]  # prompts and temperatures


def ask(model, number):
    prompt, temperature = TEXTS[number]
    options = {"max_tokens": 10, "temperature": temperature, "seed": number}
    request = replace(model.request("x", **options), prompt_ids=PROMPTS[prompt])
    return drive.chunks(model.scheduler, request, None, None)


def interrupted(model, seconds, texts, second):
    """Ask, also for a second text, with Ctrl-C after so many seconds; then ask again.

    Returns:
        False: the texts ended before.
    """
    chunks = {number: ask(model, number) for number in range(1 + second)}
    found = {number: [] for number in chunks}
    timer = Timer(seconds, lambda: signal.pthread_kill(main_thread().ident, signal.SIGINT))
    fell = False
    try:
        timer.start()
        for number in found:
            found[number] = [chunk.token_id for chunk in chunks[number]]
        timer.cancel()
        timer.join()
    except KeyboardInterrupt:
        fell = True
    for number, tokens in found.items():
        assert tokens in ([], texts[number])
    chunks.clear()
    for number in (0, 2, 1):
        assert [chunk.token_id for chunk in ask(model, number)] == texts[number]
    model.scheduler.call(lambda call: None)  # after the step that ended the last one
    assert (model.scheduler.active, model.scheduler.waiting) == (0, 0)
    return fell


def try_moments(model, plain, second, count):
    texts = [[chunk.token_id for chunk in ask(plain, number)] for number in range(3)]
    chance = random.Random(date.today().toordinal())
    with closing(plain), closing(model):
        started = perf_counter()
        list(ask(model, 0))
        took = perf_counter() - started
        fell = 0
        for number in range(20 * count):
            if number >= count and fell:
                break
            model.scheduler.forget()
            fell += interrupted(model, chance.uniform(0, took / 2), texts, second)
        assert fell


@pytest.mark.covering(1)
@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="Windows sends no signals")
@pytest.mark.parametrize("second", [False, True], ids=["one text", "a second text"])
@pytest.mark.parametrize("name", ["auto", "specexec"])
def test_what_is_written_after_ctrl_c_is_what_plain_decoding_writes(name, second, whole_grid):
    plain = Model(backend("two classes", sessions=1), NonePlanner(), budget=8)
    model = Model(backend("two classes", sessions=1 + second), planners(name, 1 + second), budget=8)
    try_moments(model, plain, second, 500 if whole_grid else 10)


@pytest.mark.parametrize("name", ["auto", "specexec"])
def test_closing_at_any_moment_ends_all_texts(name, whole_grid):
    chance = random.Random(date.today().toordinal())
    for _ in range(100 if whole_grid else 5):
        target = backend("two classes", sessions=2, kind=Recording)
        scheduler = Scheduler(target, planners(name, 2), budget=8)
        readers = [Reader(scheduler, prompt, 0.7, prompt, 12) for prompt in (3, 1, 2)]
        scheduler.start()
        sleep(chance.uniform(0, 0.05))
        scheduler.close()
        assert target.open_sessions == 0
        for reader in readers:
            assert isinstance(reader.ended.error, Closed | None)
            assert reader.tokens == alone(*reader.key)[: len(reader.tokens)]


@pytest.fixture
def on_llamacpp(small, small_q4):
    """Loads models of 4 bits, whose passes are kept to row classes: one that decodes plainly, one with a planner."""
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    target, options = str(small_q4), {"context_length": CONTEXT, "threads": 1, "exact": "narrow"}

    def both(name, parallel):
        drafted = {"draft": str(small)} if name != "sssd" else {}
        plain = edgespec.load(target, planner="none", **options)
        return plain, edgespec.load(target, planner=name, parallel=parallel, **drafted, **options)

    return both


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="Windows sends no signals")
@pytest.mark.parametrize("name", ["auto", "sssd", "specexec"])
def test_what_llama_cpp_writes_after_ctrl_c_is_what_plain_decoding_writes(name, on_llamacpp, whole_grid):
    plain, model = on_llamacpp(name, 2)
    try_moments(model, plain, True, 200 if whole_grid else 5)


@pytest.mark.parametrize(("what", "call"), [("load", "llama_memory_seq_rm"), ("save", "llama_memory_seq_cp")])
def test_ctrl_c_while_llama_cpp_loads_or_saves_changes_no_tokens(what, call, on_llamacpp, tmp_path, monkeypatch):
    plain, model = on_llamacpp("sssd", 1)
    from edgespec.backends.llamacpp.ggml.files import llama_cpp

    inner = getattr(llama_cpp, call)

    def interrupted(*arguments):
        inner(*arguments)
        signal.raise_signal(signal.SIGINT)

    with closing(plain), closing(model):
        long, short = ([chunk.token_id for chunk in ask(plain, number)] for number in (3, 0))
        list(ask(model, 0))
        model.scheduler.save(tmp_path / "saved")
        assert [chunk.token_id for chunk in ask(model, 3)] == long
        with monkeypatch.context() as patch:
            patch.setattr(llama_cpp, call, interrupted)
            with pytest.raises(KeyboardInterrupt):
                getattr(model.scheduler, what)(tmp_path / "saved")
        assert [chunk.token_id for chunk in ask(model, 3)] == long
        assert [chunk.token_id for chunk in ask(model, 0)] == short


def test_a_file_that_cannot_be_loaded_leaves_the_session(tmp_path):
    with closing(Model(backend("two classes", sessions=1), NonePlanner(), budget=8)) as model:
        list(ask(model, 2))
        kept = model.scheduler.kept_tokens
        (tmp_path / "other").write_text("no session")
        with pytest.raises(SessionFileError):
            model.scheduler.load(tmp_path / "other")
        list(ask(model, 2))
        assert model.scheduler.kept_tokens == kept
        assert model.scheduler.counts.cached_tokens > 0


class Lossy(Recording):
    """Rounds otherwise in the second half of its passes, as an engine without row classes may."""

    def forward(self, batch):
        found = super().forward(batch)
        if len(self.passes) > 12:
            for logits in found:
                logits.rows = {node: -row for node, row in logits.rows.items()}
        return found


def test_a_request_that_begins_again_with_other_tokens_ends_with_an_error():
    target = backend("any", sessions=1, kind=Lossy)
    scheduler = Scheduler(target, planners("none", 1), budget=4)
    reader = Reader(scheduler, 1, 0.7, 1, 40)
    while len(target.passes) < 13:
        scheduler.step()
    known = reader.tokens
    slot = reader.seq.slot
    scheduler._wait_again(reader.seq)
    scheduler.pool.renew(slot)
    run(scheduler)
    assert "interrupted" in str(reader.ended.error)
    assert reader.tokens == known
    scheduler.close()


def test_an_index_whose_change_was_interrupted_is_built_again():
    class Stops(list):
        def __getitem__(self, at):
            raise KeyboardInterrupt

    whole, broken = NgramIndex(3), NgramIndex(3)
    broken.extend([1, 2, 3, 1, 2])
    broken.text = Stops(broken.text)
    with pytest.raises(KeyboardInterrupt):
        broken.rewind(1)
    whole.extend([1, 2, 4, 1, 2])
    broken.become([1, 2, 4, 1, 2])
    assert (broken.text, broken._after) == (whole.text, whole._after)


class TestDrive:
    """An iterator that is left early."""

    def test_it_ends_its_request(self):
        scheduler, stats = Scheduler(backend(sessions=1), planners("none", 1), budget=4), GenerationStats()
        events = drive.events(scheduler, Request(PROMPTS[1], SamplingParams(), 20), stats)
        next(events)
        assert scheduler.active == 1
        events.close()
        scheduler.forget()  # after the step that ends it
        assert (scheduler.active, scheduler.waiting) == (0, 0)
        assert stats.finish_reason == "interrupted"
        assert scheduler.counts.requests == {"interrupted": 1}
        scheduler.close()

    def test_a_file_is_not_loaded_while_all_sessions_are_busy(self, tmp_path):
        scheduler = Scheduler(backend(sessions=1), planners("none", 1), budget=4)
        scheduler.save(tmp_path / "a.session")
        events = drive.events(scheduler, Request(PROMPTS[1], SamplingParams(), 20))
        next(events)
        with pytest.raises(UsageError, match="in use"):
            scheduler.load(tmp_path / "a.session")
        events.close()
        scheduler.load(tmp_path / "a.session")
        scheduler.close()

    def test_what_was_loaded_is_what_is_saved_next(self, tmp_path):
        scheduler = Scheduler(backend(sessions=2), planners("none", 2), budget=4)
        for prompt in (4, 2):
            Reader(scheduler, prompt)
            run(scheduler)
            scheduler.save(tmp_path / str(prompt))
        scheduler.load(tmp_path / "4")
        scheduler.save(tmp_path / "again")
        assert look(tmp_path / "again").token_ids == look(tmp_path / "4").token_ids
        scheduler.close()

    def test_a_thread_that_cannot_be_had_is_not_waited_for(self, monkeypatch):
        def fails(self):
            raise RuntimeError("can't start new thread")

        model = Model(backend(sessions=1), planners("none", 1), budget=4)
        scheduler = model.scheduler
        with monkeypatch.context() as patch:
            patch.setattr(Thread, "start", fails)
            with pytest.raises(RuntimeError):
                scheduler.start()
        assert scheduler.thread is None
        with monkeypatch.context() as patch:
            patch.setattr(scheduler, "start", lambda: fails(None))
            with pytest.raises(RuntimeError):
                asyncio.run(anext(model.astream("a")))
        assert (scheduler.active, scheduler.waiting) == (0, 0)
        request = Request(PROMPTS[1], SamplingParams(temperature=0.7, seed=1), 12)
        found = [event for event in drive.events(scheduler, request) if isinstance(event, Wrote)]
        assert [chunk.token_id for event in found for chunk in event.chunks] == alone(1, 0.7, 1, 12)
        scheduler.close()
