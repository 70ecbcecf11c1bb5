"""Model folders on MLX, Apple's array library, through mlx-lm's model classes, quantised or not.

mlx-lm's classes read one sequence, front to back. Three small replacements make them read a tree:

    rotary positions    every rope module is asked for the nodes' positions instead of a running offset
    mask                the cache hands out booleans, as mlx-lm's own caches do: committed tokens, ancestors, itself
    final rows          the layers' output is cut to the wanted nodes before the model's own head

A session has one preallocated buffer of keys and one of values per layer. Committed tokens come first, the nodes
evaluated since the last commit follow in the order they were given. A commit moves the few cells of the accepted
path together; the prefix stays where it is. MLX writes in place into a buffer that nobody else holds, so a fork
shares its parent's buffers until one of the two writes.

Sliding windows are done by the mask: nothing is thrown away, so they can be rewound. Whatever needs more than
this (recurrent state, positions used outside a rope, masks of its own) is refused when the model is loaded, by
comparing a tree of three nodes with its chains.

Several works in one forward are evaluated one after the other: each reads the weights again.
"""

import json
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from edgespec.backend import Capabilities, Logits, Work
from edgespec.errors import ContextFull, MissingPackage, ModelError, UsageError
from edgespec.sampling import Float32Array, IdArray, Scores, top_of_rows
from edgespec.tree import ancestor_mask, depths

try:
    import mlx.core as mx
    from mlx import nn
    from mlx.utils import tree_flatten
    from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache
    from mlx_lm.utils import load_model

    # After mlx_lm, which stops transformers from recommending PyTorch.
    from ..hf_vocab import HfVocab, check_folder, first_line, load_vocab
except ImportError as error:
    raise MissingPackage("mlx-lm", "mlx", "running models on MLX") from error

__all__ = ["MlxBackend", "load", "load_vocab"]

MIN_NODES = 512  # prompts are read in chunks of this size
DEFAULT_CONTEXT = 4096  # where a folder does not say what its model was trained for
CACHE_SHARE = 16  # of the memory a Mac's GPU may use, 1 / CACHE_SHARE may hold freed buffers for reuse
WIRED_SHARE = 0.9  # … and this part weights, before the user is told; where mlx-lm warns too
BLOCKS = 64  # rows of the block-maximum trick in device_top

# Most a logit moves with the shape of the pass it is computed in, by the type of the activations (quantised weights do
# not round them further). Twice the largest difference to float32 arithmetic with the same weights, over the vocabulary
# and 24 positions of SmolLM2: float16 0.084, bfloat16 1.08. On Linux's CPU not a bit of any logit moved; Apple's GPU
# was not measured, and may multiply float32 as TF32, which has float16's precision.
TOLERANCE = {mx.float32: 0.01, mx.float16: 0.2, mx.bfloat16: 2.0}


class Pass:
    """Where the nodes of one forward stand. The model's caches hand it to the ropes in place of an offset."""

    def __init__(self, parents: Sequence[int], first: int, length: int) -> None:
        """
        Args:
            parents: of all uncommitted nodes of the session, the new ones at the end.
            first: number of the first new node.
            length: how many tokens are committed.
        """
        self.start, self.end = length + first, length + len(parents)  # cells of the new nodes
        self.is_chain = list(parents) == list(range(-1, len(parents) - 1))
        self._parents, self._first, self._length = parents, first, length
        self._positions: NDArray[np.int64] = length + depths(parents).astype(np.int64)
        self._masks: dict[int | None, mx.array] = {}

    def __eq__(self, other: object) -> bool:
        raise TypeError("positions are needed outside the rotary embedding")

    def __bool__(self) -> bool:
        return self == 0  # refused too: a model that asks whether its cache is empty

    @cached_property
    def positions(self) -> Any:
        """Of the new nodes, as an array of MLX, shape [n]."""
        return mx.array(self._positions[self._first :])

    @cached_property
    def levels(self) -> list[tuple[int, Any]]:
        """Position and new nodes of every depth."""
        new = self._positions[self._first :]
        return [(int(position), mx.array(np.flatnonzero(new == position))) for position in np.unique(new)]

    @cached_property
    def level_order(self) -> Any:
        """Where each new node stands in the concatenated `levels`."""
        return mx.array(np.argsort(np.argsort(self._positions[self._first :], kind="stable")))

    def mask(self, window: int | None, as_array: bool) -> Any:
        """What mlx-lm's attention takes: None (all), "causal", or booleans [n, end]."""
        if window is not None and self.end <= window:
            window = None
        if self.is_chain and window is None:
            if self.end - self.start == 1:
                return None
            if not as_array:
                return "causal"
        if window not in self._masks:
            self._masks[window] = mx.array(self._visible(window))
        return self._masks[window]

    def _visible(self, window: int | None) -> NDArray[np.bool_]:
        new = self._positions[self._first :]
        visible = np.ones((len(new), self.end), np.bool_)
        visible[:, self._length :] = ancestor_mask(self._parents)[self._first :]
        if window is not None:
            held = np.concatenate([np.arange(self._length), self._positions])
            visible &= new[:, None] < held + window
        return visible


