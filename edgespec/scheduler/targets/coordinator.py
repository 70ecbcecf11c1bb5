"""Algorithm 1 of "Distributed Speculative Inference" (arXiv 2405.14105), with one draft.

After each `lookahead` draft tokens, a free copy of the target verifies all since the last accepted one, so the next
answer contains every late or lost one. The first rejected token stops the tasks built on it. One copy always works on
the next token, so this is no slower than plain decoding while a copy is free.

All state belongs to the thread that drives the request; workers only queue events.
"""

import math
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

from edgespec.errors import EdgespecError, UsageError
from edgespec.loop.backend import Vocab
from edgespec.loop.generate import Step, until_stop
from edgespec.loop.sampling import SamplingParams
from edgespec.loop.stats import GenerationStats
from edgespec.loop.tree import Source, chain_of
from edgespec.scheduler.requests import Event, Handle, Reading, Request
from edgespec.scheduler.targets.guesser import Guesser
from edgespec.scheduler.targets.places import Place
from edgespec.scheduler.targets.verifier import Described, Spec, Task, verify

MOST_GUESSES = 64
LONG_PROMPT = 64  # tokens from which on all copies prefill at once
REMEMBERED = 16
PATIENCE = 3  # pass times after which another copy is asked
LEAST_PATIENCE = 0.2  # seconds

Answer = tuple[Task, list[int]] | None


@dataclass(slots=True)
class Running:
    place: Place
    task: Task
    started: float
    measures: bool  # has no prompt, so that its time is a pass time
    wanted: bool = True
    told: bool = False


