"""Servers as processes: started, asked by the same requests, and ended."""

import re
import sys
from dataclasses import replace
from threading import Barrier

import pytest
from reference.backend import ReferenceBackend, random_model

pytest.importorskip("uvicorn", reason="the server is not installed: pip install 'edgespec[server]'")

from benchmarks import compare_servers, llama_server
from benchmarks.compare_servers import Load, Result, Servers
from benchmarks.serving import Streamed, served
from edgespec.errors import EdgespecError, UsageError
from edgespec.model import Model
from edgespec.planners.sssd import SssdPlanner

THREE = {0: "one", 1: "two", 2: "three"}
BODY = {"max_tokens": 6, "temperature": 0.7}
# Answers /health with 503 once, as while it loads; every chat request with two words of three tokens.
PROGRAM = """
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
asked = []
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        asked.append(1)
        self.send_response(503 if len(asked) < 2 else 200); self.end_headers()
    def do_POST(self):
        self.send_response(200); self.end_headers()
        for data in ({"choices": [{"delta": {"content": "a b"}}]}, {"choices": [], "usage": {"completion_tokens": 3}}):
            self.wfile.write(f"data: {json.dumps(data)}\\n\\n".encode())
    def log_message(self, *_): pass
arguments = dict(zip(sys.argv[1::2], sys.argv[2::2]))
HTTPServer((arguments["--host"], int(arguments["--port"])), Handler).serve_forever()
"""


def test_a_server_is_waited_for_asked_and_ended():
    result = Result()
    with llama_server.started([sys.executable, "-c", PROGRAM]) as port:
        compare_servers.ask(port, THREE, Load(2), result, BODY)
    assert result.tokens == 9
    assert [answer.text for answer in result.answers.values()] == ["a b"] * 3
    assert all(answer.seconds >= answer.first > 0 for answer in result.answers.values())
    assert result.speed > 0
    with pytest.raises(EdgespecError, match="refused"):
        compare_servers.ask(port, {0: "one"}, Load(1), result, BODY)


def test_an_answer_of_another_kind_is_one_line():
    program = PROGRAM.replace('{"choices": []', '{"chosen": []')
    with llama_server.started([sys.executable, "-c", program]) as port, pytest.raises(EdgespecError) as caught:
        compare_servers.ask(port, {0: "one"}, Load(1), Result(), BODY)
    assert re.fullmatch(r'.* answers with what is no part of a chat: data: {"chosen": \[\], .*', str(caught.value))


def test_a_server_that_ends_or_is_not_there():
    with (
        pytest.raises(EdgespecError, match="does not answer: no such model"),
        llama_server.started([sys.executable, "-c", "import sys; print(1, flush=True); sys.exit('no such model')"]),
    ):
        pass
    with pytest.raises(UsageError, match="cannot be started: No such file"), llama_server.started(["/nowhere/server"]):
        pass


def test_our_own_answers_are_counted():
    target = ReferenceBackend(random_model(1, vocab_size=258), sessions=2, context_length=300)
    target.model.unembedding[1] = 0  # texts seldom end early
    with Model(target, [SssdPlanner() for _ in range(2)], budget=8) as model, served(model) as port:
        result = Result()
        compare_servers.ask(port, THREE, Load(2), result, BODY)
        assert result.tokens == 18
        with pytest.raises(EdgespecError, match="status 400"):
            compare_servers.ask(port, {0: "long " * 200}, Load(1), result, BODY)


