"""Variants in turn, so that a busy machine or a tired disk slows all alike; and several questions at once."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, as_completed
from typing import Any, TypeVar

import numpy as np

Variant = TypeVar("Variant")
Question = TypeVar("Question")
Answer = TypeVar("Answer")
DRAWS = 4000  # of the bootstrap


def turns(
    variants: Mapping[str, Variant], questions: int, rounds: int, say: Callable[[str], None]
) -> Iterator[tuple[str, Variant, range]]:
    """
    Args:
        variants: by name.
        questions: how many there are; 0: none are asked.
        rounds: parts of the questions, at most one of each.
        say: called with a line before each turn.

    Yields:
        Name, variant and numbers of the questions of each turn: all variants have the first part, then the next one.
    """
    rounds = min(rounds, questions or rounds)
    for number in range(rounds):
        for name, variant in variants.items():
            say(f"{name}, part {number + 1} of {rounds}")
            yield name, variant, range(number, questions, rounds)


def as_they_end(
    pool: Executor, ask: Callable[[Question], Answer], asked: Iterable[Question]
) -> Iterator[tuple[Question, Answer]]:
    """Each question with its answer. A caller that leaves early closes the model before the pool."""
    running = {pool.submit(ask, one): one for one in asked}
    for done in as_completed(running):
        yield running[done], done.result()


def ratio(runs: Sequence[Mapping[str, Any]], base: Sequence[Mapping[str, Any]]) -> tuple[float, float, float]:
    """Tokens per second in proportion to another variant's, and the ends of the 95 % interval (bootstrap over prompts).

    Args:
        runs: `tokens` and `seconds` of each prompt.
        base: the same prompts.
    """
    figures = np.array(
        [[run["tokens"], run["seconds"], was["tokens"], was["seconds"]] for run, was in zip(runs, base, strict=True)]
    )
    draws = np.random.default_rng(0).integers(len(figures), size=(DRAWS, len(figures)))
    sums = np.vstack([figures.sum(0), figures[draws].sum(1)])
    found = sums[:, 0] / sums[:, 1] / (sums[:, 2] / sums[:, 3])
    low, high = np.quantile(found[1:], [0.025, 0.975])
    return float(found[0]), float(low), float(high)
