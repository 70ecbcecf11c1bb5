"""What every backend must do, as plain functions. A backend of your own passes when all of `CHECKS` do:

    @pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
    def test_contract(check):
        check(factory)

`factory(context_length=…, budget=…, sessions=…)` loads a model, smaller limits than asked for are not allowed. The
checks close what they open. All compare with the same path read one token per pass in another session: equal to the bit
when the backend's tolerance is 0, else within it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest

from edgespec.errors import Closed, ContextFull, Interrupted, SessionFileError, UsageError
from edgespec.loop.backend import Backend, KeepsNodes, Logits, Session, Work
from edgespec.loop.passes import prefill
from edgespec.loop.tree import nodes_below, parents_among, path_to

Factory = Callable[..., Backend]
CONTEXT, BUDGET = 64, 32
TREE = [-1, 0, 0, 1, 1, 2, 3, 3, 3, 7]  # parents: branches at every depth


class Reused:
    """A factory whose models one check after the other uses; what a check has opened is closed then."""

    def __init__(self, factory: Factory) -> None:
        self.load, self.free = factory, dict[str, Backend]()

    def close(self) -> None:
        for backend in self.free.values():
            backend.close()


@contextmanager
def loaded(factory: Factory | Reused, *, anew: bool = False, **options: Any) -> Iterator[Backend]:
    """Load a model; `anew`: also where others are there."""
    options = {"context_length": CONTEXT, "budget": BUDGET, "sessions": 3} | options
    if anew or not isinstance(factory, Reused):
        backend = (factory.load if isinstance(factory, Reused) else factory)(**options)
        try:
            yield backend
        finally:
            backend.close()
        return
    backend = factory.free.pop(str(options), None) or factory.load(**options)
    opened, opens = list[Session](), backend.open

    def noted() -> Session:
        opened.append(opens())
        return opened[-1]

    backend.open = noted  # type: ignore[method-assign]
    try:
        yield backend
        for session in opened:
            session.close()
    except BaseException:
        backend.close()
        raise
    backend.open = opens  # type: ignore[method-assign]
    factory.free[str(options)] = backend


def check_update_is_refused(
    load: Callable[[], Backend], path: Path, library: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A session saved before an update of the library with the model classes is refused: their code decides bits."""
    backend = load()
    session = backend.open()
    prefill(backend, session, [5, 6, 7])
    session.save(path)
    session.load(path)
    monkeypatch.setattr(library, "__version__", "0.1")
    with pytest.raises(SessionFileError, match=rf"build was '.*' and is '.*{name} 0\.1, "):
        load().open().load(path)


def work(
    session: Session, token_ids: Sequence[int], parents: Sequence[int], first: int = 0, wanted: Any = None
) -> Work:
    """`first`: how many nodes the session already has. All new nodes are wanted unless said otherwise."""
    nodes = np.arange(first, first + len(token_ids)) if wanted is None else np.array(wanted)
    return Work(session, np.array(token_ids, np.int32), np.array(parents, np.int32), nodes.astype(np.int32))


def random_tokens(backend: Backend, count: int, seed: int) -> list[int]:
    """`count` different ordinary tokens (as far as the vocabulary has so many)."""
    low, high = 4, backend.vocab.size
    return np.random.default_rng(seed).choice(np.arange(low, high), count, replace=count > high - low).tolist()


def chain_rows(backend: Backend, text: Sequence[int], first: int = 0) -> list[np.ndarray]:
    """Logits after every token from `first` on, read one token per pass in a fresh session. Needs a free session."""
    chain = range(len(text))
    return list(rows_of_chains(backend, [], text, [node - 1 for node in chain], chain[-1:]).values())[first:]


def close_enough(backend: Backend, row: np.ndarray, expected: np.ndarray) -> None:
    assert row.shape == (backend.vocab.size,)
    assert row.dtype == np.float32
    tolerance = backend.capabilities.logit_tolerance
    worst = float(np.abs(row - expected).max())
    assert worst <= tolerance, f"logits differ by {worst}, tolerance {tolerance}"


