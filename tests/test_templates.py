"""Chat templates that somebody else wrote: each is a text or one line, after a limited number of steps."""

import os
import random
import re
from pathlib import Path
from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from edgespec.errors import EdgespecError, ModelError, UsageError
from edgespec.loop import template_work, templates
from edgespec.loop.template_work import Work

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What's <b>2 + 2</b>?\n And 3 % 2?"},
    {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {"a": [2, 2]}}}]},
    {"role": "tool", "content": '{"sum": 4.5}'},
]
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"a": [1, None, {"ä": True}]}}} for name in "fg"]
FEW = 10**6  # steps


@pytest.fixture(autouse=True)
def _few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_work, "MOST_STEPS", FEW)


def rendered(template: str, **more: Any) -> str:
    return templates.rendered(template, {"messages": MESSAGES, "tools": TOOLS, **more}, Work())


def grown(step: str, start: str = "'ab'") -> str:
    """A template whose value x grows 99 times."""
    return f"{{% set ns = namespace(x={start}) %}}{{% for i in range(99) %}}{step}{{% endfor %}}{{{{ ns.x }}}}"


def shared(use: str, pair: str = "[{}, {}]") -> str:
    """A template whose values x and y have 2^60 parts, which are all one."""
    steps = "".join(f"{{% set ns.{name} = {pair.format(*[f'ns.{name}'] * 2)} %}}" for name in "xy")
    begin = "{% set ns = namespace(x=(1,), y=(1,)) %}{% for i in range(60) %}" + steps + "{% endfor %}"
    return begin + "{{ " + use + " }}"


def nested(step: str, use: str) -> str:
    """A template whose value x is 50,000 deep."""
    return f"{{% set ns = namespace(x=(1,)) %}}{{% for i in range(50000) %}}{step}{{% endfor %}}{{{{ {use} }}}}"


