"""Self-drafting: a draft of some of its target's own layers, which share their weights and cells.

Draft & Verify (arXiv 2309.08168). Where weights are streamed, the layers that stay in memory draft (BlockLLM's
surrogates, arXiv 2404.18322), so a draft's pass reads nothing. Of tokens that the target has read, keys and values are
copied, not computed: with those of the target, the draft agrees much more often.
"""

from collections.abc import Collection, Iterable, Sequence
from copy import copy
from dataclasses import replace
from typing import Any, cast

import numpy as np

from edgespec.errors import ModelError
from edgespec.loop.backend import Capabilities, Work
from edgespec.loop.passes import check_batch, common_prefix
from edgespec.weights.plan import consecutive_layers

from .nodes import NodeSession


def limits_of(target: Capabilities) -> Capabilities:
    """
    Raises:
        ModelError: the target has recurrent layers.
    """
    if target.paths:
        raise ModelError("has recurrent layers, so its own layers cannot draft; use a draft model or a head")
    return replace(target, one_thread=True, streams=False, exact=None, states=0)


def kept_layers(count: int, streamed: Collection[int]) -> list[int]:
    """
    Returns:
        Numbers of the layers that draft: those that are not streamed, else three quarters.

    Raises:
        ModelError: all are streamed.
    """
    left_out = streamed or consecutive_layers(count, count // 4)
    kept = [number for number in range(count) if number not in left_out]
    if not kept:
        raise ModelError("none of its layers stays in memory, so none can draft; use more memory or a draft model")
    return kept


def shortened(layers: Sequence[Any], kept: Collection[int]) -> list[Any]:
    """The layers, but in the places of those that are left out copies that return what they get."""
    return [layer if number in kept else _left_out(layer) for number, layer in enumerate(layers)]


def _left_out(layer: Any) -> Any:
    made, kind = copy(layer), type(layer)
    made.__class__ = type(kind.__name__, (kind,), {"__call__": lambda self, states, *args, **options: states})
    return made


def taken_over(batch: Sequence[Work], limits: Capabilities, others: Iterable[NodeSession]) -> list[Work]:
    """What remains of a pass's works, after `OwnLayersSession.take_over`."""
    check_batch(batch, limits)
    return [cast(OwnLayersSession, work.session).take_over(work, others) for work in batch]


class OwnLayersSession(NodeSession):
    """A base, before the engine's own session class."""

    _copied = 0  # committed tokens, from the first on, whose cells are the target's

    def take_over(self, work: Work, others: Iterable[NodeSession]) -> Work:
        """Copy the cells of tokens that one of the target's sessions has read.

        Args:
            work: of the next pass.
            others: the target's sessions.

        Returns:
            What remains to be computed.
        """
        self.check(work)
        if self.nodes:
            return work
        length = len(self.token_ids)
        chain = work.parents == np.arange(-1, len(work.parents) - 1)
        chain[[*work.wanted, -1]] = False
        text = [*self.token_ids, *work.token_ids[: int(chain.argmin())].tolist()]
        shared = [(common_prefix(text, one.token_ids), one) for one in others]
        known, source = max(shared, key=lambda pair: pair[0], default=(0, self))
        if known > self._copied:
            self._take_cells(source, self._copied, known)
            self._copied = min(known, length)
        if (count := known - length) > 0:
            tokens, parents = work.token_ids, work.parents
            read = replace(work, token_ids=tokens[:count], parents=parents[:count], wanted=work.wanted[:0])
            self._add_nodes(read, self.check(read))
            work = replace(work, token_ids=tokens[count:], parents=parents[count:])
        return work

    def rewind(self, length: int) -> None:
        super().rewind(length)
        self._copied = min(self._copied, length)

    def _take_cells(self, source: Any, start: int, end: int) -> None: ...