def rows_of_chains(
    backend: Backend, text: Sequence[int], tokens: Sequence[int], parents: Sequence[int], nodes: Iterable[int]
) -> dict[int, np.ndarray]:
    """Logits of these nodes after the committed `text`, and of those above them, one token per pass.

    Needs a free session. It goes back to where two paths part.
    """
    session, found, last = backend.open(), dict[int, np.ndarray](), list[int]()

    def after(token: int) -> np.ndarray:
        row = backend.forward([work(session, [token], [-1])])[0].row(0)
        session.commit([0])
        return row

    for token in text:
        after(token)
    for path in sorted(path_to(list(parents), node) for node in nodes):
        same = sum(one == other for one, other in zip(last, path, strict=False))  # in a tree, paths part for good
        if same < len(last):
            session.rewind(len(text) + same)
        found |= {node: after(tokens[node]) for node in path[same:]}
        last = path
    session.close()
    return found


def check_nodes(
    backend: Backend,
    rows: Mapping[int, np.ndarray],
    text: Sequence[int],
    tokens: Sequence[int],
    parents: Sequence[int],
) -> None:
    """The nodes' rows are those of their paths after the committed `text`."""
    expected = rows_of_chains(backend, text, tokens, parents, rows)
    for node, row in rows.items():
        close_enough(backend, row, expected[node])


def read(logits: Logits, nodes: Sequence[int]) -> dict[int, np.ndarray]:
    return {node: logits.row(node) for node in nodes}


def check_session(
    backend: Backend, session: Session, text: Sequence[int], known: dict[tuple[int, ...], np.ndarray] | None = None
) -> None:
    """The session holds exactly `text`, and goes on as a fresh one would. Drops the probe again.

    What a fresh one makes of a text is kept in `known`, and not read again.
    """
    assert session.token_ids == list(text)
    probe = 5
    row = backend.forward([work(session, [probe], [-1])])[0].row(0)
    known = {} if known is None else known
    if (path := (*text, probe)) not in known:
        known[path] = chain_rows(backend, path, len(text))[-1]
    close_enough(backend, row, known[path])
    session.commit([])
    assert session.token_ids == list(text)


def keep_below(session: Session, path: Sequence[int]) -> list[int]:
    """Commit `path`, and keep the nodes below it where the session can. Returns the old numbers of those."""
    if isinstance(session, KeepsNodes):
        return session.commit_keeping(path).tolist()
    session.commit(path)
    return []


def raises(kind: type[Exception], action: Callable[[], object]) -> None:
    try:
        action()
    except kind:
        return
    raise AssertionError(f"{kind.__name__} was not raised")


def capabilities_are_sound(factory: Factory) -> None:
    with loaded(factory) as backend:
        limits = backend.capabilities
        assert limits.context_length >= CONTEXT
        assert limits.max_nodes >= BUDGET + 1
        assert limits.max_wanted >= BUDGET + 1
        assert limits.max_leaves >= 1
        assert limits.logit_tolerance >= 0


def vocabulary_round_trip(factory: Factory) -> None:
    with loaded(factory) as backend:
        vocab, text = backend.vocab, "to be or not"
        ids = vocab.encode(text, add_bos=False, parse_special=False)
        assert ids
        assert all(0 <= token < vocab.size for token in ids)
        assert b"".join(map(vocab.token_bytes, ids)).decode().strip() == text
        assert vocab.eog_ids
        for token in vocab.eog_ids:
            assert vocab.token_bytes(token) == b""
            assert vocab.encode(vocab.token_text(token), add_bos=False, parse_special=True) == [token]
            assert token not in vocab.encode(vocab.token_text(token), add_bos=False, parse_special=False)
        with loaded(factory, anew=True) as again:
            assert again.vocab.fingerprint == vocab.fingerprint


