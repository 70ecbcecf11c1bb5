"""What clients send beside texts and functions: it is read, a text stands for it, or one line names it."""

import json
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("starlette", reason="the server is not installed: pip install 'edgespec[server]'")
pytest.importorskip("llguidance", reason="needs llguidance: pip install 'edgespec[server]'")

import test_server
from test_server import refused, served_and_shown, stream
from test_server_tools import TEMPLATE, TIME

from edgespec.errors import UsageError
from edgespec.server.content import result_of, text_of
from edgespec.server.dialects import chat, messages, responses
from edgespec.server.errors import Refused
from edgespec.server.tool_calls import Call, flat
from edgespec.server.wire import parsed_body

ONLY = "this model reads only text"
IMAGE = f"[an image; {ONLY}]"
TEXT = {"type": "text", "text": "a"}
PNG = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}}
URL = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
INPUT = {"type": "input_image", "image_url": "data:image/png;base64,iVBORw0KGgo="}
ASK = {"role": "user", "content": "hello"}
PATHS = {"chat/completions": chat, "messages": messages, "responses": responses}


@pytest.fixture(scope="module")
def client():
    with served_and_shown(context=3000, template=TEMPLATE) as client:
        yield client


def body_of(path, history, **more):
    return {"input" if path == "responses" else "messages": history, "max_tokens": 2, "max_output_tokens": 2, **more}


def prompt(client, path, history, **more):
    return test_server.prompt(client, path, body_of(path, history, **more))


READ = {  # with an image in the result of a tool
    "chat/completions": [
        ASK,
        {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "time", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "a.png: "}, URL]},
    ],
    "messages": [
        ASK,
        {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "time", "input": {}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "a.png: "}, PNG]},
        ]},
    ],
    "responses": [
        ASK,
        {"type": "function_call", "call_id": "1", "name": "time", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_text", "text": "a.png: "}, INPUT]},
    ],
}  # fmt: skip


@pytest.mark.parametrize(("path", "part"), [("chat/completions", URL), ("messages", PNG), ("responses", INPUT)])
def test_a_text_stands_for_an_image_that_a_program_sends_and_a_person_is_told(client, path, part):
    assert f"a.png: {IMAGE}" in prompt(client, path, READ[path])
    seen = {"role": "user", "content": [part]}
    assert "reads only text" in refused(client, path, body_of(path, [ASK, seen]))
    assert IMAGE in prompt(client, path, [ASK, seen, ASK])
    assert IMAGE in prompt(client, path, [*READ[path], seen])  # as Claude Code shows the pages of a file


def test_what_stands_beside_a_result_is_no_question(client):
    beside = READ["messages"][-1]["content"] + [{"type": "document", "title": "b.pdf", "source": PNG["source"]}]
    shown = prompt(client, "messages", [*READ["messages"][:-1], {"role": "user", "content": beside}])
    assert "[a file 'b.pdf'; this model reads only text]" in shown


