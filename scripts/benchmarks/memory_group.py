"""A limit on the memory of processes and on what they cache: a control group of Linux."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from edgespec.errors import EdgespecError

GROUPS = Path("/sys/fs/cgroup")
NO_LIMIT = 1 << 40


class Group:
    def __init__(self, folder: Path, version: int) -> None:
        self.folder = folder
        self._version = version

    def limit(self, size: int) -> None:
        """Allow `size` bytes, none of them swapped; reset the peak."""
        self._write("memory.limit_in_bytes" if self._version == 1 else "memory.max", size)
        if self._version == 1:
            self._write("memory.max_usage_in_bytes", 0)
        else:
            self._write("memory.swap.max", 0)

    def enter(self) -> None:
        """Put this process into the group."""
        self._write("cgroup.procs", os.getpid())

    def _write(self, name: str, value: int) -> None:
        (self.folder / name).write_text(str(value))

    def peak(self) -> int:
        """Most bytes in use at once."""
        name = "memory.max_usage_in_bytes" if self._version == 1 else "memory.peak"
        try:
            return int((self.folder / name).read_text())
        except OSError:  # memory.peak: since Linux 5.19
            return 0


@contextmanager
def memory_group() -> Iterator[Group]:
    """Raises EdgespecError where that is not allowed."""
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    paths = {controllers: path.strip("/") for _, controllers, path in (line.split(":", 2) for line in lines)}
    version = 1 if "memory" in paths else 2
    base = GROUPS / "memory" / paths["memory"] if version == 1 else GROUPS / paths.get("", "")
    group = Group(base / f"edgespec-{os.getpid()}", version)
    try:
        group.folder.mkdir()
        group.limit(NO_LIMIT)
    except OSError as error:
        if group.folder.is_dir():
            group.folder.rmdir()
        raise EdgespecError("this needs a memory limit, and no control group may be made here") from error
    try:
        yield group
    finally:
        group.folder.rmdir()


def weight_files(model: str) -> list[Path]:
    return list(Path(model).glob("*.safetensors")) if Path(model).is_dir() else [Path(model)]


def evict(model: str) -> None:
    """Drop the weights of a model file or folder from the page cache."""
    for path in weight_files(model):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
