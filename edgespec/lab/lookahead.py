"""Lookahead decoding (arXiv 2402.02057): the target's own samples further on are copied, without a draft model.

Some nodes of each tree are a window. Its first row is a chain below the root, and each token of it begins a column.
Here are the columns abc, def and ghi:

    root ─ a ─ d ─ g ─ h ─ i
           │   └ e ─ f
           └ b ─ c

The target's sample after a column becomes its last token, and the first one leaves (Jacobi iteration). Samples have the
noise of their positions, as those of the output have, so that the window helps above T = 0, too.

An n-gram is a sample after the last tokens before it. N-grams join a pool, which is a further source of `sssd`. The
paper takes those of columns only; here rejected draft tokens give some, too. With recurrent layers there is no window,
since each column would be a path with all unread tokens.

Nodes of the window are sent for their logits. They count as if `WORTH` tokens of each were accepted. Copies that are
less probable give way to them, and where they do not pay, they are left out.
"""

from collections.abc import Sequence
from math import log

import numpy as np

from edgespec.loop.backend import Logits
from edgespec.loop.draft_passes import DraftSteps
from edgespec.loop.hint_texts import END, Hint, NgramIndex
from edgespec.loop.planner import Context
from edgespec.loop.sampling import sample
from edgespec.loop.step import Step
from edgespec.loop.tree import DraftTree, Proposal, Source, make_tree
from edgespec.planners.choice import COPY, Method
from edgespec.planners.sssd import CONTINUATIONS, Matches, SssdPlanner

COLUMN = 3  # tokens of a column, and of an n-gram before its sample
COLUMNS = 10  # most columns of the window
SHARE = 4  # nodes of the budget for each node of the window
WORTH = 0.02  # tokens that a node of the window brings in later steps
MOST_SAMPLES = 16  # in a step, besides those of the output
POOL = 1 << 16  # tokens of the pool at which it begins again


class LookaheadPlanner(SssdPlanner):
    name = "lookahead"

    def begin(self, prompt_ids: Sequence[int]) -> None:
        super().begin(prompt_ids)
        self._pool = NgramIndex(COLUMN)
        self._columns = list[list[int]]()
        self._context: Context | None = None

    def propose(self, context: Context, budget: int) -> DraftSteps[Proposal]:
        self._context = context
        columns = min(COLUMNS, budget // SHARE // COLUMN) if context.unread is None else 0
        self._widen(columns, context.token_ids)
        copies = yield from super().propose(context, budget)
        return Proposal(joined(copies.tree, self._paths(), self.most_depth(context)))

    def matches(self, depth: int, count: int = CONTINUATIONS, hints: Sequence[Hint] = ()) -> list[Matches]:
        pool = self._pool
        found = pool.matches_of(self._index.text[-1 - COLUMN : -1], count)
        own = [(int(Source.DRAFT), length, pool.text, at) for length, at in found if length]
        return super().matches(depth, count, hints) + own

    def result(self, step: Step, logits: Logits | None) -> None:
        if logits:
            self._sample(step.start, step.tree, step.path, logits)
        super().result(step, logits)

    def _sample(self, start: int, tree: DraftTree, path: Sequence[int], logits: Logits) -> None:
        context, self._context = self._context, None
        if context is None:  # it was not asked, so it may take no time
            del self._columns[: len(path)]
            return
        text = self._index.text[: start + 1]
        prompt = text[: context.prompt_length]
        output = text[context.prompt_length :] if context.sampling.has_penalties else []  # copied for each node
        if len(self._pool) > POOL:
            self._pool = NgramIndex(COLUMN)
        paths, sampled = self._paths(), dict[tuple[int, ...], int]()
        for node, ahead in worth_a_sample(tree, path, paths[len(path) - 1 :]):
            position, above = start + 1 + len(ahead), [*output, *ahead]
            found = sample(logits.view(node), position, context.sampling, context.noise, prompt, above)
            self._pool.extend([*[*text[-COLUMN:], *ahead][-COLUMN:], found, END])
            sampled[tuple(ahead)] = found
        for column, above in zip(self._columns, paths, strict=True):
            if tuple(above) in sampled:  # else it was cut
                column.append(sampled[tuple(above)])
                del column[:-COLUMN]
        del self._columns[: len(path) - 1]  # positions that have their tokens

    def _paths(self) -> list[list[int]]:
        """Tokens from the root's child to the last of each column."""
        first = [column[0] for column in self._columns]
        return [first[:i] + column for i, column in enumerate(self._columns)]

    def _widen(self, count: int, text: Sequence[int]) -> None:
        """Give the window `count` columns; a new one goes on with the last one, then with any known token."""
        del self._columns[count:]
        while (known := len(self._columns)) < count:
            last = self._columns[-1] if known else text[-COLUMN:]
            self._columns.append([*last[1:], text[known * len(text) // count]])


METHOD = Method(lambda parts: LookaheadPlanner(parts.datastore, **parts.options), COPY, datastore=True)


def worth_a_sample(
    tree: DraftTree, path: Sequence[int], columns: Sequence[Sequence[int]]
) -> list[tuple[int, list[int]]]:
    """
    Args:
        tree: as it was verified.
        path: its committed nodes, whose samples are the output.
        columns: tokens from the root's child to the last of each column that stays.

    Returns:
        Nodes with the tokens ahead of their samples: the ends of columns, and of the others those near the root. Those
        of one position are neighbours, since they share its noise.
    """
    ahead = list[list[int]]()
    for node, (parent, token) in enumerate(zip(tree.parents.tolist(), tree.token_ids.tolist(), strict=True)):
        ahead.append([*ahead[parent], token] if node else [])
    others = [(node, tokens) for node, tokens in enumerate(ahead) if node not in path]
    others.sort(key=lambda one: (one[1] not in columns, len(one[1])))
    return sorted(others[:MOST_SAMPLES], key=lambda one: len(one[1]))


def joined(tree: DraftTree, paths: Sequence[Sequence[int]], depth: int) -> DraftTree:
    """
    Args:
        tree: any.
        paths: tokens below the root.
        depth: most depth of a node that is added.

    Returns:
        The tree with these paths, of which no node is less probable than `WORTH`.
    """
    tokens, parents = tree.token_ids.tolist(), tree.parents.tolist()
    values, sources = tree.log_probs.tolist(), tree.source.tolist()
    children = {pair: node for node, pair in enumerate(zip(parents, tokens, strict=True))}
    for path in paths:
        node = 0
        for token in path[:depth]:
            parent, node = node, children.setdefault((node, token), len(tokens))
            if node == len(tokens):
                tokens.append(token)
                parents.append(parent)
                values.append(log(WORTH))
                sources.append(int(Source.DRAFT))
            values[node] = max(values[node], log(WORTH))
    return make_tree(tokens, parents, np.array(values), sources)