class TreeRope(nn.Module):  # type: ignore[misc]
    """A model's own rotary embedding, asked for the position of each node."""

    def __init__(self, rope: Any) -> None:
        super().__init__()
        self.rope = rope
        self._takes_array = takes_array(rope)

    def __call__(self, x: Any, offset: Any = 0) -> Any:
        """Rotate x [1, heads, n, d]."""
        if not isinstance(offset, Pass):
            return self.rope(x, offset=offset)
        if self._takes_array and offset.is_chain:
            return self.rope(x, offset=offset.start)
        nodes = x.transpose(2, 1, 0, 3)  # a batch of single tokens
        if self._takes_array:
            nodes = self.rope(nodes, offset=offset.positions)
        else:
            levels = [self.rope(nodes[members], offset=position) for position, members in offset.levels]
            nodes = mx.concatenate(levels)[offset.level_order]
        return nodes.transpose(2, 1, 0, 3)


def takes_array(rope: Any) -> bool:
    """Can the rope rotate a batch of tokens by a position each? Most call MLX's kernel, which can."""
    width = getattr(rope, "dims", None) or getattr(rope, "dim", None)
    if not isinstance(width, int):
        return False
    positions = [5, 0, 9]
    x = mx.ones((len(positions), 1, 1, width))
    try:
        together = rope(x, offset=mx.array(positions))
    except (TypeError, ValueError):
        return False
    alone = mx.concatenate([rope(x[:1], offset=position) for position in positions])
    return bool(mx.allclose(together, alone, atol=1e-3))


class TreeCache:
    """Keys and values of one layer in one session: what mlx-lm's attention takes for a cache.

    Buffers have shape [1, heads, capacity, d] and are made by the first pass, which knows shapes and types.
    """

    def __init__(self, capacity: int, window: int | None) -> None:
        self.keys: Any = None
        self.values: Any = None
        self.offset: Pass | None = None  # the pass under way; TreeRope knows what to do with it
        self._capacity = capacity
        self._window = window

    def update_and_fetch(self, keys: Any, values: Any) -> tuple[Any, Any]:
        if self.keys is None:
            self.keys, self.values = (
                mx.zeros((*new.shape[:2], self._capacity, new.shape[3]), new.dtype) for new in (keys, values)
            )
        here = cast(Pass, self.offset)
        self.keys[..., here.start : here.end, :] = keys
        self.values[..., here.start : here.end, :] = values
        return self.keys[..., : here.end, :], self.values[..., : here.end, :]

    def make_mask(self, n: int, return_array: bool = False, window_size: int | None = None) -> Any:
        here = cast(Pass, self.offset)
        if n != here.end - here.start:
            raise TypeError(f"a mask for {n} tokens in a pass over {here.end - here.start}")
        return here.mask(window_size or self._window, return_array)

    def share(self, other: "TreeCache") -> None:
        """Hold the other's buffers too; MLX copies them when one of both is written to."""
        if other.keys is not None:
            self.keys, self.values = other.keys[...], other.values[...]


