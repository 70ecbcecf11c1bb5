"""What a request may not be: one line says what is wrong."""

import json

import pytest

pytest.importorskip("starlette", reason="the server is not installed: pip install 'edgespec[server]'")
pytest.importorskip("llguidance", reason="needs llguidance: pip install 'edgespec[server]'")

from test_server import HELLO, served
from test_server_tools import TIME, TOOLS

from edgespec.server.wire import MOST_VALUES

BODIES = {
    "chat/completions": HELLO,
    "completions": {"prompt": "a"},
    "responses": {"input": "a"},
    "messages": HELLO | {"max_tokens": 3},
    "messages/count_tokens": HELLO,
}
BEGUN = [*HELLO["messages"], {"role": "assistant", "content": "hello you"}]
CONTINUED = {"messages": BEGUN}  # the assistant's last message begins the answer
REQUIRED = {"tool_choice": "required"}
MANY_VALUES = {"name": "f", "parameters": {"properties": {"a": {"enum": [1] * 2**16}}}}
REFUSED = [
    *(
        ("chat/completions", {"tools": [{"type": "function", "function": {"name": "look"} | odd}]}, f"tools: {says}")
        for odd, says in (
            ({"description": 5}, "the description of 'look' is 5, but must be a text"),
            ({"parameters": [1]}, "the parameters of 'look' must be the JSON schema of an object"),
            ({"parameters": {"properties": [1]}}, "the parameters of 'look' must be the JSON schema of an object"),
            ({"name": None}, "a function has no name"),
        )
    ),
    ("chat/completions", {"messages": None}, "messages is missing"),
    ("chat/completions", {"messages": []}, "messages is empty"),
    ("chat/completions", {"messages": "hello"}, "messages"),
    ("chat/completions", {"messages": [{"role": "cat", "content": "x"}]}, "messages.0.role is 'cat'"),
    (
        "chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "only text",
    ),
    ("chat/completions", {"messages": [{"role": "user", "content": 5}]}, "only text"),
    ("chat/completions", {"messages": [{"role": "user", "content": "\ud800"}]}, "surrogate"),
    ("chat/completions", {"temperature": -1}, "temperature is -1"),
    ("chat/completions", {"temperature": "hot"}, "temperature"),
    ("chat/completions", {"top_p": -0.1}, "top_p is -0.1"),
    ("chat/completions", {"min_p": 1.1}, "min_p is 1.1"),
    ("chat/completions", {"max_tokens": -2}, "max_tokens is -2"),
    ("chat/completions", {"n": 9}, "n is 9"),
    ("chat/completions", {"max_tokens": 0}, "max_tokens is 0"),
    ("chat/completions", {"stop": [""]}, "stop string"),
    ("chat/completions", {"stop": ["a"] * 17}, "17 stop strings"),
    ("chat/completions", {"logit_bias": {"a": 1}}, "logit_bias"),
    ("chat/completions", {"logit_bias": {"-1": 1}}, "logit_bias"),
    ("chat/completions", {"repetition_penalty": 1e39, "logprobs": True}, "repetition_penalty is 1e"),
    ("chat/completions", {"repetition_penalty": 1e-39, "logprobs": True}, "repetition_penalty is 1e"),
    ("chat/completions", {"presence_penalty": -1e39}, "presence_penalty is -1e"),
    ("chat/completions", {"logprobs": True, "top_logprobs": 21}, "top_logprobs is 21"),
    ("chat/completions", {"top_logprobs": 2}, "top_logprobs needs logprobs"),
    ("chat/completions", {"repeat_penalty": 1.1}, "repeat_penalty is not read here; use repetition_penalty"),
    ("chat/completions", {"typical_p": 0.5}, "typical_p is not read here; use top_p or min_p"),
    ("chat/completions", {"grammar": 'root ::= "a"'}, "grammar is not read here; use edgespec.lark"),
    ("chat/completions", {"edgespec": {"trace": "pass"}}, "edgespec.trace"),
    ("chat/completions", {"edgespec": {"trace": "passes"}}, "edgespec.trace is for streams"),
    ("chat/completions", {"edgespec": {"regex": "a", "lark": "start: /a/"}}, "edgespec.regex and edgespec.lark cannot"),
    (
        "chat/completions",
        {"edgespec": {"regex": "a"}, "response_format": {"type": "json_object"}},
        "response_format and edgespec.regex cannot be had together",
    ),
    ("chat/completions", {"tools": [{"type": "function"}]}, "a function has no name"),
    (
        "chat/completions",
        {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "maybe"},
        "tool_choice",
    ),
    ("chat/completions", {"messages": [{"role": "assistant", "tool_calls": [1]}]}, "tool_calls"),
    ("chat/completions", {"response_format": {"type": "xml"}}, "no type 'xml'"),
    (
        "chat/completions",
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
        "schema of type object",
    ),
    ("chat/completions", {"response_format": {"type": "json_object", "schema": 1}}, "schema of type object"),
    (
        "chat/completions",
        {"response_format": {"type": "json_schema", "schema": {"type": "cat"}}},
        "json_schema cannot be used",
    ),
    (
        "chat/completions",
        {"response_format": {"type": "json_schema", "schema": {"enum": ["a" * 70000]}}},
        "longer than 65536",
    ),
    (
        "chat/completions",
        {"response_format": {"type": "json_schema", "schema": {"multipleOf": 99991}, "strict": True}},
        "multipleOf is 99991",
    ),
    (
        "chat/completions",
        {"response_format": {"type": "json_schema", "schema": {"uniqueItems": True}, "strict": True}},
        "uniqueItems",
    ),
    ("chat/completions", {"edgespec": {"regex": "("}}, "regex cannot be used"),
    ("chat/completions", {"edgespec": {"lark": "start: nothing"}}, "lark cannot be used"),
    ("chat/completions", {"messages": [{"role": "user", "content": "a" * 1600}]}, "length is 1000"),
    (
        "messages",
        {"edgespec": {"plain": True}},
        "edgespec.plain is not for this interface; /v1/chat/completions takes it",
    ),
    ("messages", {"edgespec": {"plain": False, "lark": "start: /a/"}}, "edgespec.lark is not for this interface"),
    ("responses", {"edgespec": {"regex": "a", "plain": True}}, "edgespec.plain is not for this interface"),
    ("responses", {"edgespec": {"trace": "passes"}}, "edgespec.trace is not for this interface"),
    ("responses", {"edgespec": {"speculate_tools": True}}, "edgespec.speculate_tools is not for this interface"),
    ("completions", {"edgespec": {"speculate_tools": True}}, "edgespec.speculate_tools is not for this interface"),
    ("chat/completions", {"messages": HELLO["messages"] * 16385}, "must be a list with at most 16384 items"),
    ("messages/count_tokens", {"messages": HELLO["messages"] * 16385}, "must be a list with at most 16384 items"),
    ("responses", {"input": HELLO["messages"] * 16385}, "must be a text or a list with at most 16384 items"),
    (
        "chat/completions",
        {
            "messages": [
                {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}] * 16384},
                HELLO["messages"][0],
            ]
        },
        "there are 16386 messages and calls, but at most 16384 may be given",
    ),
    (
        "completions",
        {"prompt": "a", "logit_bias": dict.fromkeys(range(16385), 1)},
        "must be a mapping with at most 16384 items",
    ),
    ("chat/completions", {"model": "a" * 600}, "model is 'aaa"),
    ("messages", {"model": "a" * 600}, "model is 'aaa"),
    ("responses", {"input": "a", "metadata": {"a": "b" * 2**22}}, "metadata, reasoning: they have more than 4194304"),
    ("chat/completions", CONTINUED | {"response_format": {"type": "json_object"}}, "are for whole answers"),
    ("chat/completions", CONTINUED | {"edgespec": {"regex": "a"}}, "are for whole answers"),
    (
        "messages",
        CONTINUED | {"tools": [{"name": "f", "input_schema": {}}], "tool_choice": {"type": "any"}},
        "whole answer",
    ),
    ("messages", {"messages": [BEGUN[0], {"role": "assistant", "content": "Yes. "}]}, "ends with white space"),
    ("chat/completions", REQUIRED, "no tool of type function"),
    ("chat/completions", REQUIRED | {"functions": [TIME], "tool_choice": "auto"}, "give them as tools"),
    ("responses", REQUIRED | {"tools": [{"type": "web_search"}]}, "is run by the provider"),
    ("messages", REQUIRED | {"max_tokens": 5, "tool_choice": {"type": "any"}}, "no tool of type function"),
    ("chat/completions", {"tool_choice": {"function": "x"}}, "tool_choice.function is 'x', but must be an object"),
    (
        "chat/completions",
        {"tool_choice": {"function": ["x"]}, "tools": [{"type": "function"}]},
        "tool_choice.function is ['x'], but must be an object",
    ),
    (
        "responses",
        {"input": [{"type": "reasoning", "content": 5}, HELLO["messages"][0]]},
        "input.0.content is 5, but must be a list",
    ),
    (
        "responses",
        {"input": "a", "text": {"format": "json_object"}},
        "text.format is 'json_object', but must be an object with a type",
    ),
    ("completions", {"prompt": []}, "there are 0 prompts, but from 1 to 16 may be given"),
    ("completions", {"prompt": "a", "logit_bias": {"99999999999999999999": 1}}, "but must be from 0 to 2147483647"),
    ("completions", {"prompt": "a", "logit_bias": {"5": 1e300}}, "logit_bias of 5 is 1e+300"),
    (
        "responses",
        {
            "input": [
                {"role": "assistant", "content": "a", "tool_calls": "x"},
                {"type": "function_call", "name": "f", "arguments": "{}"},
            ]
        },
        "calls are items of their own here",
    ),
    ("chat/completions", {"guided_json": {}, "regex": "a"}, "regex and guided_json cannot be had together"),
    (
        "chat/completions",
        {"structured_outputs": {"json": {}, "choice": ["a"]}},
        "structured_outputs.json and structured_outputs.choice",
    ),
    (
        "chat/completions",
        {"structured_outputs": {"grammar": "a"}},
        "structured_outputs.grammar is not read here; use edgespec.lark",
    ),
    (
        "chat/completions",
        {"structured_outputs": {"structural_tag": "a"}},
        "structured_outputs.structural_tag is not read here",
    ),
    ("chat/completions", {"structured_outputs": {"regex": 5}}, "the regex is 5, but must be a text"),
    (
        "chat/completions",
        {"structured_outputs": {"choice": []}},
        "structured_outputs.choice is [], but must be a list of texts",
    ),
    ("chat/completions", {"guided_choice": "a"}, "guided_choice"),
    ("chat/completions", {"guided_json": "a"}, "the JSON schema is not a JSON object"),
    (
        "chat/completions",
        {"guided_regex": "a", "response_format": {"type": "json_object"}},
        "response_format and guided_regex cannot",
    ),
    ("messages", {"guided_json": {}}, "guided_json is not read here; use output_config.format."),
    (
        "messages",
        {"structured_outputs": {"json": {}}},
        "structured_outputs is not read here; use output_config.format.",
    ),
    ("messages", {"n_predict": 5}, "n_predict is not read here; use max_tokens."),
    ("messages", {"stop": ["a"]}, "stop is not read here; use stop_sequences."),
    (
        "messages",
        {"response_format": {"type": "json_object"}},
        "response_format is not read here; use output_config.format.",
    ),
    ("messages", {"grammar": "a"}, "grammar is not read here; use edgespec.lark of /v1/chat/completions."),
    ("responses", {"n_predict": 5}, "n_predict is not read here; use max_output_tokens."),
    ("responses", {"response_format": {"type": "json_object"}}, "response_format is not read here; use text.format."),
    ("responses", {"n": 2}, "n is not read here."),
    ("responses", {"stop": "a"}, "stop is not read here."),
    ("chat/completions", {"max_new_tokens": 5}, "max_new_tokens is not read here; use max_tokens."),
    ("chat/completions", {"guided_grammar": "a"}, "guided_grammar is not read here; use edgespec.lark."),
    ("chat/completions", {"think": False}, "think is not read here; use enable_thinking."),
    ("completions", {"enable_thinking": True}, "enable_thinking is not read here."),
    ("chat/completions", {"echo": True}, "echo is not read here."),
    (
        "chat/completions",
        b'{"messages": [' + b"[]," * MOST_VALUES + b"[]]}",
        f"the body has more than {MOST_VALUES} values.",
    ),
    ("chat/completions", b"", "the body "),
    ("chat/completions", b"{", "the body "),
    ("chat/completions", b'{"messages": NaN}', "the body "),
    ("chat/completions", b'{"a": "\xff"}', "the body "),
    ("chat/completions", b"[1]", "the body "),
    ("chat/completions", b'{"a":' + b"[" * 99 + b"]" * 99 + b"}", "the body "),
    ("chat/completions", b"[" * 10**5, "the body "),
    ("chat/completions", {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "cook"}}}, "'cook'"),
    ("chat/completions", {"tools": TOOLS * 65}, "130 tools"),
    ("chat/completions", {"tools": TOOLS, "tool_choice": "required", "edgespec": {"regex": "a+"}}, "together"),
    (
        "messages",
        {"tools": [{"name": "time", "input_schema": {}}], "tool_choice": {"type": "tool"}},
        "type tool needs a name",
    ),
    (
        "chat/completions",
        {"tools": [{"type": "function", "function": MANY_VALUES}]},
        "the tools have 65543 values in all, but at most 65536 may be given.",
    ),
    ("chat/completions", {"response_format": {"type": "a" * 2**20}}, "response_format: there is no type 'aaa"),
    ("responses", {"previous_response_id": "resp_1"}, "Previous response with id 'resp_1' not found."),
    ("responses", {"conversation": "conv_1"}, "give previous_response_id, or all of it as input"),
    ("messages", {"max_tokens": None}, "max_tokens is missing"),
    ("messages", {"max_tokens": 0}, "max_tokens is 0"),
    ("messages", {"messages": [{"role": "cat", "content": ""}]}, "messages.0.role is 'cat'"),
    ("messages", {"output_config": {"format": {"type": "xml"}}}, "must be an object of type 'json_schema'"),
    ("messages", {"output_format": {"type": "xml"}}, "must be an object of type 'json_schema'"),
    ("messages", {"output_config": {"format": "json"}}, "must be an object of type 'json_schema'"),
    ("messages", {"output_format": "json"}, "must be an object of type 'json_schema'"),
    ("messages", {"output_config": {"format": {"type": "json_schema"}}}, "a schema of type object is missing"),
    ("messages", {"output_format": {"type": "json_schema"}}, "a schema of type object is missing"),
    ("responses", {"top_logprobs": 2}, "/v1/chat/completions takes logprobs"),
    ("responses", {"include": ["message.output_text.logprobs"]}, "/v1/chat/completions takes logprobs"),
    ("chat/completions", {"tools": [{"type": "web_search"}]}, "tools.0: a tool of type 'web_search'"),
    ("chat/completions", {"tools": [{"type": "code_interpreter"}]}, "tools.0: a tool of type 'code_interpreter'"),
    ("messages", {"tools": [{"type": "web_search_20250305"}]}, "tools.0: 'web_search_20250305'"),
    ("messages", {"tools": [{"type": "web_fetch_20250910"}]}, "tools.0: 'web_fetch_20250910'"),
    ("messages", {"tools": [{"type": "code_execution_20250825"}]}, "tools.0: 'code_execution_20250825'"),
    ("messages", {"tools": [{"type": "computer_20250124"}]}, "tools.0: 'computer_20250124'"),
    ("messages", {"tools": [{"type": "mcp_toolset"}]}, "tools.0: 'mcp_toolset'"),
    ("responses", {"tools": [{"type": "file_search"}]}, "tools.0: a tool of type 'file_search'"),
    ("responses", {"tools": [{"type": "code_interpreter"}]}, "tools.0: a tool of type 'code_interpreter'"),
    ("responses", {"tools": [{"type": "mcp"}]}, "tools.0: a tool of type 'mcp'"),
    ("responses", {"tools": [{"type": "computer"}]}, "tools.0: a tool of type 'computer'"),
    ("responses", {"tools": [{"type": "computer_use_preview"}]}, "tools.0: a tool of type 'computer_use_preview'"),
    ("responses", {"tools": [{"type": "hologram"}]}, "tools.0: a tool of type 'hologram'"),
    ("messages", {"mcp_servers": [{"url": "x"}]}, "mcp_servers: this server calls no others"),
    ("responses", {"tools": [{"type": "web_search"}]}, "'web_search' is run by the provider"),
    ("responses", {"tools": [{"type": "image_generation"}]}, "'image_generation' is run by the provider"),
    (
        "responses",
        {"tools": [{"type": "function", "name": "look"}, {"type": "shell", "environment": {"type": "container_auto"}}]},
        "'shell' cannot be had here",
    ),
    (
        "responses",
        {"input": [HELLO["messages"][0], {"type": "configuration_update", "id": "5"}]},
        "input.1: items of type 'configuration_update' cannot be read here",
    ),
    (
        "responses",
        {"input": [HELLO["messages"][0], {"type": "x", "id": "5"}]},
        "input.1: items of type 'x' cannot be read here",
    ),
]


