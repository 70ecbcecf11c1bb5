"""Models with recurrent layers, whose trees are evaluated as paths: speculative text is plain text, to the bit."""

import numpy as np
import pytest
from alone import before_passes, generation_of
from contract import chain_rows
from hypothesis import given, settings
from hypothesis import strategies as st
from reference.backend import ReferenceBackend, perturbed, random_model
from test_lossless_reference import NAMES, PLANNERS, samplings, tokens, write

from edgespec.loop.backend import Work
from edgespec.loop.draft_passes import run_one
from edgespec.loop.passes import prefill
from edgespec.loop.sampling import SamplingParams
from edgespec.planners.none import NonePlanner
from edgespec.planners.specexec import SpecExecPlanner

MODEL = random_model(1, vocab_size=48, layers=3, recurrent=True)


def test_the_state_reaches_back_to_the_first_token():
    backend = ReferenceBackend(random_model(1, vocab_size=48, layers=1, recurrent=True))
    rows = [chain_rows(backend, [first, 7, 8, 9])[-1] for first in (5, 6)]
    assert np.abs(rows[0] - rows[1]).max() > 0.01


@pytest.mark.covering(1)
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["equal", "perturbed"])
def test_the_grid(name, temperature, kind):
    target = ReferenceBackend(MODEL, max_leaves=8)
    draft = ReferenceBackend(MODEL if kind == "equal" else perturbed(MODEL, 0.3, 1), max_leaves=8)
    sampling, options = SamplingParams(temperature=temperature, seed=5), {"max_tokens": 60, "stop_ids": frozenset()}
    plain, _ = write(target, NonePlanner(), [0, 4, 8, 4, 8], sampling, **options)
    planner = PLANNERS[name](draft, lambda low, high: min(high, 8))
    output, _ = write(target, planner, [0, 4, 8, 4, 8], sampling, **options)
    planner.close()
    assert output == plain


