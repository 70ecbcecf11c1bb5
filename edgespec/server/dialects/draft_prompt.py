"""A chat request as far as it is typed: PUT /edgespec/draft-prompt."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from edgespec.loop.passes import common_prefix
from edgespec.server.access import SENDER
from edgespec.server.conversation import Conversation, Question
from edgespec.server.dialects.chat import ChatBody, question_of
from edgespec.server.model_format import ModelFormat
from edgespec.server.models import Models
from edgespec.server.service import Service
from edgespec.server.wire import MOST_NAME, parsed_body

PREPARED = 16  # tokens of an answer begun at a pause
TYPED_NEXT = ("a", " a", ".", "\n", "1")  # likely continuations: a token is stable if none of these changes it


class TypedBody(ChatBody):
    pause: bool = False  # the user has paused: the prompt may be complete
    id: str = Field("", max_length=MOST_NAME)


async def typed_prompt(http: HttpRequest) -> Response:
    models: Models = http.app.state.models
    (body, question), size = await models.read(http, _read)
    told: dict[str, Any] = {"pause": body.pause, "tokens": 0}
    if not question or not question.conversation or not models.wanted(body.model).service:
        return JSONResponse(told)
    async with models.service(body.model) as service:
        return JSONResponse(told | await _prepare(service, body, question, http.scope[SENDER], size))


async def _prepare(service: Service, body: TypedBody, question: Question, sender: str, size: int) -> dict[str, Any]:
    """Returns fields of the answer."""
    assert question.conversation
    (answer,) = await service.prepare(question, sender, size)
    request, name = answer.request, answer.request.sender + body.id
    if body.pause:
        service.typing_ahead.prepare(name, request, PREPARED)
        return {"tokens": len(request.prompt_ids), "seed": request.sampling.seed}
    with service.admitted():
        form = service.format_of(question.conversation)
        ids = await service.readers.read(size, partial(stable_ids, form, question.conversation))
    if len(ids) <= 1:
        return {}
    service.typing_ahead.prepare(name, replace(request, prompt_ids=ids), 0)
    return {"tokens": len(ids)}


def _read(data: bytearray) -> tuple[TypedBody, Question | None]:
    """The body, and its question, if it can be used already."""
    body = parsed_body(data, TypedBody)
    last = body.messages[-1] if body.messages else {}
    usable = body.pause or isinstance(last.get("content"), str)
    return body, replace(question_of(body), choices=1) if usable else None


def stable_ids(form: ModelFormat, conversation: Conversation) -> list[int]:
    *before, last = conversation.turns
    further = [replace(conversation, turns=[*before, replace(last, text=last.text + more)]) for more in TYPED_NEXT]
    return stable_prefix(list(map(form.prompt_ids, [conversation, *further])))


def stable_prefix(versions: Sequence[Sequence[int]]) -> list[int]:
    first, *others = versions
    return list(first[: min(common_prefix(first, other) for other in others)])
