"""From logits to a token: noise, filters, penalties and the distribution that comes out."""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from alone import Generation
from hypothesis import given
from hypothesis import strategies as st
from reference.backend import ReferenceBackend, perturbed, random_model

from edgespec.errors import ModelError, UsageError
from edgespec.loop import sampling
from edgespec.loop.sampling import (
    Noise,
    SamplingParams,
    adjust,
    candidates,
    log_sum_exp,
    sample,
    top_ids,
    top_log_probs,
    top_of_rows,
)
from edgespec.loop.stats import GenerationStats
from edgespec.planners import drafting
from edgespec.planners.specexec import SpecExecPlanner

seeds = st.integers(0, 2**32)


def chi_square(counts, probs):
    """Pearson's statistic; only over tokens that may occur, and the others must not."""
    assert counts[probs == 0].sum() == 0
    expected = counts.sum() * probs[probs > 0]
    return float(((counts[probs > 0] - expected) ** 2 / expected).sum())


def limit(degrees):
    """The 99.99 % quantile of chi-square, by Wilson and Hilferty."""
    return degrees * (1 - 2 / (9 * degrees) + 3.719 * math.sqrt(2 / (9 * degrees))) ** 3


def softmax(values):
    weights = np.exp(values - values.max())
    return weights / weights.sum()


@pytest.mark.parametrize("size", [1, 2, 63, 64, 65, 127, 128, 129, 191, 640, 1000, 4096, 5003])
@pytest.mark.parametrize("levels", [3, 40, 10**6])
def test_top_ids_is_a_stable_sort(size, levels):
    values = np.random.default_rng(size).integers(0, levels, size).astype(np.float32)
    expected = np.argsort(-values, kind="stable")
    for k in sorted({1, 2, 3, size // 128, size // 128 + 1, size // 64, size - 1, size, size + 5} - {0}):
        np.testing.assert_array_equal(top_ids(values, k), expected[:k])


@given(seeds, st.integers(1, 700), st.integers(1, 20))
def test_top_ids_with_banned_tokens(seed, size, k):
    generator = np.random.default_rng(seed)
    values = generator.integers(-3, 3, size).astype(np.float32)
    values[generator.random(size) < 0.5] = -np.inf
    np.testing.assert_array_equal(top_ids(values, k), np.argsort(-values, kind="stable")[:k])


@given(seeds, st.integers(1, 300), st.integers(1, 20))
def test_top_log_probs(seed, size, k):
    values = np.random.default_rng(seed).normal(0, 5, size).astype(np.float32)
    ids, log_probs = top_log_probs(values, k)
    expected = np.log(softmax(values.astype(np.float64)))
    np.testing.assert_allclose(log_probs, expected[ids], atol=1e-5)


def test_log_sum_exp_does_not_overflow():
    assert log_sum_exp(np.array([1e4, 1e4], np.float32)) == pytest.approx(1e4 + math.log(2))
    assert log_sum_exp(np.array([0.0, -np.inf])) == 0


class TestNoise:
    def test_known_values(self):
        """The noise is part of what a seed means: the same text for ever, on every machine."""
        np.testing.assert_allclose(Noise(0, 4).row(0), KNOWN[0, 0], rtol=1e-6)
        np.testing.assert_allclose(Noise(2**64 - 1, 4).row(7), KNOWN[2**64 - 1, 7], rtol=1e-6)

    def test_the_generator_is_philox(self):
        """Random123's published test vector: key and counter all zero, ten rounds of Philox 4 x 64."""
        generator = np.random.Philox(key=np.array([0, 0], np.uint64))
        generator.advance(-1)  # numpy counts before it draws
        assert generator.random_raw(1)[0] == 0x16554D9ECA36314C

    @given(
        st.integers(0, 2**64 - 1), st.integers(0, 10**6), st.lists(st.integers(0, 10**6), min_size=1, max_size=19),
        st.sampled_from([100, 20_003]),
    )  # fmt: skip
    def test_at_is_row(self, seed, position, ids, size):
        at = np.array(ids) % size
        fresh = Noise(seed, size).at(position, at)
        noise = Noise(seed, size)
        np.testing.assert_array_equal(noise.row(position)[at], fresh)
        np.testing.assert_array_equal(noise.at(position, at), fresh)

    @given(st.integers(0, 2**64 - 1), st.integers(0, 10**6), st.integers(1, 50), st.integers(1, 50))
    def test_a_smaller_vocabulary_sees_a_prefix(self, seed, position, small, more):
        large = Noise(seed, small + more).row(position)
        np.testing.assert_array_equal(Noise(seed, small).row(position), large[:small])

    def test_rows_differ_by_seed_and_position(self):
        rows = {Noise(seed, 8).row(position).tobytes() for seed in range(20) for position in range(20)}
        assert len(rows) == 400

    def test_the_order_of_asking_does_not_matter(self):
        first, second = Noise(3, 8), Noise(3, 8)
        ahead = {position: first.row(position).copy() for position in range(300)}
        for position in reversed(range(300)):
            np.testing.assert_array_equal(second.row(position), ahead[position])
            np.testing.assert_array_equal(first.row(position), ahead[position])

    def test_it_is_gumbel(self):
        values = np.concatenate([Noise(1, 1000).row(position) for position in range(40)]).astype(np.float64)
        assert np.isfinite(values).all()
        count = len(values)
        assert abs(values.mean() - np.euler_gamma) < 4 * math.pi / math.sqrt(6 * count)
        uniform = np.sort(np.exp(-np.exp(-values)))
        distance = np.abs(uniform - (np.arange(count) + 0.5) / count).max()
        assert distance < 2.2 / math.sqrt(count)  # Kolmogorov and Smirnov, below 1 in 10,000 by chance


KNOWN = {
    (0, 0): [-1.211884, -1.495452, 0.7110988, -0.3511371],
    (2**64 - 1, 7): [-0.6132746, -0.9523739, 0.3811315, 1.811771],
}

params = st.builds(
    SamplingParams,
    temperature=st.floats(0.3, 2),
    top_k=st.one_of(st.just(0), st.integers(1, 200)),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 0.999)),
    min_p=st.one_of(st.just(0.0), st.floats(0.001, 0.9)),
)


