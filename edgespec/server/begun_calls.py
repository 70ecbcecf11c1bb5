"""Calls while a model writes them: a name, and arguments as far as they are certain.

A reader gets all that is there of a call, again and again as it grows. The last brace of arguments is never certain,
since what has begun may prove to be no call: then no client can have taken it for one.
"""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from edgespec.loop.text import overlap
from edgespec.server.schema import Schema, strict_json
from edgespec.server.tool_calls import Call, Parameters

MOST_HEAD = 1024  # characters before arguments
UNKNOWN = Schema.anything()
IN_STRING = re.compile(r'(?:[^"\\\x00-\x1f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*+')
HALF_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?\Z")
SPACE, WORD = re.compile(r"[ \t\n\r]*+"), re.compile(r"[-+.\w]*+")
SCALAR = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?|true|false|null", re.ASCII)
OPENING = {"}": "{", "]": "["}
WORDS = "w"
# States, by the next token, and the characters that begin one.
START, VALUE, FIRST_VALUE, KEY, FIRST_KEY, COLON, COMMA = range(7)
ALLOWED = ("{[", f'"{{[{WORDS}', f'"{{[{WORDS}]', '"', '"}', ":", ",}]")


def past(pattern: re.Pattern[str], text: str, at: int) -> int:
    """The end of what matches here, which may be nothing."""
    return pattern.match(text, at).end()  # type: ignore[union-attr]


class Reader(ABC):
    """
    Attributes:
        calls: that have begun; all but the last are complete.
        rest: where the last one begins.
    """

    def __init__(self, parameters: Parameters) -> None:
        """Args: parameters: of the tools that may be called."""
        self.calls = list[Call]()
        self.rest, self._parameters = 0, parameters

    @abstractmethod
    def read(self, text: str) -> None:
        """`text`: all that is there of the block."""

    def _write(self, more: Sequence[str]) -> None:
        """Add to the arguments of the only call."""
        self.calls[0] = replace(self.calls[0], arguments="".join([self.calls[0].arguments, *more]))


class JsonScan:
    """Finds the end of an object or list that begins at `start`.

    Attributes:
        at: up to here it is read, and JSON.
        broken: the next character cannot be JSON.
    """

    def __init__(self, start: int) -> None:
        self.start = self.at = start
        self.broken = False
        self._open = list[str]()  # brackets
        self._next, self._in_string, self._ended = START, False, False

    def end(self, text: str) -> int | None:
        before = -1
        while before < self.at < len(text) and not (self.broken or self._ended):
            before = self.at
            self._string(text) if self._in_string else self._token(text)
        return self.at if self._ended else None

    def _string(self, text: str) -> None:
        self.at = past(IN_STRING, text, self.at)
        if text[self.at : self.at + 1] == '"':
            self._in_string, self.at = False, self.at + 1
            self._next = COLON if self._next in (KEY, FIRST_KEY) else COMMA
        else:
            self.broken = self.at < len(text) and not HALF_ESCAPE.match(text, self.at)

    def _token(self, text: str) -> None:
        self.at = past(SPACE, text, self.at)
        if not (one := text[self.at : self.at + 1]):
            return
        kind = one if one in '"{}[]:,' else WORDS
        self.broken = kind not in ALLOWED[self._next] or (one in OPENING and self._open[-1] != OPENING[one])
        if self.broken:
            return
        if kind == WORDS:
            end = past(WORD, text, self.at)
            self.broken = end < len(text) and not SCALAR.fullmatch(text, self.at, end)
            if end < len(text) and not self.broken:  # else it may go on
                self.at, self._next = end, COMMA
            return
        self.at += 1
        if one == '"':
            self._in_string = True
        elif one in OPENING:
            self._open.pop()
            self._next, self._ended = COMMA, not self._open
        elif one in "{[":
            self._open.append(one)
            self._next = FIRST_KEY if one == "{" else FIRST_VALUE
        else:
            self._next = KEY if one == "," and self._open[-1] == "{" else VALUE

    def written(self, text: str) -> str:
        """All that is certain; never the last brace."""
        end = self.end(text)
        return text[self.start : self.at if end is None else end - 1]


class JsonReader(Reader):
    """Arguments in JSON behind a head."""

    def __init__(self, before: str, head: str, parameters: Parameters) -> None:
        """
        Args:
            before: regular expression of what may stand before a call.
            head: regular expression of a call up to its arguments; group 1 is the function's name.
            parameters: of the tools that may be called.
        """
        super().__init__(parameters)
        self._head = re.compile(rf"(?s:{before})({head}\s*)")
        self._scan: JsonScan | None = None
        self._broken = False

    def read(self, text: str) -> None:
        while not self._broken:
            end = self._scan.end(text) if self._scan else 0
            if self._scan:
                self.calls[-1] = replace(self.calls[-1], arguments=self._scan.written(text))
            if end is None or not (found := self._head.match(text, end, end + MOST_HEAD)):
                return
            name = found[2].strip()
            if text[found.end() : found.end() + 1] != "{" or name not in self._parameters:
                return
            if self._scan:
                whole = text[self._scan.start : end]
                try:
                    strict_json(whole)
                except (ValueError, RecursionError):
                    self._broken = True
                    return
                self.calls[-1] = replace(self.calls[-1], arguments=whole)
            self.calls.append(Call(name, ""))
            self.rest, self._scan = found.start(1), JsonScan(found.end())


