"""What guesses in a round: by costs and gains that are given here, never by a clock."""

import json
import tracemalloc
from dataclasses import replace
from math import inf
from types import SimpleNamespace
from unittest import mock

import hypothesis
import numpy as np
import pytest
from alone import generation_of, written
from auto_planners import auto_planner
from hypothesis import strategies as st
from reference.backend import ReferenceBackend, perturbed, random_model

from edgespec.loop.backend import Capabilities
from edgespec.loop.draft_passes import run_one
from edgespec.loop.pass_times import FLAT, POWER, PassTimes, distinct
from edgespec.loop.passes import Ran
from edgespec.loop.sampling import SamplingParams
from edgespec.loop.stats import GenerationStats, PlainPasses
from edgespec.loop.step import step_of
from edgespec.loop.tree import Source, chain_of, make_tree
from edgespec.planners import auto
from edgespec.planners.auto import (
    BELIEF,
    FURTHER,
    PLAIN,
    PLAIN_STREAMED,
    AutoState,
    Pace,
    Share,
    new_auto_state,
)
from edgespec.planners.chain import ChainPlanner
from edgespec.planners.choice import make_planner
from edgespec.planners.drafting import agreed
from edgespec.planners.ledger import Ledger
from edgespec.planners.none import NonePlanner
from edgespec.planners.specexec import SpecExecPlanner
from edgespec.planners.sssd import SssdPlanner
from edgespec.scheduler.batch import BATCH, Batch, account, learn

MODEL = random_model(1, vocab_size=48, sharpness=3.0)
PROMPT = [1, 2, 3, 4, 1, 2, 3]


class GivenCost(PassTimes):
    """A known cost that no pass changes."""

    def __init__(self, constant, slope):
        super().__init__()
        for nodes in (1, 100):
            super().add(nodes, constant + slope * nodes)

    def add(self, nodes, seconds, length=0):
        pass


class GivenShare(Share):
    """One that nothing changes: what passes take here has nothing to do with the costs that are given."""

    def add(self, came, hoped):
        pass


class Free(Ledger):
    """Bounds nothing: what passes take here has nothing to do with the costs that are given."""

    def add(self, spent, way, seconds, tokens):
        pass

    def room(self, way):
        return 1e18

    def is_due(self, way, tokens):
        return False


def certain(token):
    """Logits of a prompt that only this token follows."""
    return np.where(np.arange(48) == token, 0, -np.inf).astype(np.float32)


def given(target, draft, **shares):
    """A pace with costs (constant, slope) of target and draft."""
    return AutoState(GivenCost(*target), GivenCost(*draft), ledgers={1: Free()}, **{"worth": GivenShare(1.0)} | shares)


def drafting(pace, model=MODEL, kind=SpecExecPlanner):
    return kind(ReferenceBackend(model), cost=pace.draft)


def begun(planner, prompt=PROMPT, budget=24, target=None, **options):
    """A text whose prompt was read by the target and the draft."""
    target = target or ReferenceBackend(MODEL)
    generation = generation_of(target, planner, prompt, max_tokens=60, budget=budget, **options)
    generation.read_prompt()
    generation.read_draft()
    return generation


def next_tree(generation, most=None, sequences=1):
    return generation.cut(run_one(generation.propose(most, sequences))).tree


def write(planner, sampling=None, prompt=PROMPT, max_tokens=40, **options):
    return written(ReferenceBackend(MODEL), planner, prompt, sampling, max_tokens=max_tokens, budget=24, **options)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("kind", [SpecExecPlanner, ChainPlanner])
def test_costs_decide_how_much_is_guessed_and_never_the_text(temperature, kind):
    sampling = SamplingParams(temperature=temperature, seed=5)
    plain, _ = write(NonePlanner(), sampling)
    found = []
    for target in [(1e9, 0.0), (0.0, 1e9)]:
        pace = given(target, (1e-6, 0.0))
        text, stats = write(auto_planner("auto", pace, draft=drafting(pace, kind=kind)), sampling)
        assert text == plain
        found.append((stats.passes, stats.drafted))
    assert found[0][0] == write(kind(ReferenceBackend(MODEL)), sampling)[1].passes  # with the whole budget
    assert found[0][1] > 24
    assert found[1] == (len(plain) - 1, 0)


@pytest.mark.parametrize(("cost", "least", "most"), [(1e-3, 2.0, 99.0), (1e3, 0.0, 0.0)])
def test_a_draft_is_asked_by_what_it_costs(cost, least, most):
    pace = given((1.0, 0.1), (cost, 0.0))
    _, stats = write(auto_planner("specexec", pace, draft=drafting(pace, perturbed(MODEL, 0.2, 1))))
    assert least <= stats.draft_passes / stats.passes <= most


