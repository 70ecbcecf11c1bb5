"""Texts that follow a grammar: equal with and without guesses, and what the definition says they are."""

import json
import re
import sys
from dataclasses import replace

import numpy as np
import pytest
from alone import served

pytest.importorskip("llguidance", reason="needs llguidance: pip install 'edgespec[server]'")

from conftest import made_up
from hypothesis import given, settings
from hypothesis import strategies as st
from reference.backend import ReferenceBackend, perturbed, random_model

import edgespec
from edgespec.errors import MissingPackage, UsageError, pip_install
from edgespec.lab.lookahead import LookaheadPlanner
from edgespec.loop.grammar import MOST_BYTES, Compiler, Constraint, json_object, json_schema, lark, regex
from edgespec.loop.passes import prefill
from edgespec.loop.sampling import Noise, SamplingParams, sample
from edgespec.loop.text import user_messages
from edgespec.loop.tree import Source, make_tree
from edgespec.planners.none import NonePlanner
from edgespec.planners.specexec import SpecExecPlanner
from edgespec.planners.sssd import SssdPlanner
from edgespec.scheduler import drive
from edgespec.scheduler.events import Wrote
from edgespec.scheduler.requests import Request
from edgespec.scheduler.scheduler import Scheduler

MODEL = random_model(2, vocab_size=258, sharpness=2.0)
TARGET = ReferenceBackend(MODEL, sessions=3)
DRAFT = ReferenceBackend(perturbed(MODEL, 0.2, 1), sessions=3)
COMPILER = Compiler(TARGET.vocab)
CITY = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "Prague"]},
        "days": {"type": "array", "items": {"type": "integer"}, "maxItems": 2},
        "ok": {"type": "boolean"},
    },
    "required": ["city", "days", "ok"],
    "additionalProperties": False,
}
GRAMMARS = {
    "schema": json_schema(CITY),
    "object": json_object(),
    "regex": regex(r"(yes|no|[0-9]{1,3}é?), because .{0,5}\."),
    "lark": lark('start: "<" name ">" /[a-z]*/ "</" name ">"\nname: "bold" | "body"'),
}
PLANNERS = {
    "none": NonePlanner,
    "sssd": lambda: SssdPlanner(depth=6),
    "lookahead": lambda: LookaheadPlanner(depth=6),
    "specexec": lambda: SpecExecPlanner(DRAFT, depth=5, beam=4),
}
samplings = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.7, 1.3]),
    top_k=st.sampled_from([0, 0, 1, 20]),
    top_p=st.sampled_from([1.0, 0.6]),
    min_p=st.sampled_from([0.0, 0.1]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    frequency_penalty=st.sampled_from([0.0, 0.4]),
    logit_bias=st.sampled_from([{}, {40: 5.0}]),
    seed=st.integers(0, 5),
)


def write(requests, planner, slots=1, budget=12):
    scheduler = Scheduler(TARGET, [PLANNERS[planner]() for _ in range(slots)], budget=budget)
    tokens, _, stats = served(scheduler, requests)
    return tokens, stats


def by_definition(prompt, sampling, grammar, count):
    """The text, with each token tried against the grammar: what is not allowed has no chance."""
    session, noise, output = TARGET.open(), Noise(sampling.seed, TARGET.vocab.size), []
    matcher = COMPILER.compiled(grammar).matcher.deep_copy()
    while len(output) < count and (not output or output[-1] != TARGET.vocab.eos_id):
        logits, node = prefill(TARGET, session, [*prompt, *output], want_last=True)
        allowed = [bool(matcher.validate_tokens([token])) for token in range(TARGET.vocab.size)]
        allowed[TARGET.vocab.eos_id] = matcher.is_accepting()
        row = np.where(allowed, logits.row(node), -np.inf).astype(np.float32)
        output.append(sample(row, len(prompt) + len(output), sampling, noise, prompt, output))
        if output[-1] != TARGET.vocab.eos_id:
            assert matcher.consume_token(output[-1])
    session.close()
    return output


