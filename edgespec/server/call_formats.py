"""Formats of tool calls, found by a model's chat template; a new one is an entry of `FORMATS`."""

import json
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from edgespec.server.begun_calls import (
    MOST_HEAD,
    UNKNOWN,
    BracesReader,
    JsonReader,
    Markup,
    MarkupReader,
    Reader,
    past,
)
from edgespec.server.schema import Unfinished, json_at, strict_json
from edgespec.server.tool_calls import Call, Parameters

BARE = "{"  # of a call without a marker
# A call as JSON, up to its arguments.
OBJECT_HEAD = (
    r'\{\s*(?:"(?:type|id)"\s*:\s*"[^"\\]*"\s*,\s*)*"name"\s*:\s*"([^"\\]*)"\s*,\s*"(?:arguments|parameters)"\s*:'
)
OBJECTS_BETWEEN = r"[\s\[\],;}]*"
OBJECT = re.compile(rf"{OBJECT_HEAD}\s*")


read_objects = partial(JsonReader, OBJECTS_BETWEEN, OBJECT_HEAD)


@dataclass(frozen=True, slots=True)
class CallFormat:
    """The format of a call between two markers.

    Attributes:
        parse: reads the calls between two markers; raises ValueError if they are none, and Unfinished if the second
            marker may be part of a value.
        seen: all of these are in the chat template; none: in any.
        open: first markers; BARE is part of the call, so `parse` gets it, and counts only where an answer begins.
        close: second marker; "": the end of the answer.
        call: a call as this model writes it: see `FORMATS`.
        pair: a parameter in it.
        inner: more markers, between the two.
        reader: reads the calls between two markers while they are written.
        heads: what a call begins with that lacks its first marker; {name} is the function's name.
        frame: beginning and end of `call` that several calls have in common.
        between: stands between calls; None: an answer has one at most.
    """

    seen: tuple[str, ...]
    open: tuple[str, ...]
    close: str
    parse: Callable[[str, Parameters], list[Call]]
    call: str
    pair: str = ""
    inner: tuple[str, ...] = ()
    reader: Callable[[Parameters], Reader] = read_objects
    heads: tuple[str, ...] = ()
    frame: tuple[str, str] = ("", "")
    between: str | None = "\n"

    @property
    def is_generic(self) -> bool:
        """The chat template shows neither tools nor calls in a known format: they are part of texts."""
        return not self.seen

    @property
    def markers(self) -> list[str]:
        return [*self.open, *filter(None, [self.close]), *self.inner]

    @property
    def last(self) -> str:
        """Marker that ends the last call, and stands before the second marker."""
        return self.inner[-1] if self.close and self.inner and "{braces}" not in self.call else ""

    @property
    def shows_its_end(self) -> bool:
        """A call that is cut off cannot look like a whole one, also where its second marker is missing."""
        return not self.call.removesuffix(self.close).endswith("{pairs}")

    def marked(self) -> "CallFormat":
        """With a marker before a call, which tells it apart from JSON: llguidance's lexer never goes back."""
        if BARE not in self.open:
            return self
        return replace(self, call=self.open[0] + self.call, frame=(self.open[0], ""))


BARE_HEADS = '{"name":', '{"type":"function","name":'
# Around JSON that is a call though it lacks the model's markers; the longer ones first.
FENCES = ["```json", "```xml", "```"]
TAGS = [f"<{name}>" for name in ("tool_call", "function_call", "tools", "tool", "response", "json", "JSON", "xml")]


def begins_bare(text: str, names: Collection[str]) -> bool | None:
    """True if `text` begins a call of one of these tools without a marker; None if it may do so."""
    spaceless = without_spaces(text[:MOST_HEAD])
    if not any(head.startswith(spaceless) or spaceless.startswith(head) for head in BARE_HEADS):
        return False
    starts = [
        f'{head}{without_spaces(json.dumps(name, ensure_ascii=False))},"{arguments}":{{'
        for head in BARE_HEADS
        for name in names
        for arguments in ("parameters", "arguments")
    ]
    if any(map(spaceless.startswith, starts)):
        return True
    return None if len(text) <= MOST_HEAD and any(start.startswith(spaceless) for start in starts) else False


