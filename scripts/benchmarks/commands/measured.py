"""Take what `scripts/check-mac` has found on a Mac into a page."""

from pathlib import Path

import click

from benchmarks.mac_report import read_report, with_section
from benchmarks.options import FILE
from edgespec.machine.files import write_whole


@click.command(
    epilog="""\b
Example:
  scripts/bench measured check-mac.json"""
)
@click.argument("report", type=FILE)
@click.option("--page", type=FILE, default="docs/measured.md", help="Which gets a section, or a newer one.")
def command(report: Path, page: Path) -> None:
    """Take a report of `scripts/check-mac` into a page.

    REPORT is the JSON file that it has written.
    """
    found = read_report(report)
    write_whole(page, with_section(page.read_text("utf-8"), found))
    click.echo(f"{page}: {found.heading.removeprefix('## ')}")
