"""Clients of all kinds at once: they stream, leave, read slowly, want JSON or two choices. Nothing leaks or hangs."""

import json
import random
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
from reference.backend import ReferenceBackend, random_model

pytest.importorskip("uvicorn", reason="the server is not installed: pip install 'edgespec[server]'")
pytest.importorskip("llguidance", reason="needs llguidance: pip install 'edgespec[server]'")

from benchmarks.serving import JSON, closing_connection, served
from edgespec.model import Model
from edgespec.planners.sssd import SssdPlanner

KINDS = ("whole", "stream", "schema", "two choices", "leaves", "reads slowly")
AGE, NAME = {"type": "integer", "minimum": 0, "maximum": 120}, {"type": "string", "maxLength": 8}
PET = {
    "type": "object", "properties": {"name": NAME, "age": AGE, "kind": {"enum": ["cat", "dog"]}},
    "required": ["name", "age", "kind"], "additionalProperties": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def server():
    target = ReferenceBackend(random_model(1, vocab_size=258), sessions=3, context_length=500)
    target.model.unembedding[1] = 0
    with Model(target, [SssdPlanner() for _ in range(3)], budget=2) as model, served(model) as port:
        yield model, port


def asked(port, kind, seed, max_tokens):
    """The status and body of an answer; None: the client has left."""
    body = {"messages": [{"role": "user", "content": f"Tell me of number {seed % 7}."}], "seed": seed}
    body |= {"max_tokens": max_tokens, "temperature": 0.8, "stream": kind in ("stream", "leaves", "reads slowly")}
    if kind == "schema":
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "x", "schema": PET}}
    if kind == "two choices":
        body["n"] = 2
    with closing_connection(port) as connection:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), JSON)
        if kind == "leaves":
            time.sleep(random.Random(seed).random() * 0.2)
            return None
        answer = connection.getresponse()
        if kind == "reads slowly":
            time.sleep(0.5)
        return answer.status, answer.read()


def test_clients_of_all_kinds_get_whole_answers_and_leave_nothing(server):
    model, port = server
    threads = threading.active_count()
    with ExitStack() as open_sockets:
        for _ in range(3):
            half = open_sockets.enter_context(socket.create_connection(("127.0.0.1", port)))
            half.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Le")
        with ThreadPoolExecutor(6) as pool:
            found = list(pool.map(lambda seed: asked(port, KINDS[seed % 6], seed, 4), range(36)))
        for seed, answer in enumerate(found):
            if KINDS[seed % 6] == "leaves":
                continue
            status, data = answer
            assert status == 200
            if KINDS[seed % 6] in ("stream", "reads slowly"):
                assert data.endswith(b"data: [DONE]\n\n")
            else:
                told = json.loads(data)
                assert len(told["choices"]) == (2 if KINDS[seed % 6] == "two choices" else 1)
                assert told["usage"]["completion_tokens"]
        until = time.monotonic() + 30
        while model.scheduler.active or model.scheduler.waiting:
            assert time.monotonic() < until, "a request hangs"
            time.sleep(0.05)
        assert threading.active_count() <= threads + 12  # workers of asyncio are allowed
        assert model.target.open_sessions == 3


def test_json_by_a_schema_is_never_broken(server):
    whole = 0
    for seed in range(4):
        _, data = asked(server[1], "schema", seed, 250)
        [choice] = json.loads(data)["choices"]
        if choice["finish_reason"] != "length":
            pet, whole = json.loads(choice["message"]["content"]), whole + 1
            assert pet.keys() == {"name", "age", "kind"}
            assert 0 <= pet["age"] <= 120
            assert len(pet["name"]) <= 8
            assert pet["kind"] in ("cat", "dog")
    assert whole
