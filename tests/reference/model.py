"""A small transformer in plain numpy: what every backend must compute.

Each node is computed on its own in float64, in operations whose shapes depend only on its position.
"""

import math
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import ModelError

Array = NDArray[np.float64]

ROPE_BASE = 10000.0
EPSILON = 1e-6


@dataclass(frozen=True, slots=True)
class Layer:
    """One block's weights; D is the width, F the width inside the MLP.

    Attributes:
        attention_norm, mlp_norm: [D].
        query, key, value, output: [D, D].
        gate, up: [F, D].
        down: [D, F].
        decay: [heads, D], the part of its state that each head keeps; None if the layer is not recurrent.
    """

    attention_norm: Array
    query: Array
    key: Array
    value: Array
    output: Array
    mlp_norm: Array
    gate: Array
    up: Array
    down: Array
    decay: Array | None = None


@dataclass(frozen=True, slots=True)
class Model:
    """
    Attributes:
        heads: of each layer.
        embedding: [V, D].
        layers: in order.
        final_norm: [D].
        unembedding: [V, D]; None: the embedding (tied).
    """

    heads: int
    embedding: Array
    layers: tuple[Layer, ...]
    final_norm: Array
    unembedding: Array | None = None

    def save(self, path: str) -> None:
        arrays = {"heads": np.array(self.heads), "embedding": self.embedding, "final_norm": self.final_norm}
        if self.unembedding is not None:
            arrays["unembedding"] = self.unembedding
        for i, layer in enumerate(self.layers):
            found = {f"{i}.{field.name}": getattr(layer, field.name) for field in fields(Layer)}
            arrays |= {name: weights for name, weights in found.items() if weights is not None}
        with Path(path).open("wb") as stream:
            np.savez(stream, allow_pickle=False, **arrays)


def random_model(
    seed: int,
    *,
    vocab_size: int = 64,
    layers: int = 2,
    width: int = 16,
    heads: int = 2,
    hidden: int = 32,
    tied: bool = False,
    sharpness: float = 3.0,
    recurrent: bool = False,
) -> Model:
    """
    Args:
        seed: of the weights.
        vocab_size: V.
        layers: their number.
        width: D.
        heads: of each layer.
        hidden: F.
        tied: the embedding is the unembedding.
        sharpness: about the standard deviation of the logits.
        recurrent: every other layer, from the first on, is recurrent.
    """
    generator = np.random.default_rng(seed)

    def matrix(rows: int, columns: int, scale: float = 1.0) -> Array:
        return generator.standard_normal((rows, columns)) * scale / math.sqrt(columns)

    def layer(number: int) -> Layer:
        query, key, value, output = (matrix(width, width, 2.0) for _ in range(4))
        gate, up, down = matrix(hidden, width), matrix(hidden, width), matrix(width, hidden)
        decay = matrix(heads, width) if recurrent and number % 2 == 0 else None
        return Layer(np.ones(width), query, key, value, output, np.ones(width), gate, up, down, decay)

    embedding = matrix(vocab_size, width, sharpness if tied else math.sqrt(width))
    blocks = tuple(layer(number) for number in range(layers))
    unembedding = None if tied else matrix(vocab_size, width, sharpness)
    return Model(heads, embedding, blocks, np.ones(width), unembedding)


def perturbed(model: Model, scale: float, seed: int) -> Model:
    """A copy, as a draft, with noise of `scale` times each matrix's standard deviation."""
    generator = np.random.default_rng(seed)

    def noisy(weights: Array) -> Array:
        noise: Array = scale * weights.std() * generator.standard_normal(weights.shape)
        return weights + noise

    def layer(old: Layer) -> Layer:
        weights = {field.name: getattr(old, field.name) for field in fields(Layer)}
        return Layer(**{name: noisy(found) for name, found in weights.items() if found is not None})

    layers = tuple(layer(old) for old in model.layers)
    unembedding = None if model.unembedding is None else noisy(model.unembedding)
    return replace(model, embedding=noisy(model.embedding), layers=layers, unembedding=unembedding)


def rms_norm(x: Array, weight: Array) -> Array:
    """Scale x [D] to a root mean square of 1, then by `weight` [D]."""
    scaled: Array = x / math.sqrt(np.add.reduce(x * x) / len(x) + EPSILON) * weight
    return scaled


