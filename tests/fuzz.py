"""Random operations on sessions of one model: whatever they did, they go on as fresh ones."""

from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np

from edgespec.errors import ContextFull, Interrupted
from edgespec.loop.backend import KeepsNodes, Work
from edgespec.loop.passes import prefill, shape_of
from edgespec.loop.tree import nodes_below, parents_among, path_to

SESSIONS, CONTEXT, MOST_TEXT, MOST_NODES = 3, 500, 330, 12
OPERATIONS = [*["read", "tree", "commit"] * 3, "rewind", "rewind"]
OPERATIONS += ["interrupt", "save", "load", "order", "fork", "open", "close"]
FLOATS = 2e-3  # weights in float32: where keys are missing, logits differ by more


@dataclass(eq=False)
class Held:
    """What a session should hold; the first `read` tokens were read as a prompt, perhaps as a `short` one."""

    session: object
    text: list[int] = field(default_factory=list)
    read: int = 0
    short: bool = False
    tokens: list[int] = field(default_factory=list)  # of nodes
    parents: list[int] = field(default_factory=list)

    def drop_nodes(self):
        self.tokens, self.parents = [], []

    def note_read(self):
        """A session whose cells were put in order forgets what was read as a prompt, but its cells are the same."""
        prompt, self.read = self.session._prompt, min(self.read, len(self.text))
        if prompt.tokens:
            self.read, self.short = max(self.read, prompt.tokens), prompt.short


