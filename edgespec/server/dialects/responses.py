"""OpenAI's newer dialect: /v1/responses."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial
from itertools import count
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import MaxLen
from pydantic import PrivateAttr
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from edgespec.errors import shown
from edgespec.loop.grammar import json_text
from edgespec.scheduler.events import Ended, Event
from edgespec.server.access import SENDER
from edgespec.server.answers import Answers, Parts
from edgespec.server.content import result_of, text_of
from edgespec.server.conversation import MOST_TURNS, Conversation, Question, Thought, Turn, role_of
from edgespec.server.dialects.dialect import Dialect, Writer
from edgespec.server.dialects.items import OWN_TOOLS, SKIPPED, Offered, call_item, call_of, offered_by_all, result_in
from edgespec.server.dialects.openai import OpenAIBody, error_body, template_options, usage
from edgespec.server.errors import Refused, refuse_if
from edgespec.server.service import Service
from edgespec.server.stored import Stored, StoredResponses
from edgespec.server.tool_calls import Call, choose_tools
from edgespec.server.wire import MOST_BODY, TOKENS, Listed, ServerSent, TemplateFields, json_of, new_id, parsed

MOST_ECHO = 2**22  # characters of what answers repeat
ROLES = ("system", "developer", "user", "assistant")
NOTHING: dict[str, Any] = {"output": [], "incomplete_details": None, "usage": None}  # of a response without an answer
IN_PROGRESS = NOTHING | {"status": "in_progress"}


class ResponsesBody(OpenAIBody, TemplateFields):
    instead: ClassVar = (
        OpenAIBody.instead | {"response_format": "text.format"} | dict.fromkeys(TOKENS, "max_output_tokens")
    )

    input: str | Annotated[Listed[dict[str, Any]], MaxLen(MOST_TURNS)]
    instructions: str | None = None
    max_output_tokens: int | None = None
    max_tokens: int | None = None  # older interfaces'
    tools: Listed[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool = True
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    metadata: dict[str, Any] | None = None
    top_logprobs: int | None = None
    include: list[Any] | None = None
    store: bool = True
    _before: Stored | None = PrivateAttr(None)  # the previous response
    _others: list[Stored] = PrivateAttr(default_factory=list)  # which have the items that the input refers to

    @property
    def own_items(self) -> list[dict[str, Any]]:
        return [{"role": "user", "content": self.input}] if isinstance(self.input, str) else self.input

    @cached_property
    def items(self) -> list[dict[str, Any]]:
        """The conversation, with what the input refers to."""
        known = {id_of(item): item for one in self._others for item in one.items()}
        before, names = self._before.items() if self._before else [], map(reference, self.own_items)
        return before + [one if name is None else known[name] for one, name in zip(self.own_items, names, strict=True)]

    @cached_property
    def kept(self) -> bytes | None:
        """JSON of `items`, to store; None: they are not stored, as the client wants or because they are too long."""
        with suppress(ValueError):
            return json_text(self.items, MOST_BODY, ValueError()).encode() if self.store else None
        return None

    @cached_property
    def offered(self) -> dict[str, Offered]:
        """The tools that the client runs; raises Refused."""
        return offered_by_all(self.tools, self.items)

    @cached_property
    def echo(self) -> str:
        """The fields that each answer repeats, in JSON. Raises Refused if they are too long."""
        found = {
            "instructions": self.instructions,
            "text": {"format": (self.text or {}).get("format") or {"type": "text"}},
            "tool_choice": self.tool_choice or "auto", "tools": self.tools or [],
            "metadata": self.metadata or {}, "reasoning": self.reasoning,
        }  # fmt: skip
        says = f"{', '.join(found)}: they have more than {MOST_ECHO} characters in all, which answers would repeat"
        return json_text(found, MOST_ECHO, Refused(413, says))


def reference(item: dict[str, Any]) -> str | None:
    """The id of the item for which this one stands, if it stands for another."""
    return id_of(item) if item.get("type") == "item_reference" or item.keys() == {"id"} else None


def id_of(item: dict[str, Any]) -> str:
    """ "": it has none."""
    name = item.get("id")
    return name if isinstance(name, str) else ""


def recall(stored: StoredResponses, body: ResponsesBody, sender: str) -> int:
    """Look up what a body refers to; returns its bytes. Raises Refused: it is not there, or another sender's."""
    if name := body.previous_response_id:
        body._before = stored.find(sender, name)
        if not body._before:
            says, code = f"Previous response with id {name!r} not found.", "previous_response_not_found"
            raise Refused(400, says, code, "previous_response_id")
    for item in map(reference, body.own_items):
        if item is None or any(item in one.ids for one in body._others):
            continue
        found = stored.with_item(sender, item)
        if not found:
            says = f"Item with id {item!r} not found. Items are not persisted when `store` is set to false."
            says += " Try again with `store` set to true, or remove this item from your input."
            raise Refused(404, says, param="input")
        body._others.append(found)
    return sum(one.size for one in (*filter(None, [body._before]), *body._others))


