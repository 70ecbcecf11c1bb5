"""Calls of tools told before they are written: proposed, then confirmed or withdrawn, and no text changed by it."""

import json

import pytest
from edgespec.backends.reference.backend import ReferenceBackend, perturbed, random_model

pytest.importorskip("starlette", reason="the server is not installed: pip install 'edgespec[server]'")
pytest.importorskip("llguidance", reason="needs llguidance: pip install 'edgespec[server]'")

from auto_planners import auto_planner
from starlette.testclient import TestClient
from test_server import HELLO, stream
from test_server_tools import TEMPLATE, TOOLS

from edgespec.loop.sampling import SamplingParams
from edgespec.model import Model
from edgespec.planners.auto import new_auto_state
from edgespec.planners.chain import ChainPlanner
from edgespec.planners.drafting import CATCH_UP
from edgespec.planners.none import NonePlanner
from edgespec.planners.specexec import SpecExecPlanner
from edgespec.planners.sssd import SssdPlanner
from edgespec.scheduler.requests import Ended, Foresaw, Request, Wrote
from edgespec.scheduler.scheduler import AHEAD, MOST_AHEAD, Scheduler
from edgespec.server.answers import Answer
from edgespec.server.app import make_app
from edgespec.server.model_format import ModelFormat
from edgespec.server.service import Service
from edgespec.server.speculative_calls import SpeculativeCalls
from edgespec.server.tool_calls import Tool, Tools

BASE = random_model(1, vocab_size=48, sharpness=3.0)
BASE.unembedding[1] = 0


def write(kind, temperature, foresee, draft=BASE, monkeypatch=None):
    """(tokens, events) of a text with a draft."""
    target = ReferenceBackend(BASE, sessions=1, context_length=200)
    drafts, pace = ReferenceBackend(draft, sessions=1, context_length=200), new_auto_state(True)
    planner = {
        "specexec": lambda: SpecExecPlanner(drafts, depth=4),
        "chain": lambda: ChainPlanner(drafts, depth=4),
        "auto": lambda: auto_planner("auto", pace, SssdPlanner(), SpecExecPlanner(drafts, cost=pace.draft)),
        "none": NonePlanner,
    }[kind]()
    scheduler, events = Scheduler(target, [planner], budget=6), []
    request = Request([5, 6, 7], SamplingParams(temperature=temperature, seed=2), 40, foresee=foresee)
    scheduler.submit(request, events.append)
    while not isinstance(events[-1] if events else None, Ended):
        scheduler.step()
    scheduler.close()
    return [chunk.token_id for event in events if isinstance(event, Wrote) for chunk in event.chunks], events


@pytest.mark.parametrize("kind", ["specexec", "chain", "auto", "none"])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_what_is_foreseen_changes_no_text(kind, temperature):
    plain, _ = write("none", temperature, False)
    for draft in (BASE, perturbed(BASE, 0.5, 1)):
        tokens, events = write(kind, temperature, True, draft)
        assert tokens == plain
        seen = [event.token_ids for event in events if isinstance(event, Foresaw)]
        assert bool(seen) == (kind != "none")
        assert all(len(one) <= MOST_AHEAD for one in seen)
        assert write(kind, temperature, False, draft)[0] == plain
    assert 0 < AHEAD < 1


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_draft_like_the_target_foresees_its_text(temperature, monkeypatch):
    """Coupled to the target's noise, also where it is sampled. However busy the machine is: it may take its time."""
    monkeypatch.setattr("edgespec.scheduler.scheduler.AHEAD", 1e9)
    tokens, events = write("specexec", temperature, True)
    done, right = 0, 0
    for event in events:
        if isinstance(event, Wrote):
            done += len(event.chunks)
        elif isinstance(event, Foresaw):
            expected = tokens[done : done + len(event.token_ids)]
            assert event.token_ids[: len(expected)] == expected
            right += len(expected)
    assert right > 10


class Prophet(SssdPlanner):
    """Foresees what it is told to."""

    text: tuple[str, ...] = ()  # one after another, from the beginning of the answer

    def __init__(self, vocab):
        super().__init__()
        self._vocab, self._told = vocab, 0

    def begin(self, prompt_ids):
        super().begin(prompt_ids)
        self._told = 0

    def foresee(self, context, count, seconds):
        written = len(context.token_ids) - context.prompt_length
        if self._told >= len(self.text):
            return []
        ids = self._vocab.encode(self.text[self._told], add_bos=False, parse_special=False)
        self._told += 1
        return ids[written : written + count]


@pytest.fixture
def client():
    target = ReferenceBackend(random_model(2, vocab_size=258), sessions=1, context_length=1000)
    target.model.unembedding[1] = 0
    target.vocab.chat_template = TEMPLATE
    with Model(target, [Prophet(target.vocab)], budget=8) as model:
        app = make_app(Service(model, "tiny"))
        with TestClient(app, base_url="http://127.0.0.1:8080", raise_server_exceptions=False) as client:
            yield client


CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "%s", "days": %d}}\n</tool_call>'


def test_proposals_are_confirmed_or_withdrawn(client):
    choice = {"type": "function", "function": {"name": "weather"}}
    body = HELLO | {"max_tokens": 120, "temperature": 0.8, "seed": 1, "tools": TOOLS, "tool_choice": choice}
    (real,) = client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["tool_calls"]
    right = json.loads(real["function"]["arguments"])
    wrong = "Prague" if right["city"] == "Paris" else "Paris"
    asked = body | {"edgespec": {"speculate_tools": True}}
    for texts, expected in [
        ([CALL % (right["city"], right["days"])], ["proposed", "confirmed"]),
        ([CALL % (wrong, 1)], ["proposed", "withdrawn"]),
        ([(CALL % (right["city"], right["days"])).partition("\n</")[0]], ["proposed", "confirmed"]),  # without its end
        ([(CALL % (right["city"], right["days"])).partition("}}")[0]], []),  # half of it
        (["Hello."], []),
    ]:
        Prophet.text = tuple(texts)
        parts = [json.loads(data) for data in stream(client, "/v1/chat/completions", asked)[:-1]]
        told = [part["edgespec"]["speculative_tool_call"] for part in parts if not part["choices"]]
        assert [one["status"] for one in told] == expected
        choices = [part["choices"][0] for part in parts if part["choices"]]
        (written,) = [call for choice in choices for call in choice["delta"].get("tool_calls", ())]
        assert written["function"] == real["function"]
        assert len({one["id"] for one in told}) == (1 if told else 0)
        if expected[1:] == ["confirmed"]:
            assert written["id"] == told[0]["id"]
            order = [bool(part["choices"]) and bool(part["choices"][0]["delta"].get("tool_calls")) for part in parts]
            assert parts.index(next(part for part in parts if not part["choices"])) < order.index(True)
        elif told:
            assert written["id"] != told[0]["id"]
    quiet = [json.loads(data) for data in stream(client, "/v1/chat/completions", body)[:-1]]
    assert all(part["choices"] for part in quiet)  # without being asked for


def test_a_prediction_is_parsed_by_schemas_of_any_depth():
    """Copying them for every prediction would also take longer than a step."""
    chain = {f"d{i}": {"type": "object", "properties": {"next": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(200)}
    deep = {"type": "object", "$defs": chain | {"d200": {}}, "properties": {"a": {"$ref": "#/$defs/d0"}}}
    tools = Tools([Tool({"name": "weather", "parameters": deep})])
    vocab = ReferenceBackend(random_model(2, vocab_size=258), sessions=1, context_length=1000).vocab
    request = Request([1], SamplingParams(), 100)
    calls = SpeculativeCalls(Answer(request, ModelFormat(vocab, TEMPLATE).parser(tools, in_thought=False)), vocab)
    seen = Foresaw(vocab.encode(CALL % ("Paris", 1), add_bos=False, parse_special=False))
    for _ in range(2):  # the first leaves nothing behind in the answer's parser
        told = [one["status"] for one in calls.after(seen)]
        assert told == ["proposed"]
        calls = SpeculativeCalls(calls._answer, vocab)


class Counting(ReferenceBackend):
    """Counts the tokens that it reads."""

    read = 0

    def forward(self, batch):
        self.read += sum(len(work.token_ids) for work in batch)
        return super().forward(batch)


def test_a_draft_that_was_left_alone_reads_each_token_once():
    """It catches up by and by, and keeps what it has read of what is certain."""
    target = ReferenceBackend(BASE, sessions=1, context_length=600)
    draft = Counting(BASE, sessions=1, context_length=600)

    class Left(NonePlanner):
        """Looks ahead with a draft, and guesses nothing."""

        def __init__(self):
            self.inner = SpecExecPlanner(draft, depth=4)

        def begin(self, prompt_ids):
            self.inner.begin(prompt_ids)

        def foresee(self, context, count, seconds):
            before = draft.read
            found = self.inner.foresee(context, min(count, 3), 60.0)
            asked.append((draft.read - before, len(found)))
            return found

        def close(self):
            self.inner.close()

    asked, events = [], []
    scheduler = Scheduler(target, [Left()], budget=6)
    prompt = [3 + i % 40 for i in range(300)]
    scheduler.submit(Request(prompt, SamplingParams(), 40, foresee=True), events.append)
    while not isinstance(events[-1] if events else None, Ended):
        scheduler.step()
    scheduler.close()
    first = next(i for i, (_, found) in enumerate(asked) if found)
    assert [found for _, found in asked[:first]] == [0] * first
    assert sum(read for read, _ in asked[: first + 1]) <= 300 + 1 + first + 3
    assert max(read for read, _ in asked) <= CATCH_UP + 3
    assert max(read for read, _ in asked[first + 1 :]) <= MOST_AHEAD
    assert any(isinstance(event, Foresaw) for event in events)
