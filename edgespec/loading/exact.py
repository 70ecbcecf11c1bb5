"""Which shapes of passes agree to the bit?

An engine has kernels for few rows and others for many, and they round differently. Between two such switches results
do not depend on the shape at all. Where the switches are differs by engine, processor, model and cache, so they are
found by trying: the same tokens in passes of many sizes, as a chain, as a tree, and among copies of one token (in a
mixture of experts, how many rows an expert gets depends on what the tokens are), after a short and a long text.

A text is then written in one class of shapes, chosen when the model is loaded:

    narrow      few rows, as plain decoding has them, or one more
    wide        many: short passes are padded. Where every pass waits long for weights, that costs next to nothing
    any         the same kernels for few and many

Some kernels take four rows at a time, and what is left over one by one, by another: llama.cpp's for weights that it has
repacked, the quickest for one row. Their passes over many rows agree where all have a multiple of four.

Prompts are read in the class of the largest passes; those that have fewer tokens than that takes in one for fewer rows.
What was written counts as prompt in the next turn of a chat; if the classes differ it is read again then, since a fresh
session would read it so. Related: batch-invariant kernels; here the engine's own suffice.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from time import perf_counter, process_time
from typing import Any

import numpy as np

from edgespec.errors import ModelError, UsageError
from edgespec.loop.backend import Backend, Capabilities, Session, Work
from edgespec.loop.engines import load_specimen
from edgespec.loop.passes import prefill
from edgespec.loop.shapes import BatchInvariance, RowClass
from edgespec.machine.measurements import identity, machine, recall, remember

CHOICES = ("narrow", "wide", "off")
SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 17, 32, 33, 63, 64, 65, 128)
CONTEXTS = (24, 650)  # llama.cpp splits the cache among threads from 512 cells on; not a multiple of a tile
SMALL = 3  # nodes of a tree that tells whether gaps matter: fewer than any kernel takes together
TOGETHER = 4  # rows that a kernel may take at a time, and what is left over by another
MULTIPLES = (4, 8, 16, 32, 60, 64, 128)  # of it
FEW = 3  # rows: a class that reaches no further has no room for a tree
MANY = 32  # rows: a class that reaches from few to so many is good for everything
BLOCK = 512  # tokens of a prompt that are read together where rows depend on each other
REPEATED = 5  # times that a pass is timed
TRYING = "finding passes that agree to the bit, once for this model on this machine"
QUICKER = 1.1  # times as quick for one row: then kernels are worth passes of a few rows less
SAME = 1.1  # of a narrow pass's time: if a wide one takes no more, wide is the default in memory, too
APART = 2.0  # a streamed layer takes as much longer than one of a small model, which stays in the processor's cache
LOADED = 0.5  # of the processors, that programs want now: then what could not be timed before cannot be timed now
BUSY = 0.75  # of its threads' time: where a program gets less, others compute, and its passes' times tell nothing


@dataclass(frozen=True, slots=True)
class Group:
    """Neighbouring sizes of passes that agree."""

    least: int
    most: int
    trees: bool  # gaps between a node's ancestors change no bit
    company: bool  # nor does it what the other rows are
    # Of a layer in a pass over `least` rows after a long text. 0: not known.
    seconds: float = 0.0
    step: int = 1  # of their sizes only the multiples of this


Found = Sequence[Group]
_known: dict[str, list[Group]] = {}  # in this process, also where nothing is remembered


def apply_row_class(
    backend: Backend,
    path: str,
    asked: str | None = None,
    *,
    keep: bool = True,
    say: Callable[[str], None] = lambda text: None,
) -> Found:
    """Have a loaded model keep to a class; what was found of all.

    Args:
        backend: no session of it is open.
        path: of the model.
        asked: as for `choose`.
        keep: remember what was found, and use what is remembered.
        say: told when passes have to be tried, which takes some seconds.

    Raises:
        UsageError: there is no such class here.
    """
    if asked == "off" or backend.capabilities.logit_tolerance == 0:  # the latter rounds alike in all shapes
        return ()
    found = [] if backend.capabilities.gaps else find(backend, path, keep=keep, say=say)
    exact = choose(found, backend.capabilities, asked)
    if exact:
        backend.keep_to(exact)
    backend.notes = [*backend.notes, *price(found, exact, backend.capabilities.streams)]
    return found


def price(found: Found, exact: BatchInvariance | None, streams: bool) -> list[str]:
    """What padding costs a pass over one node, for a person, where that is much."""
    if exact is None or exact.trees.least == 1 or streams or not _timed(found):
        return []
    times = next(group.seconds for group in found if group.least == exact.trees.least) / found[0].seconds
    if times <= SAME:
        return []
    return [
        f"passes are padded to {exact.trees.least} rows, so that they agree to the bit, and take {times:.1f} times as "
        "long as one row; other values of --kv-type or --exact may do without"
    ]


def find(backend: Backend, path: str, *, keep: bool, say: Callable[[str], None]) -> list[Group]:
    """What `probe` finds of a small model like this one, or of this one, or has found before; arguments as above."""
    about = _about(backend.name, backend.build, backend.computing, path)
    if (found := _recall(about, keep)) is None:
        say(TRYING)
        try:
            with load_specimen(backend.name, path, **backend.computing) or nullcontext(backend) as small:
                found = probe(small)
        except ModelError:  # of its file no smaller one can be made
            found = probe(backend)
        _keep(about, found, keep)
    return found


def probe_before_load(
    name: str, path: str, asked: str | None, *, keep: bool, say: Callable[[str], None]
) -> Callable[..., bool]:
    """The same for an engine that still has a choice, or is about to fill memory with weights: a small model has room
    before that only.

    Returns:
        What the engine calls with the `build` and `computing` that it would have, and perhaps another `computing`
        instead. It tells whether texts could be written so in the class that is `asked` for, clearly quicker than
        instead, where passes may hold more rows. `find` knows the answers afterwards.
    """

    def suiting(build: str, computing: Mapping[str, Any]) -> Group | None:
        about = _about(name, build, computing, path)
        if (found := _recall(about, keep)) is None and (small := load_specimen(name, path, **computing)):
            say(TRYING)
            with suppress(ModelError), small as backend:
                _keep(about, found := probe(backend), keep)
        least = MANY if asked == "wide" else FEW
        return next((group for group in usable(found or ()) if group.most >= least), None)

    def agrees(build: str, computing: Mapping[str, Any], instead: Mapping[str, Any] | None = None) -> bool:
        if (group := suiting(build, computing)) is None or instead is None:
            return group is not None
        if (other := suiting(build, instead)) is None:
            return True
        quicker = not _timed([group, other]) or other.seconds > QUICKER * group.seconds
        return quicker and not other.most >= MANY > group.most

    return agrees


def _about(name: str, build: str, computing: Mapping[str, Any], path: str) -> dict[str, Any]:
    return {
        "kind": "exact", "engine": name, "build": build, "machine": machine(), "target": identity(path),
        "sizes": f"{SIZES} {MULTIPLES}, timed without logits, a layer, from the beginning", **computing,
    }  # fmt: skip


def _recall(about: dict[str, Any], kept: bool) -> list[Group] | None:
    key = json.dumps(about, sort_keys=True)
    if key not in _known and kept and (rows := recall(about)) is not None:
        with suppress(TypeError):  # written by another version
            found = [Group(**row) for row in rows]
            if _timed(found) or machine_is_busy():
                _known[key] = found
    return _known.get(key)


def _timed(found: Found) -> bool:
    return all(group.seconds for group in found)


def machine_is_busy() -> bool:
    """Whether other programs compute now; False where a system does not tell."""
    tell = getattr(os, "getloadavg", None)  # Windows has none
    return tell is not None and tell()[0] > LOADED * (os.cpu_count() or 1)


def _keep(about: dict[str, Any], found: list[Group], keep: bool) -> None:
    _known[json.dumps(about, sort_keys=True)] = found
    if keep and (not found or _open_ended(found[-1])):  # else others may ask for more than was tried
        remember(about, [asdict(group) for group in found])


def probe(backend: Backend) -> list[Group]:
    """Try passes of all `SIZES` that the backend takes; the groups that agree, small to large."""
    limits = backend.capabilities
    most = min(limits.max_nodes, limits.max_wanted, limits.max_leaves, limits.context_length // 2)
    sizes = [size for size in SIZES if size <= most]
    contexts = sorted({min(length, limits.context_length - sizes[-1] - 1) for length in CONTEXTS})
    chains = [(prompt, tokens(backend, sizes[-1], 2)) for prompt in (tokens(backend, n, 1) for n in contexts)]
    session = backend.open()
    try:
        prompt, chain = chains[-1]
        prefill(backend, session, prompt)
        if not _gaps_change_nothing(backend, session, chain, _rows(backend, session, chain[: min(SMALL, sizes[-1])])):
            return []
        groups = _agreeing(backend, session, chains, sizes)
        if groups[-1].least == groups[-1].most and sizes[-1] == SIZES[-1]:  # large passes differ from their neighbours
            together = _agreeing(backend, session, chains, MULTIPLES)
            if together[-1].least < together[-1].most:
                few = [group for group in groups if group.most < TOGETHER]
                groups = [*few, *(replace(group, step=TOGETHER) for group in together)]
        seconds = _seconds(backend, session, chains[-1][1], [group.least for group in groups])
        for prompt, chain in reversed(chains):  # the last is still there
            prefill(backend, session, prompt)
            groups = [_looked_at(group, backend, session, chain) for group in groups]
        if not all(_goes_on(group, backend, session, chain) for group in groups if group.most >= MANY):
            return []
        return [replace(group, seconds=took) for group, took in zip(groups, seconds, strict=True)]
    finally:
        session.close()


def _agreeing(
    backend: Backend, session: Session, chains: Sequence[tuple[list[int], list[int]]], sizes: Sequence[int]
) -> list[Group]:
    """Which of these sizes agree on chains; a chain is a text, and what comes after it."""
    agree = np.ones(len(sizes) - 1, np.bool_)  # each size with the next
    for prompt, chain in chains:
        prefill(backend, session, prompt)
        before = _rows(backend, session, chain[: sizes[0]])
        for i, size in enumerate(sizes[1:]):
            rows = _rows(backend, session, chain[:size])
            agree[i] &= np.array_equal(rows[: len(before)], before)
            before = rows
    edges = np.flatnonzero(~agree).tolist()
    ends = zip([0, *(edge + 1 for edge in edges)], [*edges, len(sizes) - 1], strict=True)
    return [Group(sizes[i], sizes[j], trees=True, company=True) for i, j in ends]


def _looked_at(group: Group, backend: Backend, session: Session, chain: list[int]) -> Group:
    """The group, and whether trees and company change a bit after this text, too."""
    trees, company = group.trees, group.company
    for size in {group.least, group.most}:
        rows = _rows(backend, session, chain[:size])
        trees &= _gaps_change_nothing(backend, session, chain, rows)
        among_copies = _rows(backend, session, chain[:1] * size)
        company &= np.array_equal(rows[0], among_copies[0])
    return replace(group, trees=trees, company=company)


def _goes_on(group: Group, backend: Backend, session: Session, chain: list[int]) -> bool:
    """Whether a prompt has the same rows read at once as read on from its first tokens: some engines mask otherwise."""
    first, size = group.least, 2 * group.least
    if size > min(group.most, len(chain)):
        return True
    session.rewind(0)
    whole = _rows(backend, session, chain[:size])
    prefill(backend, session, chain[:first])
    return np.array_equal(_rows(backend, session, chain[first:size]), whole[first:])


def _seconds(backend: Backend, session: Session, chain: Sequence[int], sizes: Sequence[int]) -> list[float]:
    """Of a pass of each size, the best of several, by turns; 0: other programs took the processors meanwhile."""
    started, used = perf_counter(), process_time()
    took = [[_one(backend, session, chain[:size]) for size in sizes] for _ in range(REPEATED)]
    threads = backend.computing.get("threads") if backend.computing.get("gpu_layers") == 0 else None
    processors = min(threads, os.cpu_count() or 1) if isinstance(threads, int) else 0
    if process_time() - used < BUSY * processors * (perf_counter() - started):
        return [0.0 for _ in sizes]
    return [min(one) / backend.capabilities.layers for one in zip(*took, strict=True)]


def _one(backend: Backend, session: Session, chain: Sequence[int]) -> float:
    numbers = np.arange(len(chain), dtype=np.int32)
    started = perf_counter()
    backend.forward([Work(session, np.array(chain, np.int32), numbers - 1, numbers[:0])])
    took = perf_counter() - started
    session.commit([])
    return took


def _gaps_change_nothing(backend: Backend, session: Session, chain: Sequence[int], rows: Any) -> bool:
    """Whether a tree of as many nodes, with the chain as a path, has the chain's `rows` there."""
    nodes, parents, path = comb(chain, len(rows))
    return np.array_equal(_rows(backend, session, nodes, parents)[path], rows[: len(path)])


