"""`scale`: a draft writes, the target writes again what surprises it most, and a vote chooses."""

import itertools
import math
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from threading import Event, Thread
from time import sleep

import numpy as np
import pytest
from alone import before_passes
from reference.backend import ReferenceBackend, perturbed, random_model

import edgespec
from edgespec.errors import Closed, ContextFull, UsageError, VocabMismatch
from edgespec.lab import scale, scaling
from edgespec.loading.by_name import load_backend
from edgespec.loop.backend import Work
from edgespec.loop.sampling import log_sum_exp
from edgespec.loop.shapes import BatchInvariance, RowClass
from edgespec.measure.lossless import plain_logits
from edgespec.model import Model
from edgespec.planners.sssd import SssdPlanner
from edgespec.scheduler.requests import PassCounter

TARGET = random_model(5, vocab_size=60, layers=1)
DRAFT = perturbed(TARGET, 0.6, 6)
PROMPT = "the quick brown fox jumps over"
ASKED = {"max_tokens": 24, "temperature": 1.0, "seed": 3}
NO_END = {"logit_bias": {0: -1e9, 1: -1e9}}


def loaded(model, sessions=4, context=160, exact=None, **limits):
    backend = ReferenceBackend(model, context_length=context, sessions=sessions, **limits)
    if exact:
        backend.keep_to(exact)
    return Model(backend, [SssdPlanner(depth=4) for _ in range(sessions)], budget=6)


@pytest.fixture
def pair():
    with loaded(TARGET) as target, loaded(DRAFT) as draft:
        yield target, draft


def texts(results):
    return [one.text for one in results]


def loss(model, before, scored):
    """Sum of -log p of the scored tokens under the model, with a pass for each token."""
    backend, token_ids, found = ReferenceBackend(model), [*before, *scored], 0.0
    session = backend.open()
    for at, token in enumerate(token_ids[:-1]):
        [logits] = backend.forward([Work(session, np.array([token]), np.array([-1]), np.array([0]))])
        session.commit([0])
        if at + 1 >= len(before):
            found += log_sum_exp(logits.row(0)) - float(logits.row(0)[token_ids[at + 1]])
    return found


# The ends


ALWAYS = 0.5  # where all chunks are rejected


@pytest.mark.parametrize(
    "reject", [1e-9, *(pytest.param(one, marks=pytest.mark.exhaustive) for one in (0, 1, None, ALWAYS))]
)
def test_the_ends_are_the_texts_of_the_draft_and_of_the_target(pair, reject, monkeypatch):
    """Nothing is scored where one of the two writes all; of chunks, none is rejected, or each."""
    target, draft = pair
    writer, in_chunks = draft if reject in (0, 1e-9) else target, reject in (1e-9, ALWAYS)
    if reject == ALWAYS:
        monkeypatch.setattr(scaling.Calibration, "p_values", lambda self, found: [0.0] * len(found))
    given = {} if reject is None else {"reject": reject}
    result = scale(
        target, None if reject is None else draft, PROMPT, samples=3, chunk=7, answer="[a-m]", **given, **ASKED
    )
    assert [one.token_ids for one in result.samples] == [one.token_ids for one in writer.branch(PROMPT, 3, **ASKED)]
    assert (result.chunks > 0) == in_chunks
    assert result.rejected == (reject == ALWAYS)
    assert (result.passes == 0) == (reject == 0)
    assert {one.stats.approximate for one in result.samples} == {f"scale reject {1 if reject is None else reject:g}"}
    source = "draft" if writer is draft else "target"
    assert not in_chunks or all(one.stats.tokens_by_source[source] == one.stats.tokens for one in result.samples)


@pytest.mark.exhaustive
@pytest.mark.parametrize("reject", [0, 1e-9])
def test_the_draft_reads_the_prompt_as_the_target_writes_it(pair, reject, monkeypatch):
    """Also where its own chat template is another."""
    target, draft = pair
    target.target.vocab.chat_template = "{{ messages[0].content }}"
    draft.target.vocab.chat_template = "x y {{ messages[0].content }}"
    seen, inner = set(), draft.scheduler.submit

    def submit(request, *arguments, **options):
        seen.add(tuple(request.prompt_ids[:4]))
        return inner(request, *arguments, **options)

    monkeypatch.setattr(draft.scheduler, "submit", submit)
    scale(target, draft, [{"role": "user", "content": PROMPT}], samples=2, reject=reject, chunk=8, **ASKED)
    asked = target.request([{"role": "user", "content": PROMPT}]).prompt_ids
    assert seen == {tuple(asked[:4])}


