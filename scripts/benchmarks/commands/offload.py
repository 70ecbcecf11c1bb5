"""Models under a memory limit: memory mapping against streaming, passes and whole answers."""

import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click

from benchmarks.offload import check_variants, measure, parse_models
from benchmarks.offload_report import tables
from benchmarks.options import AT_LEAST_1, FILE, ROUNDS, asking, json_out, questions
from edgespec.cli.options import refuse
from edgespec.errors import UsageError
from edgespec.loading.pair import DEFAULT_BUDGET
from edgespec.loop.sampling import SamplingParams
from edgespec.machine.files import write_whole
from edgespec.machine.memory import parse_size


@click.command(
    epilog="""\b
Examples:
  scripts/bench offload big.gguf+small.gguf --prompts prompts.jsonl --room 900M
  scripts/bench offload big.gguf+small.gguf --prompts prompts.jsonl --room 900M --plain-tokens 0 \\
      --planners specexec,chain,sssd
  scripts/bench offload mlx:big-16bit mlx:big-4bit torch:big-bf16 --nodes 1 --nodes 16 --nodes 64"""
)
@click.argument("models", metavar="[ENGINE:]MODEL[+DRAFT]...", nargs=-1, required=True)
@click.option("--room", metavar="SIZE", help="Memory for the target's weights. [default: half of them]")
@click.option("--program", default="600M", metavar="SIZE", help="Memory for all else, with mlx and torch.")
@click.option("--nodes", multiple=True, type=AT_LEAST_1, help="Size of passes to time; repeatable.")
@click.option("--prompts", type=FILE, metavar="FILE.jsonl", help="Generate answers.")
@click.option("--planners", help="Comma-separated. [default: sssd, and specexec with a draft]")
@asking(16, 96)
@click.option("--budget", type=AT_LEAST_1, help="Draft tokens per pass. [default: as many as pay, at most 64]")
@click.option("--plain-tokens", type=click.IntRange(0), default=16, help="Of an answer without drafts; 0: none.")
@ROUNDS
@json_out(b"[")
def command(
    models: tuple[str, ...], room: str | None, program: str, nodes: tuple[int, ...], prompts: Path | None,
    planners: str | None, limit: int, max_tokens: int, temperature: float, top_p: float, budget: int | None,
    plain_tokens: int, rounds: int, out: Path | None,
) -> None:  # fmt: skip
    """Models in too little memory.

    ENGINE is llamacpp, which it is if none is named, mlx, or torch (on a processor).

    Seconds of passes against max(computation, bytes / disk speed), and tokens per second of answers: mapped by
    llama.cpp, streamed, and with each planner. The exit code is 1 if something could not be measured.
    """
    if not (prompts or nodes):
        raise UsageError("nothing is to be measured: give --nodes or --prompts")
    if not prompts:
        of_answers = ("planners", "limit", "max_tokens", "temperature", "top_p", "budget", "plain_tokens")
        refuse("without --prompts nothing is asked", *of_answers)
    asked, told = questions(prompts, limit) if prompts else [], list[dict[str, Any]]()
    SamplingParams(temperature=temperature, top_p=top_p)
    about: dict[str, Any] = {
        "prompts": asked, "max_tokens": max_tokens, "sampling": {"temperature": temperature, "top_p": top_p},
        "budget": budget or DEFAULT_BUDGET, "by_cost": budget is None,
    }  # fmt: skip
    pairs = [replace(parse_models(text), **about) for text in models]
    variants = [check_variants(planners, draft=bool(pair.draft)) for pair in pairs] if asked else [[] for _ in pairs]
    for pair, some in zip(pairs, variants, strict=True):
        sizes = parse_size(room) if room else None, parse_size(program)
        told.append(
            measure(
                pair, nodes, some, *sizes, plain_tokens=plain_tokens, rounds=rounds, say=partial(click.echo, err=True)
            )
        )
        if out:
            write_whole(out, json.dumps(told, indent=1))
        click.echo(tables(told[-1]))
    if any(row["failed"] for report in told for kind in ("passes", "texts") for row in report[kind].values()):
        sys.exit(1)