@pytest.mark.parametrize("kind", GRAMMARS)
@settings(max_examples=settings().max_examples // 8)
@given(samplings, st.sampled_from(["sssd", "lookahead", "specexec"]), st.sampled_from([1, 7, 30]))
def test_the_text_is_the_one_of_the_definition(kind, sampling, planner, budget):
    prompt = TARGET.vocab.encode('{"city": "Prague"', add_bos=True, parse_special=False)
    request = Request(prompt, sampling, 45, grammar=COMPILER.compiled(GRAMMARS[kind]))
    (output,), _ = write([request], planner, budget=budget)
    assert output == by_definition(prompt, sampling, GRAMMARS[kind], 45)
    if output[-1] == TARGET.vocab.eos_id:
        text = b"".join(map(TARGET.vocab.token_bytes, output)).decode()
        if kind in ("schema", "object"):
            assert isinstance(json.loads(text), dict)
        elif kind == "regex":
            assert re.fullmatch(r"(yes|no|[0-9]{1,3}é?), because .{0,5}\.", text)


def test_texts_with_and_without_grammars_share_passes():
    prompt = TARGET.vocab.encode("hello", add_bos=True, parse_special=False)
    kinds = [*GRAMMARS.values(), None]
    requests = [
        Request(prompt, SamplingParams(temperature=1.0, seed=seed), 40, grammar=grammar and COMPILER.compiled(grammar))
        for seed in range(2)
        for grammar in kinds
    ]
    alone = [write([request], "none", budget=0)[0][0] for request in requests]
    together, stats = write(requests, "specexec", slots=3)
    assert together == alone
    assert all(one.tokens_by_source["grammar"] == 0 for one in stats[4::5])


def test_forced_text_saves_passes_and_imposes_nothing():
    prompt = TARGET.vocab.encode("hello", add_bos=True, parse_special=False)
    request = Request(prompt, SamplingParams(), 100, grammar=COMPILER.compiled(GRAMMARS["schema"]))
    (output,), (stats,) = write([request], "none", budget=20)
    assert stats.tokens_by_source["grammar"] > 15
    assert stats.passes < stats.tokens / 2
    assert set(json.loads(bytes(b"".join(map(TARGET.vocab.token_bytes, output))))) == {"city", "days", "ok"}


def test_a_tree_loses_what_is_refused_and_gains_what_is_forced():
    encode = TARGET.vocab.encode
    constraint = COMPILER.compiled(GRAMMARS["schema"]).start()
    good, bad = (encode(text, add_bos=False, parse_special=False) for text in ('{"city":"Paris"', '{"cat'))
    parents = [-1, *range(len(good)), 3, 9]  # `bad` turns off behind '{"c', and a lonely node behind '{"city":"'
    wrong = encode("x", add_bos=False, parse_special=False)[0]
    assert good[:3] == bad[:3]
    tree = make_tree([9, *good, bad[3], wrong], parents, -0.1 * np.arange(len(parents)), [0] + [1] * (len(parents) - 1))
    found = constraint.prune_and_force(tree, [9], 99)
    assert (found.log_probs[1:] <= found.log_probs[found.parents[1:]]).all()
    texts = []
    for leaf in set(range(len(found))) - set(found.parents.tolist()):
        path, node = [], leaf
        while node:
            path.append(int(found.token_ids[node]))
            node = int(found.parents[node])
        texts.append(b"".join(map(TARGET.vocab.token_bytes, path[::-1])).decode())
    assert any(text.startswith('{"city":"Paris","days":[') for text in texts)
    matcher = COMPILER.compiled(GRAMMARS["schema"]).matcher
    for text in texts:
        assert matcher.validate_tokens(encode(text, add_bos=False, parse_special=False)) == len(text)
    assert {Source(source).name for source in found.source[1:].tolist()} == {"DRAFT", "GRAMMAR"}


def test_a_text_that_leaves_the_grammar_never_comes():
    """Nothing that the mask allows is refused by the grammar: the constraint stays usable to the end."""
    constraint, generator = COMPILER.compiled(GRAMMARS["object"]).start(), np.random.default_rng(1)
    assert isinstance(constraint, Constraint)
    for _ in range(60):
        row = constraint.masked(generator.normal(size=TARGET.vocab.size).astype(np.float32))
        token = int(row.argmax())
        assert np.isfinite(row[token])
        if token == TARGET.vocab.eos_id:
            break
        constraint.accept(token)
        assert not constraint._matcher.get_error()


def test_on_a_model_of_its_own_words(smollm2, smollm2_folder):
    """Words of several bytes: forced text is cut as the model's tokenizer cuts it."""
    path = str(made_up(smollm2, smollm2_folder))
    with edgespec.load(path, planner="sssd", budget=16, threads=1, context_length=512) as model:
        known = {
            "properties": {"city": CITY["properties"]["city"], "ok": {"type": "boolean"}},
            "required": ["city", "ok"],
        }
        form = edgespec.json_schema({"type": "object", "additionalProperties": False, **known})
        for seed in range(2):
            options = {"max_tokens": 60, "temperature": 1.0, "seed": seed, "grammar": form}
            result = model.chat("Which city?", **options)
            assert set(json.loads(result.text)) == {"city", "ok"}
            assert result.stats.tokens_by_source["grammar"] >= 5
            request = model.request(user_messages("Which city?"), **options)
            events = drive.events(model.scheduler, replace(request, plain=True))
            plain = [chunk.token_id for event in events if isinstance(event, Wrote) for chunk in event.chunks]
            assert plain == result.token_ids


def test_the_command_line(run, tmp_path):
    path = tmp_path / "tiny.npz"
    MODEL.save(str(path))
    (tmp_path / "schema.json").write_text(json.dumps(CITY), "utf-8-sig")  # as some editors write it
    (tmp_path / "rules.lark").write_text('start: "yes" | "no"', "utf-8-sig")
    common = ["run", str(path), "hello", "--backend", "reference", "--seed", "1", "-n", "80"]
    code, out, _ = run(*common, "--json-schema", str(tmp_path / "schema.json"), "--json")
    assert code == 0
    assert set(json.loads(json.loads(out)["text"])) == {"city", "days", "ok"}
    code, out, _ = run(*common, "--grammar", str(tmp_path / "rules.lark"))
    assert out.strip() in ("yes", "no")
    for arguments, says in [
        (["--json-schema", "nowhere.json"], "nowhere.json"),
        (["--json-schema", str(tmp_path / "rules.lark")], "rules.lark: the JSON schema is not a JSON object"),
        (["--grammar", str(tmp_path / "schema.json")], "schema.json: the lark cannot be used"),
        (["--grammar", "a", "--json-schema", "b"], "not both"),
    ]:
        code, out, error = run(*common, *arguments)
        assert (code, out) == (2, "")
        assert says in error
        *loaded, line = error.splitlines()
        assert says in line
        assert loaded in ([], ["reference; exactly the text of plain decoding"])


def test_without_the_package_the_command_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(MissingPackage) as caught:
        Compiler(TARGET.vocab)
    assert str(caught.value) == f"a grammar needs the package 'llguidance': {pip_install('edgespec[server]')}"


def test_long_forced_text_is_encoded_once(monkeypatch):
    """60 KB of text that the schema fixes: no step, and no node of its tree, encodes all of it again."""
    text = "The tide comes in. " * 2000
    constraint = COMPILER.compiled(json_schema({"const": text})).start()
    lengths, encode = [], type(TARGET.vocab).encode
    monkeypatch.setattr(
        type(TARGET.vocab), "encode", lambda self, text, **more: lengths.append(len(text)) or encode(self, text, **more)
    )
    ids = [9, *encode(TARGET.vocab, json.dumps(text), add_bos=False, parse_special=False)]
    for at in range(0, 6000, 20):
        chain = make_tree(ids[at : at + 9], range(-1, 8), -0.1 * np.arange(9), [0] + [1] * 8)
        found = constraint.prune_and_force(chain, ids[: at + 1], 20)
        assert len(found) == 29
        assert found.token_ids.tolist() == ids[at : at + 29]
        for token in ids[at + 1 : at + 21]:
            constraint.accept(token)
    assert sum(lengths) < 4 * 6000


def test_masks_of_long_forced_text_take_no_longer(monkeypatch):
    """Each of them needs one token, and the text itself was found when the grammar was compiled."""
    text = "The tide comes in. " * 2000
    lengths, encode = [], type(TARGET.vocab).encode
    monkeypatch.setattr(
        type(TARGET.vocab), "encode", lambda self, text, **more: lengths.append(len(text)) or encode(self, text, **more)
    )
    constraint = COMPILER.compiled(json_schema({"const": text})).start()
    for token in encode(TARGET.vocab, json.dumps(text)[:30], add_bos=False, parse_special=False):
        assert constraint.masked(np.zeros(TARGET.vocab.size, np.float32)).argmax() == token
        constraint.accept(token)
    assert 0 < sum(lengths) < len(text)


def test_a_schema_that_is_too_long_is_not_written_to_its_end():
    read = []

    class Noted(dict):
        def items(self):
            for item in super().items():
                read.append(item)
                yield item

    with pytest.raises(UsageError, match="longer than 65536 bytes"):
        json_schema({"properties": Noted((f"key{i}", {"type": "string"}) for i in range(50_000))})
    assert len(read) < 5_000


def number(*multiples):
    return {"allOf": [{"type": "number", "multipleOf": multiple} for multiple in multiples]}


LETTERS = "abcdefghijklmnopqrst"


def patterns(count):
    return {"allOf": [{"type": "string", "pattern": f"^[a-z]*{letter}[a-z]*$"} for letter in LETTERS[:count]]}


MULTIPLES = r"multipleOf is .*: these numbers have a least common multiple of more"
TOGETHER = "20 regular expressions must match one text, but at most 8 may"
PATTERNS = patterns(20)["allOf"]


@pytest.mark.parametrize(
    ("make", "source", "says"),
    [
        (json_schema, "{", "not a JSON object"),
        (json_schema, "[1]", "not a JSON object"),
        (json_schema, {"type": "cat"}, "json_schema cannot be used"),
        (regex, "(", "regex cannot be used"),
        (lark, "start: nothing", "lark cannot be used"),
        (regex, "a" * (MOST_BYTES + 1), "longer than 65536"),
        # llguidance computes a state for each remainder: for 9973 and 9967 together these are 99 million.
        *(
            (json_schema, number(*multiples), MULTIPLES)
            for multiples in ((99_991,), (86_400, 0.0097), (9973, 9967), (1.234567e-05,), (2**30,))
        ),
        # Its time and memory double with each regular expression that holds at once: 20 took nine seconds.
        (json_schema, {"allOf": PATTERNS}, TOGETHER),
        (json_schema, {"properties": {"a": {"allOf": [{"allOf": PATTERNS}]}}}, TOGETHER),
        (json_schema, {"$defs": {"x": {"allOf": PATTERNS}}, "allOf": [{"$ref": "#/$defs/x"}]}, TOGETHER),
        (
            json_schema,
            {
                "$defs": {f"a/{i}": one for i, one in enumerate(PATTERNS)},
                "allOf": [{"$ref": f"#/$defs/a~1{i}"} for i in range(20)],
            },
            TOGETHER,
        ),
        (
            json_schema,
            {"$defs": {"x": {"anyOf": PATTERNS}}, "allOf": [{"$ref": f"#/$defs/x/anyOf/{i}"} for i in range(20)]},
            TOGETHER,
        ),
        (lark, "start: A\nA: " + " & ".join(f"/[a-z]*{letter}[a-z]*/" for letter in LETTERS), TOGETHER),
    ],
)
def test_what_cannot_be_used_or_would_take_all_time_and_memory_is_one_line(make, source, says):
    with pytest.raises(UsageError, match=says) as raised:
        COMPILER.compiled(make(source))
    assert "\n" not in str(raised.value)


MANY_KEYS = {f"key{i}": {"type": "string", "pattern": f"^{i}$"} for i in range(30)}


@pytest.mark.parametrize(
    "schema",
    [
        *(number(*multiples) for multiples in ((0.01, 0.5), (86_400,), (64, 1024), (10**9,), (0.25, 15))),
        patterns(4),
        {"type": "object", "properties": MANY_KEYS, "allOf": [{"required": ["key1"]}]},
    ],
)
def test_ordinary_multiples_and_patterns_can_be_had(schema):
    COMPILER.compiled(json_schema(schema))


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "uniqueItems": True},
        {"type": "string", "format": "cat"},
        {"not": {"type": "null"}},
        {"type": "string", "pattern": "^(?!.*secret)a+$"},
        {"type": "string", "pattern": r"(a)\1"},
        {"type": "string", "pattern": r"\bword\b"},
        {"type": "object", "patternProperties": {"^(?!x)": {"type": "null"}}, "additionalProperties": False},
        {"type": "object", "properties": {"pattern": {"pattern": "(?=a)", "type": "string"}, "x": {"$ref": "#/a/b"}}},
        {"anyOf": [{"$ref": "#/$defs/missing"}, {"$ref": "#nowhere"}, {"$ref": "https://example.org/a.json#/x"}]},
        {"multipleOf": 99991},
    ],
)
def test_what_cannot_be_enforced_is_refused_only_where_it_must_be(schema):
    with pytest.raises(UsageError) as caught:
        COMPILER.compiled(json_schema(schema))
    assert len(str(caught.value).splitlines()) == 1
    COMPILER.compiled(json_schema(schema, strict=False))
    nested = json_schema({"type": "object", "properties": {"a": schema}}, strict=False)
    COMPILER.compiled(lark(f"start: a\na: %json {nested.text}"))
    with pytest.raises(UsageError, match="cannot be used"):
        COMPILER.compiled(json_schema(schema | {"type": "cat"}, strict=False))


