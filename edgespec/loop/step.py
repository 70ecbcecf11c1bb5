"""The record of a step. `Generation` makes it once, after the pass; statistics and planners read it."""

from collections.abc import Sequence
from dataclasses import dataclass

from edgespec.loop.tree import DraftTree, Source, root_only


@dataclass(frozen=True, slots=True)
class LogProbs:
    """A token's probability by the target's logits, before bias, penalties and temperature.

    Attributes:
        log_prob: of the token.
        best: the most probable tokens and their log-probabilities, best first.
    """

    log_prob: float
    best: list[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class Step:
    """
    Attributes:
        tokens: tokens that the step adds to the sequence, at least one.
        sources: source of each token; TARGET for the bonus.
        finished: the finish reason; "": the sequence goes on.
        tree: the verified tree.
        path: its committed nodes, the root first.
        log_probs: of each token; empty unless asked for.
        start: position of the tree's root.
        sequences: number of sequences that shared the pass; 0: the first token, which the prompt's pass gave.
        rows: of the sequence in the pass: nodes, and with recurrent layers what its paths read again.
        plain: plain decoding would make the same pass.
        seconds: of the pass.
        wait_seconds: of these, those in which it waited for weights.
        draft_seconds: of the draft's passes before it and while its tokens were sampled.
    """

    tokens: list[int]
    sources: list[Source]
    finished: str
    tree: DraftTree
    path: list[int]
    log_probs: list[LogProbs]
    start: int
    sequences: int = 0
    rows: int = 0
    plain: bool = False
    seconds: float = 0.0
    wait_seconds: float = 0.0
    draft_seconds: float = 0.0

    @property
    def own_seconds(self) -> float:
        """Of the pass if no other sequence shared it, so that they teach what a pass of this sequence takes; else 0."""
        return self.seconds if self.sequences == 1 else 0.0

    @property
    def drafted(self) -> int:
        """Number of draft tokens that were verified."""
        return len(self.tree) - 1


def step_of(tokens: Sequence[int], seconds: float = 0.0, rows: int = 1) -> Step:
    """A step whose tokens came from elsewhere; with `seconds`, from a pass of its own over `rows` rows."""
    tokens, sequences = list(tokens), 1 if seconds else 0
    sources = [Source.TARGET] * len(tokens)
    return Step(tokens, sources, "", root_only(0), [0], [], 0, sequences, rows, rows == 1, seconds)
