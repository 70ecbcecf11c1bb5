"""Small targets that take their time, or die, for tests of `edgespec.scheduler.targets`."""

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from threading import Event

from alone import written
from reference.backend import ReferenceBackend, random_model

from edgespec.errors import Interrupted
from edgespec.loop.backend import Backend, Logits, Work
from edgespec.loop.sampling import SamplingParams
from edgespec.planners.none import NonePlanner

SIZE = 48  # of the vocabulary
PROMPT = [0, 5, 9, 3]


@dataclass
class Recorded:
    """Drafts a recorded sequence, `seconds` per token; a share of its tokens is wrong, the same ones each time."""

    text: Sequence[int]
    right: float
    seconds: float = 0.0
    stopped: Event = field(default_factory=Event)

    def begin(self, prompt_ids: Sequence[int], sampling: SamplingParams) -> None:
        """Nothing to read."""

    def after(self, token_ids: Sequence[int]) -> Iterator[int]:
        self.stopped.clear()
        for position in range(len(token_ids), len(self.text)):
            if self.stopped.wait(self.seconds):
                return
            right = Random(f"0 {position}").random() < self.right
            yield self.text[position] if right else (self.text[position] + 1) % SIZE

    def stop(self) -> None:
        self.stopped.set()

    def close(self) -> None:
        """Nothing to free."""


def plain_text(target: Backend, prompt: Sequence[int], sampling: SamplingParams, tokens: int) -> list[int]:
    return written(target, NonePlanner(), prompt, sampling, max_tokens=tokens, budget=1, stop_ids=frozenset())[0]


class Slow:
    """A backend whose passes take longer: so many seconds, give or take up to so many, unless they are interrupted."""

    def __init__(self, inner: Backend, seconds: float, jitter: float = 0.0, seed: int = 0) -> None:
        self._inner, self._seconds, self._jitter = inner, seconds, jitter
        self._random, self._interrupted, self.pass_number = Random(seed), Event(), 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def interrupt(self, pass_number: int) -> None:
        if pass_number == self.pass_number:
            self._interrupted.set()

    def forward(self, batch: Sequence[Work]) -> list[Logits]:
        try:
            return self._forward(batch)
        finally:
            self.pass_number += 1
            self._interrupted.clear()

    def _forward(self, batch: Sequence[Work]) -> list[Logits]:
        if self._interrupted.wait(self._seconds + self._jitter * self._random.random()):
            for work in batch:
                work.session.rewind(len(work.session.token_ids))
            raise Interrupted("the pass was interrupted")
        return self._inner.forward(batch)


@dataclass(frozen=True)
class SlowSpec:
    """A random model; its process dies in pass number `dies`."""

    seconds: float = 0.0
    jitter: float = 0.0
    model: int = 1
    dies: int = 0
    folder: str = ""  # where processes leave a mark that they have died: only once
    fails: str = ""

    def open(self) -> Backend:
        if self.fails:
            raise RuntimeError(self.fails)
        backend = ReferenceBackend(random_model(self.model, vocab_size=SIZE), context_length=256)
        seed = os.getpid() + time.perf_counter_ns() % 1000
        slow = Slow(backend, self.seconds, self.jitter, seed)
        return Mortal(slow, self.dies, self.folder) if self.dies else slow  # type: ignore[return-value]


class Mortal:
    """A backend whose process ends in a certain pass; another one that takes its place lives."""

    def __init__(self, inner: Slow, dies: int, folder: str) -> None:
        self._inner, self._left, self._folder = inner, dies, folder

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def forward(self, batch: Sequence[Work]) -> list[Logits]:
        self._left -= 1
        if self._left == 0 and len(os.listdir(self._folder)) < 2:
            open(os.path.join(self._folder, str(os.getpid())), "w", encoding="utf-8").close()
            os._exit(9)
        return self._inner.forward(batch)
