"""OpenAI's dialect of conversations: /v1/chat/completions."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from pydantic import Field

from edgespec.errors import shown
from edgespec.loop.step import LogProbs
from edgespec.scheduler.events import Chunk
from edgespec.server.answers import Answer, Answers, Parts
from edgespec.server.content import result_of, text_of
from edgespec.server.conversation import MOST_TURNS, Conversation, Question, Thought, Turn, role_of
from edgespec.server.dialects.dialect import Dialect
from edgespec.server.dialects.openai import (
    ChoicesBody,
    ChoicesWriter,
    named,
    template_options,
    thinking_options,
)
from edgespec.server.errors import refuse_if
from edgespec.server.service import Service
from edgespec.server.tool_calls import (
    CALLED,
    FREE_TEXT,
    Call,
    Tools,
    choose_tools,
    free_text,
    of_free_text,
    replayed,
)
from edgespec.server.wire import Listed, TemplateFields

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
RESULTS = ("tool", "function")  # function is older, and has no id


class ChatBody(ChoicesBody, TemplateFields):
    messages: Listed[dict[str, Any]] = Field(max_length=MOST_TURNS)
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool = True
    functions: list[Any] | None = None  # older than tools
    function_call: Any = None
    prediction: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    reasoning: dict[str, Any] | None = None  # OpenRouter's
    thinking: dict[str, Any] | None = None  # DeepSeek's, GLM's and Kimi's


def question_of(body: ChatBody) -> Question:
    tools, most = tools_of(body), body.top_logprobs or 0
    refuse_if(most and not body.logprobs, "top_logprobs needs logprobs; set it to true", "top_logprobs")
    limits = (body.max_completion_tokens, body.max_tokens, body.n_predict)
    return body.question(
        most if body.logprobs else None,
        "top_logprobs",
        conversation=Conversation(turns_of(body), tools, options_of(body)),
        max_tokens=next((one for one in limits if one is not None), None),
        prediction=text_of((body.prediction or {}).get("content"), "prediction.content", asked=True),
    )


def options_of(body: ChatBody) -> dict[str, Any]:
    more = body.reasoning or {}
    enabled = {"enable_thinking": more["enabled"]} if isinstance(more.get("enabled"), bool) else {}
    effort = template_options(body.reasoning_effort or more.get("effort"))
    return {**enabled, **effort, **thinking_options(body.thinking), **body.variables}


def turns_of(body: ChatBody) -> list[Turn]:
    refuse_if(not body.messages, "messages is empty: give at least one", "messages")
    return [turn_of(message, i, body.messages) for i, message in enumerate(body.messages)]


def turn_of(message: dict[str, Any], number: int, messages: Sequence[dict[str, Any]]) -> Turn:
    """Raises Refused."""
    where, content = f"messages.{number}", message.get("content")
    role = role_of(message.get("role"), ROLES, where, "messages")
    if role in RESULTS:
        return Turn("tool", result_of(content, f"{where}.content"), result_of=message.get("tool_call_id"))
    asked = role == "user" and number == len(messages) - 1 and messages[number - 1].get("role") not in RESULTS
    thought, refusal = message.get("reasoning_content") or message.get("reasoning"), message.get("refusal")
    return Turn(
        role,
        text_of(content, f"{where}.content", asked=asked) + (refusal if isinstance(refusal, str) else ""),
        thought if isinstance(thought, str) else None,
        list(calls_of(message, f"{where}.tool_calls")),
    )


def calls_of(message: dict[str, Any], where: str) -> Iterator[Call]:
    """Raises Refused."""
    calls = message.get("tool_calls") or []
    if function := message.get("function_call"):  # older than tool_calls
        calls = [{"function": function}]
    for call in calls if isinstance(calls, list) else [calls]:
        kind = next((kind for kind in CALLED if isinstance(call, dict) and isinstance(call.get(kind), dict)), None)
        refuse_if(
            not kind or message.get("role") != "assistant", f"{where} is no list of calls of the assistant", "messages"
        )
        called = call[kind]
        arguments = called.get("arguments") if kind == "function" else {FREE_TEXT: called.get("input")}
        yield replayed(called.get("name"), arguments, call.get("id"), where)


def functions_of(body: ChatBody) -> list[dict[str, Any]]:
    """Raises Refused."""
    found = list[dict[str, Any]]()
    for i, tool in enumerate(body.tools or ()):
        kind = tool.get("type", "function") if isinstance(tool, dict) else None
        refuse_if(
            kind not in CALLED,
            f"tools.{i}: a tool of type {shown(kind)} cannot be had here; there are function and custom",
            "tools",
        )
        given = tool.get(kind) if isinstance(tool.get(kind), dict) else {}
        found.append(given if kind == "function" else of_free_text(given))
    return found


def tools_of(body: ChatBody) -> Tools | None:
    """Raises Refused."""
    refuse_if(
        body.functions and body.function_call != "none", "functions are not read here: give them as tools", "functions"
    )
    functions, parallel = functions_of(body), body.parallel_tool_calls
    return choose_tools(functions, body.tool_choice, parallel=parallel, nested=True)


class ChatWriter(ChoicesWriter):
    prefix, kind, chunk_kind = "chatcmpl-", "chat.completion", "chat.completion.chunk"
    first: ClassVar = {"delta": {"role": "assistant", "content": ""}, "logprobs": None}
    empty: ClassVar = {"delta": {"content": ""}, "logprobs": None}
    last: ClassVar = {"delta": {}, "logprobs": None}

    def start(self, service: Service, answers: Answers) -> None:
        super().start(service, answers)
        # Parts of each answer, and the numbers of calls by those of their parts.
        self._parts = {id(answer): (Parts(), dict[int, int]()) for answer in answers.all}
        self._free = [tool["custom"]["name"] for tool in self._body.tools or () if tool.get("type") == "custom"]

    def choice(self, answer: Answer) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
        if answer.calls:
            message |= {"content": answer.text or None, "tool_calls": list(map(self._call, answer.calls))}
        if answer.thought:
            message["reasoning_content"] = answer.thought
        return {"message": message, "logprobs": self._log_probs(answer.chunks)}

    def delta(self, answer: Answer, chunks: Sequence[Chunk]) -> dict[str, Any]:
        delta: dict[str, Any] = {"content": "".join(piece for piece in answer.new if isinstance(piece, str))}
        if thought := "".join(piece.text for piece in answer.new if isinstance(piece, Thought)):
            delta["reasoning_content"] = thought
        calls, (parts, numbers) = dict[int, dict[str, Any]](), self._parts[id(answer)]
        for stage, number, piece in parts.after(answer):
            if isinstance(piece, Call):
                index = numbers.setdefault(number, len(numbers))
                if piece.name in self._free:
                    calls |= {index: {"index": index, **self._call(piece)}} if stage == "end" else {}
                elif stage == "begin":
                    calls[index] = {"index": index, **self._call(replace(piece, arguments=""))}
                elif stage == "delta":
                    call = calls.setdefault(index, {"index": index, "function": {"arguments": ""}})
                    call["function"]["arguments"] += piece.arguments
        if calls:
            delta["tool_calls"] = list(calls.values())
        return {"delta": delta, "logprobs": self._log_probs(chunks)}

    def _call(self, call: Call) -> dict[str, Any]:
        if call.name in self._free:
            return {"id": call.id, "type": "custom", "custom": {"name": call.name, "input": free_text(call)}}
        return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}

    def _log_probs(self, chunks: Sequence[Chunk]) -> dict[str, Any] | None:
        if not chunks or chunks[0].log_probs is None:
            return None
        content = [self._token(c.token_id, c.log_probs) for c in chunks if c.token_id is not None and c.log_probs]
        return {"content": content, "refusal": None}

    def _token(self, token: int, told: LogProbs) -> dict[str, Any]:
        best = [self._named(other, value) for other, value in told.best]
        return self._named(token, told.log_prob) | {"top_logprobs": best}

    def _named(self, token: int, log_prob: float) -> dict[str, Any]:
        return {"token": named(self._vocab, token), "logprob": log_prob, "bytes": list(self._vocab.token_bytes(token))}


CHAT = Dialect(ChatBody, question_of, ChatWriter)
