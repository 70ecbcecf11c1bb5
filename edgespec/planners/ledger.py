"""Bounds what draft tokens may lose against plain decoding, whatever was predicted of them.

Each way of drafting has an account: the time of its steps less that of plain decoding for the same tokens, in plain
passes. The losses of all ways stay within an allowance; what one sequence lost at once, the next one begins without. A
way that exceeds it rests, each time twice as long. Plain passes between steps with draft tokens show what plain
decoding takes at present. Predictions choose among the ways that may be used.
"""

from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from statistics import median
from typing import Any

from pydantic import BaseModel, Field, FiniteFloat

from edgespec.machine.measurements import Amount

ALLOWANCE = 0.015  # plain passes that may be lost for each token of the sequence, besides `start`
MOST_START = 1.0
MOST_GAINED = 8.0  # plain passes that an account may be ahead: a good hour does not pay for a bad one
MOST_SAVED = 16.0  # plain passes of allowance that are kept for trials: a draft may have much to read
CARRIED = 2.0  # of these, those that the next sequence begins with
MOST_LENT = 4.0  # plain passes: about a tile
FIRST_REST, LONGEST_REST = 16, 1024  # tokens
REST_OF_NEW = 64  # most tokens of a rest that a new sequence begins with: texts differ
FARTHEST = 32  # most steps with draft tokens from one plain pass to the next
COMPARED = 3  # last passes that count
LOOKED = 0.25  # plain passes that a trial takes at most before its first step
LOOKS = 8  # looks of a trial before its first step, at least, where `Ledger.most` is given
GLANCE = 0.02  # plain passes: a shorter look does not count, since looking up copies is nearly free
JUMP = 2.0  # ratio of two plain passes that shows another load of the machine
SOONER = 4  # a distance is divided by it where a sequence begins, and multiplied by it where much was gained
SURE = 8  # least distance of plain passes at which these are well known
SLOW = 1.5  # the usual plain pass takes at most this multiple of the fastest: the others were held up


class Accounts(BaseModel):
    """`Ledger.as_dict` of an earlier run; of each account its `lost`, `rest`, `resting` and `idle`."""

    plain: Amount
    distance: int = Field(ge=1)
    saved: Amount
    start: Amount = MOST_START
    accounts: dict[str, tuple[FiniteFloat, int, Amount, Amount]]


