"""Recorded calls against what a draft makes of them, at the beginning of an answer and behind a call's marker."""

from types import SimpleNamespace

import pytest
from edgespec.backends.reference.backend import ReferenceBackend, random_model

pytest.importorskip("starlette", reason="the server is not installed: pip install 'edgespec[server]'")

from test_server_tools import TEMPLATE

from benchmarks import tool_waits
from edgespec.server.call_formats import HERMES, Call

TALK = [
    {"role": "user", "content": "What is the weather in Paris?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "1", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}],
    },
]
TRUE, OTHER = Call("weather", '{"city":"Paris"}'), Call("news", "{}")


@pytest.mark.parametrize(
    ("first", "second", "named", "hit", "asked"),
    [
        (TRUE, None, True, True, [""]),
        (None, TRUE, True, True, ["", "<tool_call>"]),
        (OTHER, Call("weather", "{}"), True, False, ["", "<tool_call>"]),
        (Call("weather", "{}"), TRUE, True, True, ["", "<tool_call>"]),
        (Call("weather", "{}"), None, True, False, ["", "<tool_call>"]),
        (OTHER, None, False, False, ["", "<tool_call>"]),
    ],
)
def test_the_draft_is_asked_again_behind_the_marker(monkeypatch, first, second, named, hit, asked):
    backend, seen = ReferenceBackend(random_model(0, vocab_size=258), context_length=4000), []
    backend.vocab.chat_template = TEMPLATE
    lengths = []

    def calls(draft, form, begun, ids):
        assert form == HERMES
        seen.append(begun)
        lengths.append(len(ids))
        return second if begun else first

    monkeypatch.setattr(tool_waits, "_first_call", calls)
    [turn] = tool_waits.replay(SimpleNamespace(target=backend), TALK, tool_waits.functions_of([TALK]))
    assert (turn.named, turn.hit, seen) == (named, hit, asked)
    marker = len(backend.vocab.encode("<tool_call>", add_bos=False, parse_special=True))
    if len(seen) > 1:
        assert lengths[1] - lengths[0] == marker
    whole = tool_waits.Turn("weather", True, True, turn.tokens + marker * (len(seen) - 1), 0.0)
    assert whole.hidden(1e9, 1.0) == whole.tokens  # all that the target has still to write
    assert turn.hidden(1.0, 100.0) == (1.0 if hit else 0.0)
    assert turn.hidden(10.0, 0.0) == 0.0  # the target is quicker than the draft
