"""One sequence: propose a tree, evaluate it in one pass, verify, accept what the target would have sampled.

Only `verify.walk` and `sampling.sample` decide the tokens, of those that a grammar allows, up to a stop. The prompt's
last row gives the first one. The scheduler makes the target's passes, so that sequences can share them. For a single
sequence, a step is:

    proposed = run_one(generation.propose())            draft
    pass_ = generation.cut(proposed)                    keep the nodes that the pass has room for
    with generation.during(pass_):           if no other sequence shares the pass
        [logits], ran = run(target, [pass_.work])
    step = generation.accept(pass_, logits, ran)        verify, commit
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from time import perf_counter
from typing import Any

import numpy as np

from edgespec.errors import ContextFull
from edgespec.loop.backend import Backend, Logits, Session, Work
from edgespec.loop.draft_passes import DraftSteps
from edgespec.loop.grammar import Constraint
from edgespec.loop.hint_texts import HintTexts
from edgespec.loop.passes import (
    UNTIMED,
    Pass,
    Prefill,
    Proposed,
    Ran,
    check_room,
    fitting,
    most_nodes,
    rows_of,
)
from edgespec.loop.planner import Context, Planner
from edgespec.loop.sampling import Float32Array, Noise, SamplingParams, log_sum_exp, sample, top_ids
from edgespec.loop.stats import GenerationStats
from edgespec.loop.step import LogProbs, Step
from edgespec.loop.tree import DraftTree, Source, only, root_only, shallow
from edgespec.loop.verify import Walk, walk


class Generation:
    """One sequence: `begin`, and passes and `accept_prompt` while `prompt` is unread.

    Then `read_draft_part` while there is a `draft_prompt`, `propose`, `cut` and `accept`, until it is `finished`.

    Attributes:
        token_ids: all committed tokens; the last is the next tree's root.
        prompt: the prompt, whose last row gives the first token.
        last_row: the logits of this row, [V]; None: not computed yet.
        finished: the finish reason; "": the sequence goes on.
        stats: updated by every step.
    """

    def __init__(
        self,
        target: Backend,
        session: Session,
        planner: Planner,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        max_tokens: int,
        budget: int,
        stats: GenerationStats,
        stop_ids: frozenset[int] | None = None,
        log_probs: int | None = None,
        grammar: Constraint | None = None,
        hint_texts: HintTexts | None = None,
        last_row: Float32Array | None = None,
    ) -> None:
        """Args:
            target: the model whose output is wanted.
            session: one of its sessions; its prefix of the prompt is reused.
            planner: proposes draft tokens.
            prompt_ids: at least one token.
            sampling: how the target's tokens are chosen.
            max_tokens: most tokens to generate; at least 1.
            budget: most draft nodes per pass.
            stats: updated by every step.
            stop_ids: tokens that end the sequence; default: the vocabulary's end-of-generation ids.
            log_probs: number of most probable tokens that steps report; None: no log-probabilities.
            grammar: constraint that the output must match, at its beginning.
            hint_texts: the request's, which this sequence joins.
            last_row: logits of the prompt's last row, from an earlier pass of the target.

        Raises:
            ContextFull: the prompt leaves no room for a token.
        """
        check_room(target, len(prompt_ids))
        limits = target.capabilities
        self.session = session
        self.stats = stats
        self.finished = ""
        self.token_ids = list(prompt_ids)
        self.target = target
        self._planner = planner
        self._cut_short = False  # the last tree was not accepted to the end of its longest path
        self._prompt_ids = prompt_ids
        self.prompt, self.last_row = Prefill(target, session, prompt_ids, want_last=last_row is None), last_row
        self._sampling = sampling
        self._log_probs, self._step_log_probs = log_probs, list[LogProbs]()
        self._grammar = grammar
        self._hint_texts, self._number = hint_texts, hint_texts.join() if hint_texts else 0
        self._noise = Noise(sampling.seed, target.vocab.size)
        self._stop_ids = target.vocab.eog_ids if stop_ids is None else stop_ids
        self._limit = min(len(prompt_ids) + max_tokens, limits.context_length)
        self._budget = budget
        self._drafts = budget > 0  # else planners see no logits, since a head would read the tokens in vain
        stats.planner, stats.backend = planner.name, target.name
        stats.exact = limits.exact.name if limits.exact else ""
        stats.seed, stats.prompt_tokens = sampling.seed, len(prompt_ids)

    def begin(self) -> Step | None:
        """Keep the prefixes of the prompt that the sessions of target and draft hold; result as of `accept_prompt`."""
        self._planner.begin(self._prompt_ids)
        self.stats.cached_tokens = self.prompt.resume()
        return self._first_step()

    def accept_prompt(self, pass_: Pass, logits: Logits, ran: Ran = UNTIMED) -> Step | None:
        """Commit a part of `prompt` after its pass; arguments as for `accept`.

        Returns:
            The first token, as a step without draft tokens; None: the prompt goes on.
        """
        began = perf_counter()
        self._saw_prompt(pass_.work, logits)
        self.prompt.commit(pass_.work)
        step = self._first_step()
        self.stats.prefill_seconds += ran.seconds + perf_counter() - began
        return step

    def _saw_prompt(self, work: Work, logits: Logits) -> None:
        if len(work.wanted):
            self.last_row = logits.row(int(work.wanted[-1]))
        if self._drafts:
            self._planner.saw_prompt(len(self.session.token_ids), len(work.token_ids), logits)

    def _first_step(self) -> Step | None:
        """Sample the first token when all of the prompt is read."""
        if self.last_row is None or self.prompt.unread or len(self.token_ids) > len(self._prompt_ids):
            return None
        step = self._step(root_only(self._prompt_ids[-1]), Walk([0], [self._sample(self.last_row, [])]))
        self._extend(step, None)
        self.stats.add(step.sources)
        return step

    @property
    def _room(self) -> int:
        """Most depth of a node: one at depth d pays only while d more tokens and a bonus fit."""
        return self._limit - len(self.token_ids) - 1

    @property
    def draft_prompt(self) -> Prefill | None:
        """
        Returns:
            Tokens that the draft reads before the next `propose`, by `read_draft_part`; None: none.
        """
        may_draft = self._budget and self._room > 0 and len(self.token_ids) > len(self._prompt_ids)
        return self._planner.unread(self.token_ids) if may_draft else None

    def read_draft_part(self, reading: Prefill, work: Work) -> float:
        """Make a pass of the draft over a part of `draft_prompt`.

        If other sessions of the draft leave no room, this sequence is decoded without drafts from here on.

        Returns:
            Seconds of the pass; 0: nothing was read.
        """
        started = perf_counter()
        try:
            was_read = reading.read(work) is not None
        except ContextFull:
            self._budget, was_read = 0, False
        seconds = perf_counter() - started
        if self.stats.passes:
            self.stats.draft_seconds += seconds
        else:
            self.stats.prefill_seconds += seconds
        return seconds if was_read else 0.0

    def propose(self, most: int | None = None, sequences: int = 1) -> DraftSteps[Proposed]:
        """Draft a tree rooted at the last committed token, and choose the nodes that pay and fit.

        Args:
            most: most draft nodes; default: the budget.
            sequences: number of sequences that propose for the same pass.
        """
        started, before = perf_counter(), self._planner.stats.draft_seconds
        room, limits = self._room, self.target.capabilities
        leaves = limits.leaves(sequences)
        budget = min(self._budget, most_nodes(limits, self.session.unread_committed) - 1)
        budget = budget if most is None else min(budget, most)
        context = self._context(self.token_ids, room, sequences)
        proposal = yield from self._planner.propose(context, budget)
        tree, nodes = proposal.tree, fitting(proposal, budget, leaves)
        if self._grammar and budget:  # each node takes the grammar's time, so only those that fit are pruned
            tree = shallow(self._grammar.prune_and_force(only(tree, nodes), self.token_ids, budget), room)
            nodes = self._planner.paying(tree, context, budget)
        return Proposed(tree, nodes, started, self._planner.stats.draft_seconds - before)

    def cut(self, proposed: Proposed, size: int | None = None) -> Pass:
        """
        Args:
            proposed: result of `propose`.
            size: number of best nodes to keep; default: all that fit.

        Returns:
            A pass over the root and these nodes.
        """
        tree = only(proposed.tree, proposed.nodes[:size])
        work = Work(self.session, tree.token_ids, tree.parents, np.arange(len(tree), dtype=np.int32))
        rows = rows_of(tree.parents, self.session.unread_committed) if self.target.capabilities.paths else len(tree)
        plain = len(tree) == 1 and not self._owes
        return Pass(work, tree, proposed.started, proposed.draft_seconds, plain, rows)

    @property
    def _owes(self) -> bool:
        """As in `Context`. `unread_committed` is 0 also where so many tokens are unread that they get an own pass."""
        return self.target.capabilities.paths and (self._cut_short or self.session.unread_committed > 0)

    def _context(self, token_ids: Sequence[int], room: int, sequences: int = 1) -> Context:
        limits, hints = self.target.capabilities, self._hint_texts.hints(self._number) if self._hint_texts else ()
        unread = self.session.unread_committed if limits.paths else None
        return Context(
            token_ids, len(self._prompt_ids), self._sampling, self._noise, room, limits.leaves(sequences),
            unread=unread, owes=self._owes, sequences=sequences, hints=hints,
        )  # fmt: skip

    def during(self, pass_: Pass) -> AbstractContextManager[None]:
        """Context of a pass of the target that no other sequence shares; the draft may run meanwhile."""
        return self._planner.during(len(pass_.work.token_ids))

    def give_up(self) -> None:
        """Drop the last proposal without verifying it."""
        self._planner.give_up()

    def accept(self, pass_: Pass, logits: Logits, ran: Ran = UNTIMED) -> Step:
        """Verify the tree with the target's own samples, and commit the accepted tokens.

        Args:
            pass_: result of `cut`.
            logits: of its nodes.
            ran: about the pass.
        """
        began, tree = perf_counter(), pass_.tree
        assert tree, "a part of the prompt is for accept_prompt"
        before = self._planner.stats.mixing_seconds
        found = walk(tree, lambda node, accepted: self._sample(logits.view(node), accepted))
        drafting = pass_.draft_seconds + self._planner.stats.mixing_seconds - before
        step = self._step(
            tree, found, sequences=ran.sequences, rows=pass_.rows, plain=pass_.plain,
            seconds=ran.seconds, wait_seconds=ran.wait_seconds, draft_seconds=drafting,
        )  # fmt: skip
        self.session.commit(step.path)  # the last token of the output is the next root
        self._cut_short = len(step.path) <= tree.depth.max()
        self._extend(step, logits if self._drafts else None)
        stats, planner = self.stats, self._planner.stats
        stats.draft_passes = planner.draft_passes
        stats.draft_went_on = planner.went_on
        stats.hidden_seconds = planner.hidden_seconds
        now = perf_counter()
        stats.count(step, now - pass_.started - drafting - ran.seconds, now - began)
        return step

    def _step(self, tree: DraftTree, found: Walk, **about: Any) -> Step:
        """The step that ends where the output does; `about`: fields of `Step`."""
        output, finished = until_stop(found.output, self._stop_ids, self._limit - len(self.token_ids))
        sources = [*(Source(source) for source in tree.source[found.path[1:]]), Source.TARGET][: len(output)]
        log_probs, self._step_log_probs = self._step_log_probs[: len(output)], []
        path, start = found.path[: len(output)], len(self.token_ids) - 1
        return Step(output, sources, finished, tree, path, log_probs, start, **about)

    def _extend(self, step: Step, logits: Logits | None) -> None:
        """Append the tokens of a step, and let the planner learn from it."""
        output = step.tokens
        self._planner.result(step, logits)
        self.token_ids.extend(output)
        if self._hint_texts:
            self._hint_texts.extend(self._number, output)
        self.finished = self.stats.finish_reason = step.finished

    def _sample(self, row: Float32Array, accepted: list[int]) -> int:
        position = len(self.token_ids) + len(accepted)
        output = self.token_ids[len(self._prompt_ids) :] + accepted if self._sampling.has_penalties else accepted
        allowed = self._grammar.masked(row) if self._grammar else row
        drawn = self._planner.mix(allowed, self._sampling, self.token_ids, accepted, self._grammar)
        token = sample(drawn[0], position, drawn[1], self._noise, self._prompt_ids, output)
        if self._grammar:
            self._grammar.accept(token)
        if self._log_probs is not None:
            self._step_log_probs.append(log_probs_of(row, token, self._log_probs))
        return token


def log_probs_of(row: Float32Array, token: int, count: int) -> LogProbs:
    """
    Args:
        row: logits [V].
        token: the token that was chosen.
        count: number of most probable tokens to report.

    Returns:
        Their log-probabilities.
    """
    total = log_sum_exp(row)
    ids = top_ids(row, count) if count else ()
    return LogProbs(float(row[token]) - total, [(int(i), float(row[i]) - total) for i in ids])


def until_stop(output: list[int], stop_ids: frozenset[int], room: int) -> tuple[list[int], str]:
    """
    Returns:
        Output up to a stop token or to `room` tokens, and the finish reason; "": the sequence goes on.
    """
    for i, token in enumerate(output[:room]):
        if token in stop_ids:
            return output[: i + 1], "stop"
    return output[:room], "length" if len(output) >= room else ""
