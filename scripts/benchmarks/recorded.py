"""Answers that `scripts/bench-sssd record` wrote."""

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from edgespec.errors import UsageError, VocabMismatch
from edgespec.loop.backend import Vocab
from edgespec.measure.json_lines import resume
from edgespec.measure.replay import Recording


def read_answers(path: Path, least: int = 1) -> list[Recording]:
    """The answers that drafts can write: the prompt gives the first token.

    Raises:
        UsageError: it holds something else, or fewer such answers.
    """
    found = resume(path, Recording)
    for number, one in enumerate(found, 1):
        if not (one.prompt_ids and all(map(_are_ids, (one.prompt_ids, one.output_ids)))):
            raise UsageError(f"{path}, line {number}: needs `prompt_ids` and `output_ids`, lists of token ids")
    long = [one for one in found if len(one.output_ids) > 1]
    if len(long) < least:
        raise UsageError(f"{path}: has {len(long)} answers of two tokens and more, but must have at least {least}")
    return long


def _are_ids(ids: Any) -> bool:
    return isinstance(ids, list) and all(type(one) is int and one >= 0 for one in ids)


def check_tokens(path: Path, answers: Sequence[Recording], vocab: Vocab) -> None:
    """
    Raises:
        VocabMismatch: the draft does not have their tokens.
    """
    largest = max(chain.from_iterable((*one.prompt_ids, *one.output_ids) for one in answers))
    if largest >= vocab.size:
        raise VocabMismatch(f"{path}: has the token {largest}, but the draft's vocabulary has {vocab.size} tokens")
