"""Embeddings: vectors of texts, in Python and over HTTP."""

import base64
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
from edgespec.backends.llamacpp import backend, embeddings, engine
from gguf_files import small_llama
from gguf_writer import Reader
from hybrid_files import write_hybrid
from reference.backend import ReferenceBackend
from window_files import write_windowed

import edgespec
from edgespec.errors import ContextFull, NoRoom, UsageError
from edgespec.loop.backend import Work
from edgespec.loop.pooling import pooled
from edgespec.machine.this_machine import this_machine

OPTIONS = {"context_length": 256, "planner": "none", "exact": "off", "remember": False, "parallel": 2}
TEXT = "hello there"


@pytest.fixture(scope="module")
def gguf(tmp_path_factory):
    return small_llama(tmp_path_factory.mktemp("embeddings") / "tiny.gguf", layers=1)


@pytest.fixture(scope="module")
def model(gguf):
    with edgespec.load(gguf, **OPTIONS) as model:
        yield model


def states_by_logits(gguf, ids):
    """The last states of a text's tokens, solved from the logits of another load by the output matrix."""
    (output,) = (one.data for one in Reader(gguf).tensors if one.name == "output.weight")
    every = np.arange(len(ids))
    with closing(engine.load(str(gguf), context_length=256)) as target:
        (logits,) = target.forward([Work(target.open(), np.array(ids), every - 1, every, prompt=True)])
        rows = np.array([logits.row(i) for i in every])
    return np.linalg.lstsq(np.asarray(output, np.float64), rows.T.astype(np.float64), rcond=None)[0].T


@pytest.mark.parametrize("rows", [128, 4])
def test_vectors_are_the_pooled_states_of_the_last_layer(gguf, rows, monkeypatch):
    with edgespec.load(gguf, **OPTIONS) as model:
        monkeypatch.setattr(model.target, "embed_rows", rows)
        ids = model.encode(TEXT)
        assert len(ids) > 4
        states = states_by_logits(gguf, ids)
        expected = {"mean": states.mean(0), "cls": states[0], "last": states[-1]}
        for pooling, vector in expected.items():
            (found,) = model.embed(TEXT, pooling=pooling)
            assert np.allclose(found, vector / np.linalg.norm(vector), atol=1e-3), pooling
            assert np.linalg.norm(found) == pytest.approx(1)


def test_a_text_has_the_same_vector_alone_and_in_company(model):
    texts = [TEXT, "another", "a" * 200, model.encode(TEXT)]
    found = model.embed(texts)
    assert found.shape[0] == 4
    for one, vector in zip(texts, found, strict=True):
        assert np.array_equal(model.embed([one])[0], vector)
    assert np.array_equal(found[0], found[3])
    assert abs(found[0] @ found[1]) < 0.999
    assert model.embed([]).size == 0


@pytest.mark.parametrize(("named", "taken"), [("LAST", "last"), ("CLS", "cls"), ("MEAN", "mean"), ("NONE", "mean")])
def test_the_file_names_the_pooling(tmp_path, named, taken):
    with edgespec.load(small_llama(tmp_path / "a.gguf", layers=1, pooling=named), **OPTIONS) as model:
        found = {pooling: model.embed(TEXT, pooling=pooling)[0] for pooling in (None, "mean", "cls", "last")}
        assert np.array_equal(found[None], found[taken])
        assert not any(np.allclose(found[None], found[one], atol=1e-3) for one in {"mean", "cls", "last"} - {taken})
        assert model.generate("a", max_tokens=4).text == model.generate("a", max_tokens=4).text


@pytest.mark.parametrize("arch", ["mamba2", "gemma3"])
def test_a_text_may_take_several_passes_whatever_the_layers(tmp_path, arch):
    write = write_hybrid if arch == "mamba2" else write_windowed
    with edgespec.load(write(tmp_path / "a.gguf", arch), **OPTIONS) as model:
        ids = [5 + i % 40 for i in range(100)]
        (whole,) = model.embed([ids])
        model.target.embed_rows = 16
        assert np.allclose(model.embed([[7], ids])[1], whole, atol=1e-3)


