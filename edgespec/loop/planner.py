"""Planners guess; the target decides. One file a planner, all pure numpy."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from edgespec.loop.backend import Session
from edgespec.loop.draft_passes import DraftSteps
from edgespec.loop.hint_texts import Beside
from edgespec.loop.pass_times import Curve
from edgespec.loop.sampling import Noise, SamplingParams
from edgespec.loop.tree import DraftTree


@dataclass(frozen=True, slots=True)
class Context:
    """What a planner may look at when it plans one round."""

    token_ids: Sequence[int]  # all committed tokens; the last is the tree's root, at position len - 1
    prompt_length: int  # how many of them are prompt
    sampling: SamplingParams
    noise: Noise  # the noise the target's samples will use
    max_depth: int  # deeper nodes cannot be used: the output would be too long
    max_leaves: int  # most leaves the target's backend can hold
    cost: Curve | None = None  # of the target's passes: stop where more guesses do not pay; None: use the whole budget
    least: float = 0.0  # a guess less probable than this does not pay
    head: int | None = None  # tokens that each path of the target's pass begins with (`paths.py`); None: no paths
    texts: int = 1  # that have trees at once, and share what backends hold of leaves
    beside: Beside = ()  # other texts that may foretell this one
    foreseen: int = 0  # how many of the tokens are not committed, where a planner looks ahead


@runtime_checkable
class Planner(Protocol):
    """Guesses trees. Never touches the target."""

    @property
    def name(self) -> str:
        """What a user calls it."""

    @property
    def model_seconds(self) -> float:
        """Time spent in draft-model passes since `begin`."""

    def begin(self, prompt_ids: Sequence[int]) -> None:
        """A generation starts. Raises ContextFull when the prompt does not fit into the draft's context."""

    @property
    def plain_seconds(self) -> float:
        """Seconds of the target's pass over one node, if this planner has measured it, else 0."""

    def plan(self, context: Context, budget: int) -> DraftTree:
        """A tree rooted at the last committed token with at most `budget` nodes besides the root."""

    def accept(self, tokens: Sequence[int], seconds: float) -> None:
        """What the target really wrote, accepted tokens, then the bonus, and how long its pass took.

        0 seconds: the pass was shared with other texts, and part of the tree may have been left out of it. No tokens:
        the tree was not evaluated.
        """

    def close(self) -> None:
        """Free what `begin` and `plan` took (a session in the draft's cache)."""


@runtime_checkable
class Drafts(Protocol):
    """A planner that may have a draft model."""

    @property
    def draft_session(self) -> Session | None:
        """The draft's session, which may be saved and loaded between texts; None: there is no draft."""

    @property
    def model_passes(self) -> int:
        """Draft passes since `begin`."""

    def planning(self, context: Context, budget: int) -> DraftSteps[DraftTree]:
        """The steps of `plan`, in which several texts may share the draft's passes (`together.py`)."""


@runtime_checkable
class GoesAhead(Protocol):
    """A planner whose draft may go on while the target works (`ahead.py`)."""

    @property
    def hidden_seconds(self) -> float:
        """Time since `begin` of draft passes beside which the target worked: not in `model_seconds`."""

    @property
    def went_on(self) -> int:
        """Rounds since `begin` whose search went on in the next."""

    def beside(self, nodes: int) -> AbstractContextManager[None]:
        """Within it the target judges the tree just planned, of so many nodes, and nothing else: the draft may go on.

        Then comes `accept`, and no other planner with this draft is asked before.
        """


@runtime_checkable
class Foresees(Protocol):
    """A planner that can look further ahead than a tree."""

    def foresee(self, context: Context, count: int, seconds: float) -> list[int]:
        """The likeliest next tokens, at most `count`, and those that `seconds` are enough for, but at least one.

        None, where first a part of the text had to be read.
        """
