"""Whose turn it is: of those who wait for a place, and of the texts that have one."""

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Protocol, TypeAlias, TypeVar

from edgespec.loop.generate import Generation
from edgespec.scheduler.requests import Job


class Place(Protocol):
    """Where a text is written."""

    job: Job | None
    generation: Generation | None


P = TypeVar("P", bound=Place)
Order: TypeAlias = Callable[[Job], float]


def by_turn(waiting: Sequence[Job], order: Order | None) -> list[Job]:
    """Admission order: requests as they came, or by `order`, smallest first; idle prefetch comes last."""
    return sorted(waiting, key=lambda job: (job.hold is not None, order(job) if order else 0.0))


def shortest_first(job: Job) -> float:
    """An `order`: the highest response ratio next (Brinch Hansen, 1971).

    Short requests come first, by their `max_tokens`, but each one rises while it waits, so none waits for ever.
    """
    return -(perf_counter() - job.since) / job.request.max_tokens


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
