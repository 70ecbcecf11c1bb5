"""Trees as paths: which there are, where steps begin, which states are kept, and what pays."""

from types import SimpleNamespace

import numpy as np
import pytest
from edgespec.backends.common.paths import Path, States, paths_of, state_lane_from

from edgespec.loop.backend import Capabilities
from edgespec.loop.pass_times import Curve
from edgespec.loop.passes import Proposed, rows_of
from edgespec.loop.tree import make_tree, only, ranked
from edgespec.planners.cost import best_part, rows_added, split
from edgespec.scheduler.batch import plan_trees

TREE = [-1, 0, 0, 1, 1, 2]


def test_a_path_for_every_leaf_with_the_first_children_first():
    assert paths_of(TREE, 0) == [Path(-1, [0, 1, 3]), Path(-1, [0, 1, 4]), Path(-1, [0, 2, 5])]


def test_paths_go_on_from_the_deepest_node_that_has_a_state():
    parents = [*TREE, 3, 2, 5]
    assert paths_of(parents, 6, {0, 3, 5}) == [Path(0, [2, 7]), Path(3, [6]), Path(5, [8])]


def test_rows_of_a_pass():
    assert rows_of(TREE, 0) == 9
    assert rows_of(TREE, 4) == 21
    assert rows_of([-1], 0) == 1


def test_a_step_begins_where_it_has_as_many_tokens_as_the_others():
    assert state_lane_from([10, 20, 30, 38], 40, 1, 8, 500) == 30
    assert state_lane_from([10, 20, 30, 38], 40, 1, 13, 500) == 20
    assert state_lane_from([38], 40, 1, 2, 500) == 38


def test_a_step_does_not_cost_much():
    assert state_lane_from([10], 40, 1, 13, 500) == 10  # two rows of 30
    assert state_lane_from([10], 40, 2, 13, 500) is None  # three, instead of two of 13
    assert state_lane_from([10], 40, 2, 24, 500) == 10
    assert state_lane_from([10], 40, 2, 24, 80) is None  # no room


class TestStates:
    def test_the_last_one_and_the_one_before(self):
        states = States[str](5)
        assert (states.last, states.before(9)) == (0, 0)
        for at in (3, 8, 12):
            assert states.add(at, str(at)) == []
        assert (states.last, states.before(11), states.before(12), states.before(2)) == (12, 8, 12, 0)
        assert states.cut(8) == ["12"]
        assert states.last == 8

    def test_a_cut_leaves_no_state_of_more_tokens(self):
        states = States[str](5)
        for at in (3, 4, 5):
            states.add(at, str(at))
        assert states.cut(4) == ["5"]
        assert states.cut(3) == ["4"]
        assert states.kept == {3: "3"}

    def test_ends_of_prompts_stay_longest(self):
        states = States[int](5)
        states.add(4, 4)
        states.mark(4)
        for at in range(5, 200):
            assert len(states.kept) <= 5
            states.add(at, at)
        assert 4 in states.kept
        assert states.last == 199

    @pytest.mark.parametrize("gain", [1, 3, 7])
    def test_steps_find_a_state_far_enough_behind(self, gain):
        states = States[int](5)
        for at in range(10, 400, gain):
            states.add(at, at)
        length = states.last + gain
        assert state_lane_from(states.kept, length, 2, gain + 6, 500) is not None

    def test_a_state_in_the_same_place_replaces_the_other(self):
        states = States[str](3)
        states.add(4, "old")
        assert states.add(4, "new") == ["old"]
        assert states.kept == {4: "new"}

    def test_a_copy_is_on_its_own(self):
        states = States[str](3)
        states.add(4, "a")
        other = states.copy()
        states.cut(0)
        assert other.kept == {4: "a"}


def curve(slope: float) -> Curve:
    return Curve(np.array([1.0, 64.0]), np.array([1.0, 1 + 63 * slope]), slope)


def wide_tree():
    """Three likely children of the root, with a child each; one of them goes on."""
    likely = np.log([1.0, 0.4, 0.3, 0.2, 0.35, 0.25, 0.15, 0.3, 0.28])
    return make_tree(range(9), [-1, 0, 0, 0, 1, 2, 3, 4, 7], likely)


def best_tree(tree, spent, cost, **options):
    """What a pass keeps of the tree, and the rate."""
    nodes, rate = best_part(tree, spent, cost, budget=99, **options)
    return only(tree, nodes), rate


