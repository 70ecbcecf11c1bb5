"""Ollama's dialect: conversations and prompts by lines of JSON, and the models that there are."""

import json
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from hashlib import sha256
from time import monotonic_ns
from typing import Any, ClassVar

from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from edgespec import __version__
from edgespec.errors import must_be
from edgespec.loop.grammar import Grammar, json_object, json_schema
from edgespec.scheduler.events import Ended, Event
from edgespec.server.answers import Answer
from edgespec.server.content import result_of, text_of
from edgespec.server.conversation import MOST_TURNS, UNLIMITED, Conversation, Piece, Question, Thought, Turn, role_of
from edgespec.server.dialects.chat import calls_of
from edgespec.server.dialects.dialect import Dialect, Writer
from edgespec.server.dialects.openai import template_options
from edgespec.server.errors import Refused, refuse_if
from edgespec.server.gap import Gap
from edgespec.server.models import Models, Served
from edgespec.server.tool_calls import Call, choose_tools
from edgespec.server.wire import Listed, Named, SamplingFields, ServerSent, json_line, parsed_body, read_body

VERSION = "0.12.6"  # of Ollama, whose interface this is: clients ask for a least one
ROLES = ("system", "user", "assistant", "tool")
NEVER = "9999-12-31T23:59:59Z"
SECOND = 1e9  # durations are in nanoseconds
FORMS = ("response_format", "json_schema", "guided_json", "structured_outputs", "grammar", "guided_grammar", "ebnf")


class OllamaFields(SamplingFields):
    instead: ClassVar = (
        {name: value for name, value in SamplingFields.instead.items() if name != "think"}
        | dict.fromkeys(FORMS, "format")
        | dict.fromkeys(("n_predict", "max_new_tokens"), "num_predict")
        | dict.fromkeys(("enable_thinking", "reasoning_effort"), "think")
        | {"n_probs": "logprobs of /v1/chat/completions"}
    )


class Options(OllamaFields):
    """What is settled when the model is loaded, such as `num_ctx`, is ignored."""

    repeat_penalty: float | None = None
    repeat_last_n: int | None = None
    num_predict: int | None = None
    stop: str | Listed[str] | None = None

    @property
    def sampling(self) -> dict[str, Any]:
        none = self.repeat_penalty is None or self.repeat_last_n == 0
        penalty = {} if none else {"repetition_penalty": self.repeat_penalty}
        return penalty | super().sampling


class OllamaBody(OllamaFields, Named):
    instead: ClassVar = OllamaFields.instead | dict.fromkeys(("num_predict", "stop", "repeat_penalty"), "options")

    stream: bool = True
    options: Options = Field(default_factory=lambda: Options.model_validate({}))
    format: Any = None
    think: bool | str | None = None
    keep_alive: Any = None

    @property
    def unloads(self) -> bool:
        return self.keep_alive in (0, "0", "0s")

    @property
    def asked(self) -> dict[str, Any]:
        """What both dialects ask in the same way; raises Refused or UsageError."""
        options, most = self.options, self.options.num_predict or UNLIMITED
        stop = [options.stop] if isinstance(options.stop, str) else options.stop or ()
        return {
            "sampling": self.sampling | options.sampling,
            "stop": stop,
            "grammar": grammar_of(self.format),
            "max_tokens": max(most, UNLIMITED),
        }

    @property
    def variables(self) -> dict[str, Any]:
        if isinstance(self.think, bool):
            return {"enable_thinking": self.think}
        return template_options(self.think)


class ChatBody(OllamaBody):
    messages: Listed[dict[str, Any]] = Field(default_factory=list, max_length=MOST_TURNS)
    tools: list[Any] | None = None


class GenerateBody(OllamaBody):
    prompt: str = ""
    system: str = ""
    raw: bool = False
    images: list[Any] | None = None
    suffix: str | None = None
    template: str | None = None
    context: list[Any] | None = None


class NamedBody(OllamaFields, Named): ...


