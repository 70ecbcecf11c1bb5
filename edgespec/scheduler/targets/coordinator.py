"""Algorithm 1 of "Distributed Speculative Inference" (arXiv 2405.14105), with one draft.

After each `lookahead` draft tokens, a free copy of the target verifies all draft tokens since the last accepted one, so
each answer contains all earlier ones. All state belongs to the thread of the request; other threads only queue events.
"""

import math
import os
import threading
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import count
from queue import Empty, SimpleQueue
from statistics import median
from time import perf_counter

import numpy as np

from edgespec.errors import Closed, EdgespecError, UsageError
from edgespec.loop.backend import Vocab
from edgespec.loop.generate import until_stop
from edgespec.loop.sampling import SamplingParams
from edgespec.loop.stats import GenerationStats
from edgespec.loop.step import Step
from edgespec.loop.tree import Source, chain_of
from edgespec.machine.process import check_process, is_here
from edgespec.machine.system import stay_awake
from edgespec.scheduler.events import Event, Reading
from edgespec.scheduler.requests import Request
from edgespec.scheduler.sequence import Seq, never
from edgespec.scheduler.targets.places import Place
from edgespec.scheduler.targets.proposer import DraftProposer
from edgespec.scheduler.targets.verifier import Described, Spec, Task, verify

MOST_DRAFT_TOKENS = 64
LONG_PROMPT = 64  # tokens; longer prompts are prefilled by all copies at once
REMEMBERED = 16  # last pass times of target and draft that count
PATIENCE = 3  # pass times after which another copy gets the task, too
LEAST_PATIENCE = 0.2  # seconds

Answer = tuple[Task, list[int]] | None


@dataclass(slots=True)
class Running:
    place: Place
    task: Task
    started: float
    measures: bool  # no prefill is in its time
    wanted: bool = True
    stop_sent: bool = False


