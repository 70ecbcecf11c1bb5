"""The default planner is never much slower than plain decoding, however passes take, and whatever was remembered."""

from functools import cache
from itertools import product
from math import log
from statistics import fmean

import numpy as np
import pytest
from alone import served, written
from auto_planners import auto_planner
from reference.backend import ReferenceBackend, random_model
from simulated import COSTS, Clock, Run, Timed, tiles

from edgespec.loop.sampling import SamplingParams
from edgespec.loop.tree import Proposal, make_tree
from edgespec.planners import auto
from edgespec.planners.auto import new_auto_state
from edgespec.planners.choice import make_planner
from edgespec.planners.ledger import Ledger
from edgespec.planners.none import NonePlanner
from edgespec.planners.specexec import SpecExecPlanner
from edgespec.scheduler.requests import Request
from edgespec.scheduler.scheduler import Scheduler

LOADS = {"idle": 1.0, "x2": 2.0, "x10": 10.0, "x50": 50.0}  # of another program, which comes for 100 of 400 tokens
AGREEMENTS = {
    "never": (lambda tokens: 0.0, 0.6),
    "half": (lambda tokens: 0.5, 0.6),
    "always": (lambda tokens: 0.97, 0.9),
    "changing": (lambda tokens: 0.97 if tokens // 128 % 2 else 0.0, 0.75),
}
REMEMBERED = {
    "nothing": None,
    "right": (1, 1),
    "plain x 3": (3, 1),
    "plain / 3": (1 / 3, 1),
    "more x 3": (1, 3),
    "more / 3": (1, 1 / 3),
}
WAYS = ["copies", "draft", "copies+draft"]
LEAST = {32: 0.9, 128: 0.95, 512: 0.97}  # tokens -> ratio to plain decoding
SEEDS = 3
NEVER = 1  # a token that the target does not write
CASES = [
    pytest.param(*case, id="-".join(map(str, case)))
    for case in product([*COSTS, "tiles"], AGREEMENTS, REMEMBERED, WAYS, LOADS, [False, True], [0.0, 0.3])
]  # fmt: skip


@pytest.fixture(autouse=True)
def no_clock(monkeypatch):
    """Planning takes no time here, whatever else this machine does."""
    monkeypatch.setattr(auto, "perf_counter", lambda: 0.0)


def run(cost, agreement, remembered, ways, load, slow, noise, seed):
    right, claimed = AGREEMENTS[agreement]
    factor = LOADS[load]
    return Run(
        COSTS.get(cost, tiles), right, tuple(ways.split("+")), claimed, noise,
        load=lambda tokens: factor if 100 <= tokens % 400 < 200 else 1.0,
        slow=slow, remembered=REMEMBERED[remembered], seed=seed, tiled=cost == "tiles",
    )  # fmt: skip


def speed(steps, tokens):
    """Ratio to plain decoding up to the step that reaches `tokens`."""
    _, spent, plain = next(step for step in steps if step[0] >= tokens)
    return plain / spent


@pytest.mark.covering(1)
@pytest.mark.parametrize(("cost", "agreement", "remembered", "ways", "load", "slow", "noise"), CASES)
def test_the_default_is_hardly_slower_than_plain_decoding(cost, agreement, remembered, ways, load, slow, noise):
    found = [run(cost, agreement, remembered, ways, load, slow, noise, seed).sequence(512) for seed in range(SEEDS)]
    ratios = {tokens: fmean(speed(steps, tokens) for steps in found) for tokens in (32, 128, 512)}
    assert {tokens: ratio for tokens, ratio in ratios.items() if ratio < LEAST[tokens]} == {}


class Free(Ledger):
    """Bounds nothing."""

    def room(self, way):
        return 1e9

    def is_due(self, way, tokens):
        return False


@cache
def best(cost, agreement, ways):
    """Speed of the best fixed way, of which all is known."""
    found = [1.0]
    for way in ways.split("+"):
        fixed = run(cost, agreement, "right", way, "idle", False, 0.0, 0)
        fixed.state.ledgers[1] = Free()
        fixed.sequence(512)
        found.append(speed(fixed.sequence(512), 512))
    return max(found)


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    ("cost", "agreement", "remembered", "ways"),
    list(product(COSTS, ["never", "half", "always"], REMEMBERED, WAYS)),
)
def test_a_way_that_pays_is_found(cost, agreement, remembered, ways):
    learning = run(cost, agreement, remembered, ways, "idle", False, 0.0, 0)
    learning.sequence(512)
    assert speed(learning.sequence(512), 512) >= 0.9 * best(cost, agreement, ways)


