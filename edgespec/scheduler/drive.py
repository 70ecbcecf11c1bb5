"""Submits requests and iterates over their events, which the scheduler's thread reports."""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from functools import partial
from queue import SimpleQueue
from typing import Protocol

from edgespec.loop.stats import GenerationStats
from edgespec.loop.tree import Source
from edgespec.machine.process import check_process
from edgespec.scheduler.events import Chunk, Ended, Event, GenerationResult, Reading, Wrote
from edgespec.scheduler.requests import Request
from edgespec.scheduler.sequence import Seq, never


class Decoder(Protocol):
    """What decodes requests: a `Scheduler`, or several targets.

    Attributes:
        process: that made it.
    """

    process: int

    def start(self) -> None:
        """As `Scheduler.start`."""

    def wake(self) -> None:
        """As `Scheduler.wake`."""

    def submit(
        self,
        request: Request,
        emit: Callable[[Event], None],
        stats: GenerationStats | None = None,
        *,
        is_full: Callable[[], bool] = never,
    ) -> Seq:
        """As `Scheduler.submit`."""

    def close(self) -> None:
        """As `Scheduler.close`."""


def events(decoder: Decoder, request: Request, stats: GenerationStats | None = None) -> Generator[Event]:
    """The events of one request; arguments and errors as for `Scheduler.submit`."""
    with closing(events_of(decoder, [request], [stats] if stats is not None else ())) as found:
        for _, event in found:
            yield event


def chunks(
    decoder: Decoder,
    request: Request,
    stats: GenerationStats | None,
    progress: Callable[[int, int], None] | None,
) -> Iterator[Chunk]:
    """The chunks of one request; otherwise as `events`."""
    with closing(events(decoder, request, stats)) as found:
        for event in found:
            yield from chunks_in(event, progress)


class Mailbox:
    """Events on their way to one reader.

    Attributes:
        most: events that may be there before the reader asks for them: those of one step.
    """

    def __init__(self, wake: Callable[[], None], most: int) -> None:
        """
        Args:
            wake: called when the reader has taken the last event.
            most: as above.
        """
        self.most = most
        self._events: SimpleQueue[tuple[int, Event]] = SimpleQueue()
        self._wake, self._waits, self._on_its_way = wake, False, False

    def put(self, number: int, event: Event) -> None:
        self._events.put((number, event))
        if self._waits:
            self._waits, self._on_its_way = False, True

    def take(self) -> tuple[int, Event]:
        self._waits = True
        found = self._events.get()
        self._waits = self._on_its_way = False
        if self._events.empty():
            self._wake()
        return found

    def is_full(self) -> bool:
        return self._events.qsize() - self._on_its_way >= self.most


def events_of(
    decoder: Decoder, requests: Sequence[Request], stats: Sequence[GenerationStats] = ()
) -> Generator[tuple[int, Event]]:
    """
    Yields:
        (number of the request, event), otherwise as `events`, for several requests.
    """
    seqs, left = list[Seq](), len(requests)
    found = Mailbox(decoder.wake, left)
    try:
        decoder.start()
        for number, request in enumerate(requests):
            tell, counts = partial(found.put, number), stats[number] if stats else None
            seqs.append(decoder.submit(request, tell, counts, is_full=found.is_full))
        while left:
            check_process(decoder.process)
            number, event = found.take()
            left -= isinstance(event, Ended)
            found.most = max(left, 1)
            yield number, event
    finally:
        for seq in seqs:
            seq.cancel()


def results_as_they_end(decoder: Decoder, requests: Sequence[Request]) -> Generator[tuple[int, GenerationResult]]:
    """
    Yields:
        (number of the request, its whole result); errors as for `Scheduler.submit`.
    """
    results = [GenerationResult() for _ in requests]
    with closing(events_of(decoder, requests, [result.stats for result in results])) as found:
        for number, event in found:
            for chunk in chunks_in(event):
                results[number].add(chunk)
            if isinstance(event, Ended):
                yield number, results[number]


def results_of(decoder: Decoder, requests: Sequence[Request]) -> list[GenerationResult]:
    """The whole result of each request, which share passes; errors as for `Scheduler.submit`."""
    found = dict(results_as_they_end(decoder, requests))
    return [found[number] for number in range(len(requests))]


def chunks_in(event: Event, progress: Callable[[int, int], None] | None = None) -> Sequence[Chunk]:
    """
    Returns:
        The chunks of an event.

    Raises:
        Exception: the error that ended the request.
    """
    if isinstance(event, Ended):
        if event.error is not None:
            raise event.error
        return [Chunk(event.rest, None, Source.TARGET)] if event.rest else ()
    if isinstance(event, Reading) and progress:
        progress(event.done, event.total)
    return event.chunks if isinstance(event, Wrote) else ()
