"""What passes between the scheduler and those who want texts: requests, events, and how a request is called off."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock
from time import perf_counter

from edgespec.errors import EdgespecError
from edgespec.loop.generate import LogProbs, Step
from edgespec.loop.grammar import Compiled
from edgespec.loop.hint_texts import HintTexts
from edgespec.loop.sampling import SamplingParams
from edgespec.loop.stats import GenerationStats
from edgespec.loop.text import TextStream
from edgespec.loop.tree import Source


@dataclass(frozen=True, slots=True)
class Request:
    """A text that is wanted."""

    prompt_ids: list[int]
    sampling: SamplingParams
    max_tokens: int
    stop: Sequence[str] = ()  # strings that end the text
    log_probs: int | None = None  # tell how probable tokens were, and so many of the likeliest
    plain: bool = False  # guess nothing: plain decoding
    grammar: Compiled | None = None  # what the text must look like
    hint_texts: HintTexts | None = None  # texts to copy draft tokens from
    foresee: bool = False  # tell what the draft thinks will follow
    shown: frozenset[int] = frozenset()  # control tokens whose names are part of the text


@dataclass(frozen=True, slots=True)
class Chunk:
    """What became certain with one token, or at the end without one."""

    text: str  # may be empty: half a character, or what may become a stop string
    token_id: int | None  # None: what was held back of earlier tokens, where a text ended for lack of room
    source: Source  # who guessed the token
    log_probs: LogProbs | None = None


@dataclass(frozen=True, slots=True)
class Reading:
    """So much of the prompt is read."""

    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Wrote:
    """A pass has written these tokens."""

    chunks: list[Chunk]
    step: Step


@dataclass(frozen=True, slots=True)
class Foresaw:
    """What the draft thinks will follow. Nothing of it is certain."""

    token_ids: list[int]
    shown: frozenset[int] = frozenset()  # as of the request


@dataclass(frozen=True, slots=True)
class Ended:
    """The last event of a text."""

    error: Exception | None = None
    rest: str = ""  # of the text, which no token has told: see `Job.cut_short`


Event = Reading | Wrote | Foresaw | Ended


class Cancelled(EdgespecError):
    """Nobody wants the text any more."""


class Job:
    """A request on its way."""

    def __init__(self, request: Request, emit: Callable[[Event], None], stats: GenerationStats, text: TextStream):
        self.request = request
        self.stats = stats
        self.cancelled = False
        self.text = text
        self.rest = ""  # told when it has ended
        self.emit = emit
        self.when_cancelled: Callable[[], None] = lambda: None
        self.since = perf_counter()
        # None: somebody waits. Else nobody has asked yet: so many tokens may be prepared, while nothing else is to do.
        self.hold: int | None = None

    @property
    def waits(self) -> bool:
        """Prepared as far as it may be."""
        return self.hold is not None and self.stats.tokens >= self.hold

    def cut_short(self) -> None:
        """The text ends here, between two passes, as it would if no more tokens had been wanted."""
        self.rest = self.text.finish()
        self.stats.finish_reason = "stop" if self.text.stopped else "length"

    def cancel(self, *, useful: bool = False) -> None:
        """Stop after the pass that is being made, or within it if nobody else is in it. From any thread, also twice.

        `useful`: what the pass reads will be wanted by a request that comes now, so it is not ended within.
        """
        if not self.cancelled:
            self.cancelled = True
            if not useful:
                self.when_cancelled()


class Passing:
    """The jobs whose texts are in the pass under way, which is ended when nobody wants what it gives."""

    def __init__(self, interrupt: Callable[[], None]) -> None:
        self._closed = False  # nobody wants anything
        self._interrupt = interrupt
        self._jobs: list[Job] = []
        self._lock = Lock()

    @contextmanager
    def of(self, jobs: list[Job]) -> Iterator[None]:
        """Within, a pass is made for these."""
        with self._lock:
            self._jobs = jobs
        self.look()  # who has left since the last one was not heard
        try:
            yield
        finally:
            with self._lock:
                self._jobs = []

    def close(self) -> None:
        """From now on nobody wants anything."""
        self._closed = True
        self.look()

    def look(self) -> None:
        """End the pass under way if it is for nobody. From any thread."""
        with self._lock:
            if self._jobs and (self._closed or all(job.cancelled for job in self._jobs)):
                self._interrupt()


@dataclass(slots=True)
class Counts:
    """What has happened since the model was loaded."""

    passes: int = 0
    pass_seconds: float = 0.0
    works: int = 0
    nodes: int = 0  # guesses evaluated
    requests: dict[str, int] = field(default_factory=dict)  # how they ended -> how many
    tokens: dict[str, int] = field(default_factory=lambda: {source.name.lower(): 0 for source in Source})
    prompt_tokens: int = 0
    cached_tokens: int = 0

    def add_pass(self, seconds: float, works: int, nodes: int) -> None:
        """One more."""
        self.passes += 1
        self.pass_seconds += seconds
        self.works += works
        self.nodes += nodes


def chunks_of(step: Step, text: TextStream, stats: GenerationStats) -> list[Chunk]:
    """A step's tokens as text, up to a stop string."""
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
