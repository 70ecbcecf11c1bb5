"""Answers as clients' libraries expect them: fields that are null, usage, log-probabilities, lines of a stream."""

import asyncio
import json
from types import SimpleNamespace

import pytest

pytest.importorskip("starlette", reason="the server is not installed: pip install 'edgespec[server]'")
pytest.importorskip("llguidance", reason="needs llguidance: pip install 'edgespec[server]'")

from test_server import HELLO, prompt, refused, served, served_and_shown, stream
from test_server_forced import Vocabulary, fits
from test_server_tools import TEMPLATE, TIME, TOOLS, WEATHER

from edgespec.loop.grammar import json_schema
from edgespec.loop.stats import GenerationStats
from edgespec.scheduler.events import Ended
from edgespec.server.answers import Answer, Answers
from edgespec.server.channels import ANALYSIS, FINAL, ChannelParser
from edgespec.server.dialects import messages
from edgespec.server.model_format import ModelFormat
from edgespec.server.tool_calls import Call, Tool, Tools
from edgespec.server.wire import SamplingFields, sse


@pytest.fixture(scope="module")
def client():
    with served_and_shown(context=1000, template=TEMPLATE) as client:
        yield client


@pytest.fixture(scope="module")
def small():
    with served(context=60) as client:
        yield client


def written(text):
    """Fields by which a request's answer is `text`."""
    return {"edgespec": {"lark": f"start: {json.dumps(text, ensure_ascii=False)}"}, "temperature": 0}


class TestJsonOrACall:
    SCHEMA = {"type": "object", "properties": {"yes": {"enum": [1, 2]}}, "required": ["yes"]}  # noqa: RUF012
    AUTO = Tools([Tool(TIME), Tool(WEATHER)])

    @pytest.mark.parametrize("seen", ["<tool_call>", "<|python_tag|>", "[TOOL_CALLS][ARGS]", "<function=<parameter="])
    @pytest.mark.parametrize("thinks", [False, True])
    def test_response_format_leaves_tools_callable(self, seen, thinks):
        calls = {
            "<tool_call>": '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>',
            "<|python_tag|>": '<|python_tag|>{"name": "time", "parameters": {}}',
            "[TOOL_CALLS][ARGS]": "[TOOL_CALLS]time[ARGS]{}",
            "<function=<parameter=": "<tool_call>\n<function=time>\n</function>\n</tool_call>",
        }
        vocab = Vocabulary()
        form = ModelFormat(vocab, "{% if tools %}" + seen + "</think>" * thinks)
        grammar = form.grammar(json_schema(self.SCHEMA), self.AUTO, in_thought=False)
        for before in ("", "<think>so</think>\n")[: 1 + thinks]:
            for good in ('{"yes":1}', calls[seen]):
                assert fits(vocab, grammar, before + good)
            for bad in ('{"yes":3}', calls[seen].replace("time", "tome"), "Well", calls[seen] + '{"yes":1}'):
                assert not fits(vocab, grammar, before + bad)
        without = form.grammar(json_schema(self.SCHEMA), None, in_thought=False)
        assert not fits(vocab, without, calls[seen])

    def test_in_channels(self):
        vocab = Vocabulary("<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|start|>")
        form = ModelFormat(vocab, "{% if tools %}" + ANALYSIS[0] + FINAL)
        grammar = form.grammar(json_schema(self.SCHEMA), self.AUTO, in_thought=False)
        call = "<|channel|>commentary to=functions.time <|constrain|>json<|message|>{}"
        for before in ("", f"{ANALYSIS[0]}Hm.{ANALYSIS[1]}"):
            assert fits(vocab, grammar, f'{before}{FINAL}{{"yes":1}}')
            assert fits(vocab, grammar, before + call)
            assert not fits(vocab, grammar, f'{before}{{"yes":1}}')
            assert not fits(vocab, grammar, f"{before}{FINAL}{call}")

    def test_in_the_server(self, client):
        form = {"type": "json_schema", "json_schema": {"schema": self.SCHEMA | {"additionalProperties": False}}}
        (marker,) = client.model.target.vocab.encode("<", add_bos=False, parse_special=False)
        for bias in (-1000, 1000):
            body = HELLO | {"tools": TOOLS, "response_format": form, "seed": 1, "max_tokens": 150}
            answer = client.post("/v1/chat/completions", json=body | {"logit_bias": {str(marker): bias}}).json()
            (choice,) = answer["choices"]
            assert choice["finish_reason"] == ("tool_calls" if bias > 0 else "stop")
            if bias < 0:
                assert json.loads(choice["message"]["content"])["yes"] in (1, 2)

    def test_in_messages(self, client):
        form = {"type": "json_schema", "schema": self.SCHEMA | {"additionalProperties": False}}
        for more in ({"output_config": {"format": form, "effort": "low"}}, {"output_format": form}):
            answer = client.post("/v1/messages", json=HELLO | {"max_tokens": 150, "seed": 1} | more).json()
            (block,) = answer["content"]
            assert json.loads(block["text"])["yes"] in (1, 2)


