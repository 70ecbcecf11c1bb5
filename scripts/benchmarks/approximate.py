"""Quality and speed of approximate methods: problems with answers that can be checked, paired with exact answers.

Rules are those of "Faster Cascades via Speculative Decoding" (arXiv 2405.19261), by the equations of its authors'
notebook (google-research/speculative_cascades). Code of an answer runs in a child process (`runs`).
"""

import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from math import comb
from pathlib import Path
from secrets import token_hex
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks.problems import last_number, numbers_in, read_records
from edgespec.errors import no_such
from edgespec.lab.cascade import Allowed, CascadePlanner, Rule, token_v3
from edgespec.loop.backend import Backend
from edgespec.loop.sampling import Float32Array, SamplingParams, Scores, distribution
from edgespec.loop.text import user_messages
from edgespec.measure.bench import per
from edgespec.measure.json_lines import append
from edgespec.measure.tables import table
from edgespec.model import Model
from edgespec.planners.choice import make_planner
from edgespec.scheduler import drive
from edgespec.scheduler.requests import GenerationResult

SECONDS = 10  # of processor time for the code of an answer
BLOCK = re.compile(r"```[^\n`]*\n(.*?)(?:```|$)", re.DOTALL)
RAW = SamplingParams(temperature=1.0)
EXACT = "exact"


def raw(logits: Float32Array) -> Scores:
    return distribution(logits, RAW)


def all_or_none(logits: Float32Array, of_draft: bool) -> Allowed:
    return np.full(len(logits), of_draft)


def difference(p: Float32Array, q: Float32Array, sampling: SamplingParams) -> float:
    """Total variation of the two distributions."""
    return float(np.maximum(distribution(q, sampling) - distribution(p, sampling), 0).sum())


RULES: Mapping[str, Rule] = {
    "v3": token_v3,
    "v2": lambda p, q, alpha, sampling: raw(p) >= raw(p).max() - alpha,
    "v1": lambda p, q, alpha, sampling: raw(q) >= raw(p).max() - alpha,
    "chow": lambda p, q, alpha, sampling: all_or_none(p, raw(q).max() >= 1 - alpha),
    "diff": lambda p, q, alpha, sampling: all_or_none(p, raw(q).max() >= raw(p).max() - alpha),
    "opt": lambda p, q, alpha, sampling: all_or_none(
        p, raw(q).max() >= raw(p).max() - alpha * difference(p, q, sampling)
    ),
}


@dataclass(frozen=True, slots=True)
class Problem:
    """
    Attributes:
        number: its place in the file.
        name: it, in short.
        question: what the model is asked.
        is_right: checks its answer.
    """

    number: int
    name: str
    question: str
    is_right: Callable[[str], bool]


def read_problems(path: Path, limit: int | None) -> list[Problem]:
    """The problems of GSM8K or HumanEval, `limit` of them evenly spaced.

    Raises:
        UsageError: the file has others, or cannot be read.
    """
    return read_records(path, limit, _problem, "lines of GSM8K (question, answer) or HumanEval (prompt, test)")


def _problem(number: int, record: dict[str, Any]) -> Problem:
    coding = "entry_point" in record
    for name in ("task_id", "entry_point", "prompt", "test") if coding else ("question", "answer"):
        record[name].encode()  # fails here if a field is missing or no text, and not after the first answer
    if coding:
        question = f"Complete this function. Answer with the whole function.\n```python\n{record['prompt']}```"
        return Problem(number, record["task_id"], question, lambda text: runs(program(record, text)))
    result = numbers_in(record["answer"].rpartition("####")[2])[-1]
    question = f"{record['question']}\nReason step by step, and end with #### and the result as a number."
    return Problem(number, record["question"], question, lambda text: _result(text) == result)


def _result(text: str) -> Decimal | None:
    """The first number after the last "####", else the last number."""
    marked = numbers_in(text.rpartition("####")[2]) if "####" in text else []
    return marked[0] if marked else last_number(text)


