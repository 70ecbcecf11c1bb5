"""The program `edgespec` in processes of its own that start in milliseconds: forks of one that has imported it.

What depends on how Python starts (locale, bytes of arguments, closed streams) needs a process that does.
"""

import array
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Any

FORKS = sys.platform == "linux"  # macOS' libraries may end a fork, so there each program starts anew
RUN = "from edgespec.cli.commands import main; main()"
IMPORTED = (
    "edgespec.cli.commands", "edgespec.cli.serve", "edgespec.cli.chat", "reference.backend",
    "edgespec.backends.llamacpp.engine",
    "edgespec.planners.auto", "edgespec.server.app", "uvicorn", "llguidance", "prompt_toolkit.application",
)  # fmt: skip


class Forked:
    """As `subprocess.Popen` of `edgespec` with arguments; output is text from pipes."""

    def __init__(
        self, *arguments: str, environment: Mapping[str, str] | None = None, program: str = RUN,
        stdin: int = subprocess.DEVNULL, terminal: int | None = None,
    ) -> None:  # fmt: skip
        """
        Args:
            environment: besides that of the tests.
            program: what runs, where it is not the command alone.
            stdin: a file, DEVNULL or PIPE.
            terminal: the program's side of one, for all its streams.
        """
        (there, write), (read, out), (read_errors, err), empty = os.pipe(), os.pipe(), os.pipe(), os.open(os.devnull, 0)
        given = {subprocess.PIPE: there, subprocess.DEVNULL: empty}.get(stdin, stdin)
        job = {"arguments": arguments, "environment": {**os.environ, **(environment or {})}, "cwd": os.getcwd(),
               "program": program, "terminal": terminal is not None}  # fmt: skip
        self.pid = int(_ask(job, (given, out, err) if terminal is None else [terminal] * 3))
        for number in (there, out, err, empty):
            os.close(number)
        self.stdin, self.stdout, self.stderr = os.fdopen(write, "w"), os.fdopen(read), os.fdopen(read_errors)
        self.returncode: int | None = None

    def __enter__(self) -> "Forked":
        return self

    def __exit__(self, *about: object) -> None:
        for stream in (self.stdin, self.stdout, self.stderr):
            with suppress(BrokenPipeError):
                stream.close()
        if about[0]:
            self.kill()
        self.wait()

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = _ask({"wait": self.pid})
        return self.returncode

    def wait(self, timeout: float = 120) -> int:
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                self.kill()
                raise subprocess.TimeoutExpired("edgespec", timeout)
            time.sleep(0.005)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def forked(*arguments: str, **more: Any) -> subprocess.CompletedProcess[str]:
    """Run it to its end."""
    with Forked(*arguments, **more) as process:
        out, err = process.stdout.read(), process.stderr.read()
        return subprocess.CompletedProcess(arguments, process.wait(), out, err)


@cache
def _parent() -> socket.socket:
    """The process that forks; it ends with this one."""
    import atexit

    here, there = socket.socketpair()
    process = subprocess.Popen([sys.executable, __file__, str(there.fileno())], pass_fds=[there.fileno()])
    there.close()
    atexit.register(lambda: (here.close(), process.wait()))
    return here


def _ask(job: Mapping[str, Any], files: Sequence[int] = ()) -> Any:
    data = json.dumps(job).encode() + b"\n"
    _parent().sendmsg([data[:1]], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))] if files else [])
    _parent().sendall(data[1:])
    return json.loads(_parent().makefile().readline())


def main() -> None:
    """Fork as asked; returns in a child, which then runs the program."""
    from importlib import import_module

    for name in IMPORTED if FORKS else ():
        with suppress(ImportError):
            import_module(name)
    gc.freeze()
    asking = socket.socket(fileno=int(sys.argv[1]))
    while True:
        first, files, _, _ = socket.recv_fds(asking, 1, 3)
        if not first:
            os._exit(0)
        job = json.loads(first + asking.makefile("rb").readline())
        if "wait" in job:
            ended, status = os.waitpid(job["wait"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if ended else None
        elif child := os.fork():
            answer = child
            for number in files:
                os.close(number)
        else:
            break
        asking.sendall(json.dumps(answer).encode() + b"\n")
    asking.close()
    if job["terminal"]:
        os.login_tty(os.dup(files[0]))
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests themselves may run under nohup
    else:
        for stream, number in enumerate(files):
            os.dup2(number, stream)
    for number in files:
        os.close(number)
    os.chdir(job["cwd"])
    if not FORKS:
        command = [sys.executable, "-c", job["program"], *job["arguments"]]
        os.execve(sys.executable, command, job["environment"])
    os.environ.clear()
    os.environ.update(job["environment"])
    sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    sys.argv = ["edgespec", *job["arguments"]]
    exec(job["program"], {"__name__": "__main__"})


if __name__ == "__main__":
    main()
