import codecs
import errno
import gzip
import json
import os
import shutil
import signal
import sys
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.cli.commands import NAMED
from edgespec.errors import DatastoreError, UsageError
from edgespec.loop.hint_texts import END
from edgespec.planners.datastore import HEADER_SIZE, START, build, check_out, documents_of, open_datastore, read_texts

posix_only = pytest.mark.skipif(sys.platform == "win32", reason="pipes and links")


class LetterVocab:
    """A token is a letter; `start` is the number of `a`, so that large numbers can be tried too."""

    bos_id = None
    eos_id = None
    eog_ids: frozenset[int] = frozenset()
    chat_template = tool_template = None

    def __init__(self, size=26, start=0):
        self.size = size
        self.start = start
        self.fingerprint = f"letters {size} {start}"

    def encode(self, text, *, add_bos, parse_special):
        return [ord(letter) - ord("a") + self.start for letter in text if "a" <= letter <= "z"]

    def token_bytes(self, token_id):
        return self.token_text(token_id).encode()

    def token_text(self, token_id):
        return chr(token_id - self.start + ord("a"))


# 2-byte tokens, the largest 2-byte vocabulary, the smallest 4-byte one, and numbers that need all their bytes compared.
VOCABS = [LetterVocab(), LetterVocab(65535, 65509), LetterVocab(65536, 65510), LetterVocab(152064, 65530)]


def occurrences(documents, prefix):
    """Brute force: what follows each occurrence of `prefix`, to the document's end."""
    starts = [(document, i) for document in documents for i in range(len(document))]
    return sorted(document[i + len(prefix) :] for document, i in starts if document[i:].startswith(prefix))


def stored(path, documents, vocab=VOCABS[0]):
    build(path / "x", documents, vocab)
    return open_datastore(path / "x", vocab)


def text_of(vocab, row):
    return "".join(vocab.token_text(token) for token in row if token != END)


@given(
    st.lists(st.text("abc", min_size=1, max_size=12), min_size=1, max_size=6),
    st.text("abcd", min_size=1, max_size=4),
    st.sampled_from(VOCABS),
)
def test_find_and_continuations_equal_brute_force(tmp_path_factory, documents, prefix, vocab):
    store = stored(tmp_path_factory.mktemp("store"), documents, vocab)
    low, high = store.find(vocab.encode(prefix, add_bos=False, parse_special=False))
    wanted = occurrences(documents, prefix)
    assert high - low == len(wanted)
    rows = store.continuations(low, high, len(prefix), 1000, 13)
    assert rows.shape == (len(wanted), 13)
    assert sorted(text_of(vocab, row) for row in rows) == wanted
    for row in rows:
        ended = np.flatnonzero(row == END)
        assert len(ended)  # no document has 13 letters after a match
        assert (row[ended[0] :] == END).all()


@given(st.lists(st.text("abc", min_size=1, max_size=12), min_size=1, max_size=6), st.sampled_from(VOCABS))
def test_suffixes_are_sorted(tmp_path_factory, documents, vocab):
    path = tmp_path_factory.mktemp("store") / "x.store"
    header = build(path, documents, vocab)
    data = path.read_bytes()
    tokens = np.frombuffer(data, f">u{header.token_width}", header.tokens, HEADER_SIZE).tolist()
    order = np.frombuffer(data, f"<u{header.position_width}", header.tokens, header.suffix_offset).tolist()
    assert order == sorted(range(len(tokens)), key=lambda start: tokens[start:])
    assert (header.tokens, header.documents) == (sum(len(d) + 1 for d in documents), len(documents))


def test_token_width_leaves_room_for_the_separator(tmp_path):
    widths = [build(tmp_path / "x", ["abc"], vocab).token_width for vocab in VOCABS]
    assert widths == [2, 2, 4, 4]


