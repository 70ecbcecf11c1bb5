"""Calls of tools: cut out of a growing text, in every dialect, and back into the template."""

import json

import pytest
from edgespec.backends.reference.backend import CHAT_TEMPLATE
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("starlette", reason="the server is not installed: pip install 'edgespec[server]'")
pytest.importorskip("llguidance", reason="needs llguidance: pip install 'edgespec[server]'")

from test_server import HELLO, served_and_shown, stream

from edgespec.server.call_formats import HERMES
from edgespec.server.parse_output import OutputParser, calls_of
from edgespec.server.tool_calls import Call

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
TIME = {"name": "time", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}}
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
        (streamed,) = [call for part in parts for call in part["delta"].get("tool_calls", ())]
        assert streamed["index"] == 0
        assert streamed["function"] == call["function"]
        assert not any(part["delta"].get("content") for part in parts)
        assert parts[-1]["finish_reason"] == "tool_calls"

    def test_any_tool(self, client):
        names = set()
        for seed in range(6):
            body = self.BODY | {"tools": TOOLS, "tool_choice": "required", "seed": seed}
            (choice,) = client.post("/v1/chat/completions", json=body).json()["choices"]
            names.add(choice["message"]["tool_calls"][0]["function"]["name"])
        assert names <= {"weather", "time"}

    def test_messages(self, client):
        tools = [{"name": f["name"], "input_schema": f["parameters"]} for f in (WEATHER, TIME)]
        tools.append({"type": "web_search_20250305", "name": "web_search"})  # the provider's own
        body = self.BODY | {"tools": tools, "tool_choice": {"type": "tool", "name": "weather"}}
        answer = client.post("/v1/messages", json=body).json()
        assert answer["stop_reason"] == "tool_use"
        (block,) = answer["content"]
        assert block["type"] == "tool_use"
        check(block["name"], json.dumps(block["input"]))
        events = [json.loads(data) for data in stream(client, "/v1/messages", body)]
        kinds = [event["type"] for event in events]
        assert kinds[1:4] == ["content_block_start", "content_block_delta", "content_block_stop"]
        assert json.loads(events[2]["delta"]["partial_json"]) == block["input"]
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
        kinds = [event["type"] for event in events]
        assert kinds[2:6] == [
            "response.output_item.added",
            "response.function_call_arguments.delta",
            "response.function_call_arguments.done",
            "response.output_item.done",
        ]
        assert events[5]["item"]["arguments"] == item["arguments"]
        assert events[-1]["response"]["output"][0]["arguments"] == item["arguments"]

    def test_what_was_called_comes_back_to_the_template(self, client):
        """In every dialect alike; arguments that are no JSON stay as they are."""
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
        texts = []
        for path, body in [
            ("/v1/chat/completions", {"messages": chat, "max_tokens": 2}),
            ("/v1/messages", {"messages": messages, "max_tokens": 2}),
            ("/v1/responses", {"input": items, "max_output_tokens": 2}),
        ]:
            client.shown.clear()
            assert client.post(path, json=body).status_code == 200
            texts.append(client.shown[-1])
        assert texts[0] == texts[1] == texts[2]
        assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>' in texts[0]
        assert "tool\nrain" in texts[0]
        call["function"]["arguments"] = "{broken"
        assert client.post("/v1/chat/completions", json={"messages": chat, "max_tokens": 2}).status_code == 200

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
        shown = []
        for path, body in [
            ("/v1/chat/completions", {"messages": chat, "max_tokens": 2}),
            ("/v1/responses", {"input": items, "max_output_tokens": 2}),
            ("/v1/responses", {"input": [items[0], *items[2:0:-1], items[3]], "max_output_tokens": 2}),
        ]:
            client.shown.clear()
            assert client.post(path, json=body).status_code == 200
            shown.append(client.shown[-1])
        assert shown[0] == shown[1] == shown[2]
        answer = client.post("/v1/chat/completions", json={"messages": chat[:-1], "max_tokens": 2})
        assert answer.status_code == 400
        assert "give the tool's result after it" in answer.json()["error"]["message"]

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

    def test_the_values_of_all_tools_are_counted(self, client):
        tool = {"name": "f", "parameters": {"properties": {"a": {"enum": [1] * 2**16}}}}
        answer = client.post("/v1/chat/completions", json=HELLO | {"tools": [{"type": "function", "function": tool}]})
        assert answer.json()["error"]["message"] == "the tools have 65543 values in all, but at most 65536 may be given"

    def test_tools_are_counted_before_they_are_compared(self, client):
        """Each name would be looked for among all others."""
        for functions, allowed, where in ((TOOLS * 99, TOOLS, "tools"), (TOOLS, TOOLS * 99, "tool_choice")):
            choice = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": allowed}}
            answer = client.post("/v1/chat/completions", json=HELLO | {"tools": functions, "tool_choice": choice})
            error = answer.json()["error"]
            assert error["message"] == "there are 198 tools, but at most 128 may be given"
            assert error["param"] == where

    @pytest.mark.parametrize(
        ("path", "more", "says"),
        [
            ("chat/completions", {"tools": [{"type": "custom", "custom": {"name": "c"}}]}, "no tool of type function"),
            ("chat/completions", {}, "no tool of type function"),
            ("chat/completions", {"functions": [TIME], "tool_choice": "auto"}, "give them as tools"),
            ("responses", {"tools": [{"type": "web_search"}]}, "no tool of type function"),
            ("messages", {"max_tokens": 5, "tool_choice": {"type": "any"}}, "no tool of type function"),
        ],
    )
    def test_a_call_that_must_be_is_not_left_out_without_a_word(self, client, path, more, says):
        answer = client.post(f"/v1/{path}", json=HELLO | {"input": "hello", "tool_choice": "required"} | more)
        assert answer.status_code == 400
        assert says in answer.json()["error"]["message"]

    def test_what_cannot_be_called(self, client):
        for more, says in [
            ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "cook"}}}, "'cook'"),
            ({"tools": TOOLS * 65}, "130 tools"),
            ({"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}}, "together"),
        ]:
            answer = client.post("/v1/chat/completions", json=HELLO | more)
            assert answer.status_code == 400
            assert says in answer.json()["error"]["message"]
        tools = [{"name": "time", "input_schema": {}}]
        body = HELLO | {"max_tokens": 3, "tools": tools, "tool_choice": {"type": "tool"}}
        answer = client.post("/v1/messages", json=body)
        assert answer.status_code == 400
        assert "type tool needs a name" in answer.json()["error"]["message"]
        body = HELLO | {"tools": TOOLS, "tool_choice": "none", "max_tokens": 3}
        assert client.post("/v1/chat/completions", json=body).json()["choices"][0]["finish_reason"] == "length"


ONE = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
TEXTS = {
    "plain < text\n": ["plain < text\n"],
    ONE: [("f", {"a": 1})],
    f"Let me see.\n{ONE}\n{ONE}": ["Let me see.", ("f", {"a": 1}), ("f", {"a": 1})],
    f"{ONE} and more": [("f", {"a": 1}), " and more"],
    "<tool_call>not json</tool_call>": ["<tool_call>not json</tool_call>"],
    '<tool_call>{"name": 5}</tool_call>': ['<tool_call>{"name": 5}</tool_call>'],
    '<tool_call>{"name": "f", "arguments": "x"}</tool_call>': [
        '<tool_call>{"name": "f", "arguments": "x"}</tool_call>'
    ],
    'cut <tool_call>{"name": "f"': ["cut ", '<tool_call>{"name": "f"'],
    "almost <tool_cal": ["almost <tool_cal"],
}


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(list(TEXTS)), st.data())
def test_calls_are_found_however_the_text_comes(text, data):
    parser, found, at = OutputParser(HERMES), [], 0
    while at < len(text):
        size = data.draw(st.integers(1, 12))
        found += parser.push(text[at : at + size])
        at += size
    found += parser.finish()
    merged = []
    for piece in found:
        if isinstance(piece, Call):
            merged.append((piece.name, json.loads(piece.arguments)))
        elif merged and isinstance(merged[-1], str):
            merged[-1] += piece
        else:
            merged.append(piece)
    expected = TEXTS[text]
    assert merged == ["".join(expected)] if all(isinstance(e, str) for e in expected) else merged == expected


