"""Compare a run with plain decoding: equal, a tie, or a bug.

Kernels round differently for passes of different shapes, so two correct runs may differ where the best two tokens score
the same within rounding: a tie. A backend bounds the change of a logit l (`Capabilities.logit_tolerance`):

    raw logit           lies in [l - tolerance, l + tolerance]
    adjusted logit      lies in [low, high], because bias and penalties are monotone
    a token can win     if it scores best with its logit at `high` and all others at `low`,
                        except those that top-k, top-p or min-p may remove

With such a filter, two things must be possible, each in its own best case: the token stays (`_can_be_in`), and all
tokens that always outscore it are removed (`_can_be_out`). So a tie is always found; rarely, a bug is taken for a tie.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from edgespec.loop.backend import Backend, Work
from edgespec.loop.passes import check_room, common_prefix, prefill
from edgespec.loop.sampling import Float32Array, Noise, SamplingParams, Scores, adjust, log_sum_exp, sample, scores

ROUNDING = 1e-6  # of a sum of probabilities, here or in sampling.py


@dataclass(frozen=True, slots=True)
class Divergence:
    """
    Attributes:
        index: of the token in the output.
        position: of the token in the sequence, prompt included.
        plain_token: None: plain decoding had already ended.
        other_token: None: the other run had already ended.
        gap: score of `plain_token` less that of `other_token`, noise included, in logits; inf if one of them is None.
        tolerance: largest difference of a logit between the two runs.
        tie: True if rounding explains it.
    """

    index: int
    position: int
    plain_token: int | None
    other_token: int | None
    gap: float
    tolerance: float
    tie: bool

    def __str__(self) -> str:
        verdict = "a tie" if self.tie else "NOT a tie"
        return (
            f"output token {self.index} (position {self.position}): plain decoding has {self.plain_token}, "
            f"the other run {self.other_token}; gap {self.gap:.4f} logits, tolerance {self.tolerance}: {verdict}"
        )


def first_divergence(plain: Sequence[int], other: Sequence[int]) -> int | None:
    """Index of the first token that differs, or the length of the shorter list; None if both are equal."""
    same = common_prefix(plain, other)
    return None if same == len(plain) == len(other) else same


def explain(
    backend: Backend,
    prompt_ids: Sequence[int],
    plain: Sequence[int],
    other: Sequence[int],
    params: SamplingParams,
    tolerance: float | None = None,
) -> Divergence | None:
    """Find the first divergence of two runs, with the logits of plain decoding, which is repeated up to it.

    Args:
        backend: the target; one of its sessions must be free.
        prompt_ids: the prompt.
        plain: output of the planner `none`, with any stop token.
        other: output of another planner, or of another engine with the same model.
        params: the sampling of both runs.
        tolerance: largest difference of a logit between the two runs; default: the backend's. Of two engines: the sum.

    Returns:
        None if both runs are equal.
    """
    tolerance = backend.capabilities.logit_tolerance if tolerance is None else tolerance
    index = first_divergence(plain, other)
    if index is None:
        return None
    if index == min(len(plain), len(other)):
        ended = plain[index] if index < len(plain) else None, other[index] if index < len(other) else None
        return Divergence(index, len(prompt_ids) + index, *ended, math.inf, tolerance, tie=False)
    for logits in plain_logits(backend, prompt_ids, plain[: index + 1]):
        last = logits
    return _divergence(backend, last, prompt_ids, plain[:index], plain[index], other[index], params, tolerance)


def replay(
    backend: Backend,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    params: SamplingParams,
    tolerance: float | None = None,
) -> list[Divergence]:
    """Find all tokens of `output_ids` that plain decoding would not have sampled after the tokens before them.

    Arguments are as for `explain`, which finds only the first.
    """
    tolerance = backend.capabilities.logit_tolerance if tolerance is None else tolerance
    noise, found = Noise(params.seed, backend.vocab.size), []
    for i, logits in enumerate(plain_logits(backend, prompt_ids, output_ids)):
        output = output_ids[:i]
        token = sample(logits, len(prompt_ids) + i, params, noise, prompt_ids, output)
        if token != output_ids[i]:
            found.append(_divergence(backend, logits, prompt_ids, output, token, output_ids[i], params, tolerance))
    return found


def plain_logits(backend: Backend, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> Iterator[Float32Array]:
    """Yields the logits [V] from which plain decoding samples each of `output_ids`."""
    check_room(backend, len(prompt_ids))
    session = backend.open()
    try:
        read = prefill(backend, session, prompt_ids, want_last=True)
        assert read, "an empty session reads the prompt"
        yield read[0].row(read[1])
        for token in output_ids[:-1]:
            one = np.array([token], np.int32)
            work = Work(session, one, np.array([-1], np.int32), np.array([0], np.int32))
            yield backend.forward([work])[0].row(0)
            session.commit([0])
    finally:
        session.close()


def _divergence(
    backend: Backend,
    logits: Float32Array,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    plain_token: int,
    other_token: int,
    params: SamplingParams,
    tolerance: float,
) -> Divergence:
    position = len(prompt_ids) + len(output_ids)
    noise = Noise(params.seed, backend.vocab.size)
    texts = {"prompt_ids": prompt_ids, "output_ids": output_ids}
    tie = is_tie(logits, plain_token, other_token, position, params, noise, tolerance, **texts)
    values = _scores(adjust(logits, params, prompt_ids, output_ids), position, params, noise)
    gap = float(values[plain_token] - values[other_token]) * (params.temperature or 1.0)
    return Divergence(len(output_ids), position, plain_token, other_token, gap, tolerance, tie)


def is_tie(
    plain_logits: Float32Array,
    plain_token: int,
    other_token: int,
    position: int,
    params: SamplingParams,
    noise: Noise,
    tolerance: float,
    *,
    prompt_ids: ArrayLike = (),
    output_ids: Sequence[int] = (),
) -> bool:
    """
    Args:
        plain_logits: [V], of plain decoding.
        plain_token: the token that plain decoding sampled from them.
        other_token: the other run's token at this position.
        position: of the token in the sequence.
        params: of the sampling.
        noise: of both runs.
        tolerance: largest difference of a logit.
        prompt_ids: for the penalties.
        output_ids: before this token, for the penalties.

    Returns:
        True if, with logits within `tolerance` of `plain_logits`, `sampling.sample` can choose either token.
    """
    low = adjust(plain_logits - np.float32(tolerance), params, prompt_ids, output_ids)
    high = adjust(plain_logits + np.float32(tolerance), params, prompt_ids, output_ids)
    best, worst = _scores(high, position, params, noise), _scores(low, position, params, noise)
    return all(_can_win(token, low, high, best, worst, params) for token in (plain_token, other_token))


def _scores(adjusted: Float32Array, position: int, params: SamplingParams, noise: Noise) -> Scores:
    if params.temperature == 0:
        return adjusted.astype(np.float64)
    return scores(adjusted, params, noise.row(position)[: len(adjusted)])


def _can_win(
    token: int, low: Float32Array, high: Float32Array, best: Scores, worst: Scores, params: SamplingParams
) -> bool:
    stronger = worst > best[token]  # always outscore the token, so filters must remove them
    if params.temperature == 0:
        return not stronger.any()
    return _can_be_in(token, low, high, params) and (
        not stronger.any() or _can_be_out(float(low[stronger].max()), float(high[token]), stronger, low, high, params)
    )


def _can_be_in(token: int, low: Float32Array, high: Float32Array, params: SamplingParams) -> bool:
    above = low > high[token]
    places = params.top_k or len(low)
    if np.count_nonzero(above) >= places:
        return False
    if params.top_p < 1 and above.any():
        rest = np.sort(high[~above])[::-1][: places - np.count_nonzero(above)]
        if _share(low[above], rest) >= params.top_p + ROUNDING:
            return False
    return params.min_p == 0 or bool(high[token] >= low.max() + math.log(params.min_p))


def _can_be_out(
    level: float,
    limit: float,
    stronger: NDArray[np.bool_],
    low: Float32Array,
    high: Float32Array,
    params: SamplingParams,
) -> bool:
    """
    Args:
        level: highest of the least logits of `stronger`.
        limit: highest logit of the token that must stay.
        stronger: tokens that must be removed, [V].
        low: least adjusted logits.
        high: highest adjusted logits.
        params: of the filters.

    Returns:
        True if filters can remove all stronger tokens. They cut the descending logits at one point. The highest
        stronger token lies at `level` at least, and only tokens that are not stronger can lie above it.
    """
    if level > limit:
        return False
    above = ~stronger & (high >= level)
    places = params.top_k or len(low)
    if np.count_nonzero(above) >= places:
        return True
    if params.top_p < 1 and above.any():
        rest = np.sort(low[~above])[::-1][: places - np.count_nonzero(above)]
        if _share(high[above], rest) >= params.top_p - ROUNDING:
            return True
    return params.min_p > 0 and bool(above.any() and level < high[above].max() + math.log(params.min_p))


def _share(part: Float32Array, rest: Float32Array) -> float:
    return 1 / (1 + math.exp(min(log_sum_exp(rest) - log_sum_exp(part), 700.0)))
