"""Counts and seconds of generations."""

import copy
from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from edgespec.loop.step import Step
from edgespec.loop.tree import Source

COMPARED = 4  # least number of plain passes by which a sequence is compared with plain decoding


class PlainPasses:
    """Seconds of plain decoding of a sequence, by its plain passes among steps with draft tokens."""

    def __init__(self) -> None:
        self._seconds, self._last = list[float](), list[float]()  # rising; of those since the last step with drafts
        self._shared = False  # shared passes do not show it

    def add(self, step: Step, accepting: float, *, after_drafts: bool) -> None:
        """Learn from a step; `accepting` as for `GenerationStats.count`."""
        if step.sequences != 1:
            self._shared = True
        elif step.plain and after_drafts:
            self._last.append(step.seconds + accepting)
        elif not step.plain:
            for one in self._last:
                insort(self._seconds, one)
            self._last.clear()

    def median(self) -> float:
        """Seconds; 0: there are too few, or other sequences shared a pass."""
        found = self._seconds
        if len(found) < COMPARED or self._shared:
            return 0.0
        return (found[(len(found) - 1) // 2] + found[len(found) // 2]) / 2


@dataclass(slots=True)
class GenerationStats:
    """
    Attributes:
        backend: the target's engine.
        exact: name of the row class that passes were kept to; "": none.
        approximate: what changed the distribution, such as "cascade 0.5"; "": nothing did.
        cached_tokens: prompt tokens that were still in the cache.
        tokens: of the output, an end-of-text token included.
        passes: of the target, prefill not counted, though it gives the first token.
        drafted: draft nodes verified, roots not counted.
        finish_reason: "stop": end of text or a stop string; "length": max_tokens or context; "interrupted".
        prefill_seconds: of both models.
        draft_seconds: of the draft's passes.
        hidden_seconds: of draft passes made while the target ran, in none of the other seconds.
        draft_went_on: number of steps that went on with the draft's search of the step before.
        target_seconds: of the target's passes.
        wait_seconds: the part of `target_seconds` in which passes waited for weights.
        plan_seconds: the rest of the steps: planning, sampling and bookkeeping.
        plain_seconds: of plain decoding of `gained` tokens, by the plain passes that lay among steps with draft tokens;
            0: there were fewer than `COMPARED`.
    """

    planner: str = "none"
    backend: str = ""
    exact: str = ""
    approximate: str = ""
    seed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    tokens: int = 0
    passes: int = 0
    drafted: int = 0
    tokens_by_source: dict[str, int] = field(default_factory=lambda: {source.name.lower(): 0 for source in Source})
    finish_reason: str = ""
    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    draft_passes: int = 0
    hidden_seconds: float = 0.0
    draft_went_on: int = 0
    target_seconds: float = 0.0
    wait_seconds: float = 0.0
    plan_seconds: float = 0.0
    plain_seconds: float = 0.0
    _plain: PlainPasses = field(default_factory=PlainPasses, repr=False, compare=False)

    @property
    def gained(self) -> int:
        """Tokens that `passes` gave: all but the first."""
        return max(0, self.tokens - 1)

    @property
    def acceptance_length(self) -> float:
        """Tokens per pass of the target, the bonus token included."""
        return self.gained / self.passes if self.passes else 0.0

    @property
    def seconds(self) -> float:
        """Decoding time, prefill not counted."""
        return self.draft_seconds + self.target_seconds + self.plan_seconds

    @property
    def tokens_per_second(self) -> float:
        """Decoding speed, prefill not counted."""
        return self.gained / self.seconds if self.seconds else 0.0

    @property
    def times_plain(self) -> float:
        """Speed relative to plain decoding, measured in this sequence; 0: not measured.

        Above the acceptance length it would be an error of measurement: no pass is faster than a plain one.
        """
        times = self.plain_seconds / self.seconds if self.seconds and self.drafted else 0.0
        return times if times <= self.acceptance_length else 0.0

    def reset(self) -> None:
        """Set all fields to their defaults."""
        fresh = GenerationStats()
        for one in fields(self):
            setattr(self, one.name, getattr(fresh, one.name))

    def count(self, step: Step, planning: float, accepting: float) -> None:
        """Count a step.

        Args:
            step: with a pass of the target.
            planning: seconds of its rest: neither the draft's nor the target's passes.
            accepting: seconds of these after the pass.
        """
        self.passes += 1
        self.drafted += step.drafted
        self.add(step.sources)
        self.draft_seconds += step.draft_seconds
        self.target_seconds += step.seconds
        self.wait_seconds += step.wait_seconds
        self.plan_seconds += planning
        self._plain.add(step, accepting, after_drafts=self.drafted > 0)
        self.plain_seconds = self.gained * self._plain.median()

    def add(self, sources: Sequence[Source]) -> None:
        """Count tokens of these sources."""
        self.tokens += len(sources)
        for source in sources:
            self.tokens_by_source[source.name.lower()] += 1

    def drop(self, sources: Sequence[Source]) -> None:
        """Take back generated tokens after a stop string: they are not part of the output."""
        self.plain_seconds *= max(0, self.gained - len(sources)) / max(1, self.gained)
        self.tokens -= len(sources)
        for source in sources:
            self.tokens_by_source[source.name.lower()] -= 1

    def as_dict(self) -> dict[str, Any]:
        """For JSON: the fields, and the values derived from them."""
        derived = ("gained", "acceptance_length", "seconds", "tokens_per_second", "times_plain")
        told = {one.name: getattr(self, one.name) for one in fields(self) if not one.name.startswith("_")}
        return copy.deepcopy(told) | {name: getattr(self, name) for name in derived}

    def summary(self) -> str:
        """One line for a person."""
        remarks = f", {self.hidden_seconds:.1f} s of drafting hidden" if self.hidden_seconds else ""
        remarks += f", approximate: {self.approximate}" if self.approximate else ""
        times = self.times_plain
        gain = f" ({times:.2f} x plain)" if times else ""
        if times and round(times, 2) < 1:
            remarks += ", drafting did not pay"
        elif self.passes and not self.drafted and self.planner != "none":
            remarks += ", nothing drafted: it promised no gain"
        return (
            f"{self.tokens} tokens, {self.tokens_per_second:.1f} tokens/s{gain}, "
            f"acceptance length {self.acceptance_length:.2f}, {self.passes} passes{remarks} "
            f"({self.planner} on {self.backend}), seed {self.seed}"
        )
