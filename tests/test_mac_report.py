"""What the check for Macs has found becomes a section of a page."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from benchmarks.mac_report import Report, with_section
from benchmarks.program import bench

PAGE = "# Measured\n\n## One\n\nfirst\n\n## Two\n\nsecond\n"


def made(**changed: Any) -> Report:
    known: dict[str, Any] = {
        "machine": "Apple M4",
        "system": "macOS-15.1-arm64",
        "version": "1.0",
        "checks": [("slots, GPU", True, "0 differ"), ("growth", False, "1 | 2 bytes"), ("machine", None, "16 GB")],
        "seconds": {"MLX": {1: 0.01234, 8: 0.05}, "llama.cpp, GPU": {1: 0.02}},
        "answers": [("arrays of 2 GiB", "the sum is right", "they load")],
    }
    return Report(**known | changed)


def test_a_report_is_a_section_with_three_tables() -> None:
    page = with_section(PAGE, made())
    assert page.startswith(PAGE)
    assert page.count("\n## ") == 3
    for line in (
        "## Of a Mac: Apple M4, macOS-15.1-arm64",
        "|  | 1 | 8 |",
        "| MLX | 0.0123 | 0.05 |",
        "| llama.cpp, GPU | 0.02 |  |",
        "| slots, GPU | yes | 0 differ |",
        "| growth | **no** | 1 / 2 bytes |",
        "| machine | – | 16 GB |",
        "| arrays of 2 GiB | the sum is right | they load |",
    ):
        assert f"\n{line}\n" in page


@pytest.mark.parametrize("after", ["", "\n## Three\n\nthird\n"])
def test_a_newer_report_of_a_machine_takes_the_place_of_the_older_one(after: str) -> None:
    first = with_section(PAGE, made()) + after
    second = with_section(first, made(seconds={"MLX": {1: 0.5}}))
    assert second == with_section(PAGE, made(seconds={"MLX": {1: 0.5}})) + after
    assert with_section(second, made(machine="Apple M5")).startswith(second.rstrip("\n"))


def test_a_file_is_taken_by_one_command(tmp_path: Path) -> None:
    page, report = tmp_path / "page.md", tmp_path / "check-mac.json"
    page.write_text(PAGE)
    report.write_text(made().model_dump_json())
    done = CliRunner().invoke(bench, ["measured", str(report), "--page", str(page)])
    assert done.output == f"{page}: Of a Mac: Apple M4, macOS-15.1-arm64\n"
    assert page.read_text() == with_section(PAGE, made())


@pytest.mark.parametrize("content", ["{", "[]", json.dumps({"about": "x"}), made(about="bench gpu").model_dump_json()])
def test_another_file_is_refused_and_the_page_stays(content: str, tmp_path: Path) -> None:
    page, report = tmp_path / "page.md", tmp_path / "other.json"
    page.write_text(PAGE)
    report.write_text(content)
    done = CliRunner().invoke(bench, ["measured", str(report), "--page", str(page)])
    assert f"{report}: is " in str(done.exception)
    assert "scripts/check-mac" in str(done.exception)
    assert page.read_text() == PAGE
