"""Files of one JSON value, such as published answers and conversations."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from edgespec.errors import UsageError
from edgespec.machine.files import read_text

Found = TypeVar("Found")


def read_json(path: Path, take: Callable[[Any], Found], right: str) -> Found:
    """
    Args:
        path: of the file, which may be gzipped.
        take: finds what is needed in its value.
        right: describes the value, for messages.

    Raises:
        UsageError: it cannot be read, or is something else.
    """
    text = read_text(path, UsageError)
    try:
        return take(json.loads(text))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise UsageError(f"{path}: must be {right}") from error
