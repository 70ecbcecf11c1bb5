"""What agents need of the server, with a model that follows a script."""

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("starlette", reason="the server is not installed: pip install 'edgespec[server]'")
pytest.importorskip("uvicorn", reason="the server is not installed: pip install 'edgespec[server]'")

from scripted import scripted, turns
from starlette.testclient import TestClient

from edgespec.server.app import make_app
from edgespec.server.service import Service

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Äöln"}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


def script(prompt):
    """Calls the tool once, then tells what it returned."""
    found = turns(prompt, "<s>", "</s>")
    if found[-1][0] == "tool":
        return f"It is {found[-1][1]}."
    return f"I ask.\n{CALL}" if "weather" in prompt else "Hello."


@pytest.fixture(scope="module")
def client():
    with scripted(script) as model, TestClient(make_app(Service(model, "tiny")), "http://127.0.0.1:8080") as client:
        client.asked = model.target.asked
        yield client


@pytest.mark.parametrize("options", [{}, {"temperature": 1.5, "seed": 3, "n": 3}])
def test_a_script_is_followed_turn_by_turn(client, options):
    body = {"messages": [{"role": "user", "content": "how is the weather?"}], "tools": TOOLS, **options}
    for choice in client.post("/v1/chat/completions", json=body).json()["choices"]:
        said = choice["message"]
        assert said["content"].strip() == "I ask."
        assert json.loads(said["tool_calls"][0]["function"]["arguments"]) == {"city": "Äöln"}
    result = {"role": "tool", "content": "rain", "tool_call_id": said["tool_calls"][0]["id"]}
    again = client.post("/v1/chat/completions", json=body | {"messages": [*body["messages"], said, result]}).json()
    assert [choice["message"]["content"] for choice in again["choices"]] == ["It is rain."] * options.get("n", 1)


REQUESTS = json.loads((Path(__file__).parent / "clients/requests.json").read_text("utf-8"))  # made by run.py --record


def offered(tools):
    """(namespace, name) of the functions among a request's tools."""
    for tool in tools:
        for inner in tool.get("tools", [tool.get("function", tool)]):
            if "name" in inner:
                yield tool.get("name") if "tools" in tool else None, inner["name"]


@pytest.fixture
def calls_the_secret_word():
    def script(prompt):
        name = re.search(r'"name": "(\w*secret_word)"', prompt)[1]
        return f'<tool_call>\n{{"name": "{name}", "arguments": {{}}}}\n</tool_call>'

    with (
        scripted(script, context=40_000) as model,
        TestClient(make_app(Service(model, "tiny")), "http://127.0.0.1:8080") as client,
    ):
        client.asked = model.target.asked
        yield client


@pytest.mark.parametrize("agent", REQUESTS)
def test_what_agents_ask_after_they_have_read_an_image_is_answered(agent, calls_the_secret_word):
    """The answer calls a tool of an MCP server by the names that the agent gave it."""
    path, body = REQUESTS[agent]["path"], REQUESTS[agent]["body"]
    answer = calls_the_secret_word.post(path, json=body | {"stream": False})
    assert answer.status_code == 200, answer.text
    (prompt,) = calls_the_secret_word.asked
    assert all(name in prompt for _, name in offered(body["tools"]))
    assert "square.png" in prompt
    found = answer.json()
    if "choices" in found:
        call = found["choices"][0]["message"]["tool_calls"][0]["function"]
    else:
        call = next(
            item for item in found.get("output", found.get("content")) if item["type"] in ("function_call", "tool_use")
        )
    assert (call.get("namespace"), call["name"]) in offered(body["tools"])
