"""A small transformer in plain numpy: what every backend must compute, as directly as it can be said.

Decoder-only: RMSNorm, rotary positions, multi-head attention, SwiGLU. Everything is float64, and
every node is computed on its own, in operations whose shapes depend only on its position. So a
node's logits are the same bits however nodes were batched, committed or forked, and speculative text
equals plain text without any tolerance. That makes it the yardstick of `tests/contract.py`.

A session's cache is one array of cells: the committed tokens' cells come first, those of the
uncommitted nodes follow in the order they were given.
"""

import hashlib
import math
import re
import string
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from threading import Event
from typing import Any, cast
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from edgespec.backend import Capabilities, Exact, Logits, Work, check_batch, kept_of_prompt
from edgespec.errors import ContextFull, Interrupted, ModelError, UsageError
from edgespec.sampling import Float32Array, IdArray, Scores, top_of_rows
from edgespec.saved import identity_of, read, write
from edgespec.tree import depths, is_leaf, path_to

Array = NDArray[np.float64]

DEFAULT_CONTEXT = 512
ROPE_BASE = 10000.0
EPSILON = 1e-6
SPECIAL = ("<s>", "</s>")  # ids 0 and 1; bytes follow, the commonest first, so that a small vocabulary has letters
BYTES = bytes(dict.fromkeys((" " + string.ascii_lowercase + "\n" + string.printable).encode() + bytes(range(256))))
CHAT_TEMPLATE = (
    "{% for message in messages %}<s>{{ message['role'] }}\n{{ message['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)


@dataclass(frozen=True, slots=True)
class Layer:
    """One block's weights. D is the width, F the width inside the MLP."""

    attention_norm: Array  # [D]
    query: Array  # [D, D]
    key: Array  # [D, D]
    value: Array  # [D, D]
    output: Array  # [D, D]
    mlp_norm: Array  # [D]
    gate: Array  # [F, D]
    up: Array  # [F, D]
    down: Array  # [D, F]


@dataclass(frozen=True, slots=True)
class Model:
    """All weights."""

    heads: int
    embedding: Array  # [V, D]
    layers: tuple[Layer, ...]
    final_norm: Array  # [D]
    unembedding: Array | None = None  # [V, D]; None: the embedding (tied)

    def save(self, path: str) -> None:
        """Write an .npz that `load` reads."""
        arrays = {"heads": np.array(self.heads), "embedding": self.embedding, "final_norm": self.final_norm}
        if self.unembedding is not None:
            arrays["unembedding"] = self.unembedding
        for i, layer in enumerate(self.layers):
            arrays |= {f"{i}.{field.name}": getattr(layer, field.name) for field in fields(Layer)}
        with Path(path).open("wb") as stream:
            np.savez(stream, allow_pickle=False, **arrays)


def random_model(
    seed: int,
    *,
    vocab_size: int = 64,
    layers: int = 2,
    width: int = 16,
    heads: int = 2,
    hidden: int = 32,
    tied: bool = False,
    sharpness: float = 3.0,
) -> Model:
    """Random weights; `sharpness` is about the standard deviation of the logits."""
    generator = np.random.default_rng(seed)

    def matrix(rows: int, columns: int, scale: float = 1.0) -> Array:
        return generator.standard_normal((rows, columns)) * scale / math.sqrt(columns)

    def layer() -> Layer:
        query, key, value, output = (matrix(width, width, 2.0) for _ in range(4))
        gate, up, down = matrix(hidden, width), matrix(hidden, width), matrix(width, hidden)
        return Layer(np.ones(width), query, key, value, output, np.ones(width), gate, up, down)

    embedding = matrix(vocab_size, width, sharpness if tied else math.sqrt(width))
    blocks = tuple(layer() for _ in range(layers))
    unembedding = None if tied else matrix(vocab_size, width, sharpness)
    return Model(heads, embedding, blocks, np.ones(width), unembedding)


def perturbed(model: Model, scale: float, seed: int) -> Model:
    """A copy with noise on every matrix, `scale` of the matrix's own size: a draft that is right now and then."""
    generator = np.random.default_rng(seed)

    def noisy(weights: Array) -> Array:
        noise: Array = scale * weights.std() * generator.standard_normal(weights.shape)
        return weights + noise

    layers = tuple(Layer(*(noisy(getattr(layer, field.name)) for field in fields(Layer))) for layer in model.layers)
    unembedding = None if model.unembedding is None else noisy(model.unembedding)
    return replace(model, embedding=noisy(model.embedding), layers=layers, unembedding=unembedding)


def rms_norm(x: Array, weight: Array) -> Array:
    """Scale x [D] to a root mean square of 1, then by `weight` [D]."""
    scaled: Array = x / np.sqrt(np.mean(x * x) + EPSILON) * weight
    return scaled


def rotate(x: Array, position: int) -> Array:
    """Rotary position: turn the pairs (i, i + d/2) of every head of x [heads, d] by position * base^(-2i/d)."""
    half = x.shape[1] // 2
    angle = position * ROPE_BASE ** (-np.arange(half) / half)
    cos, sin, left, right = np.cos(angle), np.sin(angle), x[:, :half], x[:, half:]
    return np.concatenate([left * cos - right * sin, left * sin + right * cos], axis=1)


def attend(query: Array, keys: Array, values: Array) -> Array:
    """Softmax attention of one query [heads, d] over keys and values [n, heads, d]; shape [heads * d]."""
    scores = np.einsum("hd,nhd->hn", query, keys) / math.sqrt(query.shape[1])
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    mixed: Array = np.einsum("hn,nhd->hd", weights, values)
    return mixed.reshape(-1)


def evaluate(model: Model, token_id: int, position: int, past: Array) -> tuple[Array, Array]:
    """One node through all layers.

    Args:
        model: the weights.
        token_id: the node's token.
        position: its absolute position.
        past: cells it sees, in the text's order, shape [position, layers, 2, heads, d].

    Returns:
        Its final state [D] and its own cell [layers, 2, heads, d]: keys and values.
    """
    x = model.embedding[token_id]
    cell = np.empty(past.shape[1:])
    for i, layer in enumerate(model.layers):
        h = rms_norm(x, layer.attention_norm)
        query = rotate((layer.query @ h).reshape(model.heads, -1), position)
        cell[i, 0] = rotate((layer.key @ h).reshape(model.heads, -1), position)
        cell[i, 1] = (layer.value @ h).reshape(model.heads, -1)
        seen = np.concatenate([past[:, i], cell[None, i]])
        x = x + layer.output @ attend(query, seen[:, 0], seen[:, 1])
        h = rms_norm(x, layer.mlp_norm)
        gate = layer.gate @ h
        x = x + layer.down @ (gate / (1 + np.exp(-gate)) * (layer.up @ h))
    return rms_norm(x, model.final_norm), cell


class ReferenceVocab:
    """See `edgespec.backend.Vocab`. A token is a byte, but for the first two."""

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


class ReferenceLogits:
    """See `edgespec.backend.Logits`."""

    def __init__(self, rows: dict[int, Float32Array]) -> None:
        self._rows = rows  # node -> [V]

    def row(self, node: int) -> Float32Array:
        return self._rows[node].copy()

    def state(self, node: int) -> Float32Array:
        return np.zeros(0, np.float32)

    def top(
        self, nodes: Sequence[int], k: int, temperature: float, noise: Sequence[Float32Array | None]
    ) -> tuple[list[IdArray], list[Scores]]:
        return top_of_rows([self._rows[node] for node in nodes], k, temperature, noise)


class ReferenceSession:
    """See `edgespec.backend.Session`."""

    def __init__(self, backend: "ReferenceBackend") -> None:
        self.token_ids: list[int] = []
        self._backend = backend
        self._tokens: list[int] = []  # uncommitted nodes' tokens
        self._parents: list[int] = []
        self._read, self._prompt = 0, False  # tokens read as a prompt; whether the nodes are part of one
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
        self._prompt = work.prompt
        for token, parent in zip(work.token_ids.tolist(), work.parents.tolist(), strict=True):
            if self._backend.interrupted.is_set():
                raise Interrupted("the pass was interrupted")
            node = len(self._tokens)
            ancestors = path_to(self._parents, parent) if parent >= 0 else []
            seen = np.concatenate([np.arange(length), length + np.array(ancestors, np.int64)])
            state, self._cells[length + node] = evaluate(model, token, len(seen), self._cells[seen])
            self._tokens.append(token)
            self._parents.append(parent)
            if node in wanted:
                rows[node] = (output @ state).astype(np.float32)
        return ReferenceLogits(rows)

    @property
    def owed(self) -> int:
        return 0

    def kept(self, length: int) -> int:
        return kept_of_prompt(self._backend.capabilities, self._read, length)

    def commit(self, path: Sequence[int]) -> None:
        if [self._parents[node] for node in path] != [-1, *path][: len(path)]:
            raise ValueError(f"nodes {list(path)} are not a chain under the last committed token")
        length = len(self.token_ids)
        self._cells[length : length + len(path)] = self._cells[length + np.array(path, np.int64)]
        if self._prompt and self._read == length:
            self._read += len(path)
        self.token_ids.extend(self._tokens[node] for node in path)
        self._tokens, self._parents, self._prompt = [], [], False

    def rewind(self, length: int) -> None:
        del self.token_ids[length:]
        self._read = min(self._read, length)
        self._tokens, self._parents, self._prompt = [], [], False

    def fork(self) -> "ReferenceSession":
        other = self._backend.open()
        other.token_ids, other._read = self.token_ids.copy(), self._read
        other._cells[: len(self.token_ids)] = self._cells[: len(self.token_ids)]
        return other

    @property
    def parents(self) -> list[int]:
        """Of uncommitted nodes."""
        return self._parents

    def save(self, path: str | Path, note: Any = None) -> None:
        cells = self._cells[: len(self.token_ids)]
        write(path, self._backend, self.token_ids, {"read": self._read}, lambda new: cells.tofile(new), note)

    def load(self, path: str | Path) -> Any:
        saved = read(path, self._backend)
        self.rewind(0)
        cells = self._cells[: len(saved.token_ids)]
        cells[:] = np.fromfile(path, np.float64, cells.size).reshape(cells.shape)
        self.token_ids, self._read = saved.token_ids, saved.details["read"]
        return saved.note

    def close(self) -> None:
        self._backend.opened = [other for other in self._backend.opened if other is not self]
        self.rewind(0)


class ReferenceBackend:
    """See `edgespec.backend.Backend`."""

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
        self.vocab = ReferenceVocab(len(model.embedding))
        self.capabilities = Capabilities(
            context_length, max_nodes, max_nodes, max_leaves, 0.0, spare_leaves=spare_leaves, cells=cells
        )
        self.opened = list[ReferenceSession]()
        self.interrupted = Event()
        self._sessions = sessions
        self.name = "reference"
        self.build = f"numpy {np.__version__}"
        self.computing: dict[str, str | int | None] = {}
        self.notes: list[str] = []
        self.wait_seconds = 0.0

    def open(self) -> ReferenceSession:
        if self.open_sessions == self._sessions:
            raise UsageError("all sessions of this model are open: load it with a larger `sessions`")
        self.opened.append(ReferenceSession(self))
        return self.opened[-1]

    @property
    def open_sessions(self) -> int:
        """How many there are."""
        return len(self.opened)

    def keep_to(self, exact: Exact) -> None:
        self.capabilities = replace(self.capabilities, exact=exact)

    def forward(self, batch: Sequence[Work]) -> list[Logits]:
        check_batch(batch, self.capabilities)
        sessions = [cast(ReferenceSession, work.session) for work in batch]
        for work, session in zip(batch, sessions, strict=True):
            session.check(work)
        self._check_room(batch)
        try:
            return [session.add(work) for work, session in zip(batch, sessions, strict=True)]
        except Interrupted:
            for session in sessions:
                session.rewind(len(session.token_ids))
            raise
        finally:
            self.interrupted.clear()

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


def load(
    path: str,
    *,
    context_length: int = DEFAULT_CONTEXT,
    budget: int = 64,
    sessions: int = 1,
) -> ReferenceBackend:
    """Load weights that `Model.save` wrote.

    Args:
        path: the .npz file.
        context_length: most tokens of text in one session; 0 = DEFAULT_CONTEXT.
        budget: largest tree that will be asked for, in nodes without the root.
        sessions: how many sessions may be open at once.

    Raises:
        ModelError: the file is missing or is not such a file.
    """
    if not Path(path).exists():
        raise ModelError(f"{path}: there is no such file")
    try:
        with np.load(path, allow_pickle=False) as arrays:
            count = len({name.split(".")[0] for name in arrays if "." in name})
            layers = tuple(Layer(*(arrays[f"{i}.{field.name}"] for field in fields(Layer))) for i in range(count))
            unembedding = arrays.get("unembedding")
            model = Model(int(arrays["heads"]), arrays["embedding"], layers, arrays["final_norm"], unembedding)
    except (OSError, ValueError, KeyError, EOFError, AttributeError, TypeError, BadZipFile) as error:
        raise ModelError(f"{path}: is not a reference model: {error}") from error
    return ReferenceBackend(
        model,
        context_length=context_length or DEFAULT_CONTEXT,
        max_nodes=budget + 1,
        max_leaves=max(budget, 1),
        sessions=sessions,
    )


def load_vocab(path: str) -> ReferenceVocab:
    """Only the tokenizer. Raises ModelError as `load` does."""
    return load(path).vocab
