"""Sessions in files: what is not whole, or not of this model, is refused with a line; the shelf of a server."""

import json
import os
import re
import shutil
import sys
import zlib
from pathlib import Path
from time import time
from types import SimpleNamespace

import pytest
from contract import check_session, loaded, random_tokens
from reference.backend import ReferenceBackend, perturbed, random_model
from test_contract import llamacpp_factory, mlx_factory, torch_factory

from edgespec.errors import SessionFileError
from edgespec.loop import session_files as saved
from edgespec.loop.passes import prefill
from edgespec.loop.shapes import BatchInvariance, RowClass
from edgespec.model import Model
from edgespec.planners.none import NonePlanner
from edgespec.planners.specexec import SpecExecPlanner
from edgespec.scheduler.disk_cache import DiskCache

MODEL = random_model(4)


def backend(model=MODEL, **options):
    return ReferenceBackend(model, sessions=4, **{"context_length": 600, **options})


def session_of(target, count=20, seed=1):
    session = target.open()
    prefill(target, session, random_tokens(target, count, seed))
    return session


def describe(path, described):
    """Give a session's file another description, with a right checksum: bytes, or a change of its fields."""
    data = path.read_bytes()
    length = saved.END.unpack(data[-saved.END.size :])[0]
    engine, text = data[: -saved.END.size - length], data[-saved.END.size - length : -saved.END.size]
    text = described if isinstance(described, bytes) else json.dumps(json.loads(text) | described).encode()
    path.write_bytes(engine + text + saved.END.pack(len(text), zlib.crc32(text), saved.MARK))


DAMAGED, LATER = "the saved session is damaged", "was saved by another version of this program"
READ = {"read": 20, "short": False}
ODD = {
    "nothing": (b"", DAMAGED),
    "no JSON": (b"{", DAMAGED),
    "no UTF-8": (b'{"\xff": 1}', DAMAGED),
    "deep": (b"[" * 100_000, DAMAGED),
    "a list": (b"[]", DAMAGED),
    "a number": (b"5", DAMAGED),
    "a huge number": (b"9" * 5000, DAMAGED),
    "empty": (b"{}", LATER),
    "another version": ({"version": 2}, LATER),
    "no version": ({"version": [1]}, LATER),
    "a later field": ({"kind": "chat"}, LATER),
    "a later field of the engine": ({"details": READ | {"zone": 3}}, LATER),
    "tokens that are text": ({"token_ids": ["a"] * 9}, DAMAGED),
    "a text of tokens": ({"token_ids": "abc"}, DAMAGED),
    "flags as tokens": ({"token_ids": [True]}, DAMAGED),
    "fractions as tokens": ({"token_ids": [1.5]}, DAMAGED),
    "whole fractions as tokens": ({"token_ids": [1.0]}, DAMAGED),
    "no number as token": ({"token_ids": [float("nan")]}, DAMAGED),
    "a token below 0": ({"token_ids": [-1] + 19 * [0]}, DAMAGED),
    "a token that the model has not": ({"token_ids": [10**6] + 19 * [0]}, DAMAGED),
    "a huge token": ({"token_ids": [10**400] + 19 * [0]}, DAMAGED),
    "more tokens than bytes": ({"token_ids": [0] * 21}, DAMAGED),
    "no identity": ({"identity": None}, DAMAGED),
    "a list of details": ({"details": []}, DAMAGED),
    "a flag for a number": ({"details": READ | {"read": True}}, DAMAGED),
    "a number below 0": ({"details": READ | {"read": -1}}, DAMAGED),
    "more tokens read than there are": ({"details": READ | {"read": 21}}, DAMAGED),
    "a number for a flag": ({"details": READ | {"short": 1}}, DAMAGED),
    "a size below 0": ({"size": -1}, DAMAGED),
    "a text as size": ({"size": "9"}, DAMAGED),
    "a huge size": ({"size": 10**4000}, DAMAGED),
    "another size": ({"size": 9}, DAMAGED),
    "a flag as checksum": ({"checksum": True}, DAMAGED),
}


@pytest.fixture
def path(tmp_path):
    session_of(backend()).save(tmp_path / "a.session", note="hello")
    return tmp_path / "a.session"


