"""Refusals of what the approximate methods, `--cascade` and `--sparse-attention`, cannot do."""

from collections.abc import Sequence

from edgespec.errors import UsageError, check_number
from edgespec.planners.choice import find_method


def check_alpha(cascade: float | None) -> float:
    """
    Returns:
        Alpha; 0: texts are exact.

    Raises:
        UsageError: it is out of range.
    """
    return check_number("cascade", 0.0 if cascade is None else cascade, lambda alpha: 0 <= alpha <= 1, "from 0 to 1")


def methods(alpha: float, share: float | None) -> list[str]:
    """The options that are given, of a cascade with `alpha`, and of attention to a `share`."""
    return [option for option, value in (("--cascade", alpha), ("--sparse-attention", share)) if value]


def check_approximate(
    alpha: float, share: float | None, draft: str | None, planners: Sequence[str], exact: str | None, ahead: bool | None
) -> None:
    """
    Args:
        alpha: as for `methods`.
        share: likewise.
        draft: as for `edgespec.load`; None: there is none.
        planners: names of planners.
        exact: as for `edgespec.load`.
        ahead: likewise.

    Raises:
        UsageError: both methods are given, or one with what it cannot do.
    """
    given = methods(alpha, share)
    if given[1:]:
        raise UsageError(f"{' and '.join(given)} are both approximate: give one of them")
    for option in given:
        if not draft:
            raise needs_a_model(option)
        if exact not in (None, "off"):
            raise UsageError(
                f"--exact {exact} asks for the text of plain decoding, {option} for another: leave one out"
            )
        wrong = [name for name in planners if find_method(name).ahead or (share and not find_method(name).draft)]
        for one in (["--ahead"] if ahead else []) + [f"the planner {name}" for name in wrong]:
            raise UsageError(f"{one} does not go with {option}, for which the draft reads first, and then waits")


def needs_a_model(option: str, draft: str = "") -> UsageError:
    """The error for a draft that is a head, or layers of the target; "": there is none."""
    why, argument = f", and {draft} is none" if draft else "", option.removeprefix("--").replace("-", "_")
    return UsageError(
        f"{option} needs a draft model of its own{why}: name one with --draft (draft=…), or leave out {option} "
        f"({argument}=…)"
    )
