"""The draft's search goes on in a thread of its own while the target runs.

If it has read the accepted nodes and the bonus token, the next step goes on with the part of the tree below them.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from threading import Event, Lock
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from edgespec.errors import ContextFull, Interrupted
from edgespec.loop.backend import Backend, KeepsNodes
from edgespec.loop.draft_passes import DraftSteps, run_one
from edgespec.loop.pass_times import PassTimes
from edgespec.loop.planner import Context, PlannerStats
from edgespec.loop.sampling import IdArray, Scores
from edgespec.loop.tree import nodes_below, parents_among
from edgespec.machine.system import lower_priority
from edgespec.planners.chain import ChainPlanner
from edgespec.planners.drafting import ChildScores
from edgespec.planners.search import COMMITTED, NOT_READ, Search
from edgespec.planners.specexec import SpecExecPlanner

KNOWN = 512  # most nodes of a search, if the budget is not more
UNLIKELY = 0.001  # less probable nodes are not read ahead
QUICK = 0.0005  # seconds after which Python switches threads: the target's callbacks must not wait for the draft


_switching, _usual = Lock(), list[float]()  # the interval before; one entry for each target that runs


@contextmanager
def frequent_switches() -> Iterator[None]:
    """Let Python switch threads after `QUICK` seconds; targets that run at once may end in any order."""
    with _switching:
        _usual.append(_usual[0] if _usual else sys.getswitchinterval())
        sys.setswitchinterval(QUICK)
    try:
        yield
    finally:
        with _switching:
            interval = _usual.pop()
            if not _usual:
                sys.setswitchinterval(interval)


class DraftThread:
    """Runs one task at a time in a thread; `join` before the draft or its search is used.

    Attributes:
        stopped: the task is to end.
    """

    def __init__(self, draft: Backend, *, nice: bool = True) -> None:
        """
        Args:
            draft: whose passes the tasks make.
            nice: on Linux, the thread and those that it starts give way to others.
        """
        self.stopped = Event()
        self._draft, self._pass_number = draft, -1  # of the last pass of a task
        give_way = lower_priority if nice else None
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="edgespec ahead", initializer=give_way)
        self._task: Future[None] | None = None

    @contextmanager
    def doing(self, task: Callable[[], None]) -> Iterator[None]:
        """Run `task` within; at the end it is asked to stop, but not joined."""
        self.stopped.clear()
        with frequent_switches():
            try:
                self._task = self._executor.submit(task)
                yield
            finally:
                self.stopped.set()

    def pass_on(self, steps: DraftSteps[None]) -> None:
        """Make passes of a task, which `join` may interrupt."""

        def note(draft: Backend) -> None:
            self._pass_number = draft.pass_number

        run_one(steps, before=note)

    def join(self, *, lost: bool = False) -> bool:
        """Wait for the task's end, and raise its exception.

        Args:
            lost: its result is not needed, so a current pass may end early.

        Returns:
            True if a pass ended early, which leaves no nodes in the draft's session.
        """
        if self._task is None:
            return False
        self.stopped.set()
        if lost:
            self._draft.interrupt(self._pass_number)
        try:
            self._task.result()
        except Interrupted:
            return True
        finally:
            if self._task.done():  # Ctrl-C may come first
                self._task = None
        return False

    def close(self) -> None:
        try:
            self.join(lost=True)
        finally:
            self._executor.shutdown()


class AheadSearch(Search):
    def __init__(self, root_token: int, budget: int) -> None:
        super().__init__(root_token, budget)
        self.lock = Lock()

    @property
    def most_kept(self) -> int:
        return max(KNOWN, self.budget)

    def add_children(self, batch: IdArray, places: ArrayLike, ids: Sequence[IdArray], values: Sequence[Scores]) -> None:
        with self.lock:
            super().add_children(batch, places, ids, values)

    def likeliest(self, depth: int, least: float) -> NDArray[np.intp]:
        """Unread nodes above `depth` whose probability is at least `least`, most probable first."""
        nodes: NDArray[np.intp] = np.flatnonzero(self._open(depth) & (self.log_probs >= np.log(least)))
        return nodes[np.argsort(-self.log_probs[nodes], kind="stable")]

    def rerooted(self, node: int, kept: Sequence[int]) -> "AheadSearch | None":
        """
        Args:
            node: the new root, which was read and is committed now.
            kept: old places of nodes that stayed in the draft's session, in the order of their new places.

        Returns:
            The search below `node`; None: not all nodes below it have stayed.
        """
        part = [node, *nodes_below(self.parents.tolist(), node)]
        new_place = {place: i for i, place in enumerate(kept)} | {NOT_READ: NOT_READ}
        places = self.place[part[1:]].tolist()
        if not new_place.keys() >= set(places):
            return None
        other = AheadSearch(int(self.token_ids[node]), self.budget)
        other.usual, other.read = self.usual, len(kept)
        other.token_ids = self.token_ids[part]
        other.parents = np.array(parents_among(self.parents.tolist(), part), np.int64)
        other.log_probs = self.log_probs[part] - self.log_probs[node]
        other.depth = self.depth[part] - self.depth[node]
        other.place = np.array([COMMITTED, *(new_place[place] for place in places)])
        read = np.flatnonzero(other.place != NOT_READ)
        other._parents_read = set(other.parents[read[1:]].tolist())
        other.leaves = max(1, len(read) - len(other._parents_read))
        best_child = np.full(len(part), -np.inf)
        np.maximum.at(best_child, other.parents[1:], other.log_probs[1:])
        other._best_children += np.exp(best_child - other.log_probs)[np.isfinite(best_child)].tolist()
        return other


class AheadPlanner(SpecExecPlanner):
    _search: AheadSearch | None

    def __init__(self, draft: Backend, *, sequences: int = 1, nice: bool = True, **options: Any) -> None:
        """
        Args:
            draft: a loaded draft model with the target's vocabulary.
            sequences: number of sequences that are generated at once, with sessions of this draft.
            nice: the thread gives way to others, since target and draft share processors.
            options: of `SpecExecPlanner`.
        """
        super().__init__(draft, **options)
        self._went_on = 0
        self._hidden_seconds = 0.0
        self._sequences = sequences
        self._thread = DraftThread(draft, nice=nice)
        self._context: Context | None = None
        self._reading = list[int]()

    @property
    def stats(self) -> PlannerStats:
        return replace(super().stats, hidden_seconds=self._hidden_seconds, went_on=self._went_on)

    def begin(self, prompt_ids: Sequence[int]) -> None:
        self._went_on, self._hidden_seconds = 0, 0.0
        super().begin(prompt_ids)

    def _start_search(self, context: Context, budget: int) -> Search:
        search, self._context = self._search, context
        known = search is not None and len(self._drafter.session.token_ids) == len(context.token_ids)
        return search if search and known else AheadSearch(context.token_ids[-1], budget)

    def _read_root(self, search: Search, scores: ChildScores, context: Context) -> DraftSteps[None]:
        if search.place[0] == NOT_READ:
            yield from super()._read_root(search, scores, context)

    @contextmanager
    def during(self, nodes: int) -> Iterator[None]:
        search, context = self._search, self._context
        if search is None or context is None:
            yield
            return
        due = perf_counter() + float(context.pass_times.seconds(nodes)) if context.pass_times else np.inf
        try:
            with self._thread.doing(partial(self._go_on, search, context, due)):
                yield
        except BaseException:
            with suppress(Exception):  # an error of the draft does not replace the target's, or Ctrl-C
                self.give_up()
            raise

    def _go_on(self, search: AheadSearch, context: Context, due: float) -> None:
        """Read the most probable nodes until one more draft pass would last longer than the target's pass."""
        scores = ChildScores(context, self.tau, self.coupling)
        depth = min(2 * self.depth, self._drafter.most_depth(context))
        batches, self._reading = self._batches(search, depth, self._limits.leaves(context.sequences)), []
        drafter, before, cost = self._drafter, self._drafter.seconds, self._drafter.pass_cost
        drafter.pass_cost = PassTimes()  # passes take longer while the target runs, so they are not counted
        try:
            self._thread.pass_on(self._read_root(search, scores, context))
            while not self._thread.stopped.is_set() and perf_counter() + drafter.last < due:
                if (batch := next(batches, None)) is None:
                    return
                self._reading = batch.tolist()
                self._thread.pass_on(self._read(search, scores, batch))
        except ContextFull:  # what was read before stays
            self._reading = []
        finally:
            self._hidden_seconds += drafter.seconds - before
            drafter.seconds, drafter.pass_cost = before, cost

    def _batches(self, search: AheadSearch, depth: int, leaves: int) -> Iterator[IdArray]:
        """Yield nodes above `depth` for a draft pass each, as `Search.take` counts them."""
        while len(batch := self._take(search, search.likeliest(depth, UNLIKELY), leaves)):
            yield batch

    def _take(self, search: AheadSearch, nodes: NDArray[np.intp], leaves: int) -> IdArray:
        return search.take(nodes, self._beam, leaves, self._limits.max_nodes)

    def _is_lost(self, search: AheadSearch, tokens: Sequence[int]) -> bool:
        """True if the draft's pass cannot help the step after these tokens."""
        with search.lock:
            path = search.follow(tokens)
            if tokens and search.place[0] == NOT_READ:  # the draft is reading the sequence
                return False
            if not tokens or len(path) < len(tokens):
                return True
            return bool(search.place[path[-1]] == NOT_READ) and path[-1] not in self._reading

    def _advance(self, tokens: Sequence[int]) -> None:
        search, self._search = self._search, None
        if self._thread.join(lost=search is None or self._is_lost(search, tokens)):
            self._drafter.evaluated = 0
            return
        path = search.follow(tokens) if search else []
        places = search.places_along(path) if search else []
        if search and 0 < len(places) == len(tokens):
            kept = self._commit_keeping(places)
            self._drafter.evaluated = len(kept)
            new = search.rerooted(path[-1], kept)
            if new and new.leaves <= self._limits.leaves(self._sequences):  # others need their leaves between our steps
                self._search = new
                self._went_on += 1
            elif kept:
                self._drafter.commit([])
        elif search:
            self._drafter.commit(places)

    def _commit_keeping(self, places: list[int]) -> list[int]:
        session = self._drafter.session
        if isinstance(session, KeepsNodes):
            return [*map(int, session.commit_keeping(places))]
        session.commit(places)
        return []

    def close(self) -> None:
        self._thread.close()
        super().close()


class AheadChainPlanner(ChainPlanner, AheadPlanner): ...
