"""Whether the draft shall go on while the target works, by what it has gained so far.

On processors that both use nothing says that it pays: the target's pass becomes longer, and what was guessed meanwhile
may be lost. So two ways are compared, alone and beside, in tokens per second. What going on costs in a pass it gains in
the next tree, so a sample is the time from one pass's beginning to the next one's, and the tokens that the next one's
tree is expected to write: 1 + the sum of its nodes' probabilities, which varies far less than what is written. How far
these hold is learned for each way, from what the trees it made did write.

First come `REST` rounds alone, then `BLOCK` beside. The better way goes on, and the other is tried again after 32, 64
… rounds, as long as it loses: what can be lost by trying shrinks. Which was better is remembered from run to run.
"""

from dataclasses import dataclass, field

BLOCK = 4  # rounds of a trial
REST = 16  # rounds between trials, doubled with each that is lost …
LONGEST = 1024  # … up to so many
AUDITED = 32  # trees that tell how far a way's probabilities hold
MARGIN = 1.01  # by which going on must be better


@dataclass(slots=True)
class Way:
    """Fading sums of what one way has brought."""

    tokens: float = 0.0  # expected
    seconds: float = 0.0
    wrote: float = 8.0  # tokens of the trees that it made …
    hoped: float = 8.0  # … and how many were expected

    @property
    def rate(self) -> float:
        """Tokens per second; 0: nothing was seen."""
        return self.tokens / self.seconds * self.wrote / self.hoped if self.seconds else 0.0

    def add(self, tokens: float, seconds: float) -> None:
        """One more sample."""
        self.tokens += tokens - self.tokens / REST
        self.seconds += seconds - self.seconds / REST

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
    better: bool | None = None  # whether going on was, when last compared
    _left: int = REST  # rounds of this turn
    _rest: int = REST
    _since: float | None = None  # when that pass began; None: something else came between
    _hoped: float = 0.0  # tokens expected of its tree
    _maker: Way | None = None  # that made this tree

    def as_list(self) -> list[int]:
        """What another run may begin with; empty: nothing was found out."""
        return [] if self.better is None else [int(self.better), self._rest]

    def recall(self, known: list[int]) -> None:
        """Begin with what `as_list` gave. Raises TypeError, ValueError: it did not."""
        if known:
            better, rest = known
            self.better, self._rest = bool(better), min(LONGEST, max(REST, int(rest)))
            self._turn(self.better, self._rest)

    def next(self, expected: float, now: float) -> bool:
        """A pass begins, over a tree that is expected to write so many tokens: whether the draft shall go on beside it.

        `now`: seconds, by any clock.
        """
        self._maker = None
        if self._since is not None:
            self._maker = self.beside if self.goes_on else self.alone
            self._maker.add(expected, now - self._since)
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
        first = self.better is None and not (self.alone.seconds and self.beside.seconds)
        if first or self.goes_on == self.better:
            self._turn(not self.goes_on, BLOCK)
            return
        better = self.beside.rate > MARGIN * self.alone.rate
        self._rest = REST if self.better is not None and better != self.better else min(LONGEST, 2 * self._rest)
        self.better = better
        self._turn(better, self._rest)

    def _turn(self, goes_on: bool, rounds: int) -> None:
        way = self.beside if goes_on else self.alone
        way.tokens = way.seconds = 0.0
        self.goes_on, self._left = goes_on, rounds
