"""Approximate methods, as users write them: NAME, or NAME:VALUE. Their texts are not the target's own."""

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, ClassVar

from edgespec.errors import UsageError, check_text, must_be, no_such
from edgespec.loop.backend import Backend
from edgespec.loop.planner import Planner
from edgespec.planners.choice import APPROXIMATE, LAB, find_method


class Approximate:
    """A method, which a module of the lab has as `METHOD`.

    Attributes:
        name: as users write it.
        usual: value where none is given.
        right: values that are right, in words.
        mixed: as in `LoadOptions`.
        needs_draft: also of the planner, whose draft reads first.
    """

    name: ClassVar[str]
    usual: ClassVar[float]
    right: ClassVar[str]
    mixed: ClassVar[bool] = False
    needs_draft: ClassVar[bool] = False

    def __init__(self, value: float) -> None:
        self.value = value

    @property
    def options(self) -> dict[str, Any]:
        """Fields of `LoadOptions`."""
        return {"approximate": f"{self.name}:{self.value!r}", "mixed": self.mixed}

    @staticmethod
    def is_right(value: float) -> bool:
        return True

    def check_engines(self, names: Sequence[str]) -> None:
        """
        Raises:
            UsageError: it does not go with engines of these names, of target and draft.
        """

    def attach(self, target: Backend, draft: Backend, *, remember: bool, say: Callable[[str], None]) -> None:
        """Change the loaded target; arguments as for `load_pair`."""

    def planner(self, planner: Planner, draft: Backend) -> Planner:
        """The planner that is used instead."""
        return planner


def find_approximate(text: str | None) -> Approximate | None:
    """
    Args:
        text: NAME, or NAME:VALUE; None: texts are exact, as with the value 0.

    Raises:
        UsageError: there is no such method, or its value is out of range.
    """
    if text is None:
        return None
    name, colon, value = check_text("approximate", text).partition(":")
    if name not in APPROXIMATE:
        raise no_such("approximate method", name, APPROXIMATE)
    method = import_module(LAB[name]).METHOD
    try:
        number = float(value) if colon else method.usual
    except ValueError:
        number = float("nan")
    if not method.is_right(number):
        raise must_be(f"the value of approximate {name}", value, method.right)
    found: Approximate | None = method(number) if number else None
    return found


def with_old_names(approximate: str | None, options: dict[str, Any]) -> tuple[str | None, list[str]]:
    """Take names of the version before out of options.

    Returns:
        What was given with any name, and the old names that were given.

    Raises:
        UsageError: several methods were given.
    """
    old = {name: value for name in ("cascade", "sparse_attention") if (value := options.pop(name, None)) is not None}
    given = [approximate] if approximate is not None else []
    given += [f"{name.replace('_', '-')}:{value}" for name, value in old.items()]
    if given[1:]:
        raise UsageError(f"{' and '.join(map(str, given))} are both approximate: give one of them")
    return next(iter(given), None), [*old]


def check_approximate(
    method: Approximate | None, draft: str | None, planners: Sequence[str], exact: str | None, ahead: bool | None
) -> None:
    """
    Args:
        method: None: texts are exact.
        draft: as for `edgespec.load`; None: there is none.
        planners: names of planners.
        exact: as for `edgespec.load`.
        ahead: likewise.

    Raises:
        UsageError: something is given with which the method does not go.
    """
    if method is None:
        return
    if not draft:
        raise needs_a_model(method)
    if exact not in (None, "off"):
        raise UsageError(
            f"--exact {exact} asks for the text of plain decoding, --approximate {method.name} for another: leave one "
            "out"
        )
    found = {name: find_method(name) for name in planners}
    wrong = [name for name, one in found.items() if one.ahead or (method.needs_draft and not one.draft)]
    for one in (["ahead=True"] if ahead else []) + [f"the planner {name}" for name in wrong]:
        raise UsageError(
            f"{one} does not go with --approximate {method.name}, for which the draft reads first, and then waits"
        )


def needs_a_model(method: Approximate, draft: str = "") -> UsageError:
    """The error for a draft that is a head, or layers of the target; "": there is none."""
    why = f", and {draft} is none" if draft else ""
    return UsageError(
        f"--approximate {method.name} needs a draft model of its own{why}: name one with --draft (draft=…), or leave "
        "it out (approximate=…)"
    )
