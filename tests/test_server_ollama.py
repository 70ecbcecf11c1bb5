"""Ollama's API, with a model that follows a script."""

import json
from datetime import datetime

import pytest

pytest.importorskip("starlette", reason="the server is not installed: pip install 'edgespec[server]'")
pytest.importorskip("uvicorn", reason="the server is not installed: pip install 'edgespec[server]'")

from reference.backend import CHAT_TEMPLATE
from scripted import TEMPLATE, Reply, scripted, turns
from scripted import asking as served
from starlette.testclient import TestClient
from test_server import served as served_model
from test_server import served_and_shown

from edgespec.errors import ModelError
from edgespec.server.app import make_app
from edgespec.server.service import Service

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Äöln"}}\n</tool_call>'
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Tells it.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
ASKED = {"role": "user", "content": "How is it?"}
# First requests as programs send them, but for their words.
REQUESTS = {
    "Home Assistant": (
        "chat",
        {
            "model": "tiny",
            "stream": True,
            "think": False,
            "keep_alive": "-1s",
            "options": {"num_ctx": 8192},
            "messages": [{"role": "system", "content": "You control a home."}, ASKED],
            "tools": TOOLS,
        },
    ),
    "LiteLLM": (
        "chat",
        {
            "model": "tiny",
            "messages": [ASKED],
            "options": {"temperature": 0.2, "num_predict": 90, "stop": ["ZZ"]},
            "stream": True,
        },
    ),
    "LangChain": (
        "chat",
        {
            "model": "tiny",
            "stream": True,
            "format": "",
            "keep_alive": None,
            "tools": [],
            "think": None,
            "options": {"mirostat": None, "num_ctx": None, "temperature": 0.0, "repeat_penalty": None, "stop": None},
            "messages": [{"role": "user", "content": "How is it?", "images": []}],
        },
    ),
    "Obsidian": ("chat", {"model": "tiny", "messages": [ASKED], "options": {"temperature": 0.5, "num_predict": -2}}),
    "JetBrains": (
        "chat",
        {
            "model": "tiny",
            "messages": [ASKED],
            "stream": True,
            "keep_alive": "5m",
            "tools": None,
            "options": {"num_ctx": 4096, "top_k": 40, "top_p": 0.9, "repeat_penalty": 1.1, "seed": 1, "num_gpu": 99},
        },
    ),
    "curl": ("generate", {"model": "tiny", "prompt": "How is it?"}),
}


def lines(answer):
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in answer.text.splitlines()]


def asks_and_tells(prompt):
    role, text = turns(prompt, "<s>", "</s>")[-1]
    return f"It is {text}." if role == "tool" else f"<think>\nHm.\n</think>\n\nI ask.\n{CALL}"


@pytest.mark.parametrize("kind", [None, "application/x-www-form-urlencoded", "application/json; charset=utf-8"])
@pytest.mark.parametrize("program", REQUESTS)
def test_requests_of_programs_are_answered_by_lines_with_and_without_a_type(program, kind):
    path, body = REQUESTS[program]
    with served(lambda prompt: "It\u2028rains. é") as client:
        head = {"content-type": kind} if kind else {}
        answer = client.post(f"/api/{path}", content=json.dumps(body), headers=head)
    *parts, last = lines(answer)
    said = [part["message"]["content"] if path == "chat" else part["response"] for part in parts]
    assert "".join(said) == "It\u2028rains. é"
    assert {part["done"] for part in parts} == {False}
    assert all(datetime.fromisoformat(part["created_at"]).tzinfo for part in parts)
    assert (last["done"], last["done_reason"], last["model"]) == (True, "stop", "tiny")
    assert last["eval_count"] == len("It\u2028rains. é".encode()) + 1
    assert last["prompt_eval_count"] > 10
    for name in ("total_duration", "prompt_eval_duration", "eval_duration"):
        assert last[name] > 0