def test_threads_that_embed_at_once_do_not_mix_their_texts(gguf):
    with edgespec.load(gguf, **OPTIONS) as model, ThreadPoolExecutor(2) as threads:
        model.target.embed_rows = 4
        texts = ["a" * 60, "hello there" * 6]
        alone = [model.embed(text) for text in texts]
        for _ in range(3):
            assert all(map(np.array_equal, threads.map(model.embed, texts), alone))


def test_texts_are_as_before_and_go_on_meanwhile(gguf):
    with edgespec.load(gguf, **OPTIONS) as model:
        expected, vector = model.generate(TEXT, max_tokens=60, seed=1).text, model.embed(TEXT)
        found = []
        writer = threading.Thread(target=lambda: found.append(model.generate(TEXT, max_tokens=60, seed=1).text))
        writer.start()
        for _ in range(5):
            assert np.array_equal(model.embed(TEXT), vector)
        writer.join(60)
        assert found == [expected]


def test_what_cannot_be_embedded_is_refused_in_one_line(model):
    for texts, says in [
        ("", "the prompt is empty"),
        ([[]], "a text is empty"),
        ([[-1]], "a token id is -1, but must be from 0"),
        (5, "texts is 5, but must be a text or a list of texts"),
        ([5], "a text is 5, but must be a string"),
    ]:
        with pytest.raises(UsageError, match=f"^{says}"):
            model.embed(texts)
    with pytest.raises(UsageError, match=r"^pooling is 'max', but must be one of mean, cls, last$"):
        model.embed(TEXT, pooling="max")
    with pytest.raises(ContextFull, match=r"^prompt is too long: 256 tokens > 255 maximum"):
        model.embed([[3] * 256])
    model.embed([[3] * 255])


def test_streamed_weights_and_too_little_memory_are_refused_in_one_line(gguf, monkeypatch):
    with edgespec.load(gguf, **OPTIONS) as model:
        target = model.target
        small = replace(this_machine(), free=1 << 20, used=0)
        monkeypatch.setattr(embeddings, "this_machine", lambda *_: small)
        with pytest.raises(NoRoom, match=r"^embeddings need .* of memory, but 1 MiB are free$"):
            model.embed(TEXT)
        monkeypatch.undo()
        assert target.most_memory is None
        monkeypatch.setattr(target, "most_memory", 1 << 20)
        with pytest.raises(NoRoom, match=r"^no memory is free, which is too little for a context of 256 tokens"):
            model.embed(TEXT)
        plan = type("Plan", (), {"streamed": [1], "pools": (), "device_pools": ()})
        monkeypatch.setattr(target, "plan", plan)
        with pytest.raises(UsageError, match=r"^embeddings need all weights in memory"):
            model.embed(TEXT)
        monkeypatch.undo()
        assert model.embed(TEXT).shape == (1, 256)


def test_the_context_is_freed_before_the_model(gguf, monkeypatch):
    freed = []
    with edgespec.load(gguf, **OPTIONS) as model:
        model.embed(TEXT)
        for name in ("llama_free", "llama_model_free"):
            really = getattr(backend.llama_cpp, name)
            told = lambda pointer, name=name, really=really: (freed.append(name), really(pointer))  # noqa: E731
            monkeypatch.setattr(backend.llama_cpp, name, told)
    assert freed == ["llama_free", "llama_free", "llama_model_free"]


def test_pooling_of_nothing_but_zeros_is_zeros():
    assert pooled([np.zeros((2, 3), np.float32)], "mean").tolist() == [0, 0, 0]


@pytest.fixture(scope="module")
def client(model):
    pytest.importorskip("starlette", reason="the server is not installed: pip install 'edgespec[server]'")
    from starlette.testclient import TestClient

    from edgespec.server.app import make_app
    from edgespec.server.service import Service

    with TestClient(make_app(Service(model, "tiny")), "http://127.0.0.1:8080") as client:
        yield client


