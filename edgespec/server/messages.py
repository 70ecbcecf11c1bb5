"""Anthropic's dialect: /v1/messages and /v1/messages/count_tokens."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from edgespec.jobs import Ended, Wrote
from edgespec.server.chat import refuse_tools
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
from edgespec.text import Message, render_chat

# A line that Claude Code puts first and changes with every request, so that no prefix would ever be found again.
BILLING = "x-anthropic-billing-header:"


class CountBody(SamplingFields):
    """POST /v1/messages/count_tokens."""

    messages: list[dict[str, Any]]
    model: str = ""
    system: str | list[dict[str, Any]] | None = None
    tools: list[Any] | None = None
    tool_choice: dict[str, Any] | None = None


class MessagesBody(CountBody):
    """POST /v1/messages."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool = False


def block_text(content: Any, where: str) -> str:
    """The text of a content, a string or blocks, without what was thought. Raises Refused for images and the like."""
    if content is None or isinstance(content, str):
        return content or ""
    found = list[str]()
    for block in content if isinstance(content, list) else [content]:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind in ("thinking", "redacted_thinking"):
            continue
        if kind == "tool_result":
            found.append(block_text(block.get("content"), where))
        elif kind == "text" and isinstance(block.get("text"), str):
            found.append(block["text"])
        else:
            raise Refused(
                400, f"{where}: only text can be read here, not {kind or type(block).__name__!r}", param=where
            )
    return "".join(found)


def conversation(body: CountBody) -> list[Message]:
    """Messages as chat templates want them. Raises Refused."""
    blocks = [{"type": "text", "text": body.system}] if isinstance(body.system, str) else list(body.system or ())
    if blocks and str(blocks[0].get("text", "")).startswith(BILLING):
        rest = str(blocks[0]["text"]).partition("\n")[2]
        blocks[:1] = [{"type": "text", "text": rest}] if rest else []
    found = list[Message]()
    if system := "\n\n".join(block_text([block], "system") for block in blocks):
        found.append({"role": "system", "content": system})
    for i, message in enumerate(body.messages):
        role = message.get("role")
        if role not in ("user", "assistant", "system"):
            raise Refused(400, f"messages.{i}.role is {role!r}, but must be user or assistant", param="messages")
        found.append({"role": role, "content": block_text(message.get("content"), f"messages.{i}.content")})
    if not body.messages:
        raise Refused(400, "messages is empty: give at least one", param="messages")
    return found


async def prompt_ids(service: Service, body: CountBody) -> list[int]:
    """Token ids of the conversation. Raises Refused."""
    refuse_tools(body.tools, (body.tool_choice or {}).get("type"))
    return await asyncio.to_thread(render_chat, service.model.target.vocab, conversation(body))


async def count_tokens(http: HttpRequest) -> Response:
    """POST /v1/messages/count_tokens."""
    body = await read_body(http, CountBody)
    return JSONResponse({"input_tokens": len(await prompt_ids(http.app.state.service, body))})


async def messages(http: HttpRequest) -> Response:
    """POST /v1/messages."""
    service: Service = http.app.state.service
    body = await read_body(http, MessagesBody)
    ids = await prompt_ids(service, body)
    requests = requests_for(
        service, [ids], sampling_of(body, service.defaults), max_tokens=body.max_tokens, stop=body.stop_sequences
    )
    texts = Texts(service, requests)
    head = {"id": new_id("msg_"), "type": "message", "role": "assistant", "model": body.model or service.name}
    if body.stream:
        return server_sent(http, _stream(head, texts))

    def whole() -> dict[str, Any]:
        (one,) = texts.answers
        told = {"usage": usage(one), "edgespec": account(texts.answers)}
        return {**head, "content": [{"type": "text", "text": one.text}], **ending(one), **told}

    return await answer_whole(http, texts, whole)


def usage(answer: Answer) -> dict[str, int]:
    """Anthropic's counts: what was kept of the prompt is counted apart."""
    stats = answer.stats
    return {
        "input_tokens": len(answer.request.prompt_ids) - stats.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": stats.cached_tokens,
        "output_tokens": stats.tokens,
    }


def ending(answer: Answer) -> dict[str, str | None]:
    """Why the text ends."""
    if answer.stop_found is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": answer.stop_found}
    reason = "max_tokens" if answer.stats.finish_reason == "length" else "end_turn"
    return {"stop_reason": reason, "stop_sequence": None}


async def _stream(head: dict[str, Any], texts: Texts) -> AsyncIterator[tuple[str | None, Any]]:
    (one,) = texts.answers

    def event(kind: str, **fields: Any) -> tuple[str, Any]:
        return kind, {"type": kind, **fields}

    begun = False
    async for found in texts.events():
        if not begun:
            empty: Sequence[Any] = []
            begin = {**head, "content": empty, "stop_reason": None, "stop_sequence": None, "usage": usage(one)}
            yield event("message_start", message=begin)
            yield event("content_block_start", index=0, content_block={"type": "text", "text": ""})
            begun = True
        if found is None:
            yield event("ping")
        elif isinstance(found[1], Wrote):
            if text := "".join(chunk.text for chunk in found[1].chunks):
                yield event("content_block_delta", index=0, delta={"type": "text_delta", "text": text})
        elif isinstance(found[1], Ended):
            yield event("content_block_stop", index=0)
            yield event("message_delta", delta=ending(one), usage=usage(one))
            yield event("message_stop")
