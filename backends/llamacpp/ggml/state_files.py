"""llama.cpp's part of a session file: `edgespec/loop/session_files.py`."""

import ctypes
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from edgespec.errors import SessionFileError
from edgespec.loop.session_files import Details

from .files import forget_log, last_log, llama_cpp

LENGTH = struct.Struct("<Q")


class CellDetails(Details):
    """
    Attributes:
        held: first tokens of the text that have cells.
        parts: tokens of the sliding window, for which cells are saved in parts; 0: in one.
    """

    held: int
    parts: int = 0

    @property
    def lengths(self) -> Sequence[int]:
        return [*super().lengths, self.held]


def save_sequence(context: Any, path: Path, seq: int, text: Sequence[int]) -> None:
    """Write the cells and the state of a sequence id, with their tokens.

    Raises:
        OSError: llama.cpp cannot write the file.
    """
    forget_log()
    tokens = (llama_cpp.llama_token * len(text))(*text)
    if text and not llama_cpp.llama_state_seq_save_file(context, os.fsencode(path), seq, tokens, len(text)):
        raise OSError(last_log())


def load_sequence(context: Any, path: str | Path, seq: int, text: Sequence[int]) -> None:
    """Read cells and state into the first free cells, for the sequence `seq`.

    Raises:
        SessionFileError: the file does not match; the sequence is empty.
    """
    forget_log()
    found, count = (llama_cpp.llama_token * max(1, len(text)))(), ctypes.c_size_t()
    if text and not llama_cpp.llama_state_seq_load_file(
        context, os.fsencode(path), seq, found, len(text), ctypes.byref(count)
    ):
        raise SessionFileError(f"{path}: llama.cpp cannot read the session: {last_log()}")
    if list(found)[: len(text)] != list(text):
        llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(context), seq, -1, -1)
        raise SessionFileError(f"{path}: the session was replaced while it was read")


def write_parts(file: IO[bytes], parts: Iterable[Any]) -> None:
    """Write serialised parts of a sequence, each after its length; raises OSError."""
    for part in parts:
        file.write(LENGTH.pack(len(part)))
        file.write(part)


def read_parts(file: IO[bytes], stop: int) -> Iterator[Any]:
    """Read parts up to byte `stop`; raises OSError, and ValueError or struct.error if the file ends before."""
    while file.tell() < stop:
        (length,) = LENGTH.unpack(file.read(LENGTH.size))
        if length > stop - file.tell():
            raise ValueError("a part is longer than the rest")
        yield (ctypes.c_uint8 * length).from_buffer_copy(file.read(length))


def load_parts(path: str | Path, size: int) -> Iterator[Any]:
    """
    Args:
        path: of the file.
        size: of the parts in the file, in bytes, with their lengths.

    Raises:
        SessionFileError: the file was replaced or truncated.
    """
    try:
        with Path(path).open("rb") as file:
            yield from read_parts(file, size)
    except (OSError, ValueError, struct.error) as error:
        raise SessionFileError(f"{path}: the session was replaced while it was read") from error
