"""A session in a file: its tokens, keys and values, so that a prompt needs no prefill.

    the engine's bytes | JSON of `Saved` | length and checksum of the JSON, MARK

Engines write their bytes themselves, so the JSON comes last. A file gets its name when it is whole; checksums show
later damage.
"""

import hashlib
import json
import os
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, Protocol

from edgespec.errors import ContextFull, DamagedSession, SessionFileError
from edgespec.loop.backend import Capabilities, Session

VERSION = 1
MARK = b"edgespec"
END = struct.Struct("<QI8s")  # length and CRC-32 of the JSON, MARK
PIECE = 1 << 20  # bytes read at once
SAMPLES = 64  # parts of a model file that are hashed: hashing 40 GB would take a minute
SAMPLE = 1 << 14  # bytes of such a part


class Loaded(Protocol):
    """The part of `Backend` that session files need."""

    capabilities: Capabilities

    @property
    def name(self) -> str:
        """As in `Backend`."""

    @property
    def build(self) -> str:
        """As in `Backend`."""

    @property
    def computing(self) -> Mapping[str, Any]:
        """As in `Backend`."""

    @property
    def identity(self) -> Mapping[str, Any]:
        """As in `Backend`."""


@dataclass(frozen=True, slots=True)
class Saved:
    """Description of a session, from the end of its file.

    Attributes:
        identity: `Backend.identity` of the backend that saved it.
        token_ids: committed tokens.
        details: JSON values of the engine.
        note: a JSON value of the caller.
        size: number of the engine's bytes.
        checksum: CRC-32 of the engine's bytes.
        version: of the file format.
    """

    identity: dict[str, Any]
    token_ids: list[int]
    details: dict[str, Any]
    note: Any
    size: int
    checksum: int
    version: int = VERSION


def write(
    path: str | Path,
    backend: Loaded,
    token_ids: Sequence[int],
    details: Mapping[str, Any],
    put: Callable[[Path], None],
    note: Any = None,
) -> None:
    """Write a session's file.

    Args:
        path: where; its folder must exist.
        backend: the session's backend.
        token_ids: the session's committed tokens.
        details: JSON values that the engine needs to read its bytes.
        put: writes the engine's bytes to a file.
        note: a JSON value that `load` returns.

    Raises:
        SessionFileError: `path` is something else than a session, or cannot be written; an earlier session stays.
    """
    path = Path(path)
    check_replaceable(path)
    try:
        with NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}-", suffix=".new", delete=False) as file:
            new = Path(file.name)
        try:
            put(new)
            size = new.stat().st_size
            saved = Saved(
                dict(backend.identity), list(token_ids), dict(details), note, size, checksum_of(new, size)
            )  # fmt: skip
            text = json.dumps(asdict(saved)).encode()
            with new.open("ab") as file:
                file.write(text + END.pack(len(text), zlib.crc32(text), MARK))
                file.flush()
                os.fsync(file.fileno())
            new.replace(path)
        finally:
            new.unlink(missing_ok=True)
    except OSError as error:
        raise SessionFileError(f"{path}: the session cannot be saved: {error.strerror or error}") from error


def check_replaceable(path: str | Path) -> None:
    """
    Raises:
        SessionFileError: `path` is there, but is not a saved session.
    """
    path = Path(path)
    try:
        if not os.path.lexists(path):
            return
        if path.is_file():  # opening a pipe may wait for ever
            with path.open("rb") as file:
                file.seek(-min(len(MARK), file.seek(0, os.SEEK_END)), os.SEEK_END)
                if file.read() == MARK:
                    return
    except OSError as error:
        raise SessionFileError(f"{path}: cannot be read, so it is not replaced: {error.strerror or error}") from error
    raise SessionFileError(f"{path}: is not a saved session, or its end is missing; it is not replaced")


def look(path: str | Path) -> Saved:
    """Read a session's description, without the engine's bytes.

    Raises:
        SessionFileError: the file cannot be read, is no session's file, or is damaged.
    """
    if os.path.exists(path) and not os.path.isfile(path):  # opening a pipe may wait for ever
        raise SessionFileError(f"{path}: is not a file, so it is not a saved session")
    try:
        with Path(path).open("rb") as file:
            whole = file.seek(0, os.SEEK_END)
            file.seek(max(0, whole - END.size))
            end = file.read(END.size)
            length, checksum, mark = END.unpack(end) if len(end) == END.size else (0, 0, b"")
            if mark != MARK or length > whole - END.size:
                raise DamagedSession(f"{path}: is not a saved session, or its end is missing")
            file.seek(whole - END.size - length)
            text = file.read(length)
    except OSError as error:
        raise SessionFileError(f"{path}: cannot be read: {error.strerror or error}") from error
    found = json.loads(text) if zlib.crc32(text) == checksum else {}
    if found and found.get("version") != VERSION:
        raise SessionFileError(f"{path}: was saved by another version of this program")
    if not found or found["size"] != whole - END.size - length:
        raise DamagedSession(f"{path}: the saved session is damaged")
    return Saved(**found)