@pytest.mark.parametrize("stream", [True, False])
def test_thoughts_and_calls_are_told_apart_and_come_back(stream):
    def said(client, *messages):
        answer = client.post("/api/chat", json={"messages": messages, "tools": TOOLS, "stream": stream})
        parts = lines(answer) if stream else [answer.json()]
        assert parts[-1]["done"]
        found = {"role": "assistant", "content": "", "thinking": "", "tool_calls": []}
        for part in parts:
            found |= {name: found[name] + part["message"].get(name, found[name][:0]) for name in list(found)[1:]}
        return found

    with served(asks_and_tells) as client:
        answer = said(client, ASKED)
        assert (answer["thinking"].strip(), answer["content"].strip()) == ("Hm.", "I ask.")
        (call,) = answer["tool_calls"]
        assert call["function"] == {"index": 0, "name": "weather", "arguments": {"city": "Äöln"}}
        result = {"role": "tool", "content": "rain", "tool_name": "weather"}
        assert said(client, ASKED, answer, result)["content"] == "It is rain."


@pytest.mark.parametrize("stream", [True, False])
def test_several_calls_are_numbered(stream):
    with served(lambda prompt: f"{CALL}\n{CALL}") as client:
        answer = client.post("/api/chat", json={"messages": [ASKED], "tools": TOOLS, "stream": stream})
    parts = lines(answer) if stream else [answer.json()]
    calls = [call for part in parts for call in part["message"].get("tool_calls", ())]
    assert [call["function"]["index"] for call in calls] == [0, 1]
    assert len({call["id"] for call in calls}) == 2


def test_a_silent_stream_has_empty_lines():
    with scripted(lambda prompt: Reply("x", after=0.5)) as model:
        app = make_app(Service(model, "tiny", ping_seconds=0.05))
        with TestClient(app, "http://127.0.0.1:8080") as client:
            first, *_, text, last = lines(client.post("/api/chat", json={"messages": [ASKED]}))
    assert (first["message"]["content"], first["done"]) == ("", False)
    assert (text["message"]["content"], last["done"]) == ("x", True)


def test_an_error_in_a_stream_is_its_last_line_and_a_long_prompt_a_status(monkeypatch):
    with served_model() as client:
        long = client.post("/api/chat", json={"messages": [{"role": "user", "content": "a" * 500}]})
        assert long.status_code == 400
        assert long.json()["error"].startswith("prompt is too long")

        def fails(batch):
            raise ModelError("the disk is gone")

        monkeypatch.setattr(client.model.target, "forward", fails)
        assert lines(client.post("/api/chat", json={"messages": [ASKED]}))[-1] == {"error": "the disk is gone"}


@pytest.mark.parametrize("ids", [True, False])
def test_a_result_belongs_to_the_call_that_it_names(ids):
    def call(name):
        return {"id": f"c_{name}", "function": {"name": name, "arguments": {}}}

    def result(name):
        told = {"tool_call_id": f"c_{name}"} if ids else {"tool_name": name}
        return {"role": "tool", "content": f"of {name}", **told}

    messages = [ASKED, {"role": "assistant", "tool_calls": [call("a"), call("b")]}, result("b"), result("a")]
    template = TEMPLATE.replace("{{ message.content }}", "{{ message.name }} = {{ message.content }}")
    with served(lambda prompt: "x", template=template) as client:
        assert client.post("/api/chat", json={"messages": messages}).status_code == 200
        assert [text for role, text in turns(client.asked[-1], "<s>", "</s>") if role == "tool"] == [
            "b = of b",
            "a = of a",
        ]


def test_a_prompt_is_a_question_and_raw_it_is_a_text():
    with served(lambda prompt: "x") as client:
        client.post("/api/generate", json={"prompt": "Hi", "system": "Be good."})
        assert turns(client.asked[-1], "<s>", "</s>") == [("system", "Be good."), ("user", "Hi")]
        client.post("/api/generate", json={"prompt": "<s>assistant\n", "raw": True})
        assert client.asked[-1].endswith("<s>assistant\n")
        assert "user" not in client.asked[-1]


