"""Fields of other servers: what has an equal here does the same, what would change an answer is refused."""

import json
import re

import pytest

pytest.importorskip("starlette", reason="the server is not installed: pip install 'edgespec[server]'")
pytest.importorskip("httpx", reason="httpx is not installed")

from reference.backend import CHAT_TEMPLATE
from test_server import HELLO, said, served, served_and_shown

PATHS = ("chat/completions", "completions", "responses", "messages", "messages/count_tokens")
BODY = HELLO | {"prompt": "a", "input": "hello", "max_tokens": 8, "max_output_tokens": 8}
SCHEMA = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
NOT_READ = {
    "repeat_penalty": (1.0, 1.1), "typical_p": (1, 0.5), "mirostat": (0, 2), "dry_multiplier": (0.0, 0.8),
    "xtc_probability": (0, 0.1), "top_n_sigma": (-1, 1.0), "dynatemp_range": (0, 0.5), "samplers": (None, ["top_k"]),
    "ignore_eos": (False, True), "min_tokens": (0, 5), "stop_token_ids": ([], [7]), "bad_words": ([], ["a"]),
    "allowed_token_ids": (None, [5]), "use_beam_search": (False, True), "skip_special_tokens": (True, False),
    "include_stop_str_in_output": (False, True), "chat_template": (None, "{{ messages }}"), "documents": ([], [{}]),
    "truncate_prompt_tokens": (None, 5), "add_generation_prompt": (True, False), "thinking_budget": (-1, 0),
    "include_reasoning": (True, False), "reasoning_format": ("auto", "none"), "grammar": ("", 'root ::= "a"'),
    "guided_grammar": (None, "a"), "ebnf": (None, "a"), "prompt_logprobs": (None, 1), "n_probs": (0, 5),
    "lora": ([], [{"id": 0, "scale": 1}]), "think": (None, False), "best_of": (1, 3),
    "normalize": (True, False), "embd_normalize": (2, 0),
}  # fmt: skip


@pytest.fixture(scope="module")
def client():
    with served() as client:
        yield client


@pytest.mark.parametrize("path", PATHS)
def test_values_that_change_nothing_are_taken(client, path):
    for given in ({name: neutral for name, (neutral, _) in NOT_READ.items()}, dict.fromkeys(NOT_READ)):
        given["edgespec"] = {"plain": False, "trace": "", "regex": "", "lark": None}
        assert client.post(f"/v1/{path}", json=BODY | given).status_code == 200


@pytest.mark.parametrize("name", NOT_READ)
def test_a_field_that_would_change_an_answer_is_refused(client, name):
    _, wrong = NOT_READ[name]
    for path in PATHS:
        answer = client.post(f"/v1/{path}", json=BODY | {name: wrong})
        assert answer.status_code == 400, path
        assert answer.json()["error"]["message"].startswith(name) or name == "best_of"


FORMS = {
    "guided_json": SCHEMA, "json_schema": SCHEMA, "guided_regex": "[12]{3}", "regex": "[12]{3}",
    "guided_choice": ['"no/ye', "\u00fcber"], "structured_outputs": {"json": json.dumps(SCHEMA), "regex": None},
    "edgespec": {"regex": "[12]{3}"},
}  # fmt: skip


def by_form(name, text):
    if name in ("guided_json", "json_schema", "structured_outputs"):
        return json.loads(text)["n"] in (1, 2)
    return text in FORMS[name] if name == "guided_choice" else bool(re.fullmatch("[12]{3}", text))


@pytest.mark.parametrize("name", FORMS)
def test_forms_of_an_answer_in_the_fields_of_other_servers(client, name):
    pytest.importorskip("llguidance", reason="needs llguidance: pip install 'edgespec[server]'")
    body = BODY | {name: FORMS[name], "max_tokens": 60, "max_output_tokens": 60, "temperature": 1, "seed": 1}
    assert all(by_form(name, said(client, path, body)) for path in PATHS[:3])


def test_limits_of_tokens_in_the_fields_of_other_servers(client):
    def written(path, **more):
        usage = client.post(f"/v1/{path}", json=HELLO | {"prompt": "a", "input": "a"} | more).json()["usage"]
        return usage.get("completion_tokens", usage.get("output_tokens"))

    assert written("chat/completions", n_predict=3) == written("completions", n_predict=3) == 3
    assert written("responses", max_tokens=3) == 3
    assert written("chat/completions", n_predict=3, max_tokens=4) == 4
    assert written("completions", n_predict=3, max_tokens=4) == 4
    assert written("responses", max_tokens=3, max_output_tokens=4) == 4


@pytest.mark.parametrize(
    ("path", "more", "shown"),
    [
        ("chat/completions", {"enable_thinking": False}, "False"),
        ("chat/completions", {"thinking": {"type": "disabled"}}, "False"),
        ("chat/completions", {"thinking": {"type": "enabled"}}, "True"),
        ("chat/completions", {"reasoning": {"effort": "none"}}, "False none"),
        ("chat/completions", {"reasoning": {"enabled": False}}, "False"),
        ("chat/completions", {"reasoning_effort": "high", "enable_thinking": False}, "False high"),
        ("chat/completions", {"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}}, "False"),
        ("responses", {"enable_thinking": False}, "False"),
        ("responses", {"chat_template_kwargs": {"enable_thinking": False}}, "False"),
        ("messages", {"enable_thinking": False}, "False"),
        ("messages", {"chat_template_kwargs": {"enable_thinking": True}}, "True"),
    ],
)
def test_thinking_in_the_fields_of_other_servers(path, more, shown):
    template = "({{ enable_thinking }} {{ reasoning_effort }})" + CHAT_TEMPLATE
    with served_and_shown(template=template) as client:
        assert client.post(f"/v1/{path}", json=BODY | more).status_code == 200
        assert client.shown[-1].startswith(f"({shown}".replace(" ", " ") + (" )" if " " not in shown else ")"))
