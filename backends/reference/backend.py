"""The yardstick of `tests/contract.py`: sessions, trees and paths over the model of `reference_model.py`.

A node's logits are the same bits however nodes were batched, committed or forked, so speculative text equals plain
text without any tolerance.

A session's cache is one array of cells: the committed tokens' cells come first, those of the uncommitted nodes follow
in the order they were given. With recurrent layers a tree is evaluated path by path, from copies of the states that
are kept, as engines must do (`paths.py`).
"""

import hashlib
import re
import string
from collections.abc import Sequence
from dataclasses import fields, replace
from functools import cached_property
from pathlib import Path
from threading import Event
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import ContextFull, Interrupted, ModelError, UsageError
from edgespec.loop.backend import Capabilities, Logits, Vocab, Work
from edgespec.loop.engines import Computing, Engine, LoadPlan, Progress
from edgespec.loop.passes import check_batch
from edgespec.loop.sampling import Float32Array
from edgespec.loop.session_files import identity_of, look, read, write
from edgespec.loop.shapes import BatchInvariance, PromptRead
from edgespec.loop.tree import IntArray, depths, is_leaf, nodes_below, parents_among, path_to
from edgespec.planners.path_cost import CHEAP, MOST_OWED, States, paths_of, step_from

from ..common.interrupts import interruptible
from ..common.row_logits import RowLogits
from .model import Array, Layer, Model, evaluate, load_weights, perturbed, random_model

__all__ = [
    "Model",
    "ReferenceBackend",
    "ReferenceEngine",
    "ReferenceVocab",
    "engine",
    "load",
    "load_vocab",
    "perturbed",
    "random_model",
]

