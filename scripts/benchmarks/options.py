"""Types of options that scripts share."""

from collections.abc import Callable, Collection
from math import inf, isfinite
from typing import Any

import click

from edgespec.cli.options import given_parameters
from edgespec.errors import UsageError, must_be


class Number(click.FloatRange):
    """A number of a range; click's own also takes nan."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        found = super().convert(value, param, ctx)
        return found if isfinite(found) else self.fail(f"{value} is not a finite number.", param, ctx)


class Numbers(click.types.StringParamType):
    """Numbers with commas in between."""

    name = "numbers"

    def __init__(self, right: str, good: Callable[[float], bool], kind: type[float] | type[int] = float) -> None:
        """
        Args:
            right: describes the numbers, for messages.
            good: whether a number is one of them; infinite ones never are.
            kind: of the numbers.
        """
        self._right, self._good, self._kind = right, good, kind

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        try:
            found = [self._kind(one) for one in value.split(",")]
        except ValueError:
            found = []
        if not found or not all(abs(one) < inf and self._good(one) for one in found):
            raise must_be(param.opts[0] if param else "the option", value, f"{self._right}, with commas in between")
        return found


def refuse(names: Collection[str], where: str) -> None:
    """Refuse options of the command that are given where they are not used.

    Args:
        names: of the command's parameters.
        where: says where, for the message.

    Raises:
        UsageError: names the first of them that is given.
    """
    for one in given_parameters():
        if one.name in names:
            raise UsageError(f"{one.opts[0]} is not used {where}")


AT_LEAST_1 = Numbers("whole numbers of at least 1", lambda number: number >= 1, int)
SHARES = Numbers("numbers from 0 to 1", lambda share: 0 <= share <= 1)
POSITIVE = Numbers("numbers above 0", lambda number: number > 0)
