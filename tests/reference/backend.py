"""The yardstick of `tests/contract.py`: sessions, trees and paths over the model of `model.py`.

A node's logits are the same bits however nodes were batched, committed or forked, so no tolerance is needed.
"""

import hashlib
import re
import string
from collections.abc import Sequence
from dataclasses import fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self, cast

import numpy as np
from edgespec.backends.common.interrupts import Interruptible, Stop, interruptible, one_pass
from edgespec.backends.common.loader import loader
from edgespec.backends.common.nodes import NodeSession
from edgespec.backends.common.paths import CHEAP, MOST_UNREAD, States, paths_of, state_lane_from
from edgespec.backends.common.row_logits import RowLogits
from numpy.typing import NDArray

from edgespec.errors import Closed, ContextFull, ModelError, UsageError
from edgespec.loop.backend import Capabilities, Logits, Vocab, Work
from edgespec.loop.engines import Computing, Engine, LoadPlan, Progress
from edgespec.loop.passes import check_batch
from edgespec.loop.sampling import Float32Array
from edgespec.loop.session_files import Saved, StateDetails, identity_of
from edgespec.loop.shapes import BatchInvariance
from edgespec.loop.tree import is_leaf, path_to

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
SPECIAL = ("<s>", "</s>")  # ids 0 and 1; then bytes, letters first for small vocabularies
BYTES = bytes(dict.fromkeys((" " + string.ascii_lowercase + "\n" + string.printable).encode() + bytes(range(256))))
CHAT_TEMPLATE = (
    "{% for message in messages %}<s>{{ message['role'] }}\n{{ message['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)


class ReferenceVocab:
    """See `edgespec.loop.backend.Vocab`. Each token but the first two is a byte."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.bos_id: int | None = 0
        self.eos_id: int | None = 1
        self.eog_ids = frozenset([1])
        self.chat_template: str | None = CHAT_TEMPLATE
        self.tool_template: str | None = None
        self.longest = max(map(len, SPECIAL))
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


class ReferenceSession(NodeSession):
    _backend: "ReferenceBackend"

    def __init__(self, backend: "ReferenceBackend") -> None:
        super().__init__(backend)
        model, limits = backend.model, backend.capabilities
        head = model.embedding.shape[1] // model.heads
        self._cells = np.zeros((limits.context_length + limits.max_nodes, len(model.layers), 2, model.heads, head))
        self._empty = np.zeros(0)  # the state of recurrent layers before the first token

    def add(self, work: Work, positions: Sequence[int]) -> Logits:
        first, length, found = self.nodes, len(self.token_ids), dict[int, Array]()
        self._add_nodes(work, positions)
        for node in range(first, self.nodes):
            found[node], _ = self._evaluate(self._tokens[node], self._seen(node), length + node, self._empty)
        return self._logits(found, work)

    def _seen(self, node: int) -> NDArray[np.int64]:
        length, above = len(self.token_ids), np.array(path_to(self._parents, node)[:-1], np.int64)
        return np.concatenate([np.arange(length), length + above])

    def _evaluate(self, token: int, seen: NDArray[np.int64], cell: int, state: Array) -> tuple[Array, Array]:
        """
        Args:
            token: the node's.
            seen: cells that the node sees.
            cell: the node's own, to be filled.
            state: of recurrent layers before the node.

        Returns:
            The node's final vector, and the state after it.
        """
        self._backend.stop.check()
        x, self._cells[cell], after = evaluate(self._backend.model, token, len(seen), self._cells[seen], state)
        return x, after

    def _logits(self, found: dict[int, Array], work: Work) -> Logits:
        model = self._backend.model
        output = model.embedding if model.unembedding is None else model.unembedding
        return RowLogits({node: (output @ found[node]).astype(np.float32) for node in work.wanted.tolist()})

    def _move_cells(self, start: int, cells: list[int]) -> None:
        self._cells[start : start + len(cells)] = self._cells[cells]

    def _copy_cells(self, other: Self) -> None:
        other._cells[: len(self.token_ids)] = self._cells[: len(self.token_ids)]

    def _write_cells(self, new: Path) -> None:
        self._cells[: len(self.token_ids)].tofile(new)

    def _size(self, length: int, details: Any) -> int:
        return self._cells[:length].nbytes

    def _load_cells(self, path: str | Path, saved: Saved, details: Any) -> None:
        cells = self._cells[: len(saved.token_ids)]
        cells[:] = np.fromfile(path, np.float64, cells.size).reshape(cells.shape)

    def close(self) -> None:
        self._backend.opened = [other for other in self._backend.opened if other is not self]
        self.rewind(0)


class RecurrentSession(ReferenceSession):
    """For recurrent layers: paths, unread committed tokens, and states."""

    _form = StateDetails

    def __init__(self, backend: "ReferenceBackend") -> None:
        super().__init__(backend)
        model, head = backend.model, self._cells.shape[-1]
        self._empty = np.zeros((len(model.layers), model.heads, head, head))
        self._states = States[Array](KEPT_STATES)
        self._after_prompt = False

    def _forget_nodes(self) -> None:
        super()._forget_nodes()
        self._tips: dict[int, Array] = {}  # states after last nodes of paths

    def add(self, work: Work, positions: Sequence[int]) -> Logits:
        length, first = len(self.token_ids), self.nodes
        if self._after_prompt and not work.prompt:
            self._states.mark(length)
        self._add_nodes(work, positions)
        if self._behind > MOST_UNREAD:
            self._bring_on(self._states.last)
        paths = paths_of(self._parents, first, self._tips)
        sizes = [len(path.nodes) + (self.unread_committed if path.start < 0 else 0) for path in paths]
        start = state_lane_from(self._states.kept, length, len(paths), max(sizes), 2 * CHEAP)
        found = dict[int, Array]()
        for path, size in zip(paths, sizes, strict=True):
            state = self._text(self._states.last, length) if path.start < 0 else self._tips[path.start]
            for node in path.nodes:
                found[node], state = self._evaluate(self._tokens[node], self._seen(node), length + node, state)
            if size == max(sizes):  # as in engines, where shorter paths repeat their last token
                self._tips[path.nodes[-1]] = state
        if self.unread_committed and start is not None:
            self._bring_on(start)
        return self._logits(found, work)

    def _text(self, start: int, stop: int) -> Array:
        """The state after `stop` committed tokens, from that after `start`."""
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
        return self._behind if self._behind <= MOST_UNREAD else 0  # `add` reads more of them before the paths

    def reusable_prefix(self, length: int, *, short: bool = False) -> int:
        length = super().reusable_prefix(length, short=short)
        return length if length == len(self.token_ids) else self._states.before(length)

    @property
    def _can_keep(self) -> bool:
        return False

    def _commit_cells(self, path: Sequence[int], stay: Sequence[int]) -> None:
        super()._commit_cells(path, stay)
        self._after_prompt = self._prompt.reading
        if path and path[-1] in self._tips:
            self._states.add(len(self.token_ids) + len(path), self._tips[path[-1]])

    def rewind(self, length: int) -> None:
        super().rewind(length)
        self._states.cut(length)

    def _copy_cells(self, other: Self) -> None:
        super()._copy_cells(other)
        other._states = self._states.copy()

    def _details(self) -> StateDetails:
        return StateDetails(**self._prompt.as_dict(), states=list(self._states.kept))

    def _write_cells(self, new: Path) -> None:
        parts = self._cells[: len(self.token_ids)], *self._states.kept.values()
        np.concatenate([part.ravel() for part in parts]).tofile(new)

    def _size(self, length: int, details: StateDetails) -> int:
        return super()._size(length, details) + len(details.states) * self._empty.nbytes

    def _load_cells(self, path: str | Path, saved: Saved, details: StateDetails) -> None:
        super()._load_cells(path, saved, details)
        start = self._cells[: len(saved.token_ids)].nbytes
        for at in details.states:
            state = np.fromfile(path, np.float64, self._empty.size, offset=start).reshape(self._empty.shape)
            self._states.add(at, state)
            start += state.nbytes


class ReferenceBackend(Interruptible):
    pooling, embed_rows = "", 8

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
        self.stop = Stop()
        self._sessions, self._closed = sessions, False
        self.name = "reference"
        self.build = f"numpy {np.__version__}"
        self.computing: Computing = {}
        self.notes: Sequence[str] = ()
        self.wait_seconds = 0.0

    def open(self) -> ReferenceSession:
        self._check_open()
        if self.open_sessions == self._sessions:
            raise UsageError("all sessions of this model are open: load it with a larger `sessions`")
        self.opened.append(RecurrentSession(self) if self.capabilities.paths else ReferenceSession(self))
        return self.opened[-1]

    @property
    def open_sessions(self) -> int:
        return len(self.opened)

    def keep_to(self, exact: BatchInvariance) -> None:
        self.capabilities = replace(self.capabilities, exact=exact)

    @one_pass
    def forward(self, batch: Sequence[Work]) -> list[Logits]:
        self._check_open()
        check_batch(batch, self.capabilities)
        sessions = [cast(ReferenceSession, work.session) for work in batch]
        positions = [session.check(work) for work, session in zip(batch, sessions, strict=True)]
        self._check_room(batch)
        with interruptible(sessions, self.stop):
            return [session.add(work, at) for session, work, at in zip(sessions, batch, positions, strict=True)]

    def _check_room(self, batch: Sequence[Work]) -> None:
        limits, trees = self.capabilities, {session: session.parents for session in self.opened}
        texts = [tuple(session.token_ids) for session in self.opened] if limits.cells is not None else []
        cells = {text[:end] for text in texts for end in range(1, len(text) + 1)}  # equal prefixes share cells
        if limits.cells is not None and len(cells) > limits.cells:
            raise ContextFull(f"the cache of {limits.cells} cells is full")
        for work in batch:
            session = cast(ReferenceSession, work.session)
            trees[session] = trees[session] + work.parents.tolist()
        leaves = sum(np.count_nonzero(is_leaf(parents)) - 1 for parents in trees.values() if parents)
        if limits.spare_leaves is not None and leaves > limits.spare_leaves:
            raise ValueError(f"{leaves} further leaves; all sessions hold {limits.spare_leaves} together")

    def embed(self, token_ids: Sequence[int], start: int) -> Float32Array:
        self._check_open()
        if start == 0:
            self._text = RecurrentSession(self) if self.capabilities.paths else ReferenceSession(self)
            self._after = self._text._empty
        rows = list[Array]()
        for place, token in enumerate(token_ids, start):
            x, self._after = self._text._evaluate(token, np.arange(place), place, self._after)
            rows.append(x)
        return np.array(rows, np.float32)

    @property
    def identity(self) -> dict[str, Any]:
        return identity_of(self, self._weights)

    @cached_property
    def _weights(self) -> str:
        model, found = self.model, hashlib.sha256(str(self.model.heads).encode())
        arrays = [getattr(layer, field.name) for layer in model.layers for field in fields(Layer)]
        for array in [*arrays, model.embedding, model.final_norm, model.unembedding]:
            found.update(b"" if array is None else array.tobytes())
        return found.hexdigest()[:32]

    def close(self) -> None:
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise Closed


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
load = loader(engine)
load_vocab = engine.load_vocab
