"""The loop: plan a tree, evaluate it in one pass, walk it, keep what the target would have written.

Everything that decides the text is in `verify.walk` and `sampling.sample`; planners only decide how
many passes it takes. Plain decoding is the same loop with the planner `none`.

A `Generation` is one text being written. Whoever runs it makes the passes, so that several texts can share one:

    tree = generation.plan()                        guess
    work = generation.work(tree)                    what to evaluate
    logits = target.forward([work])[0]              one pass, of this text alone or of many
    round_ = generation.take(logits)                walk, keep
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np

from edgespec.backend import Backend, Logits, Session, Work, check_room, common_prefix, most_nodes, prefill
from edgespec.planners import Context, Planner
from edgespec.sampling import Noise, SamplingParams, sample
from edgespec.stats import GenerationStats
from edgespec.tree import DraftTree, Source, best_nodes
from edgespec.verify import walk


@dataclass(frozen=True, slots=True)
class Round:
    """What one pass of the target gained."""

    tokens: list[int]
    sources: list[Source]  # who guessed each token; TARGET for the bonus
    finished: str  # "" while the text goes on, else the finish reason


class Generation:
    """One text being written: `read_prompt`, then `plan`, `work` and `take` in turn until it is `finished`."""

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

        Raises:
            ContextFull: the prompt leaves no room for a token.
        """
        check_room(target, len(prompt_ids))
        limits = target.capabilities
        self.session = session
        self.stats = stats
        self.finished = ""  # the finish reason
        self.token_ids = list(prompt_ids)  # all committed tokens; the last is the next tree's root
        self.target = target
        self._planner = planner
        self._comparable = True  # with plain decoding, whose passes the planner has measured
        self._prompt_ids = prompt_ids
        self._sampling = sampling
        self._noise = Noise(sampling.seed, target.vocab.size)
        self._stop_ids = target.vocab.eog_ids if stop_ids is None else stop_ids
        self._limit = min(len(prompt_ids) + max_tokens, limits.context_length)
        self._budget = budget
        stats.planner, stats.backend = planner.name, target.name
        stats.exact = limits.exact.name if limits.exact else ""
        stats.seed, stats.prompt_tokens = sampling.seed, len(prompt_ids)

    def read_prompt(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Make the prompt but for its last token the session's text; `progress` as for `backend.prefill`."""
        started = perf_counter()
        self.stats.cached_tokens = self.session.kept(common_prefix(self.session.token_ids, self.token_ids[:-1]))
        self._planner.begin(self._prompt_ids)  # the draft first: it is quick, and its context may be the smaller one
        prefill(self.target, self.session, self.token_ids[:-1], progress=progress)
        self.stats.prefill_seconds = perf_counter() - started

    def plan(self) -> DraftTree:
        """A tree rooted at the last committed token."""
        self._started, drafted = perf_counter(), self._planner.model_seconds
        # A node at depth d is worth a token only while d more tokens and a bonus still fit.
        room, limits = self._limit - len(self.token_ids) - 1, self.target.capabilities
        context = Context(self.token_ids, len(self._prompt_ids), self._sampling, self._noise, room, limits.max_leaves)
        budget = min(self._budget, most_nodes(limits, self.session.owed) - 1)
        tree = best_nodes(self._planner.plan(context, budget), budget, limits.max_leaves)
        self._drafted = self._planner.model_seconds - drafted
        return tree

    def work(self, tree: DraftTree) -> Work:
        """The whole tree, to be evaluated at once."""
        self._tree = tree
        work = Work(self.session, tree.token_ids, tree.parents, np.arange(len(tree), dtype=np.int32))
        self._waited, self._given = self.target.wait_seconds, perf_counter()
        return work

    def take(self, logits: Logits) -> Round:
        """Walk the tree with the target's own samples, and keep what they say."""
        began, waited = perf_counter(), self.target.wait_seconds - self._waited
        passed, tree = began - self._given, self._tree
        result = walk(tree, lambda node, accepted: self._sample(logits, node, accepted))
        output, self.finished = _cut(result.output, self._stop_ids, self._limit - len(self.token_ids))
        sources = [Source(source) for source in tree.source[result.path[1:]]] + [Source.TARGET]
        del sources[len(output) :]
        self.session.commit(result.path[: len(output)])  # the last token of the output is the next root
        self._planner.accept(output, passed)
        self.token_ids.extend(output)
        stats = self.stats
        stats.count(sources, drafted=len(tree) - 1)
        stats.finish_reason = self.finished
        stats.draft_seconds += self._drafted
        stats.target_seconds += passed
        stats.wait_seconds += waited
        self._count_plain(passed if len(tree) == 1 else len(output) * self._planner.plain_seconds, began)
        stats.plan_seconds += perf_counter() - self._started - self._drafted - passed
        return Round(output, sources, self.finished)

    def _count_plain(self, passes: float, began: float) -> None:
        """Plain decoding would have spent so many seconds in passes for this round's tokens, and sampled them, too."""
        if self._planner.plain_seconds == 0:
            self._comparable = False  # one round that cannot be compared leaves no figure for the text
        taken = perf_counter() - began
        self.stats.plain_seconds = self.stats.plain_seconds + passes + taken if self._comparable else 0.0

    def _sample(self, logits: Logits, node: int, accepted: Sequence[int]) -> int:
        """The target's own token after a node of the tree, `accepted` being the path to it."""
        position = len(self.token_ids) + len(accepted)
        output = self.token_ids[len(self._prompt_ids) :] + list(accepted)
        return sample(logits.row(node), position, self._sampling, self._noise, self._prompt_ids, output)


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
        logits = target.forward([work])[0]
        yield generation.take(logits)


def _cut(output: list[int], stop_ids: frozenset[int], room: int) -> tuple[list[int], str]:
    """The part of the walk's output that is text, and why it ends there ("" if it does not)."""
    for i, token in enumerate(output[:room]):
        if token in stop_ids:
            return output[: i + 1], "stop"
    return output[:room], "length" if len(output) >= room else ""
