"""Asking for texts, and making passes with the thread that wants them, until there are several such threads."""

from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from queue import SimpleQueue

from edgespec.loop.stats import GenerationStats
from edgespec.loop.tree import Source
from edgespec.scheduler.requests import Chunk, Ended, Event, Job, Reading, Request, Wrote
from edgespec.scheduler.scheduler import Scheduler


def events(scheduler: Scheduler, request: Request, stats: GenerationStats | None = None) -> Generator[Event]:
    """What happens to one text, until it is done. Arguments and errors as for `Scheduler.submit`."""
    with closing(together(scheduler, [request], [stats] if stats is not None else ())) as found:
        for _, event in found:
            yield event


def together(
    scheduler: Scheduler, requests: Sequence[Request], stats: Sequence[GenerationStats] = ()
) -> Generator[tuple[int, Event]]:
    """As `events`, for several texts at once: the number of the text comes with each event."""
    found: SimpleQueue[tuple[int, Event]] = SimpleQueue()
    jobs, left = list[Job](), len(requests)
    try:
        for number, request in enumerate(requests):

            def tell(event: Event, number: int = number) -> None:
                found.put((number, event))

            jobs.append(scheduler.submit(request, tell, stats[number] if stats else None))
        while left:
            while found.empty() and scheduler.thread is None:
                if not scheduler.turn.acquire(blocking=False):
                    scheduler.start()  # somebody else makes passes: from now on a thread of its own does
                    break
                try:
                    scheduler.step()
                finally:
                    scheduler.turn.release()
            number, event = found.get()
            left -= isinstance(event, Ended)
            yield number, event
    finally:
        for job in jobs:
            job.cancel()


def chunks_in(event: Event, progress: Callable[[int, int], None] | None = None) -> Sequence[Chunk]:
    """What an event tells a reader; raises what ended the text."""
    if isinstance(event, Ended):
        if event.error is not None:
            raise event.error
        return [Chunk(event.rest, None, Source.TARGET)] if event.rest else ()
    if isinstance(event, Reading) and progress:
        progress(event.done, event.total)
    return event.chunks if isinstance(event, Wrote) else ()
