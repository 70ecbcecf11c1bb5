"""A model in a child process: llama.cpp ends the program if a lender dies.

`ChildBackend` is the model in this process, and `child_main.py` runs in the child. Calls go through a socket, one at
a time; the stop flag is in shared memory. Logits stay in the child, because verification needs only a few rows.
"""

import ctypes
import mmap
import os
import pickle
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import numpy as np

from edgespec.errors import Closed, EdgespecError, ModelError, UsageError, undone
from edgespec.loop.backend import Capabilities, Logits, Placed, Vocab, Work
from edgespec.loop.engines import LoadOptions, Progress
from edgespec.loop.sampling import Float32Array, IdArray, Scores
from edgespec.loop.session_files import content_of, identity_of
from edgespec.loop.shapes import BatchInvariance

from ...common.interrupts import Interruptible, Stop, one_pass
from ..ggml.files import parts
from ..vocab import load_vocab
from .rpc import check_lender, rpc

CHILD = "edgespec.backends.llamacpp.lending.child_main"
SECONDS_TO_END = 10
SECONDS_TO_BORROW = 20


@dataclass(frozen=True, slots=True)
class Facts:
    capabilities: Capabilities
    notes: list[str]
    build: str
    computing: Mapping[str, str | int | None]
    plan: Any
    placed: Placed


class ChildBackend(Interruptible):
    name = "llamacpp"

    def __init__(self, path: str, child: "Child", facts: Facts) -> None:
        self.vocab: Vocab = load_vocab(path)
        self._content = content_of(*parts(path))
        self.child = child
        self.capabilities, self.build, self.computing = facts.capabilities, facts.build, facts.computing
        self.notes: Sequence[str] = facts.notes
        self.plan, self.placed = facts.plan, facts.placed
        self.wait_seconds, self.stop = 0.0, Stop(child.flag)

    def open(self) -> "ChildSession":
        return ChildSession(self, self.child.call("open"))

    def keep_to(self, exact: BatchInvariance) -> None:
        self.capabilities = self.child.call("keep_to", exact)

    @one_pass
    def forward(self, batch: Sequence[Work]) -> list[Logits]:
        numbered = [replace(work, session=cast(Any, cast(ChildSession, work.session).number)) for work in batch]
        try:
            self.wait_seconds = self.child.call("forward", numbered)
        except KeyboardInterrupt:
            self.stop.ask()
            with suppress(EdgespecError):  # of a child that is gone
                self.child.call("wait")
            raise
        return [ChildLogits(self.child, index) for index in range(len(batch))]

    @property
    def identity(self) -> dict[str, Any]:
        return identity_of(self, self._content)

    def close(self) -> None:
        self.child.end()


class ChildSession:
    def __init__(self, backend: ChildBackend, number: int) -> None:
        self.number = number
        self.token_ids: list[int] = []
        self.unread_committed = 0
        self._backend = backend
        self._closed = False

    def reusable_prefix(self, length: int, *, short: bool = False) -> int:
        return int(self._backend.child.call("reusable_prefix", self.number, length, short))

    def commit(self, path: Sequence[int]) -> None:
        self._update("commit", list(path))

    def rewind(self, length: int) -> None:
        try:
            self._update("rewind", length)
        except (Closed, ModelError):
            self.token_ids, self.unread_committed = [], 0

    def fork(self) -> "ChildSession":
        other = ChildSession(self._backend, self._backend.child.call("fork", self.number))
        other._update("rewind", len(self.token_ids))
        return other

    def save(self, path: str | Path, note: Any = None) -> None:
        self._backend.child.call("ask_session", self.number, "save", os.path.abspath(path), note)

    def load(self, path: str | Path) -> Any:
        try:
            return self._backend.child.call("ask_session", self.number, "load", os.path.abspath(path))
        finally:
            self.token_ids.clear()
            self._update("rewind", self._backend.capabilities.context_length)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            with suppress(Closed, ModelError):
                self._backend.child.call("close", self.number)
        self.token_ids, self.unread_committed = [], 0

    def _update(self, name: str, argument: Any) -> None:
        known = self.number, name, argument, len(self.token_ids)
        same, added, self.unread_committed = self._backend.child.call("change", *known)
        del self.token_ids[same:]
        self.token_ids += added


