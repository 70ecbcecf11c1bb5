"""`edgespec models` and `edgespec pull`, and fetching what another command lacks."""

import json
import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

import click

from edgespec.cli.completion import complete_model
from edgespec.cli.options import MACHINE_OPTION, MODELS_OPTION, allow_only
from edgespec.cli.terminal import Bars
from edgespec.errors import EdgespecError, UsageError
from edgespec.machine.described import find_machine
from edgespec.machine.files import part_names
from edgespec.machine.memory import format_size, in_bytes
from edgespec.machine.this_machine import this_machine
from edgespec.measure.fit import Fit, fit, measured_here, with_memory
from edgespec.measure.outlook import COMPUTED
from edgespec.models import hub, pulled
from edgespec.models.registry import Entry, all_models, check_facts, find_draft, find_model, local_path
from edgespec.weights.plan import SAFETY, two_digits

KEPT = 4 << 30  # bytes of a machine's memory for its system and other programs, at most half of it: an assumption


@click.command(
    epilog="""\b
Examples:
  edgespec models --fit                        what this machine can run, the best first
  edgespec models --fit --memory 16G           a machine with this much memory
  edgespec models --fit --machine macbook-24   another machine
  edgespec models qwen3-32b                    the settings of one model
  edgespec models --installed                  what edgespec fetched, and where it is
  edgespec models --delete qwen3-32b           delete what edgespec fetched of it"""
)
@click.argument("model", required=False, shell_complete=complete_model)
@MODELS_OPTION
@click.option("--fit", "by_fit", is_flag=True, help="Sort by how well models fit this machine.")
@click.option(
    "--memory",
    metavar="SIZE",
    help=f"Memory of a machine, such as 16G, of which its system keeps {format_size(KEPT)}. [default: what is free]",
)
@MACHINE_OPTION
@click.option("--installed", is_flag=True, help="List what edgespec fetched: bytes, date, path.")
@click.option("--delete", "delete", metavar="NAME", help="Delete what edgespec fetched of a model, no other file.")
@click.option("--yes", "-y", is_flag=True, help="Delete without asking.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list; with MODEL, one JSON object.")
def models(
    model: str | None, models_file: str | None, by_fit: bool, memory: str | None, machine: str | None, installed: bool,
    delete: str | None, yes: bool, as_json: bool,
) -> None:  # fmt: skip
    """List models by name: size, licence, and how they would run on this machine.

    With MODEL, a name or a path as for `edgespec run`: its default settings, and the origin of each. Weights are not
    loaded, and nothing is fetched.
    """
    from edgespec.cli.model_card import card_text, model_card

    if delete:
        allow_only("--delete only deletes", "delete", "models_file", "yes")
        delete_model(delete, models_file, yes)
        return
    if yes:
        raise UsageError("--yes is for --delete: leave it out")
    if installed:
        allow_only("--installed lists what edgespec fetched", "installed", "models_file", "as_json")
        list_installed(as_json)
        return
    if model:
        for name, given in (("--fit", by_fit), ("--memory", memory), ("--machine", machine)):
            if given:
                raise UsageError(f"{name} goes without MODEL: edgespec doctor {model} predicts how one model runs")
        card = model_card(find_model(model, models_file))
        click.echo(json.dumps(card, ensure_ascii=False) if as_json else card_text(card))
        return
    if machine and memory:
        raise UsageError("--memory goes without --machine, whose memory its description states")
    fits, assumed = _fits(memory, machine, models_file)
    if by_fit:
        fits.sort(key=lambda one: one.order)
    if as_json:
        facts = ("missing", "streamed", "verdict", "tokens_per_second")
        sizes = [{"bytes": {"target": one.target, "draft": one.draft}} for one in fits]
        rows = [{name: getattr(one, name) for name in facts} | size for one, size in zip(fits, sizes, strict=True)]
        click.echo(json.dumps([one.entry.model_dump(mode="json") | row for one, row in zip(fits, rows, strict=True)]))
        return
    for one in fits:
        entry = one.entry
        size = f"{one.target / 1e9:.1f} GB" + (f" + {one.draft / 1e9:.1f}" if one.draft else "")
        here = "" if one.missing or not one.target else "; is here"
        what = ", ".join(filter(None, [entry.description, entry.license]))
        click.echo(f"{click.style(entry.name, bold=True)}  {what}")
        speed = f", about {two_digits(one.tokens_per_second)} tokens/s" if one.tokens_per_second else ""
        click.echo(f"    {size if one.target else ''}{', ' if one.target else ''}{one.verdict}{speed}{here}")
        click.echo(f"    target  {entry.target}")
        if entry.draft:
            click.echo(f"    draft   {entry.draft}")
    click.echo(assumed, err=True)