class Targets:
    """Decodes one request at a time; a scheduler for `edgespec.model.Model`."""

    def __init__(
        self,
        vocab: Vocab,
        described: Described,
        spec: Spec,
        places: Sequence[Place],
        guesser: Guesser,
        *,
        lookahead: int | None = None,
        most_guesses: int = MOST_GUESSES,
        stop_ids: frozenset[int] | None = None,
    ) -> None:
        """
        Args:
            vocab: the target's.
            described: any of the copies.
            spec: how a place loads its copy.
            places: where the copies are; closed with this.
            guesser: the draft; closed with this.
            lookahead: draft tokens per task; default: the fewest for which the copies suffice.
            most_guesses: draft tokens ahead of the accepted sequence.
            stop_ids: tokens that end a sequence; default: the vocabulary's.
        """
        self._vocab, self._described, self._spec = vocab, described, spec
        self._places, self._guesser = list(places), guesser
        self._idle = list(places)  # the last one answered last, and so lacks the fewest tokens
        self._fixed, self._most = lookahead, most_guesses
        self._stop_ids = vocab.eog_ids if stop_ids is None else stop_ids
        self._owner = uuid.uuid4().hex
        self._numbers = count(1)
        self._running: dict[int, Running] = {}
        self._events: SimpleQueue[Callable[[], Answer]] = SimpleQueue()
        self._drafting = ThreadPoolExecutor(1, thread_name_prefix="edgespec draft")
        self._turn = threading.Lock()
        self._passes, self._drafts = deque[float](maxlen=REMEMBERED), deque[float](maxlen=REMEMBERED)
        self._failures = 0
        self._text, self._guesses, self._prompt_length = list[int](), list[int](), 0
        self._sampling = SamplingParams()
        self._version = 0  # changes when the draft must continue another sequence
        self._speechless = -1  # the version for which the draft has no more tokens
        self._guessing = False
        self._closed = False
        self.thread: threading.Thread | None = None
        self.at_close: Callable[[], None] = lambda: None

    def submit(self, request: Request, emit: Callable[[Event], None], stats: GenerationStats | None = None) -> Handle:
        """As `Scheduler.submit`. A thread decodes the request after those before it, until it is cancelled.

        It ends with an EdgespecError if no copy can do its tasks.

        Raises:
            UsageError: the request has a grammar or wants log-probabilities, which stay with the logits.
        """
        if request.grammar or request.log_probs is not None:
            raise UsageError("grammars and log-probabilities do not work with several targets")
        handle = Handle(request, emit, GenerationStats() if stats is None else stats, self._vocab, self._wake)
        self.thread = threading.Thread(target=self._decode, args=(handle,), daemon=True)
        self.thread.start()
        return handle

    def start(self) -> None: ...

    def _decode(self, handle: Handle) -> None:
        error = None
        with self._turn:
            handle.tell(Reading(0, len(handle.request.prompt_ids) - 1))
            try:
                for step in self._steps(handle):
                    handle.write(step)
                    if handle.text.stopped:
                        break
            except Exception as found:
                error = found
            self._call_off()
        handle.stats.finish_reason = handle.stats.finish_reason or "interrupted"
        handle.end(error)
        handle.tell_end()

    def close(self) -> None:
        """Free all copies and the draft. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        self._wake()
        with self._turn:
            self._call_off()
        self._drafting.shutdown()
        self._guesser.close()
        for place in self._places:
            place.close()
        self.at_close()

    def _steps(self, handle: Handle) -> Iterator[Step]:
        request, stats, limits = handle.request, handle.stats, self._described.capabilities
        prompt = request.prompt_ids
        limit = min(len(prompt) + request.max_tokens, limits.context_length)
        stats.planner, stats.backend = "dsi", f"{len(self._places)} x {self._described.name}"
        stats.exact = limits.exact.name if limits.exact else ""
        stats.seed, stats.prompt_tokens = request.sampling.seed, len(prompt)
        self._text, self._guesses, self._prompt_length = list(prompt), [], len(prompt)
        self._sampling, self._failures = request.sampling, 0
        self._drafting.submit(self._guesser.begin, prompt, request.sampling).result()
        if len(prompt) > LONG_PROMPT:
            while len(self._idle) > 1:
                self._submit([], only_read=True)
        started, reading = perf_counter(), True
        while not (self._closed or handle.cancelled):
            room = limit - len(self._text) - 1  # a deeper draft would leave no room for the bonus token
            while self._idle and self._due():
                self._submit(self._guesses)
            self._draft(min(self._most, room))
            if (answer := self._wait()) is None:
                continue
            task, tokens = answer
            known = len(self._text) - len(task.token_ids)
            if known >= len(tokens) or tokens[:known] != self._text[len(task.token_ids) :]:
                continue
            output, finished = until_stop(tokens[known:], self._stop_ids, limit - len(self._text))
            sources = [Source.DRAFT] * (len(tokens) - known - 1) + [Source.TARGET]
            del sources[len(output) :]
            tree = chain_of([self._text[-1], *task.guesses[known:].tolist()])
            self._advance(output)
            stats.count(sources, drafted=len(tree) - 1)
            stats.finish_reason = finished
            now = perf_counter()
            if reading:
                stats.prefill_seconds, reading = now - started, False
            else:
                stats.target_seconds += now - started
            started = now
            yield Step(output, sources, finished, tree, list(range(len(output))), [])
            if finished:
                return

    def _advance(self, tokens: list[int]) -> None:
        self._text += tokens
        if self._guesses[: len(tokens)] == tokens:
            del self._guesses[: len(tokens)]
        else:
            self._forget_guesses()
        for running in self._running.values():
            running.wanted = running.wanted and self._helps(running.task)
        self._stop_unwanted()

    def _forget_guesses(self) -> None:
        self._guesses = []
        self._version += 1
        self._guesser.stop()

    def _helps(self, task: Task) -> bool:
        later = self._text[len(task.token_ids) :]
        return len(later) <= len(task.guesses) and later == task.guesses[: len(later)].tolist()

    def _stop_unwanted(self) -> None:
        """Draft tokens are only appended until one is rejected, so the older tasks are the unwanted ones."""
        oldest = min((number for number, running in self._running.items() if running.wanted), default=math.inf)
        unwanted = {number: running for number, running in self._running.items() if number < oldest}
        for running in unwanted.values():
            if not running.told:
                running.told = True
                running.place.stop(self._owner, max(unwanted))

    def _due(self) -> bool:
        wanted = [running for running in self._running.values() if running.wanted and not running.task.only_read]
        if not wanted:
            return True  # no copy is working on the next token
        if self._passes and perf_counter() - max(running.started for running in wanted) > self._patience():
            return True
        ahead = len(self._text) + len(self._guesses) - max(running.task.end for running in wanted)
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

    def _submit(self, guesses: Sequence[int], only_read: bool = False) -> None:
        place, number = self._idle.pop(), next(self._numbers)
        text, judged = np.array(self._text, np.int32), np.array(guesses, np.int32)
        task = Task(self._owner, number, text, self._prompt_length, judged, self._sampling, only_read)
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
        if self._guessing or self._version == self._speechless or len(self._guesses) >= most:
            return
        version, text = self._version, [*self._text, *self._guesses]
        self._guessing = True
        future = self._drafting.submit(self._guess, version, text, most - len(self._guesses))
        future.add_done_callback(lambda done: self._events.put(lambda: self._guessed_all(version, done)))

    def _guess(self, version: int, text: list[int], most: int) -> bool:
        """In the draft's thread: propose tokens for that version; True if more may follow."""
        began = perf_counter()
        for number, token in enumerate(self._guesser.after(text), 1):
            self._events.put(partial(self._guessed, version, token, perf_counter() - began))
            if number == most or version != self._version:
                return True
            began = perf_counter()
        return version != self._version

    def _guessed(self, version: int, token: int, seconds: float) -> Answer:
        if version == self._version:
            self._guesses.append(token)
            if len(self._text) + len(self._guesses) > self._prompt_length + 1:
                self._drafts.append(seconds)
        return None

    def _guessed_all(self, version: int, done: "Future[bool]") -> Answer:
        self._guessing = False
        if not done.result():
            self._speechless = version
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
        self._forget_guesses()
