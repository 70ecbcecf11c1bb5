"""The server as its users meet it: real clients over real sockets, and clients that leave."""

import asyncio
import gc
import json
import re
import signal
import socket
import sys
import threading
import time
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace

import httpx
import pytest
from reference.backend import ReferenceBackend, random_model

pytest.importorskip("uvicorn", reason="the server is not installed: pip install 'edgespec[server]'")

import uvicorn
from forked import Forked
from scripted import answering
from starlette.applications import Starlette
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from test_server import slowed

import edgespec.cli.commands
import edgespec.cli.serve
from edgespec.cli.serve import _config, one, open_socket, read_keys, serve
from edgespec.errors import UsageError
from edgespec.model import Model
from edgespec.planners.sssd import SssdPlanner
from edgespec.server import connections
from edgespec.server.connections import OneProtocol, WatchingServer

HELLO = [{"role": "user", "content": "hello"}]


@contextmanager
def listening(slots=2, context=500, sock=None, service=(), **guard):
    """(model, port) of a server in a thread, on a socket of its own or a given one."""
    target = ReferenceBackend(random_model(2, vocab_size=258, layers=1), sessions=slots, context_length=context)
    target.model.unembedding[1] = 0  # texts seldom end early
    with (
        Model(target, [SssdPlanner() for _ in range(slots)], budget=2) as model,
        answering(model, sock, service=service, **guard) as port,
    ):
        yield model, port


@pytest.fixture(scope="module")
def server():
    with listening(keys=["secret"]) as found:
        yield found


@pytest.fixture
def expected(server):
    return server[0].chat(HELLO, max_tokens=20, temperature=0.9, seed=3).text


class TestOpenAI:
    @pytest.fixture
    def client(self, server):
        openai = pytest.importorskip("openai", reason="the client is not installed: pip install openai")
        with openai.OpenAI(base_url=f"http://127.0.0.1:{server[1]}/v1", api_key="secret", max_retries=0) as client:
            yield client

    def test_embeddings(self, client, server):
        texts, model = ["hello", "there"], server[0]
        answer = client.embeddings.create(model="any", input=texts)  # it asks for base64
        assert [one.embedding for one in answer.data] == model.embed(texts).tolist()
        assert answer.usage.prompt_tokens == sum(len(model.encode(text)) for text in texts)

    def test_chat(self, client, expected):
        options = {"model": "any", "messages": HELLO, "max_completion_tokens": 20, "temperature": 0.9, "seed": 3}
        answer = client.chat.completions.create(**options, logprobs=True, top_logprobs=2)
        assert answer.choices[0].message.content == expected
        assert answer.usage.completion_tokens == 20
        assert len(answer.choices[0].logprobs.content) == 20
        chunks = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == expected
        assert chunks[-1].usage.completion_tokens_details.accepted_prediction_tokens >= 0

    def test_completions_responses_and_models(self, client, server, expected):
        text = server[0].generate("to be", max_tokens=9, temperature=0.9, seed=3).text
        answer = client.completions.create(model="any", prompt="to be", max_tokens=9, temperature=0.9, seed=3)
        assert answer.choices[0].text == text
        options = {"model": "any", "input": "hello", "max_output_tokens": 20, "temperature": 0.9}
        options["extra_body"] = {"seed": 3}
        assert client.responses.create(**options).output_text == expected
        events = list(client.responses.create(**options, stream=True))
        assert events[-1].response.output_text == expected
        assert [model.id for model in client.models.list()] == ["tiny"]

    def test_errors_have_their_types(self, client, server):
        import openai

        with pytest.raises(openai.BadRequestError, match="temperature is -1"):
            client.chat.completions.create(model="any", messages=HELLO, temperature=-1)
        with pytest.raises(openai.BadRequestError) as raised:
            client.completions.create(model="any", prompt="a" * 600)
        assert raised.value.code == "context_length_exceeded"
        with pytest.raises(openai.APIError, match=r"prompt is too long: 6\d\d tokens > 499 maximum") as raised:
            list(client.responses.create(model="any", input="a" * 600, stream=True))
        assert raised.value.code == "context_length_exceeded"
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="wrong").models.list()


