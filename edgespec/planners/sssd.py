"""SSSD: draft tokens copied from the sequence itself and from a datastore. No draft model.

After "SSSD: Simply-Scalable Speculative Decoding" (arXiv 2411.05894), section 3.1. The last tokens, as many as have
occurred before, are looked up in these sources:

    input       prompt + own output, in an n-gram index that grows with the sequence
    datastore   other texts, through a suffix array; at most 100 matches, at regular intervals
    hints       what a request brings: a predicted answer, and its siblings' output (`hint_texts.py`)

What follows the matches makes one tree of counts for each source and matched length. The share of a node's matches
that go on with a token, count / total, becomes the probability that the target writes it by a calibration fitted on
recorded text, per source, matched length and depth (`sssd_calibration.py`). The trees are then
read as one: a token is as probable as its best source says, a path is the product of its steps, and the best
`budget` paths are the draft tree. Only nodes that come into the tree are ever expanded.

Where we differ from the paper. It calibrates whole paths; here each step is calibrated, so that a child never
outranks its parent. It sums the datastore's counts over matched lengths; here each length keeps its own tree, as in
the input, which is worth the same. And the input is also searched for the run of 0 tokens, which matches everywhere:
where nothing else does, the latest tokens are still better draft tokens than none.
"""

from collections.abc import Mapping, Sequence
from heapq import heappop, heappush
from math import exp, inf, log

import numpy as np

from edgespec.loop.draft_passes import DraftSteps
from edgespec.loop.hint_texts import END, LONGEST_INPUT, Hint, NgramIndex
from edgespec.loop.planner import Context, Planner
from edgespec.loop.tree import DraftTree, Proposal, Source, root_only
from edgespec.planners.datastore import Datastore
from edgespec.planners.sssd_calibration import WEIGHTS

CONTINUATIONS = 100  # most matches looked at, per source and matched length; the paper's figure
RARE = 0.05  # where draft tokens less probable than this do not pay, the run of 0 tokens is not looked up,
FEW = 16  # and of each length this many of the last matches
LONGEST_DATASTORE = 6  # longest match looked for, in tokens

Weights = Mapping[Source, Sequence[Sequence[float]]]


class Calibration(dict[tuple[int, int, int, int, int], float]):
    """(source, matched length, depth, count, total) -> log-probability of that step. Computed when first asked for.

    The probability is a logistic function of four features, with weights for each source and matched length:
    see `features`. Row n of a source's weights is for matches of n tokens, its last row for all longer ones.
    """

    def __init__(self, weights: Weights = WEIGHTS) -> None:
        super().__init__()
        self._weights = weights

    def __missing__(self, key: tuple[int, int, int, int, int]) -> float:
        source, length, depth, count, total = key
        table = self._weights[Source.INPUT if source == Source.PREDICTION else Source(source)]
        weights = table[min(length, len(table) - 1)]
        score = sum(w * f for w, f in zip(weights, features(depth, count, total), strict=True))
        value = self[key] = -log(1 + exp(-max(score, -30.0)))
        return value


def features(depth: int, count: int, total: int) -> tuple[float, float, float, float]:
    """1, log-odds of the share, log(total), log(depth): `count` of `total` matches go on with the token at `depth`."""
    return 1.0, log((count + 0.5) / (total - count + 0.5)), log(total), log(depth)


# The matches of one source and matched length that agree with the path so far:
# (source, matched length, the text they lie in, where their next tokens are).
Matches = tuple[int, int, list[int], list[int]]


def split(text: list[int], places: list[int]) -> dict[int, list[int]]:
    """Places by the token there, each moved on by one; those where the text ends are left out."""
    parts: dict[int, list[int]] = {}
    for place in places:
        token = text[place]
        if token in parts:
            parts[token].append(place + 1)
        elif token != END:
            parts[token] = [place + 1]
    return parts


def steps(groups: list[Matches], depth: int, calibration: Calibration) -> dict[int, tuple[float, int, list[Matches]]]:
    """The tokens that can follow a node: token -> (log-probability, its best source, the matches that agree).

    Args:
        groups: the matches at the node; of one source the longer ones first.
        depth: of the tokens.
        calibration: makes probabilities of counts.
    """
    found: dict[int, tuple[float, int, list[Matches]]] = {}
    for source, length, text, places in groups:
        total = len(places)
        for token, moved in split(text, places).items():
            value = calibration[source, length, depth, len(moved), total]
            known = found.get(token)
            if known is None:
                found[token] = value, source, [(source, length, text, moved)]
                continue
            best, _, agreeing = known
            last = agreeing[-1]
            # A shorter match whose places are those of the longer one has nothing to add further down.
            if last[2] is not text or len(last[3]) < len(moved):
                agreeing.append((source, length, text, moved))
            if value > best:
                found[token] = value, source, agreeing
    return found


