"""Many clients at once, and the checks that look for what leaks: they must see what is wrong, too."""

import threading

import pytest
from reference.backend import ReferenceBackend, random_model

pytest.importorskip("uvicorn", reason="the server is not installed: pip install 'edgespec[server]'")
pytest.importorskip("llguidance", reason="needs llguidance: pip install 'edgespec[server]'")

from benchmarks.serving import served
from benchmarks.stress import KINDS, half_open, is_pet, left_over, load
from edgespec.loop.sampling import SamplingParams
from edgespec.model import Model
from edgespec.planners.sssd import SssdPlanner
from edgespec.scheduler.requests import Request


@pytest.fixture(scope="module")
def server():
    target = ReferenceBackend(random_model(1, vocab_size=258), sessions=3, context_length=500)
    target.model.unembedding[1] = 0
    with Model(target, [SssdPlanner() for _ in range(3)], budget=2) as model, served(model) as port:
        yield model, port


def test_clients_of_all_kinds(server):
    model, port = server
    threads, idle = threading.active_count(), half_open(port, 3)
    found = load(port, 6, 6, 4)
    assert found.wrong == []
    for kind in KINDS:
        assert found.answers[f"{kind} 200"] == (0 if kind == "leaves" else 6)
    assert left_over(model, threads) == []
    for sock in idle:
        sock.close()
    assert model.target.open_sessions == 3
    held = model.scheduler.submit(Request([5, 6], SamplingParams(), 400), lambda event: None)
    assert left_over(model, threads, patience=0.0) != []
    held.cancel()
    assert left_over(model, threads) == []


def test_json_by_a_schema_is_never_broken(server, monkeypatch):
    found = load(server[1], 2, 2, 250, ("schema",))
    assert found.wrong == []
    assert found.parsed > 0
    monkeypatch.setattr("benchmarks.stress.is_pet", lambda text: False)
    found = load(server[1], 1, 1, 250, ("schema",))
    assert (found.parsed, len(found.wrong)) == (0, 1)


@pytest.mark.parametrize("text", ['{"name":"x"}', '["name"]', '{"name":"x","age":200,"kind":"cat","tags":[]}', "{"])
def test_broken_json_is_seen(text):
    assert is_pet('{"name":"x","age":20,"kind":"cat","tags":["a"]}')
    assert not is_pet(text)
