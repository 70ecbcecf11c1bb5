"""A server with several models, of which memory holds some."""

import asyncio
import json
import random
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from threading import Event, Semaphore

import pytest
from reference.backend import ReferenceBackend, random_model

pytest.importorskip("starlette", reason="the server is not installed: pip install 'edgespec[server]'")
pytest.importorskip("httpx", reason="httpx is not installed")

from gguf_files import small_llama
from starlette.testclient import TestClient
from test_server import HELLO, stream

from edgespec.cli import serve
from edgespec.errors import Closed, ModelError, UsageError
from edgespec.loading.asked import asked_for
from edgespec.machine.memory import private_memory
from edgespec.model import Model, load_asked
from edgespec.planners.sssd import SssdPlanner
from edgespec.server.app import make_app
from edgespec.server.dialects import dialect
from edgespec.server.errors import Refused
from edgespec.server.models import Models, Served
from edgespec.weights.plan import MARGIN

SIZE = 10
SEEDS = {"a": 2, "b": 3, "c": 4}
GREEDY = {"max_tokens": 8, "temperature": 0}


def small_model(name):
    target = ReferenceBackend(random_model(SEEDS[name], vocab_size=258), sessions=2, context_length=200)
    target.model.unembedding[1] = 0  # texts seldom end early
    return Model(target, [SssdPlanner() for _ in range(2)], budget=2)


class Shelf:
    """Opens small models, and notes which are open."""

    def __init__(self):
        self.open, self.opened, self.most, self.room = [], [], 0, 2

    def load(self, name, room, check):
        model = small_model(name)
        self.open.append(name)
        self.opened.append(name)
        self.most = max(self.most, len(self.open))
        assert room >= SIZE * (1 + self.room - len(self.open))
        close = model.close

        def closed():
            if name in self.open:
                self.open.remove(name)
            close()

        model.close = closed
        return model

    def models(self, *, room=2, load=None, **more):
        self.room = room
        served = [Served([name], SIZE, partial(load or self.load, name)) for name in SEEDS]
        return Models(served, room * SIZE, **more)


@contextmanager
def served(models, **guard):
    app = make_app(models, **guard)
    with TestClient(app, base_url="http://127.0.0.1:8080", raise_server_exceptions=False) as client:
        client.models = models
        yield client


@pytest.fixture
def shelf():
    shelf = Shelf()
    yield shelf
    assert shelf.open == []


def answered_in_random_order(client, names, alone, count, clients=8):
    """Ask for texts in random order from several clients; each must be that of the model alone."""
    wanted = random.Random(0).choices([(name, prompt) for name in names for prompt in alone[name]], k=count)

    def ask(number):
        name, prompt = wanted[number]
        body = {"model": name, "prompt": prompt, **GREEDY}
        if number % 2:
            return "".join(
                choice["text"]
                for data in stream(client, "/v1/completions", body)[:-1]
                for choice in json.loads(data)["choices"]
            )
        return client.post("/v1/completions", json=body).json()["choices"][0]["text"]

    with ThreadPoolExecutor(clients) as pool:
        found = list(pool.map(ask, range(count)))
    assert found == [alone[name][prompt] for name, prompt in wanted]
    assert client.models.taken <= client.models.memory


PROMPTS = ("hello", "the sky", "one two", "a")


def texts_of(model):
    with model:
        return {prompt: model.generate(prompt, **GREEDY).text for prompt in PROMPTS}


def test_requests_for_three_models_in_memory_for_two_get_the_texts_of_each_alone(shelf):
    alone = {name: texts_of(small_model(name)) for name in SEEDS}
    with served(shelf.models()) as client:
        answered_in_random_order(client, SEEDS, alone, 40)
    assert shelf.most == 2
    assert {*shelf.opened} == {*SEEDS}


def ggufs(folder, smollm2):
    paths = [smollm2, small_llama(folder / "one.gguf", layers=2), small_llama(folder / "two.gguf", layers=3)]
    return {str(path): [path.stem] for path in paths}


def asked(path, memory):
    return asked_for(path, memory=memory, context_length=256, parallel=2, exact="off", remember=False, threads=2)


