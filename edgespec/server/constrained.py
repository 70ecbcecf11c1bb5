"""What an answer must look like: a call in the model's form by the tool's schema, or what comes behind a thought.

Arguments that are JSON follow the schema wholly. In markup each value does, but strings are free text up to the marker
that follows: a model that means a pattern or a length is not held to it there.
"""

import json
import re
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any

from edgespec.errors import UsageError
from edgespec.loop.backend import Vocab
from edgespec.loop.grammar import Grammar, lark
from edgespec.server.call_formats import QUOTE, Form, control_tokens, parts_of

PLACE = re.compile(r"\{(line|name|quoted|number|id|arguments|braces|pairs|key|value)\}")
# With a space behind commas and colons, as templates show it.
SPACED = {"x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}}
ANYWHERE = {"number": "/[0-9]{1,3}/", "id": "/[a-zA-Z0-9]{9}/", "line": '"\\n"?'}
ANY_TEXT = r"/(.|\n)*/"  # without control tokens
KEY = r"/[^:,{}\[\]<>\s]+/"
ANSWER, THOUGHT, FREE = "edgespec_answer", "edgespec_thought", "edgespec_free"  # rules that no user's grammar has
# In a Lark grammar: a string, a comment or a regular expression; or, as group 1, the rule `start`.
LARK_START = re.compile(r'"(?:\\.|[^"\\])*"|//[^\n]*|#[^\n]*|/(?:\\.|[^/\\\n])+/|\b(start)\b')


def call_grammar(vocab: Vocab, form: Form, functions: Sequence[Mapping[str, Any]]) -> Grammar:
    """Texts that are one call of one of the functions.

    Args:
        vocab: the model's, by which markers may be control tokens.
        form: how calls are written.
        functions: name, and parameters (a JSON schema), of each.

    Raises:
        UsageError: the parameters are no JSON schema of an object.
    """
    rules = Rules(vocab)
    try:
        calls = [_call(rules, form, function) for function in functions]
    except (TypeError, ValueError, AttributeError, LookupError, RecursionError) as error:
        raise UsageError(f"tools: the parameters are no JSON schema: {error!r}") from error
    return lark("\n".join([f"start: {' | '.join(calls)}", *rules.lines]))


def _call(rules: "Rules", form: Form, function: Mapping[str, Any]) -> str:
    name, schema = function["name"], function.get("parameters") or {}
    if not isinstance(schema, dict) or schema.get("type", "object") != "object":
        raise UsageError(f"tools: the parameters of {name!r} are no object's schema")
    schema = {"type": "object", **schema}
    places = {"name": string(name), "quoted": string(json.dumps(name, ensure_ascii=False))}
    places |= ANYWHERE
    if "{arguments}" in form.call:
        places["arguments"] = rules.json(schema)
    if "{braces}" in form.call:
        places["braces"] = in_braces(rules, {"properties": {}, **schema})
    if "{pairs}" in form.call:
        places["pairs"] = " ".join(_pairs(rules, form.pair, schema))
    return rules.add(rules.filled(form.call, places))


def _pairs(rules: "Rules", pair: str, schema: Mapping[str, Any]) -> list[str]:
    """Terms for each parameter, in the schema's order."""
    found, (before, after) = list[str](), pair.split("{value}")
    for key, value in schema.get("properties", {}).items():
        places = {"key": string(key), **ANYWHERE}
        if values := allowed(resolved(value, schema)):
            words = [string(v if isinstance(v, str) else json.dumps(v, ensure_ascii=False)) for v in values]
            terms = rules.filled(before, places), f"({' | '.join(words)})", rules.filled(after, places)
        elif is_text(value, schema):
            marker = PLACE.split(after)[0].strip("\n")  # a new line less than the form has is no reason to go on
            behind = after[after.index(marker) + len(marker) :]
            terms = rules.filled(before, places), rules.text_until(marker), rules.filled(behind, places)
        else:
            terms = rules.filled(before, places), rules.json(within(schema, value)), rules.filled(after, places)
        one = " ".join(filter(None, terms))
        found.append(one if key in schema.get("required", ()) else f"({one})?")
    return found


class Rules:
    """A Lark grammar as it grows."""

    def __init__(self, vocab: Vocab) -> None:
        self.lines: list[str] = []
        self._vocab = vocab
        self._any = ""  # the rule of any value in braces

    def add(self, terms: str, about: str = "") -> str:
        """A new rule's name."""
        name = f"r{len(self.lines)}"
        self.lines.append(f"{name}{about}: {terms}")
        return name

    def json(self, schema: Mapping[str, Any]) -> str:
        """JSON by a schema."""
        return self.add(f"%json {json.dumps({**schema, **SPACED})}")

    def filled(self, text: str, places: Mapping[str, str]) -> str:
        """A text with something in its places."""
        pieces = PLACE.split(text)
        return " ".join(places[piece] if i % 2 else self.spelled(piece) for i, piece in enumerate(pieces) if piece)

    def spelled(self, text: str) -> str:
        """A text of which a part may be control tokens, which have no bytes."""
        control = control_tokens(self._vocab, text)
        return " ".join(f"<[{control[part]}]>" if part in control else string(part) for part in parts_of(text))

    def text_until(self, marker: str) -> str:
        """Free text, and the marker that ends it."""
        if control_tokens(self._vocab, marker):  # which no text has
            return f"{self.add(ANY_TEXT)} {self.spelled(marker)}"
        return self.add(f"/(.|\\n)*{escaped(marker)}/", "[lazy]")

    def any_value(self) -> str:
        """Any value in Gemma's braces."""
        if not self._any:
            self._any, quote = f"r{len(self.lines)}", self.spelled(QUOTE)
            self.lines.append("")  # it names itself
            text, one = f"{quote} {self.text_until(QUOTE)}", f'{KEY} ":" {self._any}'
            some = f'"{{" ({one} ("," {one})*)? "}}" | "[" ({self._any} ("," {self._any})*)? "]"'
            plain = self.json({"type": ["number", "boolean", "null"]})
            self.lines[int(self._any[1:])] = f"{self._any}: {text} | {some} | {plain}"
        return self._any


def in_braces(rules: Rules, schema: Any) -> str:
    """A value as Gemma 4 writes it: {key:value}, without quotation marks but the token <|"|> around strings.

    Of the schema types, properties, items and enum count. Keys that are required come first.
    """
    quote, kind = rules.spelled(QUOTE), schema.get("type") if isinstance(schema, dict) else None
    if values := allowed(schema):
        spelled = [f"{quote} {string(v)} {quote}" if isinstance(v, str) else string(json.dumps(v)) for v in values]
        return f"({' | '.join(spelled)})"
    if kind == "object" and "properties" in schema:
        return _object(rules, schema)
    if kind == "array" and "items" in schema:
        item = rules.add(in_braces(rules, schema["items"]))
        return f'"[" ({item} ("," {item})*)? "]"'
    if kind == "string":
        return f"{quote} {rules.text_until(QUOTE)}"
    if kind in ("integer", "number", "boolean", "null"):
        return rules.json({"type": kind})
    return rules.any_value()


def _object(rules: Rules, schema: Mapping[str, Any]) -> str:
    required = [key for key in schema["properties"] if key in schema.get("required", ())]
    others = [key for key in schema["properties"] if key not in required]
    one = {key: f"{string(key + ':')} {in_braces(rules, value)}" for key, value in schema["properties"].items()}

    def after(keys: Sequence[str]) -> str:
        return " ".join(f'("," {one[key]})?' for key in keys)

    if required:
        members = ' "," '.join(one[key] for key in required) + " " + after(others)
    else:  # any may be the first, or none
        starts = [f"{one[key]} {after(others[i + 1 :])}" for i, key in enumerate(others)]
        members = f"({' | '.join(starts)})?" if starts else ""
    return f'"{{" {members} "}}"'


def is_text(schema: Any, root: Mapping[str, Any]) -> bool:
    """Whether a parameter may be any text, which markup has without quotation marks."""
    schema = resolved(schema, root)
    kind = schema.get("type") if isinstance(schema, dict) else None
    if kind is None and isinstance(schema, dict) and (branches := schema.get("anyOf") or schema.get("oneOf")):
        return any(is_text(branch, root) for branch in branches)
    return kind in (None, "string") or (isinstance(kind, list) and "string" in kind)


def resolved(schema: Any, root: Mapping[str, Any]) -> Any:
    """What a schema refers to, within the whole; else itself. Raises KeyError, TypeError: there is no such."""
    while isinstance(schema, dict) and str(reference := schema.get("$ref", "")).startswith("#/"):
        schema = reduce(lambda inner, key: inner[key], reference.removeprefix("#/").split("/"), root)
        root = {}  # a chain is an error: it may be a circle
    return schema


def allowed(schema: Any) -> list[Any]:
    """The values that a schema lists; none: it lists none."""
    if not isinstance(schema, dict):
        return []
    listed = schema.get("enum")
    return [schema["const"]] if "const" in schema else listed if isinstance(listed, list) else []


def within(root: Mapping[str, Any], schema: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter's schema, with what it may refer to."""
    return {**{name: root[name] for name in ("$defs", "definitions") if name in root}, **schema}


def string(text: str) -> str:
    """A text as a Lark grammar has it."""
    return json.dumps(text, ensure_ascii=False)


def escaped(text: str) -> str:
    """A text in one of its regular expressions."""
    return re.escape(text).replace("/", r"\/")


def after_thought(
    vocab: Vocab, grammar: Grammar, thinking: tuple[str, str], inside: bool, opening: str = ""
) -> Grammar:
    """The grammar of an answer that may be thought about before: what is thought is free.

    Args:
        vocab: the model's.
        grammar: of the answer itself.
        thinking: the markers.
        inside: the prompt has opened the thinking already.
        opening: what stands before the answer itself.
    """
    if grammar.kind == "json_schema":
        answer = f"{ANSWER}: %json {grammar.text}"
    elif grammar.kind == "regex":
        answer = f"{ANSWER}: /" + re.sub(r"(?<!\\)/", r"\\/", grammar.text) + "/"
    else:
        answer = LARK_START.sub(lambda found: ANSWER if found[1] else found[0], grammar.text)
    rules = Rules(vocab)
    if control_tokens(vocab, thinking[1]):  # which no text has
        free = f"{FREE}: {ANY_TEXT}\n{THOUGHT}: {FREE} {rules.spelled(thinking[1])} /\\s{{0,2}}/"
    else:
        free = f"{FREE}[lazy]: /(.|\\n)*{escaped(thinking[1])}/\n{THOUGHT}: {FREE} /\\s{{0,2}}/"
    behind = f"{rules.spelled(opening)} {ANSWER}" if opening else ANSWER
    start = f"{THOUGHT} {behind}" if inside else f"({rules.spelled(thinking[0])} {THOUGHT})? {behind}"
    return lark(f"start: {start}\n{free}\n{answer}")
