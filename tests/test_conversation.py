"""Conversations in Python: messages are kept, whatever becomes of an answer."""

import asyncio
import re
from contextlib import aclosing
from pathlib import Path

import pytest
from gguf_files import small_llama
from reference.backend import ReferenceBackend, random_model

import edgespec
from edgespec.errors import ContextFull, UsageError
from edgespec.model import Model
from edgespec.planners.none import NonePlanner

SHORT = {"max_tokens": 3, "temperature": 0.7, "seed": 1}
PAGE = Path(__file__).parent.parent / "docs" / "reference" / "api.md"


@pytest.fixture
def model():
    with Model(ReferenceBackend(random_model(2, vocab_size=258)), NonePlanner(), system="Be brief.") as model:
        yield model


def roles(conversation):
    return [message["role"] for message in conversation.messages]


def test_answers_become_messages_and_only_what_is_new_is_read(model):
    conversation = edgespec.Conversation(model)
    first, stats = conversation.ask("hello", **SHORT), edgespec.GenerationStats()
    assert first == model.chat("hello", **SHORT).text
    again = conversation.ask("and now?", stats=stats, **SHORT)
    assert roles(conversation) == ["system", "user", "assistant", "user", "assistant"]
    assert [conversation.messages[2]["content"], conversation.messages[4]["content"]] == [first, again]
    assert 0 < stats.cached_tokens < stats.prompt_tokens
    assert edgespec.Conversation(model, messages=conversation.messages[:3]).ask("and now?", **SHORT) == again


def test_it_begins_as_it_is_told(model):
    assert edgespec.Conversation(model, "Be long.").messages == [{"role": "system", "content": "Be long."}]
    assert roles(edgespec.Conversation(model, messages=[{"role": "user", "content": "a"}])) == ["user"]
    for wrong in ({"model": 5}, {"model": model, "system": 5}):
        with pytest.raises(UsageError):
            edgespec.Conversation(**wrong)


def test_an_answer_that_is_cut_off_stays_and_a_question_without_one_goes(model):
    conversation = edgespec.Conversation(model, "")
    chunks = conversation.stream("hello", **SHORT)
    begun = next(chunks).text
    chunks.close()
    assert conversation.messages[1:] == [{"role": "user", "content": "hello"}, {"role": "assistant", "content": begun}]
    before = list(conversation.messages)
    for question, error in (("a" * 10_000, ContextFull), (5, UsageError)):
        with pytest.raises(error):
            conversation.ask(question, **SHORT)
    assert conversation.messages == before


def test_in_asyncio_it_is_the_same(model):
    async def ask():
        conversation = edgespec.Conversation(model)
        texts = [await conversation.aask("hello", **SHORT)]
        async with aclosing(conversation.astream("and now?", **SHORT)) as chunks:
            async for chunk in chunks:
                texts.append(chunk.text)
                break
        return conversation, texts

    conversation, texts = asyncio.run(ask())
    assert [one["content"] for one in conversation.messages[2::2]] == texts
    assert texts[0] == edgespec.Conversation(model).ask("hello", **SHORT)


def test_the_app_of_the_page_runs(tmp_path, capsys):
    for package in ("llama_cpp", "starlette", "llguidance"):
        pytest.importorskip(package)
    [app] = re.findall(r"^## An app\n.*?```python\n(.*?)```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert len(app.splitlines()) <= 40
    path = small_llama(tmp_path / "tiny.gguf", layers=1)
    exec(compile(app.replace("big.gguf", str(path)).replace("=1000", "=1900"), "app", "exec"), {})
    *_, vectors, last = capsys.readouterr().out.splitlines()
    assert "(2, 256)" in (vectors, last)  # a random story may end by itself


def test_what_cannot_be_loaded_is_one_line_in_asyncio_too():
    with pytest.raises(edgespec.EdgespecError, match="nowhere"):
        asyncio.run(edgespec.aload("nowhere.gguf"))
