"""SpecExec: the K most probable continuations under a draft model, as one tree.

Algorithm 2 of "SpecExec: Massively Parallel Speculative Decoding for Interactive LLM Inference on Consumer Devices"
(arXiv 2406.02532). Each draft pass reads the `beam` most probable nodes (`search.py`), until no other node is likely to
be among the K best, or a pass does not pay (`cost.py`).

An addition is coupled sampling: with the target's Gumbel noise, the draft predicts what the target will *sample*
(`ChildScores`).
"""

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from edgespec.errors import ContextFull
from edgespec.loop.backend import Backend, Logits, Session
from edgespec.loop.draft_passes import DraftSteps
from edgespec.loop.pass_times import PassTimes
from edgespec.loop.passes import Prefill, most_nodes
from edgespec.loop.planner import Context, Planner, PlannerStats
from edgespec.loop.sampling import IdArray
from edgespec.loop.step import Step
from edgespec.loop.tree import Proposal, root_only
from edgespec.planners.cost import worth_reading
from edgespec.planners.drafting import ChildScores, Drafter, HeadDrafter
from edgespec.planners.search import COMMITTED, ENOUGH, Search


class SpecExecPlanner(Planner):
    name = "specexec"
    children: ClassVar[int] = 32  # most children of a node
    enough: ClassVar[float] = ENOUGH
    usual_depth: ClassVar[int] = 32

    def __init__(
        self,
        draft: Backend,
        *,
        depth: int | None = None,
        beam: int = 16,
        tau: float | None = None,
        coupling: bool = True,
        cost: PassTimes | None = None,
    ) -> None:
        """
        Args:
            draft: a loaded draft model, or head, with the target's vocabulary.
            depth: most draft passes of a tree, and so its most depth; default: `usual_depth`.
            beam: most nodes that a draft pass reads.
            tau: usual disagreement of draft and target, in logits; default: 0.7 when greedy, 1.0 when sampling.
            coupling: draft with the target's noise, as `ChildScores` says.
            cost: pass times of the draft, to which its passes are added; default: new ones.
        """
        self.depth = depth or self.usual_depth
        self.tau = tau
        self.coupling = coupling
        self._limits = draft.capabilities
        self._beam = min(beam, most_nodes(self._limits, 0)) if self.children > 1 else 1
        self._drafter = HeadDrafter(draft, cost) if self._limits.head else Drafter(draft, cost)
        self._search: Search | None = None
        self._usual = -np.inf  # cutoff of the last search, and about that of the next

    @property
    def draft_session(self) -> Session:
        return self._drafter.session

    @property
    def stats(self) -> PlannerStats:
        drafter = self._drafter
        return PlannerStats(drafter.passes, drafter.seconds, mean_batch=drafter.mean_batch)

    def begin(self, prompt_ids: Sequence[int]) -> None:
        self.give_up()
        self._drafter.begin(prompt_ids)

    def unread(self, token_ids: Sequence[int]) -> Prefill | None:
        return self._drafter.unread(token_ids)

    def most_depth(self, context: Context) -> int:
        return min(self.depth, self._drafter.most_depth(context))

    def propose(self, context: Context, budget: int) -> DraftSteps[Proposal]:
        depth = self.most_depth(context)
        if depth <= 0 or budget <= 0:
            return Proposal(root_only(context.token_ids[-1]))
        search = self._start_search(context, budget)
        self._search = None  # until the tree is whole: an exception may end it
        search.budget, search.usual, search.most_depth = budget, self._usual, depth
        try:
            yield from self._grow(search, context, depth)
        except ContextFull:  # the draft has no cells for the root
            return Proposal(root_only(context.token_ids[-1]))
        self._search, self._usual = search, search.cutoff(budget)
        return Proposal(search.found())

    def _start_search(self, context: Context, budget: int) -> Search:
        return Search(context.token_ids[-1], budget)

    def _grow(self, search: Search, context: Context, depth: int) -> DraftSteps[None]:
        scores, started = ChildScores(context, self.tau, self.coupling), self._drafter.seconds
        yield from self._read_root(search, scores, context)
        for _ in range(1, depth):
            unread, beam = search.unread(self.enough), self._beam
            if context.pass_times and (cost := self._drafter.cost):
                next_best, spent = search.log_probs[unread[:beam]], self._drafter.seconds - started
                likely, times = search.best_child if self.children > 1 else 1.0, context.pass_times
                beam = worth_reading(search.best(), next_best, search.budget, spent, times, cost, likely)
            batch = search.take(unread, beam, self._limits.leaves(context.sequences), self._limits.max_nodes)
            if len(batch) == 0:
                break
            try:
                yield from self._read(search, scores, batch)
            except ContextFull:  # all sequences together leave no cells: the tree ends here
                break

    def _read_root(self, search: Search, scores: ChildScores, context: Context) -> DraftSteps[None]:
        logits, node = yield from self._drafter.reading(context.token_ids)
        children = scores.children(logits, [node], [0], self._children(search))
        search.add_children(np.array([0]), [COMMITTED], *children)

    def _read(self, search: Search, scores: ChildScores, batch: IdArray) -> DraftSteps[None]:
        above = search.place[search.parents[batch]]
        logits, nodes = yield from self._drafter.evaluating(search.token_ids[batch], above)
        children = scores.children(logits, nodes.tolist(), search.depth[batch].tolist(), self._children(search))
        search.add_children(batch, nodes, *children)

    def _children(self, search: Search) -> int:
        return min(self.children, search.most_kept)

    def result(self, step: Step, logits: Logits | None) -> None:
        if logits:
            self._drafter.saw(step.start, step.path, logits)
        self._advance(step.tokens)

    def give_up(self) -> None:
        self._advance(())

    def _advance(self, tokens: Sequence[int]) -> None:
        """Go on after these tokens of a step; without tokens, it was given up."""
        search, self._search = self._search, None
        if search is not None:
            self._drafter.commit(search.places_along(search.follow(tokens)))

    def saw_prompt(self, start: int, count: int, logits: Logits) -> None:
        self._drafter.saw(start, range(count), logits, prompt=True)

    def close(self) -> None:
        self._search = None
        self._drafter.close()