def grow(
    root_token: int, groups: list[Matches], budget: int, depth: int, calibration: Calibration, min_probability: float
) -> DraftTree:
    """The root and the best `budget` continuations that reach `min_probability`, best first, at most `depth` long."""
    highest_cost = -log(min_probability) if min_probability else inf
    tokens, parents, values, depths, sources = [root_token], [-1], [0.0], [0], [int(Source.TARGET)]
    # (-log-probability, serial number against ties, token, parent, source, depth, matches)
    queue: list[tuple[float, int, int, int, int, int, list[Matches]]] = []
    serial, node, cost, level = 0, 0, 0.0, 0
    while True:
        if level < depth:
            for token, (value, source, agreeing) in steps(groups, level + 1, calibration).items():
                serial += 1
                heappush(queue, (cost - value, serial, token, node, source, level + 1, agreeing))
        if not queue or node == budget or queue[0][0] > highest_cost:
            break
        cost, _, token, parent, source, level, groups = heappop(queue)
        node += 1
        tokens.append(token)
        parents.append(parent)
        values.append(-cost)
        depths.append(level)
        sources.append(source)
    as_int = np.array([tokens, parents, depths, sources], np.int32)
    return DraftTree(as_int[0], as_int[1], np.array(values), as_int[2], as_int[3])


class SssdPlanner(Planner):
    name = "sssd"

    def __init__(
        self,
        datastore: Datastore | None = None,
        *,
        depth: int = 16,
        min_probability: float = 0.0,
        calibration: Calibration | None = None,
    ) -> None:
        """
        Args:
            datastore: other texts to copy from, opened with the target's vocabulary.
            depth: longest continuation.
            min_probability: what a node must have to come into the tree; 0 fills every tree. Above 0 is for targets
                whose passes cost more with every node.
            calibration: makes probabilities of counts; default: the one in the package.
        """
        self.depth = depth
        self.min_probability = min_probability
        self._datastore = datastore
        self._calibration = Calibration() if calibration is None else calibration
        self._index = NgramIndex(LONGEST_INPUT)

    def begin(self, prompt_ids: Sequence[int]) -> None:
        self._index.become(prompt_ids)

    def propose(self, context: Context, budget: int) -> DraftSteps[Proposal]:
        yield from ()
        depth = min(self.depth, context.max_depth, budget)
        if depth <= 0:
            return Proposal(root_only(context.token_ids[-1]))
        least = max(self.min_probability, context.least)
        matches = self.matches(depth, FEW if context.least > RARE else CONTINUATIONS, context.hints)
        if context.least > RARE:
            matches = [group for group in matches if group[1] > 0]
        return Proposal(grow(context.token_ids[-1], matches, budget, depth, self._calibration, least))

    def matches(self, depth: int, count: int = CONTINUATIONS, hints: Sequence[Hint] = ()) -> list[Matches]:
        """The matches of the last tokens in every source, longest first within a source, `count` of the sequence's."""
        text = self._index.text
        groups = [(int(Source.INPUT), length, text, at) for length, at in self._index.matches(count)]
        for source, index in hints:
            found = index.matches_of(text[-1 - index.longest : -1], count)
            groups += [(int(source), length, index.text, at) for length, at in found if length]
        if self._datastore:
            groups += datastore_matches(self._datastore, text[-1 - LONGEST_DATASTORE : -1], depth)
        return groups

    def observe(self, tokens: Sequence[int], seconds: float) -> None:
        self._index.extend(tokens)


def datastore_matches(datastore: Datastore, suffix: Sequence[int], depth: int) -> list[Matches]:
    """Matches of the end of the text, longest first; shorter ones are added until there are enough continuations.

    They may be followed for `depth` tokens: what lies beyond is the next match.
    """
    ranges = list[tuple[int, int, int]]()
    for length in range(1, len(suffix) + 1):  # from the shortest, since nothing longer matches where a shorter did not
        low, high = datastore.find(suffix[-length:])
        if low == high:
            break
        if ranges and high - low == ranges[-1][2] - ranges[-1][1]:
            ranges.pop()
        ranges.append((length, low, high))
    groups = list[Matches]()
    wanted = CONTINUATIONS
    for length, low, high in reversed(ranges):
        rows = datastore.continuations(low, high, length, CONTINUATIONS, depth)
        groups.append((int(Source.DATASTORE), length, rows.ravel().tolist(), list(range(0, rows.size, depth))))
        wanted -= len(rows)
        if wanted <= 0:
            break
    return groups
