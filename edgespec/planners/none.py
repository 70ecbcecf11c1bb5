"""Plain decoding, as a planner that proposes nothing."""

from edgespec.loop.draft_passes import DraftSteps
from edgespec.loop.planner import Context, Planner
from edgespec.loop.tree import Proposal, root_only


class NonePlanner(Planner):
    name = "none"

    def propose(self, context: Context, budget: int) -> DraftSteps[Proposal]:
        yield from ()
        return Proposal(root_only(context.token_ids[-1]))
