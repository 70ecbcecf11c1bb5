"""Passes of a 70 B model whose weights are streamed to a CUDA GPU."""

import json
from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import Any

import click

from benchmarks import to_try
from benchmarks.options import json_out
from edgespec.errors import UsageError
from edgespec.machine.files import write_whole
from edgespec.machine.memory import available_memory, format_size, parse_size
from edgespec.measure.tables import table

NODES, FEW_NODES = [1, 16, 64, 256, 512, 1024, 2048], [1, 64]
FORMATS = ("bfloat16", "float16", "float32", "nf4")
SECONDS = 470  # after which no further size of a pass is begun
TINY = {  # of the shape, with --device cpu
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "num_hidden_layers": 12,
}  # fmt: skip


@click.command(
    epilog="""\b
Examples:
  scripts/bench gpu                                 20 GB of the GPU's memory
  scripts/bench gpu --gpu-memory 10G --json out.json
  scripts/bench gpu --dtype nf4 --layers 40
  scripts/bench gpu --device cpu                    a tiny shape: only to see that it runs"""
)
@click.option("--device", default="cuda", type=click.Choice(["cuda", "cpu"]))
@click.option("--gpu-memory", default="20G", metavar="SIZE", help="How much of the GPU's to use.")
@click.option("--layers", type=click.IntRange(2), default=80, help="Layers of the model.")
@click.option("--dtype", "dtypes", multiple=True, type=click.Choice(FORMATS), default=["bfloat16", "nf4"])
@json_out(b"{", default="bench-gpu.json")
def command(device: str, gpu_memory: str, layers: int, dtypes: tuple[str, ...], out: Path) -> None:
    """Passes of a 70 B model streamed to a GPU.

    Its weights are streamed to a CUDA GPU from host memory. It has the shape of Llama 3 70B and random weights, with
    fewer layers where the host's memory is too small. Passes over 1 to 2048 nodes, with 16-bit and with 4-bit weights,
    are compared with max(computation, bytes / bandwidth).

    The table at the end answers questions that no other machine can.

    After 8 minutes no further size of a pass is begun. `edgespec bench --backend torch` measures real models;
    `pytest tests/test_torch*.py tests/test_lossless_torch.py` checks them on this GPU.
    """
    started = perf_counter()
    loading, measuring = (import_module(name) for name in ("edgespec.backends.torch.loading", "benchmarks.gpu"))
    torch = loading.torch
    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"bench gpu needs a CUDA GPU, and this PyTorch ({torch.__version__}) sees none")
    place = torch.device(loading.find_device(device, loading.find_gpus(device)))
    tiny = device == "cpu"
    name = "processor, tiny shape" if tiny else torch.cuda.get_device_name(place)
    shape = measuring.LLAMA_70B | (TINY if tiny else {"num_hidden_layers": layers})
    copies = import_module("edgespec.backends.torch.offload").HostCopies if tiny else measuring.CudaCopies
    nodes = FEW_NODES if tiny else NODES
    found = {"gpu": name, "torch": torch.__version__, "gpu_memory": gpu_memory, "formats": []}
    deadline, reports = started + SECONDS, []
    for dtype in dtypes:
        if perf_counter() > deadline:
            click.echo(f"{dtype}: not measured, time is up")
            continue
        memory = measuring.memory_for(shape, dtype, nodes, 3) if tiny else parse_size(gpu_memory)
        click.echo(f"{dtype}: building and measuring", err=True)
        report = measuring.measure(
            shape, dtype, place, memory, nodes, host_bytes=available_memory(), deadline=deadline, copies=copies
        )
        _show(report, name, len(nodes))
        reports.append(report)
        found["formats"].append(report.as_dict())
        write_whole(out, json.dumps(found, indent=2) + "\n")
    measures = {} if tiny else measuring.measures(place, copies)
    click.echo(to_try.answer_table(to_try.answers(to_try.GPU, measures, measuring.known(reports))))
    click.echo(f"Figures: {out}; {perf_counter() - started:.0f} s")


def _show(report: Any, name: str, sizes: int) -> None:
    rows = []
    for row in report.rows:
        figures = (row.seconds, row.compute_seconds, row.copy_seconds, row.ratio)
        rows.append([str(row.nodes), *(f"{figure:.3f}" for figure in figures)])
    headings = ("nodes", "pass s", "compute s", "copies s", "pass / max")
    click.echo(table(f"{name}, {report.dtype}", headings, rows))
    fewer = f" of {report.full_layers} (the host has no memory for more)" if report.layers < report.full_layers else ""
    click.echo(
        f"{report.layers} layers{fewer}, {report.streamed_layers} of them streamed: "
        f"{format_size(report.streamed_bytes)} a pass at {report.bandwidth / 1e9:.1f} GB/s"
    )
    if len(report.rows) < sizes:
        click.echo("Time is up: the larger passes were not measured.")