ONE = '<tool_call>{"name": "time", "arguments": {}}</tool_call>'
TWO = ONE + ' and <tool_call>{"name": "weather"}</tool_call>'


class TestAnAnswerThatIsCutAfterACall:
    """It may lack calls, so its reader is told of the cut; an answer that may have one call is whole with it."""

    MOST = len(TWO) - 20  # tokens, which are bytes

    @pytest.mark.parametrize(("parallel", "reason"), [(True, "length"), (False, "tool_calls")])
    def test_chat(self, client, parallel, reason):
        body = HELLO | {"tools": TOOLS, "max_tokens": self.MOST, "parallel_tool_calls": parallel} | written(TWO)
        (choice,) = client.post("/v1/chat/completions", json=body).json()["choices"]
        assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["time"]
        assert choice["finish_reason"] == reason
        parts = [json.loads(data)["choices"][0] for data in stream(client, "/v1/chat/completions", body)[:-1]]
        assert parts[-1]["finish_reason"] == reason

    @pytest.mark.parametrize(("single", "reason"), [(False, "max_tokens"), (True, "tool_use")])
    def test_messages(self, single, reason):
        answer = Answer(None, single_call=single, pieces=[Call("time", "{}"), "<tool_call>{"])
        answer.stats.finish_reason = "length"
        assert messages.ending(answer, 0) == {"stop_reason": reason, "stop_sequence": None}

    @pytest.mark.parametrize(
        ("parallel", "most", "status"),
        [(True, len(ONE), "incomplete"), (False, len(ONE), "completed"), (False, None, "completed")],
    )
    def test_responses(self, client, parallel, most, status):
        tools = [{"type": "function", **WEATHER}, {"type": "function", **TIME}]
        body = {"input": "hello", "tools": tools, "max_output_tokens": most, "parallel_tool_calls": parallel}
        answer = client.post("/v1/responses", json=body | written(TWO)).json()
        assert [item["type"] for item in answer["output"]] == ["function_call"]
        assert (answer["status"], answer["parallel_tool_calls"]) == (status, parallel)


