"""Recorded text in the place of a target model: measures and calibrates planners that need no model.

At temperature 0 a target's text does not depend on the planner, so walking a recorded answer gives the acceptance
lengths that the target itself would have given. The SSSD paper (section 3.1.3) fits its parameters in this way.
"""

import json
import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import UsageError
from edgespec.loop.backend import Vocab
from edgespec.loop.draft_passes import run_one
from edgespec.loop.passes import fitting
from edgespec.loop.planner import Context, Planner
from edgespec.loop.sampling import Noise, SamplingParams
from edgespec.loop.text import render_chat
from edgespec.loop.tree import Source, only
from edgespec.loop.verify import walk
from edgespec.planners.sssd import Matches, SssdPlanner, features, split

MAX_LEAVES = 256  # llama.cpp's limit

# A step that a source offers: (source, matched length, depth, count, total), and whether it was right.
Step = tuple[int, int, int, int, int, bool]


@dataclass(frozen=True, slots=True)
class Recording:
    """A prompt, and what a model wrote after it."""

    prompt_ids: list[int]
    output_ids: list[int]
    category: str = ""


@dataclass(frozen=True, slots=True)
class Replay:
    """What a planner gained on one recorded text."""

    acceptance_lengths: list[int]  # tokens gained by each pass, bonus included
    plan_seconds: list[float]  # of each pass
    begin_seconds: float
    accept_seconds: list[float]


def read_recordings(path: str | Path, vocab: Vocab, max_tokens: int) -> list[Recording]:
    """Recorded answers: a JSONL file of objects with the texts `prompt` and `output`, perhaps a `category`.

    Files of scripts/check-exact will do, too: of them plain greedy texts are taken, which have `token_ids`.

    Args:
        path: the file.
        vocab: any tokenizer with a chat template.
        max_tokens: longer outputs are cut here, so that a few of them do not outweigh the others.

    Raises:
        UsageError: the file cannot be read, or a line is not such an object.
    """
    recordings = list[Recording]()
    try:
        lines = Path(path).read_text("utf-8").split("\n")
        for line in filter(str.strip, lines):
            record = json.loads(line)
            if record.get("planner", "none") != "none" or record.get("temperature", 0) > 0:
                continue
            prompt, output = itemgetter("prompt", "token_ids" if "token_ids" in record else "output")(record)
            if not (isinstance(prompt, str) and isinstance(output, str | list)):
                raise TypeError("prompt or output is no text")
            prompt_ids = render_chat(vocab, [{"role": "user", "content": prompt}])
            output_ids = (
                output if isinstance(output, list) else vocab.encode(output, add_bos=False, parse_special=False)
            )
            if output_ids:
                category = str(record.get("category", ""))
                recordings.append(Recording(prompt_ids, output_ids[:max_tokens], category))
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UsageError(f"{path}: is not a JSONL file with a prompt and an output on each line: {error}") from error
    return recordings


def measure(planner: Planner, recordings: Iterable[Recording], budget: int) -> tuple[float, float]:
    """Acceptance length over all recordings, and the median time of a plan in seconds."""
    replays = [replay(planner, recording.prompt_ids, recording.output_ids, budget) for recording in recordings]
    lengths = [length for each in replays for length in each.acceptance_lengths]
    return float(np.mean(lengths)), float(np.median([seconds for each in replays for seconds in each.plan_seconds]))


def replay(
    planner: Planner, prompt_ids: Sequence[int], output_ids: Sequence[int], budget: int, vocab_size: int = 1
) -> Replay:
    """Let the planner guess a recorded output, as `generate.generate_tokens` would.

    Args:
        planner: a planner that touches no target.
        prompt_ids: at least one token.
        output_ids: what the target wrote.
        budget: most nodes per tree.
        vocab_size: of the target; a draft model guesses no token beyond it.
    """
    sampling, noise = SamplingParams(), Noise(0, vocab_size)
    token_ids, end = list(prompt_ids), len(prompt_ids) + len(output_ids)
    lengths, plan_seconds, accept_seconds = list[int](), list[float](), list[float]()
    started = perf_counter()
    planner.begin(prompt_ids)
    begin_seconds = perf_counter() - started
    while len(token_ids) < end:
        context = Context(token_ids, len(prompt_ids), sampling, noise, end - len(token_ids) - 1, MAX_LEAVES)
        started = perf_counter()
        proposal = run_one(planner.propose(context, budget))
        tree = only(proposal.tree, fitting(proposal, budget, MAX_LEAVES))
        plan_seconds.append(perf_counter() - started)
        written = output_ids[len(token_ids) - len(prompt_ids) :]
        output = walk(tree, lambda node, accepted, written=written: written[len(accepted)]).output  # type: ignore[misc]
        started = perf_counter()
        planner.observe(output, 0.0)
        accept_seconds.append(perf_counter() - started)
        token_ids.extend(output)
        lengths.append(len(output))
    return Replay(lengths, plan_seconds, begin_seconds, accept_seconds)


