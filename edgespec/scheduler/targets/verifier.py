"""A copy of the target: prefill, verify draft tokens, answer with tokens.

Sampling happens here, so that no logits travel: of 152,000 tokens, a node's take 608 kB. A thread keeps its copy
between calls of `verify`.
"""

import threading
from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import numpy as np

from edgespec.errors import Interrupted
from edgespec.loop.backend import Backend, Capabilities, Logits, Placed, TellsPlaced, Work
from edgespec.loop.passes import common_prefix, most_nodes, prefill
from edgespec.loop.sampling import Float32Array, Noise, SamplingParams, sample
from edgespec.loop.tree import IntArray, chain_of
from edgespec.loop.verify import walk


class Spec(Hashable, Protocol):
    """The way to load a copy; it can be pickled, and equals what is unpickled."""

    def open(self) -> Backend:
        """
        Raises:
            EdgespecError: it cannot be loaded.
        """


@dataclass(frozen=True, slots=True)
class Task:
    """Draft tokens to verify; all copies give the same answer.

    Attributes:
        owner: name of the program that asks; several may share a cluster.
        number: serial number of the owner's task.
        token_ids: the accepted sequence; the last token is the root.
        prompt_length: number of these that are the prompt.
        draft_tokens: draft tokens after it.
        only_read: prefill; nothing is verified.
    """

    owner: str
    number: int
    token_ids: IntArray
    prompt_length: int
    draft_tokens: IntArray
    sampling: SamplingParams
    only_read: bool = False

    @property
    def end(self) -> int:
        return len(self.token_ids) + len(self.draft_tokens)


@dataclass(frozen=True, slots=True)
class Described:
    name: str
    build: str
    capabilities: Capabilities
    computing: tuple[tuple[str, str | int | None], ...]
    notes: tuple[str, ...]
    placed: Placed | None = None


class Verifier:
    def __init__(self, target: Backend) -> None:
        self.target = target
        self._session = target.open()
        self._prompt: list[int] = []
        self._last_row = np.zeros(0, np.float32)  # logits of its last row

    def verify(self, task: Task) -> list[int]:
        """
        Returns:
            The accepted draft tokens, then the target's own next one; `read` comes first.

        Raises:
            Interrupted: the task is no longer wanted.
        """
        tokens = task.token_ids.tolist()
        chain, root, output = tokens + task.draft_tokens.tolist(), len(tokens) - 1, list[int]()
        noise = Noise(task.sampling.seed, self.target.vocab.size)

        def token_after(row: Callable[[int], Float32Array], first: int, node: int, accepted: list[int]) -> int:
            written = [*output, *accepted]
            return sample(
                row(first + node), len(tokens) + len(written), task.sampling, noise,
                tokens[: task.prompt_length], tokens[task.prompt_length :] + written,
            )  # fmt: skip

        if len(tokens) == task.prompt_length:
            root, output = len(tokens), [token_after(lambda _: self._last_row, 0, 0, [])]
            if chain[root : root + 1] != output:
                return output
        while True:
            held = len(self._session.token_ids)
            end = min(len(chain), held + most_nodes(self.target.capabilities, self._session.unread_committed))
            nodes = np.arange(end - held, dtype=np.int32)
            known = min(end, max(root, held)) - held
            work = Work(self._session, np.array(chain[held:end], np.int32), nodes - 1, nodes[known:])
            logits = _forward(self.target, work, task)
            if end <= root:
                self._session.commit(nodes.tolist())
                continue
            found = walk(chain_of(chain[held + known : end]), partial(token_after, logits.row, known))
            self._session.commit(list(range(known + len(found.path))))
            output += found.output
            if held + known + len(found.path) < end or end == len(chain) or found.output[-1] != chain[end]:
                return output

    def read(self, task: Task) -> None:
        """Prefill the prompt, and nothing more: generated tokens are of trees' row class, as in plain decoding."""
        tokens, session = task.token_ids.tolist(), self._session
        prompt = tokens[: task.prompt_length]
        if prompt == self._prompt and common_prefix(session.token_ids, prompt) == len(prompt):
            session.rewind(max(len(prompt), common_prefix(session.token_ids, tokens[:-1])))
        else:
            self._prompt = []  # until all is read: an interrupt may come first
            read = prefill(self.target, session, prompt, want_last=True)
            assert read, "a part was read, which ends the prompt"
            self._prompt, self._last_row = prompt, read[0].row(read[1])


_own = threading.local()


@dataclass(slots=True)
class _Work:
    lock: threading.Lock = field(default_factory=threading.Lock)
    running: dict[tuple[str, int], tuple[Backend, int]] = field(default_factory=dict)
    unwanted: dict[str, int] = field(default_factory=dict)  # owner -> number


_work = _Work()


def verifier_of(spec: Spec) -> Verifier:
    if getattr(_own, "spec", None) != spec:
        close_own()
        _own.verifier, _own.spec = Verifier(spec.open()), spec
    verifier: Verifier = _own.verifier
    return verifier


def close_own() -> None:
    if getattr(_own, "spec", None) is not None:
        _own.spec = None
        _own.verifier.target.close()


def describe(spec: Spec) -> Described:
    """Load this thread's copy; errors as for `Spec.open`."""
    target = verifier_of(spec).target
    return Described(
        target.name, target.build, target.capabilities, tuple(sorted(target.computing.items())), tuple(target.notes),
        target.placed if isinstance(target, TellsPlaced) else None,
    )  # fmt: skip


def verify(spec: Spec, task: Task) -> list[int] | None:
    """Do a task with this thread's copy.

    Returns:
        The target's tokens; None: the task was stopped or has none.

    Raises:
        EdgespecError: it could not be done.
    """
    verifier = verifier_of(spec)
    verifier.read(task)  # not interrupted: later tasks need it, too
    if task.only_read:
        return None
    with suppress(Interrupted):
        return verifier.verify(task)
    return None


def _forward(target: Backend, work: Work, task: Task) -> Logits:
    """A pass that `stop_up_to` ends."""
    with _work.lock:
        if not is_wanted(task):
            raise Interrupted("nobody wants the answer")
        _work.running[task.owner, task.number] = target, target.pass_number
    try:
        return target.forward([work])[0]
    finally:
        with _work.lock:
            del _work.running[task.owner, task.number]


def is_wanted(task: Task) -> bool:
    return task.number > _work.unwanted.get(task.owner, 0)


def stop_up_to(owner: str, number: int) -> None:
    """End passes over an owner's tasks up to this number."""
    with _work.lock:
        _work.unwanted[owner] = max(number, _work.unwanted.get(owner, 0))
        for (whose, task), (target, pass_number) in _work.running.items():
            if whose == owner and task <= number:
                target.interrupt(pass_number)
