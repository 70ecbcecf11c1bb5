"""Draft trees over mixtures of experts: what the target reads for them, recorded once and replayed by any policy."""

from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import click
import numpy as np
from edgespec.backends.llamacpp.backend import LlamaBackend
from edgespec.backends.llamacpp.engine import load, load_here, plan_here
from edgespec.backends.llamacpp.ggml.files import loaded_tensors
from edgespec.backends.llamacpp.memory.planning import find_expert_layers
from numpy.typing import NDArray

from benchmarks.options import AT_LEAST_1, FILE, PATH, Number, questions
from benchmarks.routing import (
    CHOSEN,
    LONGEST,
    Recorder,
    Values,
    predictions,
    prompt_ids,
    read_rows,
    read_trace,
    routers_of,
)
from benchmarks.tree_replay import Costs, Figures, Text, Trace, oracle_beside, read_trees, replays, write_trace
from edgespec.cli.options import refuse
from edgespec.cli.terminal import Bars
from edgespec.errors import ModelError, UsageError, must_be
from edgespec.loop.backend import Work
from edgespec.loop.draft_passes import run_one
from edgespec.loop.engines import LoadOptions
from edgespec.loop.planner import Context
from edgespec.loop.same_vocab import check_same_vocab
from edgespec.loop.sampling import Noise, SamplingParams, sample
from edgespec.loop.step import step_of
from edgespec.loop.tree import chain_of, only, ranked
from edgespec.machine.files import check_out
from edgespec.machine.memory import in_bytes, left_of
from edgespec.machine.this_machine import this_machine
from edgespec.measure.tables import table
from edgespec.models.registry import find_model, local_path
from edgespec.planners.specexec import SpecExecPlanner

TRACE = b"PK\x03\x04"  # first bytes of an .npz
READ = ("rows", "experts\na token", "MB\na token", "MB ahead\n(used)")


@click.command(
    epilog="""\b
Examples:
  scripts/bench trees mixture.gguf --draft draft.gguf --prompts questions.jsonl --write trace.npz
  scripts/bench trees trace.npz --memory 2G
  scripts/bench trees qwen.route.csv.gz"""
)
@click.argument("sources", nargs=-1, required=True)
@click.option("--write", type=PATH, metavar="TRACE.npz", help="Record a mixture's trace.")
@click.option("--draft", help="What drafts the trees of the trace.")
@click.option("--prompts", type=FILE, help="What the mixture answers.")
@click.option("--limit", type=AT_LEAST_1, default=8, help="Use this many of them, evenly spaced.")
@click.option("--max-tokens", "-n", type=AT_LEAST_1, default=64, help="Of an answer.")
@click.option("--temperature", "-t", type=Number(0), default=0.0)
@click.option("--nodes", type=AT_LEAST_1, default=24, help="Draft tokens of every tree.")
@click.option("--memory", metavar="SIZE", help="For experts, without a draft. [default: a quarter of them]")
@click.option("--draft-memory", metavar="SIZE", help="What a draft takes of it. [default: its file]")
@click.option(
    "--costs",
    default="99,23.8,0.57,1.43,45",
    metavar="FIXED,ROW,EXPERT,MISS,DRAFT",
    help="Milliseconds of a pass, of each row, expert and read of an expert, and of the draft's pass; measured on 2 "
    "cores without a GPU.",
)
def command(
    sources: tuple[str, ...],
    write: Path | None,
    draft: str | None,
    prompts: Path | None,
    limit: int,
    max_tokens: int,
    temperature: float,
    nodes: int,
    memory: str | None,
    draft_memory: str | None,
    costs: str,
) -> None:
    """What draft trees over a mixture would read and cost.

    SOURCES are traces (.npz), of which each policy is replayed, and route traces (.csv.gz), which have no draft. With
    --write the one source is a mixture, whose trace is recorded: at every position of its answers, a tree of the draft.
    """
    seconds = _costs(costs)
    if write:
        refuse("a trace is recorded, not replayed", "memory", "draft_memory", "costs")
        check_out(write, TRACE, "such a trace")
        if not (draft and prompts and len(sources) == 1):
            raise UsageError("--write records one mixture: give it alone, with --draft and --prompts")
        path, small = (local_path(find_model(name).target) for name in (sources[0], draft))
        with Bars() as bars:
            shown = partial(bars.update, "prompts")
            write_trace(write, _record(path, small, questions(prompts, limit), max_tokens, temperature, nodes, shown))
        return
    refuse("without --write nothing is recorded", "draft", "prompts", "limit", "max_tokens", "temperature", "nodes")
    for source in sources:
        is_route = source.endswith(".csv.gz")
        trace = _routes(Path(source)) if is_route else read_trees(Path(source))
        room = in_bytes("--memory", memory) or sum(trace.sizes) * trace.count // 4
        taken = in_bytes("--draft-memory", draft_memory) or trace.draft
        with Bars(transient=True) as bars:
            found = replays(
                trace, room, room - left_of("--memory", room, taken), seconds, partial(bars.update, "texts")
            )
        if is_route:
            click.echo(table(source, ["", *READ], [[name, *_read(one)] for name, one in found.items()]))
        else:
            click.echo(_seconds(source, found))


def _costs(text: str) -> Costs:
    try:
        values = [float(part) / 1e3 for part in text.split(",")]
        if not all(0 < value < inf for value in values):
            raise ValueError
        return Costs(*values)
    except (TypeError, ValueError) as error:
        raise must_be("--costs", text, "five times above 0, such as 99,23.8,0.57,1.43,45") from error


