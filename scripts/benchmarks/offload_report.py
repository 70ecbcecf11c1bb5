"""Reports of `offload.py`, and their tables."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.offload_worker import Task
from benchmarks.turns import ratio
from edgespec.machine.memory import format_size
from edgespec.measure.tables import table

Results = Mapping[str, Sequence[dict[str, Any]]]  # name of a variant -> what its processes returned
TOTALS = (
    "tokens", "gained", "passes", "seconds", "draft_seconds", "target_seconds", "wait_seconds", "plan_seconds",
    "draft_passes", "hidden_seconds",
)  # fmt: skip
HEADINGS = (
    "tokens/s", "acceptance", "s/pass", "draft", "compute", "disk", "planning", "read/pass", "peak",
    "drafts/token", "hidden",
)  # fmt: skip


def make_report(pair: Task, limit: int, passes: Results, texts: Results) -> dict[str, Any]:
    rows = {name: _texts(results) for name, results in texts.items()}
    first = next(iter(rows.values()), {}).get("by_prompt", ())
    for row in rows.values():
        if first and len(row.get("by_prompt", ())) == len(first):
            row["ratio"] = ratio(row["by_prompt"], first)
    speeds = [one["bandwidth"] for results in (*passes.values(), *texts.values()) for one in results]
    return {
        "target": pair.target, "draft": pair.draft, "engine": pair.backend, "limit": limit,
        "bandwidth": median(speeds) if speeds else 0.0,
        "passes": {name: _passes(results) for name, results in passes.items()}, "texts": rows,
    }  # fmt: skip


def _both(results: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Results of processes that did not fail; and what is said of passes and texts alike."""
    good = [result for result in results if "failed" not in result]
    about: dict[str, Any] = {name: good[0][name] for name in ("limit", "streamed", "notes") if good and name in good[0]}
    peak = max((result["peak"] for result in good), default=0)
    return good, {"failed": [result["failed"] for result in results if "failed" in result], "peak": peak, **about}


def _passes(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    good, about = _both(results)
    seconds = {
        nodes: median(result["passes"][nodes]["seconds"] for result in good)
        for nodes in (good[0]["passes"] if good else ())
    }
    return about | {"seconds": seconds}


def _texts(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    good, about = _both(results)
    runs = [run for result in good for run in result["runs"]]
    if not any(run["passes"] for run in runs):
        return about | {"failed": [*about["failed"], *(["no answer has two tokens"] if runs else [])]}
    totals = {name: sum(run.get(name, 0.0) for run in runs) for name in TOTALS}
    return about | totals | {
        "tokens_per_second": totals["gained"] / totals["seconds"],
        "acceptance_length": totals["gained"] / totals["passes"],
        "by_prompt": [{"tokens": run["gained"], "seconds": run["seconds"]} for run in runs],
        "bytes_per_round": sum(result["bytes"] for result in good) / totals["passes"],  # prompts included
    }  # fmt: skip


def tables(report: dict[str, Any]) -> str:
    about = (
        f"{report['engine']}: {Path(report['target']).name} in {format_size(report['limit'])}, "
        f"disk {report['bandwidth'] / 1e9:.2f} GB/s"
    )
    shown = []
    if passes := report["passes"]:
        streamed = passes["streamed"].get("streamed", 0)
        title = f"{about}, {format_size(streamed)} read in every pass"
        headings = ("nodes", "streamed", "in memory", "of max(compute, read)", "peak")
        shown.append(table(title, headings, _pass_rows(passes, streamed / report["bandwidth"])))
    if texts := report["texts"]:
        rows = [_text_row(name, row) for name, row in texts.items() if "tokens" in row]
        shown.append(table(about, ("variant", "x first, 95 %", *HEADINGS), rows, width=180))
    for name, row in (passes | texts).items():
        shown += [f"{name}: {why}" for why in row["failed"]]
    return "\n".join(shown)


def _pass_rows(passes: dict[str, Any], reading: float) -> list[list[str]]:
    memory, streamed = passes["in memory"], passes["streamed"]
    rows = []
    for nodes, seconds in streamed["seconds"].items():
        compute = memory["seconds"].get(nodes, 0.0)
        bound = f"{seconds / max(compute, reading):.2f}"
        rows.append(
            [nodes, f"{seconds:.3f} s", f"{compute:.3f} s", bound, f"{streamed['peak'] / streamed['limit']:.2f}"]
        )
    return rows


def _text_row(name: str, row: dict[str, Any]) -> list[str]:
    compute = row["target_seconds"] - row["wait_seconds"]
    shares = (row["draft_seconds"], compute, row["wait_seconds"], row["plan_seconds"])
    return [
        name, "{:.2f} ({:.2f}-{:.2f})".format(*row["ratio"]) if "ratio" in row else "",
        f"{row['tokens_per_second']:.2f}",
        f"{row['acceptance_length']:.2f}", f"{row['target_seconds'] / row['passes']:.3f}",
        *(f"{100 * share / row['seconds']:.0f} %" for share in shares),
        format_size(row["bytes_per_round"]), f"{row['peak'] / row['limit']:.2f}",
        f"{row['draft_passes'] / row['tokens']:.2f}", f"{100 * row['hidden_seconds'] / row['seconds']:.0f} %",
    ]  # fmt: skip
