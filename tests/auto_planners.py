"""`auto` with planners that a test has made."""

from edgespec.loop.planner import Planner
from edgespec.planners.auto import AutoPlanner, AutoState, Candidate, Drafting


def auto_planner(
    name: str,
    state: AutoState,
    lookup: Planner | None = None,
    draft: Planner | None = None,
    *,
    eager: bool = True,
    goes_ahead: bool = False,
) -> AutoPlanner:
    """The planner that asks these two, either of which may be missing; arguments as for `AutoPlanner`, `Drafting`."""
    candidates = list[Candidate]()
    if lookup:
        candidates.append(Candidate(lookup, state))
    if draft:
        candidates.append(Drafting(draft, state, eager=eager, goes_ahead=goes_ahead))
    return AutoPlanner(name, state, candidates)
