"""The Python API takes what a caller means, and refuses the rest in one line, from every method and function."""

import asyncio
import gc
import inspect
import math
import os
import threading
from contextlib import aclosing, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import numpy as np
import pytest
from gguf_files import small_llama
from reference.backend import ReferenceBackend, random_model

import edgespec
import edgespec.lab
from edgespec import model as api
from edgespec.errors import EdgespecError, UsageError
from edgespec.loading.asked import asked_for
from edgespec.loading.keywords import GenerateKeywords, LoadKeywords, RequestKeywords
from edgespec.loop.sampling import SamplingParams
from edgespec.loop.stats import GenerationStats
from edgespec.model import Model
from edgespec.models import registry
from edgespec.planners.choice import CHECKS
from edgespec.planners.none import NonePlanner

MESSAGES = [{"role": "user", "content": "hello"}]
ARGUMENTS = {  # of every parameter that has no default, a good value
    "prompt": "hello", "messages": "hello", "k": 2, "prompt_ids": [3, 4], "token_ids": [3],
    "text": "hello", "texts": ["hello"],
    "schema": {"type": "object"}, "pattern": "a", "rules": 'start: "a"', "grammar": edgespec.regex("a"),
    "target": "tiny.gguf", "draft": None, "requests": [],
    "score": lambda texts: [len(text) for text in texts],
}  # fmt: skip
ODD = [
    None, Path("x"), os.fsencode("x"), "hot", "", "\ud800", 5, -1, 0, 2**70, 10**5000, 1.5, 1e400, math.nan, True,
    np.int64(3), np.float32(0.5), np.array([1, 2]), [], [3], [None], [{}], ["", Path("x")], {}, {"a": 1}, {3: "x"},
    object(), lambda *_: None, SimpleNamespace(),
]  # fmt: skip
SKIPPED = {"approximate", "close", "notes", "scheduler", "where"}  # they take no argument


def public_methods():
    return [name for name in dir(Model) if not name.startswith("_") and name not in SKIPPED]


def parameters(call):
    """Names of a call's parameters; those of its `**options`, too."""
    found = inspect.signature(call).parameters.values()
    names = [one.name for one in found if one.kind is not one.VAR_KEYWORD and one.name != "self"]
    for one in found:
        if one.kind is one.VAR_KEYWORD:
            [typed] = get_args(one.annotation) or [RequestKeywords]
            names += [*typed.__annotations__]
    return names


def required(call):
    kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    found = inspect.signature(call).parameters.values()
    return {one.name: ARGUMENTS[one.name] for one in found if one.default is one.empty and one.kind not in kinds}


def outcome(call, **arguments):
    """What a call gives, with all chunks of a stream; or the typed error that it raises."""
    try:
        found = call(**arguments)
        if inspect.iscoroutine(found):
            return asyncio.run(found)
        if hasattr(found, "__aiter__"):
            return asyncio.run(all_of(found))
        return list(found) if hasattr(found, "__next__") else found
    except EdgespecError as error:
        found = error
    assert len(str(found).splitlines()) == 1, str(found)
    return found


async def all_of(chunks):
    async with aclosing(chunks):
        return [chunk async for chunk in chunks]


@pytest.fixture(scope="module")
def gguf(tmp_path_factory):
    return small_llama(tmp_path_factory.mktemp("api") / "tiny.gguf", layers=1)


@pytest.fixture(scope="module", params=["reference", "llamacpp"])
def model(request):
    if request.param == "llamacpp":
        options = {"context_length": 64, "planner": "none", "exact": "off", "parallel": 2, "remember": False}
        model = edgespec.load(request.getfixturevalue("gguf"), **options)
    else:
        target = ReferenceBackend(random_model(2, vocab_size=258), sessions=2, context_length=64)
        model = Model(target, [NonePlanner(), NonePlanner()])
    with model:
        yield model


