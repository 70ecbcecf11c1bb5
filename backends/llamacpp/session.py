"""Trees in llama.cpp's cache.

Each cell is tagged with sequence ids, and a token attends to the cells with its id at smaller positions:

    one sequence id     one path from the first token to a leaf of the tree
    a node              one cell, tagged with the ids of all leaves below it
    growing a tree      a first child gets its parent's id; each further child gets a free id,
                        after its ancestors' cells are tagged with it (no copy, no recompute)
    commit              the ids of one path stay, and of those below it if wanted; others are removed: nothing moves

All ids of a session carry its committed tokens, so that a new tree needs no tags.
"""

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from edgespec.errors import Closed, ContextFull, SessionFileError, UsageError
from edgespec.loop.backend import Capabilities, Vocab, Work
from edgespec.loop.sampling import Float32Array
from edgespec.loop.session_files import Saved, another_version, identity_of, read
from edgespec.loop.shapes import TILE, PromptRead, whole_tiles

from ..common.interrupts import Interruptible, Stop
from ..common.nodes import NodeSession
from ..common.signals import Signals
from .cells import IN_WINDOWS, Cells, Rows
from .ggml.files import engine_build, forget_log, last_log, llama_cpp
from .ggml.state_files import CellDetails, load_parts, load_sequence, save_sequence, write_parts
from .seq_ids import SeqIds
from .states import RowStates


