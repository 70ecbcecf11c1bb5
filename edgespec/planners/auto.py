"""In every step, the candidate with the most tokens per second, or plain decoding.

A candidate is asked if its estimate beats the best rate so far. `AutoState` outlives the sequence.
"""

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

BELIEF = 4.0  # things hoped for that count as seen before any was
HEAVY = 0.8  # of a plain pass, what another one's worth of experts costs until that is seen
FURTHER = 16  # times the nodes of the largest pass seen, a tree may have: beyond that pass times are not predictable
PATIENCE = 64  # tokens in memory, besides the prompt's number, before a draft is first asked: it costs a tenth of them
PLAIN = 3  # passes in memory before anything is proposed: the first after loading may take twice as long as others
PLAIN_STREAMED = 1  # the same where weights are streamed: processors differ in what nodes cost them
RETRIED = 16  # runs after which a draft that did not pay gets a new chance: machines and texts change


@dataclass(slots=True)
class Share:
    fading: float  # of what was seen, with each further thing
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
    """Measurements of a target, its draft and the copies at work; kept from sequence to sequence and run to run.

    Attributes:
        copies: copied tokens that were accepted, of those expected.
        agreement: tokens the draft knew best, of all it was asked.
        worth: tokens of drafted steps, of those predicted.
        guard: of drafts that go on while the target works.
        runs: in which it was learned.
        written: tokens, in all of them.
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
        """Before the first pass only proportions of pass times are known: a pass over one node takes 1."""
        return Curve(np.ones(1), np.ones(1), self.target.slope, self.target.experts, sequences)

    def as_dict(self) -> dict[str, Any]:
        shares = {name: [share.came, share.hoped] for name, share in self._shares()}
        costs = {"target": self.target.as_list(), "draft": self.draft.as_list()}
        return {**costs, "ahead": self.guard.as_dict(), "runs": self.runs, "written": self.written, **shares}

    def recall(self, known: dict[str, Any]) -> None:
        """Start from what `as_dict` gave. Every `RETRIED` runs what is known of the draft is left out.

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
    """Args:
    streams: passes read the same weights from a disk or over a bus, so that nodes are cheap.
    experts: as for `Curve`.
    """
    return AutoState(PassTimes(HEAVY if experts else FLAT if streams else STEEP, experts))


@dataclass(frozen=True, slots=True)
class Offer:
    proposal: Proposal  # with `nodes`: the part that pays
    rate: float  # tokens per second of a step with it
    expected: float = 0.0  # accepted draft tokens
    learn: Callable[[Sequence[int], float], None] = lambda tokens, seconds: None  # verified: arguments as for `observe`


class Candidate(ABC):
    goes_ahead = False  # its draft may go on while the target runs

    def __init__(self, planner: Planner) -> None:
        self.planner = planner

    def begin(self, prompt_ids: Sequence[int]) -> None:
        self.planner.begin(prompt_ids)

    def unread(self, token_ids: Sequence[int]) -> Prefill | None:
        """As for `Planner`, if it is likely to be asked."""
        return self.planner.unread(token_ids)

    def is_ready(self, token_ids: Sequence[int]) -> bool:
        """It is to be asked now. False: it has too much to read, which is `unread` from now on."""
        return True

    @abstractmethod
    def estimate(self, context: Context, budget: int) -> float:
        """Tokens per second that asking it may bring; 0: do not ask, inf: asking costs nothing."""

    @abstractmethod
    def propose(self, context: Context, budget: int) -> DraftSteps[Offer]:
        """As for `Planner`, with the part that pays; `context.pass_times` is None before the target's first pass."""

    def observe(self, tokens: Sequence[int], seconds: float) -> None:
        self.planner.observe(tokens, seconds)


class AutoPlanner(Planner):
    def __init__(self, name: str, state: AutoState, candidates: Sequence[Candidate]) -> None:
        """
        Args:
            name: as users write it.
            state: what is known; learned on.
            candidates: in the order in which they are asked, the cheapest first.
        """
        self.name = name
        self._state = state
        self._candidates = candidates
        self._offer: Offer | None = None
        self._asked: Candidate | None = None
        self._length = 0  # of the sequence when it was made
        self._rows = 0
        self._went_ahead = False

    @property
    def stats(self) -> PlannerStats:
        """See `Planner`; `plain_seconds` at the length of the sequence when it last proposed."""
        known = [candidate.planner.stats for candidate in self._candidates]
        times = self._state.target.at(self._length) if self._offer else None
        return PlannerStats(
            sum(one.draft_passes for one in known), sum(one.draft_seconds for one in known),
            sum(one.hidden_seconds for one in known), sum(one.went_on for one in known),
            plain_seconds=times.plain if times and times.plain_was_seen else 0.0,
        )  # fmt: skip

    @property
    def draft_session(self) -> Session | None:
        sessions = (candidate.planner.draft_session for candidate in self._candidates)
        return next((session for session in sessions if session), None)

    def begin(self, prompt_ids: Sequence[int]) -> None:
        self._offer, self._went_ahead = None, False
        self._state.guard.pause()
        for candidate in self._candidates:
            candidate.begin(prompt_ids)

    def unread(self, token_ids: Sequence[int]) -> Prefill | None:
        readings = (candidate.unread(token_ids) for candidate in self._candidates)
        return next((reading for reading in readings if reading), None)

    def propose(self, context: Context, budget: int) -> DraftSteps[Proposal]:
        length, sequences, head = len(context.token_ids), context.sequences, context.head or 0
        times = self._state.target.at(length)
        times = times.shared(sequences) if times else None
        rate = 1 / float((times or self._state.proportions(sequences)).seconds(1 + head))
        offer, asked = Offer(Proposal(root_only(context.token_ids[-1])), rate), None
        if self._may_propose(context):
            context = replace(context, pass_times=times)
            if times and (context.head is None or sequences == 1):  # of shared paths larger passes are never learned
                budget = min(budget, int(FURTHER * times.sizes[-1] / sequences))
            for candidate in self._candidates:
                if candidate.estimate(context, budget) > offer.rate and candidate.is_ready(context.token_ids):
                    offer, asked = (yield from candidate.propose(context, budget)), candidate
        self._offer, self._asked, self._length = offer, asked, length
        self._rows = _rows(offer.proposal, context.head)
        return offer.proposal

    def _may_propose(self, context: Context) -> bool:
        """True if enough passes over one node were timed.

        Sequences that share passes make none, so earlier runs' have to do. Of shared paths no pass times are learned:
        where weights are streamed they are proposed at once.
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
        if seconds and not went_ahead:  # else the target's pass took longer: the guard counts that
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
