"""Makes a process of Linux or macOS lack what Windows lacks, for tests in child processes.

Other packages were imported before, so only the project's own modules meet what is missing. `os.name` stays: pathlib
and the standard library choose their own code by it.
"""

import ast
import ctypes
import json
import mmap
import os
import re
import runpy
import select
import shutil
import signal
import socket
import struct
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).parents[1]
OWN = (str(ROOT / "tests"), str(ROOT / "scripts"))
NO_MODULES = ["fcntl", "grp", "posix", "pty", "pwd", "resource", "syslog", "termios", "tty"]
MISSING: dict[Any, str] = {
    os: "O_CLOEXEC O_DIRECT O_NONBLOCK O_SYNC PRIO_PROCESS WNOHANG chown fchmod fchown fork forkpty getgid getloadavg "
    "getpgid getpgrp getpriority geteuid getuid killpg lchown major mkfifo openpty posix_fadvise posix_fallocate "
    "posix_spawn pread preadv pwrite pwritev sched_getaffinity sched_setaffinity sendfile setpriority setsid statvfs "
    "sync sysconf tcgetpgrp uname wait4 writev",
    select: "epoll kqueue poll",
    signal: "SIGALRM SIGHUP SIGKILL SIGPIPE SIGQUIT SIGUSR1 SIGUSR2 SIGWINCH alarm pause pthread_kill pthread_sigmask "
    "setitimer siginterrupt sigwait",
    socket: "AF_UNIX SO_REUSEPORT",
    mmap: " ".join(name for name in vars(mmap) if name.startswith(("MAP_", "PROT_", "MADV_"))),
}


preadv = getattr(os, "preadv", None)


class Kernel32:
    """Windows' answers: GlobalMemoryStatusEx fills a MEMORYSTATUSEX (sysinfoapi.h), ReadFile reads (fileapi.h)."""

    def __init__(self, works: bool = True) -> None:
        self.works = works

    def ReadFile(self, handle: Any, place: Any, size: int, done: Any, at: Any) -> int:  # noqa: N802
        """Handles are descriptors here; at the end of a file it fails."""
        offset = int(at._obj.offset) + (int(at._obj.offset_high) << 32)
        done._obj.value = preadv(handle.value, [place], offset) if preadv and len(place) == size else 0
        return int(self.works and done._obj.value > 0)

    def GetLastError(self) -> int:  # noqa: N802
        """ERROR_HANDLE_EOF, or ERROR_READ_FAULT."""
        return 38 if self.works else 30

    def GlobalMemoryStatusEx(self, pointer: Any) -> int:  # noqa: N802
        status = pointer._obj
        assert (ctypes.sizeof(status), status.dwLength) == (64, 64)
        # dwLength, dwMemoryLoad, and seven of 64 bits: total and free of memory, page file, address space; a reserve
        numbers = struct.pack("<2I7Q", 64, 40, 8 << 30, 3 << 30, 20 << 30, 11 << 30, 1 << 47, 1 << 46, 0)
        ctypes.memmove(ctypes.addressof(status), numbers, 64)
        return int(self.works)


def own_modules() -> dict[str, Path]:
    """The package's modules, its engines too, and their files."""
    found = {}
    for package, folder in (("edgespec", ROOT / "edgespec"), ("edgespec.backends", ROOT / "backends")):
        for path in sorted(folder.rglob("*.py")):
            names = (package, *path.relative_to(folder).with_suffix("").parts)
            found[".".join(name for name in names if name != "__init__")] = path
    return found


def import_others(paths: Iterable[Path], left_out: str) -> None:
    """Import what files import from other packages but those of a pattern, in functions too."""
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else names
            if isinstance(node, ast.ImportFrom) and node.level:
                continue
            for name in modules:
                if name.partition(".")[0] not in ("edgespec", "__future__") and not re.search(left_out, name):
                    with suppress(ImportError):
                        module = import_module(name)
                        for one in names if isinstance(node, ast.ImportFrom) else ():
                            getattr(module, one, None)


