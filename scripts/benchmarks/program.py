"""`scripts/bench`: a subcommand is a module of `benchmarks.commands` with a `command`, and its name in COMMANDS."""

from importlib import import_module

import click

COMMANDS = ("accuracy", "fuzz", "measured", "offload", "serve", "speeds")


class Bench(click.Group):
    """Imports only the subcommand that runs."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        found: click.Command = import_module(f"benchmarks.commands.{cmd_name}").command
        return found


@click.group(
    cls=Bench,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110, "show_default": True},
)
def bench() -> None:
    """Measure edgespec: speed beside other programs, exactness, and what approximate methods cost.

    `edgespec bench` compares planners with plain decoding.
    """
