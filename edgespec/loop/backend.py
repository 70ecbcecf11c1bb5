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
    """What a loaded model can do."""

    context_length: int  # most committed tokens of one session
    max_nodes: int  # most nodes of one forward, and most uncommitted nodes of one session
    max_wanted: int  # most wanted nodes of one forward
    max_leaves: int  # most leaves among one session's uncommitted nodes: see `leaves`
    logit_tolerance: float  # most a logit changes with the shape of the pass it is computed in
    streams: bool = False  # every pass reads weights from a disk or over a bus, so a wide tree is nearly free
    read_seconds: float = inf  # … that of every pass take so long; inf: not known
    layers: int = 1  # that follow each other, where that is known
    experts: tuple[int, int] | None = None  # of a layer, used by a token; if passes read only those that are used
    paths: bool = False  # a tree is evaluated path by path, so nodes on several of them cost as often: `paths.py`
    gaps: bool = False  # attention adds up cells in groups, those that a node does not see included: nothing is exact
    exact: BatchInvariance | None = None  # None: passes have any shape, and logits move by `logit_tolerance`
    spare_leaves: int | None = None  # most leaves of all sessions, the first of each left out; None: no limit
    one_thread: bool = False  # passes are made in one thread only
    cells: int | None = None  # most committed tokens of all sessions; None: each has room for a whole context

    def leaves(self, texts: int) -> int:
        """Most leaves of a session where so many have trees at once."""
        return self.max_leaves if self.spare_leaves is None else min(self.max_leaves, 1 + self.spare_leaves // texts)


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
        """What the token adds to the text; empty for control tokens."""

    def token_text(self, token_id: int) -> str:
        """The token's name, for messages."""


class Session(Protocol):
    """One sequence's cache in a loaded model.

    Nodes evaluated since the last `commit` are numbered 0, 1, … in the order they were given.
    """

    token_ids: list[int]  # committed tokens whose keys and values are held

    @property
    def unread_committed(self) -> int:
        """Committed tokens that the next pass reads again; they count as rows of it."""

    def reusable_prefix(self, length: int, *, short: bool = False) -> int:
        """Of the first `length` committed tokens, how many a prompt that starts with them need not read again.

        `short`: a prompt that `is_short`.
        """

    def commit(self, path: Sequence[int]) -> None:
        """Commit these nodes, a chain that starts under the last committed token, and drop all other nodes."""

    def rewind(self, length: int) -> None:
        """Keep the first `length` committed tokens; drop all others and all nodes."""

    def fork(self) -> "Session":
        """A new session that shares the committed tokens; uncommitted nodes stay behind."""

    def save(self, path: str | Path, note: Any = None) -> None:
        """Write text and cache to a file, whole or not at all: `saved.py`. Raises SessionFileError."""

    def load(self, path: str | Path) -> Any:
        """Become what was saved, to the bit, in the place of what is here; the note that was saved with it.

        Raises:
            SessionFileError: there is no whole file, or it is another model's, or was computed in another way.
            ContextFull: other sessions leave no room for it. As above, this one may be empty then.
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
    prompt: bool = False  # a chain that is part of a prompt: no guesses, and the session has no nodes
    short: bool = False  # … that is so short that it has a class of its own: see `BatchInvariance.short`


class Logits(Protocol):
    """Next-token logits of a work's wanted nodes. Valid until the backend's next forward."""

    def row(self, node: int) -> Float32Array:
        """One node's logits, shape [V], the caller's to keep."""

    def state(self, node: int) -> Float32Array:
        """What the output matrix made them from, where the backend keeps it, else of shape [0].

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
    notes: Sequence[str]  # what a user should know about how the model was loaded, a line each
    build: str  # the engine, its version, and what it says of the processor
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
        """From now on passes have these shapes, short ones padded, and logits agree to the bit.

        Padding takes no part in any text. To be called before the first session is opened.
        """

    @property
    def identity(self) -> Mapping[str, Any]:
        """What decides every bit of a cache, weights, engine and class: where it is equal, sessions can be loaded."""

    def interrupt(self) -> None:
        """From any thread: have the pass under way end early, within a layer where weights stream, else the next."""

    def forward(self, batch: Sequence[Work]) -> list[Logits]:
        """One pass over all works' nodes. A node sees the committed tokens, its ancestors and itself.

        Raises:
            ContextFull: the nodes do not fit into the cache. Nothing has changed then.
            Interrupted: `interrupt` was called. The works' sessions have their committed tokens and no nodes.
            ValueError: a work breaks the contract (more nodes, leaves or wanted nodes than the capabilities say).
        """

    def close(self) -> None:
        """Free the model and every session. Safe to call twice."""
