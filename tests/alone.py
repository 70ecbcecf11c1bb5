"""Texts to their ends: `Generation` without a scheduler and with passes of its own, or all requests of a scheduler."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from edgespec.loop import generate
from edgespec.loop.backend import Backend, Session, Work
from edgespec.loop.draft_passes import run_one
from edgespec.loop.passes import Pass, run
from edgespec.loop.planner import Planner
from edgespec.loop.sampling import SamplingParams
from edgespec.loop.stats import GenerationStats
from edgespec.loop.step import Step
from edgespec.scheduler.events import Wrote
from edgespec.scheduler.requests import Request
from edgespec.scheduler.scheduler import Scheduler


class Generation(generate.Generation):
    """`read_prompt`, then `read_draft`, `propose`, `cut` and `accept` until it is `finished`; or all of it: `steps`."""

    def read_prompt(self, progress: Callable[[int, int], None] | None = None) -> Step:
        """Commit the prompt; `progress` as for `passes.prefill`, result as of `accept_prompt`."""
        tell, step = progress or (lambda done, total: None), self.begin()
        tell(len(self.session.token_ids), len(self._prompt_ids))
        while step is None:
            pass_ = Pass(self.prompt.work())
            [logits], ran = run(self.target, [pass_.work])
            step = self.accept_prompt(pass_, logits, ran)
            tell(len(self.session.token_ids), len(self._prompt_ids))
        return step

    def read_draft(self) -> None:
        """Let the draft read all of `draft_prompt`."""
        while reading := self.draft_prompt:
            self.read_draft_part(reading, reading.work())

    def steps(self, progress: Callable[[int, int], None] | None = None) -> Iterator[Step]:
        """Read the prompt and decode to the end, without sharing passes; arguments as for `read_prompt`."""
        yield self.read_prompt(progress)
        while not self.finished:
            self.read_draft()
            pass_ = self.cut(run_one(self.propose()))
            with self.during(pass_):
                [logits], ran = run(self.target, [pass_.work])
            yield self.accept(pass_, logits, ran)


def generation_of(
    target: Backend, planner: Planner, prompt: Sequence[int], sampling: SamplingParams | None = None, *,
    session: Session | None = None, **options: Any,
) -> Generation:  # fmt: skip
    """In a new session, greedy, and of 40 tokens with 12 draft tokens a pass, unless another one is given."""
    usual = {"max_tokens": 40, "budget": 12, "stats": GenerationStats()}
    return Generation(
        target, session or target.open(), planner, prompt, sampling or SamplingParams(), **usual | options
    )


def written(
    target: Backend, planner: Planner, prompt: Sequence[int], sampling: SamplingParams | None = None, **options: Any
) -> tuple[list[int], GenerationStats]:
    """Tokens and statistics of a whole text; arguments as for `generation_of`."""
    generation = generation_of(target, planner, prompt, sampling, **options)
    return [token for step in generation.steps() for token in step.tokens], generation.stats


def before_passes(backend: Any, note: Callable[[Sequence[Work]], Any]) -> list[Any]:
    """Call `note` before each pass of a backend, from now on; returns a list of what it gives."""
    forward, seen = backend.forward, list[Any]()
    backend.forward = lambda batch: (seen.append(note(batch)), forward(batch))[1]
    return seen


def served(
    scheduler: Scheduler, requests: Sequence[Request]
) -> tuple[list[list[int]], list[list[Step]], list[GenerationStats]]:
    """Requests at once, to their ends: tokens, steps and statistics of each. Closes the scheduler."""
    told = [list[Any]() for _ in requests]
    jobs = [scheduler.submit(request, events.append) for request, events in zip(requests, told, strict=True)]
    while scheduler.waiting or scheduler.active:
        scheduler.step()
    scheduler.close()
    assert [events[-1].error for events in told] == [None] * len(requests)
    steps = [[event.step for event in events if isinstance(event, Wrote)] for events in told]
    return [[token for step in one for token in step.tokens] for one in steps], steps, [job.stats for job in jobs]