def has(path: str | Path, backend: Loaded | None, token_ids: Sequence[int], note: Any) -> bool:
    """True if a file holds a session that begins with `token_ids`, has this note, and is for `backend`, if given."""
    try:
        saved = look(path)
    except SessionFileError:
        return False
    if backend and difference(saved, backend):
        return False
    return saved.token_ids[: len(token_ids)] == list(token_ids) and saved.note == note


def read(path: str | Path, backend: Loaded) -> Saved:
    """Read the description of a session that `backend` can load, and check the engine's bytes.

    Raises:
        SessionFileError: as for `look`, or `identity` differs, or the context is too small.
    """
    saved = look(path)
    if differs := difference(saved, backend):
        raise SessionFileError(f"{path}: the session cannot be used here: {differs}")
    if len(saved.token_ids) > backend.capabilities.context_length:
        raise SessionFileError(
            f"{path}: the session has {len(saved.token_ids)} tokens, but the context holds "
            f"{backend.capabilities.context_length}: use a larger one (--ctx, context_length=…)"
        )
    try:
        checksum = checksum_of(Path(path), saved.size)
    except OSError as error:
        raise SessionFileError(f"{path}: cannot be read: {error.strerror or error}") from error
    if checksum != saved.checksum:
        raise DamagedSession(f"{path}: the saved session is damaged")
    return saved


def draft_file(path: str | Path) -> Path:
    """Path of the draft's session, next to the target's at `path`."""
    return Path(f"{path}.draft")


def load_draft_session(path: str | Path, draft: Session | None) -> None:
    """Load the draft's session that was saved with the target's at `path`, if there is a usable one."""
    if draft and draft_file(path).exists():
        with suppress(SessionFileError, ContextFull):
            draft.load(draft_file(path))


def difference(saved: Saved, backend: Loaded) -> str:
    """The reason why `backend` cannot use a session; "" if it can."""
    here = backend.identity
    for name in ("weights", "kv_type", *here, *saved.identity):  # another kv_type may change `exact`
        was, is_ = saved.identity.get(name), here.get(name)
        if was != is_:
            return "it is another model's" if name == "weights" else f"{name} was {was!r} and is {is_!r}"
    return ""


def checksum_of(path: Path, size: int) -> int:
    """
    Returns:
        CRC-32 of a file's first `size` bytes.

    Raises:
        OSError: the file cannot be read.
    """
    found = 0
    with path.open("rb") as file:
        while size and (piece := file.read(min(size, PIECE))):
            found, size = zlib.crc32(piece, found), size - len(piece)
    return found


def identity_of(backend: Loaded, weights: str) -> dict[str, Any]:
    """
    Args:
        backend: any.
        weights: `content_of` the files of its weights.

    Returns:
        `Backend.identity` of a backend.
    """
    exact, shapes = backend.capabilities.exact, "off"
    if exact:  # the largest size of a class changes no bits, but for blocks
        more = f" by {exact.prompts.step}" if exact.prompts.step > 1 else ""
        more += f", short ones from {exact.short.least}" if exact.short else ""
        more += f", blocks of {exact.prompts.most}" if exact.blocks else ""
        shapes = f"{exact.name} (trees from {exact.trees.least}, prompts from {exact.prompts.least}{more})"
    about = {"weights": weights, "engine": backend.name, "build": backend.build, "exact": shapes}
    return about | dict(backend.computing)


def content_of(*paths: str) -> str:
    """
    Returns:
        A hash of files' sizes and of samples of their bytes; a backend takes it when it loads them.

    Raises:
        SessionFileError: a file cannot be read.
    """
    found = hashlib.sha256()
    try:
        for path in paths:
            with Path(path).open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                found.update(struct.pack("<Q", size))
                for i in range(SAMPLES + 1):
                    file.seek(max(0, size - SAMPLE) * i // SAMPLES)
                    found.update(file.read(SAMPLE))
    except OSError as error:
        raise SessionFileError(f"{error.filename}: cannot be read: {error.strerror or error}") from error
    return found.hexdigest()[:32]
