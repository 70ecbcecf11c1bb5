"""The program `edgespec`: its commands, but for those that have files of their own."""

import json
import os
import re
import select
import stat
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import click

from edgespec import __version__
from edgespec.cli.catalogue import entries_needed, models, pull, pull_what_is_missing
from edgespec.cli.completion import complete_model
from edgespec.cli.conversation import Conversation, check_max_tokens, load_messages, session_file
from edgespec.cli.convert import convert
from edgespec.cli.lend import lend
from edgespec.cli.options import (
    DEFAULT_MODEL,
    DOCTOR_OPTIONS,
    MACHINE_OPTION,
    MODEL_OPTIONS,
    MODELS_OPTION,
    NO_MEMORY_OPTION,
    PLANNER_OPTION,
    SAMPLING_OPTIONS,
    TARGETS_OPTIONS,
    TEMPLATE_OPTION,
    TEXT,
    YES_OPTION,
    SectionedCommand,
    allow_only,
    backend_option,
    is_from_variable,
    model_option,
    name_variables,
    not_empty,
    outdated,
)
from edgespec.cli.pairs import pair
from edgespec.cli.terminal import (
    Bars,
    LoadingBar,
    ended_by_signals,
    give_up_output,
    held_input,
    is_dumb,
    last_lines,
    open_streams,
    show,
)
from edgespec.errors import EdgespecError, UsageError
from edgespec.loading.approximate import with_old_names
from edgespec.loading.asked import asked_for
from edgespec.loading.pair import choose_planner
from edgespec.loop.engines import ENGINE_OPTIONS, choose_backend, find_engine, load_vocab
from edgespec.loop.grammar import Grammar, json_schema, lark
from edgespec.loop.sampling import SamplingParams
from edgespec.loop.session_files import look
from edgespec.machine import measurements as remembered
from edgespec.machine.files import read_text
from edgespec.machine.memory import in_bytes
from edgespec.machine.this_machine import this_machine
from edgespec.model import Model, load
from edgespec.models.own_sampling import choose_seed
from edgespec.models.registry import Entry, all_models, find_model, is_folder, local_path
from edgespec.planners.choice import PLANNERS, check_planner, with_datastore, with_draft
from edgespec.server.conversation import UNLIMITED
from edgespec.weights.plan import SAFETY


def main(command: click.Command | None = None, arguments: list[str] | None = None) -> None:
    """Run `command` (default: `edgespec`), and turn errors into one line and an exit code.

    Args:
        command: a script's own command.
        arguments: of the command line. Default: those of the process.
    """
    colour = False if os.environ.get("NO_COLOR") or is_dumb() else None
    name = None if command else "edgespec"
    try:
        open_streams()
        with ended_by_signals():
            (command or cli).main(arguments, prog_name=name, standalone_mode=False, color=colour)
        sys.stdout.flush()  # a full disk may show only here
    except click.ClickException as error:
        if isinstance(error, getattr(click.exceptions, "NoArgsIsHelpError", ())):
            error.show()
        else:
            click.echo(f"edgespec: {_one_line(error)}", err=True)
        sys.exit(error.exit_code)
    except EdgespecError as error:
        click.echo(f"edgespec: {error}", err=True)
        sys.exit(error.exit_code)
    except UnicodeEncodeError as error:
        near = error.object[max(0, error.start - 20) : error.end + 20]
        click.echo(f"edgespec: a text has half a character, which UTF-8 cannot spell: {near!r}", err=True)
        sys.exit(2)
    except OSError as error:
        give_up_output()
        if not isinstance(error, BrokenPipeError):
            where = error.filename or "writing or reading failed"
            click.echo(f"edgespec: {where}: {error.strerror or error}", err=True)
        sys.exit(1)
    except (KeyboardInterrupt, click.Abort):
        click.echo("", err=True)
        sys.exit(130)


