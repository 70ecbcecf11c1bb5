"""Whatever writes fastest: in every round nothing, copied guesses, or drafted ones, by what they have gained so far.

The question of a round is which of these makes the most tokens per second (`cost.py`):

    nothing     one node: 1 / pass(1)
    copies      the tree of `sssd.py`, cut to the size that pays; finding it costs next to nothing
    a draft     a chain of k tokens is foretold to gain 1 + a + … + a^k, where a is the share of tokens in which the
                draft has agreed; reading what the draft has missed counts

An `AutoState` learns three things, and keeps them from one sequence to the next: pass times, how far the copies'
probabilities can be trusted, how often the draft agrees. A draft that was asked little gets the benefit of the doubt,
which fades as it is asked: so where it does not pay, it is tried a few times and left alone. Nothing of this decides
what is written, only how it is guessed.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf, sqrt
from time import perf_counter
from typing import Any

import numpy as np

from edgespec.loop.backend import Session
from edgespec.loop.draft_passes import DraftSteps, run_one
from edgespec.loop.pass_times import FLAT, STEEP, Curve, PassTimes
from edgespec.loop.planner import Context, GoesAhead
from edgespec.loop.tree import DraftTree, best_nodes, root_only
from edgespec.planners.cost import chain_goodput
from edgespec.planners.drafting import agreed
from edgespec.planners.guard import Guard
from edgespec.planners.path_cost import best_part, rows_of
from edgespec.planners.specexec import SpecExecPlanner
from edgespec.planners.sssd import SssdPlanner

BELIEF = 4.0  # things hoped for that count as seen before any was
AGREEMENT = 0.7  # what is believed of a draft before it was asked
DOUBT = 0.2  # benefit of the doubt, over the root of the tokens a draft was asked for
GAIN = 1.1  # by which a draft must be foretold to beat what writes fastest without it: trying costs, too
EARLIER = 4  # so many tokens of earlier texts dispel as much doubt as one of this text
MOST_EARLIER = 64  # … and no more than so many count
LEAST_TRUST = 0.05
HEAVY = 0.8  # of a plain pass, what another one's worth of experts costs until that is seen
FURTHER = 16  # times the nodes of the largest pass seen, a tree may have: what more cost, is foretold too far
PATIENCE = 64  # tokens in memory, besides the prompt's number, before a draft is first asked: it costs a tenth of them
PLAIN = 3  # passes in memory before anything is guessed: the first after loading may take twice as long as others …
PLAIN_STREAMED = 1  # … and where weights are streamed: processors differ in what nodes cost them
RETRIED = 16  # runs after which a draft that did not pay gets a new chance: machines and texts change


@dataclass(slots=True)
class Share:
    """How many of the things hoped for came; earlier ones fade."""

    fading: float  # of what was seen, with each further thing
    came: float = 0.0
    hoped: float = 0.0

    def add(self, came: float, hoped: float) -> None:
        """So many more."""
        self.fade(hoped)
        self.came, self.hoped = self.came + came, self.hoped + hoped

    def fade(self, times: float) -> None:
        """What was seen counts less."""
        left = self.fading**times
        self.came, self.hoped = self.came * left, self.hoped * left

    def value(self, belief: float) -> float:
        """The share; `belief` is what was believed before anything was seen."""
        return (self.came + belief * BELIEF) / (self.hoped + BELIEF)


@dataclass(slots=True)
class AutoState:
    """What is known of a target, its draft and the copies at work; kept from text to text, and from run to run."""

    target: PassTimes = field(default_factory=PassTimes)
    draft: PassTimes = field(default_factory=PassTimes)
    copies: Share = field(default_factory=lambda: Share(0.99))  # copied guesses that were right, of those foretold
    agreement: Share = field(default_factory=lambda: Share(0.998))  # tokens the draft knew best, of all it was asked
    worth: Share = field(default_factory=lambda: Share(0.98))  # tokens that drafted rounds wrote, of those foretold
    guard: Guard = field(default_factory=Guard)  # of drafts that go on while the target works
    runs: int = 0  # in which it was learned
    written: int = 0  # tokens, in all of them

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        shares = {name: [share.came, share.hoped] for name, share in self._shares()}
        costs = {"target": self.target.as_list(), "draft": self.draft.as_list()}
        return {**costs, "ahead": self.guard.as_dict(), "runs": self.runs, "written": self.written, **shares}

    def recall(self, known: dict[str, Any]) -> None:
        """Start from what `as_dict` gave. Every so many runs what is known of the draft is left out.

        Raises:
            KeyError, TypeError, ValueError: it did not.
        """
        self.runs, self.written = int(known["runs"]) + 1, int(known["written"])
        self.target.recall(known["target"])
        again = self.runs % RETRIED == 0
        if not again:
            self.draft.recall(known["draft"])
            self.guard.recall(known["ahead"])
        for name, share in self._shares():
            if name == "copies" or not again:
                share.came, share.hoped = map(float, known[name])

    def _shares(self) -> Iterable[tuple[str, Share]]:
        return [("copies", self.copies), ("agreement", self.agreement), ("worth", self.worth)]


def new_auto_state(streams: bool, experts: tuple[int, int] | None = None) -> AutoState:
    """Nothing is known but what passes read from a disk or over a bus.

    Args:
        streams: all of them the same weights, so that nodes are cheap.
        experts: those that their nodes choose: as for `cost.Curve`.
    """
    return AutoState(PassTimes(HEAVY if experts else FLAT if streams else STEEP, experts))


@dataclass(frozen=True, slots=True)
class _Planned:
    """What a round was hoped to gain."""

    length: int  # of the text
    rows: int  # of the pass
    copied: float = 0.0  # right guesses foretold of copies
    drafted: DraftTree | None = None  # before it was cut
    seconds: float = 0.0  # of drafting
    rate: Callable[[float], float] | None = None  # tokens per second foretold of drafting, by the draft's agreement
    expected: float = 0.0  # tokens, of a drafted tree


class AutoPlanner:
    """See the module. Either of copies and draft may be missing."""

    def __init__(
        self,
        name: str,
        pace: AutoState,
        copies: SssdPlanner | None = None,
        draft: SpecExecPlanner | None = None,
        patience: int = 0,
    ) -> None:
        """
        Args:
            name: what a user calls it.
            pace: what is known; learned on.
            copies: makes copied guesses.
            draft: makes drafted guesses; counts its passes in `pace.draft`.
            patience: tokens to be written before the draft is asked for the first time, besides those it has to read.
        """
        self.name = name
        self._pace = pace
        self._copies = copies
        self._draft = draft
        self._ahead = draft if isinstance(draft, GoesAhead) else None
        self._patience, self._first_asked = patience, 0
        self._text = Share(0.98)  # as `pace.agreement`, of this text alone
        self._planned: _Planned | None = None
        self._beside = False  # the draft went on in this round

    @property
    def model_seconds(self) -> float:
        """Time spent in draft-model passes since `begin`."""
        return self._draft.model_seconds if self._draft else 0.0

    @property
    def model_passes(self) -> int:
        """Draft passes since `begin`."""
        return self._draft.model_passes if self._draft else 0

    @property
    def hidden_seconds(self) -> float:
        """Time since `begin` of draft passes beside which the target worked."""
        return self._ahead.hidden_seconds if self._ahead else 0.0

    @property
    def went_on(self) -> int:
        """Rounds since `begin` whose search went on in the next."""
        return self._ahead.went_on if self._ahead else 0

    @property
    def draft_session(self) -> Session | None:
        """See `Drafts`."""
        return self._draft.draft_session if self._draft else None

    @property
    def plain_seconds(self) -> float:
        """See `Planner`; at the length of the text when it was last planned."""
        cost = self._pace.target.at(self._planned.length) if self._planned else None
        return cost.plain if cost and cost.plain_was_seen else 0.0

    def begin(self, prompt_ids: Sequence[int]) -> None:
        """A generation starts; the draft reads the prompt if it is likely to be asked."""
        self._text, self._planned, self._beside = Share(self._text.fading), None, False
        self._pace.guard.pause()
        if self._patience:
            self._first_asked = self._patience + len(prompt_ids)
        if self._copies:
            self._copies.begin(prompt_ids)
        if self._draft:
            cost = self._pace.target.at(len(prompt_ids))
            likely = self._may_try
            if cost is not None:
                likely = self._foretell(self._draft, cost, len(prompt_ids), 1, self._draft.depth) > GAIN / cost.plain
            self._draft.begin(prompt_ids, read=likely)

    def plan(self, context: Context, budget: int) -> DraftTree:
        """The tree that promises most."""
        return run_one(self.planning(context, budget))

    def planning(self, context: Context, budget: int) -> DraftSteps[DraftTree]:
        """The steps of `plan`."""
        length, pace = len(context.token_ids), self._pace
        if known := pace.target.at(length):
            known = known.shared(context.texts)
        # Before the first pass of all only proportions are known: enough for copies.
        cost = known or Curve(np.ones(1), np.ones(1), pace.target.slope, pace.target.experts, context.texts)
        head = context.head
        tree, rate = root_only(context.token_ids[-1]), 1 / float(cost.seconds(1 + (head or 0)))
        planned = _Planned(length, 1 + (head or 0))
        streams, seen = pace.target.slope == FLAT, pace.target.least_seen(context.texts)
        # Where texts share passes, what was remembered of those over one node has to do. Paths tell no cost then: where
        # weights are streamed they are guessed at once.
        company = context.texts > 1 and (pace.runs or (streams and head is not None))
        if not company and seen < (PLAIN_STREAMED if streams else PLAIN):
            self._planned = planned
            return tree
        if known and (head is None or context.texts == 1):  # of paths in company larger passes are never learned
            budget = min(budget, int(FURTHER * known.sizes[-1] / context.texts))
        if self._copies:
            # A long run that came true is one event: the next guesses are not the more probable for it.
            trust = min(1.0, max(LEAST_TRUST, pace.copies.value(1.0)))
            copied = self._copies.plan(replace(context, least=min(0.5, cost.least / trust)), budget)
            found, goodput = best_part(copied, 0.0, cost, max_leaves=context.max_leaves, head=head, trust=trust)
            if len(found) > 1:
                tree, rate = found, goodput
                planned = _Planned(length, _rows(tree, head), copied=float(np.exp(tree.log_probs[1:]).sum()))
        if self._draft and (depth := min(self._draft.depth, context.max_depth, budget)) > 0:
            behind = self._draft.behind(context.token_ids)
            asked = streams
            if known:
                asked = self._foretell(self._draft, known, length, behind, depth, head) > GAIN * rate
            if asked:
                context = replace(context, cost=known)
                tree, planned = yield from self._drafted(self._draft, context, budget, behind, depth)
        self._planned = planned
        return tree

    def _drafted(
        self, draft: SpecExecPlanner, context: Context, budget: int, behind: int, depth: int
    ) -> DraftSteps[tuple[DraftTree, _Planned]]:
        """Ask the draft, and keep of its tree what pays."""
        cost, length = context.cost, len(context.token_ids)
        started, draft_cost = draft.model_seconds, self._draft_cost(draft, length, context.texts)
        head, rate = context.head, None
        if cost and draft_cost:
            rate = partial(chain_goodput, behind=behind, deepest=depth, cost=cost, draft_cost=draft_cost, head=head)
        found = yield from draft.planning(context, budget)
        seconds = draft.model_seconds - started
        if cost:
            tree, _ = best_part(found, seconds, cost, max_leaves=context.max_leaves, head=head)
        else:
            tree = best_nodes(found, budget, context.max_leaves)
        expected = float(np.exp(tree.log_probs).sum())  # the root counts as the target's own token
        return tree, _Planned(length, _rows(tree, head), drafted=found, seconds=seconds, rate=rate, expected=expected)

    def beside(self, nodes: int) -> AbstractContextManager[None]:
        """As the draft's, where its tree is judged, and where it gains by going on."""
        planned, guard = self._planned, self._pace.guard
        if self._ahead is None or planned is None or planned.drafted is None:
            guard.pause()
            self._beside = False
            return nullcontext()
        self._beside = guard.next(planned.expected, perf_counter())
        return self._ahead.beside(nodes) if self._beside else nullcontext()

    def foresee(self, context: Context, count: int, seconds: float) -> list[int]:
        """As the draft does; nothing without one."""
        return self._draft.foresee(context, count, seconds) if self._draft else []

    @property
    def _agreement(self) -> float:
        return self._text.value(self._pace.agreement.value(AGREEMENT))

    @property
    def _may_try(self) -> bool:
        """Whether a draft of which nothing is known may be asked: reading the text takes it a while, too."""
        return self._pace.written >= self._first_asked

    def _draft_cost(self, draft: SpecExecPlanner, length: int, texts: float) -> Curve | None:
        """Of the draft's passes, as far as texts that are planned at once share them; None: none was made yet."""
        cost = self._pace.draft.at(length)
        return cost.shared(min(draft.company, texts)) if cost else None

    def _foretell(
        self, draft: SpecExecPlanner, cost: Curve, length: int, behind: int, depth: int, head: int | None = None
    ) -> float:
        """Tokens per second that asking the draft may bring, in favour of the doubt."""
        draft_cost = self._draft_cost(draft, length, cost.texts)
        if draft_cost is None:
            return inf if self._may_try else 0.0
        asked = self._text.hoped + min(self._pace.agreement.hoped, MOST_EARLIER) / EARLIER
        agreement = min(0.98, self._agreement + DOUBT / sqrt(1 + asked))
        return chain_goodput(agreement, behind, depth, cost, draft_cost, head) * self._pace.worth.value(1.0)

    def accept(self, tokens: Sequence[int], seconds: float) -> None:
        """Learn what the round has cost and gained."""
        if self._copies:
            self._copies.accept(tokens, seconds)
        if self._draft:
            self._draft.accept(tokens, seconds)
        if (planned := self._planned) is None or not tokens:
            return
        pace, gained = self._pace, len(tokens) - 1
        pace.written += len(tokens)
        alone = seconds > 0
        beside, self._beside = self._beside, False
        if not alone:
            pace.guard.pause()
        pace.guard.wrote(len(tokens))
        if alone and not beside:  # beside a draft passes take longer: the guard counts that
            pace.target.add(planned.rows, seconds, planned.length)
        self._text.fade(1)
        if planned.copied and alone:
            pace.copies.add(gained, planned.copied)
        if planned.drafted is not None:
            hits, asked = agreed(planned.drafted, tokens)
            pace.agreement.add(hits, asked)
            self._text.add(hits, asked)
            if planned.rate and alone:  # in hindsight: that the draft agreed less than believed is counted once
                pace.worth.add(len(tokens), planned.rate(self._agreement) * (seconds + planned.seconds))

    def close(self) -> None:
        """Free the draft's session."""
        if self._draft:
            self._draft.close()


def _rows(tree: DraftTree, head: int | None) -> int:
    return len(tree) if head is None else rows_of(tree.parents, head)
