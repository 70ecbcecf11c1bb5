"""What one API key has sent spares another one nothing: neither cached tokens nor time tell what others asked."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_pool import pooled
from test_scheduler import LONG, PROMPTS, Reader, Recording, backend, planners, requests, run

pytest.importorskip("starlette", reason="the server is not installed: pip install 'edgespec[server]'")
pytest.importorskip("llguidance", reason="needs llguidance: pip install 'edgespec[server]'")

from test_server import HELLO, served

from edgespec.loop.passes import common_prefix
from edgespec.scheduler.disk_cache import DiskCache
from edgespec.scheduler.scheduler import Scheduler
from edgespec.server.access import sender_of

KEYS = ("first", "second")
LONG_CHAT = {"messages": [{"role": "user", "content": "Why is the sky blue? " * 9}], "max_tokens": 2, "seed": 1}
PATHS = {
    "/v1/chat/completions": LONG_CHAT,
    "/v1/completions": {"prompt": "Why is the sky blue? " * 9, "max_tokens": 2, "seed": 1},
    "/v1/messages": LONG_CHAT,
    "/v1/responses": {"input": "Why is the sky blue? " * 9, "max_output_tokens": 2, "seed": 1},
}


def cached_by(client, key, path="/v1/chat/completions", body=None):
    answer = client.post(path, json=body or PATHS[path], headers={"x-api-key": key}).json()
    usage = answer["usage"]
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    return details.get("cached_tokens", usage.get("cache_read_input_tokens"))


@pytest.mark.parametrize("path", PATHS)
def test_cached_tokens_are_those_of_the_same_key(path):
    with served(keys=KEYS) as client:
        assert cached_by(client, "first", path) == 0
        assert cached_by(client, "second", path) == 0
        assert cached_by(client, "second", path) == cached_by(client, "first", path) > 100


@pytest.mark.parametrize("keys", [[], ["first"], ["first", "first"]])
def test_with_one_key_or_none_all_clients_share(keys):
    with served(keys=keys) as client:
        assert cached_by(client, "first") == 0
        assert cached_by(client, "first", body=LONG_CHAT | {"seed": 2}) > 100
        assert [slot.sender for slot in client.model.scheduler.pool.slots] == ["", ""]


def test_an_answer_that_is_typed_ahead_is_for_its_key_alone():
    with served(keys=KEYS) as client:
        typed = LONG_CHAT | {"pause": True, "id": "here"}
        for key in KEYS:
            client.put("/edgespec/draft-prompt", json=typed, headers={"x-api-key": key})
        latest = client.app._app.state.models.all[0].service.typing_ahead._latest
        assert [one.request.sender for one in latest.values()] == list(map(sender_of, KEYS))
        for _ in range(2):  # its own is taken over, and then the first one's would fit
            assert cached_by(client, "second") is not None
        assert [one.request.sender for one in latest.values()] == [sender_of("first")]


def test_a_grammar_that_one_key_has_sent_is_compiled_again_for_another():
    form = {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}
    with served(keys=KEYS) as client:
        compiled = client.model._compiler.compiled
        misses = compiled.cache_info().misses
        for key in (*KEYS, *KEYS):
            answer = client.post(
                "/v1/chat/completions", json=HELLO | {"max_tokens": 1, "response_format": form},
                headers={"x-api-key": key},
            )  # fmt: skip
            assert answer.status_code == 200
        assert compiled.cache_info().misses == misses + 2


def test_kept_sessions_are_for_their_key_also_after_a_restart(tmp_path):
    seen = []
    for keys in (["first"], KEYS, KEYS, ["second"]):
        with served(keys=keys) as client:
            pool = client.model.scheduler.pool
            pool.disk_cache = DiskCache(tmp_path, client.model.target, 1 << 30, least=20)
            seen.append([cached_by(client, key) for key in keys])
    assert seen[:2] == [[0], [0, 0]]
    assert min(seen[2]) > 100
    assert seen[3][0] > 100  # what was kept before there were several
    assert "first" not in "".join(path.read_text("latin-1") for path in tmp_path.iterdir())


texts = st.tuples(requests, st.sampled_from(["", "a", "b"]))


@pytest.mark.exhaustive
@settings(max_examples=30, deadline=None)
@given(st.lists(texts, min_size=2, max_size=8), st.sampled_from([300, None]), st.booleans(), st.integers(0, 4))
def test_whatever_comes_no_sender_gets_tokens_of_another(tmp_path_factory, asked, cells, keep, steps):
    target = pooled(cells)
    scheduler = Scheduler(target, planners("specexec", 3), budget=6)
    if keep:
        scheduler.pool.disk_cache = DiskCache(tmp_path_factory.mktemp("shelf"), target, 1 << 20, least=8)
    readers = []
    for (_, prompt, temperature, seed, most, _), sender in asked:
        readers.append(Reader(scheduler, prompt, temperature, seed, most, sender=sender))
        for _ in range(steps):
            scheduler.step()
    run(scheduler)
    for reader in readers:
        reader.check()
        request = reader.seq.request
        own = [
            PROMPTS[other.key[0]] + other.tokens
            for other in readers
            if other is not reader and other.seq.request.sender == request.sender
        ]
        shared = max((common_prefix(text, request.prompt_ids) for text in own), default=0)
        assert reader.stats.cached_tokens <= shared
    for slot in scheduler.pool.slots:  # the draft's session too begins with nothing of another sender
        own = [PROMPTS[one.key[0]] + one.tokens for one in readers if one.seq.request.sender == slot.sender]
        held = [slot.session.token_ids, slot.draft.token_ids if slot.draft else []]
        assert all(not ids[1:] or any(common_prefix(text, ids) for text in own) for ids in held)
    scheduler.close()


def test_a_session_that_goes_to_another_sender_is_emptied_with_its_draft():
    target = backend(sessions=1, kind=Recording)
    (planner,) = planners("specexec", 1)
    scheduler = Scheduler(target, [planner], budget=4)
    for sender, read in (("a", len(LONG)), ("b", len(LONG)), ("b", 0), ("a", len(LONG))):
        target.passes.clear()
        before = planner.draft_session.token_ids[:]
        reader = Reader(scheduler, 4, 0.7, 1, sender=sender)
        scheduler.step()
        assert (common_prefix(before, planner.draft_session.token_ids) > len(LONG) // 2) == (read == 0)
        run(scheduler)
        reader.check()
        assert sum(size for works in target.passes for size, prompt in works if prompt) == read
    scheduler.close()


def test_a_last_row_is_computed_again_for_another_sender():
    class Rows(Recording):
        def forward(self, batch):
            wanted.extend(len(work.wanted) for work in batch if work.prompt)
            return super().forward(batch)

    scheduler = Scheduler(backend(sessions=2, kind=Rows), planners("none", 2), budget=4)
    for sender, rows in (("a", 1), ("b", 1), ("b", 0)):
        wanted = []
        reader = Reader(scheduler, 2, 0.7, 1, sender=sender)
        run(scheduler)
        reader.check()
        assert sum(wanted) == rows
    scheduler.close()


def test_a_request_does_not_wait_until_another_senders_equal_prompt_is_read():
    target = backend(sessions=3, kind=Recording)
    scheduler = Scheduler(target, planners("none", 3), budget=4)
    readers = [Reader(scheduler, 4, 1.0, 1, sender=sender) for sender in ("a", "b", "a")]
    for _ in range(2):
        scheduler.step()
    active = [seq.request.sender for seq in scheduler.pool.seqs if seq.is_active]
    run(scheduler)
    assert sorted(active) == ["a", "b"]
    for reader in readers:
        reader.check()
    assert sum(size for works in target.passes for size, prompt in works if prompt) == 2 * len(LONG)
    scheduler.close()
