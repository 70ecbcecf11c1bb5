"""The command of `scripts/bench-gpu`, which runs the steps and imports no PyTorch itself."""

import faulthandler
import json
from pathlib import Path
from time import monotonic
from typing import Any

import click

from benchmarks.options import json_out
from benchmarks.steps import run_apart
from edgespec.errors import EdgespecError
from edgespec.machine.files import write_whole
from edgespec.machine.memory import in_bytes

MODULE = "benchmarks.gpu_steps"
STEPS = {  # functions of `MODULE`, most important first -> most seconds
    "card": 60,
    "link": 60,
    "questions": 120,
    "trees": 120,
    "nf4": 200,
    "draft": 120,
    "peak": 90,
    "bfloat16": 240,
}
FIRST = "card"  # without which there is none of the others
SECONDS = 550  # of all steps
WATCHDOG = 570  # seconds after which the program ends, whatever happens


@click.command(
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110, "show_default": True},
    epilog="""\b
Examples:
  scripts/bench-gpu                                 20 GB of the GPU's memory
  scripts/bench-gpu --gpu-memory 10G --json out.json
  scripts/bench-gpu nf4 draft                       only these steps, and card
  scripts/bench-gpu --device cpu                    tiny shapes: only to see that it runs""",
)
@click.argument("steps", nargs=-1, type=click.Choice([*STEPS]))
@click.option("--device", default="cuda", type=click.Choice(["cuda", "cpu"]))
@click.option("--gpu-memory", default="20G", metavar="SIZE", help="How much of the GPU's to use.")
@json_out(b"{", default="bench-gpu.json")
def command(steps: tuple[str, ...], device: str, gpu_memory: str, out: Path) -> None:
    """What no other machine than one with a CUDA GPU can tell, in less than ten minutes.

    \b
    card       what it is
    link       speed of copies from pinned and from pageable memory
    questions  what the program could do otherwise, depending on the card
    trees      a tree's rows against those of chains, for each kernel of attention
    nf4        passes of a 70 B model in 4 bits, streamed from host memory
    draft      passes of a draft, while the target's layers are copied
    peak       most memory against the plan
    bfloat16   as nf4, in 16 bits

    Models have random weights; trees follow 4000 tokens. Each step runs in a process of its own. What it finds is
    shown, and written to the file, at once. The docstring of scripts/bench-gpu lists the packages that it needs.

    `edgespec bench --backend torch` measures real models; `pytest tests/test_torch*.py tests/test_lossless_torch.py`
    checks them on this GPU.
    """
    options = {"device": device, "memory": in_bytes("--gpu-memory", gpu_memory)}
    faulthandler.dump_traceback_later(WATCHDOG, exit=True)
    chosen = [name for name in STEPS if name == FIRST or name in steps or not steps]
    try:
        failed = run_steps(chosen, options, out)
    finally:
        faulthandler.cancel_dump_traceback_later()
    click.echo(f"Figures: {out}")
    if failed:
        raise EdgespecError(f"not every step has ended well: {', '.join(failed)}")


def run_steps(steps: list[str], options: dict[str, Any], out: Path, module: str = MODULE, **more: Any) -> list[str]:
    """Run steps one after the other; `more` is for `run_apart`.

    Returns:
        Those that failed.
    """
    end, failed, found = monotonic() + SECONDS, list[str](), dict[str, dict[str, Any]]()
    for step in steps:
        found[step] = here = dict[str, Any]()

        def tell(name: str, value: Any, line: str, here: dict[str, Any] = here) -> None:
            here[name] = value
            click.echo(line)
            write_whole(out, json.dumps(found, indent=2) + "\n")

        seconds = min(STEPS.get(step, SECONDS), end - monotonic())
        click.echo(f"\n{step}, {seconds:.0f} s at most")
        why = (
            run_apart(module, step, options | {"seconds": seconds}, seconds, tell, **more)
            if seconds > 0
            else "no time is left"
        )
        if why:
            failed.append(step)
            tell("failed", why, f"failed: {why}")
            if step == FIRST:
                break
    return failed
