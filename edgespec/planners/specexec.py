"""SpecExec: the K most probable continuations under a draft model, as one tree.

Algorithm 2 of "SpecExec: Massively Parallel Speculative Decoding for Interactive LLM Inference on
Consumer Devices" (arXiv 2406.02532), a parallel single-source shortest path search. A node's distance
is its cumulative -log q. Each step expands the nearest `beam` nodes in one draft pass; the search
ends after `depth` steps, or when no node is left whose best child is likely to come into the K nearest; or, where costs
are known, when reading on would take more time than it can gain (`cost.py`).

Ours on top: coupling. The noise of future positions is known before drafting, since it belongs to
the position (`sampling.py`). So the draft is asked what the target will *sample*:

    q = softmax((z + T * gumbel(seed, position)) / tau)

where tau, in logits, says how far draft and target usually disagree. At T = 0 the noise is gone,
and one formula serves every temperature. The text does not change; the guesses become better.
"""

from collections.abc import Sequence
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from edgespec.backend import Backend, Logits
from edgespec.cost import PassCost, worth_reading
from edgespec.planners import Context
from edgespec.planners.drafting import COMMITTED, NOT_EVALUATED, DraftPlanner, Guess
from edgespec.sampling import IdArray
from edgespec.tree import DraftTree, FloatArray, Source, choose, root_only, select

CHILDREN = 32  # children of a node that are considered
ENOUGH = 0.003  # tokens that reading a node must be likely to add
LIKELY_CHILD = 0.8  # how likely a node's best child is, until the draft has been asked


class SpecExecPlanner(DraftPlanner):
    """Best-first trees from a draft model."""

    name = "specexec"

    def __init__(
        self,
        draft: Backend,
        *,
        depth: int = 32,
        beam: int = 16,
        tau: float | None = None,
        coupling: bool = True,
        cost: PassCost | None = None,
    ) -> None:
        """
        Args:
            draft: a loaded draft model with the target's vocabulary.
            depth: most draft passes per tree, so also the deepest node.
            beam: most nodes expanded per draft pass.
            tau: usual disagreement of draft and target, in logits; default: 0.7 when greedy, 1.3 when sampling.
            coupling: draft with the target's own noise; without it q = softmax(z / T).
            cost: where the draft's passes are counted; default: known to this planner alone.
        """
        super().__init__(draft, depth, tau, coupling, cost)
        self._limits = draft.capabilities
        self._beam = min(beam, self._limits.max_wanted)
        self._usual = -np.inf  # the K-th best log-probability of the last search: this one's will be much alike

    def plan(self, context: Context, budget: int) -> DraftTree:
        """Algorithm 2."""
        self._planned = None
        steps = min(self.depth, self._drafter.room(context))
        if steps <= 0 or budget <= 0:
            return root_only(context.token_ids[-1])
        guess = Guess(context, self.tau, self.coupling)
        search = _Search(context.token_ids[-1], budget, self._usual)
        started = self.model_seconds
        logits, root = self._drafter.read(context.token_ids)
        search.add_children(logits, guess, np.array([0]), [root])
        for _ in range(1, steps):
            unread, beam = search.unread(), self._beam
            if context.cost and (cost := self._drafter.cost):
                next_best, spent = search.log_probs[unread[:beam]], self.model_seconds - started
                beam = worth_reading(search.best(), next_best, budget, spent, context.cost, cost, search.child)
            batch = search.take(unread, beam, self._limits.leaves(context.texts), self._limits.max_nodes)
            if len(batch) == 0:
                break
            logits, nodes = self._drafter.evaluate(search.token_ids[batch], search.place[search.parents[batch]])
            search.place[batch] = nodes
            search.add_children(logits, guess, batch, nodes.tolist())
        found, self._usual = search.found(), search.cutoff()
        self._planned = found, search.place  # all of it: the target may well write what does not come into the tree
        return select(found, choose(found.parents, found.log_probs, budget, context.max_leaves))


