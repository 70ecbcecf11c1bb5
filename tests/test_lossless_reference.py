"""Speculative text is plain text, token for token: on the reference backend without any tolerance."""

import math
from collections.abc import Callable
from functools import partial

import pytest
from alone import generation_of
from auto_planners import auto_planner
from hypothesis import given
from hypothesis import strategies as st
from reference.backend import Model, ReferenceBackend, perturbed, random_model

from edgespec.errors import ContextFull
from edgespec.lab.lookahead import LookaheadPlanner
from edgespec.lab.pearl import PearlPlanner
from edgespec.lab.specbranch import SpecBranchPlanner
from edgespec.loop.backend import Backend
from edgespec.loop.draft_passes import run_one
from edgespec.loop.planner import Context, Planner
from edgespec.loop.sampling import Noise, SamplingParams
from edgespec.loop.stats import GenerationStats
from edgespec.planners.auto import new_auto_state
from edgespec.planners.chain import ChainPlanner
from edgespec.planners.none import NonePlanner
from edgespec.planners.specexec import SpecExecPlanner
from edgespec.planners.sssd import SssdPlanner

SIZE = 48
MODELS = [random_model(seed, vocab_size=SIZE, sharpness=sharpness) for seed, sharpness in enumerate([1.5, 3.0, 6.0])]

# name -> (draft model, drawn options) -> planner. A new planner needs one line here.
PLANNERS: dict[str, Callable[[Backend, Callable[..., int]], Planner]] = {
    "specexec": lambda draft, draw: SpecExecPlanner(
        draft, depth=draw(1, 12), beam=draw(1, 12), tau=draw(2, 30) / 10, coupling=bool(draw(0, 1))
    ),
    "chain": lambda draft, draw: ChainPlanner(
        draft, depth=draw(1, 12), tau=draw(2, 30) / 10, coupling=bool(draw(0, 1))
    ),
    "pearl": lambda draft, draw: PearlPlanner(draft, depth=draw(1, 12), coupling=bool(draw(0, 1)), nice=False),
    "specbranch": lambda draft, draw: SpecBranchPlanner(
        draft, depth=draw(1, 12), beam=draw(1, 12), tau=draw(2, 30) / 10, coupling=bool(draw(0, 1)), nice=False
    ),
    "sssd": lambda draft, draw: SssdPlanner(depth=draw(1, 12)),
    "lookahead": lambda draft, draw: LookaheadPlanner(depth=draw(1, 12)),
    "auto": lambda draft, draw: auto(draft, bool(draw(0, 1)), draw(0, 20) / 10),
}

# In `make test` one test of each: `test_ahead.py` and `test_the_same_text`.
IN_THE_LAB = ("pearl", "specbranch", "lookahead")
NAMES = [pytest.param(one, marks=[pytest.mark.exhaustive] if one in IN_THE_LAB else []) for one in PLANNERS]


def auto(draft: Backend, streams: bool, cost: float) -> Planner:
    """What decides by the costs of passes: of those measured here, and of draft passes that cost so much."""
    pace = new_auto_state(streams)
    pace.draft.add(1, cost)
    return auto_planner("auto", pace, SssdPlanner(), SpecExecPlanner(draft, cost=pace.draft))


tokens = st.integers(0, SIZE - 1)
samplings = st.builds(
    SamplingParams,
    temperature=st.one_of(st.just(0.0), st.floats(0.3, 1.5)),
    top_k=st.sampled_from([0, 0, 1, 5, 40]),
    top_p=st.sampled_from([1.0, 1.0, 0.5, 0.95]),
    min_p=st.sampled_from([0.0, 0.0, 0.05]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.2, 0.8]),
    presence_penalty=st.sampled_from([0.0, 0.0, 0.5, -0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.3]),
    logit_bias=st.dictionaries(tokens, st.sampled_from([-math.inf, -2.0, 1.0, 4.0]), max_size=3),
    seed=st.integers(0, 2**64 - 1),
)


def drafts_of(model: Model, kind: str) -> Model:
    """A draft that is always right, often right, or right by chance."""
    return {"equal": model, "perturbed": perturbed(model, 0.2, 1), "random": MODELS[0]}[kind]


