"""Passes that take given times. `Run`: a target and its ways of drafting, without a model. `Timed`: a small real model.

The planner is the real `AutoPlanner` with its ledger. Seconds are numbers that `Run` and `Clock` add up.
"""

import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from math import exp, log
from types import SimpleNamespace

import numpy as np
from edgespec.backends.common.paths import MOST_UNREAD_IN_MEMORY
from reference.backend import ReferenceBackend

from edgespec.loading.timed_pass import TIMED
from edgespec.loop.draft_passes import run_one
from edgespec.loop.passes import rows_of
from edgespec.loop.planner import Context, Planner, PlannerStats
from edgespec.loop.sampling import SamplingParams
from edgespec.loop.step import step_of
from edgespec.loop.tree import Proposal, make_tree, only
from edgespec.planners.auto import AutoPlanner, AutoState, Candidate, Drafting, new_auto_state
from edgespec.planners.cost import worth_reading
from edgespec.planners.ledger import Accounts

BUDGET, DEPTH = 64, 16
GREEDY = SamplingParams()  # made once, as making it checks it
SLOW_PASSES, SLOW = 5, 4.0  # the first passes of a program, and how many times as long they take
READING = 0.25  # draft passes that the draft takes to read a token
LEARNED = (1, 2, 6, 12, 40)  # nodes of the passes that are remembered

Cost = Callable[[int], float]  # seconds of a pass by number of nodes
COSTS: dict[str, Cost] = {
    "steep": lambda nodes: 0.0096 + 0.0139 * (nodes - 1),
    "rising": lambda nodes: 0.07 + 0.02 * (nodes - 1),
    "step": lambda nodes: 0.04 if nodes == 1 else 0.05 if nodes < 8 else 0.1 + 0.002 * (nodes - 8),
    "flat": lambda nodes: 1.0 + 0.002 * (nodes - 1),
}
# Plain passes that 1 to 8 rows take on an M4 Pro: 2, 4 and 8 as in ggml-org/llama.cpp issues #25250 and #25377, others
# between them. 16 rows take as long as 32 (issue #27441); that these are 3.7 plain passes is assumed.
ROWS = (1.0, 1.81, 2.8, 3.8, 4.7, 5.6, 6.5, 7.4)
TILE_OF_ROWS, PASSES = 32, 3.7


