"""Remember measurements from run to run, as small JSON files in the user's cache folder.

A file's name is a hash of all that the measurement depends on (`about`), and a file is replaced in one step, so nothing
is locked. Measurements only steer speed: a file that cannot be read or written counts as missing.
"""

import hashlib
import json
import os
import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Annotated, Any, TypeVar

from pydantic import Field, TypeAdapter, ValidationError

from edgespec.errors import EdgespecError
from edgespec.machine.files import cache_folder, cache_lasts, read_json_object, weight_files, write_whole
from edgespec.machine.system import all_processors, chip

VERSION = 1
MOST_FILES = 256
OFF = "EDGESPEC_NO_MEMORY_OF_COSTS"  # set to anything: nothing is read or written

About = Mapping[str, str | int | float | bool | None]
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]  # of something that is measured
Value = TypeVar("Value")


def folder() -> Path | None:
    try:
        return None if os.environ.get(OFF) else cache_folder() / "measured"
    except OSError:  # not even a temporary folder can be made
        return None


def recall(about: About, form: type[Value]) -> Value | None:
    """
    Args:
        about: all that the measurement depends on, with its kind.
        form: of the value: a type that pydantic knows.

    Returns:
        The value that was remembered, or None.
    """
    path = _path(about)
    found = _read(path) if path else None
    return checked(found["value"], form) if found and found["about"] == dict(about) else None


def checked(value: Any, form: type[Value]) -> Value | None:
    """A JSON value as an object of a type; None: it is none."""
    try:
        return TypeAdapter(form).validate_json(json.dumps(value), strict=True)
    except ValidationError:
        return None


def can_remember() -> bool:
    place = folder()
    if place is None:
        return False
    try:
        place.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile(dir=place, suffix=".new"):
            return True
    except OSError:
        return False


def why_not_kept() -> str:
    """A note for the user where measurements are lost with this process; ""."""
    if os.environ.get(OFF) or (cache_lasts() and can_remember()):
        return ""
    why = f"{folder()} cannot be written" if cache_lasts() else "there is no home folder"
    return f"measurements are not kept, because {why}, so every start takes longer; XDG_CACHE_HOME names another place"


def remember(about: About, value: Any) -> bool:
    """Remember a JSON value; False if that fails."""
    path = _path(about)
    if path is None:
        return False
    date = datetime.now(UTC).isoformat(timespec="seconds")
    text = json.dumps({"version": VERSION, "date": date, "about": dict(about), "value": value})
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text)
        for old in sorted(path.parent.glob("*.json"), key=_age)[MOST_FILES:]:
            old.unlink(missing_ok=True)
        return True
    except OSError:
        return False


def everything() -> list[dict[str, Any]]:
    place = folder()
    files = sorted(place.glob("*.json"), key=_age) if place and place.is_dir() else []
    return [found for found in map(_read, files) if found]


def forget() -> int:
    place = folder()
    files = list(place.glob("*.json")) if place and place.is_dir() else []
    for file in files:
        file.unlink(missing_ok=True)
    return len(files)


def processor_name() -> str:
    name = chip() or platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
        name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), name)
    except OSError:
        pass
    return f"{name}, {all_processors()} cores"


def identity(path: str) -> str:
    stats = [part.stat() for part in weight_files(path)]
    size, changed = sum(part.st_size for part in stats), max((part.st_mtime_ns for part in stats), default=0)
    return f"{Path(path).name}, {size} bytes, {changed}"


def _path(about: About) -> Path | None:
    place = folder()
    try:
        key = json.dumps(dict(about), sort_keys=True).encode()
    except ValueError:  # a number of more than 4,300 digits
        return None
    return place / f"{hashlib.sha256(key).hexdigest()[:32]}.json" if place else None


def _read(path: Path) -> dict[str, Any] | None:
    try:
        found = read_json_object(path, EdgespecError)
        json.dumps(found, allow_nan=False)  # refuses infinite numbers and NaN, which no measurement is
    except (EdgespecError, ValueError):
        return None
    whole = found.get("version") == VERSION and "value" in found
    return found if whole and isinstance(found.get("about"), dict) else None


def age(found: Mapping[str, Any]) -> str:
    """Age of one of `everything`, in words; "": not known."""
    try:
        days = (datetime.now(UTC) - datetime.fromisoformat(found["date"])).days
    except (KeyError, TypeError, ValueError):
        return ""
    return "from today" if days < 1 else f"{days} day{'s' * (days > 1)} old"


def _age(path: Path) -> float:
    try:
        return -path.stat().st_mtime
    except OSError:
        return 0.0
