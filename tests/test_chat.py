"""The conversation on a terminal: commands, the context's end, what is typed meanwhile, earlier messages."""

import signal
import stat
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import click
import pytest
from conftest import Run
from prompt_toolkit.history import FileHistory
from reference.backend import CHAT_TEMPLATE, ReferenceBackend, random_model
from typist import Typist, typing_to

import edgespec
from edgespec.cli.chat import _FileHistory, _obey
from edgespec.cli.conversation import UNLIMITED, Conversation
from edgespec.errors import ContextFull, SessionFileError, UsageError
from edgespec.loop.grammar import json_schema, lark
from edgespec.loop.session_files import look
from edgespec.model import Model
from edgespec.planners.sssd import SssdPlanner
from edgespec.scheduler.events import Event
from edgespec.scheduler.requests import Request
from edgespec.scheduler.sequence import Seq
from edgespec.server.channels import ANALYSIS, FINAL
from edgespec.server.model_format import ModelFormat

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
Chat = Callable[..., AbstractContextManager[Typist]]


def tiny_model(context: int = 400) -> Model:
    target = ReferenceBackend(random_model(2, vocab_size=258), context_length=context)
    target.model.unembedding[1] = 0  # texts seldom end early
    return Model(target, SssdPlanner(), budget=2)


def conversation_with(model: Model, system: str = "", **options: object) -> Conversation:
    messages = [{"role": "system", "content": system}] if system else []
    return Conversation(model, {"max_tokens": UNLIMITED, "seed": 3, "temperature": 0.9, **options}, messages)  # type: ignore[arg-type]


@pytest.fixture
def chat(tiny: str, tmp_path: Path) -> Chat:
    home = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "HOME": str(tmp_path)}
    return lambda *more, **options: typing_to(
        "run", tiny, "--backend", "reference", "--planner", "none", *more, environment=home, **options
    )


def test_a_chat_outlives_its_context(capsys: pytest.CaptureFixture[str]) -> None:
    """The system message and the newest turns stay, it is said once, and texts are those of the short conversation."""
    with tiny_model(300) as model, tiny_model(300) as fresh:
        conversation, known = conversation_with(model, "be good", max_tokens=30), []
        asked, stream = list[object](), model.stream

        def noting(prompt: object, **options: object) -> object:
            asked.append(prompt)
            return stream(prompt, **options)  # type: ignore[arg-type]

        model.stream = noting  # type: ignore[method-assign, assignment]
        for turn in range(8):
            text = conversation.ask(f"question {turn}").text
            known += [f"question {turn}", text]
            (*_, prompt) = asked
            contents = [message["content"] for message in prompt]  # type: ignore[attr-defined]
            assert contents[0] == "be good"
            assert contents[1:] == known[:-1][-len(contents) + 1 :]  # the newest
            assert len(contents) >= 4 or turn == 0
            assert text == fresh.chat(prompt, max_tokens=30, seed=3, temperature=0.9).text  # type: ignore[arg-type]
        assert [message["content"] for message in conversation.messages] == ["be good", *known]
        assert len(asked[-1]) < 10  # type: ignore[arg-type]
        assert capsys.readouterr().err.count("the oldest messages are left out") == 1


def test_a_long_last_answer_stays_if_it_fits() -> None:
    with tiny_model(400) as model:
        conversation = conversation_with(model, max_tokens=60)
        conversation.ask("first")
        conversation.set("max_tokens", "120")  # characters that are none take three tokens in a prompt
        second = conversation.ask("second").text
        conversation.set("max_tokens", "9")
        third = conversation.ask("third").text
        asked = [*conversation.messages[2:4], {"role": "user", "content": "third"}]
        assert asked[1]["content"] == second
        assert len(model.encode(conversation.messages[:-1])) > 300
        assert 200 < len(model.encode(asked)) <= 300
        assert third == model.chat(asked, max_tokens=9, seed=3, temperature=0.9).text


