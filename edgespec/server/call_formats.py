"""Formats of tool calls, found by a model's chat template; a new one is an entry of `FORMATS`."""

import json
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

from edgespec.server.schema import Schema, Unfinished, json_at, strict_json
from edgespec.server.tool_calls import Call, Parameters


@dataclass(frozen=True, slots=True)
class CallFormat:
    """The format of a call between two markers.

    Attributes:
        parse: reads the calls between two markers; raises ValueError if they are none, and Unfinished if the second
            marker may be part of a value.
        seen: all of these are in the chat template.
        open: first markers; BARE is part of the call, so `parse` gets it, and counts only where an answer begins.
        close: second marker; "": the end of the answer.
        call: a call as this model writes it: see `FORMATS`.
        pair: a parameter in it.
        inner: more markers, between the two.
    """

    seen: tuple[str, ...]
    open: tuple[str, ...]
    close: str
    parse: Callable[[str, Parameters], list[Call]]
    call: str
    pair: str = ""
    inner: tuple[str, ...] = ()

    @property
    def is_markup(self) -> bool:
        return bool(self.pair)

    @property
    def is_json(self) -> bool:
        return self.parse is as_object

    @property
    def numbers_ids(self) -> bool:
        """Ids of calls are functions.NAME:NUMBER."""
        return "{number}" in self.call

    @property
    def markers(self) -> list[str]:
        return [*self.open, *filter(None, [self.close]), *self.inner]

    def marked(self) -> "CallFormat":
        """With a marker before a call, which tells it apart from JSON: llguidance's lexer never goes back."""
        return replace(self, call=self.open[0] + self.call) if BARE in self.open else self


UNKNOWN = Schema.anything()
BARE = "{"  # of a call without a marker
BARE_HEADS = '{"name":', '{"type":"function","name":'


def begins_bare(text: str, names: Collection[str]) -> bool | None:
    """True if `text` begins a call of one of these tools without a marker; None if it may do so."""
    spaceless = without_spaces(text)
    starts = [
        f'{head}{without_spaces(json.dumps(name, ensure_ascii=False))},"{arguments}":{{'
        for head in BARE_HEADS
        for name in names
        for arguments in ("parameters", "arguments")
    ]
    if any(map(spaceless.startswith, starts)):
        return True
    return None if any(start.startswith(spaceless) for start in starts) else False


def without_spaces(text: str) -> str:
    return "".join(text.split())


def made(name: Any, arguments: Any) -> Call:
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        raise ValueError("not a call")
    return Call(name, json.dumps(arguments, ensure_ascii=False))


def as_object(text: str, parameters: Parameters) -> list[Call]:
    """{"name": "f", "arguments": {}}, or a list of such; Llama says "parameters"."""
    found = strict_json(text)
    calls = found if isinstance(found, list) else [found]
    if not calls or not all(isinstance(call, dict) for call in calls):
        raise ValueError("not a call")
    return [made(call.get("name"), call.get("arguments", call.get("parameters", {}))) for call in calls]


def as_mistral(text: str, parameters: Parameters) -> list[Call]:
    """[{"name": "f"}], or f[ARGS]{}, each after a marker."""
    if text.lstrip().startswith(("[{", "{")):
        return as_object(text, parameters)
    calls, at = list[Call](), MISTRAL_NEXT.match(text).end()  # type: ignore[union-attr]  # it may be empty
    while at < len(text):
        if not (head := MISTRAL_HEAD.match(text, at)):
            raise ValueError("not a call")
        arguments, at = json_at(text, head.end())
        calls.append(made(head[1].strip(), arguments))
        at = MISTRAL_NEXT.match(text, at).end()  # type: ignore[union-attr]
    if not calls:
        raise ValueError("not a call")
    return calls


MISTRAL_NEXT = re.compile(r"(?:\s*\[TOOL_CALLS\])*\s*")
MISTRAL_HEAD = re.compile(r"([^\[]+)(?:\[CALL_ID\][^\[]*)?\[ARGS\]")


def markup_parser(pair: tuple[str, str], function: tuple[str, str]) -> Callable[[str, Parameters], list[Call]]:
    """A parser of markup.

    Args:
        pair: regular expressions of the begin and end of an argument; group 1 of the begin is the key.
        function: the same of a call; group 1 of the begin is the function's name.
    """

    def parse(text: str, parameters: Parameters) -> list[Call]:
        calls = list[Call]()
        for name, body in between(text, *function):
            tool = parameters.get(name.strip(), UNKNOWN)
            arguments = {
                key: tool.properties.get(key, UNKNOWN).value_of(value.removeprefix("\n").removesuffix("\n"))
                for key, value in between(body, *pair)
            }
            calls.append(made(name.strip(), arguments))
        if not calls:
            raise ValueError("not a call")
        return calls

    return parse


