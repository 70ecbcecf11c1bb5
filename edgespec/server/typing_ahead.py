"""Prompts that are still being typed are prefilled, and at a pause answered ahead.

An equal chat request takes the begun answer over; another one starts from the prefilled tokens. All of it gives way to
requests.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from edgespec.model import Model
from edgespec.scheduler.events import Event
from edgespec.scheduler.requests import Request
from edgespec.scheduler.sequence import Seq
from edgespec.server.answers import Emit

MOST_TYPING = 8
KEPT_SECONDS = 60.0


class Prepared:
    """Keeps the events of a request until an equal one takes it over; used only in the server's loop."""

    def __init__(self, scheduler: Any, request: Request, tokens: int) -> None:
        """
        Args:
            scheduler: of the model.
            request: as far as it is typed.
            tokens: of the answer that are generated ahead.
        """
        self.request = request
        self._scheduler = scheduler
        self._kept = list[Event]()
        self._emit: Emit = self._kept.append
        loop = asyncio.get_running_loop()
        self.seq = self._scheduler.submit(
            request, lambda event: loop.call_soon_threadsafe(lambda: self._emit(event)), idle_limit=tokens
        )
        self._end = loop.call_later(KEPT_SECONDS, self.seq.cancel)

    def keep(self) -> None:
        self._end.cancel()
        self._end = asyncio.get_running_loop().call_later(KEPT_SECONDS, self.seq.cancel)

    def drop(self, wanted: Sequence[int] = ()) -> None:
        """End it; the session keeps its tokens.

        Args:
            wanted: a prompt. A pass that prefills a beginning of it goes on: clients type faster than passes are made.
        """
        self._end.cancel()
        self.seq.cancel(useful=self.begins(wanted))

    def begins(self, prompt_ids: Sequence[int]) -> bool:
        typed = self.request.prompt_ids
        return typed == list(prompt_ids[: len(typed)])

    def adopt(self, emit: Emit) -> bool:
        """Make it a real request; `emit` gets all its events; False: it gave way to a request, or failed."""
        if not self._scheduler.promote(self.seq):
            return False
        self._end.cancel()
        self._emit = emit
        for event in self._kept:
            emit(event)
        return True


class TypingAhead:
    def __init__(self, model: Model) -> None:
        self._model = model
        self._latest: OrderedDict[str, Prepared] = OrderedDict()

    def take_over(self, request: Request, emit: Emit) -> Seq | None:
        """The sequence of an equal request that has begun, if it is still there.

        Prompts that this request begins with are dropped.
        """
        for name, prepared in self._latest.items():
            if prepared.request == request:
                del self._latest[name]
                return prepared.seq if prepared.adopt(emit) else None
        for name, prepared in list(self._latest.items()):
            if prepared.request.sender == request.sender and prepared.begins(request.prompt_ids):
                del self._latest[name]
                # A pass over streamed weights takes as long for a part of the prompt as for all of it.
                streams = self._model.target.capabilities.streams
                prepared.drop(() if streams else request.prompt_ids)
        return None

    def prepare(self, name: str, request: Request, tokens: int) -> None:
        known = self._latest.get(name)
        if known and known.request == request and not known.seq.cancelled:
            known.keep()
        else:
            if known:
                known.drop(request.prompt_ids)
            self._latest[name] = Prepared(self._model.scheduler, request, tokens)
        self._latest.move_to_end(name)
        while len(self._latest) > MOST_TYPING:
            self._latest.popitem(last=False)[1].drop()
