"""The contract between the loop and the methods that propose draft tokens: one file a method, all pure numpy.

A step of one sequence, as a planner sees it:

    unread              tokens that the draft model reads first: a long prompt
    propose             a tree of draft tokens, perhaps with passes of a draft model
    while_target_runs   the target verifies the tree
    saw                 the target's logits
    observe             the tokens that are committed now

Planners decide how many passes a sequence takes, never which tokens it has.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from edgespec.loop.backend import Logits, Session
from edgespec.loop.draft_passes import DraftSteps
from edgespec.loop.hint_texts import Hint
from edgespec.loop.pass_times import Curve
from edgespec.loop.passes import Prefill
from edgespec.loop.sampling import Noise, SamplingParams
from edgespec.loop.tree import DraftTree, Proposal


@dataclass(frozen=True, slots=True)
class Context:
    """State of one sequence at one step, for planners.

    Attributes:
        token_ids: all committed tokens; the last is the tree's root, at position len - 1.
        prompt_length: how many of them are prompt.
        noise: the Gumbel noise that the target's samples will use.
        max_depth: deeper nodes cannot be used: the output would be too long.
        max_leaves: leaves that the pass has room for.
        pass_times: the target's: stop where more nodes do not pay; None: use the whole budget.
        least: a draft token less probable than this does not pay.
        sequences: that have trees at once, and share the leaves that a backend holds.
        hints: texts from which draft tokens may be copied.
        foreseen: last tokens that are not committed; 0 but for `foresee`.
    """

    token_ids: Sequence[int]
    prompt_length: int
    sampling: SamplingParams
    noise: Noise
    max_depth: int
    max_leaves: int
    pass_times: Curve | None = None
    least: float = 0.0
    head: int | None = (
        None  # committed tokens that each path of the pass begins with (recurrent layers); None: no paths
    )
    sequences: int = 1
    hints: Sequence[Hint] = ()
    foreseen: int = 0


@dataclass(frozen=True, slots=True)
class PlannerStats:
    """Counts since `begin`, and a measurement.

    Attributes:
        draft_seconds: of draft passes that the target waited for.
        hidden_seconds: of draft passes made while the target ran.
        went_on: steps whose search was used again by the next step.
        mean_batch: sequences that shared a draft pass; earlier passes fade.
        plain_seconds: of the target's pass over one node, if measured.
    """

    draft_passes: int = 0
    draft_seconds: float = 0.0
    hidden_seconds: float = 0.0
    went_on: int = 0
    mean_batch: float = 1.0
    plain_seconds: float = 0.0


class Planner(ABC):
    """Proposes draft tokens for one sequence at a time. Never touches the target.

    A method needs `propose`; all else has a default.
    """

    name: str = ""  # as users write it
    depth: int = 1 << 30  # most nodes of a path that it proposes, the root left out

    def begin(self, prompt_ids: Sequence[int]) -> None:
        """A sequence of at least one token starts. Makes no pass.

        Raises:
            ContextFull: the prompt does not fit into the draft's context.
        """

    def unread(self, token_ids: Sequence[int]) -> Prefill | None:
        """Tokens that the draft is to read before the next `propose`; the caller makes these passes, between steps.

        Args:
            token_ids: all committed tokens.

        Returns:
            None: there are none, or so few that `propose` reads them.
        """
        return None

    @abstractmethod
    def propose(self, context: Context, budget: int) -> DraftSteps[Proposal]:
        """Yield the draft passes that are wanted, return the tree; more than `budget` nodes are of no use.

        A method without a draft model yields nothing: `yield from ()`.
        """

    def while_target_runs(self, nodes: int) -> AbstractContextManager[None]:
        """Entered while the target verifies the tree just proposed, of `nodes` nodes, and nothing else.

        A draft may go on meanwhile. `observe` comes next; no other planner with this draft is called before.
        """
        return nullcontext()

    def saw(self, tree: DraftTree, path: Sequence[int], logits: Logits) -> None:
        """Learn from the target's logits. Called after verification, before `observe`.

        Args:
            tree: as it was verified.
            path: its nodes that are committed, the root first. These have logits, all others may.
            logits: by node; valid until this returns.
        """

    def observe(self, tokens: Sequence[int], seconds: float) -> None:
        """Learn what the step has brought.

        Args:
            tokens: newly committed: accepted draft tokens, then the bonus. Empty: the tree was not verified.
            seconds: of the target's pass. 0: other sequences shared it, and the tree may have been cut further.
        """

    def foresee(self, context: Context, count: int, seconds: float) -> list[int]:
        """The most probable next tokens, far beyond a tree; called between steps only.

        Args:
            context: its last `context.foreseen` tokens are not committed.
            count: most tokens.
            seconds: stop after about this time, but not without a token.

        Returns:
            An empty list where there is no draft model, or it is still reading the sequence.
        """
        return []

    def close(self) -> None:
        """Free what was opened, such as a session of the draft."""

    @property
    def stats(self) -> PlannerStats:
        """Counted since `begin`."""
        return PlannerStats()

    @property
    def draft_session(self) -> Session | None:
        """The draft's session, which may be saved and loaded between sequences; None: there is no draft."""
        return None
