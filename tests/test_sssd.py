import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from number_texts import NumberVocab, text_of

from edgespec.loop.draft_passes import run_one
from edgespec.loop.planner import Context
from edgespec.loop.sampling import Noise, SamplingParams
from edgespec.loop.step import step_of
from edgespec.loop.tree import Source, make_tree
from edgespec.measure.replay import replay
from edgespec.planners.datastore import build, open_datastore
from edgespec.planners.sssd import (
    CONTINUATIONS,
    Calibration,
    NgramIndex,
    SssdPlanner,
    datastore_matches,
    grow,
)

TOKENS = st.lists(st.integers(0, 3), max_size=40)
SHARES = {source: [(0.0, 1.0, 0.0, 0.0)] for source in (Source.INPUT, Source.DATASTORE)}  # uncalibrated


def context(token_ids, max_depth=1000):
    return Context(token_ids, len(token_ids), SamplingParams(), Noise(0, 1), max_depth, 256)


def plan(token_ids, budget, datastore=None, max_depth=1000, **options):
    planner = SssdPlanner(datastore, **options)
    planner.begin(token_ids)
    return run_one(planner.propose(context(token_ids, max_depth), budget)).tree


def paths(tree):
    """Path of token ids -> (probability, source), root left out."""
    found = {0: ()}
    for node in range(1, len(tree)):
        found[node] = (*found[tree.parents[node]], int(tree.token_ids[node]))
    return {found[n]: (np.exp(tree.log_probs[n]), Source(tree.source[n])) for n in range(1, len(tree))}


def occurrences(tokens, length):
    """Brute force: where the token after each earlier occurrence of the last `length` tokens is."""
    run = tokens[len(tokens) - length :]
    return [end for end in range(length, len(tokens)) if tokens[end - length : end] == run]


def check_matches(index, tokens):
    assert index.text[:-1] == tokens
    found = dict(index.matches(1000))
    shorter_than = 0
    for length in range(min(index.longest, len(tokens)), -1, -1):
        wanted = occurrences(tokens, length)
        if len(wanted) > shorter_than:
            assert found.pop(length) == wanted
        shorter_than = len(wanted)
    assert found == {}


@given(TOKENS, st.integers(1, 5))
def test_index_equals_brute_force(tokens, longest):
    index = NgramIndex(longest)
    for end, token in enumerate(tokens, 1):
        index.extend([token])
        check_matches(index, tokens[:end])


@given(TOKENS, TOKENS, st.integers(0, 40), st.integers(1, 5))
def test_rewound_index_equals_a_new_one(before, after, length, longest):
    index, new = NgramIndex(longest), NgramIndex(longest)
    index.extend(before)
    index.rewind(min(length, len(before)))
    index.extend(after)
    new.extend(before[:length] + after)
    check_matches(index, before[:length] + after)
    assert index._after == new._after


def test_index_hands_out_the_latest_occurrences():
    index = NgramIndex(3)
    index.extend([1, 2] * 50 + [1])
    assert index.matches(4)[0] == (3, [93, 95, 97, 99])
    assert index.matches(4)[-1] == (0, [97, 98, 99, 100])


@given(TOKENS.filter(bool), TOKENS.filter(bool), st.integers(1, 12), st.integers(0, 6))
def test_tree_invariants(tmp_path_factory, tokens, other, budget, max_depth):
    path = tmp_path_factory.mktemp("store") / "x"
    build(path, [text_of(other), text_of(other[::-1])], NumberVocab())
    tree = plan(tokens, budget, open_datastore(path, NumberVocab()), max_depth)
    again = make_tree(tree.token_ids, tree.parents, tree.log_probs, tree.source)  # refuses what is no tree
    assert (again.depth == tree.depth).all()
    assert tree.token_ids[0] == tokens[-1]
    assert 1 <= len(tree) <= budget + 1
    assert tree.depth.max() <= max_depth
    assert (tree.log_probs[1:] <= tree.log_probs[tree.parents[1:]]).all()
    assert (np.diff(tree.log_probs) <= 0).all()  # best first
    assert tree.source[0] == Source.TARGET
    assert set(tree.source[1:].tolist()) <= {Source.INPUT, Source.DATASTORE}
    assert [array.dtype for array in (tree.token_ids, tree.parents, tree.depth, tree.source)] == [np.int32] * 4