def tiles(rows: int) -> float:
    """Seconds of a pass that computes tiles of rows."""
    return 0.05 * (ROWS[rows - 1] if rows <= len(ROWS) else PASSES * -(-rows // TILE_OF_ROWS))


class Session:
    def __init__(self) -> None:
        self.token_ids = list[int]()


class Chain(Planner):
    """Proposes a chain of tokens, each of which it takes for as probable as `claimed`."""

    depth = DEPTH

    def __init__(self, run: "Run", claimed: float, *, drafts: bool) -> None:
        self.name = "draft" if drafts else "copies"
        self.run, self.claimed = run, claimed
        self.session = Session() if drafts else None
        self.seconds = 0.0

    @property
    def stats(self) -> PlannerStats:
        return PlannerStats(draft_seconds=self.seconds)

    @property
    def draft_session(self):
        return self.session

    def begin(self, prompt_ids):
        if self.session:
            self.session.token_ids = []

    def unread(self, token_ids):
        if self.session and len(token_ids) > 1 + len(self.session.token_ids):
            return SimpleNamespace(session=self.session, token_ids=token_ids[len(self.session.token_ids) : -1])
        return None

    def propose(self, context, budget):
        yield from ()
        values = np.cumsum(np.full(min(budget, self.depth), log(self.claimed)))
        if self.session:
            values = values[: self._draft(context, values)]
        values = values[np.exp(values) >= context.least]
        return Proposal(make_tree([0] * (len(values) + 1), range(-1, len(values)), [0.0, *values]))

    def _draft(self, context, values):
        """As `SpecExecPlanner` does: as many tokens as pay."""
        unread = len(context.token_ids) - len(self.session.token_ids) - 1
        self.session.token_ids = list(context.token_ids)
        spent, times = READING * max(0, unread) * self.run.draft_pass, self.run.state.draft
        for done in range(len(values)):
            cost, found = times.at(0), values[:done]
            if done and context.pass_times and cost:
                worth = worth_reading(found, found[-1:], len(values), spent, context.pass_times, cost, self.claimed)
                if not worth:
                    break
            spent += self.run.draft_pass
            times.add(1, self.run.draft_pass)
        else:
            done = len(values)
        self.seconds += spent
        return done


@dataclass
class Run:
    """Sequences of one program, one after the other.

    Attributes:
        cost: of passes.
        agreement: probability that a draft token is right, by number of tokens so far.
        ways: of "copies" and "draft".
        claimed: what ways take this probability for.
        noise: standard deviation of a pass's logarithm, as the planner sees it.
        load: factor of all times, by number of tokens so far.
        slow: the first passes are slow.
        drafting: plain passes that a pass of the draft takes.
        tiled: as `Capabilities.tiled`; passes were timed before the first text.
        recurrent: paths begin with tokens that have no state, and more than `MOST_UNREAD_IN_MEMORY` take another pass.
        remembered: factors of what is remembered of plain and of larger passes; None: nothing is.
    """

    cost: Cost
    agreement: Callable[[int], float]
    ways: tuple[str, ...] = ("copies", "draft")
    claimed: float = 0.75
    noise: float = 0.0
    load: Callable[[int], float] = lambda tokens: 1.0
    slow: bool = False
    recurrent: bool = False
    remembered: tuple[float, float] | None = None
    drafting: float = 0.1
    tiled: bool = False
    seed: int = 0
    state: AutoState = field(init=False)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.passes = self.tokens = 0
        streams = self.cost(2) < 1.1 * self.cost(1)
        self.state = new_auto_state(streams, tiled=self.tiled)
        if self.tiled and not self.remembered:
            for nodes in TIMED:
                self.state.target.add(nodes, self.cost(nodes))
                self.state.draft.add(nodes, max(1.0, READING * nodes) * self.draft_pass)
        if self.remembered:
            rows = [[0, nodes, self.cost(nodes) * self.remembered[nodes > 1]] for nodes in LEARNED]
            self.state.target.recall(rows)
            self.state.ledger().recall(Accounts(plain=rows[0][2], distance=1, saved=0, accounts={}))
        made: dict[str, Candidate] = {
            "copies": Candidate(Chain(self, self.claimed, drafts=False), self.state),
            "draft": Drafting(Chain(self, self.claimed, drafts=True), self.state, eager=streams),
        }
        self.planner = AutoPlanner("auto", self.state, [made[way] for way in self.ways])

    @property
    def draft_pass(self) -> float:
        return self.drafting * self.cost(1) * self.load(self.tokens)

    def sequence(self, tokens: int) -> list[tuple[int, float, float]]:
        """Decode.

        Returns:
            After each step: tokens so far, seconds of the steps, and seconds of plain decoding.
        """
        ids, found, spent, plain = [0] * 20, list[tuple[int, float, float]](), 0.0, 0.0
        self.planner.begin(ids)
        behind, owes = 0, False
        while len(ids) < 20 + tokens:
            if reading := self.planner.unread(ids):
                spent += READING * len(reading.token_ids) * self.draft_pass
                reading.session.token_ids += reading.token_ids
            room = 20 + tokens - len(ids)
            head = behind if behind <= MOST_UNREAD_IN_MEMORY else 0
            context = Context(ids, 20, GREEDY, None, room - 1, 64, unread=head if self.recurrent else None, owes=owes)
            drafted = self.planner.stats.draft_seconds
            proposal = run_one(self.planner.propose(context, BUDGET))
            nodes = len(proposal.tree) if proposal.nodes is None else 1 + len(proposal.nodes)
            seconds = self.cost(head + nodes) + (self.cost(behind) if behind > head else 0.0)
            seconds *= self._factor(0)
            accepted = 0
            while accepted < min(nodes, room) - 1 and self.random.random() < self.agreement(self.tokens):
                accepted += 1
            owes = self.recurrent and accepted < nodes - 1
            behind = head + 1 + accepted if owes else 0
            spent += self.planner.stats.draft_seconds - drafted + seconds
            plain += sum(self.cost(1) * self._factor(i) for i in range(accepted + 1))
            ids += [0] * (accepted + 1)
            self.tokens, self.passes = self.tokens + accepted + 1, self.passes + 1
            self.planner.during(nodes)
            tree = proposal.tree if proposal.nodes is None else only(proposal.tree, proposal.nodes)
            rows = rows_of(tree.parents, head) if self.recurrent else nodes
            noisy = seconds * exp(self.random.gauss(0, self.noise))
            unsent = self.tiled and accepted == min(nodes, room) - 1  # what the draft thought there may be right, too
            last = 0 if unsent and self.random.random() < self.agreement(self.tokens) else 1
            self.planner.result(step_of([0] * accepted + [last], noisy, rows), None)
            found.append((len(ids) - 20, spent, plain))
        return found

    def _factor(self, further: int) -> float:
        slow = SLOW if self.slow and self.passes + further < SLOW_PASSES else 1.0
        return slow * self.load(self.tokens + further)


class Clock:
    """Seconds that only passes take."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        for name, module in list(sys.modules.items()):
            if name.startswith("edgespec.") and hasattr(module, "perf_counter"):
                monkeypatch.setattr(module, "perf_counter", lambda: self.now)


class Timed(ReferenceBackend):
    def __init__(self, model, clock, cost, **options):
        super().__init__(model, **options)
        self.clock, self.cost = clock, cost

    def forward(self, works):
        found = super().forward(works)
        self.clock.now += self.cost(sum(len(work.token_ids) for work in works))
        return found
