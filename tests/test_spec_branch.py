"""Branches of the planner specbranch: where they are, and how many."""

import numpy as np
import pytest
from reference.backend import ReferenceBackend, random_model

from edgespec.lab.specbranch import SpecBranchPlanner, features, likeliest_path
from edgespec.loop.step import step_of
from edgespec.planners.ahead import AheadSearch
from edgespec.planners.search import COMMITTED, NOT_READ

CONFIDENCE = np.array([0.0, 1.0, 0.0, 0.0])  # weights that predict the draft's own probability
SIZE = 48
MODEL = random_model(0, vocab_size=SIZE, sharpness=3.0)


def grown(first: float, second: float) -> AheadSearch:
    """A root with three children, and two of the best one, all unread; `first` and `second`: of the best ones."""
    search = AheadSearch(7, 16)
    rest = (1 - first) / 2
    search.add_children(np.array([0]), [COMMITTED], [np.array([10, 11, 12])], [np.log([first, rest, rest - 0.01])])
    search.add_children(np.array([1]), [0], [np.array([20, 21])], [np.log([second, 0.9 - second])])
    return search


@pytest.fixture
def planner():
    made = SpecBranchPlanner(ReferenceBackend(MODEL), nice=False)
    made.weights = CONFIDENCE
    yield made
    made.close()


def branches(planner: SpecBranchPlanner, search: AheadSearch, depth: int = 9) -> list[int]:
    planner._path = likeliest_path(search)
    return planner.branches(search, depth).tolist()


def test_branches_are_siblings_of_the_first_node_that_is_not_expected(planner):
    search = grown(0.4, 0.8)
    assert likeliest_path(search) == [1, 4]
    assert branches(planner, search) == [2]  # two of four, of which the first was read
    assert branches(planner, grown(0.8, 0.4)) == [5, 4]  # by probability: 0.5, 0.4


def test_a_path_that_is_expected_goes_on_at_its_end(planner):
    assert branches(planner, grown(0.9, 0.8)) == [4]
    assert branches(planner, AheadSearch(7, 16)) == []


def test_no_branch_is_too_deep(planner):
    assert branches(planner, grown(0.8, 0.4), depth=2) == []


def test_features_are_of_the_drafts_choice_and_of_the_last_path():
    search = grown(0.4, 0.8)
    first, second = features(search, [1, 4], 0.25).tolist()
    q = np.array([0.4, 0.3, 0.29, 0.01])
    assert first == pytest.approx([1.0, np.log(0.4 / 0.6), -(q * np.log(q)).sum(), 0.25])
    assert second[1] == pytest.approx(np.log(0.8 / 0.2))
    assert features(search, [], 1.0).shape == (0, 4)


def test_the_share_is_that_of_the_last_path(planner):
    for tokens, share in (([12], 0.0), ([10, 30], 0.5), ([10, 20, 5], 1.0)):
        planner._search = grown(0.6, 0.8)
        planner._search.place[1:] = NOT_READ
        planner._path = [1, 4]
        planner.result(step_of(tokens), None)
        assert planner._share == share


def test_a_step_without_a_proposal_has_no_path(planner):
    planner._search, planner._path = grown(0.6, 0.8), [1, 4]
    planner._search.place[1:] = NOT_READ
    planner.result(step_of([10]), None)
    planner._search = AheadSearch(7, 16)
    planner.result(step_of([10]), None)
    assert planner._share == 0.5
    assert planner.branches(AheadSearch(7, 16), 9).tolist() == []