def begins_wrapped(text: str, names: Collection[str], markers: Collection[str]) -> tuple[bool | None, int]:
    """As `begins_bare`, for JSON that may stand in a list, between tags, and in a fence; and where it begins.

    Tags that are the model's own `markers` are none of these.
    """
    start = at = len(text) - len(text.lstrip())
    for wraps in (FENCES, [tag for tag in TAGS if tag not in markers], ["["]):
        rest = text[at : at + MOST_HEAD]
        if any(len(rest) < len(wrap) and wrap.startswith(rest) for wrap in wraps):
            return (None if names else False), start
        if found := next(filter(rest.startswith, wraps), ""):
            rest, start = rest[len(found) :], at
            at += len(found) + len(rest) - len(rest.lstrip())
    return begins_bare(text[at:], names), start if text[start] == "[" else at


def without_spaces(text: str) -> str:
    return "".join(text.split())


def made(name: Any, arguments: Any, written: str = "") -> Call:
    """A call with these arguments, as the model has `written` them in JSON."""
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        raise ValueError("not a call")
    return Call(name, written or json.dumps(arguments, ensure_ascii=False))


def some(calls: list[Call]) -> list[Call]:
    """Raises ValueError: there is none."""
    if not calls:
        raise ValueError("not a call")
    return calls


def as_object(text: str, parameters: Parameters) -> list[Call]:
    """{"name": "f", "arguments": {}}, several of such, or a list; Llama says "parameters", and ; between calls."""
    calls, at = list[Call](), past(BETWEEN, text, 0)
    while at < len(text):
        found, end = json_at(text, at)
        if not isinstance(found, dict):
            raise ValueError("not a call")
        arguments, written = found.get("arguments", found.get("parameters", {})), ""
        if head := OBJECT.match(text, at):
            same, stop = json_at(text, head.end())
            written = text[head.end() : stop] if same == arguments else ""
        calls.append(made(found.get("name"), arguments, written))
        at = past(BETWEEN, text, end)
    return some(calls)


BETWEEN = re.compile(r"[\s\[\],;]*")


def as_mistral(text: str, parameters: Parameters) -> list[Call]:
    """[{"name": "f"}], or f[ARGS]{}, each after a marker."""
    if text.lstrip().startswith(("[{", "{")):
        return as_object(text, parameters)
    calls, at = list[Call](), past(MISTRAL_NEXT, text, 0)
    while at < len(text):
        if not (head := MISTRAL_HEAD.match(text, at)):
            raise ValueError("not a call")
        (arguments, at), start = json_at(text, head.end()), head.end()
        calls.append(made(head[1].strip(), arguments, text[start:at].strip()))
        at = past(MISTRAL_NEXT, text, at)
    return some(calls)


MISTRAL_NEXT = re.compile(r"(?:\s*\[TOOL_CALLS\])*\s*")
MISTRAL_HEAD = re.compile(r"([^\[]+)(?:\[CALL_ID\][^\[]*)?\[ARGS\]")


def in_markup(markup: Markup) -> dict[str, Any]:
    """Parser and reader of markup."""

    def ends(closing: str, opening: str) -> str:
        return rf"{closing}(?=\s*(?:{opening}|\Z))" if opening else r"\Z"

    pair, function = (
        (markup.key, ends(markup.closing, markup.opening)),
        (markup.name, ends(markup.end, markup.next)),
    )

    def parse(text: str, parameters: Parameters) -> list[Call]:
        calls = list[Call]()
        for name, body in between(text, *function):
            tool = parameters.get(name.strip(), UNKNOWN)
            arguments = {
                key: tool.properties.get(key, UNKNOWN).value_of(value.removeprefix("\n").removesuffix("\n"))
                for key, value in between(body, *pair)
            }
            calls.append(made(name.strip(), arguments))
        return some(calls)

    return {"parse": parse, "reader": partial(MarkupReader, markup)}


