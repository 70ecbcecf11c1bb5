"""In each step, the candidate with most predicted tokens per second, or plain decoding."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

import numpy as np

from edgespec.loop.backend import Logits, Session
from edgespec.loop.draft_passes import DraftSteps
from edgespec.loop.pass_times import FLAT, STEEP, Curve, PassTimes
from edgespec.loop.passes import Prefill
from edgespec.loop.planner import Context, Planner, PlannerStats
from edgespec.loop.tree import DraftTree, Proposal, only, root_only
from edgespec.planners.guard import Guard
from edgespec.planners.path_cost import rows_of

BELIEF = 4.0  # weight of a prior value, in expected things
HEAVY = 0.8  # with experts, plain passes that a further unit of `weight` costs, until it is measured
FURTHER = 16  # largest tree, as a multiple of the largest pass measured: beyond it pass times are not predictable
PATIENCE = 64  # with weights in memory, tokens generated before a draft is first asked, besides the prompt's number
PLAIN = 3  # plain passes measured before anything is proposed: the first after loading may take twice as long
PLAIN_STREAMED = 1  # the same with streamed weights: processors differ in the cost of nodes
RETRIED = 16  # runs after which a draft that did not pay is tried again: machines and texts change


@dataclass(slots=True)
class Share:
    """Ratio of the things that came to those that were expected, in fading sums.

    Attributes:
        fading: factor of the sums for each further expected thing.
        came: things that came.
        hoped: things that were expected.
    """

    fading: float
    came: float = 0.0
    hoped: float = 0.0

    def add(self, came: float, hoped: float) -> None:
        self.fade(hoped)
        self.came, self.hoped = self.came + came, self.hoped + hoped

    def fade(self, times: float) -> None:
        left = self.fading**times
        self.came, self.hoped = self.came * left, self.hoped * left

    def value(self, belief: float) -> float:
        return (self.came + belief * BELIEF) / (self.hoped + BELIEF)


@dataclass(slots=True)
class AutoState:
    """Measurements of a target and of methods, kept from sequence to sequence and from run to run.

    Attributes:
        target: pass times of the target.
        draft: pass times of the draft.
        copies: copied tokens that were accepted, of those expected.
        agreement: tokens that were the draft's best, of those for which it was asked.
        worth: tokens that steps with the draft gained, of those predicted.
        guard: decides whether the draft goes on while the target runs.
        runs: number of runs of the program.
        written: tokens generated in all of them.
    """

    target: PassTimes = field(default_factory=PassTimes)
    draft: PassTimes = field(default_factory=PassTimes)
    copies: Share = field(default_factory=lambda: Share(0.99))
    agreement: Share = field(default_factory=lambda: Share(0.998))
    worth: Share = field(default_factory=lambda: Share(0.98))
    guard: Guard = field(default_factory=Guard)
    runs: int = 0
    written: int = 0

    @property
    def streams(self) -> bool:
        return self.target.slope == FLAT

    def proportions(self, sequences: int) -> Curve:
        """Pass times in plain passes, before the first pass is measured."""
        return Curve(np.ones(1), np.ones(1), self.target.slope, self.target.experts, sequences)

    def as_dict(self) -> dict[str, Any]:
        shares = {name: [share.came, share.hoped] for name, share in self._shares()}
        costs = {"target": self.target.as_list(), "draft": self.draft.as_list()}
        return {**costs, "ahead": self.guard.as_dict(), "runs": self.runs, "written": self.written, **shares}

    def recall(self, known: dict[str, Any]) -> None:
        """Begin with the values of `as_dict`, every `RETRIED` runs without those of the draft.

        Raises:
            KeyError, TypeError, ValueError: `known` does not have them.
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
    """Args:
    streams: passes read the same weights from a disk or over a bus, so that nodes are cheap.
    experts: as for `Curve`.
    """
    return AutoState(PassTimes(HEAVY if experts else FLAT if streams else STEEP, experts))


@dataclass(frozen=True, slots=True)
class Offer:
    """
    Attributes:
        proposal: its `nodes` are those that pay.
        rate: predicted tokens per second of a step with it.
        expected: draft tokens that are expected to be accepted.
        learn: called after verification with the arguments of `observe`.
    """

    proposal: Proposal
    rate: float
    expected: float = 0.0
    learn: Callable[[Sequence[int], float], None] = lambda tokens, seconds: None


class Candidate(ABC):
    """A planner that `AutoPlanner` can ask.

    Attributes:
        planner: the planner.
        goes_ahead: its draft may go on while the target runs.
    """

    goes_ahead = False

    def __init__(self, planner: Planner) -> None:
        self.planner = planner

    def begin(self, prompt_ids: Sequence[int]) -> None:
        self.planner.begin(prompt_ids)

    def unread(self, token_ids: Sequence[int]) -> Prefill | None:
        """As for `Planner`; None also if it is unlikely to be asked."""
        return self.planner.unread(token_ids)

    def is_ready(self, token_ids: Sequence[int]) -> bool:
        """Prepare to be asked; False: its draft must read too much, which `unread` returns from now on."""
        return True

    @abstractmethod
    def estimate(self, context: Context, budget: int) -> float:
        """Tokens per second to expect if it is asked; 0: do not ask it, inf: asking costs nothing."""

    @abstractmethod
    def propose(self, context: Context, budget: int) -> DraftSteps[Offer]:
        """As for `Planner`; `context.pass_times` is None before the target's first pass."""

    def observe(self, tokens: Sequence[int], seconds: float) -> None:
        self.planner.observe(tokens, seconds)


