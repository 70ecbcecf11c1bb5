"""A prompt that is still being typed is read ahead and answered ahead; nobody waits for it, and no text changes."""

import time
from threading import Event

import pytest
from reference.backend import ReferenceBackend, random_model

pytest.importorskip("starlette", reason="the server is not installed: pip install 'edgespec[server]'")

from test_server import served, stream
from test_server_tools import TEMPLATE

from edgespec.loop.sampling import SamplingParams
from edgespec.planners.specexec import SpecExecPlanner
from edgespec.planners.sssd import SssdPlanner
from edgespec.scheduler.events import Cancelled, Ended, Wrote
from edgespec.scheduler.requests import Request
from edgespec.scheduler.scheduler import Scheduler
from edgespec.server.dialects.draft_prompt import PREPARED, stable_prefix
from edgespec.server.typing_ahead import MOST_TYPING

TYPED = "Why is the sky blue, and the sea, and not the grass? " * 3
PATH = "/edgespec/draft-prompt"


def body(text=TYPED, **more):
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 30, "temperature": 0.9, "seed": 7, **more}


def answered(client, **more):
    """The count of an answer's cached tokens; its text is that of the Python API."""
    answer = client.post("/v1/chat/completions", json=body(**more)).json()
    expected = client.model.chat(TYPED, max_tokens=30, temperature=0.9, seed=more.get("seed", 7))
    assert answer["choices"][0]["message"]["content"] == expected.text
    assert answer["usage"]["completion_tokens"] == 30
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def until(what):
    deadline = time.monotonic() + 20
    while not what():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.005)


@pytest.fixture
def client():
    with served(slots=2) as client:
        yield client


def settled(scheduler, passes):
    """Nothing is done any more, after at least so many passes."""
    until(lambda: scheduler.counts.passes >= passes)
    until(lambda: not busy(scheduler))
    return scheduler.counts.passes


def busy(scheduler):
    return scheduler.call(lambda call: bool(scheduler._queue or call.pool.with_work))


def test_stable_tokens_are_those_that_all_versions_share():
    assert stable_prefix([[1, 2, 3, 4], [1, 2, 3, 9, 9], [1, 2, 7]]) == [1, 2]
    assert stable_prefix([[1], [2]]) == []


def test_while_it_is_typed_the_prompt_is_read(client):
    scheduler = client.model.scheduler
    told = client.put(PATH, json=body(TYPED[:100])).json()
    assert 90 < told["tokens"] < 130
    settled(scheduler, 1)
    assert scheduler.kept_tokens == told["tokens"]
    assert sum(scheduler.counts.tokens.values()) == 0
    assert answered(client) >= 90


@pytest.mark.parametrize(
    ("following", "ended"), [(TYPED[:120], False), (TYPED, False), ("Which colour has the grass?" * 4, True)]
)
def test_a_pass_is_ended_only_if_what_it_reads_is_changed(client, monkeypatch, following, ended):
    """Who types is quicker than a pass: were each ended by the next letter, nothing would be read before a pause."""
    scheduler, inner, begun, go_on, ends = client.model.scheduler, client.model.target.forward, Event(), Event(), []
    monkeypatch.setattr(client.model.target, "interrupt", ends.append)

    def slow(batch):
        begun.set()
        assert go_on.wait(20)
        return inner(batch)

    monkeypatch.setattr(client.model.target, "forward", slow)
    client.put(PATH, json=body(TYPED[:100]))
    assert begun.wait(20)
    told = client.put(PATH, json=body(following)).json()
    assert bool(ends) == ended
    go_on.set()
    settled(scheduler, 2)
    assert scheduler.kept_tokens >= told["tokens"] - 1