def test_a_slow_start_does_not_make_larger_passes_seem_free():
    found = [run("steep", "always", "nothing", "copies", "idle", True, 0.0, seed).sequence(64) for seed in range(SEEDS)]
    assert min(speed(steps, 32) for steps in found) >= LEAST[32]


def test_a_draft_that_waited_is_tried_again_in_the_same_sequence():
    learning = run("flat", "half", "right", "draft", "idle", False, 0.0, 0)
    least = 0.9 * best("flat", "half", "draft")
    assert min(speed(learning.sequence(512), 512) for _ in range(3)) >= least


@pytest.mark.covering(2)
@pytest.mark.parametrize(
    ("cost", "drafting", "agreement", "tokens", "remembered"),
    list(product(["steep", "rising"], [0.25, 0.4], [0.55, 0.65, 0.75], [12, 32, 96], [None, (1, 1)])),
)
def test_trials_of_a_draft_in_memory_cost_little(cost, drafting, agreement, tokens, remembered):
    learning = Run(
        COSTS[cost], lambda tokens: agreement, ("draft",), agreement, 0.05, remembered=remembered, drafting=drafting
    )
    steps = [learning.sequence(tokens)[-1] for _ in range(384 // tokens)]
    assert sum(plain for *_, plain in steps) >= 0.97 * sum(spent for _, spent, _ in steps)


@pytest.mark.parametrize("agreement", [0.7, 0.85])
def test_all_seconds_of_a_recurrent_model_are_in_the_ledger(agreement):
    """Also those in which it reads again the tokens of a tree that was not accepted to its end."""
    learning = Run(
        lambda nodes: 1 + 0.15 * (nodes - 1), lambda tokens: agreement, ("copies",), agreement,
        recurrent=True, remembered=(1, 1),
    )  # fmt: skip
    _, spent, plain = learning.sequence(200)[-1]
    ledger = learning.state.ledger()
    assert (ledger.seconds, ledger.plain) == (pytest.approx(spent), pytest.approx(1))
    assert plain >= 0.98 * spent


@pytest.mark.parametrize(
    ("agreement", "drafting", "tokens", "least"),
    [
        (0.02, 0.03, 32, 0.98),  # a trial that finds nothing ends, also where the draft is quick
        (0.02, 0.3, 12, 0.97),  # a draft whose trials failed does not read every prompt
        (0.3, 0.3, 12, 0.97),
    ],
)
def test_trials_of_a_poor_draft_cost_little(agreement, drafting, tokens, least):
    learning = Run(
        COSTS["flat"], lambda tokens: agreement, ("draft",), agreement, 0.05, remembered=(1, 1), drafting=drafting
    )
    steps = [learning.sequence(tokens)[-1] for _ in range(384 // tokens)]
    assert sum(plain for *_, plain in steps) >= least * sum(spent for _, spent, _ in steps)


@pytest.mark.parametrize("count", [2, 3, 4])
def test_requests_at_once_wait_little_for_a_draft_that_is_unsure(count, monkeypatch):
    clock, model = Clock(monkeypatch), random_model(1, vocab_size=48, sharpness=3.0)
    model.unembedding[1] = 0  # texts seldom end early
    unsure, limits = random_model(7, vocab_size=48, sharpness=0.05), {"context_length": 400, "sessions": count}

    def seconds(planned):
        state, clock.now = new_auto_state(streams=False), 0.0
        target = Timed(model, clock, lambda nodes: 0.04 + 0.001 * nodes, max_nodes=41, max_leaves=64, **limits)
        draft = Timed(unsure, clock, lambda nodes: 0.008 + 0.004 * nodes, **limits)
        for nodes in (1, 1, 1, 3, 12, 24):
            state.target.add(nodes, 0.04 + 0.001 * nodes, 50)
            state.draft.add(nodes, 0.008 + 0.004 * nodes, 50)
        made = [SpecExecPlanner(draft, cost=state.draft) if planned else NonePlanner() for _ in range(count)]
        planners = [auto_planner("auto", state, draft=one) if planned else one for one in made]
        requests = [Request([5 + i, 9], SamplingParams(), 150) for i in range(count)]
        served(Scheduler(target, planners, budget=16, pace=state if planned else None), requests)
        return clock.now

    assert seconds(planned=True) <= 1.03 * seconds(planned=False)


def test_what_batches_of_recurrent_models_read_again_is_no_plain_decoding(monkeypatch):
    clock, count, state, add = Clock(monkeypatch), 2, new_auto_state(streams=False), Ledger.add
    model, entered = random_model(1, vocab_size=48, layers=3, recurrent=True), list[tuple[str | None, float]]()

    def noting(self, spent, way, seconds, tokens):
        entered.append((way, round(seconds, 3)))
        add(self, spent, way, seconds, tokens)

    class Guess(NonePlanner):
        """One token, which is right three times of ten."""

        def propose(self, context, budget):
            yield from ()
            at, nodes = len(context.token_ids), min(budget, context.max_depth, 1)
            right = at % 10 < 3 and at < len(text)
            tokens = [context.token_ids[-1], text[at] if right else NEVER][: 1 + nodes]
            return Proposal(make_tree(tokens, range(-1, nodes), [0.0, -0.1][: 1 + nodes]))

    class Reading(Timed):
        def forward(self, works):
            self.clock.now += 0.225 * sum(work.session.unread_committed for work in works)
            return super().forward(works)

    def write(planners, pace):
        clock.now = 0.0
        target = Reading(
            model, clock, lambda nodes: 0.55 + 0.225 * nodes, context_length=300, sessions=count, max_leaves=8
        )
        target.vocab.eog_ids = frozenset()
        scheduler = Scheduler(target, planners, budget=4, pace=pace)
        return [5, 9, *served(scheduler, [Request([5, 9], SamplingParams(), 150)] * count)[0][0]], clock.now

    text, plain = write([NonePlanner() for _ in range(count)], None)
    for nodes in (1, 2, 8):  # as if rows were cheap
        state.target.add(nodes, 0.7 + 0.03 * nodes)
    monkeypatch.setattr(Ledger, "add", noting)
    same, seconds = write([auto_planner("auto", state, Guess()) for _ in range(count)], state)
    assert same == text
    assert {seconds for way, seconds in entered if way is None} <= {1.0, 0.775}  # two sequences, or the last one
    assert ("batch", 1.9) in entered
    assert plain >= 0.96 * seconds


def test_what_planners_learn_from_shared_passes_is_charged(monkeypatch):
    clock, model, state = Clock(monkeypatch), random_model(1, vocab_size=48, sharpness=3.0), new_auto_state(False)

    class Seeing(NonePlanner):
        def result(self, step, logits):
            clock.now += 0.5

    target = Timed(model, clock, lambda nodes: 1.0, context_length=100, sessions=2)
    target.vocab.eog_ids = frozenset()
    planners = [auto_planner("auto", state, Seeing()) for _ in range(2)]
    requests = [Request(prompt, SamplingParams(), 40) for prompt in ([5, 9], [6, 9])]
    served(Scheduler(target, planners, budget=8, pace=state), requests)
    assert state.ledger(2).accounts["batch"].lost > 0
    assert state.learning_seconds == 0


class Forcing:
    """A grammar that forces `text`, of which the target writes none if it is wrong."""

    def __init__(self, text):
        self.text = text

    def masked(self, logits):
        return logits

    def accept(self, token):
        pass

    def prune_and_force(self, tree, token_ids, most):
        forced = self.text[len(token_ids) :][:most]
        values = np.cumsum([0.0, *[log(0.98)] * len(forced)])
        return make_tree([token_ids[-1], *forced], range(-1, len(forced)), values, [0] * len(values))


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", ["sssd", "none"])
@pytest.mark.parametrize(("cost", "least"), [("steep", 0.97), ("rising", 1.5), ("step", 1.5), ("flat", 5)])
def test_what_a_grammar_forces_costs_little_in_vain_and_gains_where_rows_are_cheap(cost, least, name, monkeypatch):
    clock, model = Clock(monkeypatch), random_model(1, vocab_size=48, sharpness=3.0)
    model.unembedding[NEVER] = 0

    def write(planner, grammar):
        target = Timed(model, clock, COSTS[cost], context_length=200)
        target.vocab.eog_ids = frozenset()
        clock.now = 0.0
        return [5, 9, *written(target, planner, [5, 9], max_tokens=150, grammar=grammar)[0]], clock.now

    text, plain = write(NonePlanner(), None)
    for forced, ratio in [([NEVER] * len(text), 0.97), (text, least)]:
        planner = make_planner(name, [ReferenceBackend(model)], state=new_auto_state(streams=cost == "flat"))
        times = list[float]()
        for _ in range(2):
            found, seconds = write(planner, Forcing(forced))
            times.append(plain / seconds)
            assert found == text
        assert times[0] >= 0.97
        assert times[1] >= ratio
