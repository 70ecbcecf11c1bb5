"""A model in memory and the same one otherwise: all logits are equal to the bit."""

import random
from contextlib import contextmanager
from dataclasses import replace

import contract
import numpy as np
import pytest

from edgespec.errors import Interrupted, ModelError
from edgespec.loop.passes import prefill
from edgespec.weights import direct_io
from edgespec.weights.expert_memory import ExpertMemory


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


def check_given_up_passes(pair, error, last, calls, monkeypatch):
    """Passes that end while experts are read or before: committed tokens are as before, and the next pass is right.

    Args:
        pair: of two sessions; the second backend reads experts.
        error: that ends a pass; Interrupted: the backend is interrupted.
        last: number of a late layer.
        calls: that a pass over both sessions makes for each layer; each is tried.
    """
    backend = pair.backends[1]
    memory = backend.mixture.memory
    pair.forward((0, [5, 6, 7], [-1, 0, 1]), (1, [5, 9], [-1, 0]))
    for number in range(2):
        pair.each(number, lambda session: session.commit([0, 1]))
    for name, at in [("choose", 0), ("wait", 0), ("choose", 3), ("wait", last)]:
        for call in range(calls):
            original, made = getattr(memory, name), iter(range(calls))

            def fail(number, *rest, original=original, at=at, made=made, call=call):
                if number == at and next(made) == call:
                    if error is not Interrupted:
                        raise error("now")
                    backend.interrupt(backend.pass_number)
                return original(number, *rest)

            with monkeypatch.context() as patch:
                patch.setattr(memory, name, fail)
                with pytest.raises(error):
                    backend.forward([contract.work(one[1], [9, 9, 9], [-1, 0, 0]) for one in pair.sessions])
            pair.forward((0, [1, 2, 3, 4], [-1, 0, 0, 1]), (1, [8, 9], [-1, -1]))
            for number in range(2):
                pair.each(number, lambda session: session.commit([]))


def check_failing_disk(pair, monkeypatch):
    """A disk fails and comes back, while the second backend reads experts."""
    pair.forward((0, [5, 6, 7], [-1, 0, 1]))

    def broken(*_):
        raise OSError("the disk is gone")

    with monkeypatch.context() as patch:
        patch.setattr(direct_io, "read_unaligned", broken)
        with pytest.raises(ModelError, match=r"experts of layer \d+ cannot be read: the disk is gone"):
            pair.backends[1].forward([contract.work(pair.sessions[1][1], list(range(9)), list(range(-1, 8)))])
    for number in range(2):
        pair.each(number, lambda session: session.rewind(0))
    do_everything(pair, 3)


@contextmanager
def replayed(monkeypatch, paths):
    """Yields a function that compares what a backend, loaded in the `with`, read with what llama.cpp reads.

    For the same choices with the same pools, each token in a pass of its own, after a prompt.
    """
    calls, finish = [], ExpertMemory.finish

    def recorded(name):
        method = getattr(ExpertMemory, name)
        return lambda memory, *given: calls.append((name, given)) or method(memory, *given)

    def compare(backend):
        draw, session = np.random.default_rng(1), backend.open()
        prefill(backend, session, draw.integers(0, 250, 20).tolist())
        for token in draw.integers(0, 250, 20).tolist():
            backend.forward([contract.work(session, [token], [-1])])
            session.commit([0])
        patch.undo()
        memory = backend.mixture.memory
        layers = [replace(layer, places=()) for layer in memory.layers]  # as llama.cpp has them: one stack each
        other = ExpertMemory(paths, layers, backend.plan.pools)
        other.fill(lambda *_: None)
        for call in calls:
            if call is None:
                other.finish()
            else:
                name, given = call
                getattr(other, name)(*given)
                if name == "choose":
                    other.wait(given[0])
        other.close()
        assert (memory.wanted, memory.hits) == (other.wanted, other.hits)
        assert memory.hits > 0
        assert memory.bytes_read <= 1.1 * other.bytes_read

    with monkeypatch.context() as patch:
        for name in ("choose", "foresee"):
            patch.setattr(ExpertMemory, name, recorded(name))
        patch.setattr(ExpertMemory, "finish", lambda memory: calls.append(None) or finish(memory))
        yield compare