class MlxSession:
    """See `edgespec.backend.Session`."""

    def __init__(self, backend: "MlxBackend", caches: list[TreeCache]) -> None:
        self.token_ids: list[int] = []
        self.caches = caches
        self._backend = backend
        self._tokens: list[int] = []  # uncommitted nodes' tokens
        self._parents: list[int] = []

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

    def place(self, work: Work) -> Pass:
        """The pass over a checked work's nodes."""
        here = Pass(self._parents + work.parents.tolist(), len(self._parents), len(self.token_ids))
        for cache in self.caches:
            cache.offset = here
        return here

    def add(self, work: Work) -> None:
        """The work's nodes have been evaluated."""
        self._tokens += work.token_ids.tolist()
        self._parents += work.parents.tolist()

    @property
    def state(self) -> list[Any]:
        """All buffers."""
        return [buffer for cache in self.caches for buffer in (cache.keys, cache.values) if buffer is not None]

    @property
    def nodes(self) -> int:
        """How many uncommitted nodes there are."""
        return len(self._parents)

    def commit(self, path: Sequence[int]) -> None:
        if [self._parents[node] for node in path] != [-1, *path][: len(path)]:
            raise ValueError(f"nodes {list(path)} are not a chain under the last committed token")
        stay = next((i for i, node in enumerate(path) if node != i), len(path))  # these cells are where they belong
        if stay < len(path):
            self._move([len(self.token_ids) + node for node in path[stay:]], len(self.token_ids) + stay)
        self.token_ids.extend(self._tokens[node] for node in path)
        self._tokens, self._parents = [], []

    def _move(self, cells: list[int], start: int) -> None:
        index, end = mx.array(cells), start + len(cells)
        moved = [(cache.keys[..., index, :], cache.values[..., index, :]) for cache in self.caches]
        mx.eval(moved)  # from here on nothing else holds the buffers, so they are written in place
        for cache, (keys, values) in zip(self.caches, moved, strict=True):
            cache.keys[..., start:end, :] = keys
            cache.values[..., start:end, :] = values
        mx.eval(self.state)

    def rewind(self, length: int) -> None:
        del self.token_ids[length:]
        self._tokens, self._parents = [], []

    def fork(self) -> "MlxSession":
        other = self._backend.open()
        other.token_ids = self.token_ids.copy()
        for mine, theirs in zip(self.caches, other.caches, strict=True):
            theirs.share(mine)
        return other

    def close(self) -> None:
        self.rewind(0)
        self.caches = []
        self._backend.forget(self)


class MlxLogits:
    """See `edgespec.backend.Logits`. `rows` is float32 [wanted, V]; the host reads MLX's memory without a copy."""

    def __init__(self, rows: Any, nodes: Sequence[int]) -> None:
        self._rows = rows
        self._index = {node: i for i, node in enumerate(nodes)}

    @cached_property
    def _host(self) -> Float32Array:
        rows: Float32Array = np.array(self._rows, copy=False)
        return rows

    def row(self, node: int) -> Float32Array:
        row: Float32Array = self._host[self._index[node]].copy()
        return row

    def top(
        self, nodes: Sequence[int], k: int, temperature: float, noise: Sequence[Float32Array | None]
    ) -> tuple[list[IdArray], list[Scores]]:
        index = [self._index[node] for node in nodes]
        if on_gpu():
            return device_top(self._rows, index, k, temperature, noise)
        rows = (self._host[i] for i in index)  # five to ten times as fast there as MLX on a CPU
        return top_of_rows(rows, k, temperature, noise)