def test_a_long_conversation_that_is_taken_up_again_is_tokenised_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    roles, counted = ("user", "assistant"), list[int]()
    with tiny_model(400) as model:
        known = [{"role": roles[i % 2], "content": f"message {i}"} for i in range(400)]
        conversation = Conversation(model, {"max_tokens": 3}, [{"role": "system", "content": "be good"}, *known])
        encode = model.encode
        monkeypatch.setattr(model, "encode", lambda prompt: counted.append(len(prompt)) or encode(prompt))
        conversation.ask("and now?")
        sent = counted[-1]
        asked = [*conversation.messages[:1], *conversation.messages[-sent:-1]]
        assert len(asked) == sent
        assert len(encode(asked)) <= 200 < len(encode([asked[0], *conversation.messages[-sent - 2 : -1]]))  # half
        assert sum(counted) < 1500, "tokenised the whole for every pair of messages"


def test_a_message_beyond_the_context_changes_nothing() -> None:
    with tiny_model(300) as model:
        conversation = conversation_with(model, max_tokens=20)
        conversation.ask("hello")
        before = list(conversation.messages)
        with pytest.raises(ContextFull):
            conversation.ask("x" * 400)
        assert conversation.messages == before
        conversation.ask("hello again")
        assert [message["content"] for message in conversation.messages][0::2] == ["hello", "hello again"]


def test_an_answer_is_unlimited_unless_told_otherwise(chat: Chat) -> None:
    with chat("--ctx", "900") as person:
        person.until("/help")
        person.type("hello\r")
        person.until("cut: the context is full (--ctx)")
        assert int(person.until(" tokens")) > 700
        person.type("/set max-tokens 7\r")
        person.until("max-tokens is 7")
        person.type("hello\r")
        person.until("cut at 7 tokens (-n)")


def test_retry_takes_the_next_seed_and_replaces_the_answer() -> None:
    with tiny_model() as model:
        conversation = conversation_with(model, max_tokens=12)
        with pytest.raises(UsageError, match="no answer"):
            conversation.retry()
        first = conversation.ask("hello").text
        second = conversation.retry().text
        assert second != first
        assert second == model.chat("hello", max_tokens=12, seed=4, temperature=0.9).text
        assert [message["content"] for message in conversation.messages] == ["hello", second]
        greedy = {"max_tokens": 12, "temperature": 0}
        asked = [{"role": "user", "content": "hello"}]
        for name, value in (("temperature", 0), ("max_tokens", 9), ("repetition_penalty", 1.5), ("system", "be bad")):
            conversation.set(name, str(value))
            if name == "system":
                asked = [{"role": "system", "content": value}, *asked]
            else:
                greedy[name] = value
            assert conversation.retry().text == model.chat(asked, **greedy).text
            with pytest.raises(UsageError, match="the same answer would come"):
                conversation.retry()


