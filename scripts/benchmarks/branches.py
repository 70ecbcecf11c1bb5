"""What branches gain: k continuations of a prompt at once against k runs, one after another."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

from edgespec.model import GenerationResult, Model, Prompt

WAYS = ("branch", "runs, prompt kept", "runs")


@dataclass(frozen=True, slots=True)
class Timed:
    """One prompt, in each of `WAYS`."""

    seconds: Sequence[float]
    passes: Sequence[int]  # of the target, those that read the prompt included
    tokens: int  # of all k texts
    same: bool  # texts were the same in all ways


def compare(model: Model, prompt: Prompt, k: int, **options: object) -> Timed:
    """Write k continuations in each way, every time with a cache that knows nothing of the prompt.

    Args:
        model: with room for k texts at once (`parallel` of `load`).
        prompt: as for `Model.stream`.
        k: how many.
        options: as for `Model.branch`, `seed` among them.
    """
    seed = int(str(options.pop("seed", 0)))

    def runs(forget: bool) -> list[GenerationResult]:
        found = list[GenerationResult]()
        for i in range(k):
            if forget:
                model.scheduler.forget()
            found.append(model.generate(prompt, seed=seed + i, **options))
        return found

    ways: list[Callable[[], list[GenerationResult]]] = [
        lambda: model.branch(prompt, k, seed=seed, **options),
        lambda: runs(False),
        lambda: runs(True),
    ]
    seconds, passes, texts = list[float](), list[int](), list[list[list[int]]]()
    for way in ways:
        model.scheduler.forget()
        before, started = model.scheduler.counts.passes, perf_counter()
        found = way()
        seconds.append(perf_counter() - started)
        passes.append(model.scheduler.counts.passes - before)
        texts.append([one.token_ids for one in found])
    return Timed(seconds, passes, sum(map(len, texts[0])), texts[0] == texts[1] == texts[2])
