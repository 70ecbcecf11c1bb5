"""Row classes: batch sizes whose rows are bit-identical."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

# Over this number of rows or more llama.cpp's attention adds up tiles, which have as many cells: GGML_FA_TILE_KV in
# ggml-cpu/common.h. Prompts of all engines are cut at multiples of it.
TILE = 64


def whole_tiles(length: int) -> int:
    """The most tokens in whole tiles, of `length`."""
    return length - length % TILE


@dataclass(frozen=True, slots=True)
class RowClass:
    """Numbers of rows a pass may have, so that no bit of a row depends on that number or on other rows."""

    least: int  # rows; the backend pads shorter passes
    most: int
    step: int = 1  # longer passes are padded to a multiple: some kernels take `step` rows together, the rest singly

    def rows(self, count: int) -> int:
        """Rows, with padding, of a pass that needs `count`."""
        return max(self.least, -(-count // self.step) * self.step)


@dataclass(frozen=True, slots=True)
class BatchInvariance:
    """Row classes to which an engine keeps its passes.

    Attributes:
        name: narrow: few rows; wide: many; any: the engine makes no difference worth a name.
        trees: of passes over trees.
        prompts: of passes over prompts; if another class, a prompt's part that was written is read again.
        short: of prompts that have fewer tokens than `prompts` has rows; cells do for such only.
        blocks: rows depend on each other: prompts are cut at multiples of `prompts.most`, and share no pass.
    """

    name: str
    trees: RowClass
    prompts: RowClass
    short: RowClass | None = None
    blocks: bool = False


@dataclass(slots=True)
class PromptRead:
    """The number of a session's first tokens that were read as a prompt. A prompt reuses cells of these alone."""

    tokens: int = 0
    short: bool = False  # in the class `BatchInvariance.short`
    reading: bool = False  # the session's nodes are the next of them

    @classmethod
    def of(cls, details: Mapping[str, Any]) -> Self:
        """Restore the state of `as_dict`."""
        return cls(details.get("read", 0), details.get("short", False))

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
        """See `Session.reusable_prefix`: tokens decoded, or prefilled in another class, differ in their bits."""
        if exact is None or exact.prompts == exact.trees:
            return length
        length = min(self.tokens, length) if short == self.short else 0
        return length - length % exact.prompts.most if exact.blocks else length


def also_wanted(wanted: Sequence[int], rows: int, shape: RowClass) -> list[int]:
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
