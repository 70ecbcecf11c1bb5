"""The user's folders, by the rules of each system; files that are read with one line for what is wrong, and written
without losing others.
"""

import gzip
import json
import os
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from secrets import token_hex
from shutil import rmtree
from tempfile import mkdtemp
from time import time
from typing import IO, Any, NoReturn, cast

import platformdirs
import yaml

from edgespec.errors import EdgespecError, ModelError, UsageError, failing_as
from edgespec.machine.process import at_end

PNG = b"\x89PNG"
SPLIT_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")  # llama_split_path in llama.h
ABANDONED = 3600.0  # seconds without a write
SNIFF = 1 << 13  # first bytes of a file, in which a zero byte shows that it is not text
MOST_TEXT = 1 << 26  # bytes of a text file; those of models have some megabytes
# libyaml is ten times as fast, but ends the process where lists are nested too deeply, so it reads no user's file.
_LIBYAML = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
MOST_YAML = 1 << 18  # bytes: PyYAML takes a second for 100 KB
MOST_VALUES = 1 << 17  # of a YAML file
MOST_DIGITS = 64  # of a number in it


def cache_folder() -> Path:
    """The folder of measurements, sessions and recordings; without a home folder, a temporary one of this process."""
    return _user_folder("user_cache_path") or Path(_of_this_process(), "edgespec")


def cache_lasts() -> bool:
    return _user_folder("user_cache_path") is not None


def config_folder() -> Path | None:
    """The folder of the user's models.yaml; None: there is no home folder."""
    return _user_folder("user_config_path")


def _user_folder(kind: str) -> Path | None:
    named = Path(os.environ.get(f"XDG_{kind.split('_')[1].upper()}_HOME", ""))  # platformdirs ignores it on Windows
    if named.is_absolute():
        return named / "edgespec"
    try:
        folder: Path = getattr(platformdirs, kind)("edgespec", appauthor=False)
    except RuntimeError:  # newer versions raise it without a home folder, older ones keep the ~
        return None
    return folder if folder.is_absolute() else None


@cache
def _of_this_process() -> str:
    folder = mkdtemp(prefix="edgespec-")
    at_end(_of_this_process, rmtree, folder, True)
    return folder


def may_wait(path: str | Path) -> bool:
    """True for a pipe, socket or device: opening or reading it may take for ever."""
    return os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path)


def no_file(path: str | Path, kind: str = "file") -> ModelError:
    """The error for a model that is not there; it names what has a similar name beside it."""
    place, says = Path(path), f"{path}: there is no such {kind}"
    if len(parts := part_names(place.name)) > 1:
        return ModelError(f"{says}; a split GGUF needs all its {len(parts)} parts")
    beside = os.listdir(place.parent) if place.parent.is_dir() else []
    near = " or ".join(str(place.with_name(name)) for name in get_close_matches(place.name, beside, cutoff=0.75))
    return ModelError(f"{says}; did you mean {near}?" if near else says)


def no_model_folder(path: str | Path) -> ModelError:
    """The error for a folder without config.json; it names the GGUFs there."""
    files = sorted(map(str, Path(path).glob("*.gguf")))
    right = f": name a file in it, such as {files[0]}" if files else ""
    return ModelError(f"{path}: has no config.json, so it is not a model folder{right}")


def part_names(name: str) -> list[str]:
    """Of a GGUF, by the name of any part."""
    match = SPLIT_NAME.fullmatch(name)
    if not match or not int(match[3]):
        return [name]
    return [f"{match[1]}-{i + 1:05}-of-{match[3]}.gguf" for i in range(int(match[3]))]


def weight_files(path: str | Path) -> list[Path]:
    """All files with the weights of a model: those of a folder, or the parts of a GGUF, which may be missing."""
    file = Path(path)
    if file.is_dir():
        return sorted(file.glob("*.safetensors"))
    return [file.with_name(name) for name in part_names(file.name)]


def size_on_disk(path: Path) -> int:
    """Bytes that a file takes: a gap in it takes none, but Windows fills gaps and counts no blocks."""
    found = path.stat()
    return found.st_blocks * 512 if hasattr(found, "st_blocks") else found.st_size


