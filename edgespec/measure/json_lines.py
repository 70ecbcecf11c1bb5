"""Files of JSON lines, one for each object of a dataclass: an interrupted program goes on where it stopped."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from inspect import signature
from pathlib import Path
from typing import Any, TypeVar

from edgespec.errors import UsageError

Line = TypeVar("Line")


def resume(path: Path, kind: type[Line], options: Mapping[str, Any] | None = None) -> list[Line]:
    """The objects of a file, if there is one; a last line that was cut short is removed.

    Args:
        path: of the file.
        kind: of the objects.
        options: with which they must have been made, if they have `options`.

    Raises:
        UsageError: it holds something else, was made with other options, or cannot be read.
    """
    try:
        lines = path.read_text("utf-8").splitlines(keepends=True) if path.exists() else []
        whole = [line for line in lines if line.endswith("\n")]
        found = [kind(**json.loads(line)) for line in whole]
        if whole != lines:
            start = f'{{"{next(iter(signature(kind).parameters))}": '
            if lines[-1][: len(start)] != start[: len(lines[-1])]:
                raise ValueError("the last line is no part of such a line")
            path.write_text("".join(whole), "utf-8")
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, TypeError) as error:
        raise UsageError(f"{path}: holds something else: name another file, or a new one") from error
    for one in found:
        if other := [name for name, value in (options or {}).items() if getattr(one, "options", {}).get(name) != value]:
            raise UsageError(f"{path}: was made with other {' and '.join(other)}: name another file, or a new one")
    return found


def append(path: Path, line: Any) -> None:
    """Add a line, whole or not at all; raises OSError, as on a full disk."""
    left = memoryview((json.dumps(asdict(line)) + "\n").encode())
    with path.open("ab", buffering=0) as file:
        end = file.tell()
        try:
            while left:
                left = left[file.write(left) :]
        except OSError:
            file.truncate(end)  # else the next line would continue this one
            raise