@pytest.mark.parametrize(
    ("alive", "reason"), [({}, "load"), ({"keep_alive": 0}, "unload"), ({"keep_alive": -1}, "load")]
)
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", ["chat", "generate"])
def test_nothing_asked_is_answered_at_once(path, stream, alive, reason):
    with served(lambda prompt: "x") as client:
        answer = client.post(f"/api/{path}", json={"model": "tiny", "stream": stream, **alive})
        assert client.asked == []
    (line,) = lines(answer) if stream else [answer.json()]
    assert (line["done"], line["done_reason"]) == (True, reason)


def test_options_are_those_of_the_other_interfaces():
    options = {"temperature": 0.9, "top_p": 0.8, "top_k": 20, "min_p": 0.05, "seed": 7, "repeat_penalty": 1.2}
    equal = {"repetition_penalty" if name == "repeat_penalty" else name: value for name, value in options.items()}
    with served_model() as client:
        ours = client.post("/v1/chat/completions", json={"messages": [ASKED], "max_tokens": 9, **equal}).json()
        body = {"messages": [ASKED], "options": {**options, "num_predict": 9}, "stream": False}
        found = client.post("/api/chat", json=body).json()
        assert found["message"]["content"] == ours["choices"][0]["message"]["content"]
        assert (found["done_reason"], found["eval_count"], found["edgespec"]["seed"]) == ("length", 9, 7)


def test_a_penalty_over_no_token_is_none():
    def said(client, **options):
        body = {"messages": [ASKED], "stream": False, "options": {"temperature": 0, "num_predict": 30, **options}}
        return client.post("/api/chat", json=body).json()["message"]["content"]

    with served_model() as client:
        free = said(client)
        assert said(client, repeat_penalty=5.0, repeat_last_n=0) == free
        assert said(client, repeat_penalty=5.0, repeat_last_n=64) == said(client, repeat_penalty=5.0) != free


@pytest.mark.parametrize(
    ("form", "check"),
    [("json", lambda found: isinstance(found, dict)), ({"enum": ["a", "b"]}, lambda found: found in ("a", "b"))],
)
def test_a_format_binds_the_answer(form, check):
    pytest.importorskip("llguidance", reason="needs llguidance: pip install 'edgespec[server]'")
    with served_model() as client:
        body = {"messages": [ASKED], "format": form, "stream": False, "options": {"num_predict": 400, "seed": 1}}
        found = client.post("/api/chat", json=body).json()
        assert found["done_reason"] == "length" or check(json.loads(found["message"]["content"]))


@pytest.mark.parametrize(
    ("think", "shown"), [(False, "False "), (True, "True "), ("low", "True low"), (None, " "), ("none", "False none")]
)
def test_thinking_goes_to_the_template(think, shown):
    template = "({{ enable_thinking }} {{ reasoning_effort }})" + CHAT_TEMPLATE
    with served_and_shown(template=template) as client:
        body = {"messages": [ASKED], "think": think, "options": {"num_predict": 1}}
        assert client.post("/api/chat", json=body).status_code == 200
        assert client.shown[-1].startswith(f"({shown})")


def test_an_image_is_a_line_in_earlier_turns_and_refused_in_the_last():
    image = {**ASKED, "images": ["aGVsbG8="]}
    with served(lambda prompt: "x") as client:
        client.post("/api/chat", json={"messages": [image, {"role": "assistant", "content": "No."}, ASKED]})
        assert "[an image; this model reads only text]How is it?" in client.asked[-1]
        made = {"role": "assistant", "tool_calls": [{"function": {"name": "look", "arguments": {}}}]}
        seen = [ASKED, made, {"role": "tool", "content": "", "tool_name": "look"}, image]  # a program shows what it saw
        assert client.post("/api/chat", json={"messages": seen}).status_code == 200
        for path, body in (("chat", {"messages": [image]}), ("generate", {"prompt": "a", "images": ["a"]})):
            answer = client.post(f"/api/{path}", json=body)
            assert answer.status_code == 400
            assert "this model reads only text" in answer.json()["error"]


