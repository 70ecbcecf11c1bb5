"""Shapes of passes that agree to the bit: what they are, and how passes are kept in them. `exact.py` finds them."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ShapeClass:
    """Numbers of rows a pass may have so that not a bit of a row depends on how many there are, or on the others."""

    least: int  # the backend pads shorter passes to so many rows
    most: int
    step: int = 1  # and others to a multiple of it: some kernels take so many rows together, and the rest one by one

    def rows(self, count: int) -> int:
        """Of a pass that needs so many: with padding."""
        return max(self.least, -(-count // self.step) * self.step)


@dataclass(frozen=True, slots=True)
class Exact:
    """How passes are kept in shapes that agree to the bit: `exact.py` finds them."""

    name: str  # narrow: few rows; wide: many; any: the engine makes no difference worth a name
    trees: ShapeClass  # of passes over trees
    prompts: ShapeClass  # of passes over prompts; if another class, a prompt's part that was written is read again
    short: ShapeClass | None = None  # of whole prompts of fewer rows than `prompts` has; their cells do for no other
    blocks: bool = False  # rows depend on each other: prompts are cut at multiples of `prompts.most`, and share no pass


def also_wanted(wanted: Sequence[int], rows: int, shape: ShapeClass) -> list[int]:
    """Further rows of a pass whose logits are computed, so that the output matrix is of the class, too, if it has any.

    Args:
        wanted: rows whose logits are needed.
        rows: of the pass, with padding.
        shape: its class.
    """
    missing = shape.rows(len(wanted)) - len(wanted)
    if missing == 0 or len(wanted) == 0:
        return []
    needed = set(wanted)
    return [row for row in range(rows) if row not in needed][-missing:]
