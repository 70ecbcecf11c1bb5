"""llama.cpp's paths for tokens, and the same in Python."""

import json

import pytest

pytest.importorskip("starlette", reason="the server is not installed: pip install 'edgespec[server]'")
pytest.importorskip("httpx", reason="httpx is not installed")

from reference.backend import ReferenceVocab
from test_server import served

from edgespec.server import gap

TEXT = "<s>Ä é\u2028"


@pytest.fixture(scope="module")
def client():
    with served() as client:
        yield client


def tokens(client, content, **more):
    answer = client.post("/tokenize", json={"content": content, **more})
    assert answer.status_code == 200, answer.text
    return answer.json()["tokens"]


def test_tokens_are_those_of_the_model_and_give_the_text_again(client):
    vocab = client.model.target.vocab
    for start in (False, True):
        for special in (False, True):
            expected = vocab.encode(TEXT, add_bos=start, parse_special=special)
            assert tokens(client, TEXT, add_special=start, parse_special=special) == expected
            assert client.model.tokenize(TEXT, start=start, special=special) == expected
    assert tokens(client, TEXT) == vocab.encode(TEXT, add_bos=False, parse_special=True)
    ids = vocab.encode(TEXT, add_bos=True, parse_special=True)
    assert client.post("/detokenize", json={"tokens": ids}).json() == {"content": f"<s>{TEXT}"}
    assert client.model.detokenize(ids) == f"<s>{TEXT}"
    assert client.model.decode(ids) == TEXT.removeprefix("<s>")
    assert tokens(client, "") == client.model.tokenize("") == []
    assert client.post("/detokenize", json={"tokens": []}).json() == {"content": ""}


def test_texts_and_token_ids_may_be_mixed(client):
    assert tokens(client, ["ab", 0, "c"], add_special=True) == [
        *tokens(client, "ab", add_special=True),
        0,
        *tokens(client, "c"),
    ]


def test_pieces_are_texts_or_the_bytes_of_a_part_of_a_character(client):
    found = tokens(client, "<s>aé", with_pieces=True)
    assert [one["piece"] for one in found] == ["<s>", "a", [0xC3], [0xA9]]
    assert [one["id"] for one in found] == tokens(client, "<s>aé")


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("tokenize", {}, "content"),
        ("tokenize", {"content": ["a", 10**6]}, "content.1 is 1000000, but must be a text or a token id from 0 to 257"),
        ("tokenize", {"content": [None]}, "content.0 is None, but must be a text or a token id"),
        ("detokenize", {"tokens": [-1]}, "a token id is -1, but must be from 0 to 257"),
        ("detokenize", {"tokens": "a"}, "tokens"),
    ],
)
def test_what_is_no_token_is_refused_in_one_line(client, path, body, says):
    answer = client.post(f"/{path}", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(says)


def test_props_tell_the_context_and_the_template_and_no_path(client):
    found = client.get("/props").json()
    assert found["default_generation_settings"]["n_ctx"] == 400
    assert (found["total_slots"], found["model_alias"]) == (2, "tiny")
    assert found["chat_template"] == client.model.target.vocab.chat_template
    assert (found["bos_token"], found["eos_token"]) == ("<s>", "</s>")
    assert "path" not in json.dumps(found)
    assert client.post("/props", json={}).status_code == 405
    assert isinstance(client.model.target.vocab, ReferenceVocab)


@pytest.fixture
def coder(client, monkeypatch):
    """A model of code, as it were: its tokens for gaps are those that it has."""
    monkeypatch.setattr(gap, "FORMS", (("<|none|>", "<s>", "</s>"), ("</s>", "<s>", "</s>")))
    return client


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/completions", {}), ("/api/generate", {"stream": False, "options": {"num_predict": 3}})]
)
def test_a_suffix_asks_for_what_stands_before_it(coder, path, body, monkeypatch):
    vocab, asked = coder.model.target.vocab, []
    submit = coder.model.scheduler.submit
    monkeypatch.setattr(
        coder.model.scheduler, "submit", lambda request, *more: asked.append(request) or submit(request, *more)
    )
    answer = coder.post(path, json={"prompt": "a<s>", "suffix": "</s>b", "max_tokens": 3, **body})
    assert answer.status_code == 200, answer.text
    before, behind = (vocab.encode(text, add_bos=False, parse_special=False) for text in ("a<s>", "</s>b"))
    assert list(asked[0].prompt_ids) == [0, 1, *before, 0, *behind, 1]


def test_a_suffix_needs_tokens_for_it_and_a_text(client, coder, monkeypatch):
    for prompt, says in [([3], "with a suffix a prompt must be a text"), ("a" * 500, "prompt is too long")]:
        answer = coder.post("/v1/completions", json={"prompt": prompt, "suffix": "b"})
        assert answer.json()["error"]["message"].startswith(says)
    monkeypatch.undo()
    answer = client.post("/v1/completions", json={"prompt": "a", "suffix": "b"})
    assert answer.json()["error"]["message"] == "this model has no tokens for a text with a gap: leave out suffix"