def grammar_of(form: Any) -> Grammar | None:
    """Raises UsageError."""
    if form in (None, ""):
        return None
    if form == "json":
        return json_object()
    if not isinstance(form, dict):
        raise must_be("format", form, "'json' or a JSON schema")
    return json_schema(form, strict=False)


def chat_question(body: ChatBody) -> Question | None:
    if not body.messages:
        return None
    functions = [tool.get("function") if isinstance(tool, dict) else None for tool in body.tools or ()]
    for i, function in enumerate(functions):
        refuse_if(not isinstance(function, dict), f"tools.{i} is no tool of type function", "tools")
    tools = choose_tools([one for one in functions if isinstance(one, dict)], None, parallel=True)
    by_id = any(message.get("tool_call_id") for message in body.messages)
    turns = [turn_of(message, i, body.messages, by_id) for i, message in enumerate(body.messages)]
    return Question(conversation=Conversation(turns, tools, body.variables), **body.asked)


def turn_of(message: Mapping[str, Any], number: int, messages: Sequence[Mapping[str, Any]], by_id: bool) -> Turn:
    """Raises Refused.

    Args:
        message: one of them.
        number: of the message.
        messages: all.
        by_id: results name their calls by ids, not by the function.
    """
    where = f"messages.{number}"
    role = role_of(message.get("role"), ROLES, where, "messages")
    content = with_images(message.get("content"), message.get("images"))
    if role == "tool":
        name = message.get("tool_call_id") or message.get("tool_name") or message.get("name")
        return Turn("tool", result_of(content, f"{where}.content"), result_of=name)
    asked = role == "user" and number == len(messages) - 1 and messages[number - 1].get("role") != "tool"
    thought = message.get("thinking")
    calls = calls_of({**message, "role": role}, f"{where}.tool_calls")
    return Turn(
        role,
        text_of(content, f"{where}.content", asked=asked),
        thought if isinstance(thought, str) else None,
        [one if by_id else Call(one.name, one.arguments, one.name) for one in calls],
    )


def with_images(content: Any, images: Any) -> Any:
    return [*({"type": "image"} for _ in images), content or ""] if isinstance(images, list) and images else content


def generate_question(body: GenerateBody) -> Question | None:
    for name in ("template", "context"):
        instead = "; use /api/chat with all messages" if name == "context" else ""
        refuse_if(getattr(body, name), f"{name} is not read here{instead}", name)
    if not body.prompt:
        return None
    prompt = text_of(with_images(body.prompt, body.images), "images", asked=True)
    if body.raw or body.suffix:
        return Question(prompts=[Gap(prompt, body.suffix) if body.suffix else prompt], **body.asked)
    turns = [Turn("system", body.system)] * bool(body.system) + [Turn("user", prompt)]
    return Question(conversation=Conversation(turns, None, body.variables), **body.asked)


def error_body(refused: Refused) -> dict[str, Any]:
    return {"error": refused.message}


def now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


