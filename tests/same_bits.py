"""A model in memory and the same one otherwise: all logits are equal to the bit."""

import random

import contract
import numpy as np


class Pair:
    """The same model in memory and streamed, doing the same things."""

    def __init__(self, resident, streamed, sessions=2):
        self.backends = (resident, streamed)
        self.sessions = [[backend.open() for backend in self.backends] for _ in range(sessions)]

    def forward(self, *trees):
        """Trees of (session, tokens, parents): all logits are equal."""
        found = []
        for side, backend in enumerate(self.backends):
            works = [contract.work(self.sessions[number][side], *tree) for number, *tree in trees]
            logits = backend.forward(works)
            found.append([[rows.row(n) for n in w.wanted.tolist()] for w, rows in zip(works, logits, strict=True)])
        for rows, others in zip(*found, strict=True):
            np.testing.assert_array_equal(rows, others)
            assert np.isfinite(rows).all()

    def each(self, number, action):
        for session in self.sessions[number]:
            action(session)


def do_everything(pair, seed):
    """Prompts, chains, trees, growth, commits, rewinds, several sessions in one pass."""
    draw = random.Random(seed)
    tokens = lambda n: [draw.randrange(256) for _ in range(n)]  # noqa: E731
    pair.forward((0, tokens(9), list(range(-1, 8))))
    pair.each(0, lambda session: session.commit(list(range(9))))
    pair.forward((0, tokens(5), [-1, 0, 0, 1, 2]), (1, tokens(3), [-1, 0, 1]))
    pair.forward((0, tokens(2), [3, 4], 5))
    pair.each(0, lambda session: session.commit([0, 2, 4, 6]))
    pair.each(1, lambda session: session.commit([0]))
    pair.forward((1, tokens(1), [-1]), (0, tokens(4), [-1, -1, 0, 1]))
    pair.each(0, lambda session: session.rewind(4))
    pair.forward((0, tokens(6), [-1, 0, 1, 2, 2, -1]))