def comb(chain: Sequence[int], size: int) -> tuple[list[int], list[int], list[int]]:
    """A tree of `size` nodes whose path of the chain's first tokens has other nodes in between.

    Returns:
        Tokens and parents of the nodes, and the nodes on the path.
    """
    nodes, parents, path = list[int](), list[int](), list[int]()
    for node in range(size):
        above = path[-1] if path else -1
        if node % 3 == 1:  # a sibling of what comes next, or a child of the one before
            nodes.append(chain[-1 - node % len(chain)])
        else:
            nodes.append(chain[len(path)])
            path.append(node)
        parents.append(above)
    return nodes, parents, path


def tokens(backend: Backend, count: int, seed: int) -> list[int]:
    """Token ids, any but the vocabulary's last few, which may have no row in the model."""
    ids = np.random.default_rng(seed).integers(3, max(4, backend.vocab.size * 9 // 10), count)
    return [int(token) for token in ids]


def _rows(backend: Backend, session: Session, nodes: Sequence[int], parents: Sequence[int] | None = None) -> Any:
    """Logits and states [n, V + D] of one pass over a tree, or a chain, whose nodes are dropped again."""
    numbers = np.arange(len(nodes), dtype=np.int32)
    above = numbers - 1 if parents is None else np.array(parents, np.int32)
    logits = backend.forward([Work(session, np.array(nodes, np.int32), above, numbers)])[0]
    rows = np.stack([np.concatenate([logits.row(node), logits.state(node)]) for node in range(len(nodes))])
    session.commit([])
    return rows


def check_choice(asked: str | None) -> None:
    """Refuse what is none of `CHOICES`, before a model is loaded. Raises UsageError."""
    if asked not in (None, *CHOICES):
        raise UsageError(f"exact is {asked!r}, but must be one of {', '.join(CHOICES)}")


def choose(found: Found, limits: Capabilities, asked: str | None) -> BatchInvariance | None:
    """The class that a text is written in; None: there is none, or it was not wanted.

    Args:
        found: what `probe` found.
        limits: of the model that writes it.
        asked: one of `CHOICES`; None: wide if that costs nothing, as where weights are waited for, else narrow.

    Raises:
        UsageError: there is no such class here.
    """
    check_choice(asked)
    if asked == "off":
        return None
    most = min(limits.max_nodes, limits.max_wanted)
    good = [group for group in usable(found) if group.least + FEW <= most]
    if not good:
        if asked is not None:
            raise UsageError(f"--exact {asked}: {reason(found, limits.paths)}")
        return None
    narrow, mixture = good[0], not all(group.company for group in found)
    others = [] if mixture else [group for group in good[1:] if group.most >= MANY]
    wide = narrow if narrow.most >= MANY else next(iter(others), None)
    if asked == "wide" and wide is None:
        raise UsageError(f"--exact wide: here only passes of at most {narrow.most} rows agree; use --exact narrow")
    cheap = wide is not None and _costs_little(wide, narrow, limits)
    chosen = wide if wide and (asked == "wide" or (asked is None and cheap)) else narrow
    name = "any" if narrow.most >= MANY else "wide" if chosen is wide else "narrow"
    trees = _shape(chosen, most)
    if mixture:  # only equal blocks are read alike
        return BatchInvariance(name, trees, RowClass(1, min(BLOCK, limits.max_nodes)), blocks=True)
    if chosen is found[-1]:
        return BatchInvariance(name, trees, trees)
    short = _shape(wide, most) if wide and wide is not found[-1] else None
    return BatchInvariance(name, trees, _shape(found[-1], limits.max_nodes), short)


def _costs_little(wide: Group, narrow: Group, limits: Capabilities) -> bool:
    """Whether a pass that is padded to the wide class takes about as long as one over a narrow one's fewest rows.

    With a draft wide passes would pay sooner, but then texts with and without one would be of two classes.
    """
    if not _timed([wide, narrow]):
        return limits.streams
    if not limits.streams:
        return wide.seconds <= SAME * narrow.seconds
    few, many = (max(limits.read_seconds, APART * limits.layers * group.seconds) for group in (narrow, wide))
    return many <= SAME * few


def usable(found: Found) -> list[Group]:
    """Those that trees can be evaluated in."""
    return [group for group in found if group.trees and group.company and group.most >= FEW]


def _shape(group: Group, most: int) -> RowClass:
    """What is true of the largest of `SIZES` is taken to be true of larger passes."""
    most = most if _open_ended(group) else min(group.most, most)
    return RowClass(group.least, most - most % group.step, group.step)


def _open_ended(group: Group) -> bool:
    return group.most == SIZES[-1]


def reason(found: Found, paths: bool) -> str:
    """Why no class was found; `paths`: see `Capabilities`."""
    if paths:
        return "some layers are recurrent, and which passes agree to the bit is not looked for in such models"
    if not any(group.trees for group in found if group.most >= FEW):
        return "here a node's logits depend on what stands between its ancestors, or on where its pass begins"
    return "here a row's logits depend on the other rows of its pass, so no passes agree to the bit"


def line(found: Found, exact: BatchInvariance | None, paths: bool = False) -> str:
    """What was found, for a person; `paths`: see `Capabilities`."""
    sizes = ", ".join(map(_name, usable(found)))
    if not sizes:
        return reason(found, paths)
    used = f"; used: {exact.name}, at least {exact.trees.least}" if exact else ""
    untimed = (
        "" if _timed(found) else "; which cost least is not known, since other programs computed when they were tried"
    )
    return f"passes of these numbers of rows agree to the bit: {sizes}{used}{untimed}"


def _name(group: Group) -> str:
    if group.least == group.most and not _open_ended(group):
        return str(group.least)
    sizes = f"{group.least} and more" if _open_ended(group) else f"{group.least} to {group.most}"
    return sizes if group.step == 1 else f"{sizes} in multiples of {group.step}"
