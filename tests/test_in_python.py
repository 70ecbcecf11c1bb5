"""The server's answers in Python: calls of tools and all else, without a server."""

import asyncio
import json

import pytest

pytest.importorskip("starlette", reason="the server is not installed: pip install 'edgespec[server]'")

from scripted import scripted, turns
from test_server_agents import TOOLS, asks_and_tells

import edgespec
from edgespec.server.in_python import acompletion, completion

ASKED = {"role": "user", "content": "how is the weather?"}


def test_calls_come_as_from_the_server_and_their_results_go_back():
    with scripted(asks_and_tells) as model:
        answer = completion(model, messages=[ASKED], tools=TOOLS)
        message = answer["choices"][0]["message"]
        (call,) = message["tool_calls"]
        assert (answer["choices"][0]["finish_reason"], message["content"].strip()) == ("tool_calls", "I ask.")
        assert json.loads(call["function"]["arguments"]) == {"city": "Äöln"}
        result = {"role": "tool", "content": "rain", "tool_call_id": call["id"]}
        again = asyncio.run(acompletion(model, messages=[ASKED, message, result], tools=TOOLS))
        assert again["choices"][0]["message"]["content"] == "It is rain."
        assert [role for role, _ in turns(model.target.asked[-1], "<s>", "</s>")][-1] == "tool"


def test_its_text_is_that_of_chat():
    from test_closed import MESSAGES
    from test_server import served

    with served() as client:
        options = {"temperature": 0.9, "seed": 3, "max_tokens": 12}
        answer = completion(client.model, messages=MESSAGES, **options)
        assert answer["choices"][0]["message"]["content"] == client.model.chat(MESSAGES, **options).text


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        ({}, "messages is missing"),
        ({"messages": [{"role": "robot"}]}, "messages.0.role is 'robot', but must be one of "),
        ({"messages": [ASKED], "stream": True}, "stream is True, but must be left out: the answer comes whole"),
        ({"messages": [ASKED], "tools": [object()]}, "the request is "),
        ({"messages": [ASKED], "mirostat": 2}, "mirostat is not read here"),
    ],
)
def test_what_is_wrong_is_an_error_of_one_line(request_, says):
    with scripted(asks_and_tells) as model, pytest.raises(edgespec.UsageError) as caught:
        completion(model, **request_)
    assert str(caught.value).startswith(says)
    assert len(str(caught.value).splitlines()) == 1


def test_a_closed_model_and_a_running_loop_are_told():
    with scripted(asks_and_tells) as model:

        async def run():
            completion(model, messages=[ASKED])

        with pytest.raises(edgespec.UsageError, match=r"await acompletion$"):
            asyncio.run(run())
    with pytest.raises(edgespec.Closed):
        completion(model, messages=[ASKED])
