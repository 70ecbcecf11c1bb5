"""Draft trees over mixtures of experts, replayed: what a policy reads, and how long its steps take by given costs.

A trace has the tree that a draft proposes at every position of a text, and the experts that each node chooses. So any
part of these trees can be verified in a replay, with the program's own pools. A policy chooses the part, and may know:

    rows      how long passes over so many nodes usually take, as planners suppose
    table     the experts that a token chose when it was seen last, and which experts lie in memory
    experts   those that each node chooses, likewise
    all       also which nodes are accepted: the oracle

All but the oracle take the nodes that the draft finds likeliest.
"""

import zlib
from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import astuple, dataclass, fields, replace
from functools import cached_property, partial
from operator import add
from pathlib import Path
from typing import Any, TypeAlias
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import ModelError, UsageError
from edgespec.loop.pass_times import Curve, distinct
from edgespec.loop.passes import NO_NODES
from edgespec.loop.tree import DraftTree, FloatArray, make_tree, ranked
from edgespec.machine.files import replacing
from edgespec.machine.memory import format_size
from edgespec.planners.cost import goodput, worth_reading
from edgespec.planners.search import LIKELY_CHILD
from edgespec.weights.expert_memory import most_predicted
from edgespec.weights.experts import FADING, ExpertLayer, Residents, memory_of, most_pools, pools_of
from edgespec.weights.plan import Tensor

BUDGET = 16  # nodes of a tree that ends where it does not pay
FURTHER = 0.18  # passes of the draft over one node, that a further node takes
AGAIN = 0.75  # share of a token's experts that it chose the last time, too

Experts: TypeAlias = NDArray[np.integer[Any]]  # [nodes or tokens, layers, used]
Nodes: TypeAlias = NDArray[np.intp]  # of a tree without its root


@dataclass(frozen=True)
class Costs:
    """Seconds of a pass, of each of its rows and experts, of an expert's read, and of a pass of the draft."""

    fixed: float
    row: float
    expert: float
    miss: float
    draft: float


@dataclass(frozen=True)
class Figures:
    """
    Attributes:
        experts: different ones of each layer and pass.
        read: bytes of experts.
        ahead: bytes that were read before the layer's router had chosen.
        used: of these, bytes that the pass wanted.
        waiting: seconds for reads, beyond those of computing and drafting at the same time.
    """

    tokens: int = 0
    steps: int = 0
    rows: int = 0
    experts: int = 0
    read: int = 0
    ahead: int = 0
    used: int = 0
    computing: float = 0.0
    waiting: float = 0.0
    drafting: float = 0.0

    def __add__(self, other: "Figures") -> "Figures":
        return Figures(*map(add, astuple(self), astuple(other)))

    @property
    def seconds(self) -> float:
        return self.computing + self.waiting + self.drafting


@dataclass(frozen=True)
class Text:
    """
    Attributes:
        ids: of the prompt, its first token, and one for each tree.
        prompt: experts of its tokens.
        nodes: [trees] nodes of each; what follows has all trees, one after another.
        predicted: by each layer's router, shown what the router before it reads; best first; [0]: not recorded.
    """

    ids: NDArray[np.int32]
    prompt: Experts
    nodes: NDArray[np.int32]
    token_ids: NDArray[np.int32]
    parents: NDArray[np.int32]
    log_probs: FloatArray
    chosen: Experts
    predicted: Experts

    @cached_property
    def steps(self) -> list[tuple[DraftTree, Experts, Experts]]:
        """By position: tree, experts chosen, and experts predicted; ValueError: it is no tree."""
        parts = self.token_ids, self.parents, self.log_probs, self.chosen, self.predicted
        split = [np.split(part, np.cumsum(self.nodes)[:-1]) for part in parts]
        return [(make_tree(*tree), chosen, predicted) for *tree, chosen, predicted in zip(*split, strict=True)]

    def accepted(self, at: int, kept: Iterable[int]) -> list[int]:
        """The root and the nodes of a tree that are accepted if `kept` are verified; the last tree's are not."""
        tree, known = self.steps[at][0], set(kept)
        child = {(int(tree.parents[node]), int(tree.token_ids[node])): node for node in known - {0}}
        path = [0]
        for token in self.ids[len(self.prompt) + at + 1 : -1].tolist():
            if (node := child.get((path[-1], token))) is None:
                break
            path.append(node)
        return path