class Targets:
    """Decodes one request at a time; a scheduler for `edgespec.model.Model`."""

    def __init__(
        self,
        vocab: Vocab,
        described: Described,
        spec: Spec,
        places: Sequence[Place],
        proposer: DraftProposer,
        *,
        lookahead: int | None = None,
        most_draft_tokens: int = MOST_DRAFT_TOKENS,
        stop_ids: frozenset[int] | None = None,
    ) -> None:
        """
        Args:
            vocab: the target's.
            described: of any copy.
            spec: how a place loads its copy.
            places: where the copies are; closed with this.
            proposer: the draft; closed with this.
            lookahead: draft tokens per task; default: the fewest for which the copies suffice.
            most_draft_tokens: draft tokens ahead of the accepted sequence.
            stop_ids: tokens that end a sequence; default: the vocabulary's.
        """
        self._vocab, self._described, self._spec = vocab, described, spec
        self._places, self._proposer = list(places), proposer
        self._idle = list(places)  # the last one answered last, and so lacks the fewest tokens
        self._fixed, self._most = lookahead, most_draft_tokens
        self._stop_ids = vocab.eog_ids if stop_ids is None else stop_ids
        self._owner = uuid.uuid4().hex
        self._numbers = count(1)
        self._running: dict[int, Running] = {}
        self._events: SimpleQueue[Callable[[], Answer]] = SimpleQueue()
        self._drafting = ThreadPoolExecutor(1, thread_name_prefix="edgespec draft")
        self._turn = threading.Lock()
        self._passes, self._drafts = deque[float](maxlen=REMEMBERED), deque[float](maxlen=REMEMBERED)
        self._failures = 0
        self._text, self._draft_tokens, self._prompt_length = list[int](), list[int](), 0
        self._sampling = SamplingParams()
        self._version = 0  # changes when the draft must continue another sequence
        self._exhausted = -1  # the version for which the draft has no more tokens
        self._proposing = False
        self._closed, self.process = False, os.getpid()
        self.thread: threading.Thread | None = None
        self.at_close: Callable[[], None] = lambda: None

    def submit(
        self,
        request: Request,
        emit: Callable[[Event], None],
        stats: GenerationStats | None = None,
        *,
        is_full: Callable[[], bool] = never,
    ) -> Seq:
        """As `Scheduler.submit`; requests are decoded one after the other.

        A request ends with EdgespecError if no copy can do its tasks. Copies do not wait for a reader that is behind.

        Raises:
            UsageError: the request has a grammar or wants log-probabilities, which stay with the logits.
            Closed: the model was closed.
        """
        self._check_open()
        if request.grammar or request.log_probs is not None:
            raise UsageError("grammars and log-probabilities do not work with several targets")
        seq = Seq(request, emit, GenerationStats() if stats is None else stats, self._vocab, self._wake)
        self.thread = threading.Thread(target=self._decode, args=(seq,), daemon=True)
        self.thread.start()
        return seq

    def start(self) -> None: ...

    def wake(self) -> None: ...

    def _decode(self, seq: Seq) -> None:
        error = None
        with self._turn:
            seq.tell(Reading(0, len(seq.request.prompt_ids)))
            try:
                for step in self._steps(seq):
                    seq.write(step)
                    if seq.text.stopped:
                        break
            except Exception as found:
                error = found
            self._call_off()
        seq.stats.finish_reason = seq.stats.finish_reason or "interrupted"
        seq.end(error)
        seq.tell_end()

    def close(self) -> None:
        """Free all copies and the draft; safe to call twice."""
        if self._closed or not is_here(self.process):
            return
        self._closed = True
        self._wake()
        with self._turn:
            self._call_off()
        self._drafting.shutdown()
        self._proposer.close()
        for place in self._places:
            place.close()
        self.at_close()

    def _check_open(self) -> None:
        check_process(self.process)
        if self._closed:
            raise Closed

    def _steps(self, seq: Seq) -> Iterator[Step]:
        self._check_open()
        if seq.cancelled:  # before its turn
            return
        request, stats, limits = seq.request, seq.stats, self._described.capabilities
        prompt = request.prompt_ids
        limit = min(len(prompt) + request.max_tokens, limits.context_length)
        stats.planner, stats.backend = "dsi", f"{len(self._places)} x {self._described.name}"
        stats.exact = limits.exact.name if limits.exact else ""
        stats.seed, stats.prompt_tokens = request.sampling.seed, len(prompt)
        self._text, self._draft_tokens, self._prompt_length = list(prompt), [], len(prompt)
        self._sampling, self._failures = request.sampling, 0
        self._drafting.submit(self._proposer.begin, prompt, request.sampling).result()
        if len(prompt) > LONG_PROMPT:
            while len(self._idle) > 1:
                self._submit([], only_read=True)
        started = perf_counter()
        while not seq.cancelled:
            self._check_open()
            stay_awake()
            room = limit - len(self._text) - 1  # a deeper draft would leave no room for the bonus token
            while self._idle and self._due():
                self._submit(self._draft_tokens)
            self._draft(min(self._most, room))
            if (answer := self._wait()) is None:
                continue
            task, tokens = answer
            known = len(self._text) - len(task.token_ids)
            if known >= len(tokens) or tokens[:known] != self._text[len(task.token_ids) :]:
                continue
            drafted = task.draft_tokens.tolist()
            parts = [(tokens[known:], drafted[known:])]
            if reading := len(self._text) == len(prompt):
                parts = [(tokens[:1], []), (tokens[1:], drafted[1:])] if tokens[1:] else [(tokens, [])]
            for part, draft_tokens in parts:
                output, finished = until_stop(part, self._stop_ids, limit - len(self._text))
                sources = [Source.DRAFT] * (len(part) - 1) + [Source.TARGET]
                del sources[len(output) :]
                tree = chain_of([self._text[-1], *draft_tokens])
                start, path = len(self._text) - 1, list(range(len(output)))
                self._advance(output)
                now = perf_counter()
                step = Step(output, sources, finished, tree, path, [], start, sequences=1, seconds=now - started)
                if reading:
                    stats.prefill_seconds, reading = now - started, False
                    stats.add(sources)
                else:
                    stats.count(step, 0.0, 0.0)
                stats.finish_reason, started = finished, now
                yield step
                if finished:
                    return

    def _advance(self, tokens: list[int]) -> None:
        self._text += tokens
        if self._draft_tokens[: len(tokens)] == tokens:
            del self._draft_tokens[: len(tokens)]
        else:
            self._forget_draft_tokens()
        for running in self._running.values():
            running.wanted = running.wanted and self._helps(running.task)
        self._stop_unwanted()

    def _forget_draft_tokens(self) -> None:
        self._draft_tokens = []
        self._version += 1
        self._proposer.stop()

    def _helps(self, task: Task) -> bool:
        later = self._text[len(task.token_ids) :]
        return len(later) <= len(task.draft_tokens) and later == task.draft_tokens[: len(later)].tolist()

    def _stop_unwanted(self) -> None:
        """Stop tasks older than all wanted ones: draft tokens are only appended until one is rejected."""
        oldest = min((number for number, running in self._running.items() if running.wanted), default=math.inf)
        unwanted = {number: running for number, running in self._running.items() if number < oldest}
        for running in unwanted.values():
            if not running.stop_sent:
                running.stop_sent = True
                running.place.stop(self._owner, max(unwanted))

    def _due(self) -> bool:
        """True if a free copy should get a task now."""
        wanted = [running for running in self._running.values() if running.wanted and not running.task.only_read]
        if not wanted:
            return True  # no copy works on the next token, and without that plain decoding would be faster
        if self._passes and perf_counter() - max(running.started for running in wanted) > self._patience():
            return True
        ahead = len(self._text) + len(self._draft_tokens) - max(running.task.end for running in wanted)
        return ahead >= self._lookahead()

    def _patience(self) -> float:
        return max(LEAST_PATIENCE, PATIENCE * median(self._passes))

    def _lookahead(self) -> int:
        """The fewest draft tokens per task for which the copies suffice (the paper's equation 1)."""
        if self._fixed:
            return self._fixed
        if not self._passes or not self._drafts:
            return 1
        return max(1, math.ceil(median(self._passes) / (len(self._places) * median(self._drafts))))

    def _submit(self, draft_tokens: Sequence[int], only_read: bool = False) -> None:
        place, number = self._idle.pop(), next(self._numbers)
        text, draft_ids = np.array(self._text, np.int32), np.array(draft_tokens, np.int32)
        task = Task(self._owner, number, text, self._prompt_length, draft_ids, self._sampling, only_read)
        measures = len(self._text) > self._prompt_length
        self._running[number] = Running(place, task, perf_counter(), measures)
        try:
            future = place.executor.submit(verify, self._spec, task)
        except BrokenExecutor as error:
            future = Future()
            future.set_exception(error)
        future.add_done_callback(lambda done: self._events.put(lambda: self._answered(number, done)))

    def _answered(self, number: int, done: "Future[list[int] | None]") -> Answer:
        running = self._running.pop(number)
        try:
            tokens = done.result()
        except (Exception, CancelledError) as error:
            self._lost(running, error)
            return None
        self._idle.append(running.place)
        if tokens is None or not running.wanted or running.task.only_read:
            return None
        self._failures = 0
        if running.measures:
            self._passes.append(perf_counter() - running.started)
        return running.task, tokens

    def _lost(self, running: Running, error: BaseException) -> None:
        if isinstance(error, BrokenExecutor):
            running.place.renew()
        self._idle.insert(0, running.place)
        self._failures += 1
        if self._failures > 1 + 2 * len(self._places):
            raise EdgespecError(f"no copy of the target does its tasks: {error or type(error).__name__}") from error

    def _draft(self, most: int) -> None:
        if self._proposing or self._version == self._exhausted or len(self._draft_tokens) >= most:
            return
        version, text = self._version, [*self._text, *self._draft_tokens]
        self._proposing = True
        future = self._drafting.submit(self._propose, version, text, most - len(self._draft_tokens))
        future.add_done_callback(lambda done: self._events.put(lambda: self._proposed_all(version, done)))

    def _propose(self, version: int, text: list[int], most: int) -> bool:
        """In the draft's thread: propose tokens for a version of the sequence.

        Returns:
            True if more may follow.
        """
        began = perf_counter()
        for number, token in enumerate(self._proposer.after(text), 1):
            self._events.put(partial(self._proposed, version, token, perf_counter() - began))
            if number == most or version != self._version:
                return True
            began = perf_counter()
        return version != self._version

    def _proposed(self, version: int, token: int, seconds: float) -> Answer:
        if version == self._version:
            self._draft_tokens.append(token)
            if len(self._text) + len(self._draft_tokens) > self._prompt_length + 1:
                self._drafts.append(seconds)
        return None

    def _proposed_all(self, version: int, done: "Future[bool]") -> Answer:
        self._proposing = False
        if version == self._version and not done.result():  # else it drafted for another request
            self._exhausted = version
        return None

    def _wait(self) -> Answer:
        timeout = self._patience() / 2 if self._idle and self._passes else None
        try:
            return self._events.get(timeout=timeout)()
        except Empty:
            return None

    def _wake(self) -> None:
        self._events.put(lambda: None)

    def _call_off(self) -> None:
        for running in self._running.values():
            running.wanted = False
        self._stop_unwanted()
        self._forget_draft_tokens()
