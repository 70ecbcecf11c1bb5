"""`scripts/bench`: a subcommand is a module of `benchmarks.commands` with a `command`, and its name in COMMANDS."""

from importlib import import_module

import click

COMMANDS = ("accuracy", "fuzz", "measured", "offload", "serve", "speeds")


@click.group(
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110, "show_default": True},
)
def bench() -> None:
    """Measure edgespec: speed beside other programs, exactness, and what approximate methods cost.

    `edgespec bench` compares planners with plain decoding.
    """


for name in COMMANDS:
    bench.add_command(import_module(f"benchmarks.commands.{name}").command, name)
