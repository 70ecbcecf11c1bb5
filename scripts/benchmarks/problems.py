"""Problems whose answer is a number, such as GSM8K's."""

import json
import re
from decimal import Decimal
from pathlib import Path

from edgespec.errors import UsageError
from edgespec.measure.texts import read_prompts

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def numbers_in(text: str) -> list[Decimal]:
    """All numbers of a text, which may have commas between thousands."""
    return [Decimal(one.replace(",", "")) for one in NUMBER.findall(text)]


def last_number(text: str) -> Decimal | None:
    """The last number, such as an answer after ####."""
    return next(reversed(numbers_in(text)), None)


def number_in(text: str) -> str | None:
    """The last number of a text, without commas and needless zeros."""
    found = last_number(text)
    return None if found is None else f"{found.normalize():f}"


def read_questions(path: Path, limit: int | None) -> list[tuple[str, str]]:
    """
    Returns:
        Questions, evenly spaced, and their answers: GSM8K's records, a line each.

    Raises:
        UsageError: names the file.
    """
    asked = [one.text for one in read_prompts(path, limit)]
    try:
        records = [json.loads(line) for line in path.read_text("utf-8-sig").split("\n") if line.strip()]
        answers = {one["question"]: number_in(one["answer"].rpartition("####")[2]) for one in records}
        found = [(question, answers[question]) for question in asked]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{path}: needs a question and an answer in each line") from error
    if wrong := [question for question, answer in found if answer is None]:
        raise UsageError(f"{path}: the answer to {wrong[0][:60]!r} has no number")
    return [(question, answer) for question, answer in found if answer is not None]
