"""A closed model says so: engines have freed what they would be asked about, and asking would end the process."""

import asyncio
import contextlib
import threading
import time

import numpy as np
import pytest
from conftest import few
from forked import forked
from gguf_files import small_llama
from reference.backend import ReferenceBackend, ReferenceVocab, random_model

import edgespec
from edgespec.errors import EdgespecError
from edgespec.loop.backend import Work
from edgespec.loop.sampling import SamplingParams
from edgespec.loop.stats import GenerationStats
from edgespec.model import Model
from edgespec.planners.none import NonePlanner
from edgespec.scheduler.events import Ended
from edgespec.scheduler.requests import Request
from edgespec.scheduler.scheduler import Scheduler
from edgespec.scheduler.sequence import Seq

MESSAGES = [{"role": "user", "content": "hello"}]
SHORT = {"max_tokens": 2}


async def all_of(chunks):
    return [chunk async for chunk in chunks]


CALLS = {  # of every public method, as a user makes them
    "achat": [lambda model: asyncio.run(model.achat("hello", **SHORT))],
    "agenerate": [lambda model: asyncio.run(model.agenerate("hello", **SHORT))],
    "answer": [lambda model: model.answer([])],
    "astream": [lambda model: asyncio.run(all_of(model.astream("hello", **SHORT)))],
    "astream_chat": [lambda model: asyncio.run(all_of(model.astream_chat("hello", **SHORT)))],
    "branch": [lambda model: model.branch("hello", 2, **SHORT)],
    "chat": [lambda model: model.chat("hello", **SHORT), lambda model: model.chat(MESSAGES, **SHORT)],
    "compile": [lambda model: model.compile(edgespec.regex("a"))],
    "decode": [lambda model: model.decode([3])],
    "detokenize": [lambda model: model.detokenize([3])],
    "embed": [lambda model: model.embed("hello")],
    "encode": [lambda model: model.encode("hello"), lambda model: model.encode(MESSAGES)],
    "hint_texts": [lambda model: model.hint_texts([3, 4], "hello"), lambda model: model.hint_texts([3, 4])],
    "generate": [lambda model: model.generate("hello", **SHORT), lambda model: model.generate(MESSAGES, **SHORT)],
    "request": [lambda model: model.request("hello"), lambda model: model.request(MESSAGES)],
    "search": [lambda model: model.search("hello", lambda texts: [0.0] * len(texts), width=2, depth=1)],
    "stream": [lambda model: list(model.stream("hello", **SHORT))],
    "stream_chat": [lambda model: list(model.stream_chat("hello", **SHORT))],
    "tokenize": [lambda model: model.tokenize("hello")],
    "__enter__": [lambda model: model.__enter__()],
}
HARMLESS = {"approximate", "close", "notes", "scheduler", "where"}  # what says nothing of the engine


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
        model.owned = [target]
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


REQUEST = Request([3], SamplingParams(), 1)


def submit(scheduler, path):
    ended = threading.Event()
    scheduler.submit(REQUEST, lambda event: ended.set() if isinstance(event, Ended) else None)
    scheduler.start()
    assert ended.wait(60)


OF_SCHEDULER = {  # calls of every public method of `Model.scheduler`
    "submit": submit,
    "save": lambda scheduler, path: scheduler.save(path, "note"),
    "load": lambda scheduler, path: scheduler.load(path),
    "forget": lambda scheduler, path: scheduler.forget(),
    "call": lambda scheduler, path: scheduler.call(lambda call: call.pool.active),
    "check_open": lambda scheduler, path: scheduler.check_open(),
}
WITHOUT_ENGINE = {  # calls that may come late, and then do nothing
    "start": lambda scheduler, path: scheduler.start(),
    "step": lambda scheduler, path: scheduler.step(),
    "wake": lambda scheduler, path: scheduler.wake(),
    "promote": lambda scheduler, path: scheduler.promote(
        Seq(REQUEST, print, GenerationStats(), ReferenceVocab(9), lambda: None, idle_limit=0)
    ),
    "close": lambda scheduler, path: scheduler.close(),
    **{
        name: lambda scheduler, path, name=name: getattr(scheduler, name)
        for name in ("waiting", "active", "kept_tokens")
    },
}


def test_every_public_method_of_a_scheduler_is_in_the_tables():
    assert {name for name in dir(Scheduler) if not name.startswith("_")} == OF_SCHEDULER.keys() | WITHOUT_ENGINE.keys()


def test_sessions_are_neither_saved_nor_loaded_nor_emptied(model, tmp_path):
    model.generate("hello", **SHORT)
    path = tmp_path / "a.session"
    model.scheduler.save(path)
    before = path.read_bytes()
    model.close()
    for call in OF_SCHEDULER.values():
        with pytest.raises(edgespec.Closed):
            call(model.scheduler, path)
    for call in WITHOUT_ENGINE.values():
        call(model.scheduler, path)
    assert path.read_bytes() == before


def until_closed(call, begun, found):
    """Call again and again; the model is closed meanwhile."""
    try:
        while True:
            call()
            begun.set()
    except BaseException as error:
        found.append(error)
    finally:
        begun.set()


