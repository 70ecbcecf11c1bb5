"""Calls that must be: the grammar of every form, markers being text or control tokens; and gpt-oss's channels."""

import json
import re
from collections import OrderedDict
from functools import lru_cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reference.backend import ReferenceVocab

pytest.importorskip("starlette", reason="the server is not installed: pip install 'edgespec[server]'")
pytest.importorskip("llguidance", reason="needs llguidance: pip install 'edgespec[server]'")

from scripted import TEMPLATE as SCRIPTED
from scripted import asking
from test_server import HELLO, served, stream
from test_server_forms import SCHEMA, pieces
from test_server_forms import TOOLS as WRITTEN_TOOLS
from test_server_tools import TEMPLATE, TOOLS, check

from edgespec.errors import UsageError
from edgespec.loop.grammar import Compiler, json_schema
from edgespec.server import constrained
from edgespec.server.call_formats import FORMATS
from edgespec.server.channels import ANALYSIS, FINAL, ChannelParser, comes_in_channels
from edgespec.server.constrained import LARK_START, MARKER, ThoughtFirst
from edgespec.server.conversation import Thought, Turn
from edgespec.server.model_format import call_format_of
from edgespec.server.parse_output import OutputParser
from edgespec.server.prompts import template_messages
from edgespec.server.schema import followed, resolve
from edgespec.server.tool_calls import Call, Tool, Tools

FUNCTION = {
    "name": "look_up",
    "parameters": {
        "type": "object",
        "properties": {
            "word": {"type": "string"},
            "how": {"enum": ["fast", "well", 3]},
            "times": {"$ref": "#/$defs/few"},
            "where": {"type": "array", "items": {"type": "string"}},
        },
        "required": ["word", "times"],
        "$defs": {"few": {"type": "integer", "minimum": 0, "maximum": 5}},
    },
}
ARGUMENTS = {"word": "an <odd> one", "how": "well", "times": 2, "where": ["here", "there"]}
JSON = '{"word": "an <odd> one", "how": "well", "times": 2, "where": ["here", "there"]}'
# By what is in the template: a call as the model's own template writes it.
SPELLED = {
    "<minimax:tool_call>": '<minimax:tool_call>\n<invoke name="look_up">\n'
    '<parameter name="word">an <odd> one</parameter>\n'
    '<parameter name="how">well</parameter>\n<parameter name="times">2</parameter>\n'
    '<parameter name="where">["here", "there"]</parameter>\n</invoke>\n</minimax:tool_call>',
    "<|tool_calls_section_begin|>": "<|tool_calls_section_begin|><|tool_call_begin|>functions.look_up:0"
    f"<|tool_call_argument_begin|>{JSON}<|tool_call_end|><|tool_calls_section_end|>",
    "<｜tool▁calls▁begin｜>```json": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>look_up\n"
    f"```json\n{JSON}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "<｜tool▁calls▁begin｜>": f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look_up<｜tool▁sep｜>{JSON}"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "[TOOL_CALLS][CALL_ID]": f"[TOOL_CALLS]look_up[CALL_ID]abcdefgh1[ARGS]{JSON}",
    "[TOOL_CALLS][ARGS]": f"[TOOL_CALLS]look_up[ARGS]{JSON}",
    "[TOOL_CALLS]": f'[TOOL_CALLS][{{"name": "look_up", "arguments": {JSON}, "id": "abcdefgh1"}}]',
    "<arg_key>": "<tool_call>look_up\n<arg_key>word</arg_key>\n<arg_value>an <odd> one</arg_value>\n"
    "<arg_key>how</arg_key>\n<arg_value>well</arg_value>\n<arg_key>times</arg_key>\n<arg_value>2</arg_value>\n"
    '<arg_key>where</arg_key>\n<arg_value>["here", "there"]</arg_value>\n</tool_call>',
    "<seed:tool_call><function=<parameter=": "<seed:tool_call>\n<function=look_up>\n"
    "<parameter=word>an <odd> one</parameter>\n<parameter=how>well</parameter>\n<parameter=times>2</parameter>\n"
    '<parameter=where>["here", "there"]</parameter>\n</function>\n</seed:tool_call>',
    "<function=<parameter=": "<tool_call>\n<function=look_up>\n<parameter=word>\nan <odd> one\n</parameter>\n"
    "<parameter=how>\nwell\n</parameter>\n<parameter=times>\n2\n</parameter>\n"
    '<parameter=where>\n["here", "there"]\n</parameter>\n</function>\n</tool_call>',
    "<tool_calls>[": f'<tool_calls>[{{"name": "look_up", "arguments": {JSON}}}]</tool_calls>',
    "<tool_call>": f'<tool_call>\n{{"name": "look_up", "arguments": {JSON}}}\n</tool_call>',
    "<|python_tag|>": f'{{"name": "look_up", "parameters": {JSON}}}',
    '{"name": function name, "parameters": dictionary': f'{{"name": "look_up", "parameters": {JSON}}}',
    "<|tool_call>call:": '<|tool_call>call:look_up{word:<|"|>an <odd> one<|"|>,times:2,how:<|"|>well<|"|>,'
    'where:[<|"|>here<|"|>,<|"|>there<|"|>]}<tool_call|>',
    ANALYSIS[0] + FINAL: "<|channel|>commentary to=functions.look_up <|constrain|>json<|message|>" + JSON,
}


