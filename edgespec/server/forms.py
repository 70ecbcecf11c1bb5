"""How models write calls of tools and what they think: markers, and what stands between them.

Which form a model has is seen in its chat template. New ones: a line in `FORMS`, and a function if it is none of these.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from secrets import token_hex
from typing import Any

from edgespec.backend import Vocab
from edgespec.grammar import Grammar, lark

Types = Mapping[str, Mapping[str, Any]]  # function -> its parameters' JSON schemas, by name


@dataclass(frozen=True, slots=True)
class Call:
    """One call."""

    name: str
    arguments: str  # JSON
    id: str = field(default_factory=lambda: f"call_{token_hex(12)}")


@dataclass(frozen=True, slots=True)
class Thought:
    """A piece of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class Form:
    """How calls are written. `parse` gives the calls between two markers, and raises ValueError if they are none."""

    seen: str  # in the chat template
    open: tuple[str, ...]  # one that begins with { is part of what is parsed, and counts only where an answer begins
    close: str  # "": the end of the text
    parse: Callable[[str, Types], list[Call]]
    inner: tuple[str, ...] = ()  # more markers, between the two


def made(name: Any, arguments: Any) -> Call:
    """A call of a function by its name and an object. Raises ValueError."""
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        raise ValueError("not a call")
    return Call(name, json.dumps(arguments, ensure_ascii=False))


def as_object(text: str, types: Types) -> list[Call]:
    """{"name": "f", "arguments": {…}}, or a list of such; Llama says "parameters"."""
    found = json.loads(text)
    calls = found if isinstance(found, list) else [found]
    if not calls or not all(isinstance(call, dict) for call in calls):
        raise ValueError("not a call")
    return [made(call.get("name"), call.get("arguments", call.get("parameters", {}))) for call in calls]


def as_mistral(text: str, types: Types) -> list[Call]:
    """[{"name": …}], or f[ARGS]{…}, each behind a marker."""
    if text.lstrip().startswith(("[{", "{")):
        return as_object(text, types)
    parts = [part.partition("[ARGS]") for part in text.split("[TOOL_CALLS]") if part.strip()]
    return [made(name.partition("[CALL_ID]")[0].strip(), json.loads(arguments)) for name, _, arguments in parts]


def as_pairs(pair: str, function: str) -> Callable[[str, Types], list[Call]]:
    """Markup by two regular expressions: of a function with a name and its body, and of a key with its value."""

    def parse(text: str, types: Types) -> list[Call]:
        found = re.findall(function, text, re.DOTALL)
        if not found:
            raise ValueError("not a call")
        return [
            made(name.strip(), {key: typed(value, types.get(name.strip(), {}).get(key)) for key, value in pairs})
            for name, pairs in ((name, re.findall(pair, body, re.DOTALL)) for name, body in found)
        ]

    return parse


def typed(value: str, schema: Any) -> Any:
    """A value written without quotation marks, as its schema wants it; a string where nothing is known."""
    value = value.removeprefix("\n").removesuffix("\n")
    kind = schema.get("type") if isinstance(schema, dict) else None
    if kind in (None, "string") and not (kind is None and schema):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def as_tokens(call: str) -> Callable[[str, Types], list[Call]]:
    """Calls between control tokens, by a regular expression of a name and JSON."""

    def parse(text: str, types: Types) -> list[Call]:
        found = re.findall(call, text, re.DOTALL)
        if not found:
            raise ValueError("not a call")
        return [made(name.strip(), json.loads(arguments)) for name, arguments in found]

    return parse