def question_of(body: ResponsesBody) -> Question:
    refuse_if(
        body.conversation, "conversations are not stored here: give previous_response_id, or all of it as input",
        "conversation",
    )  # fmt: skip
    refuse_if(
        body.top_logprobs or "message.output_text.logprobs" in (body.include or ()),
        "log-probabilities are not for this interface; /v1/chat/completions takes logprobs",
    )
    body.edgespec.check("regex", "lark")
    form = (body.text or {}).get("format")
    if form is not None and not isinstance(form, dict):
        raise Refused(400, f"text.format is {shown(form)}, but must be an object with a type", param="text.format")
    body.echo, body.kept  # noqa: B018 (they are made here, not in the server's loop)
    options = template_options((body.reasoning or {}).get("effort")) | body.variables
    most = body.max_tokens if body.max_output_tokens is None else body.max_output_tokens
    functions, parallel = [tool.function for tool in body.offered.values()], body.parallel_tool_calls
    tools = choose_tools(functions, body.tool_choice, parallel=parallel, own=OWN_TOOLS)
    return Question(
        body.sampling, Conversation(turns_of(body), tools, options), max_tokens=most,
        grammar=body.grammar(form, "text.format"),
    )  # fmt: skip


def turns_of(body: ResponsesBody) -> list[Turn]:
    """One turn for neighbouring items of the assistant; raises Refused."""
    items, earlier = body.items, len(body.items) - len(body.own_items)
    found = [Turn("system", body.instructions)] if body.instructions else []
    thought, calls = "", list[Call]()  # calls: of the last turn
    texts = defaultdict[int, list[str]](list)  # behind calls, by the turn's number
    for i, item in enumerate(items):
        kind, where = item.get("type") or "message", f"input.{i - earlier}"
        if kind == "reasoning":
            parts = item.get("content") or item.get("summary") or ()
            refuse_if(
                not isinstance(parts, list | tuple), f"{where}.content is {shown(parts)}, but must be a list", "input"
            )
            thought = "".join(str(part.get("text", "")) for part in parts if isinstance(part, dict))
        elif kind == "message":
            turn = message_of(item, where, asked=i == len(items) - 1 and not (found and found[-1].role == "tool"))
            is_answer = turn.role == "assistant"
            if is_answer and found and found[-1].calls and not thought:  # a text behind calls, before their results
                texts[len(found) - 1].append(turn.text)
            else:
                found.append(replace(turn, thought=thought) if is_answer and thought else turn)
            thought = "" if is_answer else thought
        elif call := call_of(item, where):
            if not (found and found[-1].role == "assistant" and not thought):
                found.append(Turn("assistant", thought=thought or None))
            if not found[-1].calls:
                calls = []
                found[-1] = replace(found[-1], calls=calls)
            calls.append(call)
            thought = ""
        elif kind not in SKIPPED and result_in(item) is None:
            raise Refused(400, f"{where}: items of type {shown(kind)} cannot be read here", param="input")
        if (result := result_in(item)) is not None:
            found.append(Turn("tool", result_of(result, where), result_of=item.get("call_id") or item.get("id")))
    for at, more in texts.items():
        found[at] = replace(found[at], text=found[at].text + "".join(more))
    refuse_if(not found, "input is empty: give at least one item", "input")
    return found


def message_of(item: dict[str, Any], where: str, *, asked: bool) -> Turn:
    """Raises Refused."""
    role = role_of(item.get("role"), ROLES, where, "input")
    refuse_if(item.get("tool_calls"), f"{where}.tool_calls: calls are items of their own here", "input")
    return Turn(role, text_of(item.get("content"), f"{where}.content", asked=asked and role == "user"))


def text_item(name: str, text: str, status: str) -> dict[str, Any]:
    content = [part(text)] if status != "in_progress" else []
    return {"type": "message", "id": name, "status": status, "role": "assistant", "content": content}


def thought_item(name: str, text: str, status: str = "completed") -> dict[str, Any]:
    content = [{"type": "reasoning_text", "text": text}] if status == "completed" else []
    return {"type": "reasoning", "id": thought_id(name), "summary": [], "content": content, "status": status}


def thought_id(name: str) -> str:
    return f"rs_{name.removeprefix('msg_')}"


def part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