@settings(max_examples=settings().max_examples // 3)
@given(
    st.sampled_from(list(PLANNERS)), st.lists(tokens, min_size=1, max_size=12), samplings, st.integers(1, 40),
    st.integers(1, 30), st.data(),
)  # fmt: skip
def test_the_same_text(name, prompt, sampling, budget, max_tokens, data):
    nodes = data.draw(st.sampled_from([8, 41]))
    target = ReferenceBackend(MODEL, context_length=50, max_nodes=nodes, max_leaves=data.draw(st.sampled_from([1, 3])))
    draft = ReferenceBackend(perturbed(MODEL, 0.2, 1), context_length=50, max_leaves=data.draw(st.sampled_from([2, 8])))
    plain, _ = write(target, NonePlanner(), prompt, sampling, max_tokens=max_tokens, budget=budget)
    planner = PLANNERS[name](draft, lambda low, high: data.draw(st.integers(low, high)))
    output, _ = write(target, planner, prompt, sampling, max_tokens=max_tokens, budget=budget)
    planner.close()
    assert output == plain


@pytest.mark.parametrize("most", [1, 16])
def test_a_pass_that_reads_again_what_a_tree_left_is_not_plain(most, monkeypatch):
    """Neither where the tokens begin its paths, nor where they have a pass of their own."""
    monkeypatch.setattr("reference.backend.MOST_UNREAD", most)
    target, draft = ReferenceBackend(MODEL, max_leaves=8), ReferenceBackend(perturbed(MODEL, 0.3, 1), max_leaves=8)
    generation, owed = generation_of(target, SpecExecPlanner(draft, depth=3), [5, 9], stop_ids=frozenset()), []
    generation.read_prompt()
    while not generation.finished:
        pass_ = generation.cut(run_one(generation.propose(6 if generation.stats.passes % 3 == 0 else 0)))
        behind = generation.session._behind
        owed.append(behind > 0)
        assert pass_.plain == (len(pass_.tree) == 1 and behind == 0)
        assert generation._context(generation.token_ids, 9).owes == (behind > 0)
        generation.accept(pass_, target.forward([pass_.work])[0])
    assert 0 < sum(owed) < len(owed)


def test_a_text_whose_state_was_lost_owes_it():
    """As on engines that keep a state after some paths only, and after a session was loaded."""
    target = ReferenceBackend(MODEL, max_leaves=8)
    generation = generation_of(target, NonePlanner(), [5, 9, 6], stop_ids=frozenset())
    generation.read_prompt()
    for lost in (True, False):
        if lost:
            generation.session._states.cut(1)
        pass_ = generation.cut(run_one(generation.propose()))
        assert (pass_.plain, generation._context(generation.token_ids, 9).owes) == (not lost, lost)
        generation.accept(pass_, target.forward([pass_.work])[0])


def test_plain_decoding_owes_nothing():
    """A pass over one node ends where the text does, so its state is the text's."""
    target = ReferenceBackend(MODEL, max_leaves=8)
    session = target.open()
    for round_number in range(2):
        write(target, NonePlanner(), [0, 4, 8], SamplingParams(seed=round_number), session=session)
        assert session.unread_committed == 0


@pytest.mark.parametrize("planner", ["chain", "specexec", "sssd"])
def test_tokens_that_are_owed_stay_few(planner):
    """Steps, and passes of their own, bring the state on, however often guesses prove wrong."""
    target, draft = ReferenceBackend(MODEL, max_leaves=8), ReferenceBackend(perturbed(MODEL, 0.4, 2), max_leaves=8)
    guesses, session = PLANNERS[planner](draft, lambda low, high: min(high, 4)), target.open()
    seen = before_passes(target, lambda batch: session.unread_committed)
    sampling = SamplingParams(temperature=1.0, seed=3)
    write(target, guesses, [0, 4, 8], sampling, session=session, max_tokens=60, stop_ids=frozenset())
    assert max(seen) > 0
    assert max(seen) <= 16 + 13  # what is accepted before the limit is noticed


def test_a_saved_session_keeps_its_states(tmp_path):
    """What is owed, and the states before: the text goes on as it would have, and falls back as far."""
    text, nodes, file = [0, 4, 8, 15, 16], np.arange(3, dtype=np.int32), tmp_path / "text.session"
    target = ReferenceBackend(MODEL, max_leaves=8)
    session = target.open()
    for end in (3, 5):
        prefill(target, session, text[:end])
    target.forward([Work(session, nodes + 9, nodes - 1, nodes)])
    session.commit([0, 1])  # the path ended one node further
    session.save(file)
    target = ReferenceBackend(MODEL, max_leaves=8, sessions=2)
    copy = target.open()
    copy.load(file)
    assert (copy.token_ids, copy.unread_committed) == ([*text, 9, 10], 2)
    assert (
        [copy.reusable_prefix(end) for end in range(8)]
        == [session.reusable_prefix(end) for end in range(8)]
        == [0, 0, 0, 3, 3, 5, 5, 7]
    )
    row = target.forward([Work(copy, nodes[:1] + 5, nodes[:1] - 1, nodes[:1])])[0].row(0)
    np.testing.assert_array_equal(row, chain_rows(target, [*text, 9, 10, 5])[-1])


def test_a_chat_of_five_turns_keeps_what_it_has_read():
    """Every turn starts from the state where the last prompt ended, or better; its text is that of a fresh session."""
    target, draft = ReferenceBackend(MODEL, sessions=2, max_leaves=8), ReferenceBackend(MODEL, max_leaves=8)
    session, planner = target.open(), SpecExecPlanner(draft, depth=5)
    prompt, before = [0, 4, 8], 0
    for turn in range(5):
        sampling = SamplingParams(temperature=0.8, seed=turn)
        options = {"max_tokens": 12, "stop_ids": frozenset[int]()}
        fresh, _ = write(target, NonePlanner(), prompt, sampling, **options)
        output, stats = write(target, planner, prompt, sampling, session=session, **options)
        assert output == fresh
        assert stats.cached_tokens >= before
        before = len(prompt) - 1
        prompt = [*prompt, *output, 9, 9 + turn, 7]
    # Back to the turn before, as after an answer that shall be given again.
    output, stats = write(target, planner, prompt[:-15], SamplingParams(seed=9), session=session)
    assert stats.cached_tokens > 0
    planner.close()
