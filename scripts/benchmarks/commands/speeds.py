"""Published speeds beside those that are computed for the same machine and model."""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import click
import yaml

from benchmarks.options import FILE
from edgespec.machine.described import find_machine, named
from edgespec.machine.this_machine import Machine
from edgespec.measure.predictor import Part, Speeds, Weights, of_gpu
from edgespec.measure.tables import table
from edgespec.models.registry import all_models
from edgespec.models.shapes import TYPES, file_of
from edgespec.weights.plan import EXPERTS, Tensor, layer_of

Row = Mapping[str, Any]

KINDS = {
    "a": "Macs in memory", "b": "cost of rows", "c": "drafts in memory", "d": "larger than memory", "e": "processors",
    "f": "partly on a GPU", "g": "other GPUs",
}  # fmt: skip
ENGINES = {"llama.cpp": "llamacpp", "mlx": "mlx", "mlx-lm": "mlx"}
OF_ANOTHER = "kernels|bug|another source|paging"  # what is doubtful: old kernels, two measurements, the disk
SOURCES = 8  # of fewer a kind is not judged
ANSWERED, WITHIN, FACTOR, MEDIAN = 0.8, 0.9, 1.5, (0.8, 1.25)
RIGHT = 0.7  # of draft tokens after a right one, as docs/figures.md says; assumed for every draft
SHARE_OF_A_PROCESSOR = 0.7  # of its published bandwidth, as in machines.yaml
KNOWN: dict[str, Any] = yaml.safe_load((Path(__file__).parent.parent / "published.yaml").read_text("utf-8"))


class Unanswered(Exception):
    """Why a row cannot be computed."""


@dataclass(frozen=True, slots=True)
class Answer:
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
    answers = list(answered(map(json.loads, file.read_text("utf-8").splitlines())))
    rows = [
        [one.row["id"], str(one.row["machine"]), one.row["model"], str(one.row["quant"]), str(one.row["rows"]),
         f"{one.published:.4g}", *((f"{one.computed:.4g}", f"{one.ratio:.2f}") if one.computed else (one.why, ""))]
        for one in answers
    ]  # fmt: skip
    click.echo(table("", ["", "machine", "model", "type", "rows", "published", "computed", "ratio"], rows))
    verdicts = [verdict(kind, [one for one in answers if one.row["kind"] == kind]) for kind in KINDS]
    for line, _ in verdicts:
        click.echo(line)
    if not all(good for _, good in verdicts):
        raise SystemExit(1)


def answered(rows: Iterable[Row]) -> Iterator[Answer]:
    """Rows whose engine is one of ours, and whose machine is named; but none of other software, by its own doubt."""
    for row in rows:
        key = {"b": "pass_cost_vs_one_row", "c": "tg_with_draft_tok_s"}.get(row["kind"], "tg_tok_s")
        known = re.search(r"\d", row["machine"] or "")  # such as "CPU (not named)" has none
        known = known and row["engine"] in ENGINES and not re.search(OF_ANOTHER, row["doubt"] or "")
        if known and row[key] and (row["kind"] != "b" or row["rows"] > 1):
            try:
                yield Answer(row, row[key], computed(row))
            except Unanswered as error:
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
    name = "pass" if good else "fail"
    line = f"{kind}, {KINDS[kind]}: {len(found)} of {len(answers)} answered, {len(votes)} sources, median {middle:.2f}"
    result = name if judged else f"not judged: fewer than {SOURCES} sources"
    return f"{line}, {100 * share:.0f} % within {FACTOR}: {result}", good or not judged


def computed(row: Row) -> float:
    """
    Raises:
        Unanswered: it cannot be computed.
    """
    rows = row["rows"]
    gpu, processor = devices(row, ENGINES[row["engine"]])
    try:
        model = model_named(row["model"].lower(), quant(row))
    except Unanswered:  # such as one matrix
        if row["kind"] != "b" or "MoE" in row["device_class"] or not gpu or not gpu.pace.rows:
            raise
        return 1 + gpu.pace.bytes_more(rows) / bytes_each(row)
    each = (
        None
        if quant(row) in TYPES
        else row["file_gb"] * 1e9 / sum(map(model.numbers, model.tensors))
        if row["file_gb"]
        else bytes_each(row)
    )
    placed = placement(row, model, each, gpu, processor)

    def seconds(nodes: int) -> float:
        return sum(model.seconds(part, nodes, speeds) for part, speeds in placed)

    if row["kind"] == "b":
        if not all(speeds.pace.rows for _, speeds in placed):
            raise Unanswered("what rows cost there is not known")
        return seconds(rows) / seconds(1)
    if row["kind"] != "c":
        return 1 / seconds(1)
    found = re.match(r"(own MTP head|(.+) (\w+)), (?:n-max )?(\d+)(?: tokens)?$", row["draft"])
    if not found:
        raise Unanswered("the draft is not known")
    if found[2]:
        other = row | {"model": found[2], "quant": found[3], "file_gb": None}
        small = model_named(found[2].lower(), quant(other))
        drafted = placement(other, small, None if quant(other) in TYPES else bytes_each(other), gpu, processor)
    else:
        drafted = [(model.part([one for one in model.tensors if layer_of(one) in (-1, 0)], each), placed[0][1])]
        small = model
    depth = int(found[4])
    drafting = depth * sum(small.seconds(part, 1, speeds) for part, speeds in drafted)
    return sum(RIGHT**n for n in range(depth + 1)) / (seconds(depth + 1) + drafting)


