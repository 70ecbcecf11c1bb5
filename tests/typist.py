"""A program on a pseudo-terminal, and a person who types."""

import os
import re
import select
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

from forked import RUN, Forked

SECONDS = 120
CONTROL = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")


class Typist:
    def __init__(self, child: Forked, terminal: int) -> None:
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
        self.child.send_signal(number)

    def hang_up(self) -> None:
        os.close(self.terminal)
        self.terminal = None

    def ends(self) -> int:
        """The exit code; what is still written is read, so that nothing waits for a reader."""
        deadline = time.monotonic() + SECONDS
        while True:
            if (code := self.child.poll()) is not None:
                return code
            assert time.monotonic() < deadline
            if self.terminal is None:
                time.sleep(0.05)
            else:
                with suppress(OSError):  # nobody writes any more
                    self._read()


@contextmanager
def typing_to(*arguments: str, environment: Mapping[str, str], program: str = RUN) -> Iterator[Typist]:
    """Run `edgespec` with arguments on a terminal."""
    ours, theirs = os.openpty()
    # Nobody says where the cursor is.
    environment = {"TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1", "NO_COLOR": "", **environment}
    with Forked(*arguments, environment=environment, program=program, terminal=theirs) as child:
        os.close(theirs)
        typist = Typist(child, ours)
        try:
            yield typist
        finally:
            child.kill()
            if typist.terminal is not None:
                os.close(typist.terminal)
