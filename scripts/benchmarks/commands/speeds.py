"""Published speeds beside those that are computed for the same machine and model."""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

import click

from benchmarks.options import FILE
from benchmarks.published import Row, bytes_each, devices, head_of, model_named, must_be_ours, placement, quant, seconds
from edgespec.errors import EdgespecError, ModelError, UsageError
from edgespec.measure.outlook import expected_tokens
from edgespec.measure.tables import table

USUAL: Row = {  # what null stands for, by key
    "id": "",
    "kind": "",
    "machine": "",
    "device_class": "",
    "memory_gb": 0,
    "engine": "",
    "engine_version_or_date": "",
    "model": "",
    "quant": "",
    "file_gb": 0,
    "where": "",
    "rows": 1,
    "tg_tok_s": 0,
    "draft": "",
    "tg_with_draft_tok_s": 0,
    "pass_cost_vs_one_row": 0,
    "source": "",
    "doubt": "",
}

KINDS = {
    "a": "Macs in memory",
    "b": "cost of rows",
    "c": "drafts in memory",
    "d": "larger than memory",
    "e": "processors",
    "f": "partly on a GPU",
    "g": "other GPUs",
}
ENGINES = {"llama.cpp": "llamacpp", "mlx": "mlx", "mlx-lm": "mlx"}
SOURCES = 8  # of fewer a kind is not judged
ANSWERED, WITHIN, FACTOR, MEDIAN = 0.8, 0.9, 1.5, (0.8, 1.25)
SHOWN = ("id", "machine", "model", "quant", "rows", "doubt")


class Answer(NamedTuple):
    """
    Attributes:
        row: as published.
        published: tokens a second, or of kind b seconds of a pass by those over one row.
        computed: the same; 0: it cannot be computed.
        why: it cannot.
    """

    row: Row
    published: float
    computed: float = 0.0
    why: str = ""

    @property
    def ratio(self) -> float:
        return self.computed / self.published


@click.command(
    epilog="""\b
Example:
  scripts/bench speeds public_speeds.jsonl"""
)
@click.argument("file", type=FILE)
def command(file: Path) -> None:
    """Compare published speeds with computed ones.

    The exit code is 1 if the computed ones of a kind are off.
    """
    answers = list(answered(read(file)))
    rows = [
        [
            *(str(row[key]) for key in SHOWN),
            f"{published:.4g}",
            why or f"{found:.4g}",
            f"{found / published:.2f}" if found else "",
        ]
        for row, published, found, why in answers
    ]
    click.echo(table("", [*SHOWN, "published", "computed", "ratio"], rows))
    verdicts = [verdict(kind, [one for one in answers if one.row["kind"] == kind]) for kind in KINDS]
    for line, _ in verdicts:
        click.echo(line)
    if not all(good for _, good in verdicts):
        raise SystemExit(1)


def read(file: Path) -> Iterator[Row]:
    """
    Raises:
        UsageError: a line is not a row.
    """
    for number, line in enumerate(file.read_text("utf-8").splitlines(), 1):
        try:
            row = {"engine_version_or_date": None} | json.loads(line)  # without it, of today's kernels
            yield {key: row[key] or usual for key, usual in USUAL.items()}
        except (ValueError, TypeError, LookupError) as error:
            raise UsageError(f"{file}, line {number}: must be an object with the keys {', '.join(USUAL)}") from error


def answered(rows: Iterable[Row]) -> Iterator[Answer]:
    """Rows whose engine is one of ours, and whose machine is named."""
    for row in rows:
        key = {"b": "pass_cost_vs_one_row", "c": "tg_with_draft_tok_s"}.get(row["kind"], "tg_tok_s")
        named = re.search(r"\d", row["machine"])  # "CPU (not named)" has none
        if named and row["engine"] in ENGINES and row[key] and (row["kind"] != "b" or row["rows"] > 1):
            try:
                yield Answer(row, row[key], computed(row))
            except EdgespecError as error:
                yield Answer(row, row[key], why=str(error))


def verdict(kind: str, answers: Sequence[Answer]) -> tuple[str, bool]:
    """A line, and False if the kind fails; each source has one vote, the median of its ratios."""
    found = [one for one in answers if one.computed]
    sources = sorted({one.row["source"] for one in found})
    votes = [median(one.ratio for one in found if one.row["source"] == source) for source in sources]
    middle = median(votes) if votes else 0.0
    share = sum(1 / FACTOR <= one <= FACTOR for one in votes) / max(1, len(votes))
    good = len(found) >= ANSWERED * len(answers) and MEDIAN[0] <= middle <= MEDIAN[1] and share >= WITHIN
    judged = len({one.row["source"] for one in answers}) >= SOURCES
    line = f"{kind}, {KINDS[kind]}: {len(found)} of {len(answers)} answered, {len(votes)} sources, median {middle:.2f}"
    result = ("pass" if good else "fail") if judged else f"not judged: fewer than {SOURCES} sources"
    return f"{line}, {100 * share:.0f} % within {FACTOR}: {result}", good or not judged


def computed(row: Row) -> float:
    """
    Raises:
        ModelError: it cannot be computed.
    """
    rows = row["rows"]
    engine = ENGINES[row["engine"]]
    gpu, processor = devices(row, engine)
    if row["kind"] in "bc":
        must_be_ours(row, engine, gpu)
    try:
        model = model_named(row["model"].lower(), quant(row))
    except ModelError:  # such as one matrix
        if row["kind"] != "b" or "MoE" in row["device_class"] or not gpu or not gpu.pace.rows:
            raise
        return 1 + gpu.pace.bytes_more(rows) / bytes_each(row)
    placed = placement(row, model, gpu, processor)
    if row["kind"] == "b" and not all(speeds.pace.rows for _, speeds in placed):
        raise ModelError("what rows cost there is not known")
    if row["kind"] == "b":
        return seconds(model, placed, rows) / seconds(model, placed, 1)
    if row["kind"] != "c":
        return 1 / seconds(model, placed, 1)
    if not (found := re.match(r"(own MTP head|(.+) (\w+)), (?:n-max )?(\d+)(?: tokens)?$", row["draft"])):
        raise ModelError("the draft is not known")
    small, depth = model, int(found[4])
    drafted = head_of(model, placed)
    if found[2]:
        other = {**row, "model": found[2], "quant": found[3], "file_gb": 0}
        small = model_named(found[2].lower(), quant(other))
        drafted = placement(other, small, gpu, processor)
    tokens = min(depth + 1, expected_tokens("specexec", depth + 1))
    return tokens / (seconds(model, placed, depth + 1) + depth * seconds(small, drafted, 1))
