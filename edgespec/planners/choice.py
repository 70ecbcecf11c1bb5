"""Planners by name: which there are, what they need, and making one."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from edgespec.backend import Backend
from edgespec.errors import UsageError
from edgespec.planners import Planner
from edgespec.planners.chain import ChainPlanner
from edgespec.planners.datastore import open_datastore
from edgespec.planners.none import NonePlanner
from edgespec.planners.paced import Pace, PacedPlanner
from edgespec.planners.specexec import SpecExecPlanner
from edgespec.planners.sssd import SssdPlanner

# Planner -> the options it takes.
PLANNERS = {
    "auto": ("depth", "beam", "tau", "coupling", "keep", "min_probability"),
    "none": (),
    "specexec": ("depth", "beam", "tau", "coupling", "keep"),
    "sssd": ("depth", "min_probability"),
    "chain": ("depth", "tau", "coupling", "keep"),
}
NEED_DRAFT = ("specexec", "chain")
USE_DRAFT = ("auto", *NEED_DRAFT)
USE_DATASTORE = ("auto", "sssd")


def check_planner(name: str, has_draft: bool, has_datastore: bool, options: Mapping[str, Any]) -> None:
    """Refuse an unknown planner, one that lacks what it needs, and options it does not have or that are out of range.

    Raises:
        UsageError: with what would be right.
    """
    if name not in PLANNERS:
        raise UsageError(f"there is no planner {name!r}; there are: {', '.join(PLANNERS)}")
    if name in NEED_DRAFT and not has_draft:
        raise UsageError(f"the planner {name} needs a draft model: give one with --draft (draft=…)")
    if has_datastore and name not in USE_DATASTORE:
        raise UsageError(f"the planner {name} does not use a datastore; {' and '.join(USE_DATASTORE)} do")
    for option, value in options.items():
        if option not in PLANNERS[name]:
            known = ", ".join(PLANNERS[name]) or "none"
            raise UsageError(f"the planner {name} has no option {option!r}; its options: {known}")
        if option == "min_probability" and not 0 <= value < 1:
            raise UsageError(f"min_probability is {value}, but must be at least 0 and below 1")
        if option in ("depth", "beam", "tau") and not 0 < value < math.inf:
            raise UsageError(f"{option} is {value}, but must be a number above 0")
        if option == "keep" and value < 0:
            raise UsageError(f"keep is {value}, but must be a number of nodes, or 0")


def make_planner(
    name: str,
    backends: Sequence[Backend],
    datastore: str | None = None,
    pace: Pace | None = None,
    *,
    texts: int = 1,
    **options: Any,
) -> Planner:
    """Make a planner that `check_planner` lets pass, for backends = [target] or [target, draft].

    With a pace it guesses what pays; without one always as much as the budget allows. `texts` may be written at once.

    Raises:
        DatastoreError: the datastore does not fit the target, or is damaged.
    """
    if name == "none":
        return NonePlanner()
    target, *drafts = backends
    if name == "auto" and pace is None:
        copying = datastore is not None or target.capabilities.streams
        name = "specexec" if drafts else "sssd" if copying else "none"
        return make_planner(name, backends, datastore, texts=texts, **_taken(name, options))
    draft: SpecExecPlanner | None = None
    copies, cost = None, pace.draft if pace else None
    if name == "chain":
        draft = ChainPlanner(drafts[0], cost=cost, texts=texts, **options)
    elif name != "sssd" and drafts:
        draft = SpecExecPlanner(drafts[0], cost=cost, texts=texts, **_taken("specexec", options))
    if name in USE_DATASTORE:
        store = open_datastore(Path(datastore), target.vocab) if datastore else None
        copies = SssdPlanner(store, **_taken("sssd", options))
    if pace:
        return PacedPlanner(name, pace, copies, draft)
    planner: Planner | None = draft or copies
    assert planner is not None
    return planner


def _taken(planner: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the options that a planner has."""
    return {option: value for option, value in options.items() if option in PLANNERS[planner]}
