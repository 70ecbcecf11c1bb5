"""Lookahead decoding: the window of its trees, the target's samples there, and what is copied from them."""

from dataclasses import replace
from itertools import pairwise
from math import log

import numpy as np
import pytest
from alone import Generation
from reference.backend import ReferenceBackend, random_model
from test_lossless_reference import write

from edgespec.lab import lookahead
from edgespec.lab.lookahead import COLUMN, COLUMNS, MOST_SAMPLES, SHARE, WORTH, LookaheadPlanner
from edgespec.loop.draft_passes import run_one
from edgespec.loop.pass_times import Curve
from edgespec.loop.passes import prefill
from edgespec.loop.planner import Context
from edgespec.loop.sampling import Noise, SamplingParams, sample
from edgespec.loop.stats import GenerationStats
from edgespec.loop.step import step_of
from edgespec.loop.tree import DraftTree, Source, make_tree, path_to
from edgespec.planners import auto
from edgespec.planners.auto import new_auto_state
from edgespec.planners.ledger import Ledger
from edgespec.planners.none import NonePlanner

MODEL = random_model(1, vocab_size=48, sharpness=3.0)
BUDGET = SHARE * COLUMN * 3  # three columns
PROMPT = [0, 4, 8, 15, 16, 23]
SAMPLINGS = [SamplingParams(), SamplingParams(temperature=0.9, seed=3, top_p=0.9, frequency_penalty=3.0)]


def window_only() -> LookaheadPlanner:
    """Trees without copies."""
    return LookaheadPlanner(min_probability=0.999)


def steps(planner, sampling, budget, *, count=24, model=MODEL, leaves=64):
    """Of one text: tokens before each pass, the tree that was verified, and its committed nodes."""
    target = ReferenceBackend(model, max_leaves=leaves)
    generation = Generation(
        target, target.open(), planner, PROMPT, sampling,
        max_tokens=count, budget=budget, stats=GenerationStats(), stop_ids=frozenset(),
    )  # fmt: skip
    found, text = [], list(PROMPT)
    for step in generation.steps():
        found.append((text.copy(), step.tree, step.path))
        text += step.tokens
    return found


def paths(tree: DraftTree) -> list[list[int]]:
    """Tokens from the root's child to each leaf."""
    inner, tokens = set(tree.parents.tolist()), tree.token_ids
    return [tokens[path_to(tree.parents, leaf)[1:]].tolist() for leaf in range(len(tree)) if leaf not in inner]


@pytest.mark.exhaustive
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["T=0", "T=0.9"])
def test_the_window_is_a_chain_with_a_column_below_each_of_its_tokens(sampling):
    trees = [tree for _, tree, _ in steps(window_only(), sampling, BUDGET)[COLUMN:-6]]
    for tree in trees:
        assert 0 < len(tree) - 1 <= 3 * COLUMN
        assert tree.depth.max() <= 3 + COLUMN - 1
        assert set(tree.source[1:].tolist()) == {Source.DRAFT}
        assert tree.log_probs[1:] == pytest.approx(log(WORTH))
    assert any(len(tree) - 1 == 3 * COLUMN and len(paths(tree)) == 3 for tree in trees)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["T=0", "T=0.9"])
def test_a_column_goes_on_with_the_targets_sample_at_its_position(sampling):
    """With penalties, top-p and the position's noise: what the target would generate if the column was its output."""
    reader = ReferenceBackend(MODEL)
    session, noise = reader.open(), Noise(sampling.seed, 48)
    found, compared = steps(window_only(), sampling, SHARE * COLUMN)[1:-4], 0  # the prompt's step has no window
    for (text, tree, path), (_, following, _) in pairwise(found):
        if len(path) == 1:
            [column] = paths(tree)
            logits, node = prefill(reader, session, [*text, *column], want_last=True)
            output = [*text[len(PROMPT) :], *column]
            token = sample(logits.row(node), len(text) + len(column), sampling, noise, PROMPT, output)
            assert paths(following) == [[*column, token][-COLUMN:]]
            compared += 1
    assert compared > 8


@pytest.mark.exhaustive
def test_the_window_moves_as_far_as_the_output():
    """Each first token was at the same position in the tree before, also where draft tokens were accepted."""
    model, accepted = random_model(4, vocab_size=48, layers=1, sharpness=6.0), 0
    for seed in range(4):
        found = steps(window_only(), SamplingParams(0.9, seed=seed), BUDGET, count=40, model=model)[COLUMN:-6]
        for (_, tree, path), (_, following, _) in pairwise(found):
            if len(path) <= 3:  # else all columns are new
                above = set(tree.token_ids[tree.depth == len(path) + 1].tolist())
                assert set(following.token_ids[following.depth == 1].tolist()) <= above
                accepted += len(path) - 1
    assert accepted > 0


def copied(temperature, recurrent):
    """Accepted tokens of the window and of the pool; the text follows from its last few tokens."""
    model = random_model(4, vocab_size=48, layers=1, sharpness=6.0, recurrent=recurrent)
    target, accepted = ReferenceBackend(model, max_leaves=8), 0
    for seed in range(6):
        sampling, options = SamplingParams(temperature, seed=seed), {"max_tokens": 40, "stop_ids": frozenset[int]()}
        plain, _ = write(target, NonePlanner(), [seed], sampling, **options)
        output, stats = write(target, LookaheadPlanner(), [seed], sampling, **options | {"budget": BUDGET})
        assert output == plain
        accepted += stats.tokens_by_source["draft"]
    return accepted