def test_without_tools_everything_is_content():
    parser = OutputParser()
    assert parser.push(ONE) == [ONE]
    assert parser.push("") == parser.finish() == []


def test_a_depth_bomb_is_content():
    (text,) = calls_of("[" * 10**5, "<tool_call>", HERMES, {})
    assert text == "<tool_call>" + "[" * 10**5 + "</tool_call>"


@pytest.mark.parametrize(("strict", "status"), [(True, 400), (False, 200), (None, 200)])
def test_a_strict_tool_is_enforced_or_refused_in_every_dialect(client, strict, status):
    days = {"type": "object", "properties": {"days": {"type": "array", "maxItems": 2, "uniqueItems": True}}}
    told = {"name": "rain"} | ({} if strict is None else {"strict": strict})
    requests = {
        "chat/completions": {"tools": [{"type": "function", "function": told | {"parameters": days}}]},
        "responses": {"tools": [{"type": "function", **told, "parameters": days}], "input": "hello"},
        "messages": {"tools": [told | {"input_schema": days}], "max_tokens": 9},
    }
    for path, body in requests.items():
        choice = {"type": "any"} if path == "messages" else "required"
        answer = client.post(f"/v1/{path}", json=HELLO | {"tool_choice": choice, "seed": 1} | body)
        assert answer.status_code == status, path
        if status == 400:
            assert "uniqueItems" in answer.text
