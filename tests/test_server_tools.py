"""Calls of tools: cut out of a growing text, in every dialect, and back into the template."""

import json
import os
import re
from pathlib import Path

import pytest
from reference.backend import CHAT_TEMPLATE, ReferenceVocab

pytest.importorskip("starlette", reason="the server is not installed: pip install 'edgespec[server]'")
pytest.importorskip("llguidance", reason="needs llguidance: pip install 'edgespec[server]'")

from starlette.testclient import TestClient
from test_server import HELLO, prompt, refused, served, served_and_shown, stream

from edgespec.server.app import make_app
from edgespec.server.call_formats import HERMES
from edgespec.server.conversation import Conversation, Turn
from edgespec.server.model_format import ModelFormat
from edgespec.server.parse_output import OutputParser
from edgespec.server.prompts import calls_as_text
from edgespec.server.service import Service
from edgespec.server.tool_calls import Call, Tool, Tools

TEMPLATE = (
    "{% if tools %}<s>tools {{ tools | tojson }}</s>{% endif %}"
    "{% for m in messages %}{% for c in m.tool_calls or [] %}<tool_call>\n{{ c.function | tojson }}\n</tool_call>"
    "{% endfor %}{% endfor %}"
) + CHAT_TEMPLATE
WEATHER = {
    "name": "weather",
    "description": "<of a place>",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Prague"]}, "days": {"enum": [1, 2]}},
        "required": ["city", "days"],
        "additionalProperties": False,
    },
}
TIME = {
    "name": "time",
    "description": "now",
    "parameters": {"type": "object", "properties": {}, "additionalProperties": False},
}
TOOLS = [{"type": "function", "function": function} for function in (WEATHER, TIME)]


@pytest.fixture(scope="module")
def client():
    with served_and_shown(context=1000, template=TEMPLATE) as client:
        yield client


def check(name, arguments):
    assert name == "weather"
    found = json.loads(arguments)
    assert found["city"] in ("Paris", "Prague")
    assert found["days"] in (1, 2)


