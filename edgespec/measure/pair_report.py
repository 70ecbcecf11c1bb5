"""The measurements of a pair as tables, a picture, and an entry of models.yaml."""

import os
import shutil
from collections.abc import Mapping, Sequence
from datetime import date
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import Any

import yaml

from edgespec import __version__
from edgespec.errors import EdgespecError, MissingPackage, RegistryError, UsageError
from edgespec.machine.files import PNG, check_out, read_text, replacing, write_whole
from edgespec.machine.measurements import processor_name
from edgespec.measure.pair import Measured, Row
from edgespec.measure.tables import table
from edgespec.models.registry import own_models_file, read_models

CARD = b"---\n"  # how a model card begins: with values for the hub


def pair_table(found: Measured) -> str:
    return table(_title(found), *_rows(found))


def _title(found: Measured) -> str:
    how = "streamed" if found.streams else "in memory"
    return f"{Path(found.target).name}, {how}" + (f", passes: {found.exact}" if found.exact else "")


def _rows(found: Measured) -> tuple[list[str], list[list[str]]]:
    """Headings, and a row for each planner and budget."""
    tasks = list(found.plain.by_task)
    headings = ["planner", "budget", "tokens per pass", *tasks, "draft ms", "pass ms", "tokens/s", "x plain"]
    return headings, [
        [
            row.planner, str(row.budget), f"{row.tokens_per_pass:.2f}", *(f"{row.by_task[task]:.2f}" for task in tasks),
            f"{1000 * row.draft_seconds:.0f}", f"{1000 * row.pass_seconds:.0f}", f"{row.tokens_per_second:.2f}",
            f"{row.tokens_per_second / found.plain.tokens_per_second:.2f}",
        ]
        for row in found.rows
    ]  # fmt: skip


def card(found: Measured, sources: Mapping[str, str | None], about: Mapping[str, Any], command: str) -> str:
    """A model card for the hub, in Markdown.

    Args:
        found: the measurement.
        sources: of the target and the draft.
        about: its `figures`.
        command: that measured it.
    """
    headings, rows = _rows(found)
    lines = [" | ".join(cells) for cells in (headings, ["---"] * len(headings), *rows)]
    named = {role: Path(one).name if one.startswith("file:") else one for role, one in sources.items() if one}
    values: dict[str, Any] = {"library_name": "edgespec", "tags": ["edgespec", "speculative-decoding"]}
    if named["target"].startswith("hf:"):
        values["base_model"] = named["target"][3:].rpartition("/")[0]
    draft = Path(named["draft"]).name if "draft" in named else ""
    return "\n".join([
        "---", yaml.safe_dump(values, sort_keys=False) + "---", "",
        f"# {Path(named['target']).name}" + (f" with the draft {draft}" if draft else " without a draft"), "",
        *(f"- {role}: `{source}`" for role, source in named.items()),
        f"- machine: {about['machine']}; memory: {about['memory']}; edgespec {about['edgespec']}, {about['date']}",
        f"- {recommendation(found)}", "", "Measured by", "", f"    {command}", "", f"{_title(found)}:", "",
        *(f"| {line} |" for line in lines), "",
        "The text is the target's own, whatever is drafted. Figures of another machine differ: run the command there.",
        "",
    ])  # fmt: skip


def recommendation(found: Measured) -> str:
    best, plain = found.best, found.plain.tokens_per_second
    if best == found.plain:
        quickest = max(found.rows[1:], key=lambda row: row.tokens_per_second, default=None)
        told = f"; the best drafts ({_name(quickest)}) make {_times(quickest, plain)}" if quickest else ""
        return f"recommended: no draft, plain decoding{told}"
    use = f"{best.tokens_per_second:.2f} tokens/s, {_times(best, plain)} plain decoding"
    if best.planner == "sssd":
        drafted = found.best_of("specexec")
        told = f"; with the draft {_times(drafted, plain)}" if drafted else ""
        return f"recommended: no draft, --planner sssd --budget {best.budget}: {use}{told}"
    return f"recommended: this draft, --planner specexec --budget {best.budget}: {use}"


def _name(row: Row) -> str:
    return f"{row.planner}, budget {row.budget}"


def _times(row: Row, plain: float) -> str:
    return f"{row.tokens_per_second / plain:.2f} ×"


def check_picture(path: str | Path) -> None:
    """Check that a picture can be written; call it before the measurement.

    Raises:
        MissingPackage: matplotlib is not installed.
        UsageError: `path` does not end in .png, is something else than a picture, or there is no such folder.
    """
    if find_spec("matplotlib") is None:
        raise MissingPackage("matplotlib", "bench", "the picture")
    if Path(path).suffix.lower() != ".png":
        raise UsageError(f"the picture is a PNG, but {path} does not end in .png")
    check_out(path, PNG, "a PNG picture")


def write(out: Path, data: str | bytes) -> None:
    """
    Raises:
        EdgespecError: it cannot be written.
    """
    try:
        write_whole(out, data)
    except OSError as error:
        raise EdgespecError(f"{out}: cannot be written: {error.strerror or error}") from error