class Owner(Interruptible):
    """The part of a backend that sessions use.

    Attributes:
        in_order: keep cells in the order of the tokens.
        computing: as in `Backend`.
        build: as in `Backend`.
        content: of the model's files, for `identity`.
        memory: llama.cpp's cache; None once it is freed.
        context: llama.cpp's; None once it is freed.
        copies: cells can be copied to continue in another tile.
        tiles: attention over long prompts adds up tiles.
        ids: of all sessions.
        cells: of all sessions.
        sessions: all open ones.
        states: that passes keep for a head, or None.
        stop: ends a pass.
    """

    name = "llamacpp"
    kind: Any  # of sessions

    def __init__(
        self,
        context: Any,
        vocab: Vocab,
        capabilities: Capabilities,
        sessions: int,
        in_order: bool,
        *,
        tiles: bool,
        ids: int,
        window: int,
        computing: Mapping[str, str | int | None],
    ) -> None:
        self.vocab, self.capabilities, self.computing = vocab, capabilities, computing
        self.in_order, self.tiles = in_order, tiles
        self.build = engine_build()
        self.content = ""
        self.memory: Any = llama_cpp.llama_get_memory(context)
        self.context = context
        self.copies = not window and "lenders" not in computing
        self.ids = SeqIds(sessions, ids, ids // sessions if capabilities.paths else IN_WINDOWS if window else 1)
        self.cells = Cells(context, ids, window)
        self.sessions: list[Any] = []
        self.states: RowStates | None = None
        self.stop = Stop()
        self._most_trees = sessions - capabilities.kept
        self._most_cells = 0

    @property
    def identity(self) -> dict[str, Any]:
        return identity_of(self, self.content)

    def _check_open(self) -> None:
        if self.context is None:
            raise Closed

    def open(self) -> Any:
        self._check_open()
        if self.ids.all_open:
            raise UsageError("all sessions of this model are open: load it with a larger `sessions`")
        session = self.kind(self, self.ids.open())
        if not self.sessions:
            self._most_cells = 0
        self.sessions.append(session)
        return session

    def release(self, session: Any) -> None:
        self.sessions.remove(session)
        self.ids.close(session.seq_ids)

    def alone(self, session: "LlamaSession") -> bool:
        """True if no other session has cells and none is waste: with `in_order`, a token's cell is its position."""
        if self.cells.wasted:
            return False
        return not any(other.cached or other.has_nodes for other in self.sessions if other is not session)

    def make_room(self, rows: int) -> None:
        trees = min(len(self.sessions), self._most_trees)
        self.cells.make_room(rows, self.sessions, trees=trees * self.capabilities.max_nodes)

    @abstractmethod
    def compute(self, rows: Rows, *, prompt: bool, padding: int) -> None: ...

    @abstractmethod
    def logits_of(self, row: int) -> Float32Array:
        """A copy of a wanted row's logits, shape [V]."""


@dataclass(frozen=True, slots=True)
class Placement:
    """
    Attributes:
        work: with the new nodes.
        first: number of the first new node.
        positions: of the new nodes in the sequence.
        below: by new node, the ids of all leaves below it.
        tips: id -> the last node of its path.
        sources: new id -> the old node whose path it continues.
        order: new nodes, from 0, in the order of their cells.
    """

    work: Work
    first: int
    positions: list[int]
    below: list[list[int]]
    tips: dict[int, int]
    sources: dict[int, int]
    order: list[int]


def depth_first(parents: list[int], first: int) -> list[int]:
    """
    Args:
        parents: of the new nodes; numbers below `first` are old nodes.
        first: number of the first new node.

    Returns:
        New nodes, from 0. The path of first children comes first, because planners put the most probable child first.
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


class LlamaSession(NodeSession):
    """See `edgespec.loop.backend.Session`.

    Attributes:
        seq_ids: own ids, then leaf ids.
        own_ids: as of `cells.Holder`.
        cached: committed tokens that have a cell.
        marks, aligned: as of `cells.Holder`.
        tips: id -> the last node of its path.
    """

    _backend: Owner

    def __init__(self, backend: Owner, seq_ids: list[int]) -> None:
        super().__init__(backend)
        self._memory = backend.memory
        self.seq_ids, self.own_ids = seq_ids, seq_ids.copy()
        self.cached = 0
        self.marks: list[int] = []
        self.aligned = True
        self._edge = 0  # cell after the last cached token; -1: not known

    def _forget_nodes(self) -> None:
        super()._forget_nodes()
        # With `in_order`, `_base` is the nodes' first cell and `_top` the cell after their last one; no other cells lie
        # between if `_top - _base` is the number of nodes. Without it, both only count cells; -1: others follow.
        self._base = self._top = 0
        self._cells: list[int] = []
        self._seqs: list[int] = []  # by node: an id whose path contains it
        self.tips: dict[int, int] = {}

    def place(self, work: Work, free: Iterator[int]) -> Placement:
        """Check `work` and place its nodes, without a change of the session.

        Args:
            work: the nodes.
            free: ids for further leaves.

        Raises:
            ContextFull: a position is outside the context.
            ValueError: the work breaks the contract, or `free` has too few ids.
        """
        positions = self.check(work)
        first, count, parents = self.nodes, len(work.token_ids), work.parents.tolist()
        below: list[list[int]] = [[] for _ in range(count)]
        has_child = {parent - first for parent in parents}
        leaves = [i for i in range(count) if i not in has_child]
        tips, sources = dict(self.tips), dict[int, int]()
        for leaf in leaves:
            path = [leaf]
            while parents[path[-1]] >= first:
                path.append(parents[path[-1]] - first)
            old = parents[path[-1]]
            seq = self._seqs[old] if old >= 0 else -1
            if old < 0 or tips.get(seq) != old:
                seq = next(free, -1)
                if seq < 0:
                    raise ValueError(f"more than {len(tips)} leaves; this backend holds no more")
                if old >= 0:
                    sources[seq] = old
            tips[seq] = first + leaf
            for node in path:
                below[node].append(seq)
        return Placement(work, first, positions, below, tips, sources, depth_first(parents, first))

    def add(self, placement: Placement, start: int) -> tuple[list[int], list[int], list[list[int]]]:
        """Number the nodes, and tag the cells of the nodes they continue.

        Args:
            placement: of the nodes.
            start: the first cell that the next pass fills for this session.

        Returns:
            Tokens, positions and sequence ids of the cells to fill, in their order: unread tokens, then nodes.
        """
        first, order, length = placement.first, placement.order, len(self.token_ids)
        for seq in placement.tips:
            if seq not in self.seq_ids:
                self._backend.ids.give(seq, self, self._backend.sessions, self._memory)
        for seq, old in placement.sources.items():
            stop = self.positions[old] + 1
            llama_cpp.llama_memory_seq_cp(self._memory, self._seqs[old], seq, self.cached, stop)
        unread = self.token_ids[self.cached :]
        tokens = unread + placement.work.token_ids[order].tolist()
        places = [*range(self.cached, length), *(placement.positions[i] for i in order)]
        seq_ids = [list(placement.tips)] * len(unread) + [placement.below[i] for i in order]
        self._add_nodes(placement.work, placement.positions)
        self._seqs.extend(below[0] for below in placement.below)
        start += len(unread)
        if first == 0:
            self._base = start
        self._top = start + len(order)
        cell_of = {node: start + i for i, node in enumerate(order)}
        self._cells.extend(cell_of[i] for i in range(len(order)))
        self.tips = placement.tips
        return tokens, places, seq_ids

    def evaluated(self) -> None:
        if self.cached < len(self.token_ids):
            source = next(iter(self.tips))
            for seq in self.seq_ids:
                if seq not in self.tips:
                    llama_cpp.llama_memory_seq_cp(self._memory, source, seq, self.cached, len(self.token_ids))
            self.marks += self._backend.cells.new_marks(len(self.token_ids) - self.cached)
            self.cached, self._edge = len(self.token_ids), self._base

    def give_up(self, placement: Placement) -> None:
        """Drop all nodes after a failed pass, which filled the cells of `placement` or did not."""
        if placement.first:  # cells of earlier nodes may have others behind them
            for position, below in zip(placement.positions, placement.below, strict=True):
                for seq in filter(self.seq_ids.__contains__, below):  # the others were not given yet
                    llama_cpp.llama_memory_seq_rm(self._memory, seq, position, -1)
            self.rewind(len(self.token_ids))
            return
        for seq in self.seq_ids:
            llama_cpp.llama_memory_seq_rm(self._memory, seq, self.cached, -1)
        self._forget_nodes()

    @property
    def _can_keep(self) -> bool:
        return not self._backend.in_order  # kept nodes leave gaps between cells

    def _commit_cells(self, path: Sequence[int], stay: Sequence[int]) -> None:
        length, count = len(self.token_ids), len(path)
        if self._backend.in_order:
            # Only cells without a gap before them stay, because later tokens would fill the gap.
            count = next((i for i, node in enumerate(path) if self._cells[node] != self._base + i), len(path))
        last = self._seqs[path[count - 1]] if count else -1
        if self._cells:
            cells = self._backend.cells
            if self._top == cells.end and self._top - self._base == len(self._cells):
                self._top = cells.end = self._base + count + len(stay)
            elif self._backend.in_order:
                cells.waste(self.tips, length)
            if count:
                self._edge = self._base + count
        for seq, tip in self.tips.items():
            if tip not in stay:
                start = length + count if seq == last else length
                llama_cpp.llama_memory_seq_rm(self._memory, seq, start, -1)
        if count:
            for seq in self.seq_ids:
                if seq != last:
                    llama_cpp.llama_memory_seq_cp(self._memory, last, seq, length, length + count)
            self.cached = length + count
            self.marks += self._backend.cells.new_marks(count)

    def _keep_nodes(self, nodes: Sequence[int]) -> None:
        cells, seqs = [self._cells[node] for node in nodes], [self._seqs[node] for node in nodes]
        new = {node: i for i, node in enumerate(nodes)}
        tips = {seq: new[tip] for seq, tip in self.tips.items() if tip in new}
        on_top = self._top == self._backend.cells.end
        super()._keep_nodes(nodes)
        if nodes:
            self._cells, self._seqs, self.tips = cells, seqs, tips
            self._top = self._backend.cells.end if on_top else -1
            self._base = self._top - len(nodes)

    def rewind(self, length: int) -> None:
        cells = self._backend.cells
        if length < self.cached or self._tokens:
            if self._backend.alone(self):
                self._edge = cells.end = min(length, self.cached)
            else:
                self._edge = -1
                if self._backend.in_order:
                    cells.waste(self.seq_ids, length)
        for seq in self.seq_ids:
            llama_cpp.llama_memory_seq_rm(self._memory, seq, length, -1)
        self.cached = min(self.cached, length)
        self.aligned = self.aligned or length == 0
        del self.marks[length:]
        super().rewind(length)

    def reusable_prefix(self, length: int, *, short: bool = False) -> int:
        length = super().reusable_prefix(length, short=short) if self.cached else 0
        # New cells of a partial tile must follow its old ones.
        if not self._in_tiles or short or self._continues(length, self._backend.cells.end) or self._may_move(length):
            return length
        return whole_tiles(length)

    @property
    def _in_tiles(self) -> bool:
        """True if attention adds up tiles over prompts, but not over trees."""
        exact = self._backend.capabilities.exact
        return self._backend.tiles and exact is not None and exact.prompts != exact.trees

    def _continues(self, length: int, end: int) -> bool:
        """True if tokens after `length`, in cells from `end` on, get the tiles of an empty cache."""
        if self._backend.alone(self) and end == self._backend.cells.end:  # not behind another work's cells
            return True
        if length == 0:
            return end % TILE == 0
        return self.aligned and length == self.cached == len(self.token_ids) and self._edge == end

    def _may_move(self, length: int) -> bool:
        return self.aligned and length <= self.cached and self._backend.copies

    def tail(self, work: Work, end: int | None = None) -> int:
        """
        Args:
            work: the next one of this session.
            end: of the cells in use; None: return the maximum.

        Returns:
            Committed tokens in a partial tile whose cells must be copied to the end before `work`.
        """
        length = len(self.token_ids)
        if not work.prompt or work.short or not self._in_tiles or self._backend.alone(self):
            return 0
        if end is not None and self._continues(length, end):
            return 0
        return length % TILE if self._may_move(length) else 0

    def replaced(self, start: int, seq: int, end: int) -> None:
        self._backend.cells.waste(self.seq_ids, start)
        for own in self.seq_ids:
            llama_cpp.llama_memory_seq_rm(self._memory, own, start, -1)
            llama_cpp.llama_memory_seq_cp(self._memory, seq, own, start, self.cached)
        self.marks[start:] = self._backend.cells.new_marks(self.cached - start)
        self._edge = end

    def padding_before(self, work: Work, end: int) -> int:
        """
        Returns:
            Cells to fill from `end` on, before a prompt's cells, to get the tiles of an empty cache.

        Raises:
            ContextFull: the prompt continues in a tile whose other cells are elsewhere.
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
        self._backend.ids.take_back(self.seq_ids)
        self._edge, self.aligned = end, aligned
        if self._in_tiles and not self.aligned:
            self._prompt.tokens = 0

    def lost(self) -> None:
        self.cached, self._edge = 0, -1
        self.marks.clear()
        self._prompt.rewind(0)

    def _copy_cells(self, other: Self) -> None:
        for seq in other.seq_ids:
            llama_cpp.llama_memory_seq_cp(self._memory, self.seq_ids[0], seq, 0, self.cached)
        other.cached, other.marks = self.cached, self.marks.copy()
        other._edge, other.aligned = self._edge, self.aligned

    @property
    def unread_committed(self) -> int:
        return len(self.token_ids) - self.cached

    @property
    def has_nodes(self) -> bool:
        return bool(self._tokens)

    def _details(self) -> CellDetails:
        return CellDetails(**self._prompt.as_dict(), held=self.cached, parts=self._backend.cells.window)

    def _write_cells(self, new: Path) -> None:
        cells, seq = self._backend.cells, self._backend.cells.padding_id
        with Signals().held():  # passes need this id empty
            try:
                if cells.window:
                    with new.open("wb") as file:
                        write_parts(file, cells.parts(self, 0, self.cached))
                    return
                llama_cpp.llama_memory_seq_cp(self._memory, self.seq_ids[0], seq, 0, self.cached)
                save_sequence(self._backend.context, new, seq, self.token_ids[: self.cached])
            finally:
                llama_cpp.llama_memory_seq_rm(self._memory, seq, -1, -1)

    def load(self, path: str | Path) -> Any:
        saved, details = read(path, self._backend, CellDetails)
        count, cells = details.held, self._backend.cells
        if details.parts != cells.window:
            raise another_version(path)
        self.rewind(0)
        if self._backend.in_order:
            self._backend.make_room(count + 2 * TILE)
        gap = -cells.end % TILE
        if self._in_tiles and 0 < gap <= count:  # fill the gap before the tile
            self._load_cells(path, saved, details)
            cells.waste(self.seq_ids[:1], 0, gap)
            for seq in self.seq_ids:
                llama_cpp.llama_memory_seq_rm(self._memory, seq, -1, -1)
            cells.end += gap
        self._load_cells(path, saved, details)
        self.token_ids, self.cached = saved.token_ids, count
        self._prompt = PromptRead(details.read, details.short)
        self.marks, aligned = list(cells.new_marks(count)), cells.end % TILE == 0
        cells.end += count
        self.moved(cells.end, aligned)
        return saved.note

    def _load_cells(self, path: str | Path, saved: Saved, details: CellDetails) -> None:
        """Fill the next cells from a file.

        Raises:
            SessionFileError: the file is wrong; no cells are filled.
        """
        if not self._backend.cells.window:
            load_sequence(self._backend.context, path, self.seq_ids[0], saved.token_ids[: details.held])
            return
        forget_log()
        if not all(self._backend.cells.put(part, self.own_ids) for part in load_parts(path, saved.size)):
            for seq in self.seq_ids:
                llama_cpp.llama_memory_seq_rm(self._memory, seq, -1, -1)
            raise SessionFileError(f"{path}: llama.cpp cannot read the session: {last_log()}")

    def close(self) -> None:
        if self.seq_ids and self._backend.memory is not None:
            self.rewind(0)
            self._backend.release(self)
        self.seq_ids = []


def paddings(
    sessions: Sequence[LlamaSession], batch: Sequence[Work], cells: Cells, every: Sequence[LlamaSession]
) -> list[int]:
    """
    Args:
        sessions: of the works.
        batch: the works of the next pass.
        cells: of all sessions.
        every: all open sessions.

    Returns:
        Rows of padding before each work, so that prompts have the tiles of an empty cache. Before the first work,
        copied cells replace the rows: a pass has no room for rows beside the longest prompt. In a mixture they would
        also choose experts, and so change the prompt's bits.

    Raises:
        ContextFull: a prompt cannot be continued; nothing has changed.
    """
    if tail := sessions[0].tail(batch[0], cells.end):
        cells.move(sessions[0], len(sessions[0].token_ids) - tail, every)
    end, found = cells.end, list[int]()
    for session, work in zip(sessions, batch, strict=True):
        found.append(session.padding_before(work, end))
        end += found[-1] + session.unread_committed + len(work.token_ids)
    if found[0] and cells.fill(found[0], every):
        found[0] = 0
    return found
