"""`edgespec run --resume FILE`, and `edgespec serve --keep-on-disk` across a kill."""

import json
import os
import re
import signal
import sys
import time
from urllib.error import URLError
from urllib.request import Request, urlopen

import pytest
from forked import Forked
from reference.backend import ReferenceBackend, random_model
from typist import typing_to

import edgespec
from edgespec.errors import SessionFileError
from edgespec.loop.passes import prefill
from edgespec.loop.session_files import look
from edgespec.scheduler.disk_cache import DiskCache

TEXT = "the keeper wrote down the weather every morning and every evening he read it out "


def answer(run, tiny, text, *more):
    code, out, err = run("run", tiny, text, "--backend", "reference", "--raw", "--json", "-n", "8", "-t", "0.8",
                         "--seed", "3", *more)  # fmt: skip
    assert code == 0, err
    found = json.loads(out)
    return found["tokens"], found["stats"]["cached_tokens"], found["stats"]["prompt_tokens"]


def test_what_was_read_is_not_read_again(run, tiny, tmp_path):
    file = str(tmp_path / "text.session")
    for text, cached in [(TEXT, 0), (TEXT, len(TEXT)), (TEXT + "and more", len(TEXT)), ("another", 1)]:
        tokens, found, prompt = answer(run, tiny, text, "--resume", file)
        assert (tokens, 0, prompt) == answer(run, tiny, text)
        assert found >= min(cached, prompt - 1)


def test_a_file_that_has_it_all_stays(run, tiny, tmp_path):
    file = tmp_path / "text.session"
    answer(run, tiny, TEXT, "--resume", str(file))
    before = file.stat().st_ino
    answer(run, tiny, TEXT[:30], "--resume", str(file))  # other than TEXT from the first token written
    assert file.stat().st_ino != before
    answer(run, tiny, TEXT, "--resume", str(file))
    before = file.stat().st_ino
    answer(run, tiny, TEXT, "--resume", str(file))
    assert file.stat().st_ino == before


def test_bad_files_are_one_line_and_stay(run, tiny, tmp_path):
    other, file = tmp_path / "other.npz", tmp_path / "text.session"
    random_model(3, vocab_size=258).save(str(other))
    answer(run, tiny, TEXT, "--resume", str(file))
    whole = file.read_bytes()
    for content, model, says in [
        (whole[:-9], tiny, "is not a saved session, or its end is missing"),
        (b"x" + whole[1:], tiny, "the saved session is damaged"),
        (b"hello", tiny, "is not a saved session"),
        (whole, str(other), "it is another model's"),
    ]:
        file.write_bytes(content)
        code, out, err = run("run", model, "hello", "--backend", "reference", "--raw", "--resume", str(file))
        assert (code, out) == (1, "")
        (line,) = err.splitlines()
        assert says in line
        assert file.read_bytes() == content
    os.mkfifo(tmp_path / "pipe")
    for content, name in [(b"hello", "text.session"), (b"# my draft", "text.session.draft"), (None, "pipe")]:
        file.unlink(missing_ok=True)
        if content is not None:
            (tmp_path / name).write_bytes(content)
        code, out, err = run("run", tiny, "hello", "--backend", "reference", "--raw", "--resume",
                             str(tmp_path / name.removesuffix(".draft")))  # fmt: skip
        assert (code, out, err.count("\n")) == (1, "", 1)
        assert f"{name}: is not a saved session, or its end is missing; it is not replaced" in err
        assert content is None or (tmp_path / name).read_bytes() == content
    for name, says in [(str(tmp_path / "nowhere" / "x"), "there is no folder"), (str(tmp_path), "is a folder")]:
        code, out, err = run("run", tiny, "hello", "--backend", "reference", "--resume", name)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert says in err


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
class TestChat:
    @pytest.fixture
    def chat(self, tiny, tmp_path):
        home = {"XDG_CACHE_HOME": str(tmp_path), "HOME": str(tmp_path)}
        arguments = ["run", tiny, "--backend", "reference", "-n", "8", "--resume", str(tmp_path / "chat.session")]
        return lambda *more: typing_to(*arguments, *more, environment=home)

    @staticmethod
    def roles(folder):
        """Of the messages that the next chat will find."""
        return [message["role"] for message in look(folder / "chat.session").note]

    def test_it_goes_on_where_it_was_left_and_shows_the_last_turns(self, chat):
        with chat() as person:
            person.until("/help")
            person.type("hello you\r")
            person.until("tokens/s")
            person.type("/exit\r")
            assert person.ends() == 0
        with chat() as person:
            assert "> hello you" in person.until("2 messages from before")
            for message in ("and now", "again"):
                person.type(f"{message}\r")
                person.until("tokens/s")
            person.type("/stats\r")
            cached = re.findall(r"(\d+) of them", person.until("from the cache"))
            assert int(cached[-1]) > 40  # both earlier exchanges
            person.type("/exit\r")
            assert person.ends() == 0

    @pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
    def test_a_kill_loses_no_answer(self, chat, end, tmp_path):
        with chat() as person:
            person.until("/help")
            person.type("hello you\r")
            person.until("tokens/s")
            person.type("typed and not sent")
            person.until("not sent")  # the prompt is there again, so the answer is saved
            person.kill(end)
            assert person.ends() == (-end if end == signal.SIGKILL else 128 + end)
        assert self.roles(tmp_path) == ["user", "assistant"]

    @pytest.mark.parametrize("end", [signal.SIGTERM, "closed terminal"])
    def test_a_kill_keeps_what_was_written_of_an_answer(self, chat, end, tmp_path):
        with chat("-n", "-1", "--ctx", "20000") as person:
            person.until("/help")
            person.type("hello you\r")
            person.until("hello you")
            person.see_more(100)
            person.hang_up() if end == "closed terminal" else person.kill(end)
            assert person.ends() == 128 + (signal.SIGHUP if end == "closed terminal" else end)
        assert self.roles(tmp_path) == ["user", "assistant"]


