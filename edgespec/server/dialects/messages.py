"""Anthropic's dialect: /v1/messages and /v1/messages/count_tokens."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from edgespec.scheduler.requests import Ended, Wrote
from edgespec.server.answers import Answer, Answers
from edgespec.server.conversation import Conversation, Piece, Question, Thought, Turn, text_of
from edgespec.server.errors import Refused
from edgespec.server.service import Service
from edgespec.server.tool_calls import Call, Tools, choose_tools, replayed
from edgespec.server.wire import Event, SamplingFields, answer_whole, new_id, read_body, server_sent

# Claude Code puts this line first and changes it with every request, so that no prefix would match.
BILLING = "x-anthropic-billing-header:"
BLOCKS = ("tool_result", "tool_use", "thinking", "redacted_thinking")


class CountBody(SamplingFields):
    messages: list[dict[str, Any]]
    model: str = ""
    system: str | list[dict[str, Any]] | None = None
    tools: list[Any] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None


class MessagesBody(CountBody):
    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool = False


async def messages(http: HttpRequest) -> Response:
    service: Service = http.app.state.service
    body = await read_body(http, MessagesBody)
    question = Question(
        body.sampling, conversation_of(body), max_tokens=body.max_tokens, stop=body.stop_sequences or ()
    )
    answers = await service.answers(question)
    head = {"id": new_id("msg_"), "type": "message", "role": "assistant", "model": body.model or service.name}
    if body.stream:
        return server_sent(_stream(head, answers), lambda refused: ("error", error_body(refused)))

    def whole() -> dict[str, Any]:
        (one,) = answers.all
        told = {"usage": usage(one), "edgespec": answers.account}
        return {**head, "content": [block(piece) for piece in one.pieces], **ending(one), **told}

    return await answer_whole(http, answers.whole(), whole)


async def count_tokens(http: HttpRequest) -> Response:
    service: Service = http.app.state.service
    conversation = conversation_of(await read_body(http, CountBody))
    ids = await asyncio.to_thread(service.chat_format.prompt_ids, conversation)
    return JSONResponse({"input_tokens": len(ids)})


def conversation_of(body: CountBody) -> Conversation:
    """Raises Refused."""
    blocks = [{"type": "text", "text": body.system}] if isinstance(body.system, str) else list(body.system or ())
    if blocks and str(blocks[0].get("text", "")).startswith(BILLING):
        rest = str(blocks[0]["text"]).partition("\n")[2]
        blocks[:1] = [{"type": "text", "text": rest}] if rest else []
    turns = list[Turn]()
    if system := "\n\n".join(text_of([block], "system") for block in blocks):
        turns.append(Turn("system", system))
    for i, message in enumerate(body.messages):
        role = message.get("role")
        if role not in ("user", "assistant", "system"):
            raise Refused(400, f"messages.{i}.role is {role!r}, but must be user or assistant", param="messages")
        turns += turns_of(role, message.get("content"), f"messages.{i}.content")
    if not body.messages:
        raise Refused(400, "messages is empty: give at least one", param="messages")
    wanted = (body.thinking or {}).get("type")
    return Conversation(turns, tools_of(body), {"enable_thinking": wanted != "disabled"} if wanted else {})


def turns_of(role: str, content: Any, where: str) -> list[Turn]:
    """The turns of one message: each result of a tool is a turn; raises Refused."""
    if not isinstance(content, list):
        return [Turn(role, text_of(content, where))]
    by_kind: dict[str, list[Any]] = {}
    for one in content:
        kind = one.get("type") if isinstance(one, dict) else None
        by_kind.setdefault(kind if kind in BLOCKS else "text", []).append(one)
    results = by_kind.pop("tool_result", [])
    found = [Turn("tool", text_of(one.get("content"), where), result_of=one.get("tool_use_id")) for one in results]
    if by_kind or not found:
        calls = [replayed(b.get("name"), b.get("input"), b.get("id")) for b in by_kind.get("tool_use", ())]
        thought = "".join(str(block.get("thinking")) for block in by_kind.get("thinking", ()))
        found.append(Turn(role, text_of(by_kind.get("text"), where), thought or None, calls))
    return found


def tools_of(body: CountBody) -> Tools | None:
    """The client's tools without the provider's own; raises Refused."""
    given = [tool for tool in body.tools or () if isinstance(tool, dict) and "input_schema" in tool]
    functions = [
        {"name": t.get("name"), "description": t.get("description", ""), "parameters": t["input_schema"]} for t in given
    ]
    choice = body.tool_choice or {}
    mode = {"any": "required", "tool": "auto"}.get(str(choice.get("type")), choice.get("type"))
    return choose_tools(functions, str(mode or "auto"), choice.get("name"))


def error_body(refused: Refused) -> dict[str, Any]:
    return {"type": "error", "error": {"type": refused.kind, "message": refused.message}}


def block(piece: Piece) -> dict[str, Any]:
    if isinstance(piece, Thought):
        return {"type": "thinking", "thinking": piece.text, "signature": ""}
    if isinstance(piece, str):
        return {"type": "text", "text": piece}
    return {"type": "tool_use", "id": piece.id, "name": piece.name, "input": json.loads(piece.arguments)}


def usage(answer: Answer) -> dict[str, int]:
    """Anthropic's counts: `input_tokens` has no cached tokens."""
    stats = answer.stats
    return {
        "input_tokens": len(answer.request.prompt_ids) - stats.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": stats.cached_tokens,
        "output_tokens": stats.tokens,
    }


def ending(answer: Answer) -> dict[str, str | None]:
    if answer.stop_found is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": answer.stop_found}
    if answer.calls:
        return {"stop_reason": "tool_use", "stop_sequence": None}
    reason = "max_tokens" if answer.stats.finish_reason == "length" else "end_turn"
    return {"stop_reason": reason, "stop_sequence": None}


async def _stream(head: dict[str, Any], answers: Answers) -> AsyncIterator[Event]:
    (one,) = answers.all

    def event(kind: str, **fields: Any) -> tuple[str, Any]:
        return kind, {"type": kind, **fields}

    nothing: dict[type, dict[str, Any]] = {str: {"text": ""}, Thought: {"thinking": ""}, Call: {"input": {}}}
    begun, number = False, -1
    is_open: type = type(None)
    async for found in answers.events():
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
