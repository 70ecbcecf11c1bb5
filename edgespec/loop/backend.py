"""The contract between the program and the engines that run models.

One verb, `Backend.forward`, does prefill, draft expansion, verification and several sequences at
once. Every backend passes `tests/contract.py`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from edgespec.loop.sampling import Float32Array, IdArray, Scores
from edgespec.loop.shapes import BatchInvariance
from edgespec.loop.tree import IntArray


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Limits and properties of a loaded model."""

    context_length: int  # most committed tokens of one session
    max_nodes: int  # most nodes of one forward, and most uncommitted nodes of one session
    max_wanted: int  # most wanted nodes of one forward
    max_leaves: int  # most leaves among one session's uncommitted nodes: see `leaves`
    logit_tolerance: float  # most a logit changes with the shape of the pass it is computed in
    streams: bool = False  # every pass reads weights from a disk or over a bus, so a wide tree is nearly free
    read_seconds: float = inf  # time that each pass spends on that; inf: not known
    layers: int = 1  # 1 also if the number is not known
    experts: tuple[int, int] | None = None  # (of a layer, used by a token); None: passes read all weights
    paths: bool = False  # a tree is evaluated path by path, so a node costs once for each path: `path_cost.py`
    gaps: bool = False  # attention adds up groups of cells, with some that a node does not see: there is no row class
    exact: BatchInvariance | None = None  # None: passes have any shape, and logits move by `logit_tolerance`
    spare_leaves: int | None = None  # most leaves of all sessions, the first of each left out; None: no limit
    one_thread: bool = False  # passes are made in one thread only
    cells: int | None = None  # most committed tokens of all sessions; None: each has room for a whole context

    def leaves(self, sequences: int) -> int:
        """Most leaves of one session, if `sequences` sessions have trees at once."""
        if self.spare_leaves is None:
            return self.max_leaves
        return min(self.max_leaves, 1 + self.spare_leaves // sequences)


class Vocab(Protocol):
    """A model's tokenizer."""

    size: int
    bos_id: int | None  # start of text
    eos_id: int | None  # end of text
    eog_ids: frozenset[int]  # end of text, end of turn, …: generation stops here
    chat_template: str | None  # Jinja source

    @property
    def fingerprint(self) -> str:
        """Equal for two tokenizers exactly when all token texts are equal."""

    def encode(self, text: str, *, add_bos: bool, parse_special: bool) -> list[int]:
        """Token ids of `text`.

        Args:
            text: any text.
            add_bos: put the start token first, if this model wants one.
            parse_special: read the names of control tokens in the text as those tokens.
        """

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that the token adds to the text; empty for control tokens."""

    def token_text(self, token_id: int) -> str:
        """The token's name, for messages."""


class Session(Protocol):
    """One sequence's cache in a loaded model.

    Nodes evaluated since the last `commit` are numbered from 0 in the order they were given.
    """

    token_ids: list[int]  # committed tokens whose keys and values are held

    @property
    def unread_committed(self) -> int:
        """Number of committed tokens that the next pass reads again; they count as rows of it."""

    def reusable_prefix(self, length: int, *, short: bool = False) -> int:
        """Most of the first `length` committed tokens that a prompt which starts with them need not read again.

        `short`: the prompt `is_short` (`passes.py`).
        """

    def commit(self, path: Sequence[int]) -> None:
        """Commit these nodes, a chain that starts under the last committed token, and drop all other nodes."""

    def rewind(self, length: int) -> None:
        """Keep the first `length` committed tokens; drop all others and all nodes."""

    def fork(self) -> "Session":
        """A new session that shares the committed tokens; uncommitted nodes stay behind."""

    def save(self, path: str | Path, note: Any = None) -> None:
        """Write tokens and cache to a file, whole or not at all: `session_files.py`. Raises SessionFileError."""

    def load(self, path: str | Path) -> Any:
        """Replace tokens and cache by the saved ones, equal to the bit. Returns the note that was saved with them.

        After an error the session may be empty.

        Raises:
            SessionFileError: there is no whole file, or it is another model's, or was computed in another way.
            ContextFull: other sessions leave no room.
        """

    def close(self) -> None:
        """Free the cache. Safe to call twice."""


@runtime_checkable
class KeepsNodes(Protocol):
    """An optional feature of sessions: nodes below a commit can stay. `planners/ahead.py` alone uses it."""

    def commit_keeping(self, path: Sequence[int]) -> IntArray:
        """As `commit`, but nodes under the last of `path` stay where they can.

        Those that stay are numbered 0, 1, … again.

        Returns:
            Their old numbers; shape [0] where none can stay.
        """


@dataclass(frozen=True, slots=True)
class Work:
    """Nodes to evaluate in one session."""

    session: Session
    token_ids: IntArray  # [n]
    parents: IntArray  # [n]: a node's number (this work's nodes follow those evaluated before), or -1: last committed
    wanted: IntArray  # numbers of those of this work's nodes whose logits are needed
    prompt: bool = False  # a chain that is part of a prompt: no draft tokens, and the session has no nodes
    short: bool = False  # the prompt has a row class of its own: see `BatchInvariance.short`


class Logits(Protocol):
    """Next-token logits of a work's wanted nodes. Valid until the backend's next forward."""

    def row(self, node: int) -> Float32Array:
        """One node's logits, shape [V], the caller's to keep."""

    def state(self, node: int) -> Float32Array:
        """The input of the output matrix, if the backend keeps it; else shape [0].

        For `exact.py`: weights of few bits round it, so logits hide small differences.
        """

    def top(
        self, nodes: Sequence[int], k: int, temperature: float, noise: Sequence[Float32Array | None]
    ) -> tuple[list[IdArray], list[Scores]]:
        """Per node, the k best of log-softmax((logits + noise) / temperature): ids [k] and values [k].

        `noise` has an array or None for each node; where it is shorter than the vocabulary, the ids beyond its end
        do not exist. The normaliser runs over all ids that do.
        """


class Backend(Protocol):
    """A loaded model."""

    name: str  # by which `load_backend` knows its engine
    vocab: Vocab
    capabilities: Capabilities
    notes: Sequence[str]  # for the user: how the model was loaded, a line each
    build: str  # the engine, its version, and its name for the processor
    computing: Mapping[str, str | int | None]  # options that decide how it computes, as they turned out

    @property
    def wait_seconds(self) -> float:
        """Time that passes have waited for weights from a disk or over a bus, since the model was loaded."""

    def open(self) -> Session:
        """A new, empty session.

        Raises:
            UsageError: all sessions this backend was loaded for are open.
        """

    def keep_to(self, exact: BatchInvariance) -> None:
        """Keep passes in these row classes, short ones padded, so that logits agree to the bit.

        No sequence sees the padding. Call it before the first session is opened.
        """

    @property
    def identity(self) -> Mapping[str, Any]:
        """Facts that decide every bit of a cache. A session file can be loaded where they are equal."""

    def interrupt(self) -> None:
        """From any thread: end the current pass early, within a layer where weights stream; without one, the next."""

    def forward(self, batch: Sequence[Work]) -> list[Logits]:
        """One pass over all works' nodes. A node sees the committed tokens, its ancestors and itself.

        Raises:
            ContextFull: the nodes do not fit into the cache. Nothing has changed then.
            Interrupted: `interrupt` was called. The works' sessions have their committed tokens and no nodes.
            ValueError: a work breaks the contract (more nodes, leaves or wanted nodes than the capabilities say).
        """

    def close(self) -> None:
        """Free the model and every session. Safe to call twice."""
