"""A step that an exception ends, wherever it falls: all other requests go on with the tokens of plain decoding."""

import asyncio
import signal
import sys
from contextlib import closing, suppress
from dataclasses import replace
from datetime import date
from linecache import getline
from pathlib import Path
from threading import Thread
from unittest.mock import Mock

import edgespec.backends
import pytest
from conftest import Q4_1, quantised
from edgespec.backends.reference.backend import ReferenceBackend, ReferenceSession
from gguf_files import small_llama
from hypothesis import given, settings
from hypothesis import strategies as st
from test_scheduler import CONTEXT, PROMPTS, Reader, Recording, alone, backend, planners, run

import edgespec
from edgespec.errors import SessionFileError, UsageError
from edgespec.loop.generate import Generation
from edgespec.loop.hint_texts import NgramIndex
from edgespec.loop.passes import Prefill
from edgespec.loop.sampling import SamplingParams
from edgespec.loop.session_files import look
from edgespec.loop.stats import GenerationStats
from edgespec.model import Model
from edgespec.planners.none import NonePlanner
from edgespec.planners.specexec import SpecExecPlanner
from edgespec.planners.sssd import SssdPlanner
from edgespec.scheduler import drive
from edgespec.scheduler.queue import Queue
from edgespec.scheduler.requests import Cancelled, Ended, Handle, Request, Status, Wrote
from edgespec.scheduler.scheduler import Scheduler
from edgespec.scheduler.session_pool import Lane, SessionPool

SOURCES = Path(edgespec.__file__).parent
ENGINES = [Path(folder) / kind for folder in edgespec.backends.__path__ for kind in ("common", "reference", "llamacpp")]
INTERRUPTED = tuple(map(str, [*(SOURCES / room for room in ("scheduler", "loop", "planners")), *ENGINES]))
LAYERS = str(ENGINES[1] / "model.py")  # of the reference backend: the same lines for each token
CODES = {Scheduler.step.__code__, Scheduler.end_cancelled.__code__}
KINDS = ["none", "sssd", "specexec"]


class Interrupts:
    """Raises KeyboardInterrupt at a line of a step, counted over all steps; `told`: within the report of an event."""

    def __init__(self, at):
        self.left, self.told = at, False
        self._inside = 0

    def __call__(self, frame, event, argument):
        if event == "line":
            self._line(frame)
            return self
        is_step = frame.f_code in CODES
        if event == "call" and is_step:
            self._inside += 1
        name = frame.f_code.co_filename
        traced = self._inside and name.startswith(INTERRUPTED) and name != LAYERS
        if event == "return" and is_step:
            self._inside -= 1
        return self if traced else None

    def _line(self, frame):
        # CPython looks for signals after it has released a lock, and the tracer before: that line is left out.
        if self._inside and not getline(frame.f_code.co_filename, frame.f_lineno).lstrip().startswith("with "):
            self.left -= 1
            if self.left == 0:
                self.told = Handle.tell.__code__ in (frame.f_code, frame.f_back and frame.f_back.f_code)
                signal.raise_signal(signal.SIGINT)  # an engine may hold it for a moment


def write(name, at, shape="two classes"):
    """Three requests in two sessions, then another; KeyboardInterrupt comes at one line, and again after as many."""
    target = backend(shape, sessions=2, kind=Recording)
    scheduler = Scheduler(target, planners(name, 2), budget=8)
    readers = [Reader(scheduler, prompt, 0.7, prompt, 12) for prompt in (3, 1, 2)]
    interrupts, fell, told = Interrupts(at), 0, 0
    for _ in range(3000):
        sys.settrace(interrupts)
        try:
            scheduler.step()
        except KeyboardInterrupt:
            fell += 1
            told += interrupts.told
            interrupts = Interrupts(at if fell < 2 else 0)
        finally:
            sys.settrace(None)
        if not scheduler.waiting and not scheduler.active:
            break
    run(scheduler)
    readers.append(Reader(scheduler, 1, 0.7, 1, 12))
    run(scheduler)
    scheduler.close()
    assert target.open_sessions == 0
    return readers, fell, told


