"""OpenAI's older dialect: /v1/chat/completions and /v1/completions."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from edgespec.loop.backend import Vocab
from edgespec.loop.generate import LogProbs
from edgespec.loop.grammar import Compiled, Grammar, json_object, json_schema, lark, regex
from edgespec.loop.text import Message
from edgespec.scheduler.requests import Chunk, Ended, Request, Wrote
from edgespec.server.call_formats import Call, Thought
from edgespec.server.errors import Refused
from edgespec.server.prompts import prompt_ids
from edgespec.server.texts import (
    Answer,
    Lenient,
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
    usage_of,
)
from edgespec.server.tools import Look, Tools, choose_tools, replayed

ROLES = ("system", "developer", "user", "assistant", "tool")
MOST_LOG_PROBS = 20


class StreamOptions(Lenient):
    """What a stream also tells."""

    include_usage: bool = False


class Extra(Lenient):
    """Our own fields."""

    trace: str | None = None  # "passes": chunks tell what each pass has guessed and kept
    plain: bool = False  # guess nothing
    speculate_tools: bool = False  # tell of calls as soon as the draft believes in them
    regex: str | None = None  # that the text must match
    lark: str | None = None  # a grammar that it must follow


class Common(SamplingFields):
    """What chat and completions have in common."""

    model: str = ""
    stop: str | list[str] | None = None
    n: int = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    edgespec: Extra = Field(default_factory=Extra)


class ChatBody(Common):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    response_format: dict[str, Any] | None = None
    prediction: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None


class CompletionBody(Common):
    """POST /v1/completions."""

    prompt: str | list[str] | list[int] | list[list[int]]
    max_tokens: int | None = 16  # OpenAI's default
    logprobs: int | None = None
    echo: bool = False
    suffix: str | None = None
    best_of: int | None = None


def plain_text(content: Any, where: str) -> str:
    """The text of a message's content: a string, null, or a list of text parts. Raises Refused for anything else."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    parts = list[str]()
    for part in content if isinstance(content, list) else [content]:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("text", "input_text", "output_text", "refusal"):
            raise Refused(400, f"{where}: only text can be read here, not {kind or type(part).__name__!r}", param=where)
        text = part.get("text", part.get("refusal"))
        if not isinstance(text, str):
            raise Refused(400, f"{where}: a text part has no text", param=where)
        parts.append(text)
    return "".join(parts)


def conversation(messages: Sequence[dict[str, Any]]) -> list[Message]:
    """Messages as chat templates want them. Raises Refused."""
    found = list[Message]()
    for i, message in enumerate(messages):
        role = message.get("role")
        if role not in ROLES:
            raise Refused(
                400, f"messages.{i}.role is {role!r}, but must be one of {', '.join(ROLES)}", param="messages"
            )
        role = "system" if role == "developer" else role
        turn: dict[str, Any] = {"role": role, "content": plain_text(message.get("content"), f"messages.{i}.content")}
        thought = message.get("reasoning_content") or message.get("reasoning")
        if isinstance(thought, str):
            turn["reasoning_content"] = thought
        if calls := message.get("tool_calls"):
            if not isinstance(calls, list) or not all(
                isinstance(c, dict) and isinstance(c.get("function"), dict) for c in calls
            ):
                raise Refused(400, f"messages.{i}.tool_calls is no list of calls", param="messages")
            turn["tool_calls"] = [
                replayed(c["function"].get("name"), c["function"].get("arguments"), c.get("id")) for c in calls
            ]
        if role == "tool":
            turn["tool_call_id"] = message.get("tool_call_id")
        found.append(turn)
    if not found:
        raise Refused(400, "messages is empty: give at least one", param="messages")
    return found


def tools_of(vocab: Vocab, tools: Sequence[Any] | None, choice: Any) -> Tools | None:
    """The tools of a chat request. Raises Refused, UsageError."""
    given = [tool.get("function") for tool in tools or () if isinstance(tool, dict) and tool.get("type") == "function"]
    functions = [function if isinstance(function, dict) else {} for function in given]
    if isinstance(choice, dict):
        function = choice.get("function")
        if not isinstance(function, dict):
            raise Refused(400, f"tool_choice.function is {function!r}, but must be an object", param="tool_choice")
        return choose_tools(vocab, functions, "auto", str(function.get("name")))
    return choose_tools(vocab, functions, choice or "auto", None)


