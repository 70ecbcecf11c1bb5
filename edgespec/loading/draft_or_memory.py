"""A draft may take memory that its target needs: the way that is faster by prediction is loaded, with it or without.

Where the predictions are close, both ways are tried once. Measured speeds are remembered, and replace predictions.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, repeat
from operator import mul
from typing import Any

import numpy as np

from edgespec.errors import NoRoom, undone
from edgespec.loading.exact import COLD
from edgespec.loading.pair import PairPlan, close_all, load_pair, plan_pair, remembered_paces
from edgespec.loading.row_classes import TriedClasses, find
from edgespec.loading.timed_pass import time_pass
from edgespec.loop.backend import Backend
from edgespec.loop.engines import LoadOptions, Progress, find_engine
from edgespec.loop.pass_times import STEEP, PassTimes, distinct
from edgespec.loop.passes import most_nodes
from edgespec.machine import measurements
from edgespec.machine.files import weight_files
from edgespec.machine.measurements import Amount, identity, processor_name, recall
from edgespec.machine.system import machine_is_busy
from edgespec.models.registry import Entry
from edgespec.planners.auto import HEAVY, AutoState, Share
from edgespec.weights.plan import Plan, two_digits
from edgespec.weights.ring import measure_disk

AGREEMENT = 0.7  # share of draft tokens that are accepted, until it is known
DEEPEST = 16  # draft tokens
CLOSE = 1.25  # ratio of speeds up to which both ways are tried, and from which on a measurement contradicts another
GRAIN = 1 << 27  # bytes: smaller differences of weights that are read are one case
ROWS = 8  # of the larger pass that is timed
LONG = 32  # passes, after which a draft that was not used is known to be of no use
# Share of missing experts that are read while the layer before theirs is computed, since its router foresees them
# (docs/measured.md); PyTorch foresees none.
FORESEEN = 2 / 3
# Share of all experts that pools hold, and share of the chosen ones that are among them: docs/measured.md.
HELD, FOUND = (0.0, 0.125, 0.25, 0.375, 0.5, 1.0), (0.0, 0.65, 0.83, 0.92, 0.96, 1.0)

Learn = Callable[[AutoState], None]


@dataclass(frozen=True, slots=True)
class Speeds:
    """Tokens per second with the draft and without it; 0: not known.

    Attributes:
        timed: False: nothing is known but what the disk allows.
    """

    drafted: float = 0.0
    plain: float = 0.0
    timed: bool = True

    @property
    def how(self) -> str:
        return "about" if self.timed else "at most"

    @property
    def are_known(self) -> bool:
        return self.drafted > 0 and self.plain > 0

    @property
    def are_close(self) -> bool:
        return max(self.drafted, self.plain) < CLOSE * min(self.drafted, self.plain)


@dataclass(frozen=True, slots=True)
class Ways:
    """Both ways to load a pair whose draft takes memory that the target needs.

    Attributes:
        pair, target: plans with the draft and without it.
        missing: bytes that each pass reads more with the draft.
        about: key of what is remembered; made before the run, as files may be replaced or deleted in it.
    """

    pair: PairPlan
    target: PairPlan
    missing: int
    about: dict[str, Any]

    @property
    def target_fits(self) -> bool:
        """Without the draft nothing is read."""
        return _read(self.target) == 0

    @property
    def has_pools(self) -> bool:
        return bool(self.pair.plan and self.pair.plan.weights.pools)

    def recalled(self) -> Speeds:
        """Remembered speeds."""
        return Speeds(*recall(self.about, tuple[Amount, Amount]) or ())

    def remember(self, speeds: Speeds) -> None:
        measurements.remember(self.about, [speeds.drafted, speeds.plain])

    def speeds(self, *, remember: bool, say: Callable[[str], None], disk: float = 0.0) -> Speeds:
        """Remembered speeds, else predicted ones.

        Args:
            remember: as for `edgespec.load`.
            say: as for `edgespec.load`.
            disk: bytes per second; 0: they are measured, if they are not remembered.
        """
        known = self.recalled() if remember else Speeds()
        name, (path, draft), plan = self.pair.names[0], self.pair.paths, self.pair.plan
        assert plan
        assert self.target.plan
        if known.are_known or (plan.weights.cached and not (plan.weights.pools and plan.weights.used)):
            return known  # how many experts a pass reads is not known
        found = find(name, plan.build, plan.ways[-1], path, remember=remember, say=say)
        timed = any(tried.seconds for tried in found)
        if not timed and (known.drafted or known.plain or not plan.weights.pools):
            return known
        agreement = _agreement(path, draft) if remember else AGREEMENT
        draft_size = plan.weights.draft_reads or sum(file.stat().st_size for file in weight_files(draft))
        disk = disk or measure_disk(list(map(str, weight_files(path))), plan.weights)
        speeds = predict(plan.weights, self.target.plan.weights, draft_size, found, disk, agreement)
        if not timed and speeds.drafted > speeds.plain:
            return known
        return Speeds(known.drafted or speeds.drafted, known.plain or speeds.plain, timed)


def ways_of(pair: PairPlan, target: Callable[[], PairPlan]) -> Ways | None:
    """
    Args:
        pair: the plan with a draft.
        target: makes the plan without it.

    Returns:
        Both; None if the draft takes no memory that the target needs.
    """
    if not pair.paths[1:] or not _read(pair):
        return None
    other = target()
    missing = _read(pair) - _read(other)
    if missing <= 0:
        return None
    about = {
        "kind": "draft or memory", "machine": processor_name(), "target": identity(pair.paths[0]),
        "draft": identity(pair.paths[1]), "missing": str(missing // GRAIN), "exact": str(pair.options.exact),
    }  # fmt: skip
    return Ways(pair, other, missing, about)


def _read(pair: PairPlan) -> int:
    weights = pair.plan.weights if pair.plan else None
    return weights.read_bytes if weights else 0


def predict(
    weights: Plan, without: Plan | None, draft_size: int, found: TriedClasses, disk: float, agreement: float = AGREEMENT
) -> Speeds:
    """
    Args:
        weights: what stays of the target in memory with the draft.
        without: the same without the draft; None: all.
        draft_size: bytes of weights that a pass of the draft reads.
        found: row classes of the target; if none is timed, computing takes no time.
        disk: bytes per second.
        agreement: share of draft tokens that are accepted.
    """
    experts = (weights.experts, weights.used) if weights.pools else None
    computing = PassTimes(HEAVY if experts else STEEP, experts)
    for tried in found:
        if tried.seconds:
            computing.add(tried.least, COLD * weights.layers * tried.seconds)
    if not computing.measured:
        computing.add(1, 0.0)
    times = computing.at(0)
    assert times

    def seconds(plan: Plan | None, nodes: int) -> float:
        """Layers are read while others are computed, experts in part."""
        took = float(times.seconds(nodes))
        if not plan:
            return took
        missing = _missing(plan, nodes)
        meanwhile = plan.streamed_bytes + FORESEEN * missing
        return max(took, meanwhile / disk) + (1 - FORESEEN) * missing / disk

    inactive = weights.cached_bytes * (1 - weights.used / weights.experts if experts else 0)
    active = weights.total_bytes - weights.head_bytes - inactive
    step = times.plain * draft_size / active
    return Speeds(_speed(partial(seconds, weights), step, agreement), 1 / seconds(without, 1))


def _missing(plan: Plan, nodes: int) -> float:
    """Bytes of experts that a pass is expected to read."""
    if not plan.pools:
        return 0.0
    missing = 1 - float(np.interp(plan.share_of_experts, HELD, FOUND))
    return missing * plan.cached_bytes * float(distinct(nodes, plan.experts, plan.used)) / plan.experts


def _speed(seconds: Callable[[int], Any], step: float, agreement: float) -> float:
    """Tokens per second with the number of draft tokens that pays most.

    Args:
        seconds: of the target's pass over a number of nodes.
        step: seconds of a draft pass.
        agreement: share of draft tokens that are accepted.
    """
    tokens = accumulate(accumulate(repeat(agreement, DEEPEST), mul, initial=1.0))
    return max(count / (float(seconds(1 + depth)) + depth * step) for depth, count in enumerate(tokens))


def _agreement(target: str, draft: str) -> float:
    came, hoped = next((one["value"]["agreement"] for one in remembered_paces(target, draft)), (0.0, 0.0))
    return min(1.0, Share(1.0, came, hoped).value(AGREEMENT))


def timed(backends: list[Backend], agreement: float) -> float:
    """Tokens per second of a loaded target and its draft, if any, by passes that are timed now."""
    target, *drafts = backends
    times = PassTimes()
    for rows in (1, *([min(ROWS, most_nodes(target.capabilities, 0))] if drafts else [])):
        times.add(rows, time_pass(target, rows).seconds)
    curve = times.at(0)
    assert curve
    return _speed(curve.seconds, time_pass(drafts[0], 1).seconds, agreement) if drafts else 1 / curve.plain


def measured(pace: AutoState, *, drafted: bool) -> float:
    """Tokens per second by the passes of a run; 0: not known."""
    times, draft = pace.times(0), pace.draft.at(0)
    if not times or not pace.ledger().plain:
        return 0.0
    if not drafted:
        return 1 / times.plain
    if draft:
        return _speed(times.seconds, draft.plain, pace.agreement.value(AGREEMENT))
    return 1 / times.plain if pace.target.measured >= LONG else 0.0


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
) -> tuple[list[Backend], Learn]:
    """As `open_backends`, but a draft that has no room, or takes memory of its target and makes it slower, is left out.

    Args:
        entry: the target.
        draft: as for `open_backends`.
        models_file: as for `open_backends`.
        options: as for `open_backends`.
        leave_out: allow that; else the draft is always loaded.
        remember: as for `edgespec.load`.
        progress: as for `edgespec.load`.
        say: as for `edgespec.load`.

    Returns:
        The models, and a function that learns from what a run has measured.
    """

    def planned(with_draft: bool) -> PairPlan:
        return plan_pair(entry, draft if with_draft else None, models_file, options, say=say)

    def loaded(with_draft: bool) -> list[Backend]:
        plan = plans.get(with_draft) or planned(with_draft)
        plans.clear()  # what is loaded takes memory
        return load_pair(plan, remember=remember, progress=progress, say=say)

    busy, plans = machine_is_busy(), dict[bool, PairPlan]()
    ways, note = None, ""
    try:
        plans[True] = planned(True)
        ways = ways_of(plans[True], lambda: planned(False)) if leave_out else None
        if ways is None:
            return loaded(True), lambda pace: None  # without a plan of the weights, only loading shows whether they fit
    except NoRoom as error:
        if not leave_out or draft is None:
            raise
        note = no_room(error)
    if ways is None:  # the traceback of the error is gone, and with it what was loaded
        return add_note(loaded(False), note), lambda pace: None
    plans[False] = ways.target
    known = ways.recalled() if remember else Speeds()
    speeds = ways.speeds(remember=remember, say=say)
    undecided = speeds.are_close if speeds.are_known else ways.target_fits
    undecided &= ways.target_fits or not ways.has_pools  # passes of empty pools show nothing
    if undecided and not known.are_known and not busy:
        say("the draft takes memory that the target needs: trying both ways, once")
        agreement = _agreement(*ways.pair.paths) if remember else AGREEMENT
        backends, speeds = _try_both(loaded, agreement, first=speeds.drafted > speeds.plain)
        if remember:
            ways.remember(speeds)
    else:
        backends = loaded(speeds.drafted > speeds.plain if speeds.are_known else not ways.target_fits)
    if not backends[1:]:
        figures = ""
        if speeds.drafted == speeds.plain > 0:
            figures = ", and an earlier run did not use it"
        elif speeds.are_known:
            drafted, plain = map(two_digits, (speeds.drafted, speeds.plain))
            figures = f": {speeds.how} {drafted} tokens/s with it, {plain} without"
        what = "experts, of which passes" if ways.has_pools else "weights, which every pass"
        add_note(
            backends,
            f"the draft is left out: it takes the memory of {ways.missing / 1e9:.2f} GB of {what} would read{figures}; "
            "--planner specexec uses it all the same",
        )

    def learn(pace: AutoState) -> None:
        """Remember the speed of a run; one that contradicts what is remembered shows that the other is old, too.

        A draft that `auto` does not use is left out of the next run, so that its memory is the target's.
        """
        drafted = len(backends) > 1
        speed, known = measured(pace, drafted=drafted), ways.recalled()
        unused = drafted and pace.target.measured >= LONG and speed <= measured(pace, drafted=False)
        before = known.drafted if drafted else known.plain if known.plain != known.drafted else 0.0
        agrees = before > 0 and max(speed, before) < CLOSE * min(speed, before)
        if not remember or busy or not speed or (agrees and not unused):
            return
        known = Speeds() if before and not agrees else known
        if unused:  # with more memory the target is at least as fast: equal speeds say that only
            known = replace(known, plain=max(known.plain, speed))
        ways.remember(replace(known, drafted=speed) if drafted else replace(known, plain=speed))

    return backends, learn


def planned_bytes(
    entry: Entry, draft: str | None, models_file: str | None, options: LoadOptions, *, leave_out: bool
) -> int:
    """Bytes of this machine's memory that `open_pair` takes at most; arguments and errors as there.

    Where an engine cannot tell, those of the files.
    """
    try:
        pair = plan_pair(entry, draft, models_file, options)
    except NoRoom:
        if not leave_out or draft is None:
            raise
        pair = plan_pair(entry, None, models_file, options)
    files = {file for path in pair.paths for file in weight_files(path)}
    known = find_engine(pair.names[0]).memory_of(pair.plan) if pair.plan else 0
    return known or sum(file.stat().st_size for file in files)


def no_room(error: NoRoom) -> str:
    """The note on a draft with which its target does not fit."""
    return f"the draft is left out: with it {error}"


def add_note(backends: list[Backend], note: str) -> list[Backend]:
    backends[0].notes = [*backends[0].notes, note]
    return backends


def _try_both(
    loaded: Callable[[bool], list[Backend]], agreement: float, *, first: bool
) -> tuple[list[Backend], Speeds]:
    """Load and time both ways.

    Args:
        loaded: loads the models, with the draft or without it.
        agreement: share of draft tokens that are accepted.
        first: begin with the draft.

    Returns:
        The faster way, loaded, and both speeds.
    """
    found = dict[bool, float]()
    for drafted in (first, not first):
        backends = loaded(drafted)
        with undone(partial(close_all, backends)):
            found[drafted] = timed(backends, agreement)
        if drafted == first or found[first] >= found[drafted]:
            close_all(backends)
    speeds = Speeds(found[True], found[False])
    return loaded(first) if found[first] >= found[not first] else backends, speeds
