"""A draft that has no cells for a pass, or lacks a token of the text, ends no request and changes no text."""

import pytest
from reference.backend import ReferenceBackend, perturbed, random_model
from test_lossless_reference import write

from edgespec.errors import ContextFull
from edgespec.lab.cascade import CascadePlanner
from edgespec.lab.pearl import PearlPlanner
from edgespec.lab.specbranch import SpecBranchPlanner
from edgespec.loop.sampling import SamplingParams
from edgespec.planners.ahead import AheadPlanner
from edgespec.planners.chain import ChainPlanner
from edgespec.planners.none import NonePlanner
from edgespec.planners.specexec import SpecExecPlanner
from edgespec.scheduler.targets.proposer import DraftProposer

TARGET = random_model(1, vocab_size=48, sharpness=3.0)
PROMPT = [5, 9, 7]
PLAIN = {"stop_ids": frozenset[int](), "max_tokens": 24, "budget": 12}
PLANNERS = {
    "specexec": SpecExecPlanner,
    "chain": ChainPlanner,
    "ahead": lambda draft: AheadPlanner(draft, nice=False),
    "pearl": lambda draft: PearlPlanner(draft, nice=False),
    "specbranch": lambda draft: SpecBranchPlanner(draft, nice=False),
}
CASCADES = {
    "none": lambda draft: CascadePlanner(NonePlanner(), draft, 0.5),
    "specexec": lambda draft: CascadePlanner(SpecExecPlanner(draft), draft, 0.5),
}


def text(planner, sampling, prompt=PROMPT):
    output, _ = write(ReferenceBackend(TARGET), planner, prompt, sampling, **PLAIN)
    planner.close()
    return output


def full_at(draft, number):
    """Let one pass of a draft have no room, the `number`th."""
    inner, passes = draft.forward, []

    def forward(batch):
        passes.append(batch)
        if len(passes) == number:
            draft.stop.next()
            raise ContextFull("the cache is full")
        return inner(batch)

    draft.forward = forward
    return draft


@pytest.mark.covering(1)
@pytest.mark.parametrize("number", range(1, 11))
@pytest.mark.parametrize("name", PLANNERS)
def test_a_draft_that_has_no_room_for_a_pass(name, number):
    sampling, draft = SamplingParams(temperature=0.8, seed=3), perturbed(TARGET, 0.4, 1)
    plain = text(NonePlanner(), sampling)
    assert text(PLANNERS[name](full_at(ReferenceBackend(draft), number)), sampling) == plain


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", range(4, 14))  # before, prompts are read
@pytest.mark.parametrize("name", CASCADES)
def test_a_cascade_whose_draft_has_no_room_for_a_pass(name, number):
    sampling, draft = SamplingParams(temperature=0.8, seed=3), perturbed(TARGET, 0.4, 1)
    usual = text(CASCADES[name](ReferenceBackend(draft, sessions=2)), sampling)
    assert text(CASCADES[name](full_at(ReferenceBackend(draft, sessions=2), number)), sampling) == usual


SMALLER = random_model(2, vocab_size=40, sharpness=3.0)


@pytest.mark.covering(1)
@pytest.mark.parametrize("prompt", [PROMPT, [5, 44, 7]])
@pytest.mark.parametrize(
    "sampling",
    [SamplingParams(logit_bias={45: 12.0}), SamplingParams(temperature=1.5, seed=4)],
    ids=["bias", "sampled"],
)
@pytest.mark.parametrize("name", PLANNERS)
def test_a_draft_whose_vocabulary_is_padded_to_a_smaller_size(name, sampling, prompt):
    plain = text(NonePlanner(), sampling, prompt)
    assert max(plain) >= 40
    assert text(PLANNERS[name](ReferenceBackend(SMALLER)), sampling, prompt) == plain


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", CASCADES)
def test_a_cascade_with_such_a_draft_samples_from_the_target_after_a_token_that_the_draft_lacks(name):
    sampling = SamplingParams(temperature=1.5, seed=4)
    prompt = [5, 44, 7]
    assert text(CASCADES[name](ReferenceBackend(SMALLER, sessions=2)), sampling, prompt) == text(
        NonePlanner(), sampling, prompt
    )
    found = text(CASCADES[name](ReferenceBackend(SMALLER, sessions=2)), sampling)
    first = next(i for i, token in enumerate(found) if token >= 40)
    after = [*PROMPT, *found[: first + 1]]
    assert found[first + 1 :] == text(NonePlanner(), sampling, after)[: len(found) - first - 1]


def test_a_draft_of_several_targets_proposes_nothing_after_such_a_token():
    proposer = DraftProposer(ReferenceBackend(SMALLER), 48)
    proposer.begin(PROMPT, SamplingParams())
    assert next(proposer.after(PROMPT)) < 40
    assert list(proposer.after([*PROMPT, 45])) == []
    proposer.close()
