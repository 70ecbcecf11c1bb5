"""Typed errors, and the checks of a caller's values; each message is a sentence that a user can act on."""

import math
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import is_dataclass
from difflib import get_close_matches
from importlib import import_module
from importlib.util import find_spec
from itertools import islice
from numbers import Real
from operator import index
from os import PathLike, fsencode, fspath
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Union, get_args, get_origin, get_type_hints

if TYPE_CHECKING:
    from pydantic import ValidationError

MOST_SHOWN = 80  # characters of a wrong value in a message
PYDANTIC_TYPE = re.compile(r"should be a (?:valid )?(boolean|dictionary|integer|list|number|string|tuple)\b")
TYPES = {
    "boolean": "true or false", "dictionary": "a mapping of names to values", "integer": "a whole number",
    "list": "a list", "number": "a number", "string": "a text", "tuple": "a list",
}  # fmt: skip
Location = tuple[str | int, ...]  # of a value in lists and mappings: their keys, outermost first


class EdgespecError(Exception):
    """Something went wrong outside the user's command line: exit code 1."""

    exit_code = 1


class UsageError(EdgespecError):
    """An argument or option is wrong: exit code 2."""

    exit_code = 2


class NoRoom(UsageError):
    """The model needs more memory than it may use."""


class ModelError(EdgespecError):
    """A model file is missing, damaged, or of a kind that cannot be run."""


class VocabMismatch(EdgespecError):
    """Two models, or a model and a datastore, do not share one vocabulary."""


class ContextFull(EdgespecError):
    """The sequence does not fit into the context."""


class DatastoreError(EdgespecError):
    """A datastore is missing, damaged, or built with another tokenizer."""


class SessionFileError(EdgespecError):
    """A saved session is missing, damaged, or of another model; or it cannot be written."""


class DamagedSession(SessionFileError):
    """The bytes of a saved session are not those that were saved."""


class Interrupted(EdgespecError):
    """A pass was interrupted: see `Backend.interrupt`."""


class Closed(EdgespecError):
    """The model was closed."""

    def __init__(self, message: str = "the model was closed") -> None:
        super().__init__(message)


class OtherProcess(EdgespecError):
    """A fork of the program uses an object that needs its parent's threads."""

    def __init__(self, what: str, made_by: int, here: int) -> None:
        says = f"process {made_by} made this {what}, and its fork {here} has none of the threads that it needs"
        super().__init__(f"{says}: make one in each process, or start processes with spawn")


class RegistryError(EdgespecError):
    """models.yaml is missing, broken, or does not have the name asked for."""


def pip_install(*what: str) -> str:
    """The command that installs packages for the Python that runs this; uv makes environments without pip."""
    here = os.path.join(os.getcwd(), "")
    join = subprocess.list2cmdline if os.name == "nt" else shlex.join  # PowerShell runs no command in quotes
    python = sys.executable.removeprefix(here)
    pip = [python, "-m", "pip", "install"] if find_spec("pip") else ["uv", "pip", "install", "--python", python]
    return join([*pip, *what])


class MissingPackage(EdgespecError):
    """A package is not installed; the message has the pip command.

    Args:
        package: that is missing.
        extra: of edgespec, which brings the package; "": pip gets `package` itself.
        purpose: what needs it, as the message's subject.
    """

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        what = f"edgespec[{extra}]" if extra else package
        super().__init__(f"{purpose} needs the package {package!r}: {pip_install(what)}")
        self._given = package, extra, purpose

    def __reduce__(self) -> "tuple[type[MissingPackage], tuple[str, str, str]]":
        return MissingPackage, self._given  # pickled by another process


def installed(package: str, extra: str, purpose: str) -> Any:
    """An imported package; raises MissingPackage, which has the same arguments."""
    try:
        return import_module(package.replace("-", "_"))
    except ImportError as error:
        raise MissingPackage(package, extra, purpose) from error