def one_form(tools: Tools | None, grammar: Grammar | None) -> Grammar | None:
    """The form of an answer: of a call that is required, or the one asked for. Raises Refused for both."""
    if tools and tools.required and grammar:
        raise Refused(400, "response_format and a tool that must be called cannot be had together")
    return tools.required if tools and tools.required else grammar


def grammar_of(form: dict[str, Any] | None, extra: "Extra", where: str = "response_format") -> Grammar | None:
    """What a text must look like. Raises Refused, or UsageError for a schema that is none."""
    kind = (form or {}).get("type", "text")
    if kind == "json_object":
        return json_object()
    if kind == "json_schema":
        assert form is not None
        named = form.get("json_schema", form)  # the newer dialect has it without the inner object
        schema = named.get("schema") if isinstance(named, dict) else None
        if not isinstance(schema, dict):
            raise Refused(400, f"{where}: a schema of type object is missing", param=where)
        return json_schema(schema)
    if kind != "text":
        raise Refused(
            400, f"{where}: there is no type {kind!r}; there are text, json_object and json_schema", param=where
        )
    if extra.regex and extra.lark:
        raise Refused(400, "edgespec: give a regex or a lark grammar, not both", param="edgespec")
    if extra.regex:
        return regex(extra.regex)
    return lark(extra.lark) if extra.lark else None


async def compiled(service: Service, grammar: Grammar | None) -> Compiled | None:
    """The grammar made ready, beside the loop: the first takes half a second. Raises UsageError."""
    return await asyncio.to_thread(service.model.compile, grammar) if grammar else None


async def prompt_of(service: Service, body: ChatBody, tools: Tools | None = None) -> list[int]:
    """Token ids of the conversation. Raises Refused, UsageError."""
    shown = tools.functions if tools else None
    more = template_options(body.reasoning_effort, body.chat_template_kwargs)
    return await asyncio.to_thread(prompt_ids, service.model.target.vocab, conversation(body.messages), shown, more)


async def requests_of(service: Service, body: ChatBody) -> tuple[list[Request], Look]:
    """What is asked of the scheduler, a request a choice, and how the answers are read. Raises Refused, UsageError."""
    vocab = service.model.target.vocab
    tools = tools_of(vocab, body.tools, body.tool_choice)
    form = one_form(tools, grammar_of(body.response_format, body.edgespec))
    most = body.top_logprobs or 0
    if not 0 <= most <= MOST_LOG_PROBS:
        raise Refused(400, f"top_logprobs is {most}, but must be from 0 to {MOST_LOG_PROBS}", param="top_logprobs")
    ids = await prompt_of(service, body, tools)
    look = Look(vocab, ids, tools)
    grammar = await compiled(service, look.grammar(form))
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    requests = await requests_for(
        service, [ids], sampling_of(body, service.defaults), max_tokens=limit, stop=body.stop, choices=body.n,
        log_probs=most if body.logprobs else None, plain=body.edgespec.plain, grammar=grammar,
        prediction=plain_text((body.prediction or {}).get("content"), "prediction.content"),
        shown=look.shown, foresee=body.edgespec.speculate_tools and tools is not None and body.stream,
    )  # fmt: skip
    return requests, look


async def chat(http: HttpRequest) -> Response:
    """POST /v1/chat/completions."""
    service: Service = http.app.state.service
    body = await read_body(http, ChatBody)
    requests, look = await requests_of(service, body)
    shape = ChatShape(service.model.target.vocab)
    return await answer(http, service, body, Texts(service, requests, look), shape)


def template_options(effort: str | None, more: dict[str, Any] | None = None) -> dict[str, Any]:
    """What a chat template is told beside the messages: whether, and how long, to think."""
    known = {"reasoning_effort": effort, "enable_thinking": effort != "none"} if effort else {}
    return {**known, **(more or {})}