def test_continuations_are_taken_at_regular_intervals(tmp_path):
    # "a" is followed by b 60 times, by c 30 times and by d 10 times; the first ten matches are all b.
    store = stored(tmp_path, ["ab"] * 60 + ["ac"] * 30 + ["ad"] * 10)
    low, high = store.find([0])
    assert high - low == 100
    rows = store.continuations(low, high, 1, 10, 1)
    assert [text_of(LetterVocab(), row) for row in rows] == ["b"] * 6 + ["c"] * 3 + ["d"]


def test_another_tokenizer_is_refused_with_both_named(tmp_path):
    build(tmp_path / "x", ["abc"], LetterVocab(26))
    with pytest.raises(DatastoreError, match=r"another tokenizer: 26 tokens.*letters 26.*152064 tokens.*letters 152"):
        open_datastore(tmp_path / "x", LetterVocab(152064))


@pytest.mark.parametrize("size", [0, 1, HEADER_SIZE - 1, HEADER_SIZE, HEADER_SIZE + 3, -1])
def test_a_file_cut_short_anywhere_is_refused(tmp_path, size):
    stored(tmp_path, ["abcabc", "cab"])
    (tmp_path / "x").write_bytes((tmp_path / "x").read_bytes()[:size])
    with pytest.raises(DatastoreError, match=r"damaged|not an edgespec datastore"):
        open_datastore(tmp_path / "x", LetterVocab())


@pytest.mark.parametrize(
    "content", [b"GGUF" * 300, b"{}", b"[1, 2]", b"\xff" * 2000, b'{"magic": "other"}', b"[" * 1024]
)
def test_other_files_are_refused(tmp_path, content):
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(DatastoreError, match="not an edgespec datastore"):
        open_datastore(tmp_path / "x", LetterVocab())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("version", 99), ("version", True), ("version", [[]]), ("tokens", "7"), ("tokens", -1), ("tokens", 0),
        ("tokens", 4.0), ("tokens", 10**300), ("token_width", 0), ("token_width", 3), ("token_width", 8),
        ("token_width", 2.0), ("position_width", 0), ("position_width", 3), ("position_width", -4),
        ("vocab_size", None), ("vocab_size", 70000), ("documents", True), ("fingerprint", 7), ("later", 1),
    ],
)  # fmt: skip
def test_a_header_with_wrong_values_is_refused(tmp_path, field, value):
    build(tmp_path / "x", ["abc"], LetterVocab())
    data = (tmp_path / "x").read_bytes()
    header = json.loads(data[:HEADER_SIZE]) | {field: value}
    (tmp_path / "x").write_bytes(json.dumps(header).encode().ljust(HEADER_SIZE) + data[HEADER_SIZE:])
    with suppress(TypeError, OSError, OverflowError):  # only the header is wrong, where it can have a size
        tokens, width = header["tokens"], header["token_width"]
        os.truncate(tmp_path / "x", -(-(HEADER_SIZE + tokens * width) // 8) * 8 + tokens * header["position_width"])
    with pytest.raises(DatastoreError):
        open_datastore(tmp_path / "x", LetterVocab())


def test_places_and_tokens_that_cannot_be_end_a_match(tmp_path):
    """Nothing is drafted that the model does not have, and no byte is read outside the file."""
    build(tmp_path / "x", ["abcabd"], LetterVocab())
    data = (tmp_path / "x").read_bytes()
    header = json.loads(data[:HEADER_SIZE]) | {"position_width": 8}
    ids = np.frombuffer(data, ">u2", 7, HEADER_SIZE).copy()
    places = np.frombuffer(data, "<u4", 7, HEADER_SIZE + 16).astype("<u8")
    first = places[0]  # of abcabd, abd, bcabd, ...
    places[0], ids[first + 4] = 2**63 + 5, 60000
    (tmp_path / "x").write_bytes(
        json.dumps(header).encode().ljust(HEADER_SIZE) + ids.tobytes() + bytes(2) + places.tobytes()
    )
    store = open_datastore(tmp_path / "x", LetterVocab())
    assert (store.continuations(0, 1, 0, 1, 3) == END).all()
    assert store.continuations(2, 3, 0, 1, 5).tolist() == [[1, 2, 0, END, END]]


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, DatastoreError])
@pytest.mark.parametrize("phase", ["tokenising", "sorting", "writing"])
def test_an_interrupted_build_leaves_what_was_there(tmp_path, phase, error):
    build(tmp_path / "x", ["old"], LetterVocab())
    old = (tmp_path / "x").read_bytes()

    def stop(now, done, total):
        if now == phase:
            raise error

    with pytest.raises(error):
        build(tmp_path / "x", ["abc"], LetterVocab(), stop)
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("x", old)]


