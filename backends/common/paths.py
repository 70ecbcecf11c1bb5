"""Trees as paths, for models with recurrent layers: branches cannot share a layer's single state.

    states      8        20
    tokens      ·········[unread][root]─a─b          one path, from a copy of the last state, 20
                         [unread][root]─a─c          another: unread tokens, root and a are computed again
                ·[as many tokens    ]                the state lane, from state 8: it makes a state before the root

Unread are the committed tokens after the last state. All sequences of a pass have one length, so that it reads the
weights once: shorter paths are padded, and the state lane begins as far back as they are long. Without it, unread
tokens become more, until a pass of their own reads them.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from edgespec.loop.tree import path_to

MOST_PATHS = 8  # of a pass
KEPT_STATES = 4  # of a session
MOST_UNREAD = 16  # unread tokens that paths begin with; more get a pass of their own
MOST_UNREAD_IN_MEMORY = 4  # the same, where passes do not read weights from a disk
SHARE = 1 / 8  # part of the weights' bytes that states may take
LEAST_STATE_BYTES = 512 << 20  # bytes that states may take in any case
MOST_MARKED = 1  # kept states at the ends of prompts
LEAST_DISTANCE = 8  # tokens between two states, so that a state lane can begin at the older one
CHEAP = 63  # rows that cost little: a pass with a state lane has at most these, or twice its rows without it

State = TypeVar("State")


@dataclass(frozen=True, slots=True)
class Path:
    """
    Attributes:
        start: the node from whose state it begins; -1: the last state of committed tokens, so unread tokens come first.
        nodes: nodes to evaluate, from the top down.
    """

    start: int
    nodes: list[int]


def paths_of(parents: Sequence[int], first: int, tips: Collection[int] = ()) -> list[Path]:
    """
    Args:
        parents: of all nodes of a session, those evaluated before included.
        first: number of the first new node.
        tips: nodes after which there is a state.

    Returns:
        The path to each leaf among the new nodes, in depth-first order.
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
    """
    Args:
        state: bytes of a state.
        weights: bytes of the weights.
        most: most states.

    Returns:
        Number of states to keep.
    """
    return min(most, max(LEAST_STATE_BYTES, int(SHARE * weights)) // state) if state else most


def state_lane_from(states: Collection[int], length: int, paths: int, tokens: int, most: int) -> int | None:
    """
    Args:
        states: number of tokens before each state.
        length: number of committed tokens, after which the state lane ends.
        paths: number of paths in the same pass.
        tokens: tokens of each path, and least tokens of the state lane.
        most: most rows of the pass.

    Returns:
        Number of tokens before the state where the shortest possible state lane begins; None: there is none.
    """
    room = min(most, max(CHEAP, 2 * paths * tokens)) // (paths + 1)
    return max((at for at in states if tokens <= length - at <= room), default=None)


class States(Generic[State]):
    """States that a session keeps, by the number of committed tokens before them, at least 1."""

    def __init__(self, room: int) -> None:
        self.kept: dict[int, State] = {}
        self._room = room
        self._marked = set[int]()

    @property
    def last(self) -> int:
        return max(self.kept, default=0)

    def before(self, length: int) -> int:
        return max((at for at in self.kept if at <= length), default=0)

    def mark(self, at: int) -> None:
        """Keep the state at the end of a prompt, which other prompts may begin with."""
        self._marked |= {at} & self.kept.keys()

    def add(self, at: int, state: State) -> list[State]:
        """Keep a state.

        Returns:
            States that are no longer kept, for the engine to free.
        """
        dropped = [self.kept.pop(at)] if at in self.kept else []
        if len(self.kept) == self._room:
            dropped.append(self._drop(self._superfluous()))
        self.kept[at] = state
        return dropped

    def cut(self, length: int) -> list[State]:
        return [self._drop(at) for at in sorted(self.kept) if at > length]

    def copy(self) -> "States[State]":
        other = States[State](self._room)
        other.kept, other._marked = self.kept.copy(), self._marked.copy()
        return other

    def _drop(self, at: int) -> State:
        self._marked.discard(at)
        return self.kept.pop(at)

    def _superfluous(self) -> int:
        """The state to drop, never the last.

        The oldest marked one, if more than MOST_MARKED are marked or no other is left. Else the oldest unmarked one, if
        the next unmarked one is LEAST_DISTANCE tokens or more before the last. Else the newest unmarked one.
        """
        *older, last = sorted(self.kept)
        marked = [at for at in older if at in self._marked]
        loose = [at for at in older if at not in self._marked]
        if len(marked) > MOST_MARKED or not loose:
            return marked[0]
        return loose[0] if len(loose) > 1 and last - loose[1] >= LEAST_DISTANCE else loose[-1]