def between(text: str, begin: str, end: str) -> Iterator[tuple[str, str]]:
    """(group 1 of `begin`, the text up to the next `end`) of each match of `begin`."""
    at = 0
    while begun := re.compile(begin, re.DOTALL).search(text, at):
        if not (ended := re.compile(end).search(text, begun.end())):
            raise Unfinished("a value has no end")
        yield begun[1], text[begun.end() : ended.start()]
        at = ended.end()


def headed_json_parser(head: str, end: str) -> Callable[[str, Parameters], list[Call]]:
    """A parser of JSON behind a head; group 1 of the regular expression `head` is the function's name."""

    def parse(text: str, parameters: Parameters) -> list[Call]:
        calls, at = list[Call](), 0
        while begun := re.compile(head).search(text, at):
            arguments, at = json_at(text, begun.end())
            if not (ended := re.compile(end).match(text, at)):
                raise ValueError("not a call")
            calls.append(made(begun[1].strip(), arguments))
            at = ended.end()
        if not calls:
            raise ValueError("not a call")
        return calls

    return parse


def as_braces(text: str, parameters: Parameters) -> list[Call]:
    """call:f{key:value} with strings between tokens <|"|>, as Gemma 4 writes it: JSON but for strings and keys."""
    if text.count(QUOTE) % 2:
        raise Unfinished("a string has no end")
    name, brace, rest = text.strip().removeprefix("call:").partition("{")
    found = strict_json(BRACED.sub(_as_json, brace + rest))
    return [made(name.strip(), found)]


def _as_json(found: re.Match[str]) -> str:
    if found["text"] is not None:
        return json.dumps(found["text"])
    word = (found["word"] or "").rstrip()
    if found["colon"]:
        return json.dumps(word) + ":"
    return "null" if word == "None" else found["json"] or word  # as Gemma's template writes it


QUOTE = '<|"|>'
BRACED = re.compile(
    r"""<\|"\|>(?P<text>.*?)<\|"\|>
      | (?P<json>"(?:\\.|[^"\\])*")
      | (?P<word>[^\s{}\[\],:"][^{}\[\],:"]*+)(?P<colon>:)?  # a key, or a value; never read again from its middle
      | ,\s*(?=[}\]])  # a comma behind the last item, which JSON forbids
    """,
    re.DOTALL | re.VERBOSE,
)
KIMI_INNER = tuple(f"<|tool_call_{part}|>" for part in ("begin", "argument_begin", "end"))
DEEPSEEK_INNER = tuple(f"<｜tool▁{part}｜>" for part in ("call▁begin", "sep", "call▁end"))
DEEPSEEK_OPEN, DEEPSEEK_CLOSE = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
HERMES = CallFormat(
    ("<tool_call>",), ("<tool_call>",), "</tool_call>", as_object,
    '<tool_call>\n{"name": {quoted}, "arguments": {arguments}}\n</tool_call>',
)  # fmt: skip
MISTRAL = CallFormat(
    ("[TOOL_CALLS]", "[ARGS]"), ("[TOOL_CALLS]",), "", as_mistral, "[TOOL_CALLS]{name}[ARGS]{arguments}",
    inner=("[ARGS]", "[CALL_ID]"),
)  # fmt: skip
GLM = CallFormat(
    ("<arg_key>",), HERMES.open, HERMES.close,
    markup_parser(
        (r"<arg_key>(?>(.*?)</arg_key>)\s*<arg_value>", r"</arg_value>(?=\s*(?:<arg_key>|\Z))"),
        (r"\A\s*([^\s<]+)", r"\Z"),
    ),
    "<tool_call>{name}{line}{pairs}</tool_call>",
    "<arg_key>{key}</arg_key>{line}<arg_value>{value}</arg_value>{line}",
    ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)  # fmt: skip