def write(
    target: Backend, planner: Planner, prompt: list[int], sampling: SamplingParams, *, session=None, **options
) -> tuple[list[int], GenerationStats]:
    """One generation, with everything that must hold of its counts."""
    options = {"max_tokens": 16, "budget": 12} | options
    own = session or target.open()
    stats, output, rounds = GenerationStats(), list[int](), []
    for round_ in generation_of(target, planner, prompt, sampling, session=own, stats=stats, **options).steps():
        assert len(round_.tokens) == len(round_.sources) > 0
        output += round_.tokens
        rounds.append(round_)
        # The cache holds everything but the last token, the next root.
        assert own.token_ids == [*prompt, *output][:-1]
    assert stats.tokens == len(output) == sum(stats.tokens_by_source.values())
    first = rounds[0]  # of the prompt's last row
    assert (len(first.tokens), first.tree.token_ids.tolist(), first.path) == (1, prompt[-1:], [0])
    assert stats.passes == len(rounds) - 1
    assert stats.gained == len(output) - 1
    assert stats.gained - stats.passes <= stats.drafted <= stats.passes * options["budget"]
    guessed = stats.tokens - stats.tokens_by_source["target"]
    assert guessed >= stats.gained - stats.passes  # at most one bonus in a pass
    assert [round_.finished for round_ in rounds[:-1]] == [""] * (len(rounds) - 1)
    assert stats.finish_reason == rounds[-1].finished in ("stop", "length")
    assert (stats.planner, stats.seed, stats.prompt_tokens) == (planner.name, sampling.seed, len(prompt))
    if session is None:
        own.close()
    return output, stats


@pytest.mark.parametrize("name", [*NAMES[:5], "lookahead", "auto"])
@given(
    st.sampled_from(range(len(MODELS))),
    st.sampled_from(["equal", "perturbed", "random"]),
    st.lists(tokens, min_size=1, max_size=12),
    samplings,
    st.integers(1, 40),
    st.integers(1, 24),
    st.data(),
)
def test_the_same_text(name, number, kind, prompt, sampling, budget, max_tokens, data):
    model = MODELS[number]
    # The target's leaves, the draft's leaves, nodes and context may be what limits a tree.
    leaves = data.draw(st.sampled_from([1, 3, 64]), "leaves")
    target = ReferenceBackend(
        model, context_length=40, max_nodes=data.draw(st.sampled_from([8, 41])), max_leaves=leaves
    )
    draft = ReferenceBackend(
        drafts_of(model, kind),
        context_length=data.draw(st.sampled_from([14, 40]), "draft's context"),
        max_nodes=data.draw(st.sampled_from([6, 64]), "draft's nodes"),
        max_leaves=data.draw(st.sampled_from([2, 64]), "draft's leaves"),
    )
    plain, _ = write(target, NonePlanner(), prompt, sampling, max_tokens=max_tokens, budget=budget)
    planner = PLANNERS[name](draft, lambda low, high: data.draw(st.integers(low, high)))
    output, stats = write(target, planner, prompt, sampling, max_tokens=max_tokens, budget=budget)
    planner.close()
    assert output == plain
    ended = plain[-1] == target.vocab.eos_id
    assert len(plain) == max_tokens or ended or len(prompt) + len(plain) == 40
    assert stats.finish_reason == ("stop" if ended else "length")
    assert target.open_sessions == draft.open_sessions == 0