@pytest.mark.parametrize("name", public_methods())
def test_every_method_works_or_refuses_in_one_line(model, name, whole_grid):
    pytest.importorskip("llguidance")
    call = getattr(model, name)
    short = {"max_tokens": 2} if "max_tokens" in parameters(call) else {}
    assert not isinstance(outcome(call, **required(call) | short), EdgespecError)
    # What is checked before an engine sees it is tried with one engine.
    everything = whole_grid or isinstance(model.target, ReferenceBackend)
    for parameter in parameters(call) if everything else required(call):
        for value in ODD:
            outcome(call, **required(call) | short | {parameter: value})
    if short:
        assert str(outcome(call, **required(call), nonsense=1)).startswith("there is no argument 'nonsense'; ")
    assert model.scheduler.active == model.scheduler.waiting == 0


@pytest.mark.parametrize(
    "name",
    ["scale", *(name for name in edgespec.__all__ if inspect.isfunction(getattr(edgespec, name)) and name != "aload")],
)
def test_every_function_works_or_refuses_in_one_line(name, gguf, tmp_path, monkeypatch):
    (tmp_path / "models.yaml").write_text("models: []", "utf-8")
    monkeypatch.setattr(registry, "BUILT_IN", tmp_path / "models.yaml")  # it is read by every load
    monkeypatch.setitem(ARGUMENTS, "target", gguf)

    def opened(*_, **__):
        return [ReferenceBackend(random_model(2, vocab_size=258), sessions=32)], lambda pace: None

    monkeypatch.setattr(api, "open_pair", opened)
    monkeypatch.setattr(api, "choose_sampling", lambda *_: (SamplingParams(), []))
    monkeypatch.setattr(api, "open_targets", lambda *_, **__: (_ for _ in ()).throw(EdgespecError("no copies here")))
    call, short = getattr(edgespec.lab if name == "scale" else edgespec, name), {}
    if name == "scale":
        backend = ReferenceBackend(random_model(2, vocab_size=258, layers=1), sessions=2, context_length=24)
        target = Model(backend, [NonePlanner(), NonePlanner()])
        short = {"target": target, "draft": target, "samples": 2, "chunk": 2, "max_tokens": 3}
    assert not isinstance(outcome(call, **required(call) | short), EdgespecError)
    for parameter in parameters(call):
        for value in ODD:
            found = outcome(call, **required(call) | short | {parameter: value})
            if isinstance(found, Model):
                found.close()
            if isinstance(found, UsageError) and name == "load":
                others = ("there is no model", "several targets need a draft model")
                assert parameter in str(found) or str(found).startswith(others), str(found)


