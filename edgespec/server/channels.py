"""Answers of gpt-oss, which come in channels (OpenAI's harmony format).

    <|channel|>analysis<|message|>THOUGHT<|end|><|start|>assistant<|channel|>final<|message|>CONTENT<|return|>
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>ARGUMENTS<|call|>

The prompt ends with <|start|>assistant, so an answer begins with a header.
"""

import re
from dataclasses import replace

from edgespec.loop.text import overlap
from edgespec.server.begun_calls import JsonScan
from edgespec.server.call_formats import CallFormat, made
from edgespec.server.conversation import Piece, Thought
from edgespec.server.parse_output import OutputParser
from edgespec.server.schema import strict_json
from edgespec.server.tool_calls import Call, Parameters

MESSAGE = "<|message|>"
ANALYSIS = ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant")
FINAL = "<|channel|>final<|message|>"
ENDS = ("<|end|>", "<|start|>", "<|call|>", "<|return|>")
RECIPIENT = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")
BEGINNINGS = ("<|channel|>", "<|start|>", "to=")
MARKERS = ("<|channel|>", MESSAGE, "<|constrain|>", *ENDS)


def comes_in_channels(template: str) -> bool:
    return all(mark in template for mark in (ANALYSIS[0], FINAL))


class ChannelParser:
    def __init__(
        self, calls: CallFormat | None = None, header: str | None = None, parameters: Parameters | None = None
    ) -> None:
        """
        Args:
            calls: None: nothing may be called, and messages to functions are content.
            header: of the message in which the answer begins; None: the answer begins with one.
            parameters: of the request's tools.
        """
        self._calls, self._parameters = calls is not None, parameters or {}
        self._scan: JsonScan | None = None  # of the arguments of the call that is being written
        self.begun = list[Call]()
        self._header = header
        self._held = ""
        self._free = False  # the model has left the format: all is content

    @property
    def thinking(self) -> bool:
        return self._header is not None and not self._to(self._header) and "analysis" in self._header

    def push(self, text: str) -> list[Piece]:
        self._held += text
        found = list[Piece]()
        while self._step(found):
            pass
        if self._header and (name := self._to(self._header)) in self._parameters:
            if not self._scan and self._held.lstrip().startswith("{"):
                self._scan, self.begun = JsonScan(self._held.index("{")), [Call(name, "")]
            if self._scan:
                self.begun = [replace(self.begun[0], arguments=self._scan.written(self._held))]
        return [piece for piece in found if piece not in ("", Thought(""))]

    def finish(self, *, cut: bool = False) -> list[Piece]:
        found = list[Piece]()
        if self._header is not None or self._free:
            self._say(found, self._held)
        self._held, self._header = "", None
        return [piece for piece in found if piece not in ("", Thought(""))]

    def _step(self, found: list[Piece]) -> bool:
        if self._free:
            found.append(self._held)
            self._held = ""
            return False
        if self._header is None:
            header, seen, rest = self._held.partition(MESSAGE)
            start = self._held.lstrip()
            if start and not any(start.startswith(b) or b.startswith(start) for b in BEGINNINGS):
                self._free = True
            elif seen:
                self._header, self._held = header, rest
            return bool(seen or self._free)
        places = [(at, end) for end in ENDS if (at := self._held.find(end)) >= 0]
        if places:
            at, end = min(places)
            self._say(found, self._held[:at])
            self._held, self._header = self._held[at if end == "<|start|>" else at + len(end) :], None
            return True
        if not self._to(self._header):
            sure = len(self._held) - max(overlap(self._held, end) for end in ENDS)
            self._say(found, self._held[:sure])
            self._held = self._held[sure:]
        return False

    def _to(self, header: str) -> str:
        sent = RECIPIENT.search(header)
        return sent[1] if sent and sent[1] != "assistant" and self._calls else ""

    def _say(self, found: list[Piece], text: str) -> None:
        """The text of a message, or a part of it; of a call all that there is."""
        if name := self._to(self._header or ""):
            try:
                call = made(name, strict_json(text), text.strip())
                found.append(replace(call, id=self.begun[0].id) if self.begun else call)
            except (ValueError, RecursionError):
                found.append(text)
            self._scan, self.begun = None, []
        else:
            found.append(Thought(text) if self.thinking else text)


Parser = OutputParser | ChannelParser
