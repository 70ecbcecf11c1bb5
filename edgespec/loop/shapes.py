"""Row classes: batch sizes whose rows are bit-identical."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

# llama.cpp's GGML_FA_TILE_KV (ggml-cpu/common.h): passes of TILE rows or more add up attention in tiles of TILE cells.
# Prompts of all engines are cut at its multiples.
TILE = 64

ALWAYS = ((1, 1 << 30),)  # as `Capabilities.by_cell`: in passes of any number of rows


def whole_tiles(length: int) -> int:
    """The largest multiple of `TILE` that is at most `length`."""
    return length - length % TILE


@dataclass(frozen=True, slots=True)
class RowClass:
    """Numbers of rows that a pass may have, so that no bit of a row depends on this number or on other rows.

    Attributes:
        least: fewest rows; the backend pads shorter passes.
        most: most rows.
        step: rows are padded to a multiple of it: some kernels compute `step` rows together, and the rest singly.
    """

    least: int
    most: int
    step: int = 1

    def rows(self, count: int) -> int:
        """Number of rows, padding included, of a pass that needs `count`."""
        return max(self.least, -(-count // self.step) * self.step)


@dataclass(frozen=True, slots=True)
class BatchInvariance:
    """Row classes to which an engine keeps its passes.

    Attributes:
        name: "narrow": few rows; "wide": many rows; "any": one class for both.
        trees: class of passes over trees.
        prompts: class of passes over prompts; if it is another one, generated tokens of a prompt are read again.
        short: class of prompts with fewer tokens than `prompts.least`; only such prompts can reuse its cells.
        blocks: rows depend on each other: prompts are cut at multiples of `prompts.most`, and share no pass.
    """

    name: str
    trees: RowClass
    prompts: RowClass
    short: RowClass | None = None
    blocks: bool = False

    @property
    def is_one_class(self) -> bool:
        """Prompts and trees have one class."""
        return self.prompts == self.trees


@dataclass(slots=True)
class PromptRead:
    """The part of a session that was read as a prompt: another prompt can reuse only its cells.

    Attributes:
        tokens: number of the session's first tokens that were read so.
        short: they were read in the class `BatchInvariance.short`.
        reading: the session's nodes are the next of them.
    """

    tokens: int = 0
    short: bool = False
    reading: bool = False

    def as_dict(self) -> dict[str, Any]:
        """For a session's file."""
        return {"read": self.tokens, "short": self.short}

    def add(self, prompt: bool, short: bool, length: int) -> None:
        """Record that a work's nodes were evaluated after `length` committed tokens."""
        if length == 0:
            self.short = short
        self.reading = prompt and short == self.short

    def commit(self, length: int, count: int) -> None:
        """Record that `count` nodes were committed after `length` tokens."""
        if self.reading and self.tokens == length:
            self.tokens += count
        self.reading = False

    def rewind(self, length: int) -> None:
        """Keep at most the first `length` tokens."""
        self.tokens, self.reading = min(self.tokens, length), False

    def reusable_prefix(self, exact: BatchInvariance | None, length: int, short: bool) -> int:
        """`Session.reusable_prefix`: keys and values that were computed in another class have other bits."""
        if exact is None or exact.is_one_class:
            return length
        length = min(self.tokens, length) if short == self.short else 0
        return length - length % exact.prompts.most if exact.blocks else length


def also_wanted(wanted: Sequence[int], rows: int, shape: RowClass) -> list[int]:
    """
    Args:
        wanted: rows whose logits are needed.
        rows: number of rows of the pass, padding included.
        shape: the class of trees, also in a prompt's pass: a prompt has one wanted row, after which its layers end.

    Returns:
        Rows whose logits are computed only to keep the output matrix in the row class, too.
    """
    missing = shape.rows(len(wanted)) - len(wanted)
    if missing == 0 or len(wanted) == 0:
        return []
    needed = set(wanted)
    return [row for row in range(rows) if row not in needed][-missing:]