@pytest.mark.parametrize("name", SamplingParams.__dataclass_fields__)
def test_every_field_of_sampling_works_or_refuses_in_one_line(name):
    for value in ODD:
        outcome(SamplingParams, **{name: value})


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"seed": 1.5}, "seed is 1.5, but must be a whole number, from 0 to 18446744073709551615"),
        ({"seed": -1}, "seed is -1, but must be from 0 to 18446744073709551615"),
        ({"seed": True}, "seed is True, but must be a whole number, from 0 to 18446744073709551615"),
        ({"temperature": "hot"}, "temperature is 'hot', but must be a number, at least 0"),
        ({"temperature": math.nan}, "temperature is nan, but must be at least 0"),
        ({"temperature": False}, "temperature is False, but must be a number, at least 0"),
        ({"top_k": 2.0}, "top_k is 2.0, but must be a whole number, at least 0"),
        ({"logit_bias": [3]}, "logit_bias is [3], but must be a mapping from token ids to numbers"),
        ({"logit_bias": {"a": 1}}, "a token id in logit_bias is 'a', but must be a whole number, from 0 to 2147483647"),
        ({"max_tokens": 0}, "max_tokens is 0, but must be at least 1"),
        ({"max_tokens": "9"}, "max_tokens is '9', but must be a whole number, at least 1"),
        ({"stop": 5}, "stop is 5, but must be a text or a list of texts"),
        ({"stop": ["a", 5]}, "one of stop is 5, but must be a text"),
        ({"stop": ""}, "a stop string is empty; give at least one character"),
        ({"grammar": "a+"}, "grammar is 'a+', but must be made by edgespec.json_schema, json_object, regex or lark"),
        ({"prediction": b"a"}, "prediction is b'a', but must be a text"),
        ({"stats": {}}, "stats is {}, but must be a GenerationStats"),
        ({"progress": 1}, "progress is 1, but must be a function"),
        ({"max_new_tokens": 5}, "there is no argument 'max_new_tokens'; did you mean max_tokens?"),
        ({"temprature": 0.7}, "there is no argument 'temprature'; did you mean temperature?"),
        ({"stream": True}, "there is no argument 'stream'; did you mean the method stream_chat?"),
    ],
)
def test_a_wrong_argument_of_a_call_is_named_with_its_value(model, arguments, says):
    with pytest.raises(UsageError) as caught:
        model.generate("hello", **arguments)
    assert str(caught.value).startswith(says)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"n_ctx": 512}, "there is no argument 'n_ctx'; did you mean context_length?"),
        ({"ctx": 512}, "there is no argument 'ctx'; did you mean context_length?"),
        ({"n_gpu_layers": 5}, "there is no argument 'n_gpu_layers'; did you mean gpu_layers?"),
        ({"draft_model": "a"}, "there is no argument 'draft_model'; did you mean draft"),
        ({"zzz": 1}, "there is no argument 'zzz'; there are: target, draft, planner, "),
        ({"planner": "spec"}, "there is no planner 'spec'; did you mean specexec"),
        ({"depth": 0}, "depth is 0, but must be at least 1"),
        ({"tau": "much"}, "tau is 'much', but must be a number, above 0"),
        ({"coupling": "no"}, "coupling is 'no', but must be True or False"),
        ({"context_length": -1}, "context_length is -1, but must be from 0 to 16777216"),
        ({"context_length": 512.0}, "context_length is 512.0, but must be a whole number, from 0 to 16777216"),
        ({"budget": True}, "budget is True, but must be a whole number, at least 1"),
        ({"threads": 0}, "threads is 0, but must be from 1 to 1024"),
        ({"gpu_layers": -2}, "gpu_layers is -2, but must be at least -1"),
        ({"parallel": None}, "parallel is None, but must be a whole number, from 1 to 128"),
        ({"memory": "plenty"}, "memory: 'plenty' is not a size: write for example 12G, 900M or 1.5GiB"),
        ({"memory": 1.5e9}, "memory is 1500000000.0, but must be a whole number, at least 1"),
        ({"remember": 1}, "remember is 1, but must be True or False"),
        ({"ahead": "yes"}, "ahead is 'yes', but must be True or False"),
        ({"draft": 5}, "draft is 5, but must be a name or a path"),
        ({"draft": ""}, "draft is '', but must be a name or a path"),
        ({"datastore": ""}, "datastore is '', but must be a name or a path"),
        ({"planner": ""}, "there is no planner ''"),
        ({"device": 0}, "device is 0, but must be a text"),
        ({"backend": 0}, "backend is 0, but must be a text"),
        ({"lenders": 5}, "lenders is 5, but must be a text or a list of texts"),
        ({"say": "loud"}, "say is 'loud', but must be a function"),
    ],
)
def test_a_wrong_argument_of_load_is_named_with_its_value(gguf, arguments, says):
    with pytest.raises(UsageError) as caught:
        edgespec.load(gguf, **arguments)
    assert str(caught.value).startswith(says)


