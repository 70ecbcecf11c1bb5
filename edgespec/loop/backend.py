"""The contract between the program and the engines that run models.

One verb, `Backend.forward`, does prefill, draft expansion, verification and several sequences at
once. Every backend passes `tests/contract.py`.
"""

import inspect
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec
from math import inf
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from edgespec.errors import ContextFull, MissingPackage, UsageError
from edgespec.loop.sampling import Float32Array, IdArray, Scores
from edgespec.loop.shapes import Exact, ShapeClass
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
    exact: Exact | None = None  # None: passes have any shape, and logits move by `logit_tolerance`
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
    def owed(self) -> int:
        """Committed tokens that the next pass reads again; they count as rows of it."""

    def kept(self, length: int, *, short: bool = False) -> int:
        """Of the first `length` committed tokens, how many a prompt that starts with them need not read again.

        `short`: a prompt that `is_short`.
        """

    def commit(self, path: Sequence[int], *, below: bool = False) -> IntArray:
        """Make these nodes, a chain that starts under the last committed token, text. Drop all other nodes, but with
        `below` those under the last of these, if they can stay: they are renumbered, and their old numbers returned."""

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


@dataclass(frozen=True, slots=True)
class Work:
    """Nodes to evaluate in one session."""

    session: Session
    token_ids: IntArray  # [n]
    parents: IntArray  # [n]: a node's number (this work's nodes follow those evaluated before), or -1: last committed
    wanted: IntArray  # numbers of those of this work's nodes whose logits are needed
    prompt: bool = False  # a chain that is part of a prompt: no guesses, and the session has no nodes
    short: bool = False  # … that is so short that it has a class of its own: see `Exact.short`


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

    def keep_to(self, exact: Exact) -> None:
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


# name -> module with `load(path, **options) -> Backend` and `load_vocab(path) -> Vocab`.
BUILT_IN = {
    "llamacpp": "edgespec.backends.llamacpp.backend",
    "mlx": "edgespec.backends.mlx.backend",
    "reference": "edgespec.backends.reference.backend",
    "torch": "edgespec.backends.torch.backend",
}


def load_backend(name: str, path: str, **options: Any) -> Backend:
    """Load the model at `path` with a built-in backend, or one from the entry-point group edgespec.backends.

    Raises:
        UsageError: there is no such backend.
        ModelError: the model cannot be loaded.
        MissingPackage: the backend's engine is not installed.
    """
    backend: Backend = _backend_module(name).load(path, **options)
    return backend


def load_options(name: str) -> frozenset[str]:
    """The options that a backend's `load` has; raises as `load_backend` does."""
    return frozenset(list(inspect.signature(_backend_module(name).load).parameters)[1:])


def load_specimen(name: str, path: str, **options: Any) -> AbstractContextManager[Backend] | None:
    """A small model that computes as the one at `path`, within a `with`; None: this backend makes none.

    Args:
        name: as for `load_backend`.
        path: of the whole model.
        options: `Backend.computing` of the whole model.

    Raises:
        ModelError: on entering the `with`, if it cannot be made.
    """
    module = _backend_module(name)
    if not hasattr(module, "specimen_of"):
        return None
    found: AbstractContextManager[Backend] = module.specimen_of(path, **options)
    return found


def choose_backend(folder: bool) -> str:
    """The built-in backend for a model file, or for a model folder on this machine.

    Raises:
        MissingPackage: no engine for folders is installed.
    """
    return installed_backends(folder)[0]


def installed_backends(folder: bool) -> list[str]:
    """The built-in backends for model files or folders that can be used on this machine, the one to prefer first.

    Raises:
        MissingPackage: no engine for folders is installed.
    """
    if not folder:
        return ["llamacpp"]
    engines = [("torch", "torch"), ("mlx", "mlx_lm")]
    if sys.platform == "darwin" and platform.machine() == "arm64":
        engines.reverse()
    installed = [name for name, package in engines if find_spec(package)]
    if not installed:
        name, package = engines[0]
        raise MissingPackage(package.replace("_", "-"), name, "running a model folder")
    return installed


def load_vocab(name: str, path: str) -> Vocab:
    """Only the tokenizer of the model at `path`; raises as `load_backend` does."""
    vocab: Vocab = _backend_module(name).load_vocab(path)
    return vocab


def _backend_module(name: str) -> Any:
    others = {point.name: point.value for point in entry_points(group="edgespec.backends")}
    known = others | BUILT_IN
    if name not in known:
        raise UsageError(f"there is no backend {name!r}; there are: {', '.join(sorted(known))}")
    return import_module(known[name])


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """How many leading tokens are equal."""
    shorter = min(len(left), len(right))
    if left[:shorter] == right[:shorter]:  # the usual case, without a loop
        return shorter
    for i, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return i
    return shorter