@dataclass(slots=True)
class Account:
    """
    Attributes:
        lost: plain passes lost in this sequence; negative: gained.
        rest: tokens of the next rest.
        resting: tokens left of this rest.
        tried: tokens of its steps since `settle` last set it to 0.
        before: `lost` at that time.
        is_trial: one of these steps came at least `rest` tokens after the step before it.
        idle: tokens since the last step of this way.
        looked: plain passes that a trial took so far, without a step.
    """

    lost: float = 0.0
    rest: int = FIRST_REST
    resting: float = 0.0
    tried: float = 0.0
    before: float = 0.0
    idle: float = 0.0
    looked: float = 0.0
    is_trial: bool = False

    def use(self, tokens: float) -> None:
        """Count a step of this way; one after a long time is a trial."""
        self.is_trial = self.is_trial or self.idle >= self.rest
        self.idle, self.looked, self.tried = 0.0, 0.0, self.tried + tokens

    def look(self, passes: float) -> None:
        """Count plain passes of a trial whose draft tokens were not worth a pass; too many of them put it off."""
        self.looked += passes if passes > GLANCE else 0.0
        if self.looked > LOOKED:
            self.put_off()

    def put_off(self) -> None:
        """Let the next trial come later."""
        self.idle, self.looked, self.rest = 0.0, 0.0, min(2 * self.rest, LONGEST_REST)

    def settle(self, allowed: float) -> None:
        """Begin a rest if the way has lost too much; a trial that lost lengthens the next one, a gain shortens it."""
        exceeded = self.lost > max(self.before, allowed)
        if exceeded or (self.is_trial and self.lost > max(self.before, 0.0)):
            self.resting = self.rest if exceeded else self.resting
            self.rest = min(2 * self.rest, LONGEST_REST)
        elif self.tried < self.rest:
            return
        elif self.lost < self.before or self.lost == -MOST_GAINED:
            self.rest = max(self.rest // 2, FIRST_REST)
        self.tried, self.before, self.is_trial = 0.0, self.lost, False


@dataclass(slots=True)
class Ledger:
    """Accounts against plain decoding, for one sequence after the other; or for batches of equally many sequences.

    Attributes:
        first: plain passes before a way that is not known to gain: the first passes of a program may be slow.
        most: plain passes that may be lost for each token, once they are more than `start` and `ALLOWANCE` allow.
        accounts: by the name of the way.
        tokens: of this sequence.
        seconds: of its steps.
        distance: steps with draft tokens from one plain pass to the next.
        since: those since the last plain pass.
        plain: seconds of a plain pass; 0: unknown.
        saved: plain passes that earlier sequences were allowed to lose and did not, for trials.
        start: plain passes that this sequence may lose at once.
        lent: the same, where a way promises a gain at its start: its later tokens pay for that.
    """

    first: int = 1
    most: float = 0.0
    accounts: defaultdict[str, Account] = field(default_factory=lambda: defaultdict(Account))
    tokens: float = 0.0
    seconds: float = 0.0
    distance: int = 1
    since: int = 0
    plain: float = 0.0
    saved: float = 0.0
    start: float = MOST_START
    lent: float = 0.0
    _plain: deque[float] = field(default_factory=lambda: deque(maxlen=COMPARED))
    _more: deque[float] = field(default_factory=lambda: deque(maxlen=COMPARED))  # passes with draft tokens since
    _seen: int = 0  # plain passes of this sequence
    _usual: float = 0.0  # `plain` of the sequence before
    # Of each way in the last step: its account, seconds of drafting and of its pass, tokens gained, `lost` before.
    _last: list[tuple[Account, float, float, float]] = field(default_factory=list)

    def begin(self) -> None:
        """Start a sequence: losses are forgotten, gains and rests in part."""
        left = self.start + ALLOWANCE * self.tokens - self._lost
        self.start = max(0.0, min(left, MOST_START))
        self.saved = 0.0 if self.most else max(0.0, min(self.saved + left - self.start, MOST_SAVED))
        self._usual = self.plain
        self._plain.clear()
        self._more.clear()
        self.tokens, self.seconds, self._seen, self.since, self._last, self.lent = 0.0, 0.0, 0, 0, [], 0.0
        self.distance = max(1, self.distance // SOONER)
        for one in self.accounts.values():
            one.lost = one.before = max(min(one.lost, 0.0), 0.0 if self.most else -CARRIED)
            one.resting, one.tried = min(one.resting, REST_OF_NEW), 0

    def resume(self) -> None:
        """Go on after batches of other sizes. Sizes change often, so losses are forgotten only where tokens paid."""
        if not self.tokens or self._allowed - self._lost > MOST_SAVED:
            self.begin()
            return
        self._usual, self.distance = self.plain, min(self.distance, SURE)
        self._plain.clear()  # other texts, with other times
        self._more.clear()
        for one in self.accounts.values():
            one.lost = max(one.lost, -CARRIED)

    def room(self, way: str) -> float:
        """
        Returns:
            Seconds that the next step of this way may lose; 0 also while it rests, and where a plain pass is due.
        """
        one = self.accounts[way]
        unknown = self._seen < self.first and not self.lent and not self.has_gained(way)
        if one.resting or self.since >= self.distance or unknown:
            return 0.0
        saved = self.saved if one.idle >= one.rest else 0.0
        return max(0.0, self._allowed + saved - self._lost - min(one.lost, 0.0)) * self.plain

    def lend(self, tokens: int) -> None:
        """Let a sequence of at most `tokens` tokens lose at its start what it may lose in all."""
        self.lent = min(MOST_LENT, self.most * tokens)

    def may_look(self, seconds: float) -> bool:
        """
        Returns:
            True if looks leave room for a tile later on.
        """
        return self._lost + seconds / self.plain <= self.start + ALLOWANCE * self.tokens

    def has_gained(self, way: str) -> bool:
        """
        Returns:
            True if the way has gained at least a plain pass, in this sequence or the last one.
        """
        return self.accounts[way].lost <= -1.0

    def is_ahead(self, way: str) -> bool:
        """
        Returns:
            True if the way has gained enough to pay for a larger step than any that was measured.
        """
        return self.has_gained(way) and self.distance >= SURE

    def is_due(self, way: str, tokens: int) -> bool:
        """
        Args:
            way: a way.
            tokens: further tokens to wait.

        Returns:
            True if the way was idle for so long that it is to be tried, whatever is predicted of it.
        """
        one = self.accounts[way]
        return one.idle >= one.rest + tokens

    def is_hopeful(self, way: str) -> bool:
        """
        Returns:
            True if the way has gained, has failed once at most, or is to be tried again.
        """
        return self.has_gained(way) or self.accounts[way].rest <= 2 * FIRST_REST or self.is_due(way, 0)

    def pay(self, way: str, passes: float) -> None:
        """Charge plain passes that a trial takes before its first step: what was saved pays first."""
        paid = min(self.saved, passes)
        self.saved -= paid
        self.accounts[way].lost += passes - paid

    def add(self, spent: Mapping[str, float], way: str | None, seconds: float, tokens: float) -> None:
        """Record a step.

        Args:
            spent: seconds before the pass, of each way that looked for draft tokens.
            way: whose draft tokens were in the pass; None: it was a plain pass.
            seconds: of the pass.
            tokens: that it gained; of a batch, of each sequence.
        """
        if way is None:
            self._add_plain(seconds)
        if not (plain := self.plain):
            return
        self._last = []
        for name, drafting in spent.items():
            took, gained = (drafting + seconds, tokens) if name == way else (drafting, 0)
            self._last.append((self.accounts[name], took, gained, self.accounts[name].lost))
        self._enter(plain)
        self.tokens += tokens
        self.seconds += sum(spent.values()) + seconds
        for name, one in self.accounts.items():
            one.resting = max(0.0, one.resting - tokens)
            if name == way:
                one.use(tokens)
                continue
            if one.idle >= one.rest:
                one.look(min(spent.get(name, 0.0) / plain, LOOKED / LOOKS if self.most else inf))
            one.idle += tokens
        if way:
            self._more.append(seconds)
            self._find_plain()
            self.since += 1
        if self._exceeded:
            self.distance = 1  # a plain pass shows whether the way has lost, or all passes take longer

    def _enter(self, plain: float) -> None:
        """Enter the last step, in plain passes of `plain` seconds; again if these turn out to take another time."""
        for account, took, gained, before in self._last:
            account.lost = max(before + took / plain - gained, -MOST_GAINED)

    @property
    def _exceeded(self) -> bool:
        """A way of the last step has lost too much."""
        return any(account.lost > self._allowed for account, *_ in self._last)

    def _find_plain(self) -> None:
        usual = min(median(self._plain), SLOW * min(self._plain)) if self._plain else self._usual
        if self._more:  # passes with draft tokens are never faster: if they are, the plain ones are old
            usual = min(usual, median(self._more) if len(self._more) == COMPARED else max(self._more))
        self.plain = usual

    def _add_plain(self, seconds: float) -> None:
        if (slow := self._exceeded and seconds > JUMP * self.plain) or 0 < seconds * JUMP < self.plain:
            self._enter(seconds)  # other programs came or went, which the last step felt, too
            self.distance = 1
            if slow:
                self._plain.clear()
        elif self.since and self._seen >= self.first:
            sure = any(one.lost == -MOST_GAINED for one in self.accounts.values())
            self.distance = min((SOONER if sure else 2) * self.distance, FARTHEST)
        for one in self.accounts.values():
            one.settle(self._allowed)
        self._plain.append(seconds)
        self._more.clear()
        self._find_plain()
        self._seen, self.since = self._seen + 1, 0

    @property
    def _lost(self) -> float:
        return sum(max(one.lost, 0.0) for one in self.accounts.values())

    @property
    def _allowed(self) -> float:
        # What was earned while passes were faster pays for few of the present ones.
        tokens = min(self.tokens, self.seconds / self.plain) if self.plain else 0.0
        return max(self.start + ALLOWANCE * tokens, self.most * tokens, self.lent)

    def as_dict(self) -> dict[str, Any]:
        """For JSON: what the next run begins with."""
        accounts = {name: [one.lost, one.rest, one.resting, one.idle] for name, one in self.accounts.items()}
        kept = {"plain": self.plain, "distance": self.distance, "saved": self.saved, "start": self.start}
        return {**kept, "accounts": accounts}

    def recall(self, known: Accounts) -> None:
        """Begin with the values of `as_dict`."""
        self._usual = self.plain = known.plain
        self.distance = min(FARTHEST, known.distance)
        self.saved, self.start = min(MOST_SAVED, known.saved), min(MOST_START, known.start)
        for name, (lost, rest, resting, idle) in known.accounts.items():
            self.accounts[name] = Account(lost, min(LONGEST_REST, max(FIRST_REST, rest)), resting, idle=idle)
