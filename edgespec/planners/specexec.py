"""SpecExec: the K most probable continuations under a draft model, as one tree.

Algorithm 2 of "SpecExec: Massively Parallel Speculative Decoding for Interactive LLM Inference on
Consumer Devices" (arXiv 2406.02532), a parallel single-source shortest path search. A node's distance
is its cumulative -log q. Each step expands the nearest `beam` nodes in one draft pass; the search
ends after `depth` steps, or when no node is left whose best child is likely to come into the K nearest; or, where costs
are known, when reading on would take more time than it can gain (`cost.py`).

Ours on top: coupling. The noise of future positions is known before drafting, since it belongs to
the position (`sampling.py`). So the draft is asked what the target will *sample*:

    q = softmax((z + T * gumbel(seed, position)) / tau)

where tau, in logits, says how far draft and target usually disagree. At T = 0 the noise is gone,
and one formula serves every temperature. The text does not change; the guesses become better.

And the search is not begun anew in each round, but goes on below what the target wrote (`search.py`).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from time import perf_counter
from typing import ClassVar

import numpy as np

from edgespec.loop.backend import Backend, Session
from edgespec.loop.draft_passes import DraftSteps, run_one
from edgespec.loop.pass_times import PassTimes
from edgespec.loop.planner import Context
from edgespec.loop.sampling import IdArray
from edgespec.loop.tree import DraftTree, choose, root_only, select
from edgespec.planners.ahead import Worker
from edgespec.planners.cost import worth_reading
from edgespec.planners.drafting import Drafter, Guess
from edgespec.planners.search import COMMITTED, ENOUGH, KEEP, NOT_READ, Search

UNLIKELY = 0.001  # nodes less probable are not read ahead
CATCH_UP = 64  # tokens of the text that are read at once, before looking ahead, where the draft was not asked for long


class SpecExecPlanner:
    """Best-first trees from a draft model."""

    name = "specexec"
    plain_seconds = 0.0
    children: ClassVar[int] = 32  # of a node that are considered
    enough: ClassVar[float] = ENOUGH  # tokens that reading a node must be likely to add
    usual_depth: ClassVar[int] = 32

    def __init__(
        self,
        draft: Backend,
        *,
        depth: int | None = None,
        beam: int = 16,
        tau: float | None = None,
        coupling: bool = True,
        cost: PassTimes | None = None,
        keep: int = KEEP,
        texts: int = 1,
        ahead: bool = False,
        top_up: bool = True,
        forks: int = 0,
        nice: bool = True,
    ) -> None:
        """
        Args:
            draft: a loaded draft model with the target's vocabulary.
            depth: most draft passes per tree, so also the deepest node; default: `usual_depth`.
            beam: most nodes expanded per draft pass.
            tau: usual disagreement of draft and target, in logits; default: 0.7 when greedy, 1.3 when sampling.
            coupling: draft with the target's own noise; without it q = softmax(z / T).
            cost: where the draft's passes are counted; default: known to this planner alone.
            keep: nodes that are known, sent or not, from which the next round's search may go on; 0: it begins anew.
            texts: that may be written at once, with sessions of this draft.
            ahead: the search goes on while the target works, in a thread of its own.
            top_up: add to what it has found meanwhile before it is sent; without, the target starts at once, with
                nothing where nothing was found (pre-verify and post-verify of PEARL, arXiv 2408.11850).
            forks: most children of the likeliest path's least sure node that are read first meanwhile, the fewer the
                surer it is (the branches of SpecBranch, arXiv 2506.01979).
            nice: that thread gives way to others: target and draft share processors.
        """
        self.depth = depth or self.usual_depth
        self.tau = tau
        self.coupling = coupling
        self.went_on = 0  # rounds since `begin` whose search went on in the next
        self._limits = draft.capabilities
        self._beam = min(beam, self._limits.max_wanted)
        self._keep, self._texts = keep, texts
        self._drafter = Drafter(draft, cost)
        self._search: Search | None = None  # whose root is the end of the text
        self.ahead, self._top_up, self._forks = ahead, top_up, forks
        self._worker = Worker(draft.interrupt, nice=nice)
        self._context: Context | None = None  # of the last plan
        self._went_ahead = False  # in this round
        self._reading = list[int]()  # nodes of the pass under way
        self._usual = -np.inf  # the K-th best log-probability of the last search: this one's will be much alike

    @property
    def draft_session(self) -> Session:
        """See `Drafts`."""
        return self._drafter.session

    @property
    def company(self) -> float:
        """How many texts share the draft's passes, on an average."""
        return self._drafter.company

    @property
    def model_seconds(self) -> float:
        """Time spent in draft passes since `begin`."""
        return self._drafter.seconds

    @property
    def hidden_seconds(self) -> float:
        """Time since `begin` of draft passes beside which the target worked: not in `model_seconds`."""
        return self._drafter.hidden

    @property
    def model_passes(self) -> int:
        """Draft passes since `begin`."""
        return self._drafter.passes

    def begin(self, prompt_ids: Sequence[int], read: bool = True) -> None:
        """Read the prompt with the draft model, now or when it is first asked."""
        self.accept([], 0.0)
        self._went_ahead, self.went_on = False, 0
        self._drafter.begin(prompt_ids, read)

    def behind(self, token_ids: Sequence[int]) -> int:
        """How many of the text's tokens the draft has not read."""
        return self._drafter.behind(token_ids)

    def plan(self, context: Context, budget: int) -> DraftTree:
        """Algorithm 2, from what is known."""
        return run_one(self.planning(context, budget))

    def planning(self, context: Context, budget: int) -> DraftSteps[DraftTree]:
        """The steps of `plan`."""
        steps = min(self.depth, self._drafter.room(context))
        if steps <= 0 or budget <= 0:
            return root_only(context.token_ids[-1])
        search, self._search = self._search, None  # unless all goes well
        if search is None or self._drafter.behind(context.token_ids):
            search = Search(context.token_ids[-1], budget, self._keep)
        search.budget, search.usual, search.most_depth = budget, self._usual, steps
        guess, started = Guess(context, self.tau, self.coupling), self.model_seconds
        at_once, self._context, self._went_ahead = self._went_ahead and not self._top_up, context, False
        if search.place[0] == NOT_READ and not at_once:
            yield from self._read_root(search, guess, context)
        for _ in range(1, 1 if at_once else steps):
            unread, beam = search.unread(self.enough), self._beam if self.children > 1 else 1
            if context.cost and (cost := self._drafter.cost):
                next_best, spent = search.log_probs[unread[:beam]], self.model_seconds - started
                child = search.child if self.children > 1 else 1.0
                beam = worth_reading(search.best(), next_best, budget, spent, context.cost, cost, child)
            batch = search.take(unread, beam, self._limits.leaves(context.texts), self._limits.max_nodes)
            if len(batch) == 0:
                break
            yield from self._read(search, guess, batch)
        self._search, self._usual = search, search.cutoff(budget)
        found = search.found()
        return select(found, choose(found.parents, found.log_probs, budget, context.max_leaves))

    def _read_root(self, search: Search, guess: Guess, context: Context) -> DraftSteps[None]:
        """Read what the draft lacks of the text."""
        with self._worker.passing():
            logits, node = yield from self._drafter.reading(context.token_ids)
        children = guess.children(logits, [node], [0], self._children(search))
        with self._worker.lock:
            search.add_children(np.array([0]), [COMMITTED], *children)

    def _read(self, search: Search, guess: Guess, batch: IdArray) -> DraftSteps[None]:
        """One draft pass over nodes of the search."""
        self._reading = batch.tolist()
        with self._worker.passing():
            above = search.place[search.parents[batch]]
            logits, nodes = yield from self._drafter.evaluating(search.token_ids[batch], above)
        children = guess.children(logits, nodes.tolist(), search.depth[batch].tolist(), self._children(search))
        with self._worker.lock:
            search.add_children(batch, nodes, *children)

    def _children(self, search: Search) -> int:
        return min(self.children, max(search.budget, search.keep))

    @contextmanager
    def beside(self, nodes: int) -> Iterator[None]:
        """Within it the target judges the tree, of so many nodes: the search goes on, if it may."""
        search, context = self._search, self._context
        if not self.ahead or search is None or context is None:
            yield
            return
        self._went_ahead = True
        due = perf_counter() + float(context.cost.seconds(nodes)) if context.cost else np.inf
        try:
            with self._worker.doing(partial(self._go_on, search, context, due)):
                yield
        except BaseException:
            self.accept([], 0.0)
            raise

    def _go_on(self, search: Search, context: Context, due: float) -> None:
        """Read the likeliest nodes, in the tree or not, until one more pass would outlast the target's."""
        guess, depth = Guess(context, self.tau, self.coupling), min(2 * self.depth, self._drafter.room(context))
        leaves, beam = self._limits.leaves(context.texts), self._beam if self.children > 1 else 1
        self._drafter.beside = True
        try:
            if search.place[0] == NOT_READ:
                run_one(self._read_root(search, guess, context))
            forks = search.forks(self._forks, depth) if self._forks else None
            while not self._worker.stopped.is_set() and perf_counter() + self._drafter.last < due:
                nodes = search.likeliest(depth, UNLIKELY) if forks is None else forks
                batch = search.take(nodes, beam, leaves, self._limits.max_nodes)
                if len(batch):
                    run_one(self._read(search, guess, batch))
                elif forks is None:
                    return
                forks = None
        finally:
            self._drafter.beside = False

    def _is_lost(self, search: Search, tokens: Sequence[int]) -> bool:
        """Whether what goes on beside the target is of no use, since the text goes on elsewhere."""
        with self._worker.lock:
            path = search.follow(tokens)
            if tokens and search.place[0] == NOT_READ:  # it is catching up with the text
                return False
            if not tokens or len(path) < len(tokens):
                return True
            return bool(search.place[path[-1]] == NOT_READ) and path[-1] not in self._reading

    def accept(self, tokens: Sequence[int], seconds: float) -> None:
        """Commit what the draft has read of the target's text, and keep what it knows of how that goes on."""
        search, self._search = self._search, None
        late = False
        if self._worker.busy:
            if self._worker.join(lost=search is None or self._is_lost(search, tokens)):
                self._drafter.evaluated = 0
                return
            late = self._worker.late
        if search is None:
            if late:
                self._drafter.settle()
            return
        path = search.follow(tokens)
        places = search.place[path]
        read = len(path) if (places != NOT_READ).all() else int(np.argmax(places == NOT_READ))
        goes_on = 0 < read == len(tokens) and self._keep > 0 and not late
        kept = self._drafter.commit(places[:read].tolist(), below=goes_on)
        if late:
            self._drafter.settle()
        if goes_on:
            new = search.rerooted(path[-1], kept)
            if new and new.leaves <= self._limits.leaves(self._texts):  # others need theirs between our rounds
                self._search = new
                self.went_on += 1
            elif kept:
                self._drafter.commit([])

    def foresee(self, context: Context, count: int, seconds: float) -> list[int]:
        """The likeliest next tokens, one draft pass each; fewer where so many seconds are over.

        None where it has to catch up first. Between rounds only.
        """
        self._search = None
        tokens, until = list[int](), perf_counter() + seconds
        certain = len(context.token_ids) - context.foreseen
        if (behind := self._drafter.behind(context.token_ids[:certain])) > CATCH_UP:
            self._drafter.read(context.token_ids[: certain - behind + CATCH_UP])
            return tokens
        guess, room = Guess(context, self.tau, self.coupling), min(count, self._drafter.room(context))
        if room <= 0:
            return tokens
        with self._drafter.aside(certain - 1):
            logits, node = self._drafter.read(context.token_ids)
            above = COMMITTED
            while True:
                ids, _ = guess.children(logits, [node], [len(tokens)], 1)
                tokens.append(int(ids[0][0]))
                if len(tokens) == room or perf_counter() > until:
                    return tokens
                logits, nodes = self._drafter.evaluate(np.array(tokens[-1:]), np.array([above]))
                node = above = int(nodes[0])

    def close(self) -> None:
        """Free the draft's session."""
        self._search = None
        self._worker.close()
        if self._worker.late:
            self._drafter.settle()
        self._drafter.close()
