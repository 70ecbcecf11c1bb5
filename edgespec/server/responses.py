"""OpenAI's newer dialect, without memory of earlier answers: /v1/responses."""

import asyncio
import time
from collections.abc import AsyncIterator
from itertools import count
from typing import Any

from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from edgespec.scheduler.requests import Ended, Wrote
from edgespec.server.call_formats import Call, Thought
from edgespec.server.chat import Extra, compiled, conversation, grammar_of, one_form, template_options
from edgespec.server.errors import Refused
from edgespec.server.prompts import prompt_ids
from edgespec.server.texts import (
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
from edgespec.server.tools import Look, Tools, choose_tools


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
    reasoning: dict[str, Any] | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    edgespec: Extra = Field(default_factory=Extra)


def messages_of(body: ResponsesBody) -> list[dict[str, Any]]:
    """The items as chat's messages. Raises Refused for those that cannot be read."""
    items = [{"role": "user", "content": body.input}] if isinstance(body.input, str) else body.input
    found: list[dict[str, Any]] = [{"role": "system", "content": body.instructions}] if body.instructions else []
    thought = ""  # of the answer that follows
    for i, item in enumerate(items):
        kind = item.get("type", "message")
        if kind == "message":
            is_answer = item.get("role") == "assistant"
            found.append({**item, "reasoning_content": thought} if thought and is_answer else item)
            thought = "" if is_answer else thought
        elif kind == "function_call":
            call = {
                "id": item.get("call_id"),
                "function": {"name": item.get("name"), "arguments": item.get("arguments")},
            }
            before = found[-1].get("tool_calls") if found else None
            if isinstance(before, list) and before:  # called at once
                found[-1] = {**found[-1], "tool_calls": [*before, call]}
            else:
                found.append({"role": "assistant", "content": "", "tool_calls": [call], "reasoning_content": thought})
                thought = ""
        elif kind == "function_call_output":
            found.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")})
        elif kind == "reasoning":
            parts = item.get("content") or ()
            if not isinstance(parts, list | tuple):
                raise Refused(400, f"input.{i}.content is {parts!r}, but must be a list", param="input")
            thought = "".join(str(part.get("text", "")) for part in parts if isinstance(part, dict))
        else:
            raise Refused(400, f"input.{i}: items of type {kind!r} cannot be read here", param="input")
    return found


def tools_of(service: Service, body: ResponsesBody) -> Tools | None:
    """The tools that the model may call; the provider's own are passed over. Raises Refused."""
    functions = [
        {name: tool[name] for name in ("name", "description", "parameters") if tool.get(name) is not None}
        for tool in body.tools or ()
        if tool.get("type") == "function"
    ]
    choice = body.tool_choice or "auto"
    name = str(choice.get("name")) if isinstance(choice, dict) else None
    return choose_tools(service.model.target.vocab, functions, "auto" if name else str(choice), name)


async def responses(http: HttpRequest) -> Response:
    """POST /v1/responses."""
    service: Service = http.app.state.service
    body = await read_body(http, ResponsesBody)
    if body.previous_response_id or body.conversation:
        raise Refused(400, "answers are not stored here: send the whole conversation as input")
    tools, form = tools_of(service, body), (body.text or {}).get("format")
    if form is not None and not isinstance(form, dict):
        raise Refused(400, f"text.format is {form!r}, but must be an object with a type", param="text.format")
    wanted = one_form(tools, grammar_of(form, body.edgespec, "text.format"))
    shown, vocab = tools.functions if tools else None, service.model.target.vocab
    more = template_options((body.reasoning or {}).get("effort"))
    ids = await asyncio.to_thread(prompt_ids, vocab, conversation(messages_of(body)), shown, more)
    look = Look(vocab, ids, tools)
    grammar = await compiled(service, look.grammar(wanted))
    sampling = sampling_of(body, service.defaults)
    requests = await requests_for(
        service, [ids], sampling, max_tokens=body.max_output_tokens, stop=None, grammar=grammar, shown=look.shown
    )
    texts, names = Texts(service, requests, look), (new_id("resp_"), new_id("msg_"))
    head = {
        "id": names[0], "object": "response", "created_at": int(time.time()), "model": body.model or service.name,
        "instructions": body.instructions, "max_output_tokens": body.max_output_tokens, "parallel_tool_calls": True,
        "previous_response_id": None, "store": False, "temperature": sampling.temperature, "top_p": sampling.top_p,
        "text": {"format": form or {"type": "text"}}, "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "truncation": "disabled", "metadata": {}, "error": None, "reasoning": body.reasoning,
    }  # fmt: skip
    if body.stream:
        return server_sent(http, _stream(head, names[1], texts))
    return await answer_whole(http, texts, lambda: whole(head, names[1], texts))


def item(name: str, text: str, status: str) -> dict[str, Any]:
    """A message of the answer."""
    content = [part(text)] if status != "in_progress" else []
    return {"type": "message", "id": name, "status": status, "role": "assistant", "content": content}


def call_item(call: Call, status: str = "completed") -> dict[str, Any]:
    """A call of a tool; its arguments come later if it is in progress."""
    arguments = call.arguments if status == "completed" else ""
    name = {"id": f"fc_{call.id.removeprefix('call_')}", "call_id": call.id, "name": call.name}
    return {"type": "function_call", **name, "arguments": arguments, "status": status}


def thought_item(name: str, text: str, status: str = "completed") -> dict[str, Any]:
    """What was thought before the answer; `name` is the message's."""
    content = [{"type": "reasoning_text", "text": text}] if status == "completed" else []
    return {"type": "reasoning", "id": thought_id(name), "summary": [], "content": content, "status": status}


def thought_id(name: str) -> str:
    """Of the thought before a message."""
    return f"rs_{name.removeprefix('msg_')}"


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
        "output_tokens_details": {"reasoning_tokens": one.thought_tokens},
        "total_tokens": prompt + written,
    }
    more = {"incomplete_details": {"reason": "max_output_tokens"} if cut else None, "usage": usage}
    told = {"edgespec": account(texts.answers), **({} if cut else {"completed_at": int(time.time())})}
    output = [thought_item(name, one.thought)] if one.thought else []
    output += [item(name, one.text, status)] if one.text or not one.calls else []
    output += map(call_item, one.calls)
    return {**head, "status": status, "output": output, **more, **told}


