"""Planners by name: a new one is a subclass of `loop.planner.Planner` in its own file, and a line of `PLANNERS`.

Those of `LAB` gain nothing, or are approximate; without that folder their names are unknown.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from edgespec.errors import UsageError, check_flag, check_number, check_whole, no_such
from edgespec.loop.backend import Backend
from edgespec.loop.planner import Planner
from edgespec.planners.ahead import AheadChainPlanner, AheadPlanner
from edgespec.planners.auto import READ, AutoPlanner, AutoState, Candidate, Drafting
from edgespec.planners.chain import ChainPlanner
from edgespec.planners.datastore import Datastore, open_datastore, read_header
from edgespec.planners.none import NonePlanner
from edgespec.planners.specexec import SpecExecPlanner
from edgespec.planners.sssd import SssdPlanner


@dataclass(frozen=True, slots=True)
class Parts:
    """
    Attributes:
        target: a loaded model.
        draft: a loaded model.
        datastore: an open datastore.
        state: pass times and gains; None: the budget is fixed.
        ahead: further arguments of `AheadPlanner`; None: the draft does not go on while the target runs.
        options: of the planner.
    """

    target: Backend
    draft: Backend | None = None
    datastore: Datastore | None = None
    state: AutoState | None = None
    ahead: Mapping[str, Any] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def drafting(self, usual: type[SpecExecPlanner], ahead: type[AheadPlanner] | None = None) -> Planner:
        """A planner with the draft; `ahead` is its class where the draft goes on while the target runs."""
        assert self.draft
        kind, more = (ahead, self.ahead) if ahead and self.ahead is not None else (usual, {})
        return kind(self.draft, cost=self.state.draft if self.state else None, **more, **self.options)


@dataclass(frozen=True, slots=True)
class Method:
    """A line of `PLANNERS`.

    Attributes:
        make: makes the planner; not used where it has candidates.
        options: names of its options.
        draft: it can use a draft model.
        needs_draft: it cannot do without.
        datastore: it can use a datastore.
        candidates: names of the planners that it chooses from, the cheapest first.
        ahead: its draft goes on while the target runs, also where that is not asked for.
    """

    make: Callable[[Parts], Planner] = lambda parts: NonePlanner()
    options: tuple[str, ...] = ()
    draft: bool = False
    needs_draft: bool = False
    datastore: bool = False
    candidates: tuple[str, ...] = ()
    ahead: bool = False


SEARCH, CHAIN, COPY = ("depth", "beam", "tau", "coupling"), ("depth", "tau", "coupling"), ("depth", "min_probability")
PLANNERS = {
    "auto": Method(options=(*SEARCH, "min_probability"), draft=True, datastore=True, candidates=("sssd", "specexec")),
    "none": Method(),
    "specexec": Method(
        lambda parts: parts.drafting(SpecExecPlanner, AheadPlanner), SEARCH, draft=True, needs_draft=True
    ),
    "sssd": Method(lambda parts: SssdPlanner(parts.datastore, **parts.options), COPY, datastore=True),
    "chain": Method(lambda parts: parts.drafting(ChainPlanner, AheadChainPlanner), CHAIN, draft=True, needs_draft=True),
}
LAB = {  # name -> module, imported when it is asked for; nothing else outside of the lab may import it
    name: f"edgespec.lab.{name.replace('-', '_')}"
    for name in ("lookahead", "pearl", "specbranch", "cascade", "sparse-attention")
    if find_spec("edgespec.lab")
}
APPROXIMATE = [name for name in ("cascade", "sparse-attention") if name in LAB]
NAMES = (*PLANNERS, *(name for name in LAB if name not in APPROXIMATE))
CHECKS: Mapping[str, Callable[[str, Any], Any]] = {  # option -> refuses a wrong value
    "depth": partial(check_whole, low=1),
    "beam": partial(check_whole, low=1),
    "tau": partial(check_number, good=lambda tau: 0 < tau < math.inf, right="above 0"),
    "coupling": check_flag,
    "min_probability": partial(check_number, good=lambda least: 0 <= least < 1, right="at least 0 and below 1"),
}


def find_method(name: str) -> Method:
    """
    Raises:
        UsageError: there is no such planner.
    """
    if name in PLANNERS:
        return PLANNERS[name]
    if name not in NAMES:
        raise no_such("planner", name, NAMES)
    method = import_module(LAB[name]).METHOD
    assert isinstance(method, Method)
    return method


def with_draft(names: Iterable[str]) -> list[str]:
    """Those of these planners that can use a draft model; errors as of `find_method`."""
    return [name for name in names if find_method(name).draft]


def with_datastore(names: Iterable[str]) -> list[str]:
    """Those that can use a datastore."""
    return [name for name in names if find_method(name).datastore]


def check_planner(name: str, has_draft: bool, datastore: str | None, options: Mapping[str, Any]) -> None:
    """
    Raises:
        UsageError: no such planner or option, a missing draft, a datastore that is not used, or a value out of range.
        DatastoreError: the datastore cannot be read, or is none.
    """
    method = find_method(name)
    if method.needs_draft and not has_draft:
        raise UsageError(f"the planner {name} needs a draft model: give one with --draft (draft=…)")
    if datastore is not None and not method.datastore:
        raise UsageError(f"the planner {name} does not use a datastore; {', '.join(with_datastore(PLANNERS))} do")
    for option, value in options.items():
        if option not in method.options:
            known = ", ".join(method.options) or "none"
            raise UsageError(f"the planner {name} has no option {option!r}; its options: {known}")
        CHECKS[option](option, value)
    if datastore is not None:
        read_header(datastore)


def check_draft_options(has_draft: bool, ahead: bool | None, options: Mapping[str, Any]) -> None:
    """
    Raises:
        UsageError: an option is for a draft model, and none will be loaded.
    """
    if ahead and not has_draft:
        raise UsageError("ahead=True is for a draft model, which then runs ahead: name one with --draft (draft=…)")
    if "tau" in options and not has_draft:
        raise UsageError("--tau is for drafting with a draft model: name one with --draft (draft=…)")


def make_planner(
    name: str,
    backends: Sequence[Backend],
    datastore: str | None = None,
    state: AutoState | None = None,
    *,
    sequences: int = 1,
    ahead: bool | None = None,
    **options: Any,
) -> Planner:
    """Make a planner, after `check_planner`.

    Args:
        name: one of `NAMES`.
        backends: [target] or [target, draft], loaded; the draft has room for the planner's session.
        datastore: path of a datastore.
        state: pass times and gains, by which only draft tokens that pay are proposed; None: as many as the budget
            allows.
        sequences: number of sequences that are generated at once.
        ahead: the draft goes on while the target runs; with a state, with an account of its own (`planners/ledger.py`);
            default: with a state, where the draft has a processor of its own. `pearl` and `specbranch` always do so.
        options: of the planner.

    Raises:
        DatastoreError: the datastore does not fit the target, or is damaged.
        UsageError: `ahead` is asked for, and the draft cannot.
    """
    target, *drafts = backends
    if name == "auto" and state is None:
        copying = datastore is not None or target.capabilities.streams
        name = "specexec" if drafts else "sssd" if copying else "none"
    method = find_method(name)
    names = [one for one in method.candidates or (name,) if drafts or not find_method(one).needs_draft]
    drafting, goes = with_draft(names), None
    if drafts and drafting:
        own = has_own_processor(target, drafts[0])
        if goes_ahead(method.ahead or ahead, own and state is not None, drafts[0]):
            goes = {"sequences": sequences, "nice": not own}
    store = open_datastore(datastore, target.vocab) if datastore else None
    parts = Parts(target, drafts[0] if drafts else None, store, state, goes)
    found = {one: find_method(one).make(replace(parts, options=options_of(one, options))) for one in names}
    if state is None:
        return found[name]
    eager = name != "auto" or target.capabilities.streams
    head = drafts and drafts[0].capabilities.head
    read = min(READ, 1 / target.capabilities.layers) if head else READ  # a head is about a layer
    return AutoPlanner(name, state, [
        Drafting(planner, state, eager=eager, goes_ahead=isinstance(planner, AheadPlanner), read=read)
        if one in drafting
        else Candidate(planner, state)
        for one, planner in found.items()
        if one != "none"  # it proposes nothing; tokens that a grammar forces have an account without it, too
    ])  # fmt: skip


def has_own_processor(target: Backend, draft: Backend) -> bool:
    places = [str(backend.computing.get("device", "")) for backend in (target, draft)]
    for i, backend in enumerate((target, draft)):
        if (layers := backend.computing.get("gpu_layers")) is not None:
            places[i] = "cpu" if layers == 0 else "gpu"
    return "" not in places and (places[0] == "cpu") != (places[1] == "cpu")


def goes_ahead(asked: bool | None, usual: bool, draft: Backend) -> bool:
    """
    Returns:
        True if the draft may go on while the target runs.

    Raises:
        UsageError: it was asked for, and it may not.
    """
    if asked and draft.capabilities.one_thread:
        raise UsageError(
            f"a draft on {draft.name} cannot go on while the target runs (ahead=True): "
            "its passes are made in one thread"
        )
    return (usual if asked is None else asked) and not draft.capabilities.one_thread


def options_of(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    known = find_method(name).options
    return {option: value for option, value in options.items() if option in known}