def test_events_that_fill_a_silence_change_no_answer_of_the_clients(server, expected):
    openai, anthropic = (pytest.importorskip(name, reason="needs the clients") for name in ("openai", "anthropic"))
    seeded = {"seed": 3, "temperature": 0.9}
    with listening(service={"ping_seconds": 0.01}) as (model, port):
        slowed(model, 0.03)
        url = f"http://127.0.0.1:{port}"
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            with client.chat.completions.stream(model="any", messages=HELLO, max_tokens=20, **seeded) as events:
                silent = sum(event.type == "chunk" and event.chunk.choices[0].delta.content == "" for event in events)
                (choice,) = events.current_completion_snapshot.choices
            assert (silent > 3, choice.message.content, choice.message.role) == (True, expected, "assistant")
            asked = {"model": "any", "input": "hello", "max_output_tokens": 20, "extra_body": seeded}
            with client.responses.stream(**asked) as events:
                found = list(events)
            assert sum(event.type == "response.in_progress" for event in found) > 3
            assert found[-1].response.output_text == expected
            texts = client.completions.create(model="any", prompt="a", max_tokens=9, stream=True, **seeded)
            assert "".join(part.choices[0].text for part in texts) == model.generate("a", max_tokens=9, **seeded).text
        with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
            asked = {"model": "any", "messages": HELLO, "max_tokens": 20, "extra_body": seeded}
            with client.messages.stream(**asked) as events:
                assert "".join(events.text_stream) == expected
            with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: 6\d\d tokens > 499 maximum"):
                client.messages.create(**asked | {"messages": [{"role": "user", "content": "a" * 600}]})


class TestAnthropic:
    @pytest.fixture
    def client(self, server):
        anthropic = pytest.importorskip("anthropic", reason="the client is not installed: pip install anthropic")
        with anthropic.Anthropic(base_url=f"http://127.0.0.1:{server[1]}", api_key="secret", max_retries=0) as client:
            yield client

    def test_messages(self, client, expected):
        options = {"model": "claude", "messages": HELLO, "max_tokens": 20}
        options["extra_body"] = {"seed": 3, "temperature": 0.9}
        answer = client.messages.create(**options)
        assert answer.content[0].text == expected
        assert answer.stop_reason == "max_tokens"
        with client.messages.stream(**options) as stream:
            assert "".join(stream.text_stream) == expected
            assert stream.get_final_message().usage.output_tokens == 20
        assert client.messages.count_tokens(model="claude", messages=HELLO).input_tokens > 5
        assert [model.id for model in client.models.list()] == ["tiny"]

    def test_errors_have_their_types(self, client):
        import anthropic

        with pytest.raises(anthropic.BadRequestError, match="max_tokens is 0"):
            client.messages.create(model="claude", messages=HELLO, max_tokens=0)


def ask(port, head="", **body):
    """A socket that has sent a request for a long text."""
    data = json.dumps({"messages": HELLO, "max_tokens": 450, **body}).encode()
    sock = socket.create_connection(("127.0.0.1", port))
    head += "Host: localhost\r\nContent-Type: application/json\r\n"
    sock.sendall(f"POST /v1/chat/completions HTTP/1.1\r\n{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    return sock


def until(what):
    deadline = time.monotonic() + 20
    while not what():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.01)


@pytest.mark.parametrize("streaming", [True, False])
def test_clients_that_leave_free_their_slots(streaming):
    with listening(slots=1) as (model, port):
        slowed(model, 0.02)
        scheduler = model.scheduler
        writing, queued = ask(port, stream=streaming), ask(port, stream=streaming)
        until(lambda: scheduler.active == 1 and scheduler.waiting == 1 and scheduler.counts.passes > 3)
        queued.close()  # while it waits
        until(lambda: scheduler.waiting == 0)
        writing.close()
        until(lambda: scheduler.active == 0)
        until(lambda: scheduler.counts.requests == {"interrupted": 2})
        answer = httpx.post(f"http://localhost:{port}/v1/chat/completions", json={"messages": HELLO, "max_tokens": 3})
        assert answer.json()["usage"]["completion_tokens"] == 3


