"""What steps cost and gain. Goodput: tokens per second of a whole step, by pass times (TurboSpec, arXiv 2406.14066).

Of a tree whose n best nodes are kept, and whose i-th best node is accepted with probability p_i:

    goodput(n) = (1 + p_1 + ... + p_n) / (drafting + pass(n + 1))

Each further node of a mixture of experts costs less, since fewer of its experts are new (MoESD, arXiv 2505.19645). With
recurrent layers, a pass evaluates a tree path by path (`backends/common/paths.py`), and each path has rows of its own.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edgespec.loop.pass_times import Curve
from edgespec.loop.passes import NO_NODES
from edgespec.loop.tree import DraftTree, FloatArray, is_leaf, ranked


def goodput(
    log_probs: FloatArray, spent: float, cost: Curve, sequences: int = 1, rows: FloatArray | None = None
) -> FloatArray:
    """
    Args:
        log_probs: [n] of the nodes, best first, the root left out.
        spent: seconds of drafting.
        cost: pass times of the target.
        sequences: number of sequences that share the pass; each has a root, and gains at least one token.
        rows: [n + 1] rows of the pass that keeps 0 to n nodes; None: one row for each node and root.

    Returns:
        Tokens per second of a step that keeps the 0 to n best nodes, shape [n + 1].
    """
    tokens = sequences + np.concatenate([[0.0], np.cumsum(np.exp(log_probs))])
    return tokens / (spent + cost.seconds(np.arange(sequences, sequences + len(tokens)) if rows is None else rows))


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
    best, chosen = 1 / (spent + float(cost.seconds(1 + (unread or 0)))), NO_NODES
    paths = range(1, min(max_leaves, int(np.count_nonzero(is_leaf(tree.parents)))) + 1)
    for leaves in [max_leaves] if unread is None else paths:
        nodes = ranked(tree.parents, tree.log_probs, budget, leaves)
        if len(nodes) == 0:
            break
        tokens = 1 + trust * np.cumsum(np.exp(tree.log_probs[nodes]))
        # Tokens that a pass commits are unread, so they are rows of the next one, too.
        rows = np.arange(2, len(nodes) + 2) if unread is None else path_rows(tree, nodes, unread) + tokens
        rates = tokens / (spent + cost.seconds(rows))
        if rates.max() > best:
            best, chosen = float(rates.max()), nodes[: int(np.argmax(rates)) + 1]
    return chosen, best


def path_rows(tree: DraftTree, nodes: NDArray[np.integer], unread: int) -> FloatArray:
    """
    Args:
        tree: any.
        nodes: [m] nodes of it, best first.
        unread: as for `best_part`.

    Returns:
        [m] rows of passes that evaluate the root and the first 1 to m of `nodes` path by path.
    """
    _, at = np.unique(tree.parents[nodes], return_index=True)
    branches = np.ones(len(nodes))
    branches[at] = 0  # it continues its parent's path
    rows: FloatArray = (1 + np.cumsum(branches)) * (unread + 1 + np.maximum.accumulate(tree.depth[nodes]))
    return rows


def rows_added(tree: DraftTree, nodes: NDArray[np.intp], unread: int) -> FloatArray:
    """
    Returns:
        [m] rows that each of `nodes` adds to those of the nodes before it; arguments as for `path_rows`.
    """
    return np.diff(path_rows(tree, nodes, unread), prepend=unread + 1)


def split(
    log_probs: Sequence[FloatArray],
    most: int,
    spent: float,
    cost: Curve | None,
    added: Sequence[FloatArray] | None = None,
    roots: float | None = None,
) -> list[int]:
    """
    Args:
        log_probs: of each tree's nodes, the root left out.
        most: rows that the pass has room for besides the roots.
        spent: seconds of drafting.
        cost: pass times of the target; None: as many nodes are kept as there is room for.
        added: rows that each of these nodes adds to those of the better ones of its tree; None: one each.
        roots: rows of a pass without draft tokens; None: one for each tree.

    Returns:
        Number of best nodes that each sequence's tree keeps in a shared pass.
    """
    owner = np.repeat(np.arange(len(log_probs)), [len(values) for values in log_probs])
    values = np.concatenate([*log_probs, np.zeros(0)])
    order = np.argsort(-values, kind="stable")
    rows = np.arange(len(values) + 1.0)
    if added is not None:
        rows[1:] = np.cumsum(np.concatenate([*added, np.zeros(0)])[order])
    order = order[: np.count_nonzero(rows[1:] <= most)]
    if cost is not None:
        rows = rows[: len(order) + 1] + (len(log_probs) if roots is None else roots)
        order = order[: int(np.argmax(goodput(values[order], spent, cost, sequences=len(log_probs), rows=rows)))]
    return [int(count) for count in np.bincount(owner[order], minlength=len(log_probs))]


def chain_goodput(
    agreement: float, behind: int, deepest: int, cost: Curve, draft_cost: Curve, unread: int | None = None
) -> tuple[float, int]:
    """
    Args:
        agreement: probability that the draft's best token is the target's, given that all before it were.
        behind: number of committed tokens that the draft has not read.
        deepest: most tokens to draft, at least 1.
        cost: pass times of the target.
        draft_cost: pass times of the draft.
        unread: as for `best_part`.

    Returns:
        Tokens per second of the best step with a chain of 1 to `deepest` drafted tokens, and the rows of its pass.
    """
    drafted = np.arange(1, deepest + 1)
    tokens = 1 + np.cumsum(agreement**drafted)
    rows = drafted + 1 if unread is None else drafted + 1 + unread + tokens
    reading = draft_cost.seconds(max(1, behind)) + (drafted - 1) * draft_cost.plain
    rates = tokens / (reading + cost.seconds(rows))
    best = int(np.argmax(rates))
    return float(rates[best]), int(rows[best])


def worth_reading(
    log_probs: FloatArray,
    unread: FloatArray,
    budget: int,
    spent: float,
    cost: Curve,
    draft_cost: Curve,
    best_child: float = 1.0,
) -> int:
    """
    Args:
        log_probs: [n] of the nodes found so far, best first, at most `budget`.
        unread: [m] log-probabilities of the nodes that could be read next, best first.
        budget: most nodes of the tree.
        spent: seconds of drafting so far.
        cost: pass times of the target.
        draft_cost: pass times of the draft.
        best_child: probability of a node's best child, given the node.

    Returns:
        Number of nodes for the draft's next pass, by the gain of this pass alone; 0: stop drafting.
    """
    rates = goodput(log_probs, spent, cost)
    size = int(np.argmax(rates))
    more = np.arange(1, len(unread) + 1)
    tokens = 1 + np.exp(log_probs[:size]).sum() + best_child * np.cumsum(np.exp(unread))
    seconds = spent + draft_cost.seconds(more) + cost.seconds(np.minimum(size + more, budget) + 1)
    best = tokens / seconds
    return int(np.argmax(best)) + 1 if len(unread) and best.max() > rates[size] else 0


def note(most: int | None = None) -> str:
    """A note for users on a model with recurrent layers, whose trees have at most `most` paths."""
    limit = f", at most {most}" if most else ""
    return (
        f"some layers are recurrent: trees are evaluated path by path{limit}, so branches cost more "
        "(docs/guides/exactness.md)"
    )
