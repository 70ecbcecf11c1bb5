"""The draft tree, as flat numpy arrays.

Node 0, the root, is the last token of the sequence. The target's session has not committed it yet. Each other node is a
draft token for the position after its parent's, and comes after its parent: `parents[i] < i`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import ArrayLike, NDArray

IntArray = NDArray[np.int32]
FloatArray = NDArray[np.float64]


class Source(IntEnum):
    """Origin of a token.

    Attributes:
        TARGET: sampled by the target: the root, and every bonus token.
        DRAFT: proposed by a draft model, or sampled by the target further on.
        INPUT: copied from the prompt, or from the output of this sequence and its siblings.
        DATASTORE: copied from a datastore.
        GRAMMAR: of the only text that a grammar allows.
        PREDICTION: copied from the answer that the request predicts.
    """

    TARGET = 0
    DRAFT = 1
    INPUT = 2
    DATASTORE = 3
    GRAMMAR = 4
    PREDICTION = 5


@dataclass(frozen=True, slots=True)
class DraftTree:
    """A tree of n nodes, as arrays of shape [n].

    Attributes:
        parents: parents[0] == -1, else 0 <= parents[i] < i.
        log_probs: natural log of the estimated probability that the whole path to the node is accepted.
        depth: 0 for the root, 1 for its children.
        source: values of `Source`.
    """

    token_ids: IntArray
    parents: IntArray
    log_probs: FloatArray
    depth: IntArray
    source: IntArray

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Proposal:
    """A tree, of which the loop keeps the nodes that the pass has room for.

    Attributes:
        tree: rooted at the last token of the sequence; of any size.
        nodes: [m] nodes that pay, best first, as `ranked` returns them; None: all.
    """

    tree: DraftTree
    nodes: NDArray[np.intp] | None = None


def make_tree(
    token_ids: ArrayLike, parents: ArrayLike, log_probs: ArrayLike, source: ArrayLike | None = None
) -> DraftTree:
    """Build a tree and its depths.

    Raises:
        ValueError: a parent does not come before its child, or two siblings have one token.
    """
    tokens = np.asarray(token_ids, np.int32)
    up = np.asarray(parents, np.int32)
    sources = np.zeros(len(tokens), np.int32) if source is None else np.asarray(source, np.int32)
    if len(tokens) == 0 or up[0] != -1 or (up[1:] < 0).any() or (up >= np.arange(len(up))).any():
        raise ValueError(f"not a tree: parents {up.tolist()}")
    if len(set(zip(up.tolist(), tokens.tolist(), strict=True))) != len(tokens):
        raise ValueError("two siblings carry the same token")
    return DraftTree(tokens, up, np.asarray(log_probs, np.float64), depths(up), sources)


def depths(parents: ArrayLike) -> IntArray:
    """
    Returns:
        Depth of every node, [n]; a node whose parent is -1 has depth 0.
    """
    up = np.asarray(parents, np.int32)
    depth = list[int]()
    for parent in up.tolist():
        depth.append(depth[parent] + 1 if parent >= 0 else 0)
    return np.asarray(depth, np.int32)


def root_only(token_id: int) -> DraftTree:
    """The tree without draft tokens: a pass over it is plain decoding."""
    return DraftTree(np.array([token_id], np.int32), ABOVE_ROOT, CERTAIN, ZERO, ZERO)


ZERO, ABOVE_ROOT, CERTAIN = np.zeros(1, np.int32), np.full(1, -1, np.int32), np.zeros(1)
for shared in (ZERO, ABOVE_ROOT, CERTAIN):
    shared.flags.writeable = False


def chain_of(token_ids: Sequence[int]) -> DraftTree:
    """The tree without branches: the first token is the root, and all log-probabilities are 0."""
    count = len(token_ids)
    sources = np.full(count, Source.DRAFT, np.int32)
    sources[0] = Source.TARGET
    ids, depth = np.asarray(token_ids, np.int32), np.arange(count, dtype=np.int32)
    return DraftTree(ids, depth - 1, np.zeros(count), depth, sources)


def path_to(parents: Sequence[int] | IntArray, node: int) -> list[int]:
    """Nodes from the top, whose parent is -1, down to `node`."""
    path = [node]
    while parents[path[-1]] >= 0:
        path.append(int(parents[path[-1]]))
    return path[::-1]


def nodes_below(parents: Sequence[int], top: int) -> list[int]:
    """The nodes under `top`, in rising order; -1: all nodes."""
    found, inside = list[int](), {top}
    for node, parent in enumerate(parents):
        if parent in inside:
            inside.add(node)
            found.append(node)
    return found


def parents_among(parents: Sequence[int], kept: Sequence[int]) -> list[int]:
    """
    Returns:
        Parents of the kept nodes, by their new numbers; -1 where the parent is not kept.
    """
    new = {node: i for i, node in enumerate(kept)}
    return [new.get(parents[node], -1) for node in kept]


def ancestor_mask(parents: ArrayLike) -> NDArray[np.bool_]:
    """
    Returns:
        [n, n]: row i is true for node i and its ancestors, to which node i may attend.
    """
    up = np.asarray(parents, np.int32)
    if np.array_equal(up, np.arange(-1, len(up) - 1)):  # as of prompts, which are long
        return np.tri(len(up), dtype=np.bool_)
    mask = np.eye(len(up), dtype=np.bool_)
    for node in range(len(up)):
        if up[node] >= 0:
            mask[node] |= mask[up[node]]
    return mask


def is_leaf(parents: ArrayLike) -> NDArray[np.bool_]:
    """[n]: true where a node has no child."""
    up = np.asarray(parents, np.int32)
    leaf = np.ones(len(up), np.bool_)
    leaf[up[up >= 0]] = False
    return leaf


def shallow(tree: DraftTree, depth: int) -> DraftTree:
    """The tree without the nodes that are deeper than `depth`; the root stays."""
    return select(tree, tree.depth <= max(0, depth))


def ranked(parents: NDArray[np.integer], log_probs: FloatArray, budget: int, max_leaves: int) -> NDArray[np.intp]:
    """
    Args:
        parents: [n] of a tree.
        log_probs: [n]; none exceeds its parent's.
        budget: most nodes.
        max_leaves: most leaves, at least 1.

    Returns:
        [m] best nodes besides the root, best first, ties to the smaller index; the first of them always form a tree
        with it (SpecExec, section 4.2).
    """
    order: NDArray[np.intp] = np.argsort(-log_probs[1:], kind="stable") + 1
    if len(parents) <= max_leaves or np.count_nonzero(is_leaf(parents)) <= max_leaves:
        return order[:budget]
    kept = np.zeros(len(parents), np.bool_)
    has_child = np.zeros(len(parents), np.bool_)
    kept[0], leaves, found = True, 1, list[int]()
    for node in order.tolist():
        if len(found) == budget:
            break
        parent = parents[node]
        adds_leaf = bool(has_child[parent])  # a first child takes over its parent's place as a leaf
        if not kept[parent] or (adds_leaf and leaves == max_leaves):
            continue
        kept[node] = has_child[parent] = True
        leaves += adds_leaf
        found.append(node)
    return np.array(found, np.intp)


def only(tree: DraftTree, nodes: NDArray[np.intp]) -> DraftTree:
    """The sub-tree of the root and `nodes`, whose parents are among them."""
    if len(nodes) == len(tree) - 1:
        return tree
    keep = np.zeros(len(tree), np.bool_)
    keep[0] = keep[nodes] = True
    return select(tree, keep)


def select(tree: DraftTree, keep: NDArray[np.bool_]) -> DraftTree:
    """
    Returns:
        The sub-tree of the nodes where `keep` is true; parents of kept nodes must be kept.
    """
    if keep.all():
        return tree
    new_index = np.cumsum(keep, dtype=np.int32) - 1
    parents = tree.parents[keep]
    parents[1:] = new_index[parents[1:]]
    return DraftTree(tree.token_ids[keep], parents, tree.log_probs[keep], tree.depth[keep], tree.source[keep])
