"""The draft tree: building, paths, masks and the choice of the best nodes."""

from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.loop.tree import (
    DraftTree,
    Source,
    ancestor_mask,
    depths,
    is_leaf,
    make_tree,
    only,
    parents_among,
    path_to,
    ranked,
    root_only,
    select,
)  # fmt: skip


@st.composite
def trees(draw: st.DrawFn, most: int = 24) -> DraftTree:
    """Random trees; log-probabilities fall along every path, with ties."""
    size = draw(st.integers(1, most))
    parents = [-1] + [draw(st.integers(0, i - 1)) for i in range(1, size)]
    steps = [0.0] + [draw(st.sampled_from([0.0, -0.25, -0.5, -1.0, -3.0])) for _ in range(1, size)]
    log_probs: list[float] = []
    for parent, step in zip(parents, steps, strict=True):
        log_probs.append(step + (log_probs[parent] if parent >= 0 else 0.0))
    return make_tree(range(size), parents, log_probs, [i % 4 for i in range(size)])


def test_make_tree_fills_in_depth_and_source():
    tree = make_tree([5, 6, 6, 7], [-1, 0, 1, 0], [0, -1, -2, -3])
    assert tree.depth.tolist() == [0, 1, 2, 1]
    assert tree.source.tolist() == [Source.TARGET] * 4
    assert len(tree) == 4
    assert len(root_only(9)) == 1
    assert root_only(9).token_ids.tolist() == [9]


@pytest.mark.parametrize("parents", [[], [0], [-1, 1], [-1, -1], [-1, 2, 0], [-1, -2]])
def test_what_is_not_a_tree(parents):
    with pytest.raises(ValueError, match="not a tree"):
        make_tree(range(len(parents)), parents, [0.0] * len(parents))


def test_siblings_differ():
    with pytest.raises(ValueError, match="same token"):
        make_tree([1, 2, 2], [-1, 0, 0], [0, -1, -1])
    make_tree([1, 2, 2], [-1, 0, 1], [0, -1, -1])  # cousins may be equal


@given(trees())
def test_mask_leaves_depth_and_path_agree(tree):
    mask = ancestor_mask(tree.parents)
    for node in range(len(tree)):
        path = path_to(tree.parents, node)
        assert path[0] == 0
        assert path[-1] == node
        assert all(tree.parents[child] == parent for parent, child in pairwise(path))
        assert np.flatnonzero(mask[node]).tolist() == sorted(path)
        assert tree.depth[node] == len(path) - 1
        assert is_leaf(tree.parents)[node] == (mask[:, node].sum() == 1)


def test_depths_of_several_tops():
    assert depths([-1, -1, 1, 2, 0]).tolist() == [0, 0, 1, 2, 1]


def best_of(tree, budget, max_leaves):
    """The sub-tree that a pass keeps."""
    return only(tree, ranked(tree.parents, tree.log_probs, budget, max_leaves))


def kept(parents, log_probs, budget, max_leaves):
    """The same as a mask."""
    keep = np.zeros(len(parents), np.bool_)
    keep[0] = keep[ranked(parents, log_probs, budget, max_leaves)] = True
    return keep


@given(trees(), st.integers(0, 26), st.integers(1, 12))
def test_best_nodes_is_a_tree_within_its_limits(tree, budget, max_leaves):
    best = best_of(tree, budget, max_leaves)
    again = make_tree(best.token_ids, best.parents, best.log_probs, best.source)  # raises when it is no tree
    np.testing.assert_array_equal(again.depth, best.depth)
    assert len(best) <= budget + 1
    assert is_leaf(best.parents).sum() <= max_leaves
    old = {int(token): path_to(tree.parents, i) for i, token in enumerate(tree.token_ids)}
    for node in range(len(best)):  # every node keeps its ancestors and what belongs to it; tokens are unique here
        at = int(best.token_ids[node])
        assert [int(best.token_ids[i]) for i in path_to(best.parents, node)] == old[at]
        assert (best.log_probs[node], best.source[node]) == (tree.log_probs[at], tree.source[at])


@given(trees(), st.integers(0, 26), st.integers(1, 12))
def test_ranked_is_maximal(tree, budget, max_leaves):
    """A node is left out only when budget, leaves or its parent demand it."""
    keep = kept(tree.parents, tree.log_probs, budget, max_leaves)
    assert keep[0]
    if keep.sum() == budget + 1:
        return
    leaves = is_leaf(tree.parents[keep] if keep.all() else select(tree, keep).parents).sum()
    for node in np.flatnonzero(~keep):
        if keep[tree.parents[node]]:
            has_kept_child = (keep & (tree.parents == tree.parents[node])).any()
            assert has_kept_child
            assert leaves == max_leaves


@settings(max_examples=60, deadline=None)
@given(trees(most=9), st.integers(0, 9))
def test_ranked_is_the_best_of_all_trees(tree, budget):
    """Without a limit on leaves: brute force over all sub-trees of that size."""
    keep = kept(tree.parents, tree.log_probs, budget, max_leaves=99)
    count = min(budget, len(tree) - 1)
    assert keep.sum() == count + 1
    best = max(
        sum(np.exp(tree.log_probs[list(nodes)]))
        for nodes in combinations(range(1, len(tree)), count)
        if all(tree.parents[node] in (0, *nodes) for node in nodes)
    )
    assert np.exp(tree.log_probs[keep])[1:].sum() == pytest.approx(best)


@given(trees(), st.integers(0, 26), st.integers(1, 12))
def test_fewer_nodes_are_the_first_of_more(tree, budget, max_leaves):
    """So a pass can be cut further without ranking again."""
    more = ranked(tree.parents, tree.log_probs, 99, max_leaves)
    assert ranked(tree.parents, tree.log_probs, budget, max_leaves).tolist() == more[:budget].tolist()
    assert (np.diff(tree.log_probs[more]) <= 0).all()


def test_ties_go_to_the_smaller_index():
    keep = kept(np.array([-1, 0, 0, 0, 1]), np.array([0.0, -1.0, -1.0, -1.0, -1.0]), 2, 9)
    assert np.flatnonzero(keep).tolist() == [0, 1, 2]


def test_a_limit_on_leaves_prefers_depth_to_worse_branches():
    # Two children and a grandchild; one leaf allowed: the chain stays, the second branch goes.
    keep = kept(np.array([-1, 0, 0, 1]), np.array([0.0, -0.1, -0.2, -3.0]), 3, 1)
    assert np.flatnonzero(keep).tolist() == [0, 1, 3]


def test_nothing_to_cut_gives_the_same_tree():
    tree = make_tree([1, 2, 3], [-1, 0, 0], [0, -1, -1])
    assert best_of(tree, 2, 2) is tree
    assert len(best_of(tree, 2, 1)) == 2


def test_a_kept_node_without_a_kept_parent_is_a_top():
    assert parents_among([-1, 0, 0, 1, 3], [1, 3, 4]) == [-1, 0, 1]