def _seconds(title: str, found: dict[str, Figures]) -> str:
    pace, rows = {name: 1e3 * one.seconds / one.tokens for name, one in found.items()}, list[list[str]]()
    for name, one in found.items():
        parts = [f"{1e3 * part / one.tokens:.0f}" for part in (one.computing, one.waiting, one.drafting)]
        speeds = [f"{pace[other] / pace[name]:.2f}" for other in ("plain", oracle_beside(name))]
        rows.append(
            [name, f"{one.tokens / one.steps:.2f}", *_read(one), f"{pace[name]:.0f}", " + ".join(parts), *speeds]
        )
    head = ["ms\na token", "computing,\nwaiting,\ndrafting", "speed ÷\nplain's", "÷\noracle's"]
    return table(title, ["", "tokens\na step", *READ, *head], rows, width=130)


def _read(one: Figures) -> list[str]:
    ahead = f"{one.ahead / 1e6 / one.tokens:.0f} ({one.used / one.ahead:.0%})" if one.ahead else ""
    per_token = f"{one.experts / one.tokens:.0f}", f"{one.read / 1e6 / one.tokens:.1f}"
    return [f"{one.rows / one.steps:.1f}", *per_token, ahead]


def _routes(path: Path) -> Trace:
    """Texts of a route trace; nothing is known of their prompts and tokens."""
    (chosen, count), (_, sizes, _) = read_trace(path), read_rows(path)
    if len(sizes) != chosen[0].shape[1]:
        raise ModelError(f"{path}: does not say the bytes of an expert for each layer")
    texts = list[Text]()
    for experts in chosen:
        zeros = np.zeros(len(experts) + 1, np.int32)
        trees = zeros[1:] + 1, zeros[1:], zeros[1:] - 1, np.zeros(len(experts)), experts, zeros[:0]
        texts.append(Text(zeros, experts[:0], *trees))
    return Trace(texts, sizes, count, 0)


def _record(
    path: str,
    draft: str,
    prompts: Sequence[str],
    tokens: int,
    temperature: float,
    nodes: int,
    progress: Callable[[int, int], None],
) -> Trace:
    routers, layers = routers_of(path), find_expert_layers(path, loaded_tensors(path))
    length, most, recorder, found = LONGEST + tokens + nodes, max(LONGEST, nodes), Recorder(), list[Text]()
    options = LoadOptions(context_length=length, budget=most, sessions=1, exact="off", gpu_layers=0, resident=True)
    plan = plan_here(path, options, this_machine(path))
    with (
        closing(load_here(plan, plan.ways[-1], lambda done, total: None, recorder)) as target,
        closing(load(draft, context_length=length, budget=most, exact="off")) as small,
    ):
        check_same_vocab(target.vocab, small.vocab)
        asked = [ids for prompt in prompts if len(ids := prompt_ids(target.vocab, prompt)) <= LONGEST]
        for number, ids in enumerate(asked, 1):
            sampling = SamplingParams(temperature=temperature, seed=number)
            if text := _answer(target, recorder, SpecExecPlanner(small), ids, sampling, tokens, nodes, routers):
                found.append(text)
            progress(number, len(asked))
    if not found:
        raise UsageError(f"no prompt of at most {LONGEST} tokens has an answer")
    return Trace(found, [layer.bytes_each for layer in layers], layers[0].count, Path(draft).stat().st_size)


def _answer(
    target: LlamaBackend,
    recorder: Recorder,
    planner: SpecExecPlanner,
    prompt: list[int],
    sampling: SamplingParams,
    tokens: int,
    nodes: int,
    routers: Sequence[Values],
) -> Text | None:
    """A text, of whose passes over trees only the root's token is taken; None: it ends with its first token."""
    noise, ids, steps = Noise(sampling.seed, target.vocab.size), [*prompt], list[tuple[NDArray[Any], ...]]()
    tree, kept = chain_of(prompt), list(range(len(prompt)))
    planner.begin(prompt)
    with closing(planner), closing(target.open()) as session:
        while True:
            numbers = np.arange(len(tree), dtype=np.int32)
            (logits,) = target.forward([Work(session, tree.token_ids, tree.parents, numbers)])
            chosen, predicted = recorder.taken()[CHOSEN].astype(np.uint16), predictions(recorder.taken(), routers)
            steps.append((tree.token_ids, tree.parents, tree.log_probs, chosen, predicted))
            token = sample(logits.row(kept[-1]), len(ids), sampling, noise, prompt, ids[len(prompt) :])
            session.commit(kept)
            planner.result(step_of([token]), None)
            ids.append(token)
            if len(steps) > tokens or token in target.vocab.eog_ids:
                break
            while (reading := planner.unread(ids)) and reading.unread:
                reading.read(reading.work())
            found = run_one(planner.propose(Context(ids, len(prompt), sampling, noise, nodes, nodes), nodes)).tree
            tree, kept = only(found, ranked(found.parents, found.log_probs, nodes, nodes)), [0]
    if len(steps) == 1:
        return None
    sizes = np.array([len(step[0]) for step in steps[1:]], np.int32)
    return Text(np.array(ids, np.int32), steps[0][3], sizes, *map(np.concatenate, zip(*steps[1:], strict=True)))