def test_many_clients_at_once():
    """Counts add up, and nothing is left over."""
    with listening(slots=4) as (model, port):
        found, threads = {}, threading.active_count()

        def client(number):
            with httpx.Client(base_url=f"http://localhost:{port}") as http:
                for turn in range(3):
                    body = {"messages": HELLO, "max_tokens": 6 + turn, "seed": number, "n": 1 + turn % 2}
                    body["temperature"] = 1.0
                    answer = http.post("/v1/chat/completions", json=body).json()
                    found[number, turn] = [choice["message"]["content"] for choice in answer["choices"]]

        clients = [threading.Thread(target=client, args=(number,)) for number in range(8)]
        for one in clients:
            one.start()
        for one in clients:
            one.join()
        for (number, turn), texts in found.items():
            for i, text in enumerate(texts):
                alone = model.chat(HELLO, max_tokens=6 + turn, temperature=1.0, seed=number + i)
                assert text == alone.text
        assert len(found) == 24
        assert model.scheduler.active == model.scheduler.waiting == 0
        assert model.target.open_sessions == 4
        assert threading.active_count() <= threads + 12  # asyncio's workers


@contextmanager
def running(server):
    """The port on which a server of uvicorn's kind answers in a thread."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
        thread.start()
        try:
            yield sock.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join()


@pytest.mark.parametrize("upgrade", ["h2c", "websocket"])
def test_a_client_that_would_go_on_in_another_protocol_gets_its_answer(upgrade, capfd):
    """Java's do in every request; httptools, which uvicorn takes where it is installed, drops the body then."""

    async def echo(http):
        return Response(await http.body())

    config = _config(Starlette(routes=[Route("/", echo, methods=["POST"])]), False, 1)
    assert config.http != "auto"  # whose choice depends on what is installed
    server = WatchingServer(config)
    with running(server) as port:
        until(lambda: server.started)
        asked = {"connection": "Upgrade, HTTP2-Settings", "upgrade": upgrade, "http2-settings": "AAMAAABkAAQ"}
        answer = httpx.post(f"http://127.0.0.1:{port}", content=b"hello", headers=asked)
        assert (answer.status_code, answer.content) == (200, b"hello")
    assert not capfd.readouterr().err


class Connection:
    """A connection as uvicorn has it, and its transport."""

    def __init__(self):
        self.transport, self.cycle, self.unread, self.closing, self.ended = self, None, 0, False, None

    def get_write_buffer_size(self):
        return self.unread

    def is_closing(self):
        return self.closing

    def abort(self):
        self.ended = "aborted"

    def close(self):
        self.ended = "closed"


OVER, *SHORT = [SimpleNamespace(response_complete=True) for _ in range(6)]
WRITING = SimpleNamespace(response_complete=False)


