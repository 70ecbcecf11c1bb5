"""Heads: a draft whose rows start from the target's states, and any planner with it."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from alone import generation_of, served
from edgespec.backends.common.heads import KEPT, HeadSession
from edgespec.backends.common.row_logits import RowLogits
from reference.backend import ReferenceBackend, ReferenceSession, random_model

from edgespec.loop.draft_passes import run_one
from edgespec.loop.passes import prefill
from edgespec.loop.sampling import SamplingParams
from edgespec.planners.auto import new_auto_state
from edgespec.planners.choice import make_planner
from edgespec.planners.ledger import Ledger
from edgespec.scheduler.requests import Request
from edgespec.scheduler.scheduler import Scheduler

MODEL = random_model(seed=5, vocab_size=40, layers=2, heads=2, width=16)
LAYERS = 30  # of the target, as its capabilities say
SIZE = MODEL.embedding.shape[1]
PROMPT = [0, 5, 9, 12, 7, 30, 5, 9]


class States(RowLogits):
    def __init__(self, rows, states):
        super().__init__(rows)
        self._states = states

    def states(self, nodes):
        return np.stack([self._states[node] for node in nodes])


class TargetSession(ReferenceSession):
    """Its states are the vectors before the output matrix."""

    def _logits(self, found, work):
        rows = {node: (self._backend.model.embedding @ found[node]).astype(np.float32) for node in work.wanted.tolist()}
        return States(rows, {node: vector.astype(np.float32) for node, vector in found.items()})


class Target(ReferenceBackend):
    def __init__(self, context_length=200, **options):
        super().__init__(MODEL, context_length=context_length, **options)
        self.capabilities = replace(self.capabilities, states=SIZE, layers=LAYERS)
        self.vocab.eog_ids = frozenset()

    def open(self):
        self.opened.append(TargetSession(self))
        return self.opened[-1]


class HeadOfTest(ReferenceBackend):
    """Drafts as the model itself, and writes down what each row starts from; its own states are negative."""

    width = SIZE

    def __init__(self, **options):
        super().__init__(MODEL, context_length=200, **options)
        self.capabilities = replace(self.capabilities, head=True, one_thread=True)
        self.rows = []  # (position, token, its parent is a node, state)
        self.given = 0

    def fuse(self, states):
        return states

    def open(self):
        self.opened.append(RowsOfHead(self))
        return self.opened[-1]


class RowsOfHead(HeadSession, ReferenceSession):
    def give(self, start, states):
        self._backend.given += len(states)
        super().give(start, states)

    def add(self, work, positions):
        inputs, first = self.inputs(work, positions), self.nodes
        logits = super().add(work, positions)
        for i, position in enumerate(positions):
            self._backend.rows.append((position, int(work.token_ids[i]), work.prompt, inputs[i]))
        nodes = range(first, first + len(positions))
        self.add_states(nodes, np.stack([np.full(SIZE, -1.0 - node, np.float32) for node in nodes]))
        return logits


def states_of(tokens):
    """The target's states of a text, [n, size], by one plain pass."""
    target = Target()
    session, found = target.open(), []
    prefill(target, session, tokens, saw=lambda work, logits: found.extend(logits.states(range(len(work.token_ids)))))
    return np.stack(found)


def generated(planner, temperature, max_tokens=24, budget=8, rests=0):
    """Tokens of a text; for the first `rests` steps the planner is not asked."""
    target = Target(len(PROMPT) + max_tokens)
    sampling = SamplingParams(temperature=temperature, seed=3)
    generation = generation_of(target, planner, PROMPT, sampling, max_tokens=max_tokens, budget=budget)
    generation.read_prompt()
    while not generation.finished:
        pass_ = generation.cut(run_one(generation.propose(0 if generation.stats.passes < rests else None)))
        generation.accept(pass_, target.forward([pass_.work])[0])
    return generation.token_ids


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(("name", "rests"), [("specexec", 0), ("chain", 0), ("specexec", 30)])
def test_text_with_a_head_is_plain_decodings_and_committed_tokens_are_read_from_the_targets_states(
    name, rests, temperature
):
    """Also those that it missed while it was not asked."""
    head, most = HeadOfTest(), 24 + rests
    tokens = generated(make_planner(name, [Target(), head]), temperature, most, rests=rests)
    assert tokens == generated(make_planner("none", [Target()]), temperature, most)
    states = states_of(tokens)
    read = [(position, token, state) for position, token, committed, state in head.rows if committed]
    positions = {position for position, _, _ in read}
    assert positions == set(range(max(positions) + 1)) >= set(range(len(PROMPT) + rests))
    for position, token, state in read:
        assert token == tokens[position]
        np.testing.assert_array_equal(state, states[position - 1] if position else np.zeros(SIZE))


