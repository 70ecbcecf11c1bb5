"""In each step, the candidate with most predicted tokens per second, or plain decoding.

`AutoPlanner` decides. A `Candidate` is a planner that it can ask, which predicts what a step with it gains (`cost.py`).
The `Ledger` bounds what all of them may lose. `AutoState` is what is known of passes and candidates, also from earlier
runs.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf, log, sqrt
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from edgespec.loop.backend import Logits, Session
from edgespec.loop.draft_passes import DraftSteps
from edgespec.loop.pass_times import FEW, FLAT, POWER, STEEP, Curve, KnownPass, PassTimes, choices
from edgespec.loop.passes import Prefill
from edgespec.loop.planner import Context, Planner, PlannerStats
from edgespec.loop.step import Step
from edgespec.loop.tree import DraftTree, FloatArray, Proposal, ranked, root_only
from edgespec.machine.measurements import Amount
from edgespec.planners.cost import best_part, chain_goodput
from edgespec.planners.drafting import CATCH_UP, agreed
from edgespec.planners.ledger import LOOKS, Accounts, Ledger

BELIEF = 4.0  # weight of a prior value, in expected things
BELIEF_OF_TILES = 16.0  # the same where steps have tiles: that one fails is chance
HEAVY = 0.8  # with experts, plain passes that a further unit of `weight` costs, until it is measured
PLAIN = 5  # plain passes before a way that is not known to gain: the first ones after loading may be slow
PLAIN_STREAMED = 1  # the same with streamed weights, where each takes seconds
TRIED = 2  # as a multiple of the largest pass measured, the tree of a way that has gained
TOLERANCE = 1.2  # ratio of rates by which a way that has gained may seem slower than plain decoding
GRAMMAR = "grammar"  # the account of tokens that a grammar forces, where none are drafted
AHEAD = "+ahead"  # a draft that goes on while the target runs has an account of its own
FURTHER = 16  # largest tree, as a multiple of the largest pass measured: beyond it pass times are not predictable
AGREEMENT = 0.7  # prior share of tokens in which draft and target agree
READ = 0.1  # plain passes of the target that a draft model takes to read a token
GAIN = 1.1  # ratio of rates that a draft must be predicted to reach: trying costs, too
DEEPEST = 1024  # tokens of a chain whose gain is predicted: no tree has more nodes
LEAST_TRUST = 0.05  # of `trust` in `best_part`
NEARLY_ALL = 0.9  # share of a layer's experts, from which on those chosen do not show the power of `distinct`
MOST_LOST = 0.0295  # plain passes that may be lost for each token of a sequence with tiles: one loses several at once
KNOWN = 200  # tokens for which the draft was asked, after which its agreement is known well
SHARES = ("copies", "agreement", "worth", "power")  # those of `AutoState`


@dataclass(slots=True)
class Share:
    """Ratio of the things that came to those that were expected, in fading sums.

    Attributes:
        fading: factor of the sums for each further expected thing.
        came: things that came.
        hoped: things that were expected.
        weight: of a prior value.
    """

    fading: float
    came: float = 0.0
    hoped: float = 0.0
    weight: float = BELIEF

    def add(self, came: float, hoped: float) -> None:
        self.fade(hoped)
        self.came, self.hoped = self.came + came, self.hoped + hoped

    def fade(self, times: float) -> None:
        left = self.fading**times
        self.came, self.hoped = self.came * left, self.hoped * left

    def value(self, belief: float) -> float:
        return (self.came + belief * self.weight) / (self.hoped + self.weight)

    def error(self, belief: float) -> float:
        """Standard error of `value`, of things that come or do not."""
        value = self.value(belief)
        return sqrt(value * (1 - value) / (self.hoped + self.weight))


class Pace(BaseModel):
    """`AutoState.as_dict` of an earlier run, and the number of passes that it is from."""

    target: list[KnownPass]
    draft: list[KnownPass]
    ledgers: dict[int, Accounts]
    copies: tuple[Amount, Amount]
    agreement: tuple[Amount, Amount]
    worth: tuple[Amount, Amount]
    power: tuple[Amount, Amount] = (0.0, 0.0)
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
        power: of `distinct`, a ratio of logarithms.
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
    power: Share = field(default_factory=lambda: Share(0.99))
    ledgers: dict[int, Ledger] = field(default_factory=dict)
    batched: int = 0
    learning_seconds: float = 0.0
    streams: bool = False

    def ledger(self, sequences: int = 1) -> Ledger:
        if sequences not in self.ledgers:
            first, most = PLAIN_STREAMED if self.streams else PLAIN, MOST_LOST if self.target.tiled else 0.0
            self.ledgers[sequences] = Ledger(first, most)
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

    def add_experts(self, nodes: int, experts: float) -> None:
        """Learn how many different experts of a layer a pass over several nodes has chosen."""
        if self.target.experts and nodes > 1 and experts < NEARLY_ALL * self.target.experts[0]:
            count, used = self.target.experts[:2]
            self.power.add(log(max(1.0, choices(experts / count, count, used))), log(nodes))
            self._predict_experts()

    def _predict_experts(self) -> None:
        self.target.learn_power(min(1.0, self.power.value(POWER)))

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
        shares = {name: [share.came, share.hoped] for name in SHARES for share in [getattr(self, name)]}
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
        for name in SHARES:
            share = getattr(self, name)
            share.came, share.hoped = getattr(known, name)
        self._predict_experts()


def new_auto_state(streams: bool, experts: tuple[int, int] | None = None, *, tiled: bool = False) -> AutoState:
    """Args:
    streams: passes read the same weights from a disk or over a bus, so that nodes are cheap.
    experts: as for `Curve`.
    tiled: as `Capabilities.tiled`.
    """
    slope = HEAVY if experts else FLAT if streams else STEEP
    worth = Share(0.998, weight=BELIEF_OF_TILES) if tiled else Share(0.98)
    return AutoState(PassTimes(slope, experts, tiled=tiled), worth=worth, streams=streams)


@dataclass(frozen=True, slots=True)
class Offer:
    """
    Attributes:
        proposal: its `nodes` are those that pay.
        rate: predicted tokens per second of a step with it.
        learn: called after verification, with the step's tokens, and the seconds of its pass; 0: not of this offer.
    """

    proposal: Proposal
    rate: float
    learn: Callable[[Sequence[int], float], None]


class Candidate:
    """A planner that `AutoPlanner` can ask. This one looks up draft tokens, which costs nothing.

    Attributes:
        name: of the planner, and of its account in the ledger.
        goes_ahead: its draft may go on while the target runs.
    """

    goes_ahead = False

    def __init__(self, planner: Planner, state: AutoState) -> None:
        self.name, self.planner, self._state = planner.name, planner, state

    def begin(self, prompt_ids: Sequence[int]) -> None:
        self.planner.begin(prompt_ids)

    def is_ready(self, token_ids: Sequence[int], ledger: Ledger) -> bool:
        """Prepare to be asked.

        Args:
            token_ids: all committed tokens.
            ledger: pays for what its draft must read, if `propose` does not read it.

        Returns:
            False: its draft must read too much, which `unread` returns from now on.
        """
        return True

    def forget(self) -> None:
        """Propose again as if nothing was known: texts and machines change."""
        self._state.copies.fade(inf)

    def is_due(self, context: Context, budget: int, best: float) -> bool:
        """
        Returns:
            True for a trial: to be asked whatever its estimate is.
        """
        return self._state.ledger(context.sequences).is_due(self.name, 0)

    def draft_seconds(self, nodes: NDArray[np.intp], token_ids: Sequence[int], plain: float) -> FloatArray:
        """Most seconds to expect of drafting trees with these numbers of nodes, where a plain pass takes `plain`."""
        return np.zeros(len(nodes))

    def estimate(self, context: Context, budget: int) -> float:
        """
        Returns:
            Tokens per second to expect if it is asked; 0: do not ask it, inf: asking costs nothing.
        """
        return inf

    def propose(self, context: Context, budget: int) -> DraftSteps[Offer]:
        """As for `Planner`; `context.pass_times` is None before the target's first pass."""
        # At most 1: a long accepted run is one event, and makes the next draft tokens no more probable.
        trust = min(1.0, max(LEAST_TRUST, self._state.copies.value(1.0)))
        times = context.pass_times or self._state.proportions(context.sequences)
        likely = replace(context, least=min(0.5, times.least / trust))
        tree = (yield from self.planner.propose(likely, budget)).tree
        nodes, rate = best_part(
            tree, 0.0, times, budget=budget, max_leaves=context.max_leaves, unread=context.unread, trust=trust
        )
        return Offer(Proposal(tree, nodes), rate, partial(self._learn, float(np.exp(tree.log_probs[nodes]).sum())))

    def _learn(self, expected: float, tokens: Sequence[int], seconds: float) -> None:
        if expected and seconds:
            self._state.copies.add(len(tokens) - 1, expected)

    def result(self, step: Step, logits: Logits | None) -> None:
        self.planner.result(step, logits)


