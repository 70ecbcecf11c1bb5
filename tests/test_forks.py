"""A fork has no thread of its parent's: what was loaded before says so in one line, and frees nothing of the parent."""

import os
import signal
import threading

import pytest
from gguf_files import small_llama
from reference.backend import ReferenceBackend, random_model
from test_closed import CALLS, OF_SCHEDULER
from test_dsi import Recorded, SlowSpec, targets
from test_dsi import write as write_dsi

import edgespec
from edgespec.errors import EdgespecError, OtherProcess
from edgespec.lab import ToolCache
from edgespec.loop.sampling import SamplingParams
from edgespec.machine import files
from edgespec.model import Model
from edgespec.planners.sssd import SssdPlanner
from edgespec.scheduler.targets.places import threads

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
SECONDS = 20  # after which a fork counts as hanging
LINE = "OtherProcess: process {} made this {}, and its fork"


def in_a_fork(*calls):
    """What calls return in a fork of this process, or their errors, as lines."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            signal.alarm(SECONDS)
            told = []
            for call in calls:
                try:
                    told.append(repr(call()))
                except EdgespecError as error:
                    told.append(f"{type(error).__name__}: {error}")
            os.write(write, "\n".join(told).encode())
        finally:
            os._exit(0)
    os.close(write)
    with open(read, encoding="utf-8") as file:
        told = file.read().splitlines()
    assert os.waitpid(child, 0)[1] == 0, "the fork hangs, or ended otherwise"
    return told


def line(what="model"):
    return LINE.format(os.getpid(), what)


@pytest.fixture(params=["reference", "llamacpp"])
def model(request, tmp_path):
    """A model that has been used by two threads at once, so that it has a thread of its own."""
    if request.param == "llamacpp":
        path = str(small_llama(tmp_path / "tiny.gguf", layers=1))
        model = edgespec.load(path, context_length=256, planner="none", exact="off", parallel=2, threads=2)
    else:
        model = Model(ReferenceBackend(random_model(2, vocab_size=258), sessions=2), [SssdPlanner(), SssdPlanner()])
    model.scheduler.start()
    yield model
    model.close()


def test_every_method_says_in_one_line_that_a_fork_cannot_use_the_model(model, tmp_path):
    pytest.importorskip("llguidance")
    text = model.generate("hello", max_tokens=8).text
    begun = model.stream("hello", max_tokens=8)
    next(begun)
    calls = [call for name in CALLS for call in CALLS[name]]
    calls = [lambda call=call: call(model) for call in calls]
    calls += [lambda call=call: call(model.scheduler, tmp_path / "a.session") for call in OF_SCHEDULER.values()]
    told = in_a_fork(*calls, lambda: next(begun))
    assert len(told) == len(calls) + 1
    assert [one for one in told if not one.startswith(line())] == []
    assert model.generate("hello", max_tokens=8).text == text
    assert issubclass(OtherProcess, EdgespecError)


def test_a_fork_ends_a_stream_and_closes_a_model_while_a_lost_thread_holds_the_lock(model):
    begun = model.stream("hello", max_tokens=8)
    next(begun)
    asked, held, done = model.scheduler, threading.Event(), threading.Event()

    def hold():
        with asked._queue.changed:
            held.set()
            done.wait(SECONDS)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    told = in_a_fork(begun.close, lambda: asked.waiting, model.close, model.close, lambda: model.generate("hello"))
    done.set()
    thread.join()
    assert told[:4] == ["None", "0", "None", "None"]
    assert told[4].startswith(line())
    assert len(list(begun)) == 7


@pytest.mark.parametrize("model", ["llamacpp"], indirect=True)
def test_a_fork_frees_nothing_of_an_engine(model, monkeypatch):
    freed = []
    monkeypatch.setattr("llama_cpp.llama_free", freed.append)
    assert in_a_fork(model.target.close, lambda: freed) == ["None", "[]"]
    monkeypatch.undo()


def test_folders_of_this_process_stay_when_a_fork_ends(monkeypatch):
    monkeypatch.setattr(files, "_user_folder", lambda kind: None)
    files._of_this_process.cache_clear()
    files.cache_folder().mkdir()
    assert in_a_fork(lambda: files._of_this_process.cache_clear()) == ["None"]
    assert files.cache_folder().is_dir()


def test_a_fork_cannot_use_several_targets():
    sampling = SamplingParams()
    with targets(SlowSpec(model=1), threads(2), Recorded([], 1.0)) as made:
        first = write_dsi(made, sampling)[0]
        told = in_a_fork(lambda: write_dsi(made, sampling), made.close, lambda: write_dsi(made, sampling))
        assert [one.startswith(line()) for one in told] == [True, False, True]
        assert write_dsi(made, sampling)[0] == first


def test_a_fork_does_not_wait_for_a_call_of_a_tool_that_its_parent_makes():
    begun, end = threading.Event(), threading.Event()

    def run(name, arguments):
        begun.set()
        return end.wait(SECONDS)

    cache = ToolCache(run, safe={"f"})
    cache.propose("f", "{}")
    begun.wait()
    told = in_a_fork(lambda: cache.call("f", "{}"), lambda: cache.propose("g", "{}"))
    end.set()
    assert [one.startswith(line("ToolCache")) for one in told] == [True, True]
    assert cache.call("f", "{}") is True
    cache.close()


def test_a_server_loaded_before_a_fork_answers_with_one_line():
    client_of = pytest.importorskip("starlette.testclient").TestClient
    from edgespec.server.app import make_app
    from edgespec.server.service import Service

    with Model(ReferenceBackend(random_model(2, vocab_size=258)), SssdPlanner()) as model:
        app, body = make_app(Service(model, "tiny")), {"prompt": "hello", "max_tokens": 2, "seed": 1}
        client = client_of(app, base_url="http://127.0.0.1")
        model.scheduler.start()

        def ask():
            answer = client.post("/v1/completions", json=body)
            return answer.status_code, answer.json().get("error", {}).get("message", "")[:40]

        assert ask() == (200, "")
        told = in_a_fork(ask, lambda: client.get("/health").status_code, lambda: client_of(app).__enter__())
        assert told[:2] == [str((500, f"process {os.getpid()} made this model, and its fork"[:40])), "200"]
        assert told[2].startswith(line())
        assert ask() == (200, "")


def test_a_fork_loads_a_model_of_its_own_after_its_parent_has_used_one(tmp_path):
    path = str(small_llama(tmp_path / "tiny.gguf", layers=1))

    def load():
        return edgespec.load(path, context_length=256, planner="none", exact="off", threads=2)

    def text(model):
        return model.generate("hello", max_tokens=8).text

    with load() as model:
        found = text(model)
        assert in_a_fork(lambda: text(load())) == [repr(found)]
        assert text(model) == found