@pytest.mark.parametrize("streaming", [True, False])
def test_enter_finds_the_answers_first_tokens(client, streaming):
    scheduler = client.model.scheduler
    expected = client.model.chat(TYPED, max_tokens=30, temperature=0.9, seed=7)
    told = client.put(PATH, json=body(pause=True)).json()
    assert told["seed"] == 7
    begun = settled(scheduler, 1)
    prepared = sum(scheduler.counts.tokens.values()) - 30
    assert PREPARED <= prepared < 30
    if streaming:
        parts = stream(client, "/v1/chat/completions", body())
        assert len(parts) > 3
    answer = client.post("/v1/chat/completions", json=body()).json() if not streaming else None
    assert scheduler.counts.passes > begun  # the rest was still to be written
    assert sum(scheduler.counts.tokens.values()) == 60  # nothing was written twice
    if answer:
        assert answer["choices"][0]["message"]["content"] == expected.text
        assert answer["usage"]["completion_tokens"] == 30
    answered(client)


def test_another_request_starts_from_what_was_read(client):
    client.put(PATH, json=body(pause=True))
    settled(client.model.scheduler, 1)
    assert answered(client, seed=8) > 100


def test_the_tools_of_a_prompt_are_read_with_it():
    """They stand before the messages, so what is read without them is of no use."""
    tools = {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]}
    with served(template=TEMPLATE) as client:
        told = client.put(PATH, json=body(TYPED[:100], **tools)).json()
        assert told["tokens"] > client.put(PATH, json=body(TYPED[:100])).json()["tokens"] + 30
        client.put(PATH, json=body(TYPED[:100], **tools))
        settled(client.model.scheduler, 1)
        answer = client.post("/v1/chat/completions", json=body(**tools)).json()
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= told["tokens"] - 1


def test_a_prediction_is_taken_over_as_well(client):
    asked = body(prediction={"type": "content", "content": "As blue as the sea. " * 4})
    client.put(PATH, json=asked | {"pause": True})
    settled(client.model.scheduler, 1)
    before = sum(client.model.scheduler.counts.tokens.values())
    assert before >= PREPARED
    client.post("/v1/chat/completions", json=asked)
    assert sum(client.model.scheduler.counts.tokens.values()) == 30
    client.put(PATH, json=asked | {"pause": True})
    settled(client.model.scheduler, 1)
    before = sum(client.model.scheduler.counts.tokens.values())
    other = asked | {"prediction": {"type": "content", "content": "As green as the grass."}}
    client.post("/v1/chat/completions", json=other)
    assert sum(client.model.scheduler.counts.tokens.values()) == before + 30


def drafts_of(client):
    return client.app._app.state.models.all[0].service.typing_ahead._latest


def test_a_request_drops_the_drafts_on_the_way_to_it(client):
    client.put(PATH, json=body(TYPED[:60], id="here"))
    client.put(PATH, json=body("Something else", id="there"))
    until(lambda: client.get("/health").json()["waiting"] == 0)
    held = drafts_of(client)["here"]
    client.post("/v1/chat/completions", json=body(seed=8))
    assert held.seq.cancelled
    assert list(drafts_of(client)) == ["there"]
    assert client.get("/health").json()["active"] == 0


def test_a_draft_that_nobody_tells_of_again_is_dropped(monkeypatch):
    monkeypatch.setattr("edgespec.server.typing_ahead.KEPT_SECONDS", 0.2)
    with served() as client:
        client.put(PATH, json=body(pause=True))
        held = drafts_of(client)[""]
        until(lambda: held.seq.cancelled)
        until(lambda: not any(slot.seq for slot in client.model.scheduler.pool.slots))
        answered(client)


def test_drafts_that_wait_refuse_nobody():
    with served(slots=1, service={"most_waiting": 0}) as client:
        for number in range(6):
            assert client.put(PATH, json=body(f"{number} is a number", id=str(number))).status_code == 200
        assert client.post("/v1/chat/completions", json=body()).status_code == 200


def test_what_is_prepared_gives_way():
    with served(slots=1) as client:
        client.put(PATH, json=body(pause=True))
        settled(client.model.scheduler, 1)
        answer = client.post("/v1/chat/completions", json=body("Something else.", seed=1)).json()
        assert answer["usage"]["completion_tokens"] == 30
        answered(client)  # its preparation is gone


