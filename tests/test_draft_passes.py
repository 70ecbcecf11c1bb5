"""Texts that draft at once: they share the draft's passes, and guess what each guesses alone."""

import numpy as np
import pytest
from alone import served
from reference.backend import ReferenceBackend, perturbed, random_model

from edgespec.errors import ModelError
from edgespec.loop.draft_passes import run_one, run_shared
from edgespec.loop.pass_times import PassTimes
from edgespec.loop.planner import Context
from edgespec.loop.sampling import Noise, SamplingParams
from edgespec.loop.shapes import BatchInvariance, RowClass
from edgespec.planners.chain import ChainPlanner
from edgespec.planners.none import NonePlanner
from edgespec.planners.specexec import SpecExecPlanner
from edgespec.scheduler.requests import Request
from edgespec.scheduler.scheduler import Scheduler

SIZE = 48
MODEL = random_model(1, vocab_size=SIZE, sharpness=3.0)
DRAFT = perturbed(MODEL, 0.2, 1)
TEXTS = [[5], [7, 8, 9], [4, 4, 7, 1, 20, 3], list(range(3, 40))]


class Counting(ReferenceBackend):
    """Writes down the works of each pass."""

    def __init__(self, **options):
        super().__init__(DRAFT, context_length=200, **{"sessions": len(TEXTS)} | options)
        self.passes = []

    def forward(self, batch):
        self.passes.append([len(work.token_ids) for work in batch])
        return super().forward(batch)


def planned(kind=SpecExecPlanner, draft=None, **options):
    """Planners that have begun, and what each is asked."""
    draft = draft or Counting()
    made = [kind(draft, **{"depth": 5} | options) for _ in TEXTS]
    for planner, text in zip(made, TEXTS, strict=True):
        planner.begin(text)
        while reading := planner.unread(text):
            reading.read(reading.work())
    draft.passes.clear()
    sampling = SamplingParams(temperature=0.7, seed=3)
    contexts = [Context(text, len(text), sampling, Noise(3, SIZE), 30, 16, sequences=len(TEXTS)) for text in TEXTS]
    return draft, made, contexts


def same(proposal, expected):
    tree, other = proposal.tree, expected.tree
    return tree.token_ids.tolist() == other.token_ids.tolist() and tree.parents.tolist() == other.parents.tolist()


@pytest.mark.parametrize("kind", [SpecExecPlanner, ChainPlanner])
def test_trees_are_those_of_texts_alone_in_fewer_passes(kind):
    draft, made, contexts = planned(kind)
    trees = run_shared([planner.propose(context, 10) for planner, context in zip(made, contexts, strict=True)])
    shared = draft.passes.copy()
    draft, made, contexts = planned(kind)
    each = [run_one(planner.propose(context, 10)) for planner, context in zip(made, contexts, strict=True)]
    assert all(map(same, trees, each))
    assert all(len(tree.tree) > 5 for tree in trees)
    assert all(len(works) == 1 for works in draft.passes)
    assert sorted(rows for works in shared for rows in works) == sorted(rows for [rows] in draft.passes)
    assert len(shared) <= max(planner.stats.draft_passes for planner in made) < len(draft.passes)


def test_seconds_of_a_pass_are_divided_by_nodes_and_learned_whole():
    costs = [PassTimes() for _ in TEXTS]
    draft, made, contexts = planned()
    for planner, cost in zip(made, costs, strict=True):
        planner._drafter.pass_cost = cost
    run_shared([planner.propose(context, 10) for planner, context in zip(made, contexts, strict=True)])
    learned = sum(seconds for _, seconds in passes_of(costs))
    spent = sum(planner.stats.draft_seconds for planner in made)
    assert 0 < spent < learned
    assert {nodes for nodes, _ in passes_of(costs)} <= {sum(works) for works in draft.passes}


def passes_of(costs):
    return [one for cost in costs for sizes in cost._passes.values() for passes in sizes.values() for one in passes]


def test_no_more_share_a_pass_than_it_has_room_for():
    draft, made, contexts = planned(draft=Counting(max_nodes=7), beam=4)
    trees = run_shared([planner.propose(context, 10) for planner, context in zip(made, contexts, strict=True)])
    assert all(len(tree.tree) > 5 for tree in trees)
    assert max(len(works) for works in draft.passes) > 1
    assert max(sum(works) for works in draft.passes) <= 7


def test_where_shapes_matter_each_text_has_passes_of_its_own():
    draft = Counting()
    draft.keep_to(BatchInvariance("narrow", RowClass(1, 7), RowClass(1, 41)))
    draft, made, contexts = planned(draft=draft, beam=4)
    run_shared([planner.propose(context, 10) for planner, context in zip(made, contexts, strict=True)])
    assert all(len(works) == 1 for works in draft.passes)


def test_texts_with_drafts_of_their_own_share_nothing():
    drafts = [Counting(), Counting()]
    made = [SpecExecPlanner(draft, depth=4) for draft in drafts]
    for planner in made:
        planner.begin(TEXTS[1])
    context = Context(TEXTS[1], 3, SamplingParams(), Noise(0, SIZE), 30, 16)
    one, other = run_shared([planner.propose(context, 8) for planner in made])
    assert same(one, other)
    assert all(len(works) == 1 for draft in drafts for works in draft.passes)


def test_a_failing_pass_fails_those_it_was_for_and_nobody_else():
    draft, made, contexts = planned()

    def failing(batch):
        raise ModelError("no memory")

    draft.forward = failing
    other = ReferenceBackend(DRAFT, context_length=200)
    whole = SpecExecPlanner(other, depth=4)
    whole.begin(TEXTS[0])
    steps = [made[1].propose(contexts[1], 8), whole.propose(contexts[0], 8), made[2].propose(contexts[2], 8)]
    first, tree, last = run_shared(steps)
    assert isinstance(first, ModelError)
    assert isinstance(last, ModelError)
    assert len(tree.tree) > 4
    with pytest.raises(ModelError, match="no memory"):
        run_one(made[0].propose(contexts[0], 8))


class Broken(SpecExecPlanner):
    """Fails between two passes."""

    def propose(self, context, budget):
        yield from self._drafter.reading(context.token_ids)
        raise ModelError("this planner is broken")


def test_one_who_fails_between_passes_does_not_disturb_the_others():
    draft, made, contexts = planned(draft=Counting(sessions=len(TEXTS) + 1))
    broken = Broken(draft)
    broken.begin(TEXTS[3])
    found, tree = run_shared([broken.propose(contexts[3], 8), made[0].propose(contexts[0], 8)])
    assert str(found) == "this planner is broken"
    assert same(tree, run_one(planned()[1][0].propose(contexts[0], 8)))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_texts_of_a_scheduler_are_those_written_plainly(temperature):
    def written(make, sessions):
        target = ReferenceBackend(MODEL, context_length=200, sessions=sessions)
        target.vocab.eog_ids = frozenset()
        scheduler = Scheduler(target, [make() for _ in range(sessions)], budget=12)
        samplings = [SamplingParams(temperature, seed=i) for i in range(len(TEXTS))]
        return served(scheduler, [Request(*one, max_tokens=40) for one in zip(TEXTS, samplings, strict=True)])[0]

    draft = Counting()
    texts = written(lambda: SpecExecPlanner(draft, depth=5, beam=3), len(TEXTS))
    assert texts == written(NonePlanner, 1)
    assert np.mean([len(works) for works in draft.passes]) > 1.5