# Scores and p-values


EXACT = BatchInvariance("narrow", RowClass(1, 4), RowClass(6, 12))  # prompts are padded, and not mixed with trees
SHORT = BatchInvariance("narrow", RowClass(1, 4), RowClass(64, 128), RowClass(4, 63))
LIMITS = {
    "all at once": {}, "short passes": {"max_nodes": 9}, "few cells": {"cells": 60}, "row classes": {"exact": EXACT},
    "recurrent": {"model": random_model(5, vocab_size=60, recurrent=True)},
    "short texts apart": {"exact": SHORT, "max_nodes": 128},
}  # fmt: skip


@pytest.mark.parametrize("limits", LIMITS)
def test_a_score_is_the_perplexity_of_the_chunk_alone(limits):
    limits = {"model": TARGET, "sessions": 3} | LIMITS[limits]
    with loaded(**limits) as target:
        prompt, generator = target.encode(PROMPT), np.random.default_rng(1)
        sizes = [(0, 9), (5, 12), (20, 1), (3, 8)]
        parts = [[generator.integers(2, 60, size).tolist() for size in both] for both in sizes]
        parts = [([*prompt, *before], scored) for before, scored in parts]
        expected = [math.exp(loss(limits["model"], *part) / len(part[1])) for part in parts]
        for _ in range(2):  # the second time sessions hold the texts
            found = scaling.perplexities(target.scheduler, prompt, parts, PassCounter())
            assert found == pytest.approx(expected, rel=1e-5)
        with loaded(limits["model"]) as other:
            assert target.generate(PROMPT, **ASKED).text == other.generate(PROMPT, **ASKED).text


@pytest.mark.exhaustive
def test_chunks_of_all_texts_are_scored_in_shared_passes():
    with loaded(TARGET, sessions=8, context=300, max_nodes=128) as target:
        prompt = target.encode(PROMPT)
        scaling.perplexities(target.scheduler, prompt, [(prompt, [5, 6])], PassCounter())
        counter = PassCounter()
        scaling.perplexities(target.scheduler, prompt, [(prompt, [number] * 12) for number in range(2, 10)], counter)
        assert counter.passes == 1


def test_p_values_by_hand():
    scores = scaling.Calibration(64)
    assert scores.p_values([4.0, 1.0, 3.0, 2.0]) == [1 / 4, 1.0, 2 / 4, 3 / 4]
    assert scores.p_values([3.0, 0.5]) == [3 / 6, 1.0]  # 4.0 and another 3.0 are as high
    assert scores.p_values([9.0]) == [1 / 7]


def test_the_window_slides_and_holds_the_whole_round():
    scores = scaling.Calibration(3, [9.0, 9.0, 9.0])
    assert scores.p_values([1.0, 2.0]) == [1.0, 2 / 3]
    assert scores.scores == [9.0, 1.0, 2.0]
    assert scores.p_values([5.0, 6.0, 7.0, 8.0]) == [1.0, 3 / 4, 2 / 4, 1 / 4]
    assert scores.scores == [5.0, 6.0, 7.0, 8.0]


@pytest.mark.parametrize("reject", [0.2, 0.4, 0.6])
def test_about_the_wanted_share_is_rejected(reject):
    """Also where later chunks of a text are less surprising, problems differ, and the last rounds are short."""
    scores, generator, found = scaling.Calibration(64), np.random.default_rng(7), []
    for _ in range(100):
        hard = generator.normal(1, 0.1)
        for chunk, count in enumerate((8, 8, 5, 1)):
            found += scores.p_values((hard * (1.4 - 0.1 * chunk) * generator.lognormal(0, 0.2, count)).tolist())
    assert abs(np.mean([p_value <= reject for p_value in found]) - reject) < 0.05


