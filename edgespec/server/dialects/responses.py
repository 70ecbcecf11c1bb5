"""OpenAI's newer dialect /v1/responses, without stored answers."""

import time
from collections.abc import AsyncIterator
from dataclasses import replace
from itertools import count
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from edgespec.scheduler.requests import Ended, Wrote
from edgespec.server.answers import Answers
from edgespec.server.conversation import Conversation, Question, Thought, Turn, text_of
from edgespec.server.dialects.openai import OpenAIBody, error_body, template_options
from edgespec.server.errors import Refused
from edgespec.server.service import Service
from edgespec.server.tool_calls import Call, Tools, choose_tools, replayed
from edgespec.server.wire import Event, answer_whole, new_id, read_body, server_sent

ROLES = ("system", "developer", "user", "assistant")


class ResponsesBody(OpenAIBody):
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    previous_response_id: str | None = None
    conversation: Any = None


async def responses(http: HttpRequest) -> Response:
    service: Service = http.app.state.service
    body = await read_body(http, ResponsesBody)
    answers = await service.answers(question_of(body))
    sampling, names = answers.all[0].request.sampling, (new_id("resp_"), new_id("msg_"))
    head = {
        "id": names[0], "object": "response", "created_at": int(time.time()), "model": body.model or service.name,
        "instructions": body.instructions, "max_output_tokens": body.max_output_tokens, "parallel_tool_calls": True,
        "previous_response_id": None, "store": False, "temperature": sampling.temperature, "top_p": sampling.top_p,
        "text": {"format": (body.text or {}).get("format") or {"type": "text"}},
        "tool_choice": body.tool_choice or "auto", "tools": body.tools or [],
        "truncation": "disabled", "metadata": {}, "error": None, "reasoning": body.reasoning,
    }  # fmt: skip
    if body.stream:
        return server_sent(_stream(head, names[1], answers), lambda refused: ("error", error_body(refused)))
    return await answer_whole(http, answers.whole(), lambda: whole(head, names[1], answers))


def question_of(body: ResponsesBody) -> Question:
    """Raises Refused or UsageError."""
    if body.previous_response_id or body.conversation:
        raise Refused(400, "answers are not stored here: send the whole conversation as input")
    form = (body.text or {}).get("format")
    if form is not None and not isinstance(form, dict):
        raise Refused(400, f"text.format is {form!r}, but must be an object with a type", param="text.format")
    options = template_options((body.reasoning or {}).get("effort"))
    return Question(
        body.sampling, Conversation(turns_of(body), tools_of(body), options), max_tokens=body.max_output_tokens,
        grammar=body.grammar(form, "text.format"),
    )  # fmt: skip


def turns_of(body: ResponsesBody) -> list[Turn]:
    """One turn for neighbouring items of the assistant; raises Refused."""
    items = [{"role": "user", "content": body.input}] if isinstance(body.input, str) else body.input
    found = [Turn("system", body.instructions)] if body.instructions else []
    thought = ""
    for i, item in enumerate(items):
        kind, where = item.get("type", "message"), f"input.{i}"
        if kind == "reasoning":
            parts = item.get("content") or ()
            if not isinstance(parts, list | tuple):
                raise Refused(400, f"{where}.content is {parts!r}, but must be a list", param="input")
            thought = "".join(str(part.get("text", "")) for part in parts if isinstance(part, dict))
        elif kind == "message":
            turn = message_of(item, where)
            is_answer = turn.role == "assistant"
            found.append(replace(turn, thought=thought) if is_answer and thought else turn)
            thought = "" if is_answer else thought
        elif kind == "function_call":
            call = replayed(item.get("name"), item.get("arguments"), item.get("call_id"))
            if found and found[-1].role == "assistant" and not thought:
                found[-1] = replace(found[-1], calls=[*found[-1].calls, call])
            else:
                found.append(Turn("assistant", thought=thought or None, calls=[call]))
            thought = ""
        elif kind == "function_call_output":
            found.append(Turn("tool", text_of(item.get("output"), f"{where}.output"), result_of=item.get("call_id")))
        else:
            raise Refused(400, f"{where}: items of type {kind!r} cannot be read here", param="input")
    if not found:
        raise Refused(400, "input is empty: give at least one item", param="input")
    return found


def message_of(item: dict[str, Any], where: str) -> Turn:
    role = item.get("role")
    if role not in ROLES:
        raise Refused(400, f"{where}.role is {role!r}, but must be one of {', '.join(ROLES)}", param="input")
    if item.get("tool_calls"):
        raise Refused(400, f"{where}.tool_calls: calls are items of their own here", param="input")
    return Turn("system" if role == "developer" else role, text_of(item.get("content"), f"{where}.content"))


