"""Tables as text."""

from collections.abc import Iterable, Sequence
from io import StringIO
from typing import Literal

from rich.console import Console
from rich.table import Table


def table(
    title: str,
    headings: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    width: int = 110,
    justify: Literal["left", "right"] = "right",
) -> str:
    """A table as text; `justify` is for all columns but the first."""
    view = Table(title=title, title_justify="left")
    for number, heading in enumerate(headings):
        view.add_column(heading, justify=justify if number else "left")
    for row in rows:
        view.add_row(*row)
    text = StringIO()
    Console(file=text, width=width).print(view)
    return text.getvalue().rstrip()
