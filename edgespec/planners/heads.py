"""Heads as drafts: a few layers that draft from the target's own states.

EAGLE-3 (arXiv 2503.01840) and multi-token prediction (DeepSeek-V3, arXiv 2412.19437). Any planner with a draft can use
one. `HeadDrafter` does what a head needs besides:

    saw_prompt, saw    give the target's states to the session
    propose            read new committed tokens from these states, then nodes from the head's own
    commit             drop all nodes, since their cells came from the head's own states
"""

from collections.abc import Sequence
from typing import cast

from edgespec.loop.backend import GivesStates, Logits, TakesStates
from edgespec.loop.passes import prefill
from edgespec.loop.tree import DraftTree
from edgespec.planners.drafting import CATCH_UP, Drafter


class HeadDrafter(Drafter):
    """A `Drafter` of a head, for a target whose logits are `GivesStates`."""

    foresees = False
    _known: list[int]  # tokens that the target has seen

    def begin(self, prompt_ids: Sequence[int]) -> None:
        self._known = list(prompt_ids)
        super().begin(prompt_ids)

    def saw_prompt(self, start: int, count: int, logits: Logits) -> None:
        self._give(start, range(count), logits)
        self._read_known(start + count)

    def saw(self, start: int, tree: DraftTree, path: Sequence[int], logits: Logits) -> None:
        self._known[start:] = tree.token_ids[list(path)].tolist()
        self._give(start, path, logits)
        if len(self._known) - len(self.session.token_ids) > CATCH_UP:
            self._read_known(len(self._known))

    def _give(self, start: int, nodes: Sequence[int], logits: Logits) -> None:
        cast(TakesStates, self.session).give(start, cast(GivesStates, logits).states(nodes))

    def _read_known(self, end: int) -> None:
        """Read tokens at once, so that few states are kept: those whose states the target gave, before `end`."""
        if end <= self.draft.capabilities.context_length:
            prefill(self.draft, self.session, self._known[: end + 1])

    def commit(self, path: Sequence[int]) -> None:
        super().commit([])
