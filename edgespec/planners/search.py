"""The draft's best-first search, Algorithm 2 of SpecExec (arXiv 2406.02532): the most probable nodes are read first."""

from collections.abc import Sequence
from itertools import takewhile
from statistics import fmean

import numpy as np
from numpy.typing import ArrayLike, NDArray

from edgespec.loop.sampling import IdArray, Scores
from edgespec.loop.tree import DraftTree, FloatArray, Source, shallow

COMMITTED = -1  # `Search.place` of the root
NOT_READ = -2

ENOUGH = 0.003  # tokens that reading a node is expected to add, at least
LIKELY_CHILD = 0.8  # probability of a node's best child, until the draft has read a node
MOST_DEPTH = 1 << 30


class Search:
    """All nodes found so far, as growing arrays of shape [n]; node 0 is the root.

    Attributes:
        budget: K, most nodes that are sent to the target.
        usual: the cutoff that is expected at the search's end; -inf: unknown.
        most_depth: greatest depth of a useful node: the output ends there.
        token_ids: [n].
        parents: [n].
        log_probs: [n].
        depth: [n].
        place: [n] numbers in the draft's session, or COMMITTED, or NOT_READ.
        read: number of nodes that the draft has read, the root left out.
        leaves: number of leaves among the nodes read.
    """

    def __init__(self, root_token: int, budget: int) -> None:
        """
        Args:
            root_token: the last token of the sequence.
            budget: as the attribute.
        """
        self.budget = budget
        self.usual = -np.inf
        self.most_depth = MOST_DEPTH
        self.token_ids = np.array([root_token], np.int64)
        self.parents = np.array([-1], np.int64)
        self.log_probs = np.zeros(1)
        self.depth = np.zeros(1, np.int64)
        self.place = np.array([NOT_READ], np.int64)
        self.read = 0
        self.leaves = 1
        self._parents_read: set[int] = set()  # nodes with a child that the draft has read
        self._best_children = [LIKELY_CHILD]

    @property
    def most_kept(self) -> int:
        """Nodes less probable than the `most_kept`-th best one are not kept."""
        return self.budget

    def cutoff(self, count: int) -> float:
        """
        Returns:
            The log-probability of the `count`-th best node; -inf: there are fewer.
        """
        values = self._of_use()
        return float(-np.partition(-values, count - 1)[count - 1]) if len(values) >= count else -np.inf

    def _of_use(self) -> FloatArray:
        return self.log_probs[1:][self.depth[1:] <= self.most_depth]

    def add_children(self, batch: IdArray, places: ArrayLike, ids: Sequence[IdArray], values: Sequence[Scores]) -> None:
        """Add the best children of nodes that the draft has just read.

        Args:
            batch: [m] these nodes.
            places: [m] their places in the draft's session.
            ids: tokens of each node's children, best first.
            values: log q of each child, given its parent.
        """
        self.place[batch] = places
        counts = [len(found) for found in ids]
        parents = np.repeat(batch, counts)
        self._best_children += [float(np.exp(found[0])) for found in values]
        log_probs = np.concatenate(values) + self.log_probs[parents]
        # Rounding must not lift a child above its parent: the best nodes would be no tree.
        log_probs = np.minimum(log_probs, self.log_probs[parents])
        near = log_probs > self.cutoff(self.most_kept)
        self.token_ids = np.concatenate([self.token_ids, np.concatenate(ids)[near]])
        self.parents = np.concatenate([self.parents, parents[near]])
        self.log_probs = np.concatenate([self.log_probs, log_probs[near]])
        self.depth = np.concatenate([self.depth, np.repeat(self.depth[batch], counts)[near] + 1])
        self.place = np.concatenate([self.place, np.full(np.count_nonzero(near), NOT_READ)])

    def best(self) -> FloatArray:
        return -np.sort(-self._of_use())[: self.budget]

    @property
    def best_child(self) -> float:
        """Mean of the probability of a node's best child, given the node."""
        return fmean(self._best_children)

    def unread(self, enough: float = ENOUGH) -> NDArray[np.intp]:
        """
        Args:
            enough: tokens that reading a node must be expected to add.

        Returns:
            The unread nodes whose best child is likely to be among the K best nodes, most probable first. While some
            are above the `usual` cutoff, others are left out, since they seldom improve the tree.
        """
        likely = np.where(self._open(self.most_depth), self.best_child * np.exp(self.log_probs), 0.0)
        cutoff = self.cutoff(self.budget)
        for least in (max(cutoff, self.usual), cutoff):
            nodes: NDArray[np.intp] = np.flatnonzero(likely > np.exp(least) + enough)
            if len(nodes):
                break
        return nodes[np.argsort(-self.log_probs[nodes], kind="stable")]

    def _open(self, depth: int) -> NDArray[np.bool_]:
        found: NDArray[np.bool_] = (self.place == NOT_READ) & (self.depth < depth)
        return found

    def take(self, unread: NDArray[np.intp], beam: int, max_leaves: int, max_nodes: int) -> IdArray:
        """
        Args:
            unread: nodes that could be read, best first.
            beam: most nodes of the draft's pass.
            max_leaves: most leaves among the nodes read.
            max_nodes: most nodes read.

        Returns:
            The first of `unread` for which there is room; they count as read.
        """
        batch = list[int]()
        for node in unread.tolist():
            parent = int(self.parents[node])
            adds_leaf = parent in self._parents_read  # a first child takes its parent's place as a leaf
            if len(batch) == beam or self.read >= max_nodes:
                break
            if adds_leaf and self.leaves >= max_leaves:
                continue
            self._parents_read.add(parent)
            self.leaves += adds_leaf
            self.read += 1
            batch.append(node)
        return np.array(batch, np.int64)

    def found(self) -> DraftTree:
        source = np.full(len(self.parents), Source.DRAFT)
        source[0] = Source.TARGET
        tree = DraftTree(
            self.token_ids.astype(np.int32), self.parents.astype(np.int32), self.log_probs,
            self.depth.astype(np.int32), source.astype(np.int32),
        )  # fmt: skip
        return shallow(tree, self.most_depth)

    def follow(self, tokens: Sequence[int]) -> list[int]:
        path, at = list[int](), 0
        for token in tokens:
            children = np.flatnonzero((self.parents == at) & (self.token_ids == token))
            if len(children) == 0:
                break
            at = int(children[0])
            path.append(at)
        return path

    def places_along(self, path: Sequence[int]) -> list[int]:
        return list(takewhile(lambda place: place != NOT_READ, self.place[path].tolist()))