def test_a_draft_that_is_never_right_is_soon_left_alone():
    other = random_model(9, vocab_size=48, sharpness=3.0)
    pace = given((1.0, 0.1), (0.2, 0.0))
    draft = drafting(pace, other)
    _, first = write(auto_planner("specexec", pace, draft=draft), max_tokens=100, stop_ids=frozenset())
    assert first.tokens == 100
    assert 0 < pace.agreement.hoped < 12
    assert first.drafted < 30
    _, second = write(auto_planner("specexec", pace, draft=drafting(pace, other)), max_tokens=100, stop_ids=frozenset())
    assert second.drafted < first.drafted  # what one text has shown, the next one need not find out


def test_copies_are_used_where_the_text_repeats_itself_and_the_draft_is_not_asked_for_them():
    pace = given((1.0, 0.2), (0.5, 0.0))
    planner = auto_planner("auto", pace, SssdPlanner(), drafting(pace))
    text = [5, 6, 7, 8, 9, 10, 11, 12] * 4
    tree = next_tree(begun(planner, text, last_row=certain(text[0])))
    assert len(tree) > 3
    assert set(tree.source[1:].tolist()) == {Source.INPUT}


def test_a_long_run_that_came_true_makes_other_copies_no_surer():
    pace = given((1.0, 1e-3), (0.01, 0.0))
    pace.agreement = Share(0.998, came=54, hoped=60)
    for came in (4, 60):
        pace.copies = Share(0.99, came=came, hoped=4)
        planner = auto_planner("auto", pace, SssdPlanner(), drafting(pace))
        assert Source.DRAFT in next_tree(begun(planner)).source


def test_copies_that_are_wrong_lose_trust():
    pace = given((1.0, 0.2), (1.0, 0.0))
    planner = auto_planner("sssd", pace, SssdPlanner())
    _, stats = write(planner, SamplingParams(temperature=3.0, seed=1), [5, 6, 7, 8] * 8, 60)
    assert pace.copies.value(1.0) < 0.8
    assert pace.copies.hoped > 0
    assert stats.drafted > 0


@pytest.mark.parametrize("experts", [None, (8, 2)])
@pytest.mark.parametrize(("streams", "plain"), [(False, PLAIN), (True, PLAIN_STREAMED)])
def test_the_first_passes_of_all_are_plain(streams, plain, experts):
    """Processors differ in what nodes cost while weights are streamed, by more than can be predicted."""
    pace, sizes = new_auto_state(streams, experts), []
    planner = auto_planner("auto", pace, SssdPlanner(), drafting(pace))
    generation = begun(planner, PROMPT * 4)
    for _ in range(plain + 1):
        tree = next_tree(generation)
        sizes.append(len(tree))
        planner.during(len(tree))
        planner.result(step_of([int(tree.token_ids[0])], 1.0, len(tree)), None)
    assert sizes[:-1] == [1] * plain
    assert sizes[-1] > 1


def test_trees_grow_by_degrees_until_large_passes_were_seen():
    pace, sizes = AutoState(PassTimes(FLAT), ledgers={1: Free()}), []
    for nodes in (1, FURTHER, 100):
        pace.target.add(nodes, 1.0)
        planner = auto_planner("auto", pace, SssdPlanner(), drafting(pace))
        sizes.append(len(next_tree(begun(planner, budget=60))))
    assert sizes == [FURTHER + 1, 61, 61]


@pytest.mark.parametrize("streams", [False, True])
def test_a_draft_that_pays_alone_is_left_alone_where_many_texts_share_the_pass(streams):
    """Eight roots cost what one does; eight drafts cost eight times what one does, and all texts wait for them.

    Unless they share the draft's passes, and these take no longer for that.
    """
    flat, steep = (0.3, 0.0), (0.0, 0.3)
    for texts, company, draft_cost, asked in (
        (1, 1, flat, True), (8, 1, flat, False), (8, 8, flat, True), (1, 1, steep, True), (8, 8, steep, False)
    ):  # fmt: skip
        pace, target = given((1.0, 1e-3), draft_cost), ReferenceBackend(MODEL)
        draft = drafting(pace, perturbed(MODEL, 0.2, 1))
        draft._drafter.mean_batch = company
        target.capabilities = replace(target.capabilities, streams=streams)
        generation = begun(auto_planner("auto", pace, draft=draft), target=target)
        assert (len(next_tree(generation, 24, texts)) > 1) == asked


