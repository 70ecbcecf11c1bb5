"""The loop: plan a tree, evaluate it in one pass, walk it, keep what the target would have written.

Everything that decides the text is in `verify.walk` and `sampling.sample`; planners only decide how
many passes it takes. Plain decoding is the same loop with the planner `none`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter

import numpy as np

from edgespec.backend import Backend, Logits, Session, Work, check_room, common_prefix, prefill
from edgespec.cost import Pace, best_size
from edgespec.planners import Context, Planner
from edgespec.sampling import Noise, SamplingParams, sample
from edgespec.stats import GenerationStats
from edgespec.tree import Source, best_nodes, root_only
from edgespec.verify import walk


@dataclass(frozen=True, slots=True)
class Round:
    """What one pass of the target gained."""

    tokens: list[int]
    sources: list[Source]  # who guessed each token; TARGET for the bonus
    finished: str  # "" while the text goes on, else the finish reason


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
    pace: Pace | None = None,
    stop_ids: frozenset[int] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Iterator[Round]:
    """Generate token by token groups; `stats` is filled in as the rounds go by.

    Args:
        target: the model whose text is wanted.
        session: one of its sessions; what it holds of the prompt is not computed again.
        planner: where the guesses come from.
        prompt_ids: at least one token.
        sampling: how the target's tokens are chosen.
        max_tokens: most tokens to generate; at least 1.
        budget: most draft nodes per pass.
        stats: filled in.
        pace: what passes cost, learned as they go by: trees then have the size that pays, at most `budget`. None: they
            have all the nodes the budget allows, and do not depend on how long anything takes.
        stop_ids: tokens that end the text; default: the vocabulary's end-of-generation ids.
        progress: see `backend.prefill`.

    Raises:
        ContextFull: the prompt leaves no room for a token.
    """
    check_room(target, len(prompt_ids))
    capabilities = target.capabilities
    stop_ids = target.vocab.eog_ids if stop_ids is None else stop_ids
    noise = Noise(sampling.seed, target.vocab.size)
    token_ids = list(prompt_ids)
    limit = min(len(prompt_ids) + max_tokens, capabilities.context_length)
    budget = min(budget, capabilities.max_nodes - 1, capabilities.max_wanted - 1)
    stats.planner, stats.backend = planner.name, target.name
    stats.seed, stats.prompt_tokens = sampling.seed, len(prompt_ids)

    started = perf_counter()
    stats.cached_tokens = common_prefix(session.token_ids, token_ids[:-1])
    planner.begin(prompt_ids)  # the draft first: it is quick, and its context may be the smaller one
    prefill(target, session, token_ids[:-1], progress=progress)
    stats.prefill_seconds = perf_counter() - started

    def sample_after(logits: Logits, node: int, accepted: Sequence[int]) -> int:
        position = len(token_ids) + len(accepted)
        output = token_ids[len(prompt_ids) :] + list(accepted)
        return sample(logits.row(node), position, sampling, noise, prompt_ids, output)

    finished = ""
    while not finished:
        # Plan. A node at depth d is worth a token only while d more tokens and a bonus still fit.
        started, model_seconds = perf_counter(), planner.model_seconds
        room = limit - len(token_ids) - 1
        known = pace.cost if pace and pace.cost.known else None
        size = pace.cost.probe(budget) if pace and not known else budget
        context = Context(token_ids, len(prompt_ids), sampling, noise, room, capabilities.max_leaves, known)
        drafting = not pace or not known or pace.trial.drafts()
        tree = planner.plan(context, size) if drafting else root_only(token_ids[-1])
        model_seconds = planner.model_seconds - model_seconds
        if known:
            size = min(size, best_size(tree.log_probs[1:], model_seconds, known))
        tree = best_nodes(tree, size, capabilities.max_leaves)

        # One pass over the whole tree.
        pass_started, waited = perf_counter(), target.wait_seconds
        everything = np.arange(len(tree), dtype=np.int32)
        logits = target.forward([Work(session, tree.token_ids, tree.parents, everything)])[0]
        pass_seconds, waited = perf_counter() - pass_started, target.wait_seconds - waited
        if pace:
            pace.cost.add(len(tree), pass_seconds)

        # Walk it with the target's own samples.
        result = walk(tree, partial(sample_after, logits))

        # Keep it.
        output, finished = _cut(result.output, stop_ids, limit - len(token_ids))
        sources = [Source(source) for source in tree.source[result.path[1:]]] + [Source.TARGET]
        del sources[len(output) :]
        session.commit(result.path[: len(output)])  # the last token of the output is the next root
        planner.accept(output)
        token_ids.extend(output)
        stats.passes += 1
        stats.tokens += len(output)
        stats.drafted += len(tree) - 1
        for source in sources:
            stats.tokens_by_source[source.name.lower()] += 1
        stats.finish_reason = finished
        stats.draft_seconds += model_seconds
        stats.target_seconds += pass_seconds
        stats.wait_seconds += waited
        seconds = perf_counter() - started
        stats.plan_seconds += seconds - model_seconds - pass_seconds
        if pace and known and drafting:
            pace.trial.add(len(output), seconds, float(known.seconds(1)))
        yield Round(output, sources, finished)


def _cut(output: list[int], stop_ids: frozenset[int], room: int) -> tuple[list[int], str]:
    """The part of the walk's output that is text, and why it ends there ("" if it does not)."""
    for i, token in enumerate(output[:room]):
        if token in stop_ids:
            return output[: i + 1], "stop"
    return output[:room], "length" if len(output) >= room else ""
