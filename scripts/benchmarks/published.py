"""Machines and models that published speeds name: `scripts/bench speeds`."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from edgespec.errors import ModelError
from edgespec.machine.described import find_machine, named
from edgespec.machine.this_machine import Machine
from edgespec.measure.paces import PROCESSOR, pace
from edgespec.measure.predictor import Part, Speeds, Weights, of_gpu, of_processor
from edgespec.models.registry import all_models
from edgespec.models.shapes import TYPES, file_of
from edgespec.weights.plan import EXPERTS, Tensor, layer_of

Row = Mapping[str, Any]
Placement = Sequence[tuple[Part, Speeds]]  # weights, and what reads them
KNOWN: dict[str, Any] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))


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
    text, gpu, operations, cores = row["machine"], None, 0.0, math.inf
    speed = next((1e9 * found for name, found in KNOWN["processors"].items() if re.search(name, text)), 0.0)
    if rate := re.search(r"DDR\d-(\d{4})", text):
        speed = 8e6 * int(rate[1]) * (8 if "EPYC" in text else 4 if "Threadripper" in text else 2)
    speed *= pace(PROCESSOR, "llamacpp", row["source"]).share
    if like := machines_like(text):
        machine = min(like, key=lambda one: abs(one.memory / 2**30 - row["memory_gb"])) if row["memory_gb"] else like[0]
        gpu, operations = of_gpu(machine.gpus[0], engine, row["source"]), machine.operations
        cores = machine.cores
        speed = speed or machine.memory_speed
    if not speed:
        raise ModelError("the machine is not known")
    return gpu, of_processor(speed, operations or math.inf, cores, row["source"])


def must_be_ours(row: Row, engine: str, gpu: Speeds | None) -> None:
    """
    Raises:
        ModelError: its passes over several rows are another engine's, or of kernels that were replaced.
    """
    if (row["kind"], row["engine"]) == ("b", "mlx") and not row["source"].startswith("ml-explore/"):
        raise ModelError("another project's server on mlx batches itself")
    published, by = KNOWN["replaced"].get(f"{gpu.name} {engine}", ("", "")) if gpu else ("", "")
    if re.match(r"20\d\d\b", when := row["engine_version_or_date"]) and when < str(published):
        raise ModelError(f"its kernels were replaced by {by}")


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
    if found := re.match(r"ngl[= ](\d+)|(\d+)(?: of |/)(\d+) layers on GPU", where):
        count = int(found[1]) if found[1] else round(int(found[2]) * layers / int(found[3]))
    elif found := re.match(r"n-?cpu-?moe[= ](\d+)|(?:all )?experts (?:of (\d+) layers )?on CPU|cpu-moe", where):
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
    placed = [(model.part(some, each), speeds) for some, speeds in parts if some]
    if each:  # the shape has other types
        kind = re.sub("^(IQ[23]_)M$", r"\1S", quant(row))
        placed = [(replace(part, types={kind: (part.weights, part.experts)}), speeds) for part, speeds in placed]
    return placed


def head_of(model: Weights, placed: Placement) -> Placement:
    """The model's own head: weights of a layer and of the output."""
    return [(model.part([one for one in model.tensors if layer_of(one) in (-1, 0)]), placed[0][1])]
