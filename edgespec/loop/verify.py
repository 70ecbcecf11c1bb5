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

A node's logits give the target's sample for the position after it, and this sample does not depend on the tree (see
`sampling.py`). So `walk` steps to the child with the sampled token until there is none. This is Algorithm 1 of SpecExec
(arXiv 2406.02532), with the tree's logits as its cache.
"""

from collections.abc import Callable
from dataclasses import dataclass

from edgespec.loop.tree import DraftTree


@dataclass(frozen=True, slots=True)
class Walk:
    """The result of one verification.

    Attributes:
        path: nodes to commit: the root, then the accepted nodes.
        output: token ids: accepted + [bonus].
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
