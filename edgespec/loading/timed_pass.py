"""Time passes of a loaded model."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter

import numpy as np

from edgespec.loading.row_classes import tokens
from edgespec.loop.backend import Backend, Work
from edgespec.loop.engines import ReadsExperts
from edgespec.loop.pass_times import FEW
from edgespec.loop.passes import most_nodes, prefill
from edgespec.planners.auto import AutoState

TIMED = (1, 8, 16, 32, 64)  # rows of passes where some compute tiles
TIMING = "timing passes of several sizes, once for this model on this machine"
TEXT_OF_MIXTURES = 24  # tokens before the passes: after an empty prompt most tokens choose the same experts


@dataclass(frozen=True, slots=True)
class Pass:
    """Times of a pass.

    Attributes:
        nodes: of the tree.
        seconds: for the whole pass.
        waited: seconds of the pass that waited for the disk.
        experts: number of different experts used per layer, if they are streamed.
        hits: share of these that was in memory.
        read: bytes of the others, from disk.
    """

    nodes: int
    seconds: float
    waited: float
    experts: float = 0.0
    hits: float = 0.0
    read: int = 0

    @property
    def limit(self) -> str:
        return "disk" if self.waited > 0.25 * self.seconds else "computing"


def time_tiles(paces: Sequence[AutoState], target: Backend, *drafts: Backend, say: Callable[[str], None]) -> None:
    """Learn how long passes with tiles take, unless that is known; no session is open.

    Args:
        paces: learn it; what the first one knows, the others know.
        target: the loaded target.
        drafts: the loaded draft, if there is one.
        say: called with a line before passes are timed.
    """
    limits = target.capabilities
    known = paces[0].target.at(0) if paces else None
    if not paces or not limits.tiled or most_nodes(limits, 0) <= FEW or (known and known.sizes[-1] > FEW):
        return
    say(TIMING)
    for nodes in TIMED:
        if nodes <= most_nodes(limits, 0):
            seconds = time_pass(target, nodes).seconds
            for pace in paces:
                pace.target.add(nodes, seconds)
        for draft in drafts:
            if not draft.capabilities.head and nodes <= most_nodes(draft.capabilities, 0):
                seconds = time_pass(draft, nodes).seconds
                for pace in paces:
                    pace.draft.add(nodes, seconds)


def time_pass(backend: Backend, nodes: int) -> Pass:
    """Time a pass over a chain of nodes, or of as many as the context holds."""
    mixture, room = backend.mixture if isinstance(backend, ReadsExperts) else None, backend.capabilities.context_length
    memory, start = (mixture.memory, min(TEXT_OF_MIXTURES, room - 1)) if mixture else (None, 0)
    nodes = min(nodes, room - start)
    session, chain = backend.open(), np.arange(nodes, dtype=np.int32)
    prefill(backend, session, tokens(backend, start, seed=9))
    found = []
    for seed in range(3):
        path = np.array(tokens(backend, nodes, seed), np.int32)
        before = memory.counted if memory else (0, 0, 0)
        waited, started = backend.wait_seconds, perf_counter()
        backend.forward([Work(session, path, chain - 1, chain)])
        made = Pass(nodes, perf_counter() - started, backend.wait_seconds - waited)
        if memory:
            wanted, hits, read = (now - then for now, then in zip(memory.counted, before, strict=True))
            made = replace(made, experts=wanted / len(memory.layers), hits=hits / max(1, wanted), read=read)
        found.append(made)
        session.rewind(start)
    session.close()
    # Without the first pass, which may be slower than others of its size.
    return min(found[1:], key=lambda one: one.seconds)