@pytest.mark.parametrize("name", ["specexec", "chain"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_perfect_draft_is_always_right(name, temperature):
    """Coupled to the target's noise, an equal draft guesses every token: losing that would not change the text."""
    target, draft = ReferenceBackend(MODELS[1]), ReferenceBackend(MODELS[1])
    kind = {"specexec": partial(SpecExecPlanner, beam=6), "chain": ChainPlanner}[name]
    planner = kind(draft, depth=6, tau=0.01)
    sampling = SamplingParams(temperature=temperature, seed=3)
    options = {"max_tokens": 29, "budget": 6, "stop_ids": frozenset[int]()}
    plain, _ = write(target, NonePlanner(), [0, 9], sampling, **options)
    output, stats = write(target, planner, [0, 9], sampling, **options)
    assert output == plain
    assert stats.passes == 4  # six guesses and a bonus each
    assert stats.acceptance_length == 7


@pytest.mark.parametrize(("temperature", "tau"), [(0.0, 0.7), (0.6, 1.0), (1.0, 1.0)])
def test_tau_depends_on_whether_the_text_is_sampled(temperature, tau):
    """Without one given; seen in the tree's probabilities."""

    def tree(**options):
        planner = SpecExecPlanner(ReferenceBackend(MODELS[1]), depth=3, **options)
        planner.begin([0, 9])
        context = Context([0, 9], 2, SamplingParams(temperature=temperature, seed=3), Noise(3, SIZE), 9, 64)
        found = run_one(planner.propose(context, 12)).tree.log_probs.tolist()
        planner.close()
        return found

    assert tree() == tree(tau=tau) != tree(tau=1.3)


def test_drafts_differ_in_use():
    """The examples above are not all alike: an equal draft gains most, a random one little."""
    gained = {}
    for kind in ("equal", "perturbed", "random"):
        target = ReferenceBackend(MODELS[1])
        planner = SpecExecPlanner(ReferenceBackend(drafts_of(MODELS[1], kind)), depth=6, beam=4)
        lengths = []
        for seed in range(3):
            sampling = SamplingParams(temperature=1.0, seed=seed)
            _, stats = write(target, planner, [0, 7], sampling, max_tokens=24, stop_ids=frozenset())
            lengths.append(stats.acceptance_length)
        gained[kind] = sum(lengths) / len(lengths)
    assert gained["equal"] > gained["perturbed"] > gained["random"] >= 1


def test_end_of_text_in_the_middle_of_a_pass():
    """Whatever token ends the text, nothing behind it is kept, though the tree went on."""
    target, draft = ReferenceBackend(MODELS[1]), ReferenceBackend(MODELS[1])
    sampling = SamplingParams(temperature=0.8, seed=6)
    everything, _ = write(target, NonePlanner(), [5], sampling, max_tokens=20, stop_ids=frozenset())
    for stop in sorted(set(everything)):
        planner = ChainPlanner(draft, depth=8)
        output, stats = write(target, planner, [5], sampling, max_tokens=20, stop_ids=frozenset([stop]))
        planner.close()
        assert output == everything[: everything.index(stop) + 1]
        assert stats.finish_reason == "stop"


@pytest.mark.parametrize("max_tokens", range(1, 12))
def test_max_tokens_is_exact(max_tokens):
    target, draft = ReferenceBackend(MODELS[1]), ReferenceBackend(MODELS[1])
    sampling = SamplingParams(temperature=0.8, seed=6)
    everything, _ = write(target, NonePlanner(), [5], sampling, max_tokens=12, stop_ids=frozenset())
    planner = SpecExecPlanner(draft, depth=8, beam=3)
    output, stats = write(target, planner, [5], sampling, max_tokens=max_tokens, stop_ids=frozenset())
    assert output == everything[:max_tokens]
    assert stats.finish_reason == "length"


@pytest.mark.parametrize("name", NAMES)
def test_no_node_is_deeper_than_the_text_can_still_go(name):
    """With it and a bonus token: more is computed for nothing."""
    target, draft = ReferenceBackend(MODELS[2]), ReferenceBackend(MODELS[2])
    planner = PLANNERS[name](draft, lambda low, high: min(high, 8))
    sampling, nothing, left = SamplingParams(temperature=1.0, seed=8), frozenset[int](), 11
    generation = generation_of(target, planner, [5] * 9, sampling, max_tokens=left, stop_ids=nothing)
    left -= len(generation.read_prompt().tokens)
    while not generation.finished:
        pass_ = generation.cut(run_one(generation.propose()))
        assert pass_.tree.depth.max() <= left - 1
        left -= len(generation.accept(pass_, target.forward([pass_.work])[0]).tokens)
    assert left == 0


@pytest.mark.parametrize("name", NAMES)
def test_the_end_of_the_context(name):
    """The last place of the context is filled with a token that is never read."""
    target, draft = ReferenceBackend(MODELS[2], context_length=20), ReferenceBackend(MODELS[2], context_length=20)
    sampling, nothing = SamplingParams(temperature=1.0, seed=8), frozenset[int]()
    plain, _ = write(target, NonePlanner(), [5] * 9, sampling, max_tokens=99, stop_ids=nothing)
    planner = PLANNERS[name](draft, lambda low, high: min(high, 8))
    output, stats = write(target, planner, [5] * 9, sampling, max_tokens=99, stop_ids=nothing)
    assert output == plain
    assert len(output) == 11
    assert stats.finish_reason == "length"
    last, _ = write(target, planner, [5] * 19, sampling, max_tokens=99, stop_ids=nothing)
    assert len(last) == 1
    with pytest.raises(ContextFull, match="20"):
        write(target, planner, [5] * 20, sampling)


@pytest.mark.parametrize("name", ["none", *NAMES])
def test_a_second_generation_uses_the_cache(name):
    target, draft = ReferenceBackend(MODELS[1], sessions=2), ReferenceBackend(MODELS[1])
    planner = NonePlanner() if name == "none" else PLANNERS[name](draft, lambda low, high: min(high, 8))
    sampling, prompt = SamplingParams(temperature=0.9, seed=2), [0, 4, 8, 15, 16, 23]
    options = {"max_tokens": 14, "stop_ids": frozenset[int]()}
    session = target.open()
    first, stats = write(target, planner, prompt, sampling, session=session, **options)
    assert stats.cached_tokens == 0
    again, stats = write(target, planner, prompt, sampling, session=session, **options)
    assert again == first
    assert stats.cached_tokens == len(prompt) - 1
    # A conversation that goes on, and one that turns off in the middle of what the cache holds.
    for longer in ([*prompt, *first, 9, 9], [*prompt, *first[:5], 9]):
        fresh, _ = write(target, NonePlanner(), longer, sampling, **options)
        output, stats = write(target, planner, longer, sampling, session=session, **options)
        assert output == fresh
        assert stats.cached_tokens >= len(prompt) + 4


@pytest.mark.parametrize("name", NAMES)
def test_a_generation_that_was_left(name):
    """A reader that stops half-way leaves session and planner fit for the next generation."""
    target, draft = ReferenceBackend(MODELS[1], sessions=2), ReferenceBackend(MODELS[1])
    planner, session = PLANNERS[name](draft, lambda low, high: min(high, 8)), target.open()
    sampling, prompt = SamplingParams(temperature=0.9, seed=2), [0, 4, 8]
    plain, _ = write(target, NonePlanner(), prompt, sampling)
    half = generation_of(target, planner, prompt, sampling, session=session, max_tokens=16).steps()
    for _ in range(2):  # the prompt, and a pass
        next(half)
    half.close()
    assert write(target, planner, prompt, sampling, session=session)[0] == plain


def test_generations_that_share_their_passes_write_what_each_writes_alone():
    names = ["none", *PLANNERS]
    target, draft = (ReferenceBackend(MODELS[1], sessions=len(names) + 1) for _ in range(2))
    samplings = [SamplingParams(temperature=0.4 * i, seed=i) for i in range(len(names))]
    prompts = [[1 + i, 2, 3, 1 + i, 2] for i in range(len(names))]
    alone = [
        write(target, NonePlanner(), prompt, sampling)[0] for prompt, sampling in zip(prompts, samplings, strict=True)
    ]
    generations = []
    for name, prompt, sampling in zip(names, prompts, samplings, strict=True):
        planner = NonePlanner() if name == "none" else PLANNERS[name](draft, lambda low, high: min(high, 6))
        generations.append(generation_of(target, planner, prompt, sampling, max_tokens=16, budget=6))
        generations[-1].read_prompt()
    while going := [generation for generation in generations if not generation.finished]:
        passes = [generation.cut(run_one(generation.propose())) for generation in going]
        for generation, one, logits in zip(going, passes, target.forward([one.work for one in passes]), strict=True):
            generation.accept(one, logits)
    texts = [g.token_ids[len(prompt) :] for g, prompt in zip(generations, prompts, strict=True)]
    assert texts == alone
    assert sum(generation.stats.tokens for generation in generations) == sum(map(len, alone))


def test_seeds_differ_and_repeat():
    target = ReferenceBackend(MODELS[0])
    texts = [write(target, NonePlanner(), [0], SamplingParams(temperature=1.0, seed=seed))[0] for seed in (1, 2, 1)]
    assert texts[0] == texts[2] != texts[1]
