"""SSSD: draft tokens copied from earlier tokens and from a datastore, without a draft model.

After section 3.1 of "SSSD: Simply-Scalable Speculative Decoding" (arXiv 2411.05894), the last tokens are looked up in

    input       prompt and output, by an n-gram index
    datastore   other documents, by a suffix array
    hints       a predicted answer, and the output of siblings (`hint_texts.py`)

For each source and matched length, the tokens after the matches make a tree of counts. A fitted calibration turns each
share count / total into a probability (`sssd_calibration.py`); the highest that any source gives a token counts.

The paper calibrates whole paths; here single steps are calibrated, so that no child outranks its parent. Matches of 0
tokens are an addition: where nothing longer matches, the input's latest tokens are better than no draft tokens.
"""

from collections.abc import Mapping, Sequence
from heapq import heappop, heappush
from itertools import count
from math import exp, inf, log

import numpy as np

from edgespec.loop.backend import Logits
from edgespec.loop.draft_passes import DraftSteps
from edgespec.loop.hint_texts import END, LONGEST_INPUT, Hint, NgramIndex
from edgespec.loop.planner import Context, Planner
from edgespec.loop.step import Step
from edgespec.loop.tree import DraftTree, Proposal, Source, root_only
from edgespec.planners.datastore import Datastore
from edgespec.planners.sssd_calibration import WEIGHTS

CONTINUATIONS = 100  # most matches of a source and matched length; the paper's figure
RARE = 0.05  # `Context.least` above which matches of 0 tokens, and all but FEW of each length, are left out
FEW = 16  # last matches of a matched length
LONGEST_DATASTORE = 6  # tokens of the longest match

Weights = Mapping[Source, Sequence[Sequence[float]]]


class Calibration(dict[tuple[int, int, int, int, int], float]):
    """Log-probability of a step by (source, matched length, depth, count, total).

    `count` of `total` matches go on with the token, whose depth is at least 1. A logistic function of the features 1,
    log-odds of the share, log(total), log(depth).
    """

    def __init__(self, weights: Weights = WEIGHTS) -> None:
        """Args:
        weights: of the features, by source; row n is for matches of n tokens, the last row also for longer ones.
        """
        super().__init__()
        self._weights = weights

    def __missing__(self, key: tuple[int, int, int, int, int]) -> float:
        source, length, depth, count, total = key
        table = self._weights.get(Source(source), self._weights[Source.INPUT])
        weights = table[min(length, len(table) - 1)]
        features = 1.0, log((count + 0.5) / (total - count + 0.5)), log(total), log(depth)
        score = sum(w * f for w, f in zip(weights, features, strict=True))
        value = self[key] = -log(1 + exp(-max(score, -30.0)))
        return value


# Matches that agree with a path: (source, matched length, tokens of the source, places of the next tokens in them).
Matches = tuple[int, int, list[int], list[int]]
Grown = tuple[float, int, int, int, int, int, list[Matches]]


def split(text: list[int], places: list[int]) -> dict[int, list[int]]:
    """
    Returns:
        Places after each token that stands at `places`: token -> places; ends of documents are left out.
    """
    parts: dict[int, list[int]] = {}
    for place in places:
        token = text[place]
        if token in parts:
            parts[token].append(place + 1)
        elif token != END:
            parts[token] = [place + 1]
    return parts


def steps(groups: list[Matches], depth: int, calibration: Calibration) -> dict[int, tuple[float, int, list[Matches]]]:
    """
    Args:
        groups: matches that agree with the node's path; of one source the longer ones first.
        depth: of the tokens.
        calibration: makes counts probabilities.

    Returns:
        token -> (log-probability, its best source, the matches that agree with it).
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
            # A shorter match with the same places as the longer one adds nothing.
            if last[2] is not text or len(last[3]) < len(moved):
                agreeing.append((source, length, text, moved))
            if value > best:
                found[token] = value, source, agreeing
    return found


def grow(
    root_token: int, groups: list[Matches], budget: int, depth: int, calibration: Calibration, min_probability: float
) -> DraftTree:
    """
    Args:
        root_token: the last committed token.
        groups: matches of the last tokens; of one source the longer ones first.
        budget: most nodes besides the root.
        depth: most depth of a node.
        calibration: makes counts probabilities.
        min_probability: least probability of a node; 0: no limit.

    Returns:
        The tree of the root and the most probable nodes.
    """
    highest_cost = -log(min_probability) if min_probability else inf
    # (-log-probability, serial number against ties, token, parent, source, depth, matches)
    best = 0.0, 0, root_token, -1, int(Source.TARGET), 0, groups
    queue, found, serial = list[Grown](), [best], count(1)
    while True:
        cost, *_, level, groups = best
        if level < depth:
            for token, (value, source, agreeing) in steps(groups, level + 1, calibration).items():
                heappush(queue, (cost - value, next(serial), token, len(found) - 1, source, level + 1, agreeing))
        if not queue or len(found) > budget or queue[0][0] > highest_cost:
            break
        found.append(best := heappop(queue))
    costs, _, *columns, _ = zip(*found, strict=True)
    tokens, parents, sources, depths = np.array(columns, np.int32)
    return DraftTree(tokens, parents, -np.array(costs), depths, sources)


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
            datastore: tokens to copy from, opened with the target's vocabulary.
            depth: most depth of a tree.
            min_probability: least probability of a node, above 0 for targets whose passes cost more with each node;
                0 fills every tree up to the budget.
            calibration: makes counts probabilities; default: the package's.
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
        """
        Args:
            depth: tokens after each match of the datastore.
            count: most matches of each length in the input and in each hint.
            hints: the request's.

        Returns:
            Matches of the last tokens in every source, longest first within a source.
        """
        text = self._index.text
        groups = [(int(Source.INPUT), length, text, at) for length, at in self._index.matches(count)]
        for source, index in hints:
            found = index.matches_of(text[-1 - index.longest : -1], count)
            groups += [(int(source), length, index.text, at) for length, at in found if length]
        if self._datastore:
            groups += datastore_matches(self._datastore, text[-1 - LONGEST_DATASTORE : -1], depth)
        return groups

    def result(self, step: Step, logits: Logits | None) -> None:
        self._index.extend(step.tokens)


def datastore_matches(datastore: Datastore, suffix: Sequence[int], depth: int) -> list[Matches]:
    """
    Args:
        datastore: any.
        suffix: the sequence's last tokens.
        depth: tokens after each match; the next match's tokens follow them.

    Returns:
        Matches of the end of `suffix`, longest first; shorter ones are added until there are enough.
    """
    ranges = list[tuple[int, int, int]]()
    for length in range(1, len(suffix) + 1):  # from the shortest: where it has no match, no longer one has
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
