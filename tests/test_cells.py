"""Where llama.cpp's sessions put their cells: the bookkeeping, which rounding alone does not always show."""

import sys
import tracemalloc
from contextlib import suppress
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")

from contract import chain_rows, check_session, loaded, random_tokens, work
from edgespec.backends.common.paths import KEPT_STATES
from edgespec.backends.llamacpp import cells as module
from edgespec.backends.llamacpp.cells import with_sources
from edgespec.backends.llamacpp.ggml.files import llama_cpp
from edgespec.backends.llamacpp.recurrent import LlamaRecurrentSession
from edgespec.backends.llamacpp.session import LlamaSession, depth_first
from test_contract import hybrid_factory, llamacpp_factory

from edgespec.errors import ContextFull, ModelError
from edgespec.loop.backend import Work
from edgespec.loop.passes import prefill
from edgespec.loop.shapes import TILE, BatchInvariance, RowClass


def test_the_first_children_come_first():
    assert depth_first([-1, -1, 0, 1, 0, 2, 2], 0) == [0, 2, 5, 6, 4, 1, 3]
    assert depth_first([3, 1, 5, 5], 5) == [0, 2, 3, 1]  # numbers below 5 are nodes of passes before


def test_a_prompt_begins_where_a_tile_does():
    """Behind the cells of others, wherever they end."""
    exact = BatchInvariance("narrow", RowClass(1, 7), RowClass(64, 512))
    owner = SimpleNamespace(
        memory=None, tiles=True, copies=False, capabilities=SimpleNamespace(exact=exact), alone=lambda session: False
    )
    session, nodes = LlamaSession(owner, [0]), np.zeros(1, np.int32)
    prompt, tree = (Work(session, nodes, nodes - 1, nodes, prompt=read) for read in (True, False))
    for end in range(2 * TILE + 1):
        assert (end + session.padding_before(prompt, end)) % TILE == 0
        assert session.padding_before(prompt, end) < TILE
        assert session.padding_before(tree, end) == 0
    session.token_ids = [5] * 3
    with pytest.raises(ContextFull, match="cannot be continued at token 3"):
        session.padding_before(prompt, 10)


def test_texts_share_whole_tiles_with_the_one_that_has_most_of_them():
    texts = [SimpleNamespace(marks=list(range(200)))]
    texts.append(SimpleNamespace(marks=[*range(100), *range(1000, 1100)]))
    texts.append(SimpleNamespace(marks=[*range(100), *range(1000, 1070), 7]))
    texts.append(SimpleNamespace(marks=[9, *range(1, 200)]))
    found = [(texts.index(source), shared) for _, source, shared in with_sources(texts)]
    assert found == [(0, 0), (0, TILE), (1, 2 * TILE), (0, 0)]


def peak_of(do) -> int:
    """Bytes that Python's objects take at most."""
    tracemalloc.start()
    do()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def test_where_memory_is_short_cells_are_put_in_order_without_a_copy_of_all_texts(small):
    with loaded(llamacpp_factory(small), sessions=3, context_length=512) as backend:
        texts, known = [random_tokens(backend, 400, seed) for seed in (1, 2)], {}
        sessions = [backend.open() for _ in texts]
        for session, text in zip(sessions, texts, strict=True):
            prefill(backend, session, text)
            check_session(backend, session, text, known)
        peaks = []
        for spare in (sys.maxsize, 1 << 19):
            backend.cells.spare = spare
            peaks.append(peak_of(lambda: backend.cells.put_in_order(sessions)))
            for session, text in zip(sessions, texts, strict=True):
                check_session(backend, session, text, known)
        assert peaks[1] < peaks[0] / 4


def grow_tree(backend, session, text, step):
    """A root and 40 nodes in two passes, as a draft's tree."""
    leaves = random_tokens(backend, 41, step)
    backend.forward([work(session, text[:1] + leaves[:20], [-1] + 20 * [0])])
    backend.forward([work(session, leaves[20:40], 20 * [1], first=21)])