@posix_only
def test_only_a_datastore_is_replaced(tmp_path):
    for name, content in [("note.md", b"# Tides"), ("empty", b""), ("other.json", b'{"magic": "other"}')]:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UsageError, match=rf"{name}: exists and is not an edgespec datastore"):
            build(tmp_path / name, ["abc"], LetterVocab())
        assert (tmp_path / name).read_bytes() == content
    os.mkfifo(tmp_path / "pipe")
    for name in (".", "pipe"):
        with pytest.raises(UsageError, match="exists and is not"):
            build(tmp_path / name, ["abc"], LetterVocab())
    (tmp_path / "x").write_bytes(START + b', "version": 99}')  # one that this program cannot read
    build(tmp_path / "x", ["abc"], LetterVocab())
    assert len(open_datastore(tmp_path / "x", LetterVocab())) == 4


@posix_only
def test_the_command_replaces_no_file_that_a_user_may_miss(run, tmp_path):
    from gguf_files import small_llama

    model = small_llama(tmp_path / "tiny.gguf", layers=1)
    notes = tmp_path / "notes"
    notes.mkdir()
    first, second, store = notes / "a.md", notes / "b.md", tmp_path / "x.store"
    for file in (first, second):
        file.write_text(f"what {file.name} says", "utf-8")
    (notes / "linked.md").symlink_to(second)
    os.link(first, tmp_path / "hard.md")

    def command(*names):
        return run("datastore", "build", *map(str, names), "--model", str(model))

    assert command(store, notes)[0] == 0  # a new one
    assert command(store, first)[0] == 0  # another datastore is replaced
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    (tmp_path / "linked.store").symlink_to(store)
    shutil.copy(store, notes / "inside.store")
    before[notes / "inside.store"] = store.read_bytes()
    for out, sources, says in [
        (first, [second], "exists and is not an edgespec datastore"),  # the name of the datastore is forgotten
        (first, [first], "is also read"),
        (first, [notes], "is also read"),
        (tmp_path / "hard.md", [first], "is also read"),
        (second, [notes / "linked.md"], "is also read"),
        (tmp_path / "linked.store", [first, store], "is also read"),
        (notes / "inside.store", [notes], "is also read"),
        (notes, [first], "exists and is not"),
    ]:
        code, printed, err = command(out, *sources)
        assert (code, printed, err.count("\n")) == (2, "", 1), err
        assert says in err
        assert str(out) in err
        assert {file: file.read_bytes() for file in before} == before
        assert not list(tmp_path.rglob("*.part"))


@pytest.mark.parametrize("texts", [[], ["123"]])
def test_no_text_is_an_error_and_leaves_nothing(tmp_path, texts):
    with pytest.raises(DatastoreError, match="no text"):
        build(tmp_path / "x", texts, LetterVocab())
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_does_not_exist_is_found_before_any_work(tmp_path):
    def texts():
        raise AssertionError("was read")
        yield ""

    with pytest.raises(DatastoreError, match="cannot be written"):
        build(tmp_path / "no" / "x", texts(), LetterVocab())


