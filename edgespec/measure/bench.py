"""Compare planners on real prompts; every answer is checked against plain decoding."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from edgespec.errors import UsageError, check_whole
from edgespec.loading.approximate import find_approximate
from edgespec.loading.asked import asked_for
from edgespec.loading.exact import note_on_budget
from edgespec.loading.pair import close_all, open_backends
from edgespec.loading.timed_pass import time_tiles
from edgespec.loop.backend import Backend
from edgespec.loop.passes import check_room
from edgespec.loop.sampling import SamplingParams
from edgespec.loop.stats import GenerationStats
from edgespec.loop.text import user_messages
from edgespec.machine.files import read_text
from edgespec.measure.lossless import explain
from edgespec.measure.tables import table
from edgespec.model import Model
from edgespec.models.registry import local_path
from edgespec.planners.auto import new_auto_state
from edgespec.planners.choice import check_draft_options, make_planner, options_of, with_datastore, with_draft

FIELDS = ("prompt", "turns", "question", "text")  # of a record, the first that is there; of turns the first is taken
SHARES = ("draft", "target", "wait", "plan")  # parts of an answer's seconds
VERDICTS = (("ties", "ties"), ("unexplained", "WRONG"))  # keys of a report, and their words in the table


@dataclass(frozen=True, slots=True)
class BenchPrompt:
    text: str
    category: str


@dataclass(slots=True)
class Tally:
    runs: list[GenerationStats] = field(default_factory=list)
    ties: int = 0
    unexplained: int = 0


def read_prompts(path: Path, limit: int | None = None) -> list[BenchPrompt]:
    """
    Args:
        path: of a file with a record a line, or one JSON list of them: objects, or pairs of a number and a text.
        limit: number of prompts to take, evenly spaced; None: all.

    Raises:
        UsageError: names the file and the line.
    """
    whole, prompts = read_text(path, UsageError, once=True), list[BenchPrompt]()
    for place, line in _records(whole):
        try:
            record = json.loads(line) if isinstance(line, str) else line
            if isinstance(record, list):
                _, text = record
            else:
                name = next((name for name in FIELDS if name in record), "turns")
                text = record["turns"][0] if name == "turns" else record[name]
            if not isinstance(text, str) or not text.strip():
                raise TypeError
            text.encode()  # JSON can spell half a character, which UTF-8 cannot
        except (ValueError, KeyError, IndexError, TypeError, RecursionError) as error:
            raise UsageError(f"{path}, {place}: needs a JSON object with UTF-8 text as {', '.join(FIELDS)}") from error
        prompts.append(BenchPrompt(text, str(record.get("category", "")) if isinstance(record, dict) else ""))
    if not prompts:
        raise UsageError(f"{path}: has no prompts")
    if limit is None or limit >= len(prompts):
        return prompts
    if limit < 1:
        raise UsageError(f"limit is {limit}, but must be at least 1")
    return [prompts[i * len(prompts) // limit] for i in range(limit)]


def _records(whole: str) -> Iterator[tuple[str, Any]]:
    """
    Returns:
        Place and record of each record of a JSON list, or place and text of each line that is not empty.
    """
    with suppress(ValueError, RecursionError):
        records = json.loads(whole)
        if isinstance(records, list) and all(isinstance(record, list | dict) for record in records):
            return ((f"record {number}", record) for number, record in enumerate(records, 1))
    lines = enumerate(whole.split("\n"), 1)  # JSON strings may hold what `splitlines` splits at
    return ((f"line {number}", line) for number, line in lines if line.strip())


def run_bench(
    model: str,
    prompts: Sequence[BenchPrompt],
    planners: Sequence[str],
    sampling: dict[str, Any],
    planner_options: dict[str, Any],
    *,
    datastore: str | None = None,
    max_tokens: int = 96,
    raw: bool = False,
    system: str | None = None,
    ahead: bool | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
    say: Callable[[str], None] = lambda text: None,
    ready: Callable[[Sequence[str]], None] = lambda notes: None,
    **options: Any,
) -> dict[str, Any]:
    """Measure; further arguments are those of `edgespec.load` and `Model.stream`.

    Args:
        sampling: of all prompts; prompt i has seed + i.
        progress: called with the numbers of prompts that are done, and of all.
        ready: called when the models are loaded, with notes for the user.
        options: further arguments of `edgespec.load`.

    Returns:
        A report that `bench_table` shows and JSON holds. `unexplained` counts divergences that are not ties.
    """
    names, max_tokens = ["none", *dict.fromkeys(planners)], check_whole("max_tokens", max_tokens, 1)
    drafting, copying, method = with_draft(names), with_datastore(names), find_approximate(options.get("approximate"))
    if method and not method.mixed:
        raise UsageError(f"bench compares planners, and with --approximate {method.name} each gives another text")
    variants = {
        name: asked_for(
            model, planner=name, ahead=ahead if name in drafting else None, say=say,
            datastore=datastore if name in copying else None, **options, **options_of(name, planner_options),
        )
        for name in names
    }  # fmt: skip
    first = next((one for one in variants.values() if one.draft), variants["none"])
    fixed, budget = first.fixed, first.options.budget
    check_draft_options(first.draft is not None, ahead, planner_options)
    load_options = replace(first.options, ahead=any(one.options.ahead for one in variants.values()))
    system = system or first.entry.defaults.system
    backends = open_backends(first.entry, first.draft, first.models_file, load_options, say=say)
    try:
        notes = [*backends[0].notes, *first.notes]
        if fixed and len(variants) > 1:
            path = local_path(first.entry.target, fetch=False)
            notes += note_on_budget(budget, backends[0], path, approximate=method is not None)
        ready(notes)
        asked = [prompt.text if raw else user_messages(prompt.text, system) for prompt in prompts]
        with Model(backends[0], make_planner("none", backends)) as loaded:
            token_ids = [loaded.encode(question) for question in asked]
        check_room(backends[0], max(map(len, token_ids)))  # before the first answer, since an error loses them all
        tallies = {name: Tally() for name in variants}
        limits = backends[0].capabilities
        paces = {
            name: None if fixed else new_auto_state(limits.streams, limits.experts, tiled=limits.tiled)
            for name in variants
        }
        time_tiles([*filter(None, paces.values())], *backends, say=say)
        progress(0, len(asked))
        for i, question in enumerate(asked):
            params = SamplingParams(**{**sampling, "seed": (sampling.get("seed", 0) + i) % 2**64})
            plain: list[int] = []
            for name, variant in variants.items():
                [planner] = variant.planners(backends, paces[name])
                # A new session for every answer, so that no planner reuses what another has computed.
                with Model(backends[0], planner, budget=max(budget, limits.widest), sampling=params) as loaded:
                    result = loaded.generate(question, max_tokens=max_tokens, seed=params.seed)
                plain = plain or result.token_ids  # `none` comes first
                tallies[name].runs.append(result.stats)
                if method and plain != result.token_ids:  # the draft's rows round, too, and `explain` has none
                    tie = any(backend.capabilities.logit_tolerance for backend in backends)
                    tallies[name].ties += tie
                    tallies[name].unexplained += not tie
                elif divergence := explain(backends[0], token_ids[i], plain, result.token_ids, params):
                    tallies[name].ties += divergence.tie
                    tallies[name].unexplained += not divergence.tie
            progress(i + 1, len(asked))
        return _report(tallies, backends, prompts, sampling, max_tokens, notes)
    finally:
        close_all(backends)


def _report(
    tallies: dict[str, Tally], backends: Sequence[Backend], prompts: Sequence[BenchPrompt], sampling: dict[str, Any],
    max_tokens: int, notes: Sequence[str],
) -> dict[str, Any]:  # fmt: skip
    target, rows = backends[0], dict[str, dict[str, Any]]()
    categories = sorted({prompt.category for prompt in prompts} - {""})
    for name, tally in tallies.items():
        runs = tally.runs
        seconds, gained, passes = (_total(runs, one) for one in ("seconds", "gained", "passes"))
        rows[name] = {
            "tokens": _total(runs, "tokens"),
            "passes": passes,
            "acceptance_length": per(gained, passes),
            "mean_of_prompts": fmean(stats.acceptance_length for stats in runs),
            "tokens_per_second": per(gained, seconds),
            **{f"{part}_share": per(_total(runs, f"{part}_seconds"), seconds) for part in SHARES},
            "by_prompt": [{"tokens": stats.tokens, "passes": stats.passes} for stats in runs],
            "ties": tally.ties,
            "unexplained": tally.unexplained,
            "by_category": {},
        }
        for category in categories:
            of_it = [stats for stats, prompt in zip(runs, prompts, strict=True) if prompt.category == category]
            rows[name]["by_category"][category] = per(_total(of_it, "gained"), _total(of_it, "passes"))
        rows[name]["ratio_to_plain"] = per(rows[name]["tokens_per_second"], rows["none"]["tokens_per_second"])
    return {
        "prompts": len(prompts),
        "max_tokens": max_tokens,
        "sampling": sampling,
        "backend": target.name,
        "draft_backend": backends[1].name if len(backends) > 1 else None,
        "notes": notes,
        "exact": target.capabilities.exact.name if target.capabilities.exact else "",
        "approximate": tallies["none"].runs[0].approximate,
        "logit_tolerance": target.capabilities.logit_tolerance,
        "unexplained": sum(tally.unexplained for tally in tallies.values()),
        "planners": rows,
    }


def per(amount: float, of: float) -> float:
    """0 where nothing was decoded: a prompt gives an answer of one token."""
    return amount / of if of else 0.0


def _total(runs: Sequence[GenerationStats], name: str) -> Any:
    return sum(getattr(stats, name) for stats in runs)


def bench_table(report: dict[str, Any]) -> str:
    shapes = f", passes: {report['exact']}" if report["exact"] else ""
    shapes += f", approximate: {report['approximate']}" if report["approximate"] else ""
    title = f"{report['prompts']} prompts, at most {report['max_tokens']} tokens each, on {report['backend']}{shapes}"
    headings = ("acceptance length", "tokens/s", "x plain", "draft", "target", "disk", "planning", "plain's tokens")
    rows, by_category = [], []
    for name, row in report["planners"].items():
        equal = f"{report['prompts'] - row['ties'] - row['unexplained']} equal"
        shares = row["draft_share"], row["target_share"] - row["wait_share"], row["wait_share"]
        rows.append([
            name, f"{row['acceptance_length']:.2f}", f"{row['tokens_per_second']:.1f}", f"{row['ratio_to_plain']:.2f}",
            *(f"{100 * share:.0f} %" for share in shares), f"{100 * row['plan_share']:.1f} %",
            ", ".join([equal, *(f"{row[key]} {word}" for key, word in VERDICTS if row[key])]),
        ])  # fmt: skip
        by_category.append([name, *(f"{length:.2f}" for length in row["by_category"].values())])
    shown = table(title, ("planner", *headings), rows)
    if categories := list(report["planners"]["none"]["by_category"]):
        shown += "\n" + table("acceptance length by category", ("planner", *categories), by_category)
    return shown