@pytest.mark.exhaustive
def test_the_share_of_a_run_is_that_of_its_p_values(pair):
    options, known, chunks, rejected = {"samples": 5, "chunk": 6, "answer": "x", **NO_END}, (), 0, 0.0
    for seed in range(0, 15, 5):
        result = scale(*pair, PROMPT, calibration=known, reject=0.4, **ASKED | options | {"seed": seed})
        known, chunks, rejected = result.calibration, chunks + result.chunks, rejected + result.rejected * result.chunks
    assert chunks == len(known) == 3 * 5 * 4
    assert abs(rejected / chunks - 0.4) < 0.05
    assert all(score > 1 for score in known)


# The texts


@pytest.mark.exhaustive
def test_the_target_goes_on_where_a_chunk_was_rejected(pair, monkeypatch):
    """Its chunk follows the chunks that were kept, and no rejected one is left in the text."""
    target, draft = pair
    rounds, options = iter([[1.0], [0.0], [1.0], [0.0]]), ASKED | NO_END
    monkeypatch.setattr(scaling.Calibration, "p_values", lambda self, found: next(rounds))
    result = scale(target, draft, PROMPT, samples=1, chunk=6, reject=0.5, answer="[a-m]", **options)
    text, ids = PROMPT, target.encode(PROMPT)
    for writer in (draft, target, draft, target):
        part = writer.generate(text, **options | {"max_tokens": 6})
        text, ids = text + part.text, ids + part.token_ids
    assert result.token_ids == ids[len(target.encode(PROMPT)) :]
    assert result.text == text.removeprefix(PROMPT)
    assert result.stats.tokens_by_source["target"] == 12
    assert (result.chunks, result.rejected) == (4, 2 / 4)


@pytest.mark.exhaustive
def test_the_same_seed_gives_the_same_result_whatever_ran_before(pair):
    def found(*models, **changes):
        result = scale(*models, PROMPT, samples=5, chunk=6, answer="[a-m]", **ASKED | changes)
        return texts(result.samples), result.votes, result.rejected, result.calibration

    first = found(*pair)
    assert found(*pair, seed=4) != first
    assert found(*pair) == first
    with loaded(TARGET, sessions=2) as target, loaded(DRAFT, sessions=1) as draft:
        assert found(target, draft) == first


@pytest.mark.exhaustive
def test_texts_end_where_a_context_is_full():
    with loaded(TARGET, context=64) as target, loaded(DRAFT, context=48) as draft:
        for reject in (0, 0.5):
            result = scale(
                target, draft, PROMPT, samples=3, chunk=9, reject=reject, answer="x", max_tokens=None, seed=0
            )
            length = len(target.encode(PROMPT))
            assert all(length + len(one.token_ids) == 48 or one.finish_reason == "stop" for one in result.samples)
            assert any(length + len(one.token_ids) == 48 for one in result.samples)


@pytest.mark.exhaustive
def test_progress_grows_to_the_end(pair):
    seen = []
    options = {"samples": 3, "chunk": 8, "answer": "x", "progress": lambda *far: seen.append(far), **ASKED}
    scale(*pair, PROMPT, **options, **NO_END)
    assert seen == [(24, 72), (48, 72), (72, 72)]
    scale(pair[0], None, PROMPT, **options)
    assert seen[3:] == [(72, 72)]


