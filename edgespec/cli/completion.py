"""Completion of model names and files; the scripts for shells are click's own."""

import click
from click.shell_completion import CompletionItem

from edgespec.errors import RegistryError
from edgespec.models.registry import all_models


def complete_model(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    # The item for files comes first: bash drops the items before it.
    found = [CompletionItem(incomplete, type="file")]
    try:
        entries = all_models(context.params.get("models_file"))
    except RegistryError:  # the command reports this error when it runs
        return found
    return found + [
        CompletionItem(entry.name, help=entry.description) for entry in entries if entry.name.startswith(incomplete)
    ]
