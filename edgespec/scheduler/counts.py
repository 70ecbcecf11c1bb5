"""Counts of passes, tokens and ended requests since the model was loaded."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from edgespec.loop.backend import Work
from edgespec.loop.passes import Ran
from edgespec.loop.tree import Source
from edgespec.scheduler.events import Cancelled, Chunk
from edgespec.scheduler.requests import PassCounter
from edgespec.scheduler.sequence import Seq


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

    def add_pass(self, ran: Ran, works: Sequence[Work], counters: Iterable[PassCounter | None]) -> None:
        """Count a pass, also in the counters of its requests."""
        self.passes += 1
        self.pass_seconds += ran.seconds
        self.works += len(works)
        self.nodes += sum(len(work.token_ids) - 1 for work in works if not work.prompt)
        for counter in set(counters):
            if counter:
                counter.add(ran.seconds)

    def add_tokens(self, seq: Seq, chunks: Sequence[Chunk]) -> None:
        """Count generated tokens, and with the first the prompt, which may be read several times before.

        Where only a prompt is read, the token that its last row gives is nobody's.
        """
        if chunks and seq.stats.tokens == len(chunks):
            self.prompt_tokens += len(seq.request.prompt_ids)
            self.cached_tokens += seq.stats.cached_tokens
        for chunk in chunks if seq.idle_limit != 0 else ():
            self.tokens[chunk.source.name.lower()] += 1

    def add_end(self, seq: Seq) -> None:
        if seq.is_idle_work or seq.ended is None:
            return
        error = seq.ended.error
        reason = "failed" if error and not isinstance(error, Cancelled) else seq.stats.finish_reason
        self.requests[reason] = self.requests.get(reason, 0) + 1
