"""What all dialects share: reading a body, asking the scheduler for texts, and following them as they grow."""

import asyncio
import json
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from hashlib import sha256
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse

from edgespec.loop.grammar import Compiled
from edgespec.loop.passes import check_room
from edgespec.loop.sampling import SamplingParams
from edgespec.loop.stats import GenerationStats
from edgespec.loop.text import TextStream
from edgespec.model import Model
from edgespec.scheduler.requests import Chunk, Ended, Event, Job, Request, Wrote
from edgespec.server.call_formats import Call, Thought
from edgespec.server.channels import Reader
from edgespec.server.drafts import Drafts
from edgespec.server.errors import Refused, error_body, refusal
from edgespec.server.parse_output import Piece, Regions
from edgespec.server.speculative_calls import Foreseen
from edgespec.server.tools import Look

MOST_BODY = 8 * 2**20  # bytes
BODY_SECONDS = 60.0  # in which it must have come
MOST_DEPTH = 64  # of JSON
MOST_CHOICES = 8
MOST_STOPS = 16
MOST_WAITING = 32  # requests; more are told to come again
PING_SECONDS = 5.0  # of silence
GONE = 499  # the client left before there was an answer

Body = TypeVar("Body", bound=BaseModel)


class Lenient(BaseModel):
    """Fields that are not known are none of our business."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())


@dataclass
class Service:
    """What answers requests."""

    model: Model
    name: str
    most_waiting: int = MOST_WAITING
    ping_seconds: float = PING_SECONDS
    stopping: bool = False
    started: int = field(default_factory=lambda: int(time.time()))
    drafts: Drafts = field(default_factory=Drafts)
    answered: Counter[tuple[str, int]] = field(default_factory=Counter)  # (path, status) -> how often

    @cached_property
    def fingerprint(self) -> str:
        """Equal where equal requests with equal seeds get equal answers."""
        target = self.model.target
        exact = target.capabilities.exact
        about = [self.name, target.name, target.build, str(dict(target.computing)), str(exact)]
        return "fp_" + sha256("\n".join(about).encode()).hexdigest()[:16]

    @cached_property
    def defaults(self) -> SamplingParams:
        """Where a request says nothing: what the model's files propose, else a temperature of 1."""
        known = self.model.sampling
        return replace(known, temperature=1.0) if known == SamplingParams() else known


