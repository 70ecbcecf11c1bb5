"""Calls of tools that the draft believes in, told before the model has written them.

A client may start a tool that changes nothing as soon as its call is proposed, and has the result when the call is
confirmed; a call that is withdrawn never was. The idea of SpecCache.
"""

import json
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from typing import Any, Protocol

from edgespec.loop.backend import Vocab
from edgespec.loop.text import TextStream
from edgespec.scheduler.requests import Ended, Event, Foresaw, Wrote
from edgespec.server.call_formats import Call
from edgespec.server.channels import Reader
from edgespec.server.parse_output import Piece, Regions


class Growing(Protocol):
    """What is read here of an answer."""

    regions: Reader
    pieces: list[Piece]
    new: list[Piece]


class Foreseen:
    """The proposals for one answer."""

    def __init__(self) -> None:
        self._proposed: dict[int, Call] = {}  # by the call's number in the answer
        self._asked = False

    def take(self, event: Event, answer: Growing, vocab: Vocab) -> Iterator[dict[str, Any]]:
        """What a client is told after an event; calls that were written as proposed keep the proposal's id."""
        if isinstance(event, Foresaw):
            self._asked = True
            written = sum(isinstance(piece, Call) for piece in answer.pieces)
            calls = dict(enumerate(self._believed(event, answer.regions, vocab), written))
            yield from self._withdraw(lambda number, call: number in calls and same(calls[number], call))
            for number, call in calls.items():
                if number not in self._proposed:
                    self._proposed[number] = call
                    yield told("proposed", number, call)
        elif isinstance(event, Wrote | Ended) and self._asked:
            yield from self._settle(answer)
            if isinstance(event, Ended):
                yield from self._withdraw(lambda number, call: False)

    def _believed(self, event: Foresaw, regions: Reader, vocab: Vocab) -> list[Call]:
        text, ahead = TextStream(vocab, shown=event.shown), deepcopy(regions)
        pieces = ahead.push("".join(map(text.push, event.token_ids)))
        whole = ahead.whole() if isinstance(ahead, Regions) else []  # a draft may look no further, or leave the end out
        pieces += whole
        if not whole and event.token_ids and event.token_ids[-1] in vocab.eog_ids:
            pieces += ahead.finish()
        return [piece for piece in pieces if isinstance(piece, Call)]

    def _settle(self, answer: Growing) -> Iterator[dict[str, Any]]:
        """Calls that are written now confirm proposals, or have them withdrawn."""
        number = sum(isinstance(piece, Call) for piece in answer.pieces)
        number -= sum(isinstance(piece, Call) for piece in answer.new)
        for i, piece in enumerate(answer.new):
            if not isinstance(piece, Call):
                continue
            proposed = self._proposed.pop(number, None)
            if proposed and same(proposed, piece):
                named = replace(piece, id=proposed.id)
                answer.new[i] = answer.pieces[answer.pieces.index(piece)] = named
                yield told("confirmed", number, named)
            elif proposed:
                yield told("withdrawn", number, proposed)
            number += 1

    def _withdraw(self, keep: Any) -> Iterator[dict[str, Any]]:
        for number, call in list(self._proposed.items()):
            if not keep(number, call):
                del self._proposed[number]
                yield told("withdrawn", number, call)


def same(one: Call, other: Call) -> bool:
    """Whether two calls ask for the same."""
    return one.name == other.name and json.loads(one.arguments) == json.loads(other.arguments)


def told(status: str, index: int, call: Call) -> dict[str, Any]:
    """An event: proposed, confirmed or withdrawn."""
    return {"status": status, "index": index, "id": call.id, "name": call.name, "arguments": call.arguments}