def test_a_chat_template_may_stand_in_a_file(gguf, tmp_path):
    file = tmp_path / "own.jinja"
    file.write_text("{% for m in messages %}({{ m.content }}){% endfor %}", "utf-8")
    with edgespec.load(
        gguf, chat_template=file, planner="none", context_length=64, exact="off", remember=False
    ) as model:
        assert model.encode([{"role": "user", "content": "hi"}]) == model.encode("(hi)")
        assert model.target.vocab.tool_template is None
    file.write_text("{% for m in %}", "utf-8")
    for name, says in [
        (file, "own.jinja: is no chat template: "),
        (tmp_path / "none", "none: cannot be read: No such"),
    ]:
        with pytest.raises(UsageError, match=says):
            edgespec.load("no-such.gguf", chat_template=name)


@pytest.mark.parametrize("target", [None, b"tiny.gguf", 5])
def test_a_target_that_is_no_name_and_no_path_is_refused(target):
    with pytest.raises(UsageError, match=r"^target is .*, but must be a name or a path$"):
        edgespec.load(target)


def test_paths_are_taken_wherever_a_file_is_named(gguf, tmp_path):
    from edgespec.planners.datastore import build

    models_file, session = tmp_path / "models.yaml", tmp_path / "a.session"
    models_file.write_text("models: []\n", "utf-8")
    options = {"context_length": 64, "budget": 4, "exact": "off", "remember": False, "models_file": models_file}
    with edgespec.load(gguf, draft=gguf, planner="specexec", **options) as model:
        expected = model.generate("hello", max_tokens=8).text
        build(tmp_path / "a.store", ["hello hello"], model.target.vocab)
        model.scheduler.save(session)
        assert model.scheduler.load(session) is None
    with edgespec.load(gguf, datastore=tmp_path / "a.store", planner="sssd", **options) as model:
        assert model.generate("hello", max_tokens=8).text == expected


@pytest.mark.parametrize("written", ["context_length: 64", "ctx: 64", "context_length: 0", ""])
def test_models_yaml_calls_the_context_as_load_does(gguf, tmp_path, written):
    models_file = tmp_path / "models.yaml"
    models_file.write_text(f"models:\n  - {{name: a, target: 'file:{gguf}', defaults: {{{written}}}}}\n", "utf-8")
    with edgespec.load("a", models_file=models_file, planner="none", exact="off", remember=False) as model:
        wanted = {"context_length: 0": 2048, "": 4096}.get(written, 64)  # 2048: as trained
        assert model.target.capabilities.context_length == wanted
        outdated = "models.yaml: ctx goes with the next version; write context_length"
        assert (outdated in model.notes) == written.startswith("ctx")


@pytest.mark.parametrize("intel", [True, False])
def test_a_python_for_intel_on_apple_silicon_is_told(gguf, monkeypatch, intel):
    monkeypatch.setattr(api, "under_rosetta", lambda: intel)
    with edgespec.load(gguf, planner="none", exact="off", remember=False) as model:
        assert any("Intel" in note for note in model.notes) == intel


def test_none_is_the_default_of_every_argument_and_draws_a_seed(model):
    nothing = dict.fromkeys(GenerateKeywords.__annotations__)
    result, again = model.generate("hello", **nothing), model.generate("hello", **nothing)
    assert result.stats.finish_reason in ("stop", "length")
    assert result.stats.prompt_tokens + result.stats.tokens == model.target.capabilities.context_length
    assert result.seed != again.seed


def test_a_call_without_a_seed_draws_one_that_gives_the_same_text_again(model):
    options, stats = {"temperature": 1.0, "max_tokens": 8}, GenerationStats()
    streamed = "".join(chunk.text for chunk in model.stream("hello", stats=stats, **options))
    texts = {stats.seed: streamed}
    for result in (model.generate("hello", **options), model.branch("hello", 2, **options)[1]):
        texts[result.seed] = result.text
    assert len(texts) == 3
    for seed, text in texts.items():
        assert model.generate("hello", seed=seed, **options).text == text


