"""Fetch a large file in pieces, several at once; a cut connection loses no byte.

A record next to the partial file counts the bytes of each piece. After a crash it may not match the data, which the
checksum at the end finds.
"""

import errno
import hashlib
import os
import struct
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from edgespec.errors import EdgespecError, first_line

PIECE = 64 << 20  # bytes
CONNECTIONS = 4
STALL = 30.0  # seconds without a byte, after which a connection counts as cut
RETRIES = 6  # most attempts in a row that bring no new byte
PAUSE = 1.0  # seconds before the second attempt; doubled for each further one
LONGEST_PAUSE = 60.0
COUNT = struct.Struct("<Q")
GONE = (401, 403, 404, 410, 416)  # status codes that another attempt does not change

OpenRange = Callable[[int, int], AbstractContextManager[Any]]  # first byte and the one after the last -> httpx.Response
Progress = Callable[[str, int, int], None]  # what is done, steps or bytes done, and in all (0: unknown)


class _NoRangesError(Exception):
    """The server sends the whole file instead of a part."""


def download(request: OpenRange, path: Path, size: int, sha256: str, progress: Progress) -> None:
    """Fetch a file, or the rest of it after an earlier try; `path` appears only when the checksum is right.

    Args:
        request: opens a streamed answer to a GET with this range. Errors of the connection may be of any type.
        path: of the file; `*.edgespec-partial` and `*.edgespec-record` lie next to it until it is complete.
        size: bytes of the file.
        sha256: of the file, 64 hexadecimal digits.
        progress: called a few times a second, in this thread.

    Raises:
        EdgespecError: the server does not have it, sends something else, or keeps cutting the connection; the disk is
            full. Fetched bytes stay, unless the checksum is wrong.
    """
    there = Partial(path, size)
    try:
        try:
            _in_pieces(request, there, progress)
        except _NoRangesError:
            _run([lambda stop: _fetch(request, there, there.done, size, stop, whole=True)], there, progress)
        there.sync()
    finally:
        there.close()
    found = checksum(there.data, lambda done: progress("checking", done, size))
    if found != sha256:
        there.remove()
        raise EdgespecError(
            f"{path.name[:12]}…: what was fetched has the checksum {found[:12]}…, so it was damaged on the way; it is "
            "removed: try again"
        )
    os.replace(there.data, path)
    there.remove()


def read_range(request: OpenRange, start: int, stop: int) -> bytes:
    """Bytes of a file, which is not written; arguments and errors as for `download`."""
    found = bytearray()

    def attempt() -> None:
        for at, data in _received(request, start + len(found), stop):
            found.extend(data[max(0, start + len(found) - at) :])

    _keep_trying(attempt, lambda: len(found), stop - start, threading.Event())
    return bytes(found)


def checksum(path: Path, progress: Callable[[int], None]) -> str:
    digest, done = hashlib.sha256(), 0
    with path.open("rb") as file:
        while data := file.read(1 << 22):
            digest.update(data)
            done += len(data)
            progress(done)
    return digest.hexdigest()


