"""Files of JSON lines, one for each object of a dataclass: an interrupted program goes on where it stopped."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from inspect import signature
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter

from edgespec.errors import UsageError
from edgespec.machine.files import may_wait

Line = TypeVar("Line")


def resume(path: Path, kind: type[Line], options: Mapping[str, Any] | None = None) -> list[Line]:
    """The objects of a file, if there is one, without a last line that was cut short; the file stays as it is.

    Args:
        path: of the file.
        kind: of the objects.
        options: with which they must have been made, if they have `options`.

    Raises:
        UsageError: it holds something else, was made with other options, or cannot be read.
    """
    if may_wait(path):
        raise UsageError(f"{path}: is a pipe or a device, not a file")
    names, form = signature(kind).parameters, TypeAdapter(kind)

    def read(line: bytes) -> Line:
        if json.loads(line).keys() - names:
            raise ValueError("the line has other fields")
        return form.validate_json(line, strict=True)

    try:
        data = path.read_bytes() if path.exists() else b""
        whole = _whole(data)
        found = list(map(read, whole.splitlines()))
        start, cut = f'{{"{next(iter(names))}": '.encode(), data[len(whole) :]
        if cut[: len(start)] != start[: len(cut)]:
            raise ValueError("the last line is no part of such a line")
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, AttributeError, RecursionError) as error:
        raise UsageError(f"{path}: holds something else: name another file, or a new one") from error
    for one in found:
        if other := [name for name, value in (options or {}).items() if getattr(one, "options", {}).get(name) != value]:
            raise UsageError(f"{path}: was made with other {' and '.join(other)}: name another file, or a new one")
    return found


def _whole(data: bytes) -> bytes:
    """A file without a last line that was cut short: one that has no end and is no JSON."""
    end = data.rfind(b"\n") + 1
    try:
        json.loads(data[end:])
    except (ValueError, RecursionError):
        return data[:end]
    return data


def append(path: Path, line: Any) -> None:
    """Add a line, whole or not at all, after what `resume` found; raises OSError, as on a full disk."""
    left = json.dumps(asdict(line)).encode() + b"\n"
    with path.open("a+b", buffering=0) as file:
        end = file.tell()
        file.seek(max(end - 1, 0))
        if file.read(1) not in (b"", b"\n"):
            file.seek(0)
            whole = _whole(file.read())
            end = file.truncate(len(whole))
            left = (b"" if whole.endswith(b"\n") or not whole else b"\n") + left
        try:
            while left:
                left = left[file.write(left) :]
        except OSError:
            file.truncate(end)  # else the next line would continue this one
            raise
