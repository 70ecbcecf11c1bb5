"""One sequence from the draft model: the classical baseline (Leviathan et al., arXiv 2211.17192).

Each draft pass adds the draft's best next token, coupled to the target's noise as in `specexec.py`.
"""

import numpy as np

from edgespec.backend import Backend
from edgespec.cost import PassCost, worth_reading
from edgespec.planners import Context
from edgespec.planners.drafting import COMMITTED, NOT_EVALUATED, DraftPlanner, Guess
from edgespec.tree import DraftTree, Source, make_tree, root_only


class ChainPlanner(DraftPlanner):
    """A tree without branches."""

    name = "chain"

    def __init__(
        self,
        draft: Backend,
        *,
        depth: int = 16,
        tau: float | None = None,
        coupling: bool = True,
        cost: PassCost | None = None,
    ) -> None:
        """
        Args:
            draft: a loaded draft model with the target's vocabulary.
            depth: most tokens guessed per round, one draft pass each.
            tau: see `SpecExecPlanner`.
            coupling: see `SpecExecPlanner`.
            cost: see `SpecExecPlanner`.
        """
        super().__init__(draft, depth, tau, coupling, cost)

    def plan(self, context: Context, budget: int) -> DraftTree:
        """Best token after best token."""
        self._planned = None
        most_nodes = self._drafter.draft.capabilities.max_nodes
        steps = min(self.depth, budget, self._drafter.room(context), most_nodes + 1)  # the last is not evaluated
        if steps <= 0:
            return root_only(context.token_ids[-1])
        guess, started = Guess(context, self.tau, self.coupling), self.model_seconds
        logits, node = self._drafter.read(context.token_ids)
        token_ids, log_probs, place = [context.token_ids[-1]], [0.0], [COMMITTED]
        for depth in range(steps):
            ids, values = guess.children(logits, [node], [depth], 1)
            token_ids.append(int(ids[0][0]))
            log_probs.append(log_probs[-1] + min(0.0, float(values[0][0])))
            if context.cost and (cost := self._drafter.cost):
                spent, found = self.model_seconds - started, np.array(log_probs[1:])
                if not worth_reading(found, found[-1:], budget, spent, context.cost, cost):
                    break
            if depth + 1 < steps:
                logits, nodes = self._drafter.evaluate(np.array(token_ids[-1:]), np.array(place[-1:]))
                node = int(nodes[0])
                place.append(node)
        drafted = len(token_ids) - 1
        sources = [Source.TARGET] + [Source.DRAFT] * drafted
        tree = make_tree(token_ids, range(-1, drafted), log_probs, sources)
        # The last token is never read by the draft: nothing was to be guessed after it.
        self._planned = tree, np.array([*place, NOT_EVALUATED])
        return tree
