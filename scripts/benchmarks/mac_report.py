"""What `scripts/check-mac` has found, as a section of docs/measured.md."""

from collections.abc import Mapping, Sequence

from edgespec import __version__

HEADING = "## Of a Mac: "
ISSUES = "an issue of edgespec, with the machine's model name and the size of its disk"
MARKS = {True: "yes", False: "**no**", None: "–"}


def section(
    machine: str,
    checks: Sequence[tuple[str, bool | None, str]],
    seconds: Mapping[str, Mapping[int, float]],
    answers: Sequence[Sequence[str]],
) -> str:
    """
    Args:
        machine: its chip and system.
        checks: name, whether it is good, and what was found.
        seconds: of a pass, by engine and number of rows.
        answers: what was tried, what was seen and what it means.
    """
    sizes = sorted({size for passes in seconds.values() for size in passes})
    rows = [
        [name, *(f"{passes[size]:.3g}" if size in passes else "" for size in sizes)] for name, passes in seconds.items()
    ]
    about = f"`scripts/check-mac`, edgespec {__version__}. Seconds of a pass, by its rows:"
    lines = [f"{HEADING}{machine}", "", about, "", *_table(["", *map(str, sizes)], rows), ""]
    lines += [*_table(["check", "holds", "found"], [[name, MARKS[good], text] for name, good, text in checks]), ""]
    return "\n".join([*lines, *_table(["tried", "seen", "means"], answers), ""])


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    cells = [head, ["---"] * len(head), *rows]
    return [f"| {' | '.join(one.replace('|', '/') for one in row)} |" for row in cells]