@pytest.mark.parametrize("name", KINDS)
@settings(max_examples=25, deadline=None)
@given(st.integers(1, 6000))
def test_an_interrupt_at_any_line_changes_no_tokens(name, at):
    readers, _, told = write(name, at)
    assert sum(reader.ended.error is not None for reader in readers) <= told
    for reader in readers:
        reader.events = once(reader.events)
        reader.check()


LINES, BEGUN = 2000, 6000  # lines of steps; of texts that have begun, three times as many: drafting takes thousands
SAMPLED, ON_LLAMACPP = 23, 50
TEXTS = [(1, 0.7), (0, 0.0), (2, 0.7), (4, 0.7)]  # prompts and temperatures


def ask(model, number):
    prompt, temperature = TEXTS[number]
    options = {"max_tokens": 10, "temperature": temperature, "seed": number}
    request = replace(model.request("x", **options), prompt_ids=PROMPTS[prompt])
    return drive.chunks(model.scheduler, request, None, None)


def interrupted_at(model, at, texts, second, begun):
    """Ask, also for a second text, with Ctrl-C at one line of the steps; then go on, and ask again.

    Args:
        model: any.
        at: number of the line, counted from the first step, or, if `begun`, from when all texts have a token.
        texts: what plain decoding writes.
        second: there is a second text.
        begun: see `at`.

    Returns:
        False: the texts ended before that line.
    """
    model.scheduler.forget()
    chunks = {number: ask(model, number) for number in range(1 + second)}
    found = {number: [next(chunks[number]).token_id] if begun else [] for number in chunks}
    done, fell = set(), False
    interrupts = Interrupts(at)
    sys.settrace(interrupts)
    try:
        while chunks.keys() - done:
            for number in sorted(chunks.keys() - done):
                try:
                    found[number].append(next(chunks[number]).token_id)
                except StopIteration:
                    done.add(number)
                except KeyboardInterrupt:
                    fell = True
                    del chunks[number]
                except Cancelled:  # it is not known whether the reader has the tokens that were being reported
                    assert interrupts.told
                    assert found[number] == texts[number][: len(found[number])]
                    del chunks[number]
    finally:
        sys.settrace(None)
    for number in chunks:
        assert found[number] == texts[number], f"line {at}: text {number} goes on"
    for number in (0, 2, 1):
        assert [chunk.token_id for chunk in ask(model, number)] == texts[number], f"line {at}: text {number} afterwards"
    assert (model.scheduler.active, model.scheduler.waiting) == (0, 0)
    return fell


def try_lines(model, plain, lines, second, begun):
    texts = [[chunk.token_id for chunk in ask(plain, number)] for number in range(3)]
    with closing(plain), closing(model):
        fell = [interrupted_at(model, at, texts, second, begun) for at in lines]
    assert sum(fell) > 0.9 * len(fell)


def lines_of(begun, every):
    """Each day other ones, unless every line is wanted."""
    lines = range(1, BEGUN + 1, 3) if begun else range(1, LINES + 1)
    return lines[date.today().toordinal() % every :: every]


@pytest.mark.covering(1)
@pytest.mark.parametrize("begun", [False, True], ids=["from the first step", "between two tokens"])
@pytest.mark.parametrize("second", [False, True], ids=["one text", "a second text"])
@pytest.mark.parametrize("name", ["auto", "sssd", "specexec"])
def test_what_is_written_after_ctrl_c_is_what_plain_decoding_writes(name, second, begun, whole_grid):
    plain = Model(backend("two classes", sessions=1), NonePlanner(), budget=8)
    model = Model(backend("two classes", sessions=1 + second), planners(name, 1 + second), budget=8)
    try_lines(model, plain, lines_of(begun, 1 if whole_grid else SAMPLED), second, begun)


def on_llamacpp(name, parallel, folder):
    """Models of 4 bits, whose passes are kept to row classes: one that decodes plainly, and one with a planner."""
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    draft = small_llama(Path(folder) / "draft.gguf", layers=2)
    target = str(quantised(draft, Path(folder) / "target.gguf", Q4_1))
    options = {"context_length": CONTEXT, "threads": 1, "remember": False, "exact": "narrow"}
    drafted = {"draft": str(draft)} if name != "sssd" else {}
    plain = edgespec.load(target, planner="none", **options)
    return plain, edgespec.load(target, planner=name, parallel=parallel, **drafted, **options)


