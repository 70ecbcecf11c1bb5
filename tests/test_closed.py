"""A closed model says so: engines have freed what they would be asked about, and asking would end the process."""

import asyncio
import threading

import numpy as np
import pytest
from edgespec.backends.reference.backend import ReferenceBackend, random_model
from gguf_files import small_llama

import edgespec
from edgespec.errors import EdgespecError
from edgespec.loop.backend import Work
from edgespec.model import Model
from edgespec.planners.none import NonePlanner
from edgespec.scheduler.requests import Request

MESSAGES = [{"role": "user", "content": "hello"}]
SHORT = {"max_tokens": 2}


async def all_of(chunks):
    return [chunk async for chunk in chunks]


CALLS = {  # of every public method, as a user makes them
    "astream": [lambda model: asyncio.run(all_of(model.astream("hello", **SHORT)))],
    "astream_chat": [lambda model: asyncio.run(all_of(model.astream_chat("hello", **SHORT)))],
    "branch": [lambda model: model.branch("hello", 2, **SHORT)],
    "chat": [lambda model: model.chat("hello", **SHORT), lambda model: model.chat(MESSAGES, **SHORT)],
    "compile": [lambda model: model.compile(edgespec.regex("a"))],
    "encode": [lambda model: model.encode("hello"), lambda model: model.encode(MESSAGES)],
    "hint_texts": [lambda model: model.hint_texts([3, 4], "hello"), lambda model: model.hint_texts([3, 4])],
    "generate": [lambda model: model.generate("hello", **SHORT), lambda model: model.generate(MESSAGES, **SHORT)],
    "request": [lambda model: model.request("hello"), lambda model: model.request(MESSAGES)],
    "stream": [lambda model: list(model.stream("hello", **SHORT))],
    "stream_chat": [lambda model: list(model.stream_chat("hello", **SHORT))],
    "__enter__": [lambda model: model.__enter__()],
}
HARMLESS = {"close", "notes"}  # what says nothing of the engine


@pytest.fixture(scope="module")
def gguf(tmp_path_factory):
    return str(small_llama(tmp_path_factory.mktemp("closed") / "tiny.gguf", layers=1))


@pytest.fixture(params=["reference", "llamacpp"])
def model(request):
    if request.param == "llamacpp":
        model = edgespec.load(
            request.getfixturevalue("gguf"), context_length=256, planner="none", exact="off", parallel=2
        )
    else:
        target = ReferenceBackend(random_model(2, vocab_size=258), sessions=2)
        model = Model(target, [NonePlanner(), NonePlanner()])
        model._owned = [target]
    yield model
    model.close()


def test_every_public_method_is_in_the_table():
    assert {name for name in dir(Model) if not name.startswith("_")} == CALLS.keys() - {"__enter__"} | HARMLESS


@pytest.mark.parametrize("name", CALLS)
def test_every_public_method_says_that_the_model_was_closed(model, name):
    if name == "compile":
        pytest.importorskip("llguidance")
    for call in CALLS[name]:
        call(model)
    begun = model.stream("hello", **SHORT)
    for _ in range(2):  # safe to call twice
        model.close()
        for call in CALLS[name]:
            with pytest.raises(edgespec.Closed, match=r"^the model was closed$"):
                call(model)
    with pytest.raises(edgespec.Closed):
        next(begun)
    assert issubclass(edgespec.Closed, EdgespecError)
    assert model.notes is not None


def test_sessions_are_neither_saved_nor_loaded_nor_emptied(model, tmp_path):
    model.generate("hello", **SHORT)
    model.scheduler.save(tmp_path / "a.session")
    before = (tmp_path / "a.session").read_bytes()
    model.close()
    for call in (
        lambda: model.scheduler.save(tmp_path / "a.session", "note"),
        lambda: model.scheduler.load(tmp_path / "a.session"),
        lambda: model.scheduler.forget(),
        lambda: model.scheduler.submit(Request([3], model.sampling, 1), print),
    ):
        with pytest.raises(edgespec.Closed):
            call()
    assert (tmp_path / "a.session").read_bytes() == before


def test_what_llama_cpp_has_freed_is_not_asked(gguf):
    from edgespec.backends.llamacpp import engine

    target = engine.load(gguf, context_length=256)
    session, vocab, one = target.open(), target.vocab, np.zeros(1, np.int32)
    names = [vocab.token_bytes(token) for token in range(9)]
    target.close()
    target.close()
    for call in (
        target.open,
        lambda: target.forward([Work(session, one, one - 1, one)]),
        lambda: vocab.encode("hello", add_bos=True, parse_special=True),
        lambda: vocab.token_bytes(vocab.size - 1),
        lambda: vocab.token_text(3),
        lambda: vocab.kind(3),
        lambda: vocab.fingerprint,
    ):
        with pytest.raises(edgespec.Closed):
            call()
    session.close()
    assert [vocab.token_bytes(token) for token in range(9)] == names  # these it knows


def test_a_vocabulary_that_is_being_read_is_freed_afterwards(gguf, monkeypatch):
    """A server tokenises in threads of their own, one of which may be at it when the model is closed."""
    from edgespec.backends.llamacpp import engine, vocab

    target, calls = engine.load(gguf, context_length=256), []
    reads, goes_on = threading.Event(), threading.Event()
    tokenise, free = vocab.llama_cpp.llama_tokenize, vocab.llama_cpp.llama_model_free

    def slowly(*arguments):
        reads.set()
        assert goes_on.wait(60)
        calls.append("read")
        return tokenise(*arguments)

    def freed(pointer):
        calls.append("freed")
        free(pointer)

    monkeypatch.setattr(vocab.llama_cpp, "llama_tokenize", slowly)
    monkeypatch.setattr(vocab.llama_cpp, "llama_model_free", freed)
    reader = threading.Thread(target=target.vocab.encode, args=("hello",), kwargs={"add_bos": True, "parse_special": 0})
    reader.start()
    assert reads.wait(60)
    target.close()
    assert calls == []
    goes_on.set()
    reader.join()
    assert calls == ["read", "freed"]


def test_the_server_answers_that_it_is_stopping(model):
    pytest.importorskip("starlette", reason="the server is not installed: pip install 'edgespec[server]'")
    from starlette.testclient import TestClient

    from edgespec.server.app import make_app
    from edgespec.server.service import Service

    client = TestClient(make_app(Service(model, "tiny")), "http://127.0.0.1:8080", raise_server_exceptions=False)
    model.scheduler.start()
    asked = {"messages": MESSAGES, "max_tokens": 2, "model": "tiny"}
    paths = ["/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"]
    if model.target.name == "llamacpp":  # the other's tokenizer needs no model
        paths.append("/v1/messages/count_tokens")
    for expected in (200, 503):
        for path in paths:
            found = client.post(path, json=asked | {"prompt": "hello", "input": "hello", "max_output_tokens": 16})
            assert found.status_code == expected, (path, found.text)
        model.close()
