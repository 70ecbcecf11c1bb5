"""EasySpec (arXiv 2502.02493): draft passes compute several layers from one input, so keys and values are approximate.

No node is committed, so the draft reads accepted tokens again, exactly, in the next step's first pass: the repair.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

from edgespec.errors import UsageError
from edgespec.loop.backend import Backend, GroupsLayers
from edgespec.planners.choice import SEARCH, Method
from edgespec.planners.specexec import SpecExecPlanner


class EasySpecPlanner(SpecExecPlanner):
    name = "easyspec"
    layers: ClassVar[int] = 4  # of a group

    def __init__(self, draft: Backend, **options: Any) -> None:
        """As `SpecExecPlanner`.

        Raises:
            UsageError: the draft's engine cannot, or its layers are of another kind.
        """
        if not isinstance(draft, GroupsLayers):
            raise UsageError(f"the planner easyspec needs a draft on PyTorch (--backend torch), not on {draft.name}")
        draft.group_layers(1)  # refuses layers of another kind now, not in the first pass
        super().__init__(draft, **options)
        self._drafter.layers = self.layers

    def observe(self, tokens: Sequence[int], seconds: float) -> None:
        search, self._search = self._search, None
        if search is not None:
            self._drafter.commit([])


METHOD = Method(lambda parts: parts.drafting(EasySpecPlanner), SEARCH, draft=True, needs_draft=True)