def _one_line(error: click.ClickException) -> str:
    """What click says in several lines."""
    said = " ".join(error.format_message().split()).removesuffix(".")
    said = said[:1].lower() + said[1:]
    if "unexpected extra argument" in said:
        said += ": put what has spaces into quotes"
    if isinstance(error, click.BadParameter) and is_from_variable(error.param, error.ctx):
        said += f" (the value of ${getattr(error.param, 'envvar', '')})"
    context = getattr(error, "ctx", None)
    return f"{said}; see {context.command_path} --help" if context and "?" not in said[-2:] else said


NAMED = 5  # most skipped files whose names are shown


class Program(click.Group):
    command_class = SectionedCommand


@click.group(cls=Program, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__)
def cli() -> None:
    """Run language models that are too big for this machine, with exactly the text they would write alone."""


@cli.command(
    epilog="""\b
Examples:
  edgespec run smollm2-135m "Why is the sky blue?"
  edgespec run big.gguf --draft small.gguf            chat; /help shows the commands
  edgespec run ~/models/qwen3-32b --gpu-memory 10G "Why is the sky blue?"
  edgespec run mlx-community/Qwen3-0.6B-4bit          a repository on the hub
  edgespec run bartowski/Llama-3.2-1B-Instruct-GGUF:Q4_K_M --yes
  edgespec run big.gguf "Summarise the text above." < report.txt
  cat question.txt | edgespec run big.gguf - --json
  edgespec run big.gguf --resume talk.session         a chat that goes on where it was left
  edgespec run big.gguf --raw "Once upon a time" --temperature 0.8 --seed 7"""
)
@click.argument("model", default=DEFAULT_MODEL, shell_complete=complete_model)
@click.argument("prompt", required=False, type=TEXT)
@PLANNER_OPTION
@MODEL_OPTIONS
@TEMPLATE_OPTION
@NO_MEMORY_OPTION
@TARGETS_OPTIONS
@click.option(
    "--max-tokens", "-n", type=int, help="Most tokens to generate, -1 = no limit. [default: 512, chat: no limit]"
)
@SAMPLING_OPTIONS
@click.option("--stop", multiple=True, type=TEXT, help="End before this string; repeatable.")
@click.option("--json-schema", metavar="FILE", callback=not_empty, help="Answer in JSON by the schema in FILE.")
@click.option("--grammar", metavar="FILE", callback=not_empty, help="Answer by the Lark grammar in FILE.")
@click.option("--system", type=TEXT, help="System message.")
@click.option("--raw", is_flag=True, help="Continue the prompt as it is, without the chat template.")
@click.option(
    "--resume",
    metavar="FILE",
    callback=not_empty,
    help="Continue the conversation in FILE, if it exists, and save it there. With --raw PROMPT is the whole text, and "
    "what FILE has of it is not prefilled again.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object with text, tokens and statistics.")
