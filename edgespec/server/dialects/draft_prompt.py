"""A chat request as far as it is typed: PUT /edgespec/draft-prompt."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from edgespec.loop.passes import common_prefix
from edgespec.server.access import SENDER
from edgespec.server.conversation import Conversation
from edgespec.server.dialects.chat import ChatBody, question_of
from edgespec.server.model_format import ModelFormat
from edgespec.server.service import Service
from edgespec.server.wire import read_body

PREPARED = 16  # tokens of an answer begun at a pause
TYPED_NEXT = ("a", " a", ".", "\n", "1")  # likely continuations: a token is stable if none of these changes it


class TypedBody(ChatBody):
    pause: bool = False  # the user has paused: the prompt may be complete
    id: str = ""


async def typed_prompt(http: HttpRequest) -> Response:
    service: Service = http.app.state.service
    body = await read_body(http, TypedBody)
    told: dict[str, Any] = {"pause": body.pause, "tokens": 0}
    last = body.messages[-1] if body.messages else {}
    if not body.pause and not isinstance(last.get("content"), str):
        return JSONResponse(told)
    question = replace(await asyncio.to_thread(question_of, body), choices=1)
    assert question.conversation
    (answer,) = await service.prepare(question, http.scope[SENDER])
    request, name = answer.request, answer.request.sender + body.id
    if body.pause:
        service.typing_ahead.prepare(name, request, PREPARED)
        return JSONResponse(told | {"tokens": len(request.prompt_ids), "seed": request.sampling.seed})
    ids = await asyncio.to_thread(stable_ids, service.chat_format, question.conversation)
    if len(ids) > 1:
        # With 0 tokens the prompt is unfinished, and the draft completes it.
        service.typing_ahead.prepare(name, replace(request, prompt_ids=ids, foresee=True), 0)
        told["tokens"] = len(ids)
    return JSONResponse(told)


def stable_ids(form: ModelFormat, conversation: Conversation) -> list[int]:
    *before, last = conversation.turns
    further = [replace(conversation, turns=[*before, replace(last, text=last.text + more)]) for more in TYPED_NEXT]
    return stable_prefix(list(map(form.prompt_ids, [conversation, *further])))


def stable_prefix(versions: Sequence[Sequence[int]]) -> list[int]:
    first, *others = versions
    return list(first[: min(common_prefix(first, other) for other in others)])