class SamplingFields(Lenient):
    """Fields that the dialects have in common, by OpenAI's names, and llama.cpp's for what OpenAI does not have."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    seed: int | None = None


def sampling_of(body: SamplingFields, defaults: SamplingParams) -> SamplingParams:
    """How tokens are chosen; without a seed a new one is drawn. Raises UsageError for values out of range."""
    names = SamplingFields.model_fields
    given = {name: value for name in names if (value := getattr(body, name)) is not None}
    return replace(defaults, **given | {"seed": given.get("seed", secrets.randbits(32)) % 2**64})


async def read_body(request: HttpRequest, kind: type[Body]) -> Body:
    """The request's JSON.

    Raises:
        Refused: it is too long, comes too slowly, is not JSON, or not of this kind.
    """
    data = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for piece in request.stream():
                data += piece
                if len(data) > MOST_BODY:
                    raise Refused(413, f"the body is larger than {MOST_BODY} bytes")
    except TimeoutError as error:
        raise Refused(408, f"the body did not come within {BODY_SECONDS:.0f} seconds") from error
    try:
        found = json.loads(data, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"the body is not JSON: {error}") from error
    if not isinstance(found, dict) or _depth(found) > MOST_DEPTH:
        raise Refused(400, f"the body must be a JSON object, at most {MOST_DEPTH} deep")
    try:
        return kind.model_validate(found)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise Refused(400, f"{where or 'body'}: {first['msg']}", param=where or None) from error


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _depth(value: Any) -> int:
    level, depth = [value], 0
    while level:
        depth += 1
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
    return depth


async def requests_for(
    service: Service,
    prompt_ids: Sequence[Sequence[int]],
    sampling: SamplingParams,
    *,
    max_tokens: int | None,
    stop: str | Sequence[str] | None,
    choices: int = 1,
    log_probs: int | None = None,
    plain: bool = False,
    grammar: Compiled | None = None,
    prediction: str = "",
    shown: frozenset[int] = frozenset(),
    foresee: bool = False,
) -> list[Request]:
    """One request for each choice of each prompt: choice i has seed + i.

    Raises:
        Refused, UsageError, ContextFull: they cannot be served.
    """
    limit = service.model.target.capabilities.context_length
    stops = [stop] if isinstance(stop, str) else list(stop or ())
    if not 1 <= choices <= MOST_CHOICES:
        raise Refused(400, f"n is {choices}, but must be from 1 to {MOST_CHOICES}", param="n")
    if len(stops) > MOST_STOPS:
        raise Refused(400, f"there are {len(stops)} stop strings, but at most {MOST_STOPS} may be given", param="stop")
    if max_tokens is not None and max_tokens < 1:
        raise Refused(400, f"max_tokens is {max_tokens}, but must be at least 1", param="max_tokens")
    TextStream(service.model.target.vocab, stops)
    if service.stopping:
        raise Refused(503, "the server is stopping")
    scheduler, wanted = service.model.scheduler, choices * len(prompt_ids)
    room = service.most_waiting + len(service.model.planners)
    if wanted > room:
        raise Refused(400, f"{wanted} texts are asked for at once, but at most {room} may be")
    if scheduler.waiting + scheduler.active + wanted > room:
        raise Refused(429, f"{scheduler.waiting} requests are waiting already: come again in a moment")
    found = list[Request]()
    for ids in prompt_ids:
        if not ids:
            raise Refused(400, "the prompt is empty: give at least one word", param="prompt")
        check_room(service.model.target, len(ids))
        most = min(max_tokens or limit, limit - len(ids))
        seeds = [(sampling.seed + i) % 2**64 for i in range(choices)]
        family = service.model.hint_texts(ids, "", choices)
        if prediction:  # it may be long: beside the loop
            family = await asyncio.to_thread(service.model.hint_texts, ids, prediction, choices)
        found += [
            Request(
                list(ids), replace(sampling, seed=seed), most, tuple(stops), log_probs, plain, grammar, family,
                foresee, shown,
            )
            for seed in seeds
        ]  # fmt: skip
    return found


@dataclass
class Answer:
    """One text as far as it is written."""

    request: Request
    stats: GenerationStats = field(default_factory=GenerationStats)
    regions: Reader = field(default_factory=Regions)
    pieces: list[Piece] = field(default_factory=list)  # thoughts, content and calls so far
    new: list[Piece] = field(default_factory=list)  # those of the last event
    chunks: list[Chunk] = field(default_factory=list)
    stop_found: str | None = None  # the stop string that ended it
    thought_tokens: int = 0
    foreseen: Foreseen = field(default_factory=Foreseen)

    def read(self, chunks: Sequence[Chunk]) -> None:
        """More is written."""
        new = list[Piece]()
        for chunk in chunks:
            before = self.regions.thinking
            new += self.regions.push(chunk.text)
            self.thought_tokens += before or self.regions.thinking
        self.chunks += chunks
        self._take(new)

    def end(self, rest: str = "") -> None:
        """Nothing more comes, but for what was held back."""
        self._take([*self.regions.push(rest), *self.regions.finish()])

    def _take(self, pieces: Sequence[Piece]) -> None:
        self.new = joined(pieces)
        self.pieces = joined([*self.pieces, *pieces])

    @property
    def text(self) -> str:
        """What is content."""
        return "".join(piece for piece in self.pieces if isinstance(piece, str))

    @property
    def thought(self) -> str:
        """What was thought before."""
        return "".join(piece.text for piece in self.pieces if isinstance(piece, Thought))

    @property
    def calls(self) -> list[Call]:
        """What is called."""
        return [piece for piece in self.pieces if isinstance(piece, Call)]

    @property
    def finish_reason(self) -> str:
        """OpenAI's."""
        return "tool_calls" if self.calls else self.stats.finish_reason


def joined(pieces: Sequence[Piece]) -> list[Piece]:
    """Neighbours of one kind as one."""
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