def read_text(path: str | Path, kind: type[EdgespecError], most: int = MOST_TEXT, *, once: bool = False) -> str:
    """
    Args:
        path: of a text file in UTF-8, perhaps with a byte-order mark; packed by gzip if its name ends in .gz.
        kind: of the error.
        most: bytes that it may have, when unpacked.
        once: the file is read once, so it may be a pipe to which something is written.

    Raises:
        EdgespecError: of this `kind`; the file cannot be read, is too large, or is not text.
    """
    if may_wait(path) and not once:
        raise kind(f"{path}: is a pipe or a device, not a file")
    try:
        with open(path, "rb", opener=_open_at_once) as raw:
            file = cast(IO[bytes], gzip.GzipFile(fileobj=raw) if str(path).endswith(".gz") else raw)
            data = file.read(SNIFF)
            if b"\0" not in data:  # else it may be a model of gigabytes
                data += file.read(most + 1 - len(data))
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise kind(f"{path}: is not a whole gzip file: {error}") from error
    except (OSError, ValueError) as error:  # ValueError: no file can have this name
        raise kind(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if b"\0" in data:
        raise kind(f"{path}: is not text: it has zero bytes")
    if len(data) > most:
        raise kind(f"{path}: is too large: it has more than {most} bytes")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise kind(f"{path}: is not UTF-8 text (byte {error.start})") from error


def _open_at_once(path: str, flags: int) -> int:
    """As `os.open`, but of a pipe to which nothing is written it reads an end, and does not wait for ever."""
    descriptor = os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
    if hasattr(os, "O_NONBLOCK"):
        os.set_blocking(descriptor, True)
    return descriptor


def read_yaml(path: Path, kind: type[EdgespecError], *, ours: bool = False) -> tuple[Any, yaml.Node | None]:
    """
    Args:
        path: of the file.
        kind: of the error.
        ours: the package has it, no user wrote it.

    Returns:
        The content, and the root of its nodes, which have the lines; of an empty file None and None.

    Raises:
        EdgespecError: of this `kind`; the file cannot be read, or is not YAML.
    """
    text = read_text(path, kind, MOST_YAML)
    try:
        document = (_LIBYAML if ours else yaml.SafeLoader)(text)
        node = document.get_single_node()
        if node is not None:
            _check_node(node, {})
        return node and document.construct_document(node), node
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        why = getattr(error, "problem", None) or str(error).partition("\n")[0]
        raise kind(f"{path}{where}: is not YAML: {why}") from error
    # Such as the 45th of a month, !!bool maybe, or a thousand lists in each other.
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
        raise kind(f"{path}: is not YAML: {error}") from error


def _check_node(node: yaml.Node, known: dict[int, int]) -> int:
    """Refuse what PyYAML would take for ever to construct, and what it would accept though it cannot be meant.

    Args:
        node: of a document.
        known: values of the nodes that were looked at, by their ids.

    Returns:
        Number of values in it, where an alias counts as all that it stands for.
    """

    def refuse(why: str, at: yaml.Node = node) -> NoReturn:
        raise yaml.MarkedYAMLError(problem=why, problem_mark=at.start_mark)

    if id(node) in known:
        return known[id(node)] or refuse("an alias stands for a value that it is in")
    known[id(node)] = 0
    values = 1
    if isinstance(node, yaml.ScalarNode):
        if not node.tag.endswith(":str") and len(node.value) > MOST_DIGITS:
            refuse(f"a number or date has {len(node.value)} characters")
        if node.value.encode("utf-8", "ignore").decode() != node.value:
            refuse("a text has half a surrogate pair")
    elif isinstance(node, yaml.MappingNode):
        seen = set[str]()
        for key, value in node.value:
            values += _check_node(key, known) + _check_node(value, known)
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    refuse(f"there are two keys {key.value!r}", key)
                seen.add(key.value)
    else:
        values += sum(_check_node(part, known) for part in node.value)
    if values > MOST_VALUES:
        refuse(f"aliases make it more than {MOST_VALUES} values")
    known[id(node)] = values
    return values


def read_json_object(path: Path, kind: type[EdgespecError]) -> dict[str, Any]:
    """
    Args:
        path: of the file.
        kind: of the error.

    Raises:
        EdgespecError: of this `kind`; the file cannot be read, or is not a JSON object.
    """
    try:
        found = json.loads(read_text(path, kind))
    except RecursionError as error:
        raise kind(f"{path}: is damaged: it is nested too deeply") from error
    except ValueError as error:
        raise kind(f"{path}: is damaged: {error}") from error
    if not isinstance(found, dict):
        raise kind(f"{path}: is damaged: it is not a JSON object")
    return found


def check_out(path: str | Path, start: bytes, kind: str, advice: str = "give another name") -> None:
    """Check that a file can be written, and that writing it loses only a file of its own kind.

    Args:
        path: of the file; it need not exist.
        start: first bytes of a file of this kind.
        kind: its name, for messages.
        advice: what to do where something else is there.

    Raises:
        UsageError: `path` is something else, cannot be read, or its folder does not exist.
    """
    path = Path(path)
    with failing_as(UsageError, f"{path}: cannot be read, so it is not replaced"):
        if not path.parent.is_dir():
            raise UsageError(f"{path}: there is no folder {path.absolute().parent}")
        if not os.path.lexists(path):
            return
        if path.is_file():
            with path.open("rb") as file:
                if file.read(len(start)) == start:
                    return
    raise UsageError(f"{path}: exists and is not {kind}, so it is not replaced: {advice}")


def write_whole(path: Path, data: str | bytes) -> None:
    """Write a file in one step, so that no reader finds half of it; raises OSError."""
    with replacing(path) as new:
        new.write_bytes(data.encode() if isinstance(data, str) else data)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A new file to be written next to `path`, which it replaces at the end of the `with`, unless that raises."""
    new = path.with_name(f".{path.name}-{token_hex(8)}.new")  # others may read it, unlike one of `tempfile`
    try:
        yield new
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


def is_abandoned(path: Path) -> bool:
    """True if no process writes a file any more, such as an unfinished one of a killed process; raises OSError."""
    return time() - path.stat().st_mtime > ABANDONED