class Vocabulary(ReferenceVocab):
    """Bytes, and control tokens with these names."""

    def __init__(self, *names):
        super().__init__(258)
        self.names, self.size = names, 258 + len(names)

    def encode(self, text, *, add_bos, parse_special):
        if not (self.names and parse_special):
            return super().encode(text, add_bos=add_bos, parse_special=parse_special)
        parts = re.split(f"({'|'.join(map(re.escape, self.names))})", text)
        bytes_of = [
            [258 + self.names.index(part)] if part in self.names else super(Vocabulary, self).encode(
                part, add_bos=False, parse_special=False
            )
            for part in parts
        ]  # fmt: skip
        return [token for part in bytes_of for token in part]

    def token_bytes(self, token_id):
        return b"" if token_id >= 258 else super().token_bytes(token_id)

    def token_text(self, token_id):
        return self.names[token_id - 258] if token_id >= 258 else super().token_text(token_id)


TEXT_ONLY = Vocabulary()


def call_grammar(vocab, form, functions):
    return constrained.call_grammar(vocab, form, list(map(Tool, functions)))


def names_in(text):
    return sorted({name for name in MARKER.findall(text) if "=" not in name and name != "<odd>"})


compiler = lru_cache(Compiler)  # it reads all tokens


def fits(vocab, grammar, text):
    """Whether it is all of a text."""
    matcher = compiler(vocab).compiled(grammar).start()._matcher
    ids = vocab.encode(text, add_bos=False, parse_special=True)
    if matcher.validate_tokens(ids) < len(ids):
        return False
    matcher.consume_tokens(ids)
    return matcher.is_accepting()


@pytest.fixture(params=["text", "control"])
def vocab_of(request):
    return lambda text: Vocabulary(*(names_in(text) if request.param == "control" else []))


def form_named(seen):
    return next(form for form in FORMATS if "".join(form.seen) == seen)


@pytest.mark.parametrize("seen", SPELLED)
def test_a_forced_call_is_written_as_the_template_does_and_by_the_schema(seen, vocab_of):
    form, text = form_named(seen), SPELLED[seen]
    vocab = vocab_of(text)
    grammar = call_grammar(vocab, form, [FUNCTION, {"name": "other"}])
    assert fits(vocab, grammar, text)
    assert not fits(vocab, grammar, text.replace("look_up", "look_in"))
    assert not fits(vocab, grammar, text.replace("well", "badly"))
    assert not fits(vocab, grammar, text.replace("word", "name"))
    assert not fits(vocab, grammar, text + "and more")
    if "{braces}" not in form.call:  # there types alone count
        assert not fits(vocab, grammar, re.sub(r"\b2\b", "7", text))
    parser = OutputParser(form, parameters=Tools([Tool(FUNCTION)]).parameters) if form.open else ChannelParser(form)
    assert pieces(parser, text) == [("look_up", ARGUMENTS)]


@pytest.mark.parametrize("seen", SPELLED)
def test_several_calls_are_forced_where_they_may_be(seen, vocab_of):
    """As the examples of several calls are written; gpt-oss ends its turn with the first."""
    form, functions = form_named(seen), [tool.function for tool in WRITTEN_TOOLS.all]
    for marked in (form, form.marked()):
        unit = call_in(marked, {"city": "5", "days": 2}, "f")
        inner = unit.removeprefix(marked.frame[0]).removesuffix(marked.frame[1])
        text = f"{marked.frame[0]}{inner}{marked.between}{inner}{marked.between}{inner}{marked.frame[1]}"
        vocab = vocab_of(text)
        several = constrained.call_grammar(vocab, marked, list(map(Tool, functions)), several=True)
        assert fits(vocab, several, unit)
        assert fits(vocab, several, text) == (form.between is not None)
        assert not fits(vocab, call_grammar(vocab, marked, functions), text)
        if form.between is not None:
            assert not fits(vocab, several, text[:-1])
            parser = OutputParser(form, parameters=WRITTEN_TOOLS.parameters)
            assert pieces(parser, text) == [("f", {"city": "5", "days": 2})] * 3


def test_every_form_can_be_forced():
    assert sorted("".join(form.seen) for form in FORMATS) == sorted(SPELLED)