@pytest.mark.exhaustive
@pytest.mark.parametrize("reject", [1e-9, 0.6])
def test_a_text_counts_the_passes_for_scores(pair, reject):
    options = {"samples": 3, "chunk": 8, "reject": reject, "answer": "x", **ASKED, **NO_END}
    result = scale(*pair, PROMPT, **options)
    for stats in [one.stats for one in result.samples]:
        assert 0 < stats.passes <= result.passes
        assert stats.passes == result.passes or reject == 0.6  # all texts share them if the target writes none
        assert 0 < stats.target_seconds < stats.seconds
        assert (stats.planner, stats.exact) == ("sssd", "")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("reject", "words"),
    [
        (0, "cascade 0.5, scale reject 0"), (0.4, "sparse attention 0.9, cascade 0.5, scale reject 0.4"),
        (1, "sparse attention 0.9, scale reject 1"), (None, "sparse attention 0.9, scale reject 1"),
    ],
)  # fmt: skip
def test_words_name_what_changes_the_models_that_write(pair, reject, words):
    for model, about in zip(pair, ("sparse attention 0.9", "cascade 0.5"), strict=True):
        model.target.capabilities = replace(model.target.capabilities, approximate=about)
    target, draft = pair
    given = {"draft": None} if reject is None else {"draft": draft, "reject": reject}
    result = scale(target, prompt=PROMPT, samples=2, chunk=8, answer="x", **given, **ASKED)
    assert {one.stats.approximate for one in result.samples} == {words}
    draft.target.capabilities = replace(draft.target.capabilities, approximate="sparse attention 0.9")
    result = scale(target, prompt=PROMPT, samples=2, chunk=8, answer="x", **given, **ASKED)
    assert result.stats.approximate.count("sparse attention 0.9") == 1


@pytest.mark.exhaustive
@pytest.mark.parametrize("reject", [0, 0.5, 1])
def test_passes_of_other_requests_do_not_count(pair, reject):
    counts, others = pair[0].scheduler.counts, 0

    def ask(done, total):
        nonlocal others
        before = counts.passes
        pair[0].generate("a lazy dog", max_tokens=9, **NO_END)
        others += counts.passes - before

    options = {"samples": 3, "chunk": 8, "reject": reject, "progress": ask, **ASKED}
    result = scale(*pair, PROMPT, **options)
    assert others > 0
    assert result.passes == counts.passes - others


# The choice


def test_the_answer_of_most_texts_wins(pair):
    expected = texts(pair[0].branch(PROMPT, 8, **ASKED))
    answers = [[None, *re.findall("([N-P])[a-z]?", text)][-1] for text in expected]
    result = scale(pair[0], None, PROMPT, samples=8, answer="([N-P])[a-z]?", **ASKED)
    assert result.answers == answers
    given = [answer for answer in answers if answer]
    assert result.votes == {answer: given.count(answer) for answer in given}
    assert len(result.votes) > 1
    assert list(result.votes.values()) == sorted(result.votes.values(), reverse=True)
    winner = max(given, key=given.count)
    assert result.text == expected[answers.index(winner)]
    assert str(result.votes) in repr(result)


@pytest.mark.exhaustive
def test_a_text_without_an_answer_has_no_vote(pair):
    found = iter([None, "a", None, "b", None])
    result = scale(pair[0], None, PROMPT, samples=5, answer=lambda text: next(found), **ASKED)
    assert result.votes == {"a": 1, "b": 1}
    assert result.text == result.samples[1].text
    nothing = scale(pair[0], None, PROMPT, samples=3, answer="ZZZ", **ASKED)
    assert (nothing.votes, nothing.text) == ({}, nothing.samples[0].text)


@pytest.mark.exhaustive
def test_a_score_decides_between_equal_votes_and_chooses_the_best_of_n(pair):
    def counts(texts):
        return [text.count("e") for text in texts]

    found = iter(["a", "b", "b", "a", "c"])
    result = scale(pair[0], None, PROMPT, samples=5, answer=lambda text: next(found), score=counts, **ASKED)
    assert result.text == max(texts(result.samples[:4]), key=lambda text: text.count("e"))
    result = scale(pair[0], None, PROMPT, samples=5, score=lambda texts: [-len(text) for text in texts], **ASKED)
    assert result.text == min(texts(result.samples), key=len)


@pytest.mark.exhaustive
@pytest.mark.parametrize("reject", [0, 0.5, 1])
def test_without_answer_and_score_the_text_with_the_lowest_perplexity_wins(pair, reject):
    result = scale(*pair, PROMPT, samples=4, chunk=9, reject=reject, **ASKED)
    prompt = pair[0].encode(PROMPT)
    best = min(result.samples, key=lambda one: loss(TARGET, prompt, one.token_ids) / len(one.token_ids))
    assert result.token_ids == best.token_ids
    assert result.passes > 0


