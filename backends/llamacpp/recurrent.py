"""Models with recurrent layers: trees as paths (`backends/common/paths.py`).

llama.cpp's recurrent memory has one state for each sequence id (llama-memory-recurrent.cpp), which cannot be rewound. A
copied sequence shares the state until one of them gets tokens; a copy of no positions copies only the state. Attention
has cells with ids, as in `session.py`. A session has these ids:

    text      the committed tokens that have a state: their cells, and that state
    lanes     the paths of a pass: each starts as a copy of `text`, or of a lane that ended with a node
    states    of shorter prefixes, without cells, for state lanes and for prompts with a common beginning

Shorter paths are padded, because llama.cpp reads all weights again for each length of sequences. Only the first path's
cells follow those of `text`, so with `in_order` accepted tokens of other paths are computed again.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any, Self

from edgespec.errors import Interrupted, UsageError, undone
from edgespec.loop.backend import Capabilities, Logits, Work
from edgespec.loop.session_files import Saved
from edgespec.loop.shapes import TILE

from ..common.nodes import NodeSession, checked
from ..common.paths import (
    KEPT_STATES,
    MOST_PATHS,
    MOST_UNREAD,
    MOST_UNREAD_IN_MEMORY,
    Path,
    States,
    paths_of,
    state_lane_from,
    states_within,
)
from ..common.row_logits import RowLogits, RowStateLogits
from .cells import Rows
from .ggml.files import LLAMA_MAX_SEQ, llama_cpp, metadata
from .ggml.state_files import CellDetails, load_sequence, save_sequence
from .session import Owner

OTHER_MEMORY = ("deepseek4", "glm5-next", "qwen4exp")  # general.architecture of models with another memory


def is_recurrent(model: Any) -> bool:
    return bool(llama_cpp.llama_model_is_recurrent(model) or llama_cpp.llama_model_is_hybrid(model))


def why_not(model: Any) -> str:
    name = metadata(model, "general.architecture").decode()
    if name in OTHER_MEMORY:
        return f"llama.cpp keeps the states of {name} where they cannot be copied"
    if llama_cpp.llama_model_n_swa(model):  # a rewind needs earlier cells of the window
        return (
            "some layers are recurrent and others have a sliding window, of which llama.cpp keeps only the last cells"
        )
    return ""


def most_paths(model: Any, budget: int, sessions: int) -> int:
    """
    Returns:
        Most paths of a tree, by the memory for states; 0 if no layer is recurrent.

    Raises:
        UsageError: there are too few sequence ids for `sessions`.
    """
    if not is_recurrent(model):
        return 0
    name = metadata(model, "general.architecture").decode()
    inner, size = (metadata(model, f"{name}.ssm.{key}") for key in ("inner_size", "state_size"))
    state = 4 * int(inner or 0) * int(size or 0) * llama_cpp.llama_model_n_layer(model)
    states = states_within(state, llama_cpp.llama_model_size(model), LLAMA_MAX_SEQ)
    if LLAMA_MAX_SEQ // sessions < ids_of_session(1):
        most = LLAMA_MAX_SEQ // ids_of_session(1)
        raise UsageError(f"{sessions} texts at once are too many: some layers are recurrent, so llama.cpp takes {most}")
    return max(1, min(MOST_PATHS, budget, states // sessions - ids_of_session(0)))


def ids_of_session(paths: int) -> int:
    """Sequence ids of a session: `text`, lanes for paths, one state lane, states, one spare id for a new state."""
    return 1 + (paths + 1) + (KEPT_STATES + 1)


def reads_weights(limits: Capabilities) -> bool:
    return limits.streams or limits.experts is not None


def most_unread(limits: Capabilities) -> int:
    return MOST_UNREAD if reads_weights(limits) else MOST_UNREAD_IN_MEMORY


class Between(Interrupted):
    """Interrupted between two calls of llama.cpp: only the session's nodes are lost."""


@dataclass(slots=True)
class Lane:
    """
    Attributes:
        id: of a sequence of the pass.
        tokens: to evaluate.
        first: position of the first token.
        nodes: node -> index of its token, if no lane before has it.
        wanted: node -> index of the token with its logits.
        leaf: the last node; -1: none.
        ended: evaluated without padding after the last token.
    """

    id: int
    tokens: list[int]
    first: int
    nodes: dict[int, int] = field(default_factory=dict)
    wanted: dict[int, int] = field(default_factory=dict)
    leaf: int = -1
    ended: bool = False


