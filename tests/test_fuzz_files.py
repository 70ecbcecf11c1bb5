"""Of mutated files and sessions, each command ends with a line and an exit code (`fuzz_files.py`)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="Windows cannot fork")
FUZZ = Path(__file__).parent / "fuzz_files.py"


def fuzz(*arguments: str) -> tuple[int, str]:
    command = [sys.executable, str(FUZZ), "--jobs", "1", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    return done.returncode, done.stdout


@pytest.mark.parametrize(("first", "count"), [(0, 20), pytest.param(20, 80, marks=pytest.mark.exhaustive)])
def test_no_mutated_file_ends_in_a_traceback_or_kills_the_process(first: int, count: int) -> None:
    code, said = fuzz("--first", str(first), "--count", str(count))
    assert code == 0, said[-3000:]
    assert f"{count} files" in said


@pytest.mark.parametrize(
    ("code", "said", "fault"),
    [
        (0, "text", ""),
        (1, "edgespec: no\n", ""),
        (1, "\n", "no line"),
        (99, "edgespec: no\n", "exit code 99"),
        (1, "Traceback (most recent call last):\n", "traceback"),
        (-11, "", "SIGSEGV"),
        (-14, "", "SIGALRM"),
    ],
)
def test_what_counts_as_a_defect(code: int, said: str, fault: str) -> None:
    from fuzz_files import Ended

    assert Ended(0, [], code, said).fault == fault
