"""What agents need of the server, with a model that follows a script."""

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("starlette", reason="the server is not installed: pip install 'edgespec[server]'")
pytest.importorskip("uvicorn", reason="the server is not installed: pip install 'edgespec[server]'")

from scripted import asking as served
from scripted import turns

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Äöln"}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


def asks_and_tells(prompt):
    """Calls the tool once, then tells what it returned."""
    role, text = turns(prompt, "<s>", "</s>")[-1]
    return f"It is {text}." if role == "tool" else f"I ask.\n{CALL}"


def calls_the_secret_word(prompt):
    """By the name that the prompt has for it."""
    name = re.search(r'"name": "(\w*secret_word)"', prompt)[1]
    return f'<tool_call>\n{{"name": "{name}", "arguments": {{}}}}\n</tool_call>'


@pytest.mark.parametrize("options", [{}, {"temperature": 1.5, "seed": 3, "n": 3}])
def test_a_script_is_followed_turn_by_turn(options):
    asked = {"role": "user", "content": "how is the weather?"}
    with served(asks_and_tells) as client:

        def said(*messages):
            body = {"messages": messages, "tools": TOOLS, **options}
            choices = client.post("/v1/chat/completions", json=body).json()["choices"]
            assert len(choices) == options.get("n", 1)
            return [choice["message"] for choice in choices]

        for answer in said(asked):
            (call,) = answer["tool_calls"]
            assert (answer["content"].strip(), json.loads(call["function"]["arguments"])) == (
                "I ask.",
                {"city": "Äöln"},
            )
        result = {"role": "tool", "content": "rain", "tool_call_id": call["id"]}
        assert {again["content"] for again in said(asked, answer, result)} == {"It is rain."}


REQUESTS = json.loads((Path(__file__).parent / "clients/requests.json").read_text("utf-8"))  # made by run.py --record


def offered(tools):
    """(namespace, name) of the functions among a request's tools."""
    for tool in tools:
        for inner in tool.get("tools", [tool.get("function", tool)]):
            if "name" in inner:
                yield tool.get("name") if "tools" in tool else None, inner["name"]


@pytest.mark.parametrize("agent", REQUESTS)
def test_an_agent_that_has_read_an_image_is_answered_with_a_call_by_its_own_names(agent):
    path, body = REQUESTS[agent]["path"], REQUESTS[agent]["body"]
    with served(calls_the_secret_word, context=40_000) as client:
        answer = client.post(path, json=body | {"stream": False})
        assert answer.status_code == 200, answer.text
        (prompt,) = client.asked
    assert all(name in prompt for _, name in offered(body["tools"]))
    assert "this model reads only text" in prompt or agent == "Continue"  # which reads the bytes
    found = answer.json()
    if "choices" in found:
        call = found["choices"][0]["message"]["tool_calls"][0]["function"]
    else:
        items = found.get("output") or found["content"]
        (call,) = [item for item in items if item["type"] in ("function_call", "tool_use")]
    assert (call.get("namespace"), call["name"]) in offered(body["tools"])
