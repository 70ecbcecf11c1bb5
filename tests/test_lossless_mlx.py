"""Speculative text on MLX: plain text, but where rounding may decide. Tiny random models, and SmolLM2."""

import shutil

import pytest

pytest.importorskip("mlx_lm", reason="mlx-lm is not installed: pip install 'edgespec[mlx]'")

import mlx.core as mx
from alone import Generation
from edgespec.backends.mlx.backend import load
from mlx_models import FAMILIES, write_model

from edgespec.lab.lookahead import LookaheadPlanner
from edgespec.loop.sampling import SamplingParams
from edgespec.loop.stats import GenerationStats
from edgespec.measure.lossless import explain, replay
from edgespec.models.convert.folder_from_gguf import convert
from edgespec.planners.chain import ChainPlanner
from edgespec.planners.none import NonePlanner
from edgespec.planners.specexec import SpecExecPlanner
from edgespec.planners.sssd import SssdPlanner

SAMPLINGS = [
    SamplingParams(),
    SamplingParams(temperature=0.7, top_p=0.9, seed=1),
    SamplingParams(temperature=1.0, seed=2),
]
IDS = ["T=0", "T=0.7", "T=1"]
PROMPT = "abracadabra, abraca"
BUDGET = 16

# The target, as keywords of `write_model`; its drafts are itself and a copy with noise on the weights.
TARGETS = {
    "llama": {"config": FAMILIES["llama-3"]},
    "gemma3, with windows": {"config": FAMILIES["gemma3"]},
    "qwen3, 4 bits": {"config": FAMILIES["qwen3"], "bits": 4},
    "gpt-oss": {"config": FAMILIES["gpt-oss"]},
    "mistral, float16": {"config": FAMILIES["mistral"], "dtype": mx.float16},
}


def write(target, planner, prompt, sampling, count, budget=BUDGET):
    session, stats, output = target.open(), GenerationStats(), []
    options = {"max_tokens": count, "budget": budget, "stats": stats, "stop_ids": frozenset[int]()}
    for round_ in Generation(target, session, planner, prompt, sampling, **options).steps():
        output += round_.tokens
    session.close()
    return output, stats


def check_lossless(target, planner, prompt, plain, sampling, budget=BUDGET):
    """Every token is what plain decoding samples after the same text, or ties with it."""
    output, stats = write(target, planner, prompt, sampling, len(plain), budget)
    planner.close()
    found = explain(target, prompt, plain, output, sampling)
    if found is not None:  # what follows can only be checked along the other text
        bad = [divergence for divergence in (found, *replay(target, prompt, output, sampling)) if not divergence.tie]
        assert not bad, f"{planner.name}, {sampling}: " + "; ".join(map(str, bad))
    return stats


@pytest.fixture(scope="module", params=TARGETS)
def models(request, tmp_path_factory):
    """Target, itself as a draft, and a damaged copy."""
    options, folder = TARGETS[request.param], tmp_path_factory.mktemp("mlx")
    good, bad = write_model(folder / "good", **options), write_model(folder / "bad", **options, damage=0.3)
    loaded = [load(str(path), context_length=128, budget=BUDGET) for path in (good, good, bad)]
    yield loaded
    for backend in loaded:
        backend.close()


@pytest.mark.covering(1)
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=IDS)
def test_tiny_models(models, sampling):
    target, equal, damaged = models
    prompt = target.vocab.encode(PROMPT, add_bos=True, parse_special=False)
    plain, _ = write(target, NonePlanner(), prompt, sampling, 24)
    assert replay(target, prompt, plain, sampling) == []  # plain decoding can be repeated to the bit
    stats = check_lossless(target, SpecExecPlanner(equal, depth=6, beam=4, tau=0.3), prompt, plain, sampling)
    assert stats.acceptance_length > 3
    check_lossless(target, SpecExecPlanner(damaged, depth=6, beam=4), prompt, plain, sampling)
    check_lossless(target, ChainPlanner(damaged, depth=5), prompt, plain, sampling)
    check_lossless(target, SssdPlanner(), prompt, plain, sampling)
    check_lossless(target, LookaheadPlanner(), prompt, plain, sampling)


def test_a_wrong_text_is_noticed(models):
    """The check above can fail: another seed's text is no tie, however rough the target."""
    target = models[0]
    prompt = target.vocab.encode(PROMPT, add_bos=True, parse_special=False)
    texts = [write(target, NonePlanner(), prompt, SamplingParams(temperature=1.0, seed=s), 40)[0] for s in (1, 2)]
    sampling = SamplingParams(temperature=1.0, seed=1)
    assert texts[0] != texts[1]
    found = [explain(target, prompt, *texts, sampling), *replay(target, prompt, texts[1], sampling)]
    assert any(divergence is not None and not divergence.tie for divergence in found)


# SmolLM2 with six layers: MLX computes one token after the other on Linux, all thirty in 0.1 s, so texts are short.


@pytest.fixture(scope="module")
def smollm2_target(smollm2_tiny_hf):
    backend = load(str(smollm2_tiny_hf), context_length=64, budget=4)
    yield backend
    backend.close()


@pytest.fixture(scope="module")
def smollm2_4bit(smollm2_tiny, tmp_path_factory):
    """Quantised by mlx-lm: as a draft, mostly right."""
    folder = tmp_path_factory.mktemp("smollm2") / "4bit"
    convert(smollm2_tiny, folder, dtype="float32", bits=4)
    backend = load(str(folder), context_length=64, budget=4)
    yield backend
    backend.close()
    shutil.rmtree(folder)


def check_smollm2(target, planner, prompt, sampling, count=8):
    prompt = target.vocab.encode(prompt, add_bos=True, parse_special=False)
    plain, _ = write(target, NonePlanner(), prompt, sampling, count)
    return check_lossless(target, planner, prompt, plain, sampling, budget=4)


@pytest.mark.parametrize(
    "sampling", [pytest.param(SAMPLINGS[0], marks=pytest.mark.exhaustive), SAMPLINGS[2]], ids=IDS[::2]
)
def test_smollm2_with_a_draft(smollm2_target, smollm2_4bit, sampling):
    planner = SpecExecPlanner(smollm2_4bit, depth=3, beam=2)
    stats = check_smollm2(smollm2_target, planner, "Once upon a time, a fox", sampling)
    assert stats.acceptance_length > 1.5


def test_smollm2_with_itself(smollm2_tiny_hf, smollm2_target):
    draft = load(str(smollm2_tiny_hf), context_length=64, budget=4)
    planner = SpecExecPlanner(draft, depth=3, beam=1, tau=0.3)
    stats = check_smollm2(smollm2_target, planner, "Once upon a time, a fox", SAMPLINGS[1])
    draft.close()
    assert stats.acceptance_length > 2


def test_smollm2_copies(smollm2_target):
    """So few layers soon repeat themselves."""
    stats = check_smollm2(smollm2_target, SssdPlanner(), "\n\n\n\n\n\n", SAMPLINGS[0], 16)
    assert stats.acceptance_length > 2