class TestDialects:
    BODY = HELLO | {"max_tokens": 120, "temperature": 0.8, "seed": 1}
    CHOICE = {"type": "function", "function": {"name": "weather"}}  # noqa: RUF012

    def test_chat(self, client):
        body = self.BODY | {"tools": TOOLS, "tool_choice": self.CHOICE}
        (choice,) = client.post("/v1/chat/completions", json=body).json()["choices"]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] is None
        (call,) = choice["message"]["tool_calls"]
        check(call["function"]["name"], call["function"]["arguments"])
        assert '"description": "<of a place>"' in client.shown[-1] or any(
            "<of a place>" in text for text in client.shown
        )
        parts = [json.loads(data)["choices"][0] for data in stream(client, "/v1/chat/completions", body)[:-1]]
        told = [call for part in parts for call in part["delta"].get("tool_calls", ())]
        assert {one["index"] for one in told} == {0}
        assert [one["function"].get("name") for one in told] == ["weather"] + [None] * (len(told) - 1)
        assert "".join(one["function"]["arguments"] for one in told) == call["function"]["arguments"]
        assert not any(part["delta"].get("content") for part in parts)
        assert parts[-1]["finish_reason"] == "tool_calls"

    def test_messages(self, client):
        tools = [{"name": f["name"], "input_schema": f["parameters"]} for f in (WEATHER, TIME)]
        body = self.BODY | {"tools": tools, "tool_choice": {"type": "tool", "name": "weather"}}
        answer = client.post("/v1/messages", json=body).json()
        assert answer["stop_reason"] == "tool_use"
        (block,) = answer["content"]
        assert block["type"] == "tool_use"
        check(block["name"], json.dumps(block["input"]))
        events = [json.loads(data) for data in stream(client, "/v1/messages", body)]
        kinds = list(dict.fromkeys(event["type"] for event in events[1:-2]))
        assert kinds == ["content_block_start", "content_block_delta", "content_block_stop"]
        told = [event["delta"]["partial_json"] for event in events if event["type"] == "content_block_delta"]
        assert json.loads("".join(told)) == block["input"]
        assert events[-2]["delta"]["stop_reason"] == "tool_use"
        counted = client.post("/v1/messages/count_tokens", json=HELLO | {"tools": tools}).json()["input_tokens"]
        assert counted > client.post("/v1/messages/count_tokens", json=HELLO).json()["input_tokens"] + 50

    def test_responses(self, client):
        tools = [{"type": "function", **WEATHER}, {"type": "function", **TIME}, {"type": "web_search"}]
        body = {"input": "hello", "tools": tools, "tool_choice": {"type": "function", "name": "weather"}, "seed": 1}
        answer = client.post("/v1/responses", json=body).json()
        (item,) = answer["output"]
        assert item["type"] == "function_call"
        check(item["name"], item["arguments"])
        events = [json.loads(data) for data in stream(client, "/v1/responses", body)]
        assert list(dict.fromkeys(event["type"] for event in events[2:-1])) == [
            "response.output_item.added",
            "response.function_call_arguments.delta",
            "response.function_call_arguments.done",
            "response.output_item.done",
        ]
        assert events[-2]["item"]["arguments"] == item["arguments"]
        assert events[-1]["response"]["output"][0]["arguments"] == item["arguments"]

    def test_what_was_called_comes_back_to_the_template(self, client):
        """In every dialect alike; arguments that are no object are the only value of one."""
        call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
        chat = [
            *HELLO["messages"],
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "rain"},
        ]
        use = {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Paris"}}
        messages = [
            *HELLO["messages"],
            {"role": "assistant", "content": [use]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "rain"}]},
        ]
        items = [
            {"role": "user", "content": "hello"},
            {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Paris"}'},
            {"type": "function_call_output", "call_id": "c1", "output": "rain"},
        ]
        text = prompt(client, "chat/completions", {"messages": chat})
        assert (
            text == prompt(client, "messages", {"messages": messages}) == prompt(client, "responses", {"input": items})
        )
        assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>' in text
        assert "tool\nrain" in text
        call["function"]["arguments"] = "{broken"
        text = prompt(client, "chat/completions", {"messages": chat})
        assert '"arguments": {"arguments": "{broken"}' in text

    def test_a_text_and_the_call_beside_it_are_one_turn(self, client):
        call = {"id": "c1", "type": "function", "function": {"name": "time", "arguments": "{}"}}
        said = {"role": "assistant", "content": "I look.", "tool_calls": [call]}
        chat = [*HELLO["messages"], said, {"role": "tool", "tool_call_id": "c1", "content": "noon"}]
        items = [
            *HELLO["messages"],
            {"role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
            {"type": "function_call", "call_id": "c1", "name": "time", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "noon"},
        ]
        text = prompt(client, "chat/completions", {"messages": chat})
        for some in (items, [items[0], *items[2:0:-1], items[3]]):
            assert prompt(client, "responses", {"input": some}) == text
        assert "give the tool's result after it" in refused(client, "chat/completions", {"messages": chat[:-1]})

    @pytest.mark.parametrize("path", ["chat/completions", "responses"])
    def test_some_of_the_tools_may_be_allowed(self, client, path):
        def ask(mode, *names, **more):
            if path == "responses":
                tools = [{"type": "function", **function} for function in (WEATHER, TIME)]
                choice = {"mode": mode, "tools": [{"type": "function", "name": name} for name in names]}
                body = {"input": "hello", "max_output_tokens": 60}
            else:
                tools = TOOLS
                allowed = [{"type": "function", "function": {"name": name}} for name in names]
                choice = {"allowed_tools": {"mode": mode, "tools": allowed}}
                body = HELLO | {"max_tokens": 60}
            client.shown.clear()
            body |= {"tools": tools, "tool_choice": {"type": "allowed_tools", **choice} | more, "seed": 1}
            return client.post(f"/v1/{path}", json=body)

        answer = ask("required", "time").json()
        (call,) = answer["output"] if path == "responses" else answer["choices"][0]["message"]["tool_calls"]
        assert "'name': 'time'" in str(call)
        assert ask("auto", "time").status_code == 200
        assert any('"time"' in text for text in client.shown)
        assert not any('"weather"' in text for text in client.shown)
        for answer, says in [
            (ask("auto", "cook"), "'cook', which is none of the tools"),
            (ask("none", "time"), "allowed_tools needs a mode"),
            (ask("auto", "time", type="web_search"), "type 'web_search' cannot be had here"),
        ]:
            assert answer.status_code == 400
            assert says in answer.json()["error"]["message"]

    def test_tools_are_counted_before_they_are_compared(self, client):
        """Each name would be looked for among all others."""
        for functions, allowed, where in ((TOOLS * 99, TOOLS, "tools"), (TOOLS, TOOLS * 99, "tool_choice")):
            choice = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": allowed}}
            answer = client.post("/v1/chat/completions", json=HELLO | {"tools": functions, "tool_choice": choice})
            error = answer.json()["error"]
            assert error["message"] == "there are 198 tools, but at most 128 may be given"
            assert error["param"] == where

    def test_a_call_that_must_be_wins_over_a_schema(self, client):
        """As instructor asks, whose schema is the tool's."""
        schema = {"type": "json_schema", "schema": WEATHER["parameters"], "name": "weather"}
        for path, more in [
            ("chat/completions", {"response_format": {"type": "json_schema", "json_schema": schema}, "tools": TOOLS}),
            ("chat/completions", {"response_format": {"type": "json_object"}, "tools": TOOLS}),
            (
                "responses",
                {"text": {"format": schema}, "tools": [{"type": "function", **WEATHER}], "input": "hello"}
                | {"tool_choice": {"type": "function", "name": "weather"}},
            ),
            (
                "messages",
                {"output_config": {"format": schema}, "tool_choice": {"type": "tool", "name": "weather"}}
                | {"tools": [{"name": "weather", "input_schema": WEATHER["parameters"]}]},
            ),
        ]:
            answer = client.post(f"/v1/{path}", json=self.BODY | {"tool_choice": self.CHOICE} | more).json()
            assert "'weather'" in str(answer), path
            assert re.search(r"""['"]days['"]:""", str(answer)), path

    def test_a_required_call_may_be_several_unless_they_are_forbidden(self, client):
        body = self.BODY | {"tools": TOOLS, "max_tokens": 200, "logit_bias": {"1": -9}}  # as long as it may be
        for more, several in [
            ({"tool_choice": "required"}, True),
            ({"tool_choice": "required", "parallel_tool_calls": False}, False),
            ({"tool_choice": self.CHOICE}, False),
        ]:
            message = client.post("/v1/chat/completions", json=body | more).json()["choices"][0]["message"]
            assert (len(message["tool_calls"]) > 1) == several, more


def test_a_conversation_with_tools_has_the_models_template_for_them():
    """And its form of calls."""
    with served_and_shown(context=1500) as client:
        form = "with tools: {# <|python_tag|> #}{% for t in tools %}{{ t | tojson }}{% endfor %}"
        client.model.target.vocab.tool_template = form + CHAT_TEMPLATE
        with TestClient(make_app(Service(client.model, "tiny")), base_url="http://127.0.0.1:8080") as client.own:
            choice = {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "time"}}}
            for more, begin in [(choice, "with tools: "), ({}, "<s>user\nhello")]:
                client.shown.clear()
                body = HELLO | {"max_tokens": 60} | more
                answer = client.own.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
                assert any(text.startswith(begin) for text in client.shown)
                assert bool(answer.get("tool_calls")) == bool(more)
            counted = client.own.post("/v1/messages/count_tokens", json=HELLO | {"tools": [
                {"name": "time", "input_schema": {"type": "object"}}
            ]})  # fmt: skip
            assert counted.json()["input_tokens"] > len("with tools: ")
            assert any(text.startswith("with tools: ") for text in client.shown[-3:])


