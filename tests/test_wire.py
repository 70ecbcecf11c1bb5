"""What llama-server answers, recorded with SmolLM2, this server answers too: fields, types, order of events, tokens."""

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("uvicorn", reason="the server is not installed: pip install 'edgespec[server]'")
pytest.importorskip("llguidance", reason="needs llguidance: pip install 'edgespec[server]'")

from benchmarks import wire
from benchmarks.serving import served
from edgespec.model import load

RECORDED = Path(__file__).with_name("llama_server.json")


@pytest.fixture(scope="module")
def theirs():
    found = json.loads(RECORDED.read_text())
    assert set(found) == set(wire.REQUESTS)
    return found


def test_a_model_of_any_kind_answers_in_their_form(theirs, small, monkeypatch):
    """But for tokens, and for answers that must come to an end."""
    names = [name for name in theirs if not re.search("own end|stop string|response|schema|too long", name)]
    monkeypatch.setattr(wire, "REQUESTS", {name: wire.REQUESTS[name] for name in names})
    form = {name: {part: theirs[name][part] for part in theirs[name].keys() - {"tokens", "ends"}} for name in names}
    with load(small, **wire.OPTIONS, threads=1) as model, served(model) as port:
        found = wire.compare(form, wire.record(port), 0.0)
    assert [str(one) for one in found if not one.meant] == []
    assert len(names) > 25
    assert found


@pytest.fixture(scope="module")
def differences(theirs, smollm2_whole):
    # Fewer threads, as on a busy machine, round otherwise without `exact`, and a text may end elsewhere.
    with load(str(smollm2_whole), **wire.OPTIONS, threads=1) as model, served(model) as port:
        return wire.compare(theirs, wire.record(port), 2 * model.target.capabilities.logit_tolerance)


@pytest.mark.exhaustive
def test_all_that_differs_is_meant(differences):
    assert [str(one) for one in differences if not one.meant] == []


@pytest.mark.exhaustive
def test_all_that_is_meant_differs(differences):
    """A list of reasons that nobody needs any more would hide what changes later."""
    assert {one.meant for one in differences} == {*wire.KNOWN.values()}


ANSWER = {
    "status": 200,
    "type": "application/json",
    "ends": ["stop"],
    "body": {"a": "string", "list": [{"b": "integer|null"}], "n": "number"},
}


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"status": 400}, ["x: status"]),
        ({"type": "text/html"}, ["x: type"]),
        ({"ends": ["length"]}, ["x: ends"]),
        ({"body": {"a": "string", "list": [{"b": "integer"}], "n": "integer", "more": "string"}}, []),
        ({"body": {"list": [{"b": "null"}], "n": "number"}}, ["x: .a"]),
        ({"body": {"a": "null", "list": [], "n": "string"}}, ["x: .a", "x: .n"]),
        ({"body": {"a": "string", "list": [{}], "n": "number"}}, ["x: .list[].b"]),
        ({"body": {"a": {"b": "string"}, "list": "string", "n": "number"}}, ["x: .a", "x: .list"]),
    ],
)
def test_what_is_missing_is_seen(change, where):
    assert [one.where for one in wire.compare({"x": ANSWER}, {"x": ANSWER | change}, 0.1)] == where


def test_the_order_of_events_is_seen():
    theirs = {"status": 200, "type": "text/event-stream", "order": ["begin", "content", "[DONE]"]}
    theirs["events"] = {"begin": {"a": "string"}, "content": {"b": "string"}}
    ours = theirs | {"order": ["content", "[DONE]"], "events": {"content": {"b": "null"}}}
    assert [one.where for one in wire.compare({"x": theirs}, {"x": ours}, 0.1)] == ["x: order", "x: content.b"]


def test_events_are_read():
    text = (
        ": ping\n\n"
        'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":null},"finish_reason":null}]}\n\n'
        'data: {"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":null}]}\n\n'
        'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'
        'data: {"choices":[],"usage":{}}\n\ndata: [DONE]\n\n'
        'event: message_stop\ndata: {"type": "message_stop"}\n\ndata: {"error": {}}\n\n'
    )
    kinds = [wire.kind_of(event) for event in wire.events_of(text)]
    assert kinds == ["begin", "content", "end: stop", "usage", "[DONE]", "message_stop", "error"]


def test_shapes():
    value = {"a": [1, None, 2], "b": [], "c": [{"d": 1.5}, {"e": True}], "f": "x"}
    expected = {"a": ["integer|null"], "b": [], "c": [{"d": "number", "e": "boolean"}], "f": "string"}
    assert wire.shape(value) == expected
    assert wire.merged(["null", {"a": "string"}]) == "null|object"


@pytest.mark.parametrize(
    ("ours", "same"),
    [
        ([("a", {"a": -0.12, "b": -2.0}), ("c", {"c": -0.5, "d": -0.6})], True),
        ([("a", {"a": -0.1, "b": -2.0}), ("d", {"d": -0.55, "c": -0.6})], True),  # a tie
        ([("a", {"a": -0.1, "b": -2.0}), ("d", {"d": -0.1, "c": -0.55})], False),
        ([("a", {"a": -0.5, "b": -2.0}), ("c", {"c": -0.5})], False),
        ([("b", {"b": -0.1, "x": -2.0}), ("c", {"c": -0.5})], False),
        ([("a", {"a": -0.1, "b": -2.0})], False),
    ],
)
def test_tokens_up_to_a_tie(ours, same):
    theirs = [("a", {"a": -0.1, "b": -2.0}), ("c", {"c": -0.5, "d": -0.6})]
    assert wire.same_tokens(theirs, ours, 0.15) == same
