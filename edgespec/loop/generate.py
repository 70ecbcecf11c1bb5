"""The loop: plan a tree, evaluate it in one pass, walk it, keep what the target would have written.

Everything that decides the text is in `verify.walk` and `sampling.sample`; planners only decide how
many passes it takes. Plain decoding is the same loop with the planner `none`.

A `Generation` is one text being written. Whoever runs it makes the passes, so that several texts can share one:

    tree = generation.plan()                        guess
    work = generation.work(tree)                    what to evaluate
    logits = target.forward([work])[0]              one pass, of this text alone (`beside`) or of many
    round_ = generation.take(logits)                walk, keep

`scheduler.py` does so for many.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from time import perf_counter

import numpy as np

from edgespec.loop.backend import Backend, Logits, Session, Work
from edgespec.loop.draft_passes import DraftSteps, run_one
from edgespec.loop.grammar import Constraint
from edgespec.loop.hint_texts import Family
from edgespec.loop.passes import check_room, most_nodes, prefill, prompt_work, start_of
from edgespec.loop.planner import Context, Drafts, Foresees, GoesAhead, Planner
from edgespec.loop.sampling import Float32Array, Noise, SamplingParams, log_sum_exp, sample, top_ids
from edgespec.loop.stats import GenerationStats
from edgespec.loop.tree import DraftTree, Source, best_nodes, shallow
from edgespec.loop.verify import walk


@dataclass(frozen=True, slots=True)
class LogProbs:
    """How probable the target took a token to be, by its logits as they are: before bias, penalties, temperature."""

    log_prob: float
    best: list[tuple[int, float]]  # the likeliest tokens and their log-probabilities, best first


@dataclass(frozen=True, slots=True)
class Round:
    """What one pass of the target gained."""

    tokens: list[int]
    sources: list[Source]  # who guessed each token; TARGET for the bonus
    finished: str  # "" while the text goes on, else the finish reason
    tree: DraftTree  # that was evaluated
    path: list[int]  # its nodes that are text now, the root first
    log_probs: list[LogProbs]  # of each token, where they were asked for


class Generation:
    """One text being written: `read_prompt`, then `plan`, `work` and `take` in turn until it is `finished`.

    Instead of `read_prompt`: `begin`, then `reads_on_at`, `prompt_work`, `take_prompt` in turn while some is `unread`.
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
        family: Family | None = None,
    ) -> None:
        """
        Args:
            target: the model whose text is wanted.
            session: one of its sessions; what it holds of the prompt is not computed again.
            planner: where the guesses come from.
            prompt_ids: at least one token.
            sampling: how the target's tokens are chosen.
            max_tokens: most tokens to generate; at least 1.
            budget: most draft nodes per pass.
            stats: filled in as the rounds go by.
            stop_ids: tokens that end the text; default: the vocabulary's end-of-generation ids.
            log_probs: rounds tell how probable tokens were, and so many of the likeliest; None: they do not.
            grammar: what the text must look like, at its beginning.
            family: texts that may foretell this one; it joins them.

        Raises:
            ContextFull: the prompt leaves no room for a token.
        """
        check_room(target, len(prompt_ids))
        limits = target.capabilities
        self.session = session
        self.stats = stats
        self.finished = ""  # the finish reason
        self.token_ids = list(prompt_ids)  # all committed tokens; the last is the next tree's root
        self.foreseen = list[int]()  # tokens that may follow, far beyond the next tree
        self.target = target
        self._planner = planner
        self._drafts = planner if isinstance(planner, Drafts) else None
        self._ahead = planner if isinstance(planner, GoesAhead) else None
        self._comparable = True  # with plain decoding, whose passes the planner has measured
        self._prompt_ids = prompt_ids
        self._sampling = sampling
        self._log_probs, self._told = log_probs, list[LogProbs]()
        self._grammar = grammar
        self._family, self._member = family, family.join() if family else 0
        self._noise = Noise(sampling.seed, target.vocab.size)
        self._stop_ids = target.vocab.eog_ids if stop_ids is None else stop_ids
        self._limit = min(len(prompt_ids) + max_tokens, limits.context_length)
        self._budget = budget
        stats.planner, stats.backend = planner.name, target.name
        stats.exact = limits.exact.name if limits.exact else ""
        stats.seed, stats.prompt_tokens = sampling.seed, len(prompt_ids)

    def begin(self) -> None:
        """Keep what the session holds of the prompt, and let the planner read it: a draft is quick.

        Raises:
            ContextFull: the prompt does not fit into the draft's context.
        """
        started = perf_counter()
        self.stats.cached_tokens = start_of(self.target.capabilities, self.session, self.token_ids[:-1])
        self._planner.begin(self._prompt_ids)
        self.session.rewind(self.stats.cached_tokens)
        self.stats.prefill_seconds = perf_counter() - started

    @property
    def unread(self) -> int:
        """Prompt tokens that the target has yet to read; the last one is the first tree's root."""
        return max(0, len(self._prompt_ids) - 1 - len(self.session.token_ids))

    def reads_on_at(self) -> int:
        """Where the next part of the prompt begins: other texts' passes may have come between."""
        self.session.rewind(start_of(self.target.capabilities, self.session, self._prompt_ids[:-1]))
        return len(self.session.token_ids)

    def prompt_work(self, most: int | None = None) -> Work:
        """The next part of the prompt, at most so many tokens, after `reads_on_at`."""
        work = prompt_work(self.target.capabilities, self.session, self._prompt_ids[:-1], most=most)
        self._given = perf_counter()
        return work

    def take_prompt(self, work: Work) -> None:
        """The part is read."""
        self.session.commit(list(range(len(work.token_ids))))
        self.stats.prefill_seconds += perf_counter() - self._given

    def read_prompt(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Make the prompt but for its last token the session's text; `progress` as for `backend.prefill`."""
        self.begin()
        started = perf_counter()
        prefill(self.target, self.session, self.token_ids[:-1], progress=progress)
        self.stats.prefill_seconds += perf_counter() - started

    def plan(self, most: int | None = None, texts: int = 1) -> DraftTree:
        """A tree rooted at the last committed token, with at most so many guesses; `texts` are planned at once."""
        return run_one(self.planning(most, texts))

    def planning(self, most: int | None = None, texts: int = 1) -> DraftSteps[DraftTree]:
        """The steps of `plan`."""
        self._started, drafted = perf_counter(), self._planner.model_seconds
        # A node at depth d is worth a token only while d more tokens and a bonus still fit.
        room, limits = self._limit - len(self.token_ids) - 1, self.target.capabilities
        leaves = limits.leaves(texts)
        context = self._context(self.token_ids, room, texts)
        budget = min(self._budget, most_nodes(limits, self.session.unread_committed) - 1)
        budget = budget if most is None else min(budget, most)
        if self._drafts:
            tree = yield from self._drafts.planning(context, budget)
        else:
            tree = self._planner.plan(context, budget)
        if self._grammar and budget:
            tree = shallow(self._grammar.prune_and_force(tree, self.token_ids), room)
        tree = best_nodes(tree, budget, leaves)
        self._drafted = self._planner.model_seconds - drafted
        return tree

    def _context(self, token_ids: Sequence[int], room: int, texts: int = 1) -> Context:
        limits, beside = self.target.capabilities, self._family.beside(self._member) if self._family else ()
        head = self.session.unread_committed if limits.paths else None
        return Context(
            token_ids, len(self._prompt_ids), self._sampling, self._noise, room, limits.leaves(texts),
            head=head, texts=texts, beside=beside,
        )  # fmt: skip

    def foresee(self, seconds: float, most: int) -> bool:
        """Guess on, for so long, what the text will be: `foreseen` grows. False: it does not."""
        known, room = self.foreseen, self._limit - len(self.token_ids)
        ended = bool(known) and known[-1] in self._stop_ids
        if ended or len(known) >= min(most, room) or not isinstance(self._planner, Foresees):
            return False
        context = replace(self._context([*self.token_ids, *known], room - len(known)), foreseen=len(known))
        new = self._planner.foresee(context, min(most, room) - len(known), seconds)
        end = next((i + 1 for i, token in enumerate(new) if token in self._stop_ids), len(new))
        known += new[:end]
        return bool(new)

    def work(self, tree: DraftTree) -> Work:
        """The whole tree, to be evaluated at once."""
        self._tree, self._plain = (
            tree,
            len(tree) == 1 and not (self.target.capabilities.paths and self.session.unread_committed),
        )
        work = Work(self.session, tree.token_ids, tree.parents, np.arange(len(tree), dtype=np.int32))
        self._waited, self._given = self.target.wait_seconds, perf_counter()
        return work

    def beside(self) -> AbstractContextManager[None]:
        """Within it the target evaluates this tree, and nothing else: the draft may go on meanwhile."""
        return self._ahead.beside(len(self._tree)) if self._ahead else nullcontext()

    def give_up(self) -> None:
        """The tree is not evaluated; another will be planned."""
        self._planner.accept([], 0.0)

    def take(self, logits: Logits, *, alone: bool = True) -> Round:
        """Walk the tree with the target's own samples, and keep what they say.

        Args:
            logits: of the work's nodes.
            alone: the pass evaluated nothing else, so that its time tells what such a tree costs.
        """
        began, waited = perf_counter(), self.target.wait_seconds - self._waited
        passed, tree = began - self._given, self._tree
        result = walk(tree, lambda node, accepted: self._sample(logits, node, accepted))
        output, self.finished = cut(result.output, self._stop_ids, self._limit - len(self.token_ids))
        sources = [Source(source) for source in tree.source[result.path[1:]]] + [Source.TARGET]
        del sources[len(output) :]
        self.session.commit(result.path[: len(output)])  # the last token of the output is the next root
        self._planner.accept(output, passed if alone else 0.0)
        right = self.foreseen[: len(output)] == output
        self.foreseen = self.foreseen[len(output) :] if right else []
        self.token_ids.extend(output)
        if self._family:
            self._family.extend(self._member, output)
        stats = self.stats
        stats.count(sources, drafted=len(tree) - 1)
        stats.finish_reason = self.finished
        stats.draft_seconds += self._drafted
        if self._drafts:
            stats.draft_passes = self._drafts.model_passes
        if self._ahead:
            stats.draft_went_on, stats.hidden_seconds = self._ahead.went_on, self._ahead.hidden_seconds
        stats.target_seconds += passed
        stats.wait_seconds += waited
        plain = self._planner.plain_seconds if alone else 0.0
        self._count_plain(passed if alone and self._plain else len(output) * plain, plain > 0, began)
        stats.plan_seconds += perf_counter() - self._started - self._drafted - passed
        told, self._told = self._told[: len(output)], []
        return Round(output, sources, self.finished, tree, result.path[: len(output)], told)

    def _count_plain(self, passes: float, known: bool, began: float) -> None:
        """Plain decoding would have spent so many seconds in passes for this round's tokens, and sampled them, too."""
        if not known:
            self._comparable = False  # one round that cannot be compared leaves no figure for the text
        taken = perf_counter() - began
        self.stats.plain_seconds = self.stats.plain_seconds + passes + taken if self._comparable else 0.0

    def _sample(self, logits: Logits, node: int, accepted: Sequence[int]) -> int:
        """The target's own token after a node of the tree, `accepted` being the path to it."""
        position = len(self.token_ids) + len(accepted)
        output = self.token_ids[len(self._prompt_ids) :] + list(accepted)
        row = logits.row(node)
        allowed = self._grammar.masked(row) if self._grammar else row
        token = sample(allowed, position, self._sampling, self._noise, self._prompt_ids, output)
        if self._grammar:
            self._grammar.accept(token)  # where the walk goes on from here, it does with this token
        if self._log_probs is not None:
            self._told.append(told(row, token, self._log_probs))
        return token


def told(row: Float32Array, token: int, count: int) -> LogProbs:
    """What a row of logits [V] says of a token, and of the `count` likeliest."""
    total = log_sum_exp(row)
    ids = top_ids(row, count) if count else ()
    return LogProbs(float(row[token]) - total, [(int(i), float(row[i]) - total) for i in ids])


def generate_tokens(
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
    progress: Callable[[int, int], None] | None = None,
) -> Iterator[Round]:
    """One generation alone, to its end; arguments and errors as for `Generation` and `Generation.read_prompt`."""
    generation = Generation(
        target, session, planner, prompt_ids, sampling,
        max_tokens=max_tokens, budget=budget, stats=stats, stop_ids=stop_ids,
    )  # fmt: skip
    generation.read_prompt(progress)
    while not generation.finished:
        work = generation.work(generation.plan())
        with generation.beside():
            logits = target.forward([work])[0]
        yield generation.take(logits)


def cut(output: list[int], stop_ids: frozenset[int], room: int) -> tuple[list[int], str]:
    """The part of the walk's output that is text, and why it ends there ("" if it does not)."""
    for i, token in enumerate(output[:room]):
        if token in stop_ids:
            return output[: i + 1], "stop"
    return output[:room], "length" if len(output) >= room else ""
