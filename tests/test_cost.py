"""How many guesses are worth it: by costs that are given here, never by a clock."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.loop.pass_times import FLAT, KEPT, STEEP, Curve, PassTimes
from edgespec.planners.cost import best_size, chain_goodput, goodput, worth_reading


def line(constant, slope):
    """The cost of a pass over n nodes is constant + slope * n."""
    sizes = np.array([1.0, 100.0])
    return Curve(sizes, constant + slope * sizes, slope)


def seen(*passes, slope=STEEP):
    cost = PassTimes(slope)
    for nodes, seconds in passes:
        cost.add(nodes, seconds)
    return cost.at(0)


def test_nothing_is_known_before_the_first_pass():
    assert PassTimes().at(0) is None
    assert PassTimes().at(10_000) is None


@pytest.mark.parametrize("slope", [STEEP, FLAT])
def test_one_size_is_continued_by_what_is_usual(slope):
    curve = seen((1, 2.0), slope=slope)
    np.testing.assert_allclose(curve.seconds([1, 2, 11]), [2, 2 + 2 * slope, 2 + 20 * slope])
    # A wide pass alone says the same of a plain one.
    assert seen((11, 2 + 20 * slope), slope=slope).plain == pytest.approx(2.0)


@given(
    st.integers(1, 8),
    st.lists(st.floats(0.01, 1.0), min_size=1, max_size=12),
    st.floats(0.0, 2.0),
    st.sampled_from([line(1.0, 0.05), line(0.1, 1.0), line(5.0, 0.0)]),
)
def test_texts_that_guess_alike_each_pay_their_part_of_a_pass(texts, probabilities, spent, cost):
    """The best tree of one, by its part of the pass, is the best for all together."""
    log_probs = np.sort(np.log(probabilities))[::-1]
    size, rate = best_size(log_probs, spent, cost.shared(texts))
    sizes = np.arange(len(log_probs) + 1)
    tokens = texts * (1 + np.concatenate([[0.0], np.cumsum(np.exp(log_probs))]))
    together = tokens / (texts * spent + cost.seconds(texts * (1 + sizes)))
    assert together[size] == pytest.approx(together.max())
    assert rate == pytest.approx(together.max())
    assert (cost.shared(texts) is cost) == (texts == 1)
    assert cost.shared(texts).plain == pytest.approx(float(cost.seconds(texts)) / texts)
    assert cost.shared(texts).least == pytest.approx(cost.slope / cost.shared(texts).plain, abs=1e-9)


def test_sizes_close_together_do_not_set_the_slope():
    assert seen((1, 1.0), (2, 9.0)).slope == pytest.approx(STEEP)
    assert seen((2, 1.0), (4, 9.0), (8, 13.0)).slope == pytest.approx(2.0)  # from 2 to 8: 4 is too near to 8


def test_whether_a_plain_pass_was_measured_is_known():
    assert seen((1, 1.0)).plain_was_seen
    assert not seen((2, 1.0), (40, 2.0)).plain_was_seen


def test_cost_is_a_line_between_sizes_and_beyond():
    curve = seen((1, 2.5), (100, 52.0))
    np.testing.assert_allclose(curve.seconds([1, 50, 100, 200]), [2.5, 27, 52, 102])
    assert curve.seconds(10).shape == ()


def test_cost_bends_where_the_processor_becomes_slower_than_the_disk():
    curve = seen(*((nodes, max(1.0, nodes / 32)) for nodes in (1, 2, 4, 8, 16, 32, 64, 128)))
    np.testing.assert_allclose(curve.seconds([1, 8, 32, 48, 128, 256]), [1, 1, 1, 1.5, 4, 8], rtol=0.05)


def test_cost_never_falls_and_small_passes_are_not_free():
    curve = seen((10, 3.0), (50, 1.0))  # quicker by chance
    assert (np.diff(curve.seconds(np.arange(1, 300))) >= 0).all()
    curve = seen((10, 1.0), (40, 10.0))  # so steep that the line would cross zero
    assert curve.plain == pytest.approx(0.1)


def test_a_kernel_for_wide_passes_may_make_them_the_cheaper_ones():
    curve = seen((1, 0.3), (40, 2.4), (60, 3.0), (64, 2.0), (80, 2.5))
    assert curve.seconds(64) < curve.seconds(50)
    guesses = np.log(np.full(79, 0.1))
    assert best_size(guesses[:45], 0.0, curve)[0] < 45
    assert best_size(guesses, 0.0, curve)[0] >= 63


def test_one_slow_pass_changes_nothing_and_old_ones_are_forgotten():
    cost = PassTimes()
    for _ in range(3):
        cost.add(1, 1.0)
        cost.add(64, 2.0)
    cost.add(64, 500.0)
    assert cost.at(0).seconds(64) == pytest.approx(2.0)
    for _ in range(KEPT):
        cost.add(64, 6.0)
    assert cost.at(0).seconds(64) == pytest.approx(6.0)


def test_long_texts_have_costs_of_their_own_and_the_nearest_where_none_were_seen():
    cost = PassTimes()
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


def test_the_least_a_guess_must_promise():
    assert line(0.0, 1.0).least == pytest.approx(1.0)  # a tree of n nodes costs n plain passes
    assert line(9.0, 1.0).least == pytest.approx(0.1)
    assert line(1.0, 0.0).least == 0.0
    assert seen((1, 1.0), (2, 1.6), (16, 2.5)).least == pytest.approx(0.9 / 14)  # wide trees are cheaper by the node


def test_goodput_by_hand():
    rates = goodput(np.log([0.5, 0.25]), 1.0, line(2.0, 1.0))
    np.testing.assert_allclose(rates, [1 / 4, 1.5 / 5, 1.75 / 6])
    assert best_size(np.log([0.25, 0.5]), 1.0, line(2.0, 1.0)) == (1, pytest.approx(0.3))


@given(st.lists(st.floats(-9, 0), max_size=40), st.floats(0, 5), st.floats(0.001, 5), st.floats(0, 1))
def test_best_size_is_the_best_of_all_sizes(log_probs, spent, constant, slope):
    cost = line(constant, slope)
    best = sorted(log_probs, reverse=True)
    rates = [
        (1 + sum(map(math.exp, best[:n]))) / (spent + float(cost.seconds(n + 1))) for n in range(len(log_probs) + 1)
    ]
    size, rate = best_size(np.array(log_probs), spent, cost)
    assert rates[size] == pytest.approx(max(rates)) == pytest.approx(rate)


def test_flat_costs_take_every_guess_and_steep_ones_none():
    guesses = np.log(np.linspace(0.9, 0.01, 64))
    assert best_size(guesses, 0.5, line(1.0, 0.0))[0] == 64
    assert best_size(guesses, 0.0, line(0.0, 1.0))[0] == 0


@pytest.mark.parametrize(("pass_seconds", "reads"), [(10.0, True), (1.1, True), (0.9, False)])
def test_a_sure_chain_is_drafted_on_while_a_draft_pass_takes_less_than_the_targets(pass_seconds, reads):
    # Tokens per second of a chain of k sure guesses: (1 + k) / (k + pass), which grows while the pass takes over 1 s.
    sure, cost, draft_cost = np.zeros(5), line(pass_seconds, 0.0), line(1.0, 0.0)
    assert bool(worth_reading(sure, np.zeros(1), 64, 5.0, cost, draft_cost)) == reads


def test_unlikely_nodes_are_read_only_where_reading_is_cheap():
    found, unread = np.log([0.9, 0.8, 0.1, 0.05]), np.log([0.8, 0.1, 0.05])
    assert worth_reading(found, unread, 64, 0.1, line(1.0, 0.0), line(0.01, 0.0)) == 3
    assert worth_reading(found, unread, 64, 0.1, line(1.0, 0.0), line(0.01, 0.2)) == 1
    assert worth_reading(found, unread, 64, 0.1, line(1.0, 0.0), line(2.0, 0.0)) == 0
    assert worth_reading(found, unread[:0], 64, 0.1, line(1.0, 0.0), line(0.01, 0.0)) == 0


def test_guesses_that_are_trusted_less_make_smaller_trees():
    guesses = np.log(np.linspace(0.9, 0.1, 9))
    sizes = [best_size(guesses, 0.0, line(1.0, 0.2), trust)[0] for trust in (1.0, 0.5, 0.1)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > sizes[-1] == 0


def test_what_a_chain_is_foretold_to_gain():
    # Sure guesses: k + 1 tokens for k draft passes of 1 s and a pass of 2 s, whatever k; the more the better.
    assert chain_goodput(1.0, 1, 9, line(2.0, 0.0), line(1.0, 0.0)) == pytest.approx(10 / 11)
    # Guesses that are never right: one token, and the shortest chain is the best.
    assert chain_goodput(0.0, 1, 9, line(2.0, 0.0), line(1.0, 0.0)) == pytest.approx(1 / 3)
    # Ten tokens to read first, each of which costs the draft a second.
    assert chain_goodput(0.0, 10, 9, line(2.0, 0.0), line(0.0, 1.0)) == pytest.approx(1 / 12)


def test_a_read_node_whose_children_are_unlikely_is_not_worth_reading():
    found, unread, cost, draft = np.log([0.9]), np.log([0.9]), line(1.0, 0.0), line(0.3, 0.0)
    assert worth_reading(found, unread, 64, 0.1, cost, draft, 1.0) == 1
    assert worth_reading(found, unread, 64, 0.1, cost, draft, 0.1) == 0


def test_experts_make_the_first_nodes_dear_and_the_last_ones_cheap() -> None:
    """16 experts, 2 used: a pass reads at most 8 times what one node does, however many nodes it has."""
    cost = PassTimes(slope=0.8, experts=(16, 2))
    cost.add(1, 1.0)
    curve = cost.at(0)
    assert curve is not None
    seconds = curve.seconds(np.array([1, 2, 8, 64, 256]))
    assert seconds[0] == pytest.approx(1.0)
    assert seconds[1] > 1.5
    assert np.all(np.diff(seconds) > 0)
    assert seconds[4] - seconds[3] < 0.3 * (seconds[1] - seconds[0]) * 192
    assert seconds[4] < 10
    assert curve.least < 0.2 < seconds[1] - 1  # a wide tree's nodes are cheaper than the first ones
    cost.add(8, 5.0)
    known = cost.at(0)
    assert known is not None
    assert known.seconds(8) == pytest.approx(5.0)
    assert 5.0 < known.seconds(64) < 12


def test_figures_that_contradict_each_other_are_not_kept():
    times = PassTimes()
    for nodes, seconds in ((1, 38.0), (2, 20.0), (8, 30.0), (64, 9.0)):
        times.add(nodes, seconds)
    assert times.as_list() == [[0, 1, 20.0], [0, 2, 20.0], [0, 8, 30.0], [0, 64, 9.0]]  # 64: other kernels


def test_a_larger_pass_that_is_faster_than_remembered_shortens_the_others():
    for first, other in ((1.5, 3.0), (4.5, 6.0)):  # a slower one may only have been held up
        times = PassTimes()
        times.recall([[0, 1, 1.0], [0, 2, 3.0], [0, 12, 6.0]])
        times.add(2, first)
        assert times.as_list()[::2] == [[0, 1, 1.0], [0, 12, other]]


def test_what_was_remembered_goes_where_a_new_pass_contradicts_it():
    times = PassTimes()
    times.recall([[0, 1, 1.0], [0, 12, 3.0], [0, 40, 9.0]])
    times.add(20, 1.1)
    assert sorted(times.as_list()) == [[0, 1, 1.0], [0, 20, 1.1], [0, 40, 9.0]]
    times.add(12, 3.0)  # measured now, so it stays
    times.add(20, 1.1)
    assert sorted(row[1] for row in times.as_list()) == [1, 12, 20, 40]
