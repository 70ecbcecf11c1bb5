"""Parsers that cut a growing answer into thoughts, content and tool calls.

A call that does not parse is content, since a client sends it back in every later request.
"""

from collections.abc import Sequence
from typing import Protocol

from edgespec.loop.text import overlap
from edgespec.server.call_formats import BARE, CallFormat, begins_bare
from edgespec.server.conversation import Piece, Thought
from edgespec.server.schema import Unfinished
from edgespec.server.tool_calls import Call, Parameters

NO_CALL = (ValueError, KeyError, AttributeError, RecursionError)


class Parser(Protocol):
    @property
    def thinking(self) -> bool: ...

    def push(self, text: str) -> list[Piece]:
        """Add text; the pieces that are certain now."""
        ...

    def finish(self) -> list[Piece]:
        """The pieces held back until the end."""
        ...

    def whole(self) -> list[Call]:
        """Calls that are complete but for their end marker."""
        ...


class OutputParser:
    def __init__(
        self,
        calls: CallFormat | None = None,
        thinking: tuple[str, str] | None = None,
        *,
        in_thought: bool = False,
        blank: bool = True,
        parameters: Parameters | None = None,
    ) -> None:
        """
        Args:
            calls: how they are written; None: there are none.
            thinking: markers around a thought; None: there are none.
            in_thought: the answer begins within a thought.
            blank: the prompt has no text of the answer.
            parameters: of the request's tools.
        """
        self._calls, self._thinking, self._parameters = calls, thinking, parameters or {}
        self.thinking = in_thought and thinking is not None
        self._open = ""
        self._gap = ""  # the white space before the open call, which counts if it is no call
        self._held = ""
        self._tried = 0  # up to here no close marker ends the open call
        self._blank = blank  # a thought, or a call without a marker, may begin
        self._fresh = self.thinking  # after a thought or call, line breaks do not count

    def push(self, text: str) -> list[Piece]:
        if not self._calls and not self._thinking:
            return [text] if text else []
        self._held += text
        found = list[Piece]()
        while self._step(found):
            pass
        return [piece for piece in found if piece != "" and piece != Thought("")]

    def _step(self, found: list[Piece]) -> bool:
        """Pass one begin or end of a thought or call; False: there is none in the held text."""
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
            begins = marker != BARE or begins_bare(self._held[at:], self._parameters)
            if begins is None:
                return False
            if not begins:
                self._say(found, self._held[: at + 1])
                self._held = self._held[at + 1 :]
                return True
            before = self._held[:at].rstrip()
            self._say(found, before)
            if self._thinking and marker == self._thinking[0]:
                self.thinking = self._fresh = True
                self._held = self._held[at + len(marker) :]
            else:
                self._open, self._gap = marker, self._held[len(before) : at]
                self._held = self._held[at + (0 if marker == BARE else len(marker)) :]
                self._blank = False
            return True
        sure = len(self._held)
        if markers:
            sure -= max(overlap(self._held, marker) for marker in markers)
            sure = len(self._held[:sure].rstrip())
        self._say(found, self._held[:sure])
        self._held = self._held[sure:]
        return False

    def _markers(self) -> list[str]:
        found = list(self._calls.open) if self._calls else []
        found += self._thinking[:1] if self._thinking else []
        return [marker for marker in found if self._blank or not self._only_first(marker)]

    def _only_first(self, marker: str) -> bool:
        return marker == BARE or (self._thinking is not None and marker == self._thinking[0])

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
        assert self._calls
        if not self._calls.close:
            return False
        while (at := self._held.find(self._calls.close, self._tried)) >= 0:
            before, first = self._held[:at], self._held.find(self._calls.close)
            if self._calls.is_markup and self._open in before[first:]:  # markup cannot tell a value from a next call
                self._end_call(found, first)
                return True
            try:
                calls = self._calls.parse(before, self._parameters)
            except Unfinished:
                self._tried = at + len(self._calls.close)
                continue
            except NO_CALL:
                self._end_call(found, first)
                return True
            self._end_call(found, at, calls)
            return True
        return False

    def _end_call(self, found: list[Piece], at: int, calls: Sequence[Call] = ()) -> None:
        """With the close marker here; without calls it is content."""
        assert self._calls
        end = at + len(self._calls.close)
        found += calls or [self._gap + self._open + self._held[:end]]
        self._open, self._gap, self._tried = "", "", 0
        self._fresh, self._held = bool(calls), self._held[end:]

    def whole(self) -> list[Call]:
        if not (self._open and self._calls and self._calls.is_json):
            return []
        pieces = calls_of(self._held.strip(), self._open, self._calls, self._parameters)
        return [piece for piece in pieces if isinstance(piece, Call)]

    def finish(self) -> list[Piece]:
        found = list[Piece]()
        while self._tried and self._calls:  # the first close marker was one after all
            self._end_call(found, self._held.find(self._calls.close))
            found += self.push("")
        held, self._held = self._held, ""
        if self._open and self._calls and not self._calls.close:
            pieces = calls_of(held, self._open, self._calls, self._parameters)
            found += [self._gap, *pieces] if pieces and isinstance(pieces[0], str) else pieces
        else:
            found.append(Thought(held) if self.thinking else self._gap + self._open + held)
        self._open, self.thinking = "", False
        return [piece for piece in found if piece != "" and piece != Thought("")]


def calls_of(text: str, opened: str, calls: CallFormat, parameters: Parameters) -> list[Piece]:
    try:
        return [*calls.parse(text, parameters)]
    except NO_CALL:
        return [("" if opened == BARE else opened) + text + calls.close]