@YES_OPTION
@click.option(
    "--show-drafts",
    is_flag=True,
    help="Tint accepted tokens by source: green draft, cyan text so far, magenta datastore, yellow grammar.",
)
def run(
    model: str, prompt: str | None, system: str | None, raw: bool, as_json: bool, yes: bool, show_drafts: bool,
    max_tokens: int | None, stop: tuple[str, ...], json_schema: str | None, grammar: str | None, resume: str | None,
    **options: Any,
) -> None:  # fmt: skip
    """Answer PROMPT with MODEL: a name from `edgespec models`, a GGUF file, a model folder, or one of the hub.

    Files run on llama.cpp; folders on MLX on a Mac with Apple silicon, on PyTorch elsewhere.

    PROMPT `-` reads standard input; without PROMPT on a terminal, a chat starts. Text that is piped to a command with
    PROMPT stands above it.

    Sampling options that are not given come from models.yaml, else from the model's own file, else sampling is
    greedy: `edgespec models MODEL` shows it.
    """
    _take_old_names(options)
    sampling = {"seed": choose_seed(None), **_sampling(options)}
    if prompt is None and re.search(r"\s|\?$", model) and not os.path.exists(model) and not model.endswith(".gguf"):
        raise UsageError(f"the model comes first: edgespec run {DEFAULT_MODEL} {model!r}")
    text = _prompt(prompt)
    if text is not None and not text.strip():
        raise UsageError("the prompt is empty: give at least one word")
    _check_raw(raw, system, options["chat_template"])
    if text is None and (raw or as_json):
        raise UsageError("--raw and --json need a prompt: give one, or - to read standard input")
    most = max_tokens if max_tokens is not None else UNLIMITED if text is None else 512
    check_max_tokens(most)
    if "" in stop:
        raise UsageError("--stop is empty: give at least one character")
    form = _read_grammar(json_schema, grammar)
    if resume and (options["targets"] or options["cluster"]):
        raise UsageError("--resume does not go with --targets and --cluster: each copy has a session of its own")
    file = session_file(resume, "--resume") if resume else None
    if file and os.path.exists(file):
        look(file)  # before a model is loaded
    _check_and_pull(model, options, yes)
    with held_input() if text is None else nullcontext(), _loaded(model, options) as (loaded, notes):
        if form:
            with _naming_grammar(json_schema, grammar):
                loaded.compile(form)
        earlier = load_messages(loaded, file) if file and os.path.exists(file) else []
        _show_notes(notes)  # where a file is refused, that is the only line
        if system and earlier:
            raise UsageError(f"--system: the chat in {resume} goes on with the one that it began with; leave it out")
        system = None if raw else system or loaded.system
        conversation = Conversation(
            loaded, {"max_tokens": most, "stop": stop, "grammar": form, **sampling},
            earlier or ([{"role": "system", "content": system}] if system else []), file, as_json, show_drafts,
        )  # fmt: skip
        if text is None:
            from edgespec.cli.chat import chat

            try:
                chat(conversation)
            finally:
                conversation.save()
            return
        result = conversation.continue_text(text) if raw else conversation.ask(text)
        if as_json:
            payload = {"text": result.text, "tokens": result.token_ids, "stats": result.stats.as_dict()}
            payload["where"] = loaded.where.as_dict()
            click.echo(json.dumps(payload, ensure_ascii=False))
        else:
            show(last_lines(result, most), dim=True, err=True)
    if result.finish_reason == "interrupted":
        sys.exit(130)


def _check_raw(raw: bool, system: str | None, template: str | None = None) -> None:
    if raw and system:
        raise UsageError("--system has no meaning with --raw: write it into the prompt")
    if raw and template:
        raise UsageError("--chat-template has no meaning with --raw: leave one out")


PATIENCE = 10  # seconds for the first text from an open pipe


def _prompt(prompt: str | None) -> str | None:
    """The prompt, below what standard input has; None for a chat."""
    if prompt is None and sys.stdin and sys.stdin.isatty():
        return None
    if prompt not in (None, "-") and not _has_text():
        return prompt
    try:
        text = sys.stdin.read() if sys.stdin else ""
    except UnicodeDecodeError as error:
        raise UsageError("standard input is not UTF-8 text") from error
    if prompt in (None, "-"):
        return text
    if not text.strip():
        return prompt
    show(f"{len(text)} characters of standard input stand above the prompt", dim=True, err=True)
    return f"{text.rstrip()}\n\n{prompt}"


def _has_text() -> bool:
    """True if standard input is a file or a pipe with text; an open pipe without any has `PATIENCE` seconds."""
    if not sys.stdin or sys.stdin.isatty():
        return False
    try:
        number = sys.stdin.fileno()
    except OSError:  # no stream of the system
        return True
    mode = os.fstat(number).st_mode
    if not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)):
        return stat.S_ISREG(mode)
    try:
        if select.select([number], [], [], 1)[0]:
            return True
        show(f"waiting {PATIENCE} s for standard input, an open pipe; `< /dev/null` avoids it", dim=True, err=True)
        return bool(select.select([number], [], [], PATIENCE)[0])
    except OSError:  # Windows waits for sockets only
        return True


def _sampling(options: dict[str, Any]) -> dict[str, Any]:
    """Take the sampling options that were given out of `options`; for others the model has defaults."""
    names = [name for name in SamplingParams.__dataclass_fields__ if name != "logit_bias"]
    sampling = {name: value for name in names if (value := options.pop(name)) is not None}
    if bias := options.pop("logit_bias"):
        try:
            sampling["logit_bias"] = {int(i): float(v) for i, v in (item.split("=") for item in bias)}
        except ValueError as error:
            raise UsageError(f"--logit-bias must be ID=BIAS, for example 42=-5; got {', '.join(bias)}") from error
    if "seed" in sampling:
        sampling["seed"] = choose_seed(sampling["seed"])
    SamplingParams(**sampling)  # refuse bad values before a model is loaded
    return sampling


def _read_grammar(schema_file: str | None, lark_file: str | None) -> Grammar | None:
    """Read a grammar from a file with a JSON schema or a Lark grammar; None if neither is given.

    Raises:
        UsageError: both are given, or the file cannot be read.
    """
    if schema_file and lark_file:
        raise UsageError("give --json-schema or --grammar, not both")
    if not (file := schema_file or lark_file):
        return None
    text = read_text(file, UsageError, once=True)
    with _naming_grammar(schema_file, lark_file):
        return json_schema(text) if schema_file else lark(text)


@contextmanager
def _naming_grammar(schema_file: str | None, lark_file: str | None) -> Iterator[None]:
    """Name the file of a grammar in an error about it."""
    try:
        yield
    except UsageError as error:
        raise UsageError(f"{schema_file or lark_file}: {error}") from error


def _planner_options(options: dict[str, Any]) -> dict[str, Any]:
    names = ("depth", "beam", "tau", "min_probability")
    chosen = {name: value for name in names if (value := options.pop(name)) is not None}
    if options.pop("no_coupling"):
        chosen["coupling"] = False
    return chosen


def _take_old_names(options: dict[str, Any]) -> None:
    """Leave `--approximate` among options, also where one of its old names was given."""
    options["approximate"], _ = with_old_names(options["approximate"], options)


def _check_and_pull(model: str, options: dict[str, Any], yes: bool) -> None:
    planner = choose_planner(options["planner"], find_model(model, options["models_file"]))
    if planner == "none" and options["draft"] and not options["approximate"]:  # the same options, decoded plainly
        click.echo("note: the planner none does not use a draft", err=True)
        options = options | {"draft": None}
    _check_used([planner], options)
    _pull_pair(model, options, yes, drafts=bool(options["approximate"] or with_draft([planner])))


def _check_used(planners: Sequence[str], options: dict[str, Any]) -> None:
    """
    Raises:
        UsageError: a planner does not exist, or none of them uses the draft or the datastore that is given.
    """
    for name in planners:
        check_planner(name, True, None, {})
    for name, users in (("draft", with_draft), ("datastore", with_datastore)):
        if options[name] and not users(planners) and not (name == "draft" and options["approximate"]):
            who = f"planner {planners[0]} does" if len(planners) == 1 else f"planners {', '.join(planners)} do"
            raise UsageError(f"the {who} not use a {name}; {', '.join(users(PLANNERS))} do")


def _pull_pair(model: str, options: dict[str, Any], yes: bool, *, drafts: bool) -> None:
    needed = entries_needed(model, options["draft"], options["models_file"], drafts)
    for one in needed:  # before the fetch, refuse a model whose engine is not installed
        find_engine(options["backend"] or choose_backend(is_folder(one.target), this_machine()))
    heads = drafts and not needed[1:] and not needed[0].draft
    pull_what_is_missing(needed, options["models_file"], yes, heads=heads)


