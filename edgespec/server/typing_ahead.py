"""Prompts that are still being typed are prefilled, and at a pause answered ahead (the idea of SpeQL).

    PUT /edgespec/draft-prompt    a chat request as far as it is typed; "pause": true = this may be all of it

An equal chat request takes the begun answer over; another one starts from the prefilled tokens. All of it gives way to
requests.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from edgespec.loop.passes import common_prefix
from edgespec.scheduler.requests import Event, Handle, Request
from edgespec.server.answers import Listener
from edgespec.server.conversation import Conversation
from edgespec.server.dialects.chat import ChatBody, question_of
from edgespec.server.service import Service, in_loop
from edgespec.server.wire import read_body

PREPARED = 16  # tokens of an answer begun at a pause
TYPED_NEXT = ("a", " a", ".", "\n", "1")  # likely continuations: a token is stable if none of these changes it
MOST_TYPING = 8
KEPT_SECONDS = 60.0


class DraftBody(ChatBody):
    pause: bool = False
    id: str = ""


class Prepared:
    """Keeps the events of a request until an equal one takes it over; used only in the server's loop."""

    def __init__(self, service: Service, request: Request, tokens: int) -> None:
        """
        Args:
            service: of the model.
            request: as far as it is typed.
            tokens: of the answer that are generated ahead.
        """
        self.request = request
        self._scheduler = service.model.scheduler
        self._kept = list[Event]()
        self._listener: Listener = self._kept.append
        self.handle = self._scheduler.submit(request, in_loop(lambda event: self._listener(event)), idle_limit=tokens)
        self._end: asyncio.TimerHandle | None = None
        self.keep()

    def keep(self) -> None:
        self._stop_timer()
        self._end = asyncio.get_running_loop().call_later(KEPT_SECONDS, self.handle.cancel)

    def drop(self, wanted: Sequence[int] = ()) -> None:
        """End it; the session keeps its tokens.

        Args:
            wanted: a prompt. A pass that prefills a beginning of it goes on: clients type faster than passes are made.
        """
        self._stop_timer()
        self.handle.cancel(useful=self.begins(wanted))

    def begins(self, prompt_ids: Sequence[int]) -> bool:
        typed = self.request.prompt_ids[:-1]
        return typed == list(prompt_ids[: len(typed)])

    def adopt(self, listener: Listener) -> bool:
        """Make it a real request; `listener` gets all its events; False: it gave way to a request, or failed."""
        if not self._scheduler.promote(self.handle):
            return False
        self._stop_timer()
        self._listener = listener
        for event in self._kept:
            listener(event)
        return True

    def _stop_timer(self) -> None:
        if self._end:
            self._end.cancel()


class TypingAhead:
    def __init__(self, service: Service) -> None:
        self._service = service
        self._latest: OrderedDict[str, Prepared] = OrderedDict()
        service.take_over = self.take_over

    def take_over(self, request: Request, listener: Listener) -> Handle | None:
        """The handle of an equal request that has begun, if it is still there.

        Prompts that this request begins with, but for the last token, are dropped.
        """
        for name, prepared in self._latest.items():
            if prepared.request == request:
                del self._latest[name]
                return prepared.handle if prepared.adopt(listener) else None
        for name, prepared in list(self._latest.items()):
            if prepared.begins(request.prompt_ids):
                del self._latest[name]
                # A pass over streamed weights takes as long for a part of the prompt as for all of it.
                streams = self._service.model.target.capabilities.streams
                prepared.drop(() if streams else request.prompt_ids)
        return None

    async def draft_prompt(self, http: HttpRequest) -> Response:
        body = await read_body(http, DraftBody)
        told: dict[str, Any] = {"pause": body.pause, "tokens": 0}
        last = body.messages[-1] if body.messages else {}
        if not body.pause and not isinstance(last.get("content"), str):
            return JSONResponse(told)
        question = replace(question_of(body), choices=1)
        assert question.conversation
        (request, *_), _ = await self._service.prepare(question)
        if body.pause:
            self._prepare(body.id, request, PREPARED)
            return JSONResponse(told | {"tokens": len(request.prompt_ids), "seed": request.sampling.seed})
        ids = await asyncio.to_thread(self._stable, question.conversation)
        if len(ids) > 1:
            self._prepare(body.id, replace(request, prompt_ids=ids), 0)
            told["tokens"] = len(ids)
        return JSONResponse(told)

    def _stable(self, conversation: Conversation) -> list[int]:
        *before, last = conversation.turns
        further = [replace(conversation, turns=[*before, replace(last, text=last.text + more)]) for more in TYPED_NEXT]
        return stable_prefix(list(map(self._service.chat_format.prompt_ids, [conversation, *further])))

    def _prepare(self, name: str, request: Request, tokens: int) -> None:
        known = self._latest.get(name)
        if known and known.request == request and not known.handle.cancelled:
            known.keep()
        else:
            if known:
                known.drop(request.prompt_ids)
            self._latest[name] = Prepared(self._service, request, tokens)
        self._latest.move_to_end(name)
        while len(self._latest) > MOST_TYPING:
            self._latest.popitem(last=False)[1].drop()


def stable_prefix(versions: Sequence[Sequence[int]]) -> list[int]:
    first, *others = versions
    return list(first[: min(common_prefix(first, other) for other in others)])