@pytest.mark.parametrize("count", [16, pytest.param(200, marks=pytest.mark.exhaustive)])
def test_files_share_memory_by_their_plans(count, smollm2, tmp_path):
    names = ggufs(tmp_path, smollm2)
    alone = {names[path][0]: texts_of(load_asked(asked(path, "4G"))) for path in names}
    sizes = [one.size for one in files(names, 4 << 30).all]
    memory = sum(sorted(sizes)[1:]) + private_memory() + MARGIN
    models = files(names, memory + serve.SLACK)
    assert models.memory < sum(sizes)
    with served(models) as client:
        answered_in_random_order(client, alone, alone, count)
        told = client.get("/health").json()
        assert 1 <= sum(one["loaded"] for one in told["models"]) <= 2
        assert not any(one["streams"] for one in told["models"] if one["loaded"])


def files(names, memory):
    return serve.several({path: asked(path, memory) for path in names}, names, memory, lambda name, model: None)


def test_the_model_idle_longest_leaves_and_one_in_use_stays(shelf):
    async def run():
        models = shelf.models()
        for name in ("a", "b", "a"):
            async with models.service(name):
                pass
        async with models.service("c"):
            assert list(models.services) == shelf.open == ["a", "c"]
            a, b = models.lease("a"), models.lease("b")
            waits = asyncio.create_task(b.service())
            await asyncio.sleep(0.05)
            assert not waits.done()  # both are in use
            later = models.lease("a")  # it comes behind, or b could wait for ever
            assert (later.is_loaded, a.is_loaded) == (False, True)
            a.close()
            assert (await waits).name == "b"
            assert shelf.open == ["c", "b"]
            await asyncio.sleep(0.05)
            behind = models.lease("c")  # in use for longest, so it is to leave next
            assert not behind.is_loaded
            b.close()  # but now b is idle
            assert (await later.service()).name == "a"
            assert shelf.open == ["c", "a"]
            with closing(models.lease("c")) as another:
                assert another.is_loaded  # it need not leave any more
            assert (await behind.service()).name == "c"
            assert shelf.opened == ["a", "b", "c", "b", "a"]
            behind.close()
            later.close()
        assert shelf.most == 2
        models.close()

    asyncio.run(asyncio.wait_for(run(), 60))


def test_a_model_that_nobody_waits_for_any_more_is_not_loaded(shelf):
    async def run():
        models = shelf.models(room=1)
        async with models.service("a"):
            waits = models.lease("b")
            await asyncio.sleep(0.01)
            waits.close()
        async with models.service("c"):
            pass
        assert shelf.opened == ["a", "c"]
        models.close()

    asyncio.run(asyncio.wait_for(run(), 60))


@pytest.mark.parametrize("stream", [True, False])
def test_a_model_is_not_loaded_only_to_be_dropped(shelf, stream):
    with served(shelf.models()) as client:
        for name, status in (("b", 200), ("missing", 404)):
            answer = client.post("/api/generate", json={"model": name, "keep_alive": 0, "stream": stream})
            assert answer.status_code == status
            assert "unload" in answer.text or status == 404
    assert shelf.opened == []


def test_a_model_that_cannot_be_loaded_gives_503_and_the_others_go_on(shelf):
    broken = [True]

    def load(name, room, check):
        if name == "b" and broken:
            raise ModelError("b.gguf: the file is damaged")
        return shelf.load(name, room, check)

    with served(shelf.models(load=load)) as client:
        for name, status in (("a", 200), ("b", 503), ("a", 200), ("c", 200), ("b", 503)):
            answer = client.post("/v1/chat/completions", json=HELLO | GREEDY | {"model": name})
            assert answer.status_code == status
        assert answer.json()["error"]["message"] == "the model b cannot be loaded: b.gguf: the file is damaged"
        events = stream(client, "/v1/chat/completions", HELLO | {"model": "b"})
        assert "the file is damaged" in json.loads(events[-1])["error"]["message"]
        assert client.models.taken == len(shelf.open) * SIZE
        broken.clear()
        assert client.post("/v1/chat/completions", json=HELLO | GREEDY | {"model": "b"}).status_code == 200