TWICE = "{% for i in range(99999) %}{% for j in range(99999) "
BROKEN = {
    "a tag that is nowhere": "{% nothing %}",
    "break outside a loop": "{% break %}",
    "thirty loops in each other": "{% for a in [1] %}" * 30 + "{% endfor %}" * 30,
    "brackets in each other": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "minus behind minus": "{{ " + "-" * 5000 + "1 }}",
    "a long chain of filters": "{{ x" + "|trim" * 20000 + " }}",
    "a long chain of attributes": "{{ x" + ".a" * 20000 + " }}",
    "a number of 200,000 digits": "{{ " + "9" * 200000 + " }}",
    "a template of a megabyte": "a" * 10**6,
    "another template": "{% include 'x' %}",
    "a block that calls itself": "{% block a %}{{ self.a() }}{% endblock %}",
    "escapes": "{% autoescape true %}{{ '<' }}{% endautoescape %}",
    "cycler": "{{ cycler() }}",
    "joiner": "{{ joiner() }}",
    "lipsum": "{{ lipsum() }}",
    "random": "{{ [1, 2] | random }}",
    "wordwrap": "{{ 'a b' | wordwrap(1) }}",
    "center": "{{ 'a' | center(10**9) }}",
    "the method center": "{{ 'a'.center(10**9) }}",
    "the method zfill": "{{ 'a'.zfill(10**9) }}",
    "the method translate": "{{ 'a'.translate({97: 'b' * 999}) }}",
    "the method encode": "{{ ('ä' * 99999).encode('punycode') }}",
    "the method to_bytes": "{{ (1).to_bytes(10**9, 'big') }}",
    "the method append": "{{ messages.append(1) }}",
    "the method of a type": "{{ dict.fromkeys(range(99999)) }}",
    "format_map": "{{ '{a}'.format_map({'a': 1}) }}",
}
REFUSED = {
    "a long text": "{{ 'a' * 10**13 }}",
    "a long list": "{{ [1] * 10**9 }}",
    "two loops": TWICE + "%}{% endfor %}{% endfor %}",
    "two loops with a condition": TWICE + "if j == 'x' %}{% endfor %}{% endfor %}",
    "two loops that write": TWICE + "%}word {% endfor %}{% endfor %}",
    "macros that end late": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}"
    "{{ m(90) }}",
    "loops that call themselves": "{% for x in [1, 2] recursive %}{{ loop([1, 2]) if loop.depth < 60 }}{% endfor %}",
    "text in a loop": "{% for i in range(99999) %}" + "x" * 99999 + "{% endfor %}",
    "text in a macro": "{% macro m() %}" + "x" * 99999 + "{% endmacro %}{% for i in range(99) %}{{ m() }}{% endfor %}",
    "a constant in a loop": "{% for i in range(99999) %}{{ '" + "x" * 99999 + "' }}{% endfor %}",
    "arguments of a macro": "{% macro m() %}{{ varargs[:0] }}{% endmacro %}"
    "{% for i in range(99) %}{{ m(*range(99999)) }}{% endfor %}",
    "+": grown("{% set ns.x = ns.x + ns.x %}"),
    "~": grown("{% set ns.x = ns.x ~ ns.x %}"),
    "+ of lists": grown("{% set ns.x = ns.x + ns.x %}", "[1]"),
    "%": grown("{% set ns.x = '%s%s' % (ns.x, ns.x) %}"),
    "the filter format": grown("{% set ns.x = '%s%s' | format(ns.x, ns.x) %}"),
    "the method format": grown("{% set ns.x = '{}{}'.format(ns.x, ns.x) %}"),
    "the filter replace": grown("{% set ns.x = ns.x | replace('a', 'aaaa') %}"),
    "the method replace": grown("{% set ns.x = ns.x.replace('a', 'aaaa') %}"),
    "the filter join": grown("{% set ns.x = [ns.x, ns.x] | join(ns.x) %}"),
    "the method join": grown("{% set ns.x = ns.x.join([ns.x, ns.x]) %}"),
    "the filter indent": grown("{% set ns.x = (ns.x ~ '\n' ~ ns.x) | indent(900) %}"),
    "escaped text": grown("{% set ns.x = (ns.x | e) ~ ns.x %}"),
    "a set block": grown("{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}"),
    "a filter block": grown(
        "{% set y %}{% filter upper %}{{ ns.x }}{{ ns.x }}{% endfilter %}{% endset %}{% set ns.x = y %}"
    ),
    "a macro's text": "{% macro m(x) %}{{ x }}{{ x }}{% endmacro %}" + grown("{% set ns.x = m(ns.x) %}"),
    "a called macro's text": "{% macro m() %}{{ caller() }}{{ caller() }}{% endmacro %}"
    + grown("{% set y %}{% call m() %}{{ ns.x }}{% endcall %}{% endset %}{% set ns.x = y %}"),
    "strip in a loop": "{% set t = 'a' * 99999 %}{% for i in range(99) %}{% set y = t.strip() %}{% endfor %}",
    "split in a loop": "{% set t = 'a ' * 9999 %}{% for i in range(99) %}{% set y = t.split() %}{% endfor %}",
    "a slice in a loop": "{% set t = 'a' * 99999 %}{% for i in range(99) %}{% set y = t[1:] %}{% endfor %}",
    "a list that grows in its loop": "{% set t = [1] %}{% for i in t %}{% set _ = t.append(i) %}{% endfor %}",
    "a list in a loop": "{% set t = 'a' * 9999 %}{% for i in range(99) %}{% set y = t | list %}{% endfor %}",
    "a filter in a loop": "{% set t = 'a' * 99999 %}{% for i in range(99) %}{% set y = t | upper %}{% endfor %}",
    "in of a text": "{% set t = 'a' * 99999 %}{% for i in range(99) %}{{ 'b' in t }}{% endfor %}",
    "in of a list": "{% set t = [1] * 9999 %}{% for i in range(999) %}{{ 5 in t }}{% endfor %}",
    "< in a loop": "{% set t = 'a' * 99999 %}{% set u = t ~ 'b' %}{% for i in range(99) %}{{ t < u }}{% endfor %}",
    "a test in a loop": "{% set t = 'a' * 99999 %}{% for i in range(99) %}{{ t is lower }}{% endfor %}",
    "a long list that is written": "{{ (messages * 99999) | tojson }}",
    "a long list of defaults": "{{ range(99999) | map('default', messages) | list | tojson }}",
    "a value of many parts": shared("ns.x"),
    "a value of many parts as JSON": shared("ns.x | tojson"),
    "== of many parts": shared("ns.x == ns.y"),
    "in of many parts": shared("ns.x in [ns.y]"),
    "is eq of many parts": shared("ns.x is eq ns.y"),
    "sort of many parts": shared("[ns.x, ns.y] | sort"),
    "index of many parts": shared("[ns.x].index(ns.y)"),
    "select of many parts": shared("[ns.x] | select('eq', ns.y) | list"),
    "a key of many parts": shared("{ns.x: 1}"),
    "get of many parts": shared("{}.get(ns.x)"),
    "an item of many parts": shared("{}[ns.x]"),
    "unique of many parts": shared("[ns.x] | unique | list"),
    "dict of many parts": shared("dict([(ns.x, 1)])"),
    "namespace of many parts": shared("namespace([(ns.x, 1)]).a"),
    "a format of many parts": shared("'{!r}'.format(ns.x)"),
    "a refusal of many parts": shared("raise_exception(ns.x)"),
}
WIDE = {
    "tojson": "{{ messages | tojson(indent=10**9) }}",
    "batch": "{{ [1] | batch(10**12, 'x') | list }}",
    "slice": "{{ [1] | slice(10**12) | list }}",
    "indent": "{{ 'a\nb' | indent(10**12) }}",
    "%": "{{ '%999999999d' % 1 }}",
    "% with a width that it gets": "{{ '%*d' % (10**9, 1) }}",
    "the filter format": "{{ '%999999999d' | format(1) }}",
    "the method format": "{{ '{:>999999999}'.format(1) }}",
    "the method format with a width that it gets": "{{ '{:{}}'.format(1, 10**9) }}",
    "is odd": "{{ '%999999999d' is odd }}",
    "is divisibleby": "{{ '%999999999d' is divisibleby(5) }}",
    "round": "{{ 5 | round(-10**9) }}",
    "round of a text": "{{ 'a' | round(9, 'ceil') }}",
    "**": "{{ 10**(10**8) }}",
    "many namespaces": shared("ns", "namespace(a={}, b={})"),
    "*": "{{ 10**9000 * 10**9000 }}",
    "int": "{{ ('f' * 99999) | int(base=16) }}",
    "sum": "{{ [[1]] | sum(start=[]) }}",
    "a key that is 50,000 deep": nested("{% set ns.x = (ns.x,) %}", "{ns.x: 1}"),
    "a text that is 50,000 deep": nested("{% set ns.x = [ns.x] %}", "ns.x"),
    "JSON that is 50,000 deep": nested("{% set ns.x = [ns.x] %}", "ns.x | tojson"),
    "a macro without an end": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "the address of a method": "{{ 'a'.upper }}",
    "the address of a function": "{{ raise_exception }}",
    "the address of a generator": "{{ [messages | map('upper')] }}",
    "the order of a set": "{{ {'a': 1, 'b': 2}.keys() - [] }}",
}


