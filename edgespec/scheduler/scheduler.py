"""Many requests, one model: each pass of the target serves as many sequences as fit.

All passes of the target are made in one thread, which no signal reaches: Ctrl-C in a caller's thread cancels. Several
targets (`targets/`) decode without it.
"""

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock, Thread, current_thread
from time import sleep
from typing import Any, Generic, TypeVar
from weakref import ref

from edgespec.errors import Closed, ContextFull, Interrupted
from edgespec.loop.backend import Backend, Logits
from edgespec.loop.passes import UNTIMED, Pass, Ran, check_room, common_prefix, run
from edgespec.loop.planner import Planner
from edgespec.loop.stats import GenerationStats
from edgespec.machine.process import at_end, check_process, is_here
from edgespec.machine.system import stay_awake
from edgespec.planners.auto import AutoState
from edgespec.scheduler.batch import Batch, CurrentPass, account, choose, compose, learn, next_reader, read_draft
from edgespec.scheduler.counts import Counts
from edgespec.scheduler.events import Cancelled, Chunk, Event
from edgespec.scheduler.prompt_chunks import PromptChunks
from edgespec.scheduler.queue import Queue
from edgespec.scheduler.requests import Request
from edgespec.scheduler.sequence import Seq, State, never
from edgespec.scheduler.session_pool import SessionPool

Result = TypeVar("Result")


class Call(Generic[Result]):
    """Work on the sessions between two steps.

    Attributes:
        pool: the sessions.
        cancelled: nobody waits for the result.
        done: the result.
    """

    def __init__(self, work: "Callable[[Call[Result]], Result]", pool: SessionPool) -> None:
        self.pool, self.cancelled, self.done = pool, False, Future[Result]()
        self._work = work

    def answer(self) -> None:
        try:
            self.done.set_result(self._work(self))
        except Exception as error:
            self.done.set_exception(error)