def test_decode_gives_the_text_of_encode_and_of_a_result(model):
    assert model.decode(model.encode("ä hello")) == "ä hello"
    result = model.generate("hello", max_tokens=8)
    assert model.decode(result.token_ids) == result.text
    for wrong in ([10**6], [-1], ["a"], 5):
        with pytest.raises(UsageError, match=r"is .*, but must be"):
            model.decode(wrong)


def test_without_a_limit_a_text_ends_where_the_context_does(gguf):
    with edgespec.load(gguf, context_length=640, planner="none", exact="off", remember=False) as model:
        endless = dict.fromkeys(model.target.vocab.eog_ids, -math.inf)
        stats = model.generate("hello", max_tokens=None, logit_bias=endless).stats
    assert (stats.finish_reason, stats.prompt_tokens + stats.tokens) == ("length", 640)


def test_one_string_ends_the_output_as_a_list_of_it_does(model):
    text = model.generate("hello", max_tokens=8).text
    assert model.generate("hello", max_tokens=8, stop=text[2:4]).text == text[: text.index(text[2:4])]
    assert model.generate("hello", max_tokens=8, stop=[text[2:4]]).text == text[: text.index(text[2:4])]


def test_numbers_of_numpy_are_numbers(model):
    plain = {"seed": 3, "temperature": 0.5, "top_k": 9, "max_tokens": 4, "logit_bias": {5: 1.0}}
    numpy = {
        "seed": np.uint64(3), "temperature": np.float32(0.5), "top_k": np.int32(9), "max_tokens": np.int64(4),
        "logit_bias": {np.int64(5): np.float32(1)},
    }  # fmt: skip
    assert model.generate("hello", **numpy).text == model.generate("hello", **plain).text
    assert type(model.generate("hello", **numpy).stats.seed) is int


def test_text_is_continued_and_a_question_is_answered_by_every_way_to_read(model):
    def text(chunks):
        return "".join(chunk.text for chunk in chunks)

    short = {"max_tokens": 8}
    answer, more = model.chat("hello", **short).text, model.generate("hello", **short).text
    assert answer == model.chat(MESSAGES, **short).text == model.generate(MESSAGES, **short).text != more
    for messages in ("hello", MESSAGES):
        assert text(model.stream_chat(messages, **short)) == answer
        assert text(asyncio.run(all_of(model.astream_chat(messages, **short)))) == answer
        assert asyncio.run(model.achat(messages, **short)).text == answer
    assert text(model.stream("hello", **short)) == text(asyncio.run(all_of(model.astream("hello", **short)))) == more
    assert asyncio.run(model.agenerate("hello", **short)).text == more


def test_a_system_message_of_the_model_is_before_every_single_question(model, monkeypatch):
    monkeypatch.setattr(model, "system", "Be short.")
    asked = []
    monkeypatch.setattr(model, "request", lambda prompt, **_: asked.append(prompt))
    for call in (model.chat, model.stream_chat):
        with pytest.raises(AttributeError):  # there is no request to submit
            list(call("hello"))
    with pytest.raises(AttributeError):
        asyncio.run(all_of(model.astream_chat("hello")))
    with pytest.raises(AttributeError):
        asyncio.run(model.achat("hello"))
    assert asked == [[{"role": "system", "content": "Be short."}, *MESSAGES]] * 4


def test_repr_says_what_is_loaded_and_what_was_written(gguf):
    model = edgespec.load(
        gguf, draft=gguf, planner="specexec", budget=4, context_length=64, exact="off", remember=False
    )
    about = f"<Model {gguf} on llamacpp, draft {gguf}, planner specexec, context 64"
    with model:
        assert repr(model) == f"{about}>"
        result = model.generate("hello", max_tokens=4, seed=7)
        assert repr(result).startswith(f"<GenerationResult {result.text!r}: length, 4 tokens, ")
        assert repr(result).endswith(", seed 7>")
        assert repr(result).count("seed") == 1
        assert len(repr(result).splitlines()) == 1
    assert repr(model) == f"{about}, closed>"
    assert repr(edgespec.model.GenerationResult()).startswith("<GenerationResult '': unfinished, 0 tokens, ")


