"""Plain decoding, as a planner that guesses nothing."""

from collections.abc import Sequence

from edgespec.loop.planner import Context
from edgespec.loop.tree import DraftTree, root_only


class NonePlanner:
    """The baseline every other planner is compared with."""

    name = "none"
    model_seconds = 0.0
    plain_seconds = 0.0

    def begin(self, prompt_ids: Sequence[int]) -> None:
        """Nothing to prepare."""

    def plan(self, context: Context, budget: int) -> DraftTree:
        """Only the root."""
        return root_only(context.token_ids[-1])

    def accept(self, tokens: Sequence[int], seconds: float) -> None:
        """Nothing to learn."""

    def close(self) -> None:
        """Nothing to free."""
