"""The answers to one request while they are written: thoughts, text, calls, counts."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from edgespec.errors import undone
from edgespec.loop.stats import GenerationStats
from edgespec.scheduler.events import Chunk, Ended, Event, Wrote
from edgespec.scheduler.requests import Request
from edgespec.scheduler.sequence import Seq
from edgespec.server.channels import Parser
from edgespec.server.conversation import Piece, Thought
from edgespec.server.parse_output import OutputParser
from edgespec.server.tool_calls import Call

Emit = Callable[[Event], None]  # for any thread
Submit = Callable[[Request, Emit], Seq]


@dataclass
class Answer:
    request: Request
    parser: Parser = field(default_factory=OutputParser)
    stats: GenerationStats = field(default_factory=GenerationStats)
    pieces: list[Piece] = field(default_factory=list)
    new: list[Piece] = field(default_factory=list)
    begun: Sequence[Call] = ()  # calls that are being written, as far as they are certain; all but the last are whole
    grew: bool = False  # these, with the latest event
    chunks: list[Chunk] = field(default_factory=list)
    stop_found: str | None = None
    thought_tokens: int = 0
    choice: int = 0  # number among the choices of its prompt
    single_call: bool = False  # the first call ends it
    ended: bool = False

    def add(self, event: Event) -> None:
        new, self.ended = list[Piece](), isinstance(event, Ended)
        if self.has_its_call:
            pass
        elif isinstance(event, Wrote):
            for chunk in event.chunks:
                before = self.parser.thinking
                new += self.parser.push(chunk.text)
                self.thought_tokens += before or self.parser.thinking
            self.chunks += event.chunks
        elif isinstance(event, Ended):
            cut = self.stats.finish_reason in ("length", "interrupted")
            new = [*self.parser.push(event.rest), *self.parser.finish(cut=cut)]
        self.new = up_to_call(joined(new)) if self.single_call else joined(new)
        self.pieces = joined([*self.pieces, *self.new])
        known = sum(len(call.arguments) + 1 for call in self.begun)
        self.begun = () if self.has_its_call else self.parser.begun[: 1 if self.single_call else None]
        self.grew = sum(len(call.arguments) + 1 for call in self.begun) > known

    @property
    def text(self) -> str:
        return "".join(piece for piece in self.pieces if isinstance(piece, str))

    @property
    def thought(self) -> str:
        return "".join(piece.text for piece in self.pieces if isinstance(piece, Thought))

    @property
    def calls(self) -> list[Call]:
        return [piece for piece in self.pieces if isinstance(piece, Call)]

    @property
    def has_its_call(self) -> bool:
        return self.single_call and bool(self.calls)

    @property
    def is_cut(self) -> bool:
        """It ended for lack of room, perhaps before further calls."""
        return self.stats.finish_reason == "length" and not self.has_its_call


def up_to_call(pieces: Sequence[Piece]) -> list[Piece]:
    first = next((i for i, piece in enumerate(pieces) if isinstance(piece, Call)), len(pieces))
    return list(pieces[: first + 1])


def joined(pieces: Sequence[Piece]) -> list[Piece]:
    found = list[Piece]()
    for piece in pieces:
        last = found[-1] if found else None
        if isinstance(piece, str) and isinstance(last, str):
            found[-1] = last + piece
        elif isinstance(piece, Thought) and isinstance(last, Thought):
            found[-1] = Thought(last.text + piece.text)
        else:
            found.append(piece)
    return found


# Stage and number of a part, and its latest piece. A call is cut if it has begun and proved to be none.
Part = tuple[Literal["begin", "delta", "end", "cut"], int, Piece]


class Parts:
    """Cuts pieces into parts, each of one thought, text or call: a beginning, deltas, and an end."""

    def __init__(self) -> None:
        self._number = -1
        self._open: Piece | None = None
        self._told: dict[str, int] = {}  # characters of the arguments of calls that have begun, by id

    def after(self, answer: Answer) -> Iterator[Part]:
        """Yield the new parts of an answer after an event."""
        for piece in answer.new:
            if isinstance(piece, Call):
                yield from self._call(piece, whole=True)
                continue
            if type(piece) is not type(self._open):
                yield from self._end()
                self._number += 1
                yield "begin", self._number, piece
            self._open = piece
            yield "delta", self._number, piece
        for i, call in enumerate(answer.begun):
            yield from self._call(call, whole=i + 1 < len(answer.begun))
        if answer.ended:
            yield from self._end()

    def _call(self, call: Call, *, whole: bool) -> Iterator[Part]:
        """Yield what of a call is not told yet."""
        if call.id not in self._told:
            yield from self._end()
            self._number += 1
            self._told[call.id], self._open = 0, call
            yield "begin", self._number, call
        if isinstance(self._open, Call) and self._open.id == call.id:
            self._open = call
            if new := call.arguments[self._told[call.id] :]:
                self._told[call.id] += len(new)
                yield "delta", self._number, replace(call, arguments=new)
            if whole:
                self._open = None
                yield "end", self._number, call

    def _end(self) -> Iterator[Part]:
        if self._open is not None:
            yield "cut" if isinstance(self._open, Call) else "end", self._number, self._open
        self._open = None


class Answers:
    def __init__(self, answers: Sequence[Answer], submit: Submit, ping_seconds: float) -> None:
        """Submits all requests at once, so that `Service.admitted` counts them; needs a running event loop.

        Args:
            answers: none of them begun.
            submit: begins one.
            ping_seconds: of silence after which `events` yields None.
        """
        self.all = answers
        self.ping_seconds = ping_seconds
        self._events = asyncio.Queue[tuple[int, Event]]()
        self._seqs = list[Seq]()
        loop = asyncio.get_running_loop()
        with undone(self.cancel):
            for number, answer in enumerate(answers):

                def emit(event: Event, number: int = number) -> None:
                    loop.call_soon_threadsafe(self._events.put_nowait, (number, event))

                self._seqs.append(submit(answer.request, emit))
                answer.stats = self._seqs[-1].stats

    def cancel(self) -> None:
        """Cancel all requests; safe to call twice, and after they have ended."""
        for seq in self._seqs:
            seq.cancel()

    async def events(self) -> AsyncIterator[tuple[int, Event] | None]:
        """(number of the answer, event) until all have ended; None after `ping_seconds` of silence.

        Raises the error that ended an answer.
        """
        left = set(range(len(self.all)))
        try:
            while left:
                try:
                    async with asyncio.timeout(self.ping_seconds):  # `wait_for` would make a task of each
                        number, event = await self._events.get()
                except TimeoutError:
                    yield None
                    continue
                answer = self.all[number]
                answer.add(event)
                if answer.has_its_call:
                    self._seqs[number].cancel()
                if isinstance(event, Ended):
                    left.remove(number)
                    if not answer.has_its_call:  # else the stop string came after the call
                        answer.stop_found = self._seqs[number].text.stop_found
                    if event.error is not None and not answer.has_its_call:
                        raise event.error
                yield number, event
        finally:
            self.cancel()

    async def whole(self) -> None:
        async for _ in self.events():
            pass

    @property
    def predicted(self) -> tuple[int, int]:
        """Tokens accepted and rejected: of the prediction that was sent, else of all drafts."""
        if sent := sum(answer.request.hint_texts.prediction_length for answer in self.all if answer.request.hint_texts):
            accepted = sum(answer.stats.tokens_by_source["prediction"] for answer in self.all)
            return accepted, max(0, sent - accepted)
        accepted = sum(answer.stats.tokens - answer.stats.tokens_by_source["target"] for answer in self.all)
        return accepted, sum(answer.stats.drafted for answer in self.all) - accepted

    @property
    def account(self) -> dict[str, Any]:
        stats = [answer.stats.as_dict() for answer in self.all]
        return {"seed": self.all[0].request.sampling.seed, "stats": stats}
