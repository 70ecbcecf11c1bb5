"""What trees as paths cost (`backends/common/paths.py`): rows of a pass, and the best part of a tree."""

import numpy as np
from numpy.typing import NDArray

from edgespec.loop.pass_times import Curve
from edgespec.loop.tree import DraftTree, FloatArray, is_leaf, ranked
from edgespec.planners.cost import best_size


def note(most: int | None = None) -> str:
    """A note for users on a model with recurrent layers, whose trees have at most `most` paths."""
    limit = f", at most {most}" if most else ""
    return (
        f"some layers are recurrent: trees are evaluated path by path{limit}, so branches cost more "
        "(docs/guides/exactness.md)"
    )


def rows_added(tree: DraftTree, nodes: NDArray[np.intp], unread: int) -> FloatArray:
    """
    Args:
        tree: any.
        nodes: [m] nodes of it, best first.
        unread: as for `rows_of`.

    Returns:
        [m] rows that each of `nodes` adds to those of the nodes before it.
    """
    paths, depth = _growth(tree, nodes)
    return np.diff(paths * (unread + 1 + depth), prepend=unread + 1)


def _growth(tree: DraftTree, nodes: NDArray[np.integer]) -> tuple[FloatArray, NDArray[np.integer]]:
    """
    Returns:
        Paths and depth of the trees that have the root and the first 1 to m of `nodes`, [m] each.
    """
    _, at = np.unique(tree.parents[nodes], return_index=True)
    branches = np.ones(len(nodes))
    branches[at] = 0  # it continues its parent's path
    return 1 + np.cumsum(branches), np.maximum.accumulate(tree.depth[nodes])


def best_part(
    tree: DraftTree,
    spent: float,
    cost: Curve,
    *,
    budget: int,
    max_leaves: int,
    unread: int | None = None,
    trust: float = 1.0,
) -> tuple[NDArray[np.intp], float]:
    """
    Args:
        tree: any.
        spent: seconds of drafting.
        cost: pass times of the target.
        budget: most nodes besides the root.
        max_leaves: most leaves.
        unread: number of unread tokens that each path begins with; None: trees are not evaluated as paths.
        trust: accepted draft tokens for each that the tree's probabilities predict.

    Returns:
        The nodes that make the best step, best first, and the step's predicted tokens per second.
    """
    if unread is None:
        nodes = ranked(tree.parents, tree.log_probs, budget, max_leaves)
        size, rate = best_size(tree.log_probs[nodes], spent, cost, trust)
        return nodes[:size], rate
    best, chosen = 1 / (spent + float(cost.seconds(unread + 1))), np.zeros(0, np.intp)
    for leaves in range(1, min(max_leaves, int(np.count_nonzero(is_leaf(tree.parents)))) + 1):
        nodes = ranked(tree.parents, tree.log_probs, budget, leaves)
        if len(nodes) == 0:
            break
        paths, depth = _growth(tree, nodes)
        tokens = 1 + trust * np.cumsum(np.exp(tree.log_probs[nodes]))
        # Tokens that a pass commits are unread, so they are rows of the next one, too.
        rates = tokens / (spent + cost.seconds(paths * (unread + 1 + depth) + tokens))
        if rates.max() > best:
            best, chosen = float(rates.max()), nodes[: int(np.argmax(rates)) + 1]
    return chosen, best
