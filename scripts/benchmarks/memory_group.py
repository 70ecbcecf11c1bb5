"""A limit on the memory of processes and on what they cache: a control group of Linux."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from edgespec.errors import EdgespecError
from edgespec.machine.files import weight_files

GROUPS = Path("/sys/fs/cgroup")
NO_LIMIT = 1 << 40


FILES = {  # of a version of control groups: name -> value, "{}" for the limit; and the file with the peak
    1: ({"memory.limit_in_bytes": "{}"}, "memory.max_usage_in_bytes"),
    2: ({"memory.max": "{}", "memory.swap.max": "0"}, "memory.peak"),
}


class Group:
    def __init__(self, folder: Path, version: int) -> None:
        self.folder = folder
        self._settings, self._peak = FILES[version]

    def limit(self, size: int) -> None:
        """Make the group anew, without a peak, and limit its memory; in version 2 without swap.

        Args:
            size: bytes.
        """
        if self.folder.is_dir():
            self.folder.rmdir()
        self.folder.mkdir()
        for name, value in self._settings.items():
            (self.folder / name).write_text(value.format(size), "utf-8")

    def enter(self) -> None:
        (self.folder / "cgroup.procs").write_text(str(os.getpid()), "utf-8")

    def peak(self) -> int:
        """Most bytes in use at once; 0: unknown (before Linux 5.19)."""
        try:
            return int((self.folder / self._peak).read_text("utf-8"))
        except OSError:
            return 0


@contextmanager
def memory_group() -> Iterator[Group]:
    """A control group below this process's own.

    Raises:
        EdgespecError: none may be made here.
    """
    lines = Path("/proc/self/cgroup").read_text("utf-8").splitlines()
    paths = {controllers: path.strip("/") for _, controllers, path in (line.split(":", 2) for line in lines)}
    version = 1 if "memory" in paths else 2
    base = GROUPS / "memory" / paths["memory"] if version == 1 else GROUPS / paths.get("", "")
    group = Group(base / f"edgespec-{os.getpid()}", version)
    try:
        group.limit(NO_LIMIT)
    except OSError as error:
        if group.folder.is_dir():
            group.folder.rmdir()
        raise EdgespecError("this needs a memory limit, and no control group may be made here") from error
    try:
        yield group
    finally:
        group.folder.rmdir()


def evict(model: str) -> None:
    """Drop a model's weights from the page cache."""
    for path in weight_files(model):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