class Drafting(Candidate):
    """A planner with draft model; predicts a chain's gain by the share of tokens in which draft and target agree."""

    def __init__(
        self,
        planner: Planner,
        state: AutoState,
        *,
        eager: bool = False,
        goes_ahead: bool = False,
        read: float = READ,
    ) -> None:
        """
        Args:
            planner: proposes with a draft model.
            state: measurements, which it continues.
            eager: a draft that did not fail is asked at once, not after as many tokens as it must read.
            goes_ahead: as in `Candidate`.
            read: plain passes of the target that the draft takes to read a token.
        """
        super().__init__(planner, state)
        self.goes_ahead, self._eager, self._read = goes_ahead, eager, read
        weight = BELIEF_OF_TILES if state.target.tiled else BELIEF
        self._agreement_here = Share(0.98, weight=weight)  # `AutoState.agreement` of this sequence
        self._wanted = 0  # tokens that the draft must read before it is asked
        self._prompt_length = 0

    def begin(self, prompt_ids: Sequence[int]) -> None:
        self._agreement_here.fade(inf)
        self._prompt_length = length = len(prompt_ids)
        ledger = self._state.ledger()
        likely = ledger.is_hopeful(self.name) if self._eager else ledger.has_gained(self.name) or self._may_lend
        if likely and (times := self._state.times(length)):
            likely = self._predict(times, length, 1, min(self.planner.depth, DEEPEST)) > GAIN / times.plain
        self._wanted = length + 1 if likely else 0  # the first token is known before the draft reads
        self.planner.begin(prompt_ids)

    def unread(self, token_ids: Sequence[int]) -> Prefill | None:
        """As for `Planner`; None also if it is unlikely to be asked."""
        return self.planner.unread(token_ids[: self._wanted]) if self._behind(self._wanted) > 1 else None

    def is_ready(self, token_ids: Sequence[int], ledger: Ledger) -> bool:
        before, self._wanted = self._wanted, len(token_ids)
        unread = self._behind(self._wanted) - 1
        if unread <= CATCH_UP:  # `propose` reads, and its time is charged
            return True
        ledger.pay(self.name, self._reading(self._wanted, min(unread, self._wanted - before)))
        return False

    def forget(self) -> None:
        shares = [self._state.worth]
        if not self._state.target.tiled:  # there a tile pays only where agreement is well known
            shares += [self._state.agreement, self._agreement_here]
        for share in shares:
            share.fade(inf)

    def is_due(self, context: Context, budget: int, best: float) -> bool:
        ledger = self._state.ledger(context.sequences)
        if self._state.target.tiled and context.pass_times:
            known = self._state.agreement.hoped >= KNOWN
            wanted = ledger.is_due(self.name, 0) or (not known and self.estimate(context, budget, errors=1) > best)
            return wanted and not self.promises(context, budget)  # then it lacks only room for a tile
        # As many tokens as the draft would have to read; if it has read the prompt, none: it would fall behind.
        follows = self._wanted or self._behind(self._prompt_length) <= 1
        return ledger.is_due(self.name, 0 if follows else max(0, self._behind(len(context.token_ids)) - 1))

    def draft_seconds(self, nodes: NDArray[np.intp], token_ids: Sequence[int], plain: float) -> FloatArray:
        length = len(token_ids)
        times = self._state.draft.at(length)
        reading = plain * self._reading(length, max(0, self._behind(length) - 1))
        return reading + (times.plain if times else 0.0) * np.minimum(nodes, self.planner.depth)

    def _reading(self, length: int, tokens: int) -> float:
        """Plain passes that the draft takes to read tokens."""
        target, times = self._state.target.at(length), self._state.draft.at(length)
        if self._state.target.tiled and target and times and tokens:  # they were timed
            return float(times.seconds(tokens)) / target.plain
        return self._read * tokens

    def promises(self, context: Context, budget: int) -> bool:
        """
        Returns:
            True if tiles promise a gain, and so much is known of the draft that this is no guess.
        """
        times, depth = context.pass_times, min(self.planner.most_depth(context), budget)
        if not self._may_lend or not times or depth <= 0:
            return False
        return self.estimate(context, budget) > 1 / float(times.seconds(context.plain_rows))

    @property
    def _may_lend(self) -> bool:
        return self._state.target.tiled and self._state.agreement.hoped >= LOOKS

    def estimate(self, context: Context, budget: int, errors: float = 0.0) -> float:
        """As for `Candidate`, if the draft agrees `errors` standard errors more often than is known."""
        length, depth = len(context.token_ids), min(self.planner.most_depth(context), budget)
        behind = 1 if self._state.target.tiled else self._behind(length)  # a tile's room pays for what is read
        more = errors * self._state.agreement.error(AGREEMENT)
        return self._predict(context.pass_times, length, behind, depth, context.unread, more) / GAIN

    def propose(self, context: Context, budget: int) -> DraftSteps[Offer]:
        times, length, before = context.pass_times, len(context.token_ids), self.planner.stats.draft_seconds
        draft_times, behind = self._draft_times(length, context.sequences), self._behind(length)
        leaves, depth, asking = context.max_leaves, min(self.planner.most_depth(context), budget), context
        if times and draft_times and self._state.target.tiled and context.sequences == 1:
            _, rows = chain_goodput(self._agreement, behind, depth, times, draft_times, context.unread)
            if rows > FEW:  # by the first of its rows alone, a tile does not pay
                asking = replace(context, pass_times=times.paid(rows))
        tree = (yield from self.planner.propose(asking, budget)).tree
        drafting = self.planner.stats.draft_seconds - before
        found = nodes = ranked(tree.parents, tree.log_probs, budget, leaves)
        rate = 0.0
        if times:
            nodes, rate = best_part(tree, drafting, times, budget=budget, max_leaves=leaves, unread=context.unread)

        def learn(tokens: Sequence[int], seconds: float) -> None:
            hits, asked = agreed(tree, found, tokens)
            self._state.agreement.add(hits, asked)
            self._agreement_here.add(hits, asked)
            if times and draft_times and seconds:
                # With what is known now, so that too high an agreement is not counted in `worth`, too.
                hoped, _ = chain_goodput(self._agreement, behind, depth, times, draft_times, context.unread)
                self._state.worth.add(len(tokens), hoped * (seconds + drafting))

        return Offer(Proposal(tree, nodes), rate, learn)

    def result(self, step: Step, logits: Logits | None) -> None:
        super().result(step, logits)
        self._agreement_here.fade(1)

    @property
    def _agreement(self) -> float:
        return self._agreement_here.value(self._state.agreement.value(AGREEMENT))

    def _behind(self, length: int) -> int:
        session = self.planner.draft_session
        return length - len(session.token_ids) if session else 0

    def _draft_times(self, length: int, sequences: float) -> Curve | None:
        times = self._state.draft.at(length)
        return times.shared(min(self.planner.stats.mean_batch, sequences)) if times else None

    def _predict(
        self, times: Curve | None, length: int, behind: int, depth: int, unread: int | None = None, more: float = 0.0
    ) -> float:
        draft_times = self._draft_times(length, times.sequences) if times else None
        if not times or not draft_times:
            return inf if self._eager else 0.0
        rate, _ = chain_goodput(min(1.0, self._agreement + more), behind, depth, times, draft_times, unread)
        return rate * self._state.worth.value(1.0)


