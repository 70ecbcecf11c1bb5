"""Requests, the events that report on them, and counts of both."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from edgespec.errors import EdgespecError
from edgespec.loop.backend import Backend, Vocab, Work
from edgespec.loop.generate import LogProbs, Step
from edgespec.loop.grammar import Compiled
from edgespec.loop.hint_texts import HintTexts
from edgespec.loop.sampling import SamplingParams
from edgespec.loop.stats import GenerationStats
from edgespec.loop.text import TextStream
from edgespec.loop.tree import Source


@dataclass(slots=True, eq=False)
class PassCounter:
    """Counts passes in which a request with this counter has a part; one counts once, also where several share it."""

    passes: int = 0
    seconds: float = 0.0

    def add(self, seconds: float) -> None:
        self.passes, self.seconds = self.passes + 1, self.seconds + seconds


@dataclass(frozen=True, slots=True)
class Request:
    """
    Attributes:
        stop: strings that end the output.
        log_probs: report log-probabilities, also of this number of most probable tokens; None: report none.
        plain: decode without draft tokens.
        grammar: what the output must match.
        hint_texts: texts to copy draft tokens from.
        shown: control tokens whose names are part of the output.
        counter: of its passes.
        sender: only requests of one sender share prefixes.
    """

    prompt_ids: list[int]
    sampling: SamplingParams
    max_tokens: int
    stop: Sequence[str] = ()
    log_probs: int | None = None
    plain: bool = False
    grammar: Compiled | None = None
    hint_texts: HintTexts | None = None
    shown: frozenset[int] = frozenset()
    counter: PassCounter | None = None
    sender: str = ""


@dataclass(frozen=True, slots=True)
class Chunk:
    """
    Attributes:
        text: empty for half a character, and for the beginning of a stop string.
        token_id: None: text held back when the request ended for lack of room.
    """

    text: str
    token_id: int | None
    source: Source
    log_probs: LogProbs | None = None


@dataclass(slots=True, repr=False)
class GenerationResult:
    """A finished generation."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    stats: GenerationStats = field(default_factory=GenerationStats)

    def add(self, chunk: Chunk) -> None:
        """Append a chunk."""
        self.text += chunk.text
        if chunk.token_id is not None:
            self.token_ids.append(chunk.token_id)

    @property
    def finish_reason(self) -> str:
        """One of stop, length, and interrupted."""
        return self.stats.finish_reason

    @property
    def seed(self) -> int:
        """With it the same call gives the same text."""
        return self.stats.seed

    def __repr__(self) -> str:
        about = f"{self.finish_reason or 'unfinished'}, {self.stats.summary()}"
        return f"<GenerationResult {self.text!r}: {about}>"


@dataclass(frozen=True, slots=True)
class Reading:
    """Prefill progress, in prompt tokens."""

    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Wrote:
    chunks: list[Chunk]
    step: Step


@dataclass(frozen=True, slots=True)
class Ended:
    error: Exception | None = None
    rest: str = ""  # text that no chunk has: see `Handle.cut_short`


Event = Reading | Wrote | Ended


class Cancelled(EdgespecError):
    pass


class Status(Enum):
    """Stations of a request, in this order; a restart leads back to WAITING."""

    WAITING = "waiting"
    PREFETCHING = "prefetching"  # idle work with a session
    READING = "reading"
    WRITING = "writing"
    DONE = "done"


def never() -> bool:
    return False


