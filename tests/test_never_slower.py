"""The default planner is never much slower than plain decoding, however passes take, and whatever was remembered."""

from functools import cache
from itertools import product
from statistics import fmean

import pytest
from simulated import COSTS, Run

from edgespec.planners import auto
from edgespec.planners.ledger import Ledger

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
CASES = [
    pytest.param(*case, id="-".join(map(str, case)))
    for case in product(COSTS, AGREEMENTS, REMEMBERED, WAYS, LOADS, [False, True], [0.0, 0.3])
]  # fmt: skip


@pytest.fixture(autouse=True)
def no_clock(monkeypatch):
    """Planning takes no time here, whatever else this machine does."""
    monkeypatch.setattr(auto, "perf_counter", lambda: 0.0)


def run(cost, agreement, remembered, ways, load, slow, noise, seed):
    right, claimed = AGREEMENTS[agreement]
    factor = LOADS[load]
    return Run(
        COSTS[cost], right, tuple(ways.split("+")), claimed, noise,
        load=lambda tokens: factor if 100 <= tokens % 400 < 200 else 1.0,
        slow=slow, remembered=REMEMBERED[remembered], seed=seed,
    )  # fmt: skip


def speed(steps, tokens):
    """Ratio to plain decoding up to the step that reaches `tokens`."""
    _, spent, plain = next(step for step in steps if step[0] >= tokens)
    return plain / spent


@pytest.mark.covering(2)
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


@pytest.mark.covering(2)
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