def test_a_second_question_knows_the_first(run, tiny, tmp_path):
    file = str(tmp_path / "talk.session")
    for question, cached in [("hello you", 0), ("and now", 20)]:
        code, out, err = run("run", tiny, question, "--backend", "reference", "--resume", file, "-n", "8", "--json")
        assert code == 0, err
        assert json.loads(out)["stats"]["cached_tokens"] >= cached
    contents = [message["content"] for message in look(file).note]
    assert contents[::2] == ["hello you", "and now"]
    assert json.loads(out)["text"] == contents[3]
    with edgespec.load(tiny, backend="reference") as model:
        assert model.chat(look(file).note[:3], max_tokens=8).text == contents[3]


def ask(port, prompt, *, stream=False):
    body = {"prompt": prompt, "max_tokens": 100 if stream else 8, "temperature": 0.8, "seed": 3, "stream": stream}
    request = Request(
        f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    deadline = time.monotonic() + 60
    while True:
        try:
            answer = urlopen(request, timeout=60)
            return answer if stream else json.load(answer)
        except URLError:  # it does not listen yet
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_kept_prompts_outlive_a_kill(tiny, tmp_path):
    """kill -9 during a stream; the next server finds what was saved, and its answers are the same."""
    pytest.importorskip("uvicorn", reason="the server is not installed: pip install 'edgespec[server]'")
    folder, long = tmp_path / "kept", TEXT * 5  # of 400 tokens
    command = ["serve", tiny, "--backend", "reference", "--ctx", "900", "--port", "0"]
    found, caches = [], []
    for end in (signal.SIGKILL, signal.SIGINT):
        with Forked(*command, "--keep-on-disk", str(folder)) as process:
            port = int(re.search(r":(\d+)/v1", process.stdout.readline())[1])
            answer = ask(port, long)
            found.append(answer["choices"][0]["text"])
            caches.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
            deadline = time.monotonic() + 60
            while not list(folder.glob("*.kept")):
                assert time.monotonic() < deadline
                time.sleep(0.01)
            with ask(port, "something else", stream=True) as other:
                other.readline()
                process.send_signal(end)
                other.read() if end == signal.SIGINT else None
            assert process.wait(60) == (-end if end == signal.SIGKILL else 0), process.stderr.read()
    assert caches[0] == 0
    assert caches[1] >= len(long) - 1
    assert found[0] == found[1]
    assert [file.suffix for file in folder.iterdir()] == [".kept"]


def test_a_folder_of_saved_sessions_loses_no_other_file(tmp_path):
    target = ReferenceBackend(random_model(2, vocab_size=258))
    others = [tmp_path / "letters.kept", tmp_path / ".letters.kept-1.new"]
    for other in others:
        other.write_text("mine" * 1000)
        os.utime(other, (0, 0))
    session, most = target.open(), 1 << 30
    for first in range(3):
        prefill(target, session, list(range(first, 100)))
        assert DiskCache(tmp_path, target, most, least=4).put(session)
        [path] = [path for path in tmp_path.iterdir() if path not in others]
        most = path.stat().st_size + 100  # the next one takes its place
    assert all(other.exists() for other in others)


def test_saving_a_session_replaces_no_other_file(tmp_path):
    target, notes = ReferenceBackend(random_model(2, vocab_size=258)), tmp_path / "notes.md"
    session = target.open()
    prefill(target, session, list(range(10)))
    for content in ("", "mine", "# a text that is longer"):
        notes.write_text(content)
        with pytest.raises(SessionFileError, match="it is not replaced"):
            session.save(notes)
        assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("notes.md", content)]
