"""Whether the draft shall go on while the target works, by what it has gained so far.

On processors that both use nothing says that it pays: the target's pass becomes longer, and what was guessed meanwhile
may be lost. So two ways are compared, alone and beside, in tokens per second. What going on costs in a pass it gains in
the next tree, so a sample is the time from one pass's beginning to the next one's, and the tokens that the next one's
tree is expected to write: 1 + the sum of its nodes' probabilities, which varies far less than what is written. How far
these hold is learned for each way, from what the trees it made did write.

First come `REST` rounds alone, then `BLOCK` beside, again and again after 32, 64, … rounds, from 32 again when the
better way changes: what can be lost by trying shrinks. Trees differ, so a few rounds say little. The draft goes on only
once that is better by more than chance would have it, and no longer than it is better. What was found out is remembered
from run to run.
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
    """What one way has brought."""

    samples: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=SAMPLES))  # tokens, seconds
    wrote: float = 8.0  # fading: tokens of the trees that it made …
    hoped: float = 8.0  # … and how many were expected

    @property
    def rate(self) -> float:
        """Tokens per second; 0: nothing was seen."""
        seconds = sum(seconds for _, seconds in self.samples)
        return sum(tokens for tokens, _ in self.samples) / seconds * self.wrote / self.hoped if seconds else 0.0

    @property
    def error(self) -> float:
        """Standard error of the rate, as of a ratio of sums over rounds."""
        rate, seconds = self.rate, sum(seconds for _, seconds in self.samples)
        held = self.wrote / self.hoped
        return sqrt(sum((held * tokens - rate * took) ** 2 for tokens, took in self.samples)) / seconds

    def audit(self, wrote: float, hoped: float) -> None:
        """One more tree."""
        self.wrote += wrote - self.wrote / AUDITED
        self.hoped += hoped - self.hoped / AUDITED


@dataclass(slots=True)
class Guard:
    """See the module. One text at a time asks it."""

    alone: Way = field(default_factory=Way)
    beside: Way = field(default_factory=Way)
    goes_on: bool = False  # beside the pass that was begun last
    better: bool = False  # whether going on was, when last compared
    _left: int = REST  # rounds of this turn
    _rest: int = REST
    _since: float | None = None  # when that pass began; None: something else came between
    _hoped: float = 0.0  # tokens expected of its tree
    _maker: Way | None = None  # that made this tree

    def as_dict(self) -> dict[str, Any]:
        """For JSON: what another run may begin with."""
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
        """A pass begins, over a tree that is expected to write so many tokens: whether the draft shall go on beside it.

        `now`: seconds, by any clock.
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
        """What came of that tree."""
        if self._maker:
            self._maker.audit(tokens, self._hoped)
        self._maker = None

    def pause(self) -> None:
        """Something else comes between this pass and the next."""
        self._since = self._maker = None

    def _decide(self) -> None:
        """A turn is over."""
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
