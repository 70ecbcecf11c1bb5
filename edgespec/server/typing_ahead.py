"""Prompts that are still being typed: read ahead, and at a pause answered ahead, so that Enter finds the first tokens.

    PUT /edgespec/draft-prompt    a chat request as far as it is typed; "pause": true = this may be all of it

While words come, the tokens that further typing cannot change are read. At a pause the answer is begun. A chat request
that is the same takes it over; any other starts from what was read. All of it gives way to requests. The idea of SpeQL.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from edgespec.loop.passes import common_prefix
from edgespec.scheduler.requests import Event, Job, Request
from edgespec.server.answers import Listener
from edgespec.server.conversation import Conversation
from edgespec.server.dialects.chat import ChatBody, question_of
from edgespec.server.service import Service, in_loop
from edgespec.server.wire import read_body

PREPARED = 16  # tokens of an answer that is begun at a pause
TYPED_NEXT = ("a", " a", ".", "\n", "1")  # what may come next: tokens that all of these leave alone are stable
MOST_TYPING = 8  # clients that type at once
KEPT_SECONDS = 60.0  # for which a prompt is held after its client was last heard of


class DraftBody(ChatBody):
    """PUT /edgespec/draft-prompt: a chat request that is still being typed."""

    pause: bool = False  # this may be all of it
    id: str = ""  # which of several that are typed at once


class Prepared:
    """A job whose events are kept until somebody listens. In the server's loop alone."""

    def __init__(self, service: Service, request: Request, tokens: int) -> None:
        """`tokens`: of the answer that are written ahead."""
        self.request = request
        self._scheduler = service.model.scheduler
        self._kept = list[Event]()
        self._listener: Listener = self._kept.append
        self.job = self._scheduler.submit(request, in_loop(lambda event: self._listener(event)), hold=tokens)
        self._end: asyncio.TimerHandle | None = None
        self.keep()

    def keep(self) -> None:
        """Its client was heard of."""
        self._stop_timer()
        self._end = asyncio.get_running_loop().call_later(KEPT_SECONDS, self.job.cancel)

    def drop(self, wanted: Sequence[int] = ()) -> None:
        """End it; the session keeps its tokens.

        A pass that reads what the prompt `wanted` begins with goes on: a client types faster than passes are made, and
        were each ended by the next letter, nothing would ever be read.
        """
        self._stop_timer()
        self.job.cancel(useful=self.begins(wanted))

    def begins(self, prompt_ids: Sequence[int]) -> bool:
        """Whether a prompt begins with this one, but for the last token."""
        typed = self.request.prompt_ids[:-1]
        return typed == list(prompt_ids[: len(typed)])

    def adopt(self, listener: Listener) -> bool:
        """From now on it is wanted; `listener` gets all its events. False: it gave way to a request, or failed."""
        if not self._scheduler.go_on(self.job):
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
    """The latest prompt of each client that types. In the server's loop alone."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._latest: OrderedDict[str, Prepared] = OrderedDict()
        service.take_over = self.take_over

    def take_over(self, request: Request, listener: Listener) -> Job | None:
        """The job that has begun this very request, if it is still there.

        Prompts that this request begins with, but for the last token, were on the way to it: they are dropped.
        """
        for name, prepared in self._latest.items():
            if prepared.request == request:
                del self._latest[name]
                return prepared.job if prepared.adopt(listener) else None
        for name, prepared in list(self._latest.items()):
            if prepared.begins(request.prompt_ids):
                del self._latest[name]
                # A pass over streamed weights takes as long for all of the prompt as for a part of it.
                streams = self._service.model.target.capabilities.streams
                prepared.drop(() if streams else request.prompt_ids)
        return None

    async def draft_prompt(self, http: HttpRequest) -> Response:
        """PUT /edgespec/draft-prompt."""
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
        """Tokens of a conversation that further typing leaves alone."""
        *before, last = conversation.turns
        further = [replace(conversation, turns=[*before, replace(last, text=last.text + more)]) for more in TYPED_NEXT]
        return stable_prefix(list(map(self._service.chat_format.prompt_ids, [conversation, *further])))

    def _prepare(self, name: str, request: Request, tokens: int) -> None:
        """Read a prompt, and write so many tokens of its answer, in place of what the client typed before."""
        known = self._latest.get(name)
        if known and known.request == request and not known.job.cancelled:
            known.keep()
        else:
            if known:
                known.drop(request.prompt_ids)
            self._latest[name] = Prepared(self._service, request, tokens)
        self._latest.move_to_end(name)
        while len(self._latest) > MOST_TYPING:
            self._latest.popitem(last=False)[1].drop()


def stable_prefix(versions: Sequence[Sequence[int]]) -> list[int]:
    """The tokens that all versions begin with."""
    first, *others = versions
    return list(first[: min(common_prefix(first, other) for other in others)])
