"""What a mixture's routers choose, recorded while it writes.

How many hits would rules of replacement have? And how often does a router, shown the state of the layer before, choose
what it will choose?
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import UsageError
from edgespec.model import Model
from edgespec.weights.experts import FADING, hit_share

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
    rows_of = import_module("edgespec.backends.llamacpp.ggml.ggml_tensor").rows_of
    routers = {number: rows_of(address) for number, address in mixture.routers.items()}
    mixture.heard = _Listener(routing, routers, rows_of).heard
    try:
        for question in questions:
            model.generate(question, max_tokens=max_tokens)
            progress()
    finally:
        mixture.heard = None
    return routing


class _Listener:
    """Told what is chosen, layer by layer."""

    def __init__(self, routing: Routing, routers: dict[int, Any], rows_of: Callable[[int], Any]) -> None:
        self._routing = routing
        self._routers = routers  # number of the layer -> [experts, width]; None: it is quantised, and foretells nothing
        self._rows_of = rows_of
        self._guess: NDArray[np.int64] | None = None  # [rows, used], of the layer to come

    def heard(self, number: int, chosen: NDArray[np.int32], states: int) -> None:
        """As `Mixture.heard`."""
        routing = self._routing
        routing.layers[number].append(np.unique(chosen).tolist())
        if number and self._guess is not None and len(self._guess) >= len(chosen):
            for guess, row in zip(self._guess, chosen, strict=False):
                routing.foretold += len(guess)
                routing.right += len(np.intersect1d(guess, row))
        self._guess = None
        router, seen = self._routers.get(number + 1), self._rows_of(states)
        if router is not None and seen is not None:
            self._guess = np.argsort(-(seen[: len(chosen)] @ router.T), axis=1)[:, : routing.used]
