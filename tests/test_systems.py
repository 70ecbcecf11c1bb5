"""docs/systems.md: every planner has a row, and every row's command and test exist."""

import re
from pathlib import Path

from edgespec.cli.commands import cli
from edgespec.planners.choice import NAMES

ROOT = Path(__file__).parent.parent
ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in (ROOT / "docs/systems.md").read_text().splitlines()
    if line.startswith("| ") and not line.startswith(("| ---", "| system"))
]


def test_every_planner_has_a_row():
    named = {name for row in ROWS for name in re.findall(r"planner `(\w+)`", row[0])}
    assert named == set(NAMES)


def test_every_row_has_a_state_a_command_a_test_and_a_figure():
    assert len(ROWS) > 10
    for system, state, command, test, figure in ROWS:
        assert state in ("works", "no gain"), system
        assert figure, system
        for script in re.findall(r"`(scripts/[\w-]+)", command):
            assert (ROOT / script).is_file(), script
        for name in re.findall(r"`edgespec (\w+)", command):
            assert name in cli.commands, name
        for name in re.findall(r"`(test_\w+\.py)`", test):
            assert (ROOT / "tests" / name).is_file(), name
        assert test != "–" or state == "no gain", system
