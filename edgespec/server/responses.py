"""OpenAI's newer dialect, without memory of earlier answers: /v1/responses."""

import asyncio
import time
from collections.abc import AsyncIterator
from itertools import count
from typing import Any

from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from edgespec.jobs import Ended, Wrote
from edgespec.server.chat import Extra, compiled, conversation, grammar_of, refuse_tools
from edgespec.server.errors import Refused
from edgespec.server.texts import (
    Answer,
    SamplingFields,
    Service,
    Texts,
    account,
    answer_whole,
    new_id,
    read_body,
    requests_for,
    sampling_of,
    server_sent,
)
from edgespec.text import render_chat


class ResponsesBody(SamplingFields):
    """POST /v1/responses."""

    input: str | list[dict[str, Any]]
    model: str = ""
    instructions: str | None = None
    max_output_tokens: int | None = None
    stream: bool = False
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    text: dict[str, Any] | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    edgespec: Extra = Field(default_factory=Extra)


def messages_of(body: ResponsesBody) -> list[dict[str, Any]]:
    """The items as messages; items that are neither messages nor reasoning are refused."""
    items = [{"role": "user", "content": body.input}] if isinstance(body.input, str) else body.input
    found = [{"role": "system", "content": body.instructions}] if body.instructions else []
    for i, item in enumerate(items):
        kind = item.get("type", "message")
        if kind == "message":
            found.append(item)
        elif kind != "reasoning":
            raise Refused(400, f"input.{i}: items of type {kind!r} cannot be read here", param="input")
    return found


async def responses(http: HttpRequest) -> Response:
    """POST /v1/responses."""
    service: Service = http.app.state.service
    body = await read_body(http, ResponsesBody)
    if body.previous_response_id or body.conversation:
        raise Refused(400, "answers are not stored here: send the whole conversation as input")
    functions = [tool for tool in body.tools or () if tool.get("type") == "function"]  # others are the provider's own
    refuse_tools(functions, body.tool_choice)
    form = (body.text or {}).get("format")
    grammar = await compiled(service, grammar_of(form, body.edgespec, "text.format"))
    ids = await asyncio.to_thread(render_chat, service.model.target.vocab, conversation(messages_of(body)))
    sampling = sampling_of(body, service.defaults)
    requests = requests_for(service, [ids], sampling, max_tokens=body.max_output_tokens, stop=None, grammar=grammar)
    texts, names = Texts(service, requests), (new_id("resp_"), new_id("msg_"))
    head = {
        "id": names[0], "object": "response", "created_at": int(time.time()), "model": body.model or service.name,
        "instructions": body.instructions, "max_output_tokens": body.max_output_tokens, "parallel_tool_calls": True,
        "previous_response_id": None, "store": False, "temperature": sampling.temperature, "top_p": sampling.top_p,
        "text": {"format": form or {"type": "text"}}, "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "truncation": "disabled", "metadata": {}, "error": None, "reasoning": None,
    }  # fmt: skip
    if body.stream:
        return server_sent(http, _stream(head, names[1], texts))
    return await answer_whole(http, texts, lambda: whole(head, names[1], texts))


def item(name: str, answer: Answer, status: str) -> dict[str, Any]:
    """The answer's message."""
    content = [part(answer.text)] if status != "in_progress" else []
    return {"type": "message", "id": name, "status": status, "role": "assistant", "content": content}


def part(text: str) -> dict[str, Any]:
    """A piece of a message's content."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def whole(head: dict[str, Any], name: str, texts: Texts) -> dict[str, Any]:
    """A response that is done."""
    (one,) = texts.answers
    cut = one.stats.finish_reason == "length"
    status = "incomplete" if cut else "completed"
    prompt, written = len(one.request.prompt_ids), one.stats.tokens
    usage = {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": one.stats.cached_tokens},
        "output_tokens": written,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + written,
    }
    more = {"incomplete_details": {"reason": "max_output_tokens"} if cut else None, "usage": usage}
    told = {"edgespec": account(texts.answers)}
    return {**head, "status": status, "output": [item(name, one, status)], **more, **told}


async def _stream(head: dict[str, Any], name: str, texts: Texts) -> AsyncIterator[tuple[str | None, Any]]:
    numbers, (one,) = count(), texts.answers

    def event(kind: str, **fields: Any) -> tuple[str, Any]:
        return kind, {"type": kind, "sequence_number": next(numbers), **fields}

    started = {**head, "status": "in_progress", "output": [], "incomplete_details": None, "usage": None}
    at = {"item_id": name, "output_index": 0, "content_index": 0}
    yield event("response.created", response=started)
    yield event("response.in_progress", response=started)
    yield event("response.output_item.added", output_index=0, item=item(name, one, "in_progress"))
    yield event("response.content_part.added", **at, part=part(""))
    async for found in texts.events():
        if found is None:
            yield None, None
        elif isinstance(found[1], Wrote):
            if text := "".join(chunk.text for chunk in found[1].chunks):
                yield event("response.output_text.delta", **at, delta=text, logprobs=[])
        elif isinstance(found[1], Ended):
            done = whole(head, name, texts)
            yield event("response.output_text.done", **at, text=one.text, logprobs=[])
            yield event("response.content_part.done", **at, part=part(one.text))
            yield event("response.output_item.done", output_index=0, item=done["output"][0])
            yield event(f"response.{done['status']}", response=done)
