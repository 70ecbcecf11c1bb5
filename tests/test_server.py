"""The server's dialects, errors and locks, on a small model in numpy."""

import asyncio
import json
import re
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from hashlib import sha256
from importlib import import_module
from threading import Event, Semaphore
from typing import ClassVar

import pytest
from reference.backend import CHAT_TEMPLATE, ReferenceBackend, random_model

pytest.importorskip("starlette", reason="the server is not installed: pip install 'edgespec[server]'")
pytest.importorskip("httpx", reason="httpx is not installed")

from starlette.requests import Request
from starlette.testclient import TestClient
from test_scheduler import held

from edgespec.errors import ContextFull, UsageError, shown
from edgespec.loop import grammar, sampling
from edgespec.loop.sampling import SamplingParams
from edgespec.loop.tree import Source
from edgespec.model import Model
from edgespec.planners.sssd import SssdPlanner
from edgespec.scheduler.requests import Request as Wanted
from edgespec.server import wire
from edgespec.server.access import Guard
from edgespec.server.app import STATIC, error_body, make_app
from edgespec.server.conversation import Question
from edgespec.server.dialects import responses
from edgespec.server.dialects.responses import ResponsesBody
from edgespec.server.errors import Refused, refusal
from edgespec.server.model_format import ModelFormat
from edgespec.server.service import LONG_BODY, Service
from edgespec.server.wire import FEW_VALUES, MOST_BODY, InSteps

HELLO = {"messages": [{"role": "user", "content": "hello"}]}


@contextmanager
def served(slots=2, service=(), sampling=None, context=400, template=None, layers=2, planner=SssdPlanner, **guard):
    target = ReferenceBackend(random_model(2, vocab_size=258, layers=layers), sessions=slots, context_length=context)
    target.model.unembedding[1] = 0  # texts seldom end early
    target.vocab.chat_template = template or target.vocab.chat_template
    with Model(target, [planner() for _ in range(slots)], budget=2, sampling=sampling) as model:
        app = make_app(Service(model, "tiny", **dict(service)), **guard)
        with TestClient(app, base_url="http://127.0.0.1:8080", raise_server_exceptions=False) as client:
            client.model = model
            yield client


@contextmanager
def served_and_shown(**options):
    """As `served`; `client.shown` has all that is tokenised, such as prompts, in the order of the requests."""
    with served(**options) as client:
        vocab = client.model.target.vocab
        client.shown, usual = [], vocab.encode

        def encode(text, **more):
            client.shown.append(text)
            return usual(text, **more)

        vocab.encode = encode
        yield client


def prompt(client, path, body):
    """The prompt of a request to what `served_and_shown` has."""
    client.shown.clear()
    answer = client.post(f"/v1/{path}", json={"max_tokens": 2, "max_output_tokens": 2, **body})
    assert answer.status_code == 200, answer.text
    return client.shown[-1]


def refused(client, path, body):
    """The one line of a refusal."""
    answer = client.post(f"/v1/{path}", json=body)
    assert answer.status_code == 400, answer.text
    assert "\n" not in answer.json()["error"]["message"]
    return answer.json()["error"]["message"]


def said(client, path, body):
    """The text of an answer in any dialect."""
    answer = client.post(f"/v1/{path}", json=body).json()
    if "choices" not in answer:
        return (answer.get("content") or answer["output"][0]["content"])[0]["text"]
    choice = answer["choices"][0]
    return choice["text"] if path == "completions" else choice["message"]["content"]


@pytest.fixture(scope="module")
def client():
    with served() as client:
        yield client


def slowed(model, seconds):
    """Each pass of the target takes so long at least."""
    forward = model.target.forward
    model.target.forward = lambda batch: time.sleep(seconds) or forward(batch)


@contextmanager
def blocked(monkeypatch, owner, name, when=lambda *given: True):
    """Calls of a function wait for the end of the block; yields a semaphore that counts them."""
    begun, go_on, inner = Semaphore(0), Event(), getattr(owner, name)

    def waits(*given):
        if when(*given):
            begun.release()
            assert go_on.wait(60)
        return inner(*given)

    monkeypatch.setattr(owner, name, waits)
    try:
        yield begun
    finally:
        go_on.set()


def alone(client, prompt, **options):
    """The text that the Python API writes."""
    return client.model.generate(prompt, **options).text


def stream(client, path, body):
    """The data of all events; comments left out."""
    with client.stream("POST", path, json={**body, "stream": True}) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in answer.iter_lines() if line.startswith("data: ")]
    return [line.removeprefix("data: ") for line in lines]


