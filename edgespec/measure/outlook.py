"""One engine with a model on a machine: what runs where, seconds of passes, and the speed that they promise.

Passes are measured by `doctor.diagnose`, or computed by `predictor.predict`. The tokens per pass are estimated.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, log2

import numpy as np

from edgespec.loading.timed_pass import Pass
from edgespec.loading.where import Where
from edgespec.weights.plan import two_digits

# Tokens per pass in a chat, with trees of 8 and of 64 nodes, as in docs/measured.md.
EXPECTED_TOKENS = {"specexec": (4.0, 7.0), "sssd": (1.6, 2.0), "head": (1.8, 2.25)}
BEAM = 16  # nodes of a draft pass; a tree takes about twice its nodes
COMPUTED = "computed, not measured"


@dataclass(slots=True, kw_only=True)
class Outlook:
    """
    Attributes:
        engine: its name.
        where: what computes which layers; None if the model cannot run.
        passes: over one node up to a full tree; empty if the model cannot run.
        draft_seconds: to draft the largest of these trees; 0: there is no draft.
        by_head: the draft is a head.
        cannot_run: the reason, or "".
    """

    engine: str
    where: Where | None = None
    passes: Sequence[Pass] = ()
    draft_seconds: float = 0.0
    by_head: bool = False
    cannot_run: str = ""

    @property
    def tokens_per_second(self) -> dict[str, float]:
        """Of a chat, by planner that can be used, each with the best of the trees."""
        if not self.passes:
            return {}
        one, *trees = self.passes
        expected = {"none": 1 / one.seconds}
        for name in ("sssd", *(["specexec"] if self.draft_seconds else [])) if trees else ():
            usual = "head" if name == "specexec" and self.by_head else name
            drafting = self.draft_seconds / draft_passes(trees[-1].nodes) if name == "specexec" else 0.0
            expected[name] = max(
                expected_tokens(usual, tree.nodes) / (tree.seconds + draft_passes(tree.nodes) * drafting)
                for tree in trees
            )
        return expected | ({"auto": max(expected.values())} if trees else {})

    @property
    def best(self) -> float:
        return max(self.tokens_per_second.values(), default=0.0)

    def told(self, speed: float) -> str:
        return f"{self.engine} {f'about {two_digits(speed)} tokens/s' if speed else 'cannot run it'}"


def sizes(most: int, *, mixture: bool) -> list[int]:
    """Nodes of the passes that are looked at, up to a full tree of `most`."""
    return sorted({1, most, *(nodes for nodes in ((2, 4, 8, 16) if mixture else (8,)) if nodes < most)})


def expected_tokens(planner: str, nodes: int) -> float:
    """Tokens per pass with trees of so many nodes, by a planner or a head."""
    return float(np.interp(log2(nodes), (0, 3, 6), (1.0, *EXPECTED_TOKENS[planner])))


def draft_passes(nodes: int) -> int:
    """To draft a tree: no fewer than its depth, so than the draft tokens that are expected to be accepted."""
    return max(-(-2 * (nodes - 1) // BEAM), ceil(expected_tokens("specexec", nodes) - 1))
