"""Texts that nobody has asked for yet: begun while there is nothing else to do, taken over by the request that comes.

It gives way to whatever is asked for. The text is the one that the request would have got: same seed, same text.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence

from edgespec.loop.stats import GenerationStats
from edgespec.scheduler.requests import Event, Request
from edgespec.scheduler.scheduler import Scheduler

MOST_DRAFTS = 8  # clients that type at once
KEPT_SECONDS = 60.0  # for which a draft is held after it was last told of


class Prepared:
    """A request whose events are kept until somebody reads them."""

    def __init__(self, scheduler: Scheduler, request: Request, idle_limit: int) -> None:
        """As for `Scheduler.submit`; only in the server's loop."""
        self.request = request
        self.stats = GenerationStats()
        self.streams = scheduler.target.capabilities.streams
        self._scheduler = scheduler
        self._loop = asyncio.get_running_loop()
        self._kept = list[Event]()
        self._reader: Callable[[Event], None] = self._kept.append
        self.handle = scheduler.submit(request, self._emit, self.stats, idle_limit)
        self._end: asyncio.TimerHandle | None = None
        self.keep()

    def keep(self) -> None:
        """It was told of again."""
        if self._end:
            self._end.cancel()
        self._end = self._loop.call_later(KEPT_SECONDS, self.handle.cancel)

    def drop(self, wanted: Sequence[int] = ()) -> None:
        """Nobody will ask for it; the session keeps its text. `wanted`: tokens of the prompt that comes in its place.

        Who types is quicker than passes: were each ended by the next letter, nothing would ever be read.
        """
        if self._end:
            self._end.cancel()
        self.handle.cancel(useful=self.begins(wanted))

    def begins(self, prompt_ids: Sequence[int]) -> bool:
        """Whether a prompt begins with this one, but for the last token."""
        typed = self.request.prompt_ids[:-1]
        return typed == list(prompt_ids[: len(typed)])

    def _emit(self, event: Event) -> None:  # in the scheduler's thread
        self._loop.call_soon_threadsafe(lambda: self._reader(event))

    def adopt(self, reader: Callable[[Event], None]) -> bool:
        """From now on it is somebody's: told of what was written, and of what comes. False: it gave way, or failed."""
        if not self._scheduler.promote(self.handle):
            return False
        if self._end:
            self._end.cancel()
        self._reader = reader
        for event in self._kept:
            reader(event)
        return True


class Drafts:
    """What was prepared for each client that types. Used in the server's loop alone."""

    def __init__(self) -> None:
        self._latest: OrderedDict[str, Prepared] = OrderedDict()

    def prepare(self, scheduler: Scheduler, name: str, request: Request, idle_limit: int) -> None:
        """Read a prompt, and begin its answer, in place of what the client typed before."""
        known = self._latest.get(name)
        if known and known.request == request and not known.handle.cancelled:
            self._latest.move_to_end(name)
            known.keep()
            return
        if known:
            known.drop(request.prompt_ids)
        self._latest[name] = Prepared(scheduler, request, idle_limit)
        self._latest.move_to_end(name)
        while len(self._latest) > MOST_DRAFTS:
            self._latest.popitem(last=False)[1].drop()

    def take(self, request: Request, reader: Callable[[Event], None]) -> Prepared | None:
        """What was prepared for this very request, if it is still there; it is nobody else's any more.

        Drafts that this request begins with, but for the last token, were on the way to it: they are dropped.
        """
        for name, prepared in self._latest.items():
            if prepared.request == request:
                del self._latest[name]
                return prepared if prepared.adopt(reader) else None
        ids = request.prompt_ids
        for name, prepared in list(self._latest.items()):
            if prepared.begins(ids):
                del self._latest[name]
                # A pass over streamed weights takes as long for all of the prompt as for a part of it.
                prepared.drop(() if prepared.streams else ids)
        return None
