"""How many guesses are worth it: by costs that are given here, never by a clock."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.loop.pass_times import FLAT, KEPT, STEEP, Curve, PassTimes
from edgespec.loop.tree import make_tree
from edgespec.planners.cost import best_part, chain_goodput, goodput, worth_reading


def line(constant, slope):
    """The cost of a pass over n nodes is constant + slope * n."""
    sizes = np.array([1.0, 100.0])
    return Curve(sizes, constant + slope * sizes, slope)


def times_of(*passes, **options):
    times = PassTimes(**options)
    for nodes, seconds in passes:
        times.add(nodes, seconds)
    return times


def seen(*passes, **options):
    return times_of(*passes, **options).at(0)


def best_size(log_probs, spent, cost, trust=1.0):
    """Nodes of the best step, and its tokens per second, where all nodes are children of the root."""
    count = len(log_probs)
    tree = make_tree(range(count + 1), [-1, *[0] * count], [0.0, *log_probs])
    nodes, rate = best_part(tree, spent, cost, budget=count, max_leaves=count + 1, trust=trust)
    return len(nodes), rate


@pytest.mark.parametrize(
    ("passes", "slope", "expected"),
    [
        # One size is continued by what is usual, to smaller ones, too.
        ([(1, 2.0)], STEEP, {1: 2, 2: 3, 11: 12}),
        ([(1, 2.0)], FLAT, {1: 2, 2: 2.02, 11: 2.2}),
        ([(11, 12.0)], STEEP, {1: 2}),
        ([(11, 2.2)], FLAT, {1: 2}),
        # A line between sizes and beyond.
        ([(1, 2.5), (100, 52.0)], STEEP, {1: 2.5, 50: 27, 100: 52, 200: 102}),
        # Sizes close together do not set the slope.
        ([(1, 1.0), (2, 9.0)], STEEP, {3: 9.5}),
        ([(2, 1.0), (4, 9.0), (8, 13.0)], STEEP, {9: 15}),  # from 2 to 8: 4 is too near to 8
        # So steep that the line would cross zero.
        ([(10, 1.0), (40, 10.0)], STEEP, {1: 0.1}),
        # It bends where the processor becomes slower than the disk.
        ([(1 << i, max(1.0, 2**i / 32)) for i in range(8)], STEEP, {1: 1, 8: 1, 32: 1, 48: 1.5, 128: 4, 256: 8}),
        # One slow pass changes nothing, and old ones are forgotten.
        ([(1, 1.0), (64, 2.0)] * 3 + [(64, 500.0)], STEEP, {64: 2}),
        ([(1, 1.0)] + [(64, 2.0)] * 3 + [(64, 6.0)] * KEPT, STEEP, {64: 6}),
    ],
)
def test_seconds_of_any_pass_follow_from_those_that_were_seen(passes, slope, expected):
    curve = seen(*passes, slope=slope)
    np.testing.assert_allclose(curve.seconds([*expected]), [*expected.values()], rtol=1e-9)
    assert curve.plain == pytest.approx(float(curve.seconds(1)))


def test_cost_never_falls_but_where_wide_passes_have_another_kernel():
    curve = seen((10, 3.0), (50, 1.0))  # quicker by chance
    assert (np.diff(curve.seconds(np.arange(1, 300))) >= 0).all()
    curve, guesses = seen((1, 0.3), (40, 2.4), (60, 3.0), (64, 2.0), (80, 2.5)), np.log(np.full(79, 0.1))
    assert curve.seconds(64) < curve.seconds(50)
    assert best_size(guesses[:45], 0.0, curve)[0] < 45
    assert best_size(guesses, 0.0, curve)[0] >= 63


@given(
    st.integers(1, 8),
    st.lists(st.floats(0.01, 1.0), min_size=1, max_size=12),
    st.floats(0.0, 2.0),
    st.sampled_from([line(1.0, 0.05), line(0.1, 1.0), line(5.0, 0.0)]),
)
def test_texts_that_guess_alike_each_pay_their_part_of_a_pass(texts, probabilities, spent, cost):
    """The best tree of one, by its part of the pass, is the best for all together."""
    log_probs, shared = np.sort(np.log(probabilities))[::-1], cost.shared(texts)
    size, rate = best_size(log_probs, spent, shared)
    sizes = np.arange(len(log_probs) + 1)
    tokens = texts * (1 + np.concatenate([[0.0], np.cumsum(np.exp(log_probs))]))
    together = tokens / (texts * spent + cost.seconds(texts * (1 + sizes)))
    assert together[size] == pytest.approx(together.max())
    assert rate == pytest.approx(together.max())
    assert (shared is cost) == (texts == 1)
    assert shared.plain == pytest.approx(float(cost.seconds(texts)) / texts)
    assert shared.least == pytest.approx(cost.slope / shared.plain, abs=1e-9)


def test_long_texts_have_costs_of_their_own_and_the_nearest_where_none_were_seen():
    cost = PassTimes()
    assert cost.at(0) is None
    cost.add(1, 1.0, 100)
    cost.add(1, 5.0, 5000)
    assert [cost.at(length).plain for length in (0, 1023, 1500, 4500, 100_000)] == [1, 1, 1, 5, 5]
    cost.add(1, 2.0, 1500)
    assert [cost.at(length).plain for length in (1023, 1024, 2047, 2048)] == [1, 2, 2, 2]


def test_a_remembered_cost_is_a_start_that_a_few_passes_outvote():
    cost, later = PassTimes(), PassTimes()
    for length in (10, 3000):
        for nodes in (1, 6, 40):
            cost.add(nodes, nodes + length, length)
    later.recall(json.loads(json.dumps(cost.as_list())))
    for length in (10, 3000):
        np.testing.assert_allclose(later.at(length).seconds([1, 6, 40]), cost.at(length).seconds([1, 6, 40]))
    for _ in range(3):
        later.add(1, 0.5, 10)
    assert later.at(10).plain == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("cost", "least"),
    [
        (line(0.0, 1.0), 1.0),  # a tree of n nodes costs n plain passes
        (line(9.0, 1.0), 0.1),
        (line(1.0, 0.0), 0.0),
        (seen((1, 1.0), (2, 1.6), (16, 2.5)), 0.9 / 14),  # wide trees are cheaper by the node
    ],
)
def test_the_least_a_guess_must_promise(cost, least):
    assert cost.least == pytest.approx(least)


def test_goodput_by_hand():
    rates = goodput(np.log([0.5, 0.25]), 1.0, line(2.0, 1.0))
    np.testing.assert_allclose(rates, [1 / 4, 1.5 / 5, 1.75 / 6])
    assert best_size(np.log([0.25, 0.5]), 1.0, line(2.0, 1.0)) == (1, pytest.approx(0.3))


@given(
    st.lists(st.floats(-9, 0), max_size=40), st.floats(0, 5), st.floats(0.001, 5), st.floats(0, 1),
    st.sampled_from([1.0, 0.5, 0.1]),
)  # fmt: skip
def test_the_best_part_is_the_best_of_all_sizes(log_probs, spent, constant, slope, trust):
    cost, best = line(constant, slope), sorted(log_probs, reverse=True)
    rates = [
        (1 + trust * sum(map(math.exp, best[:n]))) / (spent + float(cost.seconds(n + 1)))
        for n in range(len(log_probs) + 1)
    ]
    size, rate = best_size(log_probs, spent, cost, trust)
    assert rates[size] == pytest.approx(max(rates)) == pytest.approx(rate)


@pytest.mark.parametrize(("pass_seconds", "reads"), [(10.0, True), (1.1, True), (0.9, False)])
def test_a_sure_chain_is_drafted_on_while_a_draft_pass_takes_less_than_the_targets(pass_seconds, reads):
    # Tokens per second of a chain of k sure guesses: (1 + k) / (k + pass), which grows while the pass takes over 1 s.
    sure, cost, draft_cost = np.zeros(5), line(pass_seconds, 0.0), line(1.0, 0.0)
    assert bool(worth_reading(sure, np.zeros(1), 64, 5.0, cost, draft_cost)) == reads


@pytest.mark.parametrize(
    ("found", "unread", "draft", "best_child", "read"),
    [
        ([0.9, 0.8, 0.1, 0.05], [0.8, 0.1, 0.05], (0.01, 0.0), 1.0, 3),  # unlikely ones only where reading is cheap
        ([0.9, 0.8, 0.1, 0.05], [0.8, 0.1, 0.05], (0.01, 0.2), 1.0, 1),
        ([0.9, 0.8, 0.1, 0.05], [0.8, 0.1, 0.05], (2.0, 0.0), 1.0, 0),
        ([0.9, 0.8, 0.1, 0.05], [], (0.01, 0.0), 1.0, 0),
        ([0.9], [0.9], (0.3, 0.0), 1.0, 1),
        ([0.9], [0.9], (0.3, 0.0), 0.1, 0),  # its children are unlikely
    ],
)
def test_a_node_is_read_where_that_pays(found, unread, draft, best_child, read):
    log_found, log_unread = np.log(found), np.log(np.array(unread))
    assert worth_reading(log_found, log_unread, 64, 0.1, line(1.0, 0.0), line(*draft), best_child) == read


@pytest.mark.parametrize(
    ("agreement", "behind", "target", "draft", "expected"),
    [
        (1.0, 1, (2.0, 0.0), (1.0, 0.0), 10 / 11),  # sure: k + 1 tokens in k + 2 seconds, so the more the better
        (0.0, 1, (2.0, 0.0), (1.0, 0.0), 1 / 3),  # never right: one token, and the shortest chain is the best
        (0.0, 10, (2.0, 0.0), (0.0, 1.0), 1 / 12),  # ten tokens to read first, each of which costs the draft a second
        (1.0, 1, (0.0, 1.0), (1.0, 0.0), 2 / 3),  # k + 1 tokens in k seconds of the draft and k + 1 of the target
    ],
)  # fmt: skip
def test_what_a_chain_is_foretold_to_gain(agreement, behind, target, draft, expected):
    assert chain_goodput(agreement, behind, 9, line(*target), line(*draft))[0] == pytest.approx(expected)


def test_experts_make_the_first_nodes_dear_and_the_last_ones_cheap() -> None:
    """16 experts, 2 used: a pass reads at most 8 times what one node does, however many nodes it has."""
    curve = seen((1, 1.0), slope=0.8, experts=(16, 2))
    seconds = curve.seconds(np.array([1, 2, 8, 64, 256]))
    assert seconds[0] == pytest.approx(1.0)
    assert seconds[1] > 1.5
    assert np.all(np.diff(seconds) > 0)
    assert seconds[4] - seconds[3] < 0.3 * (seconds[1] - seconds[0]) * 192
    assert seconds[4] < 10
    assert curve.least < 0.2 < seconds[1] - 1  # a wide tree's nodes are cheaper than the first ones
    known = seen((1, 1.0), (8, 5.0), slope=0.8, experts=(16, 2))
    assert known.seconds(8) == pytest.approx(5.0)
    assert 5.0 < known.seconds(64) < 12


def test_figures_that_contradict_each_other_are_not_kept():
    times = times_of((1, 38.0), (2, 20.0), (8, 30.0), (64, 9.0))
    assert times.as_list() == [[0, 1, 20.0], [0, 2, 20.0], [0, 8, 30.0], [0, 64, 9.0]]  # 64: other kernels


@pytest.mark.parametrize(
    ("remembered", "passes", "kept"),
    [
        # A larger pass that is faster than remembered shortens the others; a slower one may only have been held up.
        ([(1, 1.0), (2, 3.0), (12, 6.0)], [(2, 1.5)], [(1, 1.0), (2, 1.5), (12, 3.0)]),
        ([(1, 1.0), (2, 3.0), (12, 6.0)], [(2, 4.5)], [(1, 1.0), (2, 3.75), (12, 6.0)]),
        # What was remembered goes where a new pass contradicts it, and what is measured now stays.
        ([(1, 1.0), (12, 3.0), (40, 9.0)], [(20, 1.1)], [(1, 1.0), (20, 1.1), (40, 9.0)]),
        ([(1, 1.0), (12, 3.0), (40, 9.0)], [(20, 1.1), (12, 3.0), (20, 1.1)],
         [(1, 1.0), (12, 1.1), (20, 1.1), (40, 9.0)]),
    ],
)  # fmt: skip
def test_new_passes_correct_what_was_remembered(remembered, passes, kept):
    times = PassTimes()
    times.recall([[0, *one] for one in remembered])
    for one in passes:
        times.add(*one)
    assert sorted(times.as_list()) == [[0, *one] for one in kept]
