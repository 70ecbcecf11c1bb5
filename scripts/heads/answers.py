"""Tokens that a head is trained on: a target's own answers to prompts.

Each is one line of a JSONL file, so that a stopped run goes on.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.turns import as_they_end
from edgespec.errors import ContextFull
from edgespec.loop.text import user_messages
from edgespec.measure.json_lines import append, resume
from edgespec.model import Model

HELD_OUT = 20  # of as many prompts, one is not trained on
Progress = Callable[[int, int], None]  # done, in all


@dataclass(frozen=True, slots=True)
class Line:
    """
    Attributes:
        number: of a prompt's answer.
        token_ids: as `Sample` has them.
        start: likewise.
    """

    prompt: str
    number: int
    token_ids: list[int]
    start: int


@dataclass(frozen=True, slots=True)
class Sample:
    """
    Attributes:
        token_ids: of a prompt and its answer.
        start: of the answer.
        greedy: the answer is that of temperature 0.
        held_out: not to be trained on.
    """

    token_ids: list[int]
    start: int
    greedy: bool
    held_out: bool

    @property
    def first(self) -> int:
        """The first row to train on, that of the token before the answer; row i has token i + 1, and predicts i + 2."""
        return max(self.start - 2, 0)

    @property
    def rows(self) -> int:
        return len(self.token_ids) - 2 - self.first


def answer(
    model: Model, pool: Executor, prompts: Sequence[str], path: Path, *, answers: int, progress: Progress, **how: Any
) -> int:
    """Append the target's answers that `path` lacks: of each prompt the first greedy, the others sampled.

    Args:
        model: the target, closed before the pool.
        pool: asks, and has more threads than the model has places, so that none stays empty.
        prompts: the questions.
        path: of a file of `Line`.
        answers: to each prompt.
        progress: called with answers that are there, and in all.
        how: options of `Model.generate`; the temperature is that of sampled answers.

    Returns:
        Number of answers that are left out, because their prompts are too long.
    """
    there = {(line.prompt, line.number) for line in resume(path, Line)}
    jobs = [(text, number) for number in range(answers) for text in dict.fromkeys(prompts)]
    left = [job for job in jobs if job not in there]

    def ask(job: tuple[str, int]) -> Line | None:
        text, number = job
        messages = user_messages(text, model.system)
        try:
            result = model.generate(messages, seed=number, **how | ({} if number else {"temperature": 0}))
        except ContextFull:
            return None
        before = model.encode(messages)
        return Line(text, number, before + result.token_ids, len(before))

    done, too_long = len(jobs) - len(left), 0
    progress(done, len(jobs))
    for _, line in as_they_end(pool, ask, left):
        if line is None:
            too_long += 1
            continue
        append(path, line)
        done += 1
        progress(done, len(jobs))
    return too_long


def read_samples(path: Path) -> Iterator[Sample]:
    """
    Yields:
        The samples of a file, in order. A prompt's answers are held out, or none of them.
    """
    numbers = dict[str, int]()
    for line in resume(path, Line):
        prompt = numbers.setdefault(line.prompt, len(numbers))
        yield Sample(line.token_ids, line.start, line.number == 0, prompt % HELD_OUT == 0)
