"""Fields, errors and choices that OpenAI's dialects share."""

import time
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal

from pydantic import ConfigDict, Field

from edgespec.errors import check_texts, must_be, shown
from edgespec.loop.backend import Vocab
from edgespec.loop.grammar import Grammar, json_object, json_schema, lark, regex
from edgespec.scheduler.events import Chunk, Ended, Event, Wrote
from edgespec.server.answers import Answer, Answers
from edgespec.server.constrained import string
from edgespec.server.conversation import Question
from edgespec.server.dialects.dialect import Writer
from edgespec.server.errors import KINDS, Refused, refuse_if
from edgespec.server.service import Service
from edgespec.server.wire import Lenient, Listed, Named, SamplingFields, ServerSent, new_id, not_read

MOST_LOG_PROBS = 20
OTHER_FORMS = ("json_schema", "regex", "guided_json", "guided_regex", "guided_choice")
NO_FORMS = ("disable_fallback", "disable_any_whitespace")  # of vLLM's structured_outputs: JSON has no free white space


class Extra(Lenient):
    model_config = ConfigDict(extra="forbid")

    trace: Literal["passes", ""] | None = None  # chunks report the draft and accepted tokens of each pass
    plain: bool = False
    speculate_tools: bool = False  # outdated: no call is proposed any more
    regex: str | None = None
    lark: str | None = None

    def check(self, *taken: str) -> None:
        """Raise Refused for a member that an interface would ignore, since it takes only these."""
        for name, value in self:
            refuse_if(
                value and name not in taken,
                f"edgespec.{name} is not for this interface; /v1/chat/completions takes it",
                "edgespec",
            )


class OpenAIBody(SamplingFields, Named):
    stream: bool = False
    edgespec: Extra = Field(default_factory=Extra)
    json_schema: dict[str, Any] | str | None = None  # llama.cpp's
    regex: str | None = None  # SGLang's
    guided_json: dict[str, Any] | str | None = None  # vLLM's
    guided_regex: str | None = None
    guided_choice: Listed[str] | None = None
    structured_outputs: dict[str, Any] | None = None

    def grammar(self, form: dict[str, Any] | None = None, where: str = "response_format") -> Grammar | None:
        """The grammar of the answer. Raises Refused or UsageError.

        Args:
            form: text, json_object or json_schema.
            where: its field in the request.
        """
        kind = (form or {}).get("type", "text")
        refuse_if(
            kind not in ("text", "json_object", "json_schema"),
            f"{where}: there is no type {shown(kind)}; there are text, json_object and json_schema",
            where,
        )
        given = {f"edgespec.{name}": (name, getattr(self.edgespec, name)) for name in ("regex", "lark")}
        given |= {name: (name.removeprefix("guided_"), getattr(self, name)) for name in OTHER_FORMS}
        given |= {f"structured_outputs.{name}": (name, one) for name, one in (self.structured_outputs or {}).items()}
        wanted = {
            name: one for name, one in given.items() if one[1] not in (None, False, "") and one[0] not in NO_FORMS
        }
        names = [where] * (kind != "text") + [*wanted]
        refuse_if(len(names) > 1, f"{' and '.join(names)} cannot be had together", "edgespec")
        if form and kind == "json_object":
            return json_object() if form.get("schema") in (None, {}) else schema_grammar(form, where)  # as llama.cpp
        if form and kind == "json_schema":
            return schema_grammar(form.get("json_schema", form), where)  # newer dialects have no inner object
        return next((grammar_of(name, *one) for name, one in wanted.items()), None)


def grammar_of(name: str, kind: str, value: Any) -> Grammar:
    """The grammar of an answer by a field. Raises Refused or UsageError.

    Args:
        name: of the field.
        kind: of the grammar.
        value: of the field.
    """
    if kind == "choice":
        if not isinstance(value, list) or not value:
            raise must_be(name, value, "a list of texts")
        return lark(f"start: {' | '.join(map(string, check_texts(name, value)))}")
    if kind == "json_object":
        return json_object()
    if kind in ("json", "json_schema"):
        return json_schema(value, strict=False)
    if kind not in ("regex", "lark"):
        raise not_read(name, "edgespec.lark" if kind == "grammar" else "")
    return regex(value) if kind == "regex" else lark(value)


def schema_grammar(form: Any, where: str) -> Grammar:
    """Raises Refused or UsageError."""
    schema: Any = form.get("schema") if isinstance(form, dict) else None
    refuse_if(not isinstance(schema, dict), f"{where}: a schema of type object is missing", where)
    return json_schema(schema, strict=form.get("strict") is True)


def template_options(effort: str | None) -> dict[str, Any]:
    return {"reasoning_effort": effort, "enable_thinking": effort != "none"} if effort else {}


def thinking_options(thinking: Mapping[str, Any] | None) -> dict[str, Any]:
    wanted = (thinking or {}).get("type")
    return {"enable_thinking": wanted != "disabled"} if wanted else {}


def error_body(refused: Refused) -> dict[str, Any]:
    kind = KINDS[400] if refused.status == 404 else refused.kind
    error = {"message": refused.message, "type": kind, "param": refused.param, "code": refused.code}
    return {"error": error}


