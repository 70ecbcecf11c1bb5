"""A tree in llama.cpp's cache.

llama.cpp tags every cell of its key-value cache with the ids of the sequences it belongs to, and a token attends to
the cells that carry its own id at smaller positions. So:

    one sequence id     one path from the start of the text to a leaf of the tree
    a node              one cell, tagged with the ids of all leaves below it
    growing a tree      a first child takes over its parent's id; every further child gets a free id,
                        after the cells of its ancestors were tagged with it (no copy, no recompute)
    commit              the ids of one path stay, and of those below it if wanted; others are removed: nothing moves

All ids of a session carry the committed text, so starting a tree costs nothing. `ids.py` lends them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from edgespec.errors import ContextFull, SessionFileError
from edgespec.loop.backend import Work
from edgespec.loop.session_files import Loaded, Saved, read, write
from edgespec.loop.shapes import PromptRead
from edgespec.loop.tree import IntArray, nodes_below, parents_among

from .cells import TILE, Cells
from .ggml.files import last_log, llama_cpp
from .ggml.state_files import load_parts, load_sequence, save_parts, save_sequence


class Owner(Loaded, Protocol):
    """What a session needs of the backend it belongs to."""

    memory: Any  # llama.cpp's cache; None once it is freed
    context: Any  # llama.cpp's
    copies: bool  # cells may be copied
    in_order: bool  # keep cells in the order of the text
    cells: Cells
    tiles: bool  # attention over many rows adds up tiles

    def alone(self, session: "LlamaSession") -> bool: ...

    def open(self) -> "LlamaSession": ...

    def lend(self, seq: int, session: "LlamaSession") -> None: ...

    def give_back(self, ids: list[int]) -> None: ...

    def make_room(self, rows: int) -> None: ...

    def release(self, session: "LlamaSession") -> None: ...


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a work's nodes go in its session."""

    work: Work
    first: int  # number of the first new node
    positions: list[int]  # of all uncommitted nodes, the new ones included
    below: list[list[int]]  # for each new node the ids of the leaves below it
    tips: dict[int, int]  # id -> the last node on its path
    sources: dict[int, int]  # id -> the old node it continues
    order: list[int]  # the new nodes in the order of their cells


def depth_first(parents: list[int], first: int) -> list[int]:
    """New nodes so that the path of first children comes first: planners name the likeliest child first.

    Args:
        parents: of the new nodes; numbers below `first` are old nodes.
        first: number of the first new node.
    """
    children: dict[int, list[int]] = {}
    tops = list[int]()
    for node, parent in enumerate(parents):
        (children.setdefault(parent - first, []) if parent >= first else tops).append(node)
    order, stack = list[int](), tops[::-1]
    while stack:
        node = stack.pop()
        order.append(node)
        stack.extend(reversed(children.get(node, [])))
    return order