class Partial:
    def __init__(self, path: Path, size: int) -> None:
        """
        Args:
            path: of the finished file.
            size: its bytes.
        """
        self.size = size
        self.data, self._record = (path.with_name(f"{path.name}.edgespec-{kind}") for kind in ("partial", "record"))
        self.starts = list(range(0, size, PIECE))
        self._lock = threading.Lock()
        self.counts = [0] * len(self.starts)  # bytes that are there of each piece
        known = self._record.read_bytes() if self._record.is_file() and self.data.is_file() else b""
        if len(known) == COUNT.size * (len(self.counts) + 1) and COUNT.unpack_from(known)[0] == PIECE:
            self.counts = [COUNT.unpack_from(known, COUNT.size * (i + 1))[0] for i in range(len(self.counts))]
        with _disk(self.data):
            self._file = os.fdopen(os.open(self.data, os.O_RDWR | os.O_CREAT, 0o666), "r+b", buffering=0)
            self._counts_file = self._record.open("wb", buffering=0)
            self._counts_file.write(COUNT.pack(PIECE) + b"".join(map(COUNT.pack, self.counts)))

    def end(self, piece: int) -> int:
        return min(self.size, self.starts[piece] + PIECE)

    def next(self, piece: int) -> int:
        return self.starts[piece] + self.counts[piece]

    def missing(self) -> list[int]:
        return [piece for piece in range(len(self.starts)) if self.next(piece) < self.end(piece)]

    def done(self) -> int:
        return sum(self.counts)

    def put(self, at: int, data: bytes) -> None:
        """Write those of the bytes that continue a piece; all others are ignored.

        Args:
            at: place of the first byte in the file.
            data: the bytes.

        Raises:
            EdgespecError: the disk is full.
        """
        for piece in range(at // PIECE, min(len(self.starts), (at + len(data) - 1) // PIECE + 1)):
            start = self.next(piece)
            stop = min(self.end(piece), at + len(data))
            if at <= start < stop:
                with self._lock, _disk(self.data):
                    self._file.seek(start)
                    view = memoryview(data)[start - at : stop - at]
                    while view:
                        view = view[self._file.write(view) :]
                    self.counts[piece] += stop - start
                    self._counts_file.seek(COUNT.size * (piece + 1))
                    self._counts_file.write(COUNT.pack(self.counts[piece]))

    def sync(self) -> None:
        with _disk(self.data):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()
        self._counts_file.close()

    def remove(self) -> None:
        for file in (self.data, self._record):
            file.unlink(missing_ok=True)


@contextmanager
def _disk(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        what = "the disk is full; what is there is kept" if full else error.strerror or str(error)
        raise EdgespecError(f"{path.parent}: {what}") from error


def _in_pieces(request: OpenRange, there: Partial, progress: Progress) -> None:
    waiting = SimpleQueue[int]()
    for piece in there.missing():
        waiting.put(piece)

    def work(stop: threading.Event) -> None:
        while not stop.is_set():
            try:
                piece = waiting.get_nowait()
            except Empty:
                return
            _fetch(request, there, partial(there.next, piece), there.end(piece), stop)

    _run([work] * min(CONNECTIONS, waiting.qsize()), there, progress)


def _run(works: Sequence[Callable[[threading.Event], None]], there: Partial, progress: Progress) -> None:
    stop, errors = threading.Event(), list[BaseException]()

    def run(work: Callable[[threading.Event], None]) -> None:
        try:
            work(stop)
        except BaseException as error:
            errors.append(error)
            stop.set()

    threads = [threading.Thread(target=run, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    try:
        while any(thread.is_alive() for thread in threads) and not stop.is_set():
            progress("fetching", there.done(), there.size)
            next(thread for thread in threads if thread.is_alive() or thread is threads[-1]).join(0.2)
    finally:
        stop.set()
        for thread in threads:  # a thread that waits for bytes may take longer, and then writes none
            thread.join(2.0)
    if errors:
        raise errors[0]
    progress("fetching", there.done(), there.size)


def _fetch(
    request: OpenRange,
    there: Partial,
    position: Callable[[], int],
    end: int,
    stop: threading.Event,
    whole: bool = False,
) -> None:
    """Fetch a piece, or with `whole` all of the file, from a server that knows no ranges."""

    def attempt() -> None:
        start = 0 if whole else position()
        with closing(_received(request, start, end)) as received:
            for at, data in received:
                if at < start:
                    raise _NoRangesError
                if stop.is_set():
                    break
                there.put(at, data)

    _keep_trying(attempt, position, end, stop)


def _keep_trying(attempt: Callable[[], None], position: Callable[[], int], end: int, stop: threading.Event) -> None:
    """
    Args:
        attempt: called until the end is reached.
        position: grows when an attempt brings new bytes.
        end: what it is at the end.
        stop: ends the attempts.

    Raises:
        EdgespecError: more than `RETRIES` attempts in a row brought no new byte.
    """
    failures, why = 0, "it was cut off"
    while (before := position()) < end and not stop.is_set():
        pause = 0.0
        try:
            attempt()
        except (EdgespecError, _NoRangesError):
            raise
        except Exception as error:
            why = first_line(error)
            pause = getattr(error, "pause", 0.0)
        failures = 0 if position() > before else failures + 1
        if failures > RETRIES:
            raise EdgespecError(
                f"fetching stopped after {failures} attempts without a byte ({why}); run it again later"
            )
        stop.wait(max(pause, min(LONGEST_PAUSE, PAUSE * 2 ** (failures - 1)) if failures else 0.0))


class _BusyError(Exception):
    def __init__(self, status: int, pause: float) -> None:
        super().__init__(f"HTTP {status}")
        self.pause = pause


def _received(request: OpenRange, start: int, stop: int) -> Generator[tuple[int, bytes]]:
    """(place in the file, bytes); from the file's first byte where the server knows no ranges."""
    with request(start, stop) as response:
        _check(response)
        at = start if response.status_code == 206 else 0
        unit, _, place = response.headers.get("content-range", f"bytes {at}-").partition(" ")
        if (unit, place.partition("-")[0]) != ("bytes", str(at)):
            raise EdgespecError(f"the server sends other bytes ({unit} {place}) than it was asked for")
        for data in response.iter_bytes():
            if at >= stop:
                break  # else read to the end, so that the connection can be used again
            yield at, data[: stop - at]
            at += len(data)


def _check(response: Any) -> None:
    status = int(response.status_code)
    if status in GONE:
        raise EdgespecError(f"the server answers {status} ({response.reason_phrase or 'no reason given'})")
    if status not in (200, 206):
        after = str(response.headers.get("retry-after", ""))
        raise _BusyError(status, min(LONGEST_PAUSE, float(after)) if after.isdigit() else 0.0)
