"""DSI with a chain of models, and the acceptance rate of a real draft.

The paper's Algorithm 1 takes any number of models. Here several copies of a middle model, with a smaller draft, are the
draft of the target: none of the models waits for a larger one.
"""

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from queue import SimpleQueue
from time import perf_counter
from typing import Any, cast

from edgespec.backends.reference.backend import ReferenceBackend, perturbed, random_model

from benchmarks.dsi import (
    GRID_LOOKAHEADS,
    MOST_COPIES,
    TOKENS,
    best_dsi,
    dsi_round,
    expected,
    expected_si,
    least_lookahead,
)
from benchmarks.dsi_wall import PROMPT, SIZE, Sleeping, plain_text
from edgespec.errors import EdgespecError
from edgespec.loop.backend import Backend
from edgespec.loop.passes import common_prefix
from edgespec.loop.sampling import SamplingParams
from edgespec.measure.replay import GREEDY, Recording
from edgespec.scheduler import drive
from edgespec.scheduler.requests import Ended, Event, Handle, Request
from edgespec.scheduler.targets.coordinator import Targets
from edgespec.scheduler.targets.places import threads
from edgespec.scheduler.targets.proposer import DraftProposer, Proposer
from edgespec.scheduler.targets.verifier import describe

SAMPLING = SamplingParams(temperature=1.0)


class TargetsProposer:
    """A draft that is itself several copies of a model with a smaller draft."""

    def __init__(self, targets: Targets, most_tokens: int = TOKENS) -> None:
        self._targets, self._most = targets, most_tokens
        self._handle: Handle | None = None
        self._sampling = GREEDY

    def begin(self, prompt_ids: Sequence[int], sampling: SamplingParams) -> None:
        self._sampling = sampling

    def after(self, token_ids: Sequence[int]) -> Iterator[int]:
        events = SimpleQueue[Event]()
        handle = self._targets.submit(Request(list(token_ids), self._sampling, self._most), events.put)
        self._handle = handle
        try:
            while True:
                event = events.get()
                yield from (chunk.token_id for chunk in drive.chunks_in(event) if chunk.token_id is not None)
                if isinstance(event, Ended):
                    return
        finally:
            handle.cancel()

    def stop(self) -> None:
        if self._handle:
            self._handle.cancel()

    def close(self) -> None:
        self._targets.close()


@dataclass(frozen=True)
class NoisySpec:
    """A small model whose passes take `seconds`; the larger `noise`, the seldomer it writes what the target writes."""

    seconds: float
    noise: float

    def silent(self) -> "NoisySpec":
        return replace(self, seconds=0.0)

    def open(self) -> Backend:
        small = perturbed(random_model(1, vocab_size=SIZE, layers=1, width=8, heads=1, hidden=8), self.noise, 1)
        return cast(Backend, Sleeping(ReferenceBackend(small, context_length=256), self.seconds))


def proposer_of(specs: Sequence[NoisySpec], copies: int) -> Proposer:
    return TargetsProposer(targets_of(specs, copies)) if len(specs) > 1 else DraftProposer(specs[0].open(), SIZE)


def targets_of(specs: Sequence[NoisySpec], copies: int) -> Targets:
    """The models from the smallest to the target; each but the smallest is the target of those before."""
    *smaller, spec = specs
    places = threads(copies)
    described = places[0].executor.submit(describe, spec).result()
    proposer = proposer_of(smaller, copies)
    return Targets(spec.open().vocab, described, spec, places, proposer, stop_ids=frozenset())


def measure(specs: Sequence[NoisySpec], copies: int) -> tuple[float, float]:
    """Generate TOKENS by copies that have read the prompt.

    Returns:
        Seconds, and those of the closed form, by measured acceptance rates.

    Raises:
        EdgespecError: the tokens are not those of plain decoding.
    """
    text = plain_text(specs[-1].silent().open(), PROMPT, SAMPLING, TOKENS)
    with closing(cast(Any, targets_of(specs, copies))) as made:
        for _ in range(2):
            started = perf_counter()
            events = drive.events(made, Request(list(PROMPT), SAMPLING, TOKENS))
            written = [chunk.token_id for event in events for chunk in drive.chunks_in(event)]
            wall = perf_counter() - started
            if written != text:
                raise EdgespecError("the tokens are not those of plain decoding: this is a bug")
    draft = specs[0].seconds
    for smaller, spec in pairwise(specs):
        text = plain_text(spec.silent().open(), PROMPT, SAMPLING, TOKENS)
        with closing(DraftProposer(smaller.silent().open(), SIZE)) as proposer:
            acceptance = acceptance_rate(accepted_lengths(proposer, Recording(list(PROMPT), text), SAMPLING))
        lookahead = least_lookahead(spec.seconds, draft, copies)
        closed = expected(acceptance, partial(dsi_round, spec.seconds, draft, lookahead))
        draft = closed / TOKENS  # of a token of this model, which drafts for the next one
    return wall, closed


def accepted_lengths(proposer: Proposer, recording: Recording, sampling: SamplingParams = GREEDY) -> list[int]:
    """Draft tokens that equal the target's, up to each that does not; the first is from the prompt on, as in the paper.

    The draft goes on after the target's token. The end of the answer, or of the draft's context, cuts the last length.
    """
    text, at, found = [*recording.prompt_ids, *recording.output_ids], len(recording.prompt_ids), list[int]()
    proposer.begin(recording.prompt_ids, sampling)
    while at < len(text):
        drafted = list[int]()
        for token in proposer.after(text[:at]):
            drafted.append(token)
            if token != text[at + len(drafted) - 1] or at + len(drafted) == len(text):
                break
        if not drafted:
            break
        found.append(common_prefix(drafted, text[at:]))
        at += found[-1] + 1
    return found


def acceptance_rate(lengths: Sequence[int]) -> float:
    """The paper's estimate: lengths are geometric, so the rate is 1 - 1 / (1 + their mean)."""
    return sum(lengths) / (sum(lengths) + len(lengths)) if lengths else 0.0


def closed_forms(acceptance: float, target: float, draft: float) -> tuple[float, float]:
    """
    Returns:
        Seconds of TOKENS by SI and by DSI, both at their best lookahead.
    """
    lookaheads = [*GRID_LOOKAHEADS, least_lookahead(target, draft, MOST_COPIES)]
    si = min(expected_si(acceptance, target, draft, lookahead) for lookahead in GRID_LOOKAHEADS)
    return si, best_dsi(acceptance, target, draft, lookaheads)
