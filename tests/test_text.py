"""Streaming text: whole characters only, stop strings never shown, chat templates in a sandbox."""

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.errors import ContextFull, ModelError, UsageError
from edgespec.loop.templates import Sandbox
from edgespec.loop.text import TextStream, chat_text, render_chat


@dataclass
class ByteVocab:
    """One token per byte."""

    chat_template: str | None = None
    tool_template: str | None = None
    size: int = 256
    bos_id: int | None = None
    eos_id: int | None = None
    eog_ids: frozenset[int] = field(default_factory=frozenset)
    fingerprint: str = "bytes"
    longest: int = 3

    def encode(self, text: str, *, add_bos: bool, parse_special: bool) -> list[int]:
        return ([256] if add_bos else []) + list(text.encode())

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id])

    def token_text(self, token_id: int) -> str:
        return "<s>" if token_id == 256 else chr(token_id)


def pieces(data: bytes, stop: tuple[str, ...] = ()) -> list[str]:
    stream = TextStream(ByteVocab(), stop)
    out = [stream.push(token) for token in data]
    return [*out, stream.finish()]


@given(st.text())
def test_pieces_make_the_text_and_never_half_a_character(text: str) -> None:
    out = pieces(text.encode())
    assert "".join(out) == text
    assert all("\ufffd" not in piece for piece in out if "\ufffd" not in text)


def test_bytes_that_are_no_text_are_replaced_not_lost() -> None:
    assert "".join(pieces(b"a\xffb\xe2\x82")) == "a\ufffdb\ufffd"


@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3))
def test_text_ends_before_the_first_stop_string(text: str, stop: list[str]) -> None:
    # The stop string that is complete first ends the text, as it would for somebody who reads along.
    expected = text
    for end in range(len(text) + 1):
        found = [text[:end].find(s) for s in stop if s in text[:end]]
        if found:
            expected = text[: min(found)]
            break
    assert "".join(pieces(text.encode(), tuple(stop))) == expected


def test_the_beginning_of_a_stop_string_is_held_back_until_it_is_none() -> None:
    stream = TextStream(ByteVocab(), ("STOP",))
    shown = [stream.push(token) for token in b"xSTx"]
    assert shown == ["x", "", "", "STx"]
    assert not stream.stopped
    shown = [stream.push(token) for token in b"STOPy"]
    assert shown == ["", "", "", "", ""]
    assert stream.stopped
    assert stream.finish() == ""


def test_a_held_back_beginning_is_text_when_the_tokens_end() -> None:
    assert "".join(pieces(b"so ST", ("STOP",))) == "so ST"


@pytest.mark.parametrize(
    ("stop", "says"),
    [
        (("",), "stop string is empty"),
        (("a" * 2500,) * 2, "the stop strings have 5000 characters in all, but at most 4096 may be given"),
    ],
)
def test_stop_strings_have_limits(stop: tuple[str, ...], says: str) -> None:
    """Every token's text is compared with all their beginnings."""
    with pytest.raises(UsageError, match=says):
        TextStream(ByteVocab(), stop)


def test_a_chat_template_gets_messages_and_asks_for_an_answer() -> None:
    message = "[{{ m.role }}] {{ m['content'] }}\n"
    template = "{% for m in messages %}" + message + "{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    ids = render_chat(ByteVocab(template), [{"role": "user", "content": "hé"}])
    assert bytes(ids[1:]).decode() == "[user] hé\n>"
    assert ids[0] == 256


def test_the_start_token_is_not_doubled() -> None:
    vocab = ByteVocab("{{ bos_token }}hi", bos_id=256)
    assert render_chat(vocab, [{"role": "user", "content": ""}])[0] != 256


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",  # the way out of an unguarded template
        "{{ messages.append(1) }}",
        "{{ nothing.here }}",
        "{% if %}",
    ],
)
def test_a_template_that_misbehaves_is_an_error_of_the_model(template: str) -> None:
    with pytest.raises(ModelError, match="chat template"):
        render_chat(ByteVocab(template), [{"role": "user", "content": "x"}])


