"""Files of one JSON value, such as published answers and conversations."""

import gzip
import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from edgespec.errors import UsageError

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
    try:
        data = path.read_bytes()
        return take(json.loads(gzip.decompress(data) if path.suffix == ".gz" else data))
    except (OSError, EOFError, zlib.error) as error:
        raise UsageError(f"{path}: cannot be read: {error}") from error
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise UsageError(f"{path}: must be {right}") from error
