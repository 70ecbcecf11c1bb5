"""Histories of every shape, by templates of every rule: what was said is in the prompt."""

import json
import os
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_text import ByteVocab

pytest.importorskip("starlette", reason="the server is not installed: pip install 'edgespec[server]'")
pytest.importorskip("llguidance", reason="needs llguidance: pip install 'edgespec[server]'")

from edgespec.errors import ModelError, UsageError
from edgespec.loop.text import chat_text
from edgespec.server.conversation import Conversation, Turn
from edgespec.server.model_format import ModelFormat
from edgespec.server.tool_calls import Call, choose_tools


def each(*parts: str) -> str:
    return "{% set ns = namespace(n=0, called=false) %}{% for m in messages %}" + "".join(parts) + "{% endfor %}"


def refuse(condition: str) -> str:
    return "{% if " + condition + " %}{{ raise_exception('" + condition.replace("'", "") + "') }}{% endif %}"


def calls(some: str = "", arguments: str = "{{ c.function.arguments | tojson }}") -> str:
    return "{% for c in (m.tool_calls or [])" + some + " %}<call>{{ c.function.name }}" + arguments + "{% endfor %}"


SAID, SYSTEM_ONCE = "<{{ m.role }}>{{ m.content }}", refuse("m.role == 'system' and not loop.first")
COUNTED = "{% if m.role in ['user', 'assistant'] and not m.tool_calls %}"
EITHER = "{% if m.tool_calls %}" + calls() + "{% else %}" + SAID + "{% endif %}"
RULES = {
    "anything": each(SAID, calls()),
    "roles alternate, as Gemma 2's": each(refuse("(m.role == 'user') != (loop.index0 % 2 == 0)"), SAID),
    "turns without calls alternate, as Mistral's": each(
        COUNTED, refuse("(m.role == 'user') != (ns.n % 2 == 0)"), "{% set ns.n = ns.n + 1 %}{% endif %}", SYSTEM_ONCE,
        refuse("m.role == 'tool' and m.tool_call_id | length != 9"), EITHER,
    ),
    "one call at a time, as Llama 3's": each(refuse("m.tool_calls and m.tool_calls | length > 1"), EITHER),
    "a second call is dropped, as gpt-oss's": each(SAID, calls("[:1]")),
    "calls are dropped, as SmolLM3's": each(SAID),
    "results are dropped": each("{% if m.role != 'tool' %}", SAID, calls(), "{% endif %}"),
    "results follow a call, as gpt-oss's": each(
        refuse("m.role == 'tool' and not ns.called"), "{% set ns.called = m.tool_calls or m.role == 'tool' %}", SAID,
        calls(),
    ),
    "arguments are an object, as Qwen3-Coder's": each(
        SAID, calls("", "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }};{% endfor %}")
    ),
    "arguments are a text, as Functionary's": each(SAID, calls("", "{{ '=' + c.function.arguments }}")),
    "arguments are texts": each(
        SAID, calls("", "{% for k, v in c.function.arguments | dictsort %}{{ k + v }};{% endfor %}")
    ),
    "no turn is empty, as Ministral's": each(
        refuse("m.role == 'assistant' and not m.content and not m.tool_calls"), SAID, calls()
    ),
    "a thought beside a call is its text, as gpt-oss's": each(
        refuse("m.thinking and m.content and m.tool_calls"), SAID, "{{ m.thinking }}", calls(), "{# message.thinking #}"
    ),
    "the user begins, as Llama 3's with tools": each(
        SYSTEM_ONCE, "{% if loop.first and m.role != 'system' %}", refuse("m.role != 'user'"), "{% endif %}", SAID,
        calls(),
    ),
    "the last system message is the first, as DeepSeek R1's": "{% set s = messages | selectattr('role', 'eq', 'system')"
    " | list %}{{ s[-1].content if s }}" + each("{% if m.role != 'system' %}", SAID, calls(), "{% endif %}"),
}  # fmt: skip
PUBLISHED = {
    path.stem: path.read_text("utf-8") for path in Path(os.environ.get("EDGESPEC_TEMPLATES", "nowhere")).glob("*.jinja")
}
# Turns: u, s, t the user's, the system's, a tool's; a a text, _ none, h a thought of the assistant; digits the ids of
# calls and of what is answered.
TURNS = ["u", "s", "a", "_", "h", "_1", "_2", "a1", "ah2", "_12", "a21", "_11", "t", "t1", "t2", "t9"]
SHAPES = (
    "u", "a", "a u", "u u", "u a a u", "s u u a a u", "a a u u s u", "s", "s s u", "u s a", "u _ u", "u h u", "u _ a u",
    "u _1 t1", "s u _1 t1", "u a1 t1", "u ah1 t1", "u a1 t1 a u", "u h1 t1 ah u", "u _1 t1 u", "u _1 t1 s u", "_1 t1 u",
    "u _1 t1 _2 t2 _3 t3 a u", "u _12 t1 t2", "u a12 t1 t2 a u", "u ah12 t2 t1 u", "u _12 t1 a u", "u _12 t2 u",
    "u _1 u", "u a1 a u", "u t9 u", "t9 u", "u _1 t1 t1 u", "u _1 u t1 u", "u _1 t1 _1 t1 a u", "u _11 t1 t1 u",
    "u _1 t u", "u u t a",
)  # fmt: skip
ARGUMENTS = (
    '{"x": "WORD"}', '{"x": "WORD', '["WORD"]', '"WORD"', '{"x": null, "y": [1, {"z": "WORD"}]}',
    '"{\\"x\\": \\"WORD\\"}"',
    '{"x": NaN, "y": "WORD"}', "WORD",
)  # fmt: skip