PLAIN_STEP = step_of([1], 1.0)
DRAFTED_STEP = replace(step_of([1], 4.0, rows=2), tree=chain_of([1, 2]))


@pytest.mark.parametrize(
    ("passes", "told"),
    [
        ("dpdpdpdpd", True),
        ("dpppppd", True),
        ("dpdpdpd", False),
        ("dppppp", False),
        ("pppppd", False),
        ("ppppp", False),
    ],
)
def test_a_gain_is_told_where_four_plain_passes_lay_among_steps_with_draft_tokens(passes, told):
    """Before the first such step, and after the last, plain passes show another time of the machine."""
    stats = GenerationStats()
    stats.add([Source.TARGET])
    for kind in passes:
        stats.count(PLAIN_STEP if kind == "p" else DRAFTED_STEP, 0.0, 1.0)
    assert stats.plain_seconds == (2.0 * stats.gained if told else 0.0)
    stats.drop([Source.DRAFT, Source.TARGET])  # they followed a stop string
    assert stats.plain_seconds == pytest.approx(2.0 * stats.gained if told else 0.0)
    stats.count(replace(PLAIN_STEP, sequences=2), 0.0, 1.0)
    assert stats.plain_seconds == 0.0  # other sequences shared a pass


def test_a_step_of_a_long_text_compares_few_of_the_plain_passes_before_it():
    compared = 0

    class Seconds(float):
        def __lt__(self, other):
            nonlocal compared
            compared += 1
            return float(self) < float(other)

        def __add__(self, other):
            return Seconds(float(self) + other)

    passes, seconds = PlainPasses(), np.random.default_rng(1).uniform(size=1000)
    for one in seconds:
        passes.add(step_of([1], Seconds(one)), 0.0, after_drafts=True)
        passes.add(DRAFTED_STEP, 0.0, after_drafts=True)
    assert passes.median() == pytest.approx(np.median(seconds))
    assert compared < 12 * len(seconds)


def test_a_depth_without_limit_takes_no_memory():
    pace = given((1.0, 0.01), (0.01, 0.0))
    draft = SpecExecPlanner(ReferenceBackend(MODEL), depth=1 << 30, cost=pace.draft)
    tracemalloc.start()
    auto_planner("auto", pace, draft=draft).begin(PROMPT)
    assert tracemalloc.get_traced_memory()[1] < 1 << 24
    tracemalloc.stop()


def test_a_draft_that_agrees_less_than_believed_is_not_blamed_twice():
    """Its agreement falls; that drafted rounds keep what they promise is another question."""
    pace = given((1.0, 0.01), (0.01, 0.0), worth=Share(0.98))
    planner = auto_planner("auto", pace, draft=drafting(pace))
    tree = next_tree(begun(planner))
    assert len(tree) > 4
    other = next(token for token in range(48) if token not in tree.token_ids)
    planner.result(step_of([other], 1.0 + 0.01 * len(tree), len(tree)), None)
    assert (pace.agreement.came, pace.agreement.hoped) == (0, 1)
    assert 1 < pace.worth.hoped < 2.5  # as is foretold of so poor a draft; 3.4 were when it was asked


def test_agreement_is_learned_also_from_a_draft_that_was_not_worth_a_row():
    pace = given((1.0, 0.0), (1e-3, 0.0))
    planner = auto_planner("auto", pace, draft=drafting(pace))
    generation = begun(planner)
    with mock.patch.object(auto, "best_part", return_value=(np.zeros(0, np.intp), 0.0)):
        assert len(next_tree(generation)) == 1
    planner.result(step_of([3]), None)
    assert pace.agreement.hoped == 1


def test_a_batchs_drafting_is_charged_where_it_may_draft_also_where_no_draft_token_is_worth_a_row():
    pace, plain = new_auto_state(streams=False), SimpleNamespace(token_ids=[0], prompt=False)
    batch, spent = Batch([(None, SimpleNamespace(work=plain, plain=True))] * 2, began=1.0), 0
    for _ in range(100):
        may_draft, lost = pace.batch(2).room(BATCH) > 0, pace.batch(2).accounts[BATCH].lost
        spent += may_draft  # the scheduler drafts only then
        account(batch, Ran(1.5, 1.0), 2, pace)
        assert (pace.batch(2).accounts[BATCH].lost > lost) == may_draft
    assert 0 < spent < 10