@pytest.mark.covering(1)
@pytest.mark.parametrize("begun", [False, True], ids=["from the first step", "between two tokens"])
@pytest.mark.parametrize("second", [False, True], ids=["one text", "a second text"])
@pytest.mark.parametrize("name", ["auto", "sssd", "specexec"])
def test_what_llama_cpp_writes_after_ctrl_c_is_what_plain_decoding_writes(name, second, begun, tmp_path, whole_grid):
    plain, model = on_llamacpp(name, 1 + second, tmp_path)
    try_lines(model, plain, lines_of(begun, ON_LLAMACPP if whole_grid else 10 * SAMPLED), second, begun)


@pytest.mark.parametrize(("what", "call"), [("load", "llama_memory_seq_rm"), ("save", "llama_memory_seq_cp")])
def test_ctrl_c_while_llama_cpp_loads_or_saves_changes_no_tokens(what, call, tmp_path, monkeypatch):
    plain, model = on_llamacpp("sssd", 1, tmp_path)
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


PLANNERS = {"none": NonePlanner, "sssd": SssdPlanner, "specexec": SpecExecPlanner}
BOUNDARIES = [
    (ReferenceSession, "commit"), (ReferenceSession, "rewind"), (ReferenceBackend, "forward"),
    (Generation, "begin"), (Generation, "accept"), (Generation, "accept_prompt"), (Generation, "propose"),
    (Prefill, "resume"), (Prefill, "read"), (Prefill, "commit"), (Generation, "read_draft_part"),
    (Handle, "begin"), (Handle, "write"), (Handle, "end"), (Handle, "restart"), (Queue, "remove"),
    (Lane, "accept"), (SessionPool, "assign"), (SessionPool, "begin"), (SessionPool, "release"), (SessionPool, "renew"),
    *((kind, "observe") for kind in PLANNERS.values()), *((kind, "begin") for kind in PLANNERS.values()),
]  # fmt: skip


class Boundary:
    """Raises KeyboardInterrupt at one call of a method, before it or after it, if a step makes that call."""

    def __init__(self, monkeypatch, kind, name, number, *, after):
        self.calls, self.raised, self.in_step = 0, 0, False
        inner = getattr(kind, name)

        def call(*arguments, **options):
            self.calls += self.in_step
            due = self.in_step and self.calls in (number, number + 2)  # again, while the first one is mended
            if due and not after:
                self.interrupt()
            found = inner(*arguments, **options)
            if due and after:
                self.interrupt()
            return found

        monkeypatch.setattr(kind, name, call)

    def interrupt(self):
        self.raised += 1
        raise KeyboardInterrupt


def run_interrupted(scheduler, boundary):
    for _ in range(3000):
        boundary.in_step = True
        with suppress(KeyboardInterrupt):
            scheduler.step()
        boundary.in_step = False
        if not scheduler.waiting and not scheduler.active:
            return
    raise AssertionError("a request never ends")


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(("kind", "name"), BOUNDARIES, ids=[f"{kind.__name__}.{name}" for kind, name in BOUNDARIES])
def test_an_interrupt_at_a_call_changes_no_tokens(kind, name, after, monkeypatch):
    planner = next((one for one, made in PLANNERS.items() if made is kind), "specexec")
    raised = 0
    for number in (1, 4, 11):
        with monkeypatch.context() as patch:
            target = backend("two classes", sessions=2, kind=Recording)
            scheduler = Scheduler(target, planners(planner, 2), budget=8)
            boundary = Boundary(patch, kind, name, number, after=after)
            readers = [Reader(scheduler, prompt, 0.7, prompt, 12) for prompt in (3, 1, 2)]
            run_interrupted(scheduler, boundary)
            raised += boundary.raised
        readers.append(Reader(scheduler, 1, 0.7, 1, 12))
        run(scheduler)
        for reader in readers:
            reader.events = once(reader.events)
            assert reader.ended.error is None
            reader.check()
        scheduler.close()
        assert target.open_sessions == 0
    assert raised or (kind, name) in RARE


