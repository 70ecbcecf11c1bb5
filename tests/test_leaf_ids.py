"""What sessions of llama.cpp share: sequence ids, lent to those whose trees are wide, and cells."""

import numpy as np
import pytest
from contract import check_nodes, check_session, loaded, raises, random_tokens, work
from reference.backend import ReferenceBackend, random_model
from test_contract import llamacpp_factory

from edgespec.errors import ContextFull
from edgespec.loop.passes import prefill


def test_ids_go_where_leaves_are(small):
    """Trees by turns of more leaves than there are ids: what idle sessions had is used again."""
    with loaded(llamacpp_factory(small), sessions=5, budget=64, context_length=128) as backend:
        limits = backend.capabilities
        assert limits.max_leaves == 64  # not a fifth of 254
        assert 4 * (limits.max_leaves - 1) > limits.spare_leaves
        sessions = [backend.open() for _ in range(4)]
        texts = [random_tokens(backend, 5 + i, i) for i in range(4)]
        for session, text in zip(sessions, texts, strict=True):
            prefill(backend, session, text)
        for turn in range(6):
            i, tokens = turn % 4, random_tokens(backend, 64, 10 + turn)
            logits = backend.forward([work(sessions[i], tokens, [-1] * 64)])[0]
            check_nodes(backend, {63: logits.row(63)}, texts[i], tokens, [-1] * 64)
            sessions[i].commit([63])
            texts[i] = [*texts[i], tokens[63]]
        assert sum(len(session.seq_ids) for session in sessions) == 4 + limits.spare_leaves
        for session, text in zip(sessions, texts, strict=True):
            check_session(backend, session, text)
        # Of those that have nodes none is taken.
        for session in sessions[:3]:
            backend.forward([work(session, random_tokens(backend, 64, 20), [-1] * 64, wanted=[])])
        left = limits.spare_leaves - 3 * 63 + 1
        raises(ValueError, lambda: backend.forward([work(sessions[3], [5] * (left + 1), [-1] * (left + 1))]))
        tokens = random_tokens(backend, left, 30)
        logits = backend.forward([work(sessions[3], tokens, [-1] * left)])[0]
        row = logits.row(left - 1)
        for i, session in enumerate(sessions):
            session.commit([1])
            texts[i] = [*texts[i], (random_tokens(backend, 64, 20) if i < 3 else tokens)[1]]
            check_session(backend, session, texts[i])
        check_nodes(backend, {0: row}, texts[3][:-1], tokens[-1:], [-1])


@pytest.mark.parametrize(("texts", "leaves"), [(1, 9), (2, 6), (3, 4), (10, 2), (11, 1)])
def test_what_each_of_several_texts_may_have(texts, leaves):
    backend = ReferenceBackend(random_model(0), sessions=11, max_leaves=9, spare_leaves=10)
    assert backend.capabilities.leaves(texts) == leaves
    batch = [work(backend.open(), np.arange(leaves), [-1] * leaves) for _ in range(texts)]
    backend.forward(batch)
    with pytest.raises(ValueError, match="leaves"):
        backend.forward([work(one.session, [5] * 9, [-1] * 9, first=leaves) for one in batch[:2]])


@pytest.mark.parametrize("kv_type", ["q8_0", "f32"])
def test_forks_share_cells_also_in_a_cache_that_was_put_in_order(small, small_q4, kv_type):
    factory = llamacpp_factory(small if kv_type == "f32" else small_q4, kv_type=kv_type, share=0.125)
    with loaded(factory, sessions=4, context_length=256) as backend:
        assert backend.capabilities.cells == 256 + 3 * 32
        first, text, known = backend.open(), random_tokens(backend, 200, 1), {}
        prefill(backend, first, text)
        sessions, texts = [first], [text]
        for i in range(2):
            sessions.append(sessions[i].fork())
            texts.append([*text, *random_tokens(backend, 9 + i, 2 + i)])
            prefill(backend, sessions[-1], texts[-1])
        for _ in range(2):
            backend.cells.put_in_order(sessions)
            assert backend.cells.end <= 200 + 2 * 64 + 20
            for session, one in zip(sessions, texts, strict=True):
                check_session(backend, session, one, known)
        sessions[0].rewind(100)
        backend.cells.put_in_order(sessions[::-1])
        texts[0] = text[:100]
        for session, one in zip(sessions, texts, strict=True):
            check_session(backend, session, one, known)
        sessions[1].close()
        other = backend.open()
        full = random_tokens(backend, 250, 9)
        prefill(backend, other, full)  # 210 + 250 tokens, but what is shared
        check_session(backend, sessions[2], texts[2], known)
        size, backend.cells._size = backend.cells._size, 500  # what is for passes left out
        more = [work(sessions[0], [5] * 100, range(-1, 99), wanted=[])]
        with pytest.raises(ContextFull, match="cells is full: 496 hold tokens"):
            backend.forward(more)
        sessions[0].rewind(0)
        other.rewind(100)
        backend.forward(more)
        backend.cells._size = size
        sessions[0].rewind(0)
        for session, one in ((other, full[:100]), (sessions[2], texts[2])):
            check_session(backend, session, one, known)