class TestSingleCalls:
    def test_chat(self, client):
        body = HELLO | {"tools": TOOLS, "max_tokens": 200} | written(TWO)
        (both,) = client.post("/v1/chat/completions", json=body).json()["choices"]
        assert [call["function"]["name"] for call in both["message"]["tool_calls"]] == ["time", "weather"]
        body["parallel_tool_calls"] = False
        answer = client.post("/v1/chat/completions", json=body).json()
        (choice,) = answer["choices"]
        assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["time"]
        assert choice["message"]["content"] is None
        assert choice["finish_reason"] == "tool_calls"
        parts = [json.loads(data)["choices"][0] for data in stream(client, "/v1/chat/completions", body)[:-1]]
        told = [call for part in parts for call in part["delta"].get("tool_calls", ())]
        assert [call["function"]["name"] for call in told if "name" in call["function"]] == ["time"]
        assert {call["index"] for call in told} == {0}
        assert parts[-1]["finish_reason"] == "tool_calls"
        assert not any(part["delta"].get("content") for part in parts)
        (one, other) = client.post("/v1/chat/completions", json=body | {"n": 2}).json()["choices"]
        assert len(one["message"]["tool_calls"]) == len(other["message"]["tool_calls"]) == 1

    def test_messages(self):
        tools = [{"name": f["name"], "input_schema": f["parameters"]} for f in (WEATHER, TIME)]
        choice = {"type": "auto", "disable_parallel_tool_use": True}
        body = messages.MessagesBody(**HELLO, max_tokens=5, tools=tools, tool_choice=choice)
        assert not messages.question_of(body).tools.parallel
        body.tool_choice = {"type": "auto"}
        assert messages.question_of(body).tools.parallel

    def test_a_failed_tool_is_told_to_the_model(self, client):
        use = {"type": "tool_use", "id": "c1", "name": "time", "input": {}}
        for failed in (True, False, None):
            result = {"type": "tool_result", "tool_use_id": "c1", "content": "no clock", "is_error": failed}
            turns = [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
            text = prompt(client, "messages", {"messages": [*HELLO["messages"], *turns]})
            assert ("tool\nError: no clock" in text, "no clock" in text) == (bool(failed), True)


class TestFields:
    NULLS = dict.fromkeys((
        "n", "stream", "model", "stop", "max_tokens", "temperature", "top_p", "logit_bias", "seed", "tools", "edgespec",
        "tool_choice", "parallel_tool_calls", "response_format", "stream_options", "logprobs", "top_logprobs", "user",
    ))  # fmt: skip

    def test_null_stands_for_a_field_left_out(self, small):
        for path, body in [
            ("chat/completions", HELLO),
            ("completions", {"prompt": "hello", "echo": None, "suffix": None, "best_of": None}),
            ("responses", {"input": "hello", "instructions": None, "max_output_tokens": None, "text": None}),
            ("messages", HELLO | {"system": None, "stop_sequences": None, "thinking": None, "max_tokens": 5}),
        ]:
            answer = small.post(f"/v1/{path}", json={**self.NULLS, **body})
            assert answer.status_code == 200, answer.text
        body = HELLO | {"stream": None, "edgespec": {"plain": None, "trace": None}, "max_tokens": 1}
        assert small.post("/v1/chat/completions", json=body).status_code == 200

    def test_values_at_the_bounds_are_llama_cpps(self, small):
        def text(**more):
            body = HELLO | {"max_tokens": 12, "seed": 3, "temperature": 1.0} | more
            return small.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]

        greedy, free = text(temperature=0), text()
        assert greedy != free
        assert text(top_p=0) == text(min_p=1) == text(top_p=0, top_k=40) == greedy
        assert text(top_k=-1) == text(top_k=0) == free
        assert SamplingFields(top_k=-1, top_p=0.5).sampling == {"top_k": 0, "top_p": 0.5}
        answer = small.post("/v1/completions", json={"prompt": "hello", "max_tokens": -1}).json()
        assert answer["choices"][0]["finish_reason"] == "stop" or answer["usage"]["total_tokens"] == 60


@pytest.mark.parametrize("stays", ["\x85", "\u2028", "\u2029", "é\u2028\n"])
def test_no_character_of_an_answer_ends_a_line_of_a_stream(client, stays):
    assert len(sse("a", {"text": f"a{stays}b"}).decode().splitlines()) == 3
    body = HELLO | {"max_tokens": 30} | written(f"a{stays}b")
    chunks = [json.loads(data) for data in stream(client, "/v1/chat/completions", body)[:-1]]
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == f"a{stays}b"


def test_equal_prompts_count_each_and_choices_of_one_once(client):
    def counted(prompt, n):
        body = {"prompt": prompt, "max_tokens": 2, "n": n}
        return client.post("/v1/completions", json=body).json()["usage"]["prompt_tokens"]

    one = counted("to be", 1)
    assert counted("to be", 3) == one
    assert counted(["to be", "to be"], 1) == counted(["to be", "to be"], 2) == 2 * one


@pytest.mark.parametrize(("single", "reason"), [(False, "stop_sequence"), (True, "tool_use")])
def test_a_stop_string_after_the_only_call_does_not_end_the_answer(single, reason):
    """Else whether the call is run would depend on what a step accepted."""
    handle = SimpleNamespace(stats=GenerationStats(), text=SimpleNamespace(stop_found="and"), cancel=lambda: None)

    def submit(request, emit):
        emit(Ended())
        return handle

    async def answered():
        answer = Answer(None, ChannelParser(), single_call=single, pieces=[Call("time", "{}")])
        await Answers([answer], submit, 1.0).whole()
        return messages.ending(answer, 0)

    assert asyncio.run(answered())["stop_reason"] == reason


def test_log_probs_end_with_the_only_call(client):
    body = HELLO | {"tools": TOOLS, "max_tokens": 200, "parallel_tool_calls": False, "logprobs": True} | written(TWO)
    parts = [json.loads(data)["choices"][0] for data in stream(client, "/v1/chat/completions", body)[:-1]]
    told = [part["logprobs"]["content"] for part in parts if part.get("logprobs")]
    (choice,) = client.post("/v1/chat/completions", json=body).json()["choices"]
    assert [one["token"] for part in told for one in part] == [one["token"] for one in choice["logprobs"]["content"]]