def naive_candidates(logits, chosen):
    """Sort everything, then filter after filter. Also how near a decision was to rounding."""
    ids, margin = np.argsort(-logits, kind="stable"), math.inf
    if chosen.top_k:
        ids = ids[: chosen.top_k]
    if chosen.top_p < 1:
        mass = np.cumsum(softmax(logits[ids].astype(np.float64)))
        margin = min(margin, float(np.abs(mass - chosen.top_p).min()))
        ids = ids[: int((mass < chosen.top_p).sum()) + 1]
    if chosen.min_p:
        relative = softmax(logits.astype(np.float64)) / softmax(logits.astype(np.float64)).max()
        margin = min(margin, float(np.abs(relative[ids] - chosen.min_p).min()))
        ids = ids[relative[ids] >= chosen.min_p]
    return ids, margin


@given(seeds, st.integers(1, 400), st.floats(0.1, 6), params)
def test_candidates_are_the_naive_ones(seed, size, spread, chosen):
    logits = np.random.default_rng(seed).normal(0, spread, size).astype(np.float32)
    expected, margin = naive_candidates(logits, chosen)
    found = candidates(logits, chosen)
    if chosen.top_k == 0 and chosen.top_p == 1 and chosen.min_p == 0:
        assert found is None
    elif margin > 1e-5:  # nearer than that, float32 may round either way
        assert sorted(found.tolist()) == sorted(expected.tolist())


@given(seeds, st.integers(1, 50), params, st.integers(0, 10**6))
def test_sample_is_the_argmax_over_the_candidates(seed, size, chosen, position):
    logits = np.random.default_rng(seed).normal(0, 2, size).astype(np.float32)
    noise = Noise(seed, size)
    kept = candidates(logits, chosen)
    kept = np.arange(size) if kept is None else kept
    values = logits.astype(np.float64) / chosen.temperature + noise.row(position)
    assert sample(logits, position, chosen, noise) == max(kept.tolist(), key=lambda i: values[i])


