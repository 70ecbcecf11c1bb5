"""The chat's prompt and its / commands."""

import os
import re
from collections.abc import Iterable
from contextlib import suppress

from prompt_toolkit import PromptSession
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

from edgespec.cli.conversation import Conversation
from edgespec.cli.terminal import last_lines, mark_pastes, show
from edgespec.errors import EdgespecError, UsageError
from edgespec.loop.message_forms import Message
from edgespec.machine.files import cache_folder
from edgespec.scheduler.events import GenerationResult

HELP = """\
Enter sends; Alt+Enter (or Esc, then Enter) starts a new line; the arrow keys bring earlier messages back.
/retry           answer the last message again, with another seed
/set             show the settings
/set NAME VALUE  change one
/save FILE       save the conversation, for /load and --resume
/load FILE       go on with a saved conversation
/stats           figures of the last answer
/clear           forget the conversation
/exit            leave (also exit, quit and Ctrl-D)
Ctrl-C stops an answer and keeps what was written. What is typed during an answer waits for the next prompt."""
LEAVE = ("/exit", "/quit", "exit", "quit")
SHOWN = 4  # messages of an earlier conversation


def chat(conversation: Conversation) -> None:
    """Chat until /exit or end of input."""
    session: PromptSession[str] = PromptSession(history=_history(), key_bindings=_keys(), multiline=True)
    if conversation.turns:
        _show(conversation.turns)
    else:
        show("Type a message, or /help.")
    while True:
        try:
            line = session.prompt("> ", prompt_continuation="… ").strip()
            mark_pastes(True)
            if line in LEAVE:
                return
            if line:
                _obey(conversation, line)
        except KeyboardInterrupt:
            continue
        except EOFError:
            return
        except EdgespecError as error:
            show(f"edgespec: {error}", err=True)


def _obey(conversation: Conversation, line: str) -> None:
    """Do what a line asks for: a command, else a message.

    Raises:
        EdgespecError: it cannot be done.
    """
    command, _, argument = line.partition(" ")
    argument = argument.strip()
    match command:
        case "/help" | "/stats" | "/clear" | "/retry" if argument:
            raise UsageError(f"{command} has nothing after it")
        case "/save" | "/load" if not argument:
            raise UsageError(f"{command} needs the name of a file")
        case "/help":
            show(HELP)
        case "/stats":
            show(stats_text(conversation.last) if conversation.last else "No answer yet.")
        case "/clear":
            conversation.clear()
            show("Forgotten.")
        case "/save":
            conversation.save_to(argument)
            show(f"Saved in {argument}.")
        case "/load":
            conversation.load(argument)
            _show(conversation.turns)
            if conversation.file:
                show(f"From here on it is saved in {argument}.")
        case "/set" if not argument:
            show(conversation.settings())
        case "/set":
            name, _, value = argument.partition(" ")
            conversation.set(name, value.strip())
            show(f"{name} is {value.strip()}")
        case "/retry":
            _show_figures(conversation, conversation.retry())
        case _ if re.fullmatch(r"/\w+", line):
            raise UsageError(f"there is no command {line}; /help lists them")
        case _:
            _show_figures(conversation, conversation.ask(line))


def _show(turns: list[Message]) -> None:
    for message in turns[-SHOWN:]:
        text = f"> {message['content']}" if message["role"] == "user" else str(message["content"])
        show(text)
    show(f"{len(turns)} messages from before. /help")


def _show_figures(conversation: Conversation, answer: GenerationResult) -> None:
    show(last_lines(answer, conversation.options["max_tokens"]), dim=True)


def stats_text(result: GenerationResult) -> str:
    stats = result.stats
    sources = ", ".join(f"{count} {source}" for source, count in stats.tokens_by_source.items() if count)
    return (
        f"{stats.summary()}\n"
        f"prompt: {stats.prompt_tokens} tokens, {stats.cached_tokens} of them from the cache, "
        f"prefilled in {stats.prefill_seconds:.2f} s\n"
        f"tokens by source: {sources}\n"
        f"time: draft {stats.draft_seconds:.2f} s, target {stats.target_seconds:.2f} s, "
        f"planning and sampling {stats.plan_seconds:.2f} s"
    )


class _FileHistory(FileHistory):
    """Ignores a file that becomes unreadable or full, and takes text that is no UTF-8."""

    def load_history_strings(self) -> Iterable[str]:
        with suppress(OSError):
            return super().load_history_strings()
        return ()

    def store_string(self, string: str) -> None:
        with suppress(OSError):
            super().store_string(string.encode("utf-8", "replace").decode())


def _history() -> History:
    """Messages of earlier chats, in a file that only its owner can read."""
    path = cache_folder() / "chat-history"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    except OSError:
        return InMemoryHistory()
    return _FileHistory(path)


def _keys() -> KeyBindings:
    keys = KeyBindings()

    @keys.add("enter")
    def send(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys
