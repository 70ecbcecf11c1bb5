"""Compare answers on the wire: the same requests to llama-server and to this one.

Differences that are meant are listed in `KNOWN`, each with a reason.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from benchmarks.serving import JSON, closing_connection

CONTEXT = 1024  # tokens, in both
OPTIONS = {"parallel": 2, "context_length": CONTEXT, "exact": "off"}  # of `load`, as llama-server computes
Shape = Any  # JSON with types in the place of values; of a list: [the shape of all its items]
SAID = [{"role": "system", "content": "You are brief."}, {"role": "user", "content": "What is the capital of France?"}]
GREEDY: dict[str, Any] = {"temperature": 0, "seed": 1, "max_tokens": 12}
SHORT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 64}
STREAM: dict[str, Any] = {"stream": True}
USAGE = {"stream_options": {"include_usage": True}}
LOG_PROBS = {"logprobs": True, "top_logprobs": 5}
SCHEMA = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
TOOL = {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
CHAT, COMPLETION, RESPONSE, MESSAGE = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
CHATTED: dict[str, Any] = {"messages": SAID, **GREEDY}
COMPLETED: dict[str, Any] = {"prompt": "The capital of France is", **GREEDY}
RESPONDED: dict[str, Any] = {"input": "Hello", "temperature": 0, "max_output_tokens": 64}
MESSAGED: dict[str, Any] = {"messages": SAID[1:], "max_tokens": 12, "temperature": 0}
# name -> (path, body); without a body GET; a string is sent as it is
REQUESTS: dict[str, tuple[str, Any]] = {
    "chat": (CHAT, CHATTED),
    "chat, its own end": (CHAT, CHATTED | SHORT),
    "chat, stop string": (CHAT, CHATTED | {"stop": ["e"]}),
    "chat, log probabilities": (CHAT, CHATTED | LOG_PROBS),
    "chat, two choices": (CHAT, CHATTED | {"n": 2}),
    "chat, schema": (
        CHAT,
        CHATTED | {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
    ),
    "chat, no model's name": (CHAT, {"messages": SAID[1:], "max_completion_tokens": 4}),
    "chat, model's name": (CHAT, CHATTED | {"model": "gpt-4o"}),
    "chat, tool": (CHAT, CHATTED | {"tools": [{"type": "function", "function": TOOL}], "tool_choice": "none"}),
    "chat, stream": (CHAT, CHATTED | STREAM),
    "chat, stream, usage": (CHAT, CHATTED | STREAM | USAGE),
    "chat, stream, its own end": (CHAT, CHATTED | STREAM | SHORT),
    "chat, stream, stop string": (CHAT, CHATTED | STREAM | {"stop": ["e"]}),
    "chat, stream, log probabilities": (CHAT, CHATTED | STREAM | LOG_PROBS),
    "chat, stream, two choices": (CHAT, CHATTED | STREAM | {"n": 2}),
    "completion": (COMPLETION, COMPLETED),
    "completion, stop string": (COMPLETION, COMPLETED | {"stop": "e"}),
    "completion, token ids": (COMPLETION, COMPLETED | {"prompt": [1, 2, 3, 4]}),
    "completion, log probabilities": (COMPLETION, COMPLETED | {"logprobs": 2}),
    "completion, stream": (COMPLETION, COMPLETED | STREAM),
    "completion, stream, usage": (COMPLETION, COMPLETED | STREAM | USAGE),
    "response": (RESPONSE, RESPONDED),
    "response, stream": (RESPONSE, RESPONDED | STREAM),
    "response, cut": (RESPONSE, RESPONDED | {"max_output_tokens": 4}),
    "message": (MESSAGE, MESSAGED),
    "message, stop string": (MESSAGE, MESSAGED | {"stop_sequences": ["e"]}),
    "message, stream": (MESSAGE, MESSAGED | STREAM),
    "message, count tokens": (MESSAGE + "/count_tokens", MESSAGED),
    "models": ("/v1/models", None),
    "health": ("/health", None),
    "error, no JSON": (CHAT, "{"),
    "error, no messages": (CHAT, {"max_tokens": 4}),
    "error, messages are text": (CHAT, {"messages": "hello"}),
    "error, role": (CHAT, {"messages": [{"content": "hello"}]}),
    "error, temperature": (CHAT, CHATTED | {"temperature": "warm"}),
    "error, schema": (CHAT, CHATTED | {"response_format": {"type": "json_schema", "json_schema": {"schema": 1}}}),
    "error, prompt too long": (COMPLETION, COMPLETED | {"prompt": "word " * 20000}),
    "error, prompt too long, stream": (COMPLETION, COMPLETED | STREAM | {"prompt": "word " * 20000}),
    "error, no prompt": (COMPLETION, GREEDY),
    "error, no such path": ("/v1/no-such-path", GREEDY),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Difference:
    where: str
    theirs: Shape
    ours: Shape

    def __str__(self) -> str:
        return f"{self.where}: llama-server {json.dumps(self.theirs)[:90]}, here {json.dumps(self.ours)[:90]}"

    @property
    def meant(self) -> str:
        """The reason for it, or ""."""
        return next((why for where, why in KNOWN.items() if re.fullmatch(where, self.where)), "")


KNOWN = {  # a regular expression for "name: place", all of it -> why
    r".*\.timings": "llama-server's own; here times are in edgespec.loop.stats and /metrics",
    r".*logprobs(\.content\[\])?(\.top_logprobs\[\])?\.id": "llama-server's own: OpenAI tells no token ids",
    r"chat, stream.*: begin\..*\.content": "OpenAI begins with an empty text, llama-server with null",
    r"chat, schema: ends": "JSON has no free white space here, and so comes to its end",
    r"completion, log probabilities: .*\.content": "OpenAI's completions have lists here, and chat has these objects",
    r"completion, stream(, usage: order|.*: end: length\.usage)": "OpenAI tells it in a chunk of its own, if asked",
    r"response, cut: (ends|\.completed_at)": "OpenAI calls a response incomplete that max_output_tokens has cut",
    r"message, stop string: ends": "Anthropic tells which stop sequence has ended a text",
    r"models: \.models": "Ollama's list, beside OpenAI's; its dialect is not spoken here",
    r"models: \.data\[\]\.(aliases|tags|meta\..*)": "llama-server's own; /health tells what is loaded here",
    r"error, .*: \.error\.code": "OpenAI's codes are names or null, llama-server's the status",
    r"error, prompt too long.*: \.error\.n_.*": "llama-server's own; both numbers are in the message",
    r"error, (no JSON|role): status": "what the client has done wrong is not an error of the server",
    r"error, schema: .*": "llama-server passes over a schema that is none",
}


def record(port: int) -> dict[str, Any]:
    """Answers to `REQUESTS`: name -> status, shape, order of events, and tokens."""
    return {name: asked(port, path, body) for name, (path, body) in REQUESTS.items()}


def asked(port: int, path: str, body: Any) -> dict[str, Any]:
    with closing_connection(port) as connection:
        sent = body if body is None or isinstance(body, str) else json.dumps(body)
        connection.request("GET" if body is None else "POST", path, sent, JSON)
        answer = connection.getresponse()
        raw, kind = answer.read(), answer.getheader("Content-Type", "").partition(";")[0]
    told: dict[str, Any] = {"status": answer.status, "type": kind}
    if kind == "text/event-stream":
        events = sorted(events_of(raw.decode()), key=lambda event: choice_of(event[1]))
        told["order"] = [kind for kind, _ in groupby(map(kind_of, events))]
        kinds = sorted({kind_of(event) for event in events if isinstance(event[1], dict)})
        told["events"] = {
            kind: merged([shape(data) for name, data in events if kind_of((name, data)) == kind]) for kind in kinds
        }
        return told
    data = json.loads(raw)
    told |= {"body": shape(data), "ends": ends_of(data)}
    if tokens := tokens_of(data):
        told["tokens"] = tokens
    return told


def same_tokens(
    theirs: Sequence[tuple[str, dict[str, float]]], ours: Sequence[tuple[str, dict[str, float]]], tolerance: float
) -> bool:
    """True if greedy tokens are equal up to a tie, and their log probabilities up to rounding.

    Args:
        theirs: each token with the log probabilities of the best ones.
        ours: the same.
        tolerance: most that a log probability may differ.
    """
    for (token, best), (other, ranked) in zip(theirs, ours, strict=False):
        if any(abs(best[name] - ranked[name]) > tolerance for name in best.keys() & ranked.keys()):
            return False
        if token != other:  # behind a tie texts go apart
            return token in ranked and ranked[other] - ranked[token] <= tolerance
    return len(theirs) == len(ours)


def events_of(text: str) -> Iterator[tuple[str, Any]]:
    """
    Yields:
        (name or "", data) of server-sent events; data as they are where they are no JSON.
    """
    for block in text.replace("\r\n", "\n").split("\n\n"):
        fields = [line.partition(": ")[::2] for line in block.splitlines() if not line.startswith(":")]
        data = "\n".join(value for name, value in fields if name == "data")
        if data:
            yield dict(fields).get("event", ""), json.loads(data) if data.startswith("{") else data


def choice_of(data: Any) -> int:
    if not isinstance(data, dict) or "choices" not in data:
        return 0 if isinstance(data, dict) else 1 << 30
    return data["choices"][0]["index"] if data["choices"] else 1 << 29


def kind_of(event: tuple[str, Any]) -> str:
    name, data = event
    if not isinstance(data, dict):
        return str(data)
    if named := name or data.get("type"):
        return str(named)
    if not data.get("choices"):
        return "error" if "error" in data else "usage"
    choice = data["choices"][0]
    if choice.get("finish_reason"):
        return f"end: {choice['finish_reason']}"
    delta = choice.get("delta", {"text": ""})
    return "begin" if "role" in delta else "+".join(sorted(key for key, value in delta.items() if value is not None))


def ends_of(data: Any) -> list[str]:
    if not isinstance(data, dict):
        return []
    named = [data.get("stop_reason"), data.get("status"), *(c["finish_reason"] for c in data.get("choices", ()))]
    return [str(reason) for reason in named if reason is not None]


def tokens_of(data: Any) -> list[tuple[str, dict[str, float]]]:
    for choice in data.get("choices", ()) if isinstance(data, dict) else ():
        if "message" in choice and choice.get("logprobs"):
            return [
                (told["token"], {best["token"]: round(best["logprob"], 4) for best in told["top_logprobs"]})
                for told in choice["logprobs"]["content"]
            ]
    return []


def shape(value: Any) -> Shape:
    if isinstance(value, Mapping):
        return {str(key): shape(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [merged([shape(inner) for inner in value])] if value else []
    names = {bool: "boolean", int: "integer", float: "number", str: "string"}
    return "null" if value is None else names[type(value)]


def merged(shapes: Sequence[Shape]) -> Shape:
    first = shapes[0]
    if all(isinstance(one, dict) for one in shapes):
        keys = dict.fromkeys(key for one in shapes for key in one)
        return {key: merged([one[key] for one in shapes if key in one]) for key in keys}
    if all(isinstance(one, list) for one in shapes):
        items = [item for one in shapes for item in one]
        return [merged(items)] if items else []
    names = sorted({part for one in shapes for part in (one.split("|") if isinstance(one, str) else [_kind(one)])})
    return first if len(names) == 1 else "|".join(names)


def _kind(one: Shape) -> str:
    return "array" if isinstance(one, list) else "object"


def compare(theirs: Mapping[str, Any], ours: Mapping[str, Any], tolerance: float) -> list[Difference]:
    """Parts of llama-server's recorded answers that ours lack or have otherwise.

    Args:
        theirs: from `record`.
        ours: the same.
        tolerance: most that a log probability may differ: the rounding of both.
    """
    return [found for name in theirs for found in _compare(theirs[name], ours[name], name, tolerance)]


def _compare(theirs: Mapping[str, Any], ours: Mapping[str, Any], name: str, tolerance: float) -> Iterator[Difference]:
    if "tokens" in theirs and not same_tokens(theirs["tokens"], ours.get("tokens", []), tolerance):
        yield Difference(f"{name}: tokens", theirs["tokens"], ours.get("tokens"))
    for part in ("status", "type", "order", "ends"):
        if part in theirs and theirs[part] != ours.get(part):
            yield Difference(f"{name}: {part}", theirs[part], ours.get(part))
    for kind, event in theirs.get("events", {}).items():
        if kind in ours.get("events", {}):
            yield from _missing(event, ours["events"][kind], f"{name}: {kind}")
    if "body" in theirs and "body" in ours:
        yield from _missing(theirs["body"], ours["body"], f"{name}: ")


def _missing(theirs: Shape, ours: Shape, where: str) -> Iterator[Difference]:
    if isinstance(theirs, dict) and isinstance(ours, dict):
        for key, value in theirs.items():
            at = f"{where}.{key}"
            if key in ours:
                yield from _missing(value, ours[key], at)
            else:
                yield Difference(at, value, "absent")
    elif isinstance(theirs, list) and isinstance(ours, list):
        for one, other in zip(theirs, ours, strict=False):  # of an empty list nothing is known
            yield from _missing(one, other, f"{where}[]")
    elif not _fits(theirs, ours):
        yield Difference(where, theirs, ours)


def _fits(theirs: Shape, ours: Shape) -> bool:
    if not isinstance(theirs, str) or not isinstance(ours, str):
        return False
    known = set(theirs.split("|"))
    return set(ours.split("|")) <= known | ({"integer"} if "number" in known else set())
