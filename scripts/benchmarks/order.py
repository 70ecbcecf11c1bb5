"""Who waits how long: requests of recorded lengths, served in the order they came or short ones first. Simulated."""

import gzip
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from zlib import crc32

import numpy as np

from edgespec.errors import UsageError
from edgespec.scheduler.lengths import Lengths, urgency

ORDERS = ("first come", "foretold, ageing", "known, ageing", "foretold, no ageing")


@dataclass(frozen=True, slots=True)
class Recorded:
    """A prompt and how long its answer was."""

    words: Sequence[int]
    tokens: int


def words_of(text: str) -> list[int]:
    """Words and marks as numbers: where no tokenizer is at hand."""
    return [crc32(word.lower().encode()) for word in re.findall(r"\w+|[^\w\s]", text)]


def read_answers(path: Path) -> list[Recorded]:
    """Prompts and answers of a JSON file, a list of objects with `instruction` and `output`, perhaps gzipped.

    Raises:
        UsageError: it cannot be read, or is not of this form.
    """
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        pairs = [(words_of(one["instruction"]), words_of(one["output"])) for one in json.loads(data)]
        return [Recorded(prompt, max(1, len(text))) for prompt, text in pairs]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path}: needs a JSON list of objects with `instruction` and `output`: {error}") from error


def simulate(
    asked: Sequence[Recorded], arrivals: Sequence[float], places: int, order: str, seconds_per_token: float = 1.0
) -> list[float]:
    """Seconds from asking to the end of each text.

    Args:
        asked: in the order of their arrival.
        arrivals: seconds.
        places: texts written at once; each is written as fast as if alone.
        order: one of `ORDERS`.
        seconds_per_token: of one text.
    """
    lengths, free, waiting, done = Lengths(), [0.0] * places, dict[int, float](), [0.0] * len(asked)
    ending = list[tuple[float, int]]()  # of texts that are written: what they teach is known when they end
    coming = 0
    while coming < len(asked) or waiting:
        place = int(np.argmin(free))
        now = max(free[place], arrivals[coming]) if not waiting else free[place]
        for end, i in [one for one in ending if one[0] <= now]:
            lengths.learn(asked[i].words, asked[i].tokens)
            ending.remove((end, i))
        while coming < len(asked) and arrivals[coming] <= now:
            known = order.startswith("known") or order == "first come"
            tokens = asked[coming].tokens if known else lengths.foretell(asked[coming].words)
            waiting[coming] = tokens * seconds_per_token
            coming += 1
        if order == "first come":
            best = min(waiting)
        elif order.endswith("no ageing"):
            best = min(waiting, key=lambda i: waiting[i])
        else:
            best = max(waiting, key=lambda i: urgency(now - arrivals[i], waiting[i]))
        del waiting[best]
        free[place] = now + asked[best].tokens * seconds_per_token
        done[best] = free[place] - arrivals[best]
        ending.append((free[place], best))
    return done


def compare(
    asked: Sequence[Recorded], places: int, load: float, seconds_per_token: float, seed: int
) -> dict[str, tuple[float, float]]:
    """Mean and 95th percentile of seconds to completion, by order; arrivals are random (Poisson).

    Args:
        asked: what is asked, shuffled here.
        places: texts written at once.
        load: what is asked for, as a share of what can be written.
        seconds_per_token: of one text.
        seed: of the shuffling and the arrivals.
    """
    generator = np.random.default_rng(seed)
    shuffled = [asked[i] for i in generator.permutation(len(asked))]
    gap = fmean(one.tokens for one in shuffled) * seconds_per_token / places / load
    arrivals = np.cumsum(generator.exponential(gap, len(shuffled))).tolist()
    found = dict[str, tuple[float, float]]()
    for order in ORDERS:
        seconds = simulate(shuffled, arrivals, places, order, seconds_per_token)
        found[order] = fmean(seconds), float(np.percentile(seconds, 95))
    return found


def agreement(asked: Sequence[Recorded]) -> float:
    """Rank correlation of foretold and true lengths, each foretold from those before it."""
    lengths, foretold = Lengths(), list[float]()
    for one in asked:
        foretold.append(lengths.foretell(one.words))
        lengths.learn(one.words, one.tokens)
    first, second = (np.argsort(np.argsort(values)) for values in (foretold, [one.tokens for one in asked]))
    return float(np.corrcoef(first, second)[0, 1])
