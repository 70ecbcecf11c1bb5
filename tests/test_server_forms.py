"""Calls in the formats of model families, and what is thought: cut out however the text comes, in every dialect."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("starlette", reason="the server is not installed: pip install 'edgespec[server]'")
pytest.importorskip("llguidance", reason="needs llguidance: pip install 'edgespec[server]'")

from test_server import HELLO, prompt, refused, served, served_and_shown, stream
from test_server_tools import TEMPLATE

from edgespec.loop.grammar import Compiler, json_schema, lark, regex
from edgespec.loop.text import TextStream
from edgespec.server.answers import joined
from edgespec.server.call_formats import FORMATS, GENERIC, HERMES, QUOTE
from edgespec.server.channels import BEGINNINGS, MARKERS, ChannelParser
from edgespec.server.constrained import ThoughtFirst, control_tokens
from edgespec.server.conversation import Thought
from edgespec.server.model_format import THINKING, call_format_of, thinking_of
from edgespec.server.parse_output import OutputParser
from edgespec.server.tool_calls import Call, Tool, Tools

TOOLS = Tools(
    [
        Tool({"name": "f", "parameters": {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}}),
        Tool({"name": "g"}),
    ]
)
CITY = {"city": "5", "days": 2}
# What is in the template, and a text with calls of f(CITY) and g(); one form more is read by channels.py.
WRITTEN = {
    "<tool_call>": '<tool_call>\n{"name": "f", "arguments": {"city": "5", "days": 2}}\n</tool_call>\n'
    '<tool_call>{"name": "g"}</tool_call>',
    "<tool_calls>[": '<tool_calls>[{"name": "f", "arguments": {"city": "5", "days": 2}}, {"name": "g"}]</tool_calls>',
    "<function=<parameter=": "<tool_call>\n<function=f>\n<parameter=city>\n5\n</parameter>\n<parameter=days>\n2\n"
    "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=g>\n</function>\n</tool_call>",
    "<arg_key>": "<tool_call>f\n<arg_key>city</arg_key>\n<arg_value>5</arg_value>\n<arg_key>days</arg_key>\n"
    "<arg_value>2</arg_value>\n</tool_call><tool_call>g\n</tool_call>",
    "[TOOL_CALLS][ARGS]": '[TOOL_CALLS]f[ARGS]{"city": "5", "days": 2}[TOOL_CALLS]g[ARGS]{}',
    "<|tool_calls_section_begin|>": "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0"
    '<|tool_call_argument_begin|>{"city": "5", "days": 2}<|tool_call_end|><|tool_call_begin|>functions.g:1'
    "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
    "<｜tool▁calls▁begin｜>": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>"
    '{"city": "5", "days": 2}<｜tool▁call▁end｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n```json\n{}\n```'
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "<minimax:tool_call>": '<minimax:tool_call>\n<invoke name="f">\n<parameter name="city">5</parameter>\n'
    '<parameter name="days">2</parameter>\n</invoke>\n<invoke name="g">\n</invoke>\n</minimax:tool_call>',
    "[TOOL_CALLS][CALL_ID]": '[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{"city": "5", "days": 2}'
    "[TOOL_CALLS]g[CALL_ID]123456789[ARGS]{}",
    "[TOOL_CALLS]": '[TOOL_CALLS][{"name": "f", "arguments": {"city": "5", "days": 2}, "id": "abcdefghi"}, '
    '{"name": "g", "arguments": {}, "id": "123456789"}]',
    "<｜tool▁calls▁begin｜>```json": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
    '{"city": "5", "days": 2}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n```json\n{}\n```'
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "<seed:tool_call><function=<parameter=": "<seed:tool_call>\n<function=f>\n<parameter=city>5</parameter>\n"
    "<parameter=days>2</parameter>\n</function>\n</seed:tool_call>\n<seed:tool_call>\n<function=g>\n</function>\n"
    "</seed:tool_call>",
    "<|tool_call>call:": '<|tool_call>call:f{city:<|"|>5<|"|>,days:2}<tool_call|><|tool_call>call:g{}<tool_call|>',
    '{"name": function name, "parameters": dictionary': '<|python_tag|>[{"name": "f", "parameters": '
    '{"city": "5", "days": 2}}, {"name": "g"}]',
    "<|python_tag|>": '<|python_tag|>[{"name": "f", "parameters": {"city": "5", "days": 2}}, {"name": "g"}]',
}


def format_of(template):
    return call_format_of("{% if tools %}" + template)


def pieces(parser, text, data=None):
    found, at = [], 0
    while at < len(text):
        size = data.draw(st.integers(1, 15)) if data else len(text)
        found += parser.push(text[at : at + size])
        at += size
    return merged([*found, *parser.finish()])


def merged(found):
    return [(piece.name, json.loads(piece.arguments)) if isinstance(piece, Call) else piece for piece in joined(found)]


def test_every_form_has_an_example():
    assert sorted("".join(form.seen) for form in FORMATS if form.open) == sorted(WRITTEN)
    for seen, form in ((seen, format_of(seen)) for seen in WRITTEN):
        assert "".join(form.seen) == seen


@given(st.sampled_from(list(WRITTEN)), st.booleans(), st.booleans(), st.data())
def test_calls_of_every_form_are_found_however_the_text_comes(seen, says, thinks, data):
    form, text = format_of(seen), WRITTEN[seen]
    expected = [("f", CITY), ("g", {})]
    if says:
        text, expected = "Let me see.\n" + text, ["Let me see.", *expected]
    if thinks:
        text, expected = "\nWhat <b>now</b>?\n</think>\n\n" + text, [Thought("What <b>now</b>?"), *expected]
    parser = OutputParser(form, ("<think>", "</think>"), in_thought=thinks, parameters=TOOLS.parameters)
    assert pieces(parser, text, data) == expected


@given(st.sampled_from(list(WRITTEN)), st.data())
def test_a_value_may_hold_the_markers_of_its_form(seen, data):
    """As when an assistant writes the code of one."""
    form = format_of(seen)
    marker = data.draw(st.sampled_from([*form.markers, "</function>", "</parameter>", "</invoke>", "```"]))
    if marker == QUOTE:
        return  # Gemma's strings cannot hold their own end
    value = f"5{marker}6 {marker}7"
    text = WRITTEN[seen].replace("5", value, 1)
    parser = OutputParser(form, parameters=TOOLS.parameters)
    assert pieces(parser, text, data) == [("f", {"city": value, "days": 2}), ("g", {})]


@given(
    st.sampled_from(
        [
            ("<tool_call>", '<tool_call>{"name": "f", "parameters": {"a": "5</tool_call>', '<tool_call>{"name": "g"}'),
            ("<arg_key>", "<tool_call>f\n<arg_key>city</arg_key>\n<arg_value>5</tool_call>", "<tool_call>g"),
        ]
    ),
    st.booleans(),
    st.data(),
)
def test_a_call_behind_a_broken_one_is_found(case, ends, data):
    seen, broken, call = case
    parser = OutputParser(format_of(seen), parameters=TOOLS.parameters)
    text = f"{broken}\n{call}</tool_call>" if ends else f"{broken} ..."
    assert pieces(parser, text, data) == ([broken, ("g", {})] if ends else [f"{broken} ..."])


CALL = '{"name": "f", "arguments": {"city": "5", "days": 2}}'
OTHER = '{"name": "g", "parameters": {}}'
QWEN_CALL = "<function=f>\n<parameter=city>\n5\n</parameter>\n<parameter=days>\n2\n</parameter>\n</function>"
UNMARKED = {  # what ends a turn: (marks of the format, text, pieces before the call, whether g is called, too)
    "no closing marker": ("<tool_call>", f"Yes.\n<tool_call>\n{CALL}\n", ["Yes."], False),
    "two objects, no closing marker": ("<tool_call>", f"<tool_call>\n{CALL}\n{OTHER}", [], True),
    "markup without a closing marker": ("<function=<parameter=", f"<tool_call>\n{QWEN_CALL}\n", [], False),
    "markup without an opening marker": (
        "<function=<parameter=", f"Yes.\n\n{QWEN_CALL}\n</tool_call>", ["Yes."], False,
    ),
    "markup without markers": ("<function=<parameter=", QWEN_CALL, [], False),
    "Seed without an opening marker": (
        "<seed:tool_call><function=<parameter=", f"{QWEN_CALL}\n</seed:tool_call>", [], False,
    ),
    "GLM": ("<arg_key>", WRITTEN["<arg_key>"].partition("</tool_call>")[0], [], False),
    "Apriel": ("<tool_calls>[", f"<tool_calls>[{CALL}, {OTHER}]", [], True),
    "Gemma": ("<|tool_call>call:", WRITTEN["<|tool_call>call:"].partition("<tool_call|>")[0], [], False),
    "Kimi without the section": (
        "<|tool_calls_section_begin|>",
        re.sub(r"<.tool_calls_section_\w+.>", "", WRITTEN["<|tool_calls_section_begin|>"]), [], True,
    ),
    "DeepSeek without the section": (
        "<｜tool▁calls▁begin｜>", re.sub("<｜tool▁calls▁\\w+｜>", "", WRITTEN["<｜tool▁calls▁begin｜>"]), [], True,
    ),
    "MiniMax without the section": (
        "<minimax:tool_call>", re.sub("</?minimax:tool_call>", "", WRITTEN["<minimax:tool_call>"]), [], True,
    ),
    "Llama with a semicolon": ("<|python_tag|>", f"{CALL}; {OTHER}", [], True),
    "Llama with a marker and a semicolon": ("<|python_tag|>", f"<|python_tag|>{CALL};{OTHER}", [], True),
    "Llama behind a text": ("<|python_tag|>", f"Yes:\n\n{CALL}", ["Yes:"], False),
    "a list": ("<|python_tag|>", f"[{CALL},\n {OTHER}]\n", [], True),
    "bare": ("<tool_call>", f"{CALL}\n", [], False),
    "bare, behind a space and line breaks": ("<tool_call>", f"Yes: \n\n{CALL}", ["Yes:"], False),
    "bare, behind a text": ("<tool_call>", f"Yes.\n{CALL}\n{OTHER}", ["Yes."], True),
    "in a fence": ("<tool_call>", f"```json\n{CALL}\n```", [], False),
    "in a fence, behind a text": ("[TOOL_CALLS][ARGS]", f"Yes:\n```\n{CALL}\n```\n", ["Yes:"], False),
    "in a fence, in other tags": ("[TOOL_CALLS][ARGS]", f"```xml\n<tool_call>\n{CALL}\n</tool_call>\n```", [], False),
    "in two fences": ("<tool_call>", f"```json\n{CALL}\n```\n\n```json\n{OTHER}\n```", [], True),
    "in tags twice": ("<tool_call>", f"<tools>{CALL}</tools>\n<tools>\n{OTHER}\n</tools>", [], True),
    "in other tags": ("<tool_call>", f"<tools>\n{CALL}\n</tools>", [], False),
}  # fmt: skip


def read_in_pieces(text, seen, tools=TOOLS.parameters, **more):
    """What a parser finds, however the text comes."""

    def found(size):
        parser, found = OutputParser(format_of(seen), THINK, parameters=tools, **more), []
        for at in range(0, len(text), size):
            found += parser.push(text[at : at + size])
        return merged([*found, *parser.finish()])

    whole = found(len(text))
    assert all(found(size) == whole for size in range(1, 8))
    return whole


@pytest.mark.parametrize("thought", ["", "Hm.\n</think>\n\n"])
@pytest.mark.parametrize("case", UNMARKED)
def test_a_whole_call_at_the_end_of_a_turn_is_one_without_its_markers(case, thought):
    """Where a text follows, or no such tool is offered, all of it is content."""
    seen, text, before, twice = UNMARKED[case]

    def read(text, *tools):
        return read_in_pieces(thought + text, seen, *tools, in_thought=bool(thought))[bool(thought) :]

    assert read(text) == [*before, ("f", CITY), *[("g", {})] * twice]
    form = format_of(seen)
    if not twice and not (form.close and text.endswith(form.close)):
        follows = text + "\n\nThat is how you call it."
        assert read(follows) == [follows]
    if not (twice and (form.close or text.startswith(form.open))):  # with markers, calls of any name are calls
        assert read(text, {"h": TOOLS.parameters["f"]}) == [text]


@pytest.mark.parametrize(
    ("seen", "before"),
    [
        ("<tool_call>", '{"name": "f", "arguments": {"city": "a'),
        ("<tool_call>", '```json\n{"name": "f", "arguments": {"a": 1}}'),
        ("<function=<parameter=", "<function=f>\n<parameter=city>\n5\n</parameter>\n</function>\n"),
        ("<minimax:tool_call>", '<invoke name="f">'),
    ],
)
def test_what_is_a_call_without_its_markers_ends_before_one_with_them(seen, before):
    assert read_in_pieces(f"{before}\n{WRITTEN[seen]}", seen) == [before.rstrip(), ("f", CITY), ("g", {})]


@pytest.mark.parametrize(
    ("seen", "text", "rest"),
    [
        (
            "[TOOL_CALLS][ARGS]",
            '[TOOL_CALLS]f[ARGS]{"city": "5", "days": 2}[TOOL_CALLS]g[ARGS]{no}',
            "[TOOL_CALLS]g[ARGS]{no}",
        ),
        ("<|python_tag|>", f'{CALL}; {{"name": "g", "parameters": {{no}}}}', '{"name": "g", "parameters": {no}}'),
        ("<tool_calls>[", f'<tool_calls>[{CALL}, {{"name": "g", "arguments": {{"a', '{"name": "g", "arguments": {"a'),
    ],
)
def test_a_call_that_has_ended_stays_one_where_the_next_is_broken(seen, text, rest):
    """In a stream it has been told already."""
    assert read_in_pieces(text, seen) == [("f", CITY), rest]


def test_a_closing_marker_in_a_value_is_not_the_one_that_is_missing():
    text = f"<tool_call>{CALL}".replace("5", "5</tool_call>6")
    assert pieces(OutputParser(HERMES, parameters=TOOLS.parameters), text) == [("f", CITY | {"city": "5</tool_call>6"})]


@pytest.mark.parametrize("seen", ["<tool_call>", "<function=<parameter=", "<|python_tag|>", "<|tool_call>call:"])
def test_a_call_in_a_thought_without_an_end_is_one_if_nothing_follows(seen):
    def read(text):
        return read_in_pieces(text, seen, in_thought=True)

    call = WRITTEN[seen]
    assert read(f"I call it.\n{call}\n") == [Thought("I call it."), ("f", CITY), ("g", {})]
    for text in (f"So {call[:10]}... or not", f"Perhaps {call}\n, but why?", f"Perhaps {call[: call.rindex('g')]}"):
        assert read(text) == [Thought(text)]
    assert read(f"Perhaps {call}.\n</think>\nYes.") == [Thought(f"Perhaps {call}."), "Yes."]


def test_a_call_that_was_cut_is_none_where_its_end_does_not_show():
    text = "<tool_call>f\n<arg_key>city</arg_key>\n<arg_value>5</arg_value>"
    for cut, expected in ((False, ["f"]), (True, [])):
        parser = OutputParser(format_of("<arg_key>"), parameters=TOOLS.parameters)
        found = [*parser.push(text), *parser.finish(cut=cut)]
        assert [piece.name for piece in found if isinstance(piece, Call)] == expected
        assert expected or found == [text]


@pytest.mark.parametrize("text", [f"Yes:\n```json\n{CALL}\n```\nThat is it.", f"{CALL}\n\nis how.", f"Say {CALL}"])
def test_text_about_calls_is_streamed_as_soon_as_it_shows_that_it_is_none(text):
    parser = OutputParser(HERMES, parameters=TOOLS.parameters)
    assert "".join(map("".join, map(parser.push, text))) == text


@given(st.sampled_from(list(WRITTEN)), st.booleans(), st.data())
def test_what_has_begun_of_a_call_is_how_it_goes_on(seen, odd, data):
    """Its name at once, then beginnings of its arguments, which are never whole before the call is."""
    text = WRITTEN[seen].replace("5", 'é\\"5, {6} </a>' if odd and "{pairs}" not in format_of(seen).call else "<5>6")
    parser = OutputParser(format_of(seen), parameters=TOOLS.parameters)
    calls, told, at = [], {}, 0
    while at < len(text):
        size = data.draw(st.integers(1, 4))
        found = parser.push(text[at : at + size])
        calls, at = calls + found, at + size
        for i, call in enumerate(parser.begun):
            assert call.arguments.startswith(told.get(call.id, ("", ""))[1])
            told[call.id] = (call.name, call.arguments)
            if i + 1 == len(parser.begun):
                with pytest.raises(json.JSONDecodeError):
                    json.loads(call.arguments)
    calls += parser.finish()
    assert [call.name for call in calls] == ["f", "g"]
    assert calls[0].id in told
    for call in calls:
        name, arguments = told.get(call.id, (call.name, ""))
        assert name == call.name
        assert call.arguments.startswith(arguments)
    assert len(told[calls[0].id][1]) > len(calls[0].arguments) - 14


LLAMA, BRACES, SEEN = "<|python_tag|>", "<|tool_call>call:", "<tool_call>"
READ = [
    (SEEN, '<tool_call>{"name": "g"}</tool_call> and more', [("g", {}), " and more"]),
    *(
        (SEEN, text, [text])
        for text in (
            "plain < text\n",
            "almost <tool_cal",
            "<tool_call>not json</tool_call>",
            '<tool_call>{"name": 5}</tool_call>',
            '<tool_call>{"name": "f", "arguments": "x"}</tool_call>',
            'cut <tool_call>{"name": "f"',
        )
    ),
    (LLAMA, '\n{"name": "f", "parameters": {"days": 2}}', [("f", {"days": 2})]),
    (LLAMA, '{"type": "function", "name": "f", "parameters": {"days": 2}}', [("f", {"days": 2})]),
    (LLAMA, '{\n  "name": "f",\n  "parameters": {\n    "days": 2\n  }\n}', [("f", {"days": 2})]),
    (LLAMA, '{"name":"f","arguments":{"days":2}}', [("f", {"days": 2})]),
    *(
        (LLAMA, text, [text])  # no marker, and not where the answer begins; or an answer in JSON
        for text in (
            'For example {"name": "f", "parameters": {"days": 2}}',
            '{"name": "Bob"',
            '{"name": "Bob", "age": 3}',
            '{"name": "Bob", "parameters": {}}',
            '{"name": "f", "age": 3}',
            '{"name": "f"}',
            '{"name": "f", "parameters": 5}',
            '{"name": "f", "parameters": {"a": NaN}}',
            '\n{\n "type": "cat", "name": "f", "parameters": {}}',
            "{}",
            " {",
        )
    ),
    (
        BRACES,
        '<|tool_call>call:f{a: { }, b :[1, "c:d", <|"|>e:f}<|"|>,]}<tool_call|>',
        [("f", {"a": {}, "b": [1, "c:d", "e:f}"]})],
    ),
    (  # as in the template of Gemma 4
        BRACES,
        '<|tool_call>call:f{a:None,b:[None],None:<|"|>None<|"|>}<tool_call|>',
        [("f", {"a": None, "b": [None], "None": "None"})],
    ),
    *((seen, "Yes.[TOOL_CALLS]", ["Yes.[TOOL_CALLS]"]) for seen in WRITTEN if "[TOOL_CALLS]" in seen),
]


@pytest.mark.parametrize(("seen", "text", "expected"), READ)
def test_what_is_a_call_in_a_form_and_what_only_looks_like_one(seen, text, expected):
    assert read_in_pieces(text, seen) == expected


def test_json_answers_of_llama_are_streamed():
    parser = OutputParser(format_of("<|python_tag|>"), parameters=TOOLS.parameters)
    found = ["".join(parser.push(text)) for text in ('{"name": "', "Bob", '", "age":', " 3}")]
    assert found == ["", '{"name": "Bob', '", "age":', " 3}"]


@given(st.sampled_from(list(WRITTEN)), st.data())
def test_what_is_cut_or_broken_is_content(seen, data):
    """Nothing is lost and nothing raises."""
    text = WRITTEN[seen]
    start, end = sorted((data.draw(st.integers(0, len(text))), data.draw(st.integers(0, len(text)))))
    found = pieces(OutputParser(format_of(seen)), text[:start] + text[end:], data)
    assert all(isinstance(piece, str) or isinstance(piece[0], str) for piece in found)


JUNK = (
    *'{}[]",:\\\n\t é�\u2028<5', '"name": "f"', '"arguments": ', '{"name":"f","parameters":{', "\\ud800", "NaN",
    "f", "city", "days", "[[[[" * 600, '{"a":' * 1500, "call:", "functions.", "to=", "analysis", "final", "<|",
)  # fmt: skip


@given(st.sampled_from([*WRITTEN, "channels"]), st.sampled_from([None, *THINKING]), st.booleans(), st.data())
def test_whatever_a_model_writes_is_parsed_alike_however_it_comes(seen, thinking, inside, data):
    """Markers in any order and half of them, broken JSON, deep nesting: nothing raises, and no text is lost."""
    form = None if seen == "channels" else format_of(seen)
    markers = [*form.markers, *(thinking or ())] if form else [*MARKERS, *BEGINNINGS]
    text = "".join(data.draw(st.lists(st.sampled_from([*markers, *JUNK]), max_size=14)))

    def parser():
        if not form:
            return ChannelParser(HERMES)
        return OutputParser(form, thinking, in_thought=inside, parameters=TOOLS.parameters)

    whole = pieces(parser(), text)
    assert pieces(parser(), text, data) == whole
    if form and not any(isinstance(piece, tuple) for piece in whole):
        shown = "".join(piece.text if isinstance(piece, Thought) else piece for piece in whole)
        for marker in (*(thinking or ()), *" \t\n\u2028"):
            shown, text = shown.replace(marker, ""), text.replace(marker, "")
        assert shown == text


@pytest.mark.parametrize("seen", WRITTEN)
def test_white_space_around_what_is_no_call_stays(seen):
    """As in a text about calls."""
    form = format_of(seen)
    text = f"Write it so:\n\n{form.open[0]}\n<NAME>\n{form.close}\n\nThen wait.\n"
    for cut in range(len(text)):
        parser = OutputParser(form, parameters=TOOLS.parameters)
        found = [*parser.push(text[:cut]), *parser.push(text[cut:]), *parser.finish()]
        assert "".join(found) == text


@pytest.mark.parametrize("cut", range(1, 12))
def test_an_answer_without_a_channel_is_content_however_it_comes(cut):
    parser, text = ChannelParser(), "<|message|>Yes."
    found = [*parser.push(text[:cut]), *parser.push(text[cut:]), *parser.finish()]
    assert "".join(found) == text


@pytest.mark.parametrize(
    ("seen", "text"),
    [
        ("<|tool_call>call:", "call:f{a:" + "ab c\n" * 60_000),
        ("<arg_key>", "f\n" + "<arg_key>a</arg_key><arg_value>" * 1_000),
        ("<|tool_calls_section_begin|>", "<|tool_call_begin|>f<|tool_call_argument_begin|>" * 1_000),
        ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>" * 1_000),
    ],
)
def test_a_call_that_repeats_itself_does_not_hold_up_the_server(seen, text):
    """Small models do so: if each beginning were tried with each end, this would take minutes."""
    found = pieces(OutputParser(format_of(seen), parameters=TOOLS.parameters), text.join(MARKED[seen]))
    assert found in ([text.join(MARKED[seen])], [("f", {})])


MARKED = {seen: (form.open[0], form.close) for form in FORMATS if form.close for seen in ["".join(form.seen)]}


@pytest.mark.parametrize("seen", WRITTEN)
def test_arguments_that_are_no_json_are_no_call(seen):
    """No other reader of JSON takes NaN or half a surrogate pair. In markup such a value is a string."""
    for value in ("NaN", "-Infinity", "1e999", '"\\ud800"'):
        (before,) = re.findall(r"days\D+", WRITTEN[seen])
        text = WRITTEN[seen].replace(f"{before}2", before + value)
        parser = OutputParser(format_of(seen), parameters=TOOLS.parameters)
        found = [piece for push in (parser.push(text), parser.finish()) for piece in push]
        calls = [piece for piece in found if isinstance(piece, Call)]
        "".join(call.arguments for call in calls).encode()
        read = [json.loads(call.arguments, parse_constant=pytest.fail, parse_float=pytest.fail) for call in calls]
        assert read in ([], [{}], [{"city": "5", "days": value}, {}])
        assert calls or value in "".join(found)


THINK = ("<think>", "</think>")


@given(
    st.sampled_from([
        ("<think>\nHm.\n</think>\n\nYes.", False, [Thought("Hm."), "Yes."]),
        ("Hm.\n</think>\nYes.\n", True, [Thought("Hm."), "Yes.\n"]),
        ("Hm.\n</thi", True, [Thought("Hm.\n</thi")]),
        ("Yes: <think> is a word.", False, ["Yes: <think> is a word."]),
        (" \n<think></think>Yes.", False, ["Yes."]),
        ("<think>a\n\nb</think>\n\n\nYes <think>", False, [Thought("a\n\nb"), "Yes <think>"]),
    ]),
    st.data(),
)  # fmt: skip
def test_what_is_thought_is_told_apart(case, data):
    text, inside, expected = case
    assert pieces(OutputParser(None, THINK, in_thought=inside), text, data) == expected


def test_in_an_answer_that_has_begun_no_thought_begins_and_no_call_without_a_marker():
    assert pieces(OutputParser(None, THINK, blank=False), " <think>a</think>") == [" <think>a</think>"]
    call = '{"name": "g", "parameters": {}}'
    for blank, expected in [(True, [("g", {})]), (False, [call])]:
        calls = format_of("<|python_tag|>")
        assert pieces(OutputParser(calls, blank=blank, parameters=TOOLS.parameters), call) == expected
    assert pieces(ChannelParser(None, "<|channel|>final"), "to=you<|end|>") == ["to=you"]


@pytest.mark.parametrize(
    ("path", "off", "on"),
    [
        ("chat/completions", {"reasoning_effort": "none"}, {"reasoning_effort": "high"}),
        ("messages", {"thinking": {"type": "disabled"}}, {"thinking": {"type": "enabled", "budget_tokens": 1024}}),
    ],
)
def test_an_answer_that_has_begun_without_a_thought_is_not_continued_with_one(thinker, path, off, on):
    body = thinking_body(messages=[*HELLO["messages"], {"role": "assistant", "content": "Yes"}])
    for more in ({}, off):
        assert thinker.post(f"/v1/{path}", json=body | more).status_code == 200
        assert thinker.shown[-1].endswith("Yes")
    assert "the assistant's last message has no thought" in refused(thinker, path, body | on)


def test_an_answer_that_has_begun_with_a_thought_is_continued(thinker):
    said = {"role": "assistant", "content": "Yes", "reasoning_content": "Hm."}
    body = thinking_body(messages=[*HELLO["messages"], said], reasoning_effort="high")
    assert thinker.post("/v1/chat/completions", json=body).status_code == 200


def test_markers_that_are_control_tokens_are_shown():
    with served() as client:
        vocab = client.model.target.vocab
        name = vocab.token_text(vocab.bos_id)
        assert control_tokens(vocab, f"{name}a<b>ab") == {name: vocab.bos_id}
        for shown, text in [((), "a"), ({vocab.bos_id}, f"{name}a")]:
            stream = TextStream(vocab, shown=shown)
            ids = [vocab.bos_id, *vocab.encode("a", add_bos=False, parse_special=False)]
            assert "".join(map(stream.push, ids)) == text


@pytest.fixture(scope="module")
def thinker():
    """A model whose prompts end in the middle of a thought, unless it is told not to think."""
    template = (
        TEMPLATE + "{% for m in messages %}{{ m.reasoning_content or '' }}{% endfor %}"
        "{{ '<think>\n' if enable_thinking is not defined or enable_thinking else '<think></think>' }}"
    )
    with served_and_shown(context=1500, template=template) as client:
        yield client


SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
# The tiny model thinks in random bytes: a regular expression has it think "hm", in a text that `ThoughtFirst` frames.
FORM = {"edgespec": {"lark": "start: /h{1,3}m{1,4}/ \"</think>\\n\" /[a-z]{3,9}/"}}  # fmt: skip


def thinking_body(**more):
    return {"max_tokens": 60, "temperature": 0.8, "seed": 3, **more}


class TestDialects:
    @pytest.fixture(autouse=True)
    def _plain_grammar(self, monkeypatch):
        monkeypatch.setattr(ThoughtFirst, "before", lambda self, grammar, **more: grammar)

    def test_chat(self, thinker):
        body = thinking_body(**HELLO, **FORM)
        answer = thinker.post("/v1/chat/completions", json=body).json()
        message = answer["choices"][0]["message"]
        assert set(message["reasoning_content"]) == {"h", "m"}
        assert message["content"].isalpha()
        counted = answer["usage"]["completion_tokens_details"]["reasoning_tokens"]
        assert counted >= len(message["reasoning_content"])
        parts = [json.loads(data)["choices"][0]["delta"] for data in stream(thinker, "/v1/chat/completions", body)[:-1]]
        for name in ("reasoning_content", "content"):
            assert "".join(part.get(name) or "" for part in parts) == message[name]

    def test_messages(self, thinker):
        body = thinking_body(**HELLO)
        answer = thinker.post("/v1/messages", json=body).json()
        assert answer["content"][0]["type"] == "thinking"  # cut in its midst
        events = [json.loads(data) for data in stream(thinker, "/v1/messages", body)]
        told = "".join(e["delta"].get("thinking", "") for e in events if e["type"] == "content_block_delta")
        assert told == answer["content"][0]["thinking"]
        assert events[1]["content_block"] == {"type": "thinking", "thinking": "", "signature": ""}
        plain = thinker.post("/v1/messages", json=body | {"thinking": {"type": "disabled"}}).json()
        assert plain["content"][0]["type"] == "text"

    def test_responses(self, thinker):
        body = {"input": "hello", "max_output_tokens": 60, "temperature": 0.8, "seed": 3, **FORM}
        answer = thinker.post("/v1/responses", json=body).json()
        thought, message = answer["output"]
        assert thought["type"] == "reasoning"
        assert set(thought["content"][0]["text"]) == {"h", "m"}
        assert answer["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
        events = [json.loads(data) for data in stream(thinker, "/v1/responses", body)]
        done = [e["item"] for e in events if e["type"] == "response.output_item.done"]
        assert [item["content"][0]["text"] for item in done] == [
            thought["content"][0]["text"],
            message["content"][0]["text"],
        ]
        assert [e["output_index"] for e in events if e["type"] == "response.output_item.added"] == [0, 1]
        assert [e["sequence_number"] for e in events] == list(range(len(events)))

    def test_thoughts_come_back_to_the_template(self, thinker):
        said = {"role": "assistant", "content": "yes"}
        blocks = [{"type": "thinking", "thinking": "THOUGHT", "signature": ""}, {"type": "text", "text": "yes"}]
        item = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "THOUGHT"}]}
        user = HELLO["messages"]
        for path, body in [
            ("chat/completions", {"messages": [*user, {**said, "reasoning_content": "THOUGHT"}, *user]}),
            ("messages", {"messages": [*user, {**said, "content": blocks}, *user]}),
            ("responses", {"input": [*user, item, said, *user]}),
        ]:
            assert "THOUGHT" in prompt(thinker, path, body)

    @pytest.mark.parametrize(
        "more", [{"reasoning_effort": "none"}, {"chat_template_kwargs": {"enable_thinking": False, "messages": 5}}]
    )
    def test_thinking_can_be_switched_off(self, thinker, more):
        body = thinking_body(**HELLO, **more)
        assert (
            "reasoning_content" not in thinker.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
        )


def test_a_schema_holds_behind_a_thought():
    with served() as client:
        vocab, compiler = client.model.target.vocab, Compiler(client.model.target.vocab)

        def fits(grammar, inside, text):
            matcher = compiler.compiled(ThoughtFirst(vocab, THINK).before(grammar, in_thought=inside)).start()._matcher
            ids = vocab.encode(text, add_bos=False, parse_special=False)
            return matcher.validate_tokens(ids) == len(ids)

        for grammar, good, bad in [
            (json_schema(SCHEMA), '{"a":1}', '{"b":1}'),
            (regex("[0-9]+/[0-9]"), "12/3", "12-3"),
            (regex(r"a\\/b\/c"), r"a\/b/c", "a/b/c"),
            (lark('start: word "!"\nword: /[a-z]+/'), "abc!", "ABC"),
            (lark('start: answer free?\nanswer: /[a-z]+/\nfree: thought\nthought: "!"'), "abc!", "ABC"),
            (lark('start: "(" start ")" | "start" // as long as start wants\n | /start[.]/'), "((start))", "((stop"),
            (lark("start[lazy]: /(start|stop)\\/!/"), "start/!", "halt!"),
        ]:
            for inside, before in [(True, 'so {"b":\n</think>\n'), (False, "<think>so</think>"), (False, "")]:
                assert fits(grammar, inside, before + good)
                assert not fits(grammar, inside, before + bad)


def test_what_a_template_shows():
    assert call_format_of("<tool_call>") is GENERIC  # it shows no tools
    assert call_format_of("") is GENERIC
    assert format_of("<tool_call>") is HERMES
    assert thinking_of("x</think>") == THINK
    assert thinking_of("x") is None
