"""What `scripts/check-mac` has found, as JSON, and as a section of docs/measured.md."""

import re
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ValidationError

from edgespec.errors import UsageError

ABOUT = "edgespec check-mac"
ISSUES = "an issue of edgespec, with the machine's model name and the size of its disk"


class Report(BaseModel):
    """
    Attributes:
        about: `ABOUT`.
        machine: its chip.
        system: its name and version.
        version: of edgespec.
        checks: name, whether it is good, and what was found.
        seconds: of a pass, by engine and number of rows.
        answers: what was tried, what was seen and what it means.
    """

    about: str = ABOUT
    machine: str
    system: str
    version: str
    checks: list[tuple[str, bool | None, str]]
    seconds: dict[str, dict[int, float]]
    answers: list[tuple[str, str, str]]

    @property
    def heading(self) -> str:
        return f"## Of a Mac: {self.machine}, {self.system}"


def read_report(path: Path) -> Report:
    """
    Raises:
        UsageError: the file is none.
    """
    try:
        found = Report.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise UsageError(f"{path}: is no report of scripts/check-mac") from error
    if found.about != ABOUT:
        raise UsageError(f"{path}: is a report of {found.about!r}, not of scripts/check-mac")
    return found


def with_section(page: str, report: Report) -> str:
    """A page with a section on a report, in place of one with its heading or at the end."""
    known = re.compile(rf"^{re.escape(report.heading)}\n.*?(?=^## |\Z)", re.DOTALL | re.MULTILINE)
    section = _section(report)
    if known.search(page):
        return known.sub(lambda match: section + "\n" * (match.end() < len(page)), page)
    return f"{page.rstrip()}\n\n{section}"


def _section(report: Report) -> str:
    sizes = sorted({size for passes in report.seconds.values() for size in passes})
    lines = [report.heading, "", f"`scripts/check-mac`, edgespec {report.version}. Seconds of a pass, by its rows:", ""]
    lines += _table(
        ["", *map(str, sizes)],
        [
            [name, *(f"{passes[size]:.3g}" if size in passes else "" for size in sizes)]
            for name, passes in report.seconds.items()
        ],
    )
    marks = {True: "yes", False: "**no**", None: "–"}
    checks = [[name, marks[good], text] for name, good, text in report.checks]
    lines += ["", *_table(["check", "holds", "found"], checks)]
    lines += ["", *_table(["tried", "seen", "means"], report.answers)]
    return "\n".join(lines) + "\n"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    cells = [head, ["---"] * len(head), *rows]
    return [f"| {' | '.join(one.replace('|', '/') for one in row)} |" for row in cells]
