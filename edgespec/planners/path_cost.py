"""Trees as paths, for models with recurrent layers.

A recurrent layer has one state for all the text before, so branches of a tree cannot share it as they share keys and
values. But it can be copied. An engine of such a model evaluates a tree path by path: each is a sequence of its own
that starts from a copy of the last state there is. Nodes on several paths are computed as often.

After verification there is no state behind the last accepted token, unless a path ended there. The tokens behind the
last state are unread: every path of the next pass begins with them.

    states    8        20
    text      ·········[unread][root]─a─b          one path: it starts at 20
                       [unread][root]─a─c          another: unread tokens, root and a are computed again
              ·[as many tokens, no draft]          the step: it starts at 8 and ends with the text

So that a pass takes the weights once, all its sequences have one length: a path that is shorter goes on behind its leaf
with anything. The step is what brings the state on: it needs a state as far behind the last one as the tree is deep.
Where there is none, or no room, unread tokens become more, until a pass of their own reads them.

Backends use what stands here to find paths and steps; `cost.py` and the planners, what trees as paths cost.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from edgespec.loop.pass_times import Curve
from edgespec.loop.tree import DraftTree, FloatArray, depths, is_leaf, path_to, ranked
from edgespec.planners.cost import best_size

MOST_PATHS = 8  # of a pass
KEPT_STATES = 4  # of a session's text
MOST_OWED = 16  # tokens, from which on they get a pass of their own, if there is no step …
MOST_OWED_IN_MEMORY = 4  # … and where that does not read weights from a disk
SHARE = 1 / 8  # states may take this part of the weights' bytes,
ALWAYS = 512 << 20  # and this many bytes in any case
MOST_MARKED = 1  # states at the ends of prompts, besides the last one
USUAL_DEPTH = 8  # of a tree: so many tokens before the last state, steps should be able to begin
CHEAP = 63  # rows that a pass may have for a step, or twice what it has without: they are computed for nothing

State = TypeVar("State")  # whatever an engine knows it by


@dataclass(frozen=True, slots=True)
class Path:
    """One sequence of a pass."""

    start: int  # the node whose state it goes on from; -1: the text's last state, so owed tokens come first
    nodes: list[int]  # to evaluate, from the top down


def paths_of(parents: Sequence[int], first: int, tips: Collection[int] = ()) -> list[Path]:
    """A path for every leaf among the nodes from `first` on, that of the first leaf in depth-first order first.

    Args:
        parents: of all nodes of a session, those evaluated before included.
        first: number of the first new node.
        tips: nodes behind which there is a state.
    """
    inner = set(parents)
    found = []
    for leaf in range(first, len(parents)):
        if leaf not in inner:
            nodes = path_to(parents, leaf)
            start = max((i for i, node in enumerate(nodes) if node in tips), default=-1)
            found.append(Path(nodes[start] if start >= 0 else -1, nodes[start + 1 :]))
    return sorted(found, key=lambda path: path.nodes)


def states_within(state: int, weights: int, most: int) -> int:
    """Number of states that may be kept: at most `most`, of `state` bytes each, by the bytes of the weights."""
    return min(most, max(ALWAYS, int(SHARE * weights)) // state) if state else most


def step_from(states: Collection[int], length: int, paths: int, tokens: int, most: int) -> int | None:
    """Where a step begins that has as few tokens as may be, but as many as the paths; None: nowhere.

    Args:
        states: numbers of tokens before a state.
        length: tokens of the text, where the step ends.
        paths: that the pass has besides.
        tokens: of each.
        most: rows that the pass has room for.
    """
    room = min(most, max(CHEAP, 2 * paths * tokens)) // (paths + 1)
    return max((at for at in states if tokens <= length - at <= room), default=None)


class States(Generic[State]):
    """The states that a session keeps of its text, by the number of tokens before them; nothing is kept of 0 tokens."""

    def __init__(self, room: int) -> None:
        """
        Args:
            room: how many may be kept, at least 2.
        """
        self.kept: dict[int, State] = {}
        self._room = room
        self._marked = set[int]()

    @property
    def last(self) -> int:
        """Tokens before the last one."""
        return max(self.kept, default=0)

    def before(self, length: int) -> int:
        """Tokens before the last one that is not behind so many."""
        return max((at for at in self.kept if at <= length), default=0)

    def mark(self, at: int) -> None:
        """A prompt has ended here, so another may begin alike: keep this one, if it is there."""
        self._marked |= {at} & self.kept.keys()

    def add(self, at: int, state: State) -> list[State]:
        """Keep one more; those given up for it."""
        dropped = [self.kept.pop(at)] if at in self.kept else []
        if len(self.kept) == self._room:
            dropped.append(self._drop(self._superfluous()))
        self.kept[at] = state
        return dropped

    def cut(self, length: int) -> list[State]:
        """Give up those behind so many tokens."""
        return [self._drop(at) for at in sorted(self.kept) if at > length]

    def copy(self) -> "States[State]":
        """The same states, kept on their own."""
        other = States[State](self._room)
        other.kept, other._marked = self.kept.copy(), self._marked.copy()
        return other

    def _drop(self, at: int) -> State:
        self._marked.discard(at)
        return self.kept.pop(at)

    def _superfluous(self) -> int:
        *older, last = sorted(self.kept)
        marked = [at for at in older if at in self._marked]
        loose = [at for at in older if at not in self._marked]
        if len(marked) > MOST_MARKED or not loose:
            return marked[0]
        return loose[0] if len(loose) > 1 and last - loose[1] >= USUAL_DEPTH else loose[-1]


def note(most: int | None = None) -> str:
    """Note for users on a model with recurrent layers, whose trees have at most `most` paths."""
    limit = f", at most {most}" if most else ""
    return (
        f"some layers are recurrent: trees are evaluated path by path{limit}, so branches cost more "
        "(docs/guides/exactness.md)"
    )


def rows_of(parents: ArrayLike, head: int) -> int:
    """Rows of a pass over a tree as paths, each with `head` unread tokens at its beginning."""
    return int(np.count_nonzero(is_leaf(parents))) * (head + 1 + int(depths(parents).max()))


def rows_added(tree: DraftTree, nodes: NDArray[np.intp], head: int) -> FloatArray:
    """Rows that each of these nodes, best first, adds to a pass over those before it, as paths with such a head. [m]"""
    paths, depth = _growth(tree, nodes)
    return np.diff(paths * (head + 1 + depth), prepend=head + 1)


def _growth(tree: DraftTree, nodes: NDArray[np.integer]) -> tuple[FloatArray, NDArray[np.integer]]:
    """Paths and depth of a tree that has the root and the first 1, 2, … of these nodes."""
    _, at = np.unique(tree.parents[nodes], return_index=True)
    branches = np.ones(len(nodes))
    branches[at] = 0  # a first child goes on where its parent ended
    return 1 + np.cumsum(branches), np.maximum.accumulate(tree.depth[nodes])


def best_part(
    tree: DraftTree,
    spent: float,
    cost: Curve,
    *,
    budget: int,
    max_leaves: int,
    head: int | None = None,
    trust: float = 1.0,
) -> tuple[NDArray[np.intp], float]:
    """The nodes that make the best step, best first, and the step's predicted tokens per second.

    Args:
        tree: any.
        spent: seconds of drafting.
        cost: the target's pass times.
        budget: most nodes besides the root.
        max_leaves: most leaves.
        head: of trees as paths, committed tokens that each path begins with; None: nodes are computed once.
        trust: accepted draft tokens for each that the tree's probabilities promise.
    """
    if head is None:
        nodes = ranked(tree.parents, tree.log_probs, budget, max_leaves)
        size, rate = best_size(tree.log_probs[nodes], spent, cost, trust)
        return nodes[:size], rate
    best, chosen = 1 / (spent + float(cost.seconds(head + 1))), np.zeros(0, np.intp)
    for leaves in range(1, min(max_leaves, int(np.count_nonzero(is_leaf(tree.parents)))) + 1):
        nodes = ranked(tree.parents, tree.log_probs, budget, leaves)
        if len(nodes) == 0:
            break
        paths, depth = _growth(tree, nodes)
        tokens = 1 + trust * np.cumsum(np.exp(tree.log_probs[nodes]))
        # What such a step commits is unread, and read again by the next one.
        rates = tokens / (spent + cost.seconds(paths * (head + 1 + depth) + tokens))
        if rates.max() > best:
            best, chosen = float(rates.max()), nodes[: int(np.argmax(rates)) + 1]
    return chosen, best
