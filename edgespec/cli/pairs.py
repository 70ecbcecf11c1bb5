"""`edgespec pair`: how well a draft suits a target, and the search for one that does."""

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import click

from edgespec.cli.catalogue import entries_needed, pull_what_is_missing
from edgespec.cli.completion import complete_model
from edgespec.cli.options import MODELS_OPTION, YES_OPTION, allow_only, context_option, not_empty
from edgespec.cli.terminal import Bars
from edgespec.errors import UsageError, check_whole
from edgespec.machine.files import check_out
from edgespec.machine.memory import available_memory, in_bytes
from edgespec.models.registry import OWN, find_model, is_folder, local_path


@click.command(
    epilog="""\b
Examples:
  edgespec pair big.gguf small.gguf
  edgespec pair big.gguf small.gguf --memory 12G --tasks code --write my-pair
  edgespec pair big.gguf small.gguf --write CARD.md    a page to publish beside the files
  edgespec pair big.gguf --find                every smaller GGUF beside it, fetched from the hub or named
  edgespec pair big.gguf small.gguf --quick    one pass of each: how often they agree"""
)
@click.argument("target", shell_complete=complete_model)
@click.argument("draft", required=False, shell_complete=complete_model)
@click.option(
    "--find",
    is_flag=True,
    help="Try every smaller GGUF with the same vocabulary: below the folder of TARGET, in the hub's cache, "
    "and of models by name.",
)
@click.option("--quick", is_flag=True, help="Only an estimate, from one pass of each model.")
@click.option("--tasks", default="prose,code,chat", show_default=True, help="Kinds of questions, with commas.")
@click.option("--questions", "count", type=int, default=3, show_default=True, help="Of each kind, at most 5.")
@click.option("--max-tokens", "-n", type=int, default=96, show_default=True, help="Of an answer.")
@click.option("--budget", type=int, default=64, show_default=True, help="Largest budget that is tried.")
@click.option("--memory", metavar="SIZE", help="Memory to use, for example 12G. [default: what is free]")
@context_option(default=2048, show_default=True, help="Context in tokens.")
@click.option("--png", metavar="FILE", callback=not_empty, help="Draw tokens per pass and tokens/s by budget.")
@click.option(
    "--write",
    metavar="NAME|CARD.md",
    callback=not_empty,
    help="Add the pair with its figures to your own models.yaml, or write a model card of it.",
)
@MODELS_OPTION
@YES_OPTION
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object; with --find one a line for each draft.")
def pair(
    target: str, draft: str | None, find: bool, quick: bool, count: int, max_tokens: int, budget: int,
    context_length: int, png: str | None, write: str | None, yes: bool, as_json: bool, **options: Any,
) -> None:  # fmt: skip
    """Check whether DRAFT suits TARGET, and measure what it gains here.

    Without DRAFT the one in models.yaml is taken. TARGET's greedy answers to a few questions are recorded once; every
    planner is then replayed against them, and passes are timed. The result may be that no draft is best.
    """
    from edgespec.measure import pair_report as report
    from edgespec.measure.pair import agreement, drafts_here, expected_tokens, measure_pair
    from edgespec.measure.recording import questions

    asked = questions([task.strip() for task in options.pop("tasks").split(",")], count)
    check_whole("max tokens", max_tokens, 2)  # the first needs no pass
    check_whole("budget", budget, 1)
    room = in_bytes("--memory", options["memory"])
    if find and (draft or quick or write or png):
        raise UsageError("--find tries all drafts there are: it goes without DRAFT, --quick, --write and --png")
    if quick:
        allow_only(
            "--quick measures no speed", "target", "draft", "quick", "memory", "context_length", "models_file", "yes",
            "as_json",
        )  # fmt: skip
    if png:
        report.check_picture(png)
    card = Path(write) if write and write.endswith(".md") else None
    if card:
        check_out(card, report.CARD, "a model card")
    own = report.check_writable(write) if write and not card else None
    entry = find_model(target, options["models_file"])
    draft = None if find else draft or entry.draft
    if quick and not draft:
        raise UsageError("--quick compares two models: name a draft")
    needed = entries_needed(target, draft, options["models_file"], drafts=False)
    for model in needed:
        if is_folder(model.target):
            raise UsageError(f"{model.target.partition(':')[2]} is a model folder; pairs are measured of GGUF files")
    pull_what_is_missing(needed, options["models_file"], yes, heads=False)
    if not find and not draft:
        click.echo(
            "note: no draft is named, so only copying from the text (sssd) is measured: name a small model of the same "
            "family, or say --find",
            err=True,
        )
    good, candidates = list[str](), [draft] if draft else []
    with Bars(transient=True) as bar:
        path = local_path(entry.target)
        if find:
            bar.say("looking for drafts")
            candidates = drafts_here(path, options["models_file"])
        for done, candidate in enumerate(candidates):
            if find:
                bar.update("comparing vocabularies", done, len(candidates))
            if _suits(path, candidate, context_length, find, bar, room, options["models_file"]):
                good.append(candidate)
    if find:
        click.echo(f"{len(good)} of {len(candidates)} files have the target's vocabulary", err=True)
    elif draft and not good:
        sys.exit(1)
    with Bars(transient=True) as bar:
        if quick and draft:
            found = agreement(entry, draft, **options, say=bar.say)
            bar.stop()
            _tell_agreement(found, expected_tokens(found[1]), as_json)
            return
        shared = {"max_tokens": max_tokens, "budget": budget, "context_length": context_length, **options}
        drafts: list[str | None] = [*good] or [None]
        measured = [
            (str(one), measure_pair(entry, one, asked, progress=bar.update, say=bar.say, **shared)) for one in drafts
        ]
    for _, one in measured:
        for note in one.notes:
            click.echo(click.style(note, dim=True), err=True)
        click.echo(json.dumps(_as_json(one)) if as_json else f"{report.pair_table(one)}\n{report.recommendation(one)}")
    if find and good and not as_json:
        click.echo(report.ranking(measured))
    if png:
        report.picture(measured[0][1], Path(png))
    if not write:
        return
    sources = {"target": entry.target, "draft": find_model(draft, options["models_file"]).target if draft else None}
    about = report.figures(measured[0][1], options["memory"])
    if own:
        report.append_entry(own, _entry(write, sources, about))
        click.echo(f"{own}: {write} is added", err=True)
    elif card:
        command = shlex.join(["edgespec", *(Path(one).name if Path(one).exists() else one for one in sys.argv[1:])])
        report.write(card, report.card(measured[0][1], sources, about, command))
        click.echo(f"{card} is written; to publish it: hf upload OWNER/REPOSITORY {card} README.md", err=True)


