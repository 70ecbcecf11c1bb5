"""Cells of llama.cpp's cache, kept in the order of each session's tokens.

Attention adds up cells in their order. llama.cpp puts tokens into the first free cells, also into a gap between a
session's cells, so there are no gaps:

    cells 0 to end - 1    in use: committed tokens, nodes, and waste
    waste                 unused cells with ids of their own, so that llama.cpp does not reuse them
    cells from end on     free

`Cells.make_room` saves all sequences at the end of the cache (on a disk, where memory is short), clears it, and loads
them without gaps.

Attention over long prompts adds up tiles of `TILE` cells. A token must have the same place in its tile as in an empty
cache, so a partial tile is copied to the end before a prompt continues in it.
"""

import ctypes
import struct
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import BytesIO
from itertools import pairwise
from tempfile import TemporaryFile
from typing import IO, Any, Protocol

from edgespec.errors import ContextFull, ModelError, failing_as, undone
from edgespec.loop.passes import common_prefix
from edgespec.loop.shapes import TILE, RowClass, also_wanted, whole_tiles
from edgespec.machine.disk import folder_with_room

from ..common.signals import Signals
from .ggml.files import llama_cpp
from .ggml.state_files import read_parts, write_parts

EXTRA_IDS = 2  # sequence ids for waste and for padding
IN_WINDOWS = 2  # ids of a cell: with one, find_slot of llama-kv-cache.cpp reuses it behind a sliding window
MUCH_WASTE = 1024  # cells


@dataclass(slots=True)
class Rows:
    """
    Attributes:
        tokens: of each row.
        positions: of each row.
        ids: sequence ids of each row.
        wanted: indices of rows whose logits are needed.
        padding: number of padding rows.
    """

    tokens: list[int]
    positions: list[int]
    ids: list[list[int]]
    wanted: list[int]
    padding: int = 0

    def add(self, tokens: list[int], positions: list[int], ids: list[list[int]]) -> None:
        self.tokens += tokens
        self.positions += positions
        self.ids += ids

    def pad(self, count: int, seq: int) -> None:
        places = list(range(self.padding, self.padding + count))
        self.add([0] * count, places, [[seq]] * count)
        self.padding += count

    def fill(self, shape: RowClass, trees: RowClass, seq: int) -> None:
        """Pad the rows to the class of the pass, and the wanted ones to that of trees."""
        self.pad(shape.rows(len(self.tokens)) - len(self.tokens), seq)
        self.wanted += also_wanted(self.wanted, len(self.tokens), trees)


class Holder(Protocol):
    """The part of a session that `Cells` uses.

    Attributes:
        cached: committed tokens that have a cell.
        marks: of these cells; two sessions share a cell if its marks are equal.
        aligned: tiles are those of an empty cache.
        own_ids: sequence ids that no other session gets.
    """

    cached: int
    marks: list[int]
    aligned: bool
    own_ids: list[int]

    @property
    def has_nodes(self) -> bool: ...

    def moved(self, end: int, aligned: bool) -> None:
        """Called when the cells of committed tokens lie before `end`, tagged with the session's own ids only."""

    def lost(self) -> None:
        """Called when committed tokens have no cells."""

    def replaced(self, start: int, seq: int, end: int) -> None:
        """Use the cells of `seq` from position `start` on, which end before cell `end`, instead of the session's."""