def tree_equals_chains(factory: Factory) -> None:
    with loaded(factory) as backend:
        text, tokens = random_tokens(backend, 7, 1), random_tokens(backend, len(TREE), 2)
        session = backend.open()
        prefill(backend, session, text)
        logits = backend.forward([work(session, tokens, TREE)])[0]
        check_nodes(backend, read(logits, range(len(TREE))), text, tokens, TREE)


def a_tree_with_several_tops(factory: Factory) -> None:
    """Several nodes may follow the last committed token, and the very first token too."""
    with loaded(factory) as backend:
        for length in (0, 3):
            text, tokens, parents = random_tokens(backend, length, 3), random_tokens(backend, 5, 4), [-1, -1, 0, -1, 1]
            session = backend.open()
            prefill(backend, session, text)
            logits = backend.forward([work(session, tokens, parents)])[0]
            check_nodes(backend, read(logits, range(5)), text, tokens, parents)
            session.close()


def growth_layer_by_layer(factory: Factory) -> None:
    """Parents from earlier forwards: tips, inner nodes, one node again and again, and the committed text."""
    with loaded(factory) as backend:
        text = random_tokens(backend, 5, 5)
        layers = [[-1], [0, 0], [1, 0, 2], [1, 3, 3], [0, -1, 6, 5], [12, 1]]
        parents, tokens, rows = list[int](), list[int](), dict[int, np.ndarray]()
        session = backend.open()
        prefill(backend, session, text)
        for number, layer in enumerate(layers):
            new = random_tokens(backend, len(layer), 6 + number)
            logits = backend.forward([work(session, new, layer, first=len(tokens))])[0]
            rows |= read(logits, range(len(tokens), len(tokens) + len(layer)))
            tokens, parents = tokens + new, parents + layer
        check_nodes(backend, rows, text, tokens, parents)
        path = path_to(parents, len(parents) - 2)
        session.commit(path)
        check_session(backend, session, text + [tokens[node] for node in path])


def commit_any_path(factory: Factory) -> None:
    """Whole paths, parts of paths and nothing; then the next tree."""
    with loaded(factory) as backend:
        for path in ([0, 1, 3, 7, 9], [0, 2, 5], [0, 1], [0], []):
            session, text = backend.open(), random_tokens(backend, 4, 30)
            prefill(backend, session, text)
            for turn in range(2):
                tokens = random_tokens(backend, len(TREE), 40 + turn)
                logits = backend.forward([work(session, tokens, TREE)])[0]
                if turn:
                    check_nodes(backend, read(logits, [8]), text, tokens, TREE)
                session.commit(path)
                text = text + [tokens[node] for node in path]
                assert session.token_ids == text
            check_session(backend, session, text)
            session.close()