@pytest.mark.parametrize(
    ("text", "documents", "source"),
    [([5, 6, 7, 8, 9, 10, 1, 2, 5, 6], [], Source.INPUT), ([50, 5, 6], [[4, 5, 6, 7, 8, 9]], Source.DATASTORE)],
)
def test_copied_text_is_found(store, text, documents, source):
    tree = plan(text, 3, store(*documents) if documents else None, calibration=Calibration(SHARES))
    assert tree.token_ids.tolist() == [6, 7, 8, 9]
    assert tree.parents.tolist() == [-1, 0, 1, 2]
    assert tree.source.tolist() == [Source.TARGET] + [source] * 3


def test_below_a_token_shorter_matches_go_on():
    # 1 6 was followed by 7 8 only, but 6 also by 7 9.
    found = paths(plan([1, 6, 7, 8, 2, 6, 7, 9, 1, 6], 50))
    assert {(7, 8), (7, 9)} <= found.keys()
    assert found[7, 8][0] > found[7, 9][0]


def test_own_output_is_found_too():
    planner = SssdPlanner()
    planner.begin([1, 2, 3])
    planner.result(step_of([4, 5]), None)
    planner.result(step_of([6, 3]), None)
    assert (3, 4, 5, 6, 3)[1:] in paths(run_one(planner.propose(context([1, 2, 3, 4, 5, 6, 3]), 10)).tree)


def test_a_new_prompt_forgets_the_old_text_but_for_what_they_share():
    planner = SssdPlanner()
    planner.begin([1, 2, 3, 4, 5])
    planner.result(step_of([6, 7]), None)
    planner.begin([1, 2, 3, 9, 2])
    assert paths(run_one(planner.propose(context([1, 2, 3, 9, 2]), 10)).tree) == paths(plan([1, 2, 3, 9, 2], 10))


def test_continuations_do_not_run_into_the_next_document(store):
    found = paths(plan([6], 10, store([5, 6, 7], [8, 9], [6, 8])))
    assert {path for path, (_, source) in found.items() if source == Source.DATASTORE} == {(7,), (8,)}


def test_probabilities_are_shares_of_the_counts(store):
    # 6 goes on with 7 three times and with 8 once; 7 goes on with 1 twice of three times.
    tree = plan([6], 10, store([6, 7, 1], [6, 7, 1], [6, 7, 2], [6, 8, 3]), calibration=Calibration(SHARES))
    wanted = {
        (7,): 3.5 / 5,
        (8,): 1.5 / 5,
        (7, 1): 3.5 / 5 * 2.5 / 4,
        (7, 2): 3.5 / 5 * 1.5 / 4,
        (8, 3): 1.5 / 5 * 1.5 / 2,
    }
    found = {path: value for path, (value, source) in paths(tree).items() if source == Source.DATASTORE}
    assert found == pytest.approx(wanted)


def test_a_token_gets_the_better_source(store):
    # After 6, both sources know 7 and 8. The text has 7 twice and 8 once, the datastore 8 four times and 7 once.
    tokens, datastore = [6, 7, 6, 7, 6, 8, 6], store([6, 7], [6, 8], [6, 8], [6, 8], [6, 8])
    found = paths(plan(tokens, 2, datastore, calibration=Calibration(SHARES)))
    assert found == {
        (7,): (pytest.approx(2.5 / 4), Source.INPUT),
        (8,): (pytest.approx(4.5 / 6), Source.DATASTORE),
    }


def test_below_a_token_of_one_source_the_other_goes_on(store):
    # 8 is the datastore's guess after 6. What follows 6 8 is in the text alone.
    found = paths(plan([6, 8, 5, 6, 7, 6, 7, 6], 50, store(*[[6, 8]] * 5), calibration=Calibration(SHARES)))
    assert found[(8,)][1] == Source.DATASTORE
    assert found[8, 5][1] == Source.INPUT


