"""Many requests, one model: each pass of the target serves as many sequences as fit.

All passes are made in one thread of the scheduler, which no signal reaches: Ctrl-C in a caller's thread cancels.
"""

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock, Thread, current_thread
from time import perf_counter
from typing import Any, Generic, TypeVar
from weakref import ref

from edgespec.errors import Closed, ContextFull, Interrupted
from edgespec.loop.backend import Backend, Logits
from edgespec.loop.passes import Pass, check_room, common_prefix
from edgespec.loop.planner import Planner
from edgespec.loop.stats import GenerationStats
from edgespec.machine.process import at_end, check_process, is_here
from edgespec.planners.auto import AutoState
from edgespec.scheduler.batch import Batch, account, choose, learn, plan, read_draft, while_target_runs
from edgespec.scheduler.prompt_chunks import PromptChunks
from edgespec.scheduler.queue import Queue
from edgespec.scheduler.requests import Cancelled, Counts, CurrentPass, Event, Handle, Request, never
from edgespec.scheduler.session_pool import Lane, SessionPool

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
    ) -> Handle:
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
        handle = Handle(request, emit, stats, self.target.vocab, self._on_cancel, idle_limit, is_full)
        self._queue.put(handle)
        return handle

    def promote(self, handle: Handle) -> bool:
        """Make idle work a real request.

        Returns:
            False: it was cancelled before.
        """
        check_process(self.process)
        with self._queue.changed:
            if not handle.cancelled:
                handle.promote()
            self.wake()
        return not handle.is_idle_work

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
                self.step()
                while self._calls:
                    self._calls.popleft().answer()
            self._save_idle()
        except Exception as error:
            self._end_all(error)
            self.wake()

    def _save_idle(self) -> None:
        while not (self._queue.closed or self._calls or self._queue.waiting or self.pool.active):
            if not self.pool.save_one():
                return

    def _has_work(self) -> bool:
        queued = self._queue.waiting or self._queue.cancelled_or_ended() or (len(self._queue) and not self.pool.active)
        return bool(self._calls or queued or self._lanes())

    def _lanes(self) -> list[Lane]:
        """Those with work, whose readers are not behind; a reader may ask for another text before it reads on."""
        found = self.pool.with_work
        return found if self._queue.waiting else [lane for lane in found if not lane.is_held]

    def step(self) -> None:
        if self._queue.closed:
            return
        self.pool.mend()
        self._put_back_stranded()
        self._end_cancelled()
        while self.pool.is_overfull:
            self._give_way(self.pool.busy, None)
        self._admit()
        self._read_draft()
        self._pass(*choose(self._lanes(), self.target.capabilities, read_last=self._chunks.read_last))

    def _put_back_stranded(self) -> None:
        for lane in self.pool.stranded:
            assert lane.handle
            self._queue.put_back(lane.handle)
            self.pool.renew(lane)

    def _end_cancelled(self) -> None:
        for handle in self._queue.cancelled_or_ended():
            self._finish(handle, Cancelled("cancelled"))
            self._queue.remove(handle)
        for lane in self.pool.busy:
            if lane.has_ended:
                self._end(lane, None)
            elif lane.handle and lane.handle.cancelled:
                self._end(lane, Cancelled("cancelled"))

    def _admit(self) -> None:
        waiting = self._queue.in_order()
        if waiting and not self.pool.idle:
            self._end_idle_work()
        reading = [
            (lane.sender, lane.generation.token_ids)
            for lane in self.pool.with_work if lane.generation and lane.unread
        ]  # fmt: skip
        for handle in waiting if self.pool.idle else ():
            prompt, sender = handle.request.prompt_ids, handle.request.sender
            while not self.pool.has_room(handle):
                if (handle.is_idle_work and self.active) or not self._end_idle_work():
                    return
            soon = max((common_prefix(other, prompt) for whose, other in reading if whose == sender), default=0)
            if soon <= self.pool.most_held(prompt, sender):
                self._begin(handle)
                return
            # else another request is prefilling a shared prefix: this one starts from there, a little later

    def _end_idle_work(self) -> bool:
        with self._queue.changed:
            lane = next((one for one in self.pool.busy if one.handle and one.handle.is_idle_work), None)
            if lane and lane.handle:
                lane.handle.cancelled = True  # no pass is under way that `cancel` could interrupt
        if lane:
            self._end(lane, Cancelled("it gave way to another"))
        return lane is not None

    def _begin(self, handle: Handle) -> None:
        lane = self.pool.assign(handle)
        with self._queue.changed:
            handle.begin()
        self._queue.remove(handle)
        with self._failing([lane]):
            self.counts.add_tokens(handle, self.pool.begin(lane, self._budget))
        if lane.has_ended:
            self._end(lane, None)

    def _read_draft(self) -> None:
        """Have the draft read one chunk for the oldest request that needs it."""
        lanes = self._lanes()
        if lane := min((one for one in lanes if one.draft_prompt), key=lambda one: one.used, default=None):
            with self._failing([lane]), suppress(Interrupted):
                read_draft(lane, self._draft_chunks, self.pass_now, single=len(lanes) == 1)

    def _pass(self, writing: list[Lane], reader: Lane | None) -> None:
        limits, began = self.target.capabilities, perf_counter()
        batch, failed = plan(writing, reader, self.pool.lanes, limits, self._pace, self._chunks)
        for lane, error in failed:
            with self._failing([lane]):
                raise error
        started = perf_counter()
        logits = self._forward(batch) if batch else []
        if logits:
            seconds = perf_counter() - started
            learn(batch, seconds, limits, self._pace, self._chunks)
            self.counts.add_pass(seconds, [pass_.work for _, pass_ in batch])
            self.pool.count_pass([lane for lane, _ in batch])
            for counter in {lane.handle.request.counter for lane, _ in batch if lane.handle}:
                if counter:
                    counter.add(seconds)
            tokens = self.counts.decoded
        for (lane, pass_), found in zip(batch, logits, strict=False):
            self._accept(lane, pass_, found, single=len(batch) == 1)
        if logits and self._pace:
            account(batch, started - began, seconds, self.counts.decoded - tokens, self._pace)

    def _forward(self, batch: Batch) -> list[Logits]:
        """
        Returns:
            The logits of one pass; []: it could not be made, and the next step tries another.
        """
        lanes = [lane for lane, _ in batch]
        handles = [lane.handle for lane in lanes if lane.handle]
        with self._failing(lanes), suppress(Interrupted):
            try:
                with self.pass_now.of(handles, self.target), while_target_runs(batch):
                    return self.target.forward([pass_.work for _, pass_ in batch])
            except ContextFull as error:
                self._make_room(batch, error)
        for lane in lanes:
            with self._failing([lane]):
                lane.give_up()
        return []

    def _make_room(self, batch: Batch, error: ContextFull) -> None:
        *_, (lane, pass_) = batch
        if lane.generation and pass_.work.prompt and lane.generation.prompt.may_begin_again():
            self.pool.empty(lane)
            lane.generation.stats.cached_tokens = 0
        else:
            self._give_way([lane for lane, _ in batch], error)

    def _give_way(self, lanes: Sequence[Lane], error: ContextFull | None) -> None:
        """Free cells: evict an idle session, else end idle work, else take the session of the youngest request.

        That request ends, or waits again.

        Args:
            lanes: those whose requests may be ended.
            error: ends a request that has no tokens yet; None: it waits again.
        """
        if self.pool.evict_oldest() or self._end_idle_work():
            return
        lane = max(lanes, key=lambda lane: lane.used)
        assert lane.handle
        if lane.handle.stats.tokens and not lane.handle.repeats:
            lane.handle.cut_short()
            self._end(lane, None)
        elif error:
            self._end(lane, error)
        else:
            self._queue.put_back(lane.handle)
            self.pool.release(lane)

    def _accept(self, lane: Lane, pass_: Pass, logits: Logits, *, single: bool) -> None:
        with self._failing([lane]):
            assert lane.handle
            self.counts.add_tokens(lane.handle, lane.accept(pass_, logits, single=single))
        if lane.has_ended:
            self._end(lane, None)

    def _end(self, lane: Lane, error: Exception | None) -> None:
        if lane.handle:
            self._finish(lane.handle, error)
        self.pool.release(lane)

    @contextmanager
    def _failing(self, lanes: Sequence[Lane]) -> Iterator[None]:
        """End these requests after an error within, and open new sessions: the old ones are in an unknown state."""
        try:
            yield
        except Exception as error:
            for lane in lanes:
                self._end(lane, error)
                self.pool.renew(lane)

    def _end_all(self, error: Exception) -> None:
        for call in [*self._calls]:
            call.done.set_exception(error)
        self._calls.clear()
        for lane in self.pool.busy:
            self._end(lane, error)
        for handle in dict.fromkeys(self._queue.cancelled_or_ended() + self._queue.in_order()):
            self._queue.remove(handle)
            self._finish(handle, error)

    def _finish(self, handle: Handle, error: Exception | None) -> None:
        if not handle.ended:
            if error is not None:
                with self._queue.changed:
                    if handle.is_idle_work:
                        handle.cancelled = True  # `promote`, in another thread, must not make ended work a real request
            handle.end(error)
            self.counts.add_end(handle)  # first: a reader of the end may ask for the counts
        handle.tell_end()


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
