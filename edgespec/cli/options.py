"""Options that several commands have."""

from collections.abc import Callable
from typing import Any

import click

from edgespec.cli.completion import complete_model
from edgespec.errors import UsageError
from edgespec.machine.measurements import OFF
from edgespec.planners.choice import PLANNERS


def _options(*options: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def decorate(command: Any) -> Any:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def outdated(name: str, *, instead: str, **kwargs: Any) -> Callable[[Any], Any]:
    """An option that goes with the next version: it works, --help does not show it, and a note says what to use."""

    def tell(context: click.Context, option: click.Parameter, value: Any) -> Any:
        if value is not None and value is not False:
            click.echo(f"note: {name} goes with the next version; {instead}", err=True)
        return value

    return click.option(name, hidden=True, callback=tell, **kwargs)


def _planners_own(name: str, argument: str, **kwargs: Any) -> Callable[[Any], Any]:
    return outdated(name, instead=f"in Python: edgespec.load(…, {argument})", **kwargs)


def _gpu_layers(context: click.Context, option: click.Parameter, value: str | None) -> int | None:
    """None for auto."""
    if value in (None, "auto"):
        return None
    try:
        return int(value)
    except ValueError as error:
        raise UsageError(f"--gpu-layers is {value!r}, but must be a number, -1 for all layers, or auto") from error


LENDER_OPTION = click.option(
    "--lender",
    "lenders",
    multiple=True,
    metavar="HOST:PORT",
    callback=lambda context, option, value: list(value) or None,
    help="llamacpp: where `edgespec lend` listens; layers that do not fit here go there. Repeatable.",
)
GPU_LAYERS_HELP = "llamacpp, torch: layers on the GPU; -1 = all. [default: auto, as many as --gpu-memory takes]"
GPU_MEMORY_HELP = "llamacpp, torch: GPU memory to use, such as 10G. [default: what is free]"
KV_TYPE_HELP = "llamacpp: type of keys and values: f16, q8_0, f16/q8_0, … [default: f16]"
EXACT_HELP = "Passes in shapes that agree to the bit: narrow (few guesses), wide (many), off. [default: what suits]"
MEMORY_HELP = "Memory to use, such as 12G; what does not fit is read from disk. [default: what is free]"
DRAFT_OPTION = click.option(
    "--draft",
    metavar="MODEL",
    shell_complete=complete_model,
    help="Draft model that guesses; a name, path or source like MODEL.",
)
BUDGET_OPTION = click.option(
    "--budget", type=int, help="Guessed tokens per pass. [default: the model's, else as many as pay, at most 64]"
)
CONTEXT_OPTION = click.option(
    "--ctx", type=int, help="Context in tokens, 0 = as trained. [default: the model's, else 4096]"
)
MEMORY_OPTION = click.option("--memory", metavar="SIZE", help=MEMORY_HELP)
KV_TYPE_OPTION = click.option("--kv-type", metavar="NAME", help=KV_TYPE_HELP)
EXACT_OPTION = click.option("--exact", metavar="NAME", help=EXACT_HELP)
MODELS_OPTION = click.option("--models", "models_file", metavar="FILE", help="A models.yaml besides the built-in one.")
PLANNER_OPTION = click.option(
    "--planner", metavar="NAME", help=f"Where guesses come from: {', '.join(PLANNERS)}. [default: auto]"
)
YES_OPTION = click.option("--yes", "-y", is_flag=True, help="Fetch what is not here yet without asking.")
MODEL_OPTIONS = _options(
    DRAFT_OPTION,
    click.option("--datastore", metavar="FILE", help="Datastore to copy guesses from (auto, sssd)."),
    BUDGET_OPTION,
    CONTEXT_OPTION,
    click.option("--backend", metavar="NAME", help="Engine: llamacpp, mlx, torch. [default: by what MODEL is]"),
    click.option("--threads", type=int, help="llamacpp, torch: compute threads. [default: the engine's choice]"),
    click.option("--gpu-layers", metavar="N", callback=_gpu_layers, help=GPU_LAYERS_HELP),
    MEMORY_OPTION,
    LENDER_OPTION,
    KV_TYPE_OPTION,
    EXACT_OPTION,
    click.option("--device", metavar="NAME", help="torch: cuda, cuda:1, mps or cpu. [default: the first there is]"),
    click.option("--dtype", metavar="NAME", help="torch: float32, float16, bfloat16, nf4. [default: the model's]"),
    click.option("--gpu-memory", metavar="SIZE", help=GPU_MEMORY_HELP),
    MODELS_OPTION,
    _planners_own("--depth", "depth=…", type=int),
    _planners_own("--beam", "beam=…", type=int),
    click.option(
        "--tau",
        type=float,
        help="specexec, chain: disagreement of the pair, in logits. [default: 0.7 when greedy, else 1.3]",
    ),
    click.option(
        "--ahead/--no-ahead",
        default=None,
        help="Draft on while MODEL works, if that gains. [default: see docs/ahead.md]",
    ),
    _planners_own("--min-probability", "min_probability=…", type=float),
    _planners_own("--no-coupling", "coupling=False", is_flag=True),
)
TARGETS_OPTIONS = _options(
    click.option("--targets", type=int, metavar="N", help="Judge guesses in N processes, each with a copy of MODEL."),
    click.option("--cluster", metavar="ADDRESS", help="The same on the workers of a Dask scheduler: tls://HOST:PORT."),
)
NO_MEMORY_OPTION = outdated("--no-memory-of-costs", instead=f"set {OFF}=1", is_flag=True)
SAMPLING_OPTIONS = _options(
    click.option(
        "--temperature",
        "-t",
        type=float,
        help="0 = always the likeliest token. [default: the model's, else 0; bench: 0]",
    ),
    click.option("--top-k", type=int, help="Keep the k likeliest tokens; 0 = all."),
    click.option("--top-p", type=float, help="Keep the smallest set of tokens with this probability."),
    click.option("--min-p", type=float, help="Keep tokens at least this much as likely as the best."),
    click.option("--repetition-penalty", type=float, help="Above 1: seen tokens become less likely."),
    click.option("--presence-penalty", type=float, help="Subtracted from tokens already written."),
    click.option("--frequency-penalty", type=float, help="Subtracted for each time a token was written."),
    click.option("--logit-bias", multiple=True, metavar="ID=BIAS", help="Added to a token's logit; repeatable."),
    click.option(
        "--seed", type=int, help="Same seed, same text. [default: run: a new one, see --json or /stats; bench: 0]"
    ),
)
