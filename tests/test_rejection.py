"""Rejection baselines: tokens have the target's distribution, and expected passes are those that rejection takes."""

import numpy as np
import pytest

from edgespec.loop.sampling import Noise, SamplingParams, distribution, sample
from edgespec.measure import rejection
from edgespec.measure.rejection import acceptance, coins, coverage, expected_passes, static_tree, stems

DRAWS = 100_000
P = np.array([0.0, 0.2, 0.42, 0.1, 0.08, 0.04, 0.03, 0.13])
Q = np.array([0.2, 0.35, 0.1, 0.2, 0.05, 0.05, 0.05, 0.0])
MOST = 29.9  # chi square with six degrees of freedom, which chance exceeds once in 25,000 times
RULES = {"leviathan": (1, False), "specinfer": (4, True), "no replacement": (4, False), "all of q": (8, False)}


def decide(
    p: np.ndarray, q: np.ndarray, children: int, flips: np.ndarray, *, replacement: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Decide one position n times, as the baselines do.

    Args:
        p: the target's probabilities, [V].
        q: the draft's, [V].
        children: number of draft tokens.
        flips: `coins` of shape [n, 2 * children + 1].
        replacement: the rule.

    Returns:
        The tokens [n], and the number of the accepted child, from 1 on; 0: none [n].
    """
    count = len(flips)
    target, draft = (np.broadcast_to(row, (count, len(row))) for row in (p, q))
    token, rank = np.zeros(count, np.intp), np.zeros(count, np.intp)
    for child in range(1, children + 1):
        x = rejection._draw(draft, flips[:, 2 * child - 2])
        of_target, of_draft = (rows[np.arange(count), x] for rows in (target, draft))
        accepted = (rank == 0) & (of_draft > 0) & (flips[:, 2 * child - 1] * of_draft < of_target)
        token[accepted], rank[accepted] = x[accepted], child
        target, draft = rejection.after_rejection(target, draft, x, replacement=replacement)
    return np.where(rank > 0, token, rejection._draw(target, flips[:, -1])), rank


def chi_square(rule: str) -> tuple[float, float]:
    """Chi square and total variation of 100,000 tokens."""
    children, replacement = RULES[rule]
    flips = coins(1, children, (DRAWS, 2 * children + 1))
    tokens, _ = decide(P, Q, children, flips, replacement=replacement)
    counts = np.bincount(tokens, minlength=len(P))
    assert counts[P == 0] == 0
    seen, expected = counts[P > 0], DRAWS * P[P > 0]
    return float(((seen - expected) ** 2 / expected).sum()), float(np.abs(counts / DRAWS - P).sum() / 2)


@pytest.mark.parametrize("rule", RULES)
def test_tokens_have_the_targets_distribution(rule: str) -> None:
    square, variation = chi_square(rule)
    assert square < MOST
    assert variation < 0.006


def test_only_without_replacement_the_draft_loses_what_was_rejected() -> None:
    p, q, x = np.tile(P, (2, 1)), np.tile(Q, (2, 1)), np.array([1, 3])
    for replacement in (True, False):
        left, rest = rejection.after_rejection(p, q, x, replacement=replacement)
        assert left[0] == pytest.approx(np.maximum(P - Q, 0) / np.maximum(P - Q, 0).sum())
        for row, token in zip(rest, x, strict=True):
            lost = 0 if replacement else Q[token]
            assert row == pytest.approx(np.where((np.arange(len(Q)) == token) & (not replacement), 0, Q) / (1 - lost))


def unchanged(p, q, x):
    return p, q


def loses_without_rule(p, q, x):
    """The draft's rest is not normalised, so a draft token counts as less probable than it was."""
    rest = q.copy()
    rest[np.arange(len(x)), x] = 0
    left = np.maximum(p - q, 0)
    return left / left.sum(1, keepdims=True), rest


def keeps_what_was_drawn(p, q, x):
    """The residual loses the token itself instead of the draft's probabilities."""
    left = p.copy()
    left[np.arange(len(x)), x] = 0
    return left / left.sum(1, keepdims=True), q


@pytest.mark.parametrize(
    ("rule", "wrong"),
    [
        ("leviathan", unchanged), ("leviathan", keeps_what_was_drawn), ("specinfer", unchanged),
        ("no replacement", unchanged), ("no replacement", loses_without_rule), ("no replacement", keeps_what_was_drawn),
    ],
)  # fmt: skip
def test_a_wrong_rule_is_seen(monkeypatch: pytest.MonkeyPatch, rule: str, wrong) -> None:
    monkeypatch.setattr(rejection, "after_rejection", lambda p, q, x, replacement: wrong(p, q, x))
    square, variation = chi_square(rule)
    assert square > 10 * MOST
    assert variation > 0.006


@pytest.mark.parametrize("rule", RULES)
def test_at_temperature_0_the_token_is_plain_decodings(rule: str) -> None:
    logits = np.array([0.5, 3.0, 2.9, -1.0, 0, 0, 0, 0], np.float32)
    plain = sample(logits, 7, SamplingParams(), Noise(0, 8))
    p, (children, replacement) = distribution(logits, SamplingParams()), RULES[rule]
    for q in (Q, p, distribution(-logits, SamplingParams())):
        tokens, _ = decide(p, q, children, coins(2, 0, (500, 2 * children + 1)), replacement=replacement)
        assert set(tokens.tolist()) == {plain}


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(1.0), SamplingParams(0.6, top_p=0.9, min_p=0.02)])
def test_probabilities_are_those_of_sampling(params: SamplingParams) -> None:
    logits = np.log(np.maximum(P, 1e-3)).astype(np.float32)
    drawn = [sample(logits, position, params, Noise(3, len(P))) for position in range(4000)]
    found = distribution(logits, params)
    assert found.sum() == pytest.approx(1)
    assert np.abs(np.bincount(drawn, minlength=len(P)) / len(drawn) - found).sum() / 2 < 0.02