def test_a_disk_that_is_read_only_is_one_line(tmp_path, monkeypatch):
    def refuse(self, *_, **__):
        raise OSError(errno.EROFS, "Read-only file system", str(self))

    monkeypatch.setattr(Path, "open", refuse)
    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(DatastoreError, match="x: cannot be written: Read-only file system"):
        build(tmp_path / "x", ["abc"], LetterVocab())


def test_progress(tmp_path):
    calls = []
    build(tmp_path / "x", ["abc", "de"], LetterVocab(), lambda *call: calls.append(call))
    assert calls == [
        ("tokenising", 1, 2),
        ("tokenising", 2, 2),
        ("sorting", 0, 7),
        ("sorting", 7, 7),
        ("writing", 0, 7),
        ("writing", 7, 7),
    ]


RECORDS = [{"instruction": "Say hi", "id": 7, "output": "Hi"}, {"turns": ["One?", "Two?"], "empty": "", "number": "12"}]
RECORD_TEXTS = ["Say hi\n\nHi", "One?\n\nTwo?"]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("name", "content", "wanted"),
    [
        ("a.txt", "Two\nlines\n", ["Two\nlines\n"]),
        ("a.md", "# Title", ["# Title"]),
        ("a.py", "x = 1  # é", ["x = 1  # é"]),
        ("a.txt", "\ufeffwith a mark", ["with a mark"]),
        ("a.txt", "12 34", []),
        ("a.json", json.dumps(RECORDS), RECORD_TEXTS),
        ("a.jsonl", "\n\n".join(map(json.dumps, RECORDS)) + "\n", RECORD_TEXTS),
        ("a.jsonl", '{"a": "x\u2028y"}', ["x\u2028y"]),
        ("a.json", '["one", [3, "two"], null]', ["one", "two"]),
        ("a.json", '{"prompts": [{"prompt": "p", "results": [{"outputs": ["x", "y"]}]}, {"prompt": "q"}]}',
         ["p", "x\n\ny", "q"]),
        ("a.json", '{"traj": {"role": "user", "content": "hello"}, "task": "t"}', ["t", "user\n\nhello"]),
    ],
)  # fmt: skip
def test_documents_of_a_file(tmp_path, name, content, wanted, packed):
    data = content.encode()
    path = tmp_path / (name + ".gz" if packed else name)
    path.write_bytes(gzip.compress(data) if packed else data)
    assert list(read_texts([path])) == wanted


def test_lists_may_be_deep():
    """JSON is read to a depth that differs from Python to Python."""
    value: object = ["one", {"a": "two"}]
    for _ in range(5000):
        value = [value]
    assert list(documents_of([value, "three"])) == ["one", "two", "three"]


BAD_FILES = {
    "latin.txt": "é".encode("latin-1"),
    "zeros.txt": b"text\0text",
    "late_zero.txt": b"text" * 5000 + b"\0",
    "zeros.txt.gz": gzip.compress(b"text\0text"),
    "broken.json": b'{"a": ',
    "broken.jsonl": b'{"a": "b"}\n{"a"\n',
    "deep.json": b"[" * 100000,
    "plain.txt.gz": b"not packed",
    "cut.txt.gz": gzip.compress(b"some text" * 100)[:-9],
}


@pytest.mark.parametrize("name", [*BAD_FILES, "nowhere"])
def test_a_bad_file_given_by_name_is_an_error_that_names_it(tmp_path, name):
    if name in BAD_FILES:
        (tmp_path / name).write_bytes(BAD_FILES[name])
    with pytest.raises(DatastoreError, match=name):
        list(read_texts([tmp_path / name]))
    with pytest.raises(DatastoreError, match=rf"{name}: (cannot be read|is not an edgespec datastore)"):
        open_datastore(tmp_path / name, LetterVocab())


