"""Anthropic's dialect: /v1/messages and /v1/messages/count_tokens."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from edgespec.errors import shown
from edgespec.loop.grammar import Grammar
from edgespec.scheduler.events import Ended, Event
from edgespec.server.answers import Answer, Answers, Parts
from edgespec.server.content import result_of, text_of
from edgespec.server.conversation import MOST_TURNS, Conversation, Piece, Question, Thought, Turn
from edgespec.server.dialects.dialect import Dialect, Writer
from edgespec.server.dialects.openai import Extra, schema_grammar, thinking_options
from edgespec.server.errors import Refused, refuse_if
from edgespec.server.models import Models
from edgespec.server.service import Service
from edgespec.server.tool_calls import CLOSED, Call, Tools, choose_tools, replayed
from edgespec.server.wire import (
    Listed,
    Named,
    SamplingFields,
    ServerSent,
    TemplateFields,
    new_id,
    parsed_body,
)

# Claude Code puts this line first and changes it with every request, so that no prefix would match.
BILLING = "x-anthropic-billing-header:"
FAILED = "Error: "  # before the result of a tool that failed: templates have no field for it
CALLS = ("tool_use", "server_tool_use", "mcp_tool_use")


def own_tool(description: str, required: Sequence[str], **properties: Any) -> dict[str, Any]:
    known = {name: {"type": kind} if isinstance(kind, str) else kind for name, kind in properties.items()}
    schema = {"type": "object", "properties": known, "required": required}
    return {"description": description, "parameters": schema | CLOSED}


VIEW = {"type": "array", "items": {"type": "integer"}, "description": "first and last line"}
FILES = {"path": "string", "file_text": "string", "old_str": "string", "new_str": "string", "insert_line": "integer"}
EDITS = {"enum": ["view", "create", "str_replace", "insert"]}
FILE_CHANGES = {"enum": [*EDITS["enum"], "delete", "rename"]}
# Tools that the client runs, and whose schemas Anthropic's models know, by the beginning of their type.
OWN_TOOLS = {
    "bash_": own_tool("Run a command in a bash shell.", (), command="string", restart="boolean"),
    "text_editor_": own_tool(
        "View, create and edit files.", ("command", "path"), command=EDITS, view_range=VIEW, insert_text="string",
        **FILES,
    ),
    "memory_": own_tool(
        "View and change the files of a memory that lasts, below /memories.", ("command",), command=FILE_CHANGES,
        view_range=VIEW, insert_text="string", old_path="string", new_path="string", **FILES,
    ),
}  # fmt: skip


class CountBody(SamplingFields, TemplateFields, Named):
    instead: ClassVar = (
        SamplingFields.instead
        | dict.fromkeys(("grammar", "guided_grammar", "ebnf"), "edgespec.lark of /v1/chat/completions")
        | dict.fromkeys(("json_schema", "guided_json", "structured_outputs", "response_format"), "output_config.format")
        | {"stop": "stop_sequences"}
    )

    messages: Listed[dict[str, Any]] = Field(max_length=MOST_TURNS)
    system: str | Listed[dict[str, Any]] | None = None
    tools: list[Any] | None = None
    tool_choice: dict[str, Any] | None = None
    mcp_servers: list[Any] | None = None
    thinking: dict[str, Any] | None = None


class MessagesBody(CountBody):
    max_tokens: int
    stop_sequences: Listed[str] | None = None
    stream: bool = False
    output_config: dict[str, Any] | None = None
    output_format: Any = None  # its older place
    edgespec: Extra = Field(default_factory=Extra)


async def count_tokens(http: HttpRequest) -> Response:
    models: Models = http.app.state.models

    def parse(data: bytearray) -> tuple[str, Conversation]:
        body = parsed_body(data, CountBody)
        return body.model, conversation_of(body)

    (name, conversation), size = await models.read(http, parse)
    async with models.service(name) as service:
        with service.admitted():
            form = service.format_of(conversation)
            tokens = len(await models.readers.read(size, partial(form.prompt_ids, conversation)))
    return JSONResponse({"input_tokens": tokens})


def question_of(body: MessagesBody) -> Question:
    body.edgespec.check()
    stop = body.stop_sequences or ()
    return Question(
        body.sampling, conversation_of(body), max_tokens=body.max_tokens, stop=stop, grammar=grammar_of(body)
    )


def grammar_of(body: MessagesBody) -> Grammar | None:
    """Raises Refused or UsageError."""
    where, form = "output_config.format", (body.output_config or {}).get("format")
    if form is None:
        where, form = "output_format", body.output_format
    if form is None:
        return None
    if not isinstance(form, dict) or form.get("type") != "json_schema":
        raise Refused(400, f"{where} is {shown(form)}, but must be an object of type 'json_schema'", param=where)
    return schema_grammar(form, where)


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
        role = str(message.get("role"))
        refuse_if(
            role not in ("user", "assistant", "system"),
            f"messages.{i}.role is {shown(message.get('role'))}, but must be user or assistant",
            "messages",
        )
        asked = role == "user" and i == len(body.messages) - 1 and not (turns and turns[-1].role == "tool")
        turns += turns_of(role, message.get("content"), f"messages.{i}.content", asked=asked)
    refuse_if(not body.messages, "messages is empty: give at least one", "messages")
    refuse_if(
        turns[-1].role == "assistant" and turns[-1].text[-1:].isspace(),
        "the assistant's last message ends with white space: remove it, and the answer continues the rest",
        "messages",
    )
    return Conversation(turns, tools_of(body), thinking_options(body.thinking) | body.variables)


def turns_of(role: str, content: Any, where: str, *, asked: bool) -> list[Turn]:
    """The turns of one message; raises Refused.

    Each result of a tool is a turn. The user's come before his text; the provider's follow the calls to its own tools.
    """
    if not isinstance(content, list):
        return [Turn(role, text_of(content, where, asked=asked))]
    kinds = [one.get("type") if isinstance(one, dict) else None for one in content]
    asked = asked and "tool_result" not in kinds
    found, texts, thoughts, calls = list[Turn](), list[Any](), list[str](), list[Call]()
    for kind, one in zip(kinds, content, strict=True):
        if kind in CALLS:
            refuse_if(role != "assistant", f"{where}: a {kind} is in a turn of the {role}", "messages")
            calls.append(replayed(one.get("name"), one.get("input"), one.get("id"), where))
        elif kind == "thinking":
            thoughts.append(str(one.get("thinking") or ""))
        elif isinstance(kind, str) and kind.endswith("tool_result"):
            if calls:
                found.append(Turn(role, text_of(texts, where), "".join(thoughts) or None, calls))
                texts, thoughts, calls = [], [], []
            result = FAILED * bool(one.get("is_error")) + result_of(one.get("content"), where)
            found.append(Turn("tool", result, result_of=one.get("tool_use_id")))
        else:
            texts.append(one)
    if texts or thoughts or calls or not found:
        found.append(Turn(role, text_of(texts, where, asked=asked), "".join(thoughts) or None, calls))
    return found


def functions_of(body: CountBody) -> list[dict[str, Any]]:
    """The tools that the client runs; raises Refused."""
    found = list[dict[str, Any]]()
    refuse_if(body.mcp_servers, "mcp_servers: this server calls no others: leave them out", "mcp_servers")
    for i, tool in enumerate(body.tools or ()):
        kind = (tool.get("type") or "custom") if isinstance(tool, dict) else type(tool).__name__
        if isinstance(tool, dict) and (kind == "custom" or "input_schema" in tool):
            found.append(
                {
                    "name": tool.get("name"),
                    "description": tool.get("description"),
                    "parameters": tool.get("input_schema"),
                }
                | ({"strict": tool["strict"]} if "strict" in tool else {})
            )
        elif own := next((OWN_TOOLS[name] for name in OWN_TOOLS if str(kind).startswith(name)), None):
            found.append({"name": tool.get("name"), **own})
        elif not str(kind).startswith("tool_search_tool"):  # there is nothing to find: the model is shown every tool
            says = f"tools.{i}: {kind!r} is run by Anthropic, or by a model that sees images: leave it out"
            raise Refused(400, says, param="tools")
    return found


def tools_of(body: CountBody) -> Tools | None:
    """Raises Refused."""
    choice = body.tool_choice or {}
    kind, name, parallel = choice.get("type"), choice.get("name"), not choice.get("disable_parallel_tool_use")
    refuse_if(kind == "tool" and name is None, "tool_choice: type tool needs a name", "tool_choice")
    wanted = {"type": "function", "name": name} if kind == "tool" else "required" if kind == "any" else str(kind or "")
    return choose_tools(functions_of(body), wanted, parallel=parallel)


def error_body(refused: Refused) -> dict[str, Any]:
    return {"type": "error", "error": {"type": refused.kind, "message": refused.message}}


def block(piece: Piece) -> dict[str, Any]:
    if isinstance(piece, Thought):
        return {"type": "thinking", "thinking": piece.text, "signature": ""}
    if isinstance(piece, str):
        return {"type": "text", "text": piece}
    return {"type": "tool_use", "id": piece.id, "name": piece.name, "input": json.loads(piece.arguments)}


def emptied(piece: Piece) -> Piece:
    if isinstance(piece, Call):
        return replace(piece, arguments="{}")
    return "" if isinstance(piece, str) else Thought("")


def usage(answer: Answer) -> dict[str, int]:
    """Anthropic's counts: `input_tokens` has no cached tokens."""
    stats = answer.stats
    return {
        "input_tokens": len(answer.request.prompt_ids) - stats.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": stats.cached_tokens,
        "output_tokens": stats.tokens,
    }


