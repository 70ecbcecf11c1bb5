"""Datastore to copy from: a token array and its suffix array in one memory-mapped file (REST, arXiv 2311.08252).

    offset 0        JSON, one line, padded with spaces to HEADER_SIZE bytes (see `Header`)
    HEADER_SIZE     the tokens of all documents, big-endian, a separator after each document
    then            the suffix array: positions in the token array, little-endian, in the order of their suffixes

Big-endian tokens compare as their bytes do, so the tokens' suffix array is a part of the bytes' one. The separator is
the largest number of the token's width, which no token has, so no match goes across it.
"""

import json
import mmap
import os
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from edgespec.errors import DatastoreError, UsageError, failing_as, shown
from edgespec.loop.backend import Vocab
from edgespec.loop.hint_texts import END
from edgespec.loop.tree import IntArray
from edgespec.machine import files
from edgespec.machine.files import may_wait, read_text

MAGIC = "edgespec datastore"
START = json.dumps({"magic": MAGIC})[:-1].encode()  # first bytes of a datastore of any version
VERSION = 1
HEADER_SIZE = 1024
MOST_BYTES = 1 << 32  # of a file of documents

Progress = Callable[[str, int, int], None]  # phase, done, total (0: unknown)


class Header(BaseModel):
    """The first bytes of a datastore.

    Attributes:
        magic: `MAGIC`.
        version: of the format.
        fingerprint: of the vocabulary.
        vocab_size: number of tokens of the vocabulary.
        token_width: bytes of a token, 2 or 4.
        position_width: bytes of an entry of the suffix array, 4 or 8.
        tokens: number of tokens, separators included.
        documents: number of documents.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    magic: str = MAGIC
    version: int = VERSION
    fingerprint: str
    vocab_size: int = Field(ge=1)
    token_width: int = Field(ge=2, le=4, multiple_of=2)
    position_width: int = Field(ge=4, le=8, multiple_of=4)
    tokens: int = Field(ge=1)
    documents: int = Field(ge=1)

    @model_validator(mode="after")
    def _has_a_separator(self) -> Self:
        if self.vocab_size > _separator(self.token_width):
            raise ValueError("a token is the separator")
        return self

    @property
    def suffix_offset(self) -> int:
        return -(-(HEADER_SIZE + self.tokens * self.token_width) // 8) * 8

    @property
    def file_size(self) -> int:
        return self.suffix_offset + self.tokens * self.position_width


class Datastore:
    """An open datastore, whose file is mapped as long as the object lives."""

    def __init__(self, header: Header, mapping: mmap.mmap) -> None:
        self.header = header
        self._map = mapping
        self._tokens: NDArray[np.unsignedinteger] = np.frombuffer(
            mapping, f">u{header.token_width}", header.tokens, HEADER_SIZE
        )
        self._suffixes: NDArray[np.unsignedinteger] = np.frombuffer(
            mapping, f"<u{header.position_width}", header.tokens, header.suffix_offset
        ).astype(f"=u{header.position_width}", copy=False)
        self._order = self._suffixes.data  # a memoryview is several times faster than numpy for single ints

    def __len__(self) -> int:
        return self.header.tokens

    def find(self, prefix: Sequence[int]) -> tuple[int, int]:
        """
        Returns:
            First index of the suffixes that start with `prefix`, and one past the last; equal: there is none.
        """
        wanted = np.asarray(prefix, f">u{self.header.token_width}").tobytes()
        size, width, data = len(wanted), self.header.token_width, self._map

        def start_of(position: int) -> bytes:
            offset = HEADER_SIZE + position * width
            return data[offset : min(offset + size, HEADER_SIZE + len(self) * width)]

        low = bisect_left(self._order, wanted, key=start_of)
        if low == len(self) or start_of(self._order[low]) != wanted:
            return low, low
        return low, bisect_right(self._order, wanted, low, key=start_of)

    def continuations(self, low: int, high: int, skip: int, count: int, depth: int) -> IntArray:
        """
        Args:
            low: as `find` returned it.
            high: as `find` returned it.
            skip: tokens of the prefix.
            count: most matches.
            depth: tokens wanted after each.

        Returns:
            Token ids [min(count, high - low), depth] after matches; END from the end of a document on. The matches lie
            at regular intervals of the sorted range, so that shares are kept.
        """
        rows = min(count, high - low)
        picks = low + (2 * np.arange(rows) + 1) * (high - low) // (2 * max(rows, 1))
        first = np.minimum(self._suffixes[picks], len(self)).astype(np.int64) + skip
        # Places past the end read the last separator.
        places = np.minimum(first[:, None] + np.arange(depth), len(self) - 1)
        found = self._tokens[places]
        ended: NDArray[np.bool_] = np.logical_or.accumulate(found >= self.header.vocab_size, axis=1)
        ids: IntArray = found.astype(np.int32)
        ids[ended] = END
        return ids


def open_datastore(path: str | Path, vocab: Vocab) -> Datastore:
    """Map a datastore that was built with this vocabulary.

    Raises:
        DatastoreError: the file cannot be read, is no datastore, is cut short, or has another tokenizer's tokens.
    """
    header = read_header(path)
    with failing_as(DatastoreError, f"{path}: cannot be read"), Path(path).open("rb") as file:
        if (header.fingerprint, header.vocab_size) != (vocab.fingerprint, vocab.size):
            raise DatastoreError(
                f"{path}: was built with another tokenizer: {header.vocab_size} tokens, "
                f"fingerprint {header.fingerprint[:12]}; the model's has {vocab.size} tokens, "
                f"fingerprint {vocab.fingerprint[:12]}; build a datastore with this model"
            )
        return Datastore(header, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def read_header(path: str | Path) -> Header:
    """
    Raises:
        DatastoreError: the file cannot be read, is no datastore, or is cut short.
    """
    if may_wait(path):
        raise DatastoreError(f"{path}: is a pipe or a device, not a datastore")
    with failing_as(DatastoreError, f"{path}: cannot be read"), Path(path).open("rb") as file:
        data, size = file.read(HEADER_SIZE), os.fstat(file.fileno()).st_size
    try:
        fields = json.loads(data)
        if fields["magic"] != MAGIC:
            raise ValueError
    except (ValueError, TypeError, KeyError, RecursionError):
        raise DatastoreError(f"{path}: is not an edgespec datastore") from None
    if fields.get("version") != VERSION:
        raise DatastoreError(
            f"{path}: has version {shown(fields.get('version'))} of the format, this program reads {VERSION}; build it "
            "again"
        )
    try:
        header = Header.model_validate(fields)
    except ValidationError as error:
        raise DatastoreError(f"{path}: has a damaged header; build it again") from error
    if size != header.file_size:
        raise DatastoreError(f"{path}: is damaged: it has {size} bytes instead of {header.file_size}; build it again")
    return header


def check_out(out: str | Path, sources: Iterable[str | Path] = ()) -> None:
    """Check that building a datastore destroys nothing.

    Args:
        out: path of the datastore to build; it need not exist.
        sources: files and folders of its documents.

    Raises:
        UsageError: `out` is not a datastore, or is one of the sources' files.
    """
    out = Path(out)
    with failing_as(UsageError, f"{out}: cannot be read, so it is not replaced"):
        if not out.exists():
            return
        for source in map(Path, sources):
            inside = _files_below(source) if os.path.isdir(source) else [source] if os.path.exists(source) else []
            if any(out.samefile(file) for file in inside):
                raise UsageError(f"{out}: is also read ({source}), so it is not replaced: name the datastore first")
    files.check_out(out, START, "an edgespec datastore", "name the datastore first")


def build(out: str | Path, texts: Iterable[str], vocab: Vocab, progress: Progress | None = None) -> Header:
    """Make a datastore, in about 45 bytes of memory per token.

    Args:
        out: path of the file, which appears when it is complete; an existing datastore is replaced.
        texts: the documents.
        vocab: tokenizer of the models that will use the datastore.
        progress: called with (phase, done, total) in the phases "tokenising" (documents; total 0 if `texts` has no
            length), "sorting" and "writing" (tokens).

    Raises:
        UsageError: `out` is a file, but not a datastore.
        DatastoreError: there is no text, or the file cannot be written; nothing is left behind.
    """
    out = Path(out)
    check_out(out)
    part = out.with_name(f".{out.name}.{os.getpid()}.part")
    report = progress or (lambda phase, done, total: None)
    try:
        with failing_as(DatastoreError, f"{out}: cannot be written"):
            # Opened before the work, so that a folder that cannot be written to is found at once.
            with part.open("xb") as file:
                tokens, documents = _tokenise(texts, vocab, report)
                report("sorting", 0, len(tokens))
                suffixes = suffix_array(tokens)
                report("sorting", len(tokens), len(tokens))
                header = Header(
                    fingerprint=vocab.fingerprint, vocab_size=vocab.size, token_width=tokens.itemsize,
                    position_width=suffixes.itemsize, tokens=len(tokens), documents=documents,
                )  # fmt: skip
                report("writing", 0, len(tokens))
                file.write(json.dumps(header.model_dump()).encode().ljust(HEADER_SIZE - 1) + b"\n")
                file.write(tokens.data)
                file.seek(header.suffix_offset)
                file.write(suffixes.data)
                report("writing", len(tokens), len(tokens))
            part.replace(out)
    finally:
        with suppress(OSError):  # a disk that is read-only
            part.unlink()
    return header


def _separator(width: int) -> int:
    return int(2 ** (8 * width) - 1)


def _tokenise(texts: Iterable[str], vocab: Vocab, report: Progress) -> tuple[NDArray[np.unsignedinteger], int]:
    width = 2 if vocab.size <= _separator(2) else 4
    total = len(texts) if isinstance(texts, Sequence) else 0
    pieces: list[NDArray[np.unsignedinteger]] = []
    for text in texts:
        # JSON can spell half a character ("\\ud83d"), which UTF-8 cannot.
        whole = text.encode("utf-8", "replace").decode("utf-8")
        ids = vocab.encode(whole, add_bos=False, parse_special=False)
        if ids:
            pieces.append(np.array([*ids, _separator(width)], f">u{width}"))
            report("tokenising", len(pieces), total)
    if not pieces:
        raise DatastoreError("there is no text to build a datastore of")
    # Without `dtype`, numpy joins arrays in the machine's byte order.
    return np.concatenate(pieces, dtype=pieces[0].dtype), len(pieces)


def suffix_array(tokens: NDArray[np.unsignedinteger]) -> NDArray[np.unsignedinteger]:
    """
    Args:
        tokens: [n], big-endian.

    Returns:
        [n], little-endian: positions of the tokens, in the order of the suffixes that start there.
    """
    from pydivsufsort import divsufsort  # only building needs it

    width = tokens.itemsize
    by_byte: NDArray[np.signedinteger] = divsufsort(tokens.view(np.uint8))
    by_token = by_byte[by_byte % width == 0] // width
    order: NDArray[np.unsignedinteger] = by_token.astype("<u4" if len(tokens) <= 2**32 else "<u8")
    return order


def read_texts(paths: Iterable[str | Path], on_skip: Callable[[Path], None] | None = None) -> Iterator[str]:
    """
    Args:
        paths: files, also with `.gz` after their names, and folders: all files below that are not hidden, by name.
        on_skip: called for what cannot be read, or not as text, and is left out of a folder.

    Yields:
        The documents in files: values of `.json` and lines of `.jsonl` by `documents_of`, others whole, as UTF-8 text.

    Raises:
        DatastoreError: a path does not exist, or one of `paths` cannot be read so.
    """
    skip = on_skip or (lambda path: None)
    for path in map(Path, paths):
        if not os.path.isdir(path):
            yield from _read_file(path)
            continue
        for file in _files_below(path, partial(_leave_out, path, skip)):
            try:
                documents = list(_read_file(file))
            except DatastoreError:
                skip(file)
            else:
                yield from documents


def _leave_out(folder: Path, skip: Callable[[Path], None], error: OSError) -> None:
    if Path(error.filename) == folder:
        raise DatastoreError(f"{folder}: cannot be read: {error.strerror or error}") from error
    skip(Path(error.filename))


def _files_below(folder: Path, on_error: Callable[[OSError], None] = lambda error: None) -> Iterator[Path]:
    for where, folders, names in os.walk(folder, onerror=on_error):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for file in (Path(where, name) for name in sorted(names) if not name.startswith(".")):
            try:
                is_file = file.is_file()  # reading a pipe would wait for ever
            except OSError as error:
                on_error(error)
                continue
            if is_file:
                yield file


def _read_file(path: Path) -> Iterator[str]:
    kind = path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix
    text = read_text(path, DatastoreError, MOST_BYTES)
    if kind == ".jsonl":
        # Not `splitlines`: JSON strings may hold other line separators, such as U+2028.
        for number, line in enumerate(text.split("\n"), 1):
            if line.strip():
                yield from documents_of(_parse(line, f"{path}, line {number}"))
    elif kind == ".json":
        yield from documents_of(_parse(text, str(path)))
    elif has_word(text):
        yield text


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DatastoreError(f"{where}: is not JSON: {error}") from None


def documents_of(value: Any) -> Iterator[str]:
    """
    Yields:
        The documents in a JSON value. Each string of a list that is in no object is one. So is each object: its own
        strings that hold a word, also those in its lists, joined by empty lines.
    """
    left = [value]  # not a call for each list: JSON may hold thousands of them in each other
    while left:
        value = left.pop()
        if isinstance(value, dict):
            inside = [item for field in value.values() for item in (field if isinstance(field, list) else [field])]
            text = "\n\n".join(item for item in inside if isinstance(item, str) and has_word(item))
            if text:
                yield text
            value = [item for item in inside if not isinstance(item, str)]
        if isinstance(value, list):
            left += reversed(value)
        elif isinstance(value, str) and has_word(value):
            yield value


def has_word(text: str) -> bool:
    return any(map(str.isalpha, text))
