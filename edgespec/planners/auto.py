"""In each step, the candidate with most predicted tokens per second, or plain decoding."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from edgespec.loop.backend import Logits, Session
from edgespec.loop.draft_passes import DraftSteps
from edgespec.loop.pass_times import FLAT, STEEP, Curve, KnownPass, PassTimes
from edgespec.loop.passes import Prefill
from edgespec.loop.planner import Context, Planner, PlannerStats
from edgespec.loop.step import Step
from edgespec.loop.tree import DraftTree, FloatArray, Proposal, root_only
from edgespec.machine.measurements import Amount
from edgespec.planners.ledger import Accounts, Ledger
from edgespec.planners.path_cost import best_part

BELIEF = 4.0  # weight of a prior value, in expected things
HEAVY = 0.8  # with experts, plain passes that a further unit of `weight` costs, until it is measured
PLAIN = 5  # plain passes before a way that is not known to gain: the first ones after loading may be slow
PLAIN_STREAMED = 1  # the same with streamed weights, where each takes seconds
TRIED = 2  # as a multiple of the largest pass measured, the tree of a way that has gained
TOLERANCE = 1.2  # ratio of rates by which a way that has gained may seem slower than plain decoding
GRAMMAR = "grammar"  # the account of tokens that a grammar forces, where none are drafted
AHEAD = "+ahead"  # a draft that goes on while the target runs has an account of its own
FURTHER = 16  # largest tree, as a multiple of the largest pass measured: beyond it pass times are not predictable


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

    def forget(self) -> None:
        self.came = self.hoped = 0.0

    def value(self, belief: float) -> float:
        return (self.came + belief * BELIEF) / (self.hoped + BELIEF)


class Pace(BaseModel):
    """`AutoState.as_dict` of an earlier run, and the number of passes that it is from."""

    target: list[KnownPass]
    draft: list[KnownPass]
    ledgers: dict[int, Accounts]
    copies: tuple[Amount, Amount]
    agreement: tuple[Amount, Amount]
    worth: tuple[Amount, Amount]
    passes: int = 0


@dataclass(slots=True)
class AutoState:
    """Measurements of a target and of methods, kept from sequence to sequence and from run to run.

    Attributes:
        target: pass times of the target.
        draft: pass times of the draft.
        copies: copied tokens that were accepted, of those expected.
        agreement: tokens that were the draft's best, of those for which it was asked.
        worth: tokens that steps with the draft gained, of those predicted.
        ledgers: bound the loss against plain decoding, by number of sequences that share the passes.
        batched: number of sequences of the last batch.
        learning_seconds: in which planners learned from the logits of a batch's pass, which its ledger is charged.
        streams: passes read weights from a disk or over a bus.
    """

    target: PassTimes = field(default_factory=PassTimes)
    draft: PassTimes = field(default_factory=PassTimes)
    copies: Share = field(default_factory=lambda: Share(0.99))
    agreement: Share = field(default_factory=lambda: Share(0.998))
    worth: Share = field(default_factory=lambda: Share(0.98))
    ledgers: dict[int, Ledger] = field(default_factory=dict)
    batched: int = 0
    learning_seconds: float = 0.0
    streams: bool = False

    def ledger(self, sequences: int = 1) -> Ledger:
        if sequences not in self.ledgers:
            self.ledgers[sequences] = Ledger(first=PLAIN_STREAMED if self.streams else PLAIN)
        return self.ledgers[sequences]

    def times(self, length: int, sequences: int = 1) -> Curve | None:
        """
        Args:
            length: of a sequence.
            sequences: that share the passes.

        Returns:
            The target's pass times, of which a sequence has its share; None: nothing was measured. They are at the pace
            of the last plain passes, since other programs change all sizes alike.
        """
        times = self.target.at(length)
        return times.shared(sequences).at_pace(self._pace(times, sequences)) if times else None

    def add_pass(self, nodes: int, seconds: float, length: int, sequences: int = 1) -> None:
        """Learn the time of a pass of the target."""
        times = self.target.at(length)
        self.target.add(nodes, seconds / self._pace(times, sequences) if times else seconds, length)

    def _pace(self, times: Curve, sequences: int) -> float:
        count = sequences if sequences in self.ledgers and self.ledgers[sequences].plain else 1
        plain = self.ledger(count).plain
        return plain / (times.plain if count == 1 else float(times.seconds(count))) if plain else 1.0

    def batch(self, sequences: int) -> Ledger:
        """The ledger of batches of this size, which goes on where the last one had another size."""
        found = self.ledger(sequences)
        if self.batched != sequences:
            self.batched = sequences
            found.resume()
        return found

    def proportions(self, sequences: int, plain: float = 1.0) -> Curve:
        """Pass times as if none but plain passes of `plain` seconds had been measured."""
        return Curve(np.ones(1), np.full(1, plain), plain * self.target.slope, self.target.experts, sequences)

    def as_dict(self) -> dict[str, Any]:
        shares = {name: [share.came, share.hoped] for name, share in self._shares()}
        rows = self.target.as_list()
        pace = self._pace(times, 1) if (times := self.target.at(0)) else 1.0
        costs = {"target": [[at, nodes, pace * seconds] for at, nodes, seconds in rows], "draft": self.draft.as_list()}
        return {**costs, "ledgers": {str(n): one.as_dict() for n, one in self.ledgers.items()}, **shares}

    def recall(self, known: Pace) -> None:
        """Begin with the values of `as_dict`."""
        self.target.recall(known.target)
        self.draft.recall(known.draft)
        for sequences, accounts in known.ledgers.items():
            self.ledger(sequences).recall(accounts)
        for name, share in self._shares():
            share.came, share.hoped = getattr(known, name)

    def _shares(self) -> Iterable[tuple[str, Share]]:
        return [("copies", self.copies), ("agreement", self.agreement), ("worth", self.worth)]


def new_auto_state(streams: bool, experts: tuple[int, int] | None = None) -> AutoState:
    """Args:
    streams: passes read the same weights from a disk or over a bus, so that nodes are cheap.
    experts: as for `Curve`.
    """
    return AutoState(PassTimes(HEAVY if experts else FLAT if streams else STEEP, experts), streams=streams)


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

    def is_ready(self, token_ids: Sequence[int], ledger: Ledger) -> bool:
        """Prepare to be asked.

        Args:
            token_ids: all committed tokens.
            ledger: pays for what its draft must read, if `propose` does not read it.

        Returns:
            False: its draft must read too much, which `unread` returns from now on.
        """
        return True

    @abstractmethod
    def forget(self) -> None:
        """Propose again as if nothing was known: texts and machines change."""

    def wait(self, token_ids: Sequence[int]) -> int:
        """Tokens to wait for a trial, besides a rest."""
        return 0

    def draft_seconds(self, nodes: NDArray[np.intp], token_ids: Sequence[int], plain: float) -> FloatArray:
        """Most seconds to expect of drafting trees with these numbers of nodes, where a plain pass takes `plain`."""
        return np.zeros(len(nodes))

    @abstractmethod
    def estimate(self, context: Context, budget: int) -> float:
        """
        Returns:
            Tokens per second to expect if it is asked; 0: do not ask it, inf: asking costs nothing.
        """

    @abstractmethod
    def propose(self, context: Context, budget: int) -> DraftSteps[Offer]:
        """As for `Planner`; `context.pass_times` is None before the target's first pass."""

    def result(self, step: Step, logits: Logits | None) -> None:
        self.planner.result(step, logits)