def tools_of(body: ResponsesBody) -> Tools | None:
    """The client's tools without the provider's own; raises Refused."""
    functions = [
        {name: tool[name] for name in ("name", "description", "parameters") if tool.get(name) is not None}
        for tool in body.tools or ()
        if tool.get("type") == "function"
    ]
    choice = body.tool_choice or "auto"
    name = str(choice.get("name")) if isinstance(choice, dict) else None
    return choose_tools(functions, "auto" if name else str(choice), name)


def item(name: str, text: str, status: str) -> dict[str, Any]:
    content = [part(text)] if status != "in_progress" else []
    return {"type": "message", "id": name, "status": status, "role": "assistant", "content": content}


def call_item(call: Call, status: str = "completed") -> dict[str, Any]:
    arguments = call.arguments if status == "completed" else ""
    name = {"id": f"fc_{call.id.removeprefix('call_')}", "call_id": call.id, "name": call.name}
    return {"type": "function_call", **name, "arguments": arguments, "status": status}


def thought_item(name: str, text: str, status: str = "completed") -> dict[str, Any]:
    content = [{"type": "reasoning_text", "text": text}] if status == "completed" else []
    return {"type": "reasoning", "id": thought_id(name), "summary": [], "content": content, "status": status}


def thought_id(name: str) -> str:
    return f"rs_{name.removeprefix('msg_')}"


def part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def whole(head: dict[str, Any], name: str, answers: Answers) -> dict[str, Any]:
    (one,) = answers.all
    cut = one.stats.finish_reason == "length"
    status = "incomplete" if cut else "completed"
    counts = answers.usage
    usage = {
        "input_tokens": counts.prompt,
        "input_tokens_details": {"cached_tokens": counts.cached},
        "output_tokens": counts.written,
        "output_tokens_details": {"reasoning_tokens": counts.thought},
        "total_tokens": counts.prompt + counts.written,
    }
    more = {"incomplete_details": {"reason": "max_output_tokens"} if cut else None, "usage": usage}
    told = {"edgespec": answers.account, **({} if cut else {"completed_at": int(time.time())})}
    output = [thought_item(name, one.thought)] if one.thought else []
    output += [item(name, one.text, status)] if one.text or not one.calls else []
    output += map(call_item, one.calls)
    return {**head, "status": status, "output": output, **more, **told}


async def _stream(head: dict[str, Any], name: str, answers: Answers) -> AsyncIterator[Event]:
    numbers, (one,) = count(), answers.all

    def event(kind: str, **fields: Any) -> Event:
        return kind, {"type": kind, "sequence_number": next(numbers), **fields}

    started = {**head, "status": "in_progress", "output": [], "incomplete_details": None, "usage": None}
    at = {"item_id": name, "output_index": 0, "content_index": 0}
    place: dict[str, Any] = {"item_id": thought_id(name), "output_index": 0}
    yield event("response.created", response=started)
    yield event("response.in_progress", response=started)
    thinks, thought, begun, calls = False, 0, False, 0

    def thought_done() -> list[Event]:
        whole_thought = thought_item(name, one.thought)
        return [
            event("response.reasoning_text.done", **place, content_index=0, text=one.thought),
            event("response.output_item.done", output_index=0, item=whole_thought),
        ]

    async for found in answers.events():
        if found is None:
            yield None, None
            continue
        for piece in one.new if isinstance(found[1], Wrote | Ended) else ():
            if isinstance(piece, Thought):
                if not thought:
                    thinks, thought = True, 1
                    empty = thought_item(name, "", "in_progress")
                    yield event("response.output_item.added", output_index=0, item=empty)
                yield event("response.reasoning_text.delta", **place, content_index=0, delta=piece.text)
                continue
            if thinks:
                thinks = False
                for done_event in thought_done():
                    yield done_event
            if isinstance(piece, str):
                if not begun and calls:
                    continue
                if not begun:
                    at["output_index"] = thought
                    started_item = item(name, "", "in_progress")
                    yield event("response.output_item.added", output_index=thought, item=started_item)
                    yield event("response.content_part.added", **at, part=part(""))
                    begun = True
                yield event("response.output_text.delta", **at, delta=piece, logprobs=[])
                continue
            index, done_call = thought + begun + calls, call_item(piece)
            where = {"output_index": index, "item_id": done_call["id"]}
            yield event("response.output_item.added", output_index=index, item=call_item(piece, "in_progress"))
            yield event("response.function_call_arguments.delta", **where, delta=piece.arguments)
            yield event("response.function_call_arguments.done", **where, name=piece.name, arguments=piece.arguments)
            yield event("response.output_item.done", output_index=index, item=done_call)
            calls += 1
        if isinstance(found[1], Ended):
            done = whole(head, name, answers)
            for done_event in thought_done() if thinks else ():
                yield done_event
            if begun:
                yield event("response.output_text.done", **at, text=one.text, logprobs=[])
                yield event("response.content_part.done", **at, part=part(one.text))
                done_item = item(name, one.text, done["status"])
                yield event("response.output_item.done", output_index=thought, item=done_item)
            yield event(f"response.{done['status']}", response=done)
