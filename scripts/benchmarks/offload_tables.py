"""The reports of `offload.py` for a person: tables."""

from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.offload_folders import lines, title
from edgespec.machine.memory import format_size


def pass_table(report: dict[str, Any]) -> str:
    """One row for each limit and number of nodes.

    "to bound" is seconds per pass to max(seconds in memory, bytes streamed / measured bandwidth).
    """
    name = f"{Path(report['target']).name}, {format_size(report['size'])}; {report['how']}"
    headings = ("weights", "disk", "nodes", "mapped", "streamed", "in memory", "to bound", "x mapped", "read", "peak")
    view = _table(name, headings)
    for entry in report["limits"]:
        streamed, mapped = entry["streamed"], entry["mapped"]
        moved = streamed.get("streamed", 0)  # nothing, if all that passes touch fits
        read = f"{streamed['bytes_per_pass'] / moved:.2f} of {format_size(moved)}" if moved else "nothing"
        for nodes, found in streamed["passes"].items():
            compute = report["in_memory"]["passes"][nodes]["seconds"]
            bound = max(compute, moved / entry["bandwidth"])
            plain = mapped["passes"].get(nodes, {}).get("seconds")
            view.add_row(
                format_size(entry["room"]), f"{entry['bandwidth'] / 1e9:.2f} GB/s", nodes,
                f"{plain:.3f} s" if plain else "", f"{found['seconds']:.3f} s", f"{compute:.3f} s",
                f"{found['seconds'] / bound:.2f}", f"{plain / found['seconds']:.1f}" if plain else "",
                read, f"{streamed['peak'] / entry['limit']:.2f}",
            )  # fmt: skip
        for name in ("streamed", "mapped"):
            for why in entry[name]["failed"]:
                view.add_row(format_size(entry["room"]), "", "", f"{name}: {why}")
    return _text(view)


def text_table(report: dict[str, Any]) -> str:
    """One row for each variant. "kernel" is the system's part of the processors' time; shares are of seconds else.

    Of drafting: passes per token, rounds whose search went on in the next, and seconds that the target's passes hid.
    """
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
    """One row for each size of pass, then one for each way to write texts."""
    view = _table(title(report), ("what", "took", "beside", "against", "peak"))
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