class LlamaRecurrentSession(NodeSession):
    _backend: Owner
    _form = CellDetails

    def __init__(self, backend: Owner, seq_ids: list[int]) -> None:
        self._memory = backend.memory
        self.seq_ids = seq_ids
        self._text, *others = seq_ids
        self._states = States[int](KEPT_STATES)  # sequence ids; the cells of `text` end at its last state
        self._free = others[-KEPT_STATES - 1 :]
        self._lanes = others[: -KEPT_STATES - 1]  # free lanes in rising order: some models require adjacent ids
        self._after_prompt = False
        self._tips: dict[int, int] = {}
        super().__init__(backend)

    def _forget_nodes(self) -> None:
        super()._forget_nodes()
        self._in_place = -1  # node whose cells follow those of `text`
        for lane in self._tips.values():
            self._release(lane)
        self._tips = {}
        self._text_lane: Lane | None = None
        # For unread tokens only; `text` gets its state, unless padding follows its last token.
        self.state_lane: Lane | None = None

    def _copy(self, source: int, target: int, start: int = -1, stop: int = -1) -> None:
        llama_cpp.llama_memory_seq_cp(self._memory, source, target, start, stop)

    def _copy_state(self, source: int, target: int) -> None:
        self._copy(source, target, 0, 0)

    def _remove(self, seq: int, start: int = -1) -> None:
        llama_cpp.llama_memory_seq_rm(self._memory, seq, start, -1)

    def _release(self, lane: int) -> None:
        self._remove(lane)
        self._lanes = sorted([*self._lanes, lane])

    def unread_lane(self, most: int) -> Lane:
        """Begin a separate pass over at most `most` unread tokens; call `read_unread` after it."""
        lane, start = self._lanes.pop(0), self._states.last
        self._copy(self._text, lane)
        self._text_lane = Lane(lane, self.token_ids[start : start + most], start)
        return self._text_lane

    def read_unread(self) -> None:
        assert self._text_lane
        self._go_on(self._text_lane.id, self._text_lane.first + len(self._text_lane.tokens))
        self._release(self._text_lane.id)
        self._text_lane = None

    def _go_on(self, lane: int, length: int) -> None:
        self._copy(lane, self._text, self._states.last, length)
        self._keep(length)

    def _keep(self, at: int) -> None:
        seq = self._free.pop()
        self._copy_state(self._text, seq)
        self._drop(self._states.add(at, seq))

    def _drop(self, states: list[int]) -> None:
        for seq in states:
            self._remove(seq)
            self._free.append(seq)

    def begin(self, work: Work, positions: Sequence[int], most_rows: int) -> list[Lane]:
        first, length, last = self.nodes, len(self.token_ids), self._states.last
        if self._after_prompt and not work.prompt:
            self._states.mark(length)
        self._add_nodes(work, positions)
        paths = paths_of(self._parents, first, self._tips)
        while len(self._lanes) < len(paths):
            self._give_up_a_tip(paths)
            paths = paths_of(self._parents, first, self._tips)
        wanted, lanes, new = set(work.wanted.tolist()), list[Lane](), set(range(first, self.nodes))
        for path in paths:
            unread = self.token_ids[last:] if path.start < 0 else []
            start = last if path.start < 0 else self.positions[path.nodes[0]]
            tokens = unread + [self._tokens[node] for node in path.nodes]
            lane = Lane(self._lanes.pop(0), tokens, start, leaf=path.nodes[-1])
            self._copy(self._text if path.start < 0 else self._tips[path.start], lane.id)
            lane.nodes = {node: len(unread) + i for i, node in enumerate(path.nodes) if node in new}
            lane.wanted = {node: i for node, i in lane.nodes.items() if node in wanted}
            new -= lane.nodes.keys()
            if path.start < 0 and self._text_lane is None:
                self._text_lane = lane
            lanes.append(lane)
        if first == 0:
            self._in_place = lanes[0].leaf
        if self._text_lane and length > last and self._lanes and reads_weights(self._backend.capabilities):
            rows = max(len(lane.tokens) for lane in lanes)
            at = state_lane_from({0, *self._states.kept}, length, len(lanes), rows, most_rows)
            if at is not None:
                self.state_lane = Lane(self._lanes.pop(0), self.token_ids[at:], at)
                if at:
                    self._copy(self._text, self.state_lane.id, 0, at)
                    self._copy_state(self._states.kept[at], self.state_lane.id)
        return lanes

    def _give_up_a_tip(self, paths: Sequence[Path]) -> None:
        used = {path.start for path in paths}
        tip = min(self._tips, key=lambda node: (node in used, node))
        self._release(self._tips.pop(tip))

    def evaluated(self, lanes: Sequence[Lane]) -> None:
        if self.state_lane:
            if self.state_lane.ended:
                assert self._text_lane
                length = len(self.token_ids)
                self._copy(self._text_lane.id, self._text, self._states.last, length)
                self._copy_state(self.state_lane.id, self._text)
                self._keep(length)
            self._release(self.state_lane.id)
        for lane in lanes:
            if lane.ended:
                self._tips[lane.leaf] = lane.id
            else:
                self._release(lane.id)
        self._text_lane = self.state_lane = None

    def drop_nodes(self) -> None:
        self._tips = {}
        self._forget_nodes()
        self._lanes = self.seq_ids[1 : -KEPT_STATES - 1]
        for seq in self._lanes:
            self._remove(seq)

    def give_up(self) -> None:
        """Drop all cells and states.

        A failed pass may have lost their contents; an interrupted commit may have left cells without their state.
        """
        self.drop_nodes()
        for seq in self.seq_ids:
            self._remove(seq)
        self._free += self._states.cut(-1)

    @property
    def behind(self) -> int:
        return len(self.token_ids) - self._states.last

    @property
    def unread_committed(self) -> int:
        return self.behind if self.behind <= most_unread(self._backend.capabilities) else 0

    def reusable_prefix(self, length: int, *, short: bool = False) -> int:
        return length if length == len(self.token_ids) else self._states.before(length)

    @property
    def _can_keep(self) -> bool:
        return False

    def _commit_cells(self, path: Sequence[int], stay: Sequence[int]) -> None:
        length = len(self.token_ids)
        self._after_prompt = self._prompt.reading
        for i in range(len(path) - 1, -1, -1):
            if path[i] in self._tips and (path[i] == self._in_place or not self._backend.in_order):
                with undone(self.give_up):
                    self._go_on(self._tips[path[i]], length + i + 1)
                break

    def rewind(self, length: int) -> None:
        super().rewind(length)
        if length >= self._states.last:
            return
        at = self._states.before(length)
        if at:
            self._copy_state(self._states.kept[at], self._text)
        self._remove(self._text, at if at else -1)
        self._drop(self._states.cut(at))

    def _copy_cells(self, other: Self) -> None:
        self._copy(self._text, other._text)
        other._states = self._states.copy()
        for at, seq in self._states.kept.items():
            other._states.kept[at] = other._free.pop()
            self._copy_state(seq, other._states.kept[at])

    def _details(self) -> CellDetails:
        return CellDetails(**self._prompt.as_dict(), held=self._states.last)

    def _write_cells(self, new: FilePath) -> None:
        save_sequence(self._backend.context, new, self._text, self.token_ids[: self._states.last])

    def _load_cells(self, path: str | FilePath, saved: Saved, details: CellDetails) -> None:
        end = details.held
        load_sequence(self._backend.context, path, self._text, saved.token_ids[:end])
        if end:
            self._keep(end)

    def close(self) -> None:
        if self.seq_ids and self._backend.memory is not None:
            self.give_up()
            self.rewind(0)
            self._backend.release(self)
        self.seq_ids = []


