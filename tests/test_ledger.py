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


def step(ledger, seconds, tokens, way="copies", plain=1.0, least=1e-9):
    """With draft tokens where the ledger has room for them, else a plain pass; returns which, and its seconds."""
    drafted = ledger.room(way) >= least
    if drafted:
        used(ledger, seconds, tokens, way)
    else:
        ledger.add({}, None, plain, 1)
    return drafted, seconds if drafted else plain


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
        drafted, took = step(ledger, plain * (1 + factor * further), gained, way, plain, further * plain)
        longer = max(longer, took - plain * (1 + further)) if drafted else longer
        tokens, seconds = tokens + (gained if drafted else 1), seconds + took
        assert seconds - tokens * plain <= plain + ALLOWANCE * seconds + longer + 1e-6 * seconds


def test_a_step_with_draft_tokens_is_followed_by_a_plain_pass_at_growing_distances():
    ledger = started()
    kinds = "".join("d" if step(ledger, 1.1, 1.3)[0] else "p" for _ in range(150))
    distances = [len(steps) for steps in kinds.split("p")[:-1]]
    assert distances[0] == 1
    assert sorted(distances) == distances
    assert 8 < distances[-1] <= FARTHEST


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
        step(ledger, 1.0, 4)
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


@pytest.mark.parametrize(
    ("passes", "slow", "plain", "counted"),
    [
        (200, 4, 50.0, 8),  # what was earned while passes were faster pays for few of the present ones
        (4, 1, 1.0, 5),  # one slow plain pass earns no more than another
    ],
)
def test_what_plain_passes_earn_is_counted_in_those_of_now(passes, slow, plain, counted):
    ledger = started(passes=passes)
    for _ in range(slow):
        ledger.add({}, None, 50.0, 1)
    assert ledger.room("copies") == pytest.approx(plain * (1 + ALLOWANCE * counted))


def test_gains_pay_for_few_losses_and_fewer_in_the_next_sequence():
    ledger = started()
    for _ in range(50):
        step(ledger, 1.0, 10)
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


@pytest.mark.parametrize(
    ("passes", "further", "plain"),
    [
        (3, [("copies", 2.4)], 2.4),  # a pass with draft tokens is faster: so is plain decoding
        (5, [(None, 1.0)], 1.5),  # a slow start is soon forgotten
        (5, [(None, 1.0), (None, 1.0)], 1.0),
    ],
)
def test_faster_passes_show_that_plain_decoding_is_faster(passes, further, plain):
    ledger = started(4.0, passes=passes)
    for way, seconds in further:
        ledger.add({way: 0.0} if way else {}, way, seconds, 1)
    assert ledger.plain == pytest.approx(plain)


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
    state = new_auto_state(streams)
    assert 0.98 * sum(step(state.batch(2 + i // period % 2), 2.0, 1, "batch")[1] for i in range(600)) <= 600


@pytest.mark.parametrize("took", [1.9, 1.5, 1.2])
def test_a_batch_that_comes_back_soon_sees_what_plain_decoding_takes_now(took):
    """Before, plain passes took 2.0 and draft tokens paid."""
    ledger, state, spent = started(2.0), new_auto_state(streams=False), 0.0
    state.ledgers[2], state.batched = ledger, 2
    while ledger.distance < FARTHEST:
        step(ledger, 2.0, 3, "batch", 2.0)
    state.batch(3).add({}, None, 2.5, 1)
    for count in range(1, 401):
        spent += step(state.batch(2), took, 1, "batch")[1]
        assert spent <= 1.04 * count + 16


def test_a_batch_saves_what_many_tokens_allowed():
    ledger = started(passes=2000)
    used(ledger, 3.0, 1)
    ledger.resume()
    assert (ledger.tokens, ledger.saved, ledger.accounts["copies"].lost) == (0, MOST_SAVED, 0)


def test_short_sequences_share_what_one_may_lose_at_once():
    ledger, taken = Ledger(), 0.0
    for _ in range(40):
        ledger.begin()
        taken += sum(step(ledger, 1.5, 1, least=0.5)[1] for _ in range(12))
    assert 0.5 <= taken - 480 <= 1 + ALLOWANCE * 480
    again = Ledger()
    again.recall(Accounts.model_validate_json(json.dumps(ledger.as_dict())))
    assert again.start == ledger.start < 1


@pytest.mark.parametrize("lost", [0.0, 2 * MOST_SAVED])
def test_between_batches_losses_are_forgotten_only_where_tokens_paid_for_them(lost):
    ledger = started(passes=4)
    for _ in range(2 * int(MOST_SAVED / ALLOWANCE)):
        ledger.add({}, None, 1.0, 1)
    ledger.accounts["draft"].lost = lost
    ledger.resume()
    assert (ledger.tokens > 0) == (lost > 0)


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


@pytest.mark.parametrize(
    ("idle", "looks", "drafting", "late"),
    [
        (1000, 1, 0.5, True),
        (0, 30, 0.04, True),  # looks of a trial add up
        (0, 30, 0.02, False),  # but for those that only look up copies
    ],
)
def test_a_trial_that_drafted_in_vain_comes_later_the_next_time(idle, looks, drafting, late):
    ledger = started(passes=4)
    ledger.accounts["draft"].idle = idle
    for _ in range(looks):
        ledger.add({"draft": drafting}, None, 1.0, 1)
    assert (ledger.accounts["draft"].rest > FIRST_REST) == late
    assert ledger.is_due("draft", 0) == (not late)