def prefill(
    backend: Backend,
    session: Session,
    token_ids: Sequence[int],
    *,
    want_last: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Logits, int] | None:
    """Make `token_ids` the session's committed tokens, keeping the prefix it already holds.

    Args:
        backend: the session's backend.
        session: any session, committed tokens, uncommitted nodes and all.
        token_ids: the tokens wanted.
        want_last: return the logits that follow the last token, and the node they belong to.
        progress: called with (tokens done, tokens in all) before the first and after every pass.

    Raises:
        ContextFull: the tokens do not fit.
    """
    session.rewind(start_of(backend.capabilities, session, token_ids, want_last=want_last))
    last, again = None, False
    if progress and len(session.token_ids) < len(token_ids):
        progress(len(session.token_ids), len(token_ids))
    while len(session.token_ids) < len(token_ids):
        work = prompt_work(backend.capabilities, session, token_ids, want_last=want_last)
        try:
            last = backend.forward([work])[0], len(work.token_ids) - 1
        except ContextFull:
            if again or not may_read_anew(backend.capabilities, session, token_ids):
                raise
            session.rewind(0)
            again = True
            continue
        session.commit(list(range(len(work.token_ids))))
        if progress:
            progress(len(session.token_ids), len(token_ids))
    return last if want_last else None


def may_read_anew(limits: Capabilities, session: Session, token_ids: Sequence[int]) -> bool:
    """After ContextFull: whether a prompt may have had no room only since the cache was put in order while it was read.

    Then it cannot go on where it stands, but from its beginning.
    """
    return bool(session.token_ids) and len(token_ids) <= limits.context_length


def prompt_work(
    limits: Capabilities,
    session: Session,
    token_ids: Sequence[int],
    *,
    want_last: bool = False,
    most: int | None = None,
) -> Work:
    """The next part of a prompt whose beginning is the session's committed tokens; the session has no nodes.

    `most`: tokens; default: as many as a pass takes. Where rows depend on each other it is always that many.
    """
    exact, start = limits.exact, len(session.token_ids)
    if short := is_short(limits, len(token_ids)):
        end = len(token_ids)
    elif exact and exact.blocks:
        end = start - start % exact.prompts.most + exact.prompts.most
    else:
        end = start + min(limits.max_nodes, exact.prompts.most if exact else limits.max_nodes) - session.owed
        if most is not None:
            end = min(end, start + most)
    piece = np.asarray(token_ids[start:end], np.int32)
    nodes = np.arange(len(piece), dtype=np.int32)
    wanted = nodes[-1:] if want_last and start + len(piece) == len(token_ids) else nodes[:0]
    return Work(session, piece, nodes - 1, wanted, prompt=True, short=short)


def is_short(limits: Capabilities, length: int) -> bool:
    """Whether a prompt of so many tokens has a class of its own, and is read in one pass."""
    exact = limits.exact
    return bool(exact and exact.short and length < exact.prompts.least and length <= exact.short.most)


def start_of(limits: Capabilities, session: Session, token_ids: Sequence[int], *, want_last: bool = False) -> int:
    """How many tokens of a prompt need not be read, since the session holds them; `want_last`: the last one is."""
    shared = min(common_prefix(session.token_ids, token_ids), len(token_ids) - want_last)
    return session.kept(shared, short=is_short(limits, len(token_ids)))


def check_batch(batch: Sequence[Work], limits: Capabilities) -> None:
    """Refuse more nodes, or more wanted ones, than a backend takes in one forward, before any work is done.

    Raises:
        ValueError: with the numbers, or prompts and trees, whose passes have other shapes, are in one batch.
    """
    nodes = sum(len(work.token_ids) for work in batch)
    counts = [
        ("nodes", nodes, limits.max_nodes),
        ("wanted nodes", sum(len(work.wanted) for work in batch), limits.max_wanted),
    ]
    if exact := limits.exact:
        if len({(work.prompt, work.short) for work in batch}) > 1 and exact.prompts != exact.trees:
            raise ValueError("prompts and trees in one forward, or short prompts and others; their passes differ here")
        if exact.blocks and len(batch) > 1 and any(work.prompt for work in batch):
            raise ValueError("a prompt and other works in one forward; here rows depend on each other")
    if shape := shape_of(limits, batch):
        counts.append(("rows", nodes + sum(work.session.owed for work in batch), shape.most))
    for name, count, limit in counts:
        if count > limit:
            raise ValueError(f"{count} {name} in one forward; this backend takes {limit}")


def shape_of(limits: Capabilities, batch: Sequence[Work]) -> ShapeClass | None:
    """The class that a pass over these works is kept to; None: it has any shape."""
    exact = limits.exact
    if exact is None:
        return None
    if any(work.short for work in batch):
        return exact.short
    return exact.prompts if any(work.prompt for work in batch) else exact.trees


def most_nodes(limits: Capabilities, owed: int) -> int:
    """Nodes that a tree may have, the root included, in a session that owes so many tokens."""
    most = min(limits.max_nodes, limits.max_wanted)
    return min(most, limits.exact.trees.most - owed) if limits.exact else most


def check_room(backend: Backend, prompt_length: int, what: str = "the context") -> None:
    """Refuse a prompt that leaves no room for a single new token, before any work is done.

    Raises:
        ContextFull: with the numbers.
    """
    limit = backend.capabilities.context_length
    if prompt_length >= limit:
        raise ContextFull(
            f"the prompt has {prompt_length} tokens, but {what} holds {limit}: "
            f"shorten the prompt or use a larger context (--ctx)"
        )
