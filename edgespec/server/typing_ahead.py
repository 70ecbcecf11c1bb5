"""Prompts that are still being typed: read ahead, and at a pause answered ahead, so that Enter finds the first tokens.

    PUT /edgespec/draft-prompt    a chat request as far as it is typed; "pause": true = this may be all of it

While words come, the tokens that further typing cannot change are read. At a pause the answer is begun. A chat request
that is the same takes it over; any other starts from what was read. The idea of SpeQL.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from edgespec.loop.passes import common_prefix
from edgespec.server.chat import ChatBody, prompt_of, requests_of, tools_of
from edgespec.server.texts import Service, read_body

PREPARED = 16  # tokens of an answer that is begun at a pause
TYPED_NEXT = ("a", " a", ".", "\n", "1")  # what may come next: tokens that all of these leave alone are stable


class DraftBody(ChatBody):
    """PUT /edgespec/draft-prompt: a chat request that is still being typed."""

    pause: bool = False  # this may be all of it
    id: str = ""  # which of several that are typed at once


def stable_prefix(versions: Sequence[Sequence[int]]) -> list[int]:
    """The tokens that all versions begin with."""
    first, *others = versions
    return list(first[: min(common_prefix(first, other) for other in others)])


async def draft_prompt(http: HttpRequest) -> Response:
    """PUT /edgespec/draft-prompt."""
    service: Service = http.app.state.service
    body = await read_body(http, DraftBody)
    scheduler = service.model.scheduler
    told: dict[str, Any] = {"pause": body.pause, "tokens": 0}
    if body.pause:
        requests, _ = await requests_of(service, body.model_copy(update={"n": 1}))
        service.drafts.prepare(scheduler, body.id, requests[0], PREPARED)
        return JSONResponse(told | {"tokens": len(requests[0].prompt_ids), "seed": requests[0].sampling.seed})
    last = body.messages[-1] if body.messages else {}
    if isinstance(last.get("content"), str):
        tools = tools_of(service.model.target.vocab, body.tools, body.tool_choice)
        further = [{**last, "content": last["content"] + more} for more in ("", *TYPED_NEXT)]
        versions = [
            await prompt_of(service, body.model_copy(update={"messages": [*body.messages[:-1], one]}), tools)
            for one in further
        ]
        ids = stable_prefix(versions)
        if len(ids) > 1:
            requests, _ = await requests_of(service, body.model_copy(update={"n": 1}))
            service.drafts.prepare(scheduler, body.id, replace(requests[0], prompt_ids=ids), 0)
            told["tokens"] = len(ids)
    return JSONResponse(told)
