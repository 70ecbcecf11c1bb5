"""The draft's search across rounds: what it keeps where the text goes on, and that nothing else changes by it."""

from contextlib import nullcontext

import numpy as np
import pytest
from alone import written
from reference.backend import ReferenceBackend, perturbed, random_model

from edgespec.loop.draft_passes import run_one
from edgespec.loop.planner import Context
from edgespec.loop.sampling import Noise, SamplingParams
from edgespec.loop.step import step_of
from edgespec.loop.tree import only, ranked
from edgespec.planners.ahead import AheadChainPlanner, AheadPlanner, AheadSearch
from edgespec.planners.none import NonePlanner
from edgespec.planners.search import COMMITTED, NOT_READ
from edgespec.planners.specexec import SpecExecPlanner
from edgespec.scheduler.requests import Request
from edgespec.scheduler.scheduler import Scheduler

SIZE = 48
MODEL = random_model(0, vocab_size=SIZE, sharpness=3.0)
SAMPLINGS = [SamplingParams(temperature=t, seed=5) for t in (0.0, 0.7, 1.0)]


def context(text, sampling=SAMPLINGS[0], room=32):
    return Context(text, 3, sampling, Noise(sampling.seed, SIZE), room, 64)


class Resting(AheadPlanner):
    """Goes on from pass to pass alone, not while the target works."""

    def during(self, nodes):
        return nullcontext()


def draft(model=MODEL, **limits):
    engine = ReferenceBackend(model, context_length=200, **{"max_nodes": 400} | limits)
    engine.vocab.eog_ids = frozenset()  # texts are as long as they may be
    return engine


def grown():
    """Two levels: the root's children a and b, a's children c and d; the root, a and c are read."""
    search = AheadSearch(7, budget=2)
    search.add_children(np.array([0]), [COMMITTED], [np.array([10, 11])], [np.log([0.6, 0.3])])
    search.take(np.array([1]), 1, 9, 9)
    search.add_children(np.array([1]), [0], [np.array([12, 13])], [np.log([0.5, 0.25])])
    search.take(np.array([3]), 1, 9, 9)
    search.add_children(np.array([3]), [1], [np.array([14])], [np.log([0.5])])
    return search


def test_only_the_origin_moves():
    search = grown()
    assert search.follow([10, 12, 14, 3]) == [1, 3, 5]
    new = search.rerooted(1, [1])
    assert new.token_ids.tolist() == [10, 12, 13, 14]
    assert new.parents.tolist() == [-1, 0, 0, 1]
    assert new.depth.tolist() == [0, 1, 1, 2]
    assert new.place.tolist() == [COMMITTED, 0, NOT_READ, NOT_READ]
    np.testing.assert_allclose(np.exp(new.log_probs), [1, 0.5, 0.25, 0.25])
    assert (new.read, new.leaves) == (1, 1)


def test_without_its_nodes_in_the_session_there_is_nothing_to_go_on_with():
    assert grown().rerooted(1, []) is None
    assert grown().rerooted(3, []) is not None  # nothing below it was read


def test_what_lies_behind_the_end_of_the_text_is_not_sent():
    search = grown()
    search.most_depth = 1
    assert search.found().token_ids.tolist() == [7, 10, 11]
    assert len(search.best()) == 2
    assert search.unread().tolist() == []  # a child of b would be too deep


def test_a_likely_node_outside_the_tree_is_worth_reading_ahead():
    search = grown()
    assert search.likeliest(9, 0.001).tolist() == [2, 4, 5]  # by probability: 0.3, 0.15, 0.15
    assert search.likeliest(9, 0.2).tolist() == [2]
    assert search.likeliest(2, 0.001).tolist() == [2]


