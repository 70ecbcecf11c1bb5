"""Measure planners without the target, on its recorded answers: the target's tokens do not depend on the planner."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from edgespec.loop.draft_passes import run_one
from edgespec.loop.passes import fitting
from edgespec.loop.planner import Context, Planner
from edgespec.loop.sampling import Noise, SamplingParams
from edgespec.loop.step import step_of
from edgespec.loop.tree import only
from edgespec.loop.verify import walk

GREEDY = SamplingParams()
MAX_LEAVES = 256  # llama.cpp's limit


@dataclass(frozen=True, slots=True)
class Recording:
    prompt_ids: list[int]
    output_ids: list[int]
    category: str = ""
    question: str = ""
    options: dict[str, Any] = field(default_factory=dict)  # in recordings of earlier versions


@dataclass(frozen=True, slots=True)
class Replay:
    acceptance_lengths: list[int]  # tokens gained by each pass, bonus included; the prompt gives the first token
    plan_seconds: list[float]


def replay(
    planner: Planner, prompt_ids: Sequence[int], output_ids: Sequence[int], budget: int, vocab_size: int = 1
) -> Replay:
    """Draft a recorded greedy output as `Generation.steps` does.

    Args:
        planner: one that does not use the target.
        prompt_ids: at least one token.
        output_ids: of the target.
        budget: most nodes per tree.
        vocab_size: of the target; a draft model proposes no token beyond it.
    """
    noise = Noise(GREEDY.seed, vocab_size)
    token_ids, end = [*prompt_ids, *output_ids[:1]], len(prompt_ids) + len(output_ids)
    lengths, plan_seconds = list[int](), list[float]()
    planner.begin(prompt_ids)
    planner.result(step_of(output_ids[:1]), None)
    while len(token_ids) < end:
        context = Context(token_ids, len(prompt_ids), GREEDY, noise, end - len(token_ids) - 1, MAX_LEAVES)
        while reading := planner.unread(token_ids):
            reading.read(reading.work())
        started = perf_counter()
        proposal = run_one(planner.propose(context, budget))
        tree = only(proposal.tree, fitting(proposal, budget, MAX_LEAVES))
        plan_seconds.append(perf_counter() - started)
        written = output_ids[len(token_ids) - len(prompt_ids) :]
        output = walk(tree, lambda node, accepted, written=written: written[len(accepted)]).output  # type: ignore[misc]
        planner.result(step_of(output), None)
        token_ids.extend(output)
        lengths.append(len(output))
    return Replay(lengths, plan_seconds)
