"""Text in and out: chat templates, streaming detokenisation, stop strings."""

import codecs
import json
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

from edgespec.errors import ModelError, UsageError, check_text
from edgespec.loop.backend import Vocab

Message = Mapping[str, Any]  # {"role": "user", "content": "Hi"}
SYSTEM = ("system", "developer")  # roles
MARK = "here-the-answer-goes-on"  # behind the content of a message, so that templates strip no white space there


class TextStream:
    """Turns tokens into text that is final: no half of a character, no beginning of a stop string.

    Attributes:
        stopped: a stop string was found, and the output is complete.
        stop_found: this stop string.
    """

    def __init__(self, vocab: Vocab, stop: Sequence[str] = (), shown: Collection[int] = ()) -> None:
        """
        Args:
            vocab: the tokenizer.
            stop: strings that end the output and are not part of it.
            shown: control tokens whose names are part of the output.

        Raises:
            UsageError: a stop string is empty.
        """
        if "" in stop:
            raise UsageError("a stop string is empty; give at least one character")
        self._vocab = vocab
        self._stop = tuple(stop)
        self._shown = {token: vocab.token_text(token).encode() for token in shown}
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self.stopped = False
        self.stop_found: str | None = None

    def push(self, token_id: int) -> str:
        """Add a token.

        Returns:
            Text that is final now, perhaps none.
        """
        return self._release(self._decoder.decode(self._shown.get(token_id) or self._vocab.token_bytes(token_id)))

    def finish(self) -> str:
        """The rest of the output, held back until now."""
        text = self._release(self._decoder.decode(b"", final=True)) + self._held
        self._held = ""
        return text

    def _release(self, new: str) -> str:
        if self.stopped:
            return ""
        text = self._held + new
        found = [(at, stop) for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            at, self.stop_found = min(found)
            self.stopped = True
            self._held = ""
            return text[:at]
        keep = max((overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`, but not all of it."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


def user_messages(text: str, system: str | None = None) -> list[Message]:
    """Messages of a single question."""
    question: Message = {"role": "user", "content": text}
    return [{"role": "system", "content": system}, question] if system else [question]


def _as_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """The filter `tojson`, with the arguments that templates pass."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> None:
    raise UsageError(f"the model's chat template refuses these messages: {message}")


def _now(form: str) -> str:
    return datetime.now().strftime(form)


@lru_cache(8)
def _compiled(template: str) -> Any:
    """Compile a template: a program in a downloaded file, so it runs in Jinja's sandbox.

    Returns:
        The template, with the globals of Hugging Face's `apply_chat_template`.
    """
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """The tag `generation`, by which templates mark text to train on: its content is rendered unchanged."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
    )
    environment.filters["tojson"] = _as_json
    environment.globals |= {"raise_exception": _refuse, "strftime_now": _now}
    return environment.from_string(template)


def render_chat(
    vocab: Vocab,
    messages: Sequence[Message],
    tools: Sequence[Message] | None = None,
    more: Mapping[str, Any] | None = None,
) -> list[int]:
    """
    Returns:
        Token ids of a conversation, ready for the assistant's answer, or for the rest of one that the assistant's last
        message begins; arguments and errors as for `chat_text`.
    """
    text = check_text("a message", chat_text(vocab, messages, answer=True, tools=tools, more=more))
    has_bos = vocab.bos_id is not None and text.startswith(vocab.token_text(vocab.bos_id))
    return vocab.encode(text, add_bos=not has_bos, parse_special=True)


def chat_text(
    vocab: Vocab,
    messages: Sequence[Message],
    *,
    answer: bool = False,
    tools: Sequence[Message] | None = None,
    more: Mapping[str, Any] | None = None,
) -> str:
    """System messages that the template refuses or drops become parts of their neighbours.

    Args:
        vocab: the model's tokenizer.
        messages: such as {"role": "user", "content": "Hi"}.
        answer: end with the beginning of the assistant's answer. If the last message is the assistant's, it is that.
        tools: functions that the assistant may call, as JSON schemas.
        more: further variables of the template, such as enable_thinking.

    Returns:
        A conversation as text, by the model's own chat template.

    Raises:
        UsageError: the model has no chat template, `messages` are no messages, the template refuses them, or the last
            one cannot be continued.
        ModelError: the template is broken.
    """
    if vocab.chat_template is None:
        raise UsageError("this model has no chat template: use --raw (in Python: generate with a text)")
    for message in messages:
        # A template would silently show nothing of it, or fail.
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise UsageError(f"a message is {message!r}, but must be like {{'role': 'user', 'content': 'Hi'}}")
    variables = dict(more or {}) | ({"tools": tools} if tools else {})
    if not (answer and messages and messages[-1].get("role") == "assistant"):
        return _with_systems(vocab, messages, variables | {"add_generation_prompt": answer})
    text = _with_systems(vocab, _marked(messages), variables | {"add_generation_prompt": False})
    begun, shown, _ = text.rpartition(MARK)
    if not shown:
        raise UsageError("the model's chat template does not show the assistant's last message: leave it out")
    return begun


def _marked(messages: Sequence[Message]) -> list[Message]:
    """Mark the end of the assistant's last message, to cut the rendered text there; raises UsageError."""
    *before, last = messages
    content = last.get("content") or ""
    if before and before[-1].get("role") == "assistant":
        raise UsageError("the last two messages are the assistant's, but only one can be continued: join them")
    if last.get("tool_calls"):
        raise UsageError("the assistant's last message calls a tool: give the tool's result after it")
    if not isinstance(content, str):
        raise UsageError(f"the content of the assistant's last message is {content!r}, but must be a text")
    return [*before, {**last, "content": content + MARK}]


def _with_systems(vocab: Vocab, messages: Sequence[Message], variables: Mapping[str, Any]) -> str:
    """Render the messages as they are, else with later system messages joined to neighbours, else with all joined.

    The first that shows every system message is taken, else the last that renders.
    """
    later, without = _with_fewer_systems(messages, 1), _with_fewer_systems(messages, 0)
    if without == messages:
        return _rendered(vocab, messages, variables)
    refused: UsageError | ModelError | None = None
    text: str | None = None
    for one in (messages, later, without):
        try:
            text = _rendered(vocab, one, variables)
            if _shows_systems(vocab, one, variables):
                return text
        except (UsageError, ModelError) as error:
            refused = refused or error
    if text is None and refused:
        raise refused
    return text or ""


def _with_fewer_systems(messages: Sequence[Message], kept: int) -> Sequence[Message]:
    """Messages whose system messages, but those among the first `kept` messages, are parts of their neighbours.

    Many templates know system messages at the beginning only. The message before takes the text, so that the rendered
    beginning of a conversation stays as it was. If the assistant wrote that one, the message after takes it.
    """
    found, waiting = list[Message](), list[str]()
    for number, message in enumerate(messages):
        text = message.get("content")
        if number >= kept and message.get("role") in SYSTEM and isinstance(text, str):
            if found and _takes_text(found[-1]):
                found[-1] = {**found[-1], "content": f"{found[-1]['content']}\n\n{text}"}
            else:
                waiting.append(text)
            continue
        if waiting and _takes_text(message):
            message = {**message, "content": "\n\n".join([*waiting, message["content"]])}
        elif waiting:
            found.append({"role": "user", "content": "\n\n".join(waiting)})
        waiting = []
        found.append(message)
    return [*found, {"role": "user", "content": "\n\n".join(waiting)}] if waiting else found


def _takes_text(message: Message) -> bool:
    return message.get("role") in (*SYSTEM, "user", "tool") and isinstance(message.get("content"), str)


def _shows_systems(vocab: Vocab, messages: Sequence[Message], variables: Mapping[str, Any]) -> bool:
    """False if the template drops a system message, found by other texts in their place."""
    marks = {i: f"system-message-{i}." for i, message in enumerate(messages) if message.get("role") in SYSTEM}
    marked = [{**message, "content": marks[i]} if i in marks else message for i, message in enumerate(messages)]
    text = _rendered(vocab, marked, variables)
    return all(mark in text for mark in marks.values())


def _rendered(vocab: Vocab, messages: Sequence[Message], variables: Mapping[str, Any]) -> str:
    """Errors as for `chat_text`."""
    from jinja2 import TemplateError

    assert vocab.chat_template is not None
    bos, eos = ("" if token is None else vocab.token_text(token) for token in (vocab.bos_id, vocab.eos_id))
    try:
        firefunction = {"functions": "", "datetime": _now("%d %B %Y")}  # its template needs them
        text: str = _compiled(vocab.chat_template).render(
            {**firefunction, **variables, "messages": messages, "bos_token": bos, "eos_token": eos}
        )
        return text
    except TemplateError as error:
        raise ModelError(f"the model's chat template does not work: {error}") from error
    except (
        TypeError,
        ValueError,
        AttributeError,
        ArithmeticError,
        LookupError,
        RecursionError,
    ) as error:  # the template's own, on odd messages
        raise UsageError(f"the model's chat template cannot show these messages: {error}") from error
