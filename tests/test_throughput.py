"""Texts at once, measured: every one is written, and each is what it is alone."""

from edgespec.backends.reference.backend import ReferenceBackend, random_model

from benchmarks.throughput import Shared, write_at_once
from edgespec.model import Model
from edgespec.planners.sssd import SssdPlanner


def test_texts_at_once_are_counted() -> None:
    target = ReferenceBackend(random_model(2, vocab_size=48), sessions=3)
    prompts = ["one", "two words", "three", "four"]
    with Model(target, [SssdPlanner() for _ in range(3)], budget=4) as model:
        alone, shared = Shared(), Shared()
        texts = write_at_once(model, prompts, 1, alone, max_tokens=9, temperature=0.7)
        assert write_at_once(model, prompts, 3, shared, max_tokens=9, temperature=0.7) == texts
    assert alone.tokens == shared.tokens == sum(map(len, texts)) > 0
    assert len(shared.first) == 4
    assert shared.passes < alone.passes
    assert shared.seconds > 0