def _for_load(options: dict[str, Any]) -> dict[str, Any]:
    """Options of a command, as `load` names them from now on."""
    options |= _planner_options(options)
    options["remember"] = not options.pop("no_memory_of_costs")
    return options


@contextmanager
def _loaded(model: str, options: dict[str, Any]) -> Iterator[tuple[Model, list[str]]]:
    """A loaded model and notes on it; it is closed after the `with`."""
    found, offered = _for_a_mac(model, _for_load(options))
    with LoadingBar(model) as bar:
        loaded = load(found, progress=bar.update, say=bar.say, **options)
    with loaded:
        yield loaded, [loaded.where.line, *offered, *loaded.notes]


def _show_notes(notes: Sequence[str]) -> None:
    for note in notes:
        show(note, dim=True, err=True)


def _for_a_mac(model: str, options: dict[str, Any], *, fits: bool = False) -> tuple[str | Entry, Sequence[str]]:
    """The model to run, which keeps its settings, and lines for the user, where MLX may be faster.

    Args:
        model: that was asked for.
        options: of its command.
        fits: of `offer`.
    """
    if this_machine().platform != "darwin" or options["backend"] or options["lenders"]:
        return model, ()
    from edgespec.measure.predictor import offer

    names = ("draft", "budget", "context_length", "memory", "kv_type", "models_file")
    found = offer(model, fits=fits, **{name: options[name] for name in names})
    if not found.folder:
        return model, found.lines
    given, supported = click.get_current_context().params, find_engine("mlx").supported
    for name in (*ENGINE_OPTIONS, "exact", "resume", "targets", "cluster"):
        if name not in supported and given.get(name) is not None and given[name] is not False:
            option = f"--{name.replace('_', '-')}"
            return model, [*found.lines, f"{option} goes with the file, so {found.folder} is not used"]
    entry = find_model(model, options["models_file"]).model_copy(update={"target": f"file:{found.folder}"})
    return entry, [*found.lines, f"so {found.folder} is used; --backend llamacpp takes the file"]


