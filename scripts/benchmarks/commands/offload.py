"""A model under a memory limit: memory mapping against streaming."""

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import click

from benchmarks.offload import check_variants, measure, parse_models, shown
from benchmarks.options import AT_LEAST_1, FILE, ROUNDS, asking, questions
from edgespec.errors import UsageError
from edgespec.loading.pair import DEFAULT_BUDGET
from edgespec.loop.sampling import SamplingParams
from edgespec.machine.memory import in_bytes


@click.command(
    epilog="""\b
Examples:
  scripts/bench offload big.gguf+small.gguf --prompts prompts.jsonl --room 900M
  scripts/bench offload big.gguf+small.gguf --prompts prompts.jsonl --room 900M --plain-tokens 0 \\
      --planners specexec,chain,sssd"""
)
@click.argument("model", metavar="MODEL[+DRAFT]")
@click.option("--prompts", type=FILE, metavar="FILE.jsonl", required=True, help="Questions to answer.")
@click.option("--room", metavar="SIZE", help="Memory for the target's weights. [default: half of them]")
@click.option("--planners", help="Comma-separated. [default: sssd, and specexec with a draft]")
@asking(16, 96)
@click.option("--budget", type=AT_LEAST_1, help="Draft tokens per pass. [default: as many as pay, at most 64]")
@click.option("--plain-tokens", type=click.IntRange(0), default=16, help="Of an answer without drafts; 0: none.")
@ROUNDS
def command(
    model: str, prompts: Path, room: str | None, planners: str | None, limit: int, max_tokens: int,
    temperature: float, top_p: float, budget: int | None, plain_tokens: int, rounds: int,
) -> None:  # fmt: skip
    """Models in too little memory.

    Tokens per second of answers: mapped by llama.cpp, streamed, and with each planner. The exit code is 1 if something
    could not be measured.
    """
    sampling = {"temperature": temperature, "top_p": top_p}
    SamplingParams(temperature=temperature, top_p=top_p)
    pair = replace(
        parse_models(model), prompts=questions(prompts, limit), max_tokens=max_tokens, sampling=sampling,
        budget=budget or DEFAULT_BUDGET, by_cost=budget is None,
    )  # fmt: skip
    variants, size = check_variants(planners, draft=bool(pair.draft)), in_bytes("--room", room)
    if not (variants or plain_tokens):
        raise UsageError("nothing is to be measured: give --planners, or --plain-tokens above 0")
    found = measure(pair, variants, size, plain_tokens=plain_tokens, rounds=rounds, say=partial(click.echo, err=True))
    table, failed = shown(pair.target, found)
    click.echo("\n".join([table, *failed]))
    sys.exit(bool(failed))
