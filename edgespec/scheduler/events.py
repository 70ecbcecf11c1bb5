"""Events that report on a sequence: chunks of its text, progress with its prompt, its end."""

from dataclasses import dataclass, field

from edgespec.errors import EdgespecError
from edgespec.loop.stats import GenerationStats
from edgespec.loop.step import LogProbs, Step
from edgespec.loop.text import TextStream
from edgespec.loop.tree import Source


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
    rest: str = ""  # text that no chunk has: see `Seq.cut_short`


Event = Reading | Wrote | Ended


class Cancelled(EdgespecError):
    pass


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