def by_full_sort(logits, position, chosen, seed):
    """The token by noise of the whole row and a search for all candidates."""
    row, kept = Noise(seed, len(logits)).row(position), candidates(logits, chosen)
    kept = np.arange(len(logits)) if kept is None else kept
    return kept[(logits[kept].astype(np.float64) / chosen.temperature + row[kept]).argmax()]


@given(
    seeds, st.sampled_from([2, 9, 300, 3000, 20_000]), st.sampled_from([0.0, 0.02, 1.0, 4.0]),
    st.sampled_from([2**-20, 0.5, 2.0]), st.sampled_from([2**-20, 0.5]), st.sampled_from([0.0, 0.1]),
    st.builds(
        SamplingParams,
        temperature=st.sampled_from([1e-300, 1e-13, 1e-9, 0.5, 1.0, 6.7, 1e300]),
        top_p=st.sampled_from([1.0, 1e-5, 0.3, 0.5, 0.9, 0.999]),
        min_p=st.sampled_from([0.0, 1e-6, 0.3]),
    ),
)  # fmt: skip
def test_a_seed_has_the_token_of_a_full_sort(seed, size, spread, step, noise_step, banned, chosen):
    """Flat and peaked logits; large steps make ties of logits, of noise and of their sums."""
    generator = np.random.default_rng(seed)
    logits = (np.round(generator.normal(3, spread, size) / step) * step).astype(np.float32)
    logits[generator.random(size) < banned] = -np.inf
    logits[0] = 3

    def stepped(bits, exact=sampling._gumbel):
        return (np.floor(exact(bits) / noise_step) * noise_step).astype("f4")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "_gumbel", stepped)
        for position in range(5):
            drafted = Noise(seed, size)
            drafted.row(position)
            for noise in Noise(seed, size), drafted:
                assert sample(logits, position, chosen, noise) == by_full_sort(logits, position, chosen, seed)


def test_a_seed_has_the_token_of_a_full_sort_where_rounding_decides_what_top_p_keeps():
    logits = np.zeros(300, np.float32)
    for position in range(100):
        rank = int(Noise(1, 300).row(position).argmax())
        for top_p in rank / 300, (rank + 1) / 300:
            if 0 < top_p < 1:
                chosen = SamplingParams(1.0, top_p=top_p)
                assert sample(logits, position, chosen, Noise(1, 300)) == by_full_sort(logits, position, chosen, 1)


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_the_first_token_is_sampled_where_all_are_banned(top_p):
    assert sample(np.full(300, -np.inf, np.float32), 3, SamplingParams(1.0, top_p=top_p), Noise(0, 300)) == 0


@pytest.mark.parametrize("temperature", [0.01, 0.7, 1.0, 5.0])
@pytest.mark.parametrize("peak", [-300.0, 0.0, 30.0])
def test_no_token_that_noise_can_lift_to_the_top_is_left_out(temperature, peak, monkeypatch):
    extremes = np.array([0, 2**32 - 1], np.uint32)  # the least noise for the best token, the most for the other
    monkeypatch.setattr(Noise, "_bits", lambda self, position: extremes)
    for gap, winner in [(25.9, 1), (26.1, 0)]:
        logits = np.array([peak, peak - gap * temperature], np.float32)
        assert sample(logits, 3, SamplingParams(temperature), Noise(0, 2)) == winner


@pytest.mark.parametrize("temperature", [5e-324, 1e-310, 1e-307, 1e-100, 1e-38])
@pytest.mark.parametrize("chosen", [{}, {"min_p": 0.05}, {"top_p": 0.9}, {"top_k": 40, "top_p": 0.9, "min_p": 0.05}])
def test_the_least_temperatures_sample_the_best_token(temperature, chosen):
    logits = np.random.default_rng(0).normal(20, 3, 5000).astype(np.float32)
    params = SamplingParams(temperature, **chosen)
    with np.errstate(all="raise", under="ignore"):
        assert sample(logits, 7, params, Noise(1, len(logits))) == logits.argmax()
        assert sampling.distribution(logits, params).argmax() == logits.argmax()


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.7}, {"temperature": 0.7, "top_p": 0.9}, {"temperature": 1.0, "top_k": 3}]
)
def test_logits_that_are_no_numbers_are_an_error_and_no_text(options):
    """As of a damaged file, or of a GPU's driver."""
    for where in ([7], slice(None)):
        row = np.zeros(50, np.float32)
        row[where] = np.nan
        params = SamplingParams(**options)
        with pytest.raises(ModelError, match="is not a number"):
            sample(row, 5, params, Noise(0, 50))
        with pytest.raises(ModelError, match="is not a number"):
            top_of_rows([row], 3, 1.0, [None])