async def completions(http: HttpRequest) -> Response:
    """POST /v1/completions."""
    service: Service = http.app.state.service
    body = await read_body(http, CompletionBody)
    if body.echo or body.suffix or (body.best_of or 1) > body.n:
        raise Refused(400, "echo, suffix and best_of are not supported")
    if not 0 <= (body.logprobs or 0) <= MOST_LOG_PROBS:
        raise Refused(400, f"logprobs is {body.logprobs}, but must be from 0 to {MOST_LOG_PROBS}", param="logprobs")
    grammar = await compiled(service, grammar_of(None, body.edgespec))
    vocab = service.model.target.vocab
    given = body.prompt
    prompts = [given] if isinstance(given, str) or (given and isinstance(given[0], int)) else given
    if not 1 <= len(prompts) <= 16:
        raise Refused(400, f"there are {len(prompts)} prompts, but from 1 to 16 may be given at once", param="prompt")
    ids = [await asyncio.to_thread(_encode, vocab, prompt) for prompt in prompts]
    requests = await requests_for(
        service, ids, sampling_of(body, service.defaults), max_tokens=body.max_tokens, stop=body.stop, choices=body.n,
        log_probs=body.logprobs, plain=body.edgespec.plain, grammar=grammar,
    )  # fmt: skip
    return await answer(http, service, body, Texts(service, requests), CompletionShape(vocab))


def _encode(vocab: Vocab, prompt: Any) -> list[int]:
    if isinstance(prompt, str):
        return vocab.encode(prompt, add_bos=True, parse_special=True) if prompt else []
    if any(not 0 <= token < vocab.size for token in prompt):
        raise Refused(400, f"prompt: token ids must be from 0 to {vocab.size - 1}", param="prompt")
    return list(prompt)


def named(vocab: Vocab, token: int) -> str:
    """What a token adds to the text, or its name if that is nothing."""
    return vocab.token_bytes(token).decode("utf-8", "replace") or vocab.token_text(token)


class ChatShape:
    """How chat's answers look."""

    prefix, whole, part = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def __init__(self, vocab: Vocab) -> None:
        self.vocab = vocab

    def choice(self, one: Answer) -> dict[str, Any]:
        """A text that is done."""
        message: dict[str, Any] = {"role": "assistant", "content": one.text, "refusal": None}
        if one.calls:
            message |= {"content": one.text or None, "tool_calls": [self.call(call) for call in one.calls]}
        if one.thought:
            message["reasoning_content"] = one.thought
        return {"message": message, "logprobs": self.told(one.chunks)}

    def call(self, call: Call) -> dict[str, Any]:
        """A call of a tool."""
        return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}

    def first(self) -> dict[str, Any] | None:
        """What a stream begins with."""
        return {"delta": {"role": "assistant", "content": ""}, "logprobs": None}

    def delta(self, one: Answer, chunks: Sequence[Chunk]) -> dict[str, Any]:
        """What a pass has added."""
        calls, first = [piece for piece in one.new if isinstance(piece, Call)], len(one.calls)
        delta: dict[str, Any] = {"content": "".join(piece for piece in one.new if isinstance(piece, str))}
        if thought := "".join(piece.text for piece in one.new if isinstance(piece, Thought)):
            delta["reasoning_content"] = thought
        if calls:
            first -= len(calls)
            delta["tool_calls"] = [{"index": first + i, **self.call(call)} for i, call in enumerate(calls)]
        return {"delta": delta, "logprobs": self.told(chunks)}

    def last(self) -> dict[str, Any]:
        """What comes with the reason of the end."""
        return {"delta": {}, "logprobs": None}

    def told(self, chunks: Sequence[Chunk]) -> dict[str, Any] | None:
        """Log-probabilities, if they were asked for."""
        if not chunks or chunks[0].log_probs is None:
            return None
        content = [self._token(c.token_id, c.log_probs) for c in chunks if c.token_id is not None and c.log_probs]
        return {"content": content, "refusal": None}

    def _token(self, token: int, told: LogProbs) -> dict[str, Any]:
        best = [self._named(other, value) for other, value in told.best]
        return self._named(token, told.log_prob) | {"top_logprobs": best}

    def _named(self, token: int, log_prob: float) -> dict[str, Any]:
        return {"token": named(self.vocab, token), "logprob": log_prob, "bytes": list(self.vocab.token_bytes(token))}