def test_only_the_latest_of_a_client_is_kept(client):
    scheduler = client.model.scheduler
    for end in range(20, 150, 10):
        client.put(PATH, json=body(TYPED[:end]))
    client.put(PATH, json=body(pause=True))
    client.put(PATH, json=body(pause=True))  # the same again
    settled(scheduler, 1)
    assert len(client.app._app.state.models.all[0].service.typing_ahead._latest) == 1
    for i in range(MOST_TYPING + 3):
        assert client.put(PATH, json=body(f"{i} is a number", id=str(i))).status_code == 200
    assert len(client.app._app.state.models.all[0].service.typing_ahead._latest) == MOST_TYPING
    until(lambda: scheduler.waiting == 0)


def test_what_cannot_be_prepared_is_refused(client):
    assert client.put(PATH, json={"messages": [], "pause": True}).status_code == 400
    assert client.put(PATH, json={"messages": []}).json()["tokens"] == 0
    assert client.put(PATH, json=body("a" * 900, pause=True)).status_code == 400
    assert client.put(PATH, content="x", headers={"Content-Type": "text/plain"}).status_code == 415
    assert client.post(PATH, json=body()).status_code == 405


def test_the_scheduler_prepares_only_while_there_is_nothing_else():
    target = ReferenceBackend(random_model(1, vocab_size=48), sessions=2, context_length=200)
    target.model.unembedding[1] = 0
    scheduler, told = Scheduler(target, [SssdPlanner(), SssdPlanner()], budget=4), {"held": [], "asked": []}

    def ask(name, seed, idle_limit=None):
        request = Request([5, 6, 7, seed], SamplingParams(temperature=1.0, seed=seed), 20)
        return scheduler.submit(request, told[name].append, idle_limit=idle_limit)

    def tokens(name):
        return sum(len(event.chunks) for event in told[name] if isinstance(event, Wrote))

    held = ask("held", 8, idle_limit=5)
    scheduler.step()
    ask("asked", 9)
    while not any(isinstance(event, Ended) for event in told["asked"]):
        before = tokens("held")
        scheduler.step()
        assert tokens("held") == before
    for _ in range(30):
        scheduler.step()
    assert 5 <= tokens("held") < 20
    assert held.is_prefetched
    scheduler.promote(held)
    while scheduler.active:
        scheduler.step()
    assert tokens("held") == 20
    third = ask("held", 10, idle_limit=5)
    for _ in range(20):
        scheduler.step()
    ask("asked", 11)
    ask("asked", 12)
    while sum(isinstance(event, Ended) for event in told["asked"]) < 3:
        scheduler.step()
    assert isinstance(told["held"][-1].error, Cancelled)
    assert third.is_prefetched
    scheduler.close()


class Counting(ReferenceBackend):
    """Counts the tokens that it reads of prompts; `reads` is called before."""

    read = 0
    reads = staticmethod(lambda: None)

    def forward(self, batch):
        if any(work.prompt for work in batch):
            self.reads()
        self.read += sum(len(work.token_ids) for work in batch if work.prompt)
        return super().forward(batch)


def test_the_target_reads_what_is_typed_before_the_draft_does():
    """The next letter ends what was begun for the last one, and may come before the draft has read."""
    target, draft = (Counting(random_model(1, vocab_size=48), sessions=1, context_length=200) for _ in range(2))
    scheduler, prompt, order = Scheduler(target, [SpecExecPlanner(draft, depth=4)], budget=4), [5, 6, 7, 8] * 10, []
    target.reads, draft.reads = lambda: order.append("target"), lambda: order.append("draft")
    scheduler.submit(Request(prompt, SamplingParams(), 40), lambda event: None, idle_limit=0)
    while scheduler.pool.with_work or not order:
        scheduler.step()
    assert order == ["target", "draft"]
    assert draft.opened[0].token_ids == prompt
    scheduler.close()
