"""Speculative text on PyTorch: plain text, but where rounding may decide.

Tiny models of some families, with windows, experts, 4 bits and streamed weights, and SmolLM2. Each is its own draft,
and so is a damaged copy.
"""

import pytest

pytest.importorskip("torch", reason="needs PyTorch: pip install 'edgespec[torch]'")

from conftest import few
from edgespec.backends.torch.backend import load
from folder_texts import by_temperature, check_lossless, check_wrong_text
from hf_models import perturbed, save, tiny_model, transformers
from test_torch import Recorder, memory_for, needs_bitsandbytes

from edgespec.lab.lookahead import LookaheadPlanner
from edgespec.planners.specexec import SpecExecPlanner
from edgespec.planners.sssd import SssdPlanner

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


@pytest.fixture(scope="module", params=few(FAMILIES, "llama", "mistral, window", "gpt-oss", "gemma2"))
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
    assert target.streamers
    planners = [SpecExecPlanner(draft, depth=8, beam=4, tau=0.3), SssdPlanner()]
    assert check_lossless(target, planners, [5, 9, 30, 7, 9, 30], sampling, 16)[0] > 2


def test_a_wrong_text_is_noticed(tmp_path):
    check_wrong_text(load(str(save(tiny_model("llama"), tmp_path)), **OPTIONS), [5, 9, 30, 7, 9, 30], 24)


@pytest.mark.exhaustive
@by_temperature
def test_smollm2_with_trees_and_copies(smollm2_models, sampling):
    target, same, damaged = smollm2_models
    prompt = target.vocab.encode("def is_prime(n):\n    ", add_bos=True, parse_special=False)
    drafted = [SpecExecPlanner(same, depth=6, beam=4), SpecExecPlanner(damaged, depth=4, beam=4)]
    lengths = check_lossless(target, [*drafted, SssdPlanner(), LookaheadPlanner()], prompt, sampling, 12)
    assert lengths[0] > 2


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
