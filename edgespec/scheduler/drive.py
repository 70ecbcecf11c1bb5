"""Submits requests and iterates over their events: a single caller makes the steps, of several a worker thread."""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from queue import SimpleQueue

from edgespec.loop.stats import GenerationStats
from edgespec.loop.tree import Source
from edgespec.machine.process import check_process
from edgespec.scheduler.requests import Chunk, Ended, Event, GenerationResult, Handle, Reading, Request, Wrote
from edgespec.scheduler.scheduler import Scheduler


def events(scheduler: Scheduler, request: Request, stats: GenerationStats | None = None) -> Generator[Event]:
    """The events of one request; arguments and errors as for `Scheduler.submit`."""
    with closing(events_of(scheduler, [request], [stats] if stats is not None else ())) as found:
        for _, event in found:
            yield event


def chunks(
    scheduler: Scheduler,
    request: Request,
    stats: GenerationStats | None,
    progress: Callable[[int, int], None] | None,
) -> Iterator[Chunk]:
    """The chunks of one request; otherwise as `events`."""
    with closing(events(scheduler, request, stats)) as found:
        for event in found:
            yield from chunks_in(event, progress)


def events_of(
    scheduler: Scheduler, requests: Sequence[Request], stats: Sequence[GenerationStats] = ()
) -> Generator[tuple[int, Event]]:
    """
    Yields:
        (number of the request, event), otherwise as `events`, for several requests.
    """
    found: SimpleQueue[tuple[int, Event]] = SimpleQueue()
    handles, left = list[Handle](), set(range(len(requests)))
    try:
        for number, request in enumerate(requests):

            def tell(event: Event, number: int = number) -> None:
                found.put((number, event))

            handles.append(scheduler.submit(request, tell, stats[number] if stats else None))
        while left:
            check_process(scheduler.process)
            while found.empty() and scheduler.thread is None:
                if scheduler.turn.locked():  # by another caller
                    scheduler.start()
                    break
                with scheduler.turn:
                    scheduler.step()
            number, event = found.get()
            if isinstance(event, Ended):
                left.discard(number)
            yield number, event
    finally:
        for handle in handles:
            handle.cancel()
        if handles and scheduler.thread is None:
            scheduler.end_cancelled()  # this thread may have been the only driver


def results_as_they_end(scheduler: Scheduler, requests: Sequence[Request]) -> Generator[tuple[int, GenerationResult]]:
    """
    Yields:
        (number of the request, its whole result); errors as for `Scheduler.submit`.
    """
    results = [GenerationResult() for _ in requests]
    with closing(events_of(scheduler, requests, [result.stats for result in results])) as found:
        for number, event in found:
            for chunk in chunks_in(event):
                results[number].add(chunk)
            if isinstance(event, Ended):
                yield number, results[number]


def results_of(scheduler: Scheduler, requests: Sequence[Request]) -> list[GenerationResult]:
    """The whole result of each request, which share passes; errors as for `Scheduler.submit`."""
    found = dict(results_as_they_end(scheduler, requests))
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