STREAMS = {
    "/v1/chat/completions": HELLO,
    "/v1/completions": {"prompt": "hello"},
    "/v1/messages": HELLO,
    "/v1/responses": {"input": "hello"},
    "/api/chat": HELLO,
}


@pytest.mark.parametrize("path", STREAMS)
def test_a_stream_has_events_while_its_model_is_loaded(path, shelf, monkeypatch):
    written = Semaphore(0)
    lines = dialect.Dialect._lines

    async def counted(self, *given):
        async for line in lines(self, *given):
            written.release()
            yield line

    monkeypatch.setattr(dialect.Dialect, "_lines", counted)

    def load(name, room, check):
        for _ in range(4):
            assert written.acquire(timeout=60)
        return shelf.load(name, room, check)

    with served(shelf.models(load=load, ping_seconds=0.01)) as client:
        body = STREAMS[path] | {"model": "b", "max_tokens": 5, "stream": True}
        with client.stream("POST", path, json=body) as answer:
            assert answer.status_code == 200, answer.read()
            lines_read = [line.removeprefix("data: ") for line in answer.iter_lines() if line[:1] in ("d", "{")]
        events = [json.loads(line) for line in lines_read if line != "[DONE]"]
    if path == "/v1/responses":
        kinds = [event["type"] for event in events]
        assert kinds[:4] == ["response.created", *["response.in_progress"] * 3]
        assert (kinds.count("response.created"), kinds[-1]) == (1, "response.incomplete")
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert len({event["response"]["id"] for event in events if "response" in event}) == 1
    elif path == "/v1/messages":
        kinds = [event["type"] for event in events]
        assert kinds[:4] == ["ping"] * 4
        assert kinds.count("message_start") == 1
    elif path == "/api/chat":
        assert [event["message"]["content"] for event in events[:4]] == [""] * 4
        assert events[-1]["done"]
    else:
        parts = [event["choices"][0] for event in events]
        assert [part["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + ["length"]
        assert [part.get("text", part.get("delta", {}).get("content")) for part in parts[:4]] == [""] * 4
        assert len({event["id"] for event in events}) == 1


def test_a_request_names_one_of_the_models(shelf):
    models = shelf.models()
    models.all[1].names = ["b", "second"]
    with served(models) as client:

        def model_of(name):
            answer = client.post("/v1/completions", json={"prompt": "hello", **GREEDY, "model": name})
            return next(one for one, text in alone.items() if text["hello"] == answer.json()["choices"][0]["text"])

        alone = {name: texts_of(small_model(name)) for name in SEEDS}
        assert [model_of(name) for name in ("c", "second", "b:latest", "")] == ["c", "b", "b", "a"]
        assert [one["id"] for one in client.get("/v1/models").json()["data"]] == ["a", "b", "second", "c"]
        assert client.get("/v1/models/second").json()["meta"]["n_ctx"] == 200
        assert [one["model"] for one in client.get("/api/tags").json()["models"]] == ["a", "b", "c"]
        says = "the model '/etc/x.gguf' does not exist here; there are a, b, second, c"
        for path, body in STREAMS.items():
            for streamed in (False, True):
                answer = client.post(path, json=body | {"model": "/etc/x.gguf", "max_tokens": 2, "stream": streamed})
                error = answer.json()["error"]
                assert answer.status_code == 404
                assert (error if path == "/api/chat" else error["message"]) == says
                if path == "/v1/messages":
                    assert (answer.json()["type"], error["type"]) == ("error", "not_found_error")
                elif path != "/api/chat":
                    assert (error["type"], error["code"]) == ("invalid_request_error", "model_not_found")
        assert client.get("/v1/models/other").json()["error"]["code"] == "model_not_found"


def test_the_only_model_has_any_name_but_is_listed_by_its_own():
    with small_model("a") as model, served(serve.one(model, ["a", "gpt-4o"])) as client:
        assert client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1, "model": "y"}).status_code == 200
        assert [one["id"] for one in client.get("/v1/models").json()["data"]] == ["a", "gpt-4o"]
        assert [client.get(f"/v1/models/{name}").status_code for name in ("a", "gpt-4o", "y")] == [200, 200, 404]


