"""SmolLM2 in float32 on every engine: the same logits, and the same text but for explained ties."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from alone import Generation

from edgespec.loading.by_name import load_backend
from edgespec.loop.backend import Backend, Work
from edgespec.loop.passes import prefill
from edgespec.loop.sampling import SamplingParams
from edgespec.loop.stats import GenerationStats
from edgespec.measure.lossless import explain, replay
from edgespec.planners.none import NonePlanner

PAIRS = [("llamacpp", "torch"), ("llamacpp", "mlx"), ("torch", "mlx")]
STORY = "The lighthouse keeper wrote down the weather, every ship that passed, and what the gulls had stolen from him. "
PROMPTS = ["Once upon a time, a fox", "def is_prime(n):\n    "]
SAMPLINGS = [SamplingParams(), SamplingParams(temperature=0.8, seed=1)]
NODES, TOKENS = 30, 8
OPTIONS = {"context_length": 256, "budget": NODES}


@dataclass(frozen=True)
class Engine:
    """A backend and what it computed."""

    backend: Backend
    tree: np.ndarray  # logits, shape [NODES, V]
    texts: list[list[int]]  # for each prompt, with its sampling


def compute(backend: Backend) -> Engine:
    """MLX computes one token after the other on Linux, 0.1 s each, so every engine computes everything once."""
    prompt, tokens, parents = a_tree(backend)
    session, nodes = backend.open(), np.arange(NODES, dtype=np.int32)
    prefill(backend, session, prompt)
    logits = backend.forward([Work(session, tokens, parents, nodes)])[0]
    tree = np.stack([logits.row(node) for node in range(NODES)])
    texts = []
    for ids, sampling in zip(prompts(backend), SAMPLINGS, strict=True):
        rounds = Generation(
            backend, session, NonePlanner(), ids, sampling, max_tokens=TOKENS, budget=1, stats=GenerationStats()
        ).steps()
        texts.append([token for round_ in rounds for token in round_.tokens])
    session.close()
    return Engine(backend, tree, texts)


def a_tree(backend: Backend) -> tuple[list[int], np.ndarray, np.ndarray]:
    """50 tokens of prose, and the tokens and parents of a tree with branches and chains."""
    prompt = backend.vocab.encode(STORY * 20, add_bos=True, parse_special=False)[:50]
    assert len(prompt) == 50
    generator = np.random.default_rng(3)
    tokens = generator.choice(np.arange(100, backend.vocab.size), NODES, replace=False).astype(np.int32)
    parents = np.array([generator.integers(max(-1, i - 6), i) for i in range(NODES)], np.int32)
    return prompt, tokens, parents


def prompts(backend: Backend) -> list[list[int]]:
    return [backend.vocab.encode(text, add_bos=True, parse_special=False) for text in PROMPTS]


@pytest.fixture(scope="module", params=["six layers", pytest.param("whole", marks=pytest.mark.exhaustive)])
def size(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def gguf(request: pytest.FixtureRequest, size: str) -> Path:
    return request.getfixturevalue("smollm2_f32" if size == "whole" else "smollm2_tiny_f32")


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, size: str) -> Path:
    """Of the same weights as the file: a model of 4 bits, in float32."""
    return request.getfixturevalue("smollm2_hf" if size == "whole" else "smollm2_tiny_hf")


@pytest.fixture(scope="module")
def llamacpp(gguf: Path) -> Iterator[Engine]:
    backend = load_backend("llamacpp", str(gguf), **OPTIONS, threads=1)
    yield compute(backend)
    backend.close()


@pytest.fixture(scope="module")
def torch(folder: Path) -> Iterator[Engine]:
    pytest.importorskip("torch", reason="needs PyTorch: pip install 'edgespec[torch]'")
    backend = load_backend("torch", str(folder), **OPTIONS, threads=1)
    yield compute(backend)
    backend.close()


@pytest.fixture(scope="module")
def mlx(folder: Path) -> Iterator[Engine]:
    pytest.importorskip("mlx_lm", reason="mlx-lm is not installed: pip install 'edgespec[mlx]'")
    backend = load_backend("mlx", str(folder), **OPTIONS)
    yield compute(backend)
    backend.close()


@pytest.fixture(params=PAIRS, ids="-".join)
def pair(request: pytest.FixtureRequest, size: str) -> list[Engine]:
    return [request.getfixturevalue(name) for name in request.param]


def test_logits_of_a_tree_agree(pair: list[Engine]) -> None:
    one, other = pair
    np.testing.assert_allclose(one.tree, other.tree, rtol=0, atol=1e-3)  # seen: 1.3e-4


def test_wrong_logits_are_noticed(llamacpp: Engine) -> None:
    """The check above can fail: different nodes' logits are far apart."""
    gaps = np.abs(llamacpp.tree[1:] - llamacpp.tree[:-1]).max(axis=1)
    assert gaps.min() > 1


def test_texts_agree(pair: list[Engine]) -> None:
    """Same seed, same text. Where texts part, both engines' rounding together must explain it, there and after it."""
    one, other = pair
    tolerance = sum(engine.backend.capabilities.logit_tolerance for engine in pair)
    cases = zip(prompts(one.backend), SAMPLINGS, strict=True)
    for (prompt, sampling), plain, text in zip(cases, one.texts, other.texts, strict=True):
        found = explain(one.backend, prompt, plain, text, sampling, tolerance)
        if found is not None:
            later = replay(one.backend, prompt, text, sampling, tolerance)
            bad = [divergence for divergence in (found, *later) if not divergence.tie]
            assert not bad, f"{sampling}: " + "; ".join(map(str, bad))
