"""Options that several commands have, and the sections in which --help lists them."""

import os
from collections.abc import Callable
from typing import Any

import click

from edgespec.cli.completion import complete_model
from edgespec.errors import UsageError, check_whole
from edgespec.loop.engines import MOST_CONTEXT
from edgespec.machine.measurements import OFF
from edgespec.planners.choice import PLANNERS

DEFAULT_MODEL = "smollm2-135m"
SECTIONS = {  # title -> names of parameters, in this order
    "Model": (
        "model", "backend", "context_length", "threads", "device", "dtype", "models_file", "chat_template",
        "yes",
    ),
    "Memory": ("memory", "gpu_memory", "gpu_layers", "kv_type", "lenders", "keep_packed"),
    "Drafting": (
        "draft", "planner", "planners", "budget", "exact", "datastore", "tau", "targets", "cluster", "approximate",
    ),
    "Sampling": ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed"),
    "Prompt and output": (
        "system", "raw", "limit", "resume", "max_tokens", "stop", "json_schema", "grammar", "show_drafts", "as_json",
    ),
    "Server": ("host", "port", "aliases", "parallel", "keep", "keep_size", "grace", "log"),
    "Access": ("api_key_file", "no_key", "hosts", "origins"),
}  # fmt: skip


class SectionedCommand(click.Command):
    """A command whose --help lists the options by section; those of no section come last."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        options = [one for one in self.get_params(ctx) if isinstance(one, click.Option)]
        rows = {one.name: row for one in options if (row := one.get_help_record(ctx))}
        listed = {title: [rows.pop(name) for name in names if name in rows] for title, names in SECTIONS.items()}
        for title, found in (listed | {"Other": list(rows.values())}).items():
            if found:
                with formatter.section(title):
                    formatter.write_dl(found)


def name_variables(command: click.Command, prefix: str) -> None:
    """Name an environment variable for each option: EDGESPEC_RUN_MEMORY for `--memory` of `edgespec run`.

    With click's `auto_envvar_prefix` the names would be those of parameters, which no user sees.
    """
    for name, inner in command.commands.items() if isinstance(command, click.Group) else ():
        name_variables(inner, f"{prefix}_{name}")
        for option in inner.params:
            if isinstance(option, click.Option) and not option.hidden:
                long = max(option.opts, key=len)
                option.envvar = f"{prefix}_{name}_{long.lstrip('-')}".replace("-", "_").upper()


def is_from_variable(option: click.Parameter | None, context: click.Context | None) -> bool:
    source = context.get_parameter_source(option.name) if context and option and option.name else None
    return source is click.core.ParameterSource.ENVIRONMENT


def allow_only(why: str, *names: str) -> None:
    """`refuse` all others."""
    refuse(why, *(str(one.name) for one in click.get_current_context().command.params if one.name not in names))


def refuse(why: str, *names: str) -> None:
    """Refuse parameters that the command line of the running command has, and that would be ignored.

    Raises:
        UsageError: begins with `why`.
    """
    context = click.get_current_context()
    for one in context.command.params:
        is_given = context.get_parameter_source(str(one.name)) is click.core.ParameterSource.COMMANDLINE
        if one.name in names and is_given:
            name = max(one.opts, key=len) if one.opts[0][0] == "-" else one.human_readable_name
            raise UsageError(f"{why}: leave out {name}")


class Text(click.types.StringParamType):
    """Text for a model, which is UTF-8 in every locale; click takes any bytes, since a path may have them."""

    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        text = str(super().convert(value, param, ctx))
        try:
            text.encode()
            return text
        except UnicodeEncodeError:  # bytes that this locale does not know
            try:
                return os.fsencode(text).decode("utf-8")
            except UnicodeError:
                self.fail("is not UTF-8 text", param, ctx)


TEXT = Text()


def together(*options: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """One decorator for options, which `--help` shows in this order."""

    def decorate(command: Any) -> Any:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def outdated(name: str, *, instead: str, **kwargs: Any) -> Callable[[Any], Any]:
    """An option that the next version removes: it still works, --help hides it, and a note says `instead`."""

    def note(context: click.Context, option: click.Parameter, value: Any) -> Any:
        if context.get_parameter_source(str(option.name)) is click.core.ParameterSource.COMMANDLINE:
            click.echo(f"note: {name} goes with the next version; {instead}", err=True)
        return value

    return click.option(name, hidden=True, callback=note, **kwargs)


def _in_python(name: str, call: str, **kwargs: Any) -> Callable[[Any], Any]:
    return outdated(name, instead=f"in Python: {call}", **kwargs)


def model_option(about: str) -> Callable[[Any], Any]:
    return click.option("--model", default=DEFAULT_MODEL, show_default=True, shell_complete=complete_model, help=about)


def not_empty(context: click.Context, option: click.Parameter, value: str | None) -> str | None:
    if value == "":
        raise UsageError(f"{option.opts[0]} is empty: give a name, or leave it out")
    return value


def _gpu_layers(context: click.Context, option: click.Parameter, value: str | None) -> int | None:
    if value in (None, "auto"):
        return None
    try:
        if int(value) < -1:
            raise ValueError
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
DRAFT_OPTION = click.option(
    "--draft",
    metavar="MODEL",
    callback=not_empty,
    shell_complete=complete_model,
    help="Draft model or head: a name, path or source like MODEL; head is the one in the file of MODEL; "
    "layers are those of MODEL that stay in memory (mlx, torch).",
)
BUDGET_OPTION = click.option(
    "--budget",
    type=int,
    help="Draft tokens per pass, also where fewer are faster. [default: as many as pay, at most the model's or 64; "
    "1024 on a GPU and 256 on a processor if torch or mlx streams]",
)


def backend_option(default: str) -> Callable[[Any], Any]:
    about = f"Engine: llamacpp, mlx, torch. [default: {default}]"
    return click.option("--backend", metavar="NAME", callback=not_empty, help=about)


def context_option(**more: Any) -> Callable[[Any], Any]:
    def check(context: click.Context, option: click.Parameter, value: int | None) -> int | None:
        return None if value is None else check_whole("--ctx", value, 0, MOST_CONTEXT)

    return click.option("--ctx", "context_length", type=int, callback=check, **more)


CONTEXT_OPTION = context_option(help="Context in tokens, 0 = as trained. [default: the model's, else 4096]")
MEMORY_OPTION = click.option(
    "--memory",
    metavar="SIZE",
    help="Memory to use, such as 12G; what does not fit is read from disk. [default: what is free]",
)
KV_TYPE_OPTION = click.option(
    "--kv-type", metavar="NAME", help="llamacpp: type of keys and values, such as f16, q8_0 or f16/q8_0. [default: f16]"
)
EXACT_OPTION = click.option(
    "--exact",
    metavar="NAME",
    help="Row class of all passes: narrow (few draft tokens), wide (many), any (all), off. [default: what suits]",
)
MODELS_OPTION = click.option(
    "--models", "models_file", metavar="FILE", callback=not_empty, help="A models.yaml besides the built-in one."
)
TEMPLATE_OPTION = click.option(
    "--chat-template", metavar="FILE", callback=not_empty, help="A Jinja file, in place of MODEL's own chat template."
)
PLANNER_OPTION = click.option(
    "--planner",
    metavar="NAME",
    callback=not_empty,
    help=f"Where draft tokens come from: {', '.join(PLANNERS)}; others: docs/systems.md. [default: auto]",
)


def _machine(context: click.Context, option: click.Parameter, value: str | None) -> str | None:
    if value == "list":
        from edgespec.machine.described import named

        for name, entry in named().items():
            click.echo(f"{name:<24}{entry['description']}")
        context.exit()
    return not_empty(context, option, value)


MACHINE_OPTION = click.option(
    "--machine",
    metavar="NAME|FILE",
    callback=_machine,
    help="Another machine, such as macbook-24 or rtx4090-64 (`--machine list` shows all names), or a file of "
    "`edgespec doctor --describe`.",
)
YES_OPTION = click.option("--yes", "-y", is_flag=True, help="Fetch missing files without asking.")
DOCTOR_OPTIONS = together(
    DRAFT_OPTION, MEMORY_OPTION, KV_TYPE_OPTION, EXACT_OPTION, LENDER_OPTION, BUDGET_OPTION, CONTEXT_OPTION,
    MODELS_OPTION,
)  # fmt: skip
MODEL_OPTIONS = together(
    DRAFT_OPTION,
    click.option(
        "--datastore",
        metavar="FILE",
        callback=not_empty,
        help="auto, sssd: datastore to copy draft tokens from.",
    ),
    BUDGET_OPTION,
    CONTEXT_OPTION,
    backend_option("by what MODEL is"),
    click.option("--threads", type=int, help="llamacpp, torch: compute threads. [default: the engine's choice]"),
    click.option(
        "--gpu-layers",
        metavar="N",
        callback=_gpu_layers,
        help="llamacpp, torch: layers on the GPU; -1 = all. [default: auto, as many as --gpu-memory takes]",
    ),
    MEMORY_OPTION,
    LENDER_OPTION,
    KV_TYPE_OPTION,
    EXACT_OPTION,
    click.option("--device", metavar="NAME", help="torch: cuda, cuda:1, mps or cpu. [default: the first there is]"),
    click.option("--dtype", metavar="NAME", help="torch: float32, float16, bfloat16, nf4. [default: the model's]"),
    click.option(
        "--gpu-memory",
        metavar="SIZE",
        help="llamacpp, torch: memory of each GPU to use, such as 10G. [default: what is free]",
    ),
    click.option("--keep-packed", is_flag=True, help="torch: keep nf4 layers in the cache folder for the next start."),
    MODELS_OPTION,
    _in_python("--depth", "edgespec.load(…, depth=…)", type=int),
    _in_python("--beam", "edgespec.load(…, beam=…)", type=int),
    click.option(
        "--tau",
        type=float,
        help="With a draft: disagreement of the pair, in logits. [default: 0.7 when greedy, else 1.0]",
    ),
    click.option(
        "--approximate",
        metavar="NAME[:VALUE]",
        help="A method whose texts are not those of MODEL, such as cascade:0.5: docs/guides/approximate.md.",
    ),
    _in_python("--ahead/--no-ahead", "edgespec.load(…, ahead=…)", default=None),
    outdated("--cascade", instead="write --approximate cascade:ALPHA", metavar="ALPHA"),
    outdated("--sparse-attention", instead="write --approximate sparse-attention:SHARE", metavar="SHARE"),
    _in_python("--min-probability", "edgespec.load(…, min_probability=…)", type=float),
    _in_python("--no-coupling", "edgespec.load(…, coupling=False)", is_flag=True),
)
TARGETS_OPTIONS = together(
    click.option("--targets", type=int, metavar="N", help="Verify in N processes, each with a copy of MODEL."),
    click.option("--cluster", metavar="ADDRESS", help="Verify on the workers of a Dask scheduler: tls://HOST:PORT."),
)
NO_MEMORY_OPTION = outdated("--no-memory-of-costs", instead=f"set {OFF}=1", is_flag=True)
SAMPLING_OPTIONS = together(
    click.option(
        "--temperature",
        "-t",
        type=float,
        help="0 = always the likeliest token. [default: the model's, else 0; bench: 0]",
    ),
    click.option(
        "--top-k",
        type=int,
        help="Sample from the k likeliest tokens; 0 = all. [default: the model's, else 0; bench: 0]",
    ),
    click.option(
        "--top-p",
        type=float,
        help="Sample from the smallest set of tokens with this probability. [default: the model's, else 1; bench: 1]",
    ),
    click.option(
        "--min-p",
        type=float,
        help="Sample from tokens at least this much as likely as the best. [default: the model's, else 0; bench: 0]",
    ),
    click.option(
        "--repetition-penalty",
        type=float,
        help="Above 1: tokens that occurred become less likely. [default: the model's, else 1; bench: 1]",
    ),
    _in_python("--presence-penalty", "generate(…, presence_penalty=…)", type=float),
    _in_python("--frequency-penalty", "generate(…, frequency_penalty=…)", type=float),
    _in_python("--logit-bias", "generate(…, logit_bias={ID: BIAS})", multiple=True, metavar="ID=BIAS"),
    click.option("--seed", type=int, help="Same seed, same text; -1 = a new one. [default: run: a new one, bench: 0]"),
)
