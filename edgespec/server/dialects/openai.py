"""Fields, errors and counts that all of OpenAI's dialects share, and our own fields beside them."""

from typing import Any

from pydantic import Field

from edgespec.loop.grammar import Grammar, json_object, json_schema, lark, regex
from edgespec.server.answers import Answer, Answers
from edgespec.server.errors import Refused
from edgespec.server.wire import Event, Lenient, SamplingFields


class Extra(Lenient):
    """Our own fields."""

    trace: str | None = None  # "passes": chunks tell what each pass has drafted and accepted
    plain: bool = False  # decode without drafts
    speculate_tools: bool = False  # tell of calls as soon as the draft predicts them
    regex: str | None = None  # that the text must match
    lark: str | None = None  # a grammar that it must follow


class OpenAIBody(SamplingFields):
    """A request."""

    model: str = ""
    stream: bool = False
    edgespec: Extra = Field(default_factory=Extra)

    def grammar(self, form: dict[str, Any] | None = None, where: str = "response_format") -> Grammar | None:
        """The grammar of the answer. Raises Refused, or UsageError for a schema that is none.

        Args:
            form: text, json_object or json_schema.
            where: it stands in the request.
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
    """Variables of a chat template: whether, and how long, to think."""
    return {"reasoning_effort": effort, "enable_thinking": effort != "none"} if effort else {}


def error_body(refused: Refused) -> dict[str, Any]:
    error = {"message": refused.message, "type": refused.kind, "param": refused.param, "code": refused.code}
    return {"error": error}


def error_event(refused: Refused) -> Event:
    """The last event of a stream that an error ends."""
    return None, error_body(refused)


def usage(answers: Answers) -> dict[str, Any]:
    """The counts of chat and completions."""
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