@cli.command(
    epilog="""\b
Examples:
  edgespec serve big.gguf --draft small.gguf          then: OPENAI_BASE_URL=http://127.0.0.1:8080/v1
  edgespec serve big.gguf --keep-on-disk              long prompts are prefilled once, also across restarts
  edgespec serve chat.gguf code.gguf --memory 12G     requests choose one by its name; they are loaded when wanted
  edgespec serve big.gguf --host 0.0.0.0 --api-key-file keys.txt --allow-host box.lan"""
)
@click.argument("models", nargs=-1, metavar="[MODEL]...", shell_complete=complete_model)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=int, default=8080, show_default=True, help="0 = any that is free.")
@click.option("--parallel", type=int, default=4, show_default=True, help="Requests served at once; others wait.")
@outdated("--first-come", instead="requests are always served as they came", is_flag=True, expose_value=False)
@outdated("--api-key", instead="use --api-key-file or $EDGESPEC_API_KEY, which others cannot see", metavar="KEY")
@click.option(
    "--api-key-file", metavar="FILE", help="Keys that clients must send, one a line. [default: $EDGESPEC_API_KEY]"
)
@click.option(
    "--no-key", is_flag=True, help="Serve every client that reaches --host, also where $EDGESPEC_API_KEY is set."
)
@click.option("--allow-host", "hosts", multiple=True, metavar="NAME", help="Answer also for this name; repeatable.")
@click.option("--allow-origin", "origins", multiple=True, metavar="URL", help="Serve pages of this origin; repeatable.")
@click.option(
    "--grace", type=click.IntRange(0), default=30, show_default=True, help="Seconds for running requests at the end."
)
@click.option(
    "--keep-on-disk",
    "keep",
    is_flag=False,
    flag_value="",
    callback=lambda context, option, value: "" if value == "1" and is_from_variable(option, context) else value,
    metavar="[DIR]",
    help="Save sessions, and find them again after a restart. [DIR: the user's cache folder]",
)
@click.option("--keep-size", default="10G", show_default=True, metavar="SIZE", help="Most bytes in DIR.")
@click.option(
    "--alias",
    "aliases",
    multiple=True,
    metavar="NAME[=MODEL]",
    help="One more name of a model; repeatable. Of several models MODEL says which, by its name.",
)
@click.option("--log-requests", "log", is_flag=True, help="Log paths and statuses, never prompts or answers.")
@outdated("--allow-approximate", instead="leave it out", is_flag=True, expose_value=False)
@YES_OPTION
@PLANNER_OPTION
@MODEL_OPTIONS
@TEMPLATE_OPTION
@NO_MEMORY_OPTION
def serve(
    models: tuple[str, ...], host: str, port: int, api_key: str | None, api_key_file: str | None, no_key: bool,
    hosts: tuple[str, ...], origins: tuple[str, ...], grace: int, keep: str | None, keep_size: str, log: bool,
    aliases: tuple[str, ...], yes: bool, **options: Any,
) -> None:  # fmt: skip
    """Serve MODEL, given as for `edgespec run`, by HTTP with the interfaces of OpenAI, Anthropic and Ollama.

    Of several, each is loaded when a request names it; the one idle longest leaves if --memory is too little for all.
    """
    from edgespec.cli import serve as server

    server.check_server()
    _take_old_names(options)
    if no_key and (api_key, api_key_file) != (None, None):
        raise UsageError("--no-key goes without --api-key-file, whose keys clients must send: leave one out")
    keys, most_kept = [] if no_key else server.read_keys(api_key, api_key_file), in_bytes("--keep-size", keep_size) or 0
    named = any(entry.name == keep for entry in all_models(options["models_file"])) if keep else False
    if keep and (named or Path(keep).is_file()):
        what = "the name of a model" if named else "a file"
        raise UsageError(f"--keep-on-disk {keep}: is {what}; give a folder, or write MODEL in front of --keep-on-disk")
    guard: dict[str, Any] = {"log": log, "keys": keys, "hosts": hosts, "origins": origins}
    models = models or (DEFAULT_MODEL,)
    names = server.names_of(models, aliases)

    def ready(name: str, loaded: Model, notes: Sequence[str] | None = None) -> None:
        _show_notes([f"{name}: {note}" for note in (loaded.where.line, *loaded.notes)] if notes is None else notes)
        if keep is not None:
            server.keep_on_disk(loaded, keep, most_kept)

    with server.open_socket(host, port, keys, no_key) as listening, ExitStack() as loading:
        loading.enter_context(server.refusing(listening, **guard))
        for model in models:
            _check_and_pull(model, options, yes)
        if models[1:]:
            memory = in_bytes("--memory", options["memory"]) or int(this_machine().free * (1 - SAFETY))
            _for_load(options)
            asked = {
                model: asked_for(_for_a_mac(model, options)[0], **options | {"memory": memory}) for model in models
            }
            several = server.several(asked, names, memory, ready)
            loading.close()
            server.serve(several, listening, grace=grace, **guard)
            return
        with _loaded(models[0], options) as (loaded, notes):
            ready("", loaded, notes)
            one = server.one(loaded, names[models[0]])
            loading.close()
            server.serve(one, listening, grace=grace, **guard)