def one_line(error: EdgespecError) -> str:
    assert "\n" not in str(error)
    assert len(str(error)) < 700
    return str(error)


@pytest.mark.parametrize("template", [pytest.param(text, id=name) for name, text in BROKEN.items()])
def test_what_is_no_chat_template_is_one_line(template: str) -> None:
    with pytest.raises(ModelError, match=r"^the model's chat template ") as refused:
        rendered(template)
    one_line(refused.value)


@pytest.mark.parametrize("template", [pytest.param(text, id=name) for name, text in REFUSED.items()])
def test_work_is_limited(template: str) -> None:
    with pytest.raises(UsageError, match=r"these messages: it takes more than 1,000,000 steps$"):
        rendered(template)


@pytest.mark.parametrize("template", [pytest.param(text, id=name) for name, text in WIDE.items()])
def test_what_would_be_too_large_or_changes_from_run_to_run_is_refused(template: str) -> None:
    with pytest.raises(UsageError, match=r"^the model's chat template cannot show these messages: ") as refused:
        rendered(template)
    one_line(refused.value)


ORDINARY = [
    "messages[1].content | trim | upper ~ 'x' ~ 3 * 2 ~ 7 % 4 ~ 2 ** 3 ~ (5 - 3) ~ ([1] + [2])",
    "messages | map(attribute='role') | join(', ')",
    "messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | first",
    "messages | rejectattr('tool_calls', 'defined') | list | length",
    "messages[2].tool_calls[0].function.arguments | items | list",
    "messages[2].tool_calls[0] | dictsort",
    "[3, 1, 2] | sort | reverse | list ~ [1, 1] | unique | list ~ [1, 2] | sum ~ [1, 2] | min ~ [1, 2] | max",
    "'a b' | title ~ 'AB' | lower ~ 'ab' | capitalize ~ 'a\nb' | indent(2) ~ '<' | e ~ ('a' | safe)",
    "'%s-%d' % ('a', 5) ~ '%05.1f' | format(2.5) ~ '{:>5}{x[0]!r}'.format('a', x=['b'])",
    "'a,b'.split(',') ~ 'abc'.replace('b', 'dd') ~ '-'.join(['a', 'b']) ~ ' a '.strip() ~ 'abc'[1:][::-1]",
    "messages[1].get('content', '') ~ messages[1]['role'] ~ messages[1].nothing ~ (messages[1].x is defined)",
    "('user' in messages[1].role) ~ ('role' in messages[1]) ~ (5 not in [1, 5]) ~ (1 < 2 <= 2 < 3) ~ (1 == 1.0)",
    "'user' in messages | map(attribute='role')",
    "[1, 2, 3, 4, 5] | batch(2, 0) | list ~ [1, 2, 3] | slice(2) | list ~ 2.55 | round(1) ~ '5' | int ~ -3 | abs",
    "messages | groupby('role') | map('first') | list",
    "(4 is even) ~ (4 is divisibleby(2)) ~ ('A' is upper) ~ (1 is in [1]) ~ (none is none) ~ ([] is iterable)",
]