@pytest.mark.parametrize(
    ("part", "text"),
    [
        ("plain", "plain"),
        ({"type": "refusal", "refusal": "No."}, "No."),
        ({"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}, f"[a sound; {ONLY}]"),
        ({"type": "video_url", "video_url": {"url": "x"}}, f"[a video; {ONLY}]"),
        ({"type": "container_upload", "file_id": "f"}, f"[a file; {ONLY}]"),
        ({"type": "file", "file": {"filename": "a.pdf", "file_id": "f"}}, f"[a file 'a.pdf'; {ONLY}]"),
        ({"type": "input_file", "filename": "a.c", "file_data": "data:text/x-c;base64,aW50Ow=="}, "a.c\nint;"),
        ({"type": "file", "file": {"filename": "a.c", "file_data": "data:text/plain,int%3B"}}, "a.c\nint;"),
        ({"type": "file", "file": {"file_data": "data:text/plain;base64,%"}}, f"[a file; {ONLY}]"),
        ({"type": "document", "title": "T", "context": "C", "source": {"type": "text", "data": "D"}}, "T\nC\nD"),
        ({"type": "document", "source": {"type": "content", "content": [TEXT, PNG]}}, f"a{IMAGE}"),
        ({"type": "document", "source": {"type": "url", "url": "x"}}, f"[a file; {ONLY}]"),
        ({"type": "search_result", "title": "T", "source": "S", "content": [{"type": "text", "text": "D"}]}, "T\nS\nD"),
        ({"type": "tool_reference", "tool_name": "look"}, "[tool look]"),
        ({"type": "compaction", "content": "It was so."}, "It was so."),
        ({"type": "compaction", "content": None}, ""),
        ({"type": "redacted_thinking", "data": "x"}, ""),
    ],
)  # fmt: skip
def test_what_has_no_text_is_told_in_one_or_skipped(part, text):
    end = "\n" if part != "plain" and part["type"] in ("file", "input_file", "document", "search_result") else ""
    parts = [{"type": "text", "text": "<"}, part, {"type": "text", "text": ">"}]
    assert text_of(parts, "content") == f"<{end}{text}{end}>"
    assert text_of(part, "content") == text


@pytest.mark.parametrize(
    "part", [5, None, {}, {"type": None}, {"type": ["text"]}, {"type": "hologram"}, {"type": "text"}]
)
def test_what_is_no_part_is_named(part):
    with pytest.raises(Refused, match=r"messages\.0\.content: (only text can be read here, not .|a text part has no)"):
        text_of([part], "messages.0.content")


def test_the_result_of_a_tool_may_be_any_json():
    assert result_of({"a": [1, None], "encrypted_content": "x"}, "content") == '{"a": [1, null]}'
    assert result_of([{"type": "logs", "logs": "5"}, PNG], "content") == f'[{{"type": "logs", "logs": "5"}}, "{IMAGE}"]'
    assert result_of(5, "content") == "5"
    assert result_of(None, "content") == ""


def test_what_the_provider_ran_is_a_call_with_its_result(client):
    found = [{"type": "web_search_result", "title": "T", "url": "U", "encrypted_content": "x", "page_age": None}]
    for call, result in [("server_tool_use", "web_search_tool_result"), ("mcp_tool_use", "mcp_tool_result")]:
        content = [
            {"type": "text", "text": "I look."},
            {"type": call, "id": "1", "name": "web_search", "input": {"query": "Q"}},
            {"type": result, "tool_use_id": "1", "content": found},
            {"type": "text", "text": "It is T."},
        ]
        shown = prompt(client, "messages", [ASK, {"role": "assistant", "content": content}, ASK])
        assert '{"name": "web_search", "arguments": {"query": "Q"}}' in shown
        assert '[{"type": "web_search_result", "title": "T", "url": "U", "page_age": null}]' in shown
        assert shown.index("I look.") < shown.index('"U"') < shown.index("It is T.")


def test_older_functions_and_custom_calls_of_chat_are_read(client):
    said = {
        "role": "assistant",
        "content": None,
        "refusal": "No.",
        "function_call": {"name": "time", "arguments": "{}"},
    }
    custom = {"id": "1", "type": "custom", "custom": {"name": "patch", "input": "+ a"}}
    history = [ASK, said, {"role": "function", "name": "time", "content": "noon"}]
    history += [
        {"role": "assistant", "tool_calls": [custom]},
        {"role": "tool", "tool_call_id": "1", "content": "Done."},
    ]
    shown = prompt(client, "chat/completions", history)
    for part in ("No.", '{"name": "time", "arguments": {}}', "tool\nnoon", '{"input": "+ a"}', "tool\nDone."):
        assert part in shown


ITEMS = [  # and what is shown of them
    ([{"type": "web_search_call", "id": "1", "action": {"type": "search", "query": "Q"}}], []),
    ([{"type": "compaction", "encrypted_content": "x"}, {"type": "mcp_list_tools", "tools": []}], []),
    ([{"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}], "encrypted_content": "x"}], []),
    (
        [{"type": "custom_tool_call", "call_id": "1", "name": "patch", "input": "+ a"},
         {"type": "custom_tool_call_output", "call_id": "1", "output": "Done."}],
        ['{"name": "patch", "arguments": {"input": "+ a"}}', "Done."],
    ),
    (
        [{"type": "function_call", "call_id": "1", "namespace": "mcp__x", "name": "look", "arguments": "{}"},
         {"type": "function_call", "call_id": "2", "name": "mcp__x__look", "arguments": "{}"}],
        ['"mcp__x__look", "arguments": {}}\n</tool_call><tool_call>\n{"name": "mcp__x__look", "arguments": {}}'],
    ),
    (
        [{"type": "local_shell_call", "call_id": "1", "action": {"type": "exec", "command": ["ls"], "env": {}}},
         {"type": "local_shell_call_output", "id": "1", "output": "a.c"}],
        ['{"name": "local_shell", "arguments": {"type": "exec", "command": ["ls"], "env": {}}}', "a.c"],
    ),
    (
        [{"type": "shell_call", "call_id": "1", "action": {"commands": ["ls"]}},
         {"type": "shell_call_output", "call_id": "1", "output": [{"stdout": "a.c", "outcome": {"type": "timeout"}}]}],
        ['{"name": "shell", "arguments": {"commands": ["ls"]}}', '[{"stdout": "a.c", "outcome": {"type": "timeout"}}]'],
    ),
    (
        [{"type": "apply_patch_call", "call_id": "1", "operation": {"type": "delete_file", "path": "a.c"}},
         {"type": "apply_patch_call_output", "call_id": "1", "status": "failed"}],
        ['{"name": "apply_patch", "arguments": {"type": "delete_file", "path": "a.c"}}', "failed"],
    ),
    (
        [{"type": "code_interpreter_call", "id": "1", "code": "5", "outputs": [{"type": "logs", "logs": "5"}]}],
        ['{"name": "code_interpreter", "arguments": {"code": "5"}}', '[{"type": "logs", "logs": "5"}]'],
    ),
    ([{"type": "mcp_call", "id": "1", "name": "look", "arguments": "{}", "output": "a.c"}], ['"look"', "a.c"]),
    ([{"type": "image_generation_call", "id": "1", "result": "iVBORw0KGgo="}], ["image_generation", IMAGE]),
    (
        [{"type": "computer_call", "call_id": "1", "action": {"type": "screenshot"}},
         {"type": "computer_call_output", "call_id": "1", "output": {"type": "computer_screenshot", "image_url": "x"}}],
        ['{"name": "computer", "arguments": {"action": {"type": "screenshot"}}}', IMAGE],
    ),
    (
        [{"type": "tool_search_call", "call_id": "1", "execution": "client", "arguments": {"query": "Q"}},
         {"type": "tool_search_output", "call_id": "1", "tools": [{"type": "function", **TIME}]}],
        ['{"name": "tool_search", "arguments": {"query": "Q"}}', "tool\ntime", '{"name": "time", "description": "now"'],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("items", "shown"), ITEMS)
def test_items_of_every_type_are_read(client, items, shown):
    text = prompt(client, "responses", [ASK, *items, ASK])
    assert all(part in text for part in shown)
    if not shown:
        assert text == prompt(client, "responses", [ASK, ASK])


CUSTOM = {
    "name": "patch",
    "description": "It edits.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "G"},
}
LOOK = {
    "type": "function",
    "name": "look",
    "parameters": {"type": "object", "properties": {}, "additionalProperties": False},
}
SPACE = {"type": "namespace", "name": "mcp__x", "description": "Of X.", "tools": [LOOK, {"type": "custom", **CUSTOM}]}
FORCED = {"seed": 1, "temperature": 0.8, "max_tokens": 300, "max_output_tokens": 300}


def forced(client, choice, *tools):
    """The item of a forced call, and the events of the same answer, streamed."""
    # Strings of the tiny model end soon.
    bias = dict.fromkeys(client.model.target.vocab.encode('"', add_bos=False, parse_special=False), 9)
    body = {"input": "hello", "tools": list(tools), "tool_choice": choice, "logit_bias": bias, **FORCED}
    (item,) = client.post("/v1/responses", json=body).json()["output"]
    events = [json.loads(data) for data in stream(client, "/v1/responses", body)]
    (done,) = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    (added,) = [event["item"] for event in events if event["type"] == "response.output_item.added"]
    assert {**done, "id": "", "call_id": ""} == {**item, "id": "", "call_id": ""}
    assert (added["type"], added["id"], added["status"]) == (done["type"], done["id"], "in_progress")
    return item, events


@pytest.mark.parametrize(
    ("namespace", "whole"), [("mcp__x", "mcp__x__look"), ("mcp__x__", "mcp__x__look"), ("", "look"), (None, "look")]
)
def test_two_underscores_stand_between_a_namespace_and_a_name(namespace, whole):
    assert flat(namespace, "look") == whole


def test_tools_of_a_namespace_are_called_by_it_and_their_name(client):
    item, _ = forced(client, {"type": "function", "name": "look", "namespace": "mcp__x"}, SPACE)
    assert {name: item[name] for name in ("type", "namespace", "name", "arguments")} == {
        "type": "function_call", "namespace": "mcp__x", "name": "look", "arguments": "{}",
    }  # fmt: skip
    shown = prompt(client, "responses", [ASK], tools=[SPACE])
    assert '{"name": "mcp__x__look", "parameters": ' in shown
    assert '"description": "mcp__x: Of X."' in shown
    assert "It edits.\\n\\nIts input is by this lark grammar:\\n\\nG" in shown
    item, _ = forced(client, {"type": "custom", "name": "mcp__x__patch"}, SPACE)
    assert (item["type"], item["namespace"], item["name"]) == ("custom_tool_call", "mcp__x", "patch")


def test_a_custom_tool_is_called_with_a_text(client):
    item, events = forced(client, {"type": "custom", "name": "patch"}, {"type": "custom", **CUSTOM})
    assert item["type"] == "custom_tool_call"
    assert item["name"] == "patch"
    told = [event for event in events if event["type"].startswith("response.custom_tool_call_input")]
    assert [event["type"].rpartition(".")[2] for event in told] == ["delta", "done"]
    assert told[0]["delta"] == told[1]["input"] == item["input"]
    assert not any("arguments" in event["type"] for event in events)


@pytest.mark.parametrize(
    ("kind", "member"), [("local_shell", "action"), ("shell", "action"), ("apply_patch", "operation")]
)
def test_tools_that_the_provider_knows_and_the_client_runs_are_called(client, kind, member):
    item, _ = forced(client, {"type": kind}, {"type": kind})
    assert item["type"] == f"{kind}_call"
    assert set(item[member]) >= {"local_shell": {"type", "env"}, "shell": {"commands"}, "apply_patch": {"path"}}[kind]


def test_a_search_for_tools_is_called_and_what_it_finds_may_be_called(client):
    schema = {"type": "object", "properties": {"query": {"enum": ["a", "b"]}}, "required": ["query"]}
    search = {"type": "tool_search", "execution": "client", "parameters": schema | {"additionalProperties": False}}
    item, _ = forced(client, {"type": "tool_search"}, search)
    assert (item["type"], item["execution"]) == ("tool_search_call", "client")
    assert item["arguments"]["query"] in ("a", "b")
    found = {"type": "tool_search_output", "call_id": item["call_id"], "tools": [SPACE]}
    answer = client.post("/v1/responses", json={
        "input": [ASK, item, found], "tools": [search], "tool_choice": {"type": "function", "name": "mcp__x__look"},
    })  # fmt: skip
    assert answer.json()["output"][0]["namespace"] == "mcp__x"


def test_a_custom_tool_of_chat_is_called_with_a_text(client):
    bias = dict.fromkeys(client.model.target.vocab.encode('"', add_bos=False, parse_special=False), 9)
    tools, choice = [{"type": "custom", "custom": CUSTOM}], {"type": "custom", "custom": {"name": "patch"}}
    body = {"messages": [ASK], "tools": tools, "tool_choice": choice, "logit_bias": bias, **FORCED}
    (call,) = client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["tool_calls"]
    assert call["type"] == "custom"
    assert set(call["custom"]) == {"name", "input"}
    parts = [json.loads(data)["choices"][0]["delta"] for data in stream(client, "/v1/chat/completions", body)[:-1]]
    (streamed,) = [call for part in parts for call in part.get("tool_calls", ())]
    assert streamed["custom"] == call["custom"]


def test_tools_of_anthropic_that_the_client_runs_have_their_schemas(client):
    tools = [
        {"type": "bash_20250124", "name": "bash"}, {"type": "text_editor_20250728", "name": "edit"},
        {"type": "memory_20250818", "name": "memory"}, {"name": "plain"}, {"type": "tool_search_tool_regex_20251119"},
    ]  # fmt: skip
    shown = prompt(client, "messages", [ASK], tools=tools)
    for part in ('"name": "bash"', '"name": "edit"', '"name": "memory"', '"name": "plain"', '"command"', '"old_str"'):
        assert part in shown


def test_what_codex_always_offers_is_left_out_beside_tools_of_its_own(client):
    for kind in ("web_search", "image_generation"):
        assert '"look"' in prompt(client, "responses", [ASK], tools=[{"type": kind}, LOOK])


VALUES = st.sampled_from([None, 5, "", "a", [], {}, [None], {"type": "text"}, ["a"], True])
PARTS = [
    PNG,
    URL,
    INPUT,
    *READ["messages"][1]["content"],
    *READ["messages"][2]["content"],
    {"type": "text", "text": "a"},
]
MESSAGES = [*READ["chat/completions"], *READ["messages"], *(item for items, _ in ITEMS for item in items)]
OFFERS = [SPACE, LOOK, {"type": "custom", "custom": CUSTOM}, {"type": "function", "function": TIME}, {"type": "shell"}]
OFFERS += [{"type": "custom", **CUSTOM}, {"name": "a", "input_schema": {}}, {"type": "bash_20250124", "name": "bash"}]
CHOICES = [
    {"type": "function", "function": {"name": "time"}},
    {"type": "allowed_tools", "mode": "auto", "tools": OFFERS},
]


@st.composite
def broken(draw, values):
    """One of the values, with another value in any place."""
    found = json.loads(json.dumps(draw(st.sampled_from(values))))
    at = found
    while at and isinstance(at, dict | list):
        key = draw(st.sampled_from(sorted(at) if isinstance(at, dict) else range(len(at))))
        if not isinstance(at[key], dict | list) or not at[key] or draw(st.booleans()):
            at[key] = draw(VALUES)
            break
        at = at[key]
    return found


@given(
    st.sampled_from(list(PATHS)), st.lists(broken(MESSAGES), min_size=1, max_size=4),
    st.lists(broken(PARTS), max_size=3), st.lists(broken(OFFERS), max_size=3), st.one_of(VALUES, broken(CHOICES)),
)  # fmt: skip
def test_whatever_is_sent_is_read_or_refused(path, history, parts, tools, choice):
    sent = body_of(path, [*history, {"role": "assistant", "content": parts}, {"role": "user", "content": parts}])
    kind = {"messages": messages.MessagesBody, "responses": responses.ResponsesBody}.get(path, chat.ChatBody)
    with suppress(Refused, UsageError):
        body = parsed_body(json.dumps({**sent, "tools": tools, "tool_choice": choice}).encode(), kind)
        question = PATHS[path].question_of(body)
        for tool in question.tools.all if question.tools else ():
            assert tool.shown["function"]["parameters"]["type"]
        assert all(isinstance(call, Call) for turn in question.conversation.turns for call in turn.calls)
