"""From logits to a token, with noise that belongs to the position.

The token at absolute position t is

    argmax( warped_logits / T + gumbel(seed, t) )        (Gumbel-max: an exact sample of the softmax)

where gumbel(seed, t) comes from a counter-based generator keyed by the seed and the position; T = 0 is plain argmax.
Nothing else in the program draws random numbers, so the output cannot depend on drafts or on the shape of passes.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from edgespec.errors import ModelError, check_number, check_whole, must_be

Float32Array = NDArray[np.float32]
IdArray = NDArray[np.int64]
Scores = NDArray[np.float64]

MOST_BIAS = 1e30  # logits with larger ones could become infinite in float32
LEAST_TEMPERATURE = 1e-30  # logits divided by less could become infinite in float64, so that the best ones are equal
_COLUMN = 64  # values of a block in `top_ids`
_PHILOX = 8  # 32-bit numbers that Philox makes together
_FEW = 1024  # as many numbers are drawn in the time in which one block is found
_EXCESS = 4.0  # `Noise.at_most` is at most 3.14 above `Noise.row`; the rest is for rounding
_OUT = np.float32(1e9)  # moves a token far below the best one, which is always a candidate
_MASS_ERROR = 1e-4  # of probabilities summed in float32, with room to spare
_CACHED_POSITIONS = 64  # noise rows kept: more than a tree is deep


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Options of sampling, applied in llama.cpp's order: bias, penalties, top-k, top-p, min-p, temperature.

    Attributes:
        temperature: divides the logits; 0: greedy.
        top_k: keep the k best tokens; 0: all.
        top_p: keep the smallest set whose probability reaches `top_p`.
        min_p: keep tokens at least `min_p` times as probable as the best.
        repetition_penalty: divides positive and multiplies negative logits of tokens in prompt or output.
        presence_penalty: as OpenAI's, subtracted once for a token in the output.
        frequency_penalty: subtracted for each occurrence in the output.
        logit_bias: token id -> added to its logit.
        seed: of the noise.

    Raises:
        UsageError: a value is out of its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0

    def __post_init__(self) -> None:
        for name, good, right in _RANGES:
            object.__setattr__(self, name, check_number(name, getattr(self, name), good, right))
        for name, high in (("top_k", None), ("seed", 2**64 - 1)):
            object.__setattr__(self, name, check_whole(name, getattr(self, name), 0, high))
        if not isinstance(self.logit_bias, Mapping):
            raise must_be("logit_bias", self.logit_bias, "a mapping from token ids to numbers")
        bias = {
            check_whole("a token id in logit_bias", token, 0, 2**31 - 1): check_number(
                f"logit_bias of {token}", value, lambda bias: bias < MOST_BIAS, f"below {MOST_BIAS:g}"
            )
            for token, value in self.logit_bias.items()
        }
        object.__setattr__(self, "logit_bias", bias)

    def changed(self, **values: float) -> "SamplingParams":
        """With other values, which are right; nothing is checked again, since there may be a bias of each token."""
        found = object.__new__(SamplingParams)
        for one in fields(self):
            object.__setattr__(found, one.name, values.get(one.name, getattr(self, one.name)))
        return found

    @property
    def has_penalties(self) -> bool:
        """True if the logits depend on the tokens so far."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


_RANGES: Sequence[tuple[str, Callable[[float], bool], str]] = [
    ("temperature", lambda value: 0 <= value < math.inf, "at least 0"),
    ("top_p", lambda value: 0 < value <= 1, "above 0 and at most 1"),
    ("min_p", lambda value: 0 <= value < 1, "at least 0 and below 1"),
    (
        "repetition_penalty", lambda value: 1 / MOST_BIAS < value < MOST_BIAS,
        f"above {1 / MOST_BIAS:g} and below {MOST_BIAS:g} (1 is off)",
    ),
    ("presence_penalty", lambda value: abs(value) < MOST_BIAS, f"a number below {MOST_BIAS:g}"),
    ("frequency_penalty", lambda value: abs(value) < MOST_BIAS, f"a number below {MOST_BIAS:g}"),
]  # fmt: skip


