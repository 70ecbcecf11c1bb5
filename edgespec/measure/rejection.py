"""Baselines that reject: their output is another than plain decoding's, of the same distribution.

A position has the target's probabilities p and the draft's q. Its children are tried one after the other. Child x ~ q
is accepted with probability min(1, p(x) / q(x)); else p becomes max(0, p - q), normalised. After the last one the token
is drawn from p. With one child that is Leviathan et al. (arXiv 2211.17192) and Chen et al. (arXiv 2302.01318). With
more there are two rules:

    replacement         all children are drawn from the same q: SpecInfer (arXiv 2305.09781)
    no replacement      q loses what was rejected: SpecInfer in SpecExec's own script, Sequoia (arXiv 2402.12374)

`acceptance` looks from the other side: it gives the probability that each child was accepted, given the position's
token in an answer of the target. After a rejection the token has the distribution p, whatever was rejected. So one
answer gives the expected passes, and no branch that leaves it has to be read.
"""

from collections.abc import Sequence
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from edgespec.loop.sampling import Noise, top_ids
from edgespec.loop.tree import FloatArray, IntArray, depths

COINS_KEY = 0x5265_6A65_6374_696F  # makes a seed another one, so that coins do not depend on the noise of answers


def coins(seed: int, position: int, shape: tuple[int, ...]) -> FloatArray:
    """Uniform numbers in (0, 1), the same in every run."""
    gumbel = Noise(seed ^ COINS_KEY, int(np.prod(shape))).row(position)
    uniform: FloatArray = np.exp(-np.exp(-gumbel.astype(np.float64)))
    return uniform.reshape(shape)


def acceptance(p: FloatArray, q: FloatArray, token: int, flips: FloatArray, *, replacement: bool) -> FloatArray:
    """
    Args:
        p: the target's probabilities, [V].
        q: the draft's, [V].
        token: the position's token, with p > 0.
        flips: `coins` of shape [n, children], for what was rejected; with replacement the result does not depend on it.
        replacement: the rule.

    Returns:
        The probability of each child that it is the accepted one, given the token: [children], the mean of n draws.
    """
    count, children = flips.shape
    target, draft = (np.broadcast_to(row, (count, len(row))) for row in (p, q))
    found, left = np.zeros(children), np.ones(count)
    for child in range(children):
        of_target = target[:, token]
        share = np.minimum(1.0, np.divide(draft[:, token], of_target, out=np.ones(count), where=of_target > 0))
        found[child] = (left * share).mean()
        left = left * (1 - share)
        if left.max() < 1e-9 or not draft.any():
            break
        x = _draw(_normal(np.maximum(draft - target, 0.0), draft), flips[:, child])
        target, draft = after_rejection(target, draft, x, replacement=replacement)
    return found


def after_rejection(
    p: FloatArray, q: FloatArray, x: NDArray[np.intp], *, replacement: bool
) -> tuple[FloatArray, FloatArray]:
    """
    Returns:
        Rows p and q, [n, V], after the draft tokens x [n] were rejected; a q without tokens is all 0.
    """
    left = _normal(np.maximum(p - q, 0.0), p)
    if replacement:
        return left, q
    rest = q.copy()
    rest[np.arange(len(x)), x] = 0.0
    return left, _normal(rest, np.zeros(1))


def _normal(weights: FloatArray, otherwise: FloatArray) -> FloatArray:
    total = weights.sum(1, keepdims=True)
    normal: FloatArray = np.where(total > 0, weights / np.where(total > 0, total, 1.0), otherwise)
    return normal


def _draw(rows: FloatArray, flips: FloatArray) -> NDArray[np.intp]:
    sums = np.cumsum(rows, 1)
    below: NDArray[np.intp] = np.minimum((sums <= (flips * sums[:, -1])[:, None]).sum(1), rows.shape[1] - 1)
    return below


def stems(count: int, depth: int) -> tuple[IntArray, IntArray]:
    """
    Returns:
        Parents, and numbers among the siblings from 0 on, of a tree of `count` chains below the root, its node 0.
    """
    nodes = np.arange(count * depth, dtype=np.int32)
    parents, ranks = np.where(nodes % depth, nodes, 0), np.where(nodes % depth, 0, nodes // depth)
    return np.concatenate([[-1], parents]).astype(np.int32), np.concatenate([[0], ranks]).astype(np.int32)


def static_tree(rates: Sequence[float], budget: int) -> tuple[IntArray, IntArray]:
    """Sequoia's tree: of all of its size the one with most expected tokens, if all positions are alike.

    Args:
        rates: the probability of each child to be the accepted one.
        budget: most nodes besides the root.

    Returns:
        As for `stems`.
    """
    falling = np.minimum.accumulate(rates).tolist()
    parents, ranks = [-1], [0]
    open_ = [(-falling[0], 0, 0)]  # minus the probability that the path is accepted, parent, number among the siblings
    while open_ and len(parents) <= budget:
        value, parent, rank = heappop(open_)
        if value == 0:
            break
        node = len(parents)
        parents.append(parent)
        ranks.append(rank)
        heappush(open_, (value * falling[0], node, 0))
        if rank + 1 < len(falling) and falling[rank]:
            heappush(open_, (value / falling[rank] * falling[rank + 1], parent, rank + 1))
    return np.array(parents, np.int32), np.array(ranks, np.int32)


def expected_passes(accepted: FloatArray, parents: IntArray, ranks: IntArray) -> float:
    """
    Args:
        accepted: `acceptance` of each position of an answer, [positions, children].
        parents: of every pass's tree.
        ranks: of its nodes among their siblings.

    Returns:
        The expected number of passes that write the answer.
    """
    count, depth = len(accepted), depths(parents)
    padded = np.concatenate([accepted, np.zeros((int(depth.max()) + 1, accepted.shape[1]))])
    reached, survive = np.ones((len(parents), count)), np.zeros((int(depth.max()) + 2, count))
    survive[0] = 1.0  # by depth and first position: the probability that the path goes so deep
    for node in range(1, len(parents)):
        start = depth[node] - 1
        reached[node] = reached[parents[node]] * padded[start : start + count, ranks[node]]
        survive[depth[node]] += reached[node]
    ends = survive[:-1] - survive[1:]
    passes = np.zeros(count + 1)
    for position in range(count - 1, -1, -1):
        after = passes[np.minimum(position + 1 + np.arange(len(ends)), count)]
        passes[position] = 1 + ends[:, position] @ after
    return float(passes[0])


def coverage(p: FloatArray, q: FloatArray, counts: Sequence[int]) -> list[float]:
    """
    Returns:
        The sum of p over the k best tokens of q, for each k of `counts` (SpecExec, Figure 2).
    """
    sums = np.cumsum(p[top_ids(q, max(counts))])
    return [float(sums[min(count, len(sums)) - 1]) for count in counts]