class ResponsesWriter(Writer):
    def __init__(self, body: ResponsesBody, name: str) -> None:
        super().__init__(body, name)
        self._name = new_id("msg_")
        # What a response has from its beginning, besides its echo.
        self._head: dict[str, Any] = {
            "id": new_id("resp_"),
            "object": "response",
            "created_at": int(time.time()),
            "model": self._model,
            "max_output_tokens": body.max_output_tokens,
            "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": body.previous_response_id,
            "store": body.store,
            "truncation": "disabled",
            "error": None,
        }
        self._begun, self._parts, self._numbers = False, Parts(), count()
        self._thought: Literal["none", "open", "done"] = "none"
        self._text: dict[str, Any] | None = None  # where its deltas go; it stays open to the end
        self._calls = 0
        self._cut: dict[int, dict[str, Any]] = {}  # calls that have begun and proved to be none, by their place

    def start(self, service: Service, answers: Answers) -> None:
        super().start(service, answers)
        (self._answer,) = answers.all
        sampling = self._answer.request.sampling
        self._head |= {"temperature": sampling.temperature, "top_p": sampling.top_p}

    def whole(self) -> str:
        return self._store(self._response())

    def _store(self, response: dict[str, Any]) -> str:
        """Its JSON."""
        text, body = self._with_echo(response), self._body
        if body.kept is not None:
            ids = frozenset(map(id_of, (*body.items, *response["output"]))) - {""}
            stored = Stored(text.encode(), body.kept, ids)
            self._service.stored.add(self._answer.request.sender, response["id"], stored)
        return text

    def _with_echo(self, response: dict[str, Any]) -> str:
        return f"{json_of(response)[:-1]},{self._body.echo[1:]}"

    def _with_response(self, kind: str, text: str) -> ServerSent:
        name, fields = self._named(kind)
        return name, f'{json_of(fields)[:-1]},"response":{text}}}'

    def _response(self) -> dict[str, Any]:
        one, name, counts = self._answer, self._name, usage(self._answers, "input", "output")
        cut = one.is_cut
        status = "incomplete" if cut else "completed"
        more = {"incomplete_details": {"reason": "max_output_tokens"} if cut else None, "usage": counts}
        told = {"edgespec": self._answers.account, **({} if cut else {"completed_at": int(time.time())})}
        output = [self._call_item(call) for call in one.calls]
        if one.text or not one.calls:
            first = next((i for i, piece in enumerate(one.pieces) if isinstance(piece, str)), 0)
            before = sum(isinstance(piece, Call) for piece in one.pieces[:first])
            output.insert(before, text_item(name, one.text, status))
        if one.thought:  # in a stream, items keep the places that their events named
            unheard = bool(self._text or self._calls) and not self._thoughts
            output.insert(len(output) if unheard else 0, thought_item(name, one.thought))
        for index, item in self._cut.items():
            output.insert(index, item)
        return {**self._head, "status": status, "output": output, **more, **told}

    def begin(self) -> Iterator[ServerSent]:
        if not self._begun:
            self._begun = True
            yield self._with_response("created", self._with_echo(self._head | IN_PROGRESS))
            yield from self.silent()

    def silent(self) -> Iterator[ServerSent]:
        if not self._begun:
            yield from self.begin()
        else:
            yield self._with_response("in_progress", self._with_echo(self._head | IN_PROGRESS))

    def after(self, number: int, event: Event) -> Iterator[ServerSent]:
        for stage, _, piece in self._parts.after(self._answer):
            if isinstance(piece, Thought):
                yield from self._of_thought(stage, piece)
            elif isinstance(piece, str):
                yield from self._of_text(stage, piece)
            else:
                yield from self._of_call(stage, piece)
        if isinstance(event, Ended):
            done = self._response()
            whole = self._store(done)
            if self._text:
                text, index = self._answer.text, self._text["output_index"]
                yield self._named("output_text.done", **self._text, text=text, logprobs=[])
                yield self._named("content_part.done", **self._text, part=part(text))
                yield self._item("done", index, text_item(self._name, text, done["status"]))
            yield self._with_response(done["status"], whole)

    def error(self, refused: Refused) -> Iterator[ServerSent]:
        """openai-python raises what the member `error` of the first event has; Codex reads only the second."""
        yield from self.begin()
        about = {"code": refused.code, "message": refused.message, "param": refused.param}
        yield "error", {"type": "error", **about, "sequence_number": next(self._numbers), **error_body(refused)}
        code = refused.code or ("server_error" if refused.status >= 500 else "invalid_prompt")
        error = {"code": code, "message": refused.message}
        failed = self._head | NOTHING | {"status": "failed", "error": error}
        yield self._with_response("failed", self._with_echo(failed))

    def _of_thought(self, stage: str, piece: Thought) -> Iterator[ServerSent]:
        """All thoughts are one item, which ends with the first of them.

        Later thoughts, and all of them where another item came first, are only in the last event.
        """
        place = {"item_id": thought_id(self._name), "output_index": 0, "content_index": 0}
        if stage == "delta" and self._thought == "open":
            yield self._named("reasoning_text.delta", **place, delta=piece.text)
        elif stage == "begin" and self._thought == "none" and not (self._text or self._calls):
            self._thought = "open"
            yield self._item("added", 0, thought_item(self._name, "", "in_progress"))
        elif stage == "end" and self._thought == "open":
            self._thought, text = "done", self._answer.thought
            yield self._named("reasoning_text.done", **place, text=text)
            yield self._item("done", 0, thought_item(self._name, text))

    def _of_text(self, stage: str, piece: str) -> Iterator[ServerSent]:
        """All texts are one item, in the place of the first."""
        if stage == "begin" and not self._text:
            index = self._thoughts + self._calls
            self._text = {"item_id": self._name, "output_index": index, "content_index": 0}
            yield self._item("added", index, text_item(self._name, "", "in_progress"))
            yield self._named("content_part.added", **self._text, part=part(""))
        elif stage == "delta" and self._text:
            yield self._named("output_text.delta", **self._text, delta=piece, logprobs=[])

    def _of_call(self, stage: str, call: Call) -> Iterator[ServerSent]:
        index, begun = self._thoughts + bool(self._text) + self._calls, self._call_item(call, "in_progress")
        where = {"output_index": index, "item_id": begun["id"]}
        if stage == "begin":
            yield self._item("added", index, begun)
        elif stage == "delta" and begun["type"] == "function_call":
            yield self._named("function_call_arguments.delta", **where, delta=call.arguments)
        elif stage == "cut":
            self._cut[index] = self._call_item(call, "incomplete")
            self._calls += 1
        elif stage == "end":
            self._calls += 1
            done = self._call_item(call)
            if done["type"] == "function_call":
                told = {"name": done["name"], "arguments": call.arguments}
                yield self._named("function_call_arguments.done", **where, **told)
            elif done["type"] == "custom_tool_call":
                yield self._named("custom_tool_call_input.delta", **where, delta=done["input"])
                yield self._named("custom_tool_call_input.done", **where, input=done["input"])
            yield self._item("done", index, done)

    def _call_item(self, call: Call, status: str = "completed") -> dict[str, Any]:
        return call_item(call, self._body.offered.get(call.name), status)

    @property
    def _thoughts(self) -> int:
        return int(self._thought != "none")

    def _item(self, stage: str, index: int, item: dict[str, Any]) -> ServerSent:
        return self._named(f"output_item.{stage}", output_index=index, item=item)

    def _named(self, kind: str, **fields: Any) -> ServerSent:
        name = f"response.{kind}"
        return name, {"type": name, "sequence_number": next(self._numbers), **fields}