class Scheduler:
    def __init__(
        self,
        target: Backend,
        planners: Sequence[Planner],
        *,
        budget: int,
        pace: AutoState | None = None,
    ) -> None:
        """
        Args:
            target: loaded for as many sessions as there are planners.
            planners: one for each sequence of a batch.
            budget: most draft tokens of a sequence in a pass.
            pace: times of the target's passes and accounts of batches, which it learns; None: trees fill each pass.
        """
        self.target = target
        self.counts = Counts()
        self.pool = SessionPool(target, planners)
        self.process = os.getpid()
        self._budget = budget
        self._pace = pace
        self._chunks, self._draft_chunks = PromptChunks(), PromptChunks()
        self._queue = Queue()
        self.pass_now = CurrentPass()
        self.thread: Thread | None = None
        self._calls, self._closing = deque[Call[Any]](), Lock()

    # For any thread.

    def submit(
        self,
        request: Request,
        emit: Callable[[Event], None],
        stats: GenerationStats | None = None,
        idle_limit: int | None = None,
        is_full: Callable[[], bool] = never,
    ) -> Seq:
        """
        Args:
            request: what is wanted.
            emit: receives every event, in the thread that makes passes; must be fast.
            stats: filled in as tokens come.
            idle_limit: None: a real request; else idle work, done while there is no other. The prompt is read, and at
                most this many tokens are generated (with 0 only the one that comes with the prompt). Other requests
                may end it, and `promote` makes it a real one.
            is_full: its reader is behind, so no step is made for it, unless others wait for a session; `wake` is called
                when this has changed.

        Raises:
            ContextFull: the prompt leaves no room for a token.
            UsageError: a stop string is empty.
            Closed: the model was closed.
            OtherProcess: another process made the scheduler.
        """
        check_process(self.process)
        check_room(self.target, len(request.prompt_ids))
        stats = GenerationStats() if stats is None else stats
        seq = Seq(request, emit, stats, self.target.vocab, self._on_cancel, idle_limit, is_full)
        self._queue.put(seq)
        return seq

    def promote(self, seq: Seq) -> bool:
        """Make idle work a real request.

        Returns:
            False: it was cancelled before.
        """
        check_process(self.process)
        with self._queue.changed:
            if not seq.cancelled:
                seq.idle_limit = None
            self.wake()
        return not seq.is_idle_work

    def _on_cancel(self) -> None:
        if is_here(self.process):  # else a lost thread may hold the lock
            self.pass_now.check()
            self.wake()

    def wake(self) -> None:
        self._queue.wake()

    def start(self) -> None:
        """Start the thread that makes steps, once.

        Raises:
            OtherProcess: another process made the scheduler.
            RuntimeError: the system refuses a thread.
        """
        check_process(self.process)
        with self._queue.changed:
            if self.thread is None and not self._queue.closed:
                thread = Thread(target=_make_steps, args=(ref(self), self._queue), name="edgespec passes", daemon=True)
                thread.start()
                self.thread = thread
                at_end(self, _stop, self._queue, self.pass_now, thread)  # no thread may be in an engine at exit
                self.wake()

    def close(self) -> None:
        """End all requests and the pass under way, and free sessions and planners; safe to call twice."""
        if not is_here(self.process):
            return
        self._queue.close()  # from now on `start` makes no thread: one that it has just made is waited for
        _stop(self._queue, self.pass_now, self.thread)
        with self._closing:
            self._end_all(Closed())
            self.pool.close()

    def call(self, work: "Callable[[Call[Result]], Result]") -> Result:
        """Do work on the sessions between two steps, in the scheduler's thread.

        Returns:
            What `work` returns.

        Raises:
            Closed: the scheduler was closed.
            Exception: what `work` raises.
        """
        self.start()
        call = Call(work, self.pool)
        with self._queue.changed:
            self.check_open()
            self._calls.append(call)
            self.wake()
        try:
            return call.done.result()
        except BaseException:
            call.cancelled = True  # the caller may be gone: Ctrl-C
            self.pass_now.check()
            raise

    def check_open(self) -> None:
        check_process(self.process)
        if self._queue.closed:
            raise Closed

    def save(self, path: str | Path, note: Any = None) -> None:
        self.call(lambda call: call.pool.save_latest(path, note))

    def load(self, path: str | Path) -> Any:
        return self.call(lambda call: call.pool.load(path))

    def forget(self) -> None:
        """Empty idle sessions, so that the next prompts are prefilled in full.

        Raises:
            Closed: the scheduler was closed.
        """
        self.call(lambda call: call.pool.empty_idle())

    @property
    def waiting(self) -> int:
        return self._queue.waiting

    @property
    def active(self) -> int:
        return self.pool.active

    @property
    def kept_tokens(self) -> int:
        return self.pool.tokens

    # For the thread that makes steps.

    def _work_off(self) -> None:
        """Make steps while there is work, and save idle sessions then."""
        try:
            while self._has_work() and not self._queue.closed:
                stay_awake()
                self.step()
                sleep(0)  # readers take what it told them before the next pass keeps them waiting
                while self._calls:
                    self._calls.popleft().answer()
            while not (self._queue.closed or self._calls or self._queue.waiting or self.pool.active):
                if not self.pool.save_one():
                    break
        except Exception as error:
            self._end_all(error)
            self.wake()

    def _has_work(self) -> bool:
        queued = self._queue.waiting or self._queue.cancelled_or_ended() or (len(self._queue) and not self.pool.active)
        return bool(self._calls or queued or self._seqs())

    def _seqs(self) -> list[Seq]:
        """Those with work, whose readers are not behind; a reader may ask for another text before it reads on."""
        found = self.pool.with_work
        return found if self._queue.waiting else [seq for seq in found if not seq.is_held]

    def step(self) -> None:
        """At most one pass of the target, for as many sequences as fit."""
        self._settle()  # cancelled sequences end, lost sessions are replaced, cells are freed
        self._admit()  # a waiting sequence gets a slot
        self._read_draft()  # the draft reads a chunk of one text
        batch = self._compose()  # planners propose trees, which may take draft passes
        logits, ran = self._run(batch)
        gained = sum(self._accept(*part, one, ran) for part, one in zip(batch.parts, logits, strict=False))
        if logits and self._pace:
            account(batch, ran, gained, self._pace)

    def _settle(self) -> None:
        self.pool.mend()
        for seq in self.pool.stranded:
            slot = seq.slot
            self._wait_again(seq)
            if slot:
                self.pool.renew(slot)
        for seq in self._queue.cancelled_or_ended():
            self._finish(seq, Cancelled("cancelled"))
            self._queue.remove(seq)
        for seq in self.pool.seqs.copy():
            if seq.has_ended:
                self._end(seq, None)
            elif seq.cancelled:
                self._end(seq, Cancelled("cancelled"))
        while self.pool.is_overfull:
            self._give_way(self.pool.seqs, None)

    def _wait_again(self, seq: Seq) -> None:
        self.pool.release(seq)
        self._queue.put_back(seq)

    def _admit(self) -> None:
        waiting = self._queue.in_order()
        if not waiting:
            return
        if not self.pool.has_planner:
            self._end_idle_work()
        reading = [
            (seq.request.sender, seq.generation.token_ids)
            for seq in self.pool.with_work if seq.generation and seq.state is State.READING
        ]  # fmt: skip
        for seq in waiting if self.pool.has_planner else ():
            prompt, sender = seq.request.prompt_ids, seq.request.sender
            while not self.pool.has_room(seq):
                if (seq.is_idle_work and self.active) or not self._end_idle_work():
                    return
            soon = max((common_prefix(other, prompt) for whose, other in reading if whose == sender), default=0)
            if soon <= self.pool.most_held(prompt, sender):
                self._begin(seq)
                return
            # else another sequence is reading a shared prefix: this one starts from there, a little later

    def _end_idle_work(self) -> bool:
        with self._queue.changed:
            seq = next((one for one in self.pool.seqs if one.is_idle_work), None)
            if seq:
                seq.cancelled = True  # no pass is under way that `cancel` could interrupt
        if seq:
            self._end(seq, Cancelled("it gave way to another"))
        return seq is not None

    def _begin(self, seq: Seq) -> None:
        self.pool.assign(seq)
        seq.state = State.READING
        self._queue.remove(seq)
        with self._failing([seq]):
            self.counts.add_tokens(seq, self.pool.begin(seq, self._budget))
        if seq.has_ended:
            self._end(seq, None)

    def _read_draft(self) -> None:
        seqs = self._seqs()
        if seq := next_reader([one for one in seqs if one.draft_prompt]):
            with self._failing([seq]), suppress(Interrupted):
                read_draft(seq, seqs, self._draft_chunks, self.pass_now)

    def _compose(self) -> Batch:
        limits = self.target.capabilities
        writing, reader = choose(self._seqs(), limits, must_write=self._chunks.must_write)
        batch = compose(writing, reader, self.pool.seqs, limits, self._pace, self._chunks)
        for seq, error in batch.failed:
            with self._failing([seq]):
                raise error
        return batch

    def _run(self, batch: Batch) -> tuple[list[Logits], Ran]:
        """
        Returns:
            The logits of one pass; []: it could not be made, and the next step tries another.
        """
        seqs = batch.seqs
        with self._failing(seqs), suppress(Interrupted):
            try:
                if seqs:
                    with self.pass_now.of(seqs, self.target), batch.during():
                        logits, ran = run(self.target, works := [pass_.work for _, pass_ in batch.parts])
                    learn(batch, ran, self.target.capabilities, self._pace, self._chunks)
                    self.counts.add_pass(ran, works, [seq.request.counter for seq in seqs])
                    self.pool.count_pass(seqs)
                    return logits, ran
            except ContextFull as error:
                self._make_room(batch, error)
        for seq in seqs:
            with self._failing([seq]):
                seq.give_up()
        return [], UNTIMED

    def _make_room(self, batch: Batch, error: ContextFull) -> None:
        *_, (seq, pass_) = batch.parts
        if seq.generation and seq.slot and pass_.work.prompt and seq.generation.prompt.may_begin_again():
            self.pool.empty(seq.slot)
            seq.stats.cached_tokens = 0
        else:
            self._give_way(batch.seqs, error)

    def _give_way(self, seqs: Sequence[Seq], error: ContextFull | None) -> None:
        """Free cells: evict an idle session, else end idle work, else take the slot of the youngest sequence.

        Its reader gets the end, or it waits again.

        Args:
            seqs: those that may be ended.
            error: ends a sequence that has no tokens yet; None: it waits again.
        """
        if self.pool.evict_oldest() or self._end_idle_work():
            return
        seq = max(seqs, key=lambda seq: seq.age)
        if seq.stats.tokens and not seq.repeats:
            seq.cut_short()
            self._end(seq, None)
        elif error:
            self._end(seq, error)
        else:
            self._wait_again(seq)

    def _accept(self, seq: Seq, pass_: Pass, logits: Logits, ran: Ran) -> int:
        """
        Returns:
            Number of tokens that the reader has now.
        """
        chunks = list[Chunk]()
        with self._failing([seq]):
            chunks = seq.accept(pass_, logits, ran)
            self.counts.add_tokens(seq, chunks)
        if seq.has_ended:
            self._end(seq, None)
        return len(chunks)

    def _end(self, seq: Seq, error: Exception | None) -> None:
        self._finish(seq, error)
        self.pool.release(seq)

    @contextmanager
    def _failing(self, seqs: Sequence[Seq]) -> Iterator[None]:
        """End these sequences after an error within, and open new sessions: the old ones are in an unknown state."""
        slots = [seq.slot for seq in seqs]
        try:
            yield
        except Exception as error:
            for seq, slot in zip(seqs, slots, strict=True):
                if seq.slot:
                    self._end(seq, error)
                if slot:
                    self.pool.renew(slot)

    def _end_all(self, error: Exception) -> None:
        for call in [*self._calls]:
            call.done.set_exception(error)
        self._calls.clear()
        for seq in self.pool.seqs.copy():
            self._end(seq, error)
        for seq in dict.fromkeys(self._queue.cancelled_or_ended() + self._queue.in_order()):
            self._queue.remove(seq)
            self._finish(seq, error)

    def _finish(self, seq: Seq, error: Exception | None) -> None:
        if seq.ended:
            return
        if error is not None:
            with self._queue.changed:
                if seq.is_idle_work:
                    seq.cancelled = True  # `promote`, in another thread, must not make ended work a real request
        seq.end(error)
        self.counts.add_end(seq)  # first: a reader may ask for the counts
        seq.tell_end()


def _make_steps(scheduler: "ref[Scheduler]", queue: Queue) -> None:
    """The scheduler's thread, which ends when nobody has the scheduler any more."""
    while queue.wait():
        if found := scheduler():
            found._work_off()
        del found


def _stop(queue: Queue, pass_now: CurrentPass, thread: Thread | None) -> None:
    queue.close()
    pass_now.close()
    if thread and thread is not current_thread():
        thread.join()