def test_a_template_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, parse = [], Sandbox.parse

    def counting(self: Sandbox, source: str) -> Any:
        compiled.append(source)
        return parse(self, source)

    monkeypatch.setattr(Sandbox, "parse", counting)
    template = "compiled once {{ messages[0].content }}"
    texts = [bytes(render_chat(ByteVocab(template), [{"role": "user", "content": said}])[1:]) for said in "ab"]
    assert texts == [b"compiled once a", b"compiled once b"]
    assert compiled == [template]


FIRST = "{% if messages[0].role == 'system' %}S:{{ messages[0].content }};{% set messages = messages[1:] %}{% endif %}"
LOOP = "{% for m in messages %}{% if m.role in known %}{{ m.role[0] }}:{{ m.content }};{% endif %}{% endfor %}"
TURNS = "{% set known = ['user', 'assistant', 'tool'] %}"
STRICT = "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}{% endfor %}"
ALL = "{% set known = ['system', 'user', 'assistant', 'tool'] %}"


@pytest.mark.parametrize(
    ("template", "roles", "expected"),
    [
        (ALL + LOOP, "suasu", "s:0;u:1;a:2;s:3;u:4;"),
        (FIRST + TURNS + LOOP, "suasu", "S:0;u:1;a:2;u:3\n\n4;"),  # it drops the others
        (FIRST + TURNS + STRICT + LOOP, "suasu", "S:0;u:1;a:2;u:3\n\n4;"),  # it refuses the others
        (FIRST + TURNS + LOOP, "susa", "S:0;u:1\n\n2;a:3;"),
        (FIRST + TURNS + LOOP, "ssu", "S:0\n\n1;u:2;"),
        (FIRST + TURNS + LOOP, "uatsa", "u:0;a:1;t:2\n\n3;a:4;"),
        (FIRST + TURNS + LOOP, "uas", "u:0;a:1;u:2;"),
        (FIRST + TURNS + LOOP, "uasa", "u:0;a:1;u:2;a:3;"),
        (TURNS + STRICT + LOOP, "suasu", "u:0\n\n1;a:2;u:3\n\n4;"),  # it refuses all, as Gemma 2's
        (TURNS + STRICT + LOOP, "su", "u:0\n\n1;"),
        (FIRST + TURNS + LOOP, "dud", "u:0\n\n1\n\n2;"),
        (TURNS + LOOP, "su", "u:0\n\n1;"),  # it drops all
        (FIRST + TURNS + LOOP + "{{ messages[-1].role[:0] }}", "s", "u:0;"),  # it needs one more, as Nemotron's
    ],
)
def test_no_system_message_is_dropped_or_refused(template: str, roles: str, expected: str) -> None:
    """As Claude Code sends them, in the middle of a conversation."""
    names = {"s": "system", "u": "user", "a": "assistant", "t": "tool", "d": "developer"}
    messages = [{"role": names[role], "content": str(i)} for i, role in enumerate(roles)]
    assert chat_text(ByteVocab(template), messages) == expected
    assert [message["content"] for message in messages] == list(map(str, range(len(roles))))


STRIPPED = "{% for m in messages %}{{ m.role[0] }}:{{ m.content | trim }};{% endfor %}"
THOUGHTS = (
    "{% for m in messages %}{{ m.role[0] }}:{% if m.role == 'assistant' and loop.last %}<think>"
    "{{ m.reasoning_content or '' }}</think>{% endif %}{{ m.content.split('</think>')[-1] }};{% endfor %}"
)
ASKED = "{% if add_generation_prompt %}a:{% endif %}"


@pytest.mark.parametrize(
    ("template", "roles", "begun", "expected"),
    [
        (ALL + LOOP + ASKED, "sua", "So", "s:0;u:1;a:So"),
        (ALL + LOOP + ASKED, "uaua", "0", "u:0;a:1;u:2;a:0"),  # it is in the text before, too
        (ALL + LOOP + ASKED, "ua", "", "u:0;a:"),
        (STRIPPED + ASKED, "ua", "So ", "u:0;a:So "),  # token for token what the caller gave
        (THOUGHTS + ASKED, "ua", "So", "u:0;a:<think></think>So"),
        (FIRST + TURNS + STRICT + LOOP + ASKED, "suasa", "So", "S:0;u:1;a:2;u:3;a:So"),
    ],
)
def test_the_last_message_of_the_assistant_begins_its_answer(
    template: str, roles: str, begun: str, expected: str
) -> None:
    names = {"s": "system", "u": "user", "a": "assistant"}
    messages = [{"role": names[role], "content": str(i)} for i, role in enumerate(roles)]
    messages[-1]["content"] = begun
    assert chat_text(ByteVocab(template), messages, answer=True) == expected
    assert chat_text(ByteVocab(template), messages).endswith(f"{begun.strip()};")  # a conversation alone stays whole
    assert messages[-1]["content"] == begun