# Codex takes a status 400 for a mistake of its own, and does not shorten the conversation.
RESPONSES = Dialect(ResponsesBody, question_of, ResponsesWriter, recall=recall, streams_too_long=True)


async def stored_response(http: HttpRequest) -> Response:
    """GET and DELETE."""
    found = _stored(http)
    if http.method == "GET":
        return Response(found.response, media_type="application/json")
    sender, name = http.scope[SENDER], http.path_params["name"]
    http.app.state.models.stored.remove(sender, name)
    return JSONResponse({"id": name, "object": "response", "deleted": True})


async def stored_items(http: HttpRequest) -> Response:
    """A page of the conversation before a response, the last item first."""
    found, asked, name = _stored(http), http.query_params, http.path_params["name"]
    items = [
        {"id": f"{name}_{i}", "type": "message"} | item
        for i, item in enumerate(await http.app.state.models.readers.read(found.size, partial(parsed, found.before)))
    ]
    items = items if asked.get("order") == "asc" else items[::-1]
    first = next((i + 1 for i, item in enumerate(items) if item["id"] == asked.get("after")), 0)
    limit = asked.get("limit", "20")
    refuse_if(not limit.isdecimal() or not 1 <= int(limit) <= 100, f"limit is {limit}, but must be from 1 to 100")
    shown = items[first : first + int(limit)]
    ends = {"first_id": shown[0]["id"], "last_id": shown[-1]["id"]} if shown else {"first_id": None, "last_id": None}
    return JSONResponse({"object": "list", "data": shown, "has_more": first + int(limit) < len(items), **ends})


def _stored(http: HttpRequest) -> Stored:
    name = http.path_params["name"]
    found: Stored | None = http.app.state.models.stored.find(http.scope[SENDER], name)
    if not found:
        raise Refused(404, f"Response with id {name!r} not found.")
    return found