def turns_of(shape: str, arguments: str = ARGUMENTS[0]) -> list[Turn]:
    """Each text and call has a word of its own."""
    found = list[Turn]()
    for i, turn in enumerate(shape.split()):
        kind, ids = turn.rstrip("0123456789"), re.sub(r"\D", "", turn)
        role = {"u": "user", "s": "system", "t": "tool"}.get(kind, "assistant")
        said = [Call("f", arguments.replace("WORD", f"word-{i}-{n}."), id_) for n, id_ in enumerate(ids)]
        found.append(
            Turn(
                role,
                "" if kind in "_h" else f"word-{i}.",
                "Hm." if "h" in kind else None,
                said if role == "assistant" else (),
                (ids or None) if role == "tool" else None,
            )
        )
    return found


def check(template: str, turns: list[Turn]) -> None:
    tools = choose_tools([{"name": "f", "description": "word-0-0-0."}], "auto", parallel=True)
    form = ModelFormat(ByteVocab(template), template)
    conversation = Conversation(turns, tools)
    if turns[-1].calls or (turns[-1].role == "assistant" and turns[-2:][0].calls and not form.calls.is_generic):
        with pytest.raises(UsageError, match="give the tool's result after it"):
            form.prompt_ids(conversation)
        return
    text = bytes(token for token in form.prompt_ids(conversation) if token < 256).decode()
    assert "word-0-0-0." in text
    said = re.findall(r"word-\d+(?:-\d)?\.", str(turns))
    assert sorted(said) == sorted(re.findall(r"word-\d+(?:-\d)?\.", text)), text


@pytest.mark.parametrize("rule", RULES)
@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.sampled_from(TURNS), min_size=1, max_size=8),
    st.sampled_from(ARGUMENTS),
)
def test_any_history_is_shown_whole(rule: str, turns: list[str], arguments: str) -> None:
    check(RULES[rule], turns_of(" ".join(turns), arguments))


@pytest.mark.parametrize("shape", SHAPES)
def test_what_agents_send_is_shown_whole(shape: str) -> None:
    for template in RULES.values():
        check(template, turns_of(shape))


