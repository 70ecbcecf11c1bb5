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
from edgespec.errors import EdgespecError, ModelError, UsageError
from edgespec.machine.described import find_machine, named
from edgespec.machine.this_machine import Machine
from edgespec.measure.outlook import expected_tokens
from edgespec.measure.predictor import Part, Speeds, Weights, of_gpu, of_processor
from edgespec.measure.tables import table
from edgespec.models.registry import all_models
from edgespec.models.shapes import TYPES, file_of
from edgespec.weights.plan import EXPERTS, Tensor, layer_of

Row = Mapping[str, Any]
USUAL: Row = {  # what null stands for, by key
    "id": "", "kind": "", "machine": "", "device_class": "", "memory_gb": 0, "engine": "", "model": "", "quant": "",
    "file_gb": 0, "where": "", "rows": 1, "tg_tok_s": 0, "draft": "", "tg_with_draft_tok_s": 0,
    "pass_cost_vs_one_row": 0, "source": "", "doubt": "",
}  # fmt: skip

KINDS = {
    "a": "Macs in memory", "b": "cost of rows", "c": "drafts in memory", "d": "larger than memory", "e": "processors",
    "f": "partly on a GPU", "g": "other GPUs",
}  # fmt: skip
Placement = Sequence[tuple[Part, Speeds]]
ENGINES = {"llama.cpp": "llamacpp", "mlx": "mlx", "mlx-lm": "mlx"}
DOUBTFUL = "kernels|bug|another source|paging"  # a row's own doubt: other software, two measurements, the disk
SOURCES = 8  # of fewer a kind is not judged
ANSWERED, WITHIN, FACTOR, MEDIAN = 0.8, 0.9, 1.5, (0.8, 1.25)
SHARE_OF_A_PROCESSOR = 0.7  # of its published bandwidth, as in machines.yaml
KNOWN: dict[str, Any] = yaml.safe_load((Path(__file__).parent.parent / "published.yaml").read_text("utf-8"))


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
    def figures(self) -> list[str]:
        found = [f"{self.computed:.4g}", f"{self.ratio:.2f}"] if self.computed else [self.why, ""]
        return [f"{self.published:.4g}", *found, "" if self.judged else self.row["doubt"]]

    @property
    def judged(self) -> bool:
        return not re.search(DOUBTFUL, self.row["doubt"])

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
        [*(str(one.row[key]) for key in ("id", "machine", "model", "quant", "rows")), *one.figures] for one in answers
    ]
    click.echo(
        table("", ["", "machine", "model", "type", "rows", "published", "computed", "ratio", "not judged"], rows)
    )
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
            row = json.loads(line)
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
    answers = [one for one in answers if one.judged]
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
        ModelError: it cannot be computed.
    """
    rows = row["rows"]
    gpu, processor = devices(row, ENGINES[row["engine"]])
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
    drafted: Placement = [
        (small.part([one for one in small.tensors if layer_of(one) in (-1, 0)]), placed[0][1])
    ]  # a head
    if found[2]:
        other = {**row, "model": found[2], "quant": found[3], "file_gb": 0}
        small = model_named(found[2].lower(), quant(other))
        drafted = placement(other, small, gpu, processor)
    tokens = min(depth + 1, expected_tokens("specexec", depth + 1))
    return tokens / (seconds(model, placed, depth + 1) + depth * seconds(small, drafted, 1))


def seconds(model: Weights, placed: Placement, rows: int) -> float:
    return sum(model.seconds(part, rows, speeds) for part, speeds in placed)


def quant(row: Row) -> str:
    found = str(row["quant"]).removeprefix("UD-")
    return {"MXFP4": "MXFP4_MOE", "f16": "F16", "bf16": "BF16"}.get(found, found)


def bytes_each(row: Row) -> float:
    """Of a weight.

    Raises:
        ModelError: its type is not known.
    """
    kind = re.sub("_X?L$", "_M", quant(row))
    if of_mlx := re.match(r"([\d.]+)(-bit|bpw)", kind):  # in groups of 64, with scales
        return (float(of_mlx[1]) + (0.5 if of_mlx[2] == "-bit" else 0)) / 8
    if kind not in KNOWN["bits"]:
        raise ModelError("the type of the weights is not known")
    return float(KNOWN["bits"][kind]) / 8


def devices(row: Row, engine: str) -> tuple[Speeds | None, Speeds]:
    """The GPU and the processor that a machine's name has; None: it has no GPU that is known.

    Raises:
        ModelError: neither is known.
    """
    text, gpu, operations = row["machine"], None, 0.0
    speed = next((1e9 * found for name, found in KNOWN["processors"].items() if re.search(name, text)), 0.0)
    if rate := re.search(r"DDR\d-(\d{4})", text):
        speed = 8e6 * int(rate[1]) * (8 if "EPYC" in text else 4 if "Threadripper" in text else 2)
    speed *= SHARE_OF_A_PROCESSOR
    if like := machines_like(text):
        machine = min(like, key=lambda one: abs(one.memory / 2**30 - row["memory_gb"])) if row["memory_gb"] else like[0]
        gpu, operations = of_gpu(machine.gpus[0], engine, row["source"]), machine.operations
        speed = speed or machine.memory_speed
    if not speed:
        raise ModelError("the machine is not known")
    return gpu, of_processor(speed, operations or math.inf, row["source"])


@cache
def machines_like(text: str) -> list[Machine]:
    """Machines of machines.yaml whose chip has the longest name that is part of a text, the fastest first."""
    chips = {one.get("chip", "").removeprefix("Apple ") for one in named().values()} - {""}
    here = [chip for chip in chips if re.search(rf"(?<!\w){re.escape(chip)}(?!\w)", text)]
    entries = [one for one in named().values() if here and one.get("chip", "").endswith(max(here, key=len))]
    cores = re.search(r"\d+(?=-core GPU)", text)
    entries = [one for one in entries if cores and f"with {cores[0]} GPU cores" in one["description"]] or entries
    found = [find_machine(one["name"])[1] for one in entries]
    return sorted(found, key=lambda one: -one.gpus[0].memory_speed)


@cache
def model_named(name: str, kind: str) -> Weights:
    """
    Raises:
        ModelError: there is no shape of this name.
    """
    shapes = KNOWN["shapes"] | {
        entry.name: facts.shape for entry in all_models() if (facts := entry.files.get(entry.target)) and facts.shape
    }
    shapes |= {one: shapes[other] for one, other in KNOWN["same"].items()}
    parts = {one: r"\W*(.*\W)?".join(map(re.escape, one.split("-"))) for one in shapes}
    fit = [one for one, text in parts.items() if re.search(rf"(?<![a-z0-9]){text}(?![a-z0-9])", name)]
    if not fit:
        raise ModelError("the model's shape is not known")
    shape = shapes[max(fit, key=len)]
    if kind in TYPES and kind != shape["type"]:
        shape = {key: value for key, value in shape.items() if key != "types"} | {"type": kind}
    with file_of(shape) as path:
        return Weights(path)


def placement(row: Row, model: Weights, gpu: Speeds | None, processor: Speeds) -> Placement:
    """
    Raises:
        ModelError: it is not understood, or a device is not known.
    """
    where, layers, experts = row["where"], model.layers, 0
    count = 0 if where.startswith("CPU") else layers + 1
    if found := re.match(r"ngl=(\d+)|(\d+) of (\d+) layers on GPU", where):
        count = int(found[1]) if found[1] else round(int(found[2]) * layers / int(found[3]))
    elif found := re.match(r"n-cpu-moe=(\d+)|experts of (\d+) layers on CPU|experts on CPU", where):
        experts = int(found[1] or found[2] or layers)
    elif not where.startswith(("all GPU", "CPU")):
        raise ModelError("where the weights lie is not known")

    def on_processor(tensor: Tensor) -> bool:
        layer = layer_of(tensor) if layer_of(tensor) >= 0 else layers
        return layer < layers + 1 - count or (layer < experts and bool(EXPERTS.search(tensor.name)))

    each = row["file_gb"] * 1e9 / sum(map(model.numbers, model.tensors))
    each = None if quant(row) in TYPES else each or bytes_each(row)
    here, there = ([one for one in model.tensors if on_processor(one) == way] for way in (True, False))
    if there and not gpu:
        raise ModelError("the machine is not known")
    parts = [(there, gpu or processor), (here, processor)]
    return [(model.part(some, each), speeds) for some, speeds in parts if some]
