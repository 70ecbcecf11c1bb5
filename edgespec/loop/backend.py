"""The contract between the loop and the engines, tested by `tests/contract.py`."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any, Protocol, Self, runtime_checkable

from edgespec.loop.sampling import Float32Array, IdArray, Scores
from edgespec.loop.shapes import BatchInvariance
from edgespec.loop.tree import IntArray


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Limits and features of a loaded model.

    Attributes:
        context_length: most committed tokens of one session.
        max_nodes: most nodes of one forward, and most uncommitted nodes of one session.
        max_wanted: most wanted nodes of one forward.
        max_leaves: most leaves among one session's uncommitted nodes: see `leaves`.
        logit_tolerance: most a logit changes with the shape of the pass it is computed in.
        streams: every pass reads weights from a disk or over a bus, so a wide tree is nearly free.
        read_seconds: seconds that every pass reads weights; inf: unknown.
        layers: number of layers; 1 where unknown.
        experts: (experts of a layer, experts that a token uses), if passes read only those used; else None.
        paths: trees are evaluated path by path: a node on k paths costs k times.
        by_cell: least and most rows of passes whose attention adds up groups of cells, hidden ones included, so that a
            row depends on where its tokens' cells lie. Such passes take no trees and share no row class with others.
        exact: row classes that passes are kept to; None: passes have any shape, and logits move by `logit_tolerance`.
        spare_leaves: most leaves of all sessions, the first of each not counted; None: no limit.
        one_thread: one thread must make all passes.
        kept: sessions that may be open besides those of sequences at work; they keep tokens in the same `cells`.
        cells: most committed tokens of all sessions; None: each has room for a whole context.
        widest: draft tokens of one pass for which memory is planned, as `LoadOptions.widest` asks; 0: its `budget`.
        states: size of the state that `GivesStates.states` gives of a node; 0: its logits are no `GivesStates`.
        head: it drafts from its target's states: its sessions are `TakesStates`.
        tiled: a GPU computes its passes, whose kernels compute tiles where rows are many: then more may take less time.
        approximate: what changes the distribution of its texts, such as "sparse attention 0.99"; "": nothing does.
    """

    context_length: int
    max_nodes: int
    max_wanted: int
    max_leaves: int
    logit_tolerance: float
    streams: bool = False
    read_seconds: float = inf
    layers: int = 1
    experts: tuple[int, int] | None = None
    paths: bool = False
    by_cell: tuple[tuple[int, int], ...] = ()
    exact: BatchInvariance | None = None
    spare_leaves: int | None = None
    one_thread: bool = False
    cells: int | None = None
    kept: int = 0
    widest: int = 0
    states: int = 0
    head: bool = False
    tiled: bool = False
    approximate: str = ""

    def leaves(self, sequences: int) -> int:
        """Most leaves of one session, if `sequences` sessions have trees at once."""
        if self.spare_leaves is None:
            return self.max_leaves
        return min(self.max_leaves, 1 + self.spare_leaves // sequences)


@dataclass(frozen=True, slots=True)
class Placed:
    """Places of a model's layers.

    Attributes:
        layers: of the model.
        device: that computes some of them; "": the processor computes all.
        on_device: how many it computes.
        streamed: how many do not stay where they are computed.
        shares: layers of each device, and its name, if there are several.
    """

    layers: int
    device: str = ""
    on_device: int = 0
    streamed: int = 0
    shares: tuple[tuple[int, str], ...] = ()

    @classmethod
    def on(cls, shares: Iterable[tuple[int, str]], layers: int, streamed: int = 0) -> Self:
        """By the number of layers and the name of each device that is not the processor."""
        some = tuple((count, name) for count, name in shares if count)
        names, on_device = ", ".join(name for _, name in some), sum(count for count, _ in some)
        return cls(layers, names, on_device, streamed, some if len(some) > 1 else ())


@runtime_checkable
class TellsPlaced(Protocol):
    """
    Attributes:
        placed: see `Placed`.
    """

    placed: Placed


class Vocab(Protocol):
    """A model's tokenizer.

    Attributes:
        bos_id: start of text.
        eos_id: end of text.
        eog_ids: tokens that end generation: end of text, end of turn.
        chat_template: Jinja source.
        tool_template: that of a conversation with tools, if it is another.
    """

    size: int
    bos_id: int | None
    eos_id: int | None
    eog_ids: frozenset[int]
    chat_template: str | None
    tool_template: str | None

    @property
    def longest(self) -> int:
        """Characters of the longest token's text."""

    @property
    def fingerprint(self) -> str:
        """Equal for two tokenizers exactly when all token texts are equal."""

    def encode(self, text: str, *, add_bos: bool, parse_special: bool) -> list[int]:
        """
        Args:
            text: any text.
            add_bos: put the start token first, if this model wants one.
            parse_special: read the names of control tokens as those tokens.

        Returns:
            Token ids of `text`.
        """

    def token_bytes(self, token_id: int) -> bytes:
        """The token's bytes in the output; empty for control tokens."""

    def token_text(self, token_id: int) -> str:
        """The token's name, for messages."""


class Session(Protocol):
    """One sequence's cache in a loaded model.

    Nodes evaluated since the last `commit` are numbered from 0, in the order of their evaluation.

    Attributes:
        token_ids: committed tokens whose keys and values are held.
    """

    token_ids: list[int]

    @property
    def unread_committed(self) -> int:
        """Number of committed tokens that the next pass evaluates, besides its nodes."""

    def reusable_prefix(self, length: int, *, short: bool = False) -> int:
        """
        Args:
            length: committed tokens that the prompt begins with.
            short: the prompt has the row class `BatchInvariance.short`.

        Returns:
            Number of cached tokens that a prompt can reuse.
        """

    def commit(self, path: Sequence[int]) -> None:
        """Commit `path`, a chain under the last committed token, and drop all other nodes."""

    def rewind(self, length: int) -> None:
        """Keep the first `length` committed tokens; drop all others and all nodes."""

    def fork(self) -> "Session":
        """A new session that shares the committed tokens; uncommitted nodes stay behind."""

    def save(self, path: str | Path, note: Any = None) -> None:
        """Write tokens, cache and note to a file, whole or not at all.

        Raises:
            SessionFileError: it cannot be written.
        """

    def load(self, path: str | Path) -> Any:
        """Replace tokens and cache by those saved, bit-identical.

        Returns:
            The note.

        Raises:
            SessionFileError: the file is damaged, of another model, or computed in another way.
            ContextFull: other sessions leave no room; after either error the session may be empty.
        """

    def close(self) -> None:
        """Free the cache; safe to call twice."""


@runtime_checkable
class KeepsNodes(Protocol):
    """A session whose nodes below a commit can stay: an optional feature, for `planners/ahead.py`."""

    def commit_keeping(self, path: Sequence[int]) -> IntArray:
        """Commit as `commit` does, but keep nodes under the last of `path` where possible, numbered from 0 again.

        Returns:
            Old numbers of the kept nodes, [k]; shape [0] where none can stay.
        """


@runtime_checkable
class TakesStates(Protocol):
    """A session of a head, which drafts from the target's states: an optional feature, for `planners/drafting.py`.

    A row of a head takes a token and the state of the position before it. The state is the target's where it was
    given, else the head's own, else zeros.
    """

    def give(self, start: int, states: Float32Array) -> None:
        """Give the target's states of the positions from `start` on, [n, `Capabilities.states`]."""


@dataclass(frozen=True, slots=True)
class Work:
    """Nodes to evaluate in one session.

    Attributes:
        token_ids: [n].
        parents: [n] node numbers in the session, where this work's nodes follow earlier ones; -1: last committed.
        wanted: [m] node numbers in the session: nodes of this work whose logits are needed.
        prompt: part of a prompt: a chain without draft tokens, in a session without nodes.
        short: of the row class `BatchInvariance.short`.
    """

    session: Session
    token_ids: IntArray
    parents: IntArray
    wanted: IntArray
    prompt: bool = False
    short: bool = False


class Logits(Protocol):
    """Next-token logits of a work's wanted nodes, valid until the backend's next forward."""

    def row(self, node: int) -> Float32Array:
        """One node's logits, shape [V], the caller's to keep."""

    def view(self, node: int) -> Float32Array:
        """As `row`, but the engine's: not to be written to, and valid until the backend's next forward."""

    def state(self, node: int) -> Float32Array:
        """
        Returns:
            The output matrix's input for a node, [hidden size], since a quantised matrix hides small differences; shape
            [0] where the backend does not keep it.
        """

    def top(
        self, nodes: Sequence[int], k: int, temperature: float, noise: Sequence[Float32Array | None]
    ) -> tuple[list[IdArray], list[Scores]]:
        """
        Args:
            nodes: wanted nodes.
            k: at least 1.
            temperature: above 0.
            noise: an array or None per node; ids beyond a shorter array are left out, also of the softmax.

        Returns:
            Ids [k] and values [k] of the best of log-softmax((logits + noise) / temperature), best first, for each
            node.
        """


@runtime_checkable
class GivesStates(Protocol):
    """Logits of a target that was loaded with a head: an optional feature, for `planners/drafting.py`."""

    def states(self, nodes: Sequence[int]) -> Float32Array:
        """
        Args:
            nodes: of the work, wanted or not.

        Returns:
            What the head starts from, [n, `Capabilities.states`].
        """


@runtime_checkable
class Embeds(Protocol):
    """A backend that gives the states of a text: an optional feature, for `Model.embed`.

    Attributes:
        pooling: that the model's file names, one of `pooling.POOLINGS`; "": it names none.
        embed_rows: most tokens of a pass.
    """

    pooling: str
    embed_rows: int

    def embed(self, token_ids: Sequence[int], start: int) -> Float32Array:
        """A pass over some tokens of a text, in no session.

        Args:
            token_ids: at most `embed_rows`.
            start: the text's tokens before them, which the last passes were over; 0: a new text begins.

        Returns:
            The output matrix's inputs, [n, hidden size].

        Raises:
            UsageError: this model's weights or memory do not allow it.
        """


class Backend(Protocol):
    """A loaded model.

    Attributes:
        name: the engine's, as for `find_engine`.
        notes: lines for the user on how the model was loaded.
        build: the engine, its version, that of the library with its model classes, and what it computes on.
        computing: options that decide how it computes, as resolved.
    """

    name: str
    vocab: Vocab
    capabilities: Capabilities
    notes: Sequence[str]
    build: str
    computing: Mapping[str, str | int | None]

    @property
    def wait_seconds(self) -> float:
        """Seconds that passes have waited for weights from a disk or a bus since the model was loaded."""

    def open(self) -> Session:
        """
        Returns:
            A new, empty session.

        Raises:
            UsageError: all sessions this backend was loaded for are open.
        """

    def keep_to(self, exact: BatchInvariance) -> None:
        """Keep passes to these row classes, padding short ones; called before the first session is opened."""

    @property
    def identity(self) -> Mapping[str, Any]:
        """Everything that decides a cache's bits; where it is equal, sessions can be loaded."""

    @property
    def pass_number(self) -> int:
        """Number of the pass under way, or of the next one."""

    def interrupt(self, pass_number: int) -> None:
        """End this pass early (within a layer where weights stream), from any thread; nothing if it has ended."""

    def forward(self, batch: Sequence[Work]) -> list[Logits]:
        """One pass over all works' nodes, each of which sees the committed tokens, its ancestors and itself.

        Raises:
            ContextFull: the nodes do not fit into the cache; nothing has changed.
            Interrupted: `interrupt` was called; the works' sessions keep their committed tokens, and no nodes.
            ValueError: a work breaks the contract (more nodes, leaves or wanted nodes than the capabilities say).
        """

    def close(self) -> None:
        """Free the model and every session; safe to call twice. `open` and `forward` then raise Closed."""
