import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from edgespec.cli.completion import complete_model
from edgespec.cli.options import MODELS_OPTION
from edgespec.cli.terminal import Bars
from edgespec.errors import EdgespecError, UsageError
from edgespec.models import hub
from edgespec.models.registry import Entry, all_models, find_model


@click.command(
    epilog="""\b
Examples:
  edgespec models --fit                        what this machine can run, the best first
  edgespec models --fit --memory 16G           a machine with this much memory
  edgespec models qwen3-32b                    the settings of one model"""
)
@click.argument("model", required=False, shell_complete=complete_model)
@MODELS_OPTION
@click.option("--fit", "by_fit", is_flag=True, help="Sort by how well models fit this machine.")
@click.option("--memory", metavar="SIZE", help="Memory to assume, such as 16G. [default: what is free]")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list; with MODEL, one JSON object.")
def models(model: str | None, models_file: str | None, by_fit: bool, memory: str | None, as_json: bool) -> None:
    """List models by name: size, licence, and how they would run on this machine.

    With MODEL, a name or a path as for `edgespec run`: its default settings, and the origin of each. Weights are not
    loaded, and nothing is fetched.
    """
    from edgespec.cli.model_card import card_text, model_card
    from edgespec.machine.memory import available_memory, parse_size
    from edgespec.models.fit import fit
    from edgespec.weights.plan import SAFETY

    if model:
        card = model_card(find_model(model, models_file))
        click.echo(json.dumps(card, ensure_ascii=False) if as_json else card_text(card))
        return
    room = parse_size(memory) if memory else int(available_memory() * (1 - SAFETY))
    disk = shutil.disk_usage(next(place for place in (_cache(), *_cache().parents) if place.exists())).free
    fits = [fit(entry, room, disk) for entry in all_models(models_file)]
    if by_fit:
        fits.sort(key=lambda one: one.order)
    if as_json:
        facts = ("missing", "streamed", "verdict")
        sizes = [{"bytes": {"target": one.target, "draft": one.draft}} for one in fits]
        rows = [{name: getattr(one, name) for name in facts} | size for one, size in zip(fits, sizes, strict=True)]
        click.echo(json.dumps([one.entry.model_dump() | row for one, row in zip(fits, rows, strict=True)]))
        return
    for one in fits:
        entry = one.entry
        size = f"{one.target / 1e9:.1f} GB" + (f" + {one.draft / 1e9:.1f}" if one.draft else "")
        here = "" if one.missing else "; is here"
        what = ", ".join(filter(None, [entry.description, entry.license]))
        click.echo(f"{click.style(entry.name, bold=True)}  {what}")
        click.echo(f"    {size if one.target else ''}{', ' if one.target else ''}{one.verdict}{here}")
        click.echo(f"    target  {entry.target}")
        if entry.draft:
            click.echo(f"    draft   {entry.draft}")
    click.echo(f"assumed: {room / 1e9:.1f} GB of memory and {disk / 1e9:.0f} GB of disk", err=True)


def _cache() -> Path:
    try:
        from huggingface_hub import constants
    except ImportError:
        return Path.home()
    return Path(constants.HF_HUB_CACHE)


@click.command(
    epilog="""\b
Examples:
  edgespec pull qwen3-32b                                         target and draft
  edgespec pull bartowski/Llama-3.2-1B-Instruct-GGUF:Q4_K_M       one file of a repository, by its type
  edgespec pull hf:OWNER/REPOSITORY/big-00001-of-00003.gguf       all parts
  edgespec pull qwen3-32b --dry-run                               what it would fetch"""
)
@click.argument("names", metavar="NAME|SOURCE…", nargs=-1, required=True, shell_complete=complete_model)
@click.option("--draft/--no-draft", default=True, help="Fetch the draft of a NAME, too. [default: draft]")
@click.option("--dry-run", is_flag=True, help="List files and sizes, fetch nothing.")
@MODELS_OPTION
def pull(names: tuple[str, ...], draft: bool, dry_run: bool, models_file: str | None) -> None:
    """Fetch models from the hub into its cache, or update them.

    Ctrl-C keeps what is fetched; the same command continues. Checksums are compared with the hub's, and with those in
    models.yaml.
    """
    entries = [find_model(name, models_file) for name in names]
    for name, entry in zip(names, entries, strict=True):
        if entry.target.startswith("file:"):
            path = entry.target[5:]
            if Path(path).exists():
                raise UsageError(f"{name}: is a path on this machine; there is nothing to fetch")
            raise UsageError(
                f"{name}: there is no such file here; for one on the hub write hf:OWNER/REPOSITORY/FILE.gguf"
            )
    sources = sources_of(entries, draft)
    if not sources:
        raise UsageError(f"{', '.join(names)}: comes in a Python package; there is nothing to fetch")
    listings = ask(sources, entries)
    for file, size, here in hub.sizes_by_file(listings):
        click.echo(f"{size / 1e9:8.2f} GB  {'is here ' if here else 'to fetch'}  {file}")
    hub.check_space(list(listings.values()))
    missing = sum(file.size for listing in listings.values() for file in listing.missing)
    if dry_run:
        click.echo(f"{missing / 1e9:8.2f} GB  in all")
        return
    fetch_all(listings)


def sources_of(entries: Sequence[Entry], draft: bool) -> list[str]:
    sources = [source for entry in entries for source in (entry.target, entry.draft if draft else None) if source]
    return [source for source in dict.fromkeys(sources) if source.startswith("hf:")]


def ask(sources: Sequence[str], entries: Sequence[Entry]) -> dict[str, hub.Listing]:
    """Ask the hub for the files of each source, and check them against models.yaml.

    Raises:
        ModelError: the hub does not answer, or has other files.
    """
    listings = {}
    for source in sources:
        listings[source] = listing = hub.ask(hub.parse(source.removeprefix("hf:")))
        for facts in filter(None, (entry.files.get(source) for entry in entries)):
            hub.check_listing(listing, facts.bytes, facts.sha256)
    return listings


def fetch_all(listings: dict[str, hub.Listing], err: bool = False) -> None:
    """Fetch missing files with progress bars; print the path of each source, on standard error if `err`."""
    from rich.progress import DownloadColumn, TransferSpeedColumn

    with Bars(DownloadColumn(), TransferSpeedColumn()) as bars:
        for listing in listings.values():
            try:
                path = hub.fetch(listing, bars.update, lambda text: click.echo(text, err=True))
            except KeyboardInterrupt:
                click.echo("stopped; what is fetched is kept, and the same command continues", err=True)
                raise
            click.echo(path, err=err)


def pull_what_is_missing(entries: Sequence[Entry], yes: bool) -> None:
    """Fetch missing files before a run, after a question unless `yes`.

    Raises:
        EdgespecError: files are missing, and there is no terminal for the question.
    """
    missing = [source for source in sources_of(entries, draft=True) if not hub.cached(hub.parse(source[3:]))]
    if not missing:
        return
    listings = ask(missing, entries)
    size = sum(file.size for listing in listings.values() for file in listing.missing)
    what = f"{', '.join(source[3:] for source in missing)}: {size / 1e9:.2f} GB are not here yet"
    if size and not yes:
        if not (sys.stdin.isatty() and sys.stderr.isatty()):
            raise EdgespecError(f"{what}; say --yes, or fetch them first: edgespec pull {entries[0].name}")
        click.confirm(f"{what}. Fetch them?", default=True, abort=True, err=True)
    fetch_all(listings, err=True)