# One form of each notation: JSON, markup, braces, channels.
OF_EACH_KIND = ("<｜tool▁calls▁begin｜>", "<arg_key>", "<|tool_call>call:", ANALYSIS[0] + FINAL)


@pytest.mark.parametrize(
    "seen", [pytest.param(one, marks=() if one in OF_EACH_KIND else pytest.mark.exhaustive) for one in SPELLED]
)
def test_a_model_that_must_call_does(seen):
    """From the template to the answer, however mad the model."""
    shown = "{# " + seen + " #}{% if tools %}"
    with served(context=1500, template=TEMPLATE.replace("<tool_call>", "").replace("{% if tools %}", shown)) as client:
        choice = {"type": "function", "function": {"name": "weather"}}
        body = HELLO | {"max_tokens": 250, "temperature": 0.8, "tools": TOOLS, "tool_choice": choice}
        for seed in range(9):  # it may think for ever
            (choice,) = client.post("/v1/chat/completions", json=body | {"seed": seed}).json()["choices"]
            if choice["finish_reason"] == "tool_calls" or "message" not in seen:
                break
        assert choice["finish_reason"] == "tool_calls"
        (call,) = choice["message"]["tool_calls"]
        check(call["function"]["name"], call["function"]["arguments"])


def test_parameters_that_cannot_be_forced_are_refused():
    for parameters, says in [
        ([], None),
        (["x"], "no object's"),
        ({"type": "array"}, "no object's"),
    ]:
        functions = [{"name": "f", "parameters": parameters}]
        if says is None:
            assert fits(TEXT_ONLY, call_grammar(TEXT_ONLY, form_named("<tool_call>"), functions), EMPTY)
        else:
            with pytest.raises(UsageError, match=says):
                call_grammar(TEXT_ONLY, form_named("<tool_call>"), functions)
    circle = {"a": {"$ref": "#/$defs/b"}}
    for properties in (["x"], 5, {"a": {"$ref": "#/$defs/none"}}, circle):
        parameters = {"properties": properties, "$defs": {"b": {"$ref": "#/$defs/b"}}}
        functions = [{"name": "f", "parameters": parameters, "strict": True}]
        with pytest.raises(UsageError, match=r"no JSON schema|the reference '#/\$defs/[a-z]+' leads nowhere"):
            call_grammar(TEXT_ONLY, form_named("<arg_key>"), functions)


EMPTY = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'


def schema_of(value, **definitions):
    """What is understood of a parameter."""
    return resolve({"properties": {"it": value}, "$defs": definitions}).properties["it"]


NUMBER, TEXT = {"$ref": "#/$defs/n"}, {"$ref": "#/$defs/t"}
DEFINITIONS = {"n": {"type": "integer"}, "t": {"type": ["string", "null"]}}


@pytest.mark.parametrize(
    ("schema", "is_text", "values"),
    [
        ({}, True, {"5": "5", "null": "null"}),
        (True, True, {'{"a": 1}': '{"a": 1}'}),
        ({"description": "a zip"}, True, {"12345": "12345"}),
        ({"type": "string"}, True, {'"a"': '"a"', "[1]": "[1]"}),
        (TEXT, True, {"12345": "12345", '{"a": 1}': '{"a": 1}', "null": None, "None": None, "True": "True"}),
        # As the templates of Qwen3-Coder, Nemotron 3 and Seed-OSS write values that are no strings.
        ({"type": "boolean"}, False, {"True": True, "False": False, "true": True, "yes": "yes"}),
        ({"type": ["integer", "null"]}, False, {"None": None, "7": 7, "0x7": "0x7", "1_0": "1_0"}),
        ({"type": "array"}, False, {"['a', None]": ["a", None], "[1,": "[1,", "{1, 2}": "{1, 2}"}),
        (
            {"type": "object"},
            False,
            {"{'a': True}": {"a": True}, "{'a': b'b'}": "{'a': b'b'}", "{'a': 1e999}": "{'a': 1e999}"},
        ),
        ({"anyOf": [NUMBER, TEXT]}, True, {"12345": 12345, "1.5": "1.5", '"a"': '"a"', "a": "a"}),
        ({"anyOf": [NUMBER, {}]}, True, {"5": "5"}),
        (NUMBER, False, {"5": 5, "five": "five"}),
        ({"oneOf": [NUMBER, {"type": "null"}]}, False, {"5": 5, "null": None}),
        ({"type": "object"}, False, {'{"a": [true]}': {"a": [True]}}),
        ({"items": TEXT}, False, {'["a"]': ["a"]}),
        ({"enum": ["1", 2, None]}, False, {"1": "1", "2": 2, "null": None, "3": 3}),
        ({"const": "true"}, False, {"true": "true"}),
        ({"anyOf": [{"enum": ["1", "b"]}, {"type": "null"}]}, False, {"1": "1", "null": None}),
        ({"anyOf": [{"enum": ["1"]}, {"type": "string"}]}, True, {"1": "1", "2": "2"}),
        ({"type": "null"}, False, {"null": None}),
        ({"allOf": [{"type": "object"}], "default": {}}, False, {'{"a": 1}': {"a": 1}}),
        ({"allOf": [NUMBER, {"description": "of days"}]}, False, {"5": 5}),
        ({"allOf": [TEXT, {"type": "string"}]}, True, {"5": "5", "null": "null"}),
        ({"type": "number"}, False, {"NaN": "NaN", "Infinity": "Infinity", "1e999": "1e999", "1e9": 1e9}),
    ],
)
def test_a_schema_is_understood_once(schema, is_text, values):
    """What a grammar lets a model write in markup, and what a parser makes of it."""
    found = schema_of(schema, **DEFINITIONS)
    assert found.is_text == is_text
    assert {text: found.value_of(text) for text in values} == values


def test_references_are_followed_and_what_is_no_schema_allows_anything():
    found = resolve({"properties": {"a": {"$ref": "#/$defs/one"}, "b": {"$ref": "#/$defs/x~1y/0"}},
                     "$defs": {"one": {"$ref": "#/$defs/x~1y/0"}, "x/y": [{"type": "null"}]}})  # fmt: skip
    assert found.properties["a"] is found.properties["b"]
    assert found.properties["a"].types == {"null"}
    assert schema_of({"$ref": "https://example.org/schema"}).types is None
    assert schema_of({"anyOf": [{"type": ["string", "x"]}, {"type": "y"}]}).types == {"string"}
    tree = resolve({"properties": {"child": {"$ref": "#"}, "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}})
    assert tree.properties["child"] is tree
    nothing = resolve({"type": "object", "properties": {"a": None, "b": {"type": "array", "items": None}}})
    assert nothing.properties["a"].types is nothing.properties["b"].items.types is None


def test_values_of_unions_within_unions_are_counted_before_they_are_listed():
    """Each level would have twice as many."""
    levels = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(20)}
    root = {"properties": {"it": {"$ref": "#/$defs/d0"}}, "$defs": levels | {"d20": {"enum": ["a"]}}}
    with pytest.raises(UsageError, match="that a schema lists have more than 131072 characters"):
        resolve(root)
    assert Tools([Tool({"name": "f", "parameters": root})]).parameters["f"].types is None


def test_each_reference_is_followed_once(monkeypatch):
    many, seen = 200, []
    monkeypatch.setattr("edgespec.server.schema.followed", lambda *given: seen.append(given) or followed(*given))
    chain = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(many)} | {f"d{many}": {"type": "null"}}
    properties = {f"p{i}": {"$ref": "#/$defs/d0"} for i in range(many)}
    found = resolve({"properties": properties, "$defs": chain})
    assert found.properties["p9"].types == {"null"}
    assert len(seen) == 2 * many


def test_schemas_that_many_parameters_refer_to_are_copied_within_a_limit_of_work():
    one = {"type": "object", "properties": {f"p{i}": {"type": "null"} for i in range(1000)}}
    properties = {f"p{i}": {"items": {"$ref": "#/$defs/one"}} for i in range(200)}
    functions = [{"name": "f", "parameters": {"properties": properties, "$defs": {"one": one}}}]
    with pytest.raises(UsageError, match="have more than 2097152 parts and characters"):
        call_grammar(TEXT_ONLY, form_named("<arg_key>"), functions)


def test_results_of_unknown_calls_take_the_first_call_without_a_look_at_the_others(monkeypatch):
    looked = []

    class Counted(OrderedDict):
        def __iter__(self):
            return (looked.append(key) or key for key in super().__iter__())

    monkeypatch.setattr("edgespec.server.prompts.OrderedDict", Counted)
    calls = [Call("f", "{}", str(i)) for i in range(300)]
    turns = [Turn("assistant", calls=calls), *(Turn("tool", result_of="x") for _ in calls)]
    messages = list(template_messages(turns, names_thinking=False, numbered=True))
    assert [message["tool_call_id"] for message in messages[1:]] == [f"functions.f:{i}" for i in range(300)]
    assert 0 < len(looked) <= 300


@pytest.mark.parametrize("seen", ["<arg_key>", "<|tool_call>call:", "<tool_call>"])
def test_a_grammar_has_one_rule_for_each_schema(seen):
    """Each level of eight keys refers twice to the next: as texts within each other they would be gigabytes."""
    levels = {
        f"l{n}": {"type": "object", "properties": {f"k{i}": {"$ref": f"#/$defs/l{n + 1}"} for i in range(8)}}
        for n in range(20)
    }
    levels["l20"] = {"anyOf": [{"type": "string"}, {"type": "null"}]}
    parameters = {"type": "object", "properties": {"a": {"$ref": "#/$defs/l0"}}, "$defs": levels}
    grammar = call_grammar(TEXT_ONLY, form_named(seen), [{"name": "f", "parameters": parameters}])
    assert len(grammar.text) < 50_000


def object_of(keys, value):
    return {"type": "object", "properties": {f"key{i}": value(i) for i in range(keys)}}


NUMBERED = {f"d{i}": object_of(1, lambda _: {"type": "integer"}) for i in range(100)}
ORDINARY = {
    "three levels": object_of(8, lambda _: object_of(8, lambda _: object_of(8, lambda _: {"type": "string"}))),
    "many keys": object_of(500, lambda _: {"type": "integer"}),
    "many definitions": object_of(100, lambda i: {"$ref": f"#/$defs/d{i}"}) | {"$defs": NUMBERED},
}


@pytest.mark.parametrize("seen", ["<arg_key>", "<|tool_call>call:", "<tool_call>"])
@pytest.mark.parametrize("name", ORDINARY)
def test_ordinary_tools_with_many_optional_parameters_can_be_forced(seen, name):
    grammar = call_grammar(TEXT_ONLY, form_named(seen), [{"name": "f", "parameters": ORDINARY[name]}])
    compiler(TEXT_ONLY).compiled(grammar)


def test_a_grammar_that_becomes_too_long_is_not_built_to_its_end(monkeypatch):
    made = []
    monkeypatch.setattr(constrained, "string", lambda text: made.append(text) or f'"{text}"')
    parameters = object_of(20_000, lambda _: {"type": "string"})
    for seen in ("<arg_key>", "<|tool_call>call:"):
        with pytest.raises(UsageError, match="longer than 65536 bytes"):
            call_grammar(TEXT_ONLY, form_named(seen), [{"name": "f", "parameters": parameters}])
        assert len(made) < 10_000
        made.clear()


def test_json_within_markup_keeps_what_its_references_mean():
    """Parameters that refer to others, to all of themselves, and to keys of definitions."""
    parameters = object_of(1, lambda _: {"type": "integer"}) | {
        "$defs": {"t": object_of(1, lambda _: {"$ref": "#/properties/key0"})}
    }
    parameters["properties"] |= {"list": {"type": "array", "items": {"$ref": "#/$defs/t"}},
                                 "all": {"type": "array", "items": {"$ref": "#"}}}  # fmt: skip
    vocab, form = TEXT_ONLY, form_named("<arg_key>")
    grammar = call_grammar(vocab, form, [{"name": "f", "parameters": parameters}])
    for key, good, bad in (
        ("list", '[{"key0": 5}]', '[{"key0": "5"}]'),
        ("all", '[{"list": [{"key0": 5}]}]', '[{"list": [{"key0": [5]}]}]'),
    ):
        for value in (good, bad):
            text = f"<tool_call>f<arg_key>{key}</arg_key><arg_value>{value}</arg_value></tool_call>"
            assert fits(vocab, grammar, text) == (value is good), text


@pytest.mark.parametrize(("name", "draft"), [("$id", "draft-07/schema#"), ("id", "draft-04/schema#")])
def test_parameters_with_an_id_may_refer_to_themselves(name, draft):
    properties = {"all": {"type": "array", "items": {"$ref": "#"}}, "n": {"$ref": "#/$defs/n"}}
    about = {"$schema": f"http://json-schema.org/{draft}", name: "https://example.org/f.json"}
    parameters = {**about, "properties": properties, "$defs": {"n": {"type": "integer"}}}
    vocab = TEXT_ONLY
    grammar = call_grammar(vocab, form_named("<arg_key>"), [{"name": "f", "parameters": parameters}])
    text = '<tool_call>f<arg_key>all</arg_key><arg_value>[{"n": 5}]</arg_value></tool_call>'
    assert fits(vocab, grammar, text)
    assert not fits(vocab, grammar, text.replace("5", "true"))


@pytest.mark.parametrize("more", ["format", "pattern", "#/$defs/missing", "#/properties/x"])
@pytest.mark.parametrize("seen", ["<arg_key>", "<tool_call>"])
def test_tools_whose_parameters_have_more_keywords_can_be_forced(seen, more):
    """As sets, addresses and unions of types have them; with `strict`, all must be enforced, so these are refused."""
    tags = {"type": "array", "items": {"type": "string", "format": "uri-reference"}, "uniqueItems": True}
    lists = {"type": "array", "items": {"type": "string", "pattern": "^(?!-)"}}
    one = {"format": tags, "pattern": lists}.get(more, {"$ref": more})
    function = {"name": "f", "parameters": {"type": "object", "properties": {"x": one}}}
    compiler(TEXT_ONLY).compiled(call_grammar(TEXT_ONLY, form_named(seen), [function]))
    with pytest.raises(UsageError, match=r"cannot be used|leads nowhere"):
        compiler(TEXT_ONLY).compiled(call_grammar(TEXT_ONLY, form_named(seen), [function | {"strict": True}]))


def test_a_grammar_with_an_unclosed_string_is_searched_once():
    for mark in '"/':
        assert len(LARK_START.findall(mark + f"\\{mark}" * 50)) == 1
    found = [
        kind for kind in LARK_START.findall('start: "start\\"start" /start\\/start/ start // start\nstart: x') if kind
    ]
    assert len(found) == 3


def test_a_schema_may_refer_to_itself():
    form = form_named("<|tool_call>call:")
    node = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}, "n": {"type": "integer"}}}
    parameters = {"type": "object", "properties": {"a": {"$ref": "#/$defs/node"}}, "$defs": {"node": node}}
    vocab = Vocabulary("<|tool_call>", "<tool_call|>")
    grammar = call_grammar(vocab, form, [{"name": "f", "parameters": parameters}])
    assert fits(vocab, grammar, "<|tool_call>call:f{a:{next:{next:{n:1},n:2},n:3}}<tool_call|>")
    assert not fits(vocab, grammar, "<|tool_call>call:f{a:{next:{next:{n:1},n:2},m:3}}<tool_call|>")


def test_parameters_that_are_no_schema_do_not_stop_a_call_from_being_read():
    tools = Tools([Tool({"name": "f", "parameters": {"properties": 5}}), Tool(FUNCTION)])
    assert tools.parameters["f"].types is None
    text = "<tool_call>\n<function=f>\n<parameter=a>\n5\n</parameter>\n</function>\n</tool_call>"
    parser = OutputParser(form_named("<function=<parameter="), parameters=tools.parameters)
    assert pieces(parser, text) == [("f", {"a": "5"})]


def test_braces_hold_any_value():
    """Where a schema says nothing of it."""
    form, anything = form_named("<|tool_call>call:"), {"type": "object", "properties": {"a": {}, "b": {}}}
    text = '<|tool_call>call:f{a:{x:<|"|>1<|"|>,y:[true,{}]},b:-2.5}<tool_call|>'
    vocab = Vocabulary(*names_in(text))
    grammar = call_grammar(vocab, form, [{"name": "f", "parameters": anything}])
    assert fits(vocab, grammar, text)
    for good in ("{}", "{b:null}", "{a:[]}"):
        assert fits(vocab, grammar, f"<|tool_call>call:f{good}<tool_call|>")
    for bad in ("{", "{b:null,a:[]}", "{a:}", "{c:1}", "{a:{1}}"):
        assert not fits(vocab, grammar, f"<|tool_call>call:f{bad}<tool_call|>")
    assert pieces(OutputParser(form), text) == [("f", {"a": {"x": "1", "y": [True, {}]}, "b": -2.5})]
    for broken in ("f{a:", "f", "f{a:1}x", "f{a 1}", "f{a:oh}", "f{a:1 2}"):
        assert pieces(OutputParser(form), f"<|tool_call>call:{broken}<tool_call|>") == [
            f"<|tool_call>call:{broken}<tool_call|>"
        ]


def test_braces_hold_values_of_the_types_of_a_schema():
    """Also where it says nothing of an object's keys, or of a list's items, and where there are several types."""
    form = form_named("<|tool_call>call:")
    vocab = Vocabulary(*names_in('<|tool_call>call:f{a:<|"|>1<|"|>}<tool_call|>'))
    texts = ("{}", "{x:{y:1}}", "[]", "[1,[true]]", "1", "-2.5", "true", "null", '<|"|>a<|"|>')
    for schema, good in [
        ({"type": "object"}, ("{}", "{x:{y:1}}")),
        ({"type": "array"}, ("[]", "[1,[true]]")),
        ({"type": ["string", "null"]}, ("null", '<|"|>a<|"|>')),
        ({"anyOf": [{"type": "integer"}, {"type": "array"}]}, ("1", "[]", "[1,[true]]")),
        ({"type": "unheard of"}, texts),
        ({}, texts),
    ]:
        parameters = {"type": "object", "properties": {"a": schema}}
        grammar = call_grammar(vocab, form, [{"name": "f", "parameters": parameters}])
        assert [text for text in texts if fits(vocab, grammar, f"<|tool_call>call:f{{a:{text}}}<tool_call|>")] == [
            text for text in texts if text in good
        ], schema


def test_braces_hold_each_key_once():
    """In the schema's order, those that may be left out behind those that may not."""
    form, number = form_named("<|tool_call>call:"), {"type": "integer"}
    properties = {"a": number, "b": number, "c": number}
    vocab = Vocabulary("<|tool_call>", "<tool_call|>")
    for required, good, bad in [
        ([], ("{}", "{a:1,c:2}", "{b:1,c:2}", "{a:1,b:2,c:3}"), ("{a:1,a:2}", "{b:1,b:2}", "{c:1,b:2}", "{b:1,a:2}")),
        (["b"], ("{b:1}", "{b:1,a:2,c:3}", "{b:1,c:3}"), ("{}", "{a:1}", "{b:1,b:2}", "{b:1,a:2,a:3}", "{a:2,b:1}")),
    ]:
        schema = {"type": "object", "properties": properties, "required": required}
        grammar = call_grammar(vocab, form, [{"name": "f", "parameters": schema}])
        for text in good:
            assert fits(vocab, grammar, f"<|tool_call>call:f{text}<tool_call|>"), text
        for text in bad:
            assert not fits(vocab, grammar, f"<|tool_call>call:f{text}<tool_call|>"), text


