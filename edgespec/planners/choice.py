"""Planners by name: which there are, what they need, and making one."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from edgespec.errors import UsageError
from edgespec.loop.backend import Backend
from edgespec.loop.planner import Planner
from edgespec.planners.ahead import AheadChainPlanner, AheadPlanner
from edgespec.planners.auto import PATIENCE, AutoPlanner, AutoState
from edgespec.planners.chain import ChainPlanner
from edgespec.planners.datastore import open_datastore
from edgespec.planners.none import NonePlanner
from edgespec.planners.specexec import SpecExecPlanner
from edgespec.planners.sssd import SssdPlanner

# Planner -> the options it takes.
PLANNERS = {
    "auto": ("depth", "beam", "tau", "coupling", "min_probability"),
    "none": (),
    "specexec": ("depth", "beam", "tau", "coupling"),
    "sssd": ("depth", "min_probability"),
    "chain": ("depth", "tau", "coupling"),
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


def make_planner(
    name: str,
    backends: Sequence[Backend],
    datastore: str | None = None,
    pace: AutoState | None = None,
    *,
    texts: int = 1,
    ahead: bool | None = None,
    top_up: bool = True,
    forks: int = 0,
    **options: Any,
) -> Planner:
    """Make a planner that `check_planner` lets pass, for backends = [target] or [target, draft].

    With a pace it guesses what pays; without one always as much as the budget allows. `texts` may be written at once.
    `ahead`: the draft goes on while the target works, with a pace as long as it gains by that (`planners/guard.py`);
    default: with a pace, where it has a processor of its own. `top_up`, `forks`: as for `AheadPlanner`.

    Raises:
        DatastoreError: the datastore does not fit the target, or is damaged.
        UsageError: `ahead` is asked for, and the draft cannot.
    """
    if name == "none":
        return NonePlanner()
    target, *drafts = backends
    if name == "auto" and pace is None:
        copying = datastore is not None or target.capabilities.streams
        name = "specexec" if drafts else "sssd" if copying else "none"
        given: dict[str, Any] = {"texts": texts, "ahead": ahead, "top_up": top_up, "forks": forks}
        return make_planner(name, backends, datastore, **given, **_taken(name, options))
    draft: SpecExecPlanner | None = None
    copies = None
    if drafts and name != "sssd":
        own, cost = has_own_processor(target, drafts[0]), pace.draft if pace else None
        taken = _taken("chain" if name == "chain" else "specexec", options)
        if goes_ahead(ahead, own and pace is not None, drafts[0]):
            goes = AheadChainPlanner if name == "chain" else AheadPlanner
            draft = goes(drafts[0], cost=cost, texts=texts, top_up=top_up, forks=forks, nice=not own, **taken)
        else:
            draft = (ChainPlanner if name == "chain" else SpecExecPlanner)(drafts[0], cost=cost, **taken)
    if name in USE_DATASTORE:
        store = open_datastore(Path(datastore), target.vocab) if datastore else None
        copies = SssdPlanner(store, **_taken("sssd", options))
    if pace:
        patience = PATIENCE if name == "auto" and not target.capabilities.streams else 0
        return AutoPlanner(name, pace, copies, draft, patience)
    planner: Planner | None = draft or copies
    assert planner is not None
    return planner


def has_own_processor(target: Backend, draft: Backend) -> bool:
    """Whether the draft computes where nothing of the target does."""
    places = [str(backend.computing.get("device", "")) for backend in (target, draft)]
    for i, backend in enumerate((target, draft)):
        if (layers := backend.computing.get("gpu_layers")) is not None:
            places[i] = "cpu" if layers == 0 else "gpu"
    return "" not in places and (places[0] == "cpu") != (places[1] == "cpu")


def goes_ahead(asked: bool | None, usual: bool, draft: Backend) -> bool:
    """Whether the draft may go on while the target works. Raises UsageError: it is asked for, and cannot."""
    if asked and draft.capabilities.one_thread:
        raise UsageError(
            f"a draft on {draft.name} cannot go on while the target works (--ahead): its passes are made in one thread"
        )
    return (usual if asked is None else asked) and not draft.capabilities.one_thread


def _taken(planner: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the options that a planner has."""
    return {option: value for option, value in options.items() if option in PLANNERS[planner]}