def test_calibration_depends_on_source_length_and_depth():
    calibration = Calibration(
        {
            Source.INPUT: [(-9.0, 1.0, 0.0, 0.0), (0.0, 1.0, 0.0, 0.0), (3.0, 1.0, 0.0, -2.0)],
            Source.DATASTORE: [(0.0, 1.0, 0.0, 0.0), (-3.0, 1.0, 0.5, 0.0)],
        }
    )
    wanted = {
        (Source.INPUT, 1, 1, 1, 2): 0.5,
        (Source.INPUT, 2, 1, 1, 2): 1 / (1 + np.exp(-3)),
        (Source.INPUT, 9, 1, 1, 2): 1 / (1 + np.exp(-3)),  # longer than the table: its last row
        (Source.INPUT, 2, 4, 1, 2): 1 / (1 + np.exp(-3 + 2 * np.log(4))),
        (Source.DATASTORE, 1, 1, 8, 16): 1 / (1 + np.exp(3 - 0.5 * np.log(16))),
    }
    assert {key: np.exp(calibration[key]) for key in wanted} == pytest.approx(wanted)


def test_the_packages_calibration_trusts_longer_matches_and_larger_shares():
    calibration = Calibration()
    for source in (Source.INPUT, Source.DATASTORE):
        by_length = [
            calibration[source, length, 1, 1, 1] for length in (0, 1, 3, 6) if source == Source.INPUT or length
        ]
        by_count = [calibration[source, 2, 1, count, 10] for count in range(1, 11)]
        assert by_length == sorted(by_length)
        assert by_count == sorted(by_count)
        assert all(value < 0 for value in [*by_length, *by_count])


def test_shorter_matches_are_added_until_there_are_enough(store):
    datastore = store([1, 2, 3], *[[9, 2, 4]] * 30, *[[2, 5]] * (CONTINUATIONS - 10))
    found = {length: len(places) for _, length, _, places in datastore_matches(datastore, [9, 2], 4)}
    assert found == {2: 30, 1: CONTINUATIONS}
    found = {length: len(places) for _, length, _, places in datastore_matches(datastore, [8, 2], 4)}
    assert found == {1: CONTINUATIONS}
    alike = store(*[[9, 2, 4]] * 5)  # each match of one token is one of two
    assert [length for _, length, _, _ in datastore_matches(alike, [9, 2], 4)] == [2]
    many = store(*[[9, 2, 4]] * CONTINUATIONS, [2, 5])
    assert [length for _, length, _, _ in datastore_matches(many, [9, 2], 4)] == [2]


def test_where_nothing_matches_the_latest_words_are_guessed(store):
    found = paths(plan([1, 2, 3], 10, store([7, 8])))
    assert {path[0] for path in found} == {1, 2, 3}
    assert {source for _, source in found.values()} == {Source.INPUT}


def test_min_probability_leaves_the_others_out():
    tokens = [6, 7, 1, 6, 7, 2, 6, 8, 6]
    every = paths(plan(tokens, 100, calibration=Calibration(SHARES)))
    some = paths(plan(tokens, 100, calibration=Calibration(SHARES), min_probability=0.3))
    assert some == {path: value for path, value in every.items() if value[0] >= 0.3}
    assert 1 < len(some) < len(every)


def test_grow_takes_the_best_paths():
    """Against all paths, sorted."""
    random = np.random.default_rng(0)
    text = [*random.integers(0, 3, 60).tolist(), -1]
    groups = [(int(Source.INPUT), 1, text, list(range(0, 50, 2))), (int(Source.INPUT), 0, text, list(range(50)))]
    calibration = Calibration(SHARES)
    every = paths(grow(7, groups, 10**6, 6, calibration, 0.0))
    values = sorted((value for value, _ in every.values()), reverse=True)
    best = paths(grow(7, groups, 40, 6, calibration, 0.0))
    assert len(every) > 100
    assert sorted((value for value, _ in best.values()), reverse=True) == values[:40]


def test_replay_counts_what_a_target_would_gain():
    # The prompt gives the 6. After it 7 8 is copied: 2 draft tokens and the bonus. Nothing can guess the 2 and the 3.
    result = replay(SssdPlanner(), [5, 6, 7, 8, 9, 5], [6, 7, 8, 1, 2, 3], 3)
    assert result.acceptance_lengths == [3, 1, 1]
    assert len(result.plan_seconds) == 3
