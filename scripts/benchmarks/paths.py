"""Seconds of passes over trees that are evaluated path by path, by number of paths and by depth."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter

import numpy as np

from edgespec.loading.row_classes import tokens
from edgespec.loop.backend import Backend, Session, Work
from edgespec.loop.passes import prefill
from edgespec.loop.tree import IntArray

TEXT = 200  # tokens before the first pass


@dataclass(frozen=True, slots=True)
class Shape:
    """A root with so many branches, each so deep; none: plain decoding."""

    paths: int
    depth: int

    @property
    def parents(self) -> IntArray:
        """Of all nodes, [1 + paths * depth]."""
        found = [-1]
        for _ in range(self.paths if self.depth else 0):
            found += [0, *range(len(found), len(found) + self.depth - 1)]
        return np.array(found, np.int32)


def shapes(paths: Sequence[int], depths: Sequence[int]) -> list[Shape]:
    """Plain decoding, then all of these."""
    return [Shape(1, 0), *(Shape(count, depth) for count in paths for depth in depths)]


def measure(
    backends: Mapping[str, Backend],
    tried: Sequence[Shape],
    *,
    accepted: int,
    rounds: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, dict[Shape, float]]:
    """The median seconds of a pass of each shape in each backend, by turns; shapes of too many paths are left out.

    Args:
        backends: name -> a backend with a free session.
        tried: shapes of trees.
        accepted: guesses that are right in each pass, as far as a tree is deep: the root and they are text after it,
            and owed where a path goes on behind them.
        rounds: passes of each shape.
        progress: called with passes done, and in all.
    """
    sessions = {name: backend.open() for name, backend in backends.items()}
    seconds: dict[str, dict[Shape, list[float]]] = {name: {} for name in backends}
    done, total = 0, len(tried) * len(backends)
    for shape in tried:
        for name, backend in backends.items():
            if shape.paths <= backend.capabilities.max_leaves:
                seconds[name][shape] = _passes(backend, sessions[name], shape, accepted, rounds)
            done += 1
            progress(done, total)
    for session in sessions.values():
        session.close()
    return {name: {shape: median(taken) for shape, taken in found.items()} for name, found in seconds.items()}


def _passes(backend: Backend, session: Session, shape: Shape, accepted: int, rounds: int) -> list[float]:
    """Of which the first, that starts behind a prompt, is not counted."""
    prefill(backend, session, tokens(backend, TEXT, seed=1))
    parents, found = shape.parents, list[float]()
    nodes = np.arange(len(parents), dtype=np.int32)
    for number in range(rounds + 1):
        drawn = np.array(tokens(backend, len(parents), seed=number), np.int32)
        started = perf_counter()
        backend.forward([Work(session, drawn, parents, nodes)])
        found.append(perf_counter() - started)
        session.commit(list(range(1 + min(accepted, shape.depth))))
    return found[1:]


def table(found: Mapping[Shape, float]) -> list[str]:
    """Lines for a person: a row for each number of paths, a column for each depth; times of plain decoding."""
    plain = found[Shape(1, 0)]
    paths = sorted({shape.paths for shape in found if shape.depth})
    depths = sorted({shape.depth for shape in found if shape.depth})
    lines = [f"plain {plain:.3f} s", "paths  " + "".join(f"{f'depth {depth}':>18}" for depth in depths)]
    for count in paths:
        cells = (found[Shape(count, depth)] for depth in depths)
        lines.append(f"{count:5}  " + "".join(f"{f'{one:.3f} s ({one / plain:.2f} x)':>18}" for one in cells))
    return lines
