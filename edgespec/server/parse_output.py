"""Parsers that cut a growing answer into thoughts, content and tool calls.

A call that does not parse is content, since a client sends it back in every later request. Models also write calls
without a marker, or in a thought that they do not end: these are calls if they name a tool of the request, and only
where nothing follows, since a text about calls looks the same.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

from edgespec.loop.text import overlap
from edgespec.server.begun_calls import MOST_HEAD, JsonScan, Reader
from edgespec.server.call_formats import BARE, NO_CALLS, CallFormat, as_object, begins_bare, begins_wrapped
from edgespec.server.conversation import Piece, Thought
from edgespec.server.schema import Unfinished
from edgespec.server.tool_calls import Call, Parameters

NO_CALL = (ValueError, KeyError, AttributeError, RecursionError)
LINE = re.compile(r"(?:\A|\n)\s*+(?=[`<{\[]|\Z)")
UNWRAPPED = re.compile(r"[\s;,]*(?:</\w+>)?\s*(?:```(?!\w))?\s*")  # what may stand behind a call without markers
HALF = re.compile(r"</?\w*|`{1,2}")  # of it


class OutputParser:
    def __init__(
        self,
        calls: CallFormat | None = None,
        thinking: tuple[str, str] | None = None,
        *,
        in_thought: bool = False,
        blank: bool = True,
        parameters: Parameters | None = None,
        unmarked: bool = True,
    ) -> None:
        """
        Args:
            calls: how they are written; None: there are none.
            thinking: markers around a thought; None: there are none.
            in_thought: the answer begins within a thought.
            blank: the prompt has no text of the answer.
            parameters: of the request's tools.
            unmarked: JSON without markers may be a call.
        """
        self._calls, self._thinking, self._parameters = calls or NO_CALLS, thinking or ("", ""), parameters or {}
        heads = [head.partition("{name}")[0] for head in self._calls.heads]
        openings = dict.fromkeys([*self._calls.open, *heads])
        self._only_first = [BARE] * (openings.pop(BARE, self) is None) + [self._thinking[0]] * (thinking is not None)
        self._openings = tuple(openings)  # markers that a call may begin with anywhere
        self._parts = (BARE, *heads)  # markers that are part of the call that they begin
        self.thinking = in_thought and thinking is not None
        self._open = ""
        self._before = ""  # white space and marker of the open call, which count if it is no call
        self._reader: Reader | None = None  # of the open call
        self._held = ""
        self._tried = 0  # up to here no close marker ends the open call
        self._blank = blank  # a thought, or a call without a marker, may begin
        self._fresh = self.thinking  # after a thought or call, line breaks do not count
        self._unmarked = unmarked and calls is not None
        self._new_line = blank  # a line begins
        self._scan: JsonScan | None = None  # of what is a call without a marker if nothing follows
        self._objects = list[tuple[int, int]]()  # those before it

    @property
    def begun(self) -> Sequence[Call]:
        """Calls of the block that is being written, as far as they are certain; all but the last are complete."""
        return self._reader.calls if self._reader else ()

    def push(self, text: str) -> list[Piece]:
        """Add text; the pieces that are certain now."""
        self._held += text
        found = list[Piece]()
        while self._step(found):
            pass
        if self._reader:
            self._reader.read(self._held)
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
        if self._scan:
            return self._unmarked_call(found)
        markers = [*self._openings, *(self._only_first if self._blank else ())]
        places = [(at, marker) for marker in markers if (at := self._held.find(marker)) >= 0]
        places = [(at, m) for at, m in places if m not in self._only_first or not self._held[:at].strip()]
        line, start = self._line() if self._unmarked else (len(self._held), None)
        if places and min(places)[0] <= line + len(self._held[line:]) - len(self._held[line:].lstrip()):
            at, marker = min(places)
            begins = self._begins(marker, self._held[at:])
            if begins is None:
                return False
            if not begins:
                self._say(found, self._held[: at + 1])
                self._held = self._held[at + 1 :]
                return True
            before = self._held[:at].rstrip()
            self._say(found, before)
            if marker == self._thinking[0]:
                self.thinking = self._fresh = True
                self._held = self._held[at + len(marker) :]
            else:
                behind = at if marker in self._parts else at + len(marker)
                self._open, self._before = marker, self._held[len(before) : behind]
                self._held, self._blank = self._held[behind:], False
                self._reader = self._calls.reader(self._parameters)
            return True
        if start is not None:
            before = self._held[:line].rstrip()
            self._say(found, before)
            self._held, self._scan = self._held[len(before) :], JsonScan(start - len(before))
            return True
        sure = min(line, len(self._held))
        if markers:
            sure = min([sure, *(len(self._held) - overlap(self._held, marker) for marker in markers)])
            sure = len(self._held[:sure].rstrip())
        self._say(found, self._held[:sure])
        self._held = self._held[sure:]
        return False

    def _begins(self, marker: str, text: str) -> bool | None:
        """True if `text` begins with a marker and what belongs to it; None if it may do so."""
        if marker == BARE:
            return begins_bare(text, self._parameters)
        if marker not in self._parts:
            return True
        starts = [head.replace("{name}", name) for head in self._calls.heads for name in self._parameters]
        if any(map(text.startswith, starts)):
            return True
        return None if any(start.startswith(text) for start in starts) else False

    def _line(self) -> tuple[int, int | None]:
        """The first line that begins a call without a marker, and where its JSON does; None: it only may begin one.

        Without such a line: the end of the held text.
        """
        for line in LINE.finditer(self._held) if self._new_line or "\n" in self._held else ():
            if "\n" in line[0] or self._new_line:
                begins, at = self._wrapped(self._held[line.start() :])
                if begins is not False:
                    return line.start(), line.start() + at if begins else None
        return len(self._held), None

    def _wrapped(self, text: str) -> tuple[bool | None, int]:
        return begins_wrapped(text, self._parameters, self._calls.open)

    def _say(self, found: list[Piece], text: str) -> None:
        found.append(text)
        if text:
            self._new_line = False
        self._blank = self._blank and not text.strip()

    def _think(self, found: list[Piece]) -> bool:
        before, seen, after = self._held.partition(self._thinking[1])
        if seen:
            found.append(Thought(before.rstrip()))
            self.thinking, self._fresh, self._held, self._new_line = False, True, after, True
            return True
        sure = len(self._held) - overlap(self._held, self._thinking[1])
        sure = len(self._held[: min(sure, self._call_in_thought())].rstrip())
        found.append(Thought(self._held[:sure]))
        self._held = self._held[sure:]
        return False

    def _call_in_thought(self) -> int:
        """Place in the held text from which there are, or may be, only calls."""
        if not self._parameters:
            return len(self._held)
        text, close, markers, at = self._held, self._calls.close, self._openings, 0
        while begins := min(((place, m) for m in markers if (place := text.find(m, at)) >= 0), default=None):
            start, marker = begins
            at = start
            while marker:
                body = at if marker in self._parts else at + len(marker)
                head, reader = text[body : body + MOST_HEAD], self._calls.reader(self._parameters)
                reader.read(head)
                at = body + 1
                if not reader.calls and len(head) == MOST_HEAD:
                    break
                end = text.find(close, body) if close else -1
                if end < 0:
                    return start
                at = end + len(close)
                rest = text[at:].lstrip()
                if any(one.startswith(rest) for one in markers):
                    return start
                marker = next(filter(rest.startswith, markers), "")
                at = len(text) - len(rest) if marker else at
        return len(text) - max(overlap(text, marker) for marker in markers)

    def _call(self, found: list[Piece]) -> bool:
        if not self._calls.close:
            return False
        if self._open in self._parts:  # up to a first marker, which begins another call
            end = self._held.find(self._calls.close)
            head = self._held[: end if end >= 0 else None]
            if marked := [at for marker in self._calls.open if (at := head.find(marker)) >= 0]:
                before = head[: min(marked)].rstrip()
                found.append(self._before + before)
                self._reset(self._held[len(before) :])
                return True
        while (at := self._held.find(self._calls.close, self._tried)) >= 0:
            before, first = self._held[:at], self._held.find(self._calls.close)
            if self._calls.pair and self._open in before[first:]:  # markup cannot tell a value from a next call
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
        """With the close marker here; without calls it is content, but for those that were complete before."""
        end = at + len(self._calls.close)
        if calls:
            found += self._named(calls)
        else:
            self._no_call(found, self._held[:at], self._held[at:end])
        self._reset(self._held[end:])
        self._fresh = self._new_line = bool(calls)

    def _reset(self, held: str) -> None:
        """No call is open."""
        self._open, self._before, self._tried, self._reader, self._held = "", "", 0, None, held
        self._fresh = self._new_line = False

    def _no_call(self, found: list[Piece], text: str, close: str = "") -> None:
        reader = self._calls.reader(self._parameters)
        reader.read(text)
        complete = self._named(reader.calls[:-1])
        found += [*complete, text[reader.rest :] + close] if complete else [self._before + text + close]

    def _named(self, calls: Sequence[Call]) -> list[Call]:
        """With the ids under which they have begun."""
        ids = {
            i: one.id
            for i, (one, call) in enumerate(zip(self.begun, calls, strict=False))
            if one.name == call.name and call.arguments.startswith(one.arguments)
        }
        return [replace(call, id=ids.get(i, call.id)) for i, call in enumerate(calls)]

    def _unmarked_call(self, found: list[Piece]) -> bool:
        scan = cast(JsonScan, self._scan)
        if (end := scan.end(self._held)) is not None:
            behind = UNWRAPPED.match(self._held, end).end()  # type: ignore[union-attr]  # it may be empty
            begins, at = self._wrapped(self._held[behind:])
            if begins:
                self._objects.append((scan.start, end))
                self._scan = JsonScan(behind + at)
                return True
            if begins is None or HALF.fullmatch(self._held, behind):
                return False
        elif not scan.broken:
            return False
        end = max(end or scan.at, 1)
        marked = min((at for marker in self._openings if (at := self._held.find(marker)) >= 0), default=end)
        end = end if marked >= end else len(self._held[:marked].rstrip())
        self._say(found, self._held[:end])
        self._held, self._scan, self._objects = self._held[end:], None, []
        return True

    def finish(self, *, cut: bool = False) -> list[Piece]:
        """The pieces held back until the end.

        Args:
            cut: the answer ended for lack of room.
        """
        found = list[Piece]()
        calls = self._unended(cut)
        while self._tried and not calls:  # the first close marker was one after all
            self._end_call(found, self._held.find(self._calls.close))
            found += self.push("")
            calls = self._unended(cut)
        if self._scan and not calls:  # what has begun as a call may hide one with markers
            self._unmarked, self._scan, self._objects = False, None, []
            return [*found, *self.push(""), *self.finish(cut=cut)]
        held, self._held = self._held, ""
        if calls:
            found += self._named(calls)
        elif self._open:
            self._no_call(found, held)
        elif self.thinking:
            at = min((i for m in self._openings if (i := held.find(m)) >= 0), default=len(held))
            inner = OutputParser(self._calls, parameters=self._parameters, unmarked=False)
            pieces = [*inner.push(held[at:]), *inner.finish(cut=cut)]
            offered = all(isinstance(one, Call) and one.name in self._parameters for one in pieces)
            found += [Thought(held[:at].rstrip()), *pieces] if pieces and offered else [Thought(held)]
        else:
            found.append(Thought(held) if self.thinking else held)
        self._open, self._before, self._reader, self._scan, self.thinking = "", "", None, None, False
        return [piece for piece in found if piece != "" and piece != Thought("")]

    def _unended(self, cut: bool) -> list[Call]:
        """Calls that only lack their last marker, or are JSON without markers."""
        text, parse = self._held, self._calls.parse
        if not (self._open or self._scan):
            return []
        if self._scan:
            end = self._scan.end(text)
            if end is None or not UNWRAPPED.fullmatch(text, end):
                return []
            objects = [*self._objects, (self._scan.start, end)]
            text, parse = ";".join(text[start:end] for start, end in objects), as_object
        elif not text.rstrip().endswith(self._calls.last) or (cut and not self._calls.shows_its_end):
            return []
        try:
            calls = parse(text, self._parameters)
        except NO_CALL:
            return []
        known = not self._scan and not self._calls.close  # the end of the answer is the last marker
        return calls if known or all(call.name in self._parameters for call in calls) else []
