"""List and delete files that edgespec itself fetched into the hub's cache.

Other programs share the cache, so each repository's folder has a record of the files that edgespec fetched.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from time import time

from edgespec.errors import EdgespecError
from edgespec.machine.files import read_json_object, write_whole

RECORD = "edgespec-pulled.json"
LEFT_BY_A_CUT = (".edgespec-partial", ".edgespec-record")  # of `download.py`


@dataclass(frozen=True, slots=True)
class Pulled:
    """
    Attributes:
        source: OWNER/REPOSITORY of a model folder, or OWNER/REPOSITORY/FILE of a GGUF.
        folder: of the repository in the cache.
        files: [(place in `folder`, place of its bytes or "" if that is not known)].
        when: seconds since 1970 at the end of the fetch; 0: it is not complete.
    """

    source: str
    folder: Path
    files: tuple[tuple[str, str], ...]
    when: float

    @property
    def path(self) -> Path:
        """The GGUF, or the model folder."""
        first = self.folder / self.files[0][0]
        return first if self.source.count("/") > 1 else self.folder.joinpath(*first.relative_to(self.folder).parts[:2])

    @property
    def bytes(self) -> int:
        places = (path for file in self.files for path in _bytes_of(self.folder, *file))
        return sum(path.stat().st_size for path in places if path.is_file())


def unchecked(path: Path) -> Path:
    """The name that a fetched file has until its bytes are compared, so that nothing takes it, also after a kill."""
    return path.with_name(f"{path.name}.edgespec-unchecked")


def _links(folder: Path, place: str) -> tuple[Path, Path]:
    return folder / place, unchecked(folder / place)


def _bytes_of(folder: Path, place: str, blob: str) -> list[Path]:
    """The files with the bytes of one file, complete or not; none of them is outside `folder`."""
    known = [link.resolve() for link in _links(folder, place) if link.exists()]
    if blob:
        known += [folder / blob, *(folder / f"{blob}{end}" for end in LEFT_BY_A_CUT)]
    root = folder.resolve()
    return [path for path in dict.fromkeys(path.resolve() for path in known) if path.is_relative_to(root)]


def add(folder: Path, source: str, files: Sequence[tuple[str, str]], done: bool) -> None:
    """Add fetched files to a repository's record.

    Args:
        folder: of the repository in the cache.
        source: as in `Pulled`.
        files: as in `Pulled`.
        done: the fetch is complete.

    Raises:
        OSError: the record cannot be written.
    """
    with locked(folder):
        found = {one.source: one for one in _read(folder)}
        known = found[source].files if source in found else ()
        found[source] = Pulled(source, folder, tuple(dict.fromkeys([*known, *files])), time() if done else 0.0)
        _write(folder, list(found.values()))


def installed(cache: Path) -> list[Pulled]:
    """Models that edgespec fetched into the hub's cache, of which something is there."""
    found = [one for record in sorted(cache.glob(f"models--*/{RECORD}")) for one in _read(record.parent)]
    return [one for one in found if one.bytes]


def delete(one: Pulled) -> None:
    """Delete what edgespec fetched of a model; bytes that files of another revision share stay.

    Raises:
        OSError: a file cannot be deleted.
    """
    for place, blob in one.files:
        delete_file(one.folder, place, blob)
    with locked(one.folder):
        _write(one.folder, [other for other in _read(one.folder) if other.source != one.source])


def delete_file(folder: Path, place: str, blob: str = "") -> None:
    """As `delete`, of one file; the arguments are as in `Pulled`."""
    bytes_of = _bytes_of(folder, place, blob)
    for link in _links(folder, place):
        link.unlink(missing_ok=True)
    used = {other.resolve() for other in (folder / "snapshots").rglob("*")}
    for path in bytes_of:
        if path not in used:
            path.unlink(missing_ok=True)
    for parent in (folder / place).relative_to(folder).parents[:-1]:
        with suppress(OSError):  # others' files are in it
            (folder / parent).rmdir()


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """No other program of edgespec changes a repository's folder meanwhile."""
    from filelock import FileLock

    locks = folder.parent / ".locks" / folder.name  # where huggingface_hub has its own
    locks.mkdir(parents=True, exist_ok=True)
    with FileLock(locks / f"{RECORD}.lock"):
        yield


def _write(folder: Path, found: Sequence[Pulled]) -> None:
    if not found:
        (folder / RECORD).unlink(missing_ok=True)
        return
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / RECORD, json.dumps({one.source: [one.when, one.files] for one in found}, indent=1) + "\n")


def _read(folder: Path) -> Iterator[Pulled]:
    root = folder.resolve()
    with suppress(EdgespecError, OSError, ValueError, TypeError):
        for source, (when, files) in read_json_object(folder / RECORD, EdgespecError).items():
            places = tuple(
                (str(place), str(blob))
                for place, blob in files
                if (folder / place).parent.resolve().is_relative_to(root)
            )
            if places:
                yield Pulled(source, folder, places, float(when))
