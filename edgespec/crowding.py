"""A draft that takes the memory in which its target would have fitted: is it worth that?

With it weights are read from disk in every pass, without it none. What passes take with it is measured; of that the
target waits for the disk for a part, and the rest is about what a pass takes where all is in memory.
"""

from collections.abc import Callable
from itertools import accumulate, repeat
from operator import mul
from time import perf_counter
from typing import Any

import numpy as np

from edgespec.backend import Backend, Work
from edgespec.loading import close_all, crowding, open_backends
from edgespec.models.registry import Entry, find_model, local_path

RIGHT = 0.75  # of a draft's tokens, the share that is right: rather too many, for a draft is seldom left out
DEEPEST = 16


def open_best(
    entry: Entry,
    draft: str | None,
    models_file: str | None,
    *,
    leave_out: bool,
    say: Callable[[str], None],
    **options: Any,
) -> list[Backend]:
    """As `open_backends`, without the draft where it crowds the target out of memory and is foretold to lose by that.

    Args:
        entry: the target.
        draft: as for `open_backends`.
        models_file: as for `open_backends`.
        leave_out: whether it may be left out; else nothing is measured.
        say: told, as a line, what takes some seconds.
        options: of `open_backends`.
    """
    backends = open_backends(entry, draft, models_file, say=say, **options)
    if not (leave_out and draft):
        return backends
    if not crowding(backends[0], local_path(find_model(draft, models_file).target, fetch=False)):
        return backends
    try:
        say("finding out whether the draft is worth its memory")
        drafted, plain = foretold(*backends)
    except BaseException:
        close_all(backends)
        raise
    if drafted >= plain:
        return backends
    close_all(backends)
    backends = open_backends(entry, None, models_file, say=say, **options)
    backends[0].notes = [
        *backends[0].notes,
        f"the draft is left out: with it weights have to be read in every pass, so that {drafted:.1f} tokens/s are "
        f"foretold, without it {plain:.1f}; --planner specexec uses it all the same",
    ]
    return backends


def foretold(target: Backend, draft: Backend) -> tuple[float, float]:
    """Tokens per second with the draft, at best, and of plain decoding where all of the target is in memory."""
    (seconds, waited), (step, _) = time_pass(target), time_pass(draft)
    tokens = accumulate(accumulate(repeat(RIGHT, DEEPEST), mul, initial=1.0))  # of a pass with 0, 1, 2 … guesses
    drafted = max(count / (seconds + depth * step) for depth, count in enumerate(tokens))
    return drafted, 1 / max(1e-9, seconds - waited)


def time_pass(backend: Backend) -> tuple[float, float]:
    """Seconds of a pass over one node, the quicker of two after one that does not count, and its wait for weights."""
    session, found = backend.open(), list[tuple[float, float]]()
    node = np.zeros(1, np.int32)
    for _ in range(3):
        waited, started = backend.wait_seconds, perf_counter()
        backend.forward([Work(session, node, node - 1, node)])
        found.append((perf_counter() - started, backend.wait_seconds - waited))
        session.rewind(0)
    session.close()
    return min(found[1:])
