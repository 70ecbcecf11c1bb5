"""Whose turn it is: of those who wait for a place, and of the texts that have one."""

from collections.abc import Sequence
from time import perf_counter
from typing import Protocol, TypeVar

from edgespec.loop.generate import Generation
from edgespec.scheduler.lengths import Lengths, urgency
from edgespec.scheduler.requests import Counts, Job


class Place(Protocol):
    """Where a text is written."""

    job: Job | None
    generation: Generation | None


P = TypeVar("P", bound=Place)


def by_turn(waiting: Sequence[Job], places: int, lengths: Lengths | None, counts: Counts) -> list[Job]:
    """Those who wait, whose turn it is first.

    Args:
        waiting: as they came; stays their order where it does not matter, or `lengths` is None.
        places: that are free.
        lengths: what is known.
        counts: how fast texts are written.
    """
    waiting = sorted(waiting, key=lambda job: job.hold is not None)  # what is only prepared comes last
    if lengths is None or len(waiting) <= places:
        return waiting
    for job in waiting:
        job.foretold = job.foretold or lengths.foretell(job.request.prompt_ids, job.request.max_tokens)
    now, each = perf_counter(), counts.pass_seconds / max(1, sum(counts.tokens.values()))
    return sorted(waiting, key=lambda job: (job.hold is not None, -urgency(now - job.since, job.foretold * each)))


def wanted(places: Sequence[P]) -> list[P]:
    """Those whose text goes on now; what is only prepared does so while there is nothing else."""
    return asked(places) or [place for place in places if place.job and place.generation and _to_prepare(place)]


def asked(places: Sequence[P]) -> list[P]:
    """Those whose text somebody waits for."""
    return [place for place in places if place.job and place.job.hold is None]


def held(places: Sequence[P]) -> P | None:
    """One whose text is only prepared."""
    return next((place for place in places if place.job and place.job.hold is not None), None)


def _to_prepare(place: Place) -> bool:
    assert place.job
    assert place.generation
    return place.job.cancelled or bool(place.generation.unread) or not place.job.waits
