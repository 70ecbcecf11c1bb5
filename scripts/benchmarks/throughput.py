"""How many tokens a second several texts get that share one model's passes, against one after another."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from time import perf_counter

from edgespec.model import Model, Prompt


@dataclass(slots=True)
class Shared:
    """What so many texts at once took."""

    tokens: int = 0
    seconds: float = 0.0
    first: list[float] = field(default_factory=list)  # seconds until each text's first token
    passes: int = 0


def write_at_once(
    model: Model, prompts: Sequence[Prompt], at_once: int, shared: Shared, *, max_tokens: int, temperature: float
) -> list[list[int]]:
    """Write an answer to each prompt, so many at a time, with a cache that knows nothing of them; adds to `shared`."""

    def write(number: int, prompt: Prompt) -> list[int]:
        started, token_ids = perf_counter(), list[int]()
        for chunk in model.stream(prompt, max_tokens=max_tokens, temperature=temperature, seed=number):
            if not token_ids:
                shared.first.append(perf_counter() - started)
            if chunk.token_id is not None:
                token_ids.append(chunk.token_id)
        return token_ids

    model.scheduler.forget()
    passes, started = model.scheduler.counts.passes, perf_counter()
    with ThreadPoolExecutor(at_once) as pool:
        texts = list(pool.map(write, range(len(prompts)), prompts))
    shared.seconds += perf_counter() - started
    shared.passes += model.scheduler.counts.passes - passes
    shared.tokens += sum(map(len, texts))
    return texts
