"""Published rules of copying: which draft tokens they propose, and that they change no text."""

from itertools import pairwise

import pytest
from edgespec.backends.reference.backend import ReferenceBackend, random_model
from number_texts import NumberVocab, text_of
from test_sssd import context

from benchmarks.copying import SOURCES, FirstMatch, Pia, Rest, growing, planner_of
from edgespec.errors import UsageError
from edgespec.loop.draft_passes import run_one
from edgespec.loop.generate import Generation
from edgespec.loop.sampling import SamplingParams
from edgespec.loop.stats import GenerationStats
from edgespec.planners.none import NonePlanner


def proposed(planner, token_ids, budget=64, max_depth=1000):
    """Paths to the nodes, in the order of the nodes."""
    tree = run_one(planner.propose(context(token_ids, max_depth), budget)).tree
    paths = [()]
    for token, parent in zip(tree.token_ids[1:].tolist(), tree.parents[1:].tolist(), strict=True):
        paths.append((*paths[parent], token))
    return paths[1:]


def chain(tokens):
    return [tuple(tokens[:end]) for end in range(1, len(tokens) + 1)]


def test_prompt_lookup_copies_ten_tokens_after_the_first_place_of_the_longest_run():
    planner, first, second = FirstMatch(), list(range(100, 110)), list(range(200, 210))
    assert proposed(planner, [1, 2, 3, *first, 1, 2, 3, *second, 1, 2, 3]) == chain(first)
    assert proposed(planner, [2, 3, *first, 1, 2, 3, *second, 1, 2, 3]) == chain(second)
    assert proposed(planner, [9, 3, *first, 7, 3]) == chain(first)
    assert proposed(planner, [1, 2, 3, *first[:9], 1, 2, 3]) == chain([*first[:9], 1]), "all ten are earlier tokens"
    assert proposed(planner, [1, 2, 3, *first[:5], 1, 2, 3]) == []
    assert proposed(planner, [1, 2, 3, *first, 1, 2, 3], budget=4) == chain(first[:4])
    assert proposed(planner, [1, 2, 3, *first, 1, 2, 3], max_depth=2) == chain(first[:2])


def test_rest_takes_the_most_frequent_paths_after_the_longest_suffix(store):
    planner = Rest(store([1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [1, 2, 3, 7], [8, 2, 3, 9], [2, 3, 9]))
    assert proposed(planner, [1, 2, 3]) == [(4,), (4, 5), (4, 6), (7,)]
    assert proposed(planner, [1, 2, 3], budget=2) == [(4,), (4, 5)]
    assert proposed(planner, [5, 2, 3], budget=2) == [(4,), (9,)], "a suffix that is not there is cut at its front"
    assert proposed(planner, [5, 3]) == [], "a suffix has at least two tokens"
    assert proposed(planner, [1, 2, 3], max_depth=1) == [(4,), (7,)]


def test_the_datastore_without_the_input(store):
    token_ids, datastore = [1, 2, 3, 1, 2], store([1, 2, 9])
    planners = {source: planner_of(source, datastore) for source in ("text", "datastore", "both")}
    for planner in planners.values():
        planner.begin(token_ids)
    assert proposed(planners["datastore"], token_ids) == [(9,)]
    assert {(9,), (3,)} <= set(proposed(planners["both"], token_ids))
    assert (3,) in proposed(planners["text"], token_ids)
    assert (9,) not in proposed(planners["text"], token_ids)


def test_pia_copies_from_the_prompt_first_and_from_answers_to_other_prompts():
    planner = Pia()
    planner.begin([50, 51])
    planner.observe([1, 2, 7, 8, 9], 0.0)
    prompt = [1, 2, 3, 4, 60, 1, 2]
    planner.begin(prompt)
    assert proposed(planner, prompt, budget=3) == [(7,), (3,), (3, 4)], "half of a full tree is of answers"
    assert set(proposed(planner, prompt)) == set(chain([3, 4, 60, 1, 2]) + chain([7, 8, 9]))
    planner.observe([61, 2], 0.0)
    last = proposed(planner, [*prompt, 61, 2])
    assert set(last) == set(chain([3, 4, 60, 1, 2]) + chain([7, 8, 9])), "one token matches where two do not"


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("source", SOURCES)
def test_texts_are_those_of_plain_decoding(source, temperature, store):
    target = ReferenceBackend(random_model(2, vocab_size=24, sharpness=6.0), context_length=200)
    planner = planner_of(source, store(*([(7 * n + k) % 24 for n in range(200)] for k in range(24))))

    def written(planner, seed):
        session, stats = target.open(), GenerationStats()
        sampling = SamplingParams(temperature=temperature, seed=seed)
        rounds = Generation(
            target, session, planner, [3, 4, 3, 4], sampling, max_tokens=60, budget=8, stats=stats
        ).steps()
        tokens = [token for one in rounds for token in one.tokens]
        session.close()
        return tokens, stats.passes

    for seed in range(3):
        (tokens, passes), (plain, _) = written(planner, seed), written(NonePlanner(), seed)
        assert tokens == plain
        assert passes <= len(plain)


def test_a_source_that_is_not_there_or_lacks_its_datastore_is_named():
    with pytest.raises(UsageError, match="there is no source 'rust'; did you mean rest"):
        planner_of("rust", None)
    with pytest.raises(UsageError, match="source rest needs a datastore"):
        planner_of("rest", None)


def test_datastores_grow_to_all_documents_in_an_order_of_their_own(tmp_path):
    texts = [text_of([n] * 9) for n in range(50)]
    found = [
        (store.header.tokens, store.header.documents, [store.find([n])[0] < store.find([n])[1] for n in range(50)])
        for store in growing(tmp_path / "store", [*texts[::-1], texts[3]], NumberVocab(), [1, 95, 96, 100])
    ]
    assert [(tokens, documents) for tokens, documents, _ in found] == [(10, 1), (100, 10), (500, 50)]
    for (_, _, small), (_, _, big) in pairwise(found):
        assert all(a <= b for a, b in zip(small, big, strict=True)), "a larger one has the documents of a smaller one"
    again = next(growing(tmp_path / "again", texts, NumberVocab(), [100]))
    tenth = [n for n in range(50) if again.find([n])[0] < again.find([n])[1]]
    assert tenth == [n for n, there in enumerate(found[1][2]) if there]
    assert tenth != sorted(range(50), key=lambda n: texts[n])[:10], "they are a sample, not the first by name"