@pytest.mark.parametrize("form", ["float", "base64"])
def test_openai_s_answer_has_the_vectors_of_all_inputs(client, model, form):
    ids = model.encode(TEXT)
    for given, texts in [(TEXT, [TEXT]), ([TEXT, "b"], [TEXT, "b"]), (ids, [TEXT]), ([ids, [3]], [TEXT, [3]])]:
        answer = client.post("/v1/embeddings", json={"model": "x", "input": given, "encoding_format": form})
        found = answer.json()
        assert (found["object"], found["model"]) == ("list", "x")
        assert [(one["object"], one["index"]) for one in found["data"]] == [("embedding", i) for i in range(len(texts))]
        vectors = [one["embedding"] for one in found["data"]]
        if form == "base64":
            vectors = [np.frombuffer(base64.b64decode(one), "<f4") for one in vectors]
        assert np.array_equal(np.array(vectors, np.float32), model.embed(texts))
        tokens = sum(len(model.encode(one)) if isinstance(one, str) else len(one) for one in texts)
        assert found["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}


def test_ollama_s_answers_have_them_too(client, model):
    expected = model.embed([TEXT, "b"])
    found = client.post("/api/embed", content=json.dumps({"model": "x", "input": [TEXT, "b"]})).json()
    assert np.array_equal(np.array(found["embeddings"], np.float32), expected)
    assert found["prompt_eval_count"] == len(model.encode(TEXT)) + len(model.encode("b"))
    assert found["total_duration"] > 0
    assert client.post("/api/embed", json={"input": []}).json()["embeddings"] == []
    older = client.post("/api/embeddings", json={"prompt": TEXT}).json()
    assert np.array_equal(np.array(older["embedding"], np.float32), expected[0])


def test_ollama_cuts_a_text_that_is_too_long_and_openai_refuses_it(client, model):
    long = "hello " * 3000
    found = client.post("/api/embed", json={"input": long}).json()
    assert found["prompt_eval_count"] == 255
    assert np.array_equal(np.array(found["embeddings"], np.float32), model.embed([model.tokenize(long)[:255]]))
    for path, body in (("/v1/embeddings", {}), ("/api/embed", {"truncate": False})):
        answer = client.post(path, json={"input": long, **body})
        assert answer.status_code == 400
        assert "prompt is too long" in answer.text


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"input": []}, "input is empty: give at least one text"),
        ({"input": ["a", ""]}, "input.1 is empty: give at least one word"),
        ({"input": "a", "dimensions": 8}, "dimensions is 8, but this model's vectors have 256"),
        ({"input": "a", "pooling": "max"}, "pooling is 'max', but must be one of mean, cls, last"),
        ({"input": [[999999]]}, "prompt: token ids must be from 0 to 287"),
        ({"input": ["a"] * 2049}, "there are 2049 inputs, but at most 2048 may be given"),
        ({"input": "a", "normalize": False}, "normalize is not read here"),
        ({"input": "a", "truncate_prompt_tokens": 5}, "truncate_prompt_tokens is not read here"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({}, "input"),
    ],
)
def test_what_cannot_be_had_is_refused(client, body, says):
    answer = client.post("/v1/embeddings", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(says)


def test_dimensions_and_pooling_are_taken_where_they_fit(client, model):
    answer = client.post("/v1/embeddings", json={"input": "a b", "dimensions": 256, "pooling": "last"})
    assert np.array_equal(
        np.array(answer.json()["data"][0]["embedding"], np.float32), model.embed("a b", pooling="last")[0]
    )


def test_another_engine_says_that_it_gives_none(monkeypatch):
    pytest.importorskip("starlette", reason="the server is not installed: pip install 'edgespec[server]'")
    from test_server import served

    monkeypatch.delattr(ReferenceBackend, "embed")
    with served() as client:
        answer = client.post("/v1/embeddings", json={"input": "a"})
        assert answer.status_code == 400
        assert answer.json()["error"]["message"].startswith("this model gives no embeddings")
