"""Planners by name: one table, and making one.

A new planner is one file with a subclass of `loop.planner.Planner`, and one line of `PLANNERS`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from edgespec.errors import UsageError
from edgespec.loop.backend import Backend
from edgespec.loop.planner import Planner
from edgespec.planners.ahead import AheadChainPlanner, AheadPlanner
from edgespec.planners.auto import PATIENCE, AutoPlanner, AutoState
from edgespec.planners.candidates import Drafting, Lookup
from edgespec.planners.chain import ChainPlanner
from edgespec.planners.datastore import Datastore, open_datastore
from edgespec.planners.none import NonePlanner
from edgespec.planners.specexec import SpecExecPlanner
from edgespec.planners.sssd import SssdPlanner


@dataclass(frozen=True, slots=True)
class Parts:
    """What a planner may be made of."""

    target: Backend
    draft: Backend | None = None
    datastore_file: str | None = None
    state: AutoState | None = None  # None: the budget is fixed
    ahead: Mapping[str, Any] | None = None  # how the draft goes on while the target runs; None: it does not
    options: Mapping[str, Any] = field(default_factory=dict)  # of the planner

    def datastore(self) -> Datastore | None:
        """Opened for the target's vocabulary. Raises DatastoreError."""
        return open_datastore(Path(self.datastore_file), self.target.vocab) if self.datastore_file else None

    def drafting(self, usual: type[SpecExecPlanner], ahead: type[AheadPlanner]) -> Planner:
        """A planner with the draft, of the second class if it goes on while the target runs."""
        assert self.draft
        kind = usual if self.ahead is None else ahead
        return kind(self.draft, cost=self.state.draft if self.state else None, **self.ahead or {}, **self.options)


@dataclass(frozen=True, slots=True)
class Method:
    """A planner that users can name."""

    make: Callable[[Parts], Planner] | None = None  # None: `candidates` are made
    options: tuple[str, ...] = ()
    draft: bool = False  # it uses a draft model
    needs_draft: bool = False
    datastore: bool = False  # it uses a datastore
    candidates: tuple[str, ...] = ()  # planners that it asks, the cheapest first


SEARCH, COPY = ("depth", "beam", "tau", "coupling"), ("depth", "min_probability")
PLANNERS = {
    "auto": Method(None, (*SEARCH, "min_probability"), True, False, True, candidates=("sssd", "specexec")),
    "none": Method(lambda parts: NonePlanner()),
    "specexec": Method(lambda parts: parts.drafting(SpecExecPlanner, AheadPlanner), SEARCH, True, True),
    "sssd": Method(lambda parts: SssdPlanner(parts.datastore(), **parts.options), COPY, datastore=True),
    "chain": Method(
        lambda parts: parts.drafting(ChainPlanner, AheadChainPlanner), ("depth", "tau", "coupling"), True, True
    ),
}
USE_DRAFT = tuple(name for name, method in PLANNERS.items() if method.draft)
USE_DATASTORE = tuple(name for name, method in PLANNERS.items() if method.datastore)


def check_planner(name: str, has_draft: bool, has_datastore: bool, options: Mapping[str, Any]) -> None:
    """Refuse an unknown planner, one that lacks what it needs, and options it does not have or that are out of range.

    Raises:
        UsageError: with what would be right.
    """
    if name not in PLANNERS:
        raise UsageError(f"there is no planner {name!r}; there are: {', '.join(PLANNERS)}")
    if PLANNERS[name].needs_draft and not has_draft:
        raise UsageError(f"the planner {name} needs a draft model: give one with --draft (draft=…)")
    if has_datastore and not PLANNERS[name].datastore:
        raise UsageError(f"the planner {name} does not use a datastore; {' and '.join(USE_DATASTORE)} do")
    for option, value in options.items():
        if option not in PLANNERS[name].options:
            known = ", ".join(PLANNERS[name].options) or "none"
            raise UsageError(f"the planner {name} has no option {option!r}; its options: {known}")
        if option == "min_probability" and not 0 <= value < 1:
            raise UsageError(f"min_probability is {value}, but must be at least 0 and below 1")
        if option in ("depth", "beam", "tau") and not 0 < value < math.inf:
            raise UsageError(f"{option} is {value}, but must be a number above 0")


def make_planner(
    name: str,
    backends: Sequence[Backend],
    datastore: str | None = None,
    state: AutoState | None = None,
    *,
    sequences: int = 1,
    ahead: bool | None = None,
    top_up: bool = True,
    forks: int = 0,
    **options: Any,
) -> Planner:
    """Make a planner that `check_planner` lets pass, for backends = [target] or [target, draft].

    Args:
        name: one of `PLANNERS`.
        backends: loaded; the draft has a session for this planner.
        datastore: a file to copy from.
        state: pass times and gains, by which only what pays is proposed. None: always as much as the budget allows.
        sequences: that may be generated at once.
        ahead: the draft goes on while the target runs, with a state as long as that gains (`planners/guard.py`).
            Default: with a state, where the draft has a processor of its own.
        top_up: as for `AheadPlanner`.
        forks: as for `AheadPlanner`.
        options: of the planner.

    Raises:
        DatastoreError: the datastore does not fit the target, or is damaged.
        UsageError: `ahead` is asked for, and the draft cannot.
    """
    target, *drafts = backends
    if name == "auto" and state is None:
        copying = datastore is not None or target.capabilities.streams
        name = "specexec" if drafts else "sssd" if copying else "none"
    names = [one for one in PLANNERS[name].candidates or (name,) if drafts or not PLANNERS[one].needs_draft]
    goes = None
    if drafts and any(PLANNERS[one].draft for one in names):
        own = has_own_processor(target, drafts[0])
        if goes_ahead(ahead, own and state is not None, drafts[0]):
            goes = {"sequences": sequences, "top_up": top_up, "forks": forks, "nice": not own}
    parts = Parts(target, drafts[0] if drafts else None, datastore, state, goes)
    made = {one: _made(one, replace(parts, options=taken(one, options))) for one in names}
    if state is None or name == "none":
        return made[name]
    patience = PATIENCE if name == "auto" and not target.capabilities.streams else 0
    return AutoPlanner(name, state, [
        Drafting(planner, state, patience=patience, goes_ahead=goes is not None)
        if PLANNERS[one].draft
        else Lookup(planner, state)
        for one, planner in made.items()
    ])  # fmt: skip


def _made(name: str, parts: Parts) -> Planner:
    make = PLANNERS[name].make
    assert make, f"{name} is made of its candidates"
    return make(parts)


def has_own_processor(target: Backend, draft: Backend) -> bool:
    """Whether the draft computes where nothing of the target does."""
    places = [str(backend.computing.get("device", "")) for backend in (target, draft)]
    for i, backend in enumerate((target, draft)):
        if (layers := backend.computing.get("gpu_layers")) is not None:
            places[i] = "cpu" if layers == 0 else "gpu"
    return "" not in places and (places[0] == "cpu") != (places[1] == "cpu")


def goes_ahead(asked: bool | None, usual: bool, draft: Backend) -> bool:
    """Whether the draft may go on while the target runs. Raises UsageError: it is asked for, and cannot."""
    if asked and draft.capabilities.one_thread:
        raise UsageError(
            f"a draft on {draft.name} cannot go on while the target runs (--ahead): its passes are made in one thread"
        )
    return (usual if asked is None else asked) and not draft.capabilities.one_thread


def taken(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that a planner has."""
    return {option: value for option, value in options.items() if name in PLANNERS and option in PLANNERS[name].options}