# Mistakes


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"target": "big.gguf"}, "target is 'big.gguf', but must be a model of edgespec.load"),
        ({"draft": ""}, "draft is '', but must be a model of edgespec.load"),
        ({"samples": 0}, "samples is 0, but must be from 1 to 1024"),
        ({"chunk": 1.5}, "chunk is 1.5, but must be a whole number, at least 1"),
        ({"reject": 1.2}, "reject is 1.2, but must be from 0 to 1"),
        ({"reject": math.nan}, "reject is nan, but must be from 0 to 1"),
        ({"answer": "("}, "answer is '(', but must be a regular expression: missing ), unterminated subpattern"),
        ({"answer": 5}, "answer is 5, but must be a text"),
        ({"answer": lambda text: [text]}, "an answer is ["),
        ({"score": 5}, "score is 5, but must be a function"),
        ({"score": lambda texts: [math.nan for _ in texts]}, "a score is nan, but must be a number"),
        ({"score": lambda texts: 1}, "what score returns is 1, but must be a list of "),
        ({"window": 0}, "window is 0, but must be at least 1"),
        ({"calibration": 5}, "calibration is 5, but must be a list of scores"),
        ({"calibration": [1.5, "x"]}, "a score in calibration is 'x', but must be a number, above 0"),
        ({"progress": 1}, "progress is 1, but must be a function"),
        ({"max_tokens": 0}, "max_tokens is 0, but must be at least 1"),
        ({"temperature": -1}, "temperature is -1, but must be at least 0"),
        ({"stop": "a"}, "there is no argument 'stop'; "),
        ({"rejects": 0.5}, "there is no argument 'rejects'; did you mean reject"),
        ({"presence_penalty": 1.0}, "presence_penalty and frequency_penalty would count in one chunk only"),
        ({"prompt": ""}, "the prompt is empty"),
    ],
)
def test_a_mistake_is_one_line(pair, arguments, says):
    given = {"target": pair[0], "draft": pair[1], "prompt": PROMPT, "samples": 2, "chunk": 4, **ASKED, "max_tokens": 8}
    with pytest.raises(UsageError) as caught:
        scale(**given | arguments)
    assert str(caught.value).startswith(says)
    assert len(str(caught.value).splitlines()) == 1
    assert scale(**given).text  # nothing is left behind


def test_a_draft_of_another_vocabulary_is_refused(pair):
    with loaded(random_model(1, vocab_size=1200)) as other, pytest.raises(VocabMismatch):
        scale(pair[0], other, PROMPT)


@pytest.mark.exhaustive
def test_a_target_whose_prompts_share_no_pass_is_refused_before_anything_is_written(pair):
    blocks = replace(EXACT, blocks=True)
    with loaded(TARGET, exact=blocks) as target:
        for options in ({}, {"answer": "x"}, {"reject": 1}, {"reject": 0}):
            with pytest.raises(UsageError, match='load it with exact="off"'):
                scale(target, pair[1], PROMPT, samples=2, **ASKED | options)
        assert target.scheduler.counts.passes == pair[1].scheduler.counts.passes == 0
        for options in ({"reject": 1}, {"reject": 0}):
            assert scale(target, pair[1], PROMPT, samples=2, answer="x", **ASKED | options).text


@pytest.mark.exhaustive
def test_closed_models_and_prompts_without_room_are_refused(pair):
    with loaded(DRAFT, context=16) as short, pytest.raises(ContextFull):
        scale(pair[0], short, PROMPT)
    for closed in pair:
        closed.close()
        with pytest.raises(Closed):
            scale(*pair, PROMPT)


# Beside other requests


def streams_begun(target, count, tokens=30):
    found = [target.stream(PROMPT, max_tokens=tokens, seed=seed, **NO_END) for seed in range(count)]
    for stream in found:
        next(stream)
    return found