class Noise:
    """Gumbel noise by position, from Philox (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).

    The key is (seed, position), and numpy keeps this raw stream stable between versions.
    """

    def __init__(self, seed: int, size: int) -> None:
        """Args:
        seed: below 2**64.
        size: tokens of a row; rows of two sizes begin with the same noise.
        """
        self.seed = seed
        self.size = size
        self._rows: dict[int, Float32Array] = {}
        self._drawn = -1, np.zeros(0, np.uint32)  # the last position and its bits

    def row(self, position: int) -> Float32Array:
        """
        Returns:
            Noise of every token at `position`, shape [size]; read only, since it is kept for a while.
        """
        row = self._rows.get(position)
        if row is None:
            row = _gumbel(self._bits(position))
            while len(self._rows) >= _CACHED_POSITIONS:  # a draft's thread may do the same
                self._rows.pop(min(list(self._rows)), None)
            self._rows[position] = row
        return row

    def at(self, position: int, ids: IdArray) -> Float32Array:
        """`row(position)[ids]`, without the logarithms of the others."""
        row = self._rows.get(position)
        if row is not None:
            return row[ids]
        few = len(ids) * _FEW < self.size and self._drawn[0] != position
        return _gumbel(self._bits_of_few(position, ids) if few else self._bits(position)[ids])

    def at_most(self, position: int) -> Float32Array:
        """Upper bounds of `row(position)`, without its two logarithms in float64.

        -log(-log(u)) <= -log(1 - u), and the difference is largest where u is least.
        """
        row = self._rows.get(position)
        if row is not None:
            return row
        bounds = (~self._bits(position)).astype(np.float32)
        bounds += np.float32(0.5)  # (1 - u) * 2**32
        np.log(bounds, out=bounds)
        return np.subtract(np.float32(32 * math.log(2)), bounds, out=bounds)

    def _bits(self, position: int) -> NDArray[np.uint32]:
        drawn = self._drawn  # a draft's thread may replace it
        if drawn[0] != position:
            words = self._generator(position).random_raw((self.size + 1) // 2)
            drawn = self._drawn = position, _as_bits(words)[: self.size]
        return drawn[1]

    def _bits_of_few(self, position: int, ids: IdArray) -> NDArray[np.uint32]:
        """`_bits(position)[ids]` from the blocks of the generator that have them."""
        blocks, which = np.unique(ids // _PHILOX, return_inverse=True)
        generator, steps = self._generator(position), np.diff(blocks, prepend=-1) - 1
        words = [generator.advance(step).random_raw(_PHILOX // 2) for step in steps.tolist()]
        return _as_bits(np.concatenate(words)).reshape(-1, _PHILOX)[which, ids % _PHILOX]

    def _generator(self, position: int) -> np.random.Philox:
        return np.random.Philox(key=np.array([self.seed, position], np.uint64))


def _as_bits(words: Any) -> NDArray[np.uint32]:
    bits: NDArray[np.uint32] = np.asarray(words, np.uint64).astype("<u8", copy=False).view("<u4")  # on any byte order
    return bits


def _gumbel(bits: NDArray[np.uint32]) -> Float32Array:
    """Standard Gumbel samples from 32 random bits each: -log(-log(u)), u in (0, 1)."""
    uniform = (bits + 0.5) * 2.0**-32
    gumbel: Float32Array = (-np.log(-np.log(uniform))).astype(np.float32)
    return gumbel


def adjust(
    logits: Float32Array, params: SamplingParams, prompt_ids: ArrayLike, output_ids: Sequence[int]
) -> Float32Array:
    """Logits with bias and penalties, shape [V]."""
    if not params.logit_bias and not params.has_penalties:
        return logits
    adjusted = logits.copy()
    if params.logit_bias:
        ids = np.fromiter(params.logit_bias.keys(), np.int64)
        known = ids < len(adjusted)
        adjusted[ids[known]] += np.fromiter(params.logit_bias.values(), np.float32)[known]
    if params.repetition_penalty != 1:
        seen = np.unique(np.concatenate([np.asarray(prompt_ids, np.int64), np.asarray(output_ids, np.int64)]))
        values = adjusted[seen]
        adjusted[seen] = np.where(
            values > 0, values / params.repetition_penalty, values * params.repetition_penalty
        ).astype(np.float32)
    if (params.presence_penalty != 0 or params.frequency_penalty != 0) and len(output_ids) > 0:
        ids, counts = np.unique(np.asarray(output_ids, np.int64), return_counts=True)
        penalty = params.presence_penalty + params.frequency_penalty * counts
        adjusted[ids] -= penalty.astype(np.float32)
    return adjusted


def top_ids(values: NDArray[np.floating], k: int) -> IdArray:
    """Indices of the k largest values, best first, ties to the smaller index; shape [k], exact.

    At least k values reach the k-th largest of the maxima of k or more blocks, so only values that reach it are sorted.
    """
    size = len(values)
    k = min(k, size)
    width = size // _COLUMN
    if k <= width // 2:
        # Each column of the [64, width] view is a block: numpy vectorises maxima over contiguous rows.
        maxima = values[: width * _COLUMN].reshape(_COLUMN, width).max(axis=0)
        threshold = np.partition(maxima, width - k)[width - k]
    else:
        threshold = np.partition(values, size - k)[size - k]
    ids = np.flatnonzero(values >= threshold)
    return ids[np.lexsort((ids, -values[ids]))][:k]


def log_sum_exp(values: NDArray[np.floating]) -> float:
    """log(sum(exp(values))), shifted by the maximum; errors as for `check_number_found`."""
    peak = values.max()
    check_number_found(peak)
    return float(peak + np.log(np.exp(values - peak).sum(dtype=np.float64)))


def check_number_found(peak: np.floating) -> None:
    """
    Args:
        peak: the largest of some logits; not a number if any of them is none.

    Raises:
        ModelError: it is not a number.
    """
    if peak != peak:
        raise ModelError(
            "the model's output is not a number: its file is damaged, or the device computes wrongly; "
            "with --gpu-layers 0 the processor computes"
        )


def top_log_probs(scores: Float32Array, k: int) -> tuple[IdArray, Scores]:
    """
    Returns:
        The k best ids of one row, and their log-softmax over the whole row; shapes [k], [k].
    """
    ids = top_ids(scores, k)
    return ids, scores[ids].astype(np.float64) - log_sum_exp(scores)


def top_of_rows(
    rows: Iterable[Float32Array], k: int, temperature: float, noise: Iterable[Float32Array | None]
) -> tuple[list[IdArray], list[Scores]]:
    """`Logits.top` of `backend.py`, for rows [V] in the host's memory."""
    ids, values = list[IdArray](), list[Scores]()
    for row, extra in zip(rows, noise, strict=True):
        scores = row if extra is None else row[: len(extra)] + extra[: len(row)]
        best, log_probs = top_log_probs(scores if temperature == 1 else scores / np.float32(temperature), k)
        ids.append(best)
        values.append(log_probs)
    return ids, values


def candidates(logits: Float32Array, params: SamplingParams, *, few: bool = False) -> IdArray | None:
    """
    Args:
        logits: [V], adjusted.
        params: the sequence's.
        few: give up where many ids are kept.

    Returns:
        Ids that top-k, top-p and min-p keep, best first unless only min-p filters; None: nothing filters, or with `few`
            many are kept.
    """
    ids = top_ids(logits, params.top_k) if params.top_k else None
    if params.top_p < 1:
        if ids is None:
            ids = _nucleus(logits, params.top_p, few=few)
            if ids is None:
                return None
        else:
            kept = logits[ids].astype(np.float64)
            ids = ids[: _nucleus_size(np.exp(kept - log_sum_exp(kept)), params.top_p)]
    if params.min_p > 0:
        floor = logits.max() + math.log(params.min_p)
        many = few and ids is None
        ids = np.flatnonzero(logits >= floor) if ids is None else ids[logits[ids] >= floor]
        return None if many and len(ids) > len(logits) // 8 else ids
    return ids


def _nucleus(logits: Float32Array, top_p: float, *, few: bool) -> IdArray | None:
    total = log_sum_exp(logits)
    k = 64
    while True:
        ids = top_ids(logits, k)
        probs = np.exp(logits[ids].astype(np.float64) - total)
        if probs.sum() >= top_p or k >= len(logits):
            return ids[: _nucleus_size(probs, top_p)]
        k *= 16
        if few and k > len(logits) // (2 * _COLUMN):
            return None


def _nucleus_size(probs: NDArray[np.floating], top_p: float) -> int:
    """
    Returns:
        Number of the descending `probs` that reach `top_p`; at least one.
    """
    return int(np.searchsorted(np.cumsum(probs, dtype=np.float64), top_p)) + 1


def sample(
    logits: Float32Array,
    position: int,
    params: SamplingParams,
    noise: Noise,
    prompt_ids: ArrayLike = (),
    output_ids: Sequence[int] = (),
) -> int:
    """
    Args:
        logits: [V] of the node before the position.
        position: absolute.
        params: the sequence's.
        noise: the sequence's.
        prompt_ids: tokens of the prompt, for penalties.
        output_ids: tokens of the output so far, for penalties.

    Returns:
        The token at `position`.

    Raises:
        ModelError: a logit is not a number.
    """
    adjusted = adjust(logits, params, prompt_ids, output_ids)
    best = int(adjusted.argmax())
    check_number_found(adjusted[best])
    if params.temperature == 0:
        return best
    ids = candidates(adjusted, params, few=True)
    if ids is None:
        token = _best_of_many(adjusted, position, params, noise)
        if token is not None:
            return token
        ids = candidates(adjusted, params)
        assert ids is not None, "only top-p leaves a token to rounding"
    return _best(ids, adjusted, position, params, noise)


def _best(ids: IdArray, adjusted: Float32Array, position: int, params: SamplingParams, noise: Noise) -> int:
    return int(ids[scores(adjusted[ids], params, noise.at(position, ids)).argmax()])


def _best_of_many(adjusted: Float32Array, position: int, params: SamplingParams, noise: Noise) -> int | None:
    """The token that wins among `candidates`, without the search for them.

    The token with the best score is taken if top-p keeps it. Else top-p keeps no less probable token either, and the
    more probable ones are searched in the same way.

    Returns:
        None: rounding decides if top-p keeps the token.
    """
    peak = adjusted.max()
    with np.errstate(over="ignore", invalid="ignore"):  # -infinity is right; not a number: every token is banned
        gaps = adjusted - peak
        bounds = gaps / np.float32(min(max(params.temperature, 1e-38), 1e38)) + noise.at_most(position)
    if params.min_p > 0:
        bounds -= _OUT * (adjusted < peak + math.log(params.min_p))
    reach = _EXCESS + min(abs(float(peak)) / params.temperature * 2**-50, 1e30)  # scores are rounded, too
    weights = np.exp(gaps) if params.top_p < 1 else gaps
    total = weights.sum()
    while True:
        ids = np.flatnonzero(~(bounds < bounds.max() - reach))
        if params.top_p == 1:
            return _best(ids, adjusted, position, params, noise)
        token = _best(ids[np.argsort(-adjusted[ids], kind="stable")], adjusted, position, params, noise)
        no_better = adjusted < adjusted[token]
        no_better[token:] |= adjusted[token:] == adjusted[token]
        better = 1 - (weights * no_better).sum() / total
        if not abs(better - params.top_p) > _MASS_ERROR:  # also where every token is banned
            return None
        if better < params.top_p:
            return token
        bounds -= _OUT * no_better


def distribution(adjusted: Float32Array, params: SamplingParams) -> Scores:
    """Probabilities [V] with which `sample` draws from adjusted logits [V]; at temperature 0 one is 1."""
    found = np.zeros(len(adjusted))
    if params.temperature == 0:
        found[adjusted.argmax()] = 1.0
        return found
    ids = candidates(adjusted, params)
    scaled = _scaled(adjusted if ids is None else adjusted[ids], params)
    found[slice(None) if ids is None else ids] = np.exp(scaled - log_sum_exp(scaled))
    return found


def scores(logits: Float32Array, params: SamplingParams, gumbel: Float32Array) -> Scores:
    """Operands of the argmax when T > 0, in float64: it adds no ties to the model's."""
    return _scaled(logits, params) + gumbel


def _scaled(logits: Float32Array, params: SamplingParams) -> Scores:
    return logits.astype(np.float64) / max(params.temperature, LEAST_TEMPERATURE)