class Texts:
    """The texts of one HTTP request: iterate to follow them, once."""

    def __init__(self, service: Service, requests: Sequence[Request], look: Look | None = None) -> None:
        """
        Args:
            service: what answers.
            requests: one for each text.
            look: how they are read; None: everything is content.
        """
        self.answers = [Answer(request, regions=look.regions() if look else Regions()) for request in requests]
        self._service = service

    async def events(self) -> AsyncIterator[tuple[int, Event] | None]:
        """(number of the text, event) until all have ended; None after so many seconds of silence.

        Raises:
            Exception: what ended a text too early.
        """
        scheduler, queue = self._service.model.scheduler, asyncio.Queue[tuple[int, Event]]()
        jobs = list[Job]()
        try:
            for number, answer in enumerate(self.answers):
                emit = _sender(asyncio.get_running_loop(), queue, number)
                if prepared := self._service.drafts.take(answer.request, partial(_put, queue, number)):
                    answer.stats = prepared.stats
                    jobs.append(prepared.job)
                else:
                    jobs.append(scheduler.submit(answer.request, emit, answer.stats))
            left = len(jobs)
            while left:
                try:
                    number, event = await asyncio.wait_for(queue.get(), self._service.ping_seconds)
                except TimeoutError:
                    yield None
                    continue
                answer = self.answers[number]
                if isinstance(event, Wrote):
                    answer.read(event.chunks)
                elif isinstance(event, Ended):
                    left -= 1
                    answer.end(event.rest)
                    answer.stop_found = jobs[number].text.stop_found
                    if event.error is not None:
                        raise event.error
                yield number, event
        finally:
            for job in jobs:
                job.cancel()

    async def whole(self) -> None:
        """Wait for all of them."""
        async for _ in self.events():
            pass


def _put(queue: "asyncio.Queue[tuple[int, Event]]", number: int, event: Event) -> None:
    queue.put_nowait((number, event))


def _sender(
    loop: asyncio.AbstractEventLoop, queue: "asyncio.Queue[tuple[int, Event]]", number: int
) -> Callable[[Event], None]:
    def emit(event: Event) -> None:
        loop.call_soon_threadsafe(_put, queue, number, event)

    return emit


def usage_of(answers: Sequence[Answer]) -> dict[str, Any]:
    """OpenAI's counts; a prompt with several choices counts once, as what was kept of it for the first."""
    first = {tuple(answer.request.prompt_ids): answer for answer in reversed(answers)}.values()
    prompt = sum(len(answer.request.prompt_ids) for answer in first)
    written = sum(answer.stats.tokens for answer in answers)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": written,
        "total_tokens": prompt + written,
        "prompt_tokens_details": {"cached_tokens": sum(answer.stats.cached_tokens for answer in first)},
        "completion_tokens_details": {
            "reasoning_tokens": sum(answer.thought_tokens for answer in answers),
            **predicted(answers),
        },
    }


def predicted(answers: Sequence[Answer]) -> dict[str, int]:
    """How much of the prediction was right, as OpenAI counts it; of all guesses, where none was sent."""
    if sent := sum(answer.request.hint_texts.prediction for answer in answers if answer.request.hint_texts):
        accepted = sum(answer.stats.tokens_by_source["prediction"] for answer in answers)
        rejected = max(0, sent - accepted)
    else:
        accepted = sum(answer.stats.tokens - answer.stats.tokens_by_source["target"] for answer in answers)
        rejected = sum(answer.stats.drafted for answer in answers) - accepted
    return {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": rejected}


def account(answers: Sequence[Answer]) -> dict[str, Any]:
    """What repeats an answer, and how it was made: the seed of the first text, and what all of them cost."""
    stats = [answer.stats.as_dict() for answer in answers]
    return {"seed": answers[0].request.sampling.seed, "stats": stats}


async def answer_whole(http: HttpRequest, texts: Texts, body: Callable[[], Mapping[str, Any]]) -> Response:
    """The answer in one piece; a client that leaves before ends its texts."""
    work, gone = asyncio.create_task(texts.whole()), asyncio.create_task(_left(http))
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            return Response(status_code=GONE)
        await work
        return JSONResponse(body())
    finally:
        for task in (work, gone):
            task.cancel()
            with suppress(BaseException):
                await task


async def _left(http: HttpRequest) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


def server_sent(http: HttpRequest, events: AsyncIterator[tuple[str | None, Any]]) -> Response:
    """A stream of server-sent events: (name or None, JSON, or a string as it is). Errors become the last event."""

    async def lines() -> AsyncIterator[bytes]:
        try:
            async for name, data in events:
                yield sse(name, data)
        except Exception as error:
            named = "error" if http.url.path.startswith(("/v1/messages", "/v1/responses")) else None
            yield sse(named, error_body(refusal(error), http.url.path))

    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamingResponse(lines(), media_type="text/event-stream", headers=headers)


def sse(name: str | None, data: Any) -> bytes:
    """One event; a comment where there are no data."""
    if data is None:
        return b": ping\n\n"
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return (f"event: {name}\n" if name else "").encode() + f"data: {text}\n\n".encode()


def new_id(kind: str) -> str:
    """A name for an answer."""
    return f"{kind}{secrets.token_hex(12)}"