KIMI = tuple(f"<|tool_call_{part}|>" for part in ("begin", "argument_begin", "end"))
DEEPSEEK = tuple(f"<｜tool▁{part}｜>" for part in ("call▁begin", "sep", "call▁end"))
HERMES = Form("<tool_call>", ("<tool_call>",), "</tool_call>", as_object)
# The first whose mark is in the template.
FORMS = (
    Form(
        "<minimax:tool_call>", ("<minimax:tool_call>",), "</minimax:tool_call>",
        as_pairs(r'<parameter name="([^"]+)">(.*?)</parameter>', r'<invoke name="([^"]+)">(.*?)</invoke>'),
    ),
    Form(
        "<|tool_calls_section_begin|>", ("<|tool_calls_section_begin|>",), "<|tool_calls_section_end|>",
        as_tokens(r"<\|tool_call_begin\|>\s*(?:functions\.)?(.+?)(?::\d+)?\s*<\|tool_call_argument_begin\|>(.*?)<\|tool_call_end\|>"),
        KIMI,
    ),
    Form(
        "<｜tool▁calls▁begin｜>", ("<｜tool▁calls▁begin｜>",), "<｜tool▁calls▁end｜>",
        as_tokens(r"<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?(.+?)(?:<｜tool▁sep｜>|\n```json)(.*?)(?:\n```)?<｜tool▁call▁end｜>"),
        DEEPSEEK,
    ),
    Form("[TOOL_CALLS]", ("[TOOL_CALLS]",), "", as_mistral, ("[ARGS]", "[CALL_ID]")),
    Form(
        "<arg_key>", HERMES.open, HERMES.close,
        as_pairs(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", r"^\s*([^\s<]+)(.*)$"),
        ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ),
    Form(
        "<function=", HERMES.open, HERMES.close,
        as_pairs(r"<parameter=([^>]+)>(.*?)</parameter>", r"<function=([^>]+)>(.*?)</function>"),
    ),
    HERMES,
    Form("<|python_tag|>", ("<|python_tag|>", '{"name":'), "", as_object),
)  # fmt: skip
ANSWER, THOUGHT, FREE = "edgespec_answer", "edgespec_thought", "edgespec_free"  # rules that no user's grammar has
# In a Lark grammar: a string, a comment or a regular expression; or, as group 1, the rule `start`.
LARK_START = re.compile(r'"(?:\\.|[^"\\])*"|//[^\n]*|#[^\n]*|/(?:\\.|[^/\\\n])+/|\b(start)\b')
THINKING = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>"))


def form_of(vocab: Vocab) -> Form | None:
    """How this model writes calls; None: its template shows no tools, or in no form that is known here."""
    template = vocab.chat_template or ""
    return next((form for form in FORMS if form.seen in template), None) if "tools" in template else None


def thinking_of(vocab: Vocab) -> tuple[str, str] | None:
    """Between which markers this model thinks; None: it does not."""
    template = vocab.chat_template or ""
    return next((pair for pair in THINKING if pair[1] in template), None)


def shown_ids(vocab: Vocab, markers: Sequence[str]) -> frozenset[int]:
    """Control tokens among the markers: a text does not show them unless it is told to."""
    ids = [vocab.encode(marker, add_bos=False, parse_special=True) for marker in markers]
    return frozenset(found[0] for found in ids if len(found) == 1 and not vocab.token_bytes(found[0]))


def begins_inside(vocab: Vocab, prompt_ids: Sequence[int], thinking: tuple[str, str]) -> bool:
    """Whether the prompt ends with the marker that opens the thinking."""
    tail = [
        vocab.token_bytes(token).decode("utf-8", "replace") or vocab.token_text(token) for token in prompt_ids[-12:]
    ]
    return "".join(tail).rstrip().endswith(thinking[0])


def after_thought(grammar: Grammar, thinking: tuple[str, str], inside: bool) -> Grammar:
    """The grammar of an answer that may be thought about before: what is thought is free.

    Args:
        grammar: of the answer itself.
        thinking: the markers.
        inside: the prompt has opened the thinking already.
    """
    if grammar.kind == "json_schema":
        answer = f"{ANSWER}: %json {grammar.text}"
    elif grammar.kind == "regex":
        answer = f"{ANSWER}: /" + re.sub(r"(?<!\\)/", r"\\/", grammar.text) + "/"
    else:
        answer = LARK_START.sub(lambda found: ANSWER if found[1] else found[0], grammar.text)
    close = re.escape(thinking[1]).replace("/", r"\/")
    start = f"{THOUGHT} {ANSWER}" if inside else f"({json.dumps(thinking[0])} {THOUGHT})? {ANSWER}"
    return lark(f"start: {start}\n{THOUGHT}: {FREE} /\\s{{0,2}}/\n{FREE}[lazy]: /(.|\\n)*{close}/\n{answer}")
