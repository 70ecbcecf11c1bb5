from typing import Any

import click
from prompt_toolkit import PromptSession
from prompt_toolkit.history import InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

from edgespec.cli.terminal import write_answer
from edgespec.errors import EdgespecError
from edgespec.model import GenerationResult, Model

HELP = """\
Enter sends; Alt+Enter (or Esc, then Enter) starts a new line; the arrow keys bring earlier messages back.
/stats   figures of the last answer
/clear   forget the conversation
/exit    leave (also Ctrl-D)
Ctrl-C stops an answer and keeps what was written."""


def chat(
    model: Model,
    system: str | None,
    show_drafts: bool,
    options: dict[str, Any],
    earlier: list[dict[str, Any]] | None = None,
) -> list[dict[str, Any]]:
    """Chat until /exit or end of input, and return all messages.

    Args:
        model: answers.
        system: its system message.
        show_drafts: tint accepted tokens by source.
        options: of every answer, as for `Model.stream`.
        earlier: messages of a resumed chat.
    """
    start = [{"role": "system", "content": system}] if system else []
    messages = earlier or list(start)
    last: GenerationResult | None = None
    session: PromptSession[str] = PromptSession(history=InMemoryHistory(), key_bindings=_keys(), multiline=True)
    click.echo(f"{len(messages)} messages from before. /help" if earlier else "Type a message, or /help.")
    while True:
        try:
            line = session.prompt("> ", prompt_continuation="… ").strip()
        except KeyboardInterrupt:
            continue
        except EOFError:
            return messages
        if line in ("/exit", "/quit"):
            return messages
        if line == "/clear":
            messages = list(start)
            click.echo("Forgotten.")
        elif line == "/stats":
            click.echo(stats_text(last) if last else "No answer yet.")
        elif line.startswith("/"):
            click.echo(HELP)
        elif line:
            last = GenerationResult()
            asked = [*messages, {"role": "user", "content": line}]
            try:
                write_answer(model, asked, last, options, tint=show_drafts)
            except EdgespecError as error:
                click.echo(f"edgespec: {error}", err=True)
                continue
            click.echo(click.style(last.stats.summary(), dim=True))
            messages = [*asked, {"role": "assistant", "content": last.text}]


def stats_text(result: GenerationResult) -> str:
    stats = result.stats
    sources = ", ".join(f"{count} {source}" for source, count in stats.tokens_by_source.items() if count)
    return (
        f"{stats.summary()}\n"
        f"prompt: {stats.prompt_tokens} tokens, {stats.cached_tokens} of them from the cache, "
        f"prefilled in {stats.prefill_seconds:.2f} s\n"
        f"tokens by source: {sources}; seed {stats.seed}\n"
        f"time: draft {stats.draft_seconds:.2f} s, target {stats.target_seconds:.2f} s, "
        f"planning and sampling {stats.plan_seconds:.2f} s"
    )


def _keys() -> KeyBindings:
    keys = KeyBindings()

    @keys.add("enter")
    def send(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys
