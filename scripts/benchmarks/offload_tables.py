"""Tables of the reports of `offload.py` and `offload_folders.py`."""

from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.offload_folders import lines, title
from edgespec.machine.memory import format_size


def text_table(report: dict[str, Any]) -> str:
    about = f"{Path(report['target']).name}, {format_size(report['room'])} + {format_size(report['needed'])} of memory"
    headings = (
        "variant", "tokens/s", "x mapped", "acceptance", "s/pass", "draft", "compute", "disk", "planning", "kernel",
        "read/pass", "peak", "drafts/token", "went on", "hidden",
    )  # fmt: skip
    view = _table(about, headings)
    for name, row in report["variants"].items():
        if "tokens" not in row:
            view.add_row(name, "; ".join(row["failed"]))
            continue
        compute = row["target_seconds"] - row["wait_seconds"]
        shares = (row["draft_seconds"], compute, row["wait_seconds"], row["plan_seconds"])
        view.add_row(
            name, f"{row['tokens_per_second']:.2f}", f"{row['ratio']:.1f}" if "ratio" in row else "",
            f"{row['acceptance_length']:.2f}", f"{row['target_seconds'] / row['passes']:.3f}",
            *(f"{100 * share / row['seconds']:.0f} %" for share in shares),
            f"{100 * row['system_seconds'] / (row['user_seconds'] + row['system_seconds']):.0f} %",
            format_size(row["bytes_per_round"]), f"{row['peak'] / report['limit']:.2f}",
            f"{row['draft_passes'] / row['tokens']:.2f}", f"{100 * row['draft_went_on'] / row['passes']:.0f} %",
            f"{100 * row['hidden_seconds'] / row['seconds']:.0f} %",
        )  # fmt: skip
    return _text(view) + "".join(
        f"\n{name}: {found[0]:.3f} of the speed without settings, 95 % interval {found[1]:.3f} to {found[2]:.3f}"
        for name, row in report["variants"].items()
        if (found := row.get("to_serial"))
    )


def folder_table(report: dict[str, Any]) -> str:
    view = _table(title(report), ("what", "took", "details", "against", "peak"))
    for row in lines(report):
        view.add_row(*row)
    return _text(view)


def _table(heading: str, headings: Sequence[str]) -> Table:
    view = Table(title=heading, title_justify="left")
    for heading in headings:
        view.add_column(heading, justify="right")
    return view


def _text(view: Table) -> str:
    text = StringIO()
    Console(file=text, width=160).print(view)
    return text.getvalue().rstrip()