def test_health_and_metrics_tell_of_each_model(shelf):
    with served(shelf.models()) as client:
        client.post("/v1/completions", json={"prompt": "hello", **GREEDY, "model": "b"})
        told = client.get("/health").json()
        assert [(one["model"], one["loaded"]) for one in told["models"]] == [("a", False), ("b", True), ("c", False)]
        assert (told["status"], told["memory"], told["taken"]) == ("ok", 2 * SIZE, SIZE)
        lines = client.get("/metrics").text.splitlines()
        assert f'edgespec_memory_bytes{{model="b"}} {SIZE}' in lines
        assert 'edgespec_memory_bytes{model="a"} 0' in lines
        assert 'edgespec_texts_total{model="b",ended="length"} 1' in lines
        assert 'edgespec_requests_total{path="/v1/completions",status="200"} 1' in lines


def test_what_only_looks_or_is_typed_loads_no_model(shelf):
    with served(shelf.models()) as client:
        for path in ("/v1/models", "/health", "/metrics", "/api/tags", "/api/ps"):
            assert client.get(path).status_code == 200
        assert client.post("/api/show", json={"model": "a"}).status_code == 200
        assert client.put("/edgespec/draft-prompt", json=HELLO | {"model": "a"}).json()["tokens"] == 0
        assert shelf.opened == []
        assert client.post("/v1/messages/count_tokens", json=HELLO | {"model": "c"}).json()["input_tokens"] > 5
        assert client.post("/tokenize", json={"content": "abc", "model": "b"}).json()["tokens"] != []
        assert shelf.opened == ["c", "b"]


def test_the_servers_end_stops_a_load_and_who_waits_for_it(shelf):
    async def run():
        begun, go_on, seen = Event(), Event(), []

        def load(name, room, check):
            begun.set()
            assert go_on.wait(60)
            with pytest.raises(Closed):
                check()
            seen.append(name)
            return shelf.load(name, room, check)  # an engine that does not ask

        models = shelf.models(load=load)
        waits = [asyncio.create_task(models.lease(name).service()) for name in ("a", "b")]
        assert await asyncio.to_thread(begun.wait, 60)
        models.stop()
        for one in waits:
            with pytest.raises(Closed):
                await one
        with pytest.raises(Refused, match="stopping"):
            models.lease("a")
        go_on.set()
        models.close()
        assert seen == shelf.opened == ["a"]

    asyncio.run(asyncio.wait_for(run(), 60))


def test_names_come_from_the_command_line():
    assert serve.names_of(["x/a.gguf", "b"], ["small=b", "tiny=b"]) == {"x/a.gguf": ["a"], "b": ["b", "small", "tiny"]}
    assert serve.names_of(["x/a.gguf"], ["gpt-4o"]) == {"x/a.gguf": ["a", "gpt-4o"]}
    for models, aliases, says in (
        (["x/a.gguf", "y/a.gguf"], [], "two of the models have the name of x/a.gguf"),
        (["a", "a"], [], "two of the models have the name of a"),
        (["a", "b"], ["c"], "--alias is 'c', but must be NAME=MODEL; models here are a, b"),
        (["a", "b"], ["c=d"], "--alias is 'c=d'"),
        (["a"], ["=a"], "--alias is '=a'"),
        (["a", "b"], ["b=a"], "--alias b=a: there is a model b already"),
    ):
        with pytest.raises(UsageError) as caught:
            serve.names_of(models, aliases)
        assert says in str(caught.value)


def test_a_model_that_never_fits_is_refused_at_the_start(run, tmp_path):
    paths = [str(small_llama(tmp_path / f"{name}.gguf", layers=2)) for name in "ab"]
    status, out, err = run("serve", *paths, "--memory", "20M", "--port", "0", "--exact", "off")
    assert (status, out) == (2, "")
    assert f"{paths[0]}: 20 MiB of memory are too little for this model" in err
    assert err.count("\n") == 1