# Of each kind of call: one text, several, a stream, words alone, a grammar, and what the scheduler's thread does.
USUAL = ("generate", "branch", "astream_chat", "encode", "compile", "submit", "save", "load")


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", few([*CALLS, *OF_SCHEDULER], *USUAL))
def test_a_model_that_is_closed_while_other_threads_use_it_says_so_in_each(model, name, tmp_path):
    if name == "compile":
        pytest.importorskip("llguidance")
    if name in CALLS:
        calls = [lambda: CALLS[name][0](model)]
    else:
        model.scheduler.save(tmp_path / "0")
        calls = [lambda: OF_SCHEDULER[name](model.scheduler, tmp_path / "0")]
    calls.append(lambda: list(model.stream("hello", max_tokens=100)))  # passes are under way, too
    found, begun = [], [threading.Event() for _ in calls]
    threads = [threading.Thread(target=until_closed, args=(*one, found)) for one in zip(calls, begun, strict=True)]
    threads += [threading.Thread(target=model.close) for _ in range(2)]
    for thread in threads[: len(calls)]:
        thread.start()
    for event in begun:
        assert event.wait(60)
    for thread in threads[len(calls) :]:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert [type(error) for error in found] == [edgespec.Closed] * len(calls)


def test_pass_times_are_kept_when_none_is_measured_any_more_and_an_error_there_frees_all_the_same():
    target, alive = ReferenceBackend(random_model(2, vocab_size=258), sessions=1), list[bool]()
    freed = list[str]()
    target.close = lambda: freed.append("target")

    def keep():
        alive.append(model.scheduler.thread.is_alive())
        raise RuntimeError("dictionary changed size during iteration")

    model = Model(target, NonePlanner(), owned=[target], at_close=keep)
    model.scheduler.start()
    with pytest.raises(RuntimeError):
        model.close()
    assert (alive, freed) == ([False], ["target"])


def test_a_thread_that_starts_while_the_model_is_closed_ends_before_anything_is_freed(monkeypatch):
    target = ReferenceBackend(random_model(2, vocab_size=258), sessions=1)
    model, alive, entered = Model(target, NonePlanner(), owned=[target]), list[bool](), threading.Event()
    queue, forward = model.scheduler._queue, target.forward
    real = queue.close

    def close():  # it waits for the lock, which `start` holds
        entered.set()
        real()

    class Starting(threading.Thread):
        def start(self):
            super().start()
            closing.start()
            assert entered.wait(60)

    def slowly(batch):
        time.sleep(0.2)
        return forward(batch)

    closing = threading.Thread(target=model.close)
    monkeypatch.setattr(target, "forward", slowly)
    monkeypatch.setattr(queue, "close", close)
    monkeypatch.setattr("edgespec.scheduler.scheduler.Thread", Starting)
    monkeypatch.setattr(target, "close", lambda: alive.append(model.scheduler.thread.is_alive()))
    with contextlib.suppress(edgespec.Closed):
        model.generate("hello", max_tokens=2)
    closing.join(60)
    assert alive == [False]


def test_two_threads_that_close_a_model_free_it_once(gguf, monkeypatch):
    from edgespec.backends.llamacpp import backend, engine

    target, freed = engine.load(gguf, context_length=256), []
    free = backend.llama_cpp.llama_free

    def slowly(context):
        freed.append(context)
        if len(freed) == 1:
            second.start()
            second.join()
            free(context)

    second = threading.Thread(target=target.close)
    monkeypatch.setattr(backend.llama_cpp, "llama_free", slowly)
    target.close()
    assert len(freed) == 1


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
    texts = {"prompt": "hello", "input": "hello", "content": "hello", "max_output_tokens": 16}
    paths = ["/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses", "/api/chat"]
    if model.target.name == "llamacpp":  # the other's tokenizer needs no model
        paths += ["/v1/messages/count_tokens", "/tokenize"]
    for expected in (200, 503):
        for path in paths:
            found = client.post(path, json=asked | texts)
            assert found.status_code == expected, (path, found.text)
        model.close()


UNCLOSED = """
from edgespec.backends.llamacpp.engine import load
from edgespec.backends.llamacpp.ggml.files import llama_cpp

numbers = {}


def told(name):
    really = getattr(llama_cpp, name)

    def free(pointer):
        if found := numbers.get(pointer):
            print(name, found)
        really(pointer)

    setattr(llama_cpp, name, free)


told("llama_free")
told("llama_model_free")
models = [load(PATH, context_length=64) for _ in range(2)]
for number, model in enumerate(models, 1):
    numbers |= {model.context: number, model.model: number}
if COLLECTED:
    model = models = None
    print("collected")
"""


@pytest.mark.parametrize("collected", [False, True])
def test_a_program_that_ends_without_close_frees_its_models_in_order(gguf, collected):
    """The last one first, a context before its model: Metal aborts if it is taken down before its buffers."""
    program = UNCLOSED.replace("PATH", repr(gguf)).replace("COLLECTED", str(collected))
    done = forked(program=program)
    freed = [f"{name} {number}" for number in (2, 1) for name in ("llama_free", "llama_model_free")]
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.splitlines()) == sorted([*freed, *["collected"] * collected])
    assert collected or done.stdout.splitlines() == freed