def quant(row: Row) -> str:
    found = re.sub(r"^UD-", "", row["quant"] or "")
    return {"MXFP4": "MXFP4_MOE", "f16": "F16", "bf16": "BF16"}.get(found, found)


def bytes_each(row: Row) -> float:
    """Of a weight.

    Raises:
        Unanswered: its type is not known.
    """
    kind = re.sub("_X?L$", "_M", quant(row))
    if of_mlx := re.match(r"([\d.]+)(-bit|bpw)", kind):  # in groups of 64, with scales
        return (float(of_mlx[1]) + (0.5 if of_mlx[2] == "-bit" else 0)) / 8
    if kind not in KNOWN["bits"]:
        raise Unanswered("the type of the weights is not known")
    return float(KNOWN["bits"][kind]) / 8


def devices(row: Row, engine: str) -> tuple[Speeds | None, Speeds | None]:
    """The GPU and the processor that a machine's name has; None: it has none that is known.

    Raises:
        Unanswered: neither is known.
    """
    text, gpu, operations = row["machine"], None, 0.0
    speed = next((1e9 * found for name, found in KNOWN["processors"].items() if re.search(name, text)), 0.0)
    if rate := re.search(r"DDR\d-(\d{4})", text):
        speed = 8e6 * int(rate[1]) * (8 if "EPYC" in text else 4 if "Threadripper" in text else 2)
    speed *= SHARE_OF_A_PROCESSOR
    if like := machines_like(text):
        memory = row["memory_gb"] or like[0].memory / 2**30
        machine = min(like, key=lambda one: abs(one.memory / 2**30 - memory))
        gpu, operations = of_gpu(machine.gpus[0], engine, row["source"]), machine.operations
        speed = speed or machine.memory_speed
    if not speed:
        raise Unanswered("the machine is not known")
    return gpu, Speeds("the processor", speed, operations or math.inf)


@cache
def machines_like(text: str) -> list[Machine]:
    """Machines of machines.yaml whose chip has the longest name that is part of a text, the fastest first."""
    entries = [one for one in named().values() if re.search(rf"(?<!\w){words(one.get('chip'))}(?!\w)", text)]
    longest = max((len(one["chip"]) for one in entries), default=0)
    entries = [one for one in entries if len(one["chip"]) == longest]
    cores = re.search(r"\d+(?=-core GPU)", text)
    entries = [one for one in entries if cores and f"with {cores[0]} GPU cores" in one["description"]] or entries
    found = [find_machine(one["name"])[1] for one in entries]
    return sorted(found, key=lambda one: -one.gpus[0].memory_speed)


def words(chip: str | None) -> str:
    return re.escape(chip.removeprefix("Apple ")) if chip else "(?!)"  # matches nothing


@cache
def model_named(name: str, kind: str) -> Weights:
    """
    Raises:
        Unanswered: there is no shape of this name.
    """
    shapes = KNOWN["shapes"] | {
        entry.name: facts.shape for entry in all_models() if (facts := entry.files.get(entry.target)) and facts.shape
    }
    shapes |= {one: shapes[other] for one, other in KNOWN["same"].items()}
    fit = [
        one
        for one in shapes
        if re.search(r"(?<![a-z0-9])" + r"\W*(.*\W)?".join(map(re.escape, one.split("-"))) + r"(?![a-z0-9])", name)
    ]
    if not fit:
        raise Unanswered("the model's shape is not known")
    shape = shapes[max(fit, key=len)]
    if kind in TYPES and kind != shape["type"]:
        shape = {key: value for key, value in shape.items() if key != "types"} | {"type": kind}
    with file_of(shape) as path:
        return Weights(path)


def placement(
    row: Row, model: Weights, each: float | None, gpu: Speeds | None, processor: Speeds | None
) -> list[tuple[Part, Speeds]]:
    """
    Raises:
        Unanswered: it is not understood, or a device is not known.
    """
    where, layers, experts = row["where"], model.layers, 0
    count = 0 if where.startswith("CPU") else layers + 1
    if found := re.match(r"ngl=(\d+)|(\d+) of (\d+) layers on GPU", where):
        count = int(found[1]) if found[1] else round(int(found[2]) * layers / int(found[3]))
    elif found := re.match(r"n-cpu-moe=(\d+)|experts of (\d+) layers on CPU|experts on CPU", where):
        experts = int(found[1] or found[2] or layers)
    elif not where.startswith(("all GPU", "CPU")):
        raise Unanswered("where the weights lie is not known")

    def on_processor(tensor: Tensor) -> bool:
        layer = layer_of(tensor) if layer_of(tensor) >= 0 else layers
        return layer < layers + 1 - count or (layer < experts and bool(EXPERTS.search(tensor.name)))

    here = [one for one in model.tensors if on_processor(one)]
    there = [one for one in model.tensors if not on_processor(one)]
    parts = [(model.part(there, each), gpu), (model.part(here, each), processor)]
    used = [(part, speeds) for part, speeds in parts if part.weights or part.experts]
    if not all(speeds for _, speeds in used):
        raise Unanswered("the machine is not known")
    return [(part, speeds) for part, speeds in used if speeds]