def device_top(
    rows: Any, index: Sequence[int], k: int, temperature: float, noise: Sequence[Float32Array | None]
) -> tuple[list[IdArray], list[Scores]]:
    """`Logits.top` of rows [n, V] where the rows are; only ids and values come to the host."""
    size = rows.shape[1]
    sizes = [size if extra is None else min(size, len(extra)) for extra in noise]
    on_device = {id(extra): mx.array(extra[:size]) for extra in noise if extra is not None}  # nodes of a depth share it
    found = []
    for i, extra, count in zip(index, noise, sizes, strict=True):
        scores = rows[i, :count] if extra is None else rows[i, :count] + on_device[id(extra)]
        scores = scores / temperature
        ids = device_top_ids(scores, min(k, count))
        found.append((ids, scores[ids] - mx.logsumexp(scores)))
    mx.eval(found)
    all_ids, all_values = list[IdArray](), list[Scores]()
    for best, log_probs in found:
        ids, values = np.array(best).astype(np.int64), np.array(log_probs).astype(np.float64)
        order = np.lexsort((ids, -values))
        all_ids.append(ids[order])
        all_values.append(values[order])
    return all_ids, all_values


def device_top_ids(scores: Any, k: int) -> Any:
    """Indices of the k largest of scores [V], in any order. MLX sorts to find them, so give it less to sort.

    The k largest lie in the k columns of a [64, V / 64] view whose maxima are largest, or in the rest behind it.
    """
    size = scores.shape[0]
    width = size // BLOCKS
    if k > width // 2:
        return mx.argpartition(-scores, k - 1)[:k]
    maxima = scores[: width * BLOCKS].reshape(BLOCKS, width).max(axis=0)
    columns = mx.argpartition(-maxima, k - 1)[:k]
    candidates = mx.concatenate(
        [(columns + width * mx.arange(BLOCKS)[:, None]).reshape(-1), mx.arange(width * BLOCKS, size)]
    )
    return candidates[mx.argpartition(-scores[candidates], k - 1)[:k]]


class MlxBackend:
    """See `edgespec.backend.Backend`. Make it with `load`."""

    name = "mlx"

    def __init__(
        self,
        model: Any,
        vocab: HfVocab,
        capabilities: Capabilities,
        windows: Sequence[int | None],
        sessions: int,
        notes: Sequence[str],
    ) -> None:
        self.vocab = vocab
        self.capabilities = capabilities
        self.notes = notes
        self.wait_seconds = 0.0  # MLX does not tell how long it waits for the disk
        self._model = model
        self._windows = windows
        self._max_sessions = sessions
        self._sessions: list[MlxSession] = []
        self._rows: Any = None  # the nodes whose final states the head is to see; None: all
        self._cuts_rows = cut_rows(model, lambda: self._rows)

    def open(self) -> MlxSession:
        if len(self._sessions) == self._max_sessions:
            raise UsageError("all sessions of this model are open: load it with a larger `sessions`")
        capacity = self.capabilities.context_length + self.capabilities.max_nodes
        self._sessions.append(MlxSession(self, [TreeCache(capacity, window) for window in self._windows]))
        return self._sessions[-1]

    def forget(self, session: MlxSession) -> None:
        """A session was closed."""
        self._sessions = [other for other in self._sessions if other is not session]

    def forward(self, batch: Sequence[Work]) -> list[Logits]:
        for name, count, limit in [
            ("nodes", sum(len(work.token_ids) for work in batch), self.capabilities.max_nodes),
            ("wanted nodes", sum(len(work.wanted) for work in batch), self.capabilities.max_wanted),
        ]:
            if count > limit:
                raise ValueError(f"{count} {name} in one forward; this backend takes {limit}")
        sessions = [cast(MlxSession, work.session) for work in batch]
        # All works are checked before the first is taken in: a refused batch changes nothing.
        for work, session in zip(batch, sessions, strict=True):
            session.check(work)
        rows = [self._evaluate(session, work) for work, session in zip(batch, sessions, strict=True)]
        mx.eval([session.state for session in sessions], [row for row in rows if row is not None])
        for work, session in zip(batch, sessions, strict=True):
            session.add(work)
        return [MlxLogits(row, work.wanted.tolist()) for work, row in zip(batch, rows, strict=True)]

    def _evaluate(self, session: MlxSession, work: Work) -> Any:
        """The graph of one work: logits float32 [wanted, V], or None if nothing is wanted."""
        session.place(work)
        wanted = mx.array(work.wanted - session.nodes)
        self._rows = wanted if len(work.wanted) else None
        logits = self._model(mx.array(work.token_ids)[None], cache=session.caches)[0]
        if len(work.wanted) == 0:
            return None  # MLX is lazy: what only the logits need is never computed
        return (logits if self._cuts_rows else logits[wanted]).astype(mx.float32)

    def close(self) -> None:
        for session in list(self._sessions):
            session.close()
        self._model = None
        mx.clear_cache()