RARE = [(Handle, "restart"), (SessionPool, "renew")]  # calls that these requests do not make


def once(events):
    """An end may be reported twice after an interrupt."""
    ends = [event for event in events if isinstance(event, Ended)]
    return [event for event in events if not isinstance(event, Ended)] + ends[:1]


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_request_whose_report_is_interrupted_ends_and_others_go_on(after):
    for number in (1, 2, 4, 7):
        scheduler = Scheduler(backend("two classes"), planners("specexec", 3), budget=8)
        readers, reported = [], []

        def emit(event, reported=reported, readers=readers, number=number):
            reported.append(event)
            if after:
                readers[0].events.append(event)
            if len(reported) == number:
                raise KeyboardInterrupt
            if not after:
                readers[0].events.append(event)

        for prompt in (3, 1, 2):
            readers.append(Reader(scheduler, prompt, 0.7, prompt, 12))
        readers[0].handle.emit = emit
        with suppress(KeyboardInterrupt):
            run(scheduler)
        run(scheduler)
        scheduler.step()
        assert readers[0].handle.status is Status.DONE
        assert readers[0].handle.cancelled == (len(reported) >= number)
        for reader in readers[1:]:
            assert reader.ended.error is None
            reader.check()
        scheduler.close()


class Lossy(Recording):
    """Rounds otherwise in the second half of its passes, as an engine without row classes may."""

    def forward(self, batch):
        found = super().forward(batch)
        if len(self.passes) > 12:
            for logits in found:
                logits.rows = {node: -row for node, row in logits.rows.items()}
        return found


def test_a_request_that_begins_again_with_other_tokens_ends_with_an_error(monkeypatch):
    target = backend("any", sessions=1, kind=Lossy)
    scheduler = Scheduler(target, planners("none", 1), budget=4)
    reader = Reader(scheduler, 1, 0.7, 1, 40)
    while len(target.passes) < 13:
        scheduler.step()
    known = reader.tokens
    with monkeypatch.context() as patch:
        boundary = Boundary(patch, Generation, "accept", 1, after=True)
        run_interrupted(scheduler, boundary)
    assert boundary.raised == 1
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

    def test_without_a_thread_it_ends_its_request(self):
        scheduler, stats = Scheduler(backend(sessions=1), planners("none", 1), budget=4), GenerationStats()
        events = drive.events(scheduler, Request(PROMPTS[1], SamplingParams(), 20), stats)
        next(events)
        assert scheduler.active == 1
        events.close()
        assert (scheduler.active, scheduler.waiting) == (0, 0)
        assert stats.finish_reason == "interrupted"
        assert scheduler.counts.requests == {"interrupted": 1}
        scheduler.close()

    def test_ctrl_c_leaves_no_turn_taken(self, monkeypatch):
        scheduler = Scheduler(backend(sessions=1), planners("none", 1), budget=4)
        request = Request(PROMPTS[1], SamplingParams(), 12)
        for interrupted in ("step", "_admit"):
            with monkeypatch.context() as patch:
                patch.setattr(scheduler, interrupted, Mock(side_effect=KeyboardInterrupt))
                with pytest.raises(KeyboardInterrupt):
                    next(drive.events(scheduler, request))
            assert not scheduler.turn.locked()
        found = [event for event in drive.events(scheduler, request) if isinstance(event, Wrote)]
        assert [chunk.token_id for event in found for chunk in event.chunks] == alone(1, 0.0, 0, 12)
        assert scheduler.thread is None
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
        scheduler.step()
        assert (scheduler.active, scheduler.waiting) == (0, 0)
        request = Request(PROMPTS[1], SamplingParams(temperature=0.7, seed=1), 12)
        found = [event for event in drive.events(scheduler, request) if isinstance(event, Wrote)]
        assert [chunk.token_id for event in found for chunk in event.chunks] == alone(1, 0.7, 1, 12)
        scheduler.close()
