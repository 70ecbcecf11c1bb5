"""Anthropic's dialect: /v1/messages and /v1/messages/count_tokens."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from edgespec.loop.text import Message
from edgespec.scheduler.requests import Ended, Wrote
from edgespec.server.call_formats import Call, Thought
from edgespec.server.chat import compiled
from edgespec.server.errors import Refused
from edgespec.server.parse_output import Piece
from edgespec.server.prompts import prompt_ids
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
from edgespec.server.tools import Look, Tools, choose_tools, replayed

# A line that Claude Code puts first and changes with every request, so that no prefix would ever be found again.
BILLING = "x-anthropic-billing-header:"


class CountBody(SamplingFields):
    """POST /v1/messages/count_tokens."""

    messages: list[dict[str, Any]]
    model: str = ""
    system: str | list[dict[str, Any]] | None = None
    tools: list[Any] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None


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
        if kind == "text" and isinstance(block.get("text"), str):
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
        found += turns(str(role), message.get("content"), f"messages.{i}.content")
    if not body.messages:
        raise Refused(400, "messages is empty: give at least one", param="messages")
    return found


def turns(role: str, content: Any, where: str) -> list[Message]:
    """A message: results of tools are messages of their own, and calls stand beside the text. Raises Refused."""
    blocks = content if isinstance(content, list) else [content]
    kinds = [block.get("type") if isinstance(block, dict) else None for block in blocks]
    found: list[Message] = [
        {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": block_text(block.get("content"), where)}
        for block, kind in zip(blocks, kinds, strict=True)
        if kind == "tool_result"
    ]
    calls = [
        replayed(b.get("name"), b.get("input"), b.get("id"))
        for b, kind in zip(blocks, kinds, strict=True)
        if kind == "tool_use"
    ]
    rest = [b for b, kind in zip(blocks, kinds, strict=True) if kind not in ("tool_result", "tool_use")]
    if rest or calls or not found:
        text = block_text(rest if isinstance(content, list) else content, where)
        thought = "".join(str(b.get("thinking")) for b, kind in zip(blocks, kinds, strict=True) if kind == "thinking")
        more = {"tool_calls": calls, "reasoning_content": thought}
        found.append({"role": role, "content": text, **{name: value for name, value in more.items() if value}})
    return found


def tools_of(service: Service, body: CountBody) -> Tools | None:
    """The tools that the model may call; the provider's own are passed over. Raises Refused."""
    given = [tool for tool in body.tools or () if isinstance(tool, dict) and "input_schema" in tool]
    functions = [
        {"name": t.get("name"), "description": t.get("description", ""), "parameters": t["input_schema"]} for t in given
    ]
    choice = body.tool_choice or {}
    mode, name = (
        {"any": "required", "tool": "auto"}.get(str(choice.get("type")), choice.get("type")),
        choice.get("name"),
    )
    return choose_tools(service.model.target.vocab, functions, str(mode or "auto"), name)


async def ids_of(service: Service, body: CountBody, tools: Tools | None) -> list[int]:
    """Token ids of the conversation. Raises Refused."""
    shown = tools.functions if tools else None
    wanted = (body.thinking or {}).get("type")
    more = {"enable_thinking": wanted != "disabled"} if wanted else {}
    return await asyncio.to_thread(prompt_ids, service.model.target.vocab, conversation(body), shown, more)


async def count_tokens(http: HttpRequest) -> Response:
    """POST /v1/messages/count_tokens."""
    body = await read_body(http, CountBody)
    service: Service = http.app.state.service
    return JSONResponse({"input_tokens": len(await ids_of(service, body, tools_of(service, body)))})


async def messages(http: HttpRequest) -> Response:
    """POST /v1/messages."""
    service: Service = http.app.state.service
    body = await read_body(http, MessagesBody)
    tools = tools_of(service, body)
    ids = await ids_of(service, body, tools)
    look = Look(service.model.target.vocab, ids, tools)
    grammar = await compiled(service, look.grammar(tools.required if tools else None))
    requests = await requests_for(
        service, [ids], sampling_of(body, service.defaults), max_tokens=body.max_tokens, stop=body.stop_sequences,
        grammar=grammar, shown=look.shown,
    )  # fmt: skip
    texts = Texts(service, requests, look)
    head = {"id": new_id("msg_"), "type": "message", "role": "assistant", "model": body.model or service.name}
    if body.stream:
        return server_sent(http, _stream(head, texts))

    def whole() -> dict[str, Any]:
        (one,) = texts.answers
        told = {"usage": usage(one), "edgespec": account(texts.answers)}
        return {**head, "content": [block(piece) for piece in one.pieces], **ending(one), **told}

    return await answer_whole(http, texts, whole)


def block(piece: Piece) -> dict[str, Any]:
    """A block of an answer's content."""
    if isinstance(piece, Thought):
        return {"type": "thinking", "thinking": piece.text, "signature": ""}
    if isinstance(piece, str):
        return {"type": "text", "text": piece}
    return {"type": "tool_use", "id": piece.id, "name": piece.name, "input": json.loads(piece.arguments)}


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
    if answer.calls:
        return {"stop_reason": "tool_use", "stop_sequence": None}
    reason = "max_tokens" if answer.stats.finish_reason == "length" else "end_turn"
    return {"stop_reason": reason, "stop_sequence": None}


async def _stream(head: dict[str, Any], texts: Texts) -> AsyncIterator[tuple[str | None, Any]]:
    (one,) = texts.answers

    def event(kind: str, **fields: Any) -> tuple[str, Any]:
        return kind, {"type": kind, **fields}

    nothing: dict[type, dict[str, Any]] = {str: {"text": ""}, Thought: {"thinking": ""}, Call: {"input": {}}}
    begun, number = False, -1  # the last block's number
    is_open: type = type(None)  # and its kind
    async for found in texts.events():
        if not begun:
            empty: Sequence[Any] = []
            begin = {**head, "content": empty, "stop_reason": None, "stop_sequence": None, "usage": usage(one)}
            yield event("message_start", message=begin)
            begun = True
        if found is None:
            yield event("ping")
            continue
        for piece in one.new if isinstance(found[1], Wrote | Ended) else ():
            goes_on = isinstance(piece, is_open) and not isinstance(piece, Call)
            if number >= 0 and not goes_on:
                yield event("content_block_stop", index=number)
            if not goes_on:
                number += 1
                yield event("content_block_start", index=number, content_block=block(piece) | nothing[type(piece)])
            is_open = type(piece)
            if isinstance(piece, str):
                delta = {"type": "text_delta", "text": piece}
            elif isinstance(piece, Thought):
                delta = {"type": "thinking_delta", "thinking": piece.text}
            else:
                delta = {"type": "input_json_delta", "partial_json": piece.arguments}
            yield event("content_block_delta", index=number, delta=delta)
        if isinstance(found[1], Ended):
            if number >= 0:
                yield event("content_block_stop", index=number)
            yield event("message_delta", delta=ending(one), usage=usage(one))
            yield event("message_stop")