class TestChat:
    def test_an_answer(self, client):
        body = HELLO | {"max_tokens": 20, "temperature": 0.9, "seed": 3, "model": "gpt-4o", "stop": []}
        answer = client.post("/v1/chat/completions", json=body).json()
        (choice,) = answer["choices"]
        expected = client.model.chat("hello", max_tokens=20, temperature=0.9, seed=3)
        assert choice["message"] == {"role": "assistant", "content": expected.text, "refusal": None}
        assert choice["finish_reason"] == "length"
        assert answer["object"] == "chat.completion"
        assert answer["model"] == "gpt-4o"
        usage = answer["usage"]
        assert usage["completion_tokens"] == 20
        assert usage["prompt_tokens"] + 20 == usage["total_tokens"]
        details = usage["completion_tokens_details"]
        stats = answer["edgespec"]["stats"][0]
        assert details["accepted_prediction_tokens"] == 20 - stats["tokens_by_source"]["target"]
        assert details["accepted_prediction_tokens"] + details["rejected_prediction_tokens"] == stats["drafted"]

    def test_a_stream_is_the_whole(self, client):
        body = HELLO | {"max_tokens": 20, "temperature": 0.9, "seed": 4, "stream_options": {"include_usage": True}}
        whole = client.post("/v1/chat/completions", json=body).json()
        *chunks, done = stream(client, "/v1/chat/completions", body)
        assert done == "[DONE]"
        chunks = [json.loads(chunk) for chunk in chunks]
        assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
        assert len({chunk["id"] for chunk in chunks}) == 1
        assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks[:-1])
        assert text == whole["choices"][0]["message"]["content"]
        assert [c["choices"][0]["finish_reason"] for c in chunks[:-1]] == [None] * (len(chunks) - 2) + ["length"]
        assert chunks[-1]["choices"] == []
        assert chunks[-1]["usage"]["completion_tokens"] == 20
        assert chunks[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] > 0

    def test_a_seed_is_drawn_and_told(self, client):
        body = HELLO | {"max_tokens": 20, "temperature": 1.0}
        first = client.post("/v1/chat/completions", json=body).json()
        second = client.post("/v1/chat/completions", json=body | {"seed": -1}).json()
        seeds = [answer["edgespec"]["seed"] for answer in (first, second)]
        assert seeds[0] != seeds[1]
        assert min(seeds) >= 0
        assert max(seeds) < 2**32  # -1 is drawn, too
        again = client.post("/v1/chat/completions", json=body | {"seed": seeds[0]}).json()
        assert again["choices"] == first["choices"] != second["choices"]
        assert again["system_fingerprint"] == first["system_fingerprint"]

    def test_choices_have_the_seeds_that_follow(self, client):
        body = HELLO | {"max_tokens": 12, "seed": 2**64 - 1, "n": 3, "temperature": 1.0}
        answer = client.post("/v1/chat/completions", json=body).json()
        texts = [choice["message"]["content"] for choice in answer["choices"]]
        assert texts == [
            client.model.chat("hello", max_tokens=12, temperature=1.0, seed=seed).text for seed in (2**64 - 1, 0, 1)
        ]
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
        assert answer["usage"]["completion_tokens"] == 36
        parts = {0: "", 1: "", 2: ""}
        for chunk in stream(client, "/v1/chat/completions", body)[:-1]:
            (choice,) = json.loads(chunk)["choices"]
            parts[choice["index"]] += choice["delta"].get("content", "")
        assert list(parts.values()) == texts

    def test_a_prediction_is_guessed_from_and_counted(self, client):
        body = HELLO | {"max_tokens": 30, "temperature": 0.9, "seed": 3}
        without = client.post("/v1/chat/completions", json=body).json()
        text = without["choices"][0]["message"]["content"]
        for content in (text, [{"type": "text", "text": text[:20]}, {"type": "text", "text": text[20:]}]):
            more = {"prediction": {"type": "content", "content": content}}
            answer = client.post("/v1/chat/completions", json=body | more).json()
            assert answer["choices"] == without["choices"]
            details = answer["usage"]["completion_tokens_details"]
            assert (
                details["accepted_prediction_tokens"]
                == (answer["edgespec"]["stats"][0]["tokens_by_source"]["prediction"])
            )
            assert details["accepted_prediction_tokens"] > 0
            sent = len(client.model.target.vocab.encode(text, add_bos=False, parse_special=False))
            assert sum(details[f"{kind}_prediction_tokens"] for kind in ("accepted", "rejected")) == sent
        assert refused(client, "chat/completions", body | {"prediction": {"content": [{"type": "image_url"}]}})

    def test_log_probs(self, client):
        body = HELLO | {"max_tokens": 6, "seed": 1, "logprobs": True, "top_logprobs": 3}
        (choice,) = client.post("/v1/chat/completions", json=body).json()["choices"]
        told = choice["logprobs"]["content"]
        assert "".join(bytes(token["bytes"]).decode("utf-8", "replace") for token in told)
        assert len(told) == 6
        for token in told:
            values = [other["logprob"] for other in token["top_logprobs"]]
            assert len(values) == 3
            assert values == sorted(values, reverse=True)
            assert token["logprob"] <= values[0] <= 0
        streamed = [json.loads(chunk) for chunk in stream(client, "/v1/chat/completions", body)[:-1]]
        found = [c["choices"][0]["logprobs"] for c in streamed]
        assert [token for part in found if part for token in part["content"]] == told

    def test_stop_strings_bias_and_penalties(self, client):
        whole = alone(client, "to be or not", max_tokens=30, temperature=0.7, seed=2)
        body = {"prompt": "to be or not", "max_tokens": 30, "temperature": 0.7, "seed": 2, "stop": whole[7:9]}
        (choice,) = client.post("/v1/completions", json=body).json()["choices"]
        assert choice["text"] == whole[: whole.index(whole[7:9])]
        assert choice["finish_reason"] == "stop"
        token = client.model.target.vocab.encode("e", add_bos=False, parse_special=False)[0]
        body = HELLO | {"max_tokens": 5, "logit_bias": {str(token): 1000}, "temperature": 0}
        assert client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"] == "eeeee"
        body |= {"frequency_penalty": 2, "presence_penalty": -2, "logit_bias": {}, "repetition_penalty": 1.3}
        expected = client.model.chat(
            "hello", max_tokens=5, frequency_penalty=2, presence_penalty=-2, repetition_penalty=1.3
        )
        answer = client.post("/v1/chat/completions", json=body).json()
        assert answer["choices"][0]["message"]["content"] == expected.text

    def test_contents_of_parts_and_roles(self, client):
        parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
        messages = [{"role": "developer", "content": "be good"}, {"role": "user", "content": parts}]
        same = [{"role": "system", "content": "be good"}, {"role": "user", "content": "hello"}]
        answers = [
            client.post("/v1/chat/completions", json={"messages": m, "max_tokens": 8, "seed": 1}).json()
            for m in (messages, same)
        ]
        assert answers[0]["choices"] == answers[1]["choices"]

    def test_a_trace_shows_every_pass(self, client):
        body = HELLO | {"max_tokens": 20, "seed": 5, "edgespec": {"trace": "passes"}}
        chunks = [json.loads(chunk) for chunk in stream(client, "/v1/chat/completions", body)[:-1]]
        traces = [chunk["edgespec"] for chunk in chunks if "edgespec" in chunk]
        assert sum(len(trace["tokens"]) for trace in traces) == 20
        for trace in traces:
            tree = trace["pass"]
            assert len(tree["token_ids"]) == len(tree["parents"]) == len(tree["log_probs"]) == len(tree["sources"])
            assert tree["path"][0] == 0
            assert len(tree["path"]) == len(trace["tokens"])
        assert "edgespec" not in json.loads(stream(client, "/v1/chat/completions", HELLO | {"max_tokens": 3})[1])

    @pytest.mark.parametrize("sampling", [None, SamplingParams(temperature=0.5, top_p=0.9)])
    def test_without_sampling_an_answer_is_the_one_of_run(self, sampling):
        with served(sampling=sampling) as client:
            answer = client.post("/v1/chat/completions", json=HELLO | {"max_tokens": 15, "seed": 3}).json()
            expected = client.model.chat("hello", max_tokens=15, seed=3)
            assert answer["choices"][0]["message"]["content"] == expected.text

    def test_what_the_model_proposes_is_the_default(self):
        with served(sampling=SamplingParams(temperature=0.5, top_k=3)) as client:
            answer = client.post("/v1/chat/completions", json=HELLO | {"max_tokens": 15, "seed": 3}).json()
            expected = client.model.chat("hello", max_tokens=15, temperature=0.5, top_k=3, seed=3)
            assert answer["choices"][0]["message"]["content"] == expected.text


