"""What a mixture's routers choose, recorded while it writes.

How many hits would rules of replacement have? And how often does a router, shown the state of the layer before, choose
what it will choose?
"""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import UsageError
from edgespec.model import Model
from edgespec.weights.experts import FADING, hit_share

ROUTER = b"ffn_moe_logits-"  # llama-graph.cpp
RULES = {"LRU": 0.5, "mixed": FADING, "mixed, slowly": 0.99, "LFU": 1.0}  # by how fast the past fades


@dataclass(slots=True)
class Routing:
    """Of one model."""

    experts: int  # of a layer
    used: int  # by a token
    layers: list[list[list[int]]] = field(default_factory=list)  # [layer][pass] experts chosen, prompts left out
    foretold: int = 0  # experts
    right: int = 0  # of these

    @property
    def precision(self) -> float:
        """How often what is foretold of a layer is chosen there."""
        return self.right / max(1, self.foretold)

    def shares(self, slots: int) -> dict[str, float]:
        """By rule, the share of hits in pools of so many slots."""
        return {
            rule: float(np.mean([hit_share(passes, self.experts, slots, fading) for passes in self.layers]))
            for rule, fading in RULES.items()
        }


def record(model: Model, questions: Sequence[Any], max_tokens: int, progress: Callable[[], None]) -> Routing:
    """Have a model, a mixture whose experts are read from disk, answer plainly, and listen to its routers.

    Raises:
        UsageError: it is no such model.
    """
    mixture: Any = getattr(model.target, "mixture", None)
    if mixture is None:
        raise UsageError("experts are not read from disk here: name a mixture, and less --memory than it has bytes")
    experts, used = mixture.shape
    routing = Routing(experts, used, [[] for _ in mixture.memory.layers])
    listener = _Listener(mixture, routing)
    mixture.asked = listener.asked
    try:
        for question in questions:
            model.generate(question, max_tokens=max_tokens)
            progress()
    finally:
        mixture.asked = listener.inner
    return routing


class _Listener:
    """Stands before `Mixture.asked`."""

    def __init__(self, mixture: Any, routing: Routing) -> None:
        self.inner = mixture.asked
        self._mixture = mixture
        self._routing = routing
        self._tensor = import_module("edgespec.backends.llamacpp.ggml_tensor").GgmlTensor
        self._routers: dict[int, NDArray[np.float32]] = {}  # index of the layer -> [experts, width]
        self._state = 0  # address of the tensor that the layer's router sees
        self._guess: NDArray[np.int64] | None = None  # [rows, used], of the layer to come

    def asked(self, name: bytes, address: int, reported: bool) -> bool:
        """As `Mixture.asked`."""
        if name.startswith(ROUTER):
            router, self._state = self._tensor.from_address(address).src[:2]
            index = int(name[len(ROUTER) :])
            if index not in self._routers:
                self._routers[index] = self._floats(router)
        mixture = self._mixture
        if reported and name in mixture._first and not mixture._prompt:
            number = mixture._users[name][0]
            chosen = mixture._chosen_by_row(self._tensor.from_address(address).src[2]).copy()
            rows = len(chosen) - (mixture._padding if len(chosen) == mixture._rows else 0)
            self._listen(number, chosen[:rows])
        return bool(self.inner(name, address, reported))

    def _listen(self, number: int, chosen: NDArray[np.int32]) -> None:
        layers, routing = self._mixture.memory.layers, self._routing
        routing.layers[number].append(np.unique(chosen).tolist())
        if number and self._guess is not None and len(self._guess) >= len(chosen):
            for guess, row in zip(self._guess, chosen, strict=False):
                routing.foretold += len(guess)
                routing.right += len(np.intersect1d(guess, row))
        self._guess = None
        if number + 1 < len(layers) and (router := self._routers.get(layers[number + 1].index)) is not None:
            scores = self._floats(self._state)[: len(chosen)] @ router.T
            self._guess = np.argsort(-scores, axis=1)[:, : routing.used]

    def _floats(self, address: int) -> NDArray[np.float32]:
        tensor = self._tensor.from_address(address)
        columns, rows = tensor.ne[0], tensor.ne[1]
        values = (ctypes.c_float * (columns * rows)).from_address(tensor.data)
        return np.frombuffer(values, np.float32).reshape(rows, columns).copy()
