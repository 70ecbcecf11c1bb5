"""Tokens per pass against the budget, on recorded answers: SpecExec's Figure 3, with real rejection next to it.

Methods of `REPLAYED` accept the tokens that the target samples, so their passes over a recorded answer are counted. A
method of `RULES` writes other answers, of the same distribution. So the recorded answer may be its own, and
`rejection.acceptance` gives its expected passes.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from time import process_time
from typing import Any, ClassVar

import numpy as np

from edgespec.errors import no_such
from edgespec.loop.backend import Backend, Work
from edgespec.loop.draft_passes import DraftSteps
from edgespec.loop.passes import most_nodes, prefill
from edgespec.loop.planner import Context, Planner
from edgespec.loop.sampling import Float32Array, SamplingParams, distribution
from edgespec.loop.tree import FloatArray, Proposal, path_to, root_only
from edgespec.measure.bench import BenchPrompt, per
from edgespec.measure.json_lines import append
from edgespec.measure.pair_report import label_axes, write_picture
from edgespec.measure.recording import record
from edgespec.measure.rejection import acceptance, coins, coverage, expected_passes, static_tree, stems
from edgespec.measure.replay import Recording, replay
from edgespec.measure.tables import table
from edgespec.planners.chain import ChainPlanner
from edgespec.planners.drafting import ChildScores
from edgespec.planners.search import MOST_DEPTH, Search
from edgespec.planners.specexec import SpecExecPlanner

MOST_CHILDREN = 64  # of a node, with rejection
DRAWS, NUMBERS = 16, 1 << 18  # draws of what a position rejects; most probabilities in them
COVERED = (1, 2, 4, 8, 16, 32, 64)
RAW = SamplingParams(temperature=1.0)


class BeamPlanner(SpecExecPlanner):
    """Beam search (SpecExec, Appendix E): the tree is the most probable paths of one length, budget / depth of them."""

    name = "beam"
    usual_depth: ClassVar[int] = 16

    def propose(self, context: Context, budget: int) -> DraftSteps[Proposal]:
        steps = min(self.most_depth(context), budget)
        if steps <= 0:
            return Proposal(root_only(context.token_ids[-1]))
        width, limits, self._search = max(1, budget // self.depth), self._limits, None
        search, scores = Search(context.token_ids[-1], MOST_DEPTH), ChildScores(context, self.tau, self.coupling)
        yield from self._read_root(search, scores, context)
        for depth in range(1, steps + 1):
            level = np.flatnonzero(search.depth == depth)
            beams = level[np.argsort(-search.log_probs[level], kind="stable")][:width]
            if depth == steps:
                break
            yield from self._read(search, scores, search.take(beams, width, limits.max_leaves, limits.max_nodes))
        found = search.found()
        nodes = np.array(sorted({*chain.from_iterable(path_to(found.parents, int(beam)) for beam in beams)} - {0}))
        self._search = search
        return Proposal(found, nodes[np.argsort(-found.log_probs[nodes], kind="stable")])


REPLAYED: Mapping[str, Callable[[Backend], Planner]] = {
    "specexec": SpecExecPlanner,
    "uncoupled": lambda draft: SpecExecPlanner(draft, coupling=False),
    "chain": ChainPlanner,
    "beam": lambda draft: BeamPlanner(draft, coupling=False),
}


RULES = {  # most children of a node, replacement
    "leviathan": (1, True),
    "specinfer": (MOST_CHILDREN, True),
    "specinfer-script": (MOST_CHILDREN, False),
    "sequoia": (MOST_CHILDREN, False),
}
METHODS = (*REPLAYED, *RULES)


@dataclass(frozen=True, slots=True)
class Settings:
    methods: list[str]
    budgets: list[int]
    sampling: SamplingParams
    max_tokens: int
    raw: bool

    def __post_init__(self) -> None:
        """
        Raises:
            UsageError: there is no such method.
        """
        for method in self.methods:
            if method not in METHODS:
                raise no_such("method", method, METHODS)


@dataclass(frozen=True, slots=True)
class Problem:
    """
    Attributes:
        question: as asked.
        options: that the figures depend on.
        tokens: of the recorded answer.
        passes: method -> budget -> shape of the tree -> passes that write the answer.
        coverage: "target" or "draft" -> the mean of `rejection.coverage`, for `COVERED`.
        seconds: of this program on processors.
    """

    question: str
    options: dict[str, Any]
    tokens: int
    passes: dict[str, dict[str, dict[str, float]]]
    coverage: dict[str, list[float]]
    seconds: float


def measure(
    backends: Sequence[Backend],
    prompts: Sequence[BenchPrompt],
    out: Path,
    measured: Sequence[Problem],
    kept: Path,
    settings: Settings,
    options: dict[str, Any],
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Problem]:
    """
    Args:
        backends: target and draft.
        prompts: one a problem.
        out: file that gets a line a problem.
        measured: the problems that it has; they are not measured again.
        kept: as for `record`.
        settings: what is measured.
        options: of each problem.
        progress: called with the numbers of problems that are done, and of all.
    """
    done = {one.question: one for one in measured}
    for number, prompt in enumerate(prompts):
        progress(number, len(prompts))
        if prompt.text in done:
            continue
        started, asked, sampling = process_time(), [(prompt.category, prompt.text)], settings.sampling
        [answer] = record(backends[0], asked, kept, settings.max_tokens, sampling=sampling, raw=settings.raw)
        accepted, covered = _rows_of(backends, answer, settings)
        passes = {name: _replayed(name, backends, answer, settings) for name in settings.methods if name in REPLAYED}
        for name in settings.methods:
            if name in RULES:
                each = accepted[RULES[name]]
                passes[name] = {str(budget): _expected(name, budget, each) for budget in settings.budgets}
        seconds = round(process_time() - started, 1)
        done[prompt.text] = Problem(prompt.text, options, len(answer.output_ids), passes, covered, seconds)
        append(out, done[prompt.text])
    progress(len(prompts), len(prompts))
    return [done[prompt.text] for prompt in prompts]


def _replayed(name: str, backends: Sequence[Backend], answer: Recording, settings: Settings) -> dict[str, Any]:
    planner, size, found = REPLAYED[name](backends[1]), backends[0].vocab.size, dict[str, Any]()
    try:
        for budget in settings.budgets:
            run = replay(planner, answer.prompt_ids, answer.output_ids, budget, size, settings.sampling, budget)
            found[str(budget)] = {"": len(run.acceptance_lengths)}
    finally:
        planner.close()
    return found


def _expected(name: str, budget: int, accepted: FloatArray) -> dict[str, float]:
    """Passes for all tokens but the first, which the prompt gives."""
    if name == "sequoia":
        return {"": expected_passes(accepted[1:], *static_tree(accepted.mean(0).tolist(), budget))}
    counts = [1 << power for power in range(min(budget, RULES[name][0]).bit_length())]
    return {f"{n} x {budget // n}": expected_passes(accepted[1:], *stems(n, budget // n)) for n in counts}


def _rows_of(
    backends: Sequence[Backend], answer: Recording, settings: Settings
) -> tuple[dict[tuple[int, bool], FloatArray], dict[str, list[float]]]:
    """
    Returns:
        `acceptance` of every position for each value of `RULES`, and the coverages.
    """
    sampling, start, token_ids = settings.sampling, len(answer.prompt_ids), [*answer.prompt_ids, *answer.output_ids]
    several = replace(sampling, temperature=sampling.temperature or 1.0)  # at 0 all children would be the same token
    rules = {RULES[name] for name in settings.methods if name in RULES}
    accepted, covered = {rule: np.zeros((len(answer.output_ids), rule[0])) for rule in rules}, list[list[list[float]]]()
    for place, (of_target, drafted) in enumerate(zip(*(rows(one, token_ids, start) for one in backends), strict=True)):
        of_draft = np.full(len(of_target), -np.inf, np.float32)
        of_draft[: len(drafted)] = drafted[: len(of_draft)]
        raw = [distribution(row, RAW) for row in (of_target, of_draft)]
        covered.append([coverage(raw[0], row, COVERED) for row in raw])
        p, token = distribution(of_target, sampling), token_ids[start + place]
        for children, replacement in rules if p[token] > 0 else ():  # 0: a tie within rounding
            q = distribution(of_draft, several if children > 1 else sampling)
            ids = np.flatnonzero(p + q)
            flips = coins(sampling.seed, start + place, (max(1, min(DRAWS, NUMBERS // len(ids))), children))
            found = acceptance(p[ids], q[ids], int(np.searchsorted(ids, token)), flips, replacement=replacement)
            accepted[children, replacement][place] = found
    return accepted, dict(zip(("target", "draft"), np.mean(covered, 0).round(4).tolist(), strict=True))


def rows(backend: Backend, token_ids: Sequence[int], start: int) -> Iterator[Float32Array]:
    """The logits for each token from `start` on, valid until the next is taken."""
    session = backend.open()
    try:
        read = prefill(backend, session, token_ids[:start], want_last=True)
        assert read, "an empty session reads the prompt"
        yield read[0].view(read[1])
        while (at := len(session.token_ids)) < len(token_ids) - 1:
            end = min(len(token_ids) - 1, at + most_nodes(backend.capabilities, session.unread_committed))
            nodes = np.arange(end - at, dtype=np.int32)
            [logits] = backend.forward([Work(session, np.array(token_ids[at:end], np.int32), nodes - 1, nodes)])
            yield from (logits.view(node) for node in nodes.tolist())
            session.commit(nodes.tolist())
    finally:
        session.close()


def best(problems: Sequence[Problem], method: str, budget: int) -> tuple[float, str]:
    """
    Returns:
        Tokens per pass with the shape that is best for all problems, and its name.
    """
    runs = [problem.passes[method][str(budget)] for problem in problems]
    passes, shape = min((sum(run[shape] for run in runs), shape) for shape in runs[0])
    return per(sum(problem.tokens - 1 for problem in problems), passes), shape


def curve_tables(problems: Sequence[Problem], settings: Settings) -> str:
    cells = [[best(problems, method, budget) for budget in settings.budgets] for method in settings.methods]
    lines = [
        [method, "replayed" if method in REPLAYED else "expected", *(f"{v:.2f}\n{s}".strip() for v, s in each)]
        for method, each in zip(settings.methods, cells, strict=True)
    ]
    title = f"tokens per pass by budget, {len(problems)} problems; a shape is chains x their length"
    shown = table(title, ("method", "passes", *map(str, settings.budgets)), lines)
    shares = {model: np.mean([problem.coverage[model] for problem in problems], 0) for model in ("target", "draft")}
    covered = [[f"{model}'s best", *(f"{share:.3f}" for share in each)] for model, each in shares.items()]
    return f"{shown}\n{table('probability of the k best tokens', ('k', *map(str, COVERED)), covered)}"


def picture(problems: Sequence[Problem], settings: Settings, title: str, out: Path) -> None:
    """Errors as for `write_picture`; `check_picture` was called before."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for method in settings.methods:
        values = [best(problems, method, budget)[0] for budget in settings.budgets]
        axes.plot(settings.budgets, values, "o-" if method in REPLAYED else "s--", label=method)
    label_axes(axes, "tokens per pass", settings.budgets)
    figure.suptitle(title)
    write_picture(figure, out)