@dataclass(frozen=True)
class Trace:
    """
    Attributes:
        sizes: bytes of an expert, by layer.
        count: experts of a layer.
        draft: bytes of its file.
    """

    texts: list[Text]
    sizes: list[int]
    count: int
    draft: int


def write_trace(path: Path, trace: Trace) -> None:
    """A file for `read_trees`."""
    parts = {
        f"{n}/{part.name}": getattr(text, part.name) for n, text in enumerate(trace.texts) for part in fields(text)
    }
    about: dict[str, Any] = {
        "texts": len(trace.texts),
        "sizes": trace.sizes,
        "count": trace.count,
        "draft": trace.draft,
    }
    with replacing(path) as new, new.open("wb") as file:
        np.savez_compressed(file, **about, **parts)


def read_trees(path: Path) -> Trace:
    """What `write_trace` has written; ModelError: it is another file, or damaged."""
    try:
        with np.load(path) as found:
            names = [part.name for part in fields(Text)]
            texts = [Text(**{name: found[f"{n}/{name}"] for name in names}) for n in range(int(found["texts"]))]
            trace = Trace(texts, found["sizes"].tolist(), int(found["count"]), int(found["draft"]))
        for text in texts:
            shape = (int(text.nodes.sum()), len(trace.sizes), text.prompt.shape[2])
            roots = [tree.token_ids[0] for tree, _, _ in text.steps]
            if not (
                text.prompt.shape[1:] == shape[1:]
                and text.chosen.shape == shape
                and text.predicted.shape in (shape, (0,))
                and max(text.prompt.max(), text.chosen.max()) < trace.count
                and text.ids[len(text.prompt) : -1].tolist() == roots
            ):
                raise ValueError
    # RuntimeError: zipfile's, of a member that is encrypted or compressed otherwise.
    except (OSError, EOFError, BadZipFile, zlib.error, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise ModelError(f"{path}: is no trace of trees, or damaged") from error
    return trace


class Decoding:
    """A text while it is decoded, with the program's own pools.

    Attributes:
        table: token -> the experts that it chose when it was seen last.
        found: figures so far.
    """

    def __init__(self, trace: Trace, room: int, costs: Costs) -> None:
        """Args:
        trace: of the text.
        room: bytes of pools.
        costs: of steps.

        Raises:
            UsageError: the pools have no room for a layer's experts.
        """
        layers = [
            ExpertLayer(i, trace.count, (Tensor(f"blk.{i}.ffn_up_exps.weight", 0, 0, size * trace.count),))
            for i, size in enumerate(trace.sizes)
        ]
        if not (pools := most_pools(layers, room)):
            least = format_size(memory_of(layers, pools_of(layers, 0)), up=True)
            raise UsageError(f"{format_size(room)} for experts are too little: the smallest pools take {least}")
        self.costs, self.count, self.sizes = costs, trace.count, trace.sizes
        self.table, self.found = dict[int, Experts](), Figures()
        places = {
            layer: (residents, row)
            for pool in pools
            for residents in [Residents(len(pool.layers), trace.count, pool.slots)]
            for row, layer in enumerate(pool.layers)
        }
        self.places = [places[layer] for layer in range(len(layers))]
        self._ahead = [set[int]() for _ in layers]

    def prompt(self, chosen: Experts) -> None:
        for layer, (residents, row) in enumerate(self.places):
            residents.use_in_turn(row, chosen[:, layer])
            residents.place(row, np.unique(chosen[:, layer]).tolist())

    def read_ahead(self, likely: Iterable[Experts], most: int) -> None:
        """Read experts ahead of the next pass: for each of `likely` those by layer, at most so many in all."""
        for experts in likely:
            for layer, (residents, row) in enumerate(self.places):
                new = np.unique(experts[layer])
                new = new[residents.slots_of(row)[new] < 0][: most - sum(map(len, self._ahead))]
                self._ahead[layer] |= dict(residents.place(row, new.tolist(), self._kept(residents))).keys()

    def _kept(self, residents: Residents) -> list[int]:
        """Slots of a pool with experts that are read ahead of layers to come."""
        places = zip(self.places, self._ahead, strict=True)
        kept = [other.slots_of(row)[list(ahead)] for (other, row), ahead in places if other is residents]
        return [int(slot) for slot in np.concatenate(kept) if slot >= 0]

    def passed(self, chosen: Experts, predicted: Experts | None = None) -> Figures:
        """Use experts as a pass does; those `predicted` are read while the layer before is computed."""
        rows, layers, used = chosen.shape
        found, free, kept = Figures(steps=1, rows=rows), 0.0, list[int]()
        for layer, (residents, row) in enumerate(self.places):
            late = 0.0
            if predicted is not None and layer:
                likely = np.unique(predicted[:, layer, : most_predicted(used)]).tolist()
                reads = residents.place(row, likely, kept if self.places[layer - 1][0] is residents else ())
                self._ahead[layer] |= dict(reads).keys()
                late = max(0.0, self.costs.miss * len(reads) - free)
            wanted = np.unique(chosen[:, layer]).tolist()
            residents.use(row, wanted)
            missing = dict(residents.place(row, wanted, self._kept(residents)) + residents.place(row, wanted)).keys()
            kept, ahead, size = residents.slots_of(row)[wanted].tolist(), self._ahead[layer], self.sizes[layer]
            free = (self.costs.fixed + self.costs.row * rows) / layers + self.costs.expert * len(wanted)
            found += Figures(
                experts=len(wanted),
                read=(len(missing) + len(ahead)) * size,
                ahead=len(ahead) * size,
                used=len(ahead.intersection(wanted) - missing) * size,
                computing=free,
                waiting=late + self.costs.miss * len(missing),
            )
            self._ahead[layer] = set()
        return found


# Of a tree and its nodes' experts: nodes to verify, and seconds of drafting.
Policy: TypeAlias = Callable[[Decoding, DraftTree, Experts], tuple[Nodes, float]]
# Seconds of passes over the root and the first 0 to all of some nodes.
Seconds: TypeAlias = Callable[[Nodes], FloatArray]


def plain(now: Decoding, tree: DraftTree, chosen: Experts) -> tuple[Nodes, float]:
    return NO_NODES, 0.0


def best(count: int, leaves: int) -> Policy:
    """A tree of so many nodes; with one leaf a chain."""

    def policy(now: Decoding, tree: DraftTree, chosen: Experts) -> tuple[Nodes, float]:
        nodes = ranked(tree.parents, tree.log_probs, count, leaves)
        return nodes, now.costs.draft * float(tree.depth[nodes].max(initial=0))

    return policy


def by_rows(now: Decoding, tree: DraftTree, chosen: Experts) -> Seconds:
    each = now.costs.expert + now.found.waiting / max(1, now.found.experts)

    def seconds(nodes: Nodes) -> FloatArray:
        rows = np.arange(1, len(nodes) + 2)
        experts = chosen.shape[1] * distinct(rows, now.count, chosen.shape[2])
        found: FloatArray = now.costs.fixed + now.costs.row * rows + each * experts
        return found

    return seconds


def by_table(now: Decoding, tree: DraftTree, chosen: Experts) -> Seconds:
    """A token that was not seen chooses what passes usually use."""
    usual = (1 - FADING) * np.stack([residents.scores[row] for residents, row in now.places])
    wanted = np.repeat(np.minimum(usual, 1)[None], len(tree), axis=0)
    for node, token in enumerate(tree.token_ids.tolist()):
        if token in now.table:
            wanted[node] *= 1 - AGAIN
            np.put_along_axis(wanted[node], now.table[token].astype(np.intp), AGAIN, axis=1)
    return partial(by_wanted, now, wanted)


def by_experts(now: Decoding, tree: DraftTree, chosen: Experts) -> Seconds:
    wanted = np.zeros((*chosen.shape[:2], now.count))
    np.put_along_axis(wanted, chosen.astype(np.intp), 1.0, axis=2)
    return partial(by_wanted, now, wanted)


def by_wanted(now: Decoding, wanted: FloatArray, nodes: Nodes) -> FloatArray:
    """`Seconds` by [nodes, layers, experts] the probability that a node chooses an expert."""
    absent = np.stack([residents.slots_of(row) < 0 for residents, row in now.places])
    some = 1 - np.cumprod(1 - wanted[[0, *nodes]], axis=0)
    took = (some * (now.costs.expert + now.costs.miss * absent)).sum(axis=(1, 2))
    found: FloatArray = now.costs.fixed + now.costs.row * np.arange(1, len(nodes) + 2) + took
    return found


def drafted(by: Callable[[Decoding, DraftTree, Experts], Seconds]) -> Policy:
    """A draft that reads nodes as long as that pays, as `SpecExecPlanner` does."""

    def policy(now: Decoding, tree: DraftTree, chosen: Experts) -> tuple[Nodes, float]:
        seconds, spent, read = by(now, tree, chosen), now.costs.draft, {0}
        draft = Curve(np.ones(1), np.full(1, spent), FURTHER * spent)
        while True:
            known = [node for node in range(1, len(tree)) if int(tree.parents[node]) in read]
            nodes = np.array(sorted(known, key=lambda node: -tree.log_probs[node])[:BUDGET], np.intp)
            took, values = seconds(nodes), tree.log_probs[nodes]
            cost = Curve(np.arange(1.0, len(took) + 1), took, float(np.ptp(took)) / max(1, len(nodes)))
            unread = [node for node in nodes.tolist() if node not in read]
            more = worth_reading(values, tree.log_probs[unread], BUDGET, spent, cost, draft, LIKELY_CHILD)
            if not more:
                return nodes[: int(np.argmax(goodput(values, spent, cost)))], spent
            read |= {*unread[:more]}
            spent += float(draft.seconds(more))

    return policy


def oracle_of_costs(now: Decoding, tree: DraftTree, chosen: Experts) -> tuple[Nodes, float]:
    """The part of the whole tree that pays best: what is drafted in vain takes no time."""
    nodes = ranked(tree.parents, tree.log_probs, len(tree), len(tree))
    drafting = now.costs.draft * np.maximum.accumulate(tree.depth[[0, *nodes]])
    rates = np.cumsum(np.exp(tree.log_probs[[0, *nodes]])) / (drafting + by_experts(now, tree, chosen)(nodes))
    kept = int(np.argmax(rates))
    return nodes[:kept], float(drafting[kept])


@dataclass(frozen=True)
class Way:
    """
    Attributes:
        ahead: what is read ahead. "table": what the tree's tokens chose when they were seen last, while the draft
            works. "next layer": what its router predicts, while the target computes a layer.
        drafts: the draft takes memory from the pools.
    """

    policy: Policy
    ahead: str = ""
    drafts: bool = True


WAYS = {
    "plain": Way(plain, drafts=False),
    "plain, next layer ahead": Way(plain, "next layer", drafts=False),
    **{f"chain of {count}": Way(best(count, 1)) for count in (1, 2, 4, 8)},
    **{f"tree of {count}": Way(best(count, count)) for count in (2, 4, 8)},
    "tree by rows": Way(drafted(by_rows)),
    "tree by rows, next layer ahead": Way(drafted(by_rows), "next layer"),
    "tree by rows, table ahead": Way(drafted(by_rows), "table"),
    "tree by table": Way(drafted(by_table)),
    "tree by table, table ahead": Way(drafted(by_table), "table"),
    "tree by experts": Way(drafted(by_experts)),
    "oracle of costs": Way(oracle_of_costs),
}
# All tokens of a route trace are one, so the table has what the last pass chose; the draft's pass proposes nothing.
ROUTES = {
    "plain": WAYS["plain"],
    "last pass's ahead": Way(lambda now, *_: (NO_NODES, now.costs.draft), "table", False),
}
ORACLES = {"oracle": False, "oracle, reads hidden": True}


def oracle_beside(name: str) -> str:
    """The oracle that a policy is compared with: where it reads ahead, the one whose reads delay nothing else."""
    return name if name in ORACLES else list(ORACLES)[bool(WAYS[name].ahead)]


def replay(text: Text, way: Way, now: Decoding) -> Figures:
    now.prompt(text.prompt)
    now.table |= zip(text.ids.tolist(), text.prompt, strict=False)
    at = 0
    while at < len(text.steps):
        tree, chosen, predicted = text.steps[at]
        nodes, drafting = way.policy(now, tree, chosen)
        rows, path = [0, *nodes.tolist()], text.accepted(at, nodes.tolist())
        tokens = tree.token_ids[rows].tolist()
        if way.ahead == "table":
            now.read_ahead([now.table[token] for token in tokens if token in now.table], int(drafting / now.costs.miss))
        now.found += now.passed(chosen[rows], predicted[rows] if way.ahead == "next layer" else None)
        now.found += Figures(tokens=len(path), drafting=drafting)
        now.table |= zip(tokens, chosen[rows], strict=True)
        at += len(path)
    return now.found


def oracle(text: Text, now: Decoding, *, hidden: bool = False) -> Figures:
    """The fastest way found to each token, by passes over accepted nodes alone.

    Args:
        text: any.
        now: its begin.
        hidden: experts are read while the pass computes and the draft works, and only what takes longer counts.
    """
    now.prompt(text.prompt)
    ways = {0: now}
    for at, (_, chosen, _) in enumerate(text.steps):
        path = text.accepted(at, range(len(chosen)))
        for count in range(1, len(path) + 1):
            then = deepcopy(ways[at])
            step = then.passed(chosen[path[:count]]) + Figures(tokens=count, drafting=now.costs.draft * (count - 1))
            if hidden:
                step = replace(step, waiting=max(0.0, step.waiting - step.computing - step.drafting))
            then.found += step
            if at + count not in ways or then.found.seconds < ways[at + count].found.seconds:
                ways[at + count] = then
    return ways[len(text.steps)].found


def replays(
    trace: Trace, memory: int, draft: int, costs: Costs, progress: Callable[[int, int], None]
) -> dict[str, Figures]:
    """Figures of all texts by policy; the oracle takes another policy's way where its own search found no faster one.

    Args:
        trace: any; of routes without a draft, `ROUTES` are replayed.
        memory: bytes of pools.
        draft: bytes of them that a draft takes.
        costs: of steps.
        progress: called with texts done, and in all.
    """
    can_predict = all(text.predicted.size for text in trace.texts)
    ways = (
        {name: way for name, way in WAYS.items() if can_predict or way.ahead != "next layer"} if trace.draft else ROUTES
    )
    total = dict[str, Figures]()
    for number, text in enumerate(trace.texts, 1):
        found = {
            name: replay(text, way, Decoding(trace, memory - draft * way.drafts, costs)) for name, way in ways.items()
        }
        for name, hidden in ORACLES.items() if trace.draft else ():
            own = oracle(text, Decoding(trace, memory - draft, costs), hidden=hidden)
            others = [found[other] for other, way in ways.items() if hidden or not way.ahead]
            found[name] = min(own, *others, key=lambda one: one.seconds)
        total = {name: total.get(name, Figures()) + figures for name, figures in found.items()}
        progress(number, len(trace.texts))
    return total