SAID = {"role": "assistant", "content": "So"}


HI: dict[str, object] = {"role": "user", "content": "x"}
CALLED = "calls a tool: give the tool's result after it"
NO_TEXT = "must be a text, a list of text parts, or None$"
CANNOT = "^the model's chat template cannot show these messages: "


@pytest.mark.parametrize(
    ("template", "messages", "says"),
    [
        (ALL + LOOP, [HI, SAID | {"tool_calls": [{"function": {}}]}, SAID], CALLED),
        (ALL + LOOP, [HI, SAID | {"tool_calls": [{"function": {}}]}], CALLED),
        (ALL + LOOP, [HI, SAID | {"content": ["So"]}], rf"content is \['So'\], but {NO_TEXT}"),
        ("{{ messages[0].content }}", [HI, SAID], "does not show the assistant's last message: leave it out"),
        (None, [HI], "no chat template"),
        ("{{ raise_exception('roles must alternate') }}", [HI], "roles must alternate"),
        *(
            (ALL + LOOP, [message, 6], rf"a message is {re.escape(str(message))}, but must be like .*role.*user")
            for message in (5, {"a": 1}, {"role": None, "content": "Hi"})  # token ids, say
        ),
        *(
            (ALL + LOOP, [HI | {"content": wrong}], rf"^a message's content is {re.escape(repr(wrong))}, but {NO_TEXT}")
            for wrong in (5, {"type": "text", "text": "a"}, [{"type": "text"}], [{"type": "image_url", "text": "a"}])
        ),
        *(
            ("{{ " + wrong + " }}", [HI], CANNOT)
            for wrong in ("1 // (messages|length - 1)", "'{9}'.format()", "range(10**7)|list")
        ),
        # Hermes 2 Pro's describes the type of a tool's parameter by itself, where the schema gives none.
        ("{% macro kind(of) %}{{ kind(of) }}{% endmacro %}{{ kind(messages) }}", [HI], CANNOT + ".*recursion"),
    ],
)
def test_what_cannot_be_shown_or_continued_is_said(template: str | None, messages: list[Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        render_chat(ByteVocab(template), messages)


TEMPLATES = sorted(Path(os.environ.get("EDGESPEC_TEMPLATES", "nowhere")).glob("*.jinja"))


@pytest.mark.skipif(not TEMPLATES, reason="EDGESPEC_TEMPLATES is no folder of chat templates")
@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
@pytest.mark.parametrize("roles", ["su", "s", "ssu", "uas", "suasu", "dusadu", "uassu", "usau", "sus"])
def test_published_templates_drop_and_refuse_no_system_message(path: Path, roles: str) -> None:
    """Each message is there once. Some templates show all system messages at the beginning."""
    names = {"s": "system", "u": "user", "a": "assistant", "d": "developer"}
    messages = [{"role": names[role], "content": f"message-{i}."} for i, role in enumerate(roles)]
    text = chat_text(ByteVocab(path.read_text("utf-8")), messages, answer=True)
    assert sorted(re.findall(r"message-(\d)\.", text)) == list(map(str, range(len(roles))))


@pytest.mark.skipif(not TEMPLATES, reason="EDGESPEC_TEMPLATES is no folder of chat templates")
@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_published_templates_let_an_answer_go_on(path: Path) -> None:
    messages = [{"role": "user", "content": "What is 2 + 2?"}, {"role": "assistant", "content": "It is "}]
    assert chat_text(ByteVocab(path.read_text("utf-8")), messages, answer=True).endswith("It is ")


def test_what_was_rendered_stays_the_beginning() -> None:
    """So a kept prefix is used again."""
    messages = [{"role": role, "content": role} for role in ("system", "user", "assistant", "system", "user")]
    vocab = ByteVocab(FIRST + TURNS + LOOP)
    assert chat_text(vocab, messages).startswith(chat_text(vocab, messages[:3]))


def test_contents_are_texts_parts_or_none() -> None:
    """As OpenAI's and Anthropic's packages write them; templates would show Python's notation."""
    parts: list[dict[str, object]] = [{"type": "text", "text": "a"}, {"type": "output_text", "text": "b"}]
    one: dict[str, object] = {"role": "system", "content": parts}
    messages: list[dict[str, object]] = [one, {"role": "user", "content": tuple(parts)}, {"role": "assistant"}]
    vocab = ByteVocab(FIRST + TURNS + LOOP)
    text = chat_text(vocab, [*messages, {"role": "tool", "content": None}, {"role": "user", "content": []}])
    assert text == "S:ab;u:ab;a:;t:;u:;"
    assert one == {"role": "system", "content": parts}
    begun = render_chat(vocab, [{"role": "user", "content": "x"}, {"role": "assistant", "content": parts}])
    assert bytes(begun[1:]).endswith(b"ab")  # behind the start token
    with pytest.raises(ContextFull):
        render_chat(vocab, [{"role": "user", "content": [parts[0] | {"text": "a" * 3000}]}], context_length=100)


WRITTEN = "{{ {'b': 'ä', 'a': 1} | "


@pytest.mark.parametrize(
    ("template", "written"),
    [
        (WRITTEN + "tojson }}", '{"b": "ä", "a": 1}'),
        (WRITTEN + "tojson(ensure_ascii=False) }}", '{"b": "ä", "a": 1}'),
        (WRITTEN + "tojson(ensure_ascii=True, sort_keys=True) }}", '{"a": 1, "b": "\\u00e4"}'),
        (WRITTEN + "tojson(separators=(',', ':')) }}", '{"b":"ä","a":1}'),
        (WRITTEN + "tojson(indent=1) }}", '{\n "b": "ä",\n "a": 1\n}'),
        # So does the template that llama.cpp has for DeepSeek R1.
        ("{{ messages | map(attribute='role') | tojson }}", '["user", "user"]'),
        ("{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}!{% endfor %}", "x!x!"),
        # Firefunction's cannot do without the date.
        ("{{ (datetime + '.' + functions).split(' ') | length }}", "3"),
    ],
)
def test_templates_have_the_filters_tags_and_variables_that_they_know(template: str, written: str) -> None:
    assert chat_text(ByteVocab(template), [HI] * 2) == written


@pytest.mark.parametrize("template", ["{{ raise_exception('it is rendered') }}", "{{ messages[0].role * 999 }}"])
def test_what_cannot_fit_is_refused_before_it_is_rendered_or_tokenized(template: str) -> None:
    content = "x" * 3000 if "raise" in template else ""
    says = r"^prompt is too long: at least 1\d\d\d tokens, but 99 is the maximum; .* is 100 tokens, .*: shorten"
    with pytest.raises(ContextFull, match=says):
        render_chat(ByteVocab(template), [{"role": "user", "content": content}], context_length=100)


def test_many_system_messages_become_one_text() -> None:
    """20,000 of 300 characters fit into a request."""
    messages = [{"role": "user", "content": "u"}, *[{"role": "system", "content": "s" * 300}] * 20_000]
    text = chat_text(ByteVocab(FIRST + TURNS + STRICT + LOOP), messages)
    assert text == "u:" + "\n\n".join(["u", *["s" * 300] * 20_000]) + ";"


def test_many_neighbours_become_one_text() -> None:
    alternate = "{% for m in messages %}{% if loop.index0 %}{{ raise_exception('two') }}{% endif %}{% endfor %}"
    text = chat_text(ByteVocab(alternate + ALL + LOOP), [{"role": "user", "content": "u" * 300}] * 20_000)
    assert text == "u:" + "\n\n".join(["u" * 300] * 20_000) + ";"
