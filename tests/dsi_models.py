"""Small targets that take their time, or die, for tests of `edgespec.scheduler.targets`."""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from threading import Event

from edgespec.backends.reference.backend import ReferenceBackend, random_model

from benchmarks.dsi_wall import SIZE
from edgespec.errors import Interrupted
from edgespec.loop.backend import Backend, Logits, Work


class Slow:
    """A backend whose passes take longer: so many seconds, give or take up to so many, unless they are interrupted."""

    def __init__(
        self, inner: Backend, seconds: float, jitter: float = 0.0, seed: int = 0, *, quick_prompts: bool = False
    ) -> None:
        self._inner, self._seconds, self._jitter = inner, seconds, jitter
        self._quick_prompts = quick_prompts
        self._random, self._interrupted = Random(seed), Event()

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def interrupt(self) -> None:
        self._interrupted.set()

    def forward(self, batch: Sequence[Work]) -> list[Logits]:
        if self._quick_prompts and batch[0].prompt:
            return self._inner.forward(batch)
        if self._interrupted.wait(self._seconds + self._jitter * self._random.random()):
            self._interrupted.clear()
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
    quick_prompts: bool = False

    def open(self) -> Backend:
        if self.fails:
            raise RuntimeError(self.fails)
        backend = ReferenceBackend(random_model(self.model, vocab_size=SIZE), context_length=256)
        seed = os.getpid() + time.perf_counter_ns() % 1000
        slow = Slow(backend, self.seconds, self.jitter, seed, quick_prompts=self.quick_prompts)
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
