"""Counts and seconds of a generation."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from edgespec.loop.tree import Source


@dataclass(slots=True)
class GenerationStats:
    """Counts and seconds of one generation."""

    planner: str = "none"
    backend: str = ""  # the target's engine
    exact: str = ""  # the class of shapes its passes have, which agree to the bit; "": none
    seed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens that were still in the cache
    tokens: int = 0  # output, an end-of-text token included
    passes: int = 0  # of the target, prefill not counted
    drafted: int = 0  # draft nodes verified, roots not counted
    tokens_by_source: dict[str, int] = field(default_factory=lambda: {source.name.lower(): 0 for source in Source})
    finish_reason: str = ""  # "stop": end of text or a stop string; "length": max_tokens or context; "interrupted"
    prefill_seconds: float = 0.0  # both models
    draft_seconds: float = 0.0  # draft model's passes
    draft_passes: int = 0
    hidden_seconds: float = 0.0  # of draft passes made while the target worked, so part of none of the others
    draft_went_on: int = 0  # steps whose search was used again by the next step
    target_seconds: float = 0.0  # target's passes
    wait_seconds: float = 0.0  # the part of them spent waiting for weights from a disk
    plan_seconds: float = 0.0  # planning, sampling and bookkeeping: the rest of a step
    plain_seconds: float = 0.0  # plain decoding of these tokens, by what its passes were seen to take; 0: not seen

    @property
    def acceptance_length(self) -> float:
        """Tokens gained per target pass, bonus included."""
        return self.tokens / self.passes if self.passes else 0.0

    @property
    def seconds(self) -> float:
        """Decoding time, prefill not counted."""
        return self.draft_seconds + self.target_seconds + self.plan_seconds

    @property
    def tokens_per_second(self) -> float:
        """Decoding speed, prefill not counted."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def times_plain(self) -> float:
        """Speed relative to plain decoding, by its measured pass times; 0: not measured."""
        return self.plain_seconds / self.seconds if self.seconds else 0.0

    def reset(self) -> None:
        """Begin again."""
        fresh = GenerationStats()
        for one in fields(self):
            setattr(self, one.name, getattr(fresh, one.name))

    def count(self, sources: Sequence[Source], drafted: int) -> None:
        """Count a pass of the target over `drafted` draft nodes, which gained tokens of these sources."""
        self.passes += 1
        self.tokens += len(sources)
        self.drafted += drafted
        for source in sources:
            self.tokens_by_source[source.name.lower()] += 1

    def drop(self, sources: Sequence[Source]) -> None:
        """Take back tokens behind a stop string: they were generated, but are not part of the output."""
        self.tokens -= len(sources)
        for source in sources:
            self.tokens_by_source[source.name.lower()] -= 1

    def as_dict(self) -> dict[str, Any]:
        """For JSON: the fields and what follows from them."""
        derived = ("acceptance_length", "seconds", "tokens_per_second", "times_plain")
        return asdict(self) | {name: getattr(self, name) for name in derived}

    def summary(self) -> str:
        """One line for a person."""
        hidden = f", {self.hidden_seconds:.1f} s of drafting hidden" if self.hidden_seconds else ""
        gain = f" ({self.times_plain:.2f} x plain)" if self.times_plain else ""
        return (
            f"{self.tokens} tokens, {self.tokens_per_second:.1f} tokens/s{gain}, "
            f"acceptance length {self.acceptance_length:.2f}, {self.passes} passes{hidden} "
            f"({self.planner} on {self.backend})"
        )