class TestFiles:
    def test_only_its_owner_reads_it(self, path):
        assert path.stat().st_mode & 0o077 == 0

    def test_what_is_cut_or_changed_anywhere_is_refused(self, path):
        whole, target = path.read_bytes(), backend()
        session = session_of(target, 5)
        text = session.token_ids.copy()
        step = max(1, len(whole) // 150)
        for at in [*range(0, len(whole), step), len(whole) - 1]:
            for damaged in (whole[:at], whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :]):
                path.write_bytes(damaged)
                with pytest.raises(SessionFileError, match=re.escape(str(path))):
                    session.load(path)
        check_session(target, session, text)
        path.write_bytes(whole)
        assert session.load(path) == "hello"

    @pytest.mark.parametrize(
        ("other", "says"),
        [
            (lambda: backend(perturbed(MODEL, 1e-9, 1)), "it is another model's"),
            (lambda: backend(random_model(4, heads=4)), "it is another model's"),
            (lambda: backend(context_length=19), "has 20 tokens, but the context holds 19"),
        ],
    )
    def test_another_model(self, path, other, says):
        with pytest.raises(SessionFileError, match=says):
            other().open().load(path)

    def test_another_class_or_engine(self, path):
        target = backend()
        target.keep_to(BatchInvariance("narrow", RowClass(1, 7), RowClass(1, 41)))
        with pytest.raises(SessionFileError, match=r"exact was 'off' and is 'narrow \(trees from 1, prompts from 1\)'"):
            target.open().load(path)
        for most in (41, 30):  # of a class all sizes agree
            target = backend()
            target.keep_to(BatchInvariance("narrow", RowClass(1, 7), RowClass(1, most)))
            if most == 41:
                session_of(target).save(path)
            target.open().load(path)
        session_of(backend()).save(path)
        target = backend()
        target.build = "numpy 0.1"
        with pytest.raises(SessionFileError, match=r"build was 'numpy .*' and is 'numpy 0\.1'"):
            target.open().load(path)

    def test_another_kv_type_is_said_before_the_class_that_it_changes(self):
        was, here = ({"weights": "a", "exact": x, "kv_type": k} for x, k in (("narrow", "f16"), ("off", "q8_0")))
        described = saved.Saved(identity=was, token_ids=[], details={}, note=None, size=0, checksum=0)
        assert saved.difference(described, SimpleNamespace(identity=here)) == "kv_type was 'f16' and is 'q8_0'"

    @pytest.mark.parametrize("what", ODD)
    def test_a_description_that_this_program_does_not_write_is_one_line(self, path, what, tmp_path):
        described, says = ODD[what]
        describe(path, described)
        target, lines = backend(), []
        session = session_of(target, 5)
        text = session.token_ids.copy()
        with pytest.raises(SessionFileError) as caught:
            session.load(path)
        assert str(caught.value) == f"{path}: {says}"
        check_session(target, session, text)
        path.rename(tmp_path / f"{'a' * 32}.kept")
        shelf = DiskCache(tmp_path, target, 1 << 30, say=lines.append)
        if found := shelf.best(text)[0]:  # what a description alone does not show
            shelf.load(found, session)
        assert lines == [f"{tmp_path / ('a' * 32)}.kept: {says}; it is left out"]

    @pytest.mark.skipif(sys.platform == "win32", reason="gaps in a file take room on the disk")
    def test_the_length_of_a_description_is_bounded_before_it_is_read(self, path):
        """Of a file with gaps, which takes no room on the disk."""
        with path.open("r+b") as file:
            file.truncate(1 << 36)
            file.seek(0, os.SEEK_END)
            file.write(saved.END.pack(1 << 36, 0, saved.MARK))
        with pytest.raises(SessionFileError, match="is not a saved session, or its end is missing"):
            saved.look(path)

    def test_what_could_not_be_read_again_is_not_saved(self, path, monkeypatch):
        monkeypatch.setattr(saved, "MOST", 1000)
        before = path.read_bytes()
        with pytest.raises(SessionFileError, match="bytes describe it"):
            session_of(backend()).save(path, note="x" * 1000)
        assert path.read_bytes() == before

    def test_another_version(self, path, monkeypatch):
        monkeypatch.setattr(saved, "VERSION", 2)
        with pytest.raises(SessionFileError, match="another version"):
            saved.look(path)

    def test_no_file_and_no_folder(self, path):
        with pytest.raises(SessionFileError, match="No such file"):
            backend().open().load(path.with_name("b"))
        with pytest.raises(SessionFileError, match="cannot be saved"):
            backend().open().save(path / "b")

    def test_a_save_that_fails_leaves_what_was_there(self, path, monkeypatch):
        before, session = path.read_bytes(), session_of(backend(), 9)

        def full(*_):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(SessionFileError, match="No space left"):
            session.save(path)
        assert path.read_bytes() == before
        assert list(path.parent.iterdir()) == [path]

    def test_equal_files_are_equal_models_wherever_they_lie(self, tmp_path):
        data = os.urandom(3 << 20)
        for name, content in [("a", data), ("b", data), ("c", data[:-1] + bytes([data[-1] ^ 1])), ("d", data + b"x")]:
            (tmp_path / name).write_bytes(content)
        found = [saved.content_of(str(tmp_path / name)) for name in "abcd"]
        assert found[0] == found[1]
        assert len(set(found)) == 3
        with pytest.raises(SessionFileError, match="cannot be read"):
            saved.content_of(str(tmp_path / "e"))


