"""What passes cost, learned from the passes made, and how many guesses are worth it.

More guesses gain more tokens per pass, but drafting them and checking them takes time. What counts is tokens per
second of a whole round, which TurboSpec (arXiv 2406.14066) calls goodput. With the tree's nodes ordered by the
probability p that they are right, and the n best of them kept:

    goodput(n) = (1 + p_1 + … + p_n) / (drafting + pass(n + 1))

A disk that streams the weights makes `pass` flat, and wide trees win; a model that a weak processor computes from
memory makes it steep, and a few sure guesses win. Costs steer only how the tree grows, never what is written.
"""

from collections import deque
from dataclasses import dataclass, field
from statistics import fmean, median

import numpy as np
from numpy.typing import ArrayLike

from edgespec.tree import FloatArray

REMEMBERED = 8  # passes of about one size; costs change with the text's length and with what else the machine does
TRIAL = 4  # rounds by which drafting is judged
FIRST_REST = 16  # rounds; each further rest in a row is twice as long
APART = 3  # two sizes of pass so many times apart show how the cost grows


class PassCost:
    """Seconds that a pass takes, by its number of nodes: a curve through the last passes of each size."""

    def __init__(self) -> None:
        self._passes: dict[int, deque[tuple[int, float]]] = {}  # bits of the size -> passes (nodes, seconds)
        self._last = 0

    def add(self, nodes: int, seconds: float) -> None:
        """A pass over `nodes` nodes took `seconds`."""
        self._passes.setdefault(nodes.bit_length(), deque(maxlen=REMEMBERED)).append((nodes, max(seconds, 1e-9)))
        self._last = nodes

    @property
    def known(self) -> bool:
        """Whether the passes made show how the cost grows with the nodes."""
        sizes = [nodes for passes in self._passes.values() for nodes, _ in passes]
        return bool(sizes) and max(sizes) >= APART * min(sizes)

    def probe(self, budget: int) -> int:
        """A number of guesses for the next pass that helps to make the cost known."""
        small, large = budget // 16, min(budget, max(2, budget // 2))
        return large if 0 < self._last <= 1 + 2 * small else small

    def seconds(self, nodes: ArrayLike) -> FloatArray:
        """What passes over `nodes` nodes will take; only when it is `known`. The shape of `nodes`.

        Straight lines between the sizes seen, and on beyond them; never falling, nor growing faster than the nodes do.
        """
        seen = [list(zip(*self._passes[bits], strict=True)) for bits in sorted(self._passes)]
        size = np.array([fmean(sizes) for sizes, _ in seen])
        took = np.maximum.accumulate([median(times) for _, times in seen])
        wanted = np.asarray(nodes, np.float64)
        slopes = np.diff(took) / np.diff(size)
        below = np.maximum(took[0] - slopes[0] * (size[0] - wanted), took[0] * wanted / size[0])
        above = took[-1] + slopes[-1] * (wanted - size[-1])
        return np.select([wanted < size[0], wanted > size[-1]], [below, above], np.interp(wanted, size, took))


class Trial:
    """Whether drafting pays at all. Where drafted rounds wrote slower than plain passes, it rests, longer each time."""

    def __init__(self) -> None:
        self._rounds: deque[tuple[int, float]] = deque(maxlen=TRIAL)
        self._resting = 0  # rounds to come
        self._rest = FIRST_REST

    def drafts(self) -> bool:
        """Whether the next round shall draft."""
        self._resting -= 1
        return self._resting < 0

    def add(self, tokens: int, seconds: float, plain_seconds: float) -> None:
        """A drafted round wrote `tokens` in `seconds`; a plain pass takes `plain_seconds`."""
        self._rounds.append((tokens, seconds))
        if len(self._rounds) < TRIAL:
            return
        written, took = (sum(values) for values in zip(*self._rounds, strict=True))
        if written * plain_seconds >= took:
            self._rest = FIRST_REST
            return
        self._resting, self._rest = self._rest, 2 * self._rest
        self._rounds.clear()


@dataclass(frozen=True, slots=True)
class Pace:
    """What is known of a target and a planner at work; kept from text to text."""

    cost: PassCost = field(default_factory=PassCost)  # of the target's passes
    trial: Trial = field(default_factory=Trial)


def goodput(log_probs: FloatArray, spent: float, cost: PassCost) -> FloatArray:
    """Tokens per second of a round that keeps the 0, 1, …, n best nodes, shape [n + 1].

    Args:
        log_probs: [n] of the nodes, best first, the root left out.
        spent: seconds of drafting.
        cost: of the target's passes.
    """
    tokens = np.concatenate([[1.0], 1 + np.cumsum(np.exp(log_probs))])
    return tokens / (spent + cost.seconds(np.arange(1, len(tokens) + 1)))


def best_size(log_probs: FloatArray, spent: float, cost: PassCost) -> int:
    """How many nodes make the best round; arguments as for `goodput`, but in any order."""
    return int(np.argmax(goodput(-np.sort(-log_probs), spent, cost)))


def worth_reading(
    log_probs: FloatArray, unread: FloatArray, budget: int, spent: float, cost: PassCost, draft_cost: PassCost
) -> int:
    """How many more nodes the draft should read in its next pass; 0: stop drafting.

    A node that is read gets a child that is right at most as often as itself. If even so the round would not
    become better, drafting ends. Gains shrink as a tree grows, so looking one pass ahead is enough.

    Args:
        log_probs: [n] of the nodes found so far, best first, at most `budget`.
        unread: [m] of those that could be read next, best first.
        budget: most nodes of the tree.
        spent: seconds of drafting so far.
        cost: of the target's passes.
        draft_cost: of the draft's passes.
    """
    rates = goodput(log_probs, spent, cost)
    size = int(np.argmax(rates))
    more = np.arange(1, len(unread) + 1)
    tokens = 1 + np.exp(log_probs[:size]).sum() + np.cumsum(np.exp(unread))
    seconds = spent + draft_cost.seconds(more) + cost.seconds(np.minimum(size + more, budget) + 1)
    best = tokens / seconds
    return int(np.argmax(best)) + 1 if len(unread) and best.max() > rates[size] else 0