class TestCompletions:
    def test_prompts_of_all_kinds(self, client):
        ids = client.model.target.vocab.encode("to be", add_bos=True, parse_special=False)
        expected = alone(client, "to be", max_tokens=9, temperature=1.0, seed=1)
        for prompt in ("to be", ["to be"], ids, [ids]):
            body = {"prompt": prompt, "max_tokens": 9, "seed": 1, "temperature": 1.0}
            answer = client.post("/v1/completions", json=body).json()
            assert answer["choices"][0]["text"] == expected
            assert answer["object"] == "text_completion"
        body = {"prompt": ["to be", "or not"], "max_tokens": 9, "seed": 1, "n": 2, "logprobs": 2, "temperature": 1.0}
        answer = client.post("/v1/completions", json=body).json()
        assert [choice["text"] for choice in answer["choices"]] == [
            alone(client, prompt, max_tokens=9, temperature=1.0, seed=seed)
            for prompt in ("to be", "or not")
            for seed in (1, 2)
        ]
        assert len(answer["choices"][0]["logprobs"]["token_logprobs"]) == 9
        chunks = [
            json.loads(chunk) for chunk in stream(client, "/v1/completions", {"prompt": ids, "max_tokens": 9})[:-1]
        ]
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"


class TestMessages:
    BODY: ClassVar = HELLO | {"max_tokens": 20, "model": "claude", "temperature": 0.9}

    def test_an_answer_and_a_stream(self, client):
        system = [{"type": "text", "text": "x-anthropic-billing-header: cch=1"}, {"type": "text", "text": "be good"}]
        body = self.BODY | {"system": system, "seed": 3}
        answer = client.post("/v1/messages", json=body).json()
        messages = [{"role": "system", "content": "be good"}, *HELLO["messages"]]
        expected = client.model.chat(messages, max_tokens=20, temperature=0.9, seed=3)
        assert answer["content"] == [{"type": "text", "text": expected.text}]
        assert answer["stop_reason"] == "max_tokens"
        usage = answer["usage"]
        assert usage["output_tokens"] == 20
        assert usage["input_tokens"] + usage["cache_read_input_tokens"] == expected.stats.prompt_tokens
        events = [json.loads(data) for data in stream(client, "/v1/messages", body)]
        kinds = [event["type"] for event in events]
        assert kinds[:2] == ["message_start", "content_block_start"]
        assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
        text = "".join(event["delta"]["text"] for event in events if event["type"] == "content_block_delta")
        assert text == expected.text

    def test_stop_sequences_and_counts(self, client):
        text = client.post("/v1/messages", json=self.BODY | {"seed": 4}).json()["content"][0]["text"]
        answer = client.post("/v1/messages", json=self.BODY | {"seed": 4, "stop_sequences": ["@@", text[5:7]]}).json()
        assert answer["stop_reason"] == "stop_sequence"
        assert answer["stop_sequence"] == text[5:7]
        counted = client.post("/v1/messages/count_tokens", json=HELLO).json()["input_tokens"]
        assert counted == answer["usage"]["input_tokens"] + answer["usage"]["cache_read_input_tokens"]


class TestResponses:
    def test_an_answer_and_a_stream(self, client):
        body = {"input": "hello", "instructions": "be good", "max_output_tokens": 20, "temperature": 0.9, "seed": 3}
        answer = client.post("/v1/responses", json=body).json()
        messages = [{"role": "system", "content": "be good"}, *HELLO["messages"]]
        expected = client.model.chat(messages, max_tokens=20, temperature=0.9, seed=3)
        assert answer["output"][0]["content"][0]["text"] == expected.text
        assert answer["status"] == "incomplete"
        assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
        assert answer["usage"]["output_tokens"] == 20
        item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hello"}]}
        events = [json.loads(data) for data in stream(client, "/v1/responses", body | {"input": [item]})]
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert events[0]["type"] == "response.created"
        assert events[-1]["type"] == "response.incomplete"
        assert events[-1]["response"]["output"][0]["content"][0]["text"] == expected.text
        text = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
        assert text == expected.text

    def test_what_answers_repeat_is_written_once(self, client, monkeypatch):
        seen = []
        monkeypatch.setattr(responses, "json_text", lambda *given: seen.append(given) or grammar.json_text(*given))
        tools = [{"type": "function", "name": "f", "note": "x\u2028é"}]
        body = {"input": "hello", "max_output_tokens": 3, "tools": tools, "instructions": "be", "metadata": {"a": "b"}}
        body |= {"tool_choice": "none", "store": False}
        events = list(map(json.loads, stream(client, "/v1/responses", body)))
        answers = [event["response"] for event in events if "response" in event]
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert len(answers) == 3
        assert len(seen) == 1
        for answer in (*answers, client.post("/v1/responses", json=body).json()):
            assert (answer["tools"], answer["instructions"], answer["metadata"]) == (tools, "be", {"a": "b"})
            assert (answer["tool_choice"], answer["text"]) == ("none", {"format": {"type": "text"}})

    def test_each_call_and_text_of_a_conversation_is_copied_once(self, monkeypatch):
        many, copied = 300, []

        def counted(turn, **changes):
            copied.extend(len(value) for value in changes.values())
            return replace(turn, **changes)

        monkeypatch.setattr(responses, "replace", counted)
        call, text = {"type": "function_call", "name": "f", "call_id": "1"}, {"role": "assistant", "content": "a"}
        (turn,) = responses.turns_of(ResponsesBody(input=[call, text] * many))
        assert (len(turn.calls), turn.text) == (many, "a" * many)
        assert sum(copied) <= many


class TestContinued:
    """The assistant's last message begins the answer."""

    BEGUN: ClassVar = [*HELLO["messages"], {"role": "assistant", "content": "hello you"}]
    GREEDY: ClassVar = {"temperature": 0, "max_tokens": 30}

    @pytest.mark.parametrize("plain", [False, True])
    def test_the_answer_is_what_the_model_writes_behind_it(self, client, plain):
        raw = "<s>user\nhello</s>\n<s>assistant\nhello you"
        raw = client.model.target.vocab.encode(raw, add_bos=False, parse_special=True)
        completion = self.GREEDY | {"prompt": raw, "edgespec": {"plain": True}}
        expected = said(client, "completions", completion)
        messages = self.GREEDY | {"messages": self.BEGUN}
        body = messages | {"edgespec": {"plain": plain}}
        chat = client.post("/v1/chat/completions", json=body).json()
        assert chat["choices"][0]["message"]["content"] == expected
        assert chat["usage"]["prompt_tokens"] == len(raw)
        stats = chat["edgespec"]["stats"][0]
        assert (stats["drafted"] > 0) == (not plain)
        assert client.model.chat(self.BEGUN, **self.GREEDY).text == expected
        *chunks, _ = stream(client, "/v1/chat/completions", body)
        deltas = [json.loads(chunk)["choices"][0]["delta"] for chunk in chunks]
        assert "".join(delta.get("content", "") for delta in deltas) == expected
        assert said(client, "messages", messages) == expected
        events = [json.loads(data) for data in stream(client, "/v1/messages", messages)]
        assert "".join(e["delta"].get("text", "") for e in events if "delta" in e) == expected
        responses = {"input": self.BEGUN, "temperature": 0, "max_output_tokens": 30}
        assert said(client, "responses", responses) == expected


