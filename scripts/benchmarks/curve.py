"""Tokens per pass against the budget, on recorded texts: SpecExec's Figure 3 with drafts that agree and with rejection.

Methods of `REPLAYED` accept the tokens that the target samples, so their passes over a recorded text are counted. The
text of a method of `RULES` has the target's distribution, so the recorded text may be its text: then
`rejection.acceptance` gives the expected passes.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from time import process_time
from typing import Any, ClassVar

import numpy as np

from edgespec.errors import UsageError, no_such
from edgespec.loop.backend import Backend, Work
from edgespec.loop.draft_passes import DraftSteps
from edgespec.loop.passes import most_nodes, prefill
from edgespec.loop.planner import Context, Planner
from edgespec.loop.sampling import Float32Array, SamplingParams
from edgespec.loop.tree import FloatArray, IntArray, Proposal, path_to, root_only
from edgespec.measure.json_lines import append, resume
from edgespec.measure.pair_report import check_picture, write_picture
from edgespec.measure.recording import record
from edgespec.measure.rejection import acceptance, coins, coverage, expected_passes, probabilities, static_tree, stems
from edgespec.measure.replay import Recording, replay
from edgespec.measure.tables import table
from edgespec.measure.texts import BenchPrompt
from edgespec.planners.chain import ChainPlanner
from edgespec.planners.drafting import ChildScores
from edgespec.planners.search import MOST_DEPTH, Search
from edgespec.planners.specexec import SpecExecPlanner

MOST_CHILDREN = 64  # of a node, with rejection
DRAWS, NUMBERS = 16, 1 << 18  # rejected drafts of a position: so many draws, with at most so many probabilities
COVERED = (1, 2, 4, 8, 16, 32, 64)
RAW = SamplingParams(temperature=1.0)

Shapes = Mapping[str, tuple[IntArray, IntArray]]  # name -> parents, numbers among the siblings


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


@dataclass(frozen=True, slots=True)
class Rule:
    """
    Attributes:
        children: most children of a node.
        replacement: as for `acceptance`.
        shapes: trees for a budget, from the mean `acceptance` of each child.
    """

    children: int
    replacement: bool
    shapes: Callable[[int, Sequence[float]], Shapes]


def _stems(budget: int, rates: Sequence[float]) -> Shapes:
    counts = [1 << power for power in range(MOST_CHILDREN.bit_length()) if 1 << power <= budget]
    return {f"{count} x {budget // count}": stems(count, budget // count) for count in counts}


RULES = {
    "leviathan": Rule(1, True, lambda budget, rates: {"": stems(1, budget)}),
    "specinfer": Rule(MOST_CHILDREN, True, _stems),
    "specinfer-script": Rule(MOST_CHILDREN, False, _stems),
    "sequoia": Rule(MOST_CHILDREN, False, lambda budget, rates: {"": static_tree(rates, budget)}),
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
            UsageError: there is no such method, or a budget is below 1.
        """
        for method in self.methods:
            if method not in METHODS:
                raise no_such("method", method, METHODS)
        if least := [budget for budget in self.budgets if budget < 1]:
            raise UsageError(f"a budget is {least[0]}, but must be at least 1")


