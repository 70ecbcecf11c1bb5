"""SpecBranch (arXiv 2506.01979): while the target runs, the draft first reads where its likeliest path may end.

The branch point is the first node of that path that the target is not expected to accept, or the path's end. Its best
siblings are the branches: the surer the node, the fewer. The paper's predictor (H-RAD) sees the target's states; here a
logistic one sees what every engine gives: the draft's confidence and entropy, and the share that was accepted last.
`6efbca4e:scripts/train-branches` trained it on recorded answers.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from edgespec.loop.draft_passes import DraftSteps
from edgespec.loop.passes import common_prefix
from edgespec.loop.planner import Context
from edgespec.loop.sampling import IdArray
from edgespec.loop.tree import FloatArray, Proposal
from edgespec.planners.ahead import AheadPlanner, AheadSearch
from edgespec.planners.choice import SEARCH, Method
from edgespec.planners.search import NOT_READ, Search
from edgespec.planners.specexec import SpecExecPlanner

MOST_BRANCHES = 4
EXPECTED = 0.5  # probability from which a node is expected to be accepted
WEIGHTS = np.array([0.662, 0.597, -0.643, -0.249])  # of `features`; Qwen2.5-Coder 0.5B and 1.5B, T = 0


def likeliest_path(search: Search) -> list[int]:
    path, at = list[int](), 0
    while len(children := np.flatnonzero(search.parents == at)):
        at = int(children[np.argmax(search.log_probs[children])])
        path.append(at)
    return path


def features(search: Search, path: Sequence[int], share: float) -> FloatArray:
    """
    Args:
        search: with the path's nodes.
        path: nodes from a child of the root down.
        share: of the last path's nodes that were accepted.

    Returns:
        [n, 4] for each node: 1, log-odds that it is the draft's token, entropy of the draft's choice, share.
    """
    found = []
    for node in path:
        siblings = np.flatnonzero(search.parents == search.parents[node])
        q = np.exp(search.log_probs[siblings] - search.log_probs[search.parents[node]])
        q = np.clip([*q, 1 - q.sum()], 1e-6, 1 - 1e-6)  # the last is the rest of the vocabulary
        own = q[np.flatnonzero(siblings == node)[0]]
        found.append([1.0, np.log(own / (1 - own)), -(q * np.log(q)).sum(), share])
    return np.array(found).reshape(len(path), 4)


class SpecBranchPlanner(AheadPlanner):
    name = "specbranch"
    weights = WEIGHTS

    _share = 1.0
    _path: Sequence[int] = ()  # the likeliest of the last tree

    def begin(self, prompt_ids: Sequence[int]) -> None:
        self._share, self._path = 1.0, ()
        super().begin(prompt_ids)

    def propose(self, context: Context, budget: int) -> DraftSteps[Proposal]:
        self._path = []
        proposal = yield from super().propose(context, budget)
        self._path = likeliest_path(self._search) if self._search else []
        return proposal

    def _batches(self, search: AheadSearch, depth: int, leaves: int) -> Iterator[IdArray]:
        if len(batch := self._take(search, self.branches(search, depth), leaves)):
            yield batch
        yield from super()._batches(search, depth, leaves)

    def branches(self, search: AheadSearch, depth: int) -> NDArray[np.intp]:
        """Unread nodes among the best at the branch point, best first."""
        accepted: FloatArray = 1 / (1 + np.exp(-features(search, self._path, self._share) @ self.weights))
        at = next((i for i, chance in enumerate(accepted) if chance < EXPECTED), len(accepted) - 1)
        if at < 0:
            return np.zeros(0, np.intp)
        siblings = np.flatnonzero((search.parents == search.parents[self._path[at]]) & (search.depth < depth))
        best_first = siblings[np.argsort(-search.log_probs[siblings], kind="stable")]
        best = best_first[: max(1, int(MOST_BRANCHES * (1 - accepted[at])))]
        unread: NDArray[np.intp] = best[search.place[best] == NOT_READ]
        return unread

    def _advance(self, tokens: Sequence[int]) -> None:
        if tokens and self._search and self._path:
            accepted = common_prefix(self._search.token_ids[self._path].tolist(), tokens)
            self._share = accepted / len(self._path)
        super()._advance(tokens)
        self._path = ()  # a step that proposes nothing goes on with another search


METHOD = Method(
    lambda parts: parts.drafting(SpecExecPlanner, SpecBranchPlanner), SEARCH, draft=True, needs_draft=True, ahead=True
)