def program(record: Mapping[str, str], answer: str) -> str:
    """The function of an answer, whose prompt has its imports, and HumanEval's test of it."""
    block = BLOCK.search(answer)
    code = block[1] if block else answer
    start = record["prompt"] + ("" if f"def {record['entry_point']}" not in code else "    pass\n\n")
    return f"{start}{code}\n\n{record['test']}\n\ncheck({record['entry_point']})\n"


# The hook is no wall against a program that wants out, but stops what a model writes by chance.
GUARD = """
import os, resource, sys
for name, most in (("CPU", int(sys.argv[1])), ("AS", 2 << 30), ("FSIZE", 0), ("NOFILE", 64), ("CORE", 0)):
    try:
        resource.setrlimit(getattr(resource, "RLIMIT_" + name), (most, most))
    except (OSError, ValueError, AttributeError):  # a Mac does not limit addresses
        pass
text, READS = sys.stdin.read(), ("listdir", "scandir", "walk", "fwalk")
secret = sys.argv.pop()
result, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
os.dup2(nowhere, 1), os.dup2(nowhere, 2)  # what code prints is not kept
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
def guard(event, arguments):
    kind, _, name = event.partition(".")
    writes = event == "open" and arguments[2] & WRITES  # the mode is None for os.open
    if writes or kind in ("socket", "subprocess", "ctypes", "shutil") or (kind == "os" and name not in READS):
        raise PermissionError(event)
sys.addaudithook(guard)
exec(compile(text, "answer", "exec"), {"__name__": "answer"})
os.write(result, secret.encode())
"""


def runs(code: str, seconds: int = SECONDS) -> bool:
    """Run code in a child process with resource limits, without network, processes or files.

    Args:
        code: a program.
        seconds: most processor time.

    Returns:
        False: it raised something, ended early, or took too long.
    """
    secret = token_hex()  # printed at the end, so code that ends early does not pass
    with TemporaryDirectory() as folder:
        try:
            done = subprocess.run(
                [sys.executable, "-I", "-c", GUARD, str(seconds), secret], input=code, capture_output=True, text=True,
                cwd=folder, timeout=6 * seconds, env={}, check=False,
            )  # fmt: skip
        except (subprocess.TimeoutExpired, UnicodeError):
            return False
    return done.returncode == 0 and done.stdout == secret


@dataclass(frozen=True, slots=True)
class Answer:
    """
    Attributes:
        problem: its name.
        rule: one of `RULES`, or EXACT.
        alpha: 0 for EXACT.
        options: that the answer depends on, and where its seconds come from.
        right: its result is right, or its code passes the test.
        passes: of the target.
        seconds: of decoding; shared by the problems of a batch.
    """

    problem: str
    rule: str
    alpha: float
    options: dict[str, Any]
    right: bool
    tokens: int
    passes: int
    seconds: float
    text: str

    @property
    def variant(self) -> tuple[str, float]:
        return self.rule, self.alpha


@dataclass(frozen=True, slots=True)
class Settings:
    """
    Attributes:
        variants: rules and their alphas.
        sampling: of all answers; a problem's seed is this one plus its number.
        budget: draft tokens of a pass; 0: plain decoding.
        batch: most problems that are answered at once.
    """

    variants: list[tuple[str, float]]
    sampling: SamplingParams
    max_tokens: int
    budget: int
    batch: int


def read_variants(rules: str, alphas: Sequence[float]) -> list[tuple[str, float]]:
    """
    Raises:
        UsageError: there is no such rule.
    """
    names = [name.strip() for name in rules.split(",")]
    for name in names:
        if name not in RULES:
            raise no_such("rule", name, RULES)
    return [(EXACT, 0.0), *((name, alpha) for name in names for alpha in alphas if alpha)]


