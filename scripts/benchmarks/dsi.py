"""Seconds of plain decoding, speculative inference (SI) and distributed speculative inference (DSI).

After "Distributed Speculative Inference" (arXiv 2405.14105): T is the seconds of a target pass, t of a draft pass, k
the lookahead, p the acceptance rate. A step ends with the first rejected draft token, after A accepted ones:
P(A = a) = p^a (1 - p). The closed forms are

    SI      min(A, k) + 1 tokens in k t + T
    DSI     A + 1 tokens in min(ceil(A / k) k t + T, (A + 1) T), with at least ceil(T / (k t)) copies of the target

In the paper's own program, no bonus token follows when all draft tokens are accepted, and each step of SI begins with
a pass without a draft.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

TOKENS = 50  # as in the paper
MOST_COPIES = 7
LOOKAHEADS = (1, 5, 10)  # of the paper's Table 2
GRID_LOOKAHEADS = range(1, TOKENS)  # of its Figure 2, which has 1 to 200: longer ones are never best


@dataclass(frozen=True, slots=True)
class Setting:
    """A row of the paper's Tables 2 and 3.

    Attributes:
        target: milliseconds of a target pass.
        draft: milliseconds of a draft pass.
        speedup: SI / DSI, as the paper says.
        first_target: time of the first target pass, in later ones.
        first_draft: time of the first draft pass, in later ones.
    """

    models: str
    texts: str
    target: float
    draft: float
    acceptance: float
    speedup: float
    first_target: float
    first_draft: float


TABLE_2 = (
    Setting("Vicuna-13B, 68M", "CNN-DM", 37.7, 2.5, 0.63, 1.47, 5.36, 1.04),
    Setting("Vicuna-13B, 68M", "Alpaca", 33.3, 2.5, 0.58, 1.41, 1.15, 1.05),
    Setting("Vicuna-7B, 68M", "CNN-DM", 29.4, 2.5, 0.67, 1.29, 4.53, 1.06),
    Setting("Vicuna-7B, 68M", "Alpaca", 26.0, 2.5, 0.59, 1.70, 1.19, 1.06),
    Setting("Starcoder-15B, 168M", "HumanEval", 20.6, 6.8, 0.93, 1.92, 1.35, 1.19),
    Setting("Starcoder-15B, 168M", "MBPP", 21.0, 6.8, 0.90, 1.66, 1.54, 1.20),
    Setting("Phi3-14B, 4B", "HumanEval", 52.1, 34.0, 0.95, 1.41, 1.29, 1.23),
    Setting("Phi3-14B, 4B", "MBPP", 52.2, 34.3, 0.94, 1.37, 1.43, 1.27),
    Setting("Phi3-14B, 4B", "CNN-DM", 52.4, 34.6, 0.93, 1.39, 4.77, 3.88),
    # not in Table 3: as if the first passes took as long as all others
    Setting("Phi3-14B, 4B", "Alpaca", 49.6, 33.4, 0.87, 1.60, 1.0, 1.0),
)

Round = Callable[[float, float, int, int], float]  # T, t, k, A -> seconds in which A + 1 tokens are written


def dsi_round(target: float, draft: float, lookahead: int, right: int) -> float:
    return min(-(-right // lookahead) * lookahead * draft + target, (right + 1) * target)


def dsi_round_as_released(target: float, draft: float, lookahead: int, right: int) -> float:
    return min(-(-(right + 1) // lookahead) * lookahead * draft + target, (right + 1) * target)


def si_round_as_released(target: float, draft: float, lookahead: int, right: int) -> float:
    return target + -(-(right + 1) // lookahead) * (lookahead * draft + target)


def seconds_of(rights: Sequence[int], tokens: int, cost: Callable[[int], float]) -> float:
    spent = 0.0
    for right in rights:
        if tokens <= 0:
            break
        spent += cost(min(right, tokens - 1))
        tokens -= right + 1
    return spent


def expected(acceptance: float, cost: Callable[[int], float], tokens: int = TOKENS) -> float:
    """
    Args:
        acceptance: acceptance rate.
        cost: seconds of a step, by its number of accepted draft tokens.
        tokens: number of tokens to generate.

    Returns:
        Expected seconds.
    """
    costs = np.array([cost(right) for right in range(tokens)])
    powers = acceptance ** np.arange(tokens)
    left = np.zeros(tokens + 1)
    for count in range(1, tokens + 1):
        most = count - 1  # accepted draft tokens that end the sequence
        ends = (1 - acceptance) * powers[:most] @ (costs[:most] + left[count - 1 : 0 : -1])
        left[count] = ends + powers[most] * costs[most]
    return float(left[tokens])


def expected_si(acceptance: float, target: float, draft: float, lookahead: int, tokens: int = TOKENS) -> float:
    chance = np.append((1 - acceptance) * acceptance ** np.arange(lookahead), acceptance**lookahead)
    left = np.zeros(tokens + 1)
    for count in range(1, tokens + 1):
        rest = left[max(0, count - lookahead - 1) : count][::-1]
        left[count] = lookahead * draft + target + chance[: len(rest)] @ rest
    return float(left[tokens])


def best_dsi(
    acceptance: float, target: float, draft: float, lookaheads: Sequence[int], round_: Round = dsi_round
) -> float:
    """
    Returns:
        Expected seconds at the best lookahead for which MOST_COPIES suffice.
    """
    allowed = [lookahead for lookahead in lookaheads if enough(target, draft, lookahead, MOST_COPIES)]
    return min(expected(acceptance, partial(round_, target, draft, lookahead)) for lookahead in allowed)


def enough(target: float, draft: float, lookahead: int, copies: int) -> bool:
    return math.ceil(round(target / (lookahead * draft), 9)) <= copies


def least_lookahead(target: float, draft: float, copies: int) -> int:
    return max(1, math.ceil(round(target / (copies * draft), 9)))


def speedups(setting: Setting) -> tuple[float, float]:
    p, target, draft = setting.acceptance, setting.target, setting.draft
    first = (setting.first_target - 1) * target + (setting.first_draft - 1) * draft
    si = min(expected_si(p, target, draft, k) for k in LOOKAHEADS)
    released = min(expected(p, partial(si_round_as_released, target, draft, k)) for k in LOOKAHEADS)
    dsi, dsi_released = (
        best_dsi(p, target, draft, LOOKAHEADS, round_) for round_ in (dsi_round, dsi_round_as_released)
    )
    return (first + si) / (first + dsi), (first + released) / (first + dsi_released)


@dataclass(frozen=True, slots=True)
class Cell:
    """
    Attributes:
        draft: time of a draft pass, in target passes.
        plain: time of plain decoding, in target passes.
        si: the same of SI.
        dsi: the same of DSI.
    """

    draft: float
    acceptance: float
    plain: float
    si: float
    dsi: float


def figure_2(step: float = 0.05) -> Iterator[Cell]:
    count = round(1 / step)
    shares = [0.01, *(round(i * step, 9) for i in range(1, count)), 0.99]
    for draft in shares:
        for acceptance in shares:
            si = min(expected_si(acceptance, 1.0, draft, lookahead) for lookahead in GRID_LOOKAHEADS)
            dsi = best_dsi(acceptance, 1.0, draft, GRID_LOOKAHEADS)
            yield Cell(draft, acceptance, float(TOKENS), si, dsi)
