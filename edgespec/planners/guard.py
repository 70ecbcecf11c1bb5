"""Decides by measured tokens per second whether the draft goes on while the target runs.

The better way is taken for many steps (a rest), then the other one for `BLOCK` steps (a trial).
"""

from collections import deque
from dataclasses import dataclass, field
from math import sqrt
from typing import Any

BLOCK = 6  # steps of a trial
REST = 16  # steps of the first rest; each trial doubles it, and one that changes the better way sets it to 32
LONGEST = 1024  # steps of the longest rest
SAMPLES = 64  # last steps of each way that count
AUDITED = 32  # trees over which `Way.wrote` and `Way.hoped` fade
MARGIN = 1.01  # ratio of the rates that going on must exceed
SURE = 1.5  # standard errors of the difference that it must exceed in addition, if it was not better before


@dataclass(slots=True)
class Way:
    """
    Attributes:
        samples: (tokens expected of a pass's tree, seconds since the pass before).
        wrote: tokens that its trees gained, a fading sum; wrote / hoped corrects expected tokens.
        hoped: tokens that were expected of these trees, a fading sum.
    """

    samples: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=SAMPLES))
    wrote: float = 8.0
    hoped: float = 8.0

    @property
    def rate(self) -> float:
        seconds = sum(seconds for _, seconds in self.samples)
        return sum(tokens for tokens, _ in self.samples) / seconds * self.wrote / self.hoped if seconds else 0.0

    @property
    def error(self) -> float:
        """Standard error of `rate`."""
        rate, seconds = self.rate, sum(seconds for _, seconds in self.samples)
        held = self.wrote / self.hoped
        return sqrt(sum((held * tokens - rate * took) ** 2 for tokens, took in self.samples)) / seconds

    def audit(self, wrote: float, hoped: float) -> None:
        self.wrote += wrote - self.wrote / AUDITED
        self.hoped += hoped - self.hoped / AUDITED


@dataclass(slots=True)
class Guard:
    """
    Attributes:
        waiting: the draft works only between the target's passes.
        ahead: the draft also works while the target runs.
        goes_on: it does so in the pass that was begun last.
        better: going on was better when the ways were last compared.
    """

    waiting: Way = field(default_factory=Way)
    ahead: Way = field(default_factory=Way)
    goes_on: bool = False
    better: bool = False
    _left: int = REST  # steps left of this rest or trial
    _rest: int = REST
    _since: float | None = None  # when the last pass began
    _hoped: float = 0.0  # tokens expected of its tree
    _maker: Way | None = None  # the way by which this tree was made

    def as_dict(self) -> dict[str, Any]:
        ways = {name: [list(way.samples), way.wrote, way.hoped] for name, way in self._ways()}
        return {"better": self.better, "rest": self._rest, **ways}

    def recall(self, known: dict[str, Any]) -> None:
        """
        Raises:
            KeyError, TypeError, ValueError: `known` does not have them.
        """
        self.better, self._rest = bool(known["better"]), min(LONGEST, max(REST, int(known["rest"])))
        for name, way in self._ways():
            samples, way.wrote, way.hoped = known[name]
            way.samples.extend((float(tokens), float(seconds)) for tokens, seconds in samples)
        self._turn(self.better, self._rest)

    def _ways(self) -> list[tuple[str, Way]]:
        return [("alone", self.waiting), ("beside", self.ahead)]

    def next(self, expected: float, now: float) -> bool:
        """
        Args:
            expected: tokens expected of the tree of the pass that begins.
            now: seconds, by any clock.

        Returns:
            True if the draft goes on during this pass.
        """
        self._maker = None
        if self._since is not None:
            self._maker = self.ahead if self.goes_on else self.waiting
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
        waiting, ahead = self.waiting, self.ahead
        doubt = 0.0 if self.better else SURE * sqrt(waiting.error**2 + ahead.error**2)
        better = ahead.rate > MARGIN * waiting.rate + doubt
        self._rest = min(LONGEST, 2 * (self._rest if better == self.better else REST))
        self.better = better
        self._turn(better, self._rest)

    def _turn(self, goes_on: bool, steps: int) -> None:
        self.goes_on, self._left = goes_on, steps