def load(path: str, *, context_length: int = 4096, budget: int = 64, sessions: int = 1) -> MlxBackend:
    """Load a model folder in the form of the Hugging Face hub, as mlx-lm reads it.

    Args:
        path: the folder: config.json, model*.safetensors, tokenizer.
        context_length: most tokens of text in one session; 0 = what the model was trained for.
        budget: largest tree that will be asked for, in nodes without the root.
        sessions: how many sessions may be open at once.

    Raises:
        ModelError: the folder is missing, incomplete, damaged, or holds a model that cannot read a tree.
        UsageError: an option is out of range.
    """
    for name, value, low, high in [
        ("context length", context_length, 0, 2**24),
        ("budget", budget, 1, 2**15),
        ("sessions", sessions, 1, 256),
    ]:
        if not low <= value <= high:
            raise UsageError(f"{name} is {value}, but must be from {low} to {high}")
    folder = check_folder(path)
    config = _check_files(folder)
    model = _load_weights(folder)
    vocab = load_vocab(path)
    windows = _windows(model, path)
    notes = set_memory_limits(sum(array.nbytes for _, array in tree_flatten(model.parameters())))
    wrap_ropes(model)
    max_nodes = max(MIN_NODES, budget + 1)
    text_config = config.get("text_config") or config
    capabilities = Capabilities(
        context_length=context_length or text_config.get("max_position_embeddings") or DEFAULT_CONTEXT,
        max_nodes=max_nodes,
        max_wanted=max_nodes,
        max_leaves=max_nodes,
        logit_tolerance=_tolerance(model),
    )
    backend = MlxBackend(model, vocab, capabilities, windows, sessions, notes)
    try:
        _check_tree(backend, path, config["model_type"])
    except BaseException:
        backend.close()
        raise
    return backend


def _check_files(folder: Path) -> dict[str, Any]:
    """The folder's config.json, when nothing that it needs is missing."""
    try:
        config = json.loads((folder / "config.json").read_text("utf-8"))
    except ValueError as error:
        raise ModelError(f"{folder}: config.json is damaged: {first_line(error)}") from error
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise ModelError(f"{folder}: config.json does not name a model_type")
    index = folder / "model.safetensors.index.json"
    try:
        named = set(json.loads(index.read_text("utf-8"))["weight_map"].values()) if index.exists() else set()
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ModelError(f"{folder}: {index.name} is damaged: {first_line(error)}") from error
    missing = sorted(name for name in named if not (folder / name).exists())
    if missing:
        raise ModelError(f"{folder}: {len(missing)} of {len(named)} weight files are missing, first {missing[0]}")
    if not any(folder.glob("model*.safetensors")):
        raise ModelError(f"{folder}: has no weights: there is no file model*.safetensors")
    return config


def _load_weights(folder: Path) -> Any:
    """mlx-lm's model; MLX reads the weights when the first pass needs them."""
    try:
        return load_model(folder, lazy=True)[0]
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError, OSError) as error:
        raise ModelError(f"{folder}: mlx-lm cannot load it: {first_line(error)}") from error


