"""The ledger by itself: what it allows, by times that are given here."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from edgespec.planners.auto import new_auto_state
from edgespec.planners.ledger import ALLOWANCE, CARRIED, FARTHEST, FIRST_REST, MOST_GAINED, MOST_SAVED, Accounts, Ledger


def started(plain=1.0, passes=1, **options):
    ledger = Ledger(**options)
    for _ in range(passes):
        ledger.add({}, None, plain, 1)
    return ledger


def used(ledger, seconds, tokens, way="copies", drafting=0.0):
    ledger.add({way: drafting}, way, seconds, tokens)


STEPS = st.tuples(
    st.sampled_from(["copies", "draft"]),
    st.floats(0.0, 30.0),  # plain passes that the step is to take more than one
    st.integers(1, 12),  # tokens that it gains
    st.floats(1.0, 10.0),  # times as long that the further part takes
)


@settings(max_examples=200, deadline=None)
@given(st.lists(STEPS, min_size=1, max_size=150), st.sampled_from([0.01, 1.0, 50.0]))
def test_losses_stay_within_the_allowance_and_what_one_step_takes_longer_than_predicted(steps, plain):
    ledger, tokens, seconds, longer = started(plain), 1, plain, 0.0
    for way, further, gained, factor in steps:
        if further * plain <= ledger.room(way):
            took = plain * (1 + factor * further)
            used(ledger, took, gained, way)
            longer = max(longer, took - plain * (1 + further))
        else:
            took, gained = plain, 1
            ledger.add({}, None, plain, 1)
        tokens, seconds = tokens + gained, seconds + took
        assert seconds - tokens * plain <= plain + ALLOWANCE * seconds + longer + 1e-6 * seconds


def test_nothing_is_allowed_before_a_plain_pass():
    ledger = Ledger(first=3)
    for _ in range(3):
        assert ledger.room("copies") == 0
        ledger.add({}, None, 2.0, 1)
    assert ledger.room("copies") == pytest.approx(2.0, rel=0.1)


def test_a_step_with_draft_tokens_is_followed_by_a_plain_pass_at_growing_distances():
    ledger, distances, steps = started(), [], 0
    while len(distances) < 6:
        if ledger.room("copies"):
            used(ledger, 1.1, 1.3)
            steps += 1
        else:
            ledger.add({}, None, 1.0, 1)
            distances.append(steps)
            steps = 0
    assert distances[0] == 1
    assert sorted(distances) == distances
    assert distances[-1] > 8
    assert ledger.distance <= FARTHEST


def test_a_way_that_loses_rests_each_time_twice_as_long():
    ledger, rests = started(), []
    for _ in range(4):
        while not ledger.room("copies"):
            ledger.add({}, None, 1.0, 1)
        used(ledger, 1.0 + 3 * (1 + ALLOWANCE * ledger.tokens), 1)
        ledger.add({}, None, 1.0, 1)
        rests.append(ledger.accounts["copies"].rest)
    assert rests == [FIRST_REST * 2**i for i in range(1, 5)]


def test_a_rest_shortens_when_the_way_gains():
    ledger = started()
    ledger.accounts["copies"].rest = 256
    for _ in range(400):
        if ledger.room("copies"):
            used(ledger, 1.0, 4)
        else:
            ledger.add({}, None, 1.0, 1)
    assert ledger.accounts["copies"].rest == FIRST_REST


def test_seconds_of_looking_for_draft_tokens_count_where_none_was_used():
    ledger = started()
    for _ in range(200):
        ledger.add({"copies": 0.1} if ledger.room("copies") else {}, None, 1.0, 1)
    assert ledger.accounts["copies"].lost < 1 + ALLOWANCE * ledger.tokens + 0.1
    assert ledger.accounts["copies"].rest > FIRST_REST


def test_all_ways_share_one_allowance():
    ledger = started()
    used(ledger, 1.8, 1, "copies")
    ledger.add({}, None, 1.0, 1)
    assert ledger.room("draft") == pytest.approx(ledger.room("copies"))
    assert ledger.room("draft") < 0.3


def test_what_was_earned_while_passes_were_faster_pays_for_few_of_the_present_ones():
    ledger = started(passes=200)
    for _ in range(4):
        ledger.add({}, None, 50.0, 1)
    assert ledger.room("copies") == pytest.approx(50.0 * (1 + ALLOWANCE * 8))


def test_one_slow_plain_pass_earns_no_more_than_another():
    ledger = started(passes=4)
    ledger.add({}, None, 50.0, 1)
    assert ledger.room("copies") == pytest.approx(1 + ALLOWANCE * 5)


def test_gains_pay_for_few_losses_and_fewer_in_the_next_sequence():
    ledger = started()
    for _ in range(50):
        if ledger.room("copies"):
            used(ledger, 1.0, 10)
        else:
            ledger.add({}, None, 1.0, 1)
    assert ledger.accounts["copies"].lost == -MOST_GAINED
    ledger.begin()
    assert ledger.accounts["copies"].lost == -CARRIED
    assert ledger.room("copies") > 0  # before a plain pass of this sequence
    assert ledger.room("draft") == 0


def test_another_program_that_comes_is_not_charged_to_the_step_that_met_it():
    ledger = started(passes=3)
    used(ledger, 50.0, 3)
    assert ledger.room("copies") == 0  # a plain pass is due
    ledger.add({}, None, 50.0, 1)
    assert ledger.accounts["copies"].lost < 0
    assert not ledger.accounts["copies"].resting


def test_a_pass_with_draft_tokens_that_is_faster_than_a_plain_one_shows_that_plain_decoding_is():
    ledger = started(4.0, passes=3)
    used(ledger, 2.4, 1)
    assert ledger.plain == pytest.approx(2.4)


def test_a_slow_start_is_soon_forgotten():
    ledger = started(4.0, passes=5)
    ledger.add({}, None, 1.0, 1)
    assert ledger.plain == pytest.approx(1.5)
    ledger.add({}, None, 1.0, 1)
    assert ledger.plain == 1.0


def test_the_next_run_begins_with_what_this_one_found():
    ledger = started(passes=4)
    for _ in range(40):
        if ledger.room("copies"):
            used(ledger, 1.0, 5)
        else:
            ledger.add({"draft": 0.05}, None, 1.0, 1)
    known = json.loads(json.dumps(ledger.as_dict()))
    after = Ledger()
    after.recall(Accounts.model_validate(known))
    assert after.as_dict() == known
    after.begin()
    assert after.room("copies") > 0
    for wrong in ({}, known | {"accounts": {"copies": [1]}}, known | {"plain": "fast"}):
        with pytest.raises(ValidationError):
            Accounts.model_validate(wrong)


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("period", [600, 40, 20, 10, 6, 3, 1])
def test_batches_of_two_sizes_in_turn_lose_no_more_than_those_of_one(period, streams):
    state, plain, spent = new_auto_state(streams), 0.0, 0.0
    for step in range(600):
        ledger = state.batch(2 + step // period % 2)
        way = "batch" if ledger.room("batch") else None
        seconds = 2.0 if way else 1.0
        ledger.add({way: 0.0} if way else {}, way, seconds, 1)
        plain, spent = plain + 1, spent + seconds
    assert plain >= 0.98 * spent


@pytest.mark.parametrize("took", [1.9, 1.5, 1.2])
def test_a_batch_that_comes_back_soon_sees_what_plain_decoding_takes_now(took):
    """Before, plain passes took 2.0 and draft tokens paid."""
    ledger, state, spent = started(2.0), new_auto_state(streams=False), 0.0
    state.ledgers[2], state.batched = ledger, 2
    while ledger.distance < FARTHEST:
        if ledger.room("batch"):
            used(ledger, 2.0, 3, "batch")
        else:
            ledger.add({}, None, 2.0, 1)
    state.batch(3).add({}, None, 2.5, 1)
    for step in range(1, 401):
        if state.batch(2).room("batch"):
            used(ledger, took, 1, "batch")
            spent += took
        else:
            ledger.add({}, None, 1.0, 1)
            spent += 1.0
        assert spent <= 1.04 * step + 16


def test_a_batch_saves_what_many_tokens_allowed():
    ledger = started(passes=2000)
    used(ledger, 3.0, 1)
    ledger.resume()
    assert (ledger.tokens, ledger.saved, ledger.accounts["copies"].lost) == (0, MOST_SAVED, 0)


def test_short_sequences_share_what_one_may_lose_at_once():
    ledger, taken = Ledger(), 0.0
    for _ in range(40):
        ledger.begin()
        for _ in range(12):
            drafted = ledger.room("copies") >= 0.5
            took = 1.5 if drafted else 1.0
            ledger.add({"copies": 0.0} if drafted else {}, "copies" if drafted else None, took, 1)
            taken += took
    assert 0.5 <= taken - 480 <= 1 + ALLOWANCE * 480
    again = Ledger()
    again.recall(Accounts.model_validate_json(json.dumps(ledger.as_dict())))
    assert again.start == ledger.start < 1


def test_what_was_not_lost_is_saved_for_trials():
    ledger = started(passes=4)
    for _ in range(400):
        ledger.add({}, None, 1.0, 1)
    ledger.accounts["draft"].idle = 1000
    ledger.begin()
    assert ledger.saved == pytest.approx(404 * ALLOWANCE, rel=0.01)
    ledger.add({}, None, 1.0, 1)
    assert ledger.room("draft") == pytest.approx(1 + ledger.saved, rel=0.05)
    assert ledger.room("copies") == pytest.approx(1, rel=0.05)
    ledger.pay("draft", 5.0)
    assert ledger.room("draft") == pytest.approx(1 + 404 * ALLOWANCE - 5, rel=0.05)
    ledger.pay("draft", 5.0)
    assert (ledger.saved, ledger.room("draft")) == (0.0, 0.0)


def test_a_trial_that_drafted_in_vain_comes_later_the_next_time():
    ledger = started(passes=4)
    ledger.accounts["draft"].idle = 1000
    ledger.add({"draft": 0.5}, None, 1.0, 1)
    assert not ledger.is_due("draft", 0)
    assert ledger.accounts["draft"].rest == 2 * FIRST_REST


def test_looks_of_a_trial_add_up_but_for_those_that_only_look_up_copies():
    ledger = started(passes=4)
    for _ in range(30):
        ledger.add({"draft": 0.04, "copies": 0.01}, None, 1.0, 1)
    assert ledger.accounts["draft"].rest > FIRST_REST
    assert ledger.accounts["copies"].rest == FIRST_REST
    assert ledger.is_due("copies", 0)