def test_greedy_ignores_filters_and_noise():
    logits = np.array([0.0, 3.0, 2.9], np.float32)
    for position in range(50):
        assert sample(logits, position, SamplingParams(top_k=2, top_p=0.5, min_p=0.1, seed=5), Noise(5, 3)) == 1


class TestAdjust:
    def test_nothing_asked_nothing_done(self):
        logits = np.zeros(4, np.float32)
        assert adjust(logits, SamplingParams(temperature=1, top_p=0.5), [1], [2]) is logits

    @given(
        seeds,
        st.lists(st.integers(0, 19), max_size=12),
        st.lists(st.integers(0, 19), max_size=12),
        st.floats(0.5, 2),
        st.floats(-2, 2),
        st.floats(-2, 2),
        st.dictionaries(st.integers(0, 30), st.floats(-5, 5, width=32), max_size=5),
    )
    def test_against_the_definition(self, seed, prompt, output, repetition, presence, frequency, bias):
        logits = np.random.default_rng(seed).normal(0, 3, 20).astype(np.float32)
        kept = logits.copy()
        chosen = SamplingParams(
            repetition_penalty=repetition, presence_penalty=presence, frequency_penalty=frequency, logit_bias=bias
        )
        expected = logits.astype(np.float64)
        for token in range(20):
            expected[token] += bias.get(token, 0.0)
            if token in prompt or token in output:
                expected[token] *= 1 / repetition if expected[token] > 0 else repetition
            if token in output:
                expected[token] -= presence + frequency * output.count(token)
        np.testing.assert_allclose(adjust(logits, chosen, prompt, output), expected, rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(logits, kept)

    def test_a_ban_is_never_sampled(self):
        chosen = SamplingParams(temperature=1.5, logit_bias={0: -math.inf, 2: -math.inf})
        logits = np.array([5.0, 0.0, 5.0, 0.0], np.float32)
        drawn = {sample(logits, position, chosen, Noise(0, 4)) for position in range(200)}
        assert drawn == {1, 3}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", math.nan),
        ("min_p", -0.1),
        ("min_p", 1.0),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", math.inf),
        ("presence_penalty", math.nan),
        ("frequency_penalty", -math.inf),
        ("seed", -1),
        ("seed", 2**64),
    ],
)
def test_out_of_range(name, value):
    with pytest.raises(UsageError) as caught:
        SamplingParams(**{name: value})
    assert str(caught.value).startswith(f"{name} is {value}, but must be ")


@pytest.mark.parametrize("bias", [{-1: 0.0}, {3: math.nan}, {3: math.inf}])
def test_bias_out_of_range(bias):
    with pytest.raises(
        UsageError, match=r"^(a token id in logit_bias is -1|logit_bias of 3 is (nan|inf)), but must be "
    ):
        SamplingParams(logit_bias=bias)


