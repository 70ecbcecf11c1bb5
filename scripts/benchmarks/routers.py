"""Routers for made-up mixtures, of what those of a dense model's layers would read, recorded in llama.cpp's graph.

Choices of real mixtures change slowly from token to token, and hardly from layer to layer. So does the part of a state
that two layers share: the directions in which a layer's input varies as the input of the layer before does. In them,
the router's rows are centroids of the tokens, by angle. The mean input is projected out, or a few experts would always
be chosen. The table beside real mixtures: docs/measured.md.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from ctypes import c_char
from typing import Any

import numpy as np
from edgespec.backends.llamacpp.backend import LlamaBackend
from edgespec.backends.llamacpp.engine import load_here, plan_here
from edgespec.backends.llamacpp.ggml.ggml_tensor import GgmlTensor
from edgespec.backends.llamacpp.memory.watch import Watch
from numpy.lib.stride_tricks import as_strided

from edgespec.errors import UsageError
from edgespec.loop.backend import Work
from edgespec.loop.engines import LoadOptions
from edgespec.loop.sampling import Float32Array
from edgespec.loop.text import render_chat, user_messages
from edgespec.machine.this_machine import this_machine

INPUTS = "ffn_norm"  # the operation that gives what a router would read
LONGEST = 512  # tokens of a prompt
DIRECTIONS = 32
TINY = 1e-4  # of the strongest direction: one that is nothing but rounding
STEPS = 25  # of k-means


class Recorder(Watch):  # type: ignore[misc]
    """Takes the place of `Watch`, and copies what `INPUTS` gives in a pass."""

    def learn(self, context: Any) -> None:
        """The name is known."""

    def begin(self, *, prompt: bool, rows: int, padding: int) -> None:
        self._layers = list[Float32Array]()

    def _called(self, tensor: int, ask: bool) -> bool:
        name, _, layer = self._name_of(tensor).decode().rpartition("-")
        if name != INPUTS or not layer.isdigit():  # views of it have a longer name
            return not ask
        if not ask:
            found = GgmlTensor.from_address(tensor)
            (width, rows), stride = found.ne[:2], found.nb[1]
            memory = (c_char * (stride * (rows - 1) + 4 * width)).from_address(found.data)
            self._layers.append(as_strided(np.frombuffer(memory, np.float32), (rows, width), (stride, 4)).copy())
        return True

    @property
    def taken(self) -> Float32Array:
        """[rows, layers, width] of the last pass."""
        return np.stack(self._layers, 1)


def record(path: str, prompts: Sequence[str], tokens: int, progress: Callable[[int, int], None]) -> list[Float32Array]:
    """Answer prompts greedily.

    Args:
        path: of a GGUF.
        prompts: those longer than `LONGEST` are left out.
        tokens: of an answer, if it does not end before.
        progress: called with prompts done, and in all.

    Returns:
        [tokens, layers, width] of each prompt with its answer.

    Raises:
        ModelError: it cannot be loaded.
    """
    options = LoadOptions(
        context_length=LONGEST + tokens, budget=LONGEST, sessions=1, exact="off", gpu_layers=0, resident=True
    )
    plan, recorder, found = plan_here(path, options, this_machine(path)), Recorder(), list[Float32Array]()
    with closing(load_here(plan, plan.ways[-1], lambda done, total: None, recorder)) as backend:
        vocab = backend.vocab
        for number, text in enumerate(prompts, 1):
            if vocab.chat_template:
                ids = render_chat(vocab, user_messages(text))
            else:
                ids = vocab.encode(text, add_bos=True, parse_special=False)
            if len(ids) <= LONGEST:
                found.append(_answer(backend, recorder, ids, tokens))
            progress(number, len(prompts))
    return found


def _answer(backend: LlamaBackend, recorder: Recorder, read: list[int], tokens: int) -> Float32Array:
    parts = list[Float32Array]()
    with closing(backend.open()) as session:
        while len(parts) <= tokens:
            nodes = np.arange(len(read), dtype=np.int32)
            # The last layer computes the rows that are wanted.
            (logits,) = backend.forward([Work(session, np.array(read, np.int32), nodes - 1, nodes)])
            session.commit(nodes.tolist())
            parts.append(recorder.taken)
            read = [int(logits.row(len(read) - 1).argmax())]
            if read[0] in backend.vocab.eog_ids:
                break
    return np.concatenate(parts)


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
