"""Find row classes: sizes of passes whose rows are bit-identical ("batch invariance").

An engine has kernels for few rows and others for many, which round differently. The switch between them depends on the
engine, processor, model and cache, and in a mixture of experts on the tokens. So the same tokens are tried in passes of
many sizes, as a chain, as a tree and beside another sequence.

What an engine is known to add up by cell (`Capabilities.by_cell`) is never tried: rounding may hide it. Trying can only
take classes away.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from time import perf_counter, process_time
from typing import Any

import numpy as np

from edgespec.errors import ModelError, NoRoom, UsageError
from edgespec.loop.backend import Backend, Capabilities, Logits, Session, Work
from edgespec.loop.engines import Computing, find_engine
from edgespec.loop.passes import prefill
from edgespec.loop.shapes import ALWAYS
from edgespec.machine import measurements
from edgespec.machine.measurements import Amount, identity, processor_name, recall
from edgespec.machine.system import all_processors, machine_is_busy

SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 17, 32, 33, 63, 64, 65, 128)
LARGER = (256, 512)  # of prompts; a class reaches no further
CONTEXTS = (24, 650)  # tokens, no multiples of a tile; from 512 cells on llama.cpp splits the cache among threads
SMALL = 3  # nodes of a tree with gaps: fewer than any kernel takes together
TOGETHER = 4  # rows that one call of some kernels takes (llama.cpp, repacked weights); another kernel takes the rest
MULTIPLES = (4, 8, 16, 32, 60, 64, 128)  # of TOGETHER
MANY = 32  # rows: a class from few to this many serves every pass
REPEATED = 5
BESIDE = 37  # tokens of another sequence, no multiple of anything
EACH_TIME = "finding passes that agree to the bit"
TRYING = f"{EACH_TIME}, once for this model on this machine"
BUSY = 0.75  # share of processor time below which other programs disturb the timing


@dataclass(frozen=True, slots=True)
class TriedClass:
    """A row class as it was found by trying: neighbouring sizes of passes that agree.

    Attributes:
        trees: gaps between a node's ancestors change no bit.
        row_independent: the other rows change no bit.
        seconds: of a layer, in a pass over `least` rows after a long prompt; 0: not known.
        step: only sizes that are multiples of this.
    """

    least: int
    most: int
    trees: bool
    row_independent: bool
    seconds: Amount = 0.0
    step: int = 1


TriedClasses = Sequence[TriedClass]
_known: dict[str, list[TriedClass]] = {}


def find(
    engine: str,
    build: str,
    computing: Computing,
    path: str,
    *,
    remember: bool,
    say: Callable[[str], None],
    loaded: Backend | None = None,
) -> list[TriedClass]:
    """The row classes of a model, remembered or found by trying; [] if it has none, or cannot be tried.

    Args:
        engine: its name.
        build: as of `Backend`.
        computing: as of `Backend`.
        path: of the model.
        remember: store what was found for later runs, and use what is stored; not of GPUs, whose drivers change.
        say: called with a line before passes are tried, which takes some seconds.
        loaded: the model, with no session open: tried if the engine has no probe model of it, and no GPU computes.

    Raises:
        ModelError, NoRoom, OSError: no probe model can be made, and a GPU computes.
        UsageError: this GPU's layers can have no class.
    """
    if "device" in computing:
        remember, loaded = False, None
    about = _about(engine, build, computing, path)
    if (known := _recall(about, remember)) is not None:
        return known
    made = find_engine(engine)
    small = made.probe_copy(path, computing)
    if small is None and loaded is None:
        return []
    say(TRYING if remember else EACH_TIME)
    try:
        with small or nullcontext() as copy:
            with made.probe_model(path, computing, watched=True, copy=copy) as backend:
                found = probe(backend)
            with made.probe_model(path, computing, copy=copy) as backend:
                found = timed(backend, found)
    except (ModelError, NoRoom, OSError):
        if "device" in computing:
            raise  # a class was asked for
        if loaded is None:
            return []
        small, found = None, timed(loaded, probe(loaded))
    whole = small is not None or loaded is None or _sizes(loaded.capabilities)[1] == [*LARGER]
    _keep(about, found, remember and whole)
    return found


def _about(name: str, build: str, computing: Mapping[str, Any], path: str) -> dict[str, Any]:
    return {
        "kind": "exact", "engine": name, "build": build, "machine": processor_name(), "target": identity(path),
        "sizes": f"{SIZES} {MULTIPLES} {LARGER}, timed without logits, a layer of each type, before rounding",
        **computing,
    }  # fmt: skip


def _recall(about: dict[str, Any], remember: bool) -> list[TriedClass] | None:
    key = json.dumps(about, sort_keys=True)
    if key not in _known and remember and (found := recall(about, list[TriedClass])) is not None:
        believed = all(1 <= tried.least <= tried.most <= LARGER[-1] and tried.step >= 1 for tried in found)
        if believed and (is_timed(found) or machine_is_busy()):
            _known[key] = found
    return _known.get(key)


def is_timed(found: TriedClasses) -> bool:
    return all(tried.seconds for tried in found)


def _keep(about: dict[str, Any], found: list[TriedClass], remember: bool) -> None:
    _known[json.dumps(about, sort_keys=True)] = found
    if remember and (not found or found[-1].most >= SIZES[-1]):
        measurements.remember(about, [asdict(tried) for tried in found])


def _sizes(limits: Capabilities) -> tuple[list[int], list[int]]:
    """Sizes of `SIZES` and, if it has all of these, of `LARGER` that an engine can try."""
    room = max(limits.context_length // 2, limits.context_length - CONTEXTS[-1] - 1)
    few = min(limits.max_nodes, limits.max_wanted, limits.max_leaves, room)
    most = min(limits.max_nodes, limits.context_length - CONTEXTS[0] - 1) if few >= SIZES[-1] else 0
    return [size for size in SIZES if size <= few], [size for size in LARGER if size <= most]


def probe(backend: Backend) -> list[TriedClass]:
    """Row classes of a model without open sessions, with `seconds` of 0."""
    limits = backend.capabilities
    sizes, larger = _sizes(limits)
    if not sizes or limits.by_cell == ALWAYS:
        return []
    contexts = sorted({min(length, limits.context_length - sizes[-1] - 1) for length in CONTEXTS})
    longest = max(sizes + larger)
    chains = [(prompt, tokens(backend, longest, 2)) for prompt in (tokens(backend, n, 1) for n in contexts)]
    with closing(backend.open()) as session:
        prompt, chain = chains[-1]
        prefill(backend, session, prompt)
        if not _gaps_change_nothing(backend, session, chain, _rows(backend, session, chain[: min(SMALL, sizes[-1])])):
            return []
        classes = _agreeing(backend, session, chains, sizes)
        if classes[-1].least == classes[-1].most and sizes[-1] == SIZES[-1]:
            together = _agreeing(backend, session, chains, MULTIPLES)
            if together[-1].least < together[-1].most:
                few = [tried for tried in classes if tried.most < TOGETHER]
                classes = [*few, *(replace(tried, step=TOGETHER) for tried in together)]
        for prompt, chain in reversed(chains):
            prefill(backend, session, prompt)
            classes = [_after(tried, backend, session, chain) for tried in classes]
        if not all(_goes_on(tried, backend, session, chain) for tried in classes if tried.most >= MANY):
            return []
        if larger:
            prompt, chain = chains[0]
            prefill(backend, session, prompt)
            classes[-1] = replace(classes[-1], most=_reach(classes[-1].most, backend, session, chain, larger))
        return _beside(classes, backend, session, *chains[0], sizes[-1])


def timed(backend: Backend, classes: TriedClasses) -> list[TriedClass]:
    """The same classes with `seconds`; the backend has no open sessions."""
    if not classes:
        return []
    limits = backend.capabilities
    longest = max(tried.least for tried in classes)
    with closing(backend.open()) as session:
        prefill(backend, session, tokens(backend, min(CONTEXTS[-1], limits.context_length - longest - 1), 1))
        seconds = _seconds(backend, session, tokens(backend, longest, 2), [tried.least for tried in classes])
        return [replace(tried, seconds=took) for tried, took in zip(classes, seconds, strict=True)]


def _agreeing(
    backend: Backend, session: Session, chains: Sequence[tuple[list[int], list[int]]], sizes: Sequence[int]
) -> list[TriedClass]:
    ranges = [_range_by_cell(backend.capabilities, size) for size in sizes]
    agree = np.array([one == next_ for one, next_ in pairwise(ranges)], np.bool_)
    for prompt, chain in chains:
        prefill(backend, session, prompt)
        before = _rows(backend, session, chain[: sizes[0]])
        for i, size in enumerate(sizes[1:]):
            rows = _rows(backend, session, chain[:size])
            agree[i] &= np.array_equal(rows[: len(before)], before)
            before = rows
    edges = np.flatnonzero(~agree).tolist()
    ends = zip([0, *(edge + 1 for edge in edges)], [*edges, len(sizes) - 1], strict=True)
    return [TriedClass(sizes[i], sizes[j], trees=ranges[i] is None, row_independent=True) for i, j in ends]


def _range_by_cell(limits: Capabilities, size: int) -> tuple[int, int] | None:
    return next((found for found in limits.by_cell if found[0] <= size <= found[1]), None)


def _after(tried: TriedClass, backend: Backend, session: Session, chain: list[int]) -> TriedClass:
    trees, row_independent = tried.trees, tried.row_independent
    for size in {tried.least, tried.most}:
        rows = _rows(backend, session, chain[:size])
        trees = trees and _gaps_change_nothing(backend, session, chain, rows)
        among_copies = _rows(backend, session, chain[:1] * size)
        row_independent &= np.array_equal(rows[0], among_copies[0])
    return replace(tried, trees=trees, row_independent=row_independent)


def _beside(
    classes: TriedClasses, backend: Backend, session: Session, prompt: list[int], chain: list[int], most: int
) -> list[TriedClass]:
    """The classes, where rows depend on each other if one of another sequence in the pass changes them."""
    try:
        other = backend.open()
    except UsageError:  # the model has one session
        return [*classes]
    with closing(other):
        prefill(backend, session, prompt)
        prefill(backend, other, prompt[:BESIDE])

        def same(most: int) -> bool:
            alone = _rows(backend, session, chain[:most])[:-1]
            logits = backend.forward([_work(other, chain[-1:]), _work(session, chain[: most - 1])])[1]
            beside = _stacked(logits, most - 1)
            session.commit([])
            other.commit([])
            return np.array_equal(beside, alone)

        return [
            replace(tried, row_independent=tried.row_independent and same(min(tried.most, most)))
            if tried.trees and tried.most > 1
            else tried
            for tried in classes
        ]


def _goes_on(tried: TriedClass, backend: Backend, session: Session, chain: list[int]) -> bool:
    """True if a prompt has the same rows in one pass and in two: some engines mask differently."""
    first, size = tried.least, 2 * tried.least
    if size > min(tried.most, len(chain)):
        return True
    session.rewind(0)
    whole = _rows(backend, session, chain[:size])
    prefill(backend, session, chain[:first])
    return np.array_equal(_rows(backend, session, chain[first:size]), whole[first:])


def _reach(most: int, backend: Backend, session: Session, chain: list[int], larger: Sequence[int]) -> int:
    """The largest size up to which the first rows of a chain agree."""
    count = most
    before = _first_rows(backend, session, chain[:count], count)
    for size in larger:
        if not np.array_equal(_first_rows(backend, session, chain[:size], count), before):
            break
        most = size
    return most


def _seconds(backend: Backend, session: Session, chain: Sequence[int], sizes: Sequence[int]) -> list[float]:
    """The best time of a pass of each size, interleaved; 0: other programs took the processors meanwhile."""
    started, used = perf_counter(), process_time()
    took = [[_one(backend, session, chain[:size]) for size in sizes] for _ in range(REPEATED)]
    threads = backend.computing.get("threads") if backend.computing.get("gpu_layers") == 0 else None
    processors = min(threads, all_processors()) if isinstance(threads, int) else 0
    if process_time() - used < BUSY * processors * (perf_counter() - started):
        return [0.0 for _ in sizes]
    return [min(one) / backend.capabilities.layers for one in zip(*took, strict=True)]


def _one(backend: Backend, session: Session, chain: Sequence[int]) -> float:
    work = _work(session, chain, wanted=0)
    started = perf_counter()
    backend.forward([work])
    took = perf_counter() - started
    session.commit([])
    return took


def _gaps_change_nothing(backend: Backend, session: Session, chain: Sequence[int], rows: Any) -> bool:
    nodes, parents, path = comb(chain, len(rows))
    return np.array_equal(_rows(backend, session, nodes, parents)[path], rows[: len(path)])


def comb(chain: Sequence[int], size: int) -> tuple[list[int], list[int], list[int]]:
    """A tree of `size` nodes: a path of the chain's first tokens, with other nodes between those of the path.

    Returns:
        Tokens and parents of the nodes, and the nodes on the path.
    """
    nodes, parents, path = list[int](), list[int](), list[int]()
    for node in range(size):
        above = path[-1] if path else -1
        if node % 3 == 1:
            nodes.append(chain[-1 - node % len(chain)])
        else:
            nodes.append(chain[len(path)])
            path.append(node)
        parents.append(above)
    return nodes, parents, path


def tokens(backend: Backend, count: int, seed: int) -> list[int]:
    """Random token ids without the vocabulary's last ones, which may have no row in the model."""
    ids = np.random.default_rng(seed).integers(3, max(4, backend.vocab.size * 9 // 10), count)
    return [int(token) for token in ids]


def _rows(backend: Backend, session: Session, nodes: Sequence[int], parents: Sequence[int] | None = None) -> Any:
    """Logits and states [nodes, vocabulary + state] of one pass over a tree or chain, which is dropped again."""
    rows = _stacked(backend.forward([_work(session, nodes, parents)])[0], len(nodes))
    session.commit([])
    return rows


def _stacked(logits: Logits, count: int) -> Any:
    return np.stack([np.concatenate([logits.row(node), logits.state(node)]) for node in range(count)])


def _first_rows(backend: Backend, session: Session, chain: Sequence[int], count: int) -> Any:
    """Logits of the first rows of a pass over a chain."""
    logits = backend.forward([_work(session, chain, wanted=count)])[0]
    rows = np.stack([logits.row(node) for node in range(count)])
    session.commit([])
    return rows


def _work(
    session: Session, nodes: Sequence[int], parents: Sequence[int] | None = None, wanted: int | None = None
) -> Work:
    """All nodes of a tree, or of a chain, and how many first ones are wanted; default: all."""
    numbers = np.arange(len(nodes), dtype=np.int32)
    above = numbers - 1 if parents is None else np.array(parents, np.int32)
    return Work(session, np.array(nodes, np.int32), above, numbers[:wanted])