def cut(proposal, size):
    return only(proposal.tree, ranked(proposal.tree.parents, proposal.tree.log_probs, size, 64))


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=lambda sampling: str(sampling.temperature))
@pytest.mark.parametrize("kind", [AheadPlanner, AheadChainPlanner])
def test_it_sends_what_a_search_from_there_would_send(kind, sampling):
    """Wherever the text goes on: the same nodes, or better ones, as probable, with at most as many draft passes."""
    text, hits, saved = [1, 2, 3], 0, 0
    planner = kind(draft(), depth=12, tau=1.3)
    planner.begin(text)
    for turn in range(12):
        before, usual = planner.stats.draft_passes, planner._usual
        tree = cut(run_one(planner.propose(context(text, sampling), 10)), 10)
        passes = planner.stats.draft_passes - before
        fresh = kind(draft(), depth=12, tau=1.3)
        fresh.begin(text)
        fresh._usual = usual
        expected = cut(run_one(fresh.propose(context(text, sampling), 10)), 10)
        assert np.exp(tree.log_probs).sum() >= np.exp(expected.log_probs).sum() - 0.02
        assert passes <= fresh.stats.draft_passes + 1  # the cutoff that is expected is another
        saved += fresh.stats.draft_passes - passes
        read = np.flatnonzero(planner._search.place != NOT_READ)
        node = int(read[min(len(read) - 1, 1 + turn % 3)])  # an exit that was read
        tokens = []
        while node > 0:
            tokens.insert(0, int(planner._search.token_ids[node]))
            node = int(planner._search.parents[node])
        planner.result(step_of(tokens), None)
        text = text + tokens
        hits += planner._search is not None
    assert hits == planner.stats.went_on > 6
    assert saved > 0


def write(planner, sampling, prompt=(1, 2, 3), count=60):
    """The target takes trees of one leaf only, so the draft has read more than is sent: exits, too."""
    return written(draft(max_leaves=1), planner, list(prompt), sampling, max_tokens=count)


@pytest.mark.parametrize(
    "sampling", [SAMPLINGS[1], *(pytest.param(one, marks=pytest.mark.exhaustive) for one in SAMPLINGS[::2])]
)
def test_it_saves_draft_passes_and_writes_the_same(sampling):
    """With drafts that are often wrong, but know what is right."""
    totals = {SpecExecPlanner: [0, 0, 0], Resting: [0, 0, 0]}
    for scale in (0.3, 0.6, 1.0):
        texts = list[list[int]]()
        for kind, total in totals.items():
            text, stats = write(kind(draft(perturbed(MODEL, scale, 1)), depth=8), sampling)
            texts.append(text)
            for i, count in enumerate((stats.draft_went_on, stats.draft_passes, stats.passes)):
                total[i] += count
        assert texts[0] == texts[1]
    (anew, anew_drafts, anew_passes), (went_on, drafts, passes) = totals.values()
    assert anew == 0 < went_on
    assert drafts < anew_drafts
    assert passes <= 1.05 * anew_passes


def test_little_room_in_the_drafts_cache():
    """Nodes and leaves that stay count: a search that fills the cache never asks for more than there is."""
    other, went_on = perturbed(MODEL, 0.6, 1), 0
    plain, _ = write(NonePlanner(), SAMPLINGS[1])
    for limits in ({"max_nodes": 14}, {"max_leaves": 3}, {"max_leaves": 4, "spare_leaves": 3}):
        text, stats = write(Resting(draft(other, **limits), depth=8, sequences=2), SAMPLINGS[1])
        assert text == plain
        went_on += stats.draft_went_on
    assert went_on > 0


def test_a_text_that_waits_leaves_its_leaves_to_others():
    """One is only prepared, and knows guesses; another writes alone, and needs all that the draft's cache has."""
    limits = {"max_leaves": 9, "spare_leaves": 8}
    guesser = draft(perturbed(MODEL, 0.6, 1), sessions=2, **limits)
    made = [Resting(guesser, depth=6, tau=3.0, sequences=1) for _ in range(2)]
    scheduler, found = Scheduler(draft(sessions=2), made, budget=40), list[int]()
    prepared = scheduler.submit(Request([1, 2, 3], SAMPLINGS[2], 60), lambda event: None, idle_limit=8)
    for _ in range(60):
        if not prepared.is_prefetched:
            scheduler.step()
    assert prepared.is_prefetched

    def tell(event):
        assert getattr(event, "error", None) is None
        found.extend(chunk.token_id for chunk in getattr(event, "chunks", ()))

    scheduler.submit(Request([1, 2, 4], SAMPLINGS[2], 60), tell)
    for _ in range(200):
        scheduler.step()
    scheduler.close()
    assert found == write(NonePlanner(), SAMPLINGS[2], prompt=(1, 2, 4))[0]