@dataclass(frozen=True, slots=True)
class Terms:
    """On which a candidate is asked.

    Attributes:
        pass_times: of the target.
        most: most draft nodes.
        tolerance: ratio of rates by which its offer may seem slower than plain decoding.
        trial: it is asked whatever its estimate is.
    """

    pass_times: Curve | None
    most: int
    tolerance: float = 1.0
    trial: bool = False


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
        self._chosen: Candidate | None = None
        self._refused: list[Offer] = []  # the others of this step
        # Seconds of each candidate that the ledger allows, asked or not; later of ways.
        self._spent = dict[str, float]()
        self._context: Context | None = None  # of `_offer`
        self._passes: list[tuple[int, float, int]] = []  # of the target, not learned yet: nodes, seconds, length
        self._drafted: str | None = None  # whose draft tokens were in the last pass
        self._went_ahead = False

    @property
    def stats(self) -> PlannerStats:
        known = [candidate.planner.stats for candidate in self._with_draft]
        return PlannerStats(
            sum(one.draft_passes for one in known), sum(one.draft_seconds for one in known),
            hidden_seconds=sum(one.hidden_seconds for one in known), went_on=sum(one.went_on for one in known),
        )  # fmt: skip

    @property
    def draft_session(self) -> Session | None:
        return self._with_draft[0].planner.draft_session if self._with_draft else None

    def begin(self, prompt_ids: Sequence[int]) -> None:
        self._offer, self._chosen, self._refused, self._went_ahead, self._drafted = None, None, [], False, None
        self._state.ledger().begin()
        for candidate in self._candidates:
            candidate.begin(prompt_ids)

    def unread(self, token_ids: Sequence[int]) -> Prefill | None:
        readings = (candidate.unread(token_ids) for candidate in self._with_draft)
        return next((reading for reading in readings if reading), None)

    def propose(self, context: Context, budget: int) -> DraftSteps[Proposal]:
        self._offer, self._chosen, self._spent = Offer(Proposal(root_only(context.token_ids[-1])), 0.0), None, {}
        self._refused = []
        self._context = context
        candidates = [one for one in self._candidates if self._may_ask(one, context)]
        if budget > 0 and candidates:
            yield from self._choose(candidates, context, budget)
        return self._offer.proposal

    def _may_ask(self, candidate: Candidate, context: Context) -> bool:
        """
        Returns:
            True if the ledger allows a step of this candidate; the scheduler asks the ledger of a batch.
        """
        allowed = context.sequences > 1 or self._ledger.room(candidate.planner.name) > 0
        return allowed and candidate.planner.most_depth(context) > 0

    def _choose(self, candidates: Sequence[Candidate], context: Context, budget: int) -> DraftSteps[None]:
        began, sequences = perf_counter(), context.sequences
        times = self._state.times(len(context.token_ids), sequences)
        plain = float((times or self._state.proportions(sequences)).seconds(context.plain_rows))
        best = 1 / plain
        if times and (context.unread is None or sequences == 1):  # shared paths are not measured
            budget = min(budget, int(FURTHER * times.sizes[-1] / sequences))
        for candidate in candidates:
            name, drafted = candidate.planner.name, candidate.planner.stats.draft_seconds
            terms = self._terms(candidate, context, times, plain, budget)
            asking = replace(context, pass_times=terms.pass_times)
            wanted = terms.most > 0 and (terms.trial or candidate.estimate(asking, terms.most) > best)
            if wanted and candidate.is_ready(context.token_ids, self._state.ledger(sequences)):
                if terms.trial:
                    candidate.forget()
                found = yield from candidate.propose(asking, terms.most)
                if terms.trial and sequences > 1:  # its account is the batch's
                    self._state.ledger(sequences).put_off(name)
                if found.rate * (1.0 if self._chosen else terms.tolerance) > best:
                    self._offer, self._chosen, best, found = found, candidate, found.rate, self._offer
                self._refused.append(found)
            now = perf_counter()
            self._spent[name] = max(now - began, candidate.planner.stats.draft_seconds - drafted)
            began = now

    def _terms(self, candidate: Candidate, context: Context, times: Curve | None, plain: float, most: int) -> "Terms":
        """
        Args:
            candidate: that may be asked.
            context: as for `propose`.
            times: pass times of the target.
            plain: seconds of a plain pass.
            most: most draft nodes.

        Returns:
            Terms by which a step of a single sequence loses at most what its ledger allows, even if no draft token is
            accepted. Of several sequences, only what the draft must read first is compared with the ledger.
        """
        name, ledger, tolerance = candidate.planner.name, self._state.ledger(context.sequences), 1.0
        trial = ledger.is_due(name, candidate.wait(context.token_ids))
        if context.sequences > 1:
            reading = candidate.draft_seconds(np.zeros(1, np.intp), context.token_ids, ledger.plain)[0]
            return Terms(times, most if reading <= ledger.room(name) else 0, trial=trial)
        if trial or not times:
            times = self._state.proportions(1, plain)
        elif ledger.is_ahead(name):  # larger passes may take less time than predicted
            tolerance, most = TOLERANCE, min(most, TRIED * round(times.sizes[-1]))
            times = replace(times, slope=min(times.slope, FLAT * plain))
        nodes = np.arange(1, most + 1)
        lost = times.seconds(nodes + 1) - times.plain + candidate.draft_seconds(nodes, context.token_ids, plain)
        return Terms(times, int(np.searchsorted(lost, ledger.room(name), side="right")), tolerance, trial)

    @property
    def _ledger(self) -> Ledger:
        return self._state.ledger()

    def paying(self, tree: DraftTree, context: Context, budget: int) -> NDArray[np.intp]:
        if context.sequences > 1:  # the scheduler chooses
            return super().paying(tree, context, budget)
        plain, further = context.plain_rows, np.arange(1, budget + 1)
        times = self._state.times(len(context.token_ids)) or self._state.proportions(1)
        lost = times.seconds(plain + further) - times.seconds(plain)
        most = int(np.searchsorted(lost, self._ledger.room(self._way), side="right"))
        nodes, _ = best_part(tree, 0.0, times, budget=most, max_leaves=context.max_leaves, unread=context.unread)
        return nodes

    @property
    def _way(self) -> str:
        return self._chosen.planner.name if self._chosen else GRAMMAR

    def during(self, nodes: int) -> AbstractContextManager[None]:
        chosen = self._chosen
        goes = chosen is not None and chosen.goes_ahead
        self._went_ahead = goes and self._ledger.room(self._way + AHEAD) > 0
        return chosen.planner.during(nodes) if chosen and self._went_ahead else nullcontext()

    def saw_prompt(self, start: int, count: int, logits: Logits) -> None:
        for candidate in self._candidates:
            candidate.planner.saw_prompt(start, count, logits)

    def give_up(self) -> None:
        for candidate in self._candidates:
            candidate.planner.give_up()

    def result(self, step: Step, logits: Logits | None) -> None:
        for candidate in self._candidates:
            name, began = candidate.planner.name, perf_counter()
            candidate.result(step, logits)
            if name in self._spent:
                took = perf_counter() - began
                self._spent[name] += took
                self._state.learning_seconds += took
        if self._offer is None or self._context is None:
            return
        state, context, tokens, seconds = self._state, self._context, step.tokens, step.own_seconds
        length, rows, owes = len(context.token_ids), step.rows, context.owes
        went_ahead, self._went_ahead = self._went_ahead, False
        drafted, self._drafted = self._drafted, None
        if seconds:
            state.learning_seconds = 0.0
            plain = context.plain_rows
            way = self._way if rows > plain else None
            if way and went_ahead:
                self._spent[way + AHEAD] = self._spent.pop(way)
                way += AHEAD
            self._drafted = way
            if drafted and owes and not way:  # the way of the last step pays for what is read again
                way = drafted
            if way:
                self._spent.setdefault(way, 0.0)
            if way or (plain == 1 and not owes):  # else a pass does not show what plain decoding takes
                self._ledger.add(self._spent, way, seconds, len(tokens))
            known = rows == 1 and state.target.has_plain(length)  # the ledger has the last ones
            if known:
                state.target.measured += 1
            elif not went_ahead and (context.unread or not owes):  # a draft meanwhile or a pass before lengthens it
                self._passes.append((rows, seconds, length))
            if not way or self._ledger.distance > 1:  # else a plain pass comes next, which shows the pace of this one
                for one in self._passes:
                    state.add_pass(*one)
                self._passes.clear()
        self._offer.learn(tokens, seconds)
        for offer in self._refused:  # a draft that was unsure may be right
            offer.learn(tokens, 0.0)

    def close(self) -> None:
        for candidate in self._candidates:
            candidate.planner.close()
