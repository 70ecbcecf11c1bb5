"""The walk down a tree."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from edgespec.loop.tree import make_tree, path_to, root_only
from edgespec.loop.verify import walk

TREE = make_tree([9, 1, 2, 1, 3, 1], [-1, 0, 0, 1, 1, 3], np.zeros(6))


def walk_text(tree, text):
    """Walk with a target that would write `text`; also which nodes were asked, and with which tokens before."""
    asked = []

    def sample(node, accepted):
        asked.append((node, list(accepted)))
        return text[len(accepted)]

    return walk(tree, sample), asked


def test_nothing_accepted():
    result, asked = walk_text(TREE, [7])
    assert (result.path, result.output) == ([0], [7])
    assert asked == [(0, [])]


def test_plain_decoding():
    result, _ = walk_text(root_only(9), [1])
    assert (result.path, result.output) == ([0], [1])


def test_a_whole_branch_and_its_bonus():
    result, asked = walk_text(TREE, [1, 1, 1, 8])
    assert (result.path, result.output) == ([0, 1, 3, 5], [1, 1, 1, 8])
    assert asked == [(0, []), (1, [1]), (3, [1, 1]), (5, [1, 1, 1])]


def test_children_of_another_node_do_not_count():
    result, _ = walk_text(TREE, [2, 3])  # 3 is a child of node 1, not of node 2
    assert (result.path, result.output) == ([0, 2], [2, 3])


@given(st.integers(0, 2**32), st.integers(1, 30), st.integers(1, 4))
def test_it_reads_off_the_targets_text(seed, size, alphabet):
    generator = np.random.default_rng(seed)
    tokens, parents = [0], [-1]
    for _ in range(size):
        parent, token = int(generator.integers(len(tokens))), int(generator.integers(alphabet))
        if (parent, token) not in zip(parents, tokens, strict=True):
            parents.append(parent)
            tokens.append(token)
    tree = make_tree(tokens, parents, np.zeros(len(tokens)))
    text = generator.integers(alphabet, size=size + 2).tolist()
    result, _ = walk_text(tree, text)
    assert result.output == text[: len(result.output)]
    assert result.path == path_to(tree.parents, result.path[-1])
    assert [tokens[node] for node in result.path[1:]] == result.output[:-1]
    children = [tokens[i] for i in range(len(tokens)) if parents[i] == result.path[-1]]
    assert result.output[-1] not in children  # it stopped because the tree did
