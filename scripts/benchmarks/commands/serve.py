"""The server beside llama.cpp's: speed, and differences of what both say."""

import json
import shlex
import sys
from functools import partial
from pathlib import Path
from typing import Any

import click

from benchmarks import compare_servers, llama_server, wire
from benchmarks.options import AT_LEAST_1, FILE, PATH, ROUNDS, THREADS, Number, asking, questions
from benchmarks.serving import served
from edgespec.cli.options import DRAFT_OPTION, MEMORY_OPTION, refuse
from edgespec.errors import no_such
from edgespec.machine.files import check_out, write_whole
from edgespec.machine.memory import parse_size
from edgespec.model import load as load_model
from edgespec.models.registry import find_model, local_path

LLAMA_OPTIONS = click.option(
    "--llama-options", default="", show_default=False, metavar="TEXT", help="More options for llama-server."
)


@click.group()
def command() -> None:
    """The server beside llama.cpp's."""


@command.command(
    epilog="""\b
Examples:
  scripts/bench serve throughput mt_bench_dev.jsonl --model big.gguf --draft small.gguf
  scripts/bench serve throughput mt_bench_dev.jsonl --model big.gguf --draft small.gguf \\
      --llama-server build/bin/llama-server --at-once 1 --at-once 4 --at-once 8
  scripts/bench serve throughput mt_bench_dev.jsonl --model big.gguf --at-once 8 --rate 0.2 --rate 0.5 \\
      --options "--planner none" --options "--budget 8"
  with --memory 2G both run inside a control group of 2 GiB"""
)
@click.argument("prompts", type=FILE)
@click.option("--model", required=True, help="A name, path or source, as for run.")
@DRAFT_OPTION
@MEMORY_OPTION
@click.option("--ctx", "context_length", type=AT_LEAST_1, default=4096, help="As for run.")
@THREADS
@click.option("--at-once", multiple=True, type=click.IntRange(1, 32), default=(1, 2, 4, 8))
@click.option(
    "--rate",
    "rates",
    multiple=True,
    type=Number(0, min_open=True),
    help="Requests per second, as Poisson arrivals; --at-once is the server's --parallel then. [default: each request "
    "follows an answer]",
)
@click.option(
    "--options", multiple=True, default=[""], show_default=False, metavar="TEXT",
    help="More for serve, as '--budget 8'; repeated, each is a server of its own.",
)  # fmt: skip
@asking(16, 64)
@click.option("--llama-server", "program", metavar="PATH", help="Measure llama.cpp's server, too.")
@click.option("--mode", "modes", multiple=True, help="Of llama-server: plain, draft, ngram-simple and others. [all]")
@LLAMA_OPTIONS
@ROUNDS
def throughput(
    prompts: Path, model: str, draft: str | None, memory: str | None, at_once: tuple[int, ...],
    rates: tuple[float, ...], limit: int, rounds: int, program: str | None, modes: tuple[str, ...], llama_options: str,
    max_tokens: int, temperature: float, top_p: float, **options: Any,
) -> None:  # fmt: skip
    """Tokens per second and latency of requests.

    They go to `edgespec serve`, and with --llama-server to llama.cpp's server. Both are processes of their own and get
    the same requests; with --memory they run inside that limit. An answer's seconds per token are those from its
    request to its end, divided by its tokens.
    """
    if not program:
        refuse("without --llama-server it is not measured", "modes", "llama_options")
    known = llama_server.modes(draft)
    if wrong := [mode for mode in modes if mode not in known]:
        raise no_such("mode", wrong[0], known)
    servers = compare_servers.Servers(
        program, local_path(find_model(model).target), local_path(find_model(draft).target) if draft else None,
        modes=modes, llama_options=shlex.split(llama_options), limit=parse_size(memory) if memory else None, **options,
    )  # fmt: skip
    found = compare_servers.compare(
        servers, questions(prompts, limit),
        [compare_servers.Load(k, rate) for k in at_once for rate in rates or [0.0]], rounds=rounds,
        body={"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p}, say=partial(click.echo, err=True),
    )  # fmt: skip
    click.echo(compare_servers.shown(found))


@command.command(
    name="wire", epilog="Example:  scripts/bench serve wire smollm2-135m --llama-server build/bin/llama-server"
)
@click.argument("model")
@click.option("--llama-server", "program", required=True, metavar="PATH", help="llama.cpp's server.")
@click.option("--record", type=PATH, metavar="FILE", help="Write there what it answers.")
@LLAMA_OPTIONS
@click.option("--threads", type=AT_LEAST_1, default=2)
def wire_(model: str, program: str, record: Path | None, llama_options: str, threads: int) -> None:
    """What llama-server answers otherwise.

    Differences in statuses, fields and types, order of events, and tokens.
    """
    if record:
        check_out(record, b"{", "such a recording")
    path = local_path(find_model(model, None).target)
    about = llama_server.options(path, parallel=2, context_length=wire.CONTEXT, threads=threads)
    with llama_server.started([program, *about, *shlex.split(llama_options)]) as port:
        theirs = wire.record(port)
    if record:
        lines = [f"{json.dumps(name)}: {json.dumps(told, ensure_ascii=False)}" for name, told in theirs.items()]
        write_whole(record, "{\n" + ",\n".join(lines) + "\n}\n")
    options: dict[str, Any] = wire.OPTIONS | {"threads": threads}
    with load_model(path, **options) as loaded, served(loaded) as port:
        found = wire.compare(theirs, wire.record(port), 2 * loaded.target.capabilities.logit_tolerance)
    for one in found:
        click.echo(f"{'meant' if one.meant else 'WRONG'}: {one}" + (f"\n       {one.meant}" if one.meant else ""))
    wrong = sum(not one.meant for one in found)
    click.echo(f"{len(theirs)} requests; {len(found)} differences, of which {wrong} are not meant")
    sys.exit(bool(wrong))
