"""Responses to which a later request of the same sender may refer: in memory, until newer ones need the room."""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from edgespec.server.wire import parsed

MOST_STORED = 256
MOST_BYTES = 2**25


@dataclass(frozen=True, slots=True)
class Stored:
    """
    Attributes:
        response: its JSON.
        before: JSON of the items that it answers, also those of earlier responses.
        ids: of these items and its own.
    """

    response: bytes
    before: bytes
    ids: frozenset[str]

    @property
    def size(self) -> int:
        return len(self.response) + len(self.before)

    def items(self) -> list[dict[str, Any]]:
        """The conversation up to the end of the response."""
        return [*parsed(self.before), *parsed(self.response)["output"]]


class StoredResponses:
    """Used only in the server's loop."""

    def __init__(self, most: int = MOST_STORED, most_bytes: int = MOST_BYTES) -> None:
        self._most, self._room = most, most_bytes
        self._kept: OrderedDict[tuple[str, str], Stored] = OrderedDict()

    def add(self, sender: str, name: str, stored: Stored) -> None:
        self._kept[sender, name] = stored
        self._room -= stored.size
        while len(self._kept) > self._most or self._room < 0:
            self._room += self._kept.popitem(last=False)[1].size

    def find(self, sender: str, name: str) -> Stored | None:
        if found := self._kept.get((sender, name)):
            self._kept.move_to_end((sender, name))
        return found

    def with_item(self, sender: str, item: str) -> Stored | None:
        """The latest response that has it."""
        names = (name for (of, name), one in reversed(self._kept.items()) if of == sender and item in one.ids)
        return self.find(sender, found) if (found := next(names, None)) else None

    def remove(self, sender: str, name: str) -> None:
        self._room += self._kept.pop((sender, name)).size
