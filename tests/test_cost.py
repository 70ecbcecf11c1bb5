"""How many guesses are worth it: by costs that are given here, never by a clock."""

import math
from itertools import groupby

import numpy as np
import pytest
from edgespec.backends.reference import ReferenceBackend, perturbed, random_model
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.cost import REMEMBERED, TRIAL, Pace, PassCost, Trial, best_size, goodput, worth_reading
from edgespec.generate import generate_tokens
from edgespec.model import choose_pace
from edgespec.models.registry import Defaults, Entry
from edgespec.planners.none import NonePlanner
from edgespec.planners.specexec import SpecExecPlanner
from edgespec.planners.sssd import SssdPlanner
from edgespec.sampling import SamplingParams
from edgespec.stats import GenerationStats


class GivenCost(PassCost):
    """A known cost that no pass changes."""

    def __init__(self, constant, slope):
        super().__init__()
        for nodes in (1, 100):
            super().add(nodes, constant + slope * nodes)

    def add(self, nodes, seconds):
        pass


def test_a_cost_is_known_when_two_sizes_were_seen():
    cost = PassCost()
    assert not cost.known
    for nodes, known in [(10, False), (29, False), (30, True)]:
        cost.add(nodes, 1.0)
        assert cost.known == known


def test_unknown_costs_are_probed_with_sizes_far_enough_apart():
    for budget in [*range(2, 300), 1000]:
        cost = PassCost()
        for _ in range(2):
            assert not cost.known
            assert 0 <= cost.probe(budget) <= budget
            cost.add(1 + cost.probe(budget), 1.0)
        assert cost.known


def test_trees_that_stay_small_are_probed_again_and_again():
    cost = PassCost()
    asked = []
    for _ in range(4):
        asked.append(cost.probe(64))
        cost.add(1, 1.0)  # the planner had no guesses
    assert asked == [4, 32, 32, 32]
    assert not cost.known


def test_cost_is_a_line_between_sizes_and_beyond():
    cost = GivenCost(2.0, 0.5)
    np.testing.assert_allclose(cost.seconds([1, 50, 100, 200]), [2.5, 27, 52, 102])
    assert cost.seconds(10).shape == ()


def test_cost_bends_where_the_processor_becomes_slower_than_the_disk():
    cost = PassCost()
    for nodes in (1, 2, 4, 8, 16, 32, 64, 128):
        cost.add(nodes, max(1.0, nodes / 32))
    np.testing.assert_allclose(cost.seconds([1, 8, 32, 48, 128, 256]), [1, 1, 1, 1.5, 4, 8])


def test_cost_never_falls_and_small_passes_are_not_free():
    cost = PassCost()
    cost.add(10, 3.0)
    cost.add(100, 1.0)  # quicker by chance
    assert (np.diff(cost.seconds(np.arange(1, 300))) >= 0).all()
    cost = PassCost()
    cost.add(10, 1.0)
    cost.add(40, 10.0)  # so steep that the line would cross zero
    assert cost.seconds(1) == pytest.approx(0.1)


def test_one_slow_pass_changes_nothing_and_old_ones_are_forgotten():
    cost = PassCost()
    for _ in range(3):
        cost.add(1, 1.0)
        cost.add(64, 2.0)
    cost.add(64, 500.0)
    assert cost.seconds(64) == pytest.approx(2.0)
    for _ in range(REMEMBERED):
        cost.add(64, 6.0)
    assert cost.seconds(64) == pytest.approx(6.0)


def test_goodput_by_hand():
    rates = goodput(np.log([0.5, 0.25]), 1.0, GivenCost(2.0, 1.0))
    np.testing.assert_allclose(rates, [1 / 4, 1.5 / 5, 1.75 / 6])
    assert best_size(np.log([0.25, 0.5]), 1.0, GivenCost(2.0, 1.0)) == 1


@given(st.lists(st.floats(-9, 0), max_size=40), st.floats(0, 5), st.floats(0.001, 5), st.floats(0, 1))
def test_best_size_is_the_best_of_all_sizes(log_probs, spent, constant, slope):
    cost = GivenCost(constant, slope)
    best = sorted(log_probs, reverse=True)
    rates = [
        (1 + sum(map(math.exp, best[:n]))) / (spent + float(cost.seconds(n + 1))) for n in range(len(log_probs) + 1)
    ]
    assert rates[best_size(np.array(log_probs), spent, cost)] == pytest.approx(max(rates))


def test_flat_costs_take_every_guess_and_steep_ones_none():
    guesses = np.log(np.linspace(0.9, 0.01, 64))
    assert best_size(guesses, 0.5, GivenCost(1.0, 0.0)) == 64
    assert best_size(guesses, 0.0, GivenCost(0.0, 1.0)) == 0


@pytest.mark.parametrize(("pass_seconds", "reads"), [(10.0, True), (1.1, True), (0.9, False)])
def test_a_sure_chain_is_drafted_on_while_a_draft_pass_takes_less_than_the_targets(pass_seconds, reads):
    # Tokens per second of a chain of k sure guesses: (1 + k) / (k + pass), which grows while the pass takes over 1 s.
    sure, cost, draft_cost = np.zeros(5), GivenCost(pass_seconds, 0.0), GivenCost(1.0, 0.0)
    assert bool(worth_reading(sure, np.zeros(1), 64, 5.0, cost, draft_cost)) == reads


