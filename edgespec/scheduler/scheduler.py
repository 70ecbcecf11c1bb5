"""Many texts, one model: each pass of the target serves all of them.

A round:
    1. requests come in, those that were cancelled leave, and one that waits gets a slot: a session and a planner
    2. every text that is being written plans a tree, as if alone; the pass's rows go to the best nodes of all trees
    3. prompts are read in the same pass, where the engine can do so without changing a bit, else in passes by turns
    4. one `Backend.forward`; each text walks its tree, keeps what the target says, and tells its reader

Texts do not depend on company: noise belongs to the position, and passes are kept in shapes that agree to the bit
(`exact.py`), or are equal but for rounding. A slot keeps its text when it is idle, and a prompt that begins alike
starts from there: exact token prefixes only.

Whoever waits for a text makes the passes, so a program with one thread needs no other. As soon as two threads want
passes at once, or `start` is called, a thread of its own makes them all.
"""

import atexit
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import fmean
from threading import Condition, Lock, Thread
from time import perf_counter
from typing import Any

import edgespec.scheduler.session_pool as slots
from edgespec.errors import Closed, ContextFull, Interrupted
from edgespec.loop.backend import Backend, Logits
from edgespec.loop.generate import Generation
from edgespec.loop.pass_times import PassTimes
from edgespec.loop.passes import Pass, check_room, common_prefix, may_read_anew
from edgespec.loop.planner import Planner
from edgespec.loop.stats import GenerationStats
from edgespec.loop.text import TextStream
from edgespec.scheduler.batch import Batch, plan, prompts_ride_along, while_target_runs
from edgespec.scheduler.disk_cache import Shelf
from edgespec.scheduler.prompt_chunks import PromptPieces
from edgespec.scheduler.queue import Order, asked, by_turn, held, wanted
from edgespec.scheduler.requests import (
    Cancelled,
    Counts,
    Ended,
    Event,
    Foresaw,
    Job,
    Passing,
    Reading,
    Request,
    Wrote,
    chunks_of,
)
from edgespec.scheduler.session_pool import Slot

MOST_AGAIN = 3  # times that a prompt is read once more
AHEAD = 0.5  # of a pass's time, spent on looking ahead where a request wants it
MOST_AHEAD = 128  # tokens


