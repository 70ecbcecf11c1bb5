"""How much of a prompt is read in one pass while others write: those shall not wait long."""

import numpy as np

from edgespec.loop.pass_times import PassTimes
from edgespec.loop.shapes import TILE

FIRST_PIECE = 2 * TILE  # tokens of a prompt's part while others write and no such pass was measured yet
LONGEST_WAIT = 0.25  # seconds that those who write wait for a part of another's prompt, or as long as their own pass


class PromptPieces:
    """Learns what passes with parts of prompts take."""

    def __init__(self) -> None:
        self._cost = PassTimes(slope=1.0)
        self.tree_seconds = 0.0  # of the last pass without a prompt

    def add(self, nodes: int, seconds: float, *, prompt: bool) -> None:
        """A pass over so many nodes, with a part of a prompt or without."""
        if prompt:
            self._cost.add(nodes, seconds)
        else:
            self.tree_seconds = seconds

    def quick(self, taken: int, most: int) -> int:
        """Tokens of a prompt, at most so many, that can be read besides the rows that are taken, in a moment."""
        curve = self._cost.at(0)
        if curve is None:
            return FIRST_PIECE
        sizes = np.arange(TILE, most + TILE, TILE)
        quick = curve.seconds(sizes + taken) <= max(LONGEST_WAIT, 2 * self.tree_seconds)
        return TILE * max(1, int(np.count_nonzero(quick)))