@pytest.mark.exhaustive
@pytest.mark.parametrize("sessions", [1, 4])
@pytest.mark.parametrize("in_thread", [False, True])
def test_scores_wait_for_requests_that_hold_all_sessions(sessions, in_thread):
    options = {"samples": 2, "chunk": 8, "answer": "x", **ASKED}
    with loaded(TARGET, sessions) as target, loaded(DRAFT) as draft:
        expected = texts(scale(target, draft, PROMPT, **options).samples)
        alone = [target.generate(PROMPT, max_tokens=30, seed=seed, **NO_END).token_ids for seed in range(sessions)]
        streams = streams_begun(target, sessions)
        if in_thread:
            target.scheduler.start()
        assert texts(scale(target, draft, PROMPT, **options).samples) == expected
        assert [[chunk.token_id for chunk in stream] for stream in streams] == [one[1:] for one in alone]


@pytest.mark.exhaustive
def test_scores_wait_for_cells():
    text = ([5, 6, 7], [8] * 45)
    with loaded(TARGET, cells=100, max_nodes=32) as target:
        alone = scaling.perplexities(target.scheduler, [5, 6], [text], PassCounter())
        [stream] = streams_begun(target, 1, tokens=60)
        for _ in range(40):
            next(stream)
        assert scaling.perplexities(target.scheduler, [5, 6], [text, text], PassCounter()) == pytest.approx(alone * 2)
        assert len(list(stream)) == 19
        with pytest.raises(ContextFull):
            scaling.perplexities(target.scheduler, [5, 6], [([5, 6, 7], [8] * 150)], PassCounter())


@pytest.mark.exhaustive
def test_a_new_prompt_finds_room_beside_old_texts():
    """The other sessions of a group still hold theirs when it is read."""
    old, prompt = [([7], [3, 4]), ([9], [8] * 85)], list(range(2, 42))
    new = [(prompt, [number] * 5) for number in (8, 9)]
    with loaded(TARGET, sessions=2, cells=100, max_nodes=16) as target:
        expected = scaling.perplexities(target.scheduler, prompt, new, PassCounter())
        target.scheduler.forget()
        scaling.perplexities(target.scheduler, [], old, PassCounter())
        assert sorted(len(slot.session.token_ids) for slot in target.scheduler.pool.slots) == [3, 86]
        assert scaling.perplexities(target.scheduler, prompt, new, PassCounter()) == pytest.approx(expected)


@pytest.mark.exhaustive
def test_texts_of_many_threads_share_few_sessions(pair):
    before_passes(pair[0].target, lambda batch: sleep(0.002))  # meanwhile other threads ask

    def found(seed):
        options = {"samples": 4, "chunk": 6, "reject": 0.6, "answer": "[a-m]", **ASKED}
        return texts(scale(*pair, PROMPT, **options | {"seed": seed}).samples)

    expected = [found(seed) for seed in range(6)]
    with ThreadPoolExecutor(6) as threads:
        assert list(threads.map(found, range(6))) == expected
    assert not pair[0].scheduler.active


def ctrl_c(model, before_pass):
    numbers = itertools.count(1)
    before_passes(
        model.target,
        lambda batch: signal.raise_signal(signal.SIGINT) if next(numbers) == before_pass else None,
    )  # the caller's thread gets it


@pytest.mark.exhaustive
def test_ctrl_c_and_close_end_the_wait(pair):
    target = pair[0]
    prompt, forward = target.encode(PROMPT), target.target.forward
    expected = [target.generate(PROMPT, max_tokens=30, seed=seed, **NO_END).token_ids for seed in range(4)]
    streams = streams_begun(target, 4)
    ctrl_c(target, before_pass=1)
    with pytest.raises(KeyboardInterrupt):
        scaling.perplexities(target.scheduler, prompt, [(prompt, [5] * 9)], PassCounter())
    target.target.forward = forward
    assert target.scheduler.waiting == 0
    assert [[chunk.token_id for chunk in stream] for stream in streams] == [one[1:] for one in expected]

    streams, reached, closed = streams_begun(target, 4), Event(), Event()
    before_passes(target.target, lambda batch: (reached.set(), closed.wait(60)))
    with ThreadPoolExecutor(2) as threads:
        scored = threads.submit(scaling.perplexities, target.scheduler, prompt, [(prompt, [5] * 9)], PassCounter())
        assert reached.wait(60)
        closing = threads.submit(target.close)
        while not target.scheduler._queue.closed:
            sleep(0.001)
        closed.set()
        with pytest.raises(Closed):
            scored.result(60)
        closing.result(60)