def _fits(memory: str | None, machine: str | None, models_file: str | None) -> tuple[list[Fit], str]:
    """All models on this machine, or with this much memory, or on another machine; and what was assumed."""
    given = in_bytes("--memory", memory) or 0
    entries, disk = all_models(models_file), None
    if machine:
        called, described = find_machine(machine)
        assumed = f"{called}: plain decoding, {COMPUTED}; edgespec doctor NAME --machine {machine} says more"
    else:
        cache = next(place for place in (_cache(), *_cache().parents) if place.exists())
        described, disk = measured_here(entries, cache), shutil.disk_usage(cache).free
        kept = min(KEPT, given // 2)
        if given:
            described = with_memory(described, given, given - kept)
        system = f" ({kept / 1e9:.1f} more for the system and other programs)" if kept else ""
        room, memory_speed = described.free * (1 - SAFETY) / 1e9, described.memory_speed / 1e9
        disk_speed = f"{described.disk.speed / 1e9:.1f} GB/s" if described.disk.speed else "a speed that is not known"
        assumed = (
            f"{room:.1f} GB of memory{system}, which processors read at {memory_speed:.1f} GB/s, and {disk / 1e9:.0f} "
            f"GB of disk, read at {disk_speed}: plain decoding, {COMPUTED}; edgespec doctor NAME measures it"
        )
    fits = list[Fit]()
    with Bars(transient=True) as bars:
        for entry in entries:
            bars.update("planning", len(fits), len(entries))
            fits.append(fit(entry, described, disk))
    return fits, assumed


def list_installed(as_json: bool) -> None:
    found = pulled.installed(hub.cache_of_hub())
    if as_json:
        rows = [{"name": one.source, "bytes": one.bytes, "when": one.when, "path": str(one.path)} for one in found]
        click.echo(json.dumps(rows))
        return
    for one in found:
        when = f"{datetime.fromtimestamp(one.when):%Y-%m-%d}" if one.when else "incomplete"
        click.echo(f"{click.style(one.source, bold=True)}\n    {one.bytes / 1e9:.2f} GB, {when}, {one.path}")
    click.echo(f"{sum(one.bytes for one in found) / 1e9:.2f} GB in all, fetched by edgespec", err=True)


def delete_model(name: str, models_file: str | None, yes: bool) -> None:
    """
    Raises:
        UsageError: edgespec fetched nothing of it, or there is no terminal to ask at.
        EdgespecError: a file cannot be deleted.
    """
    found = pulled.installed(hub.cache_of_hub())
    chosen = [one for one in found if one.source == name]
    if not chosen:
        entry = find_model(name, models_file)
        others = [other for other in all_models(models_file) if other.name != name and _of(other.target, found)]
        shared = {source for other in others for source in (other.target, other.draft)}
        sources = [entry.target, *({entry.draft} - shared)]
        chosen = [one for source in sources if source for one in _of(source, found)]
        kept = {one.folder for one in found if one not in chosen and not hub.BESIDE.search(one.source)}
        chosen += [one for one in found if one not in chosen and one.folder in {c.folder for c in chosen} - kept]
    if not chosen:
        raise UsageError(f"{name}: edgespec fetched nothing of it; edgespec models --installed lists what it fetched")
    for one in chosen:
        click.echo(f"{one.bytes / 1e9:8.2f} GB  {one.source}", err=True)
    if not yes:
        if not (sys.stdin.isatty() and sys.stderr.isatty()):
            raise UsageError("there is no terminal to ask at: say --yes to delete")
        click.confirm("Delete?", abort=True, err=True)
    for one in chosen:
        try:
            pulled.delete(one)
        except OSError as error:
            raise EdgespecError(f"{error.filename}: cannot be deleted: {error.strerror or error}") from error
        click.echo(f"{one.source} is deleted")


def _of(source: str, found: Sequence[pulled.Pulled]) -> list[pulled.Pulled]:
    """Files of a source that edgespec fetched."""
    if not source.startswith("hf:"):
        return []
    wanted = hub.parse(source[3:])
    if wanted.is_folder:
        return [one for one in found if one.source == wanted.repository]
    inside = {one.source.removeprefix(f"{wanted.repository}/"): one for one in found}
    names = [name for name, one in inside.items() if name != one.source]
    file = part_names(wanted.file)[0] if wanted.file else hub.choose_file(names, wanted.type or "")
    return [inside[file]] if file in names else []


def _cache() -> Path:
    try:
        return hub.cache_of_hub()
    except EdgespecError:
        return Path(os.path.expanduser("~"))


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
        if entry.target.startswith("shape:"):
            local_path(entry.target)  # says why there is nothing to fetch
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
    listings = dict[str, hub.Listing]()
    try:
        listings = listings_of(sources, entries, models_file, heads=draft)
        files = hub.sizes_by_file(listings)
    except hub.Unreachable as error:
        files = _known_sizes(sources, models_file) if dry_run else []
        if not files:
            raise
        click.echo(f"note: these are the sizes in models.yaml, since the hub did not answer: {error}", err=True)
    for file, size, here in files:
        click.echo(f"{size / 1e9:8.2f} GB  {'is here ' if here else 'to fetch'}  {file}")
    hub.check_space(list(listings.values()))
    if dry_run:
        click.echo(f"{sum(size for _, size, here in files if not here) / 1e9:8.2f} GB  in all")
        return
    fetch_all(listings)
    if this_machine().platform == "darwin":
        from edgespec.measure.predictor import offer

        for line in [line for name in names for line in offer(name, models_file=models_file).lines]:
            click.echo(line, err=True)


def _known_sizes(sources: Sequence[str], models_file: str | None) -> list[tuple[str, int, bool]]:
    """As `hub.sizes_by_file`, by models.yaml; []: it has not all of them."""
    facts = {source: about.bytes for entry in all_models(models_file) for source, about in entry.files.items()}
    found = [(source, facts.get(source, 0), hub.cached(hub.parse(source[3:])) is not None) for source in sources]
    return found if all(size for _, size, _ in found) else []


def sources_of(entries: Sequence[Entry], draft: bool) -> list[str]:
    sources = [source for entry in entries for source in (entry.target, entry.draft if draft else None) if source]
    return [source for source in dict.fromkeys(sources) if source.startswith("hf:")]


def listings_of(
    sources: Sequence[str], entries: Sequence[Entry], models_file: str | None, *, heads: bool
) -> dict[str, hub.Listing]:
    """Ask the hub for the files of each source, and check them against models.yaml.

    Args:
        sources: on the hub.
        entries: which name them.
        models_file: a models.yaml besides the built-in one.
        heads: ask for the heads of targets, too.

    Raises:
        ModelError: the hub does not answer, or has other files.
    """
    listings = dict[str, hub.Listing]()
    for source in sources:
        listings[source] = listing = check_facts(hub.ask(hub.parse(source.removeprefix("hf:"))), source, models_file)
        if heads and any(source == entry.target for entry in entries) and not listing.source.is_folder:
            head, others = hub.heads_of(listing)
            if head and head.name not in listings:
                listings[head.name] = check_facts(hub.ask(head), head.name, models_file)
            for name in others:
                click.echo(f"note: {name}: a head of a kind that no engine here can use; it is not fetched", err=True)
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


def entries_needed(model: str, draft: str | None, models_file: str | None, drafts: bool = True) -> list[Entry]:
    """Entries of what a run loads, for `pull_what_is_missing`.

    Args:
        model: a name, path or source.
        draft: the same, which takes the place of the draft in models.yaml.
        models_file: a models.yaml besides the built-in one.
        drafts: the run uses a draft.
    """
    entry = find_model(model, models_file)
    found = [entry.model_copy(update={"draft": entry.draft if drafts and not draft else None})]
    return found + ([find_draft(draft, entry, models_file).model_copy(update={"draft": None})] if draft else [])


def pull_what_is_missing(entries: Sequence[Entry], models_file: str | None, yes: bool, *, heads: bool) -> None:
    """Fetch missing files before a run, after a question unless `yes`.

    Args:
        entries: of `entries_needed`.
        models_file: in which their names are, besides the built-in one.
        yes: do not ask.
        heads: fetch the heads of targets, too, which draft where there is no other draft.

    Raises:
        EdgespecError: files are missing, and there is no terminal for the question.
    """
    missing = [source for source in sources_of(entries, draft=True) if not hub.cached(hub.parse(source[3:]))]
    if not missing:
        return
    listings = listings_of(missing, entries, models_file, heads=heads)
    size = sum(file.size for listing in listings.values() for file in listing.missing)
    what = f"{', '.join(source[3:] for source in missing)}: {size / 1e9:.2f} GB"
    if size and yes:
        click.echo(f"fetching {what}", err=True)
    elif size:
        what += " are not here yet"
        if not (sys.stdin.isatty() and sys.stderr.isatty()):
            lacking = [entry.name for entry in entries if {entry.target, entry.draft} & {*missing}]
            pull = shlex.join([*dict.fromkeys(lacking), *(["--models", models_file] if models_file else [])])
            raise EdgespecError(f"{what}; say --yes, or fetch them first: edgespec pull {pull}")
        click.confirm(f"{what}. Fetch them?", default=True, abort=True, err=True)
    fetch_all(listings, err=True)
