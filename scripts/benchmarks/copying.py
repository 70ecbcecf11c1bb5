"""Methods that copy tokens, as planners: the parts of sssd apart, and its published baselines.

Baselines have the settings of their authors' code:

    first-match  prompt lookup decoding, a chain of 10 tokens: github.com/apoorvumang/prompt-lookup-decoding.
    rest         REST (arXiv 2311.08252), the datastore's most frequent paths: github.com/FasterDecoding/REST.
    pia          PIA (arXiv 2312.12728), the prompt, and outputs of all prompts so far, which are never pruned here:
                 github.com/alipay/PainlessInferenceAcceleration.
"""

from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import sha256
from itertools import accumulate
from pathlib import Path

import numpy as np

from edgespec.errors import UsageError, no_such
from edgespec.loop.backend import Vocab
from edgespec.loop.draft_passes import DraftSteps
from edgespec.loop.hint_texts import END, Hint, NgramIndex
from edgespec.loop.planner import Context, Planner
from edgespec.loop.tree import Proposal, Source, make_tree
from edgespec.planners.datastore import Datastore, build, open_datastore
from edgespec.planners.sssd import CONTINUATIONS, Matches, SssdPlanner

DraftPath = tuple[int, ...]


class DatastoreOnly(SssdPlanner):
    """The planner sssd without the tokens of its input."""

    def matches(self, depth: int, count: int = CONTINUATIONS, hints: Sequence[Hint] = ()) -> list[Matches]:
        return [found for found in super().matches(depth, count, hints) if found[0] == Source.DATASTORE]


def counted(texts: Iterable[Sequence[int]]) -> Counter[DraftPath]:
    """
    Returns:
        Each path that begins one of `texts`, and how many of them it begins; a path comes after those that begin it.
    """
    return Counter(tuple(text[:end]) for text in texts for end in range(1, len(text) + 1))


def after(index: NgramIndex, end: Sequence[int], depth: int) -> list[list[int]]:
    """
    Returns:
        At most `depth` tokens after each place of `end` in the index, up to an END.
    """
    places = next((places for length, places in index.matches_of(end, len(index)) if length == len(end)), [])
    return [until_end(index.text[place : place + depth]) for place in places]


def until_end(tokens: list[int]) -> list[int]:
    return tokens[: tokens.index(END)] if END in tokens else tokens


class CopyRule(Planner):
    """A published rule: `paths` says which paths are draft tokens."""

    source = Source.INPUT

    def propose(self, context: Context, budget: int) -> DraftSteps[Proposal]:
        yield from ()
        found = self.paths(list(context.token_ids), self.most_depth(context), budget)[:budget]
        node = {(): 0} | {path: number for number, path in enumerate(found, 1)}
        tokens, parents = [path[-1] for path in found], [node[path[:-1]] for path in found]
        ranks = -np.arange(len(node), dtype=np.float64)  # nodes that do not fit are left out from the end
        sources = [Source.TARGET, *[self.source] * len(found)]
        return Proposal(make_tree([context.token_ids[-1], *tokens], [-1, *parents], ranks, sources))

    @abstractmethod
    def paths(self, token_ids: list[int], depth: int, budget: int) -> list[DraftPath]:
        """Paths from the root, the best first, each after those that begin it."""


class FirstMatch(CopyRule):
    name = "first-match"
    depth = 10

    def paths(self, token_ids: list[int], depth: int, budget: int) -> list[DraftPath]:
        for length in (3, 2, 1):
            for place in range(length, len(token_ids) - self.depth + 1):
                if token_ids[place - length : place] == token_ids[-length:]:
                    return list(counted([token_ids[place : place + depth]]))
        return []


class Rest(CopyRule):
    name = "rest"
    depth = 10
    source = Source.DATASTORE
    most_matches = 5000

    def __init__(self, datastore: Datastore) -> None:
        self._datastore = datastore

    def paths(self, token_ids: list[int], depth: int, budget: int) -> list[DraftPath]:
        for length in range(min(16, len(token_ids)), 1, -1):
            low, high = self._datastore.find(token_ids[-length:])
            if low < high:
                high = min(high, low + self.most_matches)
                rows = self._datastore.continuations(low, high, length, self.most_matches, depth).tolist()
                return [path for path, _ in counted(map(until_end, rows)).most_common(budget)]
        return []


class Pia(CopyRule):
    name = "pia"
    depth = 12

    def __init__(self) -> None:
        self._prompt, self._pool = NgramIndex(2), NgramIndex(2)

    def begin(self, prompt_ids: Sequence[int]) -> None:
        self._prompt.become(prompt_ids)
        self._pool.extend([END])

    def observe(self, tokens: Sequence[int], seconds: float) -> None:
        self._pool.extend(tokens)

    def paths(self, token_ids: list[int], depth: int, budget: int) -> list[DraftPath]:
        found = list[DraftPath]()
        for length in (2, 1):
            end = token_ids[-length:]
            prompt, pool = (counted(after(index, end, depth)) for index in (self._prompt, self._pool))
            best = sorted(prompt | pool, key=lambda path: (prompt[path], pool[path]), reverse=True)
            half = [path for path, _ in pool.most_common(budget // 2)] if len(best) > budget else []
            found = list(dict.fromkeys([*half, *best]))[:budget]
            if len(found) + 1 >= self.depth:
                break
        return found


def planner_of(source: str, datastore: Datastore | None) -> Planner:
    """
    Raises:
        UsageError: there is no such source, or it needs a datastore.
    """
    if source not in SOURCES:
        raise no_such("source", source, SOURCES)
    if source in NEED_DATASTORE and datastore is None:
        raise UsageError(f"the source {source} needs a datastore: give --datastore")
    return SOURCES[source](datastore)


SOURCES: dict[str, Callable[..., Planner]] = {
    "text": lambda datastore: SssdPlanner(),
    "datastore": DatastoreOnly,
    "both": SssdPlanner,
    "first-match": lambda datastore: FirstMatch(),
    "rest": Rest,
    "pia": lambda datastore: Pia(),
}
NEED_DATASTORE = ("datastore", "both", "rest")


def growing(path: Path, texts: Iterable[str], vocab: Vocab, sizes: Sequence[int]) -> Iterator[Datastore]:
    """
    Args:
        path: of the datastore's file, which is replaced by the next one.
        texts: the documents.
        vocab: tokenizer of the datastore.
        sizes: numbers of tokens, rising.

    Yields:
        Datastores of the first documents by hash that reach each of `sizes`, and of all documents.
    """
    unlike = {text.encode("utf-8", "replace") for text in texts}
    documents = [data.decode("utf-8") for data in sorted(unlike, key=lambda data: sha256(data).digest())]
    lengths = (len(vocab.encode(text, add_bos=False, parse_special=False)) + 1 for text in documents)
    reached = np.fromiter(accumulate(lengths), np.int64, len(documents))
    counts = np.minimum(np.searchsorted(reached, sizes) + 1, len(documents)).tolist()
    for count in dict.fromkeys([*counts, len(documents)]):
        build(path, documents[:count], vocab)
        yield open_datastore(path, vocab)
