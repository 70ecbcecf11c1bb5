"""Report tool calls that the draft predicts before the model has generated them (the idea of SpecCache).

A client may start a tool without side effects when its call is proposed, and keep the result when it is confirmed. A
call that is withdrawn was never made.
"""

import json
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import replace
from typing import Any

from edgespec.loop.backend import Vocab
from edgespec.loop.text import TextStream
from edgespec.scheduler.requests import Ended, Event, Foresaw, Wrote
from edgespec.server.answers import Answer
from edgespec.server.tool_calls import Call


class SpeculativeCalls:
    def __init__(self, answer: Answer, vocab: Vocab) -> None:
        self._answer, self._vocab = answer, vocab
        self._proposed: dict[int, Call] = {}

    def after(self, event: Event) -> Iterator[dict[str, Any]]:
        """Reports after an event; a call written as proposed keeps the proposal's id."""
        if isinstance(event, Foresaw):
            calls = dict(enumerate(self._predicted(event), len(self._answer.calls)))
            yield from self._withdraw(lambda number, call: number in calls and same(calls[number], call))
            for number, call in calls.items():
                if number not in self._proposed:
                    self._proposed[number] = call
                    yield told("proposed", number, call)
        elif isinstance(event, Wrote | Ended):
            yield from self._settle()
            if isinstance(event, Ended):
                yield from self._withdraw(lambda number, call: False)

    def _predicted(self, event: Foresaw) -> list[Call]:
        text, ahead = TextStream(self._vocab, shown=event.shown), copy(self._answer.parser)
        pieces = ahead.push("".join(map(text.push, event.token_ids)))
        whole = ahead.whole()
        pieces += whole
        if not whole and event.token_ids and event.token_ids[-1] in self._vocab.eog_ids:
            pieces += ahead.finish()
        return [piece for piece in pieces if isinstance(piece, Call)]

    def _settle(self) -> Iterator[dict[str, Any]]:
        answer = self._answer
        number = len(answer.calls) - sum(isinstance(piece, Call) for piece in answer.new)
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

    def _withdraw(self, keep: Callable[[int, Call], bool]) -> Iterator[dict[str, Any]]:
        for number, call in list(self._proposed.items()):
            if not keep(number, call):
                del self._proposed[number]
                yield told("withdrawn", number, call)


def same(one: Call, other: Call) -> bool:
    return one.name == other.name and json.loads(one.arguments) == json.loads(other.arguments)


def told(status: str, index: int, call: Call) -> dict[str, Any]:
    return {"status": status, "index": index, "id": call.id, "name": call.name, "arguments": call.arguments}
