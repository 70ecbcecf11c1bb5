"""The two kinds of candidates of `auto`: looking up tokens costs nothing, and drafting takes passes of the draft."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import inf

import numpy as np
from numpy.typing import NDArray

from edgespec.loop.backend import Logits
from edgespec.loop.draft_passes import DraftSteps
from edgespec.loop.pass_times import Curve
from edgespec.loop.passes import Prefill
from edgespec.loop.planner import Context, Planner
from edgespec.loop.step import Step
from edgespec.loop.tree import FloatArray, Proposal, ranked
from edgespec.planners.auto import AutoState, Candidate, Offer, Share
from edgespec.planners.cost import chain_goodput
from edgespec.planners.drafting import CATCH_UP, agreed
from edgespec.planners.ledger import Ledger
from edgespec.planners.path_cost import best_part

AGREEMENT = 0.7  # prior share of tokens in which draft and target agree
READ = 0.1  # plain passes of the target that a draft model takes to read a token
GAIN = 1.1  # ratio of rates that a draft must be predicted to reach: trying costs, too
DEEPEST = 1024  # tokens of a chain whose gain is predicted: no tree has more nodes
LEAST_TRUST = 0.05  # of `trust` in `path_cost.best_part`


class Lookup(Candidate):
    """A planner without draft model; learns how far its probabilities can be trusted."""

    def __init__(self, planner: Planner, state: AutoState) -> None:
        super().__init__(planner)
        self._state = state

    def forget(self) -> None:
        self._state.copies.forget()

    def estimate(self, context: Context, budget: int) -> float:
        return inf

    def propose(self, context: Context, budget: int) -> DraftSteps[Offer]:
        # At most 1: a long accepted run is one event, and makes the next draft tokens no more probable.
        trust = min(1.0, max(LEAST_TRUST, self._state.copies.value(1.0)))
        times = context.pass_times or self._state.proportions(context.sequences)
        likely = replace(context, least=min(0.5, times.least / trust))
        tree = (yield from self.planner.propose(likely, budget)).tree
        nodes, rate = best_part(
            tree, 0.0, times, budget=budget, max_leaves=context.max_leaves, unread=context.unread, trust=trust
        )
        expected = float(np.exp(tree.log_probs[nodes]).sum())
        return Offer(Proposal(tree, nodes), rate, expected, partial(self._learn, expected))

    def _learn(self, expected: float, tokens: Sequence[int], seconds: float) -> None:
        if expected and seconds:
            self._state.copies.add(len(tokens) - 1, expected)


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
        super().__init__(planner)
        self.goes_ahead = goes_ahead
        self._state = state
        self._eager = eager
        self._read = read
        self._agreement_here = Share(0.98)  # `AutoState.agreement` of this sequence
        self._wanted = 0  # tokens that the draft must read before it is asked
        self._prompt_length = 0

    def begin(self, prompt_ids: Sequence[int]) -> None:
        self._agreement_here = Share(self._agreement_here.fading)
        self._prompt_length = length = len(prompt_ids)
        ledger, name = self._state.ledger(), self.planner.name
        likely = ledger.is_hopeful(name) if self._eager else ledger.has_gained(name)
        if likely and (times := self._state.times(length)):
            likely = self._predict(times, length, 1, min(self.planner.depth, DEEPEST)) > GAIN / times.plain
        self._wanted = length + 1 if likely else 0  # the first token is known before the draft reads
        self.planner.begin(prompt_ids)

    def unread(self, token_ids: Sequence[int]) -> Prefill | None:
        return self.planner.unread(token_ids[: self._wanted]) if self._behind(self._wanted) > 1 else None

    def is_ready(self, token_ids: Sequence[int], ledger: Ledger) -> bool:
        before, self._wanted = self._wanted, len(token_ids)
        if self._behind(self._wanted) <= 1 + CATCH_UP:  # `propose` reads, and its time is charged
            return True
        unpaid = min(self._unread_before_root(token_ids), self._wanted - before)
        ledger.pay(self.planner.name, self._read * unpaid)
        return False

    def forget(self) -> None:
        for share in (self._state.agreement, self._state.worth, self._agreement_here):
            share.forget()

    def wait(self, token_ids: Sequence[int]) -> int:
        # As many as the draft would have to read. If it has read the prompt, none: by waiting it would fall behind.
        follows = self._wanted or self._behind(self._prompt_length) <= 1
        return 0 if follows else self._unread_before_root(token_ids)

    def _unread_before_root(self, token_ids: Sequence[int]) -> int:
        return max(0, self._behind(len(token_ids)) - 1)

    def draft_seconds(self, nodes: NDArray[np.intp], token_ids: Sequence[int], plain: float) -> FloatArray:
        times, unread = self._state.draft.at(len(token_ids)), self._unread_before_root(token_ids)
        reading = self._read * plain * unread
        return reading + (times.plain if times else 0.0) * np.minimum(nodes, self.planner.depth)

    def estimate(self, context: Context, budget: int) -> float:
        if (depth := self._depth(context, budget)) <= 0:
            return 0.0
        if context.pass_times is None:
            return inf if self._eager else 0.0
        length = len(context.token_ids)
        return self._predict(context.pass_times, length, self._behind(length), depth, context.unread) / GAIN

    def propose(self, context: Context, budget: int) -> DraftSteps[Offer]:
        times, length, before = context.pass_times, len(context.token_ids), self.planner.stats.draft_seconds
        draft_times, behind = self._draft_times(length, context.sequences), self._behind(length)
        tree = (yield from self.planner.propose(context, budget)).tree
        drafting = self.planner.stats.draft_seconds - before
        leaves = context.max_leaves
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
                depth = self._depth(context, budget)
                rate_hoped = chain_goodput(self._agreement, behind, depth, times, draft_times, context.unread)
                self._state.worth.add(len(tokens), rate_hoped * (seconds + drafting))

        return Offer(Proposal(tree, nodes), rate, float(np.exp(tree.log_probs[nodes]).sum()), learn)

    def result(self, step: Step, logits: Logits | None) -> None:
        super().result(step, logits)
        self._agreement_here.fade(1)

    @property
    def _agreement(self) -> float:
        return self._agreement_here.value(self._state.agreement.value(AGREEMENT))

    def _depth(self, context: Context, budget: int) -> int:
        return min(self.planner.most_depth(context), budget)

    def _behind(self, length: int) -> int:
        session = self.planner.draft_session
        return length - len(session.token_ids) if session else 0

    def _draft_times(self, length: int, sequences: float) -> Curve | None:
        times = self._state.draft.at(length)
        return times.shared(min(self.planner.stats.mean_batch, sequences)) if times else None

    def _predict(self, times: Curve, length: int, behind: int, depth: int, unread: int | None = None) -> float:
        draft_times = self._draft_times(length, times.sequences)
        if draft_times is None:
            return inf if self._eager else 0.0
        rate = chain_goodput(self._agreement, behind, depth, times, draft_times, unread)
        return rate * self._state.worth.value(1.0)
