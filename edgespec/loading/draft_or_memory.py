"""A draft may force its target out of memory: both ways are tried once, and the result is remembered."""

from collections.abc import Callable
from itertools import accumulate, repeat
from operator import mul

from edgespec.loading.pair import bytes_forced_out, close_all, open_backends
from edgespec.loading.timed_pass import time_pass
from edgespec.loop.backend import Backend
from edgespec.loop.engines import LoadOptions, Progress
from edgespec.machine.measurements import identity, machine, recall
from edgespec.machine.measurements import remember as keep
from edgespec.models.registry import Entry, find_model, local_path

RIGHT = 0.75  # share of draft tokens that are accepted: high, so that a draft is seldom left out
DEEPEST = 16
GRAIN = 1 << 27  # bytes: smaller differences of streamed weights are one case


def open_pair(
    entry: Entry,
    draft: str | None,
    models_file: str | None,
    options: LoadOptions,
    *,
    leave_out: bool,
    remember: bool,
    progress: Progress | None = None,
    say: Callable[[str], None],
) -> list[Backend]:
    """As `open_backends`, but a draft that forces its target out of memory and makes it slower is left out.

    Args:
        leave_out: allow that; else the draft is always loaded.
    """

    def opened(draft: str | None) -> list[Backend]:
        return open_backends(entry, draft, models_file, options, remember=remember, progress=progress, say=say)

    both = opened(draft)
    if not (leave_out and draft and (missing := bytes_forced_out(both[0]))):
        return both
    paths = [local_path(source, fetch=False) for source in (entry.target, find_model(draft, models_file).target)]
    about = {
        "kind": "draft or memory", "machine": machine(), "target": identity(paths[0]), "draft": identity(paths[1]),
        "missing": str(missing // GRAIN), "exact": str(options.exact),
    }  # fmt: skip
    known = recall(about) if remember else None
    try:
        if known is None:
            say("the draft takes the memory that the target lacks: finding out whether it is worth that, once")
        drafted, plain = known or (predicted_speed(*both), 0.0)
    except BaseException:
        close_all(both)
        raise
    if known and drafted >= plain:
        return both
    close_all(both)
    alone = opened(None)
    try:
        plain = plain or 1 / time_pass(alone[0], 1).seconds
        if known is None and remember:
            keep(about, [drafted, plain])
    except BaseException:
        close_all(alone)
        raise
    if drafted >= plain:
        close_all(alone)
        return opened(draft)
    alone[0].notes = [
        *alone[0].notes,
        f"the draft is left out: with it {missing / 1e9:.2f} GB would be read in every pass: {drafted:.1f} tokens/s "
        f"are predicted, without it {plain:.1f}; --planner specexec uses it all the same",
    ]
    return alone


def predicted_speed(target: Backend, draft: Backend) -> float:
    seconds, step = (time_pass(backend, 1).seconds for backend in (target, draft))
    tokens = accumulate(accumulate(repeat(RIGHT, DEEPEST), mul, initial=1.0))
    return max(count / (seconds + depth * step) for depth, count in enumerate(tokens))