@pytest.mark.parametrize("expression", ORDINARY)
def test_ordinary_templates_are_as_in_jinja(expression: str) -> None:
    template = "{% macro m(x) %}[{{ x }}]{% endmacro %}{% for i in range(2) if i %}{{ m(" + expression + ") }}"
    template += "{{ loop.last }}{% else %}no{% endfor %}"
    plain = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(template)
    assert rendered(template) == plain.render(messages=MESSAGES, tools=TOOLS)


def test_what_a_filter_takes_from_a_list_is_a_list_in_json() -> None:
    """As the template that llama.cpp has for DeepSeek R1 shows tools."""
    assert rendered("{{ tools | map(attribute='function') | map(attribute='name') | tojson }}") == '["f", "g"]'


def test_a_template_appends_to_its_own_lists_alone() -> None:
    """As Kimi K2's does: messages are rendered in several forms, so nothing of them may change."""
    steps = "{% set _ = ns.ids.append('a') %}{% set _ = ns.ids.append('b') %}{{ ns.ids.pop(0) }}{{ ns.ids }}"
    assert rendered("{% set ns = namespace(ids=[]) %}" + steps) == "a['b']"
    before = repr((MESSAGES, TOOLS))
    for given in ("messages", "messages[2].tool_calls", "tools", "tools[0].function.parameters.a", "more['x']"):
        for method in ("append", "pop"):
            with pytest.raises(ModelError, match=f"the method {method} changes what the template was given"):
                rendered("{% set _ = " + f"{given}.{method}(0)" + " %}", more={"x": []})
    assert repr((MESSAGES, TOOLS)) == before


def test_a_broken_template_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed, parse = list[str](), templates.Sandbox.parse

    def counting(self: templates.Sandbox, source: str) -> Any:
        parsed.append(source)
        return parse(self, source)

    monkeypatch.setattr(templates.Sandbox, "parse", counting)
    for _ in range(2):
        with pytest.raises(ModelError):
            rendered("{% if once %}")
    assert parsed == ["{% if once %}"]


PUBLISHED = sorted(Path(os.environ.get("EDGESPEC_TEMPLATES", "nowhere")).glob("*.jinja"))
BASES = [
    "{% for m in messages %}<{{ m.role }}>{{ m['content'] | trim }}{% if loop.last %}!{% endif %}{% endfor %}",
    "{% set ns = namespace(x='') %}{% for m in messages %}{% set ns.x = ns.x + m.role %}{% endfor %}{{ ns.x }}",
    "{% macro w(v) %}{% if v is mapping %}{% for k, x in v.items() %}{{ k }}{{ w(x) }}{% endfor %}{% else %}{{ v }}"
    "{% endif %}{% endmacro %}{% for t in tools %}{{ w(t) }}{% endfor %}",
    "{% for t in tools %}{{ t | tojson(indent=4) }}{% endfor %}{{ messages | map(attribute='role') | join(',') }}",
    "{% set first = messages[0].content.split(' ')[-1] %}{{ first * 3 ~ '%s' % first ~ first.replace('e', 'ee') }}",
    "{% for i in range(9) %}{% for j in range(i) if j % 2 %}{{ i * j - 1 }}{% endfor %}{% endfor %}",
    *(path.read_text("utf-8") for path in PUBLISHED),
]
PIECES = ["{{", "}}", "{%", "%}", "{% for a in messages %}", "{% endfor %}", "{% endif %}", "[", ")", "'", "|", "~"]
PIECES += ["*", "**", "99999", "'a' * 99999", "range(99999)", "messages", " | list", " | tojson", ".x", "[x]", "loop"]


def mutated(seed: int) -> str:
    draw = random.Random(seed)
    text = draw.choice(BASES)
    for _ in range(draw.randint(1, 6)):
        at, end = sorted(draw.randrange(len(text) + 1) for _ in range(2))
        end = min(end, at + 30)
        text = text[:at] + draw.choice(["", text[at:end] * 2, draw.choice(PIECES)]) + text[draw.choice([at, end]) :]
    return text


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=pytest.mark.exhaustive if seed >= 20 else ()) for seed in range(200)]
)
def test_a_mutated_template_is_a_text_or_one_line(seed: int) -> None:
    work, said = Work(), ""
    try:
        templates.rendered(mutated(seed), {"messages": MESSAGES, "tools": TOOLS}, work)
    except EdgespecError as error:
        said = one_line(error)
    assert work.left >= 0 or re.search(r"takes more than [\d,]+ steps$", said)
