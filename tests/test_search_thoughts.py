"""Search over thoughts: each thought is what plain decoding writes at its place, and the best texts go on."""

from dataclasses import replace

import pytest
from reference.backend import ReferenceBackend, perturbed, random_model

from edgespec.errors import UsageError
from edgespec.lab import search
from edgespec.loop.text import TextStream
from edgespec.model import Model
from edgespec.planners.none import NonePlanner
from edgespec.planners.specexec import SpecExecPlanner
from edgespec.scheduler import drive

TARGET = random_model(2, vocab_size=258, sharpness=3.0)
OPTIONS = {"temperature": 0.9, "seed": 5, "stop": tuple("aeiou \n"), "max_tokens": 6}


def backend(model=TARGET, sessions=3):
    return ReferenceBackend(model, context_length=60, sessions=sessions)


@pytest.fixture
def model():
    draft = backend(perturbed(TARGET, 0.2, 1))
    with Model(backend(), [SpecExecPlanner(draft, depth=4) for _ in range(3)], budget=8) as model:
        yield model


def sums(texts):
    return [sum(map(ord, text)) % 97 for text in texts]


def by_hand(width, keep, depth):
    """The tokens of the same search, one thought after another by plain decoding."""
    with Model(backend(sessions=1), NonePlanner(), budget=1) as model:
        first, vocab, texts = model.request("Why?", **OPTIONS), model.target.vocab, [[]]
        for number in range(depth):
            found, seed = [], 5 + number * keep * width
            for text in texts:
                if text and text[-1] in vocab.eog_ids:
                    found.append(text)
                    continue
                for _ in range(width):
                    asked = replace(first, prompt_ids=first.prompt_ids + text)
                    asked = replace(asked, sampling=replace(first.sampling, seed=seed))
                    found.append(text + drive.results_of(model.scheduler, [asked])[0].token_ids)
                    seed += 1
            found = [text for i, text in enumerate(found) if text not in found[:i]]
            texts = sorted(found, key=lambda text: -sums([decoded(vocab, text)])[0])[:keep]
    return texts


def decoded(vocab, token_ids):
    stream = TextStream(vocab)
    return "".join(map(stream.push, token_ids)) + stream.finish()


@pytest.mark.covering(1)
@pytest.mark.parametrize(("width", "keep", "depth"), [(3, 1, 4), (2, 3, 3), (1, 1, 1), (4, 2, 2)])
def test_thoughts_are_those_of_plain_decoding(model, width, keep, depth):
    found = search(model, "Why?", sums, width=width, keep=keep, depth=depth, **OPTIONS)
    assert [one.token_ids for one in found] == by_hand(width, keep, depth)
    assert [one.text for one in found] == [decoded(model.target.vocab, one.token_ids) for one in found]


def test_a_text_that_has_ended_stays_as_it_is(model):
    """It ends by the model's own token, or with the context."""
    seen = []

    def score(texts):
        seen.append(list(texts))
        return [len(texts) - i for i in range(len(texts))]

    ended, *_ = search(model, "Why?", score, width=1, depth=100, **OPTIONS | {"temperature": 0, "max_tokens": 10})
    assert len(seen) < 100
    assert ended.text == seen[-1][0]
    whole = model.generate("Why?", max_tokens=None, temperature=0)
    assert ended.token_ids == whole.token_ids


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"width": 0}, "width is 0, but must be from 1 to 1024"),
        ({"score": lambda texts: None}, "what score returns is None"),
        ({"keep": 1.5}, "keep is 1.5"),
        ({"keep": 400}, "keep is 400"),
        ({"depth": None}, "depth is None"),
        ({"score": 5}, "score is 5, but must be a function"),
        ({"score": lambda texts: []}, "what score returns is \\[\\], but must be a list of 3 numbers"),
        ({"score": lambda texts: ["a", 2, 3]}, "a score is 'a', but must be a number"),
        ({"frequency_penalty": 0.5}, "presence_penalty and frequency_penalty would count in one thought only"),
        ({"colour": 1}, "there is no argument 'colour'"),
        ({"stats": None}, "this method has no argument 'stats'"),
    ],
)
def test_what_cannot_be_searched_is_one_line(model, options, says):
    with pytest.raises(UsageError, match=says):
        search(model, "Why?", **{"score": sums, "width": 3, **OPTIONS, **options})