def observe(planner: SssdPlanner, prompt_ids: Sequence[int], output_ids: Sequence[int], stride: int) -> Iterable[Step]:
    """Every step the planner's sources offer along a recorded output, and whether it was right.

    Args:
        planner: with its datastore; its calibration is not used.
        prompt_ids: at least one token.
        output_ids: what the target wrote.
        stride: look at every stride-th position.
    """
    planner.begin(prompt_ids)
    for start in range(0, len(output_ids), stride):
        future = output_ids[start : start + planner.depth]
        for group in planner.matches(len(future)):
            yield from _along(group, future)
        planner.observe(output_ids[start : start + stride], 0.0)


def _along(group: Matches, future: Sequence[int]) -> Iterable[Step]:
    source, length, text, places = group
    for depth, right in enumerate(future, 1):
        parts = split(text, places)
        for token, moved in parts.items():
            yield source, length, depth, len(moved), len(places), token == right
        if right not in parts:
            return
        places = parts[right]


def fit(observed: Counter[Step], ridge: float = 20.0) -> dict[Source, list[tuple[float, ...]]]:
    """Weights of `planners.sssd.Calibration`: a logistic regression for each source and matched length.

    Matched lengths with few observations are drawn towards the fit of their source's lengths together.

    Args:
        observed: how often each step was seen.
        ridge: strength of that, in observations.
    """
    lengths = range(max(step[1] for step in observed) + 1)
    weights: dict[Source, list[tuple[float, ...]]] = {}
    for source in sorted({Source(step[0]) for step in observed}):
        mine = {step: times for step, times in observed.items() if step[0] == source}
        common = _logistic(mine, np.zeros(4), 1.0)
        each = [
            _logistic({step: times for step, times in mine.items() if step[1] == length}, common, ridge)
            for length in lengths
        ]
        weights[source] = [tuple(round(float(weight), 3) for weight in row) for row in each]
    return weights


def calibration_module(weights: dict[Source, list[tuple[float, ...]]], origin: str) -> str:
    """The text of `planners/sssd_calibration.py`."""
    lines = [
        '"""How far count ratios can be trusted: see `Calibration` in `sssd.py`. Written by scripts/calibrate-sssd.',
        "",
        *textwrap.wrap(origin, 110, break_long_words=False),
        '"""',
        "",
        "from edgespec.loop.tree import Source",
        "",
        "# For matches of 0, 1, 2, … tokens: constant, and weights of log-odds of the share, log(total), log(depth).",
        "WEIGHTS: dict[Source, list[tuple[float, float, float, float]]] = {",
    ]
    for source, rows in weights.items():
        lines += [f"    Source.{source.name}: [", *(f"        {row}," for row in rows), "    ],"]
    return "\n".join([*lines, "}", ""])


def _logistic(observed: dict[Step, int], prior: NDArray[np.float64], ridge: float) -> NDArray[np.float64]:
    """Newton's method for the likelihood less ridge / 2 * |weights - prior|²; weights [4]."""
    if not observed:
        return prior
    rows = np.array([features(depth, count, total) for _, _, depth, count, total, _ in observed])
    right = np.array([step[5] for step in observed], np.float64)
    times = np.array(list(observed.values()), np.float64)
    weights = prior.copy()
    for _ in range(50):
        chance = 1 / (1 + np.exp(-np.clip(rows @ weights, -30, 30)))
        slope = rows.T @ (times * (right - chance)) - ridge * (weights - prior)
        curve = (rows * (times * chance * (1 - chance))[:, None]).T @ rows + ridge * np.eye(4)
        move = np.linalg.solve(curve, slope)
        weights += move / max(1.0, float(np.abs(move).max()) / 2)  # a long step may overshoot
        if np.abs(move).max() < 1e-6:
            break
    return weights