class TestWhatPays:
    @pytest.mark.parametrize(
        ("slope", "leaves", "nodes"),
        [(0.0, 8, 9), (0.0, 2, 7), (1.0, 8, 1)],  # all that are free and fit; none where rows cost as much as passes
    )
    @pytest.mark.parametrize("unread", [0, None])
    def test_nodes_stay_where_they_are_free_and_fit(self, slope, leaves, nodes, unread):
        tree, rate = best_tree(wide_tree(), 0.0, curve(slope), max_leaves=leaves, unread=unread)
        assert len(tree) == nodes
        assert rate == pytest.approx(np.exp(tree.log_probs).sum())
        assert rows_of(tree.parents, 0) <= leaves * (1 + int(tree.depth.max()))

    def test_paths_cost_more_than_nodes(self):
        """Where rows cost, a tree is cut to fewer branches than if nodes were computed once."""
        nodes, _ = best_tree(wide_tree(), 0.0, curve(0.06), max_leaves=8)
        paths, _ = best_tree(wide_tree(), 0.0, curve(0.06), max_leaves=8, unread=0)
        assert rows_of(paths.parents, 0) < rows_of(nodes.parents, 0)
        assert len(paths) < len(nodes)

    def test_owed_tokens_make_branches_dearer(self):
        few, _ = best_tree(wide_tree(), 0.0, curve(0.02), max_leaves=8, unread=0)
        many, _ = best_tree(wide_tree(), 0.0, curve(0.02), max_leaves=8, unread=12)
        assert len(many) < len(few)


def best_of(tree, size, leaves):
    return only(tree, ranked(tree.parents, tree.log_probs, size, leaves))


class TestTextsThatShareAPass:
    def test_rows_that_nodes_add(self):
        tree = wide_tree()
        order = np.argsort(-tree.log_probs[1:], kind="stable") + 1
        for unread in (0, 3):
            rows = 1 + unread + np.cumsum(rows_added(tree, order, unread))
            for count in range(1, len(order) + 1):
                part = best_of(tree, count, 8)
                assert rows[count - 1] == rows_of(part.parents, unread)

    def test_the_room_is_one_of_rows(self):
        """Every node on several paths takes a row on each, and so do tokens that are owed."""
        trees, heads = [wide_tree(), wide_tree()], [0, 4]
        orders = [ranked(tree.parents, tree.log_probs, 99, 99) for tree in trees]
        guesses = [tree.log_probs[order] for tree, order in zip(trees, orders, strict=True)]
        added = [rows_added(*one) for one in zip(trees, orders, heads, strict=True)]
        for room in (0, 6, 20, 200):
            sizes = split(guesses, room, 0.0, None, added, 2 + sum(heads))
            parts = [best_of(*one, 8) for one in zip(trees, sizes, strict=True)]
            rows = sum(rows_of(part.parents, head) for part, head in zip(parts, heads, strict=True))
            assert rows <= 2 + sum(heads) + room
            assert (sizes == [8, 8]) == (room == 200)

    def test_where_rows_cost_paths_are_fewer(self):
        trees = [wide_tree(), wide_tree()]
        orders = [ranked(tree.parents, tree.log_probs, 99, 99) for tree in trees]
        guesses = [tree.log_probs[order] for tree, order in zip(trees, orders, strict=True)]
        added = [rows_added(tree, order, 3) for tree, order in zip(trees, orders, strict=True)]
        nodes = split(guesses, 200, 0.0, curve(0.05))
        assert sum(split(guesses, 200, 0.0, curve(0.05), added, 8)) < sum(nodes)

    def test_trees_of_several_texts_fit_into_a_pass(self):
        limits = Capabilities(100, 64, 64, 8, 0.0, paths=True)

        def steps():
            tree = wide_tree()
            return Proposed(tree, ranked(tree.parents, tree.log_probs, 99, 99), 0.0, 0.0)
            yield

        def slot(owed):
            plan = SimpleNamespace(
                propose=lambda most, sequences: steps(), cut=lambda one, size: (only(one.tree, one.nodes[:size]), owed)
            )
            plan.token_ids = [1]
            return SimpleNamespace(passed=0, unread_committed=owed, generation=plan)

        slots = [slot(0), slot(4)]
        batch = plan_trees(slots, slots, limits, 24, None, single=True)
        assert batch.failed == []
        assert sum(rows_of(tree.parents, owed) for _, (tree, owed) in batch.parts) <= 24
        assert any(len(tree) > 1 for _, (tree, _) in batch.parts)