def nodes_below_a_commit(factory: Factory) -> None:
    """All of them stay, or none: those that do are numbered anew, and what is read below them sees their past."""
    with loaded(factory) as backend:
        for path in ([0, 1, 3], [0, 2, 5], []):  # some, none and all lie below
            session, text = backend.open(), random_tokens(backend, 4, 90)
            prefill(backend, session, text)
            tokens, parents = random_tokens(backend, len(TREE), 91), list(TREE)
            half = len(TREE) // 2
            backend.forward([work(session, tokens[:half], TREE[:half], wanted=[])])
            backend.forward([work(session, tokens[half:], TREE[half:], first=half, wanted=[])])
            for turn in range(2):
                below = nodes_below(parents, path[-1] if path else -1)
                kept = keep_below(session, path)
                assert kept in ([], below)
                text = text + [tokens[node] for node in path]
                assert session.token_ids == text
                parents, tokens = parents_among(parents, kept), [tokens[node] for node in kept]
                # Under each of them, the text, and a node of the same pass.
                new = [*range(-1, len(kept)), len(kept)]
                more = random_tokens(backend, len(new), 92 + turn)
                logits = backend.forward([work(session, more, new, first=len(kept))])[0]
                tokens, parents = tokens + more, parents + new
                check_nodes(backend, read(logits, range(len(kept), len(tokens))), text, tokens, parents)
                path = path_to(parents, len(kept) + len(kept) // 2)
            session.commit(path)
            check_session(backend, session, text + [tokens[node] for node in path])
            session.close()


def rewind_and_go_on(factory: Factory) -> None:
    with loaded(factory) as backend:
        session, text = backend.open(), random_tokens(backend, 10, 50)
        prefill(backend, session, text)
        backend.forward([work(session, random_tokens(backend, len(TREE), 51), TREE)])  # uncommitted nodes go too
        session.rewind(6)
        check_session(backend, session, text[:6])
        text = text[:6] + random_tokens(backend, 5, 52)
        prefill(backend, session, text)
        check_session(backend, session, text)
        backend.forward([work(session, random_tokens(backend, 3, 53), [-1, 0, 0])])
        session.rewind(len(text))  # only the nodes go
        check_session(backend, session, text)
        session.rewind(0)
        check_session(backend, session, [])


def forks_are_independent(factory: Factory) -> None:
    with loaded(factory, sessions=4) as backend:
        text, known = random_tokens(backend, 6, 60), dict[tuple[int, ...], np.ndarray]()
        parent = backend.open()
        prefill(backend, parent, text)
        backend.forward([work(parent, random_tokens(backend, 2, 61), [-1, -1])])  # stays with the parent
        child = parent.fork()
        assert child.token_ids == text
        parent.commit([1])
        parent_text = text + random_tokens(backend, 2, 61)[1:]
        child_text = text + random_tokens(backend, 4, 62)
        prefill(backend, child, child_text)
        check_session(backend, parent, parent_text, known)
        check_session(backend, child, child_text, known)
        child.rewind(2)
        check_session(backend, parent, parent_text, known)
        grandchild = child.fork()
        parent.rewind(3)
        check_session(backend, child, text[:2], known)
        child.close()
        check_session(backend, grandchild, text[:2], known)
        check_session(backend, parent, text[:3], known)


def several_sessions_in_one_forward(factory: Factory) -> None:
    with loaded(factory) as backend:
        left, right = backend.open(), backend.open()
        left_text, right_text = random_tokens(backend, 3, 70), random_tokens(backend, 8, 71)
        prefill(backend, left, left_text)
        prefill(backend, right, right_text)
        tokens, other = random_tokens(backend, len(TREE), 72), random_tokens(backend, 4, 73)
        both = backend.forward([work(left, tokens, TREE), work(right, other, [-1, 0, 0, 2])])
        left_rows, right_rows = read(both[0], range(len(TREE))), read(both[1], range(4))
        check_nodes(backend, left_rows, left_text, tokens, TREE)
        check_nodes(backend, right_rows, right_text, other, [-1, 0, 0, 2])
        left.commit([0, 2])
        right.commit([0, 2, 3])
        check_session(backend, left, [*left_text, tokens[0], tokens[2]])
        check_session(backend, right, [*right_text, other[0], other[2], other[3]])


def only_what_is_wanted(factory: Factory) -> None:
    with loaded(factory) as backend:
        text, tokens = random_tokens(backend, 5, 80), random_tokens(backend, len(TREE), 81)
        session = backend.open()
        prefill(backend, session, text)
        wanted = [1, 6, 9]
        logits = backend.forward([work(session, tokens, TREE, wanted=wanted)])[0]
        check_nodes(backend, read(logits, wanted), text, tokens, TREE)
        logits = backend.forward([work(session, tokens[:3], [4, 10, 4], first=10, wanted=[11])])[0]
        check_nodes(backend, read(logits, [11]), text, tokens + tokens[:3], [*TREE, 4, 10, 4])
        backend.forward([work(session, [5], [-1], first=13, wanted=[])])
        session.commit([0, 1, 4])
        check_session(backend, session, [*text, tokens[0], tokens[1], tokens[4]])


def rows_are_the_callers(factory: Factory) -> None:
    """A row stays as it was when it is read again, written to, and when the next pass comes."""
    with loaded(factory) as backend:
        session = backend.open()
        logits = backend.forward([work(session, [5, 6], [-1, 0])])[0]
        row = logits.row(1)
        kept = row.copy()
        logits.row(1)[:] = 0
        assert np.array_equal(logits.row(1), kept)
        assert np.array_equal(logits.view(1), kept)
        backend.forward([work(session, [7, 8, 9], [-1, 2, 3], first=2)])
        assert np.array_equal(row, kept)


def top_is_a_full_softmax(factory: Factory) -> None:
    with loaded(factory) as backend:
        size = backend.vocab.size
        session, generator = backend.open(), np.random.default_rng(90)
        logits = backend.forward([work(session, random_tokens(backend, 4, 91), [-1, 0, 0, 1])])[0]
        short = generator.gumbel(size=size - 3).astype(np.float32)
        banned = np.zeros(size, np.float32)
        banned[logits.row(2).argmax()] = -np.inf
        noise = [None, generator.gumbel(size=size).astype(np.float32), banned, short]
        nodes = [3, 0, 2, 1]
        for k in (1, 2, 7, size + 1):
            for temperature in (1.0, 0.3, 2.5):
                all_ids, all_values = logits.top(nodes, k, temperature, noise)
                assert len(all_ids) == len(all_values) == len(nodes)
                for node, extra, ids, values in zip(nodes, noise, all_ids, all_values, strict=True):
                    scores = logits.row(node).astype(np.float64)
                    if extra is not None:
                        scores = scores[: len(extra)] + extra
                    scores /= temperature
                    expected = scores - scores.max() - np.log(np.exp(scores - scores.max()).sum())
                    assert len(ids) == len(values) == min(k, len(scores))
                    assert len(np.unique(ids)) == len(ids)
                    best = np.sort(expected)[::-1][:k]
                    finite = np.isfinite(best)
                    # float32 scores: |score| * 2^-23 and a few units more
                    np.testing.assert_allclose(values[finite], best[finite], rtol=1e-5, atol=1e-4)
                    np.testing.assert_allclose(values[finite], expected[ids][finite], rtol=1e-5, atol=1e-4)
                    assert (values[~finite] == -np.inf).all()


def a_full_context_changes_nothing(factory: Factory) -> None:
    with loaded(factory) as backend:
        limit = backend.capabilities.context_length
        session, bystander = backend.open(), backend.open()
        text = (random_tokens(backend, 32, 100) * (limit // 32 + 1))[: limit - 2]
        other = random_tokens(backend, 3, 101)
        prefill(backend, session, text)
        prefill(backend, bystander, other)
        backend.forward([work(session, [5], [-1])])  # position limit - 2
        too_long = work(session, [6, 7], [0, 1], first=1)
        raises(ContextFull, lambda: backend.forward([too_long]))
        # Nothing has changed, in no session of the batch.
        raises(ContextFull, lambda: backend.forward([work(bystander, [6], [-1]), too_long]))
        raises(ContextFull, lambda: backend.forward([too_long, work(bystander, [6], [-1])]))
        logits = backend.forward([work(session, [6], [0], first=1), work(bystander, [7], [-1])])  # the last place
        rows = [logits[0].row(1), logits[1].row(0)]
        expected = rows_of_chains(backend, [*text, 5], [5, 6], [-1, -1], [0, 1])
        close_enough(backend, rows[0], expected[1])
        close_enough(backend, rows[1], chain_rows(backend, [*other, 7])[-1])
        session.commit([0, 1])
        bystander.commit([0])
        assert len(session.token_ids) == limit
        raises(ContextFull, lambda: backend.forward([work(session, [5], [-1])]))
        check_session(backend, bystander, [*other, 7])
        session.rewind(limit - 1)
        check_session(backend, session, [*text, 5], {(*text, 5, 5): expected[0]})


def a_broken_work_changes_nothing(factory: Factory) -> None:
    with loaded(factory, context_length=0) as backend:
        limits = backend.capabilities
        session, bystander = backend.open(), backend.open()
        text = random_tokens(backend, 4, 110)
        prefill(backend, session, text)
        tokens = random_tokens(backend, 2, 111)
        backend.forward([work(session, tokens, [-1, 0])])

        def chain(count: int) -> list[int]:
            return [1, *range(2, count + 1)]

        many = limits.max_nodes + 1
        bad = {
            "too many nodes in one forward": [work(bystander, [5] * many, range(-1, many - 1), wanted=[])],
            "too many nodes in the session": [work(session, [5] * (many - 2), chain(many - 2), 2, wanted=[])],
            "a parent that is itself": [work(session, [5, 6], [1, 3], 2)],
            "a parent that comes later": [work(session, [5, 6, 7], [1, 4, 2], 2)],
            "a parent that does not exist": [work(session, [5], [7], 2)],
            "a negative parent": [work(session, [5], [-2], 2)],
        }
        if limits.max_wanted < limits.max_nodes:
            count = limits.max_wanted + 1
            bad["too many wanted nodes"] = [work(bystander, [5] * count, range(-1, count - 1))]
        if limits.max_leaves < limits.max_nodes - 2:
            count = limits.max_leaves + 1
            bad["too many leaves"] = [work(session, range(5, 5 + count), [1] * count, 2, wanted=[])]
        for what, batch in bad.items():
            for combined in (batch, [work(bystander, [5], [-1]), *batch] if batch[0].session is session else batch):
                try:
                    backend.forward(combined)
                except ValueError:
                    continue
                raise AssertionError(f"{what}: ValueError was not raised")
        logits = backend.forward([work(session, [9], [1], 2)])[0]
        check_nodes(backend, read(logits, [2]), text, [*tokens, 9], [-1, 0, 1])
        session.commit([0, 1, 2])
        check_session(backend, session, [*text, *tokens, 9])
        check_session(backend, bystander, [])


def the_last_leaf_fits(factory: Factory) -> None:
    with loaded(factory) as backend:
        limits = backend.capabilities
        leaves = min(limits.max_leaves, limits.max_nodes - 3)
        session, text = backend.open(), random_tokens(backend, 3, 120)
        prefill(backend, session, text)
        tokens = random_tokens(backend, leaves + 3, 121)
        # A root with all leaves but one; then a chain under one leaf, which adds none; then the last leaf.
        parents = [-1] + [0] * (leaves - 1) + [1, leaves] + [leaves]
        backend.forward([work(session, tokens[:leaves], parents[:leaves], wanted=[])])
        backend.forward([work(session, tokens[leaves : leaves + 2], parents[leaves : leaves + 2], leaves, wanted=[])])
        logits = backend.forward([work(session, tokens[leaves + 2 :], parents[leaves + 2 :], leaves + 2)])[0]
        check_nodes(backend, read(logits, [leaves + 2]), text, tokens, parents)
        if limits.max_nodes > leaves + 3:
            raises(ValueError, lambda: backend.forward([work(session, [5], [0], leaves + 3)]))
        path = path_to(parents, leaves + 2)
        session.commit(path)
        text = text + [tokens[node] for node in path]
        # All leaves are free again, also straight under the committed text.
        logits = backend.forward([work(session, tokens[:leaves], [-1] * leaves, wanted=[leaves - 1])])[0]
        check_nodes(backend, read(logits, [leaves - 1]), text, tokens, [-1] * leaves)


def closed_sessions_come_back(factory: Factory) -> None:
    with loaded(factory, anew=True, sessions=2) as backend:
        text = random_tokens(backend, 5, 130)
        for _ in range(5):
            one, two = backend.open(), backend.open()
            raises(UsageError, backend.open)
            raises(UsageError, one.fork)
            prefill(backend, one, text)
            backend.forward([work(one, [5, 6], [-1, -1])])
            prefill(backend, two, text[::-1])
            two.close()
            two.close()
            three = backend.open()
            raises(UsageError, backend.open)  # closing twice gave one session back, not two
            assert three.token_ids == []
            one.close()
            check_session(backend, three, [])
            three.close()
        survivor = backend.open()
    for _ in range(2):
        backend.close()
        raises(Closed, backend.open)
        raises(Closed, lambda: backend.forward([work(survivor, [5], [-1])]))
    survivor.close()


def prefill_in_pieces(factory: Factory) -> None:
    """A prompt of several batches, and what is kept of it when the next prompt shares its beginning."""
    with loaded(factory, context_length=0) as backend:
        limits = backend.capabilities
        length = min(limits.max_nodes + 5, limits.context_length - 2)
        text = (random_tokens(backend, 32, 140) * (length // 32 + 1))[:length]
        session, seen = backend.open(), list[tuple[int, int]]()
        last = prefill(backend, session, text, want_last=True, progress=lambda *done: seen.append(done))
        assert last is not None
        row = last[0].row(last[1])
        assert session.token_ids == text
        assert seen[-1] == (length, length)
        again = prefill(backend, session, text, want_last=True)
        assert again is not None
        assert again[1] == 0 or limits.paths  # only the last token is read again, or what follows the last state
        close_enough(backend, again[0].row(again[1]), row)
        other = [*text[:7], 5, 6]
        prefill(backend, session, other)
        check_session(backend, session, other)


def random_growth(factory: Factory) -> None:
    """A few rounds of random trees, grown in random pieces, with random commits."""
    for seed in range(2):
        generator = np.random.default_rng(seed)
        with loaded(factory) as backend:
            session, text = backend.open(), random_tokens(backend, 6, seed)
            prefill(backend, session, text)
            for turn in range(3):
                parents, tokens, rows = list[int](), list[int](), dict[int, np.ndarray]()
                for piece in range(int(generator.integers(1, 4))):
                    first, count = len(parents), int(generator.integers(1, 7))
                    parents += [int(generator.integers(-1, first + i)) for i in range(count)]
                    tokens += random_tokens(backend, count, 1000 * seed + 10 * turn + piece)
                    logits = backend.forward([work(session, tokens[first:], parents[first:], first)])[0]
                    rows |= read(logits, range(first, first + count))
                chosen = generator.choice(len(parents), min(4, len(parents)), replace=False).tolist()
                check_nodes(backend, {node: rows[node] for node in chosen}, text, tokens, parents)
                path = path_to(parents, int(generator.integers(len(parents))))
                session.commit(path)
                text = text + [tokens[node] for node in path]
            check_session(backend, session, text)


def wide_trees_side_by_side(factory: Factory) -> None:
    """Leaves are lent to the sessions that have trees: all of them together at their share, then one of them alone."""
    with loaded(factory) as backend:
        limits = backend.capabilities
        sessions, texts = [backend.open() for _ in range(2)], [random_tokens(backend, 3, 150 + i) for i in range(2)]
        for session, text in zip(sessions, texts, strict=True):
            prefill(backend, session, text)
        for wished in ([16, 16], [28, 4], [3, 29], [16, 16]):
            counts = [min(limits.leaves(2), count) for count in wished]
            tokens = [random_tokens(backend, count, 160 + count) for count in counts]
            batch = [work(s, t, [-1] * len(t)) for s, t in zip(sessions, tokens, strict=True)]
            logits = backend.forward(batch)
            last = [one.row(count - 1) for one, count in zip(logits, counts, strict=True)]
            for i, (session, row) in enumerate(zip(sessions, last, strict=True)):
                check_nodes(backend, {counts[i] - 1: row}, texts[i], tokens[i], [-1] * counts[i])
                session.commit([counts[i] - 1])
                texts[i] = [*texts[i], tokens[i][-1]]
        for session, text in zip(sessions, texts, strict=True):
            check_session(backend, session, text)


def a_saved_session_goes_on(factory: Factory) -> None:
    """In the same program and in a new one, to the bit; nodes stay behind; the rest of the text can be rewound."""
    text, tokens, known = [], [], dict[tuple[int, ...], np.ndarray]()

    def rows(backend: Backend, session: Session) -> list[np.ndarray]:
        logits = backend.forward([work(session, tokens, TREE)])[0]
        found = [logits.row(node) for node in range(len(TREE))]
        session.commit([])
        return found

    with TemporaryDirectory() as folder:
        path, empty = Path(folder) / "text.session", Path(folder) / "empty.session"
        with loaded(factory) as backend:
            text, tokens = random_tokens(backend, 11, 170), random_tokens(backend, len(TREE), 171)
            session = backend.open()
            session.save(empty)
            prefill(backend, session, text)
            expected = rows(backend, session)
            backend.forward([work(session, [5, 6], [-1, 0])])
            session.save(path, note={"a": [1]})
            session.commit([0])
            check_session(backend, session, [*text, 5], known)
            session.close()
            session = backend.open()
            assert session.load(path) == {"a": [1]}
            assert all(map(np.array_equal, rows(backend, session), expected))
        with loaded(factory, anew=True) as backend:
            session, other = backend.open(), backend.open()
            prefill(backend, session, text[::-1])  # goes
            assert session.load(path) == {"a": [1]}
            assert session.token_ids == text
            assert all(map(np.array_equal, rows(backend, session), expected))
            other.load(path)  # not alone
            check_session(backend, other, text, known)
            other.rewind(5)
            check_session(backend, other, text[:5], known)
            check_session(backend, session, text, known)
            other.load(empty)
            check_session(backend, other, [], known)
            path.write_bytes(path.read_bytes()[:-100])
            raises(SessionFileError, lambda: session.load(path))
            raises(SessionFileError, lambda: session.save(Path(folder) / "nowhere" / "x"))
            prefill(backend, session, text)
            check_session(backend, session, text, known)
        assert sorted(file.name for file in Path(folder).iterdir()) == ["empty.session", "text.session"]


def an_interrupted_pass_leaves_the_text(factory: Factory) -> None:
    with loaded(factory) as backend:
        session, other, text = backend.open(), backend.open(), random_tokens(backend, 9, 180)
        prefill(backend, session, text)
        prefill(backend, other, text[:4])
        backend.forward([work(session, [5, 6], [-1, 0])])
        for batch in (
            [work(session, [7, 8], [1, 1], 2)],
            [work(session, [7], [-1]), work(other, [8, 9], [-1, -1])],
        ):
            ended = backend.pass_number
            backend.interrupt(ended)
            raises(Interrupted, lambda batch=batch: backend.forward(batch))  # type: ignore[misc]
            backend.interrupt(ended)  # too late: it ends no other pass
        check_session(backend, session, text)
        check_session(backend, other, text[:4])


CHECKS = [
    capabilities_are_sound,
    vocabulary_round_trip,
    tree_equals_chains,
    a_tree_with_several_tops,
    growth_layer_by_layer,
    commit_any_path,
    nodes_below_a_commit,
    rewind_and_go_on,
    forks_are_independent,
    several_sessions_in_one_forward,
    only_what_is_wanted,
    rows_are_the_callers,
    top_is_a_full_softmax,
    a_full_context_changes_nothing,
    a_broken_work_changes_nothing,
    the_last_leaf_fits,
    closed_sessions_come_back,
    prefill_in_pieces,
    random_growth,
    wide_trees_side_by_side,
    a_saved_session_goes_on,
    an_interrupted_pass_leaves_the_text,
]
# Of these, an engine that is tested as it is usually loaded is asked again in its other forms; all others in test-all.
MAIN = {
    growth_layer_by_layer,
    nodes_below_a_commit,
    rewind_and_go_on,
    forks_are_independent,
    several_sessions_in_one_forward,
    a_saved_session_goes_on,
    an_interrupted_pass_leaves_the_text,
}
by_check = pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
by_main_check = pytest.mark.parametrize(
    "check",
    [pytest.param(check, id=check.__name__, marks=[] if check in MAIN else pytest.mark.exhaustive) for check in CHECKS],
)
