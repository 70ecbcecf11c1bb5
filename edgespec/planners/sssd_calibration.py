"""Placeholder until fitted."""

from edgespec.tree import Source

WEIGHTS: dict[Source, list[tuple[float, float, float, float]]] = {
    Source.INPUT: [(-2.0 + 0.5 * n, 0.7, 0.0, 0.2) for n in range(6)],
    Source.DATASTORE: [(-1.0 + 0.2 * n, 0.9, 0.0, 0.0) for n in range(6)],
}