def picture(found: Measured, out: Path) -> None:
    """
    Args:
        found: the measurement.
        out: of `check_picture`.

    Raises:
        EdgespecError: the picture cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name in dict.fromkeys(row.planner for row in found.rows[1:]):
        rows = [row for row in found.rows if row.planner == name]
        places = [row.budget for row in rows]
        left.plot(places, [row.tokens_per_pass for row in rows], "o-", label=name)
        right.plot(places, [row.tokens_per_second for row in rows], "o-", label=name)
    left.axhline(1, color="grey", linestyle="--", label="plain")
    right.axhline(found.plain.tokens_per_second, color="grey", linestyle="--", label="plain")
    places = [row.budget for row in found.rows if row.budget]
    for axes, what in ((left, "tokens per pass"), (right, "tokens/s")):
        axes.set(xlabel="draft tokens per pass", ylabel=what, xscale="log")
        axes.set_xticks(places, map(str, places))
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
        axes.legend()
    figure.suptitle(Path(found.target).name + (f" + {Path(found.draft).name}" if found.draft else ""))
    drawn = BytesIO()
    figure.savefig(drawn, format="png", dpi=110)
    write(out, drawn.getvalue())


def figures(found: Measured, memory: str | None) -> dict[str, Any]:
    best = found.best
    return {
        "machine": processor_name(),
        "memory": memory or "what is free",
        "streamed": found.streams,
        "planner": best.planner,
        "budget": best.budget,
        "tokens_per_pass": round(best.tokens_per_pass, 2),
        "by_task": {task: round(value, 2) for task, value in best.by_task.items()},
        "tokens_per_second": round(best.tokens_per_second, 2),
        "plain_tokens_per_second": round(found.plain.tokens_per_second, 2),
        "draft_ms": round(1000 * best.draft_seconds),
        "pass_ms": {1: round(1000 * found.plain.pass_seconds), best.budget + 1: round(1000 * best.pass_seconds)},
        "edgespec": __version__,
        "date": date.today().isoformat(),
    }


def check_writable(name: str, path: Path | None = None) -> Path:
    """Check that a model can be added to the user's models.yaml, and return its path.

    Raises:
        UsageError: there is a model of this name in it.
        RegistryError: the file is broken.
        EdgespecError: it cannot be written.
    """
    path = path or own_models_file()
    if path is None:
        raise EdgespecError("there is no home folder for a models.yaml: XDG_CONFIG_HOME names another place")
    path = path.resolve()
    if path.exists() and any(entry.name == name for entry in read_models(path)):
        raise UsageError(f"{path}: has a model named {name!r} already; choose another name")
    place = next(folder for folder in (path if path.exists() else path.parent, *path.parents) if folder.exists())
    if not os.access(place, os.W_OK) or not os.access(path.parent if path.parent.exists() else place, os.W_OK):
        raise EdgespecError(f"{path}: cannot be written: you may not write to {place}")
    return path


def append_entry(path: Path, entry: dict[str, Any]) -> None:
    """Add a model at the end of a models.yaml; all else stays, comments too.

    Raises:
        RegistryError: the list of models is not what the file ends with, so nothing can be added to it.
        EdgespecError: it cannot be written.
    """
    try:
        text = read_text(path, RegistryError) if path.exists() else "models:\n"
        before = [one.name for one in read_models(path)] if path.exists() else []
        block = yaml.safe_dump([entry], sort_keys=False, allow_unicode=True, width=100)
        indent = _indent(text)
        added = "".join(f"{indent}{line}\n" for line in block.splitlines())
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as new:
            new.write_text(text + ("" if text.endswith("\n") else "\n") + added, "utf-8")
            try:
                names = [one.name for one in read_models(new)]
            except RegistryError as error:
                names = [str(error)]
            if names != [*before, entry["name"]]:
                raise RegistryError(f"{path}: does not end with its list of models, so add this yourself:\n{block}")
            if path.exists():
                shutil.copymode(path, new)
    except OSError as error:
        raise EdgespecError(f"{path}: cannot be written: {error.strerror or error}") from error


def _indent(text: str) -> str:
    dashes = [line for line in text.splitlines() if line.lstrip().startswith("- name:")]
    return dashes[-1][: dashes[-1].index("-")] if dashes else "  "


def ranking(all_found: Sequence[tuple[str, Measured]]) -> str:
    best = [(name, found.best_of("specexec"), found.plain) for name, found in all_found]
    best += [("none (sssd)", found.best_of("sssd"), found.plain) for _, found in all_found[:1]]
    rows = []
    for name, row, plain in sorted(best, key=lambda one: -(one[1].tokens_per_second if one[1] else 0)):
        if row:
            speed = row.tokens_per_second
            share = f"{speed / plain.tokens_per_second:.2f}"
            rows.append([name, str(row.budget), f"{row.tokens_per_pass:.2f}", f"{speed:.2f}", share])
    headings = ("draft", "budget", "tokens per pass", "tokens/s", "x plain")
    return table("drafts, each with its best budget", headings, rows, width=130)