class AutoPlanner(Planner):
    def __init__(self, name: str, state: AutoState, candidates: Sequence[Candidate]) -> None:
        """
        Args:
            name: as users write it.
            state: measurements, which it continues.
            candidates: the cheapest first; each is asked if its estimate is above the best rate so far. At most one has
                a draft.
        """
        self.name, self._state, self._candidates = name, state, candidates
        self._draft = next((one for one in candidates if isinstance(one, Drafting)), None)
        self._context: Context | None = None  # of the last tree; None: there is none in this sequence
        self._asked = list[tuple[Candidate, Offer]]()
        self._chosen: Candidate | None = None
        # Seconds of each candidate that the ledger allows, asked or not; later of ways.
        self._spent = dict[str, float]()
        self._passes: list[tuple[int, float, int]] = []  # of the target, not learned yet: nodes, seconds, length
        self._drafted: str | None = None  # whose draft tokens were in the last pass
        self._went_ahead = False

    @property
    def stats(self) -> PlannerStats:
        return self._draft.planner.stats if self._draft else PlannerStats()

    @property
    def draft_session(self) -> Session | None:
        return self._draft.planner.draft_session if self._draft else None

    def begin(self, prompt_ids: Sequence[int]) -> None:
        self._context, self._went_ahead, self._drafted = None, False, None
        self._state.ledger().begin()
        for candidate in self._candidates:
            candidate.begin(prompt_ids)

    def unread(self, token_ids: Sequence[int]) -> Prefill | None:
        return self._draft.unread(token_ids) if self._draft else None

    def propose(self, context: Context, budget: int) -> DraftSteps[Proposal]:
        self._context, self._asked, self._chosen, self._spent = context, [], None, {}
        token_ids, sequences, state = context.token_ids, context.sequences, self._state
        ledger, proposal = state.ledger(sequences), Proposal(root_only(token_ids[-1]))
        if self._draft and sequences == 1 and not ledger.tokens:
            timed = replace(context, pass_times=state.times(len(token_ids)))
            ledger.lend(context.max_depth + 1 if self._draft.promises(timed, budget) else 0)
        candidates = [  # of several sequences, the scheduler has asked the ledger
            one for one in self._candidates
            if (sequences > 1 or ledger.room(one.name) > 0) and one.planner.most_depth(context) > 0
        ]  # fmt: skip
        if budget <= 0 or not candidates:
            return proposal
        began, times = perf_counter(), state.times(len(token_ids), sequences)
        plain = float((times or state.proportions(sequences)).seconds(context.plain_rows))
        best = 1 / plain
        if times and (context.unread is None or sequences == 1):  # shared paths are not measured
            budget = min(budget, int(FURTHER * times.sizes[-1] / sequences))
        for candidate in candidates:
            drafted = candidate.planner.stats.draft_seconds
            trial = candidate.is_due(replace(context, pass_times=times), budget, best)
            known, most, tolerance = self._terms(candidate, context, times, plain, budget, trial=trial)
            asking = replace(context, pass_times=known)
            wanted = most > 0 and (trial or candidate.estimate(asking, most) > best)
            if wanted and candidate.is_ready(token_ids, ledger):
                if trial:
                    candidate.forget()
                found = yield from candidate.propose(asking, most)
                self._asked.append((candidate, found))
                if trial and sequences > 1:  # its account is the batch's
                    ledger.accounts[candidate.name].put_off()
                if found.rate * (1.0 if self._chosen else tolerance) > best:
                    proposal, self._chosen, best = found.proposal, candidate, found.rate
            now = perf_counter()
            self._spent[candidate.name] = max(now - began, candidate.planner.stats.draft_seconds - drafted)
            began = now
        return proposal

    def _terms(
        self, candidate: Candidate, context: Context, times: Curve | None, plain: float, most: int, *, trial: bool
    ) -> tuple[Curve | None, int, float]:
        """
        Args:
            candidate: that may be asked.
            context: as for `propose`.
            times: pass times of the target.
            plain: seconds of a plain pass.
            most: most draft nodes.
            trial: it is asked whatever its estimate is.

        Returns:
            Pass times, most draft nodes, and a ratio of rates by which its offer may seem slower than plain decoding.
            By these a step of a single sequence loses at most what its ledger allows, even if no draft token is
            accepted. Of several sequences, only what the draft must read first is compared with the ledger.
        """
        name, ledger, tolerance = candidate.name, self._state.ledger(context.sequences), 1.0
        if context.sequences > 1:
            reading = candidate.draft_seconds(np.zeros(1, np.intp), context.token_ids, ledger.plain)[0]
            return times, most if reading <= ledger.room(name) else 0, tolerance
        if trial and times and self._state.target.tiled:
            tolerance = 1 / GAIN  # asking shows agreement, also where no draft token is worth a row
        elif trial or not times:
            times = self._state.proportions(1, plain)
        elif ledger.is_ahead(name):  # larger passes may take less time than predicted
            tolerance, most = TOLERANCE, min(most, TRIED * round(times.sizes[-1]))
            times = replace(times, slope=min(times.slope, FLAT * plain))
        nodes, room = np.arange(1, most + 1), ledger.room(name)
        drafting = candidate.draft_seconds(nodes, context.token_ids, plain)
        lost = times.seconds(nodes + 1) - times.plain + drafting
        if trial and self._state.target.tiled:  # one drafted token shows agreement, and its row need not be sent
            lost[0] = drafting[0] if ledger.may_look(drafting[0]) else inf
        return times, self._fit(lost, room), tolerance

    def _fit(self, lost: FloatArray, room: float) -> int:
        """Most nodes that lose at most `room`, where `lost` has the seconds of 1 and more nodes."""
        if self._state.target.tiled:  # more of them may take less time
            lost = np.minimum.accumulate(lost[::-1])[::-1]
        return int(np.searchsorted(lost, room, side="right"))

    def paying(self, tree: DraftTree, context: Context, budget: int) -> NDArray[np.intp]:
        if context.sequences > 1:  # the scheduler chooses
            return super().paying(tree, context, budget)
        plain, further = context.plain_rows, np.arange(1, budget + 1)
        times = self._state.times(len(context.token_ids)) or self._state.proportions(1)
        lost = times.seconds(plain + further) - times.seconds(plain)
        most = self._fit(lost, self._state.ledger().room(self._way))
        nodes, _ = best_part(tree, 0.0, times, budget=most, max_leaves=context.max_leaves, unread=context.unread)
        return nodes

    @property
    def _way(self) -> str:
        return self._chosen.name if self._chosen else GRAMMAR

    def during(self, nodes: int) -> AbstractContextManager[None]:
        chosen = self._chosen
        goes = chosen is not None and chosen.goes_ahead
        self._went_ahead = goes and self._state.ledger().room(self._way + AHEAD) > 0
        return chosen.planner.during(nodes) if chosen and self._went_ahead else nullcontext()

    def saw_prompt(self, start: int, count: int, logits: Logits) -> None:
        for candidate in self._candidates:
            candidate.planner.saw_prompt(start, count, logits)

    def give_up(self) -> None:
        for candidate in self._candidates:
            candidate.planner.give_up()

    def result(self, step: Step, logits: Logits | None) -> None:
        for candidate in self._candidates:
            began = perf_counter()
            candidate.result(step, logits)
            if candidate.name in self._spent:
                took = perf_counter() - began
                self._spent[candidate.name] += took
                self._state.learning_seconds += took
        if self._context is None:
            return
        went_ahead, self._went_ahead = self._went_ahead, False
        drafted, self._drafted = self._drafted, None
        if step.own_seconds:
            self._account(step, self._context, drafted, went_ahead=went_ahead)
        for candidate, offer in self._asked:  # a draft that was unsure may be right
            offer.learn(step.tokens, step.own_seconds if candidate is self._chosen else 0.0)

    def _account(self, step: Step, context: Context, drafted: str | None, *, went_ahead: bool) -> None:
        """Enter a step into the ledger, and learn its pass time.

        Args:
            step: with a pass of its own.
            context: of its tree.
            drafted: whose draft tokens were in the pass before.
            went_ahead: the draft went on during the pass.
        """
        state, seconds, length, plain = self._state, step.own_seconds, len(context.token_ids), context.plain_rows
        ledger, state.learning_seconds = state.ledger(), 0.0
        way = self._way if step.rows > plain else None
        if way and went_ahead:
            self._spent[way + AHEAD] = self._spent.pop(way)
            way += AHEAD
        self._drafted = way
        if drafted and context.owes and not way:  # the way of the last step pays for what is read again
            way = drafted
        if way:
            self._spent.setdefault(way, 0.0)
        if way or (plain == 1 and not context.owes):  # else a pass does not show what plain decoding takes
            ledger.add(self._spent, way, seconds, len(step.tokens))
        if step.rows == 1 and state.target.has_plain(length):  # the ledger has the last ones
            state.target.measured += 1
        elif not went_ahead and (context.unread or not context.owes):  # a draft meanwhile or a pass before lengthens it
            self._passes.append((step.rows, seconds, length))
        if not way or ledger.distance > 1:  # else a plain pass comes next, which shows the pace of this one
            for one in self._passes:
                state.add_pass(*one)
            self._passes.clear()

    def close(self) -> None:
        for candidate in self._candidates:
            candidate.planner.close()
