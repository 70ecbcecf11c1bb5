"""What all dialects share: read a body, write its answers whole or as a stream of events."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from edgespec.errors import ContextFull
from edgespec.scheduler.events import Event
from edgespec.server.access import SENDER
from edgespec.server.answers import Answer, Answers
from edgespec.server.conversation import Question
from edgespec.server.errors import Refused, refusal
from edgespec.server.models import Models
from edgespec.server.service import Service
from edgespec.server.stored import StoredResponses
from edgespec.server.wire import Lenient, ServerSent, answer_whole, parsed_body, read_body, sse


class Writer(ABC):
    """Writes the answers to one body, whole or as server-sent events."""

    def __init__(self, body: Any, name: str) -> None:
        """
        Args:
            body: of the request.
            name: of the model.
        """
        self._body, self._model = body, body.model or name
        self._all: Sequence[Answer] = ()  # none before `start`

    def start(self, service: Service, answers: Answers) -> None:
        """Called once the model is loaded; before, only `silent`, or `begin` and `error`."""
        self._service, self._answers, self._all = service, answers, answers.all

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
        writer: for a body and its model's name.
        recall: looks up what a body refers to, for its sender; returns the bytes. Raises Refused.
        streams_too_long: a stream refuses a prompt for its length, instead of a status.
        loads: a body that asks nothing has its model loaded.
        line: of an event in a stream.
        media_type: of a stream.
    """

    body: type[Lenient]
    question: Callable[[Any], Question | None]
    writer: Callable[[Any, str], Writer]
    recall: Callable[[StoredResponses, Any, str], int] = lambda stored, body, sender: 0
    streams_too_long: bool = False
    loads: Callable[[Any], bool] = lambda body: True
    line: Callable[[str | None, Any], bytes] = sse
    media_type: str = "text/event-stream"

    async def answer(self, http: HttpRequest) -> Response:
        models: Models = http.app.state.models
        data, sender = await read_body(http), http.scope[SENDER]
        with models.admitted():
            body: Any = await models.readers.read(len(data), partial(parsed_body, data, self.body))
            size = len(data) + self.recall(models.stored, body, sender)
            question = await models.readers.read(size, partial(self.question, body))
        if not question and not self.loads(body):
            silent = self.writer(body, models.wanted(body.model).name)
            lines = (self.line(*sent) for sent in silent.end())
            return EventStream(lines, media_type=self.media_type) if body.stream else JSONResponse(silent.whole())
        lease = models.lease(body.model)
        writer = self.writer(body, lease.name)

        async def start() -> Answers:
            service = await lease.service()
            nothing = Answers((), service.submit, service.ping_seconds)
            answers = await service.start(question, sender, size) if question else nothing
            writer.start(service, answers)
            return answers

        async def whole() -> None:
            await (await starting).whole()

        starting = asyncio.create_task(start())

        def leave() -> None:
            if not starting.cancel() and not starting.cancelled() and not starting.exception():
                starting.result().cancel()
            lease.close()

        with ExitStack() as left_early:
            left_early.callback(leave)
            if not body.stream:
                return await answer_whole(http, whole(), writer.whole)
            try:
                if lease.is_loaded:  # else the stream begins before, so that its client sees that something happens
                    await starting
            except ContextFull as error:
                if not self.streams_too_long:
                    raise
                return EventStream(self.line(*sent) for sent in writer.error(refusal(error)))
            left_early.pop_all()
        return EventStream(self._lines(writer, starting, models.ping_seconds), leave, self.media_type)

    async def _lines(
        self, writer: Writer, starting: asyncio.Task[Answers], ping_seconds: float
    ) -> AsyncIterator[bytes]:
        try:
            while not starting.done():
                if not (await asyncio.wait([starting], timeout=ping_seconds))[0]:
                    for sent in writer.silent():
                        yield self.line(*sent)
            answers = starting.result()
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
