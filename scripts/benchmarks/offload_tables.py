"""Tables of the reports of `offload.py` and `offload_folders.py`."""

from pathlib import Path
from typing import Any

from benchmarks.offload_folders import lines, title
from edgespec.machine.memory import format_size
from edgespec.measure.tables import table


def text_table(report: dict[str, Any]) -> str:
    about = f"{Path(report['target']).name}, {format_size(report['room'])} + {format_size(report['needed'])} of memory"
    headings = (
        "variant", "tokens/s", "x mapped", "acceptance", "s/pass", "draft", "compute", "disk", "planning", "kernel",
        "read/pass", "peak", "drafts/token", "went on", "hidden",
    )  # fmt: skip
    rows = list[list[str]]()
    for name, row in report["variants"].items():
        if "tokens" not in row:
            rows.append([name, "; ".join(row["failed"])])
            continue
        compute = row["target_seconds"] - row["wait_seconds"]
        shares = (row["draft_seconds"], compute, row["wait_seconds"], row["plan_seconds"])
        rows.append([
            name, f"{row['tokens_per_second']:.2f}", f"{row['ratio']:.1f}" if "ratio" in row else "",
            f"{row['acceptance_length']:.2f}", f"{row['target_seconds'] / row['passes']:.3f}",
            *(f"{100 * share / row['seconds']:.0f} %" for share in shares),
            f"{100 * row['system_seconds'] / (row['user_seconds'] + row['system_seconds']):.0f} %",
            format_size(row["bytes_per_round"]), f"{row['peak'] / report['limit']:.2f}",
            f"{row['draft_passes'] / row['tokens']:.2f}", f"{100 * row['draft_went_on'] / row['passes']:.0f} %",
            f"{100 * row['hidden_seconds'] / row['seconds']:.0f} %",
        ])  # fmt: skip
    return table(about, headings, rows, width=160) + "".join(
        f"\n{name}: {found[0]:.3f} of the speed without settings, 95 % interval {found[1]:.3f} to {found[2]:.3f}"
        for name, row in report["variants"].items()
        if (found := row.get("to_serial"))
    )


def folder_table(report: dict[str, Any]) -> str:
    return table(title(report), ("what", "took", "details", "against", "peak"), lines(report), width=160)