def test_what_can_be_enforced_still_counts_beside_what_cannot():
    schema = {
        "type": "object",
        "properties": {"a": {"type": "string", "pattern": "(?=x)"}, "b": {"$ref": "#/$defs/b%20b"},
                       "c": {"enum": [{"pattern": "(?=x)"}]}, "d": {"type": "string", "pattern": "^[0-9]+$"}},
        "$defs": {"b b": {"$anchor": "b", "enum": [1, 2]}}, "required": ["b"],
    }  # fmt: skip
    for good, text in (
        (True, '{"a":"y","b":1,"c":{"pattern":"(?=x)"},"d":"5"}'), (False, '{"b":3'), (False, '{"a":5'),
        (False, '{"b":1,"c":{}'), (False, '{"b":1,"d":"x'), (False, '{"a":"y"}'),
    ):  # fmt: skip
        constraint = COMPILER.compiled(json_schema(schema, strict=False)).start()
        ids = TARGET.vocab.encode(text, add_bos=False, parse_special=False)
        assert (constraint._matcher.validate_tokens(ids) == len(ids)) is good, text


def test_remembered_forced_text_is_what_would_be_computed_again():
    vocab = TARGET.vocab
    constraint = COMPILER.compiled(GRAMMARS["schema"]).start()
    ids = vocab.encode('{"city":"Paris","days":[', add_bos=False, parse_special=False)
    for at, token in enumerate(ids):
        found = constraint.prune_and_force(make_tree([9], [-1], np.zeros(1), [0]), [9, *ids[:at]], 5)
        fresh = Constraint(constraint._matcher, vocab).prune_and_force(
            make_tree([9], [-1], np.zeros(1), [0]), [9, *ids[:at]], 5
        )
        assert found.token_ids.tolist() == fresh.token_ids.tolist()
        constraint.accept(token)
