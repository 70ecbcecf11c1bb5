"""Experts that tokens of real mixtures chose, and the bytes that pools would have read for them.

    python tests/routes.py     a table for `data/routes.npz`

The routes in `data/routes.npz` are of Qwen3-30B-A3B and Gemma-4-26B-A4B: a prompt and 128 tokens, 6 experts of 128
(github.com/Helldez/BigMoeOnEdge, docs/bench-data/2026-07-15-route-trace, Apache-2.0; by `268aead3:tests/routes.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from edgespec.weights.experts import ExpertLayer, Residents, most_pools
from edgespec.weights.plan import Tensor

ROUTES = Path(__file__).parent / "data" / "routes.npz"
SLOTS = (24, 32, 48, 64)  # of a layer
FADING = 0.9  # of pools with slots for one layer
NONE = 1 << 15


@dataclass(frozen=True)
class Route:
    """
    Attributes:
        experts: of a layer.
        sizes: bytes of an expert, by layer.
        prompt: [tokens, layers, experts of a token]; NONE where the last layer leaves tokens out.
        text: the same of generated tokens.
    """

    experts: int
    sizes: list[int]
    prompt: Any
    text: Any


def read_routes(path: Path = ROUTES) -> dict[str, Route]:
    with np.load(path) as found:
        names = sorted({name.partition("/")[0] for name in found.files})
        parts = [{part: found[f"{name}/{part}"] for part in ("experts", "sizes", "prompt", "text")} for name in names]
    return {
        name: Route(int(one["experts"]), one["sizes"].tolist(), one["prompt"], one["text"])
        for name, one in zip(names, parts, strict=True)
    }


def layers_of(route: Route) -> list[ExpertLayer]:
    """As `find_experts` would find them."""
    whole = [size * route.experts for size in route.sizes]
    return [
        ExpertLayer(i, route.experts, (Tensor(f"blk.{i}.ffn_up_exps.weight", 0, 0, size),))
        for i, size in enumerate(whole)
    ]


def memory_of_layers(route: Route, slots: int) -> int:
    """Bytes of a pool of so many slots for each layer, and of memory for all other experts of one layer."""
    return sum(size * slots for size in route.sizes) + max(route.sizes) * max(0, route.experts - slots)


def passes_of(route: Route, width: int) -> list[list[list[int]]]:
    """The experts that passes of so many tokens choose, by pass and layer."""
    whole = len(route.text) // width * width
    parts = route.text[:whole].reshape(-1, width, *route.text.shape[1:])
    return [[np.unique(part[:, layer]).tolist() for layer in range(len(route.sizes))] for part in parts]


def read_by_layers(route: Route, slots: int, width: int) -> float:
    """Bytes a token, where each layer has a pool of its own, which begins with the first experts."""
    layers, read = len(route.sizes), 0
    scores, held = np.zeros((layers, route.experts)), [set(range(slots)) for _ in range(layers)]
    passes = passes_of(route, width)
    for one in passes:
        for layer, wanted in enumerate(one):
            scores[layer] *= FADING
            scores[layer, wanted] += 1
            missing = set(wanted) - held[layer]
            read += len(missing) * route.sizes[layer]
            if len(wanted) <= slots:
                free = sorted(held[layer] - set(wanted), key=lambda expert: scores[layer, expert])
                held[layer] = (held[layer] - set(free[: len(missing)])) | missing
    return read / (len(passes) * width)


def read_by_pools(route: Route, memory: int, width: int) -> float:
    """Bytes a token with the program's own pools in so much memory, after the prompt."""
    read, passes = 0, passes_of(route, width)
    pools = most_pools(layers_of(route), memory)
    places = {
        number: (residents, row)
        for pool in pools
        for residents in [Residents(len(pool.layers), route.experts, pool.slots)]
        for row, number in enumerate(pool.layers)
    }

    for layer in range(len(route.sizes)):
        residents, row = places[layer]
        chosen = route.prompt[route.prompt[:, layer, 0] < NONE, layer]
        residents.use_in_turn(row, chosen)
        residents.place(row, np.unique(chosen).tolist())
    for one in passes:
        for layer, wanted in enumerate(one):
            residents, row = places[layer]
            residents.use(row, wanted)
            read += len(residents.place(row, wanted)) * route.sizes[layer]
    return read / (len(passes) * width)


def shares(route: Route, width: int, slots: Sequence[int] = SLOTS) -> list[float]:
    """Bytes of pools ÷ those of a pool for each layer, in equal memory, by `slots`."""
    return [
        read_by_pools(route, memory_of_layers(route, one), width) / read_by_layers(route, one, width) for one in slots
    ]


def main() -> None:
    """The command."""
    found = list[float]()
    for name, route in read_routes().items():
        for width in (1, 4):
            found += shares(route, width)
            told = ", ".join(f"{slots} slots {share:.3f}" for slots, share in zip(SLOTS, found[-4:], strict=True))
            print(f"{name}, passes of {width}: {told}")
    print(f"median {median(found):.3f}, most {max(found):.3f}")


if __name__ == "__main__":
    main()