def forward_recurrent(backend: Owner, batch: Sequence[Work], most_rows: int) -> list[Logits]:
    """See `edgespec.loop.backend.Backend`; one call of llama.cpp takes at most `most_rows` rows."""
    sessions, positions = checked(batch, backend.capabilities)
    streams, reading = reads_weights(backend.capabilities), any(work.prompt for work in batch)
    if not streams and not reading:
        most_rows = min(most_rows, TILE - 1)  # attention over more rows adds up tiles, which rounds differently
    # Copies, because a pass may take several calls of llama.cpp.
    found = [RowLogits() if backend.states is None else RowStateLogits() for _ in batch]
    try:
        for session in sessions:
            while session.behind > most_unread(backend.capabilities):
                lane = session.unread_lane(most_rows)
                _compute(backend, [(lane, RowLogits())], len(lane.tokens), prompt=False)
                session.read_unread()
        begun = zip(sessions, batch, positions, strict=True)
        lanes = [session.begin(work, places, most_rows) for session, work, places in begun]
        together: dict[object, list[tuple[Lane, RowLogits]]] = {}
        for work, session, mine, logits in zip(batch, sessions, lanes, found, strict=True):
            every = [*mine, session.state_lane] if session.state_lane else mine
            rows = max(len(lane.tokens) for lane in every)
            key = id(work) if work.prompt else 0 if streams else rows
            together.setdefault(key, []).extend((lane, logits) for lane in every)
        for group in together.values():
            rows = max(len(lane.tokens) for lane, _ in group)
            for start in range(0, len(group), max(1, most_rows // rows)):
                part = group[start : start + max(1, most_rows // rows)]
                _compute(backend, part, rows, prompt=reading)
        for session, mine in zip(sessions, lanes, strict=True):
            session.evaluated(mine)
    except Between:
        for session in sessions:
            session.drop_nodes()
        raise
    except BaseException:
        for one in backend.sessions:
            one.give_up()
        raise
    return list(found)


def _compute(backend: Owner, lanes: Sequence[tuple[Lane, RowLogits]], length: int, *, prompt: bool) -> None:
    """Evaluate one rectangle of lanes, each padded to `length` tokens.

    Raises:
        Between: the backend was interrupted before the call.
    """
    if backend.stop.is_set():
        raise Between("the pass was interrupted")
    rows = Rows([], [], [], [])
    for number, (lane, _) in enumerate(lanes):
        filled = lane.tokens + lane.tokens[-1:] * (length - len(lane.tokens))
        rows.add(filled, list(range(lane.first, lane.first + length)), [[lane.id]] * length)
        rows.wanted += [number * length + place for place in lane.wanted.values()]
    backend.compute(rows, prompt=prompt, padding=0)
    for number, (lane, logits) in enumerate(lanes):
        lane.ended = len(lane.tokens) == length
        for node, place in lane.wanted.items():
            logits.rows[node] = backend.logits_of(number * length + place)
        if backend.states and isinstance(logits, RowStateLogits):
            places = [number * length + place for place in lane.nodes.values()]
            logits.given |= zip(lane.nodes, backend.states.rows(places), strict=True)