@contextmanager
def failing_as(kind: Callable[[str], Exception], says: str) -> Iterator[None]:
    """Have an error of the system (OSError) be one of this kind, which says what failed, and why."""
    try:
        yield
    except OSError as error:
        raise kind(f"{says}: {error.strerror or error}") from error


def first_line(error: BaseException) -> str:
    """What a library's error says, or else its type."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


@contextmanager
def named(name: str, kind: type[EdgespecError] = ModelError) -> Iterator[None]:
    """Have errors of this kind that do not begin with a name, such as a file's, do so."""
    try:
        yield
    except kind as error:
        if str(error).startswith(f"{name}: "):
            raise
        raise kind(f"{name}: {error}") from error


@contextmanager
def undone(undo: Callable[[], object]) -> Iterator[None]:
    """Call this after an error, Ctrl-C included, so that nothing is left half made."""
    try:
        yield
    except BaseException:
        undo()
        raise


def must_be(name: str, value: object, right: str) -> UsageError:
    """The error for an argument with a wrong value."""
    return UsageError(f"{name} is {shown(value)}, but must be {right}")


def shown(value: object) -> str:
    """The start of a value's representation, for a message."""
    try:
        text = " ".join(repr(_begun(value)).split())
    except (ValueError, RecursionError):  # of an integer with thousands of digits, of lists in each other
        text = f"of {type(value).__name__}"
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}…"


def _begun(value: Any) -> Any:
    """The parts of a value that a message may show. To represent megabytes would stop all other threads."""
    if type(value) in (list, str, tuple):
        value = value[: MOST_SHOWN + 1]
    if type(value) in (list, tuple):
        return type(value)(map(_begun, value))
    return {_begun(key): _begun(value[key]) for key in islice(value, MOST_SHOWN)} if type(value) is dict else value


def check_whole(name: str, value: Any, low: int, high: int | None = None) -> int:
    """A whole number, also one of numpy.

    Raises:
        UsageError: `value` is no whole number from `low` to `high`.
    """
    right = f"at least {low}" if high is None else f"from {low} to {high}"
    try:
        number = None if isinstance(value, bool) else index(value)
    except TypeError:
        number = None
    if number is None:
        raise must_be(name, value, f"a whole number, {right}")
    if number < low or (high is not None and number > high):
        raise must_be(name, value, right)
    return number


