"""Models some of whose layers look back over a sliding window: what has left it is looked at again after a rewind."""

import numpy as np
import pytest
from window_files import ARCHITECTURES, WINDOW, write_windowed

from edgespec.errors import ModelError, SessionFileError, UsageError
from edgespec.loop.backend import Work
from edgespec.loop.passes import prefill
from edgespec.loop.shapes import BatchInvariance, RowClass

llamacpp = pytest.importorskip("edgespec.backends.llamacpp.engine")
cells = pytest.importorskip("edgespec.backends.llamacpp.cells")
ENOUGH = {"gpt-oss": 0.15}  # rounding alone, where other parts of a text are read at once: weights have 8 bits
FLOATS = 2e-3  # where keys are missing, logits differ by more than these


of_one = pytest.mark.parametrize("path", ["gemma3"], indirect=True)  # what does not depend on the architecture


@pytest.fixture(scope="module", params=ARCHITECTURES)
def path(request, tmp_path_factory):
    return str(write_windowed(tmp_path_factory.mktemp("windows") / "tiny.gguf", request.param))


def logits_of(backend, session, token):
    one = np.zeros(1, np.int32)
    found = backend.forward([Work(session, one + token, one - 1, one)])[0].row(0).copy()
    session.rewind(len(session.token_ids))
    return found


def letters(rng, count):
    return rng.integers(3, 250, count).tolist()


class Against:
    """Compares a session with one that has read its text anew, in a cache of its own."""

    def __init__(self, path, enough):
        self._enough = enough
        self._backend = llamacpp.load(path, context_length=1024, threads=1)

    def check(self, backend, session, text):
        assert session.token_ids == text
        if len(text) > 1:
            fresh = self._backend.open()
            prefill(self._backend, fresh, text)
            assert np.abs(logits_of(backend, session, 7) - logits_of(self._backend, fresh, 7)).max() < self._enough
            fresh.close()

    def close(self):
        self._backend.close()


@pytest.fixture
def against(path, request):
    found = Against(path, ENOUGH.get(request.node.callspec.params["path"], FLOATS))
    yield found
    found.close()


@of_one
def test_an_interrupted_save_leaves_no_cells_to_the_padding_of_passes(path, tmp_path, monkeypatch):
    backend = llamacpp.load(path, context_length=500, sessions=2, threads=1, exact="off")
    backend.keep_to(BatchInvariance("wide", RowClass(8, 63), RowClass(8, 63)))
    session, made = backend.open(), []
    prefill(backend, session, list(range(5, 155)))
    inner = cells.llama_cpp.llama_state_seq_get_data

    def interrupted(*arguments):
        made.append(arguments)
        if len(made) == 2:
            raise KeyboardInterrupt
        return inner(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(cells.llama_cpp, "llama_state_seq_get_data", interrupted)
        with pytest.raises(KeyboardInterrupt):
            session.save(tmp_path / "a.session")
    assert np.isfinite(logits_of(backend, session, 7)).all()
    backend.close()


def test_a_text_that_was_saved_or_put_in_order_can_be_rewound(path, against, tmp_path):
    backend, text = (
        llamacpp.load(path, context_length=1024, sessions=3, threads=1),
        letters(np.random.default_rng(0), 320),
    )
    session = backend.open()
    prefill(backend, session, text)
    session.save(tmp_path / "a.session")
    for length in (320, 319, 318, 300, 200, 140, WINDOW + 1, 5):
        session.load(tmp_path / "a.session")
        session.rewind(session.reusable_prefix(length))
        against.check(backend, session, text[:length])
    for length in (300, 141, 20):
        session.load(tmp_path / "a.session")
        other = session.fork()
        other.rewind(150)
        backend.cells.put_in_order([session, other])
        against.check(backend, other, text[:150])
        session.rewind(length)
        against.check(backend, session, text[:length])
        other.rewind(100)
        against.check(backend, other, text[:100])
        other.close()
    backend.close()


@of_one
def test_a_file_that_lacks_what_had_left_the_window_is_refused(path, tmp_path, monkeypatch):
    backend = llamacpp.load(path, context_length=1024, threads=1)
    session, text = backend.open(), letters(np.random.default_rng(0), 200)
    prefill(backend, session, text)
    with monkeypatch.context() as patch:
        patch.setattr(backend.cells, "window", 0)  # as files were written
        session.save(tmp_path / "old")
    with pytest.raises(SessionFileError, match="another version"):
        session.load(tmp_path / "old")
    assert session.token_ids == text
    backend.close()


@of_one
def test_sessions_and_leaves_share_the_ids_that_there_are(path):
    with pytest.raises(UsageError, match="200 texts at once are too many"):
        llamacpp.load(path, context_length=64, sessions=200)
    backend = llamacpp.load(path, context_length=64, sessions=32, budget=300, threads=1)
    limits, sessions = backend.capabilities, [backend.open() for _ in range(32)]
    token_ids = np.arange(limits.max_leaves, dtype=np.int32)
    for session in (sessions[0], sessions[31], sessions[0]):
        backend.forward([Work(session, token_ids, token_ids * 0 - 1, token_ids[:1])])
        session.rewind(0)
    backend.close()


def test_a_window_beside_recurrent_layers_is_refused(tmp_path, monkeypatch):
    import hybrid_files

    header = hybrid_files._header
    monkeypatch.setattr(
        hybrid_files, "_header", lambda writer, arch: (header(writer, arch), writer.add_sliding_window(32))
    )
    path = hybrid_files.write_hybrid(tmp_path / "tiny.gguf", "lfm2")
    with pytest.raises(
        ModelError, match=r"some layers are recurrent and others have a sliding window.*use another model"
    ):
        llamacpp.load(str(path))


@of_one
def test_texts_are_counted_before_the_target_is_loaded(path):
    """A cascade's draft has two sessions for each text."""
    with pytest.raises(UsageError, match=r"64 texts at once are too many: .*, so take 63$"):
        llamacpp.load(path, context_length=64, sessions=64)
    with pytest.raises(UsageError, match=r"32 texts at once are too many: .*, so take 31$"):
        llamacpp.load(path, context_length=64, sessions=32, draft_files=[path], mixed=True)
