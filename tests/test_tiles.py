"""The default planner where passes compute tiles of rows, as on GPUs: by published times, never by a clock."""

from dataclasses import replace
from statistics import fmean

import numpy as np
import pytest
from reference.backend import ReferenceBackend, random_model
from simulated import Run, tiles

from edgespec.loading import timed_pass
from edgespec.loading.timed_pass import TIMED, TIMING, time_tiles
from edgespec.loop.pass_times import PassTimes
from edgespec.loop.shapes import BatchInvariance, RowClass
from edgespec.planners import auto
from edgespec.planners.auto import new_auto_state

DRAFTING = 0.03  # plain passes that a pass of the draft takes
SEEDS = 4


def best(agreement):
    """Speed of the best fixed width, as a multiple of plain decoding."""
    tokens = np.cumsum(agreement ** np.arange(64))
    return max(tokens[n] / (tiles(n + 1) / tiles(1) + n * DRAFTING) for n in range(64))


@pytest.fixture(autouse=True)
def no_clock(monkeypatch):
    monkeypatch.setattr(auto, "perf_counter", lambda: 0.0)


def text(agreement, seed, tokens=600, drafting=DRAFTING, **options):
    return texts(agreement, seed, [tokens], drafting, **options)[0]


def texts(agreement, seed, tokens, drafting, **options):
    run = Run(tiles, lambda _: agreement, ("draft",), agreement, drafting=drafting, seed=seed, tiled=True, **options)
    run.planner._draft.planner.depth = 32
    return [run.sequence(each) for each in tokens]


def speed(steps, first, last):
    """Ratio to plain decoding between the steps that reach these numbers of tokens."""
    _, spent, plain = next(step for step in steps if step[0] >= first) if first else (0, 0.0, 0.0)
    _, spent_then, plain_then = next(step for step in steps if step[0] >= last)
    return (plain_then - plain) / (spent_then - spent)


@pytest.mark.parametrize("agreement", [0.5, pytest.param(0.7, marks=pytest.mark.exhaustive), 0.9, 0.95])
def test_after_300_tokens_passes_are_as_wide_as_is_best_and_no_text_is_slower_for_it(agreement):
    found = [text(agreement, seed) for seed in range(3 * SEEDS)]  # of fewer, the mean is chance
    assert min(speed(steps, 0, tokens) for steps in found for tokens in (100, 300)) >= 0.97
    assert fmean(speed(steps, 300, 600) for steps in found) >= 0.9 * best(agreement)


@pytest.mark.parametrize("agreement", [0.5, 0.7, 0.9, 0.95])
def test_a_draft_whose_reading_takes_long_makes_no_text_slower(agreement):
    found = [text(agreement, seed, 300, drafting=0.1) for seed in range(SEEDS)]
    assert min(speed(steps, 0, tokens) for steps in found for tokens in (100, 300)) >= 0.97


@pytest.mark.parametrize("tokens", [100, pytest.param(300, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize(("drafting", "agreement"), [(0.03, 0.8), (0.03, 0.9), (0.1, 0.9), (0.1, 0.95)])
def test_trials_make_no_later_text_slower_however_short(drafting, agreement, tokens):
    found = [texts(agreement, seed, [tokens] * 6, drafting) for seed in range(SEEDS)]
    assert min(speed(steps, 0, tokens) for each in found for steps in each) >= 0.97


def test_what_one_text_shows_of_the_draft_the_next_ones_use_from_their_start():
    quick = [texts(0.95, seed, [100] * 6, DRAFTING)[-1] for seed in range(SEEDS)]
    slow = [texts(0.95, seed, [300] * 6, 0.1)[-1] for seed in range(SEEDS)]
    assert fmean(speed(steps, 0, 100) for steps in quick) >= 0.6 * best(0.95)
    assert fmean(speed(steps, 0, 300) for steps in slow) >= 1.3


@pytest.mark.parametrize("agreement", [0.5, 0.95])
@pytest.mark.parametrize("remembered", [(3, 1), (1 / 3, 1), (1, 3), (1, 1 / 3)])
def test_times_that_are_remembered_wrongly_cost_little(remembered, agreement):
    found = [text(agreement, seed, 300, remembered=remembered) for seed in range(SEEDS)]
    assert fmean(speed(steps, 0, 300) for steps in found) >= 0.97


def test_a_tile_takes_as_long_as_a_full_one_and_more_rows_may_take_less_time():
    times = PassTimes(tiled=True)
    for rows in TIMED:
        times.add(rows, tiles(rows))
    times.add(8, tiles(8), 5000)  # a long text
    curve = times.at(5000)
    wanted = np.array([1, 8, 9, 16, 20, 32, 33, 50, 64])
    np.testing.assert_allclose(curve.seconds(wanted), [tiles(rows) for rows in wanted])
    np.testing.assert_allclose(curve.paid(20).seconds([1, 8, 20, 33]), tiles(20) * np.array([1, 1, 1, 2]))
    later = PassTimes(tiled=True)
    later.recall(times.as_list())
    np.testing.assert_allclose(later.at(0).seconds(wanted), curve.seconds(wanted))


def test_passes_with_tiles_are_timed_once(monkeypatch):
    model, said, pace = random_model(1), list[str](), new_auto_state(False, tiled=True)
    target, draft = ReferenceBackend(model, max_nodes=33), ReferenceBackend(model)
    monkeypatch.setattr(timed_pass, "time_pass", lambda backend, rows: timed_pass.Pass(rows, tiles(rows), 0.0))
    time_tiles([pace], target, draft, say=said.append)
    assert (said, pace.times(0)) == ([], None)  # this one has no tiles
    narrow = BatchInvariance("narrow", RowClass(1, 8), RowClass(1, 8))
    for exact in (narrow, None):  # with this row class, no pass has a tile
        assert said == []
        target.capabilities = replace(target.capabilities, tiled=True, exact=exact)
        time_tiles([pace], target, draft, say=said.append)
    time_tiles([pace], target, draft, say=said.append)
    assert said == [TIMING]
    assert float(pace.times(0).sizes[-1]) == 32
    assert float(pace.draft.at(0).sizes[-1]) == 64