@dataclass(slots=True, eq=False)
class Handle:
    """The state of a request; any thread may call `cancel`, only the scheduler all else.

    Attributes:
        idle_limit: see `Scheduler.submit`.
        is_full: see `Scheduler.submit`.

    Raises:
        UsageError: a stop string is empty.
    """

    request: Request
    emit: Callable[[Event], None]
    stats: GenerationStats
    vocab: Vocab
    when_cancelled: Callable[[], None]
    idle_limit: int | None = None
    is_full: Callable[[], bool] = never
    status: Status = Status.WAITING
    cancelled: bool = False
    ended: Ended | None = None
    text: TextStream = field(init=False)
    _told: list[int] = field(default_factory=list)  # tokens that the reader has
    _repeated: int = 0  # number of these decoded since the last restart
    _rest: str = ""

    def __post_init__(self) -> None:
        self.text = self._new_text()

    def _new_text(self) -> TextStream:
        return TextStream(self.vocab, self.request.stop, self.request.shown)

    @property
    def is_idle_work(self) -> bool:
        return self.idle_limit is not None

    @property
    def is_prefetched(self) -> bool:
        return self.idle_limit is not None and self.stats.tokens >= self.idle_limit

    @property
    def repeats(self) -> bool:
        return self._repeated < len(self._told)

    def cancel(self, *, useful: bool = False) -> None:
        """Stop after the pass under way, or within it if no other request is in it; safe to call twice.

        Args:
            useful: another request needs what the pass computes, so the pass goes on.
        """
        if not self.cancelled:
            self.cancelled = True
            if not useful:
                self.when_cancelled()

    def promote(self) -> None:
        self.idle_limit = None
        if self.status is Status.PREFETCHING:
            self.status = Status.READING

    def begin(self) -> None:
        self.status = Status.PREFETCHING if self.is_idle_work else Status.READING

    def wait_again(self) -> None:
        self.status = Status.WAITING
        self.restart()

    def restart(self) -> None:
        """Begin again: the same tokens will follow, and `write` reports only new ones."""
        self.text, self._repeated = self._new_text(), 0
        self.stats.reset()

    def write(self, step: Step) -> list[Chunk]:
        """Report those tokens of a step that the reader does not have.

        Raises:
            EdgespecError: after a restart other tokens came; without a row class, rounding may change them.
        """
        chunks = chunks_of(step, self.text, self.stats)
        known = self._told[self._repeated : self._repeated + len(chunks)]
        if [chunk.token_id for chunk in chunks[: len(known)]] != known:
            raise EdgespecError("the request was interrupted and cannot be continued")
        self._repeated += len(known)
        new = chunks[len(known) :]
        if new:
            self.tell(Wrote(new, step), [token for chunk in new if (token := chunk.token_id) is not None])
        if self.status is Status.READING:
            self.status = Status.WRITING
        return new

    def cut_short(self) -> None:
        self._rest = self.text.finish()
        self.stats.finish_reason = "stop" if self.text.stopped else "length"

    def end(self, error: Exception | None) -> None:
        self.ended = self.ended or Ended(error, self._rest)
        if error is not None:
            self.stats.finish_reason = "interrupted"
        self.status = Status.DONE

    def tell_end(self) -> None:
        assert self.ended
        self.tell(self.ended)

    def tell(self, event: Event, tokens: Sequence[int] = ()) -> None:
        """Pass an event, which reports `tokens`, to the reader; if it fails, the request is cancelled."""
        try:
            self.emit(event)
            self._told.extend(tokens)
            self._repeated += len(tokens)
        except Exception:
            self.cancel()


class Wanted(Protocol):
    """What a pass is made for, unless it is cancelled."""

    cancelled: bool


class CurrentPass:
    """The pass under way; takes no lock, since a thread that holds one may end a lost stream as it collects garbage."""

    def __init__(self) -> None:
        self._closed = False
        self._now: tuple[Sequence[Wanted], Backend, int] | None = None  # replaced whole

    @contextmanager
    def of(self, handles: Sequence[Wanted], model: Backend) -> Iterator[None]:
        """Wrap a pass for these requests."""
        self._now = handles, model, model.pass_number
        self.check()
        try:
            yield
        finally:
            self._now = None

    def close(self) -> None:
        self._closed = True
        self.check()

    def check(self) -> None:
        """Interrupt the pass under way if no request needs it, from any thread."""
        if now := self._now:
            handles, model, pass_number = now
            if self._closed or all(one.cancelled for one in handles):
                model.interrupt(pass_number)


@dataclass(slots=True)
class Counts:
    passes: int = 0
    pass_seconds: float = 0.0
    works: int = 0
    nodes: int = 0
    requests: dict[str, int] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=lambda: {source.name.lower(): 0 for source in Source})
    prompt_tokens: int = 0
    cached_tokens: int = 0

    def add_pass(self, seconds: float, works: Sequence[Work]) -> None:
        self.passes += 1
        self.pass_seconds += seconds
        self.works += len(works)
        self.nodes += sum(len(work.token_ids) - 1 for work in works if not work.prompt)

    @property
    def decoded(self) -> int:
        """Number of generated tokens."""
        return sum(self.tokens.values())

    def add_tokens(self, handle: Handle, chunks: Sequence[Chunk]) -> None:
        """Count generated tokens, and with the first the prompt, which may be read several times before.

        Where only a prompt is read, the token that its last row gives is nobody's.
        """
        if chunks and handle.stats.tokens == len(chunks):
            self.prompt_tokens += len(handle.request.prompt_ids)
            self.cached_tokens += handle.stats.cached_tokens
        for chunk in chunks if handle.idle_limit != 0 else ():
            self.tokens[chunk.source.name.lower()] += 1

    def add_end(self, handle: Handle) -> None:
        if handle.is_idle_work or handle.ended is None:
            return
        error = handle.ended.error
        reason = "failed" if error and not isinstance(error, Cancelled) else handle.stats.finish_reason
        self.requests[reason] = self.requests.get(reason, 0) + 1


def chunks_of(step: Step, text: TextStream, stats: GenerationStats) -> list[Chunk]:
    chunks = list[Chunk]()
    for i, (token, source) in enumerate(zip(step.tokens, step.sources, strict=True)):
        piece = text.push(token)
        if text.stopped or (step.finished and i + 1 == len(step.tokens)):
            piece += text.finish()
        chunks.append(Chunk(piece, token, source, step.log_probs[i] if step.log_probs else None))
        if text.stopped:
            stats.finish_reason = "stop"
            stats.drop(step.sources[i + 1 :])
            break
    return chunks