@pytest.mark.skipif(sys.platform == "win32", reason="Windows replaces no mapped file")
@pytest.mark.parametrize("engine", ["smollm2_tiny", "torch", "mlx"])
def test_a_model_whose_file_is_replaced_is_still_the_one_that_was_loaded(engine, tmp_path, request):
    """In one process, under one path: sessions of the old model are not those of the new one."""
    if engine == "smollm2_tiny":
        pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
        weights = tmp_path / "model.gguf"
        shutil.copy(request.getfixturevalue(engine), weights)
        load = llamacpp_factory(weights)
    else:
        load = {"torch": torch_factory, "mlx": mlx_factory}[engine](tmp_path / "folder")
        weights = next((tmp_path / "folder").rglob("*.safetensors"))
    with loaded(load, sessions=1, context_length=64) as old:
        text = random_tokens(old, 20, 1)
        session = old.open()
        prefill(old, session, text)
        session.save(tmp_path / "old.session")
        changed = bytearray(weights.read_bytes())
        changed[-100] ^= 1
        weights.with_name("new").write_bytes(changed)
        weights.with_name("new").replace(weights)
        with loaded(load, sessions=1, context_length=64) as new:
            other = new.open()
            with pytest.raises(SessionFileError, match="it is another model's"):
                other.load(tmp_path / "old.session")
            session.save(tmp_path / "later.session")
            with pytest.raises(SessionFileError, match="it is another model's"):
                other.load(tmp_path / "later.session")
        session.load(tmp_path / "old.session")
        assert session.token_ids == text