def check_number(name: str, value: Any, good: Callable[[float], bool], right: str) -> float:
    """A number, also one of numpy.

    Raises:
        UsageError: `value` is no number, or not `good`, which `right` describes.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise must_be(name, value, f"a number, {right}")
    try:
        found = float(value)
    except OverflowError:
        found = math.inf
    if not good(found):
        raise must_be(name, value, right)
    return found


def check_text(name: str, value: Any) -> str:
    """
    Raises:
        UsageError: `value` is no text, or none that UTF-8 can hold.
    """
    if not isinstance(value, str):
        raise must_be(name, value, "a text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"{name} has half a surrogate pair, which no UTF-8 text can have") from error
    return value


def check_path(name: str, value: "str | PathLike[str]") -> str:
    """
    Raises:
        UsageError: `value` is no text and no path, or no file can have this name.
    """
    found = fspath(value) if isinstance(value, PathLike) else value
    try:
        if isinstance(found, str) and found and b"\0" not in fsencode(found):
            return found
    except UnicodeEncodeError:
        pass
    raise must_be(name, value, "a name or a path")


def check_flag(name: str, value: Any) -> bool:
    """
    Raises:
        UsageError: `value` is neither True nor False.
    """
    if not isinstance(value, bool):
        raise must_be(name, value, "True or False")
    return value


def check_call(name: str, value: Any) -> None:
    """
    Raises:
        UsageError: `value` is neither a function nor None.
    """
    if value is not None and not callable(value):
        raise must_be(name, value, "a function")


def check_texts(name: str, value: Any) -> tuple[str, ...]:
    """Texts of which a caller gives one, several, or None for none.

    Raises:
        UsageError: `value` is nothing of these.
    """
    if value is None or isinstance(value, str):
        return (check_text(name, value),) if value is not None else ()
    if not isinstance(value, Sequence) or isinstance(value, bytes):
        raise must_be(name, value, "a text or a list of texts")
    return tuple(check_text(f"one of {name}", one) for one in value)


@contextmanager
def told_as(path: str, name: str) -> Iterator[None]:
    """Have errors name what the user has named, in place of a file made for it."""
    try:
        yield
    except EdgespecError as error:
        error.args = (str(error).replace(path, name),)
        raise


def no_such(kind: str, name: str, known: Collection[str], cutoff: float = 0.6) -> UsageError:
    """The error for a name that does not exist; it says which similar names do, else all."""
    return UsageError(f"there is no {kind} {name!r}; {_instead(name, known, cutoff)}")


def unknown_key(key: str, known: Collection[str]) -> str:
    """What is wrong with a key that nothing reads; it says which similar ones are read, else all."""
    return f"unknown key {key!r}; {_instead(key, known)}"


def _instead(name: str, known: Collection[str], cutoff: float = 0.6) -> str:
    near = get_close_matches(name, known, cutoff=cutoff)
    return f"did you mean {' or '.join(near)}?" if near else f"there are: {', '.join(known) or 'none'}"


def first_mistake(error: "ValidationError", kind: Any) -> tuple[Location, str]:
    """
    Args:
        error: of pydantic, for a value that should be of a type.
        kind: the type: a model of pydantic, or a dataclass.

    Returns:
        Where the value's first mistake is, and a line for a user: what is wrong there, and what would be right.
    """
    found = [(*_place(kind, one["loc"]), one) for one in error.errors()]
    first = found[0][0]
    # Of a value that may be of several types, the mistake is in the type that fits up to the innermost place.
    where, known, details = max((one for one in found if one[0][: len(first)] == first), key=lambda one: len(one[0]))
    path, outer = (".".join(map(str, keys)) for keys in (where, where[:-1]))
    if details["type"] == "extra_forbidden":
        return where, f"{outer}: {unknown_key(str(where[-1]), known)}".removeprefix(": ")
    if details["type"] == "missing":
        return where, f"{path} is missing"
    if details["type"] == "value_error":  # of a check of ours, whose message says it all
        return where, f"{path}: {details['ctx']['error']}".removeprefix(": ")
    rights = dict.fromkeys(_right(one["msg"]) for place, _, one in found if place == where)
    return where, str(must_be(path or "it", details["input"], " or ".join(rights)))


def _place(kind: Any, location: Location) -> tuple[Location, Collection[str]]:
    """
    Args:
        kind: as for `first_mistake`.
        location: of pydantic's, which names also those that it tried of several types.

    Returns:
        The keys alone, and the names that are known where the last one is.
    """
    where, known = list[str | int](), dict[Any, Any]()
    for part in location:
        kind = get_args(kind)[0] if get_origin(kind) is Annotated else kind
        types = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
        types = tuple(one for one in types if one is not NoneType)
        if len(types) > 1:
            kind = next((one for one in types if str(part).startswith(one.__name__)), None)
            continue
        known = {name: field.annotation for name, field in getattr(types[0], "model_fields", {}).items()}
        known |= get_type_hints(types[0]) if is_dataclass(types[0]) else {}
        inner = [one for one in get_args(types[0]) if one is not ...]
        kind = known.get(part) if known else inner[-1] if inner else None
        where.append(part)
    return tuple(where), known


def _right(says: str) -> str:
    """What a value should be, by pydantic's message."""
    if named := PYDANTIC_TYPE.search(says):
        return TYPES[named[1]]
    for words, plain in (
        ("String should have", "a text with"), ("String should match pattern", "a text like"),
        ("List should have", "a list with"), ("Dictionary should have", "a mapping with"),
    ):  # fmt: skip
        says = says.replace(words, plain)
    return says.removeprefix("Input should be ").partition(" after validation")[0]
