"""Subcommands of `scripts/bench`. Made-up models and the reference engine are those of the tests."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[3] / "tests"))