@cli.command(
    epilog="""\b
Examples:
  edgespec doctor big.gguf --draft small.gguf
  edgespec doctor big.gguf --memory 12G --json
  edgespec doctor big-folder --backend mlx
  edgespec doctor llama-3.3-70b --machine macbook-24   what it would do there; nothing is fetched or measured
  edgespec doctor --describe > mine.yaml               this machine, for --machine mine.yaml elsewhere"""
)
@click.argument("model", default=DEFAULT_MODEL, shell_complete=complete_model)
@backend_option("all that are installed")
@DOCTOR_OPTIONS
@MACHINE_OPTION
@YES_OPTION
@click.option("--describe", is_flag=True, help="Only print this machine, in the form that --machine reads.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option(
    "--forget-costs",
    is_flag=True,
    help=f"Only delete the measured pass times of all models. Runs with {remembered.OFF}=1 set measure none.",
)
def doctor(
    model: str, backend: str | None, machine: str | None, describe: bool, as_json: bool, forget_costs: bool, yes: bool,
    **options: Any,
) -> None:  # fmt: skip
    """Predict how MODEL runs here: what stays in memory, what is streamed, how fast, and what limits it.

    Also find the row classes: batch sizes whose passes are bit-identical, so that a text does not depend on drafting.

    The disk is measured with direct reads of the model's file, the passes with the model itself: this takes about as
    long as loading it. With --machine nothing is measured: speeds are computed from those of the machine.
    """
    if forget_costs:
        allow_only("--forget-costs only deletes", "forget_costs")
        click.echo(f"{remembered.forget()} measurements forgotten")
        return
    if describe:
        allow_only("--describe only prints this machine", "describe", "model", "models_file", "as_json")
        _describe(model, options["models_file"], as_json)
        return
    if machine:
        _doctor_elsewhere(model, machine, as_json, {"backend": backend, **options})
        return
    from edgespec.measure.doctor import as_dict, compare, diagnose
    from edgespec.measure.report import recommendation, report

    _pull_pair(model, {"backend": backend, **options}, yes, drafts=True)
    with LoadingBar(model) as bar:
        options["say"] = lambda what: bar.say(f"measuring: {what}")
        found = [diagnose(model, backend=backend, **options)] if backend else compare(model, **options)
    if as_json:
        others = {"others": list(map(as_dict, found[1:]))} if found[1:] else {}
        click.echo(json.dumps({"edgespec": __version__} | as_dict(found[0]) | others))
    else:
        lines = _for_a_mac(model, {"backend": backend, **options}, fits=True)[1]
        click.echo("\n\n".join(filter(None, [*map(report, found), recommendation(found), *lines])))
    if found[0].cannot_run:
        sys.exit(1)


def _describe(model: str, models_file: str | None, as_json: bool) -> None:
    from edgespec.machine.described import as_yaml, describe
    from edgespec.measure.predictor import measured_operations

    source = find_model(model, models_file).target
    if is_folder(source):
        raise UsageError(f"--describe measures with a pass of a GGUF file; {model} is a folder")
    path = local_path(source, fetch=False)
    with Bars(transient=True) as bars:
        bars.say("measuring this machine")
        machine = this_machine(path, find_engine("llamacpp").gpus(None))
        described = describe(machine, path, measured_operations(path))
    click.echo(json.dumps(described) if as_json else as_yaml(described).rstrip())


def _doctor_elsewhere(model: str, machine: str, as_json: bool, options: dict[str, Any]) -> None:
    from edgespec.machine.described import find_machine
    from edgespec.measure.predictor import as_dict, predict
    from edgespec.measure.report import report

    for name in ("backend", "lenders", "exact"):
        if options.pop(name):
            raise UsageError(f"--{name.removesuffix('s')} goes without --machine, which shows the engines that suit it")
    called, described = find_machine(machine)
    found = predict(model, described, called, ask=True, **options)
    click.echo(json.dumps(as_dict(found)) if as_json else report(found))
    if found.found[0].cannot_run:
        sys.exit(1)


for command in (models, pull, pair, convert, lend):
    cli.add_command(command)