def between(text: str, begin: str, end: str) -> Iterator[tuple[str, str]]:
    """(group 1 of `begin`, the text up to the next `end`) of each match of `begin`."""
    at = 0
    while begun := re.compile(begin, re.DOTALL).search(text, at):
        if not (ended := re.compile(end).search(text, begun.end())):
            raise Unfinished("a value has no end")
        yield begun[1], text[begun.end() : ended.start()]
        at = ended.end()


def in_headed_json(head: str, end: str) -> dict[str, Any]:
    """Parser and reader of JSON behind a head; group 1 of the regular expression `head` is the function's name."""

    def parse(text: str, parameters: Parameters) -> list[Call]:
        calls, at = list[Call](), 0
        while begun := re.compile(head).search(text, at):
            arguments, at = json_at(text, begun.end())
            if not (ended := re.compile(end).match(text, at)):
                raise ValueError("not a call")
            calls.append(made(begun[1].strip(), arguments, text[begun.end() : at].strip()))
            at = ended.end()
        return some(calls)

    return {"parse": parse, "reader": partial(JsonReader, ".*?", head)}


def as_braces(text: str, parameters: Parameters) -> list[Call]:
    """call:f{key:value} with strings between tokens <|"|>, as Gemma 4 writes it: JSON but for strings and keys."""
    if text.count(QUOTE) % 2:
        raise Unfinished("a string has no end")
    name, brace, rest = text.strip().removeprefix("call:").partition("{")
    written = BRACED.sub(_as_json, brace + rest)
    return [made(name.strip(), strict_json(written), written.strip())]