class CompletionShape:
    """How completions' answers look."""

    prefix, whole, part = "cmpl-", "text_completion", "text_completion"

    def __init__(self, vocab: Vocab) -> None:
        self.vocab = vocab

    def choice(self, one: Answer) -> dict[str, Any]:
        """A text that is done."""
        return {"text": one.text, "logprobs": self.told(one.chunks)}

    def first(self) -> dict[str, Any] | None:
        """What a stream begins with."""
        return None

    def delta(self, one: Answer, chunks: Sequence[Chunk]) -> dict[str, Any]:
        """What a pass has added."""
        return {"text": "".join(piece for piece in one.new if isinstance(piece, str)), "logprobs": self.told(chunks)}

    def last(self) -> dict[str, Any]:
        """What comes with the reason of the end."""
        return {"text": "", "logprobs": None}

    def told(self, chunks: Sequence[Chunk]) -> dict[str, Any] | None:
        """Log-probabilities, if they were asked for."""
        told = [(c.token_id, c.log_probs) for c in chunks if c.token_id is not None and c.log_probs]
        if not told:
            return None
        return {
            "tokens": [named(self.vocab, token) for token, _ in told],
            "token_logprobs": [log_probs.log_prob for _, log_probs in told],
            "top_logprobs": [{named(self.vocab, i): value for i, value in log_probs.best} for _, log_probs in told],
            "text_offset": [],
        }


async def answer(
    http: HttpRequest, service: Service, body: Common, texts: Texts, shape: ChatShape | CompletionShape
) -> Response:
    """Whole or streamed, as it was asked for."""
    head = {
        "id": new_id(shape.prefix),
        "object": shape.part if body.stream else shape.whole,
        "created": int(time.time()),
        "model": body.model or service.name,
        "system_fingerprint": service.fingerprint,
    }
    if body.stream:
        return server_sent(http, _stream(head, body, texts, shape))

    def whole() -> dict[str, Any]:
        choices = [
            {"index": i, **shape.choice(one), "finish_reason": one.finish_reason} for i, one in enumerate(texts.answers)
        ]
        told = {"usage": usage_of(texts.answers), "edgespec": account(texts.answers)}
        return {**head, "choices": choices, **told}

    return await answer_whole(http, texts, whole)


async def _stream(
    head: dict[str, Any], body: Common, texts: Texts, shape: ChatShape | CompletionShape
) -> AsyncIterator[tuple[str | None, Any]]:
    def chunk(index: int, part: dict[str, Any], reason: str | None = None) -> tuple[None, Any]:
        return None, {**head, "choices": [{"index": index, **part, "finish_reason": reason}]}

    begin = shape.first()
    for i in range(len(texts.answers) if begin else 0):
        assert begin
        yield chunk(i, begin)
    async for found in texts.events():
        if found is None:
            yield None, None
            continue
        index, event = found
        one = texts.answers[index]
        for told in one.foreseen.take(event, one, shape.vocab):
            yield None, {**head, "choices": [], "edgespec": {"speculative_tool_call": {"choice": index, **told}}}
        if isinstance(event, Wrote):
            trace = {"edgespec": traced(event, one, shape.vocab)} if body.edgespec.trace == "passes" else {}
            if one.new or trace or event.chunks[0].log_probs:
                name, data = chunk(index, shape.delta(one, event.chunks))
                yield name, data | trace
        elif isinstance(event, Ended):
            if one.new:  # what might have become a call
                yield chunk(index, shape.delta(one, ()))
            yield chunk(index, shape.last(), one.finish_reason)
    if body.stream_options and body.stream_options.include_usage:
        yield None, {**head, "choices": [], "usage": usage_of(texts.answers), "edgespec": account(texts.answers)}
    yield None, "[DONE]"


def traced(event: Wrote, answer: Answer, vocab: Vocab) -> dict[str, Any]:
    """What a pass has guessed and kept, for who wants to see it: the page."""
    tree, round_, stats = event.step.tree, event.step, answer.stats
    return {
        "tokens": [{"text": part.text, "source": part.source.name.lower()} for part in event.chunks],
        "pass": {
            "token_ids": tree.token_ids.tolist(),
            "texts": [named(vocab, token) for token in tree.token_ids.tolist()],
            "parents": tree.parents.tolist(),
            "log_probs": [round(value, 3) for value in tree.log_probs.tolist()],
            "sources": tree.source.tolist(),
            "path": round_.path,
        },
        "seconds": {
            "prefill": stats.prefill_seconds,
            "draft": stats.draft_seconds,
            "wait": stats.wait_seconds,
            "target": stats.target_seconds,
            "plan": stats.plan_seconds,
        },
    }