@pytest.mark.exhaustive
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("recurrent", [False, True])
def test_samples_further_on_are_copied_in_later_steps(temperature, recurrent, monkeypatch):
    """Also those of rejected draft tokens, which are all that recurrent layers give."""
    accepted = copied(temperature, recurrent)
    monkeypatch.setattr(lookahead, "POOL", 0)  # only the last step's
    assert accepted > copied(temperature, recurrent) > 0


@pytest.mark.exhaustive
def test_models_with_recurrent_layers_get_no_window():
    model = random_model(1, vocab_size=48, layers=3, recurrent=True)
    assert {len(tree) for _, tree, _ in steps(window_only(), SAMPLINGS[0], BUDGET, model=model, leaves=8)} == {1}


@pytest.mark.exhaustive
def test_a_window_that_was_cut_goes_on_where_it_can():
    """With one leaf only the first row is left."""
    found = steps(window_only(), SAMPLINGS[1], BUDGET, leaves=1)
    assert {len(paths(tree)) for _, tree, _ in found} == {1}
    assert max(len(tree) for _, tree, _ in found) > 2


def proposed(slope: float):
    """The nodes that `auto` sends where a node costs so many plain passes."""
    planner = auto.Candidate(window_only(), new_auto_state(streams=True))
    planner.begin(PROMPT)
    times = Curve(np.ones(1), np.ones(1), slope)
    context = Context(PROMPT, len(PROMPT), SAMPLINGS[0], Noise(0, 48), 40, 64, pass_times=times)
    return run_one(planner.propose(context, BUDGET)).proposal.nodes


@pytest.mark.exhaustive
def test_the_window_is_sent_where_nodes_cost_little():
    assert len(proposed(WORTH / 10)) > 0
    assert len(proposed(2 * WORTH)) == 0


@pytest.mark.exhaustive
def test_a_new_text_begins_with_an_empty_pool():
    planner = LookaheadPlanner()
    first, again = (steps(planner, SAMPLINGS[1], BUDGET) for _ in range(2))
    assert [tree.token_ids.tolist() for _, tree, _ in first] == [tree.token_ids.tolist() for _, tree, _ in again]


@pytest.mark.exhaustive
def test_few_nodes_are_sampled_in_a_step_and_the_ends_of_columns_first(monkeypatch):
    """Those of a position follow one another, since they share its noise."""
    positions = []

    def counted(row, position, *more):
        positions.append(position)
        return sample(row, position, *more)

    monkeypatch.setattr(lookahead, "sample", counted)
    planner, sampled = LookaheadPlanner(), []
    saw = planner._sample

    def seen(start, tree, path, logits):
        ends = planner._paths()[len(path) - 1 :]
        positions.clear()
        saw(start, tree, path, logits)
        sampled.append((len(tree) - len(path), positions.copy()))
        sent = [
            tree.token_ids[path_to(tree.parents, node)[1:]].tolist() for node in range(len(tree)) if node not in path
        ]
        assert {start + 1 + len(end) for end in ends if end in sent} <= set(positions)

    planner._sample = seen
    steps(planner, SAMPLINGS[1], SHARE * COLUMN * COLUMNS)
    assert max(nodes for nodes, _ in sampled) > 2 * MOST_SAMPLES
    for nodes, found in sampled:
        assert len(found) <= min(nodes, MOST_SAMPLES)
        assert found == sorted(found)


@pytest.mark.exhaustive
def test_a_step_that_it_was_not_asked_for_takes_no_samples(monkeypatch):
    planner = LookaheadPlanner()
    steps(planner, SAMPLINGS[0], BUDGET)
    known = [column.copy() for column in planner._columns]
    monkeypatch.setattr(lookahead, "sample", lambda *_: pytest.fail("a sample"))
    tree = make_tree([0, 1, 2], [-1, 0, 0], np.zeros(3))
    planner.result(replace(step_of([5]), tree=tree, start=9), object())
    assert planner._columns == known[1:]  # the output has moved by a token


@pytest.mark.exhaustive
def test_what_is_learned_from_logits_is_charged_to_who_was_asked(monkeypatch):
    clock, spent = [0.0], []
    monkeypatch.setattr(auto, "perf_counter", lambda: clock[0])

    class Slow(NonePlanner):
        name = "slow"

        def most_depth(self, context):
            return 1

        def result(self, step, logits):
            clock[0] += 3.0

    pace = new_auto_state(streams=True)
    monkeypatch.setattr(Ledger, "add", lambda ledger, looked, *_: spent.append(dict(looked)))
    monkeypatch.setattr(Ledger, "room", lambda ledger, way: 9.0)
    steps(auto.AutoPlanner("auto", pace, [auto.Candidate(Slow(), pace)]), SAMPLINGS[0], BUDGET, count=4)
    assert spent == [{"slow": 3.0}] * 3
