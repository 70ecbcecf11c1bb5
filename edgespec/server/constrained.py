"""Grammars of answers: a call in the model's format by the tool's schema, or an answer after a thought.

JSON arguments follow the schema wholly. In markup strings are free up to the next marker: pattern and length do not
count.
"""

import json
import re
from collections.abc import Mapping, Sequence

from edgespec.errors import UsageError
from edgespec.loop.backend import Vocab
from edgespec.loop.grammar import MOST_BYTES, Grammar, json_text, lark, too_long
from edgespec.server.call_formats import QUOTE, CallFormat
from edgespec.server.schema import Schema, spelled
from edgespec.server.tool_calls import Tool

MARKER = re.compile(r"(<[^<>\s]+>|\[/?[A-Z_]+\])")
PLACE = re.compile(r"\{(line|name|quoted|number|id|arguments|braces|pairs|key|value)\}")
# Spaces after commas and colons, as templates show them.
SPACED = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
ANYWHERE = {"number": "/[0-9]{1,3}/", "id": "/[a-zA-Z0-9]{9}/", "line": '"\\n"?'}
MOST_WORK = 2**21  # parts of schemas that are copied, and characters that they become
ANY_TEXT = r"/(.|\n)*/"
KEY = r"/[^:,{}\[\]<>\s]+/"
KINDS = ("array", "boolean", "integer", "null", "number", "object", "string")
ANYTHING = Schema.anything()
ANSWER, CALL, THOUGHT, FREE = "edgespec_answer", "edgespec_call", "edgespec_thought", "edgespec_free"
# A string, comment or regular expression of a Lark grammar; or, as group 1, the rule `start`.
# Unclosed ones match, too: a new search from each mark within them would take quadratic time.
LARK_START = re.compile(r'"(?:\\.|[^"\\\n])*"?|//[^\n]*|#[^\n]*|/(?:\\.|[^/\\\n])+/?|\b(start)\b')


def call_grammar(vocab: Vocab, calls: CallFormat, tools: Sequence[Tool], *, several: bool = False) -> Grammar:
    """The grammar of a call of one of the tools.

    Args:
        vocab: the model's, by which markers may be control tokens.
        calls: how the model writes them.
        tools: that may be called.
        several: further calls may follow.

    Raises:
        UsageError: parameters are no JSON schema of an object.
    """
    rules = Rules(vocab)
    try:
        one = rules.add(" | ".join(rules.add(_call(rules, calls, tool)) for tool in tools))
    except RecursionError as error:
        raise UsageError("tools: the parameters' schema is too deep") from error
    more = f"({rules.spelled(calls.between)} {one})*" if several and calls.between is not None else ""
    first, last = map(rules.spelled, calls.frame)
    return lark("\n".join([f"start: {first} {one} {more} {last}", *rules.lines]))


def _call(rules: "Rules", calls: CallFormat, tool: Tool) -> str:
    places = {"name": string(tool.name), "quoted": string(json.dumps(tool.name, ensure_ascii=False)), **ANYWHERE}
    if "{arguments}" in calls.call:
        places["arguments"] = rules.json(tool.schema)
    if "{braces}" in calls.call:
        places["braces"] = rules.members(tool.schema)
    if "{pairs}" in calls.call:
        places["pairs"] = " ".join(_pairs(rules, calls.pair, tool.schema))
    return rules.filled(calls.call.removeprefix(calls.frame[0]).removesuffix(calls.frame[1]), places)


def _pairs(rules: "Rules", pair: str, schema: Schema) -> list[str]:
    found, (before, after) = list[str](), pair.split("{value}")
    for key, value in schema.properties.items():
        places = {"key": string(key), **ANYWHERE}
        behind = after
        if value.values:
            term = f"({' | '.join(string(spelled(one)) for one in value.values)})"
        elif value.is_text:
            marker = PLACE.split(after)[0].strip("\n")
            term, behind = rules.text_until(marker), after[after.index(marker) + len(marker) :]
        else:
            term = rules.json(value)
        one = rules.add(" ".join(filter(None, (rules.filled(before, places), term, rules.filled(behind, places)))))
        found.append(one if key in schema.required else f"{one}?")
    return found


