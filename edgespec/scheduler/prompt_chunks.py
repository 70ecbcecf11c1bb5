"""Sizes of prompt chunks, of a target or a draft, so that other sequences do not wait long."""

import numpy as np

from edgespec.loop.backend import Capabilities, Work
from edgespec.loop.pass_times import PassTimes
from edgespec.loop.passes import Prefill
from edgespec.loop.shapes import TILE, whole_tiles

FIRST_CHUNK = 2 * TILE  # tokens, while no pass with a prompt was measured
LONGEST_WAIT = 0.25  # seconds; or two passes without a prompt, if they take longer
WRITING = 0.25  # time of passes without a prompt, in that of chunks, where both cannot share passes


def can_share_passes(limits: Capabilities) -> bool:
    exact = limits.exact
    return exact is None or (exact.is_one_class and not exact.blocks)


class PromptChunks:
    def __init__(self) -> None:
        self._times = PassTimes(slope=1.0)
        self.tree_seconds = 0.0
        self._owed = 0.0

    def learn(self, nodes: int, seconds: float, *, prompt: bool) -> None:
        if prompt:
            self._times.add(nodes, seconds)
            self._owed = WRITING * seconds
        else:
            self.tree_seconds = seconds
            self._owed -= seconds

    @property
    def must_write(self) -> bool:
        """Sequences that write have had too little time since the last chunk."""
        return self._owed > 0

    def rows(self, reading: Prefill, room: int) -> int:
        """Of `room` rows of a pass, those that trees leave to the next chunk."""
        return min(TILE, reading.unread, room // 2) + reading.session.unread_committed

    def next(self, reading: Prefill, taken: int = 0, *, single: bool) -> Work:
        """
        Args:
            reading: a prompt of the target or of a draft.
            taken: rows of the pass that trees take.
            single: no other sequence waits for this pass, so the chunk may be as long as fits.
        """
        limits, start = reading.backend.capabilities, reading.resume()
        room = limits.max_nodes - taken
        if limits.exact:
            room = min(room, limits.exact.prompts.most - taken - reading.session.unread_committed)
        size = room if single or limits.streams else min(room, self.fast(taken, limits.max_nodes))
        end, whole = start + size, len(reading.token_ids)
        if end < whole and whole_tiles(end) > start:
            end = whole_tiles(end)
        if limits.exact and whole - end < limits.exact.prompts.least and whole - start <= room:
            end = whole  # a pass over the rest would be padded
        return reading.work(end - start)

    def fast(self, taken: int, most: int) -> int:
        """Tokens of a prompt, at most `most` rounded up to tiles, that a pass with `taken` other rows reads in time."""
        curve = self._times.at(0)
        if curve is None:
            return FIRST_CHUNK
        sizes = np.arange(TILE, most + TILE, TILE)
        fast = curve.seconds(sizes + taken) <= max(LONGEST_WAIT, 2 * self.tree_seconds)
        return TILE * max(1, int(np.count_nonzero(fast)))
