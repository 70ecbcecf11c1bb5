"""Decides by measured tokens per second whether the draft goes on while the target runs.

A sample is the time between two passes, and the tokens expected of the second one's tree, corrected by the accepted
share. After `REST` steps without, `BLOCK` steps with; the rests grow, and start again when the better way changes.
"""

from collections import deque
from dataclasses import dataclass, field
from math import sqrt
from typing import Any

BLOCK = 6  # rounds of a trial
REST = 16  # rounds before the first trial; twice as many after each, and 32 again after one that changes something …
LONGEST = 1024  # … up to so many
SAMPLES = 64  # last rounds of each way that count
AUDITED = 32  # trees that tell how far a way's probabilities hold
MARGIN = 1.01  # by which going on must be better
SURE = 1.5  # … and by so many standard errors of the difference, to begin with


@dataclass(slots=True)
class Way:
    samples: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=SAMPLES))  # tokens, seconds
    wrote: float = 8.0  # fading: tokens of the trees that it made …
    hoped: float = 8.0  # … and how many were expected

    @property
    def rate(self) -> float:
        seconds = sum(seconds for _, seconds in self.samples)
        return sum(tokens for tokens, _ in self.samples) / seconds * self.wrote / self.hoped if seconds else 0.0

    @property
    def error(self) -> float:
        """Standard error of the rate, as of a ratio of sums over rounds."""
        rate, seconds = self.rate, sum(seconds for _, seconds in self.samples)
        held = self.wrote / self.hoped
        return sqrt(sum((held * tokens - rate * took) ** 2 for tokens, took in self.samples)) / seconds

    def audit(self, wrote: float, hoped: float) -> None:
        self.wrote += wrote - self.wrote / AUDITED
        self.hoped += hoped - self.hoped / AUDITED


@dataclass(slots=True)
class Guard:
    alone: Way = field(default_factory=Way)
    beside: Way = field(default_factory=Way)
    goes_on: bool = False  # beside the pass that was begun last
    better: bool = False  # whether going on was, when last compared
    _left: int = REST  # rounds of this turn
    _rest: int = REST
    _since: float | None = None
    _hoped: float = 0.0  # tokens expected of its tree
    _maker: Way | None = None

    def as_dict(self) -> dict[str, Any]:
        ways = {name: [list(way.samples), way.wrote, way.hoped] for name, way in self._ways()}
        return {"better": self.better, "rest": self._rest, **ways}

    def recall(self, known: dict[str, Any]) -> None:
        """Begin with what `as_dict` gave. Raises KeyError, TypeError, ValueError: it did not."""
        self.better, self._rest = bool(known["better"]), min(LONGEST, max(REST, int(known["rest"])))
        for name, way in self._ways():
            samples, way.wrote, way.hoped = known[name]
            way.samples.extend((float(tokens), float(seconds)) for tokens, seconds in samples)
        self._turn(self.better, self._rest)

    def _ways(self) -> list[tuple[str, Way]]:
        return [("alone", self.alone), ("beside", self.beside)]

    def next(self, expected: float, now: float) -> bool:
        """Return whether the draft goes on in the next pass.

        Args:
            expected: tokens, of the pass's tree.
            now: seconds, by any clock.
        """
        self._maker = None
        if self._since is not None:
            self._maker = self.beside if self.goes_on else self.alone
            self._maker.samples.append((expected, now - self._since))
            self._left -= 1
            if self._left == 0:
                self._decide()
        self._since, self._hoped = now, expected
        return self.goes_on

    def wrote(self, tokens: int) -> None:
        if self._maker:
            self._maker.audit(tokens, self._hoped)
        self._maker = None

    def pause(self) -> None:
        self._since = self._maker = None

    def _decide(self) -> None:
        if self.goes_on == self.better:
            self._turn(not self.goes_on, BLOCK)
            return
        alone, beside = self.alone, self.beside
        doubt = 0.0 if self.better else SURE * sqrt(alone.error**2 + beside.error**2)
        better = beside.rate > MARGIN * alone.rate + doubt
        self._rest = min(LONGEST, 2 * (self._rest if better == self.better else REST))
        self.better = better
        self._turn(better, self._rest)

    def _turn(self, goes_on: bool, rounds: int) -> None:
        self.goes_on, self._left = goes_on, rounds
