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
from edgespec.planners.drafting import Drafter


class HeadDrafter(Drafter):
    """A `Drafter` of a head, for a target whose logits are `GivesStates`."""

    _prompt: Sequence[int]

    def begin(self, prompt_ids: Sequence[int]) -> None:
        self._prompt = prompt_ids
        super().begin(prompt_ids)

    def saw_prompt(self, start: int, count: int, logits: Logits) -> None:
        self._give(start, range(count), logits)
        end = start + count  # read at once, so that few states are kept
        if end <= self.draft.capabilities.context_length:
            prefill(self.draft, self.session, self._prompt[: end + 1])

    def saw(self, start: int, tree: DraftTree, path: Sequence[int], logits: Logits) -> None:
        self._give(start, path, logits)

    def _give(self, start: int, nodes: Sequence[int], logits: Logits) -> None:
        cast(TakesStates, self.session).give(start, cast(GivesStates, logits).states(nodes))

    def commit(self, path: Sequence[int]) -> None:
        super().commit([])
