"""Search over thoughts with a scorer, as SeeD drafts for it (COLING 2025)."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from edgespec.errors import UsageError, check_number, check_whole, must_be
from edgespec.model import MOST_BRANCHES, Model, Prompt, seeded
from edgespec.scheduler.events import GenerationResult


def search(
    model: Model,
    prompt: Prompt,
    score: Callable[[list[str]], Sequence[float]],
    *,
    width: int = 4,
    keep: int = 1,
    depth: int = 8,
    **options: Any,
) -> list[GenerationResult]:
    """Search over thoughts: in each round every sequence goes on with `width` thoughts, and the best are kept.

    Args:
        model: writes the thoughts.
        prompt: as for `Model.stream`.
        score: of the texts so far, a number each; a larger one is better.
        width: thoughts that a sequence goes on with.
        keep: sequences that a round keeps.
        depth: most rounds.
        options: as for `Model.branch`, without `grammar`; `stop` (default: an empty line) and `max_tokens` end one.
            Thought i of round r has seed + r * keep * width + i.

    Returns:
        The sequences of the last round, best first, each with the stats of its last thought.
    """
    width, depth = check_whole("width", width, 1, MOST_BRANCHES), check_whole("depth", depth, 1)
    keep = check_whole("keep", keep, 1, MOST_BRANCHES // width)
    if not callable(score):
        raise must_be("score", score, "a function")
    first = model.request(prompt, **{"stop": "\n\n"} | options)
    if first.grammar:
        raise UsageError("search takes no grammar: each thought would have to match it")
    if first.sampling.presence_penalty or first.sampling.frequency_penalty:
        raise UsageError("presence_penalty and frequency_penalty would count in one thought only: leave them at 0")
    limits, vocab, texts = model.target.capabilities, model.target.vocab, [GenerationResult()]
    hint_texts = model.hint_texts(first.prompt_ids, options.get("prediction"), 1 + width * keep)
    first = replace(first, hint_texts=hint_texts)

    def is_whole(text: GenerationResult) -> bool:
        ids = text.token_ids
        return bool(ids) and (ids[-1] in vocab.eog_ids or len(first.prompt_ids) + len(ids) >= limits.context_length)

    for number in range(depth):
        begun = [text for text in texts if not is_whole(text) for _ in range(width)]
        if not begun:
            break
        requests = [
            replace(one, prompt_ids=first.prompt_ids + text.token_ids)
            for one, text in zip(seeded(first, len(begun), number * keep * width), begun, strict=True)
        ]
        found = {tuple(text.token_ids): text for text in texts if is_whole(text)}
        for text, thought in zip(begun, model.answer(requests), strict=True):
            token_ids = text.token_ids + thought.token_ids
            found.setdefault(tuple(token_ids), GenerationResult(model.decode(token_ids), token_ids, thought.stats))
        texts = best_first(list(found.values()), score)[:keep]
    return texts


def best_first(texts: list[GenerationResult], score: Callable[[list[str]], Sequence[float]]) -> list[GenerationResult]:
    scores = score([one.text for one in texts])
    if not hasattr(scores, "__len__") or len(scores) != len(texts):
        raise must_be("what score returns", scores, f"a list of {len(texts)} numbers")
    for value in scores:
        check_number("a score", value, lambda value: not math.isnan(value), "a number")
    return [texts[i] for i in sorted(range(len(texts)), key=lambda i: -scores[i])]
