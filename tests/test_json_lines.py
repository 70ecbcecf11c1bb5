"""Files of JSON lines: an interrupted program resumes, and no file of the user's is changed."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from edgespec.errors import UsageError
from edgespec.measure.json_lines import append, resume

DEEP = [pytest.param("[" * 9999 + end, id=f"deep{number}") for number, end in enumerate(("", "\n"))]


@dataclass
class Line:
    name: str
    value: int


def test_a_line_that_was_cut_short_is_removed_by_the_next_one(tmp_path: Path) -> None:
    path, lines = tmp_path / "lines.jsonl", [Line("a", 1), Line("b", 2)]
    assert resume(path, Line) == []
    for line in lines:
        append(path, line)
    whole = path.read_text("utf-8")
    for length in range(len(whole)):
        path.write_text(whole[:length], "utf-8")
        kept = lines[: (whole[: length + 1]).count("\n")]  # a last line that lacks only its end is whole
        assert resume(path, Line) == kept
        assert path.read_text("utf-8") == whole[:length], "who only reads changes nothing"
        append(path, lines[1])
        assert resume(path, Line) == [*kept, lines[1]]
        assert path.read_text("utf-8").count("\n") == len(kept) + 1


def test_a_line_for_which_the_disk_was_full_spoils_no_later_one(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    path, long = tmp_path / "lines.jsonl", Line("long" * 100, 2)
    append(path, Line("a", 1))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 40, before[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            append(path, long)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    append(path, Line("b", 3))
    assert resume(path, Line) == [Line("a", 1), Line("b", 3)]


@pytest.mark.parametrize(
    "content",
    ["# Tides", "# Tides\n", '{"other": 1}', '{"other": 1}\n', "[1]", *DEEP],
)
def test_a_file_of_the_user_stays(tmp_path: Path, content: str) -> None:
    path = tmp_path / "notes.md"
    path.write_text(content, "utf-8")
    with pytest.raises(UsageError, match="holds something else"):
        resume(path, Line)
    assert path.read_text("utf-8") == content