class TestShelf:
    def make(self, tmp_path, target, most=1 << 30, lines=None):
        return DiskCache(tmp_path / "shelf", target, most, least=4, say=(lines if lines is not None else []).append)

    def files(self, tmp_path):
        return sorted(file.name for file in (tmp_path / "shelf").iterdir())

    def test_the_longest_beginning_is_found_also_by_the_next_program(self, tmp_path):
        target = backend()
        shelf = self.make(tmp_path, target)
        one, two = session_of(target, 20, 1), session_of(target, 30, 2)
        assert shelf.put(one)
        assert shelf.put(two)
        assert not shelf.put(one)  # it is there
        other = self.make(tmp_path, backend())
        path, shared = other.best([*two.token_ids[:17], 0, 0])
        assert shared == 17
        fresh = target.open()
        other.load(path, fresh)
        fresh.rewind(17)
        check_session(target, fresh, two.token_ids[:17])
        assert self.make(tmp_path, backend(random_model(5))).best(one.token_ids) == (None, 0)

    def test_a_longer_text_takes_the_place_of_its_beginning(self, tmp_path):
        target = backend()
        shelf, session = self.make(tmp_path, target), session_of(target, 20)
        shelf.put(session)
        prefill(target, session, [*session.token_ids, 9, 9])
        assert not shelf.put(session)  # too little that is new
        prefill(target, session, [*session.token_ids, 9, 8, 7])
        assert shelf.put(session)
        assert len(self.files(tmp_path)) == 1
        assert shelf.best(session.token_ids)[1] == 25

    def test_those_used_least_lately_go(self, tmp_path):
        target = backend()
        sessions = [session_of(target, 20, seed) for seed in range(3)]
        shelf = self.make(tmp_path, target)
        shelf.put(sessions[0])
        (size,) = [file.stat().st_size for file in (tmp_path / "shelf").iterdir()]
        shelf = self.make(tmp_path, target, most=2 * size + 200)
        shelf.put(sessions[1])
        for i, when in ((0, 100), (1, 90)):
            os.utime(shelf.best(sessions[i].token_ids)[0], (when, when))
        shelf.put(sessions[2])
        assert [shelf.best(session.token_ids)[1] > 5 for session in sessions] == [True, False, True]
        assert len(self.files(tmp_path)) == 2

    def test_a_session_that_never_fits_costs_no_other_one(self, tmp_path, monkeypatch):
        """Nor is it written again and again, nor a longer one."""
        target, lines, saves = backend(), [], []
        short, long, longer = (session_of(target, count, seed) for seed, count in enumerate((20, 60, 90)))
        shelf = self.make(tmp_path, target)
        shelf.put(short)
        (size,) = [file.stat().st_size for file in (tmp_path / "shelf").iterdir()]
        shelf = self.make(tmp_path, target, most=2 * size, lines=lines)
        save = type(long).save
        monkeypatch.setattr(type(long), "save", lambda self, *given: (saves.append(self), save(self, *given))[1])
        for session in (long, long, longer):
            assert not shelf.put(session)
        assert saves == [long]
        assert shelf.best(short.token_ids)[1] == 20
        assert len(self.files(tmp_path)) == len(lines) == 1
        assert "60 tokens" in lines[0]
        draft = backend(random_model(2))
        read = draft.open()
        other = session_of(target, 20, 5)
        prefill(draft, read, [*other.token_ids, *range(30)])
        shelf = self.make(tmp_path, target, most=2 * size, lines=lines)
        assert not shelf.put(other, read)  # with the draft's part
        assert shelf.best(short.token_ids)[1] == 20
        assert len(self.files(tmp_path)) == 1

    def test_a_bad_file_is_said_and_removed(self, tmp_path):
        target, lines = backend(), []
        shelf, session = self.make(tmp_path, target, lines=lines), session_of(target)
        shelf.put(session)
        (path,) = (tmp_path / "shelf").iterdir()
        path.write_bytes(b"?" + path.read_bytes()[1:])
        fresh = target.open()
        shelf.load(path, fresh)
        assert "damaged" in lines[0]
        assert fresh.token_ids == []
        assert self.files(tmp_path) == []
        assert shelf.best(session.token_ids) == (None, 0)

    def test_a_file_for_a_larger_context_stays(self, tmp_path):
        target, lines = backend(context_length=100), []
        session = session_of(target, 80)
        self.make(tmp_path, target).put(session)
        assert self.make(tmp_path, backend(context_length=50), lines=lines).best(session.token_ids) == (None, 0)
        assert len(self.files(tmp_path)) == 1
        assert self.make(tmp_path, target).best(session.token_ids)[1] == 80
        assert lines == []

    def test_a_file_that_cannot_be_read_now_stays(self, tmp_path, monkeypatch):
        target, lines = backend(), []
        shelf, session = self.make(tmp_path, target, lines=lines), session_of(target)
        shelf.put(session)

        def fails(*given):
            raise OSError(5, "Input/output error")

        def fails_too(*given):
            raise SessionFileError("No space left on device")

        monkeypatch.setattr(saved, "checksum_of", fails)
        shelf.load(shelf.best(session.token_ids)[0], target.open())
        assert "cannot be read: Input/output error" in lines[0]
        assert shelf.best(session.token_ids) == (None, 0)
        assert len(self.files(tmp_path)) == 1
        monkeypatch.setattr(type(session), "save", fails_too)
        assert not shelf.put(session)  # the disk is full
        assert len(self.files(tmp_path)) == 1
        monkeypatch.undo()
        (path,) = (tmp_path / "shelf").iterdir()
        path.write_bytes(b"half")
        assert shelf.put(session)
        assert self.make(tmp_path, target).best(session.token_ids)[1] == len(session.token_ids)

    def test_what_killed_programs_left_is_removed(self, tmp_path):
        target = backend()
        self.make(tmp_path, target)
        old, new = (f".{letter * 32}.kept-123.new" for letter in "ab")
        for name, when in [(old, 100), (new, time())]:
            (tmp_path / "shelf" / name).write_bytes(b"half")
            os.utime(tmp_path / "shelf" / name, (when, when))
        self.make(tmp_path, target)
        assert self.files(tmp_path) == [new]  # another program may be writing it

    def test_another_program_may_complete_a_file_meanwhile(self, tmp_path, monkeypatch):
        target = backend()
        self.make(tmp_path, target)
        (tmp_path / "shelf" / f".{'a' * 32}.kept-123.new").write_bytes(b"half")
        glob = Path.glob

        def completed(folder, pattern):
            for path in list(glob(folder, pattern)):
                if path.suffix == ".new":
                    path.unlink()
                yield path

        monkeypatch.setattr(Path, "glob", completed)
        self.make(tmp_path, target)
        assert self.files(tmp_path) == []

    def test_a_draft_s_session_lies_beside_and_counts(self, tmp_path):
        target, draft = backend(), backend(random_model(2))
        shelf, session, read = self.make(tmp_path, target), session_of(target), draft.open()
        prefill(draft, read, session.token_ids[:15])
        assert shelf.put(session, read)
        kept, path = self.files(tmp_path), shelf.best(session.token_ids)[0]
        assert kept == [path.name, f"{path.name}.draft"]
        fresh, again = target.open(), draft.open()
        assert shelf.load(path, fresh, again)
        check_session(draft, again, session.token_ids[:15])
        other = backend(random_model(3)).open()
        assert shelf.load(path, fresh, other)  # another draft reads again
        assert other.token_ids == []
        both = sum(file.stat().st_size for file in (tmp_path / "shelf").iterdir())
        self.make(tmp_path, target, most=both + 300).put(session_of(target, 20, 2))
        assert path.name not in self.files(tmp_path)
        assert f"{path.name}.draft" not in self.files(tmp_path)

    def test_a_draft_that_has_read_little_is_not_saved(self, tmp_path):
        target, draft = backend(), backend(random_model(2))
        session, read = session_of(target), draft.open()
        prefill(draft, read, session.token_ids[:3])
        assert self.make(tmp_path, target).put(session, read)
        assert len(self.files(tmp_path)) == 1

    def test_a_folder_that_cannot_be(self, tmp_path):
        Path(tmp_path / "shelf").write_text("a file", "utf-8")
        with pytest.raises(SessionFileError, match="cannot be used"):
            self.make(tmp_path, backend())