def test_servers_take_turns_and_what_fails_is_said(monkeypatch):
    def commands(self, parallel):
        return {
            compare_servers.OURS: [sys.executable, "-c", PROGRAM],
            "llama-server, plain": [sys.executable, "-c", PROGRAM],
            "llama-server, draft": [sys.executable, "-c", "import sys; sys.exit('out of luck')"],
        }

    monkeypatch.setattr(Servers, "commands", commands)
    said = []
    found = compare_servers.compare(
        Servers("llama-server", "m.gguf"), ["a", "b", "c"], [Load(1), Load(2, 50.0)],
        rounds=2, body=BODY, say=said.append,
    )  # fmt: skip
    assert {key: result.tokens for key, result in found.items() if not result.failed} == {
        (name, load): 9 for name in (compare_servers.OURS, "llama-server, plain") for load in (Load(1), Load(2, 50.0))
    }
    assert "out of luck" in found["llama-server, draft", Load(1)].failed
    assert [line for line in said if not line.startswith(" ")] == [
        f"{load}, {name}, part {number} of 2"
        for number in (1, 2)
        for load in ("1 at once", "2 at once, 50/s")
        for name in commands(None, 0)
    ]
    shown = compare_servers.shown(found)
    assert shown.count("against the best mode of llama-server") == 2
    assert shown.count("failed: ") == 2
    assert re.search(r"2 at once, 50/s .* edgespec .*( \d+\.\d\d, \d+\.\d\d .*){3}", shown)
    assert "3 of 3 answers of edgespec are always the same" in shown
    found[compare_servers.OURS, Load(1)].answers[1] = replace(found[compare_servers.OURS, Load(1)].answers[1], text="c")
    assert "2 of 3 answers of edgespec are always the same" in compare_servers.shown(found)


def test_requests_come_at_their_rate_whatever_is_answered(monkeypatch):
    slept, all_ask = [], Barrier(3, timeout=60)

    def answered(port, body):
        all_ask.wait()  # three requests are open though the server has one sequence
        return Streamed(str(body["seed"]), 2, 0.5, 1.0)

    monkeypatch.setattr(compare_servers, "stream_chat", answered)
    monkeypatch.setattr(compare_servers, "sleep", slept.append)
    monkeypatch.setattr(compare_servers, "perf_counter", lambda: 100.0)
    times = {}
    for rate in (1.0, 4.0):
        for _ in range(2):
            slept.clear()
            result = Result()
            compare_servers.ask(0, THREE, Load(1, rate), result, BODY)
            assert {number: answer.text for number, answer in result.answers.items()} == {0: "0", 1: "1", 2: "2"}
            assert times.setdefault(rate, sorted(slept)) == sorted(slept), "the same times again"
    assert times[1.0] == pytest.approx([4 * time for time in times[4.0]])
    assert 0 < times[1.0][0] < times[1.0][1] < times[1.0][2]


def test_each_text_of_options_is_a_server_of_its_own():
    found = Servers(None, "m.gguf", options=["", "--planner none", "--budget 8"]).commands(4)
    assert list(found) == ["edgespec", "edgespec --planner none", "edgespec --budget 8"]
    assert found["edgespec"][-2:] == ["--parallel=4", "--ctx=4096"]
    assert found["edgespec --budget 8"][-3:] == ["--ctx=4096", "--budget", "8"]


def test_both_have_the_same_model_room_and_threads():
    servers = Servers("llama-server", "big.gguf", "small.gguf", threads=3, context_length=1000, limit=1 << 30)
    found = servers.commands(4)
    assert set(found) == {compare_servers.OURS, *(f"llama-server, {mode}" for mode in llama_server.modes("small.gguf"))}
    ours = " ".join(found[compare_servers.OURS])
    assert ours.endswith("serve big.gguf --parallel=4 --ctx=1000 --draft=small.gguf --threads=3 --memory=1073741824")
    draft = " ".join(found["llama-server, draft"])
    for part in ("-m big.gguf", "-np 4", "-c 4000", "-t 3", "-md small.gguf", "--spec-draft-n-max 16"):
        assert part in draft
    assert "-md" not in found["llama-server, plain"]
    assert set(Servers("llama-server", "big.gguf", modes=["plain"]).commands(1)) == {
        compare_servers.OURS,
        "llama-server, plain",
    }


def test_the_command_asks_each_load_of_each_server(bench, monkeypatch, tmp_path):
    prompts, model = tmp_path / "prompts.jsonl", tmp_path / "m.gguf"
    prompts.write_text('{"prompt": "one"}\n{"prompt": "two"}\n')
    model.touch()
    asked = []
    monkeypatch.setattr(compare_servers, "compare", lambda *given, **more: asked.append(given) or {})
    options = "--options", "--planner none", "--options", "--budget 8"
    bench("serve", "throughput", prompts, "--model", model, *options, "--at-once", 4, "--rate", 0.5, "--rate", 2)
    ((servers, texts, loads),) = asked
    assert texts == ["one", "two"]
    assert loads == [Load(4, 0.5), Load(4, 2.0)]
    assert list(servers.commands(4)) == ["edgespec --planner none", "edgespec --budget 8"]