@contextmanager
def left(gguf):
    """A model and the statistics of a stream without a limit, which is left in the block, and which ends then."""
    options = {"context_length": 512, "planner": "none", "exact": "off", "remember": False}
    with edgespec.load(gguf, **options) as model:
        stats = edgespec.GenerationStats()
        yield model, stats
        model.generate("another", max_tokens=2)  # with one sequence, it waits for the end of the first
        assert model.scheduler.active == model.scheduler.waiting == 0
        assert stats.finish_reason == "interrupted"
        assert stats.tokens < 500


@pytest.mark.parametrize("leave", ["close", "del", "cycle", "break", "raise"])
def test_a_stream_that_is_left_ends_its_request(gguf, leave):
    with left(gguf) as (model, stats):
        chunks = model.stream_chat("hello", max_tokens=None, stats=stats)
        assert model.scheduler.active == model.scheduler.waiting == 0  # nothing was read yet
        next(chunks)
        if leave == "close":
            chunks.close()
        elif leave == "cycle":
            cycle = SimpleNamespace(chunks=chunks)
            cycle.itself = cycle
            del cycle
        elif leave == "break":
            for _ in chunks:
                break
        elif leave == "raise":
            with suppress(ZeroDivisionError):
                for _ in chunks:
                    raise ZeroDivisionError
        del chunks
        gc.collect()


@pytest.mark.parametrize("leave", ["aclose", "del", "cancel", "end of the loop"])
def test_an_asynchronous_stream_that_is_left_ends_its_request(gguf, leave):
    with left(gguf) as (model, stats):

        async def read_one():
            chunks = model.astream_chat("hello", max_tokens=None, stats=stats)
            await anext(chunks)
            if leave == "aclose":
                await chunks.aclose()
            elif leave == "cancel":
                task = asyncio.ensure_future(all_of(chunks))
                await asyncio.sleep(0)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            elif leave == "del":
                del chunks
                gc.collect()
                await asyncio.sleep(0)
            else:
                return chunks
            while model.scheduler.active:
                await asyncio.sleep(0.01)
            assert stats.finish_reason == "interrupted"
            return None

        kept = asyncio.run(read_one())
        assert (kept is None) == (leave != "end of the loop")


def test_a_stream_that_is_collected_while_another_is_interrupted_locks_nothing_up():
    target = ReferenceBackend(random_model(2, vocab_size=258))
    model, forward = Model(target, NonePlanner()), target.forward
    lost = SimpleNamespace(chunks=model.stream("hello", max_tokens=1))
    next(lost.chunks)
    lost.itself = lost
    found = []

    def leave(works):
        for seq in model.scheduler.pool.seqs:
            seq.cancel()
        return forward(works)

    def read():
        chunks = model.stream("another", max_tokens=9)
        next(chunks)
        target.forward = leave
        with pytest.raises(EdgespecError):
            list(chunks)
        found.append(model.scheduler.active)

    target.interrupt = lambda pass_number: gc.collect()
    del lost
    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    reader.join(60)
    assert found == [0]


def test_help_begins_with_an_example_and_is_short():
    import pydoc

    shown = pydoc.plain(pydoc.render_doc(edgespec))
    assert "edgespec.load(" in shown[:1000]
    assert len(shown.splitlines()) < 350
    assert all(
        hasattr(edgespec, name) for name in ("Chunk", "GenerationStats", "SamplingParams", "Source", "UsageError")
    )


def test_keywords_and_what_takes_them_agree():
    """The types are written once more, since a type checker reads no other code."""
    loading = inspect.signature(asked_for).parameters
    assert set(LoadKeywords.__annotations__) == {*loading, *CHECKS} - {"target", "planner_options"}
    sampling = set(RequestKeywords.__annotations__) - {"max_tokens", "stop", "grammar", "prediction"}
    assert sampling == set(SamplingParams.__dataclass_fields__)
