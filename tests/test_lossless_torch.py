"""Speculative text on PyTorch: plain text, but where rounding may decide.

Tiny models of some families, with windows, experts, 4 bits and streamed weights, and SmolLM2. Each is its own draft,
and so is a damaged copy.
"""

import pytest

pytest.importorskip("torch", reason="needs PyTorch: pip install 'edgespec[torch]'")

from alone import Generation
from conftest import few
from edgespec.backends.torch.backend import load
from hf_models import perturbed, save, tiny_model, transformers
from test_torch import Recorder, memory_for, needs_bitsandbytes

from edgespec.lab.lookahead import LookaheadPlanner
from edgespec.loop.sampling import SamplingParams
from edgespec.loop.stats import GenerationStats
from edgespec.measure.lossless import explain, replay
from edgespec.planners.none import NonePlanner
from edgespec.planners.specexec import SpecExecPlanner
from edgespec.planners.sssd import SssdPlanner

SAMPLINGS = [
    SamplingParams(),
    SamplingParams(temperature=0.7, top_p=0.9, seed=1),
    SamplingParams(temperature=1.0, seed=2),
]
by_temperature = pytest.mark.parametrize("sampling", SAMPLINGS, ids=["T=0", "T=0.7", "T=1"])
by_few_temperatures = pytest.mark.parametrize(
    "sampling", [pytest.param(one, marks=[pytest.mark.exhaustive] * (one is not SAMPLINGS[1])) for one in SAMPLINGS]
)
OPTIONS = {"context_length": 128, "budget": 16, "threads": 1}
# Family -> noise that leaves a draft right now and then.
FAMILIES = {
    "llama": 0.1,
    "mistral, window": 0.1,
    "mixtral": 0.1,
    "gpt-oss": 0.1,
    "qwen3": 0.1,
    "gemma2": 0.8,
    "gemma3": 0.8,
}


def write(target, planner, prompt, sampling, count):
    session, stats, output = target.open(), GenerationStats(), []
    for round_ in Generation(
        target, session, planner, prompt, sampling, max_tokens=count, budget=16, stats=stats
    ).steps():
        output += round_.tokens
    session.close()
    return output, stats


def check_lossless(target, planners, prompt, sampling, count):
    """Every token is what plain decoding samples after the same text, or ties with it; the runs' acceptance lengths."""
    plain, _ = write(target, NonePlanner(), prompt, sampling, count)
    assert replay(target, prompt, plain, sampling) == []  # plain decoding can be repeated to the bit
    lengths = []
    for planner in planners:
        output, stats = write(target, planner, prompt, sampling, count)
        found = explain(target, prompt, plain, output, sampling)
        if found is not None:  # what follows can only be checked along the other text
            bad = [other for other in (found, *replay(target, prompt, output, sampling)) if not other.tie]
            assert not bad, f"{planner.name}, {sampling}: " + "; ".join(map(str, bad))
        planner.close()
        lengths.append(stats.acceptance_length)
    return lengths


@pytest.fixture(scope="module", params=few(FAMILIES, "llama", "mistral, window", "mixtral", "gpt-oss", "gemma2"))
def pair(request, tmp_path_factory):
    """A folder and one of a damaged copy."""
    folder = tmp_path_factory.mktemp("pair")
    model = tiny_model(request.param)
    return save(model, folder / "model"), save(perturbed(model, FAMILIES[request.param], 1), folder / "damaged")


@pytest.mark.covering(1)
@by_temperature
def test_tiny_models(pair, sampling):
    target, same, damaged = load(str(pair[0]), **OPTIONS), *(load(str(path), **OPTIONS) for path in pair)
    planners = [SpecExecPlanner(draft, depth=8, beam=4, tau=0.3) for draft in (same, damaged)]
    lengths = check_lossless(target, [*planners, SssdPlanner(), LookaheadPlanner()], [5, 9, 30, 7, 9, 30], sampling, 24)
    assert lengths[0] > 4
    assert 1 < lengths[1] <= lengths[0]


@pytest.mark.covering(1)
@by_temperature
@pytest.mark.parametrize(
    "options", [{"dtype": "bfloat16"}, pytest.param({"dtype": "nf4"}, marks=needs_bitsandbytes), {}]
)
def test_streamed_weights(tmp_path, sampling, options):
    folder = save(tiny_model("llama", num_hidden_layers=5), tmp_path)
    draft = load(str(folder), **OPTIONS, **options)
    target = load(
        str(folder), **OPTIONS, **options, gpu_memory=memory_for(folder, 1, **OPTIONS, **options), copies=Recorder
    )
    assert target.streamer is not None
    planners = [SpecExecPlanner(draft, depth=8, beam=4, tau=0.3), SssdPlanner()]
    assert check_lossless(target, planners, [5, 9, 30, 7, 9, 30], sampling, 16)[0] > 2


class TestSmolLM2:
    @by_few_temperatures
    def test_trees_and_copies(self, smollm2_models, sampling):
        target, same, damaged = smollm2_models
        prompt = target.vocab.encode("def is_prime(n):\n    ", add_bos=True, parse_special=False)
        drafted = [SpecExecPlanner(same, depth=6, beam=4), SpecExecPlanner(damaged, depth=4, beam=4)]
        planners = [*drafted, SssdPlanner(), LookaheadPlanner()]
        lengths = check_lossless(target, planners, prompt, sampling, 12)
        assert lengths[0] > 2

    def test_a_wrong_text_is_noticed(self, smollm2_models):
        """The check above can fail: another seed's text is no tie."""
        target = smollm2_models[0]
        prompt = target.vocab.encode("The three most important rivers", add_bos=True, parse_special=False)
        texts = [
            write(target, NonePlanner(), prompt, SamplingParams(temperature=1.0, seed=seed), 8)[0] for seed in (1, 2)
        ]
        found = explain(target, prompt, *texts, SamplingParams(temperature=1.0, seed=1))
        assert found is not None
        assert not found.tie


@pytest.fixture(scope="module")
def smollm2_models(smollm2_tiny_hf, tmp_path_factory):
    """SmolLM2 with six layers, again for a draft, and a draft without the last two: often wrong."""
    model = transformers.AutoModelForCausalLM.from_pretrained(smollm2_tiny_hf)
    kept = list(model.model.layers)[:4]
    model.model.layers = type(model.model.layers)(kept)
    model.config.num_hidden_layers = len(kept)
    folder = tmp_path_factory.mktemp("damaged")
    model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(smollm2_tiny_hf).save_pretrained(folder)
    backends = [load(str(path), **OPTIONS) for path in (smollm2_tiny_hf, smollm2_tiny_hf, folder)]
    yield backends
    for backend in backends:
        backend.close()
    for file in folder.iterdir():
        file.unlink()
