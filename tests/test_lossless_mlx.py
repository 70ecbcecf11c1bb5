"""Speculative text on MLX: plain text, but where rounding may decide. Tiny random models, and SmolLM2."""

import shutil
from itertools import chain

import pytest

pytest.importorskip("mlx_lm", reason="mlx-lm is not installed: pip install 'edgespec[mlx]'")

import mlx.core as mx
from edgespec.backends.mlx.backend import load
from folder_texts import SAMPLINGS, by_temperature, check_lossless, check_wrong_text
from mlx_models import FAMILIES, write_model

from edgespec.lab.lookahead import LookaheadPlanner
from edgespec.models.convert.folder_from_gguf import convert
from edgespec.planners.chain import ChainPlanner
from edgespec.planners.specexec import SpecExecPlanner
from edgespec.planners.sssd import SssdPlanner

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
@by_temperature
def test_tiny_models(models, sampling):
    target, equal, damaged = models
    planners = (
        kind(draft, **options)
        for kind, draft, options in (
            (SpecExecPlanner, equal, {"depth": 6, "beam": 4, "tau": 0.3}),
            (SpecExecPlanner, damaged, {"depth": 6, "beam": 4}),
            (ChainPlanner, damaged, {"depth": 5}),
        )
    )
    prompt = target.vocab.encode(PROMPT, add_bos=True, parse_special=False)
    lengths = check_lossless(target, chain(planners, [SssdPlanner(), LookaheadPlanner()]), prompt, sampling, 16)
    assert lengths[0] > 3


def test_a_wrong_text_is_noticed(models):
    check_wrong_text(models[0], models[0].vocab.encode(PROMPT, add_bos=True, parse_special=False), 40)


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
    """Its acceptance length."""
    prompt = target.vocab.encode(prompt, add_bos=True, parse_special=False)
    return check_lossless(target, [planner], prompt, sampling, count, budget=4)[0]


@pytest.mark.exhaustive
@pytest.mark.parametrize("sampling", [SAMPLINGS[0], SAMPLINGS[2]])
def test_smollm2_with_a_draft(smollm2_target, smollm2_4bit, sampling):
    planner = SpecExecPlanner(smollm2_4bit, depth=3, beam=2)
    length = check_smollm2(smollm2_target, planner, "Once upon a time, a fox", sampling)
    assert length > 1.5


@pytest.mark.exhaustive
def test_smollm2_with_itself(smollm2_tiny_hf, smollm2_target):
    draft = load(str(smollm2_tiny_hf), context_length=64, budget=4)
    planner = SpecExecPlanner(draft, depth=3, beam=1, tau=0.3)
    length = check_smollm2(smollm2_target, planner, "Once upon a time, a fox", SAMPLINGS[1])
    draft.close()
    assert length > 2


@pytest.mark.exhaustive
def test_smollm2_copies(smollm2_target):
    """So few layers soon repeat themselves."""
    length = check_smollm2(smollm2_target, SssdPlanner(), "\n\n\n\n\n\n", SAMPLINGS[0], 16)
    assert length > 2