class Rules:
    """Rules of a grammar; equal ones are one."""

    def __init__(self, vocab: Vocab) -> None:
        self.lines: list[str] = []
        self._vocab = vocab
        self._known: dict[str, str] = {}
        self._values: dict[Schema, str] = {}
        self._room = MOST_BYTES
        self._work = MOST_WORK

    def add(self, terms: str, about: str = "") -> str:
        """The name of a new rule, or of an equal one. Raises UsageError: the grammar becomes too long."""
        if (body := f"{about}: {terms}") not in self._known:
            self._known[body] = name = self._new_name()
            self._define(name, body)
        return self._known[body]

    def _new_name(self) -> str:
        self.lines.append("")
        return f"r{len(self.lines) - 1}"

    def _define(self, name: str, body: str) -> None:
        self.lines[int(name[1:])] = name + body
        self._room -= len(name + body)
        if self._room < 0:
            raise too_long()

    def _count(self, work: int = 1) -> None:
        """Also of equal rules, which take no room."""
        self._work -= work
        if self._work < 0:
            raise UsageError(f"tools: the schemas of their parameters have more than {MOST_WORK} parts and characters")

    def json(self, schema: Schema) -> str:
        guidance = {**SPACED, "lenient": not schema.strict}
        text = json_text({**schema.json(self._count), "x-guidance": guidance})
        self._count(len(text))
        return self.add(f"%json {text}")

    def filled(self, text: str, places: Mapping[str, str]) -> str:
        pieces = PLACE.split(text)
        return " ".join(places[piece] if i % 2 else self.spelled(piece) for i, piece in enumerate(pieces) if piece)

    def spelled(self, text: str) -> str:
        control = control_tokens(self._vocab, text)
        return " ".join(f"<[{control[part]}]>" if part in control else string(part) for part in parts_of(text))

    def text_until(self, marker: str) -> str:
        if control_tokens(self._vocab, marker):
            return f"{self.add(ANY_TEXT)} {self.spelled(marker)}"
        return self.add(f"/(.|\\n)*{escaped(marker)}/", "[lazy]")

    def value(self, schema: Schema) -> str:
        """The rule of a value in Gemma 4's braces, by the schema's types, properties, items and enum."""
        if schema not in self._values:
            self._values[schema] = name = self._new_name()
            self._define(name, f": {self._terms(schema)}")
        return self._values[schema]

    def _terms(self, schema: Schema) -> str:
        if schema.values:
            quote = self.spelled(QUOTE)
            words = [
                f"{quote} {string(v)} {quote}" if isinstance(v, str) else string(spelled(v)) for v in schema.values
            ]
            return " | ".join(words)
        kinds = [kind for kind in KINDS if schema.types is None or kind in schema.types]
        return " | ".join(self._of_kind(kind, schema) for kind in kinds or KINDS)

    def _of_kind(self, kind: str, schema: Schema) -> str:
        if kind == "string":
            quote = self.spelled(QUOTE)
            return f"{quote} {self.text_until(QUOTE)}"
        if kind == "array":
            item = self.value(schema.items or ANYTHING)
            return f'"[" ({item} ("," {item})*)? "]"'
        if kind == "object" and schema.properties:
            return self.members(schema)
        if kind == "object":
            one = self.value(ANYTHING)
            return f'"{{" ({KEY} ":" {one} ("," {KEY} ":" {one})*)? "}}"'
        return self.add(f'%json {{"type": "{kind}"}}')

    def members(self, schema: Schema) -> str:
        """The rule of an object in braces: required keys first, each group in the schema's order."""
        one = {key: self.add(f"{string(key + ':')} {self.value(value)}") for key, value in schema.properties.items()}
        others = [key for key in one if key not in schema.required]
        behind = [""]
        for key in reversed(others):
            behind.insert(0, self.add(f'("," {one[key]})? {behind[0]}'))
        if len(others) < len(one):
            members = ' "," '.join(one[key] for key in one if key in schema.required) + f" {behind[0]}"
        else:
            starts = [f"{one[key]} {behind[i + 1]}" for i, key in enumerate(others)]
            members = f"({' | '.join(starts)})?" if starts else ""
        return f'"{{" {members} "}}"'


def string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def escaped(text: str) -> str:
    return re.escape(text).replace("/", r"\/")


def answer_or_call(answer: Grammar, call: Grammar) -> Grammar:
    return lark(f"start: {ANSWER} | {CALL}\n{started_by(ANSWER, answer)}\n{started_by(CALL, call)}")


def started_by(name: str, grammar: Grammar) -> str:
    """Lark rules of a grammar, the first of which is `name`."""
    if grammar.kind == "json_schema":
        return f"{name}: %json {grammar.text}"
    if grammar.kind == "regex":
        # A slash behind an escaped backslash is not escaped yet.
        return f"{name}: /" + re.sub(r"(\\.)|/", lambda found: found[1] or r"\/", grammar.text) + "/"
    return LARK_START.sub(lambda found: name if found[1] else found[0], grammar.text)


class ThoughtFirst:
    def __init__(self, vocab: Vocab, thinking: tuple[str, str], opening: str = "") -> None:
        """
        Args:
            vocab: the model's.
            thinking: the markers around a thought.
            opening: what stands before the answer itself.
        """
        rules = Rules(vocab)
        if control_tokens(vocab, thinking[1]):
            free = f"{FREE}: {ANY_TEXT}\n{THOUGHT}: {FREE} {rules.spelled(thinking[1])} /\\s{{0,2}}/"
        else:
            free = f"{FREE}[lazy]: /(.|\\n)*{escaped(thinking[1])}/\n{THOUGHT}: {FREE} /\\s{{0,2}}/"
        self._free, self._marker = free, rules.spelled(thinking[0])
        self._opening = f"{rules.spelled(opening)} {ANSWER}" if opening else ANSWER

    def before(
        self, grammar: Grammar, *, in_thought: bool, is_call: bool = False, call: Grammar | None = None
    ) -> Grammar:
        """A thought, then the answer by `grammar`, or a call.

        Args:
            grammar: of the answer itself.
            in_thought: the prompt has opened the thought already.
            is_call: the answer is a call, which has its own opening.
            call: of a call that may be made instead.
        """
        answer, behind = started_by(ANSWER, grammar), ANSWER if is_call else self._opening
        if call:
            answer, behind = f"{answer}\n{started_by(CALL, call)}", f"({behind} | {CALL})"
        start = f"{THOUGHT} {behind}" if in_thought else f"({self._marker} {THOUGHT})? {behind}"
        return lark(f"start: {start}\n{self._free}\n{answer}")


def parts_of(text: str) -> list[str]:
    return [part for part in MARKER.split(text) if part]


def control_tokens(vocab: Vocab, text: str) -> dict[str, int]:
    found = dict[str, int]()
    for part in parts_of(text):
        ids = vocab.encode(part, add_bos=False, parse_special=True)
        if len(ids) == 1 and not vocab.token_bytes(ids[0]):
            found[part] = ids[0]
    return found
