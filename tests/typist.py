"""A program on a pseudo-terminal, and a person who types."""

import os
import re
import select
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

PROGRAM = [sys.executable, "-c", "from edgespec.cli.commands import main; main()"]
SECONDS = 120
CONTROL = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")


class Typist:
    def __init__(self, child: int, terminal: int) -> None:
        self.child = child
        self.terminal: int | None = terminal
        self.seen = b""  # since the last `until`
        self.raw = ""

    def type(self, text: str) -> None:
        os.write(self.terminal, text.encode())

    def paste(self, text: str) -> None:
        """As a terminal does: with marks, if the program wants them."""
        marked = self.raw.rfind("\x1b[?2004h") > self.raw.rfind("\x1b[?2004l")
        self.type(f"\x1b[200~{text}\x1b[201~" if marked else text.replace("\n", "\r"))

    def until(self, what: str) -> str:
        """What is on the terminal before `what`, which must appear."""
        deadline, wanted = time.monotonic() + SECONDS, what.encode()
        while wanted not in self.seen:
            assert time.monotonic() < deadline, self.seen.decode("utf-8", "replace")
            self._read()
        before, self.seen = self.seen.split(wanted, 1)
        return before.decode("utf-8", "replace")

    def see_more(self, count: int) -> None:
        """Wait until `count` more bytes are on the terminal."""
        wanted = len(self.seen) + count
        while len(self.seen) < wanted:
            self._read()

    def _read(self) -> None:
        if select.select([self.terminal], [], [], 1)[0]:
            new = os.read(self.terminal, 4096)
            self.raw += new.decode("utf-8", "replace")
            self.seen += CONTROL.sub(b"", new)

    def kill(self, number: int) -> None:
        os.kill(self.child, number)

    def hang_up(self) -> None:
        os.close(self.terminal)
        self.terminal = None

    def ends(self) -> int:
        """The exit code; what is still written is read, so that nothing waits for a reader."""
        deadline = time.monotonic() + SECONDS
        while True:
            ended, status = os.waitpid(self.child, os.WNOHANG)
            if ended:
                self.child = 0
                return os.waitstatus_to_exitcode(status)
            assert time.monotonic() < deadline
            if self.terminal is None:
                time.sleep(0.05)
            else:
                with suppress(OSError):  # nobody writes any more
                    self._read()


@contextmanager
def typing_to(*arguments: str, environment: Mapping[str, str]) -> Iterator[Typist]:
    """Run `edgespec` with arguments on a terminal."""
    import pty

    child, terminal = pty.fork()
    if child == 0:
        os.environ.pop("NO_COLOR", None)
        os.environ |= {"TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"}  # nobody says where the cursor is
        os.environ |= environment
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests themselves may run under nohup
        os.execv(sys.executable, [*PROGRAM, *arguments])
    typist = Typist(child, terminal)
    try:
        yield typist
    finally:
        if typist.child:
            os.kill(child, 9)
            os.waitpid(child, 0)
        if typist.terminal is not None:
            os.close(terminal)