PUBLISHED = sorted(Path(os.environ.get("EDGESPEC_TEMPLATES", "nowhere")).glob("*.jinja"))


@pytest.mark.skipif(not PUBLISHED, reason="EDGESPEC_TEMPLATES is no folder of chat templates")
@pytest.mark.parametrize("path", PUBLISHED, ids=lambda path: path.stem)
def test_every_published_template_shows_tools_calls_and_results(path):
    vocab, call = ReferenceVocab(258), Call("weather", '{"city": "Praha"}', "c1")
    vocab.chat_template = path.read_text("utf-8")
    turns = [Turn("system", "Be brief."), Turn("user", "And now?"), Turn("assistant", calls=[call])]
    turns.append(Turn("tool", "it rains", result_of="c1"))
    for some in (turns[:2], turns):
        ids = ModelFormat(vocab, vocab.chat_template).prompt_ids(Conversation(some, Tools([Tool(WEATHER)])))
        text = b"".join(map(vocab.token_bytes, ids)).decode()
        expected = ["weather", "<of a place>", "Be brief.", "And now?", "Praha", "it rains"][: 2 + len(some)]
        assert [one for one in expected if one not in text] == []


class TestTemplatesWithoutTools:
    """Their models get tools, calls and results as parts of texts."""

    CHAT = (  # a system message, calls beside a text, results, and a question
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": "I look.",
            "tool_calls": [
                {"id": f"c{i}", "type": "function", "function": {"name": "weather", "arguments": arguments}}
                for i, arguments in enumerate(['{"city": "Paris"}', ""])
            ],
        },
        {"role": "tool", "tool_call_id": "c0", "content": "rain"},
        {"role": "tool", "tool_call_id": "c1", "content": "sun"},
        {"role": "assistant", "content": "Rain and sun."},
        {"role": "user", "content": "Thanks."},
    )

    @pytest.mark.parametrize(
        "refuses", ["", "{% if messages[0].role == 'system' %}{{ raise_exception('x') }}{% endif %}"]
    )
    def test_all_is_shown_and_a_required_call_is_one(self, refuses):
        with served_and_shown(context=2500, template=refuses + CHAT_TEMPLATE) as client:
            body = {"messages": self.CHAT, "tools": TOOLS, "tool_choice": "required", "max_tokens": 150}
            (choice,) = client.post("/v1/chat/completions", json=body | {"parallel_tool_calls": False}).json()[
                "choices"
            ]
            shown = max(client.shown, key=len)
            bare = client.post("/v1/chat/completions", json=body | {"tools": [], "tool_choice": "none"})
            assert bare.status_code == 200
            without = max(client.shown[client.shown.index(shown) + 1 :], key=len)
        assert choice["finish_reason"] == "tool_calls"
        call = choice["message"]["tool_calls"][0]["function"]
        assert call["name"] in ("weather", "time")
        first, *others = shown.split("</s>\n")
        assert first.startswith("<s>user\nBe brief.\n\n# Tools" if refuses else "<s>system\nBe brief.\n\n# Tools")
        for tool in TOOLS:
            assert json.dumps(tool) in first
        results = "<tool_response>\nrain\n</tool_response>\n<tool_response>\nsun\n</tool_response>"
        assert others[not refuses :] == [
            '<s>assistant\nI look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
            '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>',
            f"<s>user\n{results}", "<s>assistant\nRain and sun.", "<s>user\nThanks.", "<s>assistant\n",
        ]  # fmt: skip
        assert results in without

    def test_the_last_turn_may_not_be_a_call_without_its_result(self):
        with served(context=1500) as client:
            body = {"messages": self.CHAT[:3], "tools": TOOLS}
            assert "give the tool's result after it" in refused(client, "chat/completions", body)

    def test_without_tools_the_prompt_is_as_it_was(self):
        turns = [Turn("system", "s"), Turn("user", "u"), Turn("assistant", "a"), Turn("user", "v")]
        assert calls_as_text(turns, None) == turns


