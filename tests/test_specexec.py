"""The search of specexec: which nodes the draft reads, and what of its reading is kept."""

import numpy as np
import pytest
from alone import before_passes, written
from reference.backend import ReferenceBackend, random_model

from edgespec.errors import ContextFull
from edgespec.loop.draft_passes import run_one
from edgespec.loop.passes import fitting
from edgespec.loop.planner import Context
from edgespec.loop.sampling import Noise, SamplingParams
from edgespec.loop.step import step_of
from edgespec.loop.tree import only
from edgespec.planners.search import NOT_READ
from edgespec.planners.specexec import SpecExecPlanner

SIZE = 48


def planned(sharpness, budget, prompt, tau=1.0, max_leaves=64):
    """A planner that has planned once, its tree, and how many nodes each pass of its draft has read."""
    draft = ReferenceBackend(random_model(0, vocab_size=SIZE, sharpness=sharpness), context_length=64)
    planner = SpecExecPlanner(draft, tau=tau)
    planner.begin(prompt)
    prompt_reading = planner.unread(prompt)
    prompt_reading.read(prompt_reading.work())
    read = before_passes(draft, lambda batch: sum(len(work.token_ids) for work in batch))
    context = Context(prompt, len(prompt), SamplingParams(), Noise(0, SIZE), 32, max_leaves)
    proposal = run_one(planner.propose(context, budget))
    return planner, only(proposal.tree, fitting(proposal, budget, max_leaves)), read


@pytest.mark.parametrize("sharpness", [1.0, 3.0, 6.0])
def test_a_read_node_is_one_whose_children_may_come_into_the_tree(sharpness):
    _, tree, read = planned(sharpness, 16, [1, 2, 3])
    inner = len(set(tree.parents[1:].tolist()))  # each must have been read
    assert len(tree) == 17
    assert inner <= sum(read) <= 3 * inner


def test_a_sure_draft_reads_one_chain():
    _, tree, read = planned(6.0, 12, [1, 2, 3], tau=0.01)
    assert tree.depth.max() == 12
    assert sum(read) == 12  # the last guess is not read: nothing was to be guessed after it


def test_what_the_draft_has_read_beside_the_tree_is_kept_when_the_target_writes_it():
    planner, tree, _ = planned(3.0, 8, [1, 2, 3], tau=1.0, max_leaves=1)
    found, places = planner._search, planner._search.place
    assert tree.parents.tolist() == list(range(-1, len(tree) - 1))  # one leaf: a chain
    beside = [node for node in np.flatnonzero(places != NOT_READ)[1:] if found.parents[node] == 0][-1]
    token = int(found.token_ids[beside])
    assert token != tree.token_ids[1]
    planner.result(step_of([token, SIZE - 1]), None)
    assert planner.draft_session.token_ids == [1, 2, 3, token]


def test_a_tree_ends_where_the_draft_has_no_cells_for_more():
    planner, tree, _ = planned(1.0, 16, [1, 2, 3])
    planner.give_up()
    forward, passes = planner._drafter.draft.forward, []

    def full(batch):
        passes.append(batch)
        if len(passes) > 1:
            raise ContextFull("the cache is full")
        return forward(batch)

    planner._drafter.draft.forward = full
    context = Context([1, 2, 3], 3, SamplingParams(), Noise(0, SIZE), 32, 64)
    shorter = run_one(planner.propose(context, 16)).tree
    assert len(passes) == 2
    assert 0 < shorter.depth.max() < tree.depth.max()
    planner.result(step_of([int(shorter.token_ids[1]), SIZE - 1]), None)
    assert planner.draft_session.token_ids == [1, 2, 3]  # the child was not read


def test_the_next_search_reads_less_since_it_knows_what_the_tree_will_take():
    planner, first, read = planned(3.0, 16, [1, 2, 3])
    planner.result(step_of([SIZE - 1]), None)
    before, text = sum(read), [1, 2, 3, SIZE - 1]
    run_one(planner.propose(Context(text, 3, SamplingParams(), Noise(0, SIZE), 32, 64), 16))
    assert len(first) == 17
    assert sum(read) - before < before


@pytest.mark.parametrize(("max_tokens", "reads"), [(1, False), (2, False), (3, True)])
def test_the_draft_reads_no_prompt_whose_answer_has_no_room_for_draft_tokens(max_tokens, reads):
    model = random_model(0, vocab_size=SIZE)
    target, draft = (ReferenceBackend(model, context_length=64) for _ in range(2))
    text, _ = written(
        target, SpecExecPlanner(draft), list(range(2, 20)), max_tokens=max_tokens, budget=8, stop_ids=frozenset()
    )
    assert len(text) == max_tokens
    assert bool(draft.opened[0].token_ids) == reads