class AutoPlanner(Planner):
    def __init__(self, name: str, state: AutoState, candidates: Sequence[Candidate]) -> None:
        """
        Args:
            name: as users write it.
            state: measurements, which it continues.
            candidates: the cheapest first; each is asked if its estimate is above the best rate so far.
        """
        self.name = name
        self._state = state
        self._candidates = candidates
        self._with_draft = [one for one in candidates if one.planner.draft_session]
        self._offer: Offer | None = None
        self._asked: Candidate | None = None
        self._length = 0  # of the sequence when `_offer` was made
        self._rows = 0
        self._went_ahead = False

    @property
    def stats(self) -> PlannerStats:
        known = [candidate.planner.stats for candidate in self._with_draft]
        times = self._state.target.at(self._length) if self._offer else None
        return PlannerStats(
            sum(one.draft_passes for one in known), sum(one.draft_seconds for one in known),
            sum(one.hidden_seconds for one in known), sum(one.went_on for one in known),
            plain_seconds=times.plain if times and times.plain_was_seen else 0.0,
        )  # fmt: skip

    @property
    def draft_session(self) -> Session | None:
        return self._with_draft[0].planner.draft_session if self._with_draft else None

    def begin(self, prompt_ids: Sequence[int]) -> None:
        self._offer, self._went_ahead = None, False
        self._state.guard.pause()
        for candidate in self._candidates:
            candidate.begin(prompt_ids)

    def unread(self, token_ids: Sequence[int]) -> Prefill | None:
        readings = (candidate.unread(token_ids) for candidate in self._with_draft)
        return next((reading for reading in readings if reading), None)

    def propose(self, context: Context, budget: int) -> DraftSteps[Proposal]:
        length, sequences, head = len(context.token_ids), context.sequences, context.head or 0
        times = self._state.target.at(length)
        times = times.shared(sequences) if times else None
        rate = 1 / float((times or self._state.proportions(sequences)).seconds(1 + head))
        offer, asked = Offer(Proposal(root_only(context.token_ids[-1])), rate), None
        if self._may_propose(context):
            context = replace(context, pass_times=times)
            if times and (context.head is None or sequences == 1):  # shared paths are not measured
                budget = min(budget, int(FURTHER * times.sizes[-1] / sequences))
            for candidate in self._candidates:
                if candidate.estimate(context, budget) > offer.rate and candidate.is_ready(context.token_ids):
                    offer, asked = (yield from candidate.propose(context, budget)), candidate
        self._offer, self._asked, self._length = offer, asked, length
        self._rows = _rows(offer.proposal, context.head)
        return offer.proposal

    def _may_propose(self, context: Context) -> bool:
        """
        Returns:
            True if enough plain passes were measured; for shared passes, if there were earlier runs, or paths stream.
        """
        state = self._state
        if context.sequences > 1 and (state.runs or (state.streams and context.head is not None)):
            return True
        return state.target.least_seen(context.sequences) >= (PLAIN_STREAMED if state.streams else PLAIN)

    def while_target_runs(self, nodes: int) -> AbstractContextManager[None]:
        guard, offer, asked = self._state.guard, self._offer, self._asked
        self._went_ahead = False
        if offer is None or asked is None or not asked.goes_ahead:
            guard.pause()
            return nullcontext()
        self._went_ahead = guard.next(1 + offer.expected, perf_counter())
        return asked.planner.while_target_runs(nodes) if self._went_ahead else nullcontext()

    def saw(self, tree: DraftTree, path: Sequence[int], logits: Logits) -> None:
        for candidate in self._candidates:
            candidate.planner.saw(tree, path, logits)

    def observe(self, tokens: Sequence[int], seconds: float) -> None:
        for candidate in self._candidates:
            candidate.observe(tokens, seconds)
        if self._offer is None or not tokens:
            return
        state = self._state
        state.written += len(tokens)
        went_ahead, self._went_ahead = self._went_ahead, False
        if not seconds:
            state.guard.pause()
        state.guard.wrote(len(tokens))
        if seconds and not went_ahead:  # a draft that runs meanwhile lengthens the pass, which the guard counts
            state.target.add(self._rows, seconds, self._length)
        self._offer.learn(tokens, seconds)

    def foresee(self, context: Context, count: int, seconds: float) -> list[int]:
        for candidate in self._candidates:
            if found := candidate.planner.foresee(context, count, seconds):
                return found
        return []

    def close(self) -> None:
        for candidate in self._candidates:
            candidate.planner.close()


def _rows(proposal: Proposal, head: int | None) -> int:
    nodes = proposal.nodes
    if head is None:
        return 1 + (0 if nodes is None else len(nodes))
    return rows_of((proposal.tree if nodes is None else only(proposal.tree, nodes)).parents, head)