def _windows(model: Any, path: str) -> list[int | None]:
    """For every layer that has a cache, how far back it sees; None: to the beginning."""
    windows = list[int | None]()
    for cache in make_prompt_cache(model):
        if type(cache) is KVCache:
            windows.append(None)
        elif type(cache) is RotatingKVCache and cache.keep == 0:
            windows.append(cache.max_size)
        else:
            raise ModelError(
                f"{path}: has layers that keep their past in a {type(cache).__name__}, which cannot branch into a "
                f"tree; use an attention model"
            )
    return windows


def wrap_ropes(model: Any) -> None:
    """Replace every rotary embedding inside the model by a `TreeRope` around it."""
    for module in model.modules():
        for name, child in module.children().items():
            if "rope" in type(child).__name__.lower():
                setattr(module, name, TreeRope(child))


def cut_rows(model: Any, rows: Callable[[], Any]) -> bool:
    """Make the module that runs the layers return only the states [1, rows, D] of `rows()` (None: all).

    False, and nothing is changed, when the model has no such module of its own.
    """
    first = model.layers[0]
    for module in model.modules():
        lists = [child for child in module.children().values() if isinstance(child, list)]
        if module is not model and any(layer is first for layers in lists for layer in layers):
            break
    else:
        return False
    kind = type(module)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        states, chosen = kind.__call__(self, *args, **kwargs), rows()
        return states if chosen is None else states[:, chosen]

    module.__class__ = type(kind.__name__, (kind,), {"__call__": call})  # Python finds __call__ on the class only
    return True


def on_gpu() -> bool:
    """Does MLX compute on a GPU?"""
    return bool(mx.default_device() == mx.gpu)


def set_memory_limits(weights: int) -> list[str]:
    """On a Mac, keep weights in the GPU's memory and bound the freed buffers that MLX keeps. Nothing elsewhere.

    Args:
        weights: bytes of the model's weights.

    Returns:
        What the user should know.
    """
    size = int(mx.device_info().get("max_recommended_working_set_size", 0))
    if not size:
        return []
    mx.set_wired_limit(size)
    mx.set_cache_limit(size // CACHE_SHARE)
    if weights <= WIRED_SHARE * size:
        return []
    return [f"the weights take {weights / 1e9:.1f} GB, and the GPU can hold {size / 1e9:.1f} GB: passes will be slow"]


def _tolerance(model: Any) -> float:
    """Of the roughest type among the weights or scales: activations have it too."""
    kinds = {array.dtype for _, array in tree_flatten(model.parameters())}
    if on_gpu():
        kinds.add(mx.float16)
    return max(TOLERANCE.get(kind, 0.0) for kind in kinds)


def _check_tree(backend: MlxBackend, path: str, model_type: str) -> None:
    """Refuse a model whose tree of three nodes is not its chains: the last node must not see the second."""
    tree, right, wrong = ([1, 2, 3], [-1, 0, 0]), ([1, 3], [-1, 0]), ([1, 2, 3], [-1, 0, 1])
    try:
        session, rows = backend.open(), list[Float32Array]()
        for tokens, parents in (tree, right, wrong):
            last = np.array([len(tokens) - 1], np.int32)
            work = Work(session, np.array(tokens, np.int32), np.array(parents, np.int32), last)
            rows.append(backend.forward([work])[0].row(int(last[0])))
            session.rewind(0)
        session.close()
    except RuntimeError as error:
        raise ModelError(f"{path}: MLX cannot run it on this device: {first_line(error)}") from error
    except (TypeError, ValueError, AttributeError, IndexError, KeyError) as error:
        raise ModelError(f"{path}: {model_type} models cannot read a tree on MLX: {first_line(error)}") from error
    if len(rows[0]) != backend.vocab.size:
        raise ModelError(f"{path}: the tokenizer has {backend.vocab.size} tokens, the model {len(rows[0])}")
    error_of_tree, effect = (float(np.abs(row - rows[1]).max()) for row in (rows[0], rows[2]))
    if not error_of_tree <= 0.25 * effect:
        raise ModelError(
            f"{path}: {model_type} models cannot read a tree on MLX: a node sees more than its ancestors, or its "
            f"position is another's"
        )