def take_away() -> None:
    """Remove what only POSIX systems have."""
    room = shutil.disk_usage(ROOT)
    shutil.disk_usage = lambda path: room  # with os.statvfs
    for name in NO_MODULES:
        sys.modules[name] = None  # type: ignore[assignment]
    for module, names in MISSING.items():
        for name in names.split():
            if hasattr(module, name):
                delattr(module, name)
    real = ctypes.CDLL.__init__

    def load(self: Any, name: Any, *arguments: Any, **more: Any) -> None:
        if name is None:
            raise TypeError("LoadLibrary() argument 1 must be str, not None")
        path = Path(name)  # Windows' names of llama.cpp's libraries, and of the C library
        here = {".dll": str(path.with_name(f"lib{path.stem}.so.0"))}.get(path.suffix, name)
        real(self, None if name == "msvcrt" else here, *arguments, **more)

    ctypes.CDLL.__init__ = load  # type: ignore[method-assign]
    no_replacing_of_open_files().__enter__()
    ctypes.windll = SimpleNamespace(kernel32=Kernel32())  # type: ignore[attr-defined]
    sys.modules["msvcrt"] = SimpleNamespace(get_osfhandle=lambda descriptor: descriptor)  # type: ignore[assignment]
    sys.platform = "win32"


@contextmanager
def no_replacing_of_open_files() -> Iterator[None]:
    """Until the end of the `with`."""
    names = ("replace", "rename", "unlink", "remove")
    usual = {name: getattr(os, name) for name in names}
    for name in names:
        setattr(os, name, _refusing(usual[name], exists=name == "rename"))
    try:
        yield
    finally:
        for name in names:
            setattr(os, name, usual[name])


def _refusing(act: Any, exists: bool) -> Any:
    """Windows removes and replaces no file that is open or mapped, and renames nothing to a name that is there."""

    def checked(*paths: Any, **more: Any) -> None:
        for path in map(os.fspath, paths):
            if isinstance(path, str) and os.path.realpath(path) in _held():
                raise PermissionError(13, "The process cannot access the file because it is being used", path)
        if exists and os.path.lexists(paths[1]):
            raise FileExistsError(17, "Cannot create a file when that file already exists", paths[1])
        act(*paths, **more)

    return checked


def _held() -> set[str]:
    """Open and mapped files of this process, as Linux tells them."""
    found = set()
    folder = "/proc/self/fd"
    for number in os.listdir(folder) if os.path.isdir(folder) else ():
        try:
            found.add(os.readlink(f"{folder}/{number}"))
        except OSError:
            continue
    if os.path.exists("/proc/self/maps"):
        with open("/proc/self/maps", encoding="utf-8") as lines:
            found |= {line.split(maxsplit=5)[5].strip() for line in lines if len(line.split(maxsplit=5)) == 6}
    return found


def failures(names: Iterable[str]) -> dict[str, str]:
    """Of modules that cannot be imported, the reason."""
    failed = {}
    for name in names:
        try:
            import_module(name)
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {error}"
    return failed


def main() -> None:
    """Import the package without modules of a pattern, scripts/install and files of tests, then run a text."""
    left_out, text, *names = sys.argv[1:]
    modules = {name: path for name, path in own_modules().items() if not re.search(left_out, name)}
    tests = list(map(Path, names))
    import_others([*modules.values(), ROOT / "scripts" / "install", *tests], left_out)
    for name, module in list(sys.modules.items()):  # what tests have imported of the project is imported again
        if name == "__main__":
            continue
        if name.partition(".")[0] == "edgespec" or str(getattr(module, "__file__", "")).startswith(OWN):
            del sys.modules[name]
    take_away()
    failed = failures([*(name for name in modules if not name.endswith("__main__")), *(path.stem for path in tests)])
    runpy.run_path(str(ROOT / "scripts" / "install"))
    print(json.dumps(failed))
    exec(text, {})


if __name__ == "__main__":
    main()
