"""What all dialects share: read a body, write its answers whole or as a stream of events."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from edgespec.errors import ContextFull
from edgespec.scheduler.events import Event
from edgespec.server.access import SENDER
from edgespec.server.answers import Answers
from edgespec.server.conversation import Question
from edgespec.server.errors import Refused, refusal
from edgespec.server.service import Service
from edgespec.server.wire import Lenient, ServerSent, answer_whole, parsed_body, read_body, sse


class Writer(ABC):
    """Writes the answers to one body, whole or as server-sent events."""

    @abstractmethod
    def whole(self) -> Mapping[str, Any] | str:
        """The body or its JSON, after all answers have ended."""

    def begin(self) -> Iterable[ServerSent]:
        return ()

    @abstractmethod
    def after(self, number: int, event: Event) -> Iterable[ServerSent]:
        """Called with each event and the number of its answer."""

    @abstractmethod
    def silent(self) -> Iterable[ServerSent]:
        """Called from time to time while nothing is written: an event, since some clients' timers count no comment."""

    def end(self) -> Iterable[ServerSent]:
        return ()

    @abstractmethod
    def error(self, refused: Refused) -> Iterable[ServerSent]:
        """The events that end a stream early."""


class EventStream(StreamingResponse):
    def __init__(
        self,
        lines: AsyncIterator[bytes] | Iterator[bytes],
        left: Callable[[], None] = lambda: None,
        media_type: str = "text/event-stream",
    ) -> None:
        """
        Args:
            lines: of the stream.
            left: called when the client has all lines, or has left.
            media_type: of the stream.
        """
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(lines, media_type=media_type, headers=headers)
        self._left = left

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:  # the client may leave before the first line
            self._left()


@dataclass(frozen=True)
class Dialect:
    """An interface: how it asks and answers.

    Attributes:
        body: the class of its bodies; they have a field `stream`.
        question: of a body; None: it asks nothing. Raises Refused or UsageError.
        writer: for a body and its answers.
        recall: looks up what a body refers to, for its sender; returns the bytes. Raises Refused.
        streams_too_long: a stream refuses a prompt for its length, instead of a status.
        line: of an event in a stream.
        media_type: of a stream.
    """

    body: type[Lenient]
    question: Callable[[Any], Question | None]
    writer: Callable[[Service, Any, Answers], Writer]
    recall: Callable[[Service, Any, str], int] = lambda service, body, sender: 0
    streams_too_long: bool = False
    line: Callable[[str | None, Any], bytes] = sse
    media_type: str = "text/event-stream"

    async def answer(self, http: HttpRequest) -> Response:
        service: Service = http.app.state.service
        data, sender = await read_body(http), http.scope[SENDER]
        with service.admitted():
            body: Any = await service.read(len(data), partial(parsed_body, data, self.body))
            size = len(data) + self.recall(service, body, sender)
            question = await service.read(size, partial(self.question, body))
        nothing = Answers((), service.submit, service.ping_seconds)
        try:
            answers = await service.start(question, sender, size) if question else nothing
        except ContextFull as error:
            if not (body.stream and self.streams_too_long):
                raise
            writer = self.writer(service, body, nothing)
            return EventStream(self.line(*sent) for sent in (*writer.begin(), *writer.error(refusal(error))))
        with ExitStack() as left_early:
            left_early.callback(answers.cancel)
            writer = self.writer(service, body, answers)
            if not body.stream:
                return await answer_whole(http, answers.whole(), writer.whole)
            left_early.pop_all()
        return EventStream(self._lines(writer, answers), answers.cancel, self.media_type)

    async def _lines(self, writer: Writer, answers: Answers) -> AsyncIterator[bytes]:
        try:
            for sent in writer.begin():
                yield self.line(*sent)
            spoke = monotonic()
            async for found in answers.events():
                told = list(writer.after(*found)) if found else []
                if not told and (found is None or monotonic() - spoke >= answers.ping_seconds):
                    told = list(writer.silent())  # also where events come that write nothing
                for sent in told:
                    yield self.line(*sent)
                    spoke = monotonic()
            for sent in writer.end():
                yield self.line(*sent)
        except (Exception, asyncio.CancelledError) as error:
            for sent in writer.error(refusal(error)):
                yield self.line(*sent)
