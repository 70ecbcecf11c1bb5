"""lossless.is_tie against brute force: what perturbed logits really give, it must allow."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference.backend import ReferenceBackend, perturbed, random_model

from edgespec.loop.sampling import Noise, SamplingParams, sample
from edgespec.measure.lossless import explain, first_divergence, is_tie, plain_logits, replay

SIZE = 12
filters = st.fixed_dictionaries(
    {},
    optional={
        "top_k": st.integers(1, SIZE),
        "top_p": st.floats(0.05, 0.99),
        "min_p": st.floats(0.01, 0.9),
        "repetition_penalty": st.sampled_from([0.7, 1.3, 2.0]),
        "presence_penalty": st.floats(-1, 1),
        "frequency_penalty": st.floats(-1, 1),
    },
)
temperatures = st.one_of(st.just(0.0), st.floats(0.2, 2.0))


def tie(logits, other, params, tolerance, position=3, output=()):
    noise = Noise(params.seed, len(logits))
    plain = sample(logits, position, params, noise, (), output)
    return is_tie(logits, plain, other, position, params, noise, tolerance, output_ids=output)


def test_first_divergence():
    assert first_divergence([], []) is None
    assert first_divergence([1, 2], [1, 2]) is None
    assert first_divergence([1, 2, 3], [1, 4, 3]) == 1
    assert first_divergence([1, 2], [1, 2, 3]) == 2
    assert first_divergence([1, 2], []) == 0


def test_greedy_boundary():
    logits = np.array([1.0, 0.5, 0.0], np.float32)
    greedy = SamplingParams()
    assert tie(logits, 1, greedy, 0.26)
    assert not tie(logits, 1, greedy, 0.24)  # 2 * 0.24 < 0.5
    assert not tie(logits, 2, greedy, 0.49)
    assert tie(logits, 2, greedy, 0.51)


def test_a_third_token_that_beats_both_denies_the_tie():
    logits = np.array([5.0, 1.0, 0.99], np.float32)
    assert not is_tie(logits, 1, 2, 3, SamplingParams(), Noise(0, 3), 0.1)


def test_penalty_scales_the_tolerance():
    logits = np.array([4.0, 1.5, 0.0], np.float32)  # token 0 was seen: 4 / 2 = 2, and +-0.2 becomes +-0.1
    params = SamplingParams(repetition_penalty=2.0)
    assert tie(logits, 1, params, 0.34, output=[0])
    assert not tie(logits, 1, params, 0.32, output=[0])  # 1.5 * 0.32 < 0.5, though 2 * 0.32 > 0.5


def test_top_k_boundary():
    # At T = 1 with these logits and noise, token 2 would win by its noise, but top-k 2 leaves it out.
    noise = Noise(0, 3)
    position = next(p for p in range(1000) if noise.row(p).argmax() == 2 and np.ptp(noise.row(p)) > 3)
    logits = np.array([1.0, 0.9, 0.5], np.float32)
    params = SamplingParams(temperature=1.0, top_k=2)
    assert sample(logits, position, params, noise) != 2
    assert tie(logits, 2, params, 0.21, position)  # 2 * 0.21 > 0.9 - 0.5
    assert not tie(logits, 2, params, 0.19, position)


def test_min_p_boundary():
    noise = Noise(0, 2)
    position = next(p for p in range(1000) if noise.row(p)[1] - noise.row(p)[0] > 3)
    logits = np.array([1.0, 0.0], np.float32)
    params = SamplingParams(temperature=1.0, min_p=math.exp(-0.8))  # token 1 is 0.2 below the floor
    assert tie(logits, 1, params, 0.11, position)
    assert not tie(logits, 1, params, 0.09, position)


def test_top_p_boundary():
    noise = Noise(0, 2)
    position = next(p for p in range(1000) if noise.row(p)[1] - noise.row(p)[0] > 3)
    logits = np.log(np.array([0.6, 0.4])).astype(np.float32)
    # Perturbed: 0.6 e^-t / (0.6 e^-t + 0.4 e^t) < 0.55 from t = log(0.6 * 0.45 / (0.4 * 0.55)) / 2 = 0.1024
    params = SamplingParams(temperature=1.0, top_p=0.55)
    assert tie(logits, 1, params, 0.104, position)
    assert not tie(logits, 1, params, 0.101, position)


def test_a_token_that_always_outscores_can_be_filtered_out():
    # Token 2 has the best score whenever it is in; plain decoding keeps it by a hair (top-k 3 of 4).
    noise = Noise(0, 4)
    position = next(p for p in range(10000) if noise.row(p)[2] > noise.row(p)[[0, 1, 3]].max() + 3)
    logits = np.array([2.0, 1.0, 0.1, 0.0], np.float32)
    params = SamplingParams(temperature=1.0, top_k=3)
    others = noise.row(position)[:2] + logits[:2]
    runner_up = int(others.argmax())
    assert sample(logits, position, params, noise) == 2
    assert tie(logits, runner_up, params, 0.06, position)
    assert not tie(logits, runner_up, params, 0.04, position)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**6), temperatures, filters, st.floats(0.01, 1.0))
def test_what_a_perturbation_gives_is_allowed(seed, temperature, chosen, tolerance):
    generator = np.random.default_rng(seed)
    params = SamplingParams(temperature=temperature, seed=seed, logit_bias={1: 0.5}, **chosen)
    noise, output = Noise(seed, SIZE), generator.integers(0, SIZE, 4).tolist()
    logits = generator.standard_normal(SIZE).astype(np.float32)
    plain = sample(logits, 7, params, noise, (), output)
    for _ in range(40):
        corner = generator.choice([-1, 1], SIZE) if generator.random() < 0.7 else generator.uniform(-1, 1, SIZE)
        moved = logits + (0.9999 * tolerance * corner).astype(np.float32)
        other = sample(moved, 7, params, noise, (), output)
        assert is_tie(logits, plain, other, 7, params, noise, tolerance, output_ids=output)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**6), temperatures, st.floats(0.01, 1.0), st.sampled_from([0.7, 1.0, 1.5]))
def test_without_filters_it_is_exact(seed, temperature, tolerance, penalty):
    """The other token up, all others down is the best it can get, and that must agree with the verdict."""
    generator = np.random.default_rng(seed)
    params = SamplingParams(temperature=temperature, seed=seed, repetition_penalty=penalty)
    noise, output = Noise(seed, SIZE), [2, 3, 3]
    logits = generator.standard_normal(SIZE).astype(np.float32)
    plain = sample(logits, 7, params, noise, (), output)
    for other in range(SIZE):
        moved = logits - np.float32(tolerance)
        moved[other] = logits[other] + np.float32(tolerance)
        wins = sample(moved, 7, params, noise, (), output) == other
        assert is_tie(logits, plain, other, 7, params, noise, tolerance, output_ids=output) == wins


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**6), temperatures, filters)
def test_without_tolerance_only_the_plain_token_is_allowed(seed, temperature, chosen):
    generator = np.random.default_rng(seed)
    params = SamplingParams(temperature=temperature, seed=seed, **chosen)
    noise = Noise(seed, SIZE)
    logits = generator.standard_normal(SIZE).astype(np.float32)
    plain = sample(logits, 7, params, noise)
    allowed = [other for other in range(SIZE) if is_tie(logits, plain, other, 7, params, noise, 0.0)]
    assert allowed == [plain]


def plain_text(backend, prompt, params, count):
    output: list[int] = []
    noise = Noise(params.seed, backend.vocab.size)
    for _ in range(count):
        for logits in plain_logits(backend, prompt, [*output, 0]):
            last = logits
        output.append(sample(last, len(prompt) + len(output), params, noise, prompt, output))
    return output


def test_explain_and_replay():
    backend = ReferenceBackend(random_model(1))
    prompt, params = [0, 5, 9], SamplingParams(temperature=0.8, top_p=0.9, presence_penalty=0.2, seed=4)
    plain = plain_text(backend, prompt, params, 8)
    assert explain(backend, prompt, plain, plain, params) is None
    assert replay(backend, prompt, plain, params) == []

    wrong = plain.copy()
    wrong[5] = (wrong[5] + 1) % 64
    found = explain(backend, prompt, plain, wrong, params)
    assert found is not None
    assert (found.index, found.position, found.plain_token, found.other_token) == (5, 8, plain[5], wrong[5])
    assert not found.tie
    assert "NOT a tie" in str(found)
    assert found in replay(backend, prompt, wrong, params)

    gap = found.gap + 1e-3
    for tolerance, tie in ((gap / 2, True), (gap / 4, False)):  # of both runs together, instead of the backend's
        wide = explain(backend, prompt, plain, wrong, params, tolerance)
        assert wide is not None
        assert (wide.tolerance, wide.tie) == (tolerance, tie)
        assert wide in replay(backend, prompt, wrong, params, tolerance)

    short = explain(backend, prompt, plain, plain[:6], params)
    assert short is not None
    assert (short.index, short.other_token, short.tie) == (6, None, False)
    assert backend.open_sessions == 0


def test_replay_looks_behind_the_first_divergence():
    target, other = random_model(2), ReferenceBackend(perturbed(random_model(2), 0.3, 0))
    params = SamplingParams(temperature=1.0, seed=1)
    text = plain_text(other, [0, 7], params, 12)
    found = replay(ReferenceBackend(target), [0, 7], text, params)
    assert 1 < len(found) < 12
    assert not any(divergence.tie for divergence in found)


@pytest.mark.parametrize("prompt", [[0], [0, 1]])
def test_plain_logits_of_the_first_token(prompt):
    backend = ReferenceBackend(random_model(1))
    assert [row.shape for row in plain_logits(backend, prompt, [3])] == [(64,)]