def usage(answers: Answers, read: str, wrote: str, **details: int) -> dict[str, Any]:
    """Tokens of all answers; the choices of one prompt count it once, with the first one's cached tokens.

    Args:
        answers: which have ended.
        read: the dialect's word for the prompt.
        wrote: its word for the answers.
        details: further counts of the answers.
    """
    first = [answer for answer in answers.all if answer.choice == 0]
    prompt, written = sum(len(one.request.prompt_ids) for one in first), sum(one.stats.tokens for one in answers.all)
    return {
        f"{read}_tokens": prompt,
        f"{wrote}_tokens": written,
        "total_tokens": prompt + written,
        f"{read}_tokens_details": {"cached_tokens": sum(one.stats.cached_tokens for one in first)},
        f"{wrote}_tokens_details": {"reasoning_tokens": sum(one.thought_tokens for one in answers.all)} | details,
    }


def finish_reason(answer: Answer) -> str:
    return "tool_calls" if answer.calls and not answer.is_cut else answer.stats.finish_reason


class StreamOptions(Lenient):
    include_usage: bool = False


class ChoicesBody(OpenAIBody):
    stop: str | Listed[str] | None = None
    n: int = 1
    stream_options: StreamOptions | None = None
    response_format: dict[str, Any] | None = None
    n_predict: int | None = None  # llama.cpp's

    def question(self, log_probs: int | None, named: str, **more: Any) -> Question:
        """What both dialects ask in the same way.

        Args:
            log_probs: of this many tokens besides the sampled one; None: of none.
            named: the field of the request that says so.
            more: what they ask in their own ways.

        Raises:
            Refused, UsageError: a field is wrong, or would be ignored.
        """
        extra, stop = self.edgespec, self.stop or ()
        refuse_if(extra.trace and not self.stream, "edgespec.trace is for streams; set stream to true", "edgespec")
        says = f"{named} is {log_probs}, but must be from 0 to {MOST_LOG_PROBS}"
        refuse_if(not 0 <= (log_probs or 0) <= MOST_LOG_PROBS, says, named)
        return Question(
            self.sampling, stop=[stop] if isinstance(stop, str) else stop, choices=self.n, log_probs=log_probs,
            plain=extra.plain, grammar=self.grammar(self.response_format), **more,
        )  # fmt: skip


class ChoicesWriter(Writer):
    """Answers as choices.

    Attributes:
        prefix: of ids.
        kind: of a whole answer.
        chunk_kind: of a part of a stream.
        first: the part that begins a choice; empty: there is none.
        empty: a part with no text.
        last: the part that ends a choice.
    """

    prefix: ClassVar[str]
    kind: ClassVar[str]
    chunk_kind: ClassVar[str]
    first: ClassVar[Mapping[str, Any]] = {}
    empty: ClassVar[Mapping[str, Any]]
    last: ClassVar[Mapping[str, Any]]

    def __init__(self, body: ChoicesBody, name: str) -> None:
        super().__init__(body, name)
        self._told: dict[str, Any] = {}
        self._head = {
            "id": new_id(self.prefix),
            "object": self.chunk_kind if body.stream else self.kind,
            "created": int(time.time()),
            "model": self._model,
        }

    def start(self, service: Service, answers: Answers) -> None:
        super().start(service, answers)
        self._vocab = service.model.target.vocab
        self._told = {"approximate": service.model.approximate} if service.model.approximate else {}
        self._head |= {"system_fingerprint": service.fingerprint} | ({"edgespec": self._told} if self._told else {})

    @abstractmethod
    def choice(self, answer: Answer) -> dict[str, Any]: ...

    @abstractmethod
    def delta(self, answer: Answer, chunks: Sequence[Chunk]) -> dict[str, Any]:
        """The new pieces of an answer, which came with these chunks."""

    def whole(self) -> dict[str, Any]:
        choices = [
            {"index": i, **self.choice(one), "finish_reason": finish_reason(one)} for i, one in enumerate(self._all)
        ]
        return {**self._head, "choices": choices, **self._counts()}

    def begin(self) -> Iterator[ServerSent]:
        for i in range(len(self._all) if self.first else 0):
            yield None, self._chunk(i, self.first)

    def after(self, number: int, event: Event) -> Iterator[ServerSent]:
        one, extra = self._all[number], self._body.edgespec
        if isinstance(event, Wrote):
            trace = {"edgespec": self._told | traced(event, one, self._vocab)} if extra.trace == "passes" else {}
            counts = one.chunks[-1:] == event.chunks[-1:]  # else it came after the answer's only call
            if one.new or one.grew or trace or (counts and event.chunks[0].log_probs):
                yield None, self._chunk(number, self.delta(one, event.chunks)) | trace
        elif isinstance(event, Ended):
            if one.new:
                yield None, self._chunk(number, self.delta(one, ()))
            yield None, self._chunk(number, self.last, finish_reason(one))

    def end(self) -> Iterator[ServerSent]:
        if self._body.stream_options and self._body.stream_options.include_usage:
            yield None, {**self._head, "choices": [], **self._counts()}
        yield None, "[DONE]"

    def silent(self) -> Iterator[ServerSent]:
        number = next((i for i, one in enumerate(self._all) if not one.ended), 0)
        yield None, self._chunk(number, self.empty)

    def error(self, refused: Refused) -> Iterator[ServerSent]:
        yield None, error_body(refused)

    def _chunk(self, number: int, part: Mapping[str, Any], reason: str | None = None) -> dict[str, Any]:
        return {**self._head, "choices": [{"index": number, **part, "finish_reason": reason}]}

    def _counts(self) -> dict[str, Any]:
        accepted, rejected = self._answers.predicted
        details = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": rejected}
        return {"usage": usage(self._answers, "prompt", "completion", **details), "edgespec": self._answers.account}


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
