"""Responses that a later request of /v1/responses refers to."""

import json

import pytest

pytest.importorskip("starlette", reason="the server is not installed: pip install 'edgespec[server]'")

from scripted import asking
from test_server import served, stream

from edgespec.server import stored
from edgespec.server.stored import Stored, StoredResponses

CALL = 'Well.\n<tool_call>\n{"name": "write", "arguments": {"path": "a"}}\n</tool_call>'
TOOL = {"type": "function", "name": "write", "parameters": {"type": "object", "properties": {"path": {}}}}


def script(prompt):
    return "Done." if "written" in prompt else CALL


@pytest.fixture(scope="module")
def client():
    with asking(script) as client:
        yield client


def ask(client, *items, **more):
    """A response, and the prompt that it answers."""
    answer = client.post("/v1/responses", json={"input": list(items), "tools": [TOOL], **more})
    assert answer.status_code == 200, answer.text
    return answer.json(), client.asked[-1]


def result_of(response):
    call_id = next(item["call_id"] for item in response["output"] if item["type"] == "function_call")
    return {"type": "function_call_output", "call_id": call_id, "output": "written"}


HELLO = {"role": "user", "content": "write a file"}


@pytest.mark.parametrize("streamed", [False, True])
def test_references_stand_for_what_they_name(client, streamed):
    if streamed:
        events = stream(client, "/v1/responses", {"input": [HELLO], "tools": [TOOL]})
        first = json.loads(events[-1])["response"]
    else:
        first, _ = ask(client, HELLO)
    _, whole = ask(client, HELLO, *first["output"], result_of(first), store=False)
    named = [{"type": "item_reference", "id": item["id"]} for item in first["output"]]
    assert len(named) == 2
    second, prompt = ask(client, HELLO, *named, result_of(first))
    assert prompt == whole
    third, prompt = ask(client, result_of(first), previous_response_id=first["id"])
    assert prompt == whole
    assert third["previous_response_id"] == first["id"]
    assert third["output"][0]["content"][0]["text"] == "Done."
    again = [HELLO, *named, result_of(first), {"id": second["output"][0]["id"]}, {"role": "user", "content": "thanks"}]
    _, prompt = ask(client, *again)
    assert ask(client, again[-1], previous_response_id=second["id"])[1] == prompt


def test_instructions_are_of_one_response_alone(client):
    first, _ = ask(client, HELLO, instructions="be good")
    _, prompt = ask(client, result_of(first), previous_response_id=first["id"], instructions="be better")
    assert ("be good" in prompt, "be better" in prompt) == (False, True)


def test_a_response_and_its_items_can_be_had_again_and_deleted(client):
    first, _ = ask(client, HELLO)
    second, _ = ask(client, result_of(first), previous_response_id=first["id"])
    place = f"/v1/responses/{second['id']}"
    assert client.get(place).json() == second
    listed = client.get(f"{place}/input_items?order=asc").json()
    assert [item["type"] for item in listed["data"]] == ["message", "message", "function_call", "function_call_output"]
    found, page = [], {"last_id": ""}
    for _ in range(4):
        page = client.get(f"{place}/input_items?limit=1&after={page['last_id']}").json()
        found += page["data"]
    assert (found[::-1], page["has_more"]) == (listed["data"], False)
    assert client.get(f"{place}/input_items?limit=0").status_code == 400
    assert client.delete(place).json() == {"id": second["id"], "object": "response", "deleted": True}
    for answer in (client.get(place), client.get(f"{place}/input_items"), client.delete(place)):
        says = f"Response with id '{second['id']}' not found."
        told = {"message": says, "type": "invalid_request_error", "param": None, "code": None}
        assert (answer.status_code, answer.json()["error"]) == (404, told)


def missing(client, key="", **body):
    """Status, code and param of a refusal that names no other reason."""
    answer = client.post("/v1/responses", json={"input": "hello", **body}, headers={"x-api-key": key} if key else {})
    error = answer.json()["error"]
    assert "not found" in error["message"]
    assert error["type"] == "invalid_request_error"
    return answer.status_code, error["code"], error["param"]


NO_RESPONSE, NO_ITEM = (400, "previous_response_not_found", "previous_response_id"), (404, None, "input")


def test_what_is_not_stored_is_not_found(client):
    kept, _ = ask(client, HELLO, store=False)
    assert kept["store"] is False
    assert missing(client, previous_response_id=kept["id"]) == NO_RESPONSE
    assert client.get(f"/v1/responses/{kept['id']}").status_code == 404
    for item in (
        {"type": "item_reference", "id": kept["output"][0]["id"]},
        {"id": "msg_1"},
        {"type": "item_reference"},
    ):
        assert missing(client, input=[item]) == NO_ITEM


def test_another_key_does_not_find_it():
    with served(keys=["one", "two"]) as client:
        body, mine = {"input": "hello", "max_output_tokens": 3}, {"x-api-key": "one"}
        first = client.post("/v1/responses", json=body, headers=mine).json()
        item, place = {"type": "item_reference", "id": first["output"][0]["id"]}, f"/v1/responses/{first['id']}"
        assert missing(client, "two", previous_response_id=first["id"]) == NO_RESPONSE
        assert missing(client, "two", input=[item]) == NO_ITEM
        for ask_for in (client.get, client.delete):
            assert ask_for(place, headers={"x-api-key": "two"}).status_code == 404
        more = {"previous_response_id": first["id"], "input": [item, {"role": "user", "content": "and"}]}
        assert client.post("/v1/responses", json=body | more, headers=mine).status_code == 200
        assert client.get(place, headers=mine).json() == first


def test_number_and_bytes_are_bounded_and_the_least_recently_used_go_first():
    def one(size, *ids):
        return Stored(b"[" * size, b"", frozenset(ids))

    kept = StoredResponses(most=3, most_bytes=100)
    for name in "abc":
        kept.add("", name, one(10, f"of {name}"))
    assert kept.find("", "a")
    kept.add("", "d", one(10, "of c"))
    assert [name for name in "abcd" if kept.find("", name)] == ["a", "c", "d"]
    assert kept.with_item("", "of c") is kept.find("", "d")
    kept.add("other", "z", one(0, "of c"))
    assert kept.with_item("", "of c") is kept.find("", "d")
    kept.remove("other", "z")
    assert kept.with_item("other", "of c") is kept.with_item("", "of b") is None
    kept.add("", "e", one(85))
    assert [name for name in "acde" if kept.find("", name)] == ["d", "e"]
    kept.remove("", "e")
    kept.add("", "f", one(90))
    assert [name for name in "def" if kept.find("", name)] == ["d", "f"]
    kept.add("", "g", one(101))
    assert not any(kept.find("", name) for name in "dfg")
    assert stored.MOST_BYTES <= 1 << 26


def test_a_conversation_that_is_too_long_to_store_is_answered(client, monkeypatch):
    monkeypatch.setattr("edgespec.server.dialects.responses.MOST_BODY", 20)
    response, _ = ask(client, HELLO)
    assert client.get(f"/v1/responses/{response['id']}").status_code == 404
