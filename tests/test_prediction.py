"""What a text may be foretold from besides itself: a predicted answer, and what its siblings write."""

import pytest
from auto_planners import auto_planner
from reference.backend import ReferenceBackend, random_model

from edgespec.errors import UsageError
from edgespec.loop.hint_texts import LONGEST_INPUT, MOST_SIBLINGS, HintTexts
from edgespec.loop.tree import Source
from edgespec.model import CHARACTERS, Model
from edgespec.planners.auto import new_auto_state
from edgespec.planners.none import NonePlanner
from edgespec.planners.sssd import SssdPlanner

PROMPT = "to be or not to be, that is the question; " * 3


def opened(kind="sssd", slots=4):
    target = ReferenceBackend(random_model(2, vocab_size=258), sessions=slots, context_length=300)
    target.model.unembedding[1] = 0  # texts seldom end early
    pace = new_auto_state(False)
    make = {"none": NonePlanner, "sssd": SssdPlanner, "auto": lambda: auto_planner("auto", pace, SssdPlanner())}[kind]
    return Model(target, [make() for _ in range(slots)], budget=8, pace=pace if kind == "auto" else None)


@pytest.fixture(scope="module")
def plain():
    with opened("none", slots=1) as model:
        yield model


def test_a_family_knows_the_prediction_and_the_siblings_but_not_oneself():
    prompt = list(range(10, 20))
    family = HintTexts(prompt, [1, 2, 3])
    first, second = family.join(), family.join()
    family.extend(first, [7, 8])
    (_, predicted), (_, sibling) = family.hints(second)
    assert [source for source, _ in family.hints(second)] == [Source.PREDICTION, Source.INPUT]
    assert predicted.text[:-1] == [*prompt[-LONGEST_INPUT:], 1, 2, 3]
    assert sibling.text[:-1] == [*prompt[-LONGEST_INPUT:], 7, 8]
    assert [index.text[-2] for _, index in family.hints(first)] == [3, prompt[-1]]
    length, places = predicted.matches_of(prompt[-LONGEST_INPUT:], 5)[0]
    assert (length, [predicted.text[place] for place in places]) == (LONGEST_INPUT, [1])  # the answer's beginning


def test_of_many_siblings_those_that_wrote_last_are_searched():
    family = HintTexts([7])
    numbers = [family.join() for _ in range(3 * MOST_SIBLINGS)]
    for number in numbers:
        family.extend(number, [number])
    family.extend(0, [0])
    last = [0, *numbers[-MOST_SIBLINGS:-1]]
    assert [index.text[1] for _, index in family.hints(numbers[-1])] == last
    family.extend(numbers[-1], [8])
    assert [index.text[1] for _, index in family.hints(0)] == numbers[-MOST_SIBLINGS:]


def test_a_prediction_is_no_longer_than_the_context(plain):
    """Neither is more of it split into tokens than could be so many."""
    split, vocab = [], plain.target.vocab
    encode = vocab.encode

    def counted(text, **options):
        split.append(len(text))
        return encode(text, **options)

    vocab.encode = counted
    try:
        family = plain.hint_texts([1, 2, 3], "many words " * 100_000)
    finally:
        vocab.encode = encode
    assert family.prediction_length == 300
    assert max(split) <= 300 * CHARACTERS
    assert family == plain.hint_texts([1, 2, 3], "many words " * 200)
    assert family != plain.hint_texts([1, 2, 3], "other words " * 200)
    assert family != plain.hint_texts([1, 2, 4], "many words " * 200)


@pytest.mark.parametrize("kind", ["sssd", "auto", "none"])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_prediction_saves_passes_and_changes_no_text(plain, kind, temperature):
    vocab = plain.target.vocab
    half = {i: -1000.0 for i in range(vocab.size) if not vocab.token_bytes(i).isascii()}  # characters are no texts
    asked = {"max_tokens": 40, "temperature": temperature, "seed": 4, "logit_bias": half}
    expected = plain.generate(PROMPT, **asked)
    assert vocab.encode(expected.text, add_bos=False, parse_special=False) == expected.token_ids
    with opened(kind, slots=1) as model:
        without = model.generate(PROMPT, **asked)
        right = model.generate(PROMPT, prediction=expected.text, **asked)
        wrong = model.generate(PROMPT, prediction="something else " * 9, **asked)
        assert right.token_ids == wrong.token_ids == without.token_ids == expected.token_ids
        if kind == "sssd":
            assert right.stats.passes < without.stats.passes
            assert right.stats.tokens_by_source["prediction"] > 20
        assert wrong.stats.tokens_by_source["prediction"] <= 5


def test_branches_are_the_texts_of_their_seeds_and_share_passes(plain):
    asked = {"max_tokens": 25, "temperature": 0.9}
    with opened() as model:
        found = model.branch(PROMPT, 3, seed=5, **asked)
        assert [text.token_ids for text in found] == [
            plain.generate(PROMPT, seed=seed, **asked).token_ids for seed in (5, 6, 7)
        ]
        counts = model.scheduler.counts
        assert counts.works > 1.5 * counts.passes
        read = sum(text.stats.prompt_tokens - text.stats.cached_tokens for text in found)
        assert read == found[0].stats.prompt_tokens  # once
        assert [text.finish_reason for text in found] == ["length"] * 3
        again = model.branch(PROMPT + found[1].text, 2, seed=5, **asked)
        assert again[0].stats.cached_tokens >= found[0].stats.prompt_tokens
        more = model.branch(PROMPT, 6, seed=5, **asked)  # more than have a place
        assert [text.token_ids for text in more[:3]] == [text.token_ids for text in found]
        with pytest.raises(UsageError, match="k is 0"):
            model.branch(PROMPT, 0)


def test_equal_siblings_that_come_later_are_guessed_from_the_first(plain):
    """Greedy branches are all alike: with one place, the second copies the first."""
    with opened(slots=1) as model:
        first, second = model.branch(PROMPT, 2, max_tokens=40)
        assert first.token_ids == second.token_ids == plain.generate(PROMPT, max_tokens=40).token_ids
        assert second.stats.passes < first.stats.passes
        assert second.stats.passes <= 40 / 8 + 2