@pytest.mark.skipif(not PUBLISHED, reason="EDGESPEC_TEMPLATES is no folder of chat templates")
@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_published_templates_show_any_history_whole(name: str) -> None:
    for shape in SHAPES:
        check(PUBLISHED[name], turns_of(shape))
    for arguments in ARGUMENTS:
        check(PUBLISHED[name], turns_of("u _1 t1 u", arguments))


WALKED = (
    "{% macro tool_call(t) %}{{ t.name + ': ' + t.description }}{% for k, p in t.parameters.properties.items() %}"
    "{{ k + (p.description or '') }}{{ 'must' if k in t.parameters.required }}{% endfor %}{{ t.parameters | length }}"
    "{% endmacro %}{% for t in tools %}{{ tool_call(t.function) }}{% endfor %}{# <tool_call> #}" + RULES["anything"]
)
ODD = (
    {}, {"description": None, "parameters": None, "strict": None}, {"parameters": {}},
    {"parameters": {"type": "object"}},
    {"parameters": {"properties": None, "required": None, "type": None}},
    {"parameters": {"properties": {"a": True, "b": None, "c": {}, "d": {"enum": [1, None]}, "e": {"$ref": "#"}}}},
    {"parameters": {"anyOf": [{"required": ["a"]}]}, "more": 5},
)  # fmt: skip


@pytest.mark.parametrize("odd", ODD)
def test_a_tool_needs_no_more_than_a_name(odd: dict[str, object]) -> None:
    tools = choose_tools([{"name": "look", **odd}], "auto", parallel=True)
    for template in [WALKED, *PUBLISHED.values()]:
        form = ModelFormat(ByteVocab(template), template)
        if form.calls:
            assert (
                "look"
                in bytes(i for i in form.prompt_ids(Conversation([Turn("user", "Hi")], tools)) if i < 256).decode()
            )


def test_a_tool_with_a_schema_that_a_template_cannot_show_is_told_in_simple_types() -> None:
    """Hermes' templates describe the type null by itself, without an end."""
    walked = (
        "{% macro kind(t) %}{{ kind(t) if t is not string or t == 'null' else t }}{% endmacro %}{% for t in tools %}"
    )
    walked += (
        "{% for k, p in t.function.parameters.properties.items() %}{{ k }}:{{ kind(p.type) }} {{ p.description }};"
    )
    known = {"type": ["null", "integer"], "description": "A."}, {"type": "int", "enum": [1]}, {"description": 5}
    properties = dict(zip("abc", known, strict=True))
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": properties}}}
    template = walked + "{% endfor %}{% endfor %}" + RULES["anything"]
    text = chat_text(ByteVocab(template), [{"role": "user", "content": "Hi"}], tools=[tool])
    assert text == "a:integer A.;b:string ;c:string ;<user>Hi"


def test_a_tool_is_shown_as_it_came() -> None:
    """The order of its members is part of the prompt."""
    parameters = {"properties": {"b": {"type": "string"}, "a": {}}, "required": ["b"], "type": "object"}
    given = {"description": "It looks.", "strict": True, "name": "look", "parameters": parameters}
    (tool,) = choose_tools([given], "auto", parallel=True).all
    assert json.dumps(tool.shown["function"]) == json.dumps(given)


def test_what_a_template_cannot_do_with_a_tool_is_a_mistake_of_the_request() -> None:
    """A broken template is the model's mistake, which is another status."""
    walked = "{% if tools %}{{ tools[0].function.parameters.properties.a.b.c }}{% endif %}" + RULES["anything"]
    tool = {"type": "function", "function": {"name": "look", "parameters": {"properties": {"a": {}}}}}
    for template, error in [(walked, UsageError), ("{{ nothing.here }}", ModelError)]:
        with pytest.raises(error, match=r"^the model's chat template .*: '.+' (is undefined|has no attribute 'b')$"):
            chat_text(ByteVocab(template), [{"role": "user", "content": "Hi"}], tools=[tool])
