"""Problems whose answer is a number, such as GSM8K's."""

import json
import re
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any, TypeVar

from edgespec.errors import UsageError
from edgespec.machine.files import read_text

Found = TypeVar("Found")
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


def read_records(
    path: Path, limit: int | None, take: Callable[[int, dict[str, Any]], Found], right: str
) -> list[Found]:
    """
    Args:
        path: of a file with a record a line.
        limit: number of records to take, evenly spaced; None: all.
        take: finds what is needed in a record, of which it also gets the number.
        right: describes the records, for messages.

    Raises:
        UsageError: there are other records, or none; or the file cannot be read.
    """
    try:
        lines = [line for line in read_text(path, UsageError).split("\n") if line.strip()]
        found = [take(number, json.loads(line)) for number, line in enumerate(lines)]
        if not found:
            raise ValueError
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise UsageError(f"{path}: needs {right}") from error
    count = min(len(found), limit or len(found))
    return [found[i * len(found) // count] for i in range(count)]


def read_questions(path: Path, limit: int | None) -> list[tuple[str, str]]:
    """
    Returns:
        Questions, evenly spaced, and their answers: GSM8K's records, a line each.

    Raises:
        UsageError: names the file.
    """
    found = read_records(path, limit, _question, "a question and an answer in each line")
    if wrong := [question for question, answer in found if answer is None]:
        raise UsageError(f"{path}: the answer to {wrong[0][:60]!r} has no number")
    return [(question, answer) for question, answer in found if answer is not None]


def _question(_: int, record: dict[str, Any]) -> tuple[str, str | None]:
    question: str = record["question"]
    if not question.strip().encode():  # fails for half a character, too
        raise ValueError
    return question, number_in(record["answer"].rpartition("####")[2])