DEEPSEEK = CallFormat(
    (DEEPSEEK_OPEN,), (DEEPSEEK_OPEN,), DEEPSEEK_CLOSE,
    headed_json_parser(
        r"<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?([^<\n]+)(?:<｜tool▁sep｜>|\n```json)",
        r"\s*(?:```)?<｜tool▁call▁end｜>",
    ),
    f"{DEEPSEEK_OPEN}<｜tool▁call▁begin｜>{{name}}<｜tool▁sep｜>{{arguments}}<｜tool▁call▁end｜>{DEEPSEEK_CLOSE}",
    inner=DEEPSEEK_INNER,
)  # fmt: skip
QWEN = CallFormat(
    ("<function=", "<parameter="), HERMES.open, HERMES.close,
    markup_parser(
        (r"<parameter=([^>]+)>", r"</parameter>(?=\s*(?:<parameter=|\Z))"),
        (r"<function=([^>]+)>", r"</function>(?=\s*(?:<function=|\Z))"),
    ),
    "<tool_call>\n<function={name}>\n{pairs}</function>\n</tool_call>",
    "<parameter={key}>\n{value}\n</parameter>\n",
)  # fmt: skip
LLAMA = CallFormat(
    ("<|python_tag|>",), ("<|python_tag|>", BARE), "", as_object, '{"name": {quoted}, "parameters": {arguments}}'
)
# The first with all its marks in the template is taken. Fields of `call`: {name} and {quoted}, the function's;
# {arguments}, JSON; {braces}, the same in Gemma's notation; {pairs}, each by `pair` with its {key} and {value};
# {number} and {id}, any; {line}, optional.
FORMATS = (
    CallFormat(
        ("<minimax:tool_call>",), ("<minimax:tool_call>",), "</minimax:tool_call>",
        markup_parser(
            (r'<parameter name="([^"]+)">', r"</parameter>(?=\s*(?:<parameter name=|\Z))"),
            (r'<invoke name="([^"]+)">', r"</invoke>(?=\s*(?:<invoke name=|\Z))"),
        ),
        '<minimax:tool_call>\n<invoke name="{name}">\n{pairs}</invoke>\n</minimax:tool_call>',
        '<parameter name="{key}">{value}</parameter>\n',
    ),
    CallFormat(
        ("<|tool_calls_section_begin|>",), ("<|tool_calls_section_begin|>",), "<|tool_calls_section_end|>",
        headed_json_parser(
            r"<\|tool_call_begin\|>\s*+(?:functions\.)?([^<]+?)(?::\d+)?\s*<\|tool_call_argument_begin\|>",
            r"\s*<\|tool_call_end\|>",
        ),
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>{arguments}"
        "<|tool_call_end|><|tool_calls_section_end|>",
        inner=KIMI_INNER,
    ),
    replace(
        DEEPSEEK, seen=(DEEPSEEK_OPEN, "```json"),
        call=f"{DEEPSEEK_OPEN}<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{name}}\n```json\n{{arguments}}\n```<｜tool▁call▁end｜>{DEEPSEEK_CLOSE}",
    ),
    DEEPSEEK,
    replace(MISTRAL, seen=("[TOOL_CALLS]", "[CALL_ID]"), call="[TOOL_CALLS]{name}[CALL_ID]{id}[ARGS]{arguments}"),
    MISTRAL,
    replace(
        MISTRAL, seen=("[TOOL_CALLS]",),
        call='[TOOL_CALLS][{"name": {quoted}, "arguments": {arguments}, "id": "{id}"}]',
    ),
    GLM,
    replace(
        QWEN, seen=("<seed:tool_call>", *QWEN.seen), open=("<seed:tool_call>",), close="</seed:tool_call>",
        call="<seed:tool_call>\n<function={name}>\n{pairs}</function>\n</seed:tool_call>",
        pair="<parameter={key}>{value}</parameter>\n",
    ),
    QWEN,
    CallFormat(  # Apriel
        ("<tool_calls>[",), ("<tool_calls>",), "</tool_calls>", as_object,
        '<tool_calls>[{"name": {quoted}, "arguments": {arguments}}]</tool_calls>',
    ),
    HERMES,
    LLAMA,
    replace(LLAMA, seen=('{"name": function name, "parameters": dictionary',)),
    CallFormat(
        ("<|tool_call>call:",), ("<|tool_call>",), "<tool_call|>", as_braces,
        "<|tool_call>call:{name}{braces}<tool_call|>", inner=(QUOTE,),
    ),
    CallFormat(  # which `channels.py` reads
        ("<|channel|>analysis<|message|>", "<|channel|>final<|message|>"), (), "", as_object,
        "<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}",
    ),
)  # fmt: skip
# Marks of formats that only look like one of them.
LOOK_ALIKES = ("]<]minimax[>[", "ONLY reply in the following format:\\n<{start_tag}={function_name}>")