def test_trees_of_several_passes_have_room_beside_what_others_waste(small):
    """Cells that a tree leaves below those of another session are waste until no session has nodes."""
    with loaded(llamacpp_factory(small), sessions=2, context_length=1024, budget=64) as backend:
        sessions, texts = [backend.open() for _ in range(2)], [random_tokens(backend, 980, seed) for seed in (1, 2)]
        for session, text in zip(sessions, texts, strict=True):
            prefill(backend, session, text[:930])
        for step in range(50):
            for session, text in zip(sessions, texts, strict=True):
                grow_tree(backend, session, text[930 + step :], step)
            for session in sessions:
                session.commit([0])
        sessions[1].close()
        check_session(backend, sessions[0], texts[0], {})


def test_a_tree_without_room_has_cells_put_in_order_after_it(small):
    with loaded(llamacpp_factory(small), sessions=2, context_length=256) as backend:
        first, second = backend.open(), backend.open()
        prefill(backend, first, random_tokens(backend, 100, 1))
        prefill(backend, second, random_tokens(backend, 100, 2))
        first.rewind(50)  # its cells lie below others: waste
        backend.forward([work(second, [5], [-1])])
        with pytest.raises(ContextFull, match="nodes of other trees"):
            backend.make_room(10_000)
        second.commit([0])
        assert backend.cells.end > 151
        backend.forward([work(second, [6], [-1])])
        assert backend.cells.end == 152


def test_a_short_part_of_a_prompt_has_room_for_its_padding_on_both_sides(small_q4):
    """Before it, to the same place of a tile, and behind it, to the row class of prompts."""
    with loaded(llamacpp_factory(small_q4), sessions=2, context_length=2000) as backend:
        backend.keep_to(BatchInvariance("narrow", RowClass(1, 7), RowClass(64, 512)))
        first, second = backend.open(), backend.open()
        text, end = random_tokens(backend, 1381, 1), backend.cells._size - 110
        prefill(backend, first, text[:1380])
        prefill(backend, second, random_tokens(backend, 1500, 2))
        while backend.cells.end < end:
            backend.cells.fill(min(TILE, end - backend.cells.end), [first, second])
        node = np.zeros(1, np.int32)
        backend.forward([Work(first, np.array(text[1380:], np.int32), node - 1, node, prompt=True)])


