"""Quality and speed of approximate methods: problems whose answers can be checked, paired with exact answers."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from math import comb
from pathlib import Path
from typing import Any

import click

from benchmarks.options import PATH, asking
from benchmarks.problems import Problem, read_problems
from benchmarks.turns import as_they_end
from edgespec.cli.terminal import Bars
from edgespec.loading.approximate import find_approximate
from edgespec.loading.asked import MOST_PARALLEL
from edgespec.loop.text import user_messages
from edgespec.machine.files import check_out
from edgespec.measure.bench import per
from edgespec.measure.json_lines import append, resume
from edgespec.measure.tables import table
from edgespec.model import Model, load
from edgespec.scheduler.events import GenerationResult

EXACT = "exact"


@dataclass(frozen=True, slots=True)
class Answer:
    """
    Attributes:
        problem: its name.
        method: EXACT, or as for `edgespec.load`.
        options: that the answer depends on, and where its seconds come from.
        right: its result is right, or its code passes the test.
        passes: of the target.
        seconds: of decoding; shared by the problems of a batch.
    """

    problem: str
    method: str
    options: dict[str, Any]
    right: bool
    tokens: int
    passes: int
    seconds: float
    text: str


def measure(
    methods: Sequence[str], problems: Sequence[Problem], out: Path, settings: dict[str, Any], bars: Bars
) -> dict[str, dict[str, Answer]]:
    """
    Args:
        methods: EXACT, and others as for `edgespec.load`.
        problems: to be answered.
        out: file that gets a line an answer; those that it has are not asked for again.
        settings: of all answers, as the command has them.
        bars: shows what is done.

    Returns:
        Answers by method and problem.

    Raises:
        UsageError: `out` was made with other settings.
    """
    names = {name: Path(settings[name] or "").name for name in ("target", "draft")}
    options = dict(sorted((settings | names).items()))
    done = {(one.method, one.problem): one for one in resume(out, Answer, options)}
    wanted = [(method, problem.name) for method in methods for problem in problems]
    for method in methods:
        bars.update("answering", sum(key in done for key in wanted), len(wanted))
        if not (asked := [problem for problem in problems if (method, problem.name) not in done]):
            continue
        with (
            ThreadPoolExecutor(settings["batch"]) as pool,
            _loaded(settings, method, bars.say) as model,
        ):  # closed first
            for problem, result in as_they_end(pool, partial(_answer, model, settings), asked):
                stats, right = result.stats, problem.is_right(result.text)
                figures = right, stats.tokens, stats.passes, round(stats.seconds, 3), result.text
                done[method, problem.name] = answer = Answer(problem.name, method, options, *figures)
                append(out, answer)
                bars.update("answering", sum(key in done for key in wanted), len(wanted))
    return {method: {one.name: done[method, one.name] for one in problems} for method in methods}


def _loaded(settings: dict[str, Any], method: str, say: Callable[[str], None]) -> Model:
    """Its trees do not depend on measured times, so that tokens per pass are repeatable."""
    drafting = {"budget": settings["budget"]} if settings["budget"] else {"planner": "none"}
    options: dict[str, Any] = {
        "draft": settings["draft"], "context_length": settings["ctx"], "memory": settings["memory"], "exact": "off",
        "parallel": settings["batch"], "say": say, "approximate": None if method == EXACT else method, **drafting,
    }  # fmt: skip
    return load(settings["target"], **options)


def _answer(model: Model, settings: dict[str, Any], problem: Problem) -> GenerationResult:
    """A problem's seed is its number."""
    sampling = {name: settings[name] for name in ("temperature", "top_p", "max_tokens")}
    return model.generate(user_messages(problem.question), seed=problem.number, **sampling)


def mcnemar(lost: int, won: int) -> float:
    """The probability that chance parts as many pairs as unevenly, by the exact test."""
    count = lost + won
    return min(1.0, 2 * sum(comb(count, k) for k in range(min(lost, won) + 1)) / float(2**count))


def quality_table(answers: Mapping[str, Mapping[str, Answer]], *, single: bool) -> str:
    exact = answers[EXACT]
    lines = [list(_line(method, found, exact, single=single)) for method, found in answers.items()]
    headings = ("method", "right", "lost, won", "McNemar's p", "tokens per pass", "x exact", "tokens/s")
    return table(f"{len(exact)} problems, compared with their exact answers", headings, lines)


def _line(method: str, found: Mapping[str, Answer], exact: Mapping[str, Answer], *, single: bool) -> Iterator[str]:
    pairs = [(exact[name].right, one.right) for name, one in found.items()]
    lost, won = pairs.count((True, False)), pairs.count((False, True))
    length, usual = _length(found), _length(exact)
    yield from (method, f"{100 * sum(one.right for one in found.values()) / len(found):.1f} %")
    yield from (f"{lost}, {won}", f"{mcnemar(lost, won):.3f}", f"{length:.2f}", f"{per(length, usual):.2f}")
    speed = per(_gained(found), sum(one.seconds for one in found.values()))
    yield f"{speed:.2f}" if single and speed else "–"


def _length(found: Mapping[str, Answer]) -> float:
    return per(_gained(found), sum(one.passes for one in found.values()))


def _gained(found: Mapping[str, Answer]) -> int:
    """Tokens that passes gave: the prompt gives the first of each answer."""
    return sum(one.tokens - 1 for one in found.values())


@click.command(
    epilog="""\b
Examples:
  scripts/bench accuracy big.gguf gsm8k_dev.jsonl out.jsonl --draft small.gguf --approximate cascade:0.5
  scripts/bench accuracy big gsm8k_dev.jsonl out.jsonl --draft small --approximate sparse-attention:0.99"""
)
@click.argument("target")
@click.argument("problems", type=PATH)
@click.argument("out", metavar="OUT.jsonl", type=PATH)
@click.option("--draft", help="As for run.")
@click.option("--approximate", "methods", metavar="NAME[:VALUE]", multiple=True, help="As for run; repeatable.")
@asking(None, 400)
@click.option("--budget", type=click.IntRange(0), default=16, help="Draft tokens per pass; 0: plain decoding.")
@click.option("--batch", type=click.IntRange(1, MOST_PARALLEL), default=1, help="Problems answered at once.")
@click.option("--memory", metavar="SIZE", help="As for run.")
@click.option("--ctx", type=int, default=1536, help="Context length in tokens.")
def command(problems: Path, out: Path, methods: tuple[str, ...], limit: int | None, **settings: Any) -> None:
    """What approximate methods cost in quality.

    TARGET answers PROBLEMS (GSM8K or HumanEval) exactly and by each --approximate; OUT gets a line an answer, and a run
    goes on where it ends. Code of answers runs in child processes with limits. Trees do not depend on measured times,
    so tokens per pass are repeatable; tokens/s are shown with a --batch of 1.
    """
    check_out(out, b"", "a file")
    asked = read_problems(problems, limit)
    for name in methods:
        find_approximate(name)
    with Bars() as bars:
        answers = measure([EXACT, *dict.fromkeys(methods)], asked, out, settings, bars)
    click.echo(quality_table(answers, single=settings["batch"] == 1))
