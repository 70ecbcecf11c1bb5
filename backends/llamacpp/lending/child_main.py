"""Child process of `child_process.py`: it loads a model with borrowed layers, and answers calls."""

import os
import pickle
import signal
import sys
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

from edgespec.loop.engines import LoadOptions
from edgespec.loop.passes import common_prefix
from edgespec.machine.this_machine import this_machine

from ..engine import load_here, plan_here
from .child_process import Facts, flag_in
from .rpc import borrow


class Host:
    def __init__(self, send: Any, flag: Any) -> None:
        self._send, self._flag = send, flag
        self._sessions: dict[int, Any] = {}
        self._last = 0

    def borrow(self, lenders: list[str]) -> None:
        self._lenders, self._borrowed = ",".join(lenders), borrow(lenders)

    def load(self, path: str, options: LoadOptions) -> Facts:
        plan = plan_here(path, options, this_machine(path), self._borrowed)
        model = load_here(plan, plan.ways[-1], lambda *counts: self._send("progress", counts))
        model.computing = {**model.computing, "lenders": self._lenders}
        self._model = model
        model.use_flag(self._flag)
        return Facts(model.capabilities, list(model.notes), model.build, model.computing, model.plan, model.placed)

    def open(self) -> int:
        return self._number(self._model.open())

    def fork(self, session: int) -> int:
        return self._number(self._sessions[session].fork())

    def _number(self, session: Any) -> int:
        self._last += 1
        self._sessions[self._last] = session
        return self._last

    def keep_to(self, exact: Any) -> Any:
        self._model.keep_to(exact)
        return self._model.capabilities

    def reusable_prefix(self, session: int, length: int, short: bool) -> int:
        return int(self._sessions[session].reusable_prefix(length, short=short))

    def change(self, session: int, method: str, argument: Any, known: int) -> tuple[int, list[int], int]:
        """Call `commit` or `rewind` of a session, whose first `known` tokens the parent has.

        Returns:
            Number of tokens that stay, the new tokens, and the number of unread tokens.
        """
        found = self._sessions[session]
        before = found.token_ids[:known]
        getattr(found, method)(argument)
        same = common_prefix(found.token_ids, before)
        return same, found.token_ids[same:], found.unread_committed

    def ask_session(self, session: int, method: str, *arguments: Any) -> Any:
        return getattr(self._sessions[session], method)(*arguments)

    def close(self, session: int) -> None:
        self._sessions.pop(session).close()

    def forward(self, parts: list[Any]) -> float:
        self._logits = self._model.forward([replace(part, session=self._sessions[part.session]) for part in parts])
        return self._model.wait_seconds

    def wait(self) -> None:
        """Answered when the pass under way has ended."""

    def ask_logits(self, index: int, method: str, *arguments: Any) -> Any:
        return getattr(self._logits[index], method)(*arguments)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = Connection(int(sys.argv[1]))

    number = 0

    def send(kind: str, value: Any) -> None:
        connection.send_bytes(pickle.dumps((number, kind, value)))

    host = Host(send, flag_in(int(sys.argv[2])))
    while True:
        try:
            number, name, arguments = pickle.loads(connection.recv_bytes())
        except (EOFError, OSError):
            os._exit(0)  # llama.cpp would wait to free memory of a dead lender
        try:
            send("done", getattr(host, name)(*arguments))
        except Exception as error:
            send("raised", error)


if __name__ == "__main__":
    main()