async def _stream(head: dict[str, Any], name: str, texts: Texts) -> AsyncIterator[tuple[str | None, Any]]:
    numbers, (one,) = count(), texts.answers

    def event(kind: str, **fields: Any) -> tuple[str, Any]:
        return kind, {"type": kind, "sequence_number": next(numbers), **fields}

    started = {**head, "status": "in_progress", "output": [], "incomplete_details": None, "usage": None}
    at = {"item_id": name, "output_index": 0, "content_index": 0}
    place: dict[str, Any] = {"item_id": thought_id(name), "output_index": 0}
    yield event("response.created", response=started)
    yield event("response.in_progress", response=started)
    thinks, thought, begun, calls = False, 0, False, 0  # what is thought comes first, then the message

    def thought_done() -> list[tuple[str, Any]]:
        whole_thought = thought_item(name, one.thought)
        return [
            event("response.reasoning_text.done", **place, content_index=0, text=one.thought),
            event("response.output_item.done", output_index=0, item=whole_thought),
        ]

    async for found in texts.events():
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
                    continue  # a few words behind a call: they are in the whole
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
            done = whole(head, name, texts)
            for done_event in thought_done() if thinks else ():
                yield done_event
            if begun:
                yield event("response.output_text.done", **at, text=one.text, logprobs=[])
                yield event("response.content_part.done", **at, part=part(one.text))
                done_item = item(name, one.text, done["status"])
                yield event("response.output_item.done", output_index=thought, item=done_item)
            yield event(f"response.{done['status']}", response=done)
