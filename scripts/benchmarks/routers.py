"""Routers for made-up mixtures, of what the routers of a dense model's layers would read.

Choices of real mixtures change slowly from token to token, and hardly from layer to layer. So does the part of a state
that two layers share: the directions in which a layer's input varies as the input of the layer before does. In them,
the router's rows are centroids of the tokens, by angle. The mean input is projected out, or a few experts would always
be chosen. The table beside real mixtures: docs/measured.md.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from edgespec.errors import UsageError
from edgespec.loop.sampling import Float32Array

DIRECTIONS = 32
TINY = 1e-4  # of the strongest direction: one that is nothing but rounding
STEPS = 25  # of k-means


def routers(
    texts: Sequence[Float32Array], count: int, progress: Callable[[int, int], None], seed: int = 7
) -> Iterator[Float32Array]:
    """
    Args:
        texts: [tokens, layers, width] what routers read.
        count: experts of a layer.
        progress: called with layers done, and in all.
        seed: of the tokens that centroids begin with.

    Yields:
        Rows of each layer's router, [experts, width].

    Raises:
        UsageError: there are too few tokens.
    """
    tokens, layers = sum(len(text) - 1 for text in texts), texts[0].shape[1] if texts else 0
    if tokens < 2 * count:
        raise UsageError(f"{count} experts need {2 * count} tokens of text, but there are {tokens}: give more prompts")
    # Attention sinks in a text's first token, whose state is like no other.
    before = first = np.concatenate([text[1:, 0] for text in texts])
    for layer in range(layers):
        inputs = np.concatenate([text[1:, layer] for text in texts]) if layer else first
        yield _rows(before, inputs, count, np.random.default_rng((seed, layer)))
        before = inputs
        progress(layer + 1, layers)


def _rows(before: Float32Array, inputs: Float32Array, count: int, random: np.random.Generator) -> Float32Array:
    means = np.linalg.qr(np.stack([inputs.mean(0), before.mean(0)], 1))[0]
    before, inputs = (states - (states @ means) @ means.T for states in (before, inputs))
    shared = before.T @ inputs
    values, vectors = np.linalg.eigh(shared + shared.T)
    directions = vectors[:, values > TINY * values[-1]][:, : -DIRECTIONS - 1 : -1]
    directions /= (inputs @ directions).std(0)  # the strongest would hide the others
    points = _unit(inputs @ directions)
    rows = _centroids(points, count, random) @ directions.T
    return np.asarray(rows / (inputs @ rows.T).std(), np.float32)


def _centroids(points: Float32Array, count: int, random: np.random.Generator) -> Float32Array:
    """Spherical k-means: [count, n] centroids of unit vectors."""
    found = points[random.choice(len(points), count, replace=False)]
    for _ in range(STEPS):
        sums = np.zeros_like(found)
        np.add.at(sums, (points @ found.T).argmax(1), points)
        empty = np.linalg.norm(sums, axis=1) < 1e-6
        sums[empty] = points[random.choice(len(points), int(empty.sum()), replace=False)]
        found = _unit(sums)
    return found


def _unit(vectors: Float32Array) -> Float32Array:
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.asarray(vectors / np.maximum(lengths, 1e-12), np.float32)