def measure(
    backends: Sequence[Backend],
    problems: Sequence[Problem],
    out: Path,
    answered: Sequence[Answer],
    options: dict[str, Any],
    settings: Settings,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Answer]:
    """
    Args:
        backends: target and draft, the draft for two sessions of each problem of a batch.
        problems: to be answered.
        out: file that gets a line an answer.
        answered: the answers that it has; they are not asked for again.
        options: that answers depend on, besides the settings.
        settings: what is measured.
        progress: called with the numbers of answers that are there, and of all.
    """
    done = {(one.problem, *one.variant): one for one in answered}
    wanted = [(problem.name, *variant) for problem in problems for variant in settings.variants]
    progress(sum(key in done for key in wanted), len(wanted))
    for variant in settings.variants:
        asked = [problem for problem in problems if (problem.name, *variant) not in done]
        for problem, result in _results(backends, asked, variant, settings):
            stats, right = result.stats, problem.is_right(result.text)
            seconds = round(stats.seconds, 3)
            answer = Answer(
                problem.name, *variant, options, right, stats.tokens, stats.passes, seconds, result.text
            )  # fmt: skip
            done[problem.name, *variant] = answer
            append(out, answer)
            progress(sum(key in done for key in wanted), len(wanted))
    return [done[key] for key in wanted]


def _results(
    backends: Sequence[Backend], asked: Sequence[Problem], variant: tuple[str, float], settings: Settings
) -> Iterator[tuple[Problem, GenerationResult]]:
    """Each problem with its answer, as answers end."""
    if not asked:
        return
    rule, alpha = variant
    lanes, usual = min(settings.batch, len(asked)), "specexec" if settings.budget else "none"
    planners = [make_planner(usual, backends, sequences=lanes) for _ in range(lanes)]
    if rule != EXACT:
        planners = [CascadePlanner(planner, backends[1], alpha, RULES[rule]) for planner in planners]
    with Model(backends[0], planners, budget=settings.budget or 1, sampling=settings.sampling) as model:
        requests = [
            model.request(
                user_messages(problem.question), max_tokens=settings.max_tokens,
                seed=settings.sampling.seed + problem.number,
            )
            for problem in asked
        ]  # fmt: skip
        for number, result in drive.results_as_they_end(model.scheduler, requests):
            yield asked[number], result


def mcnemar(lost: int, won: int) -> float:
    """The probability that chance parts as many pairs as unevenly, by the exact test."""
    count = lost + won
    return min(1.0, 2 * sum(comb(count, k) for k in range(min(lost, won) + 1)) / float(2**count))


def quality_table(answers: Sequence[Answer], settings: Settings) -> str:
    by_variant = {
        variant: {one.problem: one for one in answers if one.variant == variant} for variant in settings.variants
    }
    exact = by_variant[EXACT, 0.0]
    lines = [list(_line(found, exact, single=settings.batch == 1)) for found in by_variant.values()]
    headings = ("rule", "alpha", "right", "lost, won", "McNemar's p", "tokens per pass", "x exact", "tokens/s")
    return table(f"{len(exact)} problems, compared with their exact answers", headings, lines)


def _line(found: Mapping[str, Answer], exact: Mapping[str, Answer], *, single: bool) -> Iterator[str]:
    first, *_ = found.values()
    pairs = [(exact[name].right, one.right) for name, one in found.items()]
    lost, won = pairs.count((True, False)), pairs.count((False, True))
    length, usual = _length(found), _length(exact)
    yield from (first.rule, f"{first.alpha:g}", f"{100 * sum(one.right for one in found.values()) / len(found):.1f} %")
    yield from (f"{lost}, {won}", f"{mcnemar(lost, won):.3f}", f"{length:.2f}", f"{per(length, usual):.2f}")
    speed = per(_gained(found), sum(one.seconds for one in found.values()))
    yield f"{speed:.2f}" if single and speed else "–"


def _length(found: Mapping[str, Answer]) -> float:
    return per(_gained(found), sum(one.passes for one in found.values()))


def _gained(found: Mapping[str, Answer]) -> int:
    """Tokens that passes gave: the prompt gives the first of each answer."""
    return sum(one.tokens - 1 for one in found.values())
