"""Cuts a growing text into what is thought, what is content, and calls of tools.

What does not parse as a call is content: a history with it must not fail for ever.
"""

from collections.abc import Mapping
from typing import Any

from edgespec.loop.text import overlap
from edgespec.server.call_formats import Call, Form, Thought, Types, as_object

Piece = str | Thought | Call


class Regions:
    """One text."""

    def __init__(
        self,
        form: Form | None = None,
        thinking: tuple[str, str] | None = None,
        *,
        inside: bool = False,
        types: Types | None = None,
    ) -> None:
        """
        Args:
            form: of calls to look for; None: there are none.
            thinking: markers around what is thought; None: nothing is.
            inside: the text begins in the middle of a thought.
            types: the functions' parameters.
        """
        self._form, self._thinking, self._types = form, thinking, types or {}
        self.thinking = inside and thinking is not None
        self._open = ""  # the marker of the call that is open
        self._held = ""
        self._blank = True  # nothing was said yet: a thought, or a call without a marker, may begin
        self._fresh = self.thinking  # a region has just begun or ended: new lines do not count

    def push(self, text: str) -> list[Piece]:
        """What became certain."""
        if not self._form and not self._thinking:
            return [text] if text else []
        self._held += text
        found = list[Piece]()
        while self._step(found):
            pass
        return [piece for piece in found if piece != "" and piece != Thought("")]

    def _step(self, found: list[Piece]) -> bool:
        """One region's end or beginning; False: there is none in what is held."""
        if self._fresh and not self._open:
            self._held = self._held.lstrip("\n")
            self._fresh = not self._held
        if self.thinking:
            return self._think(found)
        if self._open:
            return self._call(found)
        markers = self._markers()
        places = [(at, marker) for marker in markers if (at := self._held.find(marker)) >= 0]
        places = [(at, m) for at, m in places if not self._only_first(m) or not self._held[:at].strip()]
        if places:
            at, marker = min(places)
            self._say(found, self._held[:at].rstrip())
            if self._thinking and marker == self._thinking[0]:
                self.thinking = self._fresh = True
                self._held = self._held[at + len(marker) :]
            else:
                self._open = marker
                self._held = self._held[at + (0 if marker[0] == "{" else len(marker)) :]
                self._blank = False
            return True
        sure = len(self._held)
        if markers:  # space before a region is not content
            sure -= max(overlap(self._held, marker) for marker in markers)
            sure = len(self._held[:sure].rstrip())
        self._say(found, self._held[:sure])
        self._held = self._held[sure:]
        return False

    def _markers(self) -> list[str]:
        found = list(self._form.open) if self._form else []
        found += self._thinking[:1] if self._thinking else []
        return [marker for marker in found if self._blank or not self._only_first(marker)]

    def _only_first(self, marker: str) -> bool:
        return marker[0] == "{" or (self._thinking is not None and marker == self._thinking[0])

    def _say(self, found: list[Piece], text: str) -> None:
        found.append(text)
        self._blank = self._blank and not text.strip()

    def _think(self, found: list[Piece]) -> bool:
        assert self._thinking
        before, seen, after = self._held.partition(self._thinking[1])
        if seen:
            found.append(Thought(before.rstrip()))
            self.thinking, self._fresh, self._held = False, True, after
            return True
        sure = len(self._held[: len(self._held) - overlap(self._held, self._thinking[1])].rstrip())
        found.append(Thought(self._held[:sure]))
        self._held = self._held[sure:]
        return False

    def _call(self, found: list[Piece]) -> bool:
        assert self._form
        if not self._form.close:
            return False
        before, seen, after = self._held.partition(self._form.close)
        if seen:
            found += calls_of(before, self._open, self._form, self._types)
            self._open, self._fresh, self._held = "", True, after
        return bool(seen)

    def whole(self) -> list[Call]:
        """The calls of a region whose end is still to come, if they are all there: JSON tells that by itself."""
        if not (self._open and self._form and self._form.parse is as_object):
            return []
        pieces = calls_of(self._held.strip(), self._open, self._form, self._types)
        return [piece for piece in pieces if isinstance(piece, Call)]

    def finish(self) -> list[Piece]:
        """What was held back when the text ended: a call that is cut is content."""
        held, self._held = self._held, ""
        found: list[Piece] = [Thought(held) if self.thinking else held]
        if self._open and self._form and not self._form.close:
            found = calls_of(held, self._open, self._form, self._types)
        elif self._open:
            found = [self._open + held]
        self._open, self.thinking = "", False
        return [piece for piece in found if piece != "" and piece != Thought("")]


def calls_of(text: str, opened: str, form: Form, types: Types) -> list[Piece]:
    """The calls between two markers, or the text with them if they are none."""
    try:
        return [*form.parse(text, types)]
    except (ValueError, KeyError, AttributeError, RecursionError):
        return [("" if opened[0] == "{" else opened) + text + form.close]


def types_of(functions: Any) -> Types:
    """What is known of the parameters of functions, as a request has them."""
    found = dict[str, Mapping[str, Any]]()
    for function in functions:
        parameters = function.get("parameters")
        properties = parameters.get("properties") if isinstance(parameters, dict) else None
        found[str(function.get("name"))] = properties if isinstance(properties, dict) else {}
    return found
