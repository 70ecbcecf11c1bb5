"""Verification: accept exactly the tokens that the target itself would have sampled.

Glossary
    target      the big model whose output is wanted
    draft       the small model that proposes tokens
    sequence    the tokens of one prompt and its output
    tree        draft tokens after the last committed token, the root
    pass        one forward of a model over all nodes it is given
    accepted    draft tokens that equal the target's own samples
    bonus       the target's sample where the tree has no such child: one in every pass
    output      accepted + [bonus]; its length is the acceptance length
    step        propose a tree, one pass of the target, verify, accept

The rule: a node's logits give the target's sample for the position after it, and that sample does
not depend on the tree (see `sampling.py`). So the target's own output is read off by stepping to the
child that carries the sampled token, until no child does. This is SpecExec's Algorithm 1 (arXiv
2406.02532) with the tree's logits as its cache.
"""

from collections.abc import Callable
from dataclasses import dataclass

from edgespec.loop.tree import DraftTree


@dataclass(frozen=True, slots=True)
class Walk:
    """The result of one verification."""

    path: list[int]  # nodes to commit: the root, then the accepted nodes
    output: list[int]  # token ids: accepted + [bonus]


def walk(tree: DraftTree, sample: Callable[[int, list[int]], int]) -> Walk:
    """Follow the target's own samples down the tree.

    Args:
        tree: the tree the target has just evaluated.
        sample: called with (node, tokens accepted so far in this walk), returns the target's token
            for the position after that node. Called once per node on the path, for no other.
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