@cache
def angles(half: int, position: int) -> tuple[Array, Array]:
    """Cosines and sines of position * base^(-2i/d), of i below d/2."""
    angle = position * ROPE_BASE ** (-np.arange(half) / half)
    return np.cos(angle), np.sin(angle)


def rotate(x: Array, position: int) -> Array:
    """Rotary position: turn the pairs (i, i + d/2) of every head of x [heads, d] by position * base^(-2i/d)."""
    half = x.shape[1] // 2
    (cos, sin), left, right = angles(half, position), x[:, :half], x[:, half:]
    return np.concatenate([left * cos - right * sin, left * sin + right * cos], axis=1)


def attend(query: Array, keys: Array, values: Array) -> Array:
    """Softmax attention of one query [heads, d] over keys and values [n, heads, d]; shape [heads * d]."""
    scores = np.einsum("hd,nhd->hn", query, keys) / math.sqrt(query.shape[1])
    weights = np.exp(scores - np.maximum.reduce(scores, axis=1, keepdims=True))
    weights /= np.add.reduce(weights, axis=1, keepdims=True)
    mixed: Array = np.einsum("hn,nhd->hd", weights, values)
    return mixed.reshape(-1)


def recur(layer: Layer, h: Array, query: Array, cell: Array, state: Array) -> tuple[Array, Array]:
    """Gated linear attention (Yang et al., arXiv 2312.06635): each head keeps a part of its state, and adds k v^T.

    Args:
        layer: recurrent.
        h: the layer's input [D].
        query: [heads, d].
        cell: keys and values [2, heads, d].
        state: before this node [heads, d, d].

    Returns:
        What the heads read [heads * d], and the state after this node.
    """
    assert layer.decay is not None
    keep = 1 / (1 + np.exp(-(layer.decay @ h)))
    after = keep[:, None, None] * state + np.einsum("hd,he->hde", cell[0], cell[1]) / query.shape[1]
    read: Array = np.einsum("hd,hde->he", query, after)
    return read.reshape(-1), after


def evaluate(model: Model, token_id: int, position: int, past: Array, state: Array) -> tuple[Array, Array, Array]:
    """One node through all layers.

    Args:
        model: the weights.
        token_id: the node's token.
        position: its absolute position.
        past: cells it sees, in order of position, shape [position, layers, 2, heads, d].
        state: of recurrent layers before it [layers, heads, d, d], or any array if no layer is recurrent; not changed.

    Returns:
        Its final vector [D], its own cell [layers, 2, heads, d]: keys and values, and the state after it.
    """
    x = model.embedding[token_id]
    after = state.copy()
    cell = np.empty(past.shape[1:])
    for i, layer in enumerate(model.layers):
        h = rms_norm(x, layer.attention_norm)
        turned = rotate(np.concatenate([layer.query @ h, layer.key @ h]).reshape(2 * model.heads, -1), position)
        query, cell[i, 0] = turned[: model.heads], turned[model.heads :]
        cell[i, 1] = (layer.value @ h).reshape(model.heads, -1)
        if layer.decay is None:
            seen = np.concatenate([past[:, i], cell[None, i]])
            mixed = attend(query, seen[:, 0], seen[:, 1])
        else:
            mixed, after[i] = recur(layer, h, query, cell[i], after[i])
        x = x + layer.output @ mixed
        h = rms_norm(x, layer.mlp_norm)
        gate = layer.gate @ h
        x = x + layer.down @ (gate / (1 + np.exp(-gate)) * (layer.up @ h))
    return rms_norm(x, model.final_norm), cell, after


def load_weights(path: str) -> Model:
    """Read what `Model.save` wrote.

    Raises:
        ModelError: the file is missing or is not such a file.
    """
    if not Path(path).exists():
        raise ModelError(f"{path}: there is no such file")
    try:
        with np.load(path, allow_pickle=False) as arrays:
            count = len({name.split(".")[0] for name in arrays if "." in name})
            layers = tuple(
                Layer(**{field.name: arrays.get(f"{i}.{field.name}") for field in fields(Layer)}) for i in range(count)
            )
            unembedding = arrays.get("unembedding")
            return Model(int(arrays["heads"]), arrays["embedding"], layers, arrays["final_norm"], unembedding)
    except (OSError, ValueError, KeyError, EOFError, AttributeError, TypeError, BadZipFile) as error:
        raise ModelError(f"{path}: is not a reference model: {error}") from error