@pytest.mark.exhaustive
def test_a_score_leaves_other_requests_their_cells():
    texts = [([5, 6, 7], [number] * 25) for number in (8, 9, 10)]
    with loaded(TARGET, cells=100) as target:
        alone = scaling.perplexities(target.scheduler, [5, 6], texts, PassCounter())
        stream = target.stream(PROMPT, max_tokens=90, seed=1, **NO_END)
        for _ in range(40):
            next(stream)
        assert scaling.perplexities(target.scheduler, [5, 6], texts, PassCounter()) == pytest.approx(alone)
        stream.close()


@pytest.mark.exhaustive
def test_an_interrupted_score_leaves_the_model_usable(pair):
    target, draft = pair
    expected = scale(target, draft, PROMPT, samples=3, chunk=8, answer="x", **ASKED)
    prompt = target.encode(PROMPT)
    ctrl_c(target, before_pass=2)
    with pytest.raises(KeyboardInterrupt):
        scaling.perplexities(target.scheduler, prompt, [(prompt, [5] * 90), (prompt, [6] * 90)], PassCounter())
    again = scale(target, draft, PROMPT, samples=3, chunk=8, answer="x", **ASKED)
    assert texts(again.samples) == texts(expected.samples)


@pytest.mark.exhaustive
def test_close_interrupts_a_scoring_pass(pair, monkeypatch):
    target, asked = pair[0], Event()
    backend, prompt = target.target, target.encode(PROMPT)
    interrupt, closing = backend.interrupt, Thread(target=target.close)
    before_passes(backend, lambda batch: (closing.start(), asked.wait(60)))
    monkeypatch.setattr(backend, "interrupt", lambda number: (interrupt(number), asked.set()))
    with pytest.raises(Closed):
        scaling.perplexities(target.scheduler, prompt, [(prompt, [5] * 9)], PassCounter())
    closing.join(60)
    assert not closing.is_alive()


@pytest.mark.exhaustive
def test_the_end_of_another_request_interrupts_no_scoring_pass(pair, monkeypatch):
    backend, prompt, asked = pair[0].target, pair[0].encode(PROMPT), []
    [stream] = streams_begun(pair[0], 1)
    [seq] = pair[0].scheduler.pool.seqs
    before_passes(backend, lambda batch: batch[0].session is seq.slot.session or stream.close())
    monkeypatch.setattr(backend, "interrupt", asked.append)
    scaling.perplexities(pair[0].scheduler, prompt, [(prompt, [5] * 9)], PassCounter())
    assert not asked


# llama.cpp, whose prompts have another row class than its trees


@pytest.mark.exhaustive
@pytest.mark.parametrize("options", [{}, {"exact": "off", "budget": 8}], ids=["row classes", "any shape"])
def test_llama_cpp_scores_as_plain_decoding_does(smollm2_tiny, options):
    shared = {"context_length": 400, "remember": False, "planner": "none", **options}
    with edgespec.load(smollm2_tiny, parallel=3, **shared) as model:
        prompt, generator = model.encode("Once upon a time, there was a fox. " * 9), np.random.default_rng(2)
        sizes = [(0, 100), (40, 30), (9, 5), (150, 80)]
        parts = [[generator.integers(300, 900, size).tolist() for size in both] for both in sizes]
        parts = [([*prompt, *before], scored) for before, scored in parts]
        found = [scaling.perplexities(model.scheduler, prompt, parts, PassCounter()) for _ in range(2)]
    with closing(load_backend("llamacpp", str(smollm2_tiny), context_length=400)) as with_one:
        for before, scored, *each in zip(*zip(*parts, strict=True), *found, strict=True):
            rows = zip(plain_logits(with_one, before, scored), scored, strict=True)
            losses = [log_sum_exp(row) - float(row[token]) for row, token in rows]
            assert np.log(each) == pytest.approx(np.mean(losses), abs=0.1)  # rounding moves losses of 20