DEFAULT_CONTEXT = 512
KEPT_STATES = 5  # of a session, where layers are recurrent
SPECIAL = ("<s>", "</s>")  # ids 0 and 1; bytes follow, the commonest first, so that a small vocabulary has letters
BYTES = bytes(dict.fromkeys((" " + string.ascii_lowercase + "\n" + string.printable).encode() + bytes(range(256))))
CHAT_TEMPLATE = (
    "{% for message in messages %}<s>{{ message['role'] }}\n{{ message['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)


class ReferenceVocab:
    """See `edgespec.loop.backend.Vocab`. A token is a byte, but for the first two."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.bos_id: int | None = 0
        self.eos_id: int | None = 1
        self.eog_ids = frozenset([1])
        self.chat_template: str | None = CHAT_TEMPLATE
        self._bytes = BYTES[: size - len(SPECIAL)]
        self.fingerprint = hashlib.sha256(self._bytes).hexdigest()

    def encode(self, text: str, *, add_bos: bool, parse_special: bool) -> list[int]:
        ids = [0] if add_bos else []
        for piece in re.split(f"({'|'.join(SPECIAL)})", text) if parse_special else [text]:
            if parse_special and piece in SPECIAL:
                ids.append(SPECIAL.index(piece))
                continue
            places = [self._bytes.find(byte) for byte in piece.encode()]
            if -1 in places:
                raise ModelError(f"the tokenizer cannot encode {piece!r}: it knows {len(self._bytes)} of the 256 bytes")
            ids.extend(place + len(SPECIAL) for place in places)
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        return b"" if token_id < len(SPECIAL) else self._bytes[token_id - len(SPECIAL) :][:1]

    def token_text(self, token_id: int) -> str:
        return SPECIAL[token_id] if token_id < len(SPECIAL) else self.token_bytes(token_id).decode("latin-1")


class ReferenceSession:
    """See `edgespec.loop.backend.Session`."""

    def __init__(self, backend: "ReferenceBackend") -> None:
        self.token_ids: list[int] = []
        self._backend = backend
        self._tokens: list[int] = []  # uncommitted nodes' tokens
        self._parents: list[int] = []
        self._prompt = PromptRead()
        model, limits = backend.model, backend.capabilities
        head = model.embedding.shape[1] // model.heads
        self._cells = np.zeros((limits.context_length + limits.max_nodes, len(model.layers), 2, model.heads, head))

    def check(self, work: Work) -> None:
        """Refuse a work that breaks the contract or does not fit, before anything changes."""
        limits, first = self._backend.capabilities, len(self._parents)
        parents = self._parents + work.parents.tolist()
        if len(parents) > limits.max_nodes:
            raise ValueError(f"{len(parents)} uncommitted nodes; this backend holds {limits.max_nodes}")
        if any(not -1 <= parent < node for node, parent in enumerate(parents)):
            raise ValueError(f"parents must come before their children: {parents}")
        if any(not first <= node < len(parents) for node in work.wanted.tolist()):
            raise ValueError(f"wanted {work.wanted.tolist()}: not all among the nodes {first} to {len(parents) - 1}")
        last = len(self.token_ids) + int(depths(parents).max(initial=-1))
        if last >= limits.context_length:
            raise ContextFull(f"position {last} lies beyond the context of {limits.context_length} tokens")
        if np.count_nonzero(is_leaf(parents)) > limits.max_leaves:
            raise ValueError(f"more than {limits.max_leaves} leaves; this backend holds no more")

    def add(self, work: Work) -> Logits:
        """Evaluate a checked work's nodes one by one."""
        model, length, rows = self._backend.model, len(self.token_ids), dict[int, Float32Array]()
        output = model.embedding if model.unembedding is None else model.unembedding
        wanted = set(work.wanted.tolist())
        self._prompt.add(work.prompt, work.short, length)
        for token, parent in zip(work.token_ids.tolist(), work.parents.tolist(), strict=True):
            if self._backend.interrupted.is_set():
                raise Interrupted("the pass was interrupted")
            node = len(self._tokens)
            ancestors = path_to(self._parents, parent) if parent >= 0 else []
            seen = np.concatenate([np.arange(length), length + np.array(ancestors, np.int64)])
            state, self._cells[length + node], _ = evaluate(model, token, len(seen), self._cells[seen])
            self._tokens.append(token)
            self._parents.append(parent)
            if node in wanted:
                rows[node] = (output @ state).astype(np.float32)
        return RowLogits(rows)

    @property
    def unread_committed(self) -> int:
        return 0

    def reusable_prefix(self, length: int, *, short: bool = False) -> int:
        return self._prompt.reusable_prefix(self._backend.capabilities.exact, length, short)

    def commit(self, path: Sequence[int], *, below: bool = False) -> IntArray:
        if [self._parents[node] for node in path] != [-1, *path][: len(path)]:
            raise ValueError(f"nodes {list(path)} are not a chain under the last committed token")
        length, kept = len(self.token_ids), nodes_below(self._parents, path[-1] if path else -1) if below else []
        order = length + np.array([*path, *kept], np.int64)
        self._cells[length : length + len(order)] = self._cells[order]
        self._prompt.commit(length, len(path))
        self.token_ids.extend(self._tokens[node] for node in path)
        self._tokens = [self._tokens[node] for node in kept]
        self._parents = parents_among(self._parents, kept)
        return np.array(kept, np.int32)

    def rewind(self, length: int) -> None:
        del self.token_ids[length:]
        self._prompt.rewind(length)
        self._tokens, self._parents = [], []

    def fork(self) -> "ReferenceSession":
        other = self._backend.open()
        other.token_ids, other._prompt = self.token_ids.copy(), replace(self._prompt)
        other._cells[: len(self.token_ids)] = self._cells[: len(self.token_ids)]
        return other

    @property
    def parents(self) -> list[int]:
        """Of uncommitted nodes."""
        return self._parents

    def save(self, path: str | Path, note: Any = None) -> None:
        cells = self._cells[: len(self.token_ids)]
        write(path, self._backend, self.token_ids, self._prompt.as_dict(), lambda new: cells.tofile(new), note)

    def load(self, path: str | Path) -> Any:
        saved = read(path, self._backend)
        self.rewind(0)
        cells = self._cells[: len(saved.token_ids)]
        cells[:] = np.fromfile(path, np.float64, cells.size).reshape(cells.shape)
        self.token_ids, self._prompt = saved.token_ids, PromptRead.of(saved.details)
        return saved.note

    def close(self) -> None:
        self._backend.opened = [other for other in self._backend.opened if other is not self]
        self.rewind(0)


class RecurrentSession(ReferenceSession):
    """The same where layers are recurrent: paths, tokens that are owed, and states that are kept."""

    def __init__(self, backend: "ReferenceBackend") -> None:
        super().__init__(backend)
        model, head = backend.model, self._cells.shape[-1]
        self._empty = np.zeros((len(model.layers), model.heads, head, head))
        self._states = States[Array](KEPT_STATES)
        self._tips: dict[int, Array] = {}  # node -> the state behind it, where a path ended

    def add(self, work: Work) -> Logits:
        """Evaluate a checked work's nodes, path by path."""
        length, first = len(self.token_ids), len(self._tokens)
        self._tokens += work.token_ids.tolist()
        self._parents += work.parents.tolist()
        if not work.prompt:
            self._states.mark(length)
        self._prompt.add(work.prompt, work.short, length)
        if self._behind > MOST_OWED:
            self._bring_on(self._states.last)
        paths = paths_of(self._parents, first, self._tips)
        sizes = [len(path.nodes) + (self.unread_committed if path.start < 0 else 0) for path in paths]
        step = step_from(self._states.kept, length, len(paths), max(sizes), 2 * CHEAP)
        found = dict[int, Array]()
        for path, size in zip(paths, sizes, strict=True):
            state = self._text(self._states.last, length) if path.start < 0 else self._tips[path.start]
            for node in path.nodes:
                above = np.array(path_to(self._parents, node)[:-1], np.int64)
                seen = np.concatenate([np.arange(length), length + above])
                found[node], state = self._evaluate(self._tokens[node], seen, length + node, state)
            if size == max(sizes):  # others go on behind their leaf
                self._tips[path.nodes[-1]] = state
        if self.unread_committed and step is not None:
            self._bring_on(step)
        model = self._backend.model
        output = model.embedding if model.unembedding is None else model.unembedding
        return RowLogits({node: (output @ found[node]).astype(np.float32) for node in work.wanted.tolist()})

    def _evaluate(self, token: int, seen: NDArray[np.int64], cell: int, state: Array) -> tuple[Array, Array]:
        if self._backend.interrupted.is_set():
            raise Interrupted("the pass was interrupted")
        x, self._cells[cell], after = evaluate(self._backend.model, token, len(seen), self._cells[seen], state)
        assert after is not None
        return x, after

    def _text(self, start: int, stop: int) -> Array:
        """The state after so many of the text's tokens, from that of fewer."""
        state = self._states.kept[start] if start else self._empty
        for position in range(start, stop):
            _, state = self._evaluate(self.token_ids[position], np.arange(position), position, state)
        return state

    def _bring_on(self, start: int) -> None:
        length = len(self.token_ids)
        self._states.add(length, self._text(start, length))

    @property
    def _behind(self) -> int:
        return len(self.token_ids) - self._states.last

    @property
    def unread_committed(self) -> int:
        return self._behind if self._behind <= MOST_OWED else 0  # more are read before

    def reusable_prefix(self, length: int, *, short: bool = False) -> int:
        length = super().reusable_prefix(length, short=short)
        return length if length == len(self.token_ids) else self._states.before(length)

    def commit(self, path: Sequence[int], *, below: bool = False) -> IntArray:
        tips = self._tips
        nothing = super().commit(path)
        if path and path[-1] in tips:
            self._states.add(len(self.token_ids), tips[path[-1]])
        self._tips = {}
        return nothing

    def rewind(self, length: int) -> None:
        super().rewind(length)
        self._states.cut(length)
        self._tips = {}

    def fork(self) -> "RecurrentSession":
        other = super().fork()
        assert isinstance(other, RecurrentSession)
        other._states = self._states.copy()
        return other

    def save(self, path: str | Path, note: Any = None) -> None:
        kept = self._states.kept
        data = np.concatenate([part.ravel() for part in (self._cells[: len(self.token_ids)], *kept.values())])
        details = self._prompt.as_dict() | {"states": list(kept)}
        write(path, self._backend, self.token_ids, details, lambda new: data.tofile(new), note)

    def load(self, path: str | Path) -> Any:
        note, start = super().load(path), self._cells[: len(self.token_ids)].nbytes
        for at in look(path).details["states"]:
            state = np.fromfile(path, np.float64, self._empty.size, offset=start).reshape(self._empty.shape)
            self._states.add(at, state)
            start += state.nbytes
        return note


class ReferenceBackend:
    """See `edgespec.loop.backend.Backend`."""

    def __init__(
        self,
        model: Model,
        *,
        context_length: int = DEFAULT_CONTEXT,
        max_nodes: int = 65,
        max_leaves: int = 64,
        sessions: int = 1,
        spare_leaves: int | None = None,
        cells: int | None = None,
    ) -> None:
        self.model = model
        self.vocab: Vocab = ReferenceVocab(len(model.embedding))
        paths = any(layer.decay is not None for layer in model.layers)
        self.capabilities = Capabilities(
            context_length, max_nodes, max_nodes, max_leaves, 0.0, paths=paths, spare_leaves=spare_leaves, cells=cells
        )
        self.opened = list[ReferenceSession]()
        self.interrupted = Event()
        self._sessions = sessions
        self.name = "reference"
        self.build = f"numpy {np.__version__}"
        self.computing: Computing = {}
        self.notes: Sequence[str] = ()
        self.wait_seconds = 0.0

    def open(self) -> ReferenceSession:
        if self.open_sessions == self._sessions:
            raise UsageError("all sessions of this model are open: load it with a larger `sessions`")
        self.opened.append(RecurrentSession(self) if self.capabilities.paths else ReferenceSession(self))
        return self.opened[-1]

    @property
    def open_sessions(self) -> int:
        """How many there are."""
        return len(self.opened)

    def keep_to(self, exact: BatchInvariance) -> None:
        self.capabilities = replace(self.capabilities, exact=exact)

    def forward(self, batch: Sequence[Work]) -> list[Logits]:
        check_batch(batch, self.capabilities)
        sessions = [cast(ReferenceSession, work.session) for work in batch]
        for work, session in zip(batch, sessions, strict=True):
            session.check(work)
        self._check_room(batch)
        with interruptible(sessions, self.interrupted):
            return [session.add(work) for work, session in zip(batch, sessions, strict=True)]

    def _check_room(self, batch: Sequence[Work]) -> None:
        """Refuse what goes beyond the limits that all sessions have together."""
        limits, trees = self.capabilities, {session: session.parents for session in self.opened}
        texts = [tuple(session.token_ids) for session in self.opened] if limits.cells is not None else []
        cells = {text[:end] for text in texts for end in range(1, len(text) + 1)}  # texts that begin alike share them
        if limits.cells is not None and len(cells) > limits.cells:
            raise ContextFull(f"the cache of {limits.cells} cells is full")
        for work in batch:
            session = cast(ReferenceSession, work.session)
            trees[session] = trees[session] + work.parents.tolist()
        leaves = sum(np.count_nonzero(is_leaf(parents)) - 1 for parents in trees.values() if parents)
        if limits.spare_leaves is not None and leaves > limits.spare_leaves:
            raise ValueError(f"{leaves} further leaves; all sessions hold {limits.spare_leaves} together")

    def interrupt(self) -> None:
        self.interrupted.set()

    @property
    def identity(self) -> dict[str, Any]:
        return identity_of(self, self._weights)

    @cached_property
    def _weights(self) -> str:
        """A hash of all weights."""
        model, found = self.model, hashlib.sha256(str(self.model.heads).encode())
        arrays = [getattr(layer, field.name) for layer in model.layers for field in fields(Layer)]
        for array in [*arrays, model.embedding, model.final_norm, model.unembedding]:
            found.update(b"" if array is None else array.tobytes())
        return found.hexdigest()[:32]

    def close(self) -> None:
        """Nothing outside Python's memory to free."""


class ReferenceEngine(Engine):
    """See `Engine`. Loads what `Model.save` wrote, an .npz file."""

    def load(self, plan: LoadPlan, way: Computing | None = None, progress: Progress | None = None) -> ReferenceBackend:
        options = plan.options
        return ReferenceBackend(
            load_weights(plan.path),
            context_length=options.context_length or DEFAULT_CONTEXT,
            max_nodes=options.budget + 1,
            max_leaves=max(options.budget, 1),
            sessions=options.sessions,
        )

    def load_vocab(self, path: str) -> ReferenceVocab:
        return ReferenceVocab(len(load_weights(path).embedding))


engine = ReferenceEngine()
load = engine.open
load_vocab = engine.load_vocab