@dataclass(frozen=True, slots=True)
class Problem:
    """
    Attributes:
        question: its text.
        options: that the figures depend on.
        tokens: of the recorded text.
        passes: method -> budget -> shape of the tree -> passes that write the text.
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
    models: Sequence[str],
    prompts: Sequence[BenchPrompt],
    out: Path,
    kept: Path,
    settings: Settings,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Problem]:
    """
    Args:
        backends: target and draft.
        models: their names.
        prompts: one a problem.
        out: file of a line a problem; what is there is not measured again.
        kept: as for `record`.
        settings: what is measured.
        progress: called with the numbers of problems that are done, and of all.

    Raises:
        UsageError: `out` holds something else, or was made with other options.
    """
    options = {"models": list(models), **asdict(settings)}
    done = {one.question: one for one in resume(out, Problem)}
    for one in done.values():
        if other := [name for name in options if one.options.get(name) != options[name]]:
            raise UsageError(f"{out}: was made with other {' and '.join(other)}: name another file, or a new one")
    for number, prompt in enumerate(prompts):
        progress(number, len(prompts))
        if prompt.text in done:
            continue
        started, asked, sampling = process_time(), [(prompt.category, prompt.text)], settings.sampling
        [text] = record(backends[0], asked, kept, settings.max_tokens, sampling=sampling, raw=settings.raw)
        accepted, covered = _rows_of(backends, text, settings)
        passes = {name: _replayed(name, backends, text, settings) for name in settings.methods if name in REPLAYED}
        for name, each in accepted.items():
            trees = {str(budget): RULES[name].shapes(budget, each.mean(0).tolist()) for budget in settings.budgets}
            passes[name] = {
                budget: {shape: expected_passes(each, *tree) for shape, tree in shapes.items()}
                for budget, shapes in trees.items()
            }
        seconds = round(process_time() - started, 1)
        done[prompt.text] = Problem(prompt.text, options, len(text.output_ids), passes, covered, seconds)
        append(out, done[prompt.text])
    progress(len(prompts), len(prompts))
    return [done[prompt.text] for prompt in prompts]


def _replayed(name: str, backends: Sequence[Backend], text: Recording, settings: Settings) -> dict[str, Any]:
    planner, size, found = REPLAYED[name](backends[1]), backends[0].vocab.size, dict[str, Any]()
    try:
        for budget in settings.budgets:
            run = replay(planner, text.prompt_ids, text.output_ids, budget, size, settings.sampling, budget)
            found[str(budget)] = {"": len(run.acceptance_lengths)}
    finally:
        planner.close()
    return found


def _rows_of(
    backends: Sequence[Backend], text: Recording, settings: Settings
) -> tuple[dict[str, FloatArray], dict[str, list[float]]]:
    """
    Returns:
        `acceptance` of every position by rule, and the coverages.
    """
    sampling, start, token_ids = settings.sampling, len(text.prompt_ids), [*text.prompt_ids, *text.output_ids]
    many = replace(sampling, temperature=sampling.temperature or 1.0)  # at 0 all children would be the same token
    accepted = {
        name: np.zeros((len(text.output_ids), RULES[name].children)) for name in settings.methods if name in RULES
    }
    covered = list[list[list[float]]]()
    both_rows = zip(*(rows(backend, token_ids, start) for backend in backends), strict=True)
    for place, (of_target, of_draft) in enumerate(both_rows):
        same = np.full(len(of_target), -np.inf, np.float32)
        same[: len(of_draft)] = of_draft[: len(same)]
        raw = [probabilities(row, RAW) for row in (of_target, same)]
        covered.append([coverage(raw[0], row, COVERED) for row in raw])
        p, token = probabilities(of_target, sampling), token_ids[start + place]
        for name in accepted if p[token] > 0 else ():  # 0: a tie within rounding
            rule = RULES[name]
            q = probabilities(same, many if rule.children > 1 else sampling)
            ids = np.flatnonzero(p + q)
            flips = coins(sampling.seed, start + place, (max(1, min(DRAWS, NUMBERS // len(ids))), rule.children))
            at = int(np.searchsorted(ids, token))
            accepted[name][place] = acceptance(p[ids], q[ids], at, flips, replacement=rule.replacement)
    means = np.mean(covered, 0).round(4).tolist()
    return accepted, dict(zip(("target", "draft"), means, strict=True))


def rows(backend: Backend, token_ids: Sequence[int], start: int) -> Iterator[Float32Array]:
    """The logits for each token from `start` on, valid until the next is taken."""
    session = backend.open()
    try:
        prefill(backend, session, token_ids[: start - 1])
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
    return sum(problem.tokens for problem in problems) / passes, shape


def curve_tables(problems: Sequence[Problem], settings: Settings) -> str:
    cells = [[best(problems, method, budget) for budget in settings.budgets] for method in settings.methods]
    lines = [
        [method, "replayed" if method in REPLAYED else "expected", *(f"{v:.2f}\n{s}".strip() for v, s in each)]
        for method, each in zip(settings.methods, cells, strict=True)
    ]
    title = f"tokens per pass by budget, {len(problems)} problems; shapes are chains x length"
    shown = table(title, ("method", "passes", *map(str, settings.budgets)), lines)
    shares = {model: np.mean([problem.coverage[model] for problem in problems], 0) for model in ("target", "draft")}
    covered = [[f"{model}'s best", *(f"{share:.3f}" for share in each)] for model, each in shares.items()]
    return f"{shown}\n{table('probability of the k best tokens', ('k', *map(str, COVERED)), covered)}"


def picture(problems: Sequence[Problem], settings: Settings, title: str, out: Path) -> None:
    """Errors as for `check_picture` and `write_picture`."""
    check_picture(out)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for method in settings.methods:
        values = [best(problems, method, budget)[0] for budget in settings.budgets]
        axes.plot(settings.budgets, values, "o-" if method in REPLAYED else "s--", label=method)
    axes.set(xlabel="draft tokens per pass", ylabel="tokens per pass", xscale="log", title=title)
    axes.set_xticks(settings.budgets, [str(budget) for budget in settings.budgets])
    axes.set_ylim(bottom=0)
    axes.legend()
    write_picture(figure, out)
