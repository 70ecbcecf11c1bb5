"""PEARL (arXiv 2408.11850): the target's pass begins at once, with the draft tokens found during the last one.

pre-verify    there are none, so the pass is over the root
post-verify   the pass is over them

In both the draft goes on meanwhile. A chain has as many tokens as draft passes fit into a target pass, by the last pass
of each model.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from edgespec.loop.backend import Backend, Logits
from edgespec.loop.draft_passes import DraftSteps
from edgespec.loop.planner import Context
from edgespec.loop.sampling import IdArray
from edgespec.loop.step import Step
from edgespec.planners.ahead import AheadChainPlanner, AheadSearch
from edgespec.planners.chain import ChainPlanner
from edgespec.planners.choice import CHAIN, Method
from edgespec.planners.search import Search

FIRST_LENGTH = 8  # until both passes were measured


class PearlPlanner(AheadChainPlanner):
    name = "pearl"
    usual_depth = 64

    _target_seconds = 0.0  # of the last pass
    _went_ahead = False

    def __init__(self, draft: Backend, **options: Any) -> None:
        """As `AheadPlanner`, but the draft's thread never gives way: the target would find no draft tokens."""
        super().__init__(draft, **options | {"nice": False})

    @property
    def length(self) -> int:
        target, draft = self._target_seconds, self._drafter.last
        return max(1, round(target / draft)) if target and draft else FIRST_LENGTH

    def begin(self, prompt_ids: Sequence[int]) -> None:
        self._went_ahead = False
        super().begin(prompt_ids)

    def _grow(self, search: Search, context: Context, depth: int) -> DraftSteps[None]:
        """Draft before the pass only if the draft could not go on during the last one."""
        went_ahead, self._went_ahead = self._went_ahead, False
        if not went_ahead:
            yield from super()._grow(search, context, min(depth, self.length))

    @contextmanager
    def during(self, nodes: int) -> Iterator[None]:
        self._went_ahead = True
        with super().during(nodes):
            yield

    def _batches(self, search: AheadSearch, depth: int, leaves: int) -> Iterator[IdArray]:
        return super()._batches(search, min(depth, int(search.depth.max()) + self.length), leaves)

    def result(self, step: Step, logits: Logits | None) -> None:
        self._target_seconds = step.own_seconds or self._target_seconds
        super().result(step, logits)


METHOD = Method(
    lambda parts: parts.drafting(ChainPlanner, PearlPlanner), CHAIN, draft=True, needs_draft=True, ahead=True
)