def test_a_thought_between_control_tokens_is_free():
    vocab = Vocabulary("[THINK]", "[/THINK]")
    grammar = ThoughtFirst(vocab, ("[THINK]", "[/THINK]")).before(json_schema(SCHEMA), in_thought=False)
    assert fits(vocab, grammar, '[THINK]a {"b": [/think][/THINK]\n{"a":1}')
    assert fits(vocab, grammar, '{"a":1}')
    assert not fits(vocab, grammar, '[THINK]a[/THINK]b{"a":1}')
    inside = ThoughtFirst(vocab, ("[THINK]", "[/THINK]")).before(json_schema(SCHEMA), in_thought=True)
    assert fits(vocab, inside, 'so[/THINK]{"a":1}')
    assert not fits(vocab, inside, '{"a":1}')


HARMONY = form_named(ANALYSIS[0] + FINAL)
THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
SENT = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}'
ANSWERS = {
    f"{THOUGHT}<|channel|>final<|message|>Yes.": [Thought("Hm."), "Yes."],
    "<|channel|>final<|message|>Yes: <|return|>": ["Yes: "],
    f"{THOUGHT}{SENT}<|call|>": [Thought("Hm."), ("f", {"a": 1})],
    f'{THOUGHT} to=functions.f<|channel|>commentary json<|message|>{{"a": 1}}': [Thought("Hm."), ("f", {"a": 1})],
    f"<|channel|>commentary<|message|>I look.<|end|><|start|>assistant{SENT}": ["I look.", ("f", {"a": 1})],
    f"{SENT}<|end|><|start|>assistant{SENT}": [("f", {"a": 1})] * 2,
    SENT[:-1]: ['{"a": 1'],
    f"{THOUGHT}<|channel|>fin": [Thought("Hm.")],
    "<|channel|>analysis<|message|>Hm": [Thought("Hm")],
    "I answer as I like <|end|>": ["I answer as I like <|end|>"],
}


@given(st.sampled_from(list(ANSWERS)), st.data())
def test_what_comes_in_channels(text, data):
    assert pieces(ChannelParser(HARMONY), text, data) == ANSWERS[text]


def test_without_tools_nothing_is_called():
    assert pieces(ChannelParser(), SENT) == ['{"a": 1}']


def test_forms_and_thoughts_in_channels():
    vocab = Vocabulary(*names_in(THOUGHT + SENT + "<|return|><|call|>"))
    template = f"{{% if tools %}}functions.{ANALYSIS[0]}{FINAL}"
    assert call_format_of(template) is HARMONY
    assert comes_in_channels(template)
    thought_first = ThoughtFirst(vocab, ANALYSIS, FINAL)
    schema = thought_first.before(json_schema(SCHEMA), in_thought=False)
    assert fits(vocab, schema, f'{THOUGHT}{FINAL}{{"a":1}}')
    assert fits(vocab, schema, f'{FINAL}{{"a":2}}')
    assert not fits(vocab, schema, '{"a":1}')
    functions = [{"name": "f", "parameters": SCHEMA}]
    call = thought_first.before(call_grammar(vocab, HARMONY, functions), in_thought=False, is_call=True)
    assert fits(vocab, call, THOUGHT + SENT)
    assert not fits(vocab, call, f"{FINAL}Yes.")


def talk(*ids):
    calls = [Call(f"f{n}", "{}", id_) for n, id_ in enumerate(ids)]
    return [Turn("user", "hello"), Turn("assistant", "so", "why", calls)]


def shown(turns, *, names_thinking=False, numbered=False):
    return list(template_messages(turns, names_thinking=names_thinking, numbered=numbered))


