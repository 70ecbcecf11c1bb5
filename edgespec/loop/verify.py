"""Verification: accept exactly the tokens that the target itself would have sampled.

A node's logits give the target's sample for the position after it, and this sample does not depend on the tree (see
`sampling.py`). So `walk` steps to the child with the sampled token until there is none. This is Algorithm 1 of SpecExec
(arXiv 2406.02532), with the tree's logits as its cache.
"""

from collections.abc import Callable
from dataclasses import dataclass

from edgespec.loop.tree import DraftTree


@dataclass(frozen=True, slots=True)
class Walk:
    """
    Attributes:
        path: nodes to commit: the root, then the accepted nodes.
        output: token ids of the accepted nodes, then the bonus token, which is the target's next.
    """

    path: list[int]
    output: list[int]


def walk(tree: DraftTree, sample: Callable[[int, list[int]], int]) -> Walk:
    """Follow the target's own samples down the tree.

    Args:
        tree: the tree that the target has just evaluated.
        sample: called for each node of the path with (node, tokens accepted before); returns the target's next token.
    """
    path, output = [0], list[int]()
    nodes = zip(tree.parents.tolist(), tree.token_ids.tolist(), strict=True)
    children = {pair: node for node, pair in enumerate(nodes)}
    while True:
        token = sample(path[-1], output)
        output.append(token)
        child = children.get((path[-1], token))
        if child is None:
            return Walk(path, output)
        path.append(child)
