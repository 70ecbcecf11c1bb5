"""What a shell may offer for a model: names, then files. The scripts for bash, zsh and fish are click's own."""

import click
from click.shell_completion import CompletionItem

from edgespec.errors import RegistryError
from edgespec.models.registry import all_models


def complete_model(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Names that start with `incomplete`, and leave for the shell to look for files."""
    # bash forgets what it has at the item that stands for files, so that comes first.
    found = [CompletionItem(incomplete, type="file")]
    try:
        entries = all_models(context.params.get("models_file"))
    except RegistryError:  # the command itself will say so
        return found
    return found + [
        CompletionItem(entry.name, help=entry.description) for entry in entries if entry.name.startswith(incomplete)
    ]