def ending(answer: Answer, max_tokens: int) -> dict[str, str | None]:
    if answer.stop_found is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": answer.stop_found}
    reason = "tool_use" if answer.calls else "end_turn"
    if answer.is_cut:
        reason = "max_tokens" if answer.stats.tokens == max_tokens else "model_context_window_exceeded"
    return {"stop_reason": reason, "stop_sequence": None}


class MessagesWriter(Writer):
    def __init__(self, body: MessagesBody, name: str) -> None:
        super().__init__(body, name)
        self._head: dict[str, Any] = {
            "id": new_id("msg_"), "type": "message", "role": "assistant", "model": self._model,
        }  # fmt: skip
        self._most, self._parts, self._begun = body.max_tokens, Parts(), False

    def start(self, service: Service, answers: Answers) -> None:
        super().start(service, answers)
        (self._answer,) = answers.all
        self._head |= {"edgespec": {"approximate": service.model.approximate}} if service.model.approximate else {}

    def whole(self) -> dict[str, Any]:
        content, told = list(map(block, self._answer.pieces)), {"edgespec": self._answers.account}
        ended = ending(self._answer, self._most)
        return {**self._head, "content": content, **ended, "usage": usage(self._answer), **told}

    def after(self, number: int, event: Event) -> Iterator[ServerSent]:
        yield from self._begin()
        for stage, index, piece in self._parts.after(self._answer):
            if stage == "begin":
                yield named("content_block_start", index=index, content_block=block(emptied(piece)))
            elif stage == "delta":
                yield named("content_block_delta", index=index, delta=delta(piece))
            else:
                yield named("content_block_stop", index=index)
        if isinstance(event, Ended):
            yield named("message_delta", delta=ending(self._answer, self._most), usage=usage(self._answer))
            yield named("message_stop")

    def silent(self) -> Iterator[ServerSent]:
        yield from self._begin() if self._all else ()
        yield named("ping")

    def error(self, refused: Refused) -> Iterator[ServerSent]:
        yield "error", error_body(refused)

    def _begin(self) -> Iterator[ServerSent]:
        """Only now is it known how many tokens are cached."""
        if not self._begun:
            empty: dict[str, Any] = {**self._head, "content": [], "stop_reason": None, "stop_sequence": None}
            yield named("message_start", message={**empty, "usage": usage(self._answer)})
        self._begun = True


def named(kind: str, **fields: Any) -> ServerSent:
    return kind, {"type": kind, **fields}


def delta(piece: Piece) -> dict[str, str]:
    if isinstance(piece, Thought):
        return {"type": "thinking_delta", "thinking": piece.text}
    if isinstance(piece, str):
        return {"type": "text_delta", "text": piece}
    return {"type": "input_json_delta", "partial_json": piece.arguments}


MESSAGES = Dialect(MessagesBody, question_of, MessagesWriter)