WRONG = [
    ("chat", {"options": {"mirostat": 2}}, "mirostat is not read here"),
    ("chat", {"options": {"typical_p": 0.5}}, "typical_p is not read here; use top_p or min_p"),
    ("chat", {"logprobs": True}, "logprobs is not read here"),
    ("chat", {"num_predict": 5}, "num_predict is not read here; use options"),
    ("chat", {"response_format": {"type": "json_object"}}, "response_format is not read here; use format"),
    ("chat", {"enable_thinking": True}, "enable_thinking is not read here; use think"),
    ("chat", {"format": "xml"}, "format is 'xml', but must be 'json' or a JSON schema"),
    ("chat", {"tools": [{"name": "a"}]}, "tools.0 is no tool of type function"),
    ("chat", {"messages": [{"role": "robot"}]}, "messages.0.role is 'robot', but must be one of "),
    ("chat", {"options": []}, "options"),
    ("generate", {"suffix": "a"}, "this model has no tokens for a text with a gap: leave out suffix"),
    ("generate", {"context": [1, 2]}, "context is not read here; use /api/chat with all messages"),
    ("generate", {"template": "{{ .Prompt }}"}, "template is not read here"),
    ("pull", {}, "/api/pull: models are chosen when the server starts: "),
    ("push", {}, "/api/push: models are chosen"),
    ("create", {}, "/api/create: models are chosen"),
    ("copy", {}, "/api/copy: models are chosen"),
    ("nothing", {}, "POST /api/nothing: there is no such path"),
]


@pytest.mark.parametrize(("path", "body", "says"), WRONG)
def test_what_cannot_be_had_is_one_line(path, body, says):
    with served(lambda prompt: "x") as client:
        answer = client.post(f"/api/{path}", json={"messages": [ASKED], "prompt": "a"} | body)
    assert 400 <= answer.status_code < 500
    assert answer.json()["error"].startswith(says)
    assert len(answer.json()["error"].splitlines()) == 1


def test_what_there_is_is_told_without_a_path():
    with served(lambda prompt: "x") as client:
        assert client.get("/api/version").json()["version"].count(".") == 2
        (found,) = client.get("/api/tags").json()["models"]
        (runs,) = client.get("/api/ps").json()["models"]
        shown = client.post("/api/show", content='{"model": "tiny"}').json()
        assert client.request("DELETE", "/api/delete", json={"model": "tiny"}).status_code == 403
    assert found["name"] == found["model"] == runs["name"] == "tiny"
    assert len(found["digest"]) == 64
    datetime.fromisoformat(found["modified_at"])
    datetime.fromisoformat(runs["expires_at"])
    assert runs["context_length"] == 4000
    architecture = shown["model_info"]["general.architecture"]
    assert shown["model_info"][f"{architecture}.context_length"] == 4000
    assert shown["capabilities"] == ["completion", "tools", "thinking"]


@pytest.mark.parametrize(
    ("path", "head", "status"),
    [
        ("/api/chat", {"origin": "https://evil.example"}, 403),
        ("/api/chat", {"sec-fetch-site": "cross-site"}, 403),
        ("/api/chat", {"host": "evil.example"}, 403),
        ("/api/chat", {"content-type": "text/plain"}, 415),
        ("/v1/chat/completions", {}, 415),
        ("/api/chat", {}, 200),
    ],
)
def test_the_rules_of_access_are_those_of_every_interface(path, head, status):
    with served(lambda prompt: "x") as client:
        assert client.post(path, content=json.dumps({"messages": [ASKED]}), headers=head).status_code == status


def test_a_key_is_asked_for():
    with served_model(keys=["secret"]) as client:
        assert client.get("/api/tags").status_code == 401
        assert "a key is missing" in client.post("/api/chat", content="{}").json()["error"]
        assert client.get("/api/tags", headers={"authorization": "bearer secret"}).status_code == 200