def _as_json(found: re.Match[str]) -> str:
    if found["text"] is not None:
        return json.dumps(found["text"], ensure_ascii=False)
    word = (found["word"] or "").rstrip()
    if found["colon"]:
        return json.dumps(word, ensure_ascii=False) + ":"
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
    inner=("[ARGS]", "[CALL_ID]"), between="",
    reader=partial(JsonReader, r"\s*", r"(?:\[TOOL_CALLS\]\s*)*" + MISTRAL_HEAD.pattern),
)  # fmt: skip
GLM = CallFormat(
    ("<arg_key>",), HERMES.open, HERMES.close,
    call="<tool_call>{name}{line}{pairs}</tool_call>",
    pair="<arg_key>{key}</arg_key>{line}<arg_value>{value}</arg_value>{line}",
    inner=("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    **in_markup(Markup(
        r"<arg_key>(?>(.*?)</arg_key>)\s*<arg_value>", "<arg_key>", "</arg_value>", r"\A\s*([^\s<]+)", "", HERMES.close,
    )),
)  # fmt: skip
DEEPSEEK = CallFormat(
    (DEEPSEEK_OPEN,), (DEEPSEEK_OPEN,), DEEPSEEK_CLOSE,
    call=f"{DEEPSEEK_OPEN}<｜tool▁call▁begin｜>{{name}}<｜tool▁sep｜>{{arguments}}<｜tool▁call▁end｜>{DEEPSEEK_CLOSE}",
    inner=DEEPSEEK_INNER, frame=(DEEPSEEK_OPEN, DEEPSEEK_CLOSE), between="",
    heads=("<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n"),
    **in_headed_json(
        r"<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?([^<\n]+)(?:<｜tool▁sep｜>|\n```json)",
        r"\s*(?:```)?<｜tool▁call▁end｜>",
    ),
)  # fmt: skip
QWEN = CallFormat(
    ("<function=", "<parameter="), HERMES.open, HERMES.close,
    call="<tool_call>\n<function={name}>\n{pairs}</function>\n</tool_call>",
    pair="<parameter={key}>\n{value}\n</parameter>\n",
    heads=("<function={name}>",),
    **in_markup(Markup(
        r"<parameter=([^>]+)>", "<parameter=", "</parameter>", r"<function=([^>]+)>", "<function=", "</function>",
    )),
)  # fmt: skip
LLAMA = CallFormat(
    ("<|python_tag|>",), ("<|python_tag|>", BARE), "", as_object, '{"name": {quoted}, "parameters": {arguments}}',
    between="; ",
)  # fmt: skip
# The first with all its marks in the template is taken. Fields of `call`: {name} and {quoted}, the function's;
# {arguments}, JSON; {braces}, the same in Gemma's notation; {pairs}, each by `pair` with its {key} and {value};
# {number} and {id}, any; {line}, optional.
FORMATS = (
    CallFormat(
        ("<minimax:tool_call>",), ("<minimax:tool_call>",), "</minimax:tool_call>",
        call='<minimax:tool_call>\n<invoke name="{name}">\n{pairs}</invoke>\n</minimax:tool_call>',
        pair='<parameter name="{key}">{value}</parameter>\n',
        frame=("<minimax:tool_call>\n", "\n</minimax:tool_call>"), heads=('<invoke name="{name}">',),
        **in_markup(Markup(
            r'<parameter name="([^"]+)">', "<parameter name=", "</parameter>",
            r'<invoke name="([^"]+)">', "<invoke name=", "</invoke>",
        )),
    ),
    CallFormat(
        ("<|tool_calls_section_begin|>",), ("<|tool_calls_section_begin|>",), "<|tool_calls_section_end|>",
        call="<|tool_calls_section_begin|><|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>"
        "{arguments}<|tool_call_end|><|tool_calls_section_end|>",
        inner=KIMI_INNER, frame=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"), between="",
        heads=("<|tool_call_begin|>functions.{name}:", "<|tool_call_begin|>{name}<"),
        **in_headed_json(
            r"<\|tool_call_begin\|>\s*+(?:functions\.)?([^<]+?)(?::\d+)?\s*<\|tool_call_argument_begin\|>",
            r"\s*<\|tool_call_end\|>",
        ),
    ),
    replace(
        DEEPSEEK, seen=(DEEPSEEK_OPEN, "```json"), between="\n",
        call=f"{DEEPSEEK_OPEN}<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{name}}\n```json\n{{arguments}}\n```<｜tool▁call▁end｜>{DEEPSEEK_CLOSE}",
    ),
    DEEPSEEK,
    replace(MISTRAL, seen=("[TOOL_CALLS]", "[CALL_ID]"), call="[TOOL_CALLS]{name}[CALL_ID]{id}[ARGS]{arguments}"),
    MISTRAL,
    replace(
        MISTRAL, seen=("[TOOL_CALLS]",), reader=read_objects, frame=("[TOOL_CALLS][", "]"), between=", ",
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
        frame=("<tool_calls>[", "]</tool_calls>"), between=", ",
    ),
    HERMES,
    LLAMA,
    replace(LLAMA, seen=('{"name": function name, "parameters": dictionary',)),
    CallFormat(
        ("<|tool_call>call:",), ("<|tool_call>",), "<tool_call|>", as_braces,
        "<|tool_call>call:{name}{braces}<tool_call|>", inner=(QUOTE,), between="",
        reader=partial(BracesReader, BRACED, QUOTE, _as_json),
    ),
    CallFormat(  # which `channels.py` reads
        ("<|channel|>analysis<|message|>", "<|channel|>final<|message|>"), (), "", as_object,
        "<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}", between=None,
    ),
)  # fmt: skip
GENERIC = replace(HERMES, seen=())  # `prompts.calls_as_text` tells models of it
NO_CALLS = replace(HERMES, open=(), close="")  # of answers without tools
# Marks of formats that only look like one of them.
LOOK_ALIKES = ("]<]minimax[>[", "ONLY reply in the following format:\\n<{start_tag}={function_name}>")