class ChildLogits:
    def __init__(self, child: "Child", index: int) -> None:
        self._child, self._index = child, index

    def _ask(self, method: str, *arguments: Any) -> Any:
        return self._child.call("ask_logits", self._index, method, *arguments)

    def row(self, node: int) -> Float32Array:
        return cast(Float32Array, self._ask("row", node))

    view = row

    def state(self, node: int) -> Float32Array:
        return cast(Float32Array, self._ask("state", node))

    def top(
        self, nodes: Sequence[int], k: int, temperature: float, noise: Sequence[Float32Array | None]
    ) -> tuple[list[IdArray], list[Scores]]:
        found = self._ask("top", np.asarray(nodes).tolist(), k, temperature, list(noise))
        return cast(tuple[list[IdArray], list[Scores]], found)


class Child:
    def __init__(self, lenders: Sequence[str]) -> None:
        self._lenders = lenders
        self._calls = 0
        here, there = socket.socketpair()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        environment = os.environ | {"GGML_NO_BACKTRACE": "1"}
        pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": self._errors, "stderr": self._errors}
        with there, tempfile.TemporaryFile() as shared:
            shared.truncate(mmap.PAGESIZE)
            self.flag = flag_in(shared.fileno())
            ours = [there.fileno(), shared.fileno()]
            command = [sys.executable, "-P", "-m", CHILD, *map(str, ours)]
            self._process = subprocess.Popen(command, pass_fds=ours, env=environment, **pipes)
        self._connection = Connection(here.detach())

    def call(
        self,
        name: str,
        *arguments: Any,
        progress: Callable[[int, int], None] = lambda done, total: None,
        seconds: float | None = None,
    ) -> Any:
        """
        Args:
            name: of the method of `child_main.Host` to call in the child.
            arguments: for it.
            progress: called with the numbers that the method reports.
            seconds: to wait for an answer; None: no limit.

        Raises:
            EdgespecError, ValueError: as the method did.
            ModelError: the child is gone, for example with a lender, or does not answer.
        """
        self._calls += 1
        try:
            self._connection.send_bytes(pickle.dumps((self._calls, name, arguments)))
            while True:
                if not self._connection.poll(seconds):
                    raise ModelError(f"no answer from {', '.join(self._lenders)}: a lender lends to one at a time")
                number, kind, value = pickle.loads(self._message())
                if number == self._calls and kind != "progress":  # skip answers of interrupted calls
                    break
                if number == self._calls:
                    progress(*value)
        except (EOFError, OSError) as error:
            raise (Closed() if self._errors.closed else ModelError(self._why())) from error
        if kind == "raised":
            raise value
        return value

    def _message(self) -> bytes:
        try:
            return self._connection.recv_bytes()
        except KeyboardInterrupt:  # the start of the next message is unknown
            self._connection.close()
            raise

    def _why(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(SECONDS_TO_END)
        self._errors.seek(0)
        lines = [line.strip() for line in self._errors.read().decode("utf-8", "replace").splitlines() if line.strip()]
        said = f": {lines[-1]}" if lines else ""
        return f"a lender ({', '.join(self._lenders)}) or the connection to it is gone, with its layers{said}"

    def end(self, seconds: float = SECONDS_TO_END) -> None:
        """Close the socket, and kill the child if it runs after `seconds`; safe to call twice."""
        self._connection.close()
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._errors.close()


def flag_in(file: int) -> Any:
    """Map two bytes of a file as shared memory; see `Stop`."""
    return (ctypes.c_char * 2).from_buffer(mmap.mmap(file, mmap.PAGESIZE))


def load_in_child(path: str, options: LoadOptions, progress: Progress) -> ChildBackend:
    """Load a model in a child process, with layers in the memory of `options.lenders`.

    Raises:
        NoRpc: this llama.cpp has no RPC backend.
        ModelError: no lender answers, or the model cannot be loaded.
        UsageError: an address or an option is wrong.
    """
    lenders = options.lenders
    if options.gpu_memory is not None:
        raise UsageError("gpu_memory is this machine's: with lenders say gpu_layers")
    if lenders:
        rpc()
    for address in lenders:
        check_lender(address)
    child = Child(lenders)
    with undone(partial(child.end, 0)):
        child.call("borrow", list(lenders), seconds=SECONDS_TO_BORROW if lenders else None)
        facts = child.call("load", path, options, progress=progress)
        return ChildBackend(path, child, facts)