def test_retry_answers_the_message_whose_answer_was_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also before its first token, which leaves no answer; the answer before it stays."""

    def stopped(*arguments: object, **options: object) -> object:
        raise KeyboardInterrupt

    with tiny_model() as model, tiny_model() as fresh:
        conversation = conversation_with(model, max_tokens=12)
        first = conversation.ask("first").text
        for question in ("second", "third"):
            before = [*conversation.messages, {"role": "user", "content": question}]
            with monkeypatch.context() as ctrl_c:
                ctrl_c.setattr(model, "stream", stopped)
                conversation.ask(question)
                conversation.retry()
            assert conversation.messages == before[:-1]
            text = conversation.retry().text
            sampling = conversation.sampling
            assert text == fresh.chat(before, max_tokens=12, seed=sampling.seed, temperature=sampling.temperature).text
            assert conversation.messages == [*before, {"role": "assistant", "content": text}]
            conversation.set("temperature", "0")  # another answer would come: that of the stopped one is not there
        assert conversation.messages[1]["content"] == first
        with pytest.raises(UsageError, match="the same answer would come"):
            conversation.retry()
        conversation.set("temperature", "0.9")
        with monkeypatch.context() as ctrl_c:
            ctrl_c.setattr(model, "stream", stopped)
            conversation.ask("fourth")
        conversation.clear()
        with pytest.raises(UsageError, match="no answer to retry"):
            conversation.retry()


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("warmth", "1", "there is no setting 'warmth'; there are: temperature, "),
        ("temperature", "hot", "must be a number"),
        ("temperature", "-1", "at least 0"),
        ("top-k", "1.5", "must be a whole number"),
        ("max-tokens", "0", "must be at least 1"),
        ("system", "", "system is empty"),
        ("seed", "", "must be a whole number"),
    ],
)
def test_a_wrong_setting_is_refused_and_changes_nothing(name: str, value: str, says: str) -> None:
    with tiny_model() as model:
        conversation = conversation_with(model)
        before = conversation.settings()
        with pytest.raises(UsageError, match=says):
            conversation.set(name, value)
        assert conversation.settings() == before


def test_settings_count_from_the_next_answer_on() -> None:
    with tiny_model() as model:
        conversation = conversation_with(model)
        for name, value in [("top-k", "3"), ("max_tokens", "9"), ("seed", "8"), ("system", "be bad")]:
            conversation.set(name, value)
        asked = [{"role": "system", "content": "be bad"}, {"role": "user", "content": "hello"}]
        expected = model.chat(asked, max_tokens=9, seed=8, top_k=3, temperature=0.9).text
        assert conversation.ask("hello").text == expected
        conversation.set("seed", "-1")  # drawn
        assert conversation.sampling.seed >= 0


def test_save_and_load(tmp_path: Path) -> None:
    with tiny_model() as model, tiny_model() as other:
        conversation, later = conversation_with(model, max_tokens=9), conversation_with(other, max_tokens=9)
        conversation.ask("hello")
        conversation.save_to(str(tmp_path / "talk"))
        conversation.ask("and then")
        conversation.save_to(str(tmp_path / "talk"))  # a session may be replaced
        later.ask("something else")
        later.load(str(tmp_path / "talk"))
        assert later.messages == conversation.messages
        assert later.ask("now").text == conversation.ask("now").text
        (tmp_path / "notes").write_text("mine")
        for refused in (later.save_to, later.load):
            with pytest.raises(Exception, match="is not a saved session"):
                refused(str(tmp_path / "notes"))
        assert (tmp_path / "notes").read_text() == "mine"
        with pytest.raises(SessionFileError, match="cannot be saved"):
            later.save_to(str(tmp_path / ("x" * 300)))
        assert later.turns[0]["content"] == "hello"


@pytest.mark.parametrize(
    "note", ["hello", 5, {"role": "user"}, ["hello"], [{"role": "user"}], [{"role": "user", "content": 7}]], ids=str
)
def test_a_session_with_another_note_is_no_conversation(note: Any, run: Run, tiny: str, tmp_path: Path) -> None:
    path = str(tmp_path / "talk")
    with edgespec.load(tiny, backend="reference") as model:
        model.scheduler.save(path, note)
        with pytest.raises(SessionFileError, match="something else than a conversation"):
            conversation_with(model).load(path)
    code, out, err = run("run", tiny, "hello", "--backend", "reference", "--resume", path)
    assert (code, out) == (1, "")
    assert err == f"edgespec: {path}: was saved with something else than a conversation\n"


@pytest.mark.parametrize("terminal", [True, False])
def test_thoughts_in_channels_are_shown_and_not_sent_again(
    terminal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("llguidance")
    text = f"{ANALYSIS[0]}Hm.{ANALYSIS[1]}{FINAL}Yes."
    with tiny_model() as model:
        model.target.vocab.chat_template = f"{CHAT_TEMPLATE}{{# {ANALYSIS[0]}{FINAL} #}}"  # type: ignore[misc]
        conversation = conversation_with(model, grammar=lark(f'start: "{text}"'))
        # Of the whole answer.
        monkeypatch.setattr(ModelFormat, "grammar", lambda form, wanted, tools, in_thought: wanted)
        monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
        for _ in range(2):
            assert conversation.ask("Is it?").text == "Yes."
            shown = capsys.readouterr().out
            assert click.unstyle(shown) == ("Hm.\n\nYes.\n" if terminal else "Yes.\n")
        assert [message["content"] for message in conversation.messages] == ["Is it?", "Yes."] * 2
        conversation.set("max_tokens", str(text.index("Hm.") + 3))
        assert conversation.ask("Is it?").text == ""  # there is no answer yet
        assert len(conversation.messages) == 4
        assert conversation.continue_text("Is it?").text.startswith(ANALYSIS[0])


@pytest.mark.parametrize("opened", [True, False])
def test_a_grammar_is_for_what_follows_a_thought_as_the_server_has_it(
    opened: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """A thought is free, and is not part of the answer."""
    pytest.importorskip("llguidance")
    pytest.importorskip("starlette")
    from starlette.testclient import TestClient

    from edgespec.server.app import make_app
    from edgespec.server.service import Service

    schema: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    schema["additionalProperties"] = False
    with tiny_model() as model:
        template = f"{CHAT_TEMPLATE}<think>" if opened else f"{CHAT_TEMPLATE}{{# <think> #}}"
        model.target.vocab.chat_template = f"{template}{{# </think> #}}"  # type: ignore[misc]
        written, submit = list[list[int]](), model.scheduler.submit

        def noting(request: Request, emit: Callable[[Event], None], *about: Any, **more: Any) -> Seq:
            tokens = list[int]()
            written.append(tokens)

            def noted(event: Event) -> None:
                tokens.extend(chunk.token_id for chunk in getattr(event, "chunks", ()))
                emit(event)

            return submit(request, noted, *about, **more)

        model.scheduler.submit = noting
        model.scheduler.start()
        client = TestClient(make_app(Service(model, "tiny")), "http://127.0.0.1:8080")
        body = {"messages": [{"role": "user", "content": "Is it?"}], "temperature": 0.9, "max_tokens": 40}
        body["response_format"] = {
            "type": "json_schema",
            "json_schema": {"name": "a", "schema": schema, "strict": True},
        }
        for seed in range(6):
            conversation = conversation_with(model, grammar=json_schema(schema), max_tokens=40, seed=seed)
            answer = conversation.ask("Is it?")
            (choice,) = client.post("/v1/chat/completions", json=body | {"seed": seed}).json()["choices"]
            ours, others = written[-2:]
            assert ours == others == answer.token_ids
            assert answer.text == (choice["message"]["content"] or "")
            assert answer.text in ([""] if opened else ["", '{"a":true}', '{"a":false}'])  # no thought ends here
            assert capsys.readouterr().out.strip() == answer.text


def test_a_loaded_conversation_is_saved_in_its_own_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    with tiny_model() as model:
        conversation = conversation_with(model, max_tokens=9)
        conversation.ask("of the second")
        conversation.save_to(str(second))
        conversation.clear()
        conversation.file = first
        conversation.ask("of the first")
        conversation.set("system", "be good")
        _obey(conversation, f"/load {second}")
        assert f"From here on it is saved in {second}." in capsys.readouterr().out
        conversation.ask("and now?")
        conversation.save()
        assert [message["content"] for message in look(first).note][:2] == ["be good", "of the first"]
        assert [message["content"] for message in look(second).note][::2] == ["of the second", "and now?"]
        other = conversation_with(model, max_tokens=9)  # that has no file
        _obey(other, f"/load {first}")
        assert other.file is None
        assert "saved in" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("/foo", "there is no command /foo"),
        ("/save", "/save needs the name of a file"),
        ("/clear now", "/clear has nothing after it"),
    ],
)
def test_a_wrong_command_is_one_line(line: str, says: str) -> None:
    with tiny_model() as model, pytest.raises(UsageError, match=says):
        _obey(conversation_with(model), line)


@pytest.mark.parametrize("line", ["/etc/passwd is what?", "/etc/passwd", "/foo what is that?", "//", "exit now"])
def test_only_commands_are_commands(line: str) -> None:
    with tiny_model() as model:
        conversation = conversation_with(model, max_tokens=3)
        _obey(conversation, line)
        assert conversation.turns[0] == {"role": "user", "content": line}


@pytest.mark.parametrize("word", ["exit", "quit", "/exit", "/quit", "\x04"])
def test_it_ends(chat: Chat, word: str) -> None:
    with chat() as person:
        person.until("/help")
        person.type(word if word == "\x04" else f"{word}\r")
        assert person.ends() == 0


def test_what_is_typed_during_an_answer_is_the_next_message(chat: Chat, tmp_path: Path) -> None:
    """It does not show before, Enter sends it, and pasted lines are one message."""
    with chat("-n", "400", "--ctx", "200000", "--resume", str(tmp_path / "talk")) as person:
        person.until("/help")
        person.type("first\r")
        person.until("first")
        person.see_more(20)
        person.type("SECOND message\r")
        person.paste("THIRD message\nof two lines")
        person.see_more(200)
        assert b"SECOND" not in person.seen
        assert "SECOND" not in person.until("tokens/s")
        person.until("SECOND message")
        assert "THIRD" not in person.until("tokens/s")
        person.until("of two lines")
        person.type("\r")
        person.until("tokens/s")
        person.type("/exit\r")
        assert person.ends() == 0
    questions = [message["content"] for message in look(tmp_path / "talk").note][::2]
    assert questions == ["first", "SECOND message", "THIRD message\nof two lines"]


def test_ctrl_c_drops_nothing_that_waits(chat: Chat) -> None:
    with chat("--ctx", "200000") as person:
        person.until("/help")
        person.type("hello\r")
        person.until("hello")
        person.see_more(20)
        person.type("WAITING\x03")
        assert "WAITING" not in person.until("tokens/s")
        person.until("WAITING")


def test_earlier_messages_come_back_and_others_cannot_read_them(chat: Chat, tmp_path: Path) -> None:
    for keys, message in [("a secret", "a secret"), ("\x1b[A", "a secret")]:
        with chat("-n", "3") as person:
            person.until("/help")
            person.type(keys)
            person.until(message)
            person.type("\r")
            person.until("tokens/s")
            person.type("\x04")
            assert person.ends() == 0
    (file,) = tmp_path.rglob("chat-history")
    assert "a secret" in file.read_text()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_chat_without_a_place_for_its_history(tiny: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    home = {"XDG_CACHE_HOME": str(tmp_path / "file"), "HOME": str(tmp_path / "file")}
    with typing_to("run", tiny, "--backend", "reference", "-n", "3", environment=home) as person:
        person.until("/help")
        person.type("hello\r")
        person.until("tokens/s")
        person.type("/exit\r")
        assert person.ends() == 0


def test_the_terminal_is_as_before(chat: Chat) -> None:
    """Also after a kill during an answer."""
    import termios

    for end in ("exit\r", signal.SIGTERM):
        with chat("--ctx", "200000") as person:
            person.until("/help")
            if end == signal.SIGTERM:
                person.type("hello\r")
                person.until("hello")
                person.see_more(20)
                person.kill(end)
            else:
                person.type(str(end))
            person.ends()
            assert person.terminal is not None
            assert termios.tcgetattr(person.terminal)[3] & termios.ECHO


def test_a_byte_that_is_no_utf8_comes_into_the_history_as_a_question_mark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = list[bytes]()  # as prompt_toolkit up to 3.0.52 encodes
    monkeypatch.setattr(FileHistory, "store_string", lambda self, string: stored.append(string.encode()))
    _FileHistory(tmp_path / "history").store_string("caf\udce9")
    assert stored == [b"caf?"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_the_model_loads_leaves_the_terminal_as_it_was(chat: Chat, number: signal.Signals) -> None:
    import termios

    slowly = "c.load = lambda *about, **options: (print('now it loads', flush=True), time.sleep(100))"
    program = f"import time; import edgespec.cli.commands as c; {slowly}; c.main()"
    with chat(program=program) as person:
        assert person.terminal is not None
        before = termios.tcgetattr(person.terminal)
        person.until("now it loads")
        assert termios.tcgetattr(person.terminal) != before
        person.kill(number)
        assert person.ends() == 128 + number
        assert termios.tcgetattr(person.terminal) == before
        assert person.raw.rfind("\x1b[?2004l") > person.raw.rfind("\x1b[?2004h")