class TestSchemas:
    SCHEMA: ClassVar = {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "London"]}, "n": {"type": "integer"}},
        "required": ["city", "n"],
        "additionalProperties": False,
    }

    def test_json_by_a_schema(self, client):
        pytest.importorskip("llguidance", reason="needs llguidance: pip install 'edgespec[server]'")
        form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": self.SCHEMA}}
        for seed in range(4):
            body = HELLO | {"max_tokens": 200, "seed": seed, "response_format": form}
            answer = client.post("/v1/chat/completions", json=body).json()
            text = answer["choices"][0]["message"]["content"]
            assert set(json.loads(text)) == {"city", "n"}
            assert answer["choices"][0]["finish_reason"] == "stop"
            sources = answer["edgespec"]["stats"][0]["tokens_by_source"]
            assert sources["grammar"] > 10
            plain = client.post("/v1/chat/completions", json=body | {"edgespec": {"plain": True}}).json()
            assert plain["choices"] == answer["choices"]
            assert plain["edgespec"]["stats"][0]["drafted"] == 0

    def test_other_forms(self, client):
        pytest.importorskip("llguidance", reason="needs llguidance: pip install 'edgespec[server]'")
        form = {"name": "a", "schema": self.SCHEMA}
        for kind in ("json_schema", "json_object"):  # llama.cpp takes a schema with both
            for path, more in (
                ("responses", {"input": "hello", "text": {"format": form | {"type": kind}}}),
                ("chat/completions", HELLO | {"response_format": form | {"type": kind}}),
                ("completions", {"prompt": "a", "response_format": form | {"type": kind}}),
            ):
                text = said(client, path, more | {"max_tokens": 200, "max_output_tokens": 200})
                assert set(json.loads(text)) == {"city", "n"}