@pytest.mark.parametrize("rule", RULES)
def test_the_accepted_child_given_the_token(rule: str) -> None:
    children, replacement = RULES[rule]
    flips = coins(4, 0, (DRAWS, 2 * children + 1))
    tokens, ranks = decide(P, Q, children, flips, replacement=replacement)
    for token in np.flatnonzero(P):
        of_it = ranks[tokens == token]
        seen = np.bincount(of_it, minlength=children + 1)[1:] / len(of_it)
        found = acceptance(P, Q, int(token), coins(5, 0, (2000, children)), replacement=replacement)
        assert found == pytest.approx(seen, abs=0.025)
    assert acceptance(Q, Q, 1, coins(5, 0, (1, children)), replacement=replacement)[0] == 1


def rows(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Of each position its own p and q."""
    generator = np.random.default_rng(0)
    p = generator.dirichlet(np.full(6, 0.5), count)
    q = 0.6 * p + 0.4 * generator.dirichlet(np.full(6, 0.5), count)
    return p, q / q.sum(1, keepdims=True)


@pytest.mark.parametrize("tree", [stems(1, 3), stems(3, 2), static_tree([0.6, 0.2, 0.1], 7)])
@pytest.mark.parametrize("replacement", [True, False])
def test_expected_passes_are_those_of_real_rejection(tree, replacement: bool) -> None:
    (parents, ranks), length, texts = tree, 8, 300
    p, q = rows(length)
    children = int(ranks.max()) + 1
    flips = [coins(position, 0, (texts, length, 2 * children + 1)) for position in range(length)]
    nodes = {(parent, rank): node for node, (parent, rank) in enumerate(zip(parents, ranks, strict=True)) if node}
    passes, expected = [], []
    for number in range(texts):
        text, count = [], 0
        while len(text) < length:  # a step of real rejection
            node, count = 0, count + 1
            while node is not None and len(text) < length:
                at = len(text)
                drafts = sum((node, rank) in nodes for rank in range(children))
                drawn = flips[at][number, count % length][: 2 * drafts + 1][None]
                token, rank = decide(p[at], q[at], drafts, drawn, replacement=replacement)
                text.append(int(token[0]))
                node = nodes[node, int(rank[0]) - 1] if rank[0] else None
        passes.append(count)
        accepted = np.array([
            acceptance(p[at], q[at], token, coins(number, at, (4, children)), replacement=replacement)
            for at, token in enumerate(text)
        ])  # fmt: skip
        expected.append(expected_passes(accepted, parents, ranks))
    spread = np.std(np.subtract(passes, expected)) / np.sqrt(texts)
    assert np.mean(passes) == pytest.approx(np.mean(expected), abs=4 * spread)
    assert np.mean(passes) < 0.7 * length


def test_the_static_tree_is_the_best_of_its_size() -> None:
    rates = [0.55, 0.3, 0.1]
    trees = {frozenset({()})}
    for budget in range(1, 6):
        trees = {
            tree | {child}
            for tree in trees
            for path in tree
            for rank in range(3)
            if (child := (*path, rank)) not in tree and (rank == 0 or (*path, rank - 1) in tree)
        }
        best = max(sum(np.prod([rates[rank] for rank in path]) for path in tree) for tree in trees)
        parents, ranks = static_tree(rates, budget)
        values = [1.0]
        for parent, rank in zip(parents[1:], ranks[1:], strict=True):
            values.append(values[parent] * rates[rank])
        assert len(parents) == budget + 1
        assert sum(values) == pytest.approx(best)
    assert len(static_tree([0.5, 0.0], 3)[0]) == 4
    assert len(static_tree([0.0], 3)[0]) == 1


def test_coverage_is_the_targets_probability_of_the_drafts_best_tokens() -> None:
    assert coverage(P, Q, [1, 3, 99]) == pytest.approx([0.2, 0.2 + 0.1 + P[0], 1.0])
