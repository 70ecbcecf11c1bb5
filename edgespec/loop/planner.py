"""The contract between the loop and planners, which propose draft tokens and never decide the output, but for `mix`.

Four verbs: `begin` a sequence, `propose` a tree of draft tokens, learn from the `result` of each step, `close`. The
first token, which the prompt's last pass gives, is a `result`, too. `give_up` ends a step that has none.

Some planners need more:

    saw_prompt   the target's passes over the prompt
    unread       tokens that the draft reads before it can propose
    paying       with a grammar, the nodes to evaluate
    during       around the target's pass, in which the draft may go on
    mix          what each token is sampled from
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgespec.loop.backend import Logits, Session
from edgespec.loop.draft_passes import DraftSteps
from edgespec.loop.grammar import Constraint
from edgespec.loop.hint_texts import Hint
from edgespec.loop.pass_times import Curve
from edgespec.loop.passes import Prefill, fitting
from edgespec.loop.sampling import Float32Array, Noise, SamplingParams
from edgespec.loop.step import Step
from edgespec.loop.tree import DraftTree, Proposal


@dataclass(frozen=True, slots=True)
class Context:
    """State of one sequence at one step, for planners.

    Attributes:
        token_ids: all tokens of the sequence; the last is the tree's root, at position len - 1.
        prompt_length: number of these that are the prompt.
        sampling: the sequence's.
        noise: Gumbel noise of the target's samples.
        max_depth: most depth of a node: the output ends there.
        max_leaves: leaves for which the pass has room.
        pass_times: the target's, by which only nodes that pay are proposed; None: the whole budget.
        least: least probability at which a draft token pays.
        unread: with recurrent layers, tokens without a state that each path of the pass begins with; None: no paths.
        owes: with recurrent layers, the pass reads accepted tokens again, since the session has no state after them.
        sequences: number of sequences that have trees at once, and share a backend's leaves.
        hints: the sequence's hint texts.
    """

    token_ids: Sequence[int]
    prompt_length: int
    sampling: SamplingParams
    noise: Noise
    max_depth: int
    max_leaves: int
    pass_times: Curve | None = None
    least: float = 0.0
    unread: int | None = None
    owes: bool = False
    sequences: int = 1
    hints: Sequence[Hint] = ()

    @property
    def plain_rows(self) -> int:
        """Rows of a pass without draft tokens."""
        return 1 + (self.unread or 0)


@dataclass(frozen=True, slots=True)
class PlannerStats:
    """Counts since `begin`, and measurements.

    Attributes:
        draft_passes: number of draft passes.
        draft_seconds: of draft passes that the target waited for.
        mixing_seconds: of those of them that `mix` made.
        hidden_seconds: of draft passes made while the target ran.
        went_on: number of steps that went on with the search of the step before.
        mean_batch: mean number of sequences that shared a draft pass; earlier passes fade.
    """

    draft_passes: int = 0
    draft_seconds: float = 0.0
    mixing_seconds: float = 0.0
    hidden_seconds: float = 0.0
    went_on: int = 0
    mean_batch: float = 1.0


class Planner(ABC):
    """Proposes draft tokens for one sequence at a time, and never touches the target.

    Attributes:
        name: as users write it.
        depth: most depth of the trees that it proposes.
        approximate: what changes the distribution, as users read it; "": nothing does.
    """

    name: str = ""
    depth: int = 1 << 30
    approximate: str = ""

    def begin(self, prompt_ids: Sequence[int]) -> None:
        """Start a sequence of at least one token, which may be too long for the draft, without making a pass."""

    def unread(self, token_ids: Sequence[int]) -> Prefill | None:
        """
        Args:
            token_ids: all committed tokens.

        Returns:
            Tokens that the draft must read before the next `propose`, in passes that the caller makes; None: there are
            none, or so few that `propose` reads them.
        """
        return None

    def most_depth(self, context: Context) -> int:
        """Most depth of the next tree; 0 or less: the output ends, or the draft's context is full."""
        return min(self.depth, context.max_depth)

    @abstractmethod
    def propose(self, context: Context, budget: int) -> DraftSteps[Proposal]:
        """Yield the draft passes that are wanted, and return the tree; without a draft model, `yield from ()`.

        Args:
            context: the sequence's state.
            budget: most nodes that can be used.
        """

    def paying(self, tree: DraftTree, context: Context, budget: int) -> NDArray[np.intp]:
        """
        Args:
            tree: the proposed one, without what a grammar refuses, and with what it forces.
            context: as for `propose`.
            budget: as for `propose`.

        Returns:
            Nodes of the tree that pay and fit: [m], at most `budget`, best first, the root left out.
        """
        return fitting(Proposal(tree), budget, context.max_leaves)

    def during(self, nodes: int) -> AbstractContextManager[None]:
        """Context of a pass of the target over the proposed tree only, in which a draft may go on.

        No other planner with this draft is called before `result` or `give_up`.

        Args:
            nodes: of the tree, after it was cut.
        """
        return nullcontext()

    def mix(
        self, row: Float32Array, sampling: SamplingParams, token_ids: Sequence[int], accepted: Sequence[int],
        grammar: Constraint | None,
    ) -> tuple[Float32Array, SamplingParams]:  # fmt: skip
        """What the next token is sampled from; only an approximate method changes it.

        Args:
            row: the target's logits [V], masked by the grammar.
            sampling: the sequence's.
            token_ids: all committed tokens.
            accepted: tokens of this step before the next one.
            grammar: in the state of the next token.

        Returns:
            Logits and how to sample from them.
        """
        return row, sampling

    def saw_prompt(self, start: int, count: int, logits: Logits) -> None:
        """Learn from the target's pass over a part of the prompt, between `begin` and the first `result`.

        Args:
            start: position of its first token.
            count: number of its tokens, each a node.
            logits: valid until this returns.
        """

    def result(self, step: Step, logits: Logits | None) -> None:
        """Learn from a step.

        Args:
            step: its `own_seconds` teach what a pass takes; with 0 the tree may have been cut further.
            logits: of the tree's nodes, valid until this returns: those of `step.path` have them, and others may. None:
                no pass of trees gave the tokens, or the request wants no drafts.
        """

    def give_up(self) -> None:
        """End a step that has no result, whatever was called for it."""

    def close(self) -> None:
        """Free the draft's session."""

    @property
    def stats(self) -> PlannerStats:
        """Counts since `begin`."""
        return PlannerStats()

    @property
    def draft_session(self) -> Session | None:
        """
        Returns:
            The draft's session, which may be saved and loaded between sequences; None: there is no draft.
        """
        return None