class Cells:
    def __init__(self, context: Any, ids: int, window: int) -> None:
        """
        Args:
            context: llama.cpp's.
            ids: number of the sessions' sequence ids; the next ones are for padding and waste.
            window: tokens of the sliding window of some layers; 0: none.
        """
        self.end = 0
        self.wasted = False
        self.uncertain = False
        self.cramped = False  # waste left a tree no room
        self.growing = False  # a tree takes several passes, as a draft's does
        self.padding_id = ids
        self._waste_ids = range(ids + 1, ids + 1 + (IN_WINDOWS if window else 1))
        self.window = window
        self._part = min(window or TILE, TILE)  # cells that are copied at once
        self.spare = sys.maxsize  # bytes for copies of cells
        self._marks = 0
        self._context = context
        self._memory = llama_cpp.llama_get_memory(context)
        self._size = llama_cpp.llama_n_ctx(context)

    def new_marks(self, count: int) -> range:
        self._marks += count
        return range(self._marks - count, self._marks)

    def waste(self, ids: Iterable[int], start: int, stop: int = -1) -> None:
        """Tag cells of `ids` at positions from `start` to `stop` (-1: all) also as waste; call it before `ids` go."""
        for seq in ids:
            for waste in self._waste_ids:
                llama_cpp.llama_memory_seq_cp(self._memory, seq, waste, start, stop)
        self.wasted = True

    def drop_padding(self, between: int) -> None:
        """Free the cells of padding; the first `between` of them precede used cells, and become waste."""
        if between:
            self.waste([self.padding_id], 0, between)
        llama_cpp.llama_memory_seq_rm(self._memory, self.padding_id, -1, -1)

    def fill(self, count: int, sessions: Iterable[Holder]) -> bool:
        """Make the next `count` cells waste, without a pass.

        Returns:
            False if `sessions` have no cells to copy.
        """
        source = max(sessions, key=lambda session: session.cached, default=None)
        if source is None or not source.cached:
            return count == 0
        while count:
            some = min(count, source.cached, self._part)
            with self._copied(source, 0, some):
                self.waste([self.padding_id], 0)
            count -= some
        return True

    def move(self, session: Holder, start: int, sessions: Iterable[Holder]) -> None:
        """Copy a session's cells from `start` on, which are in one tile, to the same places of a tile at the end."""
        self.fill((start - self.end) % TILE, sessions)
        with self._copied(session, start, session.cached):
            session.replaced(start, self.padding_id, self.end)

    @contextmanager
    def _copied(self, source: Holder, start: int, stop: int) -> Iterator[None]:
        with Signals().held():
            for data in self.parts(source, start, stop):
                if llama_cpp.llama_state_seq_set_data(self._context, data, len(data), self.padding_id) == 0:
                    self.uncertain = True
                    raise ModelError("llama.cpp could not copy a part of a sequence in its cache")
            self.end += stop - start
            yield
            self.drop_padding(0)

    def make_room(self, rows: int, sessions: Iterable[Holder], trees: int = 0) -> None:
        """Make `rows` cells free at the end.

        Args:
            rows: of the next pass.
            sessions: all that are open.
            trees: cells that later passes may need while sessions have nodes, when cells cannot be put in order.

        Raises:
            ContextFull: sessions have nodes, or committed tokens take too many cells.
        """
        holders = [session for session in sessions if session.cached or session.has_nodes]
        if not holders and self.end:
            self.put_in_order([])
        nodes, full = any(session.has_nodes for session in holders), self.end + rows > self._size
        if full and nodes:
            self.cramped = self.wasted
            raise ContextFull("the cache is full, and nodes of other trees are in it")
        self.growing |= nodes
        used = sum(session.cached for session in holders)
        if full and (taken := used - sum(shared for *_, shared in with_sources(holders))) + rows > self._size:
            raise ContextFull(f"the cache of {self._size} cells is full: {taken} hold tokens, {rows} more are needed")
        short = self.growing and self.end + rows + trees > self._size
        most_waste = trees // 4 if short else max(used, MUCH_WASTE)
        much_waste = self.wasted and self.end - used > most_waste
        if full or (not nodes and (self.uncertain or self.cramped or much_waste)):
            self.put_in_order(holders)

    def put_in_order(self, holders: Iterable[Holder]) -> None:
        loaded = [session for session in holders if session.cached]
        needed = sum(llama_cpp.llama_state_seq_get_size(self._context, session.own_ids[0]) for session in loaded)
        with (
            Signals().held(),
            failing_as(ModelError, "cells cannot be put in order"),
            self._room_for(needed) as file,
        ):
            self._move_all(loaded, file)

    def _room_for(self, needed: int) -> IO[bytes]:
        if needed > self.spare:
            with suppress(ModelError, OSError):
                return TemporaryFile(dir=folder_with_room(needed))
        return BytesIO()

    def _move_all(self, loaded: Sequence[Holder], file: IO[bytes]) -> None:
        saved = list[tuple[Holder, Holder, int, int]]()
        for session, source, shared in with_sources(loaded):
            write_parts(file, self.parts(session, shared, session.cached))
            saved.append((session, source, shared, file.tell()))
        file.seek(0)
        llama_cpp.llama_memory_clear(self._memory, False)
        self.end, self.wasted, self.uncertain, self.cramped = 0, False, False, False

        def lost() -> None:
            for session in loaded:
                session.lost()
            self.uncertain = True

        with undone(lost):
            for session, source, shared, stop in saved:
                own = session.own_ids
                if shared:
                    for seq in own:
                        llama_cpp.llama_memory_seq_cp(self._memory, source.own_ids[0], seq, 0, shared)
                if not self._put_all(file, stop, own):
                    raise ModelError("llama.cpp could not put a sequence back into its cache")
                self.waste(own[:1], 0)
                aligned = self.end % TILE == 0 and (not shared or source.aligned)
                self.end += session.cached - shared
                session.moved(self.end, aligned)

    def _put_all(self, file: IO[bytes], stop: int, ids: Sequence[int]) -> bool:
        with suppress(OSError, ValueError, struct.error):
            return all(self.put(data, ids) for data in read_parts(file, stop))
        return False

    def parts(self, session: Holder, start: int, stop: int) -> Iterator[Any]:
        """
        Yields:
            Serialised cells of a session at positions from `start` to `stop`, a tile at once. No part is longer than a
            sliding window: llama.cpp omits cells that have left the window at a part's end, but a rewind needs them.
        """
        step, seq = self._part, self.padding_id
        edges = [start, *range(start - start % step + step, stop, step), stop] if start < stop else []
        for first, last in pairwise(edges):
            llama_cpp.llama_memory_seq_rm(self._memory, seq, -1, -1)
            llama_cpp.llama_memory_seq_cp(self._memory, session.own_ids[0], seq, first, last)
            data = (ctypes.c_uint8 * llama_cpp.llama_state_seq_get_size(self._context, seq))()
            llama_cpp.llama_state_seq_get_data(self._context, data, len(data), seq)
            llama_cpp.llama_memory_seq_rm(self._memory, seq, -1, -1)
            yield data

    def put(self, data: Any, ids: Sequence[int]) -> bool:
        seq = self.padding_id
        if llama_cpp.llama_state_seq_set_data(self._context, data, len(data), seq) == 0:
            return False
        for own in ids:
            llama_cpp.llama_memory_seq_cp(self._memory, seq, own, -1, -1)
        llama_cpp.llama_memory_seq_rm(self._memory, seq, -1, -1)
        return True


def with_sources(sessions: Sequence[Holder]) -> list[tuple[Holder, Holder, int]]:
    """
    Returns:
        Sessions, each with an earlier session that shares the most cells, and the number of these in whole tiles.
    """
    found = list[tuple[Holder, Holder, int]]()
    for i, session in enumerate(sessions):
        shared = [common_prefix(session.marks, other.marks) for other in sessions[:i]]
        most = max(shared, default=0)
        source = sessions[shared.index(most)] if shared else session
        found.append((session, source, whole_tiles(most)))
    return found