class LlamaSession:
    """See `edgespec.loop.backend.Session`."""

    def __init__(self, backend: Owner, ids: list[int]) -> None:
        self.token_ids: list[int] = []
        self._backend = backend
        self._memory = backend.memory
        self.ids = ids  # sequence ids that carry the committed text: its own, and those lent to it
        self._own = len(ids)
        self.held = 0  # how many committed tokens have a cell
        self.marks: list[int] = []  # of these cells: equal where a fork shares one
        self._prompt = PromptRead()
        self.aligned = True  # its tiles are those it would have alone
        self._edge = 0  # the cell behind the last of these that have one; -1: not known
        self._forget_nodes()

    def _forget_nodes(self) -> None:
        self._base = self._top = 0  # first cell of the nodes, and the one behind their last
        self._prompt.reading = False
        self._tokens: list[int] = []  # by node, since the last commit
        self._parents: list[int] = []
        self._positions: list[int] = []
        self._cells: list[int] = []
        self._seqs: list[int] = []  # one id whose path runs through the node
        self.tips: dict[int, int] = {}  # id -> the last node on its path

    def place(self, work: Work, free: Iterator[int]) -> Placement:
        """Find new nodes their places. Changes nothing.

        Args:
            work: the nodes.
            free: ids for further leaves.

        Raises:
            ContextFull: a position lies beyond the context.
            ValueError: more nodes or leaves than the capabilities allow, or a parent that does not exist.
        """
        first, count, parents = len(self._tokens), len(work.token_ids), work.parents.tolist()
        limits, length = self._backend.capabilities, len(self.token_ids)
        if first + count > limits.max_nodes:
            raise ValueError(f"{first + count} uncommitted nodes; this backend holds {limits.max_nodes}")
        if any(not -1 <= parent < first + i for i, parent in enumerate(parents)):
            raise ValueError(f"parents must come before their children: {parents}")
        positions = self._positions.copy()
        for parent in parents:
            positions.append(positions[parent] + 1 if parent >= 0 else length)
        if max(positions) >= limits.context_length:
            raise ContextFull(f"position {max(positions)} lies beyond the context of {limits.context_length} tokens")
        below: list[list[int]] = [[] for _ in range(count)]
        has_child = {parent - first for parent in parents}
        leaves = [i for i in range(count) if i not in has_child]
        tips, sources = dict(self.tips), dict[int, int]()
        for leaf in leaves:
            path = [leaf]
            while parents[path[-1]] >= first:
                path.append(parents[path[-1]] - first)
            old = parents[path[-1]]  # evaluated earlier, or -1
            seq = self._seqs[old] if old >= 0 else -1
            if old < 0 or tips.get(seq) != old:
                seq = next(free, -1) if len(tips) < limits.max_leaves else -1
                if seq < 0:
                    raise ValueError(f"more than {len(tips)} leaves; this backend holds no more")
                if old >= 0:
                    sources[seq] = old
            tips[seq] = first + leaf
            for node in path:
                below[node].append(seq)
        return Placement(work, first, positions, below, tips, sources, depth_first(parents, first))

    def add(self, placement: Placement, start: int) -> tuple[list[int], list[int], list[list[int]]]:
        """Take the nodes in: tag the cells of the nodes they continue.

        Args:
            placement: of the nodes.
            start: the first cell that the next pass fills for this session.

        Returns:
            Tokens, positions and sequence ids of the cells to fill, in their order: first committed tokens that have
            no cell any more, then the nodes.
        """
        positions, first, order = placement.positions, placement.first, placement.order
        for seq in placement.tips:
            if seq not in self.ids:
                self._backend.lend(seq, self)
        for seq, old in placement.sources.items():
            llama_cpp.llama_memory_seq_cp(self._memory, self._seqs[old], seq, self.held, positions[old] + 1)
        lost = self.token_ids[self.held :]
        tokens = lost + placement.work.token_ids[order].tolist()
        places = [*range(self.held, len(self.token_ids)), *(positions[first + i] for i in order)]
        ids = [list(placement.tips)] * len(lost) + [placement.below[i] for i in order]
        self._tokens.extend(placement.work.token_ids.tolist())
        self._parents.extend(placement.work.parents.tolist())
        self._positions = positions
        self._seqs.extend(ids[0] for ids in placement.below)
        start += len(lost)
        if first == 0:
            self._base = start
            self._prompt.add(placement.work.prompt, placement.work.short, len(self.token_ids))
        self._top = start + len(order)
        cell_of = {node: start + i for i, node in enumerate(order)}
        self._cells.extend(cell_of[i] for i in range(len(order)))
        self.tips = placement.tips
        return tokens, places, ids

    def evaluated(self) -> None:
        """The pass is over: what had lost its cell has one again, and every id gets it."""
        if self.held < len(self.token_ids):
            source = next(iter(self.tips))
            for seq in self.ids:
                if seq not in self.tips:
                    llama_cpp.llama_memory_seq_cp(self._memory, source, seq, self.held, len(self.token_ids))
            self.marks += self._backend.cells.new_marks(len(self.token_ids) - self.held)
            self.held, self._edge = len(self.token_ids), self._base

    def give_up(self) -> None:
        """The pass failed: forget its cells and all nodes."""
        for seq in self.ids:
            llama_cpp.llama_memory_seq_rm(self._memory, seq, self.held, -1)
        self._forget_nodes()

    def commit(self, path: Sequence[int], *, below: bool = False) -> IntArray:
        length, kept, stay = len(self.token_ids), len(path), list[int]()
        if below and not self._backend.in_order:  # else gaps would be left among the cells
            stay = nodes_below(self._parents, path[-1] if path else -1)
        if self._backend.in_order:
            # Cells behind a gap would be out of order once the gap is filled again: give them up.
            kept = next((i for i, node in enumerate(path) if self._cells[node] != self._base + i), len(path))
        keep = self._seqs[path[kept - 1]] if kept else -1
        if self._cells:
            cells = self._backend.cells
            if self._top == cells.end and self._top - self._base == len(self._cells):  # nothing stands behind them
                self._top = cells.end = self._base + kept + len(stay)
            elif self._backend.in_order:
                cells.waste(self.tips, length)
            if kept:
                self._edge = self._base + kept
        new = {node: i for i, node in enumerate(stay)}
        tips = {seq: new[tip] for seq, tip in self.tips.items() if tip in new}
        for seq in self.tips.keys() - tips.keys():
            llama_cpp.llama_memory_seq_rm(self._memory, seq, length + kept if seq == keep else length, -1)
        if kept:
            for seq in self.ids:
                if seq != keep:
                    llama_cpp.llama_memory_seq_cp(self._memory, keep, seq, length, length + kept)
            self.held = length + kept
            self.marks += self._backend.cells.new_marks(kept)
        self._prompt.commit(length, kept)
        self.token_ids.extend(self._tokens[node] for node in path)
        self._keep_nodes(stay, tips)
        return np.array(stay, np.int32)

    def _keep_nodes(self, nodes: list[int], tips: dict[int, int]) -> None:
        """Forget all others. `tips` has their new numbers."""
        tokens, positions, cells, seqs = self._tokens, self._positions, self._cells, self._seqs
        parents, on_top = parents_among(self._parents, nodes), self._top == self._backend.cells.end
        self._forget_nodes()
        if nodes:
            self._tokens, self._positions = [tokens[node] for node in nodes], [positions[node] for node in nodes]
            self._cells, self._seqs = [cells[node] for node in nodes], [seqs[node] for node in nodes]
            self._parents, self.tips = parents, tips
            self._top = self._backend.cells.end if on_top else -1
            self._base = self._top - len(nodes)

    def rewind(self, length: int) -> None:
        cells = self._backend.cells
        if length < self.held or self._tokens:
            if self._backend.alone(self):
                self._edge = cells.end = min(length, self.held)
            else:
                self._edge = -1
                if self._backend.in_order:
                    cells.waste(self.ids, length)
        for seq in self.ids:
            llama_cpp.llama_memory_seq_rm(self._memory, seq, length, -1)
        self.held = min(self.held, length)
        self._prompt.rewind(length)
        self.aligned = self.aligned or length == 0
        del self.token_ids[length:], self.marks[length:]
        self._forget_nodes()

    def reusable_prefix(self, length: int, *, short: bool = False) -> int:
        length = self._prompt.reusable_prefix(self._backend.capabilities.exact, length, short)
        # Of a tile of cells only the first tokens are there, and the others must come right behind them.
        if not self._in_tiles or short or self._continues(length, self._backend.cells.end) or self._may_move(length):
            return length
        return length - length % TILE

    @property
    def may_copy(self) -> bool:
        """Whether cells may be copied."""
        return self._backend.copies

    @property
    def _in_tiles(self) -> bool:
        """Whether attention over prompts adds up tiles, other than that over trees."""
        exact = self._backend.capabilities.exact
        return self._backend.tiles and exact is not None and exact.prompts != exact.trees

    def _continues(self, length: int, end: int) -> bool:
        """Whether tokens behind `length`, in cells from `end` on, have the tiles they would have alone."""
        if self._backend.alone(self):
            return True
        if length == 0:
            return end % TILE == 0
        return self.aligned and length == self.held == len(self.token_ids) and self._edge == end

    def _may_move(self, length: int) -> bool:
        """Whether its cells of the tile that it ends in may be replaced by copies at the end of the cache."""
        return self.aligned and length <= self.held and self._backend.copies

    def tail(self, work: Work, end: int | None = None) -> int:
        """Committed tokens of a tile begun, to have copies at the end of the cache before this work is evaluated.

        `end`: of the cells in use; None: the most that there may be.
        """
        length = len(self.token_ids)
        if not work.prompt or work.short or not self._in_tiles or self._backend.alone(self):
            return 0
        if end is not None and self._continues(length, end):
            return 0
        return length % TILE if self._may_move(length) else 0

    def replaced(self, start: int, seq: int, end: int) -> None:
        self._backend.cells.waste(self.ids, start)
        for own in self.ids:
            llama_cpp.llama_memory_seq_rm(self._memory, own, start, -1)
            llama_cpp.llama_memory_seq_cp(self._memory, seq, own, start, self.held)
        self.marks[start:] = self._backend.cells.new_marks(self.held - start)
        self._edge = end

    def padding_before(self, work: Work, end: int) -> int:
        """Cells to fill from `end` on, before this work's, so that a prompt's tiles are those it would have alone.

        Raises:
            ContextFull: it begins within a tile whose other cells stand elsewhere.
        """
        length = len(self.token_ids)
        if not work.prompt or work.short or not self._in_tiles or self._continues(length, end):
            return 0
        if length % TILE or (length and not self.aligned):
            raise ContextFull(
                f"a prompt cannot be continued at token {length}: the cache had to be put in order, or another of the "
                "same forward comes before it"
            )
        return -end % TILE

    def moved(self, end: int, aligned: bool) -> None:
        """Its text now has cells up to `end`, which only its own ids carry."""
        self._backend.give_back(self.ids[self._own :])
        del self.ids[self._own :]
        self._edge, self.aligned = end, aligned
        if self._in_tiles and not self.aligned:
            self._prompt.tokens = 0

    def lost(self) -> None:
        """Its text has no cells any more."""
        self.held, self._edge = 0, -1
        self.marks.clear()
        self._prompt.rewind(0)

    def fork(self) -> "LlamaSession":
        other = self._backend.open()
        for seq in other.ids:
            llama_cpp.llama_memory_seq_cp(self._memory, self.ids[0], seq, 0, self.held)
        other.token_ids, other.held, other.marks = self.token_ids.copy(), self.held, self.marks.copy()
        other._prompt = replace(self._prompt)
        other._edge, other.aligned = self._edge, self.aligned
        return other

    @property
    def unread_committed(self) -> int:
        return len(self.token_ids) - self.held

    @property
    def first_id(self) -> int:
        """The id that always carries the committed text."""
        return self.ids[0]

    @property
    def own_ids(self) -> Sequence[int]:
        """The ids that always carry the committed text."""
        return self.ids[: self._own]

    @property
    def has_nodes(self) -> bool:
        """Whether nodes are uncommitted."""
        return bool(self._tokens)

    @property
    def size(self) -> int:
        """Most cells that this session uses."""
        return len(self.token_ids) + len(self._tokens)

    def save(self, path: str | Path, note: Any = None) -> None:
        cells, held = self._backend.cells, {"held": self.held}
        if cells.window:
            held["parts"] = cells.window

        def put(new: Path) -> None:
            if cells.window:
                save_parts(new, cells.parts(self, 0, self.held))
                return
            seq = cells.padding_id  # free between passes; it carries the text without nodes
            llama_cpp.llama_memory_seq_cp(self._memory, self.ids[0], seq, 0, self.held)
            try:
                save_sequence(self._backend.context, new, seq, self.token_ids[: self.held])
            finally:
                llama_cpp.llama_memory_seq_rm(self._memory, seq, -1, -1)

        write(path, self._backend, self.token_ids, self._prompt.as_dict() | held, put, note)

    def load(self, path: str | Path) -> Any:
        saved, cells = read(path, self._backend), self._backend.cells
        held = saved.details["held"]
        if saved.details.get("parts", 0) != cells.window:  # without, what had left the window is not in the file
            raise SessionFileError(f"{path}: was saved by another version of this program")
        self.rewind(0)
        if self._backend.in_order:
            self._backend.make_room(held + 2 * TILE)
        gap = -cells.end % TILE
        if self._in_tiles and 0 < gap <= held:  # no cell in front of the text may be free: its first tokens fill them
            self._read(path, saved)
            cells.waste(self.ids[:1], 0, gap)
            for seq in self.ids:
                llama_cpp.llama_memory_seq_rm(self._memory, seq, -1, -1)
            cells.end += gap
        self._read(path, saved)
        self.token_ids, self.held = saved.token_ids, held
        self._prompt = PromptRead.of(saved.details)
        self.marks, aligned = list(cells.new_marks(held)), cells.end % TILE == 0
        cells.end += held
        self.moved(cells.end, aligned)
        return saved.note

    def _read(self, path: str | Path, saved: Saved) -> None:
        """Have the next cells be what was saved. Raises SessionFileError: none are."""
        if not self._backend.cells.window:
            load_sequence(self._backend.context, path, self.ids[0], saved.token_ids[: saved.details["held"]])
        elif not all(self._backend.cells.put(part, self.own_ids) for part in load_parts(path, saved.size)):
            for seq in self.ids:
                llama_cpp.llama_memory_seq_rm(self._memory, seq, -1, -1)
            raise SessionFileError(f"{path}: llama.cpp cannot read the session: {last_log()}")

    def close(self) -> None:
        if self.ids and self._backend.memory is not None:
            self.rewind(0)
            self._backend.release(self)
        self.ids = []


def paddings(
    sessions: Sequence[LlamaSession], batch: Sequence[Work], cells: Cells, texts: Sequence[LlamaSession]
) -> list[int]:
    """Rows of padding before each work, so that prompts have the tiles that they would have alone.

    Args:
        sessions: of the works.
        batch: what is evaluated next.
        cells: where it goes; before the first work copies of cells do for rows.
        texts: all sessions that are open.

    Raises:
        ContextFull: a prompt cannot be continued; no text has changed.
    """
    if tail := sessions[0].tail(batch[0], cells.end):
        cells.move(sessions[0], len(sessions[0].token_ids) - tail, texts)
    end, found = cells.end, list[int]()
    for session, work in zip(sessions, batch, strict=True):
        found.append(session.padding_before(work, end))
        end += found[-1] + session.unread_committed + len(work.token_ids)
    if found[0] and sessions[0].may_copy and cells.fill(found[0], texts):
        found[0] = 0
    return found