class Scheduler:
    """See the module."""

    def __init__(
        self,
        target: Backend,
        planners: Sequence[Planner],
        *,
        budget: int,
        cost: PassTimes | None = None,
        order: Order | None = None,
    ) -> None:
        """
        Args:
            target: loaded for as many sessions as there are planners.
            planners: one for each text that may be written at once.
            budget: most guesses of a text in a pass.
            cost: of the target's passes, which it learns on; None: the trees take all the room that a pass has.
            order: of requests that wait, the one with the smallest value is served first; default: as they came. A
                value must fall while its request waits, or a request may wait for ever.
        """
        self.target = target
        self.counts = Counts()
        self._budget = budget
        self._cost = cost
        self._pieces = PromptPieces()
        self._order = order
        self._slots = [Slot(target.open(), planner) for planner in planners]
        self.shelf: Shelf | None = None  # where texts are kept that sessions lose, and at the end
        self._inbox: deque[Job] = deque()
        self._waiting: list[Job] = []
        self.turn = Lock()  # held by whoever calls `step`
        self._wake = Condition()
        self.thread: Thread | None = None  # that makes passes; None: those do who want texts (`asking.py`)
        self._passing = Passing(target.interrupt)
        self._closing = False
        self._served = 0
        self._read_last = False  # the last pass read a prompt

    # What any thread may call.

    def submit(
        self,
        request: Request,
        emit: Callable[[Event], None],
        stats: GenerationStats | None = None,
        hold: int | None = None,
    ) -> Job:
        """Ask for a text.

        Args:
            request: what is wanted.
            emit: told of every event, in whatever thread makes passes; must be quick.
            stats: filled in as the text grows.
            hold: only prepare so many of its tokens, while nothing else is to do, until `go_on`; gives way to others.

        Raises:
            ContextFull: the prompt leaves no room for a token.
            UsageError: a stop string is empty.
            Closed: the model was closed.
        """
        check_room(self.target, len(request.prompt_ids))
        text = TextStream(self.target.vocab, request.stop, request.shown)
        job = Job(request, emit, stats if stats is not None else GenerationStats(), text)
        job.when_cancelled = self._was_cancelled
        job.hold = hold
        with self._wake:
            if self._closing:
                raise Closed()
            self._inbox.append(job)
            self._wake.notify()
        return job

    def go_on(self, job: Job) -> bool:
        """What was held is wanted now. False: it had to give way to another."""
        with self._wake:
            if not job.cancelled:
                job.hold = None
            self._wake.notify()
        return job.hold is None

    def _was_cancelled(self) -> None:
        self._passing.look()
        with self._wake:  # what is only prepared may be all there is
            self._wake.notify()

    def start(self) -> None:
        """From now on a thread makes the passes."""
        with self._wake:
            if self.thread is None and not self._closing:
                self.thread = Thread(target=self._run, name="edgespec passes", daemon=True)
                self.thread.start()
                atexit.register(self.close)  # nothing may be in an engine while the program ends

    def close(self) -> None:
        """End all texts and the pass that is being made, and free sessions and planners. Safe to call twice."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._passing.close()
        if self.thread:
            self.thread.join()
            atexit.unregister(self.close)
        with self.turn:
            self._end_all(Closed())
            while self.shelf and slots.save_one(self._slots, self.shelf):
                pass
            for slot in self._slots:
                slot.planner.close()
                slot.session.close()
            self._slots.clear()

    @contextmanager
    def _open(self) -> Iterator[None]:
        """Within, no pass is made and the sessions stay open. Raises Closed."""
        with self.turn:
            if self._closing:
                raise Closed
            yield

    def save(self, path: str | Path, note: Any = None) -> None:
        """Save the text that was used last, and a note, unless the file has them. Raises SessionFileError, Closed."""
        with self._open():
            slots.save_latest(self._slots, path, note)

    def load(self, path: str | Path) -> Any:
        """Have an idle session start from what was saved; the note. Raises SessionFileError, ContextFull, Closed."""
        with self._open():
            return slots.load(self._slots, path)

    def forget(self) -> None:
        """Idle sessions and drafts drop their texts: the next prompts are read from their beginning. Raises Closed."""
        with self._open():
            for slot in self._slots:
                if slot.job is None:
                    slots.empty(slot, self._slots)
                    slot.planner.begin([0])

    @property
    def waiting(self) -> int:
        """Requests that have no slot yet, but for what is only prepared and for who has left."""
        return sum(job.hold is None and not job.cancelled for job in [*self._inbox, *self._waiting])

    @property
    def active(self) -> int:
        """Texts that are being read or written, but for what is only prepared."""
        return len(asked(self._slots))

    @property
    def kept_tokens(self) -> int:
        """Tokens in the target's cache."""
        return sum(len(slot.session.token_ids) for slot in self._slots)

    # What only the thread that has the turn calls.

    def _run(self) -> None:
        while True:
            try:
                while self.shelf and not (self._closing or self.waiting or self.active):
                    with self.turn:
                        if not slots.save_one(self._slots, self.shelf):
                            break
                with self._wake:
                    self._wake.wait_for(lambda: self._closing or self._inbox or self._waiting or wanted(self._slots))
                    if self._closing:
                        return
                with self.turn:
                    self.step()
            except Exception as error:  # nobody else would tell those who wait
                with self.turn:
                    self._end_all(error)

    def step(self) -> None:
        """One round, if there is anything to do."""
        self._waiting.extend(self._inbox.popleft() for _ in range(len(self._inbox)))
        for job in [job for job in self._waiting if job.cancelled]:
            self._waiting.remove(job)
            self._finish(job, Cancelled("cancelled"))
        for slot in self._slots:
            if slot.job and slot.job.cancelled:
                self._end(slot, Cancelled("cancelled"))
        while slots.is_overfull(self.target.capabilities, self._slots):
            self._give_way([slot for slot in self._slots if slot.job], None)
        self._admit()
        active = sorted(wanted(self._slots), key=lambda slot: slot.used)
        reading = [slot for slot in active if slot.generation and slot.generation.unread]
        writing = [slot for slot in active if slot not in reading]
        together = prompts_ride_along(self.target.capabilities)
        if reading and (together or not writing or not self._read_last):
            self._pass(writing if together else [], reading[0])
        elif writing:
            self._pass(writing, None)
        for slot in writing:
            self._foresee(slot)

    def _foresee(self, slot: Slot) -> None:
        """Look ahead for who wants to know, for a part of the time that a pass takes."""
        if not (slot.job and slot.generation and slot.job.request.foresee):
            return
        try:
            if slot.generation.foresee(AHEAD * self._pieces.tree_seconds, MOST_AHEAD):
                self._tell(slot.job, Foresaw(slot.generation.foreseen.copy(), slot.job.request.shown))
        except Exception as error:  # this text's alone
            self._fail(slot, error)

    def _admit(self) -> None:
        """Give the first of the waiting that need not wait longer a slot."""
        if self._waiting and all(slot.job for slot in self._slots):
            self._call_off_held()
        idle = [slot for slot in self._slots if slot.job is None]
        reading = [slot.generation for slot in wanted(self._slots) if slot.generation and slot.generation.unread]
        for job in by_turn(self._waiting, self._order) if idle else ():
            prompt = job.request.prompt_ids
            shared = slots.most_shared(self._slots, prompt)
            coming = max((common_prefix(other.token_ids, prompt) for other in reading), default=0)
            on_disk = self.shelf.best(prompt)[1] if self.shelf else 0
            while not slots.has_room(self.target.capabilities, self._slots, job.request):
                if (job.hold is not None and self.active) or not self._call_off_held():
                    return
            if coming <= max(shared, on_disk):
                self._waiting.remove(job)
                self._begin(job, slots.slot_for(self.target.capabilities, prompt, self._slots))
                return
            # else another is just reading what this begins with: it starts from there, a little later

    def _call_off_held(self) -> bool:
        """One text that is only prepared gives way; False: there is none."""
        with self._wake:  # nobody asks for it meanwhile
            if (slot := held(self._slots)) and slot.job:
                slot.job.cancel()
        if slot:
            self._end(slot, Cancelled("it gave way to another"))
        return slot is not None

    def _begin(self, job: Job, slot: Slot) -> None:
        request, prompt, self._served = job.request, job.request.prompt_ids, self._served + 1
        slot.job, slot.used, slot.again, slot.looked_at = job, self._served, 0, False
        try:
            slots.prepare(self.target.capabilities, slot, prompt, self._slots, self.shelf)
            slot.generation = Generation(
                self.target, slot.session, slot.planner, prompt, request.sampling,
                max_tokens=request.max_tokens, budget=0 if request.plain else self._budget, stats=job.stats,
                log_probs=request.log_probs, grammar=request.grammar.start() if request.grammar else None,
                hint_texts=request.hint_texts,
            )  # fmt: skip
            slot.generation.begin()
            slot.forked = min(slot.forked, len(slot.session.token_ids))
            slots.make_room(self.target.capabilities, self._slots, self.shelf)
        except Exception as error:  # this text's alone
            self._end(slot, error)
            return
        self.counts.prompt_tokens += len(prompt)
        self.counts.cached_tokens += job.stats.cached_tokens
        self._tell(job, Reading(len(slot.session.token_ids), len(prompt) - 1))

    def _pass(self, writing: list[Slot], reader: Slot | None) -> None:
        """One forward for texts that are written, as many as it has room for, and for the next part of a prompt."""
        try:
            batch, failed = plan(writing, reader, self._slots, self.target.capabilities, self._cost, self._pieces)
            for slot, error in failed:  # that text's alone
                self._end(slot, error)
            started = perf_counter()
            logits = self._forward(batch) if batch else []
            if logits:  # else it was refused, or ended before its time
                self._learn(batch, perf_counter() - started)
            for (slot, pass_), found in zip(batch, logits, strict=False):
                if pass_.work.prompt:
                    self._was_read(slot, pass_)
                else:
                    self._took(slot, pass_, found, alone=len(batch) == 1)
        except BaseException:  # Ctrl-C in a thread that makes its own passes: nodes must not stay
            for slot in self._slots:
                slot.session.rewind(len(slot.session.token_ids))
            raise

    def _forward(self, batch: Batch) -> list[Logits]:
        """One pass; empty if it could not be made, and another is to be tried."""
        try:
            with self._passing.of([slot.job for slot, _ in batch if slot.job]), while_target_runs(batch):
                return self.target.forward([pass_.work for _, pass_ in batch])
        except ContextFull as error:
            self._make_room(batch, error)
        except Interrupted:
            pass
        except Exception as error:  # nobody knows what is left of their texts in the cache
            for slot, _ in batch:
                self._fail(slot, error)
        for slot, _ in batch:
            if slot.generation:
                slot.generation.give_up()
        return []

    def _make_room(self, batch: Batch, error: ContextFull) -> None:
        """The cache is full, or has to be put in order."""
        *_, (slot, pass_) = batch
        limits = self.target.capabilities
        prompt = slot.job.request.prompt_ids if slot.job and pass_.work.prompt else []
        if prompt and slot.again < MOST_AGAIN and may_read_anew(limits, slot.session, prompt):
            slots.empty(slot, self._slots)
            slot.again += 1
        else:
            self._give_way([slot for slot, _ in batch], error)

    def _give_way(self, active: list[Slot], error: ContextFull | None) -> None:
        """Forget a text that nobody writes, else end the youngest, or have it wait if nothing is written of it."""
        if idle := slots.oldest_idle(self._slots):
            slots.forget(idle, self._slots, self.shelf)
        if idle or self._call_off_held():
            return
        slot = max(active, key=lambda slot: slot.used)
        job = slot.job
        assert job
        if job.stats.tokens:
            job.cut_short()
            self._end(slot, None)
        elif error:
            self._end(slot, error)
        else:
            slot.job = slot.generation = None
            self._waiting.insert(0, job)

    def _learn(self, batch: Batch, seconds: float) -> None:
        works = [pass_.work for _, pass_ in batch]
        nodes, trees = sum(len(work.token_ids) for work in works), [work for work in works if not work.prompt]
        self.counts.add_pass(seconds, len(batch), sum(len(work.token_ids) - 1 for work in trees))
        self._read_last = len(trees) < len(batch)
        for number, (slot, _) in enumerate(batch):
            slot.passed = self.counts.passes + number
        self._pieces.add(nodes, seconds, prompt=self._read_last)
        if self._read_last:
            return
        # Planners learn of passes over trees alone. Paths of other lengths are calls of their own: rows tell no cost.
        if self._cost and len(batch) > 1 and not self.target.capabilities.paths:
            self._cost.add(nodes, seconds, round(fmean(len(work.session.token_ids) for work in trees)))

    def _was_read(self, slot: Slot, pass_: Pass) -> None:
        assert slot.generation
        assert slot.job
        slot.generation.accept_prompt(pass_)
        self._tell(slot.job, Reading(len(slot.session.token_ids), len(slot.job.request.prompt_ids) - 1))

    def _took(self, slot: Slot, pass_: Pass, logits: Logits, alone: bool) -> None:
        """Keep what the target says of a tree, and tell the reader."""
        job = slot.job
        assert slot.generation
        assert job
        try:
            step = slot.generation.accept(pass_, logits, alone=alone)
            chunks = chunks_of(step, job.text, job.stats)
        except Exception as error:  # this text's alone
            self._fail(slot, error)
            return
        for chunk in chunks:
            self.counts.tokens[chunk.source.name.lower()] += 1
        self._tell(job, Wrote(chunks, step))
        if step.finished or job.text.stopped:
            self._end(slot, None)

    def _end(self, slot: Slot, error: Exception | None) -> None:
        """The slot is idle; its text stays."""
        if slot.generation:
            with suppress(Exception):  # the planner may be what has failed; else its draft keeps no guesses
                slot.generation.give_up()
        job, slot.job, slot.generation = slot.job, None, None
        if job:
            self._finish(job, error)

    def _fail(self, slot: Slot, error: Exception) -> None:
        """The same, and nobody knows what is left of its text."""
        self._end(slot, error)
        slots.empty(slot, self._slots)

    def _end_all(self, error: Exception) -> None:
        for slot in self._slots:
            if slot.job:
                self._end(slot, error)
        with self._wake:  # who comes now is not lost
            jobs = [*self._inbox, *self._waiting]
            self._inbox.clear()
            self._waiting.clear()
        for job in jobs:
            self._finish(job, error)

    def _finish(self, job: Job, error: Exception | None) -> None:
        if error is not None:
            with self._wake:
                if job.hold is not None:
                    job.cancel()  # nobody shall ask for it now
            job.stats.finish_reason = "interrupted"
        if job.hold is None:
            reason = "failed" if error and not isinstance(error, Cancelled) else job.stats.finish_reason
            self.counts.requests[reason] = self.counts.requests.get(reason, 0) + 1
        self._tell(job, Ended(error, job.rest))

    def _tell(self, job: Job, event: Event) -> None:
        try:
            job.emit(event)
        except Exception:  # its reader is gone
            job.cancel()
