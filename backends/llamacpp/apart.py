"""A model in a process of its own: where a lender dies, llama.cpp ends the program that borrowed from it.

Here is what stands for the model in this program; `apart_child.py` is the other end. Calls go through a socket, one at
a time. Logits stay there until they are asked for: a walk needs a few rows of a tree's.
"""

import os
import pickle
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, cast

import numpy as np

from edgespec.backend import Capabilities, Exact, Logits, Vocab, Work
from edgespec.errors import ModelError
from edgespec.sampling import Float32Array, IdArray, Scores
from edgespec.tree import IntArray

from .lending import check_lender, rpc
from .vocab import load_vocab

CHILD = "edgespec.backends.llamacpp.apart_child"
SECONDS_TO_END = 10


@dataclass(frozen=True, slots=True)
class Facts:
    """What does not change of a loaded model."""

    capabilities: Capabilities
    notes: list[str]
    build: str
    computing: Mapping[str, str | int | None]
    plan: Any


@dataclass(frozen=True, slots=True)
class Part:
    """A work, of a session by its number."""

    session: int
    token_ids: IntArray
    parents: IntArray
    wanted: IntArray
    prompt: bool


class Apart:
    """See `edgespec.backend.Backend`; made by `load_apart`."""

    name = "llamacpp"

    def __init__(self, vocab: Vocab, child: "Child", facts: Facts) -> None:
        self.vocab = vocab
        self.child = child
        self.capabilities, self.build, self.computing = facts.capabilities, facts.build, facts.computing
        self.notes: Sequence[str] = facts.notes
        self.plan = facts.plan
        self.wait_seconds = 0.0

    def open(self) -> "ApartSession":
        return ApartSession(self, self.child.call("open"))

    def keep_to(self, exact: Exact) -> None:
        self.capabilities = self.child.call("keep_to", exact)

    def forward(self, batch: Sequence[Work]) -> list[Logits]:
        sessions = [cast(ApartSession, work.session) for work in batch]
        works = [
            Part(session.number, work.token_ids, work.parents, work.wanted, work.prompt)
            for session, work in zip(sessions, batch, strict=True)
        ]
        self.wait_seconds = self.child.call("forward", works)
        return [ApartLogits(self.child, index) for index in range(len(batch))]

    def close(self) -> None:
        self.child.end()


class ApartSession:
    """See `edgespec.backend.Session`."""

    def __init__(self, backend: Apart, number: int) -> None:
        self.number = number
        self.token_ids: list[int] = []
        self.owed = 0
        self._backend = backend

    def kept(self, length: int) -> int:
        found: int = self._backend.child.call("kept", self.number, length)
        return found

    def commit(self, path: Sequence[int]) -> None:
        self._update("commit", list(path))

    def rewind(self, length: int) -> None:
        self._update("rewind", length)

    def fork(self) -> "ApartSession":
        other = ApartSession(self._backend, self._backend.child.call("fork", self.number))
        other._update("rewind", len(self.token_ids))
        return other

    def close(self) -> None:
        with suppress(ModelError):  # the process is gone, and the session with it
            self._backend.child.call("close", self.number)
        self.token_ids, self.owed = [], 0

    def _update(self, name: str, argument: Any) -> None:
        same, added, self.owed = self._backend.child.call(name, self.number, argument, len(self.token_ids))
        del self.token_ids[same:]
        self.token_ids += added


class ApartLogits:
    """See `edgespec.backend.Logits`."""

    def __init__(self, child: "Child", index: int) -> None:
        self._child, self._index = child, index

    def row(self, node: int) -> Float32Array:
        found: Float32Array = self._child.call("row", self._index, node)
        return found

    def state(self, node: int) -> Float32Array:
        found: Float32Array = self._child.call("state", self._index, node)
        return found

    def top(
        self, nodes: Sequence[int], k: int, temperature: float, noise: Sequence[Float32Array | None]
    ) -> tuple[list[IdArray], list[Scores]]:
        found: tuple[list[IdArray], list[Scores]] = self._child.call(
            "top", self._index, np.asarray(nodes).tolist(), k, temperature, list(noise)
        )
        return found


class Child:
    """The process, and calls to it."""

    def __init__(self, lenders: Sequence[str]) -> None:
        self._lenders = lenders
        here, there = socket.socketpair()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        environment = os.environ | {"GGML_NO_BACKTRACE": "1"}
        with there:
            self._process = subprocess.Popen(
                [sys.executable, "-m", CHILD, str(there.fileno())],
                pass_fds=[there.fileno()], stdin=subprocess.DEVNULL, stdout=self._errors, stderr=self._errors,
                env=environment,
            )  # fmt: skip
        self._connection = Connection(here.detach())

    def call(self, name: str, *arguments: Any, progress: Callable[[int, int], None] = lambda done, total: None) -> Any:
        """Have the process do something.

        Raises:
            EdgespecError, ValueError: what it raised.
            ModelError: it is gone, as when a lender is.
        """
        try:
            self._connection.send_bytes(pickle.dumps((name, arguments)))
            while True:
                kind, value = self._answer()
                if kind != "progress":
                    break
                progress(*value)
        except (EOFError, OSError) as error:
            raise ModelError(self._why()) from error
        if kind == "raised":
            raise value
        return value

    def _answer(self) -> tuple[str, Any]:
        """The next message. Ctrl-C waits for it, or the one after it would be taken for its answer."""
        try:
            found: tuple[str, Any] = pickle.loads(self._connection.recv_bytes())
        except KeyboardInterrupt:
            self._connection.recv_bytes()
            raise
        return found

    def _why(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(SECONDS_TO_END)
        self._errors.seek(0)
        lines = [line.strip() for line in self._errors.read().decode("utf-8", "replace").splitlines() if line.strip()]
        said = f": {lines[-1]}" if lines else ""
        return f"a lender ({', '.join(self._lenders)}) is gone, or the way to it; its layers went with it{said}"

    def end(self) -> None:
        """End it. Safe to call twice."""
        self._connection.close()  # which it takes for a sign
        try:
            self._process.wait(SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._errors.close()


def load_apart(
    path: str, lenders: Sequence[str], options: Mapping[str, Any], progress: Callable[[int, int], None]
) -> Apart:
    """Load a model in a process of its own, with layers in lenders' memory; `options` are those of `load`.

    Raises:
        NoRpc: llama.cpp cannot do so.
        ModelError: nobody lends there, or the model cannot be loaded.
        UsageError: an address or an option is wrong.
    """
    rpc()
    for address in lenders:
        check_lender(address)
    child = Child(lenders)
    try:
        facts = child.call("load", path, list(lenders), dict(options), progress=progress)
        return Apart(load_vocab(path), child, facts)
    except BaseException:
        child.end()
        raise
