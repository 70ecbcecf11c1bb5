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
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Annotated, Any, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict, FailFast, PositiveInt, ValidationError

from edgespec.errors import ContextFull, DamagedSession, SessionFileError, failing_as, shown
from edgespec.loop.backend import Capabilities, Session, Vocab

VERSION = 1
MOST = 1 << 26  # bytes of the JSON
MARK = b"edgespec"
END = struct.Struct("<QI8s")  # length and CRC-32 of the JSON, MARK
PIECE = 1 << 20  # bytes read at once
SAMPLES = 64  # parts of a model file that are hashed: hashing 40 GB would take a minute
SAMPLE = 1 << 14  # bytes of such a part


class Loaded(Protocol):
    """The part of `Backend` that session files need."""

    capabilities: Capabilities
    vocab: Vocab

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


class Details(BaseModel):
    """What a session needs besides its engine's bytes; subclasses have more fields.

    Attributes:
        read: `PromptRead.tokens`.
        short: `PromptRead.short`.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    read: int = 0
    short: bool = False

    @property
    def lengths(self) -> Sequence[int]:
        """All that are numbers of first tokens of the text."""
        return [self.read]


class StateDetails(Details):
    """
    Attributes:
        states: tokens before each state, at least 1.
    """

    states: list[PositiveInt]

    @property
    def lengths(self) -> Sequence[int]:
        """As in `Details`."""
        return [*super().lengths, *self.states]


class Saved(BaseModel):
    """Description of a session, from the end of its file.

    Attributes:
        identity: `Backend.identity` of the backend that saved it.
        token_ids: committed tokens.
        details: fields of `Details`.
        note: a JSON value of the caller.
        size: number of the engine's bytes.
        checksum: CRC-32 of the engine's bytes.
        version: of the file format.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    identity: dict[str, Any]
    token_ids: Annotated[list[int], FailFast()]
    details: dict[str, Any]
    note: Any
    size: int
    checksum: int
    version: int = VERSION


Form = TypeVar("Form", bound=BaseModel)
DetailsForm = TypeVar("DetailsForm", bound=Details)


def write(
    path: str | Path,
    backend: Loaded,
    token_ids: Sequence[int],
    details: Details,
    put: Callable[[Path], None],
    note: Any = None,
) -> None:
    """Write a session's file.

    Args:
        path: where; its folder must exist.
        backend: the session's backend.
        token_ids: the session's committed tokens.
        details: what the session needs besides its bytes.
        put: writes the engine's bytes to a file.
        note: a JSON value that `load` returns.

    Raises:
        SessionFileError: `path` is something else than a session, or cannot be written, or the note is too long; an
            earlier session stays.
    """
    path = Path(path)
    check_replaceable(path)
    with failing_as(SessionFileError, f"{path}: the session cannot be saved"):
        with NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}-", suffix=".new", delete=False) as file:
            new = Path(file.name)
        try:
            put(new)
            size = new.stat().st_size
            saved = Saved(
                identity=dict(backend.identity), token_ids=list(token_ids), details=details.model_dump(), note=note,
                size=size, checksum=checksum_of(new, size),
            )  # fmt: skip
            text = json.dumps(saved.model_dump()).encode()
            if len(text) > MOST:
                raise SessionFileError(f"{path}: the session cannot be saved: {len(text)} bytes describe it")
            with new.open("ab") as file:
                file.write(text + END.pack(len(text), zlib.crc32(text), MARK))
                file.flush()
                os.fsync(file.fileno())
            new.replace(path)
        finally:
            new.unlink(missing_ok=True)


def check_replaceable(path: str | Path) -> None:
    """
    Raises:
        SessionFileError: `path` is there, but is not a saved session.
    """
    path = Path(path)
    with failing_as(SessionFileError, f"{path}: cannot be read, so it is not replaced"):
        if not os.path.lexists(path):
            return
        if path.is_file():  # opening a pipe may wait for ever
            with path.open("rb") as file:
                file.seek(-min(len(MARK), file.seek(0, os.SEEK_END)), os.SEEK_END)
                if file.read() == MARK:
                    return
    raise SessionFileError(f"{path}: is not a saved session, or its end is missing; it is not replaced")


def look(path: str | Path) -> Saved:
    """Read a session's description, without the engine's bytes.

    Raises:
        SessionFileError: the file cannot be read, is no session's file, or is damaged.
    """
    if os.path.exists(path) and not os.path.isfile(path):  # opening a pipe may wait for ever
        raise SessionFileError(f"{path}: is not a file, so it is not a saved session")
    with failing_as(SessionFileError, f"{path}: cannot be read"), Path(path).open("rb") as file:
        whole = file.seek(0, os.SEEK_END)
        file.seek(max(0, whole - END.size))
        end = file.read(END.size)
        length, checksum, mark = END.unpack(end) if len(end) == END.size else (0, 0, b"")
        if mark != MARK or length > min(MOST, whole - END.size):
            raise DamagedSession(f"{path}: is not a saved session, or its end is missing")
        file.seek(whole - END.size - length)
        text = file.read(length)
    found = None
    with suppress(ValueError, RecursionError):
        found = json.loads(text.decode()) if zlib.crc32(text) == checksum else None
    if isinstance(found, dict) and found.get("version") != VERSION:
        raise another_version(path)
    saved = _checked(path, Saved, found)
    if saved.size != whole - END.size - length:
        raise damaged(path)
    return saved


def damaged(path: str | Path) -> DamagedSession:
    """The error for a file that is not as it was saved."""
    return DamagedSession(f"{path}: the saved session is damaged")


def another_version(path: str | Path) -> SessionFileError:
    """The error for a file with other fields."""
    return SessionFileError(f"{path}: was saved by another version of this program")


def _checked(path: str | Path, form: type[Form], values: Any) -> Form:
    """
    Raises:
        SessionFileError: `values` are no JSON object of this form.
    """
    if isinstance(values, dict) and values.keys() - form.model_fields.keys():
        raise another_version(path)
    try:
        return form.model_validate(values)
    except ValidationError as error:
        raise damaged(path) from error


def has(path: str | Path, backend: Loaded | None, token_ids: Sequence[int], note: Any) -> bool:
    """True if a file holds a session that begins with `token_ids`, has this note, and is for `backend`, if given."""
    try:
        saved = look(path)
    except SessionFileError:
        return False
    if backend and difference(saved, backend):
        return False
    return saved.token_ids[: len(token_ids)] == list(token_ids) and saved.note == note


def read(path: str | Path, backend: Loaded, form: type[DetailsForm]) -> tuple[Saved, DetailsForm]:
    """Read the description of a session that `backend` can load, and check the engine's bytes.

    Args:
        path: of the file.
        backend: that will load it.
        form: of the details.

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
    details, lengths = _checked(path, form, saved.details), range(len(saved.token_ids) + 1)
    known = range(backend.vocab.size)
    if not all(one in lengths for one in details.lengths) or not all(one in known for one in saved.token_ids):
        raise damaged(path)
    with failing_as(SessionFileError, f"{path}: cannot be read"):
        checksum = checksum_of(Path(path), saved.size)
    if checksum != saved.checksum:
        raise damaged(path)
    return saved, details


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
            return "it is another model's" if name == "weights" else f"{name} was {shown(was)} and is {shown(is_)}"
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
    for path in paths:
        with failing_as(SessionFileError, f"{path}: cannot be read"), Path(path).open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            found.update(struct.pack("<Q", size))
            for i in range(SAMPLES + 1):
                file.seek(max(0, size - SAMPLE) * i // SAMPLES)
                found.update(file.read(SAMPLE))
    return found.hexdigest()[:32]