class _Search:
    """All nodes found so far, as growing arrays of shape [n]; node 0 is the root."""

    def __init__(self, root_token: int, budget: int, usual: float) -> None:
        self.budget = budget
        self.usual = usual  # what the cutoff is expected to become
        self.token_ids = np.array([root_token], np.int64)
        self.parents = np.array([-1], np.int64)
        self.log_probs = np.zeros(1)
        self.depth = np.zeros(1, np.int64)
        self.place = np.array([COMMITTED], np.int64)  # in the draft's session
        self.parents_expanded: set[int] = set()  # nodes with a child that the draft has read
        self.leaves = 1
        self.read = 0
        self._best_children = [LIKELY_CHILD]

    def cutoff(self) -> float:
        """The K-th best cumulative log-probability: what lies below cannot come into the tree any more."""
        if len(self.log_probs) <= self.budget:
            return -np.inf
        return float(-np.partition(-self.log_probs[1:], self.budget - 1)[self.budget - 1])

    def add_children(self, logits: Logits, guess: Guess, batch: IdArray, nodes: Sequence[int]) -> None:
        """Put the best children of the nodes just read (`nodes` in the draft's session) on the map."""
        depth = self.depth[batch]
        found = guess.children(logits, nodes, depth.tolist(), min(CHILDREN, self.budget))
        counts = [len(ids) for ids in found[0]]
        parents = np.repeat(batch, counts)
        self._best_children += [float(np.exp(values[0])) for values in found[1]]
        log_probs = np.concatenate(found[1]) + self.log_probs[parents]
        # Rounding must not lift a child above its parent: then the best nodes would not be a tree.
        log_probs = np.minimum(log_probs, self.log_probs[parents])
        near = log_probs > self.cutoff()
        self.token_ids = np.concatenate([self.token_ids, np.concatenate(found[0])[near]])
        self.parents = np.concatenate([self.parents, parents[near]])
        self.log_probs = np.concatenate([self.log_probs, log_probs[near]])
        self.depth = np.concatenate([self.depth, np.repeat(depth, counts)[near] + 1])
        self.place = np.concatenate([self.place, np.full(np.count_nonzero(near), NOT_EVALUATED)])

    def best(self) -> FloatArray:
        """The log-probabilities of the K best nodes, best first."""
        return -np.sort(-self.log_probs[1:])[: self.budget]

    @property
    def child(self) -> float:
        """How likely a node's best child is, given the node: the mean of those found."""
        return fmean(self._best_children)

    def unread(self) -> NDArray[np.intp]:
        """The unread nodes that are likely to improve the tree, nearest first: a best child takes the K-th's place.

        While there are some that would do so by the cutoff of the last search, the others wait: they seldom will.
        """
        best_child = np.where(self.place == NOT_EVALUATED, self.child * np.exp(self.log_probs), 0.0)
        for cutoff in (max(self.cutoff(), self.usual), self.cutoff()):
            nodes: NDArray[np.intp] = np.flatnonzero(best_child > np.exp(cutoff) + ENOUGH)
            if len(nodes):
                break
        return nodes[np.argsort(-self.log_probs[nodes], kind="stable")]

    def take(self, unread: NDArray[np.intp], beam: int, max_leaves: int, max_nodes: int) -> IdArray:
        """The first of the unread nodes, as many as a pass and the draft's cache take."""
        batch = list[int]()
        for node in unread.tolist():
            parent = int(self.parents[node])
            adds_leaf = parent in self.parents_expanded  # a first child takes over its parent's path
            if len(batch) == beam or self.read == max_nodes:
                break
            if adds_leaf and self.leaves == max_leaves:
                continue
            self.parents_expanded.add(parent)
            self.leaves += adds_leaf
            self.read += 1
            batch.append(node)
        return np.array(batch, np.int64)

    def found(self) -> DraftTree:
        """Everything on the map."""
        source = np.full(len(self.parents), Source.DRAFT)
        source[0] = Source.TARGET
        return DraftTree(
            self.token_ids.astype(np.int32), self.parents.astype(np.int32), self.log_probs,
            self.depth.astype(np.int32), source.astype(np.int32),
        )  # fmt: skip