ONE = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


def test_without_tools_everything_is_content():
    parser = OutputParser()
    assert parser.push(ONE) == [ONE]
    assert parser.push("") == parser.finish() == []


def test_a_depth_bomb_is_content():
    for bomb in ("[" * 10**5, '{"a":' * 10**5):
        text = f"<tool_call>{bomb}</tool_call>"
        assert OutputParser(HERMES).push(text) == [text]


@pytest.mark.parametrize(("strict", "status"), [(True, 400), (False, 200), (None, 200)])
def test_a_strict_tool_is_enforced_or_refused_in_every_dialect(client, strict, status):
    days = {"type": "object", "properties": {"days": {"type": "array", "maxItems": 2, "uniqueItems": True}}}
    told = {"name": "rain"} | ({} if strict is None else {"strict": strict})
    requests = {
        "chat/completions": {"tools": [{"type": "function", "function": told | {"parameters": days}}]},
        "responses": {"tools": [{"type": "function", **told, "parameters": days}], "input": "hello"},
        "messages": {"tools": [told | {"input_schema": days}]},
    }
    for path, body in requests.items():
        choice = {"type": "any"} if path == "messages" else "required"
        short = {"max_output_tokens" if path == "responses" else "max_tokens": 16}
        answer = client.post(f"/v1/{path}", json=HELLO | {"tool_choice": choice, "seed": 1} | short | body)
        assert answer.status_code == status, path
        if status == 400:
            assert "uniqueItems" in answer.text