class TestErrors:
    @pytest.mark.parametrize("long", ["a" * 600, "a" * 9000], ids=["counted", "not tokenized"])
    def test_agents_are_told_that_the_context_is_full(self, client, long):
        """In the words by which Claude Code, opencode, Zed, LiteLLM and others know that they must shorten it."""
        body = {"messages": [{"role": "user", "content": long}], "prompt": long, "input": long, "max_tokens": 9}
        paths = ("chat/completions", "completions", "responses", "messages", "messages/count_tokens")
        for path in paths if len(long) > 600 else paths[:-1]:
            for more in {}, {"stream": True}:
                if path == "responses" and more:
                    continue
                answer = client.post(f"/v1/{path}", json=body | more)
                assert answer.status_code == 400
                error = answer.json()["error"]
                assert error.get("code", "context_length_exceeded") == "context_length_exceeded"
                assert "; this model's maximum context length is 400 tokens, " in error["message"]
                assert error["message"].startswith("prompt is too long: ")
                counted = re.match(r"prompt is too long: (\d+) tokens > 399 maximum;", error["message"])
                assert (int(counted[1]) >= 600) if len(long) == 600 else not counted

    def test_agents_are_told_so_where_other_requests_leave_no_cells(self):
        refused = refusal(ContextFull("the cache of 9 cells is full"))
        assert (refused.status, refused.code) == (400, "context_length_exceeded")
        assert refused.message == "prompt is too long for the room that is left: the cache of 9 cells is full"

    def test_codex_is_told_in_the_stream_that_the_context_is_full(self, client):
        """It takes a status 400 for a mistake of its own, and reads no event `error`."""
        *begun, error, failed = map(json.loads, stream(client, "/v1/responses", {"input": "a" * 600}))
        assert [event["type"] for event in begun] == ["response.created", "response.in_progress"]
        assert [event["sequence_number"] for event in (*begun, error, failed)] == [0, 1, 2, 3]
        assert (error["type"], failed["type"]) == ("error", "response.failed")
        assert error["error"]["message"].startswith("prompt is too long: 6")
        assert failed["response"]["id"] == begun[0]["response"]["id"]
        assert failed["response"]["error"] == {"code": "context_length_exceeded", "message": error["error"]["message"]}

    @pytest.mark.parametrize("streamed", [False, True])
    def test_an_answer_that_the_context_ends_does_not_blame_max_tokens(self, client, streamed):
        def reason(most):
            body = {"messages": [{"role": "user", "content": "a" * 300}], "max_tokens": most, "stream": streamed}
            if streamed:
                return json.loads(stream(client, "/v1/messages", body)[-2])["delta"]["stop_reason"]
            return client.post("/v1/messages", json=body).json()["stop_reason"]

        assert reason(4000) == "model_context_window_exceeded"
        assert reason(4) == "max_tokens"

    def test_many_values_are_read_as_few_are(self, client, monkeypatch):
        """In steps between which other threads run: C code would stop all answers meanwhile."""
        used, inner = [], InSteps.__init__
        monkeypatch.setattr(InSteps, "__init__", lambda self, **more: used.append(1) or inner(self, **more))
        body = HELLO | {"max_tokens": 4, "seed": 3, "nothing": [[1.5, {"a": "\u00e9\n"}]] * (FEW_VALUES // 4)}
        few, many = (
            client.post("/v1/chat/completions", json=one) for one in (HELLO | {"max_tokens": 4, "seed": 3}, body)
        )
        assert used == [1]
        assert many.json()["choices"] == few.json()["choices"]
        text = json.dumps(body)
        assert json.loads(text, cls=InSteps) == body
        answer = client.post("/v1/chat/completions", content=text[:-1], headers={"content-type": "application/json"})
        assert (answer.status_code, "is not JSON" in answer.text) == (400, True)

    def test_limits_and_paths(self, client):
        def pieces():
            for _ in range(MOST_BODY // 2**20 + 1):
                yield b" " * 2**20

        answer = client.post("/v1/chat/completions", content=pieces(), headers={"content-type": "application/json"})
        assert answer.status_code == 413
        assert client.get("/v1/nothing").status_code == 404
        assert client.get("/v1/nothing").json()["error"]["type"] == "invalid_request_error"
        assert client.get("/v1/chat/completions").status_code == 405

    @pytest.mark.parametrize(
        ("path", "body"),
        [
            ("chat/completions", {"messages": [5] * 99}),
            ("chat/completions", HELLO | {"stop": [5] * 99}),
            ("completions", {"prompt": [1.5] * 99}),
            ("messages", HELLO | {"max_tokens": 3, "system": [5] * 99}),
            ("messages", HELLO | {"max_tokens": 3, "stop_sequences": [5] * 99}),
            ("responses", {"input": [5] * 99}),
            ("responses", {"input": "a", "tools": [5] * 99}),
        ],
    )
    def test_of_many_mistakes_the_first_alone_is_looked_for(self, client, path, body, monkeypatch):
        counts, tell = [], wire.first_mistake
        monkeypatch.setattr(wire, "first_mistake", lambda *one: counts.append(one[0].error_count()) or tell(*one))
        assert client.post(f"/v1/{path}", json=body).status_code == 400
        assert counts[0] <= 4  # of each type that the field may have

    def test_a_message_looks_at_the_beginning_of_a_large_value_alone(self):
        seen = []

        class Part:
            def __repr__(self):
                seen.append(self)
                return "1"

        assert shown([{"a": [Part()] * 10**5}] * 10**5).startswith("[{'a': [1, 1, 1")
        assert len(seen) <= 81**2
        assert shown({"a": (1, "x" * 10**6)}) == "{'a': (1, '" + "x" * 69 + "…"

    def test_choices_do_not_check_the_bias_of_each_token_again(self, client, monkeypatch):
        seen, inner = [], sampling.check_number
        monkeypatch.setattr(sampling, "check_number", lambda name, *given: seen.append(name) or inner(name, *given))
        body = {"prompt": ["a", "b"], "n": 3, "max_tokens": 3, "logit_bias": {"77": 1}, "edgespec": {"plain": True}}
        assert client.post("/v1/completions", json=body).status_code == 200
        assert seen.count("logit_bias of 77") == 1

    def test_a_body_that_does_not_come(self, monkeypatch):
        monkeypatch.setattr(wire, "BODY_SECONDS", 0.05)

        async def never():
            await asyncio.sleep(60)

        head = [(b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": "/", "headers": head}
        with pytest.raises(Refused, match="did not come") as raised:
            asyncio.run(wire.read_body(Request(scope, never)))
        assert raised.value.status == 408

    def test_a_body_that_is_cut_off_by_the_servers_end_gets_an_answer(self):
        half = {"type": "http.request", "body": b'{"pro', "more_body": True}
        with served() as client:
            head, body = cut_off(client.app, "/v1/completions", half)
            assert 'path="/v1/completions",status="503"} 1' in client.get("/metrics").text
        assert head["status"] == 503
        assert b"the server is stopping" in body["body"]

    def test_a_client_that_leaves_while_it_sends_is_not_an_error_of_the_server(self):
        parts = {"type": "http.request", "body": b'{"pro', "more_body": True}, {"type": "http.disconnect"}
        with served() as client:
            cut_off(client.app, "/v1/completions", *parts, begun=True)
            assert 'path="/v1/completions",status="499"} 1' in client.get("/metrics").text

    def test_too_many_at_once(self):
        with served(slots=1, service={"most_waiting": 1}) as client:
            with held(client.model.scheduler):
                waits = client.model.scheduler.submit(Wanted([1, 2], SamplingParams(), 3), lambda event: None)
                answer = client.post("/v1/completions", json={"prompt": "a", "n": 2})
                assert answer.status_code == 429
                assert answer.headers["retry-after"]
                waits.cancel()
                assert client.model.scheduler.waiting == 0  # its place is free before a pass ends
            assert client.post("/v1/completions", json={"prompt": "a", "n": 2}).status_code == 200

    def test_a_hundred_streams_at_once_are_not_more_than_the_limit(self):
        async def ask(service):
            question = Question({}, prompts=["a"], max_tokens=3)
            return await asyncio.gather(*(service.start(question, "") for _ in range(100)), return_exceptions=True)

        with served(slots=2, service={"most_waiting": 4}) as client:
            scheduler = client.model.scheduler
            with held(scheduler):
                found = asyncio.run(ask(Service(client.model, "tiny", most_waiting=4)))
                admitted = [one for one in found if not isinstance(one, Refused)]
                assert len(admitted) == 6
                assert all(one.status == 429 for one in found if isinstance(one, Refused))
                for one in admitted:
                    one.cancel()
                assert scheduler.waiting + scheduler.active == 0

    def test_more_than_ever_fit_need_not_come_again(self):
        with served(slots=1, service={"most_waiting": 1}) as client:
            assert "at most 2" in refused(client, "completions", {"prompt": ["a", "b", "c"]})

    def test_a_server_that_stops_refuses(self):
        with served(service={"stopping": True}) as client:
            answer = client.post("/v1/chat/completions", json=HELLO)
            assert answer.status_code == 503
            assert client.get("/health").json()["status"] == "stopping"

    def test_an_error_in_the_middle_is_the_last_event(self):
        with served() as client:
            forward, passes = client.model.target.forward, []

            def failing(batch):
                passes.append(1)
                if len(passes) > 3:
                    raise RuntimeError("secret")
                return forward(batch)

            client.model.target.forward = failing
            *_, last = stream(client, "/v1/chat/completions", HELLO | {"max_tokens": 50})
            assert json.loads(last)["error"]["message"] == "an error in the server: RuntimeError"
            assert client.post("/v1/chat/completions", json=HELLO).status_code == 500
            events = stream(client, "/v1/messages", HELLO | {"max_tokens": 50})
            assert json.loads(events[-1])["type"] == "error"
            events = [json.loads(data) for data in stream(client, "/v1/responses", {"input": "hello"})]
            says = {"code": None, "message": "an error in the server: RuntimeError", "param": None}
            *_, told, failed = events
            error = told.pop("error")  # openai-python raises what it finds there
            assert error.pop("type") == "api_error"
            assert error == says
            assert told == {"type": "error", "sequence_number": len(events) - 2, **says}
            assert failed["type"] == "response.failed"  # that Codex shows
            assert failed["response"]["error"] == {"code": "server_error", "message": says["message"]}


class TestGuard:
    @pytest.mark.parametrize(
        ("headers", "status"),
        [
            ({}, 200),
            ({"host": "localhost"}, 200),
            ({"host": "LOCALHOST.:99"}, 200),
            ({"host": "[::1]:8080"}, 200),
            ({"host": "192.168.1.5"}, 200),
            ({"host": "[::FFFF:7f00:1]"}, 200),
            ({"host": "[fe80::1%25eth0]:8080"}, 200),
            ({"host": "0.0.0.0:8080"}, 200),  # what a browser asked no name server for
            ({"host": "127.1"}, 403),
            ({"host": "Box.LAN.:8080"}, 200),
            ({"host": "a.localhost"}, 403),  # Safari asks the network's name server
            ({"host": "host.docker.internal:8080"}, 403),
            ({"host": "host.containers.internal"}, 403),
            ({"host": "box.local"}, 403),
            ({"host": "a.box.lan"}, 403),
            ({"host": "evil.example"}, 403),
            ({"host": ""}, 403),
            ({"host": ":8080"}, 403),
            ({"host": "localhost@evil.example"}, 403),
            ({"host": "localhost.evil.example"}, 403),
            ({"host": "localhost:port"}, 403),
            ({"origin": "http://127.0.0.1:8080"}, 200),
            ({"origin": "https://chat.example"}, 200),
            ({"origin": "http://127.0.0.1:9"}, 403),
            ({"origin": "null"}, 403),
            ({"origin": ""}, 403),
            ({"origin": "http://evil.example"}, 403),
            ({"host": "evil.example", "origin": "http://evil.example"}, 403),  # its name server says 127.0.0.1
            ({"sec-fetch-site": "cross-site"}, 403),
            ({"sec-fetch-site": "same-origin"}, 200),
            ({"authorization": ""}, 401),
            ({"authorization": "Bearer wrong"}, 401),
            ({"authorization": "bearer right"}, 200),
            ({"authorization": "BEARER  right"}, 200),
            ({"authorization": "right"}, 200),
            ({"authorization": "Bearerright"}, 401),
            ({"authorization": "Bearer wrong", "x-api-key": "right"}, 200),
            ({"authorization": "", "x-api-key": "Bearer right"}, 401),
        ],
    )
    def test_who_is_let_in(self, headers, status):
        with served(keys=["other", "right"], hosts=["box.lan"], origins=["https://chat.example"]) as client:
            sent = {"authorization": "Bearer right"} | headers
            assert client.get("/v1/models", headers=sent).status_code == status
            answer = client.post("/v1/chat/completions", json=HELLO | {"max_tokens": 1}, headers=sent)
            assert answer.status_code == status
            assert answer.headers.get("access-control-allow-origin") in (None, "https://chat.example")
            if status != 200:
                assert answer.json()["error"]["message"]

    def test_a_name_that_a_name_server_answers_for_is_let_in_only_where_the_server_was_started_for_it(self):
        with served(hosts=["HOST.docker.internal", "app.localhost."]) as client:
            for host, status in (("host.docker.internal:8080", 200), ("app.localhost", 200), ("b.localhost", 403)):
                assert client.get("/health", headers={"host": host}).status_code == status

    def test_a_preflight_is_answered_for_allowed_origins_alone(self):
        with served(keys=["right"], origins=["https://chat.example"]) as client:
            for origin, status in (("https://chat.example", 200), ("null", 400), ("http://evil.example", 400)):
                asked = {"origin": origin, "access-control-request-method": "POST"}
                asked |= {"access-control-request-headers": "content-type"}
                answer = client.options("/v1/chat/completions", headers=asked)
                allowed = answer.headers.get("access-control-allow-origin")
                assert (answer.status_code, allowed) == (status, origin if status == 200 else None)

    @pytest.mark.parametrize(
        ("given", "origin", "status"),
        [
            ("https://chat.example/", "https://chat.example", 200),
            ("HTTPS://Chat.Example:443", "https://chat.example", 200),
            ("http://box.lan:80", "http://box.lan", 200),
            ("http://[::1]:3000", "http://[::1]:3000", 200),
            ("http://box.lan", "http://box.lan:3000", 403),
            ("http://box.lan", "http://box-lan", 403),
            ("app://obsidian.md", "app://obsidian.md", 200),
            ("vscode-webview://*", "vscode-webview://0mh2f8", 200),
            ("vscode-webview://*", "https://evil.example", 403),
            ("http://localhost:*", "http://localhost:5173", 200),
            ("https://*.example", "https://example", 403),
            ("file://", "file://", 200),
            ("app://Notes", "app://Notes", 200),
            ("null", "null", 200),
            ("*", "null", 200),
            ("*", "https://evil.example", 200),
        ],
    )
    def test_pages_of_an_allowed_origin(self, given, origin, status):
        with served(origins=[given]) as client:
            answer = client.get("/v1/models", headers={"origin": origin})
            assert answer.status_code == status
            assert answer.headers.get("access-control-allow-origin") == (origin if status == 200 else None)

    @pytest.mark.parametrize(
        ("option", "names", "right"),
        [
            ("origin", ["chat.example", "https://chat.example/page", "", "https:chat.example", "a b://c"], "like"),
            ("host", ["http://box.lan", "box.lan:8080", "", "*.lan", "a b"], "a name"),
        ],
    )
    def test_what_no_request_could_come_from_is_refused_at_the_start(self, option, names, right):
        for name in names:
            with pytest.raises(UsageError, match=f"^--allow-{option} is {re.escape(repr(name))}, but must be {right}"):
                Guard(lambda: None, error_body, **{f"{option}s": [name]})

    def test_a_compressed_body_is_refused_in_one_line(self, client):
        for coding, status in (("gzip", 415), ("Identity", 200)):
            answer = client.post(
                "/v1/chat/completions", json=HELLO | {"max_tokens": 2}, headers={"content-encoding": coding}
            )
            assert answer.status_code == status
        answer = client.post("/v1/messages", json=HELLO, headers={"content-encoding": "gzip"})
        assert (
            answer.json()["error"]["message"] == "the body is sent as 'gzip', which is not read here: send it as it is"
        )

    def test_what_a_form_can_send_is_refused(self, client):
        for kind in ("text/plain", "application/x-www-form-urlencoded", "", "application/jsonx"):
            answer = client.post("/v1/chat/completions", content=json.dumps(HELLO), headers={"content-type": kind})
            assert answer.status_code == 415
        answer = client.post(
            "/v1/chat/completions",
            content=json.dumps(HELLO | {"max_tokens": 1}),
            headers={"content-type": "application/json; charset=utf-8"},
        )
        assert answer.status_code == 200

    def test_health_is_public(self):
        with served(keys=["right"]) as client:
            assert client.get("/metrics").status_code == 401
            assert client.get("/health", headers={"origin": ""}).status_code == 403
            health = client.get("/health").json()
            assert (health["status"], health["planner"], health["parallel"]) == ("ok", "sssd", 2)
            assert health["where"]["line"] == "reference; exactly the text of plain decoding"


class TestPage:
    def test_it_is_there_and_asks_nobody_else(self):
        with served(keys=["right"]) as client:
            answer = client.get("/")
            assert answer.status_code == 200
            policy = answer.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            assert {"img-src data:", "connect-src 'self'", "script-src 'self'"} <= set(policy.split("; "))
            used = re.findall(r'(?:src|href)="(static/[^"]+)"', answer.text)
            assert len(used) == 2
            own = {file.name: file.read_text("utf-8") for file in STATIC.iterdir() if file.is_file()}
            used += [
                f"static/{path}" for text in own.values() for path in re.findall(r'(?:from|import) "./([^"]+)"', text)
            ]
            assert {f"static/{name}" for name in own if name.endswith(".js")} < set(used)
            for path in used:
                found = client.get(f"/{path}")
                assert (found.status_code, found.headers["cache-control"]) == (200, "no-cache"), path
            addresses = {found for text in own.values() for found in re.findall(r"https?://[^\s\"'`]+", text)}
            assert addresses == {"http://www.w3.org/2000/svg"}  # a name, not a place
            assert not any("innerHTML" in text for text in own.values())
            assert client.get("/static/%2e%2e/app.py").status_code == 404

    def test_every_id_that_the_script_uses_is_there(self):
        page = (STATIC / "index.html").read_text("utf-8")
        scripts = "".join(file.read_text("utf-8") for file in STATIC.glob("*.js"))
        used = set(re.findall(r'\$\("([\w-]+)"\)', scripts))
        assert len(used) > 15
        assert used <= set(re.findall(r'id="([\w-]+)"', page))
        sources = re.search(r"MEANING = \{([^}]+)\}", scripts)[1]
        assert [source.name.lower() for source in Source] == re.findall(r"(\w+): ", sources)

    def test_what_is_taken_over_is_pinned_and_installed_with_its_licence(self):
        settings = tomllib.loads((STATIC.parents[2] / "pyproject.toml").read_text("utf-8"))
        patterns = settings["tool"]["setuptools"]["package-data"]["edgespec.server"]
        files = {file for file in STATIC.rglob("*") if file.is_file()}
        assert files == {file for pattern in patterns for file in STATIC.parent.glob(pattern) if file.is_file()}
        assert "edgespec/server/static/marked/LICENSE" in settings["project"]["license-files"]
        told = (STATIC / "marked" / "NOTICE").read_text("utf-8")
        assert sha256((STATIC / "marked" / "marked.esm.js").read_bytes()).hexdigest() in told


SLOW = {"type": "json_schema", "json_schema": {"schema": TestSchemas.SCHEMA}}


@pytest.mark.parametrize("slow", ["building", "compiling"])
def test_a_slow_schema_stops_no_other_request(slow, monkeypatch):
    """Nor do many: they wait for threads of their own."""
    pytest.importorskip("llguidance", reason="needs llguidance: pip install 'edgespec[server]'")
    many, body = 20, HELLO | {"max_tokens": 5, "response_format": SLOW}
    with served(slots=2) as client, ThreadPoolExecutor(many) as pool:
        owner, name = (client.model, "compile") if slow == "compiling" else (ModelFormat, "grammar")
        with blocked(monkeypatch, owner, name) as begun:
            waiting = [pool.submit(client.post, "/v1/chat/completions", json=body) for _ in range(many)]
            assert begun.acquire(timeout=60)
            assert client.post("/v1/chat/completions", json=HELLO | {"max_tokens": 3}).status_code == 200
            assert len(stream(client, "/v1/messages", HELLO | {"max_tokens": 3})) > 3
            assert client.get("/health").json()["status"] == "ok"
            assert not any(one.done() for one in waiting)
        assert {one.result().status_code for one in waiting} == {200}


@pytest.mark.parametrize(
    ("method", "path", "module"),
    [
        ("POST", "/v1/chat/completions", "chat"),
        ("POST", "/v1/messages/count_tokens", "messages"),
        ("PUT", "/edgespec/draft-prompt", "chat"),
    ],
)
def test_large_bodies_do_not_hold_up_other_clients(method, path, module, monkeypatch):
    """JSON of megabytes is parsed, and conversations are made of it, outside the server's loop."""
    in_loop = []

    def noted(inner):
        def wrapper(*given, **more):
            with suppress(RuntimeError):
                in_loop.append(asyncio.get_running_loop())
            in_loop.append(None)
            return inner(*given, **more)

        return wrapper

    for owner, name in ((wire, "levels"), (import_module(f"edgespec.server.dialects.{module}"), "text_of")):
        monkeypatch.setattr(owner, name, noted(getattr(owner, name)))
    with served() as client:
        assert client.request(method, path, json=HELLO | {"max_tokens": 3}).status_code == 200
    assert len(in_loop) >= 2
    assert not any(in_loop)


def test_long_bodies_do_not_hold_up_short_ones(monkeypatch):
    many, long = 8, {"messages": [{"role": "user", "content": "a" * (LONG_BODY + 1)}]}
    with served() as client, ThreadPoolExecutor(many + 1) as pool:
        with blocked(
            monkeypatch, wire, "levels", lambda found: len(found["messages"][0]["content"]) > LONG_BODY
        ) as begun:
            waiting = [pool.submit(client.post, "/v1/chat/completions", json=long) for _ in range(many)]
            assert begun.acquire(timeout=60)
            time.sleep(0.2)  # the others come, too
            short = pool.submit(client.post, "/v1/chat/completions", json=HELLO | {"max_tokens": 3})
            assert short.result(timeout=20).status_code == 200
            assert not any(one.done() for one in waiting)
        assert {one.result().json()["error"]["code"] for one in waiting} == {"context_length_exceeded"}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages/count_tokens", "/edgespec/draft-prompt"])
def test_what_is_too_much_is_refused_before_it_is_read(path, monkeypatch):
    with served(slots=1, service={"most_waiting": 0}) as client, held(client.model.scheduler):
        waits = client.model.scheduler.submit(Wanted([1, 2], SamplingParams(), 3), lambda event: None)
        monkeypatch.setattr(wire, "levels", None)
        answer = client.request("PUT" if "draft" in path else "POST", path, json=HELLO)
        assert answer.status_code == 429
        waits.cancel()


def test_the_first_grammar_does_not_stop_the_server(monkeypatch):
    """llguidance reads the vocabulary with Python's lock held: a server does it before it has clients."""
    pytest.importorskip("llguidance", reason="needs llguidance: pip install 'edgespec[server]'")
    read, inner = [], grammar.Tokenizer
    monkeypatch.setattr(grammar, "Tokenizer", lambda vocab: read.append(vocab) or inner(vocab))
    with served() as client:
        assert len(read) == 1
        assert client.post("/v1/chat/completions", json=HELLO | {"response_format": SLOW}).status_code == 200
    assert len(read) == 1


def test_requests_that_wait_for_a_grammar_count_as_waiting(monkeypatch):
    pytest.importorskip("llguidance", reason="needs llguidance: pip install 'edgespec[server]'")
    body = HELLO | {"max_tokens": 5, "response_format": SLOW}
    with served(slots=1, service={"most_waiting": 1}) as client, ThreadPoolExecutor(2) as pool:
        with blocked(monkeypatch, client.model, "compile") as begun:
            waiting = [pool.submit(client.post, "/v1/chat/completions", json=body) for _ in range(2)]
            assert begun.acquire(timeout=60)
            assert begun.acquire(timeout=60)
            assert client.post("/v1/chat/completions", json=HELLO).status_code == 429
        assert {one.result().status_code for one in waiting} == {200}
        assert client.post("/v1/chat/completions", json=HELLO | {"max_tokens": 3}).status_code == 200


def test_models_and_metrics():
    with served() as client:
        card = client.get("/v1/models").json()["data"][0]
        assert card["id"] == "tiny"
        assert card["meta"]["n_ctx"] == 400
        assert client.get("/v1/models/tiny").json() == card
        client.post("/v1/chat/completions", json=HELLO | {"max_tokens": 7})
        client.post("/v1/chat/completions", json=HELLO | {"max_tokens": 7})
        lines = dict(line.rsplit(" ", 1) for line in client.get("/metrics").text.splitlines() if line[0] != "#")
        written = sum(int(value) for name, value in lines.items() if name.startswith("edgespec_tokens_total"))
        assert written == 14
        assert lines['edgespec_requests_total{path="/v1/chat/completions",status="200"}'] == "2"
        assert lines['edgespec_texts_total{ended="length"}'] == "2"
        assert int(lines['edgespec_prompt_tokens_total{cached="true"}']) > 0
        assert lines["edgespec_active"] == "0"


def test_a_text_that_ends_while_metrics_are_written_does_no_harm():
    class Growing(dict):
        def items(self):
            for each in super().items():
                self["failed"] = 1
                yield each

    with served() as client:
        counts = client.model.scheduler.counts
        counts.requests = Growing(length=1)
        assert client.get("/metrics").status_code == 200


def test_paths_that_are_made_up_count_as_one():
    with served() as client:
        for path in ('/v1/models/x"', "/v1/models/y", "/nothing"):
            client.get(path)
        client.post("/static/z")
        counted = [line for line in client.get("/metrics").text.splitlines() if "requests_total{" in line]
        assert {line.partition(",")[0] for line in counted} == {'edgespec_requests_total{path="other"'}


def test_silence_is_filled_with_events():
    """Codex and LangChain count no comments before they give up."""
    with served(service={"ping_seconds": 0.05}) as client:
        slowed(client.model, 0.12)
        body = HELLO | {"max_tokens": 3, "stream": True}
        with client.stream("POST", "/v1/chat/completions", json=body) as answer:
            lines = list(answer.iter_lines())
        assert sum('"delta":{"content":""}' in line for line in lines) > 2
        with client.stream("POST", "/v1/messages", json=body) as answer:
            assert "event: ping" in list(answer.iter_lines())
        with client.stream("POST", "/v1/responses", json=body | {"input": "hello", "max_output_tokens": 3}) as answer:
            assert list(answer.iter_lines()).count("event: response.in_progress") > 2
        both = {"prompt": "hello", "n": 2, "max_tokens": 9, "edgespec": {"plain": True}}
        events = map(json.loads, stream(client, "/v1/completions", both | {"stop": "\ufffd"})[:-1])
        ended = list[int]()
        for (choice,) in (event["choices"] for event in events):
            assert choice["index"] not in ended  # no client expects more of a choice behind its end
            ended += [choice["index"]] * (choice["finish_reason"] is not None)


CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": "hello " * 200}], "max_tokens": 1},
        HELLO
        | {
            "tools": [{"type": "function", "function": {"name": "f"}}],
            "edgespec": {"lark": f"start: {json.dumps(CALL)}", "plain": True},
        },
    ],
    ids=["a long prompt", "a held call"],
)
def test_what_writes_nothing_is_silence_too(body):
    """The parts of a prompt and the tokens of a call that is not complete are events, but no lines."""
    if "tools" in body:
        pytest.importorskip("llguidance", reason="needs llguidance: pip install 'edgespec[server]'")
    template = "{% if tools %}<tool_call>{% endif %}" + CHAT_TEMPLATE
    with served(service={"ping_seconds": 0.05}, context=1500, template=template) as client:
        slowed(client.model, 0.03)
        with client.stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as answer:
            lines = list(answer.iter_lines())
        assert sum('"delta":{"content":""}' in line for line in lines) > 3
        assert lines.index("data: [DONE]") > 0


def test_what_was_held_back_is_sent_where_the_pool_is_too_small(monkeypatch):
    monkeypatch.setattr("edgespec.scheduler.session_pool.RESERVED", 4)
    body = {"prompt": "hello", "n": 2, "max_tokens": 90, "temperature": 0.9, "seed": 3}
    with served(context=120) as client:
        client.model.target.capabilities = replace(client.model.target.capabilities, cells=100)

        def ask(**more):
            client.model.scheduler.forget()
            return client.post("/v1/completions", json=body | more).json()

        stop = min((choice["text"] for choice in ask()["choices"]), key=len)[-3:] + "never"
        whole = ask(stop=stop)
        client.model.scheduler.forget()
        more = {"stop": stop, "stream_options": {"include_usage": True}}
        *parts, last = map(json.loads, stream(client, "/v1/completions", body | more)[:-1])
        texts = ["", ""]
        for part in parts:
            texts[part["choices"][0]["index"]] += part["choices"][0]["text"]
        reasons = [part["choices"][0]["finish_reason"] for part in parts]
        answers = [(whole, [choice["text"] for choice in whole["choices"]]), (last, texts)]
        for answer, found in answers:  # which of the two has less room depends on which begins first
            counts = [stats["tokens"] for stats in answer["edgespec"]["stats"]]
            assert min(counts) < max(counts) == 90
            for index, (text, count) in enumerate(zip(found, counts, strict=True)):
                assert text == alone(client, "hello", max_tokens=count, temperature=0.9, seed=3 + index)
        assert [choice["finish_reason"] for choice in whole["choices"]] == ["length"] * 2
        assert sorted(filter(None, reasons)) == ["length"] * 2


def cut_off(app, path="/", *parts, begun=False):
    """What a client is sent whose request the server's end cuts off behind these parts, perhaps after the head."""
    sent = []

    async def ask():
        left = iter(parts)

        async def receive():
            return next(left, None) or await asyncio.Event().wait()

        async def send(message):
            sent.append(message)

        head = [(b"content-type", b"application/json"), (b"host", b"localhost")]
        scope = {"type": "http", "method": "POST", "path": path, "headers": head, "query_string": b""}
        task = asyncio.create_task(app({**scope, "scheme": "http", "root_path": ""}, receive, send))
        await asyncio.sleep(0)
        while begun and not sent:
            await asyncio.sleep(0.01)
        task.cancel()
        await task

    asyncio.run(ask())
    return sent


@pytest.mark.parametrize("begun", [False, True])
def test_a_request_that_the_servers_end_cuts_off_is_no_error_of_it(begun):
    """As one whose grammar is being compiled, or whose text is stuck in the engine."""

    async def endless(scope, receive, send):
        if begun:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        await asyncio.sleep(60)

    sent = cut_off(Guard(endless, error_body))
    assert sent[0]["status"] == (200 if begun else 503)
    assert begun or b"the server is stopping" in sent[1]["body"]
    assert begun or (b"retry-after", b"5") in sent[0]["headers"]


def test_a_stream_that_the_servers_end_cuts_off_says_so():
    with served() as client, held(client.model.scheduler):  # the text is stuck
        body = json.dumps(HELLO | {"stream": True, "max_tokens": 5}).encode()
        sent = cut_off(client.app, "/v1/chat/completions", {"type": "http.request", "body": body}, begun=True)
    assert b"the server is stopping" in sent[-2]["body"]
    assert not sent[-1]["more_body"]  # else uvicorn says that the answer is not complete
