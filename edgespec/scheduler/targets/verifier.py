"""What a copy of the target does: read what it lacks of a text, judge the guesses, answer with tokens.

Sampling happens here, so that no logits travel: at 152,000 tokens of vocabulary those of one node are 608 kB.

A copy belongs to one thread, which keeps it between calls: `verify` is all that an executor has to run.
"""

import threading
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import numpy as np

from edgespec.errors import Interrupted
from edgespec.loop.backend import Backend, Capabilities, Logits, Work
from edgespec.loop.passes import common_prefix, most_nodes, prefill
from edgespec.loop.sampling import Noise, SamplingParams, sample
from edgespec.loop.tree import IntArray, chain_of
from edgespec.loop.verify import walk


class Spec(Hashable, Protocol):
    """How a copy is loaded. Must be picklable, and equal to its own copies."""

    def open(self) -> Backend:
        """Load it. Raises EdgespecError."""


@dataclass(frozen=True, slots=True)
class Task:
    """Guesses to be judged. Whatever copy does it, with whatever it has read before, the answer is the same."""

    owner: str  # whose texts these are: several programs may share a cluster
    number: int  # grows
    token_ids: IntArray  # all that is certain of the text; the last is the root
    prompt_length: int
    guesses: IntArray  # what may follow it
    sampling: SamplingParams
    only_read: bool = False  # the text; nothing is to be judged

    @property
    def end(self) -> int:
        """Tokens of the text if all guesses are right, without the bonus."""
        return len(self.token_ids) + len(self.guesses)


@dataclass(frozen=True, slots=True)
class Described:
    """What a copy is."""

    name: str
    build: str
    capabilities: Capabilities
    computing: tuple[tuple[str, str | int | None], ...]
    notes: tuple[str, ...]


class Verifier:
    """One session of a copy."""

    def __init__(self, target: Backend) -> None:
        self.target = target
        self._session = target.open()
        self._prompt: list[int] = []

    def judge(self, task: Task) -> list[int]:
        """The target's own tokens after the text, which `read` has seen: the guesses that are right, then one more.

        Raises:
            Interrupted: in between, perhaps for nobody wants to know any more.
        """
        tokens = task.token_ids.tolist()
        chain, root, output = tokens + task.guesses.tolist(), len(tokens) - 1, list[int]()
        noise = Noise(task.sampling.seed, self.target.vocab.size)

        def token_after(logits: Logits, first: int, node: int, accepted: list[int]) -> int:
            written = [*output, *accepted]
            return sample(
                logits.row(first + node), len(tokens) + len(written), task.sampling, noise,
                tokens[: task.prompt_length], tokens[task.prompt_length :] + written,
            )  # fmt: skip

        while is_wanted(task):
            held = len(self._session.token_ids)
            end = min(len(chain), held + most_nodes(self.target.capabilities, self._session.unread_committed))
            nodes = np.arange(end - held, dtype=np.int32)
            known = min(end, max(root, held)) - held  # nodes that others have judged
            work = Work(self._session, np.array(chain[held:end], np.int32), nodes - 1, nodes[known:])
            logits = self.target.forward([work])[0]
            if end <= root:
                self._session.commit(nodes.tolist())
                continue
            found = walk(chain_of(chain[held + known : end]), partial(token_after, logits, known))
            self._session.commit(list(range(known + len(found.path))))
            output += found.output
            if held + known + len(found.path) < end or end == len(chain) or found.output[-1] != chain[end]:
                return output
        raise Interrupted("nobody wants the answer")

    def read(self, task: Task) -> None:
        """The prompt, in the shapes of prompts; what is written after it stays for `judge`, as plain decoding does."""
        tokens, session = task.token_ids.tolist(), self._session
        prompt = tokens[: task.prompt_length - 1]
        if prompt == self._prompt and common_prefix(session.token_ids, prompt) == len(prompt):
            session.rewind(common_prefix(session.token_ids, tokens[:-1]))
        else:
            self._prompt = []  # what an interrupt leaves may have been read in another class
            prefill(self.target, session, prompt)
            self._prompt = prompt


_own = threading.local()  # .spec and .verifier of this thread


@dataclass(slots=True)
class _Work:
    """What this process is doing, for those who want to stop it."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    running: dict[tuple[str, int], Backend] = field(default_factory=dict)
    unwanted: dict[str, int] = field(default_factory=dict)  # by owner: tasks up to this number


_work = _Work()


def verifier_of(spec: Spec) -> Verifier:
    """This thread's copy, loaded when it is first asked for."""
    if getattr(_own, "spec", None) != spec:
        close_own()
        _own.verifier, _own.spec = Verifier(spec.open()), spec
    verifier: Verifier = _own.verifier
    return verifier


def close_own() -> None:
    """Free this thread's copy."""
    if getattr(_own, "spec", None) is not None:
        _own.spec = None
        _own.verifier.target.close()


def describe(spec: Spec) -> Described:
    """Load this thread's copy. Raises EdgespecError: it cannot be loaded."""
    target = verifier_of(spec).target
    return Described(
        target.name, target.build, target.capabilities, tuple(sorted(target.computing.items())), tuple(target.notes)
    )


def verify(spec: Spec, task: Task) -> list[int] | None:
    """Do a task with this thread's copy: the target's tokens, or None, if it was stopped.

    Raises:
        EdgespecError: it could not be done.
    """
    verifier = verifier_of(spec)
    while True:
        try:
            verifier.read(task)  # to its end: later tasks need it, too
            if task.only_read or not is_wanted(task):
                return None
            with _judging(verifier.target, task):
                return verifier.judge(task)
        except Interrupted:  # or another task was meant, which had just ended
            if not task.only_read and not is_wanted(task):
                return None


@contextmanager
def _judging(target: Backend, task: Task) -> Iterator[None]:
    """Within, `stop_up_to` ends passes."""
    with _work.lock:
        _work.running[task.owner, task.number] = target
    try:
        yield
    finally:
        with _work.lock:
            del _work.running[task.owner, task.number]


def is_wanted(task: Task) -> bool:
    """Whether nobody has said that its answer is not."""
    return task.number > _work.unwanted.get(task.owner, 0)


def stop_up_to(owner: str, number: int) -> None:
    """Nobody wants answers to an owner's tasks up to this number: passes over them end early."""
    with _work.lock:
        _work.unwanted[owner] = max(number, _work.unwanted.get(owner, 0))
        for (whose, task), target in _work.running.items():
            if whose == owner and task <= number:
                target.interrupt()
