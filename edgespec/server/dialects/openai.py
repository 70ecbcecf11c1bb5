"""Fields, errors and choices that OpenAI's dialects share."""

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, ClassVar

from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from edgespec.loop.backend import Vocab
from edgespec.loop.grammar import Grammar, json_object, json_schema, lark, regex
from edgespec.scheduler.requests import Chunk, Ended, Wrote
from edgespec.server.answers import Answer, Answers
from edgespec.server.errors import Refused
from edgespec.server.service import Service
from edgespec.server.speculative_calls import SpeculativeCalls
from edgespec.server.wire import Event, Lenient, SamplingFields, answer_whole, new_id, server_sent

MOST_LOG_PROBS = 20


class Extra(Lenient):
    trace: str | None = None  # "passes": chunks report the draft and accepted tokens of each pass
    plain: bool = False
    speculate_tools: bool = False  # report calls as soon as the draft predicts them
    regex: str | None = None
    lark: str | None = None


class OpenAIBody(SamplingFields):
    model: str = ""
    stream: bool = False
    edgespec: Extra = Field(default_factory=Extra)

    def grammar(self, form: dict[str, Any] | None = None, where: str = "response_format") -> Grammar | None:
        """The grammar of the answer. Raises Refused or UsageError.

        Args:
            form: text, json_object or json_schema.
            where: its field in the request.
        """
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
            says = f"{where}: there is no type {kind!r}; there are text, json_object and json_schema"
            raise Refused(400, says, param=where)
        if self.edgespec.regex and self.edgespec.lark:
            raise Refused(400, "edgespec: give a regex or a lark grammar, not both", param="edgespec")
        if self.edgespec.regex:
            return regex(self.edgespec.regex)
        return lark(self.edgespec.lark) if self.edgespec.lark else None


def template_options(effort: str | None) -> dict[str, Any]:
    return {"reasoning_effort": effort, "enable_thinking": effort != "none"} if effort else {}


def error_body(refused: Refused) -> dict[str, Any]:
    error = {"message": refused.message, "type": refused.kind, "param": refused.param, "code": refused.code}
    return {"error": error}


def usage(answers: Answers) -> dict[str, Any]:
    counts, (accepted, rejected) = answers.usage, answers.predicted
    return {
        "prompt_tokens": counts.prompt,
        "completion_tokens": counts.written,
        "total_tokens": counts.prompt + counts.written,
        "prompt_tokens_details": {"cached_tokens": counts.cached},
        "completion_tokens_details": {
            "reasoning_tokens": counts.thought,
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": rejected,
        },
    }


def finish_reason(answer: Answer) -> str:
    return "tool_calls" if answer.calls else answer.stats.finish_reason


class StreamOptions(Lenient):
    include_usage: bool = False


class ChoicesBody(OpenAIBody):
    stop: str | list[str] | None = None
    n: int = 1
    stream_options: StreamOptions | None = None

    def stops(self) -> Sequence[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or ()


class Shape:
    prefix: ClassVar[str]
    whole: ClassVar[str]
    part: ClassVar[str]
    first: ClassVar[Mapping[str, Any] | None] = None  # None: there is no first chunk
    last: ClassVar[Mapping[str, Any]]

    def __init__(self, vocab: Vocab) -> None:
        self._vocab = vocab

    def choice(self, answer: Answer) -> dict[str, Any]:
        raise NotImplementedError

    def delta(self, answer: Answer, chunks: Sequence[Chunk]) -> dict[str, Any]:
        raise NotImplementedError


async def respond(http: HttpRequest, service: Service, body: ChoicesBody, answers: Answers, shape: Shape) -> Response:
    head = {
        "id": new_id(shape.prefix),
        "object": shape.part if body.stream else shape.whole,
        "created": int(time.time()),
        "model": body.model or service.name,
        "system_fingerprint": service.fingerprint,
    }
    if body.stream:
        return server_sent(
            _stream(head, body, answers, shape, service.model.target.vocab), lambda refused: (None, error_body(refused))
        )

    def whole() -> dict[str, Any]:
        choices = [
            {"index": i, **shape.choice(one), "finish_reason": finish_reason(one)} for i, one in enumerate(answers.all)
        ]
        return {**head, "choices": choices, "usage": usage(answers), "edgespec": answers.account}

    return await answer_whole(http, answers.whole(), whole)


async def _stream(
    head: Mapping[str, Any], body: ChoicesBody, answers: Answers, shape: Shape, vocab: Vocab
) -> AsyncIterator[Event]:
    def chunk(index: int, part: Mapping[str, Any], reason: str | None = None) -> tuple[None, dict[str, Any]]:
        return None, {**head, "choices": [{"index": index, **part, "finish_reason": reason}]}

    for i in range(len(answers.all)):
        if shape.first is not None:
            yield chunk(i, shape.first)
    ahead = [SpeculativeCalls(one, vocab) for one in answers.all] if body.edgespec.speculate_tools else ()
    async for found in answers.events():
        if found is None:
            yield None, None
            continue
        index, event = found
        one = answers.all[index]
        for told in ahead[index].after(event) if ahead else ():
            yield None, {**head, "choices": [], "edgespec": {"speculative_tool_call": {"choice": index, **told}}}
        if isinstance(event, Wrote):
            trace = {"edgespec": traced(event, one, vocab)} if body.edgespec.trace == "passes" else {}
            if one.new or trace or event.chunks[0].log_probs:
                yield None, chunk(index, shape.delta(one, event.chunks))[1] | trace
        elif isinstance(event, Ended):
            if one.new:
                yield chunk(index, shape.delta(one, ()))
            yield chunk(index, shape.last, finish_reason(one))
    if body.stream_options and body.stream_options.include_usage:
        yield None, {**head, "choices": [], "usage": usage(answers), "edgespec": answers.account}
    yield None, "[DONE]"


def named(vocab: Vocab, token: int) -> str:
    return vocab.token_bytes(token).decode("utf-8", "replace") or vocab.token_text(token)


def traced(event: Wrote, answer: Answer, vocab: Vocab) -> dict[str, Any]:
    tree, stats = event.step.tree, answer.stats
    return {
        "tokens": [{"text": part.text, "source": part.source.name.lower()} for part in event.chunks],
        "pass": {
            "token_ids": tree.token_ids.tolist(),
            "texts": [named(vocab, token) for token in tree.token_ids.tolist()],
            "parents": tree.parents.tolist(),
            "log_probs": [round(value, 3) for value in tree.log_probs.tolist()],
            "sources": tree.source.tolist(),
            "path": event.step.path,
        },
        "seconds": {
            "prefill": stats.prefill_seconds,
            "draft": stats.draft_seconds,
            "wait": stats.wait_seconds,
            "target": stats.target_seconds,
            "plan": stats.plan_seconds,
        },
    }