class OllamaWriter(Writer):
    def __init__(self, body: OllamaBody, name: str) -> None:
        super().__init__(body, name)
        self._begun, self._calls = monotonic_ns(), 0

    @abstractmethod
    def part(self, text: str, more: Mapping[str, Any]) -> dict[str, Any]:
        """New text, and a thought or calls."""

    def _line(self, pieces: Sequence[Piece] = (), **ended: Any) -> dict[str, Any]:
        text = "".join(piece for piece in pieces if isinstance(piece, str))
        thought = "".join(piece.text for piece in pieces if isinstance(piece, Thought))
        calls = [piece for piece in pieces if isinstance(piece, Call)]
        more: dict[str, Any] = {"thinking": thought} if thought else {}
        if calls:
            more["tool_calls"] = [call_item(call, self._calls + i) for i, call in enumerate(calls)]
            self._calls += len(calls)
        return {"model": self._model, "created_at": now(), **self.part(text, more), "done": False, **ended}

    def _last(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        for answer in self._all:  # one; none where nothing is asked
            reason = "length" if answer.is_cut else "stop"
            told = {"done_reason": reason, **self._counts(answer), "edgespec": self._answers.account}
            return self._line(pieces, done=True, **told)
        return self._line(done=True, done_reason="unload" if self._body.unloads else "load")

    def _counts(self, answer: Answer) -> dict[str, int]:
        stats = answer.stats
        return {
            "total_duration": monotonic_ns() - self._begun,
            "load_duration": 0,
            "prompt_eval_count": len(answer.request.prompt_ids),
            "prompt_eval_duration": nanoseconds(stats.prefill_seconds),
            "eval_count": stats.tokens,
            "eval_duration": nanoseconds(stats.seconds),
        }

    def whole(self) -> dict[str, Any]:
        return self._last([piece for answer in self._all for piece in answer.pieces])

    def after(self, number: int, event: Event) -> Iterator[ServerSent]:
        (answer,) = self._all
        if answer.new:
            yield None, self._line(answer.new)
        if isinstance(event, Ended):
            yield None, self._last(())

    def silent(self) -> Iterator[ServerSent]:
        yield None, self._line()

    def end(self) -> Iterator[ServerSent]:
        if not self._all:
            yield None, self._last(())

    def error(self, refused: Refused) -> Iterator[ServerSent]:
        yield None, error_body(refused)


def nanoseconds(seconds: float) -> int:
    """At least 1, since clients divide by it."""
    return max(1, round(seconds * SECOND))


def call_item(call: Call, number: int) -> dict[str, Any]:
    function = {"index": number, "name": call.name, "arguments": json.loads(call.arguments)}
    return {"id": call.id, "function": function}


class ChatWriter(OllamaWriter):
    def part(self, text: str, more: Mapping[str, Any]) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, **more}}


class GenerateWriter(OllamaWriter):
    def part(self, text: str, more: Mapping[str, Any]) -> dict[str, Any]:
        return {"response": text, **more}


NDJSON = "application/x-ndjson"
dialect = partial(Dialect, loads=lambda body: not body.unloads, line=json_line, media_type=NDJSON)
CHAT = dialect(ChatBody, chat_question, ChatWriter)
GENERATE = dialect(GenerateBody, generate_question, GenerateWriter)


async def version(http: HttpRequest) -> Response:
    return JSONResponse({"version": VERSION, "edgespec": __version__})


def card(served: Served, **more: Any) -> dict[str, Any]:
    digest = sha256(served.name.encode()).hexdigest()
    told = {"name": served.name, "model": served.name, "size": served.size, "digest": digest}
    return {**told, "details": details(served), **more}


def details(served: Served) -> dict[str, Any]:
    is_folder = served.service and served.service.model.target.name != "llamacpp"
    told = {"parent_model": "", "format": "safetensors" if is_folder else "gguf", "family": "edgespec"}
    return {**told, "families": ["edgespec"], "parameter_size": "", "quantization_level": ""}


async def tags(http: HttpRequest) -> Response:
    models: Models = http.app.state.models
    at = datetime.fromtimestamp(models.started, UTC).isoformat()
    return JSONResponse({"models": [card(one, modified_at=at) for one in models.all]})


async def running(http: HttpRequest) -> Response:
    models: Models = http.app.state.models
    found = [
        card(one, expires_at=NEVER, size_vram=0, context_length=one.limits["n_ctx"])
        for one in models.all
        if one.service
    ]
    return JSONResponse({"models": found})


async def show(http: HttpRequest) -> Response:
    """It loads no model: programs ask for each that there is."""
    models: Models = http.app.state.models
    served = models.wanted(parsed_body(await read_body(http), NamedBody).model)
    service, known = served.service, {"general.architecture": "edgespec", "general.basename": served.name}
    known |= {"edgespec.context_length": served.limits["n_ctx"]} if served.limits else {}
    able = ["completion", "tools", *(["thinking"] if service and service.chat_format.thinking else [])]
    template = (service.model.target.vocab.chat_template or "") if service else ""
    about = {"modelfile": "", "parameters": "", "template": template}
    return JSONResponse({**about, "details": details(served), "model_info": known, "capabilities": able})


async def refuse(http: HttpRequest) -> Response:
    raise Refused(
        403, f"{http.url.path}: models are chosen when the server starts: edgespec pull, edgespec serve MODEL"
    )