def test_items_of_a_response_keep_their_place_where_a_thought_follows_a_text():
    text = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>analysis<|message|>Hm.<|end|>"
    text += "<|start|>assistant<|channel|>final<|message|>Yes."
    with served(context=1000, template=TEMPLATE + "{# " + ANALYSIS[0] + FINAL + " #}") as client:
        events = [json.loads(data) for data in stream(client, "/v1/responses", {"input": "hello"} | written(text))]
    assert [item["type"] for item in in_their_places(events)] == ["message", "reasoning"]


@pytest.mark.parametrize(
    ("text", "kinds", "said"),
    [
        (f"{ONE} and so on", ["function_call", "message"], " and so on"),
        (f"{ONE} and {ONE} so", ["function_call", "message", "function_call"], " and so"),
        (f"See {ONE} and {ONE} so", ["message", "function_call", "function_call"], "See and so"),
    ],
)
def test_a_text_behind_a_call_is_streamed_as_an_item_behind_it(client, text, kinds, said):
    body = {"input": "hello", "tools": [{"type": "function", **TIME}]} | written(text)
    events = [json.loads(data) for data in stream(client, "/v1/responses", body)]
    output = in_their_places(events)
    whole = client.post("/v1/responses", json=body).json()["output"]
    assert [item["type"] for item in output] == [item["type"] for item in whole] == kinds
    assert [event["item"]["type"] for event in events if event["type"] == "response.output_item.added"] == kinds
    done = {e["output_index"]: e["item"] for e in events if e["type"] == "response.output_item.done"}
    assert [done[place] for place in range(len(output))] == output
    deltas = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    (message,) = [item for item in output if item["type"] == "message"]
    assert message["content"][0]["text"] == deltas == said


def in_their_places(events):
    """The items of the last event, which must have the places that they had before."""
    places = {}
    for event in events:
        if "output_index" in event:
            item = event.get("item_id") or event["item"]["id"]
            assert places.setdefault(item, event["output_index"]) == event["output_index"]
    output = events[-1]["response"]["output"]
    assert all(output[place]["id"] == item for item, place in places.items())
    return output


def test_a_number_too_large_for_a_float_is_refused_before_anything_is_written(client):
    for more in ({"reasoning": 1}, {"tools": [{"type": "web_search", "x": 1}]}):
        body = json.dumps({"input": "hello", "max_output_tokens": 2} | more).replace(": 1}", ": 1e999}")
        answer = client.post("/v1/responses", content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 400
        assert answer.json()["error"]["message"] == "the body is not JSON: 1e999 is too large"


def test_log_probs_of_a_completion_have_the_sampled_token(client):
    body = {"prompt": "hello", "max_tokens": 12, "temperature": 1.5, "seed": 5}
    for count in (0, 2):
        (choice,) = client.post("/v1/completions", json=body | {"logprobs": count}).json()["choices"]
        told = choice["logprobs"]
        for token, value, best in zip(told["tokens"], told["token_logprobs"], told["top_logprobs"], strict=True):
            assert best[token] == value
            assert count <= len(best) <= count + 1
        assert any(len(best) == count + 1 for best in told["top_logprobs"])


def test_log_probs_of_parts_of_characters(client):
    body = {"prompt": "hello", "max_tokens": 20, "logprobs": 20} | written("aé€b")
    (choice,) = client.post("/v1/completions", json=body).json()["choices"]
    told = choice["logprobs"]
    assert told["tokens"][:7] == ["a", *(f"bytes:\\x{byte:02x}" for byte in "é€".encode()), "b"][:7]
    assert told["text_offset"][:7] == [0, 1, 1, 2, 2, 2, 3]
    assert all(len(best) in (20, 21) for best in told["top_logprobs"])  # the sampled one, too
    parts = [json.loads(data)["choices"][0]["logprobs"] for data in stream(client, "/v1/completions", body)[:-1]]
    for name, values in told.items():
        assert [value for part in parts if part for value in part[name]] == values


def test_a_response_has_its_metadata(client):
    body = {"input": "hello", "max_output_tokens": 3}
    answer = client.post("/v1/responses", json=body | {"metadata": {"run": "7"}, "top_logprobs": 0, "include": []})
    assert answer.json()["metadata"] == {"run": "7"}


def test_a_regex_that_explodes_is_the_clients_mistake(client):
    body = {"prompt": "a", "max_tokens": 400, "edgespec": {"regex": "([a-z]{1,500}[a-y]){300}"}}
    assert "the grammar cannot go on" in refused(client, "completions", body)
    *_, last = stream(client, "/v1/completions", body)
    assert json.loads(last)["error"]["type"] == "invalid_request_error"
    assert client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2}).status_code == 200