@posix_only
def test_a_folder_is_read_in_order_and_bad_files_are_counted(tmp_path):
    for name, data in BAD_FILES.items():
        (tmp_path / name).write_bytes(data)
    os.mkfifo(tmp_path / "pipe.txt")
    for name in ["sub/b.txt", "sub/a.txt", "z.py", ".git/config", ".hidden"]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name, "utf-8")
    skipped = list[Path]()
    assert list(read_texts([tmp_path], skipped.append)) == ["z.py", "sub/a.txt", "sub/b.txt"]
    assert sorted(path.name for path in skipped) == sorted(BAD_FILES)


@contextmanager
def ordinary_user():
    """Permissions count, for root, too."""
    codecs.lookup("utf-8-sig")  # an ordinary user may not read root's Python
    root = os.geteuid() == 0
    try:
        if root:
            os.seteuid(65534)
        yield
    finally:
        if root:
            os.seteuid(0)


@posix_only
def test_texts_without_permission_are_named_not_the_datastore(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tmp_path.chmod(0o777)
    for name, mode in (("docs/closed", 0o000), ("docs/listed", 0o444), ("docs/open", 0o755)):
        Path(name).mkdir(parents=True)
        Path(name, "a.txt").write_text(name, "utf-8")
        Path(name).chmod(mode)
    skipped, vocab = list[Path](), LetterVocab()
    with ordinary_user():
        for name in ("docs/closed", "docs/closed/a.txt"):
            with pytest.raises(DatastoreError, match=f"^{name}: cannot be read: Permission denied"):
                build("x", read_texts([name]), vocab)
        assert build("x", read_texts(["docs"], skipped.append), vocab).documents == 1
        check_out("x", ["docs", "docs/closed/a.txt"])
    for name in ("docs/closed", "docs/listed"):
        Path(name).chmod(0o755)  # so that it can be removed
    assert sorted(skipped) == [Path("docs/closed"), Path("docs/listed/a.txt")]


@posix_only
def test_a_kill_leaves_no_part(run, tmp_path, monkeypatch):
    def killed(tokens):
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError

    monkeypatch.setattr("edgespec.planners.datastore.suffix_array", killed)
    (tmp_path / "a.txt").write_text("some text")
    assert run("datastore", "build", str(tmp_path / "x.store"), str(tmp_path / "a.txt"))[0] == 128 + signal.SIGTERM
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_left_out_files_are_named(run, tmp_path):
    from gguf_files import small_llama

    model, notes = small_llama(tmp_path / "tiny.gguf", layers=1), tmp_path / "notes"
    notes.mkdir()
    (notes / "good.txt").write_text("some text", "utf-8")
    for i in range(NAMED + 1):
        (notes / f"{i}.bin").write_bytes(b"\0")
        code, out, err = run("datastore", "build", str(tmp_path / "x"), str(notes), "--model", str(model))
        assert code == 0
        assert out.endswith("tokens of 1 documents\n")
        assert f"note: left out, since they cannot be read as text ({i + 1}): {notes / '0.bin'}" in err
        assert err.count(".bin") == min(i + 1, NAMED)
    assert err.endswith(", …\n")


@posix_only
def test_a_pipe_is_refused_and_not_waited_for(run, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(DatastoreError, match="is a pipe or a device, not a file"):
            list(read_texts([path]))
        with pytest.raises(DatastoreError, match="is a pipe or a device, not a datastore"):
            open_datastore(path, LetterVocab())


def test_half_a_character_in_json_does_not_stop_the_build(tmp_path):
    (tmp_path / "a.json").write_text('["ab\\ud83d"]', "utf-8")
    seen = list[str]()

    class Strict(LetterVocab):
        def encode(self, text, *, add_bos, parse_special):
            seen.append(text)
            text.encode("utf-8")
            return super().encode(text, add_bos=add_bos, parse_special=parse_special)

    assert build(tmp_path / "x", read_texts([tmp_path / "a.json"]), Strict()).tokens == 3
    assert seen == ["ab?"]