def test_unlikely_nodes_are_read_only_where_reading_is_cheap():
    found, unread = np.log([0.9, 0.8, 0.1, 0.05]), np.log([0.8, 0.1, 0.05])
    assert worth_reading(found, unread, 64, 0.1, GivenCost(1.0, 0.0), GivenCost(0.01, 0.0)) == 3
    assert worth_reading(found, unread, 64, 0.1, GivenCost(1.0, 0.0), GivenCost(0.01, 0.2)) == 1
    assert worth_reading(found, unread, 64, 0.1, GivenCost(1.0, 0.0), GivenCost(2.0, 0.0)) == 0
    assert worth_reading(found, unread[:0], 64, 0.1, GivenCost(1.0, 0.0), GivenCost(0.01, 0.0)) == 0


def rounds_drafted(tokens, count=400):
    """For each of `count` rounds whether it drafted; a drafted one takes twice a plain pass and writes `tokens`."""
    trial, drafted = Trial(), []
    for _ in range(count):
        drafted.append(trial.drafts())
        if drafted[-1]:
            trial.add(tokens, 2.0, 1.0)
    return drafted


def test_drafting_that_pays_goes_on():
    assert all(rounds_drafted(2))


def test_drafting_that_does_not_pay_rests_longer_each_time_and_is_tried_again():
    drafted = rounds_drafted(1)
    runs = [(key, len(list(group))) for key, group in groupby(drafted)]
    assert [length for key, length in runs if not key][:-1] == [16, 32, 64, 128]
    assert {length for key, length in runs[:-1] if key} == {TRIAL}


def test_a_text_that_becomes_easy_is_drafted_again():
    trial = Trial()
    while trial.drafts():
        trial.add(1, 2.0, 1.0)
    while not trial.drafts():
        pass
    for _ in range(TRIAL):
        trial.add(5, 2.0, 1.0)
    assert all(trial.drafts() for _ in range(100))


MODEL = random_model(1, vocab_size=48, sharpness=3.0)
PROMPT = [1, 2, 3, 4, 1, 2, 3]


GREEDY = SamplingParams()


def write(planner, sampling=GREEDY, **options):
    target, stats, output = ReferenceBackend(MODEL), GenerationStats(), []
    for round_ in generate_tokens(
        target, target.open(), planner, PROMPT, sampling, max_tokens=40, budget=24, stats=stats, **options
    ):
        output += round_.tokens
    return output, stats


def specexec(draft_cost=None, model=MODEL):
    planner = SpecExecPlanner(ReferenceBackend(model))
    if draft_cost:
        planner._drafter.cost = draft_cost
    return planner


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_costs_decide_how_much_is_guessed_and_never_the_text(temperature):
    sampling = SamplingParams(temperature=temperature, seed=5)
    plain, _ = write(NonePlanner(), sampling)
    cheap = GivenCost(1e-6, 0.0)
    wide, wide_stats = write(specexec(cheap), sampling, pace=Pace(GivenCost(1e9, 0.0)))
    narrow, narrow_stats = write(specexec(cheap), sampling, pace=Pace(GivenCost(0.0, 1e9)))
    assert plain == wide == narrow
    assert (narrow_stats.drafted, narrow_stats.passes) == (0, len(plain))
    full, full_stats = write(specexec(), sampling)
    assert full == plain
    assert (full_stats.drafted, full_stats.passes) == (wide_stats.drafted, wide_stats.passes)
    assert wide_stats.acceptance_length > 4


def test_a_slow_draft_is_asked_less():
    def reads(draft_cost):
        planner = specexec(draft_cost, perturbed(MODEL, 0.2, 1))
        passes = [0]
        forward = planner._drafter.draft.forward

        def counting(batch):
            passes[0] += 1
            return forward(batch)

        planner._drafter.draft.forward = counting
        _, stats = write(planner, pace=Pace(GivenCost(1e6, 0.0)))
        return passes[0] / stats.passes

    assert reads(GivenCost(1e9, 0.0)) <= 1 + 1 / 8 < 2 < reads(GivenCost(1e-3, 0.0))  # one more reads the prompt


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["specexec", "sssd"]),
    st.sampled_from([0.0, 0.7, 1.0]),
    st.integers(0, 2**32),
    st.one_of(st.none(), st.tuples(st.floats(1e-6, 1e3), st.floats(0, 1e3))),
)
def test_any_cost_writes_the_plain_text(name, temperature, seed, line):
    sampling = SamplingParams(temperature=temperature, seed=seed)
    planner = specexec(model=perturbed(MODEL, 0.2, 1)) if name == "specexec" else SssdPlanner()
    pace = Pace(GivenCost(*line)) if line else Pace()  # what passes take here, and now
    assert write(planner, sampling, pace=pace)[0] == write(NonePlanner(), sampling)[0]


def test_a_budget_that_somebody_chose_is_kept():
    entry = Entry(name="m", target="file:m.gguf", defaults=Defaults())
    assert isinstance(choose_pace(None, entry), Pace)
    assert choose_pace(8, entry) is None
    assert choose_pace(None, Entry(name="m", target="file:m.gguf", defaults=Defaults(budget=4))) is None