class Fuzz:
    def __init__(self, backend, fresh, enough, seed, folder):
        """
        Args:
            backend: loaded for SESSIONS sessions.
            fresh: the same model, which reads each text again.
            enough: largest difference of a logit.
            seed: of the operations.
            folder: for files of sessions.
        """
        self.rng, self.counts, self.folder, self.files = np.random.default_rng(seed), Counter(), folder, []
        self.backend, self.fresh, self.enough = backend, fresh, enough
        self.limits, self.held = backend.capabilities, [Held(backend.open())]

    def below(self, most):
        return int(self.rng.integers(most))

    def letters(self, count):
        return self.rng.integers(3, 250, count).tolist()

    def any_of(self, found):
        return found[self.below(len(found))]

    def row_of_fresh(self, held, ending):
        """Logits after the text and `ending`, read in the passes of its session's row classes."""
        session, read, short = self.fresh.open(), held.read, held.short
        text, logits = [*held.text, *ending], None
        while (start := len(session.token_ids)) < len(text):
            prompt = start < read
            shape = shape_of(self.limits, [Work(session, *[np.zeros(0, np.int32)] * 3, prompt, prompt and short)])
            most = min(self.limits.max_nodes, shape.most if shape else CONTEXT) if prompt else 1
            piece = np.array(text[start : min(start + most, read if prompt else len(text))], np.int32)
            nodes = np.arange(len(piece), dtype=np.int32)
            [logits] = self.fresh.forward([Work(session, piece, nodes - 1, nodes[-1:], prompt, prompt and short)])
            row = logits.row(len(piece) - 1)
            session.commit(nodes.tolist())
        session.close()
        return row

    def compare(self, held, row, ending):
        off = float(np.abs(row - self.row_of_fresh(held, ending)).max())
        assert off <= self.enough, off
        self.counts["compared"] += 1

    def check(self):
        """Of one session, and of all that it holds."""
        held = self.any_of(self.held)
        for one in self.held:
            one.note_read()
        assert all(one.session.token_ids == one.text and one.session.nodes == len(one.tokens) for one in self.held)
        if not held.tokens and held.text:
            [logits] = self.backend.forward(
                [Work(held.session, *(np.array(one, np.int32) for one in ([7], [-1], [0])))]
            )
            row = logits.row(0)
            held.session.commit([])
            self.compare(held, row, [7])

    def step(self):
        name = self.any_of(OPERATIONS)
        self.counts[name] += 1
        held = self.any_of(self.held)
        try:
            getattr(self, name)(held)
            self.check()
        except ContextFull:
            self.counts["full"] += 1
            for one in self.held:
                if len(one.session.token_ids) < len(one.text):  # a file that did not fit, or a prompt in parts
                    one.text = one.session.token_ids.copy()
            most = max(self.held, key=lambda one: len(one.text) + len(one.tokens))
            most.session.rewind(0)
            most.text = []
            most.drop_nodes()

    def read(self, held):
        if len(held.text) < MOST_TEXT:
            keep = held.session.reusable_prefix(len(held.text))
            wanted = held.text[:keep] + self.letters(1 + self.below(130))
            held.drop_nodes()
            try:
                prefill(self.backend, held.session, wanted)
            finally:
                held.text = wanted[: len(held.session.token_ids)]

    def rewind(self, held):
        length = held.session.reusable_prefix(self.below(len(held.text) + 1))
        held.session.rewind(length)
        held.text = held.text[:length]
        held.drop_nodes()

    def tree(self, held):
        """More nodes for some sessions, in one pass."""
        some = [held, *(one for one in self.held if one is not held and self.below(2))]
        trees = self.limits.exact.trees.most if self.limits.exact else self.limits.max_nodes
        rows = trees - sum(one.session.unread_committed for one in some)
        works, added = [], []
        for i, one in enumerate(some):
            count = min(1 + self.below(4), rows // (len(some) - i), min(MOST_NODES, trees - 1) - len(one.tokens))
            first = len(one.tokens)
            parents = [*one.parents, *(self.below(first + i + 1) - 1 for i in range(max(0, count)))]
            leaves = len(parents) - len({parent for parent in parents if parent >= 0})
            if count > 0 and leaves <= self.limits.leaves(SESSIONS):
                rows -= count
                tokens, nodes = self.letters(count), np.arange(first, first + count, dtype=np.int32)
                works.append(Work(one.session, np.array(tokens, np.int32), np.array(parents[first:], np.int32), nodes))
                added.append((one, tokens, parents))
        if not works:
            return
        try:
            found = self.backend.forward(works)
        except Interrupted:
            for one, *_ in added:
                one.drop_nodes()
            raise
        for (one, tokens, parents), logits, work in zip(added, found, works, strict=True):
            one.tokens, one.parents = one.tokens + tokens, parents
            node = int(self.any_of(work.wanted))
            self.compare(one, logits.row(node), [one.tokens[at] for at in path_to(parents, node)])

    def commit(self, held):
        if held.tokens and len(held.text) < MOST_TEXT:
            path = path_to(held.parents, self.below(len(held.tokens)))
            keep = isinstance(held.session, KeepsNodes) and self.below(2)
            stay = held.session.commit_keeping(path).tolist() if keep else held.session.commit(path) or []
            assert set(stay) <= set(nodes_below(held.parents, path[-1]))
            held.text = held.text + [held.tokens[node] for node in path]
            held.parents = list(parents_among(held.parents, stay))
            held.tokens = [held.tokens[node] for node in stay]

    def interrupt(self, held):
        self.backend.interrupt(self.backend.pass_number)
        with suppress(Interrupted):
            self.any_of([self.read, self.tree])(held)

    def save(self, held):
        if held.text:
            about = held.text, held.read, held.short
            self.files = [*self.files[-3:], (self.folder / f"{self.counts['save']}", about)]
            held.session.save(self.files[-1][0])

    def load(self, held):
        if self.files:
            path, (held.text, held.read, held.short) = self.any_of(self.files)
            held.drop_nodes()
            held.session.load(path)

    def order(self, held):
        """Engines that have no cells in common have nothing to put in order."""

    def fork(self, held):
        if len(self.held) < SESSIONS:
            self.held.append(Held(held.session.fork(), held.text, held.read, held.short))

    def open(self, held):
        if len(self.held) < SESSIONS:
            self.held.append(Held(self.backend.open()))

    def close(self, held):
        if len(self.held) > 1:
            self.held.remove(held)
            held.session.close()