def test_calls_and_results_have_ids_in_the_models_form():
    results = [Turn("tool", "1", result_of=i) for i in ("call_b", "call_a")]
    _, said, *told = shown([*talk("call_a", "call_b"), *results])
    ids = [call["id"] for call in said["tool_calls"]]
    assert all(re.fullmatch("[a-zA-Z0-9]{9}", one) for one in ids)
    assert [one["tool_call_id"] for one in told] == ids[::-1]
    assert [one["name"] for one in told] == ["f1", "f0"]
    assert said["reasoning_content"] == "why"
    _, said, *told = shown([*talk("call_a", "call_b"), *results], numbered=True)
    assert [call["id"] for call in said["tool_calls"]] == ["functions.f0:0", "functions.f1:1"]
    assert told[0]["tool_call_id"] == "functions.f1:1"


def test_results_without_ids_answer_in_order():
    results = [Turn("tool", str(i)) for i in range(3)]
    _, said, *told = shown([*talk("", ""), *results])
    assert [one["tool_call_id"] for one in told[:2]] == [call["id"] for call in said["tool_calls"]]
    assert len(told[2].pop("tool_call_id")) == 9  # Mistral's templates insist on it
    assert told[2] == {"role": "tool", "content": "2"}


def test_thoughts_by_the_name_that_gpt_oss_has_for_them():
    _, said = shown(talk("call_a"), names_thinking=True)
    assert said["thinking"] == "why"
    assert said["content"] == "so"
    assert "reasoning_content" not in said


PLACE = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "at": {"$ref": "#/$defs/few"}},
    "required": ["name"],
}
EVERY_KIND = {  # required and by reference; then optional: enum, nullable, nested, of a list, and one that is left out
    "type": "object",
    "properties": {
        "word": {"type": "string"}, "times": {"$ref": "#/$defs/few"}, "how": {"enum": ["fast", "well", 3]},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]}, "place": {"$ref": "#/$defs/place"},
        "where": {"type": "array", "items": {"type": "string"}}, "always": {"type": "boolean"},
    },
    "required": ["word", "times"],
    "$defs": {"few": {"type": "integer"}, "place": PLACE},
}  # fmt: skip
GIVEN = {
    "word": "12345", "times": 2, "how": "well", "note": None, "place": {"name": "{}", "at": 1}, "where": ["here", "5"],
}  # fmt: skip


def in_braces(value):
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{in_braces(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return f"[{','.join(map(in_braces, value))}]"
    return f'<|"|>{value}<|"|>' if isinstance(value, str) else json.dumps(value)


def call_in(form, arguments, name="look_up"):
    """A call as the family's template writes it: `SPELLED` compares `form.call` with these."""
    values = [value if isinstance(value, str) else json.dumps(value) for value in arguments.values()]
    pairs = [
        form.pair.replace("{key}", key).replace("{value}", value) for key, value in zip(arguments, values, strict=True)
    ]
    parts = {
        "braces": in_braces(arguments), "arguments": json.dumps(arguments), "quoted": f'"{name}"', "name": name,
        "line": "\n", "number": "0", "id": "abcdefgh1",
    }  # fmt: skip
    return re.sub(r"\{(\w+)\}", lambda found: parts[found[1]], form.call.replace("{pairs}", "".join(pairs)))


def writing(seen, text):
    """A client of a served model with a form of calls, which writes `text`."""
    return asking(lambda prompt: text, template="{# " + seen + " #}" + re.sub("</?[a-z_]+>", "", SCRIPTED))


@pytest.mark.covering(1)
@pytest.mark.parametrize("seen", SPELLED)
@pytest.mark.parametrize("asked", ["auto", "auto, with response_format", "required"])
@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_a_client_gets_the_arguments_that_the_model_wrote(seen, asked, streamed):
    """If the grammar forbade one of the model's tokens, it would write another."""
    form = form_named(seen)
    says = call_in(form.marked() if "response_format" in asked else form, GIVEN)
    tool = {"type": "function", "function": {"name": "look_up", "parameters": EVERY_KIND}}
    body = HELLO | {"tools": [tool], "tool_choice": asked.partition(",")[0], "max_tokens": 900}
    if "response_format" in asked:
        schema = PLACE | {"$defs": EVERY_KIND["$defs"]}
        body["response_format"] = {"type": "json_schema", "json_schema": {"schema": schema}}
    with writing(seen, says) as client:
        if streamed:
            parts = [json.loads(data)["choices"] for data in stream(client, "/v1/chat/completions", body)[:-1]]
            calls = [call for (part,) in filter(None, parts) for call in part["delta"].get("tool_calls", ())]
            name = "".join(call["function"].get("name", "") for call in calls)
            arguments = "".join(call["function"].get("arguments", "") for call in calls)
        else:
            answer = client.post("/v1/chat/completions", json=body).json()
            (call,) = answer["choices"][0]["message"]["tool_calls"]
            name, arguments = call["function"]["name"], call["function"]["arguments"]
    assert (name, json.loads(arguments)) == ("look_up", GIVEN)