@dataclass(frozen=True, slots=True)
class Markup:
    """
    Attributes:
        key: regular expression up to an argument's value; group 1 is the key.
        opening: what `key` begins with.
        closing: behind a value.
        name: regular expression up to a call's arguments; group 1 is the function's name.
        next: what `name` begins with; "": one call is all there is.
        end: behind a call.
    """

    key: str
    opening: str
    closing: str
    name: str
    next: str
    end: str


class MarkupReader(Reader):
    """Arguments in markup: strings grow, other values are there when the next one begins."""

    def __init__(self, markup: Markup, parameters: Parameters) -> None:
        super().__init__(parameters)
        self._markup = markup
        self._name, self._key = re.compile(markup.name, re.DOTALL), re.compile(rf"\s*{markup.key}", re.DOTALL)
        self._at = 0  # of the next key; within a value, of the next closing marker
        self._value: int | None = None  # where the open value goes on
        self._grows, self._schema = False, UNKNOWN

    def read(self, text: str) -> None:
        if not self.calls:
            found = self._name.search(text, 0, MOST_HEAD)
            if not found or found.end() == len(text) or found[1].strip() not in self._parameters:
                return
            self.calls.append(Call(found[1].strip(), "{"))
            self._at = found.end()
        written = list[str]()
        while self._value_read(text, written) if self._value is not None else self._key_read(text, written):
            pass
        self._write(written)

    def _key_read(self, text: str, written: list[str]) -> bool:
        found = self._key.match(text, self._at, self._at + MOST_HEAD)
        if not found or found.end() == len(text):
            return False
        self._schema = self._parameters[self.calls[0].name].properties.get(found[1], UNKNOWN)
        self._grows = not self._schema.values and self._schema.types in (None, frozenset(["string"]))
        first = not written and self.calls[0].arguments == "{"
        written.append(("" if first else ", ") + json.dumps(found[1], ensure_ascii=False) + ": " + '"' * self._grows)
        self._at = self._value = found.end()
        if self._grows and text[self._at] == "\n":
            self._at = self._value = self._at + 1
        return True

    def _value_read(self, text: str, written: list[str]) -> bool:
        assert self._value is not None
        markup, end = self._markup, text.find(self._markup.closing, self._at)
        if end < 0:
            self._at = len(text) - overlap(text, markup.closing)
            self._grow(text, max(self._at, self._value), written)
            return False
        behind = text[end + len(markup.closing) : end + len(markup.closing) + MOST_HEAD].lstrip()
        if behind.startswith(markup.opening):
            if self._grows:
                self._grow(text, end, written)
                written.append('"')
            else:
                value = text[self._value : end].removeprefix("\n").removesuffix("\n")
                written.append(json.dumps(self._schema.value_of(value), ensure_ascii=False))
            self._at, self._value = end + len(markup.closing), None
            return True
        ends = behind.startswith(markup.end) or markup.end.startswith(behind)  # or may do so
        if ends or markup.opening.startswith(behind):
            self._grow(text, end, written)
            return False
        self._at = end + 1  # the value has a closing marker
        return True

    def _grow(self, text: str, end: int, written: list[str]) -> None:
        """Up to `end`, but for a line break there, which may not be the value's."""
        assert self._value is not None
        end -= text[self._value : end].endswith("\n")
        if self._grows and end > self._value:
            written.append(json.dumps(text[self._value : end], ensure_ascii=False)[1:-1])
            self._value = end


class BracesReader(Reader):
    """Arguments in braces: they are there word by word."""

    def __init__(
        self, token: re.Pattern[str], quote: str, as_json: Callable[[re.Match[str]], str], parameters: Parameters
    ) -> None:
        """
        Args:
            token: what `as_json` replaces.
            quote: around strings.
            as_json: a token in JSON.
            parameters: of the tools that may be called.
        """
        super().__init__(parameters)
        self._token, self._quote, self._as_json = token, quote, as_json
        self._at, self._depth, self._in_string = 0, 0, False

    def read(self, text: str) -> None:
        if not self.calls:
            name, brace, _ = text[:MOST_HEAD].partition("{")
            name = name.strip().removeprefix("call:").strip()
            if not brace or name not in self._parameters:
                return
            self.calls, self._at = [Call(name, "")], text.index("{")
        written = list[str]()
        while self._at < len(text) and self._step(text, written):
            pass
        self._write(written)

    def _step(self, text: str, written: list[str]) -> bool:
        quote, rest = self._quote, text[self._at : self._at + len(self._quote)]
        if self._in_string or rest == quote:
            if not self._in_string:
                self._in_string, self._at = True, self._at + len(quote)
                written.append('"')
            end = text.find(quote, self._at)
            sure = end if end >= 0 else max(self._at, len(text) - overlap(text, quote))
            written.append(json.dumps(text[self._at : sure], ensure_ascii=False)[1:-1] + '"' * (end >= 0))
            self._in_string, self._at = end < 0, end + len(quote) if end >= 0 else sure
            return end >= 0
        found = self._token.match(text, self._at)
        if quote.startswith(rest) or (found and found.end() == len(text) and not found["json"]):
            return False  # it may go on
        if not found and (rest[0] == '"' or (rest[0] == "," and not text[self._at + 1 :].strip())):
            return False
        if not found:
            self._depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(rest[0], 0)
            if self._depth <= 0:
                return False
        written.append(self._as_json(found) if found else rest[0])
        self._at = found.end() if found else self._at + 1
        return True
