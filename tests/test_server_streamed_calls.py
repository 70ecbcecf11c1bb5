"""Calls in streams: the name at once and arguments as they are written, put together by the clients' own code."""

import json
from contextlib import contextmanager

import pytest

pytest.importorskip("starlette", reason="the server is not installed: pip install 'edgespec[server]'")
pytest.importorskip("llguidance", reason="needs llguidance: pip install 'edgespec[server]'")

from test_server import HELLO
from test_server_forced import EVERY_KIND, SPELLED, call_in, form_named, writing
from test_server_forms import WRITTEN

USER = HELLO["messages"]
GIVEN = {"word": 'a "{b" \\ é</a>', "times": 2}
TOOLS = {"look_up": EVERY_KIND, "f": {"type": "object", "properties": {"city": {}, "days": {}}}, "g": {}}
KEY = "sk-none"


class Says:
    """What the clients' own code reads of a served model."""

    def __init__(self, client):
        self.client = client

    def chat(self):
        """An answer and a stream, in which the accumulator of the client has joined the deltas; `told`: these."""
        openai = pytest.importorskip("openai", reason="the client is not installed: pip install openai")
        api = openai.OpenAI(base_url="http://127.0.0.1:8080/v1", api_key=KEY, http_client=self.client).chat.completions
        tools = [{"type": "function", "function": {"name": k, "parameters": v}} for k, v in TOOLS.items()]
        asked = {"model": "any", "messages": USER, "tools": tools, "max_tokens": 900}
        whole = api.create(**asked).choices[0].message
        with api.stream(**asked) as events:
            self.told = [e.arguments_delta for e in events if e.type == "tool_calls.function.arguments.delta"]
            joined = events.get_final_completion().choices[0].message
        return [
            (one.content or "", [(c.function.name, c.function.arguments) for c in one.tool_calls or ()])
            for one in (whole, joined)
        ]

    def messages(self):
        anthropic = pytest.importorskip("anthropic", reason="the client is not installed: pip install anthropic")
        api = anthropic.Anthropic(base_url="http://127.0.0.1:8080", api_key=KEY, http_client=self.client).messages
        tools = [{"name": k, "input_schema": {"type": "object"} | v} for k, v in TOOLS.items()]
        asked = {"model": "any", "messages": USER, "tools": tools, "max_tokens": 900}
        whole = api.create(**asked)
        with api.stream(**asked) as events:
            self.told = [e.partial_json for e in events if e.type == "input_json"]
            joined = events.get_final_message()
        return [
            ("".join(b.text for b in one.content if b.type == "text"),
             [(b.name, b.input) for b in one.content if b.type == "tool_use"])
            for one in (whole, joined)
        ]  # fmt: skip

    def responses(self):
        openai = pytest.importorskip("openai", reason="the client is not installed: pip install openai")
        api = openai.OpenAI(base_url="http://127.0.0.1:8080/v1", api_key=KEY, http_client=self.client).responses
        tools = [{"type": "function", "name": k, "parameters": v} for k, v in TOOLS.items()]
        asked = {"model": "any", "input": USER, "tools": tools, "max_output_tokens": 900}
        whole = api.create(**asked)
        with api.stream(**asked) as events:
            events = list(events)
        done = [e.item for e in events if e.type == "response.output_item.done"]
        self.told = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
        joined = events[-1].response
        read = [
            (
                one.output_text,
                [(i.name, i.arguments) for i in one.output if i.type == "function_call" and i.status == "completed"],
            )
            for one in (whole, joined)
        ]
        assert [(i.name, i.arguments) for i in done if i.type == "function_call"] == read[1][1]
        return read


@contextmanager
def says(seen, text):
    with writing(seen, text) as client:
        yield Says(client)


@pytest.mark.covering(1)
@pytest.mark.parametrize("seen", SPELLED)
@pytest.mark.parametrize("dialect", ["chat", "messages", "responses"])
def test_the_deltas_of_a_call_join_to_the_answer_that_is_not_streamed(seen, dialect):
    with says(seen, call_in(form_named(seen), GIVEN)) as model:
        whole, joined = getattr(model, dialect)()
    assert joined == whole
    ((name, arguments),) = whole[1]
    assert (name, json.loads(arguments) if isinstance(arguments, str) else arguments) == ("look_up", GIVEN)
    assert len(list(filter(None, model.told))) > 3  # arguments come as they are written


@pytest.mark.covering(1)
@pytest.mark.parametrize("seen", WRITTEN)
@pytest.mark.parametrize("dialect", ["chat", "messages", "responses"])
def test_several_calls_in_a_stream_are_those_of_the_answer(seen, dialect):
    with says(seen, WRITTEN[seen]) as model:
        whole, joined = getattr(model, dialect)()
    assert joined == whole
    assert [name for name, _ in whole[1]] == ["f", "g"]


BROKEN = {
    "<tool_call>": '<tool_call>{"name": "f", "arguments": {"city": "a", "days": NaN}}</tool_call> is none.',
    "[TOOL_CALLS][ARGS]": '[TOOL_CALLS]f[ARGS]{"city": "a", days}',
    "<|python_tag|>": '{"name": "f", "parameters": {"city": "a"}} is none.',
}


@pytest.mark.parametrize("dialect", ["chat", "messages", "responses"])
@pytest.mark.parametrize("seen", BROKEN)
def test_what_has_begun_as_a_call_and_proves_to_be_none_is_content_and_no_whole_call(seen, dialect):
    with says(seen, BROKEN[seen]) as model:
        (text, calls), (streamed, _) = getattr(model, dialect)()
    assert (text, calls) == (BROKEN[seen], [])
    assert streamed == text
    with pytest.raises(json.JSONDecodeError):
        json.loads("".join(model.told))