class TestConnections:
    @pytest.mark.parametrize(
        ("at", "ended", "second"),
        [
            (lambda t: {"cycle": WRITING}, None, 0),
            (lambda t: {"cycle": WRITING, "unread": 9}, "aborted", 60),
            (lambda t: {"cycle": WRITING, "unread": 9 * (t >= 100)}, "aborted", 160),
            (lambda t: {"cycle": WRITING, "unread": 9 + t // 5}, "aborted", 60),  # pings that are not read, too
            (lambda t: {"cycle": WRITING, "unread": 300 - t // 59}, None, 0),
            (lambda t: {"cycle": OVER, "closing": True, "unread": 9}, "aborted", 60),
            (lambda t: {"cycle": OVER, "closing": True, "unread": 9, "ending": t >= 30}, "aborted", 30),
            (lambda t: {"cycle": OVER, "closing": t >= 30, "unread": 300 - t, "ending": t >= 30}, None, 0),
            (lambda t: {"cycle": WRITING, "unread": 9, "ending": True}, "aborted", 60),
            (lambda t: {}, "closed", 60),
            (lambda t: {"cycle": OVER}, "closed", 60),
            (lambda t: {"cycle": SHORT[t // 50]}, None, 0),
            (lambda t: {"cycle": WRITING if t < 100 else OVER}, "closed", 160),
        ],
    )
    def test_when_a_client_is_left(self, at, ended, second):
        server, one = WatchingServer(uvicorn.Config("none")), Connection()
        server.server_state.connections.add(one)
        for now in range(250):
            vars(one).update(at(now))
            server.should_exit = vars(one).pop("ending", False)
            server.look(float(now))
            if one.ended:
                break
        assert (one.ended, now if one.ended else 0) == (ended, second)

    def test_connections_beyond_the_limit_are_refused_in_one_line(self, monkeypatch):
        async def app(scope, receive, send):
            await Response("fine")(scope, receive, send)

        monkeypatch.setattr(connections, "MOST_CONNECTIONS", 2)
        server = WatchingServer(uvicorn.Config(app, http=OneProtocol, log_level="warning", lifespan="off"))
        with running(server) as port:
            idle = [socket.create_connection(("127.0.0.1", port)) for _ in range(2)]
            until(lambda: len(server.server_state.connections) == 2)
            with socket.create_connection(("127.0.0.1", port), timeout=20) as third:
                head, _, body = b"".join(iter(partial(third.recv, 2**16), b"")).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 503 ")
            assert b"retry-after" in head
            says = "there are 2 connections already: come again in a moment"
            assert json.loads(body)["error"] == {"type": "overloaded_error", "message": says}
            idle.pop().close()
            until(lambda: len(server.server_state.connections) == 1)
            assert httpx.get(f"http://127.0.0.1:{port}").text == "fine"
            idle.pop().close()

    def test_a_server_looks_for_no_garbage_in_what_is_loaded_and_gives_way_soon(self, monkeypatch):
        seen, before = [], sys.getswitchinterval()

        def run(self, sockets):
            seen.append((gc.get_freeze_count(), sys.getswitchinterval(), self.config.http))

        monkeypatch.setattr(WatchingServer, "run", run)
        model = Model(ReferenceBackend(random_model(2, vocab_size=258)), [SssdPlanner()])
        try:
            with model, socket.create_server(("127.0.0.1", 0)) as sock:
                serve(one(model, ["tiny"]), sock, grace=0, log=False)
        finally:
            gc.unfreeze()
            sys.setswitchinterval(before)
        ((frozen, seconds, protocol),) = seen
        assert frozen > 1000
        assert (seconds, protocol) == (0.001, OneProtocol)

    @pytest.mark.parametrize("answer", ["stream", "whole"])
    def test_a_client_that_does_not_read_is_left(self, monkeypatch, capfd, answer):
        async def endless():
            while True:
                yield b"x" * 9999
                await asyncio.sleep(0)

        async def app(scope, receive, send):
            made = StreamingResponse(endless()) if answer == "stream" else Response(b"x" * 2**24)
            await made(scope, receive, send)

        monkeypatch.setattr(connections, "SLOW_READER", 0.3)
        server = WatchingServer(uvicorn.Config(app, log_level="warning", lifespan="off", timeout_keep_alive=0))
        with running(server) as port, ask(port):
            until(lambda: server.server_state.total_requests or server.server_state.connections)
            until(lambda: not server.server_state.connections and not server.server_state.tasks)
        assert capfd.readouterr().err == ""


def serving(folder, program):
    """A free port, and the command by which a Python program that runs `edgespec` serves a tiny model there."""
    model = random_model(2, vocab_size=258)
    model.unembedding[1] = 0
    model.save(str(folder / "tiny.npz"))
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
    model_options = [str(folder / "tiny.npz"), "--backend", "reference", "--port", str(port)]
    return port, partial(Forked, "serve", *model_options, program=program)


@pytest.fixture
def slow_to_load(tmp_path):
    """(process, port) of `edgespec serve`, whose model is loaded only after a line on its stdin."""
    (tmp_path / "keys").write_text("secret")
    program = (
        "import edgespec.cli.commands as commands, select, sys\n"
        "load = commands.load\n"
        "def loads_slowly(*model, **options):\n"
        "    while not select.select([sys.stdin], [], [], 0.1)[0]:\n"  # a signal just before `input` would be lost
        "        pass\n"
        "    return load(*model, **options)\n"
        "commands.load = loads_slowly\n"
        "commands.main()"
    )
    port, command = serving(tmp_path, program)
    with command("--api-key-file", str(tmp_path / "keys"), stdin=-1) as process:
        try:
            until(lambda: can_connect(port))
            yield process, port
        finally:
            process.kill()


@pytest.fixture
def tiny(tmp_path, request):
    """(process, port) of `edgespec serve`, whose system holds little that is not read; the parameter is `--grace`."""
    program = (
        "import edgespec.cli.commands as commands, socket\n"
        "listen = socket.socket.listen\n"
        "small = socket.SOL_SOCKET, socket.SO_SNDBUF, 4096\n"
        "socket.socket.listen = lambda sock, *most: (sock.setsockopt(*small), listen(sock, *most))[1]\n"
        "commands.main()"
    )
    port, command = serving(tmp_path, program)
    with command("--ctx", "60000", "--grace", str(getattr(request, "param", 30))) as process:
        try:
            assert "answers at" in process.stdout.readline()
            until(lambda: can_connect(port))
            yield process, port
        finally:
            process.kill()


class TestCommand:
    """What is wrong is said before a model is loaded."""

    @pytest.fixture
    def served(self, monkeypatch):
        """The arguments of each server that would be started, with no model."""
        found = []
        monkeypatch.setattr(
            edgespec.cli.serve, "serve", lambda names, *more, **options: found.append({"name": names[0], **options})
        )
        monkeypatch.setattr(edgespec.cli.serve, "one", lambda model, names: names)
        monkeypatch.setattr(edgespec.cli.commands, "_check_and_pull", lambda *arguments: None)
        monkeypatch.setattr(edgespec.cli.commands, "_loaded", lambda *arguments: nullcontext((None, [])))
        return found

    @pytest.mark.parametrize(
        ("arguments", "says"),
        [
            (["--host", "0.0.0.0", "--port", "0"], "--no-key"),
            (["--host", "192.0.2.1", "--port", "0", "--no-key"], "cannot listen on 192.0.2.1"),
            (["--port", "70000"], "from 0 to 65535"),
            (["--keep-on-disk", "qwen3-32b"], "--keep-on-disk qwen3-32b: is the name of a model; give a folder, or"),
            (["--keep-size", "abc"], "--keep-size: 'abc' is not a size"),
            (["--api-key-file", "nowhere.txt"], "nowhere.txt"),
            (["--api-key-file", "nowhere.txt", "--no-key"], "--no-key goes without --api-key-file"),
            (["--port", "0", "--parallel", "0"], "parallel is 0"),
            (["--port", "0", "--planner", "magic"], "no planner 'magic'"),
        ],
    )
    def test_bad_options(self, run, arguments, says, monkeypatch):
        monkeypatch.delenv("EDGESPEC_API_KEY", raising=False)
        code, _, error = run("serve", "smollm2-135m", *arguments)
        assert code == 2
        assert says in error
        assert len(error.strip().splitlines()) == 1

    def test_a_port_in_use(self, run):
        with socket.create_server(("127.0.0.1", 0)) as sock:
            code, _, error = run("serve", "smollm2-135m", "--port", str(sock.getsockname()[1]))
        assert code == 2
        assert "cannot listen" in error

    def test_a_port_of_a_server_that_still_loads(self):
        with (
            open_socket("127.0.0.1", 0, [], no_key=False) as sock,
            pytest.raises(UsageError, match="cannot listen"),
        ):
            open_socket("127.0.0.1", sock.getsockname()[1], [], no_key=False)

    @pytest.mark.parametrize(("system", "reused"), [("posix", 1), ("nt", 0)])
    def test_a_port_is_taken_from_no_program_on_windows(self, monkeypatch, system, reused):
        """There SO_REUSEADDR lets a second program bind a port that another one listens on."""
        monkeypatch.setattr(edgespec.cli.serve, "os", SimpleNamespace(name=system))
        with open_socket("127.0.0.1", 0, [], no_key=False) as sock:
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR) == reused

    @pytest.mark.parametrize(
        ("file", "name"), [("qwen2.5-1.5b", "qwen2.5-1.5b"), ("big-1.5b.gguf", "big-1.5b"), ("v1.5/.", "v1.5")]
    )
    def test_the_name_of_the_model_is_whole(self, run, tmp_path, served, file, name):
        run("serve", f"{tmp_path}/{file}", "--port", "0")
        assert served[0]["name"] == name

    def test_a_variable_sets_the_flag_to_keep_sessions(self, run, served, monkeypatch):
        kept = []
        monkeypatch.setattr(edgespec.cli.serve, "keep_on_disk", lambda model, folder, most: kept.append(folder))
        for value in ("1", "sessions"):
            monkeypatch.setenv("EDGESPEC_SERVE_KEEP_ON_DISK", value)
            run("serve", "x.gguf", "--port", "0")
        assert kept == ["", "sessions"]  # "" is the cache folder

    def test_no_key_is_none_also_where_the_environment_has_one(self, run, served, monkeypatch):
        monkeypatch.setenv("EDGESPEC_API_KEY", "secret")
        for arguments, keys in (([], ["secret"]), (["--no-key"], [])):
            run("serve", "x.gguf", "--port", "0", *arguments)
            assert served[-1]["keys"] == keys

    def test_a_key_file_with_a_byte_order_mark(self, tmp_path):
        (tmp_path / "keys").write_text("\ufeffone\r\ntwo\r\n", "utf-8")
        assert read_keys(None, str(tmp_path / "keys")) == ["one", "two"]

    @pytest.mark.parametrize("text", ["secret\n", " secret ", "\tsecret\r\n\n"])
    def test_space_around_a_key_does_not_count(self, monkeypatch, text, tmp_path):
        (tmp_path / "keys").write_text(text)
        monkeypatch.setenv("EDGESPEC_API_KEY", text)
        assert read_keys(None, None) == read_keys(text, None) == ["secret"]
        assert read_keys(None, str(tmp_path / "keys")) == ["secret"]
        assert read_keys("other", str(tmp_path / "keys")) == ["other", "secret"]
        monkeypatch.delenv("EDGESPEC_API_KEY")
        assert read_keys(None, None) == []

    @pytest.mark.parametrize("text", ["", "\n", " \t"])
    @pytest.mark.parametrize("source", ["--api-key-file", "--api-key", "$EDGESPEC_API_KEY"])
    def test_an_empty_key_is_refused(self, run, tmp_path, monkeypatch, source, text):
        (tmp_path / "keys").write_text(text)
        monkeypatch.setenv("EDGESPEC_API_KEY", text)
        given = {"--api-key-file": str(tmp_path / "keys"), "--api-key": text}
        arguments = [source, given[source]] if source in given else []
        code, _, error = run("serve", "smollm2-135m", "--port", "70000", *arguments)
        assert code == 2
        assert f"{source}{' ' + given[source] if source == '--api-key-file' else ''}: has no key" in error
        assert "Traceback" not in error

    def test_while_the_model_loads_requests_are_refused_at_once(self, slow_to_load):
        process, port = slow_to_load
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", headers={"x-api-key": "secret"}) as http:
            says = "the model is loading: come again in a moment"
            error = {"message": says, "type": "overloaded_error", "param": None, "code": None}
            openai, anthropic = {"error": error}, {"type": "error", "error": {"type": error["type"], "message": says}}
            for method, path, body in (
                ("GET", "/health", openai),
                ("GET", "/v1/models", openai),
                ("GET", "/metrics", openai),
                ("PUT", "/edgespec/draft-prompt", openai),
                ("POST", "/v1/chat/completions", openai),
                ("POST", "/v1/completions", openai),
                ("POST", "/v1/responses", openai),
                ("POST", "/v1/messages", anthropic),
                ("POST", "/v1/messages/count_tokens", anthropic),
            ):
                answer = http.request(method, path, json={"messages": HELLO})
                assert (answer.status_code, answer.json()) == (503, body)
                assert int(answer.headers["retry-after"]) > 0
            assert http.get("/v1/models", headers={"x-api-key": "wrong"}).status_code == 401
            assert http.get("/health", headers={"host": "evil.example"}).status_code == 403
            assert "connecting" in http.get("/").text
            assert "function greet" in http.get("/static/app.js").text

            process.stdin.write("\n")
            process.stdin.flush()
            assert "answers at" in process.stdout.readline()
            assert httpx.get(f"http://127.0.0.1:{port}/health").json()["status"] == "ok"
            answer = http.post("/v1/chat/completions", json={"messages": HELLO, "max_tokens": 3})
            assert answer.json()["usage"]["completion_tokens"] == 3

    def test_a_connection_without_a_whole_head_is_closed(self, monkeypatch):
        half, whole = b"GET / HTTP/1.1\r\n", b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
        with open_socket("127.0.0.1", 0, [], no_key=False) as sock, edgespec.cli.serve.refusing(sock, log=False):
            for before, sent in ((b"", b""), (b"", half), (whole, half)):
                monkeypatch.setattr(connections, "HEAD_SECONDS", 60)
                with socket.create_connection(sock.getsockname(), timeout=20) as silent:
                    silent.sendall(before)
                    assert not before or silent.recv(99)
                    silent.sendall(sent)
                    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.2)
                    while silent.recv(2**16):
                        pass

    def test_ctrl_c_ends_it_while_the_model_loads(self, slow_to_load):
        process, port = slow_to_load
        assert httpx.get(f"http://127.0.0.1:{port}/health").status_code == 503
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130
        assert process.stderr.read().strip() == ""

    def test_signals_end_it_cleanly(self, tiny):
        """The first refuses what is new, the second ends what is written, with an error that its reader is told."""
        process, port = tiny
        reader = ask(port, stream=True, max_tokens=50000)
        found = reader.recv(4096)
        half = socket.create_connection(("127.0.0.1", port))
        half.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            b'Content-Length: 99\r\n\r\n{"prompt'
        )
        process.send_signal(signal.SIGTERM)
        until(lambda: not can_connect(port))
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        while piece := reader.recv(2**16):
            found += piece
        assert process.wait(20) == 0
        assert b"the server is stopping" in found
        assert process.stderr.read() == "reference; exactly the text of plain decoding\n"
        half.close()

    @pytest.mark.parametrize(
        ("tiny", "signals", "answer"),
        [(600, 2, {"stream": True, "max_tokens": 50000}), (0, 1, {"stream": True, "max_tokens": 50000}),
         (600, 1, {"head": "Connection: close\r\n", "max_tokens": 501}), (600, 1, {"max_tokens": 501})],
        indirect=["tiny"], ids=["a second signal", "no grace", "an answer that is over", "also on a kept connection"],
    )  # fmt: skip
    def test_a_client_that_does_not_read_does_not_delay_the_end(self, tiny, signals, answer):
        def is_unread():
            metrics = httpx.get(f"http://127.0.0.1:{port}/metrics").text
            written = sum(int(number) for number in re.findall(r"edgespec_tokens_total.* (\d+)", metrics))
            return written > 500 and 'path="/v1/chat/completions",status="200"} 1' in metrics

        process, port = tiny
        with ask(port, logprobs=True, top_logprobs=20, **answer):
            until(is_unread)
            for _ in range(signals):
                process.send_signal(signal.SIGTERM)
                until(lambda: not can_connect(port))
            assert process.wait(60) == 0
            assert process.stderr.read() == "reference; exactly the text of plain decoding\n"


def can_connect(port):
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True