@pytest.fixture(scope="module")
def client():
    with served(context=1000) as client:
        yield client


@pytest.mark.parametrize(("path", "more", "says"), REFUSED)
def test_what_is_wrong_is_told_in_one_line(client, path, more, says):
    """Of a body with these fields, or of these bytes; behind its last word the line is taken to have a full stop."""
    content = more if isinstance(more, bytes) else json.dumps(BODIES[path] | more)
    answer = client.post(f"/v1/{path}", content=content, headers={"content-type": "application/json"})
    error = answer.json()["error"]
    assert says in f"{error['message']}."
    assert (answer.status_code, error["type"]) in ((400, "invalid_request_error"), (413, "request_too_large"))
    assert ("type" in answer.json()) == path.startswith("messages")
    assert len(answer.text.splitlines()) == 1 > error["message"].count("\n")
    assert len(answer.text) < 1200


@pytest.mark.parametrize(
    ("path", "body", "param", "says"),
    [
        ("chat/completions", HELLO | {"stop": 5}, "stop", "stop is 5, but must be a text or a list"),
        ("chat/completions", HELLO | {"stop": [5]}, "stop.0", "stop.0 is 5, but must be a text"),
        (
            "chat/completions",
            {"messages": [5]},
            "messages.0",
            "messages.0 is 5, but must be a mapping of names to values",
        ),
        ("responses", {}, "input", "input is missing"),
        (
            "responses",
            {"input": "hi", "edgespec": {"plian": True}},
            "edgespec.plian",
            "edgespec: unknown key 'plian'; did you mean plain?",
        ),
        ("completions", {"prompt": 5}, "prompt", "prompt is 5, but must be a text or a list"),
    ],
)
def test_what_is_wrong_in_a_body_is_named_with_all_that_would_be_right(client, path, body, param, says):
    error = client.post(f"/v1/{path}", json=body).json()["error"]
    assert (error["param"], error["message"]) == (param, says)
