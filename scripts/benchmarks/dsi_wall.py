"""Several targets on one machine, with models that sleep, measured against the closed form.

A pass computes a small random model, whose tokens can be compared, and then sleeps until its time is over.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from random import Random
from threading import Event
from time import perf_counter
from typing import Any, cast

from edgespec.backends.reference.backend import ReferenceBackend, random_model

from benchmarks.dsi import TOKENS, dsi_round, seconds_of
from edgespec.errors import EdgespecError, Interrupted, MissingPackage
from edgespec.loop.backend import Backend, Logits, Work
from edgespec.loop.generate import Generation
from edgespec.loop.sampling import SamplingParams
from edgespec.loop.stats import GenerationStats
from edgespec.planners.none import NonePlanner
from edgespec.scheduler import drive
from edgespec.scheduler.requests import Request
from edgespec.scheduler.targets.coordinator import Targets
from edgespec.scheduler.targets.places import Cluster, Place, processes, threads
from edgespec.scheduler.targets.verifier import Described, describe

KINDS = ("threads", "processes", "dask")
SIZE = 48
PROMPT = (0, 5, 9, 3)


class Sleeping:
    """A backend whose passes take `seconds`, unless they are interrupted."""

    def __init__(self, inner: Backend, seconds: float) -> None:
        self._inner, self._seconds, self._interrupted = inner, seconds, Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def interrupt(self) -> None:
        self._interrupted.set()

    def forward(self, batch: Sequence[Work]) -> list[Logits]:
        started = perf_counter()
        logits = self._inner.forward(batch)
        if self._interrupted.wait(max(0.0, started + self._seconds - perf_counter())):
            self._interrupted.clear()
            for work in batch:
                work.session.rewind(len(work.session.token_ids))
            raise Interrupted("the pass was interrupted")
        return logits


@dataclass(frozen=True)
class SleepingSpec:
    seconds: float = 0.0

    def open(self) -> Backend:
        small = random_model(1, vocab_size=SIZE, layers=1, width=8, heads=1, hidden=8)
        inner = ReferenceBackend(small, context_length=256)
        return cast(Backend, Sleeping(inner, self.seconds))


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
        due = perf_counter()
        for position in range(len(token_ids), len(self.text)):
            due += self.seconds
            if self.stopped.wait(max(0.0, due - perf_counter())):
                return
            token = self.text[position]
            yield token if self.knows(position) else (token + 1) % SIZE

    def knows(self, position: int) -> bool:
        return Random(f"0 {position}").random() < self.right

    def rounds(self) -> list[int]:
        found, right = list[int](), 0
        for position in range(len(PROMPT), len(self.text)):
            if self.knows(position):
                right += 1
            else:
                found.append(right)
                right = 0
        return [*found, right]

    def stop(self) -> None:
        self.stopped.set()

    def close(self) -> None:
        """Nothing to free."""


def plain_text(target: Backend, prompt: Sequence[int], sampling: SamplingParams, tokens: int) -> list[int]:
    rounds = Generation(
        target, target.open(), NonePlanner(), prompt, sampling,
        max_tokens=tokens, budget=1, stats=GenerationStats(), stop_ids=frozenset(),
    ).steps()  # fmt: skip
    return [token for round_ in rounds for token in round_.tokens]


@contextmanager
def open_places(kind: str, copies: int, **environment: str) -> Iterator[list[Place]]:
    """Threads, processes, or the workers of a Dask cluster on this machine's loopback, with this environment.

    Raises:
        MissingPackage: distributed is not installed.
    """
    if kind != "dask":
        places = threads(copies) if kind == "threads" else processes(copies)
        try:
            yield places
        finally:
            for place in places:
                place.close()
        return
    try:
        import dask
        import distributed
    except ImportError as error:
        raise MissingPackage("distributed", "cluster", "measuring Dask") from error
    local_cluster: Any = distributed.LocalCluster
    dask.config.set({"distributed.scheduler.worker-saturation": 1.0})  # see docs/guides/several-machines.md
    with local_cluster(
        n_workers=copies, threads_per_worker=1, host="127.0.0.1", dashboard_address=None, memory_limit=None,
        env=environment,
    ) as local:  # fmt: skip
        cluster = Cluster(local.scheduler_address)
        try:
            yield cluster.places
        finally:
            cluster.close()


def measure(
    places: Sequence[Place], target: float, draft: float, lookahead: int, acceptance: float
) -> tuple[float, float]:
    """Generate TOKENS; the places stay open.

    Returns:
        Seconds, and those of the closed form for the same drafts.

    Raises:
        EdgespecError: the tokens are not those of plain decoding.
    """
    sampling, spec = SamplingParams(temperature=1.0), SleepingSpec(target)
    text = plain_text(SleepingSpec().open(), PROMPT, sampling, TOKENS)
    proposer = Recorded([*PROMPT, *text], acceptance, draft)
    described: list[Described] = [f.result() for f in [p.executor.submit(describe, spec) for p in places]]
    vocab = SleepingSpec().open().vocab
    made: Any = Targets(vocab, described[0], spec, places, proposer, lookahead=lookahead, stop_ids=frozenset())
    for _ in range(2):  # in the first one the copies read the prompt
        events = drive.events(made, Request(list(PROMPT), sampling, TOKENS))
        started = perf_counter()
        written = [chunk.token_id for event in events for chunk in drive.chunks_in(event)]
        wall = perf_counter() - started
        if written != text:
            raise EdgespecError("the tokens are not those of plain decoding: this is a bug")
    cost = partial(dsi_round, target, draft, lookahead)
    return wall, seconds_of(proposer.rounds(), TOKENS, cost)