def test_nodes_start_from_the_heads_own_state_of_their_parent():
    head = HeadOfTest()
    generated(make_planner("specexec", [Target(), head]), 0.0)
    drafted = [state for _, _, committed, state in head.rows if not committed]
    assert drafted
    assert all((state < 0).all() and (state == state[0]).all() for state in drafted)


def test_a_head_that_is_not_asked_reads_nothing_and_keeps_few_states():
    head = HeadOfTest()
    tokens = generated(make_planner("specexec", [Target(), head]), 0.0, max_tokens=300, rests=300)
    [session] = head.opened
    assert len(session.token_ids) == len(PROMPT)
    assert head.given >= len(tokens) - 2
    assert len(session._given) == KEPT + 1


def test_a_head_reads_nothing_of_a_plain_request():
    head = HeadOfTest()
    planner = make_planner("specexec", [Target(), head], depth=4)
    usual = generated(make_planner("none", [Target()]), 0.7)
    assert generated(planner, 0.7, budget=0) == usual
    assert (head.rows, head.given) == ([], 0)
    assert generated(planner, 0.7) == usual


def test_auto_tries_a_head_again_in_the_same_text(monkeypatch):
    target, head, text = Target(), HeadOfTest(), [*PROMPT, *range(30)]
    asked = []  # tokens that it would have to read
    monkeypatch.setattr(Ledger, "is_due", lambda self, way, tokens: asked.append(tokens))
    auto = make_planner("auto", [target, head], state=new_auto_state(streams=False))
    generation = generation_of(target, auto, PROMPT)
    drafting = auto._draft
    generation.begin()
    now = SimpleNamespace(token_ids=text, sequences=1, pass_times=None)
    drafting.is_due(now, 8, 0.0)  # it would have to read the prompt
    generation.read_prompt()
    drafting.is_due(now, 8, 0.0)
    assert asked == [len(text) - 1, 0]
    missed = len(text) - 1 - len(PROMPT)
    assert drafting.draft_seconds(np.ones(1), text, plain=1.0) == pytest.approx(missed / LAYERS)


def test_several_texts_and_second_turns_share_a_head():
    prompts = [PROMPT, [0, 7, 8, 7, 8], [*PROMPT, 3, 3], [0, 7, 8, 7, 8, 1, 2]]
    requests = [Request(prompt, SamplingParams(0.7, seed=i), max_tokens=12) for i, prompt in enumerate(prompts)]
    found = []
    for name, count in (("none", 1), ("specexec", 2)):
        target, head = Target(sessions=count), HeadOfTest(sessions=count)
        planners = [make_planner(name, [target, *([head] if name != "none" else [])]) for _ in range(count)]
        found.append(served(Scheduler(target, planners, budget=8), requests)[0])
    assert found[0] == found[1]
    assert head.rows


def test_after_a_rewind_states_of_dropped_tokens_are_forgotten():
    head = HeadOfTest()
    session = head.open()
    session.give(0, np.ones((5, SIZE), np.float32))
    prefill(head, session, PROMPT[:5])
    session.give(4, np.ones((1, SIZE), np.float32))
    session.rewind(2)
    prefill(head, session, [*PROMPT[:2], 8, 9, 10, 11])
    position, _, _, state = head.rows[-1]
    assert position == 5
    assert not state.any()