class TestDrafts:
    TEXT = "it was a dark and stormy night, and the rain fell in torrents"

    def model(self, draft):
        target = ReferenceBackend(random_model(2, vocab_size=258), sessions=1)
        draft.read = []
        forward = draft.forward

        def spied(works):
            draft.read += [work.token_ids.tolist() for work in works if len(work.token_ids) > 20]
            return forward(works)

        draft.forward = spied
        return Model(target, SpecExecPlanner(draft, depth=3, beam=2), budget=6)

    def draft(self, seed=5):
        return ReferenceBackend(random_model(seed, vocab_size=258), sessions=1)

    def test_a_prompt_that_was_kept_is_not_read_by_the_draft_either(self, tmp_path):
        with self.model(first := self.draft()) as model:
            before = model.generate(self.TEXT, max_tokens=8)
            model.scheduler.save(tmp_path / "a")
        assert first.read
        for draft, reads in [(self.draft(), False), (self.draft(6), True)]:
            with self.model(draft) as model:
                model.scheduler.load(tmp_path / "a")
                after = model.generate(self.TEXT, max_tokens=8)
            assert after.token_ids == before.token_ids
            assert after.stats.cached_tokens == after.stats.prompt_tokens - 1
            assert bool(draft.read) == reads

    def test_a_file_that_has_it_all_stays(self, tmp_path):
        with self.model(self.draft()) as model:
            model.generate(self.TEXT, max_tokens=8)
            model.scheduler.save(tmp_path / "a")
            before = (tmp_path / "a.draft").stat().st_ino
            model.scheduler.save(tmp_path / "a")
            assert (tmp_path / "a.draft").stat().st_ino == before

    def test_a_file_of_another_model_does_not_stay(self, tmp_path):
        """Also where both models have the same text."""
        for seed in (5, 6):
            with Model(self.draft(seed), NonePlanner(), budget=1) as model:
                model.scheduler.save(tmp_path / "a", "note")
                assert model.scheduler.load(tmp_path / "a") == "note"