@cli.command(
    epilog="""\b
Example:
  edgespec bench prompts.jsonl --model big.gguf --draft small.gguf --planners none,specexec,sssd --limit 16"""
)
@click.argument("prompts", metavar="PROMPTS.jsonl")
@model_option("Target: a name, path or source.")
@click.option(
    "--planners",
    help="Comma-separated; `none` is always among them. [default: none,sssd, with --draft none,sssd,specexec]",
)
@MODEL_OPTIONS
@click.option("--max-tokens", "-n", type=int, default=96, show_default=True, help="Most tokens per prompt.")
@click.option("--limit", type=int, help="Use this many prompts, evenly spaced over the file. [default: all]")
@click.option("--raw", is_flag=True, help="Continue prompts as they are, without the chat template.")
@click.option("--system", type=TEXT, help="System message.")
@SAMPLING_OPTIONS
@YES_OPTION
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def bench(prompts: str, model: str, planners: str | None, yes: bool, as_json: bool, **options: Any) -> None:
    """Compare planners on a file of prompts, and check every text against plain decoding.

    Each line of PROMPTS.jsonl is an object with `prompt`, `question` or `text`, or with `turns`, whose first is
    used. One JSON list of such objects, or of pairs of a number and a text, is read, too. Planners alternate prompt
    by prompt in one process, so that a busy machine slows all of them alike. Sampling is greedy unless options say
    otherwise. With --budget trees are repeatable, also where fewer draft tokens are faster.
    """
    from edgespec.measure.bench import bench_table, read_prompts, run_bench

    _take_old_names(options)
    _check_raw(options["raw"], options["system"])
    usual = "none,sssd,specexec" if options["draft"] else "none,sssd"
    sampling = _sampling(options)
    names = [name.strip() for name in (usual if planners is None else planners).split(",")]
    _check_used(names, options)
    chosen, questions = _planner_options(options), read_prompts(Path(prompts), options.pop("limit"))
    _pull_pair(model, options, yes, drafts=bool(options["approximate"] or with_draft(names)))

    def ready(notes: Sequence[str]) -> None:
        bar.stop()
        for note in notes:
            show(note, dim=True, err=True)

    with LoadingBar(model) as bar, Bars() as bars:
        report = run_bench(
            model, questions, names, sampling, chosen, progress=lambda *far: bars.update("measuring", *far),
            say=bar.say, ready=ready, **options,
        )  # fmt: skip
    click.echo(json.dumps(report) if as_json else bench_table(report))
    if report["unexplained"]:
        raise EdgespecError(f"{report['unexplained']} divergences from plain decoding are not ties: this is a bug")


@cli.group()
def datastore() -> None:
    """Build datastores: text of your own that the planners auto and sssd copy from."""


@datastore.command(
    "build",
    epilog="""\b
Example:
  edgespec datastore build code.store ~/projects notes.md --model qwen2.5-coder-1.5b""",
)
@click.argument("out")
@click.argument("texts", nargs=-1, required=True)
@model_option("The model whose tokenizer is used.")
@MODELS_OPTION
@YES_OPTION
def build_datastore(out: str, texts: tuple[str, ...], model: str, models_file: str | None, yes: bool) -> None:
    """Tokenise TEXT files and folders (text, source code, JSON, JSONL, .gz of these) into the datastore OUT.

    An existing OUT is replaced only if it is a datastore.
    """
    from edgespec.planners.datastore import build, check_out, read_texts

    check_out(out, texts)
    source = find_model(model, models_file).target
    if not is_folder(source):  # of a folder only the tokenizer is fetched
        pull_what_is_missing(entries_needed(model, None, models_file, drafts=False), models_file, yes, heads=False)
    vocab = load_vocab(choose_backend(is_folder(source), this_machine()), local_path(source, weights=False))
    skipped = list[Path]()
    with Bars() as bars:
        header = build(out, read_texts(texts, skipped.append), vocab, bars.update)
    click.echo(f"{out}: {header.tokens} tokens of {header.documents} documents")
    if skipped:
        names = ", ".join(map(str, skipped[:NAMED])) + (", …" if skipped[NAMED:] else "")
        click.echo(f"note: left out, since they cannot be read as text ({len(skipped)}): {names}", err=True)


name_variables(cli, "EDGESPEC")