@pytest.mark.parametrize(
    ("count", "tokens", "counted"),
    [
        (3, [7, 9, 5], (2, 2)),  # below node 3 nothing was asked
        (3, [8, 1], (0, 1)),
        (3, [4], (0, 1)),
        (3, [7, 1], (1, 2)),
        (2, [7, 1], (1, 1)),  # node 3 would not have been sent
        (0, [4], (0, 0)),
    ],
)
def test_agreement_is_counted_along_the_text(count, tokens, counted):
    #            0
    #       1 (7)   2 (8)
    #       3 (9)
    tree = make_tree([0, 7, 8, 9], [-1, 0, 0, 1], np.log([1.0, 0.6, 0.3, 0.5]))
    assert agreed(tree, np.arange(1, 1 + count), tokens) == counted


def test_a_share_begins_with_a_belief_and_forgets():
    share = Share(0.5)
    assert share.value(0.7) == pytest.approx(0.7)
    share.add(0, BELIEF)
    assert share.value(0.7) == pytest.approx(0.35)
    for _ in range(40):
        share.add(1, 1)
    assert share.came == pytest.approx(share.hoped)
    share.fade(inf)
    assert share.value(0.7) == pytest.approx(0.7)


def test_a_pace_is_remembered():
    pace, later = new_auto_state(streams=False), new_auto_state(streams=False)
    pace.target.add(1, 1.0)
    pace.draft.add(1, 0.1)
    for count, share in enumerate((pace.copies, pace.agreement, pace.worth, pace.power)):
        share.add(3, 5 + count)
    known = json.loads(json.dumps(pace.as_dict()))
    later.recall(Pace.model_validate(known))
    assert later.as_dict() == known
    del known["power"]
    later.recall(Pace.model_validate(known))  # of a version that did not learn it
    assert later.power.hoped == 0


@pytest.mark.parametrize(("power", "least"), [(0.4, 0.4), (0.7, 0.7), (1.3, 1.0)])
def test_what_nodes_of_a_mixture_cost_is_learned_from_the_experts_that_passes_choose(power, least):
    """And remembered; passes that chose nearly all, plain ones and those of prompts do not show it."""
    pace, limits, learned = new_auto_state(False, (128, 6)), Capabilities(64, 64, 64, 64, 0.0), []
    pace.target.add(1, 1.0)

    def make(nodes, experts, prompt=False):
        work = SimpleNamespace(token_ids=[0] * nodes, prompt=prompt)
        learn(Batch([(None, SimpleNamespace(work=work))]), Ran(1.0, 1.0, experts=experts), limits, pace, mock.Mock())
        learned.append(pace.target.experts)

    make(25, 128.0)
    make(1, 6.0)
    make(25, 40.0, prompt=True)
    make(25, 0.0)
    before = float(pace.times(0).seconds(25))
    assert learned == [(128, 6)] * 4
    for _ in range(200):
        make(8, float(distinct(8, 128, 6, power)))
    assert learned[-1] == pytest.approx((128, 6, least), abs=0.03)
    assert (float(pace.times(0).seconds(25)) < before) == (power < POWER)
    later = new_auto_state(False, (128, 6))
    later.recall(Pace.model_validate(json.loads(json.dumps(pace.as_dict()))))
    assert later.target.experts == pytest.approx(learned[-1])


@pytest.mark.parametrize(
    ("name", "streams", "waits"), [("auto", False, True), ("auto", True, False), ("chain", False, False)]
)
def test_who_asks_for_a_draft_gets_it_and_so_does_who_waits_for_a_disk(name, streams, waits):
    target, pace = ReferenceBackend(MODEL), new_auto_state(streams)
    target.capabilities = replace(target.capabilities, streams=streams)
    planner = make_planner(name, [target, ReferenceBackend(MODEL)], state=pace)
    pace.ledger()._usual = 1.0
    planner.begin([3, 1, 2])
    assert (planner.unread([3, 1, 2]) is None) == waits


COSTS = st.tuples(st.floats(1e-6, 1e3), st.floats(0, 1e3))


@hypothesis.given(
    st.sampled_from(["auto", "specexec", "chain", "sssd"]),
    st.sampled_from([0.0, 0.7, 1.0]),
    st.integers(0, 2**32),
    st.one_of(st.none(), st.tuples(COSTS, COSTS)),
)
def test_any_cost_writes_the_plain_text(name, temperature, seed, costs):
    sampling = SamplingParams(temperature=temperature, seed=seed)
    pace = given(*costs) if costs else new_auto_state(bool(seed % 2), tiled=seed % 3 == 0)  # … or what passes take now
    copies = SssdPlanner() if name in ("auto", "sssd") else None
    kind = ChainPlanner if name == "chain" else SpecExecPlanner
    draft = drafting(pace, perturbed(MODEL, 0.2, 1), kind) if name != "sssd" else None
    assert write(auto_planner(name, pace, copies, draft), sampling)[0] == write(NonePlanner(), sampling)[0]
