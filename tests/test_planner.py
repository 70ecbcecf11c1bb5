"""A method is one file: a planner made here joins the table, and generates what plain decoding generates."""

import numpy as np
import pytest
from alone import served
from reference.backend import ReferenceBackend, random_model
from simulated import Clock, Timed

from edgespec.loop.planner import Planner
from edgespec.loop.sampling import SamplingParams
from edgespec.loop.tree import Proposal, Source, make_tree
from edgespec.model import Model
from edgespec.planners.auto import AutoPlanner, new_auto_state
from edgespec.planners.choice import PLANNERS, Method, check_planner, make_planner
from edgespec.scheduler.requests import Request
from edgespec.scheduler.scheduler import Scheduler

MODEL = random_model(1, vocab_size=48, sharpness=3.0)
LIMITS = {"context_length": 200, "max_nodes": 40, "max_leaves": 6}
PROMPTS = [[5], [7, 8, 9], [4, 4, 7, 1, 20, 3]]


class Bigrams(Planner):
    """Proposes what the target found most probable after a token, the last time: two children of each node."""

    name = "bigrams"

    def __init__(self, depth=3):
        self.depth = depth
        self.after, self.steps, self.begun, self.closed = {}, [], 0, False

    def begin(self, prompt_ids):
        self.begun += 1

    def propose(self, context, budget):
        yield from ()
        tokens, parents, values, level = [context.token_ids[-1]], [-1], [0.0], [0]
        for _ in range(min(self.depth, context.max_depth)):
            below = []
            for node in level:
                for token in self.after.get(tokens[node], ()):
                    below.append(len(tokens))
                    tokens.append(token)
                    parents.append(node)
                    values.append(values[node] - 0.7)
            level = below
        sources = [int(Source.TARGET), *[int(Source.DRAFT)] * (len(tokens) - 1)]
        return Proposal(make_tree(tokens, parents, values, sources))  # may be larger than the budget: the loop cuts

    def result(self, step, logits):
        for node in step.path if logits else ():
            self.after[int(step.tree.token_ids[node])] = np.argsort(-logits.row(node))[:2].tolist()
        self.steps.append((step.tree.token_ids[step.path].tolist() if logits else [], step.tokens))

    def close(self):
        self.closed = True


@pytest.fixture
def table(monkeypatch):
    """One line of the table."""
    monkeypatch.setitem(PLANNERS, "bigrams", Method(lambda parts: Bigrams(**parts.options), ("depth",)))


def target(sessions=1):
    engine = ReferenceBackend(MODEL, sessions=sessions, **LIMITS)
    engine.vocab.eog_ids = frozenset()
    return engine


def generated(planners, temperature, budget=9):
    """Outputs of all prompts, by a scheduler with these planners; and the trees that were verified."""
    scheduler = Scheduler(target(len(planners)), planners, budget=budget)
    requests = [Request(prompt, SamplingParams(temperature, seed=i), max_tokens=40) for i, prompt in enumerate(PROMPTS)]
    outputs, steps, _ = served(scheduler, requests)
    return outputs, [step.tree for one in steps for step in one]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("sequences", [1, 3])
@pytest.mark.parametrize("depth", [2, 5])
def test_a_new_planner_generates_the_same_tokens(table, temperature, sequences, depth):
    plain, _ = generated([make_planner("none", [target()])], temperature)
    made = [make_planner("bigrams", [target()], depth=depth) for _ in range(sequences)]
    outputs, trees = generated(made, temperature)
    assert outputs == plain
    assert len(trees) < sum(map(len, plain))  # draft tokens were accepted
    assert max(map(len, trees)) <= 10
    assert all(planner.closed for planner in made)
    assert sum(planner.begun for planner in made) == len(PROMPTS)


def test_a_planner_sees_every_step_once_and_in_order(table):
    planner = make_planner("bigrams", [target()])
    outputs, _ = generated([planner], 0.7)
    root = [prompt[-1] for prompt in PROMPTS]
    assert [len(output) for path, output in planner.steps if not path] == [1] * len(PROMPTS)  # the first tokens
    tokens = [token for _, output in planner.steps for token in output]
    assert tokens == [token for output in outputs for token in output]
    for path, output in planner.steps:
        assert path[1:] == output[: max(0, len(path) - 1)]
        assert path[:1] == [] or path[0] in root
        root.append(output[-1])


def test_a_new_planner_in_a_model_and_under_auto(table, monkeypatch):
    check_planner("bigrams", False, None, {"depth": 3})
    with Model(target(), make_planner("none", [target()])) as model:
        plain = [model.generate("abc", max_tokens=30, temperature=0.7, seed=seed).token_ids for seed in range(3)]
    state, clock = new_auto_state(streams=True), Clock(monkeypatch)
    paced = make_planner("bigrams", [target()], state=state)
    assert isinstance(paced, AutoPlanner)
    for planner in (make_planner("bigrams", [target()]), paced):
        streamed = Timed(MODEL, clock, lambda nodes: 1.0, **LIMITS)
        streamed.vocab.eog_ids = frozenset()
        with Model(streamed, planner, budget=9) as model:
            results = [model.generate("abc", max_tokens=30, temperature=0.7, seed=seed) for seed in range(3)]
        assert [result.token_ids for result in results] == plain
        assert sum(result.stats.drafted for result in results) > 0
        assert {result.stats.planner for result in results} == {"bigrams"}
    assert state.target.at(0).sizes[0] == 1