def test_a_failed_pass_takes_no_cells_of_ids_that_were_not_lent_yet(small, monkeypatch):
    with loaded(llamacpp_factory(small, exact="off"), sessions=4, context_length=200) as backend:
        backend.ids._free = backend.ids._free[:2]
        lent, other, failing = (backend.open() for _ in range(3))
        text = random_tokens(backend, 60, 1)
        prefill(backend, lent, text)
        for session in (other, failing):
            prefill(backend, session, random_tokens(backend, 10, 2))
        backend.forward([work(lent, [5, 6, 7], [-1, -1, -1])])
        lent.commit([])  # two ids more stay with it
        backend.forward([work(other, [5], [-1])])
        batch = [work(failing, [9], [-1]), work(other, [5, 6, 7], [0, 0, 0], first=1)]
        with monkeypatch.context() as patch:
            patch.setattr(LlamaSession, "add", Mock(side_effect=KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                backend.forward(batch)
        backend.cells.uncertain = False  # else cells are put in order, which mends it
        [logits] = backend.forward([work(lent, [5, 6, 7], [-1, -1, -1])])
        rows = [logits.row(node) for node in range(3)]
        lent.commit([])
        for token, row in zip((5, 6, 7), rows, strict=True):
            assert np.allclose(chain_rows(backend, [*text, token], 60)[-1], row, atol=1e-4)


def test_a_disk_that_fails_leaves_cells_as_they_are(small, monkeypatch):
    def full(needed):
        raise ModelError("no disk has room")

    def fails(file, parts):
        raise OSError("no space left on device")

    with loaded(llamacpp_factory(small), sessions=2, context_length=256) as backend:
        session, text, known = backend.open(), random_tokens(backend, 100, 1), {}
        prefill(backend, session, text)
        backend.cells.spare = 0
        with monkeypatch.context() as patch:
            patch.setattr(module, "write_parts", fails)
            with pytest.raises(ModelError, match="cells cannot be put in order: no space left"):
                backend.cells.put_in_order([session])
            check_session(backend, session, text, known)
        monkeypatch.setattr(module, "folder_with_room", full)
        backend.cells.put_in_order([session])
        check_session(backend, session, text, known)


def test_a_pass_that_ctrl_c_ends_after_its_computation_leaves_no_cells(small_q4, monkeypatch):
    """Neither of the nodes, nor of padding, nor of committed tokens that it read."""
    with loaded(llamacpp_factory(small_q4)) as backend:
        backend.keep_to(BatchInvariance("wide", RowClass(8, 63), RowClass(8, 63)))
        text, session = random_tokens(backend, 7, 1), backend.open()
        prefill(backend, session, text)
        backend.forward([work(session, [5, 6, 7, 8], [-1, 0, 0, 2])])
        session.commit([0, 2, 3])
        text = [*text, 5, 7, 8]
        assert session.unread_committed == 2
        with monkeypatch.context() as patch:
            patch.setattr(session, "evaluated", Mock(side_effect=KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                backend.forward([work(session, [9], [-1])])
        session.rewind(len(text))
        check_session(backend, session, text)


def test_what_is_committed_behind_a_gap_is_owed(small):
    with loaded(llamacpp_factory(small)) as backend:
        text, tokens = random_tokens(backend, 7, 1), random_tokens(backend, 4, 2)
        for parents, path, owed in [
            ([-1, 0, 1, 1], [0, 1, 2], 0),
            ([-1, 0, 1, 1], [0, 1, 3], 1),
            ([-1, 0, 0, 0], [0, 3], 1),
            ([-1, 0, 0, 2], [0, 2, 3], 2),
        ]:
            session = backend.open()
            prefill(backend, session, text)
            backend.forward([work(session, tokens, parents)])
            session.commit(path)
            assert session.unread_committed == owed
            assert backend.cells.end == len(text) + len(path) - owed
            check_session(backend, session, [*text, *(tokens[node] for node in path)])
            session.close()


@pytest.mark.parametrize("call", ["evaluated", "_keep"])
def test_a_pass_or_commit_that_ctrl_c_ends_parts_no_states(call, tmp_path, monkeypatch):
    """Afterwards the session, and the next one with its sequence ids, read their texts as before."""
    with loaded(hybrid_factory(tmp_path)) as backend:
        text, session = random_tokens(backend, 9, 1), backend.open()
        prefill(backend, session, text)
        interrupted = Mock(side_effect=KeyboardInterrupt)
        with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
            patch.setattr(LlamaRecurrentSession, call, interrupted)
            backend.forward([work(session, [5, 6, 7], [-1, 0, 0])])
            session.commit([0, 1])
        interrupted.assert_called_once()
        session.rewind(len(text))
        assert len(session._lanes) == len(set(session._lanes)) == len(session.seq_ids) - KEPT_STATES - 2
        check_session(backend, session, text)
        session.close()
        other = backend.open()
        prefill(backend, other, text[2:])
        check_session(backend, other, text[2:])


def padding_in_use(backend):
    cells = backend.cells
    return llama_cpp.llama_memory_seq_pos_max(cells._memory, cells.padding_id) >= 0


def test_cells_of_padding_are_free_after_the_pass_and_waste_where_used_ones_follow(small_q4):
    with loaded(llamacpp_factory(small_q4), sessions=2, context_length=512) as backend:
        backend.keep_to(BatchInvariance("wide", RowClass(8, 63), RowClass(8, 63)))
        one, other = backend.open(), backend.open()
        backend.forward([work(one, [5], [-1])])  # seven rows of padding follow
        assert (backend.cells.end, backend.cells.wasted, padding_in_use(backend)) == (1, False, False)
        one.commit([0])
        backend.cells.drop_padding(0)
        assert not backend.cells.wasted
        backend.cells.fill(3, [one])
        assert (backend.cells.end, backend.cells.wasted, padding_in_use(backend)) == (4, True, False)
        backend.forward([work(other, [6], [-1])])
        assert backend.cells.end == 5


@pytest.mark.parametrize(("wasted", "end"), [(20, 40), (21, 19)])
def test_cells_are_put_in_order_when_more_are_waste_than_in_use(small, monkeypatch, wasted, end):
    monkeypatch.setattr(module, "MUCH_WASTE", 20)
    with loaded(llamacpp_factory(small), sessions=2, context_length=512) as backend:
        below, above = backend.open(), backend.open()
        prefill(backend, below, random_tokens(backend, 30, 1))
        prefill(backend, above, random_tokens(backend, 10, 2))
        below.rewind(30 - wasted)
        assert backend.cells.end == 40
        backend.make_room(1)
        assert (backend.cells.end, backend.cells.wasted) == (end, True)