@pytest.mark.parametrize(
    "chosen",
    [
        SamplingParams(temperature=1.0, seed=11),
        pytest.param(SamplingParams(temperature=0.5, seed=12), marks=pytest.mark.exhaustive),
        SamplingParams(temperature=1.7, top_k=5, seed=13),
        SamplingParams(temperature=0.8, top_p=0.8, seed=14),
        SamplingParams(temperature=1.3, min_p=0.1, seed=15),
    ],
    ids=["T=1", "T=0.5", "top-k", "top-p", "min-p"],
)
def test_samples_follow_the_softmax(chosen):
    logits = np.random.default_rng(1).normal(0, 1.2, 16).astype(np.float32)
    kept, _ = naive_candidates(logits, chosen)
    probs = np.zeros(16)
    probs[kept] = softmax(logits[kept].astype(np.float64) / chosen.temperature)
    noise = Noise(chosen.seed, 16)
    count = 5000 if chosen.top_k or chosen.top_p < 1 or chosen.min_p else 20000  # which tokens are kept is seen in few
    counts = np.bincount([sample(logits, position, chosen, noise) for position in range(count)], minlength=16)
    assert chi_square(counts, probs) < limit(len(kept) - 1)


def test_chi_square_notices():
    """The statistic above would not pass a slightly wrong sampler."""
    probs = softmax(np.random.default_rng(1).normal(0, 1.2, 16))
    counts = np.random.default_rng(2).multinomial(20000, softmax(np.log(probs) * 1.1))
    assert chi_square(counts, probs) > limit(15)


@pytest.mark.parametrize("seeds", [1500, pytest.param(10000, marks=pytest.mark.exhaustive)])
def test_speculative_text_follows_the_targets_distribution(seeds):
    """Two tokens by speculation over many seeds against the target's joint distribution, computed in full."""
    size = 6
    model = random_model(3, vocab_size=size, width=8, layers=1, hidden=8, sharpness=1.5)
    target = ReferenceBackend(model)
    planner = SpecExecPlanner(ReferenceBackend(perturbed(model, 0.5, 1)), depth=2, beam=2)
    prompt, temperature = [0, 3, 4], 0.9
    joint = np.zeros((size, size))
    session = target.open()
    logits = joint_logits(target, session, prompt, size)
    first = softmax(logits[0] / temperature)
    for token in range(size):
        joint[token] = first[token] * softmax(logits[1 + token] / temperature)
    counts, accepted = np.zeros((size, size)), 0
    for seed in range(seeds):  # two draws each
        stats, text = GenerationStats(), list[int]()
        chosen = SamplingParams(temperature=temperature, seed=seed)
        for round_ in Generation(  # the prompt gives the first token, so its last one is generated
            target, session, planner, prompt[:-1], chosen, max_tokens=3, budget=3, stats=stats, stop_ids=frozenset(),
            last_row=np.where(np.arange(size) == prompt[-1], 0, -np.inf).astype(np.float32),
        ).steps():  # fmt: skip
            text += round_.tokens
        assert text[0] == prompt[-1]
        counts[text[1], text[2]] += 1
        accepted += stats.tokens_by_source["draft"]
    assert 0.2 * seeds < accepted < 0.95 * seeds  # the speculation was real, and was not always right
    assert chi_square(counts.ravel(), joint.ravel()) < limit(size * size - 1)


def joint_logits(target, session, prompt, size):
    """Logits [1 + size, V] after the prompt, and after the prompt and each token."""
    from edgespec.loop.backend import Work
    from edgespec.loop.passes import prefill

    prefill(target, session, prompt[:-1])
    tokens, parents = np.array([prompt[-1], *range(size)], np.int32), np.array([-1] + [0] * size, np.int32)
    logits = target.forward([Work(session, tokens, parents, np.arange(size + 1, dtype=np.int32))])[0]
    session_rows = np.stack([logits.row(node) for node in range(size + 1)]).astype(np.float64)
    session.rewind(0)
    return session_rows


def test_a_bias_is_checked_once_not_in_each_step_of_a_draft(monkeypatch):
    params = SamplingParams(logit_bias={1: 2.0}, presence_penalty=0.5, repetition_penalty=1.3, temperature=0.7)
    monkeypatch.setattr(sampling, "check_number", None)
    noise = SimpleNamespace(size=4)
    context = SimpleNamespace(sampling=params.changed(seed=5), noise=noise, token_ids=[1, 2], prompt_length=1)
    assert drafting.ChildScores(context, None, coupling=False)._added(0).tolist() == [0, 2, -0.5, 0]
    monkeypatch.undo()
    assert (params.seed, context.sampling) == (0, replace(params, seed=5))