def _suits(
    path: str, draft: str, context_length: int, quietly: bool, bar: Bars, room: int | None, models_file: str | None
) -> bool:
    """Print refusals and warnings; true if the draft can be used."""
    from edgespec.measure.pair_checks import check_pair, no_states

    if draft in OWN:
        raise UsageError(no_states(draft))
    other = local_path(find_model(draft, models_file).target)
    verdict = check_pair(path, other, context_length=context_length, memory=room or available_memory())
    if not quietly:
        bar.stop()
        for line in verdict.refusals:
            click.echo(f"edgespec: {line}", err=True)
        for line in verdict.warnings:
            click.echo(f"note: {line}", err=True)
    return not verdict.refusals


def _tell_agreement(found: dict[int, float], tokens: float, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps({"agreement": found, "expected_tokens_per_pass": tokens}))
        return
    shares = ", ".join(f"{100 * share:.0f} % among the {rank} best" for rank, share in list(found.items())[1:])
    click.echo(f"the draft's best token is the target's in {100 * found[1]:.0f} % of places; {shares}")
    click.echo(f"an estimate from one pass: about {tokens:.1f} tokens per pass with 8 draft tokens in a row")


def _as_json(found: Any) -> dict[str, Any]:
    from dataclasses import asdict

    rows = [{**asdict(row), "tokens_per_second": row.tokens_per_second} for row in found.rows]
    best = {"planner": found.best.planner, "budget": found.best.budget}
    return {**asdict(found), "rows": rows, "recommended": best}


def _entry(name: str, sources: dict[str, str | None], measured: dict[str, Any]) -> dict[str, Any]:
    absolute = {
        role: f"file:{Path(source[5:]).absolute()}" if source.startswith("file:") else source
        for role, source in sources.items()
        if source
    }
    defaults = {name: measured[name] for name in ("planner", "budget") if measured[name]}
    if defaults["planner"] == "specexec":  # auto, the default, uses the draft, too
        del defaults["planner"]
    return {"name": name, **absolute, "defaults": defaults, "measured": [measured]}
